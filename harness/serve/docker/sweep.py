"""Sweeping what killed runs left behind. Only what carries our label is ever touched."""

from collections.abc import Mapping
from typing import Any

import docker
from docker.errors import APIError, NotFound

from harness.serve.docker import labels
from harness.serve.docker.daemon import DOCKER_ERRORS, docker_error


def sweep(
    client: docker.DockerClient, run: str | None = None, *, everything: bool = False, caches: bool = False
) -> list[str]:
    """Remove our containers, networks and volumes; returns what was removed, in words.

    Without `everything`, only what belongs to a harness process that has ended. With `run`, only what belongs to
    that run. Cache volumes are kept, unless `caches`.
    """
    ours: dict[str, Any] = {"label": [f"{labels.OURS}=1"]}

    def goes(found: Mapping[str, str] | None) -> bool:
        found = found or {}
        if found.get(labels.OURS) != "1":  # the filter said so already; what is removed is looked at twice
            return False
        if run is not None and found.get(labels.RUN) != run:
            return False
        return everything or labels.owner_is_gone(found)

    removed = []
    try:
        for container in client.containers.list(all=True, filters=ours, ignore_removed=True):
            if goes(container.labels) and _gone(lambda c=container: c.remove(v=True, force=True)):
                removed.append(f"container {container.name}")
        for network in client.networks.list(filters=ours):
            if goes(network.attrs.get("Labels")) and _gone(network.remove):
                removed.append(f"network {network.name}")
        for volume in client.volumes.list(filters=ours):
            found = volume.attrs.get("Labels") or {}
            is_cache = labels.CACHE in found
            if (caches if is_cache else goes(found)) and _gone(volume.remove):
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
