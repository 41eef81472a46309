"""What `harness explain` prints of a log."""

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.failures.scan import Failure, Scanned

UNKNOWN = (
    "Have the server say more (vLLM: VLLM_LOGGING_LEVEL=DEBUG; Lemonade: log_level debug; llama.cpp: --verbose) and "
    "start it again.",
    "Ask how it ended: docker inspect -f '{{json .State}}' CONTAINER | harness explain -",
    "Look for a GPU fault or a kill on the engine's host: dmesg | harness explain -",
)


def recognised(scanned: Scanned) -> bool:
    """Whether a failure of the table is in the log: neither warnings alone nor exceptions that it does not know."""
    return any(finding.severity not in ("warning", "exception") for finding in scanned.findings)


def as_data(name: str, scanned: Scanned) -> dict[str, Any]:
    """For programs: the most telling failure, every one in the order of the log, and warnings apart."""
    return {
        "log": name,
        "lines": scanned.lines,
        "recognised": recognised(scanned),
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
    lines = "1 line" if scanned.lines == 1 else f"{scanned.lines:,} lines"
    console.print(Text(f"{where}: {lines}", "dim"))
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
    if not recognised(scanned):
        _print_unknown(scanned, console)


def _same(one: Failure, cause: Failure | None) -> bool:
    return cause is not None and (one.id, one.cause) == (cause.id, cause.cause)


def _title(one: Failure) -> str:
    if one.recovered:
        return "before it became ready"
    return {"request": "requests", "exception": "also", "wrapper": "so it says"}.get(one.severity, "also")


def _print(one: Failure, title: str, console: Console, style: str) -> None:
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


def _print_unknown(scanned: Scanned, console: Console) -> None:
    console.print("\nNo failure that the table knows is in this log.", style="bold")
    if scanned.last:
        _row(console, Text("last line"), Text(scanned.last))
    for step in UNKNOWN:
        _row(console, Text("next"), Text(step))
    _row(console, Text("the table"), Text("docs/failures.md; a line that belongs into it is welcome"))
