"""A Docker Engine that cannot be used is explained; none is needed here."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import HarnessError, ServerError
from harness.paths import ROOT
from harness.scenario.scenario import Load, Scenario, Server
from harness.serve import engine_version, serve
from harness.serve.docker.daemon import connect, engine_host
from harness.serve.docker.images import cannot_pull

CONNECT_AS_NOBODY = """
import os
from harness.serve.docker.daemon import connect
from harness.errors import ServerError
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    connect()
except ServerError as error:
    print(error.what, error.next_step)
"""


def test_no_permission_says_which_group(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        path.chmod(0o000)
        for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            folder.chmod(0o755)
        environment = {**os.environ, "DOCKER_HOST": f"unix://{path}", "LOGNAME": "ada"}
        command = [sys.executable, "-c", CONNECT_AS_NOBODY]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    expected = f"no permission to use the Docker Engine at unix://{path} sudo usermod -aG docker ada, then log in again"
    assert answer.stdout.startswith(expected), answer.stderr


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("unix:///no/such/docker.sock", "there is no Docker Engine at unix:///no/such/docker.sock"),
        ("tcp://127.0.0.1:9", r"the Docker Engine at tcp://127.0.0.1:9 does not run \(connection refused\)"),
        ("nonsense://x", "the Docker Engine at nonsense://x cannot be used"),
    ],
)
def test_no_engine_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, message: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    server = Server(template="simulated")
    scenario = Scenario(version=1, question="q", model="m", servers={"s": server}, loads={"l": Load(user="chat")})
    with (
        pytest.raises(ServerError, match=message) as caught,
        serve(scenario, "s", run_id="r", cell_id="c", run_folder=tmp_path),
    ):
        pass
    assert caught.value.exit_code == 2
    assert engine_version() is None


def test_an_engine_that_does_not_run_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))  # and nobody listens
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with pytest.raises(ServerError, match="does not run") as caught:
        connect()
    assert "systemctl start docker" in caught.value.next_step


@pytest.mark.parametrize(
    ("host", "name"),
    [
        (None, None),
        ("unix:///run/docker.sock", None),
        ("tcp://127.0.0.1:2375", None),
        ("ssh://me@gpu-box", "gpu-box"),
        ("tcp://10.0.0.7:2376", "10.0.0.7"),
    ],
)
def test_an_engine_on_another_machine_is_known(
    monkeypatch: pytest.MonkeyPatch, host: str | None, name: str | None
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    if host is not None:
        monkeypatch.setenv("DOCKER_HOST", host)
    assert engine_host() == name


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Get https://registry-1.docker.io/v2/: dial tcp: lookup registry-1.docker.io: no such host", "be reached"),
        ("Get https://x/v2/: net/http: TLS handshake timeout", "be reached"),
        ("pull access denied for x, repository does not exist or may require 'docker login'", "it needs a login"),
        ("Head https://ghcr.io/v2/x/manifests/y: unauthorized", "it needs a login"),
        ("manifest for vllm/vllm:v9 not found: manifest unknown: manifest unknown", "the registry has no image x"),
        ("something new", "the image x cannot be pulled: something new"),
    ],
)
def test_why_an_image_cannot_be_pulled(said: str, words: str) -> None:
    error: HarnessError = cannot_pull("x", said)
    assert words in error.what
    assert error.next_step
