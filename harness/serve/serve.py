"""A server of a scenario, from its template to a model that answers, and down again."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import docker
import msgspec

from harness.errors import HarnessError, ServerError
from harness.manifest import Phase, ServedBy
from harness.process import sigterm_interrupts
from harness.scenario import Scenario, Server
from harness.serve import ask, containers, labels
from harness.serve.compose import ComposeFile, filled_in, parse
from harness.serve.containers import Look
from harness.serve.daemon import connect, engine_host
from harness.serve.document import rendered, server_of
from harness.serve.embedded import arguments_of, embedded
from harness.serve.endpoint import Endpoint
from harness.serve.images import digest_of, ensure_image
from harness.serve.logfile import LogFile
from harness.serve.ports import is_free
from harness.serve.ready import Ready, Waiting, wait_ready
from harness.serve.secrecy import secrets_in
from harness.serve.values import parse_port, parse_seconds

MISSES = 3  # looks in a row at a server that already ran


def _silent(_line: str) -> None:
    """No progress is shown."""


@contextlib.contextmanager
def serve(
    scenario: Scenario,
    server_name: str,
    *,
    run_id: str,
    cell_id: str,
    run_folder: Path,
    model: str | None = None,
    on_progress: Callable[[str], None] = _silent,
) -> Iterator[Endpoint]:
    """Start a server, wait until its model answers, and take it down at the end, however that comes.

    Writes compose/SERVER.yaml and logs/CELL.server.log into the run directory. SIGTERM ends it like Ctrl-C.
    Raises ServerError when it does not become ready, HarnessError for a template or variable that cannot be used.
    """
    server = server_of(scenario, server_name)
    model = model or scenario.model
    text = rendered(server, model)
    compose = parse(text)
    (run_folder / "compose").mkdir(parents=True, exist_ok=True)
    (run_folder / "compose" / f"{server_name}.yaml").write_text(text, encoding="utf-8")
    log_path = run_folder / "logs" / f"{cell_id}.server.log"
    api_key = os.environ.get(scenario.api_key_env) if scenario.api_key_env else None
    started = _Start(server, compose, model, log_path, api_key, scenario.api_key_env, on_progress)
    with sigterm_interrupts():
        if server.container:
            with _in_container(started, run_id, cell_id) as endpoint:
                yield endpoint
        else:
            with _as_process(started) as endpoint:
                yield endpoint


class _Start(msgspec.Struct, frozen=True):
    """What both ways of starting need."""

    server: Server
    compose: ComposeFile
    model: str
    log_path: Path
    api_key: str | None
    key_name: str | None
    on_progress: Callable[[str], None]

    def secrets(self) -> list[str]:
        """What must not get into the log."""
        keys = [self.api_key] if self.api_key else []
        return [*keys, *secrets_in(msgspec.to_builtins(self.compose), os.environ)]


@contextlib.contextmanager
def _as_process(start: _Start) -> Iterator[Endpoint]:
    port = start.compose.serving.port
    url = f"http://127.0.0.1:{port}"
    if not is_free(port):
        raise _port_in_use(port)
    filled = filled_in(start.compose, os.environ)
    with embedded(filled.server, start.log_path, start.secrets()) as (look, log):
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
        yield Endpoint(url=url, started=served_by, look=look, metrics_url=_metrics(start, url))


@contextlib.contextmanager
def _in_container(start: _Start, run_id: str, cell_id: str) -> Iterator[Endpoint]:
    owner = labels.owned(run_id, cell_id)
    filled = filled_in(start.compose, os.environ)  # a variable that is not set is noticed before a long pull
    client = connect()
    log = LogFile(start.log_path, start.secrets())
    try:
        yield _bring_up(start, filled, client, owner, log)
    except BaseException:
        # The first error is the one to show; what could not be removed is said beside it.
        _take_down(start, client, owner, log, complain=lambda text: print(text, file=sys.stderr))
        raise
    else:
        _take_down(start, client, owner, log)


def _bring_up(
    start: _Start, filled: ComposeFile, client: docker.DockerClient, owner: dict[str, str], log: LogFile
) -> Endpoint:
    service = start.compose.server  # its secrets are still names; `filled` goes to the engine and nowhere else
    port = parse_port(filled.server.ports[0])
    url = f"http://{_host(port.address)}:{port.host}"
    mark = time.monotonic()
    image = ensure_image(client, filled.server.image, start.on_progress)
    pulled_s = time.monotonic() - mark
    if engine_host() is None and not is_free(port.host, port.address):
        raise _port_in_use(port.host)
    start.on_progress("starting the container")
    container = containers.start(client, filled, owner)
    created_s = time.monotonic() - mark - pulled_s
    containers.follow_log(container, log)
    look = containers.watcher(container, log)
    ready = _wait(start, url, look, log)
    container.reload()
    served_by = ServedBy(
        url=url,
        template=start.server.template,
        simulated=start.compose.serving.simulated,
        image=filled.server.image,
        image_digest=digest_of(image),
        container=containers.inspected(container, start.compose),
        version=ready.version,
        model=ready.model,
        arguments=[*(service.entrypoint or []), *(service.command or [])],
        phases=[Phase(name="pull", seconds=pulled_s), Phase(name="create", seconds=created_s), *ready.phases],
    )
    return Endpoint(
        url=url,
        started=served_by,
        look=look,
        metrics_url=_metrics(start, url),
        network=containers.network_name(owner),
        network_url=f"http://server:{port.container}",
    )


def _take_down(
    start: _Start,
    client: docker.DockerClient,
    owner: dict[str, str],
    log: LogFile,
    complain: Callable[[str], None] | None = None,
) -> None:
    with _undisturbed(), contextlib.closing(client):
        start.on_progress("taking the server down")
        try:
            containers.remove(client, owner, parse_seconds(start.compose.server.stop_grace_period))
        except ServerError as error:
            if complain is None:
                raise
            complain(str(error))
        log.settle()


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
    served_by = ask.attach(url, model, api_key, key_name=key_name)
    parts = urlsplit(served_by.url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    last, looked_at, misses = Look(None), time.monotonic(), 0

    def look(now: bool) -> Look:
        nonlocal last, looked_at, misses
        if last.problem is None and (now or time.monotonic() - looked_at > 2.0):
            looked_at = time.monotonic()
            # A full listen queue can refuse one connection of a server that lives.
            misses = 0 if ask.listens(host, port) else misses + 1
            if misses == MISSES:
                last = Look(f"nothing listens at {served_by.url} any more")
        return last

    metrics = metrics_url or ask.metrics_url(served_by.url, api_key)
    return Endpoint(url=served_by.url, started=served_by, look=look, metrics_url=metrics)


def _wait(start: _Start, url: str, look: Callable[[bool], Look], log: LogFile) -> Ready:
    def dead() -> ServerError | None:
        seen = look(False)
        return None if seen.problem is None else containers.death(seen, log)

    waiting = Waiting(dead, log, start.server.startup_timeout_s, start.on_progress)
    return wait_ready(url, start.compose.serving, start.model, waiting, api_key=start.api_key, key_name=start.key_name)


def _metrics(start: _Start, url: str) -> str | None:
    path = start.compose.serving.metrics
    return None if path is None else url + path


def _host(published_on: str) -> str:
    """Where to connect to what the engine published on this address."""
    remote = engine_host()
    if remote is not None:
        if published_on.startswith("127."):
            raise HarnessError(
                f"the Docker Engine is on {remote} and publishes the server's port on {published_on}, "
                "which cannot be reached from here",
                next_step="Set the server's variable `publish` to 0.0.0.0 or to an address of that host.",
            )
        return remote
    return "127.0.0.1" if published_on == "0.0.0.0" else published_on


def _port_in_use(port: int) -> ServerError:
    return ServerError(
        f"port {port} is in use already",
        next_step="Leave host_port out to get a free one, or stop what uses it "
        f"(ss -ltnp 'sport = :{port}'); `harness clean` removes leftovers of earlier runs.",
    )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not stop the clearing up, which ends by itself within the grace period."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
