"""The embedded engine in virtual time: leaps change nothing, seeds repeat."""

import heapq
import itertools
import random
import statistics
from collections.abc import Iterator
from itertools import islice

import msgspec
import pytest

from harness.simulated.engine import EngineConfig, Sequence, SimulatedEngine
from tests.support.virtual import VirtualRequest, VirtualWork, closed_loop, concurrent_loads
from tests.support.virtual_probes import seeded_server

THINKING = VirtualWork(prompt_tokens=(20, 200), output_tokens=(1, 60), think_s=0.5)


def step_by_step(config: EngineConfig, users: int, work: VirtualWork, seed: int) -> Iterator[VirtualRequest]:
    """A closed loop on the engine itself, each step planned and completed."""
    dice = random.Random(f"{seed} {users}")
    due = sorted(dice.expovariate(1 / work.think_s) if work.think_s else 0.0 for _ in range(users))
    engine = SimulatedEngine(msgspec.structs.replace(config, seed=dice.randrange(1 << 30)))
    lengths = random.Random(dice.randrange(1 << 30))
    now = 0.0
    for key in itertools.count():
        while due and due[0] <= now:
            at = heapq.heappop(due)
            prompt = [0] * lengths.randint(*work.prompt_tokens)
            engine.add(Sequence(key, prompt, lengths.randint(*work.output_tokens), at))
        step = engine.begin(now)
        now = due[0] if step is None else now + step.duration_s
        for sequence in engine.complete(step, now) if step else []:
            if sequence.output_tokens >= sequence.target:
                first = sequence.first_token_s
                assert first is not None
                yield VirtualRequest(sequence.arrived_s, first, now, sequence.prompt_tokens, sequence.target)
                heapq.heappush(due, now + (dice.expovariate(1 / work.think_s) if work.think_s else 0.0))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("users", [4, 60])
@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 50}, {"compile_s": 0.1, "compile_steps": 3}])
def test_leaps_give_the_measurements_of_single_steps(seed: int, users: int, changes: dict[str, float]) -> None:
    server = seeded_server(seed)
    config = msgspec.structs.replace(server.config, jitter=0.0, **changes)
    work = msgspec.structs.replace(server.work, think_s=0.2 if seed % 2 else 0.0)
    leapt = islice(closed_loop(config, users, work, seed=seed), 90)
    for one, other in zip(leapt, islice(step_by_step(config, users, work, seed), 90), strict=True):
        assert msgspec.structs.astuple(one) == pytest.approx(msgspec.structs.astuple(other), rel=1e-9, abs=1e-9)


def test_the_same_seed_gives_the_same_requests_and_another_one_others() -> None:
    server = seeded_server(1)

    def first(seed: int) -> list[VirtualRequest]:
        return list(islice(closed_loop(server.config, 8, server.work, seed=seed), 50))

    assert first(3) == first(3) != first(4)
    assert len(list(closed_loop(server.config, 8, server.work, requests=30))) == 30  # which ends the load


def test_measurements_are_those_of_one_user_by_hand() -> None:
    """A prompt of 10 tokens and 5 tokens of output: one prefill step and four decode steps."""
    config = msgspec.structs.replace(
        seeded_server(0).config, step_base_s=0.01, step_per_sequence_s=0.001, step_per_kv_token_s=0.0,
        prefill_per_token_s=0.002, jitter=0.0)  # fmt: skip
    work = VirtualWork(prompt_tokens=(10, 10), output_tokens=(5, 5))
    one, two = islice(closed_loop(config, 1, work), 2)
    assert (one.ttft_s, one.tpot_s, one.e2e_s) == pytest.approx((0.031, 0.011, 0.075))
    assert two.sent_s == one.ended_s


def test_jitter_of_leaps_has_the_spread_of_single_steps() -> None:
    config = msgspec.structs.replace(seeded_server(0).config, jitter=0.2, step_base_s=0.01)
    work = VirtualWork(prompt_tokens=(10, 10), output_tokens=(40, 40))
    spreads = []
    for stream in (closed_loop(config, 1, work, seed=1), step_by_step(config, 1, work, 1)):
        times = [request.e2e_s for request in islice(stream, 2000)]
        spreads.append(statistics.stdev(times) / statistics.fmean(times))
    assert spreads[0] == pytest.approx(spreads[1], rel=0.1)


def test_a_request_that_never_fits_is_an_error() -> None:
    config = msgspec.structs.replace(seeded_server(0).config, max_model_len=64)
    with pytest.raises(ValueError, match=r"60 \+ 5 tokens"):
        next(closed_loop(config, 1, VirtualWork(prompt_tokens=(60, 60), output_tokens=(5, 5))))


def test_concurrent_loads_share_the_engine() -> None:
    config = msgspec.structs.replace(seeded_server(0).config, step_per_sequence_s=0.001, max_model_len=1000)
    long = VirtualWork(prompt_tokens=(20, 20), output_tokens=(60, 60))
    both = list(islice(concurrent_loads(config, [(4, THINKING), (2, long)], seed=1), 400))
    assert {request.load for request in both} == {0, 1}
    assert {request.output_tokens for request in both if request.load == 1} == {60}
    alone = list(islice(closed_loop(config, 4, THINKING, seed=1), 300))
    chat = [request for request in both if request.load == 0]
    assert statistics.fmean(r.e2e_s for r in chat) > statistics.fmean(r.e2e_s for r in alone)
