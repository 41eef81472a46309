"""How hard the load process itself is at work: whether the instrument was the limit."""

import math
import time
from collections import Counter, deque

_WINDOW_S = 5.0
_LEAST_S = 1.0  # a shorter time says nothing


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

    def note_reads(self, lags_us: list[int]) -> None:
        """How long the bytes of each read had been there, in microseconds."""
        self._lags.update(lags_us)

    def read_lag_p99_s(self) -> float | None:
        """99 % of all reads came at most so long after the kernel had the bytes, to a microsecond."""
        left = math.ceil(0.99 * self._lags.total())
        for lag_us in sorted(self._lags):
            left -= self._lags[lag_us]
            if left <= 0:
                return max(lag_us, 0) / 1e6
        return None

    def _share(self) -> float:
        (first_s, first_cpu_s), (last_s, last_cpu_s) = self._used[0], self._used[-1]
        return (last_cpu_s - first_cpu_s) / (last_s - first_s)
