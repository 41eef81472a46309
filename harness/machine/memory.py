"""The memory that GPUs allocate from, and the share of it that is safe for vLLM."""

import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from harness.base.errors import HarnessError
from harness.base.reason import Reason, because, sentence
from harness.base.units import GIB, gib
from harness.engines import HOST_RESERVE_BYTES, VLLM_DEFAULT_UTILIZATION, default_reserve, safe_utilization
from harness.machine.gpus import Gpu, list_gpus, read_meminfo, read_number, select_serving_gpus

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


CONTEXT_BYTES = GIB  # of the HIP runtime, allocated before vLLM checks the free memory

Source = Literal["driver", "given"]
NO_GPU = "no AMD GPU is known to this machine's kernel (/sys/class/kfd)"
COMPUTE_ELSEWHERE = "`harness expect --free GIB --total GIB` computes it from the two numbers in vLLM's log."


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


MAX_GIB = 1 << 20  # no machine has more, and a float of more is not exact to the byte


def compute_given_share(free_gib: float, total_gib: float, gpus: int = 1) -> SafeShare:
    """Return the share for two sizes in GiB, as vLLM prints them. Raises HarnessError for impossible ones."""
    if not (math.isfinite(free_gib) and math.isfinite(total_gib) and free_gib <= MAX_GIB and 0 < total_gib <= MAX_GIB):
        raise HarnessError(
            f"--free {free_gib:g} --total {total_gib:g}: two sizes in GiB are expected, as in 76.45 and 96",
            next_step="Take them from vLLM's line `Free memory on device (76.45/96.0 GiB)`.",
        )
    free, total = (int(Decimal(str(size)) * GIB) for size in (free_gib, total_gib))
    return compute_pool_share(free, max(1, total), source="given", gpus=gpus)


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
    share_text = f"/ {gib(total, 2)} total = {share:.4f}, down to hundredths"
    if is_capped:
        share_text += f", at most {max_share:g} (the engine's default)"
    if is_host_limit:
        text = f"({gib(host or 0, 2)} available on the host - {gib(HOST_RESERVE_BYTES, 2)} left to it) {share_text}"
        return because("memory_share_of_host", text, available_bytes=host, kept_bytes=HOST_RESERVE_BYTES, **values)
    text = f"({gib(free, 2)} free - {gib(reserve, 2)} reserve) {share_text}"
    return because("memory_share", text, free_bytes=free, reserve_bytes=reserve, **values)


def format_pool(pool: Pool) -> str:
    """Return one line on a GPU's memory."""
    kind = "memory" if pool.kind is None else "pages of the host (GTT)" if pool.unified else "VRAM"
    sizes = f"{known_gib(pool.free_bytes)} of {known_gib(pool.total_bytes)}"
    text = f"{pool.render_node or 'GPU'} {pool.target}: {sizes} {kind} free"
    return text + (f"; {known_gib(pool.host_available_bytes)} available on the host" if pool.unified else "")


def format_share(share: SafeShare, *, is_gguf: bool = False) -> tuple[str, list[str]]:
    """Return the share, and its formula with its doubts. `is_gguf`: of llama.cpp, which has no option for it."""
    node = f": {share.node}" if share.node is not None else ""
    several = f" of each of {share.gpus} GPUs, by the one that has least{node}" if share.gpus > 1 else ""
    if share.utilization is None:
        engine = "llama.cpp" if is_gguf else "vLLM"
        head = f"nothing is left for {engine}: stop what holds the memory (`harness doctor` names it)"
    elif is_gguf:
        head = f"memory for the model: {known_gib(share.budget_bytes)}{several}, a share of {share.utilization}"
    else:
        head = f"--gpu-memory-utilization {share.utilization} ({known_gib(share.budget_bytes)}{several})"
    return head, [sentence(share.formula), *(f"doubt: {text}" for text in share.doubts)]


def known_gib(size: int | None) -> str:
    return "unknown" if size is None else gib(size, 2)
