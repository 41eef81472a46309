"""A server that is no server: vLLM given a whole cell's requests at once, as a job in a container."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from docker.models.containers import Container

from harness import redact
from harness.errors import HarnessError, ServerError
from harness.files import UNDECODABLE
from harness.machine.gpus import gpus
from harness.process import signals_interrupt
from harness.rundir.manifest import Phase, ServedBy
from harness.scenario.scenario import Scenario, Server
from harness.serve.compose.compose import SERVER, ComposeFile, Config, ConfigMount, filled_in, parse
from harness.serve.compose.consent import allowed, refuse_without_consent
from harness.serve.compose.document import rendered, written
from harness.serve.docker import containers, labels
from harness.serve.docker.daemon import DOCKER_ERRORS, connect, docker_error
from harness.serve.docker.images import digest_of, ensure_image
from harness.serve.docker.location import engine_location
from harness.serve.logfile import LogFile
from harness.serve.recorded import recorded
from harness.serve.secrecy import secrets_in
from harness.serve.vllm.gpu_fit import refuse_unfit
from harness.serve.waiting import Phases

SCRIPT, REQUESTS, ANSWERS = "/opt/offline/job.py", "/opt/offline/requests.jsonl", "/tmp/answers.jsonl"
LOOK_S = 0.5
WORKS = "[offline] "  # what the job prints once its model is loaded


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first line of the answers. Times on the monotonic clock of the engine's machine."""

    wall_s: float  # read together with `monotonic_s`, when the job began
    monotonic_s: float
    loaded_s: float  # the model was there
    ended_s: float
    version: str


class OfflineResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What came of one request."""

    index: int
    phase: str
    began_s: float  # of the batch that it was part of
    ended_s: float  # its own end where vLLM told it, else that of the batch
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    finish: str | None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A job that ended well."""

    served_by: ServedBy
    head: Head
    lines: list[OfflineResult]


def is_offline(server: Server) -> bool:
    """Whether a scenario's server is such a job. Raises ScenarioError for one that cannot be rendered."""
    return parse(rendered(server, "any", port=1)).serving.offline


def run_offline(
    scenario: Scenario,
    server_name: str,
    requests: bytes,
    *,
    run_id: str,
    cell_id: str,
    run_folder: Path,
    say: Callable[[str], None],
) -> Outcome:
    """Give `requests` (JSON lines) to an offline server, and wait until it has answered all of them.

    Writes compose/SERVER.yaml and logs/CELL.server.log. Raises ServerError when the job fails.
    """
    server, compose = written(scenario, server_name, run_folder)
    filled = _with_files(filled_in(compose, os.environ), requests)
    refuse_without_consent(server, compose)
    if engine_location().is_here:
        refuse_unfit(filled.server, list(gpus()))
    redact.know(secrets_in(msgspec.to_builtins(compose), os.environ))
    log = LogFile(run_folder / "logs" / f"{cell_id}.server.log")
    owner = labels.owned(run_id, cell_id)
    client = connect()
    with signals_interrupt(), containers.torn_down(client, compose, owner, [log], say):
        phases = Phases()
        image = ensure_image(client, filled.server.image, say)
        phases.done("pull")
        say("starting the job's container")
        containers.prepare(client, filled, owner)
        container = containers.start(client, filled, SERVER, owner)
        phases.done("create")
        _wait(container, log, server.startup_timeout_s, say)
        head, lines = _answers(container)
        container.reload()
        # The job's clock is this machine's only where the engine is; durations are good anywhere.
        load = Phase(name="load", seconds=head.loaded_s - head.monotonic_s)
        served_by = ServedBy(
            url="none: offline",
            template=server.template,
            image=compose.server.image,
            image_digest=digest_of(image),
            container=containers.inspected(container, compose, compose.server),
            version=head.version,
            model=scenario.model,
            arguments=[*(compose.server.entrypoint or []), *(compose.server.command or [])],
            notes=allowed(compose),
            phases=[*phases.all, load],
        )
        served_by = recorded(served_by, log.path, container=container)
        return Outcome(served_by=served_by, head=head, lines=lines)


def _with_files(filled: ComposeFile, requests: bytes) -> ComposeFile:
    """The job's script and its requests as files of the container; they reach a remote engine, too."""
    files = {SCRIPT: Path(__file__).with_name("offline_job.py").read_text("utf-8"), REQUESTS: requests.decode()}
    mounts = [ConfigMount(source=path, target=path) for path in files]
    service = msgspec.structs.replace(filled.server, configs=[*filled.server.configs, *mounts])
    configs = filled.configs | {path: Config(content=content) for path, content in files.items()}
    return msgspec.structs.replace(filled, services=filled.services | {SERVER: service}, configs=configs)


def _wait(container: Container, log: LogFile, loading_s: float, say: Callable[[str], None]) -> None:
    """Until the job has ended well. How long it may load is limited; how long it works is not."""
    containers.follow_log(container, log)
    look = containers.watcher(container, log)
    deadline = time.monotonic() + loading_s
    works = False
    while (seen := look(False)).death is None:
        works = works or WORKS in log.text(65_536)
        if not works and time.monotonic() > deadline:
            raise ServerError(
                f"the offline job had not loaded its model within {loading_s:g} s",
                next_step="Look at its last lines; if it only needs longer, raise startup_timeout_s in the scenario.",
                detail=log.tail(),
            )
        say(f"offline: {log.last_line()}")
        time.sleep(LOOK_S)
    if seen.death is None or seen.death.exit_code != 0 or seen.oom_killed:
        log.settle()
        raise containers.death_error(seen, log)


def _answers(container: Container) -> tuple[Head, list[OfflineResult]]:
    try:
        raw = containers.unpacked(container.get_archive(ANSWERS)[0])
    except DOCKER_ERRORS as error:
        raise docker_error("the answers of the offline job cannot be read", error) from None
    try:
        first, *rest = raw.splitlines()
        decoder = msgspec.json.Decoder(OfflineResult)
        return msgspec.json.decode(first, type=Head), [decoder.decode(line) for line in rest]
    except (ValueError, *UNDECODABLE) as error:
        raise HarnessError(f"the answers of the offline job cannot be read ({error})") from None
