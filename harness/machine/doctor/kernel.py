"""The kernel, its firmware and the power settings, as far as they matter for the GPUs that are there."""

import re
from collections.abc import Iterator
from pathlib import Path

from harness.machine.doctor.finding import Finding, Level, finding
from harness.machine.facts import gpus
from harness.machine.files import number, text
from harness.machine.targets import target_of

_RDNA_3_5 = ("gfx1150", "gfx1151", "gfx1152")
_HEX = re.compile(r"(?:0x)?[0-9a-f]+", re.IGNORECASE)
_CWSR, _HANGS = "cwsr_size and ctl_stack_size", "ROCm crashes or hangs"
_CWSR_SINCE = (6, 18, 4)
_BAD_FIRMWARE, _BAD_MES = "20251125", 0x83
_FIRMWARE_PACKAGES = ("linux-firmware", "linux-firmware-amdgpu", "firmware-amd-graphics", "amd-gpu-firmware")


def check(root: Path) -> Iterator[Finding]:
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
