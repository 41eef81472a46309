"""What the doctor finds on machines that are trees of files."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.files import ROOT
from harness.machine.doctor import DockerEngine, diagnose
from harness.machine.findings import Finding, find_worst_level, finding_kinds, make_finding
from harness.machine.gpus import PciCard, find_target, pci_cards, read_gfx_table, support_columns
from harness.units import GIB
from tests import machines
from tests.machines import drm, write

ENGINE = DockerEngine(image_folder="/var/lib/docker", free_bytes=500 * 10**9)  # one with which all is well
RENDER = f"{machines.RENDER_GID} (render)"


def found(root: Path, docker: DockerEngine | None = ENGINE) -> dict[str, Finding]:
    """Findings by id; those that come more than once are an error here."""
    findings = diagnose(root, docker)
    by_id = {one.id: one for one in findings}
    assert len(by_id) == len(findings)
    return by_id


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    return {id: one.level for id, one in findings.items() if one.level != "ok"}


MACHINES: dict[str, tuple[Callable[[Path], Path], dict[str, str], dict[str, str]]] = {
    "strix-halo-carve-out": (machines.strix_halo_carve_out, {}, {
        "gpu.present": "gfx1151: Strix Halo (Ryzen AI Max, Radeon 8060S), 40 compute units",
        "memory.pool": "/dev/dri/renderD128 gfx1151: 94.50 GiB of 96.00 GiB VRAM free",
        "memory.holders": "1.5 GiB in use, by no process that can be seen",
        "kernel.cwsr": "the kernel has the CWSR fix for gfx1151 (cwsr_size and ctl_stack_size)",
        "access.groups": f"containers get the groups {RENDER}, by number",
    }),
    "strix-halo-gtt": (machines.strix_halo_gtt, {}, {
        "memory.pool": "/dev/dri/renderD128 gfx1151: 115.90 GiB of 116.00 GiB pages of the host (GTT) free; ...",
    }),
    "strix-halo-half": (machines.strix_halo_half, {"memory.half": "warning", "kernel.profile": "warning"}, {
        "memory.half": "the GPU gets 62.2 GiB of 124.5 GiB: GTT has its default size of half the RAM, the carve-out is "
                       "0.5 GiB",
    }),
    "strix-halo-old-kernel": (machines.strix_halo_old_kernel, {"kernel.cwsr": "blocker"}, {
        "kernel.cwsr": "Linux 6.17.8 lacks the CWSR fix for gfx1151 (no cwsr_size and ctl_stack_size): ROCm crashes or "
                       "hangs",
    }),
    "strix-point": (machines.strix_point, {}, {
        "gpu.present": "gfx1150: Strix Point (Ryzen AI 300, Radeon 890M), 16 compute units",
        "gpu.target": "... validated by its makers: Lemonade with vLLM; ...",
    }),
    "radeon": (lambda root: machines.radeon(root, 110000, 24), {}, {
        "gpu.present": "gfx1100: Radeon RX 7900, PRO W7900, W7800, 48 compute units",
        "memory.pool": "... 23.80 GiB of 24.00 GiB VRAM free",
    }),
    "radeon-rdna4": (lambda root: machines.radeon(root, 120001, 32), {}, {
        "gpu.present": "gfx1201: Radeon RX 9070, AI PRO R9700, 48 compute units",
        "memory.pool": "... 31.80 GiB of 32.00 GiB VRAM free",
    }),
    "eight-instincts": (machines.mi300x_eight, {}, {
        "gpu.present": "8 x gfx942: Instinct MI300 (MI300X, MI300A, MI325X), 304 compute units each",
        "gpu.target": "...; prepared, cannot be installed yet: Lemonade with vLLM",
        "memory.pool": 8 * "... 191.78 GiB of 191.98 GiB VRAM free",
        "access.render": f"8 render nodes from /dev/dri/renderD128 on, group {RENDER}",
    }),
    "no-gpu": (machines.no_gpu, {"gpu.present": "blocker"}, {"gpu.present": "there is no AMD GPU"}),
    "nvidia": (machines.nvidia_only, {"gpu.present": "blocker"}, {
        "gpu.present": "there is no AMD GPU, only one of NVIDIA, for which this project has no servers",
    }),
    "wsl": (lambda root: write(machines.no_gpu(root), {"dev/dxg": ""}), {"gpu.present": "blocker"}, {
        "gpu.present": "there is no AMD GPU: WSL offers /dev/dxg in its place, which the templates do not use",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine(tmp_path: Path, name: str) -> None:
    """The facts of each kind of machine; `...` is any text. What is wrong has a fix, and everything a source."""
    machine, expected, facts = MACHINES[name]
    seen = found(machine(tmp_path))
    assert levels(seen) == expected
    for id, fact in facts.items():
        assert re.fullmatch(re.escape(fact).replace(re.escape("..."), ".*"), seen[id].fact)
    for one in seen.values():
        assert (one.fix is None) == (one.level == "ok")
        assert one.source and one.fact
        assert "None" not in one.fact and "{" not in (one.fix or "")
    if "strix-halo" not in name:
        assert {"kernel.cwsr", "memory.half"}.isdisjoint(seen), "only gfx1151 needs it, only an APU shares its memory"
    if expected == {"gpu.present": "blocker"}:
        assert {one.topic for one in seen.values()} == {"gpu", "docker", "processes"}
        assert "`harness run first-look`" in (seen["gpu.present"].fix or "")
    if name == "strix-halo-old-kernel":
        assert "6.18.4 or newer" in (seen["kernel.cwsr"].fix or "")


def test_the_fix_of_a_gpu_that_gets_half_of_the_memory(tmp_path: Path) -> None:
    assert found(machines.strix_halo_half(tmp_path))["memory.half"].fix == (
        "boot with ttm.pages_limit=30408704 (116 GiB, leaves 8.5 GiB to the system; or `amd-ttm --set 116`), "
        "or set a large carve-out in the BIOS"
    )
    assert 116 * GIB == 30408704 * 4096


def test_a_gpu_without_its_driver(tmp_path: Path) -> None:
    slot = "sys/bus/pci/devices/0000:03:00.0"
    ids = {f"{slot}/class": "0x120000\n", f"{slot}/vendor": "0x1002\n", f"{slot}/device": "0x74a1\n"}
    root = write(machines.no_gpu(tmp_path), ids)
    assert list(pci_cards(root)) == [PciCard(slot="0000:03:00.0", vendor=0x1002, device=0x74A1)]
    seen = found(root)
    what = "the AMD GPU at 0000:03:00.0 (1002:74a1) is not known to the compute driver"
    assert seen["gpu.driver"].fact == f"{what}: amdgpu is not loaded"
    assert seen["gpu.driver"].fix is not None and seen["gpu.driver"].fix.startswith("sudo modprobe amdgpu")
    write(root, {"proc/cmdline": "quiet nomodeset\n"})
    assert found(root)["gpu.driver"].fix == "remove nomodeset from the kernel's command line and reboot"
    write(root, {"sys/module/amdgpu/refcnt": "0\n"})
    assert found(root)["gpu.driver"].fact == f"{what}, though amdgpu is loaded"


def test_targets_of_little_standing(tmp_path: Path) -> None:
    seen = found(machines.gpu(machines.no_gpu(tmp_path / "a"), 110003, vram_gib=8, gtt_gib=8))
    assert seen["gpu.target"].level == "warning"
    assert seen["gpu.target"].fact == (
        "gfx1103 (RDNA 3) on 2026-11-21; supported: Lemonade with llama.cpp (ROCm); builds exist, not tried by their "
        "makers: Lemonade with vLLM; unsupported: vLLM's ROCm image, llama.cpp's ROCm image, SGLang's ROCm images"
    )
    seen = found(machines.gpu(machines.no_gpu(tmp_path / "b"), 130000, vram_gib=8, gtt_gib=8))
    assert seen["gpu.target"].fact == (
        "gfx1300 is not in the table of 2026-11-21: no server is known to have code for it"
    )
    assert seen["gpu.present"].fact == "gfx1300: family unknown, 40 compute units"


def test_who_holds_the_memory(tmp_path: Path) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=30)
    machines.process(root, 900, "gnome-shell", 1, drm(5, vram_kib=300 << 10))
    machines.process(root, 4242, "llama-server", 4000, drm(9, vram_kib=28 << 20, gtt_kib=1 << 20))
    write(root, {"proc/4242/fdinfo/8": drm(9, vram_kib=28 << 20, gtt_kib=1 << 20)})  # the same client again
    seen = found(root)
    assert levels(seen) == dict.fromkeys(("memory.fraction", "memory.holders", "processes.engines"), "warning")
    assert seen["memory.pool"].fact == "/dev/dri/renderD128 gfx1151: 66.00 GiB of 96.00 GiB VRAM free"
    assert seen["memory.fraction"].fix == (
        "set gpu_memory_utilization to 0.66 or less, or to auto, or end what holds the memory"
    )
    assert seen["memory.holders"].fact == "held by llama-server (pid 4242) 29.0 GiB, gnome-shell (pid 900) 0.3 GiB"
    assert seen["memory.holders"].fix is not None
    assert seen["memory.holders"].fix.startswith("end llama-server (pid 4242) before measuring;")
    assert seen["processes.engines"].fact == "run already: llama-server (pid 4242)"


def test_the_compute_drivers_count_needs_no_rights(tmp_path: Path) -> None:
    root = machines.radeon(tmp_path, 110000, 24)
    machines.process(root, 77, "python3", 70)
    write(root, {"sys/class/kfd/kfd/proc/77/vram_4711": f"{3 * GIB}\n"})
    assert found(root)["memory.holders"].fact == "held by python3 (pid 77) 3.0 GiB"


def test_host_memory_that_other_programs_use_is_not_free_for_a_gtt(tmp_path: Path) -> None:
    root = machines.strix_halo_gtt(tmp_path)
    write(root, {"proc/meminfo": f"MemTotal: {int(124.5 * GIB) // 1024} kB\nMemAvailable: {58 * GIB // 1024} kB\n"})
    seen = found(root)
    assert levels(seen) == {"memory.fraction": "warning"}
    assert seen["memory.pool"].fact.endswith("; 58.00 GiB available on the host")
    assert seen["memory.fraction"].fix is not None and "to 0.46 or less" in seen["memory.fraction"].fix


def test_gttsize_alone_lies(tmp_path: Path) -> None:
    root = machines.host(
        tmp_path, name="h", kernel="6.18.9", ram_gib=125, available_gib=120, cmdline="amdgpu.gttsize=131072"
    )
    machines.power(machines.ttm(machines.gpu(root, 110501, vram_gib=0.5, gtt_gib=128), 62.5))
    seen = found(root)
    assert levels(seen) == dict.fromkeys(("memory.gttsize", "memory.half"), "warning")
    assert seen["memory.gttsize"].fix == "boot with ttm.pages_limit=30670848 instead of amdgpu.gttsize (4 KiB pages)"
    assert 117 * GIB == 30670848 * 4096, "never more than the RAM can give"
    assert seen["memory.half"].fact == (
        "the GPU gets 62.5 GiB of 125.0 GiB: GTT has a limit of half the RAM, the carve-out is 0.5 GiB"
    )
    assert seen["memory.gttsize"].fact == (
        "amdgpu.gttsize=131072 promises a GTT of 128.0 GiB, but ttm.pages_limit gives out 62.5 GiB: "
        "programs see more free memory than there is"
    )


def test_the_largest_safe_share_is_always_told(tmp_path: Path) -> None:
    root = machines.strix_halo_carve_out(tmp_path / "halo")
    assert found(root)["memory.fraction"].fact == (
        "gpu_memory_utilization is safe up to 0.92; vLLM's default of 0.92 fits"
    )
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=96 - 76.45)
    seen = found(root)
    assert levels(seen) == {"memory.fraction": "warning"}
    assert seen["memory.fraction"].fact == (
        "gpu_memory_utilization is safe up to 0.77; vLLM's default of 0.92 does not fit"
    )
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=95)
    seen = found(root)
    assert seen["memory.fraction"].fact == (
        "no gpu_memory_utilization is safe: nothing is left for vLLM; vLLM's default of 0.92 and the templates' 0.75 "
        "do not fit"
    )
    assert seen["memory.fraction"].fix is not None and seen["memory.fraction"].fix.startswith("end what holds")
    small = found(machines.radeon(tmp_path / "small", 110000, 1))
    assert "take llama.cpp with a small model" in (small["memory.fraction"].fix or "")
    close = found(machines.radeon(tmp_path / "close", 110000, 24))
    assert close["memory.fraction"].fact == (
        "gpu_memory_utilization is safe up to 0.90; vLLM's default of 0.92 is more, and may just start"
    )


def test_of_several_gpus_the_one_with_least_counts(tmp_path: Path) -> None:
    root = machines.mi300x_eight(tmp_path)
    assert found(root)["memory.fraction"].fact.startswith("gpu_memory_utilization is safe up to 0.92; ")
    write(root, {"sys/class/drm/renderD131/device/mem_info_vram_used": f"{150 * GIB}\n"})
    assert found(root)["memory.fraction"].fact == (
        "gpu_memory_utilization is safe up to 0.20; vLLM's default of 0.92 and the templates' 0.75 do not fit"
    )


@pytest.mark.parametrize(
    ("file", "content", "fact"),
    [
        ("mem_info_vram_total", "N/A\n", "unknown of unknown memory free"),
        ("mem_info_vram_used", "N/A\n", "unknown of 96.00 GiB VRAM free"),
        ("mem_info_vram_used", f"{200 * GIB}\n", "unknown of 96.00 GiB VRAM free"),
    ],
)
def test_memory_that_is_not_known_is_not_well(tmp_path: Path, file: str, content: str, fact: str) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    seen = found(write(root, {f"sys/class/drm/renderD128/device/{file}": content}))
    assert levels(seen) == {"memory.pool": "warning"}
    assert seen["memory.pool"].fact == f"/dev/dri/renderD128 gfx1151: {fact}"
    assert "memory.fraction" not in seen


@pytest.mark.parametrize(
    ("version", "by"),
    [(None, "another one, such as that of amdgpu-dkms,"), ("6.12.12", "amdgpu 6.12.12 of amdgpu-dkms")],
)
def test_a_new_kernel_whose_driver_was_replaced(tmp_path: Path, version: str | None, by: str) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, extra="cwsr_size 25214976\n")
    if version is not None:
        write(root, {"sys/module/amdgpu/version": f"{version}\n"})
    one = found(root)["kernel.cwsr"]
    assert (one.level, one.fact) == (
        "blocker",
        "Linux 6.18.4 has the CWSR fix for gfx1151, but its driver does not tell both of cwsr_size and "
        f"ctl_stack_size: {by} has replaced it, and ROCm crashes or hangs",
    )
    assert one.fix is not None and one.fix.startswith("remove the driver that has replaced the kernel's own")


def test_the_graphics_unit_beside_a_card_is_left_alone(tmp_path: Path) -> None:
    root = machines.radeon(tmp_path, 110000, 24)
    machines.gpu(root, 100306, minor=129, units=2, vram_gib=0.5, gtt_gib=31)
    seen = found(machines.ttm(root, 15))
    assert levels(seen) == {}
    assert seen["memory.pool"].fact == "/dev/dri/renderD128 gfx1100: 23.80 GiB of 24.00 GiB VRAM free"
    assert seen["gpu.target"].fact.startswith("gfx1100 ")


def test_a_process_left_behind_is_found_once(tmp_path: Path) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    machines.process(root, 4242, "VLLM::EngineCor", 1, drm(1, vram_kib=30 << 20))
    seen = found(root)
    assert levels(seen) == {"processes.orphans": "warning"}
    assert seen["processes.orphans"].fact.endswith("VLLM::EngineCor (pid 4242, holds 30.0 GiB)")


@pytest.mark.parametrize(
    ("version", "level", "fact"),
    [
        ("0x00000083", "warning", "MES firmware 0x83 is loaded, that of linux-firmware 20251125"),
        ("0x00000080", "ok", "MES firmware 0x80"),
    ],
)
def test_firmware(tmp_path: Path, version: str, level: str, fact: str) -> None:
    file = "sys/class/drm/renderD128/device/fw_version/mes_fw_version"
    seen = found(write(machines.strix_halo_carve_out(tmp_path), {file: f"{version}\n"}))["kernel.firmware"]
    assert (seen.level, seen.fact) == (level, fact)


def test_a_user_who_may_not_open_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    root = machines.strix_halo_carve_out(tmp_path)
    seen = found(root)
    assert levels(seen) == {"access.kfd": "warning", "access.render": "warning"}
    assert seen["access.kfd"].fact == (
        f"this user may not open /dev/kfd: mode 0660, group {RENDER}; containers of an engine that runs as "
        "root may, servers that you start yourself may not"
    )
    assert seen["access.kfd"].fix == "sudo usermod -aG render $USER, then log in again"
    rootless = DockerEngine(rootless=True)
    assert levels(found(root, docker=rootless)) == {
        "access.kfd": "blocker",
        "access.render": "blocker",
        "docker.rootless": "warning",
    }


def test_devices_that_are_missing_or_roots(tmp_path: Path) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    (root / "dev/kfd").unlink()
    (root / "dev/dri/renderD128").unlink()
    seen = found(root)
    assert levels(seen) == {"access.kfd": "blocker", "access.render": "blocker"}
    assert seen["access.render"].fact == "there is no /dev/dri/renderD128"


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (DockerEngine(problem="no permission to use the Docker Engine", remedy="x"), {"docker.reachable": "blocker"}),
        (DockerEngine(desktop=True), {"docker.desktop": "blocker"}),
        (DockerEngine(free_bytes=5 * 10**9), {"docker.disk": "blocker"}),
        (DockerEngine(free_bytes=20 * 10**9), {"docker.disk": "warning"}),
        (DockerEngine(stale=["container amd-llm-load-x-server"]), {"docker.stale": "warning"}),
    ],
    ids=["none", "desktop", "no-room", "little-room", "stale"],
)
def test_the_engine(tmp_path: Path, engine: DockerEngine, expected: dict[str, str]) -> None:
    assert levels(found(machines.strix_halo_carve_out(tmp_path), docker=engine)) == expected


def test_of_an_engine_elsewhere_this_machine_says_nothing(tmp_path: Path) -> None:
    seen = found(machines.no_gpu(tmp_path), docker=DockerEngine(host="gpubox"))
    assert levels(seen) == {"docker.remote": "warning"}
    assert {one.topic for one in seen.values()} == {"docker"}
    assert seen["docker.remote"].fact.startswith("DOCKER_HOST names gpubox: ")


def test_orphans_are_told_from_engines_that_serve(tmp_path: Path) -> None:
    root = machines.radeon(tmp_path, 110000, 24)
    machines.process(root, 50, "systemd", 1)
    machines.process(root, 100, "vllm", 90)
    machines.process(root, 101, "VLLM::EngineCor", 100)
    machines.process(root, 102, "VLLM::Worker_TP", 101)
    seen = found(root)
    assert levels(seen) == {"processes.engines": "warning"}
    assert seen["processes.engines"].fact == (
        "run already: vllm (pid 100), VLLM::EngineCor (pid 101), VLLM::Worker_TP (pid 102)"
    )
    machines.process(root, 201, "VLLM::EngineCor", 1, drm(3, vram_kib=2 << 20))
    machines.process(root, 202, "VLLM::EngineCor", 50)
    machines.process(root, 203, "VLLM::EngineCor", 299)
    orphans = found(root)["processes.orphans"]
    assert orphans.fact == (
        "orphaned engine: VLLM::EngineCor (pid 201, holds 2.0 GiB), "
        "VLLM::EngineCor (pid 202), VLLM::EngineCor (pid 203)"
    )
    assert orphans.fix == "kill -9 201 202 203"


def test_the_worst_finding_counts() -> None:
    ok = make_finding("kernel.profile", "ok", "off")
    warning = make_finding("docker.stale", "warning", "x")
    blocker = make_finding("docker.desktop", "blocker", "no GPU")
    assert [find_worst_level(findings) for findings in ([], [ok], [ok, warning], [warning, blocker, ok])] == [
        "ok", "ok", "warning", "blocker"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"kernel\.profile cannot be a blocker"):
        make_finding("kernel.profile", "blocker", "x")


def test_every_finding_is_found_by_a_test_at_every_level() -> None:
    """What no test provokes may not be promised."""
    source = Path(__file__).read_text()
    assert [id for id in finding_kinds() if f'"{id}"' not in source] == []


def test_an_empty_tree_has_no_gpu_and_no_traceback(tmp_path: Path) -> None:
    assert [(one.id, one.level) for one in diagnose(tmp_path)] == [
        ("gpu.present", "blocker"), ("processes.orphans", "ok")
    ]  # fmt: skip


def test_this_machine_can_be_looked_at() -> None:
    assert {one.topic for one in diagnose()} >= {"gpu", "processes"}


def test_the_table_of_targets() -> None:
    names = [row.target for row in read_gfx_table().targets]
    assert len(set(names)) == len(names)
    assert {target for column in support_columns().values() for target in column.targets} <= set(names)
    halo = find_target("gfx1151")
    assert halo is not None and (halo.standing("lemonade-vllm"), halo.standing("vllm-rocm")) == ("validated", "code")
    assert find_target("gfx906") is None


def test_the_page_lists_every_finding_and_target() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    for row in finding_kinds().values():
        assert f"| `{row.id}` | {row.looks_at} | " in text
    assert all(f"| `{row.target}` | {row.family}" in text for row in read_gfx_table().targets)


@pytest.mark.parametrize("garbage", [b"", b"-1\n", b"\xff\x00 garbage\n", b"999999999999999999999999\n"])
def test_whatever_a_driver_answers_there_is_a_finding_and_no_traceback(tmp_path: Path, garbage: bytes) -> None:
    root = machines.strix_halo_half(tmp_path)
    machines.process(root, 201, "VLLM::EngineCor", 1, drm(3, vram_kib=2 << 20))
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        before = path.read_bytes()
        path.write_bytes(garbage)
        assert {one.topic for one in diagnose(root, ENGINE)} >= {"gpu", "docker", "processes"}, path
        path.write_bytes(before)
