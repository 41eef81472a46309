"""An engine behind ssh: the user's own ssh program carries each connection, and its words are what one is told."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import ServerError
from harness.serve.engine import connect
from harness.serve.location import SshSocket, engine_command, engine_location

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


@pytest.mark.parametrize(
    ("wrong", "why"), [("ssh://", "it has no host"), ("ssh://gpubox:many", "Port could not be cast to integer")]
)
def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, wrong: str, why: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", wrong)
    with pytest.raises(ServerError, match=f"the Docker Engine at {wrong} cannot be used: {why}"):
        connect()


def test_a_socket_ends_what_it_started() -> None:
    forwarded = SshSocket(["cat"])
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(forwarded.url.removeprefix("unix://"))
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        forwarded.close()
        assert client.recv(1) == b""
    assert not Path(forwarded.url.removeprefix("unix://")).parent.exists()
