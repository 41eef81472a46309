"""A run in progress: its directory from the first manifest to the last, and the settings of a sweep that failed."""

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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from harness import __version__, paths
from harness.analysis.summarize import Summarized, summarized, write_summary
from harness.errors import HarnessError, StartError
from harness.files import read_bytes
from harness.machine.gpus import machine
from harness.prepare.experiment import Experiment, input_files, sources_of
from harness.process import owner
from harness.reasons import sentence
from harness.report import html
from harness.run.progress import Progress
from harness.rundir.manifest import (
    LINES,
    CellRun,
    Inputs,
    Run,
    ServedBy,
    Status,
    release_space,
    reserve_space,
    write_inputs,
    write_run,
)
from harness.scenario import Scenario, locustfile_of
from harness.scenario.plan import Cell
from harness.serve import engine_version
from harness.summary import Reason, because
from harness.workload import workload_sha256

MEASURING_PACKAGES = ("locust", "gevent", "httptools", "msgspec", "docker", "numpy", "scipy")


OUT_OF_TIME = "out_of_time"  # why a cell was cut: the code of its problem


class OutOfTime(HarnessError):
    """The budget of the run is spent while a server starts."""


class Running(msgspec.Struct, frozen=True):
    """The state of a run in progress: experiment, run directory and progress display."""

    id: str
    folder: Path
    experiment: Experiment
    progress: Progress
    resumed: int = 0  # how often it was resumed
    ends_s: float | None = None  # monotonic: when its budget of time is spent; None: it has none
    kept: list[CellRun] = []  # that a resumed run has already

    @property
    def scenario(self) -> Scenario:
        return self.experiment.scenario

    @property
    def api_key(self) -> str | None:
        name = self.scenario.api_key_env
        return os.environ.get(name) if name else None

    def job_path(self, cell: str) -> Path:
        return self.folder.resolve() / "jobs" / f"{cell}.json"

    def counter_path(self, cell: str) -> str:
        return str(self.folder.resolve() / "jobs" / f"{cell}.counter")

    @property
    def is_over(self) -> bool:
        return self.ends_s is not None and time.monotonic() > self.ends_s

    def salted(self, cell: str) -> str:
        """What the salt of a cell's prompts comes from: a server may have the prompts of an earlier attempt cached."""
        return f"{cell}/{self.resumed}" if self.resumed else cell

    def log_path(self, cell: str) -> Path:
        return self.folder / "logs" / f"{cell}.locust.log"


def begin(experiment: Experiment, cells: list[Cell], runs: Path, progress: Progress) -> tuple[Running, Run]:
    """Make the run directory and write the first manifest. Raises HarnessError where that is not possible."""
    name = experiment.path.stem
    started = datetime.datetime.now(datetime.UTC)
    # The id names folders, containers and networks: use characters that all of them allow.
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-") or "run"
    run_id = f"{started:%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(2)}"
    folder = runs / run_id
    manifest = manifest_of(experiment, cells, run_id, name, started.timestamp())
    try:
        folder.mkdir(parents=True)
        write_run(folder, manifest)
        make_room(folder, len(cells))
        write_inputs(folder, inputs_of(experiment))
        (folder / "scenario.yaml").write_bytes(read_bytes(experiment.path))
    except BaseException as error:  # nothing was measured: remove the incomplete run directory
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise HarnessError(
            f"{folder}: the run directory cannot be written ({error.strerror})",
            next_step="Make room if the disk is full, or give another folder with --runs DIR.",
        ) from None
    return Running(run_id, folder, experiment, progress), manifest


def make_room(folder: Path, cells: int) -> None:
    """Make the parts of a run directory that are missing, and reserve space for its end. Raises OSError."""
    reserve_space(folder, cells)
    for part in ("jobs", "logs", "compose"):
        (folder / part).mkdir(exist_ok=True)
    # Open them before the first request, to detect a read-only disk.
    for output in LINES:
        (folder / output).touch()


def inputs_of(experiment: Experiment) -> Inputs:
    """What a resumed run needs to know of the files and the address that were given. Raises OSError."""
    target = experiment.target
    return Inputs(
        scenario=str(experiment.path.resolve()),
        files={name: digest([experiment.folder / name]) for name in input_files(experiment.scenario)},
        url=None if target is None else target.url,
        metrics_url=None if target is None else target.metrics_url,
    )


def manifest_of(experiment: Experiment, cells: list[Cell], run_id: str, name: str, started_wall_s: float) -> Run:
    """The manifest of a run that starts. Raises HarnessError, OSError."""
    return Run(
        id=run_id,
        status="running",
        owner=owner(),
        started_wall_s=started_wall_s,
        scenario_name=name,
        scenario=experiment.scenario,
        workload_sha256=workload_sha256(experiment.scenario, experiment.folder),
        order=[cell.id for cell in cells],
        machine=machine(docker=engine_version() if needs_docker(experiment) else None),
        versions=_versions(),
        locustfiles={
            load.user: digest(sources_of(locustfile_of(load, experiment.folder, paths.LOCUSTFILES), paths.LOCUSTFILES))
            for load in experiment.scenario.loads.values()
        },
        git_commit=_git_commit(),
        computed=experiment.computed,
        workers=experiment.workers,
    )


def needs_docker(experiment: Experiment) -> bool:
    servers = experiment.scenario.servers.values()
    in_container = experiment.target is None and any(server.container for server in servers)
    return in_container or experiment.scenario.generator == "container"


def finish(folder: Path, manifest: Run, status: Status | None = None, reasons: Sequence[Reason] = ()) -> None:
    """Write the verdict, the summary and the page. Without a status, the records say whether the run is valid.

    With one, the run has failed or was cut: what it measured is worth its report, but nothing may hide how it ended.
    Without one, raises HarnessError when the results cannot be written.
    """
    ended = msgspec.structs.replace(manifest, ended_wall_s=time.time())
    release_space(folder)
    if status is not None:
        with contextlib.suppress(Exception):
            write_run(folder, msgspec.structs.replace(ended, status=status, reasons=list(reasons)))
        with contextlib.suppress(Exception):
            _write_results(folder, summarized(folder, charted=True))
        return
    try:
        made = summarized(folder, charted=True)
        summary = made.summary
        verdict: Status = "valid" if summary.valid else "invalid"
        write_run(folder, msgspec.structs.replace(ended, status=verdict, reasons=summary.reasons))
        _write_results(folder, made)
    except OSError as error:
        raise HarnessError(
            f"{folder}: the results cannot be written ({error.strerror})",
            next_step=f"The records are complete. Free some space, then: harness report {folder}",
        ) from None
    except KeyboardInterrupt:
        write_run(folder, msgspec.structs.replace(ended, status="interrupted", reasons=[because("interrupted_at_end")]))
        raise


def _write_results(folder: Path, made: Summarized) -> None:
    write_summary(folder, made.summary)
    html.write_report(folder, made)


def _versions() -> dict[str, str]:
    """Versions that affect the measurement: packages, and a digest of the code that sends and stamps requests."""
    harness = paths.PACKAGE
    own = [path for part in ("load", "workload") for path in sorted((harness / part).glob("*.py"))]
    own += [harness / "scenario" / f"{name}.py" for name in ("behaviour", "plan")]
    packages = {package: importlib.metadata.version(package) for package in MEASURING_PACKAGES}
    return {"amd-llm-load": __version__, "load generator": digest(own), "python": platform.python_version(), **packages}


def digest(files: Sequence[Path]) -> str:
    """The digest of files by their content, whatever their paths. Raises OSError."""
    return hashlib.sha256(b"".join(sorted(read_bytes(path) for path in files))).hexdigest()[:16]


def _git_commit() -> str | None:
    if not (paths.ROOT / ".git").exists():  # installed: a repository further up is another project's
        return None
    try:
        command = ["git", "-C", str(paths.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


# Settings of a sweep that fail: a server that does not start with them, or dies under a load, is a result.
Start = Callable[[list[Cell]], Iterator[CellRun]]  # starts a server, runs its cells, and stops where the server dies


class FailedSettings:
    """What failed so far: servers that did not start, and rows (server, load) under which one died.

    Neither is tried again in later repeats: a start that fails takes minutes, and gives the same result.
    """

    def __init__(self, scenario: Scenario, say: Callable[[str], None], known: Sequence[CellRun] = ()) -> None:
        """`known`: cells that the run has already, as one that is resumed."""
        self.scenario = scenario
        self.say = say
        self.servers: dict[str, Reason] = {}
        self.rows: dict[tuple[str, str], Reason] = {}
        self.errors: list[StartError] = []
        for cell in known:
            if cell.failed is not None and cell.failed.code == "setting_not_started":
                self.servers[cell.server] = cell.failed
            elif cell.failed is not None:
                self.rows[cell.server, cell.load] = cell.failed

    def of(self, cell: Cell) -> Reason | None:
        return self.servers.get(cell.server) or self.rows.get((cell.server, cell.load))

    def results(self, cells: Sequence[Cell], start: Start) -> Iterator[CellRun]:
        """Run the cells of a server start, on further starts where the server dies; each cell gives a result.

        Raises the error of the first start where no server of the sweep has started.
        """
        left = list(cells)
        while True:
            yield from (self._result(cell, reason) for cell in left if (reason := self.of(cell)) is not None)
            left = [cell for cell in left if self.of(cell) is None]
            done: set[str] = set()
            try:
                for cell_run in start(left) if left else ():
                    done.add(cell_run.id)
                    yield self._noted(cell_run)
            except StartError as error:
                self._not_started(left[0], error)
            if not done and (not left or self.of(left[0]) is None):
                return  # all are done, or nothing more can be run, which the manifest shows
            left = [cell for cell in left if cell.id not in done]

    def _result(self, cell: Cell, reason: Reason) -> CellRun:
        """The result of a cell that is not run."""
        now = time.time()
        served = ServedBy(url="", template=self.scenario.servers[cell.server].template)
        return CellRun(
            **msgspec.structs.asdict(cell), started_wall_s=now, ended_wall_s=now, served_by=served, failed=reason
        )

    def _not_started(self, cell: Cell, error: StartError) -> None:
        self.errors.append(error)
        reason = because("setting_not_started", error=error.what, **error.known)
        self.servers[cell.server] = reason
        self.say(f"{cell.server} is a result: {sentence(reason)}")
        if len(self.servers) == len(self.scenario.servers) and not self.rows:  # none of them has ever worked
            raise self.errors[0]

    def _not_applied(self, cell_run: CellRun) -> list[Reason]:
        """Varied numbers with which the server runs otherwise, by its own words: its row would have a false name."""
        swept = self.scenario.swept
        row = None if swept is None else swept.servers.get(cell_run.server)
        found = []
        for key, asked in {} if row is None else row.settings.items():
            ran = cell_run.served_by.effective.get(key.removeprefix("--").replace("-", "_"))
            both = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (asked, ran))
            if both and ran != asked:
                found.append(because("setting_not_applied", key=key, asked=asked, ran=ran))
        return found

    def _noted(self, cell_run: CellRun) -> CellRun:
        """A cell with the reason why its setting failed: its server ended or was restarted under its load."""
        if not_applied := self._not_applied(cell_run):
            cell_run = msgspec.structs.replace(cell_run, problems=[*cell_run.problems, *not_applied])
        death = cell_run.served_by.death
        if death is None or death.how not in ("ended", "restarted"):
            return cell_run
        known = {"failure": death.failure, "cause": death.cause, "fix": death.fix}
        known = {key: value for key, value in known.items() if value is not None}
        reason = because("setting_died", death=msgspec.to_builtins(death.problem()), **known)
        self.rows[cell_run.server, cell_run.load] = reason
        self.say(f"{cell_run.server} / {cell_run.load} is a result: {sentence(reason)}")
        return msgspec.structs.replace(cell_run, failed=reason)
