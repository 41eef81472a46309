"""A run's report in the terminal: the table first, then verdicts, validity, checks and where the page is."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.report import schedules, sentences, words
from harness.report.charts import starts
from harness.report.machine_load import MachineTable, table_of
from harness.report.table import Meaning, TableColumn, TableLine, columns, lines
from harness.rundir.manifest import Run
from harness.summary import CheckResult, Summary

STYLES = {"faster": "green", "slower": "red", "same": "cyan", "inconclusive": "yellow", "baseline": "dim"}
CHECK_STYLES = {"passed": "green", "failed": "bold red", "inconclusive": "yellow"}


def print_report(summary: Summary, run: Run, folder: Path, console: Console, *, explain: bool = False) -> None:
    """Print the report of a run; `explain` adds what each column means."""
    if summary.simulated:
        console.print(Text(words.SIMULATED, "bold yellow"))
    console.print(Text(words.one_line(summary.question), "bold"))
    console.print(Text(f"{summary.scenario}, run {summary.run}", "dim"))
    for table in _tables(columns(summary), lines(summary, run), console.width):
        console.print()
        _show(console, table)
    _schedules(summary, run, console, explain=explain)
    if explain:
        console.print()
        for column in columns(summary):
            _meaning(console, column)
        for name, text in starts.explained(run):
            _item(console, Text(f"{words.one_line(name)}: ", "bold") + Text(words.one_line(text)))
        _machine(table_of(summary), console)
    _verdicts(summary, console)
    console.print()
    style = "bold green" if summary.valid and run.status == "valid" else "bold red"
    style = "bold yellow" if style == "bold green" and sentences.of_client(summary) else style
    console.print(Text(sentences.of_validity(summary, run), style))
    for reason in sentences.gathered(summary.reasons, run):
        _item(console, Text(words.one_line(reason)))
    for note in sentences.gathered(summary.notes, run):
        _item(console, Text(words.one_line(note), "dim"))
    if summary.failures:
        console.print("\nWhy requests failed", style="bold")
        for text in sentences.of_failures(summary):
            _item(console, Text(words.one_line(text)))
    if summary.checks:
        console.print()
        for check in summary.checks:
            _item(console, check_line(check))
    console.print()
    page = folder / "report.html"
    where = str(page) if page.exists() else f"none yet; `harness report {folder}` writes it"
    console.print(Text("Report: ", "bold") + Text(where, no_wrap=True, overflow="ignore"), soft_wrap=True)


def _tables(columns: Sequence[TableColumn], rows: list[TableLine], width: int) -> Sequence[RenderableType]:
    """One table where it fits, else the work and the latencies one below the other.

    Where even that does not fit, the rows are numbered, so that no name is cut; then no longer tables, so that no
    number is.
    """
    if _fits(columns, rows, 2, width):
        return [_table(columns, rows, 2)]
    work = [column for column in columns if column.group != "latency"]
    latency = [column for column in columns if column.group in ("name", "latency")]
    if all(_fits(part, rows, 1, width) for part in (work, latency)):
        return [_table(part, rows, 2 if _fits(part, rows, 2, width) else 1) for part in (work, latency)]
    number = TableColumn(
        key="number", title="#", group="name", explanation="The row's number.", formula="",
        text=lambda line: str(rows.index(line) + 1),
    )  # fmt: skip
    names = [column for column in columns if column.group == "name"]
    parts = [[number, *names]] + [[number, *(c for c in part if c.group != "name")] for part in (work, latency)]
    if not all(_fits(part, rows, 1, width) for part in parts[1:]):
        return [_block(columns, line) for line in rows]
    return [_table(part, rows, 2 if _fits(part, rows, 2, width) else 1) for part in parts]


def _block(columns: Sequence[TableColumn], line: TableLine) -> Group:
    """A row, its numbers one below the other."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    for column in columns:
        if column.group != "name":
            grid.add_row(column.heading, Text(column.text(line), _style(column, line)))
    return Group(Text(line.row.name, "bold"), grid)


def _fits(columns: Sequence[TableColumn], rows: list[TableLine], gap: int, width: int) -> bool:
    return Console(width=1000).measure(_table(columns, rows, gap)).maximum <= width


def _table(columns: Sequence[TableColumn], rows: list[TableLine], gap: int) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        left = column.group == "name" or column.key == "verdict"
        folds = column.group == "name"  # where the width does not suffice for long ones
        table.add_column(
            _heading(column), justify="left" if left else "right", no_wrap=not folds, overflow="fold", vertical="top"
        )
    for line in rows:
        table.add_row(*(Text(column.text(line), _style(column, line)) for column in columns))
    return table


def _heading(column: TableColumn) -> Text:
    title, _, rest = column.title.partition(" ")
    return Text(f"{title}\n{rest} {column.unit}".rstrip())


def _style(column: TableColumn, line: TableLine) -> str:
    if column.key == "verdict":
        return STYLES.get("baseline" if line.baseline else line.word, "")
    return "bold red" if column.key == "errors" and column.text(line) != "0" else ""


def _machine(table: MachineTable, console: Console) -> None:
    """What the machine did, a block for each row, since there are many columns; then what they mean."""
    for server, load, texts in table.rows:
        console.print()
        console.print(Text(f"The machine under {server} / {load}", "bold"))
        for column, text in zip(table.columns, texts, strict=True):
            _item(console, Text(f"{column.title}: ") + Text(text, "bold"))
    if table.rows:
        console.print()
        _item(console, Text(f"Sampled: {table.sampling}"))
    for column in table.columns:
        _meaning(console, column)


def _schedules(summary: Summary, run: Run, console: Console, *, explain: bool) -> None:
    """How open loops kept their schedule, a block for each row; with `explain` what each number means."""
    found = schedules.lines(summary, run)
    for line in found:
        console.print()
        console.print(Text(words.one_line(f"{line.server} / {line.load}: {line.course}"), "bold"))
        shown = zip(schedules.COLUMNS, line.texts, strict=True)
        _item(console, Text("; ".join(f"{column.title} {text}" for column, text in shown)))
    for column in schedules.COLUMNS if found and explain else ():
        _meaning(console, column)


def _verdicts(summary: Summary, console: Console) -> None:
    if summary.comparison is not None:
        console.print()
        for word, said in sentences.of_verdicts(summary.comparison.verdicts):
            _item(console, Text(words.one_line(said), STYLES.get(word, "")))
        _item(console, Text(sentences.of_method(summary.comparison), "dim"))


def check_line(check: CheckResult) -> Text:
    """The result of a check and its evidence."""
    mark = Text(f"{words.CHECK_MARKS[check.status]} ", CHECK_STYLES[check.status])
    return mark + Text(words.one_line(f"{check.check}: {check.evidence}"))


def _meaning(console: Console, column: Meaning) -> None:
    _item(console, Text(f"{column.heading}: ", "bold") + Text(f"{column.explanation} [{column.formula}]"))


def _item(console: Console, text: Text) -> None:
    """A wrapped line of a list, indented below its dash."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("-"), text)
    _show(console, grid)


def _show(console: Console, table: RenderableType) -> None:
    """Print a table without the spaces that fill its lines up: they only disturb in a log or a paste."""
    for segments in console.render_lines(table, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)
