"""Start a server as a container or a process, or attach to one that already runs."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker
import msgspec
from docker.models.containers import Container

from harness import process, redact
from harness.errors import HarnessError, ServerError
from harness.failures.explain import ExitState
from harness.machine.telemetry import Source, cgroup_files, local_source, telemetry_root
from harness.process import is_free, signals_interrupt
from harness.rundir.manifest import ServedBy, ServerDeath
from harness.scenario import Scenario, Server
from harness.serve import containers, probe
from harness.serve.compose_file import (
    GATEWAY,
    SERVER,
    ComposeFile,
    Service,
    Serving,
    fill_variables,
    make_url,
    parse_port,
)
from harness.serve.container_commands import container_source, has_shell
from harness.serve.containers import LogFile, ServerStatus, status_at_end
from harness.serve.engine import connect, ensure_image, get_digest, make_labels
from harness.serve.facts import record_facts
from harness.serve.lemonade import Api, LemonadeMonitor, find_running_model, list_orphans
from harness.serve.location import EngineLocation, engine_location, is_this_machine, open_tunnel, resolve_host
from harness.serve.probe import PhaseTimer, StartupWatch
from harness.serve.ready import ReadyServer, wait_ready
from harness.serve.security import collect_secrets, make_access_notes, require_consent
from harness.serve.template import write_compose_file
from harness.summary import Reason


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answers."""

    url: str  # as this host reaches it, without a slash at the end
    started: ServedBy  # as it was when it became ready
    look: Callable[[bool], ServerStatus]  # with true: look now, else within the last half second
    metrics_url: str | None = None
    monitor: LemonadeMonitor | None = None  # of an engine behind it, which its clients do not see
    network: str | None = None  # Docker network of the server's container
    network_url: str | None = None  # as a container in that network reaches it
    container: Container | None = None  # that works; None: a process, or a server that already ran

    @property
    def served_by(self) -> ServedBy:
        """What served until now: restarts, OOM kills and an early end included."""
        seen = self.look(True)
        return msgspec.structs.replace(
            self.started,
            restarts=seen.restarts,
            oom_killed=seen.oom_killed,
            exit_code=None if seen.death is None or seen.death.of_gateway else seen.death.exit_code,
            death=seen.death,
        )

    @property
    def metrics_source(self) -> str | Callable[[], str] | None:
        """Where its metrics come from: an address, or a function that gives the text."""
        return self.metrics_url if self.metrics_url is not None or self.monitor is None else self.monitor.metrics

    @property
    def ask_engine(self) -> Callable[[str, dict[str, Any]], str] | None:
        """POST to the engine behind it; the text is empty without an answer."""
        return None if self.monitor is None else self.monitor.fetch

    def problems(self) -> list[Reason]:
        """Why what was measured since the last call cannot be trusted, as far as the server lives to tell."""
        return [] if self.monitor is None or self.check_alive() is not None else self.monitor.problems()

    def death(self, now: bool = False) -> ServerDeath | None:
        return self.look(now).death

    def check_alive(self) -> Reason | None:
        """None while the server lives, else why the load must end. Cheap: made to be asked all the time."""
        death = self.death()
        return None if death is None else death.problem()


def find_telemetry_source(endpoint: Endpoint) -> Source | None:
    """Where a server's telemetry comes from: the files of this machine, or its container.

    None for a server on another machine when its container cannot print them.
    """
    container = endpoint.container
    if container is None:
        return local_source() if is_this_machine(urlsplit(endpoint.url).hostname or "") else None
    pid = int(container.attrs["State"].get("Pid") or 0)
    files = cgroup_files(telemetry_root(), pid, str(container.id))
    if files:
        if container.attrs["HostConfig"].get("NetworkMode") != "host":  # else it counts for all programs
            files.append(f"proc/{pid}/net/netstat")
        return local_source(files)
    # Its processes are not among this machine's: the engine is elsewhere, whatever its address is, or we are in a
    # container ourselves. What is seen from within is right in all cases.
    if has_shell(container):
        return container_source(container)
    return local_source() if engine_location().is_here else None


MAX_MISSES = 3  # failed checks in a row of a server that already ran ...
_CHECK_INTERVAL_S = 2.0  # ... with this period ...
_RETRY_INTERVAL_S = 0.3  # ... and sooner, after a failed check


@contextlib.contextmanager
def serve(
    scenario: Scenario,
    server_name: str,
    *,
    run_id: str,
    cell_id: str,
    run_folder: Path,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Endpoint]:
    """Start a server, wait until its model answers, and take it down at the end, however that comes.

    Writes compose/SERVER.yaml and logs/CELL.server.log into the run directory. SIGTERM and SIGHUP end it like Ctrl-C.
    Raises ServerError when it does not become ready, HarnessError for a template or variable that cannot be used.
    """
    start = prepare_start(scenario, server_name, cell_id, run_folder, on_progress)
    if start.serving.offline:
        raise HarnessError(f"the server '{server_name}' is an offline job: only `harness run` can use it")
    running = _serve_container(start, run_id, cell_id) if start.server.container else _serve_process(start)
    with signals_interrupt(), running as endpoint:
        yield endpoint


class ServerStart(msgspec.Struct, frozen=True):
    """Everything that is needed to start a server, or the gateway in front of it."""

    server: Server
    compose: ComposeFile
    model: str
    name: str  # of the service
    log_path: Path
    api_key: str | None
    key_name: str | None
    on_progress: Callable[[str], None]

    @property
    def service(self) -> Service:
        return self.compose.services[self.name]

    @property
    def serving(self) -> Serving:
        front = self.compose.serving.gateway
        return front if self.name == GATEWAY and front is not None else self.compose.serving

    def metrics_url(self, url: str) -> str | None:
        return None if self.serving.metrics is None else url + self.serving.metrics

    def recorded(
        self, served: ServedBy, container: Container | None = None, behind: LemonadeMonitor | None = None
    ) -> ServedBy:
        """With what it turns out to run with."""
        return record_facts(
            served,
            self.log_path,
            metrics_url=self.metrics_url(served.url),
            api_key=self.api_key,
            container=container,
            behind=behind,
        )


def prepare_start(
    scenario: Scenario, server_name: str, cell_id: str, run_folder: Path, on_progress: Callable[[str], None]
) -> ServerStart:
    """Prepare the start of a server: write its Compose file into the run directory, register its secrets."""
    one = write_compose_file(scenario, server_name, run_folder)
    log_path = run_folder / "logs" / f"{cell_id}.server.log"
    api_key = os.environ.get(scenario.api_key_env) if scenario.api_key_env else None
    # What the server got from the environment it may say again, in its log and in an error.
    redact.register_secrets(collect_secrets(msgspec.to_builtins(one.file), os.environ) | {api_key or "": True})
    return ServerStart(
        one.server, one.file, scenario.model, SERVER, log_path, api_key, scenario.api_key_env, on_progress
    )


@contextlib.contextmanager
def _serve_process(start: ServerStart) -> Iterator[Endpoint]:
    """The embedded engine: the command of the service's container on this host. It ends with us, however we end."""
    port = start.compose.serving.port
    url = f"http://127.0.0.1:{port}"
    if not is_free(port):
        raise ServerError(
            f"port {port} is in use already",
            next_step="Leave host_port out to get a free one, or stop what uses it "
            f"(ss -ltnp 'sport = :{port}'); `harness clean` removes leftovers of earlier runs.",
        )
    service = fill_variables(start.compose, os.environ).server
    command = [sys.executable, *(service.command or [])[1:]]
    command[command.index("--host") + 1] = "127.0.0.1"
    arguments = list(start.compose.server.command or [])  # that say what it is; where it listens differs
    for flag in ("--host", "--port"):
        at = arguments.index(flag)
        del arguments[at : at + 2]
    log = LogFile(start.log_path)
    environment = {**os.environ, **service.environment}
    try:
        child = process.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    except OSError as error:
        raise ServerError(f"the embedded engine cannot be started: {error}") from None
    assert child.stdout is not None
    output = child.stdout.fileno()
    log.follow(lambda: iter(lambda: os.read(output, 65536), b""))

    def look(_now: bool) -> ServerStatus:
        code = child.poll()
        return ServerStatus() if code is None else status_at_end(code, ExitState(exit_code=code), log)

    try:
        ready = _wait_until_ready(start, url, look, log)
        served_by = ServedBy(
            url=url,
            template=start.server.template,
            simulated=True,
            version=ready.version,
            model=ready.model,
            arguments=arguments,
            phases=ready.phases,
        )
        yield Endpoint(url=url, started=start.recorded(served_by), look=look, metrics_url=start.metrics_url(url))
    finally:
        process.stop(child)
        log.settle()
        child.stdout.close()


class CellContainers(msgspec.Struct, frozen=True):
    """Where the containers of a cell are started."""

    client: docker.DockerClient
    filled: ComposeFile  # holds secrets: it goes to the engine and nowhere else
    owner: dict[str, str]
    logs: list[LogFile]


class StartedContainer(msgspec.Struct, frozen=True):
    """A container that was started and is watched."""

    container: Container
    look: Callable[[bool], ServerStatus]
    log: LogFile
    served: ServedBy  # as far as it is known before the server answers


@contextlib.contextmanager
def cell_containers(start: ServerStart, filled: ComposeFile, run_id: str, cell_id: str) -> Iterator[CellContainers]:
    """Connect to the Docker Engine, and remove at the end what was started. Raises HarnessError for what cannot run."""
    require_consent(start.server, start.compose)
    made = CellContainers(connect(), filled, make_labels(run_id, cell_id), [])
    with containers.removed_at_exit(made.client, start.compose, made.owner, made.logs, start.on_progress):
        yield made


def start_service(start: ServerStart, made: CellContainers) -> StartedContainer:
    """Pull the image and start the container of a service. Raises ServerError."""
    log = LogFile(start.log_path)
    made.logs.append(log)
    before = made.filled.preparations if start.name == SERVER else []
    phases = PhaseTimer()
    images = [
        ensure_image(made.client, made.filled.services[name].image, start.on_progress) for name in (start.name, *before)
    ]
    phases.done("pull")
    start.on_progress(f"starting the {start.name}'s container")
    if start.name == SERVER:
        containers.create_network_and_volumes(made.client, made.filled, made.owner)
    container = containers.start_container(made.client, made.filled, start.name, made.owner)
    phases.done("create")
    containers.follow_log(container, log)
    service = start.service  # its secrets are still names
    served = ServedBy(
        url="",
        template=start.serving.template,
        simulated=start.serving.simulated,
        image=service.image,
        image_digest=get_digest(images[0]),
        container=containers.describe_container(container, start.compose, service),
        arguments=[*(service.entrypoint or []), *(service.command or [])],
        notes=make_access_notes(start.compose) if start.name == SERVER else [],
        phases=phases.all,
    )
    return StartedContainer(container, containers.make_status_reader(container, log), log, served)


@contextlib.contextmanager
def _serve_container(start: ServerStart, run_id: str, cell_id: str) -> Iterator[Endpoint]:
    filled = fill_variables(start.compose, os.environ)  # a variable that is not set is noticed before a long pull
    with cell_containers(start, filled, run_id, cell_id) as made, contextlib.ExitStack() as tunnels:
        server = _start_and_wait(start, made, tunnels)
        if start.compose.serving.gateway is None:
            yield server
        else:
            log_path = start.log_path.with_suffix("").with_suffix(".gateway.log")
            gateway = msgspec.structs.replace(start, name=GATEWAY, log_path=log_path)
            yield _join_gateway(_start_and_wait(gateway, made, tunnels), server)


def _start_and_wait(start: ServerStart, made: CellContainers, tunnels: contextlib.ExitStack) -> Endpoint:
    """A server that is ready, or its gateway; a tunnel to it is left to `tunnels`. Raises ServerError."""
    port = parse_port(made.filled.services[start.name].ports[0])
    location = engine_location()
    address = find_reachable_address(location, port.address)
    one = start_service(start, made)
    container, look, log = one.container, one.look, one.log
    host_port = containers.find_host_port(container, port)
    if host_port is None:
        raise containers.make_death_error(look(True), log)
    if address is None:
        start.on_progress(f"opening an ssh tunnel to the {start.name} on {location.host}")
        local, broken = tunnels.enter_context(open_tunnel(location, port.address, host_port))
        url, look = make_url("127.0.0.1", local), _include_tunnel(broken, look)
    else:
        url = make_url(address, host_port)
    # What is asked of the server is filled in, too.
    asking = msgspec.structs.replace(start, compose=msgspec.structs.replace(start.compose, serving=made.filled.serving))
    ready = _wait_until_ready(asking, url, look, log, container)
    loaded = ready.brought_up
    watch = None if loaded is None else LemonadeMonitor(Api(url, start.api_key), ready.model, log, container)
    container.reload()
    served = msgspec.structs.replace(
        one.served,
        url=url,
        version=ready.version,
        model=ready.model,
        over_ssh=address is None,
        max_parallel=None if loaded is None else loaded.max_parallel,
        notes=[*([] if loaded is None else loaded.notes), *one.served.notes],
        phases=one.served.phases + ready.phases,
    )
    return Endpoint(
        url=url,
        started=_known_as_simulated(start.recorded(served, container, watch)),
        look=look,
        metrics_url=start.metrics_url(url) if watch is None else None,
        monitor=watch,
        network=containers.network_name(made.owner),
        network_url=f"http://{start.name}:{port.container}",
        container=container,
    )


def _known_as_simulated(served: ServedBy) -> ServedBy:
    return msgspec.structs.replace(served, simulated=served.simulated or "simulated" in (served.version or ""))


def _join_gateway(gateway: Endpoint, server: Endpoint) -> Endpoint:
    """What takes the load is the gateway; what works, has metrics and may die is the server, too."""

    def look(now: bool) -> ServerStatus:
        behind = server.look(now)
        if behind.death is not None:
            return behind
        front = gateway.look(now)
        return behind if front.death is None else ServerStatus(msgspec.structs.replace(front.death, of_gateway=True))

    started = msgspec.structs.replace(
        server.started, url=gateway.url, model=gateway.started.model, gateway=gateway.started
    )
    return msgspec.structs.replace(server, url=gateway.url, network_url=gateway.network_url, started=started, look=look)


def attach_to_server(
    url: str,
    model: str | None,
    api_key: str | None = None,
    *,
    key_name: str | None = None,
    metrics_url: str | None = None,
) -> Endpoint:
    """A server that already runs; `key_name` is the variable that held the key.

    Raises ServerError when its model does not answer.
    """
    found = find_running_model(probe.parse_base_url(url), model, api_key)  # Lemonade's models have two names
    served_by = probe.probe_running_server(url, model if found is None else found.model, api_key, key_name=key_name)
    watch = None if found is None else LemonadeMonitor(Api(served_by.url, api_key), found.model, None, None)
    parts = urlsplit(served_by.url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    last, looked_at, misses = ServerStatus(), time.monotonic(), 0

    def look(now: bool) -> ServerStatus:
        nonlocal last, looked_at, misses
        while last.death is None and (
            now or time.monotonic() - looked_at > (_RETRY_INTERVAL_S if misses else _CHECK_INTERVAL_S)
        ):
            looked_at = time.monotonic()
            # A full listen queue can refuse one connection of a server that lives.
            misses = 0 if probe.accepts_connections(host, port) else misses + 1
            if misses >= MAX_MISSES:  # the parts of a mix may look at the same time
                last = ServerStatus(ServerDeath(how="closed", detail=served_by.url))
            elif not now or not misses:
                break
            else:
                time.sleep(_RETRY_INTERVAL_S)
        return last

    metrics = metrics_url or probe.find_metrics_url(served_by.url, api_key)
    if found is not None:
        served_by = msgspec.structs.replace(served_by, version=found.version, max_parallel=found.max_parallel)
    served_by = _known_as_simulated(record_facts(served_by, metrics_url=metrics, api_key=api_key, behind=watch))
    used = metrics if watch is None else metrics_url
    return Endpoint(url=served_by.url, started=served_by, look=look, metrics_url=used, monitor=watch)


def _wait_until_ready(
    start: ServerStart, url: str, look: Callable[[bool], ServerStatus], log: LogFile, container: Container | None = None
) -> ReadyServer:
    def dead() -> ServerError | None:
        seen = look(False)
        return None if seen.death is None else containers.make_death_error(seen, log)

    def orphans() -> list[str]:
        return [] if container is None else list_orphans(container)

    waiting = StartupWatch(dead, log, start.server.startup_timeout_s, start.on_progress, orphans)
    return wait_ready(url, start.serving, start.model, waiting, api_key=start.api_key, key_name=start.key_name)


def find_reachable_address(location: EngineLocation, published_on: str) -> str | None:
    """The address at which this machine reaches what the engine publishes on an address; None: by an ssh tunnel."""
    address = location.reached_at(published_on)
    if address is None and not location.ssh:
        raise HarnessError(
            f"the Docker Engine is on {location.host} and publishes the server's port on {published_on}, "
            "which cannot be reached from here",
            next_step="Use an engine at ssh://USER@HOST, to which the harness opens a tunnel, or set the server's "
            "variable `publish` to 0.0.0.0 or to an address of that host, and write allow: [open-port] in the server.",
        )
    return resolve_host(location) if location.ssh and address == location.host else address


def _include_tunnel(
    broken: Callable[[], str | None], look: Callable[[bool], ServerStatus]
) -> Callable[[bool], ServerStatus]:
    """A look at a server and at the tunnel to it: a server that has ended is the reason, not what came of it."""

    def both(now: bool) -> ServerStatus:
        seen = look(now)
        problem = broken() if seen.death is None or seen.death.how == "unreachable" else None
        if problem is None:
            return seen
        return msgspec.structs.replace(seen, death=ServerDeath(how="unreachable", detail=problem))

    return both
