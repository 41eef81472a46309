"""The one orchestrator: serve, drive and record every cell of a scenario, and leave a run directory."""

import contextlib
import errno
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import msgspec

from harness import paths
from harness.errors import HarnessError, RunError
from harness.job import Job, warm_sign, write_job
from harness.machine.gpus import gpu_memory
from harness.machine.telemetry import Sampler
from harness.prepare.experiment import Experiment
from harness.prepare.preflight import preflight
from harness.prepare.prompt_words import counted_words
from harness.process import refuse_too_few_files
from harness.run.drive import Child, Count, Driven, LineCounter, LocalChild, drive, locust_arguments
from harness.run.offline import offline_cell
from harness.run.progress import Progress
from harness.run.running import Running, begin, finish
from harness.rundir.manifest import CellRun, Run, Status, release_space, write_run
from harness.rundir.metrics import Scraper
from harness.scenario.mixes import mix_of
from harness.scenario.plan import Cell, at_once, plan
from harness.scenario.scenario import Warmup, connections_per_process, locustfile_of, warmup_of, wave_of
from harness.serve import Endpoint, attach, is_offline, serve
from harness.serve.docker.generator import ContainerChild, in_image
from harness.serve.endpoint import source_of
from harness.units import count
from harness.workers import Workers
from harness.workload import pairs_of, salt_words

Watchers = tuple[Scraper, Sampler]
Note = Callable[..., None]  # takes CellRuns, as they are known now


def run(experiment: Experiment, runs: Path, progress: Progress) -> Path:
    """Run every cell and return the run directory.

    However it ends, the directory holds what was measured, with a manifest that says how it ended. Raises
    ServerError when a server does not become ready, RunError when the load cannot be driven, KeyboardInterrupt
    after everything was taken down.
    """
    if experiment.scenario.generator == "process" and experiment.workers is None:
        refuse_too_few_files(max(map(connections_per_process, experiment.scenario.loads.values())))
    experiment = preflight(experiment, progress.line)
    cells = plan(experiment.scenario)
    running, manifest = begin(experiment, cells, runs, progress)
    folder = running.folder
    known: dict[str, CellRun] = {}

    def note(*cell_runs: CellRun) -> None:
        nonlocal manifest
        known.update({cell_run.id: cell_run for cell_run in cell_runs})
        manifest = msgspec.structs.replace(manifest, cells=list(known.values()))
        write_run(folder, manifest)

    try:
        progress.line(f"Run {running.id}: {count(len(cells), 'cell')}. Records go to {folder}")
        if experiment.workers is not None:
            who = ", ".join(experiment.workers.names) or f"{experiment.workers.machines} machines"
            progress.line(f"Workers: {who}. On each of them: {experiment.workers.command}")
        with progress.live():
            for cell_run in _cells(running, cells, note):
                note(cell_run)
    except BaseException as raised:
        error = _disk_error(raised, manifest, folder) or raised
        finish(folder, manifest, *_how_it_ended(error))
        left = f"What was measured until then: harness report {folder}"
        if (folder / "requests.jsonl").stat().st_size == 0:
            raise error from None
        if isinstance(error, HarnessError):
            error.next_step = f"{error.next_step} {left}".strip()
        if isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(OSError):  # nobody reads it any more
                progress.line(left)
        raise error from None
    finish(folder, manifest)
    return folder


def _disk_error(error: BaseException, manifest: Run, folder: Path) -> RunError | None:
    """What a full disk, or a limit of it, has cost; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    release_space(folder, half=True)
    counter = LineCounter(folder / "requests.jsonl")
    counter.offset = 0
    counter.update()
    return RunError(
        f"{folder}: the disk is full ({error.strerror}): {len(manifest.ran)} of {count(len(manifest.order), 'cell')} "
        f"have run, {count(counter.lines, 'request')} recorded; the rest was not measured",
        next_step="Make room, or give a folder on another disk with --runs DIR, and run it again.",
    )


def _how_it_ended(error: BaseException) -> tuple[Status, list[str]]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ["interrupted before all cells had run"]
    return "failed", [error.what if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"]


def _cells(running: Running, cells: list[Cell], note: Note) -> Iterator[CellRun]:
    """Run the cells in order. One server start serves one cell, or all of a repeat when `restart` is false.

    `note` takes what is known of a cell before that.
    """
    scenario, target, progress = running.scenario, running.experiment.target, running.progress
    took: dict[tuple[str, str], float] = {}
    for _, group in groupby(cells, key=lambda c: at_once(c) if scenario.restart else (c.repeat, c.server)):
        together = list(group)
        first = together[0]
        progress.cell(cells.index(first) + 1, len(cells), first, _time_left(cells[cells.index(first) :], took))
        begin = time.monotonic()
        before = [] if target else gpu_memory()
        if target is None and is_offline(scenario.servers[first.server]):
            for cell in together:
                progress.cell(cells.index(cell) + 1, len(cells), cell, None)
                yield msgspec.structs.replace(_offline(running, cell), gpu_memory_before=before)
            continue
        with endpoint_of(running, first) as endpoint:
            for _, parts in groupby(together, key=at_once):
                cell, *others = parts
                if cell is not first:
                    if (dead := endpoint.check_alive()) is not None:
                        # That not all planned cells ran is said of the run.
                        progress.line(f"{cell.id} is not run: {dead}")
                        continue
                    progress.cell(cells.index(cell) + 1, len(cells), cell, None)
                note(*(_cell_run(each, endpoint, time.time()) for each in [cell, *others]))
                for cell_run in _mixed(running, [cell, *others], endpoint, note):
                    yield msgspec.structs.replace(cell_run, gpu_memory_before=before)
        took |= {(cell.server, cell.load): 0.0 for cell in together}
        took[first.server, first.load] = time.monotonic() - begin


def _time_left(cells: list[Cell], took: dict[tuple[str, str], float]) -> float | None:
    """The sum of what the same cells took before; None until each was seen once."""
    if any((cell.server, cell.load) not in took for cell in cells):
        return None
    return sum(took[cell.server, cell.load] for cell in cells)


@contextlib.contextmanager
def endpoint_of(running: Running, cell: Cell) -> Iterator[Endpoint]:
    scenario, target, tell = running.scenario, running.experiment.target, running.progress.stage
    if target is not None:
        tell("asking the server")
        key_name = scenario.api_key_env
        yield attach(target.url, scenario.model, running.api_key, key_name=key_name, metrics_url=target.metrics_url)
        return
    with serve(
        scenario, cell.server, run_id=running.id, cell_id=cell.id, run_folder=running.folder, on_progress=tell
    ) as endpoint:
        yield endpoint


def _mixed(running: Running, cells: list[Cell], endpoint: Endpoint, note: Note) -> list[CellRun]:
    """Run the parts of a mix at once, each with a load generator of its own.

    Most often there is just one cell, or the stages of a load, which share one.
    """
    if mix_of(cells[0].load) is None:
        return _cell(running, cells, endpoint, endpoint.check_alive, note)
    ended = threading.Event()
    asking = threading.Lock()

    def alive() -> str | None:
        with asking:
            return "the load was ended with the others of its mix" if ended.is_set() else endpoint.check_alive()

    def part(cell: Cell) -> list[CellRun]:
        others = [other for other in cells if other is not cell]
        try:
            return _cell(running, [cell], endpoint, alive, note, beside=others, shown=cell is cells[0])
        finally:
            warm_sign(running.tickets_path(cell.id)).touch()  # nobody waits for one that has ended

    with ThreadPoolExecutor(len(cells)) as pool:
        parts = [pool.submit(part, cell) for cell in cells]
        try:
            return [cell_run for future in parts for cell_run in future.result()]
        except BaseException:
            ended.set()  # their load generators are stopped, and what they sent is recorded
            raise


def _cell(
    running: Running,
    cells: list[Cell],
    endpoint: Endpoint,
    alive: Callable[[], str | None],
    note: Note,
    *,
    beside: Sequence[Cell] = (),
    shown: bool = True,
) -> list[CellRun]:
    """Load one cell's server, or those of a load's stages one after the other, and say what happened.

    `note` is told of each stage that has ended. `beside`: the other parts of its mix, of which one is shown.
    """
    jobs = [make_job(running, each, endpoint) for each in cells]
    job = msgspec.structs.replace(jobs[0], then=jobs[1:], beside=[running.tickets_path(other.id) for other in beside])
    start = generator(running, job, endpoint)
    if shown:
        running.progress.load(job, running.folder)
    with watched(running, job, endpoint, running.scenario.metrics_interval_s) as watchers:
        count: Callable[[Count], None] = running.progress.count if shown else (lambda _: None)
        if len(jobs) > 1:
            begun_s = time.time()
            count = _by_stage(
                running, cells, jobs, watchers, lambda stage: note(_cell_run(stage, endpoint, begun_s, time.time()))
            )
        driven = drive(start, job, log_path=running.log_path(job.cell), alive=alive, progress=count)
    problems = [*driven.problems, *_death_problems(endpoint, driven), *endpoint.problems()]
    return [_cell_run(each, endpoint, driven.started_wall_s, driven.ended_wall_s, problems) for each in cells]


def _cell_run(
    cell: Cell, endpoint: Endpoint, begun_s: float, ended_s: float | None = None, problems: Sequence[str] = ()
) -> CellRun:
    return CellRun(
        **msgspec.structs.asdict(cell),
        started_wall_s=begun_s,
        ended_wall_s=ended_s,
        served_by=endpoint.served_by,
        problems=list(problems),
    )


def _death_problems(endpoint: Endpoint, driven: Driven) -> list[str]:
    """How the server died, unless the load was ended for it, and what its log says about it."""
    death = endpoint.death(now=True)
    if death is None:
        return []
    sentences = (death.problem(), death.evidence())
    return [sentence for sentence in sentences if sentence is not None and sentence not in driven.problems]


def _by_stage(
    running: Running, cells: list[Cell], jobs: list[Job], watchers: Watchers, ended: Callable[[Cell], None]
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
            running.progress.next_stage(cells[now], jobs[now], running.folder)
        running.progress.count(count)

    return count


def _has_begun(job: Job) -> bool:
    path = Path(job.tickets_path)
    return path.exists() and path.stat().st_size > 0


def _offline(running: Running, cell: Cell) -> CellRun:
    """A cell without a server and without a load generator: all its requests at once through vLLM's offline engine."""
    job = make_job(running, cell, None)
    if job.warmup.until is not None:  # nothing is in flight before and after what it is given at once
        job = msgspec.structs.replace(job, warmup=Warmup(requests=wave_of(job.load)))
    write_job(job, running.job_path(job.cell))
    return offline_cell(running, cell, job)


@contextlib.contextmanager
def watched(running: Running, job: Job, endpoint: Endpoint, interval_s: float) -> Iterator[Watchers]:
    """While a load goes on: its server's metrics and its machine's telemetry are written."""
    folder, source = running.folder, endpoint.metrics_source
    with (
        Scraper(source, job.cell, folder / "metrics.jsonl", interval_s, api_key=running.api_key) as scraper,
        Sampler(source_of(endpoint), job.cell, folder / "telemetry.jsonl") as sampler,
    ):
        yield scraper, sampler


def generator(running: Running, job: Job, endpoint: Endpoint, ui: tuple[str, int] | None = None) -> Callable[[], Child]:
    """Write the job of a cell. How to start its load generator, as the scenario wants it: a process or a container."""
    job_path, log_path = running.job_path(job.cell), running.log_path(job.cell)
    write_job(job, job_path)
    locustfile = locustfile_of(job.load, running.experiment.folder, paths.LOCUSTFILES)
    if running.scenario.generator == "container":
        url = endpoint.network_url or endpoint.url
        arguments = locust_arguments(job, job_path, in_image(locustfile), url)
        return lambda: ContainerChild(running.id, job, arguments, locustfile, endpoint.network, log_path)
    command = [sys.executable, "-m", "locust", *locust_arguments(job, job_path, locustfile, endpoint.url, ui)]
    return lambda: LocalChild(command, log_path)


def _workers(running: Running, load: str) -> Workers | None:
    """The machines that send a load; each part of a mix has its own place at which it is found."""
    workers, mix = running.experiment.workers, mix_of(load)
    if workers is None or mix is None:
        return workers
    return workers.of_part([name for name in running.scenario.loads if mix_of(name) == mix].index(load))


def make_job(running: Running, cell: Cell, endpoint: Endpoint | None) -> Job:
    """The job of a cell; without an endpoint there is no server. Raises HarnessError, ServerError."""
    scenario, beside = running.scenario, running.experiment.folder
    served = None if endpoint is None else endpoint.served_by
    words = counted_words(running.experiment, running.id, cell.server, endpoint, running.api_key)
    load, prompts = scenario.loads[cell.load], scenario.prompts
    trace = None if load.trace is None else (beside / load.trace.file).resolve()
    marks = None if trace is None else trace.with_name("processes.jsonl")
    return Job(
        run=running.id[-4:],  # the random part
        cell=cell.id,
        load_name=cell.load,
        load=load,
        model=(served and served.model) or scenario.model,
        prompts=prompts,
        prompt_file=str(beside / prompts.file) if prompts.file else None,
        trace_file=None if trace is None else str(trace),
        trace_marks=str(marks) if marks is not None and marks.is_file() else None,
        prompt_lengths=list(pairs_of(prompts.tokens, beside)),
        output_lengths=list(pairs_of(load.output_tokens, beside)),
        words=list(words),
        seed=scenario.seed,
        salt=salt_words(running.id, cell.id, words) if prompts.salt else None,
        warmup=warmup_of(scenario, load),
        api_key_env=scenario.api_key_env,
        simulated=served is not None and served.simulated,
        requests_path=str(running.folder.resolve() / "requests.jsonl"),
        processes_path=str(running.folder.resolve() / "processes.jsonl"),
        tickets_path=running.tickets_path(cell.id),
        workers=_workers(running, cell.load),
    )
