"""Files of models made by hand: their configuration, safetensors and GGUF files without data."""

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

from harness.base.units import GIB
from harness.hardware.geometry import Geometry, LayerGroup
from harness.hardware.model import (
    ModelShape,
    read_model,
)

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 1024, "max_position_embeddings": 40960, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip


def geometry(
    full: int,
    sliding: int = 0,
    *,
    heads: int,
    size: int,
    window: int | None = None,
    latent: bool = False,
    queries: float = 0,
) -> Geometry:
    """A cache whose layers have the same size. `queries`: of one layer, heads x head size."""
    full_group, sliding_group = (
        (LayerGroup(layers=layers, kv_heads=heads, key_size=size, value_size=0 if latent else size),) if layers else ()
        for layers in (full, sliding)
    )
    return Geometry(
        full=full_group,
        sliding=sliding_group,
        window=window,
        latent=latent,
        attention_width=full * queries,
        sliding_attention_width=sliding * queries,
    )


def model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """A file whose data is not there: only its header is read."""
    entries = {name: {"dtype": kind, "shape": shape, "data_offsets": [0, 0]} for name, (kind, shape) in tensors.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path: Path, keys: dict[str, Any], listed: dict[str, tuple[list[int], int]]) -> Path:
    """A GGUF file whose data is a hole."""
    data = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(keys))
    for name, value in keys.items():
        data += text(name)
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            data += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        elif isinstance(value, list) and value and isinstance(value[0], bool):
            data += struct.pack("<IIQ", 9, 7, len(value)) + struct.pack(f"<{len(value)}?", *value)
        elif isinstance(value, list):
            data += struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
        else:
            data += struct.pack("<II", 4, value)
    for name, (shape, kind) in listed.items():
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)
    path.write_bytes(data)
    sizes = [math.prod(shape) * 4 for shape, _ in listed.values()]
    os.truncate(path, len(data) + 64 + max(sizes, default=0))
    return path


KEYS: dict[str, Any] = {
    "general.architecture": "qwen3", "tokenizer.ggml.tokens": ["a", "b"], "qwen3.block_count": 2,
    "qwen3.attention.head_count": 4, "qwen3.attention.head_count_kv": 2, "qwen3.attention.key_length": 128,
    "qwen3.embedding_length": 256, "qwen3.context_length": 4096,
}  # fmt: skip


Q4_K, Q5_K, Q6_K, F16, F32 = 12, 13, 14, 1, 0


LISTED = {
    "token_embd.weight": ([256, 1000], Q6_K), "blk.0.ffn_up.weight": ([256, 512], Q4_K),
    "blk.1.ffn_up.weight": ([256, 512], Q4_K), "output_norm.weight": ([256], F32),
}  # fmt: skip


def qwen3(folder: Path, gib: float = 1.5, **changes: Any) -> ModelShape:
    """Qwen3-0.6B with weights of any size."""
    model(folder, QWEN3 | changes)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(int(gib * GIB))
    return read_model(folder, "Qwen/Qwen3-0.6B")


QWEN25_14B: dict[str, Any] = {
    "model_type": "qwen2", "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
    "hidden_size": 5120, "intermediate_size": 13824, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
