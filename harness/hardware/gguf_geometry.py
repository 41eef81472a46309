"""The KV cache of a model, layer by layer, from the header of its GGUF file: its keys, and the names of its tensors.

Source: llama.cpp (src/models, src/llama-hparams.cpp). Keys are without the name of the architecture.
"""

import re
from collections.abc import Iterable
from typing import Any, Literal

from harness.hardware.geometry import (
    MAX_SIZE,
    AttentionSize,
    Geometry,
    LayerCache,
    UnknownShapeError,
    parse_layers,
    parse_optional,
    parse_positive,
    sum_layers,
)

# Of so many layers one keeps all tokens: the last one, or the first (True). In llama.cpp's code; the file may have
# another number, or a list. 1: all layers keep all tokens, whatever the file's window is.
_SLIDING_PERIOD = {
    "gemma2": (2, False), "gemma3": (6, False), "gemma3n": (5, False), "gpt-oss": (2, False), "cohere2": (4, False),
    "exaone4": (4, False), "exaone-moe": (4, False), "olmo2": (4, False), "afmoe": (4, False), "plamo3": (8, False),
    "llama4": (4, False), "laguna": (4, True), "smallthinker": (4, True), "phi3": (1, False),
}  # fmt: skip
_GGUF_WINDOW = {"llama4": 8192}  # where the file has none
_GGUF_KV_LAYERS = {"gemma3n": 20}  # the later ones share; where the file does not tell
_NO_ATTENTION = {"mamba", "mamba2", "rwkv6", "rwkv7"}
_GGUF_INTERVAL = {"qwen3next": 4}
_GGUF_STATE_KEYS = re.compile(
    r"ssm\.|wkv\.|shortconv\.|kda\.|layer_group_size$|.*(?:linear_att|attn_type|attention_type|layer_types?$|recurrent)"
)
_GGUF_RECURRENT = re.compile(r"^blk\.(\d+)\.(?:ssm_|shortconv|time_mix)")
_GGUF_ATTENTION = re.compile(r"^blk\.(\d+)\.attn_(?:k|kv|v)\.")
_GGUF_LATENT = re.compile(r"^blk\.(\d+)\.attn_(?:kv_a_mqa|kv_b|k_b)\.")


def parse_gguf_geometry(kind: str, text: dict[str, Any], names: Iterable[str]) -> Geometry:
    """Return the geometry by the keys of a GGUF file and the names of its tensors. Raises UnknownShapeError."""
    for key in text:
        if key.startswith(("attention.compress_ratio", "attention.indexer.")):
            raise UnknownShapeError(f"a cache of another form ({key}): a token reads a part of it that is not known")
    layers = parse_layers(text, "block_count") - parse_optional(text, "nextn_predict_layers")
    if layers < 1:
        raise UnknownShapeError(f"nextn_predict_layers is {text['nextn_predict_layers']}")
    has_heads = "attention.head_count" in text or kind not in _NO_ATTENTION
    queries = _per_layer(text, "attention.head_count", layers) if has_heads else [0] * layers
    heads = _per_layer(text, "attention.head_count_kv", layers) if "attention.head_count_kv" in text else queries
    if any(0 < few < many for few, many in zip(queries, heads, strict=True)):
        raise UnknownShapeError("it has more key heads than heads")
    states = _gguf_states(kind, text, layers, heads, list(names))
    sliding, window = _gguf_sliding(kind, text, layers)
    latent = text.get("attention.kv_lora_rank") is not None and (
        text.get("attention.key_length_mla") is not None or max(heads) == 1
    )
    stored = layers - parse_optional(text, "attention.shared_kv_layers")
    if kind in _GGUF_KV_LAYERS and "attention.shared_kv_layers" not in text:
        stored = min(layers, _GGUF_KV_LAYERS[kind])
    sizes = (
        {slides: _gguf_sizes(text, queries, slides=slides, latent=latent) for slides in set(sliding)}
        if any(heads)
        else {}
    )
    caches = []
    for number in range(layers):
        slides, state = sliding[number], states[number]
        if not heads[number] or state == "state":
            caches.append(LayerCache("state" if state is not None else "none"))
            continue
        key_size, value_size, width = sizes[slides]
        size = AttentionSize(1 if latent else heads[number], key_size, value_size, width * queries[number])
        caches.append(LayerCache("sliding" if slides else state or "full", size, number >= stored))
    return sum_layers(caches, window, _gguf_state_numbers(text, queries), latent=latent)


def _per_layer(text: dict[str, Any], key: str, layers: int) -> list[int]:
    value = text.get(key)
    if value is None:
        raise UnknownShapeError(f"{key} is missing")
    values = value[:layers] if isinstance(value, list) else [value] * layers
    if len(values) < layers:
        raise UnknownShapeError(f"{key} has {len(values)} values for {layers} layers")
    if any(type(number) is not int or not 0 <= number <= MAX_SIZE for number in values):
        raise UnknownShapeError(f"{key} is {value!r:.50}")
    return values


def _gguf_sizes(text: dict[str, Any], queries: list[int], *, slides: bool, latent: bool) -> tuple[int, int, float]:
    """Return the sizes of key and value, and their mean in attention, of the layers that slide or of the others."""
    key = parse_optional(text, "attention.key_length") or (
        parse_positive(text, "embedding_length") // max(1, max(queries))
    )
    value = parse_optional(text, "attention.value_length") or key
    if latent:
        own = [parse_optional(text, f"attention.{name}_length_mla") for name in ("key", "value")]
        return key, 0, sum(own) / 2 if all(own) else 0
    if slides:
        key = parse_optional(text, "attention.key_length_swa") or key
        value = parse_optional(text, "attention.value_length_swa") or value
    return key, value, (key + value) / 2


def _gguf_states(
    kind: str, text: dict[str, Any], layers: int, heads: list[int], names: list[str]
) -> list[Literal["state", "both"] | None]:
    """Return for each layer whether it is recurrent, alone or next to its attention."""
    keys = [key for key in text if _GGUF_STATE_KEYS.match(key)]
    if not keys:
        return [None] * layers
    recurrent, attention = (
        {int(match[1]) for match in map(pattern.match, names) if match is not None and len(match[1]) < 9}
        for pattern in (_GGUF_RECURRENT, _GGUF_LATENT if "attention.kv_lora_rank" in text else _GGUF_ATTENTION)
    )
    interval = parse_optional(text, "full_attention_interval") or _GGUF_INTERVAL.get(kind)
    if interval is not None:
        return [None if (number + 1) % interval == 0 else "state" for number in range(layers)]
    if recurrent:
        return [
            None if number not in recurrent else "both" if heads[number] and number in attention else "state"
            for number in range(layers)
        ]
    if kind == "falcon-h1":
        return ["both"] * layers
    if 0 in heads:  # their other layers without heads are no attention either
        return [None if heads[number] else "state" for number in range(layers)]
    raise UnknownShapeError(f"layers of another form ({keys[0]}), and the file does not tell which")


def _gguf_state_numbers(text: dict[str, Any], queries: list[int]) -> int | None:
    """Return the numbers of the recurrent state of a layer; None where the file does not tell."""
    try:
        width = parse_positive(text, "embedding_length")
        if text.get("wkv.head_size") is not None:
            return width * (parse_positive(text, "wkv.head_size") + (parse_optional(text, "token_shift_count") or 2))
        if text.get("shortconv.l_cache") is not None:
            return width * (parse_positive(text, "shortconv.l_cache") - 1)
        conv = parse_positive(text, "ssm.conv_kernel") - 1
        if text.get("kda.head_dim") is not None:
            size = parse_positive(text, "kda.head_dim")
            return max(queries) * size * (size + 3 * conv)
        inner, state = parse_positive(text, "ssm.inner_size"), parse_positive(text, "ssm.state_size")
        return inner * state + conv * (inner + 2 * parse_optional(text, "ssm.group_count") * state)
    except UnknownShapeError:
        return None


def _gguf_sliding(kind: str, text: dict[str, Any], layers: int) -> tuple[list[bool], int | None]:
    """Return for each layer whether it keeps a window only, and the window."""
    window = parse_optional(text, "attention.sliding_window") or _GGUF_WINDOW.get(kind)
    pattern = text.get("attention.sliding_window_pattern")
    if window is None or (kind in _GGUF_WINDOW and text.get("attention.sliding_window") == 0):
        return [False] * layers, None
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise UnknownShapeError(f"sliding_window_pattern has {len(pattern)} values for {layers} layers")
        return [bool(flag) for flag in pattern[:layers]], window
    if kind not in _SLIDING_PERIOD and type(pattern) is not int:
        raise UnknownShapeError(
            f"'{kind}' has a sliding window, its file has no sliding_window_pattern, and its layers are not known here"
        )
    period, first = _SLIDING_PERIOD.get(kind, (1, False))
    if type(pattern) is int and pattern > 0:
        period = pattern
    full = 0 if first else period - 1
    return [number % period != full for number in range(layers)], window
