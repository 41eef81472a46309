"""Facts of machines that are trees of files."""

import os
from pathlib import Path

import pytest

from harness.machine.gpus import (
    choose_cpu_dtype,
    find_device_groups,
    gfx_target,
    list_gpus,
    read_gpu_memory,
    read_machine,
)
from tests.support.machines import CPU_NODE, NODES, write

STRIX_HALO = """cpu_cores_count 0
simd_count 80
simd_per_cu 2
gfx_target_version 110501
vendor_id 4098
device_id 5510
drm_render_minor 128
cwsr_size 25214976
ctl_stack_size 32768
"""


@pytest.fixture
def strix_halo(tmp_path: Path) -> Path:
    device = "sys/class/drm/renderD128/device"
    return write(
        tmp_path,
        {
            f"{NODES}/0/properties": CPU_NODE,
            f"{NODES}/1/properties": STRIX_HALO,
            f"{NODES}/1/name": "ip discovery\n",
            f"{device}/mem_info_vram_total": "536870912\n",
            f"{device}/mem_info_vram_used": "163840000\n",
            f"{device}/mem_info_gtt_total": "133143986176\n",
            f"{device}/mem_info_gtt_used": "14680064\n",
            f"{device}/power_dpm_force_performance_level": "auto\n",
            f"{device}/vbios_version": "113-STRXLGEN-001\n",
            f"{device}/fw_version/mec_fw_version": "0x0000001e\n",
            f"{device}/fw_version/smc_fw_version": "0x00647200\n",
            f"{device}/fw_version/uvd_fw_version": "0x00000000\n",
            "opt/rocm/.info/version": "7.14.0-1\n",
            "proc/sys/kernel/hostname": "halo\n",
            "proc/sys/kernel/osrelease": "6.18.4\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD RYZEN AI MAX+ 395\n\nprocessor\t: 1\n",
            "proc/meminfo": "MemTotal:       130023648 kB\nMemFree: 1 kB\n",
            "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=UUID=x quiet amd_iommu=off ttm.pages_limit=32505856\n",
            "sys/module/ttm/parameters/pages_limit": "32505856\n",
            "sys/firmware/acpi/platform_profile": "performance\n",
        },
    )


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("flags\t\t: fpu sse4_2 avx2 fma avx512f avx512_bf16 amx_bf16\n", "bfloat16"),
        ("flags\t\t: fpu avx2 amx_bf16\n", "bfloat16"),
        ("Features\t: fp asimd sve i8mm bf16\n", "bfloat16"),
        ("flags\t\t: fpu sse4_2 avx2 fma\n", "float32"),
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512_vnni\n", "float32"),  # emulated with AVX-512, too
        ("model name\t: avx512_bf16\n", "float32"),
        ("", "float32"),
    ],
)
def test_the_data_type_that_a_cpu_computes_fastest(tmp_path: Path, cpuinfo: str, dtype: str) -> None:
    assert choose_cpu_dtype(tmp_path) == "float32"
    root = write(tmp_path, {"proc/cpuinfo": f"processor\t: 0\n{cpuinfo}"})
    assert choose_cpu_dtype(root) == dtype


def test_memory_in_use_is_one_pool_on_an_apu_and_no_fact_of_the_machine(strix_halo: Path) -> None:
    (facts,) = read_gpu_memory(strix_halo)
    assert facts.render_node == "/dev/dri/renderD128"
    assert (facts.used_bytes, facts.total_bytes) == (163840000 + 14680064, 536870912 + 133143986176)
    before = read_machine(strix_halo)
    (strix_halo / "sys/class/drm/renderD128/device/mem_info_gtt_used").write_text("99999999\n")
    assert read_machine(strix_halo) == before


def test_a_strix_halo(strix_halo: Path) -> None:
    facts = read_machine(strix_halo, docker="28.0")
    assert (facts.name, facts.kernel, facts.docker, facts.rocm) == ("halo", "6.18.4", "28.0", "7.14.0-1")
    assert (facts.cpu, facts.cores, facts.ram_bytes) == ("AMD RYZEN AI MAX+ 395", 2, 130023648 * 1024)
    assert facts.gpus == [
        {
            "target": "gfx1151",
            "name": "ip discovery",
            "device_id": "0x1586",
            "render_node": "/dev/dri/renderD128",
            "compute_units": 40,
            "integrated": True,
            "vram_bytes": 536870912,
            "gtt_bytes": 133143986176,
            "vbios": "113-STRXLGEN-001",
            "firmware": {"mec": "0x0000001e", "smc": "0x00647200"},
            "performance_level": "auto",
            "cwsr_sizes_known": True,
        }
    ]
    assert facts.kernel_parameters == {
        "amd_iommu": "off",
        "ttm.pages_limit": "32505856",
        "ttm.pages_limit (now)": "32505856",
        "power profile": "performance",
    }


def test_a_kernel_without_the_fix_and_a_card_of_its_own_are_seen(strix_halo: Path) -> None:
    (strix_halo / NODES / "1/properties").write_text(STRIX_HALO.replace("cwsr_size", "other_size"))
    (strix_halo / "sys/class/drm/renderD128/device/board_info").touch()
    assert [(gpu["cwsr_sizes_known"], gpu["integrated"]) for gpu in list_gpus(strix_halo)] == [(False, False)]


def test_an_empty_machine_has_no_facts(tmp_path: Path) -> None:
    facts = read_machine(tmp_path)
    assert (facts.name, facts.gpus, facts.kernel_parameters) == ("unknown", [], {})
    assert (facts.kernel, facts.cpu, facts.cores, facts.ram_bytes, facts.docker) == (None, None, None, None, None)
    assert find_device_groups(tmp_path) == []


def test_the_compilers_names() -> None:
    targets = {90010: "gfx90a", 90402: "gfx942", 110501: "gfx1151"}
    assert {version: gfx_target(version) for version in targets} == targets


def test_groups_come_from_the_device_nodes_and_roots_is_none(tmp_path: Path) -> None:
    write(tmp_path, {"dev/kfd": "", "dev/dri/renderD128": "", "dev/dri/card0": "", "dev/dri/by-path/x": ""})
    if os.geteuid() == 0:
        for name, group in (("kfd", 0), ("dri/renderD128", 992), ("dri/card0", 44), ("dri/by-path/x", 7)):
            os.chown(tmp_path / "dev" / name, -1, group)
        assert find_device_groups(tmp_path) == [44, 992]
    else:
        assert find_device_groups(tmp_path) == [os.getgid()]
