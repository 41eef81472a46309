"""Load from other hosts: master on this machine, workers in containers with names and a network of their own.

The containers hold nothing but stock Locust and the project's image: no run directory, no volume.
"""

import contextlib
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from docker.models.containers import Container
from docker.models.networks import Network

from harness.base.process import free_port
from harness.base.reason import sentences
from harness.records.manifest import read_run
from harness.records.records import read_marks, read_requests
from tests.docker.conftest import checked_each_second
from tests.support.command import PATIENCE_S, Going, going, harness, only_run, until, write
from tests.support.faults import fault

CHAT = {"user": "chat", "users": 4, "turns": 4, "output_tokens": 5, "think_s": [0.02, 0.05]}


class Hosts:
    """An engine and two workers, each a host of its own on a private network."""

    def __init__(self, client: docker.DockerClient, image: str, network: Network) -> None:
        self._client = client
        self._image = image
        self.network = network
        self.address = f"{network.attrs['IPAM']['Config'][0]['Gateway']}:{free_port()}"
        self.containers: dict[str, Container] = {}
        engine = self.start(
            "engine", ["python3", "-m", "harness.simulated", "--host", "0.0.0.0", "--preset", "instant"]
        )
        engine.reload()
        self.url = f"http://{engine.attrs['NetworkSettings']['Networks'][network.name]['IPAddress']}:8000"
        for _ in range(600):  # `harness run --url` expects a server that already listens
            with contextlib.suppress(requests.ConnectionError):
                requests.get(f"{self.url}/v1/models", timeout=PATIENCE_S)
                return
            time.sleep(0.1)
        raise TimeoutError("the engine does not listen")

    def start(self, name: str, command: list[str]) -> Container:
        mine: dict[str, Any] = {"network": self.network.name, "hostname": name, "init": True, "detach": True}
        self.containers[name] = self._client.containers.run(self._image, command, **mine)
        return self.containers[name]

    def workers(self, *names: str) -> None:
        host, port = self.address.split(":")
        master = ["--master-host", host, "--master-port", port]
        for name in names:
            self.start(name, ["locust", "-f", "-", "--worker", *master, "--job", "-"])

    def ends(self, name: str) -> int:
        return int(self.containers[name].wait(timeout=PATIENCE_S)["StatusCode"])


@pytest.fixture
def hosts(client: docker.DockerClient, image: str) -> Iterator[Hosts]:
    network = client.networks.create(f"amd-llm-load-test-{uuid.uuid4().hex[:8]}", driver="bridge")
    network.reload()
    made = None
    try:
        made = Hosts(client, image, network)
        yield made
    finally:
        for container in made.containers.values() if made else []:
            container.remove(force=True)
        network.remove()


@contextlib.contextmanager
def run(folder: Path, hosts: Hosts, names: str, load: dict[str, Any]) -> Iterator[Going]:
    scenario = write(folder, model="simulated", loads={"l": CHAT | load})
    arguments = ["run", str(scenario), "--url", hosts.url, "--workers", names, "--bind", hosts.address]
    with going(*arguments, "--runs", str(folder), cwd=folder) as command:
        yield command


def processes(folder: Path) -> set[int]:
    """The load processes whose records have come."""
    return {record.process for path in folder.glob("*/requests.jsonl") for record in read_requests(path)}


def test_the_named_hosts_send_each_request_once_and_another_one_is_rejected(tmp_path: Path, hosts: Hosts) -> None:
    hosts.workers("gen1", "gen3")
    with run(tmp_path, hosts, "gen1,gen2", {"requests": 400}) as command:
        rejected = "the master rejected this worker: the run is for gen1, gen2"
        until(lambda: rejected in hosts.containers["gen3"].logs().decode())
        hosts.workers("gen2")
        done = command.end()
        assert done.code == 0, done.out + done.err
    assert hosts.ends("gen1") == hosts.ends("gen2") == 0
    folder = only_run(tmp_path)
    measured = [record for record in read_requests(folder / "requests.jsonl") if record.phase == "measured"]
    assert sorted(record.index for record in measured) == list(range(400))
    starts = {mark.process: mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "start"}
    host_of = {process: (mark.host or "").split("-")[0] for process, mark in starts.items()}
    sent_by = {(record.index // 4 % 2, host_of[record.process]) for record in measured}
    assert sent_by == {(0, "gen1"), (1, "gen2")}


@fault(
    "network",
    "the link to a worker is cut",
    seen="of gen2 was killed or lost",
    code=3,
    kept="what it had delivered; the rest in a folder that it names",
)
def test_a_cut_link_makes_the_run_invalid(tmp_path: Path, hosts: Hosts) -> None:
    hosts.workers("gen1", "gen2")
    with run(tmp_path, hosts, "gen1,gen2", {"duration_s": 600}) as command:
        until(lambda: len(processes(tmp_path)) == 2)
        hosts.network.disconnect(hosts.containers["gen2"], force=True)
        done = command.end()  # long before the load would
        assert done.code == 3
    reasons = sentences(read_run(only_run(tmp_path)).reasons)
    assert len([reason for reason in reasons if "of gen2 was killed or lost" in reason]) == 1
    assert len(processes(tmp_path)) == 2
    # The worker that hears nothing any more ends its load by itself, and names what it could not deliver.
    assert hosts.ends("gen2") == 1
    log = hosts.containers["gen2"].logs().decode()
    assert "no message from the master for 10 s: this load ends" in log
    assert "bytes of records were not delivered: they are in /tmp/amd-llm-load-" in log


def test_docker_compose_scales_the_workers(tmp_path: Path, image: str, compose_environment: dict[str, str]) -> None:
    """Nothing but the printed file and stock Compose: `--scale worker=3`, and the web UI starts all of them."""
    one = {"template": "simulated", "variables": {"preset": "instant", "image": image, "host_port": free_port()}}
    scenario = write(tmp_path, servers={"one": one}, loads={"l": {"user": "chat", "users": 6, "duration_s": 5}})
    port = free_port()
    printed = harness("compose", str(scenario), "--ui-port", str(port), "--workers", "1", cwd=tmp_path)
    assert (printed.code, printed.err) == (0, "")
    document = checked_each_second(printed.out).replace("amd-llm-load:local", image)
    (tmp_path / "compose.yaml").write_text(document)
    command = ["docker", "compose", "--project-name", f"scale{uuid.uuid4().hex[:8]}"]

    def compose(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env=compose_environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status() -> dict[str, Any]:
        try:
            found: dict[str, Any] = requests.get(f"http://127.0.0.1:{port}/stats/requests", timeout=PATIENCE_S).json()
        except requests.RequestException:
            return {"workers": []}
        return found

    try:
        compose("up", "--detach", "--scale", "worker=3")
        until(lambda: len(status()["workers"]) == 3)
        swarm = requests.post(
            f"http://127.0.0.1:{port}/swarm",
            data={"user_count": 6, "spawn_rate": 6, "think": "0.05"},
            timeout=PATIENCE_S,
        )
        assert swarm.json()["success"] is True
        until(lambda: sum(entry["num_requests"] for entry in status()["stats"][:-1]) > 30)
        found = status()
        assert [worker["user_count"] for worker in found["workers"]] == [2, 2, 2]
        assert found["fail_ratio"] == 0, compose("logs", "worker")
        requests.get(f"http://127.0.0.1:{port}/stop", timeout=PATIENCE_S)
    finally:
        compose("down", "--volumes", "--timeout", "5")
    assert compose("ps", "--all", "--quiet") == ""
