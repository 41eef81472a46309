"""Two workers of real vLLM exchange data through shared memory of their container, which ends with it."""

import os
import signal
from pathlib import Path

import docker
import pytest
import requests

from harness.scenario import Load, Scenario, Server
from harness.serve.docker_engine import connect
from harness.serve.lifecycle import serve
from tests.real.parts import RUN_S, vllm
from tests.support.command import PATIENCE_S
from tests.support.engines.paths import QWEN3_100M

pytestmark = pytest.mark.nightly


def test_a_killed_engine_leaves_no_shared_memory_on_the_host(tmp_path: Path) -> None:
    # Two ranks compile a part of the model, and this image has no compiler.
    environment = {"HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    given = vllm(
        QWEN3_100M,
        shm_size=None,
        omp_threads="0|1",
        extra_args=["--tensor-parallel-size", "2"],
        environment=environment,
    )
    server = Server(template="vllm-cpu", variables=given["variables"], startup_timeout_s=RUN_S)
    load = Load(user="batch", requests=1)
    scenario = Scenario(version=1, question="q", model="qwen3-100m", servers={"s": server}, loads={"l": load})
    before = set(os.listdir("/dev/shm"))
    client: docker.DockerClient = connect()
    with serve(scenario, "s", run_id=tmp_path.name, cell_id="c", run_folder=tmp_path) as endpoint:
        body = {"model": "qwen3-100m", "prompt": "hi", "max_tokens": 8, "ignore_eos": True}
        answer = requests.post(f"{endpoint.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert endpoint.container is not None
        code, names = endpoint.container.exec_run(["ls", "/dev/shm"])
        assert code == 0 and b"psm_" in names
        host = client.containers.get(str(endpoint.container.id)).attrs["HostConfig"]
        assert (host["IpcMode"], host["ShmSize"]) == ("private", 16 << 30)
        endpoint.container.kill(signal.SIGKILL)
    client.close()
    assert set(os.listdir("/dev/shm")) <= before
