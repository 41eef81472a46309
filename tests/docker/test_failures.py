"""What the real Docker Engine says when a container cannot be made or dies: the row of the table and its value."""

import os
import time
from typing import Any

import docker
import pytest
from docker.errors import APIError

from harness.failures.diagnosis import Diagnosis, ExitState, explain
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


def ended(client: docker.DockerClient, program: str, **arguments: Any) -> tuple[dict[str, Any], str]:
    """The state and the log of a container that ran to its end."""
    container = client.containers.run(BASE, ["python3", "-c", program], labels=OWNER, detach=True, **arguments)
    try:
        container.wait(timeout=PATIENCE_S)
        container.reload()
        state: dict[str, Any] = container.attrs["State"]
        return state, container.logs().decode()
    finally:
        container.remove(force=True)


@fault("server", "the kernel kills the server for memory", seen="exit code 137: the kernel killed it because ...")
def test_a_kill_for_memory(client: docker.DockerClient) -> None:
    state, log = ended(client, HOG, mem_limit="64m", memswap_limit="64m")
    known = ExitState(exit_code=state["ExitCode"], oom_killed=state["OOMKilled"], error=state["Error"])
    failure = explain(log, known)
    assert failure is not None and (failure.id, state["ExitCode"]) == ("mem.container_oom", 137)


@fault("server", "the kernel kills a child of the server for memory", seen="the cause from the parent's last words")
def test_a_child_that_is_killed_for_memory_is_reported_from_its_parent_s_words(client: docker.DockerClient) -> None:
    """As with vLLM: the engine process is killed, and its parent ends with a code of its own."""
    parent = (
        "import subprocess, sys\n"
        f"code = subprocess.call([sys.executable, '-c', {HOG!r}])\n"
        "print('RuntimeError: Engine core process EngineCore died unexpectedly.')\nsys.exit(1)"
    )
    state, log = ended(client, parent, mem_limit="64m", memswap_limit="64m")
    failure = explain(log, ExitState(exit_code=state["ExitCode"], oom_killed=state["OOMKilled"]))
    assert state["ExitCode"] == 1
    assert failure is not None
    assert failure.id == ("mem.container_oom" if state["OOMKilled"] else "engine.killed")


@fault("server", "/dev/shm of the container is full", seen="the cause, and the shm_size to set")
def test_a_full_shared_memory(client: docker.DockerClient) -> None:
    state, log = ended(client, "open('/dev/shm/psm_1', 'wb').write(bytes(8 << 20))", shm_size="1m")
    failure = explain(log, ExitState(exit_code=state["ExitCode"]))
    assert failure is not None and state["ExitCode"] == 1
    assert failure.id == "disk.full" and "/dev/shm" in failure.fix, "Python names no file: it may be either"


@fault("server", "kill -9 of the server in its container", seen="it was killed from outside, not for memory")
def test_a_kill_from_outside(client: docker.DockerClient) -> None:
    container = client.containers.run(BASE, ["sleep", "3600"], labels=OWNER, detach=True)
    try:
        time.sleep(0.2)
        container.kill()
        container.wait(timeout=PATIENCE_S)
        container.reload()
        state = container.attrs["State"]
    finally:
        container.remove(force=True)
    failure = explain("", ExitState(exit_code=state["ExitCode"], oom_killed=state["OOMKilled"]))
    assert failure is not None and failure.id == "container.killed"
