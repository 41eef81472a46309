"""The checks of `harness doctor`: problems of this machine for serving models, each with its fix and its source."""

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from decimal import Decimal
from pathlib import Path

from msgspec import Struct

from harness.engines import VLLM_DEFAULT_UTILIZATION, Standing, vllm_accepts
from harness.machine import gpus
from harness.machine.findings import Finding, Level, make_finding
from harness.machine.gpus import Gpu
from harness.machine.memory import PAGE_BYTES, Pool, compute_share, format_pool, list_pools
from harness.units import GIB, gib

_READY: tuple[Standing, ...] = ("validated", "supported", "code")


def gpu_findings(root: Path) -> Iterator[Finding]:
    """Yield the findings about the GPUs; one only without a GPU."""
    counts = Counter(str(gpu["target"]) for gpu in gpus.list_gpus(root))
    if not counts:
        yield _explain_missing_gpu(root)
        return
    descriptions = []
    for target, count in counts.items():
        row = gpus.find_target(target)
        units = {gpu["compute_units"] for gpu in gpus.list_gpus(root) if gpu["target"] == target} - {None}
        each = f", {units.pop()} compute units" + (" each" if count > 1 else "") if len(units) == 1 else ""
        times = f"{count} x " if count > 1 else ""
        descriptions.append(f"{times}{target}: {row.family if row else 'family unknown'}{each}")
    yield make_finding("gpu.present", "ok", "; ".join(descriptions))
    for target in dict.fromkeys(str(gpu["target"]) for gpu in gpus.select_serving_gpus(list(gpus.list_gpus(root)))):
        yield _check_target(target)


def _explain_missing_gpu(root: Path) -> Finding:
    cards = list(gpus.pci_cards(root))
    amd_card = next((card for card in cards if card.vendor == gpus.AMD), None)
    if amd_card is None:
        other = ""
        if any(card.vendor == gpus.NVIDIA for card in cards):
            other = ", only one of NVIDIA, for which this project has no servers"
        elif (root / "dev/dxg").exists():
            other = ": WSL offers /dev/dxg in its place, which the templates do not use"
        return make_finding("gpu.present", "blocker", f"there is no AMD GPU{other}")
    what = f"the AMD GPU at {amd_card.slot} (1002:{amd_card.device:04x}) is not known to the compute driver"
    if (root / "sys/module/amdgpu").is_dir():
        return make_finding("gpu.driver", "blocker", f"{what}, though amdgpu is loaded", "not-known")
    case = "nomodeset" if "nomodeset" in (gpus.read_sysfs(root / "proc/cmdline") or "").split() else "not-loaded"
    return make_finding("gpu.driver", "blocker", f"{what}: amdgpu is not loaded", case)


def _check_target(target: str) -> Finding:
    """Return the support of the servers for a GPU target."""
    row, checked, columns = gpus.find_target(target), gpus.read_gfx_table().checked, gpus.support_columns()
    if row is None:
        fact = f"{target} is not in the table of {checked}: no server is known to have code for it"
        return make_finding("gpu.target", "warning", fact, "nothing")
    groups = []
    for standing, label in gpus.STANDING_LABELS.items():  # the best first
        titles = [column.title for key, column in columns.items() if row.standing(key) == standing]
        if titles:
            groups.append(f"{label}: {', '.join(titles)}")
    fact = f"{target} ({row.architecture}) on {checked}; {'; '.join(groups)}"
    ready = [column for key, column in columns.items() if row.standing(key) in _READY]
    if any(column.batches for column in ready):
        return make_finding("gpu.target", "ok", fact)
    is_named = any(target in column.targets for column in columns.values())
    return make_finding("gpu.target", "warning", fact, "single" if ready else "untried" if is_named else "nothing")


GB = 10**9
IMAGE_BYTES_RANGE = (10 * GB, 40 * GB)  # below the first no ROCm image fits, above the second each of them does


class DockerEngine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts of a Docker Engine. Unknown is None."""

    host: str | None = None  # its machine, if it is another one
    named_by: str = "DOCKER_HOST"  # the source of `host`, such as a Docker context
    problem: str | None = None  # why it cannot be used
    remedy: str = ""
    rootless: bool = False
    desktop: bool = False
    image_folder: str | None = None  # where it keeps images
    free_bytes: int | None = None  # on that folder's disk, on this machine
    stale: list[str] = []  # leftovers of killed runs


def engine_findings(engine: DockerEngine, *, gpu_count: int) -> Iterator[Finding]:
    """Yield the findings about the Docker Engine of a machine with `gpu_count` GPUs."""
    if engine.host is not None:
        unknown = "what follows is said by its Docker Engine, and nothing is known of its GPU, kernel and memory"
        fact = f"{engine.named_by} names {engine.host}: {unknown}"
        yield make_finding("docker.remote", "warning", fact, host=engine.host)
    if engine.problem is not None:
        fact, case = f"{engine.problem}: servers in containers cannot run", "known" if engine.remedy else "unknown"
        yield make_finding("docker.reachable", "blocker", fact, case, remedy=engine.remedy)
        return
    yield make_finding("docker.reachable", "ok", "the Docker Engine answers")
    if engine.desktop and gpu_count:
        fact = "the engine of Docker Desktop has no access to this machine's GPU"
        yield make_finding("docker.desktop", "blocker", fact)
    if engine.rootless:
        fact = "the engine runs without root: containers lose the groups of devices"
        yield make_finding("docker.rootless", "warning", fact)
    else:
        yield make_finding("docker.rootless", "ok", "the engine runs as root")
    if engine.free_bytes is not None:
        path = engine.image_folder or "Docker's data-root"
        fact, need = f"{engine.free_bytes / GB:.0f} GB free for images in {path}", "ROCm images need 10 to 35 GB"
        min_bytes, enough_bytes = IMAGE_BYTES_RANGE
        if engine.free_bytes < min_bytes:
            yield make_finding("docker.disk", "blocker", f"only {fact}; {need}", path=path)
        elif engine.free_bytes < enough_bytes:
            yield make_finding("docker.disk", "warning", f"{fact}; {need}, models their own", path=path)
        else:
            yield make_finding("docker.disk", "ok", fact)
    if engine.stale:
        more = f" and {len(engine.stale) - 3} more" if len(engine.stale) > 3 else ""
        yield make_finding("docker.stale", "warning", f"leftovers of killed runs: {', '.join(engine.stale[:3])}{more}")
    else:
        yield make_finding("docker.stale", "ok", "no leftovers of killed runs")


def access_findings(root: Path, *, rootless: bool = False) -> Iterator[Finding]:
    """Yield the findings about device nodes; none without a GPU.

    An engine that runs as root opens them for its containers, for any user. A `rootless` engine opens them as
    the user, with the access lists of the file system.
    """
    if next(gpus.list_gpus(root), None) is None:
        return
    nodes = [str(gpu["render_node"]) for gpu in gpus.list_gpus(root) if gpu["render_node"]]
    yield from _check_node(root, "access.kfd", "/dev/kfd", rootless)
    yield from _check_render_nodes(root, nodes, rootless)
    if groups := gpus.find_device_groups(root):
        fact = ", ".join(_describe_group(root, group) for group in groups)
        yield make_finding("access.groups", "ok", f"containers get the groups {fact}, by number")
    elif (root / "dev/kfd").exists() and not (root / "dev/kfd").stat().st_mode & stat.S_IWOTH:
        yield make_finding("access.groups", "warning", "the device nodes belong to the group root")


def _check_node(root: Path, id: str, name: str, rootless: bool) -> Iterator[Finding]:
    path = root / name.lstrip("/")
    if not path.exists():
        yield make_finding(id, "blocker", f"there is no {name}", "missing")
        return
    group = path.stat().st_gid
    node = f"{name}: mode {path.stat().st_mode & 0o777:04o}, group {_describe_group(root, group)}"
    if may_open(path):
        yield make_finding(id, "ok", node)
        return
    level: Level = "warning"
    fact = f"this user may not open {node}; containers of an engine that runs as root may, servers that you start "
    fact += "yourself may not"
    if rootless:
        level, fact = "blocker", f"the rootless engine, which runs as this user, may not open {node}"
    yield make_finding(id, level, fact, "denied", groups=_read_group_names(root).get(group, str(group)))


def _check_render_nodes(root: Path, nodes: list[str], rootless: bool) -> Iterator[Finding]:
    missing = [node for node in nodes if not (root / node.lstrip("/")).exists()]
    if missing or not nodes:
        what = f"there is no {', '.join(missing)}" if missing else "no GPU has a render node"
        yield make_finding("access.render", "blocker", what, "missing")
        return
    closed = [node for node in nodes if not may_open(root / node.lstrip("/"))]
    if len(nodes) == 1 or closed:
        yield from _check_node(root, "access.render", closed[0] if closed else nodes[0], rootless)
    else:
        group = _describe_group(root, (root / nodes[0].lstrip("/")).stat().st_gid)
        yield make_finding("access.render", "ok", f"{len(nodes)} render nodes from {nodes[0]} on, group {group}")


def may_open(path: Path) -> bool:
    """Check that this user may read and write a file."""
    return os.access(path, os.R_OK | os.W_OK)


def _describe_group(root: Path, gid: int) -> str:
    name = _read_group_names(root).get(gid)
    return f"{gid} ({name})" if name else str(gid)


def _read_group_names(root: Path) -> dict[int, str]:
    """Return the names of groups by number. Only for texts: an image has other names than the host."""
    lines = re.findall(r"^([^:\n]+):[^:\n]*:(\d+):", gpus.read_sysfs(root / "etc/group") or "", re.MULTILINE)
    return {int(gid): name for name, gid in lines}


_HEX = re.compile(r"(?:0x)?[0-9a-f]+", re.IGNORECASE)
_CWSR, _HANGS = "cwsr_size and ctl_stack_size", "ROCm crashes or hangs"
_CWSR_SINCE = (6, 18, 4)
_BAD_MES = 0x83


def kernel_findings(root: Path) -> Iterator[Finding]:
    """Yield the findings about the kernel, the GPU's firmware and the power profile."""
    yield from check_cwsr(root)
    apus = [gpu for gpu in gpus.list_gpus(root) if gpu["target"] in ("gfx1150", "gfx1151")]
    versions = [gpu["firmware"].get("mes", "") for gpu in apus]
    mes = sorted({int(version, 16) for version in versions if _HEX.fullmatch(version)})
    if _BAD_MES in mes:
        yield make_finding("kernel.firmware", "warning", "MES firmware 0x83 is loaded, that of linux-firmware 20251125")
    elif mes:
        yield make_finding("kernel.firmware", "ok", ", ".join(f"MES firmware {version:#x}" for version in mes))
    profile = gpus.read_sysfs(root / "sys/firmware/acpi/platform_profile")
    if profile and next(gpus.list_gpus(root), None) is not None:
        level: Level = "ok" if profile == "performance" else "warning"
        yield make_finding("kernel.profile", level, f"the power profile is {profile}")


def check_cwsr(root: Path) -> Iterator[Finding]:
    """On gfx1151, check that the driver exports two sizes; without them ROCm writes beyond its memory."""
    known = [gpu["cwsr_sizes_known"] for gpu in gpus.list_gpus(root) if gpu["target"] == "gfx1151"]
    if not known:
        return
    fix = "the CWSR fix for gfx1151"
    if all(known):
        yield make_finding("kernel.cwsr", "ok", f"the kernel has {fix} ({_CWSR})")
        return
    version = gpus.read_sysfs(root / "proc/sys/kernel/osrelease") or "of unknown version"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _CWSR_SINCE:
        yield make_finding("kernel.cwsr", "blocker", f"Linux {version} lacks {fix} (no {_CWSR}): {_HANGS}", "old")
        return
    driver = gpus.read_sysfs(root / "sys/module/amdgpu/version")  # the kernel's own driver has none
    other = f"amdgpu {driver} of amdgpu-dkms" if driver else "another one, such as that of amdgpu-dkms,"
    fact = f"Linux {version} has {fix}, but its driver does not tell both of {_CWSR}: {other} has replaced it"
    yield make_finding("kernel.cwsr", "blocker", f"{fact}, and {_HANGS}", "replaced")


def process_findings(root: Path) -> Iterator[Finding]:
    """Yield the findings about inference engines that run on this machine."""
    serving = gpus.find_engine_processes(root)
    orphaned = [process for process in serving if process.orphaned]
    if orphaned:
        bytes_by_pid = {process.pid: process.bytes for process in gpus.find_gpu_processes(root).processes}
        sizes = {pid: f", holds {gib(size)}" for pid, size in bytes_by_pid.items()}
        names = [f"{process.name} (pid {process.pid}{sizes.get(process.pid, '')})" for process in orphaned]
        pids = " ".join(str(process.pid) for process in orphaned)
        yield make_finding("processes.orphans", "warning", f"orphaned engine: {', '.join(names)}", pids=pids)
    else:
        yield make_finding("processes.orphans", "ok", "no orphaned engine")
    names = [f"{process.name} (pid {process.pid})" for process in serving if not process.orphaned]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        yield make_finding("processes.engines", "warning", f"run already: {', '.join(names[:4])}{more}")


TEMPLATE_SHARE = Decimal("0.75")  # gpu_memory_utilization of the template vllm-rocm
_SMALL_CARVE_OUT = 8 * GIB
_LARGE_BYTES = GIB  # of one process
_MIN_LISTED_BYTES = 64 << 20


def memory_findings(root: Path) -> Iterator[Finding]:
    """Yield the findings about the memory of the GPUs that serve models; none without a GPU."""
    serving_gpus = gpus.select_serving_gpus(list(gpus.list_gpus(root)))
    pools = list_pools(root, serving_gpus)
    if not pools:
        return
    level: Level = "ok" if all(pool.free_bytes is not None for pool in pools) else "warning"
    yield make_finding("memory.pool", level, "; ".join(map(format_pool, pools)))
    yield from _check_utilization(pools)
    yield _check_gpu_processes(root, sum(pool.used_bytes or 0 for pool in pools))
    for pool, gpu in zip(pools, serving_gpus, strict=True):
        if gpu["integrated"]:
            yield from _check_apu_sizes(root, pool, gpu)


def _check_utilization(pools: list[Pool]) -> Iterator[Finding]:
    """Yield the largest utilization that is safe on all known pools, and whether the defaults fit."""
    known = [pool for pool in pools if pool.free_bytes is not None]
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
    template_fits = all(_is_accepted(pool, TEMPLATE_SHARE) for pool in known)
    fact += f"; {default} " + ("does not fit" if template_fits else f"and the templates' {TEMPLATE_SHARE} do not fit")
    yield make_finding("memory.fraction", "warning", fact, "less" if safe else "none", fraction=safe)


def _is_accepted(pool: Pool, share: Decimal) -> bool:
    free, available, total = pool.free_bytes, pool.host_available_bytes, pool.total_bytes
    assert free is not None and total is not None
    return vllm_accepts(free if available is None else min(free, available), total, share)


def _check_gpu_processes(root: Path, used_bytes: int) -> Finding:
    """Return the processes that use GPU memory, without orphaned engines, which have their own finding."""
    orphaned = {process.pid for process in gpus.find_engine_processes(root) if process.orphaned}
    processes, unreadable = gpus.find_gpu_processes(root)
    listed = [process for process in processes if process.bytes >= _MIN_LISTED_BYTES and process.pid not in orphaned][
        :5
    ]
    unseen = f"; {unreadable} processes of other users cannot be seen (sudo shows them)" if unreadable else ""
    if not listed:
        is_much = used_bytes > _LARGE_BYTES
        fact = f"{gib(used_bytes)} in use, by no process that can be seen" if is_much else "no process holds much"
        return make_finding("memory.holders", "ok", fact + unseen)
    sizes = {f"{process.name} (pid {process.pid})": process.bytes for process in listed}
    fact = f"held by {', '.join(f'{name} {gib(size)}' for name, size in sizes.items())}{unseen}"
    large = [name for name, size in sizes.items() if size >= _LARGE_BYTES]
    return make_finding("memory.holders", "warning" if large else "ok", fact, names=", ".join(large))


def _check_apu_sizes(root: Path, pool: Pool, gpu: Gpu) -> Iterator[Finding]:
    """Yield settings of an APU that give its GPU too little memory, or promise too much."""
    ram, vram, promised = gpus.read_meminfo(root / "proc/meminfo").get("MemTotal"), gpu["vram_bytes"], gpu["gtt_bytes"]
    # The GTT should leave an eighth of the RAM, at least 4 and at most 8 GiB, to everything else.
    max_gib = None if ram is None else (ram - min(8 * GIB, max(4 * GIB, ram // 8))) // GIB
    limit_pages = gpus.read_number(root / "sys/module/ttm/parameters/pages_limit")
    gtt = promised if limit_pages is None or promised is None else min(promised, limit_pages * PAGE_BYTES)
    if promised is not None and gtt is not None and gtt < promised:
        setting = re.search(r"\bamdgpu\.gttsize=(\d+)", gpus.read_sysfs(root / "proc/cmdline") or "")
        source = f"amdgpu.gttsize={setting[1]}" if setting else "the driver"
        fact = f"{source} promises a GTT of {gib(promised)}, but ttm.pages_limit gives out {gib(gtt)}"
        size = promised if max_gib is None else min(promised, max(gtt, max_gib * GIB))  # never more than there is
        fact, pages = f"{fact}: programs see more free memory than there is", size // PAGE_BYTES
        yield make_finding("memory.gttsize", "warning", fact, pages=pages)
    if ram is None or max_gib is None or vram is None or gtt is None or not pool.unified:
        return
    if vram < _SMALL_CARVE_OUT and gtt < 0.55 * ram and gtt < max_gib * GIB:
        reason = "a limit" if gtt < (promised or 0) else "its default size"
        yield make_finding(
            "memory.half",
            "warning",
            f"the GPU gets {gib(gtt)} of {gib(ram)}: GTT has {reason} of half the RAM, the carve-out is {gib(vram)}",
            pages=max_gib * GIB // PAGE_BYTES,
            size=f"{max_gib} GiB",
            left=gib(ram - max_gib * GIB),
            gib=max_gib,
        )


def diagnose(root: Path = Path("/"), docker: DockerEngine | None = None) -> list[Finding]:
    """Return all findings under `root`, by topic.

    `docker`: facts of the Docker Engine, or None to leave it out. For an engine on another machine, only the findings
    about that engine are returned.
    """
    if docker is not None and docker.host is not None:
        return list(engine_findings(docker, gpu_count=0))
    rootless = docker is not None and docker.rootless
    findings = [*gpu_findings(root), *memory_findings(root), *kernel_findings(root)]
    findings += access_findings(root, rootless=rootless)
    if docker is not None:
        findings += engine_findings(docker, gpu_count=sum(1 for _ in gpus.list_gpus(root)))
    return [*findings, *process_findings(root)]


def find_device_blockers(root: Path, devices: Collection[str], *, rootless: bool = False) -> Iterator[Finding]:
    """Yield why a container cannot use these device nodes of the host. Fast: it reads a few small files.

    /dev/kfd is ROCm's, and needs the compute driver; /dev/dri alone is enough for Vulkan. Other devices are ignored.
    """
    if "/dev/kfd" in devices:
        findings = (*gpu_findings(root), *check_cwsr(root), *access_findings(root, rootless=rootless))
        yield from (finding for finding in findings if finding.level == "blocker")
    nodes = sorted(path.name for path in (root / "dev/dri").glob("renderD*"))
    if "/dev/dri" in devices and "/dev/kfd" not in devices and not nodes:
        yield make_finding("access.render", "blocker", "there is no render node in /dev/dri", "missing")
    for node in devices:
        if node.startswith("/dev/dri/") and not (root / node.lstrip("/")).exists():
            fact = f"there is no {node} (render nodes: {', '.join(nodes) or 'none'})"
            yield make_finding("access.render", "blocker", fact, "missing")


def find_engine_blockers(docker: DockerEngine) -> Iterator[Finding]:
    """Yield why a working engine cannot run a server on the GPU."""
    if docker.problem is None:
        findings = engine_findings(docker, gpu_count=1)
        yield from (finding for finding in findings if finding.level == "blocker")
