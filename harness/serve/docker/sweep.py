"""Sweeping what killed runs left behind. Only what carries our label is ever touched."""

from typing import Any

import docker
from docker.errors import APIError, NotFound

from harness.serve.docker import labels
from harness.serve.docker.daemon import DOCKER_ERRORS, docker_error


def sweep(
    client: docker.DockerClient, run: str | None = None, *, everything: bool = False, caches: bool = False
) -> list[str]:
    """Remove our containers, networks and volumes; return what was removed, in words.

    Without `everything`, only objects of harness processes that have ended. With `run`, only objects of that run.
    Cache volumes stay without `caches`, and while a harness that may live has a container or a network here: it may
    need them for its next server.
    """
    ours: dict[str, Any] = {"label": [f"{labels.OURS}=1", *([f"{labels.RUN}={run}"] if run is not None else [])]}
    removed = []
    in_use = False
    try:
        for container in client.containers.list(all=True, filters=ours, ignore_removed=True):
            if not everything and not labels.owner_is_gone(container.labels):
                in_use = True
            elif _gone(lambda c=container: c.remove(v=True, force=True)):
                removed.append(f"container {container.name}")
        for network in client.networks.list(filters=ours):
            if not everything and not labels.owner_is_gone(network.attrs.get("Labels") or {}):
                in_use = True
            elif _gone(network.remove):
                removed.append(f"network {network.name}")
        for volume in client.volumes.list(filters=ours):
            found = volume.attrs.get("Labels") or {}
            goes = caches and not in_use if labels.CACHE in found else everything or labels.owner_is_gone(found)
            if goes and _gone(volume.remove):
                removed.append(f"volume {volume.name}")
    except DOCKER_ERRORS as error:
        raise docker_error("not everything could be removed", error) from None
    return removed


def _gone(remove: Any) -> bool:
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
