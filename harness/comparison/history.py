"""The runs of one scenario on one machine over time: change points, what changed with them, and the gate."""

import math
from collections.abc import Callable, Sequence
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
from harness.judge.verdicts import Measured, comparison_metrics, metric_values, number_fields, to_speeds
from harness.rundir.manifest import Run, read_run, unlike_rows
from harness.summary import Difference, Row, Summary

# In this order: a run is left out for the first that applies.
Reason = Literal[
    "unreadable", "not_valid", "noise_run", "machine", "engine_kind", "model", "workload", "later",
    "no_row", "client_limited", "no_value", "definition",
]  # fmt: skip
_NEAR = 2  # runs around a change point in which a difference of the manifests is looked for
_RunAndSummary = tuple[Path, Run, Summary]


class LeftOut(Struct, frozen=True, kw_only=True):
    """Runs that are no part of the history, or of one series, and why."""

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
        """How fast a level is, relative to the one before it."""
        ratio = self.levels[level].value / self.levels[level - 1].value
        return ratio if self.metric in RATES else 1 / ratio


class Moved(Struct, frozen=True, kw_only=True):
    """A series at a change point. Above 1 it became faster."""

    server: str
    load: str
    metric: str
    ratio: float


class ChangePoint(Struct, frozen=True, kw_only=True):
    """Where series change, and in what the manifests differ there."""

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
    """A row of the run that is checked, by one metric, against its history. Ratios are of speed."""

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
    """One run against the history of its machine."""

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
    """The history of a scenario on one machine, from the run directories of `runs` and what `results` holds.

    The newest valid run says which model, workload and kind of engine the history is about. Raises HarnessError where
    there is no run, or where several machines have some and `machine` names none.
    """
    found, left_out = _collect_runs(scenario, runs, results)
    machines = sorted({run.machine.name for _, run, _ in found})
    if machine is None and len(machines) > 1:
        raise HarnessError(
            f"{scenario}: runs of {len(machines)} machines ({', '.join(machines)}); a history is of one",
            next_step=f"--machine {machines[0]}",
        )
    mine = [run for _, run, _ in found if machine in (None, run.machine.name)]
    if not mine:
        where = "" if machine is None else f" of machine '{machine}' (known: {', '.join(machines) or 'none'})"
        raise HarnessError(
            f"{scenario}: no valid run{where} in {runs} or {results}",
            next_step=f"`harness run {scenario}` makes one; `harness runs --runs {runs}` lists the runs.",
        )
    chosen, others = _select_comparable(found, mine[-1])
    series = _make_series(chosen)
    divided = [_divide_into_levels(one, len(series)) for one in series]
    newest = mine[-1]
    return History(
        scenario=scenario,
        machine=newest.machine.name,
        model=newest.scenario.model,
        workload_sha256=newest.workload_sha256,
        simulated=newest.simulated,
        runs=[run.id for _, run, _ in chosen],
        left_out=left_out + others,
        series=divided,
        change_points=_find_change_points(divided, [run for _, run, _ in chosen]),
    )


def check_against_history(folder: Path, runs: Path, results: Path) -> Gate:
    """Hold a run against the earlier runs of its scenario on its machine. Raises RunError for one that is not VALID."""
    run, summary = read_run(folder), summarize(folder)
    if is_noise_run(run):
        raise HarnessError(
            f"{run.id}: an A/A run of `harness noise` is not compared with a history", next_step="Give a `harness run`."
        )
    refuse_invalid(run, summary, "is held against the history")
    found, left_out = _collect_runs(run.scenario_name, runs, results)
    chosen, others = _select_comparable([one for one in found if _run_key(one[1]) != _run_key(run)], run)
    everything = [*chosen, (folder, run, summary)]
    series = _make_series(everything, {row.key for row in summary.rows})
    rows = [_gate_series(one, run.id, len(series)) for one in series]
    # What two or three runs show together began with the first of them; each row has runs of its own.
    places = {one.id: place for place, (_, one, _) in enumerate(chosen)}
    begun = [
        places[points[-row.window - 1].run]
        for row, points in zip(rows, (one.points for one in series), strict=True)
        if row.word in ("slower", "faster")
    ]
    last = [one for _, one, _ in chosen][min(begun, default=len(chosen) - 1) :][:1]
    keys = [row.key for row in summary.rows]
    sides = [*last, run]
    return Gate(
        run=run.id,
        scenario=run.scenario_name,
        machine=run.machine.name,
        simulated=run.simulated,
        runs=len(chosen),
        left_out=left_out + others,
        rows=rows,
        sides=[one.id for one in sides],
        differences=find_differences([collect_facts(one, [key for key in keys if _has_row(one, key)]) for one in sides])
        if last
        else [],
    )


def _collect_runs(scenario: str, runs: Path, results: Path) -> tuple[list[_RunAndSummary], list[LeftOut]]:
    """The valid runs of a scenario, oldest first, each once; and those that cannot be used."""
    out: dict[Reason, list[str]] = {}
    found: dict[tuple[str, float], _RunAndSummary] = {}
    published = [path for path in results.glob("*/*/*/run.json") if path.relative_to(results).parts[0] not in RESERVED]
    for path in sorted([*runs.glob("*/run.json"), *published]):
        folder = path.parent
        try:
            run = read_run(folder)
            if run.scenario_name != scenario or _run_key(run) in found:
                continue
            if is_noise_run(run):
                out.setdefault("noise_run", []).append(run.id)
            elif run.status in ("valid", "unchecked") and (summary := summary_of(folder)).valid is not False:
                found[_run_key(run)] = (folder, run, summary)
            else:
                out.setdefault("not_valid", []).append(run.id)
        except HarnessError:
            out.setdefault("unreadable", []).append(folder.name)
    return sorted(found.values(), key=lambda one: one[1].started_wall_s), _make_left_out(out)


def _run_key(run: Run) -> tuple[str, float]:
    return run.id, run.started_wall_s


def _select_comparable(found: Sequence[_RunAndSummary], like: Run) -> tuple[list[_RunAndSummary], list[LeftOut]]:
    """The runs that did the same work as `like` and started no later, and those that did not."""
    unlike: list[tuple[Reason, Callable[[Run], bool]]] = [
        ("machine", lambda run: run.machine.name != like.machine.name),
        ("engine_kind", lambda run: run.simulated != like.simulated),
        ("model", lambda run: run.scenario.model != like.scenario.model),
        ("workload", lambda run: run.workload_sha256 != like.workload_sha256),
        ("later", lambda run: run.started_wall_s > like.started_wall_s),
    ]
    out: dict[Reason, list[str]] = {}
    chosen = []
    for one in found:
        reason = next((reason for reason, differs in unlike if differs(one[1])), None)
        if reason is None:
            chosen.append(one)
        else:
            out.setdefault(reason, []).append(one[1].id)
    return chosen, _make_left_out(out)


def _make_left_out(found: dict[Reason, list[str]]) -> list[LeftOut]:
    return [LeftOut(reason=reason, runs=runs) for reason, runs in found.items()]


def _make_series(found: Sequence[_RunAndSummary], only: set[tuple[str, str]] | None = None) -> list[Series]:
    """The values of every row and metric, not divided yet."""
    keys = dict.fromkeys(row.key for _, _, summary in reversed(found) for row in summary.rows)
    made = []
    for key in keys if only is None else only & set(keys):
        having = [(run, summary, row) for _, run, summary in found for row in summary.rows if row.key == key]
        newest, _, newest_row = having[-1]
        measured = Measured(
            name=newest_row.name,
            load_name=key[1],
            load=newest.scenario.loads[key[1]],
            rows=[row for _, _, row in having],
            cells=[{cell.id: cell for cell in summary.cells} for _, summary, _ in having],
        )
        absent = [run.id for _, run, summary in found if all(row.key != key for row in summary.rows)]
        for metric in comparison_metrics(measured, measured):
            made.append(_metric_series(key, metric, having, newest_row, absent))
    return sorted(made, key=lambda one: list(keys).index((one.server, one.load)))


def _metric_series(
    key: tuple[str, str],
    metric: str,
    having: Sequence[tuple[Run, Summary, Row]],
    newest: Row,
    absent: Sequence[str],
) -> Series:
    out: dict[Reason, list[str]] = {"no_row": list(absent)} if absent else {}
    points = []
    for run, summary, row in having:
        values = metric_values(row, {cell.id: cell for cell in summary.cells}, metric)
        known = to_speeds(metric, [value for value in values if value is not None])
        if unlike_rows(newest, row, number_fields(metric)):
            out.setdefault("definition", []).append(run.id)
        elif set(number_fields(metric)) & set(row.client_limited):
            out.setdefault("client_limited", []).append(run.id)
        elif not known or len(known) < len(values):
            out.setdefault("no_value", []).append(run.id)
        else:
            points.append(HistoryPoint(run=run.id, started_wall_s=run.started_wall_s, value=_mean_value(metric, known)))
    return Series(server=key[0], load=key[1], metric=metric, points=points, levels=[], left_out=_make_left_out(out))


def _mean_value(metric: str, of_speeds: Sequence[float]) -> float:
    """The geometric mean of speeds, as a value of the metric."""
    (value,) = to_speeds(metric, [math.exp(stats.mean_log(of_speeds))])  # a speed turned round is a time
    return value


def _speeds(series: Series) -> list[float]:
    return to_speeds(series.metric, [point.value for point in series.points])


def _divide_into_levels(series: Series, count: int) -> Series:
    """A series with its levels, corrected for so many series."""
    if not series.points:
        return series
    found = find_levels(_speeds(series), count)
    points = [
        replace(point, state="outlier" if place in found.outliers else "undecided")
        if place in found.outliers or place in found.undecided
        else point
        for place, point in enumerate(series.points)
    ]
    levels = []
    for start, end in zip(found.starts, [*found.starts[1:], len(points)], strict=True):
        inside = [point for point in points[start:end] if point.state == "level"]
        value = math.exp(stats.mean_log([point.value for point in inside]))
        levels.append(Level(first=inside[0].run, last=inside[-1].run, runs=len(inside), value=value))
    return replace(series, points=points, levels=levels)


def _find_change_points(series: Sequence[Series], runs: Sequence[Run]) -> list[ChangePoint]:
    """The change points of all series; those between the same two runs are one."""
    places = {run.id: place for place, run in enumerate(runs)}
    found: dict[tuple[str, str], list[Moved]] = {}
    for one in series:
        for number in range(1, len(one.levels)):
            pair = one.levels[number - 1].last, one.levels[number].first
            ratio = one.level_ratio(number)
            found.setdefault(pair, []).append(Moved(server=one.server, load=one.load, metric=one.metric, ratio=ratio))
    made = []
    for (before, after), moved in sorted(found.items(), key=lambda item: places[item[0][1]]):
        rows = list(dict.fromkeys((one.server, one.load) for one in moved))
        sides, differing = _nearest_difference(runs, places[before], places[after], rows)
        made.append(ChangePoint(before=before, after=after, moved=moved, sides=sides, differences=differing))
    return made


def _nearest_difference(
    runs: Sequence[Run], before: int, after: int, rows: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], list[Difference]]:
    """In what the manifests differ at a change point; where they do not, at the nearest pair of neighbours.

    Noise can move a change point by a run or two, away from what caused it.
    """
    near = sorted(range(max(1, before - _NEAR + 1), min(len(runs), after + _NEAR + 1)), key=lambda at: abs(at - after))
    first: tuple[tuple[str, str], list[Difference]] | None = None
    for one, other in [(before, after), *((at - 1, at) for at in near)]:
        pair = [runs[one], runs[other]]
        common = [key for key in rows if all(_has_row(run, key) for run in pair)]
        found = find_differences([collect_facts(run, common) for run in pair])
        result = (pair[0].id, pair[1].id), found
        if any(difference.key not in SHOWN_ONLY for difference in found):
            return result
        first = first or result
    assert first is not None
    return first


def _has_row(run: Run, row: tuple[str, str]) -> bool:
    return row[0] in run.scenario.servers and row[1] in run.scenario.loads


def _gate_series(series: Series, run: str, count: int) -> Gated:
    """The newest run of a series against those before it."""
    current = series.points[-1] if series.points and series.points[-1].run == run else None
    shift = Shift("inconclusive", None, None, None, None, 1, [], None, None)
    if current is not None:
        shift = find_shift(_speeds(series), count)
    found = shift._asdict()
    history = [series.points[place] for place in found.pop("history")]
    return Gated(
        server=series.server,
        load=series.load,
        metric=series.metric,
        value=None if current is None else current.value,
        runs=len(history),
        since=history[0].run if history else None,
        left_out=series.left_out,
        **found,
    )
