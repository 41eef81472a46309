"""The gaps between chunks: exact percentiles of more values than should be held in memory.

A million answers of 200 chunks have 1.6 GB of gaps. A sample tells in which narrow intervals the percentiles must lie.
Then every gap is counted, and only those inside an interval are kept: with these counts the value at a rank is exact,
the same that sorting all of them would give. A sample may mislead; then the rank is outside of its interval, which
shows, and the intervals are made wider. Rounded values (float32, whole microseconds) would need no sample, and would
not be exact.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from harness.analysis.derive import add_up, doubles
from harness.judge.stats import Array

PERMILLES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990}
MIN_SAMPLE = 16  # requests: a cell with fewer in the sample has so few gaps that all can be kept
_BATCH = 100_000  # chunk times that are worked on at once, small enough for a processor's cache
_MIN_HALF = 0.005  # half the width of an interval, as a share of the sample
_ERRORS = 3.0  # and in standard errors


class Interval(NamedTuple):
    low: float
    high: float


ALL = Interval(-math.inf, math.inf)


class IntervalCounts(msgspec.Struct):
    """What is known of one interval: counts, and the values strictly inside. One that many gaps have, such as 0 for
    chunks that shared a packet, soon is an interval's end, where it need only be counted."""

    below: int = 0  # values < low
    to_low: int = 0  # values <= low
    below_high: int = 0  # values < high
    to_high: int = 0  # values <= high
    values: "array[float]" = msgspec.field(default_factory=doubles)

    def take(self, interval: Interval, gaps: Array) -> None:
        if interval == ALL:
            self.below_high += len(gaps)
            self.to_high += len(gaps)
            self.values.frombytes(gaps.tobytes())
            return
        above, under = gaps > interval.low, gaps < interval.high
        self.below += int(np.count_nonzero(gaps < interval.low))
        self.to_low += len(gaps) - int(np.count_nonzero(above))
        self.below_high += int(np.count_nonzero(under))
        self.to_high += int(np.count_nonzero(gaps <= interval.high))
        self.values.frombytes(gaps[above & under].tobytes())


class Gaps(msgspec.Struct):
    """The gaps of a cell's successful measured requests, in seconds."""

    intervals: list[Interval] = msgspec.field(default_factory=lambda: [ALL])  # apart from each other
    n: int = 0
    requests: int = 0  # that they come from
    minimum: float = math.inf
    maximum: float = -math.inf
    spans_s: "array[float]" = msgspec.field(default_factory=doubles)  # first to last chunk of each request
    kept: list[IntervalCounts] = []
    _times: "array[float]" = msgspec.field(default_factory=doubles)
    _ends: list[int] = []

    def __post_init__(self) -> None:
        self.kept = self.kept or [IntervalCounts() for _ in self.intervals]

    @property
    def whole(self) -> bool:
        return self.intervals == [ALL]

    def add(self, chunks_s: list[float]) -> None:
        if len(chunks_s) < 2:
            return
        self.n += len(chunks_s) - 1
        self.requests += 1
        self.spans_s.append(chunks_s[-1] - chunks_s[0])
        self._times.fromlist(chunks_s)
        self._ends.append(len(self._times))
        if len(self._times) > _BATCH:
            self.flush()

    def flush(self) -> None:
        """Work on what was added. Needed before the rest of this object is looked at."""
        if not self._ends:
            return
        gaps = np.diff(np.array(self._times))
        inside = np.ones(len(gaps), dtype=bool)
        inside[np.array(self._ends[:-1], dtype=np.int64) - 1] = False  # from one request to the next
        gaps = gaps[inside]
        self.minimum = min(self.minimum, float(gaps.min()))
        self.maximum = max(self.maximum, float(gaps.max()))
        for interval, kept in zip(self.intervals, self.kept, strict=True):
            kept.take(interval, gaps)
        del self._times[:]
        self._ends.clear()

    def merge(self, other: "Gaps") -> None:
        self.flush()
        other.flush()
        self.n += other.n
        self.requests += other.requests
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        self.spans_s.extend(other.spans_s)
        for mine, others in zip(self.kept, other.kept, strict=True):
            add_up(mine, others)

    def within(self, interval: Interval) -> IntervalCounts | None:
        """What is known of an interval. None when that is not enough."""
        if interval in self.intervals:
            return self.kept[self.intervals.index(interval)]
        if not self.whole:
            return None
        kept = IntervalCounts()
        kept.take(interval, np.asarray(self.kept[0].values))
        return kept


def value_at(parts: Sequence[Gaps], permille: int) -> float | None:
    """The exact percentile of the values of all parts together, as `stats.percentile` defines it.

    None when no interval that the parts have in common holds it.
    """
    rank = max(1, -(-sum(part.n for part in parts) * permille // 1000))
    for interval in dict.fromkeys(interval for part in parts for interval in part.intervals):
        known = [kept for part in parts if (kept := part.within(interval)) is not None]
        if len(known) < len(parts):
            continue
        below, to_low, below_high, to_high = (
            sum(getattr(kept, name) for kept in known) for name in ("below", "to_low", "below_high", "to_high")
        )
        if below < rank <= to_low:
            return interval.low
        if to_low < rank <= below_high:
            values: Array = np.concatenate([np.asarray(kept.values) for kept in known])
            return float(np.partition(values, rank - to_low - 1)[rank - to_low - 1])
        if below_high < rank <= to_high:
            return interval.high
    return None


def all_known(parts: Sequence[Gaps]) -> bool:
    return all(value_at(parts, permille) is not None for permille in PERMILLES.values())


def mean(parts: Sequence[Gaps]) -> float:
    """Their mean: the gaps of a request add up to its span."""
    return math.fsum(span for part in parts for span in part.spans_s) / sum(part.n for part in parts)


class GapSample(msgspec.Struct):
    """Some gaps of some requests, taken evenly from a file."""

    requests: int = 0
    values: "array[float]" = msgspec.field(default_factory=doubles)

    def add(self, chunks_s: list[float], first: int, step: int) -> None:
        taken = np.diff(np.array(chunks_s))[first::step]
        if len(taken):
            self.requests += 1
            self.values.frombytes(taken.tobytes())


def intervals_around(samples: Sequence[GapSample], widened: float) -> list[Interval]:
    """Where the percentiles of what the samples were taken from should lie; each sample's own, and all together's.

    As wide as if all gaps of a request were alike, which is the worst that a sample of requests can meet.
    """
    found: list[Interval] = []
    together = GapSample()
    for sample in samples:
        add_up(together, sample)
    for sample in [*samples, together] if len(samples) > 1 else samples:
        if not sample.values:
            continue
        ordered = np.sort(np.asarray(sample.values))
        for permille in PERMILLES.values():
            p = permille / 1000
            half = widened * max(_MIN_HALF, _ERRORS * math.sqrt(p * (1 - p) / sample.requests))
            low, high = math.floor((p - half) * len(ordered)), math.ceil((p + half) * len(ordered))
            found.append(
                Interval(
                    float(ordered[low]) if low >= 0 else -math.inf,
                    float(ordered[high]) if high < len(ordered) else math.inf,
                )
            )
    return _joined(found) or [ALL]


def _joined(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for interval in sorted(intervals):
        if joined and interval.low <= joined[-1].high:
            joined[-1] = Interval(joined[-1].low, max(joined[-1].high, interval.high))
        else:
            joined.append(interval)
    return joined
