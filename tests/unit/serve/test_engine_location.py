"""Which Docker Engine is used: that of Docker's command line, if it is at a socket of this machine."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import ServerError
from harness.serve.docker_engine import connect, engine_address, engine_shares_files
from tests.support.wording import Wording


def context(folder: Path, name: str, **endpoint: Any) -> None:
    """A context of Docker as its command line stores it."""
    path = folder / "contexts/meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": {"docker": endpoint}}))


@pytest.fixture(autouse=True)
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def test_without_settings_it_is_the_engine_of_the_system() -> None:
    assert engine_address() == "unix:///var/run/docker.sock"


def test_docker_contexts_are_followed(docker_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCKER_HOST comes first, then DOCKER_CONTEXT, then the current context: tests/docker asks Docker itself."""
    context(docker_config, "desktop", Host="unix:///home/ada/.docker/desktop/docker.sock")
    context(docker_config, "rootless", Host="unix:///run/user/1000/docker.sock")
    context(docker_config, "empty")
    (docker_config / "config.json").write_text('{"currentContext": "rootless", "auths": {}}')
    for name, address in (
        ("desktop", "unix:///home/ada/.docker/desktop/docker.sock"),
        ("default", "unix:///var/run/docker.sock"),
        ("", "unix:///run/user/1000/docker.sock"),
        ("empty", "unix:///var/run/docker.sock"),
    ):
        monkeypatch.setenv("DOCKER_CONTEXT", name)
        assert engine_address() == address
    monkeypatch.setenv("DOCKER_HOST", " unix:///tmp/d.sock ")
    assert engine_address() == "unix:///tmp/d.sock"


def test_the_socket_alone_is_mounted_into_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///proc/none.sock")
    assert engine_shares_files()
    monkeypatch.setenv("DOCKER_HOST", "unix:///proc")  # the mount that every machine has
    assert not engine_shares_files()


@pytest.mark.parametrize(
    ("variable", "value", "message", "next_step"),
    [
        ("DOCKER_CONTEXT", "none", "'none'", "`docker context ls`"),
        ("DOCKER_CONTEXT", "broken", "Detected corrupted meta file for context broken", "`docker context ls`"),
        ("DOCKER_CONTEXT", "gpubox", "ssh://ada@gpubox ", "with --url"),
        ("DOCKER_HOST", "ssh://ada@gpubox", "ssh://ada@gpubox ", "with --url"),
        ("DOCKER_HOST", "tcp://127.0.0.1:2375", "tcp://127.0.0.1:2375 ", "with --url"),
    ],
)
def test_an_engine_that_is_not_of_this_machine_is_refused(
    docker_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
    next_step: str,
    wording: Wording,
) -> None:
    context(docker_config, "gpubox", Host="ssh://ada@gpubox")
    path = docker_config / "contexts/meta" / hashlib.sha256(b"broken").hexdigest() / "meta.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    (docker_config / "config.json").write_text("{}")
    monkeypatch.setenv(variable, value)
    assert not engine_shares_files()
    with pytest.raises(ServerError, match=message) as caught:
        connect()
    assert next_step in caught.value.next_step
    wording(caught.value)
