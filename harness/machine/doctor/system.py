"""Check device access and the kernel's settings."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from harness.machine.doctor.finding import Finding, Level, finding
from harness.machine.gfx_support import target_of
from harness.machine.gpus import device_groups, gpus
from harness.machine.sysfs import number, text


class User(Struct, frozen=True, forbid_unknown_fields=True):
    """Who wants to open the device nodes."""

    uid: int
    groups: frozenset[int]


def access_findings(root: Path, user: User | None = None, *, rootless: bool = False) -> Iterator[Finding]:
    """Findings about device nodes; none without a GPU.

    Containers of an engine that runs as root open them whoever the user is; those of a rootless engine open them as
    the user. `user` None is this one, access lists of the file system included.
    """
    nodes = [str(gpu["render_node"]) for gpu in gpus(root) if gpu["render_node"]]
    if not any(True for _ in gpus(root)):
        return
    yield from _node(root, "access.kfd", "/dev/kfd", user, rootless)
    yield from _render(root, nodes, user, rootless)
    if groups := device_groups(root):
        names = _names(root)
        told = ", ".join(f"{group} ({names[group]})" if group in names else str(group) for group in groups)
        yield finding("access.groups", "ok", f"containers get the groups {told}, by number")
    elif (root / "dev/kfd").exists() and not _mode(root / "dev/kfd") & stat.S_IWOTH:
        yield finding("access.groups", "warning", "the device nodes belong to the group root")


def no_render_node(root: Path) -> Iterator[Finding]:
    """A blocker when there is no render node at all, whatever the compute driver knows: Vulkan needs no more."""
    if not any((root / "dev/dri").glob("renderD*")):
        what = "there is no render node in /dev/dri"
        yield finding("access.render", "blocker", what, "missing")


def missing(root: Path, nodes: Iterable[str]) -> Iterator[Finding]:
    """A blocker for each node of /dev/dri that is named and not there."""
    for node in nodes:
        if not (root / node.lstrip("/")).exists():
            there = ", ".join(sorted(path.name for path in (root / "dev/dri").glob("renderD*"))) or "none"
            what = f"there is no {node} (render nodes: {there})"
            yield finding("access.render", "blocker", what, "missing")


def _node(root: Path, id: str, name: str, user: User | None, rootless: bool) -> Iterator[Finding]:
    path = root / name.lstrip("/")
    if not path.exists():
        yield finding(id, "blocker", f"there is no {name}", "missing")
        return
    owner = f"{name}: mode {_mode(path) & 0o777:04o}, group {_group(root, path)}"
    if may_open(path, user):
        yield finding(id, "ok", owner)
    else:
        yield _denied(root, id, owner, path, rootless)


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


def _denied(root: Path, id: str, owner: str, path: Path, rootless: bool) -> Finding:
    level: Level = "blocker" if rootless else "warning"
    who = "the rootless engine, which runs as this user," if rootless else "this user"
    rest = (
        "" if rootless else "; containers of an engine that runs as root may, servers that you start yourself may not"
    )
    group = _names(root).get(path.stat().st_gid, str(path.stat().st_gid))
    return finding(id, level, f"{who} may not open {owner}{rest}", "denied", groups=group)


def may_open(path: Path, user: User | None) -> bool:
    """Whether the user may read and write it."""
    if user is None:
        return os.access(path, os.R_OK | os.W_OK)
    if user.uid == 0:
        return True
    facts = path.stat()
    shift = 6 if facts.st_uid == user.uid else 3 if facts.st_gid in user.groups else 0
    return (facts.st_mode >> shift) & 0o6 == 0o6


def _mode(path: Path) -> int:
    return path.stat().st_mode


def _group(root: Path, path: Path) -> str:
    gid = path.stat().st_gid
    name = _names(root).get(gid)
    return f"{gid} ({name})" if name else str(gid)


def _names(root: Path) -> dict[int, str]:
    """Names of groups by number; they differ between host and image, so they are for reading only."""
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
    if version := text(root / "proc/sys/kernel/osrelease"):
        yield finding("kernel.version", "ok", f"Linux {version}")
    yield from cwsr(root)
    yield from _driver(root, targets)
    yield from _firmware(root, targets)
    yield from _iommu(root)
    yield from _numa(root, targets)
    if targets:
        yield from _power(root)


def cwsr(root: Path) -> Iterator[Finding]:
    """On gfx1151, the two sizes without which ROCm saves waves into memory that it has not reserved."""
    known = [gpu["cwsr_sizes_known"] for gpu in gpus(root) if gpu["target"] == "gfx1151"]
    if not known:
        return
    if all(known):
        yield finding("kernel.cwsr", "ok", "the kernel has the CWSR fix for gfx1151 (cwsr_size and ctl_stack_size)")
    else:
        version = text(root / "proc/sys/kernel/osrelease") or "of unknown version"
        fix = "the CWSR fix for gfx1151"
        if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _CWSR_SINCE:
            yield finding("kernel.cwsr", "blocker", f"Linux {version} lacks {fix} (no {_CWSR}): {_HANGS}", "old")
            return
        driver = text(root / "sys/module/amdgpu/version")  # the kernel's own driver has none
        other = f"amdgpu {driver} of amdgpu-dkms" if driver else "another one, such as that of amdgpu-dkms,"
        fact = (
            f"Linux {version} has {fix}, but its driver does not tell both of {_CWSR}: {other} has replaced it, "
            f"and {_HANGS}"
        )
        yield finding("kernel.cwsr", "blocker", fact, "replaced")


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
        told = [f"MES firmware {version:#x}" for version in sorted(set(mes))] + packages
        yield finding("kernel.firmware", "ok", ", ".join(told))


def _packages(root: Path) -> Iterator[str]:
    """Packages of firmware with their versions, as dpkg and pacman keep them in files."""
    for entry in (text(root / "var/lib/dpkg/status") or "").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.+)$", entry, re.MULTILINE))
        if fields.get("Package") in _FIRMWARE_PACKAGES and fields.get("Status", "").endswith(" installed"):
            yield f"{fields['Package']} {fields.get('Version', '')}".strip()
    for path in sorted((root / "var/lib/pacman/local").glob("linux-firmware*")):
        name, _, version = path.name.rpartition("-")[0].rpartition("-")
        if name in _FIRMWARE_PACKAGES:
            yield f"{name} {version}"


def _iommu(root: Path) -> Iterator[Finding]:
    if not any(gpu["integrated"] for gpu in gpus(root)):
        return
    words = dict(re.findall(r"(?:^|\s)(amd_iommu|iommu)=(\S+)", text(root / "proc/cmdline") or ""))
    match words.get("amd_iommu"):
        case "pt":
            yield finding("kernel.iommu", "warning", "amd_iommu=pt is no setting: the IOMMU translates as by default")
        case "off":
            yield finding("kernel.iommu", "ok", "amd_iommu=off: the fastest setting; there is no NPU with it")
        case _:
            how = f"iommu={words['iommu']}" if "iommu" in words else "default"
            yield finding("kernel.iommu", "ok", f"IOMMU on ({how}); amd_iommu=off is 5 to 12 % faster in one report")


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
        told = f"the CPU's governor is {governor}" + (f", its energy preference {preference}" if preference else "")
        yield finding("kernel.governor", "ok" if fast else "warning", told)
    slow = {str(gpu["render_node"]): gpu["performance_level"] for gpu in gpus(root)}
    slow = {node: level for node, level in slow.items() if level in ("low", "profile_min_sclk", "profile_min_mclk")}
    for node, level in slow.items():
        yield finding("kernel.performance_level", "warning", f"{node} is held at '{level}'", node=Path(node).name)
