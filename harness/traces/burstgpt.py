"""BurstGPT: CSV with times in seconds since the collection began; a failed request has 0 response tokens.

Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type; later releases add Session ID and Elapsed time
(https://github.com/HPMLL/BurstGPT).
"""

from collections.abc import Iterator
from typing import BinaryIO

from harness.errors import BadLines
from harness.scenario.scenario import Trace
from harness.traces.row import TraceRow, columns, places, with_care

NAMES = ("Timestamp", "Request tokens", "Response tokens")


def matches(first: bytes) -> bool:
    return set(NAMES) <= set(columns(first))


def rows(file: BinaryIO, _: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of the file. Lines that cannot be used go to `bad`. Raises BadLine."""
    where = places(file.readline(), NAMES)
    at, prompt, output = where.values()
    for number, line in enumerate(file, start=2):
        cells = line.split(b",")
        try:
            yield TraceRow(number, float(cells[at]), int(cells[prompt]), int(cells[output]))
        except (ValueError, IndexError):
            if line.strip():
                yield from with_care(cells, number, where, float, "seconds are", bad)
