"""Where the Docker Engine is: the one answer to whose files, memory and ports are those of its containers."""

import functools
import hashlib
import os
import socket
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from docker.errors import DockerException
from docker.tls import TLSConfig
from docker.utils import kwargs_from_env, parse_host

from harness.files import read_bytes

DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
_VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "HOME")


class EngineLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine is, by its address alone: nothing is asked of it."""

    address: str  # such as unix:///var/run/docker.sock, tcp://10.0.0.7:2376 or ssh://ada@gpubox
    named_by: str = "DOCKER_HOST"  # what to change for another one
    host: str | None = None  # the other machine that it is on; None: this machine, or `problem`
    ssh: tuple[str, ...] = ()  # arguments of `ssh` that lead to `host`; empty: not over ssh
    tls: TLSConfig | None = None
    problem: str | None = None  # why it is unknown

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, whose GPUs, processors and memory are then those of its containers."""
        return self.host is None and self.problem is None

    @property
    def has_our_files(self) -> bool:
        """Whether a path means the same to the engine as here. A forwarded TCP port of this machine proves nothing."""
        path = self.address.removeprefix("unix://")
        # Mounted into a container, the socket is of another file system than the folder that it is in.
        return self.is_here and path != self.address and not os.path.ismount(path)

    def reached_at(self, published_on: str) -> str | None:
        """The address at which this machine reaches a port published on an IP address; None: only from the engine's."""
        address = ip_address(published_on)
        if self.host is None:
            return published_on
        if address.is_unspecified:
            return self.host
        return None if address.is_loopback else published_on


def engine_location() -> EngineLocation:
    """The engine that Docker's command line would use: DOCKER_HOST, else DOCKER_CONTEXT, else the current context.

    It stays the same in a process: `docker context use` elsewhere must not lead a teardown to another engine.
    """
    return _location(tuple(os.environ.get(name, "") for name in _VARIABLES))


def is_this_machine(host: str) -> bool:
    """Whether a host name or address is this machine's own name or a loopback address."""
    if host in ("", "localhost", socket.gethostname()):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@functools.cache
def _location(_environment: tuple[str, ...]) -> EngineLocation:
    address = os.environ.get("DOCKER_HOST", "").strip()
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    context = os.environ.get("DOCKER_CONTEXT") or _current_context(folder)
    if not address and context != "default":
        return _of_context(folder / "contexts", context)
    address = address or DEFAULT_ADDRESS
    try:
        tls = kwargs_from_env().get("tls")
    except DockerException as error:
        return EngineLocation(address=address, problem=f"the Docker Engine at {address} cannot be used: {error}")
    return _at(address, "DOCKER_HOST", tls)


class _Config(msgspec.Struct):
    """What counts of Docker's config.json."""

    current: str = msgspec.field(default="", name="currentContext")


class _Endpoint(msgspec.Struct):
    host: str = msgspec.field(default="", name="Host")
    unverified: bool = msgspec.field(default=False, name="SkipTLSVerify")


class _Context(msgspec.Struct):
    """What counts of a context's meta.json."""

    endpoints: dict[str, _Endpoint] = msgspec.field(default_factory=dict, name="Endpoints")


def _current_context(folder: Path) -> str:
    try:
        return msgspec.json.decode(read_bytes(folder / "config.json"), type=_Config).current or "default"
    except (OSError, msgspec.DecodeError):  # Docker's command line warns of a damaged file, and goes on like this
        return "default"


def _of_context(folder: Path, name: str) -> EngineLocation:
    named_by = f"the Docker context '{name}'"
    digest = hashlib.sha256(name.encode()).hexdigest()
    path = folder / "meta" / digest / "meta.json"
    try:
        endpoint = msgspec.json.decode(read_bytes(path), type=_Context).endpoints["docker"]
        tls = _tls(folder / "tls" / digest / "docker", endpoint)
    except (OSError, KeyError, msgspec.DecodeError, DockerException) as error:
        why = "there is none" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        return EngineLocation(address="", named_by=named_by, problem=f"{named_by} cannot be used: {why} ({path})")
    return _at(endpoint.host or DEFAULT_ADDRESS, named_by, tls)


def _tls(folder: Path, endpoint: _Endpoint) -> TLSConfig | None:
    authority, certificate, key = (
        str(path) if (path := folder / f"{name}.pem").exists() else None for name in ("ca", "cert", "key")
    )
    if not (endpoint.unverified or authority or certificate or key):
        return None
    pair = (certificate, key) if certificate and key else None
    return TLSConfig(client_cert=pair, ca_cert=authority, verify=not endpoint.unverified)


def _at(address: str, named_by: str, tls: TLSConfig | None) -> EngineLocation:
    try:
        if address.startswith("ssh://"):
            host, ssh = _over_ssh(address)
            return EngineLocation(address=address, named_by=named_by, host=host, ssh=ssh)
        parts = urlsplit(str(parse_host(address, tls=tls is not None)))
    except (DockerException, ValueError) as error:
        problem = f"the Docker Engine at {address} cannot be used: {error}"
        return EngineLocation(address=address, named_by=named_by, problem=problem)
    here = parts.scheme not in ("http", "https") or is_this_machine(parts.hostname or "")
    return EngineLocation(address=address, named_by=named_by, host=None if here else parts.hostname, tls=tls)


def _over_ssh(address: str) -> tuple[str, tuple[str, ...]]:
    """The host, and what leads `ssh` there. Even localhost is another machine: such a port is mostly forwarded to one.

    Raises ValueError.
    """
    parts = urlsplit(address)
    # As it is written: a name of ~/.ssh/config may have capitals, which urlsplit makes small.
    written = parts.netloc.rpartition("@")[2]
    host = (parts.hostname or "") if written.startswith("[") else written.partition(":")[0]
    if not host:
        raise ValueError("it has no host; write it like ssh://USER@HOST:PORT")
    user = ("-l", parts.username) if parts.username else ()
    port = ("-p", str(parts.port)) if parts.port else ()
    return host, (*user, *port, "--", host)
