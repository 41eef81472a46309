"""The rule of SLOs on dependent and censored samples: errors by simulation, exact values where they are known.

`python -m tests.unit.numbers.test_share_test` prints the figures of docs/method.md: minutes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, product

import numpy as np
import pytest
from scipy.special import ndtri

from harness.base.measured import LogSpread
from harness.numbers.block_statistics import MIN_EFFECT_BLOCKS
from harness.numbers.comparison import POWER
from harness.numbers.share_test import (
    FAR_REQUESTS,
    MIN_REQUESTS,
    Floats,
    KnownPercentile,
    LatencySample,
    decide,
    decide_share,
    design_effect,
    far_bounds,
    far_decision,
    interval_counts,
    log_spread,
    observed,
    percentile_intervals,
    percentiles,
    requests_to_be_far,
    requests_to_decide,
    share_interval,
    tolerance_factor,
)
from harness.records.records import AT_LEAST, AT_MOST, FAILED, OBSERVED, UNKNOWN
from harness.simulated.engine import EngineConfig
from tests.support.nightly import NIGHTLY, draws, room, scatter
from tests.support.virtual import VirtualWork, closed_loop

TRIALS = draws(3000)
ERROR = 0.05 + scatter(0.05, TRIALS, 0 if NIGHTLY else 2)
NUMBERS = (73, 130, 200, 300, 600)  # of requests
CORRELATIONS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
SPREAD = 0.3  # of logarithms, of a latency that varies little


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


Decide = Callable[[np.random.Generator], str]


def shares(decide_once: Decide, seed: int, trials: int) -> dict[str, float]:
    """The share of each decision, or of passes alone, in so many draws."""
    dice = np.random.default_rng(seed)
    found = Counter(decide_once(dice) for _ in range(trials))
    return {word: found[word] / trials for word in ("pass", "fail", "inconclusive")}


def ceiling(share: float, trials: int) -> float:
    """What a share may be in so many draws: four standard errors above it, with all draws two."""
    return share + scatter(max(share, 0.005), trials, 2 if NIGHTLY else 4)


# One sided errors where the true share is exactly on the bound.


def on_the_bound(n: int, correlation: float, trials: int, share: float = 0.95) -> dict[str, float]:
    """Decisions about correlated latencies of which exactly `share` are within the bound."""
    bound = math.exp(ndtri(share))
    return shares(
        lambda dice: decide_share([observed(np.exp(correlated(dice, n, correlation)))], share, bound=bound).decision,
        n,
        trials,
    )


@pytest.mark.parametrize("correlation", CORRELATIONS if NIGHTLY else (0.0, 0.5, 0.9))
@pytest.mark.parametrize("n", NUMBERS if NIGHTLY else (73, 300))
def test_errors_on_the_bound_with_correlated_latencies(n: int, correlation: float) -> None:
    trials = TRIALS if NIGHTLY else 200
    found = on_the_bound(n, correlation, trials)
    assert max(found["pass"], found["fail"]) <= ceiling(0.024, trials)


def test_errors_on_the_bound_with_many_requests() -> None:
    for correlation in (0.0, 0.8):
        found = on_the_bound(2000, correlation, draws(1000))
        assert max(found["pass"], found["fail"]) <= 0.05 + scatter(0.05, draws(1000), 0 if NIGHTLY else 2)


def in_clusters(dice: np.random.Generator, n: int, size: int, slow: float, factor: float) -> LatencySample:
    """Latencies of which a share is slower by a factor, in clusters of `size` neighbours: a stall of all in flight."""
    hit = np.repeat(dice.random(n // size + 2) < slow, size)[dice.integers(size) :][:n]
    return observed(np.exp(SPREAD * dice.standard_normal(n)) * np.where(hit, factor, 1.0))


def stalls_on_the_bound(n: int, in_flight: int, trials: int, knows: bool = True) -> tuple[float, float]:
    """The shares of passes by the interval and of all passes, where 5 % of the requests miss, all in flight at once.

    `knows`: the number in flight.
    """
    number = in_flight if knows else None
    dice, by_interval, all_passes = np.random.default_rng(n), 0, 0
    for _ in range(trials):
        one = in_clusters(dice, n, in_flight, 0.05, 20)
        found = decide_share([one], 0.95, bound=5, in_flight=number)
        by_interval += found.decision == "pass" and not found.far
        all_passes += found.decision == "pass"
    return by_interval / trials, all_passes / trials


@pytest.mark.parametrize("in_flight", [8, 16])
def test_stalls_that_hit_all_in_flight_pass_less_often_because_their_number_is_known(in_flight: int) -> None:
    """Far below the bound, a stall that did not happen in the time that was measured is not seen."""
    trials = TRIALS if NIGHTLY else 100
    for n in NUMBERS if NIGHTLY else (130, 600):
        by_interval, all_passes = stalls_on_the_bound(n, in_flight, trials)
        assert by_interval <= ceiling(0.16, trials)
        assert all_passes <= ceiling(0.95 ** (n // in_flight), trials) + 0.05
    assert stalls_on_the_bound(130, in_flight, 100, knows=False)[0] >= 0.15


# Far below the bound.


def uniform(dice: np.random.Generator, n: int, correlation: float) -> Floats:
    from scipy.special import ndtr

    found: Floats = ndtr(correlated(dice, n, correlation))
    return found


def _student(share: Floats) -> Floats:
    from scipy.special import stdtrit

    found: Floats = stdtrit(3, share)
    return found


TAILS_OF: dict[str, Callable[[Floats], Floats]] = {  # latencies by their quantiles
    "log-normal, spread 0.3": lambda share: np.exp(SPREAD * ndtri(share)),
    "log-normal, spread 0.75": lambda share: np.exp(0.75 * ndtri(share)),
    "log-t3": lambda share: np.exp(SPREAD * _student(share)),
    "exponential": lambda share: -np.log1p(-share),
    "log-exponential": lambda share: np.exp(-SPREAD * np.log1p(-share)),
}


def far(one: LatencySample, share: float, bound: float, in_flight: float | None = None) -> str:
    spread = log_spread([one])
    if far_decision(spread, share, 1.0, bound) is None:  # then with no other effect: it takes a hundredth of the time
        return "inconclusive"
    return far_decision(spread, share, design_effect([one], None, in_flight).effect, bound) or "inconclusive"


def far_on_the_bound(tail: str, n: int, correlation: float, trials: int, share: float = 0.95) -> dict[str, float]:
    quantile = TAILS_OF[tail]
    bound = float(quantile(np.array([share]))[0])
    return shares(lambda dice: far(observed(quantile(uniform(dice, n, correlation))), share, bound), n, trials)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("tail", TAILS_OF)
def test_latencies_on_the_bound_are_not_far_below_it(tail: str, share: float) -> None:
    trials = TRIALS if NIGHTLY else 200
    for n, correlation in product((60, 100, 180, 300, 600) if NIGHTLY else (60, 300), (0.0, 0.5, 0.9)):
        found = far_on_the_bound(tail, n, correlation, trials, share)
        assert max(found["pass"], found["fail"]) <= ceiling(0.004, trials)


def second_mode(n: int, slow: float, correlation: float, trials: int, bound: float = 10.0) -> float:
    """The share of passes where some requests are 20 times slower, in the clusters that correlation makes."""

    def decide_once(dice: np.random.Generator) -> str:
        share = uniform(dice, n, correlation)
        values = np.exp(SPREAD * ndtri(share)) * np.where(share > 1 - slow, 20.0, 1.0)
        return far(observed(values), 0.95, bound)

    return shares(decide_once, n, trials)["pass"]


def test_a_second_mode_in_clusters_is_seldom_far_below_the_bound() -> None:
    trials = TRIALS if NIGHTLY else 100
    for n, correlation, slow in product((100, 180, 300, 600), (0.0, 0.5, 0.9), (0.06, 0.08)):
        assert second_mode(n, slow, correlation, trials) <= ceiling(0.067, trials)


def power_far_below(n: int, correlation: float, trials: int) -> float:
    return shares(lambda dice: far(observed(np.exp(SPREAD * correlated(dice, n, correlation))), 0.95, 20.0), n, trials)[
        "pass"
    ]


def test_a_bound_twenty_times_above_the_median_is_seen_to_be_far_away() -> None:
    trials = draws(1000)
    assert power_far_below(100, 0.0, trials) == power_far_below(100, 0.5, trials) == 1
    assert power_far_below(300, 0.9, trials) >= 0.9 - room(0.9, trials)


def test_far_below_needs_requests_distance_and_effective_requests() -> None:
    dice = np.random.default_rng(12)
    values = 0.05 * np.exp(0.1 * dice.standard_normal(300))

    def found(n: int, bound_s: float, in_flight: float = 1.0, share: float = 0.95) -> bool:
        result = decide_share([observed(values[:n])], share, bound=bound_s, in_flight=in_flight)
        assert (result.decision == "pass") or not result.far
        return far(observed(values[:n]), share, bound_s, in_flight) == "pass"

    largest = [float(values[:n].max()) for n in (60, 100)]
    assert (found(59, 2.0), found(60, 2.0), found(99, 2.0)) == (False, True, True)
    assert (found(60, 4.9 * largest[0]), found(60, 5.1 * largest[0])) == (False, True)
    assert (found(100, 1.9 * largest[1]), found(100, 2.1 * largest[1])) == (False, True)
    assert (found(100, 2.0, 24.0), found(100, 2.0, 26.0)) == (True, False), "12 or 13 count as one"
    assert (found(299, 2.0, share=0.99), found(300, 2.0, share=0.99)) == (False, True), "p99: five times as many"
    assert FAR_REQUESTS == ((100, 2.0), (60, 5.0))


def test_a_p95_of_92_ms_meets_2_s() -> None:
    values = 0.06 * np.exp(0.25 * correlated(np.random.default_rng(5), 180, 0.6))
    found = decide_share([observed(values)], 0.95, bound=2.0, answer_s=1.0, in_flight=8)
    assert (found.decision, found.far, found.met, found.n, found.needed) == ("pass", True, 180, 180, None)
    assert found.interval[0] < 0.95, "the interval alone does not decide"
    above = decide_share([observed(100 * values)], 0.95, bound=0.5, in_flight=8)
    assert (above.decision, above.met) == ("fail", 0)


def test_failed_cut_and_unknown_requests_are_far_below_nothing_unless_they_cannot_matter() -> None:
    values = 0.05 * np.exp(0.1 * np.random.default_rng(2).standard_normal(200))

    def found(state: int, number: int, value: float, share: float = 0.95) -> str:
        states = np.full(200, OBSERVED, dtype=np.int8)
        states[:: 200 // number][:number] = state
        changed = np.where(states == state, value, values)
        return far(sample(changed, list(states)), share, 2.0)

    assert found(FAILED, 1, math.inf) == "inconclusive", "a miss"
    assert (found(AT_LEAST, 10, 0.5), found(AT_LEAST, 11, 0.5)) == ("pass", "inconclusive"), "5 % may be missed"
    assert found(AT_LEAST, 1, 1.1) == "inconclusive", "above half the bound"
    assert (found(UNKNOWN, 10, math.nan), found(UNKNOWN, 11, math.nan)) == ("pass", "inconclusive")
    assert found(UNKNOWN, 100, math.nan, 0.5) == "inconclusive", "half of them are not known"
    assert (found(AT_MOST, 200, 0.9), found(AT_MOST, 1, 1.1)) == ("pass", "inconclusive")
    assert far(observed(np.append(values, 0.0)), 0.95, 2.0) == "pass", "a request that does not have the latency"
    assert decide_share([observed(np.zeros(200))], 0.95).decision == "pass"
    assert decide_share([], 0.95).decision == "inconclusive"


def test_far_bounds_are_where_the_decision_changes() -> None:
    spread = LogSpread(n=200, mean=-3.0, sd=0.2, min=0.03, max=0.09)
    above, below = far_bounds(spread, 0.95, 4.0)
    assert above == pytest.approx(min(0.015, math.exp(-3 - 1.5 * tolerance_factor(0.95, 50) * 0.2)))
    assert below == pytest.approx(max(0.18, math.exp(-3 + 1.5 * tolerance_factor(0.95, 50) * 0.2)))
    assert below is not None and above is not None
    for bound, expected in ((below, "pass"), (below * 0.999, None), (above, None), (above * 0.999, "fail")):
        assert far_decision(spread, 0.95, 4.0, bound) == expected
    assert far_bounds(None, 0.95, 1.0) == (None, None)


def test_the_tolerance_factor_is_that_of_the_noncentral_t_distribution() -> None:
    from scipy.special import nctdtrit

    for share in (0.5, 0.9, 0.95, 0.99):
        for n in (8.0, 20.0, 100.0):
            exact = float(nctdtrit(n - 1, ndtri(share) * math.sqrt(n), 0.95)) / math.sqrt(n)
            assert tolerance_factor(share, n) == pytest.approx(exact, rel=0.04)


def test_how_many_requests_are_far_below() -> None:
    spread = LogSpread(n=50, mean=-3.0, sd=0.2, min=0.03, max=0.09)
    assert requests_to_be_far(spread, 0.95, 1.0, 2.0) == 60
    assert requests_to_be_far(spread, 0.95, 1.0, 0.3) == 100
    assert requests_to_be_far(spread, 0.95, 20.0, 2.0) == 160
    assert requests_to_be_far(spread, 0.99, 1.0, 2.0) == 300
    assert requests_to_be_far(spread, 0.95, 1.0, 0.17) is None
    assert decide_share([observed(np.full(59, 0.1))], 0.95).needed == 60


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_errors_on_the_bound_of_other_percentiles(share: float) -> None:
    dice, trials = np.random.default_rng(7), draws(500)
    for n, correlation in ((130, 0.9), (600, 0.5), (2000, 0.0)):
        series = (sample(np.exp(correlated(dice, n, correlation))) for _ in range(trials))
        found = Counter(decide_share([one], share, bound=math.exp(ndtri(share))).decision for one in series)
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
        found = Counter(
            decide_share([one], 0.95, bound=bound_s, answer_s=answer_s, in_flight=users).decision
            for one, answer_s in runs
        )
        assert max(found["pass"], found["fail"]) <= (0.05 + scatter(0.05, trials, 0 if NIGHTLY else 2)) * trials


@pytest.mark.parametrize(("n", "correlation", "true_share", "right"), [
    (130, 0.0, 0.9999, "pass"), (1000, 0.0, 0.975, "pass"), (130, 0.0, 0.83, "fail"), (2000, 0.5, 0.985, "pass"),
])  # fmt: skip
def test_clear_answers_are_decided(n: int, correlation: float, true_share: float, right: str) -> None:
    dice, trials = np.random.default_rng(n), draws(500)
    series = (sample(np.exp(correlated(dice, n, correlation))) for _ in range(trials))
    bound = math.exp(ndtri(true_share))
    found = Counter[str](decide_share([one], 0.95, bound=bound).decision for one in series)
    assert found[right] >= (POWER - room(POWER, trials)) * trials


# The design effect.


def test_the_design_effect_of_independent_and_of_dependent_requests() -> None:
    dice = np.random.default_rng(3)
    for correlation, low, high in ((0.0, 1.0, 1.6), (0.8, 7.0, 14.0)):
        effects = [design_effect([sample(correlated(dice, 2000, correlation))], 1.0).effect for _ in range(20)]
        assert low <= np.median(effects) <= high


def test_the_effect_is_at_least_half_the_requests_in_flight_and_needs_eight_blocks_of_its_own() -> None:
    values = np.random.default_rng(1).random(600)
    assert design_effect([sample(values)], 1.0, 20.0).effect == 10.0
    assert design_effect([sample(np.full(600, 0.2))], 1.0).effect == 1.0, "equal latencies have no ranks"
    assert design_effect([sample(np.full(600, 0.2))], 1.0, 6.0).effect == 3.0
    assert design_effect([sample(np.empty(0))], 1.0).effect == 1.0
    assert design_effect([sample(np.arange(4.0))], 1.0).effect == 4.0, "all of them count as one"
    # One request a second: answers of 15 s make blocks of 75 requests, those of 14 s blocks of 70. Their means differ.
    wave = values + np.repeat([0.0, 0.15] * 4, 75)
    assert design_effect([sample(wave)], 15.1).blocks == MIN_EFFECT_BLOCKS - 1
    assert design_effect([sample(wave)], 14.9).blocks == MIN_EFFECT_BLOCKS
    assert design_effect([sample(wave)], 14.9).effect > 2 * design_effect([sample(wave)], 15.1).effect


def test_slow_waves_show_in_second_neighbours_and_in_the_slowest() -> None:
    dice = np.random.default_rng(9)
    noisy = correlated(dice, 3000, 0.95) + dice.standard_normal(3000)
    first = float(np.corrcoef(noisy[1:], noisy[:-1])[0, 1])
    assert design_effect([sample(noisy)], None).effect > 1.5 * (1 + first) / (1 - first)
    stalled = np.where(np.arange(1600) % 320 < 16, 50.0, 0.0) + dice.random(1600)
    assert design_effect([sample(stalled)], None, 16.0).effect > 10


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
            assert fails < 0 or at_most(fails, n, p) <= 0.05
            assert fails + 1 > n or at_most(fails + 1, n, p) > 0.05
            assert passes > n or 1 - at_most(passes - 1, n, p) <= 0.05
            assert n < MIN_REQUESTS or 1 - at_most(passes - 2, n, p) > 0.05
    assert interval_counts(59, 0.95, 1.0)[1] == interval_counts(59, 0.5, 1.0)[1] == 60, "fewer than 60 pass nothing"
    assert interval_counts(60, 0.95, 1.0)[1] == 60 and interval_counts(60, 0.5, 1.0)[1] == 37
    assert interval_counts(584, 0.95, 10.0)[1] == 585 and interval_counts(585, 0.95, 10.0)[1] == 585


def test_unknown_requests_must_not_change_the_answer() -> None:
    assert decide(100, 0, 100, 0.95, 1.0) == "pass"
    assert decide(95, 5, 100, 0.95, 1.0) == "inconclusive"
    assert decide(60, 5, 100, 0.95, 1.0) == "fail"
    assert decide(60, 40, 100, 0.95, 1.0) == "inconclusive"
    assert decide(100, 0, 100, 0.95, 2.0) == "inconclusive"


def test_the_interval_of_a_share() -> None:
    assert share_interval(100, 100, 1.0) == pytest.approx((0.05 ** (1 / 100), 1.0))
    assert share_interval(100, 100, 4.0) == pytest.approx((0.05 ** (1 / 25), 1.0))
    assert share_interval(0, 100, 1.0) == pytest.approx((0.0, 1 - 0.05 ** (1 / 100)))
    assert share_interval(50, 100, 1.0) == pytest.approx((0.4136, 0.5864), abs=1e-4)


def test_how_many_requests_decide() -> None:
    assert requests_to_decide(0.95, 1.0) == 60
    assert requests_to_decide(0.95, 1.0, 10.0) == 585
    assert requests_to_decide(0.5, 1.0) == 60 and requests_to_decide(0.95, 0.0) == 2
    assert requests_to_decide(0.95, 0.95) is None
    assert requests_to_decide(0.95, 0.9505) is None


def _figures() -> Iterator[str]:
    trials = 1000
    for n in NUMBERS:
        both = [on_the_bound(n, correlation, trials) for correlation in CORRELATIONS]
        worst = max(found["pass"] for found in both), max(found["fail"] for found in both)
        yield f"on the bound, {n} requests: passes {worst[0]:.1%}, fails {worst[1]:.1%}"
    for in_flight, n in product((8, 16), (*NUMBERS, 240, 480)):
        known, unknown = (stalls_on_the_bound(n, in_flight, trials, knows) for knows in (True, False))
        yield (
            f"stalls of {in_flight}, {n} requests: passes by the interval {known[0]:.1%}, all {known[1]:.1%}; "
            f"by the interval without the number in flight {unknown[0]:.1%}"
        )
    for tail, share in product(TAILS_OF, (0.5, 0.9, 0.95, 0.99)):
        cases = product((60, 100, 180, 300, 600), (0.0, 0.5, 0.9))
        errors = [far_on_the_bound(tail, *case, trials, share) for case in cases]
        yield f"far below, {tail}, share {share}: passes {max(found['pass'] for found in errors):.2%}"
    for n, correlation in product((60, 100, 180, 300, 600), (0.0, 0.5, 0.9)):
        rates = [second_mode(n, slow, correlation, trials) for slow in (0.06, 0.08)]
        yield f"second mode, {n} requests, correlation {correlation}: passes {rates[0]:.1%} and {rates[1]:.1%}"
    for in_flight, n in product((8, 16), (100, 180, 300, 600)):
        found = shares(lambda dice, n=n, size=in_flight: far(  # type: ignore[misc]
            in_clusters(dice, n, size, 0.06, 20.0), 0.95, 10.0, size), n, trials)["pass"]  # fmt: skip
        yield f"second mode of 6 % in stalls of {in_flight}, {n} requests: passes {found:.1%}"
    for n, correlation in product((60, 100, 180, 300), (0.0, 0.5, 0.9)):
        yield f"power far below, {n} requests, correlation {correlation}: {power_far_below(n, correlation, trials):.1%}"


if __name__ == "__main__":
    for line in _figures():
        print(line, flush=True)
