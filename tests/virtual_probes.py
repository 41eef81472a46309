"""Probes of seeded servers in virtual time, with an SLO that some load of them just meets."""

import math
import random
import statistics
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from harness.capacity.evidence import BLOCK_ANSWERS, ProbeEvidence
from harness.capacity.search import SloSearch
from tests.virtual import VirtualRequest, closed_loop
from tests.virtual_servers import MAX_LEVEL, SeededServer, seeded_server

TRUTH_REQUESTS = 60_000


class SeededQuestion(NamedTuple):
    """A server and its SLOs: 95 % of requests have a TTFT and a TPOT of at most these seconds; None: no such SLO."""

    server: SeededServer
    ttft_s: float | None
    tpot_s: float | None

    @property
    def shares(self) -> list[float]:
        return [0.95 for bound in (self.ttft_s, self.tpot_s) if bound is not None]

    def counts(self, requests: list[VirtualRequest]) -> list[tuple[int, int]]:
        """(met, total) of each SLO."""
        met = []
        if self.ttft_s is not None:
            met.append(sum(r.ttft_s <= self.ttft_s for r in requests))
        if self.tpot_s is not None:
            met.append(sum(r.tpot_s is None or r.tpot_s <= self.tpot_s for r in requests))
        return [(count, len(requests)) for count in met]


def blocks(server: SeededServer, level: int, seed: int) -> Iterator[list[VirtualRequest]]:
    """Blocks of requests in steady state: the first answers of all users are warm-up."""
    stream = closed_loop(server.config, level, server.work, seed=seed)
    warm = list(islice(stream, 20 + 3 * level))
    answer_s = statistics.median(r.e2e_s for r in warm[len(warm) // 2 :]) + server.work.think_s
    end = warm[-1].ended_s + BLOCK_ANSWERS * answer_s
    block: list[VirtualRequest] = []
    for request in stream:
        while request.ended_s > end:
            yield block
            end, block = end + BLOCK_ANSWERS * answer_s, []
        block.append(request)


def run_probe(question: SeededQuestion, level: int, probe: ProbeEvidence, seed: int) -> None:
    for block in blocks(question.server, level, seed):
        if probe.add(question.counts(block)) != "open":
            return


def run_search(question: SeededQuestion, seed: int = 1) -> SloSearch:
    search = SloSearch(MAX_LEVEL)
    while (level := search.next_level()) is not None:
        probe = ProbeEvidence(question.shares)
        run_probe(question, level, probe, seed * 1000 + len(search.results))
        search.take(level, probe)
    return search


def seeded_question(seed: int) -> SeededQuestion:
    """A bound for TTFT, for TPOT or for both, log-uniform between what one user gets and what MAX_LEVEL users get.

    One in ten is below or above both, so that no user or more than MAX_LEVEL users are the answer.
    """
    server = seeded_server(seed)
    dice = random.Random(f"question {seed}")
    one, all_of_them = (
        [r for block in islice(blocks(server, level, seed), 60 if level == 1 else 6) for r in block]
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
    for block in blocks(question.server, level, 99):
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


def fixed_bisection(question: SeededQuestion, levels: list[int], count: int, seed: int) -> tuple[int, int]:
    """(level, requests) of a plain bisection whose probes all take `count` blocks and believe the share they see."""
    low, high, requests = -1, len(levels), 0
    while high - low > 1:
        middle = (low + high) // 2
        found = [
            r for block in islice(blocks(question.server, levels[middle], seed * 1000 + middle), count) for r in block
        ]
        requests += len(found)
        met = all(met >= 0.95 * total for met, total in question.counts(found))
        low, high = (middle, high) if met else (low, middle)
    return (levels[low] if low >= 0 else 0), requests
