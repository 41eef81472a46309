"""Telemetry of real containers: control groups of this machine."""

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container
from docker.types import Mount

from harness.machine.telemetry import Sampler
from harness.records.manifest import ServedBy
from harness.records.samples import TelemetrySample, read_telemetry
from harness.serve.containers import ServerStatus
from harness.serve.docker_engine import make_labels
from harness.serve.lifecycle import Endpoint, find_telemetry_files
from tests.docker.conftest import Served
from tests.support.command import until
from tests.support.fake_gpus import apu_table, gpu, host

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
    return Endpoint(started=ServedBy(url=url), read_status=lambda now: ServerStatus(), container=container)


def test_a_container_on_this_machine_is_measured_by_its_control_group(container: Container, tmp_path: Path) -> None:
    found = local(container, tmp_path)
    cores = [one.container.cpu_cores for one in found if one.container and one.container.cpu_cores is not None]
    memory = [one.container.memory_bytes for one in found if one.container]
    assert cores and 0 < cores[-1] < 1
    assert memory[-1] is not None and 2**20 < memory[-1] < 2**28
    assert all(one.took_s is not None for one in found)


def local(container: Container, tmp_path: Path) -> list[TelemetrySample]:
    path = tmp_path / "telemetry.jsonl"
    path.unlink(missing_ok=True)
    with Sampler(find_telemetry_files(endpoint(container)), "c", path) as sampler:
        until(lambda: sampler.samples >= 3)
    return read_telemetry(path)["c"]


def test_a_server_of_ours_has_its_container(served: Served, tmp_path: Path) -> None:
    with served() as endpoint:
        assert endpoint.container is not None
        with Sampler(find_telemetry_files(endpoint), "c", tmp_path / "telemetry.jsonl") as sampler:
            until(lambda: sampler.samples >= 2)
    last = read_telemetry(tmp_path / "telemetry.jsonl")["c"][-1]
    assert last.container is not None and last.container.memory_bytes is not None
