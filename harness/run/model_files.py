"""Find what a token reads of a server's model, from the model's files: on this host, else in the server's container."""

import posixpath
import tempfile
from pathlib import Path

from docker.models.containers import Container

from harness.base.errors import HarnessError
from harness.hardware.model import find_model, read_model
from harness.records.manifest import ModelSize
from harness.scenario import Server
from harness.serve.facts import read_container_file
from harness.serve.template import get_variable

_CACHES = ("/root/.cache/huggingface/hub", "/opt/lemonade/.cache/huggingface/hub")


def find_model_size(model: str, server: Server | None = None, container: Container | None = None) -> ModelSize | None:
    """Return the size of a model; None where its files cannot be read from here.

    `server`: with the variables that name its model; None: a server of this host that already ran.
    """
    name = model
    if server is not None:
        name = str(get_variable(server, "model_path") or get_variable(server, "checkpoint") or model)
    mounts = _mounts(container)
    try:
        if name.startswith("/") and mounts:
            return read_model(_on_host(name, mounts), model).size
        caches = [_on_host(cache, mounts) for cache in _CACHES if mounts]
        for environment in [*({"HF_HUB_CACHE": str(cache)} for cache in caches), None]:
            if (size := _in_cache(name, environment)) is not None:
                return size
    except (HarnessError, OSError):
        return None
    return None if container is None else _in_container(name, container)


def _mounts(container: Container | None) -> dict[str, str]:
    """Return the folders and files of this host by their path in the container."""
    mounts = [] if container is None else container.attrs.get("Mounts") or []
    return {
        str(mount["Destination"]): str(mount["Source"])
        for mount in mounts
        if mount.get("Source") and mount.get("Destination")
    }


def _on_host(path: str, mounts: dict[str, str]) -> Path:
    inside = posixpath.normpath(path)
    for at in sorted(mounts, key=len, reverse=True):
        if inside == at or inside.startswith(f"{at.rstrip('/')}/"):
            return Path(mounts[at]) / inside[len(at) :].lstrip("/") if inside != at else Path(mounts[at])
    return Path("/nonexistent")


def _in_cache(name: str, environment: dict[str, str] | None) -> ModelSize | None:
    try:
        return read_model(find_model(name, environment), name).size
    except (HarnessError, OSError):
        return None


def _in_container(name: str, container: Container) -> ModelSize | None:
    """Return the size by the config.json in the hub's cache of a container, whose volume this user may not read."""
    for cache in _CACHES:
        folder = f"{cache}/models--{name.replace('/', '--')}"
        revision = read_container_file(container, f"{folder}/refs/main")
        if revision is None or not revision.isalnum():
            continue
        config = read_container_file(container, f"{folder}/snapshots/{revision}/config.json")
        if config is None:
            continue
        with tempfile.TemporaryDirectory(prefix="amd-llm-load-") as folder_here:
            Path(folder_here, "config.json").write_text(config, encoding="utf-8")
            return _in_cache(folder_here, None)
    return None
