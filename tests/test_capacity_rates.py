"""Open loops of very few and of many requests a second, in virtual time, through blocks and search of the command.

A rate of 0.05 requests/s is a machine that takes half a minute an answer; 50 requests/s is one that takes milliseconds.
"""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import pytest

from harness.capacity.evidence import ProbeEvidence
from harness.capacity.levels import level_step, load_at, load_pace
from harness.capacity.search import SloSearch
from harness.capacity.slo import FLUSH_S, BlockCutter, LoadBlock, parse_slos
from harness.scenario import Arrivals, Load
from harness.simulated.engine import EngineConfig
from tests.made_runs import request
from tests.virtual import VirtualWork, poisson

MAX_LEVEL = 64
WORK = VirtualWork(prompt_tokens=(50, 150), output_tokens=(20, 60))
SLOW = EngineConfig(step_base_s=0.5, step_per_sequence_s=0.1, prefill_per_token_s=0.02, num_gpu_blocks=4000)
FAST = EngineConfig(step_base_s=2e-3, step_per_sequence_s=5e-5, prefill_per_token_s=3e-5, num_gpu_blocks=4000)


class RateCase(NamedTuple):
    config: EngineConfig
    rate: float  # of the scenario
    slo: str

    @property
    def load(self) -> Load:
        return Load(user="batch", duration_s=9.0, arrivals=Arrivals(rate=self.rate))

    def blocks(self, level: int, seed: int) -> Iterator[LoadBlock]:
        """Blocks at a level, cut from records as they come; the first 50 answers are the warm-up."""
        amount = level * level_step(self.load)
        arrivals = load_at(self.load, amount, 9.0).arrivals
        assert arrivals is not None and arrivals.rate is not None
        cutter = BlockCutter(parse_slos([self.slo]), {None: load_pace(self.load, amount)})
        for number, one in enumerate(poisson(self.config, arrivals.rate, WORK, seed=seed)):
            phase = "warmup" if number < 50 else "measured"
            chunks_s = [one.ttft_s, one.e2e_s]
            cutter.add([request(sent_s=one.sent_s, ended_s=one.e2e_s, chunks_s=chunks_s, phase=phase)])
            yield from cutter.cut(one.ended_s + FLUSH_S)

    def searched(self) -> SloSearch:
        search = SloSearch(MAX_LEVEL)
        while (level := search.next_level()) is not None:
            probe = ProbeEvidence([0.95])
            for block in self.blocks(level, len(search.results)):
                if probe.add(block.counts) != "open":
                    break
            search.take(level, probe)
        return search

    def share(self, level: int) -> float:
        """Of many requests at a level, the share that meets the SLO."""
        counts = [block.counts[0] for block in islice(self.blocks(level, 99), 100)]
        return sum(met for met, _ in counts) / sum(total for _, total in counts)


@pytest.mark.parametrize(
    "case", [RateCase(SLOW, 0.05, "ttft_p95<=20s"), RateCase(FAST, 50.0, "ttft_p95<=30ms")], ids=["0.05/s", "50/s"]
)
def test_the_capacity_is_found_at_any_rate(case: RateCase) -> None:
    answer = case.searched().answer()
    assert answer.kind == "found" and answer.level is not None and answer.above is not None
    assert case.share(answer.level) >= 0.95 > case.share(answer.above)
