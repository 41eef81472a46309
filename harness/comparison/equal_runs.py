"""The variation between equal runs, from earlier runs of a machine."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from harness.analysis.summarize import read_summary, summary_of
from harness.errors import HarnessError
from harness.judge import stats
from harness.judge.comparable import collect_facts, differing_keys
from harness.judge.verdicts import Measured, metric_values, number_fields, to_speeds
from harness.rundir.directory import filed_runs
from harness.rundir.manifest import Run, definition_conflict, read_run
from harness.summary import Reason, Summary, because
from harness.units import count

MAX_EQUAL_RUNS = 20  # of each side, the newest
RowKey = tuple[str, str]  # server and load


class EqualRuns(Struct, frozen=True):
    """For each side of a comparison its equal runs that are not compared."""

    runs: list[list[tuple[Run, Summary]]]

    def source(self) -> list[Reason]:
        """The assumption, and what else the variation between runs is known from."""
        runs = sum(map(len, self.runs))
        equal = [because("equal_runs", count(runs, "earlier equal run"), runs=runs)] if runs else []
        assumed = f"{stats.ASSUMED_SD:.0%} assumed (counts as much as 5 runs)"
        return [because("variation_assumed", assumed, sd=stats.ASSUMED_SD), *equal]

    def known(self, row: RowKey, sides: Sequence[tuple[int, Measured]]) -> Callable[[str], tuple[float, int]]:
        """What is known of a row besides the values of the sides, by metric: sum of squares, degrees of freedom.

        `sides`: of each side its number and its measured row.
        """

        def of_metric(metric: str) -> tuple[float, int]:
            squares, freedom = 0.0, 0
            for number, measured in sides:
                own = [value for run in measured.values(metric) if (value := _speed(metric, run)) is not None]
                others = [
                    value
                    for run, summary in self.runs[number]
                    if (value := _value(run, summary, row, metric, measured))
                ]
                if own and others:
                    squares += stats.sum_of_squares([*own, *others]) - stats.sum_of_squares(own)
                    freedom += len(others)
            return squares, freedom

        return of_metric


def find_equal_runs(
    sides: Sequence[Sequence[Run]], rows: Sequence[RowKey], runs: Path | None, results: Path | None
) -> EqualRuns:
    """Search `runs` and the filed `results` for runs that equal a side in machine, work, server and settings."""
    compared = {(run.id, run.started_wall_s) for side in sides for run in side}
    newest_s = max(run.started_wall_s for side in sides for run in side)
    facts = [collect_facts(side[0], rows) for side in sides]
    found: list[list[tuple[Run, Summary]]] = [[] for _ in sides]
    for folder, run in _other_runs(runs, results):
        key = (run.id, run.started_wall_s)
        if key in compared or run.started_wall_s > newest_s:
            continue
        number = next((n for n, side in enumerate(sides) if _is_equal(run, side[0], rows, facts[n])), None)
        if number is None or len(found[number]) == MAX_EQUAL_RUNS:
            continue
        try:
            summary = read_summary(folder) if (folder / "summary.json").exists() else summary_of(folder)
        except HarnessError:
            continue
        if summary.valid is not False:
            compared.add(key)
            found[number].append((run, summary))
    return EqualRuns(found)


def _other_runs(runs: Path | None, results: Path | None) -> Iterator[tuple[Path, Run]]:
    """Runs that ended valid, the newest first."""
    paths = list(runs.glob("*/run.json")) if runs is not None else []
    if results is not None:
        paths += filed_runs(results)
    found = []
    for path in paths:
        try:
            run = read_run(path.parent)
        except HarnessError:
            continue
        if run.status in ("valid", "unchecked"):
            found.append((path.parent, run))
    yield from sorted(found, key=lambda one: (-one[1].started_wall_s, one[0]))


def _is_equal(run: Run, other: Run, rows: Sequence[RowKey], other_facts: dict[str, object]) -> bool:
    if (run.machine.name, run.workload_sha256, run.simulated) != (
        other.machine.name, other.workload_sha256, other.simulated,
    ):  # fmt: skip
        return False
    if not all(server in run.scenario.servers and load in run.scenario.loads for server, load in rows):
        return False
    return not differing_keys(other_facts, collect_facts(run, rows))


def _speed(metric: str, values: Sequence[float | None]) -> float | None:
    """The value of a run: the geometric mean over its repeats; None where one is unknown."""
    speeds = to_speeds(metric, [value for value in values if value is not None])
    return math.exp(stats.mean_log(speeds)) if speeds and len(speeds) == len(values) else None


def _value(run: Run, summary: Summary, key: RowKey, metric: str, measured: Measured) -> float | None:
    row = next((row for row in summary.rows if row.key == key), None)
    if row is None or row.invalid is not None or definition_conflict(row, measured.rows[0], number_fields(metric)):
        return None
    return _speed(metric, metric_values(row, {cell.id: cell for cell in summary.cells}, metric))
