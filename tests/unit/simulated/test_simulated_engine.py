"""The model alone: every number here is computed by hand, no clock is involved."""

import re
from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec
import pytest

from harness.failures.diagnosis import explain
from harness.simulated.__main__ import main
from harness.simulated.engine import MEMORY, PRESETS, BlockPool, EngineConfig, Sequence, SimulatedEngine, block_hashes
from tests.support.wording import Wording

PLAIN = EngineConfig(
    step_base_s=1.0, step_per_sequence_s=0.1, prefill_per_token_s=0.01, enable_prefix_caching=False, max_model_len=1024,
    num_gpu_blocks=64,
)  # fmt: skip


def engine(**changes: object) -> SimulatedEngine:
    return SimulatedEngine(msgspec.structs.replace(PLAIN, **changes))


def add(target: SimulatedEngine, key: int, prompt: int, output: int, now: float = 0.0) -> Sequence:
    sequence = Sequence(key, [key * 1000 + i for i in range(prompt)], output, now)
    target.add(sequence)
    return sequence


def run(target: SimulatedEngine, now: float = 0.0) -> list[tuple[float, list[int]]]:
    """Every step's end and the keys that got a token in it."""
    steps = []
    while (step := target.begin(now)) is not None:
        now += step.duration_s
        steps.append((round(now, 9), [s.key for s in target.complete(step, now)]))
    return steps


def works(target: SimulatedEngine) -> list[list[tuple[int, int]]]:
    """The keys and numbers of tokens of every step."""
    steps = []
    while (step := target.begin(0.0)) is not None:
        steps.append([(s.key, n) for s, n in step.work])
        list(target.complete(step, 0.0))
    return steps


def test_a_late_arrival_prefills_inside_the_steps_of_the_others() -> None:
    two = engine()
    add(two, 1, prompt=10, output=3)
    first = two.begin(0.0)
    assert first and first.duration_s == pytest.approx(1.2)
    assert [s.key for s in two.complete(first, 1.2)] == [1]
    add(two, 2, prompt=20, output=2, now=1.0)
    assert run(two, 1.2) == [(2.6, [1, 2]), (3.8, [1, 2])]  # 1 + 2 x 0.1 + 20 x 0.01, then 1.2


def test_max_num_seqs_makes_the_rest_wait_in_order() -> None:
    capped = engine(max_num_seqs=2)
    for key in (1, 2, 3):
        add(capped, key, prompt=1, output=2)
    assert [keys for _, keys in run(capped)] == [[1, 2], [1, 2], [3], [3]]


def test_the_token_budget_cuts_a_prompt_into_chunks_beside_decoding() -> None:
    chunked = engine(max_num_batched_tokens=16)
    add(chunked, 1, prompt=16, output=4)
    add(chunked, 2, prompt=40, output=1)
    assert works(chunked) == [[(1, 16)], [(1, 1), (2, 15)], [(1, 1), (2, 15)], [(1, 1), (2, 10)]]
    limited = engine(long_prefill_token_threshold=8)  # a request, not the step
    add(limited, 1, prompt=12, output=1)
    add(limited, 2, prompt=8, output=1)
    assert works(limited) == [[(1, 8), (2, 8)], [(1, 4)]]


def test_the_youngest_is_preempted_and_computes_everything_again() -> None:
    tight = engine(num_gpu_blocks=4, max_model_len=64, preemption_s=5.0)
    old, young = add(tight, 1, prompt=16, output=20), add(tight, 2, prompt=16, output=20)
    durations, prefills, preempted = list[float](), list[int](), False
    while (step := tight.begin(0.0)) is not None:
        if tight.preemptions and not preempted:
            preempted = True
            assert [waiting.key for waiting in tight.waiting] == [2, 3]  # the victim is first, and nothing is admitted
        if len(durations) == 16:
            add(tight, 3, prompt=1, output=1)
        durations.append(round(step.duration_s, 9))
        prefills.append(sum(count for one, count in step.work if count > 1 or not one.output_tokens))
        list(tight.complete(step, 0.0))
    # both hold 2 blocks up to 32 tokens; the 33rd of the old one takes the place of the young one
    assert (old.preemptions, young.preemptions, tight.preemptions) == (0, 1, 1)
    assert prefills.index(33 + 1) == 20  # its 16 + 17 tokens and the third one's, once the old one has finished
    assert durations[17] == 6.1  # base + one sequence + the lump of the preemption
    assert (old.output_tokens, young.output_tokens, tight.pool.free) == (20, 20, 4)


def test_a_cached_prefix_is_not_computed_again() -> None:
    cached = engine(enable_prefix_caching=True)
    first, second = add(cached, 1, prompt=40, output=1), Sequence(2, [1000 + i for i in range(40)], 1, 0.0)
    assert run(cached) == [(1.5, [1])]
    cached.add(second)
    assert run(cached) == [(1.18, [2])]  # 1 + 0.1 + 8 x 0.01: two blocks of 16 are found
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert (cached.prefix_queries, cached.prefix_hits) == (80, 32)
    again = Sequence(3, [1000 + i for i in range(32)], 1, 0.0)  # whose last token is computed all the same
    cached.add(again)
    run(cached)
    assert again.cached_tokens == 16


def test_cached_blocks_are_evicted_oldest_and_tail_first() -> None:
    pool = BlockPool(4, 2)
    held: list[int] = []
    hashes = block_hashes([1, 2, 3, 4, 5, 6], 2)
    assert pool.take(held, 6)
    pool.remember(held, hashes)
    pool.release(held)
    assert (pool.free, pool.usage) == (4, 0.0)
    other: list[int] = []
    assert pool.take(other, 4)  # the never used block, then the tail of the cached chain
    assert len(pool.match(hashes)) == 2
    assert not pool.take(other, 10)  # needs 3 more, 2 are left
    assert len(other) == 2


def test_an_abort_gives_everything_back_wherever_the_request_is() -> None:
    some = engine(max_num_seqs=1)
    running, waiting = add(some, 1, prompt=16, output=5), add(some, 2, prompt=16, output=5)
    step = some.begin(0.0)
    assert step
    some.abort(running)
    some.abort(waiting)
    some.abort(running)
    assert list(some.complete(step, 1.0)) == []
    assert some.idle and some.pool.free == 64


def test_accepted_drafts_are_tokens_of_the_same_step_and_each_draft_takes_time() -> None:
    sure = engine(num_speculative_tokens=2, acceptance_rate=1.0, draft_per_token_s=0.05)
    add(sure, 1, prompt=10, output=6)
    # The first token comes of the prompt, which drafts nothing; the last step drafts no more than is missing.
    assert run(sure) == [(1.2, [1]), (2.4, [1, 1, 1]), (3.55, [1, 1])]
    assert (sure.drafted, sure.accepted, sure.idle, sure.pool.free) == (3, 3, True, 64)
    never = engine(num_speculative_tokens=2, acceptance_rate=0.0, draft_per_token_s=0.05)
    add(never, 1, prompt=10, output=3)
    assert run(never) == [(1.2, [1]), (2.35, [1]), (3.45, [1])]
    assert (never.drafted, never.accepted) == (1, 0)


def test_a_draft_is_accepted_if_those_before_it_were() -> None:
    half = engine(num_speculative_tokens=3, acceptance_rate=0.5, num_gpu_blocks=2000, max_model_len=20_000)
    add(half, 1, prompt=1, output=10_000)
    run(half)
    assert half.accepted / half.drafted == pytest.approx((0.5 + 0.25 + 0.125) / 3, abs=0.02)


class Prediction(NamedTuple):
    wall_s: float
    preemptions: int
    max_running: int
    max_waiting: int


def predict_batches(config: EngineConfig, requests: Seq[tuple[int, int]], batch: int) -> Prediction:
    """Work through `requests` ((prompt tokens, output tokens) each), `batch` at once, waiting for each whole batch.

    All prompts differ from their first token on, so that the prefix cache finds nothing.
    """
    engine, now, max_running, max_waiting = SimulatedEngine(config), 0.0, 0, 0
    for start in range(0, len(requests), batch):
        for key, (prompt, output) in enumerate(requests[start : start + batch], start):
            engine.add(Sequence(key, [hash((key, i)) for i in range(prompt)], output, now))
        while (step := engine.begin(now)) is not None:
            now += step.duration_s
            max_running = max(max_running, len(engine.running))
            max_waiting = max(max_waiting, len(engine.waiting))
            list(engine.complete(step, now))
    return Prediction(now, engine.preemptions, max_running, max_waiting)


def test_the_same_seed_gives_the_same_schedule_and_jitter_is_small() -> None:
    jittery = msgspec.structs.replace(PLAIN, jitter=0.01, seed=7)
    walls = [predict_batches(c, [(10, 100)], 1).wall_s for c in (
        jittery, jittery, msgspec.structs.replace(jittery, seed=8), PLAIN)]  # fmt: skip
    assert walls[0] == walls[1] != walls[2]
    assert walls[0] == pytest.approx(walls[3], rel=0.005)
    slow = msgspec.structs.replace(PLAIN, slowdown=1.1)
    assert predict_batches(slow, [(50, 20)] * 6, 3).wall_s == pytest.approx(
        1.1 * predict_batches(PLAIN, [(50, 20)] * 6, 3).wall_s
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"jitter": -1.0}, "jitter"),
        ({"slowdown": 0.0}, "step"),
        ({"max_model_len": 2048}, "(1024)"),
    ],
)
def test_impossible_parameters_are_refused(changes: dict[str, object], text: str, wording: Wording) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        engine(**changes)
    wording(caught.value)


# The preset reproduces the published numbers that it is fitted to.

STRIX = msgspec.structs.replace(PRESETS["strix-halo-qwen3.5-0.8b"], jitter=0.0)
SHORT = [(30, 50)] * 25
LONG = [(365, 10)] * 20


def wall(batch: int, work: list[tuple[int, int]] = LONG, **changes: object) -> float:
    return predict_batches(msgspec.structs.replace(STRIX, **changes), work, batch).wall_s


def test_short_prompts_sequentially_and_all_at_once() -> None:
    assert wall(1, SHORT) == pytest.approx(13.07, rel=0.002)
    assert wall(25, SHORT) == pytest.approx(4.18, rel=0.002)
    assert 1250 / wall(1, SHORT) == pytest.approx(95.6, rel=0.002)
    assert 1250 / wall(25, SHORT) == pytest.approx(299.3, rel=0.002)


def test_long_prompts_gain_at_five_and_lose_at_ten() -> None:
    assert wall(1) == pytest.approx(2.80, abs=0.01)
    assert wall(1) / wall(5) == pytest.approx(2.03, abs=0.02)
    assert wall(1) / wall(10) == pytest.approx(0.39, abs=0.02)
    assert 1.5 < wall(1) / wall(10, preemption_s=0.0) < 1.9, "recompute alone does not explain the loss"
    assert wall(10) > 1.5 * wall(10, enable_prefix_caching=True)
    assert wall(1) / wall(10, num_gpu_blocks=1024) > 2.0


def test_a_cap_at_what_the_cache_holds_turns_the_loss_into_waiting() -> None:
    capped = predict_batches(msgspec.structs.replace(STRIX, max_num_seqs=5), LONG, 10)
    free = predict_batches(STRIX, LONG, 10)
    assert wall(1) / capped.wall_s == pytest.approx(2.03, abs=0.02)
    assert (capped.max_running, capped.max_waiting, capped.preemptions) == (5, 5, 0)
    assert (free.max_running, free.preemptions) == (10, 22)


# The memory of the modelled GPU.


@pytest.mark.parametrize("preset", PRESETS)
def test_the_usual_share_of_the_memory_gives_the_cache_of_the_preset(preset: str) -> None:
    blocks = MEMORY[preset].blocks(0.75, PRESETS[preset])
    assert blocks == pytest.approx(PRESETS[preset].num_gpu_blocks, rel=0.05)


def test_more_memory_and_fewer_sequences_leave_more_for_the_cache() -> None:
    memory = MEMORY["strix-halo-qwen3.5-0.8b"]
    shares = [memory.blocks(share, STRIX) for share in (0.70, 0.75, 0.78)]
    assert shares == sorted(shares) and len(set(shares)) == 3
    assert memory.blocks(0.75, msgspec.structs.replace(STRIX, max_num_seqs=10)) > memory.blocks(0.75, STRIX)
    assert memory.blocks(0.75, msgspec.structs.replace(STRIX, max_num_batched_tokens=512)) > memory.blocks(0.75, STRIX)


@pytest.mark.parametrize(
    ("arguments", "id_"),
    [
        (["--gpu-memory-utilization", "0.92"], "mem.free_lt_util"),
        (["--gpu-memory-utilization", "0.78", "--free-memory-gib", "70"], "mem.free_lt_util"),
        (["--gpu-memory-utilization", "0.1"], "mem.no_cache_blocks"),
        (["--gpu-memory-utilization", "0.2"], "mem.kv_lt_one_request_v0"),
    ],
)
def test_too_little_memory_is_refused_as_vllm_does(
    arguments: list[str], id_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    found = explain(capsys.readouterr().err)
    assert found is not None
    assert found.id == id_
