"""What does not happen at once: records, which wait for an idle moment, and calls of listeners, which may block."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent

_MOST = 1000  # that wait: a process which is never idle does the oldest when another one comes
_SLICE_NS = 500_000  # of work before the sockets are looked at again
_BACKLOG = 10_000  # events that wait for a listener: the log then has a warning

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


class Listeners:
    """Those of Locust's `request` event.

    They are called after the record was made, in the hub or in a greenlet that is being killed. Neither can wait for a
    socket. So Locust's own table and listeners of the harness, which never wait, are called at once, and one greenlet
    calls all others, in the order in which the requests ended.
    """

    def __init__(self) -> None:
        self.patience_s = 30.0  # of `finish`
        self._waiting: deque[tuple[list[Any], dict[str, Any]]] = deque()
        self._greenlet: gevent.Greenlet[[], None] | None = None
        self._warned = False

    def fire(self, hook: Any, *, timed: bool = True, **event: Any) -> None:
        """`hook`: Locust's. `timed`: False where the response time is that of a cut, and Locust's table takes none."""
        first: list[Any] = []
        others: list[Any] = []
        for listener in hook._handlers:
            module = str(getattr(listener, "__module__", ""))
            of_one = type(hook)()  # for itself: Locust then logs what it raises, and the next one is called
            of_one.add_listener(listener)
            (first if module == "locust.runners" or module.startswith("harness.") else others).append(of_one)
        _call(first, event if timed else event | {"response_time": None})
        if not others:
            return
        self._waiting.append((others, event))
        if self._greenlet is None or self._greenlet.dead:
            self._greenlet = gevent.spawn(self._call_all)
        if len(self._waiting) > _BACKLOG and not self._warned:
            self._warned = True
            logger.warning("listeners of `request` are slower than the load: %d events wait for them", _BACKLOG)

    @property
    def waiting(self) -> int:
        """How many events still wait."""
        return len(self._waiting)

    def finish(self) -> None:
        """Wait until all have been called, but no longer than `patience_s`."""
        if self._greenlet is gevent.getcurrent():  # a listener ends the test
            self._call_all()
        elif self._greenlet is not None:
            self._greenlet.join(self.patience_s)

    def _call_all(self) -> None:
        while self._waiting:
            _call(*self._waiting.popleft())


def _call(hooks: list[Any], event: dict[str, Any]) -> None:
    for hook in hooks:
        try:
            hook.fire(**event)
        except (Exception, gevent.Timeout) as error:  # which Locust would raise in the user's task
            logger.error("a listener of `request` raised %s, which ends neither user nor test", type(error).__name__)
