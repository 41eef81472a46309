"""Images: pulled with progress when absent, and identified by digest."""

import contextlib
import time
from collections.abc import Callable, Iterable

import docker
from docker.errors import ImageNotFound
from docker.models.images import Image
from docker.utils import parse_repository_tag

from harness.errors import ServerError
from harness.serve.docker.daemon import DOCKER_ERRORS, connect, docker_error

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
        _pull(client, name, repository, tag or "latest", on_progress)
        return client.images.get(name)
    except DOCKER_ERRORS as error:
        raise docker_error(f"image {name}", error) from None


def digest_of(image: Image) -> str:
    """The digest in the registry (name@sha256:...) where there is one, else the image's id."""
    digests: list[str] = image.attrs.get("RepoDigests") or []
    return digests[0] if digests else str(image.id)


def digests_here(names: Iterable[str]) -> dict[str, str]:
    """The digests of those images that the engine has; empty, too, when it does not answer."""
    found = {}
    with contextlib.suppress(ServerError, *DOCKER_ERRORS), contextlib.closing(connect()) as client:
        for name in names:
            with contextlib.suppress(ImageNotFound):
                found[name] = digest_of(client.images.get(name))
    return found


def _pull(
    client: docker.DockerClient, name: str, repository: str, tag: str, on_progress: Callable[[str], None]
) -> None:
    on_progress(f"pulling {name}")
    layers: dict[str, tuple[int, int]] = {}
    shown = time.monotonic()
    try:
        for event in client.api.pull(repository, tag=tag, stream=True, decode=True):
            if "error" in event:
                raise cannot_pull(name, str(event["error"]))
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and detail.get("total"):
                layers[event["id"]] = (int(detail["current"]), int(detail["total"]))
            if layers and time.monotonic() - shown > _PROGRESS_EVERY_S:
                shown = time.monotonic()
                on_progress(f"pulling {name}: {amount(layers)}")
    except DOCKER_ERRORS as error:
        raise cannot_pull(name, str(getattr(error, "explanation", None) or error)) from None


def amount(layers: dict[str, tuple[int, int]]) -> str:
    """Of bytes, got and in all by layer: "0.52 of 1.90 GB"."""
    got, total = (sum(layer[i] for layer in layers.values()) / 1e9 for i in (0, 1))
    return f"{got:.2f} of {total:.2f} GB"


_OFFLINE = (
    "no such host", "name resolution", "connection refused", "i/o timeout", "deadline exceeded", "TLS handshake",
    "network is unreachable", "no route to host", "x509", "Client.Timeout", "connection reset", "EOF",
)  # fmt: skip
_REFUSED = ("unauthorized", "authentication required", "access denied", "access to the resource is denied", "forbidden")
_UNKNOWN = ("not found", "manifest unknown", "no such image", "name unknown", "repository does not exist")


def cannot_pull(name: str, text: str) -> ServerError:
    """What the engine said about a pull, in words of ours."""
    said = text.lower()
    if any(word.lower() in said for word in _OFFLINE):
        return ServerError(
            f"the image {name} is not on this machine and its registry cannot be reached",
            next_step=f"Connect the machine, or bring the image: `docker save {name}` there, `docker load` here.",
            detail=text,
        )
    if any(word in said for word in _REFUSED):
        return ServerError(
            f"the registry refuses the image {name}: it does not exist, or it needs a login",
            next_step="Check the image's name, or `docker login` first.",
            detail=text,
        )
    if any(word in said for word in _UNKNOWN):
        return ServerError(
            f"the registry has no image {name}", next_step="Check its name and tag (or digest).", detail=text
        )
    return ServerError(f"the image {name} cannot be pulled: {text}", next_step="This is what the Docker Engine said.")
