"""Exact percentiles of the gaps between chunks, without keeping all gaps in memory.

A million answers of 200 chunks have 1.6 GB of gaps. So a sample of the file first gives narrow intervals that should
contain the percentiles. Then all gaps are counted, but only those inside an interval are kept. The counts give the rank
of each kept gap, so the percentiles are the same as from sorting all gaps. Where a percentile's rank is outside of its
interval, the sample was misleading, and the file is read again with wider intervals.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from harness.analysis.derive import float_array, merge_counts
from harness.judge.stats import Array

PERMILLES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990}
MIN_SAMPLE = 16  # requests; a cell with fewer in the sample is small enough to keep all gaps
_BATCH = 100_000  # chunk times that are processed at once; they fit into a processor's cache
_MIN_HALF_WIDTH = 0.005  # of an interval, as a share of the sample,
_HALF_WIDTH_ERRORS = 3.0  # or in standard errors, whichever is larger


class Interval(NamedTuple):
    low: float
    high: float


ALL = Interval(-math.inf, math.inf)


class IntervalCounts(msgspec.Struct):
    """Counts of all gaps relative to one interval, and the values strictly inside it.

    A value that many gaps have, such as 0 for chunks in one packet, is often the end of an interval and only counted.
    """

    below: int = 0  # values < low
    to_low: int = 0  # values <= low
    below_high: int = 0  # values < high
    to_high: int = 0  # values <= high
    values: "array[float]" = msgspec.field(default_factory=float_array)

    def add(self, interval: Interval, gaps: Array) -> None:
        if interval == ALL:
            self.below_high += len(gaps)
            self.to_high += len(gaps)
            self.values.frombytes(gaps.tobytes())
            return
        above_low, below_high = gaps > interval.low, gaps < interval.high
        self.below += int(np.count_nonzero(gaps < interval.low))
        self.to_low += len(gaps) - int(np.count_nonzero(above_low))
        self.below_high += int(np.count_nonzero(below_high))
        self.to_high += int(np.count_nonzero(gaps <= interval.high))
        self.values.frombytes(gaps[above_low & below_high].tobytes())


class Gaps(msgspec.Struct):
    """The gaps of a cell's successful measured requests, in seconds."""

    intervals: list[Interval] = msgspec.field(default_factory=lambda: [ALL])  # they do not overlap
    n: int = 0
    requests: int = 0  # that have gaps
    minimum: float = math.inf
    maximum: float = -math.inf
    spans_s: "array[float]" = msgspec.field(default_factory=float_array)  # first to last chunk of each request
    kept: list[IntervalCounts] = []  # of each interval
    _times: "array[float]" = msgspec.field(default_factory=float_array)  # chunk times of the requests since `flush`,
    _ends: list[int] = []  # and where each request ends in them

    def __post_init__(self) -> None:
        self.kept = self.kept or [IntervalCounts() for _ in self.intervals]

    @property
    def keeps_all(self) -> bool:
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
        """Count the requests that were added. Call it before reading `minimum`, `maximum` or `kept`."""
        if not self._ends:
            return
        gaps = np.diff(np.array(self._times))
        within_request = np.ones(len(gaps), dtype=bool)
        within_request[np.array(self._ends[:-1], dtype=np.int64) - 1] = False
        gaps = gaps[within_request]
        self.minimum = min(self.minimum, float(gaps.min()))
        self.maximum = max(self.maximum, float(gaps.max()))
        for interval, kept in zip(self.intervals, self.kept, strict=True):
            kept.add(interval, gaps)
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
            merge_counts(mine, others)

    def counts_in(self, interval: Interval) -> IntervalCounts | None:
        """The counts for an interval. None: the gaps that were kept do not give them."""
        if interval in self.intervals:
            return self.kept[self.intervals.index(interval)]
        if not self.keeps_all:
            return None
        kept = IntervalCounts()
        kept.add(interval, np.asarray(self.kept[0].values))
        return kept


def percentile_of(parts: Sequence[Gaps], permille: int) -> float | None:
    """The exact percentile of the values of all parts together, as `stats.percentile` defines it.

    None when no interval that all parts have contains it.
    """
    rank = max(1, -(-sum(part.n for part in parts) * permille // 1000))
    for interval in dict.fromkeys(interval for part in parts for interval in part.intervals):
        known = [kept for part in parts if (kept := part.counts_in(interval)) is not None]
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


def has_all_percentiles(parts: Sequence[Gaps]) -> bool:
    return all(percentile_of(parts, permille) is not None for permille in PERMILLES.values())


def mean_gap_s(parts: Sequence[Gaps]) -> float:
    """The mean of all gaps. The gaps of a request add up to its span."""
    return math.fsum(span for part in parts for span in part.spans_s) / sum(part.n for part in parts)


class GapSample(msgspec.Struct):
    """Some gaps of some requests, evenly spaced over a file."""

    requests: int = 0
    values: "array[float]" = msgspec.field(default_factory=float_array)

    def add(self, chunks_s: list[float], first: int, step: int) -> None:
        sampled = np.diff(np.array(chunks_s))[first::step]
        if len(sampled):
            self.requests += 1
            self.values.frombytes(sampled.tobytes())


def intervals_around(samples: Sequence[GapSample], width: float) -> list[Interval]:
    """The intervals that should contain the percentiles of the sampled cells, and of all these cells together.

    They are as wide as if all gaps of a request were equal, the worst case for a sample of requests, times `width`.
    """
    intervals: list[Interval] = []
    pooled = GapSample()
    for sample in samples:
        merge_counts(pooled, sample)
    for sample in [*samples, pooled] if len(samples) > 1 else samples:
        if not sample.values:
            continue
        ordered = np.sort(np.asarray(sample.values))
        for permille in PERMILLES.values():
            p = permille / 1000
            half = width * max(_MIN_HALF_WIDTH, _HALF_WIDTH_ERRORS * math.sqrt(p * (1 - p) / sample.requests))
            low, high = math.floor((p - half) * len(ordered)), math.ceil((p + half) * len(ordered))
            low_gap = float(ordered[low]) if low >= 0 else -math.inf
            intervals.append(Interval(low_gap, float(ordered[high]) if high < len(ordered) else math.inf))
    return _merge_overlapping(intervals) or [ALL]


def _merge_overlapping(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for interval in sorted(intervals):
        if merged and interval.low <= merged[-1].high:
            merged[-1] = Interval(merged[-1].low, max(merged[-1].high, interval.high))
        else:
            merged.append(interval)
    return merged
