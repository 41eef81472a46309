"""Counts for the charts of a cell: a sample of its requests, and requests and tokens in bins of time.

So the size of a report depends on the number of rows and cells, never on the number of requests.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

import numpy as np
from msgspec import Struct, field

from harness.analysis import derive
from harness.analysis.derive import Latencies, float_array
from harness.judge.stats import Array
from harness.rundir.records import Request

FINE_S = 0.1  # width of a bin
MAX_FINE = 4_000_000  # bins of a cell, over four days; later times count in the last bin
MAX_DOTS = 600  # requests drawn of a row; at most a quarter of them failed
SLOWEST = 20  # of the dots: the slowest requests, which are always drawn


class Dot(NamedTuple):
    """A measured request."""

    draw: int  # a hash of the request's id: the dots with the lowest ones are drawn
    cell: str
    sent_s: float  # since the start of its cell
    took_s: float  # until the end of the answer or the failure
    error: str | None


def thin_dots(dots: Iterable[Dot], number: int = MAX_DOTS) -> list[Dot]:
    """Select at most `number` dots: the slowest, some failed ones, others at random.

    Selecting again from the selections of several parts gives the same dots as selecting from all requests at once.
    """
    unique = set(dots)
    good = {dot for dot in unique if dot.error is None}
    failed = heapq.nsmallest(number // 4, unique - good, key=lambda dot: dot[:4])
    slowest = heapq.nlargest(SLOWEST, good, key=lambda dot: (dot.took_s, *dot[:4]))
    others = good.difference(slowest)
    return [*failed, *slowest, *heapq.nsmallest(number - len(failed) - len(slowest), others, key=lambda dot: dot[:4])]


def bin_index(at_s: float) -> int:
    return max(0, min(int(at_s / FINE_S), MAX_FINE - 1))


class ChartCounts(Struct):
    """Chart data of one cell. Times are seconds since the start of the cell's first load process."""

    dots: list[Dot] = []  # measured requests; after `reduce` only a selection
    succeeded: int = 0  # measured requests
    failures: int = 0
    # By name and bin of FINE_S: requests "sent" and "ended", and "tokens".
    bins: Counter[tuple[str, int]] = field(default_factory=Counter)
    failed_s: Latencies = field(default_factory=Latencies)  # when measured requests failed, by kind of error
    first_measured_s: float = float("inf")
    first_sent_s: float = float("inf")
    last_ended_s: float = 0.0
    # Tokens that are not yet in bins. Of each request: sent at, number of arrivals, tokens of each arrival.
    streams: list[tuple[float, int, float]] = []
    arrivals_s: "array[float]" = field(default_factory=float_array)  # of all these requests, since each was sent

    @property
    def start_s(self) -> float:
        """When the first measured request was sent, or the first request where none was measured."""
        return self.first_measured_s if self.first_measured_s < float("inf") else self.first_sent_s

    def add(self, request: Request, sent_s: float, counted: bool) -> None:
        """Count a request that was sent at `sent_s`. `counted`: whether the cell's numbers include it."""
        if counted and request.error != "abandoned":
            self._add_dot(request, sent_s)
        sent = max(0.0, sent_s)
        ended = sent + request.ended_s
        self.bins["sent", bin_index(sent)] += 1
        self.bins["ended", bin_index(ended)] += 1
        self.first_sent_s = min(sent, self.first_sent_s)
        self.last_ended_s = max(ended, self.last_ended_s)
        if request.phase == "measured":
            self.first_measured_s = min(sent, self.first_measured_s)
        # Without streaming all tokens arrive at the end; tokens of a failed request are known by its chunks only.
        arrivals = request.chunks_s or ([request.ended_s] if request.error is None else [])
        if request.output_tokens and arrivals:
            self.arrivals_s.fromlist(arrivals)
            self.streams.append((sent, len(arrivals), request.output_tokens / len(arrivals)))

    def _add_dot(self, request: Request, sent_s: float) -> None:
        draw = crc32(request.id.encode()) * 2654435761 & 0xFFFFFFFF
        took_s = request.ended_s if request.error is not None else derive.e2e_s(request) or 0.0
        self.dots.append(Dot(draw, request.cell, sent_s, took_s, request.error))
        self.succeeded += request.error is None
        self.failures += request.error is not None
        if request.error is not None and request.error != "unfinished":
            self.failed_s[request.error].append(sent_s + request.ended_s)

    def reduce(self) -> None:
        """Move the tokens of the requests so far into bins, and select dots."""
        self.dots = thin_dots(self.dots)
        if not self.streams:
            return
        sent, arrivals, tokens_each = (np.array(column) for column in zip(*self.streams, strict=True))
        at_s = np.array(self.arrivals_s) + np.repeat(sent, arrivals)
        bins = np.clip((at_s / FINE_S).astype(np.int64), 0, MAX_FINE - 1)
        first = int(bins.min())
        tokens = np.bincount(bins - first, weights=np.repeat(tokens_each, arrivals))
        for index in np.flatnonzero(tokens).tolist():
            self.bins["tokens", first + index] += tokens[index]
        self.streams, self.arrivals_s = [], float_array()

    def bin_counts(self, name: str, low: int, high: int) -> Array:
        """The counts of this name in the bins from `low` up to `high`, which is excluded."""
        counts = np.zeros(high - low)
        for (bin_name, index), count in self.bins.items():
            if bin_name == name and low <= index < high:
                counts[index - low] = count
        return counts
