"""Blocks and trends: the error of a rate, the effect of dependence, the fit of a line, against known values."""

import math

import numpy as np
import pytest
from scipy.stats import linregress

from harness.numbers import block_statistics
from harness.numbers.block_statistics import MIN_BATCHES, batched_rate, cluster_effect, fit_trend, work_between


def test_a_request_works_evenly_between_its_ends() -> None:
    sent, ended = np.array([0.0, 1.0, 3.0]), np.array([4.0, 1.0, 5.0])
    work = np.array([8.0, 1.0, 6.0])  # the second one takes no time
    assert work_between(np.array([0.0, 2.0, 4.0, 6.0]), sent, ended, work).tolist() == [5.0, 7.0, 3.0]
    both = work_between(np.array([0.0, 4.0, 6.0]), sent, ended, np.stack([work, np.array([8.0, 1.0, np.nan])]))
    assert both[0].tolist() == [12.0, 3.0]
    assert np.isnan(both[1]).all(), "an unknown number of one request makes the blocks that it reaches unknown"


def test_a_rate_within_a_run_is_known_from_blocks_of_five_answers() -> None:
    sent = np.arange(100, dtype=np.float64)
    even = block_statistics.rate_error(sent, sent + 1, np.full(100, 10.0))
    assert even is not None and even == pytest.approx((0, 20), abs=1e-12)
    assert block_statistics.rate_error(sent[:19], sent[:19] + 1, np.full(19, 10.0)) is None, "fewer than four blocks"
    assert block_statistics.rate_error(np.empty(0), np.empty(0), np.empty(0)) is None
    work = np.repeat([8.0, 12.0], 50)  # the second half is faster
    found = block_statistics.rate_error(sent, sent + 1, work)
    assert found is not None
    rates = np.repeat([8.0, 12.0], 10)
    assert found == pytest.approx((rates.std(ddof=1) / 10 / math.sqrt(20), 20), rel=1e-6)


def test_the_error_of_a_rate_by_batches_of_neighbouring_blocks() -> None:
    assert MIN_BATCHES == 8
    work = [10.0, 20.0] * 8  # 8 batches of two blocks, which are all equal
    assert batched_rate(work, [2.0] * 16) == (7.5, 0.0, 7)
    alternating = batched_rate([10.0, 20.0] * 4, [2.0] * 8)  # 8 batches of one block
    assert alternating.rate == 7.5 and alternating.freedom == 7
    assert alternating.error == pytest.approx(np.std([10.0, 20.0] * 4, ddof=1) / math.sqrt(8) / 15)
    assert batched_rate([10.0, 30.0], [1.0, 3.0]) == (10.0, 0.0, 1), "blocks may have different lengths"
    assert batched_rate([0.0] * 8, [1.0] * 8) == (0.0, 0.0, 7)
    assert [batched_rate([1.0] * count, [1.0] * count).freedom + 1 for count in (8, 15, 16, 23, 24)] == [
        8,
        15,
        8,
        11,
        8,
    ]


def test_misses_in_clusters_count_as_few() -> None:
    even = [(9, 10), (9, 10), (9, 10), (9, 10)]
    assert cluster_effect(even) == 0.0, "more evenly spread than random numbers"
    stalls = [(10, 10), (10, 10), (0, 10), (10, 10)]
    # Independent requests have a variance of 40 * 0.75 * 0.25 = 7.5; the blocks have (3 * 2.5^2 + 7.5^2) * 4 / 3 = 100.
    assert cluster_effect(stalls) == pytest.approx(100 / 7.5)
    for few in ([], [(3, 10)], [(10, 10), (10, 10)], [(0, 10), (0, 10)], [(0, 0), (0, 0)]):
        assert cluster_effect(few) == 1.0, few


def test_a_line_is_that_of_least_squares() -> None:
    dice = np.random.default_rng(1)
    at = np.cumsum(dice.uniform(0.5, 1.5, 12))
    values = 3 + 0.2 * at + dice.normal(0, 0.1, 12)
    fit, known = fit_trend(at, values), linregress(at, values)
    assert (fit.value, fit.error) == pytest.approx((known.slope, known.stderr))
    assert fit.freedom == 10
    assert fit.half_width() == pytest.approx(2.2281388519649385 * known.stderr)  # Student's t, 10 degrees of freedom
    assert fit.is_significant(1.01 * known.pvalue) and not fit.is_significant(0.99 * known.pvalue)


def test_a_line_next_to_what_else_the_values_depend_on() -> None:
    """Two series whose lengths rise with the time: they explain the values, and no trend is left."""
    dice = np.random.default_rng(2)
    at = np.tile(np.linspace(-0.5, 0.5, 10), 2)
    lengths = at + np.tile(dice.normal(0, 0.3, 10), 2)
    lengths -= lengths.mean()
    values = 2 * lengths + dice.normal(0, 0.01, 20)
    values -= np.repeat([values[:10].mean(), values[10:].mean()], 10)
    assert fit_trend(at, values).is_significant(0.01)
    fit = fit_trend(at, values, lengths[:, np.newaxis], series=2)
    assert fit.freedom == 20 - 2 - 2
    assert not fit.is_significant(0.01) and abs(fit.value) < 0.02


def test_false_alarms_of_a_trend_are_as_many_as_its_level_says() -> None:
    dice = np.random.default_rng(3)
    at = np.arange(20.0)
    alarms = sum(fit_trend(at, dice.normal(0, 1, 20)).is_significant(0.05) for _ in range(2000))
    assert alarms == pytest.approx(100, abs=4 * math.sqrt(95))
