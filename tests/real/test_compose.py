"""`harness compose` of scenarios for real engines, carried out by the real Docker Compose."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.base.files import ROOT, SCENARIOS
from harness.base.process import free_port
from harness.scenario.file import load_scenario
from harness.serve.template import prepare_server
from tests.docker.conftest import checked_each_second, one_at_a_time
from tests.real.conftest import Say
from tests.real.parts import docker, harness, llamacpp, write_scenario
from tests.support.command import PATIENCE_S, until
from tests.support.engines.paths import BASE_IMAGE, DOCKER_CONFIG
from tests.support.load_runs import composed
from tests.support.nightly import NIGHTLY

GENERATOR = "amd-llm-load:local"
MADE_HERE = "org.amd-llm-load.tests"
LOADS = {"chat": {"user": "chat", "users": 2, "duration_s": 5, "think_s": [0, 0], "output_tokens": 8}}


def compose(folder: Path, *arguments: str) -> str:
    """What Docker Compose prints for the file in a folder; it must succeed."""
    command = ["docker", "compose", "--project-name", f"real{os.getpid()}", "--file", str(folder / "compose.yaml")]
    environment = {**os.environ, "DOCKER_CONFIG": str(DOCKER_CONFIG)}
    answer = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def printed(folder: Path, server: dict[str, Any], model: str, *options: str) -> None:
    """Write compose.yaml as `harness compose` prints it."""
    scenario = write_scenario(folder, "up", model=model, servers={"s": server}, loads=LOADS)
    answer = harness("compose", scenario, *options)
    assert (answer.returncode, answer.stderr) == (0, "")
    (folder / "compose.yaml").write_text(checked_each_second(answer.stdout), encoding="utf-8")


@pytest.fixture(scope="session")
def generator() -> str:
    """The load generator's image. One that somebody made with `make image` stays as it is."""
    label = '{{index .Config.Labels "' + MADE_HERE + '"}}'
    present = docker("images", "--quiet", GENERATOR).strip()
    if present and docker("image", "inspect", "--format", label, GENERATOR).strip() != "1":
        return GENERATOR
    build = ["docker", "build", "--quiet", "--build-arg", f"BASE={BASE_IMAGE}", "--label", f"{MADE_HERE}=1"]
    # The legacy builder: a BuildKit would ask a registry for the base image.
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    with one_at_a_time("build"):  # the layers are those of the image of tests/docker
        built = subprocess.run([*build, "--tag", GENERATOR, ROOT], capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr[-3000:]
    return GENERATOR


def test_docker_compose_accepts_every_server_of_the_scenarios_that_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nightly each server; else one of each template and gateway."""
    monkeypatch.setenv("HF_TOKEN", "")
    seen = set()
    for path in sorted(SCENARIOS.glob("*.yaml")):
        scenario = load_scenario(path)
        for name, server in scenario.servers.items():
            kind = (server.template, server.gateway and server.gateway.template)
            if prepare_server(scenario, name).file.serving.offline or (kind in seen and not NIGHTLY):
                continue
            seen.add(kind)
            document = composed(scenario, name, next(iter(scenario.loads)))
            (tmp_path / "compose.yaml").write_text(document, encoding="utf-8")
            found = json.loads(compose(tmp_path, "config", "--format", "json"))["services"]
            assert {"server", "locust"} | ({"gateway"} if server.gateway else set()) <= set(found), (path, name)
    assert len(seen) > 5


@contextmanager
def up(folder: Path) -> Iterator[dict[str, Any]]:
    """`docker compose up --detach`, and `down` at the end; Compose's view of the file."""
    try:
        compose(folder, "up", "--detach")
        yield json.loads(compose(folder, "config", "--format", "json"))
    finally:
        compose(folder, "down", "--volumes", "--timeout", "5")


def test_docker_compose_up_serves_and_loads(generator: str, tmp_path: Path, say: Say) -> None:
    """Nothing but the printed file and stock Compose: the server answers, and Locust's web UI loads it."""
    ui_port = free_port()
    ui = f"http://127.0.0.1:{ui_port}"
    printed(tmp_path, llamacpp(), "tiny", "--ui-port", str(ui_port))
    with up(tmp_path) as found:
        (port,) = found["services"]["server"]["ports"]
        assert port["host_ip"] == "127.0.0.1"
        question = {"model": "tiny", "messages": [{"role": "user", "content": "Yes?"}], "max_tokens": 4}
        url = f"http://127.0.0.1:{port['published']}/v1/chat/completions"
        answer = requests.post(url, json=question, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)

        until(lambda: answers(ui))
        swarm = requests.post(f"{ui}/swarm", data={"user_count": 2, "spawn_rate": 2}, timeout=PATIENCE_S)
        assert (swarm.status_code, swarm.json()["success"]) == (200, True)
        done = until(lambda: enough(ui))
        requests.get(f"{ui}/stop", timeout=PATIENCE_S)
        say(f"docker compose up: Locust's web UI counts {done['num_requests']} requests, {done['num_failures']} failed")
        assert done["num_failures"] == 0, compose(tmp_path, "logs", "locust")
    assert compose(tmp_path, "ps", "--all", "--quiet") == ""


def answers(ui: str) -> bool | None:
    try:
        return requests.get(ui, timeout=PATIENCE_S).status_code == 200 or None
    except requests.ConnectionError:
        return None


def enough(ui: str) -> dict[str, Any] | None:
    """Locust's totals, once they hold ten requests."""
    stats = requests.get(f"{ui}/stats/requests", timeout=PATIENCE_S).json()["stats"]
    total: dict[str, Any] = next(entry for entry in stats if entry["name"] == "Aggregated")
    return total if total["num_requests"] >= 10 else None
