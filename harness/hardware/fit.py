"""Whether a model fits into the memory of GPUs, and how many requests fit at once."""

from collections.abc import Iterable

from msgspec import Struct, structs

from harness.base.errors import HarnessError
from harness.base.units import GIB, count, figures, verb
from harness.hardware.model import (
    DTYPE_BYTES,
    Capacity,
    Layout,
    ModelShape,
    compute_capacity,
    make_layout,
)
from harness.machine.memory import SafeShare, known_gib

# Memory of vLLM besides weights and KV cache: the peak of activations, graphs, the runtime. Observed on Radeon and
# Strix Halo at common settings; only vLLM's own profiling at its start knows the value.
OTHER_BYTES = (int(1.1 * GIB), int(2.6 * GIB))


class ModelFit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model fits into the memory of each GPU. Ranges are a pessimistic and an optimistic estimate."""

    model: str
    is_gguf: bool = False  # for llama.cpp; other files are for vLLM
    gpus: int
    max_model_len: int
    max_num_seqs: int | None = None
    weights_bytes: int | None = None
    token_bytes: int | None = None  # of one more token, in layers that keep all
    window_bytes: int = 0  # at most, in layers that keep a window only
    state_bytes: int = 0  # of a request, in recurrent layers
    request_bytes: int | None = None  # of one request of maximum length
    kv_bytes: tuple[int, int] | None = None  # None without a share or without known weights
    capacity: tuple[Capacity, Capacity] | None = None
    fits: bool | None = None  # whether vLLM will start; None: unknown
    unknown: list[str] = []
    advice: list[str] = []


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The wanted settings of the server."""

    max_model_len: int | None = None  # None: the model's own
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 8192
    tensor_parallel: int = 1
    kv_cache_dtype: str = "auto"


def estimate_fit(
    model: ModelShape,
    share: SafeShare | None,
    settings: ServerSettings = ServerSettings(),  # noqa: B008 - a frozen value
) -> ModelFit:
    """Return how the model fits into the share. Raises HarnessError if the maximum length is unknown."""
    length = settings.max_model_len or model.longest
    if length is None:
        raise HarnessError(
            f"{model.name}: its config.json does not tell the greatest length of a request",
            next_step="Give it: --max-model-len N.",
        )
    unknown = list(model.unknown)
    weights = model.weights_bytes
    if weights is None:
        unknown.append("the size of the weights: its safetensors are not, or not whole, on this machine")
    else:
        weights = -(-weights // settings.tensor_parallel)
    if model.longest is not None and length > model.longest:
        engine = "llama.cpp" if model.is_gguf else "vLLM"
        unknown.append(f"whether {engine} takes {length:,} tokens: the model's own limit is {model.longest:,}")
    layout = _choose_layout(model, settings, unknown)
    kv_bytes: tuple[int, int] | None = None
    capacity: tuple[Capacity, Capacity] | None = None
    fits: bool | None = None
    if share is not None and weights is not None:
        rest = share.budget_bytes - weights
        kv_bytes = (rest - OTHER_BYTES[1], rest - OTHER_BYTES[0])
        if layout is not None:
            pessimistic, optimistic = (compute_capacity(layout, size, length) for size in kv_bytes)
            capacity = (pessimistic, optimistic)
            fits = True if pessimistic.fits else None if optimistic.fits else False
        if kv_bytes[1] <= 0:
            fits = False
    fit = ModelFit(
        model=model.name,
        is_gguf=model.is_gguf,
        gpus=settings.tensor_parallel,
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        weights_bytes=weights,
        token_bytes=None if layout is None else layout.token_bytes,
        window_bytes=0 if layout is None else layout.window_bytes,
        state_bytes=0 if layout is None else layout.state_bytes,
        request_bytes=None if layout is None else layout.request_bytes(length),
        kv_bytes=kv_bytes,
        capacity=capacity,
        fits=fits,
        unknown=unknown,
    )
    return structs.replace(fit, advice=_list_advice(fit, model.longest or length))


def _choose_layout(model: ModelShape, settings: ServerSettings, unknown: list[str]) -> Layout | None:
    """Return the layout of the KV cache; None, with the reason in `unknown`, if it is not known."""
    if settings.kv_cache_dtype not in DTYPE_BYTES:
        unknown.append(f"the size of a number as {settings.kv_cache_dtype} in the KV cache")
        return None
    number_bytes = DTYPE_BYTES[settings.kv_cache_dtype] or model.kv_bytes
    if model.geometry is None or number_bytes is None:
        return None
    if model.geometry.state_layers and model.geometry.state_bytes is None:
        unknown.append("the recurrent state of a request, which is not counted: its files do not tell its size")
    if model.geometry.latent and number_bytes == 1:
        unknown.append("the KV cache per token: a latent as fp8 also has scales, in a layout of its own")
        return None
    if model.is_gguf:
        gpus = settings.tensor_parallel
        return make_layout(model.geometry, number_bytes, tensor_parallel=gpus, block=1, grouped=False)
    return make_layout(
        model.geometry,
        number_bytes,
        tensor_parallel=settings.tensor_parallel,
        in_flight=2 * settings.max_num_batched_tokens,  # one batch is computed while the next is prepared
    )


def _list_advice(fit: ModelFit, longest: int) -> list[str]:
    """Return what to do if the model, or the wanted number of concurrent requests, does not fit."""
    capacity = fit.capacity[0] if fit.capacity is not None else None
    if fit.kv_bytes is not None and (fit.kv_bytes[0] <= 0 or (capacity is not None and not capacity.fits)):
        choices = ["a smaller or quantised model", "more GPUs (--tensor-parallel-size)", "--kv-cache-dtype fp8"]
        if fit.is_gguf:
            choices = ["a smaller quantisation or model", "more GPUs", "--cache-type-k q8_0 --cache-type-v q8_0"]
        if capacity is not None and capacity.longest:
            length = "--ctx-size" if fit.is_gguf else "--max-model-len"
            choices.append(f"a shorter {length} (at most {min(capacity.longest, longest)})")
        return [f"take {', '.join(choices)}, or free memory"]
    if capacity is not None and fit.max_num_seqs is not None and capacity.concurrency < fit.max_num_seqs:
        fitting = int(capacity.concurrency)
        fact = f"{count(fitting, 'request')} of {fit.max_model_len:,} tokens {verb(fitting, 'fits', 'fit')} at once, "
        fact += "and the others wait"
        slots = f"--parallel {fitting} --ctx-size {fitting * fit.max_model_len}"
        return [f"{fact}: {slots if fit.is_gguf else f'--max-num-seqs {fitting}'} makes that certain"]
    return []


def format_fit(fit: ModelFit) -> tuple[str, list[str]]:
    """Return the model, and the lines on how it fits."""
    lines = [f"weights: {known_gib(fit.weights_bytes)}"]
    if fit.request_bytes is not None:
        parts = [f"{fit.token_bytes:,} bytes a token"]
        if fit.window_bytes:
            parts.append(f"at most {_mib(fit.window_bytes)} in layers with a window")
        if fit.state_bytes:
            parts.append(f"{_mib(fit.state_bytes)} of recurrent state a request")
        parts.append(f"{known_gib(fit.request_bytes)} for a request of {fit.max_model_len:,} tokens")
        lines.append(f"KV cache: {', '.join(parts)}")
    if fit.kv_bytes is not None:
        lines.append(
            f"left for the KV cache: {_format_range(known_gib(max(0, size)) for size in fit.kv_bytes)} "
            f"(an estimate: activations and graphs take {OTHER_BYTES[0] / GIB:.1f} to {OTHER_BYTES[1] / GIB:.1f} GiB, "
            f"which {'llama.cpp' if fit.is_gguf else 'vLLM'} finds out at start)"
        )
    if fit.capacity is not None:
        tokens = _format_range(f"{capacity.tokens:,}" for capacity in fit.capacity)
        concurrency = _format_range(f"{capacity.concurrency:.2f}x" for capacity in fit.capacity)
        lines.append(f"KV cache size: {tokens} tokens")
        lines.append(f"concurrency for {fit.max_model_len:,} tokens per request: {concurrency}")
    if fit.fits is not None:
        lines.append("it fits" if fit.fits else "it does NOT fit")
    elif fit.capacity is not None:
        lines.append(f"borderline: it depends on what {'llama.cpp' if fit.is_gguf else 'vLLM'} itself needs")
    lines += [f"unknown: {text}" for text in fit.unknown]
    lines += [f"to do: {text}" for text in fit.advice]
    return f"{fit.model}{', on each GPU' if fit.gpus > 1 else ''}:", lines


def _mib(size: int) -> str:
    return f"{figures(size / (1 << 20))} MiB"


def _format_range(values: Iterable[str]) -> str:
    first, last = values
    return first if first == last else f"{first} to {last}"
