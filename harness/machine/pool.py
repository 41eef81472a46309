"""Which memory an AMD GPU allocates from, how large it really is, and what is free of it now."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from harness.machine.facts import gpus
from harness.machine.files import meminfo, number
from harness.machine.gpu_choice import Card, working
from harness.units import gib

PAGE_BYTES = 4096  # of x86-64; an APU, where pages count, is nothing else


class Pool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory that one GPU allocates from. Bytes; unknown is None."""

    render_node: str | None  # such as /dev/dri/renderD128
    target: str  # such as gfx1151
    kind: Literal["vram", "gtt"] | None  # None: the sizes that decide are not known
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None  # of this pool alone: see host_available_bytes
    unified: bool  # its pages are the host's memory, which every program shares
    host_available_bytes: int | None = None  # of a unified pool: what the kernel can still give out
    overstated: bool = False  # the driver states more than its own limit gives out, and the runtime may tell that
    doubts: list[str] = []  # why a number here may not be what the GPU's runtime will see


def pools(root: Path = Path("/"), cards: Sequence[Card] | None = None) -> list[Pool]:
    """The pool of each of the AMD GPUs under `root`, in the order of the compute driver; None: those that work.

    A card of its own has its VRAM. An APU has a carve-out (VRAM) and pages of the host (GTT), and the driver takes the
    larger one: Linux amdgpu, `apu_prefer_gtt`.
    """
    available = meminfo(root / "proc/meminfo").get("MemAvailable")
    # What ttm, which hands out all pages of GTT, gives at most: its limit counts, whatever amdgpu.gttsize says.
    pages = number(root / "sys/module/ttm/parameters/pages_limit")
    limit = pages * PAGE_BYTES if pages else None
    found = []
    for gpu in working(list(gpus(root))) if cards is None else cards:
        node = gpu["render_node"]
        device = root / f"sys/class/drm/{Path(node).name}/device" if node else None
        found.append(_pool(gpu, device, limit, available))
    return found


def _pool(gpu: Card, device: Path | None, limit: int | None, available: int | None) -> Pool:
    def size(name: str) -> int | None:
        return number(device / f"mem_info_{name}") if device is not None else None

    vram, gtt = size("vram_total"), size("gtt_total")
    kind = _kind(gpu["integrated"], vram, gtt)
    unified = kind == "gtt"
    stated, used = (gtt, size("gtt_used")) if unified else (vram, size("vram_used"))
    total, doubts, overstated = (stated or None) if kind else None, [], False
    if kind is None:
        doubts.append("the driver does not tell the sizes of carve-out and GTT, of which the larger counts")
    elif total is None:
        doubts.append(f"the driver does not tell the size of its {kind.upper()}")
    elif unified and limit is not None and limit < total:
        doubts.append(
            f"the driver states a GTT of {gib(total, 2)}, but ttm.pages_limit allows {gib(limit, 2)}: "
            "programs may be told more free memory than there is in total"
        )
        total, overstated = limit, True
    if total is not None and kind is not None and used is None:
        doubts.append(f"the driver does not tell how much of its {kind.upper()} is in use")
    elif total is not None and kind is not None and used is not None and used > (stated or 0):
        doubts.append(
            f"the driver tells {gib(used, 2)} of its {kind.upper()} in use, more than the {gib(total, 2)} of it"
        )
        used = None
    if unified:
        doubts.append("what is in use of GTT may lag behind what programs have just allocated")
        if available is None:
            doubts.append("the host's available memory, which limits GTT, is not known")
    free = max(0, total - used) if total is not None and used is not None else None
    return Pool(
        render_node=str(gpu["render_node"]) if gpu["render_node"] else None,
        target=str(gpu["target"]),
        kind=kind,
        total_bytes=total,
        used_bytes=used,
        free_bytes=free,
        unified=unified,
        host_available_bytes=available if unified else None,
        overstated=overstated,
        doubts=doubts,
    )


def _kind(integrated: bool | None, vram: int | None, gtt: int | None) -> Literal["vram", "gtt"] | None:
    if integrated is False:
        return "vram"
    if integrated is None or vram is None or gtt is None:
        return None
    return "gtt" if gtt > vram else "vram"
