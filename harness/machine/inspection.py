"""The checks of `harness doctor`: problems of this machine for serving models, each with its fix and its source."""

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from msgspec import Struct

from harness.base.command_line import command_line
from harness.base.units import GIB, count, gib
from harness.engines import VLLM_DEFAULT_UTILIZATION, Standing, vllm_accepts
from harness.machine import gpus
from harness.machine.findings import Finding, Level, make_finding
from harness.machine.gpus import Gpu
from harness.machine.memory import PAGE_BYTES, Pool, compute_share, format_pool, list_pools

_READY: tuple[Standing, ...] = ("validated", "supported", "code")


def gpu_findings(root: Path, cards: Sequence[Gpu]) -> Iterator[Finding]:
    """Yield the findings about the GPUs (`cards`); one only without a GPU."""
    if not cards:
        yield _explain_missing_gpu(root)
        return
    descriptions = []
    for target, number in Counter(str(gpu["target"]) for gpu in cards).items():
        row = gpus.find_target(target)
        times = f"{number} x " if number > 1 else ""
        descriptions.append(f"{times}{target}: {row.family if row else 'family unknown'}")
    yield make_finding("gpu.present", "ok", "; ".join(descriptions))
    for target in dict.fromkeys(str(gpu["target"]) for gpu in gpus.select_serving_gpus(cards)):
        yield _check_target(target)


def _explain_missing_gpu(root: Path) -> Finding:
    slot = gpus.find_amd_card(root)
    if slot is None:
        return make_finding("gpu.present", "blocker", "there is no AMD GPU")
    loaded = "is loaded" if (root / "sys/module/amdgpu").is_dir() else "is not loaded"
    fact = f"the AMD GPU at {slot} is not known to the compute driver: amdgpu {loaded}"
    return make_finding("gpu.driver", "blocker", fact)


def _check_target(target: str) -> Finding:
    """Return the support of the servers for a GPU target."""
    row, checked, columns = gpus.find_target(target), gpus.read_gfx_table().checked, gpus.support_columns()
    if row is None:
        fact = f"{target} is not in the table of {checked}: no server is known to have code for it"
        return make_finding("gpu.target", "warning", fact)
    groups = []
    for standing, label in gpus.STANDING_LABELS.items():  # the best first
        titles = [column.title for key, column in columns.items() if row.standing(key) == standing]
        if titles:
            groups.append(f"{label}: {', '.join(titles)}")
    is_ready = any(column.batches and row.standing(key) in _READY for key, column in columns.items())
    fact = f"{target} ({row.architecture}) on {checked}; {'; '.join(groups)}"
    return make_finding("gpu.target", "ok" if is_ready else "warning", fact)


GB = 10**9
IMAGE_BYTES_RANGE = (10 * GB, 40 * GB)  # below the first no ROCm image fits, above the second each of them does


class DockerEngine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts of a Docker Engine. Unknown is None."""

    problem: str | None = None  # why it cannot be used
    remedy: str = ""
    rootless: bool = False
    remapped: bool = False  # userns-remap: root in a container is another user of the host
    selinux: bool = False  # it labels containers
    desktop: bool = False
    image_folder: str | None = None  # where it keeps images
    free_bytes: int | None = None  # on that folder's disk, on this machine
    stale: list[str] = []  # leftovers of killed runs


def engine_findings(engine: DockerEngine, *, has_gpu: bool) -> Iterator[Finding]:
    """Yield the findings about the Docker Engine of a machine with or without a GPU."""
    if engine.problem is not None:
        fact = f"{engine.problem}: servers in containers cannot run"
        remedy = engine.remedy or "start it: sudo systemctl start docker; or name another with DOCKER_HOST"
        yield make_finding("docker.reachable", "blocker", fact, remedy=remedy)
        return
    yield make_finding("docker.reachable", "ok", "the Docker Engine answers")
    if engine.desktop and has_gpu:
        fact = "the engine of Docker Desktop has no access to this machine's GPU"
        yield make_finding("docker.desktop", "blocker", fact)
    if engine.rootless:
        fact = "the engine runs without root: containers lose the groups of devices"
        yield make_finding("docker.rootless", "warning", fact)
    if engine.remapped:
        fact = "the engine maps the users of containers to others (userns-remap): root and the groups of devices lose"
        yield make_finding("docker.userns", "warning", f"{fact} their rights in containers")
    if engine.free_bytes is not None:
        path = engine.image_folder or "Docker's data-root"
        fact = f"{engine.free_bytes / GB:.0f} GB free for images in {path}; ROCm images need 10 to 35 GB"
        min_bytes, enough_bytes = IMAGE_BYTES_RANGE
        level: Level = "warning" if engine.free_bytes < enough_bytes else "ok"
        yield make_finding("docker.disk", "blocker" if engine.free_bytes < min_bytes else level, fact, path=path)
    if engine.stale:
        yield make_finding("docker.stale", "warning", f"leftovers of killed runs: {', '.join(engine.stale)}")


def access_findings(root: Path, cards: Sequence[Gpu], engine: DockerEngine | None = None) -> Iterator[Finding]:
    """Yield the findings about device nodes; none without a GPU.

    An engine that runs as root opens them for its containers, for any user. A rootless engine opens them as the
    user, with the access lists of the file system. With userns-remap only nodes that any user may open remain.
    """
    if not cards:
        return
    render_nodes = [str(node) for gpu in cards if (node := gpu["render_node"])] or ["/dev/dri/renderD*"]
    for id, nodes in (("access.kfd", ["/dev/kfd"]), ("access.render", render_nodes)):
        yield _check_nodes(root, id, nodes, engine or DockerEngine())
    if engine is not None and engine.selinux:
        yield from _check_selinux(root)
    if engine is not None and (engine.rootless or engine.remapped):
        return  # its containers do not get the groups
    if groups := gpus.find_device_groups(root):
        fact = ", ".join(_describe_group(root, group) for group in groups)
        yield make_finding("access.groups", "ok", f"containers get the groups {fact}, by number")
    elif (root / "dev/kfd").exists() and not (root / "dev/kfd").stat().st_mode & stat.S_IWOTH:
        yield make_finding("access.groups", "warning", "the device nodes belong to the group root")


_ANY_USER = stat.S_IROTH | stat.S_IWOTH


def _check_nodes(root: Path, id: str, nodes: Sequence[str], engine: DockerEngine) -> Finding:
    """Check that the device nodes exist, and that this user and the engine's containers may open them."""
    paths = {node: root / node.lstrip("/") for node in nodes}
    if missing := [node for node, path in paths.items() if not path.exists()]:
        return make_finding(id, "blocker", f"there is no {', '.join(missing)}", "missing")
    modes = {node: path.stat().st_mode & 0o777 for node, path in paths.items()}
    if engine.remapped and (closed := [node for node in nodes if modes[node] & _ANY_USER != _ANY_USER]):
        listed = ", ".join(f"{node} (mode {modes[node]:04o})" for node in closed)
        return make_finding(id, "blocker", f"with userns-remap no container may open {listed}", "remapped")
    closed = [node for node, path in paths.items() if not os.access(path, os.R_OK | os.W_OK)]
    if not closed:
        return make_finding(id, "ok", f"this user may open {', '.join(nodes)}")
    status = paths[closed[0]].stat()
    fact = f"this user may not open {', '.join(closed)} (mode {status.st_mode & 0o777:04o}, group "
    fact += f"{_describe_group(root, status.st_gid)}); containers of an engine that runs as root may"
    if str(status.st_gid) == (gpus.read_sysfs(root / "proc/sys/kernel/overflowgid") or "65534"):
        fact = f"this user may not open {', '.join(closed)}: their group is not known in this user namespace"
        return make_finding(id, "blocker", fact, "unmapped")
    group = _read_group_names(root).get(status.st_gid, str(status.st_gid))
    return make_finding(id, "blocker" if engine.rootless else "warning", fact, "denied", groups=command_line(group))


_SELINUX = "sys/fs/selinux"


def _check_selinux(root: Path) -> Iterator[Finding]:
    """Yield a warning if SELinux is enforcing and may deny the GPU to containers that the engine labels."""
    if gpus.read_sysfs(root / _SELINUX / "enforce") != "1":
        return
    # The file of a boolean has its present and its pending value.
    setting = gpus.read_sysfs(root / _SELINUX / "booleans/container_use_devices") or ""
    if setting.startswith("1"):
        yield make_finding("access.selinux", "ok", "SELinux lets containers use devices (container_use_devices)")
    else:
        fact = "SELinux is enforcing, and container_use_devices is off: it may deny /dev/kfd to containers"
        yield make_finding("access.selinux", "warning", fact)


def _describe_group(root: Path, gid: int) -> str:
    name = _read_group_names(root).get(gid)
    return f"{gid} ({name})" if name else str(gid)


def _read_group_names(root: Path) -> dict[int, str]:
    """Return the names of groups by number. Only for texts: an image has other names than the host."""
    lines = re.findall(r"^([^:\n]+):[^:\n]*:(\d+):", gpus.read_sysfs(root / "etc/group") or "", re.MULTILINE)
    return {int(gid): name for name, gid in lines}


_HEX = re.compile(r"(?:0x)?[0-9a-f]+", re.IGNORECASE)
_BAD_MES = 0x83


def kernel_findings(root: Path, cards: Sequence[Gpu]) -> Iterator[Finding]:
    """Yield the findings about the kernel, the GPU's firmware and the power profile."""
    yield from check_cwsr(root, cards)
    versions = [gpu["firmware"].get("mes", "") for gpu in cards if gpu["target"] in ("gfx1150", "gfx1151")]
    if _BAD_MES in [int(version, 16) for version in versions if _HEX.fullmatch(version)]:
        yield make_finding("kernel.firmware", "warning", "MES firmware 0x83 is loaded, that of linux-firmware 20251125")
    yield from check_lockup_timeout(root, cards)
    yield from _check_numa_balancing(root, cards)
    profile = gpus.read_sysfs(root / "sys/firmware/acpi/platform_profile")
    if profile and cards:
        level: Level = "ok" if profile == "performance" else "warning"
        yield make_finding("kernel.profile", level, f"the power profile is {profile}")
    if (root / "proc/cpuinfo").is_file():
        dtype = gpus.choose_cpu_dtype(root)
        fact = f"the CPU has {'' if dtype == 'bfloat16' else 'no '}instructions for bfloat16: `vllm-cpu` uses {dtype}"
        yield make_finding("kernel.bfloat16", "ok", fact)


def check_cwsr(root: Path, cards: Sequence[Gpu]) -> Iterator[Finding]:
    """On gfx1151, check that the driver exports two sizes; without them ROCm writes beyond its memory."""
    flags = [gpu["cwsr_sizes_known"] for gpu in cards if gpu["target"] == "gfx1151"]
    if flags and all(flags):
        yield make_finding("kernel.cwsr", "ok", "the kernel has the CWSR fix for gfx1151")
    elif flags:
        version = gpus.read_sysfs(root / "proc/sys/kernel/osrelease") or "of unknown version"
        fact = f"the amdgpu driver of Linux {version} lacks the CWSR fix for gfx1151: ROCm crashes or hangs"
        yield make_finding("kernel.cwsr", "blocker", fact)


_LINUX_WITH_SHORT_TIMEOUT = 7  # from this version on amdgpu gives a compute job 2 s instead of 60
_ENOUGH_MS = 10_000


def check_lockup_timeout(root: Path, cards: Sequence[Gpu]) -> Iterator[Finding]:
    """On an APU, check that a compute job of a long prompt has the time that it needs; Vulkan sends such jobs."""
    release = gpus.read_sysfs(root / "proc/sys/kernel/osrelease") or ""
    version = re.match(r"(\d{1,4})\.", release)
    if version is None or not any(gpu["integrated"] for gpu in cards):
        return
    loaded = gpus.read_sysfs(root / "sys/module/amdgpu/parameters/lockup_timeout")
    given = re.findall(r"(?:^|\s)amdgpu\.lockup_timeout=(\S*)", gpus.read_sysfs(root / "proc/cmdline") or "")
    setting = loaded or (given[-1] if given else "")
    numbers = [int(text) for text in setting.split(",") if re.fullmatch(r"-?\d{1,9}", text)]
    compute = numbers[1] if len(numbers) > 1 else numbers[0] if numbers else 0  # 0: the driver's default; below: none
    if compute >= _ENOUGH_MS or compute < 0:
        yield make_finding("kernel.lockup", "ok", f"amdgpu.lockup_timeout is {setting}")
    elif compute:
        fact = f"amdgpu.lockup_timeout={setting} cuts compute jobs off after {compute / 1000:g} s"
        yield make_finding("kernel.lockup", "warning", fact)
    elif int(version[1]) >= _LINUX_WITH_SHORT_TIMEOUT:
        fact = f"Linux {release} cuts compute jobs off after 2 s, since amdgpu.lockup_timeout is not set: "
        fact += "llama.cpp and Ollama with Vulkan lose the GPU at long prompts"
        yield make_finding("kernel.lockup", "warning", fact)


def _check_numa_balancing(root: Path, cards: Sequence[Gpu]) -> Iterator[Finding]:
    targets = [gpus.find_target(str(gpu["target"])) for gpu in cards]
    is_instinct = any(row is not None and row.architecture.startswith("CDNA") for row in targets)
    setting = gpus.read_sysfs(root / "proc/sys/kernel/numa_balancing")
    if is_instinct and setting is not None:
        fact = f"kernel.numa_balancing is {setting}"
        yield make_finding("kernel.numa", "ok" if setting == "0" else "warning", fact)


def process_findings(root: Path) -> Iterator[Finding]:
    """Yield the findings about inference engines that run on this machine."""
    serving = gpus.find_engine_processes(root)
    for id, fact, processes in (
        ("processes.orphans", "orphaned engine", [process for process in serving if process.orphaned]),
        ("processes.engines", "run already", [process for process in serving if not process.orphaned]),
    ):
        if processes:
            names = ", ".join(f"{process.name} (pid {process.pid})" for process in processes)
            pids = " ".join(str(process.pid) for process in processes)
            yield make_finding(id, "warning", f"{fact}: {names}", pids=pids)
    if not serving:
        yield make_finding("processes.engines", "ok", "no inference engine runs")


_SMALL_CARVE_OUT = 8 * GIB
_LARGE_BYTES = GIB  # of one process
_MIN_LISTED_BYTES = 64 << 20


def memory_findings(root: Path, cards: Sequence[Gpu]) -> Iterator[Finding]:
    """Yield the findings about the memory of the GPUs that serve models; none without a GPU."""
    serving_gpus = gpus.select_serving_gpus(cards)
    pools = list_pools(root, serving_gpus)
    if not pools:
        return
    readable = [pool for pool in pools if pool.free_bytes is not None]
    level: Level = "ok" if len(readable) == len(pools) else "warning"
    yield make_finding("memory.pool", level, "; ".join(map(format_pool, pools)))
    if readable:
        yield _check_utilization(readable)
    yield _check_gpu_processes(root)
    for pool, gpu in zip(pools, serving_gpus, strict=True):
        if gpu["integrated"]:
            yield from _check_apu_sizes(root, pool, gpu)


def _check_utilization(pools: list[Pool]) -> Finding:
    """Return the largest utilization that is safe on all pools, and whether vLLM's default starts."""
    safe = min(compute_share([pool]).utilization or Decimal(0) for pool in pools)
    fact = f"gpu_memory_utilization is safe up to {safe}" if safe else "no gpu_memory_utilization is safe"
    fits = all(_is_accepted(pool, VLLM_DEFAULT_UTILIZATION) for pool in pools)
    fact += f"; vLLM's default of {VLLM_DEFAULT_UTILIZATION} {'fits' if fits else 'does not fit'}"
    return make_finding("memory.fraction", "ok" if fits else "warning", fact)


def _is_accepted(pool: Pool, share: Decimal) -> bool:
    free, available, total = pool.free_bytes, pool.host_available_bytes, pool.total_bytes
    assert free is not None and total is not None
    return vllm_accepts(free if available is None else min(free, available), total, share)


def _check_gpu_processes(root: Path) -> Finding:
    """Return the processes that use GPU memory."""
    processes, unreadable = gpus.find_gpu_processes(root)
    listed = [process for process in processes if process.bytes >= _MIN_LISTED_BYTES][:5]
    hidden = count(unreadable, "process of another user", "processes of other users")
    unseen = f"; {hidden} cannot be seen (sudo shows what it is)" if unreadable else ""
    sizes = {f"{process.name} (pid {process.pid})": process.bytes for process in listed}
    fact = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items())
    large = [name for name, size in sizes.items() if size >= _LARGE_BYTES]
    fact = f"GPU memory is held by {fact or 'no process that can be seen'}{unseen}"
    return make_finding("memory.holders", "warning" if large else "ok", fact, names=", ".join(large))


def _check_apu_sizes(root: Path, pool: Pool, gpu: Gpu) -> Iterator[Finding]:
    """Yield settings of an APU that give its GPU too little memory, or promise too much."""
    ram, vram, promised = gpus.read_meminfo(root / "proc/meminfo").get("MemTotal"), gpu["vram_bytes"], gpu["gtt_bytes"]
    if ram is None or vram is None or promised is None:
        return
    # The GTT should leave an eighth of the RAM, at least 4 and at most 8 GiB, to everything else.
    max_gib = (ram - min(8 * GIB, max(4 * GIB, ram // 8))) // GIB
    limit_pages = gpus.read_number(root / "sys/module/ttm/parameters/pages_limit")
    gtt = promised if limit_pages is None else min(promised, limit_pages * PAGE_BYTES)
    setting: dict[str, Any] = {"pages": max_gib * GIB // PAGE_BYTES, "gib": max_gib, "left": gib(ram - max_gib * GIB)}
    if gtt < promised:
        fact = f"the driver promises a GTT of {gib(promised)}, but ttm.pages_limit gives out {gib(gtt)}"
        fact += ": programs see more free memory than there is"
        yield make_finding("memory.gttsize", "warning", fact, **setting)
    if pool.unified and vram < _SMALL_CARVE_OUT and gtt < 0.55 * ram and gtt < max_gib * GIB:
        fact = f"the GPU gets {gib(gtt)} of {gib(ram)}: GTT is limited to half the RAM, the carve-out is {gib(vram)}"
        yield make_finding("memory.half", "warning", fact, **setting)


def diagnose(root: Path = Path("/"), docker: DockerEngine | None = None) -> list[Finding]:
    """Return all findings under `root`, by topic.

    `docker`: facts of the Docker Engine, or None to leave it out.
    """
    cards = list(gpus.list_gpus(root))
    findings = [*gpu_findings(root, cards), *memory_findings(root, cards), *kernel_findings(root, cards)]
    findings += access_findings(root, cards, docker)
    if docker is not None:
        findings += engine_findings(docker, has_gpu=bool(cards))
    return [*findings, *process_findings(root)]


def find_device_blockers(root: Path, devices: Collection[str], engine: DockerEngine | None = None) -> Iterator[Finding]:
    """Yield why a container cannot use these device nodes of the host. Fast: it reads a few small files.

    /dev/kfd is ROCm's, and needs the compute driver; /dev/dri alone is enough for Vulkan. Other devices are ignored.
    """
    if "/dev/kfd" in devices:
        cards = list(gpus.list_gpus(root))
        findings = [*gpu_findings(root, cards), *check_cwsr(root, cards)]
        findings += access_findings(root, cards, engine)
        yield from (finding for finding in findings if finding.level == "blocker")
    nodes = sorted(path.name for path in (root / "dev/dri").glob("renderD*"))
    if "/dev/dri" in devices and "/dev/kfd" not in devices and not nodes:
        yield make_finding("access.render", "blocker", "there is no render node in /dev/dri", "missing")
    for node in devices:
        if node.startswith("/dev/dri/") and not (root / node.lstrip("/")).exists():
            fact = f"there is no {node} (render nodes: {', '.join(nodes) or 'none'})"
            yield make_finding("access.render", "blocker", fact, "missing")
    if "/dev/kfd" not in devices and engine is not None and (engine.rootless or engine.remapped):
        given = [f"/dev/dri/{node}" for node in nodes if not {"/dev/dri", f"/dev/dri/{node}"}.isdisjoint(devices)]
        closed = [_check_nodes(root, "access.render", [node], engine) for node in given]
        if closed and all(finding.level == "blocker" for finding in closed):
            yield closed[0]


def find_engine_blockers(docker: DockerEngine) -> Iterator[Finding]:
    """Yield why a working engine cannot run a server on the GPU."""
    if docker.problem is None:
        yield from (finding for finding in engine_findings(docker, has_gpu=True) if finding.level == "blocker")
