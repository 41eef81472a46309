"""The one orchestrator: serve, drive and record every cell of a scenario, and leave a run directory."""

import contextlib
import datetime
import importlib.metadata
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from harness import __version__, paths
from harness.drive import Child, LocalChild, check_locustfile, drive, locust_arguments
from harness.errors import HarnessError, did_you_mean
from harness.job import Job, write_job
from harness.machine.facts import machine
from harness.manifest import CellRun, Run, Status, write_run
from harness.metrics import Scraper
from harness.plan import Cell, plan
from harness.progress import Progress
from harness.report import html
from harness.scenario import USERS, Baseline, Scenario, Server, load_scenario, locustfile_of
from harness.serve import Endpoint, attach, check_servers, engine_version, serve
from harness.serve.generator import ContainerChild
from harness.summarize import summarize, write_summary
from harness.workload import read_rows, salt_words, workload_sha256

RUNNING_SERVER = "running"  # the name of the server given with --url
MEASURING_PACKAGES = ("locust", "gevent", "httptools", "msgspec", "docker", "numpy", "scipy")


class Target(msgspec.Struct, frozen=True):
    """A server that already runs, given on the command line."""

    url: str
    metrics_url: str | None = None


class Experiment(msgspec.Struct, frozen=True):
    """A scenario made ready to run: checked against the templates, the environment and the locustfiles."""

    path: Path
    scenario: Scenario
    target: Target | None = None

    @property
    def folder(self) -> Path:
        return self.path.resolve().parent


def prepare(
    path: Path, target: Target | None = None, model: str | None = None, repeats: int | None = None
) -> Experiment:
    """Load a scenario, apply what the command line overrides, and find every mistake that can be found early."""
    scenario = load_scenario(path)
    if model is not None:
        scenario = msgspec.structs.replace(scenario, model=model)
    if repeats is not None:
        scenario = msgspec.structs.replace(scenario, repeats=repeats)
    if target is not None:
        check_url("--url", target.url)
        if target.metrics_url is not None:
            check_url("--metrics-url", target.metrics_url)
        scenario = _on_running_server(scenario)
    else:
        check_servers(scenario, str(path))
    if scenario.prompts.file:
        read_rows(path.parent / scenario.prompts.file)
    for user in sorted({load.user for load in scenario.loads.values()} - set(USERS)):
        # A container has packages of its own: only there can be seen whether the file can be imported.
        check_locustfile((path.resolve().parent / user).resolve(), try_it=scenario.generator == "process")
    if scenario.api_key_env and not os.environ.get(scenario.api_key_env, "").strip():
        raise HarnessError(
            f"$.api_key_env: the environment variable {scenario.api_key_env} is not set",
            next_step=f"export {scenario.api_key_env}=... before the run; the key is never written anywhere.",
        )
    return Experiment(path, scenario, target)


def check_url(option: str, url: str) -> None:
    """Raise HarnessError for what cannot be an address at all."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:  # such as a port above 65535
        usable = False
    if not usable or " " in url:
        raise HarnessError(
            f"{option}: '{url}' is not the address of a server", next_step="Write it like http://127.0.0.1:8000."
        )


def _on_running_server(scenario: Scenario) -> Scenario:
    base = scenario.baseline
    return msgspec.structs.replace(
        scenario,
        servers={RUNNING_SERVER: Server(template=RUNNING_SERVER)},
        restart=False,
        generator="process",
        baseline=None if base is None else Baseline(server=RUNNING_SERVER, load=base.load),
        checks=[re.sub(r"^\s*[^/:]+/", f"{RUNNING_SERVER}/", check) for check in scenario.checks],
    )


def run(experiment: Experiment, runs: Path, progress: Progress) -> Path:
    """Run every cell and return the run directory.

    However it ends, the directory holds what was measured, with a manifest that says how it ended. Raises
    ServerError when a server does not become ready, RunError when the load cannot be driven, KeyboardInterrupt
    after everything was taken down.
    """
    cells = plan(experiment.scenario)
    folder, manifest = begin(experiment, cells, runs)
    progress.line(f"Run {manifest.id}: {len(cells)} cell{'s' if len(cells) != 1 else ''}. Records go to {folder}")
    done: list[CellRun] = []
    try:
        with progress.live():
            for cell_run in _cells(experiment, manifest.id, cells, folder, progress):
                done.append(cell_run)
                manifest = msgspec.structs.replace(manifest, cells=list(done))
                write_run(folder, manifest)
    except BaseException as error:
        finish(folder, manifest, *_how_it_ended(error))
        raise
    summary = summarize(folder)
    finish(folder, manifest, "valid" if summary.valid else "invalid", summary.reasons)
    return folder


def _how_it_ended(error: BaseException) -> tuple[Status, list[str]]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ["interrupted before all cells had run"]
    return "failed", [error.what if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"]


def begin(experiment: Experiment, cells: list[Cell], runs: Path) -> tuple[Path, Run]:
    name = experiment.path.stem
    started = datetime.datetime.now(datetime.UTC)
    run_id = f"{started:%Y%m%d-%H%M%S}-{name[:40]}-{secrets.token_hex(2)}".lower()
    folder = runs / run_id
    try:
        for part in ("jobs", "logs", "compose"):
            (folder / part).mkdir(parents=True)
        shutil.copyfile(experiment.path, folder / "scenario.yaml")
        # Opened before the first request, so that a full or read-only disk is noticed now.
        for output in ("requests.jsonl", "processes.jsonl", "metrics.jsonl"):
            (folder / output).touch()
    except OSError as error:
        raise HarnessError(
            f"{folder}: the run directory cannot be written ({error.strerror})",
            next_step="Give a folder that can be written with --runs DIR.",
        ) from None
    manifest = Run(
        id=run_id,
        status="running",
        started_wall_s=started.timestamp(),
        scenario_name=name,
        scenario=experiment.scenario,
        workload_sha256=workload_sha256(experiment.scenario, experiment.folder),
        order=[cell.id for cell in cells],
        machine=machine(docker=engine_version() if _needs_docker(experiment) else None),
        versions={"amd-llm-load": __version__, **{p: importlib.metadata.version(p) for p in MEASURING_PACKAGES}},
        git_commit=_git_commit(),
    )
    write_run(folder, manifest)
    return folder, manifest


def _needs_docker(experiment: Experiment) -> bool:
    servers = experiment.scenario.servers.values()
    in_container = experiment.target is None and any(server.container for server in servers)
    return in_container or experiment.scenario.generator == "container"


def finish(folder: Path, manifest: Run, status: Status, reasons: list[str]) -> None:
    write_run(folder, msgspec.structs.replace(manifest, status=status, reasons=reasons, ended_wall_s=time.time()))
    # Whatever was measured before a failure is worth its report, but must not hide the failure.
    with contextlib.suppress(HarnessError):
        write_summary(folder, summarize(folder))
        html.write_report(folder)


def _git_commit() -> str | None:
    try:
        command = ["git", "-C", str(paths.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _cells(
    experiment: Experiment, run_id: str, cells: list[Cell], folder: Path, progress: Progress
) -> Iterator[CellRun]:
    """Run the cells in order. One server start serves one cell, or all of a repeat when `restart` is false."""
    scenario = experiment.scenario
    took: dict[tuple[str, str], float] = {}
    for _, group in groupby(cells, key=lambda c: c.id if scenario.restart else (c.repeat, c.server)):
        together = list(group)
        first = together[0]
        progress.cell(cells.index(first) + 1, len(cells), first, _time_left(cells[cells.index(first) :], took))
        begin = time.monotonic()
        with endpoint_of(experiment, run_id, first, folder, progress) as endpoint:
            for cell in together:
                if cell is not first:
                    progress.cell(cells.index(cell) + 1, len(cells), cell, None)
                cell_run = _cell(experiment, run_id, cell, endpoint, folder, progress)
                yield cell_run
        took[first.server, first.load] = time.monotonic() - begin


def _time_left(cells: list[Cell], took: dict[tuple[str, str], float]) -> float | None:
    """The sum of what the same cells took before; None until each was seen once."""
    if any((cell.server, cell.load) not in took for cell in cells):
        return None
    return sum(took[cell.server, cell.load] for cell in cells)


@contextlib.contextmanager
def endpoint_of(
    experiment: Experiment, run_id: str, cell: Cell, folder: Path, progress: Progress
) -> Iterator[Endpoint]:
    scenario = experiment.scenario
    if experiment.target is not None:
        progress.stage("asking the server")
        target = experiment.target
        yield attach(target.url, scenario.model, _api_key(scenario), metrics_url=target.metrics_url)
        return
    with serve(
        scenario, cell.server, run_id=run_id, cell_id=cell.id, run_folder=folder, on_progress=progress.stage
    ) as endpoint:
        yield endpoint


def _cell(
    experiment: Experiment, run_id: str, cell: Cell, endpoint: Endpoint, folder: Path, progress: Progress
) -> CellRun:
    """Load one cell's server and say what happened."""
    job = make_job(experiment, cell, folder.resolve(), endpoint.served_by.model, salt_words(run_id, cell.id))
    job_path = folder.resolve() / "jobs" / f"{cell.id}.json"
    write_job(job, job_path)
    log_path = folder / "logs" / f"{cell.id}.locust.log"
    start = generator(experiment, run_id, job, job_path, endpoint, log_path)
    interval_s = experiment.scenario.metrics_interval_s
    api_key = _api_key(experiment.scenario)
    with Scraper(endpoint.metrics_url, cell.id, folder / "metrics.jsonl", interval_s, api_key=api_key):
        driven = drive(start, job, log_path=log_path, alive=endpoint.check_alive, progress=progress.count)
    return CellRun(
        id=cell.id,
        server=cell.server,
        load=cell.load,
        repeat=cell.repeat,
        started_wall_s=driven.started_wall_s,
        ended_wall_s=driven.ended_wall_s,
        served_by=endpoint.served_by,
        problems=driven.problems,
    )


def _api_key(scenario: Scenario) -> str | None:
    return os.environ.get(scenario.api_key_env) if scenario.api_key_env else None


def generator(
    experiment: Experiment,
    run_id: str,
    job: Job,
    job_path: Path,
    endpoint: Endpoint,
    log_path: Path,
    ui: tuple[str, int] | None = None,
) -> Callable[[], Child]:
    """How to start the load generator of a cell, as the scenario wants it: a process or a container."""
    locustfile = locustfile_of(job.load, experiment.folder, paths.LOCUSTFILES)
    if experiment.scenario.generator == "container":
        arguments = locust_arguments(job, job_path, locustfile, endpoint.network_url or endpoint.url)
        return lambda: ContainerChild(run_id, job, arguments, [locustfile], endpoint.network, log_path)
    command = [sys.executable, "-m", "locust", *locust_arguments(job, job_path, locustfile, endpoint.url, ui)]
    return lambda: LocalChild(command, log_path)


def make_job(experiment: Experiment, cell: Cell, folder: Path, model: str | None, salt: str) -> Job:
    """The job of a cell; `folder` is the run directory as the load processes see it."""
    scenario = experiment.scenario
    prompts = scenario.prompts
    return Job(
        cell=cell.id,
        load_name=cell.load,
        load=scenario.loads[cell.load],
        model=model or scenario.model,
        prompts=prompts,
        prompt_file=str(experiment.folder / prompts.file) if prompts.file else None,
        seed=scenario.seed,
        salt=salt if prompts.salt else None,
        warmup=scenario.warmup,
        api_key_env=scenario.api_key_env,
        requests_path=str(folder / "requests.jsonl"),
        processes_path=str(folder / "processes.jsonl"),
        tickets_path=str(folder / "jobs" / f"{cell.id}.tickets"),
    )


def server_name(experiment: Experiment, given: str | None) -> str:
    """The server asked for, else the first. Raises HarnessError for a name that the scenario does not have."""
    return _choose(experiment, "server", given, list(experiment.scenario.servers))


def load_name(experiment: Experiment, given: str | None) -> str:
    """The load asked for, else the first. Raises HarnessError for a name that the scenario does not have."""
    return _choose(experiment, "load", given, list(experiment.scenario.loads))


def _choose(experiment: Experiment, kind: str, given: str | None, known: list[str]) -> str:
    if given is not None and given not in known:
        raise HarnessError(f"--{kind}: {experiment.path} has no {kind} '{given}'; {did_you_mean(given, known)}")
    return given or known[0]
