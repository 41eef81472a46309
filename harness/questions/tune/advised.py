"""`harness tune RUN`: what a finding of a run advises is tried against what was, without a search."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, did_you_mean
from harness.numbers.summary import RunFinding, Summary
from harness.questions.tune.decide import suggestions
from harness.questions.tune.spelling import shared_slots
from harness.records.manifest import Run


class Advice(Struct, frozen=True, kw_only=True):
    """What a finding of a run advises to set."""

    finding: str  # its code
    server: str  # of the run's scenario
    load: str | None  # with which it was seen; None: all of them, as the parts of a mix belong together
    settings: Mapping[str, Any]  # by their names in the engine's file


def read_advice(folder: Path, run: Run, summary: Summary, code: str | None = None) -> Advice:
    """Return what the worst finding of a run that names settings advises, or the finding `code`.

    Raises HarnessError where no finding names settings.
    """
    findings = {finding.code: finding for finding in summary.findings or []}
    if code is not None and code not in findings:
        near = did_you_mean(code, list(findings)) if findings else "it has none"
        what = f"--finding: {folder} has no finding '{code[:50]}'; {near}"
        raise HarnessError(what, next_step=f"It has: {', '.join(findings)}." if findings else "")
    for finding in [findings[code]] if code is not None else findings.values():
        if advice := _advice(finding, run, summary):
            return advice
    about = f"the finding '{code}'" if code is not None else "no finding" if findings else "it has no finding, so none"
    raise HarnessError(
        f"{folder}: {about} names {'no' if code is not None else 'a'} setting of the server that could be tried",
        next_step=f"{command_line('harness', 'report', folder)} says what else helps; to search: harness tune SCENARIO",
    )


def _advice(finding: RunFinding, run: Run, summary: Summary) -> Advice | None:
    """What the first action that changes settings sets; None: each action is something else."""
    row = next((row for row in summary.rows if row.name == finding.rows[0]), None)
    if row is None or row.server not in run.scenario.servers:
        return None
    advised = suggestions([finding], shared_slots(run, row.server))
    load = row.load if row.load in run.scenario.loads and "." not in row.load else None
    return Advice(finding=finding.code, server=row.server, load=load, settings=advised[0][1]) if advised else None
