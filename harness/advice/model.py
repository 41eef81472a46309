"""A model by its files: the sizes of its weights and of its KV cache, and what a token reads of them.

Source of the KV cache: vllm/v1/core/kv_cache_utils.py. A block holds `block` tokens of a group of layers. Layers that
keep all tokens and layers with a sliding window are put into groups of equal size, which share one pool of blocks.
"""

import json
import os
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from harness.advice.weights import (
    BYTES_PER_PARAM,
    MAX_HEADER_BYTES,
    list_safetensors,
    read_gguf,
    read_safetensors,
    sum_parts,
    sum_tensors,
)
from harness.base.errors import HarnessError, did_you_mean, reason_of
from harness.base.files import read_text
from harness.records.manifest import ModelSize

# Their default head size is hidden_size / heads. Other architectures have defaults in their code.
_DERIVED_HEAD_SIZE = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "phimoe", "olmo", "olmo2", "starcoder2", "granite",
    "internlm2", "internlm3", "stablelm", "cohere", "opt", "gpt_neox",
}  # fmt: skip
# Their default number of key heads is that of the query heads. Other architectures have defaults in their code.
_EQUAL_HEADS = {"llama", "phi3", "granite", "cohere", "olmo", "olmo2", "internlm2", "opt", "gpt_neox"}
# vLLM keeps one latent vector per token and layer (multi-head latent attention), and nothing else.
_LATENT_ATTENTION = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"}
MAX_SIZE = 1 << 30  # of a number in a configuration: layers, heads, tokens
_EVERY_LAYER_SLIDES = {"mistral", "mixtral", "phi3", "starcoder2"}
# Keys of layers whose cache has another form: recurrent states, chunks, heads that differ between layers.
_UNSUPPORTED_KEYS = (
    "attention_chunk_size", "attn_layer_period", "block_configs", "compress_ratios", "conv_L_cache",
    "cross_attention_layers", "full_attention_interval", "global_head_dim", "hybrid_override_pattern", "index_topk",
    "layers_block_type", "linear_attn_config", "linear_num_key_heads", "mamba_d_state", "mamba_d_ssm",
    "mamba_expand", "num_global_key_value_heads", "num_kv_shared_layers", "ssm_cfg", "ssm_state_size", "state_size",
    "time_step_rank",
)  # fmt: skip


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED_EXPERTS = ("num_experts_per_tok", "moe_k", "top_k_experts")


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
    geometry: Geometry | None = None
    longest: int | None = None  # max_position_embeddings
    kv_bytes: int | None = None  # of a number in the KV cache, where --kv-cache-dtype is auto
    weights_bytes: int | None = None  # of the files; None: they are not on this machine
    size: ModelSize | None = None
    unsized: str = "it has no weights"  # why size is None
    unknown: list[str] = []  # why another value above is None


def find_model(name: str, environment: dict[str, str] | None = None) -> Path:
    """Return the folder of a model, or its GGUF file: a path, or a hub id in this machine's Hugging Face cache.

    Nothing is downloaded. Raises HarnessError with the places that were searched.
    """
    path = Path(os.path.expanduser(name))  # unchanged without ~
    if path.name == "config.json":
        path = path.parent
    if path.suffix == ".gguf":
        if not path.is_file():
            raise HarnessError(f"{path}: there is no such file", next_step="Give the GGUF file; nothing is downloaded.")
        return path
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
        f"there is no config.json of '{name[:100]}', neither as a folder nor in {cache}",
        next_step="Give the model's folder, a GGUF file, or `--params 14B --bits 16`; nothing is downloaded here.",
    )


def hub_cache(environment: dict[str, str] | None = None) -> Path:
    """Return the folder of Hugging Face's hub on this machine: HF_HUB_CACHE, HF_HOME/hub, else ~/.cache."""
    env = dict(os.environ) if environment is None else environment
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"])
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    return Path(home) / "hub"


def read_model(path: Path, name: str | None = None) -> ModelShape:
    """Return a model by its folder or GGUF file. Raises HarnessError if its configuration cannot be read."""
    if path.suffix == ".gguf":
        return _read_gguf_model(path, name)
    config = _read_json(path / "config.json")
    nested = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), None)
    text: dict[str, Any] = nested or config
    unknown: list[str] = []
    try:
        geometry = parse_geometry(text, encoder_decoder=bool(config.get("is_encoder_decoder")))
    except _UnknownError as error:
        geometry = None
        unknown.append(f"the KV cache per token: {error}")
    given = config.get("quantization_config") or text.get("quantization_config")
    quantization: dict[str, Any] = given if isinstance(given, dict) else {}
    kv_bytes: int | None = 2  # 16 bit; vLLM converts 32 bit to 16
    if (path / "hf_quant_config.json").is_file() or quantization.get("kv_cache_scheme"):
        kv_bytes = None
        unknown.append("the KV cache's data type: the checkpoint may bring one of its own; give --kv-cache-dtype")
    weights_bytes = measure_weights(path)
    size, unsized = None, ""
    try:
        size = _folder_size(name or path.name, path, text, quantization, weights_bytes)
    except _UnknownError as error:
        unsized = f"neither its files nor its config.json tell the size of its weights: {error}"
    return ModelShape(
        name=name or path.name,
        geometry=geometry,
        longest=_parse_longest(text, "max_position_embeddings", unknown),
        kv_bytes=kv_bytes,
        weights_bytes=None if size is None or size.weights_bytes != weights_bytes else weights_bytes,
        size=None if size is None else with_cache(size, geometry, kv_bytes or 2, _attention_size(text, geometry)),
        unsized=unsized,
        unknown=unknown,
    )


def with_cache(
    size: ModelSize, geometry: Geometry | None, number_bytes: int, attention_size: float
) -> ModelSize | None:
    """Return the size with the KV cache that a token reads; None for a model without weights.

    `attention_size`: of the queries of a layer; 0: not known.
    """
    if size.read_bytes <= 0:
        return None
    if geometry is None:
        return size
    layer_bytes = geometry.kv_heads * geometry.head_size * number_bytes * (1 if geometry.latent else 2)
    return structs.replace(
        size,
        kv_token_bytes=geometry.full_layers * layer_bytes,
        sliding_token_bytes=geometry.sliding_layers * layer_bytes,
        window=geometry.window,
        attention_width=geometry.full_layers * attention_size,
        sliding_attention_width=geometry.sliding_layers * attention_size,
    )


def _attention_size(text: dict[str, Any], geometry: Geometry | None) -> float:
    """Return query heads x head size, of a latent the mean of key and value; 0 where config.json does not tell."""
    try:
        heads = _parse_positive(text, "num_attention_heads")
        if geometry is None or not geometry.latent:
            return 0 if geometry is None else heads * geometry.head_size
        sizes = (_parse_positive(text, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return heads * sum(sizes) / 2
    except _UnknownError:
        return 0


def _folder_size(
    name: str, folder: Path, text: dict[str, Any], quantization: dict[str, Any], weights_bytes: int | None
) -> ModelSize | None:
    """Return what a token reads, by the headers of the files; without files by the configuration.

    Raises _UnknownError where neither has it.
    """
    share = _routed_share(text)
    doubt = "its files are not on this machine"
    if weights_bytes is not None:
        files = list_safetensors(folder, _read_index(folder))
        layers = text.get("num_hidden_layers")
        try:
            return sum_tensors(
                name,
                read_safetensors(files, packed_bits=_bits(quantization) or 4),
                layers=layers if isinstance(layers, int) else None,
                routed_share=share,
                weights_bytes=weights_bytes,
            )
        except HarnessError as error:  # such as pointers of Git LFS, which are not the weights
            doubt = error.what
    try:
        parts = _count_parameters(text)
    except _UnknownError:
        if weights_bytes is None:
            raise
        doubts = [f"{doubt}: all bytes of the files count"]
        return ModelSize(name=name, weights_bytes=weights_bytes, read_bytes=weights_bytes, doubts=doubts)
    per_param, bits = _bytes_per_param(quantization)
    doubts = [f"{doubt}: parameters are counted by its config.json"]
    if quantization.get("bits") is not None and _bits(quantization) is None:
        doubts.append(f"bits is {quantization['bits']!r:.50} in its config.json: 4 are assumed")
    full = ("embedding", "head", "body") if bits == 4 else ("embedding", "head")  # MXFP4 is for experts only
    sizes = {part: (params * (2.0 if part in full else per_param), params) for part, params in parts.items()}
    return sum_parts(name, sizes, routed_share=share, number_bits=bits, doubts=doubts)


def _routed_share(text: dict[str, Any]) -> float | None:
    """Return the share of the routed experts that one token uses; None where config.json does not tell."""
    used = next((text[key] for key in _USED_EXPERTS if key in text), None)
    known = next((text[key] for key in _EXPERTS if text.get(key) is not None), None)
    if type(used) is not int or type(known) is not int or not 1 <= used <= known:
        return None
    return used / known


def _bytes_per_param(quantization: dict[str, Any]) -> tuple[float, int]:
    """Return bytes of a parameter in the layers, and the width in which it is multiplied."""
    described = json.dumps(quantization).lower()[:100_000]
    method = str(quantization.get("quant_method", "")).lower()
    if not quantization:
        return BYTES_PER_PARAM["FP16"], 16
    if method == "mxfp4":
        return BYTES_PER_PARAM["MXFP4"], 4
    if method in ("fp8", "fbgemm_fp8") or '"num_bits": 8' in described or quantization.get("load_in_8bit"):
        return BYTES_PER_PARAM["FP8"], 8
    bits = _bits(quantization)
    return (bits / 8 * 1.1 if bits else BYTES_PER_PARAM["AWQ"]), 16


def _bits(quantization: dict[str, Any]) -> int | None:
    bits = quantization.get("bits")
    return bits if type(bits) is int and 1 <= bits <= 16 else None


def _count_parameters(text: dict[str, Any]) -> dict[str, float]:
    """Return the parameters of each part of a decoder with gated layers. Raises _UnknownError."""
    hidden, layers = _parse_positive(text, "hidden_size"), _parse_positive(text, "num_hidden_layers")
    vocabulary, heads = _parse_positive(text, "vocab_size"), _parse_positive(text, "num_attention_heads")
    if text.get("kv_lora_rank") is not None:
        rank, rope = _parse_positive(text, "kv_lora_rank"), _parse_positive(text, "qk_rope_head_dim")
        key, value = _parse_positive(text, "qk_nope_head_dim"), _parse_positive(text, "v_head_dim")
        query = _parse_optional(text, "q_lora_rank")
        queries = heads * (key + rope)
        attention = hidden * query + query * queries if query else hidden * queries
        attention += hidden * (rank + rope) + rank * heads * (key + value) + heads * value * hidden
    else:
        shape = parse_geometry(text | {"layer_types": None, "sliding_window": None})
        attention = hidden * shape.head_size * (2 * heads + 2 * shape.kv_heads)
    if (share := _routed_share(text)) is None:
        if any(text.get(key) for key in _EXPERTS):
            known = ", ".join(f"{key} is {text[key]!r:.50}" for key in (*_EXPERTS, *_USED_EXPERTS) if key in text)
            raise _UnknownError(f"{known}, which does not tell how many experts a token uses")
        dense = 3 * hidden * _parse_positive(text, "intermediate_size")
        parts: dict[str, float] = {"body": layers * (attention + dense), "routed": 0.0}
    else:
        inner = text.get("moe_intermediate_size") or text.get("intermediate_size")
        used = _parse_positive(text, "num_experts_per_tok")
        experts = round(used / share)
        if (first := _parse_optional(text, "first_k_dense_replace")) > layers:
            raise _UnknownError(f"first_k_dense_replace is {first}, of {layers} layers")
        each = 3 * hidden * _parse_positive({"moe_intermediate_size": inner}, "moe_intermediate_size")
        shared = each * _parse_optional(text, "n_shared_experts")
        dense = first * 3 * hidden * _parse_optional(text, "intermediate_size")
        sparse = layers - first
        parts = {
            "body": layers * attention + dense + sparse * (shared + hidden * experts),
            "routed": float(sparse * experts * each),
        }
    tied = text.get("tie_word_embeddings", False) is True
    return {**parts, "embedding": vocabulary * hidden, "head": 0 if tied else vocabulary * hidden}


_SLIDING_EVERY = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}  # of so many layers one keeps all tokens; in llama.cpp's code


def _read_gguf_model(path: Path, name: str | None) -> ModelShape:
    keys, tensors = read_gguf(path)
    kind = str(keys.get("general.architecture"))[:100]
    text = {key.removeprefix(f"{kind}."): value for key, value in keys.items() if key.startswith(f"{kind}.")}
    unknown: list[str] = []
    try:
        geometry = _gguf_geometry(kind, text)
    except _UnknownError as error:
        geometry = None
        unknown.append(f"the KV cache per token: {error}")
    experts, used, layers = text.get("expert_count"), text.get("expert_used_count"), text.get("block_count")
    known = type(experts) is int and type(used) is int and 1 <= used <= experts
    nextn = text.get("nextn_predict_layers")
    size = sum_tensors(
        name or path.name,
        tensors,
        layers=layers - (nextn if type(nextn) is int else 0) if type(layers) is int else None,
        routed_share=used / experts if known and used is not None and experts is not None else None,
    )
    return ModelShape(
        name=name or path.name,
        geometry=geometry,
        longest=_parse_longest(text, "context_length", unknown),
        kv_bytes=2,
        weights_bytes=int(size.weights_bytes),
        size=with_cache(size, geometry, 2, _gguf_attention_size(text, geometry)),
        unknown=unknown,
    )


def _gguf_attention_size(text: dict[str, Any], geometry: Geometry | None) -> float:
    heads = text.get("attention.head_count")
    if geometry is None or geometry.latent or not isinstance(heads, int) or not 1 <= heads <= MAX_SIZE:
        return 0
    return heads * geometry.head_size


def _gguf_geometry(kind: str, text: dict[str, Any]) -> Geometry:
    """Return the geometry of the keys of a GGUF file. Raises _UnknownError."""
    if unsupported := [key for key in text if key.startswith(("ssm.", "wkv.", "shortconv."))]:
        raise _UnknownError(f"layers of another form ({unsupported[0]})")
    layers, heads = _parse_positive(text, "block_count"), text.get("attention.head_count_kv")
    if isinstance(heads, list):
        if len(set(heads)) != 1:
            raise _UnknownError("the number of key heads differs between layers")
        heads = heads[0]
    if heads is None:
        heads = text.get("attention.head_count")
    if text.get("attention.kv_lora_rank") is not None and heads == 1:
        size = _parse_positive(text, "attention.key_length")
        return Geometry(full_layers=layers, kv_heads=1, head_size=size, latent=True)
    head_size = text.get("attention.key_length")
    if head_size is None:
        head_size = _parse_positive(text, "embedding_length") // _parse_positive(text, "attention.head_count")
    found = {"heads": heads, "size": head_size}
    window, sliding = text.get("attention.sliding_window"), 0
    if window:
        if kind not in _SLIDING_EVERY:
            raise _UnknownError(f"'{kind}' has a sliding window, and the file does not tell in which layers")
        sliding = layers - layers // _SLIDING_EVERY[kind]
    return Geometry(
        full_layers=layers - sliding,
        sliding_layers=sliding,
        window=_parse_positive(text, "attention.sliding_window") if sliding else None,
        kv_heads=_parse_positive(found, "heads"),
        head_size=_parse_positive(found, "size"),
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
    kv_heads, heads = _parse_positive(config, head_keys[0]), _parse_optional(config, "num_attention_heads")
    if 0 < heads < kv_heads:
        raise _UnknownError(f"{head_keys[0]} is {kv_heads}, of {heads} heads")
    return Geometry(
        full_layers=layers - sliding,
        sliding_layers=sliding,
        window=_parse_positive(config, "sliding_window") if sliding else None,
        kv_heads=kv_heads,
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
    if value is None:
        raise _UnknownError(f"{key} is missing")
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise _UnknownError(f"{key} is {value!r:.50}")
    return value


def _parse_optional(config: dict[str, Any], key: str) -> int:
    return _parse_positive(config, key) if config.get(key) else 0


def _parse_longest(config: dict[str, Any], key: str, unknown: list[str]) -> int | None:
    """Return the greatest length of a request; None, with the reason in `unknown`, if it is not known."""
    try:
        return _parse_optional(config, key) or None
    except _UnknownError as error:
        unknown.append(f"the greatest length of a request: {error}")
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(path, max_bytes=MAX_HEADER_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise HarnessError(f"{path}: cannot be read ({reason_of(error)})", next_step="Download it again.") from None
    if not isinstance(config, dict):
        raise HarnessError(f"{path}: is not the configuration of a model", next_step="Download it again.")
    return config


def measure_weights(folder: Path) -> int | None:
    """Return the bytes of the safetensors; None if they are not on this machine."""
    files = list_safetensors(folder, _read_index(folder))
    return sum(path.stat().st_size for path in files) if files else None


def _read_index(folder: Path) -> dict[str, Any] | None:
    index = folder / "model.safetensors.index.json"
    return _read_json(index) if index.is_file() else None


GPU_BLOCK = 16  # vLLM's default on a GPU
DTYPE_BYTES = {"auto": None, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def require_known_dtype(name: str) -> None:
    """Raise HarnessError for an unknown data type."""
    if name not in DTYPE_BYTES:
        raise HarnessError(
            f"--kv-cache-dtype: '{name[:100]}' is not known here; {did_you_mean(name, DTYPE_BYTES)}",
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
