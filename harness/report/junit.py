"""JUnit XML: a case for the validity, each check and each verdict, with the evidence.

A case fails or is an error exactly when the command's exit code is neither 0 nor 5 (a check is inconclusive, which is a
skipped case). So a side that is slower fails in a comparison of runs, and not within a run: that one server or load is
slower than another is the result of the run.
"""

import datetime
import re
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from harness.columns import METRIC_WORDS
from harness.comparison.history import Gate
from harness.errors import HarnessError
from harness.reasons import evidence, verdict_sentence
from harness.reasons import sentences as in_words
from harness.report import history, sentences, words
from harness.report.table import schedule_numbers, schedule_table
from harness.rundir.manifest import Run
from harness.summary import CheckResult, Comparison, Difference, Summary

NAME = "amd-llm-load"
# Characters that XML 1.0 does not allow at all, not even escaped.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


Outcome = Literal["passed", "failure", "error", "skipped"]
OUTCOMES: dict[str, Outcome] = {"failed": "failure", "slower": "failure", "inconclusive": "skipped"}  # else passed


class Case(Struct, frozen=True, kw_only=True):
    """A test case. `kind` is the `type` of what did not pass."""

    group: str  # "validity", "checks", "comparison", "history"
    name: str
    outcome: Outcome = "passed"
    kind: str = ""
    message: str = ""
    evidence: str


def render(summary: Summary, run: Run) -> str:
    """A run: is it VALID, did its checks hold, and what it found."""
    cases = [_validity(summary, run), *map(_check, summary.checks)]
    if summary.comparison is not None:
        cases += _verdicts(summary.comparison, within=True)
    properties = {
        "run": run.id,
        "question": summary.question,
        "model": run.scenario.model,
        "machine": run.machine.name,
        "workload_sha256": run.workload_sha256,
    }
    for server in run.scenario.servers:
        digests = {cell.served_by.image_digest for cell in run.served if cell.server == server} - {None}
        if digests:
            properties[f"image_digest.{server}"] = ", ".join(sorted(filter(None, digests)))
    schedules = schedule_table(summary, run)
    for line in schedules.rows:
        properties[f"schedule.{line.server}/{line.load}"] = (
            f"{line.name}: {line.texts[0]}. {schedule_numbers(schedules, line)}"
        )
    if summary.simulated:
        properties["simulated"] = words.SIMULATED
    took_s = None if run.ended_wall_s is None else run.ended_wall_s - run.started_wall_s
    return _document(summary.scenario, cases, properties, run.machine.name, run.started_wall_s, took_s)


def of_comparison(comparison: Comparison) -> str:
    """Runs against runs: one case a check and a verdict; the sides and in what they differ as properties."""
    properties = {"method": sentences.of_method(comparison)}
    if comparison.simulated:
        properties["simulated"] = words.SIMULATED
    for number, name in enumerate(comparison.sides):
        properties["baseline" if number == 0 else f"side.{number}"] = name
    for difference in comparison.differences:
        properties[f"differs.{difference.key}"] = _sides(comparison.sides, difference)
    cases = [*map(_check, comparison.checks), *_verdicts(comparison, within=False)]
    return _document("compare", cases, properties)


def of_gate(gate: Gate) -> str:
    """A run against its history: one case for each row and metric."""
    cases = [
        Case(
            group="history",
            name=f"{row.server} / {row.load}: {METRIC_WORDS[row.metric]}",
            outcome=OUTCOMES.get(row.word, "passed"),
            kind=row.word,
            message=history.gated_in_words(row, gate.run),
            evidence=history.gated_in_words(row, gate.run),
        )
        for row in gate.rows
    ]
    properties = {"run": gate.run, "machine": gate.machine, "history": history.gate_title(gate)}
    if gate.simulated:
        properties["simulated"] = words.SIMULATED
    for difference in gate.differences:
        properties[f"differs.{difference.key}"] = _sides(gate.sides, difference)
    return _document("compare", cases, properties, gate.machine)


def of_error(suite: str, error: HarnessError, *, group: str = "validity", name: str = "the run is VALID") -> str:
    """A run that gave no summary, or another error."""
    detail = "\n".join(part for part in (error.what, error.detail, error.next_step) if part)
    kind = type(error).__name__
    case = Case(group=group, name=name, outcome="error", kind=kind, message=error.what, evidence=detail)
    return _document(suite, [case], {})


def write(path: Path, text: str) -> None:
    """Raises HarnessError when that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HarnessError(f"{path}: the JUnit file cannot be written ({error.strerror})") from None


def _sides(sides: Sequence[str], difference: Difference) -> str:
    return "; ".join(f"{side}: {value}" for side, value in zip(sides, difference.values, strict=True))


def _validity(summary: Summary, run: Run) -> Case:
    said = sentences.of_validity(summary, run)
    ended = run.status not in ("running", "failed", "interrupted")
    reasons = in_words(summary.reasons or run.reasons) or [said]
    case = Case(group="validity", name="the run is VALID", evidence="\n".join([said, *in_words(summary.notes)]))
    if not ended or summary.valid is False:
        kind, text = "INVALID" if ended else run.status.upper(), "\n".join([said, *reasons])
        return replace(case, outcome="error", kind=kind, message=reasons[0], evidence=text)
    if summary.valid is None:  # neither green nor red
        return replace(case, outcome="skipped", kind="NOT CHECKED", message=said)
    return case


def _check(result: CheckResult) -> Case:
    kind, text = "check" if result.status == "failed" else result.status, evidence(result.evidence)
    outcome = OUTCOMES.get(result.status, "passed")
    return Case(group="checks", name=result.check, outcome=outcome, kind=kind, message=text, evidence=text)


def _verdicts(comparison: Comparison, *, within: bool) -> list[Case]:
    return [
        Case(
            group="comparison",
            name=f"{verdict.side} against {verdict.baseline}: {METRIC_WORDS[verdict.metric]}",
            outcome="passed" if within and verdict.word == "slower" else OUTCOMES.get(verdict.word, "passed"),
            kind=verdict.word,
            message=verdict_sentence(verdict),
            evidence=f"{verdict_sentence(verdict)}\n{sentences.of_method(comparison)}",
        )
        for verdict in comparison.verdicts
    ]


def _document(
    suite_name: str,
    cases: Sequence[Case],
    properties: dict[str, str],
    machine: str | None = None,
    started_wall_s: float | None = None,
    took_s: float | None = None,
) -> str:
    counts = {
        "tests": len(cases),
        "failures": sum(case.outcome == "failure" for case in cases),
        "errors": sum(case.outcome == "error" for case in cases),
        "skipped": sum(case.outcome == "skipped" for case in cases),
    }
    counted = {name: str(number) for name, number in counts.items()} | {"time": f"{took_s or 0:.3f}"}
    root = xml.Element("testsuites", {"name": NAME, **counted})
    suite = xml.SubElement(root, "testsuite", {"name": _legal(suite_name), **counted})
    if started_wall_s is not None:
        started = datetime.datetime.fromtimestamp(started_wall_s, datetime.UTC)
        suite.set("timestamp", f"{started:%Y-%m-%dT%H:%M:%S}")
    if machine is not None:
        suite.set("hostname", _legal(machine))
    if properties:
        listed = xml.SubElement(suite, "properties")
        for name, value in properties.items():
            xml.SubElement(listed, "property", {"name": _legal(name), "value": _legal(value)})
    for case in cases:
        _add(suite, case, f"{NAME}.{_legal(suite_name)}.{case.group}")
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def _add(suite: xml.Element, case: Case, class_name: str) -> None:
    # The evidence of what passed goes to the output of the case; that of what did not is its own text.
    element = xml.SubElement(suite, "testcase", {"classname": class_name, "name": _legal(case.name), "time": "0"})
    if case.outcome == "passed":
        xml.SubElement(element, "system-out").text = _legal(case.evidence)
        return
    found = xml.SubElement(element, case.outcome, {"type": case.kind, "message": words.one_line(_legal(case.message))})
    found.text = _legal(case.evidence)


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
