"""The real Docker Engine of this machine, and the project's image built for it."""

import contextlib
import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import docker
import pytest

from harness.base.files import ROOT
from harness.scenario import Consent, Load, Scenario, Server
from harness.serve.docker_engine import connect, remove_leftovers
from harness.serve.lifecycle import Endpoint, serve
from tests.support.command import PATIENCE_S

BASE = "amd-llm-load-test/base:py311"
IMAGE = "amd-llm-load-test/suite:local"
PLUGIN = Path(os.environ.get("HARNESS_TEST_CACHE") or ROOT / ".cache/engines") / "docker-config"

Served = Callable[..., AbstractContextManager[Endpoint]]


@pytest.fixture(scope="session")
def compose_environment() -> dict[str, str]:
    """The environment in which `docker compose` is there: the tests' own plugin, else the machine's."""
    candidates = [{**os.environ, "DOCKER_CONFIG": str(PLUGIN.absolute())}, dict(os.environ)]
    for environment in candidates:
        if subprocess.run(["docker", "compose", "version"], capture_output=True, env=environment).returncode == 0:
            return environment
    reason = "Docker Compose is not installed: run tests/support/engines/setup compose-plugin"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    with contextlib.closing(connect()) as found:
        yield found


@pytest.fixture(scope="session")
def image() -> str:
    return build_image()


def build_image() -> str:
    """The project's Dockerfile, built on the base image of the tests; the layer of dependencies is kept."""
    command = ["docker", "build", "--quiet", "--build-arg", f"BASE={BASE}", "--tag", IMAGE, str(ROOT)]
    # The legacy builder: a BuildKit would ask a registry for the base image.
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    with one_at_a_time("build"):  # the second one finds the layers of the first
        built = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr[-3000:]
    return IMAGE


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Wait until no other process of the tests does this.

    "leftovers": leave something behind on purpose, or call `harness clean`, which would remove that.
    """
    with (Path(tempfile.gettempdir()) / f"amd-llm-load-test-{os.getuid()}-{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def checked_each_second(document: str) -> str:
    """A Compose file with short intervals of its health checks: Docker waits for one before the first check."""
    return re.sub(r"^( +interval: ).+$", r"\1 1s", document, flags=re.MULTILINE)


@pytest.fixture
def served(image: str, tmp_path: Path, client: docker.DockerClient) -> Iterator[Served]:
    """`serve` with the embedded engine in a container; afterwards nothing of it may be left."""

    @contextlib.contextmanager
    def start(timeout_s: float = PATIENCE_S, allow: Sequence[Consent] = (), **variables: Any) -> Iterator[Endpoint]:
        given = {"image": image} | variables
        server = Server(template="simulated", variables=given, startup_timeout_s=timeout_s, allow=list(allow))
        with serve(scenario(server), "s", run_id=tmp_path.name, cell_id="c", run_folder=tmp_path) as endpoint:
            yield endpoint

    yield start
    left = remains(client, tmp_path.name)
    remove_leftovers(client, tmp_path.name, everything=True)
    assert left == []


def scenario(server: Server) -> Scenario:
    load = Load(user="chat", requests=1)
    return Scenario(version=1, question="q", model="sim", servers={"s": server}, loads={"l": load})


def remains(client: docker.DockerClient, run: str) -> list[str]:
    """Names of what carries a run's label, in any state."""
    mine: dict[str, Any] = {"label": [f"amd-llm-load.run={run}"]}
    return [
        *(str(container.name) for container in client.containers.list(all=True, filters=mine, ignore_removed=True)),
        *(str(network.name) for network in client.networks.list(filters=mine)),
        *(str(volume.name) for volume in client.volumes.list(filters=mine)),
    ]
