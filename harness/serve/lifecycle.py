"""Start a server as a container or a process, or attach to one that already runs."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker
import msgspec
import psutil
import requests
from docker.models.containers import Container
from msgspec import Struct
from msgspec.structs import replace

from harness.base import process, redact
from harness.base.errors import HarnessError, ServerError, StartError
from harness.base.https import MAX_ANSWER_S, open_session
from harness.base.process import is_loopback, is_port_free, pause, signals_interrupt
from harness.base.reason import Reason, sentence
from harness.engines.flags import replace_value, without_options
from harness.failures.diagnosis import ExitState, explain
from harness.failures.unexpected_response import error_message
from harness.machine.gpus import find_engine_processes
from harness.machine.telemetry import cgroup_files, server_tasks, telemetry_root
from harness.records.manifest import ServedBy, ServerDeath
from harness.scenario import Load, Scenario, Server, models_of_loads
from harness.serve import compose_file, containers, probe
from harness.serve.compiled import (
    compiled_folders,
    folder_sizes,
    make_volumes,
    owner_of,
    process_folder,
    size_of_folder,
    with_own_volumes,
    without_run_names,
)
from harness.serve.compose_file import GATEWAY, SERVER, ComposeFile, LoadCall, Service, Serving
from harness.serve.containers import LogFile, ServerStatus, StatusReader
from harness.serve.docker_engine import RUN_LABEL, connect, ensure_image, get_digest, make_labels
from harness.serve.facts import record_facts
from harness.serve.lemonade import (
    Api,
    LemonadeMonitor,
    LemonadeState,
    bare_name,
    bring_up_model,
    describe_loaded_model,
    direct_note,
    find_model,
    find_running_model,
    get_health,
)
from harness.serve.probe import PhaseTimer, Post, StartupWatch
from harness.serve.security import collect_secrets, make_access_notes, require_consent
from harness.serve.template import COMPILE_CACHE, process_words, write_compose_file
from harness.workload.job import read_api_key

_FIRST_REPORT_S, _REPORT_EVERY_S = 5.0, 60.0  # of a wait
_CHECK_INTERVAL_S = 2.0  # of a server that already ran
MAX_MISSES, _RETRY_INTERVAL_S = 3, 0.3  # a full listen queue can refuse one connection of a server that lives


class Endpoint(Struct, frozen=True, kw_only=True):
    """A server that answers."""

    started: ServedBy  # as it was when it became ready
    read_status: StatusReader
    metrics_url: str | None = None
    monitor: LemonadeMonitor | None = None  # of the engine behind Lemonade
    counting_url: str | None = None  # of the engine, if only its own stream of Anthropic's API has token counts
    network: str | None = None  # Docker network of the server's container
    network_url: str | None = None  # as a container in that network reaches it
    container: Container | None = None  # of the server itself; None: a process, or a server that already ran

    @property
    def url(self) -> str:
        """The server's address as this host reaches it, without a slash at the end."""
        return self.started.url

    def url_of(self, loads: Sequence[Load]) -> str:
        """Return the address that gets the requests of these loads."""
        is_counted = all(load.endpoint == "messages" for load in loads)
        return self.counting_url if self.counting_url is not None and is_counted else self.url

    @property
    def served_by(self) -> ServedBy:
        """The server's facts until now, with restarts, OOM kills and an early end."""
        status = self.read_status(True)
        return replace(
            self.started,
            restarts=status.restarts,
            oom_killed=status.oom_killed,
            exit_code=None if status.death is None or status.death.of_gateway else status.death.exit_code,
            death=status.death,
        )

    @property
    def metrics_source(self) -> str | Callable[[], str] | None:
        """The address of its metrics, or a function that returns their text."""
        return self.metrics_url if self.metrics_url is not None or self.monitor is None else self.monitor.metrics

    @property
    def ask_engine(self) -> Callable[[str, dict[str, Any]], str] | None:
        """A function that posts to the engine behind Lemonade and returns its text, empty without an answer."""
        return None if self.monitor is None else self.monitor.fetch

    def state(self) -> LemonadeState | None:
        """Return what `problems` compares with; None for a server without a monitor."""
        return None if self.monitor is None else self.monitor.state()

    def problems(self, before: LemonadeState | None) -> list[Reason]:
        """Return why measurements since `before` cannot be trusted; empty for a dead server."""
        if self.monitor is None or before is None or self.check_alive() is not None:
            return []
        return self.monitor.problems(before)

    def death(self, now: bool = False) -> ServerDeath | None:
        return self.read_status(now).death

    def check_alive(self) -> Reason | None:
        """Return why the load must end; None while the server lives. Cheap, so call it often."""
        death = self.death()
        return None if death is None else death.problem()


def is_this_machine(host: str) -> bool:
    """Check that a host name or address is this machine's own name or a loopback address."""
    return host in ("", socket.gethostname()) or is_loopback(host)


def find_telemetry_files(endpoint: Endpoint) -> list[str] | None:
    """Return the files of a server's container to sample next to this machine's; None: it is on another machine."""
    container = endpoint.container
    if container is None:
        return [] if is_this_machine(urlsplit(endpoint.url).hostname or "") else None
    pid = int(container.attrs["State"].get("Pid") or 0)
    files = cgroup_files(telemetry_root(), pid, str(container.id))
    if files and container.attrs["HostConfig"].get("NetworkMode") != "host":  # else it counts for all programs
        files.append(f"proc/{pid}/net/netstat")
    return files


def find_server_pid(endpoint: Endpoint) -> int | None:
    """Return the first process of a server; None: not known, as behind a proxy or on another machine."""
    root, url = telemetry_root(), urlsplit(endpoint.url)
    if endpoint.container is not None:
        pid = int(endpoint.container.attrs["State"].get("Pid") or 0)
        return pid if cgroup_files(root, pid, str(endpoint.container.id)) else None
    if not is_this_machine(url.hostname or "") or endpoint.started.gateway is not None:
        return None
    try:
        sockets = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    pids = [sock.pid for sock in sockets if sock.status == psutil.CONN_LISTEN and sock.laddr and sock.pid is not None
            and sock.laddr.port == (url.port or 80)]  # fmt: skip
    if not pids or endpoint.started.template is not None:  # a process of the harness
        return min(pids, default=None)
    # Another program may listen for a server that ran already, such as Docker's proxy: its processes are not known.
    tasks = server_tasks(root, min(pids))
    return min(pids) if any(process.pid in tasks for process in find_engine_processes(root)) else None


class ServerStart(Struct, frozen=True):
    """Everything that is needed to start a server, or the gateway in front of it."""

    server: Server
    compose: ComposeFile  # in which secrets are only names
    model: str
    log: LogFile
    labels: dict[str, str]  # of its containers
    api_key: str | None
    key_name: str | None  # the environment variable that has the API key
    on_progress: Callable[[str], None]
    name: str = SERVER  # of the service
    owner: str = ""  # the server that fills what this one finds compiled
    run_folder: Path = Path()

    @property
    def service(self) -> Service:
        return self.compose.services[self.name]

    @property
    def serving(self) -> Serving:
        gateway = self.compose.serving.gateway
        return gateway if self.name == GATEWAY and gateway is not None else self.compose.serving

    def metrics_url(self, url: str) -> str | None:
        return None if self.serving.metrics is None else url + self.serving.metrics

    def record_facts(
        self, served: ServedBy, container: Container | None = None, monitor: LemonadeMonitor | None = None
    ) -> ServedBy:
        """Return `served` with the settings that the server reports."""
        return record_facts(
            served,
            self.log.path,
            metrics_url=self.metrics_url(served.url),
            api_key=self.api_key,
            container=container,
            monitor=monitor,
        )


def prepare_start(
    scenario: Scenario, server_name: str, run_id: str, cell_id: str, run_folder: Path, say: Callable[[str], None]
) -> ServerStart:
    """Write the server's Compose file into the run directory, and register its secrets."""
    prepared = write_compose_file(scenario, server_name, run_folder)
    log = LogFile(run_folder / "logs" / f"{cell_id}.server.log")
    # A server may repeat what it got from the environment, in its log or in an error.
    redact.register_secrets(collect_secrets(msgspec.to_builtins(prepared.file), os.environ))
    labels, key_name = make_labels(run_id, cell_id), scenario.api_key_env
    key, file = read_api_key(key_name), prepared.file
    if (lemonade := file.serving.lemonade) is not None:
        others = [name for name in models_of_loads(scenario) if bare_name(name) != bare_name(lemonade.model)]
        file = replace(file, serving=replace(file.serving, lemonade=replace(lemonade, others=others)))
    owner = owner_of(server_name, prepared.server)
    if prepared.server.caches is not None:
        file = with_own_volumes(file, run_id, owner)
    return ServerStart(
        prepared.server, file, scenario.model, log, labels, key, key_name, say, owner=owner, run_folder=run_folder
    )


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
    """Start a server, wait until its model answers, and remove it at the end, also after an error or a signal.

    Writes compose/SERVER.yaml and logs/CELL.server.log into the run directory. SIGTERM and SIGHUP act like Ctrl-C.
    Raises ServerError if the server does not become ready, HarnessError for an unusable template or variable.
    """
    start = prepare_start(scenario, server_name, run_id, cell_id, run_folder, on_progress)
    if start.serving.offline:
        raise HarnessError(f"the server '{server_name}' is an offline job: only `harness run` can use it")
    running = _serve_container(start) if start.server.container else _serve_process(start)
    with signals_interrupt(), running as endpoint:
        yield endpoint


@contextlib.contextmanager
def _serve_process(start: ServerStart) -> Iterator[Endpoint]:
    """Run the embedded engine: the command of the service, as a process of this host that ends with the harness."""
    port = start.compose.serving.port
    url = f"http://127.0.0.1:{port}"
    if not is_port_free(port):
        raise ServerError(
            f"port {port} is in use already",
            next_step="Leave host_port out to get a free one, or stop what uses it "
            f"(ss -ltnp 'sport = :{port}'); `harness clean` removes leftovers of earlier runs.",
        )
    service = compose_file.fill_variables(start.compose, os.environ).server
    command = [sys.executable, *replace_value(process_words(service)[1:], "--host", "127.0.0.1")]
    compiled = None if start.server.caches is None else process_folder(start.run_folder, start.server, start.owner)
    command += [] if compiled is None else [COMPILE_CACHE, str(compiled)]
    before = None if compiled is None else size_of_folder(compiled)
    # For the manifest, without the address.
    arguments = without_options(start.compose.server.command or [], "--host", "--port")
    log = start.log
    environment = {**os.environ, **service.environment}
    try:
        child = process.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    except OSError as error:
        raise ServerError(f"the embedded engine cannot be started: {error}") from None
    assert child.stdout is not None
    output = child.stdout.fileno()
    log.follow(lambda: containers.with_time_stamps(iter(lambda: os.read(output, 65536), b"")))

    def read_status(_now: bool) -> ServerStatus:
        code = child.poll()
        return ServerStatus() if code is None else containers.status_at_end(ExitState(exit_code=code), log)

    try:
        ready = _wait_until_ready(start, url, read_status)
        served = replace(ready, template=start.server.template, simulated=True, arguments=arguments)
        if compiled is not None and before is not None:
            now = {folder: size_of_folder(compiled) for folder in start.serving.compiled}
            folders = compiled_folders(start.serving.compiled, dict.fromkeys(now, before), now)
            served = replace(served, compiled=folders)
        metrics_url = start.metrics_url(url)
        yield Endpoint(started=start.record_facts(served), read_status=read_status, metrics_url=metrics_url)
    finally:
        process.stop(child)
        log.wait_for_end()
        child.stdout.close()


@contextlib.contextmanager
def cell_engine(start: ServerStart, logs: list[LogFile]) -> Iterator[docker.DockerClient]:
    """Connect to the Docker Engine, and remove the cell's containers at the end. Raises HarnessError."""
    require_consent(start.server, start.compose)
    client = connect()
    with containers.removed_at_exit(client, start.compose, start.labels, logs, start.on_progress):
        yield client


def start_service(
    start: ServerStart, client: docker.DockerClient, filled: ComposeFile
) -> tuple[Container, ServedBy, StatusReader]:
    """Pull the image and start the container of a service. Return it with the facts that are known of it yet.

    `filled` has its variables filled in, so it holds secrets: only the engine may get it. Raises ServerError.
    """
    names = [start.name, *(filled.preparations if start.name == SERVER else [])]
    timer = PhaseTimer()
    images = [ensure_image(client, filled.services[name].image, start.on_progress) for name in names]
    timer.finish("pull")
    start.on_progress(f"starting the {start.name}'s container")
    if start.name == SERVER:
        if start.server.caches is not None:
            make_volumes(client, start.compose, start.server, start.labels, start.labels[RUN_LABEL], start.owner)
        containers.create_network_and_volumes(client, filled, start.labels)
    container = containers.start_container(client, filled, start.name, start.labels)
    timer.finish("create")
    containers.follow_log(container, start.log)
    service = start.service
    description = containers.describe_container(container, start.compose, service)
    if start.server.caches is not None and start.name == SERVER:
        description = without_run_names(description, start.compose, start.owner)
    served = ServedBy(
        url="",
        template=start.serving.template,
        simulated=start.serving.simulated,
        image=service.image,
        image_digest=get_digest(images[0]),
        container=description,
        arguments=[*(service.entrypoint or []), *(service.command or [])],
        notes=make_access_notes(start.compose) if start.name == SERVER else [],
        phases=timer.phases,
    )
    return container, served, containers.make_status_reader(container, start.log)


@contextlib.contextmanager
def _serve_container(start: ServerStart) -> Iterator[Endpoint]:
    filled = compose_file.fill_variables(start.compose, os.environ)  # a missing variable is an error before a long pull
    logs = [start.log]
    with cell_engine(start, logs) as client:
        server = _start_and_wait(start, client, filled)
        if start.compose.serving.gateway is None:
            yield server
        else:
            logs.append(LogFile(start.log.path.with_suffix("").with_suffix(".gateway.log")))
            gateway = _start_and_wait(replace(start, name=GATEWAY, log=logs[-1]), client, filled)
            yield _join_gateway(gateway, server)


def _start_and_wait(start: ServerStart, client: docker.DockerClient, filled: ComposeFile) -> Endpoint:
    """Start the server or its gateway, and wait until it is ready. Raises ServerError."""
    container, created, read_status = start_service(start, client, filled)
    folders = start.serving.compiled if start.server.caches is not None and start.name == SERVER else []
    before = folder_sizes(container, folders)
    port = compose_file.parse_port(filled.services[start.name].ports[0])
    host_port = containers.find_host_port(container, port)
    if host_port is None:
        raise containers.make_death_error(read_status(True), start.log)
    url = compose_file.make_url(port.address, host_port)
    filled_start = replace(start, compose=replace(start.compose, serving=filled.serving))
    ready = _wait_until_ready(filled_start, url, read_status)
    monitor = None
    if start.serving.lemonade is not None:
        assert ready.model is not None
        several = bool(start.serving.lemonade.others)
        monitor = LemonadeMonitor(Api(url, start.api_key), ready.model, container, several=several)
    container.reload()
    served = replace(
        created,
        url=url,
        version=ready.version,
        model=ready.model,
        max_parallel=ready.max_parallel,
        phases=created.phases + ready.phases,
        compiled=compiled_folders(folders, before, folder_sizes(container, folders)),
    )
    return Endpoint(
        started=_mark_simulated(start.record_facts(served, container, monitor)),
        read_status=read_status,
        metrics_url=start.metrics_url(url) if monitor is None else None,
        monitor=monitor,
        network=containers.network_name(start.labels),
        network_url=f"http://{start.name}:{port.container}",
        container=container,
    )


def _mark_simulated(served: ServedBy) -> ServedBy:
    return replace(served, simulated=served.simulated or "simulated" in (served.version or ""))


def _join_gateway(gateway: Endpoint, server: Endpoint) -> Endpoint:
    """Return the server with the gateway's address: the gateway takes the load, and both of them may die."""

    def read_status(now: bool) -> ServerStatus:
        status = server.read_status(now)
        if status.death is not None:
            return status
        death = gateway.read_status(now).death
        return status if death is None else ServerStatus(replace(death, of_gateway=True))

    started = replace(server.started, url=gateway.url, model=gateway.started.model, gateway=gateway.started)
    return replace(server, network_url=gateway.network_url, started=started, read_status=read_status)


@contextlib.contextmanager
def reported(what: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Report what is waited for after some seconds, and then once a minute, as a log has it."""
    ended = threading.Event()

    def report() -> None:
        start, pause_s = time.monotonic(), _FIRST_REPORT_S
        while not ended.wait(pause_s):
            pause_s = _REPORT_EVERY_S
            on_wait(f"waiting for {what}: {time.monotonic() - start:.0f} s")

    threading.Thread(target=report, name="reporting a wait", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def choose_model(
    base: str,
    api_key: str | None,
    key_name: str | None,
    model: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Return `model`, or the chat model that a running server has loaded, else the first one that it lists.

    `say` gets a line if a request will load it. Raises ServerError, also where the server lacks `model`, and
    HarnessError if several models are loaded.
    """
    if model is not None:
        refuse_absent_models(base, [model], api_key, key_name, lambda line: None)
        return model
    with open_session(api_key) as session:
        return probe.find_model(base, None, session, key_name, say)


def refuse_absent_models(
    url: str,
    models: Sequence[str],
    api_key: str | None,
    key_name: str | None,
    on_wait: Callable[[str], None],
) -> None:
    """Raise ServerError if a running server does not have one of the models, the first of which may not be loaded."""
    with reported(f"the models of {url}", on_wait):
        base = probe.parse_base_url(url)
        api = Api(base, api_key)
        if get_health(api, timeout_s=probe.PROBE_TIMEOUT_S) is not None:
            if isinstance(listed := find_model(api, models[0]), ServerError):
                raise listed
            models = models[1:]  # a Lemonade lists only what it has downloaded
        probe.retry(lambda: probe.require_models(base, models, api_key, key_name))


def inspect_server(
    url: str,
    model: str,
    api_key: str | None = None,
    *,
    key_name: str | None = None,
    on_wait: Callable[[str], None] = lambda line: None,
    others: Sequence[str] = (),
) -> ServedBy:
    """Return what a server that already runs reports of itself and of `model`, by GET requests: it generates nothing
    and loads nothing.

    Of a Lemonade that has not loaded the model, no settings are known. Raises ServerError if it lacks a model.
    """
    refuse_absent_models(url, [model, *others], api_key, key_name, on_wait)
    base = probe.parse_base_url(url)
    api = Api(base, api_key)
    with reported(f"the metrics and settings of {url}", on_wait):
        health = get_health(api, timeout_s=probe.PROBE_TIMEOUT_S)
        if health is None:
            metrics_url = probe.find_metrics_url(base, api_key, model)
            return record_facts(ServedBy(url=base, model=model), metrics_url=metrics_url, api_key=api_key)
        if (running := health.find(model)) is None:
            return ServedBy(url=base, model=model)
        served = describe_loaded_model(api, model, running, health.version)
        return record_facts(served, api_key=api_key, monitor=LemonadeMonitor(api, served.model or model, None))


def attach_to_server(
    url: str,
    model: str | None,
    api_key: str | None = None,
    *,
    key_name: str | None = None,
    metrics_url: str | None = None,
    on_wait: Callable[[str], None] = lambda line: None,
    others: Sequence[str] = (),
    messages: bool = False,
) -> Endpoint:
    """Return the endpoint of a server that already runs. `key_name`: the environment variable that has the API key.

    `messages`: a load uses Anthropic's API, so it matters whether its stream counts tokens.

    `model`: None takes the one that is loaded, or the first. `others`: models that it must have, too. `on_wait` is
    called in another thread, with what is waited for, if that takes seconds.
    Raises ServerError if the model does not answer.
    """
    with reported(f"the first answer of {url} (at most {MAX_ANSWER_S:g} s)", on_wait):
        loaded = find_running_model(probe.parse_base_url(url), model, api_key)  # its models have two names
        served = probe.probe_running_server(url, model if loaded is None else loaded.model, api_key, key_name=key_name)
        probe.require_models(served.url, others, api_key, key_name)
    several = any(bare_name(name) != bare_name(served.model or "") for name in others)
    with reported(f"the metrics and settings of {url}", on_wait):
        one_model = None if several else served.model
        own_metrics_url = metrics_url or probe.find_metrics_url(served.url, api_key, one_model)
        if metrics_url is not None and urlsplit(metrics_url).netloc != urlsplit(served.url).netloc:
            served = replace(served, metrics_url=metrics_url)
        if loaded is None:
            monitor, metrics_url = None, own_metrics_url
        else:
            assert served.model is not None
            monitor = LemonadeMonitor(Api(served.url, api_key), served.model, None, several=several)
            served = replace(served, version=loaded.version, max_parallel=loaded.max_parallel)
        served = _mark_simulated(record_facts(served, metrics_url=own_metrics_url, api_key=api_key, monitor=monitor))
    counting_url = monitor.counting_url() if monitor is not None and messages else None
    if counting_url is not None:
        note = direct_note(counting_url)
        on_wait(f"note: {sentence(note)}")
        served = replace(served, notes=[*served.notes, note])
    return Endpoint(
        started=served,
        read_status=_port_status(served.url),
        metrics_url=metrics_url,
        monitor=monitor,
        counting_url=counting_url,
    )


def _port_status(url: str) -> StatusReader:
    """Return a function that checks whether a server that already ran still accepts connections."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    last, checked_s = ServerStatus(), time.monotonic()

    def read_status(now: bool) -> ServerStatus:
        nonlocal last, checked_s
        if last.death is None and (now or time.monotonic() - checked_s > _CHECK_INTERVAL_S):
            checked_s = time.monotonic()
            for _ in range(MAX_MISSES):
                if probe.accepts_connections(host, port):
                    return last
                time.sleep(_RETRY_INTERVAL_S)
            last = ServerStatus(ServerDeath(how="closed", detail=url))
        return last

    return read_status


def _wait_until_ready(start: ServerStart, url: str, read_status: StatusReader) -> ServedBy:
    def find_death() -> ServerError | None:
        status = read_status(False)
        return None if status.death is None else containers.make_death_error(status, start.log)

    watch = StartupWatch(find_death, start.log, start.server.startup_timeout_s, start.on_progress)
    return wait_ready(url, start.serving, start.model, watch, api_key=start.api_key, key_name=start.key_name)


def wait_ready(
    url: str,
    serving: Serving,
    model: str,
    watch: StartupWatch,
    *,
    api_key: str | None = None,
    key_name: str | None = None,
) -> ServedBy:
    """Wait until `model` at `url` has given one real answer; return its facts and the phases of this wait.

    `key_name`: the environment variable that has the API key. The phases are "port open", "health", ("model", "load",)
    "first answer"; without a gap between them. Raises ServerError when the server dies, is not ready in time, or is not
    an OpenAI-compatible API.
    """
    timer = PhaseTimer(watch.on_progress)
    deadline = time.monotonic() + watch.timeout_s
    with open_session(api_key) as session:
        post = partial(_post_until_answered, watch, deadline, api_key)
        _wait_for_http(session, url + serving.health, deadline, watch, key_name, healthy=False)
        timer.finish("port open")
        _wait_for_http(session, url + serving.health, deadline, watch, key_name, healthy=True)
        timer.finish("health")
        served = ServedBy(url=url, model=model)
        if serving.lemonade is not None:
            served = bring_up_model(Api(url, api_key), serving.lemonade, watch, deadline, timer)
        if serving.load is not None:
            _load_model(url, serving.load, model, post, watch, timer)
        try:
            model, version = probe.request_first_answer(url, served.model, session, post, key_name)
        except ServerError as error:
            refused = StartError(error.what, next_step=error.next_step, detail=error.detail)
            raise watch.find_death() or refused from None
        timer.finish("first answer")
        version = served.version or probe.get_version(url, session, serving.version) or version
        return replace(served, model=model, version=version, phases=timer.phases)


def _load_model(url: str, load: LoadCall, model: str, post: Post, watch: StartupWatch, timer: PhaseTimer) -> None:
    """Let the server load its model, and fetch it first if the server does not have it. Raises ServerError."""
    response, verb = post(url + load.path, load.body), "load"
    if response.status_code == 404 and load.fetch is not None:
        response, verb = post(url + load.fetch.path, load.fetch.body), "get"
        if response.status_code == 200:
            timer.finish("model")
            response, verb = post(url + load.path, load.body), "load"
    if response.status_code != 200:
        what = f"the server could not {verb} '{model}': HTTP {response.status_code}"
        raise containers.make_load_error(what, error_message(response.content), watch.log)
    timer.finish("load")


def _wait_for_http(
    session: requests.Session, url: str, deadline: float, watch: StartupWatch, key_name: str | None, *, healthy: bool
) -> None:
    """Wait for any answer; with `healthy`, for status 200."""
    last_seen = "nothing listens there"
    reported_s = time.monotonic()
    while True:
        if (death := watch.find_death()) is not None:
            raise death
        if time.monotonic() - reported_s >= probe.REPORT_EVERY_S:
            reported_s = time.monotonic()
            remaining = f"at most {deadline - reported_s:.0f} s more"
            watch.on_progress(f"waiting for the server, {remaining}: {watch.log.last_line()}")
        try:
            with session.get(url, timeout=probe.PROBE_TIMEOUT_S) as response:
                if response.status_code == 200 or not healthy:
                    return
                if response.status_code in (401, 403):
                    probe.require_api(response, url, key_name)
                last_seen = f"HTTP {response.status_code}"
        except requests.RequestException as error:
            last_seen = probe.explain_connection_error(error)  # Docker's proxy resets it while no server listens
        if time.monotonic() > deadline:
            raise _timeout_error(url, last_seen, watch)
        pause(probe.POLL_S)


def _timeout_error(url: str, last_seen: str, watch: StartupWatch) -> ServerError:
    failure = explain(watch.log.path)
    hint = f" Its log has a hint: {failure.cause}; {failure.fix}." if failure is not None else ""
    what = f"the server did not become ready within {watch.timeout_s:g} s; last seen at GET {url}: {last_seen}"
    step = "Look at its last lines; if it only needs longer, raise startup_timeout_s in the scenario."
    return containers.make_start_error(what, watch.log, failure, step + hint)


def _post_until_answered(
    watch: StartupWatch, deadline: float, api_key: str | None, url: str, body: dict[str, Any]
) -> requests.Response:
    """POST, and again while the server is busy (429, 503), until the deadline."""

    def post() -> requests.Response:
        with open_session(api_key) as session:
            timeout_s = max(1.0, deadline - time.monotonic())
            return session.post(url, json=body, timeout=timeout_s, allow_redirects=False)

    while True:
        try:
            answer = probe.run_watched(post, watch, deadline + 1, ["asking for the model"])
        except requests.RequestException as error:
            what = f"the server gave no answer to POST {url} ({probe.explain_connection_error(error)})"
            broken = ServerError(what, next_step="Look at its last lines.", detail=watch.log.tail())
            raise watch.find_death() or broken from None
        if answer.status_code not in (429, 503) or time.monotonic() > deadline:
            return answer
        pause(probe.POLL_S)
