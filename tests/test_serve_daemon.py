"""A Docker Engine that cannot be used is explained; none is needed here."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docker.errors import DockerException

from harness.errors import HarnessError, ServerError
from harness.files import ROOT
from harness.scenario import Load, Scenario, Server
from harness.serve.engine import connect, get_engine_version, make_docker_error
from harness.serve.lifecycle import find_reachable_address, serve
from harness.serve.location import engine_location

CONNECT_AS_NOBODY = """
import os
from harness.serve.engine import connect
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
        environment = {**os.environ, "DOCKER_HOST": f"unix://{path}"}
        command = [sys.executable, "-c", CONNECT_AS_NOBODY]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert f"no permission to use the Docker Engine at unix://{path} sudo usermod -aG docker" in answer.stdout, answer


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
    assert get_engine_version() is None


def context(folder: Path, name: str, **endpoint: Any) -> Path:
    """A context of Docker as its command line stores it; the folder of its certificates."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    path = folder / "contexts/meta" / digest / "meta.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": {"docker": endpoint}}))
    return folder / "contexts/tls" / digest / "docker"


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("address", "host", "shares_files", "loopback", "every"),
    [
        (None, None, True, "127.0.0.1", "0.0.0.0"),
        (f"tcp://{socket.gethostname()}:2375", None, False, "127.0.0.1", "0.0.0.0"),
        ("ssh://me@Gpu-Box", "Gpu-Box", False, None, "Gpu-Box"),
        ("tcp://10.0.0.7:2376", "10.0.0.7", False, None, "10.0.0.7"),
        (" gpu-box:2376 ", "gpu-box", False, None, "gpu-box"),
    ],
)
def test_where_an_engine_is(
    docker_config: Path, monkeypatch: pytest.MonkeyPatch, address: str | None, host: str | None, shares_files: bool,
    loopback: str | None, every: str,
) -> None:  # fmt: skip
    if address is not None:
        monkeypatch.setenv("DOCKER_HOST", address)
    location = engine_location()
    assert (location.host, location.is_here, location.shares_files) == (host, host is None, shares_files)
    assert find_reachable_address(location, "10.0.0.9") == "10.0.0.9"
    if not location.ssh:  # else `ssh` is asked for the address
        assert find_reachable_address(location, "0.0.0.0") == every
    if location.ssh or loopback is not None:  # else it is refused
        assert find_reachable_address(location, "127.0.0.1") == loopback
    assert (location.named_by, location.problem) == ("DOCKER_HOST", None)


def test_the_socket_alone_is_mounted_into_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///proc")  # the mount that every machine has
    location = engine_location()
    assert (location.is_here, location.shares_files) == (True, False)


def test_docker_contexts_are_followed(docker_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCKER_HOST comes first, then DOCKER_CONTEXT, then the current context: tests/docker asks Docker itself."""
    context(docker_config, "gpubox", Host="ssh://ada@gpubox")
    context(docker_config, "rootless", Host="unix:///run/user/1000/docker.sock")
    context(docker_config, "empty")
    monkeypatch.setenv("DOCKER_CONTEXT", "gpubox")  # which needs no config.json
    found = engine_location()
    assert (found.address, found.named_by, found.host) == ("ssh://ada@gpubox", "the Docker context 'gpubox'", "gpubox")
    (docker_config / "config.json").write_text('{"currentContext": "rootless", "auths": {}}')
    assert engine_location() is found, "for as long as the process lives"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert engine_location().address == "unix:///var/run/docker.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "")
    assert engine_location().address == "unix:///run/user/1000/docker.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "empty")
    assert engine_location().address == "unix:///var/run/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.7:2375")
    assert (engine_location().host, engine_location().named_by) == ("10.0.0.7", "DOCKER_HOST")


def test_a_context_with_certificates(docker_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, unverified in (("checked", False), ("unchecked", True)):
        folder = context(docker_config, name, Host="tcp://10.0.0.7:2376", SkipTLSVerify=unverified)
        folder.mkdir(parents=True)
        for file in ("ca", "cert", "key"):
            (folder / f"{file}.pem").touch()
        monkeypatch.setenv("DOCKER_CONTEXT", name)
        tls = engine_location().tls
        assert tls is not None
        assert (tls.ca_cert, tls.verify) == (str(folder / "ca.pem"), not unverified)
        assert tls.cert == (str(folder / "cert.pem"), str(folder / "key.pem"))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DOCKER_CONTEXT", "none", "the Docker context 'none' cannot be used: it does not exist"),
        ("DOCKER_CONTEXT", "broken", "the Docker context 'broken' cannot be used: DecodeError"),
        ("DOCKER_HOST", "tcp://[::1", r"the Docker Engine at tcp://\[::1 cannot be used: Invalid IPv6 URL"),
        ("DOCKER_HOST", "tcp://gpubox", "the Docker Engine at tcp://gpubox cannot be used: .*port is required"),
        ("DOCKER_TLS_VERIFY", "1", "the Docker Engine at unix:///var/run/docker.sock cannot be used: Path to a cert"),
    ],
)
def test_a_place_that_cannot_be_known(
    docker_config: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    path = docker_config / "contexts/meta" / hashlib.sha256(b"broken").hexdigest() / "meta.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(docker_config))
    if variable != "DOCKER_TLS_VERIFY":
        monkeypatch.delenv("DOCKER_CERT_PATH")
    monkeypatch.setenv(variable, value)
    assert (engine_location().is_here, engine_location().shares_files) == (False, False)
    with pytest.raises(ServerError, match=message) as caught:
        connect()
    assert "`docker context ls`" in caught.value.next_step


def test_a_loopback_port_of_an_engine_over_tcp_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://gpubox:2376")
    with pytest.raises(HarnessError, match="publishes the server's port on 127.0.0.1") as caught:
        find_reachable_address(engine_location(), "127.0.0.1")
    assert "ssh://USER@HOST" in caught.value.next_step
    assert "`publish` to 0.0.0.0" in caught.value.next_step


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Get https://registry-1.docker.io/v2/: dial tcp: lookup registry-1.docker.io: no such host", "be reached"),
        ("pull access denied for x, repository does not exist or may require 'docker login'", "it needs a login"),
        ("Head https://ghcr.io/v2/x/manifests/y: unauthorized", "it needs a login"),
        ("manifest for vllm/vllm:v9 not found: manifest unknown: manifest unknown", "there is no image"),
        ("something new", "the image x: something new"),
    ],
)
def test_why_an_image_cannot_be_pulled(said: str, words: str) -> None:
    error: HarnessError = make_docker_error("the image x", DockerException(said))
    assert words in error.what
    assert error.next_step
