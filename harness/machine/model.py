"""A model's configuration, and the sizes of its weights and of its KV cache.

Source: vllm/v1/core/kv_cache_utils.py. A block holds `block` tokens of a group of layers. Layers that keep all tokens
and layers with a sliding window are put into groups of equal size, which share one pool of blocks.
"""

import json
import os
from pathlib import Path
from typing import Any

from msgspec import Struct

from harness.base.errors import HarnessError, did_you_mean, reason_of
from harness.base.files import read_text

# Their default head size is hidden_size / heads. Other architectures have defaults in their code.
_DERIVED_HEAD_SIZE = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "phimoe", "olmo", "olmo2", "starcoder2", "granite",
    "internlm2", "internlm3", "stablelm", "cohere", "opt", "gpt_neox",
}  # fmt: skip
# Their default number of key heads is that of the query heads. Other architectures have defaults in their code.
_EQUAL_HEADS = {"llama", "phi3", "granite", "cohere", "olmo", "olmo2", "internlm2", "opt", "gpt_neox"}
# vLLM keeps one latent vector per token and layer (multi-head latent attention), and nothing else.
_LATENT_ATTENTION = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"}
_EVERY_LAYER_SLIDES = {"mistral", "mixtral", "phi3", "starcoder2"}
# Keys of layers whose cache has another form: recurrent states, chunks, heads that differ between layers.
_UNSUPPORTED_KEYS = (
    "attention_chunk_size", "attn_layer_period", "block_configs", "compress_ratios", "conv_L_cache",
    "cross_attention_layers", "full_attention_interval", "global_head_dim", "hybrid_override_pattern", "index_topk",
    "layers_block_type", "linear_attn_config", "linear_num_key_heads", "mamba_d_state", "mamba_d_ssm",
    "mamba_expand", "num_global_key_value_heads", "num_kv_shared_layers", "ssm_cfg", "ssm_state_size", "state_size",
    "time_step_rank",
)  # fmt: skip


class Geometry(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape that determines the size of a KV cache."""

    full_layers: int  # keep every token
    sliding_layers: int = 0  # keep the last `window` tokens
    window: int | None = None
    kv_heads: int  # of all GPUs; 1 for a latent, of which every GPU has a copy
    head_size: int  # numbers of a key, a value or a latent
    latent: bool = False  # one vector instead of key and value


class ModelShape(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model on this machine, from its files."""

    name: str
    folder: Path
    geometry: Geometry | None = None
    longest: int | None = None  # max_position_embeddings
    kv_bytes: int | None = None  # of a number in the KV cache, where --kv-cache-dtype is auto
    unknown: list[str] = []  # why something above is None


def find_model(name: str, environment: dict[str, str] | None = None) -> Path:
    """Return the folder of a model: a path, or a hub id in this machine's Hugging Face cache. Nothing is downloaded.

    Raises HarnessError with the places that were searched.
    """
    path = Path(os.path.expanduser(name))  # unchanged without ~
    if path.name == "config.json":
        path = path.parent
    cache = hub_cache(environment)
    repository = cache / f"models--{name.replace('/', '--')}"
    try:
        revision = read_text(repository / "refs" / "main").strip()
    except (OSError, ValueError):
        revision = "*"
    for folder in (path, *sorted((repository / "snapshots").glob(revision or "*"))):
        if (folder / "config.json").is_file():
            return folder
    raise HarnessError(
        f"--model: there is no config.json of '{name}', neither as a folder nor in {cache}",
        next_step="Give the model's folder, or download its config.json there first; nothing is downloaded here.",
    )


def hub_cache(environment: dict[str, str] | None = None) -> Path:
    """Return the folder of Hugging Face's hub on this machine: HF_HUB_CACHE, HF_HOME/hub, else ~/.cache."""
    env = dict(os.environ) if environment is None else environment
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"])
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    return Path(home) / "hub"


def read_model(folder: Path, name: str | None = None) -> ModelShape:
    """Return a model by its folder. Raises HarnessError if its config.json cannot be read."""
    config = _read_json(folder / "config.json")
    nested = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), None)
    text: dict[str, Any] = nested or config
    unknown: list[str] = []
    try:
        geometry = parse_geometry(text, encoder_decoder=bool(config.get("is_encoder_decoder")))
    except _UnknownError as error:
        geometry = None
        unknown.append(f"the KV cache per token: {error}")
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    kv_bytes: int | None = 2  # 16 bit; vLLM converts 32 bit to 16
    if (folder / "hf_quant_config.json").is_file() or quantization.get("kv_cache_scheme"):
        kv_bytes = None
        unknown.append("the KV cache's data type: the checkpoint may bring one of its own; give --kv-cache-dtype")
    longest = text.get("max_position_embeddings")
    return ModelShape(
        name=name or folder.name,
        folder=folder,
        geometry=geometry,
        longest=longest if isinstance(longest, int) else None,
        kv_bytes=kv_bytes,
        unknown=unknown,
    )


class _UnknownError(Exception):
    """Why the geometry is unknown."""


def parse_geometry(config: dict[str, Any], *, encoder_decoder: bool = False) -> Geometry:
    """Return the geometry of the text part of a config.json. Raises _UnknownError with the reason."""
    kind = str(config.get("model_type"))
    if encoder_decoder or config.get("is_encoder_decoder"):
        raise _UnknownError("an encoder-decoder model")
    unsupported = [key for key in _UNSUPPORTED_KEYS if config.get(key)]
    if unsupported:
        raise _UnknownError(f"layers of another form ({unsupported[0]} in config.json)")
    layers = _parse_positive(config, "num_hidden_layers")
    if config.get("kv_lora_rank") is not None:
        if kind not in _LATENT_ATTENTION:
            raise _UnknownError(f"latent attention of '{kind}', of which the cache's form is not known")
        size = _parse_positive(config, "kv_lora_rank") + _parse_positive(config, "qk_rope_head_dim")
        return Geometry(full_layers=layers, kv_heads=1, head_size=size, latent=True)
    head_keys = [key for key in ("num_key_value_heads", "num_kv_heads") if config.get(key) is not None]
    if not head_keys and kind in _EQUAL_HEADS:
        head_keys = ["num_attention_heads"]
    sliding = _count_sliding_layers(config, kind, layers)
    if not head_keys:
        raise _UnknownError("config.json has no num_key_value_heads")
    if config.get("head_dim") is not None:
        head_size = _parse_positive(config, "head_dim")
    elif kind in _DERIVED_HEAD_SIZE:
        head_size = _parse_positive(config, "hidden_size") // _parse_positive(config, "num_attention_heads")
    else:
        raise _UnknownError("config.json has no head_dim")
    return Geometry(
        full_layers=layers - sliding,
        sliding_layers=sliding,
        window=_parse_positive(config, "sliding_window") if sliding else None,
        kv_heads=_parse_positive(config, head_keys[0]),
        head_size=head_size,
    )


def _count_sliding_layers(config: dict[str, Any], kind: str, layers: int) -> int:
    types = config.get("layer_types")
    if isinstance(types, list):
        unknown = sorted({str(layer) for layer in types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise _UnknownError(f"layers of the type {unknown[0]}")
        if len(types) != layers:
            raise _UnknownError(f"{len(types)} layer_types for {layers} layers")
        return types.count("sliding_attention")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if kind in _EVERY_LAYER_SLIDES:
        return layers
    if kind == "gemma2":
        return (layers + 1) // 2  # every second layer, from the first on
    pattern = config.get("sliding_window_pattern")
    if kind == "gemma3_text" and isinstance(pattern, int) and pattern > 0:
        return layers - layers // pattern
    raise _UnknownError("it has a sliding window, and config.json does not say in which layers (layer_types)")


def _parse_positive(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _UnknownError(f"config.json has no usable {key}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise HarnessError(f"{path}: cannot be read ({reason_of(error)})", next_step="Download it again.") from None
    if not isinstance(config, dict):
        raise HarnessError(f"{path}: is not the configuration of a model", next_step="Download it again.")
    return config


def measure_weights(folder: Path) -> int | None:
    """Return the bytes of the safetensors; None if they are not on this machine.

    If a folder has an index, only its files count: repositories may also have the same weights in other forms.
    """
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        files = [folder / name for name in set(weight_map.values())] if isinstance(weight_map, dict) else []
    if files and all(path.is_file() for path in files):
        return sum(path.stat().st_size for path in files)
    return None


GPU_BLOCK = 16  # vLLM's default on a GPU
DTYPE_BYTES = {"auto": None, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def require_known_dtype(name: str) -> None:
    """Raise HarnessError for an unknown data type."""
    if name not in DTYPE_BYTES:
        raise HarnessError(
            f"--kv-cache-dtype: '{name}' is not known here; {did_you_mean(name, DTYPE_BYTES)}",
            next_step="Leave it out for the model's own.",
        )


class Layout(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one GPU stores the cache."""

    block: int  # tokens
    block_bytes: int
    full_groups: int
    sliding_groups: int = 0
    window: int | None = None
    in_flight: int = 0  # computed tokens of a sliding window that are not freed yet

    def blocks_per_request(self, length: int) -> int:
        """Return the maximum number of blocks of a request of `length` tokens."""
        blocks = self.full_groups * _divide_rounding_up(length, self.block)
        if self.sliding_groups and self.window is not None:
            kept = min(self.window - 1 + self.in_flight, length)
            blocks += self.sliding_groups * (
                _divide_rounding_up(kept, self.block) + 1
            )  # a window may start within a block
        return blocks

    def request_bytes(self, length: int) -> int:
        return self.blocks_per_request(length) * self.block_bytes

    @property
    def token_bytes(self) -> int | None:
        """Bytes of one more token of a request; None if it depends on the request's length."""
        return None if self.sliding_groups else self.full_groups * self.block_bytes // self.block


class Capacity(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The capacity of a KV cache, as vLLM prints it at its start."""

    tokens: int
    concurrency: float  # concurrent requests of maximum length
    longest: int  # the largest max_model_len that fits, at most the wanted one

    @property
    def fits(self) -> bool:
        """Whether a request of maximum length fits; else vLLM does not start."""
        return self.longest > 0 and self.concurrency >= 1


def make_layout(
    geometry: Geometry, number_bytes: int, *, tensor_parallel: int = 1, block: int = GPU_BLOCK, in_flight: int = 0
) -> Layout:
    """Return the cache on each of `tensor_parallel` GPUs: they share the key heads, but each has at least one."""
    heads = max(1, geometry.kv_heads // tensor_parallel)
    page = block * heads * geometry.head_size * number_bytes * (1 if geometry.latent else 2)
    full, sliding = geometry.full_layers, geometry.sliding_layers
    if not full or not sliding:
        size = full or sliding
    else:
        # Groups have the size of the smaller kind; if both are about equal, of the larger one, with padding.
        size = max(full, sliding) if max(full, sliding) < min(full, sliding) * 1.5 else min(full, sliding)
    return Layout(
        block=block,
        block_bytes=size * page,
        full_groups=_divide_rounding_up(full, size),
        sliding_groups=_divide_rounding_up(sliding, size),
        window=geometry.window,
        in_flight=in_flight,
    )


def compute_capacity(layout: Layout, available: int, length: int) -> Capacity:
    """Return the capacity of `available` bytes at a max_model_len of `length` tokens."""
    blocks = max(0, available) // layout.block_bytes
    concurrency = blocks / layout.blocks_per_request(length)
    usable = available - layout.block_bytes  # vLLM reserves one block
    low, high = 0, length
    while low < high:  # bisection: a longer request needs more bytes
        middle = (low + high + 1) // 2
        if layout.request_bytes(middle) <= usable:
            low = middle
        else:
            high = middle - 1
    return Capacity(tokens=int(concurrency * length), concurrency=concurrency, longest=low)


def _divide_rounding_up(number: int, by: int) -> int:
    return -(-number // by)
