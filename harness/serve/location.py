"""The location of the Docker Engine, and the connection to an engine behind ssh.

As with Docker's own command line, the user's `ssh` connects, with all of its settings, keys and agent. The SDK supports
ssh:// only with a second implementation of SSH (paramiko), which reads little of ~/.ssh/config.
"""

import atexit
import contextlib
import functools
import os
import select
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import msgspec
from docker.context import ContextAPI
from docker.errors import DockerException
from docker.tls import TLSConfig
from docker.utils import kwargs_from_env, parse_host

from harness import process
from harness.errors import ServerError
from harness.process import free_port

DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
_DOCKER_VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "HOME")


class EngineLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The location of an engine, from its address alone, without a connection."""

    address: str  # such as unix:///var/run/docker.sock, tcp://10.0.0.7:2376 or ssh://ada@gpubox
    named_by: str = "DOCKER_HOST"  # the setting to change for another engine
    host: str | None = None  # the other machine that it is on; None: this machine, or `problem`
    ssh: tuple[str, ...] = ()  # arguments of `ssh` to reach `host`; empty: not over ssh
    tls: TLSConfig | None = None
    problem: str | None = None  # why the location is unknown

    @property
    def is_here(self) -> bool:
        """Whether the engine's containers use this machine's GPUs, processors and memory."""
        return self.host is None and self.problem is None

    @property
    def shares_files(self) -> bool:
        """Whether a path is the same file for the engine as here; not known for a TCP port, which may be forwarded."""
        path = self.address.removeprefix("unix://")
        # A socket that is mounted into this container comes from another file system than its folder.
        return self.is_here and path != self.address and not os.path.ismount(path)


def engine_location() -> EngineLocation:
    """Return the engine of Docker's command line: DOCKER_HOST, else DOCKER_CONTEXT, else the current context.

    It stays the same in a process: `docker context use` elsewhere must not lead a teardown to another engine.
    """
    return _find_location(tuple(os.environ.get(name, "") for name in _DOCKER_VARIABLES))


def is_this_machine(host: str) -> bool:
    """Check that a host name or address is this machine's own name or a loopback address."""
    if host in ("", "localhost", socket.gethostname()):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@functools.cache
def _find_location(_environment: tuple[str, ...]) -> EngineLocation:
    address = os.environ.get("DOCKER_HOST", "").strip()
    if not address:
        try:
            context = ContextAPI.get_context(os.environ.get("DOCKER_CONTEXT"))
        except Exception as error:  # the SDK raises a plain Exception for a damaged file
            return EngineLocation(address="", named_by="the Docker context", problem=str(error))
        if context is None:
            named_by = f"the Docker context '{os.environ.get('DOCKER_CONTEXT')}'"
            problem = f"{named_by} does not exist next to Docker's config.json (it may contain just {{}})"
            return EngineLocation(address="", named_by=named_by, problem=problem)
        if context.name != "default":
            return _from_address(
                context.Host or DEFAULT_ADDRESS, f"the Docker context '{context.name}'", context.TLSConfig
            )
    address = address or DEFAULT_ADDRESS
    try:
        tls = kwargs_from_env().get("tls")
    except DockerException as error:
        return EngineLocation(address=address, problem=f"the Docker Engine at {address} cannot be used: {error}")
    return _from_address(address, "DOCKER_HOST", tls)


def _from_address(address: str, named_by: str, tls: TLSConfig | None) -> EngineLocation:
    try:
        if address.startswith("ssh://"):
            host, ssh = _parse_ssh_address(address)
            return EngineLocation(address=address, named_by=named_by, host=host, ssh=ssh)
        parts = urlsplit(str(parse_host(address, tls=tls is not None)))
    except (DockerException, ValueError) as error:
        problem = f"the Docker Engine at {address} cannot be used: {error}"
        return EngineLocation(address=address, named_by=named_by, problem=problem)
    here = parts.scheme not in ("http", "https") or is_this_machine(parts.hostname or "")
    return EngineLocation(address=address, named_by=named_by, host=None if here else parts.hostname, tls=tls)


def _parse_ssh_address(address: str) -> tuple[str, tuple[str, ...]]:
    """Return the host, and the arguments of `ssh`. Even localhost is another machine: such a port is mostly forwarded.

    Raises ValueError.
    """
    parts = urlsplit(address)
    # A name of ~/.ssh/config may have capitals, which `parts.hostname` has not.
    address = parts.netloc.rpartition("@")[2]
    host = (parts.hostname or "") if address.startswith("[") else address.partition(":")[0]
    if not host:
        raise ValueError("it has no host; write it like ssh://USER@HOST:PORT")
    user = ("-l", parts.username) if parts.username else ()
    port = ("-p", str(parts.port)) if parts.port else ()
    return host, (*user, *port, "--", host)


MAX_CONNECT_S = 30
_MAX_STOP_S = 5.0
_MAX_STDERR_BYTES = 4096
_FORBIDDEN_WORDS = "administratively prohibited"  # OpenSSH's text for a reason of RFC 4254, section 5.1
_TUNNEL_OPTIONS = (
    # The tunnel ends with this process: a shared connection would keep the port open.
    "-o", "ControlMaster=no", "-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes",
    # A silent connection is closed after 15 s.
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
    # Print a line as soon as the port is open.
    "-o", "PermitLocalCommand=yes", "-o", "LocalCommand=echo open",
)  # fmt: skip


def open_engine_socket(location: EngineLocation) -> "SshSocket":
    """Return the socket of an engine behind ssh, one for each engine in a process. Raises ServerError."""
    return _open_socket(tuple(engine_command(location)))


@functools.cache
def _open_socket(command: tuple[str, ...]) -> "SshSocket":
    return SshSocket(list(command))


def engine_command(location: EngineLocation) -> list[str]:
    """Return the command that connects its standard input and output to the engine. Raises ServerError."""
    remote = ["docker", "system", "dial-stdio"]
    path = urlsplit(location.address).path
    if path not in ("", "/"):
        remote[1:1] = ["--host", f"unix://{path}"]
    return [*_ssh_command(location), shlex.join(remote)]


@contextlib.contextmanager
def open_tunnel(location: EngineLocation, address: str, port: int) -> Iterator[tuple[int, Callable[[], str | None]]]:
    """Open a port of 127.0.0.1 that leads to `address` and `port` of the engine's machine.

    Yield the port, and a function that returns the problem of a broken tunnel, None while it works. The `ssh` process
    ends with the harness, also if that is killed. Raises ServerError if the tunnel cannot be opened.
    """
    with tempfile.TemporaryFile() as stderr:
        local_port, child = _start_tunnel(location, f"[{address}]:{port}", stderr)
        try:
            yield local_port, lambda: _find_tunnel_problem(location, child, stderr)
        finally:
            process.stop(child)


def _ssh_command(location: EngineLocation, *options: str) -> list[str]:
    if shutil.which("ssh") is None:
        raise ServerError(
            f"the Docker Engine is at {location.address}, and there is no program `ssh` on this machine",
            next_step=f"Install it (on Debian: sudo apt-get install openssh-client), or change {location.named_by}.",
        )
    *where, end, host = location.ssh
    return ["ssh", *where, "-o", f"ConnectTimeout={MAX_CONNECT_S}", "-T", *options, end, host]


def _start_tunnel(location: EngineLocation, target: str, stderr: IO[bytes]) -> tuple[int, subprocess.Popen[bytes]]:
    """Start an `ssh` that listens at a free local port; return both."""
    local_port = free_port()
    command = _ssh_command(location, *_TUNNEL_OPTIONS, "-n", "-N", "-L", f"127.0.0.1:{local_port}:{target}")
    child = process.start(command, stdout=subprocess.PIPE, stderr=stderr)
    assert child.stdout is not None
    try:
        with child.stdout:
            is_open = select.select([child.stdout], [], [], 2 * MAX_CONNECT_S)[0] and child.stdout.readline()
        if is_open:
            return local_port, child
    except BaseException:
        process.stop(child)
        raise
    process.stop(child)
    raise ServerError(
        f"no ssh tunnel to {location.host} can be opened: {_read_last_line(stderr) or 'ssh gives no answer'}",
        next_step=f"Try it: {shlex.join(['ssh', *location.ssh])}. Without a tunnel: set the server's variable "
        "`publish` to an address of that host, which opens the port to its network.",
        detail=_read_tail(stderr),
    )


def _find_tunnel_problem(location: EngineLocation, child: subprocess.Popen[bytes], stderr: IO[bytes]) -> str | None:
    code = child.poll()
    if code is not None:
        reason = _read_last_line(stderr) or "ssh did not say why"
        return f"the ssh tunnel to {location.host} ended (exit code {code}): {reason}"
    if _FORBIDDEN_WORDS in _read_tail(stderr):
        return f"the ssh server of {location.host} forbids tunnels (AllowTcpForwarding, PermitOpen in its sshd_config)"
    return None


def _read_tail(stderr: IO[bytes]) -> str:
    """Return the last bytes that ssh printed on its standard error."""
    start = max(0, os.fstat(stderr.fileno()).st_size - _MAX_STDERR_BYTES)
    return os.pread(stderr.fileno(), _MAX_STDERR_BYTES, start).decode("utf-8", "replace")


def _read_last_line(stderr: IO[bytes]) -> str:
    lines = map(str.strip, reversed(_read_tail(stderr).splitlines()))
    return next(filter(None, lines), "")


class SshSocket:
    """A Unix socket in a private folder. Each connection to it is the input and output of a new `command`."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._folder = Path(tempfile.mkdtemp(prefix="amd-llm-load-ssh-"))  # only this user can read it
        self._stderr = (self._folder / "ssh.log").open("ab+")
        self._children: list[subprocess.Popen[bytes]] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._folder / "docker.sock"))
        self._socket.listen()
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._keep_accepting, name="engine over ssh", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/docker.sock"

    def last_error(self) -> str:
        """Return the last line that ssh printed on its standard error; empty without one."""
        return _read_last_line(self._stderr)

    def close(self) -> None:
        """Stop to accept connections, and end the commands."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`; closing alone does not
        self._thread.join(_MAX_STOP_S)
        self._socket.close()
        for child in self._children:
            child.terminate()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_MAX_STOP_S)
        self._stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep_accepting(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                # In its own session: after Ctrl-C, the harness still needs it to remove its containers.
                child = subprocess.Popen(
                    self._command,
                    stdin=connection.fileno(),
                    stdout=connection.fileno(),
                    stderr=self._stderr,
                    start_new_session=True,
                )
            self._children = [*(other for other in self._children if other.poll() is None), child]
