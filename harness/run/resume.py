"""Resume a run after any end: keep the cells that are complete and valid, measure the others again."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from harness.analysis.summarize import summarize
from harness.errors import HarnessError
from harness.files import read_json
from harness.judge.comparable import ABSENT, flatten, format_values
from harness.prepare.experiment import Experiment, Target, as_recorded
from harness.prepare.machine_fit import preflight
from harness.process import owner
from harness.redact import HIDDEN
from harness.run.budget import within
from harness.run.orchestrator import carry_out, run_cells
from harness.run.progress import Progress
from harness.run.running import INPUTS, INPUTS_VERSION, Inputs, RunFile, Running, digest, manifest_of, needs_docker
from harness.rundir.directory import lock_folder, prepare_folder, set_aside
from harness.rundir.manifest import Resumption, Run, read_run, write_run
from harness.scenario.file import read_scenario
from harness.scenario.plan import Cell, plan
from harness.serve import connect, remove_leftovers
from harness.units import count

ORPHANS_S = 15.0  # for load processes of a killed harness, which write their last records
_RAM_SHARE = 0.01  # the memory that the kernel reports differs a little from boot to boot


def resume(
    folder: Path,
    progress: Progress,
    scenario: Path | None = None,
    target: Target | None = None,
    budget_s: float | None = None,
) -> Path:
    """Run the cells of a run that are not complete and valid; return its directory.

    `scenario`: its file, which must be the same as then; None: its copy in the run directory. `target`: another
    address of the server that already runs. `budget_s`: its time limit. Raises HarnessError when the run cannot be
    resumed, or when what it would measure has changed; else as `harness.run.orchestrator.run`.
    """
    with lock_folder(folder):
        run = read_run(folder)
        cells = _planned(run, folder)
        inputs = _inputs(folder)
        experiment = _experiment(run, folder, inputs, scenario, target)
        if changes := list(changed(run, experiment, inputs, scenario)):
            raise HarnessError(
                f"{folder}: the run cannot be resumed: {changes[0]}",
                detail="\n".join(changes[1:]),
                next_step="Undo that and resume it again, or measure anew with `harness run SCENARIO`: the cells of a "
                "run must be measured alike.",
            )
        _wait_for_orphans(folder, progress)
        if needs_docker(experiment):
            with contextlib.closing(connect()) as client:
                for item in remove_leftovers(client, run.id, everything=True):
                    progress.line(f"removed {item}, which the run left")
        kept = complete(folder, run)
        again = [cell for cell in cells if cell.id not in kept]
        if not again and budget_s is None:
            progress.line(f"Run {run.id}: all of its {count(len(cells), 'cell')} are complete and valid.")
            RunFile(folder, run).finish()
            return folder
        experiment = preflight(experiment, progress.line)
        progress.line(
            f"Run {run.id}: {len(kept)} of {count(len(cells), 'cell')} are complete and valid and stay; "
            f"{count(len(again), 'cell')} to run. Records go to {folder}"
        )
        running = Running(RunFile(folder, _reopen(folder, run, kept, cells)), experiment, progress)
        return carry_out(running, again, run_cells if budget_s is None else within(budget_s, run.budget))


def _inputs(folder: Path) -> Inputs:
    try:
        return read_json(folder / INPUTS, Inputs, INPUTS_VERSION)
    except OSError as error:
        raise HarnessError(
            f"{folder / INPUTS}: cannot be read ({error.strerror}), so the run cannot be resumed",
            next_step="Run the scenario again. Only a run of this version or a later one, in its own directory, can be "
            "resumed.",
        ) from None


def _planned(run: Run, folder: Path) -> list[Cell]:
    """The cells of a run, in their order. Raises HarnessError for a run that has no plan to go on with."""
    known = {cell.id: cell for cell in plan(run.scenario)}
    what = "imported" if run.origin is not None else "live" if run.status == "live" else None
    searched = any(cell.seed is not None for cell in run.cells)  # a capacity search, which had no plan
    if what is None and (searched or not run.order or not known.keys() >= set(run.order)):
        what = "not of `harness run`"
    if what is not None:
        raise HarnessError(
            f"{folder}: the run is {what}, so it has no plan that could be resumed", next_step="Start it anew."
        )
    return [known[name] for name in run.order]


def _experiment(run: Run, folder: Path, inputs: Inputs, scenario: Path | None, target: Target | None) -> Experiment:
    """What the run measures, as it was resolved at its first start. Raises HarnessError."""
    if HIDDEN in msgspec.json.encode(run.scenario).decode():
        raise HarnessError(
            f"{folder}: a secret of the scenario was left out of run.json, so the run cannot be resumed",
            next_step="Run the scenario again.",
        )
    if target is not None and inputs.url is None:
        raise HarnessError("--url: the run started its servers itself", next_step="Leave --url out.")
    if target is None and inputs.url is not None:
        target = Target(inputs.url, inputs.metrics_url)
    files = (Path(inputs.scenario) if scenario is None else scenario.resolve()).parent
    path = folder / "scenario.yaml"
    return as_recorded(Experiment(path, run.scenario, target, run.computed, run.workers, files=files))


def changed(run: Run, experiment: Experiment, inputs: Inputs, scenario: Path | None = None) -> Iterator[str]:
    """In what the measurement would differ from that of the cells that the run has, in words."""
    if scenario is not None:
        written = [msgspec.to_builtins(read_scenario(path).scenario) for path in (experiment.path, scenario)]
        yield from _differences("scenario", written[0], written[1])
    now = manifest_of(experiment, [], run.id, run.scenario_name, run.started_wall_s)
    if now.workload_sha256 != run.workload_sha256:
        others = []
        for name, known in inputs.files.items():
            with contextlib.suppress(OSError):  # it is gone
                if digest([experiment.folder / name]) == known:
                    continue
            others.append(name)
        yield f"the requests are others; changed: {', '.join(others) or 'how they are made'}"
    yield from _differences("locustfiles", run.locustfiles, now.locustfiles)
    yield from _differences("versions", run.versions, now.versions)
    machine, here = msgspec.to_builtins(run.machine), msgspec.to_builtins(now.machine)
    ram = [one["ram_bytes"] or 0 for one in (machine, here)]
    if abs(ram[0] - ram[1]) <= _RAM_SHARE * ram[0]:
        here["ram_bytes"] = machine["ram_bytes"]
    yield from _differences("machine", machine, here)


def _differences(name: str, then: Any, now: Any) -> Iterator[str]:
    sides: list[dict[str, Any]] = [{}, {}]
    for value, into in zip((then, now), sides, strict=True):
        flatten(name, value, into, lists=True)
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        values = [side.get(key, ABSENT) for side in sides]
        if values[0] != values[1]:
            before, after = format_values(values)
            yield f"{key}: {before} then, {after} now"


def complete(folder: Path, run: Run) -> set[str]:
    """The cells that are complete and valid, by their records. Those that ran together are so together, or not.

    A setting of a sweep that failed is a result: it stays.
    """
    summary = summarize(folder)
    failed = {name for name, cell in run.ran.items() if cell.failed is not None}
    bad = {reason.cell for reason in summary.reasons} | {cell.id for cell in summary.cells if cell.problems}
    bad -= failed
    good = {name for name, cell in run.ran.items() if not {name, cell.group.replace("/", "-")} & bad}
    cut = {cell.group for cell in plan(run.scenario) if cell.id in run.order and cell.id not in good}
    return {name for name in good if run.ran[name].group not in cut}


def _reopen(folder: Path, run: Run, kept: set[str], cells: list[Cell]) -> Run:
    """Make the run one in progress, with the cells that are kept. Raises OSError.

    The manifest is first: after a kill at any moment in here, the cells that it does not name are measured again.
    """
    stay = [cell for cell in run.cells if cell.id in kept]
    known = {cell.id for cell in run.cells}
    resumed = Resumption(
        wall_s=time.time(),
        stopped_wall_s=max((cell.ended_wall_s or 0.0 for cell in stay), default=None),
        kept=len(kept),
        again=[cell.id for cell in cells if cell.id in known - kept],
    )
    manifest = msgspec.structs.replace(
        run,
        status="running",
        reasons=[],
        owner=owner(),
        ended_wall_s=None,
        cells=stay,
        resumed=[*run.resumed, resumed],
    )
    write_run(folder, manifest)
    prepare_folder(folder, len(cells))
    for derived in ("summary.json", "report.html"):  # of the run as it was
        (folder / derived).unlink(missing_ok=True)
    attempts = set_aside(folder, kept, [cell.id for cell in cells])
    manifest = msgspec.structs.replace(
        manifest, resumed=[*run.resumed, msgspec.structs.replace(resumed, attempts=attempts)]
    )
    write_run(folder, manifest)
    return manifest


def _wait_for_orphans(folder: Path, progress: Progress) -> None:
    """Wait for the load processes of a killed harness: they end by themselves, and write their last records."""
    jobs = f"{folder.resolve() / 'jobs'}{os.sep}"
    deadline = time.monotonic() + ORPHANS_S
    said = False
    while left := list(_processes_of(jobs)):
        if not said:
            progress.line(f"{count(len(left), 'load process', 'load processes')} of the killed run will end first")
            said = True
        if time.monotonic() > deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.1)


def _processes_of(jobs: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            of_it = any(word.startswith(jobs) for word in process.cmdline())
            if of_it and process.status() != psutil.STATUS_ZOMBIE:
                yield process
