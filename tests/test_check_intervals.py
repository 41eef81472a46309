"""What a check decides of samples whose true distribution is known: false results, power, and what settles it.

All through the product's own functions: latencies into `distribution`, its row into `evaluate`. The bounds leave room
for 3.5 standard errors of the trials.
"""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from scipy.special import ndtri

from harness.analysis.latencies import distribution_of
from harness.judge.checks import evaluate
from harness.judge.slo_rule import requests_to_decide
from harness.judge.stats import Estimate, estimate_ratio, growth_to_decide
from harness.summary import CheckResult, Distribution, Numbers, Reference, Row, SloAttainment
from tests.nightly import draws, room, scatter

SIGMA = 0.75  # of logarithms: a long tail, as of times to first token
TRIALS = draws(2000)
FALSE = 0.025 + scatter(0.025, TRIALS)  # of wrong results on one side
EFFECT = 1.25  # that is usually estimated of independent requests, at least 1
POWER = 0.8 - room(0.8, TRIALS)
Shares = dict[str, float]


def row(sample: Distribution, **more: object) -> Row:
    numbers = Numbers(sent=sample.n, succeeded=sample.n, failed=0, unfinished=0, ttft_s=sample, **more)  # type: ignore[arg-type]
    return Row(server="a", load="x", cells=[], wall_s=[], output_tok_s=[], pooled=numbers)


def latencies(dice: np.random.Generator, n: int, permille: int, value_s: float) -> Row:
    """A row of n log-normal latencies with that true percentile."""
    values = np.exp(SIGMA * (dice.standard_normal(n) - float(ndtri(permille / 1000)))) * value_s
    return row(distribution_of(list(values)))


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


def against(n: int, factor: float, metric: str = "ttft_p95", trials: int = TRIALS) -> Shares:
    """Results of `metric <= 1.1 * baseline` where the true ratio is `factor`, n requests on each side."""
    dice, permille = np.random.default_rng(n), int(metric[-2:]) * 10

    def check_once() -> CheckResult:
        before = Reference(run="before", rows=[latencies(dice, n, permille, 1.0)])
        now = latencies(dice, n, permille, factor)
        return evaluate([f"{metric} <= 1.1 * baseline"], [now], None, before)[0]

    return shares(check_once() for _ in range(trials))


@pytest.mark.parametrize("n", [130, 2000])
def test_a_ratio_at_the_bound_is_hardly_ever_decided(n: int) -> None:
    found = against(n, 1.1)
    assert found["passed"] <= FALSE and found["failed"] <= FALSE
    assert against(n, 1.21)["passed"] <= 0.01 + scatter(0.01, TRIALS)
    assert against(n, 1.0)["failed"] <= 0.01 + scatter(0.01, TRIALS)


def test_what_settles_a_ratio() -> None:
    dice = np.random.default_rng(5)
    now, before = latencies(dice, 1000, 950, 0.95), latencies(dice, 1000, 950, 1.0)
    (result,) = evaluate(["ttft_p95 <= 1.1 * baseline"], [now], None, Reference(run="before", rows=[before]))
    assert (result.status, result.code) == ("inconclusive", "too_close")
    times = growth_to_decide(Estimate(1.0, 0.9, 1.1), 1.05)
    assert times == pytest.approx(((1.96 + 0.8416) / 1.96 * math.log(1.1) / math.log(1.05)) ** 2, rel=1e-3)
    assert growth_to_decide(Estimate(1.0, 0.9, 1.1), 1.0) is None
    assert growth_to_decide(Estimate(1.0, 0.9, None), 1.2) is None


def test_the_interval_of_a_ratio() -> None:
    side, base = Estimate(2.0, 1.6, 3.0), Estimate(1.0, 0.8, 1.1)
    down, up = math.hypot(math.log(2 / 1.6), math.log(1.1)), math.hypot(math.log(1.5), math.log(1 / 0.8))
    assert estimate_ratio(side, base) == pytest.approx((2.0, 2 * math.exp(-down), 2 * math.exp(up)))
    assert estimate_ratio(Estimate(2.0, 1.6, None), base)[2] is None
    assert estimate_ratio(side, Estimate(1.0, 0.8, None))[1] is None
    assert estimate_ratio(side, Estimate(1.0, 1.0, 1.0)) == pytest.approx(side)
