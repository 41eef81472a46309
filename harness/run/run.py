"""The one orchestrator: serve, drive and record every cell of a scenario, and leave a run directory."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import msgspec

from harness import __version__, paths
from harness.errors import HarnessError
from harness.job import Job, warm_sign, write_job
from harness.machine.facts import gpu_memory, machine
from harness.machine.sampler import Sampler
from harness.prepare.auto import fill_in
from harness.prepare.experiment import Experiment
from harness.prepare.preflight import refuse_blocked
from harness.prepare.prompt_words import counted_words
from harness.report import html
from harness.run.drive import Child, Count, Driven, LocalChild, drive, locust_arguments
from harness.run.offline import offline_cell
from harness.run.progress import Progress
from harness.rundir.manifest import DIED, CellRun, Run, ServedBy, Status, write_run
from harness.rundir.metrics import Scraper
from harness.scenario.mixes import mix_of
from harness.scenario.plan import Cell, at_once, plan
from harness.scenario.scenario import Scenario, Warmup, locustfile_of, warmup_of, wave_of
from harness.serve import Endpoint, attach, engine_version, is_offline, serve
from harness.serve.docker import labels
from harness.serve.docker.generator import ContainerChild
from harness.serve.telemetry_source import source_of
from harness.summarize.summarize import summarize, write_summary
from harness.summary import Summary
from harness.workload import pairs_of, salt_words, workload_sha256

Note = Callable[..., None]  # takes CellRuns, as they are known now
MEASURING_PACKAGES = ("locust", "gevent", "httptools", "msgspec", "docker", "numpy", "scipy")


def run(experiment: Experiment, runs: Path, progress: Progress) -> Path:
    """Run every cell and return the run directory.

    However it ends, the directory holds what was measured, with a manifest that says how it ended. Raises
    ServerError when a server does not become ready, RunError when the load cannot be driven, KeyboardInterrupt
    after everything was taken down.
    """
    refuse_blocked(experiment)
    experiment = fill_in(experiment, progress.line)
    cells = plan(experiment.scenario)
    folder, manifest = begin(experiment, cells, runs)
    progress.line(f"Run {manifest.id}: {len(cells)} cell{'s' if len(cells) != 1 else ''}. Records go to {folder}")
    if experiment.workers is not None:
        who = ", ".join(experiment.workers.names) or f"{experiment.workers.machines} machines"
        progress.line(f"Workers: {who}. On each of them: {experiment.workers.command}")
    known: dict[str, CellRun] = {}

    def note(*cell_runs: CellRun) -> None:
        nonlocal manifest
        known.update({cell_run.id: cell_run for cell_run in cell_runs})
        manifest = msgspec.structs.replace(manifest, cells=list(known.values()))
        write_run(folder, manifest)

    try:
        with progress.live():
            for cell_run in _cells(experiment, manifest.id, cells, folder, progress, note):
                note(cell_run)
    except BaseException as error:
        finish(folder, manifest, *_how_it_ended(error))
        left = f"What was measured until then: harness report {folder}"
        if (folder / "requests.jsonl").stat().st_size == 0:
            raise
        if isinstance(error, HarnessError):
            error.next_step = f"{error.next_step} {left}".strip()
        if isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(OSError):  # nobody reads it any more
                progress.line(left)
        raise
    finish(folder, manifest)
    return folder


def _how_it_ended(error: BaseException) -> tuple[Status, list[str]]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ["interrupted before all cells had run"]
    return "failed", [error.what if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"]


def begin(experiment: Experiment, cells: list[Cell], runs: Path) -> tuple[Path, Run]:
    name = experiment.path.stem
    started = datetime.datetime.now(datetime.UTC)
    # The id names folders, containers and networks, so it is made of what all of them allow.
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-") or "run"
    run_id = f"{started:%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(2)}"
    folder = runs / run_id
    try:
        for part in ("jobs", "logs", "compose"):
            (folder / part).mkdir(parents=True)
        shutil.copyfile(experiment.path, folder / "scenario.yaml")
        # Opened before the first request, so that a full or read-only disk is noticed now.
        for output in ("requests.jsonl", "processes.jsonl", "metrics.jsonl", "telemetry.jsonl"):
            (folder / output).touch()
    except OSError as error:
        raise HarnessError(
            f"{folder}: the run directory cannot be written ({error.strerror})",
            next_step="Give a folder that can be written with --runs DIR.",
        ) from None
    manifest = Run(
        id=run_id,
        status="running",
        owner=labels.owner(),
        started_wall_s=started.timestamp(),
        scenario_name=name,
        scenario=experiment.scenario,
        workload_sha256=workload_sha256(experiment.scenario, experiment.folder),
        order=[cell.id for cell in cells],
        machine=machine(docker=engine_version() if _needs_docker(experiment) else None),
        versions=_versions(),
        git_commit=_git_commit(),
        computed=experiment.computed,
        workers=experiment.workers,
    )
    write_run(folder, manifest)
    return folder, manifest


def _needs_docker(experiment: Experiment) -> bool:
    servers = experiment.scenario.servers.values()
    in_container = experiment.target is None and any(server.container for server in servers)
    return in_container or experiment.scenario.generator == "container"


def finish(folder: Path, manifest: Run, status: Status | None = None, reasons: Sequence[str] = ()) -> None:
    """Write the verdict, the summary and the page. Without a status, the records say whether the run is valid.

    With one, the run has failed or was cut: what it measured is worth its report, but nothing may hide how it ended.
    Without one, raises HarnessError when the results cannot be written.
    """
    ended = msgspec.structs.replace(manifest, ended_wall_s=time.time())
    if status is not None:
        with contextlib.suppress(Exception):
            write_run(folder, msgspec.structs.replace(ended, status=status, reasons=list(reasons)))
            _write_results(folder, summarize(folder))
        return
    try:
        summary = summarize(folder)
        verdict: Status = "valid" if summary.valid else "invalid"
        write_run(folder, msgspec.structs.replace(ended, status=verdict, reasons=summary.reasons))
        _write_results(folder, summary)
    except OSError as error:
        raise HarnessError(
            f"{folder}: the results cannot be written ({error.strerror})",
            next_step=f"The records are there. Make room, then: harness report {folder}",
        ) from None
    except KeyboardInterrupt:
        write_run(folder, msgspec.structs.replace(ended, status="interrupted", reasons=["interrupted at the end"]))
        raise


def _write_results(folder: Path, summary: Summary) -> None:
    write_summary(folder, summary)
    html.write_report(folder)


def _versions() -> dict[str, str]:
    """What touches the measurement: packages, and a sum over our own code that sends and stamps requests."""
    own = [*sorted((paths.ROOT / "harness" / "load").glob("*.py")), *sorted(paths.LOCUSTFILES.glob("*.py"))]
    digest = hashlib.sha256()
    written = paths.ROOT / "harness" / "scenario"
    made = [written / f"{name}.py" for name in ("lengths", "structured", "behaviour", "steady")]
    for path in [*own, *sorted((written.parent / "workload").glob("*.py")), *made]:
        digest.update(path.read_bytes())
    packages = {package: importlib.metadata.version(package) for package in MEASURING_PACKAGES}
    python = platform.python_version()
    return {"amd-llm-load": __version__, "load generator": digest.hexdigest()[:16], "python": python, **packages}


def _git_commit() -> str | None:
    try:
        command = ["git", "-C", str(paths.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _cells(
    experiment: Experiment, run_id: str, cells: list[Cell], folder: Path, progress: Progress, note: Note
) -> Iterator[CellRun]:
    """Run the cells in order. One server start serves one cell, or all of a repeat when `restart` is false.

    `note` takes what is known of a cell before that.
    """
    scenario = experiment.scenario
    took: dict[tuple[str, str], float] = {}
    for _, group in groupby(cells, key=lambda c: at_once(c) if scenario.restart else (c.repeat, c.server)):
        together = list(group)
        first = together[0]
        progress.cell(cells.index(first) + 1, len(cells), first, _time_left(cells[cells.index(first) :], took))
        begin = time.monotonic()
        before = [] if experiment.target else gpu_memory()
        if experiment.target is None and is_offline(scenario.servers[first.server]):
            for cell in together:
                progress.cell(cells.index(cell) + 1, len(cells), cell, None)
                cell_run = _offline(experiment, run_id, cell, folder, progress)
                yield msgspec.structs.replace(cell_run, gpu_memory_before=before)
            continue
        with endpoint_of(experiment, run_id, first, folder, progress) as endpoint:
            for _, parts in groupby(together, key=at_once):
                cell, *others = parts
                if cell is not first:
                    if endpoint.check_alive() is not None:
                        # The cell in which it died says why; that not all planned cells ran is said of the run.
                        progress.line(f"{cell.id} is not run: its server has died")
                        continue
                    progress.cell(cells.index(cell) + 1, len(cells), cell, None)
                note(*(_cell_run(each, endpoint, time.time()) for each in [cell, *others]))
                for cell_run in _mixed(experiment, run_id, [cell, *others], endpoint, folder, progress, note):
                    yield msgspec.structs.replace(cell_run, gpu_memory_before=before)
        took |= {(cell.server, cell.load): 0.0 for cell in together}
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
        yield attach(
            target.url,
            scenario.model,
            _api_key(scenario),
            key_name=scenario.api_key_env,
            metrics_url=target.metrics_url,
        )
        return
    with serve(
        scenario, cell.server, run_id=run_id, cell_id=cell.id, run_folder=folder, on_progress=progress.stage
    ) as endpoint:
        yield endpoint


def _mixed(
    experiment: Experiment,
    run_id: str,
    cells: list[Cell],
    endpoint: Endpoint,
    folder: Path,
    progress: Progress,
    note: Note,
) -> list[CellRun]:
    """Run the parts of a mix at once, each with a load generator of its own.

    Most often there is just one cell, or the stages of a load, which share one.
    """
    if mix_of(cells[0].load) is None:
        return _cell(experiment, run_id, cells, endpoint, folder, progress, endpoint.check_alive, note)
    ended = threading.Event()
    asking = threading.Lock()

    def alive() -> str | None:
        with asking:
            return "the load was ended with the others of its mix" if ended.is_set() else endpoint.check_alive()

    def part(cell: Cell, show: Progress | None) -> list[CellRun]:
        others = [other for other in cells if other is not cell]
        try:
            return _cell(experiment, run_id, [cell], endpoint, folder, show, alive, note, beside=others)
        finally:
            warm_sign(_tickets_path(folder.resolve(), cell)).touch()  # nobody waits for one that has ended

    with ThreadPoolExecutor(len(cells)) as pool:
        shown: list[Progress | None] = [progress, *([None] * (len(cells) - 1))]
        running = [pool.submit(part, cell, show) for cell, show in zip(cells, shown, strict=True)]
        try:
            return [cell_run for future in running for cell_run in future.result()]
        except BaseException:
            ended.set()  # their load generators are stopped, and what they sent is recorded
            raise


def _cell(
    experiment: Experiment,
    run_id: str,
    cells: list[Cell],
    endpoint: Endpoint,
    folder: Path,
    progress: Progress | None,
    alive: Callable[[], str | None],
    note: Note,
    beside: Sequence[Cell] = (),
) -> list[CellRun]:
    """Load one cell's server, or those of a load's stages one after the other, and say what happened.

    `beside`: the other parts of its mix. `note` is told of each stage that has ended.
    """
    cell = cells[0]
    words = counted_words(experiment, run_id, cell.server, endpoint, _api_key(experiment.scenario))
    served, whole = endpoint.served_by, folder.resolve()
    jobs = [make_job(experiment, each, whole, served, salt_words(run_id, each.id, words), words) for each in cells]
    job = msgspec.structs.replace(jobs[0], then=jobs[1:], beside=[_tickets_path(whole, other) for other in beside])
    job_path = folder.resolve() / "jobs" / f"{cell.id}.json"
    write_job(job, job_path)
    log_path = folder / "logs" / f"{cell.id}.locust.log"
    start = generator(experiment, run_id, job, job_path, endpoint, log_path)
    interval_s = experiment.scenario.metrics_interval_s
    api_key = _api_key(experiment.scenario)
    if progress is not None:
        progress.load(job, folder)
    with (
        Scraper(endpoint.metrics_source, cell.id, folder / "metrics.jsonl", interval_s, api_key=api_key) as scraper,
        Sampler(source_of(endpoint), cell.id, folder / "telemetry.jsonl") as sampler,
    ):
        count: Callable[[Count], None] = _unseen if progress is None else progress.count
        if len(jobs) > 1:
            begun_s = time.time()
            count = _by_stage(
                cells, jobs, folder, progress, (scraper, sampler),
                lambda stage: note(_cell_run(stage, endpoint, begun_s, time.time())),
            )  # fmt: skip
        driven = drive(start, job, log_path=log_path, alive=alive, progress=count)
    problems = [*driven.problems, *_died_unnoticed(endpoint, driven), *endpoint.evidence(), *endpoint.problems()]
    return [_cell_run(each, endpoint, driven.started_wall_s, driven.ended_wall_s, problems) for each in cells]


def _cell_run(
    cell: Cell, endpoint: Endpoint, begun_s: float, ended_s: float | None = None, problems: Sequence[str] = ()
) -> CellRun:
    return CellRun(
        id=cell.id,
        server=cell.server,
        load=cell.load,
        repeat=cell.repeat,
        started_wall_s=begun_s,
        ended_wall_s=ended_s,
        served_by=endpoint.served_by,
        problems=list(problems),
    )


def _died_unnoticed(endpoint: Endpoint, driven: Driven) -> list[str]:
    """That the server has died since the load last looked, unless it is told already."""
    dead = endpoint.look(True).problem
    return [] if dead is None or any(DIED in problem for problem in driven.problems) else [f"{DIED}: {dead}"]


def _by_stage(
    cells: list[Cell],
    jobs: list[Job],
    folder: Path,
    progress: Progress | None,
    watchers: tuple[Scraper, Sampler],
    ended: Callable[[Cell], None],
) -> Callable[[Count], None]:
    """Takes the counts of a load with stages: what is read and shown is that of the stage which has begun last."""
    now = 0

    def count(count: Count) -> None:
        nonlocal now
        begun = [number for number, job in enumerate(jobs) if _has_begun(job)]
        if begun and begun[-1] != now:
            for cell in cells[now : begun[-1]]:
                ended(cell)
            now = begun[-1]
            for watcher in watchers:
                watcher.cell = cells[now].id
            if progress is not None:
                progress.next_stage(cells[now], jobs[now], folder)
        if progress is not None:
            progress.count(count)

    return count


def _has_begun(job: Job) -> bool:
    path = Path(job.tickets_path)
    return path.exists() and path.stat().st_size > 0


def _unseen(count: Count) -> None:
    """Of the parts of a mix one is shown."""


def _offline(experiment: Experiment, run_id: str, cell: Cell, folder: Path, progress: Progress) -> CellRun:
    """A cell without a server and without a load generator: all its requests at once through vLLM's offline engine."""
    words = counted_words(experiment, run_id, cell.server, None, None)
    salt = salt_words(run_id, cell.id, words)
    job = make_job(experiment, cell, folder.resolve(), None, salt, words)
    if job.warmup.until is not None:  # nothing is in flight before and after what it is given at once
        job = msgspec.structs.replace(job, warmup=Warmup(requests=wave_of(job.load)))
    write_job(job, folder.resolve() / "jobs" / f"{cell.id}.json")
    return offline_cell(experiment.scenario, cell, job, run_id=run_id, folder=folder, say=progress.stage)


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
        return lambda: ContainerChild(
            run_id, job, arguments, [locustfile], endpoint.network, log_path, endpoint.secrets
        )
    command = [sys.executable, "-m", "locust", *locust_arguments(job, job_path, locustfile, endpoint.url, ui)]
    return lambda: LocalChild(command, log_path, endpoint.secrets)


def make_job(
    experiment: Experiment, cell: Cell, folder: Path, served: ServedBy | None, salt: str, words: Sequence[str] = ()
) -> Job:
    """The job of a cell. `folder`: the run directory as the load processes see it; `served`: None without a server."""
    scenario = experiment.scenario
    prompts, trace = scenario.prompts, scenario.loads[cell.load].trace
    return Job(
        run=folder.name[-4:],  # the random part of its id
        cell=cell.id,
        load_name=cell.load,
        load=scenario.loads[cell.load],
        model=(served and served.model) or scenario.model,
        prompts=prompts,
        prompt_file=str(experiment.folder / prompts.file) if prompts.file else None,
        trace_file=str((experiment.folder / trace.file).resolve()) if trace is not None else None,
        prompt_lengths=list(pairs_of(prompts.tokens, experiment.folder)),
        output_lengths=list(pairs_of(scenario.loads[cell.load].output_tokens, experiment.folder)),
        words=list(words),
        seed=scenario.seed,
        salt=salt if prompts.salt else None,
        warmup=warmup_of(scenario, scenario.loads[cell.load]),
        api_key_env=scenario.api_key_env,
        simulated=served is not None and served.simulated,
        requests_path=str(folder / "requests.jsonl"),
        processes_path=str(folder / "processes.jsonl"),
        tickets_path=_tickets_path(folder, cell),
        workers=experiment.workers,
    )


def _tickets_path(folder: Path, cell: Cell) -> str:
    return str(folder / "jobs" / f"{cell.id}.tickets")
