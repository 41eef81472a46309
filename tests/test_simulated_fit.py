"""The preset reproduces the published numbers that it is fitted to: pure model, no clock."""

import msgspec
import pytest

from harness.simulated.engine import PRESETS
from tests.predict import predict_batches

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


def test_a_cap_at_what_the_cache_holds_turns_the_loss_into_waiting() -> None:
    capped = predict_batches(msgspec.structs.replace(STRIX, max_num_seqs=5), LONG, 10)
    free = predict_batches(STRIX, LONG, 10)
    assert wall(1) / capped.wall_s == pytest.approx(2.03, abs=0.02)
    assert (capped.max_running, capped.max_waiting, capped.preemptions) == (5, 5, 0)
    assert (free.max_running, free.preemptions) == (10, 22)


@pytest.mark.parametrize("prompt", [355, 360, 365, 370, 375])
def test_the_fit_does_not_hang_on_a_few_tokens(prompt: int) -> None:
    work = [(prompt, 10)] * 20
    assert 1.9 <= wall(1, work) / wall(5, work) <= 2.5
    assert 0.35 <= wall(1, work) / wall(10, work) <= 0.6
    assert wall(1, work) / wall(10, work, max_num_seqs=5) >= 1.9


def test_recompute_alone_does_not_explain_the_loss() -> None:
    assert 1.5 < wall(1) / wall(10, preemption_s=0.0) < 1.9


def test_prefix_caching_or_a_larger_pool_would_soften_it() -> None:
    assert wall(10) > 1.5 * wall(10, enable_prefix_caching=True)
    assert wall(1) / wall(10, num_gpu_blocks=1024) > 2.0
