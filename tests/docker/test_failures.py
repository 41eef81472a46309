"""What the real Docker Engine says when a container cannot be made or dies: the row of the table and its value."""

import os
import time
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import APIError

from harness.failures.diagnosis import Diagnosis, ExitState, explain
from harness.serve.containers import LogFile, ServerStatus, follow_log, make_status_reader
from harness.serve.docker_engine import CELL_LABEL, RUN_LABEL
from tests.docker.conftest import BASE
from tests.support.command import PATIENCE_S
from tests.support.faults import fault

OWNER = {RUN_LABEL: f"failures-{os.getpid()}", CELL_LABEL: "c"}
HOG = "data = []\nwhile True: data.append(bytearray(8 << 20))"


def refused(client: docker.DockerClient, **arguments: Any) -> Diagnosis:
    """What the engine says of a container that it does not start, explained."""
    container = None
    try:
        with pytest.raises(APIError) as caught:
            container = client.containers.create(BASE, ["python3", "-c", "pass"], labels=OWNER, **arguments)
            container.start()
    finally:
        if container is not None:
            container.remove(force=True)
    failure = explain("", ExitState(error=str(caught.value.explanation)))
    assert failure is not None, caught.value.explanation
    return failure


@pytest.mark.parametrize(
    ("arguments", "row", "cause"),
    [
        ({"devices": ["/dev/no-kfd:/dev/kfd"]}, "gpu.no_kfd", "the engine's host has no /dev/no-kfd"),
        ({"group_add": ["rendering"]}, "gpu.group_name", "the image has no group named rendering; names are looked up"),
        ({"entrypoint": ["no-vllm", "serve"]}, "docker.no_program", "the image has no program no-vllm"),
        ({"mounts": [docker.types.Mount("/models", "/no/such/folder", type="bind")]}, "docker.no_folder",
         "the host has no folder /no/such/folder to mount"),
        ({"runtime": "no-nvidia"}, "docker.no_runtime", "the engine has no runtime or driver no-nvidia"),
    ],
)  # fmt: skip
def test_a_container_that_cannot_be_started(
    client: docker.DockerClient, arguments: dict[str, Any], row: str, cause: str
) -> None:
    failure = refused(client, **arguments)
    assert failure.id == row and failure.cause.startswith(cause)


def ended(client: docker.DockerClient, folder: Path, program: str, **arguments: Any) -> ServerStatus:
    """How a container that runs to its end ended, as a run reads it."""
    container = client.containers.run(BASE, ["python3", "-c", program], labels=OWNER, detach=True, **arguments)
    log = LogFile(folder / f"{container.short_id}.log")
    try:
        follow_log(container, log)
        container.wait(timeout=PATIENCE_S)
        return make_status_reader(container, log)(True)
    finally:
        container.remove(force=True)


def code_of(status: ServerStatus) -> int | None:
    assert status.death is not None
    return status.death.exit_code


@fault("server", "the kernel kills the server for memory", seen="exit code 137: the kernel killed it because ...")
def test_a_kill_for_memory(client: docker.DockerClient, tmp_path: Path) -> None:
    """containerd drops the kernel's message about 3 of 1,000 such kills: it finds the cgroup gone already."""
    name, begin_s = f"hog-{os.getpid()}-{time.monotonic_ns()}", int(time.time())
    status = ended(client, tmp_path, HOG, mem_limit="64m", memswap_limit="64m", name=name)
    kills = client.events(since=begin_s, until=int(time.time()) + 1, filters={"event": "oom", "container": name})
    assert status.failure is not None and code_of(status) == 137
    assert status.oom_killed == (next(kills, None) is not None)
    assert status.failure.id == ("mem.container_oom" if status.oom_killed else "container.killed")


@fault("server", "the kernel kills a child of the server for memory", seen="the cause from the parent's last words")
def test_a_child_that_is_killed_for_memory_is_reported_from_its_parent_s_words(
    client: docker.DockerClient, tmp_path: Path
) -> None:
    """As with vLLM: the engine process is killed, and its parent ends with a code of its own."""
    parent = (
        "import subprocess, sys\n"
        f"code = subprocess.call([sys.executable, '-c', {HOG!r}])\n"
        "print('RuntimeError: Engine core process EngineCore died unexpectedly.')\nsys.exit(1)"
    )
    status = ended(client, tmp_path, parent, mem_limit="64m", memswap_limit="64m")
    assert status.failure is not None and code_of(status) == 1
    assert status.failure.id == ("mem.container_oom" if status.oom_killed else "engine.killed")


@fault("server", "/dev/shm of the container is full", seen="the cause, and the shm_size to set")
def test_a_full_shared_memory(client: docker.DockerClient, tmp_path: Path) -> None:
    status = ended(client, tmp_path, "open('/dev/shm/psm_1', 'wb').write(bytes(8 << 20))", shm_size="1m")
    failure = status.failure
    assert failure is not None and code_of(status) == 1
    assert failure.id == "disk.full" and "/dev/shm" in failure.fix, "Python names no file: it may be either"


@fault("server", "kill -9 of the server in its container", seen="it was killed from outside, not for memory")
def test_a_kill_from_outside(client: docker.DockerClient, tmp_path: Path) -> None:
    container = client.containers.run(BASE, ["sleep", "3600"], labels=OWNER, detach=True)
    try:
        time.sleep(0.2)
        container.kill()
        container.wait(timeout=PATIENCE_S)
        status = make_status_reader(container, LogFile(tmp_path / "server.log"))(True)
    finally:
        container.remove(force=True)
    assert status.failure is not None and status.failure.id == "container.killed"
    assert code_of(status) == 137 and not status.oom_killed
