"""A server's log on disk: written from the first line on, secrets blacked out, its end at hand for errors."""

import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from harness.files import open_file
from harness.redact import without

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
        return without(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")
