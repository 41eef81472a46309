"""`harness doctor`, and what `run` and `check` ask of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.errors import ServerError
from harness.machine import findings as show
from harness.machine.doctor import DockerEngine, diagnose
from harness.machine.gpus import find_unsupported_targets, read_gfx_table
from harness.prepare.experiment import Experiment, Target, prepare
from harness.prepare.machine_fit import SWITCH, blockers, machine_notes, preflight
from harness.serve.template import read_variables
from tests import machines
from tests.command import harness
from tests.command import write as write_scenario

ROCM: dict[str, Any] = {"vllm": {"template": "vllm-rocm"}}


def scenario(folder: Path, servers: dict[str, Any]) -> Experiment:
    return prepare(write_scenario(folder, servers=servers))


def lines(root: Path, width: int) -> list[str]:
    console = Console(width=width, no_color=True, force_terminal=False)
    engine = DockerEngine(image_folder="/var/lib/docker", free_bytes=500 * 10**9)
    with console.capture() as capture:
        show.print_findings(diagnose(root, engine), console, root)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_it_fits_the_terminal(tmp_path: Path, width: int) -> None:
    shown = lines(machines.strix_halo_half(tmp_path), width)
    assert shown[0].startswith("halo, A Processor, 124.5 GiB RAM, Linux 6.")
    too_long = [line for line in shown if len(line) > min(width, 110) and "http" not in line]
    assert too_long == []
    assert [line for line in shown if line != line.rstrip()] == []
    assert shown[-1] == "2 warnings, 14 ok. A run can start."


def test_topics_findings_fixes_and_sources(tmp_path: Path) -> None:
    shown = lines(machines.strix_halo_old_kernel(tmp_path), 110)
    titles = [line for line in shown if line and not line.startswith(" ")]
    assert titles[1:-1] == ["GPU", "Memory", "Kernel and power", "Access to the GPU", "Docker", "Processes"]
    at = shown.index("Kernel and power")
    assert shown[at + 1 : at + 5] == [
        "  BLOCKER  Linux 6.17.8 lacks the CWSR fix for gfx1151 (no cwsr_size and ctl_stack_size): ROCm crashes or",
        "           hangs",
        "           fix: update to Linux 6.18.4 or newer, or a kernel with the backport (Ubuntu: sudo apt install",
        "           linux-oem-24.04), and see that no amdgpu-dkms replaces its driver",
    ]
    assert shown[-1] == "1 blocker, 14 ok. Servers on the GPU cannot be relied on until the blockers are gone."
    shown = lines(machines.no_gpu(tmp_path / "no-gpu"), 110)
    assert sum("BLOCKER" in line for line in shown) == 1
    assert shown[-1].startswith("1 blocker, 5 ok. Servers on the GPU cannot run here; the embedded engine and")


def test_the_command_reads_another_machines_files(tmp_path: Path) -> None:
    machines.strix_halo_old_kernel(tmp_path / "halo")
    done = harness("doctor", "--root", "halo", "--json", cwd=tmp_path)
    assert (done.code, done.err) == (4, "")
    told = json.loads(done.out)
    assert (told["format_version"], told["level"], told["machine"]["name"]) == (1, "blocker", "halo")
    assert [one["id"] for one in told["findings"] if one["level"] == "blocker"] == ["kernel.cwsr"]
    assert {one["topic"] for one in told["findings"]} == {"gpu", "memory", "kernel", "access", "processes"}
    machines.radeon(tmp_path / "tower", 110000, 24)
    done = harness("doctor", "--root", "tower", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("tower, A Processor, 62.0 GiB RAM, Linux 6.14.0\n\nGPU\n  ok       gfx1100: Radeon RX")


@pytest.mark.parametrize(("root", "what"), [("none", "is not there"), ("file", "is not a folder")])
def test_a_root_that_is_none(tmp_path: Path, root: str, what: str) -> None:
    (tmp_path / "file").touch()
    done = harness("doctor", "--root", root, cwd=tmp_path)
    assert (done.code, done.out, done.err.splitlines()[0]) == (1, "", f"error: --root: {root} {what}")


def test_an_engine_that_cannot_be_reached(tmp_path: Path) -> None:
    levels = {"docker.remote": "warning", "docker.reachable": "blocker"}
    for address, expected in (("tcp://gpubox.invalid:2375", levels), (f"unix://{tmp_path}/none.sock", None)):
        done = harness("doctor", "--json", cwd=tmp_path, env={"DOCKER_HOST": address})
        found = {finding["id"]: finding for finding in json.loads(done.out)["findings"]}
        assert done.code == 4
        assert expected in (None, {id: finding["level"] for id, finding in found.items()})  # nothing of this machine
    assert found["docker.reachable"]["fact"].startswith(f"there is no Docker Engine at unix://{tmp_path}/none.sock: ")
    assert found["docker.reachable"]["fix"].startswith("Install and start it")


def test_a_run_meets_the_blockers_before_anything_is_pulled(tmp_path: Path) -> None:
    experiment = scenario(tmp_path, ROCM)
    root = machines.strix_halo_old_kernel(tmp_path / "halo")
    (name,) = blockers(experiment, root)
    assert name == "vllm"
    assert [one.id for one in blockers(experiment, root)[name]] == ["kernel.cwsr"]
    assert blockers(experiment, machines.strix_halo_carve_out(tmp_path / "good")) == {}
    if not (Path("/dev/kfd")).exists():
        with pytest.raises(ServerError, match="^server 'vllm' cannot run here: there is no AMD GPU"):
            preflight(experiment, pytest.fail)
        done = harness("run", "small.yaml", "--runs", "runs", cwd=tmp_path)
        assert (done.code, (tmp_path / "runs").exists()) == (2, False)
        assert done.err.startswith("error: server 'vllm' cannot run here: there is no AMD GPU")
        assert "next: To solve it: run what needs no GPU: the embedded engine" in done.err
        assert f"{SWITCH}=off skips this check." in done.err
        done = harness("check", "small.yaml", cwd=tmp_path)
        assert (done.code, done.err) == (0, "")
        assert "note: server 'vllm' cannot run on this machine: there is no AMD GPU" in done.out


def test_vulkan_needs_a_render_node_only(tmp_path: Path) -> None:
    old = machines.strix_halo_old_kernel(tmp_path / "old")
    vulkan = {"template": "llamacpp", "variables": {"devices": ["/dev/dri"], "model_path": "/m.gguf"}}
    one = {"template": "llamacpp", "variables": {"devices": ["/dev/dri/renderD129"], "model_path": "/m.gguf"}}
    experiment = scenario(tmp_path, {"vulkan": vulkan, "one": one})
    assert {name: [f.fact for f in found] for name, found in blockers(experiment, old).items()} == {
        "one": ["there is no /dev/dri/renderD129 (render nodes: renderD128)"]
    }
    empty = machines.no_gpu(tmp_path / "empty")
    assert [found[0].fact for found in blockers(experiment, empty).values()] == [
        "there is no render node in /dev/dri", "there is no /dev/dri/renderD129 (render nodes: none)"
    ]  # fmt: skip


def test_an_engine_without_room_or_without_a_gpu_is_met_too(tmp_path: Path) -> None:
    experiment = scenario(tmp_path, ROCM)
    root = machines.strix_halo_carve_out(tmp_path / "halo")
    full = DockerEngine(image_folder="/var/lib/docker", free_bytes=5 * 10**9, desktop=True)
    assert [one.fact for one in blockers(experiment, root, full)["vllm"]] == [
        "the engine of Docker Desktop has no access to this machine's GPU",
        "only 5 GB free for images in /var/lib/docker; ROCm images need 10 to 35 GB",
    ]
    assert blockers(experiment, root, DockerEngine(problem="it does not run")) == {}, (
        "the run itself says so, with its cause"
    )


def test_a_plan_says_when_an_image_has_no_code_for_the_gpu(tmp_path: Path) -> None:
    experiment = scenario(tmp_path, ROCM)
    image = read_variables("vllm-rocm")["image"].default
    assert machine_notes(experiment, machines.radeon(tmp_path / "7900", 110000, 24)) == []
    assert machine_notes(experiment, machines.radeon(tmp_path / "7600", 110002, 16)) == [
        f"note: server 'vllm': its image {image} is known to have no code for gfx1102 ({read_gfx_table().checked}); "
        "docs/doctor.md has the table"
    ]
    assert find_unsupported_targets("kyuz0/vllm-therock-gfx1151:stable", ["gfx1151"]) == [], "nothing is known of it"


def test_an_image_for_one_instinct_has_no_code_for_another_gpu() -> None:
    image = str(read_variables("sglang-rocm")["image"].default)
    assert image.endswith("-mi30x")
    targets = ["gfx942", "gfx950", "gfx1151"]
    assert find_unsupported_targets(image, targets) == ["gfx950", "gfx1151"]
    assert find_unsupported_targets("lmsysorg/sglang-rocm:v0.5.14-rocm720-mi35x-20260704", targets) == [
        "gfx942",
        "gfx1151",
    ]
    assert find_unsupported_targets("lmsysorg/sglang:latest", targets) == []


def test_what_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machines.no_gpu(tmp_path / "laptop")
    experiment = scenario(tmp_path, ROCM)
    assert [one.id for one in blockers(experiment, root)["vllm"]] == ["gpu.present"]
    # A server that runs already, a harmless node in place of the GPU, an engine elsewhere, the switch.
    assert blockers(Experiment(experiment.path, experiment.scenario, Target("http://127.0.0.1:1")), root) == {}
    other = {"template": "simulated", "variables": {"devices": ["/dev/null:/dev/kfd"]}}
    assert blockers(scenario(tmp_path, {"other": other}), root) == {}
    monkeypatch.setenv("DOCKER_HOST", "ssh://gpubox")
    assert blockers(experiment, root) == {}
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv(SWITCH, "off")
    assert blockers(experiment, root) == {}
