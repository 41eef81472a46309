"""A run in progress: its directory, from the first manifest to the last, and the failed settings of a sweep."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import platform
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from harness import __version__
from harness.base import files
from harness.base.command_line import command_line
from harness.base.errors import HarnessError, StartError
from harness.base.files import pretty_json, read_bytes, replace_file
from harness.base.process import owner_labels
from harness.base.reason import Reason, because, sentence
from harness.base.versions import DEFINITIONS
from harness.machine.gpus import read_machine
from harness.machine.remote_telemetry import RemoteTelemetry
from harness.numbers.summarize import summarize_with_counts, with_checks, write_reference
from harness.numbers.summary import Reference, Summary
from harness.numbers.warnings import other_machine_note
from harness.records.directory import INPUTS, prepare_folder, release_space, slug
from harness.records.manifest import CellRun, KeptSteps, RemoteMachine, Run, RunKind, ServedBy, Status, write_run
from harness.run.experiment import Experiment, input_files, locustfile_sources
from harness.run.progress import OnEnd, Progress
from harness.scenario import Scenario, Server, locustfile_of, models_of_loads
from harness.scenario.plan import Cell
from harness.serve.docker_engine import get_engine_version
from harness.serve.facts import find_ignored_settings
from harness.serve.lifecycle import refuse_absent_models
from harness.workload import totals_of_traces, workload_sha256
from harness.workload.job import read_api_key

MEASURING_PACKAGES = ("locust", "gevent", "httptools", "msgspec", "docker", "numpy", "scipy")
INPUTS_VERSION = 1


class Inputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """inputs.json: the inputs of a run in addition to its scenario. It stays on this machine."""

    format_version: int = INPUTS_VERSION
    scenario: str  # path of the scenario file; prompt files, traces and locustfiles are relative to its folder
    files: dict[str, str] = {}  # digest of each file that the scenario names, by its path there
    options: dict[str, str] = {}  # WORK_OPTIONS and REPORT_OPTIONS as they were given
    url: str | None = None  # of a running server
    metrics_url: str | None = None
    telemetry: str | None = None  # of the server's machine
    ca: str | None = None  # path of the authority that signed the server's certificate


MakeReference = Callable[[Run, Summary], Reference]  # the baseline of the checks of a run that has ended


class RunFile:
    """run.json of a run in progress, written after each step."""

    def __init__(
        self,
        folder: Path,
        manifest: Run,
        on_end: OnEnd,
        make_reference: MakeReference | None = None,
        remote: RemoteTelemetry | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._remote = remote
        self._earlier_losses = [] if manifest.remote is None else manifest.remote.losses  # of a resumed run
        self._earlier_rejected = 0 if manifest.remote is None else manifest.remote.rejected
        self.on_end = on_end
        self.make_reference = make_reference

    def update(
        self,
        *cell_runs: CellRun,
        planned: Collection[str] = (),  # further cells that will run
        only: Collection[str] | None = None,  # drop all other cells
        **more: Any,  # other fields of the manifest
    ) -> None:
        """Add results of cells, and write the manifest."""
        by_id = {cell_run.id: cell_run for cell_run in [*self.manifest.cells, *cell_runs]}
        order = dict.fromkeys([*self.manifest.order, *by_id, *planned])
        if self._remote is not None and self.manifest.remote is not None:
            losses = [*self._earlier_losses, *self._remote.losses()]
            dropped = dict.fromkeys([*self.manifest.remote.dropped, *self._remote.impossible()])
            rejected, first = self._remote.rejected()
            more["remote"] = replace(
                self.manifest.remote,
                losses=losses,
                dropped=[*dropped],
                rejected=self._earlier_rejected + rejected,
                first_rejected=self.manifest.remote.first_rejected or first,
            )
        self.manifest = replace(
            self.manifest,
            cells=[cell for name, cell in by_id.items() if only is None or name in only],
            order=[name for name in order if only is None or name in only],
            **more,
        )
        write_run(self.folder, self.manifest)

    def discard_if_empty(self) -> bool:
        """Remove the directory of an attempt that failed before a request and has no log. Return whether it did."""
        if any(path.stat().st_size for path in (self.folder / "requests.jsonl", *self.folder.glob("logs/*"))):
            return False
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def finish(self, status: Status | None = None, reasons: Sequence[Reason] = ()) -> None:
        """Write the last manifest, the summary and the report. Without `status`, the records decide on the validity.

        With `status`, the run failed or was cut: an error of the report must not hide that. Without it, raises
        HarnessError when the results cannot be written.
        """
        folder, ended = self.folder, replace(self.manifest, ended_wall_s=time.time())
        if self._remote is not None:
            self._remote.close()  # the summary has all samples that are in the file
        release_space(folder)
        if status is not None:
            ended = replace(ended, status=status, reasons=list(reasons))
            with contextlib.suppress(Exception):
                write_run(folder, ended)
            with contextlib.suppress(Exception):
                self.on_end(folder, ended, None)
            return
        try:
            results = summarize_with_counts(folder, charted=True)
            if self.make_reference is not None:
                reference = self.make_reference(ended, results.summary)
                write_reference(folder, reference)
                results = with_checks(results, ended, reference)
            verdict: Status = "valid" if results.summary.valid else "invalid"
            ended = replace(ended, status=verdict, reasons=results.summary.reasons)
            write_run(folder, ended)
            self.on_end(folder, ended, results)
        except OSError as error:
            raise HarnessError(
                f"{folder}: the results cannot be written ({error.strerror})",
                next_step="The records are complete: "
                f"`{command_line('harness', 'report', folder)}` shows the results. Free some space.",
            ) from None
        except KeyboardInterrupt:
            write_run(
                folder,
                replace(ended, status="interrupted", reasons=[because("interrupted_at_end", "interrupted at the end")]),
            )
            raise


class Running(msgspec.Struct, frozen=True):
    """A run in progress."""

    file: RunFile
    experiment: Experiment
    progress: Progress
    token_words: dict[str, tuple[str, ...]] = {}  # words of one token each, by server, once they are known
    remote: RemoteTelemetry | None = None  # of the server's machine

    @property
    def id(self) -> str:
        return self.file.manifest.id

    @property
    def folder(self) -> Path:
        return self.file.folder

    @property
    def scenario(self) -> Scenario:
        return self.experiment.scenario

    @property
    def started_servers(self) -> list[Server]:
        """The servers that the run starts; none with --url."""
        return [] if self.experiment.target is not None else [*self.scenario.servers.values()]

    @property
    def api_key(self) -> str | None:
        return read_api_key(self.scenario.api_key_env)

    def job_path(self, cell: str) -> Path:
        return self.folder.resolve() / "jobs" / f"{cell}.json"

    def log_path(self, cell: str) -> Path:
        return self.folder / "logs" / f"{cell}.locust.log"


def create_run(
    experiment: Experiment,
    cells: list[Cell],
    runs: Path,
    progress: Progress,
    make_reference: MakeReference | None = None,
    kind: RunKind = "plan",
    remote: tuple[RemoteTelemetry, RemoteMachine] | None = None,
) -> Running:
    """Create the run directory with the first manifest. `remote`: telemetry of the server's machine.

    Raises HarnessError when it cannot be written, and ServerError when a running server does not have the models.
    """
    name, target, scenario = experiment.path.stem, experiment.target, experiment.scenario
    if target is not None:
        models, key = list(dict.fromkeys([scenario.model, *models_of_loads(scenario)])), scenario.api_key_env
        refuse_absent_models(target.url, models, read_api_key(key), key, progress.line)
    started = datetime.datetime.now(datetime.UTC)
    run_id = f"{started:%Y%m%d-%H%M%S}-{slug(name)}-{secrets.token_hex(2)}"
    folder = runs / run_id
    manifest = manifest_of(experiment, cells, run_id, name, started.timestamp(), kind)
    if remote is not None:
        manifest = replace(manifest, remote=remote[1])
    try:
        folder.mkdir(parents=True)
        write_run(folder, manifest)
        prepare_folder(folder, len(cells))
        inputs = Inputs(
            scenario=str(experiment.folder / experiment.path.resolve().name),
            files={name: digest_files([experiment.folder / name]) for name in input_files(experiment.scenario)},
            options=experiment.options,
            url=None if target is None else target.url,
            metrics_url=None if target is None else target.metrics_url,
            telemetry=None if target is None else target.telemetry,
            ca=None if target is None or target.ca is None else str(target.ca.resolve()),
        )
        replace_file(folder / INPUTS, pretty_json(inputs))
        (folder / "scenario.yaml").write_bytes(read_bytes(experiment.path))
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise HarnessError(
            f"{folder}: the run directory cannot be written ({error.strerror})",
            next_step="Make room if the disk is full, or give another folder with --runs DIR.",
        ) from None
    connection = None if remote is None else remote[0]
    if connection is not None and manifest.remote is not None:
        report_telemetry(connection, experiment, manifest.machine.name, manifest.remote, progress)
    file = RunFile(folder, manifest, progress.on_end, make_reference, connection)
    return Running(file, experiment, progress, remote=connection)


def report_telemetry(
    connection: RemoteTelemetry, experiment: Experiment, own_name: str, remote: RemoteMachine, progress: Progress
) -> None:
    """Print from now on what becomes of a connection, and whether its machine may not be the server's."""
    connection.report_to(progress.line)
    target = experiment.target
    if target is not None and (note := other_machine_note(target.url, own_name, remote)) is not None:
        progress.line(f"--telemetry: {note.text}")


def manifest_of(
    experiment: Experiment, cells: list[Cell], run_id: str, name: str, started_wall_s: float, kind: RunKind = "plan"
) -> Run:
    """Return the first manifest of a run."""
    scenario, folder = experiment.scenario, experiment.folder
    # The code that sends and stamps requests.
    sources = [path for part in ("load", "workload") for path in sorted((files.PACKAGE / part).glob("*.py"))]
    sources += [files.PACKAGE / "scenario" / f"{module}.py" for module in ("behaviour", "plan")]
    versions = {
        "amd-llm-load": __version__,
        "load generator": digest_files(sources),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in MEASURING_PACKAGES},
    }
    locustfiles = {load.user: locustfile_sources(locustfile_of(load, folder)) for load in scenario.loads.values()}
    return Run(
        definitions=DEFINITIONS,
        id=run_id,
        kind=kind,
        status="running",
        owner=owner_labels(),
        started_wall_s=started_wall_s,
        scenario_name=name,
        scenario=scenario,
        workload_sha256=workload_sha256(scenario, folder),
        kept_steps={
            name: KeptSteps(kept=totals.fit.kept_steps, total=totals.steps, sha256=totals.fit.kept_sha256)
            for name, totals in totals_of_traces(scenario, folder).items()
        },
        order=[cell.id for cell in cells],
        machine=read_machine(docker=get_engine_version() if needs_docker(experiment) else None),
        versions=versions,
        locustfiles={user: digest_files(paths) for user, paths in locustfiles.items()},
        git_commit=_git_commit(),
        computed=experiment.computed,
        workers=experiment.workers,
    )


def needs_docker(experiment: Experiment) -> bool:
    servers = experiment.scenario.servers.values()
    in_container = experiment.target is None and any(server.container for server in servers)
    return in_container or experiment.scenario.generator == "container"


def digest_files(paths: Sequence[Path]) -> str:
    """Return a digest of files, by content and by name, those in a folder with their path in it. Raises OSError."""
    entries = []
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                name = path.name if file == path else file.relative_to(path)
                entries.append(os.fsencode(name) + b"\0" + hashlib.sha256(read_bytes(file)).digest())
    return hashlib.sha256(b"".join(sorted(entries))).hexdigest()[:16]


def _git_commit() -> str | None:
    if not (files.ROOT / ".git").exists():  # installed; a parent folder may be another project's repository
        return None
    try:
        command = ["git", "-C", str(files.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


Start = Callable[[list[Cell]], Iterator[CellRun]]  # starts a server and runs cells on it until it dies


def failed_cell(cell: Cell, template: str, reason: Reason) -> CellRun:
    """Return the result of a cell whose server did not start."""
    now_s, served = time.time(), ServedBy(url="", template=template)
    fields = msgspec.structs.asdict(cell)
    return CellRun(**fields, started_wall_s=now_s, ended_wall_s=now_s, served_by=served, failed=reason)


def start_failure(error: StartError) -> Reason:
    """Return the result of settings with which a server did not start."""
    facts = error.facts
    why = f"{facts['cause']}; to solve it: {facts['fix']}" if {"cause", "fix"} <= facts.keys() else error.what
    return because("setting_not_started", f"did not start: {why}", error=error.what, **facts)


def death_of_setting(cell_run: CellRun) -> Reason | None:
    """Return the result of settings with which a server died under its load; None: it did not."""
    death = cell_run.served_by.death
    if death is None or death.how not in ("ended", "restarted"):
        return None
    facts = {"failure": death.failure, "cause": death.cause, "fix": death.fix}
    facts = {key: value for key, value in facts.items() if value is not None}
    text = f"{death.problem().text}; to solve it: {death.fix}" if death.fix else death.problem().text
    return because("setting_died", text, death=msgspec.to_builtins(death.problem()), **facts)


class FailedSettings:
    """The settings of a sweep with which a server did not start, or died under a load: both are results.

    They are not tried again in later repeats: a failing start takes minutes, and gives the same result.
    """

    def __init__(self, scenario: Scenario, say: Callable[[str], None], kept: Sequence[CellRun] = ()) -> None:
        """`kept`: results of a resumed run."""
        self.scenario = scenario
        self.say = say
        # By (SERVER, None): it did not start; by (SERVER, LOAD): it died under this load.
        self.failed: dict[tuple[str, str | None], Reason] = {}
        self.first_error: StartError | None = None
        for cell in kept:
            if cell.failed is not None:
                not_started = cell.failed.code == "setting_not_started"
                self.failed[cell.server, None if not_started else cell.load] = cell.failed

    def reason_of(self, cell: Cell) -> Reason | None:
        return self.failed.get((cell.server, None)) or self.failed.get((cell.server, cell.load))

    def run_start(self, cells: Sequence[Cell], start: Start) -> Iterator[CellRun]:
        """Run the cells of a server start, and start again where the server dies; yield a result for each cell.

        Raises the first start error when no server of the sweep has started.
        """
        remaining = list(cells)
        while True:
            for cell in remaining:
                if (reason := self.reason_of(cell)) is not None:
                    yield failed_cell(cell, self.scenario.servers[cell.server].template, reason)
            remaining = [cell for cell in remaining if self.reason_of(cell) is None]
            done: set[str] = set()
            try:
                for cell_run in start(remaining) if remaining else ():
                    done.add(cell_run.id)
                    yield self._check_settings(cell_run)
            except StartError as error:
                self.first_error = self.first_error or error
                self._add(remaining[0].server, None, start_failure(error))
                if self.failed.keys() == {(server, None) for server in self.scenario.servers}:
                    raise self.first_error from None
            if not done and (not remaining or self.reason_of(remaining[0]) is None):
                return  # all cells are done, or no more can run, which the manifest shows
            remaining = [cell for cell in remaining if cell.id not in done]

    def _add(self, server: str, load: str | None, reason: Reason) -> None:
        self.failed[server, load] = reason
        self.say(f"{server}{f' / {load}' if load else ''} failed: {sentence(reason)}")

    def _check_settings(self, cell_run: CellRun) -> CellRun:
        """Add a problem for each varied number that the server reports with another value, and the server's death."""
        swept, problems = self.scenario.swept, list(cell_run.problems)
        settings = swept.servers[cell_run.server].settings if swept and cell_run.server in swept.servers else {}
        numbers = {key: value for key, value in settings.items() if not isinstance(value, str)}  # texts may be free
        problems += find_ignored_settings(cell_run.served_by, numbers)
        if (reason := death_of_setting(cell_run)) is not None:
            self._add(cell_run.server, cell_run.load, reason)
        return replace(cell_run, problems=problems, failed=reason or cell_run.failed)
