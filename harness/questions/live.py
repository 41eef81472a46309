"""Live load: run a scenario's server with Locust's web UI until Ctrl-C, or print both as a Compose file."""

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, RunError, ServerError
from harness.base.process import is_port_free, pause
from harness.base.reason import because, sentence
from harness.machine import remote_telemetry
from harness.records.directory import disk_is_full
from harness.records.manifest import ServedBy
from harness.report.words import SIMULATED
from harness.run.drive import GRACE_S, locust_arguments, tail
from harness.run.experiment import Experiment, load_name, server_name
from harness.run.machine_fit import preflight
from harness.run.orchestrator import endpoint_of, make_job, prepare_generator, prepare_job, watch_server
from harness.run.progress import Progress
from harness.run.running import Running, create_run
from harness.scenario import SERVER_TOKENIZER, Scenario, locustfile_of
from harness.scenario.check_syntax import parse_check, request_slos
from harness.scenario.plan import Cell, load_of_stage, mix_of, plan
from harness.serve.compiled import caches_removed
from harness.serve.document import GRAFANA_PORT, METRICS_PORT, compose_document, prepare_upstream
from harness.serve.generator import IMAGE, find_path_in_image, list_needed_files
from harness.serve.lemonade import vllm_model_name
from harness.serve.template import PreparedServer
from harness.workload import local_words
from harness.workload.job import Job, encode_job

UI_HOST = "127.0.0.1"
INTERVAL_S = 1.0
_RECORDS = "/records"  # in the container
_COUNTERS = "/dev/shm"  # in the container; the service `worker` shares that of `locust`
_METRICS = ["--metrics-port", str(METRICS_PORT), "--metrics-host", "0.0.0.0"]  # the port is not published
_MAX_ARGUMENT = 128 * 1024  # bytes of one argument with its end: MAX_ARG_STRLEN of Linux, execve(2)


def live(
    experiment: Experiment, server: str | None, load: str | None, port: int, runs: Path, progress: Progress
) -> None:
    """Serve the UI until it is stopped, then tear everything down.

    The scenario gives the first number of users and rate; then the user sets them. Requests are recorded, but such a
    load is never valid for a comparison. Raises HarnessError.
    """
    cell_server, cell_load = server_name(experiment, server), load_name(experiment, load)
    if not is_port_free(port):
        raise HarnessError(f"--port: {port} is in use already", next_step="Give another, such as --port 8090.")
    checks = checks_of_row(experiment.scenario.checks, cell_server, cell_load)
    # The UI always runs on this host, not in the scenario's `generator: container`.
    experiment = preflight(_single_server(experiment, cell_server, [cell_load], endless=True), progress.line)
    cell = plan(experiment.scenario)[0]
    with remote_telemetry.opened(experiment.telemetry) as remote:
        running = create_run(experiment, [cell], runs, progress, kind="live", remote=remote)
        _serve_page(running, cell, checks, port)


def _serve_page(running: Running, cell: Cell, checks: Sequence[str], port: int) -> None:
    """Serve the UI of a run until it is stopped; see `live`."""
    progress = running.progress
    try:
        removed = caches_removed(running.started_servers, running.id, running.folder)
        with progress.live(), removed, endpoint_of(running, cell) as endpoint:
            job = replace(prepare_job(running, [cell], endpoint), checks=checks)
            start = prepare_generator(running, job, endpoint, (UI_HOST, port))
            # The page reads the files of the watchers.
            with watch_server(running, job, endpoint, INTERVAL_S):
                child = start()
                try:
                    progress.line(f"server: {endpoint.url}" + (f" ({SIMULATED})" if job.simulated else ""))
                    progress.line(f"Locust: http://{UI_HOST}:{port}")
                    progress.line(f"LLM numbers, live: the tab LLM there, and http://{UI_HOST}:{port}/llm")
                    progress.stage("serving; Ctrl-C tears everything down")
                    while child.poll() is None:
                        if disk_is_full(running.folder):
                            raise RunError(
                                f"{running.folder}: the disk is full", next_step="Make room, and start it again."
                            )
                        if (reason := endpoint.check_alive()) is not None:
                            raise ServerError(sentence(reason))
                        pause(0.5)
                finally:
                    code = child.stop(GRACE_S)
            raise RunError(f"Locust's web UI ended (exit code {code})", detail=tail(running.log_path(cell.id)))
    finally:
        if not running.file.discard_if_empty():
            running.file.finish("live", [because("live_load", "a live load, changed by hand, has no verdicts")])
        if running.folder.exists() and (running.folder / "requests.jsonl").stat().st_size:
            progress.line(f"What was sent is recorded: {command_line('harness', 'report', running.folder)}", whole=True)


def _single_server(experiment: Experiment, server: str, loads: list[str], *, endless: bool) -> Experiment:
    """Return the experiment with one server and these loads, once, without checks.

    `endless`: the user starts and ends the load, so it has no amount of work.
    """
    scenario = experiment.scenario
    kept = {name: scenario.loads[name] for name in loads}
    if endless:
        kept = {name: replace(load, requests=None, duration_s=None) for name, load in kept.items()}
    servers = {server: scenario.servers[server]}
    scenario = replace(
        scenario,
        servers=servers,
        loads=kept,
        mixes={},
        baseline=None,
        compare=[],
        checks=[],
        repeats=1,
        generator="process",
    )
    return replace(experiment, scenario=scenario)


def compose_file(
    experiment: Experiment,
    server: str | None = None,
    load: str | None = None,
    *,
    ui_port: int = 8089,
    workers: int = 0,
    records: Path | None = None,
    headless: bool = False,
    grafana: bool = False,
) -> str:
    """Return the Compose file of a server and a load generator that sends one load of the scenario.

    With the web UI, a user starts and stops the load. `headless`: send all of it once, as a repeat of a run, and exit.
    `records`: folder of this host for the request records. `workers`: number of containers that send the load; 0: the
    container of the UI sends it. `grafana`: add Prometheus and Grafana. Raises HarnessError for options and scenarios
    that such a file cannot express.
    """
    scenario = experiment.scenario
    name, rows = server_name(experiment, server), _load_rows(experiment, load, headless=headless)
    _check_compose_options(scenario, workers, records, headless=headless)
    upstream = prepare_upstream(scenario, name)
    single = _single_server(experiment, name, rows, endless=not headless)
    job = _compose_job(single, upstream, checks_of_row(scenario.checks, name, rows[0]), has_records=records is not None)
    locustfile = locustfile_of(job.load, experiment.folder)
    text, file = _job_argument(job), find_path_in_image(locustfile)
    local = replace(job, load=replace(job.load, processes=1)) if workers else job  # the workers have the processes
    command = [
        "locust",
        *locust_arguments(local, text, file, upstream.network_url, None if headless else ("0.0.0.0", 8089)),
    ]
    command += [*(["--master"] if workers else []), *(_METRICS if grafana else [])]
    worker_command = ["locust", "-f", str(file), "--job", text, "--worker", "--master-host", "locust"]
    files, key = list_needed_files(job, locustfile), scenario.api_key_env
    variables = {
        "image": IMAGE,
        "command": _escape_dollars(command),
        "worker_command": _escape_dollars(worker_command),
        "environment": {"HOME": "/tmp", **({key: f"${{{key}}}"} if key else {})},
        "files": _escape_dollars(files),
        "records": None if records is None else _escape_dollars([str(records.resolve())])[0],
        # The files may be readable by their owner only.
        "user": f"{os.getuid()}:{os.getgid()}" if files or records else None,
        "ui_port": None if headless else ui_port,
        "workers": workers,
        "waits_for": upstream.front,
    }
    printed_load = load_of_stage(rows[0]) or rows[0]
    head = [
        f"The server '{name}' and the load '{printed_load}' of {experiment.path.name}, printed by `harness compose`.",
        *_usage_lines(headless, bool(upstream.file.preparations)),
        f"The image {IMAGE} is made by `make image`. ${{NAME}} is taken from your shell.",
    ]
    head += [f"Records are appended to {records.resolve()}/requests.jsonl"] if records else []
    head += [] if headless else [f"Locust: http://{UI_HOST}:{ui_port}"]
    head += [f"Grafana: http://{UI_HOST}:{GRAFANA_PORT} (no login; nothing is kept after `down`)"] if grafana else []
    return compose_document(scenario, name, variables, head, grafana=grafana)


def _check_compose_options(scenario: Scenario, workers: int, records: Path | None, *, headless: bool) -> None:
    if scenario.prompts.tokenizer == SERVER_TOKENIZER:
        raise HarnessError(
            f"prompts.tokenizer: '{SERVER_TOKENIZER}' needs the running server before the load starts",
            next_step="Name a local tokenizer.json, or use `harness run`.",
        )
    if headless and workers:
        raise HarnessError(
            "--workers: goes with the web UI only",
            next_step="Use `processes` of the load for several load processes, or `harness run --workers`.",
        )
    if headless and records is None:
        raise HarnessError(
            "--headless: needs --records, or the measurement is lost", next_step="Give --records FOLDER."
        )
    if records is not None and not records.is_dir():
        raise HarnessError(f"--records: {records} is not a folder", next_step="Create it first.")


def _compose_job(experiment: Experiment, upstream: PreparedServer, checks: str, *, has_records: bool) -> Job:
    """Return the job of the experiment's only load, or of its stages, with paths in the container."""
    scenario, serving = experiment.scenario, upstream.file.serving
    model = scenario.model if serving.lemonade is None else vllm_model_name(serving.lemonade.model)
    served = ServedBy(url=upstream.network_url, model=model, simulated=serving.simulated)
    words = local_words(scenario.prompts, experiment.folder)
    job = make_job(experiment, plan(scenario), served, "compose", Path(_RECORDS), words)
    return replace(
        job,
        run="",
        checks=checks,
        requests_path=f"{_RECORDS}/requests.jsonl" if has_records else os.devnull,
        processes_path=f"{_RECORDS}/processes.jsonl" if has_records else os.devnull,
        counter_path=f"{_COUNTERS}/{job.cell}.counter",
    )


def _usage_lines(headless: bool, prepared: bool) -> list[str]:
    """Return how to use a Compose file. `prepared`: a service ends before the server starts, and would end `up`."""
    if not headless:
        return [
            "Save it as compose.yaml, then: docker compose up",
            "A user starts and stops the load in the web UI: `requests` and `duration_s` do not apply.",
        ]
    words = ["run", "--rm", "locust"] if prepared else ["up", "--exit-code-from", "locust"]
    return [
        f"Save it as compose.yaml, then: {command_line('docker', 'compose', *words)}; docker compose down",
        "It sends the load once. `harness run` repeats it and gives verdicts.",
    ]


def _load_rows(experiment: Experiment, given: str | None, *, headless: bool) -> list[str]:
    """Return the given load, or the only one: its name, or the names of its stages. Raises HarnessError."""
    loads = experiment.scenario.loads
    names = list(dict.fromkeys(load_of_stage(row) or row for row in loads if mix_of(row) is None))
    if given is None and len(names) > 1:
        raise HarnessError(
            f"--load: required, because the scenario has {len(names)} loads and the file sends one",
            next_step=f"Give {' or '.join(command_line('--load', name) for name in names)}.",
        )
    name = given or names[0]
    stages = [row for row in loads if load_of_stage(row) == name]
    if not stages:
        return [load_name(experiment, name)]
    if not headless:
        raise HarnessError(
            f"loads.{name}.stages: the web UI has one number of users",
            next_step=f"Give {' or '.join(command_line('--load', row) for row in stages)}, or --headless for all of "
            "them.",
        )
    return stages


def _job_argument(job: Job) -> str:
    """Return the job as an argument of a command. Raises HarnessError when it is too large."""
    text = encode_job(job)
    if len(text.encode()) < _MAX_ARGUMENT:
        return text
    raise HarnessError(
        f"loads.{job.load_name}: too large for a Compose file: it takes {len(text.encode()):,} bytes, and one argument "
        f"of a command can have {_MAX_ARGUMENT - 1:,}",
        next_step="Use `harness run`, or shorter lists of lengths.",
    )


def _escape_dollars(texts: list[str]) -> list[str]:
    """Escape texts in which Compose must not replace `$NAME`."""
    return [text.replace("$", "$$") for text in texts]


def checks_of_row(checks: list[str], server: str, load: str) -> str:
    """Return the checks of this row that bound single requests, as text; "" without any."""
    own = (check.text.rpartition(":")[2].strip() for check in map(parse_check, checks) if check.concerns(server, load))
    return ", ".join(text for text in own if request_slos([text]))
