"""The KV cache of a model, layer by layer, from its config.json. `gguf_geometry` has the same for GGUF files.

A layer keeps all tokens, those of a window, or none: it has a recurrent state, uses the cache of an earlier layer, or
is no attention. What a file does not tell is an error with the reason. Source: the classes of configurations in
Transformers, with layer types and defaults.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

MAX_SIZE = 1 << 30  # of a number in a configuration: layers, heads, tokens
MAX_LAYERS = 10_000
STATE_NUMBER_BYTES = 4  # engines keep a recurrent state in 32 bit, or in 16

# Their default head size is hidden_size / heads. Other architectures have defaults in their code.
_DERIVED_HEAD_SIZE = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "phimoe", "olmo", "olmo2", "olmo3", "olmo_hybrid",
    "starcoder2", "granite", "granitemoe", "granitemoehybrid", "internlm2", "internlm3", "stablelm", "cohere",
    "cohere2", "opt", "gpt_neox", "lfm2", "lfm2_moe", "jamba", "bamba", "falcon_h1", "recurrent_gemma", "smollm3",
    "bailing_moe_linear", "minimax_m1", "minimax_text_01", "minimax", "exaone4", "exaone_moe", "olmoe", "flex_olmo",
    "ernie4_5_moe", "apertus", "nemotron-nas", "deci", "granite_swa", "granitemoe_swa", "granitemoeshared", "bitnet",
    "phi",
}  # fmt: skip
# Their default number of key heads is that of the query heads. Other architectures have defaults in their code.
_EQUAL_HEADS = {
    "llama", "phi3", "granite", "cohere", "olmo", "olmo2", "internlm2", "opt", "gpt_neox", "recurrent_gemma",
    "granitemoehybrid", "olmo_hybrid", "zamba2",
}  # fmt: skip
# Engines keep one latent vector per token and layer (multi-head latent attention), and nothing else.
_LATENT_ATTENTION = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "kimi_linear", "mistral4"}
# What the code of an architecture adds to a config.json that lacks it.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6, "tie_word_embeddings": True,
    },
    "gemma3n_text": {
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
        "sliding_window_pattern": 5, "num_kv_shared_layers": 15, "tie_word_embeddings": True,
    },
    "gemma4_text": {
        "head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "gemma4_unified_text": {
        "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024, "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "recurrent_gemma": {"attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"],
                        "tie_word_embeddings": True},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
}  # fmt: skip
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size")
_EVERY_LAYER_SLIDES = {"mistral", "mixtral", "phi3", "starcoder2"}
_EVERY_LAYER_BOTH = {"falcon_h1"}  # attention and a recurrent state side by side
_NO_ATTENTION = {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7"}
_FULL_INTERVAL = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}  # where config.json has no other

Kind = Literal["full", "sliding", "state", "both", "none"]
_KINDS: dict[str, Kind] = {
    "full_attention": "full", "attention": "full", "full": "full", "global": "full", "global_attention": "full",
    "sliding_attention": "sliding", "chunked_attention": "sliding", "local_attention": "sliding", "local": "sliding",
    "sliding_window": "sliding", "linear_attention": "state", "mamba": "state", "mamba2": "state", "conv": "state",
    "short_conv": "state", "recurrent": "state", "kda": "state", "gated_deltanet": "state", "linear": "state",
    "hybrid": "both", "moe": "none", "mlp": "none",
}  # fmt: skip
_LETTERS: dict[str, Kind] = {"M": "state", "*": "full", "-": "none", "E": "none"}  # of hybrid_override_pattern
# Keys of layers that are no usual attention: another key must tell which layers they are.
_OTHER_LAYERS = re.compile(
    r"^(?!mlp_|moe_|rope)(?:.*mamba|.*ssm_|.*linear_attn|.*linear_attention|linear_(?:num|key|value)|.*lightning|.*delta"
    r"|.*recurrent|.*rwkv|conv_l|.*state_size|time_step|.*attn_type|.*attention_type|.*layer_type|.*layers_type"
    r"|.*block_type|.*hybrid|.*attn_layer|.*attention_layer|.*attn_interval|.*attention_interval|.*layer_group_size"
    r"|.*attn_idx|.*chunk_size$|.*local_attention|.*global_attn|lru_width)",
    re.IGNORECASE,
)
# Keys of a cache whose form, or the part of it that a token reads, is not known here.
_OTHER_CACHE = re.compile(
    r"^(?:compress_rat|index_topk|cross_attention_layers$|.*yoco|mb_per_layer$|.*share_kv|.*shared_kv"
    r"|.*kv_shar|sparse_attention|.*_cla$|cla_|cca_|cca$|.*local_layer_ids$)",
    re.IGNORECASE,
)
_KNOWN_SHARING = {"num_kv_shared_layers", "use_cla", "cla_share_factor"}


class LayerGroup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers whose KV cache has the same size."""

    layers: int
    kv_heads: int  # of all GPUs; 1 for a latent, of which every GPU has a copy
    key_size: int  # numbers of a key of one head, or of a latent
    value_size: int  # likewise; 0 for a latent, which is key and value

    def token_numbers(self, gpus: int = 1) -> int:
        """Return the numbers that a token adds on each GPU: they share the heads, but each has at least one."""
        return self.layers * max(1, self.kv_heads // gpus) * (self.key_size + self.value_size)


class Geometry(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape that determines the size of a KV cache."""

    full: tuple[LayerGroup, ...] = ()  # layers that keep every token
    sliding: tuple[LayerGroup, ...] = ()  # layers that keep the last `window` tokens
    window: int | None = None
    latent: bool = False  # one vector instead of key and value
    state_layers: int = 0  # with a recurrent state of constant size
    state_bytes: int | None = None  # of all of them, for one request
    attention_width: float = 0  # layers that keep all tokens x query heads x head size; 0: not known
    sliding_attention_width: float = 0

    def full_numbers(self, gpus: int = 1) -> int:
        """Return the numbers of one token on each GPU, in layers that keep all."""
        return sum(group.token_numbers(gpus) for group in self.full)

    def sliding_numbers(self, gpus: int = 1) -> int:
        return sum(group.token_numbers(gpus) for group in self.sliding)


class UnknownShapeError(Exception):
    """Why the shape of a model is unknown."""


class AttentionSize(NamedTuple):
    """The sizes of the attention of one layer."""

    kv_heads: int
    key_size: int
    value_size: int
    queries: float  # query heads x the mean size of key and value


class LayerCache(NamedTuple):
    kind: Kind
    attention: AttentionSize | None = None  # None: it has none
    shares: bool = False  # uses the cache of an earlier layer


def sum_layers(
    layers: Sequence[LayerCache], window: int | None, state: int | None, *, latent: bool = False
) -> Geometry:
    """Return the cache of all layers. `state`: numbers of the recurrent state of one layer; None: not known."""
    kept = {"full": Counter[AttentionSize](), "sliding": Counter[AttentionSize]()}
    widths = {"full": 0.0, "sliding": 0.0}
    for layer in layers:
        if layer.attention is None:
            continue
        name = "sliding" if layer.kind == "sliding" else "full"
        widths[name] += layer.attention.queries
        if not layer.shares:
            kept[name][layer.attention._replace(queries=0)] += 1
    states = sum(layer.kind in ("state", "both") for layer in layers)
    groups = {
        name: tuple(
            LayerGroup(layers=times, kv_heads=size.kv_heads, key_size=size.key_size, value_size=size.value_size)
            for size, times in counted.items()
        )
        for name, counted in kept.items()
    }
    return Geometry(
        full=groups["full"],
        sliding=groups["sliding"],
        window=window if groups["sliding"] else None,
        latent=latent,
        state_layers=states,
        state_bytes=None if state is None or not states else STATE_NUMBER_BYTES * state * states,
        attention_width=widths["full"],
        sliding_attention_width=widths["sliding"],
    )


def parse_geometry(config: dict[str, Any], *, encoder_decoder: bool = False) -> Geometry:
    """Return the geometry of the text part of a config.json. Raises UnknownShapeError with the reason."""
    if encoder_decoder or config.get("is_encoder_decoder"):
        raise UnknownShapeError("an encoder-decoder model")
    config = _with_heads_of_layers(with_defaults(config))
    if other := [key for key in config if _OTHER_CACHE.match(key) and key not in _KNOWN_SHARING and config[key]]:
        raise UnknownShapeError(f"a cache of another form ({other[0]} in config.json)")
    kinds = list_kinds(config)
    shared = _list_shared(config, kinds)
    used = {kind for kind in kinds if kind in ("full", "sliding", "both")}
    sizes = {kind: _parse_attention(config, kind, len(kinds)) for kind in used}
    layers = []
    for number, kind in enumerate(kinds):
        attention = sizes[kind][number] if kind in used else None
        has_none = attention is not None and not attention.kv_heads
        layers.append(LayerCache("none") if has_none else LayerCache(kind, attention, number in shared))
    window = _parse_window(config) if "sliding" in used else None
    latent = config.get("kv_lora_rank") is not None
    state = _state_numbers(config) if {"state", "both"} & set(kinds) else 0
    return sum_layers(layers, window, state, latent=latent and bool(used))


def _with_heads_of_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the key heads of each layer, of one whose layers were chosen by a search."""
    blocks = config.get("block_configs")
    if isinstance(per_layer := config.get("num_kv_heads"), list):  # OpenELM
        return config | {
            "num_hidden_layers": config.get("num_transformer_layers", config.get("num_hidden_layers")),
            "num_key_value_heads": per_layer,
        }
    if isinstance(per_layer := config.get("num_key_value_heads_per_layer"), list):
        return config | {"num_key_value_heads": per_layer}
    if not isinstance(blocks, list) or not blocks:
        return config
    heads = parse_positive(config, "num_attention_heads")
    kv_heads = []
    for block in blocks[:MAX_LAYERS]:
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise UnknownShapeError("a layer of block_configs has no attention")
        skipped = attention.get("no_op") or attention.get("replace_with_linear")
        kv_heads.append(0 if skipped else heads // parse_positive(attention, "n_heads_in_group"))
    return config | {"num_key_value_heads": kv_heads}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with what the code of its architecture adds."""
    given = {key: value for key, value in config.items() if value is not None}
    return config | _DEFAULTS.get(str(config.get("model_type")), {}) | given


def _parse_window(config: dict[str, Any]) -> int:
    key = next((key for key in _WINDOWS if config.get(key)), _WINDOWS[0])
    return parse_positive(config, key)


def _list_shared(config: dict[str, Any], kinds: list[Kind]) -> set[int]:
    """Return the layers that use the cache of an earlier one."""
    layers = len(kinds)
    if config.get("use_cla"):
        factor = parse_positive(config, "cla_share_factor")
        return {number for number in range(layers) if number % factor}
    last = parse_optional(config, "num_kv_shared_layers")
    if last >= layers > 0 and last:
        raise UnknownShapeError(f"num_kv_shared_layers is {last}, of {layers} layers")
    return set(range(layers - last, layers))


def list_kinds(config: dict[str, Any]) -> list[Kind]:
    """Return what each layer keeps of a text. Raises UnknownShapeError where config.json does not tell."""
    model_type = str(config.get("model_type"))
    kinds = _listed_kinds(config)
    if kinds is None:
        layers = parse_layers(config, "num_hidden_layers")
        kinds = _kinds_by_rule(config, model_type, layers)
        if kinds is None and model_type in _EVERY_LAYER_BOTH:
            kinds = ["both"] * layers
        if kinds is None and model_type in _NO_ATTENTION:
            kinds = ["state"] * layers
        if kinds is None:
            kinds = _sliding_kinds(config, model_type, layers)
    elif config.get("num_hidden_layers") is not None and len(kinds) != parse_layers(config, "num_hidden_layers"):
        raise UnknownShapeError(f"{len(kinds)} layer_types for {config['num_hidden_layers']} layers")
    if model_type == "recurrent_gemma":
        kinds = ["sliding" if kind == "full" else kind for kind in kinds]
    return kinds


def _listed_kinds(config: dict[str, Any]) -> list[Kind] | None:
    """Return the kinds of a list with one entry a layer; None without such a list."""
    for key in ("layer_types", "layers_block_type", "layer_block_types", "block_types", "_block_types"):
        types = config.get(key)
        if isinstance(types, list) and types:
            if unknown := sorted({str(layer)[:50] for layer in types} - set(_KINDS)):
                raise UnknownShapeError(f"layers of the type {unknown[0]}")
            kinds = [_KINDS[layer] for layer in types]
            if "block_types" in key and key != "layer_block_types":  # repeated until all layers have one
                layers = parse_layers(config, "num_hidden_layers")
                kinds = (kinds * (layers // len(kinds) + 1))[:layers]
            return kinds
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        if unknown := sorted(set(pattern) - set(_LETTERS)):
            raise UnknownShapeError(f"layers of the type {unknown[0]} in hybrid_override_pattern")
        return [_LETTERS[letter] for letter in pattern[:MAX_LAYERS]]
    numbered: tuple[tuple[str, tuple[Kind, Kind]], ...] = (
        ("attn_type_list", ("state", "full")),
        ("hybrid_layer_pattern", ("full", "sliding")),
    )
    for key, names in numbered:
        numbers = config.get(key)
        if isinstance(numbers, list) and numbers:
            if any(number not in (0, 1) for number in numbers):
                raise UnknownShapeError(f"{key} has other values than 0 and 1")
            return [names[int(number)] for number in numbers]
    return None


# Keys with the numbers of the layers that keep all tokens.
_FULL_LAYERS = (
    "full_attn_idxs", "attn_layer_indices", "full_attention_layer_indices", "full_attn_layer_indices",
    "full_attention_layers", "full_attn_layers", "attention_layer_indices", "attn_layer_idx", "full_attention_idx",
)  # fmt: skip


def _kinds_by_rule(config: dict[str, Any], model_type: str, layers: int) -> list[Kind] | None:
    """Return the kinds by a key that tells which layers are full attention; None without such a key."""
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        layer_numbers = [number - 1 if type(number) is int else -1 for number in linear["full_attn_layers"]]
        return _kinds_by_numbers(layer_numbers, layers, "state")
    for key in _FULL_LAYERS:
        if isinstance(numbers := config.get(key), list):
            slides = config.get("sliding_window") and not any(_is_recurrent(key) for key in config)
            return _kinds_by_numbers(numbers, layers, "sliding" if slides else "state")
    for key in ("full_attention_interval", "full_attn_interval", "attention_interval"):
        if config.get(key) is not None:
            return _every(parse_positive(config, key), layers)
    if config.get("global_attn_every_n_layers") is not None and config.get("sliding_window"):
        return _every(parse_positive(config, "global_attn_every_n_layers"), layers, "sliding")
    if config.get("layer_group_size") is not None:
        group = parse_positive(config, "layer_group_size")
        rest = layers // group * group  # the layers after the last whole group are full, too
        return [("full" if number >= rest else kind) for number, kind in enumerate(_every(group, layers))]
    if config.get("attn_layer_period") is not None:
        period, offset = parse_positive(config, "attn_layer_period"), parse_optional(config, "attn_layer_offset")
        return ["full" if number % period == offset else "state" for number in range(layers)]
    return _every(_FULL_INTERVAL[model_type], layers) if model_type in _FULL_INTERVAL else None


def _is_recurrent(key: str) -> bool:
    return re.search(r"mamba|ssm|linear|conv|state|lightning|delta|recurrent", key, re.IGNORECASE) is not None


def _every(interval: int, layers: int, others: Kind = "state") -> list[Kind]:
    return ["full" if (number + 1) % interval == 0 else others for number in range(layers)]


def _kinds_by_numbers(numbers: list[Any], layers: int, others: Kind) -> list[Kind]:
    if any(type(number) is not int or not 0 <= number < layers for number in numbers):
        raise UnknownShapeError("the numbers of its attention layers are beyond its layers")
    return ["full" if number in set(numbers) else others for number in range(layers)]


def _sliding_kinds(config: dict[str, Any], model_type: str, layers: int) -> list[Kind]:
    if model_type == "llama4_text":
        rope = config.get("no_rope_layers") or [int((number + 1) % 4 != 0) for number in range(layers)]
        if not isinstance(rope, list) or len(rope) != layers:
            raise UnknownShapeError("no_rope_layers has another number of layers")
        return ["sliding" if uses_rope else "full" for uses_rope in rope]
    if other := [key for key in config if _OTHER_LAYERS.match(key) and config[key]]:
        raise UnknownShapeError(f"layers of another form ({other[0]} in config.json), and it does not say which")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"] * layers
    if model_type in _EVERY_LAYER_SLIDES:
        return ["sliding"] * layers
    if model_type == "gemma2":
        return ["full" if number % 2 else "sliding" for number in range(layers)]
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if type(pattern) is int and pattern > 0:
        return _every(pattern, layers, "sliding")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return ["full" if pattern[number % len(pattern)] == "G" else "sliding" for number in range(layers)]
    first = config.get("max_window_layers")
    if config.get("use_sliding_window") is True and type(first) is int and first >= 0:
        return ["sliding" if number >= first else "full" for number in range(layers)]
    raise UnknownShapeError("it has a sliding window, and config.json does not say in which layers (layer_types)")


def _parse_attention(config: dict[str, Any], kind: Kind, layers: int) -> list[AttentionSize]:
    """Return the sizes of the attention of a kind, for each number of a layer."""
    model_type = str(config.get("model_type"))
    if config.get("kv_lora_rank") is not None:
        return [_parse_latent(config, model_type)] * layers
    if isinstance(config.get("num_key_value_heads"), list):
        heads = config["num_key_value_heads"]
        if len(heads) != layers or any(type(count) is not int or not 0 <= count <= MAX_SIZE for count in heads):
            raise UnknownShapeError("num_key_value_heads has not one number for each layer")
        return [
            _parse_heads(config | {"num_key_value_heads": count}, model_type) if count else AttentionSize(0, 0, 0, 0)
            for count in heads
        ]
    if isinstance(own := config.get("per_layer_config"), dict):
        numbered = {key.lstrip("0") or "0": value for key, value in own.items() if isinstance(value, dict)}
        return [_parse_heads(config | numbered.get(str(number), {}), model_type) for number in range(layers)]
    return [_parse_heads(_kind_config(config, kind), model_type)] * layers


def _kind_config(config: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the configuration with the sizes of the attention of one kind of layers, where they differ."""
    other = config.get("attention_other_setting")
    if kind == "sliding":
        names = {"swa_num_key_value_heads": "num_key_value_heads", "swa_num_attention_heads": "num_attention_heads",
                 "swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim"}  # fmt: skip
        overrides = {own: config[key] for key, own in names.items() if config.get(key) is not None}
        if isinstance(other, dict):
            overrides |= {"num_attention_heads": other.get("num_attention_heads"), "head_dim": other.get("head_dim"),
                      "num_key_value_heads": other.get("num_attention_groups")}  # fmt: skip
        return config | overrides
    overrides = {}
    if config.get("global_head_dim") is not None:
        overrides["head_dim"] = config["global_head_dim"]
    # Only where keys are the values, too, are there fewer heads.
    if config.get("num_global_key_value_heads") is not None and config.get("attention_k_eq_v", True):
        overrides["num_key_value_heads"] = config["num_global_key_value_heads"]
    return config | overrides


def _parse_latent(config: dict[str, Any], model_type: str) -> AttentionSize:
    if model_type not in _LATENT_ATTENTION:
        raise UnknownShapeError(f"latent attention of '{model_type}', of which the cache's form is not known")
    size = parse_positive(config, "kv_lora_rank") + parse_positive(config, "qk_rope_head_dim")
    sizes = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    if any(config.get(key) is None for key in sizes):
        return AttentionSize(1, size, 0, 0)
    heads, key, value = (parse_positive(config, key) for key in sizes)
    return AttentionSize(1, size, 0, heads * (key + parse_positive(config, "qk_rope_head_dim") + value) / 2)


def _parse_heads(config: dict[str, Any], model_type: str) -> AttentionSize:
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_groups")
    head_keys = [key for key in names if config.get(key) is not None]
    if not head_keys and model_type in _EQUAL_HEADS:
        head_keys = ["num_attention_heads"]
    if not head_keys:
        raise UnknownShapeError("config.json has no num_key_value_heads")
    if config.get("head_dim") is not None:
        key_size = parse_positive(config, "head_dim")
    elif config.get("attention_head_dim") is not None:
        key_size = parse_positive(config, "attention_head_dim")
    elif model_type == "zamba2":  # its attention sees the layer's input and the embedding
        key_size = 2 * parse_positive(config, "hidden_size") // parse_positive(config, "num_attention_heads")
    elif model_type in _DERIVED_HEAD_SIZE:
        key_size = parse_positive(config, "hidden_size") // parse_positive(config, "num_attention_heads")
    else:
        raise UnknownShapeError("config.json has no head_dim")
    value_size = parse_optional(config, "v_head_dim") or key_size
    kv_heads, heads = parse_positive(config, head_keys[0]), parse_optional(config, "num_attention_heads")
    if 0 < heads < kv_heads:
        raise UnknownShapeError(f"{head_keys[0]} is {kv_heads}, of {heads} heads")
    return AttentionSize(kv_heads, key_size, value_size, heads * (key_size + value_size) / 2)


class Linear(NamedTuple):
    """A recurrent layer: its state, and the parameters of its projections."""

    state: int  # numbers for each request
    params: float


def parse_linear(config: dict[str, Any]) -> Linear:
    """Return the recurrent layer of a config.json. Raises UnknownShapeError where it does not tell.

    The sizes of gated delta nets, Kimi's delta attention, lightning attention, Mamba 1 and 2, short convolutions and
    RecurrentGemma's linear units.
    """
    hidden = parse_positive(config, "hidden_size")
    if config.get("linear_num_value_heads") is not None or config.get("linear_key_head_dim") is not None:
        sizes = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
        key_heads, key, value_heads, value = (parse_positive(config, name) for name in sizes)
        conv = parse_positive(config, "linear_conv_kernel_dim")
        mixed = 2 * key_heads * key + value_heads * value
        params = hidden * (mixed + 2 * value_heads * value + 2 * value_heads) + conv * mixed
        return Linear(value_heads * key * value + (conv - 1) * mixed, params)
    if isinstance(kda := config.get("linear_attn_config"), dict):
        heads, size = parse_positive(kda, "num_heads"), parse_positive(kda, "head_dim")
        return _kimi_linear(hidden, heads, size, parse_positive(kda, "short_conv_kernel_size"))
    if config.get("conv_L_cache") is not None:
        return Linear((parse_positive(config, "conv_L_cache") - 1) * hidden, 4 * hidden * hidden)
    if config.get("linear_num_heads") is not None:  # Kimi's, as Transformers saves it
        heads, size = parse_positive(config, "linear_num_heads"), parse_positive(config, "linear_head_dim")
        conv = parse_positive(config, "linear_conv_kernel_dim")
        return _kimi_linear(hidden, heads, size, conv)
    lightning = ("attn_type_list", "layer_group_size", "linear_attn_alpha_factor", "layernorm_linear_attention_alpha")
    if any(config.get(key) is not None for key in lightning):
        heads = parse_positive(config, "num_attention_heads")
        size = parse_optional(config, "head_dim") or hidden // heads
        return Linear(heads * size * size, 5 * hidden * heads * size)
    if config.get("lru_width") is not None or config.get("conv1d_width") is not None:
        width, conv = parse_optional(config, "lru_width") or hidden, parse_positive(config, "conv1d_width")
        heads = parse_positive(config, "num_attention_heads")
        return Linear(conv * width, 3 * hidden * width + 2 * width * width / heads + conv * width)
    return _parse_mamba(config, hidden)


def _kimi_linear(hidden: int, heads: int, size: int, conv: int) -> Linear:
    width = heads * size
    params = 4 * hidden * width + 2 * (hidden + width) * size + hidden * heads + 3 * conv * width
    return Linear(width * size + 3 * (conv - 1) * width, params)


def _parse_mamba(config: dict[str, Any], hidden: int) -> Linear:
    heads = _parse_any(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    state = _parse_any(config, "mamba_d_state", "ssm_state_size", "state_size")
    conv = _parse_any(config, "mamba_d_conv", "conv_kernel")
    if state is None or conv is None:
        raise UnknownShapeError("config.json does not tell the size of its recurrent state")
    inner = _parse_any(config, "mamba_d_ssm", "mamba_intermediate_size")
    head_size = config.get("mamba_d_head", config.get("mamba_head_dim"))
    if inner is None and heads is not None and type(head_size) is int and 1 <= head_size <= MAX_SIZE:
        inner = heads * head_size
    if inner is None:
        inner = (_parse_any(config, "mamba_expand", "expand") or 2) * hidden
    if heads is None:  # Mamba 1
        rank = config.get("mamba_dt_rank", config.get("time_step_rank"))
        rank = rank if type(rank) is int and 1 <= rank <= MAX_SIZE else -(-hidden // 16)
        params = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner + (conv + state) * inner
        return Linear((state + conv - 1) * inner, params)
    groups = _parse_any(config, "mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    mixed = inner + 2 * groups * state
    return Linear(state * inner + (conv - 1) * mixed, hidden * (inner + mixed + heads + inner) + conv * mixed)


def _parse_any(config: dict[str, Any], *names: str) -> int | None:
    return next((parse_positive(config, name) for name in names if config.get(name) is not None), None)


def _state_numbers(config: dict[str, Any]) -> int | None:
    try:
        return parse_linear(config).state
    except UnknownShapeError:
        return None


def parse_positive(config: dict[str, Any], key: str) -> int:
    """Return a number of a configuration. Raises UnknownShapeError for one that is missing or cannot be."""
    value = config.get(key)
    if value is None:
        raise UnknownShapeError(f"{key} is missing")
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise UnknownShapeError(f"{key} is {value!r:.50}")
    return value


def parse_optional(config: dict[str, Any], key: str) -> int:
    """Return a number of a configuration; 0 where it has none."""
    return parse_positive(config, key) if config.get(key) else 0


def parse_layers(config: dict[str, Any], key: str) -> int:
    layers = parse_positive(config, key)
    if layers > MAX_LAYERS:
        raise UnknownShapeError(f"{key} is {layers}")
    return layers
