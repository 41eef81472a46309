"""VRAM and GTT: which pool counts, how large it is, what is free of it, and who has the rest."""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from harness.fraction import driver_reserve, safe_utilization
from harness.machine.doctor.finding import Finding, finding
from harness.machine.facts import gpus
from harness.machine.files import gib, meminfo, number, text
from harness.machine.holders import Holder, holders
from harness.machine.pool import PAGE_BYTES, Pool, pools

GIB = 1 << 30
NEEDED_SHARE = 0.75  # gpu_memory_utilization of the template vllm-rocm
_SMALL_CARVE_OUT = 8 * GIB
_MUCH = GIB  # held by one process
_SHOWN = 64 << 20


def check(root: Path) -> Iterator[Finding]:
    """Findings about the memory of the GPUs; none without a GPU."""
    cards, found = list(gpus(root)), pools(root)
    if not found:
        return
    yield _pools(found, cards)
    yield from _holders(root, found)
    for pool, card in zip(found, cards, strict=True):
        if card["integrated"]:
            yield from _sizes(root, pool, card)


def _pools(found: list[Pool], cards: list[dict[str, Any]]) -> Finding:
    free = [(_free(pool), pool.total_bytes) for pool in found]
    shares = [share / total for share, total in free if share is not None and total]
    fact = _one(found[0], cards[0]) if len(found) == 1 else "; ".join(_alike(found))
    if shares and min(shares) < NEEDED_SHARE:
        return finding("memory.pool", "warning", fact, fraction=f"{min(map(_fraction, found)):.2f}")
    return finding("memory.pool", "ok", fact)


def _free(pool: Pool) -> int | None:
    """What can be had of a pool now: pages of GTT are the host's."""
    known = [size for size in (pool.free_bytes, pool.host_available_bytes) if size is not None]
    return min(known) if pool.free_bytes is not None else None


def _fraction(pool: Pool) -> Decimal:
    """What `harness memory` computes; 0 where it finds nothing left, or does not know."""
    if pool.free_bytes is None or pool.total_bytes is None:
        return Decimal(0)
    free = min(pool.free_bytes, pool.total_bytes)
    host = pool.host_available_bytes
    found = safe_utilization(free, pool.total_bytes, reserve=driver_reserve(free), host_available=host)
    return found or Decimal(0)


def _one(pool: Pool, card: dict[str, Any]) -> str:
    if pool.total_bytes is None or pool.free_bytes is None:
        return f"the driver does not tell how large the {pool.kind.upper()} of {pool.render_node} is or what is free"
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
        told = "unknown size" if total_bytes is None else gib(total_bytes)
        left = "unknown" if not free else gib(free[0]) if free[0] == free[-1] else f"{gib(free[0])} to {gib(free[-1])}"
        yield f"{len(members)} x {kind.upper()} of {told}, {left} free"


def _holders(root: Path, found: list[Pool]) -> Iterator[Finding]:
    seen = holders(root)
    shown = [holder for holder in seen.found if holder.bytes >= _SHOWN][:5]
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
        nobody = f"{gib(used)} in use, by no process that can be seen" if used > _MUCH else "no process holds much"
        yield finding("memory.holders", "ok", f"{nobody}{unseen}")


def _list(shown: list[Holder]) -> str:
    return ", ".join(f"{holder.name} (pid {holder.pid}) {gib(holder.bytes)}" for holder in shown)


def _sizes(root: Path, pool: Pool, card: dict[str, Any]) -> Iterator[Finding]:
    """Settings of an APU that give less memory than there is, or more than there is."""
    ram, vram, gtt = meminfo(root, "MemTotal"), card["vram_bytes"], card["gtt_bytes"]
    limit = number(root / "sys/module/ttm/parameters/pages_limit")
    parameters = text(root / "proc/cmdline") or ""
    wanted = re.search(r"\bamdgpu\.gttsize=(\d+)", parameters)
    if limit is not None and gtt is not None and limit * PAGE_BYTES < gtt:
        asked = f"amdgpu.gttsize={wanted[1]}" if wanted else "the driver"
        yield finding(
            "memory.gttsize",
            "warning",
            f"{asked} promises a GTT of {gib(gtt)}, but ttm.pages_limit gives out {gib(limit * PAGE_BYTES)}: "
            "programs see more free memory than there is",
            pages=gtt // PAGE_BYTES,
        )
        return
    if ram is None or vram is None or gtt is None or not pool.unified:
        return
    if gtt > ram:
        yield finding(
            "memory.overcommit",
            "warning",
            f"the GTT of {gib(gtt)} counts, but the carve-out of {gib(vram)} leaves only {gib(ram)} of RAM to fill it",
            carve_out=gib(vram),
        )
    elif vram < _SMALL_CARVE_OUT and gtt < 0.55 * ram:
        most = _most_gib(ram)
        yield finding(
            "memory.half",
            "warning",
            f"the GPU gets {gib(gtt)} of {gib(ram)}: "
            f"GTT has its default size of half the RAM, the carve-out is {gib(vram)}",
            pages=most * GIB // PAGE_BYTES,
            size=f"{most} GiB",
            left=gib(ram - most * GIB),
            gib=most,
        )


def _most_gib(ram: int) -> int:
    """The GTT that leaves an eighth of the RAM, at least 4 and at most 8 GiB, to everything else."""
    return (ram - min(8 * GIB, max(4 * GIB, ram // 8))) // GIB
