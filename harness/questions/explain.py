"""Why did it fail? What a log, or a run's failures, say about the cause, and what to do next."""

from collections.abc import Collection
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.base.units import count
from harness.engines import engines
from harness.failures.diagnosis import Diagnosis, ScannedLog
from harness.report.terminal import print_trimmed

MORE_LOG = {engine.title: engine.log.more for engine in engines() if engine.log.more is not None}


UNKNOWN_END = (
    "Ask how it ended: docker inspect -f '{{json .State}}' CONTAINER | harness explain -",
    "Look for a GPU fault or a kill on the engine's host: dmesg | harness explain -",
)


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
    print_trimmed(console, grid)


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
