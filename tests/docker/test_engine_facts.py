"""What a real Docker Engine says of itself, and what a killed run left in it."""

import os
import subprocess
import uuid
from pathlib import Path

import docker
import pytest

from harness.base.process import PID
from harness.machine.inspection import DockerEngine, diagnose
from harness.serve.docker_engine import engine_address, get_engine_facts, make_labels
from tests.docker.conftest import one_at_a_time


def test_the_engine_of_this_machine(client: docker.DockerClient) -> None:
    facts, info = get_engine_facts(), client.info()
    assert facts.problem is None
    assert facts.rootless is any("rootless" in option for option in info["SecurityOptions"])
    assert facts.remapped is any(option.startswith("name=userns") for option in info["SecurityOptions"])
    assert facts.selinux is any(option.startswith("name=selinux") for option in info["SecurityOptions"])
    assert facts.image_folder is not None
    if os.path.isdir(facts.image_folder):
        assert facts.free_bytes is not None and facts.free_bytes > 0
    assert "docker.reachable" in {one.id for one in diagnose(docker=facts) if one.level == "ok"}


@one_at_a_time("leftovers")
def test_what_a_killed_run_left_is_named_and_what_a_living_one_has_is_not(client: docker.DockerClient) -> None:
    mark = uuid.uuid4().hex[:8]
    mine = make_labels(f"facts-{mark}", "alive")
    gone = {**mine, PID: "999999999"}
    made = [
        client.networks.create(f"amd-llm-load-facts-{mark}-{name}", labels=of)
        for name, of in (("alive", mine), ("gone", gone))
    ]
    try:
        stale = get_engine_facts().stale
        assert f"network amd-llm-load-facts-{mark}-gone" in stale
        assert f"network amd-llm-load-facts-{mark}-alive" not in stale
        (finding,) = [one for one in diagnose(docker=DockerEngine(stale=stale)) if one.id == "docker.stale"]
        assert (finding.level, finding.fix) == ("warning", "harness clean")
    finally:
        for network in made:
            network.remove()


def test_contexts_as_docker_resolves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def docker_cli(*arguments: str) -> str:
        return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    def check_address(expected: str, **variables: str) -> None:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert engine_address() == expected
            assert docker_cli("context", "inspect", "--format", "{{.Endpoints.docker.Host}}") == expected

    check_address("unix:///var/run/docker.sock", DOCKER_CONFIG=str(tmp_path / "none"))
    docker_cli("context", "create", "other", "--docker", "host=unix:///tmp/other.sock")
    docker_cli("context", "create", "rootless", "--docker", "host=unix:///run/user/1000/docker.sock")
    docker_cli("context", "use", "other")
    check_address("unix:///tmp/other.sock")
    check_address("unix:///run/user/1000/docker.sock", DOCKER_CONTEXT="rootless")
    check_address("unix:///var/run/docker.sock", DOCKER_CONTEXT="default")
    check_address("unix:///tmp/host.sock", DOCKER_CONTEXT="rootless", DOCKER_HOST="unix:///tmp/host.sock")
