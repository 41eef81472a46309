"""Is a run slower than the earlier runs of its scenario on its machine, and since when?"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from harness.base.metrics import METRICS
from harness.numbers import stats
from harness.numbers.comparable import SHOWN_ONLY, collect_facts, definition_conflict, find_differences
from harness.numbers.comparison import TOLERANCE, Difference, Gate, known_bounds
from harness.numbers.gate import decide_gate
from harness.numbers.power_settings import differing_settings, power_text
from harness.numbers.summary import Row, Summary
from harness.numbers.verdicts import (
    Measured,
    comparison_metrics,
    is_client_limited,
    metric_values,
    to_speeds,
)
from harness.records.manifest import Run

# Why a run is left out of a history or series: the first reason that applies.
LeftOut = Literal[
    "unreadable", "not_valid", "machine", "engine_kind", "model", "workload", "later", "power",
    "no_row", "client_limited", "no_value", "definition",
]  # fmt: skip
Summarized = tuple[Run, Summary]
_NEAR = 2  # runs on either side of a change point that may differ in the manifest


class Point(Struct, frozen=True, kw_only=True):
    """A run in a series."""

    run: str
    started_wall_s: float
    value: float  # geometric mean over the repeats: seconds, or tokens per second
    state: Literal["level", "outlier", "undecided"] = "level"  # outliers and undecided runs are in no level


class Level(Struct, frozen=True, kw_only=True):
    """Runs between two change points."""

    first: str
    last: str
    runs: int
    value: float  # geometric mean over the runs


class Series(Struct, frozen=True, kw_only=True):
    """One row (server, load) by one metric, oldest run first, and the verdict on the newest. Ratios are of speed."""

    server: str
    load: str
    metric: str
    points: list[Point]
    levels: list[Level]
    left_out: dict[LeftOut, list[str]]  # runs that have no value of this row and metric
    word: Literal["slower", "faster", "no_shift", "inconclusive"] = "inconclusive"
    value: float | None = None  # of the newest run; None where it has none
    ratio: float | None = None  # of the newest `window` runs to the history's geometric mean
    low: float | None = None  # ratios that are expected of equal runs
    high: float | None = None
    # 95 % interval of the ratio; with fewer runs of history than the gate needs, by the assumed variation of runs
    ratio_low: float | None = None
    ratio_high: float | None = None
    gate: Gate = "cannot_tell"  # what the exit code follows
    tolerance: float = TOLERANCE  # of the gate: 0.1 is a slowdown of 10 %
    p: float | None = None  # before correction
    window: int = 1  # newest runs that show the shift together; 1 where none do
    runs: int = 0  # of the history: since its last change point, without outliers
    since: str | None = None  # the first of them
    level: float | None = None  # geometric mean over them, that `ratio` refers to
    detectable: float | None = None  # slowdown that is found within three runs in 80 %
    needed: int | None = None  # runs of history that find one of 10 %; None: more than 100

    @property
    def name(self) -> str:
        return f"{self.server} / {self.load}"

    @property
    def kept(self) -> list[str]:
        """Its runs without outliers."""
        return [point.run for point in self.points if point.state != "outlier"]

    @property
    def before_window(self) -> str:
        """The last run before the newest `window` runs, which outliers are no part of."""
        return self.kept[-1 - self.window]

    def level_ratio(self, level: int) -> float:
        """The speed of a level relative to the level before it."""
        ratio = self.levels[level].value / self.levels[level - 1].value
        return ratio if METRICS[self.metric].more_is_better else 1 / ratio


class Moved(Struct, frozen=True, kw_only=True):
    """The shift of a series at a change point. A ratio above 1 is faster."""

    server: str
    load: str
    metric: str
    ratio: float


class ChangePoint(Struct, frozen=True, kw_only=True):
    """A shift of one or more series, and the differences of the manifests there."""

    before: str  # last run of the old level
    after: str  # first run of the new one
    moved: list[Moved]
    sides: tuple[str, str]  # the runs whose manifests differ: `before` and `after`, else two neighbours near them
    differences: list[Difference]


class History(Struct, frozen=True, kw_only=True):
    """A run and the earlier runs of its scenario on its machine."""

    run: str
    scenario: str
    machine: str
    model: str
    workload_sha256: str
    simulated: bool
    runs: list[str]  # oldest first; the last is the run itself
    left_out: dict[LeftOut, list[str]]
    series: list[Series]
    change_points: list[ChangePoint]
    sides: list[str]  # the last run before the shift, or else before this run, and this run
    differences: list[Difference]
    without_records: list[str] = []  # those of `runs` whose stored summary is used
    unknown_power: list[str] = []  # those of `runs` without power settings, where the run itself has some


def decide_history(
    run: Run,
    newest: Summary,
    earlier: Sequence[Summarized],
    left_out: dict[LeftOut, list[str]],
    without_records: list[str],
    tolerance: float,
) -> History:
    """The history of a run with the summary `newest`. `earlier`: the runs that did the same work, oldest first."""
    all_runs = [earlier_run for earlier_run, _ in earlier] + [run]
    undecided = _make_series([*earlier, (run, newest)])
    series = [_with_gate(_decide(item, run.id, len(undecided)), tolerance) for item in undecided]
    # A shift that several runs show together started with the first of them, so compare with the run before that one.
    before = {item.before_window for item in series if item.word in ("slower", "faster")}
    sides = [next((other for other in all_runs if other.id in before), all_runs[-2]), run] if earlier else [run]
    keys = [row.key for row in newest.rows]
    facts = [collect_facts(side, [key for key in keys if _has_row(side, key)]) for side in sides]
    return History(
        run=run.id,
        scenario=run.scenario_name,
        machine=run.server_machine.name,
        model=run.scenario.model,
        workload_sha256=run.workload_sha256,
        simulated=run.simulated,
        runs=[other.id for other in all_runs],
        left_out=left_out,
        series=series,
        change_points=_find_change_points(series, all_runs),
        sides=[side.id for side in sides],
        differences=find_differences(facts) if earlier else [],
        without_records=without_records,
        unknown_power=[other.id for other in all_runs if power_text(other.server_machine) is None]
        if power_text(run.server_machine) is not None
        else [],
    )


def exclusion(run: Run, current: Run) -> LeftOut | None:
    """Why a run is not part of the history of `current`; None: it is, if its summary is valid."""
    differing: dict[LeftOut, bool] = {
        "not_valid": run.status not in ("valid", "unchecked"),
        "machine": run.machine_names != current.machine_names,
        "engine_kind": run.simulated != current.simulated,
        "model": run.scenario.model != current.scenario.model,
        "workload": run.workload_sha256 != current.workload_sha256,
        "later": run.started_wall_s > current.started_wall_s,
        "power": bool(differing_settings(run.server_machine, current.server_machine)),
    }
    return next((reason for reason, differs in differing.items() if differs), None)


def _make_series(runs: Sequence[Summarized]) -> list[Series]:
    """The values of every row of the newest run by metric, without levels and verdict."""
    series = []
    for key in [row.key for row in runs[-1][1].rows]:
        with_row = [(entry, row) for entry in runs for row in entry[1].rows if row.key == key]
        (newest, _), newest_row = with_row[-1]
        measured = Measured(
            name=newest_row.name,
            load=newest.scenario.loads[key[1]],
            rows=[row for _, row in with_row],
            cells=[{cell.id: cell for cell in summary.cells} for (_, summary), _ in with_row],
        )
        without_row = [run.id for run, summary in runs if all(row.key != key for row in summary.rows)]
        for metric in comparison_metrics(measured, measured):
            series.append(_make_metric_series(metric, with_row, without_row))
    return series


def _make_metric_series(metric: str, with_row: Sequence[tuple[Summarized, Row]], without_row: list[str]) -> Series:
    """The values of one row by one metric. `without_row`: runs that do not have the row."""
    newest_row = with_row[-1][1]
    left_out = defaultdict[LeftOut, list[str]](list)
    if without_row:
        left_out["no_row"] = without_row
    points = []
    for (run, summary), row in with_row:
        values = metric_values(row, {cell.id: cell for cell in summary.cells}, metric)
        speeds = to_speeds(metric, [value for value in values if value is not None])
        if definition_conflict(newest_row, row, METRICS[metric].defined_fields):
            left_out["definition"].append(run.id)
        elif is_client_limited(row, metric):
            left_out["client_limited"].append(run.id)
        elif not speeds or len(speeds) < len(values):
            left_out["no_value"].append(run.id)
        else:
            (value,) = to_speeds(metric, [math.exp(stats.mean_log(speeds))])  # inverts a speed back to a time
            points.append(Point(run=run.id, started_wall_s=run.started_wall_s, value=value))
    server, load = newest_row.key
    return Series(server=server, load=load, metric=metric, points=points, levels=[], left_out=dict(left_out))


def _decide(series: Series, run: str, series_count: int) -> Series:
    """The series with its levels, and with the verdict on its newest run if that is `run`.

    `series_count`: the number of series that the tests are corrected for.
    """
    if not series.points:
        return series
    speeds = to_speeds(series.metric, [point.value for point in series.points])
    split = stats.find_levels(speeds, series_count)
    states: dict[int, Literal["outlier", "undecided"]] = dict.fromkeys(split.undecided, "undecided")
    states |= dict.fromkeys(split.outliers, "outlier")
    points = [replace(point, state=states.get(index, "level")) for index, point in enumerate(series.points)]
    levels = []
    for start, end in itertools.pairwise([*split.starts, len(points)]):
        inside = [point for point in points[start:end] if point.state == "level"]
        value = math.exp(stats.mean_log([point.value for point in inside]))
        levels.append(Level(first=inside[0].run, last=inside[-1].run, runs=len(inside), value=value))
    series = replace(series, points=points, levels=levels)
    if points[-1].run != run:
        return series
    shift = stats.find_shift(speeds, series_count)._asdict()
    before = [points[index] for index in shift.pop("history")]
    shift["low"], shift["high"] = known_bounds(1.0, shift["low"], shift["high"])
    effect = shift.pop("effect")
    if effect is not None:
        shift["ratio_low"], shift["ratio_high"] = effect.interval()
    since = before[0].run if before else None
    level = math.exp(stats.mean_log([point.value for point in before])) if before else None
    return replace(series, value=points[-1].value, runs=len(before), since=since, level=level, **shift)


def _with_gate(series: Series, tolerance: float) -> Series:
    """The series with its gate. A slowdown that the newest run may share with equal runs is not known to be slower."""
    gate = decide_gate(series.ratio_low, series.ratio_high, tolerance)
    if gate in ("slower", "size_unknown") and series.word != "slower":
        gate = "cannot_tell"
    return replace(series, gate=gate, tolerance=tolerance)


def _find_change_points(series: Sequence[Series], runs: Sequence[Run]) -> list[ChangePoint]:
    """The change points of all series. Those between the same two runs are joined."""
    index_of = {run.id: index for index, run in enumerate(runs)}
    shifted: dict[tuple[str, str], list[tuple[Series, int]]] = {}
    for metric_series in series:
        for number, (old, new) in enumerate(itertools.pairwise(metric_series.levels), start=1):
            shifted.setdefault((old.last, new.first), []).append((metric_series, number))
    points = []
    for (before, after), at in sorted(shifted.items(), key=lambda item: index_of[item[0][1]]):
        moved = [
            Moved(server=own.server, load=own.load, metric=own.metric, ratio=own.level_ratio(number))
            for own, number in at
        ]
        kept = [run for run in runs if all(run.id in own.kept for own, _ in at)]
        rows = list(dict.fromkeys((own.server, own.load) for own, _ in at))
        sides, differences = _nearest_difference(kept, before, after, rows)
        points.append(ChangePoint(before=before, after=after, moved=moved, sides=sides, differences=differences))
    return points


def _nearest_difference(
    runs: Sequence[Run], before: str, after: str, rows: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], list[Difference]]:
    """The two runs whose manifests differ at a change point, and their differences.

    Noise can move a change point by a run or two, away from its cause. So without a difference there, runs up to _NEAR
    before and after it are compared. `runs`: those of the series, without outliers, which may have another cause.
    """
    last, first = (next(index for index, run in enumerate(runs) if run.id == name) for name in (before, after))
    results = []
    for reach in range(_NEAR + 1):
        pair = [runs[max(0, last - reach)], runs[min(len(runs) - 1, first + reach)]]
        common = [key for key in rows if all(_has_row(run, key) for run in pair)]
        results.append(((pair[0].id, pair[1].id), find_differences([collect_facts(run, common) for run in pair])))
        if any(difference.key not in SHOWN_ONLY for difference in results[-1][1]):
            return results[-1]
    return results[0]


def _has_row(run: Run, row: tuple[str, str]) -> bool:
    return row[0] in run.scenario.servers and row[1] in run.scenario.loads
