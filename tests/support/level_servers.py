"""Servers of which the share of requests within an SLO is known exactly at each level, with stalls that hit all
requests in flight. Their answers are drawn, and no engine is run: a search takes some tens of milliseconds.
"""

import math
import random
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.numbers.share_test import observed
from harness.questions.capacity.blocks import BLOCK_ANSWERS, RAMP_BLOCK_ANSWERS, ProbeBlock, parse_slos
from harness.questions.capacity.decide import next_slo_step
from harness.questions.capacity.level import Probe, Purpose

SLOS = parse_slos(["ttft_p95<=1s"])
SHARE = 0.95
MAX_LEVEL = 128
_Z = NormalDist().inv_cdf(SHARE)


class LevelServer(NamedTuple):
    """`limit`: the level at which 95 % of the requests are within the bound, without stalls."""

    limit: float
    slope: float = 1.5  # of the logarithm of the latency over that of the level
    spread: float = 0.2  # standard deviation of the logarithm of the latency
    correlation: float = 0.0  # of neighbouring requests
    stalls: float = 0.0  # probability of one within an answer time; it hits all requests in flight

    def met(self, level: int) -> float:
        """The true share of the requests within the bound."""
        margin = self.slope * math.log(level / self.limit)  # of the 95th percentile
        return NormalDist().cdf(_Z - margin / self.spread) * (1 - self.stalls)

    @property
    def capacity(self) -> int:
        return max((level for level in range(1, MAX_LEVEL + 1) if self.met(level) >= SHARE), default=0)

    def margins(self, level: int, rounds: int, state: float, dice: np.random.Generator) -> NDArray[np.float64]:
        """Latency / bound of so many answers of each user, in the order of sending. `state`: of the correlation."""
        count, noise = level * rounds, math.sqrt(1 - self.correlation**2)
        normal = dice.normal(size=count)
        for place in range(count):
            state = normal[place] = self.correlation * state + noise * normal[place]
        log = self.slope * math.log(level / self.limit) + self.spread * (normal - _Z)
        stalled = np.repeat(dice.uniform(size=rounds) < self.stalls, level)
        return np.where(stalled, np.maximum(3.0, np.exp(log)), np.exp(log))


def random_server(seed: int, *, stalls: float = 0.0) -> LevelServer:
    dice = random.Random(f"levels {seed}")
    return LevelServer(
        limit=math.exp(dice.uniform(0, math.log(MAX_LEVEL))),
        slope=dice.uniform(0.5, 3),
        spread=dice.uniform(0.05, 0.4),
        correlation=dice.choice([0.0, 0.0, 0.5, 0.9]),
        stalls=stalls,
    )


def run_probe(server: LevelServer, level: int, purpose: Purpose, seed: int) -> Probe:
    """A probe; an answer takes one second."""
    probe, dice = Probe(level, SLOS, purpose=purpose), np.random.default_rng(seed)
    rounds = max(BLOCK_ANSWERS // level, RAMP_BLOCK_ANSWERS) if purpose == "ramp" else BLOCK_ANSWERS
    begin_s, state = 0.0, float(dice.normal())
    while probe.state == "open":
        margins = server.margins(level, rounds, state, dice)
        sent_s = begin_s + rounds * np.arange(len(margins)) / len(margins)
        block = ProbeBlock(seconds=float(rounds), samples=[observed(margins, sent_s)], answers=len(margins), e2e_s=1.0)
        begin_s += rounds
        probe.add(block, 1.0)
    probe.end()
    return probe


def run_search(server: LevelServer, seed: int, at_least: int | None = None) -> list[Probe]:
    probes: list[Probe] = []
    while (step := next_slo_step(probes, MAX_LEVEL, at_least)) is not None:
        probes.append(run_probe(server, step.level, step.purpose, 1000 * seed + len(probes)))
    return probes
