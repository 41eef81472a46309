"""The orchestrator: serve, drive and record every cell of a scenario, and write a run directory."""

import contextlib
import errno
import shlex
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import msgspec

from harness.errors import HarnessError, RunError
from harness.files import LOCUSTFILES, open_file
from harness.job import Job, warm_sign, workload_of, write_job
from harness.machine.gpus import read_gpu_memory, wait_until_free
from harness.machine.telemetry import Sampler
from harness.prepare.experiment import Experiment
from harness.prepare.machine_fit import preflight
from harness.process import refuse_too_few_files
from harness.reasons import sentence
from harness.run.drive import Child, LocalChild, Monitor, Watch, drive, locust_arguments
from harness.run.progress import Progress
from harness.run.running import FailedSettings, OutOfTime, RunFile, Running, begin
from harness.rundir.directory import lock_folder, release_space
from harness.rundir.manifest import CellRun, ServedBy
from harness.rundir.records import ProcessMark, Request
from harness.rundir.samples import Scraper
from harness.scenario import (
    SERVER_TOKENIZER,
    Warmup,
    connections_per_process,
    locustfile_of,
    warmup_of,
    wave_of,
)
from harness.scenario.plan import Cell, alone, plan
from harness.serve import Endpoint, attach_to_server, prepare_server, serve
from harness.serve.generator import ContainerChild, find_path_in_image
from harness.serve.lifecycle import find_telemetry_source
from harness.serve.offline import OfflineOutcome, run_offline
from harness.serve.probe import make_token_counter
from harness.summary import Reason, because
from harness.units import count
from harness.workload import local_words, pairs_of, salt_words, words_of
from harness.workload.prompt_file import read_rows

Watchers = tuple[Scraper, Sampler]
# Runs cells one after the other, and yields each that has ended; the cells: those planned before the start.
Steps = Callable[[Running, list[Cell]], Iterable[CellRun]]


def run(experiment: Experiment, runs: Path, progress: Progress, steps: Steps | None = None) -> Path:
    """Run every cell and return the run directory. `steps`: None runs all of them, in their order.

    However it ends, the directory holds what was measured, with a manifest that says how it ended. Raises
    ServerError when a server does not become ready, RunError when the load cannot be driven, KeyboardInterrupt
    after everything was taken down.
    """
    if experiment.scenario.generator == "process" and experiment.workers is None:
        refuse_too_few_files(max(map(connections_per_process, experiment.scenario.loads.values())))
    experiment = preflight(experiment, progress.line)
    return conduct(experiment, plan(experiment.scenario), runs, progress, steps or run_cells)


def conduct(experiment: Experiment, cells: list[Cell], runs: Path, progress: Progress, steps: Steps) -> Path:
    """Make a run directory, run the steps, and write how that ended; see `run`."""
    running = begin(experiment, cells, runs, progress)
    with lock_folder(running.folder):
        planned = f"{count(len(cells), 'cell')}. " if cells else ""
        progress.line(f"Run {running.id}: {planned}Records go to {running.folder}")
        return carry_out(running, cells, steps)


def carry_out(running: Running, cells: list[Cell], steps: Steps) -> Path:
    """Run the steps in a run directory, whose lock this process has, and write how that ended; see `run`."""
    folder, file, progress = running.folder, running.file, running.progress
    try:
        if (workers := running.experiment.workers) is not None:
            who = ", ".join(workers.names) or f"{workers.machines} machines"
            progress.line(f"Workers: {who}. On each of them: {workers.command}")
        with progress.live():
            for cell_run in steps(running, cells):
                file.note(cell_run)
    except BaseException as raised:
        error = _disk_error(raised, file) or raised
        if isinstance(error, KeyboardInterrupt):
            file.finish("interrupted", [because("interrupted")])
        else:
            kind = type(error).__name__
            what = error.what if isinstance(error, HarnessError) else f"{kind}: {error}"
            file.finish("failed", [because("run_error", error=what, kind=kind)])
        left = [f"What was measured until then: harness report {folder}"]
        if all(cell_run.seed is None for cell_run in file.manifest.cells):  # a capacity search has no plan
            left.append(f"To measure the rest: harness run --resume {shlex.quote(str(folder))}")
        if (folder / "requests.jsonl").stat().st_size == 0:
            raise error from None
        if isinstance(error, HarnessError):
            error.next_step = " ".join(filter(None, [error.next_step, *left]))
        if isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(OSError):  # the terminal may be closed
                progress.line("\n".join(left))
        raise error from None
    file.finish()
    return folder


def _disk_error(error: BaseException, file: RunFile) -> RunError | None:
    """Explain an error of a full disk or quota; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    folder, manifest = file.folder, file.manifest
    release_space(folder, half=True)
    with open_file(folder / "requests.jsonl") as requests:
        recorded = sum(block.count(b"\n") for block in iter(lambda: requests.read(2**20), b""))
    return RunError(
        f"{folder}: the disk is full ({error.strerror}): {len(manifest.ran)} of {count(len(manifest.order), 'cell')} "
        f"have run, {count(recorded, 'request')} recorded; the rest was not measured",
        next_step="Make room, or give a folder on another disk with --runs DIR, and run it again.",
    )


def run_cells(running: Running, cells: list[Cell]) -> Generator[CellRun, None, None]:
    """Run the cells in order. One server start serves one cell, or all of a repeat when `restart` is false."""
    scenario, target, progress = running.scenario, running.experiment.target, running.progress
    kept = running.file.manifest.cells
    took: dict[tuple[str, str], float] = {}  # by server and load, in earlier repeats
    idle = [] if target else read_gpu_memory()
    failed = FailedSettings(scenario, progress.line, kept)

    def show(cell: Cell, *, first: bool = False) -> None:
        left = [took.get((one.server, one.load)) for one in cells[cells.index(cell) :]]
        known = [seconds for seconds in left if seconds is not None]
        left_s = sum(known) if first and len(known) == len(left) else None
        progress.cell(cells.index(cell) + 1, len(cells), cell, left_s)

    def start(together: list[Cell]) -> Iterator[CellRun]:
        first = together[0]
        show(first, first=True)
        begin = time.monotonic()
        before = [] if target else wait_until_free(idle)
        if target is None and prepare_server(scenario, first.server).file.serving.offline:
            for cell in together:
                show(cell)
                yield msgspec.structs.replace(_offline(running, cell), gpu_memory_before=before)
            return
        with endpoint_of(running, first) as endpoint:
            refuse_other_server(kept, first.server, endpoint)
            for _, parts in groupby(together, key=lambda cell: cell.group):
                cell, *others = parts
                if cell is not first:
                    if (dead := endpoint.check_alive()) is not None:
                        if sweeping:
                            return
                        # The run's reasons already name missing cells.
                        progress.line(f"{cell.id} is not run: {sentence(dead)}")
                        continue
                    show(cell)
                running.file.note(*(_cell_run(each, endpoint.served_by, time.time()) for each in [cell, *others]))
                for cell_run in run_group(running, [cell, *others], endpoint):
                    yield msgspec.structs.replace(cell_run, gpu_memory_before=before)
        took.update({(cell.server, cell.load): 0.0 for cell in together})
        took[first.server, first.load] = time.monotonic() - begin

    sweeping = scenario.swept is not None and target is None
    for _, group in groupby(
        cells, key=lambda cell: cell.group if scenario.restart else f"r{cell.repeat}/{cell.server}"
    ):
        together = list(group)
        yield from failed.results(together, start) if sweeping else start(together)


def refuse_other_server(kept: list[CellRun], server: str, endpoint: Endpoint) -> None:
    """Raise HarnessError when a resumed run would measure another server under the name of the one that it had."""
    measured = [cell.served_by for cell in kept if cell.server == server and cell.failed is None]
    before, now = measured[-1] if measured else None, endpoint.served_by
    for key in ("image_digest", "version", "model") if before is not None else ():
        had, has = getattr(before, key), getattr(now, key)
        if had is not None and has is not None and had != has:
            raise HarnessError(
                f"server '{server}': {key} was {had} in the cells that are kept, and is {has} now",
                next_step="Bring that server back, or run the scenario anew: a row is about one server.",
            )


@contextlib.contextmanager
def endpoint_of(running: Running, cell: Cell) -> Iterator[Endpoint]:
    scenario, target = running.scenario, running.experiment.target

    def tell(text: str) -> None:
        if running.is_over:
            raise OutOfTime("the budget of the run was spent before the server was ready")
        running.progress.stage(text)

    if target is not None:
        tell("asking the server")
        key_name = scenario.api_key_env
        yield attach_to_server(
            target.url, scenario.model, running.api_key, key_name=key_name, metrics_url=target.metrics_url
        )
        return
    with serve(
        scenario, cell.server, run_id=running.id, cell_id=cell.id, run_folder=running.folder, on_progress=tell
    ) as endpoint:
        yield endpoint


def run_group(running: Running, cells: list[Cell], endpoint: Endpoint, watch: Watch | None = None) -> list[CellRun]:
    """Run the parts of a mix at once, each with a load generator of its own.

    Most often there is just one cell, or the stages of a load, which share one. `watch`: as of `run_cell`, for all.
    """

    def in_time() -> Reason | None:
        return because("out_of_time") if running.is_over else endpoint.check_alive()

    if cells[0].mix is None:
        return run_cell(running, cells, endpoint, in_time, watch=watch)
    ended = threading.Event()
    asking = threading.Lock()

    def alive() -> Reason | None:
        with asking:
            return because("mix_ended") if ended.is_set() else in_time()

    def part(cell: Cell) -> list[CellRun]:
        others = [other for other in cells if other is not cell]
        try:
            return run_cell(running, [cell], endpoint, alive, concurrent=others, shown=cell is cells[0], watch=watch)
        finally:
            warm_sign(running.counter_path(cell.id)).touch()  # the other loads do not wait for one that has ended

    with ThreadPoolExecutor(len(cells)) as pool:
        parts = [pool.submit(part, cell) for cell in cells]
        try:
            return [cell_run for future in parts for cell_run in future.result()]
        except BaseException:
            ended.set()  # their load generators are stopped, and what they sent is recorded
            raise


def run_cell(
    running: Running,
    cells: list[Cell],
    endpoint: Endpoint,
    alive: Callable[[], Reason | None],
    *,
    concurrent: Sequence[Cell] = (),
    shown: bool = True,
    watch: Watch | None = None,
) -> list[CellRun]:
    """Send one cell's load, or a load's stages one after the other; return the results.

    `concurrent`: the other loads of its mix. Progress shows one of them. `watch`: stops the load as soon as it has seen
    enough.
    """
    jobs = [make_job(running, each, endpoint) for each in cells]
    job = msgspec.structs.replace(
        jobs[0], then=jobs[1:], concurrent_loads=[running.counter_path(other.id) for other in concurrent]
    )
    start = generator(running, job, endpoint)
    monitor = Monitor(job, watch)
    if shown:
        running.progress.load(monitor)
    with watched(running, job, endpoint, running.scenario.metrics_interval_s) as watchers:
        begun_s, now = time.time(), 0

        def progressed() -> None:
            nonlocal now
            sizes = [Path(one.counter_path).stat().st_size if Path(one.counter_path).exists() else 0 for one in jobs]
            begun = [number for number, size in enumerate(sizes) if size]
            if len(jobs) > 1 and begun and begun[-1] != now:  # the next stage
                for stage in cells[now : begun[-1]]:
                    running.file.note(_cell_run(stage, endpoint.served_by, begun_s, time.time()))
                now = begun[-1]
                for watcher in watchers:
                    watcher.cell = cells[now].id
                monitor.follow(jobs[now])
                running.progress.next_stage(cells[now], monitor)
            if shown:
                running.progress.count()

        driven = drive(start, monitor, log_path=running.log_path(job.cell), alive=alive, progress=progressed)
    death = endpoint.death(now=True)
    of_death = [] if death is None else [death.problem(), death.evidence()]  # unless the load ended for it
    more = [reason for reason in of_death if reason is not None and reason not in driven.problems]
    problems = [*driven.problems, *more, *endpoint.problems()]
    times = driven.started_wall_s, driven.ended_wall_s
    found = [_cell_run(each, endpoint.served_by, *times, problems) for each in cells]
    if watch is None or driven.stopped_s is None:
        return found
    return [msgspec.structs.replace(each, stopped_after_s=watch.measured_s(driven.stopped_s)) for each in found]


def _cell_run(
    cell: Cell, served_by: ServedBy, begun_s: float, ended_s: float | None = None, problems: Sequence[Reason] = ()
) -> CellRun:
    known = msgspec.structs.asdict(cell) | {"served_by": served_by, "problems": list(problems)}
    return CellRun(**known, started_wall_s=begun_s, ended_wall_s=ended_s)


@contextlib.contextmanager
def watched(running: Running, job: Job, endpoint: Endpoint, interval_s: float) -> Iterator[Watchers]:
    folder, source = running.folder, endpoint.metrics_source
    with (
        Scraper(source, job.cell, folder / "metrics.jsonl", interval_s, api_key=running.api_key) as scraper,
        Sampler(find_telemetry_source(endpoint), job.cell, folder / "telemetry.jsonl") as sampler,
    ):
        yield scraper, sampler


def generator(running: Running, job: Job, endpoint: Endpoint, ui: tuple[str, int] | None = None) -> Callable[[], Child]:
    """Write the job of a cell. Return a function that starts its load generator: a process or a container."""
    job_path, log_path = running.job_path(job.cell), running.log_path(job.cell)
    write_job(job, job_path)
    locustfile = locustfile_of(job.load, running.experiment.folder, LOCUSTFILES)
    if running.scenario.generator == "container":
        url = endpoint.network_url or endpoint.url
        arguments = locust_arguments(job, job_path, find_path_in_image(locustfile), url)
        return lambda: ContainerChild(running.id, job, arguments, locustfile, endpoint.network, log_path)
    command = [sys.executable, "-m", "locust", *locust_arguments(job, job_path, locustfile, endpoint.url, ui)]
    return lambda: LocalChild(command, log_path)


def make_job(running: Running, cell: Cell, endpoint: Endpoint | None) -> Job:
    """The job of a cell; without an endpoint there is no server. Raises HarnessError, ServerError."""
    scenario, folder = running.scenario, running.experiment.folder
    served = None if endpoint is None else endpoint.served_by
    words = counted_words(running.experiment, running.id, cell.server, endpoint, running.api_key)
    load, prompts = scenario.loads[cell.load], scenario.prompts
    trace = None if load.trace is None else (folder / load.trace.file).resolve()
    marks = None if trace is None else trace.with_name("processes.jsonl")
    workers = running.experiment.workers
    if workers is not None and cell.mix is not None:  # each load of a mix has its own master and port
        number = scenario.mixes[cell.mix].index(alone(cell.load) or "")
        workers = msgspec.structs.replace(workers, port=workers.port + number, parts=1)
    return Job(
        run=running.id[-4:],  # the random part
        cell=cell.id,
        load_name=cell.load,
        load=load,
        model=(served and served.model) or scenario.model,
        prompts=prompts,
        prompt_file=str(folder / prompts.file) if prompts.file else None,
        trace_file=None if trace is None else str(trace),
        trace_marks=str(marks) if marks is not None and marks.is_file() else None,
        prompt_lengths=list(pairs_of(prompts.tokens, folder)),
        output_lengths=list(pairs_of(load.output_tokens, folder)),
        words=list(words),
        seed=scenario.seed,
        salt=salt_words(running.id, running.salted(cell.id), words) if prompts.salt else None,
        warmup=warmup_of(scenario, load),
        api_key_env=scenario.api_key_env,
        simulated=served is not None and served.simulated,
        requests_path=str(running.folder.resolve() / "requests.jsonl"),
        processes_path=str(running.folder.resolve() / "processes.jsonl"),
        counter_path=running.counter_path(cell.id),
        workers=workers,
    )


PROCESS = 1  # the job's number in its container


def _offline(running: Running, cell: Cell) -> CellRun:
    """Run a cell without server and load generator: all requests at once through vLLM's offline engine.

    Raises ServerError, RunError.
    """
    job = make_job(running, cell, None)
    if job.warmup.until is not None:  # an offline job has no steady state
        job = msgspec.structs.replace(job, warmup=Warmup(requests=wave_of(job.load)))
    write_job(job, running.job_path(job.cell))
    outcome = run_offline(
        running.scenario,
        cell.server,
        requests_of(job),
        run_id=running.id,
        cell_id=cell.id,
        run_folder=running.folder,
        on_progress=running.progress.stage,
    )
    records, head = records_of(job, outcome), outcome.head
    ended_wall_s = head.wall_s + head.ended_s - head.monotonic_s
    mark = ProcessMark(event="start", process=PROCESS, cell=cell.id, wall_s=head.wall_s, monotonic_s=head.monotonic_s)
    end = msgspec.structs.replace(
        mark, event="end", wall_s=ended_wall_s, monotonic_s=head.ended_s, sent=len(records), recorded=len(records)
    )
    for path, lines in ((job.requests_path, records), (job.processes_path, [mark, end])):
        with Path(path).open("ab") as file:
            file.write(msgspec.json.Encoder().encode_lines(lines))
    return _cell_run(cell, outcome.served_by, head.wall_s, ended_wall_s)


def requests_of(job: Job) -> bytes:
    """Write the requests of the cell, warm-up first, a JSON object a line."""
    work = workload_of(job, read_rows(job.prompt_file) if job.prompt_file else [])
    warmup = [-1 - number for number in range(job.warmup.requests or 0)]
    lines = [
        {
            "index": index,
            "phase": "warmup" if index < 0 else "measured",
            "messages": work.messages(index),
            "max_tokens": work.output_tokens(index),
            "ignore_eos": job.load.output == "fixed",
        }
        for index in [*warmup, *range(job.load.requests or 0)]
    ]
    return msgspec.json.Encoder().encode_lines(lines)


def records_of(job: Job, outcome: OfflineOutcome) -> list[Request]:
    planned = (job.warmup.requests or 0) + (job.load.requests or 0)
    if len(outcome.results) != planned:
        raise RunError(f"cell {job.cell}: {planned} requests were planned and {len(outcome.results)} were answered")
    work = workload_of(job, read_rows(job.prompt_file) if job.prompt_file else [])
    return [
        Request(
            id="-".join(part for part in (job.run, job.cell, str(line.index).replace("-", "w")) if part),
            cell=job.cell,
            load=job.load_name,
            user_class="Offline",
            index=line.index,
            user=0,
            process=PROCESS,
            phase="warmup" if line.index < 0 else "measured",
            sent_s=line.began_s,
            ended_s=line.ended_s - line.began_s,
            asked_tokens=work.output_tokens(line.index),
            fixed_length=job.load.output == "fixed",
            prompt_tokens=line.prompt_tokens,
            output_tokens=line.output_tokens,
            cached_tokens=line.cached_tokens,
            finish=line.finish,
        )
        for line in outcome.results
    ]


_counted: dict[tuple[str, str], tuple[str, ...]] = {}  # by run and server


def counted_words(
    experiment: Experiment, run_id: str, server: str, endpoint: Endpoint | None, api_key: str | None
) -> tuple[str, ...]:
    """Return words of one token each, by the scenario's tokenizer; none without a tokenizer.

    Raises HarnessError, ServerError. No endpoint: there is no server that could be asked.
    """
    prompts = experiment.scenario.prompts
    if prompts.tokenizer != SERVER_TOKENIZER:
        return local_words(prompts, experiment.folder)
    if endpoint is None:
        raise HarnessError(
            f"prompts.tokenizer: '{server}' has no server that could count tokens",
            next_step="Name a local tokenizer.json.",
        )
    if (run_id, server) not in _counted:
        model = endpoint.served_by.model or experiment.scenario.model
        count = make_token_counter(endpoint.url, model, api_key, endpoint.ask_engine)
        _counted[run_id, server] = words_of(count, f"the server '{server}'")
    return _counted[run_id, server]
