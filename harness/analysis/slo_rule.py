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
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.base.summary import ALPHA, POWER
from harness.records.records import AT_LEAST, AT_MOST, FAILED, OBSERVED, UNKNOWN

BLOCK_ANSWER_TIMES = 5.0  # a block is at least this long, so that blocks hardly depend on each other
MIN_BLOCKS = 8  # with fewer blocks the effect is assumed
MAX_BLOCKS = 32
TAILS = (0.9, 0.95)
ASSUMED_EFFECT = 10.0
DRAWS = 4000  # of a ratio
MAX_REQUESTS = 100_000  # no larger number of requests is suggested
_MAX_CORRELATION = 0.99  # of neighbouring requests: an effect of 199

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


class DesignEffect(NamedTuple):
    """How many dependent requests count as one."""

    effect: float  # at least 1
    freedom: float  # degrees of freedom of the estimate; infinite where the effect is assumed
    blocks: int  # of all repeats

    def inflation(self, alpha: float = ALPHA) -> float:
        """The effect for intervals at this level: an estimate from few blocks widens them by Student's t."""
        if math.isinf(self.freedom):
            return self.effect
        from scipy.special import ndtri, stdtrit

        return self.effect * float(stdtrit(self.freedom, 1 - alpha / 2) / ndtri(1 - alpha / 2)) ** 2


class KnownPercentile(NamedTuple):
    """A Kaplan-Meier percentile. Exactly one field is set: where it is not reached, it is larger than `above_s`."""

    value_s: float | None
    above_s: float | None


def percentiles(samples: Sequence[LatencySample], permilles: Sequence[int]) -> list[KnownPercentile]:
    """The Kaplan-Meier percentiles of all repeats together. Raises ValueError without an observed or censored value.

    Without censored requests they are the exact percentiles: the smallest value that at least so many per mille do not
    exceed.
    """
    largest = max(float(values.max()) for one in samples if len(values := one.of_state(OBSERVED, AT_LEAST)))
    times, shares = kaplan_meier(samples)
    found = []
    for permille in permilles:
        index = int(np.searchsorted(shares, permille / 1000 - 1e-12))
        is_reached = index < len(times)
        found.append(KnownPercentile(float(times[index]) if is_reached else None, None if is_reached else largest))
    return found


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


def design_effect(samples: Sequence[LatencySample], answer_s: float | None) -> DesignEffect:
    """Estimate the design effect from the ranks of a latency in the order of sending, one sample a repeat.

    It is the largest of these ratios to independent requests: the variance of the means of blocks, of the ranks and of
    being among the slowest (TAILS), because a queue makes the slow ones neighbours; the variance of the means of
    repeats; and what follows from the correlation of neighbours, which short blocks underestimate.
    `answer_s`: the mean time of an answer; a block is at least BLOCK_ANSWER_TIMES as long. With fewer than MIN_BLOCKS
    blocks the effect is ASSUMED_EFFECT or the estimate, whichever is larger.
    """
    repeats = _ranks_in_order(samples)
    n = sum(map(len, repeats))
    everything = np.concatenate(repeats) if n else np.empty(0)
    variance = float(everything.var()) if n else 0.0
    sizes = [_block_requests(one.sent_s, len(ranks), answer_s) for one, ranks in zip(samples, repeats, strict=True)]
    counts = [len(ranks) // size for ranks, size in zip(repeats, sizes, strict=True)]
    blocks, freedom = sum(counts), sum(count - 1 for count in counts if count >= 2)
    effect = 1.0
    if variance > 1e-12:
        among_slowest = [[(ranks > tail).astype(np.float64) for ranks in repeats] for tail in TAILS]
        within = max(_block_effect(values, sizes) for values in (repeats, *among_slowest))
        effect = max(effect, within, _correlation_effect(repeats), _between_effect(repeats) / variance)
    if blocks < MIN_BLOCKS or not freedom:
        return DesignEffect(max(effect, ASSUMED_EFFECT), math.inf, blocks)
    return DesignEffect(effect, freedom, blocks)


def _block_effect(repeats: Sequence[Floats], sizes: Sequence[int]) -> float:
    """The variance of the means of blocks within repeats, relative to that of independent values."""
    variance = float(np.concatenate(repeats).var())
    squares, freedom = 0.0, 0
    for values, size in zip(repeats, sizes, strict=True):
        count = len(values) // size
        if count >= 2:
            means = values[: count * size].reshape(count, size).mean(axis=1)
            squares += size * float(((means - means.mean()) ** 2).sum())
            freedom += count - 1
    return squares / freedom / variance if freedom and variance > 1e-12 else 1.0


def _ranks_in_order(samples: Sequence[LatencySample]) -> list[Floats]:
    """The ranks (0 to 1) of all repeats together, in the order of sending; ties have the same rank.

    A failed request ranks last, a cut one by its age. Unknown ones have no rank.
    """
    ordered = []
    for sample in samples:
        known = sample.state != UNKNOWN
        order = np.argsort(sample.sent_s[known], kind="stable")
        values = np.where(sample.state[known] == FAILED, np.inf, sample.value_s[known])
        ordered.append(values[order])
    if not any(map(len, ordered)):
        return ordered
    _, place, counts = np.unique(np.concatenate(ordered), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[place.ravel()] / counts.sum()
    ends = np.cumsum([len(values) for values in ordered])[:-1]
    return list(np.split(ranks, ends))


def _block_requests(sent_s: Floats, n: int, answer_s: float | None) -> int:
    """The number of requests in a block."""
    size = max(math.ceil(BLOCK_ANSWER_TIMES), -(-n // MAX_BLOCKS))
    span_s = float(sent_s.max() - sent_s.min()) if n else 0.0
    if answer_s and n > 1:
        answers = n if span_s <= 0 else min(n, math.ceil(BLOCK_ANSWER_TIMES * answer_s * (n - 1) / span_s))
        size = max(size, answers)
    return size


def _correlation_effect(repeats: Sequence[Floats]) -> float:
    """The effect of an autoregressive series with the correlation of neighbouring ranks, corrected for its bias."""
    centered = [ranks - ranks.mean() for ranks in repeats if len(ranks) > 1]
    # Sums of products, because `@` would start threads.
    squares = sum(float((ranks * ranks).sum()) for ranks in centered)
    if squares <= 0:
        return 1.0
    n = sum(map(len, centered))
    correlation = sum(float((ranks[1:] * ranks[:-1]).sum()) for ranks in centered) / squares
    correlation = min(max(correlation + (1 + 3 * correlation) / n, 0.0), _MAX_CORRELATION)
    return (1 + correlation) / (1 - correlation)


def _between_effect(repeats: Sequence[Floats]) -> float:
    """The mean square between repeats; 0 for one repeat."""
    parts = [ranks for ranks in repeats if len(ranks)]
    if len(parts) < 2:
        return 0.0
    mean = np.concatenate(parts).mean()
    return sum(len(ranks) * float(ranks.mean() - mean) ** 2 for ranks in parts) / (len(parts) - 1)


def share_interval(met: float, n: int, effect: float, alpha: float = ALPHA) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share, `met` of n requests, with n / effect effective requests."""
    from scipy.special import betaincinv

    size, count = n / effect, met / effect
    low = float(betaincinv(count, size - count + 1, alpha / 2)) if count > 0 else 0.0
    high = float(betaincinv(count + 1, size - count, 1 - alpha / 2)) if count < size else 1.0
    return low, high


def interval_counts(n: int, share: float, effect: float, alpha: float = ALPHA) -> tuple[int, int]:
    """The numbers of met requests that decide: so many or fewer fail, so many or more pass. -1 and n + 1: none do."""
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

    A bound b at or above the second value passes, one below the first fails. Failed requests miss every bound; if they
    alone fail the check (`failures_decide`), the first value is None, too.
    """
    states, values = (
        np.concatenate(parts) for parts in zip(*((one.state, one.value_s) for one in samples), strict=True)
    )
    n = len(states)
    at_best, at_worst = map(np.sort, _ends(states, values))
    found = []
    for permille in permilles:
        fails, passes = interval_counts(n, permille / 1000, effect)
        best = float(at_best[fails]) if fails >= 0 else 0.0
        worst = float(at_worst[passes - 1]) if 0 < passes <= n else math.inf
        found.append((best if 0 < best < math.inf else None, worst if math.isfinite(worst) else None))
    return found


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

    states, values = (np.concatenate(p) for p in zip(*((one.state, one.value_s) for one in samples), strict=True))
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


def decide(met: int, unknown: int, n: int, share: float, effect: float, alpha: float = ALPHA) -> Decision:
    """Whether at least `share` (0 to 1) of n requests are within a bound: both with the unknown ones met and missed."""
    fails, passes = interval_counts(n, share, effect, alpha)
    if met >= passes:
        return "pass"
    return "fail" if met + unknown <= fails else "inconclusive"


def requests_to_decide(share: float, seen: float, effect: float = 1.0) -> int | None:
    """About how many requests decide with POWER whether a share exceeds `share`, if the true share is `seen`.

    None: more than MAX_REQUESTS.
    """
    from scipy.special import bdtr

    if seen < share:
        share, seen = 1 - share, 1 - seen

    def power(n: int) -> float:
        return 1 - float(bdtr(interval_counts(n, share, 1.0)[1] - 1, n, seen))

    sizes = range(1, MAX_REQUESTS + 1)
    index = bisect_left(sizes, POWER, key=power) if seen > share else len(sizes)
    needed = None if index >= len(sizes) else math.ceil(sizes[index] * effect)
    return None if needed is None or needed > MAX_REQUESTS else needed
