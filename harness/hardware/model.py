"""A model by its files: the sizes of its weights and of its KV cache, and what a token reads of them.

Source of the KV cache: vllm/v1/core/kv_cache_utils.py. A block holds `block` tokens of a group of layers. Layers that
keep all tokens and layers with a sliding window are put into groups of equal size, which share one pool of blocks.
"""

import json
import os
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from harness.base.errors import HarnessError, did_you_mean, reason_of
from harness.base.files import read_text
from harness.hardware.geometry import (
    Geometry,
    UnknownShapeError,
    list_kinds,
    parse_geometry,
    parse_linear,
    parse_optional,
    parse_positive,
    with_defaults,
)
from harness.hardware.gguf_geometry import parse_gguf_geometry
from harness.hardware.weights import (
    BYTES_PER_PARAM,
    MAX_HEADER_BYTES,
    list_safetensors,
    read_gguf,
    read_safetensors,
    sum_parts,
    sum_tensors,
)
from harness.records.manifest import ModelSize

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_GATED_ATTENTION = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}  # a gate as wide as the queries


class ModelShape(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model on this machine, from its files."""

    name: str
    is_gguf: bool = False  # for llama.cpp, whose cache has no blocks
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
        next_step="Give the model's folder, a GGUF file, or a size such as 14B; nothing is downloaded here.",
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
    text = _text_config(config)
    unknown: list[str] = []
    try:
        geometry = parse_geometry(text, encoder_decoder=bool(config.get("is_encoder_decoder")))
    except UnknownShapeError as error:
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
    except UnknownShapeError as error:
        unsized = f"neither its files nor its config.json tell the size of its weights: {error}"
    return ModelShape(
        name=name or path.name,
        geometry=geometry,
        longest=_parse_longest(text, "max_position_embeddings", unknown),
        kv_bytes=kv_bytes,
        weights_bytes=None if size is None or size.weights_bytes != weights_bytes else weights_bytes,
        size=None if size is None else with_cache(size, geometry, kv_bytes or 2),
        unsized=unsized,
        unknown=unknown,
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the model of text."""
    configs = (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict))
    nested: dict[str, Any] | None = next(configs, None)
    if nested is None:
        return config
    shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return shared | nested


def with_cache(size: ModelSize, geometry: Geometry | None, number_bytes: int) -> ModelSize | None:
    """Return the size with the KV cache that a token reads; None for a model without weights."""
    if size.read_bytes <= 0:
        return None
    if geometry is None:
        return size
    return structs.replace(
        size,
        kv_token_bytes=geometry.full_numbers() * number_bytes,
        sliding_token_bytes=geometry.sliding_numbers() * number_bytes,
        window=geometry.window,
        attention_width=geometry.attention_width,
        sliding_attention_width=geometry.sliding_attention_width,
    )


def _folder_size(
    name: str, folder: Path, text: dict[str, Any], quantization: dict[str, Any], weights_bytes: int | None
) -> ModelSize | None:
    """Return what a token reads, by the headers of the files; without files by the configuration.

    Raises UnknownShapeError where neither has it.
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
    except UnknownShapeError:
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
    experts = next((text[key] for key in _EXPERTS if text.get(key) is not None), None)
    if type(used) is not int or type(experts) is not int or not 1 <= used <= experts:
        return None
    return used / experts


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
    """Return the parameters of each part of a decoder with gated layers. Raises UnknownShapeError."""
    text = with_defaults(text)
    hidden, vocabulary = parse_positive(text, "hidden_size"), parse_positive(text, "vocab_size")
    layers = parse_positive(text, "num_hidden_layers")
    if text.get("altup_num_inputs") is not None:
        raise UnknownShapeError("its layers have more parts than are counted here (altup_num_inputs)")
    per_layer = parse_optional(text, "hidden_size_per_layer_input")
    parts = _count_mlp(text, hidden, layers)
    # The rows of a table for each layer, and what puts them into it.
    parts["body"] += _count_mixers(text, hidden) + 3 * layers * hidden * per_layer
    tied = text.get("tie_word_embeddings", text.get("tie_embedding", False)) is True
    return {
        **parts,
        "embedding": vocabulary * hidden,
        "head": 0 if tied else vocabulary * hidden,
        "lookup": (parse_optional(text, "vocab_size_per_layer_input") or vocabulary) * layers * per_layer,
    }


def _count_mixers(text: dict[str, Any], hidden: int) -> float:
    """Return the parameters of attention and of recurrent layers. Raises UnknownShapeError."""
    kinds = list_kinds(text)
    if "none" in kinds:
        raise UnknownShapeError("its layers are attention or experts, and only files tell their sizes")
    recurrent = sum(kind in ("state", "both") for kind in kinds)
    params = recurrent * parse_linear(text).params if recurrent else 0.0
    attending = len(kinds) - kinds.count("state")
    if not attending:
        return params
    heads = parse_positive(text, "num_attention_heads")
    if text.get("kv_lora_rank") is not None:
        rank, rope = parse_positive(text, "kv_lora_rank"), parse_positive(text, "qk_rope_head_dim")
        key, value = parse_positive(text, "qk_nope_head_dim"), parse_positive(text, "v_head_dim")
        query = parse_optional(text, "q_lora_rank")
        queries = heads * (key + rope)
        attention = hidden * query + query * queries if query else hidden * queries
        attention += hidden * (rank + rope) + rank * heads * (key + value) + heads * value * hidden
        return params + attending * attention
    shape = parse_geometry(text)
    width = shape.attention_width + shape.sliding_attention_width
    gates = int(text.get("attn_output_gate", str(text.get("model_type")) in _GATED_ATTENTION) is True)
    return params + hidden * ((2 + gates) * width + shape.full_numbers() + shape.sliding_numbers())


def _count_mlp(text: dict[str, Any], hidden: int, layers: int) -> dict[str, float]:
    """Return the parameters of what follows attention in each layer. Raises UnknownShapeError."""
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size")
    if (share := _routed_share(text)) is None:
        if any(text.get(key) for key in _EXPERTS):
            fields = ", ".join(f"{key} is {text[key]!r:.50}" for key in (*_EXPERTS, *_USED_EXPERTS) if key in text)
            raise UnknownShapeError(f"{fields}, which does not tell how many experts a token uses")
        return {"body": layers * 3 * hidden * _dense_size(text), "routed": 0.0}
    used = next(parse_positive(text, key) for key in _USED_EXPERTS if key in text)
    experts = round(used / share)
    first = parse_optional(text, "first_k_dense_replace") or parse_optional(text, "num_dense_layers")
    if first > layers:
        raise UnknownShapeError(f"first_k_dense_replace is {first}, of {layers} layers")
    if text.get("expert_layer_period") is not None:
        period, offset = parse_positive(text, "expert_layer_period"), parse_optional(text, "expert_layer_offset")
        first = sum(number % period != offset for number in range(layers))
    expert_params = 3 * hidden * parse_positive({"moe_intermediate_size": inner}, "moe_intermediate_size")
    shared = expert_params * (parse_optional(text, "n_shared_experts") or parse_optional(text, "num_shared_experts"))
    for key in ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"):
        if text.get(key):
            shared = 3 * hidden * parse_positive(text, key)
    sparse = layers - first
    dense = first * 3 * hidden * parse_positive(text, "intermediate_size") if first else 0
    return {"body": dense + sparse * (shared + hidden * experts), "routed": float(sparse * experts * expert_params)}


def _dense_size(text: dict[str, Any]) -> float:
    """Return the inner size of a dense layer."""
    if text.get("shared_intermediate_size"):  # Granite 4 without experts
        return parse_positive(text, "shared_intermediate_size")
    if text.get("model_type") == "recurrent_gemma":
        return parse_positive(text, "intermediate_size") / 2  # of gate and value together
    if text.get("block_ff_dim") and text.get("block_auto_adjust_ff_dim") is True:
        size, unit = 2 * parse_positive(text, "block_ff_dim") // 3, parse_positive(text, "block_multiple_of")
        return -(-size // unit) * unit
    return parse_positive(text, "intermediate_size")


def _read_gguf_model(path: Path, name: str | None) -> ModelShape:
    keys, tensors = read_gguf(path)
    kind = str(keys.get("general.architecture"))[:100]
    form = str(keys.get("general.type", "mmproj" if kind == "clip" else "model"))[:100]
    if form != "model":  # a projector of images, an adapter
        raise HarnessError(f"{path}: it is no model, but of type '{form}'", next_step="Give the file of the model.")
    text = {key.removeprefix(f"{kind}."): value for key, value in keys.items() if key.startswith(f"{kind}.")}
    unknown: list[str] = []
    try:
        geometry = parse_gguf_geometry(kind, text, [tensor.name for tensor in tensors])
    except UnknownShapeError as error:
        geometry = None
        unknown.append(f"the KV cache per token: {error}")
    experts, used, layers = text.get("expert_count"), text.get("expert_used_count"), text.get("block_count")
    has_experts = type(experts) is int and type(used) is int and 1 <= used <= experts
    nextn = text.get("nextn_predict_layers")
    own = layers - (nextn if type(nextn) is int else 0) if type(layers) is int else 0
    size = sum_tensors(
        name or path.name,
        tensors,
        layers=own if own > 0 else None,  # a damaged number leaves no layer out
        routed_share=used / experts if has_experts and used is not None and experts is not None else None,
    )
    return ModelShape(
        name=name or path.name,
        is_gguf=True,
        geometry=geometry,
        longest=_parse_longest(text, "context_length", unknown),
        kv_bytes=2,
        weights_bytes=int(size.weights_bytes),
        size=with_cache(size, geometry, 2),
        unknown=unknown,
    )


def _parse_longest(config: dict[str, Any], key: str, unknown: list[str]) -> int | None:
    """Return the greatest length of a request; None, with the reason in `unknown`, if it is not known."""
    try:
        return parse_optional(config, key) or None
    except UnknownShapeError as error:
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
    unit_bytes: int  # in which memory is given to requests
    full_bytes: int  # of a block, in all layers that keep every token
    sliding_bytes: int = 0  # likewise in layers with a window
    state_bytes: int = 0  # of a request
    window: int | None = None
    in_flight: int = 0  # computed tokens of a sliding window that are not freed yet

    def request_bytes(self, length: int) -> int:
        """Return the bytes of a request of `length` tokens."""
        size = self.full_bytes * _divide_rounding_up(length, self.block) + self.state_bytes
        if self.sliding_bytes and self.window is not None:
            kept = min(self.window - 1 + self.in_flight, length)
            size += self.sliding_bytes * (_divide_rounding_up(kept, self.block) + 1)  # it may start within a block
        return size

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token of a request, once it is longer than its window."""
        return self.full_bytes // self.block

    @property
    def window_bytes(self) -> int:
        """The most bytes of one request in layers with a window."""
        return 0 if self.window is None else self.sliding_bytes * self.window // self.block


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
    geometry: Geometry,
    number_bytes: int,
    *,
    tensor_parallel: int = 1,
    block: int = GPU_BLOCK,
    in_flight: int = 0,
    grouped: bool = True,
) -> Layout:
    """Return the cache on each of `tensor_parallel` GPUs: they share the key heads, but each has at least one.

    `grouped`: as vLLM does for layers of one size; what it does to others is an estimate.
    """
    full_bytes, sliding_bytes = (
        numbers(tensor_parallel) * number_bytes * block for numbers in (geometry.full_numbers, geometry.sliding_numbers)
    )
    state_bytes = _divide_rounding_up(geometry.state_bytes or 0, tensor_parallel)
    sizes = {(group.kv_heads, group.key_size, group.value_size) for group in (*geometry.full, *geometry.sliding)}
    if not grouped or len(sizes) != 1 or geometry.state_layers:
        return Layout(
            block=block,
            unit_bytes=full_bytes or sliding_bytes or max(1, state_bytes),
            full_bytes=full_bytes,
            sliding_bytes=sliding_bytes,
            state_bytes=state_bytes,
            window=geometry.window,
            in_flight=in_flight,
        )
    full, sliding = (sum(group.layers for group in some) for some in (geometry.full, geometry.sliding))
    page = (full_bytes + sliding_bytes) // (full + sliding)
    if not full or not sliding:
        size = full or sliding
    else:
        # Groups have the size of the smaller kind; if both are about equal, of the larger one, with padding.
        size = max(full, sliding) if max(full, sliding) < min(full, sliding) * 1.5 else min(full, sliding)
    return Layout(
        block=block,
        unit_bytes=size * page,
        full_bytes=_divide_rounding_up(full, size) * size * page,
        sliding_bytes=_divide_rounding_up(sliding, size) * size * page,
        window=geometry.window,
        in_flight=in_flight,
    )


def compute_capacity(layout: Layout, available: int, length: int) -> Capacity:
    """Return the capacity of `available` bytes at a max_model_len of `length` tokens."""
    units = max(0, available) // layout.unit_bytes
    concurrency = units * layout.unit_bytes / max(1, layout.request_bytes(length))
    usable = available - layout.unit_bytes  # vLLM reserves one block
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
