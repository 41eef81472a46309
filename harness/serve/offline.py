"""The offline job: vLLM in a container gets all requests of a cell at once."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from docker.models.containers import Container
from msgspec.structs import replace

from harness.base.errors import HarnessError, StartError
from harness.base.files import UNDECODABLE
from harness.base.process import pause, signals_interrupt
from harness.records.manifest import Phase, ServedBy
from harness.scenario import Scenario
from harness.serve import containers
from harness.serve.compose_file import SERVER, ComposeFile, Config, ConfigMount, fill_variables
from harness.serve.containers import StatusReader
from harness.serve.docker_engine import DOCKER_ERRORS, make_docker_error
from harness.serve.lifecycle import ServerStart, cell_engine, prepare_start, start_service

SCRIPT, REQUESTS, ANSWERS = "/opt/offline/job.py", "/opt/offline/requests.jsonl", "/tmp/answers.jsonl"
LOADED_MARK = "[offline] "  # the job prints it when its model is loaded


class OfflineHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first line of the answers. Times on this machine's monotonic clock."""

    wall_s: float  # read together with `monotonic_s`, when the job started
    monotonic_s: float
    loaded_s: float
    ended_s: float
    version: str


class OfflineResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of one request."""

    index: int
    began_s: float  # of the batch that it was part of
    ended_s: float  # its own end where vLLM reported it, else that of the batch
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    finish: str | None


def run_offline(
    scenario: Scenario,
    server_name: str,
    requests: bytes,
    *,
    run_id: str,
    cell_id: str,
    run_folder: Path,
    on_progress: Callable[[str], None],
) -> tuple[ServedBy, OfflineHead, list[OfflineResult]]:
    """Give `requests` (JSON lines) to an offline server, and wait until it has answered all of them.

    Writes compose/SERVER.yaml and logs/CELL.server.log. Raises ServerError when the job fails.
    """
    start = prepare_start(scenario, server_name, run_id, cell_id, run_folder, on_progress)
    filled = _add_files(fill_variables(start.compose, os.environ), requests)
    with signals_interrupt(), cell_engine(start, [start.log]) as client:
        container, created, read_status = start_service(start, client, filled)
        _wait_until_ended(read_status, start)
        head, results = _read_answers(container)
        phases = [*created.phases, Phase(name="load", seconds=head.loaded_s - head.monotonic_s)]
        served = replace(created, url="none: offline", version=head.version, model=start.model, phases=phases)
        container.reload()
        return start.record_facts(served, container), head, results


def _add_files(filled: ComposeFile, requests: bytes) -> ComposeFile:
    """Add the job's script and its requests as files of the container."""
    files = {SCRIPT: Path(__file__).with_name("offline_job.py").read_text("utf-8"), REQUESTS: requests.decode()}
    mounts = [ConfigMount(source=path, target=path) for path in files]
    service = replace(filled.server, configs=[*filled.server.configs, *mounts])
    configs = filled.configs | {path: Config(content=content) for path, content in files.items()}
    return replace(filled, services=filled.services | {SERVER: service}, configs=configs)


def _wait_until_ended(read_status: StatusReader, start: ServerStart) -> None:
    """Wait until the job has ended well. Only the time until its model is loaded is limited. Raises ServerError."""
    log, max_load_s = start.log, start.server.startup_timeout_s
    deadline = time.monotonic() + max_load_s
    is_loaded = False
    while (status := read_status(False)).death is None:
        is_loaded = is_loaded or LOADED_MARK in log.text(65_536)
        if not is_loaded and time.monotonic() > deadline:
            raise StartError(
                f"the offline job had not loaded its model within {max_load_s:g} s",
                next_step="Look at its last lines; if it only needs longer, raise startup_timeout_s in the scenario.",
                detail=log.tail(),
            )
        start.on_progress(f"offline: {log.last_line()}")
        pause(containers.STATUS_INTERVAL_S)
    if status.death.exit_code != 0 or status.oom_killed:
        log.wait_for_end()
        raise containers.make_death_error(status, log)


def _read_answers(container: Container) -> tuple[OfflineHead, list[OfflineResult]]:
    try:
        raw = containers.unpack_file(container.get_archive(ANSWERS)[0])
    except DOCKER_ERRORS as error:
        raise make_docker_error("the answers of the offline job cannot be read", error) from None
    try:
        first, *rest = raw.splitlines()
        decoder = msgspec.json.Decoder(OfflineResult)
        return msgspec.json.decode(first, type=OfflineHead), [decoder.decode(line) for line in rest]
    except (ValueError, *UNDECODABLE) as error:
        raise HarnessError(f"the answers of the offline job cannot be read ({error})") from None
