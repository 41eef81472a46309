"""The statistics against known values, and the verdicts by simulation."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from harness.judge import stats
from harness.judge.verdicts import NoiseFloor, Pair, verdicts
from harness.scenario.plan import plan
from harness.summary import NEEDED
from tests.made_runs import scenario


def test_the_samples_that_a_percentile_needs() -> None:
    assert [stats.samples_needed(p) for p in (500, 900, 950, 990, 999)] == [11, 64, 130, 662, 6636]
    assert {f"p{p // 10}": stats.samples_needed(p) for p in (500, 900, 950, 990)} == NEEDED
    # The rule in words: of so few samples fewer than two lie beyond the percentile with at most 1 %.
    for permille, n in ((500, 11), (900, 64), (950, 130), (990, 662), (999, 6636)):
        assert scipy_stats.binom.cdf(1, n, 1 - permille / 1000) <= 0.01
        assert scipy_stats.binom.cdf(1, n - 1, 1 - permille / 1000) > 0.01


def test_percentiles_are_values_of_the_sample() -> None:
    hundred = np.arange(1.0, 101.0)
    assert [stats.percentile(hundred, p) for p in (500, 900, 950, 990, 1000)] == [50.0, 90.0, 95.0, 99.0, 100.0]
    assert stats.percentile(np.array([3.0]), 500) == 3.0
    assert stats.percentile(np.array([1.0, 2.0, 3.0]), 500) == 2.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.sampled_from([500, 900, 950, 990]))
def test_percentiles_agree_with_numpy(values: list[float], permille: int) -> None:
    ordered = np.sort(np.array(values))
    # Compared by rank, since numpy's 0.95 * 20 may be a hair above 19.
    share = permille / 1000
    value = stats.percentile(ordered, permille)
    assert np.count_nonzero(ordered <= value) >= share * len(values) - 1e-9
    assert np.count_nonzero(ordered < value) < share * len(values) + 1e-9


def test_the_ratio_and_its_interval_are_welch_on_logarithms() -> None:
    side, base = [2.0, 2.1, 1.9, 2.05, 1.95], [1.0, 1.02, 0.97]
    seen = stats.ratio_interval(side, base)
    theirs = scipy_stats.ttest_ind(np.log(side), np.log(base), equal_var=False).confidence_interval(0.95)
    assert seen is not None
    assert seen.ratio == pytest.approx(math.exp(np.log(side).mean() - np.log(base).mean()), rel=1e-12)
    assert (seen.low, seen.high) == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)), rel=1e-9)


def test_an_interval_needs_two_values_a_side_and_none_for_equal_ones() -> None:
    assert stats.ratio_interval([1.0], [1.0, 2.0]) is None
    assert stats.ratio_interval([0.1, 0.1, 0.1], [0.1, 0.1, 0.1]) == (1.0, 1.0, 1.0)


def test_the_permutation_test_counts_all_assignments() -> None:
    low, high = [1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]
    assert stats.permutation_p(low, high) == 2 / 252
    assert stats.permutation_p(high, low) == 2 / 252
    assert stats.permutation_p(low[:3], high[:3]) == 0.1
    assert stats.permutation_p([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert stats.permutation_p([1.0], [2.0]) == 1.0


def test_the_permutation_test_agrees_with_counting_by_hand() -> None:
    side, base = [1.0, 5.0, 3.0, 2.2], [2.0, 4.0, 9.0]
    logs = [math.log(value) for value in side + base]
    seen = abs(statistics.fmean(logs[:4]) - statistics.fmean(logs[4:]))
    extreme = 0
    for chosen in itertools.combinations(range(7), 4):
        ours = [logs[i] for i in chosen]
        theirs = [logs[i] for i in range(7) if i not in chosen]
        extreme += abs(statistics.fmean(ours) - statistics.fmean(theirs)) >= seen - 1e-12
    assert stats.permutation_p(side, base) == extreme / 35


def test_many_values_are_sampled_and_p_is_never_too_small() -> None:
    side, base = [1.0 + i / 100 for i in range(15)], [2.0 + i / 100 for i in range(15)]
    assert stats.permutation_p(side, base) == 1 / 100_001
    assert stats.permutation_p(side, base) == stats.smallest_p(15, 15)
    same = [1.0 + i / 100 for i in range(15)]
    assert stats.permutation_p(same, same[::-1]) == 1.0


def test_the_smallest_possible_p() -> None:
    assert stats.smallest_p(5, 5) == 2 / 252
    assert stats.smallest_p(3, 3) == 0.1
    assert stats.smallest_p(3, 4) == 1 / 35
    assert stats.smallest_p(1, 1) == 1.0


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.lists(st.floats(0.1, 10), min_size=1, max_size=5))
def test_no_p_is_smaller_than_the_smallest_possible(side: list[float], base: list[float]) -> None:
    assert stats.smallest_p(len(side), len(base)) <= stats.permutation_p(side, base) <= 1.0
    assert stats.permutation_p(side, base) == pytest.approx(stats.permutation_p(base, side))


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([0.02]) == [0.02]
    assert stats.holm([]) == []


def test_the_repeats_that_can_decide_at_all() -> None:
    assert stats.repeats_to_reach_p(1) == 4  # 2 / 70
    assert stats.repeats_to_reach_p(5) == 5  # 5 * 2 / 252
    assert stats.repeats_to_reach_p(7) == 6


def test_the_repeats_that_would_settle_it() -> None:
    spread = [0.97, 0.99, 1.0, 1.01, 1.03]
    needed = stats.repeats_to_settle([1.05 * v for v in spread], spread, comparisons=1, floor=0.02)
    assert needed == 6
    # An effect on the edge of the noise floor is settled by no number of repeats.
    assert stats.repeats_to_settle([1.02 * v for v in spread], spread, comparisons=1, floor=0.02) is None
    # The same speed: the interval must shrink into the floor.
    assert stats.repeats_to_settle(spread, spread, comparisons=1, floor=0.02) == 12


def test_the_noise_floor_is_the_farthest_bound_between_equal_sides() -> None:
    one, other = [1.0, 1.01, 0.99], [1.02, 1.0, 1.01]
    interval = stats.ratio_interval(one, other)
    assert interval is not None
    assert stats.noise_floor([one, other]) == pytest.approx(max(1 / interval.low, interval.high) - 1)
    assert stats.noise_floor([[2.0, 2.0], [2.0, 2.0]]) == 0.0
    with pytest.raises(ValueError, match="two groups"):
        stats.noise_floor([one, [1.0]])


# Simulated experiments: two servers, run in the order of the plan, with a spread from run to run and a drift of
# the machine over the whole experiment.

TRIALS = 4000


def experiments(true_ratio: float, spread: float, drift: float, repeats: int = 5, trials: int = TRIALS) -> list[Pair]:
    """Speeds of `b` (truly `true_ratio` times as fast) and `a`; `drift` is the change from first to last run."""
    dice = np.random.default_rng(5)
    order = plan(scenario(repeats=repeats))
    logs = dice.normal(0.0, spread, (trials, len(order)))
    # Of either direction and size up to `drift`, smooth over the experiment.
    logs += dice.uniform(-drift, drift, (trials, 1)) * np.linspace(0.0, 1.0, len(order))
    b = np.array([cell.server == "b" for cell in order])
    logs[:, b] += math.log(true_ratio)
    values = np.exp(logs)
    return [
        Pair(side="b", baseline="a", metric="wall_s", side_speeds=list(row[b]), baseline_speeds=list(row[~b]))
        for row in values
    ]


def words(pairs: list[Pair], floor: float) -> list[str]:
    return [verdicts([pair], NoiseFloor(floor, "chosen")).verdicts[0].word for pair in pairs]


@pytest.mark.parametrize(("spread", "drift"), [(0.02, 0.0), (0.05, 0.0), (0.02, 0.10), (0.05, 0.20)])
def test_false_alarms_and_coverage(spread: float, drift: float) -> None:
    """With the noise floor as good as switched off, so that the test and the interval stand alone."""
    pairs = experiments(1.0, spread, drift)
    said = words(pairs, floor=1e-9)
    alarms = sum(word in ("faster", "slower") for word in said) / TRIALS
    assert alarms <= 0.05
    covered = 0
    for pair in pairs:
        interval = stats.ratio_interval(pair.side_speeds, pair.baseline_speeds)
        assert interval is not None
        covered += interval.low <= 1.0 <= interval.high
    assert covered / TRIALS >= 0.93


def test_the_default_floor_leaves_hardly_a_false_alarm_at_two_percent_spread() -> None:
    said = words(experiments(1.0, 0.02, 0.0), floor=0.02)
    assert sum(word in ("faster", "slower") for word in said) / TRIALS <= 0.05


def test_ten_percent_are_found() -> None:
    said = words(experiments(1.10, 0.02, 0.0), floor=0.02)
    assert sum(word == "faster" for word in said) / TRIALS > 0.8
    assert "slower" not in said
    slower = words(experiments(0.90, 0.02, 0.0, trials=500), floor=0.02)
    assert sum(word == "slower" for word in slower) / 500 > 0.8


def test_a_difference_beyond_the_floor_is_hardly_ever_called_the_same() -> None:
    said = words(experiments(1.02, 0.005, 0.0, trials=2000), floor=0.02)  # exactly on the edge
    assert sum(word == "same" for word in said) / 2000 <= 0.05


def test_many_comparisons_of_equal_servers_raise_no_more_alarms_than_one() -> None:
    """Ten servers that are all the same against one baseline: a table with any false verdict counts as one."""
    dice = np.random.default_rng(11)
    tables = 600
    false = 0
    for logs in dice.normal(0.0, 0.03, (tables, 11, 6)):
        values = np.exp(logs)
        pairs = [
            Pair(
                side=str(i), baseline="a", metric="wall_s", side_speeds=list(values[i]), baseline_speeds=list(values[0])
            )
            for i in range(1, 11)
        ]
        made = verdicts(pairs, NoiseFloor(1e-9, "chosen"))
        assert made.comparisons == 10
        false += any(verdict.word in ("faster", "slower") for verdict in made.verdicts)
    assert false / tables <= 0.07  # 5 % and the scatter of 600 tables
