"""What files of models tell of weights and KV cache, which is counted as vLLM does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.machine.model import KvShape, compute_capacity, find_model, hub_cache, measure_weights, read_model
from harness.units import GIB

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 1024, "max_position_embeddings": 40960, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
DATA = Path(__file__).parent / "data" / "vllm_kv_capacity.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in DATA.read_text().splitlines()[1:]]
CPU_BLOCK = 128  # tokens, of vLLM on a CPU
# vLLM 0.32.0 on a CPU with 100 MiB for a model that needs more.
REFUSED = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (0.44 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.08 GiB). Based on the available memory, the estimated "
    "maximum model length is 768. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU "
    "backend) or decreasing `max_model_len` when initializing the engine."
)


def model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3, KvShape(layers=28, heads=8, head_size=128)),
        (LLAMA, KvShape(layers=32, heads=32, head_size=128)),
        ({"text_config": LLAMA | {"num_key_value_heads": 4}}, KvShape(layers=32, heads=4, head_size=128)),
        (LLAMA | {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4096}, None),
        (QWEN3 | {"layer_types": ["linear_attention"] * 21 + ["full_attention"] * 7}, None),
        (QWEN3 | {"model_type": "deepseek_v3"}, None),
        (QWEN3 | {"num_key_value_heads": None}, None),
        (QWEN3 | {"head_dim": None}, None),
        (QWEN3 | {"num_hidden_layers": "28"}, None),
    ],
)
def test_shapes_and_what_is_not_known_for_sure(
    tmp_path: Path, config: dict[str, Any], expected: KvShape | None
) -> None:
    shape = read_model(model(tmp_path, config))
    assert (shape.kv, shape.kv_bytes, len(shape.unknown)) == (expected, 2, 0 if expected else 1)


def test_a_checkpoint_with_a_kv_cache_type_of_its_own(tmp_path: Path) -> None:
    shape = read_model(model(tmp_path, QWEN3 | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}))
    assert shape.kv_bytes is None
    assert [text[:28] for text in shape.unknown] == ["the KV cache's data type: th"]


def test_a_model_is_found_by_folder_by_file_and_in_the_hub_cache(tmp_path: Path) -> None:
    folder = model(tmp_path / "own", QWEN3)
    assert find_model(str(folder)) == find_model(str(folder / "config.json")) == folder
    hub = tmp_path / "home/hub/models--Qwen--Qwen3-0.6B"
    model(hub / "snapshots/aaa", QWEN3)
    current = model(hub / "snapshots/bbb", QWEN3)
    environment = {"HF_HOME": str(tmp_path / "home")}
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("bbb")
    assert find_model("Qwen/Qwen3-0.6B", environment) == current
    with pytest.raises(HarnessError, match="there is no config.json of 'Qwen/Qwen3-0.6', neither as a folder nor in"):
        find_model("Qwen/Qwen3-0.6", environment)
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['full_layers']}-{case['max_model_len']}")
def test_as_vllms_own_functions(case: dict[str, Any]) -> None:
    shape = KvShape(layers=case["full_layers"], heads=case["kv_heads"], head_size=case["head_size"])
    capacity = compute_capacity(shape.token_bytes(2), case["available"], case["max_model_len"], block=case["block"])
    if case["tokens"] is None:
        assert (capacity.fits, capacity.longest) == (False, case["longest"])
    else:
        expected = (True, case["tokens"], case["concurrency"], case["max_model_len"])
        assert (capacity.fits, capacity.tokens, round(capacity.concurrency, 4), capacity.longest) == expected


def test_a_line_of_a_refusal_and_the_heads_of_several_gpus() -> None:
    shape = KvShape(layers=28, heads=8, head_size=128)
    capacity = compute_capacity(shape.token_bytes(2), 100 << 20, 4096, block=CPU_BLOCK)
    match = re.search(r"\(([\d.]+) GiB KV.*memory \(([\d.]+) GiB\).*length is (\d+)", REFUSED)
    assert match is not None and not capacity.fits
    usable = (100 << 20) - CPU_BLOCK * shape.token_bytes(2)
    assert match.groups() == (f"{4096 * shape.token_bytes(2) / GIB:.2f}", f"{usable / GIB:.2f}", str(capacity.longest))
    assert [shape.token_bytes(2, gpus) for gpus in (1, 2, 8, 16)] == [114688, 57344, 14336, 14336]
    nothing = compute_capacity(shape.token_bytes(2), -GIB, 2048)
    assert (nothing.tokens, nothing.concurrency, nothing.longest, nothing.fits) == (0, 0.0, 0, False)
