"""The gaps between chunks: all of them, or of a long file how often each whole microsecond occurs.

A million answers of 200 chunks have 1.6 GB of gaps. In whole microseconds, a tenth of the last digit that a report
prints, they are some thousands of counts.
"""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from harness.analysis.derive import doubles
from harness.judge.stats import Array, percentile
from harness.summary import NEEDED, NO_SAMPLE, Distribution

PERMILLES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990}


class Gaps(msgspec.Struct):
    """The gaps of a cell's successful measured requests."""

    requests: int = 0  # that they come from
    times_s: "array[float]" = msgspec.field(default_factory=doubles)  # of chunks, with an infinity after each request
    counts: Counter[int] = msgspec.field(default_factory=Counter)  # of a long file: gaps by microseconds

    def add(self, chunks_s: list[float]) -> None:
        if len(chunks_s) > 1:
            self.requests += 1
            self.times_s.fromlist([*chunks_s, math.inf])

    def values_s(self) -> Array:
        gaps: Array = np.diff(np.array(self.times_s))
        return gaps[np.isfinite(gaps)]

    def count(self) -> None:
        """Keep counts instead of values."""
        values, numbers = np.unique(np.rint(1e6 * self.values_s()).astype(np.int64), return_counts=True)
        self.counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
        del self.times_s[:]


def gap_distribution(parts: Sequence[Gaps]) -> Distribution:
    """Statistics of the chunk gaps of some cells together. The gaps of a request are not independent: a percentile
    needs as many requests as any other, and has no interval.
    """
    counts: Counter[int] = sum((part.counts for part in parts), Counter())
    requests = sum(part.requests for part in parts)
    if not requests:
        return NO_SAMPLE
    if counts:
        values = np.array(sorted(counts)) / 1e6
        ends = np.cumsum([counts[value] for value in sorted(counts)])
        n = int(ends[-1])
        mean = sum(value * number for value, number in counts.items()) / n / 1e6
        found = {at: values[np.searchsorted(ends, max(1, -(-n * share // 1000)))] for at, share in PERMILLES.items()}
    else:
        values = np.sort(np.concatenate([part.values_s() for part in parts]))
        n, mean = len(values), float(values.mean())
        found = {at: percentile(values, share) for at, share in PERMILLES.items()}
    known: dict[str, Any] = {at: float(value) for at, value in found.items() if requests >= NEEDED[at]}
    return Distribution(n=n, mean=mean, min=float(values[0]), max=float(values[-1]), **known)
