"""Exact percentiles of the gaps between chunks.

A million answers of 200 chunks have 1.6 GB of gaps. So they stay in one sorted array for each block of the file, which
is never copied, and a percentile is found by counting in these arrays.
"""

import math
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from harness.analysis.derive import float_array
from harness.judge.stats import Array

PERMILLES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990}


class Gaps(msgspec.Struct):
    """The gaps of a cell's successful measured requests, in seconds."""

    requests: int = 0  # that have gaps
    blocks: list[Array] = []  # the gaps of each block of the file, in ascending order
    _times: "array[float]" = msgspec.field(default_factory=float_array)  # chunk times of the requests since `flush`,
    _ends: list[int] = []  # and where each request ends in them

    def add(self, chunks_s: list[float]) -> None:
        if len(chunks_s) > 1:
            self.requests += 1
            self._times.fromlist(chunks_s)
            self._ends.append(len(self._times))

    def flush(self) -> None:
        """Close a block. Call it before reading `blocks`."""
        if not self._ends:
            return
        gaps = np.diff(np.array(self._times))
        within_request = np.ones(len(gaps), dtype=bool)
        within_request[np.array(self._ends[:-1], dtype=np.int64) - 1] = False
        self.blocks.append(np.sort(gaps[within_request]))
        self._times, self._ends = float_array(), []

    def merge(self, other: "Gaps") -> None:
        self.flush()
        other.flush()
        self.requests += other.requests
        self.blocks += other.blocks


def percentile_of(blocks: Sequence[Array], permille: int) -> float:
    """The exact percentile of the values of all blocks together, the smallest that so many per mille do not exceed.

    It halves the interval around the percentile until no other float is in it. Raises ValueError without a value.
    """
    rank = max(1, -(-sum(map(len, blocks)) * permille // 1000))
    low, high = min(float(block[0]) for block in blocks), max(float(block[-1]) for block in blocks)
    low = math.nextafter(low, -math.inf)
    while low < (middle := low + (high - low) / 2) < high:
        if sum(int(np.searchsorted(block, middle, side="right")) for block in blocks) >= rank:
            high = middle
        else:
            low = middle
    return high
