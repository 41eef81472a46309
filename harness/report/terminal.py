"""Reports in the terminal: of a run, of a comparison, of a log that is explained, of a prediction."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.analysis.forecast import Forecast, Prediction, RowForecast
from harness.capacity.result import read_capacity
from harness.engines import engines
from harness.failures.explain import Diagnosis, ScannedLog
from harness.reasons import evidence, sentence
from harness.report import sentences, words
from harness.report.capacity import capacity_lines
from harness.report.charts.timeline import start_sentences
from harness.report.markdown import EQUAL, HEADINGS, difference_cells, verdict_cells
from harness.report.table import (
    DetailTable,
    TableColumn,
    TableLine,
    columns,
    lines,
    machine_table,
    schedule_table,
    time_table,
)
from harness.rundir.manifest import Run
from harness.summary import CheckResult, Comparison, Difference, Summary
from harness.units import NOTHING, count

STYLES = {"faster": "green", "slower": "red", "same": "cyan", "inconclusive": "yellow", "baseline": "dim"}
MORE_LOG = {engine.title: engine.log.more for engine in engines() if engine.log.more is not None}
UNKNOWN_END = (
    "Ask how it ended: docker inspect -f '{{json .State}}' CONTAINER | harness explain -",
    "Look for a GPU fault or a kill on the engine's host: dmesg | harness explain -",
)
_STATES = {"good": "bold green", "unsure": "bold yellow", "bad": "bold red"}
CHECK_STYLES = {"passed": "green", "failed": "bold red", "inconclusive": "yellow"}
_UNITS = ((5400.0, 3600.0, "h"), (90.0, 60.0, "min"), (0.0, 1.0, "s"))
_MACHINE = "on the embedded engine (no real server), "


def print_report(summary: Summary, run: Run, folder: Path, console: Console, *, explain: bool = False) -> None:
    """Print the report of a run; `explain` adds what each column means."""
    if summary.simulated:
        console.print(Text(words.SIMULATED, "bold yellow"))
    console.print(Text(words.one_line(summary.question), "bold"))
    capacity = read_capacity(folder)
    for found in [sentences.answer_of(summary, run)] if capacity is None else capacity_lines(capacity):
        console.print(Text(words.one_line(found)))
    console.print(Text(f"{summary.scenario}, run {summary.run}", "dim"))
    for table in _tables(columns(summary), lines(summary, run), console.width):
        console.print()
        _show(console, table)
    for details in (schedule_table(summary, run), time_table(summary), *([machine_table(summary)] if explain else [])):
        _details(details, console, explain=explain)
    if explain:
        console.print()
        for column in columns(summary):
            _meaning(console, column)
        for server, text in start_sentences(run):
            _item(console, Text(words.one_line(f"{server}: {text}")))
    if summary.comparison is not None:
        console.print()
        _verdicts(summary.comparison, console, None if explain else "--explain shows them")
    console.print()
    console.print(Text(sentences.of_validity(summary, run), _STATES[sentences.state_of(summary, run)]))
    for reason in sentences.gathered(summary.reasons):
        _item(console, Text(words.one_line(reason)))
    for note in sentences.gathered(summary.notes):
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
    """One table where it fits, else the work and the latencies one below the other, else a block for each row."""
    work = [column for column in columns if column.group != "latency"]
    latency = [column for column in columns if column.group in ("name", "latency")]
    for parts, gap in (([columns], 2), ([columns], 1), ([work, latency], 2), ([work, latency], 1)):
        tables = [_table(part, rows, gap) for part in parts]
        if all(_fits(table, width) for table in tables):
            return tables
    return [_block(columns, line) for line in rows]


def _block(columns: Sequence[TableColumn], line: TableLine) -> Group:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    for column in columns:
        if column.group != "name":
            grid.add_row(column.heading, Text(column.of(line), _style(column, line)))
    return Group(Text(line.row.name, "bold"), grid)


def _fits(table: Table, width: int) -> bool:
    return Console(width=1000).measure(table).maximum <= width


def _table(columns: Sequence[TableColumn], rows: list[TableLine], gap: int) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.left else "right"
        folds = column.group == "name"  # where the width does not suffice for long ones
        table.add_column(_heading(column), justify=justify, no_wrap=not folds, overflow="fold", vertical="top")
    for line in rows:
        table.add_row(*(Text(column.of(line), _style(column, line)) for column in columns))
    return table


def _heading(column: TableColumn) -> Text:
    title, _, rest = column.title.partition(" ")
    return Text(f"{title}\n{rest} {column.unit}".rstrip())


def _style(column: TableColumn, line: TableLine) -> str:
    if column.key == "verdict":
        return STYLES.get("baseline" if line.baseline else line.word, "")
    return "bold red" if column.key == "errors" and column.of(line) != "0" else ""


def _details(found: DetailTable, console: Console, *, explain: bool) -> None:
    """A smaller table, or where that is too wide a line for each row; with `explain` what each number means."""
    if not found.rows:
        return
    console.print()
    console.print(Text(found.title, "bold"))
    titles = [column.title for column in found.columns]
    table = simple_table(["", *titles], ([line.name, *line.texts] for line in found.rows))
    for shown, column in zip(table.columns[1:], found.columns, strict=True):
        shown.justify = "left" if column.left else "right"
    if _fits(table, console.width):
        _show(console, table)
    else:
        for line in found.rows:
            said = "; ".join(f"{title} {text}" for title, text in zip(titles, line.texts, strict=True))
            _item(console, Text(f"{line.name}: ", "bold") + Text(words.one_line(said)))
    if explain and found.note:
        _item(console, Text(found.note))
    for column in found.columns if explain else ():
        _meaning(console, column)


def _verdicts(comparison: Comparison, console: Console, where: str | None) -> None:
    """The verdicts and how they were reached. `where`: what shows those that are left out; None: all are shown."""
    found = sentences.of_verdicts(comparison.verdicts)
    shown = found if where is None else found[: sentences.SHOWN]
    for word, said in shown:
        _item(console, Text(words.one_line(said), STYLES.get(word, "")))
    if rest := sentences.rest_in_words(word for word, _ in found[len(shown) :]):
        _item(console, Text(f"{rest} ({where})"))
    _item(console, Text(sentences.of_method(comparison), "dim"))


def check_line(check: CheckResult) -> Text:
    mark = Text(f"{words.CHECK_MARKS[check.status]} ", CHECK_STYLES[check.status])
    return mark + Text(words.one_line(f"{check.check}: {evidence(check.evidence)}"))


def _meaning(console: Console, column: TableColumn) -> None:
    if column.explanation:
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


def print_comparison(comparison: Comparison, console: Console) -> None:
    if comparison.simulated:
        console.print(Text(words.SIMULATED, "bold yellow"))
    console.print(Text(words.one_line(sentences.answer_of_comparison(comparison)), "bold"))
    console.print()
    styles = [STYLES.get(verdict.word, "") for verdict in comparison.verdicts]
    console.print(simple_table(HEADINGS, map(verdict_cells, comparison.verdicts), styles))
    console.print()
    for note in comparison.notes:
        console.print(Text(f"Warning: {words.one_line(sentence(note))}", "bold yellow"))
    _verdicts(comparison, console, "the table has all of them")
    for check in comparison.checks:
        _item(console, check_line(check))
    if comparison.sides:
        console.print()
        print_differences(comparison.differences, comparison.sides, console)


def print_differences(found: Sequence[Difference], sides: Sequence[str], console: Console) -> None:
    if found:
        console.print(simple_table(["What differs", *sides], map(difference_cells, found)))
    else:
        console.print(Text(EQUAL, "dim"))


def simple_table(head: Sequence[str], rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> Table:
    """A table without lines; `styles`: of the last cell of each row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in head:
        table.add_column(Text(words.one_line(heading)), overflow="fold")
    for number, cells in enumerate(rows):
        style = styles[number] if styles else ""
        table.add_row(*map(Text, cells[:-1]), Text(cells[-1], style))
    return table


def recognised(scanned: ScannedLog) -> bool:
    """Whether a failure of the table is in the log: no warning, no exception of another name, nothing got over."""
    return _failed(scanned, but=("warning", "exception"))


def started_well(scanned: ScannedLog) -> bool:
    """Whether the server became ready and nothing after that says that it failed."""
    return scanned.ready is not None and not _failed(scanned, but=("warning",))


def stopped(scanned: ScannedLog) -> bool:
    """Whether the server was stopped in the regular way, and nothing before that says that it failed."""
    return scanned.stopping is not None and not _failed(scanned, but=("warning", "request"))


def _failed(scanned: ScannedLog, but: Collection[str]) -> bool:
    return any(finding.severity not in but and not finding.recovered for finding in scanned.findings)


def explained_data(name: str, scanned: ScannedLog) -> dict[str, Any]:
    """For programs: the most telling failure, every one in the order of the log, and warnings apart."""
    return {
        "log": name,
        "lines": scanned.lines,
        "recognised": recognised(scanned),
        "started": started_well(scanned),
        "stopped": stopped(scanned),
        "cause": msgspec.to_builtins(scanned.cause()),
        "findings": msgspec.to_builtins([one for one in scanned.findings if one.severity != "warning"]),
        "warnings": msgspec.to_builtins([one for one in scanned.findings if one.severity == "warning"]),
    }


def print_explained(name: str, scanned: ScannedLog, console: Console) -> None:
    """For people: the cause first, then what else was found in the order of the log, then warnings."""
    cause = scanned.cause()
    others = [one for one in scanned.findings if one.severity != "warning" and not _same(one, cause)]
    if cause is not None and cause.wrapper is not None:
        others = [one for one in others if one.severity != "wrapper"]  # they only say that there is that cause
    warnings = [one for one in scanned.findings if one.severity == "warning"]
    where = "the standard input" if name == "-" else name
    console.print(Text(f"{where}: {count(scanned.lines, 'line')}", "dim"))
    if cause is not None:
        console.print()
        _print_finding(cause, "cause", console, "bold red")
    for one in others:
        console.print()
        _print_finding(one, _finding_title(one), console, "bold")
    if warnings:
        console.print("\nwarnings (also seen in healthy starts):", style="bold")
        for one in warnings:
            _row(console, Text(f"line {one.number}"), Text(f"{one.cause}; {one.fix} [{one.id}]"))
    if stopped(scanned):
        console.print("\nIt stopped normally.", style="bold green")
        _row(console, Text(f"line {scanned.stopping}"), Text("it began to stop"))
    elif started_well(scanned):
        _print_started(scanned, console)
    elif not recognised(scanned):
        _print_unknown(scanned, console)


def _same(one: Diagnosis, cause: Diagnosis | None) -> bool:
    return cause is not None and (one.id, one.cause) == (cause.id, cause.cause)


def _finding_title(one: Diagnosis) -> str:
    if one.recovered:
        return "got over"  # it became ready, or loaded the model, afterwards
    return {"request": "requests", "exception": "also", "wrapper": "so it says"}.get(one.severity, "also")


def _print_finding(one: Diagnosis, title: str, console: Console, style: str) -> None:
    _row(console, Text(title, style), Text(one.cause, style))
    again = f" [{one.count:,} times]" if one.count > 1 else ""
    _row(console, Text(f"line {one.number}"), Text(f"{one.line}{again}"))
    if one.wrapper is not None:
        _row(console, Text("came through"), Text(f"line {one.wrapper_number}: {one.wrapper}"))
    _row(console, Text("fix", "bold green"), Text(one.fix))
    _row(console, Text("known from", "dim"), Text(f"{one.source} [{one.id}, {one.phase}]", "dim"))


def _row(console: Console, title: Text, text: Text) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=14)
    title.truncate(14)
    grid.add_row(title, text)
    _show(console, grid)


def _print_started(scanned: ScannedLog, console: Console) -> None:
    console.print("\nIt started well, and the log names no failure after that.", style="bold green")
    _row(console, Text(f"line {scanned.ready}"), Text("it says that it is ready"))
    if scanned.last:
        _row(console, Text("last line"), Text(scanned.last))
    _row(console, Text("if it ended"), Text("the log does not say why; then:"))
    for step in UNKNOWN_END:
        _row(console, Text("next"), Text(step))


def _print_unknown(scanned: ScannedLog, console: Console) -> None:
    console.print("\nNo failure that the table knows is in this log.", style="bold")
    if scanned.last:
        _row(console, Text("last line"), Text(scanned.last))
    if scanned.server in MORE_LOG:
        more = f"Have the server say more ({MORE_LOG[scanned.server]}) and start it again"
        _row(console, Text("next"), Text(f"{more}; switch that off before you measure: it slows the server down."))
    for step in UNKNOWN_END:
        _row(console, Text("next"), Text(step))
    _row(console, Text("the table"), Text("docs/failures.md; a line that belongs into it is welcome"))


def print_forecast(found: Forecast, console: Console) -> None:
    best = found.rows[0]
    console.print(headline(found), style="bold")
    if found.deadline_s is not None:
        console.print(of_deadline(best, found.deadline_s))
    if best.energy_kwh is not None:
        cost = "" if best.cost is None else f"; cost {_with_interval(best.cost)}"
        console.print(f"Energy {_with_interval(best.energy_kwh, 'kWh')}{cost}.")
    table = Table(box=None, pad_edge=False)
    wanted = ["row", "items/s", "start", "time", "90 % interval"]
    wanted += ["machines"] if found.deadline_s is not None else []
    wanted += ["kWh"] if any(row.energy_kwh for row in found.rows) else []
    wanted += ["cost"] if any(row.cost for row in found.rows) else []
    for column in wanted:
        table.add_column(column, justify="left" if column == "row" else "right")
    for row in found.rows:
        time, low, high = in_time(row.time_s)
        cells = {
            "row": row.name,
            "items/s": f"{row.items_per_s:.3g}",
            "start": in_time(Prediction(value=row.start_s, low=row.start_s, high=row.start_s))[0],
            "time": time,
            "90 % interval": f"{low} to {high}",
            "machines": NOTHING if row.machines is None else f"{row.machines:,}",
            "kWh": NOTHING if row.energy_kwh is None else f"{row.energy_kwh.value:.3g}",
            "cost": NOTHING if row.cost is None else f"{row.cost.value:.2f}",
        }
        table.add_row(*(cells[column] for column in wanted))
    console.print(table)
    for refused in found.refused:
        console.print(f"no prediction for {refused.server} / {refused.load}: {sentence(refused.reason)}")
    for row in found.rows:
        for note in row.notes:
            console.print(f"note: {row.name}: {sentence(note)}")
    console.print("Assumptions:")
    for assumption in found.assumptions:
        console.print(f"- {sentence(assumption)}")


def headline(found: Forecast) -> str:
    best = found.rows[0]
    time, low, high = in_time(best.time_s)
    kind = _MACHINE if found.simulated else ""
    fastest = ", the fastest measured row" if len(found.rows) > 1 else ""
    return (
        f"{count(found.items, 'item takes', 'items take')} {time} (90 % interval {low} to {high}) {kind}with "
        f"{best.name}{fastest}."
    )


def of_deadline(row: RowForecast, deadline_s: float) -> str:
    deadline = in_time(Prediction(value=deadline_s, low=deadline_s, high=deadline_s))[0]
    words = {
        "met": f"The deadline of {deadline} is met",
        "missed": f"The deadline of {deadline} is not met",
        "inconclusive": f"Whether the deadline of {deadline} is met is inconclusive: it is inside the interval",
    }
    if row.machines is None:
        return f"{words[row.deadline or 'missed']}; no number of machines meets it, since the start alone takes longer."
    if row.deadline == "met":
        return f"{words['met']}."
    return (
        f"{words[row.deadline or 'missed']}; {count(row.machines, 'such machine')} would meet it (by the upper bound)."
    )


def in_time(one: Prediction) -> tuple[str, str, str]:
    """A duration and its bounds, all in the same unit; the unit is written once for the bounds: with the upper one."""
    size, unit = next((size, unit) for least, size, unit in _UNITS if one.value >= least)
    value, low, high = (_digits(seconds / size) for seconds in (one.value, one.low, one.high))
    return f"{value} {unit}", low, f"{high} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _with_interval(one: Prediction, unit: str = "") -> str:
    space = f" {unit}" if unit else ""
    return f"{_digits(one.value)}{space} ({_digits(one.low)} to {_digits(one.high)}{space})"
