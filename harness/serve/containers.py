"""A server's container through the Docker SDK: create, start, watch, run commands in it, stop, remove."""

import contextlib
import io
import re
import shlex
import struct
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.types import Healthcheck, Mount, Ulimit
from msgspec import Struct
from msgspec.structs import replace

from harness.base.errors import ServerError, StartError
from harness.base.files import open_file
from harness.base.https import MAX_ANSWER_BYTES
from harness.base.process import signals_ignored
from harness.base.redact import masked
from harness.failures.diagnosis import Diagnosis, ExitState, explain, explain_api_error
from harness.records.manifest import ServerDeath
from harness.serve import compose_file
from harness.serve.compose_file import ComposeFile, Port, Service
from harness.serve.docker_engine import (
    CELL_LABEL,
    DOCKER_ERRORS,
    RUN_LABEL,
    ask_engine,
    make_docker_error,
    make_name,
)

MAX_ENGINE_SILENCE_S = 15.0
MAX_PREPARATION_S = 300  # such as changing the owner of a volume full of models
STATUS_INTERVAL_S = 0.5  # each check costs the engine a millisecond or two
TAIL_LINES = 25
MAX_LINE_CHARS = 100
TIME_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z ")  # of the Docker Engine

_KILLED = 137  # the exit code of a process that signal 9 ended
_MAX_OOM_DELAY_S = 3  # of the kernel's message; the event comes within a millisecond on an idle machine
_MAX_LINE_BYTES = 65_536  # the rest of a longer line is left out


FETCH_S = 3.0
_MAX_TRANSFER_S = 2.0
_LINE_BY_LINE = 'while read -r line; do eval "$line"; printf "\\000"; done'
_FRAME_HEADER = struct.Struct(">BxxxL")  # of the engine's frames: stream number, byte count


class LogFile:
    """Copies a stream of bytes to a file in its own thread, without known secrets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def follow(self, open_stream: Callable[[], Iterable[bytes]]) -> None:
        """Start to copy the stream."""
        self._thread = threading.Thread(target=self._copy, args=(open_stream,), name="server-log", daemon=True)
        self._thread.start()

    def wait_for_end(self) -> None:
        """Wait until the stream ends, for at most 2 s; it ends when its container has stopped."""
        if self._thread is not None:
            self._thread.join(2.0)

    def tail(self) -> str:
        """Return the last lines, without the engine's time stamps."""
        return "\n".join(self.text().splitlines()[-TAIL_LINES:])

    def last_line(self) -> str:
        """Return the last line that is not empty, shortened for a terminal."""
        lines = [line.strip() for line in self.text(4096).splitlines() if line.strip()]
        return lines[-1][:MAX_LINE_CHARS] if lines else "no output yet"

    def text(self, max_bytes: int = 4_000_000) -> str:
        """Return the last `max_bytes` of the log, without the engine's time stamps."""
        with open_file(self.path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - max_bytes))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(TIME_STAMP.sub("", line) for line in text.splitlines())

    def _copy(self, open_stream: Callable[[], Iterable[bytes]]) -> None:
        rest = b""
        with self.path.open("ab") as file:
            try:
                for block in open_stream():
                    *lines, rest = (rest + block).split(b"\n")
                    rest = rest[: _MAX_LINE_BYTES + 1]
                    file.writelines(self._mask(line) for line in lines)
                    file.flush()
            except Exception as error:
                rest += f"\n[the log ends here: {error}]".encode()
            if rest:
                file.write(self._mask(rest))

    def _mask(self, line: bytes) -> bytes:
        text = masked(line[:_MAX_LINE_BYTES].decode(errors="surrogateescape"), "known")
        cut = b" [the rest of this line is left out]" if len(line) > _MAX_LINE_BYTES else b""
        return text.encode(errors="surrogateescape") + cut + b"\n"


def with_time_stamps(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a process, each with the time as the Docker Engine writes it before a container's."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        rest = rest[: _MAX_LINE_BYTES + 1]
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()
        yield from (stamp + line + b"\n" for line in lines)
    yield rest


class ServerStatus(Struct, frozen=True):
    """The state of a server at one moment."""

    death: ServerDeath | None = None  # None: it runs
    oom_killed: bool = False
    restarts: int = 0
    failure: Diagnosis | None = None  # from the log of a server that has ended


StatusReader = Callable[[bool], ServerStatus]  # True: check now; False: the last check may be a moment old


def create_network_and_volumes(client: docker.DockerClient, compose: ComposeFile, labels: dict[str, str]) -> None:
    """Create the network and the volumes of a cell, and run the services that prepare them. Raises ServerError.

    Everything has `labels`, by which `remove_containers` finds it.
    """
    try:
        for volume in compose.volumes.values():
            if not volume.external:
                client.volumes.create(volume.name, labels=volume.labels)
                continue
            try:
                client.volumes.get(volume.name)
            except NotFound:
                missing = LookupError(f"external volume {volume.name} not found")
                raise make_docker_error("the server cannot be started", missing) from None
        client.networks.create(network_name(labels), driver="bridge", labels=labels)
    except DOCKER_ERRORS as error:
        raise make_docker_error("the server's network and volumes cannot be made", error) from None
    for name in compose.preparations:
        _run_preparation(start_container(client, compose, name, labels), name)


def start_container(client: docker.DockerClient, compose: ComposeFile, name: str, labels: dict[str, str]) -> Container:
    """Start the container of a service; in the cell's network its host name is the service's name."""
    service = compose.services[name]
    network = network_name(labels)
    try:
        endpoint = client.api.create_endpoint_config(aliases=[name])
        container = client.containers.create(
            service.image,
            **_sdk_arguments(service),
            name=f"{network}-{name}",
            labels=labels,
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
    """Wait until a service that prepares the server has ended well. Raises ServerError."""
    try:
        code = int(container.wait(timeout=MAX_PREPARATION_S)["StatusCode"])
        output = container.logs().decode("utf-8", "replace")
        container.remove(v=True, force=True)
    except DOCKER_ERRORS as error:
        what = f"the preparation '{name}' did not end within {MAX_PREPARATION_S} s"
        raise make_docker_error(what, error) from None
    if code != 0:
        raise ServerError(
            f"the preparation '{name}' of the server failed with exit code {code}",
            next_step="Look at its output, and at the volumes that the server's variables name.",
            detail=output.strip()[-2000:],
        )


def _pack_configs(compose: ComposeFile, service: Service) -> bytes:
    """Return the service's `configs` as a tar: unlike a bind mount it works from inside a container, too."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for mount in service.configs:
            content = compose.configs[mount.source].content.encode()
            entry = tarfile.TarInfo(mount.target.lstrip("/"))
            entry.size, entry.mode = len(content), 0o444
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def unpack_file(archive: Iterable[bytes]) -> bytes:
    """Return the first file of an archive from a container; empty if it is not a file. Raises tarfile.TarError."""
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as tar:
        entry = tar.next()
        file = tar.extractfile(entry) if entry is not None else None
        return b"" if file is None else file.read()


def network_name(labels: dict[str, str]) -> str:
    """Return the name of the Docker network of a cell's server."""
    return make_name(labels[RUN_LABEL], labels[CELL_LABEL])


def _sdk_arguments(service: Service) -> dict[str, Any]:
    """Return the service as arguments of the Docker SDK. The values were checked when the file was parsed."""
    ports = [compose_file.parse_port(text) for text in service.ports]
    return {
        "command": service.command,
        "entrypoint": service.entrypoint,
        "environment": service.environment,
        "mounts": [_sdk_mount(text) for text in service.volumes],
        "devices": [":".join(compose_file.parse_device(text)) for text in service.devices],
        "group_add": service.group_add,
        "ipc_mode": service.ipc,
        "shm_size": None if service.shm_size is None else compose_file.parse_bytes(service.shm_size),
        "security_opt": service.security_opt,
        "cap_add": service.cap_add,
        "ulimits": [Ulimit(name=name, soft=u.soft, hard=u.hard) for name, u in service.ulimits.items()],
        "ports": {f"{port.container}/tcp": (port.address, port.host or None) for port in ports},
        "healthcheck": _sdk_healthcheck(service),
        "init": service.init,
        "user": service.user,
        "working_dir": service.working_dir,
        "mem_limit": None if service.mem_limit is None else compose_file.parse_bytes(service.mem_limit),
        "memswap_limit": None if service.memswap_limit is None else compose_file.parse_bytes(service.memswap_limit),
        "nano_cpus": None if service.cpus is None else int(service.cpus * 1e9),
        "cpuset_cpus": service.cpuset,
        "tty": False,
        "detach": True,
    }


def find_host_port(container: Container, port: Port) -> int | None:
    """Return the host's port, which the engine chooses unless `port` names one; None once the container has ended."""
    container.reload()
    bindings = container.attrs["NetworkSettings"]["Ports"].get(f"{port.container}/tcp") or []
    return next((int(binding["HostPort"]) for binding in bindings if binding["HostIp"] == port.address), None)


def _sdk_mount(text: str) -> Mount:
    volume = compose_file.parse_volume(text)
    # Unlike -v, a bind mount does not make a folder that is missing.
    return Mount(volume.target, volume.source, type="volume" if volume.named else "bind", read_only=volume.read_only)


def _sdk_healthcheck(service: Service) -> Healthcheck | None:
    check = service.healthcheck
    if check is None:
        return None
    interval, timeout, start_period = (
        int(compose_file.parse_seconds(text) * 1e9) for text in (check.interval, check.timeout, check.start_period)
    )
    return Healthcheck(
        test=check.test, interval=interval, timeout=timeout, retries=check.retries, start_period=start_period
    )


class Shell:
    """A shell inside a container that runs one line of commands at a time.

    Starting a process in a container costs the Docker Engine some 100 ms of CPU, which an engine on the same machine
    would notice each second. So one shell waits there. `run` opens it; `close` or a failed line closes it, and the
    next `run` opens it again.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self._stream: Any = None  # the Docker SDK's object, which keeps the connection open
        self._socket: Any = None
        self._lock = threading.Lock()  # several threads use the shell

    def fetch(self, url: str, body: str | None = None) -> str:
        """Return the answer to a GET, or to a POST of JSON without line ends; empty without an answer in time."""
        curl = f"curl --silent --fail --max-time {FETCH_S:g} {shlex.quote(url)}"
        if body is not None:
            post = "--header 'Content-Type: application/json' --data-binary @-"
            curl = f"printf %s {shlex.quote(body)} | {curl} {post}"
        return self.run(curl).decode("utf-8", "replace")

    def run(self, line: str) -> bytes:
        """Return what a line of commands prints, which must not contain NUL; empty if it does not end in time."""
        with self._lock:
            try:
                if self._socket is None:
                    self._open()
                self._socket.sendall(f"{line}\n".encode())
                output = b""
                while not output.endswith(b"\0"):
                    _stream, size = _FRAME_HEADER.unpack(self._receive(_FRAME_HEADER.size))
                    output += self._receive(size)
                    if len(output) > MAX_ANSWER_BYTES:
                        raise ConnectionError("an answer without an end")
            except (OSError, *DOCKER_ERRORS):
                self._close()
                return b""
        return output[:-1]

    def close(self) -> None:
        """Close the shell's input, which ends it. Waits for a line that runs."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        stream, self._stream, self._socket = self._stream, None, None
        # The SDK attaches the response and the socket to the stream, so that they live as long.
        parts = [getattr(stream, "_response", None), stream, getattr(stream, "_sock", None)]
        for part in filter(None, parts):
            with contextlib.suppress(OSError, ValueError):  # one may have closed the other
                part.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        api = self._container.client.api  # type: ignore[union-attr]
        command = ["sh", "-c", _LINE_BY_LINE]
        run = api.exec_create(self._container.id, command, stdin=True, stdout=True, stderr=False)["Id"]
        self._stream = api.exec_start(run, socket=True)
        self._socket = getattr(self._stream, "_sock", self._stream)
        self._socket.settimeout(FETCH_S + _MAX_TRANSFER_S)

    def _receive(self, size: int) -> bytes:
        """Return exactly `size` bytes."""
        received = b""
        while len(received) < size:
            part = self._socket.recv(size - len(received))
            if not part:
                raise ConnectionError("the shell ended")
            received += part
        return received


def follow_log(container: Container, log: LogFile) -> None:
    """Copy the container's output to `log`, from the first line on, each line with the engine's time stamp."""
    log.follow(lambda: container.logs(stream=True, follow=True, timestamps=True, stdout=True, stderr=True))


def make_status_reader(container: Container, log: LogFile) -> StatusReader:
    """Return a function that checks the container, at most every STATUS_INTERVAL_S unless it is called with True."""
    last = ServerStatus()
    checked_s = float("-inf")
    answered_s = time.monotonic()

    def read_status(now: bool) -> ServerStatus:
        nonlocal last, checked_s, answered_s
        if last.death is None and (now or time.monotonic() - checked_s >= STATUS_INTERVAL_S):
            checked_s = time.monotonic()
            try:
                last = _read_status(container, log)
                answered_s = checked_s
            except DOCKER_ERRORS as error:
                # A busy engine may miss one check; its container may still work.
                if checked_s - answered_s > MAX_ENGINE_SILENCE_S:
                    silent = f"the Docker Engine has given no answer for {MAX_ENGINE_SILENCE_S:.0f} s ({error})"
                    last = ServerStatus(ServerDeath(how="unreachable", detail=silent))
        return last

    return read_status


def _read_status(container: Container, log: LogFile) -> ServerStatus:
    try:
        container.reload()
    except NotFound:
        return ServerStatus(ServerDeath(how="removed"))
    state = container.attrs["State"]
    restarts = int(container.attrs.get("RestartCount") or 0)
    oom_killed = bool(state.get("OOMKilled")) or (not state["Running"] and _has_late_oom_event(container, state))
    if state.get("Paused"):
        return ServerStatus(ServerDeath(how="paused"), oom_killed, restarts)
    if state["Running"]:
        return ServerStatus(ServerDeath(how="restarted") if restarts else None, oom_killed, restarts)
    exit_code, error = int(state["ExitCode"]), str(state.get("Error") or "")
    return status_at_end(ExitState(exit_code=exit_code, oom_killed=oom_killed, error=error), log, restarts)


def _has_late_oom_event(container: Container, state: dict[str, Any]) -> bool:
    """Check whether the kernel killed an ended container for memory although its state says that it did not.

    `OOMKilled` stays False where the kernel's message about the memory reaches the engine after the one about the end,
    a few milliseconds later; the engine's events have it.
    """
    if state["ExitCode"] != _KILLED:
        return False
    ended_s = int(datetime.fromisoformat(f"{state['FinishedAt'][:19]}+00:00").timestamp())
    client, wanted = container.client, {"container": container.id, "event": "oom"}
    assert client is not None

    def wait_for_event() -> bool:
        until_s = ended_s + _MAX_OOM_DELAY_S
        with contextlib.closing(client.events(since=ended_s - 1, until=until_s, filters=wanted)) as events:
            return next(events, None) is not None

    with contextlib.suppress(ServerError, OSError, *DOCKER_ERRORS):
        return ask_engine(wait_for_event)
    return False


def status_at_end(end: ExitState, log: LogFile, restarts: int = 0) -> ServerStatus:
    """Return how a server ended and why, as far as its log has the cause."""
    log.wait_for_end()
    failure = explain(log.path, end)
    death = ServerDeath(how="ended", exit_code=end.exit_code, line=log.last_line())
    if failure is not None:
        line, number = failure.line, failure.number
        death = replace(death, failure=failure.id, cause=failure.cause, fix=failure.fix, line=line, line_number=number)
    return ServerStatus(death, end.oom_killed, restarts, failure)


def make_death_error(status: ServerStatus, log: LogFile) -> ServerError:
    """Return the error for a server that ended, or became unreachable, before it was ready."""
    assert status.death is not None
    what, has_ended = f"the server did not start; {status.death.sentence()}", status.death.how == "ended"
    if status.death.how in ("unreachable", "removed", "paused"):
        return ServerError(what, next_step="Check the Docker Engine, the way to its machine, and what else uses it.")
    failure = status.failure if has_ended else explain(log.path, ExitState(oom_killed=status.oom_killed))
    if failure is not None:
        return make_start_error(what, log, failure, f"To solve it: {failure.fix}.")
    last_line = f": {log.last_line()}" if has_ended else ""  # of a server that worked, it may be about any request
    return make_start_error(what + last_line, log, None, f"Its log is {log.path}.")


def make_start_error(what: str, log: LogFile, failure: Diagnosis | None, next_step: str) -> StartError:
    """Return the error of a start, with its evidence: the line of a known failure, else the last lines of the log."""
    if failure is None:
        return StartError(what, next_step=next_step, detail=log.tail())
    lines = [f"line {failure.number}: {failure.line}"]
    if failure.wrapper is not None:
        lines.append(f"it came through line {failure.wrapper_number}: {failure.wrapper}")
    lines += [f"known from: {failure.source} [{failure.id}]", f"the whole log: {log.path}"]
    detail = log.tail() if failure.number is None else "\n".join(lines)
    facts = {"failure": failure.id, "cause": failure.cause, "fix": failure.fix}
    return StartError(what, next_step=next_step, detail=detail, **facts)


def make_load_error(what: str, message: str, log: LogFile) -> StartError:
    """Return the error of a server that could not load its model and gave `message`."""
    failure = explain(log.path, ExitState(error=message))
    return make_start_error(f"{what}: {message}", log, failure, _format_advice(failure))


def advise_on_message(message: str) -> str:
    """Return what to do about an API's error message."""
    return _format_advice(explain_api_error(message))


def _format_advice(failure: Diagnosis | None) -> str:
    return "Read its log." if failure is None else f"{failure.cause}; {failure.fix}."


def describe_container(container: Container, compose: ComposeFile, service: Service) -> dict[str, Any]:
    """Return the container's configuration for the manifest, without the host's port: it makes two starts comparable.

    Command, environment and config files are those of the Compose file, in which secrets are only names.
    """
    config, host = container.attrs["Config"], container.attrs["HostConfig"]
    keys = (
        "Binds", "Mounts", "IpcMode", "ShmSize", "Devices", "GroupAdd", "SecurityOpt",
        "CapAdd", "Ulimits", "Memory", "MemorySwap", "NanoCpus", "CpusetCpus", "Init", "Privileged", "Runtime",
    )  # fmt: skip
    description = {
        "Image": container.attrs["Image"],
        "User": config.get("User"),
        "Entrypoint": config.get("Entrypoint"),
        "Cmd": service.command,
        "Environment": dict(sorted(service.environment.items())),
        "HostConfig": {key: host.get(key) for key in keys if host.get(key) not in (None, [], {}, "")},
    }
    if service.configs:
        description["Configs"] = {mount.target: compose.configs[mount.source].content for mount in service.configs}
    return description


@contextlib.contextmanager
def removed_at_exit(
    client: docker.DockerClient,
    compose: ComposeFile,
    labels: dict[str, str],
    logs: Sequence[LogFile],
    on_progress: Callable[[str], None],
) -> Iterator[None]:
    """Remove all containers with `labels` at the end, and close the client. A second Ctrl-C does not interrupt that.

    Raises ServerError for what cannot be removed; after another error, the ServerError is only printed.
    """
    grace_s = max(compose_file.parse_seconds(service.stop_grace_period) for service in compose.services.values())
    failed = True
    try:
        yield
        failed = False
    finally:
        with signals_ignored(), contextlib.closing(client):
            on_progress("taking the server down")
            try:
                remove_containers(client, labels, grace_s)
            except ServerError as error:
                if not failed:
                    raise
                print(error, file=sys.stderr)
            for log in logs:
                log.wait_for_end()


def remove_containers(client: docker.DockerClient, labels: dict[str, str], grace_s: float) -> None:
    """Stop and remove the containers and the network of a cell. Raises ServerError for what is left."""
    filters: dict[str, Any] = {"label": [f"{name}={labels[name]}" for name in (RUN_LABEL, CELL_LABEL)]}
    errors: list[Exception] = []
    try:
        containers = ask_engine(lambda: client.containers.list(all=True, filters=filters, ignore_removed=True))
        for container in containers:
            try:
                _remove_container(container, grace_s)
            except DOCKER_ERRORS as error:
                errors.append(error)  # the others are removed all the same
        for network in ask_engine(lambda: client.networks.list(filters=filters)):
            network.remove()
    except DOCKER_ERRORS as error:
        errors.append(error)
    if errors:
        what = "the server's container cannot be removed; `harness clean` tries again"
        raise make_docker_error(what, errors[0]) from None


def _remove_container(container: Container, grace_s: float) -> None:
    try:
        if container.status in ("running", "restarting", "paused"):
            container.stop(timeout=int(grace_s))
        container.remove(v=True, force=True)
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # 409: another process is removing it already
            raise
