"""Loads whose cells are named LOAD@USERS, on a server in a container with a load generator in one: Docker has no @."""

from pathlib import Path

import docker

from harness.records.manifest import read_run
from tests.docker.conftest import remains
from tests.support.command import harness, only_run, write


def scenario_of(folder: Path, image: str, **load: object) -> Path:
    # Answers of a quarter of a second: late timers of a busy machine are a small share of them.
    server = {"template": "simulated", "variables": {"preset": "strix-halo-qwen3.5-0.8b", "image": image}}
    loads = {"work": {"user": "batch", "output_tokens": 20, **load}}
    return write(folder, servers={"one": server}, loads=loads, generator="container", warmup=None)


def test_stages(image: str, client: docker.DockerClient, tmp_path: Path) -> None:
    stages = [{"users": 1, "for_s": 2}, {"users": 2, "for_s": 2}]
    path = scenario_of(tmp_path, image, stages=stages)
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, ""), done.out
    run = only_run(tmp_path / "runs")
    assert list(read_run(run).ran) == ["r1-one-work@1", "r1-one-work@2"]
    assert remains(client, run.name) == []
