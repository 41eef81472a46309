"""The formats of public traces: how each is recognised and read. `requests.py` reads our own records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from harness.errors import BadLines
from harness.files import open_file
from harness.scenario.scenario import Trace


class TraceRow(NamedTuple):
    """One request of a trace."""

    line: int  # of the file, from 1 on
    at_s: float  # seconds; the zero is the format's own
    prompt_tokens: int
    output_tokens: int
    more: int = -1  # what else the format knows: mooncake: where the line begins; requests: its conversation


class BadLine(Exception):
    """A line that cannot be used; its number and what is wrong with it."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line
        self.problem = problem


def with_care(
    cells: Sequence[bytes],
    line: int,
    where: Mapping[str, int],
    seconds: Callable[[bytes], float],
    wanted: str,
    bad: BadLines,
) -> Iterator[TraceRow]:
    """The row of a CSV line that may be in quotes; nothing of one that cannot be used, which goes to `bad`.

    `where`: the columns of time, prompt and output, by name. `seconds` raises ValueError for one that is no `wanted`.
    """
    when, prompts, outputs = where
    try:
        at, prompt, output = (_cell(cells, place, line, name) for name, place in where.items())
        try:
            at_s = seconds(at)
        except ValueError:
            problem = f"{when} is {at.decode(errors='replace')!r}, and {wanted} expected"
            raise BadLine(line, problem) from None
        yield TraceRow(line, at_s, _count(prompt, line, prompts), _count(output, line, outputs))
    except BadLine as error:
        bad.add(error.line, error.problem)


def columns(header: bytes) -> list[str]:
    """The names in the first line of a CSV file."""
    text = header.decode("utf-8", errors="replace")
    return [name.strip().strip('"') for name in text.strip().split(",")]


def places(header: bytes, names: Sequence[str]) -> dict[str, int]:
    """Where the columns of these names are. Raises BadLine that says which are missing."""
    found = columns(header)
    missing = [name for name in names if name not in found]
    if missing:
        raise BadLine(1, f"the columns {', '.join(missing)} are missing; there are {', '.join(found)[:200]}")
    return {name: found.index(name) for name in names}


def _cell(cells: Sequence[bytes], place: int, line: int, name: str) -> bytes:
    """A cell of a CSV line. Raises BadLine when the line is too short."""
    if place >= len(cells):
        raise BadLine(line, f"there are {len(cells)} columns, and {name} would be number {place + 1}")
    return cells[place].strip().strip(b'"')


def _count(raw: bytes, line: int, name: str) -> int:
    """A number of tokens as written. Raises BadLine."""
    try:
        return int(raw)
    except ValueError:
        raise BadLine(line, f"{name} is {raw.decode(errors='replace')!r}, and a whole number is expected") from None


# BurstGPT: CSV with times in seconds since the collection began; a failed request has 0 response tokens.
#
# Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type; later releases add Session ID and Elapsed time
# (https://github.com/HPMLL/BurstGPT).
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def is_burstgpt(first: bytes) -> bool:
    return set(BURSTGPT_COLUMNS) <= set(columns(first))


def burstgpt_rows(file: BinaryIO, _: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of the file. Lines that cannot be used go to `bad`. Raises BadLine."""
    where = places(file.readline(), BURSTGPT_COLUMNS)
    at, prompt, output = where.values()
    for number, line in enumerate(file, start=2):
        cells = line.split(b",")
        try:
            yield TraceRow(number, float(cells[at]), int(cells[prompt]), int(cells[output]))
        except (ValueError, IndexError):
            if line.strip():
                yield from with_care(cells, number, where, float, "seconds are", bad)


# Azure LLM inference traces of 2023 and 2024: CSV with the wall clock of each request.
#
# TIMESTAMP,ContextTokens,GeneratedTokens, such as 2023-11-16 18:15:46.6805900,374,44; later files end the time with
# +00:00 (https://github.com/Azure/AzurePublicDataset).
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MINUTE = len("2023-11-16 18:15")
_AZURE_TIME = "a time like 2023-11-16 18:15:46.68 is"


def is_azure(first: bytes) -> bool:
    return set(AZURE_COLUMNS) <= set(columns(first))


def azure_rows(file: BinaryIO, _: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of the file, in Unix time. Lines that cannot be used go to `bad`. Raises BadLine."""
    where = places(file.readline(), AZURE_COLUMNS)
    when, prompt, output = where.values()
    minute, minute_s = b"", 0.0  # most rows are of the minute of the row before
    for number, line in enumerate(file, start=2):
        cells = line.split(b",")
        try:
            at = cells[when]
            if at[:_MINUTE] != minute:
                minute_s = _minute_s(at[:_MINUTE])
                minute = at[:_MINUTE]
            at_s = minute_s + _seconds(at[_MINUTE:])
            yield TraceRow(number, at_s, int(cells[prompt]), int(cells[output]))
        except (ValueError, IndexError):
            if line.strip():
                yield from with_care(cells, number, where, _azure_time_s, _AZURE_TIME, bad)


def _azure_time_s(at: bytes) -> float:
    return _minute_s(at[:_MINUTE]) + _seconds(at[_MINUTE:])


def _minute_s(minute: bytes) -> float:
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


# Mooncake: JSON Lines with times in milliseconds and the blocks of each prompt, 512 tokens each.
#
# {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}: requests with the same ids
# at the start have the same prefix (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of the file. Other keys are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def is_mooncake(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and b'"input_length"' in first and b'"timestamp"' in first


def mooncake_rows(file: BinaryIO, trace: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of the file. Lines that cannot be used go to `bad`, also where their ids fit no block."""
    decode = msgspec.json.Decoder(MooncakeLine).decode
    begins = file.tell()
    for number, raw in enumerate(file, start=1):
        if raw.strip():
            try:
                line = decode(raw)
                ids, needed = len(line.hash_ids), -(-line.input_length // trace.block_tokens)
                if ids and abs(ids - needed) > 1:
                    raise ValueError(
                        f"{line.input_length:,} tokens in blocks of {trace.block_tokens} need {needed} hash_ids, and "
                        f"there are {ids}; say with trace.block_tokens how large the blocks are",
                    )
            except (ValueError, RecursionError) as error:  # msgspec's are such
                bad.add(number, str(error))
            else:
                more = begins if ids else -1
                yield TraceRow(number, line.timestamp / 1000, line.input_length, line.output_length, more)
        begins += len(raw)


def mooncake_hash_ids(path: Path, begins: int) -> list[int]:
    """The blocks of the prompt whose line begins there: they stay in the file, however long that is."""
    with open_file(path) as file:
        file.seek(begins)
        return msgspec.json.decode(file.readline(), type=MooncakeLine).hash_ids
