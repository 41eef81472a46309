"""A server's container through the Docker SDK: create, start, watch, stop, remove."""

import contextlib
import io
import re
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.types import Healthcheck, Mount, Ulimit
from msgspec import Struct
from msgspec.structs import replace

from harness.errors import ServerError, StartError
from harness.failures.explain import Diagnosis, ExitState, explain
from harness.files import open_file
from harness.process import undisturbed
from harness.redact import masked
from harness.rundir.manifest import ServerDeath
from harness.serve.compose_file import (
    ComposeFile,
    Port,
    Service,
    parse_bytes,
    parse_device,
    parse_port,
    parse_seconds,
    parse_volume,
)
from harness.serve.engine import CELL_LABEL, DOCKER_ERRORS, RUN_LABEL, make_docker_error, make_name

MAX_ENGINE_SILENCE_S = 15.0
MAX_PREPARATION_S = 300  # such as changing the owner of a volume full of models
STATUS_INTERVAL_S = 0.5  # a look at the container costs the engine a millisecond or two


TAIL_LINES = 25
MAX_LINE_CHARS = 100
_TIME_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z ")  # put there by the Docker Engine


class LogFile:
    """Copies a stream of bytes to a file in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def follow(self, stream: Callable[[], Iterable[bytes]]) -> None:
        """Start to copy what `stream()` yields."""
        self._thread = threading.Thread(target=self._copy, args=(stream,), name="server-log", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the stream has ended; it does so by itself when its container has stopped."""
        if self._thread is not None:
            self._thread.join(2.0)

    def tail(self) -> str:
        """The last lines, without the engine's time stamps."""
        return "\n".join(self.text().splitlines()[-TAIL_LINES:])

    def last_line(self) -> str:
        """The last line that says something, shortened for a terminal."""
        lines = [line.strip() for line in self.text(4096).splitlines() if line.strip()]
        return lines[-1][:MAX_LINE_CHARS] if lines else "no output yet"

    def text(self, limit: int = 4_000_000) -> str:
        """The log, at most its last `limit` bytes, without the engine's time stamps."""
        with open_file(self.path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - limit))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(_TIME_STAMP.sub("", line) for line in text.splitlines())

    def _copy(self, stream: Callable[[], Iterable[bytes]]) -> None:
        rest = b""
        with self.path.open("ab") as file:
            try:
                for block in stream():
                    *whole, rest = (rest + block).split(b"\n")
                    for line in whole:
                        file.write(self._clean(line) + b"\n")
                    file.flush()
            except Exception as error:
                rest += f"\n[the log ends here: {error}]".encode()
            if rest:
                file.write(self._clean(rest) + b"\n")

    def _clean(self, line: bytes) -> bytes:
        return masked(line.decode(errors="surrogateescape"), "known").encode(errors="surrogateescape")


class ServerStatus(Struct, frozen=True):
    """How a server is doing."""

    death: ServerDeath | None = None  # None: it runs
    oom_killed: bool = False
    restarts: int = 0
    failure: Diagnosis | None = None  # in its log, once it has ended


def create_network_and_volumes(client: docker.DockerClient, compose: ComposeFile, owner: dict[str, str]) -> None:
    """Network and volumes of a cell, and what has to be done in them before its server starts. Raises ServerError.

    Whatever was made until then carries the labels `owner`, by which `remove` finds it.
    """
    try:
        _create_volumes(client, compose)
        client.networks.create(network_name(owner), driver="bridge", labels=owner)
    except DOCKER_ERRORS as error:
        raise make_docker_error("the server's network and volumes cannot be made", error) from None
    for name in compose.preparations:
        _run_preparation(start_container(client, compose, name, owner), name)


def start_container(client: docker.DockerClient, compose: ComposeFile, name: str, owner: dict[str, str]) -> Container:
    """The container of a service, started; in the cell's network it is known by the service's name."""
    service = compose.services[name]
    network = network_name(owner)
    try:
        endpoint = client.api.create_endpoint_config(aliases=[name])
        container = client.containers.create(
            service.image,
            **_sdk_arguments(service),
            name=f"{network}-{name}",
            labels=owner,
            network=network,
            networking_config={network: endpoint},
        )
        if service.configs:
            container.put_archive("/", _pack_configs(compose, service))
        container.start()
    except ImageNotFound:
        raise ServerError(f"the image {service.image} disappeared", next_step="Run it again.") from None
    except DOCKER_ERRORS as error:
        raise make_docker_error(f"the {name}'s container cannot be started", error) from None
    return container


def _run_preparation(container: Container, name: str) -> None:
    try:
        code = int(container.wait(timeout=MAX_PREPARATION_S)["StatusCode"])
        said = container.logs().decode("utf-8", "replace")
        container.remove(v=True, force=True)
    except DOCKER_ERRORS as error:
        raise make_docker_error(f"the preparation '{name}' did not end within {MAX_PREPARATION_S} s", error) from None
    if code != 0:
        raise ServerError(
            f"the preparation '{name}' of the server failed with exit code {code}",
            next_step="Look at its output, and at the volumes that the server's variables name.",
            detail=said.strip()[-2000:],
        )


def _pack_configs(compose: ComposeFile, service: Service) -> bytes:
    """The service's `configs` as a tar: it reaches a remote engine too, which a bind mount does not."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for mount in service.configs:
            content = compose.configs[mount.source].content.encode()
            entry = tarfile.TarInfo(mount.target.lstrip("/"))
            entry.size, entry.mode = len(content), 0o444
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def unpack_file(archive: Iterable[bytes]) -> bytes:
    """The file in an archive out of a container; nothing of what is no file. Raises tarfile.TarError."""
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as tar:
        entry = tar.next()
        file = tar.extractfile(entry) if entry is not None else None
        return b"" if file is None else file.read()


def network_name(owner: dict[str, str]) -> str:
    """The Docker network of a cell's server; its containers are known there by their services."""
    return make_name(owner[RUN_LABEL], owner[CELL_LABEL])


def _create_volumes(client: docker.DockerClient, compose: ComposeFile) -> None:
    for volume in compose.volumes.values():
        if not volume.external:
            client.volumes.create(volume.name, labels=volume.labels)
            continue
        try:
            client.volumes.get(volume.name)
        except NotFound:
            missing = LookupError(f"external volume {volume.name} not found")
            raise make_docker_error("the server cannot be started", missing) from None


def _sdk_arguments(service: Service) -> dict[str, Any]:
    """The service in the words of the Docker SDK. Every value was checked when the file was parsed."""
    devices = [parse_device(text) for text in service.devices]
    ports = [parse_port(text) for text in service.ports]
    return {
        "command": service.command,
        "entrypoint": service.entrypoint,
        "environment": service.environment,
        "mounts": [_sdk_mount(text) for text in service.volumes],
        "devices": [":".join(device) for device in devices],
        "group_add": service.group_add,
        "ipc_mode": service.ipc,
        "shm_size": None if service.shm_size is None else parse_bytes(service.shm_size),
        "security_opt": service.security_opt,
        "cap_add": service.cap_add,
        "ulimits": [Ulimit(name=name, soft=u.soft, hard=u.hard) for name, u in service.ulimits.items()],
        "ports": {f"{port.container}/tcp": (port.address, port.host or None) for port in ports},
        "healthcheck": _sdk_healthcheck(service),
        "init": service.init,
        "user": service.user,
        "working_dir": service.working_dir,
        "mem_limit": None if service.mem_limit is None else parse_bytes(service.mem_limit),
        "memswap_limit": None if service.memswap_limit is None else parse_bytes(service.memswap_limit),
        "nano_cpus": None if service.cpus is None else int(service.cpus * 1e9),
        "cpuset_cpus": service.cpuset,
        "tty": False,
        "detach": True,
    }


def find_host_port(container: Container, port: Port) -> int | None:
    """The port of the host, which the engine has chosen unless `port` names one; None once the container has ended."""
    container.reload()
    bindings = container.attrs["NetworkSettings"]["Ports"].get(f"{port.container}/tcp") or []
    return next((int(one["HostPort"]) for one in bindings if one["HostIp"] == port.address), None)


def _sdk_mount(text: str) -> Mount:
    volume = parse_volume(text)
    # Unlike -v, a bind mount does not make a folder that is missing.
    return Mount(volume.target, volume.source, type="volume" if volume.named else "bind", read_only=volume.read_only)


def _sdk_healthcheck(service: Service) -> Healthcheck | None:
    check = service.healthcheck
    if check is None:
        return None
    interval, timeout, start_period = (
        int(parse_seconds(text) * 1e9) for text in (check.interval, check.timeout, check.start_period)
    )
    return Healthcheck(
        test=check.test, interval=interval, timeout=timeout, retries=check.retries, start_period=start_period
    )


def follow_log(container: Container, log: LogFile) -> None:
    """Copy the container's output to `log`, from its first line on, each line with the engine's time stamp."""
    log.follow(lambda: container.logs(stream=True, follow=True, timestamps=True, stdout=True, stderr=True))


def make_status_reader(container: Container, log: LogFile) -> Callable[[bool], ServerStatus]:
    """A function that looks at the container; cheap enough to be called all the time. With true it looks now."""
    last = ServerStatus()
    looked_at = float("-inf")
    answered_at = time.monotonic()

    def look(now: bool) -> ServerStatus:
        nonlocal last, looked_at, answered_at
        if last.death is None and (now or time.monotonic() - looked_at >= STATUS_INTERVAL_S):
            looked_at = time.monotonic()
            try:
                last = _read_status(container, log)
                answered_at = looked_at
            except DOCKER_ERRORS as error:
                # A busy engine may miss one look; that is no reason to call its container dead.
                if looked_at - answered_at > MAX_ENGINE_SILENCE_S:
                    silent = f"the Docker Engine has given no answer for {MAX_ENGINE_SILENCE_S:.0f} s ({error})"
                    last = ServerStatus(ServerDeath(how="unreachable", detail=silent))
        return last

    return look


def _read_status(container: Container, log: LogFile) -> ServerStatus:
    try:
        container.reload()
    except NotFound:
        return ServerStatus(ServerDeath(how="removed"))
    state = container.attrs["State"]
    restarts = int(container.attrs.get("RestartCount") or 0)
    oom_killed = bool(state.get("OOMKilled"))
    if state["Running"] and not state.get("Paused"):
        return ServerStatus(ServerDeath(how="restarted") if restarts else None, oom_killed, restarts)
    if state.get("Paused"):
        return ServerStatus(ServerDeath(how="paused"), oom_killed, restarts)
    code = int(state["ExitCode"])
    ended = ExitState(exit_code=code, oom_killed=oom_killed, error=str(state.get("Error") or ""))
    return status_at_end(code, ended, log, restarts)


def status_at_end(exit_code: int, ended: ExitState, log: LogFile, restarts: int = 0) -> ServerStatus:
    """How a server ended and why, with what its log has to say about it."""
    log.settle()
    found = explain(log.path, ended)
    death = ServerDeath(how="ended", exit_code=exit_code, line=log.last_line())
    if found is not None:
        death = replace(
            death, failure=found.id, cause=found.cause, fix=found.fix, line=found.line, line_number=found.number
        )
    return ServerStatus(death, ended.oom_killed, restarts, found)


def make_death_error(look: ServerStatus, log: LogFile) -> ServerError:
    """The error for a server that ended, or could not be reached any more, before it was ready."""
    assert look.death is not None
    sentence, ended = look.death.sentence(), look.death.how == "ended"
    if look.death.how == "unreachable":
        return ServerError(f"the server cannot be reached: {sentence}", next_step="Check the way to its machine.")
    if look.death.how in ("removed", "paused"):
        return ServerError(f"the server did not start; {sentence}", next_step="Find what else uses the Docker Engine.")
    found = look.failure if ended else explain(log.path, ExitState(oom_killed=look.oom_killed))
    what = f"the server did not start; {sentence}"
    if found is not None:
        return make_start_error(what, log, found, f"To solve it: {found.fix}.")
    said = f": {log.last_line()}" if ended else ""  # of a server that already worked, it would be any request's
    return make_start_error(what + said, log, None, f"Its log is {log.path}.")


def make_start_error(what: str, log: LogFile, failure: Diagnosis | None, next_step: str) -> StartError:
    """The error of a start, with its evidence: the telling line of a known failure, else the log's last lines."""
    if failure is None:
        return StartError(what, next_step=next_step, detail=log.tail())
    lines = [f"line {failure.number}: {failure.line}"]
    if failure.wrapper is not None:
        lines.append(f"it came through line {failure.wrapper_number}: {failure.wrapper}")
    lines += [f"known from: {failure.source} [{failure.id}]", f"the whole log: {log.path}"]
    detail = log.tail() if failure.number is None else "\n".join(lines)
    known = {"failure": failure.id, "cause": failure.cause, "fix": failure.fix}
    return StartError(what, next_step=next_step, detail=detail, **known)


def make_load_error(what: str, said: str, log: LogFile, more: str = "") -> StartError:
    """The error of a server that could not load its model and `said` why; `more` to do."""
    failure = explain(log.path, ExitState(error=said))
    return make_start_error(f"{what}: {said}", log, failure, _format_advice(failure) + more)


def advise_on_message(said: str) -> str:
    """What to do about an API's words."""
    return _format_advice(explain("", ExitState(error=said)))


def _format_advice(failure: Diagnosis | None) -> str:
    return "Read its log." if failure is None else f"{failure.cause}; {failure.fix}."


def describe_container(container: Container, compose: ComposeFile, service: Service) -> dict[str, Any]:
    """The container's configuration for the manifest: what makes two starts alike or different.

    Command, environment and config files are as in the Compose file, where secrets are only named. No port of the host.
    """
    config, host = container.attrs["Config"], container.attrs["HostConfig"]
    kept = (
        "Binds", "Mounts", "IpcMode", "ShmSize", "Devices", "GroupAdd", "SecurityOpt",
        "CapAdd", "Ulimits", "Memory", "MemorySwap", "NanoCpus", "CpusetCpus", "Init", "Privileged", "Runtime",
    )  # fmt: skip
    found = {
        "Image": container.attrs["Image"],
        "User": config.get("User"),
        "Entrypoint": config.get("Entrypoint"),
        "Cmd": service.command,
        "Environment": dict(sorted(service.environment.items())),
        "HostConfig": {key: host.get(key) for key in kept if host.get(key) not in (None, [], {}, "")},
    }
    if service.configs:
        found["Configs"] = {mount.target: compose.configs[mount.source].content for mount in service.configs}
    return found


@contextlib.contextmanager
def removed_at_exit(
    client: docker.DockerClient,
    compose: ComposeFile,
    owner: dict[str, str],
    logs: Sequence[LogFile],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Remove at the end what was started, whatever happens; a second Ctrl-C does not stop that. Closes the client.

    Raises ServerError for what cannot be removed. After another error, which comes first, it is printed.
    """
    grace_s = max(parse_seconds(service.stop_grace_period) for service in compose.services.values())
    failed = True
    try:
        yield
        failed = False
    finally:
        with undisturbed(), contextlib.closing(client):
            say("taking the server down")
            try:
                remove_containers(client, owner, grace_s)
            except ServerError as error:
                if not failed:
                    raise
                print(error, file=sys.stderr)
            for log in logs:
                log.settle()


def remove_containers(client: docker.DockerClient, owner: dict[str, str], grace_s: float) -> None:
    """Stop and remove what `start` made, however far it came. Raises ServerError for what is left."""
    mine: dict[str, Any] = {"label": [f"{RUN_LABEL}={owner[RUN_LABEL]}", f"{CELL_LABEL}={owner[CELL_LABEL]}"]}
    failed: list[Exception] = []
    try:
        for container in client.containers.list(all=True, filters=mine, ignore_removed=True):
            try:
                _remove_container(container, grace_s)
            except DOCKER_ERRORS as error:
                failed.append(error)  # the others go all the same
        for network in client.networks.list(filters=mine):
            network.remove()
    except DOCKER_ERRORS as error:
        failed.append(error)
    if failed:
        raise make_docker_error(
            "the server's container cannot be removed; `harness clean` tries again", failed[0]
        ) from None


def _remove_container(container: Container, grace_s: float) -> None:
    try:
        if container.status in ("running", "restarting", "paused"):
            container.stop(timeout=int(grace_s))
        container.remove(v=True, force=True)
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # 409: somebody else is removing it already
            raise
