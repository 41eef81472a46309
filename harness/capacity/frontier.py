"""Two classes of load next to each other: which pairs of levels meet the SLOs? For example 20 chat users and 4 agents.

More of either class never helps, so the pairs that meet the SLOs end at a staircase. The walk (saddleback search)
starts at the fewest of the first class and the most of the second: from a pair that meets the SLOs it goes on to more
of the first class, from one that breaks them to fewer of the second. A grid of n x m pairs takes n + m - 1 probes at
most. A probe without a result is no bound: the walk goes on by what it makes more likely, and the probes that are left
try such pairs again.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from harness.capacity.evidence import ERROR, MAX_BLOCKS, ProbeEvidence, ProbeState

CellState = Literal["meets", "breaks", "unresolved"]
RETRIES = 9


class FrontierProbe(msgspec.Struct, frozen=True):
    """One probe of a pair of levels; `chance`: the probability that it meets the SLOs, by this probe alone."""

    first: int
    second: int
    state: ProbeState
    blocks: int
    requests: int
    attainment: list[float | None]
    chance: float


class FrontierAnswer(msgspec.Struct, frozen=True):
    """`states[i][j]`: what clear probes say of firsts[i] and seconds[j], directly or because a pair with more of both
    meets the SLOs or one with fewer breaks them. `largest[i]`: the largest second level that meets the SLOs next to
    firsts[i], None for none; pairs without clear evidence count by what is more likely."""

    firsts: list[int]
    seconds: list[int]
    states: list[list[CellState]]
    largest: list[int | None]
    probes: list[FrontierProbe]


class FrontierSearch:
    """Ask `next_pair`, run a `probe` of it, give it to `take`; when there is no next pair, read `answer`.

    firsts, seconds: the levels of both classes, ascending. shares: of each SLO (of either class) the share of requests
    that must meet it.
    """

    def __init__(
        self,
        firsts: Sequence[int],
        seconds: Sequence[int],
        shares: Sequence[float] = (0.95,),
        *,
        error: float = ERROR,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        if not firsts or not seconds or sorted(set(firsts)) != [*firsts] or sorted(set(seconds)) != [*seconds]:
            raise ValueError("the levels of both classes must be given in ascending order")
        self.firsts, self.seconds = list(firsts), list(seconds)
        self.results: list[FrontierProbe] = []
        self._shares, self._error, self._max_blocks = tuple(shares), error, max_blocks
        self._at = 0, len(self.seconds) - 1
        self._chances: dict[tuple[int, int], float] = {}  # of each pair tried, as places
        self._clear: dict[tuple[int, int], bool] = {}

    def probe(self) -> ProbeEvidence:
        return ProbeEvidence(self._shares, error=self._error, max_blocks=self._max_blocks)

    def next_pair(self) -> tuple[int, int] | None:
        """The levels of the first and the second class to probe next; None at the end."""
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
            self._clear[place] = state == "pass"
        requests = sum(max(total for _, total in block) for block in probe.blocks)
        self.results.append(FrontierProbe(*pair, state, len(probe.blocks), requests, probe.attainment, probe.chance))

    def answer(self) -> FrontierAnswer:
        """What the probes so far say."""
        clear = {place: 1.0 if met else 0.0 for place, met in self._clear.items()}
        states: list[list[CellState]] = []
        largest: list[int | None] = []
        for i in range(len(self.firsts)):
            row = [self._implied((i, j), clear) for j in range(len(self.seconds))]
            states.append(["unresolved" if met is None else "meets" if met else "breaks" for met in row])
            likely = [j for j in range(len(row)) if row[j] or row[j] is None and self._implied((i, j), self._chances)]
            largest.append(self.seconds[max(likely)] if likely else None)
        return FrontierAnswer(self.firsts, self.seconds, states, largest, self.results)

    def _next(self) -> tuple[int, int] | None:
        i, j = self._at
        while i < len(self.firsts) and j >= 0:
            known = self._implied((i, j), {place: float(met) for place, met in self._clear.items()})
            if known is None and (i, j) not in self._chances:
                self._at = i, j
                return i, j
            met = self._chances[i, j] >= 0.5 if known is None else known
            i, j = (i + 1, j) if met else (i, j - 1)
        self._at = i, j
        open_pairs = [place for place in self._chances if place not in self._clear]
        limit = len(self.firsts) + len(self.seconds) - 1 + RETRIES
        if not open_pairs or len(self.results) >= limit:
            return None
        tries = {place: self._tries(place) for place in open_pairs}
        place = min(open_pairs, key=lambda place: (tries[place], abs(self._chances[place] - 0.5)))
        return place if tries[place] < 2 else None

    def _tries(self, place: tuple[int, int]) -> int:
        pair = self.firsts[place[0]], self.seconds[place[1]]
        return sum((result.first, result.second) == pair for result in self.results)

    def _implied(self, place: tuple[int, int], chances: dict[tuple[int, int], float]) -> bool | None:
        """Whether a pair meets the SLOs because of one with at least, or at most, as much of both; None: unknown.

        Where wrong probes contradict each other, the more certain one counts.
        """
        i, j = place
        above = max((chance for (a, b), chance in chances.items() if a >= i and b >= j), default=0.0)
        below = min((chance for (a, b), chance in chances.items() if a <= i and b <= j), default=1.0)
        if above < 0.5 <= below or above == 1 - below:
            return None
        return above > 1 - below
