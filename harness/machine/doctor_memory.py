"""Check GPU memory and the inference engines that hold it."""

import os
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from msgspec import Struct

from harness.engines import any_of, engines
from harness.machine.findings import Finding, finding
from harness.machine.gpus import Card, gpus, meminfo, number, text, working
from harness.machine.memory import PAGE_BYTES, Pool, pools, share_of
from harness.units import GIB, gib
from harness.utilization import VLLM_DEFAULT, vllm_accepts

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


# Process names of the kernel, cut to 15 characters.
_CHILDREN = any_of([name for engine in engines() for name in engine.children])
_ENGINES = any_of([name for engine in engines() for name in engine.processes])
# Processes that adopt orphans: the first process, a user's systemd, the first one of a container.
_ADOPTERS = {"systemd", "init", "docker-init", "tini", "dumb-init", "catatonit", "lemond", "bash", "sh"}


class Process(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process and its parent."""

    pid: int
    name: str
    parent: int


def process_findings(root: Path) -> Iterator[Finding]:
    """Findings about engines that run on this machine."""
    running = {process.pid: process for process in _processes(root)}
    engines = [process for process in running.values() if _ENGINES.match(process.name)]
    orphaned = [process for process in engines if _is_orphan(process, running)]
    held = {holder.pid: holder.bytes for holder in holders(root).found} if orphaned else {}
    if orphaned:
        named = [
            f"{one.name} (pid {one.pid}{f', holds {gib(held[one.pid])}' if one.pid in held else ''})"
            for one in orphaned
        ]
        listed = " ".join(str(process.pid) for process in orphaned)
        yield finding("processes.orphans", "warning", f"orphaned engine: {', '.join(named)}", pids=listed)
    else:
        yield finding("processes.orphans", "ok", "no orphaned engine")
    others = [process for process in engines if process not in orphaned]
    if others:
        named = [f"{process.name} (pid {process.pid})" for process in others]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        yield finding("processes.engines", "warning", f"run already: {', '.join(named[:4])}{more}")


def orphans(root: Path) -> set[int]:
    """Pids of engine processes whose server is gone."""
    running = {process.pid: process for process in _processes(root)}
    return {process.pid for process in running.values() if _is_orphan(process, running)}


def _is_orphan(process: Process, running: dict[int, Process]) -> bool:
    if not _CHILDREN.match(process.name):
        return False
    parent = running.get(process.parent)
    return process.parent <= 1 or parent is None or parent.name in _ADOPTERS


def _processes(root: Path) -> Iterator[Process]:
    for pid in pids(root):
        # The name is in parentheses and may contain some itself; after it come the state and the parent.
        match = re.match(r"\d+ \((.*)\) (\S) (\d+)", text(root / f"proc/{pid}/stat") or "", re.DOTALL)
        if match and match[2] != "Z":
            yield Process(pid=pid, name=match[1], parent=int(match[3]))


TEMPLATE_SHARE = Decimal("0.75")  # gpu_memory_utilization of the template vllm-rocm
_SMALL_CARVE_OUT = 8 * GIB
_MUCH = GIB  # held by one process
_SHOWN = 64 << 20


def memory_findings(root: Path) -> Iterator[Finding]:
    """Findings about the memory of the GPUs that work; none without a GPU."""
    cards = working(list(gpus(root)))
    found = pools(root, cards)
    if not found:
        return
    seen = holders(root)
    yield _pools(found, cards)
    yield from _fractions(seen, found)
    yield from _holders(root, seen, found)
    for pool, card in zip(found, cards, strict=True):
        if card["integrated"]:
            yield from _sizes(root, pool, card)


def _pools(found: list[Pool], cards: list[Card]) -> Finding:
    unknown = [f"{pool.render_node or pool.target}: {pool.doubts[0]}" for pool in found if pool.free_bytes is None]
    if unknown:
        known = "; ".join(_alike([pool for pool in found if pool.free_bytes is not None]))
        return finding("memory.pool", "warning", "; ".join([*([known] if known else []), *unknown]))
    return finding("memory.pool", "ok", _one(found[0], cards[0]) if len(found) == 1 else "; ".join(_alike(found)))


def _free(pool: Pool) -> int | None:
    """Free bytes of a pool: pages of GTT are host memory."""
    known = [size for size in (pool.free_bytes, pool.host_available_bytes) if size is not None]
    return min(known) if pool.free_bytes is not None else None


def _fractions(seen: Holders, found: list[Pool]) -> Iterator[Finding]:
    """The largest safe share of each known pool, and whether the defaults of vLLM and the templates fit."""
    known = [pool for pool in found if pool.free_bytes is not None and pool.total_bytes is not None]
    if not known:
        return
    shares = [share_of([pool]).utilization or Decimal(0) for pool in known]
    fact, smallest = _shares(known, shares), min(shares)
    default = f"vLLM's default of {VLLM_DEFAULT}"
    if all(_accepts(pool, VLLM_DEFAULT) for pool in known):
        fits = "fits" if smallest >= VLLM_DEFAULT else "is more, and may just start"
        yield finding("memory.fraction", "ok", f"{fact}; {default} {fits}")
        return
    neither = not all(_accepts(pool, TEMPLATE_SHARE) for pool in known)
    fact += f"; {default} and the templates' {TEMPLATE_SHARE} do not fit" if neither else f"; {default} does not fit"
    of_host = any((pool.host_available_bytes or pool.free_bytes or 0) < (pool.free_bytes or 0) for pool in known)
    if not smallest:
        case = "full" if of_host or max(pool.used_bytes or 0 for pool in known) > _MUCH else "none"
    else:
        held = sum(holder.bytes for holder in seen.found) > _MUCH
        case = "host" if of_host else "held" if held else "small"
    yield finding("memory.fraction", "warning", fact, case, fraction=smallest)


def _shares(known: list[Pool], shares: list[Decimal]) -> str:
    """The shares in words, equal ones together."""
    parts = []
    for share in dict.fromkeys(shares):
        nodes = [pool.render_node or pool.target for pool, own in zip(known, shares, strict=True) if own == share]
        where = nodes[0] if len(nodes) == 1 else f"{'each of ' if len(nodes) == len(known) else ''}{len(nodes)} GPUs"
        parts.append(f"{share or 'nothing'}{'' if len(known) == 1 else f' on {where}'}")
    if not any(shares):
        return "no gpu_memory_utilization is safe: nothing is left for vLLM"
    return f"gpu_memory_utilization is safe up to {', '.join(parts)}"


def _accepts(pool: Pool, share: Decimal) -> bool:
    free, total = _free(pool), pool.total_bytes
    return free is not None and total is not None and vllm_accepts(free, total, share)


def _one(pool: Pool, card: Card) -> str:
    assert pool.kind is not None and pool.total_bytes is not None and pool.free_bytes is not None
    fact = f"{pool.kind.upper()} of {gib(pool.total_bytes)} counts, {gib(pool.free_bytes)} free"
    if pool.unified and pool.host_available_bytes is not None and pool.host_available_bytes < pool.free_bytes:
        fact += f", of which the host can give {gib(pool.host_available_bytes)}"
    other = "vram" if pool.kind == "gtt" else "gtt"
    if card["integrated"] and (size := card[f"{other}_bytes"]) is not None:
        fact += f" (the {'carve-out' if other == 'vram' else 'GTT'} of {gib(size)} does not)"
    return fact


def _alike(found: list[Pool]) -> Iterator[str]:
    """Pools of the same kind and size in one sentence."""
    kinds = dict.fromkeys((pool.kind, pool.total_bytes) for pool in found)
    for kind, total_bytes in kinds:
        members = [pool for pool in found if (pool.kind, pool.total_bytes) == (kind, total_bytes)]
        free = sorted(size for pool in members if (size := _free(pool)) is not None)
        room = "unknown room" if total_bytes is None else gib(total_bytes)
        left = "unknown" if not free else gib(free[0]) if free[0] == free[-1] else f"{gib(free[0])} to {gib(free[-1])}"
        what = "memory" if kind is None else kind.upper()
        yield f"{f'{len(members)} x ' if len(members) > 1 else ''}{what} of {room}, {left} free"


def _holders(root: Path, seen: Holders, found: list[Pool]) -> Iterator[Finding]:
    orphaned = orphans(root)  # those have a finding of their own
    shown = [holder for holder in seen.found if holder.bytes >= _SHOWN and holder.pid not in orphaned][:5]
    unseen = f"; {seen.unseen} processes of other users cannot be seen (sudo shows them)" if seen.unseen else ""
    much = [holder for holder in shown if holder.bytes >= _MUCH]
    if much:
        names = ", ".join(f"{holder.name} (pid {holder.pid})" for holder in much)
        yield finding("memory.holders", "warning", f"held by {_list(shown)}{unseen}", names=names)
        return
    used = sum(pool.used_bytes or 0 for pool in found)
    if shown:
        yield finding("memory.holders", "ok", f"held by {_list(shown)}{unseen}")
    else:
        unknown = f"{gib(used)} in use, by no process that can be seen" if used > _MUCH else "no process holds much"
        yield finding("memory.holders", "ok", f"{unknown}{unseen}")


def _list(shown: list[Holder]) -> str:
    return ", ".join(f"{holder.name} (pid {holder.pid}) {gib(holder.bytes)}" for holder in shown)


def _sizes(root: Path, pool: Pool, card: Card) -> Iterator[Finding]:
    """Settings of an APU that give too little or too much memory."""
    ram, vram, stated = meminfo(root / "proc/meminfo").get("MemTotal"), card["vram_bytes"], card["gtt_bytes"]
    max_gib = None if ram is None else _max_gtt_gib(ram)
    limit = number(root / "sys/module/ttm/parameters/pages_limit")
    gtt = stated if limit is None or stated is None else min(stated, limit * PAGE_BYTES)
    if stated is not None and gtt is not None and gtt < stated:
        wanted = re.search(r"\bamdgpu\.gttsize=(\d+)", text(root / "proc/cmdline") or "")
        asked = f"amdgpu.gttsize={wanted[1]}" if wanted else "the driver"
        size = stated if max_gib is None else min(stated, max(gtt, max_gib * GIB))  # never more than there is
        yield finding(
            "memory.gttsize",
            "warning",
            f"{asked} promises a GTT of {gib(stated)}, but ttm.pages_limit gives out {gib(gtt)}: "
            "programs see more free memory than there is",
            pages=size // PAGE_BYTES,
        )
    if ram is None or max_gib is None or vram is None or gtt is None or not pool.unified:
        return
    if gtt > ram:
        small = vram < _SMALL_CARVE_OUT
        yield finding(
            "memory.overcommit",
            "warning",
            f"the GTT of {gib(gtt)} counts, but the carve-out of {gib(vram)} leaves only {gib(ram)} of RAM to fill it",
            "limit" if small else "carve-out",
            carve_out=gib(vram),
            pages=max(0, max_gib) * GIB // PAGE_BYTES,
        )
    elif vram < _SMALL_CARVE_OUT and gtt < 0.55 * ram and gtt < max_gib * GIB:
        yield finding(
            "memory.half",
            "warning",
            f"the GPU gets {gib(gtt)} of {gib(ram)}: "
            f"GTT has {'a limit' if gtt < (stated or 0) else 'its default size'} of half the RAM, "
            f"the carve-out is {gib(vram)}",
            pages=max_gib * GIB // PAGE_BYTES,
            size=f"{max_gib} GiB",
            left=gib(ram - max_gib * GIB),
            gib=max_gib,
        )


def _max_gtt_gib(ram: int) -> int:
    """The GTT that leaves an eighth of the RAM, at least 4 and at most 8 GiB, to everything else."""
    return (ram - min(8 * GIB, max(4 * GIB, ram // 8))) // GIB
