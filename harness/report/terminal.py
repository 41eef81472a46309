"""What the terminal prints: the report of a run, a comparison, an explained log, a prediction."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.analysis.forecast import Forecast, Prediction, RowForecast
from harness.analysis.result import read_capacity
from harness.base.engines import engines
from harness.base.reasons import evidence, sentence
from harness.base.summary import CheckResult, Comparison, Difference, Summary
from harness.base.units import NOTHING, count, factor
from harness.failures.explain import Diagnosis, ScannedLog
from harness.records.manifest import Run
from harness.report import sentences, words
from harness.report.capacity import capacity_lines
from harness.report.markdown import EQUAL, HEADINGS, difference_cells, verdict_cells
from harness.report.table import (
    DetailTable,
    TableColumn,
    TableLine,
    machine_table,
    schedule_table,
    table_columns,
    table_lines,
    time_table,
)

STYLES = {
    "faster": "green",
    "slower": "red",
    "same": "cyan",
    "no_difference": "cyan",
    "inconclusive": "yellow",
    "baseline": "dim",
}
MORE_LOG = {engine.title: engine.log.more for engine in engines() if engine.log.more is not None}
UNKNOWN_END = (
    "Ask how it ended: docker inspect -f '{{json .State}}' CONTAINER | harness explain -",
    "Look for a GPU fault or a kill on the engine's host: dmesg | harness explain -",
)
_STATES = {"good": "bold green", "unsure": "bold yellow", "bad": "bold red"}
CHECK_STYLES = {"passed": "green", "failed": "bold red", "inconclusive": "yellow"}
_TIME_UNITS = ((5400.0, 3600.0, "h"), (90.0, 60.0, "min"), (0.0, 1.0, "s"))  # from how many seconds on, seconds in it


def print_report(summary: Summary, run: Run, folder: Path, console: Console, *, explain: bool = False) -> None:
    """Print the report of a run; `explain` adds what each column means."""
    if summary.simulated:
        console.print(Text(words.SIMULATED, "bold yellow"))
    console.print(Text(words.one_line(summary.question), "bold"))
    capacity = read_capacity(folder)
    for answer in [sentences.run_answer(summary, run)] if capacity is None else capacity_lines(capacity):
        console.print(Text(words.one_line(answer)))
    console.print(Text(f"{summary.scenario}, run {summary.run}", "dim"))
    _print_findings(summary, console)
    for table in _fitting_tables(table_columns(summary), table_lines(summary, run), console.width):
        console.print()
        _print_trimmed(console, table)
    for details in (schedule_table(summary, run), time_table(summary), *([machine_table(summary)] if explain else [])):
        if details.rows:
            _print_details(details, console, explain=explain)
    if explain:
        console.print()
        for column in table_columns(summary):
            _print_column_meaning(console, column)
    if summary.comparison is not None:
        console.print()
        _print_verdicts(summary.comparison, console, None if explain else "--explain shows them")
    console.print()
    console.print(Text(sentences.validity_sentence(summary, run), _STATES[sentences.validity_style(summary, run)]))
    for reason in sentences.group_reasons(summary.reasons):
        _print_item(console, Text(words.one_line(reason)))
    for note in sentences.group_reasons(summary.notes):
        _print_item(console, Text(words.one_line(note), "dim"))
    if summary.failures:
        console.print("\nWhy requests failed", style="bold")
        for text in sentences.failure_sentences(summary):
            _print_item(console, Text(words.one_line(text)))
    if summary.checks:
        console.print()
        for check in summary.checks:
            _print_item(console, check_line(check))
    console.print()
    page = folder / "report.html"
    where = str(page) if page.exists() else f"`harness report {folder} --format html > report.html` writes it"
    console.print(Text("Report: ", "bold") + Text(where, no_wrap=True, overflow="ignore"), soft_wrap=True)


def _print_findings(summary: Summary, console: Console) -> None:
    """Print why the run is slower than it could be, and what to change."""
    if summary.findings is None:
        return
    console.print()
    console.print(Text(sentences.findings_title(summary.findings), "bold"))
    for finding in summary.findings:
        _print_item(console, Text(words.one_line(sentences.finding_sentence(finding)), "yellow"))
        for name, text in sentences.finding_parts(finding):
            grid = Table.grid(padding=(0, 1))
            lines = "\n".join(words.one_line(line) for line in text.splitlines())
            grid.add_row(Text(" "), Text(f"{name}:", "bold"), Text(lines))
            _print_trimmed(console, grid)


def _fitting_tables(columns: Sequence[TableColumn], rows: list[TableLine], width: int) -> Sequence[RenderableType]:
    """One table where it fits, else the work and the latencies one below the other, else a block for each row."""
    work = [column for column in columns if column.group != "latency"]
    latency = [column for column in columns if column.group in ("name", "latency")]
    for parts in ([columns], [work, latency]):
        tables = [_main_table(part, rows) for part in parts]
        if all(_fits(table, width) for table in tables):
            return tables
    return [_row_block(columns, line) for line in rows]


def _row_block(columns: Sequence[TableColumn], line: TableLine) -> Group:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    for column in columns:
        if column.group != "name":
            grid.add_row(column.heading, Text(column.show(line), _cell_style(column, line)))
    return Group(Text(line.row.name, "bold"), grid)


def _fits(table: Table, width: int) -> bool:
    return Console(width=1000).measure(table).maximum <= width


def _main_table(columns: Sequence[TableColumn], rows: list[TableLine]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        folds = column.group == "name"  # where the width does not suffice for long ones
        table.add_column(_heading(column), justify=justify, no_wrap=not folds, overflow="fold", vertical="top")
    for line in rows:
        table.add_row(*(Text(column.show(line), _cell_style(column, line)) for column in columns))
    return table


def _heading(column: TableColumn) -> Text:
    title, _, rest = column.title.partition(" ")
    return Text(f"{title}\n{rest} {column.unit}".rstrip())


def _cell_style(column: TableColumn, line: TableLine) -> str:
    if column.key == "verdict":
        return STYLES.get("baseline" if line.baseline else line.word, "")
    return "bold red" if column.key == "errors" and column.show(line) != "0" else ""


def _print_details(details: DetailTable, console: Console, *, explain: bool) -> None:
    """Print a detail table, or a line for each row if it is too wide; with `explain` what each number means."""
    console.print()
    console.print(Text(details.title, "bold"))
    titles = [column.title for column in details.columns]
    table = simple_table(["", *titles], ([name, *texts] for name, texts in details.rows.items()))
    for shown, column in zip(table.columns[1:], details.columns, strict=True):
        shown.justify = "left" if column.is_text else "right"
    if _fits(table, console.width):
        _print_trimmed(console, table)
    else:
        for name, texts in details.rows.items():
            values = "; ".join(f"{title} {text}" for title, text in zip(titles, texts, strict=True))
            _print_item(console, Text(f"{name}: ", "bold") + Text(words.one_line(values)))
    if explain and details.note:
        _print_item(console, Text(details.note))
    for column in details.columns if explain else ():
        _print_column_meaning(console, column)


def _print_verdicts(comparison: Comparison, console: Console, where: str | None) -> None:
    """Print verdicts and how they were reached. `where`: how to see those that are left out; None: all are shown."""
    verdicts = sentences.verdict_sentences(comparison.verdicts)
    shown = verdicts if where is None else verdicts[: sentences.SHOWN]
    for word, text in shown:
        _print_item(console, Text(words.one_line(text), STYLES.get(word, "")))
    if hidden := sentences.hidden_verdicts_text(word for word, _ in verdicts[len(shown) :]):
        _print_item(console, Text(f"{hidden} ({where})"))
    _print_item(console, Text(sentences.method_sentence(comparison), "dim"))


def check_line(check: CheckResult) -> Text:
    mark = Text(f"{words.CHECK_MARKS[check.status]} ", CHECK_STYLES[check.status])
    return mark + Text(words.one_line(f"{check.check}: {evidence(check.evidence)}"))


def _print_column_meaning(console: Console, column: TableColumn) -> None:
    if column.explanation:
        _print_item(console, Text(f"{column.heading}: ", "bold") + Text(f"{column.explanation} [{column.formula}]"))


def _print_item(console: Console, text: Text) -> None:
    """Print an item of a list; its further lines are indented."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("-"), text)
    _print_trimmed(console, grid)


def _print_trimmed(console: Console, table: RenderableType) -> None:
    """Print a table without trailing spaces, which would be in the way in a log or a paste."""
    for segments in console.render_lines(table, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console) -> None:
    if comparison.simulated:
        console.print(Text(words.SIMULATED, "bold yellow"))
    console.print(Text(words.one_line(sentences.comparison_answer(comparison)), "bold"))
    console.print()
    styles = [STYLES.get(verdict.word, "") for verdict in comparison.verdicts]
    console.print(simple_table(HEADINGS, map(verdict_cells, comparison.verdicts), styles))
    console.print()
    for note in comparison.notes:
        console.print(Text(f"Warning: {words.one_line(sentence(note))}", "bold yellow"))
    _print_verdicts(comparison, console, "the table has all of them")
    for check in comparison.checks:
        _print_item(console, check_line(check))
    if comparison.sides:
        console.print()
        print_differences(comparison.differences, comparison.sides, console)


def print_differences(differences: Sequence[Difference], sides: Sequence[str], console: Console) -> None:
    if differences:
        console.print(simple_table(["What differs", *sides], map(difference_cells, differences)))
    else:
        console.print(Text(EQUAL, "dim"))


def simple_table(head: Sequence[str], rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> Table:
    """A table without rules. `styles`: of the last cell of each row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in head:
        table.add_column(Text(words.one_line(heading)), overflow="fold")
    for number, cells in enumerate(rows):
        style = styles[number] if styles else ""
        table.add_row(*map(Text, cells[:-1]), Text(cells[-1], style))
    return table


def is_recognised(scanned: ScannedLog) -> bool:
    """Whether the cause is a known failure, from which the server did not recover."""
    cause = scanned.cause()
    return cause is not None and cause.severity != "exception"


def has_started(scanned: ScannedLog) -> bool:
    """Whether the server became ready, and the log has no failure of it after that and no error at its end."""
    if scanned.ready is None or (scanned.bad_end is not None and scanned.stopping is None):
        return False
    return not _has_failure(scanned, ignored=("warning", "request"))


def was_stopped(scanned: ScannedLog) -> bool:
    """Whether the server was stopped normally and did not fail before that."""
    return scanned.stopping is not None and not _has_failure(scanned, ignored=("warning", "request"))


def _has_failure(scanned: ScannedLog, ignored: Collection[str]) -> bool:
    return any(finding.severity not in ignored and not finding.recovered for finding in scanned.findings)


def explanation_data(name: str, scanned: ScannedLog) -> dict[str, Any]:
    """For programs: the cause, every failure in the order of the log, and the warnings."""
    return {
        "log": name,
        "lines": scanned.lines,
        "recognised": is_recognised(scanned),
        "started": has_started(scanned),
        "stopped": was_stopped(scanned),
        "cause": msgspec.to_builtins(scanned.cause()),
        "findings": msgspec.to_builtins([finding for finding in scanned.findings if finding.severity != "warning"]),
        "warnings": msgspec.to_builtins([finding for finding in scanned.findings if finding.severity == "warning"]),
    }


def print_explanation(name: str, scanned: ScannedLog, console: Console) -> None:
    """For people: the cause first, then all other findings in the order of the log, then warnings."""
    cause = scanned.cause()
    hidden = ("warning",) if cause is None or cause.wrapper is None else ("warning", "wrapper")
    warnings = [finding for finding in scanned.findings if finding.severity == "warning"]
    source = "the standard input" if name == "-" else name
    console.print(Text(f"{source}: {count(scanned.lines, 'line')}", "dim"))
    if cause is not None:
        console.print()
        _print_finding(cause, "cause", console, "bold red")
    for finding in scanned.findings:
        is_cause = cause is not None and (finding.id, finding.cause) == (cause.id, cause.cause)
        is_same_line = cause is not None and finding.severity == "wrapper" and finding.number == cause.number
        if finding.severity not in hidden and not is_cause and not is_same_line:
            console.print()
            # One that it got over: the server became ready, or loaded the model, afterwards.
            title = "got over" if finding.recovered else _FINDING_TITLES.get(finding.severity, "also")
            _print_finding(finding, title, console, "bold")
    if warnings:
        console.print("\nwarnings (also seen in healthy starts):", style="bold")
        for finding in warnings:
            _print_row(
                console,
                Text(f"line {finding.number}"),
                Text(f"{finding.cause}{_times(finding)}; {finding.fix} [{finding.id}]"),
            )
    if was_stopped(scanned):
        console.print("\nIt stopped normally.", style="bold green")
        _print_row(console, Text(f"line {scanned.stopping}"), Text("it began to stop"))
    elif has_started(scanned):
        console.print("\nIt started well, and the log names no failure after that.", style="bold green")
        _print_row(console, Text(f"line {scanned.ready}"), Text("it says that it is ready"))
        _print_next_steps(scanned, console)
    elif not is_recognised(scanned):
        known = (
            "No failure that the table knows is in this log."
            if cause is None
            else "The table does not know this cause."
        )
        console.print(f"\n{known}", style="bold")
        _print_next_steps(scanned, console)


_FINDING_TITLES = {"request": "requests", "wrapper": "so it says"}  # by severity; else "also"


def _print_finding(finding: Diagnosis, title: str, console: Console, style: str) -> None:
    _print_row(console, Text(title, style), Text(finding.cause, style))
    _print_row(console, Text(f"line {finding.number}"), Text(f"{finding.line}{_times(finding)}"))
    if finding.wrapper is not None:
        _print_row(console, Text("came through"), Text(f"line {finding.wrapper_number}: {finding.wrapper}"))
    _print_row(console, Text("fix", "bold green"), Text(finding.fix))
    _print_row(console, Text("known from", "dim"), Text(f"{finding.source} [{finding.id}, {finding.phase}]", "dim"))


def _times(finding: Diagnosis) -> str:
    return f" [{finding.count:,} times]" if finding.count > 1 else ""


def _print_row(console: Console, title: Text, text: Text) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=14)
    title.truncate(14)
    grid.add_row(title, text)
    _print_trimmed(console, grid)


def _print_next_steps(scanned: ScannedLog, console: Console) -> None:
    """The last line of a log that does not say why the server ended, and how to find out."""
    if scanned.bad_end is not None and scanned.cause() is None:
        _print_row(console, Text(f"line {scanned.bad_end}"), Text(scanned.bad_line))
    if scanned.last:
        _print_row(console, Text("last line"), Text(scanned.last))
    steps = list(UNKNOWN_END)
    if scanned.server in MORE_LOG and not scanned.detailed and not has_started(scanned):
        more = f"Have the server say more ({MORE_LOG[scanned.server]}) and start it again; switch that off before you"
        steps.insert(0, f"{more} measure: it slows the server down.")
    for step in steps:
        _print_row(console, Text("next"), Text(step))


def print_forecast(forecast: Forecast, console: Console) -> None:
    best = forecast.rows[0]
    console.print(forecast_headline(forecast), style="bold")
    if forecast.deadline_s is not None:
        console.print(deadline_sentence(best, forecast.deadline_s))
    if best.energy_kwh is not None:
        cost = "" if best.cost is None else f"; cost {_with_interval(best.cost)}"
        console.print(f"Energy {_with_interval(best.energy_kwh, 'kWh')}{cost}.")
    head = ("row", "items/s", "start", "time", "90 % interval", "machines", "kWh", "cost")
    rows = [_forecast_cells(row) for row in forecast.rows]
    known = [place for place in range(len(head)) if any(cells[place] != NOTHING for cells in rows)]
    table = simple_table([head[place] for place in known], ([cells[place] for place in known] for cells in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    for refused in forecast.refused:
        console.print(f"no prediction for {refused.server} / {refused.load}: {sentence(refused.reason)}")
    names_by_note: dict[str, list[str]] = defaultdict(list)
    for row in forecast.rows:
        for note in row.notes:
            names_by_note[sentence(note)].append(row.name)
    for text, names in names_by_note.items():
        rows_of = "" if len(names) == len(forecast.rows) else f"{', '.join(names)}: "
        console.print(f"note: {rows_of}{text}")
    console.print("Assumptions:")
    for assumption in forecast.assumptions:
        console.print(f"- {sentence(assumption)}")


def _forecast_cells(row: RowForecast) -> list[str]:
    start, _, _ = format_prediction(Prediction(value=row.start_s, low=row.start_s, high=row.start_s))
    time, low, high = format_prediction(row.time_s)
    return [
        row.name,
        _three_digits(row.items_per_s),
        start,
        time,
        f"{low} to {high}",
        NOTHING if row.machines is None else f"{row.machines:,}",
        NOTHING if row.energy_kwh is None else _three_digits(row.energy_kwh.value),
        NOTHING if row.cost is None else factor(row.cost.value),
    ]


def forecast_headline(forecast: Forecast) -> str:
    best = forecast.rows[0]
    time, low, high = format_prediction(best.time_s)
    engine = "on the embedded engine (no real server), " if forecast.simulated else ""
    fastest = ", the fastest measured row" if len(forecast.rows) > 1 else ""
    items = count(forecast.items, "item takes", "items take")
    return f"{items} {time} (90 % interval {low} to {high}) {engine}with {best.name}{fastest}."


def deadline_sentence(row: RowForecast, deadline_s: float) -> str:
    deadline = format_prediction(Prediction(value=deadline_s, low=deadline_s, high=deadline_s))[0]
    verdict = {
        "met": f"The deadline of {deadline} is met",
        "missed": f"The deadline of {deadline} is not met",
        "inconclusive": f"Whether the deadline of {deadline} is met is inconclusive: it is inside the interval",
    }[row.deadline or "missed"]
    if row.machines is None:
        return f"{verdict}; no number of machines meets it, since the start alone takes longer."
    if row.deadline == "met":
        return f"{verdict}."
    return f"{verdict}; {count(row.machines, 'such machine')} would meet it (by the upper bound)."


def format_prediction(time: Prediction) -> tuple[str, str, str]:
    """A duration and its bounds, all in the unit that fits the duration. The lower bound is without its unit."""
    size, unit = next((size, unit) for from_s, size, unit in _TIME_UNITS if time.value >= from_s)
    value, low, high = (_three_digits(seconds / size) for seconds in (time.value, time.low, time.high))
    return f"{value} {unit}", low, f"{high} {unit}"


def _three_digits(value: float) -> str:
    """Two or three significant digits."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _with_interval(predicted: Prediction, unit: str = "") -> str:
    space = f" {unit}" if unit else ""
    value, low, high = map(_three_digits, (predicted.value, predicted.low, predicted.high))
    return f"{value}{space} ({low} to {high}{space})"
