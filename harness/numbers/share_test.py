"""The rule of SLOs: is a share of the requests within a bound? One function decides checks and capacity probes.

A latency may be missing because it was bad, so each request has a value and a state (docs/method.md, "Censoring"):

- OBSERVED: the value is the latency.
- AT_LEAST: the latency did not end; the value is the age at which it was cut. For a bound b, age >= b is a miss.
- AT_MOST: the latency is known to be at most the value.
- UNKNOWN: nothing is known, such as TTFT of an answer that was not streamed.
- FAILED: the request has no latency. It is a miss at every bound, and in no displayed percentile.

Every decision is computed twice, with unknown requests as met and as missed, and decides only if both agree. All
functions are pure: arrays in, values out. Times are in seconds.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.base.measured import LogSpread
from harness.numbers.block_statistics import DesignEffect, effect_of_dependence, values_in_block
from harness.numbers.comparison import ALPHA, POWER
from harness.records.records import AT_LEAST, AT_MOST, FAILED, OBSERVED, UNKNOWN

SLO_ALPHA = 0.1  # of intervals and decisions of shares: 5 % on each side
MIN_REQUESTS = 60  # fewer pass nothing
# "Far below the bound": of so many requests none is above the bound divided by the factor ...
FAR_REQUESTS = ((100, 2.0), (60, 5.0))
FAR_EFFECTIVE = 8.0  # ... so many independent requests would say as much ...
MAX_OPEN = 0.05  # ... no more of them were cut, or are unknown ...
FAR_FACTOR = 1.5  # ... and the bound is so many times as far away as the tolerance limit of a normal distribution.
DRAWS = 4000  # of a ratio
MAX_REQUESTS = 100_000  # no larger number of requests is suggested

Floats = NDArray[np.float64]
Decision = Literal["pass", "fail", "inconclusive"]


class LatencySample(NamedTuple):
    """One latency of the requests of one repeat, in any order. Requests to which it does not apply are left out."""

    sent_s: Floats
    value_s: Floats  # of no meaning where the state is UNKNOWN or FAILED
    state: NDArray[np.int8]

    def of_state(self, *states: int) -> Floats:
        """The values of the requests in one of the states."""
        chosen = np.zeros(len(self.state), dtype=np.bool_)
        for state in states:
            chosen |= self.state == state
        return self.value_s[chosen]


def observed(values_s: Floats, sent_s: Floats | None = None) -> LatencySample:
    """A sample of latencies that all ended; without times of sending they are in the order of sending."""
    n = len(values_s)
    order = np.arange(n, dtype=np.float64) if sent_s is None else sent_s
    return LatencySample(order, np.asarray(values_s, dtype=np.float64), np.full(n, OBSERVED, dtype=np.int8))


class KnownPercentile(NamedTuple):
    """A Kaplan-Meier percentile. Exactly one field is set: where it is not reached, it is larger than `above_s`."""

    value_s: float | None
    above_s: float | None


def percentiles(samples: Sequence[LatencySample], permilles: Sequence[int]) -> list[KnownPercentile]:
    """The Kaplan-Meier percentiles of all repeats together. Raises ValueError without an observed or censored value.

    Without censored requests they are the exact percentiles: the smallest value that at least so many per mille do not
    exceed.
    """
    largest = max(float(values.max()) for sample in samples if len(values := sample.of_state(OBSERVED, AT_LEAST)))
    times, shares = kaplan_meier(samples)
    results = []
    for permille in permilles:
        index = int(np.searchsorted(shares, permille / 1000 - 1e-12))
        is_reached = index < len(times)
        results.append(KnownPercentile(float(times[index]) if is_reached else None, None if is_reached else largest))
    return results


def kaplan_meier(samples: Sequence[LatencySample]) -> tuple[Floats, Floats]:
    """The distribution function: the different values in rising order, and the share of the requests up to each."""
    events = np.sort(np.concatenate([sample.of_state(OBSERVED) for sample in samples] or [np.empty(0)]))
    ages = np.sort(np.concatenate([sample.of_state(AT_LEAST) for sample in samples] or [np.empty(0)]))
    up_to = np.flatnonzero(np.append(events[1:] != events[:-1], len(events) > 0)) + 1  # events up to each value
    times = events[up_to - 1]
    if not len(ages):
        return times, up_to / max(len(events), 1)
    counts = np.diff(up_to, prepend=0)
    at_risk = len(events) - up_to + counts + len(ages) - np.searchsorted(ages, times)
    return times, 1 - np.cumprod(1 - counts / at_risk)


def design_effect(
    samples: Sequence[LatencySample], answer_s: float | None, in_flight: float | None = None
) -> DesignEffect:
    """Estimate the design effect of a latency, one sample a repeat, by the ranks of the requests.

    `answer_s`: the mean time of an answer, which the length of a block depends on. `in_flight`: the mean number of
    requests in flight; None: not known.
    """
    repeats = _ranks_in_order(samples)
    sizes = [
        values_in_block(sample.sent_s, len(ranks), answer_s) for sample, ranks in zip(samples, repeats, strict=True)
    ]
    return effect_of_dependence(repeats, sizes, in_flight)


def _ranks_in_order(samples: Sequence[LatencySample]) -> list[Floats]:
    """The ranks (0 to 1) of all repeats together, in the order of sending; ties have the same rank.

    A failed request ranks last, a cut one by its age. Unknown ones have no rank.
    """
    ordered = []
    for sample in samples:
        decided = sample.state != UNKNOWN
        order = np.argsort(sample.sent_s[decided], kind="stable")
        values = np.where(sample.state[decided] == FAILED, np.inf, sample.value_s[decided])
        ordered.append(values[order])
    if not any(map(len, ordered)):
        return ordered
    _, place, counts = np.unique(np.concatenate(ordered), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[place.ravel()] / counts.sum()
    ends = np.cumsum([len(values) for values in ordered])[:-1]
    return list(np.split(ranks, ends))


def share_interval(met: float, n: int, effect: float, alpha: float = SLO_ALPHA) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share, `met` of n requests, with n / effect effective requests."""
    from scipy.special import betaincinv

    size, count = n / effect, met / effect
    low = float(betaincinv(count, size - count + 1, alpha / 2)) if count > 0 else 0.0
    high = float(betaincinv(count + 1, size - count, 1 - alpha / 2)) if count < size else 1.0
    return low, high


def interval_counts(n: int, share: float, effect: float, alpha: float = SLO_ALPHA) -> tuple[int, int]:
    """The numbers of met requests that decide: so many or fewer fail, so many or more pass. -1 and n + 1: none do."""
    fails, passes = _counts_outside(n, share, effect, alpha)
    return fails, passes if n >= MIN_REQUESTS else n + 1


def _counts_outside(n: int, share: float, effect: float, alpha: float) -> tuple[int, int]:
    """The same for any number of requests: the interval of so many met ones does not contain the share."""
    from scipy.special import betainc

    size = n / effect

    def below(count: int) -> float:  # a share of at least `share` has so many or fewer met
        return 1 - float(betainc(count / effect + 1, size - count / effect, share)) if count < n else 1.0

    def above(count: int) -> float:
        return -float(betainc(count / effect, size - count / effect + 1, share)) if count else -1.0

    return (
        bisect_left(range(n + 1), True, key=lambda count: below(count) > alpha / 2) - 1,
        bisect_left(range(n + 1), -alpha / 2, key=above),
    )


def percentile_intervals(
    samples: Sequence[LatencySample], permilles: Sequence[int], effect: float
) -> list[tuple[float | None, float | None]]:
    """The interval of each percentile: for which bounds `decide` neither passes nor fails. None: no bound on that side.

    A bound b at or above the second value passes (with MIN_REQUESTS), one below the first fails. Failed requests miss
    every bound; if they alone fail the check (`failures_decide`), the first value is None, too.
    """
    states, values = (
        np.concatenate(parts) for parts in zip(*((sample.state, sample.value_s) for sample in samples), strict=True)
    )
    n = len(states)
    at_best, at_worst = map(np.sort, _ends(states, values))
    intervals = []
    for permille in permilles:
        fails, passes = _counts_outside(n, permille / 1000, effect, SLO_ALPHA)
        best = float(at_best[fails]) if fails >= 0 else 0.0
        worst = float(at_worst[passes - 1]) if 0 < passes <= n else math.inf
        intervals.append((best if 0 < best < math.inf else None, worst if math.isfinite(worst) else None))
    return intervals


class Draws(NamedTuple):
    """A value as its effective requests could have shown it, at the same levels in rising order: the ends of DRAWS.

    0 and infinity: no bound, or a failed request. `low` counts unknown requests as met, `high` as missed.
    """

    low: Floats
    high: Floats


def percentile_draws(samples: Sequence[LatencySample], permille: int, effect: float) -> Draws:
    """Resample a percentile in blocks of dependent requests: n / effect of them are drawn.

    The number of requests up to the true percentile is then binomial, so its distribution is inverted instead of
    drawing from it. Against an exact value the interval is that of `percentile_intervals`.
    """
    from scipy.special import betainc

    states, values = (
        np.concatenate(p) for p in zip(*((sample.state, sample.value_s) for sample in samples), strict=True)
    )
    n, share, levels = len(states), permille / 1000, _levels()
    at_best, at_worst = _ends(states, values)
    counts, size = np.arange(n) / effect, n / effect
    below = 1 - betainc(counts + 1, size - counts, share)  # so many or fewer are up to the percentile
    above = betainc(counts + 1 / effect, size - counts - 1 / effect + 1, share)  # more are
    low = np.concatenate([[0.0], np.sort(at_best)])[np.searchsorted(below, levels)]
    high = np.concatenate([np.sort(at_worst), [math.inf]])[np.searchsorted(1 - above, levels)]
    return Draws(low, high)


def share_draws(met: int, unknown: int, n: int, effect: float) -> Draws:
    """The same of a share, `met` of n requests and perhaps the unknown ones, too: see `share_interval`."""
    from scipy.special import betaincinv

    size, least, most, levels = n / effect, met / effect, (met + unknown) / effect, _levels()
    low = betaincinv(least, size - least + 1, levels) if met else np.zeros(DRAWS)
    high = betaincinv(most + 1, size - most, levels) if met + unknown < n else np.ones(DRAWS)
    return Draws(low, high)


def ratio_interval(side: Draws, base: Draws, alpha: float = ALPHA) -> tuple[float | None, float | None]:
    """The interval of the ratio of two independent values, by quantiles of its resampled logarithms. The seed is fixed.

    None: no bound on that side.
    """
    order = np.random.default_rng(0).permutation(DRAWS)
    with np.errstate(divide="ignore", invalid="ignore"):  # two failed requests have no ratio
        low = np.log(side.low) - np.log(base.high)[order]
        high = np.log(side.high) - np.log(base.low)[order]
    low, high = np.sort(np.where(np.isnan(low), -math.inf, low)), np.sort(np.where(np.isnan(high), math.inf, high))
    ends = math.exp(low[math.floor(alpha / 2 * DRAWS)]), math.exp(high[math.ceil((1 - alpha / 2) * DRAWS) - 1])
    return ends[0] if 0 < ends[0] < math.inf else None, ends[1] if math.isfinite(ends[1]) else None


def _levels() -> Floats:
    return (np.arange(DRAWS) + 0.5) / DRAWS


def _ends(states: NDArray[np.int8], values: Floats) -> tuple[Floats, Floats]:
    """The latencies with unknown requests as met, and as missed: zero and infinity where there is no value."""
    at_best = np.where(states == OBSERVED, values, np.where(states == FAILED, math.inf, 0.0))
    cut = states == AT_LEAST
    at_best[cut] = np.nextafter(values[cut], math.inf)  # a bound that equals the age is missed
    return at_best, np.where((states == OBSERVED) | (states == AT_MOST), values, math.inf)


def failures_decide(failed: int, n: int, share: float, effect: float) -> bool:
    """Whether so many of n requests failed that a share of them is within no bound."""
    return decide(0, n - failed, n, share, effect) == "fail"


def decide(met: int, unknown: int, n: int, share: float, effect: float, alpha: float = SLO_ALPHA) -> Decision:
    """Whether at least `share` (0 to 1) of n requests are within a bound: both with the unknown ones met and missed."""
    fails, passes = interval_counts(n, share, effect, alpha)
    if met >= passes:
        return "pass"
    return "fail" if met + unknown <= fails else "inconclusive"


# Far below and far above a bound.


def log_spread(samples: Sequence[LatencySample]) -> LogSpread | None:
    """What `far_bounds` needs of a latency; None without a positive value.

    A latency that is at most a value counts as that value: if the values are far below a bound, so are the latencies.
    A zero is a latency that a request does not have, or that its clock does not show.
    """
    if not samples:
        return None
    states, values = (
        np.concatenate(p) for p in zip(*((sample.state, sample.value_s) for sample in samples), strict=True)
    )
    finite = ((states == OBSERVED) | (states == AT_MOST)) & np.isfinite(values)
    valued = values[finite & (values > 0)]
    if not len(valued):
        return None
    logs, ages = np.log(valued), values[states == AT_LEAST]
    may_be_zero = bool(((states == UNKNOWN) | (states == AT_MOST)).any() or (values[finite] <= 0).any())
    return LogSpread(
        n=len(valued),
        mean=float(logs.mean()),
        sd=float(logs.std(ddof=1)) if len(logs) > 1 else 0.0,
        min=None if may_be_zero else float(min(valued.min(), ages.min(initial=math.inf))),
        max=None if (states == FAILED).any() else float(max(valued.max(), ages.max(initial=0.0))),
        open=int((~finite & (states != FAILED)).sum()),
    )


def far_bounds(spread: LogSpread | None, share: float, effect: float) -> tuple[float | None, float | None]:
    """Bounds below the first are missed, and those from the second on met, by far more than `share` of the requests.

    None: no bound is. All requests that have a value are on one side, at some distance (FAR_REQUESTS), and so is the
    tolerance limit of their logarithms, FAR_FACTOR times as far away as that of a normal distribution. Requests that
    were cut or are unknown must not matter: they may all be misses, and still no more than the share allows (MAX_OPEN).
    """
    if spread is None or spread.n < FAR_EFFECTIVE * effect or not _can_all_be_missed(spread, share):
        return None, None
    factor = next((factor for n, factor in FAR_REQUESTS if spread.n >= n * _far_scale(share)), None)
    if factor is None:
        return None, None
    reach = FAR_FACTOR * tolerance_factor(share, spread.n / effect) * spread.sd
    below = None if spread.max is None else max(spread.max * factor, math.exp(spread.mean + reach))
    above = None if spread.min is None else min(spread.min / factor, math.exp(spread.mean - reach))
    return above, below


def _can_all_be_missed(spread: LogSpread, share: float) -> bool:
    """Whether requests that were cut or are unknown do not matter: so few that the share allows to miss all of them."""
    return spread.open <= min(1 - share, MAX_OPEN) * (spread.n + spread.open)


def far_decision(spread: LogSpread | None, share: float, effect: float, bound: float) -> Decision | None:
    """Whether all requests are far below a bound (`pass`) or far above it (`fail`); None: neither."""
    above, below = far_bounds(spread, share, effect)
    if below is not None and bound >= below:
        return "pass"
    return "fail" if above is not None and bound < above else None


def _far_scale(share: float) -> float:
    """A share above 95 % needs more requests: a slow mode of just too many of them would remain unseen in as few."""
    return max(1.0, 0.05 / (1 - share))


def fewest_to_be_far(share: float, effect: float) -> int:
    """The fewest requests that can show that a bound is far away from all of them."""
    return math.ceil(max(min(n for n, _ in FAR_REQUESTS) * _far_scale(share) - 1e-9, FAR_EFFECTIVE * effect))


def tolerance_factor(share: float, n: float) -> float:
    """So many standard deviations above the mean of n normal values is at least `share` of all, with 95 % confidence.

    Natrella's approximation (Experimental Statistics, 1963), which is within 2 % from 8 values on.
    """
    at_share, at_confidence = NormalDist().inv_cdf(share), NormalDist().inv_cdf(0.95)
    a = 1 - at_confidence**2 / (2 * (n - 1))
    b = at_share**2 - at_confidence**2 / n
    return (at_share + math.sqrt(at_share**2 - a * b)) / a


def requests_to_be_far(spread: LogSpread | None, share: float, effect: float, bound: float) -> int | None:
    """About how many requests decide that a bound is far above all of them, if they go on like that. None: none do."""
    if spread is None or spread.max is None or not 0 < bound < math.inf:
        return None
    needed = min((n * _far_scale(share) for n, factor in FAR_REQUESTS if spread.max * factor <= bound), default=None)
    if needed is None or not _can_all_be_missed(spread, share):
        return None
    needed = math.ceil(max(needed, FAR_EFFECTIVE * effect))
    distance, sd = math.log(bound) - spread.mean, spread.sd
    sizes = range(needed, MAX_REQUESTS + 1)
    index = bisect_left(sizes, True, key=lambda n: FAR_FACTOR * tolerance_factor(share, n / effect) * sd <= distance)
    return sizes[index] if index < len(sizes) else None


class ShareDecision(NamedTuple):
    """Whether a share of the requests is within a bound, and what that rests on."""

    decision: Decision
    met: int
    unknown: int  # cut before they missed the bound, or without a known latency
    n: int  # all requests, failed and unknown ones included
    effect: float  # so many dependent requests count as one
    interval: tuple[float, float]  # of the share: its lower end with unknown ones as missed, its upper end as met
    far: bool  # the requests are so far from the bound that this decides, although the interval does not
    needed: int | None  # about so many requests decide. None: decided, too close to the bound, or unknown ones decide


def decide_share(
    samples: Sequence[LatencySample],
    share: float,
    *,
    bound: float = 1.0,
    answer_s: float | None = None,
    in_flight: float | None = None,
    alpha: float = SLO_ALPHA,
) -> ShareDecision:
    """Decide whether at least `share` (0 to 1) of all such requests are within a bound. `samples`: one a repeat.

    `bound`: in the unit of the samples. `answer_s` and `in_flight`: see `design_effect`. `alpha`: half of it is the
    probability of a wrong decision on each side.
    """
    counts = [_counts_at(sample, bound) for sample in samples]
    met, unknown, n = (sum(numbers) for numbers in zip((0, 0, 0), *counts, strict=True))
    effect = design_effect(samples, answer_s, in_flight).effect
    spread, decision = log_spread(samples), decide(met, unknown, n, share, effect, alpha)
    interval = (0.0, 1.0)
    if n:
        interval = share_interval(met, n, effect, alpha)[0], share_interval(met + unknown, n, effect, alpha)[1]
    if decision != "inconclusive":
        return ShareDecision(decision, met, unknown, n, effect, interval, False, None)
    if (far := far_decision(spread, share, effect, bound)) is not None:
        return ShareDecision(far, met, unknown, n, effect, interval, True, None)
    needed = requests_to_settle(met, unknown, n, share, effect, spread, bound)
    return ShareDecision(decision, met, unknown, n, effect, interval, False, needed)


def _counts_at(sample: LatencySample, bound: float) -> tuple[int, int, int]:
    """The numbers of requests within a bound, of those of which it is not known, and of all."""
    state, value = sample.state, sample.value_s
    met = ((state == OBSERVED) | (state == AT_MOST)) & (value <= bound)
    missed = (state == FAILED) | ((state == OBSERVED) & ~met) | ((state == AT_LEAST) & (value >= bound))
    return int(met.sum()), int((~met & ~missed).sum()), len(state)


def requests_to_settle(
    met: float, unknown: float, n: int, share: float, effect: float, spread: LogSpread | None, bound: float
) -> int | None:
    """About how many requests decide, if they go on like these `n`: by their share, or because the bound is far away.

    None: it is too close to the bound, or unknown requests decide.
    """
    if not n or (unknown and met <= share * n <= met + unknown):
        return None
    by_share = requests_to_decide(share, (met if met > share * n else met + unknown) / n, effect)
    by_distance = requests_to_be_far(spread, share, effect, bound)
    return min((requests for requests in (by_share, by_distance) if requests is not None), default=None)


def requests_to_decide(share: float, seen: float, effect: float = 1.0) -> int | None:
    """About how many requests decide with POWER whether a share exceeds `share`, if the true share is `seen`.

    None: more than MAX_REQUESTS.
    """
    from scipy.special import bdtr

    sizes = range(1, MAX_REQUESTS + 1)
    if seen > 1 - 1e-9:  # all of them: the fewest that pass
        index = bisect_left(sizes, True, key=lambda n: interval_counts(n, share, effect)[1] <= n)
        return sizes[index] if index < len(sizes) else None
    fewest = MIN_REQUESTS if seen > share else 1
    if seen < share:
        share, seen = 1 - share, 1 - seen

    def power(n: int) -> float:
        return 1 - float(bdtr(_counts_outside(n, share, 1.0, SLO_ALPHA)[1] - 1, n, seen))

    index = bisect_left(sizes, POWER, key=power) if seen > share else len(sizes)
    needed = None if index >= len(sizes) else max(fewest, math.ceil(sizes[index] * effect))
    return None if needed is None or needed > MAX_REQUESTS else needed
