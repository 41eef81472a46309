"""The run's manifest, run.json: written first with status `running`, after every cell, and last with the verdict."""

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Meta, Struct, to_builtins
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.files import UNDECODABLE, open_file, pretty_json, read_json, replace_file
from harness.reasons import sentence
from harness.redact import masked
from harness.rundir.records import ProcessMark, Request, Seconds, Whole
from harness.rundir.samples import MetricsSample, TelemetrySample
from harness.scenario import Scenario, too_large
from harness.summary import FORMAT_VERSION, Reason, because, upgrade_reasons
from harness.workers import Workers

RESERVE = "reserve"  # a file of the run directory, while the run goes on
RESERVED_BYTES = 2**19  # for the last records, and as much for the last manifest
FULL_BYTES = 2**16
WallSeconds = Annotated[float, Meta(ge=0, le=1e11)]  # Unix time
Status = Literal["running", "valid", "invalid", "unchecked", "failed", "interrupted", "live"]


# In the order in which a server passes them; it has those that the log shows.
PHASES = (
    "pull", "flags", "create", "process", "weights", "compile", "graphs", "warm-up", "ready", "port open", "health",
    "install", "model", "download", "load", "first answer",
)  # fmt: skip


class Phase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A step of a server's start, and how long it took. They follow each other without a gap."""

    name: str  # one of PHASES
    seconds: Seconds


class Startup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What an engine says of itself when it starts, in its log and its metrics. None: it did not say.

    Of an engine on several GPUs, memory is that of one of them.
    """

    engine: str | None = None  # "vllm", "llama.cpp", "simulated"; behind Lemonade: what it started
    version: str | None = None  # the engine's own
    architecture: str | None = None  # of the model
    max_model_len: int | None = None  # tokens that one request may have
    attention_backend: str | None = None
    offloaded_layers: str | None = None  # llama.cpp: how many of how many are on a GPU, such as "25/25"
    download_s: float | None = None  # of weights that were not on this machine yet
    weights_gib: float | None = None
    weights_s: float | None = None  # reading them
    model_load_s: float | None = None  # reading them and all else until the model was in memory
    compile_s: float | None = None
    compile_cache: Literal["cold", "warm"] | None = None  # whether anything had to be compiled anew
    warmup_s: float | None = None  # the first run, which measures the memory that is needed
    kv_cache_gib: float | None = None
    kv_cache_tokens: int | None = None
    kv_cache_blocks: int | None = None
    kv_block_size: int | None = None  # tokens
    max_concurrency: float | None = None  # requests of max_model_len that the KV cache holds
    graphs_s: float | None = None
    graphs_gib: float | None = None
    init_engine_s: float | None = None


class Contents(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What an image brings along that decides about speed."""

    rocm: str | None = None  # its /opt/rocm/.info/version
    versions: dict[str, str] = {}  # its /app/versions.txt
    environment: dict[str, str] = {}  # what it sets for GPU, engine and libraries; secrets blacked out


class ServerDeath(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How a server ended, or why it could not be used any more."""

    how: Literal["ended", "restarted", "removed", "paused", "closed", "unreachable"]
    of_gateway: bool = False
    detail: str = ""  # closed: its address; unreachable: what the way to it reported
    exit_code: int | None = None
    failure: str | None = None  # id of the row of the failure table; None: the cause is not known
    cause: str | None = None
    fix: str | None = None
    line: str | None = None  # of the log: it shows the cause, or is the last one
    line_number: int | None = None  # from 1

    def sentence(self) -> str:
        """How it ended, in words."""
        return sentence(Reason("server_death", self._values()))

    def problem(self) -> Reason:
        """Why a cell is invalid."""
        return Reason("server_unreachable" if self.how == "unreachable" else "server_died", self._values())

    def evidence(self) -> Reason | None:
        """What the log says about it."""
        if self.line is None or self.of_gateway:
            return None
        if self.failure is None:
            return because("server_log", line=self.line)
        return because("server_log", line=self.line, failure=self.failure, number=self.line_number, fix=self.fix)

    def _values(self) -> dict[str, Any]:
        found = {"how": self.how, "exit_code": self.exit_code, "detail": self.detail or None, "cause": self.cause}
        found["of_gateway"] = self.of_gateway or None
        return {key: value for key, value in found.items() if value is not None}


class ServedBy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What really served a cell, as found out from the outside."""

    url: str
    template: str | None = None  # None: a server that already ran
    simulated: bool = False  # every page that shows these numbers says so
    image: str | None = None  # as the scenario has it
    image_digest: str | None = None  # repo digest, else image id
    container: dict[str, Any] | None = None  # the container's configuration as inspected, without its environment
    version: str | None = None  # as the server says
    model: str | None = None  # model id that the server answers to
    arguments: list[str] = []  # the server's command line
    phases: list[Phase] = []
    startup: Startup | None = None
    effective: dict[str, Any] = {}  # with what it really runs, as it says itself; secrets blacked out
    contents: Contents | None = None  # of its image
    max_parallel: int | None = None  # requests that it serves at once; more wait before it, not before the engine
    notes: list[Reason] = []  # on its start, for the reader of its numbers
    over_ssh: bool = False  # what is sent to it goes through an ssh tunnel
    restarts: int = 0
    oom_killed: bool = False
    exit_code: int | None = None  # set when it died before it was stopped
    death: ServerDeath | None = None  # why it could not be used any more; runs before 0.2.0 do not have it
    gateway: "ServedBy | None" = None  # what stood in front of it and took the load


class GpuMemory(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What of a GPU's memory was in use at one moment."""

    render_node: str
    used_bytes: int
    total_bytes: int


class CellRun(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cell of the plan that was begun."""

    id: str
    server: str
    load: str
    repeat: Whole
    mix: str | None = None  # see harness.scenario.plan.Cell, as of the following
    stage: str | None = None
    group: str = ""
    again: str | None = None
    started_wall_s: WallSeconds
    ended_wall_s: WallSeconds | None = None  # None: it had not come to its end when this was written
    stopped_after_s: Seconds | None = None  # measured time when the harness stopped it as planned; None: it did not
    seed: Whole | None = None  # of its request sequence, where it is not the scenario's
    served_by: ServedBy
    gpu_memory_before: list[GpuMemory] = []  # just before the server was started; not for one that already ran
    problems: list[Reason] = []  # why this cell cannot be trusted, as seen while it ran
    failed: Reason | None = None  # of a sweep: why its server cannot do this with its settings, which is the result


class Machine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host that ran the load (and, unless said otherwise, the server). Unknown is None."""

    name: str
    kernel: str | None = None
    cpu: str | None = None
    cores: int | None = None
    ram_bytes: int | None = None
    gpus: list[dict[str, Any]] = []
    kernel_parameters: dict[str, str] = {}
    docker: str | None = None
    rocm: str | None = None  # of the host; an engine in a container brings its own


class RowOrigin(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tool's file means by one row's numbers, where rows of the file differ in it."""

    server: str
    load: str
    definitions: dict[str, str] = {}  # by field of a summary's numbers
    missing: dict[str, str] = {}  # by field of a summary's numbers: why it is not known


class Origin(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Another tool's measurement that became this run; see docs/imports.md."""

    tool: str
    version: str | None = None  # None: its files do not say
    files: dict[str, str]  # SHA-256 by name
    imported_wall_s: WallSeconds
    importer: str  # version of the harness that read them
    definitions: dict[str, str] = {}  # by field of a summary's numbers, where it is not ours
    missing: dict[str, str] = {}  # by field of a summary's numbers: why it is not known
    notes: list[Reason] = []
    rows: list[RowOrigin] = []  # the rows that differ from the above

    def of_row(self, server: str, load: str) -> RowOrigin:
        """What holds for one row: its own where it differs."""
        alike = (row for row in self.rows if (row.server, row.load) == (server, load))
        own = next(alike, RowOrigin(server=server, load=load))
        return replace(own, definitions=self.definitions | own.definitions, missing=self.missing | own.missing)


class Budget(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the time of `harness run --budget` was spent."""

    seconds: Seconds
    repeats: Whole  # as the scenario has them; more of a row follow while a verdict on it is open
    looks: list[Whole] = []  # after how many repeats the verdicts were checked
    unmeasured: list[str] = []  # rows for which there was no time


class Resumption(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a run was resumed, and what it had then."""

    wall_s: WallSeconds
    stopped_wall_s: WallSeconds | None = None  # the end of the last cell that was kept; None: none was
    kept: Whole  # cells, complete and valid
    again: list[str] = []  # cells of which an earlier attempt was incomplete or not valid
    attempts: str | None = None  # the folder with the records of these; None: they had none


class Run(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """run.json."""

    format_version: int = FORMAT_VERSION
    id: str
    status: Status
    reasons: list[Reason] = []  # why it is not valid
    started_wall_s: WallSeconds
    owner: dict[str, str] = {}  # the process that runs it: distinguishes a run in progress from one that was killed
    ended_wall_s: WallSeconds | None = None
    scenario_name: str  # file name without its ending
    scenario: Scenario  # as resolved, defaults filled in
    workload_sha256: str
    order: list[str] = []  # cell ids as planned
    cells: list[CellRun] = []  # cells that were begun, in that order
    machine: Machine
    versions: dict[str, str] = {}  # packages that touch the measurement
    locustfiles: dict[str, str] = {}  # by `user` of a load: digest of the code of its user class
    git_commit: str | None = None
    computed: dict[str, Reason] = {}  # by path in the scenario: how a value that was `auto` was computed
    workers: Workers | None = None  # machines that sent the load; None: this one
    origin: Origin | None = None  # None: measured by `harness run`
    resumed: list[Resumption] = []  # the oldest first
    budget: Budget | None = None  # None: there was none

    @property
    def ran(self) -> dict[str, CellRun]:
        """The cells that came to their end, by their ids."""
        return {cell.id: cell for cell in self.cells if cell.ended_wall_s is not None}

    @property
    def served(self) -> list[CellRun]:
        """The cells that a server served: of a setting that failed only the cell in which its server died."""
        return [cell for cell in self.cells if cell.failed is None or cell.served_by.url]

    @property
    def simulated(self) -> bool:
        return any(cell.served_by.simulated for cell in self.cells) or any(
            server.template == "simulated" for server in self.scenario.servers.values()
        )


def write_run(folder: Path, run: Run) -> None:
    # Whatever a server, an engine or an image said of itself is in it.
    replace_file(folder / "run.json", pretty_json(masked(to_builtins(run), "sure")))


def reserve_space(folder: Path, cells: int) -> None:
    """Reserve space for the last manifest, so that a full disk cannot hide how a run ended. Raises OSError."""
    with (folder / RESERVE).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * RESERVED_BYTES + 2**16 * min(cells, 500))


def release_space(folder: Path, *, half: bool = False) -> None:
    """Release what was reserved; `half`: for the last records, and the rest stays for the manifest."""
    path = folder / RESERVE
    with contextlib.suppress(OSError):
        os.truncate(path, path.stat().st_size // 2) if half else path.unlink()


def disk_is_full(folder: Path) -> bool:
    """Whether the file system of a run directory has no space left. One that does not report its size is not full."""
    found = os.statvfs(folder)
    free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return found.f_blocks > 0 and free * found.f_frsize < FULL_BYTES


def read_run(folder: Path) -> Run:
    """The manifest of a run directory. Raises HarnessError that says what is wrong with it."""
    try:
        run = read_json(folder / "run.json", Run, FORMAT_VERSION, contradiction=_contradiction, upgrade=_upgrade)
        # Earlier harnesses called an import without a problem valid.
        return replace(run, status="unchecked") if run.origin and run.status == "valid" else run
    except FileNotFoundError:
        raise HarnessError(
            f"{folder}: not a run directory (it has no run.json)", next_step="`harness runs` lists the runs."
        ) from None
    except OSError as error:
        raise HarnessError(
            f"{folder / 'run.json'}: cannot be read ({error.strerror})", next_step="`harness runs` lists the runs."
        ) from None


def _upgrade(raw: dict[str, Any]) -> None:
    """Make a run.json of version 1 one of this version, in place."""
    cells = raw.get("cells", [])
    upgrade_reasons(raw, "reasons", cells={cell["id"] for cell in cells})
    for cell in cells:
        upgrade_reasons(cell, "problems")
        for served in filter(None, (cell["served_by"], cell["served_by"].get("gateway"))):
            upgrade_reasons(served, "notes")
    upgrade_reasons(raw.get("computed", {}), *raw.get("computed", {}))
    if raw.get("origin"):
        upgrade_reasons(raw["origin"], "notes")


def _contradiction(run: Run) -> tuple[str, str] | None:
    """What no run can be, and the path of it in run.json."""
    scenario = run.scenario
    for name, parts in (("servers", scenario.servers), ("loads", scenario.loads)):
        if not parts:
            return "at least one is needed", f"$.scenario.{name}"
    if too_many := too_large(len(scenario.servers), len(scenario.loads), scenario.repeats):
        return too_many, "$.scenario"
    names: set[str] = set()
    for place, cell in enumerate(run.cells):
        if cell.server not in scenario.servers:
            return f"the scenario has no server '{cell.server}'", f"$.cells[{place}].server"
        if cell.load not in scenario.loads:
            return f"the scenario has no load '{cell.load}'", f"$.cells[{place}].load"
        if cell.id in names:
            return f"the cell '{cell.id}' is listed twice", f"$.cells[{place}].id"
        names.add(cell.id)
    return None


ATTEMPTS = "attempts"
INPUTS = "inputs.json"
INPUTS_VERSION = 1
# Files of lines, each with its cell.
LINES: dict[str, type[Any]] = {
    "requests.jsonl": Request,
    "processes.jsonl": ProcessMark,
    "metrics.jsonl": MetricsSample,
    "telemetry.jsonl": TelemetrySample,
}


class Inputs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """inputs.json: what was given to a run in addition to its scenario. It stays on this machine."""

    format_version: int = INPUTS_VERSION
    scenario: str  # path of the scenario file; prompt files, traces and locustfiles are relative to its folder
    files: dict[str, str] = {}  # files that the scenario names: digest by path, as in the scenario
    url: str | None = None  # of a server that already ran
    metrics_url: str | None = None


def write_inputs(folder: Path, inputs: Inputs) -> None:
    replace_file(folder / INPUTS, pretty_json(inputs))


def read_inputs(folder: Path) -> Inputs:
    """Read inputs.json. Raises HarnessError for a run without one."""
    try:
        return read_json(folder / INPUTS, Inputs, INPUTS_VERSION)
    except OSError as error:
        raise HarnessError(
            f"{folder / INPUTS}: cannot be read ({error.strerror}), so the run cannot be resumed",
            next_step="Run the scenario again. Only a run of this version or a later one, in its own directory, can be "
            "resumed.",
        ) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run directory, as the one process that writes to it. The kernel gives the lock back when it dies.

    Raises HarnessError while another process has it.
    """
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise HarnessError(
            f"{folder}: another harness process is running this run", next_step="Wait for it, or stop it with Ctrl-C."
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(place)


def set_aside(folder: Path, keep: Collection[str], cells: Collection[str]) -> str | None:
    """Move all but the cells `keep` out of the files of a run; return the new folder below it, None if there is none.

    `cells`: all that are planned. Damaged lines, such as one that was torn by a power loss, go as well. Each line is
    on the disk in its new place before it leaves the old one: if this is interrupted it can be done again. Raises
    OSError, such as for a full disk.
    """
    number = 1 + max((int(path.name) for path in (folder / ATTEMPTS).glob("*") if path.name.isdigit()), default=0)
    aside = folder / ATTEMPTS / str(number)
    aside.mkdir(parents=True)
    moved = [_move_lines(folder / name, aside / name, kind, keep) for name, kind in LINES.items()]
    for part in ("logs", "jobs"):
        for path in sorted((folder / part).glob("*")):
            cell = cell_of_file(path.name, cells)
            if cell is not None and cell not in keep:
                (aside / part).mkdir(exist_ok=True)
                os.replace(path, aside / part / path.name)
                moved.append(True)
    if any(moved):
        return f"{ATTEMPTS}/{number}"
    aside.rmdir()
    with contextlib.suppress(OSError):  # earlier attempts are in it
        aside.parent.rmdir()
    return None


def cell_of_file(name: str, cells: Collection[str]) -> str | None:
    """The cell to which a file in `logs` or `jobs` belongs."""
    return max((cell for cell in cells if name.startswith(f"{cell}.")), key=len, default=None)


def _move_lines(path: Path, aside: Path, kind: type[Any], keep: Collection[str]) -> bool:
    """Move the lines of other cells, and those that cannot be read. Return whether there were any."""
    decode = msgspec.json.Decoder(kind).decode
    kept, moved, started = 0, 0, path.with_name(f"{path.name}.new")
    with open_file(path) as lines, started.open("wb") as stays, aside.open("wb") as goes:
        for line in lines:
            whole = line.endswith(b"\n")
            try:
                mine = whole and decode(line).cell in keep
            except UNDECODABLE:
                mine = False
            (stays if mine else goes).write(line if whole else line + b"\n")
            kept, moved = kept + mine, moved + (not mine)
        for file in (goes, stays):
            _to_disk(file)
    if not moved:
        started.unlink()
        aside.unlink()
        return False
    os.replace(started, path)
    return True


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
