"""Runs against runs: groups of run directories, the first of which is the baseline."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from harness import stats
from harness.alike import refuse_unlike
from harness.errors import HarnessError, RunError
from harness.manifest import Run, read_run
from harness.origin import refuse_other_definitions
from harness.summarize import summarize
from harness.summary import Comparison, Summary
from harness.verdicts import NoiseFloor, Pair, metric_of, speeds, values_of, verdicts


class _Side(Struct, frozen=True):
    """One group of runs."""

    name: str
    runs: list[Run]
    summaries: list[Summary]

    def values(self, row: tuple[str, str], metric: str) -> list[float]:
        """The run-level values of a row, of all repeats of all runs in the group."""
        return [
            value
            for summary in self.summaries
            for found in summary.rows
            if (found.server, found.load) == row
            for value in values_of(found, metric)
        ]

    def rows(self) -> list[tuple[str, str]]:
        """Rows that every run of the group has."""
        first, *others = [[(row.server, row.load) for row in summary.rows] for summary in self.summaries]
        return [row for row in first if all(row in other for other in others)]


def compare_runs(
    groups: Sequence[Sequence[Path]], *, about: str | None = None, floor: NoiseFloor | None = None
) -> Comparison:
    """Each group of run directories against the first, row by row of the same server and load.

    `about` is the one manifest key in which the groups may differ. Raises HarnessError for runs that are not alike
    or have no row in common, RunError for a run that is not VALID.

    Runs are not interleaved with each other, so what changed on the machine between them falls on one side: take
    groups of several runs in turn, and a measured noise floor.
    """
    if len(groups) < 2 or not all(groups):
        raise HarnessError(
            "a comparison needs a baseline and at least one other run", next_step="harness compare BASELINE OTHER"
        )
    _refuse_repeated(groups)
    sides = [_side(group) for group in groups]
    rows = [row for row in sides[0].rows() if all(row in side.rows() for side in sides[1:])]
    if not rows:
        raise HarnessError(
            "the runs have no row in common: none of their servers and loads have the same names",
            next_step="Give servers and loads that are to be compared the same names in both scenarios.",
        )
    runs = [run for side in sides for run in side.runs]
    metric = metric_of([runs[0].scenario.loads[load] for _, load in rows])
    refuse_other_definitions(runs, metric)
    refuse_unlike(runs, rows, [number for number, side in enumerate(sides) for _ in side.runs], about)
    pairs = [_pair(side, sides[0], row, metric, several=len(sides) > 2) for side in sides[1:] for row in rows]
    return verdicts(pairs, metric, floor or NoiseFloor())


def measured_floor(groups: Sequence[Sequence[Path]]) -> NoiseFloor:
    """The noise floor of this machine out of A/A runs: groups of runs of one configuration, the widest of all rows.

    Raises HarnessError for runs that differ in anything, or have fewer than two repeats a group.
    """
    if len(groups) < 2 or not all(groups):
        raise HarnessError("a noise floor needs at least two groups of runs of the same configuration")
    _refuse_repeated(groups)
    sides = [_side(group) for group in groups]
    runs = [run for side in sides for run in side.runs]
    rows = sides[0].rows()
    refuse_unlike(runs, rows, [0] * len(runs), None)
    metric = metric_of([runs[0].scenario.loads[load] for _, load in rows])
    try:
        widest = max(stats.noise_floor([side.values(row, metric) for side in sides]) for row in rows)
    except ValueError as error:
        raise HarnessError(f"the noise floor cannot be measured: {error}") from None
    return NoiseFloor(widest, f"measured A/A over {len(runs)} runs: {', '.join(run.id for run in runs)}")


def _refuse_repeated(groups: Sequence[Sequence[Path]]) -> None:
    seen: set[Path] = set()
    for folder in (folder.resolve() for group in groups for folder in group):
        if folder in seen:
            raise HarnessError(f"{folder.name}: this run is given twice; a run is not compared with itself")
        seen.add(folder)


def _side(folders: Sequence[Path]) -> _Side:
    runs, summaries = [], []
    for folder in folders:
        run = read_run(folder)
        if run.status == "running":
            raise RunError(
                f"{run.id}: the run has not ended, or was killed; it is not compared", next_step="Run it again."
            )
        summary = summarize(folder)
        if not summary.valid:
            raise RunError(
                f"{run.id}: an INVALID run is not compared: {summary.reasons[0]}",
                next_step=f"harness report {run.id} shows all reasons.",
                detail="\n".join(summary.reasons) if len(summary.reasons) > 1 else "",
            )
        runs.append(run)
        summaries.append(summary)
    name = runs[0].id if len(runs) == 1 else f"{runs[0].id} and {len(runs) - 1} more"
    return _Side(name, runs, summaries)


def _pair(side: _Side, base: _Side, row: tuple[str, str], metric: str, *, several: bool) -> Pair:
    """A row of one side against the same row of the baseline side; named by the run where there are several sides."""
    name = " / ".join(row)
    return Pair(
        side=f"{name} ({side.name})" if several else name,
        baseline=f"{name} ({base.name})",
        side_speeds=speeds(metric, side.values(row, metric)),
        baseline_speeds=speeds(metric, base.values(row, metric)),
    )
