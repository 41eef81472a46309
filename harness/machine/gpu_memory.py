"""The memory that a GPU can allocate, and the processes that hold it."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from harness.machine.gpus import Card, gpus, meminfo, number, text, working
from harness.units import gib

PAGE_BYTES = 4096  # of x86-64, as every APU


class Pool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory that one GPU allocates from. Bytes; unknown is None."""

    render_node: str | None  # such as /dev/dri/renderD128
    target: str  # such as gfx1151
    kind: Literal["vram", "gtt"] | None  # None: sizes are unknown
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None  # of this pool alone: see host_available_bytes
    unified: bool  # its pages are host memory, shared by all programs
    host_available_bytes: int | None = None  # of a unified pool: free host memory
    overstated: bool = False  # the driver reports more than its limit, and the runtime may report that
    doubts: list[str] = []  # why the GPU's runtime may see other numbers


def pools(root: Path = Path("/"), cards: Sequence[Card] | None = None) -> list[Pool]:
    """The pool of each of the AMD GPUs under `root`, in the order of the compute driver; None: those that work.

    A card of its own has its VRAM. An APU has a carve-out (VRAM) and pages of the host (GTT), and the driver takes the
    larger one: Linux amdgpu, `apu_prefer_gtt`.
    """
    available = meminfo(root / "proc/meminfo").get("MemAvailable")
    # The limit of ttm counts, not amdgpu.gttsize: ttm gives out all pages of GTT.
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
            "the runtime may report more free memory than there is in total"
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


_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_AMOUNT = re.compile(r"^drm-(?:memory|resident)-(vram|gtt):\s*(\d+)\s*([kmg]ib)?\s*$", re.IGNORECASE | re.MULTILINE)


class Holder(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process that holds GPU memory. Bytes."""

    pid: int
    name: str  # as in /proc/PID/comm, which cuts it to 15 characters
    vram_bytes: int = 0
    gtt_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.vram_bytes + self.gtt_bytes


class Holders(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The processes that hold GPU memory, the largest first."""

    found: list[Holder]
    unseen: int  # processes of other users, which are not readable


def holders(root: Path = Path("/")) -> Holders:
    """Find the processes that hold memory of an AMD GPU.

    Two sources, of which the larger counts: the DRM clients of a process (fdinfo; drm-usage-stats in the kernel's
    documentation), and what the compute driver counts for it (/sys/class/kfd/kfd/proc), which other users may read.
    """
    clients: set[tuple[str, str]] = set()
    found, unseen = [], 0
    for pid in pids(root):
        vram, gtt, seen = _of_clients(root / f"proc/{pid}/fdinfo", clients)
        unseen += not seen and bool(text(root / f"proc/{pid}/cmdline"))  # a kernel thread has no command line
        vram = max(vram, sum(_of_compute(root, pid)))
        if vram or gtt:
            found.append(Holder(pid=pid, name=text(root / f"proc/{pid}/comm") or "?", vram_bytes=vram, gtt_bytes=gtt))
    return Holders(found=sorted(found, key=lambda holder: (-holder.bytes, holder.pid)), unseen=unseen)


def pids(root: Path) -> list[int]:
    """All processes; none where there is no /proc."""
    try:
        return sorted(int(name) for name in os.listdir(root / "proc") if name.isdigit())
    except OSError:
        return []


def _of_clients(folder: Path, clients: set[tuple[str, str]]) -> tuple[int, int, bool]:
    """VRAM and GTT of the process's DRM clients that no earlier process had, and whether they are readable."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0, 0, True  # it has ended
    except OSError:
        return 0, 0, False
    vram = gtt = 0
    for name in names:
        fdinfo = text(folder / name) or ""
        if "drm-driver:\tamdgpu" not in fdinfo:
            continue
        client = (_value(fdinfo, "drm-pdev"), _value(fdinfo, "drm-client-id"))
        if client in clients:
            continue  # a duplicate of a descriptor, in this process or in one that inherited it
        clients.add(client)
        sizes = {"vram": 0, "gtt": 0}
        for kind, amount, unit in _AMOUNT.findall(fdinfo):
            sizes[kind] = max(sizes[kind], int(amount) * _UNITS[unit.lower()])
        vram, gtt = vram + sizes["vram"], gtt + sizes["gtt"]
    return vram, gtt, True


def _of_compute(root: Path, pid: int) -> Iterator[int]:
    for path in (root / f"sys/class/kfd/kfd/proc/{pid}").glob("vram_*"):
        yield number(path) or 0


def _value(fdinfo: str, key: str) -> str:
    match = re.search(rf"^{key}:\s*(\S+)", fdinfo, re.MULTILINE)
    return match[1] if match else ""
