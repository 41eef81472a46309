"""Which load to probe next: the largest one that meets the SLOs, and the pairs of two loads that do.

On the assumption that a lower load never does worse. Pure: the caller runs a probe of what `next_level` or `next_pair`
names, and gives its evidence to `take`.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from harness.capacity.evidence import ProbeEvidence, ProbeState
from harness.capacity.levels import GRID_STEP, log_grid

CapacityKind = Literal["found", "more_than", "none", "unresolved"]
PairState = Literal["meets", "breaks", "unresolved"]

PROBE_ERROR = 0.15  # of one probe: the capacity needs two that passed, and the level above it two that failed
MASS = 0.95  # of the interval
RETRIES = 9  # of pairs without a result
_CLIP = 0.97  # no single probe is worth more than this probability
_CLIP_UNRESOLVED = 0.7


class SloCapacity(Struct, frozen=True, kw_only=True):
    """The highest level that meets the SLOs, with a 95 % interval; see docs/method.md.

    found: `level`, in low..high (inclusive). more_than: even the highest level meets them; `high` is None. none: not
    even one user does; `level` is 0. unresolved: no level has clear evidence on both sides, or the search was stopped
    early: `low` is the highest level that passed and `high` the last one below the first that failed; None where there
    is no such level. `unconfirmed`: the levels around the answer at which one probe decided, because none was left.
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


class Frontier(Struct, frozen=True, kw_only=True):
    """Which pairs of levels of two loads meet the SLOs.

    `states[i][j]`: what clear probes say of firsts[i] and seconds[j], directly or because a pair with more of both
    meets the SLOs or one with fewer breaks them. `largest[i]`: the largest second level that meets them next to
    firsts[i], None for none. `unresolved`: the pairs that were measured without clear evidence; in `largest` they count
    by what is likelier.
    """

    firsts: list[int]
    seconds: list[int]
    states: list[list[PairState]]
    largest: list[int | None]
    unresolved: list[tuple[int, int]] = []
    complete: bool  # False: the search was stopped early


class SearchProbe(Struct, frozen=True):
    """A probe that a search has taken."""

    level: int | tuple[int, int]
    state: ProbeState
    requests: int


def probe_limit(max_level: int, step: float = GRID_STEP) -> int:
    """How many probes a search makes at most: those of a bisection, two to confirm, one for a probe without result."""
    return math.ceil(math.log2(len(log_grid(max_level, step)) + 1)) + 3


class SloSearch:
    """Probabilistic bisection on a grid of levels, then fresh probes.

    The *capacity* is the largest level (users, or another unit of load) that meets all SLOs. Each state of the search,
    "the capacity is between this level of the grid and the next", has a probability: at first the width of its step on
    the scale of logarithms. A probe shifts it to one side by its own evidence (generalised probabilistic bisection,
    arXiv 1711.00843); an unresolved one shifts little. The next probe is at the median. When the capacity is in one
    step, a fresh probe of the answer and one of the step above must agree with it, else the search goes on.
    """

    def __init__(self, max_level: int, *, step: float = GRID_STEP) -> None:
        if max_level < 1:
            raise ValueError(f"the highest level must be at least 1 (got {max_level})")
        self.levels = log_grid(max_level, step)
        self.max_probes = probe_limit(max_level, step)
        self.results: list[SearchProbe] = []
        # State i: the capacity is at least levels[i - 1] and below levels[i]; the last one: at least the highest.
        widths = [math.log(2), *(math.log(b / a) for a, b in pairwise(self.levels)), math.log(2)]
        self._logs = [math.log(width) for width in widths]

    def take(self, level: int, probe: ProbeEvidence) -> None:
        """Learn from a probe. One that is still open counts as unresolved."""
        state = probe.stop()
        clip = _CLIP_UNRESOLVED if state == "unresolved" else _CLIP
        chance = min(clip, max(1 - clip, probe.chance))
        at = self.levels.index(level)
        self._logs = [log + math.log(chance if state > at else 1 - chance) for state, log in enumerate(self._logs)]
        self.results.append(SearchProbe(level, state, probe.requests))

    def posterior(self) -> list[tuple[int, float]]:
        """(level, probability that the capacity is this level or up to the next one); level 0: not even one."""
        top = max(self._logs)
        weights = [math.exp(log - top) for log in self._logs]
        return [(level, weight / sum(weights)) for level, weight in zip([0, *self.levels], weights, strict=True)]

    def next_level(self) -> int | None:
        """The level to probe next; None when the answer is as good as it gets."""
        left = self.max_probes - len(self.results)
        if left <= 0:
            return None
        low, high = self._bracket()
        to_confirm = [level for level in (low, high) if level is not None and self._net(level) in (-1, 1)]
        untried = self._open_levels(low or 0, high or self.levels[-1] + 1)
        if untried and left > len(to_confirm):
            return untried[_median([self._mass_at(level) for level in untried])]
        return min(to_confirm, key=self._tries) if to_confirm else None

    def _open_levels(self, low: int, high: int) -> list[int]:
        """The levels between the bounds of which the next probe is one.

        Levels without result are near the capacity, and so is what is between them: then the highest level that
        passes is searched below them and the lowest one that fails above them, where more levels are left.
        """
        between = [level for level in self.levels if low < level < high]
        tried = [level for level in between if self._tries(level)]
        if not tried:
            return between
        below = [level for level in between if level < tried[0]]
        above = [level for level in between if level > tried[-1]]
        return below if len(below) >= len(above) else above

    def answer(self) -> SloCapacity:
        """The answer by the probes so far."""
        low, high = self._bracket()
        first, last = self._interval()
        complete = self.next_level() is None
        posterior = [(level, chance) for level, chance in self.posterior() if chance > 1e-4]
        unconfirmed = [level for level in (low, high) if level is not None and abs(self._net(level)) < 2]
        capacity = partial(SloCapacity, complete=complete, unconfirmed=unconfirmed, posterior=posterior)
        if low == self.levels[-1]:
            return capacity(kind="more_than", level=low, low=first, high=None)
        if high == self.levels[0]:
            return capacity(kind="none", level=0, low=0, high=0, above=high)
        if low is None or high is None or not complete:
            last = None if high is None else high - 1
            return capacity(kind="unresolved", level=None, low=low, high=last, above=high)
        last = max(last or 0, high - 1)
        above = min((level for level in self.levels if level > last and self._net(level) < 0), default=None)
        return capacity(kind="found", level=low, low=min(first, low), high=last, above=above)

    def _tries(self, level: int) -> int:
        return sum(result.level == level for result in self.results)

    def _net(self, level: int) -> int:
        """Probes of this level that passed, less those that failed."""
        states = [result.state for result in self.results if result.level == level]
        return states.count("pass") - states.count("fail")

    def _bracket(self) -> tuple[int | None, int | None]:
        """The highest level that passed with none below it that failed, and the lowest one above it that failed."""
        nets = {level: self._net(level) for level in self.levels}
        cut = max(range(len(self.levels) + 1), key=lambda i: (
            sum(nets[level] for level in self.levels[:i]) - sum(nets[level] for level in self.levels[i:])))  # fmt: skip
        passed = [level for level in self.levels[:cut] if nets[level] > 0]
        failed = [level for level in self.levels[cut:] if nets[level] < 0]
        return (passed[-1] if passed else None), (failed[0] if failed else None)

    def _mass_at(self, level: int) -> float:
        """The probability of the states next to a level, which a probe of it separates."""
        masses, at = [mass for _, mass in self.posterior()], self.levels.index(level)
        return masses[at] + masses[at + 1]

    def _interval(self) -> tuple[int, int | None]:
        """The shortest run of states from both tails cut by (1 - MASS) / 2: first and last capacity; None: no end."""
        tail, states = (1 - MASS) / 2, self.posterior()
        ends: list[int | None] = [*(level - 1 for level in self.levels), None]
        below = 0.0
        first, last = 0, None
        for level, mass in states:
            if below <= tail:
                first = level
            below += mass
        above = 0.0
        for (_, mass), end in zip(reversed(states), reversed(ends), strict=True):
            if above <= tail:
                last = end
            above += mass
        return first, last


def _median(masses: Sequence[float]) -> int:
    """The place at which half of the mass is reached."""
    below = 0.0
    for place, mass in enumerate(masses):
        below += mass
        if below >= sum(masses) / 2:
            return place
    return len(masses) - 1


class FrontierSearch:
    """A saddleback walk: which pairs of levels of two loads meet the SLOs, such as 20 chat users and 4 agents.

    More of either load never helps, so the pairs that meet the SLOs end at a staircase. The walk starts at the fewest
    of the first load and the most of the second: from a pair that meets the SLOs it goes on to more of the first load,
    from one that breaks them to fewer of the second. A grid of n x m pairs takes n + m - 1 probes at most. A probe
    without a result is no bound: the walk goes on by what it makes more likely, and the probes that are left try such
    pairs again.
    """

    def __init__(self, firsts: Sequence[int], seconds: Sequence[int]) -> None:
        """`firsts` and `seconds`: the levels of both loads, ascending."""
        if not firsts or not seconds or sorted(set(firsts)) != [*firsts] or sorted(set(seconds)) != [*seconds]:
            raise ValueError("the levels of both loads must be given in ascending order")
        self.firsts, self.seconds = list(firsts), list(seconds)
        self.max_probes = len(firsts) + len(seconds) - 1 + RETRIES
        self.results: list[SearchProbe] = []
        self._at = 0, len(self.seconds) - 1
        self._chances: dict[tuple[int, int], float] = {}  # of each pair tried, as places
        self._clear: dict[tuple[int, int], float] = {}  # of those with a clear probe: 1 it meets the SLOs, 0 breaks

    def next_pair(self) -> tuple[int, int] | None:
        """The levels of the first and the second load to probe next; None at the end."""
        place = self._next()
        return None if place is None else (self.firsts[place[0]], self.seconds[place[1]])

    def take(self, pair: tuple[int, int], probe: ProbeEvidence) -> None:
        """Learn from a probe. One that is still open counts as unresolved."""
        state = probe.stop()
        place = self.firsts.index(pair[0]), self.seconds.index(pair[1])
        if place == self._at:
            i, j = place
            self._at = (i + 1, j) if probe.chance >= 0.5 else (i, j - 1)
        known = self._chances.get(place, 0.5)  # of an earlier probe without a result: both count
        odds = known / (1 - known) * probe.chance / max(1e-12, 1 - probe.chance)
        self._chances[place] = min(1 - 1e-9, max(1e-9, odds / (1 + odds)))
        if state in ("pass", "fail"):
            self._clear[place] = float(state == "pass")
        self.results.append(SearchProbe(pair, state, probe.requests))

    def answer(self) -> Frontier:
        """What the probes so far say."""
        states: list[list[PairState]] = []
        largest: list[int | None] = []
        for i in range(len(self.firsts)):
            row = [_implied((i, j), self._clear) for j in range(len(self.seconds))]
            states.append(["unresolved" if met is None else "meets" if met else "breaks" for met in row])
            likely = [j for j, met in enumerate(row) if met or met is None and _implied((i, j), self._chances)]
            largest.append(self.seconds[max(likely)] if likely else None)
        return Frontier(
            firsts=self.firsts,
            seconds=self.seconds,
            states=states,
            largest=largest,
            unresolved=[(self.firsts[i], self.seconds[j]) for i, j in self._chances if states[i][j] == "unresolved"],
            complete=self._next() is None,
        )

    def _next(self) -> tuple[int, int] | None:
        i, j = self._at
        while i < len(self.firsts) and j >= 0:
            known = _implied((i, j), self._clear)
            if known is None and (i, j) not in self._chances:
                self._at = i, j
                return i, j
            met = self._chances[i, j] >= 0.5 if known is None else known
            i, j = (i + 1, j) if met else (i, j - 1)
        self._at = i, j
        open_pairs = [place for place in self._chances if place not in self._clear]
        if not open_pairs or len(self.results) >= self.max_probes:
            return None
        tries = {place: self._tries(place) for place in open_pairs}
        place = min(open_pairs, key=lambda place: (tries[place], abs(self._chances[place] - 0.5)))
        return place if tries[place] < 2 else None

    def _tries(self, place: tuple[int, int]) -> int:
        pair = self.firsts[place[0]], self.seconds[place[1]]
        return sum(result.level == pair for result in self.results)


def _implied(place: tuple[int, int], chances: Mapping[tuple[int, int], float]) -> bool | None:
    """Whether a pair meets the SLOs because of one with at least, or at most, as much of both; None: unknown.

    Where wrong probes contradict each other, the more certain one counts.
    """
    i, j = place
    above = max((chance for (a, b), chance in chances.items() if a >= i and b >= j), default=0.0)
    below = min((chance for (a, b), chance in chances.items() if a <= i and b <= j), default=1.0)
    if above < 0.5 <= below or above == 1 - below:
        return None
    return above > 1 - below
