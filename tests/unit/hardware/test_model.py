"""What files of models tell of weights and KV cache, which is counted as vLLM does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.base.units import GIB
from harness.hardware.geometry import Geometry
from harness.hardware.model import (
    compute_capacity,
    find_model,
    hub_cache,
    make_layout,
    measure_weights,
    read_model,
)
from tests.support.made_models import QWEN3, geometry, model
from tests.support.wording import Wording

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "hidden_size": 3840, "sliding_window": 1024, "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "hidden_size": 7168,
}  # fmt: skip
DATA = Path(__file__).parents[2] / "data" / "vllm_kv_capacity.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in DATA.read_text().splitlines()[1:]]
CPU_BLOCK = 128  # tokens, of vLLM on a CPU
# vLLM 0.32.0 on a CPU with 100 MiB for a model that needs more.
REFUSED = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (0.44 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.08 GiB). Based on the available memory, the estimated "
    "maximum model length is 768. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU "
    "backend) or decreasing `max_model_len` when initializing the engine."
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3, geometry(28, heads=8, size=128, queries=16 * 128)),
        (LLAMA, geometry(32, heads=32, size=128, queries=32 * 128)),
        (GEMMA3, geometry(8, 40, window=1024, heads=8, size=256, queries=16 * 256)),
        (DEEPSEEK, geometry(61, heads=1, size=576, latent=True)),
        (
            LLAMA | {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4096},
            geometry(0, 32, window=4096, heads=8, size=128, queries=32 * 128),
        ),
        (
            QWEN3 | {"model_type": "gpt_oss", "num_hidden_layers": 4, "head_dim": 64, "sliding_window": 128,
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
            geometry(2, 2, window=128, heads=8, size=64, queries=16 * 64),
        ),
        (
            QWEN3 | {"model_type": "gemma2", "num_hidden_layers": 42, "sliding_window": 4096,
                     "use_sliding_window": None},
            geometry(21, 21, window=4096, heads=8, size=128, queries=16 * 128),
        ),
    ],
    ids=["qwen3", "llama", "gemma3", "deepseek", "mistral", "gpt-oss", "gemma2"],
)  # fmt: skip
def test_geometries(tmp_path: Path, config: dict[str, Any], expected: Geometry) -> None:
    shape = read_model(model(tmp_path, config))
    assert (shape.geometry, shape.unknown, shape.kv_bytes) == (expected, [], 2)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (QWEN3 | {"layer_types": ["linear_attention"] * 21 + ["other_attention"] * 7}, "other_attention"),
        (QWEN3 | {"linear_num_key_heads": 16}, "linear_num_key_heads"),
        (QWEN3 | {"layer_types": ["full_attention"]}, "1 layer_types"),
        (QWEN3 | {"sliding_window": 4096, "use_sliding_window": True}, "layer_types"),
        (QWEN3 | {"num_key_value_heads": None}, "num_key_value_heads"),
        (QWEN3 | {"num_hidden_layers": "28"}, "num_hidden_layers"),
        (QWEN3 | {"is_encoder_decoder": True}, "encoder-decoder"),
        (DEEPSEEK | {"index_topk": 2048}, "index_topk"),
        (
            DEEPSEEK | {"model_type": "longcat_flash"},
            "longcat_flash",
        ),
    ],
)
def test_what_is_not_said_clearly_is_unknown(
    tmp_path: Path, config: dict[str, Any], named: str, wording: Wording
) -> None:
    shape = read_model(model(tmp_path, config))
    assert shape.geometry is None
    assert [named in text for text in shape.unknown] == [True]
    wording(shape.unknown)


def test_a_checkpoint_with_a_kv_cache_type_of_its_own(tmp_path: Path, wording: Wording) -> None:
    shape = read_model(model(tmp_path, QWEN3 | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}))
    assert shape.kv_bytes is None
    wording(shape.unknown)


def test_a_model_is_found_by_folder_by_file_and_in_the_hub_cache(tmp_path: Path, wording: Wording) -> None:
    folder = model(tmp_path / "own", QWEN3)
    assert find_model(str(folder)) == find_model(str(folder / "config.json")) == folder
    hub = tmp_path / "home/hub/models--Qwen--Qwen3-0.6B"
    model(hub / "snapshots/aaa", QWEN3)
    current = model(hub / "snapshots/bbb", QWEN3)
    environment = {"HF_HOME": str(tmp_path / "home")}
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("bbb")
    assert find_model("Qwen/Qwen3-0.6B", environment) == current
    with pytest.raises(HarnessError) as caught:
        find_model("Qwen/Qwen3-0.6", environment)
    assert "'Qwen/Qwen3-0.6'" in str(caught.value)
    wording(caught.value)
    assert hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    for text in ("[]", "{"):
        (folder / "config.json").write_text(text)
        with pytest.raises(HarnessError, match=r"config\.json: "):
            read_model(folder)


def test_weights_are_those_of_the_index(tmp_path: Path) -> None:
    assert measure_weights(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"1" * 10)
    (tmp_path / "consolidated.safetensors").write_bytes(b"1" * 10)  # the same once more, in another form
    assert measure_weights(tmp_path) == 10
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    (tmp_path / names[0]).write_bytes(b"1" * 20)
    assert measure_weights(tmp_path) is None, "one is missing"
    (tmp_path / names[1]).write_bytes(b"1" * 5)
    assert measure_weights(tmp_path) == 25


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['full_layers']}+{c['sliding_layers']}-{c['max_model_len']}")
def test_as_vllms_own_functions(case: dict[str, Any]) -> None:
    names = {"heads": "kv_heads", "size": "head_size", "window": "window", "latent": "latent"}
    sizes = {name: case[key] for name, key in names.items()}
    shape = geometry(case["full_layers"], case["sliding_layers"], **sizes)
    layout = make_layout(shape, 2, block=case["block"], in_flight=case["in_flight"])
    capacity = compute_capacity(layout, case["available"], case["max_model_len"])
    if case["tokens"] is None:
        assert (capacity.fits, capacity.longest) == (False, case["longest"])
    else:
        expected = (True, case["tokens"], case["concurrency"], case["max_model_len"])
        assert (capacity.fits, capacity.tokens, round(capacity.concurrency, 4), capacity.longest) == expected


def test_a_line_of_a_refusal_and_the_bytes_of_a_token() -> None:
    shape = geometry(28, heads=8, size=128)
    layout = make_layout(shape, 2, block=CPU_BLOCK)
    capacity = compute_capacity(layout, 100 << 20, 4096)
    match = re.search(r"\(([\d.]+) GiB KV.*memory \(([\d.]+) GiB\).*length is (\d+)", REFUSED)
    assert match is not None and not capacity.fits
    usable = (100 << 20) - layout.unit_bytes
    assert match.groups() == (f"{layout.request_bytes(4096) / GIB:.2f}", f"{usable / GIB:.2f}", str(capacity.longest))
    sizes = [make_layout(shape, 2, tensor_parallel=gpus).token_bytes for gpus in (1, 2, 8, 16)]
    assert sizes == [114688, 57344, 14336, 14336]  # heads are divided among GPUs, but each has one
    latent = geometry(61, heads=1, size=576, latent=True)
    assert {make_layout(latent, 2, tensor_parallel=gpus).token_bytes for gpus in (1, 8)} == {61 * 576 * 2}
    window = make_layout(geometry(1, 1, window=128, heads=1, size=64), 2)
    assert (window.token_bytes, window.window_bytes) == (2 * 64 * 2, 128 * 2 * 64 * 2), "of the layers without a window"
    nothing = compute_capacity(layout, -GIB, 2048)
    assert (nothing.tokens, nothing.concurrency, nothing.longest, nothing.fits) == (0, 0.0, 0, False)
