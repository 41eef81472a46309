"""Watching a server while it starts: its log on disk, secrets blacked out, and waits that notice its death."""

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from harness.errors import ServerError
from harness.files import open_file
from harness.redact import masked
from harness.rundir.manifest import Phase

TAIL_LINES = 25
LINE_CHARS = 100
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z ")  # put there by the Docker Engine


class LogFile:
    """Copies a stream of bytes to a file in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def follow(self, stream: Callable[[], Iterable[bytes]]) -> None:
        """Start to copy what `stream()` yields."""
        self._thread = threading.Thread(target=self._copy, args=(stream,), name="server-log", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the stream has ended; it does so by itself when its container has stopped."""
        if self._thread is not None:
            self._thread.join(2.0)

    def tail(self) -> str:
        """The last lines, without the engine's time stamps."""
        return "\n".join(self.text().splitlines()[-TAIL_LINES:])

    def last_line(self) -> str:
        """The last line that says something, shortened for a terminal."""
        lines = [line.strip() for line in self.text(4096).splitlines() if line.strip()]
        return lines[-1][:LINE_CHARS] if lines else "no output yet"

    def text(self, limit: int = 4_000_000) -> str:
        """The log, at most its last `limit` bytes, without the engine's time stamps."""
        with open_file(self.path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - limit))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(_STAMP.sub("", line) for line in text.splitlines())

    def _copy(self, stream: Callable[[], Iterable[bytes]]) -> None:
        rest = b""
        with self.path.open("ab") as file:
            try:
                for block in stream():
                    *whole, rest = (rest + block).split(b"\n")
                    for line in whole:
                        file.write(self._clean(line) + b"\n")
                    file.flush()
            except Exception as error:
                rest += f"\n[the log ends here: {error}]".encode()
            if rest:
                file.write(self._clean(rest) + b"\n")

    def _clean(self, line: bytes) -> bytes:
        return masked(line.decode(errors="surrogateescape"), "known").encode(errors="surrogateescape")


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

    It runs in a daemon thread, so Ctrl-C ends the wait at once. `look` is called all the time and
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
