"""The SLO search in virtual time (docs/capacity.md): against seeded servers of the embedded engine whose capacity is
known from very long runs, and against servers whose share of good requests is known exactly, with stalls.

1,000 runs a setting nightly, a few else: no proven bound is too high, the interval has the truth, and few probes.
"""

import random
from collections import Counter
from functools import cache
from itertools import islice
from typing import NamedTuple

import pytest

from harness.questions.capacity.decide import MAX_PROOFS, slo_answer
from harness.questions.capacity.level import MAX_SLO_BLOCKS, Probe
from harness.questions.capacity.record import CapacityAnswer
from tests.support import level_servers
from tests.support.level_servers import random_server
from tests.support.nightly import NIGHTLY
from tests.support.virtual_probes import (
    MAX_LEVEL,
    SERVERS,
    SeededQuestion,
    SloTruth,
    add_block,
    blocks,
    run_search,
    seeded_question,
    seeded_server,
    truth,
    truths,
)

SEEDS = list(range(SERVERS)) if NIGHTLY else [100, 120, 160]  # these need few requests
RUNS = 5 if NIGHTLY else 1  # of each seed


class Proof(NamedTuple):
    probes: list[Probe]
    answer: CapacityAnswer
    truth: SloTruth


@cache
def proofs() -> list[Proof]:
    found = []
    for seed in SEEDS:
        for run in range(RUNS):
            probes = run_search(seeded_question(seed), SERVERS * run + seed)
            answer = slo_answer(probes, MAX_LEVEL)
            assert answer is not None
            found.append(Proof(probes, answer, truths()[seed]))
    return found


@pytest.mark.nightly  # of data that is stored
@pytest.mark.parametrize("seed", range(0, SERVERS, 10))
def test_the_stored_truth_is_what_is_measured(seed: int) -> None:
    measured, stored = truth(seed), truths()[seed]
    found = (measured.capacity, measured.fixed_level)
    assert found == (stored.capacity, stored.fixed_level), "python -m tests.support.virtual_probes writes new truths"
    assert measured.fixed_requests == pytest.approx(stored.fixed_requests, rel=1e-3)


def test_a_proven_number_of_users_meets_the_slos() -> None:
    too_high = sum((proof.answer.low or 0) > proof.truth.capacity for proof in proofs())
    assert too_high <= 0.05 * len(proofs())


def test_the_answer_has_the_truth() -> None:
    covered = sum(
        (answer.low or 0) <= true.capacity and (answer.high is None or true.capacity <= answer.high)
        for _, answer, true in proofs()
    )
    assert covered >= 0.95 * len(proofs())


def test_most_answers_are_proven_and_close_after_few_requests() -> None:
    """All probes of a bisection with fixed samples take 40 blocks. It breaks its SLOs more often."""
    assert max(sum(probe.purpose == "slo" for probe in proof.probes) for proof in proofs()) <= MAX_PROOFS
    assert sum(proof.answer.kind == "unproven" for proof in proofs()) <= 0.15 * len(proofs())
    proven = [proof for proof in proofs() if proof.answer.low]
    shares = sorted((proof.answer.low or 0) / proof.truth.capacity for proof in proven)
    assert shares[len(shares) // 2] >= 0.85
    requests = sum(block.answers for proof in proofs() for probe in proof.probes for block in probe.blocks)
    assert requests <= sum(proof.truth.fixed_requests for proof in proofs())


def test_the_estimate_of_the_ramp_is_close() -> None:
    """Half of the estimates are within a quarter of the truth, nine of ten within a factor of two."""
    ratios = []
    for probes, _, true in proofs():
        first = slo_answer([probe for probe in probes if probe.purpose == "ramp"], MAX_LEVEL)
        if true.capacity and first is not None:
            ratios.append((first.level or 0) / true.capacity)
    ratios.sort()
    assert 0.75 <= ratios[len(ratios) // 2] <= 1.25
    assert sum(0.5 <= ratio <= 2 for ratio in ratios) >= 0.9 * len(ratios)


# Share of answer times in which a stall hits all requests in flight; the SLOs allow 5 % of misses.
@pytest.mark.parametrize("stalls", [0.0, 0.02, 0.04, 0.08])
def test_stalls_that_hit_all_requests_in_flight_prove_nothing_wrong(stalls: float) -> None:
    runs = 1000 if NIGHTLY else 12
    too_high = wrong = 0
    for seed in range(runs):
        server = random_server(seed, stalls=stalls)
        answer = slo_answer(level_servers.run_search(server, seed), level_servers.MAX_LEVEL)
        assert answer is not None
        too_high += (answer.low or 0) > server.capacity
        wrong += (
            not (answer.low or 0)
            <= server.capacity
            <= (level_servers.MAX_LEVEL if answer.high is None else answer.high)
        )
    assert too_high <= max(1, 0.05 * runs)
    assert wrong <= max(1, 0.05 * runs)


def test_error_rates_and_power_of_a_probe() -> None:
    """Probes of servers whose TTFT is bounded such that a given share of the requests meets it."""
    states: dict[float, Counter[str]] = {share: Counter() for share in (0.9, 0.94, 0.99, 0.999)}
    for seed in range(60 if NIGHTLY else 5):
        server, level = seeded_server(seed), round(2 ** random.Random(f"level {seed}").uniform(0, 5))
        streams = [islice(blocks(server, level, 9000 + run), MAX_SLO_BLOCKS) for run in range(6)]
        runs = [list(stream) for stream in streams]
        values = sorted(request.ttft_s for run in runs for _, block in run for request in block)
        for share, found in states.items():
            bound = values[int(share * len(values))]
            question = SeededQuestion(server, bound, None)
            for run in runs:
                probe = Probe(level, question.slos)
                for seconds, block in run:
                    add_block(probe, question, block, seconds)
                found[probe.end()] += 1
    total = states[0.9].total()
    assert states[0.9]["pass"] == 0 and states[0.9]["fail"] >= 0.5 * total
    assert states[0.94]["pass"] <= 0.05 * total
    assert states[0.99]["pass"] >= 0.4 * total
    assert states[0.999]["pass"] >= 0.6 * total and not states[0.999]["fail"]
