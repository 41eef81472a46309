"""Statistics of percentiles, verdicts and histories. Each function names the rule that it follows.

Apache Otava is not used for change points: 0.8 requires exactly numpy 2.2.0 and installs BigQuery, gRPC and Slack
clients, and it does not correct for the number of places and series (4 to 6 % false alarms for each series of 60 runs).
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.numbers.comparison import ALPHA, MARGIN, MAX_REPEATS, POWER

Array = NDArray[np.float64]

ASSUMED_SD = 0.04  # of the logarithm of equal runs of a machine, until its runs show how far they differ;
ASSUMED_FREEDOM = 4  # it counts as much as so many degrees of freedom
MIN_LEVEL = 3  # runs of a level; fewer are outliers, or too new to decide
MIN_HISTORY = 5  # runs that the gate needs before the newest ones
LEVEL_ALPHA = 0.01  # of change points: a false one would leave the gate a history of extreme runs
OUTLIER_ALPHA = 0.001  # small, because residuals from a median have wider tails than the test assumes
GATES_PER_HISTORY = 60  # after so many gates at most ALPHA of the histories have had a false alarm
WINDOWS = (1, 2, 3)  # numbers of newest runs that the gate compares with the runs before
DETECTED = 0.10  # the slowdown that a history should be long enough to find
_LOG_MARGIN = math.log1p(MARGIN)

Word = Literal["slower", "faster", "no_shift", "inconclusive"]


def samples_needed(permille: int) -> int:
    """The number of samples that a percentile needs: the smallest n of which, with 99 % confidence, at least two are
    above the true value, p^n + n (1 - p) p^(n - 1) <= 0.01 with p = permille / 1000.

    11 for p50, 64 for p90, 130 for p95, 662 for p99, 6636 for p99.9. This is MLPerf's rule for early stopping with one
    sample above the bound.
    """
    p = permille / 1000
    n = 1
    while p**n + n * (1 - p) * p ** (n - 1) > 0.01:
        n += 1
    return n


def percentile(ordered: Array, permille: int) -> float:
    """The exact percentile of sorted values: the smallest one that at least so many per mille do not exceed."""
    rank = -(-len(ordered) * permille // 1000)
    return float(ordered[max(rank, 1) - 1])


class Estimate(NamedTuple):
    """A positive value with its 95 % interval. None: the interval has no bound on that side."""

    value: float
    low: float | None
    high: float | None


def _log_distances(estimate: Estimate) -> tuple[float, float]:
    """The distances of the lower and upper bound from the value, in logarithms; infinite where there is no bound."""
    return (
        math.log(estimate.value / estimate.low) if estimate.low else math.inf,
        math.log(estimate.high / estimate.value) if estimate.high is not None else math.inf,
    )


def growth_to_decide(seen: Estimate, bound: float) -> float | None:
    """About how many times as large a sample decides with POWER on which side of `bound` the value is.

    It assumes the same value and spread, and an interval that shrinks with the root of the sample size. None: no sample
    decides it.
    """
    from scipy.special import ndtri

    distance = math.log(bound / seen.value) if bound > 0 else 0.0
    half_width = _log_distances(seen)[distance > 0]
    if not distance or math.isinf(half_width):
        return None
    return float((1 + ndtri(POWER) / ndtri(1 - ALPHA / 2)) * half_width / distance) ** 2


class Effect(NamedTuple):
    """The ratio of two sides as a logarithm, with its standard error."""

    log_ratio: float
    error: float
    freedom: float  # degrees of freedom of the error

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the ratio."""
        half_width = self.half_width()
        return math.exp(self.log_ratio - half_width), math.exp(self.log_ratio + half_width)

    def half_width(self) -> float:
        """Half the width of the interval of the logarithm, by Student's t."""
        return t_quantile(1 - ALPHA / 2, self.freedom) * self.error if self.error else 0.0

    def p_value(self) -> float:
        """Two-sided p-value of Student's t."""
        from scipy.special import stdtr

        if self.error == 0:
            return 1.0 if self.log_ratio == 0 else 0.0
        return 2 * float(stdtr(self.freedom, -abs(self.log_ratio) / self.error))

    def p_beyond_margin(self, error_margin: float = 0.0) -> float:
        """The p-value of a difference beyond MARGIN: below ALPHA exactly where the interval is beyond the margin.

        `error_margin`: by how much the logarithm may be nearer to 0, because the load generator was late.
        """
        from scipy.special import stdtr

        distance = abs(self.log_ratio) - error_margin - _LOG_MARGIN
        if self.error == 0:
            return 0.0 if distance > 0 else 1.0
        return min(1.0, 2 * float(stdtr(self.freedom, -distance / self.error)))


def mean_of_repeats(values: Sequence[float]) -> Estimate:
    """Return the geometric mean of positive values, with the 95 % interval of Student's t; of one value without it."""
    mean = mean_log(values)
    if len(values) < 2:
        return Estimate(math.exp(mean), None, None)
    error = math.sqrt(var_log(values) / len(values))
    return Estimate(math.exp(mean), *Effect(mean, error, len(values) - 1).interval())


def geometric_ratio(side: Sequence[float], base: Sequence[float]) -> float:
    """Geometric mean of `side` over that of `base`. All values must be positive."""
    return math.exp(mean_log(side) - mean_log(base))


def welch_effect(side: Sequence[float], baseline: Sequence[float]) -> Effect | None:
    """Compare two samples on logarithms by Welch's t. None with fewer than two values on a side."""
    if len(side) < 2 or len(baseline) < 2:
        return None
    return _welch(mean_log(side) - mean_log(baseline), var_log(side), len(side), var_log(baseline), len(baseline))


def pooled_effect(side: Sequence[float], base: Sequence[float], squares: float = 0.0, freedom: int = 0) -> Effect:
    """Compare two samples of runs by the variance between equal runs, on logarithms.

    The variance pools an assumption (ASSUMED_SD), the runs of each side, and what other equal runs show: their sum of
    squares with its degrees of freedom.
    """
    for runs in (side, base):
        if len(runs) > 1:
            squares, freedom = squares + sum_of_squares(runs), freedom + len(runs) - 1
    total = ASSUMED_FREEDOM + freedom
    variance = (ASSUMED_FREEDOM * ASSUMED_SD**2 + squares) / total
    return Effect(mean_log(side) - mean_log(base), math.sqrt(variance * (1 / len(side) + 1 / len(base))), total)


def is_mostly_assumed(effect: Effect) -> bool:
    """Whether the assumption weighs more than the runs in an effect of `pooled_effect`."""
    return effect.freedom < 2 * ASSUMED_FREEDOM


def runs_to_confirm(effect: Effect, side: int, base: int) -> int:
    """So many runs a side weigh as much as the assumption in an effect of `pooled_effect` from `side` and `base` runs.

    A verdict on them is not provisional any more.
    """
    return max(math.ceil((2 * ASSUMED_FREEDOM - effect.freedom + side + base) / 2), side, base)


def difference_of(log_ratio: float, errors: Sequence[tuple[float, float]]) -> Effect:
    """An effect whose two sides have these standard errors, each with its degrees of freedom (Welch-Satterthwaite)."""
    variances = [error**2 for error, _ in errors]
    total = sum(variances)
    if total == 0:
        return Effect(log_ratio, 0.0, math.inf)
    inverse = sum((variance / total) ** 2 / freedom for variance, (_, freedom) in zip(variances, errors, strict=True))
    return Effect(log_ratio, math.sqrt(total), 1 / inverse if inverse else math.inf)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's method, in the given order."""
    corrected = [0.0] * len(ps)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected


def sample_size_to_settle(
    log_ratio: float, variances: tuple[float, float], known_size: int, comparisons: int, freedom: int = 0
) -> int | None:
    """How many values a side lead to a verdict with a probability of POWER, if effect and spread stay the same.

    `log_ratio` is the effect and `variances` are those of both sides, on logarithms. The result is larger than
    `known_size`. `freedom`: degrees of freedom of the variance besides those of the values. None: more than
    MAX_REPEATS.

    An effect beyond the margin needs an interval beyond it, at the corrected level. A smaller one needs an interval
    within the margin.
    """
    differs = abs(log_ratio) > _LOG_MARGIN
    level = ALPHA / comparisons if differs else ALPHA

    def has_power(n: int) -> bool:
        return _power(abs(log_ratio), variances, n, level, freedom, differs=differs) >= POWER

    sizes = range(max(known_size + 1, 2), MAX_REPEATS + 1)
    index = bisect.bisect_left(sizes, True, key=has_power)
    return sizes[index] if index < len(sizes) else None


def _power(
    log_ratio: float, variances: tuple[float, float], n: int, level: float, freedom: int, *, differs: bool
) -> float:
    """The probability that n values a side find a difference if it `differs`, or else find none.

    What the experiment estimates of both variances, chi-squared variables, is integrated on a grid. With a `freedom`,
    the variance is one that is pooled.
    """
    from scipy.special import chdtri, ndtr, stdtrit

    error = math.sqrt((variances[0] + variances[1]) / n)
    if error == 0:
        return 1.0
    shares = (np.arange(40) + 0.5) / 40
    if freedom:
        freedom += 2 * (n - 1)
        seen = chdtri(freedom, shares) / freedom * error**2
        freedoms = np.full(len(seen), freedom)
    else:
        estimated = chdtri(n - 1, shares) / (n - 1) / n
        first, other = np.meshgrid(variances[0] * estimated, variances[1] * estimated)
        seen = first + other
        freedoms = (n - 1) * seen**2 / np.maximum(first**2 + other**2, 1e-300)
    half_width = stdtrit(freedoms, 1 - level / 2) * np.sqrt(seen)
    if differs:
        return float(np.mean(ndtr((log_ratio - half_width - _LOG_MARGIN) / error)))
    room = np.maximum(_LOG_MARGIN - half_width, 0.0)
    return float(np.mean(ndtr((room - log_ratio) / error) - ndtr((-room - log_ratio) / error)))


def mean_log(values: Sequence[float]) -> float:
    return statistics.fmean(map(math.log, values))


def var_log(values: Sequence[float]) -> float:
    """Variance of the logarithms. Exactly 0 for equal values, whose mean may be off in the last bit."""
    if min(values) == max(values):
        return 0.0
    return statistics.variance([math.log(value) for value in values])


def sum_of_squares(values: Sequence[float]) -> float:
    """The sum of squared distances of the logarithms from their mean."""
    return var_log(values) * (len(values) - 1)


def _welch(log: float, var: float, n: int, base_var: float, m: int) -> Effect:
    """Welch's standard error and degrees of freedom for a difference of means."""
    a, b = var / n, base_var / m
    if a + b == 0:
        return Effect(log, 0.0, math.inf)
    return Effect(log, math.sqrt(a + b), (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1)))


def t_quantile(share: float, freedom: float) -> float:
    from scipy.special import stdtrit  # importing it takes 0.1 s, which most commands do not need

    return float(stdtrit(freedom, share))


def fisher_greater(hits: int, number: int, base_hits: int, base_number: int) -> float:
    """Fisher's exact test: the p value of so many hits, or more, where the share of hits is that of the base."""
    total, all_hits = number + base_number, hits + base_hits

    def log_choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    every = log_choose(total, number)
    drawn = range(hits, min(number, all_hits) + 1)
    return sum(
        math.exp(log_choose(all_hits, k) + log_choose(total - all_hits, number - k) - every)
        for k in drawn
        if number - k <= total - all_hits
    )


class Levels(NamedTuple):
    """A series divided into levels. All numbers are indices of the series."""

    starts: list[int]  # of each level; all but the first are change points
    outliers: list[int]  # runs in no level
    undecided: list[int]  # newest runs that differ from the last level, fewer than MIN_LEVEL


class Shift(NamedTuple):
    """How the newest runs differ from the runs before them. Ratios are of speed: above 1 is faster."""

    word: Word
    ratio: float | None  # of the newest `window` runs to the history; None without a history
    low: float | None  # lowest and highest ratio that is expected of equal runs, at the level of the gate
    high: float | None
    p: float | None  # before correction
    window: int  # number of newest runs that show the shift together; 1 where none do
    history: list[int]  # indices of the runs that they are compared with
    detectable: float | None  # slowdown that three runs find with a probability of POWER
    needed: int | None  # runs of history that find DETECTED; None: more than MAX_REPEATS
    effect: Effect | None = None  # of the ratio; None without a history


def find_levels(speeds: Sequence[float], series_count: int = 1) -> Levels:
    """Divide a series of run-level speeds, oldest first, into levels between change points.

    Circular binary segmentation: the stretch of neighbouring runs whose mean differs most from the mean of all others,
    by Student's t on logarithms, is cut out if its p-value, corrected for the number of stretches and series, is below
    LEVEL_ALPHA and the difference exceeds MARGIN. Then each part is divided in the same way.
    A stretch of fewer than MIN_LEVEL runs is not a level: its runs are undecided if they are the newest, else outliers.
    Outliers add variance that can hide other outliers or a step, so a separate test removes them first.
    """
    logs = np.log(np.asarray(speeds, dtype=np.float64))
    count = len(logs)
    level = LEVEL_ALPHA / max(1, series_count * count * (count - 1) // 2)
    outliers = _find_outliers(logs, series_count)
    kept = np.setdiff1d(np.arange(count), outliers)
    undecided: list[int] = []
    while True:
        cuts = _find_cuts(logs[kept], level)
        edges = [0, *cuts, len(kept)]
        short = next(((a, b) for a, b in itertools.pairwise(edges) if b - a < MIN_LEVEL and cuts), None)
        if short is None:
            return Levels([int(kept[cut]) for cut in edges[:-1]] if count else [], sorted(outliers), undecided)
        start, end = short
        removed = [int(index) for index in kept[start:end]]
        if end == len(kept):
            undecided = sorted(removed + undecided)
        else:
            outliers += removed
        kept = np.delete(kept, np.s_[start:end])


def find_shift(speeds: Sequence[float], series_count: int = 1) -> Shift:
    """Compare the newest of a series of run-level speeds, oldest first, with the level before them (the gate).

    The newest run, the newest two and the newest three are each compared with the earlier runs of the level, by
    Student's t on logarithms and by MARGIN. The level of the tests is ALPHA, corrected for the three comparisons, the
    number of series and GATES_PER_HISTORY.
    """
    count = len(speeds)
    levels = find_levels(speeds, series_count)
    # The gate itself reports a change point within the newest runs, so their history starts before it.
    start = max(start for start in levels.starts if start == 0 or count - start > max(WINDOWS))
    runs = [run for run in range(start, count) if run not in levels.outliers]
    logs = np.log(np.asarray(speeds, dtype=np.float64)[runs])
    level = ALPHA / (GATES_PER_HISTORY * len(WINDOWS) * series_count)
    shifts = [_window_shift(logs, runs, size, level) for size in WINDOWS if len(runs) - size >= MIN_HISTORY]
    if not shifts:
        ratio = math.exp(float(logs[-1] - logs[:-1].mean())) if len(logs) > 1 else None
        values = [math.exp(log) for log in logs]
        effect = pooled_effect(values[-1:], values[:-1]) if len(values) > 1 else None
        return Shift("inconclusive", ratio, None, None, None, 1, runs[:-1], None, MIN_HISTORY, effect)
    significant = [shift for shift in shifts if shift.word in ("slower", "faster")]
    return min(significant, key=lambda shift: shift.p or 0.0) if significant else shifts[0]


def _window_shift(logs: Array, runs: Sequence[int], window: int, level: float) -> Shift:
    """The shift of the newest `window` runs of a level from the runs before them. `runs`: the index of each run."""
    new, old = logs[-window:], logs[:-window]
    freedom = len(logs) - 2
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in (new, old))
    error = math.sqrt(max(squares, 1e-12) / freedom * (1 / window + 1 / len(old)))  # equal values have no spread
    difference = float(new.mean() - old.mean())
    expected = max(t_quantile(1 - level / 2, freedom) * error, _LOG_MARGIN)
    deviation = float(old.std(ddof=1))
    detectable = _detectable_shift(deviation, len(old), level)
    sizes = range(MIN_HISTORY, MAX_REPEATS + 1)
    effect = Effect(difference, error, freedom)
    word: Word = "no_shift" if detectable <= DETECTED else "inconclusive"
    if abs(difference) > expected:
        word = "slower" if difference < 0 else "faster"
    return Shift(
        word=word,
        ratio=math.exp(difference),
        low=math.exp(-expected),
        high=math.exp(expected),
        p=effect.p_value(),
        effect=effect,
        window=window,
        history=list(runs[:-window]),
        detectable=detectable,
        needed=next((n for n in sizes if _detectable_shift(deviation, n, level) <= DETECTED), None),
    )


def _find_outliers(logs: Array, series_count: int) -> list[int]:
    """Indices of runs that differ from the running median, by Rosner's test for several outliers (generalized ESD).

    A median of 5 follows every stretch of MIN_LEVEL runs, so a step makes no outliers. The two runs at each end have no
    such median and are not tested.
    """
    reach = MIN_LEVEL - 1
    if len(logs) < 4 * MIN_LEVEL:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(logs, 2 * reach + 1)
    residuals = logs[reach:-reach] - np.median(windows, axis=1)
    remaining, removed, outlier_count = list(range(len(residuals))), [], 0
    for _ in range(len(residuals) // 5):
        values = residuals[remaining]
        farthest = int(np.argmax(np.abs(values - values.mean())))
        distance, deviation = abs(float(values[farthest] - values.mean())), max(float(values.std(ddof=1)), 1e-9)
        t = t_quantile(1 - OUTLIER_ALPHA / (series_count * len(remaining)) / 2, len(remaining) - 2)
        removed.append(remaining.pop(farthest))
        limit = t * (len(values) - 1) / math.sqrt((len(values) - 2 + t**2) * len(values))
        if distance / deviation > limit and abs(residuals[removed[-1]]) > _LOG_MARGIN:
            outlier_count = len(removed)
    return [index + reach for index in removed[:outlier_count]]


def _find_cuts(logs: Array, level: float) -> list[int]:
    """The indices at which a stretch is divided, recursively."""
    stretch = _find_stretch(logs, level)
    if stretch is None:
        return []
    edges = [edge for edge in stretch if 0 < edge < len(logs)]
    parts = zip([0, *edges], [*edges, len(logs)], strict=True)
    return sorted({*edges, *(start + cut for start, end in parts for cut in _find_cuts(logs[start:end], level))})


def _find_stretch(logs: Array, level: float) -> tuple[int, int] | None:
    """The stretch (start, end) that differs most from all other values; None where none differs at this level."""
    count = len(logs)
    if count < 2 * MIN_LEVEL:
        return None
    values = logs - logs.mean()
    cumulated = np.concatenate([[0.0], np.cumsum(values)])
    starts, ends = np.triu_indices(count + 1, 1)
    starts, ends = (edges[ends - starts < count] for edges in (starts, ends))
    inside = ends - starts
    outside = count - inside
    sums = cumulated[ends] - cumulated[starts]  # of the values inside; those outside have the opposite sum
    differences = sums / inside + sums / outside
    squares = float(values @ values) - sums**2 * (1 / inside + 1 / outside)
    variance = np.maximum(squares, 1e-12) / (count - 2)  # equal values have a variance of 0, apart from the last bits
    t = np.abs(differences) / np.sqrt(variance * (1 / inside + 1 / outside))
    t[np.abs(differences) <= _LOG_MARGIN] = 0
    best = int(np.argmax(t))
    return None if t[best] <= t_quantile(1 - level / 2, count - 2) else (int(starts[best]), int(ends[best]))


def _detectable_shift(deviation: float, runs: int, level: float) -> float:
    """The slowdown that three runs after a history of so many find with a probability of POWER."""
    longest = max(WINDOWS)
    freedom = runs + longest - 2
    error = deviation * math.sqrt(1 / longest + 1 / runs)
    return max(MARGIN, math.expm1((t_quantile(1 - level / 2, freedom) + t_quantile(POWER, freedom)) * error))
