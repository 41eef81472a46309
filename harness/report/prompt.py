"""What a summary shows at a Python prompt and in a notebook: the main numbers of its rows as a page."""

import io
from collections.abc import Sequence

from rich.console import Console

from harness.base.units import significant
from harness.numbers.summary import Row, Summary
from harness.report import html
from harness.report.elements import Grid, TableColumn
from harness.report.terminal import print_page

SHOWN_ROWS = 7  # at a prompt
_WIDTH = 1000  # columns of a prompt: a table is not broken there
_COLUMNS = (
    TableColumn("name", "Row", group="name"),
    *(TableColumn(title, title) for title in ("tok/s", "TTFT p50 ms", "TPOT p50 ms", "Errors")),
    TableColumn("word", "Verdict", group="name"),
)


def prompt_text(summary: Summary) -> str:
    """Return a table of at most ten lines."""
    grid = summary_grid(summary)
    if (more := len(grid.rows) - SHOWN_ROWS) > 0:
        grid = summary_grid(summary, [*grid.rows[:SHOWN_ROWS], [f"... {more} more", *[""] * (len(_COLUMNS) - 1)]])
    text = io.StringIO()
    print_page([grid], Console(file=text, width=_WIDTH, color_system=None, force_jupyter=False))
    return text.getvalue().rstrip("\n")


def notebook_html(summary: Summary) -> str:
    """Return the table with all rows."""
    return str(html.page_template("parts.html.j2").make_module({"anchors": ()}).show([summary_grid(summary)]))  # type: ignore[attr-defined]


def summary_grid(summary: Summary, rows: Sequence[Sequence[str]] | None = None) -> Grid:
    """The table of a summary, or of these rows of it."""
    state = "not checked" if summary.valid is None else "VALID" if summary.valid else "INVALID"
    verdicts = (
        {verdict.side: verdict.word for verdict in reversed(summary.comparison.verdicts)} if summary.comparison else {}
    )
    return Grid(
        title=f"{summary.run}: {state}{' (simulated)' if summary.simulated else ''}",
        columns=_COLUMNS,
        rows=[_cells(row, verdicts.get(row.name, "")) for row in summary.rows] if rows is None else rows,
    )


def _cells(row: Row, word: str) -> list[str]:
    numbers = row.pooled
    times = [
        significant(None if latency.p50 is None else 1000 * latency.p50) for latency in (numbers.ttft, numbers.tpot)
    ]
    return [row.name, significant(numbers.output_tok_s), *times, f"{numbers.failed:,}", word]
