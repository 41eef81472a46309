"""Why did it fail? What a log, or a run's failures, say about the cause, and what to do next."""

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from harness.base.units import count
from harness.engines import engines
from harness.failures.diagnosis import Diagnosis, ScannedLog
from harness.report.elements import Element, Fact, Facts, Paragraph

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


def explanation_page(name: str, scanned: ScannedLog) -> list[Element]:
    """For people: the cause first, then all other findings in the order of the log, then warnings."""
    source = "the standard input" if name == "-" else name
    return [
        Paragraph(f"{source}: {count(scanned.lines, 'line')}", "fine"),
        *_finding_elements(scanned),
        *_warning_elements(scanned),
        *_end_elements(scanned),
    ]


def _finding_elements(scanned: ScannedLog) -> Iterator[Element]:
    cause = scanned.cause()
    hidden = ("warning",) if cause is None or cause.wrapper is None else ("warning", "wrapper")
    if cause is not None:
        yield _finding_facts(cause, "cause", "bad")
    for finding in scanned.findings:
        is_cause = cause is not None and (finding.id, finding.cause) == (cause.id, cause.cause)
        is_same_line = cause is not None and finding.severity == "wrapper" and finding.number == cause.number
        if finding.severity not in hidden and not is_cause and not is_same_line:
            # One that it got over: the server became ready, or loaded the model, afterwards.
            title = "follows" if finding.effect else _FINDING_TITLES.get(finding.severity, "also")
            yield _finding_facts(finding, "got over" if finding.recovered else title, "heading")


_FINDING_TITLES = {"request": "requests", "wrapper": "so it says"}  # by severity; else "also"


def _finding_facts(finding: Diagnosis, title: str, style: str) -> Facts:
    through = [Fact("came through", f"line {finding.wrapper_number}: {finding.wrapper}")]
    return Facts(
        [
            Fact(title, finding.cause, style),
            Fact(f"line {finding.number}", f"{finding.line}{_times(finding)}"),
            *(through if finding.wrapper is not None else []),
            Fact("fix", finding.fix, "good"),
            Fact("known from", f"{finding.source} [{finding.id}, {finding.phase}]", "fine"),
        ]
    )


def _times(finding: Diagnosis) -> str:
    return f" [{finding.count:,} times]" if finding.count > 1 else ""


def _warning_elements(scanned: ScannedLog) -> list[Element]:
    warnings = [finding for finding in scanned.findings if finding.severity == "warning"]
    if not warnings:
        return []
    facts = [
        Fact(f"line {finding.number}", f"{finding.cause}{_times(finding)}; {finding.fix} [{finding.id}]")
        for finding in warnings
    ]
    return [Paragraph("warnings (also seen in healthy starts):", "heading"), Facts(facts)]


def _end_elements(scanned: ScannedLog) -> list[Element]:
    """How it ended, as far as the log says it."""
    if was_stopped(scanned):
        return [
            Paragraph("It stopped normally.", "good"),
            Facts([Fact(f"line {scanned.stopping}", "it began to stop")]),
        ]
    if has_started(scanned):
        verdict = Paragraph("It started well, and the log names no failure after that.", "good")
        if scanned.gpu is False:
            verdict = Paragraph("It is ready, but it works on the processor: it uses no GPU.", "unsure")
        ready = Fact(f"line {scanned.ready}", "it says that it is ready")
        return [verdict, Facts([ready, *_next_steps(scanned)])]
    if is_recognised(scanned):
        return []
    conclusion = "The table does not know this cause."
    if scanned.cause() is None:
        conclusion = "No failure that the table knows is in this log."
    return [Paragraph(conclusion, "lead"), Facts(_next_steps(scanned))]


def _next_steps(scanned: ScannedLog) -> list[Fact]:
    """The last line of a log that does not say why the server ended, and how to find out."""
    facts = []
    if scanned.bad_end is not None and scanned.cause() is None:
        facts.append(Fact(f"line {scanned.bad_end}", scanned.bad_line))
    if scanned.last:
        facts.append(Fact("last line", scanned.last))
    steps = list(UNKNOWN_END)
    if scanned.server in MORE_LOG and not scanned.detailed and not has_started(scanned):
        more = f"Have the server say more ({MORE_LOG[scanned.server]}) and start it again; switch that off before you"
        steps.insert(0, f"{more} measure: it slows the server down.")
    return [*facts, *(Fact("next", step) for step in steps)]
