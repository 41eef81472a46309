"""What `harness explain` prints of a log."""

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.engines import engines
from harness.failures.scan import Diagnosis, Scanned
from harness.units import count

SAY_MORE = {engine.title: engine.log.more for engine in engines() if engine.log.more is not None}
UNKNOWN = (
    "Ask how it ended: docker inspect -f '{{json .State}}' CONTAINER | harness explain -",
    "Look for a GPU fault or a kill on the engine's host: dmesg | harness explain -",
)


def recognised(scanned: Scanned) -> bool:
    """Whether a failure of the table is in the log: no warning, no exception of another name, nothing got over."""
    return any(
        finding.severity not in ("warning", "exception") and not finding.recovered for finding in scanned.findings
    )


def started_well(scanned: Scanned) -> bool:
    """Whether the server became ready and nothing after that says that it failed."""
    return scanned.ready is not None and not any(
        finding.severity != "warning" and not finding.recovered for finding in scanned.findings
    )


def stopped(scanned: Scanned) -> bool:
    """Whether the server was stopped in the regular way, and nothing before that says that it failed."""
    return scanned.stopping is not None and not any(
        finding.severity not in ("warning", "request") and not finding.recovered for finding in scanned.findings
    )


def as_data(name: str, scanned: Scanned) -> dict[str, Any]:
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


def print_explained(name: str, scanned: Scanned, console: Console) -> None:
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
        _print(cause, "cause", console, "bold red")
    for one in others:
        console.print()
        _print(one, _title(one), console, "bold")
    if warnings:
        console.print("\nwarnings, which starts that went well have, too:", style="bold")
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


def _title(one: Diagnosis) -> str:
    if one.recovered:
        return "got over"  # it became ready, or loaded the model, afterwards
    return {"request": "requests", "exception": "also", "wrapper": "so it says"}.get(one.severity, "also")


def _print(one: Diagnosis, title: str, console: Console, style: str) -> None:
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
    grid.add_column()
    title.truncate(14)
    grid.add_row(title, text)
    for segments in console.render_lines(grid, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def _print_started(scanned: Scanned, console: Console) -> None:
    console.print("\nIt started well, and the log names no failure after that.", style="bold green")
    _row(console, Text(f"line {scanned.ready}"), Text("it says that it is ready"))
    if scanned.last:
        _row(console, Text("last line"), Text(scanned.last))
    _row(console, Text("if it ended"), Text("the log does not say why; then:"))
    for step in UNKNOWN:
        _row(console, Text("next"), Text(step))


def _print_unknown(scanned: Scanned, console: Console) -> None:
    console.print("\nNo failure that the table knows is in this log.", style="bold")
    if scanned.last:
        _row(console, Text("last line"), Text(scanned.last))
    if scanned.server in SAY_MORE:
        more = f"Have the server say more ({SAY_MORE[scanned.server]}) and start it again"
        _row(console, Text("next"), Text(f"{more}; switch that off before you measure: it slows the server down."))
    for step in UNKNOWN:
        _row(console, Text("next"), Text(step))
    _row(console, Text("the table"), Text("docs/failures.md; a line that belongs into it is welcome"))
