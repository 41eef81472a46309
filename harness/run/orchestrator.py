"""The orchestrator: start the servers of a scenario, drive its cells and write a run directory."""

import contextlib
import errno
import importlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.errors import HarnessError, RunError, ServerError, StartError, reason_of
from harness.base.files import open_file
from harness.base.process import refuse_too_few_files
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, verb
from harness.machine import remote_telemetry
from harness.machine.gpus import read_gpu_memory, wait_until_free
from harness.machine.remote_telemetry import RemoteSampler
from harness.machine.telemetry import Sampler
from harness.numbers.warnings import queue_notes
from harness.records.directory import lock_folder, release_space
from harness.records.manifest import CellRun, Run, RunKind, ServedBy
from harness.records.records import ProcessMark, Request
from harness.records.samples import Scraper
from harness.run.drive import Child, LocalChild, Monitor, Watch, current_stage, drive, locust_arguments
from harness.run.experiment import Experiment
from harness.run.machine_fit import preflight
from harness.run.model_files import find_model_size
from harness.run.progress import Progress
from harness.run.running import FailedSettings, MakeReference, RunFile, Running, create_run
from harness.scenario import (
    SERVER_TOKENIZER,
    Server,
    Warmup,
    connections_per_process,
    locustfile_of,
    models_of_loads,
    prompts_of,
    warmup_of,
    wave_size,
)
from harness.scenario.plan import Cell, grouped, plan, server_start_of
from harness.serve.compiled import caches_removed
from harness.serve.generator import ContainerChild, find_path_in_image
from harness.serve.lemonade import load_with_options
from harness.serve.lifecycle import Endpoint, attach_to_server, find_server_pid, find_telemetry_files, serve
from harness.serve.lint import refuse_too_long
from harness.serve.offline import OfflineResult, run_offline
from harness.serve.probe import make_token_counter
from harness.serve.template import prepare_server
from harness.workload import local_words, one_token_words, pairs_of, salt_words
from harness.workload.job import Job, JobStage, loads_of, workload_of, write_job
from harness.workload.prompt_file import read_rows

ANALYSIS = ("scipy.special",)  # large; what the caller of the run evaluates it with is loaded already
Watchers = tuple[Scraper, Sampler | RemoteSampler]
# Runs cells one after the other and yields each result. Its arguments are the run and the cells planned at its start.
Steps = Callable[[Running, list[Cell]], Iterable[CellRun]]


def run(
    experiment: Experiment,
    runs: Path,
    progress: Progress,
    steps: Steps | None = None,
    make_reference: MakeReference | None = None,
) -> Path:
    """Run the cells of a scenario and return the run directory. `steps`: default `run_cells`.

    After any end, the directory has all measurements, and a manifest with the status. Raises ServerError when a server
    does not become ready, RunError when the load cannot be driven, KeyboardInterrupt after everything is torn down.
    """
    if experiment.scenario.generator == "process" and experiment.workers is None:
        refuse_too_few_files(max(map(connections_per_process, experiment.scenario.loads.values())))
    experiment = preflight(experiment, progress.line)
    return start_run(experiment, plan(experiment.scenario), runs, progress, steps or run_cells, make_reference)


def import_analysis() -> None:
    """Import what evaluates a run, before its load: without memory for it, the load would be for nothing.

    Raises HarnessError.
    """
    try:
        for name in ANALYSIS:
            importlib.import_module(name)
    except (ImportError, MemoryError, OSError) as error:
        raise HarnessError(
            f"what evaluates a run cannot be loaded ({type(error).__name__}: {reason_of(error)})",
            next_step="Give it more memory: `ulimit -v` shows the limit of this shell.",
        ) from None


def start_run(
    experiment: Experiment,
    cells: list[Cell],
    runs: Path,
    progress: Progress,
    steps: Steps,
    make_reference: MakeReference | None = None,
    kind: RunKind = "plan",
) -> Path:
    """Create a run directory and run the steps; see `run`."""
    with contextlib.ExitStack() as stack:
        remote = stack.enter_context(remote_telemetry.opened(experiment.telemetry))
        running = create_run(experiment, cells, runs, progress, make_reference, kind, remote)
        stack.enter_context(lock_folder(running.folder))
        planned = f"{count(len(cells), 'cell')}. " if cells else ""
        progress.line(f"Run {running.id}: {planned}Records go to {running.folder}")
        return run_steps(running, cells, steps)


def run_steps(running: Running, cells: list[Cell], steps: Steps) -> Path:
    """Run the steps in a run directory, whose lock this process has, and write the status; see `run`."""
    folder, file, progress = running.folder, running.file, running.progress
    try:
        import_analysis()
        if (workers := running.experiment.workers) is not None:
            machines = ", ".join(workers.names) or f"{workers.machines} machines"
            progress.line(f"Workers: {machines}. On each of them: {workers.command}", whole=True)
        with progress.live(), caches_removed(running.started_servers, running.id, folder):
            for cell_run in steps(running, cells):
                file.update(cell_run)
    except BaseException as raised:
        error = _disk_error(raised, file) or raised
        if file.discard_if_empty():
            raise error from None
        if isinstance(error, KeyboardInterrupt):
            file.finish("interrupted", [because("interrupted", "interrupted before all cells had run")])
        else:
            file.finish("failed", [_run_error(error, file.manifest)])
        advice = [f"What was measured until then: {command_line('harness', 'report', folder)}"]
        if file.manifest.kind == "plan":
            advice.append(f"To measure the rest: {command_line('harness', 'run', '--resume', folder)}")
        if (folder / "requests.jsonl").stat().st_size == 0:
            raise error from None
        if isinstance(error, HarnessError):
            error.next_step = " ".join(filter(None, [error.next_step, *advice]))
        if isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(OSError):  # the terminal may be closed
                progress.line("\n".join(advice), whole=True)
        raise error from None
    file.finish()
    return folder


def _run_error(error: BaseException, run: Run) -> Reason:
    """Return the reason of a failed run: the kind of the error, the cell, and the known cause of a failed start."""
    kind, facts = type(error).__name__, error.facts if isinstance(error, StartError) else {}
    what = error.what if isinstance(error, HarnessError) else f"{kind}: {error}"
    reason = because("run_error", what, error=what, kind=kind, **facts)
    is_start = isinstance(error, ServerError)
    return replace(reason, cell=next((cell for cell in run.order if cell not in run.ran), None)) if is_start else reason


def _disk_error(error: BaseException, file: RunFile) -> RunError | None:
    """Return the explanation of a full disk or quota; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    folder, manifest = file.folder, file.manifest
    release_space(folder, half=True)
    with open_file(folder / "requests.jsonl") as requests:
        recorded = sum(block.count(b"\n") for block in iter(lambda: requests.read(2**20), b""))
    return RunError(
        f"{folder}: the disk is full ({error.strerror}): {len(manifest.ran)} of {count(len(manifest.order), 'cell')} "
        f"{verb(len(manifest.ran), 'has', 'have')} run, {count(recorded, 'request')} recorded; the rest was not "
        "measured",
        next_step="Make room, or give a folder on another disk with --runs DIR, and run it again.",
    )


def run_cells(running: Running, cells: list[Cell]) -> Generator[CellRun, None, None]:
    """Run the cells in order. One server start serves one cell, or all cells of a repeat when `restart` is false."""
    scenario, target, progress = running.scenario, running.experiment.target, running.progress
    kept = running.file.manifest.cells
    took_s: dict[tuple[str, str], float] = {}  # by server and load, in earlier repeats
    idle_memory = [] if target else read_gpu_memory()
    is_sweep = scenario.swept is not None and target is None
    failed = FailedSettings(scenario, progress.line, kept)

    def show(cell: Cell, *, with_time: bool = False) -> None:
        rows = [(later.server, later.load) for later in cells[cells.index(cell) :]]
        remaining_s = sum(took_s[row] for row in rows) if with_time and took_s.keys() >= set(rows) else None
        progress.start_cell(cells.index(cell) + 1, len(cells), cell, remaining_s)

    def start(together: list[Cell]) -> Iterator[CellRun]:
        """Start a server, and run these cells on it."""
        first = together[0]
        show(first, with_time=True)
        begin_s = time.monotonic()
        memory = [] if target else wait_until_free(idle_memory)
        loads = list(dict.fromkeys(cell.load for cell in together))
        refuse_too_long(scenario, [first.server], loads)
        if target is None and prepare_server(scenario, first.server).file.serving.offline:
            for cell in together:
                show(cell)
                yield replace(_run_offline(running, cell), gpu_memory_before=memory)
            return
        with endpoint_of(running, first) as endpoint:
            refuse_other_server(kept, first.server, endpoint)
            too_long = refuse_too_long(scenario, [first.server], loads, endpoint.served_by.startup)
            for group in grouped(together, lambda cell: cell.group):
                if group[0] is not first:
                    if (reason := endpoint.check_alive()) is not None:
                        if is_sweep:
                            return
                        # The run's reasons already name missing cells.
                        progress.line(f"{group[0].id} is not run: {sentence(reason)}")
                        continue
                    show(group[0])
                if why := next((too_long[cell.load] for cell in group if cell.load in too_long), None):
                    progress.line(f"{group[0].id} failed: {why}")
                    now_s, reason = time.time(), because("setting_too_long", why)
                    results = [cell_run_of(cell, endpoint.served_by, now_s, now_s) for cell in group]
                    yield from (replace(cell_run, failed=reason) for cell_run in results)
                    continue
                running.file.update(*(cell_run_of(cell, endpoint.served_by, time.time()) for cell in group))
                for cell_run in run_group(running, group, endpoint):
                    yield replace(cell_run, gpu_memory_before=memory)
        took_s.update({(cell.server, cell.load): 0.0 for cell in together})
        took_s[first.server, first.load] = time.monotonic() - begin_s

    for together in grouped(cells, lambda cell: cell.group if scenario.restart else server_start_of(cell)):
        yield from failed.run_start(together, start) if is_sweep else start(together)


def refuse_other_server(kept: list[CellRun], server: str, endpoint: Endpoint) -> None:
    """Raise HarnessError when the server of a resumed run is not the one that the kept cells measured."""
    measured = [cell.served_by for cell in kept if cell.server == server and cell.failed is None]
    for key in ("image_digest", "version", "model") if measured else ():
        before, now = getattr(measured[-1], key), getattr(endpoint.served_by, key)
        if before is not None and now is not None and before != now:
            raise HarnessError(
                f"server '{server}': {key} was {before} in the cells that are kept, and is {now} now",
                next_step="Bring that server back, or run the scenario anew: a row is about one server.",
            )


@contextlib.contextmanager
def endpoint_of(running: Running, cell: Cell) -> Iterator[Endpoint]:
    """Start the server of a cell, or connect to the running server of the command line."""
    scenario, target = running.scenario, running.experiment.target
    if target is not None:
        if options := scenario.servers[cell.server].variables:  # of `harness tune` on a running Lemonade
            running.progress.stage("the server loads the model with other options")
            load_with_options(target.url, scenario.model, options, running.api_key)
        running.progress.stage("asking the server")
        key_name = scenario.api_key_env
        endpoint = attach_to_server(
            target.url,
            scenario.model,
            running.api_key,
            key_name=key_name,
            metrics_url=target.metrics_url,
            on_wait=running.progress.line,
            others=models_of_loads(scenario),
            messages=any(load.endpoint == "messages" for load in scenario.loads.values()),
        )
        yield _with_model_size(endpoint, None)
        return
    with serve(
        scenario,
        cell.server,
        run_id=running.id,
        cell_id=cell.id,
        run_folder=running.folder,
        on_progress=running.progress.stage,
    ) as endpoint:
        yield _with_model_size(endpoint, scenario.servers[cell.server])


def _with_model_size(endpoint: Endpoint, server: Server | None) -> Endpoint:
    """Return the endpoint with what a token reads of its model, where the model's files can be read."""
    started = endpoint.started
    if started.simulated or started.model is None:
        return endpoint
    size = find_model_size(started.model, server, endpoint.container)
    return replace(endpoint, started=replace(started, model_size=size))


def run_group(running: Running, cells: list[Cell], endpoint: Endpoint, watch: Watch | None = None) -> list[CellRun]:
    """Run a load, the stages of a load, or the loads of a mix: one load generator sends them.

    `watch`: stops the load once enough is measured.
    """
    report_after_s = None if watch is None else watch.report_after_s
    job = replace(prepare_job(running, cells, endpoint), report_after_s=report_after_s)
    start = prepare_generator(running, job, endpoint)
    monitor, before = Monitor(job, watch), endpoint.state()
    # Of all rows of the plan, so that one note says it.
    loads = [*running.scenario.loads.values(), *(load_job.load for load_job in loads_of(job))]
    for note in queue_notes(endpoint.started, loads):
        running.progress.note(cells[0].server, note)
    running.progress.start_load(monitor)
    with watch_server(running, job, endpoint, running.scenario.metrics_interval_s) as watchers:
        begun_s, stage = time.time(), 0

        def show_progress() -> None:
            nonlocal stage
            if job.stages and (newest := current_stage(job)) > stage:
                for ended in cells[stage:newest]:
                    running.file.update(cell_run_of(ended, endpoint.served_by, begun_s, time.time()))
                stage = newest
                for watcher in watchers:
                    watcher.cell = cells[stage].id
                monitor.follow_stage(stage)
                running.progress.next_stage(cells[stage], monitor)
            running.progress.update()

        driven = drive(
            start, monitor, log_path=running.log_path(job.cell), alive=endpoint.check_alive, progress=show_progress
        )
    death = endpoint.death(now=True)
    death_reasons = [] if death is None else [death.problem(), death.evidence()]  # may be in `driven` already
    new = [reason for reason in death_reasons if reason is not None and reason not in driven.problems]
    changes = endpoint.problems(before)
    if any(running.scenario.loads[cell.load].model is not None for cell in cells):
        # The server changes its models, so its backends come and go.
        changes = [change for change in changes if change.code not in ("backend_lost", "backend_restarted")]
    problems = [*driven.problems, *new, *changes]
    times = driven.started_wall_s, driven.ended_wall_s
    cell_runs = [cell_run_of(cell, endpoint.served_by, *times, problems) for cell in cells]
    if watch is None or driven.stopped_s is None:
        return cell_runs
    return [replace(cell_run, stopped_after_s=watch.measured_s(driven.stopped_s)) for cell_run in cell_runs]


def cell_run_of(
    cell: Cell, served_by: ServedBy, begun_s: float, ended_s: float | None = None, problems: Sequence[Reason] = ()
) -> CellRun:
    fields = msgspec.structs.asdict(cell) | {"served_by": served_by, "problems": list(problems)}
    return CellRun(**fields, started_wall_s=begun_s, ended_wall_s=ended_s)


@contextlib.contextmanager
def watch_server(running: Running, job: Job, endpoint: Endpoint, interval_s: float) -> Iterator[Watchers]:
    folder, source = running.folder, endpoint.metrics_source
    with (
        Scraper(source, job.cell, folder / "metrics.jsonl", interval_s, api_key=running.api_key) as scraper,
        _sampler(running, job.cell, endpoint) as sampler,
    ):
        yield scraper, sampler
        waiting = "waiting for {} that the server still works on"
        scraper.finish(lambda remaining: running.progress.stage(waiting.format(count(remaining, "request"))))


def _sampler(running: Running, cell: str, endpoint: Endpoint) -> Sampler | RemoteSampler:
    """Return what samples the server's machine: this one, or another one over ssh."""
    path = running.folder / "telemetry.jsonl"
    if running.remote is not None:
        return RemoteSampler(running.remote, cell, path)
    return Sampler(find_telemetry_files(endpoint), cell, path, server_pid=find_server_pid(endpoint))


def prepare_generator(
    running: Running, job: Job, endpoint: Endpoint, ui: tuple[str, int] | None = None
) -> Callable[[], Child]:
    """Write the job of a cell. Return a function that starts its load generator: a process or a container."""
    job_path, log_path = running.job_path(job.cell), running.log_path(job.cell)
    write_job(job, job_path)
    files = [locustfile_of(load_job.load, running.experiment.folder) for load_job in loads_of(job)]
    locustfiles = list(dict.fromkeys(files))
    if running.scenario.generator == "container":
        url, paths = (
            endpoint.network_url or endpoint.url,
            ",".join(str(find_path_in_image(file)) for file in locustfiles),
        )
        arguments = locust_arguments(job, job_path, paths, url)
        return lambda: ContainerChild(running.id, job, arguments, locustfiles, endpoint.network, log_path)
    paths = ",".join(map(str, locustfiles))
    url = endpoint.url_of([load_job.load for load_job in loads_of(job)])
    command = [sys.executable, "-m", "locust", *locust_arguments(job, job_path, paths, url, ui)]
    return lambda: LocalChild(command, log_path)


def prepare_job(running: Running, cells: Sequence[Cell], endpoint: Endpoint | None) -> Job:
    """Return the job of cells. `endpoint`: None for a cell without a server. Raises HarnessError, ServerError."""
    served = None if endpoint is None else endpoint.served_by
    words = single_token_words(running, cells[0].server, endpoint)
    resumed = len(running.file.manifest.resumed)
    return make_job(running.experiment, cells, served, running.id, running.folder, words, resumed=resumed)


def make_job(
    experiment: Experiment,
    cells: Sequence[Cell],
    served: ServedBy | None,
    run_id: str,
    run_folder: Path,
    words: Sequence[str],
    *,
    resumed: int = 0,
) -> Job:
    """Return the job of a load, of the stages of a load, or of the loads of a mix.

    `served`: the server; None for a cell without one. `words`: those of one token each, where tokens are counted.
    `resumed`: how often the run was resumed. Each time its prompts get another salt, because a server may cache the
    earlier ones. Raises HarnessError.
    """
    scenario, folder, run_folder = experiment.scenario, experiment.folder, run_folder.resolve()
    jobs = []
    for cell in cells:
        load = scenario.loads[cell.load]
        prompts = prompts_of(scenario, load)
        traced = load.trace or load.agent_trace
        trace = None if traced is None else (folder / traced.file).resolve()
        marks = None if trace is None or load.trace is None else trace.with_name("processes.jsonl")
        salt_source = f"{cell.id}/{resumed}" if resumed else cell.id
        job = Job(
            run=run_id[-4:],  # the random part
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
            salt=salt_words(run_id, salt_source, words) if prompts.salt else None,
            warmup=warmup_of(scenario, load),
            api_key_env=scenario.api_key_env,
            simulated=served is not None and served.simulated,
            requests_path=str(run_folder / "requests.jsonl"),
            processes_path=str(run_folder / "processes.jsonl"),
            counter_path=str(run_folder / "jobs" / f"{cell.id}.counter"),
            workers=experiment.workers,
            locustfile=locustfile_of(load, folder).name,
        )
        jobs.append(job)
    first, *others = jobs
    if cells[0].mix is not None:
        return replace(first, others=others)
    stages = [
        JobStage(load_job.cell, load_job.load_name, load_job.load.users, load_job.load.duration_s or 0.0)
        for load_job in jobs
    ]
    return replace(first, stages=stages if others else [])


OFFLINE_PROCESS = 1  # the process id of an offline job in its container


def _run_offline(running: Running, cell: Cell) -> CellRun:
    """Run a cell without server and load generator: all requests together through vLLM's offline engine.

    Raises ServerError, RunError.
    """
    job = prepare_job(running, [cell], None)
    if job.warmup.until is not None:  # an offline job has no steady state
        job = replace(job, warmup=Warmup(requests=wave_size(job.load)))
    write_job(job, running.job_path(job.cell))
    served, head, results = run_offline(
        running.scenario,
        cell.server,
        encode_requests(job),
        run_id=running.id,
        cell_id=cell.id,
        run_folder=running.folder,
        on_progress=running.progress.stage,
    )
    records = offline_records(job, results)
    ended_wall_s = head.wall_s + head.ended_s - head.monotonic_s
    mark = ProcessMark(
        event="start", process=OFFLINE_PROCESS, cell=cell.id, wall_s=head.wall_s, monotonic_s=head.monotonic_s
    )
    end = replace(
        mark, event="end", wall_s=ended_wall_s, monotonic_s=head.ended_s, sent=len(records), recorded=len(records)
    )
    for path, lines in ((job.requests_path, records), (job.processes_path, [mark, end])):
        with Path(path).open("ab") as file:
            file.write(msgspec.json.Encoder().encode_lines(lines))
    return cell_run_of(cell, served, head.wall_s, ended_wall_s)


def encode_requests(job: Job) -> bytes:
    """Return the requests of a cell as JSON Lines, warm-up first."""
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


def offline_records(job: Job, results: Sequence[OfflineResult]) -> list[Request]:
    """Return the records of an offline cell. Raises RunError when an answer is missing."""
    planned = (job.warmup.requests or 0) + (job.load.requests or 0)
    if len(results) != planned:
        raise RunError(f"cell {job.cell}: {planned} requests were planned and {len(results)} were answered")
    work = workload_of(job, read_rows(job.prompt_file) if job.prompt_file else [])
    return [
        Request(
            id="-".join(part for part in (job.run, job.cell, str(line.index).replace("-", "w")) if part),
            cell=job.cell,
            load=job.load_name,
            user_class="Offline",
            index=line.index,
            user=0,
            process=OFFLINE_PROCESS,
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
        for line in results
    ]


def single_token_words(running: Running, server: str, endpoint: Endpoint | None) -> tuple[str, ...]:
    """Return words of one token each, by the scenario's tokenizer; none without a tokenizer.

    `endpoint`: None where no server runs. Raises HarnessError, ServerError.
    """
    scenario = running.scenario
    if scenario.prompts.tokenizer != SERVER_TOKENIZER:
        return local_words(scenario.prompts, running.experiment.folder)
    if endpoint is None:
        raise HarnessError(
            f"prompts.tokenizer: '{server}' has no server that could count tokens",
            next_step="Name a local tokenizer.json.",
        )
    if server not in running.token_words:
        model = endpoint.served_by.model or scenario.model
        count = make_token_counter(endpoint.url, model, running.api_key, endpoint.ask_engine)
        running.token_words[server] = one_token_words(count, f"the server '{server}'")
    return running.token_words[server]
