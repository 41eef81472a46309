"""Who holds GPU memory: what the kernel tells of each process that has a GPU open."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from harness.machine.files import number, text

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
    unseen: int  # processes of other users, into which this one may not look


def holders(root: Path = Path("/")) -> Holders:
    """Who holds memory of an AMD GPU.

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
    """VRAM and GTT of the process's DRM clients that nobody before it had, and whether one may look."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0, 0, True  # it has ended
    except OSError:
        return 0, 0, False
    vram = gtt = 0
    for name in names:
        told = text(folder / name) or ""
        if "drm-driver:\tamdgpu" not in told:
            continue
        client = (_value(told, "drm-pdev"), _value(told, "drm-client-id"))
        if client in clients:
            continue  # a duplicate of a descriptor, in this process or in one that inherited it
        clients.add(client)
        sizes = {"vram": 0, "gtt": 0}
        for kind, amount, unit in _AMOUNT.findall(told):
            sizes[kind] = max(sizes[kind], int(amount) * _UNITS[unit.lower()])
        vram, gtt = vram + sizes["vram"], gtt + sizes["gtt"]
    return vram, gtt, True


def _of_compute(root: Path, pid: int) -> Iterator[int]:
    for path in (root / f"sys/class/kfd/kfd/proc/{pid}").glob("vram_*"):
        yield number(path) or 0


def _value(told: str, key: str) -> str:
    match = re.search(rf"^{key}:\s*(\S+)", told, re.MULTILINE)
    return match[1] if match else ""
