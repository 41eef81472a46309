"""How hard the load process itself is at work: whether the instrument was the limit."""

import math
import time
from collections import Counter, deque
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from harness.load.answer import Answer
from harness.load.exchange import Exchange
from harness.rundir.records import LATE_READ_S

TICK_S = 0.05
_WINDOW_S = 5.0
_MOST_VALUES = 10_000  # different lags; three digits of up to a second are 3,600
_LEAST_S = 1.0  # a shorter time says nothing
_SCHEDSTAT = Path("/proc/self/schedstat")  # of the main thread, which does all the work: ns run, ns waited, ...


class _Use(NamedTuple):
    """What it had used until a moment."""

    at_s: float  # monotonic
    cpu_s: float
    waited_s: float  # for a core; 0 where that is not counted


class Health:
    """CPU use over short times, how long arrived bytes waited to be read, and how late the event loop ran."""

    def __init__(self) -> None:
        self._used: deque[_Use] = deque()  # each second of the last window
        self._most: float | None = None  # over whole windows
        self._lags: Counter[int] = Counter()
        self._loop_lags: Counter[int] = Counter()
        self._began: tuple[float, float | None] | None = None  # monotonic, and waited for a core so far

    def begin(self) -> None:
        """The first measured request is about to be sent."""
        if not self._used:
            self._used.append(_use())
            self._began = (time.monotonic(), _waited_s())

    def sample(self) -> None:
        """To be called each second."""
        if not self._used:
            return
        now = _use()
        self._used.append(now)
        while now.at_s - self._used[1].at_s >= _WINDOW_S:
            self._used.popleft()
        if now.at_s - self._used[0].at_s >= _WINDOW_S:
            self._most = max(self._most or 0.0, self._share())

    def cpu_most(self) -> float | None:
        """Highest share of a core over a window; over the whole time, where that is shorter."""
        self.sample()
        return self._share() if self._most is None and self._known() else self._most

    def busy_now(self) -> float | None:
        """Share of the last window, or what there is of it, in which it ran, or waited for a core that others had."""
        if not self._known():
            return None
        first, last = self._used[0], self._used[-1]
        return self._share() + (last.waited_s - first.waited_s) / (last.at_s - first.at_s)

    def core_wait(self) -> float | None:
        """Share of the time since the first measured request in which it waited for a core."""
        waited_s = _waited_s()
        if self._began is None or waited_s is None or self._began[1] is None:
            return None
        past_s = time.monotonic() - self._began[0]
        return (waited_s - self._began[1]) / past_s if past_s >= _LEAST_S else None

    def note_reads(self, lags_us: list[int]) -> None:
        """How long the bytes of each read had been there, in microseconds."""
        self._lags.update(lags_us)
        self._lags = _bounded(self._lags)

    def note_loop(self, late_s: float) -> None:
        """How much later than it was due the event loop ran something that is due each TICK_S.

        What fell due while it did not run would have been late as well: it counts, or a long stop would be one of many.
        """
        if not self._used:
            return
        late_us = max(0, round(late_s * 1e6))
        self._loop_lags.update(range(late_us, -1, -round(TICK_S * 1e6)))
        self._loop_lags = _bounded(self._loop_lags)

    def read_lag_p99_s(self) -> float | None:
        """99 % of all reads came at most so long after the kernel had the bytes (see `_bounded`)."""
        return _percentile_s(self._lags, 0.99)

    def loop_lag_s(self, share: float) -> float | None:
        """So much of what was due ran at most so late (see `_bounded`). None: too little was due to tell."""
        return _percentile_s(self._loop_lags, share) if self._loop_lags.total() * (1 - share) >= 1 else None

    def loop_lag_mean_s(self) -> float | None:
        """None: it ran for less than a second, of which one pause is most of the time."""
        asked = self._loop_lags.total()
        if asked * TICK_S < _LEAST_S:
            return None
        return sum(lag_us * number for lag_us, number in self._loop_lags.items()) / asked / 1e6

    def loop_lag_most_s(self) -> float | None:
        """Its longest pause. None: nothing was due."""
        return max(self._loop_lags) / 1e6 if self._loop_lags else None

    def _known(self) -> bool:
        return bool(self._used) and self._used[-1].at_s - self._used[0].at_s >= _LEAST_S

    def _share(self) -> float:
        first, last = self._used[0], self._used[-1]
        return (last.cpu_s - first.cpu_s) / (last.at_s - first.at_s)


def coalesced_late(exchange: Exchange, answer: Answer) -> int | None:
    """How many chunks shared a read that came late. None: none shared one, or there are no stamps.

    Of a read in good time the kernel had all bytes at once: the server, a proxy or the network sent them together. The
    stamp is that of its last bytes, so that a late read may look timely, and more often so the faster the stream is.
    """
    if not answer.coalesced or answer.clock != "kernel":
        return None
    start_ns, arrivals = exchange.start_ns, exchange.arrivals
    lags_us = {(at - start_ns) / 1e9: lag for at, lag in zip(arrivals.times_ns(), arrivals.lags_us(), strict=True)}
    shared = [mine for mine, later in pairwise(answer.chunks_s) if mine == later]
    return sum(lags_us[at] > LATE_READ_S * 1e6 for at in shared)


def _percentile_s(values_us: Counter[int], share: float) -> float | None:
    left = math.ceil(share * values_us.total())
    for value_us in sorted(values_us):
        left -= values_us[value_us]
        if left <= 0:
            return max(value_us, 0) / 1e6
    return None


def _bounded(values_us: Counter[int]) -> Counter[int]:
    """The same values. Where too many differ, they keep three digits: memory must not grow with time."""
    if len(values_us) <= _MOST_VALUES:
        return values_us
    rounded: Counter[int] = Counter()
    for value_us, number in values_us.items():
        rounded[round(value_us, 3 - len(str(abs(value_us))))] += number
    return rounded


def _use() -> _Use:
    return _Use(time.monotonic(), time.process_time(), _waited_s() or 0.0)


def _waited_s() -> float | None:
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not Linux, or a kernel that does not count it
        return None
