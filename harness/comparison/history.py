"""The runs of one scenario on one machine over time: change points, their causes, and the gate for a new run."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from harness.analysis.summarize import summarize, summary_of
from harness.columns import RATES
from harness.comparison.compare import refuse_invalid
from harness.errors import HarnessError
from harness.judge import stats
from harness.judge.comparable import SHOWN_ONLY, collect_facts, find_differences
from harness.judge.noise_floors import RESERVED, is_noise_run
from harness.judge.stats import Shift, find_levels, find_shift
from harness.judge.verdicts import (
    Measured,
    comparison_metrics,
    is_client_limited,
    metric_values,
    number_fields,
    to_speeds,
)
from harness.rundir.manifest import Run, definition_conflict, read_run
from harness.summary import Difference, Row, Summary

# Why a run is left out of a history or series: the first reason that applies.
Reason = Literal[
    "unreadable", "not_valid", "noise_run", "machine", "engine_kind", "model", "workload", "later",
    "no_row", "client_limited", "no_value", "definition",
]  # fmt: skip
_NEAR = 2  # runs on either side of a change point that may differ in the manifest
_RunAndSummary = tuple[Run, Summary]


class LeftOut(Struct, frozen=True, kw_only=True):
    """Runs that are left out of the history, or of one series."""

    reason: Reason
    runs: list[str]


class HistoryPoint(Struct, frozen=True, kw_only=True):
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
    """One row (server, load) by one metric, oldest run first."""

    server: str
    load: str
    metric: str
    points: list[HistoryPoint]
    levels: list[Level]
    left_out: list[LeftOut] = []

    @property
    def name(self) -> str:
        return f"{self.server} / {self.load}"

    def level_ratio(self, level: int) -> float:
        """The speed of a level relative to the level before it."""
        ratio = self.levels[level].value / self.levels[level - 1].value
        return ratio if self.metric in RATES else 1 / ratio


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
    """The history of one scenario on one machine."""

    format_version: int = 1
    scenario: str
    machine: str
    model: str
    workload_sha256: str
    simulated: bool
    runs: list[str]  # oldest first
    left_out: list[LeftOut]
    series: list[Series]
    change_points: list[ChangePoint]


class Gated(Struct, frozen=True, kw_only=True):
    """The gate's result for a row of the run and a metric. Ratios are of speed."""

    server: str
    load: str
    metric: str
    word: Literal["slower", "faster", "no_shift", "inconclusive"]
    value: float | None  # of the run; None where it has none
    ratio: float | None  # of the newest `window` runs to the history's geometric mean
    low: float | None  # ratios that are expected of equal runs
    high: float | None
    p: float | None  # before correction
    window: int  # newest runs that show the shift together; 1 where none do
    runs: int  # of the history: since its last change point, without outliers
    since: str | None  # the first of them
    detectable: float | None  # slowdown that is found within three runs in 80 %
    needed: int | None  # runs of history that find one of 10 %; None: more than 100
    left_out: list[LeftOut] = []  # runs that have no value of this row and metric


class Gate(Struct, frozen=True, kw_only=True):
    """The gate's result for a run."""

    format_version: int = 1
    run: str
    scenario: str
    machine: str
    simulated: bool
    runs: int  # in the history
    left_out: list[LeftOut]
    rows: list[Gated]
    sides: list[str]  # the last run before the shift, or else before this run, and this run
    differences: list[Difference]

    @property
    def slower(self) -> bool:
        return any(row.word == "slower" for row in self.rows)


def history_of(scenario: str, runs: Path, results: Path, machine: str | None = None) -> History:
    """The history of a scenario on one machine, from the run directories below `runs` and the filed `results`.

    The newest valid run determines the model, workload and kind of engine of the history. Raises HarnessError where
    there is no run, or where several machines have runs and `machine` names none.
    """
    found, left_out = _collect_runs(scenario, runs, results)
    machines = sorted({run.machine.name for run, _ in found})
    if machine is None and len(machines) > 1:
        raise HarnessError(
            f"{scenario}: runs of {len(machines)} machines ({', '.join(machines)}); a history is of one",
            next_step=f"--machine {machines[0]}",
        )
    newest = next((run for run, _ in reversed(found) if machine in (None, run.machine.name)), None)
    if newest is None:
        where = "" if machine is None else f" of machine '{machine}' (known: {', '.join(machines) or 'none'})"
        raise HarnessError(
            f"{scenario}: no valid run{where} in {runs} or {results}",
            next_step=f"`harness run {scenario}` makes one; `harness list runs --runs {runs}` lists the runs.",
        )
    chosen, not_comparable = _select_comparable(found, newest)
    undivided = _make_series(chosen)
    series = [_divide_into_levels(one_series, len(undivided)) for one_series in undivided]
    return History(
        scenario=scenario,
        machine=newest.machine.name,
        model=newest.scenario.model,
        workload_sha256=newest.workload_sha256,
        simulated=newest.simulated,
        runs=[run.id for run, _ in chosen],
        left_out=left_out + not_comparable,
        series=series,
        change_points=_find_change_points(series, [run for run, _ in chosen]),
    )


def check_against_history(folder: Path, runs: Path, results: Path) -> Gate:
    """Compare a run with the earlier runs of its scenario on its machine. Raises RunError unless the run is VALID."""
    run, summary = read_run(folder), summarize(folder)
    if is_noise_run(run):
        raise HarnessError(
            f"{run.id}: an A/A run of `harness noise` is not compared with a history", next_step="Give a `harness run`."
        )
    refuse_invalid(run, summary, "is held against the history")
    found, left_out = _collect_runs(run.scenario_name, runs, results)
    others = [(other, other_summary) for other, other_summary in found if _run_key(other) != _run_key(run)]
    earlier, not_comparable = _select_comparable(others, run)
    keys = [row.key for row in summary.rows]
    series = _make_series([*earlier, (run, summary)], set(keys))
    rows = [_gate_series(one_series, run.id, len(series)) for one_series in series]
    # A shift that several runs show together started with the first of them, so compare with the run before that one.
    windows = [row.window for row in rows if row.word in ("slower", "faster")]
    sides = [earlier[-max(windows, default=1)][0], run] if earlier else [run]
    facts = [collect_facts(side, [key for key in keys if _has_row(side, key)]) for side in sides]
    return Gate(
        run=run.id,
        scenario=run.scenario_name,
        machine=run.machine.name,
        simulated=run.simulated,
        runs=len(earlier),
        left_out=left_out + not_comparable,
        rows=rows,
        sides=[side.id for side in sides],
        differences=find_differences(facts) if earlier else [],
    )


def _collect_runs(scenario: str, runs: Path, results: Path) -> tuple[list[_RunAndSummary], list[LeftOut]]:
    """The valid runs of a scenario, oldest first, each once; and those that cannot be used."""
    left_out = defaultdict[Reason, list[str]](list)
    valid: dict[tuple[str, float], _RunAndSummary] = {}
    filed = [path for path in results.glob("*/*/*/run.json") if path.relative_to(results).parts[0] not in RESERVED]
    for path in sorted([*runs.glob("*/run.json"), *filed]):
        folder = path.parent
        try:
            run = read_run(folder)
            if run.scenario_name != scenario or _run_key(run) in valid:
                continue
            if is_noise_run(run):
                left_out["noise_run"].append(run.id)
            elif run.status in ("valid", "unchecked") and (summary := summary_of(folder)).valid is not False:
                valid[_run_key(run)] = (run, summary)
            else:
                left_out["not_valid"].append(run.id)
        except HarnessError:
            left_out["unreadable"].append(folder.name)
    return sorted(valid.values(), key=lambda pair: pair[0].started_wall_s), _list_left_out(left_out)


def _run_key(run: Run) -> tuple[str, float]:
    return run.id, run.started_wall_s


def _select_comparable(runs: Sequence[_RunAndSummary], current: Run) -> tuple[list[_RunAndSummary], list[LeftOut]]:
    """The runs that did the same work as `current` and started no later, and the others."""
    left_out = defaultdict[Reason, list[str]](list)
    comparable = []
    for run, summary in runs:
        differing: dict[Reason, bool] = {
            "machine": run.machine.name != current.machine.name,
            "engine_kind": run.simulated != current.simulated,
            "model": run.scenario.model != current.scenario.model,
            "workload": run.workload_sha256 != current.workload_sha256,
            "later": run.started_wall_s > current.started_wall_s,
        }
        reason = next((reason for reason, differs in differing.items() if differs), None)
        if reason is None:
            comparable.append((run, summary))
        else:
            left_out[reason].append(run.id)
    return comparable, _list_left_out(left_out)


def _list_left_out(runs_by_reason: dict[Reason, list[str]]) -> list[LeftOut]:
    return [LeftOut(reason=reason, runs=runs) for reason, runs in runs_by_reason.items()]


def _make_series(runs: Sequence[_RunAndSummary], only: set[tuple[str, str]] | None = None) -> list[Series]:
    """The values of every row (server, load), or `only` of these rows, by metric; without levels."""
    keys = list(dict.fromkeys(row.key for _, summary in reversed(runs) for row in summary.rows))
    series = []
    for key in keys:
        if only is not None and key not in only:
            continue
        with_row = [(run, summary, row) for run, summary in runs for row in summary.rows if row.key == key]
        newest, _, newest_row = with_row[-1]
        measured = Measured(
            name=newest_row.name,
            load_name=key[1],
            load=newest.scenario.loads[key[1]],
            rows=[row for _, _, row in with_row],
            cells=[{cell.id: cell for cell in summary.cells} for _, summary, _ in with_row],
        )
        without_row = [run.id for run, summary in runs if all(row.key != key for row in summary.rows)]
        for metric in comparison_metrics(measured, measured):
            series.append(_make_metric_series(metric, with_row, without_row))
    return series


def _make_metric_series(metric: str, with_row: Sequence[tuple[Run, Summary, Row]], without_row: list[str]) -> Series:
    """The values of one row by one metric. `without_row`: runs that do not have the row."""
    newest_row = with_row[-1][2]
    left_out = defaultdict[Reason, list[str]](list)
    if without_row:
        left_out["no_row"] = without_row
    points = []
    for run, summary, row in with_row:
        values = metric_values(row, {cell.id: cell for cell in summary.cells}, metric)
        speeds = to_speeds(metric, [value for value in values if value is not None])
        if definition_conflict(newest_row, row, number_fields(metric)):
            left_out["definition"].append(run.id)
        elif is_client_limited(row, metric):
            left_out["client_limited"].append(run.id)
        elif not speeds or len(speeds) < len(values):
            left_out["no_value"].append(run.id)
        else:
            (value,) = to_speeds(metric, [math.exp(stats.mean_log(speeds))])  # inverts a speed back to a time
            points.append(HistoryPoint(run=run.id, started_wall_s=run.started_wall_s, value=value))
    return Series(
        server=newest_row.server,
        load=newest_row.load,
        metric=metric,
        points=points,
        levels=[],
        left_out=_list_left_out(left_out),
    )


def _series_speeds(series: Series) -> list[float]:
    return to_speeds(series.metric, [point.value for point in series.points])


def _divide_into_levels(series: Series, series_count: int) -> Series:
    """The series with its levels. `series_count`: the number of series that the tests are corrected for."""
    if not series.points:
        return series
    divided = find_levels(_series_speeds(series), series_count)
    points = list(series.points)
    for index in [*divided.outliers, *divided.undecided]:
        points[index] = replace(points[index], state="outlier" if index in divided.outliers else "undecided")
    levels = []
    for start, end in zip(divided.starts, [*divided.starts[1:], len(points)], strict=True):
        inside = [point for point in points[start:end] if point.state == "level"]
        value = math.exp(stats.mean_log([point.value for point in inside]))
        levels.append(Level(first=inside[0].run, last=inside[-1].run, runs=len(inside), value=value))
    return replace(series, points=points, levels=levels)


def _find_change_points(series: Sequence[Series], runs: Sequence[Run]) -> list[ChangePoint]:
    """The change points of all series. Those between the same two runs are joined."""
    index_of = {run.id: index for index, run in enumerate(runs)}
    moved_between: dict[tuple[str, str], list[Moved]] = {}
    for one_series in series:
        for number, (old, new) in enumerate(itertools.pairwise(one_series.levels), start=1):
            ratio = one_series.level_ratio(number)
            moved = Moved(server=one_series.server, load=one_series.load, metric=one_series.metric, ratio=ratio)
            moved_between.setdefault((old.last, new.first), []).append(moved)
    points = []
    for (before, after), all_moved in sorted(moved_between.items(), key=lambda item: index_of[item[0][1]]):
        rows = list(dict.fromkeys((moved.server, moved.load) for moved in all_moved))
        sides, differences = _nearest_difference(runs, index_of[before], index_of[after], rows)
        points.append(ChangePoint(before=before, after=after, moved=all_moved, sides=sides, differences=differences))
    return points


def _nearest_difference(
    runs: Sequence[Run], before: int, after: int, rows: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], list[Difference]]:
    """The two runs whose manifests differ at a change point, and their differences.

    Noise can move a change point by a run or two, away from its cause. So without a difference there, runs up to _NEAR
    before and after it are compared.
    """
    results = []
    for reach in range(_NEAR + 1):
        pair = [runs[max(0, before - reach)], runs[min(len(runs) - 1, after + reach)]]
        common = [key for key in rows if all(_has_row(run, key) for run in pair)]
        results.append(((pair[0].id, pair[1].id), find_differences([collect_facts(run, common) for run in pair])))
        if any(difference.key not in SHOWN_ONLY for difference in results[-1][1]):
            return results[-1]
    return results[0]


def _has_row(run: Run, row: tuple[str, str]) -> bool:
    return row[0] in run.scenario.servers and row[1] in run.scenario.loads


def _gate_series(series: Series, run: str, series_count: int) -> Gated:
    """Compare the newest run of a series, if it is `run`, with the runs before it."""
    has_value = bool(series.points) and series.points[-1].run == run
    shift = Shift("inconclusive", None, None, None, None, 1, [], None, None)
    if has_value:
        shift = find_shift(_series_speeds(series), series_count)
    fields = shift._asdict()
    history = [series.points[index] for index in fields.pop("history")]
    return Gated(
        server=series.server,
        load=series.load,
        metric=series.metric,
        value=series.points[-1].value if has_value else None,
        runs=len(history),
        since=history[0].run if history else None,
        left_out=series.left_out,
        **fields,
    )
