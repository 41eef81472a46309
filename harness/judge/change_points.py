"""Change points of a series of run-level values, and the gate that checks the newest run of one.

Apache Otava is not used: 0.8 requires exactly numpy 2.2.0 and installs BigQuery, gRPC and Slack clients, and its tests
are not corrected for the number of places and series (4 to 6 % false alarms for each series of 60 runs).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from harness.judge.stats import Array, t_quantile
from harness.summary import ALPHA, MARGIN, MAX_REPEATS, POWER

MIN_LEVEL = 3  # runs that a level has at least: fewer are outliers, or too new to decide
MIN_HISTORY = 5  # runs with which the gate decides
LEVEL_ALPHA = 0.01  # of change points: a false one would give the gate a base of extreme runs
OUTLIER_ALPHA = 0.001  # small, since residuals from a median have wider tails than the test assumes
GATED_RUNS = 60  # of which all gates together raise a false alarm in at most ALPHA of the histories
WINDOWS = (1, 2, 3)  # newest runs that the gate compares, together, with those before
DETECTED = 0.10  # the slowdown that a history must be long enough to find: so much more time
_BAND = math.log1p(MARGIN)

Word = Literal["slower", "faster", "no_shift", "inconclusive"]


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
    known = [_shift(logs, kept, size, level) for size in WINDOWS if len(kept) - size >= MIN_HISTORY]
    if not known:
        ratio = math.exp(float(logs[-1] - logs[:-1].mean())) if len(logs) > 1 else None
        return Shift("inconclusive", ratio, None, None, None, 1, kept[:-1], None, MIN_HISTORY)
    shifted = [one for one in known if one.word in ("slower", "faster")]
    return min(shifted, key=lambda one: one.p or 0.0) if shifted else known[0]


def _shift(logs: Array, places: Sequence[int], window: int, level: float) -> Shift:
    """The newest runs of a level, so many together, against those before them."""
    from scipy.special import stdtr

    new, old = logs[-window:], logs[:-window]
    freedom = len(logs) - 2
    squares = sum(float(((one - one.mean()) ** 2).sum()) for one in (new, old))
    error = math.sqrt(max(squares, 1e-12) / freedom * (1 / window + 1 / len(old)))  # equal values have no spread
    difference = float(new.mean() - old.mean())
    band = max(_quantile(level, freedom) * error, _BAND)
    deviation = float(old.std(ddof=1))
    detectable = _detectable(deviation, len(old), level)
    sizes = range(MIN_HISTORY, MAX_REPEATS + 1)
    word: Word = "no_shift" if detectable <= DETECTED else "inconclusive"
    if abs(difference) > band:
        word = "slower" if difference < 0 else "faster"
    return Shift(
        word=word,
        ratio=math.exp(difference),
        low=math.exp(-band),
        high=math.exp(band),
        p=2 * float(stdtr(freedom, -abs(difference) / error)),
        window=window,
        history=list(places[:-window]),
        detectable=detectable,
        needed=next((n for n in sizes if _detectable(deviation, n, level) <= DETECTED), None),
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
        t = _quantile(OUTLIER_ALPHA / (series * len(left)), len(left) - 2)
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
    return None if t[best] <= _quantile(level, count - 2) else (int(starts[best]), int(ends[best]))


def _quantile(level: float, freedom: float) -> float:
    """The two-sided quantile of Student's t."""
    return t_quantile(1 - level / 2, freedom)


def _detectable(deviation: float, runs: int, level: float) -> float:
    """The slowdown that three runs after so many show with a probability of POWER."""
    longest = max(WINDOWS)
    freedom = runs + longest - 2
    error = deviation * math.sqrt(1 / longest + 1 / runs)
    return max(MARGIN, math.expm1((_quantile(level, freedom) + t_quantile(POWER, freedom)) * error))
