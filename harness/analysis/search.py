"""The search for the largest load that meets the SLOs.

It assumes that a lower load is never worse. It does no I/O: the caller runs a probe of the load that `next_level`
returns, and passes its evidence to `take`.
"""

import math
from bisect import bisect_left, bisect_right
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal

from msgspec import Struct

from harness.analysis.evidence import ProbeEvidence, ProbeState
from harness.analysis.levels import log_grid

CapacityKind = Literal["found", "more_than", "none", "unresolved"]

MASS = 0.95  # probability of the interval
_MAX_CONFIDENCE = 0.97  # of a single probe: larger probabilities count as this one
_MAX_CONFIDENCE_UNRESOLVED = 0.7


class SloCapacity(Struct, frozen=True, kw_only=True):
    """The highest level that meets the SLOs, with a 95 % interval; see docs/method.md.

    found: `level`, in low..high (inclusive). more_than: even the highest level meets them; `high` is None. none: even
    the lowest level does not; `level` is 0. unresolved: no level has clear evidence on both sides, or the search was
    stopped early: `low` is the highest level that passed and `high` the last one below the first that failed; None
    where there is no such level. `unconfirmed`: levels next to the answer that only one probe decided, because no
    further probe was left.
    """

    kind: CapacityKind
    level: int | None
    low: int | None
    high: int | None
    above: int | None = None  # the smallest level above that failed ...
    broken: str | None = None  # ... and the SLO that it broke most clearly
    complete: bool = True  # False: the search was stopped early
    unconfirmed: list[int] = []
    posterior: list[tuple[int, float]] = []  # level, and the probability that it is the answer


class SearchProbe(Struct, frozen=True):
    """The result of a probe."""

    level: int
    state: ProbeState
    requests: int


def probe_limit(max_level: int) -> int:
    """The largest number of probes: those of a bisection, two to confirm, one more for a probe without result."""
    return math.ceil(math.log2(len(log_grid(max_level)) + 1)) + 3


class SloSearch:
    """Probabilistic bisection on a grid of levels, followed by confirming probes.

    The *capacity* is the largest level (users, or another unit of load) that meets all SLOs. Each state, "the capacity
    is between this level of the grid and the next", has a probability: at first the width of its step on a logarithmic
    scale. A probe shifts probability to one side by its evidence (generalised probabilistic bisection, arXiv
    1711.00843); an unresolved probe shifts little. The next probe is at the median. When the capacity is within one
    step, fresh probes of the answer and of the level above must agree with it, else the search continues.
    """

    def __init__(self, max_level: int) -> None:
        self.levels = log_grid(max_level)
        self.max_probes = probe_limit(max_level)
        self.results: list[SearchProbe] = []
        self.climbs = False  # start at the lowest level and double it until a probe fails: for slow servers
        # State i: the capacity is at least levels[i - 1] and below levels[i]; the last one: at least the highest.
        widths = [math.log(2), *(math.log(b / a) for a, b in pairwise(self.levels)), math.log(2)]
        self._logs = [math.log(width) for width in widths]

    def take(self, level: int, probe: ProbeEvidence) -> None:
        """Use the evidence of a probe. An open probe counts as unresolved."""
        result = probe.stop()
        confidence = _MAX_CONFIDENCE_UNRESOLVED if result == "unresolved" else _MAX_CONFIDENCE
        chance = min(confidence, max(1 - confidence, probe.chance))
        index = self.levels.index(level)
        self._logs = [log + math.log(chance if state > index else 1 - chance) for state, log in enumerate(self._logs)]
        self.results.append(SearchProbe(level, result, probe.requests))

    def posterior(self) -> list[tuple[int, float]]:
        """Each level with the probability that the capacity is between it and the next one. 0: below all levels."""
        top = max(self._logs)
        weights = [math.exp(log - top) for log in self._logs]
        return [(level, weight / sum(weights)) for level, weight in zip([0, *self.levels], weights, strict=True)]

    def next_level(self) -> int | None:
        """The level to probe next; None at the end of the search."""
        remaining = self.max_probes - len(self.results)
        if remaining <= 0:
            return None
        low, high = self._bracket()
        to_confirm = [level for level in (low, high) if level is not None and self._net_passes(level) in (-1, 1)]
        candidates = self._candidate_levels(low or 0, high or self.levels[-1] + 1)
        if self.climbs and candidates and high is None and remaining > len(to_confirm):
            return next((level for level in candidates if level >= 2 * (low or 0)), candidates[-1])
        if candidates and remaining > len(to_confirm):
            chances = list(accumulate(map(self._chance_around, candidates)))
            return candidates[bisect_left(chances, chances[-1] / 2)]
        return min(to_confirm, key=self._probe_count) if to_confirm else None

    def _candidate_levels(self, low: int, high: int) -> list[int]:
        """The levels between the bounds that may be probed next.

        Levels with unresolved probes are near the capacity, and so are the levels between them. So the search continues
        below or above all of these, where more levels are left.
        """
        between = [level for level in self.levels if low < level < high]
        unresolved = [level for level in between if self._probe_count(level)]
        if not unresolved:
            return between
        below = [level for level in between if level < unresolved[0]]
        above = [level for level in between if level > unresolved[-1]]
        return below if len(below) >= len(above) else above

    def answer(self) -> SloCapacity:
        """The answer after the probes so far."""
        low, high = self._bracket()
        first, last = self._interval()
        complete = self.next_level() is None
        posterior = [(level, chance) for level, chance in self.posterior() if chance > 1e-4]
        unconfirmed = [level for level in (low, high) if level is not None and abs(self._net_passes(level)) < 2]
        capacity = partial(SloCapacity, complete=complete, unconfirmed=unconfirmed, posterior=posterior)
        if low == self.levels[-1]:
            return capacity(kind="more_than", level=low, low=first, high=None)
        if high == self.levels[0]:
            return capacity(kind="none", level=0, low=0, high=0, above=high)
        if low is None or high is None or not complete:
            last = None if high is None else high - 1
            return capacity(kind="unresolved", level=None, low=low, high=last, above=high)
        last = max(last or 0, high - 1)
        above = min((level for level in self.levels if level > last and self._net_passes(level) < 0), default=None)
        return capacity(kind="found", level=low, low=min(first, low), high=last, above=above)

    def _probe_count(self, level: int) -> int:
        return sum(result.level == level for result in self.results)

    def _net_passes(self, level: int) -> int:
        """The number of passed probes of a level less the number of failed ones."""
        states = [result.state for result in self.results if result.level == level]
        return states.count("pass") - states.count("fail")

    def _bracket(self) -> tuple[int | None, int | None]:
        """The highest passed level below all failed ones, and the lowest failed level above it, each by `_net_passes`.

        Where results contradict each other, the boundary between the two is where most probes agree with it.
        """
        nets = [self._net_passes(level) for level in self.levels]
        boundary = max(range(len(nets) + 1), key=lambda index: sum(nets[:index]) - sum(nets[index:]))
        passed = [level for level, net in zip(self.levels[:boundary], nets, strict=False) if net > 0]
        failed = [level for level, net in zip(self.levels[boundary:], nets[boundary:], strict=True) if net < 0]
        return (passed[-1] if passed else None), (failed[0] if failed else None)

    def _chance_around(self, level: int) -> float:
        """The probability of the two states next to a level, which a probe of it separates."""
        chances, index = [chance for _, chance in self.posterior()], self.levels.index(level)
        return chances[index] + chances[index + 1]

    def _interval(self) -> tuple[int, int | None]:
        """The lowest and highest capacity, without tails of (1 - MASS) / 2 on either side. None: no upper bound."""
        chances = [chance for _, chance in self.posterior()]
        below, above = ([0.0, *accumulate(tail)] for tail in (chances[:-1], chances[:0:-1]))
        first, last = (bisect_right(tail, (1 - MASS) / 2) - 1 for tail in (below, above))  # states from either end
        highest: list[int | None] = [*(level - 1 for level in self.levels), None]  # capacity of each state
        return [0, *self.levels][first], highest[-1 - last]
