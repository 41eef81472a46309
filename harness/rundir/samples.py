"""Files of samples, such as metrics.jsonl: one line a sample, each with the cell that it belongs to.

A run in progress appends to them: a reader gets the whole lines that were added since it last read."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from harness.files import UNDECODABLE, open_file


class OfCell(Protocol):
    @property
    def cell(self) -> str: ...


S = TypeVar("S", bound=OfCell)


def append_sample(path: Path, sample: OfCell) -> None:
    """One more line, in one write, so that a reader sees whole lines."""
    line = msgspec.json.encode(sample) + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def by_cell(found: Iterable[S]) -> dict[str, list[S]]:
    """What belongs to each cell, in the order in which it was found."""
    cells: dict[str, list[S]] = defaultdict(list)
    for one in found:
        cells[one.cell].append(one)
    return cells


_FRESH_S = 6.0  # an older sample says nothing of now
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
            with open_file(self.path) as file:
                skipped = os.fstat(file.fileno()).st_size - self._offset - _MOST_BYTES
                if skipped > 0:
                    self._offset += skipped
                    self._torn = b""
                new = os.pread(file.fileno(), _MOST_BYTES, self._offset)
        except OSError:
            return []
        self._offset += len(new)
        whole, end, rest = (self._torn + new).rpartition(b"\n")
        self._torn = rest
        found = whole.split(b"\n") if end else []
        return found[1:] if skipped > 0 else found


class Samples:
    """What is sampled of a server or its machine from now on, as metrics.jsonl and telemetry.jsonl have it."""

    def __init__(self, path: Path, cell: str | None = None) -> None:
        """`cell`: only its own; None: all."""
        self.newest: dict[str, Any] | None = None  # None: there was none lately
        self._tail = Tail(path, from_end=True)
        self._cell = cell

    def look(self) -> list[dict[str, Any]]:
        """Those that came since the last look: a few short lines, so it takes well below a millisecond."""
        came = [sample for line in self._tail.lines() if (sample := self._decoded(line)) is not None]
        self.newest = came[-1] if came else self.newest
        if self.newest is not None and time.time() - self.newest["wall_s"] > _FRESH_S:
            self.newest = None
        return came

    def _decoded(self, line: bytes) -> dict[str, Any] | None:
        try:
            sample = msgspec.json.decode(line)
        except UNDECODABLE:
            return None
        known = isinstance(sample, dict) and isinstance(sample.get("wall_s"), float)
        return sample if known and self._cell in (None, sample.get("cell")) else None
