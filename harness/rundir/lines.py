"""Files of lines: a long one is read in blocks by several processes, samples are appended and followed.

The division depends on the file alone, and results come in the order of the file: it never shows in a number how many
processes there were.
"""

import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from harness.errors import HarnessError
from harness.files import UNDECODABLE, open_file
from harness.rundir.records import Request

BLOCK_BYTES = 16 * 2**20
PARALLEL_BYTES = 64 * 2**20  # below that, starting processes takes longer than they save
MAX_PROCESSES = 4

T = TypeVar("T")
Run = Callable[[Callable[["Block"], T]], Iterable[T]]


class Block(msgspec.Struct, frozen=True):
    """Whole lines of a file: from one place in it to another."""

    path: str
    start: int
    end: int

    def lines(self) -> Iterator[bytes]:
        with open_file(self.path) as file:
            file.seek(self.start)
            left = self.end - self.start
            for line in file:
                yield line
                left -= len(line)
                if left <= 0:
                    return


class Lines(msgspec.Struct):
    """How many lines a block had, and which of them (from 1 on) could not be decoded."""

    count: int = 0
    damaged: list[int] = []


def blocks_of(path: Path, block_bytes: int | None = None) -> list[Block]:
    """The file in blocks of about that many bytes; none when it is empty or not there."""
    if not path.exists():
        return []
    size = path.stat().st_size
    places = [0]
    with open_file(path) as file:
        for place in range(block_bytes or BLOCK_BYTES, size, block_bytes or BLOCK_BYTES):
            file.seek(place - 1)  # a block that ends with its line ends there
            file.readline()
            if places[-1] < file.tell() < size:
                places.append(file.tell())
    ends = [*places[1:], size]
    return [Block(str(path), start, end) for start, end in zip(places, ends, strict=True) if end > start]


def requests_in(block: Block, lines: Lines) -> Iterator[Request]:
    """The records of a block; `lines` tells afterwards what was read. Torn lines are skipped."""
    decode = msgspec.json.Decoder(Request).decode
    for line in block.lines():
        lines.count += 1
        try:
            yield decode(line)
        except UNDECODABLE:
            lines.damaged.append(lines.count)


def in_file(parts: Iterable[Lines]) -> list[int]:
    """The damaged lines of all blocks, counted from the start of the file."""
    damaged: list[int] = []
    before = 0
    for part in parts:
        damaged += [before + number for number in part.damaged]
        before += part.count
    return damaged


def processes() -> int:
    """How many processes may read at once: as many as there are cores for this one, within reason."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_PROCESSES, cores)


@contextmanager
def reader(blocks: list[Block]) -> Iterator[Run[Any]]:
    """Gives a function that calls another one for each block and yields the results in order.

    A long file is read by several processes: then function and results must be such as can be pickled. They are
    started anew ("spawn") and not forked, since this process may have threads; a script that gets here therefore needs
    the usual `if __name__ == "__main__":`. Raises HarnessError when one dies.
    """
    size = blocks[-1].end if blocks else 0
    count = min(processes(), len(blocks))
    if size < PARALLEL_BYTES or count < 2:
        yield lambda function: map(function, blocks)
        return
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield lambda function: pool.map(function, blocks)
        except BrokenProcessPool:
            raise HarnessError(
                f"{blocks[0].path}: a process that read it was killed",
                next_step="Was memory short? `dmesg` says so. It needs about 150 MB for each of its processes.",
            ) from None


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
_MAX_BYTES = 4_000_000  # of one look; with more than that, the oldest are left out


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
                skipped = os.fstat(file.fileno()).st_size - self._offset - _MAX_BYTES
                if skipped > 0:
                    self._offset += skipped
                    self._torn = b""
                new = os.pread(file.fileno(), _MAX_BYTES, self._offset)
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
