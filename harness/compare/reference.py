"""The run that checks call the baseline: a run directory, or what was published of one."""

from collections.abc import Sequence
from pathlib import Path

from harness.errors import HarnessError, RunError
from harness.files import pretty_json, replace_file
from harness.judge.comparable import refuse_unlike
from harness.rundir.manifest import Run, read_run
from harness.rundir.origin import DEFINITIONS, refuse_other_definitions
from harness.summarize.summarize import read_summary, summarize
from harness.summary import Reference, Summary


def usable_baseline(folder: Path) -> Run:
    """The manifest of a run that may be a baseline. Raises RunError for one that is not VALID."""
    run = read_run(folder)
    if run.status != "valid":
        reason = f": {run.reasons[0]}" if run.reasons else ""
        raise RunError(
            f"{run.id}: the baseline has to be a VALID run, and is {run.status}{reason}",
            next_step="Give another run with --baseline, or measure it again.",
        )
    return run


def reference_to(folder: Path, run: Run, *, about: str | None = None, checks: Sequence[str] = ()) -> Reference:
    """The run in `folder` as the baseline of `run`, judged by the SLOs of both the scenario's and further checks.

    `about` is the one manifest key in which the two may differ. Where they differ in another the reference says so,
    and every check against it fails with that reason. Raises HarnessError for a folder that is no VALID run.
    """
    base = usable_baseline(folder)
    summary = _summary(folder, [*run.scenario.checks, *checks])
    if not summary.valid:
        raise RunError(f"{base.id}: the baseline has to be a VALID run: {summary.reasons[0]}")
    known = {row.key for row in summary.rows}
    rows = [(server, load) for server in run.scenario.servers for load in run.scenario.loads if (server, load) in known]
    refused = _refused(base, run, rows, about)
    return Reference(run=base.id, rows=[] if refused else summary.rows, refused=refused)


def _refused(base: Run, run: Run, rows: Sequence[tuple[str, str]], about: str | None) -> str | None:
    """Why the two are not compared. That they do not differ in what the comparison is about is no reason here."""
    try:
        for metric in DEFINITIONS:
            refuse_other_definitions([base, run], metric, rows)
        refuse_unlike([base, run], rows, [0, 1], None)
    except HarnessError as unlike:
        if about is None:
            return unlike.what
        try:
            refuse_unlike([base, run], rows, [0, 1], about)
        except HarnessError as error:
            return error.what
    return None


def write_reference(folder: Path, reference: Reference) -> None:
    """Keep what a run was compared with in its directory, so that its summary follows from its own files."""
    replace_file(folder / "baseline.json", pretty_json(reference))


def _summary(folder: Path, checks: Sequence[str]) -> Summary:
    """Of the records; where only summary and manifest were kept, as it was then."""
    if (folder / "requests.jsonl").exists():
        return summarize(folder, checks)
    return read_summary(folder)
