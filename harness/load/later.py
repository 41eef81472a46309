"""What can wait until nothing else is to be done: it then costs neither a stamp nor a request that is to go out."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent

_MOST = 1000  # that wait: a process which is never idle does the oldest when another one comes
_SLICE_NS = 500_000  # of work before the sockets are looked at again

logger = logging.getLogger(__name__)


class Later:
    """Does things in the hub, in order, when no socket, timer or greenlet is ready. Made after the fork."""

    def __init__(self) -> None:
        loop: Any = gevent.get_hub().loop
        self._idle = loop.idle()
        self._waiting: deque[Callable[[], object]] = deque()

    def do(self, what: Callable[[], object]) -> None:
        """`what` must neither block nor switch to another greenlet."""
        if not self._waiting:
            self._idle.start(self._some)
        self._waiting.append(what)
        if len(self._waiting) > _MOST:
            self._next()

    def finish(self) -> None:
        """Do all of it now."""
        while self._waiting:
            self._next()
        self._idle.stop()

    def _some(self) -> None:
        until_ns = time.monotonic_ns() + _SLICE_NS
        while self._waiting and time.monotonic_ns() < until_ns:
            self._next()
        if not self._waiting:
            self._idle.stop()

    def _next(self) -> None:
        what = self._waiting.popleft()
        try:
            what()
        except Exception:
            logger.exception("defect in the load generator")
