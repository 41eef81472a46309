"""How many users there are at which time of a load whose stages say so."""

import time
from collections.abc import Callable

import gevent
from locust.runners import STATE_RUNNING, STATE_SPAWNING, Runner

from harness.errors import HarnessError
from harness.load.course import Course
from harness.load.master import Master

_LOOK_S = 0.1
_RATE_S = 0.001  # in which users come, where nobody says how long that takes


def follow(
    course: Course | Master, runner: Runner, ramp_s: float, patience_s: float, give_up: Callable[[HarnessError], None]
) -> None:
    """As many users as the stage says that is going on, until the load ends. Each stage has `patience_s` for that.

    It is none of Locust's shapes: in their loop the start of one stage's users blocks, so that later stages may be left
    out, and under it a headless process hears no SIGTERM.
    """
    asked, since, there = course.users(), time.monotonic(), False
    stage = 0
    while True:
        gevent.sleep(_LOOK_S)
        if course.stage() != stage:
            stage, before, there, since = course.stage(), asked, False, time.monotonic()
            asked = course.users()
            if asked != before:
                runner.start(asked, abs(asked - before) / max(ramp_s, _RATE_S))
        if there or runner.state not in (STATE_RUNNING, STATE_SPAWNING):
            continue
        if runner.user_count == asked:
            there = True
            course.users_are_there()
        elif time.monotonic() - since > patience_s:
            give_up(HarnessError(f"there are {runner.user_count} users after {patience_s:.0f} s, and not {asked}"))
            return
