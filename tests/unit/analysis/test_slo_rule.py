"""The rule of SLOs on dependent and censored samples: errors by simulation, exact values where they are known."""

import math
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from scipy.special import ndtri

from harness.analysis.slo_rule import (
    ASSUMED_EFFECT,
    MIN_BLOCKS,
    Floats,
    KnownPercentile,
    LatencySample,
    decide,
    design_effect,
    interval_counts,
    percentile_intervals,
    percentiles,
    requests_to_decide,
    share_interval,
)
from harness.base.summary import POWER
from harness.records.records import AT_LEAST, AT_MOST, FAILED, OBSERVED, UNKNOWN
from harness.simulated.engine import EngineConfig
from tests.support.nightly import NIGHTLY, draws, room, scatter
from tests.support.virtual import VirtualWork, closed_loop

TRIALS = draws(1000)
ERROR = 0.05 + scatter(0.05, TRIALS, 0 if NIGHTLY else 2)


def sample(values: Floats, states: list[int] | None = None, sent_s: Floats | None = None) -> LatencySample:
    n = len(values)
    return LatencySample(
        np.arange(n, dtype=np.float64) if sent_s is None else sent_s,
        np.asarray(values, dtype=np.float64),
        np.full(n, OBSERVED, dtype=np.int8) if states is None else np.array(states, dtype=np.int8),
    )


def correlated(dice: np.random.Generator, n: int, correlation: float) -> Floats:
    """Normal logarithms of latencies with this correlation of neighbours (AR(1)), in steady state."""
    from scipy.signal import lfilter  # a second's import, in the one process that runs this

    noise = dice.standard_normal(n + 200) * math.sqrt(1 - correlation**2)
    series: Floats = lfilter([1], [1, -correlation], noise)[200:]
    return series


def decision(one: LatencySample, bound_s: float, share: float, answer_s: float | None) -> str:
    effect = design_effect([one], answer_s).inflation()
    return decide(int((one.value_s <= bound_s).sum()), 0, len(one.value_s), share, effect)


# One sided errors where the true share is exactly on the bound.


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("n", [73, 130, 200, 600, 2000])
def test_errors_on_the_bound_with_correlated_latencies(n: int, correlation: float) -> None:
    dice, share = np.random.default_rng(n), 0.95
    bound = math.exp(ndtri(share))
    found = Counter(
        decision(sample(np.exp(correlated(dice, n, correlation))), bound, share, 1.0) for _ in range(TRIALS)
    )
    assert found["pass"] <= ERROR * TRIALS
    assert found["fail"] <= ERROR * TRIALS


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_errors_on_the_bound_of_other_percentiles(share: float) -> None:
    dice, trials = np.random.default_rng(7), draws(500)
    for n, correlation in ((130, 0.9), (600, 0.5), (2000, 0.0)):
        series = (sample(np.exp(correlated(dice, n, correlation))) for _ in range(trials))
        found = Counter(decision(one, math.exp(ndtri(share)), share, 1.0) for one in series)
        assert max(found["pass"], found["fail"]) <= (0.05 + scatter(0.05, trials, 0 if NIGHTLY else 2)) * trials


@pytest.mark.parametrize(("users", "seats"), [(2, 1), (6, 4)])
def test_errors_on_the_bound_in_the_queue_of_a_closed_loop(users: int, seats: int) -> None:
    """Time to first token of the embedded engine in virtual time: more users than sequences that run at once."""
    config = EngineConfig(
        step_base_s=0.02, step_per_sequence_s=0.001, prefill_per_token_s=2e-5, step_per_kv_token_s=1e-8, jitter=0.05,
        max_num_seqs=seats, max_model_len=4000, num_gpu_blocks=65536, enable_prefix_caching=False,
    )  # fmt: skip
    work = VirtualWork(prompt_tokens=(50, 500), output_tokens=(20, 200))

    def measured(seed: int, n: int) -> tuple[LatencySample, float]:
        requests = list(islice(closed_loop(config, users, work, seed=seed), 200, 200 + n))
        sent_s, ttft_s = (np.array([getattr(one, name) for one in requests]) for name in ("sent_s", "ttft_s"))
        return sample(ttft_s, sent_s=sent_s), float(np.mean([one.e2e_s for one in requests]))

    truth = np.sort(
        np.concatenate(
            [measured(10_000 + seed, 8000 if NIGHTLY else 3000)[0].value_s for seed in range(4 if NIGHTLY else 2)]
        )
    )
    bound_s = float(truth[math.ceil(0.95 * len(truth)) - 1])
    trials = 300 if NIGHTLY else 15
    for n in (73, 130, 200, 600, 2000) if NIGHTLY else (130, 600):
        runs = (measured(seed, n) for seed in range(trials))
        found = Counter(decision(one, bound_s, 0.95, answer_s) for one, answer_s in runs)
        assert max(found["pass"], found["fail"]) <= (0.05 + scatter(0.05, trials, 0 if NIGHTLY else 2)) * trials


@pytest.mark.parametrize(("n", "correlation", "true_share", "right"), [
    (130, 0.0, 0.9999, "pass"), (1000, 0.0, 0.975, "pass"), (130, 0.0, 0.83, "fail"), (2000, 0.5, 0.985, "pass"),
])  # fmt: skip
def test_clear_answers_are_decided(n: int, correlation: float, true_share: float, right: str) -> None:
    dice, trials = np.random.default_rng(n), draws(500)
    series = (sample(np.exp(correlated(dice, n, correlation))) for _ in range(trials))
    found = Counter(decision(one, math.exp(ndtri(true_share)), 0.95, 1.0) for one in series)
    assert found[right] >= (POWER - room(POWER, trials)) * trials


# The design effect.


def test_the_design_effect_of_independent_and_of_dependent_requests() -> None:
    dice = np.random.default_rng(3)
    for correlation, low, high in ((0.0, 1.0, 1.6), (0.8, 7.0, 14.0)):
        effects = [design_effect([sample(correlated(dice, 2000, correlation))], 1.0).effect for _ in range(20)]
        assert low <= np.median(effects) <= high


def test_with_fewer_than_eight_blocks_the_effect_is_assumed() -> None:
    values = np.random.default_rng(1).random(600)
    at_once = design_effect([sample(values, sent_s=np.zeros(600))], 2.0)
    assert (at_once.effect, at_once.freedom, at_once.blocks) == (ASSUMED_EFFECT, math.inf, 1)
    assert at_once.inflation() == ASSUMED_EFFECT
    # One request a second: answers of 15 s make blocks of 75 requests, those of 14 s blocks of 70.
    assert design_effect([sample(values)], 15.1).blocks == MIN_BLOCKS - 1
    assert design_effect([sample(values)], 14.0).blocks == MIN_BLOCKS
    assert math.isinf(design_effect([sample(values[:39])], 1.0).freedom)
    assert design_effect([sample(np.full(600, 0.2))], 1.0).effect == 1.0, "equal latencies have no ranks"
    assert design_effect([sample(np.empty(0))], 1.0).effect == ASSUMED_EFFECT


def test_the_larger_of_within_and_between_repeats_counts() -> None:
    dice = np.random.default_rng(2)
    alike = [sample(dice.random(400)) for _ in range(3)]
    apart = [sample(dice.random(400) + shift) for shift in (0.0, 0.3, 0.6)]
    assert design_effect(alike, 1.0).effect < 5
    assert design_effect(apart, 1.0).effect > 100


def test_the_order_of_sending_counts_and_not_that_of_the_file() -> None:
    drift = np.sort(np.random.default_rng(4).random(400))
    shuffled = np.random.default_rng(5).permutation(400)
    assert design_effect([sample(drift)], 1.0).effect > 10
    in_file = sample(drift[shuffled], sent_s=shuffled.astype(np.float64))
    assert design_effect([in_file], 1.0) == pytest.approx(design_effect([sample(drift)], 1.0))


# Censored and unknown latencies.

MIXED = sample(
    np.array([1, 2, 3, 4, 2.5, 6, math.nan, 0.5, math.nan]),
    [OBSERVED, OBSERVED, OBSERVED, OBSERVED, AT_LEAST, AT_LEAST, UNKNOWN, AT_MOST, FAILED],
)


def test_percentiles_by_kaplan_meier() -> None:
    """Of six, 1 and 2 end; one is cut at 2.5; of the three at risk 3 and 4 end: S = 5/6, 4/6, 4/9, 2/9."""
    shares = {160: 1.0, 170: 2.0, 333: 2.0, 334: 3.0, 500: 3.0, 600: 4.0, 777: 4.0}
    assert percentiles([MIXED], list(shares)) == [KnownPercentile(value, None) for value in shares.values()]
    assert percentiles([MIXED], [778, 950]) == [KnownPercentile(None, 6.0)] * 2
    assert percentiles([sample(np.array([2.0, 9.0]), [AT_LEAST, AT_LEAST])], [500]) == [KnownPercentile(None, 9.0)]
    with pytest.raises(ValueError):
        percentiles([sample(np.array([math.nan]), [UNKNOWN])], [500])


def test_without_censoring_percentiles_are_exact() -> None:
    values = np.random.default_rng(6).random(137)
    ordered = np.sort(values)
    for permille in (1, 500, 900, 950, 990, 1000):
        rank = max(1, math.ceil(137 * permille / 1000))
        assert percentiles([sample(values[:50]), sample(values[50:])], [permille])[0].value_s == ordered[rank - 1]


def test_a_quarter_that_is_never_answered_fails_every_bound_below_its_age() -> None:
    one = sample(np.array([0.02, 0.02, 0.02, 20.0] * 50), [OBSERVED, OBSERVED, OBSERVED, AT_LEAST] * 50)
    low_s, high_s = percentile_intervals([one], [950], 1.0)[0]
    assert low_s is not None and low_s > 20.0 and high_s is None
    assert percentiles([one], [500, 950]) == [KnownPercentile(0.02, None), KnownPercentile(None, 20.0)]


def test_an_age_that_equals_the_bound_is_a_miss() -> None:
    one = sample(np.ones(200), [AT_LEAST] * 200)
    low_s, _ = percentile_intervals([one], [900], 1.0)[0]
    assert low_s == math.nextafter(1.0, 2.0)


def test_unknown_latencies_leave_the_check_open() -> None:
    one = sample(np.array([0.02, math.nan] * 150), [OBSERVED, UNKNOWN] * 150)
    assert percentile_intervals([one], [950], 1.0)[0] == (0.02, None), "at any bound at least half may be met"
    few = sample(np.array([0.02] * 500 + [math.nan]), [OBSERVED] * 500 + [UNKNOWN])
    assert percentile_intervals([few], [950], 1.0)[0] == (0.02, 0.02)


def test_the_interval_of_a_percentile_is_where_the_share_is_not_decided() -> None:
    dice = np.random.default_rng(8)
    values = dice.random(300)
    states = dice.choice([OBSERVED, OBSERVED, OBSERVED, OBSERVED, AT_LEAST, AT_MOST, FAILED], 300)
    one = sample(values, list(states))
    n = len(states)
    for effect in (1.0, 2.5):
        low_s, high_s = percentile_intervals([one], [800], effect)[0]
        for bound_s in np.linspace(0.01, 1.2, 200):
            met = int((np.isin(states, [OBSERVED, AT_MOST]) & (values <= bound_s)).sum())
            missed = int(((states == OBSERVED) & (values > bound_s) | (states == AT_LEAST) & (values >= bound_s)).sum())
            missed += int((states == FAILED).sum())
            found = decide(met, n - met - missed, n, 0.8, effect)
            is_pass, is_fail = high_s is not None and bound_s >= high_s, low_s is not None and bound_s < low_s
            assert found == ("pass" if is_pass else "fail" if is_fail else "inconclusive")


# Shares of effective requests.


def test_counts_that_decide_are_those_of_the_binomial_distribution() -> None:
    def at_most(count: int, n: int, p: float) -> float:
        return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(count + 1))

    for n in (1, 2, 5, 11, 72, 130, 300):
        for p in (0.5, 0.9, 0.95, 0.99):
            fails, passes = interval_counts(n, p, 1.0)
            assert fails < 0 or at_most(fails, n, p) <= 0.025
            assert fails + 1 > n or at_most(fails + 1, n, p) > 0.025
            assert passes > n or 1 - at_most(passes - 1, n, p) <= 0.025
            assert 1 - at_most(passes - 2, n, p) > 0.025
    assert interval_counts(71, 0.95, 1.0)[1] == 72 and interval_counts(72, 0.95, 1.0)[1] == 72
    assert interval_counts(719, 0.95, 10.0)[1] == 720 and interval_counts(720, 0.95, 10.0)[1] == 720


def test_unknown_requests_must_not_change_the_answer() -> None:
    assert decide(100, 0, 100, 0.95, 1.0) == "pass"
    assert decide(95, 5, 100, 0.95, 1.0) == "inconclusive"
    assert decide(60, 5, 100, 0.95, 1.0) == "fail"
    assert decide(60, 40, 100, 0.95, 1.0) == "inconclusive"
    assert decide(100, 0, 100, 0.95, 2.0) == "inconclusive"


def test_the_interval_of_a_share() -> None:
    assert share_interval(100, 100, 1.0) == pytest.approx((0.025 ** (1 / 100), 1.0))
    assert share_interval(100, 100, 4.0) == pytest.approx((0.025 ** (1 / 25), 1.0))
    assert share_interval(0, 100, 1.0) == pytest.approx((0.0, 1 - 0.025 ** (1 / 100)))
    assert share_interval(50, 100, 1.0) == pytest.approx((0.3983, 0.6017), abs=1e-4)


def test_how_many_requests_decide() -> None:
    assert requests_to_decide(0.95, 1.0) == 72
    assert requests_to_decide(0.95, 1.0, 10.0) == 720
    assert requests_to_decide(0.95, 0.95) is None
    assert requests_to_decide(0.95, 0.9505) is None
