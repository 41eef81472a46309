"""Tokens and requests of a cell over time, counted in narrow bins while its records are read."""

from array import array

import numpy as np
from numpy.typing import NDArray

from harness.rundir.records import Request

Times = NDArray[np.float64]

FINE_S = 0.1  # width of a bin
MOST_FINE = 4_000_000  # bins of a cell, over four days: what a record with an absurd time falls into
FLUSH = 100_000  # chunk times held before they are counted
_BINS = ("tokens", "change", "due", "gone")


class BinCounts:
    """The bins of one cell while its records are read. Seconds count from the start of its first load process."""

    def __init__(self, zero_s: float) -> None:
        self.zero_s = zero_s
        self.first_bin = 0
        self.tokens: Times = np.zeros(1024)
        self.change = np.zeros(1024, dtype=np.int64)
        self.due = np.zeros(1024, dtype=np.int64)  # measured requests of an open loop: when each was due,
        self.gone = np.zeros(1024, dtype=np.int64)  # and when it went out
        self.first_measured_s: float | None = None
        self.first_sent_s: float | None = None
        self.last_ended_s = 0.0
        self._times = array("d")  # of chunks that are not counted yet, since sent
        self._streams: list[tuple[float, int, float]] = []  # of each request: sent, how many times, tokens of each

    def add(self, request: Request, offset_s: float) -> None:
        """Count a request; `offset_s` takes its process's clock to seconds of this cell."""
        sent = max(0.0, request.sent_s + offset_s)
        ended = sent + request.ended_s
        self._hold(bin_of(ended))
        self.change[bin_of(sent)] += 1
        self.change[bin_of(ended)] -= 1
        self.first_sent_s = sent if self.first_sent_s is None else min(sent, self.first_sent_s)
        self.last_ended_s = max(self.last_ended_s, ended)
        if request.phase == "measured" and (self.first_measured_s is None or sent < self.first_measured_s):
            self.first_measured_s = sent
        if request.phase == "measured" and request.scheduled_s is not None:
            self.due[bin_of(max(0.0, sent + request.scheduled_s))] += 1
            self.gone[bin_of(sent)] += 1
        # Without streaming all tokens come at the end; what a failed request had been given is known by its chunks.
        arrivals = request.chunks_s or ([request.ended_s] if request.error is None else [])
        if request.output_tokens and arrivals:
            self._hold(bin_of(sent + arrivals[-1]))
            self._times.fromlist(arrivals)
            self._streams.append((sent, len(arrivals), request.output_tokens / len(arrivals)))
            if len(self._times) > FLUSH:
                self.flush()

    def flush(self) -> None:
        if self._times:
            sent, sizes, weights = (np.array(column) for column in zip(*self._streams, strict=True))
            times = np.array(self._times) + np.repeat(sent, sizes)
            places = np.clip((times / FINE_S).astype(np.int64), 0, len(self.tokens) - 1)
            self.tokens += np.bincount(places, weights=np.repeat(weights, sizes), minlength=len(self.tokens))
            del self._times[:]
            self._streams.clear()

    def trim(self) -> None:
        """Leave out the empty bins at both ends, before it goes to another process."""
        self.flush()
        used = np.flatnonzero((self.tokens != 0) | (self.change != 0) | (self.due != 0))
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
        self.first_bin = first
        for name in _BINS:
            setattr(self, name, getattr(self, name)[first : last + 1].copy())

    def merge(self, other: "BinCounts") -> None:
        """Add the trimmed counts of another part of the file."""
        first, end = other.first_bin, other.first_bin + len(other.tokens)
        self._hold(max(end, bin_of(other.last_ended_s)))
        for name in _BINS:
            getattr(self, name)[first:end] += getattr(other, name)
        for name, value in (("first_measured_s", other.first_measured_s), ("first_sent_s", other.first_sent_s)):
            mine = getattr(self, name)
            if value is not None and (mine is None or value < mine):
                setattr(self, name, value)
        self.last_ended_s = max(self.last_ended_s, other.last_ended_s)

    def _hold(self, place: int) -> None:
        """Make room for a bin."""
        if place >= len(self.tokens):
            more = max(place + 1 - len(self.tokens), len(self.tokens))
            for name in _BINS:
                setattr(self, name, np.pad(getattr(self, name), (0, more)))


def bin_of(at_s: float) -> int:
    return max(0, min(int(at_s / FINE_S), MOST_FINE - 1))
