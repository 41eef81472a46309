"""BurstGPT: CSV with times in seconds since the collection began; a failed request has 0 response tokens.

Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type; later releases add Session ID and Elapsed time
(https://github.com/HPMLL/BurstGPT).
"""

from collections.abc import Iterator
from typing import BinaryIO

from harness.errors import BadLines
from harness.scenario.scenario import Trace
from harness.traces.row import BadLine, Row, cell, columns, count, places, tried

NAMES = ("Timestamp", "Request tokens", "Response tokens")


def matches(first: bytes) -> bool:
    return set(NAMES) <= set(columns(first))


def rows(file: BinaryIO, _: Trace, bad: BadLines) -> Iterator[Row]:
    """The rows in the order of the file. Lines that cannot be used go to `bad`. Raises BadLine."""
    at, prompt, output = places(file.readline(), NAMES)
    for number, line in enumerate(file, start=2):
        cells = line.split(b",")
        try:
            yield Row(number, float(cells[at]), int(cells[prompt]), int(cells[output]))
        except (ValueError, IndexError):
            if line.strip():
                yield from tried(bad, _with_care, cells, number, (at, prompt, output))


def _with_care(cells: list[bytes], number: int, where: tuple[int, int, int]) -> Row:
    """A line in quotes, or one that is wrong."""
    at, prompt, output = (cell(cells, place, number, name) for place, name in zip(where, NAMES, strict=True))
    try:
        at_s = float(at)
    except ValueError:
        problem = f"{NAMES[0]} is {at.decode(errors='replace')!r}, and seconds are expected"
        raise BadLine(number, problem) from None
    return Row(number, at_s, count(prompt, number, NAMES[1]), count(output, number, NAMES[2]))
