"""The Docker Engine: the connection to it, its errors in words, its facts, its images, and leftovers of killed runs."""

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.images import Image
from docker.utils import parse_repository_tag
from msgspec import structs

from harness.errors import ServerError
from harness.failures.explain import ExitState, explain
from harness.machine.doctor import DockerEngine
from harness.process import owner, owner_is_gone
from harness.serve.location import EngineLocation, engine_location, open_engine_socket

LABEL = "amd-llm-load"
RUN_LABEL = "amd-llm-load.run"
CELL_LABEL = "amd-llm-load.cell"
CACHE_LABEL = "amd-llm-load.cache"  # volumes that are kept between runs


def make_name(run_id: str, cell_id: str) -> str:
    """How the names of a cell's containers and of its network begin."""
    # A stage or probe is LOAD@USERS, and Docker's names have no @.
    return f"amd-llm-load-{run_id}-{cell_id.replace('@', '.')}"


def make_labels(run_id: str, cell_id: str) -> dict[str, str]:
    """The labels of what this process starts for a cell."""
    return {LABEL: "1", RUN_LABEL: run_id, CELL_LABEL: cell_id, **owner()}


DOCKER_ERRORS = (DockerException, requests.RequestException)


def connect() -> docker.DockerClient:
    """A client of the Docker Engine that `engine_location` finds. Raises ServerError."""
    location = engine_location()
    if location.problem is not None:
        raise ServerError(
            location.problem, next_step=f"Check {location.named_by}; `docker context ls` lists what Docker can use."
        )
    forwarded = open_engine_socket(location) if location.ssh else None
    address = location.address if forwarded is None else forwarded.url
    try:
        _check_socket(address)
        client = docker.DockerClient(base_url=address, tls=location.tls or False, timeout=60)
        client.ping()
    except (*DOCKER_ERRORS, OSError, ValueError) as error:
        if forwarded is not None:
            raise ServerError(
                f"the Docker Engine at {location.address} cannot be reached over ssh: {forwarded.said() or error}",
                next_step=f"`docker -H {location.address} version` has to work without a question: a key in the agent, "
                "a known host, Docker and the right to use it over there.",
            ) from None
        raise _connection_error(location, error) from None
    return client


def get_engine_version() -> str | None:
    """The version of the Docker Engine; None when no engine answers."""
    try:
        client = connect()
    except ServerError:
        return None
    with contextlib.closing(client):
        return str(client.version()["Version"])


def _check_socket(address: str) -> None:
    """Try a local engine's socket first: the SDK wraps the reason for a refusal and leaves its socket open."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.removeprefix("unix://"))


def _connection_error(location: EngineLocation, error: Exception) -> ServerError:
    where, text = location.address, str(error)
    if isinstance(error, PermissionError) or "Permission denied" in text:
        what = f"no permission to use the Docker Engine at {where}"
        step = "sudo usermod -aG docker $USER, then log in again (members of that group rule the host)."
    elif isinstance(error, FileNotFoundError):
        what = f"there is no Docker Engine at {where}"
        step = (
            "Install and start it (on Debian: sudo apt-get install docker.io), or set DOCKER_HOST. "
            "The embedded engine needs none: `container: false`."
        )
    elif "refused" in text:
        here = where.startswith("unix://")
        what = f"the Docker Engine at {where} does not run (connection refused)"
        step = "Start it: sudo systemctl start docker." if here else f"Start it there, or check {location.named_by}."
    else:
        what, step = f"the Docker Engine at {where} cannot be used: {text}", f"Check {location.named_by}."
    return ServerError(what, next_step=step)


def make_docker_error(doing: str, error: Exception) -> ServerError:
    """An error of the Docker Engine while `doing`, explained where the table of failures knows it."""
    text = str(error.explanation or error) if isinstance(error, APIError) else str(error)
    failure = explain("", ExitState(error=text))
    if failure is not None:
        return ServerError(f"{doing}: {failure.cause}", next_step=f"To solve it: {failure.fix}.", detail=text)
    if isinstance(error, requests.RequestException) and not isinstance(error, APIError):
        return ServerError(f"{doing}: the Docker Engine gave no answer", next_step="Is it running?", detail=text)
    return ServerError(f"{doing}: {text}", next_step="This is what the Docker Engine said.")


def get_engine_facts() -> DockerEngine:
    """The facts of the engine that the environment names. Never raises: what is wrong with it is one of the facts."""
    location = engine_location()
    known = DockerEngine(host=location.host, named_by=location.named_by)
    try:
        client = connect()
    except ServerError as error:
        return structs.replace(known, problem=error.what, remedy=error.next_step.rstrip("."))
    with contextlib.closing(client):
        try:
            return _read_facts(client, known, location)
        except DOCKER_ERRORS as error:
            return structs.replace(known, problem=f"the Docker Engine does not tell about itself: {error}")


def _read_facts(client: docker.DockerClient, known: DockerEngine, location: EngineLocation) -> DockerEngine:
    info = client.info()
    folder = _find_image_folder(info)
    free_bytes = None
    with contextlib.suppress(OSError):  # such as Docker Desktop's, which is not on this machine
        free_bytes = shutil.disk_usage(folder).free if location.shares_files and folder else None
    return structs.replace(
        known,
        rootless=any("rootless" in option for option in info.get("SecurityOptions") or []),
        desktop="Docker Desktop" in (info.get("OperatingSystem") or ""),
        image_folder=folder,
        free_bytes=free_bytes,
        stale=[
            f"{kind} {one.name}"
            for kind, one, its_labels in _list_objects(client)
            if kind != "volume" and owner_is_gone(its_labels)
        ],
    )


def _find_image_folder(info: dict[str, Any]) -> str | None:
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or [] if len(pair) == 2}
    if status.get("driver-type", "").startswith("io.containerd.snapshotter"):  # which keeps the images itself
        return "/var/lib/containerd"
    return info.get("DockerRootDir")


def _list_objects(client: docker.DockerClient, run: str | None = None) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Our containers, then networks, then volumes, of all runs or of one: kind, object and labels."""
    ours: dict[str, Any] = {"label": [f"{LABEL}=1", *([f"{RUN_LABEL}={run}"] if run is not None else [])]}
    for container in client.containers.list(all=True, filters=ours, ignore_removed=True):
        yield "container", container, container.labels
    for network in client.networks.list(filters=ours):
        yield "network", network, network.attrs.get("Labels") or {}
    for volume in client.volumes.list(filters=ours):
        yield "volume", volume, volume.attrs.get("Labels") or {}


OWN_IMAGE = "amd-llm-load"  # built on the spot, never pulled
_PROGRESS_EVERY_S = 0.5


def ensure_image(client: docker.DockerClient, name: str, on_progress: Callable[[str], None]) -> Image:
    """The image, pulled when the engine does not have it. Raises ServerError: offline, unknown, not allowed."""
    try:
        with contextlib.suppress(ImageNotFound):
            return client.images.get(name)
        repository, tag = parse_repository_tag(name)
        if repository == OWN_IMAGE:
            raise ServerError(
                f"the project's image {name} was not built yet",
                next_step="Build it: make image (in the project's folder).",
            )
        _pull_image(client, name, repository, tag or "latest", on_progress)
        return client.images.get(name)
    except DOCKER_ERRORS as error:
        raise make_docker_error(f"the image {name} is not on this machine and cannot be pulled", error) from None


def get_digest(image: Image) -> str:
    """The digest in the registry (name@sha256:...) where there is one, else the image's id."""
    digests: list[str] = image.attrs.get("RepoDigests") or []
    return digests[0] if digests else str(image.id)


def get_local_digests(names: Iterable[str]) -> dict[str, str]:
    """The digests of those images that the engine has; empty, too, when it does not answer."""
    found = {}
    with contextlib.suppress(ServerError, *DOCKER_ERRORS), contextlib.closing(connect()) as client:
        for name in names:
            with contextlib.suppress(ImageNotFound):
                found[name] = get_digest(client.images.get(name))
    return found


def _pull_image(
    client: docker.DockerClient, name: str, repository: str, tag: str, on_progress: Callable[[str], None]
) -> None:
    on_progress(f"pulling {name}")
    layers: dict[str, tuple[int, int]] = {}
    shown = time.monotonic()
    for event in client.api.pull(repository, tag=tag, stream=True, decode=True):
        if "error" in event:
            raise DockerException(str(event["error"]))
        detail = event.get("progressDetail") or {}
        if event.get("status") == "Downloading" and detail.get("total"):
            layers[event["id"]] = (int(detail["current"]), int(detail["total"]))
        if layers and time.monotonic() - shown > _PROGRESS_EVERY_S:
            shown = time.monotonic()
            got, total = (sum(layer[i] for layer in layers.values()) / 1e9 for i in (0, 1))
            on_progress(f"pulling {name}: {got:.2f} of {total:.2f} GB")


def remove_leftovers(
    client: docker.DockerClient, run: str | None = None, *, everything: bool = False, caches: bool = False
) -> list[str]:
    """Remove our containers, networks and volumes; return what was removed, in words.

    Without `everything`, only objects of harness processes that have ended. With `run`, only objects of that run.
    Cache volumes stay without `caches`, and while a harness that may live has a container or a network here: it may
    need them for its next server.
    """
    removed = []
    in_use = False
    try:
        for kind, one, its_labels in _list_objects(client, run):
            if kind == "volume" and CACHE_LABEL in its_labels:
                goes = caches and not in_use
            else:
                goes = everything or owner_is_gone(its_labels)
                in_use |= kind != "volume" and not goes
            if goes and _remove_unless_gone(
                partial(one.remove, v=True, force=True) if kind == "container" else one.remove
            ):
                removed.append(f"{kind} {one.name}")
    except DOCKER_ERRORS as error:
        raise make_docker_error("not everything could be removed", error) from None
    return removed


def _remove_unless_gone(remove: Callable[[], object]) -> bool:
    """Remove one thing; false for what somebody else removes or still uses."""
    try:
        remove()
    except NotFound:
        return False
    except APIError as error:
        if error.status_code == 409:
            return False
        raise
    return True
