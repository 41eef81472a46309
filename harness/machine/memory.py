"""Estimate the safe GPU memory fraction, and whether a model fits."""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from harness.engines import HOST_RESERVE_BYTES, VLLM_DEFAULT_UTILIZATION, default_reserve, safe_utilization
from harness.errors import HarnessError
from harness.machine.gpus import Gpu, list_gpus, read_meminfo, read_number, select_serving_gpus
from harness.machine.model import (
    DTYPE_BYTES,
    Capacity,
    Layout,
    ModelShape,
    compute_capacity,
    make_layout,
    measure_weights,
)
from harness.reasons import sentence
from harness.summary import Reason, because
from harness.units import GIB, gib

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
    overstated: bool = False  # the driver reports more than its limit, and the runtime may report that
    doubts: list[str] = []  # why the GPU's runtime may see other numbers

    @property
    def unified(self) -> bool:
        """Whether its pages are host memory, shared by all programs."""
        return self.kind == "gtt"


def list_pools(root: Path = Path("/"), cards: Sequence[Gpu] | None = None) -> list[Pool]:
    """The pool of each of the AMD GPUs under `root`, in the order of the compute driver; None: those that work.

    A card of its own has its VRAM. An APU has a carve-out (VRAM) and pages of the host (GTT), and the driver takes the
    larger one: Linux amdgpu, `apu_prefer_gtt`.
    """
    available = read_meminfo(root / "proc/meminfo").get("MemAvailable")
    # The limit of ttm counts, not amdgpu.gttsize: ttm gives out all pages of GTT.
    pages = read_number(root / "sys/module/ttm/parameters/pages_limit")
    limit = pages * PAGE_BYTES if pages else None
    found = []
    for gpu in select_serving_gpus(list(list_gpus(root))) if cards is None else cards:
        node = gpu["render_node"]
        device = root / f"sys/class/drm/{Path(node).name}/device" if node else None
        found.append(_read_pool(gpu, device, limit, available))
    return found


def _read_pool(gpu: Gpu, device: Path | None, limit: int | None, available: int | None) -> Pool:
    def size(name: str) -> int | None:
        return read_number(device / f"mem_info_{name}") if device is not None else None

    kind = _choose_kind(gpu["integrated"], size("vram_total"), size("gtt_total"))
    total, used = (size(f"{kind}_total") or None, size(f"{kind}_used")) if kind else (None, None)
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
    if kind == "gtt":
        doubts.append("what is in use of GTT may lag behind what programs have just allocated")
    return Pool(
        render_node=str(gpu["render_node"]) if gpu["render_node"] else None,
        target=str(gpu["target"]),
        kind=kind,
        total_bytes=total,
        used_bytes=used,
        free_bytes=max(0, total - used) if total is not None and used is not None else None,
        host_available_bytes=available if kind == "gtt" else None,
        overstated=overstated,
        doubts=doubts,
    )


def _choose_kind(integrated: bool | None, vram: int | None, gtt: int | None) -> Literal["vram", "gtt"] | None:
    if integrated is False:
        return "vram"
    if integrated is None or vram is None or gtt is None:
        return None
    return "gtt" if gtt > vram else "vram"


# What vLLM needs besides weights and KV cache: the peak of activations, graphs, the runtime. Seen on Radeon and Strix
# Halo at common settings; only its own profiling at start knows.
OTHER_BYTES = (int(1.1 * GIB), int(2.6 * GIB))

CONTEXT_BYTES = GIB  # what the HIP runtime takes for itself before vLLM looks

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
    """The memory of each GPU for a model. Ranges go from the pessimistic to the optimistic estimate."""

    model: str
    gpus: int
    max_model_len: int
    max_num_seqs: int | None = None
    weights_bytes: int | None = None
    weights_from: str
    token_bytes: int | None = None
    request_bytes: int | None = None  # of one request of the greatest length
    kv_bytes: tuple[int, int] | None = None  # None without a share or without known weights
    capacity: tuple[Capacity, Capacity] | None = None
    fits: bool | None = None  # whether vLLM will start; None where that is not known
    unknown: list[str] = []
    advice: list[str] = []


class MemoryEstimate(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The output of `harness memory --json`."""

    pools: list[Pool] = []
    share: SafeShare | None = None
    room: ModelFit | None = None


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The wanted settings of the server."""

    max_model_len: int | None = None  # None: the model's own
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 8192
    tensor_parallel: int = 1
    kv_cache_dtype: str = "auto"


def compute_share(pools: list[Pool], *, tensor_parallel: int = 1) -> SafeShare:
    """The share for the first `tensor_parallel` GPUs: the smallest one, since vLLM has one number for all.

    Raises HarnessError where there are not so many, or where one does not tell its memory.
    """
    if len(pools) < tensor_parallel:
        raise HarnessError(
            f"{tensor_parallel} GPUs are asked for, and there are {len(pools)}" if pools else NO_GPU,
            next_step=COMPUTE_ELSEWHERE,
        )
    shares = []
    for pool in pools[:tensor_parallel]:
        free, total = pool.free_bytes, pool.total_bytes
        if free is None or total is None:
            raise HarnessError(f"{pool.render_node or pool.target}: {pool.doubts[0]}", next_step=COMPUTE_ELSEWHERE)
        host = pool.host_available_bytes
        one = compute_pool_share(
            free, total, source="driver", gpus=tensor_parallel, host_available=host, doubts=pool.doubts
        )
        shares.append(structs.replace(one, node=pool.render_node))
    doubts = list(dict.fromkeys(doubt for one in shares for doubt in one.doubts))
    smallest = min(shares, key=lambda one: (one.utilization or Decimal(0), one.free_bytes))
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
    """Compute the share of one pool from its bytes."""
    used = min(free, total)  # HIP reports more free memory than there is on some APUs
    reserve = default_reserve(used, gpus) + (CONTEXT_BYTES if source == "driver" else 0)
    found = safe_utilization(free, total, reserve=reserve, host_available=host_available)
    lies = [f"{gib(free, 2)} of {gib(total, 2)} are reported as free; the total is the limit"] if free > total else []
    return SafeShare(
        utilization=found,
        source=source,
        gpus=gpus,
        free_bytes=free,
        total_bytes=total,
        reserve_bytes=reserve,
        host_available_bytes=host_available,
        formula=_explain_share(used, total, reserve, host_available, found),
        doubts=[*lies, *doubts],
    )


def _explain_share(free: int, total: int, reserve: int, host: int | None, found: Decimal | None) -> Reason:
    of_host = host is not None and host - HOST_RESERVE_BYTES < free - reserve
    share = Decimal(max(0, (host or 0) - HOST_RESERVE_BYTES if of_host else free - reserve)) / total
    capped = found == VLLM_DEFAULT_UTILIZATION and share > VLLM_DEFAULT_UTILIZATION
    values = {
        "total_bytes": total,
        "share": float(share),
        "max_share": float(VLLM_DEFAULT_UTILIZATION) if capped else None,
    }
    if of_host:
        return because("memory_share_of_host", available_bytes=host, kept_bytes=HOST_RESERVE_BYTES, **values)
    return because("memory_share", free_bytes=free, reserve_bytes=reserve, **values)


def estimate_fit(model: ModelShape, share: SafeShare | None, wish: ServerSettings = ServerSettings()) -> ModelFit:  # noqa: B008 - a frozen value
    """The room for the model in the share. Raises HarnessError without a known length."""
    length = wish.max_model_len or model.longest
    if length is None:
        raise HarnessError(
            f"{model.name}: its config.json does not tell the greatest length of a request",
            next_step="Give it: --max-model-len N.",
        )
    unknown = list(model.unknown)
    weights, weights_from = measure_weights(model.folder, quantized=model.quantized)
    if weights is None:
        unknown.append(f"the size of the weights: {weights_from}")
    else:
        weights = -(-weights // wish.tensor_parallel)
    if model.longest is not None and length > model.longest:
        unknown.append(f"whether vLLM takes {length:,} tokens: the model's own limit is {model.longest:,}")
    layout = _layout(model, wish, unknown)
    kv = None
    if share is not None and weights is not None:
        rest = share.budget_bytes - weights
        kv = (rest - OTHER_BYTES[1], rest - OTHER_BYTES[0])
    held = (
        None
        if kv is None or layout is None
        else (compute_capacity(layout, kv[0], length), compute_capacity(layout, kv[1], length))
    )
    room = ModelFit(
        model=model.name,
        gpus=wish.tensor_parallel,
        max_model_len=length,
        max_num_seqs=wish.max_num_seqs,
        weights_bytes=weights,
        weights_from=weights_from,
        token_bytes=layout.token_bytes if layout else None,
        request_bytes=layout.request_bytes(length) if layout else None,
        kv_bytes=kv,
        capacity=held,
        unknown=unknown,
    )
    return structs.replace(room, fits=_decide_fit(room), advice=_list_advice(model, room, wish))


def _decide_fit(room: ModelFit) -> bool | None:
    if room.kv_bytes is None:
        return None
    if room.kv_bytes[1] <= 0:
        return False
    if room.capacity is None:
        return None
    careful, hopeful = room.capacity
    return True if careful.fits else None if hopeful.fits else False


def _layout(model: ModelShape, wish: ServerSettings, unknown: list[str]) -> Layout | None:
    if wish.kv_cache_dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        unknown.append(f"the size of a number as {wish.kv_cache_dtype} in the KV cache (known: {known})")
        return None
    number = DTYPE_BYTES[wish.kv_cache_dtype] or model.kv_bytes
    if model.geometry is None or number is None:
        return None
    if model.geometry.latent and number == 1:
        unknown.append("the KV cache per token: a latent as fp8 also has scales, in a layout of its own")
        return None
    return make_layout(
        model.geometry,
        number,
        tensor_parallel=wish.tensor_parallel,
        in_flight=2 * wish.max_num_batched_tokens,  # one batch is computed while the next is prepared
    )


def _list_advice(model: ModelShape, room: ModelFit, wish: ServerSettings) -> list[str]:
    """The advice if the model, or the wanted number of concurrent requests, does not fit."""
    if room.kv_bytes is None:
        return []
    careful, hopeful = room.kv_bytes
    if careful <= 0:
        return [
            f"the weights and what vLLM needs besides {'may ' if hopeful > 0 else ''}take all of the budget: "
            "take a smaller or quantised model, more GPUs (--tensor-parallel-size), or free memory",
            "a little room is won by --enforce-eager (no graphs) and a smaller --max-num-batched-tokens",
        ]
    if room.capacity is None:
        return []
    held = room.capacity[0]
    advice = []
    if not held.fits:
        longest = min(held.longest, model.longest or held.longest)
        shorter = f"--max-model-len {longest}" if longest else "a smaller model"
        advice.append(f"a request of {room.max_model_len:,} tokens does not fit for sure: set {shorter}")
        if wish.kv_cache_dtype == "auto":
            advice.append("--kv-cache-dtype fp8 halves the KV cache (gfx942, gfx950 and gfx120x have fp8)")
    elif room.max_num_seqs is not None and held.concurrency < room.max_num_seqs:
        each = int(room.max_model_len * held.concurrency / room.max_num_seqs)
        advice.append(
            f"{room.max_num_seqs} requests fit at once up to about {each:,} tokens each; of {room.max_model_len:,} "
            f"tokens {int(held.concurrency)} do, and the others wait: --max-num-seqs {int(held.concurrency)} makes "
            "that certain"
        )
    return advice


SOURCES = {
    "driver": "as the kernel's driver tells; 1 GiB of the reserve is for the runtime, which has not started yet",
    "given": "as given",
}


def format_estimate(answer: MemoryEstimate) -> list[str]:
    """The whole answer, in lines."""
    lines = [format_pool(pool) for pool in answer.pools]
    lines += [NO_GPU] if answer.share is None else format_share(answer.share)
    return lines + (format_fit(answer.room) if answer.room is not None else [])


def format_pool(pool: Pool) -> str:
    """One line on a GPU's memory."""
    kind = "memory" if pool.kind is None else "pages of the host (GTT)" if pool.unified else "VRAM"
    text = f"{pool.render_node or 'GPU'} {pool.target}: {_gib(pool.free_bytes)} of {_gib(pool.total_bytes)} {kind} free"
    return text + (f"; {_gib(pool.host_available_bytes)} available on the host" if pool.unified else "")


def format_share(share: SafeShare) -> list[str]:
    """The value and its formula, in lines."""
    by = f": {share.node}" if share.node is not None else ""
    several = f" of each of {share.gpus} GPUs, by the one that has least{by}" if share.gpus > 1 else ""
    if share.utilization is None:
        head = "nothing is left for vLLM: stop what holds the memory (`harness doctor` names it)"
    else:
        head = f"--gpu-memory-utilization {share.utilization} ({_gib(share.budget_bytes)}{several})"
    doubts = [f"  doubt: {text}" for text in share.doubts]
    return [head, f"  {sentence(share.formula)}", f"  {SOURCES[share.source]}", *doubts]


def format_fit(room: ModelFit) -> list[str]:
    """The room for the model, in lines."""
    lines = [
        f"{room.model}{', on each GPU' if room.gpus > 1 else ''}:",
        f"  weights: {_gib(room.weights_bytes)} ({room.weights_from})",
    ]
    if room.request_bytes is not None:
        each = f"{room.token_bytes:,} bytes a token, " if room.token_bytes is not None else ""
        lines.append(f"  KV cache: {each}{_gib(room.request_bytes)} for a request of {room.max_model_len:,} tokens")
    if room.kv_bytes is not None:
        lines.append(
            f"  left for the KV cache: {_format_range(_gib(max(0, size)) for size in room.kv_bytes)} "
            f"(an estimate: activations and graphs take {OTHER_BYTES[0] / GIB:.1f} to {OTHER_BYTES[1] / GIB:.1f} GiB, "
            "which vLLM finds out at start)"
        )
    if room.capacity is not None:
        tokens = _format_range(f"{held.tokens:,}" for held in room.capacity)
        at_once = _format_range(f"{held.concurrency:.2f}x" for held in room.capacity)
        lines.append(f"  KV cache size: {tokens} tokens")
        lines.append(f"  concurrency for {room.max_model_len:,} tokens per request: {at_once}")
    if room.fits is not None:
        lines.append(f"  {'it fits' if room.fits else 'it does NOT fit'}")
    elif room.capacity is not None:
        lines.append("  whether it fits is decided by what vLLM needs besides")
    lines += [f"  unknown: {text}" for text in room.unknown]
    return lines + [f"  to do: {text}" for text in room.advice]


def summarize_fit(room: ModelFit) -> list[str]:
    """The room for the model, in a line; and what to do if it is too small."""
    if room.capacity is None:
        return [f"unknown: {text}" for text in room.unknown]
    tokens = _format_range(f"{held.tokens:,}" for held in room.capacity)
    at_once = _format_range(f"{held.concurrency:.1f}" for held in room.capacity)
    line = f"left for the KV cache: about {tokens} tokens, {at_once} requests of {room.max_model_len:,}"
    return [line, *(f"to do: {text}" for text in room.advice)]


def _gib(size: int | None) -> str:
    return "unknown" if size is None else gib(size, 2)


def _format_range(values: Iterable[str]) -> str:
    first, last = values
    return first if first == last else f"{first} to {last}"
