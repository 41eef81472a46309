"""`harness doctor` on machines that are trees of files, and what `run` and `check` use of it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.base.errors import ServerError
from harness.base.units import GIB
from harness.machine.findings import Finding, finding_kinds
from harness.machine.gpus import find_target, find_unsupported_targets, read_gfx_table, support_columns
from harness.machine.inspection import DockerEngine, diagnose
from harness.questions.doctor import doctor_page
from harness.report.terminal import print_page
from harness.run.experiment import Experiment, Target
from harness.run.machine_fit import SWITCH, blockers, machine_notes, preflight
from harness.serve.template import read_variables
from tests.support import machines
from tests.support.command import experiment_of, harness
from tests.support.machines import drm, write
from tests.support.wording import Wording

ENGINE = DockerEngine(image_folder="/var/lib/docker", free_bytes=500 * 10**9)  # one with which all is well
RENDER = f"{machines.RENDER_GID} (render)"
ROCM: dict[str, Any] = {"vllm": {"template": "vllm-rocm"}}


def findings_of(root: Path, docker: DockerEngine | None = ENGINE) -> dict[str, Finding]:
    """Findings by id; those that come more than once are an error here."""
    findings = diagnose(root, docker)
    by_id = {finding.id: finding for finding in findings}
    assert len(by_id) == len(findings)
    return by_id


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    return {id: finding.level for id, finding in findings.items() if finding.level != "ok"}


MACHINES: dict[str, tuple[Callable[[Path], Path], dict[str, str], dict[str, str]]] = {
    "strix-halo-carve-out": (machines.strix_halo_carve_out, {}, {
        "gpu.present": "gfx1151: Strix Halo (Ryzen AI Max, Radeon 8060S)",
        "memory.pool": "/dev/dri/renderD128 gfx1151: 94.50 GiB of 96.00 GiB VRAM free",
        "memory.fraction": "gpu_memory_utilization is safe up to 0.92; vLLM's default of 0.92 fits",
        "memory.holders": "GPU memory is held by no process that can be seen",
        "kernel.cwsr": "the kernel has the CWSR fix for gfx1151",
        "access.groups": f"containers get the groups {RENDER}, by number",
    }),
    "strix-halo-gtt": (machines.strix_halo_gtt, {}, {
        "memory.pool": "/dev/dri/renderD128 gfx1151: 115.90 GiB of 116.00 GiB pages of the host (GTT) free; ...",
    }),
    "strix-halo-half": (machines.strix_halo_half, {"memory.half": "warning", "kernel.profile": "warning"}, {
        "memory.half": "the GPU gets 62.2 GiB of 124.5 GiB: GTT is limited to half the RAM, the carve-out is 0.5 GiB",
    }),
    "strix-halo-old-kernel": (machines.strix_halo_old_kernel, {"kernel.cwsr": "blocker"}, {
        "kernel.cwsr": "the amdgpu driver of Linux 6.17.8 lacks the CWSR fix for gfx1151: ROCm crashes or hangs",
    }),
    "radeon": (lambda root: machines.radeon(root, 110000, 24), {}, {
        "gpu.present": "gfx1100: Radeon RX 7900, PRO W7900, W7800",
        "memory.pool": "... 23.80 GiB of 24.00 GiB VRAM free",
    }),
    "eight-instincts": (machines.mi300x_eight, {"kernel.numa": "warning"}, {
        "gpu.present": "8 x gfx942: Instinct MI300 (MI300X, MI300A, MI325X)",
        "gpu.target": "...; prepared, cannot be installed yet: Lemonade with vLLM",
        "memory.pool": 8 * "... 191.78 GiB of 191.98 GiB VRAM free",
    }),
    "no-gpu": (machines.no_gpu, {"gpu.present": "blocker"}, {"gpu.present": "there is no AMD GPU"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine(tmp_path: Path, name: str, wording: Wording) -> None:
    """The facts of each kind of machine; `...` is any text. What is wrong has a fix, and everything a source."""
    machine, expected, facts = MACHINES[name]
    findings = findings_of(machine(tmp_path))
    assert levels(findings) == expected
    for id, fact in facts.items():
        assert re.fullmatch(re.escape(fact).replace(re.escape("..."), ".*"), findings[id].fact)
    for finding in findings.values():
        assert (finding.fix is None) == (finding.level == "ok")
        assert finding.source and finding.fact
        assert "None" not in finding.fact and "{" not in (finding.fix or "")
    if "strix-halo" not in name:
        assert {"kernel.cwsr", "memory.half"}.isdisjoint(findings), "only gfx1151 needs it, only an APU shares memory"
    if name == "no-gpu":
        assert {finding.topic for finding in findings.values()} == {"gpu", "kernel", "docker", "processes"}
    if name == "strix-halo-half":
        assert "30408704" in (findings["memory.half"].fix or "")
        wording(findings["memory.half"].fix)


def test_a_gpu_without_its_driver_and_one_of_an_unknown_target(tmp_path: Path, wording: Wording) -> None:
    slot = "sys/bus/pci/devices/0000:03:00.0"
    root = write(machines.no_gpu(tmp_path / "a"), {f"{slot}/class": "0x120000\n", f"{slot}/vendor": "0x1002\n"})
    assert "00.0" in findings_of(root)["gpu.driver"].fact
    wording(findings_of(root)["gpu.driver"].fact)
    findings = findings_of(machines.gpu(machines.no_gpu(tmp_path / "b"), 130000, vram_gib=8, gtt_gib=8))
    assert findings["gpu.target"].level == "warning"
    wording(findings["gpu.target"].fact)
    wording(findings["gpu.present"].fact)


def test_who_holds_the_memory(tmp_path: Path, wording: Wording) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=30)
    machines.process(root, 900, "gnome-shell", 1, drm(5, vram_kib=300 << 10))
    machines.process(root, 4242, "llama-server", 4000, drm(9, vram_kib=28 << 20, gtt_kib=1 << 20))
    write(root, {"proc/4242/fdinfo/8": drm(9, vram_kib=28 << 20, gtt_kib=1 << 20)})  # the same client again
    machines.process(root, 77, "python3", 70)
    write(root, {"sys/class/kfd/kfd/proc/77/vram_4711": f"{3 * GIB}\n"})  # the compute driver's count needs no rights
    findings = findings_of(root)
    assert levels(findings) == dict.fromkeys(("memory.fraction", "memory.holders", "processes.engines"), "warning")
    assert "gpu_memory_utilization" in findings["memory.fraction"].fact and "0.66" in findings["memory.fraction"].fact
    wording(findings["memory.fraction"].fact)
    assert "4242" in findings["memory.holders"].fact and "29.0" in findings["memory.holders"].fact
    wording(findings["memory.holders"].fact)
    assert "4242" in (findings["memory.holders"].fix or "") and "77" in (findings["memory.holders"].fix or "")
    wording(findings["memory.holders"].fix or "")
    assert "4242" in findings["processes.engines"].fact
    wording(findings["processes.engines"].fact)


def test_a_gtt_has_no_more_than_the_host_gives(tmp_path: Path, wording: Wording) -> None:
    root = machines.strix_halo_gtt(tmp_path / "a")
    write(root, {"proc/meminfo": f"MemTotal: {int(124.5 * GIB) // 1024} kB\nMemAvailable: {58 * GIB // 1024} kB\n"})
    findings = findings_of(root)
    assert levels(findings) == {"memory.fraction": "warning"}
    assert "0.46" in findings["memory.fraction"].fact
    wording(findings["memory.fraction"].fact)
    root = machines.host(tmp_path / "b", name="h", kernel="6.18.9", ram_gib=125, available_gib=120)
    machines.power(machines.ttm(machines.gpu(root, 110501, vram_gib=0.5, gtt_gib=128), 62.5))
    findings = findings_of(root)
    assert levels(findings) == dict.fromkeys(("memory.gttsize", "memory.half"), "warning")
    assert "30670848" in (findings["memory.gttsize"].fix or "")
    wording(findings["memory.gttsize"].fix)
    assert 117 * GIB == 30670848 * 4096, "never more than the RAM can give"


def test_the_smallest_safe_share_counts_and_unknown_memory_is_a_warning(tmp_path: Path, wording: Wording) -> None:
    root = machines.mi300x_eight(tmp_path / "eight")
    write(root, {"sys/class/drm/renderD131/device/mem_info_vram_used": f"{150 * GIB}\n"})
    assert "0.20" in findings_of(root)["memory.fraction"].fact and "0.92" in findings_of(root)["memory.fraction"].fact
    wording(findings_of(root)["memory.fraction"].fact)
    write(root, {"sys/class/drm/renderD131/device/mem_info_vram_used": f"{191 * GIB}\n"})
    assert "gpu_memory_utilization" in findings_of(root)["memory.fraction"].fact
    wording(findings_of(root)["memory.fraction"].fact)
    root = machines.strix_halo_carve_out(tmp_path / "halo")
    for content in ("N/A\n", f"{200 * GIB}\n"):
        findings = findings_of(write(root, {"sys/class/drm/renderD128/device/mem_info_vram_used": content}))
        assert levels(findings) == {"memory.pool": "warning"}
        assert "96.00" in findings["memory.pool"].fact
        wording(findings["memory.pool"].fact)
        assert "memory.fraction" not in findings


def test_the_graphics_unit_beside_a_card_is_left_alone(tmp_path: Path, wording: Wording) -> None:
    root = machines.radeon(tmp_path, 110000, 24)
    machines.gpu(root, 100306, minor=129, vram_gib=0.5, gtt_gib=31)
    findings = findings_of(machines.ttm(root, 15))
    assert levels(findings) == {}
    assert "23.80" in findings["memory.pool"].fact and "24.00" in findings["memory.pool"].fact
    wording(findings["memory.pool"].fact)
    assert findings["gpu.target"].fact.startswith("gfx1100 ")


def test_bad_firmware_and_a_replaced_driver(tmp_path: Path) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    machines.gpu(root, 110501, vram_gib=96, gtt_gib=15.5, extra="cwsr_size 25214976\n")
    write(root, {"sys/class/drm/renderD128/device/fw_version/mes_fw_version": "0x00000083\n"})
    assert levels(findings_of(root)) == {"kernel.cwsr": "blocker", "kernel.firmware": "warning"}


def test_devices_that_are_closed_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        findings = findings_of(root)
        assert levels(findings) == {"access.kfd": "warning", "access.render": "warning"}
        fact = f"this user may not open /dev/kfd (mode 0660, group {RENDER}); containers of an engine that runs as"
        assert findings["access.kfd"].fact == f"{fact} root may"
        wording(findings["access.kfd"].fix)
        rootless = findings_of(root, docker=DockerEngine(rootless=True))
        assert levels(rootless) == {
            "access.kfd": "blocker", "access.render": "blocker", "docker.rootless": "warning",
        }  # fmt: skip
        assert "access.groups" not in rootless, "its containers do not get them"
        write(root, {"proc/sys/kernel/overflowgid": f"{machines.RENDER_GID}\n"})
        unmapped = findings_of(root)
        assert levels(unmapped) == {"access.kfd": "blocker", "access.render": "blocker"}
        assert "user namespace" in unmapped["access.kfd"].fact and "usermod" not in str(unmapped["access.kfd"].fix)
        (root / "proc/sys/kernel/overflowgid").unlink()
    remapped = findings_of(root, docker=DockerEngine(remapped=True))
    assert levels(remapped) == {"access.kfd": "blocker", "access.render": "blocker", "docker.userns": "warning"}
    assert "0660" in remapped["access.kfd"].fact
    wording(remapped["access.kfd"].fact)
    for node in ("dev/kfd", "dev/dri/renderD128"):
        (root / node).chmod(0o666)
    assert levels(findings_of(root, docker=DockerEngine(remapped=True))) == {"docker.userns": "warning"}
    (root / "dev/kfd").unlink()
    (root / "dev/dri/renderD128").unlink()
    findings = findings_of(root)
    assert levels(findings) == {"access.kfd": "blocker", "access.render": "blocker"}
    wording(findings["access.render"].fact)


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
    findings = findings_of(machines.strix_halo_carve_out(tmp_path), docker=engine)
    assert levels(findings) == expected


@pytest.mark.parametrize(
    ("enforce", "devices", "expected"),
    [
        ("1\n", "0 0\n", "warning"),
        ("1\n", "1 1\n", "ok"),
        ("0\n", "0 0\n", None),
        ("1\n", None, "warning"),
        (None, None, None),
    ],
)
def test_selinux_and_the_devices_of_containers(
    tmp_path: Path, enforce: str | None, devices: str | None, expected: str | None
) -> None:
    root = machines.strix_halo_carve_out(tmp_path)
    files = {"enforce": enforce, "booleans/container_use_devices": devices}
    write(root, {f"sys/fs/selinux/{name}": text for name, text in files.items() if text is not None})
    finding = findings_of(root, docker=DockerEngine(selinux=True)).get("access.selinux")
    assert (None if finding is None else finding.level) == expected
    assert "access.selinux" not in findings_of(root), "the engine does not label its containers"


def test_orphans_are_told_from_engines_that_serve(tmp_path: Path, wording: Wording) -> None:
    root = machines.radeon(tmp_path, 110000, 24)
    machines.process(root, 50, "systemd", 1)
    machines.process(root, 100, "vllm", 90)
    machines.process(root, 101, "VLLM::EngineCor", 100)
    for pid, parent in ((201, 1), (202, 50), (203, 299)):
        machines.process(root, pid, "VLLM::EngineCor", parent)
    findings = findings_of(root)
    assert "100" in findings["processes.engines"].fact and "101" in findings["processes.engines"].fact
    wording(findings["processes.engines"].fact)
    assert findings["processes.orphans"].fix == "kill -9 201 202 203"


def test_every_finding_is_found_by_a_test_and_every_finding_and_target_is_on_the_page() -> None:
    source = Path(__file__).read_text()
    assert [id for id in finding_kinds() if f'"{id}"' not in source] == []
    names = [row.target for row in read_gfx_table().targets]
    assert len(set(names)) == len(names)
    assert {target for column in support_columns().values() for target in column.targets} <= set(names)
    halo = find_target("gfx1151")
    assert halo is not None and (halo.standing("lemonade-vllm"), halo.standing("vllm-rocm")) == ("validated", "code")


@pytest.mark.parametrize(("flags", "dtype"), [("avx2 avx512f avx512_bf16", "bfloat16"), ("avx2", "float32")])
def test_the_data_type_for_vllm_on_this_cpu(tmp_path: Path, flags: str, dtype: str, wording: Wording) -> None:
    (finding,) = (one for one in diagnose(write(tmp_path, {"proc/cpuinfo": f"flags\t: {flags}\n"}))
                  if one.id == "kernel.bfloat16")  # fmt: skip
    assert (finding.level, finding.fix) == ("ok", None)
    assert str(dtype) in finding.fact
    wording(finding.fact)


@pytest.mark.parametrize("garbage", [b"", b"-1\n", b"\xff\x00 garbage\n", b"999999999999999999999999\n"])
def test_whatever_a_driver_answers_there_is_a_finding_and_no_traceback(tmp_path: Path, garbage: bytes) -> None:
    assert [finding.id for finding in diagnose(tmp_path)] == ["gpu.present", "processes.engines"]
    root = machines.strix_halo_half(tmp_path)
    machines.process(root, 201, "VLLM::EngineCor", 1, drm(3, vram_kib=2 << 20))
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        before = path.read_bytes()
        path.write_bytes(garbage)
        assert {finding.topic for finding in diagnose(root, ENGINE)} >= {"gpu", "docker", "processes"}, path
        path.write_bytes(before)


# The command


def test_the_page_of_a_terminal(tmp_path: Path, wording: Wording) -> None:
    root = machines.strix_halo_old_kernel(tmp_path)
    for width in (60, 80, 200):
        console = Console(width=width, no_color=True, force_terminal=False)
        with console.capture() as capture:
            print_page(doctor_page(diagnose(root, ENGINE), root), console)
        lines = capture.get().splitlines()
        assert [line for line in lines if len(line) > min(width, 110) and "http" not in line] == []
        assert [line for line in lines if line != line.rstrip()] == []
    assert lines[0].startswith("halo, A Processor, 31.0 GiB")
    titles = [line for line in lines if line and not line.startswith(" ")]
    wording(titles[1:-1])
    start = lines.index("Kernel and power")
    word, text = lines[start + 1].split(maxsplit=1)
    assert (word, "6.17.8" in text, "gfx1151" in text) == ("BLOCKER", True, True)
    wording(text)
    assert lines[start + 2].split()[:5] == ["fix", "update", "to", "Linux", "6.18.4"]
    assert "13" in lines[-1]
    wording(lines[-1])


def test_the_command_reads_another_machines_files(tmp_path: Path, wording: Wording) -> None:
    machines.strix_halo_old_kernel(tmp_path / "halo")
    done = harness("doctor", "--root", "halo", "--json", cwd=tmp_path)
    assert (done.code, done.err) == (4, "")
    page = json.loads(done.out)
    assert (page["format_version"], page["level"], page["machine"]["name"]) == (1, "blocker", "halo")
    assert [finding["id"] for finding in page["findings"] if finding["level"] == "blocker"] == ["kernel.cwsr"]
    assert "docker" not in {finding["topic"] for finding in page["findings"]}
    done = harness("doctor", "--root", "none", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    wording(done.err)


def test_an_engine_that_cannot_be_reached(tmp_path: Path, wording: Wording) -> None:
    for address in ("tcp://gpubox.invalid:2375", f"unix://{tmp_path}/none.sock"):
        done = harness("doctor", "--json", cwd=tmp_path, env={"DOCKER_HOST": address})
        findings = {finding["id"]: finding for finding in json.loads(done.out)["findings"]}
        assert done.code == 4
        assert str(address) in findings["docker.reachable"]["fact"]
        wording(findings["docker.reachable"]["fact"])


# What `run` and `check` use of it


def test_a_run_meets_the_blockers_before_anything_is_pulled(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, ROCM)
    root = machines.strix_halo_old_kernel(tmp_path / "halo")
    assert {name: [finding.id for finding in found] for name, found in blockers(experiment, root).items()} == {
        "vllm": ["kernel.cwsr"]
    }
    good = machines.strix_halo_carve_out(tmp_path / "good")
    assert blockers(experiment, good) == {}
    full = DockerEngine(image_folder="/var/lib/docker", free_bytes=5 * 10**9, desktop=True)
    assert [finding.id for finding in blockers(experiment, good, full)["vllm"]] == ["docker.desktop", "docker.disk"]
    assert blockers(experiment, good, DockerEngine(problem="it does not run")) == {}, "the run itself says so"


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine has an AMD GPU")
def test_a_run_without_a_gpu_is_refused_before_anything_is_pulled(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(ServerError) as caught:
        preflight(experiment_of(tmp_path, ROCM), pytest.fail)
    assert "'vllm'" in str(caught.value)
    wording(caught.value)
    done = harness("run", "small.yaml", "--runs", "runs", cwd=tmp_path)
    assert (done.code, (tmp_path / "runs").exists()) == (2, False)
    assert SWITCH in done.err
    done = harness("check", "small.yaml", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    wording([line for line in done.out.splitlines() if line.startswith("note:")])


def test_vulkan_needs_a_render_node_only(tmp_path: Path, wording: Wording) -> None:
    old = machines.strix_halo_old_kernel(tmp_path / "old")
    vulkan = {"template": "llamacpp", "variables": {"devices": ["/dev/dri"], "model_path": "/m.gguf"}}
    single = {"template": "llamacpp", "variables": {"devices": ["/dev/dri/renderD129"], "model_path": "/m.gguf"}}
    experiment = experiment_of(tmp_path, {"vulkan": vulkan, "single": single})
    assert {name: [finding.id for finding in found] for name, found in blockers(experiment, old).items()} == {
        "single": ["access.render"]
    }
    wording(blockers(experiment, old)["single"][0].fact)
    empty = machines.no_gpu(tmp_path / "empty")
    wording(blockers(experiment, empty)["vulkan"][0].fact)


def test_vulkan_in_containers_without_the_groups_needs_nodes_that_any_user_may_open(tmp_path: Path) -> None:
    """With userns-remap; the groups of the render node do not reach such a container either."""
    root = machines.strix_halo_old_kernel(tmp_path / "root")
    node = root / "dev/dri/renderD128"
    settings = {"all": "/dev/dri", "one": "/dev/dri/renderD128"}
    servers: dict[str, Any] = {
        name: {"template": "llamacpp", "variables": {"devices": [device], "model_path": "/m.gguf"}}
        for name, device in settings.items()
    }
    experiment = experiment_of(tmp_path, servers)
    node.chmod(0o660)
    remapped = DockerEngine(remapped=True)
    fact = "with userns-remap no container may open /dev/dri/renderD128 (mode 0660)"
    found = blockers(experiment, root, remapped)
    assert {name: [finding.fact for finding in problems] for name, problems in found.items()} == {
        name: [fact] for name in settings
    }
    assert blockers(experiment, root, ENGINE) == {}
    node.chmod(0o666)
    assert blockers(experiment, root, remapped) == {}


def test_a_plan_says_when_an_image_has_no_code_for_the_gpu(tmp_path: Path, wording: Wording) -> None:
    experiment = experiment_of(tmp_path, ROCM)
    image = read_variables("vllm-rocm")["image"].default
    assert machine_notes(experiment, machines.radeon(tmp_path / "7900", 110000, 24)) == []
    wording(machine_notes(experiment, machines.radeon(tmp_path / "7600", 110002, 16)))
    assert find_unsupported_targets("kyuz0/vllm-therock-gfx1151:stable", ["gfx1151"]) == [], "nothing is known of it"
    image = str(read_variables("sglang-rocm")["image"].default)
    assert image.endswith("-mi30x") and find_unsupported_targets(image, ["gfx942", "gfx950"]) == ["gfx950"]


def test_when_nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machines.no_gpu(tmp_path / "laptop")
    experiment = experiment_of(tmp_path, ROCM)
    assert [finding.id for finding in blockers(experiment, root)["vllm"]] == ["gpu.present"]
    # A server that runs already, the switch.
    assert blockers(Experiment(experiment.path, experiment.scenario, Target("http://127.0.0.1:1")), root) == {}
    monkeypatch.setenv(SWITCH, "off")
    assert blockers(experiment, root) == {}


SHORT_TIMEOUT = {
    # kernel, command line, loaded parameter: level
    ("7.0.13", "quiet ttm.pages_limit=31457280", None): "warning",
    ("7.0.0-31-generic", "", ""): "warning",
    ("12.1", "", None): "warning",
    ("7.0.13", "amdgpu.lockup_timeout=10000,60000,10000,10000", None): "ok",
    ("7.0.13", "", "10000,60000,10000,10000"): "ok",
    ("7.0.13", "amdgpu.lockup_timeout=20000", None): "ok",
    ("7.0.13", "amdgpu.lockup_timeout=-1", None): "ok",
    ("7.0.13", "amdgpu.lockup_timeout=10000,2000,10000,10000", None): "warning",
    ("7.0.13", "amdgpu.lockup_timeout=0", None): "warning",
    ("6.18.9", "", None): None,
    ("6.18.9", "amdgpu.lockup_timeout=5000", None): "warning",
    ("unknown", "", None): None,
}


@pytest.mark.parametrize("case", SHORT_TIMEOUT)
def test_an_apu_whose_kernel_cuts_long_compute_jobs_off(tmp_path: Path, case: tuple[str, str, str | None]) -> None:
    kernel, cmdline, loaded = case
    root = machines.strix_halo_gtt(tmp_path)
    write(root, {"proc/sys/kernel/osrelease": f"{kernel}\n", "proc/cmdline": f"{cmdline}\n"})
    if loaded is not None:
        write(root, {"sys/module/amdgpu/parameters/lockup_timeout": f"{loaded}\n"})
    found = findings_of(root).get("kernel.lockup")
    assert (None if found is None else found.level) == SHORT_TIMEOUT[case]
    if found is not None and found.level == "warning":
        assert "amdgpu.lockup_timeout=10000,60000,10000,10000" in (found.fix or "")


def test_a_discrete_card_has_its_own_limits(tmp_path: Path) -> None:
    root = machines.radeon(tmp_path, 110000, 24)
    write(root, {"proc/sys/kernel/osrelease": "7.0.13\n"})
    assert "kernel.lockup" not in findings_of(root)


@pytest.mark.parametrize(("setting", "level"), [("0", "ok"), ("1", "warning")])
def test_numa_balancing_matters_for_instinct(tmp_path: Path, setting: str, level: str) -> None:
    root = machines.radeon(tmp_path / "card", 110000, 24)
    write(root, {"proc/sys/kernel/numa_balancing": f"{setting}\n"})
    assert "kernel.numa" not in findings_of(root)
    root = machines.radeon(tmp_path / "instinct", 90402, 192)
    write(root, {"proc/sys/kernel/numa_balancing": f"{setting}\n"})
    assert findings_of(root)["kernel.numa"].level == level
