"""Evidence of one probe: does a server meet its SLOs at this load? A test that may stop after any block.

An SLO such as `ttft_p95 <= 2 s` says that at least 95 % of the requests have a TTFT of at most 2 s: its *share* is
0.95. Requests that are served together share their fate, so the sample is not the request. A *block* is all requests
that end within a time of BLOCK_ANSWERS answers. A request that failed does not meet the SLO.

**The test** is a bet on each block, at fair odds if the attainment were just the share (a test martingale: Waudby-Smith
and Ramdas, "Estimating means of bounded random variables by betting", 2024). A bet on "at least the share" wins by how
far the block's attainment is above the share, and loses by how far it is below; another bets on the opposite. If the
truth is on the other side, a bet's wealth exceeds 1 / error with a probability of at most `error`, however often one
looks (Ville's inequality), so a probe stops when it does:

- `pass`: of every SLO the wealth that was bet on "at least the share". No correction: a wrong pass needs a wrong test
  of the very SLO that is broken.
- `fail`: of one SLO the wealth that was bet on "less", at the error divided by the number of SLOs (Bonferroni).
- `unresolved`: neither after `max_blocks`, or earlier when at the pace of its later half neither will be reached by
  then. It is no bound, in neither direction.

How requests of a block depend on each other does not matter; that blocks are independent does. What no test can rule
out is that rare incidents, which a short probe does not meet, lose whole blocks. It is taken that an incident loses no
more than MAX_LOSS of a block, which is longer than an answer; a block that loses more counts as one that loses as much.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

ProbeState = Literal["open", "pass", "fail", "unresolved"]
Block = Sequence[tuple[int, int]]  # for each SLO: requests that met it, requests

BLOCK_ANSWERS = 3  # a block lasts as long as so many answers, thinking included
MAX_LOSS = 1 / BLOCK_ANSWERS  # what an incident loses of a block
ERROR = 0.08  # of a probe that decides alone
MAX_BLOCKS = 40  # for shares up to ...
_SHARE = 0.95  # ... this one; a higher one needs as many more as it allows fewer requests to miss the SLO
MIN_BLOCKS = 3  # two can be what is left of the start
HOPE = 0.4  # from this share of `max_blocks` on
PACE = 2.0
LEANING = 0.05

# What a block may lose of a bet's wealth at most: a mixture of bets, careful ones for attainments near the share.
_STAKES = np.array([0.1, 0.4, 0.9])
_WEIGHTS = np.log(np.array([0.1, 0.2, 0.7]))


def block_limit(shares: Sequence[float]) -> int:
    """How many blocks a probe of these shares takes at most."""
    return round(MAX_BLOCKS * max(1.0, (1 - _SHARE) / (1 - max(shares))))


class ShareEvidence:
    """What blocks say of one SLO, whose `share` of requests must meet it."""

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"the share of requests that must meet an SLO must be between 0 and 1 (got {share})")
        self._share = share
        # A block is at most so far below the share that it counts, and at most so far above it.
        self._below, self._above = min(share, max(MAX_LOSS, 4 * (1 - share)) - (1 - share)), 1 - share
        self._blocks = self._requests = 0
        self._wealth = np.zeros((2, len(_STAKES)))  # logarithms: bets on "at least the share", and on "less"

    def add(self, met: int, total: int) -> None:
        """Count a block; one without requests says nothing."""
        if not 0 <= met <= total:
            raise ValueError(f"a block cannot have {met} of {total} requests that met an SLO")
        if not total:
            return
        self._blocks, self._requests = self._blocks + 1, self._requests + total
        surplus = (met - self._share * total) * self._blocks / self._requests  # blocks count by their requests
        self._wealth[0] += np.log1p(_STAKES * max(surplus, -self._below) / self._below)
        self._wealth[1] += np.log1p(_STAKES * -min(surplus, self._above) / self._above)

    @property
    def for_pass(self) -> float:
        """Logarithm of the evidence against an attainment below the share."""
        return float(np.logaddexp.reduce(self._wealth[0] + _WEIGHTS))

    @property
    def for_fail(self) -> float:
        """Logarithm of the evidence against an attainment of at least the share."""
        return float(np.logaddexp.reduce(self._wealth[1] + _WEIGHTS))

    @property
    def chance(self) -> float:
        """The probability that the attainment is at least the share, where both were equally likely before."""
        return 1 / (1 + math.exp(max(-700.0, min(self.for_fail - self.for_pass, 700.0))))


class ProbeEvidence:
    """One probe: blocks come in, `state` says whether to go on.

    shares: of each SLO, the share of requests that must meet it (`ttft_p95`: 0.95). error: the probability of a wrong
    `pass`, and that of a wrong `fail`. max_blocks: after so many blocks without a decision it is unresolved; None for
    what `block_limit` says.
    """

    def __init__(self, shares: Sequence[float], *, error: float = ERROR, max_blocks: int | None = None) -> None:
        if not shares:
            raise ValueError("a probe needs at least one SLO")
        self.slos = [ShareEvidence(share) for share in shares]
        self.max_blocks = max_blocks or block_limit(shares)
        self.state: ProbeState = "open"
        self.blocks = self.requests = 0
        self._history: list[list[tuple[float, float]]] = []  # after each block, the evidence of each SLO
        self._bounds = math.log(1 / error), math.log(len(shares) / error)

    def add(self, block: Block) -> ProbeState:
        """Count a block, (met, total) of each SLO in the order of the shares; returns the state."""
        if len(block) != len(self.slos):
            raise ValueError(f"a block needs the counts of {len(self.slos)} SLOs (got {len(block)})")
        if self.state != "open":
            return self.state
        for slo, (met, total) in zip(self.slos, block, strict=True):
            slo.add(met, total)
        self.blocks += 1
        self.requests += max(total for _, total in block)
        if self.blocks >= MIN_BLOCKS:
            if all(slo.for_pass >= self._bounds[0] for slo in self.slos):
                self.state = "pass"
            elif any(slo.for_fail >= self._bounds[1] for slo in self.slos):
                self.state = "fail"
            elif self.blocks >= self.max_blocks or self._hopeless():
                self.state = "unresolved"
        return self.state

    def _hopeless(self) -> bool:
        """The probe leans to neither side, and even PACE times the pace of its later half decides nothing."""
        self._history.append([(slo.for_pass, slo.for_fail) for slo in self.slos])
        if self.blocks < self.max_blocks * HOPE or not LEANING < self.chance < 1 - LEANING:
            return False
        half, now = self._history[len(self._history) // 2], self._history[-1]
        left = PACE * (self.max_blocks - self.blocks) / (len(self._history) - len(self._history) // 2)
        pass_, fail = (
            [new[side] + max(0.0, new[side] - old[side]) * left for new, old in zip(now, half, strict=True)]
            for side in (0, 1)
        )
        return min(pass_) < self._bounds[0] and max(fail) < self._bounds[1]

    def stop(self) -> ProbeState:
        """End the probe here, say because the time is over: an open one is unresolved."""
        if self.state == "open":
            self.state = "unresolved"
        return self.state

    @property
    def chance(self) -> float:
        """The probability that all SLOs are met, by this probe alone."""
        return math.prod(slo.chance for slo in self.slos)
