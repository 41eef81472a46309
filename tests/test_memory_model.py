"""What files of models tell of weights and KV cache, and what they do not."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.machine.model import Geometry, find_model, hub_cache, measure_weights, read_model

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 1024, "max_position_embeddings": 40960, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip
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


def model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> Path:
    """A file with the header of such tensors (dtype, shape, bytes) and no data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3, Geometry(full_layers=28, kv_heads=8, head_size=128)),
        (LLAMA, Geometry(full_layers=32, kv_heads=32, head_size=128)),
        (GEMMA3, Geometry(full_layers=8, sliding_layers=40, window=1024, kv_heads=8, head_size=256)),
        (DEEPSEEK, Geometry(full_layers=61, kv_heads=1, head_size=576, latent=True)),
        (
            LLAMA | {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4096},
            Geometry(full_layers=0, sliding_layers=32, window=4096, kv_heads=8, head_size=128),
        ),
        (
            QWEN3 | {"model_type": "gpt_oss", "num_hidden_layers": 4, "head_dim": 64, "sliding_window": 128,
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
            Geometry(full_layers=2, sliding_layers=2, window=128, kv_heads=8, head_size=64),
        ),
        (
            QWEN3 | {"model_type": "gemma2", "num_hidden_layers": 42, "sliding_window": 4096,
                     "use_sliding_window": None},
            Geometry(full_layers=21, sliding_layers=21, window=4096, kv_heads=8, head_size=128),
        ),
    ],
    ids=["qwen3", "llama", "gemma3", "deepseek", "mistral", "gpt-oss", "gemma2"],
)  # fmt: skip
def test_geometries(tmp_path: Path, config: dict[str, Any], expected: Geometry) -> None:
    found = read_model(model(tmp_path, config))
    assert (found.geometry, found.unknown, found.kv_bytes, found.quantized) == (expected, [], 2, False)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (QWEN3 | {"layer_types": ["linear_attention"] * 21 + ["full_attention"] * 7}, "layers of the type linear_atte"),
        (QWEN3 | {"linear_num_key_heads": 16}, "layers of another form (linear_num_key_heads in config.json)"),
        (QWEN3 | {"sliding_window": 4096, "use_sliding_window": True}, "it has a sliding window, and config.json does"),
        (QWEN3 | {"num_key_value_heads": None}, "config.json has no num_key_value_heads"),
        (QWEN3 | {"num_hidden_layers": "28"}, "config.json has no usable num_hidden_layers"),
        (QWEN3 | {"is_encoder_decoder": True}, "an encoder-decoder model"),
        (DEEPSEEK | {"index_topk": 2048}, "layers of another form (index_topk in config.json)"),
        (DEEPSEEK | {"model_type": "kimi_linear"}, "latent attention of 'kimi_linear', of which the cache's form is"),
    ],
)
def test_what_is_not_said_clearly_is_unknown(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    found = read_model(model(tmp_path, config))
    assert found.geometry is None
    assert [text[: len("the KV cache per token: ") + len(why)] for text in found.unknown] == [
        f"the KV cache per token: {why}"
    ]


def test_a_checkpoint_with_a_kv_cache_type_of_its_own(tmp_path: Path) -> None:
    found = read_model(model(tmp_path, QWEN3 | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}))
    assert (found.kv_bytes, found.quantized) == (None, True)
    assert found.unknown == ["the KV cache's data type: the checkpoint brings one of its own; give --kv-cache-dtype"]


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


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HarnessError, match=r"config\.json: "):
        read_model(tmp_path)


def test_weights_are_counted_from_headers(tmp_path: Path) -> None:
    tensors = {"a": ("BF16", [10, 100], 2000), "b": ("F32", [1000], 4000), "c": ("I32", [8], 32)}
    safetensors(tmp_path / "model.safetensors", tensors)
    safetensors(tmp_path / "consolidated.safetensors", tensors)  # the same once more, in another form
    # vLLM makes 16 bit of 32 where nothing is quantised
    assert measure_weights(tmp_path, quantized=False) == (2000 + 2000 + 32, "the headers of 1 safetensors")
    assert measure_weights(tmp_path, quantized=True) == (2000 + 4000 + 32, "the headers of 1 safetensors")


def test_weights_of_several_files_are_those_of_the_index(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {"total_size": 5000}, "weight_map": {"a": names[0], "b": names[1]}}
    assert measure_weights(tmp_path, quantized=False) == (None, "there are no safetensors of it on this machine")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert measure_weights(tmp_path, quantized=False) == (5000, "the index of the safetensors")
    for name in names:
        safetensors(tmp_path / name, {"a": ("F16", [1000], 2000)})
    safetensors(tmp_path / "old.safetensors", {"a": ("F16", [1000], 2000)})
    assert measure_weights(tmp_path, quantized=False) == (4000, "the headers of 2 safetensors")
    (tmp_path / names[0]).write_bytes(b"version https://git-lfs")
    size, why = measure_weights(tmp_path, quantized=False)
    assert (size, why[:30]) == (None, "a safetensors file is damaged ")
