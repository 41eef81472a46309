"""The statistics against known values, and the verdicts by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from harness.judge import stats
from harness.summary import NEEDED


def test_the_samples_that_a_percentile_needs() -> None:
    assert [stats.samples_needed(p) for p in (500, 900, 950, 990, 999)] == [11, 64, 130, 662, 6636]
    assert {f"p{p // 10}": stats.samples_needed(p) for p in (500, 900, 950, 990)} == NEEDED
    # The rule in words: of so few samples fewer than two lie beyond the percentile with at most 1 %.
    for permille, n in ((500, 11), (900, 64), (950, 130), (990, 662), (999, 6636)):
        assert scipy_stats.binom.cdf(1, n, 1 - permille / 1000) <= 0.01
        assert scipy_stats.binom.cdf(1, n - 1, 1 - permille / 1000) > 0.01


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
    seen = stats.welch_effect(side, base)
    theirs = scipy_stats.ttest_ind(np.log(side), np.log(base), equal_var=False).confidence_interval(0.95)
    assert seen is not None
    assert seen.ratio == pytest.approx(math.exp(np.log(side).mean() - np.log(base).mean()), rel=1e-12)
    assert seen.interval() == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)), rel=1e-9)


def test_an_interval_needs_two_values_a_side_and_is_empty_for_equal_ones() -> None:
    assert stats.welch_effect([1.0], [1.0, 2.0]) is None
    equal = stats.welch_effect([0.1, 0.1, 0.1], [0.1, 0.1, 0.1])
    assert equal is not None
    assert (equal.ratio, *equal.interval()) == (1.0, 1.0, 1.0)


def test_runs_are_compared_by_the_known_variation_and_by_their_own() -> None:
    side, base = [2.0, 2.1, 1.9], [1.0, 1.02, 0.97]
    known, own = stats.run_effects(side, base, variance=0.0004, freedom=4)
    assert known.freedom == 4
    assert known.error == pytest.approx(0.02 * math.sqrt(2 / 3))
    assert own == stats.welch_effect(side, base)
    theirs = scipy_stats.ttest_ind(np.log(side), np.log(base), equal_var=False)
    assert own.p_value() == pytest.approx(theirs.pvalue, rel=1e-9)
    (one,) = stats.run_effects([1.1], [1.0], variance=0.0004, freedom=4)
    assert one.freedom == 4
    assert one.error == pytest.approx(0.02 * math.sqrt(2))
    _, several = stats.run_effects([1.1], base, variance=0.0004, freedom=4)
    assert several.freedom == 2
    assert several.error == pytest.approx(math.sqrt(stats.var_log(base) * 4 / 3))


def test_the_variation_between_runs_is_what_their_repeats_do_not_explain() -> None:
    assert stats.estimate_variation([[1.0, 1.1]]) is None
    seen = stats.estimate_variation([[1.0, 1.0], [math.e, math.e], [math.e**2, math.e**2]])
    assert seen == stats.Variation(1.0, 0.0, 2)
    wide = stats.estimate_variation([[1.0, math.e], [1.0, math.e]])
    assert wide is not None
    assert (wide.between_runs, wide.freedom) == (0.0, 1)
    assert wide.run_variance(2) == pytest.approx(0.25)


def test_the_permutation_test_counts_all_assignments() -> None:
    low, high = [1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]
    assert stats.permutation_p(low, high) == 2 / 252
    assert stats.permutation_p(high, low) == 2 / 252
    assert stats.permutation_p(low[:3], high[:3]) == 0.1
    assert stats.permutation_p([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert stats.permutation_p([1.0], [2.0]) == 1.0


def test_many_values_are_sampled_and_p_is_never_too_small() -> None:
    side, base = [1.0 + i / 100 for i in range(15)], [2.0 + i / 100 for i in range(15)]
    assert stats.permutation_p(side, base) == 1 / 100_001
    assert stats.permutation_p(side, base) == stats.smallest_p(15, 15)
    same = [1.0 + i / 100 for i in range(15)]
    assert stats.permutation_p(same, same[::-1]) == 1.0


def test_holm_and_the_smallest_possible_p() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    assert (stats.holm([0.5, 0.9]), stats.holm([])) == ([1.0, 1.0], [])
    assert [stats.smallest_p(*sides) for sides in ((5, 5), (3, 4), (1, 1))] == [2 / 252, 1 / 35, 1.0]
    assert [stats.repeats_to_reach_p(comparisons) for comparisons in (1, 5, 7)] == [4, 5, 6]  # 2 / 70, 5 * 2 / 252
