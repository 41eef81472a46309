"""Problems of this machine for serving models: findings, each with its fix and its source."""

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct

from harness.engines import Standing
from harness.machine.doctor_memory import memory_findings, process_findings
from harness.machine.findings import Finding, Level, finding
from harness.machine.gpus import (
    AMD,
    NVIDIA,
    WORDS,
    GfxTarget,
    columns,
    device_groups,
    gpus,
    number,
    pci_cards,
    table,
    target_of,
    text,
    working,
)

_READY: tuple[Standing, ...] = ("validated", "supported", "code")


def gpu_findings(root: Path) -> Iterator[Finding]:
    """Findings about the GPUs; without a GPU a single one."""
    counts = Counter(str(gpu["target"]) for gpu in gpus(root))
    if not counts:
        yield _none(root)
        return
    yield finding("gpu.present", "ok", _present(root, counts))
    for target in dict.fromkeys(str(card["target"]) for card in working(list(gpus(root)))):
        yield _standing(target)
    if len(counts) > 1:
        many = " and ".join(f"{count} x {target}" for target, count in counts.items())
        node = str(max(gpus(root), key=lambda gpu: gpu["compute_units"] or 0)["render_node"])
        fact = f"{many} are in one machine, and servers may take the wrong one"
        yield finding("gpu.mixed", "warning", fact, node=node)


def _present(root: Path, counts: Counter[str]) -> str:
    parts = []
    for target, count in counts.items():
        row = target_of(target)
        units = {gpu["compute_units"] for gpu in gpus(root) if gpu["target"] == target} - {None}
        each = f", {units.pop()} compute units" + (" each" if count > 1 else "") if len(units) == 1 else ""
        parts.append(f"{f'{count} x ' if count > 1 else ''}{target}: {row.family if row else 'family unknown'}{each}")
    return "; ".join(parts)


def _none(root: Path) -> Finding:
    found = list(pci_cards(root))
    amd = [card for card in found if card.vendor == AMD]
    if not amd:
        other = ""
        if any(card.vendor == NVIDIA for card in found):
            other = ", only one of NVIDIA, for which this project has no servers"
        elif (root / "dev/dxg").exists():
            other = ": WSL offers /dev/dxg in its place, which the templates do not use"
        return finding("gpu.present", "blocker", f"there is no AMD GPU{other}")
    card = amd[0]
    what = f"the AMD GPU at {card.slot} (1002:{card.device:04x}) is not known to the compute driver"
    if (root / "sys/module/amdgpu").is_dir():
        return finding("gpu.driver", "blocker", f"{what}, though amdgpu is loaded", "not-known")
    case = "nomodeset" if "nomodeset" in (text(root / "proc/cmdline") or "").split() else "not-loaded"
    return finding("gpu.driver", "blocker", f"{what}: amdgpu is not loaded", case)


def _standing(target: str) -> Finding:
    row, checked = target_of(target), table().checked
    if row is None:
        fact = f"{target} is not in the table of {checked}: no server is known to have code for it"
        return finding("gpu.target", "warning", fact, "nothing")
    fact = f"{target} ({row.architecture}) on {checked}; {_in_words(row)}"
    ready = [column for key, column in columns().items() if row.standing(key) in _READY]
    if any(column.batches for column in ready):
        return finding("gpu.target", "ok", fact)
    named = any(target in column.targets for column in columns().values())
    return finding("gpu.target", "warning", fact, "single" if ready else "untried" if named else "nothing")


def _in_words(row: GfxTarget) -> str:
    """Servers by their support, the best first."""
    groups = []
    for standing, words in WORDS.items():
        titles = [column.title for key, column in columns().items() if row.standing(key) == standing]
        if titles:
            groups.append(f"{words}: {', '.join(titles)}")
    return "; ".join(groups)


GB = 10**9
IMAGE_BYTES = (10 * GB, 40 * GB)  # below the first no ROCm image fits, above the second any of them does


class DockerEngine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts of a Docker Engine. Unknown is None; `problem`: why it cannot be used."""

    host: str | None = None  # its machine, if it is another one
    named_by: str = "DOCKER_HOST"  # the source of `host`, such as a Docker context
    problem: str | None = None
    remedy: str = ""
    rootless: bool = False
    desktop: bool = False
    podman: bool = False
    image_folder: str | None = None  # where it keeps images
    free_bytes: int | None = None  # on that folder's disk, on this machine
    stale: list[str] = []  # leftovers of killed runs


def engine_findings(engine: DockerEngine, *, gpus: int) -> Iterator[Finding]:
    """Findings about the engine, for a machine with so many GPUs."""
    if engine.host is not None:
        here = "what follows is said by its Docker Engine, and nothing is known of its GPU, kernel and memory"
        yield finding("docker.remote", "warning", f"{engine.named_by} names {engine.host}: {here}", host=engine.host)
    if engine.problem is not None:
        fact, case = f"{engine.problem}: servers in containers cannot run", "known" if engine.remedy else "unknown"
        yield finding("docker.reachable", "blocker", fact, case, remedy=engine.remedy)
        return
    yield finding("docker.reachable", "ok", "the Docker Engine answers")
    if engine.podman:
        yield finding("docker.podman", "warning", "Podman answers in Docker's place")
    if engine.desktop and gpus:
        yield finding("docker.desktop", "blocker", "the engine of Docker Desktop has no access to this machine's GPU")
    if engine.rootless:
        fact = "the engine runs without root: containers lose the groups of devices"
        yield finding("docker.rootless", "warning", fact)
    else:
        yield finding("docker.rootless", "ok", "the engine runs as root")
    yield from _disk(engine)
    if engine.stale:
        more = f" and {len(engine.stale) - 3} more" if len(engine.stale) > 3 else ""
        yield finding("docker.stale", "warning", f"leftovers of killed runs: {', '.join(engine.stale[:3])}{more}")
    else:
        yield finding("docker.stale", "ok", "no leftovers of killed runs")


def _disk(engine: DockerEngine) -> Iterator[Finding]:
    if engine.free_bytes is None:
        return
    path = engine.image_folder or "Docker's data-root"
    fact = f"{engine.free_bytes / GB:.0f} GB free for images in {path}"
    none, enough = IMAGE_BYTES
    if engine.free_bytes < none:
        yield finding("docker.disk", "blocker", f"only {fact}; ROCm images need 10 to 35 GB", path=path)
    elif engine.free_bytes < enough:
        yield finding("docker.disk", "warning", f"{fact}; ROCm images need 10 to 35 GB, models their own", path=path)
    else:
        yield finding("docker.disk", "ok", fact)


class User(Struct, frozen=True, forbid_unknown_fields=True):
    """The user that needs the device nodes."""

    uid: int
    groups: frozenset[int]


def access_findings(root: Path, user: User | None = None, *, rootless: bool = False) -> Iterator[Finding]:
    """Findings about device nodes; none without a GPU.

    Containers of an engine that runs as root open them whatever the user; those of a rootless engine open them as
    the user. `user` None is this one, access lists of the file system included.
    """
    nodes = [str(gpu["render_node"]) for gpu in gpus(root) if gpu["render_node"]]
    if next(gpus(root), None) is None:
        return
    yield from _node(root, "access.kfd", "/dev/kfd", user, rootless)
    yield from _render(root, nodes, user, rootless)
    if groups := device_groups(root):
        names = _names(root)
        fact = ", ".join(f"{group} ({names[group]})" if group in names else str(group) for group in groups)
        yield finding("access.groups", "ok", f"containers get the groups {fact}, by number")
    elif (root / "dev/kfd").exists() and not (root / "dev/kfd").stat().st_mode & stat.S_IWOTH:
        yield finding("access.groups", "warning", "the device nodes belong to the group root")


def _node(root: Path, id: str, name: str, user: User | None, rootless: bool) -> Iterator[Finding]:
    path = root / name.lstrip("/")
    if not path.exists():
        yield finding(id, "blocker", f"there is no {name}", "missing")
        return
    owner = f"{name}: mode {path.stat().st_mode & 0o777:04o}, group {_group(root, path)}"
    if may_open(path, user):
        yield finding(id, "ok", owner)
        return
    group = _names(root).get(path.stat().st_gid, str(path.stat().st_gid))
    if rootless:
        fact = f"the rootless engine, which runs as this user, may not open {owner}"
        yield finding(id, "blocker", fact, "denied", groups=group)
    else:
        rest = "containers of an engine that runs as root may, servers that you start yourself may not"
        yield finding(id, "warning", f"this user may not open {owner}; {rest}", "denied", groups=group)


def _render(root: Path, nodes: list[str], user: User | None, rootless: bool) -> Iterator[Finding]:
    gone = [node for node in nodes if not (root / node.lstrip("/")).exists()]
    if gone or not nodes:
        what = f"there is no {', '.join(gone)}" if gone else "no GPU has a render node"
        yield finding("access.render", "blocker", what, "missing")
        return
    closed = [node for node in nodes if not may_open(root / node.lstrip("/"), user)]
    if len(nodes) == 1 or closed:
        yield from _node(root, "access.render", closed[0] if closed else nodes[0], user, rootless)
    else:
        group = _group(root, root / nodes[0].lstrip("/"))
        yield finding("access.render", "ok", f"{len(nodes)} render nodes from {nodes[0]} on, group {group}")


def may_open(path: Path, user: User | None) -> bool:
    """Whether the user may read and write it."""
    if user is None:
        return os.access(path, os.R_OK | os.W_OK)
    if user.uid == 0:
        return True
    facts = path.stat()
    shift = 6 if facts.st_uid == user.uid else 3 if facts.st_gid in user.groups else 0
    return (facts.st_mode >> shift) & 0o6 == 0o6


def _group(root: Path, path: Path) -> str:
    gid = path.stat().st_gid
    name = _names(root).get(gid)
    return f"{gid} ({name})" if name else str(gid)


def _names(root: Path) -> dict[int, str]:
    """Names of groups by number, for display only: they differ between host and image."""
    found = re.findall(r"^([^:\n]+):[^:\n]*:(\d+):", text(root / "etc/group") or "", re.MULTILINE)
    return {int(number): name for name, number in found}


_RDNA_3_5 = ("gfx1150", "gfx1151", "gfx1152")
_HEX = re.compile(r"(?:0x)?[0-9a-f]+", re.IGNORECASE)
_CWSR, _HANGS = "cwsr_size and ctl_stack_size", "ROCm crashes or hangs"
_CWSR_SINCE = (6, 18, 4)
_BAD_FIRMWARE, _BAD_MES = "20251125", 0x83
_FIRMWARE_PACKAGES = ("linux-firmware", "linux-firmware-amdgpu", "firmware-amd-graphics", "amd-gpu-firmware")


def kernel_findings(root: Path) -> Iterator[Finding]:
    """Findings about kernel and power."""
    targets = {str(gpu["target"]) for gpu in gpus(root)}
    yield from cwsr(root)
    yield from _driver(root, targets)
    yield from _firmware(root, targets)
    yield from _numa(root, targets)
    if targets:
        yield from _power(root)


def cwsr(root: Path) -> Iterator[Finding]:
    """On gfx1151, check two sizes; without them ROCm saves waves into memory that it has not reserved."""
    known = [gpu["cwsr_sizes_known"] for gpu in gpus(root) if gpu["target"] == "gfx1151"]
    if not known:
        return
    fix = "the CWSR fix for gfx1151"
    if all(known):
        yield finding("kernel.cwsr", "ok", f"the kernel has {fix} ({_CWSR})")
        return
    version = text(root / "proc/sys/kernel/osrelease") or "of unknown version"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _CWSR_SINCE:
        yield finding("kernel.cwsr", "blocker", f"Linux {version} lacks {fix} (no {_CWSR}): {_HANGS}", "old")
        return
    driver = text(root / "sys/module/amdgpu/version")  # the kernel's own driver has none
    other = f"amdgpu {driver} of amdgpu-dkms" if driver else "another one, such as that of amdgpu-dkms,"
    fact = f"Linux {version} has {fix}, but its driver does not tell both of {_CWSR}: {other} has replaced it"
    yield finding("kernel.cwsr", "blocker", f"{fact}, and {_HANGS}", "replaced")


def _driver(root: Path, targets: set[str]) -> Iterator[Finding]:
    version = text(root / "sys/module/amdgpu/version")  # the kernel's own driver has none
    if version and targets & set(_RDNA_3_5):
        yield finding("kernel.dkms", "warning", f"amdgpu {version} of amdgpu-dkms has replaced the kernel's own driver")


def _firmware(root: Path, targets: set[str]) -> Iterator[Finding]:
    if not targets & {"gfx1150", "gfx1151"}:
        return
    packages = list(_packages(root))
    bad = [package for package in packages if _BAD_FIRMWARE in package]
    mes = [int(version, 16) for gpu in gpus(root) if _HEX.fullmatch(version := gpu["firmware"].get("mes", ""))]
    if _BAD_MES in mes:
        yield finding("kernel.firmware", "warning", "MES firmware 0x83 is loaded, that of linux-firmware 20251125")
    elif bad:
        yield finding("kernel.firmware", "warning", f"{bad[0]} is installed")
    elif mes or packages:
        fact = [f"MES firmware {version:#x}" for version in sorted(set(mes))] + packages
        yield finding("kernel.firmware", "ok", ", ".join(fact))


def _packages(root: Path) -> Iterator[str]:
    """Firmware packages and versions, from the files of dpkg and pacman."""
    for entry in (text(root / "var/lib/dpkg/status") or "").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.+)$", entry, re.MULTILINE))
        if fields.get("Package") in _FIRMWARE_PACKAGES and fields.get("Status", "").endswith(" installed"):
            yield f"{fields['Package']} {fields.get('Version', '')}".strip()
    for path in sorted((root / "var/lib/pacman/local").glob("linux-firmware*")):
        name, _, version = path.name.rpartition("-")[0].rpartition("-")
        if name in _FIRMWARE_PACKAGES:
            yield f"{name} {version}"


def _numa(root: Path, targets: set[str]) -> Iterator[Finding]:
    rows = [row for target in targets if (row := target_of(target)) is not None]
    balancing = number(root / "proc/sys/kernel/numa_balancing")
    if balancing is None or not any(row.instinct for row in rows):
        return
    if balancing:
        yield finding("kernel.numa", "warning", f"automatic NUMA balancing is on (numa_balancing is {balancing})")
    else:
        yield finding("kernel.numa", "ok", "automatic NUMA balancing is off")


def _power(root: Path) -> Iterator[Finding]:
    if profile := text(root / "sys/firmware/acpi/platform_profile"):
        level: Level = "ok" if profile == "performance" else "warning"
        yield finding("kernel.profile", level, f"the power profile is {profile}")
    cpu = root / "sys/devices/system/cpu/cpu0/cpufreq"
    if governor := text(cpu / "scaling_governor"):
        preference = text(cpu / "energy_performance_preference")
        fast = "performance" in (governor, preference)
        fact = f"the CPU's governor is {governor}" + (f", its energy preference {preference}" if preference else "")
        yield finding("kernel.governor", "ok" if fast else "warning", fact)
    slow = {str(gpu["render_node"]): gpu["performance_level"] for gpu in gpus(root)}
    slow = {node: level for node, level in slow.items() if level in ("low", "profile_min_sclk", "profile_min_mclk")}
    for node, level in slow.items():
        yield finding("kernel.performance_level", "warning", f"{node} is held at '{level}'", node=Path(node).name)


def diagnose(
    root: Path = Path("/"),
    docker: DockerEngine | None = None,
    user: User | None = None,
) -> list[Finding]:
    """All findings under `root`, by topic.

    `docker` is what the engine says of itself; None when it was not asked. With an engine on another machine there
    are only findings about that engine. `user` None is this one.
    """
    if docker is not None and docker.host is not None:
        return list(engine_findings(docker, gpus=0))
    rootless = docker is not None and docker.rootless
    found = [*gpu_findings(root), *memory_findings(root), *kernel_findings(root)]
    found += access_findings(root, user, rootless=rootless)
    if docker is not None:
        found += engine_findings(docker, gpus=sum(1 for _ in gpus(root)))
    return [*found, *process_findings(root)]


def device_blockers(root: Path, devices: Collection[str], *, rootless: bool = False) -> Iterator[Finding]:
    """Why a container cannot use these device nodes of the host. Quick: a few small files.

    /dev/kfd is ROCm's, and needs the compute driver; /dev/dri alone is enough for Vulkan. Other devices say nothing.
    """
    if "/dev/kfd" in devices:
        found = (*gpu_findings(root), *cwsr(root), *access_findings(root, rootless=rootless))
        yield from (one for one in found if one.level == "blocker")
    nodes = sorted(path.name for path in (root / "dev/dri").glob("renderD*"))
    if "/dev/dri" in devices and "/dev/kfd" not in devices and not nodes:
        yield finding("access.render", "blocker", "there is no render node in /dev/dri", "missing")
    for node in devices:
        if node.startswith("/dev/dri/") and not (root / node.lstrip("/")).exists():
            fact = f"there is no {node} (render nodes: {', '.join(nodes) or 'none'})"
            yield finding("access.render", "blocker", fact, "missing")


def engine_blockers(docker: DockerEngine) -> Iterator[Finding]:
    """Why a working engine cannot run a server on the GPU."""
    if docker.problem is None:
        yield from (one for one in engine_findings(docker, gpus=1) if one.level == "blocker")
