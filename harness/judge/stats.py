"""The statistics behind percentiles, verdicts and histories, each with the rule it follows.

Apache Otava is not used for change points: 0.8 requires exactly numpy 2.2.0 and installs BigQuery, gRPC and Slack
clients, and its tests are not corrected for the number of places and series (4 to 6 % false alarms for each series of
60 runs).
"""

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.summary import ALPHA, MARGIN, MAX_REPEATS, POWER

Array = NDArray[np.float64]

MAX_ASSIGNMENTS = 200_000  # ten against ten is the most that is enumerated
_ASKED = POWER + 0.02  # the permutation test finds a little less than Student's t, by which this is computed
MAX_REQUESTS = 100_000  # beyond which no number of requests is suggested
_DRAWS = 100_000
MIN_LEVEL = 3  # runs that a level has at least: fewer are outliers, or too new to decide
MIN_HISTORY = 5  # runs with which the gate decides
LEVEL_ALPHA = 0.01  # of change points: a false one would give the gate a base of extreme runs
OUTLIER_ALPHA = 0.001  # small, since residuals from a median have wider tails than the test assumes
GATED_RUNS = 60  # of which all gates together raise a false alarm in at most ALPHA of the histories
WINDOWS = (1, 2, 3)  # newest runs that the gate compares, together, with those before
DETECTED = 0.10  # the slowdown that a history must be long enough to find: so much more time
_BAND = math.log1p(MARGIN)

Word = Literal["slower", "faster", "no_shift", "inconclusive"]


def samples_needed(permille: int) -> int:
    """How many samples bound a percentile from above: the least n at which, at a confidence of 99 %, at least two of
    them lie beyond the true value, p^n + n (1 - p) p^(n - 1) <= 0.01 with p = permille / 1000.

    11 for p50, 64 for p90, 130 for p95, 662 for p99, 6636 for p99.9. It is the rule of MLPerf's early
    stopping with one sample beyond the bound allowed.
    """
    p = permille / 1000
    n = 1
    while p**n + n * (1 - p) * p ** (n - 1) > 0.01:
        n += 1
    return n


def percentile(ordered: Array, permille: int) -> float:
    """The exact percentile of sorted values: the least of them that at least so many per mille do not exceed."""
    rank = -(-len(ordered) * permille // 1000)
    return float(ordered[max(rank, 1) - 1])


@functools.lru_cache(maxsize=4096)
def order_statistics(n: int, share: float) -> tuple[int, int]:
    """The ranks (1 to n) of the 95 % interval of a quantile among n sorted values, exact by the binomial distribution.

    The value at each rank misses the true quantile on its side with a probability of at most 2.5 %. 0 and n + 1: the
    sample is too small for a bound on that side.
    """
    from scipy.special import bdtr

    def at_most(count: int) -> float:
        return float(bdtr(count, n, share))

    return (
        bisect.bisect_right(range(n), ALPHA / 2, key=at_most),
        bisect.bisect_left(range(n), 1 - ALPHA / 2, key=at_most) + 1,
    )


def percentile_interval(ordered: Array, permille: int) -> tuple[float | None, float | None]:
    """The 95 % interval of a percentile of sorted, independent values. None: the sample gives no bound on that side."""
    low, high = order_statistics(len(ordered), permille / 1000)
    return (
        float(ordered[low - 1]) if low >= 1 else None,
        float(ordered[high - 1]) if high <= len(ordered) else None,
    )


def share_interval(count: int, n: int) -> tuple[float, float]:
    """The exact 95 % interval of a share (Clopper-Pearson) of which `count` of n independent values are seen."""
    from scipy.special import betaincinv

    low = float(betaincinv(count, n - count + 1, ALPHA / 2)) if count else 0.0
    high = float(betaincinv(count + 1, n - count, 1 - ALPHA / 2)) if count < n else 1.0
    return low, high


def requests_to_decide(bound: float, seen: float) -> int | None:
    """About how many requests decide whether a share exceeds `bound` with POWER, if the true share is `seen`.

    A percentile check is the same question: whether more than 95 % of all requests meet the bound of a p95. None: more
    than MAX_REQUESTS.
    """
    from scipy.special import bdtr

    if seen < bound:
        bound, seen = 1 - bound, 1 - seen

    def power(n: int) -> float:
        return 1 - float(bdtr(order_statistics(n, bound)[1] - 1, n, seen))

    sizes = range(1, MAX_REQUESTS + 1)
    found = bisect.bisect_left(sizes, POWER, key=power) if seen > bound else len(sizes)
    return sizes[found] if found < len(sizes) else None


class Estimate(NamedTuple):
    """A positive value with its 95 % interval. None: no bound on that side."""

    value: float
    low: float | None
    high: float | None


def ratio_of(side: Estimate, base: Estimate) -> Estimate:
    """The ratio of two independent values with its interval: the two intervals joined on logarithms (MOVER, Zou and
    Donner 2008)."""
    below, above = _log_distances(side)
    base_below, base_above = _log_distances(base)
    ratio = side.value / base.value
    down, up = math.hypot(below, base_above), math.hypot(above, base_below)
    return Estimate(
        ratio,
        ratio * math.exp(-down) if math.isfinite(down) else None,
        ratio * math.exp(up) if math.isfinite(up) else None,
    )


def growth_to_decide(seen: Estimate, bound: float) -> float | None:
    """About how many times as large a sample decides with POWER on which side of `bound` the value is.

    It assumes that value and spread stay as seen, and that the interval shrinks with the root of the sample. None: no
    sample does.
    """
    from scipy.special import ndtri

    distance = math.log(bound / seen.value) if bound > 0 else 0.0
    half = _log_distances(seen)[distance > 0]
    if not distance or math.isinf(half):
        return None
    return float((1 + ndtri(POWER) / ndtri(1 - ALPHA / 2)) * half / distance) ** 2


class Effect(NamedTuple):
    """The difference of two sides on logarithms, with its standard error and the degrees of freedom of that."""

    log: float
    error: float
    freedom: float

    @property
    def ratio(self) -> float:
        return math.exp(self.log)

    def interval(self, parts: int = 1) -> tuple[float, float]:
        """The 95 % interval of the ratio; of an analysis that has one of so many parts of ALPHA, a wider one."""
        half = self.half(parts)
        return math.exp(self.log - half), math.exp(self.log + half)

    def half(self, parts: int = 1) -> float:
        """Half of that interval of the logarithm, by Student's t."""
        return t_quantile(1 - ALPHA / 2 / parts, self.freedom) * self.error if self.error else 0.0

    def p(self) -> float:
        """Two-sided p-value of Student's t."""
        from scipy.special import stdtr

        if self.error == 0:
            return 1.0 if self.log == 0 else 0.0
        return 2 * float(stdtr(self.freedom, -abs(self.log) / self.error))


class Variation(NamedTuple):
    """How far equal runs differ on a machine: variances of logarithms, and the degrees of freedom of the first."""

    between_runs: float  # of runs with infinitely many repeats
    between_repeats: float
    freedom: int

    def of_run(self, repeats: float) -> float:
        """Variance of the value of a run of so many repeats."""
        return self.between_runs + self.between_repeats / repeats


def variation(runs: Sequence[Sequence[float]]) -> Variation | None:
    """The variation that equal runs show, each given by the values of its repeats. None for fewer than two runs.

    The variance between runs is that of the runs' means, less what the spread of their repeats explains.
    """
    if len(runs) < 2:
        return None
    freedom = sum(len(run) - 1 for run in runs)
    squares = sum(var_log(run) * (len(run) - 1) for run in runs if len(run) > 1)
    repeats = squares / freedom if freedom else 0.0
    explained = repeats * statistics.fmean(1 / len(run) for run in runs)
    between = max(0.0, statistics.variance([mean_log(run) for run in runs]) - explained)
    return Variation(between, repeats, len(runs) - 1)


def geometric_ratio(side: Sequence[float], base: Sequence[float]) -> float:
    """Geometric mean of `side` over that of `base`. All values must be positive."""
    return math.exp(mean_log(side) - mean_log(base))


def effect(side: Sequence[float], base: Sequence[float]) -> Effect | None:
    """Welch's comparison of two samples on logarithms. None with fewer than two values on a side."""
    if len(side) < 2 or len(base) < 2:
        return None
    return _welch(mean_log(side) - mean_log(base), var_log(side), len(side), var_log(base), len(base))


def effects_of_runs(side: Sequence[float], base: Sequence[float], variance: float, freedom: int) -> list[Effect]:
    """Two samples of runs on a machine whose variance between runs (of logarithms) is known from other runs, compared
    by that variance and, where they show one, by their own. Both must find a difference: what is known of other runs
    never makes an interval narrower than these runs do.
    """
    log = mean_log(side) - mean_log(base)
    share = 1 / len(side) + 1 / len(base)
    found = [Effect(log, math.sqrt(variance * share), freedom)]
    own = effect(side, base)
    if own is None and max(len(side), len(base)) > 1:
        several = max(side, base, key=len)
        own = Effect(log, math.sqrt(var_log(several) * share), len(several) - 1)
    return found if own is None else [*found, own]


def permutation_p(side: Sequence[float], base: Sequence[float]) -> float:
    """Two-sided permutation test of the difference of mean logarithms.

    Exact, over all assignments of the values to the two sides, up to MAX_ASSIGNMENTS of them; beyond that over
    a seeded random sample, counted so that p is never too small.
    """
    logs = np.log(np.concatenate([np.asarray(side, dtype=np.float64), np.asarray(base, dtype=np.float64)]))
    n, total = len(side), float(logs.sum())
    # The difference of means is a function of one side's sum; distances from its expectation are compared.
    expected = total * n / len(logs)
    seen = abs(float(logs[:n].sum()) - expected)
    exact = math.comb(len(logs), n) <= MAX_ASSIGNMENTS
    sums = logs[_assignments(n, len(logs))].sum(axis=1) if exact else _drawn_sums(logs, n)
    # Sums of the same values in another order differ in the last bits.
    extreme = int(np.count_nonzero(np.abs(sums - expected) >= seen - 1e-9 * max(seen, 1e-3)))
    return extreme / len(sums) if exact else (extreme + 1) / (len(sums) + 1)


def smallest_p(n: int, m: int) -> float:
    """The smallest p that `permutation_p` can give for n against m values: 5 and 5: 0.008, 3 and 3: 0.10."""
    assignments = math.comb(n + m, n)
    # Of equal sides every assignment has a mirror image that is as extreme.
    smallest = min(2 if n == m else 1, assignments) / assignments
    return smallest if assignments <= MAX_ASSIGNMENTS else max(smallest, 1 / (_DRAWS + 1))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's method, in the order given."""
    corrected = [0.0] * len(ps)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = largest
    return corrected


def repeats_to_reach_p(comparisons: int) -> int:
    """The least repeats a side with which a corrected p below ALPHA is possible at all; MAX_REPEATS + 1: none is."""
    tried = range(2, MAX_REPEATS + 1)
    return next((n for n in tried if smallest_p(n, n) * comparisons < ALPHA), MAX_REPEATS + 1)


def needed_to_settle(
    log: float,
    variances: tuple[float, float],
    known: int,
    comparisons: int,
    margin: float,
    freedom: int | None = None,
) -> int | None:
    """How many values a side settle the matter with a probability of POWER, if effect and spread are as seen.

    `log` is the effect and `variances` are those of both sides, on logarithms; the answer is larger than `known`.
    `freedom`: degrees with which the variance is known from elsewhere; then Student's t decides alone, else the
    permutation test as well. None: more than MAX_REPEATS.

    An effect beyond the margin is settled by a verdict of a difference: the test at the corrected level finds it,
    and the ratio is beyond the margin. A smaller one by an interval that fits within the margin.
    """
    band = math.log1p(margin)
    differs = abs(log) > band

    def settles(n: int) -> bool:
        # The permutation test has few possible p-values where there are few values; half the level leaves it room.
        if differs and freedom is None and smallest_p(n, n) * comparisons > ALPHA / 2:
            return False
        seen = _welch(abs(log), variances[0], n, variances[1], n)
        level = ALPHA / comparisons if differs else ALPHA
        return _power(seen._replace(freedom=seen.freedom + (freedom or 0)), level, band, differs=differs) >= _ASKED

    tried = range(max(known + 1, repeats_to_reach_p(1)), MAX_REPEATS + 1)
    place = bisect.bisect_left(tried, True, key=settles)
    return tried[place] if place < len(tried) else None


def _power(true: Effect, level: float, band: float, *, differs: bool) -> float:
    """The probability that an experiment with this true effect and error shows a difference, or else none.

    Exact but for the grid on which the error's own estimate, the root of a chi-squared variable, is integrated.
    """
    from scipy.special import chdtri, ndtr

    if true.error == 0:
        return 1.0
    shares = (np.arange(200) + 0.5) / 200
    estimated = true.error * (np.sqrt(chdtri(true.freedom, shares) / true.freedom) if true.freedom < 1e6 else 1.0)
    half = t_quantile(1 - level / 2, true.freedom) * estimated
    if differs:
        return float(np.mean(ndtr((true.log - np.maximum(half, band)) / true.error)))
    room = np.maximum(band - half, 0.0)
    return float(np.mean(ndtr((room - true.log) / true.error) - ndtr((-room - true.log) / true.error)))


def _log_distances(one: Estimate) -> tuple[float, float]:
    """How far the bounds are from the value, in logarithms; infinite where there is no bound."""
    return (
        math.log(one.value / one.low) if one.low else math.inf,
        math.log(one.high / one.value) if one.high is not None else math.inf,
    )


def detectable(variance: float, freedom: int) -> float:
    """The logarithm of the smallest ratio that one value against one finds with a probability of POWER, where the
    variance of such values is known with so many degrees of freedom.
    """
    return (t_quantile(1 - ALPHA / 2, freedom) + t_quantile(POWER, freedom)) * math.sqrt(2 * variance)


def mean_log(values: Sequence[float]) -> float:
    return statistics.fmean(map(math.log, values))


def var_log(values: Sequence[float]) -> float:
    """Variance of the logarithms; 0 for equal values, whose logarithms' mean may be off in the last bit."""
    if min(values) == max(values):
        return 0.0
    return statistics.variance([math.log(value) for value in values])


def _welch(log: float, var: float, n: int, base_var: float, m: int) -> Effect:
    """Welch's standard error and degrees of freedom for a difference of means."""
    a, b = var / n, base_var / m
    if a + b == 0:
        return Effect(log, 0.0, math.inf)
    return Effect(log, math.sqrt(a + b), (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1)))


def t_quantile(share: float, freedom: float) -> float:
    from scipy.special import stdtrit  # a tenth of a second that most commands need not pay

    return float(stdtrit(freedom, share))


@functools.lru_cache(maxsize=16)
def _assignments(n: int, total: int) -> NDArray[np.intp]:
    """All ways to choose n of `total` places, one a row."""
    count = math.comb(total, n)
    flat = itertools.chain.from_iterable(itertools.combinations(range(total), n))
    return np.fromiter(flat, dtype=np.intp, count=count * n).reshape(count, n)


def _drawn_sums(logs: Array, n: int) -> Array:
    dice = np.random.default_rng(20250917)
    sums = np.empty(_DRAWS)
    step = 10_000
    for start in range(0, _DRAWS, step):
        drawn = dice.permuted(np.tile(logs, (step, 1)), axis=1)[:, :n]
        sums[start : start + step] = drawn.sum(axis=1)
    return sums


class Levels(NamedTuple):
    """A series divided into levels. All numbers are places in the series."""

    starts: list[int]  # of each level, in order; all but the first are change points
    outliers: list[int]  # runs that no level includes
    undecided: list[int]  # newest runs that differ from the last level, fewer than MIN_LEVEL


class Shift(NamedTuple):
    """How the newest run differs from the runs before it. Ratios are of speed: above 1 is faster."""

    word: Word
    ratio: float | None  # of the newest `window` runs to the history; None without a history
    low: float | None  # the ratios that are expected of equal runs, at the level of the gate
    high: float | None
    p: float | None  # before correction
    window: int  # how many of the newest runs show the shift together; 1 where none do
    history: list[int]  # places of the runs that they are compared with
    detectable: float | None  # slowdown found within three runs with a probability of POWER
    needed: int | None  # runs of history that find DETECTED; None: more than MAX_REPEATS


def levels_of(speeds: Sequence[float], series: int = 1) -> Levels:
    """Divide a series of run-level speeds, oldest first, into levels between change points.

    Circular binary segmentation: of all stretches of neighbouring runs the one whose mean differs most from the mean
    of all others, by Student's t on logarithms, is cut out when its p-value, corrected for the number of stretches and
    of `series`, is below LEVEL_ALPHA and the difference exceeds MARGIN; then each part is divided in the same way.
    A stretch of fewer than MIN_LEVEL runs is no level: its runs are outliers, or undecided where they are the newest.
    Outliers that hide each other, or a step, by the variance that they add are taken out first.
    """
    logs = np.log(np.asarray(speeds, dtype=np.float64))
    count = len(logs)
    level = LEVEL_ALPHA / max(1, series * count * (count - 1) // 2)
    outliers = _outliers(logs, series)
    places = np.setdiff1d(np.arange(count), outliers)
    undecided: list[int] = []
    while True:
        cuts = _cuts(logs[places], level)
        edges = [0, *cuts, len(places)]
        short = next(((a, b) for a, b in zip(edges, edges[1:], strict=False) if b - a < MIN_LEVEL and cuts), None)
        if short is None:
            return Levels([int(places[cut]) for cut in edges[:-1]] if count else [], sorted(outliers), undecided)
        taken = [int(place) for place in places[short[0] : short[1]]]
        if short[1] == len(places):
            undecided = sorted(taken + undecided)
        else:
            outliers += taken
        places = np.delete(places, np.s_[short[0] : short[1]])


def gate(speeds: Sequence[float], series: int = 1) -> Shift:
    """Hold the newest of a series of run-level speeds, oldest first, against the level of those before it.

    The newest run, the newest two and the newest three together are each compared with the runs of their level before
    them: by Student's t on logarithms (of one run its prediction interval), and by MARGIN. The level is ALPHA,
    corrected for the three comparisons, for `series` and for GATED_RUNS gates.
    """
    count = len(speeds)
    found = levels_of(speeds, series)
    # A change point within the newest runs is what the gate is to report; what is before it is the history.
    start = max(start for start in found.starts if start == 0 or count - start > max(WINDOWS))
    kept = [place for place in range(start, count) if place not in found.outliers]
    logs = np.log(np.asarray(speeds, dtype=np.float64)[kept])
    level = ALPHA / (GATED_RUNS * len(WINDOWS) * series)
    known = [_shift_of(logs, kept, size, level) for size in WINDOWS if len(kept) - size >= MIN_HISTORY]
    if not known:
        ratio = math.exp(float(logs[-1] - logs[:-1].mean())) if len(logs) > 1 else None
        return Shift("inconclusive", ratio, None, None, None, 1, kept[:-1], None, MIN_HISTORY)
    shifted = [one for one in known if one.word in ("slower", "faster")]
    return min(shifted, key=lambda one: one.p or 0.0) if shifted else known[0]


def _shift_of(logs: Array, places: Sequence[int], window: int, level: float) -> Shift:
    """The newest runs of a level, so many together, against those before them."""
    new, old = logs[-window:], logs[:-window]
    freedom = len(logs) - 2
    squares = sum(float(((one - one.mean()) ** 2).sum()) for one in (new, old))
    error = math.sqrt(max(squares, 1e-12) / freedom * (1 / window + 1 / len(old)))  # equal values have no spread
    difference = float(new.mean() - old.mean())
    band = max(t_quantile(1 - level / 2, freedom) * error, _BAND)
    deviation = float(old.std(ddof=1))
    detectable = _detectable_shift(deviation, len(old), level)
    sizes = range(MIN_HISTORY, MAX_REPEATS + 1)
    word: Word = "no_shift" if detectable <= DETECTED else "inconclusive"
    if abs(difference) > band:
        word = "slower" if difference < 0 else "faster"
    return Shift(
        word=word,
        ratio=math.exp(difference),
        low=math.exp(-band),
        high=math.exp(band),
        p=Effect(difference, error, freedom).p(),
        window=window,
        history=list(places[:-window]),
        detectable=detectable,
        needed=next((n for n in sizes if _detectable_shift(deviation, n, level) <= DETECTED), None),
    )


def _outliers(logs: Array, series: int) -> list[int]:
    """Runs that differ from the running median, by Rosner's test for several outliers (generalized ESD).

    A median of 5 follows every stretch of MIN_LEVEL runs, so that steps have none. The two runs at each end have no
    such median and are not tested.
    """
    reach = MIN_LEVEL - 1
    if len(logs) < 4 * MIN_LEVEL:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(logs, 2 * reach + 1)
    residuals = logs[reach:-reach] - np.median(windows, axis=1)
    left, taken, found = list(range(len(residuals))), [], 0
    for _ in range(len(residuals) // 5):
        values = residuals[left]
        farthest = int(np.argmax(np.abs(values - values.mean())))
        distance, deviation = abs(float(values[farthest] - values.mean())), max(float(values.std(ddof=1)), 1e-9)
        t = t_quantile(1 - OUTLIER_ALPHA / (series * len(left)) / 2, len(left) - 2)
        taken.append(left.pop(farthest))
        limit = t * (len(values) - 1) / math.sqrt((len(values) - 2 + t**2) * len(values))
        if distance / deviation > limit and abs(residuals[taken[-1]]) > _BAND:
            found = len(taken)
    return [place + reach for place in taken[:found]]


def _cuts(logs: Array, level: float) -> list[int]:
    """Where a stretch is divided, recursively."""
    stretch = _stretch(logs, level)
    if stretch is None:
        return []
    edges = [edge for edge in stretch if 0 < edge < len(logs)]
    parts = zip([0, *edges], [*edges, len(logs)], strict=True)
    return sorted({*edges, *(start + cut for start, end in parts for cut in _cuts(logs[start:end], level))})


def _stretch(logs: Array, level: float) -> tuple[int, int] | None:
    """The stretch (start, end) that differs most from all other values; None where none differs at this level."""
    count = len(logs)
    if count < 2 * MIN_LEVEL:
        return None
    values = logs - logs.mean()
    sums = np.concatenate([[0.0], np.cumsum(values)])
    starts, ends = np.triu_indices(count + 1, 1)
    starts, ends = (edges[ends - starts < count] for edges in (starts, ends))
    inside = ends - starts
    outside = count - inside
    within = sums[ends] - sums[starts]
    differences = within / inside + within / outside  # the values add up to zero
    squares = float(values @ values) - within**2 * (1 / inside + 1 / outside)
    variance = np.maximum(squares, 1e-12) / (count - 2)  # equal values have none but for the last bits
    t = np.abs(differences) / np.sqrt(variance * (1 / inside + 1 / outside))
    t[np.abs(differences) <= _BAND] = 0
    best = int(np.argmax(t))
    return None if t[best] <= t_quantile(1 - level / 2, count - 2) else (int(starts[best]), int(ends[best]))


def _detectable_shift(deviation: float, runs: int, level: float) -> float:
    """The slowdown that three runs after so many show with a probability of POWER."""
    longest = max(WINDOWS)
    freedom = runs + longest - 2
    error = deviation * math.sqrt(1 / longest + 1 / runs)
    return max(MARGIN, math.expm1((t_quantile(1 - level / 2, freedom) + t_quantile(POWER, freedom)) * error))
