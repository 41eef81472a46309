# mypy: disable-error-code="import-not-found"
"""Small GGUF models with random weights whose layers keep different caches. Runs in the llamacpp environment.

`python -m tests.support.engines.make_hybrid_gguf FILE KIND`, KIND of KINDS.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

from tests.support.engines.make_gguf import add_tokenizer

CONTEXT, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, SIZE = 8192, 64, 128, 2, 1, 32
WINDOW, LAYERS = 256, 8
INNER, STATE, KERNEL, RANK = 512, 64, 4, 8
GROUPS = 2


class Model:
    """A file that is being written, by the names of llama.cpp."""

    def __init__(self, path: str, kind: str) -> None:
        self.writer = gguf.GGUFWriter(path, kind)
        self.kind = kind
        self.random = np.random.default_rng(20261128)
        vocabulary = add_tokenizer(self.writer)
        for key, value in {"context_length": CONTEXT, "embedding_length": WIDTH, "feed_forward_length": FEED_FORWARD,
                           "attention.head_count": HEADS, "vocab_size": vocabulary}.items():  # fmt: skip
            self.key(key, value)
        self.writer.add_layer_norm_rms_eps(1e-5)
        self.writer.add_rope_freq_base(10_000.0)
        self.matrix("token_embd", vocabulary, WIDTH)

    def key(self, name: str, value: int) -> None:
        self.writer.add_uint32(f"{self.kind}.{name}", value)

    def matrix(self, name: str, *shape: int, suffix: str = ".weight") -> None:
        self.writer.add_tensor(name + suffix, self.random.normal(0, 0.02, shape).astype(np.float32))

    def ones(self, name: str, *shape: int, suffix: str = ".weight") -> None:
        self.writer.add_tensor(name + suffix, np.ones(shape, dtype=np.float32))

    def attention(self, layer: int, *, norms: bool = True, gate: int = 1) -> None:
        at = f"blk.{layer}.attn_"
        self.matrix(f"{at}q", HEADS * SIZE * gate, WIDTH)
        self.matrix(f"{at}k", KV_HEADS * SIZE, WIDTH)
        self.matrix(f"{at}v", KV_HEADS * SIZE, WIDTH)
        self.matrix(f"{at}output", WIDTH, HEADS * SIZE)
        if norms:
            self.ones(f"{at}q_norm", SIZE)
            self.ones(f"{at}k_norm", SIZE)

    def mlp(self, layer: int, *norms: str) -> None:
        for name in norms:
            self.ones(f"blk.{layer}.{name}", WIDTH)
        self.matrix(f"blk.{layer}.ffn_gate", FEED_FORWARD, WIDTH)
        self.matrix(f"blk.{layer}.ffn_up", FEED_FORWARD, WIDTH)
        self.matrix(f"blk.{layer}.ffn_down", WIDTH, FEED_FORWARD)

    def sizes(self, layers: int, kv_heads: list[int] | int) -> None:
        self.key("block_count", layers)
        self.writer.add_head_count_kv(kv_heads)
        self.writer.add_key_length(SIZE)
        self.writer.add_value_length(SIZE)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def lfm2(model: Model) -> None:
    """Short convolutions, and attention in the layers with key heads."""
    heads = [0, KV_HEADS, 0, KV_HEADS, 0]
    model.sizes(len(heads), heads)
    model.key("shortconv.l_cache", 3)
    model.ones("token_embd_norm", WIDTH)
    for layer, kv_heads in enumerate(heads):
        model.mlp(layer, "attn_norm", "ffn_norm")
        if kv_heads:
            model.attention(layer)
            continue
        for name, shape in {"conv": (WIDTH, 3), "in_proj": (3 * WIDTH, WIDTH), "out_proj": (WIDTH, WIDTH)}.items():
            model.matrix(f"blk.{layer}.shortconv.{name}", *shape)


def gemma3(model: Model) -> None:
    """A window in five of six layers, which only llama.cpp's code tells."""
    model.sizes(LAYERS, KV_HEADS)
    model.key("attention.sliding_window", WINDOW)
    model.ones("output_norm", WIDTH)
    for layer in range(LAYERS):
        model.mlp(layer, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        model.attention(layer)


def _recurrent(model: Model, inner: int, state: int) -> None:
    for name, value in {"conv_kernel": KERNEL, "inner_size": inner, "state_size": state}.items():
        model.key(f"ssm.{name}", value)


def jamba(model: Model) -> None:
    """Mamba, and attention in one of four layers."""
    heads = [0, 0, KV_HEADS, 0]
    model.sizes(len(heads), heads)
    inner, state = 2 * WIDTH, 256
    _recurrent(model, inner, state)
    model.key("ssm.time_step_rank", RANK)
    model.ones("output_norm", WIDTH)
    for layer, kv_heads in enumerate(heads):
        model.mlp(layer, "attn_norm", "ffn_norm")
        if kv_heads:
            model.attention(layer, norms=False)
            continue
        at = f"blk.{layer}.ssm_"
        for name, shape in {"in": (2 * inner, WIDTH), "conv1d": (inner, KERNEL), "x": (RANK + 2 * state, inner),
                            "dt": (inner, RANK), "out": (WIDTH, inner)}.items():  # fmt: skip
            model.matrix(at + name, *shape)
        for name, size in {"dt_norm": RANK, "b_norm": state, "c_norm": state}.items():
            model.ones(at + name, size)
        model.ones(f"{at}conv1d", inner, suffix=".bias")
        model.ones(f"{at}dt", inner, suffix=".bias")
        model.ones(f"{at}a", inner, state, suffix="")
        model.ones(f"{at}d", inner, suffix="")


def qwen35(model: Model) -> None:
    """Gated delta nets, and attention in each fourth layer."""
    model.sizes(LAYERS, KV_HEADS)
    _recurrent(model, INNER, STATE)
    values = INNER // STATE
    for name, value in {"ssm.time_step_rank": values, "ssm.group_count": GROUPS, "full_attention_interval": 4}.items():
        model.key(name, value)
    model.writer.add_rope_dimension_count(SIZE // 2)
    model.writer.add_rope_dimension_sections([4, 2, 2, 0])
    model.ones("output_norm", WIDTH)
    mixed = INNER + 2 * GROUPS * STATE
    for layer in range(LAYERS):
        model.mlp(layer, "attn_norm", "post_attention_norm")
        if layer % 4 == 3:
            model.attention(layer, gate=2)
            continue
        at = f"blk.{layer}."
        for name, shape in {"attn_qkv": (mixed, WIDTH), "attn_gate": (INNER, WIDTH), "ssm_conv1d": (mixed, KERNEL),
                            "ssm_beta": (values, WIDTH), "ssm_alpha": (values, WIDTH),
                            "ssm_out": (WIDTH, INNER)}.items():  # fmt: skip
            model.matrix(at + name, *shape)
        model.ones(f"{at}ssm_norm", STATE)
        model.ones(f"{at}ssm_dt", values, suffix=".bias")
        model.ones(f"{at}ssm_a", values, suffix="")


KINDS = {"lfm2": lfm2, "gemma3": gemma3, "jamba": jamba, "qwen35": qwen35}


def main() -> None:
    path, kind = sys.argv[1:]
    model = Model(path, kind)
    KINDS[kind](model)
    model.close()


if __name__ == "__main__":
    main()
