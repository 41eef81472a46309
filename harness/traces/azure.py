"""Azure LLM inference traces of 2023 and 2024: CSV with the wall clock of each request.

TIMESTAMP,ContextTokens,GeneratedTokens, such as 2023-11-16 18:15:46.6805900,374,44; later files end the time with
+00:00 (https://github.com/Azure/AzurePublicDataset).
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import BinaryIO

from harness.errors import BadLines
from harness.scenario.scenario import Trace
from harness.traces.row import TraceRow, columns, places, with_care

NAMES = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MINUTE = len("2023-11-16 18:15")
_WANTED = "a time like 2023-11-16 18:15:46.68 is"


def matches(first: bytes) -> bool:
    return set(NAMES) <= set(columns(first))


def rows(file: BinaryIO, _: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of the file, in Unix time. Lines that cannot be used go to `bad`. Raises BadLine."""
    where = places(file.readline(), NAMES)
    when, prompt, output = where.values()
    minute, minute_s = b"", 0.0  # most rows are of the minute of the row before
    for number, line in enumerate(file, start=2):
        cells = line.split(b",")
        try:
            at = cells[when]
            if at[:_MINUTE] != minute:
                minute_s = _unix(at[:_MINUTE])
                minute = at[:_MINUTE]
            at_s = minute_s + _seconds(at[_MINUTE:])
            yield TraceRow(number, at_s, int(cells[prompt]), int(cells[output]))
        except (ValueError, IndexError):
            if line.strip():
                yield from with_care(cells, number, where, _at_s, _WANTED, bad)


def _at_s(at: bytes) -> float:
    return _unix(at[:_MINUTE]) + _seconds(at[_MINUTE:])


def _unix(minute: bytes) -> float:
    if len(minute) < _MINUTE:
        raise ValueError
    return datetime.fromisoformat(minute.decode("ascii")).replace(tzinfo=UTC).timestamp()


def _seconds(rest: bytes) -> float:
    """`:46.6805900`, with or without a time zone, which is the same in all rows and so changes nothing."""
    if not rest.startswith(b":"):
        raise ValueError
    zone = max(rest.rfind(b"+"), rest.rfind(b"-"))
    seconds = float(rest[1:] if zone < 0 else rest[1:zone]) if not rest.endswith(b"Z") else float(rest[1:-1])
    if not 0 <= seconds < 61:
        raise ValueError
    return seconds
