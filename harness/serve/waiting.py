"""What a wait for a server needs to know about the server's keeper, and waiting while it is watched."""

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from harness.errors import ServerError
from harness.rundir.manifest import Phase
from harness.serve.logfile import LogFile

POLL_S = 0.2
DEATH_S = 1.0  # the connections of a process that dies break before its supervisor notices

T = TypeVar("T")


class Waiting(Struct, frozen=True):
    """How a server is watched while it becomes ready."""

    dead: Callable[[], ServerError | None]  # cheap: is called at every look
    log: LogFile
    timeout_s: float
    on_progress: Callable[[str], None]
    orphans: Callable[[], list[str]] = list  # engine processes that lost their server, in words


def death(waiting: Waiting) -> ServerError | None:
    """Why the server died, asked after it broke a request; None where it lives on."""
    until = time.monotonic() + DEATH_S
    while (dead := waiting.dead()) is None and time.monotonic() < until:
        time.sleep(POLL_S / 4)
    return dead


class Phases:
    """The steps of a start, each timed as it is done: they follow each other without a gap."""

    def __init__(self, on_progress: Callable[[str], None] | None = None) -> None:
        self.all: list[Phase] = []
        self._on_progress = on_progress
        self._began = self._mark = time.monotonic()

    def done(self, name: str) -> None:
        now = time.monotonic()
        self.all.append(Phase(name=name, seconds=now - self._mark))
        self._mark = now
        if self._on_progress is not None:
            self._on_progress(f"{name} after {now - self._began:.1f} s")


def watched(call: Callable[[], T], waiting: Waiting, look: Callable[[], None] = lambda: None) -> T:
    """The result of `call`, which may take minutes; raises what it raises, and why the server died, when it does.

    It runs in a thread that nobody has to wait for, so Ctrl-C ends the wait at once. `look` is called all the time and
    may raise, too.
    """
    results: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(),))
        except Exception as error:
            results.put(error)

    threading.Thread(target=work, name="waiting for the server", daemon=True).start()
    while True:
        try:
            result = results.get(timeout=POLL_S)
            break
        except queue.Empty:
            dead = waiting.dead()
        if dead is not None:
            raise dead
        look()
    if isinstance(result, Exception):
        raise result
    return result[0]
