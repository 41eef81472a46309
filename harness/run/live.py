"""Live load: a scenario's server with Locust's web UI in front of it, until Ctrl-C, or printed for Docker Compose."""

import os
from pathlib import Path

import msgspec
from rich.console import Console

from harness.errors import HarnessError, RunError, ServerError
from harness.files import LOCUSTFILES
from harness.job import Job, text_of
from harness.prepare.experiment import Experiment, load_name, server_name
from harness.prepare.machine_fit import preflight
from harness.process import is_free, pause
from harness.reasons import sentence
from harness.report.words import SIMULATED
from harness.run.drive import GRACE_S, locust_arguments, tail
from harness.run.orchestrator import endpoint_of, generator, make_job, watched
from harness.run.progress import Progress
from harness.run.running import RunFile, Running, begin
from harness.rundir.directory import disk_is_full
from harness.rundir.manifest import Machine, Run
from harness.scenario import SERVER_TOKENIZER, locustfile_of
from harness.scenario.check_syntax import parse_check, slos_key
from harness.scenario.plan import mix_of, plan, staged
from harness.serve import compose_document, find_upstream
from harness.serve.document import GRAFANA_PORT, METRICS_PORT
from harness.serve.generator import IMAGE, find_path_in_image, list_needed_files
from harness.summary import because

UI_HOST = "127.0.0.1"
INTERVAL_S = 1.0
_RECORDS = "/records"  # in the container
_COUNTERS = "/dev/shm"  # in the container; the containers of the service `worker` have that of `locust`
_METRICS = ["--metrics-port", str(METRICS_PORT), "--metrics-host", "0.0.0.0"]  # the port is not published
_MAX_ARGUMENT = 128 * 1024  # bytes of one argument with its end: MAX_ARG_STRLEN of Linux, execve(2)


def live(
    experiment: Experiment, server: str | None, load: str | None, port: int, runs: Path, progress: Progress
) -> None:
    """Serve the UI until it is stopped. Then tear everything down.

    Users and rate are the scenario's at first; then the user sets them. What is sent is recorded, but a load that a
    user controls is never valid for a comparison. Raises HarnessError.
    """
    cell_server, cell_load = server_name(experiment, server), load_name(experiment, load)
    if not is_free(port):
        raise HarnessError(f"--port: {port} is in use already", next_step="Give another, such as --port 8090.")
    slos = slos_for(experiment.scenario.checks, cell_server, cell_load)
    # The UI runs on this host, even if the scenario's load generator runs in a container.
    experiment = preflight(_alone(experiment, cell_server, [cell_load], endless=True), progress.line)
    cell = plan(experiment.scenario)[0]
    running = begin(experiment, [cell], runs, progress)
    try:
        with progress.live(), endpoint_of(running, cell) as endpoint:
            job = msgspec.structs.replace(make_job(running, cell, endpoint), slos=slos)
            start = generator(running, job, endpoint, (UI_HOST, port))
            # The page reads these files: the load processes measure only their own requests.
            with watched(running, job, endpoint, INTERVAL_S):
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
                        dead = endpoint.check_alive()
                        if dead is not None:
                            raise ServerError(sentence(dead))
                        pause(0.5)
                finally:
                    code = child.stop(GRACE_S)
            raise RunError(f"Locust's web UI ended (exit code {code})", detail=tail(running.log_path(cell.id)))
    finally:
        running.file.finish("live", [because("live_load")])
        if (running.folder / "requests.jsonl").stat().st_size:
            progress.line(f"What was sent is recorded: harness report {running.folder}")


def _alone(experiment: Experiment, server: str, loads: list[str], *, endless: bool) -> Experiment:
    """The experiment with one server and these loads, once, without checks.

    `endless`: the user decides what is sent and when it ends, so nothing is planned.
    """
    scenario = experiment.scenario
    kept = {name: scenario.loads[name] for name in loads}
    if endless:
        kept = {name: msgspec.structs.replace(load, requests=None, duration_s=None) for name, load in kept.items()}
    scenario = msgspec.structs.replace(
        scenario,
        servers={server: scenario.servers[server]},
        loads=kept,
        mixes={},
        baseline=None,
        compare=[],
        checks=[],
        repeats=1,
        generator="process",
    )
    return msgspec.structs.replace(experiment, scenario=scenario)


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
    """Return the Compose file of a server with a load generator in front of it that sends one load of the scenario.

    With the web UI, a user starts and stops the load. `headless` sends all of it, as one repeat of a run would, and
    exits. `records`: folder of this host for the request records. `workers`: containers that send the load; 0: the one
    with the UI does. `grafana`: with Prometheus and Grafana. Raises HarnessError, with all that such a file
    cannot express.
    """
    name, names = server_name(experiment, server), _loads_of(experiment, load, headless=headless)
    if experiment.scenario.prompts.tokenizer == SERVER_TOKENIZER:
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
    upstream = find_upstream(experiment.scenario, name)
    slos = slos_for(experiment.scenario.checks, name, names[0])
    folder = Path(_RECORDS)
    one = _alone(experiment, name, names, endless=not headless)
    unwritten = Run(
        id="compose", status="running", started_wall_s=0.0, scenario_name="", scenario=one.scenario,
        workload_sha256="", machine=Machine(name=""),
    )  # fmt: skip
    running = Running(RunFile(folder, unwritten), one, Progress(Console()))
    jobs = [
        msgspec.structs.replace(
            make_job(running, cell, None),
            run="",
            model=upstream.model,
            simulated=upstream.simulated,
            slos=slos,
            requests_path=os.devnull if records is None else f"{_RECORDS}/requests.jsonl",
            processes_path=os.devnull if records is None else f"{_RECORDS}/processes.jsonl",
            counter_path=f"{_COUNTERS}/{cell.id}.counter",
        )
        for cell in plan(one.scenario)
    ]
    job = msgspec.structs.replace(jobs[0], then=jobs[1:])
    locustfile = locustfile_of(job.load, experiment.folder, LOCUSTFILES)
    text, file = _argument(job), find_path_in_image(locustfile)
    sending = msgspec.structs.replace(job, load=msgspec.structs.replace(job.load, processes=1)) if workers else job
    command = ["locust", *locust_arguments(sending, text, file, upstream.url, None if headless else ("0.0.0.0", 8089))]
    files = list_needed_files(job, locustfile)
    key, whole = experiment.scenario.api_key_env, staged(names[0]) or names[0]
    return compose_document(
        experiment.scenario,
        name,
        {
            "image": IMAGE,
            "command": _literal([*command, *(["--master"] if workers else []), *(_METRICS if grafana else [])]),
            "worker_command": _literal(
                ["locust", "-f", str(file), "--job", text, "--worker", "--master-host", "locust"]
            ),
            "environment": {"HOME": "/tmp", **({key: f"${{{key}}}"} if key else {})},
            "files": _literal(files),
            "records": None if records is None else _literal([str(records.resolve())])[0],
            # Only the owner may be able to read the files.
            "user": f"{os.getuid()}:{os.getgid()}" if files or records else None,
            "ui_port": None if headless else ui_port,
            "workers": workers,
            "waits_for": upstream.service,
        },
        [
            f"The server '{name}' and the load '{whole}' of {experiment.path.name}, printed by `harness compose`.",
            *_how_to(headless, upstream.prepared),
            f"The image {IMAGE} is made by `make image`. ${{NAME}} is taken from your shell.",
            *([f"Records are appended to {records.resolve()}/requests.jsonl"] if records else []),
            *([] if headless else [f"Locust: http://{UI_HOST}:{ui_port}"]),
            *(
                [f"Grafana: http://{UI_HOST}:{GRAFANA_PORT} (no login; nothing is kept after `down`)"]
                if grafana
                else []
            ),
        ],
        grafana=grafana,
    )


def _how_to(headless: bool, prepared: bool) -> list[str]:
    """How to use a Compose file. `prepared`: a service ends before the server starts, and would end `up`."""
    if not headless:
        return [
            "Save it as compose.yaml, then: docker compose up",
            "A user starts and stops the load in the web UI: `requests` and `duration_s` do not apply.",
        ]
    command = "run --rm locust" if prepared else "up --exit-code-from locust"
    return [
        f"Save it as compose.yaml, then: docker compose {command}; docker compose down",
        "It sends the load once. `harness run` repeats it and gives verdicts.",
    ]


def _loads_of(experiment: Experiment, given: str | None, *, headless: bool) -> list[str]:
    loads = experiment.scenario.loads
    whole = list(dict.fromkeys(staged(name) or name for name in loads if mix_of(name) is None))
    if given is None and len(whole) > 1:
        raise HarnessError(
            f"--load: required, because the scenario has {len(whole)} loads and the file sends one",
            next_step=f"Give --load {' or --load '.join(whole)}.",
        )
    name = whole[0] if given is None else given
    stages = [one for one in loads if staged(one) == name]
    if not stages:
        return [load_name(experiment, name)]
    if not headless:
        raise HarnessError(
            f"loads.{name}.stages: the web UI has one number of users",
            next_step=f"Give --load {' or --load '.join(stages)}, or --headless to send all of them.",
        )
    return stages


def _argument(job: Job) -> str:
    text = text_of(job)
    if len(text.encode()) < _MAX_ARGUMENT:
        return text
    sizes = {
        "prompts.tokenizer": len(job.words),
        "prompts.tokens": len(job.prompt_lengths),
        f"loads.{job.load_name}.output_tokens": len(job.output_lengths),
    }
    where = max(sizes, key=lambda key: sizes[key])
    raise HarnessError(
        f"{where}: too large for a Compose file: the load takes {len(text.encode()):,} bytes, and one argument of a "
        f"command can have {_MAX_ARGUMENT - 1:,}",
        next_step="Use `harness run`, or a shorter list.",
    )


def _literal(texts: list[str]) -> list[str]:
    """Texts in which Compose must not replace `$NAME`."""
    return [text.replace("$", "$$") for text in texts]


def slos_for(checks: list[str], server: str, load: str) -> str:
    """The SLOs of the first check that has some for this row; "" without any."""
    for check in map(parse_check, checks):
        if check.slos and (check.server, check.load) in ((None, None), (server, load)):
            return slos_key(check.slos)
    return ""
