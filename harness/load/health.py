"""How hard the load process itself is at work: whether the instrument was the limit."""

import math
import time
from collections import Counter, deque

_WINDOW_S = 5.0
_LEAST_S = 1.0  # a shorter time says nothing
_PER_OCTAVE = 8  # buckets of the lag's histogram: each 9 % wider than the one before
_LEAST_LAG_NS = 1_000


class Health:
    """CPU use over short times, and how long arrived bytes waited to be read."""

    def __init__(self) -> None:
        self._used: deque[tuple[float, float]] = deque()  # (monotonic, CPU) each second of the last window
        self._most: float | None = None  # over whole windows
        self._lags: Counter[int] = Counter()

    def begin(self) -> None:
        """The first measured request is about to be sent."""
        if not self._used:
            self._used.append((time.monotonic(), time.process_time()))

    def sample(self) -> None:
        """To be called each second."""
        if not self._used:
            return
        now = (time.monotonic(), time.process_time())
        self._used.append(now)
        while now[0] - self._used[1][0] >= _WINDOW_S:
            self._used.popleft()
        if now[0] - self._used[0][0] >= _WINDOW_S:
            self._most = max(self._most or 0.0, self._share())

    def cpu_most(self) -> float | None:
        """Highest share of a core over a window; over the whole time, where that is shorter."""
        self.sample()
        if self._most is None and self._used and self._used[-1][0] - self._used[0][0] >= _LEAST_S:
            return self._share()
        return self._most

    def note_reads(self, arrivals: list[tuple[int, int | None]]) -> None:
        """Reads of an exchange: when each was, and the kernel's stamp of its bytes, in ns."""
        self._lags.update(
            int(_PER_OCTAVE * math.log2(max(read_ns - stamp_ns, _LEAST_LAG_NS)))
            for read_ns, stamp_ns in arrivals
            if stamp_ns is not None
        )

    def read_lag_p99_s(self) -> float | None:
        """99 % of all reads came at most so long after the kernel had the bytes; rounded up by at most 9 %."""
        left = math.ceil(0.99 * self._lags.total())
        for bucket in sorted(self._lags):
            left -= self._lags[bucket]
            if left <= 0:
                return float(2 ** ((bucket + 1) / _PER_OCTAVE) / 1e9)
        return None

    def _share(self) -> float:
        (first_s, first_cpu_s), (last_s, last_cpu_s) = self._used[0], self._used[-1]
        return (last_cpu_s - first_cpu_s) / (last_s - first_s)
