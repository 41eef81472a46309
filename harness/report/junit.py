"""JUnit XML: a case for the validity, each check and each verdict, with the evidence.

A case fails or is an error exactly when the command's exit code is neither 0 nor 5 (a check or a gate is not decided,
which is a skipped case). A verdict without a gate never fails: that one server or load is slower than another is the
result of the run.
"""

import datetime
import re
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from harness.base.errors import HarnessError
from harness.base.files import open_output, read_text
from harness.base.metrics import METRICS
from harness.base.reason import evidence
from harness.numbers.comparison import CheckResult, Comparison, Difference, Verdict
from harness.report import sentences, words
from harness.report.verdict_text import verdict_sentence

NAME = "amd-llm-load"
# Characters that XML 1.0 does not allow at all, not even escaped.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


Outcome = Literal["passed", "failure", "error", "skipped"]
OUTCOMES: dict[str, Outcome] = {"failed": "failure", "inconclusive": "skipped"}  # else passed
GATES: dict[str, Outcome] = {"no_slowdown": "passed", "slower": "failure"}  # else skipped


class Case(Struct, frozen=True, kw_only=True):
    """A test case. `kind`: the `type` of its failure, error or skip."""

    group: str  # "validity", "checks", "comparison", "answers", "history"
    name: str
    outcome: Outcome = "passed"
    kind: str = ""
    message: str = ""
    evidence: str


def error_xml(suite: str, error: HarnessError, *, group: str = "validity", name: str = "the run is VALID") -> str:
    """The XML of an error, such as a run without a summary."""
    detail = "\n".join(part for part in (error.what, error.detail, error.next_step) if part)
    kind = type(error).__name__
    case = Case(group=group, name=name, outcome="error", kind=kind, message=error.what, evidence=detail)
    return document(suite, [case], {})


def join(texts: Sequence[str]) -> str:
    """Return one document of several: a suite for each, with its number."""
    if len(texts) == 1:
        return texts[0]
    roots = [xml.fromstring(text) for text in texts]
    whole = xml.Element("testsuites", {"name": NAME})
    for key in ("tests", "failures", "errors", "skipped"):
        whole.set(key, str(sum(int(root.get(key, "0")) for root in roots)))
    whole.set("time", f"{sum(float(root.get('time', '0')) for root in roots):.3f}")
    for number, root in enumerate(roots, 1):
        for suite in root.iter("testsuite"):
            name = suite.get("name", "")
            suite.set("name", f"{name} {number}")
            for case in suite.iter("testcase"):  # a reader takes cases of the same names for one
                case.set("classname", case.get("classname", "").replace(f"{NAME}.{name}.", f"{NAME}.{name} {number}."))
            whole.append(suite)
    return _to_text(whole)


def write(path: Path, text: str) -> None:
    """Raises HarnessError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_output(path) as file:
            file.write(text)
    except OSError as error:
        raise HarnessError(f"{path}: the JUnit file cannot be written ({error.strerror})") from None


def is_document_of(path: Path, run: str, suite: str) -> bool:
    """Whether a file has nothing but one run: its report, or an error of a suite of this name, which has no run yet."""
    try:
        text = read_text(path, errors="replace")
    except OSError:
        return False
    properties = {"run": run}
    own = document(suite, [], properties).partition("<properties>")[2].partition("</properties>")[0]
    failed = error_xml(suite, HarnessError("")).partition("<testcase")[0]
    return text.count("<testsuite ") == 1 and (own.strip() in text or text.startswith(failed))


def difference_properties(sides: Sequence[str], differences: Sequence[Difference]) -> dict[str, str]:
    """A property for each difference, with the value of each side."""
    return {
        f"differs.{difference.key}": "; ".join(
            f"{side}: {value}" for side, value in zip(sides, difference.values, strict=True)
        )
        for difference in differences
    }


def check_case(result: CheckResult) -> Case:
    text, kind = evidence(result.evidence), "check" if result.status == "failed" else str(result.status)
    if result.code == "provisional":  # it breaks the bound by what one run shows, which is not inconclusive
        kind = "provisional"
    outcome = OUTCOMES.get(result.status, "passed")
    return Case(group="checks", name=result.check, outcome=outcome, kind=kind, message=text, evidence=text)


def _verdict_outcome(verdict: Verdict) -> Outcome:
    """What a gate decides. Without one a slower side is a result."""
    if verdict.gate is not None:
        return GATES.get(verdict.gate, "skipped")
    return "skipped" if verdict.word == "inconclusive" else "passed"


def verdict_cases(comparison: Comparison) -> list[Case]:
    return [
        Case(
            group="comparison",
            name=f"{verdict.side} against {verdict.baseline}: {METRICS[verdict.metric].title}",
            outcome=_verdict_outcome(verdict),
            kind=verdict.gate or verdict.word,
            message=verdict_sentence(verdict),
            evidence=f"{verdict_sentence(verdict)}\n{sentences.method_sentence(comparison)}",
        )
        for verdict in comparison.verdicts
    ]


def document(
    suite_name: str,
    cases: Sequence[Case],
    properties: dict[str, str],
    machine: str | None = None,
    started_wall_s: float | None = None,
    took_s: float | None = None,
) -> str:
    outcomes = Counter(case.outcome for case in cases)
    totals = {
        "tests": str(len(cases)), "failures": str(outcomes["failure"]), "errors": str(outcomes["error"]),
        "skipped": str(outcomes["skipped"]), "time": f"{took_s or 0:.3f}",
    }  # fmt: skip
    root = xml.Element("testsuites", {"name": NAME, **totals})
    suite = xml.SubElement(root, "testsuite", {"name": _legal_xml(suite_name), **totals})
    if started_wall_s is not None:
        started = datetime.datetime.fromtimestamp(started_wall_s, datetime.UTC)
        suite.set("timestamp", f"{started:%Y-%m-%dT%H:%M:%S}")
    if machine is not None:
        suite.set("hostname", _legal_xml(machine))
    if properties:
        parent = xml.SubElement(suite, "properties")
        for name, value in properties.items():
            xml.SubElement(parent, "property", {"name": _legal_xml(name), "value": _legal_xml(value)})
    for case in cases:
        class_name = f"{NAME}.{_legal_xml(suite_name)}.{case.group}"
        names = {"classname": class_name, "name": _legal_xml(case.name), "time": "0"}
        element = xml.SubElement(suite, "testcase", names)
        if case.outcome == "passed":
            result = xml.SubElement(element, "system-out")
        else:
            message = words.one_line(_legal_xml(case.message))
            result = xml.SubElement(element, case.outcome, {"type": case.kind, "message": message})
        result.text = _legal_xml(case.evidence)
    return _to_text(root)


def _to_text(root: xml.Element) -> str:
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def _legal_xml(text: str) -> str:
    """The text without what XML does not allow, and without what a terminal or a page obeys."""
    return "\n".join(words.neutral(_ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", line)) for line in text.splitlines())
