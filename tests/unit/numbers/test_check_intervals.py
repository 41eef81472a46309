"""What a check decides of samples whose true distribution is known: false results, power, and what settles it.

All through the product's own functions: latencies into `distribution`, its row into `evaluate`. The bounds leave room
for 3.5 standard errors of the trials.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from scipy.special import ndtri

from harness.base.measured import Distribution, Numbers, SloAttainment
from harness.numbers.checks import evaluate
from harness.numbers.comparison import CheckResult, Comparison, Verdict
from harness.numbers.latencies import distribution
from harness.numbers.share_test import (
    DRAWS,
    SLO_ALPHA,
    Draws,
    LatencySample,
    observed,
    percentile_draws,
    percentile_intervals,
    ratio_interval,
    requests_to_decide,
    share_draws,
    share_interval,
)
from harness.numbers.stats import Estimate, growth_to_decide
from harness.numbers.summary import Row
from harness.records.records import AT_LEAST, AT_MOST, FAILED, OBSERVED, UNKNOWN
from tests.support.made_summaries import row_of
from tests.support.nightly import NIGHTLY, draws, room, scatter

SIGMA = 0.75  # of logarithms: a long tail, as of times to first token
TRIALS = draws(2000)
FALSE = 0.025 + scatter(0.025, TRIALS)  # of wrong results on one side
EFFECT = 1.25  # that is usually estimated of independent requests, at least 1
POWER = 0.8 - room(0.8, TRIALS)
Shares = dict[str, float]


def row(sample: Distribution, **more: object) -> Row:
    numbers = Numbers(sent=sample.n, succeeded=sample.n, failed=0, unfinished=0, ttft=sample, **more)  # type: ignore[arg-type]
    return row_of(numbers)


def latencies(dice: np.random.Generator, n: int, permille: int, value_s: float) -> Row:
    """A row of n log-normal latencies with that true percentile."""
    values = np.exp(SIGMA * (dice.standard_normal(n) - float(ndtri(permille / 1000)))) * value_s
    return row(distribution([observed(np.array(list(values)))]))


def shares(results: Iterable[CheckResult]) -> Shares:
    found = Counter(result.status for result in results)
    return {status: found[status] / found.total() for status in ("passed", "failed", "inconclusive")}


def of_percentile(n: int, factor: float, metric: str = "ttft_p95", trials: int = TRIALS) -> Shares:
    """Results of `metric <= 1 s` where the true value is `factor` seconds."""
    dice, permille = np.random.default_rng(n), int(metric[-2:]) * 10
    check = [f"{metric} <= 1 s"]
    return shares(evaluate(check, [latencies(dice, n, permille, factor)], None)[0] for _ in range(trials))


@pytest.mark.parametrize("n", [130, 2000])
@pytest.mark.parametrize(("factor", "wrong"), [(1.0, "passed"), (1.1, "passed"), (0.9, "failed"), (0.999, "failed")])
def test_a_p95_beyond_the_bound_hardly_ever_passes_and_one_within_it_hardly_ever_fails(
    n: int, factor: float, wrong: str
) -> None:
    assert of_percentile(n, factor)[wrong] <= FALSE


def test_more_requests_decide_smaller_differences() -> None:
    for n, good, bad in ((130, 0.4, 1.5), (500, 0.75, 1.25), (2000, 0.86, 1.15)):
        assert of_percentile(n, good)["passed"] >= POWER
        assert of_percentile(n, bad)["failed"] >= POWER
    assert against(2000, 0.92)["passed"] >= POWER
    assert against(2000, 1.32)["failed"] >= POWER


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_the_number_of_requests_that_a_check_suggests_decides_it(factor: float) -> None:
    share_within = float(0.5 * math.erfc(-(ndtri(0.95) - math.log(factor) / SIGMA) / math.sqrt(2)))
    needed = requests_to_decide(0.95, share_within, EFFECT)
    assert needed is not None
    decided = of_percentile(needed, factor, trials=draws(1000))
    off = scatter(0.82, draws(1000), 3)
    assert 0.8 - off <= decided["passed" if factor < 1 else "failed"] <= 0.9 + off
    assert decided["failed" if factor < 1 else "passed"] == 0


def of_share(n: int, true: float, text: str = "attainment(ttft<=1s) >= 0.95") -> Shares:
    dice = np.random.default_rng(n)

    def check_once() -> CheckResult:
        met = int(dice.binomial(n, true))
        slos = {"ttft<=1s": SloAttainment(met=met, attainment=met / n)}
        return evaluate([text], [row(Distribution(n=n, effect=1.0), slos=slos)], None)[0]

    return shares(check_once() for _ in range(TRIALS))


@pytest.mark.parametrize("n", [130, 2000])
def test_a_share_at_the_bound_is_decided_by_nothing(n: int) -> None:
    found = of_share(n, 0.95)
    assert found["passed"] <= FALSE and found["failed"] <= FALSE


def ratio_check(
    text: str, now: Sequence[LatencySample], before: Sequence[LatencySample], answer_s: float | None = None
) -> CheckResult:
    """The result of a check of row b with row a of the same run as its baseline."""
    samples = {"a": before, "b": now}
    rows = [
        Row(server=name, load="x", cells=[], wall=[], output_tok_s=[], pooled=Numbers(
            sent=sum(len(one.state) for one in of), succeeded=sum(int((one.state == OBSERVED).sum()) for one in of),
            failed=sum(int((one.state == FAILED).sum()) for one in of), unfinished=0,
            ttft=distribution(of, answer_s),
        ))
        for name, of in samples.items()
    ]  # fmt: skip
    verdict = Verdict(
        side="b / x", baseline="a / x", metric="wall", ratio=None, low=None, high=None, p=None, n=(0, 0),
        word="inconclusive", reason="refused",
    )  # fmt: skip
    compared = Comparison(metric="wall", comparisons=0, noise_floor=0.02, noise_source=[], verdicts=[verdict])
    return evaluate([f"b/x: {text}"], rows, compared, None, lambda row, _: samples[row.server])[0]


def against(
    n: int, factor: float, metric: str = "ttft_p95", trials: int = TRIALS, correlation: float = 0.0, bound: float = 1.1
) -> Shares:
    """Results of `metric <= 1.1 * baseline` where the true ratio is `factor`, n requests on each side, by AR(1)."""
    from scipy.signal import lfilter  # a second's import, in the one process that runs this

    dice = np.random.default_rng(n)

    def sample(value_s: float) -> LatencySample:
        noise = dice.standard_normal(n + 100) * math.sqrt(1 - correlation**2)
        return observed(np.exp(SIGMA * lfilter([1], [1, -correlation], noise)[100:]) * value_s)

    text = f"{metric} <= {bound} * baseline"
    return shares(ratio_check(text, [sample(factor)], [sample(1.0)], 1.0) for _ in range(trials))


@pytest.mark.parametrize("metric", ["ttft_p50", "ttft_p95"])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("n", [73, 130, 200, 600, 2000] if NIGHTLY else [130, 600])
def test_a_ratio_of_correlated_latencies_at_the_bound_is_hardly_ever_decided(
    n: int, correlation: float, metric: str
) -> None:
    trials = draws(500)
    found = against(n, 1.1, metric, trials, correlation)
    assert max(found["passed"], found["failed"]) <= 0.05 + scatter(0.05, trials, 0 if NIGHTLY else 2)


@pytest.mark.parametrize(("n", "correlation", "metric", "factor", "right"), [
    (200, 0.0, "ttft_p95", 0.4, "passed"), (200, 0.0, "ttft_p95", 3.0, "failed"),
    (130, 0.8, "ttft_p50", 0.2, "passed"), (130, 0.8, "ttft_p50", 6.0, "failed"),
    (2000, 0.8, "ttft_p95", 0.5, "passed"), (2000, 0.8, "ttft_p95", 2.4, "failed"),
    (2000, 0.9, "ttft_p50", 0.6, "passed"), (2000, 0.9, "ttft_p50", 2.0, "failed"),
])  # fmt: skip
def test_a_clear_ratio_is_decided(n: int, correlation: float, metric: str, factor: float, right: str) -> None:
    trials = draws(200)
    assert against(n, factor, metric, trials, correlation)[right] >= 0.8 - room(0.8, trials)


@pytest.mark.parametrize("n", [130, 2000])
def test_a_ratio_at_the_bound_is_hardly_ever_decided(n: int) -> None:
    found = against(n, 1.1)
    assert found["passed"] <= FALSE and found["failed"] <= FALSE
    assert against(n, 1.21)["passed"] <= 0.01 + scatter(0.01, TRIALS)
    assert against(n, 1.0)["failed"] <= 0.01 + scatter(0.01, TRIALS)


def test_what_settles_a_ratio() -> None:
    dice = np.random.default_rng(5)
    now, before = (observed(np.exp(SIGMA * dice.standard_normal(1000)) * value_s) for value_s in (0.95, 1.0))
    result = ratio_check("ttft_p95 <= 1.1 * baseline", [now], [before])
    assert (result.status, result.code) == ("inconclusive", "too_close") and result.more_requests is not None
    times = growth_to_decide(Estimate(1.0, 0.9, 1.1), 1.05)
    assert times == pytest.approx(((1.96 + 0.8416) / 1.96 * math.log(1.1) / math.log(1.05)) ** 2, rel=1e-3)
    assert growth_to_decide(Estimate(1.0, 0.9, 1.1), 1.0) is None
    assert growth_to_decide(Estimate(1.0, 0.9, None), 1.2) is None


EXACT = Draws(np.full(DRAWS, 2.0), np.full(DRAWS, 2.0))


@pytest.mark.parametrize("effect", [1.0, 2.5, 7.0])
@pytest.mark.parametrize("states", [[OBSERVED], [OBSERVED] * 6 + [AT_LEAST, AT_MOST, UNKNOWN, FAILED]])
def test_against_an_exact_value_the_interval_of_a_ratio_is_that_of_the_percentile(
    effect: float, states: list[int]
) -> None:
    dice = np.random.default_rng(3)
    one = LatencySample(np.arange(600.0), dice.random(600), dice.choice(states, 600).astype(np.int8))
    for permille in (100, 500, 900, 990):
        low, high = percentile_intervals([one], [permille], effect)[0]
        found = ratio_interval(percentile_draws([one], permille, effect), EXACT, SLO_ALPHA)
        assert [end is None for end in found] == [low is None, high is None]
        assert [end or 0.0 for end in found] == pytest.approx([(end or 0.0) / 2 for end in (low, high)], rel=1e-12)
    for met in (0, 300, 590, 600):
        share = ratio_interval(share_draws(met, 0, 600, effect), EXACT, SLO_ALPHA)
        assert (share[0] or 0.0, share[1]) == pytest.approx(
            [end / 2 for end in share_interval(met, 600, effect)], abs=1e-3
        )


def test_the_interval_of_a_ratio_is_the_same_each_time_and_on_both_sides() -> None:
    dice = np.random.default_rng(4)
    side, base = (percentile_draws([observed(dice.random(300) + 1)], 900, 1.5) for _ in range(2))
    (low, high), (base_low, base_high) = (ratio_interval(*pair) for pair in ((side, base), (base, side)))
    assert (low, high) == ratio_interval(side, base)
    assert low and high and (1 / high, 1 / low) == pytest.approx((base_low, base_high), rel=0.01)


def test_unknown_and_cut_requests_of_either_side_leave_a_ratio_open() -> None:
    values = np.random.default_rng(9).random(400) + 1
    known = observed(values)
    half = known._replace(state=np.where(np.arange(400) % 2, UNKNOWN, OBSERVED).astype(np.int8))
    cut = known._replace(state=np.where(np.arange(400) % 10, OBSERVED, AT_LEAST).astype(np.int8), value_s=values)
    for now, before, code in ((half, known, "requests_unknown"), (known, half, ""), (cut, known, "requests_unknown")):
        result = ratio_check("ttft_p95 <= 3 * baseline", [now], [before])
        assert result.status == ("passed" if now is known else "inconclusive"), code
    assert ratio_check("ttft_p95 >= 0.1 * baseline", [known], [half]).status == "inconclusive"
    late = known._replace(state=np.where(np.arange(400) % 10, OBSERVED, AT_LEAST).astype(np.int8),
                          value_s=np.where(np.arange(400) % 10, values, 60.0))  # fmt: skip
    assert ratio_check("ttft_p95 <= 3 * baseline", [late], [known]).status == "failed"
    failed = known._replace(state=np.where(np.arange(400) % 5, OBSERVED, FAILED).astype(np.int8))
    assert ratio_check("ttft_p95 <= 3 * baseline", [failed], [known]).status == "failed"
