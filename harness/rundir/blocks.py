"""A long file of lines, read in blocks by several processes.

The division depends on the file alone, and results come in the order of the file: it never shows in a number how many
processes there were.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.errors import HarnessError
from harness.files import UNDECODABLE, open_file
from harness.rundir.records import Request

BLOCK_BYTES = 16 * 2**20
PARALLEL_BYTES = 64 * 2**20  # below that, starting processes takes longer than they save
MOST_PROCESSES = 4

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
    return min(MOST_PROCESSES, cores)


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
