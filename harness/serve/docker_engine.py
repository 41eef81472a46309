"""The Docker Engine: the connection to it, its errors and facts, its images, and the leftovers of killed runs."""

import contextlib
import functools
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import docker
import requests
from docker.context import ContextAPI
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.images import Image
from docker.utils import parse_repository_tag

from harness.base.errors import ImageError, ServerError, reason_of
from harness.base.process import owner_is_gone, owner_labels
from harness.failures.diagnosis import explain_api_error
from harness.machine.inspection import DockerEngine

LABEL = "amd-llm-load"
RUN_LABEL = "amd-llm-load.run"
CELL_LABEL = "amd-llm-load.cell"
CACHE_LABEL = "amd-llm-load.cache"  # of volumes that are kept between runs
DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
_DOCKER_VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "HOME")
OWN_IMAGE = "amd-llm-load"  # built from the Dockerfile, never pulled
_PROGRESS_EVERY_S = 0.5
ANSWER_S = 10.0  # for the engine's answers to questions that take it milliseconds
REQUEST_S = 60  # for each of its other answers, such as that a container has started
_SILENT_S = 60.0  # an engine that did not answer is not asked again for so long: each wait would be another ANSWER_S
DOCKER_ERRORS = (DockerException, requests.RequestException)
_ENGINE_ADVICE = (
    "Install and start it (on Debian: sudo apt-get install docker.io), and get the right to use it (sudo usermod -aG "
    "docker $USER, then log in again; members of that group rule the host), or set DOCKER_HOST. The embedded engine "
    "needs none: `container: false`."
)


T = TypeVar("T")
_silent_since_s: dict[str, float] = {}  # by address


def make_name(run_id: str, cell_id: str) -> str:
    """Return the prefix of the names of a cell's containers, and the name of its network."""
    # A stage is LOAD@USERS, but Docker's names cannot contain @.
    return f"amd-llm-load-{run_id}-{cell_id.replace('@', '.')}"


def make_labels(run_id: str, cell_id: str) -> dict[str, str]:
    """Return the labels of all containers, networks and volumes that this process creates for a cell."""
    return {LABEL: "1", RUN_LABEL: run_id, CELL_LABEL: cell_id, **owner_labels()}


def engine_address() -> str:
    """Return the socket of this machine's Docker Engine: DOCKER_HOST, else DOCKER_CONTEXT, else the current context.

    It stays the same in a process: `docker context use` elsewhere must not lead a teardown to another engine. Raises
    ServerError for an engine on another machine, and for settings of Docker that cannot be read.
    """
    return _find_address(tuple(os.environ.get(name, "") for name in _DOCKER_VARIABLES))


@functools.cache
def _find_address(_environment: tuple[str, ...]) -> str:
    next_step = "`docker context ls` lists what Docker can use."
    address = os.environ.get("DOCKER_HOST", "").strip()
    if not address:
        name = os.environ.get("DOCKER_CONTEXT")
        try:
            context = ContextAPI.get_context(name)
        except Exception as error:  # the SDK raises a plain Exception for a damaged file
            raise ServerError(f"the Docker context cannot be read: {error}", next_step=next_step) from None
        if context is None:
            what = f"the Docker context '{name}' does not exist next to Docker's config.json (it may contain just {{}})"
            raise ServerError(what, next_step=next_step)
        if context.name != "default":
            address = context.Host or ""
    address = address or DEFAULT_ADDRESS
    if not address.startswith("unix://"):
        raise ServerError(
            f"the Docker Engine at {address} cannot be used: it must be at a Unix socket of this machine",
            next_step="Run the harness on the engine's machine, or start the server there and load it from here with "
            "--url.",
        )
    return address


def engine_shares_files() -> bool:
    """Whether a path is the same file for the engine as here: not where only its socket is mounted into a container."""
    try:
        return not os.path.ismount(engine_address().removeprefix("unix://"))
    except ServerError:
        return False


def connect() -> docker.DockerClient:
    """Return a client of this machine's Docker Engine. Raises ServerError."""
    address = engine_address()

    def open_client() -> docker.DockerClient:
        # First: the SDK hides the reason for a refusal and leaves its socket open.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.removeprefix("unix://"))
        client = docker.DockerClient(base_url=address, timeout=REQUEST_S)
        client.ping()
        client.api.containers(limit=1)  # an engine whose lock is held still answers a ping
        return client

    try:
        return ask_engine(open_client)
    except (*DOCKER_ERRORS, OSError, ValueError) as error:
        what = f"the Docker Engine at {address} cannot be used: {reason_of(error)}"
        raise ServerError(what, next_step=_ENGINE_ADVICE) from None


def ask_engine(ask: Callable[[], T]) -> T:
    """Return what `ask` returns, or raise its exception. Raises ServerError after ANSWER_S without an answer.

    The SDK's timeout is that of each read, so a thread asks. An engine that was silent is not asked again for a while.
    """
    address = engine_address()
    results: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((ask(),))
        except Exception as error:
            results.put(error)

    silent_s = time.monotonic() - _silent_since_s.get(address, -_SILENT_S)
    if silent_s >= _SILENT_S:
        threading.Thread(target=work, name="asking the Docker Engine", daemon=True).start()
        with contextlib.suppress(queue.Empty):
            result = results.get(timeout=ANSWER_S)
            if isinstance(result, TypeError | AttributeError | LookupError):  # of the SDK
                raise ServerError(
                    f"the Docker Engine at {address} cannot be used: what answers there is no Docker Engine",
                    next_step=_ENGINE_ADVICE,
                )
            if isinstance(result, Exception):
                raise result
            return result[0]
        _silent_since_s[address] = time.monotonic()
    raise ServerError(
        f"the Docker Engine at {address} cannot be used: it did not answer within {ANSWER_S:g} s",
        next_step="Look at it (`systemctl status docker`, `journalctl -u docker`), and restart it if it hangs (sudo "
        "systemctl restart docker), or set DOCKER_HOST.",
    )


def get_engine_version() -> str | None:
    """Return the version of the Docker Engine; None without an engine."""
    try:
        client = connect()
    except ServerError:
        return None
    with contextlib.closing(client), contextlib.suppress(ServerError, *DOCKER_ERRORS):
        return str(ask_engine(client.version)["Version"])
    return None


def make_docker_error(what: str, error: Exception) -> ServerError:
    """Return an error of the Docker Engine, with the cause and the fix if the table of failures knows it."""
    text = str(error.explanation or error) if isinstance(error, APIError) else str(error)
    failure = explain_api_error(text)
    if failure is not None:
        return ServerError(f"{what}: {failure.cause}", next_step=f"To solve it: {failure.fix}.", detail=text)
    return ServerError(f"{what}: {text}", next_step="Check that the Docker Engine runs; this is its message.")


def get_engine_facts() -> DockerEngine:
    """Return the facts of the Docker Engine. Never raises: a problem is one of the facts."""
    try:
        client = connect()
    except ServerError as error:
        return DockerEngine(problem=error.what, remedy=error.next_step.rstrip("."))
    with contextlib.closing(client):
        try:
            info, objects = ask_engine(lambda: (client.info(), list(_list_objects(client))))
            leftovers = [
                f"{kind} {item.name}" for kind, item, labels in objects if kind != "volume" and owner_is_gone(labels)
            ]
        except ServerError as error:
            return DockerEngine(problem=error.what, remedy=error.next_step.rstrip("."))
        except DOCKER_ERRORS as error:
            return DockerEngine(problem=f"the Docker Engine does not tell about itself: {error}")
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or [] if len(pair) == 2}
    # The snapshotter of containerd keeps the images itself.
    is_containerd = status.get("driver-type", "").startswith("io.containerd.snapshotter")
    folder = "/var/lib/containerd" if is_containerd else info.get("DockerRootDir")
    free_bytes = None
    with contextlib.suppress(OSError):  # such as Docker Desktop's folder, which is not on this machine
        free_bytes = shutil.disk_usage(folder).free if engine_shares_files() and folder else None
    options = {str(option).partition(",")[0] for option in info.get("SecurityOptions") or []}
    return DockerEngine(
        rootless="name=rootless" in options,
        remapped="name=userns" in options,
        selinux="name=selinux" in options,
        desktop="Docker Desktop" in (info.get("OperatingSystem") or ""),
        image_folder=folder,
        free_bytes=free_bytes,
        stale=leftovers,
    )


def _list_objects(client: docker.DockerClient, run: str | None = None) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Yield the kind, object and labels of the harness's containers, networks and volumes, of all runs or of one."""
    filters: dict[str, Any] = {"label": [f"{LABEL}=1", *([f"{RUN_LABEL}={run}"] if run is not None else [])]}
    for container in client.containers.list(all=True, filters=filters, ignore_removed=True):
        yield "container", container, container.labels
    for network in client.networks.list(filters=filters):
        yield "network", network, network.attrs.get("Labels") or {}
    for volume in client.volumes.list(filters=filters):
        yield "volume", volume, volume.attrs.get("Labels") or {}


def ensure_image(client: docker.DockerClient, name: str, on_progress: Callable[[str], None]) -> Image:
    """Return the image; pull it if the engine does not have it. Raises ImageError: offline, unknown, not allowed."""
    try:
        with contextlib.suppress(ImageNotFound):
            return ask_engine(lambda: client.images.get(name))
        repository, tag = parse_repository_tag(name)
        if repository == OWN_IMAGE:
            raise ImageError(
                f"the project's image {name} was not built yet",
                next_step="Build it: make image (in the project's folder).",
            )
        _pull_image(client, name, repository, tag or "latest", on_progress)
        return client.images.get(name)
    except DOCKER_ERRORS as error:
        failed = make_docker_error(f"the image {name} is not on this machine and cannot be pulled", error)
        raise ImageError(failed.what, next_step=failed.next_step, detail=failed.detail) from None


def get_digest(image: Image) -> str:
    """Return the digest in the registry (name@sha256:...), else the image's id."""
    digests: list[str] = image.attrs.get("RepoDigests") or []
    return digests[0] if digests else str(image.id)


def get_local_digests(names: Iterable[str]) -> dict[str, str]:
    """Return the digests of those images that the engine has; empty without an engine."""
    digests = {}
    with contextlib.suppress(ServerError, *DOCKER_ERRORS), contextlib.closing(connect()) as client:
        for name in names:
            with contextlib.suppress(ImageNotFound):
                digests[name] = get_digest(ask_engine(functools.partial(client.images.get, name)))
    return digests


def _pull_image(
    client: docker.DockerClient, name: str, repository: str, tag: str, on_progress: Callable[[str], None]
) -> None:
    on_progress(f"pulling {name}")
    layers: dict[str, tuple[int, int]] = {}
    reported_s = time.monotonic()
    for event in client.api.pull(repository, tag=tag, stream=True, decode=True):
        if "error" in event:
            raise DockerException(str(event["error"]))
        detail = event.get("progressDetail") or {}
        if event.get("status") == "Downloading" and detail.get("total"):
            layers[event["id"]] = (int(detail["current"]), int(detail["total"]))
        if layers and time.monotonic() - reported_s > _PROGRESS_EVERY_S:
            reported_s = time.monotonic()
            pulled, total = (sum(layer[i] for layer in layers.values()) / 1e9 for i in (0, 1))
            on_progress(f"pulling {name}: {pulled:.2f} of {total:.2f} GB")


def remove_leftovers(
    client: docker.DockerClient, run: str | None = None, *, everything: bool = False, caches: bool = False
) -> list[str]:
    """Remove containers, networks and volumes of the harness; return their names.

    Without `everything`, only objects of harness processes that have ended. With `run`, only objects of that run.
    Cache volumes are removed only with `caches`, and not while a harness that may live has a container or a network:
    it may need them for its next server.
    """
    removed = []
    in_use = False
    try:
        for kind, item, labels in ask_engine(lambda: list(_list_objects(client, run))):
            if kind == "volume" and CACHE_LABEL in labels:
                is_leftover = caches and not in_use
            else:
                is_leftover = everything or owner_is_gone(labels)
                in_use |= kind != "volume" and not is_leftover
            options = {"v": True, "force": True} if kind == "container" else {}
            try:
                if is_leftover:
                    item.remove(**options)
                    removed.append(f"{kind} {item.name}")
            except NotFound:
                pass
            except APIError as error:
                if error.status_code != 409:  # 409: another process removes or uses it
                    raise
    except DOCKER_ERRORS as error:
        raise make_docker_error("not everything could be removed", error) from None
    return removed
