"""What the terminal prints: the report of a run, a comparison, an explained log, a prediction."""

import re
import textwrap
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.base.command import command_line
from harness.base.summary import Summary, sentence
from harness.base.units import NOTHING, count, factor, join_units
from harness.engines import engines
from harness.failures.explain import Diagnosis, ScannedLog
from harness.questions.capacity.decide import read_capacity
from harness.questions.plan import Forecast, Prediction, RowForecast
from harness.questions.quick.decide import read_levels
from harness.questions.tune.results import read_answered
from harness.records.manifest import Run
from harness.report import words
from harness.report.elements import Bullet, Bullets, Element, Fold, Grid, Paragraph, TableColumn
from harness.report.page import run_page

STYLES = {
    "faster": "green", "slower": "red", "same": "cyan", "no_shift": "cyan",
    "inconclusive": "yellow", "no_slowdown": "cyan", "cannot_tell": "yellow",
    "probably_slower": "yellow", "size_unknown": "yellow",
    "baseline": "dim", "passed": "green", "failed": "bold red", "title": "",
    "heading": "bold", "lead": "bold", "good": "bold green", "unsure": "bold yellow", "bad": "bold red",
    "simulated": "bold yellow", "warning": "bold yellow", "fine": "dim",
}  # fmt: skip
MORE_LOG = {engine.title: engine.log.more for engine in engines() if engine.log.more is not None}
UNKNOWN_END = (
    "Ask how it ended: docker inspect -f '{{json .State}}' CONTAINER | harness explain -",
    "Look for a GPU fault or a kill on the engine's host: dmesg | harness explain -",
)
_TIME_UNITS = ((5400.0, 3600.0, "h"), (90.0, 60.0, "min"), (0.0, 1.0, "s"))  # from how many seconds on, seconds in it


def print_report(summary: Summary, run: Run, folder: Path, console: Console, *, explain: bool = False) -> None:
    """Print the report of a run; `explain` adds what each column means."""
    print_page(report_page(summary, run, folder, explain=explain), console, explain=explain)
    console.print()
    page = folder / "report.html"
    again = command_line("harness", "report", folder, "--format", "html")
    where = str(page) if page.exists() else f"`{again} > report.html` writes it"
    console.print(Text("Report: ", "bold") + Text(where, no_wrap=True, overflow="ignore"), soft_wrap=True)


def report_page(summary: Summary, run: Run, folder: Path, *, explain: bool = False) -> list[Element]:
    """Return the page of a run, with what its folder has of a search or a quick run."""
    levels = read_levels(folder, summary)
    return run_page(summary, run, read_capacity(folder), read_answered(folder), levels, explain=explain)


def print_page(page: Sequence[Element], console: Console, *, explain: bool = False) -> None:
    """Print a page. `explain`: with what is folded, and with the meaning of each column."""
    page = [each for each in page if explain or not isinstance(each, Fold) or each.hint]
    for before, element in zip([None, *page], page, strict=False):
        if before is not None and _is_apart(before, element):
            console.print()
        match element:
            case Paragraph(text, style):
                glued = _CODE.sub(lambda code: code[0].replace(" ", _GLUE), join_units(words.one_line(text), _GLUE))
                _print_paragraph(console, Text(glued, STYLES.get(style, "")))
            case Bullets(items):
                for item in items:
                    _print_item(console, _bullet(item))
                    for part in item.parts:
                        _print_part(console, part)
            case Grid():
                _print_grid(element, console, explain=explain)
            case Fold(title, elements, hint):
                if explain:
                    print_page([Paragraph(title, "heading"), *elements], console)
                else:
                    _print_item(console, Text(f"{words.one_line(title)} ({hint})"))


def _is_apart(before: Element, element: Element) -> bool:
    """Whether an empty line is between two elements."""
    if isinstance(element, Paragraph):
        return element.style == "heading" or isinstance(before, Grid)
    heading = isinstance(before, Paragraph) and before.style == "heading"
    return not heading and isinstance(element, Grid) or isinstance(before, Grid)


def _bullet(item: Bullet) -> Text:
    style = STYLES.get(item.style, "")
    mark = Text(f"{item.mark} ", style) if item.mark else Text()
    text = f"{item.code}: {item.text}" if item.code else item.text
    return mark + Text(join_units(words.one_line(text), _GLUE), "" if item.mark else style)


_CODE = re.compile("`[^`]+`")  # may be a command, which is pasted in one line
_GLUE = "\ue000"  # where rich does not break a line, as it does at a no-break space; printed as a space


def _print_paragraph(console: Console, text: Text) -> None:
    """Print a paragraph; its further lines are indented."""
    lines, width = [text], console.width - 2
    if max(map(len, text.plain.split()), default=0) > width:  # rich would break a word that is longer than a line
        parts = textwrap.wrap(text.plain, width, break_long_words=False, break_on_hyphens=False)
        lines = [Text(part, text.style) for part in parts]
    elif text.cell_len > console.width:
        lines = list(text.wrap(console, width))
    for number, line in enumerate(lines):
        line.rstrip()
        console.print(Text("  " * (number > 0)) + _with_spaces(line), soft_wrap=True)


def _with_spaces(line: Text) -> Text:
    line.plain = line.plain.replace(_GLUE, " ")
    return line


def _print_part(console: Console, part: Bullet) -> None:
    """Print a part of a finding."""
    grid, mark = Table.grid(padding=(0, 1)), Text(f"{words.one_line(part.mark)}:", "bold")
    lines = list(map(words.neutral, part.code.splitlines()))
    if any(len(line) + len(mark) + 3 > console.width for line in lines):  # it is pasted
        console.print(Text("  ") + mark)
        indent = "    " if _COMMAND.match(lines[0]) else ""  # of a setting in a file, the spaces count
        for row in (row for line in lines for row in fold_command(line, console.width - len(indent))):
            console.print(Text(f"{indent}{row}"), soft_wrap=True)
        return
    grid.add_row(Text(" "), mark, Text("\n".join(lines) or join_units(words.one_line(part.text), _GLUE)))
    _print_trimmed(console, grid)


_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:harness |[\w./-]+ (?:.* )?--?\w)")  # a program with options
_ONE_WORD = r"(?:\$'(?:[^'\\]|\\.)*'|[^\s'\"\\]|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\")+"
_WORD = re.compile(rf"--?[a-z][\w-]*\s+(?![-&|]){_ONE_WORD}|{_ONE_WORD}")  # an option has its value with it


def fold_command(line: str, width: int) -> list[str]:
    """Break a long shell command between its words, so that it is pasted as one. Other lines stay whole."""
    text = line.strip()
    if len(line) <= width or not _COMMAND.match(text) or _WORD.sub("", text).strip():
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    rows = [indent]
    for word in _WORD.findall(text):
        if rows[-1].strip() and len(rows[-1]) + len(word) + 3 > width:  # " \\" ends the row
            rows[-1] += " \\"
            rows.append(f"{indent}  ")
        rows[-1] += f" {word}" if rows[-1].strip() else word
    return rows


def _print_grid(grid: Grid, console: Console, *, explain: bool) -> None:
    """Print one table where it fits, else several one below the other, or a list for each row where that is shorter."""
    if grid.title:
        console.print(Text(words.one_line(grid.title), "bold"))
    parts, fits = _fitting_parts(grid, console.width)
    lines = len(parts) * (len(grid.rows) + 3)
    if len(parts) == 1 or (fits and len(grid.rows) > 1 and lines <= len(grid.rows) * len(grid.columns)):
        tables: list[RenderableType] = [_rich_table(grid, part, console.width) for part in parts]
    else:
        tables = [_row_list(grid, number) for number in range(len(grid.rows))]
    for number, table in enumerate(tables):
        if number:
            console.print()
        _print_trimmed(console, table)
    if explain and grid.note:
        _print_item(console, Text(grid.note))
    for column in grid.columns if explain else ():
        if column.explanation:
            _print_item(console, Text(f"{column.heading}: ", "bold") + Text(f"{column.explanation} [{column.formula}]"))


def _fitting_parts(grid: Grid, width: int) -> tuple[list[list[int]], bool]:
    """The columns of each table that fits, the work before the latencies; and whether all fit."""

    def fits(part: list[int]) -> bool:
        return Console(width=1000).measure(_rich_table(grid, part)).maximum <= width

    places = list(range(len(grid.columns)))
    names = [place for place in places if grid.columns[place].group == "name"]
    if names == places or fits(places):
        return [places], True
    parts: list[list[int]] = []
    for is_latency in (False, True):
        part = list(names)
        for place in places:
            if place in names or (grid.columns[place].group == "latency") != is_latency:
                continue
            if part != names and not fits([*part, place]):
                parts, part = [*parts, part], list(names)
            part.append(place)
        parts += [part] if part != names else []
    return parts, all(map(fits, parts))


def _folded_widths(grid: Grid, places: Sequence[int], width: int) -> dict[int, int]:
    """The widths of columns with long texts that break no word; empty where all texts fit, or where no widths do."""
    texts = {place: [grid.columns[place].title, *(row[place] for row in grid.rows)] for place in places}
    wanted = {place: max(map(len, texts[place])) for place in places}
    widths = {place: max(len(word) for text in texts[place] for word in text.split() or [""]) for place in places}
    left = width - 2 * (len(places) - 1) - sum(widths.values())
    if left < 0 or sum(wanted.values()) - sum(widths.values()) <= left:
        return {}
    by_need = sorted(places, key=lambda place: wanted[place] - widths[place])
    for number, place in enumerate(by_need):
        more = min(wanted[place] - widths[place], left // (len(by_need) - number))
        widths[place], left = widths[place] + more, left - more
    return widths


def _rich_table(grid: Grid, places: Sequence[int], width: int = 1000) -> Table:
    """A table of some columns, without rules."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    are_names = all(grid.columns[place].group == "name" for place in places)
    widths = _folded_widths(grid, places, width) if are_names else {}
    for place in places:
        column = grid.columns[place]
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        title, _, rest = words.one_line(column.title).partition(" " if grid.is_main else "\n")
        heading = Text(f"{title}\n{rest} {column.unit}".rstrip())
        folds = column.group == "name"  # where the width does not suffice for long ones
        table.add_column(
            heading, justify=justify, no_wrap=not folds, overflow="fold", vertical="top", width=widths.get(place)
        )
    for number in range(len(grid.rows)):
        table.add_row(*(_cell(grid, number, place) for place in places))
    return table


def _row_list(grid: Grid, number: int) -> Group:
    """The names of a row, and a line for each of its other values."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column()
    lines.add_column(overflow="fold")
    names = [grid.rows[number][place] for place, column in enumerate(grid.columns) if column.group == "name"]
    for place, column in enumerate(grid.columns):
        if column.group != "name":
            lines.add_row(column.heading, _cell(grid, number, place))
    return Group(Text(words.one_line(" / ".join(names)), "bold"), lines)


def _cell(grid: Grid, number: int, place: int) -> Text:
    key, text = grid.columns[place].key, words.one_line(grid.rows[number][place])
    if key == "verdict":
        return Text(text, STYLES.get(grid.styles[number], ""))
    return Text(text, "bold red" if key == "errors" and " of " in text else "")


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
        console.print(_with_spaces(line), soft_wrap=True)


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
        "gpu": scanned.gpu,
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
            title = "follows" if finding.effect else _FINDING_TITLES.get(finding.severity, "also")
            title = "got over" if finding.recovered else title
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
        if scanned.gpu is False:
            console.print("\nIt is ready, but it works on the processor: it uses no GPU.", style="bold yellow")
        else:
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


def forecast_page(forecast: Forecast) -> list[Element]:
    best = forecast.rows[0]
    page = [Paragraph(forecast_headline(forecast), "lead")]
    if forecast.deadline_s is not None:
        page.append(Paragraph(deadline_sentence(best, forecast.deadline_s)))
    if best.energy_kwh is not None:
        cost = "" if best.cost is None else f"; cost {_with_interval(best.cost)}"
        page.append(Paragraph(f"Energy {_with_interval(best.energy_kwh, 'kWh')}{cost}."))
    names_by_note: dict[str, list[str]] = defaultdict(list)
    for row in forecast.rows:
        for note in row.notes:
            names_by_note[sentence(note)].append(row.name)
    notes = [f"no prediction for {name}: {sentence(why)}" for name, why in forecast.refused.items()]
    for row in forecast.rows:
        if row.no_interval is not None:
            notes.append(f"no interval for {row.name}: {sentence(row.no_interval)}")
    for text, names in names_by_note.items():
        rows_of = "" if len(names) == len(forecast.rows) else f"{', '.join(names)}: "
        notes.append(f"note: {rows_of}{text}")
    head = ("row", "items/s", "start", "time", "90 % interval", "machines", "kWh", "cost")
    rows = [_forecast_cells(row) for row in forecast.rows]
    known = [place for place in range(len(head)) if any(cells[place] != NOTHING for cells in rows)]
    columns = [TableColumn(head[place], head[place], group="name" if place == 0 else "") for place in known]
    return [
        *page,
        Grid(columns=columns, rows=[[cells[place] for place in known] for cells in rows]),
        *map(Paragraph, notes),
        Paragraph("Assumptions", "heading"),
        Bullets([Bullet(sentence(assumption)) for assumption in forecast.assumptions]),
    ]


def _forecast_cells(row: RowForecast) -> list[str]:
    start, _, _ = format_prediction(Prediction(value=row.start_s))
    time, low, high = format_prediction(row.time_s)
    return [
        row.name,
        _three_digits(row.items_per_s),
        start,
        time,
        NOTHING if row.no_interval else f"{low} to {high}",
        NOTHING if row.machines is None else f"{row.machines:,}",
        NOTHING if row.energy_kwh is None else _three_digits(row.energy_kwh.value),
        NOTHING if row.cost is None else factor(row.cost.value),
    ]


def forecast_headline(forecast: Forecast) -> str:
    best = forecast.rows[0]
    time, low, high = format_prediction(best.time_s)
    engine = "on the embedded engine (no real server), " if forecast.simulated else ""
    is_fastest = best.time_s.value == min(row.time_s.value for row in forecast.rows)
    fastest = ", the fastest measured row" if len(forecast.rows) > 1 and is_fastest else ""
    items = count(forecast.items, "item takes", "items take")
    if best.no_interval is not None:
        return f"{items} about {time} {engine}with {best.name}{fastest}; the interval is not known."
    return f"{items} {time} (90 % interval {low} to {high}) {engine}with {best.name}{fastest}."


def deadline_sentence(row: RowForecast, deadline_s: float) -> str:
    deadline = format_prediction(Prediction(value=deadline_s))[0]
    if row.no_interval is not None:
        return f"Whether the deadline of {deadline} is met is inconclusive: {sentence(row.no_interval)}."
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
    value, low, high = (
        NOTHING if seconds is None else _three_digits(seconds / size) for seconds in (time.value, time.low, time.high)
    )
    return f"{value} {unit}", low, f"{high} {unit}"


def _three_digits(value: float) -> str:
    """Two or three significant digits."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _with_interval(predicted: Prediction, unit: str = "") -> str:
    space = f" {unit}" if unit else ""
    value = _three_digits(predicted.value)
    if predicted.low is None or predicted.high is None:
        return f"about {value}{space}"
    return f"{value}{space} ({_three_digits(predicted.low)} to {_three_digits(predicted.high)}{space})"
