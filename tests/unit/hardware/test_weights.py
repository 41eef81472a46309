"""What headers of safetensors and GGUF files tell of a model, damaged ones included."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.hardware.model import read_model
from harness.hardware.weights import MAX_HEADER_BYTES, read_gguf, read_safetensors, sum_tensors
from tests.support.made_models import (
    F16,
    KEYS,
    LISTED,
    Q4_K,
    Q5_K,
    Q6_K,
    QWEN3,
    geometry,
    gguf,
    model,
    safetensors,
    text,
)
from tests.support.wording import Wording

HIDDEN, VOCABULARY = 64, 1000
LAYER = {
    "self_attn.q_proj.weight": [64, 64], "mlp.up_proj.weight": [192, 64], "input_layernorm.weight": [64],
}  # fmt: skip
BODY = 2 * (64 * 64 + 192 * 64 + 64)  # parameters of two layers


def tensors(more: dict[str, list[int]] | None = None, *, head: bool = True) -> dict[str, tuple[str, list[int]]]:
    kind = "BF16"
    found = {f"model.layers.{layer}.{name}": (kind, shape) for layer in range(2) for name, shape in LAYER.items()}
    found["model.embed_tokens.weight"] = (kind, [VOCABULARY, HIDDEN])
    if head:
        found["lm_head.weight"] = (kind, [VOCABULARY, HIDDEN])
    return found | {name: (kind, shape) for name, shape in (more or {}).items()}


def size_of(folder: Path, found: dict[str, tuple[str, list[int]]], **config: Any) -> Any:
    values = QWEN3 | {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 64} | config
    model(folder, values)
    safetensors(folder / "model.safetensors", found)
    size = read_model(folder).size
    assert size is not None
    return size


def test_the_input_embedding_is_not_read_unless_it_is_the_output_head(tmp_path: Path) -> None:
    own = size_of(tmp_path / "own", tensors())
    assert (own.read_bytes, own.params) == (2 * (BODY + VOCABULARY * HIDDEN), BODY + VOCABULARY * HIDDEN)
    assert own.head_params == VOCABULARY * HIDDEN
    tied = size_of(tmp_path / "tied", tensors(head=False))
    assert (tied.read_bytes, tied.params) == (own.read_bytes, own.params)
    assert (own.kv_token_bytes, own.window, own.routed_share, own.doubts) == (2 * 64 * 2 * 2, None, 1.0, [])


def test_a_token_uses_some_of_the_experts(tmp_path: Path) -> None:
    experts = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": [32, 64] for n in range(8)}
    experts["model.layers.0.mlp.shared_experts.up_proj.weight"] = [32, 64]
    size = size_of(tmp_path, tensors(experts), num_experts=8, num_experts_per_tok=2)
    shared, routed = 32 * 64, 8 * 32 * 64
    assert size.params == BODY + VOCABULARY * HIDDEN + shared + routed / 4
    assert (size.routed_bytes, size.routed_share) == (2 * routed, 0.25)
    assert size.read_bytes == 2 * size.params


def test_other_tensors_are_not_read_for_a_token_of_text(tmp_path: Path) -> None:
    plain = size_of(tmp_path / "a", tensors())
    more = {"visual.blocks.0.weight": [64, 64], "model.layers.2.mlp.up_proj.weight": [64, 64], "mtp.fc.weight": [64]}
    assert size_of(tmp_path / "b", tensors(more)).read_bytes == plain.read_bytes


def test_packed_numbers_count_each(tmp_path: Path) -> None:
    packed = {
        "model.layers.0.mlp.up_proj.qweight": ("I32", [64, 24]),
        "model.layers.0.mlp.up_proj.scales": ("F16", [1, 192]),
    }
    size = size_of(tmp_path, packed, quantization_config={"quant_method": "awq", "bits": 4})
    assert (size.params, size.read_bytes) == (64 * 192, 64 * 24 * 4 + 192 * 2)


def test_a_configuration_alone_counts_parameters(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2", "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "hidden_size": 5120, "intermediate_size": 13824, "vocab_size": 152064, "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    size = read_model(model(tmp_path / "a", config)).size  # Qwen2.5-14B: 14.77 B, 0.78 B of them the input embedding
    assert size is not None and size.read_bytes / 1e9 == pytest.approx(28.0, abs=0.05)
    assert size.weights_bytes / 1e9 == pytest.approx(29.5, abs=0.05) and len(size.doubts) == 1
    awq = read_model(model(tmp_path / "b", config | {"quantization_config": {"quant_method": "awq"}})).size
    assert awq is not None and awq.read_bytes / 1e9 == pytest.approx(8.8, abs=0.1)
    moe = config | {
        "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    size = read_model(model(tmp_path / "c", moe)).size  # Qwen3-30B-A3B
    assert size is not None and size.params is not None
    assert (round(size.weights_bytes / 2e9, 1), round(size.params / 1e9, 1)) == (30.5, 3.0)


def test_files_that_are_not_the_weights_do_not_count(tmp_path: Path, wording: Wording) -> None:
    """Such as the pointers that `git clone` leaves without Git LFS: they are no 134 bytes of weights."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1503300328\n"
    known = read_model(model(tmp_path / "a", QWEN3 | {"intermediate_size": 3072, "vocab_size": 151_936})).size
    (tmp_path / "a" / "model.safetensors").write_bytes(pointer)
    shape = read_model(tmp_path / "a")
    assert shape.size is not None and known is not None
    assert (shape.size.read_bytes, shape.weights_bytes) == (known.read_bytes, None)
    wording(shape.size.doubts[0])


def test_a_header_that_cannot_be_read_counts_the_file(tmp_path: Path) -> None:
    """Where config.json does not tell the size either."""
    model(tmp_path, QWEN3)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    size = read_model(tmp_path).size
    assert size is not None and (size.read_bytes, size.params, len(size.doubts)) == (100, None, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x01", (1 << 62).to_bytes(8, "little"), (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]", (4).to_bytes(8, "little") + b"null",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (7).to_bytes(8, "little") + b'{"a":1}', (100).to_bytes(8, "little") + b"{",
        *(
            (len(text)).to_bytes(8, "little") + text
            for text in (
                b'{"a":{"dtype":"F16","shape":[-1]}}', b'{"a":{"dtype":"F16","shape":["1"]}}',
                b'{"a":{"dtype":"Q9","shape":[1]}}',
                b'{"a":{"dtype":"F16","shape":[1125899906842624,1125899906842624]}}',
                b"[" * 5000, b'{"a":{"dtype":"F16","shape":[' + b"2," * 20 + b"2]}}",
                b'{"a":{"dtype":["F16"],"shape":[1]}}', b'{"a":{"dtype":"F16","shape":true}}',
            )
        ),
    ],
)  # fmt: skip
def test_damaged_safetensors_are_errors(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(HarnessError, match=f"{path.name}: "):
        read_safetensors([path])


def test_a_gguf_file_has_all_that_is_needed(tmp_path: Path) -> None:
    shape = read_model(gguf(tmp_path / "m.gguf", KEYS, LISTED))
    assert shape.geometry == geometry(2, heads=2, size=128, queries=4 * 128)
    size = shape.size
    assert size is not None
    assert size.read_bytes == 1000 * 210 + 2 * 512 * 144 + 256 * 4, "tied: the embedding is the head"
    assert (size.params, size.number_bits, size.kv_token_bytes) == (
        1000 * 256 + 2 * 512 * 256 + 256,
        8,
        2 * 2 * 128 * 4,
    )
    assert (shape.longest, shape.weights_bytes) == (4096, size.read_bytes)
    own = read_model(gguf(tmp_path / "own.gguf", KEYS, LISTED | {"output.weight": ([256, 1000], F16)})).size
    assert own is not None and own.read_bytes == size.read_bytes - 1000 * 210 + 2 * 256 * 1000
    experts = {"qwen3.expert_count": 8, "qwen3.expert_used_count": 2}
    routed = read_model(
        gguf(tmp_path / "e.gguf", KEYS | experts, LISTED | {"blk.0.ffn_up_exps.weight": ([256, 8, 8], F16)})
    )
    assert routed.size is not None
    assert (routed.size.routed_bytes, routed.size.routed_share) == (2 * 256 * 64, 0.25)
    assert routed.size.read_bytes == size.read_bytes + 256 * 32


def test_half_a_download_is_an_error(tmp_path: Path, wording: Wording) -> None:
    """The header comes first, so it is whole; the data of the last tensor is not."""
    path = gguf(tmp_path / "m.gguf", KEYS, LISTED)
    whole = os.path.getsize(path)
    for size in (whole // 10, len(path.read_bytes().rstrip(b"\0")) + 100):
        os.truncate(path, size)
        with pytest.raises(HarnessError) as caught:
            read_gguf(path)
        wording(caught.value)
    header = json.dumps({"a": {"dtype": "F16", "shape": [100], "data_offsets": [0, 200]}}).encode()
    other = tmp_path / "model.safetensors"
    other.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 199)
    with pytest.raises(HarnessError) as caught:
        read_safetensors([other])
    wording(caught.value)
    other.write_bytes(other.read_bytes() + b"\0")
    assert len(read_safetensors([other])) == 1


def test_a_file_without_tensors_has_no_size(tmp_path: Path) -> None:
    assert read_model(gguf(tmp_path / "m.gguf", KEYS, {})).size is None


def test_the_parts_of_a_gguf_file_are_added_up(tmp_path: Path, wording: Wording) -> None:
    first = gguf(tmp_path / "m-00001-of-00002.gguf", KEYS | {"split.count": 2}, {"blk.0.a.weight": ([256], F16)})
    with pytest.raises(HarnessError) as caught:
        read_model(first)
    assert "00002" in str(caught.value)
    wording(caught.value)
    gguf(tmp_path / "m-00002-of-00002.gguf", {"split.count": 2}, {"blk.1.a.weight": ([256], F16)})
    shape = read_model(first)
    assert shape.weights_bytes == 1024
    second = read_model(tmp_path / "m-00002-of-00002.gguf")  # it has no keys of the model
    assert (second.weights_bytes, second.geometry, second.longest) == (1024, shape.geometry, 4096)


@pytest.mark.parametrize("changes", [{"block_count": 0}, {"nextn_predict_layers": 2}, {"nextn_predict_layers": 9}])
def test_a_damaged_number_of_layers_leaves_no_weights_out(tmp_path: Path, changes: dict[str, int]) -> None:
    """Else the bound would be that of the output head alone."""
    whole = read_model(gguf(tmp_path / "m.gguf", KEYS, LISTED)).size
    found = KEYS | {f"qwen3.{key}": value for key, value in changes.items()}
    shape = read_model(gguf(tmp_path / "d.gguf", found, LISTED))
    assert whole is not None and shape.size is not None and shape.geometry is None
    assert shape.size.read_bytes == whole.read_bytes


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        ({"general.type": "adapter", "general.architecture": "llama"}, "adapter"),
        ({"general.type": "mmproj", "general.architecture": "clip"}, "mmproj"),
        ({"general.architecture": "clip"}, "mmproj"),
    ],
)
def test_a_gguf_file_that_is_no_model_has_no_bound(
    tmp_path: Path, keys: dict[str, str], form: str, wording: Wording
) -> None:
    path = gguf(tmp_path / "m.gguf", keys, {"blk.0.attn_q.weight.lora_a": ([256, 16], F16)})
    with pytest.raises(HarnessError) as caught:
        read_model(path)
    assert str(form) in str(caught.value)
    wording(caught.value)
    assert read_model(gguf(tmp_path / "n.gguf", KEYS | {"general.type": "model"}, LISTED)).size is not None


def with_types(path: Path, listed: dict[str, tuple[int, int, int]], data_bytes: int) -> Path:
    """A GGUF file of tensors with numbers, type and place."""
    data = b"GGUF" + struct.pack("<IQQ", 3, len(listed), 0)
    for name, (numbers, kind, at) in listed.items():
        data += text(name) + struct.pack("<IQIQ", 1, numbers, kind, at)
    path.write_bytes(data)
    os.truncate(path, -(-len(data) // 32) * 32 + data_bytes)
    return path


def test_a_new_type_of_tensors_takes_what_is_before_the_next(tmp_path: Path, wording: Wording) -> None:
    """Engines get new types faster than this table: the file itself tells how large they are."""
    listed = {"a": (256, 40, 0), "b": (256, 41, 160), "c": (256, 99, 320), "d": (64, 0, 224), "e": (32, 98, 480)}
    found = {tensor.name: tensor for tensor in read_gguf(with_types(tmp_path / "m.gguf", listed, 512))[1]}
    assert {name: (tensor.kind, tensor.bytes) for name, tensor in found.items()} == {
        "a": ("NVFP4", 144), "b": ("Q1_0", 36), "c": ("type 99", 160), "d": ("F32", 256), "e": ("type 98", 32),
    }  # fmt: skip
    for place in (512, 1 << 40):  # nothing is there
        with pytest.raises(HarnessError) as caught:
            read_gguf(with_types(tmp_path / "d.gguf", {"a": (256, 99, place)}, 512))
        assert "99" in str(caught.value)
        wording(caught.value)
    with pytest.raises(HarnessError) as caught:
        read_gguf(with_types(tmp_path / "d.gguf", {"a": (16, 99, 0)}, 512))
    assert "99" in str(caught.value) and "512" in str(caught.value)
    wording(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"GGUF", b"GGML" + b"\0" * 100, b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1 << 40) + b"\x09\0\0\0" * 1000,
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 99),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<I", 1 << 31),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 1, 999, 0),
    ],
)  # fmt: skip
def test_damaged_gguf_files_are_errors(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(HarnessError, match=f"{path.name}: "):
        read_gguf(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qwen3.attention.head_count_kv": [2]}, "attention.head_count_kv"),
        ({"qwen3.attention.compress_ratios": [0, 4]}, "attention.compress_ratios"),
        ({"qwen3.ssm.state_size": 16}, "ssm.state_size"),
        ({"qwen3.attention.sliding_window": 1024}, "sliding_window_pattern"),
        ({"qwen3.block_count": 0}, "block_count"),
    ],
)
def test_a_gguf_file_with_another_cache_is_unknown(
    tmp_path: Path, changes: dict[str, Any], named: str, wording: Wording
) -> None:
    shape = read_model(gguf(tmp_path / "m.gguf", KEYS | changes, LISTED))
    assert shape.geometry is None and named in shape.unknown[0]
    wording(shape.unknown[0])
    assert shape.size is not None and shape.size.kv_token_bytes is None


@pytest.mark.parametrize(
    "table",
    [
        "model.language_model.embed_tokens_per_layer.weight", "transformer.wpe.weight", "model.embed_positions.weight",
        "model.embeddings.position_embeddings.weight", "model.embeddings.token_type_embeddings.weight",
        "model.ngram_embeddings.embedders.3.weight", "layers.1.engram.multi_head_embedding.embedding.weight",
        "model.layers.0.engram.embed.weight",
    ],
)  # fmt: skip
def test_a_token_reads_one_row_of_a_table(tmp_path: Path, table: str) -> None:
    """Of each layer, of positions, of n-grams: none is the output head, and all have to fit into memory."""
    plain = size_of(tmp_path / "a", tensors(head=False))
    more = size_of(tmp_path / "b", tensors({table: [VOCABULARY, 640]}, head=False))
    assert (more.read_bytes, more.params) == (plain.read_bytes, plain.params)
    assert more.head_params == VOCABULARY * HIDDEN


def test_a_token_reads_one_row_of_a_table_of_gguf(tmp_path: Path) -> None:
    names = {"token_embd.weight": ([HIDDEN, VOCABULARY], F16), "blk.0.ffn_up.weight": ([64, 64], F16)}
    one = sum_tensors("m", read_gguf(gguf(tmp_path / "m.gguf", KEYS, names))[1])
    for name in ("per_layer_token_embd", "position_embd", "token_types", "blk.1.engram_embd", "blk.0.ngram_embd"):
        found = names | {f"{name}.weight": ([640, VOCABULARY], F16)}
        two = sum_tensors("m", read_gguf(gguf(tmp_path / "m.gguf", KEYS, found))[1])
        assert (two.read_bytes, two.params) == (one.read_bytes, one.params), name
        assert two.weights_bytes == one.weights_bytes + 2 * 640 * VOCABULARY


@pytest.mark.parametrize(
    "name",
    [
        "model.per_layer_model_projection.weight", "model.ngram_embeddings.post_projs.3.weight",
        "model.embed_norm.weight",
        "altup_unembd_proj.weight", "per_layer_model_proj.weight", "layers.1.engram.wkv.weight",
        "token_embd_norm.weight",
        "blk.1.engram_embd_norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
    ],
)  # fmt: skip
def test_what_looks_like_a_table_and_is_multiplied(tmp_path: Path, name: str) -> None:
    plain = size_of(tmp_path / "a", tensors())
    more = size_of(tmp_path / "b", tensors({name: [VOCABULARY, 640]}))
    assert more.read_bytes == plain.read_bytes + 2 * 640 * VOCABULARY


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("backbone.embeddings.weight", "lm_head.weight"), ("model.embeddings.weight", "lm_head.weight"),
        ("embed.weight", "head.weight"), ("transformer.embedding.word_embeddings.weight", "output_layer.weight"),
    ],
)  # fmt: skip
def test_embedding_and_head_by_other_names(tmp_path: Path, embedding: str, head: str) -> None:
    usual = tensors()
    other = {name: value for name, value in usual.items() if name.startswith("model.layers.")}
    other |= {embedding: usual["model.embed_tokens.weight"], head: usual["lm_head.weight"]}
    found, plain = size_of(tmp_path / "a", other), size_of(tmp_path / "b", usual)
    assert (found.read_bytes, found.head_params) == (plain.read_bytes, plain.head_params)


@pytest.mark.parametrize("name", ["block_sparse_moe.input_linear", "moe.up_proj", "mlp.experts.gate_up_proj"])
def test_experts_in_one_tensor(tmp_path: Path, name: str) -> None:
    more = {f"model.layers.0.{name}.weight": [8, 64, 32]}
    size = size_of(tmp_path, tensors(more), num_experts=8, num_experts_per_tok=2)
    assert (size.routed_params, size.routed_share) == (8 * 64 * 32, 0.25)


def test_a_gemma_of_layers_with_tables(tmp_path: Path) -> None:
    """A shape as E4B has: 2.8 of its 7.5 B parameters are tables. 66 tok/s at 288 GB/s is normal, and not impossible.

    GGUF: 42 layers of 2,560 numbers, Q4_K with Q6_K for the head and every second `down`.
    """
    wide, layers = 2560, 42
    listed: dict[str, tuple[list[int], int]] = {
        "token_embd.weight": ([wide, 262144], Q6_K),
        "per_layer_token_embd.weight": ([256 * layers, 262144], Q5_K),
        "per_layer_model_proj.weight": ([wide, 256 * layers], F16),
    }
    read = wide * 262144 * 210 / 256 + wide * 256 * layers * 2
    for layer in range(layers):
        head = 256 if layer % 6 != 5 else 512
        listed |= {
            f"blk.{layer}.attn_q.weight": ([wide, 8 * head], Q4_K),
            f"blk.{layer}.attn_output.weight": ([8 * head, wide], Q4_K),
            f"blk.{layer}.ffn_gate.weight": ([wide, 10240], Q4_K),
            f"blk.{layer}.ffn_up.weight": ([wide, 10240], Q4_K),
            f"blk.{layer}.ffn_down.weight": ([10240, wide], Q6_K if layer % 2 else Q4_K),
        }
        read += wide * 144 / 256 * (2 * 8 * head + 2 * 10240)
        read += wide * 10240 * (210 if layer % 2 else 144) / 256
    keys = {"general.architecture": "gemma4", "gemma4.block_count": layers}
    size = read_model(gguf(tmp_path / "m.gguf", keys, listed)).size
    assert size is not None and size.read_bytes == read
    assert size.weights_bytes == read + 256 * layers * 262144 * 176 / 256
    assert 0.6 < 66 / (288e9 / size.read_bytes) < 0.75
