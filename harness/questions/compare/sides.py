"""Reads run directories as sides of a comparison: groups of runs, a baseline, and the earlier runs that equal them."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.units import count
from harness.base.versions import DEFINITIONS
from harness.numbers.checks import compared_metrics
from harness.numbers.comparison import TOLERANCE, Comparison
from harness.numbers.summarize import Summarized, summary_of
from harness.numbers.summary import Reference, Summary
from harness.questions.compare.decide import (
    RunGroup,
    check_ratios,
    comparable_rows,
    compare_sides,
    comparison_refusal,
    refuse_invalid,
    refuse_repeated,
)
from harness.questions.compare.equal_runs import find_equal_runs
from harness.questions.same_answers.decide import same_answers_of_runs
from harness.records import run_data
from harness.records.manifest import Run, read_run


def compare_runs(
    groups: Sequence[Sequence[Path]],
    *,
    about: str | None = None,
    runs: Path | None = None,
    results: Path | None = None,
    checks: Sequence[str] = (),
    provisional: bool = False,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare each group of run directories with the first, row by row of the same server and load.

    The sample is the run. The variation between equal runs is assumed until it is known: from several runs a side, from
    earlier equal runs in the folders `runs` and `results`.
    `tolerance`: the slowdown that fails, 0.1 for 10 %; `provisional`: whether a provisional one does, see `with_gate`.
    `about` is the one manifest key in which the groups may differ. `checks` are evaluated for the rows of every other
    group, with the first group as their baseline.

    Raises HarnessError for runs that differ in more or have no row in common, and RunError for a run that is not VALID.
    """
    if len(groups) < 2 or not all(groups):
        raise HarnessError(
            "a comparison needs a baseline and at least one other run", next_step="harness compare BASELINE OTHER"
        )
    _refuse_checks(groups, checks)
    sides = [_read_side(group, checks) for group in groups]
    if is_across := about == "machine" and len({side.runs[0].server_machine.name for side in sides}) == len(sides):
        sides = [side._replace(name=side.runs[0].server_machine.name) for side in sides]
    rows, compared = comparable_rows(sides, about, with_sides=is_across or len(sides) > 2)
    equal = find_equal_runs([side.runs for side in sides], rows, runs, results)
    data = [(side.name, _read_data(group, side.summaries)) for side, group in zip(sides, groups, strict=True)]
    comparison = compare_sides(sides, rows, compared, equal, checks, provisional=provisional, tolerance=tolerance)
    return replace(comparison, same_answers=list(same_answers_of_runs(data)))


def _refuse_checks(groups: Sequence[Sequence[Path]], checks: Sequence[str]) -> None:
    """Raise HarnessError for checks of several runs a side."""
    several = next((group for group in groups if len(group) > 1), None)
    if checks and several is not None:
        raise HarnessError(
            f"--check: a check is of one run against another, and {several[0].name} is one of {len(several)} a side",
            next_step="Compare single runs with checks, groups of runs by their verdicts.",
        )


def _read_side(folders: Sequence[Path], checks: Sequence[str]) -> RunGroup:
    runs, summaries = [], []
    for folder in folders:
        run, summary = read_run(folder), summary_of(folder, checks)
        refuse_invalid(folder, run, summary, "is compared")
        runs.append(run)
        summaries.append(summary)
    name = runs[0].id if len(runs) == 1 else f"{runs[0].id} and {count(len(runs) - 1, 'more run')}"
    return RunGroup(name, runs, summaries)


def _read_data(folders: Sequence[Path], summaries: Sequence[Summary]) -> list[Summarized]:
    """The summaries and the records of those that have records."""
    return [
        Summarized(summary, run_data.load(folder))
        for folder, summary in zip(folders, summaries, strict=True)
        if (folder / "requests.jsonl").exists()
    ]


def group_by_machine(folders: Sequence[Path]) -> list[list[Path]]:
    """Run directories grouped by machine, in the given order. Raises HarnessError for a single machine."""
    groups: dict[str, list[Path]] = {}
    for folder in folders:
        groups.setdefault(read_run(folder).server_machine.name, []).append(folder)
    if len(groups) < 2:
        raise HarnessError(
            f"all runs are of one machine, {next(iter(groups), 'none')}",
            next_step="Give runs of another one, too; `harness results add` files runs to carry them over.",
        )
    return list(groups.values())


def read_baseline(folder: Path) -> Run:
    """The manifest of a baseline run. Raises RunError for one that is INVALID or has not ended."""
    run = read_run(folder)
    refuse_invalid(folder, run, None, "is a baseline")
    return run


def make_reference(
    folder: Path,
    run: Run,
    run_summary: Summary,
    *,
    about: str | None = None,
    checks: Sequence[str] = (),
    runs: Path | None = None,
    results: Path | None = None,
) -> Reference:
    """Make the run in `folder` the baseline of `run`, for its scenario's checks and further `checks`.

    `about` is the one manifest key in which the two may differ. If they differ in another one, the reference has the
    reason, and every check against it fails with that reason. The ratios are those of `compare_runs` with the same
    `runs` and `results`. Raises HarnessError for a folder without a VALID run.
    """
    base = read_baseline(folder)
    refuse_repeated([base, run])
    texts = list(dict.fromkeys([*run.scenario.checks, *checks]))
    summary = summary_of(folder, texts)
    refuse_invalid(folder, base, summary, "is a baseline")
    keys = {row.key for row in summary.rows}
    rows = [(server, load) for server in run.scenario.servers for load in run.scenario.loads if (server, load) in keys]
    refused = comparison_refusal(base, run, rows, about)
    if refused is not None:
        return Reference(run=base.id, refused=refused)
    reference = Reference(definitions=DEFINITIONS, run=base.id, rows=summary.rows)
    if not compared_metrics(texts):
        return reference
    sides = RunGroup(base.id, [base], [summary]), RunGroup(run.id, [run], [run_summary])
    rows = [row for row in rows if all(row in side.common_rows() for side in sides)]
    equal = find_equal_runs([side.runs for side in sides], rows, runs, results)
    return replace(reference, ratios=check_ratios(texts, sides, rows, equal))
