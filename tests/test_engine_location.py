"""Where the Docker Engine is: this machine, another one behind ssh or TCP, or nowhere."""

import contextlib
import hashlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError, ServerError
from harness.serve.engine import connect
from harness.serve.lifecycle import find_reachable_address
from harness.serve.location import SshSocket, engine_command, engine_location


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
    (docker_config / "config.json").write_text('{"currentContext": "rootless", "auths": {}}')
    monkeypatch.setenv("DOCKER_CONTEXT", "gpubox")
    location = engine_location()
    assert (location.address, location.host) == ("ssh://ada@gpubox", "gpubox")
    assert location.named_by == "the Docker context 'gpubox'"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert engine_location().address == "unix:///var/run/docker.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "")
    assert engine_location().address == "unix:///run/user/1000/docker.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "empty")
    assert engine_location().address == "unix:///var/run/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.7:2375")
    assert (engine_location().host, engine_location().named_by) == ("10.0.0.7", "DOCKER_HOST")


def test_a_context_with_certificates(docker_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docker_config / "config.json").write_text("{}")
    for name, unverified in (("checked", False), ("unchecked", True)):
        folder = context(docker_config, name, Host="tcp://10.0.0.7:2376", SkipTLSVerify=unverified)
        folder.mkdir(parents=True)
        for file in ("ca", "cert", "key"):
            (folder / f"{file}.pem").touch()
        monkeypatch.setenv("DOCKER_CONTEXT", name)
        tls = engine_location().tls
        assert tls is not None
        assert (tls.ca_cert, tls.verify) == (str(folder / "ca.pem"), None if unverified else True)
        assert tls.cert == (str(folder / "cert.pem"), str(folder / "key.pem"))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DOCKER_CONTEXT", "none", "the Docker context 'none' does not exist"),
        ("DOCKER_CONTEXT", "broken", "Detected corrupted meta file for context broken"),
        ("DOCKER_HOST", "ssh://", "the Docker Engine at ssh:// cannot be used: it has no host"),
        ("DOCKER_HOST", "nonsense://x", "the Docker Engine at nonsense://x cannot be used"),
        ("DOCKER_HOST", "tcp://[::1", r"the Docker Engine at tcp://\[::1 cannot be used: Invalid IPv6 URL"),
        ("DOCKER_HOST", "tcp://gpubox", "the Docker Engine at tcp://gpubox cannot be used: .*port is required"),
    ],
)
def test_a_place_that_cannot_be_known(
    docker_config: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    path = docker_config / "contexts/meta" / hashlib.sha256(b"broken").hexdigest() / "meta.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    (docker_config / "config.json").write_text("{}")
    monkeypatch.setenv(variable, value)
    assert (engine_location().is_here, engine_location().shares_files) == (False, False)
    with pytest.raises(ServerError, match=message) as caught:
        connect()
    assert "`docker context ls`" in caught.value.next_step


def test_a_loopback_port_of_an_engine_over_tcp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://gpubox:2376")
    with pytest.raises(HarnessError, match="publishes the server's port on 127.0.0.1") as caught:
        find_reachable_address(engine_location(), "127.0.0.1")
    assert "ssh://USER@HOST" in caught.value.next_step
    assert "`publish` to 0.0.0.0" in caught.value.next_step


SSH = """#!{python}
import json, os, pathlib, socket, sys, threading
with open({asked!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
there = socket.socket(socket.AF_UNIX)
there.connect({engine!r})
def to_engine():
    while data := os.read(0, 65536):
        there.sendall(data)
    there.shutdown(socket.SHUT_WR)
threading.Thread(target=to_engine, daemon=True).start()
while data := there.recv(65536):
    os.write(1, data)
"""
REFUSES = "#!/bin/sh\necho 'ada@gpubox: Permission denied (publickey).' >&2\nexit 255\n"


def program(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "ssh").write_text(text)
    (folder / "ssh").chmod(0o755)
    return folder


@contextlib.contextmanager
def engine(path: Path) -> Iterator[None]:
    """What answers every request of a connection as an engine that only knows its version."""

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            while head := lines.readline():
                while lines.readline().strip():
                    pass
                body = json.dumps({"ApiVersion": "1.44", "Version": "28.2.2"}).encode() if b"version" in head else b"OK"
                start = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
                connection.sendall(start + str(len(body)).encode() + b"\r\n\r\n" + body)

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        accepting = threading.Thread(target=serve, daemon=True)
        accepting.start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join(5)


def test_an_engine_behind_ssh_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    text = SSH.format(python=sys.executable, asked=str(asked), engine=str(tmp_path / "engine.sock"))
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", text)), prepend=":")
    monkeypatch.setenv("DOCKER_HOST", "ssh://ada@GpuBox:2222")
    with engine(tmp_path / "engine.sock"), contextlib.closing(connect()) as client:
        assert client.version()["Version"] == "28.2.2"
    calls = [json.loads(line) for line in asked.read_text().splitlines()]
    common = ["-o", "ConnectTimeout=30", "-T", "--", "GpuBox", "docker system dial-stdio"]
    assert calls[0] == ["-l", "ada", "-p", "2222", *common]


def test_what_ssh_says_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", REFUSES)), prepend=":")
    monkeypatch.setenv("DOCKER_HOST", "ssh://ada@gpubox")
    with pytest.raises(ServerError, match="cannot be reached over ssh: ada@gpubox: Permission denied") as caught:
        connect()
    assert caught.value.next_step.startswith("`docker -H ssh://ada@gpubox version` has to work without a question")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="there is no program `ssh`") as caught:
        connect()
    assert "openssh-client" in caught.value.next_step


@pytest.mark.parametrize(
    ("where", "end"),
    [
        ("ssh://[fe80::1]:22", ["--", "fe80::1", "docker system dial-stdio"]),
        ("ssh://gpubox/run/user/1000/docker.sock",
         ["--", "gpubox", "docker --host unix:///run/user/1000/docker.sock system dial-stdio"]),
    ],
)  # fmt: skip
def test_the_forms_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, end: list[str]) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", REFUSES)))
    monkeypatch.setenv("DOCKER_HOST", where)
    assert engine_command(engine_location())[-3:] == end


def test_a_socket_ends_what_it_started() -> None:
    forwarded = SshSocket(["cat"])
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(forwarded.url.removeprefix("unix://"))
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        forwarded.close()
        assert client.recv(1) == b""
    assert not Path(forwarded.url.removeprefix("unix://")).parent.exists()
