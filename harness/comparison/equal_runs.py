"""What is known of the variation between equal runs: earlier runs of a machine, and its stored noise."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from harness.analysis.summarize import read_summary, summary_of
from harness.errors import HarnessError
from harness.judge import stats
from harness.judge.comparable import collect_facts, differing_keys
from harness.judge.noise_floors import RESERVED, StoredNoise, is_noise_run, noise_path, noise_source, usable_noise
from harness.judge.verdicts import Measured, metric_values, number_fields, to_speeds
from harness.rundir.manifest import Run, definition_conflict, read_run
from harness.summary import Reason, Summary, because
from harness.units import count

MAX_EQUAL_RUNS = 20  # of each side, the newest
RowKey = tuple[str, str]  # server and load


class EqualRuns(Struct, frozen=True):
    """For each side of a comparison its equal runs that are not compared, and the stored noise of its machine."""

    runs: list[list[tuple[Run, Summary]]]
    noise: list[list[StoredNoise]]
    mismatched: list[Reason] = []  # stored noise that is of other work

    def source(self) -> list[Reason]:
        """The assumption, and what else the variation between runs is known from."""
        names = [run.id for group in self.runs for run, _ in group]
        found = {noise_source(one).values["machine"]: noise_source(one) for of_side in self.noise for one in of_side}
        equal = [because("equal_runs", count(len(names), "earlier equal run"), runs=len(names))] if names else []
        assumed = f"{stats.ASSUMED_SD:.0%} assumed (counts as much as 5 runs)"
        return [because("variation_assumed", assumed, sd=stats.ASSUMED_SD), *equal, *found.values(), *self.mismatched]

    def known(
        self, row: RowKey, sides: Sequence[tuple[int, Sequence[Run], Measured]]
    ) -> Callable[[str], tuple[float, int]]:
        """What is known of a row besides the values of the sides, by metric: sum of squares, degrees of freedom.

        `sides`: of each side its number, its runs and its measured row.
        """

        def of_metric(metric: str) -> tuple[float, int]:
            squares, freedom = 0.0, 0
            for number, _, measured in sides:
                own = [value for run in measured.values(metric) if (value := _speed(metric, run)) is not None]
                others = [
                    value
                    for run, summary in self.runs[number]
                    if (value := _value(run, summary, row, metric, measured))
                ]
                if own and others:
                    squares += stats.sum_of_squares([*own, *others]) - stats.sum_of_squares(own)
                    freedom += len(others)
            used: set[tuple[str, ...]] = set()
            for number, runs, measured in sides:
                for noise in self.noise[number]:
                    key = (noise.machine, noise.scenario, *(one.id for one in noise.runs))
                    if key not in used and noise.server == row[0] and _has_server_of(noise, runs[0], row[0]):
                        used.add(key)
                        noise_squares, noise_freedom = _noise_squares(noise, row[1], metric, measured)
                        squares, freedom = squares + noise_squares, freedom + noise_freedom
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
    noise: list[list[StoredNoise]] = [[] for _ in sides]
    mismatched: dict[Path, Reason] = {}
    for number, side in enumerate(sides):
        if results is not None:
            path, (stored, mismatch) = noise_path(results, side[0]), usable_noise(side[0], results)
            noise[number] = [stored] if stored is not None else []
            if mismatch is not None:
                mismatched[path] = mismatch
    return EqualRuns(found, noise, list(mismatched.values()))


def _other_runs(runs: Path | None, results: Path | None) -> Iterator[tuple[Path, Run]]:
    """Runs that ended valid, the newest first, without those of `harness noise`."""
    paths = list(runs.glob("*/run.json")) if runs is not None else []
    if results is not None:
        paths += [path for path in results.glob("*/*/*/run.json") if path.relative_to(results).parts[0] not in RESERVED]
    found = []
    for path in paths:
        try:
            run = read_run(path.parent)
        except HarnessError:
            continue
        if run.status in ("valid", "unchecked") and not is_noise_run(run):
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


def _has_server_of(noise: StoredNoise, run: Run, server: str) -> bool:
    served = next((cell.served_by for cell in run.served if cell.server == server), None)
    return served is not None and (served.image_digest, served.version) == (noise.image_digest, noise.version)


def _noise_squares(noise: StoredNoise, load: str, metric: str, measured: Measured) -> tuple[float, int]:
    row = next((row for row in noise.rows if (row.metric, row.load) == (metric, load)), None)
    variation = None if row is None else row.variation()
    if variation is None:
        return 0.0, 0
    repeats = [len(run) for run in measured.values(metric) if run] or [1]
    variance = variation.run_variance(len(repeats) / sum(1 / number for number in repeats))
    return variance * variation.freedom, variation.freedom
