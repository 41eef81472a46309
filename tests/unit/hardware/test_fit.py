"""What is left of a GPU's memory for a model, and whether it fits."""

import re
from pathlib import Path

import pytest

from harness.base.errors import HarnessError
from harness.base.units import GIB
from harness.hardware.fit import OTHER_BYTES, ServerSettings, estimate_fit, format_fit
from harness.hardware.model import read_model
from harness.machine.memory import compute_pool_share
from tests.support.made_models import QWEN3, model, qwen3
from tests.support.wording import Wording

SEED = compute_pool_share(int(76.45 * GIB), 96 * GIB, source="given")


def test_what_is_left_for_a_model(tmp_path: Path, wording: Wording) -> None:
    shape = qwen3(tmp_path)
    fit = estimate_fit(shape, SEED, ServerSettings(max_model_len=8192, max_num_seqs=10))
    assert fit.weights_bytes is not None and fit.capacity is not None
    rest = SEED.budget_bytes - fit.weights_bytes
    assert fit.kv_bytes == (rest - OTHER_BYTES[1], rest - OTHER_BYTES[0])
    assert (fit.token_bytes, fit.request_bytes) == (114688, 8192 * 114688)
    careful, hopeful = fit.capacity
    assert careful.tokens == fit.kv_bytes[0] // (16 * 114688) * 16
    assert hopeful.concurrency == pytest.approx(hopeful.tokens / 8192)
    assert (fit.fits, fit.unknown, fit.advice) == (True, [], [])
    wording(format_fit(fit)[1])
    two = estimate_fit(shape, SEED, ServerSettings(max_model_len=8192, tensor_parallel=2))
    assert (two.weights_bytes, two.token_bytes) == (fit.weights_bytes // 2, 57344), "GPUs share weights and heads"
    alone = estimate_fit(shape, None, ServerSettings(max_model_len=8192))
    assert (alone.token_bytes, alone.kv_bytes, alone.fits, alone.advice) == (114688, None, None, [])


@pytest.mark.parametrize(
    ("gib", "settings", "fits", "advice"),
    [
        (80, ServerSettings(max_model_len=8192), False, "take a smaller or quantised model, more GPUs"),
        (71, ServerSettings(max_model_len=40960), False, "take a smaller or quantised model, more GPUs"),
        (71.3, ServerSettings(max_model_len=16384), None, "take a smaller or quantised model, more GPUs"),
        (67, ServerSettings(max_model_len=500000), False, "take a smaller or quantised model, more GPUs"),
        (1.5, ServerSettings(max_model_len=40960, max_num_seqs=64), True,
         "16 requests of 40,960 tokens fit at once, and the others wait: --max-num-seqs 16 makes that certain"),
    ],
    ids=["weights", "length", "undecided", "beyond-the-models-own", "sequences"],
)  # fmt: skip
def test_a_model_that_does_not_fit(
    tmp_path: Path, gib: float, settings: ServerSettings, fits: bool | None, advice: str
) -> None:
    shape = qwen3(tmp_path, gib=gib)
    fit = estimate_fit(shape, SEED, settings)
    assert fit.fits is fits
    (text,) = fit.advice
    assert text.startswith(advice)
    if match := re.search(r"--max-model-len \(at most (\d+)\)", text):
        shorter = estimate_fit(shape, SEED, ServerSettings(max_model_len=int(match[1])))
        assert shorter.fits is True and shorter.unknown == [], "never beyond the model's own length"


def test_what_is_not_known_is_said_and_nothing_is_made_up(tmp_path: Path, wording: Wording) -> None:
    shape = read_model(model(tmp_path / "a", QWEN3 | {"compress_ratios": [4] * 28}))
    fit = estimate_fit(shape, SEED, ServerSettings(max_model_len=8192))
    assert (fit.weights_bytes, fit.token_bytes, fit.kv_bytes, fit.capacity, fit.fits) == (None,) * 5
    wording(fit.unknown)
    shape = qwen3(tmp_path / "b")
    for settings, unknown in (
        (ServerSettings(kv_cache_dtype="nvfp4"), "the size of a number as nvfp4 in the KV cache"),
        (ServerSettings(max_model_len=50000), "whether vLLM takes 50,000 tokens: the model's own limit is 40,960"),
    ):
        (text,) = estimate_fit(shape, SEED, settings).unknown
        assert text.startswith(unknown)
    with pytest.raises(HarnessError) as caught:
        estimate_fit(qwen3(tmp_path / "c", max_position_embeddings=None), SEED)
    wording(caught.value)
