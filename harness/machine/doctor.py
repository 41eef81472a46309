"""Problems of this machine for serving models: findings, each with its fix and its source."""

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from decimal import Decimal
from pathlib import Path

from msgspec import Struct

from harness.engines import VLLM_DEFAULT_UTILIZATION, Standing, vllm_accepts
from harness.machine.findings import Finding, Level, make_finding
from harness.machine.gpus import (
    AMD,
    NVIDIA,
    STANDING_LABELS,
    GfxTarget,
    Gpu,
    GpuProcess,
    GpuProcesses,
    find_device_groups,
    find_engine_processes,
    find_gpu_processes,
    find_target,
    list_gpus,
    pci_cards,
    read_gfx_table,
    read_meminfo,
    read_number,
    read_sysfs,
    select_serving_gpus,
    support_columns,
)
from harness.machine.memory import PAGE_BYTES, Pool, compute_share, format_pool, list_pools
from harness.units import GIB, gib

_READY: tuple[Standing, ...] = ("validated", "supported", "code")


def gpu_findings(root: Path) -> Iterator[Finding]:
    """Findings about the GPUs; without a GPU a single one."""
    counts = Counter(str(gpu["target"]) for gpu in list_gpus(root))
    if not counts:
        yield _explain_missing_gpu(root)
        return
    yield make_finding("gpu.present", "ok", _describe_gpus(root, counts))
    for target in dict.fromkeys(str(card["target"]) for card in select_serving_gpus(list(list_gpus(root)))):
        yield _check_target(target)


def _describe_gpus(root: Path, counts: Counter[str]) -> str:
    parts = []
    for target, count in counts.items():
        row = find_target(target)
        units = {gpu["compute_units"] for gpu in list_gpus(root) if gpu["target"] == target} - {None}
        each = f", {units.pop()} compute units" + (" each" if count > 1 else "") if len(units) == 1 else ""
        parts.append(f"{f'{count} x ' if count > 1 else ''}{target}: {row.family if row else 'family unknown'}{each}")
    return "; ".join(parts)


def _explain_missing_gpu(root: Path) -> Finding:
    found = list(pci_cards(root))
    amd = [card for card in found if card.vendor == AMD]
    if not amd:
        other = ""
        if any(card.vendor == NVIDIA for card in found):
            other = ", only one of NVIDIA, for which this project has no servers"
        elif (root / "dev/dxg").exists():
            other = ": WSL offers /dev/dxg in its place, which the templates do not use"
        return make_finding("gpu.present", "blocker", f"there is no AMD GPU{other}")
    card = amd[0]
    what = f"the AMD GPU at {card.slot} (1002:{card.device:04x}) is not known to the compute driver"
    if (root / "sys/module/amdgpu").is_dir():
        return make_finding("gpu.driver", "blocker", f"{what}, though amdgpu is loaded", "not-known")
    case = "nomodeset" if "nomodeset" in (read_sysfs(root / "proc/cmdline") or "").split() else "not-loaded"
    return make_finding("gpu.driver", "blocker", f"{what}: amdgpu is not loaded", case)


def _check_target(target: str) -> Finding:
    row, checked = find_target(target), read_gfx_table().checked
    if row is None:
        fact = f"{target} is not in the table of {checked}: no server is known to have code for it"
        return make_finding("gpu.target", "warning", fact, "nothing")
    fact = f"{target} ({row.architecture}) on {checked}; {_list_standings(row)}"
    ready = [column for key, column in support_columns().items() if row.standing(key) in _READY]
    if any(column.batches for column in ready):
        return make_finding("gpu.target", "ok", fact)
    named = any(target in column.targets for column in support_columns().values())
    return make_finding("gpu.target", "warning", fact, "single" if ready else "untried" if named else "nothing")


def _list_standings(row: GfxTarget) -> str:
    """Servers by their support, the best first."""
    groups = []
    for standing, words in STANDING_LABELS.items():
        titles = [column.title for key, column in support_columns().items() if row.standing(key) == standing]
        if titles:
            groups.append(f"{words}: {', '.join(titles)}")
    return "; ".join(groups)


GB = 10**9
IMAGE_BYTES_RANGE = (10 * GB, 40 * GB)  # below the first no ROCm image fits, above the second any of them does


class DockerEngine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts of a Docker Engine. Unknown is None; `problem`: why it cannot be used."""

    host: str | None = None  # its machine, if it is another one
    named_by: str = "DOCKER_HOST"  # the source of `host`, such as a Docker context
    problem: str | None = None
    remedy: str = ""
    rootless: bool = False
    desktop: bool = False
    image_folder: str | None = None  # where it keeps images
    free_bytes: int | None = None  # on that folder's disk, on this machine
    stale: list[str] = []  # leftovers of killed runs


def engine_findings(engine: DockerEngine, *, gpus: int) -> Iterator[Finding]:
    """Findings about the engine, for a machine with so many GPUs."""
    if engine.host is not None:
        here = "what follows is said by its Docker Engine, and nothing is known of its GPU, kernel and memory"
        yield make_finding(
            "docker.remote", "warning", f"{engine.named_by} names {engine.host}: {here}", host=engine.host
        )
    if engine.problem is not None:
        fact, case = f"{engine.problem}: servers in containers cannot run", "known" if engine.remedy else "unknown"
        yield make_finding("docker.reachable", "blocker", fact, case, remedy=engine.remedy)
        return
    yield make_finding("docker.reachable", "ok", "the Docker Engine answers")
    if engine.desktop and gpus:
        yield make_finding(
            "docker.desktop", "blocker", "the engine of Docker Desktop has no access to this machine's GPU"
        )
    if engine.rootless:
        fact = "the engine runs without root: containers lose the groups of devices"
        yield make_finding("docker.rootless", "warning", fact)
    else:
        yield make_finding("docker.rootless", "ok", "the engine runs as root")
    yield from _check_disk(engine)
    if engine.stale:
        more = f" and {len(engine.stale) - 3} more" if len(engine.stale) > 3 else ""
        yield make_finding("docker.stale", "warning", f"leftovers of killed runs: {', '.join(engine.stale[:3])}{more}")
    else:
        yield make_finding("docker.stale", "ok", "no leftovers of killed runs")


def _check_disk(engine: DockerEngine) -> Iterator[Finding]:
    if engine.free_bytes is None:
        return
    path = engine.image_folder or "Docker's data-root"
    fact = f"{engine.free_bytes / GB:.0f} GB free for images in {path}"
    none, enough = IMAGE_BYTES_RANGE
    if engine.free_bytes < none:
        yield make_finding("docker.disk", "blocker", f"only {fact}; ROCm images need 10 to 35 GB", path=path)
    elif engine.free_bytes < enough:
        yield make_finding(
            "docker.disk", "warning", f"{fact}; ROCm images need 10 to 35 GB, models their own", path=path
        )
    else:
        yield make_finding("docker.disk", "ok", fact)


def access_findings(root: Path, *, rootless: bool = False) -> Iterator[Finding]:
    """Findings about device nodes; none without a GPU.

    Containers of an engine that runs as root open them whatever the user; those of a rootless engine open them as
    the user, access lists of the file system included.
    """
    nodes = [str(gpu["render_node"]) for gpu in list_gpus(root) if gpu["render_node"]]
    if next(list_gpus(root), None) is None:
        return
    yield from _check_node(root, "access.kfd", "/dev/kfd", rootless)
    yield from _check_render_nodes(root, nodes, rootless)
    if groups := find_device_groups(root):
        names = _read_group_names(root)
        fact = ", ".join(f"{group} ({names[group]})" if group in names else str(group) for group in groups)
        yield make_finding("access.groups", "ok", f"containers get the groups {fact}, by number")
    elif (root / "dev/kfd").exists() and not (root / "dev/kfd").stat().st_mode & stat.S_IWOTH:
        yield make_finding("access.groups", "warning", "the device nodes belong to the group root")


def _check_node(root: Path, id: str, name: str, rootless: bool) -> Iterator[Finding]:
    path = root / name.lstrip("/")
    if not path.exists():
        yield make_finding(id, "blocker", f"there is no {name}", "missing")
        return
    owner = f"{name}: mode {path.stat().st_mode & 0o777:04o}, group {_describe_group(root, path)}"
    if may_open(path):
        yield make_finding(id, "ok", owner)
        return
    group = _read_group_names(root).get(path.stat().st_gid, str(path.stat().st_gid))
    if rootless:
        fact = f"the rootless engine, which runs as this user, may not open {owner}"
        yield make_finding(id, "blocker", fact, "denied", groups=group)
    else:
        rest = "containers of an engine that runs as root may, servers that you start yourself may not"
        yield make_finding(id, "warning", f"this user may not open {owner}; {rest}", "denied", groups=group)


def _check_render_nodes(root: Path, nodes: list[str], rootless: bool) -> Iterator[Finding]:
    gone = [node for node in nodes if not (root / node.lstrip("/")).exists()]
    if gone or not nodes:
        what = f"there is no {', '.join(gone)}" if gone else "no GPU has a render node"
        yield make_finding("access.render", "blocker", what, "missing")
        return
    closed = [node for node in nodes if not may_open(root / node.lstrip("/"))]
    if len(nodes) == 1 or closed:
        yield from _check_node(root, "access.render", closed[0] if closed else nodes[0], rootless)
    else:
        group = _describe_group(root, root / nodes[0].lstrip("/"))
        yield make_finding("access.render", "ok", f"{len(nodes)} render nodes from {nodes[0]} on, group {group}")


def may_open(path: Path) -> bool:
    """Whether this user may read and write it."""
    return os.access(path, os.R_OK | os.W_OK)


def _describe_group(root: Path, path: Path) -> str:
    gid = path.stat().st_gid
    name = _read_group_names(root).get(gid)
    return f"{gid} ({name})" if name else str(gid)


def _read_group_names(root: Path) -> dict[int, str]:
    """Names of groups by number, for display only: they differ between host and image."""
    found = re.findall(r"^([^:\n]+):[^:\n]*:(\d+):", read_sysfs(root / "etc/group") or "", re.MULTILINE)
    return {int(number): name for name, number in found}


_HEX = re.compile(r"(?:0x)?[0-9a-f]+", re.IGNORECASE)
_CWSR, _HANGS = "cwsr_size and ctl_stack_size", "ROCm crashes or hangs"
_CWSR_SINCE = (6, 18, 4)
_BAD_MES = 0x83


def kernel_findings(root: Path) -> Iterator[Finding]:
    """Findings about kernel and power."""
    yield from check_cwsr(root)
    yield from _check_firmware(root)
    profile = read_sysfs(root / "sys/firmware/acpi/platform_profile")
    if profile and next(list_gpus(root), None) is not None:
        level: Level = "ok" if profile == "performance" else "warning"
        yield make_finding("kernel.profile", level, f"the power profile is {profile}")


def check_cwsr(root: Path) -> Iterator[Finding]:
    """On gfx1151, check two sizes; without them ROCm saves waves into memory that it has not reserved."""
    known = [gpu["cwsr_sizes_known"] for gpu in list_gpus(root) if gpu["target"] == "gfx1151"]
    if not known:
        return
    fix = "the CWSR fix for gfx1151"
    if all(known):
        yield make_finding("kernel.cwsr", "ok", f"the kernel has {fix} ({_CWSR})")
        return
    version = read_sysfs(root / "proc/sys/kernel/osrelease") or "of unknown version"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _CWSR_SINCE:
        yield make_finding("kernel.cwsr", "blocker", f"Linux {version} lacks {fix} (no {_CWSR}): {_HANGS}", "old")
        return
    driver = read_sysfs(root / "sys/module/amdgpu/version")  # the kernel's own driver has none
    other = f"amdgpu {driver} of amdgpu-dkms" if driver else "another one, such as that of amdgpu-dkms,"
    fact = f"Linux {version} has {fix}, but its driver does not tell both of {_CWSR}: {other} has replaced it"
    yield make_finding("kernel.cwsr", "blocker", f"{fact}, and {_HANGS}", "replaced")


def _check_firmware(root: Path) -> Iterator[Finding]:
    of_apus = [gpu["firmware"].get("mes", "") for gpu in list_gpus(root) if gpu["target"] in ("gfx1150", "gfx1151")]
    mes = sorted({int(version, 16) for version in of_apus if _HEX.fullmatch(version)})
    if _BAD_MES in mes:
        yield make_finding("kernel.firmware", "warning", "MES firmware 0x83 is loaded, that of linux-firmware 20251125")
    elif mes:
        yield make_finding("kernel.firmware", "ok", ", ".join(f"MES firmware {version:#x}" for version in mes))


def process_findings(root: Path) -> Iterator[Finding]:
    """Findings about engines that run on this machine."""
    serving = find_engine_processes(root)
    orphaned = [process for process in serving if process.orphaned]
    held = {holder.pid: holder.bytes for holder in find_gpu_processes(root).found} if orphaned else {}
    if orphaned:
        named = [
            f"{one.name} (pid {one.pid}{f', holds {gib(held[one.pid])}' if one.pid in held else ''})"
            for one in orphaned
        ]
        listed = " ".join(str(process.pid) for process in orphaned)
        yield make_finding("processes.orphans", "warning", f"orphaned engine: {', '.join(named)}", pids=listed)
    else:
        yield make_finding("processes.orphans", "ok", "no orphaned engine")
    others = [process for process in serving if process not in orphaned]
    if others:
        named = [f"{process.name} (pid {process.pid})" for process in others]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        yield make_finding("processes.engines", "warning", f"run already: {', '.join(named[:4])}{more}")


TEMPLATE_SHARE = Decimal("0.75")  # gpu_memory_utilization of the template vllm-rocm
_SMALL_CARVE_OUT = 8 * GIB
_LARGE_BYTES = GIB  # held by one process
_MIN_LISTED_BYTES = 64 << 20


def memory_findings(root: Path) -> Iterator[Finding]:
    """Findings about the memory of the GPUs that work; none without a GPU."""
    cards = select_serving_gpus(list(list_gpus(root)))
    found = list_pools(root, cards)
    if not found:
        return
    seen = find_gpu_processes(root)
    level: Level = "ok" if all(pool.free_bytes is not None for pool in found) else "warning"
    yield make_finding("memory.pool", level, "; ".join(map(format_pool, found)))
    yield from _check_utilization(found)
    yield from _check_gpu_processes(root, seen, found)
    for pool, card in zip(found, cards, strict=True):
        if card["integrated"]:
            yield from _check_apu_sizes(root, pool, card)


def _check_utilization(found: list[Pool]) -> Iterator[Finding]:
    """The largest share that is safe on all known pools, and whether the defaults of vLLM and the templates fit."""
    known = [pool for pool in found if pool.free_bytes is not None]
    if not known:
        return
    safe = min(compute_share([pool]).utilization or Decimal(0) for pool in known)
    fact = f"gpu_memory_utilization is safe up to {safe}"
    if not safe:
        fact = "no gpu_memory_utilization is safe: nothing is left for vLLM"
    default = f"vLLM's default of {VLLM_DEFAULT_UTILIZATION}"
    if all(_is_accepted(pool, VLLM_DEFAULT_UTILIZATION) for pool in known):
        fits = "fits" if safe >= VLLM_DEFAULT_UTILIZATION else "is more, and may just start"
        yield make_finding("memory.fraction", "ok", f"{fact}; {default} {fits}")
        return
    neither = not all(_is_accepted(pool, TEMPLATE_SHARE) for pool in known)
    fact += f"; {default} and the templates' {TEMPLATE_SHARE} do not fit" if neither else f"; {default} does not fit"
    yield make_finding("memory.fraction", "warning", fact, "less" if safe else "none", fraction=safe)


def _is_accepted(pool: Pool, share: Decimal) -> bool:
    free, available, total = pool.free_bytes, pool.host_available_bytes, pool.total_bytes
    assert free is not None and total is not None
    return vllm_accepts(free if available is None else min(free, available), total, share)


def _check_gpu_processes(root: Path, seen: GpuProcesses, found: list[Pool]) -> Iterator[Finding]:
    orphaned = {
        process.pid for process in find_engine_processes(root) if process.orphaned
    }  # those have a finding of their own
    shown = [holder for holder in seen.found if holder.bytes >= _MIN_LISTED_BYTES and holder.pid not in orphaned][:5]
    unseen = f"; {seen.unseen} processes of other users cannot be seen (sudo shows them)" if seen.unseen else ""
    much = [holder for holder in shown if holder.bytes >= _LARGE_BYTES]
    if much:
        names = ", ".join(f"{holder.name} (pid {holder.pid})" for holder in much)
        yield make_finding("memory.holders", "warning", f"held by {_list_processes(shown)}{unseen}", names=names)
        return
    used = sum(pool.used_bytes or 0 for pool in found)
    if shown:
        yield make_finding("memory.holders", "ok", f"held by {_list_processes(shown)}{unseen}")
    else:
        unknown = (
            f"{gib(used)} in use, by no process that can be seen" if used > _LARGE_BYTES else "no process holds much"
        )
        yield make_finding("memory.holders", "ok", f"{unknown}{unseen}")


def _list_processes(shown: list[GpuProcess]) -> str:
    return ", ".join(f"{holder.name} (pid {holder.pid}) {gib(holder.bytes)}" for holder in shown)


def _check_apu_sizes(root: Path, pool: Pool, card: Gpu) -> Iterator[Finding]:
    """Settings of an APU that give too little or too much memory."""
    ram, vram, stated = read_meminfo(root / "proc/meminfo").get("MemTotal"), card["vram_bytes"], card["gtt_bytes"]
    max_gib = None if ram is None else _max_gtt_gib(ram)
    limit = read_number(root / "sys/module/ttm/parameters/pages_limit")
    gtt = stated if limit is None or stated is None else min(stated, limit * PAGE_BYTES)
    if stated is not None and gtt is not None and gtt < stated:
        wanted = re.search(r"\bamdgpu\.gttsize=(\d+)", read_sysfs(root / "proc/cmdline") or "")
        asked = f"amdgpu.gttsize={wanted[1]}" if wanted else "the driver"
        size = stated if max_gib is None else min(stated, max(gtt, max_gib * GIB))  # never more than there is
        yield make_finding(
            "memory.gttsize",
            "warning",
            f"{asked} promises a GTT of {gib(stated)}, but ttm.pages_limit gives out {gib(gtt)}: "
            "programs see more free memory than there is",
            pages=size // PAGE_BYTES,
        )
    if ram is None or max_gib is None or vram is None or gtt is None or not pool.unified:
        return
    if vram < _SMALL_CARVE_OUT and gtt < 0.55 * ram and gtt < max_gib * GIB:
        yield make_finding(
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


def diagnose(root: Path = Path("/"), docker: DockerEngine | None = None) -> list[Finding]:
    """All findings under `root`, by topic.

    `docker` is what the engine says of itself; None when it was not asked. With an engine on another machine there
    are only findings about that engine.
    """
    if docker is not None and docker.host is not None:
        return list(engine_findings(docker, gpus=0))
    rootless = docker is not None and docker.rootless
    found = [*gpu_findings(root), *memory_findings(root), *kernel_findings(root)]
    found += access_findings(root, rootless=rootless)
    if docker is not None:
        found += engine_findings(docker, gpus=sum(1 for _ in list_gpus(root)))
    return [*found, *process_findings(root)]


def find_device_blockers(root: Path, devices: Collection[str], *, rootless: bool = False) -> Iterator[Finding]:
    """Why a container cannot use these device nodes of the host. Quick: a few small files.

    /dev/kfd is ROCm's, and needs the compute driver; /dev/dri alone is enough for Vulkan. Other devices say nothing.
    """
    if "/dev/kfd" in devices:
        found = (*gpu_findings(root), *check_cwsr(root), *access_findings(root, rootless=rootless))
        yield from (one for one in found if one.level == "blocker")
    nodes = sorted(path.name for path in (root / "dev/dri").glob("renderD*"))
    if "/dev/dri" in devices and "/dev/kfd" not in devices and not nodes:
        yield make_finding("access.render", "blocker", "there is no render node in /dev/dri", "missing")
    for node in devices:
        if node.startswith("/dev/dri/") and not (root / node.lstrip("/")).exists():
            fact = f"there is no {node} (render nodes: {', '.join(nodes) or 'none'})"
            yield make_finding("access.render", "blocker", fact, "missing")


def find_engine_blockers(docker: DockerEngine) -> Iterator[Finding]:
    """Why a working engine cannot run a server on the GPU."""
    if docker.problem is None:
        yield from (one for one in engine_findings(docker, gpus=1) if one.level == "blocker")
