"""A row of a trace, whatever its format, and what the modules of the formats share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.errors import BadLines


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
