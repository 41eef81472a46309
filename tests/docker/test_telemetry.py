"""Telemetry of real containers: control groups of this machine, and a shell within."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container
from docker.types import Mount

from harness.machine.telemetry import Sampler
from harness.rundir.manifest import ServedBy
from harness.rundir.samples import TelemetrySample, read_telemetry
from harness.serve.container_commands import container_source, has_shell
from harness.serve.containers import ServerStatus
from harness.serve.engine import make_labels
from harness.serve.lifecycle import Endpoint, find_telemetry_source
from tests.command import until
from tests.docker.conftest import Served
from tests.fake_gpus import apu_table, device, gpu, host

GPU = "renderD128"


@pytest.fixture
def container(client: docker.DockerClient, image: str, tmp_path: Path) -> Iterator[Container]:
    """A container that keeps up to half a core busy, with a tree of files in place of /sys."""
    gpu(tmp_path / "root", watts=100, gpu_metrics=apu_table())
    host(tmp_path / "root")
    mine = client.containers.create(
        image,
        entrypoint=["python", "-c"],
        command=[
            "import time\nwhile True:\n t = time.monotonic() + .05\n while time.monotonic() < t: pass\n time.sleep(.05)"
        ],
        mounts=[Mount("/root/fake", str(tmp_path / "root"), type="bind", read_only=True)],
        labels=make_labels(tmp_path.name, "c"),
        user="0",
    )
    try:
        mine.start()
        mine.reload()
        yield mine
    finally:
        mine.remove(force=True, v=True)


def endpoint(container: Container) -> Endpoint:
    url = "http://gpu-box:8000"
    return Endpoint(url=url, started=ServedBy(url=url), read_status=lambda now: ServerStatus(), container=container)


def test_files_within_a_container_that_change_while_they_are_sampled(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_TELEMETRY_ROOT", "/root/fake")
    path = tmp_path / "telemetry.jsonl"
    power = tmp_path / "root" / device() / "hwmon/hwmon3/power1_average"
    with Sampler(container_source(container, 0.1), "c", path) as sampler:
        for watts in (101, 102, 103):
            (tmp_path / "new").write_text(f"{watts}000000\n")
            os.replace(tmp_path / "new", power)
            if watts == 102:
                gpu(tmp_path / "root", watts=102, gpu_metrics=apu_table(heat=7))
            seen = sampler.samples
            until(lambda: sampler.samples >= seen + 3)  # noqa: B023
    assert sampler.last_failure is None
    samples = read_telemetry(path)["c"]
    values = [one.gpus[GPU].power_w for one in samples]
    # None: while `gpu` writes a file, it is empty.
    assert list(dict.fromkeys(filter(None, values))) == [101.0, 102.0, 103.0]
    held = [one.gpus[GPU].held_back for one in samples]
    assert held[0] is None and held.count({"heat": 1.0}) == 1 and held[-1] == {}
    first = samples[0]
    assert first.gpus[GPU].temperatures_c == {"edge": 61.0, "junction": 74.5, "mem": 80.0}
    assert first.host is not None and first.host.memory_available_bytes == 4096 * 1024
    until(lambda: len(container.top()["Processes"]) == 1)  # the shell ends as its input does


def test_a_container_on_this_machine_is_measured_by_its_control_group(container: Container, tmp_path: Path) -> None:
    found = local(container, tmp_path)
    cores = [one.container.cpu_cores for one in found if one.container and one.container.cpu_cores is not None]
    memory = [one.container.memory_bytes for one in found if one.container]
    assert cores and 0 < cores[-1] < 1
    assert memory[-1] is not None and 2**20 < memory[-1] < 2**28
    assert all(one.took_s is not None for one in found)


def test_a_container_is_measured_from_within_alike(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = local(container, tmp_path)[-1].container
    monkeypatch.setattr("harness.serve.lifecycle.cgroup_files", lambda *_: [])  # as where the harness is in a container
    within = local(container, tmp_path)
    assert all(one.took_s is None for one in within)
    timed = [one for one in within if one.container and one.container.cpu_cores is not None]
    assert timed  # a reading that follows at once has no rates, on a busy machine also one in the middle
    last, machine = timed[-1].container, timed[-1].host
    assert outside is not None and last is not None
    assert outside.memory_bytes is not None and last.memory_bytes is not None
    assert last.memory_bytes == pytest.approx(outside.memory_bytes, rel=0.5)
    assert last.cpu_cores is not None and 0 < last.cpu_cores < 1.5
    assert machine is not None and machine.cpu_busy is not None


def local(container: Container, tmp_path: Path) -> list[TelemetrySample]:
    path = tmp_path / "telemetry.jsonl"
    path.unlink(missing_ok=True)
    with Sampler(find_telemetry_source(endpoint(container)), "c", path) as sampler:
        until(lambda: sampler.samples >= 3)
    return read_telemetry(path)["c"]


def test_a_container_that_ends_ends_the_sampling(container: Container, tmp_path: Path) -> None:
    with Sampler(container_source(container, 0.1), "c", tmp_path / "telemetry.jsonl") as sampler:
        until(lambda: sampler.samples >= 2)
        container.kill()
        time.sleep(0.5)


def test_a_container_without_a_shell(container: Container) -> None:
    assert has_shell(container)
    container.exec_run(["sh", "-c", "rm $(command -v od)"], user="0")
    assert not has_shell(container)


def test_a_server_of_ours_has_its_container(served: Served, tmp_path: Path) -> None:
    with served() as endpoint:
        assert endpoint.container is not None
        with Sampler(find_telemetry_source(endpoint), "c", tmp_path / "telemetry.jsonl") as sampler:
            until(lambda: sampler.samples >= 2)
    last = read_telemetry(tmp_path / "telemetry.jsonl")["c"][-1]
    assert last.container is not None and last.container.memory_bytes is not None
