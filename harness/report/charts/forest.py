"""The intervals of the table's speedups as places on one common scale, drawn without any script."""

import math

from msgspec import Struct

from harness.summary import Verdict


class Forest(Struct, frozen=True):
    """A logarithmic scale that holds every interval and the 1 of the baseline."""

    low: float
    high: float

    @classmethod
    def of(cls, verdicts: list[Verdict]) -> "Forest":
        values = [v for verdict in verdicts for v in (verdict.ratio, verdict.low, verdict.high) if v and v > 0]
        low, high = min([0.9, *values]), max([1.1, *values])
        margin = (high / low) ** 0.06
        return cls(low / margin, high * margin)

    def place(self, ratio: float) -> float:
        """Where a ratio lies, 0 to 100."""
        inside = min(max(ratio, self.low), self.high)
        return round(100 * math.log(inside / self.low) / math.log(self.high / self.low), 2)
