"""A server's container from its first to its last moment, on a real Docker Engine."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from docker.models.containers import Container

from harness.base.errors import ServerError
from harness.scenario import Server
from harness.serve.lifecycle import Endpoint, serve
from tests.docker.conftest import Served, remains, scenario
from tests.support.command import PATIENCE_S, harness, until, write
from tests.support.faults import fault


def container_of(client: docker.DockerClient, endpoint: Endpoint) -> Container:
    assert endpoint.network is not None
    return client.containers.get(f"{endpoint.network}-server")


def output(container: Container, command: str) -> str:
    code, text = container.exec_run(["sh", "-c", command])
    assert code == 0, text
    assert isinstance(text, bytes)
    return text.decode().strip()


def test_a_server_comes_up_answers_and_goes(served: Served, client: docker.DockerClient, tmp_path: Path) -> None:
    with served(max_num_seqs=3) as endpoint:
        container = container_of(client, endpoint)
        assert container.labels["amd-llm-load"] == "1"
        assert container.labels["amd-llm-load.run"] == tmp_path.name
        assert container.labels["amd-llm-load.cell"] == "c"
        assert container.labels["amd-llm-load.pid"] == str(os.getpid())
        assert len(remains(client, tmp_path.name)) == 2  # the container and its network
        port = int(endpoint.url.rsplit(":", 1)[1])
        published = {inside: at for inside, at in container.ports.items() if at}
        assert published == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]}
        asked = container.attrs["HostConfig"]["PortBindings"]
        assert asked == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]}  # the engine chooses
        assert output(container, "id -u") == "10000"
        assert endpoint.metrics_url is not None
        assert "vllm:num_requests_running" in requests.get(endpoint.metrics_url, timeout=PATIENCE_S).text
        assert endpoint.check_alive() is None
        assert endpoint.network_url == "http://server:8000"
        found = endpoint.served_by
        assert (found.template, found.simulated, found.model) == ("simulated", True, "sim")
        assert found.image_digest is not None and found.image_digest.startswith("sha256:")
        assert found.arguments == ["python3", "-m", "harness.simulated", "--host", "0.0.0.0", "--port", "8000",
                                   "--model", "sim", "--max-num-seqs", "3"]  # fmt: skip
        assert [phase.name for phase in found.phases] == ["pull", "create", "port open", "health", "first answer"]
        assert (found.restarts, found.oom_killed, found.exit_code) == (0, False, None)
    assert remains(client, tmp_path.name) == []
    log = (tmp_path / "logs/c.server.log").read_text().splitlines()
    assert any("simulated engine: no model is computed" in line for line in log)  # two streams have no order
    assert log[0][:2] == "20"  # the engine's time stamp
    assert any("stopping" in line for line in log[-2:])  # it was asked to end, not killed


def test_a_run_over_ipv6(image: str, tmp_path: Path) -> None:
    server = {"template": "simulated", "variables": {"preset": "instant", "image": image, "publish": "[::1]"}}
    path = write(tmp_path, servers={"one": server})
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")


def test_what_the_scenario_consents_to_is_in_the_plan_and_in_the_report(image: str, tmp_path: Path) -> None:
    variables = {"preset": "instant", "image": image, "publish": "0.0.0.0"}
    path = write(tmp_path, servers={"one": {"template": "simulated", "variables": variables}})
    refused = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert refused.code == 1 and not (tmp_path / "runs").exists()
    assert "variables.publish (line" in refused.err and "write allow: [open-port] in the server" in refused.err
    one = {"template": "simulated", "variables": variables, "allow": ["open-port"]}
    write(tmp_path, servers={"one": one})
    note = "the scenario lets its container reach this machine: open-port (ports: 0.0.0.0)"
    assert note in harness("check", path.name, cwd=tmp_path).out
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert note in " ".join(done.out.split())
    (report,) = tmp_path.glob("runs/*/report.html")
    assert note in report.read_text()


def test_devices_groups_and_shared_memory_are_in_effect(served: Served, client: docker.DockerClient) -> None:
    with served(devices=["/dev/null:/dev/kfd:rw"], groups=[992, 44], shm_size="48m") as endpoint:
        container = container_of(client, endpoint)
        assert output(container, "test -c /dev/kfd && stat -c %t,%T /dev/kfd") == "1,3"
        assert {"44", "992"} <= set(output(container, "id -G").split())
        assert output(container, "df --output=size -B1 /dev/shm | tail -1") == str(48 << 20)
        facts = endpoint.served_by.container
        assert facts is not None
        assert facts["HostConfig"]["ShmSize"] == 48 << 20
        assert facts["HostConfig"]["GroupAdd"] == ["992", "44"]


def test_limits_environment_and_mounts_are_in_effect(
    served: Served, client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_API_KEY", "a-secret-of-the-test")
    (tmp_path / "models").mkdir(mode=0o755)
    os.chmod(tmp_path, 0o755)
    variables: dict[str, Any] = {
        "mem_limit": "256m",
        "cpus": 1.5,
        "volumes": [f"{tmp_path}/models:/models:ro"],
        "environment": {"TEST_API_KEY": "${TEST_API_KEY}"},
    }
    with served(**variables) as endpoint:
        container = container_of(client, endpoint)
        assert output(container, "echo $TEST_API_KEY") == "a-secret-of-the-test"
        assert container.attrs["HostConfig"]["Memory"] == 256 << 20
        assert container.attrs["HostConfig"]["NanoCpus"] == 1_500_000_000
        assert "/models" in output(container, "grep ' /models ' /proc/mounts")
        assert container.exec_run(["touch", "/models/x"])[0] != 0
        assert "a-secret-of-the-test" not in str(endpoint.served_by)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or "a-secret-of-the-test" not in path.read_text()


@pytest.mark.parametrize(
    ("variables", "message", "advice"),
    [
        (
            {"devices": ["/dev/kfd-of-nobody"], "allow": ["host-devices"]},
            "the engine's host has no /dev/kfd-of-nobody",
            "modprobe amdgpu",
        ),
        ({"volumes": ["/no/such/folder:/models"]}, "the host has no folder /no/such/folder to mount", "create it"),
        ({"volumes": ["no-such-volume-of-ours:/models"]}, "there is no Docker volume no-such-volume-of-ours", "create"),
        ({"image": "127.0.0.1:9/none:v1"}, "its registry cannot be reached", "docker save"),
        ({"image": "amd-llm-load:no-such-tag"}, "was not built yet", "make image"),
        ({"extra_args": ["--max-seqs", 3]}, "does not know the argument: --max-seqs 3", "remove it from extra_args"),
        (
            {"extra_args": ["--fail-start", "HIP out of memory"]},
            "exit code 1: the GPU's memory is used up",
            "quantised",
        ),
        ({"mem_limit": "8m"}, "exit code 137: the kernel killed it because", "raise mem_limit"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@fault(
    "engine",
    "a start that fails: no device, folder, volume, image, argument, memory (8 cases)",
    seen="the cause in one sentence, and what to do",
    kept="the server's log",
)
def test_a_start_that_fails_is_explained_and_leaves_nothing(
    served: Served, variables: dict[str, Any], message: str, advice: str
) -> None:
    with pytest.raises(ServerError) as caught, served(**variables):
        pass
    assert message in caught.value.what
    assert advice in caught.value.next_step


@fault(
    "engine", "the image lacks the program", seen="the image has no program vllm", kept="nothing, no request was sent"
)
def test_a_program_that_the_image_lacks_is_named(client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    server = Server(template="vllm-cpu", variables={"image": image, "entrypoint": ["vllm", "serve"],
                    "huggingface_cache": None, "vllm_cache": None})  # fmt: skip
    with (
        pytest.raises(ServerError, match="the image has no program vllm"),
        serve(scenario(server), "s", run_id=tmp_path.name, cell_id="c", run_folder=tmp_path),
    ):
        pass
    assert remains(client, tmp_path.name) == []


@fault(
    "engine", "the port is taken", seen="the port 127.0.0.1:... is in use already", kept="nothing, no request was sent"
)
def test_a_port_in_use_is_named(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf" 127\.0\.0\.1:{port} "), served(host_port=port):
            pass


@fault(
    "server",
    "a container never becomes ready",
    seen="did not become ready within 8 s; last seen at GET .../health",
    kept="the last lines of its log",
)
def test_never_ready_ends_in_time(served: Served) -> None:
    with (
        pytest.raises(ServerError, match=r" 8 s\b.* GET .*/health") as caught,
        served(timeout_s=8, extra_args=["--startup-s", 60]),
    ):
        pass
    assert "simulated engine" in caught.value.detail


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
@fault("engine", "a container is killed or stopped from outside", seen="it ended with exit code 137 (or 0), within 2 s")
def test_a_death_in_mid_run_is_noticed(served: Served, client: docker.DockerClient, sent: signal.Signals) -> None:
    with served() as endpoint:
        container_of(client, endpoint).kill(sent.value)
        until(lambda: endpoint.check_alive() is not None)
        code = 137 if sent is signal.SIGKILL else 0
        death = endpoint.check_alive()
        assert death is not None and death.code == "server_died"
        assert (death.values["how"], death.values["exit_code"]) == ("ended", code)
        assert endpoint.served_by.exit_code == code


@fault("engine", "`docker rm -f` of the server", seen="its container was removed by another process")
def test_a_container_removed_from_outside_is_noticed(served: Served, client: docker.DockerClient) -> None:
    with served() as endpoint:
        container_of(client, endpoint).remove(force=True)
        until(lambda: endpoint.check_alive() is not None)
        death = endpoint.check_alive()
        assert death is not None and (death.code, death.values) == ("server_died", {"how": "removed"})


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@fault("harness", "an error or Ctrl-C between start and load", seen="container and network are taken down")
def test_an_error_of_the_load_takes_the_server_down(served: Served, error: type[BaseException]) -> None:
    with pytest.raises(error), served():
        raise error


def test_a_cache_volume_is_kept(client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    name = f"amd-llm-load-test-{os.getpid()}"
    variables = {"image": image, "entrypoint": ["python3", "-c", "print('no server')"], "vllm_cache": None,
                 "huggingface_cache": name}  # fmt: skip
    server = Server(template="vllm-cpu", variables=variables)
    try:
        with (
            pytest.raises(ServerError, match="it ended by itself without an error") as caught,
            serve(scenario(server), "s", run_id=tmp_path.name, cell_id="c", run_folder=tmp_path),
        ):
            pass
        assert caught.value.detail == "no server"
        labels = client.volumes.get(name).attrs["Labels"]
        assert labels == {"amd-llm-load": "1", "amd-llm-load.cache": "1"}
    finally:
        client.volumes.get(name).remove()
