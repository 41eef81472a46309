"""Resume a run after any end: keep the complete and valid cells, and measure the others again."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.files import pretty_json, read_json, replace_file
from harness.base.https import trust_authority
from harness.base.process import ORPHAN_GRACE_S, orphans_of, owner_labels
from harness.base.redact import HIDDEN
from harness.base.units import count
from harness.machine import remote_telemetry
from harness.machine.remote_telemetry import RemoteTelemetry
from harness.numbers.comparable import ABSENT, flatten, format_values
from harness.numbers.comparison import MAX_REPEATS
from harness.numbers.summarize import summarize
from harness.records.directory import INPUTS, drop_cells, lock_folder, prepare_folder
from harness.records.manifest import Resumption, Run, read_run, write_run
from harness.records.run_data import recorded_cells
from harness.run.budget import budget_steps
from harness.run.experiment import Experiment, Target, prepare_recorded
from harness.run.machine_fit import preflight
from harness.run.orchestrator import run_cells, run_steps
from harness.run.progress import Progress
from harness.run.running import (
    INPUTS_VERSION,
    Inputs,
    MakeReference,
    RunFile,
    Running,
    digest_files,
    manifest_of,
    needs_docker,
    report_telemetry,
)
from harness.scenario.plan import Cell, plan
from harness.serve.compiled import shared_caches
from harness.serve.docker_engine import connect, remove_leftovers

MAX_CHANGES = 10  # shown of what differs from the run
ORPHANS_S = ORPHAN_GRACE_S + 5.0  # for load processes of a killed harness to write their last records
_MAX_KILL_S = 10.0  # after which one that was killed is stuck in the kernel


def resume(
    folder: Path,
    progress: Progress,
    target: Target | None = None,
    budget_s: float | None = None,
    make_reference: MakeReference | None = None,
    max_repeats: int = MAX_REPEATS,
    search_command: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Path:
    """Run the cells of a run that are not complete and valid; return its directory.

    `search_command`: the command that goes on with it, where the run is one of a search, which has no plan.
    `options`: REPORT_OPTIONS that apply from now on, also when it is resumed again.
    `target`: another address of the running server. `budget_s`: a time limit, in which further repeats are run, up to
    `max_repeats`. Raises HarnessError when the run cannot be resumed, or when a resumed measurement would differ; else
    as `harness.run.orchestrator.run`.
    """
    with lock_folder(folder):
        run = read_run(folder)
        cells = _planned_cells(run, folder, search_command)
        inputs = _read_inputs(folder)
        experiment = _recorded_experiment(run, folder, inputs, target)
        _refuse_changes(folder, run, experiment, inputs)
        if options:
            replace_file(folder / INPUTS, pretty_json(replace(inputs, options={**inputs.options, **options})))
        _remove_leftovers(run, experiment, progress)
        kept = complete_cells(folder, run)
        remaining = [cell for cell in cells if cell.id not in kept]
        if not remaining and budget_s is None:
            progress.line(f"Run {run.id}: complete and valid, {count(len(cells), 'cell')}.")
            RunFile(folder, run, progress.on_end, make_reference).finish()
            return folder
        experiment = preflight(experiment, progress.line)
        progress.line(
            f"Run {run.id}: {len(kept)} of {count(len(cells), 'cell')} kept (complete and valid), {len(remaining)} to "
            f"run. Records go to {folder}"
        )
        if any(cell.server in shared_caches(run.scenario.servers) for cell in remaining):
            progress.line(
                "In a repeat that was not complete, servers that share compiled kernels (`caches`) begin again"
            )
        with _connected(experiment, run, progress) as connection:
            file = RunFile(folder, _reopen(folder, run, kept, cells), progress.on_end, make_reference, connection)
            running = Running(file, experiment, progress, remote=connection)
            return run_steps(running, remaining, run_cells if budget_s is None else budget_steps(budget_s, max_repeats))


@contextlib.contextmanager
def with_resume_advice(command: Callable[[], str | None], progress: Progress) -> Iterator[None]:
    """Say how to go on when a search ends early. `command`: the one that goes on; None: there is nothing to keep."""
    try:
        yield
    except BaseException as error:
        if (text := command()) is not None:
            advice = f"To go on: {text}"
            if isinstance(error, HarnessError):
                error.next_step = " ".join(filter(None, [error.next_step, advice]))
            elif isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(OSError):
                    progress.line(advice, whole=True)
        raise


@contextlib.contextmanager
def reopened(
    folder: Path,
    kept: Collection[str],
    progress: Progress,
    target: Target | None = None,
    anew: str = "harness tune SCENARIO",
) -> Iterator[Running]:
    """Lock a search, and make it a run in progress with the kept cells. Raises as `recorded_experiment`."""
    with lock_folder(folder):
        run, experiment = read_run(folder), recorded_experiment(folder, target, anew)
        _remove_leftovers(run, experiment, progress)
        progress.line(f"Run {run.id}: {count(len(kept), 'cell')} kept. Records go to {folder}")
        with _connected(experiment, run, progress) as connection:
            manifest = _reopen(folder, run, set(kept), list(recorded_cells(run).values()))
            file = RunFile(folder, manifest, progress.on_end, remote=connection)
            yield Running(file, experiment, progress, remote=connection)


@contextlib.contextmanager
def _connected(experiment: Experiment, run: Run, progress: Progress) -> Iterator[RemoteTelemetry | None]:
    """Yield the connection to the server's machine; None without `--telemetry`.

    Raises HarnessError when it is another machine than that of the kept cells.
    """
    with remote_telemetry.opened(experiment.telemetry) as remote:
        if remote is None:
            yield None
            return
        connection, now = remote
        before = run.server_machine.name
        if run.remote is not None and now.machine.name != before:
            raise HarnessError(
                f"--telemetry: the machine there is {now.machine.name}, and that of the kept cells is {before}",
                next_step=f"Give the address of {before}, or run the scenario again.",
            )
        report_telemetry(connection, experiment, run.machine.name, now, progress)
        yield connection


def recorded_experiment(folder: Path, target: Target | None = None, anew: str = "harness tune SCENARIO") -> Experiment:
    """Return the experiment of a search as it was prepared. `anew`: the command that starts another one.

    Raises HarnessError, also as `resume`.
    """
    inputs, run = _read_inputs(folder), read_run(folder)
    experiment = _recorded_experiment(run, folder, inputs, target)
    _refuse_changes(folder, run, experiment, inputs, anew)
    path = Path(inputs.scenario)  # names the runs that follow
    return replace(experiment, path=path) if path.is_file() else experiment


def experiment_again(folder: Path, target: Target | None = None) -> Experiment:
    """Return the experiment of a run as it was prepared, to measure it anew. Raises HarnessError."""
    inputs = _read_inputs(folder)
    experiment = _recorded_experiment(read_run(folder), folder, inputs, target)
    path = Path(inputs.scenario)  # names the runs that follow
    return replace(experiment, path=path) if path.is_file() else experiment


def _refuse_changes(
    folder: Path, run: Run, experiment: Experiment, inputs: Inputs, anew: str = "harness run SCENARIO"
) -> None:
    """Raise HarnessError when a resumed measurement would differ. `anew`: the command of a new one."""
    if changes := list(list_changes(run, experiment, inputs)):
        more = [f"and {len(changes) - MAX_CHANGES:,} more"] if len(changes) > MAX_CHANGES else []
        raise HarnessError(
            f"{folder}: the run cannot be resumed: {changes[0]}",
            detail="\n".join(changes[1:MAX_CHANGES] + more),
            next_step=f"Undo that and resume it again, or measure anew with `{anew}`: the cells of a run must be "
            "measured alike.",
        )


def _remove_leftovers(run: Run, experiment: Experiment, progress: Progress) -> None:
    """Wait for the load processes of a killed run, and remove its containers."""
    _wait_for_orphans(run, progress)
    if needs_docker(experiment):
        with contextlib.closing(connect()) as client:
            for item in remove_leftovers(client, run.id, everything=True):
                progress.line(f"removed {item}, which the run left")


def _read_inputs(folder: Path) -> Inputs:
    try:
        return read_json(folder / INPUTS, Inputs, INPUTS_VERSION)
    except OSError as error:
        raise HarnessError(
            f"{folder / INPUTS}: cannot be read ({error.strerror}), so the run cannot be resumed",
            next_step="Run the scenario again. Only a run of this version or a later one, in its own directory, can be "
            "resumed.",
        ) from None


def _planned_cells(run: Run, folder: Path, search_command: str | None) -> list[Cell]:
    """Return the cells of a run, in their order. Raises HarnessError for a run without a plan."""
    planned = {cell.id: cell for cell in plan(run.scenario)}
    if run.kind != "plan" or not run.order or set(run.order) - planned.keys():
        raise HarnessError(
            f"{folder}: only a run of `harness run` has a plan that can be resumed",
            next_step="Start it anew." if search_command is None else f"To go on: {search_command}",
        )
    return [planned[name] for name in run.order]


def _recorded_experiment(run: Run, folder: Path, inputs: Inputs, target: Target | None) -> Experiment:
    """Return the experiment as it was prepared at the first start. Raises HarnessError."""
    if HIDDEN in msgspec.json.encode(run.scenario).decode():
        raise HarnessError(
            f"{folder}: a secret of the scenario was left out of run.json, so the run cannot be resumed",
            next_step="Run the scenario again.",
        )
    if target is not None and inputs.url is None:
        raise HarnessError("--url: the run started its servers itself", next_step="Leave --url out.")
    if target is None and inputs.url is not None:
        ca = None if inputs.ca is None else Path(inputs.ca)
        target = Target(inputs.url, inputs.metrics_url, inputs.telemetry, ca)
        if ca is not None:
            trust_authority(ca)
    elif target is not None and target.telemetry is None:
        target = replace(target, telemetry=inputs.telemetry)
    path, files = folder / "scenario.yaml", Path(inputs.scenario).parent
    return prepare_recorded(Experiment(path, run.scenario, target, run.computed, run.workers, files=files))


def list_changes(run: Run, experiment: Experiment, inputs: Inputs) -> Iterator[str]:
    """Yield the differences between a resumed measurement and that of the kept cells, in words."""
    now = manifest_of(experiment, [], run.id, run.scenario_name, run.started_wall_s)
    if now.workload_sha256 != run.workload_sha256:
        changed = []
        for name, digest in inputs.files.items():
            with contextlib.suppress(OSError):  # the file is gone
                if digest_files([experiment.folder / name]) == digest:
                    continue
            changed.append(name)
        yield f"the requests are others; changed: {', '.join(changed) or 'how they are made'}"
    yield from _differences("locustfiles", run.locustfiles, now.locustfiles)
    yield from _differences("versions", run.versions, now.versions)
    then, here = msgspec.to_builtins(run.machine), msgspec.to_builtins(now.machine)
    here["ram_bytes"] = then["ram_bytes"]  # the kernel reports a little different memory after each boot
    yield from _differences("machine", then, here)


def _differences(name: str, then: Any, now: Any) -> Iterator[str]:
    flat_then: dict[str, Any] = {}
    flat_now: dict[str, Any] = {}
    flatten(name, then, flat_then, lists=True)
    flatten(name, now, flat_now, lists=True)
    for key in flat_then | flat_now:
        values = [flat_then.get(key, ABSENT), flat_now.get(key, ABSENT)]
        is_known = any(value not in (None, ABSENT) for value in values)
        if values[0] != values[1] and is_known:
            before, after = format_values(values)
            yield f"{key}: {before} then, {after} now"


def complete_cells(folder: Path, run: Run) -> set[str]:
    """Return the ids of complete and valid cells, by their records. The cells of a group stay together.

    So do, in a repeat, those of servers that share compiled kernels (`caches`): they are gone at the end of a run.
    A failed setting of a sweep is a result, so it is complete.
    """
    summary = summarize(folder)
    failed = {name for name, cell in run.ran.items() if cell.failed is not None}
    bad = {reason.cell for reason in summary.reasons} | {cell.id for cell in summary.cells if cell.problems}
    bad -= failed
    good = {name for name, cell in run.ran.items() if not {name, cell.group.replace("/", "-")} & bad}
    planned = [cell for cell in plan(run.scenario) if cell.id in run.order]
    cut = {cell.group for cell in planned if cell.id not in good}
    kept = {name for name in good if run.ran[name].group not in cut}
    owners = shared_caches(run.scenario.servers)
    emptied = {(cell.repeat, owners[cell.server]) for cell in planned if cell.server in owners and cell.id not in kept}
    return {name for name in kept if (run.ran[name].repeat, owners.get(run.ran[name].server)) not in emptied}


def _reopen(folder: Path, run: Run, kept: set[str], cells: list[Cell]) -> Run:
    """Make the run one in progress, with the kept cells. Raises OSError.

    The manifest is written first: after a kill at any moment in here, the cells that it lacks are measured again.
    """
    kept_runs = [cell for cell in run.cells if cell.id in kept]
    recorded = {cell.id for cell in run.cells}
    resumption = Resumption(
        wall_s=time.time(),
        stopped_wall_s=max((cell.ended_wall_s or 0.0 for cell in kept_runs), default=None),
        kept=len(kept),
        again=[cell.id for cell in cells if cell.id in recorded - kept],
    )
    run = replace(
        run,
        status="running",
        reasons=[],
        owner=owner_labels(),
        ended_wall_s=None,
        cells=kept_runs,
        resumed=[*run.resumed, resumption],
    )
    write_run(folder, run)
    prepare_folder(folder, len(cells))
    for name in ("summary.json", "report.html"):  # of the earlier results
        (folder / name).unlink(missing_ok=True)
    drop_cells(folder, kept, [cell.id for cell in cells])
    return run


def _wait_for_orphans(run: Run, progress: Progress) -> None:
    """Wait for the load processes of a killed harness, which end by themselves and write their last records.

    Raises HarnessError where one does not end when it is killed.
    """
    deadline = time.monotonic() + ORPHANS_S
    if orphans_of(run.owner):
        progress.line("waiting for the load processes of the killed run")
    while orphans := orphans_of(run.owner):
        late_s = time.monotonic() - deadline
        if late_s > _MAX_KILL_S:
            pids = ", ".join(str(process.pid) for process in orphans)
            raise HarnessError(
                f"load processes of the killed run do not end: {pids}", next_step="End them, then resume the run."
            )
        if late_s > 0:
            for process in orphans:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.1)
