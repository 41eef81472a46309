"""The run's manifest, run.json: written first with status `running`, after every cell, and last with the verdict."""

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.files import pretty_json, read_json, replace_file
from harness.redact import without
from harness.rundir.records import FORMAT_VERSION, Seconds, Whole
from harness.scenario.scenario import Scenario, too_large
from harness.workers import Workers

RESERVE = "reserve"  # a file of the run directory, while the run goes on
RESERVED_BYTES = 2**19  # for the last records, and as much for the last manifest
FULL_BYTES = 2**16
WallSeconds = Annotated[float, Meta(ge=0, le=1e11)]  # Unix time
Status = Literal["running", "valid", "invalid", "failed", "interrupted", "live"]


# In the order in which a server passes them; it has those that could be told apart.
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


DIED = "the server died during the load"
CUT_OFF = "the server could not be reached any more"
EVIDENCE_CHARS = 300  # of a log line, within a sentence


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
        how = {
            "ended": f"it ended with exit code {self.exit_code}",
            "restarted": "it was restarted",
            "removed": "its container was removed from outside",
            "paused": "its container was paused from outside",
            "closed": f"nothing listens at {self.detail} any more",
            "unreachable": self.detail,
        }[self.how]
        return ("its gateway: " if self.of_gateway else "") + how + (f": {self.cause}" if self.cause else "")

    def problem(self) -> str:
        """The sentence as a reason of an invalid cell."""
        return f"{CUT_OFF if self.how == 'unreachable' else DIED}: {self.sentence()}"

    def evidence(self) -> str | None:
        """What the log says about it."""
        if self.line is None or self.of_gateway:
            return None
        if self.failure is None:
            return f"the last line of its log: {self.line}"
        where = "its log ends with" if self.line_number is None else f"line {self.line_number} of its log says"
        shown = self.line[:EVIDENCE_CHARS] + ("..." if len(self.line) > EVIDENCE_CHARS else "")
        return f"{where}: {shown or 'nothing'}; to solve it: {self.fix}"


class ServedBy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What really served a cell, as found out from the outside."""

    url: str
    template: str | None = None  # None: a server that already ran
    simulated: bool = False  # every page that shows these numbers says so
    image: str | None = None  # as asked for
    image_digest: str | None = None  # repo digest, else image id
    container: dict[str, Any] | None = None  # the container's configuration as inspected, without its environment
    version: str | None = None  # as the server says
    model: str | None = None  # model id that the server answers to
    arguments: list[str] = []  # the server's command line
    phases: list[Phase] = []
    startup: Startup | None = None
    effective: dict[str, Any] = {}  # with what it really runs, as it says itself; secrets blacked out
    contents: Contents | None = None  # of its image
    most_at_once: int | None = None  # requests that it serves at once; more wait before it, not before the engine
    notes: list[str] = []  # on its start, for the reader of its numbers
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
    started_wall_s: WallSeconds
    ended_wall_s: WallSeconds | None = None  # None: it had not come to its end when this was written
    served_by: ServedBy
    gpu_memory_before: list[GpuMemory] = []  # just before the server was started; not for one that already ran
    problems: list[str] = []  # why this cell cannot be trusted, as seen while it ran


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
    notes: list[str] = []
    rows: list[RowOrigin] = []  # the rows that differ from the above

    def of_row(self, server: str, load: str) -> RowOrigin:
        """What holds for one row: its own where it differs."""
        alike = (row for row in self.rows if (row.server, row.load) == (server, load))
        own = next(alike, RowOrigin(server=server, load=load))
        return replace(own, definitions=self.definitions | own.definitions, missing=self.missing | own.missing)


class Run(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """run.json."""

    format_version: int = FORMAT_VERSION
    id: str
    status: Status
    reasons: list[str] = []  # why it is not valid
    started_wall_s: WallSeconds
    owner: dict[str, str] = {}  # the process that runs it: tells a run that goes on from one that was killed
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
    computed: dict[str, str] = {}  # by path in the scenario: a value that was `auto`, and how it came about
    workers: Workers | None = None  # machines that sent the load; None: this one
    origin: Origin | None = None  # None: measured by `harness run`

    @property
    def ran(self) -> dict[str, CellRun]:
        """The cells that came to their end, by their ids."""
        return {cell.id: cell for cell in self.cells if cell.ended_wall_s is not None}

    @property
    def simulated(self) -> bool:
        return any(cell.served_by.simulated for cell in self.cells) or any(
            server.template == "simulated" for server in self.scenario.servers.values()
        )


def write_run(folder: Path, run: Run) -> None:
    # Whatever a server, an engine or an image said of itself is in it.
    replace_file(folder / "run.json", pretty_json(without(to_builtins(run), words=False)))


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
        return read_json(folder / "run.json", Run, FORMAT_VERSION, contradiction=_contradiction)
    except FileNotFoundError:
        raise HarnessError(
            f"{folder}: not a run directory (it has no run.json)", next_step="`harness runs` lists the runs."
        ) from None
    except OSError as error:
        raise HarnessError(
            f"{folder / 'run.json'}: cannot be read ({error.strerror})", next_step="`harness runs` lists the runs."
        ) from None


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
            return f"the cell '{cell.id}' is there twice", f"$.cells[{place}].id"
        names.add(cell.id)
    return None
