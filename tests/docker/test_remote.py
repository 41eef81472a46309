"""An engine on another machine: this machine's own, behind a real sshd that the user's ssh knows as `GpuBox`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import psutil
import pytest

from harness.errors import ServerError
from harness.files import ROOT
from harness.process import free_port
from harness.reasons import sentences
from harness.rundir.manifest import read_run
from harness.serve import location
from harness.serve.location import engine_location
from tests.command import going, harness, only_run, until, write
from tests.docker.conftest import Served, one_at_a_time, remains
from tests.docker.test_sweep import OWNER
from tests.faults import fault

SSHD_PROGRAM = "/usr/sbin/sshd"  # which wants its whole path
SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
"""
SSH = """
Host GpuBox
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking accept-new
  # A connection that others share must not keep the tunnel's port open.
  ControlMaster auto
  ControlPath {folder}/shared
  ControlPersist no
"""


class Machine:
    """What is behind ssh."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port = port = free_port()
        for name in ("host", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "sshd_config").write_text(SSHD.format(port=port, folder=folder) + "\n".join(options))
        (folder / "config").write_text(SSH.format(port=port, folder=folder))
        # ssh reads the configuration of the user's entry in /etc/passwd, whatever HOME is.
        (folder / "bin").mkdir()
        (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/config "$@"\n')
        (folder / "bin/ssh").chmod(0o755)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # the service's start would make it
        self._log = (folder / "sshd.log").open("wb")
        self.sshd = subprocess.Popen(
            [SSHD_PROGRAM, "-D", "-e", "-f", folder / "sshd_config"], stderr=self._log, start_new_session=True
        )
        until(lambda: b"Server listening" in (folder / "sshd.log").read_bytes())

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "DOCKER_HOST": "ssh://GpuBox"}

    def clients(self, word: str = "") -> list[psutil.Process]:
        """The living ssh programs that lead here, the oldest first."""
        found = []
        for process in psutil.process_iter(["cmdline", "status", "create_time"]):
            line = " ".join(process.info["cmdline"] or [])
            if f"-F {self.folder}/config" in line and word in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return sorted(found, key=lambda process: process.info["create_time"])

    def session_of(self, client: psutil.Process) -> psutil.Process:
        """The other end of an ssh program's connection."""
        (port,) = [one.laddr.port for one in client.net_connections() if one.raddr and one.raddr.port == self.port]
        return next(
            process
            for process in psutil.Process(self.sshd.pid).children(recursive=True)
            if any(one.raddr and one.raddr.port == port for one in process.net_connections())
        )

    def close(self) -> None:
        for process in self.clients():
            process.kill()
        self.sshd.terminate()
        self.sshd.wait(10)
        self._log.close()


@pytest.fixture
def machine(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    client: docker.DockerClient,
) -> Iterator[Machine]:
    """DOCKER_HOST names it; `client` goes to the engine without ssh. The parameters are options of its sshd."""
    if not Path(SSHD_PROGRAM).exists():
        reason = "there is no sshd (Debian: apt install openssh-server)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    found = Machine(tmp_path_factory.mktemp("ssh"), *getattr(request, "param", ()))
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


def ended(processes: Callable[[], list[psutil.Process]]) -> None:
    with contextlib.suppress(AssertionError):
        until(lambda: processes() == [])
    assert [" ".join(process.cmdline()) for process in processes()] == []


def test_a_run_on_another_machine(machine: Machine, client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    """The port stays on that machine's loopback, and the load goes through a tunnel."""
    server = {"template": "simulated", "variables": {"image": image, "preset": "instant"}}
    done = harness("run", str(write(tmp_path, servers={"one": server})), "--runs", "runs", cwd=tmp_path)
    assert done.code == 0, done.err
    run = read_run(only_run(tmp_path / "runs"))
    (cell,) = run.cells
    assert (run.status, cell.served_by.over_ssh, cell.problems) == ("valid", True, [])
    assert '"127.0.0.1:0:8000"' in next(only_run(tmp_path / "runs").glob("compose/*")).read_text()
    assert "one: the load went through an ssh tunnel (over_ssh)" in " ".join(done.out.split())
    assert remains(client, run.id) == []
    ended(machine.clients)


@fault(
    "network",
    "the ssh tunnel to a remote Docker Engine breaks",
    seen="the server could not be reached any more: the ssh tunnel to GpuBox ended",
    code=3,
)
def test_a_tunnel_that_ends_in_a_run(machine: Machine, image: str, tmp_path: Path) -> None:
    load = {"user": "batch", "batch_size": 2, "requests": 5000, "output_tokens": 50}
    server = {"template": "simulated", "variables": {"image": image}}
    path = write(tmp_path, servers={"one": server}, loads={"burst": load})
    with going("run", str(path), "--runs", "runs", cwd=tmp_path) as command:
        until(lambda: any(path.stat().st_size for path in tmp_path.glob("runs/*/requests.jsonl")))
        (tunnel,) = machine.clients(" -N ")
        # The far end goes, as with a network that breaks.
        machine.session_of(tunnel).kill()
        done = command.end()
        command.nothing_left()
    assert done.code == 3, done.err
    (cell,) = read_run(only_run(tmp_path / "runs")).cells
    assert sentences(cell.problems)[0].startswith(
        "the server could not be reached any more: the ssh tunnel to GpuBox ended (exit code 255): "  # then ssh's words
    ), cell.problems
    assert cell.served_by.exit_code is None
    assert "the server died during the load" not in done.out


@pytest.mark.parametrize("machine", [["AllowTcpForwarding no"]], indirect=True)
def test_a_machine_that_forbids_tunnels(served: Served, machine: Machine) -> None:
    with pytest.raises(ServerError, match="the ssh server of GpuBox forbids tunnels"), served(timeout_s=60):
        pass


def test_a_tunnel_that_cannot_be_opened(machine: Machine) -> None:
    (machine.folder / "config").write_text("Host GpuBox\n  HostName 127.0.0.1\n  Port 1\n")
    with (
        pytest.raises(ServerError, match="no ssh tunnel to GpuBox can be opened: .*Connection refused") as caught,
        location.open_tunnel(engine_location(), "127.0.0.1", 80),
    ):
        pass
    assert "Try it: ssh -- GpuBox." in caught.value.next_step


@fault("harness", "kill -9 with an ssh tunnel open", seen="the tunnel ends with the harness")
@one_at_a_time("leftovers")
def test_no_ssh_outlives_the_harness(machine: Machine, client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, image, str(tmp_path), tmp_path.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        assert len(machine.clients(" -N ")) == 1
        process.kill()
        process.wait(30)
        ended(machine.clients)
    done = harness("clean", cwd=tmp_path)
    assert f"removed container amd-llm-load-{tmp_path.name}-c-server" in done.out
    assert remains(client, tmp_path.name) == []


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
            assert engine_location().address == expected
            assert docker_cli("context", "inspect", "--format", "{{.Endpoints.docker.Host}}") == expected

    check_address("unix:///var/run/docker.sock", DOCKER_CONFIG=str(tmp_path / "none"))
    docker_cli("context", "create", "remote", "--docker", "host=ssh://ada@gpubox")
    docker_cli("context", "create", "socket", "--docker", "host=unix:///run/user/1000/docker.sock")
    docker_cli("context", "use", "remote")
    check_address("ssh://ada@gpubox")
    check_address("unix:///run/user/1000/docker.sock", DOCKER_CONTEXT="socket")
    check_address("unix:///var/run/docker.sock", DOCKER_CONTEXT="default")
    check_address("tcp://10.0.0.8:2375", DOCKER_CONTEXT="socket", DOCKER_HOST="tcp://10.0.0.8:2375")
