"""The facts of a machine (kernel, CPU, memory, AMD GPUs), which of its GPUs a server uses, and the processes on them.

They come from small files of /proc and /sys, which a driver may refuse to read at any time.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from harness.base.errors import HarnessError
from harness.base.files import read_bytes, read_table
from harness.engines import Column, Standing, engines, match_any
from harness.records.manifest import GpuMemory, Machine


def require_folder(root: Path) -> Path:
    """Return the folder with another machine's files. Raises HarnessError if it does not exist."""
    if not root.is_dir():
        what = f"--root: {root} {'is not a folder' if root.exists() else 'is not there'}"
        raise HarnessError(what, next_step="Give a folder that has another machine's /proc and /sys below it.")
    return root


def read_sysfs(path: Path) -> str | None:
    """Return a small file's text; None if it is missing or the driver fails."""
    try:
        return os.fsdecode(read_bytes(path)).strip()
    except OSError:
        return None


def read_number(path: Path, base: int = 10) -> int | None:
    """Return the number in a file; None if it has no number. Negative numbers are errors of the driver."""
    try:
        number = int(read_sysfs(path) or "", base)
    except ValueError:
        return None
    return number if number >= 0 else None


def read_meminfo(path: Path) -> dict[str, int]:
    """Return the bytes of each entry of a meminfo file, such as MemTotal, of the host or a node; empty without it."""
    lines = re.findall(r"^(?:Node \d+ )?(\S+):\s*(\d+) kB$", read_sysfs(path) or "", re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}


AMD = 0x1002  # its vendor id
_DISPLAY, _ACCELERATOR = 0x03, 0x12  # base classes of the PCI specification; Instinct cards are accelerators


def find_amd_card(root: Path) -> str | None:
    """Return the PCI address of the first graphics or compute card of AMD."""
    folder = root / "sys/bus/pci/devices"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind, vendor = read_number(path / "class", base=16), read_number(path / "vendor", base=16)
        if kind is not None and kind >> 16 in (_DISPLAY, _ACCELERATOR) and vendor == AMD:
            return path.name
    return None


# Parameters of the kernel command line that change what a GPU can do or how fast memory is.
_PARAMETERS = re.compile(
    r"^(?:amd_iommu|iommu|iommu\.\w+|amdgpu\.\w+|ttm\.\w+|pci|numa_balancing|mitigations|nosmt)(?:=|$)"
)
_SETTINGS = {  # files whose content is recorded under this name
    "ttm.pages_limit (now)": "sys/module/ttm/parameters/pages_limit",
    "amdgpu.gttsize (now)": "sys/module/amdgpu/parameters/gttsize",
    "amdgpu.cwsr_enable (now)": "sys/module/amdgpu/parameters/cwsr_enable",
    "amdgpu version": "sys/module/amdgpu/version",
    "numa_balancing (now)": "proc/sys/kernel/numa_balancing",
    "power profile": "sys/firmware/acpi/platform_profile",
    "cpu governor": "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "cpu energy preference": "sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference",
}


def read_machine(root: Path = Path("/"), docker: str | None = None) -> Machine:
    """Return the facts of the machine whose /proc and /sys are under `root`; `docker` is its engine's version."""
    cpuinfo = read_sysfs(root / "proc/cpuinfo") or ""
    cpu = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    words = [word.partition("=") for word in (read_sysfs(root / "proc/cmdline") or "").split()]
    parameters = {name: value for name, equals, value in words if _PARAMETERS.match(name + equals)}
    settings = {name: read_sysfs(root / path) for name, path in _SETTINGS.items()}
    settings["gpu power cap"] = ", ".join(dict.fromkeys(_power_caps(root))) or None
    return Machine(
        name=read_sysfs(root / "proc/sys/kernel/hostname") or "unknown",
        kernel=read_sysfs(root / "proc/sys/kernel/osrelease"),
        cpu=cpu[1].strip() if cpu else None,
        cores=len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or None,
        ram_bytes=read_meminfo(root / "proc/meminfo").get("MemTotal"),
        gpus=list(list_gpus(root)),
        kernel_parameters=parameters | {name: value for name, value in settings.items() if value},
        docker=docker,
        rocm=read_sysfs(root / "opt/rocm/.info/version"),
    )


def _power_caps(root: Path) -> Iterator[str]:
    """Yield the power cap of each GPU that has one, in watts."""
    for path in sorted(root.glob("sys/class/drm/renderD*/device/hwmon/hwmon*/power1_cap")):
        if (microwatts := read_number(path)) is not None:
            yield f"{microwatts / 1e6:g} W"


_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of Linux for x86, and for ARM


def choose_cpu_dtype(root: Path = Path("/")) -> str:
    """Return the data type in which the CPU under `root` computes fastest: bfloat16 if it has instructions for it.

    Otherwise float32, also for an unknown CPU. Without such instructions bfloat16 is emulated: a prompt of 60 tokens
    took 4 times as long (vLLM 0.32, with AVX2 and with AVX-512).
    """
    cpuinfo = read_sysfs(root / "proc/cpuinfo") or ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return "bfloat16" if flags and _BFLOAT16_FLAGS.intersection(flags[1].split()) else "float32"


def find_device_groups(root: Path = Path("/")) -> list[int]:
    """Return the ids of the groups that own /dev/kfd and the nodes in /dev/dri, without root's; empty without a GPU."""
    dri = root / "dev/dri"
    nodes = [root / "dev/kfd", *sorted(dri.glob("card*")), *sorted(dri.glob("renderD*"))]
    groups = {node.stat().st_gid for node in nodes if node.exists() and not stat.S_ISDIR(node.stat().st_mode)}
    return sorted(groups - {0})


def list_gpus(root: Path = Path("/")) -> Iterator[dict[str, Any]]:
    """Yield the AMD GPUs of the kernel's compute driver (KFD), in its order. Sizes in bytes; unknown is None."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    if not nodes.is_dir():
        return
    for node in sorted(nodes.iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1):
        pairs = (line.split() for line in (read_sysfs(node / "properties") or "").splitlines())
        properties = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].lstrip("-").isdigit()}
        version = properties.get("gfx_target_version", 0)
        minor = properties.get("drm_render_minor", -1)
        simds, simds_per_unit = properties.get("simd_count"), properties.get("simd_per_cu")
        if not version:
            continue  # a CPU
        device = root / f"sys/class/drm/renderD{minor}/device"
        yield {
            "target": gfx_target(version),
            "name": read_sysfs(node / "name") or None,
            "device_id": f"0x{properties['device_id']:04x}" if "device_id" in properties else None,
            "render_node": f"/dev/dri/renderD{minor}" if minor > 0 else None,
            "compute_units": simds // simds_per_unit if simds and simds_per_unit else None,
            "integrated": not (device / "board_info").exists() if device.is_dir() else None,
            "vram_bytes": read_number(device / "mem_info_vram_total"),
            "gtt_bytes": read_number(device / "mem_info_gtt_total"),
            "vbios": read_sysfs(device / "vbios_version"),
            "firmware": _read_firmware(device),
            "performance_level": read_sysfs(device / "power_dpm_force_performance_level"),
            # gfx1151 hangs under load without these two; kernels from 6.18.4 on export them.
            "cwsr_sizes_known": {"cwsr_size", "ctl_stack_size"} <= properties.keys(),
        }


def read_gpu_memory(root: Path = Path("/")) -> list[GpuMemory]:
    """Return how much of each GPU's memory is in use now. On an APU, VRAM and GTT are one pool."""
    memories = []
    for gpu in list_gpus(root):
        node = gpu["render_node"]
        if node is None:
            continue
        device = root / f"sys/class/drm/{Path(node).name}/device"
        pools = ("vram", "gtt") if gpu["integrated"] else ("vram",)
        used = [value for pool in pools if (value := read_number(device / f"mem_info_{pool}_used")) is not None]
        total = [value for pool in pools if (value := gpu[f"{pool}_bytes"]) is not None]
        if len(used) == len(total) == len(pools):
            memories.append(GpuMemory(render_node=node, used_bytes=sum(used), total_bytes=sum(total)))
    return memories


MAX_FREE_WAIT_S = 60.0  # the driver frees the memory of a process some time after its end
_FREE_POLL_S = 0.5
_MAX_EXTRA_SHARE = 0.02  # of a GPU's memory, which may be used by others


def wait_until_free(
    idle: Sequence[GpuMemory], *, read: Callable[[], list[GpuMemory]] = read_gpu_memory, max_s: float = MAX_FREE_WAIT_S
) -> list[GpuMemory]:
    """Wait until each GPU's memory is as free as it was in `idle`, at most `max_s`. Return the use after that."""
    allowed = {gpu.render_node: gpu.used_bytes + _MAX_EXTRA_SHARE * gpu.total_bytes for gpu in idle}
    deadline = time.monotonic() + max_s
    while True:
        now = read()
        free = all(gpu.used_bytes <= allowed.get(gpu.render_node, gpu.used_bytes) for gpu in now)
        if free or time.monotonic() >= deadline:
            return now
        time.sleep(_FREE_POLL_S)


def gfx_target(version: int) -> str:
    """Return the compiler's name of a KFD gfx_target_version, such as gfx1151 for 110501."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _read_firmware(device: Path) -> dict[str, str]:
    """Return the versions of the loaded firmware, by part of the GPU."""
    files = sorted((device / "fw_version").glob("*_fw_version"))
    versions = {file.name.removesuffix("_fw_version"): read_sysfs(file) for file in files}
    return {part: version for part, version in versions.items() if version and version.strip("0x.")}


Gpu = Mapping[str, Any]  # as `list_gpus` yields it


def select_serving_gpus(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the discrete cards if there are any: an integrated GPU next to them serves no model. Else all GPUs."""
    discrete = [gpu for gpu in gpus if gpu.get("integrated") is False]
    return discrete or list(gpus)


# In the order of their effect: ROCR selects from all GPUs, HIP only from those of ROCR.
VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def select_container_gpus(gpus: Sequence[Gpu], devices: Sequence[str], environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs of a container, in vLLM's order.

    `devices`: as in a Compose file; if single render nodes are among them, only their GPUs count. `environment`: of
    the container, for VISIBLE_DEVICES. If neither selects GPUs, the result is `select_serving_gpus`. Raises
    HarnessError for a value that is not the number of a GPU.
    """
    paths = [str(device).split(":")[0] for device in devices]
    nodes = [path for path in paths if path.startswith("/dev/dri/renderD")]
    is_selected = bool(nodes) and "/dev/dri" not in paths
    selected = [gpu for gpu in gpus if not is_selected or gpu.get("render_node") in nodes]
    for name in VISIBLE_DEVICES:
        if (value := environment.get(name)) is None:
            continue
        is_selected, numbers = True, [number.strip() for number in value.split(",")]
        unknown = [number for number in numbers if not number.isdigit() or int(number) >= len(selected)]
        if unknown:
            raise HarnessError(f"{name} names '{unknown[0]}', and there are {len(selected)} GPUs here, counted from 0")
        selected = [selected[int(number)] for number in numbers]
    return selected if is_selected else select_serving_gpus(selected)


_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_AMOUNT = re.compile(r"^drm-memory-(vram|gtt):\s*(\d+)\s*([kmg]ib)?\s*$", re.IGNORECASE | re.MULTILINE)


class GpuProcess(NamedTuple):
    """A process that uses GPU memory."""

    pid: int
    name: str  # as in /proc/PID/comm, which cuts it to 15 characters
    bytes: int


def find_gpu_processes(root: Path = Path("/")) -> tuple[list[GpuProcess], int]:
    """Find the processes that use memory of an AMD GPU, the largest first, and the number of unreadable ones.

    The larger of two sources counts: the DRM clients of a process (fdinfo; drm-usage-stats in the kernel's
    documentation), and the compute driver's count for it (/sys/class/kfd/kfd/proc), which other users may read.
    """
    clients: set[tuple[str, str]] = set()
    processes, unreadable = [], 0
    for pid in list_pids(root):
        drm_bytes = _read_drm_memory(root / f"proc/{pid}/fdinfo", clients)
        if drm_bytes is None and read_sysfs(root / f"proc/{pid}/cmdline"):  # a kernel thread has no command line
            unreadable += 1
        kfd_files = (root / f"sys/class/kfd/kfd/proc/{pid}").glob("vram_*")
        size = max(drm_bytes or 0, sum(read_number(path) or 0 for path in kfd_files))
        if size:
            processes.append(GpuProcess(pid, read_sysfs(root / f"proc/{pid}/comm") or "?", size))
    return sorted(processes, key=lambda process: (-process.bytes, process.pid)), unreadable


def list_pids(root: Path) -> list[int]:
    """Return all process ids; empty without a /proc."""
    try:
        return sorted(int(name) for name in os.listdir(root / "proc") if name.isdigit())
    except OSError:
        return []


def _read_drm_memory(folder: Path, clients: set[tuple[str, str]]) -> int | None:
    """Return the bytes of a process's DRM clients that are not in `clients` yet, and add them there.

    None if this user may not read them.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0  # the process has ended
    except OSError:
        return None
    total = 0
    for name in names:
        fdinfo = read_sysfs(folder / name) or ""
        keys = dict(re.findall(r"^(drm-pdev|drm-client-id):\s*(\S+)", fdinfo, re.MULTILINE))
        client = (keys.get("drm-pdev", ""), keys.get("drm-client-id", ""))
        # A client may be there again: a duplicate of a descriptor, in this process or in one that inherited it.
        if "drm-driver:\tamdgpu" in fdinfo and client not in clients:
            clients.add(client)
            sizes = {kind: int(amount) * _UNITS[unit.lower()] for kind, amount, unit in _AMOUNT.findall(fdinfo)}
            total += sum(sizes.values())
    return total


# Process names of the kernel, cut to 15 characters.
_CHILD_NAMES = match_any([name for engine in engines() for name in engine.children])
_ENGINE_NAMES = match_any([name for engine in engines() for name in engine.processes])
# Processes that adopt orphans: the first process, a user's systemd, the first one of a container.
_ADOPTERS = {"systemd", "init", "docker-init", "tini", "dumb-init", "catatonit", "lemond", "bash", "sh"}


class EngineProcess(NamedTuple):
    """A process of an inference engine."""

    pid: int
    name: str
    orphaned: bool  # its server is gone


def find_engine_processes(root: Path) -> list[EngineProcess]:
    """Return the processes of inference engines on this machine."""
    running: dict[int, tuple[str, int]] = {}  # name and parent
    for pid in list_pids(root):
        # The name is in parentheses and may contain some itself; after it come the state and the parent.
        match = re.match(r"\d+ \((.*)\) (\S) (\d+)", read_sysfs(root / f"proc/{pid}/stat") or "", re.DOTALL)
        if match and match[2] != "Z":
            running[pid] = match[1], int(match[3])
    processes = []
    for pid, (name, parent) in running.items():
        if _ENGINE_NAMES.match(name):
            is_adopted = parent <= 1 or parent not in running or running[parent][0] in _ADOPTERS
            processes.append(EngineProcess(pid, name, is_adopted and _CHILD_NAMES.match(name) is not None))
    return processes


STANDING_LABELS: dict[Standing, str] = {
    "validated": "validated by its makers",
    "supported": "supported",
    "code": "has code for it",
    "wheels": "builds exist, not tried by their makers",
    "prepared": "prepared, cannot be installed yet",
    "unsupported": "unsupported",
}


class GfxTarget(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of the table."""

    target: str
    family: str
    architecture: str

    def standing(self, column: str) -> Standing:
        return support_columns()[column].targets.get(self.target, "unsupported")

    @property
    def instinct(self) -> bool:
        return self.architecture.startswith("CDNA")


class GfxTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """targets.yaml."""

    checked: str  # the day on which the sources were read
    targets: list[GfxTarget]


@cache
def support_columns() -> dict[str, Column]:
    """Return the images and builds of all servers, each with its GPU targets."""
    return {key: column for engine in engines() for key, column in engine.columns.items()}


@cache
def read_gfx_table() -> GfxTable:
    return read_table(Path(__file__).with_name("targets.yaml"), GfxTable)


def find_unsupported_targets(image: str, targets: Iterable[str]) -> list[str]:
    """Return the targets for which an image, such as vllm/vllm-openai-rocm:v0.31.0, is known to have no code."""
    for name, column in support_columns().items():
        for pattern, only in column.images.items():
            if fnmatchcase(image, pattern):
                supported = only or [
                    row.target for row in read_gfx_table().targets if row.standing(name) != "unsupported"
                ]
                return [target for target in dict.fromkeys(targets) if target not in supported]
    return []


def has_fp8(target: str) -> bool:
    """Check that vLLM computes FP8 on this gfx target; true for unknown ones.

    As `supports_fp8` of vLLM's ROCm platform: CDNA and RDNA 4, not RDNA 3 and 3.5.
    """
    return re.match(r"gfx(10[0-3]|11)", target) is None


def find_target(name: str) -> GfxTarget | None:
    """Return the row of a target such as gfx1151; None for an unknown one."""
    return next((row for row in read_gfx_table().targets if row.target == name), None)
