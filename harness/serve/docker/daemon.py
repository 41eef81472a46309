"""The connection to the Docker Engine, and its errors in words."""

import contextlib
import getpass
import socket

import docker
import requests
from docker.errors import APIError, DockerException

from harness.errors import ServerError
from harness.failures.explain import State, explain
from harness.serve.docker.location import EngineLocation, engine_location
from harness.serve.docker.over_ssh import engine_socket

DOCKER_ERRORS = (DockerException, requests.RequestException)


def connect() -> docker.DockerClient:
    """A client of the Docker Engine that `engine_location` finds. Raises ServerError."""
    location = engine_location()
    if location.problem is not None:
        raise ServerError(
            location.problem, next_step=f"Check {location.named_by}; `docker context ls` lists what Docker can use."
        )
    forwarded = engine_socket(location) if location.ssh else None
    address = location.address if forwarded is None else forwarded.url
    try:
        _knock(address)
        client = docker.DockerClient(base_url=address, tls=location.tls or False, timeout=60)
        client.ping()
    except (*DOCKER_ERRORS, OSError, ValueError) as error:
        if forwarded is not None:
            raise _cannot_reach(location, forwarded.said() or str(error)) from None
        raise _cannot_connect(location, error) from None
    return client


def engine_version() -> str | None:
    """The version of the Docker Engine; None when there is none that answers."""
    try:
        client = connect()
    except ServerError:
        return None
    with contextlib.closing(client):
        return str(client.version()["Version"])


def _knock(address: str) -> None:
    """Try a local engine's socket first: the SDK wraps the reason for a refusal and leaves its socket open."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.removeprefix("unix://"))


def _cannot_connect(location: EngineLocation, error: Exception) -> ServerError:
    where, text = location.address, str(error)
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
            next_step="Start it: sudo systemctl start docker."
            if where.startswith("unix://")
            else f"Start it there, or check {location.named_by}.",
        )
    return ServerError(f"the Docker Engine at {where} cannot be used: {text}", next_step=f"Check {location.named_by}.")


def _cannot_reach(location: EngineLocation, said: str) -> ServerError:
    return ServerError(
        f"the Docker Engine at {location.address} cannot be reached over ssh: {said}",
        next_step=f"`docker -H {location.address} version` has to work without a question: a key in the agent, a known "
        "host, Docker and the right to use it over there.",
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
