"""The sequential test of one probe: does a server meet its SLOs at this load? It may stop after some of its blocks.

An SLO such as `ttft_p95 <= 2 s` requires that at least 95 % of the requests have a TTFT of at most 2 s: its *share* is
0.95. `harness.analysis.slo_rule` decides it, as it decides a check: by the effective number of dependent requests. A
failed request does not meet the SLO.

- The probe is examined after some numbers of blocks. Each examination has an equal part of the error (Bonferroni), so
  that the error holds wherever the probe stops; that of a wrong `fail` is also divided by the number of SLOs.
- Some servers miss in rare waves, which the ranks of the latency do not show. So the effect is also estimated from the
  misses of the blocks, and a `pass` needs so many blocks that it rules out incidents: one loses at most MAX_LOSS of a
  block, because it lasts an answer, and a block is BLOCK_ANSWERS long.
- `unresolved`: no decision within `max_blocks`, or earlier when none is to be expected. It bounds nothing.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from harness.analysis.slo_rule import DesignEffect, LatencySample, decide, design_effect
from harness.records.records import FAILED, UNKNOWN

ProbeState = Literal["open", "pass", "fail", "unresolved"]
Block = Sequence[LatencySample]  # for each SLO, latency / bound of the requests that ended in it: at most 1 meets it

BLOCK_ANSWERS = 3  # a block lasts as long as so many answers, thinking included
MAX_LOSS = 1 / BLOCK_ANSWERS  # of a block, by one incident
ERROR = 0.15  # of one probe; the capacity needs two passed probes, and the level above it two failed ones
MAX_BLOCKS = 40  # for shares up to ...
_SHARE = 0.95  # ... this one; higher shares need more blocks, in proportion to 1 / (1 - share)
MIN_BLOCKS = 3  # two blocks can still be affected by the start
_FAIL_LOOKS = (0.075, 0.125, 0.225, 0.375, 0.55, 0.75, 1.0)  # of max_blocks
_PASS_LOOKS = 3  # at the first number of blocks that rules out incidents, at max_blocks, and halfway
# A probe is hopeless after HOPE * max_blocks if even PACE times its remaining blocks decide nothing.
HOPE = 0.4
PACE = 2.0


def block_limit(shares: Sequence[float]) -> int:
    """The largest number of blocks of a probe with these shares."""
    return round(MAX_BLOCKS * max(1.0, (1 - _SHARE) / (1 - max(shares))))


def count_met(sample: LatencySample) -> tuple[int, int]:
    """The numbers of requests that met the SLO, and of which it is known whether they did."""
    known = sample.state != UNKNOWN
    return int((known & (sample.state != FAILED) & (sample.value_s <= 1)).sum()), int(known.sum())


class ShareEvidence:
    """The evidence of blocks for one SLO, that at least `share` (between 0 and 1) of all requests must meet."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._blocks: list[LatencySample] = []
        self._met: list[int] = []
        self._known: list[int] = []
        self._unknown = 0
        self._effect: DesignEffect | None = None
        self._miss_effect = 1.0

    def add(self, block: LatencySample) -> None:
        if len(block.state):
            met, known = count_met(block)
            self._blocks.append(block)
            self._met.append(met)
            self._known.append(known)
            self._unknown += len(block.state) - known

    def estimate(self, answer_s: float | None) -> None:
        """Estimate the design effect of the blocks so far. `answer_s`: mean time of an answer."""
        columns = [np.concatenate(parts) for parts in zip(*self._blocks, strict=True)] if self._blocks else []
        if not columns:
            return
        self._effect = design_effect([LatencySample(*columns)], answer_s)
        met, known = np.array(self._met), np.array(self._known)
        share = met.sum() / max(1, known.sum())
        if len(met) > 1 and 0 < share < 1:
            squares = float(((met - share * known) ** 2).sum()) * len(met) / (len(met) - 1)
            self._miss_effect = max(1.0, squares / float(known.sum() * share * (1 - share)))

    def decision(self, alpha: float, times: float = 1.0) -> str:
        """Decide at a one-sided level; `times`: as if there were so many times as many requests like these."""
        if self._effect is None:
            return "inconclusive"
        met, known, unknown = (round(times * count) for count in (sum(self._met), sum(self._known), self._unknown))
        by_blocks = DesignEffect(self._miss_effect, max(1, len(self._met) - 1), len(self._met))
        assumed = math.isinf(self._effect.freedom) and times > 1  # more blocks would replace the assumption
        of_ranks = 1.0 if assumed else self._effect.inflation(2 * alpha)
        effect = max(of_ranks, by_blocks.inflation(2 * alpha) if self._miss_effect > 1 else 1)
        return decide(met, unknown, known + unknown, self._share, effect, 2 * alpha)

    @property
    def chance(self) -> float:
        """The probability that the attainment is at least the share, by the effective requests (Jeffreys' prior)."""
        if self._effect is None:
            return 0.5
        from scipy.special import betainc

        effect = max(self._effect.effect, self._miss_effect)
        met, missed = sum(self._met) / effect, (sum(self._known) - sum(self._met)) / effect
        return 1 - float(betainc(met + 0.5, missed + 0.5, self._share))


class ProbeEvidence:
    """One probe: add blocks while its `state` is open.

    `shares`: of each SLO, the share of requests that must meet it (`ttft_p95`: 0.95). The probability of a wrong `pass`
    is at most ERROR, and so is that of a wrong `fail`.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.slos = [ShareEvidence(share) for share in shares]
        self.max_blocks = block_limit(shares)
        self.state: ProbeState = "open"
        self.blocks = self.requests = 0
        self._fail_looks = sorted({max(MIN_BLOCKS, round(look * self.max_blocks)) for look in _FAIL_LOOKS})
        self._pass_alpha, self._fail_alpha = ERROR / _PASS_LOOKS, ERROR / len(self._fail_looks) / len(shares)
        loss = max(MAX_LOSS, min(1.0, 4 * (1 - max(shares))))  # lower shares allow incidents of a third of a block
        first = math.ceil(math.log(self._pass_alpha) / math.log1p(-(1 - max(shares)) / loss))
        first = min(max(first, MIN_BLOCKS), self.max_blocks)
        self._pass_looks = {first, (first + self.max_blocks) // 2, self.max_blocks}

    def add(self, block: Block, answer_s: float | None) -> ProbeState:
        """Count a block, the sample of each SLO in the order of the shares. `answer_s`: mean time of an answer."""
        if self.state != "open":
            return self.state
        for slo, sample in zip(self.slos, block, strict=True):
            slo.add(sample)
        self.blocks += 1
        self.requests += max(len(sample.state) for sample in block)
        if self.blocks in self._pass_looks or self.blocks in self._fail_looks or self.blocks == self._hope_look:
            self._look(answer_s)
        return self.state

    @property
    def _hope_look(self) -> int:
        return round(HOPE * self.max_blocks)

    def _look(self, answer_s: float | None) -> None:
        for slo in self.slos:
            slo.estimate(answer_s)
        if self.blocks in self._pass_looks and self._passes():
            self.state = "pass"
        elif self.blocks in self._fail_looks and self._fails():
            self.state = "fail"
        elif self.blocks >= self.max_blocks or (self.blocks >= self._hope_look and self._is_hopeless()):
            self.state = "unresolved"

    def _passes(self, times: float = 1.0) -> bool:
        return all(slo.decision(self._pass_alpha, times) == "pass" for slo in self.slos)

    def _fails(self, times: float = 1.0) -> bool:
        return any(slo.decision(self._fail_alpha, times) == "fail" for slo in self.slos)

    def _is_hopeless(self) -> bool:
        times = 1 + PACE * (self.max_blocks - self.blocks) / self.blocks
        return not self._passes(times) and not self._fails(times)

    def add_cut(self, block: Block, answer_s: float | None) -> None:
        """Count the requests that the end of the probe cut: those older than the bound have missed it.

        They can only take a pass back, or make an undecided probe fail.
        """
        for slo, sample in zip(self.slos, block, strict=True):
            slo.add(sample)
            slo.estimate(answer_s)
        if self._fails():
            self.state = "fail"
        elif self.state == "pass" and not self._passes():
            self.state = "unresolved"

    def lose(self, requests: int) -> None:
        """Fail, because the server died with so many requests in flight."""
        lost = LatencySample(np.zeros(requests), np.zeros(requests), np.full(requests, FAILED, dtype=np.int8))
        for slo in self.slos:
            slo.add(lost)
            slo.estimate(None)
        self.requests += requests
        self.state = "fail"

    def stop(self) -> ProbeState:
        """End the probe, for example because the time is over. An open probe becomes unresolved."""
        if self.state == "open":
            self.state = "unresolved"
        return self.state

    @property
    def chance(self) -> float:
        """The probability that all SLOs are met, by this probe alone."""
        return math.prod(slo.chance for slo in self.slos)
