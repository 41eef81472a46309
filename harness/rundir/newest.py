"""The newest lines of files that grow: what a person sees while a run goes on."""

import os
from pathlib import Path

_MOST_BYTES = 4_000_000  # of one look; with more than that, the oldest are left out


class Tail:
    """The whole lines that were added since the last look. A file that is not there has none."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = 0
        self._torn = b""
        if from_end and path.exists():
            self._offset = path.stat().st_size

    def lines(self) -> list[bytes]:
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            skipped = os.fstat(file).st_size - self._offset - _MOST_BYTES
            if skipped > 0:
                self._offset += skipped
                self._torn = b""
            new = os.pread(file, _MOST_BYTES, self._offset)
        finally:
            os.close(file)
        self._offset += len(new)
        whole, end, rest = (self._torn + new).rpartition(b"\n")
        self._torn = rest
        found = whole.split(b"\n") if end else []
        return found[1:] if skipped > 0 else found
