"""What charts draw of a cell's records: some requests, and how much fell into each step of time.

The size of the page depends on the number of rows and cells, never on the number of requests.
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
from harness.analysis.derive import Latencies, doubles
from harness.judge.stats import Array
from harness.rundir.records import Request

FINE_S = 0.1  # width of a bin
MAX_FINE = 4_000_000  # bins of a cell, over four days: a record with an absurd time falls into the last
MAX_DOTS = 600  # requests of a row that are drawn at most, a quarter of them failed ones,
SLOWEST = 20  # and of them the slowest


class Dot(NamedTuple):
    """A measured request."""

    draw: int  # what chooses it: as good as random, and always the same
    cell: str
    sent_s: float  # within its cell
    took_s: float  # until the answer was whole, or until it failed
    ttft_s: float | None
    error: str | None


def thinned(dots: Iterable[Dot], number: int = MAX_DOTS) -> list[Dot]:
    """So many dots at most: the slowest, some failed ones, others at random.

    What is chosen from what was chosen of several parts is what would be chosen from all of them.
    """
    different = set(dots)
    good = {dot for dot in different if dot.error is None}
    failed = heapq.nsmallest(number // 4, different - good, key=lambda dot: dot[:4])
    slowest = heapq.nlargest(SLOWEST, good, key=lambda dot: (dot.took_s, *dot[:4]))
    others = good.difference(slowest)
    return [*failed, *slowest, *heapq.nsmallest(number - len(failed) - len(slowest), others, key=lambda dot: dot[:4])]


def bin_of(at_s: float) -> int:
    return max(0, min(int(at_s / FINE_S), MAX_FINE - 1))


class ChartCounts(Struct):
    """What charts draw of one cell's requests. Seconds count from the start of the cell's first load process."""

    dots: list[Dot] = []  # measured requests: all, or those that were chosen
    succeeded: int = 0  # measured requests
    failures: int = 0

    # How much fell into each bin of FINE_S: requests "sent" and "ended", "tokens"; of measured requests of an open
    # loop, when each was "due" and "gone".
    bins: Counter[tuple[str, int]] = field(default_factory=Counter)
    failed_s: Latencies = field(default_factory=Latencies)  # when measured requests failed, by kind
    first_measured_s: float = float("inf")
    first_sent_s: float = float("inf")
    last_ended_s: float = 0.0
    # Of tokens that are in no bin yet: of each request when it was sent, arrivals and tokens of each; all arrivals.
    streams: list[tuple[float, int, float]] = []
    arrivals_s: "array[float]" = field(default_factory=doubles)

    @property
    def zero_s(self) -> float:
        """The first measured request, or the first of all where none was measured."""
        return self.first_measured_s if self.first_measured_s < float("inf") else self.first_sent_s

    def add(self, request: Request, sent_s: float, counted: bool) -> None:
        """Count a request that was sent in that second of the cell. `counted`: the cell's numbers are about it."""
        if counted and request.error != "abandoned":
            self._add_dot(request, sent_s)
        sent = max(0.0, sent_s)
        ended = sent + request.ended_s
        self.bins["sent", bin_of(sent)] += 1
        self.bins["ended", bin_of(ended)] += 1
        self.first_sent_s = min(sent, self.first_sent_s)
        self.last_ended_s = max(ended, self.last_ended_s)
        if request.phase == "measured":
            self.first_measured_s = min(sent, self.first_measured_s)
            if request.scheduled_s is not None:
                self.bins["due", bin_of(sent + request.scheduled_s)] += 1
                self.bins["gone", bin_of(sent)] += 1
        # Without streaming all tokens come at the end; the tokens of a failed request are known by its chunks.
        arrivals = request.chunks_s or ([request.ended_s] if request.error is None else [])
        if request.output_tokens and arrivals:
            self.arrivals_s.fromlist(arrivals)
            self.streams.append((sent, len(arrivals), request.output_tokens / len(arrivals)))

    def _add_dot(self, request: Request, sent_s: float) -> None:
        draw = crc32(request.id.encode()) * 2654435761 & 0xFFFFFFFF
        took_s = request.ended_s if request.error is not None else derive.e2e_s(request) or 0.0
        self.dots.append(Dot(draw, request.cell, sent_s, took_s, derive.ttft_s(request), request.error))
        self.succeeded += request.error is None
        self.failures += request.error is not None
        if request.error is not None and request.error != "unfinished":
            self.failed_s[request.error].append(sent_s + request.ended_s)

    def reduce(self) -> None:
        """Put the tokens of the requests so far into bins, and keep some dots."""
        self.dots = thinned(self.dots)
        if not self.streams:
            return
        sent, sizes, each = (np.array(column) for column in zip(*self.streams, strict=True))
        at = np.array(self.arrivals_s) + np.repeat(sent, sizes)
        places = np.clip((at / FINE_S).astype(np.int64), 0, MAX_FINE - 1)
        first = int(places.min())
        tokens = np.bincount(places - first, weights=np.repeat(each, sizes))
        for place in np.flatnonzero(tokens).tolist():
            self.bins["tokens", first + place] += tokens[place]
        self.streams, self.arrivals_s = [], doubles()

    def between(self, what: str, low: int, high: int) -> Array:
        found = np.zeros(high - low)
        for (name, place), number in self.bins.items():
            if name == what and low <= place < high:
                found[place - low] = number
        return found
