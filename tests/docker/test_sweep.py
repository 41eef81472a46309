"""What a killed harness leaves behind is swept, by label only."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from harness.base.files import ROOT
from harness.base.process import PID_START
from harness.serve.docker_engine import CACHE_LABEL, LABEL, RUN_LABEL, make_labels, remove_leftovers
from tests.docker.conftest import one_at_a_time, remains
from tests.support.faults import fault

OWNER = """
import sys, time
from pathlib import Path
from harness.scenario import Load, Scenario, Server
from harness.serve.lifecycle import serve
image, folder, run = sys.argv[1:]
server = Server(template="simulated", variables={"image": image})
scenario = Scenario(version=1, question="q", model="sim", servers={"s": server}, loads={"l": Load(user="chat")})
with serve(scenario, "s", run_id=run, cell_id="c", run_folder=Path(folder)) as endpoint:
    print(endpoint.url, flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def owner(image: str, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A harness process with a server in a container, of the run named as the test's folder."""
    command = [sys.executable, "-c", OWNER, image, str(tmp_path), tmp_path.name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        yield process
        process.kill()


@fault(
    "harness",
    "kill -9 while a container runs",
    seen="`harness clean` removes it",
    left="a container and a network, until `harness clean`",
    kept="the server's log until then",
)
@one_at_a_time("leftovers")
def test_kill_minus_nine_then_sweep_leaves_nothing(
    owner: "subprocess.Popen[str]", client: docker.DockerClient, tmp_path: Path
) -> None:
    run = tmp_path.name
    assert remove_leftovers(client, run) == []  # its owner lives
    owner.kill()
    owner.wait()
    name = f"amd-llm-load-{run}-c"
    assert remains(client, run) == [f"{name}-server", name]
    assert remove_leftovers(client, run) == [f"container {name}-server", f"network {name}"]
    assert remains(client, run) == []
    assert remove_leftovers(client, run) == []
    # What was written until then is there.
    assert "Application startup complete" in (tmp_path / "logs/c.server.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@fault("harness", "SIGTERM, SIGINT or SIGHUP while a container runs", seen="container and network are taken down")
def test_every_way_of_stopping_takes_everything_down(
    owner: "subprocess.Popen[str]", client: docker.DockerClient, tmp_path: Path, number: signal.Signals
) -> None:
    owner.send_signal(number)
    owner.wait(20)
    assert remains(client, tmp_path.name) == []


@fault(
    "engine",
    "`harness clean` next to containers and volumes of others",
    seen="only what carries the label of the harness is removed",
    left="what others own, and caches",
)
@one_at_a_time("leftovers")
def test_only_what_carries_the_label_is_touched(client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    run = tmp_path.name
    gone = make_labels(run, "c") | {PID_START: "1"}
    mine = client.containers.create(image, "true", labels=gone)
    others = client.containers.create(image, "true", labels={"some": "label"})
    volume = client.volumes.create(f"{run}-own", labels=gone)
    others_volume = client.volumes.create(f"{run}-others")
    cache = client.volumes.create(f"{run}-cache", labels={LABEL: "1", CACHE_LABEL: "1", RUN_LABEL: run})
    try:
        assert remove_leftovers(client, run) == [f"container {mine.name}", f"volume {volume.name}"]
        assert client.containers.get(str(others.id)).name == others.name
        assert client.volumes.get(f"{run}-others").name == others_volume.name
        assert client.volumes.get(f"{run}-cache").name == cache.name
    finally:
        others.remove()
        others_volume.remove()
        cache.remove()


def test_caches_stay_while_a_harness_lives_that_may_use_them(
    client: docker.DockerClient, image: str, tmp_path: Path
) -> None:
    run = tmp_path.name
    cache = client.volumes.create(f"{run}-cache", labels={LABEL: "1", CACHE_LABEL: "1", RUN_LABEL: run})
    network = client.networks.create(run, labels=make_labels(run, "c"))  # mounts nothing: its server is yet to start
    try:
        remove_leftovers(client, run, caches=True)
        assert client.volumes.get(f"{run}-cache").name == cache.name
        network.remove()
        assert f"volume {run}-cache" in remove_leftovers(client, run, caches=True)
    finally:
        remove_leftovers(client, run, everything=True, caches=True)
