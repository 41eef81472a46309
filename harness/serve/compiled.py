"""What a server has compiled (`caches` of a scenario's server): volumes of the run for it, and their sizes.

Volumes and folders of the user are never changed: with `caches` the server does not get them.
"""

import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
import msgspec
from docker.errors import NotFound
from docker.models.containers import Container
from msgspec.structs import replace

from harness.base.errors import ServerError
from harness.records.manifest import CompiledFolder
from harness.scenario import NEW_CACHES, Server
from harness.serve.compose_file import ComposeFile, Mount, Service, Volume, parse_volume
from harness.serve.docker_engine import DOCKER_ERRORS, RUN_LABEL, ask_engine, connect, make_docker_error, make_name

COMPILED_LABEL = "amd-llm-load.compiled"  # of a volume: the folder of the container
_FOLDER = "compiled"  # of a run directory, for servers that are processes
_SIZE = re.compile(r"^(\d{1,15})\t(/.*)$", re.MULTILINE)
_MAX_OUTPUT = 100_000


def owner_of(server_name: str, server: Server) -> str:
    """Return the server that filled what this one finds compiled: itself with `caches: new`."""
    return server_name if server.caches in (None, NEW_CACHES) else str(server.caches)


def shared_caches(servers: Mapping[str, Server]) -> dict[str, str]:
    """Return the owner of what each server compiles or finds, by its name, where several servers share it."""
    owners = {name: owner_of(name, server) for name, server in servers.items() if server.caches is not None}
    used = Counter(owners.values())
    return {name: owner for name, owner in owners.items() if used[owner] > 1}


def with_own_volumes(compose: ComposeFile, run_id: str, owner: str) -> ComposeFile:
    """Return the Compose file with a volume of the run at each folder in which the server keeps what it compiles."""
    folders = compose.serving.compiled
    names = {folder: f"{make_name(run_id, owner)}-{number}" for number, folder in enumerate(folders)}
    mounts = [f"{name}:{folder}" for folder, name in names.items()]

    def mounted(service: Service) -> Service:
        others = [text for text in service.volumes if (mount := _mount_of(text)) is None or mount.target not in folders]
        return replace(service, volumes=[*others, *mounts])

    services = {
        name: mounted(service) if service.image == compose.server.image else service
        for name, service in compose.services.items()
    }
    texts = [text for service in services.values() for text in service.volumes]
    mounted_names = {mount.source for text in texts if (mount := _mount_of(text)) is not None}
    kept = {key: volume for key, volume in compose.volumes.items() if key in mounted_names}
    # `external`: the start of a cell does not make them, because the starts of several cells share them.
    volumes = {name: Volume(name=name, external=True) for name in names.values()}
    return replace(compose, services=services, volumes=kept | volumes)


def _mount_of(text: str) -> Mount | None:
    """Return a volume of a service; None for a folder of the host whose name is in the environment."""
    try:
        return parse_volume(text)
    except ValueError:
        return None


def make_volumes(
    client: docker.DockerClient, compose: ComposeFile, server: Server, labels: dict[str, str], run_id: str, owner: str
) -> None:
    """Make the run's volumes anew for a server with `caches: new`. Raises ServerError.

    For another server they must be there: they are gone after the run, so a resumed run begins with that of `owner`.
    """
    names = [f"{make_name(run_id, owner)}-{number}" for number in range(len(compose.serving.compiled))]
    try:
        for name, folder in zip(names, compose.serving.compiled, strict=True):
            if server.caches != NEW_CACHES:
                ask_engine(lambda name=name: client.volumes.get(name))  # type: ignore[misc]
                continue
            with suppress(NotFound):
                client.volumes.get(name).remove()
            client.volumes.create(name, labels={**labels, COMPILED_LABEL: folder})
    except NotFound:
        raise missing_error(owner) from None
    except DOCKER_ERRORS as error:
        raise make_docker_error("the volumes for compiled kernels cannot be made", error) from None


def missing_error(owner: str) -> ServerError:
    return ServerError(
        f"what the server '{owner}' compiled is not there: it is kept only until the end of a run that starts it",
        next_step="Start both with `harness run`; to start this server alone, leave out its `caches`.",
    )


def without_run_names(description: dict[str, Any], compose: ComposeFile, owner: str) -> dict[str, Any]:
    """Return a container's configuration with names of the run's volumes that are the same in each run."""
    text = msgspec.json.encode(description).decode()
    folders = set(compose.serving.compiled)
    mounts = [mount for text in compose.server.volumes if (mount := _mount_of(text)) is not None]
    for name in {mount.source for mount in mounts if mount.target in folders}:
        text = text.replace(name, f"compiled-by-{owner}-{name.rpartition('-')[2]}")
    return dict(msgspec.json.decode(text))


def process_folder(run_folder: Path, server: Server, owner: str) -> Path:
    """Return the folder in which a server that is a process finds what is compiled; empty with `caches: new`.

    Raises ServerError where the server that fills it has not run.
    """
    folder = run_folder / _FOLDER / owner
    if server.caches == NEW_CACHES:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    elif not folder.is_dir():
        raise missing_error(owner)
    return folder


def folder_sizes(container: Container, folders: Sequence[str]) -> dict[str, int]:
    """Return the bytes in folders of a container; without those that are not there, or where it has no `du`."""
    if not folders:
        return {}
    try:
        output = container.exec_run(["du", "-sk", "--", *folders], stderr=False, user="0").output
    except DOCKER_ERRORS:  # it has ended, which others report
        return {}
    text = output[:_MAX_OUTPUT].decode("utf-8", "replace") if isinstance(output, bytes) else ""
    sizes = {path: int(kib) * 1024 for kib, path in _SIZE.findall(text)}
    return {folder: sizes[folder] for folder in folders if folder in sizes}


def size_of_folder(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compiled_folders(folders: Sequence[str], before: dict[str, int], ready: dict[str, int]) -> list[CompiledFolder]:
    """Return the sizes for the manifest, by folder; None where they are not known."""
    return [
        CompiledFolder(path=folder, before_bytes=before.get(folder), ready_bytes=ready.get(folder))
        for folder in folders
    ]


@contextmanager
def caches_removed(servers: Collection[Server], run_id: str, run_folder: Path) -> Iterator[None]:
    """Remove what the servers of a run with `caches` compiled, at its end. `servers`: those that it starts."""
    try:
        yield
    finally:
        own = [server for server in servers if server.caches is not None]
        shutil.rmtree(run_folder / _FOLDER, ignore_errors=True)
        if any(server.container for server in own):
            _remove_volumes(run_id)


def _remove_volumes(run_id: str) -> None:
    """Remove the volumes of a run. What cannot be removed is left to `harness clean`."""
    try:
        with closing(connect()) as client:
            filters = {"label": [f"{RUN_LABEL}={run_id}", COMPILED_LABEL]}
            for volume in ask_engine(lambda: client.volumes.list(filters=filters)):
                volume.remove()
    except (ServerError, *DOCKER_ERRORS):
        pass
