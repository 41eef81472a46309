"""The KV cache of real models' shapes, by hand: from config.json and from GGUF, and the answers that rest on it.

The arithmetic of each row is its own: layers x (key and value) x heads x size x bytes of a number.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.hardware.geometry import UnknownShapeError, parse_geometry
from harness.hardware.gguf_geometry import parse_gguf_geometry
from harness.hardware.model import read_model
from harness.questions.expect.decide import Question
from harness.questions.expect.page import expect_page
from harness.questions.expect.sources import answer
from tests.support.made_models import F16, QWEN3, gguf, model, safetensors
from tests.support.printed import printed_lines
from tests.support.wording import Wording

GIB, MIB = 1 << 30, 1 << 20
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class Known(NamedTuple):
    """A model's shape and its cache, computed by hand."""

    config: dict[str, Any] | None
    keys: dict[str, Any] | None  # of GGUF, the architecture first
    token: int  # bytes of a token in layers that keep all, with 16 bit a number
    sliding: int = 0  # likewise in layers with a window
    window: int | None = None
    state: int | None = None  # bytes of a request
    tensors: tuple[str, ...] = ()  # names that tell layers apart


def attention(layers: int, heads: int, kv: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": size,
        "max_position_embeddings": 1 << 20, **more,
    }  # fmt: skip


def keys(arch: str, layers: int, heads: Any, kv: Any, size: int | None = None, **more: Any) -> dict[str, Any]:
    """`more`: other keys, with two underscores for a dot."""
    found = {"block_count": layers, "attention.head_count": heads, "attention.head_count_kv": kv,
             "context_length": 1 << 20}  # fmt: skip
    if size is not None:
        found |= {"attention.key_length": size, "attention.value_length": size}
    found |= {key.replace("__", "."): value for key, value in more.items()}
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in found.items()}


def names(layers: int, attending: set[int], other: str = "ssm_out", own: str = "attn_k") -> tuple[str, ...]:
    return tuple(f"blk.{number}.{own if number in attending else other}.weight" for number in range(layers))


LFM2_KV = [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0]
NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
GRANITE_ATTENTION = {5, 15, 25, 35}
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
MIMO = [0] + ([1] * 5 + [0]) * 7 + [1] * 4 + [0]
DELTA = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "linear_conv_kernel_dim": 4}  # fmt: skip
SSM = {"ssm__conv_kernel": 4, "ssm__state_size": 128, "ssm__group_count": 16}

MODELS = {
    # Hybrids of 2026
    "Qwen3.6-35B-A3B": Known(
        attention(40, 16, 2, 256, model_type="qwen3_5_moe_text", hidden_size=2048, full_attention_interval=4,
                  linear_num_value_heads=32, **DELTA),
        keys("qwen35moe", 41, 16, 2, 256, embedding_length=2048, full_attention_interval=4, ssm__inner_size=4096,
             nextn_predict_layers=1, **SSM),
        token=10 * 2 * 2 * 256 * 2, state=30 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)),
    ),
    "Qwen3.5-27B": Known(
        attention(64, 24, 4, 256, model_type="qwen3_5_text", hidden_size=5120,
                  layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 16, linear_num_value_heads=48, **DELTA),
        keys("qwen35", 64, 24, 4, 256, embedding_length=5120, full_attention_interval=4, ssm__inner_size=48 * 128,
             **SSM),
        token=16 * 2 * 4 * 256 * 2, state=48 * 4 * (48 * 128 * 128 + 3 * (2 * 16 * 128 + 48 * 128)),
    ),
    "Gemma-4-12B": Known(
        attention(48, 16, 8, 256, model_type="gemma4_text", global_head_dim=512, num_global_key_value_heads=1,
                  attention_k_eq_v=True, sliding_window=1024, layer_types=([SLIDING] * 5 + [FULL]) * 8),
        keys("gemma4", 48, 16, [8, 8, 8, 8, 8, 1] * 8, 512, attention__key_length_swa=256,
             attention__value_length_swa=256, attention__sliding_window=1024,
             attention__sliding_window_pattern=([True] * 5 + [False]) * 8),
        token=8 * 2 * 1 * 512 * 2, sliding=40 * 2 * 8 * 256 * 2, window=1024,
    ),
    "Gemma-4-E4B": Known(  # the last 18 layers share: 4 of 7 with all tokens, 20 of 35 with a window have a cache
        attention(42, 8, 2, 256, model_type="gemma4_text", sliding_window=512, num_kv_shared_layers=18),
        keys("gemma4", 42, 8, 2, 512, attention__key_length_swa=256, attention__value_length_swa=256,
             attention__sliding_window=512, attention__sliding_window_pattern=([True] * 5 + [False]) * 7,
             attention__shared_kv_layers=18),
        token=4 * 2 * 2 * 512 * 2, sliding=20 * 2 * 2 * 256 * 2, window=512,
    ),
    "Nemotron-3-Nano": Known(
        attention(52, 32, 2, 128, model_type="nemotron_h", hidden_size=2688, hybrid_override_pattern=NEMOTRON,
                  mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4),
        keys("nemotron_h_moe", 52, 32, [2 if one == "*" else 0 for one in NEMOTRON], 128, embedding_length=2688,
             ssm__conv_kernel=4, ssm__state_size=128, ssm__group_count=8, ssm__inner_size=4096,
             ssm__time_step_rank=64),
        token=6 * 2 * 2 * 128 * 2, state=NEMOTRON.count("M") * 4 * (64 * 64 * 128 + 3 * (4096 + 2 * 8 * 128)),
        tensors=tuple(f"blk.{n}.{'ssm_in' if one == 'M' else 'x'}.weight" for n, one in enumerate(NEMOTRON)),
    ),
    "MiMo-V2-Flash": Known(  # keys of 192 and values of 128 numbers
        attention(48, 64, 4, 192, model_type="mimo_v2_flash", v_head_dim=128, hybrid_layer_pattern=MIMO,
                  swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128,
                  sliding_window=128),
        keys("mimo2", 48, 64, [8 if one else 4 for one in MIMO], attention__key_length=192,
             attention__value_length=128, attention__sliding_window=128,
             attention__sliding_window_pattern=[bool(one) for one in MIMO]),
        token=9 * 4 * (192 + 128) * 2, sliding=39 * 8 * (192 + 128) * 2, window=128,
    ),
    "Step-3.5-Flash": Known(
        attention(45, 64, 8, 128, model_type="step3p5", sliding_window=512,
                  layer_types=[FULL, SLIDING, SLIDING, SLIDING] * 11 + [FULL],
                  attention_other_setting={"num_attention_heads": 96, "num_attention_groups": 4, "head_dim": 128}),
        None,
        token=12 * 2 * 8 * 128 * 2, sliding=33 * 2 * 4 * 128 * 2, window=512,
    ),
    # Hybrids before
    "LFM2-1.2B": Known(
        attention(16, 32, 8, 64, model_type="lfm2", hidden_size=2048, conv_L_cache=3,
                  layer_types=[FULL if one else "conv" for one in LFM2_KV]) | {"head_dim": None},
        keys("lfm2", 16, 32, LFM2_KV, embedding_length=2048, shortconv__l_cache=3),
        token=6 * 2 * 8 * 64 * 2, state=10 * 2 * 2048 * 4,
    ),
    "LFM2-indices": Known(
        attention(16, 32, 8, 64, model_type="lfm2", hidden_size=2048, conv_L_cache=3,
                  full_attn_idxs=[2, 5, 8, 10, 12, 14]),
        None, token=6 * 2 * 8 * 64 * 2, state=10 * 2 * 2048 * 4,
    ),
    "Gemma-3n-E4B": Known(
        attention(35, 8, 2, 256, model_type="gemma3n_text", sliding_window=512, num_kv_shared_layers=15,
                  layer_types=([SLIDING] * 4 + [FULL]) * 7),
        keys("gemma3n", 35, 8, 2, 256, attention__sliding_window=512),
        token=4 * 2 * 2 * 256 * 2, sliding=16 * 2 * 2 * 256 * 2, window=512,
    ),
    "Granite-4.0-H-Tiny": Known(
        attention(40, 12, 4, 128, model_type="granitemoehybrid", hidden_size=1536, mamba_n_heads=48, mamba_d_head=64,
                  mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4,
                  layer_types=["attention" if n in GRANITE_ATTENTION else "mamba" for n in range(40)]),
        keys("granitehybrid", 40, 12, [4 if n in GRANITE_ATTENTION else 0 for n in range(40)], 128,
             embedding_length=1536, ssm__conv_kernel=4, ssm__state_size=128, ssm__group_count=1,
             ssm__inner_size=3072),
        token=4 * 2 * 4 * 128 * 2, state=36 * 4 * (48 * 64 * 128 + 3 * (3072 + 2 * 128)),
        tensors=names(40, GRANITE_ATTENTION, "ssm_in"),
    ),
    "Falcon-H1-7B": Known(  # attention and Mamba in each layer
        attention(44, 12, 2, 128, model_type="falcon_h1", hidden_size=3072, mamba_d_ssm=3072, mamba_n_heads=24,
                  mamba_d_head=128, mamba_d_state=256, mamba_n_groups=1, mamba_d_conv=4),
        keys("falcon-h1", 44, 12, 2, 128, embedding_length=3072, ssm__conv_kernel=4, ssm__state_size=256,
             ssm__group_count=1, ssm__inner_size=3072),
        token=44 * 2 * 2 * 128 * 2, state=44 * 4 * (3072 * 256 + 3 * (3072 + 2 * 256)),
        tensors=tuple(f"blk.{n}.{part}.weight" for n in range(44) for part in ("attn_k", "ssm_in")),
    ),
    "Jamba-Mini": Known(
        attention(32, 32, 8, 128, model_type="jamba", hidden_size=4096, attn_layer_period=8, attn_layer_offset=4,
                  mamba_d_state=16, mamba_d_conv=4, mamba_expand=2),
        keys("jamba", 32, 32, [8 if n % 8 == 4 else 0 for n in range(32)], embedding_length=4096, ssm__conv_kernel=4,
             ssm__state_size=16, ssm__inner_size=8192),
        token=4 * 2 * 8 * 128 * 2, state=28 * 4 * 8192 * (16 + 3),
    ),
    "Kimi-Linear-48B": Known(  # a latent of 512 + 64 numbers
        attention(27, 32, 32, 72, model_type="kimi_linear", hidden_size=2304, kv_lora_rank=512, qk_rope_head_dim=64,
                  qk_nope_head_dim=128, v_head_dim=128,
                  linear_attn_config={"full_attn_layers": KIMI_FULL, "kda_layers": [], "num_heads": 32,
                                      "head_dim": 128, "short_conv_kernel_size": 4}),
        keys("kimi-linear", 27, 32, [1 if n + 1 in KIMI_FULL else 0 for n in range(27)], embedding_length=2304,
             attention__key_length=576, attention__value_length=512, attention__key_length_mla=192,
             attention__value_length_mla=128, attention__kv_lora_rank=512, kda__head_dim=128, ssm__conv_kernel=4),
        token=7 * 576 * 2, state=20 * 4 * (32 * 128 * 128 + 3 * 3 * 32 * 128),
    ),
    "Qwen3-Next-80B": Known(
        attention(48, 16, 2, 256, model_type="qwen3_next", hidden_size=2048, linear_num_value_heads=32, **DELTA),
        keys("qwen3next", 48, 16, 2, 256, embedding_length=2048, ssm__inner_size=4096, **SSM),
        token=12 * 2 * 2 * 256 * 2, state=36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)),
    ),
    "Olmo-Hybrid-7B": Known(
        attention(32, 30, 30, 128, model_type="olmo_hybrid", hidden_size=3840,
                  layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 8, linear_num_key_heads=30, linear_key_head_dim=96,
                  linear_num_value_heads=30, linear_value_head_dim=192, linear_conv_kernel_dim=4),
        keys("olmo-hybrid", 32, 30, 30, 128, embedding_length=3840, ssm__conv_kernel=4, ssm__state_size=96,
             ssm__group_count=30, ssm__inner_size=30 * 192),
        token=8 * 2 * 30 * 128 * 2, state=24 * 4 * (30 * 96 * 192 + 3 * (2 * 30 * 96 + 30 * 192)),
        tensors=names(32, set(range(3, 32, 4))),
    ),
    "Ring-mini-linear": Known(
        attention(20, 16, 4, 128, model_type="bailing_moe_linear", hidden_size=2048, layer_group_size=5),
        None, token=4 * 2 * 4 * 128 * 2, state=16 * 4 * 16 * 128 * 128,
    ),
    "MiniMax-M1": Known(
        attention(80, 64, 8, 128, model_type="minimax_m1", hidden_size=6144, attn_type_list=([0] * 7 + [1]) * 10),
        None, token=10 * 2 * 8 * 128 * 2, state=70 * 4 * 64 * 128 * 128,
    ),
    "RecurrentGemma-2B": Known(
        {"model_type": "recurrent_gemma", "num_hidden_layers": 26, "num_attention_heads": 10, "hidden_size": 2560,
         "num_key_value_heads": 1, "block_types": ["recurrent", "recurrent", "attention"], "lru_width": 2560,
         "conv1d_width": 4, "attention_window_size": 2048},
        None, token=0, sliding=8 * 2 * 1 * 256 * 2, window=2048, state=18 * 4 * 4 * 2560,
    ),
    "Bamba-9B": Known(
        attention(32, 32, 8, 128, model_type="bamba", hidden_size=4096, attn_layer_indices=[9, 18, 27],
                  mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4),
        None, token=3 * 2 * 8 * 128 * 2, state=29 * 4 * (8192 * 128 + 3 * (8192 + 256)),
    ),
    "Mamba-2": Known(
        {"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 4096, "num_heads": 128, "head_dim": 64,
         "state_size": 128, "conv_kernel": 4, "n_groups": 8, "expand": 2},
        keys("mamba2", 64, 0, 0, embedding_length=4096, ssm__conv_kernel=4, ssm__state_size=128, ssm__group_count=8,
             ssm__inner_size=8192),
        token=0, state=64 * 4 * (8192 * 128 + 3 * (8192 + 2 * 8 * 128)),
    ),
    # No recurrent layers
    "DeepSeek-V3": Known(
        attention(61, 128, 128, 64, model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64,
                  qk_nope_head_dim=128, v_head_dim=128),
        keys("deepseek2", 61, 128, 1, attention__key_length=576, attention__value_length=512,
             attention__key_length_mla=192, attention__value_length_mla=128, attention__kv_lora_rank=512),
        token=61 * 576 * 2,
    ),
    "DeepSeek-V2 with keys of each head": Known(  # an early GGUF
        None,
        keys("deepseek2", 27, 16, 16, attention__key_length=192, attention__value_length=128,
             attention__kv_lora_rank=512),
        token=27 * 16 * (192 + 128) * 2,
    ),
    "gpt-oss-20b": Known(
        attention(24, 64, 8, 64, model_type="gpt_oss", sliding_window=128, layer_types=[SLIDING, FULL] * 12),
        keys("gpt-oss", 24, 64, 8, 64, attention__sliding_window=128),
        token=12 * 2 * 8 * 64 * 2, sliding=12 * 2 * 8 * 64 * 2, window=128,
    ),
    "Gemma-3-4B": Known(  # its config.json has hardly more
        {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024},
        keys("gemma3", 34, 8, 4, 256, attention__sliding_window=1024),
        token=5 * 2 * 4 * 256 * 2, sliding=29 * 2 * 4 * 256 * 2, window=1024,
    ),
    "Llama-4-Scout": Known(
        attention(48, 40, 8, 128, model_type="llama4_text", attention_chunk_size=8192),
        keys("llama4", 48, 40, 8, 128),
        token=12 * 2 * 8 * 128 * 2, sliding=36 * 2 * 8 * 128 * 2, window=8192,
    ),
    "Nemotron-Super-49B": Known(  # some layers have no attention
        {"model_type": "nemotron-nas", "num_hidden_layers": 4, "num_attention_heads": 64, "hidden_size": 8192,
         "max_position_embeddings": 1 << 17,
         "block_configs": [{"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}},
                           {"attention": {"replace_with_linear": True}}, {"attention": {"n_heads_in_group": 8}}]},
        keys("deci", 4, [64, 0, 0, 64], [8, 0, 0, 8], 128), token=2 * 2 * 8 * 128 * 2,
    ),
    "OpenELM-270M": Known(  # later layers have more heads
        {"model_type": "openelm", "num_transformer_layers": 6, "head_dim": 64, "model_dim": 1280,
         "max_context_length": 2048, "num_kv_heads": [3, 3, 3, 4, 4, 5], "num_query_heads": [12, 12, 12, 16, 16, 20]},
        None, token=2 * 22 * 64 * 2,
    ),
    "Phi-3 with the window of its context": Known(
        None, keys("phi3", 32, 32, 32, 96, attention__sliding_window=2047), token=32 * 2 * 32 * 96 * 2,
    ),
    "Hunyuan-Large": Known(  # two layers share a cache
        attention(64, 80, 8, 128, model_type="hunyuan", use_cla=True, cla_share_factor=2),
        None, token=32 * 2 * 8 * 128 * 2,
    ),
    "SmallThinker": Known(
        None, keys("smallthinker", 32, 28, 4, 128, attention__sliding_window=4096),
        token=8 * 2 * 4 * 128 * 2, sliding=24 * 2 * 4 * 128 * 2, window=4096,
    ),
}  # fmt: skip
BOTH = [name for name, known in MODELS.items() if known.config is not None and known.keys is not None]


def geometry_of(known: Known, source: str) -> Any:
    if source == "config":
        assert known.config is not None
        return parse_geometry(known.config)
    assert known.keys is not None
    kind = known.keys["general.architecture"]
    return parse_gguf_geometry(
        kind, {key.removeprefix(f"{kind}."): value for key, value in known.keys.items()}, known.tensors
    )


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (name, source)
        for name, known in MODELS.items()
        for source, given in (("config", known.config), ("gguf", known.keys))
        if given is not None
    ],
)
def test_the_cache_by_hand(name: str, source: str) -> None:
    known = MODELS[name]
    shape = geometry_of(known, source)
    found = (2 * shape.full_numbers(), 2 * shape.sliding_numbers(), shape.window, shape.state_bytes)
    assert found == (known.token, known.sliding, known.window, known.state)


@pytest.mark.parametrize("name", BOTH)
def test_both_kinds_of_files_give_the_same(name: str) -> None:
    """The shape of the attention, too: its width is what a long prompt computes with."""
    assert geometry_of(MODELS[name], "config") == geometry_of(MODELS[name], "gguf")


BODY, VOCABULARY, HIDDEN = 1 << 29, 100_000, 1024  # parameters of 16 bit
READ = 2 * (BODY + VOCABULARY * HIDDEN)


@pytest.mark.parametrize("name", MODELS)
def test_answers_by_hand(tmp_path: Path, name: str) -> None:
    """256 GB/s through the weights, without the table of the embedding, and the cache after 40,000 tokens."""
    known = MODELS[name]
    shape = [("body", [BODY]), ("head", [HIDDEN, VOCABULARY]), ("table", [HIDDEN, VOCABULARY])]
    if known.keys is not None:
        path = tmp_path / "m.gguf"
        parts = {"body": "blk.0.ffn_up", "head": "output", "table": "token_embd"}
        listed = {f"{parts[part]}.weight": (size, F16) for part, size in shape}
        gguf(path, known.keys, listed | {part: ([0], F16) for part in known.tensors})
    else:
        path = model(tmp_path, known.config or {})
        parts = {"body": "model.layers.0.mlp.up_proj", "head": "lm_head", "table": "model.embed_tokens"}
        safetensors(path / "model.safetensors", {f"{parts[part]}.weight": ("F16", size) for part, size in shape})
    context = 40_000
    found = answer(Question(model=str(path), gpu="Strix Halo", context=context, memory_gib=(100, 110)), tmp_path)
    cache = known.token * context + known.sliding * min(context, known.window or 0)
    assert found.one_user_max_tok_s == pytest.approx(256e9 / (READ + cache), rel=1e-9)
    assert found.fit is not None and found.fits is True
    expected = (known.token, known.sliding * (known.window or 0), known.state or 0)
    assert (found.fit.token_bytes, found.fit.window_bytes, found.fit.state_bytes) == expected
    if known.keys is not None:
        assert found.fit.request_bytes == cache + (known.state or 0)
    assert "after 40,000 tokens" in found.sentence


def test_gpus_share_heads_and_states(tmp_path: Path) -> None:
    """MiniMax-M1 on 8: one key head each, and a latent as a whole."""
    fit = answer(Question(model=str(model(tmp_path / "a", MODELS["MiniMax-M1"].config or {})), gpus=8, gpu="MI300X"))
    assert fit.fit is not None
    assert (fit.fit.token_bytes, fit.fit.state_bytes) == (10 * 2 * 128 * 2, 70 * 4 * 64 * 128 * 128 // 8)
    kimi = answer(
        Question(model=str(model(tmp_path / "b", MODELS["Kimi-Linear-48B"].config or {})), gpus=8, gpu="MI300X")
    )
    assert kimi.fit is not None and kimi.fit.token_bytes == 7 * 576 * 2


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"layernorm_linear_attention_alpha": 3.5}, "layernorm_linear_attention_alpha"),
        ({"layer_types": ["a_new_one"] * 28}, " a_new_one"),
        ({"layer_types": [["full_attention"]] * 28}, "['full_attention']"),
        ({"hybrid_override_pattern": "M*X"}, " X in hybrid_override_pattern"),
        ({"attn_type_list": [2] * 28}, "attn_type_list "),
        ({"full_attn_idxs": [28]}, "attention layers"),
        ({"linear_attn_config": {"full_attn_layers": ["1"]}}, "attention layers"),
        ({"num_kv_shared_layers": 28}, "num_kv_shared_layers is 28"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"index_topk": 2048}, "index_topk"),
        ({"mb_per_layer": 2}, "mb_per_layer"),
        ({"num_hidden_layers": 1 << 29}, "num_hidden_layers is 536870912"),
        ({"num_key_value_heads": [8]}, "num_key_value_heads "),
    ],
)
def test_what_config_json_does_not_tell_has_its_reason(more: dict[str, Any], why: str, wording: Wording) -> None:
    with pytest.raises(UnknownShapeError) as caught:
        parse_geometry(QWEN3 | more)
    assert why in str(caught.value)
    wording(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (keys("new", 4, 8, 2, 64, ssm__state_size=16), "ssm.state_size"),
        (keys("new", 4, 8, 2, 64, attention__sliding_window=512), "'new' "),
        (keys("new", 4, 8, 2, 64, attention__sliding_window=512, attention__sliding_window_pattern=[True]),
         "sliding_window_pattern has 1 "),
        (keys("deepseek4", 4, 8, 1, 64, attention__compress_ratios=[0, 4, 128, 4]), "cache"),
        (keys("new", 4, 8, 16, 64), "key heads"),
        (keys("new", 4, 8, 2, 64, nextn_predict_layers=4), "nextn_predict_layers is 4"),
    ],
)  # fmt: skip
def test_what_a_gguf_file_does_not_tell_has_its_reason(given: dict[str, Any], why: str, wording: Wording) -> None:
    with pytest.raises(UnknownShapeError) as caught:
        geometry_of(Known(None, given, 0), "gguf")
    assert why in str(caught.value)
    wording(caught.value)


@pytest.mark.parametrize("key", ["layer_group_size", "attention.recurrent_layers", "linear_attn.head_count"])
def test_a_new_architecture_with_other_layers_is_not_taken_for_a_usual_one(key: str, wording: Wording) -> None:
    """Else its cache would be several times too large; tensors or heads tell which layers have one."""
    given = keys("new", 4, 8, 2, 64, **{key.replace(".", "__"): 5})
    with pytest.raises(UnknownShapeError) as caught:
        geometry_of(Known(None, given, 0), "gguf")
    wording(caught.value)
    heads = keys("new", 4, 8, [0, 2, 0, 2], 64, **{key.replace(".", "__"): 5})
    assert [group.layers for group in geometry_of(Known(None, heads, 0), "gguf").full] == [2]


def test_a_window_of_an_unknown_architecture_needs_only_its_pattern() -> None:
    given = keys("new", 4, 8, 2, 64, attention__sliding_window=512, attention__sliding_window_pattern=2)
    shape = geometry_of(Known(None, given, 0), "gguf")
    assert [group.layers for group in (*shape.full, *shape.sliding)] == [2, 2]


def test_weights_beyond_the_memory_are_an_answer(tmp_path: Path, wording: Wording) -> None:
    """Also where the cache is not known, and where only the most memory of the APU is."""
    given = keys("deepseek4", 2, 8, 1, 64, attention__compress_ratios=[0, 4])
    path = gguf(tmp_path / "m.gguf", given, {"blk.0.ffn_up.weight": ([1 << 16, 70 << 14], F16)})  # 140 GiB
    large = answer(Question(model=str(path), gpu="Strix Halo", context=32768), tmp_path)
    assert (large.fits, large.excess_bytes) == (False, 12 * GIB)
    assert "140.0" in large.sentence and "128.0" in large.sentence
    wording(large.sentence)
    fits = answer(Question(model=str(path), gpu="MI300X", context=32768), tmp_path)
    assert fits.fits is None and "32,768" in fits.sentence
    wording(fits.sentence)
    assert any("attention.compress_ratios" in line for line in printed_lines(expect_page(fits)))


def test_a_context_that_does_not_fit_is_in_the_headline(tmp_path: Path, wording: Wording) -> None:
    listed = {"blk.0.ffn_up.weight": ([1 << 16, 10 << 14], F16)}  # 20 GiB
    path = gguf(tmp_path / "m.gguf", keys("llama", 32, 32, 32, 128), listed)
    large = answer(Question(model=str(path), gpu="RX 7900 XTX", context=65536), tmp_path)
    assert large.fit is not None and large.fit.request_bytes == 32 * GIB
    assert large.fits is False and "65,536" in large.sentence
    wording(large.sentence)
    assert answer(Question(model=str(path), gpu="RX 7900 XTX", context=512), tmp_path).fits is not False
    measured = answer(Question(model=str(path), gpu="RX 7900 XTX", context=65536, measured_tok_s=9), tmp_path)
    assert measured.sentence.startswith("9 tok/s is ")


def test_advice_for_a_gguf_file_is_of_llama_cpp(tmp_path: Path, wording: Wording) -> None:
    """It has no option of vLLM; slots share the context, so that more slots need so many times the context."""
    listed = {"blk.0.ffn_up.weight": ([1 << 16, 10 << 14], F16)}  # 20 GiB
    path = str(gguf(tmp_path / "m.gguf", keys("llama", 32, 32, 32, 128), listed))
    memory = (60.0, 64.0)
    fits = answer(Question(model=path, context=8192, users=16, gpu="MI300X", memory_gib=memory), tmp_path)
    assert fits.fit is not None and "--parallel" in fits.fit.advice[0] and "--ctx-size" in fits.fit.advice[0]
    wording(fits.fit.advice[0])
    large = answer(Question(model=path, context=1 << 17, gpu="MI300X", memory_gib=memory), tmp_path)
    assert large.fit is not None and large.fits is False
    assert "--cache-type-k q8_0" in large.fit.advice[0] and "--ctx-size" in large.fit.advice[0]
    wording(large.fit.advice[0])
    full = answer(Question(model=path, context=8192, gpu="MI300X", memory_gib=(0.5, 64.0)), tmp_path)
    for found in (fits, large, full):
        text = " ".join(printed_lines(expect_page(found)))
        for word in ("vLLM", "--gpu-memory-utilization", "--max-num-seqs", "--max-model-len", "--tensor-parallel"):
            assert word not in text


LARGE = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
PUBLISHED = [  # billions of parameters: all, and those that one token multiplies, head included
    (attention(64, 24, 4, 256, hidden_size=5120, intermediate_size=17408, vocab_size=248320, **DELTA,
               model_type="qwen3_5_text", linear_num_value_heads=48), 26.9, 25.6),
    (attention(40, 16, 2, 256, hidden_size=2048, vocab_size=248320, num_experts=256, num_experts_per_tok=8,
               moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_value_heads=32, **DELTA,
               model_type="qwen3_5_moe_text"), 34.7, 2.9),
    (attention(48, 16, 2, 256, hidden_size=2048, vocab_size=151936, num_experts=512, num_experts_per_tok=10,
               moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_value_heads=32, **DELTA,
               model_type="qwen3_next"), 79.7, 3.6),
    ({"model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32,
      "num_key_value_heads": 8, "vocab_size": 65536, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True,
      "block_multiple_of": 256, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_embedding": True},
     1.17, 1.17),
    (attention(40, 12, 4, 128, model_type="granitemoehybrid", hidden_size=1536, vocab_size=100352,
               num_local_experts=64, num_experts_per_tok=6, intermediate_size=512, shared_intermediate_size=1024,
               mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4,
               layer_types=["attention" if n in GRANITE_ATTENTION else "mamba" for n in range(40)],
               tie_word_embeddings=True), 6.94, 1.47),
    (LARGE | {"model_type": "jamba", "num_hidden_layers": 32, "vocab_size": 65536, "num_experts": 16,
              "num_experts_per_tok": 2, "intermediate_size": 14336, "expert_layer_period": 2,
              "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
              "mamba_dt_rank": 256}, 51.6, 11.8),
    (attention(44, 12, 2, 128, model_type="falcon_h1", hidden_size=3072, vocab_size=130049, intermediate_size=12288,
               mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256, mamba_n_groups=1,
               mamba_d_conv=4), 7.6, 7.2),
    (attention(80, 64, 8, 128, model_type="minimax_m1", hidden_size=6144, intermediate_size=9216, vocab_size=200064,
               num_local_experts=32, num_experts_per_tok=2, attn_type_list=([0] * 7 + [1]) * 10), 456, 47.2),
    (attention(20, 16, 4, 128, model_type="bailing_moe_linear", hidden_size=2048, layer_group_size=5,
               vocab_size=157184, intermediate_size=5120, moe_intermediate_size=512, num_experts=256,
               num_experts_per_tok=8, num_shared_experts=1, first_k_dense_replace=1,
               moe_shared_expert_intermediate_size=512), 16.4, 1.3),
    (attention(27, 32, 32, 72, model_type="kimi_linear", hidden_size=2304, vocab_size=163840, intermediate_size=9216,
               moe_intermediate_size=1024, num_experts=256, num_experts_per_token=8, num_shared_experts=1,
               first_k_dense_replace=1, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
               linear_attn_config={"full_attn_layers": KIMI_FULL, "num_heads": 32, "head_dim": 128,
                                   "short_conv_kernel_size": 4}), 49.1, 3.1),
    (attention(42, 8, 2, 256, model_type="gemma4_text", sliding_window=512, num_kv_shared_layers=18,
               hidden_size=2560, intermediate_size=10240, vocab_size=262144, hidden_size_per_layer_input=256),
     7.46, 4.64),
    ({"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240,
      "sliding_window": 1024, "vocab_size": 262208}, 3.88, 3.88),
    ({"model_type": "recurrent_gemma", "num_hidden_layers": 26, "hidden_size": 2560, "num_attention_heads": 10,
      "num_key_value_heads": 1, "intermediate_size": 15360, "vocab_size": 256000, "lru_width": 2560,
      "conv1d_width": 4}, 2.68, 2.68),
]  # fmt: skip


@pytest.mark.parametrize(("config", "total", "active"), PUBLISHED, ids=[one[0]["model_type"] for one in PUBLISHED])
def test_parameters_of_a_configuration_alone(
    tmp_path: Path, config: dict[str, Any], total: float, active: float
) -> None:
    """As published for these models, without their files; the last number counts the head, tied or not."""
    size = read_model(model(tmp_path, config)).size
    assert size is not None and size.params is not None
    assert size.weights_bytes / 2e9 == pytest.approx(total, rel=0.01)
    assert size.params / 1e9 == pytest.approx(active, rel=0.02)
    assert size.read_bytes == 2 * size.params


def test_layers_that_are_not_counted_have_a_reason(tmp_path: Path, wording: Wording) -> None:
    nemotron = MODELS["Nemotron-3-Nano"].config or {}
    more = {"vocab_size": 131072, "intermediate_size": 1856}
    shape = read_model(model(tmp_path, nemotron | more))
    assert shape.size is None
    wording(shape.unsized)
    assert shape.geometry is not None and shape.geometry.full_numbers() == 6 * 2 * 2 * 128


ODD: list[Any] = [
    None, 0, -1, 1, True, "x", [], [1], [None], {}, {"a": 1}, 1.5, float("nan"), 10**400, [[1]], [0] * 64, "M*",
]  # fmt: skip
MORE_KEYS = [
    "model_type", "layer_types", "layers_block_type", "block_types", "hybrid_override_pattern", "attn_type_list",
    "linear_attn_config", "full_attn_idxs", "layer_group_size", "attn_layer_period", "use_cla", "block_configs",
    "per_layer_config", "attention_other_setting", "no_rope_layers", "mamba_d_head", "mamba_dt_rank", "kv_lora_rank",
    "num_kv_heads",
]  # fmt: skip


def test_odd_values_are_unknown_and_no_crash() -> None:
    draw = random.Random(20261129)
    unknown = 0
    for known in draw.choices(list(MODELS.values()), k=3000):
        for source, given in (("config", known.config), ("gguf", known.keys)):
            if given is None:
                continue
            names = [name for name in given if name != "general.architecture"]
            changed = given | {draw.choice(names + MORE_KEYS): draw.choice(ODD) for _ in range(2)}
            try:
                geometry_of(known._replace(config=changed, keys=changed), source)
            except UnknownShapeError:
                unknown += 1
    assert unknown > 1000


def test_a_file_of_mamba_may_have_no_heads() -> None:
    given = {key: value for key, value in (MODELS["Mamba-2"].keys or {}).items() if "head_count" not in key}
    assert geometry_of(Known(None, given, 0), "gguf") == geometry_of(MODELS["Mamba-2"], "gguf")
