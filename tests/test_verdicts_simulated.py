"""The operating characteristics of the verdicts, by simulation: rows of summaries in, verdicts out.

The tables of docs/method.md are from here. Seeds are fixed; each bound leaves room for the scatter of its trials.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from harness.analysis.tally import compute_numbers
from harness.judge import stats, verdicts
from harness.judge.noise_floors import RowNoise
from harness.judge.verdicts import Measured, Noise, pair_by_metric
from harness.scenario import Load
from harness.scenario.plan import plan
from harness.summary import Row, Verdict
from tests.made_runs import scenario
from tests.nightly import draws, room, scatter

Speeds = Sequence[Sequence[float]]  # of each run those of its repeats
needed_to_settle = stats.sample_size_to_settle
LOAD = Load(user="batch", requests=10)


@pytest.fixture(autouse=True)
def only_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many repeats would settle a verdict takes most of its time, and few of these tests ask for it."""
    monkeypatch.setattr(stats, "sample_size_to_settle", lambda *_: None)


def measured(name: str, runs: Speeds) -> Measured:
    rows = [
        Row(server=name, load="x", cells=[], wall_s=[1 / v for v in run], output_tok_s=[], pooled=compute_numbers([]))
        for run in runs
    ]
    return Measured(name=name, load_name="x", load=LOAD, rows=rows, cells=[{}] * len(rows))


def decided(side: Speeds, base: Speeds, *, within_run: bool = False, noise: Noise | None = None) -> Verdict:
    pairs = list(pair_by_metric(measured("b", side), measured("a", base), within_run=within_run))
    return verdicts.decide_verdicts(pairs, noise).verdicts[0]


def words(trials: int, one: Callable[[], Verdict]) -> Counter[str]:
    return Counter(one().word for _ in range(trials))


class Machine:
    """Runs of it differ by `run_sd`, repeats of a run by `repeat_sd`."""

    def __init__(self, run_sd: float, repeat_sd: float, seed: int) -> None:
        self._dice = np.random.default_rng(seed)
        self._run_sd, self._repeat_sd = run_sd, repeat_sd

    def runs(self, count: int, speed: float = 1.0, repeats: int = 5) -> list[list[float]]:
        means = self._dice.normal(math.log(speed), self._run_sd, (count, 1))
        return [list(run) for run in np.exp(means + self._dice.normal(0, self._repeat_sd, (count, repeats)))]

    def noise(self, count: int) -> Noise:
        """What `harness noise --runs COUNT` stores."""
        both = self.runs(count, repeats=10)
        row = RowNoise(load="x", metric="wall_s", a=[run[:5] for run in both], again=[run[5:] for run in both])
        seen = row.variation()
        assert seen is not None
        return Noise({("wall_s", "x"): seen})


SPREADS = [(run_sd, repeat_sd) for run_sd in (0.0, 0.01, 0.02, 0.04) for repeat_sd in (0.005, 0.02)]


@pytest.mark.parametrize(("run_sd", "repeat_sd"), SPREADS)
def test_runs_against_runs(run_sd: float, repeat_sd: float) -> None:
    """Five a side: at most 5 % of equal sides are called faster or slower; 10 % slower is found."""
    machine, trials = Machine(run_sd, repeat_sd, seed=1), draws(600)
    equal = words(trials, lambda: decided(machine.runs(5), machine.runs(5)))
    assert (equal["faster"] + equal["slower"]) / trials <= 0.05 + room(0.05, trials)
    slower = words(trials, lambda: decided(machine.runs(5, 1 / 1.1), machine.runs(5)))
    assert slower["faster"] == 0
    assert slower["slower"] / trials >= 0.8 - room(0.8, trials)


@pytest.mark.parametrize(("run_sd", "repeat_sd"), SPREADS)
def test_one_run_against_one_on_a_machine_whose_variation_is_known(run_sd: float, repeat_sd: float) -> None:
    """From five A/A runs, which are drawn anew in each trial."""
    machine, trials = Machine(run_sd, repeat_sd, seed=2), draws(1500)
    equal = words(trials, lambda: decided(machine.runs(1), machine.runs(1), noise=machine.noise(5)))
    assert (equal["faster"] + equal["slower"]) / trials <= 0.05 + scatter(0.05, trials, 2.2)
    slower = words(draws(300), lambda: decided(machine.runs(1, 1 / 1.1), machine.runs(1), noise=machine.noise(5)))
    power = {0.0: 0.97, 0.01: 0.93, 0.02: 0.6, 0.04: 0.15}[run_sd]
    assert slower["slower"] / draws(300) >= power - room(power, draws(300))


@pytest.mark.parametrize("count", [2, 5])
def test_what_is_known_of_other_runs_never_narrows_the_interval(count: int) -> None:
    """Noise that was measured in a quieter hour: the runs that are compared differ four times as much."""
    quiet, machine, trials = Machine(0.005, 0.005, seed=8), Machine(0.02, 0.005, seed=9), draws(600)
    found = words(trials, lambda: decided(machine.runs(count), machine.runs(count), noise=quiet.noise(5)))
    assert (found["faster"] + found["slower"]) / trials <= 0.05 + scatter(0.05, trials, 2)
    noise = quiet.noise(5)
    for _ in range(20):
        side, base = machine.runs(5), machine.runs(5)
        with_noise, without = decided(side, base, noise=noise), decided(side, base)
        assert (with_noise.low or 0) <= (without.low or 0) and (without.high or 0) <= (with_noise.high or 0)


@pytest.mark.parametrize("repeat_sd", [0.005, 0.02])
def test_equal_sides_of_a_run_are_called_the_same_with_the_number_of_repeats_that_is_recommended(
    repeat_sd: float,
) -> None:
    needed = needed_to_settle(0.0, (repeat_sd**2, repeat_sd**2), 1, 1)
    assert needed == {0.005: 4, 0.02: 24}[repeat_sd]
    machine, trials = Machine(0.0, repeat_sd, seed=4), draws(1000 if needed < 10 else 200)
    side = functools.partial(machine.runs, 1, repeats=needed)
    assert words(trials, lambda: decided(side(), side(), within_run=True))["same"] / trials >= 0.8 - room(0.8, trials)


@pytest.mark.parametrize(("repeat_sd", "speed"), [(0.02, 1.03), (0.05, 1.1)])
def test_a_difference_is_found_with_the_number_of_repeats_that_is_recommended(repeat_sd: float, speed: float) -> None:
    needed = needed_to_settle(math.log(speed), (repeat_sd**2, repeat_sd**2), 1, 1)
    assert needed is not None
    machine, trials = Machine(0.0, repeat_sd, seed=5), draws(500)
    side = functools.partial(machine.runs, 1, repeats=needed)
    found = words(trials, lambda: decided(side(speed), side(), within_run=True))
    assert found["faster"] / trials >= 0.78 - room(0.78, trials)


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
def test_false_alarms_and_coverage(monkeypatch: pytest.MonkeyPatch, spread: float, drift: float) -> None:
    """Without the margin, so that the test and the interval stand alone."""
    monkeypatch.setattr(verdicts, "MARGIN", 1e-9)
    pairs = experiments(1.0, spread, drift)
    said = within(pairs)
    assert (said["faster"] + said["slower"]) / TRIALS <= 0.05 + room(0.05, TRIALS)
    covered = 0
    for side, base in pairs:
        seen = stats.welch_effect(side[0], base[0])
        assert seen is not None
        low, high = seen.interval()
        covered += low <= 1.0 <= high
    assert covered / TRIALS >= 0.93 - room(0.93, TRIALS)


def test_a_difference_beyond_the_margin_is_hardly_ever_called_the_same() -> None:
    trials = draws(1000)
    said = within(experiments(1.02, 0.005, 0.0, trials))  # exactly on the edge
    assert said["same"] / trials <= 0.05 + room(0.05, trials)


def test_many_comparisons_of_equal_servers_raise_no_more_alarms_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten servers that are all the same against one baseline: a table with any false verdict counts as one."""
    monkeypatch.setattr(verdicts, "MARGIN", 1e-9)
    dice = np.random.default_rng(11)
    tables = draws(600)
    false = 0
    for logs in dice.normal(0.0, 0.03, (tables, 11, 6)):
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
    assert false / tables <= 0.05 + scatter(0.05, tables, 2.25)
