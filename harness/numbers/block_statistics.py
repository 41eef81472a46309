"""Blocks of a measurement: cutting into them, the error of a mean, how much values depend on each other, and a trend.

Neighbouring requests wait for each other, so they are less than so many independent measurements. Blocks that are
several answers long hardly depend on each other. Functions of arrays; docs/method.md has the rules that use them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.numbers.comparison import ALPHA
from harness.numbers.stats import t_quantile

Floats = NDArray[np.float64]

# The error of a rate within one run.
RATE_BLOCK_ANSWERS = 5  # answer times of a block, so that few requests reach from one block into the next
MIN_RATE_BLOCKS = 4  # with 3 degrees of freedom the interval is 3.2 errors wide either way; with 2 it is 4.3
MAX_RATE_BLOCKS = 40  # these show the error to within 11 %; more only cost time
# The effect of dependence.
EFFECT_BLOCK_ANSWERS = 5.0  # answer times of a block, at least, as for a rate; and so many requests
MIN_EFFECT_BLOCKS = 8  # the variance of fewer means is off by more than half of itself
MAX_EFFECT_BLOCKS = 32  # longer blocks show slower waves; these still show their variance to within 25 %
TAILS = (0.9, 0.95)  # the slowest 10 % and 5 %: a queue makes neighbours of slow requests
_MAX_CORRELATION = 0.99  # of neighbouring requests: an effect of 199
# The throughput of a level.
MIN_BATCHES = 8  # with 7 degrees of freedom the interval is 2.4 errors wide either way; more make it little narrower


# Cutting into blocks.


def work_between(edges_s: Floats, sent_s: Floats, ended_s: Floats, work: Floats) -> Floats:
    """The work done between each two neighbouring edges. A request works evenly from when it is sent until it ends.

    `work`: of each request, or a row of such for each kind of work.
    """
    done = []
    for edge in edges_s:
        going = (sent_s < edge) & (edge < ended_s)
        parts = work[..., going] * (edge - sent_s[going]) / (ended_s - sent_s)[going]
        done.append(work[..., ended_s <= edge].sum(axis=-1) + parts.sum(axis=-1))
    amounts: Floats = np.diff(done, axis=0).T
    return amounts


def values_in_block(sent_s: Floats, n: int, answer_s: float | None) -> int:
    """How many of `n` values are in a block, for the effect of dependence. `answer_s`: the mean time of an answer."""
    size = max(math.ceil(EFFECT_BLOCK_ANSWERS), -(-n // MAX_EFFECT_BLOCKS))
    span_s = float(sent_s.max() - sent_s.min()) if n else 0.0
    if answer_s and n > 1:
        answers = n if span_s <= 0 else min(n, math.ceil(EFFECT_BLOCK_ANSWERS * answer_s * (n - 1) / span_s))
        size = max(size, answers)
    return size


# The error of a rate.


def rate_error(sent_s: Floats, ended_s: Floats, work: Floats) -> tuple[float, int] | None:
    """The standard error of the logarithm of a rate within one run, and the number of blocks that it is from.

    `sent_s`, `ended_s` and `work` (such as tokens) have a value for each request. A block lasts RATE_BLOCK_ANSWERS
    times the mean answer. None: fewer than MIN_RATE_BLOCKS.
    """
    if not len(sent_s):
        return None
    start, end, took = float(sent_s.min()), float(ended_s.max()), np.maximum(ended_s - sent_s, 1e-9)
    blocks = min(MAX_RATE_BLOCKS, int((end - start) / (RATE_BLOCK_ANSWERS * float(took.mean()))))
    if blocks < MIN_RATE_BLOCKS:
        return None
    rates = work_between(np.linspace(start, end, blocks + 1), sent_s, ended_s, work)
    if rates.mean() <= 0:
        return None
    return float(rates.std(ddof=1) / rates.mean()) / math.sqrt(blocks), blocks


class BatchedRate(NamedTuple):
    """A rate with its standard error, relative to it."""

    rate: float
    error: float
    freedom: int


def batched_rate(work: Sequence[float], seconds: Sequence[float]) -> BatchedRate:
    """The rate over all blocks, at least two, with its error by batch means: MIN_BATCHES to twice as many batches of
    neighbouring blocks, because neighbouring blocks depend on each other.
    """
    count = len(work)
    batches = count // max(1, count // MIN_BATCHES)
    starts = [count * batch // batches for batch in range(batches)]
    done, took = np.add.reduceat(work, starts), np.add.reduceat(seconds, starts)
    total = float(done.sum())
    error = math.sqrt(_ratio_variance(done, took)) / total if total else 0.0
    return BatchedRate(float(done.sum() / took.sum()), error, batches - 1)


def _ratio_variance(parts: Floats, sizes: Floats) -> float:
    """The variance of the sum of `parts` whose means are in proportion to `sizes`."""
    count, ratio = len(parts), parts.sum() / sizes.sum()
    return float(((parts - ratio * sizes) ** 2).sum()) * count / (count - 1)


# The effect of dependence: how many dependent values count as one.


class DesignEffect(NamedTuple):
    """How many dependent requests count as one."""

    effect: float  # at least 1
    blocks: int  # of all repeats


def effect_of_dependence(
    repeats: Sequence[Floats], sizes: Sequence[int], in_flight: float | None = None
) -> DesignEffect:
    """Estimate the design effect from the ranks (0 to 1) of each repeat, in the order of sending.

    It is the largest of: what follows from the correlation of neighbours; the long-run variance of being among the
    slowest (TAILS), because a queue makes the slow ones neighbours; the variance of the means of blocks, with at least
    MIN_EFFECT_BLOCKS of them, and of repeats; and half the requests in flight, because a stall hits all of them at
    once. `sizes`: the number of values in a block of each repeat. `in_flight`: the mean number of requests in flight;
    None: not known.
    """
    n = sum(map(len, repeats))
    variance = float(np.concatenate(repeats).var()) if n else 0.0
    blocks = sum(len(ranks) // size for ranks, size in zip(repeats, sizes, strict=True))
    effect = max(1.0, (in_flight or 0.0) / 2)
    if variance <= 1e-12:
        return DesignEffect(effect, blocks)
    lags = math.ceil(2 * max(1.0, in_flight or 0.0))
    slowest = [[(ranks > tail).astype(np.float64) for ranks in repeats] for tail in TAILS]
    effects = [_correlation_effect(repeats), _between_effect(repeats) / variance]
    effects += [_long_run_effect(values, lags) for values in slowest]
    if blocks >= MIN_EFFECT_BLOCKS:
        effects += [_block_effect(values, sizes) for values in (repeats, *slowest)]
    return DesignEffect(max(effect, min(max(effects), float(n))), blocks)  # at most all of them count as one


def cluster_effect(counts: Sequence[tuple[int, int]]) -> float:
    """The design effect of a share by the misses of blocks: a stall misses all requests in flight at once.

    `counts`: of each block the requests that met the SLO, and those of which it is known.
    """
    met, decided = np.array(counts, dtype=np.float64).reshape(-1, 2).T
    share = met.sum() / max(1, decided.sum())
    if len(counts) < 2 or not 0 < share < 1:
        return 1.0
    return _ratio_variance(met, decided) / float(decided.sum() * share * (1 - share))


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


def _correlation_effect(repeats: Sequence[Floats]) -> float:
    """The effect of an autoregressive series with the correlation of neighbouring ranks.

    That of every second one shows a slow wave under noise: its root counts where it is larger. Each is corrected for
    its bias; one standard error more, because the effect of a correlation that is estimated too small is far too small.
    """
    centered = [ranks - ranks.mean() for ranks in repeats if len(ranks) > 2]
    # Sums of products, because `@` would start threads.
    squares = sum(float((ranks * ranks).sum()) for ranks in centered)
    if squares <= 0:
        return 1.0
    n = sum(map(len, centered))

    def correlation(lag: int) -> float:
        raw = sum(float((ranks[lag:] * ranks[:-lag]).sum()) for ranks in centered) / squares
        return min(max(raw + (1 + 3 * raw) / n, 0.0), 1.0)

    largest = max(correlation(1), math.sqrt(correlation(2)))
    largest = min(largest + math.sqrt((1 - largest * largest) / n), _MAX_CORRELATION)
    return (1 + largest) / (1 - largest)


def _long_run_effect(repeats: Sequence[Floats], lags: int) -> float:
    """The long-run variance relative to that of independent values, by correlations up to so many lags (Bartlett).

    With Bartlett's weights it is the mean square of the moving sums of `lags` + 1 values, divided by their number.
    """
    values = np.concatenate(repeats)
    mean, squares = values.mean(), float(values.var()) * len(values)
    width = min(lags + 1, max(1, len(values) // 4))
    if squares <= 1e-12:
        return 1.0
    sums = 0.0
    for part in repeats:
        total = np.cumsum(part - mean)
        padded = np.concatenate([np.zeros(width), total, np.full(width - 1, total[-1] if len(total) else 0.0)])
        moving = padded[width:] - padded[:-width]
        sums += float((moving * moving).sum())
    return sums / (width * squares) / (1 - width / len(values))


def _between_effect(repeats: Sequence[Floats]) -> float:
    """The mean square between repeats; 0 for one repeat."""
    parts = [ranks for ranks in repeats if len(ranks)]
    if len(parts) < 2:
        return 0.0
    mean = np.concatenate(parts).mean()
    return sum(len(ranks) * float(ranks.mean() - mean) ** 2 for ranks in parts) / (len(parts) - 1)


# A trend.


class Slope(NamedTuple):
    """The slope of a straight line by least squares, with its standard error."""

    value: float
    error: float
    freedom: int

    def half_width(self, alpha: float = ALPHA) -> float:
        """Half the width of the interval of the slope, by Student's t."""
        return t_quantile(1 - alpha / 2, self.freedom) * self.error

    def is_significant(self, alpha: float) -> bool:
        return abs(self.value) > self.half_width(alpha)


def fit_trend(at: Floats, values: Floats, others: Floats | None = None, series: int = 1) -> Slope:
    """Fit a straight line to values at some times.

    `others`: columns of what else the values depend on. `series`: the values are of so many series, one after the
    other; then the caller takes the mean of each series off `at`, `values` and `others`.
    """
    columns = (at - at.mean())[:, np.newaxis]
    if others is not None:
        columns = np.column_stack([columns, others])
    coefficients = np.linalg.lstsq(columns, values - values.mean(), rcond=None)[0]
    rest = values - values.mean() - columns @ coefficients
    freedom = len(values) - series - len(coefficients)
    variance = float((rest**2).sum()) / freedom
    error = math.sqrt(variance * float(np.linalg.pinv(columns.T @ columns)[0, 0]))
    return Slope(float(coefficients[0]), error, freedom)
