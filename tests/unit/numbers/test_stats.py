"""The statistics against known values, and the verdicts by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import bdtr, stdtrit

from harness.base.measured import NEEDED
from harness.numbers import stats
from harness.numbers.share_test import observed, percentiles


def test_the_samples_that_a_percentile_needs() -> None:
    assert [stats.samples_needed(p) for p in (500, 900, 950, 990, 999)] == [11, 64, 130, 662, 6636]
    assert {f"p{p // 10}": stats.samples_needed(p) for p in (500, 900, 950, 990)} == NEEDED
    # The rule in words: of so few samples fewer than two lie beyond the percentile with at most 1 %.
    for permille, n in ((500, 11), (900, 64), (950, 130), (990, 662), (999, 6636)):
        assert bdtr(1, n, 1 - permille / 1000) <= 0.01
        assert bdtr(1, n - 1, 1 - permille / 1000) > 0.01


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.sampled_from([500, 900, 950, 990]))
def test_percentiles_agree_with_numpy(values: list[float], permille: int) -> None:
    ordered = np.sort(np.array(values))
    # Compared by rank, since numpy's 0.95 * 20 may be a hair above 19.
    share = permille / 1000
    value = percentiles([observed(ordered)], [permille])[0].value_s
    assert value is not None
    assert np.count_nonzero(ordered <= value) >= share * len(values) - 1e-9
    assert np.count_nonzero(ordered < value) < share * len(values) + 1e-9


def test_the_ratio_and_its_interval_are_welch_on_logarithms() -> None:
    from scipy.stats import ttest_ind  # a second's import, in the one process that runs this

    side, base = [2.0, 2.1, 1.9, 2.05, 1.95], [1.0, 1.02, 0.97]
    seen = stats.welch_effect(side, base)
    theirs = ttest_ind(np.log(side), np.log(base), equal_var=False).confidence_interval(0.95)
    assert seen is not None
    assert seen.ratio == pytest.approx(math.exp(np.log(side).mean() - np.log(base).mean()), rel=1e-12)
    assert seen.interval() == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)), rel=1e-9)


def test_an_interval_needs_two_values_a_side_and_is_empty_for_equal_ones() -> None:
    assert stats.welch_effect([1.0], [1.0, 2.0]) is None
    equal = stats.welch_effect([0.1, 0.1, 0.1], [0.1, 0.1, 0.1])
    assert equal is not None
    assert (equal.ratio, *equal.interval()) == (1.0, 1.0, 1.0)


def test_the_variation_between_runs_pools_an_assumption_and_what_is_known() -> None:
    """s2 = (4 * 0.04^2 + sum of squares) / (4 + df), Student's t with 4 + df degrees of freedom."""
    assumed = stats.pooled_effect([1.1], [1.0])
    assert (assumed.freedom, assumed.error) == pytest.approx((4, 0.04 * math.sqrt(2)), rel=1e-12)
    side, base = [2.0, 2.1, 1.9], [1.0, 1.02, 0.97]
    squares = sum(float(((np.log(values) - np.log(values).mean()) ** 2).sum()) for values in (side, base))
    seen = stats.pooled_effect(side, base, 0.003, 5)
    assert seen.freedom == 4 + 4 + 5
    assert seen.error == pytest.approx(math.sqrt((4 * 0.04**2 + squares + 0.003) / 13 * (2 / 3)), rel=1e-12)
    half_width = stdtrit(13, 0.975) * seen.error
    assert seen.interval() == pytest.approx((seen.ratio * math.exp(-half_width), seen.ratio * math.exp(half_width)))
    assert [stats.is_mostly_assumed(stats.pooled_effect([1.0], [1.0], 0.0, known)) for known in (3, 4)] == [True, False]


def test_the_p_value_beyond_the_margin_agrees_with_the_interval() -> None:
    margin = math.log(1.02)
    for log_ratio in (0.01, 0.05, -0.08):
        for error in (0.001, 0.01, 0.02):
            effect = stats.Effect(log_ratio, error, 6)
            low, high = map(math.log, effect.interval())
            assert (effect.p_beyond_margin() < 0.05) == (low > margin or high < -margin)
            assert effect.p_beyond_margin(0.03) >= effect.p_beyond_margin()
    assert [stats.Effect(log, 0.0, math.inf).p_beyond_margin() for log in (0.01, 0.03)] == [1.0, 0.0]


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    assert (stats.holm([0.5, 0.9]), stats.holm([])) == ([1.0, 1.0], [])


def test_fisher() -> None:
    assert stats.fisher_greater(3, 4, 1, 4) == pytest.approx(17 / 70)  # the tea
    assert stats.fisher_greater(0, 5, 5, 5) == pytest.approx(1.0)
    assert stats.fisher_greater(5, 5, 0, 5) == pytest.approx(1 / 252)
