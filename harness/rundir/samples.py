"""Files of samples, such as metrics.jsonl: one line a sample, each with the cell that it belongs to."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec


class Sample(Protocol):
    @property
    def cell(self) -> str: ...


S = TypeVar("S", bound=Sample)


def append_sample(path: Path, sample: Sample) -> None:
    """One more line, in one write, so that a reader sees whole lines."""
    line = msgspec.json.encode(sample) + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def samples_by_cell(path: Path, type_: type[S]) -> dict[str, list[S]]:
    """The samples by cell, in the order of the file; a torn line is skipped."""
    by_cell: dict[str, list[S]] = defaultdict(list)
    if not path.exists():
        return by_cell
    decoder = msgspec.json.Decoder(type_)
    with path.open("rb") as file:
        for line in file:
            try:
                sample = decoder.decode(line)
            except msgspec.DecodeError:
                continue
            by_cell[sample.cell].append(sample)
    return by_cell
