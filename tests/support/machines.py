"""Machines as trees of files: what /proc, /sys, /dev and /etc of a box with some AMD GPU look like."""

import os
from collections.abc import Mapping
from pathlib import Path

from harness.base.units import GIB

NODES = "sys/class/kfd/kfd/topology/nodes"
CPU_NODE = "cpu_cores_count 32\nsimd_count 0\ngfx_target_version 0\ndrm_render_minor 0\n"
CWSR = "cwsr_size 25214976\nctl_stack_size 32768\n"
# Only root can give files away; for anybody else the own group plays the part of `render`.
RENDER_GID = 992 if os.geteuid() == 0 else os.getegid()


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def host(root: Path, *, name: str, kernel: str, ram_gib: float, available_gib: float, cmdline: str = "") -> Path:
    """What every machine has."""
    ram, available = int(ram_gib * GIB) // 1024, int(available_gib * GIB) // 1024
    return write(
        root,
        {
            "proc/sys/kernel/hostname": f"{name}\n",
            "proc/sys/kernel/osrelease": f"{kernel}\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: A Processor\n",
            "proc/meminfo": f"MemTotal:       {ram} kB\nMemAvailable:   {available} kB\n",
            "proc/cmdline": f"BOOT_IMAGE=/vmlinuz root=UUID=x quiet {cmdline}\n",
            "proc/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n",
            "etc/group": f"root:x:0:\nrender:x:{RENDER_GID}:\n",
            f"{NODES}/0/properties": CPU_NODE,
        },
    )


def gpu(
    root: Path,
    version: int,
    *,
    minor: int = 128,
    vram_gib: float,
    gtt_gib: float,
    vram_used_gib: float = 0.2,
    gtt_used_gib: float = 0.1,
    card: bool = False,
    extra: str = CWSR,
) -> Path:
    """One GPU of KFD version such as 110501; `card` for one of its own, else an APU."""
    node = minor - 127
    device = f"sys/class/drm/renderD{minor}/device"
    properties = (
        f"simd_count 80\nsimd_per_cu 2\ngfx_target_version {version}\nvendor_id 4098\n"
        f"device_id 5510\ndrm_render_minor {minor}\n{extra}"
    )
    files = {
        f"{NODES}/{node}/properties": properties,
        f"{NODES}/{node}/name": "ip discovery\n",
        f"{device}/mem_info_vram_total": f"{int(vram_gib * GIB)}\n",
        f"{device}/mem_info_vram_used": f"{int(vram_used_gib * GIB)}\n",
        f"{device}/mem_info_gtt_total": f"{int(gtt_gib * GIB)}\n",
        f"{device}/mem_info_gtt_used": f"{int(gtt_used_gib * GIB)}\n",
        f"{device}/power_dpm_force_performance_level": "auto\n",
        "sys/module/amdgpu/refcnt": "1\n",
        "dev/kfd": "",
        f"dev/dri/renderD{minor}": "",
        f"sys/bus/pci/devices/0000:c{node}:00.0/class": "0x030000\n",
        f"sys/bus/pci/devices/0000:c{node}:00.0/vendor": "0x1002\n",
        f"sys/bus/pci/devices/0000:c{node}:00.0/device": "0x1586\n",
    }
    if card:
        files[f"{device}/board_info"] = "type : oam\n"
    write(root, files)
    for path in (root / "dev/kfd", root / f"dev/dri/renderD{minor}"):
        path.chmod(0o660)
        if os.geteuid() == 0:
            os.chown(path, 0, RENDER_GID)
    return root


def ttm(root: Path, pages_limit_gib: float) -> Path:
    return write(root, {"sys/module/ttm/parameters/pages_limit": f"{int(pages_limit_gib * GIB) // 4096}\n"})


def power(root: Path, profile: str = "performance") -> Path:
    return write(root, {"sys/firmware/acpi/platform_profile": f"{profile}\n"})


def process(root: Path, pid: int, name: str, parent: int, fdinfo: str | None = None) -> Path:
    files = {
        f"proc/{pid}/comm": f"{name}\n",
        f"proc/{pid}/cmdline": f"{name}\0",
        f"proc/{pid}/stat": f"{pid} ({name}) S {parent} {pid} {pid} 0 -1\n",
    }
    if fdinfo is not None:
        files[f"proc/{pid}/fdinfo/7"] = fdinfo
    (root / f"proc/{pid}/fdinfo").mkdir(parents=True, exist_ok=True)
    return write(root, files)


def drm(client: int, *, vram_kib: int = 0, gtt_kib: int = 0) -> str:
    """What the kernel tells of a descriptor of a GPU."""
    return (
        f"pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t{client}\ndrm-pdev:\t0000:c1:00.0\n"
        f"drm-memory-vram:\t{vram_kib} KiB\ndrm-memory-gtt:\t{gtt_kib} KiB\ndrm-memory-cpu:\t0 KiB\n"
    )


def strix_halo_carve_out(root: Path) -> Path:
    """128 GB, of which the BIOS gives 96 to the GPU; a desktop uses some of it."""
    host(root, name="halo", kernel="6.18.4", ram_gib=31, available_gib=25, cmdline="amd_iommu=off")
    gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=1.5)
    return power(ttm(root, 15.5))


def strix_halo_gtt(root: Path) -> Path:
    """128 GB with a carve-out of 512 MB, and ttm.pages_limit raised."""
    host(root, name="halo", kernel="6.18.9", ram_gib=124.5, available_gib=121, cmdline="ttm.pages_limit=30408704")
    gpu(root, 110501, vram_gib=0.5, gtt_gib=116)
    return power(ttm(root, 116))


def strix_halo_half(root: Path) -> Path:
    """The same, with nothing set."""
    host(root, name="halo", kernel="6.18.9", ram_gib=124.5, available_gib=121)
    gpu(root, 110501, vram_gib=0.5, gtt_gib=62.25)
    return power(ttm(root, 62.25), profile="balanced")


def strix_halo_old_kernel(root: Path) -> Path:
    """One lacking the kernel fix."""
    host(root, name="halo", kernel="6.17.8", ram_gib=31, available_gib=25)
    gpu(root, 110501, vram_gib=96, gtt_gib=15.5, extra="")
    return power(ttm(root, 15.5))


def radeon(root: Path, version: int, vram_gib: float) -> Path:
    """A card of its own, such as RX 7900 XTX (110000, 24) or R9700 (120001, 32)."""
    host(root, name="tower", kernel="6.14.0", ram_gib=62, available_gib=55)
    return gpu(root, version, vram_gib=vram_gib, gtt_gib=31, card=True)


def mi300x_eight(root: Path) -> Path:
    host(root, name="mi300x", kernel="5.15.0-139-generic", ram_gib=2015, available_gib=1950)
    for minor in range(128, 136):
        gpu(root, 90402, minor=minor, vram_gib=191.98, gtt_gib=1007, card=True, extra="")
    return write(root, {"proc/sys/kernel/numa_balancing": "1\n"})


def no_gpu(root: Path) -> Path:
    return host(root, name="laptop", kernel="6.12.1", ram_gib=15, available_gib=10)
