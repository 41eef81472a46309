"""Files of samples, such as metrics.jsonl: one line a sample, each with the cell that it belongs to."""

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec


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
