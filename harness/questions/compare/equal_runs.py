"""The variation between equal runs, from earlier runs of a machine."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from harness.base.errors import HarnessError
from harness.base.metrics import METRICS
from harness.base.reason import Reason, because
from harness.base.units import count, percent
from harness.numbers import stats
from harness.numbers.comparable import collect_facts, definition_conflict, differing_keys, is_address
from harness.numbers.summarize import summary_of
from harness.numbers.summary import Summary
from harness.numbers.verdicts import ComparedSides, Measured, metric_values, to_speeds
from harness.records.directory import list_runs
from harness.records.manifest import Run

MAX_EQUAL_RUNS = 20  # of each side, the newest
CHANGED = 1.5  # a ratio of sides that is no variation between equal runs: 7 standard deviations of the assumption
DIVISION_FREEDOM = 2  # equal servers with eight runs between the sides keep their rate of false verdicts
RowKey = tuple[str, str]  # server and load


class Value(NamedTuple):
    """The value of a run, as a speed."""

    started_wall_s: float
    speed: float
    sides: frozenset[int] = frozenset()  # of an earlier run: those that it equals


class EqualRun(NamedTuple):
    """An earlier run and the numbers of the sides that it equals."""

    run: Run
    summary: Summary
    sides: frozenset[int]


class EqualRuns(Struct, frozen=True):
    """The runs that equal a side of a comparison and are not compared. `starts`: when the runs of each side started."""

    runs: list[EqualRun]
    starts: list[list[float]]

    def variation(self, row: RowKey, sides: Sequence[tuple[int, Measured]]) -> Callable[[str], tuple[float, int]]:
        """What is known of a row besides the values of the sides, by metric: sum of squares, degrees of freedom.

        `sides`: of each of the two sides its number and its measured row.
        """

        def metric_variation(metric: str) -> tuple[float, int]:
            own = {
                number: [
                    Value(start, speed)
                    for start, run in zip(self.starts[number], measured.values(metric), strict=True)
                    if (speed := _speed(metric, run)) is not None
                ]
                for number, measured in sides
            }
            earlier = [
                Value(run.started_wall_s, speed, equals)
                for run, summary, equals in self.runs
                if not equals.isdisjoint(own) and (speed := _value(run, summary, row, metric, sides[0][1]))
            ]
            return variation_within(own, earlier)

        return metric_variation


def variation_source(pairs: Sequence[ComparedSides], equal: EqualRuns, machine: str) -> list[Reason]:
    """How far equal runs differ, and whose variation that is: of the runs of a machine, or the assumption.

    It is measured where the runs weigh as much as the assumption in every pair (`stats.is_mostly_assumed`).
    """
    earlier = len(equal.runs)
    earlier_text = f" and {count(earlier, 'earlier equal run')}" if earlier else ""
    variations = [measured_variation(pair) for pair in pairs if pair.refused is None]
    if not variations or any(freedom < stats.ASSUMED_FREEDOM for _, freedom in variations):
        text = f"your runs{earlier_text} are too few to know it; {percent(stats.ASSUMED_SD, 0)} is assumed"
        return [because("variation_assumed", text, sd=stats.ASSUMED_SD, runs=earlier)]
    sds = [math.sqrt(squares / freedom) for squares, freedom in variations]
    runs = max(len(pair.side_speeds) + len(pair.baseline_speeds) for pair in pairs)
    shown = " to ".join(dict.fromkeys(percent(sd, 1) for sd in (min(sds), max(sds))))
    text = f"{shown}, measured on {machine}: these {runs} runs{earlier_text}"
    return [because("variation_measured", text, low=min(sds), high=max(sds), compared=runs, runs=earlier)]


def measured_variation(pair: ComparedSides) -> tuple[float, int]:
    """The sum of squares of equal runs around the mean of their side, with its degrees of freedom."""
    squares, freedom = pair.earlier
    for runs in (pair.side_speeds, pair.baseline_speeds):
        values = [math.exp(stats.mean_log(run)) for run in runs if run]
        if len(values) > 1:
            squares, freedom = squares + stats.sum_of_squares(values), freedom + len(values) - 1
    return squares, freedom


def variation_within(sides: Mapping[int, Sequence[Value]], earlier: Sequence[Value]) -> tuple[float, int]:
    """The sum of squares of earlier runs from the mean of the side that they count for, and its degrees of freedom.

    A run that equals only one of the two sides counts for it. One that equals both counts for the nearer in value if
    the sides differ by more than CHANGED. Otherwise time decides: the sides are divided at the place between them that
    leaves the smallest sum of squares. That choice costs DIVISION_FREEDOM.
    """
    if not all(sides.values()):
        return 0.0, 0
    groups: dict[int, list[float]] = {number: [] for number in sides}
    unknown = []
    for value in earlier:
        equals = value.sides & sides.keys()
        if len(equals) == 1:
            groups[min(equals)].append(value.speed)
        else:
            unknown.append(value)
    middle = {number: stats.mean_log([value.speed for value in own]) for number, own in sides.items()}
    low, high = sorted(sides, key=lambda number: middle[number])
    divided = 0
    if middle[high] - middle[low] > math.log(CHANGED):
        for value in unknown:
            is_high = math.log(value.speed) > (middle[low] + middle[high]) / 2
            groups[high if is_high else low].append(value.speed)
    else:
        groups, divided = _divide_by_time(sides, groups, sorted(unknown))
    squares = sum(_added_squares(sides[number], values) for number, values in groups.items())
    return squares, max(sum(map(len, groups.values())) - divided, 0)


def _divide_by_time(
    sides: Mapping[int, Sequence[Value]], groups: Mapping[int, list[float]], unknown: Sequence[Value]
) -> tuple[dict[int, list[float]], int]:
    """The groups with the runs that equal both sides, and the degrees of freedom that their division costs.

    Runs during sides that overlap in time count for none.
    """
    older, newer = sorted(sides, key=lambda number: min(sides[number]))
    last, first = max(sides[older]).started_wall_s, min(sides[newer]).started_wall_s
    before = [value.speed for value in unknown if value.started_wall_s < min(last, first)]
    after = [value.speed for value in unknown if value.started_wall_s > max(last, first)]
    between = [value.speed for value in unknown if last < value.started_wall_s < first]

    def divided_at(index: int) -> dict[int, list[float]]:
        return {
            older: [*groups[older], *before, *between[:index]],
            newer: [*groups[newer], *between[index:], *after],
        }

    def squares(values_by_side: Mapping[int, list[float]]) -> float:
        return sum(_added_squares(sides[number], values) for number, values in values_by_side.items())

    best = min(map(divided_at, range(len(between) + 1)), key=squares)
    return best, DIVISION_FREEDOM if between else 0


def _added_squares(own: Sequence[Value], others: Sequence[float]) -> float:
    """What other runs of a side add to the sum of squares of its own."""
    values = [value.speed for value in own]
    return stats.sum_of_squares([*values, *others]) - stats.sum_of_squares(values) if others else 0.0


def find_equal_runs(
    sides: Sequence[Sequence[Run]], rows: Sequence[RowKey], runs: Path | None, results: Path | None
) -> EqualRuns:
    """Search `runs` and the filed `results` for runs that equal a side in machine, work, server and settings.

    Where sides differ only in the address of a server that already ran, a run at one of these addresses equals only
    that side.
    """
    compared = {(run.id, run.started_wall_s) for side in sides for run in side}
    newest_s = max(run.started_wall_s for side in sides for run in side)
    facts = [collect_facts(side[0], rows) for side in sides]
    addresses = [_addresses(side_facts) for side_facts in facts]
    equal_runs: list[EqualRun] = []
    for folder, run in _other_runs(runs, results):
        key = (run.id, run.started_wall_s)
        if key in compared or run.started_wall_s > newest_s:
            continue
        equals = [n for n, side in enumerate(sides) if _is_equal(run, side[0], rows, facts[n])]
        if equals:
            own = _addresses(collect_facts(run, rows))
            equals = [n for n in equals if addresses[n] == own] or equals
        if all(sum(n in equal_run.sides for equal_run in equal_runs) >= MAX_EQUAL_RUNS for n in equals):
            continue
        try:
            summary = summary_of(folder)
        except HarnessError:
            continue
        if summary.valid is not False:
            compared.add(key)
            equal_runs.append(EqualRun(run, summary, frozenset(equals)))
    return EqualRuns(equal_runs, [[run.started_wall_s for run in side] for side in sides])


def _addresses(facts: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in facts.items() if is_address(key)}


def _other_runs(runs: Path | None, results: Path | None) -> Iterator[tuple[Path, Run]]:
    """Runs that ended valid, the newest first."""
    listed = [(folder, run) for folder, run in list_runs(runs, results) if not isinstance(run, HarnessError)]
    candidates = [(folder, run) for folder, run in listed if run.status in ("valid", "unchecked")]
    yield from sorted(candidates, key=lambda entry: (-entry[1].started_wall_s, entry[0]))


def _is_equal(run: Run, other: Run, rows: Sequence[RowKey], other_facts: dict[str, object]) -> bool:
    if (run.machine_names, run.workload_sha256, run.simulated) != (
        other.machine_names, other.workload_sha256, other.simulated,
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
    fields = METRICS[metric].defined_fields
    if row is None or row.invalid is not None or definition_conflict(row, measured.rows[0], fields):
        return None
    return _speed(metric, metric_values(row, {cell.id: cell for cell in summary.cells}, metric))
