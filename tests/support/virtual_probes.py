"""Seeded servers of the embedded engine in virtual time, and probes of them with an SLO that some load just meets.

`python -m tests.support.virtual_probes > tests/data/slo_servers.jsonl` measures their true capacities again: an hour.
"""

import math
import random
import statistics
import sys
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from harness.base.files import ROOT
from harness.numbers.share_test import LatencySample, observed
from harness.questions.capacity.blocks import BLOCK_ANSWERS, RAMP_BLOCK_ANSWERS, ProbeBlock, parse_slos
from harness.questions.capacity.decide import log_grid, next_slo_step
from harness.questions.capacity.level import Probe, Purpose
from harness.scenario.check_syntax import Check
from harness.simulated.engine import EngineConfig
from tests.support.virtual import VirtualRequest, VirtualWork, closed_loop

SERVERS = 200
STORED = ROOT / "tests" / "data" / "slo_servers.jsonl"
TRUTH_REQUESTS = 60_000
FIXED_BLOCKS = 40  # of each probe of the bisection with fixed samples


MAX_LEVEL = 256


class SeededServer(NamedTuple):
    """`kind`: `cliff` and `fall` run out of KV cache, `flat` has no knee up to 256 users, `seats` saturates at
    `max_num_seqs`, `slope` by the cost of each sequence."""

    seed: int
    kind: str
    config: EngineConfig
    work: VirtualWork


def seeded_server(seed: int) -> SeededServer:
    """The server of a seed. Of each 20 neighbouring seeds: 4 with a cliff, 4 that fall, 3 flat, 5 seats, 4 slope."""
    dice = random.Random(f"server {seed}")
    kinds = ["cliff"] * 4 + ["fall"] * 4 + ["flat"] * 3 + ["seats"] * 5 + ["slope"] * 4
    random.Random(seed // 20).shuffle(kinds)
    kind = kinds[seed % 20]
    prompt, output = _log(dice, 40, 600), _log(dice, 25, 120)
    base = _log(dice, 0.005, 0.03)
    think = dice.choice([0.0, 0.0, 0.0, output * base * _log(dice, 0.3, 2)])
    work = VirtualWork(
        prompt_tokens=(int(prompt * 0.5), int(prompt * 1.5)),
        output_tokens=(int(output * 0.5), int(output * 1.5)),
        think_s=think,
    )
    slope = base / _log(dice, 20, 200)
    seats, blocks, lump, chunk, prefill = 512, 65536, 0.0, 0, _log(dice, 5e-6, 2e-5)
    each = (prompt + output) / 16 + 1  # blocks of a mean request
    if kind == "flat":
        slope, prefill = base / _log(dice, 1500, 5000), 1e-7
    elif kind == "seats":
        seats = int(_log(dice, 3, 150))
    elif kind == "slope":
        slope = base / _log(dice, 2, 60)
    else:
        fit = _log(dice, 4, 100)  # so many mean requests fit into the cache
        blocks, chunk = int(max(fit * each, 2.5 * each)), 128
        prefill = _log(dice, 4e-5, 2e-4)
        slope = base / _log(dice, 20, 100)
        lump = _log(dice, 0.1, 0.5) if kind == "cliff" else base * _log(dice, 2, 8)
    config = EngineConfig(
        step_base_s=base,
        step_per_sequence_s=slope,
        prefill_per_token_s=prefill,
        step_per_kv_token_s=_log(dice, 1e-9, 1e-8) if kind == "flat" else _log(dice, 1e-8, 1e-7),
        preemption_s=lump,
        jitter=_log(dice, 0.005, 0.05),
        max_num_seqs=seats,
        long_prefill_token_threshold=chunk,
        max_model_len=int(1.5 * prompt) + int(1.5 * output),
        num_gpu_blocks=blocks,
        enable_prefix_caching=False,
    )
    return SeededServer(seed, kind, config, work)


def _log(dice: random.Random, low: float, high: float) -> float:
    """Log-uniform between low and high."""
    return float(low * (high / low) ** dice.random())


class SeededQuestion(NamedTuple):
    """A server and its SLOs: 95 % of requests have a TTFT and a TPOT of at most these seconds; None: no such SLO."""

    server: SeededServer
    ttft_s: float | None
    tpot_s: float | None

    @property
    def slos(self) -> list[Check]:
        bounds = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return parse_slos([f"{name}_p95<={1e3 * bound}ms" for name, bound in bounds.items() if bound is not None])

    def samples(self, requests: list[VirtualRequest]) -> list[LatencySample]:
        """The latency of each SLO relative to its bound."""
        sent_s = np.array([r.sent_s for r in requests])
        margins = []
        if self.ttft_s is not None:
            margins.append([r.ttft_s / self.ttft_s for r in requests])
        if self.tpot_s is not None:
            margins.append([(r.tpot_s or 0.0) / self.tpot_s for r in requests])
        return [observed(np.array(values), sent_s) for values in margins]

    def counts(self, requests: list[VirtualRequest]) -> list[tuple[int, int]]:
        """(met, total) of each SLO."""
        met = []
        if self.ttft_s is not None:
            met.append(sum(r.ttft_s <= self.ttft_s for r in requests))
        if self.tpot_s is not None:
            met.append(sum(r.tpot_s is None or r.tpot_s <= self.tpot_s for r in requests))
        return [(count, len(requests)) for count in met]


def blocks(
    server: SeededServer, level: int, seed: int, answers: float = BLOCK_ANSWERS, warmup: int | None = None
) -> Iterator[tuple[float, list[VirtualRequest]]]:
    """Blocks of so many answer times in steady state, with their seconds: the first answers of all users are warm-up.

    `warmup`: so many requests of it; None: a few answers of all users.
    """
    stream = closed_loop(server.config, level, server.work, seed=seed)
    warm = list(islice(stream, 20 + 3 * level if warmup is None else warmup))
    answer_s = statistics.median(r.e2e_s for r in warm[len(warm) // 2 :]) + server.work.think_s
    begin, end = warm[-1].ended_s, warm[-1].ended_s + answers * answer_s
    block: list[VirtualRequest] = []
    for request in stream:
        while request.ended_s > end and len(block) >= (BLOCK_ANSWERS if answers < BLOCK_ANSWERS else 0):
            yield end - begin, block
            begin, end, block = end, end + answers * answer_s, []
        end = max(end, request.ended_s) if answers < BLOCK_ANSWERS else end
        block.append(request)


def run_probe(
    question: SeededQuestion, level: int, seed: int, purpose: Purpose = "slo", deadline_s: float = math.inf
) -> Probe:
    """A probe in virtual time. `deadline_s`: seconds of it, after which it is stopped."""
    probe = Probe(level, question.slos, purpose=purpose)
    parts = blocks(question.server, level, seed) if purpose == "slo" else _ramp_blocks(question.server, level, seed)
    for seconds, requests in parts:
        if probe.seconds + seconds > deadline_s or add_block(probe, question, requests, seconds) != "open":
            break
    probe.end("stopped" if probe.state == "open" and deadline_s < math.inf else "unresolved")
    return probe


def _ramp_blocks(server: SeededServer, level: int, seed: int) -> Iterator[tuple[float, list[VirtualRequest]]]:
    return blocks(server, level, seed, RAMP_BLOCK_ANSWERS, warmup=level)


def add_block(probe: Probe, question: SeededQuestion, requests: list[VirtualRequest], seconds: float) -> str:
    answer_s = mean_answer_s(requests)
    block = ProbeBlock(seconds=seconds, samples=question.samples(requests), answers=len(requests), e2e_s=answer_s)
    return probe.add(block, answer_s)


def mean_answer_s(requests: list[VirtualRequest]) -> float | None:
    return statistics.fmean(r.e2e_s for r in requests) if requests else None


def run_search(question: SeededQuestion, seed: int = 1, budget_s: float = math.inf) -> list[Probe]:
    """A search in virtual time, until its answer or the end of the budget."""
    probes: list[Probe] = []
    while (step := next_slo_step(probes, MAX_LEVEL)) is not None:
        left_s = budget_s - sum(probe.seconds for probe in probes)
        if left_s <= 0:
            break
        probes.append(run_probe(question, step.level, seed * 1000 + len(probes), step.purpose, left_s))
        if probes[-1].state == "stopped":
            break
    return probes


def seeded_question(seed: int) -> SeededQuestion:
    """A bound for TTFT, for TPOT or for both, log-uniform between what one user gets and what MAX_LEVEL users get.

    One in ten is below or above both, so that no user or more than MAX_LEVEL users are the answer.
    """
    server = seeded_server(seed)
    dice = random.Random(f"question {seed}")
    one, all_of_them = (
        [r for _, block in islice(blocks(server, level, seed), 60 if level == 1 else 6) for r in block]
        for level in (1, MAX_LEVEL)
    )
    which, share = dice.choice(["ttft", "tpot", "both"]), dice.uniform(0.02, 1)
    if dice.random() < 0.1:
        share = dice.choice([-0.2, 1.2])
    ttft = _between(_p95([r.ttft_s for r in one]), _p95([r.ttft_s for r in all_of_them]), share)
    tpot = _between(_p95([r.tpot_s or 0.0 for r in one]), _p95([r.tpot_s or 0.0 for r in all_of_them]), share)
    return SeededQuestion(server, ttft if which != "tpot" else None, tpot if which != "ttft" else None)


def _between(low: float, high: float, share: float) -> float:
    return float(low * (high / low) ** share)


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def attains(question: SeededQuestion, level: int) -> bool:
    """Whether the server meets all SLOs at a level, by a run of 60,000 requests, or until that is beyond doubt."""
    counts: list[list[tuple[int, int]]] = []
    for _, block in blocks(question.server, level, 99):
        if block:
            counts.append(question.counts(block))
        total = sum(count[0][1] for count in counts)
        if total < TRUTH_REQUESTS and (len(counts) < 20 or len(counts) % 10):
            continue
        distances = []  # in standard errors
        for slo in range(len(counts[0])):
            share = sum(count[slo][0] for count in counts) / total
            squares = sum((count[slo][0] - share * count[slo][1]) ** 2 for count in counts)
            distances.append((share - 0.95) * total / max(math.sqrt(squares), 1.5))
        if total >= TRUTH_REQUESTS or min(distances) < -4 or min(distances) > 4:
            return min(distances) >= 0
    raise AssertionError


def true_capacity(question: SeededQuestion) -> int:
    """The largest level up to MAX_LEVEL that meets the SLOs, 0 for none: a bisection over all levels on long runs."""
    low, high = 0, MAX_LEVEL + 1
    while high - low > 1:
        middle = min(max(round(math.sqrt(max(low, 0.5) * high)), low + 1), high - 1)
        low, high = (middle, high) if attains(question, middle) else (low, middle)
    return low


def fixed_bisection(question: SeededQuestion, seed: int) -> tuple[int, int]:
    """(level, requests) of a plain bisection whose probes all take FIXED_BLOCKS and believe the share they see."""
    levels = log_grid(MAX_LEVEL)
    low, high, requests = -1, len(levels), 0
    while high - low > 1:
        middle = (low + high) // 2
        probe = islice(blocks(question.server, levels[middle], seed * 1000 + middle), FIXED_BLOCKS)
        found = [request for _, block in probe for request in block]
        requests += len(found)
        met = all(met >= 0.95 * total for met, total in question.counts(found))
        low, high = (middle, high) if met else (low, middle)
    return (levels[low] if low >= 0 else 0), requests


class SloTruth(msgspec.Struct, frozen=True):
    """The true capacity of a seeded server, and what a bisection with fixed samples finds with how many requests."""

    capacity: int
    fixed_level: int
    fixed_requests: int


def truths() -> list[SloTruth]:
    """The stored truth of all servers."""
    return [msgspec.json.decode(line, type=SloTruth) for line in STORED.read_bytes().splitlines()]


def truth(seed: int) -> SloTruth:
    question = seeded_question(seed)
    return SloTruth(true_capacity(question), *fixed_bisection(question, seed))


if __name__ == "__main__":
    for number in range(SERVERS):
        sys.stdout.buffer.write(msgspec.json.encode(truth(number)) + b"\n")
        sys.stdout.flush()
