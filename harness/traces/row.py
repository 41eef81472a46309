"""A row of a trace, whatever its format, and what the modules of the formats share."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, ParamSpec

from harness.errors import BadLines

P = ParamSpec("P")


class Row(NamedTuple):
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


def tried(bad: BadLines, read: Callable[P, Row], *args: P.args, **more: P.kwargs) -> Iterator[Row]:
    """The row that `read` makes of a line; nothing of a line that cannot be used, which goes to `bad`."""
    try:
        yield read(*args, **more)
    except BadLine as error:
        bad.add(error.line, error.problem)


def columns(header: bytes) -> list[str]:
    """The names in the first line of a CSV file."""
    text = header.decode("utf-8", errors="replace")
    return [name.strip().strip('"') for name in text.strip().split(",")]


def places(header: bytes, names: Sequence[str]) -> list[int]:
    """Where the columns of these names are. Raises BadLine that says which are missing."""
    found = columns(header)
    missing = [name for name in names if name not in found]
    if missing:
        raise BadLine(1, f"the columns {', '.join(missing)} are missing; there are {', '.join(found)[:200]}")
    return [found.index(name) for name in names]


def cell(cells: Sequence[bytes], place: int, line: int, name: str) -> bytes:
    """A cell of a CSV line. Raises BadLine when the line is too short."""
    if place >= len(cells):
        raise BadLine(line, f"there are {len(cells)} columns, and {name} would be number {place + 1}")
    return cells[place].strip().strip(b'"')


def count(raw: bytes, line: int, name: str) -> int:
    """A number of tokens as written. Raises BadLine."""
    try:
        return int(raw)
    except ValueError:
        raise BadLine(line, f"{name} is {raw.decode(errors='replace')!r}, and a whole number is expected") from None
