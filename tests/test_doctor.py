"""What the doctor finds on machines that are trees of files."""

from pathlib import Path

import pytest

from harness.machine.doctor import DockerEngine, User, diagnose
from harness.machine.findings import Finding, finding, known, worst
from harness.machine.gpus import PciCard, columns, pci_cards, table, target_of
from harness.paths import ROOT
from harness.units import GIB
from tests import machines
from tests.machines import drm, write

ENGINE = DockerEngine(image_folder="/var/lib/docker", free_bytes=500 * 10**9)  # one with which all is well
RENDER = f"{machines.RENDER_GID} (render)"
MEMBER = User(54321, frozenset({54321, machines.RENDER_GID}))
STRANGER = User(54321, frozenset({54321}))


def found(root: Path, docker: DockerEngine | None = ENGINE, user: User = MEMBER) -> dict[str, Finding]:
    """Findings by id; those that come more than once are an error here."""
    findings = diagnose(root, docker, user)
    by_id = {one.id: one for one in findings}
    assert len(by_id) == len(findings)
    return by_id


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    return {id: one.level for id, one in findings.items() if one.level != "ok"}


def test_strix_halo_with_a_carve_out_of_96_gb(tmp_path: Path) -> None:
    seen = found(machines.strix_halo_carve_out(tmp_path))
    assert levels(seen) == {}
    assert seen["gpu.present"].fact == "gfx1151: Strix Halo (Ryzen AI Max, Radeon 8060S), 40 compute units"
    assert seen["memory.pool"].fact == "VRAM of 96.0 GiB counts, 94.5 GiB free (the GTT of 15.5 GiB does not)"
    assert seen["memory.holders"].fact == "1.5 GiB in use, by no process that can be seen"
    assert seen["kernel.cwsr"].fact == "the kernel has the CWSR fix for gfx1151 (cwsr_size and ctl_stack_size)"
    assert seen["access.groups"].fact == f"containers get the groups {RENDER}, by number"


def test_strix_halo_with_512_mb_and_gtt_or_half_of_its_memory(tmp_path: Path) -> None:
    seen = found(machines.strix_halo_gtt(tmp_path / "gtt"))
    assert levels(seen) == {}
    assert seen["memory.pool"].fact == "GTT of 116.0 GiB counts, 115.9 GiB free (the carve-out of 0.5 GiB does not)"
    seen = found(machines.strix_halo_half(tmp_path / "half"))
    assert levels(seen) == dict.fromkeys(("memory.half", "kernel.profile", "kernel.governor"), "warning")
    assert seen["memory.half"].fact.startswith("the GPU gets 62.2 GiB of 124.5 GiB: GTT has its default size of half")
    assert "ttm.pages_limit=30408704 (116 GiB, leaves 8.5 GiB to the system" in (seen["memory.half"].fix or "")
    assert 116 * GIB == 30408704 * 4096


def test_strix_halo_without_the_kernel_fix(tmp_path: Path) -> None:
    seen = found(machines.strix_halo_old_kernel(tmp_path))
    assert levels(seen) == {"kernel.cwsr": "blocker"}
    assert seen["kernel.cwsr"].fact.startswith("Linux 6.17.8 lacks the CWSR fix for gfx1151 (no cwsr_size and ctl_st")
    assert "6.18.4 or newer" in (seen["kernel.cwsr"].fix or "")


def test_strix_point(tmp_path: Path) -> None:
    seen = found(machines.strix_point(tmp_path))
    assert levels(seen) == {}
    assert seen["gpu.present"].fact == "gfx1150: Strix Point (Ryzen AI 300, Radeon 890M), 16 compute units"
    assert "kernel.cwsr" not in seen, "only gfx1151 needs it"
    assert "validated by its makers: Lemonade with vLLM;" in seen["gpu.target"].fact


@pytest.mark.parametrize(
    ("version", "vram", "family"),
    [(110000, 24, "gfx1100: Radeon RX 7900, PRO W7900, W7800"), (120001, 32, "gfx1201: Radeon RX 9070, AI PRO R9700")],
)
def test_a_card_of_its_own(tmp_path: Path, version: int, vram: int, family: str) -> None:
    seen = found(machines.radeon(tmp_path, version, vram))
    assert levels(seen) == {}
    assert seen["gpu.present"].fact == f"{family}, 48 compute units"
    assert seen["memory.pool"].fact == f"VRAM of {vram}.0 GiB counts, {vram - 0.2:.1f} GiB free"
    assert {"kernel.cwsr", "kernel.numa", "memory.half"}.isdisjoint(seen)


def test_eight_instincts(tmp_path: Path) -> None:
    seen = found(machines.mi300x_eight(tmp_path))
    assert levels(seen) == {"kernel.numa": "warning"}
    assert seen["gpu.present"].fact == "8 x gfx942: Instinct MI300 (MI300X, MI300A, MI325X), 304 compute units each"
    assert seen["gpu.target"].fact.endswith("; prepared, cannot be installed yet: Lemonade with vLLM")
    assert seen["memory.pool"].fact == "8 x VRAM of 192.0 GiB, 191.8 GiB free"
    assert seen["access.render"].fact == f"8 render nodes from /dev/dri/renderD128 on, group {RENDER}"
    assert seen["kernel.numa"].fix == "sudo sysctl kernel.numa_balancing=0"
    write(tmp_path, {"proc/sys/kernel/numa_balancing": "0\n"})
    assert levels(found(tmp_path)) == {}


def test_a_machine_without_gpu_has_one_blocker_and_is_reported_what_runs(tmp_path: Path) -> None:
    root = machines.no_gpu(tmp_path / "none")
    seen = found(root)
    assert levels(seen) == {"gpu.present": "blocker"}
    assert seen["gpu.present"].fact == "there is no AMD GPU"
    assert "`harness run first-look`" in (seen["gpu.present"].fix or "")
    assert {one.topic for one in seen.values()} == {"gpu", "docker", "processes"}
    assert "WSL offers /dev/dxg" in found(write(root, {"dev/dxg": ""}))["gpu.present"].fact
    seen = found(machines.nvidia_only(tmp_path / "nvidia"))
    assert levels(seen) == {"gpu.present": "blocker"} and "only one of NVIDIA" in seen["gpu.present"].fact


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
    assert seen["gpu.target"].fact.partition(" on ")[0] == "gfx1103 (RDNA 3)"
    assert "; supported: Lemonade with llama.cpp (ROCm); builds exist, not tried by their makers: Lemonade with" in (
        seen["gpu.target"].fact
    )
    seen = found(machines.gpu(machines.no_gpu(tmp_path / "b"), 130000, vram_gib=8, gtt_gib=8))
    assert seen["gpu.target"].fact.startswith("gfx1300 is not in the table of ")
    assert seen["gpu.present"].fact == "gfx1300: family unknown, 40 compute units"


def test_different_gpus_in_one_machine(tmp_path: Path) -> None:
    root = machines.radeon(tmp_path, 110000, 24)
    machines.gpu(root, 100306, minor=129, units=2, vram_gib=0.5, gtt_gib=31)
    seen = found(machines.ttm(root, 15))
    assert levels(seen) == {"gpu.mixed": "warning"}
    assert seen["gpu.mixed"].fact.startswith("1 x gfx1100 and 1 x gfx1036 are in one machine")
    assert "[/dev/kfd, /dev/dri/renderD128]" in (seen["gpu.mixed"].fix or "")
    # The graphics unit next to a card does not count.
    assert seen["memory.pool"].fact == "VRAM of 24.0 GiB counts, 23.8 GiB free"
    assert seen["gpu.target"].fact.startswith("gfx1100 ")


def test_who_holds_the_memory(tmp_path: Path) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=30)
    machines.process(root, 900, "gnome-shell", 1, drm(5, vram_kib=300 << 10))
    machines.process(root, 4242, "llama-server", 4000, drm(9, vram_kib=28 << 20, gtt_kib=1 << 20))
    write(root, {"proc/4242/fdinfo/8": drm(9, vram_kib=28 << 20, gtt_kib=1 << 20)})  # the same client again
    seen = found(root)
    assert levels(seen) == dict.fromkeys(("memory.fraction", "memory.holders", "processes.engines"), "warning")
    assert seen["memory.pool"].fact == "VRAM of 96.0 GiB counts, 66.0 GiB free (the GTT of 15.5 GiB does not)"
    assert (seen["memory.fraction"].fix or "").startswith("set gpu_memory_utilization to 0.66 or less, or to auto, or")
    assert seen["memory.holders"].fact == "held by llama-server (pid 4242) 29.0 GiB, gnome-shell (pid 900) 0.3 GiB"
    assert (seen["memory.holders"].fix or "").startswith("end llama-server (pid 4242) before measuring;")
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
    assert "115.9 GiB free, of which the host can give 58.0 GiB" in seen["memory.pool"].fact
    assert (seen["memory.fraction"].fix or "").startswith("set gpu_memory_utilization to 0.46 or less, or to auto, or")


def test_gttsize_alone_lies(tmp_path: Path) -> None:
    root = machines.host(
        tmp_path, name="h", kernel="6.18.9", ram_gib=125, available_gib=120, cmdline="amdgpu.gttsize=131072"
    )
    machines.power(machines.ttm(machines.gpu(root, 110501, vram_gib=0.5, gtt_gib=128), 62.5))
    seen = found(root)
    assert levels(seen) == dict.fromkeys(("memory.gttsize", "memory.half"), "warning")
    assert seen["memory.gttsize"].fix == "boot with ttm.pages_limit=30670848 instead of amdgpu.gttsize (4 KiB pages)"
    assert 117 * GIB == 30670848 * 4096, "never more than the RAM can give"
    assert seen["memory.half"].fact.startswith("the GPU gets 62.5 GiB of 125.0 GiB: GTT has a limit of half the RAM")
    assert "promises a GTT of 128.0 GiB, but ttm.pages_limit gives out 62.5 GiB" in seen["memory.gttsize"].fact


def test_the_largest_safe_share_is_always_told(tmp_path: Path) -> None:
    def shown(root: Path) -> tuple[str, str]:
        one = found(root)["memory.fraction"]
        return one.fact.removeprefix("gpu_memory_utilization is safe up to "), one.fix or ""

    root = machines.strix_halo_carve_out(tmp_path / "halo")
    assert shown(root) == ("0.92; vLLM's default of 0.92 fits", "")
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=96 - 76.45)
    assert levels(found(root)) == {"memory.fraction": "warning"}
    # No process is seen that could be ended.
    fix = "set gpu_memory_utilization to 0.77 or less, or to auto"
    assert shown(root) == ("0.77; vLLM's default of 0.92 does not fit", fix)
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=95)
    fact, fix = shown(root)
    assert fact.startswith(
        "no gpu_memory_utilization is safe: nothing is left for vLLM; vLLM's default of 0.92 and the"
    )
    assert fix.startswith("end what holds")
    assert shown(machines.radeon(tmp_path / "small", 110000, 1))[1].startswith("take llama.cpp with a small model")
    close = shown(machines.radeon(tmp_path / "close", 110000, 24))
    assert close[0] == "0.90; vLLM's default of 0.92 is more, and may just start"


def test_of_several_gpus_each_has_its_share(tmp_path: Path) -> None:
    root = machines.mi300x_eight(tmp_path)
    assert found(root)["memory.fraction"].fact.startswith("gpu_memory_utilization is safe up to 0.92 on each of 8 GPUs")
    write(root, {"sys/class/drm/renderD131/device/mem_info_vram_used": f"{150 * GIB}\n"})
    assert "up to 0.92 on 7 GPUs, 0.20 on /dev/dri/renderD131; vLLM's default" in found(root)["memory.fraction"].fact


@pytest.mark.parametrize(
    ("file", "content", "fact"),
    [
        ("mem_info_vram_total", "N/A\n", "does not tell the sizes of carve-out and GTT, of which the larger counts"),
        ("mem_info_vram_used", "N/A\n", "does not tell how much of its VRAM is in use"),
        ("mem_info_vram_used", f"{200 * GIB}\n", "tells 200.00 GiB of its VRAM in use, more than the 96.00 GiB of it"),
    ],
)
def test_memory_that_is_not_known_is_not_well(tmp_path: Path, file: str, content: str, fact: str) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    seen = found(write(root, {f"sys/class/drm/renderD128/device/{file}": content}))
    assert levels(seen) == {"memory.pool": "warning"}
    assert seen["memory.pool"].fact == f"/dev/dri/renderD128: the driver {fact}"
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
    assert one.level == "blocker" and f"cwsr_size and ctl_stack_size: {by} has replaced it" in one.fact
    assert (one.fix or "").startswith("remove the driver that has replaced the kernel's own")


def test_a_gtt_that_the_ram_cannot_fill(tmp_path: Path) -> None:
    root = machines.strix_halo_gtt(tmp_path / "gtt")
    machines.ttm(machines.gpu(root, 110501, vram_gib=0.5, gtt_gib=128), 128)
    assert (found(root)["memory.overcommit"].fix or "").startswith("boot with ttm.pages_limit=30408704")
    root = machines.strix_halo_carve_out(tmp_path / "carve-out")
    machines.ttm(machines.gpu(root, 110501, vram_gib=96, gtt_gib=124), 124)
    fact = found(root)["memory.overcommit"].fact
    assert fact.endswith("but the carve-out of 96.0 GiB leaves only 31.0 GiB of RAM to fill it")


MES = "sys/class/drm/renderD128/device/fw_version/mes_fw_version"
DPKG = "Package: bash\nStatus: install ok installed\nVersion: 5.2\n\nPackage: linux-firmware\n"


@pytest.mark.parametrize(
    ("file", "content", "level", "fact"),
    [
        (MES, "0x00000083\n", "warning", "MES firmware 0x83 is loaded, that of linux-firmware 20251125"),
        (MES, "0x00000080\n", "ok", "MES firmware 0x80"),
        ("var/lib/dpkg/status", DPKG + "Status: install ok installed\nVersion: 20251125-1\n", "warning",
         "linux-firmware 20251125-1 is installed"),
        ("var/lib/pacman/local/linux-firmware-amdgpu-20251125-2/desc", "%NAME%\n", "warning",
         "linux-firmware-amdgpu 20251125 is installed"),
        ("var/lib/dpkg/status", DPKG + "Status: deinstall ok config-files\nVersion: 20251125\n", None, None),
    ],
    ids=["loaded", "good", "dpkg", "pacman", "removed"],
)  # fmt: skip
def test_firmware(tmp_path: Path, file: str, content: str, level: str | None, fact: str | None) -> None:
    seen = found(write(machines.strix_halo_carve_out(tmp_path), {file: content})).get("kernel.firmware")
    assert (seen and seen.level, seen and seen.fact) == (level, fact)


def test_kernel_settings(tmp_path: Path) -> None:
    root = machines.power(machines.strix_halo_carve_out(tmp_path), governor="powersave")
    # The energy preference is as good as the governor.
    write(root, {"sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference": "performance\n"})
    assert found(root)["kernel.governor"].level == "ok"
    level = "sys/class/drm/renderD128/device/power_dpm_force_performance_level"
    seen = found(write(root, {"sys/module/amdgpu/version": "6.14.14\n", level: "low\n"}))
    assert levels(seen) == dict.fromkeys(("kernel.dkms", "kernel.performance_level"), "warning")
    assert seen["kernel.dkms"].fact == "amdgpu 6.14.14 of amdgpu-dkms has replaced the kernel's own driver"
    assert "/sys/class/drm/renderD128/device/power_dpm_force" in (seen["kernel.performance_level"].fix or "")


def test_a_user_who_may_not_open_the_devices_and_devices_that_are_missing(tmp_path: Path) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    seen = found(root, user=STRANGER)
    assert levels(seen) == {"access.kfd": "warning", "access.render": "warning"}
    assert seen["access.kfd"].fact.startswith(f"this user may not open /dev/kfd: mode 0660, group {RENDER};")
    assert seen["access.kfd"].fix == "sudo usermod -aG render $USER, then log in again"
    rootless = levels(found(root, docker=DockerEngine(rootless=True), user=STRANGER))
    assert rootless == {"access.kfd": "blocker", "access.render": "blocker", "docker.rootless": "warning"}
    (root / "dev/kfd").unlink()
    (root / "dev/dri/renderD128").unlink()
    seen = found(root)
    assert levels(seen) == {"access.kfd": "blocker", "access.render": "blocker"}
    assert seen["access.render"].fact == "there is no /dev/dri/renderD128"


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (DockerEngine(problem="no permission to use the Docker Engine", remedy="x"), {"docker.reachable": "blocker"}),
        (DockerEngine(podman=True), {"docker.podman": "warning"}),
        (DockerEngine(desktop=True), {"docker.desktop": "blocker"}),
        (DockerEngine(free_bytes=5 * 10**9), {"docker.disk": "blocker"}),
        (DockerEngine(free_bytes=20 * 10**9), {"docker.disk": "warning"}),
        (DockerEngine(stale=["container amd-llm-load-x-server"]), {"docker.stale": "warning"}),
    ],
    ids=["none", "podman", "desktop", "no-room", "little-room", "stale"],
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
    assert [f"(pid {pid}" in orphans.fact for pid in (50, 102, 201, 202, 203)] == [False, False, True, True, True]
    assert "VLLM::EngineCor (pid 201, holds 2.0 GiB)" in orphans.fact
    assert orphans.fix == "kill -9 201 202 203"


def test_the_worst_finding_counts() -> None:
    ok = finding("kernel.numa", "ok", "off")
    warning = finding("docker.stale", "warning", "x")
    blocker = finding("docker.desktop", "blocker", "no GPU")
    assert [worst([]), worst([ok]), worst([ok, warning]), worst([warning, blocker, ok])] == [
        "ok", "ok", "warning", "blocker"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"kernel\.numa cannot be a blocker"):
        finding("kernel.numa", "blocker", "x")


def test_every_finding_is_found_by_a_test_at_every_level() -> None:
    """What no test provokes may not be promised."""
    source = Path(__file__).read_text()
    assert [id for id in known() if f'"{id}"' not in source] == []


@pytest.mark.parametrize(
    "name", ["strix_halo_half", "strix_halo_old_kernel", "strix_point", "mi300x_eight", "no_gpu", "nvidia_only"]
)
def test_what_is_wrong_has_a_fix_and_everything_a_source(tmp_path: Path, name: str) -> None:
    for one in diagnose(getattr(machines, name)(tmp_path), ENGINE, MEMBER):
        assert (one.fix is None) == (one.level == "ok")
        assert one.source and one.fact
        assert "None" not in one.fact and "{" not in (one.fix or "")


def test_the_table_of_targets() -> None:
    names = [row.target for row in table().targets]
    assert len(set(names)) == len(names)
    assert {target for column in columns().values() for target in column.targets} <= set(names)
    halo = target_of("gfx1151")
    assert halo is not None and (halo.standing("lemonade-vllm"), halo.standing("vllm-rocm")) == ("validated", "code")
    assert target_of("gfx906") is None


def test_the_page_lists_every_finding_and_target() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    for row in known().values():
        assert f"| `{row.id}` | {row.looks_at} | " in text
    assert all(f"| `{row.target}` | {row.family}" in text for row in table().targets)


@pytest.mark.parametrize("garbage", [b"", b"-1\n", b"\xff\x00 garbage\n", b"999999999999999999999999\n"])
def test_whatever_a_driver_answers_there_is_a_finding_and_no_traceback(tmp_path: Path, garbage: bytes) -> None:
    root = machines.strix_halo_half(tmp_path)
    machines.process(root, 201, "VLLM::EngineCor", 1, drm(3, vram_kib=2 << 20))
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        before = path.read_bytes()
        path.write_bytes(garbage)
        assert {one.topic for one in diagnose(root, ENGINE, MEMBER)} >= {"gpu", "docker", "processes"}, path
        path.write_bytes(before)
