"""A server of a scenario, from its template to a model that answers, and down again."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import docker
import msgspec
from docker.models.containers import Container

from harness import redact
from harness.errors import HarnessError, ServerError
from harness.machine.gpus import gpus
from harness.process import signals_interrupt
from harness.rundir.manifest import ServedBy, ServerDeath
from harness.scenario.scenario import Scenario, Server
from harness.serve import ask
from harness.serve.ask import is_free
from harness.serve.compose.compose import GATEWAY, SERVER, ComposeFile, Service, Serving, filled_in
from harness.serve.compose.consent import allowed, refuse_without_consent
from harness.serve.compose.document import written
from harness.serve.compose.values import parse_port, url_of
from harness.serve.docker import containers, labels
from harness.serve.docker.containers import Look
from harness.serve.docker.daemon import connect
from harness.serve.docker.images import digest_of, ensure_image
from harness.serve.docker.location import EngineLocation, engine_location
from harness.serve.docker.over_ssh import address_of, tunnel
from harness.serve.embedded import arguments_of, embedded
from harness.serve.endpoint import Endpoint
from harness.serve.lemonade.api import Api
from harness.serve.lemonade.bring_up import attached
from harness.serve.lemonade.running import LemonadeMonitor, orphans_of
from harness.serve.logfile import LogFile
from harness.serve.ready import Ready, wait_ready
from harness.serve.recorded import recorded
from harness.serve.secrecy import secrets_in
from harness.serve.vllm.gpu_fit import refuse_unfit
from harness.serve.waiting import Phases, Waiting

MISSES = 3  # looks in a row at a server that already ran, in vain ...
_LOOK_S = 2.0  # ... which is looked at so often ...
_AGAIN_S = 0.3  # ... and again, after a look in vain


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
    server, compose = written(scenario, server_name, run_folder)
    if compose.serving.offline:
        raise HarnessError(f"the server '{server_name}' is an offline job, which answers nobody but `harness run`")
    log_path = run_folder / "logs" / f"{cell_id}.server.log"
    api_key = os.environ.get(scenario.api_key_env) if scenario.api_key_env else None
    # What the server got from the environment it may say again, in its log and in an error.
    redact.know(secrets_in(msgspec.to_builtins(compose), os.environ) | {api_key or "": True})
    started = _Start(server, compose, scenario.model, SERVER, log_path, api_key, scenario.api_key_env, on_progress)
    with signals_interrupt():
        if server.container:
            with _in_container(started, run_id, cell_id) as endpoint:
                yield endpoint
        else:
            with _as_process(started) as endpoint:
                yield endpoint


class _Start(msgspec.Struct, frozen=True):
    """What it takes to start a server, or the gateway in front of it."""

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
        return recorded(
            served,
            self.log_path,
            metrics_url=self.metrics_url(served.url),
            api_key=self.api_key,
            container=container,
            behind=behind,
        )


@contextlib.contextmanager
def _as_process(start: _Start) -> Iterator[Endpoint]:
    port = start.compose.serving.port
    url = f"http://127.0.0.1:{port}"
    if not is_free(port):
        raise _port_in_use(port)
    filled = filled_in(start.compose, os.environ)
    with embedded(filled.server, start.log_path) as (look, log):
        ready = _wait(start, url, look, log)
        served_by = ServedBy(
            url=url,
            template=start.server.template,
            simulated=True,
            version=ready.version,
            model=ready.model,
            arguments=arguments_of(start.compose.server),
            phases=ready.phases,
        )
        yield Endpoint(
            url=url,
            started=start.recorded(served_by),
            look=look,
            metrics_url=start.metrics_url(url),
        )


@contextlib.contextmanager
def _in_container(start: _Start, run_id: str, cell_id: str) -> Iterator[Endpoint]:
    owner = labels.owned(run_id, cell_id)
    filled = filled_in(start.compose, os.environ)  # a variable that is not set is noticed before a long pull
    refuse_without_consent(start.server, start.compose)
    if start.serving.vllm and engine_location().is_here:
        refuse_unfit(filled.server, list(gpus()))
    client = connect()
    logs = [LogFile(start.log_path)]
    torn_down = containers.torn_down(client, start.compose, owner, logs, start.on_progress)
    with torn_down, contextlib.ExitStack() as tunnels:
        server = _bring_up(start, filled, client, owner, logs[0], tunnels)
        if start.compose.serving.gateway is None:
            yield server
        else:
            log_path = start.log_path.with_suffix("").with_suffix(".gateway.log")
            gateway = msgspec.structs.replace(start, name=GATEWAY, log_path=log_path)
            logs.append(LogFile(gateway.log_path))
            yield _in_front(_bring_up(gateway, filled, client, owner, logs[1], tunnels), server)


def _bring_up(
    start: _Start,
    filled: ComposeFile,
    client: docker.DockerClient,
    owner: dict[str, str],
    log: LogFile,
    tunnels: contextlib.ExitStack,
) -> Endpoint:
    """A server that is ready, or its gateway; a tunnel to it is left to `tunnels`. Raises ServerError."""
    # The secrets of `start.service` are still names; `filled` goes to the engine and nowhere else.
    service = filled.services[start.name]
    port = parse_port(service.ports[0])
    location = engine_location()
    address = reached(location, port.address)
    phases = Phases()
    image = ensure_image(client, service.image, start.on_progress)
    if start.name == SERVER:
        for name in filled.preparations:
            ensure_image(client, filled.services[name].image, start.on_progress)
    phases.done("pull")
    start.on_progress(f"starting the {start.name}'s container")
    if start.name == SERVER:
        containers.prepare(client, filled, owner)
    container = containers.start(client, filled, start.name, owner)
    phases.done("create")
    containers.follow_log(container, log)
    look = containers.watcher(container, log)
    host_port = containers.host_port(container, port)
    if host_port is None:
        raise containers.death_error(look(True), log)
    if address is None:
        start.on_progress(f"opening an ssh tunnel to the {start.name} on {location.host}")
        local, broken = tunnels.enter_context(tunnel(location, port.address, host_port))
        url, look = url_of("127.0.0.1", local), _through(broken, look)
    else:
        url = url_of(address, host_port)
    # What is asked of the server is filled in, too.
    asking = msgspec.structs.replace(start, compose=msgspec.structs.replace(start.compose, serving=filled.serving))
    ready = _wait(asking, url, look, log, container)
    loaded = ready.brought_up
    watch = None if loaded is None else LemonadeMonitor(Api(url, start.api_key), ready.model, log, container)
    container.reload()
    served_by = ServedBy(
        url=url,
        template=start.serving.template,
        simulated=start.serving.simulated,
        image=start.service.image,
        image_digest=digest_of(image),
        container=containers.inspected(container, start.compose, start.service),
        version=ready.version,
        model=ready.model,
        over_ssh=address is None,
        arguments=[*(start.service.entrypoint or []), *(start.service.command or [])],
        most_at_once=None if loaded is None else loaded.most_at_once,
        notes=[*([] if loaded is None else loaded.notes), *(allowed(start.compose) if start.name == SERVER else [])],
        phases=phases.all + ready.phases,
    )
    started = _known_as_simulated(start.recorded(served_by, container, watch))
    return Endpoint(
        url=url,
        started=started,
        look=look,
        metrics_url=start.metrics_url(url),
        network=containers.network_name(owner),
        network_url=f"http://{start.name}:{port.container}",
        container=container,
        fetch_metrics=None if watch is None else watch.metrics,
        find_problems=None if watch is None else watch.problems,
        ask_engine=None if watch is None else watch.fetch,
    )


def _known_as_simulated(served: ServedBy) -> ServedBy:
    return msgspec.structs.replace(served, simulated=served.simulated or "simulated" in (served.version or ""))


def _in_front(gateway: Endpoint, server: Endpoint) -> Endpoint:
    """What takes the load is the gateway; what works, has metrics and may die is the server, too."""

    def look(now: bool) -> Look:
        behind = server.look(now)
        if behind.death is not None:
            return behind
        front = gateway.look(now)
        return behind if front.death is None else Look(msgspec.structs.replace(front.death, of_gateway=True))

    started = msgspec.structs.replace(
        server.started, url=gateway.url, model=gateway.started.model, gateway=gateway.started
    )
    return msgspec.structs.replace(server, url=gateway.url, network_url=gateway.network_url, started=started, look=look)


def attach(
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
    found = attached(ask.base_url(url), model, api_key)  # Lemonade's models have two names
    served_by = ask.attach(url, model if found is None else found.model, api_key, key_name=key_name)
    watch = None if found is None else LemonadeMonitor(Api(served_by.url, api_key), found.model, None, None)
    parts = urlsplit(served_by.url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    last, looked_at, misses = Look(), time.monotonic(), 0

    def look(now: bool) -> Look:
        nonlocal last, looked_at, misses
        while last.death is None and (now or time.monotonic() - looked_at > (_AGAIN_S if misses else _LOOK_S)):
            looked_at = time.monotonic()
            # A full listen queue can refuse one connection of a server that lives.
            misses = 0 if ask.listens(host, port) else misses + 1
            if misses >= MISSES:  # the parts of a mix may look at the same time
                last = Look(ServerDeath(how="closed", detail=served_by.url))
            elif not now or not misses:
                break
            else:
                time.sleep(_AGAIN_S)
        return last

    metrics = metrics_url or ask.metrics_url(served_by.url, api_key)
    if found is not None:
        served_by = msgspec.structs.replace(served_by, version=found.version, most_at_once=found.most_at_once)
    served_by = _known_as_simulated(recorded(served_by, metrics_url=metrics, api_key=api_key, behind=watch))
    return Endpoint(
        url=served_by.url,
        started=served_by,
        look=look,
        metrics_url=metrics,
        fetch_metrics=None if watch is None or metrics_url is not None else watch.metrics,
        find_problems=None if watch is None else watch.problems,
        ask_engine=None if watch is None else watch.fetch,
    )


def _wait(
    start: _Start, url: str, look: Callable[[bool], Look], log: LogFile, container: Container | None = None
) -> Ready:
    def dead() -> ServerError | None:
        seen = look(False)
        return None if seen.death is None else containers.death_error(seen, log)

    def orphans() -> list[str]:
        return [] if container is None else orphans_of(container)

    waiting = Waiting(dead, log, start.server.startup_timeout_s, start.on_progress, orphans)
    return wait_ready(url, start.serving, start.model, waiting, api_key=start.api_key, key_name=start.key_name)


def reached(location: EngineLocation, published_on: str) -> str | None:
    """The address at which this machine reaches what the engine publishes on an address; None: by an ssh tunnel."""
    address = location.reached_at(published_on)
    if address is None and not location.ssh:
        raise HarnessError(
            f"the Docker Engine is on {location.host} and publishes the server's port on {published_on}, "
            "which cannot be reached from here",
            next_step="Use an engine at ssh://USER@HOST, to which the harness opens a tunnel, or set the server's "
            "variable `publish` to 0.0.0.0 or to an address of that host, and write allow: [open-port] in the server.",
        )
    return address_of(location) if location.ssh and address == location.host else address


def _through(broken: Callable[[], str | None], look: Callable[[bool], Look]) -> Callable[[bool], Look]:
    """A look at a server and at the tunnel to it: a server that has ended is the reason, not what came of it."""

    def both(now: bool) -> Look:
        seen = look(now)
        problem = broken() if seen.death is None or seen.death.how == "unreachable" else None
        if problem is None:
            return seen
        return msgspec.structs.replace(seen, death=ServerDeath(how="unreachable", detail=problem))

    return both


def _port_in_use(port: int) -> ServerError:
    return ServerError(
        f"port {port} is in use already",
        next_step="Leave host_port out to get a free one, or stop what uses it "
        f"(ss -ltnp 'sport = :{port}'); `harness clean` removes leftovers of earlier runs.",
    )
