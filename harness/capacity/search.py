"""Find the largest load that meets the SLOs: probabilistic bisection on a grid of levels, then fresh probes.

The *capacity* is the largest level (users, or another unit of load) that meets all SLOs, on the assumption that a
lower load never does worse. The grid has every level up to 1 / STEP and then steps of STEP. Each state of the search,
"the capacity is between this level of the grid and the next", has a probability; all are equally likely at first. A
probe shifts it to one side by its own evidence (generalised probabilistic bisection, arXiv 1711.00843); an unresolved
one shifts little. The next probe is at the median. When the capacity is in one step, a fresh probe of the answer and
one of the step above must agree with it, else the search goes on.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from harness.capacity.evidence import ERROR, MAX_BLOCKS, ProbeEvidence, ProbeState

AnswerKind = Literal["found", "more_than", "none", "unresolved"]

STEP = 0.1
MASS = 0.95  # of the interval
_CLIP = 0.97  # no single probe is worth more than this probability
_CLIP_UNRESOLVED = 0.7


class ProbeResult(msgspec.Struct, frozen=True):
    """One probe: `attainment` is the share of requests that met each SLO, `chance` its evidence that all are met."""

    level: int
    state: ProbeState
    blocks: int
    requests: int
    attainment: list[float | None]
    chance: float


class CapacityAnswer(msgspec.Struct, frozen=True):
    """What the search found.

    found: `level` meets the SLOs, and the capacity is in low..high (inclusive) with a probability of 95 %; high + 1 is
    the level that broke them. more_than: even the highest level meets them (`high` is None). none: not even one user
    does (`level` is 0). unresolved: no level has clear evidence on both sides; `level` is the highest one that passed,
    or None.
    """

    kind: AnswerKind
    level: int | None
    low: int
    high: int | None
    probes: list[ProbeResult]


def log_grid(max_level: int, step: float = STEP) -> list[int]:
    """Levels from 1 to max_level, each larger by `step`, at least by 1."""
    levels = [1]
    while levels[-1] < max_level:
        levels.append(min(max_level, max(levels[-1] + 1, math.floor(levels[-1] * (1 + step)))))
    return levels


def probe_limit(max_level: int, step: float = STEP) -> int:
    """How many probes a search makes at most: those of a bisection, two to confirm, one for a probe without result."""
    return math.ceil(math.log2(len(log_grid(max_level, step)) + 1)) + 3


class SloSearch:
    """Ask `next_level`, run a `probe` of it, give it to `take`; when there is no next level, read `answer`.

    shares: of each SLO, the share of requests that must meet it. error: of each probe, on each side. max_probes: None
    for what `probe_limit` says.
    """

    def __init__(
        self,
        max_level: int,
        shares: Sequence[float] = (0.95,),
        *,
        step: float = STEP,
        error: float = ERROR,
        max_blocks: int = MAX_BLOCKS,
        max_probes: int | None = None,
    ) -> None:
        if max_level < 1:
            raise ValueError(f"the highest level must be at least 1 (got {max_level})")
        self.levels = log_grid(max_level, step)
        self.max_probes = max_probes or probe_limit(max_level, step)
        self.results: list[ProbeResult] = []
        self._shares, self._error, self._max_blocks = tuple(shares), error, max_blocks
        # State i: the capacity is at least levels[i - 1] and below levels[i]; the last one: at least the highest.
        self._logs = [0.0] * (len(self.levels) + 1)

    def probe(self, level: int) -> ProbeEvidence:
        """A fresh probe, to be filled with the blocks of a run at this level."""
        if level not in self.levels:
            raise ValueError(f"{level} is no level of this search")
        return ProbeEvidence(self._shares, error=self._error, max_blocks=self._max_blocks)

    def take(self, level: int, probe: ProbeEvidence) -> None:
        """Learn from a probe. One that is still open counts as unresolved."""
        state = probe.stop()
        clip = _CLIP_UNRESOLVED if state == "unresolved" else _CLIP
        chance = min(clip, max(1 - clip, probe.chance))
        at = self.levels.index(level)
        self._logs = [log + math.log(chance if state > at else 1 - chance) for state, log in enumerate(self._logs)]
        requests = sum(block[0][1] for block in probe.blocks)
        self.results.append(ProbeResult(level, state, len(probe.blocks), requests, probe.attainment, probe.chance))

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
        return to_confirm[0] if to_confirm else None

    def _open_levels(self, low: int, high: int) -> list[int]:
        """The levels between the bounds of which the next probe is one.

        Levels without result are near the capacity, and so is what is between them: then the highest level that
        passes is searched below them and the lowest one that fails above them, where more levels are left.
        """
        between = [level for level in self.levels if low < level < high]
        tried = [level for level in between if self._tried(level)]
        if not tried:
            return between
        below = [level for level in between if level < tried[0]]
        above = [level for level in between if level > tried[-1]]
        return below if len(below) >= len(above) else above

    def answer(self) -> CapacityAnswer:
        """The answer by the probes so far."""
        low, high = self._bracket()
        first, last = self._interval()
        if low == self.levels[-1]:
            return CapacityAnswer("more_than", low, first, None, self.results)
        if high == self.levels[0]:
            return CapacityAnswer("none", 0, 0, 0, self.results)
        if low is None or high is None:
            return CapacityAnswer("unresolved", low, first, last, self.results)
        return CapacityAnswer("found", low, min(first, low), max(last or 0, high - 1), self.results)

    def _tried(self, level: int) -> bool:
        return any(result.level == level for result in self.results)

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
        for (level, mass), _ in zip(states, ends, strict=True):
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
