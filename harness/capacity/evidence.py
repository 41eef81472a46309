"""Evidence of one probe: does a server meet its SLOs at this load? A test that may stop after any block.

An SLO such as `ttft_p95 <= 2 s` says that at least 95 % of the requests have a TTFT of at most 2 s: its *share* is
0.95. Requests that are served together share their fate, so the sample is not the request. A *block* is all requests
that end within a time of BLOCK_ANSWERS answers. A request that failed does not meet the SLO.

**The model of a block**: `met` of `total` requests is beta-binomial with a mean, the server's attainment at this load,
and a correlation of the requests within the block. The correlation is unknown, between 0 and MAX_CORRELATION: a block
is as long as BLOCK_ANSWERS answers, so where all that is served at one time shares one fate, it still has that many.

A server can also meet its SLOs for long and then, in an incident such as a wave of preemptions, break them for all that
is served at that time. So the attainment may also be the share in a second way: most blocks are calm, and a few lose
1 / BLOCK_ANSWERS of their requests. It is this that a pass has to rule out, so it takes at least 15 blocks.

**The test** is a ratio of likelihoods: the mixture over all attainments on one side of the share, against the best
attainment and correlation on the other side. If the truth is on the other side, this ratio exceeds 1 / error with a
probability of at most `error`, however often one looks (Ville's inequality), so a probe stops when it does:

- `pass`: every SLO's ratio says "at least the share". No correction: a wrong pass needs a wrong test of the very SLO
  that is broken.
- `fail`: one SLO's ratio says "less than the share", at the error divided by the number of SLOs (Bonferroni).
- `unresolved`: neither after `max_blocks`, or earlier when at the pace of its later half neither will be reached by
  then. It is no bound, in neither direction.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ProbeState = Literal["open", "pass", "fail", "unresolved"]
Block = Sequence[tuple[int, int]]  # for each SLO: requests that met it, requests

BLOCK_ANSWERS = 3  # a block lasts as long as so many answers, thinking included
MAX_CORRELATION = 1 / BLOCK_ANSWERS
ERROR = 0.1  # a capacity needs two passes
MAX_BLOCKS = 40
MIN_BLOCKS = 2
HOPE = 0.4  # from this share of `max_blocks` on
PACE = 2.0
LEANING = 0.05

_CORRELATIONS = np.array([1e-6, 0.01, 0.03, 0.1, 0.2, MAX_CORRELATION])
# Misses relative to those that the share allows (above it), and their odds relative to the allowed odds (below it).
_ABOVE = np.array([0.85, 0.7, 0.55, 0.4, 0.25, 0.12, 0.05, 0.01, 0.001])
_BELOW = np.array([1.15, 1.35, 1.6, 2.0, 3.0, 6.0, 15.0, 60.0, 1000.0])
# Logarithms of their weights: below its capacity a server meets its SLOs nearly always.
_WEIGHTS_ABOVE = np.log([0.02, 0.03, 0.03, 0.04, 0.04, 0.06, 0.08, 0.1, 0.6])[:, None]
_WEIGHTS_BELOW = np.log(np.full(len(_BELOW), 1 / len(_BELOW)))[:, None]
# Incidents, the second way to attain just the share: misses in calm blocks, relative to those that the share allows.
_INCIDENTS = np.array([0.002, 0.2, 0.4])
_CORRELATION_CALM, _CORRELATION_LOST = 0.01, 0.2


class ShareEvidence:
    """What blocks say of one SLO, whose `share` of requests must meet it."""

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"the share of requests that must meet an SLO must be between 0 and 1 (got {share})")
        odds = (1 - share) / share * _BELOW
        means = np.concatenate([1 - (1 - share) * _ABOVE, [share], 1 / (1 + odds)])[:, None]
        self._a, self._b = _beta(means, _CORRELATIONS)
        self._norm = _betaln(self._a, self._b)
        calm, lost = _INCIDENTS * (1 - share), np.full(len(_INCIDENTS), max(MAX_CORRELATION, 1 - share))
        self._often = ((1 - share) - calm) / (lost - calm)  # the share of blocks with an incident
        self._calm = _beta(1 - calm, _CORRELATION_CALM)
        self._lost = _beta(1 - lost, _CORRELATION_LOST)
        self._incidents: NDArray[np.float64] = np.zeros(len(_INCIDENTS))  # logarithms of likelihoods
        self._likelihood: NDArray[np.float64] = np.zeros_like(self._a)  # logarithms; means x correlations

    def add(self, met: int, total: int) -> None:
        """Count a block; one without requests says nothing."""
        if not 0 <= met <= total:
            raise ValueError(f"a block cannot have {met} of {total} requests that met an SLO")
        if not total:
            return
        self._likelihood += _betaln(self._a + met, self._b + total - met) - self._norm
        calm, lost = (_betaln(a + met, b + total - met) - _betaln(a, b) for a, b in (self._calm, self._lost))
        self._incidents += np.logaddexp(np.log1p(-self._often) + calm, np.log(self._often) + lost)

    @property
    def for_pass(self) -> float:
        """Logarithm of the evidence against an attainment below the share."""
        return self._above - max(float(self._likelihood[len(_ABOVE) :].max()), float(self._incidents.max()))

    @property
    def for_fail(self) -> float:
        """Logarithm of the evidence against an attainment of at least the share."""
        return self._below - float(self._likelihood[: len(_ABOVE) + 1].max())

    @property
    def chance(self) -> float:
        """The probability that the attainment is at least the share, where both were equally likely before."""
        return 1 / (1 + math.exp(min(self._below - self._above, 700.0)))

    @property
    def _above(self) -> float:
        return _mixture(self._likelihood[: len(_ABOVE)] + _WEIGHTS_ABOVE)

    @property
    def _below(self) -> float:
        return _mixture(self._likelihood[len(_ABOVE) + 1 :] + _WEIGHTS_BELOW)


class ProbeEvidence:
    """One probe: blocks come in, `state` says whether to go on.

    shares: of each SLO, the share of requests that must meet it (`ttft_p95`: 0.95). error: the probability of a wrong
    `pass`, and that of a wrong `fail`. max_blocks: after so many blocks without a decision it is unresolved.
    """

    def __init__(self, shares: Sequence[float], *, error: float = ERROR, max_blocks: int = MAX_BLOCKS) -> None:
        if not shares:
            raise ValueError("a probe needs at least one SLO")
        self.slos = [ShareEvidence(share) for share in shares]
        self.max_blocks = max_blocks
        self.blocks: list[list[tuple[int, int]]] = []
        self.state: ProbeState = "open"
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
        self.blocks.append(list(block))
        if len(self.blocks) >= MIN_BLOCKS:
            if all(slo.for_pass >= self._bounds[0] for slo in self.slos):
                self.state = "pass"
            elif any(slo.for_fail >= self._bounds[1] for slo in self.slos):
                self.state = "fail"
            elif len(self.blocks) >= self.max_blocks or self._hopeless():
                self.state = "unresolved"
        return self.state

    def _hopeless(self) -> bool:
        """The probe leans to neither side, and even PACE times the pace of its later half decides nothing."""
        count = len(self.blocks)
        self._history.append([(slo.for_pass, slo.for_fail) for slo in self.slos])
        if count < self.max_blocks * HOPE or not LEANING < self.chance < 1 - LEANING:
            return False
        half, now = self._history[len(self._history) // 2], self._history[-1]
        left = PACE * (self.max_blocks - count) / (len(self._history) - len(self._history) // 2)
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

    @property
    def attainment(self) -> list[float | None]:
        """The share of requests that met each SLO; None without requests."""
        columns = [[block[i] for block in self.blocks] for i in range(len(self.slos))]
        sums = [(sum(met for met, _ in column), sum(total for _, total in column)) for column in columns]
        return [met / total if total else None for met, total in sums]


def _mixture(logs: NDArray[np.float64]) -> float:
    """Logarithm of the likelihood of a mixture: weighted attainments, and all correlations alike."""
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()) / logs.shape[1])


def _beta(
    means: NDArray[np.float64], correlations: NDArray[np.float64] | float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The parameters of beta distributions of these means; the correlation is that of requests of one block."""
    size = (1 - correlations) / correlations
    return means * size, (1 - means) * size


def _betaln(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.special import betaln  # a tenth of a second that most commands need not pay

    return np.asarray(betaln(a, b))
