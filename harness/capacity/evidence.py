"""The sequential test of one probe: does a server meet its SLOs at this load? It may stop after any block.

An SLO such as `ttft_p95 <= 2 s` requires that at least 95 % of the requests have a TTFT of at most 2 s: its *share* is
0.95. Requests that are served together depend on each other, so the sample is not the request but the *block*: all
requests that end within the time of BLOCK_ANSWERS answers. A failed request does not meet the SLO.

**The test** bets on each block, at odds that are fair if the attainment equals the share (a test martingale:
Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024). A bet on "at least the share"
wins in proportion to the block's attainment above the share, and loses in proportion to a shortfall. A second bet is on
the opposite. If a bet is wrong, its wealth exceeds 1 / error with a probability of at most `error`, however often one
looks (Ville's inequality). So a probe stops with

- `pass` when the wealth on "at least the share" exceeds it for every SLO. This needs no correction: a wrong pass needs
  a wrong test of the SLO that is broken.
- `fail` when the wealth on "less" exceeds it for one SLO, with the error divided by the number of SLOs (Bonferroni).
- `unresolved` when neither happens within `max_blocks`, or earlier when neither will happen at the pace of the probe's
  later half. An unresolved probe is not a bound in either direction.

Blocks must be independent of each other; requests within a block need not be. No test can rule out rare incidents that
a short probe does not meet. The test assumes that an incident loses at most MAX_LOSS of a block, which is longer than
an answer: larger losses count as MAX_LOSS.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

ProbeState = Literal["open", "pass", "fail", "unresolved"]
Block = Sequence[tuple[int, int]]  # for each SLO: requests that met it, requests

BLOCK_ANSWERS = 3  # a block lasts as long as so many answers, thinking included
MAX_LOSS = 1 / BLOCK_ANSWERS  # of a block, by one incident
ERROR = 0.08  # of a probe that decides alone
MAX_BLOCKS = 40  # for shares up to ...
_SHARE = 0.95  # ... this one; higher shares need more blocks, in proportion to 1 / (1 - share)
MIN_BLOCKS = 3  # two blocks can still be affected by the start
# A probe is hopeless after HOPE * max_blocks if its chance is between LEANING and 1 - LEANING and even PACE times its
# pace decides nothing.
HOPE = 0.4
PACE = 2.0
LEANING = 0.05

# A mixture of bets. Each stake is the largest share of its wealth that a block can lose; small stakes are for
# attainments near the share.
_STAKES = np.array([0.1, 0.4, 0.9])
_WEIGHTS = np.log(np.array([0.1, 0.2, 0.7]))


def block_limit(shares: Sequence[float]) -> int:
    """The largest number of blocks of a probe with these shares."""
    return round(MAX_BLOCKS * max(1.0, (1 - _SHARE) / (1 - max(shares))))


class ShareEvidence:
    """The evidence of blocks for one SLO, that at least `share` (between 0 and 1) of all requests must meet."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._max_shortfall = min(share, max(MAX_LOSS, 4 * (1 - share)) - (1 - share))
        self._max_surplus = 1 - share
        self._blocks = self._requests = 0
        self._wealth = np.zeros((2, len(_STAKES)))  # logarithms: of bets on "at least the share", and on "less"

    def add(self, met: int, total: int) -> None:
        """Count a block of `total` requests, of which `met` the SLO."""
        if not total:
            return
        self._blocks, self._requests = self._blocks + 1, self._requests + total
        surplus = (met - self._share * total) * self._blocks / self._requests  # weighted by the block's requests
        self._wealth[0] += np.log1p(_STAKES * max(surplus, -self._max_shortfall) / self._max_shortfall)
        self._wealth[1] += np.log1p(_STAKES * -min(surplus, self._max_surplus) / self._max_surplus)

    @property
    def pass_evidence(self) -> float:
        """Logarithm of the evidence against an attainment below the share."""
        return float(np.logaddexp.reduce(self._wealth[0] + _WEIGHTS))

    @property
    def fail_evidence(self) -> float:
        """Logarithm of the evidence against an attainment of at least the share."""
        return float(np.logaddexp.reduce(self._wealth[1] + _WEIGHTS))

    @property
    def chance(self) -> float:
        """The probability that the attainment is at least the share, if both were equally likely before the probe."""
        return 1 / (1 + math.exp(max(-700.0, min(self.fail_evidence - self.pass_evidence, 700.0))))


class ProbeEvidence:
    """One probe: add blocks while its `state` is open.

    `shares`: of each SLO, the share of requests that must meet it (`ttft_p95`: 0.95). `error`: the probability of a
    wrong `pass`, and that of a wrong `fail`.
    """

    def __init__(self, shares: Sequence[float], *, error: float = ERROR) -> None:
        self.slos = [ShareEvidence(share) for share in shares]
        self.max_blocks = block_limit(shares)
        self.state: ProbeState = "open"
        self.blocks = self.requests = 0
        self._history: list[list[tuple[float, float]]] = []  # after each block, the evidence of each SLO
        self._pass_bound, self._fail_bound = math.log(1 / error), math.log(len(shares) / error)

    def add(self, block: Block) -> ProbeState:
        """Count a block, (met, total) of each SLO in the order of the shares. Return the state."""
        if self.state != "open":
            return self.state
        for slo, (met, total) in zip(self.slos, block, strict=True):
            slo.add(met, total)
        self.blocks += 1
        self.requests += max(total for _, total in block)
        if self.blocks >= MIN_BLOCKS:
            if all(slo.pass_evidence >= self._pass_bound for slo in self.slos):
                self.state = "pass"
            elif any(slo.fail_evidence >= self._fail_bound for slo in self.slos):
                self.state = "fail"
            elif self.blocks >= self.max_blocks or self._is_hopeless():
                self.state = "unresolved"
        return self.state

    def _is_hopeless(self) -> bool:
        """Whether the probe leans to neither side, and even PACE times the pace of its later half decides nothing."""
        self._history.append([(slo.pass_evidence, slo.fail_evidence) for slo in self.slos])
        if self.blocks < self.max_blocks * HOPE or not LEANING < self.chance < 1 - LEANING:
            return False
        middle = len(self._history) // 2
        growth = PACE * (self.max_blocks - self.blocks) / (len(self._history) - middle)
        expected_pass, expected_fail = (
            [
                now[side] + max(0.0, now[side] - before[side]) * growth
                for now, before in zip(self._history[-1], self._history[middle], strict=True)
            ]
            for side in (0, 1)
        )
        return min(expected_pass) < self._pass_bound and max(expected_fail) < self._fail_bound

    def stop(self) -> ProbeState:
        """End the probe, for example because the time is over. An open probe becomes unresolved."""
        if self.state == "open":
            self.state = "unresolved"
        return self.state

    @property
    def chance(self) -> float:
        """The probability that all SLOs are met, by this probe alone."""
        return math.prod(slo.chance for slo in self.slos)
