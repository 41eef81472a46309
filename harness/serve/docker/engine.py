"""What the Docker Engine says of itself, for the doctor."""

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import docker
from msgspec import structs

from harness.errors import ServerError
from harness.machine.doctor import DockerEngine
from harness.serve.docker import labels
from harness.serve.docker.daemon import DOCKER_ERRORS, connect
from harness.serve.docker.location import EngineLocation, engine_location

_CONTAINERD = "/var/lib/containerd"  # where images are when the engine leaves them to containerd


def engine_facts() -> DockerEngine:
    """The facts of the engine that the environment names. Never raises: what is wrong with it is one of the facts."""
    location = engine_location()
    known = DockerEngine(host=location.host, named_by=location.named_by)
    try:
        client = connect()
    except ServerError as error:
        return structs.replace(known, problem=error.what, remedy=error.next_step.rstrip("."))
    with contextlib.closing(client):
        try:
            return _facts(client, known, location)
        except DOCKER_ERRORS as error:
            return structs.replace(known, problem=f"the Docker Engine does not tell about itself: {error}")


def has_images(names: Iterable[str]) -> bool:
    """Whether the engine has all of these images; false, too, when it does not answer."""
    try:
        with contextlib.closing(connect()) as client:
            for name in names:
                client.images.get(name)
    except (ServerError, *DOCKER_ERRORS):  # an image that is not there is one of Docker's errors
        return False
    return True


def _facts(client: docker.DockerClient, known: DockerEngine, location: EngineLocation) -> DockerEngine:
    info, version = client.info(), client.version()
    components = {part.get("Name") for part in version.get("Components") or []}
    folder = _image_folder(info)
    return structs.replace(
        known,
        version=version.get("Version"),
        rootless=any("rootless" in option for option in info.get("SecurityOptions") or []),
        desktop="Docker Desktop" in (info.get("OperatingSystem") or ""),
        podman="Podman Engine" in components,
        cgroup=info.get("CgroupVersion"),
        memory_limits=bool(info.get("MemoryLimit", True)),
        image_folder=folder,
        free_bytes=_free(folder) if location.has_our_files and folder else None,
        stale=_stale(client),
    )


def _image_folder(info: dict[str, Any]) -> str | None:
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or [] if len(pair) == 2}
    if status.get("driver-type", "").startswith("io.containerd.snapshotter"):
        return _CONTAINERD
    return info.get("DockerRootDir")


def _free(folder: str) -> int | None:
    """Bytes that are free below a folder; None when it is not on this machine, such as that of Docker Desktop."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def _stale(client: docker.DockerClient) -> list[str]:
    """Containers and networks of ours whose harness has ended."""
    ours: dict[str, Any] = {"label": [f"{labels.OURS}=1"]}
    containers = client.containers.list(all=True, filters=ours, ignore_removed=True)
    found = [f"container {one.name}" for one in containers if labels.owner_is_gone(one.labels)]
    networks = client.networks.list(filters=ours)
    return found + [f"network {one.name}" for one in networks if labels.owner_is_gone(one.attrs.get("Labels") or {})]
