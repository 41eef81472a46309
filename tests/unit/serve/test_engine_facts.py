"""What the Docker Engine's list of security options says about the GPU in containers."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.serve import docker_engine
from harness.serve.docker_engine import get_engine_facts


def client(options: list[str], system: str) -> Any:
    nothing = SimpleNamespace(list=lambda **_: [])
    info = {"SecurityOptions": options, "OperatingSystem": system, "DockerRootDir": None}
    return SimpleNamespace(
        info=lambda: info, containers=nothing, networks=nothing, volumes=nothing, close=lambda: None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "system", "expected"),
    [
        (["name=seccomp,profile=unconfined", "name=cgroupns"], "Docker Desktop", (False, False, False, True)),
        (["name=seccomp,profile=default", "name=rootless", "name=selinux"], "fedora", (True, False, True, False)),
        (["name=apparmor", "name=seccomp,profile=builtin", "name=userns"], "Ubuntu", (False, True, False, False)),
        (["name=seccomp,profile=builtin", "name=rootless", "name=cgroupns"], "Ubuntu", (True, False, False, False)),
        ([], "Debian", (False, False, False, False)),
    ],
    ids=["desktop", "podman", "userns-remap", "rootless", "plain"],
)
def test_what_the_engine_says_about_itself(
    monkeypatch: pytest.MonkeyPatch, options: list[str], system: str, expected: tuple[bool, ...]
) -> None:
    monkeypatch.setattr(docker_engine, "connect", lambda: client(options, system))
    facts = get_engine_facts()
    assert (facts.rootless, facts.remapped, facts.selinux, facts.desktop) == expected
