"""A model's configuration, and the sizes of its weights and of its KV cache.

Source: vllm/v1/core/kv_cache_utils.py. Only models whose layers all keep every token are computed; the cache of others
(sliding windows, latent attention, recurrent layers) is unknown until vLLM prints it at its start.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from harness.errors import HarnessError, did_you_mean
from harness.files import read_text

# Architectures with full attention in all layers. Their default head size is hidden_size / heads, if not in _OWN_SIZE.
_FULL_ATTENTION = {
    "cohere", "gpt_neox", "granite", "internlm2", "internlm3", "llama", "mistral", "mixtral", "olmo", "olmo2", "opt",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "stablelm", "starcoder2",
}  # fmt: skip
_OWN_SIZE = {"qwen3", "qwen3_moe"}
# Their default number of key heads is that of the query heads. Other architectures have defaults in their code.
_EQUAL_HEADS = {"llama", "phi3", "granite", "cohere", "olmo", "olmo2", "internlm2", "opt", "gpt_neox"}


_Positive = Annotated[int, Meta(ge=1)]


class KvShape(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape that determines the size of a KV cache."""

    layers: _Positive
    heads: _Positive  # of keys, of all GPUs
    head_size: _Positive

    def token_bytes(self, number_bytes: int, gpus: int = 1) -> int:
        """Return the bytes of a token on each GPU: they share the key heads, but each has at least one."""
        return 2 * self.layers * max(1, self.heads // gpus) * self.head_size * number_bytes


class ModelShape(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model on this machine, from its files."""

    name: str
    folder: Path
    kv: KvShape | None = None
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
    kv = _read_kv_shape(text)
    if kv is None:
        kind = text.get("model_type")
        unknown.append(f"the KV cache of '{kind}', which is computed only where all layers keep every token")
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    kv_bytes: int | None = 2  # 16 bit; vLLM converts 32 bit to 16
    if (folder / "hf_quant_config.json").is_file() or quantization.get("kv_cache_scheme"):
        kv_bytes = None
        unknown.append("the KV cache's data type: the checkpoint may bring one of its own; give --kv-cache-dtype")
    longest = text.get("max_position_embeddings")
    return ModelShape(
        name=name or folder.name,
        folder=folder,
        kv=kv,
        longest=longest if isinstance(longest, int) else None,
        kv_bytes=kv_bytes,
        unknown=unknown,
    )


def _read_kv_shape(config: dict[str, Any]) -> KvShape | None:
    """Return the shape of the text part of a config.json; None if it is not known for sure."""
    kind = config.get("model_type")
    slides = config.get("sliding_window") and config.get("use_sliding_window") is not False
    layer_types = config.get("layer_types")
    other_layers = isinstance(layer_types, list) and set(map(str, layer_types)) != {"full_attention"}
    if kind not in _FULL_ATTENTION or slides or other_layers or config.get("is_encoder_decoder"):
        return None
    heads, key_heads, size = (config.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    hidden = config.get("hidden_size")
    if key_heads is None and kind in _EQUAL_HEADS:
        key_heads = heads
    if size is None and kind not in _OWN_SIZE and isinstance(hidden, int) and isinstance(heads, int) and heads:
        size = hidden // heads
    try:
        shape = {"layers": config.get("num_hidden_layers"), "heads": key_heads, "head_size": size}
        return msgspec.convert(shape, KvShape)
    except msgspec.ValidationError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HarnessError(f"{path}: cannot be read ({reason})", next_step="Download it again.") from None
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


GPU_BLOCK = 16  # tokens of a block; vLLM's default on a GPU
DTYPE_BYTES = {"auto": None, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def require_known_dtype(name: str) -> None:
    """Raise HarnessError for an unknown data type."""
    if name not in DTYPE_BYTES:
        raise HarnessError(
            f"--kv-cache-dtype: '{name}' is not known here; {did_you_mean(name, DTYPE_BYTES)}",
            next_step="Leave it out for the model's own.",
        )


class Capacity(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The capacity of a KV cache, as vLLM prints it at its start."""

    tokens: int
    concurrency: float  # concurrent requests of maximum length
    longest: int  # the largest max_model_len that fits, at most the wanted one

    @property
    def fits(self) -> bool:
        """Whether a request of maximum length fits; else vLLM does not start."""
        return self.longest > 0 and self.concurrency >= 1


def compute_capacity(token_bytes: int, available: int, length: int, *, block: int = GPU_BLOCK) -> Capacity:
    """Return the capacity of `available` bytes at a max_model_len of `length` tokens."""
    blocks = max(0, available) // (block * token_bytes)
    concurrency = blocks / -(-length // block)
    longest = max(0, min(length, (blocks - 1) * block))  # vLLM reserves one block
    return Capacity(tokens=int(concurrency * length), concurrency=concurrency, longest=longest)
