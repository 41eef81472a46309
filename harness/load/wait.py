"""Waiting for what other greenlets, processes or machines bring about."""

import math
import time
from collections.abc import Callable

import gevent

LOOK_S = 0.05


def until(so: Callable[[], object], at_most_s: float = math.inf, look_s: float = LOOK_S) -> None:
    """Look again and again, until it is so or the time is over."""
    end_s = time.monotonic() + at_most_s
    while not so() and time.monotonic() < end_s:
        gevent.sleep(look_s)
