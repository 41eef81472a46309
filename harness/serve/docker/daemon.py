"""The connection to the Docker Engine, and its errors in words."""

import contextlib
import getpass
import os
import socket
from urllib.parse import urlsplit

import docker
import requests
from docker.errors import APIError, DockerException

from harness.errors import ServerError
from harness.failures.explain import State, explain
from harness.serve.docker.over_ssh import tunnel_to

DEFAULT_HOST = "unix:///var/run/docker.sock"
DOCKER_ERRORS = (DockerException, requests.RequestException)


def connect() -> docker.DockerClient:
    """A client of the Docker Engine that DOCKER_HOST names, else of this machine's. Raises ServerError."""
    where = os.environ.get("DOCKER_HOST", "")
    tunnel = tunnel_to(where) if where.startswith("ssh://") else None
    try:
        _knock()
        client = docker.from_env(timeout=60) if tunnel is None else docker.DockerClient(tunnel.url, timeout=60)
        client.ping()
    except (*DOCKER_ERRORS, OSError, ValueError) as error:
        if tunnel is not None:
            raise _cannot_reach(where, tunnel.said() or str(error)) from None
        raise _cannot_connect(error) from None
    return client


def engine_version() -> str | None:
    """The version of the Docker Engine; None when there is none that answers."""
    try:
        client = connect()
    except ServerError:
        return None
    with contextlib.closing(client):
        return str(client.version()["Version"])


def _knock() -> None:
    """Try a local engine's socket first: the SDK wraps the reason for a refusal and leaves its socket open."""
    where = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    if where.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(where.removeprefix("unix://"))


def _cannot_connect(error: Exception) -> ServerError:
    where = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    text = str(error)
    if isinstance(error, PermissionError) or "Permission denied" in text:
        return ServerError(
            f"no permission to use the Docker Engine at {where}",
            next_step=f"sudo usermod -aG docker {_user()}, then log in again (members of that group rule the host).",
        )
    if isinstance(error, FileNotFoundError):
        return ServerError(
            f"there is no Docker Engine at {where}",
            next_step="Install and start it (on Debian: sudo apt-get install docker.io), or set DOCKER_HOST. "
            "The embedded engine needs none: `container: false`.",
        )
    if "refused" in text:
        return ServerError(
            f"the Docker Engine at {where} does not run (connection refused)",
            next_step="Start it: sudo systemctl start docker.",
        )
    return ServerError(f"the Docker Engine at {where} cannot be used: {text}", next_step="Check DOCKER_HOST.")


def _cannot_reach(where: str, said: str) -> ServerError:
    return ServerError(
        f"the Docker Engine at {where} cannot be reached over ssh: {said}",
        next_step=f"`docker -H {where} version` has to work without a question: a key in the agent, a known host, "
        "Docker and the right to use it over there.",
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "$USER"


def docker_error(doing: str, error: Exception) -> ServerError:
    """An error of the Docker Engine while `doing`, explained where the table of failures knows it."""
    text = str(error.explanation or error) if isinstance(error, APIError) else str(error)
    failure = explain("", State(error=text))
    if failure is not None:
        return ServerError(f"{doing}: {failure.cause}", next_step=f"To solve it: {failure.fix}.", detail=text)
    if isinstance(error, requests.RequestException) and not isinstance(error, APIError):
        return ServerError(f"{doing}: the Docker Engine gave no answer", next_step="Is it running?", detail=text)
    return ServerError(f"{doing}: {text}", next_step="This is what the Docker Engine said.")


def engine_host() -> str | None:
    """The host of an engine on another machine; None for this machine's."""
    parts = urlsplit(os.environ.get("DOCKER_HOST", ""))
    local = parts.hostname in (None, "localhost", "127.0.0.1", "::1")
    return None if parts.scheme not in ("tcp", "ssh", "http", "https") or local else parts.hostname


def engine_sees_these_files() -> bool:
    """Whether a path means the same to the engine as here: not on another machine, nor where only its socket is."""
    where = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    # Mounted into a container, the socket is of another file system than the folder that it is in.
    return engine_host() is None and not os.path.ismount(where.removeprefix("unix://"))
