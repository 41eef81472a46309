"""The load generator in a container: same records, same verdict, nothing left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import docker
import pytest

from harness.base.errors import ServerError
from harness.base.files import LOCUSTFILES
from harness.records.manifest import read_run
from harness.records.records import read_marks, read_requests
from harness.scenario import Load
from harness.serve import generator
from tests.docker.conftest import remains
from tests.support.command import PATIENCE_S, stamped_by_kernel
from tests.support.faults import fault
from tests.support.load_runs import make_job
from tests.support.simulated import spawned

SCENARIO = """
version: 1
question: Does the load generator work in a container?
model: sim
servers:
  engine: {{template: simulated, variables: {{preset: instant, image: "{image}"}}}}
loads:
  five: {{user: batch, batch_size: 5, requests: 20, output_tokens: 20}}
  people: {{user: chat, users: 4, processes: 2, duration_s: 2, output_tokens: 20, output: natural}}
  steps: {{user: batch, output_tokens: 20, stages: [{{users: 1, for_s: 2}}, {{users: 2, for_s: 2}}]}}
  own: {{user: own.py, requests: 4, output_tokens: 5}}
repeats: 1
generator: container
"""
OWN = """
from locust import task
from harness.load.user import LLMUser

class Own(LLMUser):
    @task
    def one(self) -> None:
        self.ask(self.take()[0])
"""


def harness_run(folder: Path, locust: str, engine: str) -> "subprocess.CompletedProcess[str]":
    (folder / "scenario.yaml").write_text(SCENARIO.format(image=engine))
    (folder / "own.py").write_text(OWN)
    command = [sys.executable, "-m", "harness", "run", str(folder / "scenario.yaml"), "--runs", str(folder / "runs")]
    environment = {**os.environ, "HARNESS_IMAGE": locust}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)


def test_a_run_with_the_generator_in_a_container(tmp_path: Path, image: str, client: docker.DockerClient) -> None:
    result = harness_run(tmp_path, locust=image, engine=image)
    (folder,) = (tmp_path / "runs").iterdir()
    # Where other processes have the cores, the load generator is the limit, and the run says so.
    reasons = read_run(folder).reasons
    assert {reason.code.partition("_")[0] for reason in reasons} <= {"client"}, result.stdout
    assert (result.returncode, result.stderr) == (3 if reasons else 0, "")
    records = list(read_requests(folder / "requests.jsonl"))
    assert sum(record.load == "five" for record in records) == 25
    assert sum(record.load == "own" for record in records) == 5
    assert stamped_by_kernel(records)
    assert {"r1-engine-steps@1", "r1-engine-steps@2"} <= {record.cell for record in records}  # Docker's names have no @
    marks = read_marks(folder / "processes.jsonl")
    assert len({mark.process for mark in marks if "people" in mark.cell}) == 2
    assert {path.stat().st_uid for path in folder.iterdir()} == {os.getuid()}
    assert remains(client, folder.name) == []


def test_an_image_that_was_not_built_is_explained(tmp_path: Path, image: str, client: docker.DockerClient) -> None:
    result = harness_run(tmp_path, locust="amd-llm-load:not-built", engine=image)
    assert result.returncode == 2
    error, advice = result.stderr.splitlines()
    assert error.startswith("error: ") and " amd-llm-load:not-built " in error
    assert advice.startswith("next: ") and " make image " in advice
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_run(folder).status == "failed"
    assert remains(client, folder.name) == []


@fault(
    "engine",
    "the load generator's container cannot be started",
    seen="the cause in one sentence",
    kept="a run marked failed",
)
def test_a_container_that_cannot_be_started_leaves_nothing(
    tmp_path: Path, image: str, client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "IMAGE", image)
    job = make_job(tmp_path, Load(user="batch", requests=1))
    with pytest.raises(ServerError, match="the load generator's container cannot be started"):
        generator.ContainerChild(
            tmp_path.name, job, [], [LOCUSTFILES / "chat.py"], "no-such-network", tmp_path / "a.log"
        )
    assert remains(client, tmp_path.name) == []


def test_the_container_can_write_into_the_run_directory_only(
    tmp_path: Path, image: str, client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "IMAGE", image)
    job = make_job(tmp_path, Load(user="batch", requests=1))
    child = generator.ContainerChild(
        tmp_path.name, job, ["--help"], [LOCUSTFILES / "chat.py"], None, tmp_path / "a.log"
    )
    try:
        (name,) = remains(client, tmp_path.name)
        attrs = client.containers.get(name).attrs
        host = attrs["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["CapAdd"]) == (True, ["ALL"], None)
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert [mount["Destination"] for mount in attrs["Mounts"] if mount["RW"]] == [str(tmp_path)]
    finally:
        child.stop(1)
    assert remains(client, tmp_path.name) == []


def test_quick_from_the_image_measures_a_server_of_this_machine(image: str, client: docker.DockerClient) -> None:
    with spawned(quiet=True) as running:
        command = ["harness", "quick", running.url, "--json"]
        output = client.containers.run(image, command, network="host", init=True, remove=True)
    quick = json.loads(output)
    assert quick["valid"] and quick["model"] == "simulated"
    assert [level["users"] for level in quick["users"]] == [1, 4, 8] and all(one["answers"] for one in quick["users"])
