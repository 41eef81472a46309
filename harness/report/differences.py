"""The table of what differs between the manifests of some sides, for the terminal and for Markdown."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.report.markdown import grid
from harness.report.words import one_line
from harness.summary import Difference

EQUAL = "Nothing that is recorded differs between them."
_MOST = 300  # characters of a value that people are shown; JSON has all of it


def print_differences(found: Sequence[Difference], sides: Sequence[str], console: Console) -> None:
    """A line for each key that differs. What is equal is not shown."""
    if not found:
        console.print(Text(EQUAL, "dim"))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("What differs", *sides):
        table.add_column(Text(one_line(heading)), overflow="fold")
    for difference in found:
        table.add_row(Text(difference.key), *(Text(_short(value)) for value in difference.values))
    console.print(table)


def markdown(found: Sequence[Difference], sides: Sequence[str]) -> str:
    """The same for a pull request."""
    if not found:
        return EQUAL
    return grid(["What differs", *sides], [[one.key, *map(_short, one.values)] for one in found])


def _short(value: str) -> str:
    text = one_line(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
