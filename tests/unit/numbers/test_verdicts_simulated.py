"""The operating characteristics of the verdicts, by simulation: rows of summaries in, verdicts out.

The figures of docs/method.md are from here. Seeds are fixed; each bound leaves room for the scatter of its trials.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pytest

from harness.numbers import stats, verdicts
from harness.numbers.cell_numbers import compute_numbers
from harness.numbers.comparison import TOLERANCE, Verdict
from harness.numbers.gate import gate_code, with_gate
from harness.numbers.summary import Row
from harness.numbers.verdicts import Measured, pair_by_metric
from harness.questions.compare.equal_runs import Value, variation_within
from harness.scenario import Load
from harness.scenario.plan import plan
from tests.support.made_runs import scenario
from tests.support.nightly import draws, room, scatter

Speeds = Sequence[Sequence[float]]  # of each run those of its repeats
Shape = Literal["normal", "t3"]
needed_to_settle = stats.sample_size_to_settle
LOAD = Load(user="batch", requests=10)
PAIRS = draws(20_000)


@pytest.fixture(autouse=True)
def only_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many repeats would settle a verdict takes most of its time, and few of these tests ask for it."""
    monkeypatch.setattr(stats, "sample_size_to_settle", lambda *_: None)


def measured(name: str, runs: Speeds) -> Measured:
    rows = [
        Row(server=name, load="x", cells=[], wall=[1 / v for v in run], output_tok_s=[], pooled=EMPTY) for run in runs
    ]
    return Measured(name=name, load=LOAD, rows=rows, cells=[{}] * len(rows))


EMPTY = compute_numbers([])


def decided(side: Speeds, base: Speeds, *, within_run: bool, known: tuple[float, int] = (0.0, 0)) -> Verdict:
    pairs = list(
        pair_by_metric(measured("b", side), measured("a", base), within_run=within_run, earlier=lambda _: known)
    )
    return verdicts.decide_verdicts(pairs).verdicts[0]


def words(trials: int, one: Callable[[], Verdict]) -> Counter[str]:
    return Counter(one().word for _ in range(trials))


class Machine:
    """Equal measurements differ by a standard deviation of `spread`, on logarithms, normal or by Student's t."""

    def __init__(self, spread: float, shape: Shape = "normal", seed: int = 1) -> None:
        self._dice, self._spread, self._shape = np.random.default_rng(seed), spread, shape

    def speeds(self, count: int, speed: float = 1.0) -> list[float]:
        scattered = (
            self._dice.normal(size=count)
            if self._shape == "normal"
            else self._dice.standard_t(3, size=count) / math.sqrt(3)
        )
        return list(speed * np.exp(self._spread * scattered))

    def repeats(self, count: int, ratio: float = 1.0) -> Verdict:
        """Two servers of one run with so many repeats."""
        return decided([self.speeds(count, ratio)], [self.speeds(count)], within_run=True)

    def runs(self, count: int, ratio: float = 1.0, known: int = 0) -> Verdict:
        """So many runs a side, on a machine with so many earlier equal runs."""
        earlier = self.speeds(known + 1)
        squares = stats.sum_of_squares(earlier) if known else 0.0
        side, base = ([[speed] for speed in self.speeds(count, factor)] for factor in (ratio, 1.0))
        return decided(side, base, within_run=False, known=(squares, known))


SHAPES: list[Shape] = ["normal", "t3"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("repeats", "spread"), [(2, 0.01), (3, 0.01), (3, 0.03)])
def test_equal_servers_are_rarely_called_different(shape: Shape, repeats: int, spread: float) -> None:
    machine = Machine(spread, shape)
    found = words(PAIRS, lambda: machine.repeats(repeats))
    assert (found["faster"] + found["slower"]) / PAIRS < 0.01


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("repeats", "spread", "ratio", "low", "high"),
    [
        (3, 0.01, 1.1, 0.98, 1.0),  # measured: 100 % normal, 98.1 % t3
        (2, 0.01, 1.1, 0.62, 0.74),  # 64 %, 72 %
        (2, 0.04, 2.0, 0.93, 0.97),  # 95 %, 94 %
    ],
)
def test_differences_are_found(
    shape: Shape, repeats: int, spread: float, ratio: float, low: float, high: float
) -> None:
    machine = Machine(spread, shape)
    found = words(PAIRS, lambda: machine.repeats(repeats, ratio))
    assert found["slower"] <= 2e-4 * PAIRS
    assert low - room(low, PAIRS) <= found["faster"] / PAIRS <= high + scatter(high, PAIRS, 2)


@pytest.mark.parametrize(("spread", "enough", "too_few"), [(0.005, 4, 2), (0.01, 7, 5)])
def test_the_repeats_that_call_equal_servers_the_same(spread: float, enough: int, too_few: int) -> None:
    """The number is the one that reports recommend."""
    assert needed_to_settle(0.0, (spread**2, spread**2), 1, 1) == enough
    machine, trials = Machine(spread), draws(5000)
    assert words(trials, lambda: machine.repeats(enough))["same"] / trials >= 0.8 - room(0.8, trials)
    assert words(trials, lambda: machine.repeats(too_few))["same"] / trials < 0.6


def test_wide_spreads_are_answered_by_the_interval_alone() -> None:
    """At a standard deviation of 2 % ten repeats rarely show that two servers are the same."""
    machine, trials = Machine(0.02), draws(2000)
    assert words(trials, lambda: machine.repeats(10))["same"] / trials < 0.25


@pytest.mark.parametrize(("spread", "speed"), [(0.02, 1.05), (0.05, 1.1)])
def test_a_difference_is_found_with_the_number_of_repeats_that_is_recommended(spread: float, speed: float) -> None:
    needed = needed_to_settle(math.log(speed), (spread**2, spread**2), 1, 1)
    assert needed is not None
    machine, trials = Machine(spread, seed=5), draws(2000)
    found = words(trials, lambda: machine.repeats(needed, speed))
    assert found["faster"] / trials >= 0.8 - scatter(0.8, trials, 2)


# Between executions.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("spread", "known", "most"),
    [
        (0.01, 0, 0.001), (0.02, 0, 0.003), (0.04, 0, 0.015), (0.01, 8, 0.003), (0.02, 8, 0.01), (0.04, 8, 0.04),
    ],
)  # fmt: skip
def test_one_equal_run_against_another_is_rarely_called_different(
    shape: Shape, spread: float, known: int, most: float
) -> None:
    machine, trials = Machine(spread, shape, seed=2), draws(10_000)
    found = words(trials, lambda: machine.runs(1, known=known))
    assert (found["faster"] + found["slower"]) / trials <= most + room(most, trials)


@pytest.mark.parametrize(
    ("runs", "spread", "known", "ratio", "least"),
    [
        (1, 0.01, 0, 1.25, 0.99), (1, 0.02, 0, 1.25, 0.9), (1, 0.04, 0, 1.5, 0.99), (1, 0.01, 8, 1.1, 0.45),
        (1, 0.01, 8, 1.2, 0.98), (3, 0.01, 0, 1.1, 0.9), (5, 0.02, 0, 1.1, 0.98), (5, 0.04, 0, 1.1, 0.75),
    ],
)  # fmt: skip
def test_differences_between_runs_are_found(runs: int, spread: float, known: int, ratio: float, least: float) -> None:
    machine, trials = Machine(spread, seed=3), draws(5000)
    found = words(trials, lambda: machine.runs(runs, ratio, known))
    assert found["slower"] == 0
    assert found["faster"] / trials >= least - room(least, trials)


# The gate: exit codes 0 (no slowdown of 10 % or more), 4 (slower by that), 5 (not known).


def gate_codes(runs: int, spread: float, ratio: float, shape: Shape = "normal", seed: int = 4) -> dict[int, float]:
    """The share of each exit code, of so many runs a side on a machine of which nothing is known."""
    machine, trials = Machine(spread, shape, seed=seed), draws(4000)
    gates = (with_gate(machine.runs(runs, ratio), TOLERANCE, provisional=False).gate for _ in range(trials))
    codes = Counter(int(gate_code([gate])) for gate in gates)
    return {code: codes[code] / trials for code in (0, 4, 5)}


@pytest.mark.parametrize(
    ("spread", "passes"),
    [(0.01, {1: 0.0, 2: 0.92, 3: 1.0, 5: 1.0}), (0.03, {1: 0.07, 2: 0.58, 3: 0.87, 5: 0.99})],
)
def test_equal_sides_pass_the_gate_from_two_runs_on(spread: float, passes: dict[int, float]) -> None:
    for runs, share in passes.items():
        codes = gate_codes(runs, spread, 1.0)
        assert codes[0] == pytest.approx(share, abs=0.03 + scatter(max(share, 0.05), draws(4000)))
        assert codes[4] == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("runs", "spread"), [(1, 0.03), (2, 0.01), (2, 0.03), (3, 0.03), (5, 0.01), (5, 0.03), (5, 0.05)]
)
def test_a_slowdown_of_the_tolerance_hardly_ever_passes(shape: Shape, runs: int, spread: float) -> None:
    codes = gate_codes(runs, spread, 1 / 1.1, shape)
    assert codes[0] <= 0.03 + room(0.03, draws(4000))


@pytest.mark.parametrize(("runs", "spread", "least"), [(2, 0.01, 0.99), (3, 0.03, 0.95), (5, 0.03, 0.99)])
def test_a_slowdown_of_thirty_percent_fails(runs: int, spread: float, least: float) -> None:
    codes = gate_codes(runs, spread, 1 / 1.3)
    assert codes[4 if runs > 2 else 5] >= least - room(least, draws(4000)) and codes[0] == 0


# Earlier runs that no recorded key assigns to a side: so many before the older side, and between the sides.


def among_earlier(spread: float, shape: Shape, before: int, between: int, change: float, trials: int) -> Counter[str]:
    """One run against an older one. From the middle of the runs between them on, a run is `change` times as fast."""
    machine = Machine(spread, shape, seed=9)

    def one() -> Verdict:
        speeds = machine.speeds(before + between + 2)
        changed = before + 1 + between // 2
        values = [
            Value(float(time), speed * (change if time >= changed else 1.0), frozenset({0, 1}))
            for time, speed in enumerate(speeds)
        ]
        older, newer = values[before], values[-1]
        earlier = [value for value in values if value not in (older, newer)]
        known = variation_within({0: [older], 1: [newer]}, earlier)
        return decided([[newer.speed]], [[older.speed]], within_run=False, known=known)

    return words(trials, one)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("before", "between"), [(8, 0), (4, 4), (0, 8)])
@pytest.mark.parametrize(("spread", "most"), [(0.02, 0.01), (0.04, 0.04)])
def test_equal_servers_among_earlier_runs_are_rarely_called_different(
    shape: Shape, before: int, between: int, spread: float, most: float
) -> None:
    trials = draws(1000)
    found = among_earlier(spread, shape, before, between, 1.0, trials)
    assert (found["faster"] + found["slower"]) / trials <= most + room(most, trials)


@pytest.mark.parametrize(("before", "between"), [(0, 2), (0, 8), (4, 4)])
@pytest.mark.parametrize(("change", "least"), [(2.0, 0.99), (0.5, 0.99)])
def test_a_change_among_earlier_runs_is_found(before: int, between: int, change: float, least: float) -> None:
    trials = draws(500)
    found = among_earlier(0.04, "normal", before, between, change, trials)
    assert found["faster" if change > 1 else "slower"] / trials >= least - room(least, trials)


# Repeats of one run in the order of the plan, with a drift of the machine over the whole run.

TRIALS = draws(4000)


def experiments(true_ratio: float, spread: float, drift: float, trials: int = TRIALS) -> list[tuple[Speeds, Speeds]]:
    """Speeds of `b` (truly `true_ratio` times as fast) and `a`; `drift` is the change from first to last repeat."""
    dice = np.random.default_rng(5)
    order = plan(scenario(repeats=5))
    logs = dice.normal(0.0, spread, (trials, len(order)))
    # Of either direction and size up to `drift`, smooth over the experiment.
    logs += dice.uniform(-drift, drift, (trials, 1)) * np.linspace(0.0, 1.0, len(order))
    b = np.array([cell.server == "b" for cell in order])
    logs[:, b] += math.log(true_ratio)
    return [([list(row[b])], [list(row[~b])]) for row in np.exp(logs)]


def within(pairs: list[tuple[Speeds, Speeds]]) -> Counter[str]:
    return Counter(decided(side, base, within_run=True).word for side, base in pairs)


@pytest.mark.parametrize(("spread", "drift"), [(0.02, 0.0), (0.05, 0.20)])
def test_coverage(spread: float, drift: float) -> None:
    """Of the interval, without the margin."""
    covered = 0
    for side, base in experiments(1.0, spread, drift):
        seen = stats.welch_effect(side[0], base[0])
        assert seen is not None
        low, high = seen.interval()
        covered += low <= 1.0 <= high
    assert covered / TRIALS >= 0.93 - room(0.93, TRIALS)


def test_a_difference_beyond_the_margin_is_hardly_ever_called_the_same() -> None:
    trials = draws(1000)
    said = within(experiments(1.02, 0.005, 0.0, trials))  # exactly on the edge
    assert said["same"] / trials <= 0.05 + room(0.05, trials)


def test_many_comparisons_of_equal_servers_raise_no_more_alarms_than_one() -> None:
    """Ten servers that are all the same against one baseline: a table with any false verdict counts as one."""
    dice = np.random.default_rng(11)
    tables = draws(2000)
    false = 0
    for logs in dice.normal(0.0, 0.06, (tables, 11, 6)):
        values = np.exp(logs)
        base = measured("a", [list(values[0])])
        pairs = [
            pair
            for i in range(1, 11)
            for pair in pair_by_metric(measured(str(i), [list(values[i])]), base, within_run=True)
        ]
        made = verdicts.decide_verdicts(pairs)
        assert made.comparisons == 10
        false += any(verdict.word in ("faster", "slower") for verdict in made.verdicts)
    assert false / tables <= 0.02


def test_a_machine_that_is_less_steady_than_assumed() -> None:
    """8 % between runs instead of 4 %: one run against one is wrong in 12 %; with eight earlier runs in 6 %."""
    machine, trials = Machine(0.08, seed=7), draws(5000)
    alone = functools.partial(machine.runs, 1)
    found = words(trials, alone)
    assert 0.08 < (found["faster"] + found["slower"]) / trials < 0.2
    found = words(trials, lambda: machine.runs(1, known=8))
    assert (found["faster"] + found["slower"]) / trials < 0.07 + room(0.07, trials)
