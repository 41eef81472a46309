"""Estimate the safe share of GPU memory for vLLM, and whether a model fits."""

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from harness.base.engines import HOST_RESERVE_BYTES, VLLM_DEFAULT_UTILIZATION, default_reserve, safe_utilization
from harness.base.errors import HarnessError
from harness.base.reasons import sentence
from harness.base.summary import Reason, because
from harness.base.units import GIB, gib
from harness.machine.gpus import Gpu, list_gpus, read_meminfo, read_number, select_serving_gpus
from harness.machine.model import (
    DTYPE_BYTES,
    Capacity,
    Layout,
    ModelShape,
    compute_capacity,
    find_model,
    make_layout,
    measure_weights,
    read_model,
    require_known_dtype,
)

PAGE_BYTES = 4096  # of x86-64, as every APU


class Pool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory that one GPU allocates from. Bytes; unknown is None."""

    render_node: str | None  # such as /dev/dri/renderD128
    target: str  # such as gfx1151
    kind: Literal["vram", "gtt"] | None  # None: sizes are unknown
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None  # of this pool alone: see host_available_bytes
    host_available_bytes: int | None = None  # of a unified pool: free host memory
    overstated: bool = False  # the driver reports more than its limit, and so may the runtime
    doubts: list[str] = []  # why the GPU's runtime may report other numbers

    @property
    def unified(self) -> bool:
        """Whether its pages are host memory, shared by all programs."""
        return self.kind == "gtt"


def list_pools(root: Path = Path("/"), gpus: Sequence[Gpu] | None = None) -> list[Pool]:
    """Return the memory pool of each GPU; None: of those that serve models, in the order of the compute driver.

    A discrete card has its VRAM. An APU has a carve-out (VRAM) and pages of the host (GTT), of which the driver uses
    the larger one (Linux amdgpu, `apu_prefer_gtt`).
    """
    available = read_meminfo(root / "proc/meminfo").get("MemAvailable")
    # The limit of ttm counts, not amdgpu.gttsize: ttm allocates all pages of GTT.
    pages = read_number(root / "sys/module/ttm/parameters/pages_limit")
    limit = pages * PAGE_BYTES if pages else None
    if gpus is None:
        gpus = select_serving_gpus(list(list_gpus(root)))
    return [_read_pool(root, gpu, limit, available) for gpu in gpus]


def _read_pool(root: Path, gpu: Gpu, limit: int | None, available: int | None) -> Pool:
    node = gpu["render_node"]

    def read_size(name: str) -> int | None:
        return read_number(root / f"sys/class/drm/{Path(node).name}/device/mem_info_{name}") if node else None

    vram, gtt = read_size("vram_total"), read_size("gtt_total")
    kind: Literal["vram", "gtt"] | None = None
    if gpu["integrated"] is False:
        kind = "vram"
    elif gpu["integrated"] and vram is not None and gtt is not None:
        kind = "gtt" if gtt > vram else "vram"
    total, used = (read_size(f"{kind}_total") or None, read_size(f"{kind}_used")) if kind else (None, None)
    doubts, overstated = [], False
    if total is None or used is None or used > total:
        doubts.append("the driver does not tell its size, or how much of it is in use")
        used = None
    if kind == "gtt" and limit is not None and total is not None and limit < total:
        doubts.append(
            f"the driver states a GTT of {gib(total, 2)}, but ttm.pages_limit allows {gib(limit, 2)}: "
            "the runtime may report more free memory than there is in total"
        )
        total, overstated = limit, True
    return Pool(
        render_node=str(node) if node else None,
        target=str(gpu["target"]),
        kind=kind,
        total_bytes=total,
        used_bytes=used,
        free_bytes=max(0, total - used) if total is not None and used is not None else None,
        host_available_bytes=available if kind == "gtt" else None,
        overstated=overstated,
        doubts=doubts,
    )


# Memory of vLLM besides weights and KV cache: the peak of activations, graphs, the runtime. Observed on Radeon and
# Strix Halo at common settings; only vLLM's own profiling at its start knows the value.
OTHER_BYTES = (int(1.1 * GIB), int(2.6 * GIB))
CONTEXT_BYTES = GIB  # of the HIP runtime, allocated before vLLM checks the free memory

Source = Literal["driver", "given"]
NO_GPU = "no AMD GPU is known to this machine's kernel (/sys/class/kfd)"
COMPUTE_ELSEWHERE = "`harness memory --free GIB --total GIB` computes it from the two numbers that vLLM's log tells."


class SafeShare(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The utilization that is safe on all pools."""

    utilization: Decimal | None  # None: not even 0.01
    source: Source
    gpus: int
    free_bytes: int  # of the smallest pool
    total_bytes: int
    reserve_bytes: int
    host_available_bytes: int | None = None
    node: str | None = None  # the deciding GPU, such as /dev/dri/renderD128
    formula: Reason  # with the numbers in it
    doubts: list[str] = []

    @property
    def budget_bytes(self) -> int:
        """Bytes of each GPU that vLLM may use."""
        return 0 if self.utilization is None else int(self.total_bytes * self.utilization)


class ModelFit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model fits into the memory of each GPU. Ranges are a pessimistic and an optimistic estimate."""

    model: str
    gpus: int
    max_model_len: int
    max_num_seqs: int | None = None
    weights_bytes: int | None = None
    token_bytes: int | None = None
    request_bytes: int | None = None  # of one request of maximum length
    kv_bytes: tuple[int, int] | None = None  # None without a share or without known weights
    capacity: tuple[Capacity, Capacity] | None = None
    fits: bool | None = None  # whether vLLM will start; None: unknown
    unknown: list[str] = []
    advice: list[str] = []


class MemoryEstimate(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The output of `harness memory --json`."""

    pools: list[Pool] = []
    share: SafeShare | None = None
    room: ModelFit | None = None

    @property
    def fits(self) -> bool | None:
        """Whether memory is left and the model, if there is one, fits; None: unknown."""
        if self.share is not None and self.share.utilization is None:
            return False
        return None if self.room is None else self.room.fits


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The wanted settings of the server."""

    max_model_len: int | None = None  # None: the model's own
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 8192
    tensor_parallel: int = 1
    kv_cache_dtype: str = "auto"


MAX_GIB = 1 << 20  # no machine has more, and a float of more is not exact to the byte


def estimate_memory(
    wish: ServerSettings, model: str | None = None, given: tuple[float, float] | None = None, root: Path = Path("/")
) -> MemoryEstimate:
    """The share of the GPU memory that vLLM may use, and what it leaves for `model` (a folder, or a hub id).

    `given`: free and total memory in GiB, instead of this machine's. Raises HarnessError for a model that cannot be
    read, and without a GPU unless there is a model, whose memory is known without one.
    """
    require_known_dtype(wish.kv_cache_dtype)
    read = None if model is None else read_model(find_model(model), model)
    gpus = wish.tensor_parallel
    pools: list[Pool] = []
    if given is None:
        pools = list_pools(root)
        share = compute_share(pools, tensor_parallel=gpus) if pools or read is None else None
    else:
        free, total = given
        if not (math.isfinite(free) and math.isfinite(total) and free <= MAX_GIB and 0 < total <= MAX_GIB):
            raise HarnessError(
                f"--free {free:g} --total {total:g}: two sizes in GiB are expected, as in 76.45 and 96",
                next_step="Take them from vLLM's line `Free memory on device (76.45/96.0 GiB)`.",
            )
        sizes = [int(Decimal(str(size)) * GIB) for size in given]
        share = compute_pool_share(sizes[0], max(1, sizes[1]), source="given", gpus=gpus)
    return MemoryEstimate(pools=pools, share=share, room=None if read is None else estimate_fit(read, share, wish))


def compute_share(pools: list[Pool], *, tensor_parallel: int = 1) -> SafeShare:
    """Return the share for the first `tensor_parallel` GPUs: the smallest one, since vLLM has one number for all.

    Raises HarnessError if there are fewer GPUs, or if the memory of one is unknown.
    """
    if len(pools) < tensor_parallel:
        what = f"{tensor_parallel} GPUs are asked for, and there are {len(pools)}" if pools else NO_GPU
        raise HarnessError(what, next_step=COMPUTE_ELSEWHERE)
    shares = []
    for pool in pools[:tensor_parallel]:
        free, total, host = pool.free_bytes, pool.total_bytes, pool.host_available_bytes
        if free is None or total is None:
            what = f"{pool.render_node or pool.target}: {pool.doubts[0]}"
            raise HarnessError(what, next_step=COMPUTE_ELSEWHERE)
        share = compute_pool_share(
            free, total, source="driver", gpus=tensor_parallel, host_available=host, doubts=pool.doubts
        )
        shares.append(structs.replace(share, node=pool.render_node))
    doubts = list(dict.fromkeys(doubt for share in shares for doubt in share.doubts))
    smallest = min(shares, key=lambda share: (share.utilization or Decimal(0), share.free_bytes))
    return structs.replace(smallest, doubts=doubts)


def compute_pool_share(
    free: int,
    total: int,
    *,
    source: Source,
    gpus: int = 1,
    host_available: int | None = None,
    doubts: Sequence[str] = (),
) -> SafeShare:
    """Return the share of one pool. All sizes in bytes."""
    usable = min(free, total)  # HIP reports more free memory than the total on some APUs
    reserve = default_reserve(usable, gpus) + (CONTEXT_BYTES if source == "driver" else 0)
    utilization = safe_utilization(free, total, reserve=reserve, host_available=host_available)
    if free > total:
        doubts = [f"{gib(free, 2)} of {gib(total, 2)} are reported as free; the total is the limit", *doubts]
    return SafeShare(
        utilization=utilization,
        source=source,
        gpus=gpus,
        free_bytes=free,
        total_bytes=total,
        reserve_bytes=reserve,
        host_available_bytes=host_available,
        formula=_explain_share(usable, total, reserve, host_available, utilization),
        doubts=list(doubts),
    )


def _explain_share(free: int, total: int, reserve: int, host: int | None, utilization: Decimal | None) -> Reason:
    is_host_limit = host is not None and host - HOST_RESERVE_BYTES < free - reserve
    share = Decimal(max(0, (host or 0) - HOST_RESERVE_BYTES if is_host_limit else free - reserve)) / total
    is_capped = utilization == VLLM_DEFAULT_UTILIZATION and share > VLLM_DEFAULT_UTILIZATION
    max_share = float(VLLM_DEFAULT_UTILIZATION) if is_capped else None
    values = {"total_bytes": total, "share": float(share), "max_share": max_share}
    of_total = f"/ {gib(total, 2)} total = {share:.4f}, down to hundredths"
    if is_capped:
        of_total += f", at most {max_share:g} (the engine's default)"
    if is_host_limit:
        text = f"({gib(host or 0, 2)} available on the host - {gib(HOST_RESERVE_BYTES, 2)} left to it) {of_total}"
        return because("memory_share_of_host", text, available_bytes=host, kept_bytes=HOST_RESERVE_BYTES, **values)
    text = f"({gib(free, 2)} free - {gib(reserve, 2)} reserve) {of_total}"
    return because("memory_share", text, free_bytes=free, reserve_bytes=reserve, **values)


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
    weights = measure_weights(model.folder)
    if weights is None:
        unknown.append("the size of the weights: there are no safetensors of it on this machine")
    else:
        weights = -(-weights // settings.tensor_parallel)
    if model.longest is not None and length > model.longest:
        unknown.append(f"whether vLLM takes {length:,} tokens: the model's own limit is {model.longest:,}")
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
        gpus=settings.tensor_parallel,
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        weights_bytes=weights,
        token_bytes=None if layout is None else layout.token_bytes,
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
    if model.geometry.latent and number_bytes == 1:
        unknown.append("the KV cache per token: a latent as fp8 also has scales, in a layout of its own")
        return None
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
        if capacity is not None and capacity.longest:
            choices.append(f"a shorter --max-model-len (at most {min(capacity.longest, longest)})")
        return [f"take {', '.join(choices)}, or free memory"]
    if capacity is not None and fit.max_num_seqs is not None and capacity.concurrency < fit.max_num_seqs:
        count = int(capacity.concurrency)
        fact = f"{count} requests of {fit.max_model_len:,} tokens fit at once, and the others wait"
        return [f"{fact}: --max-num-seqs {count} makes that certain"]
    return []


def format_estimate(estimate: MemoryEstimate) -> list[str]:
    """Return the whole estimate, in lines."""
    lines = [format_pool(pool) for pool in estimate.pools]
    lines += [NO_GPU] if estimate.share is None else format_share(estimate.share)
    return lines + (format_fit(estimate.room) if estimate.room is not None else [])


def format_pool(pool: Pool) -> str:
    """Return one line on a GPU's memory."""
    kind = "memory" if pool.kind is None else "pages of the host (GTT)" if pool.unified else "VRAM"
    text = f"{pool.render_node or 'GPU'} {pool.target}: {_gib(pool.free_bytes)} of {_gib(pool.total_bytes)} {kind} free"
    return text + (f"; {_gib(pool.host_available_bytes)} available on the host" if pool.unified else "")


def format_share(share: SafeShare) -> list[str]:
    """Return the share and its formula, in lines."""
    node = f": {share.node}" if share.node is not None else ""
    several = f" of each of {share.gpus} GPUs, by the one that has least{node}" if share.gpus > 1 else ""
    if share.utilization is None:
        head = "nothing is left for vLLM: stop what holds the memory (`harness doctor` names it)"
    else:
        head = f"--gpu-memory-utilization {share.utilization} ({_gib(share.budget_bytes)}{several})"
    doubts = [f"  doubt: {text}" for text in share.doubts]
    return [head, f"  {sentence(share.formula)}", *doubts]


def format_fit(fit: ModelFit) -> list[str]:
    """Return how the model fits, in lines."""
    lines = [f"{fit.model}{', on each GPU' if fit.gpus > 1 else ''}:", f"  weights: {_gib(fit.weights_bytes)}"]
    if fit.request_bytes is not None:
        each = f"{fit.token_bytes:,} bytes a token, " if fit.token_bytes is not None else ""
        lines.append(f"  KV cache: {each}{_gib(fit.request_bytes)} for a request of {fit.max_model_len:,} tokens")
    if fit.kv_bytes is not None:
        lines.append(
            f"  left for the KV cache: {_format_range(_gib(max(0, size)) for size in fit.kv_bytes)} "
            f"(an estimate: activations and graphs take {OTHER_BYTES[0] / GIB:.1f} to {OTHER_BYTES[1] / GIB:.1f} GiB, "
            "which vLLM finds out at start)"
        )
    if fit.capacity is not None:
        tokens = _format_range(f"{capacity.tokens:,}" for capacity in fit.capacity)
        concurrency = _format_range(f"{capacity.concurrency:.2f}x" for capacity in fit.capacity)
        lines.append(f"  KV cache size: {tokens} tokens")
        lines.append(f"  concurrency for {fit.max_model_len:,} tokens per request: {concurrency}")
    if fit.fits is not None:
        lines.append(f"  {'it fits' if fit.fits else 'it does NOT fit'}")
    elif fit.capacity is not None:
        lines.append("  whether it fits is decided by what vLLM needs besides")
    lines += [f"  unknown: {text}" for text in fit.unknown]
    return lines + [f"  to do: {text}" for text in fit.advice]


def _gib(size: int | None) -> str:
    return "unknown" if size is None else gib(size, 2)


def _format_range(values: Iterable[str]) -> str:
    first, last = values
    return first if first == last else f"{first} to {last}"
