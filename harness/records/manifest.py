"""The manifest of a run, run.json: written first as `running`, after each cell, and last with the verdict."""

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins
from msgspec.structs import force_setattr, replace

from harness.base import metrics
from harness.base.errors import HarnessError
from harness.base.files import pretty_json, read_json, replace_file
from harness.base.measured import NO_SAMPLE, Distribution, Numbers
from harness.base.reason import Reason, because, sentence
from harness.base.redact import masked
from harness.base.versions import FORMAT_VERSION
from harness.records.records import Seconds, Whole
from harness.records.value_limits import GPU_FACTS, MACHINE_FACTS, valid_facts
from harness.scenario import Scenario, size_problem
from harness.scenario.plan import Cell
from harness.scenario.workers import Workers

WallSeconds = Annotated[float, Meta(ge=0, le=1e11)]  # Unix time
Status = Literal["running", "valid", "invalid", "unchecked", "failed", "interrupted", "live"]
# Cells that a scenario plans, probes or starts that a search chooses, a load set by hand, what another tool measured.
RunKind = Literal["plan", "search", "live", "import"]


# Steps of a server's start in their order; a server has those that its log shows.
PHASES = (
    "pull", "create", "process", "weights", "compile", "graphs", "warm-up", "ready", "port open", "health",
    "install", "model", "download", "load", "first answer",
)  # fmt: skip


class Phase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A step of a server's start. The next one follows without a gap."""

    name: str  # one of PHASES
    seconds: Seconds


class CompiledFolder(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A folder in which a server keeps what it compiles, as of a start of a server with `caches`. None: not known."""

    path: str  # inside the container
    before_bytes: int | None = None  # right after the start of the process
    ready_bytes: int | None = None


class Startup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Facts that an engine reports when it starts, in its log and its metrics. None: it did not report it.

    With several GPUs, memory is that of one of them.
    """

    engine: str | None = None  # "vllm", "llama.cpp", "simulated"; behind Lemonade: what it started
    version: str | None = None  # the engine's own
    architecture: str | None = None  # of the model
    max_model_len: int | None = None  # tokens that one request may have
    attention_backend: str | None = None
    offloaded_layers: str | None = None  # llama.cpp: layers on a GPU of all layers, such as "25/25"
    download_s: float | None = None  # of weights that were not on this machine
    weights_gib: float | None = None
    weights_s: float | None = None  # to read them
    model_load_s: float | None = None  # until the model was in memory, reading included
    compile_s: float | None = None
    compile_cache: Literal["cold", "warm"] | None = None  # cold: something was compiled
    warmup_s: float | None = None  # of the first run, which measures the memory that is needed
    kv_cache_gib: float | None = None
    kv_cache_tokens: int | None = None
    kv_cache_blocks: int | None = None
    kv_block_size: int | None = None  # tokens
    max_concurrency: float | None = None  # requests of max_model_len that the KV cache holds
    graphs_s: float | None = None
    graphs_gib: float | None = None
    init_engine_s: float | None = None


class Contents(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The contents of an image that affect the speed."""

    rocm: str | None = None  # its /opt/rocm/.info/version
    versions: dict[str, str] = {}  # its /app/versions.txt
    environment: dict[str, str] = {}  # its variables for GPU, engine and libraries; secrets masked


class ModelSize(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a token reads of a model and computes with it. Bytes and parameters; None: not known."""

    name: str
    weights_bytes: float  # all weights, which have to fit into memory
    read_bytes: float  # of the weights that a token of one user reads
    params: float | None = None  # that a token multiplies, output head included; as of the following
    head_params: float = 0  # of them: the output head, which a prompt needs once
    routed_bytes: float = 0  # of weights_bytes: experts among which a router chooses
    routed_params: float = 0  # likewise
    routed_share: float = 1  # of the routed experts: those that one token uses
    kv_token_bytes: float | None = None  # KV cache of a token in layers that keep all tokens
    sliding_token_bytes: float = 0  # likewise in layers that keep the last `window` tokens
    window: int | None = None
    attention_width: float = 0  # layers that keep all tokens x query heads x head size; 0: not known
    sliding_attention_width: float = 0  # likewise of layers that keep the last `window` tokens
    number_bits: Literal[4, 8, 16] | None = None  # of the numbers that matrix units multiply
    doubts: list[str] = []  # what is estimated


_MAX_LOG_CHARS = 300  # of a log line in a sentence


class ServerDeath(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How a server ended, or why it could not be used any more."""

    how: Literal["ended", "restarted", "removed", "paused", "closed", "unreachable"]
    of_gateway: bool = False
    detail: str = ""  # closed: its address; unreachable: the error of the connection
    exit_code: int | None = None
    failure: str | None = None  # id in the failure table; None: the cause is not known
    cause: str | None = None
    fix: str | None = None
    line: str | None = None  # of the log: the one that shows the cause, else the last one
    line_number: int | None = None  # from 1

    def sentence(self) -> str:
        """How the server ended, with the cause where the failure table knows it."""
        ends = {
            "ended": f"it ended with exit code {self.exit_code}",
            "restarted": "it was restarted",
            "removed": "its container was removed by another process",
            "paused": "its container was paused by another process",
            "closed": f"nothing listens at {self.detail} any more",
            "unreachable": self.detail,
        }
        text = ("its gateway: " if self.of_gateway else "") + ends[self.how]
        return f"{text}: {self.cause}" if self.cause else text

    def problem(self) -> Reason:
        lost = self.how == "unreachable"
        text = "the server could not be reached any more" if lost else "the server died during the load"
        code = "server_unreachable" if lost else "server_died"
        return Reason(code, f"{text}: {self.sentence()}", self._values())

    def evidence(self) -> Reason | None:
        if self.line is None or self.of_gateway:
            return None
        if self.failure is None:
            return because("server_log", f"the last line of its log: {self.line}", line=self.line)
        number = self.line_number
        where = "its log ends with" if number is None else f"line {number} of its log says"
        shown = self.line[:_MAX_LOG_CHARS] + ("..." if len(self.line) > _MAX_LOG_CHARS else "")
        text = f"{where}: {shown or 'nothing'}; to solve it: {self.fix}"
        return because("server_log", text, line=self.line, failure=self.failure, number=number, fix=self.fix)

    def _values(self) -> dict[str, Any]:
        values = {"how": self.how, "exit_code": self.exit_code, "detail": self.detail or None, "cause": self.cause}
        values["of_gateway"] = self.of_gateway or None
        return {name: value for name, value in values.items() if value is not None}


class ServedBy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server of a cell, as observed from outside."""

    url: str
    template: str | None = None  # None: a server that already ran
    simulated: bool = False  # reports of these numbers must say so
    image: str | None = None  # as the scenario has it
    image_digest: str | None = None  # repo digest, else image id
    container: dict[str, Any] | None = None  # the container's configuration as inspected, without its environment
    version: str | None = None  # as the server reports it
    model: str | None = None  # the server's id of the model
    arguments: list[str] = []  # the server's command line
    phases: list[Phase] = []
    compiled: list[CompiledFolder] = []  # of a server with `caches`
    startup: Startup | None = None
    effective: dict[str, Any] = {}  # the settings that it reports; secrets masked
    contents: Contents | None = None  # of its image
    model_size: ModelSize | None = None  # from the model's files; None: they are not on this machine
    max_parallel: int | None = None  # requests that it serves at once; others wait before it, not before the engine
    notes: list[Reason] = []  # on its start, for reports
    restarts: int = 0
    oom_killed: bool = False
    exit_code: int | None = None  # set if it died before it was stopped
    death: ServerDeath | None = None  # why it could not be used any more
    gateway: "ServedBy | None" = None  # in front of it, took the load
    metrics_url: str | None = None  # of its metrics, where another address than `url` has them: `url` is a gateway's


class GpuMemory(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    render_node: str
    used_bytes: int
    total_bytes: int


class CellRun(Cell, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cell of the plan that was started."""

    started_wall_s: WallSeconds
    ended_wall_s: WallSeconds | None = None  # None: it had not ended when this was written
    stopped_after_s: Seconds | None = None  # measured time until the harness stopped it as planned; None: it did not
    seed: Whole | None = None  # of its request sequence, if it differs from the scenario's
    served_by: ServedBy
    gpu_memory_before: list[GpuMemory] = []  # right before the start of the server; not for one that already ran
    problems: list[Reason] = []  # noticed during the cell, which make it invalid
    failed: Reason | None = None  # why its server failed: the result of a sweep's setting, or of a capacity's level


class Machine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host of the load (and, by default, of the server). None: not known."""

    name: str
    kernel: str | None = None
    cpu: str | None = None
    cores: int | None = None
    ram_bytes: int | None = None
    gpus: list[dict[str, Any]] = []
    kernel_parameters: dict[str, str] = {}
    docker: str | None = None
    rocm: str | None = None  # of the host; an engine in a container has its own

    def __post_init__(self) -> None:
        force_setattr(self, "gpus", [valid_facts(gpu, GPU_FACTS) for gpu in self.gpus])
        for name, value in valid_facts({"cores": self.cores, "ram_bytes": self.ram_bytes}, MACHINE_FACTS).items():
            force_setattr(self, name, value)


class ConnectionLoss(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A time without a connection to the server's machine."""

    host: str  # as `--telemetry` names it
    after_s: Seconds  # since the start of the run
    lasted_s: Seconds | None = None  # None: it did not come back
    reason: str


class RemoteMachine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server's machine, of which telemetry came over ssh (`--telemetry`)."""

    host: str = ""  # as `--telemetry` names it; empty: not recorded
    machine: Machine
    harness: str  # its version there
    offset_s: float  # by which the wall clock there was ahead of ours at the start; samples are on ours
    error_s: float  # of the offset, and of the samples' times: at most so much, either way
    dropped: list[str] = []  # facts of `machine`, and values of its samples, that cannot be, by their path
    losses: list[ConnectionLoss] = []
    rejected: int = 0  # lines that came after the start and are no valid telemetry
    first_rejected: str = ""  # the first of them, shortened


class RowOrigin(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The definitions of one row's numbers, if rows of a tool's file differ in them."""

    server: str
    load: str
    definitions: dict[str, str] = {}  # by metric
    missing: dict[str, str] = {}  # by metric, such as "ttft" or "ttft_p95": why it is not known


OWN_EXPORT = "amd-llm-load"  # as the tool of an import: `harness export` wrote the file


class Origin(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The measurement of another tool that became this run; see docs/imports.md."""

    tool: str
    version: str | None = None  # None: not in its files
    files: dict[str, str]  # SHA-256 by name
    imported_wall_s: WallSeconds
    importer: str  # version of the harness that read them
    definitions: dict[str, str] = {}  # by metric, if it is not that of this suite
    missing: dict[str, str] = {}  # by metric, such as "ttft" or "ttft_p95": why it is not known
    notes: list[Reason] = []
    rows: list[RowOrigin] = []  # rows that differ from the above

    def of_row(self, server: str, load: str) -> RowOrigin:
        """All definitions of one row."""
        own = RowOrigin(server=server, load=load)
        own = next((row for row in self.rows if (row.server, row.load) == (server, load)), own)
        return replace(own, definitions=self.definitions | own.definitions, missing=self.missing | own.missing)


class Resumption(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a run was resumed, and its cells at that time."""

    wall_s: WallSeconds
    stopped_wall_s: WallSeconds | None = None  # the end of the last cell that was kept; None: no cell was
    kept: Whole  # complete and valid cells
    again: list[str] = []  # cells whose earlier attempt was incomplete or not valid


class KeptSteps(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The steps of a trace that fit into the context that its load names: a replay sends no others."""

    kept: Whole
    total: Whole
    sha256: str  # of the kept steps


class Run(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """run.json."""

    format_version: int = FORMAT_VERSION
    definitions: int = 1  # version of the formulas of docs/method.md when it was measured
    id: str
    kind: RunKind | None = None  # None: of 0.1.0; `read_run` completes it
    status: Status
    reasons: list[Reason] = []  # why it is not valid
    started_wall_s: WallSeconds
    owner: dict[str, str] = {}  # the process that runs it; shows whether a run is in progress or was killed
    ended_wall_s: WallSeconds | None = None
    scenario_name: str  # file name without its ending
    scenario: Scenario  # resolved, with defaults filled in
    workload_sha256: str
    kept_steps: dict[str, KeptSteps] = {}  # by load that replays a trace of agents
    order: list[str] = []  # cell ids as planned
    cells: list[CellRun] = []  # cells that were started, in that order
    machine: Machine
    remote: RemoteMachine | None = None  # of a server elsewhere, with `--telemetry`
    versions: dict[str, str] = {}  # of packages that affect the measurement
    locustfiles: dict[str, str] = {}  # by `user` of a load: digest of the code of its user class
    git_commit: str | None = None
    computed: dict[str, Reason] = {}  # by path in the scenario: how the value of an `auto` was computed
    workers: Workers | None = None  # machines that sent the load; None: this machine
    origin: Origin | None = None  # None: measured by `harness run`
    resumed: list[Resumption] = []  # the oldest first
    budget_s: Seconds | None = None  # of `harness run --budget`; None: there was none

    @property
    def ran(self) -> dict[str, CellRun]:
        """The cells that ended, by id."""
        return {cell.id: cell for cell in self.cells if cell.ended_wall_s is not None}

    @property
    def served(self) -> list[CellRun]:
        """The cells that had a server: of a setting that failed, only the cell in which its server died."""
        return [cell for cell in self.cells if cell.failed is None or cell.served_by.url]

    @property
    def machine_names(self) -> tuple[str, str | None]:
        """The server's machine, and that of the load where it is known to be another one."""
        return self.server_machine.name, None if self.remote is None else self.machine.name

    @property
    def server_machine(self) -> Machine:
        """The machine of the server, as far as it is known: with `--telemetry` another one, else that of the load."""
        return self.machine if self.remote is None else self.remote.machine

    @property
    def simulated(self) -> bool:
        return any(cell.served_by.simulated for cell in self.cells) or any(
            server.template == "simulated" for server in self.scenario.servers.values()
        )


def write_run(folder: Path, run: Run) -> None:
    # It contains texts of servers, engines and images, so secrets are masked.
    replace_file(folder / "run.json", pretty_json(masked(to_builtins(run), "sure")))


def read_run(folder: Path) -> Run:
    try:
        run = read_json(folder / "run.json", Run, FORMAT_VERSION, contradiction=_find_contradiction)
        return run if run.kind is not None else replace(run, kind=_kind_of(run))
    except FileNotFoundError:
        raise HarnessError(
            f"{folder}: not a run directory (it has no run.json)", next_step="`harness list runs` lists the runs."
        ) from None
    except OSError as error:
        raise HarnessError(
            f"{folder / 'run.json'}: cannot be read ({error.strerror})", next_step="`harness list runs` lists the runs."
        ) from None


def _kind_of(run: Run) -> RunKind:
    """The kind of a run that does not say it: the cells of a search have seeds of their own."""
    if run.origin is not None:
        return "import"
    if run.status == "live":
        return "live"
    return "search" if any(cell.seed is not None for cell in run.cells) else "plan"


def _find_contradiction(run: Run) -> tuple[str, str] | None:
    """A contradiction in a run and its path in run.json."""
    scenario = run.scenario
    for name, parts in (("servers", scenario.servers), ("loads", scenario.loads)):
        if not parts:
            return "at least one is needed", f"$.scenario.{name}"
    if too_many := size_problem(len(scenario.servers), len(scenario.loads), scenario.repeats):
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


# Runs that another tool measured: the definitions of their numbers, and unknown numbers.

QUICK = "quick"  # the name of the scenario that `harness quick` makes
OTHERWISE = "†"  # next to a number of a row that means something else than in the first row; a note says what
NUMBERS_FILE = "numbers.json"  # numbers of cells that have no records

# By metric its definition in runs of this suite; docs/method.md. `percentiles`: of all latencies.
DEFINITIONS = {
    **metrics.DEFINITIONS,
    "tokens_per_chunk": "output tokens that chunks carry / chunks with generated tokens",
    "prompt_tokens": "as the server's usage says",
    "output_tokens": "as the server's usage says",
    "percentiles": "the least value that so many per cent do not exceed",
}


class UnlikeError(HarnessError):
    """Runs that are not compared. `about`: the one key in which a comparison may let them differ, if there is one."""

    about: str | None = None

    def __init__(self, reason: Reason, *, next_step: str = "", detail: str = "") -> None:
        super().__init__(sentence(reason), next_step=next_step, detail=detail)
        self.reason = reason


def read_numbers(folder: Path, run: Run) -> dict[str, Numbers]:
    path = folder / NUMBERS_FILE
    if run.origin is None or not path.exists():
        return {}
    return read_json(path, dict[str, Numbers])


def without_unknown_numbers(numbers: Numbers, origin: Origin | None) -> Numbers:
    """`numbers` without the fields that the tool's records do not show."""
    if origin is None:
        return numbers
    unknown: dict[str, Distribution | None] = {
        field: NO_SAMPLE if isinstance(getattr(numbers, field), Distribution) else None
        for field in origin.missing
        if field in numbers.__struct_fields__
    }
    return replace(numbers, **unknown)


def origin_notes(origin: Origin | None) -> list[Reason]:
    """The notes on an imported run: its origin, unknown numbers, other definitions."""
    if origin is None:
        return []
    files = ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in origin.files.items())
    text = f"imported from {origin.tool} {origin.version or 'of unknown version'}: {files}"
    notes = [because("imported", text, tool=origin.tool, version=origin.version, files=origin.files), *origin.notes]
    fields_of: dict[str, list[str]] = defaultdict(list)
    for field, why in origin.missing.items():
        fields_of[why].append(field)
    notes += [_unknown_note(fields, why) for why, fields in fields_of.items()]
    notes += [_definition_note(field, text) for field, text in origin.definitions.items()]
    # Differences between rows; rows with the same text share a note.
    rows_of: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in origin.rows:
        for kind, texts in (("import_defined", row.definitions), ("import_unknown", row.missing)):
            for field, text in texts.items():
                rows_of[kind, field, text].append(f"{row.server} / {row.load}")
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (kind, field, text), rows in rows_of.items():
        if kind == "import_unknown":
            shared[text, tuple(rows)].append(field)
    first: dict[str, str] = {}
    for (kind, field, text), rows in rows_of.items():
        if kind == "import_defined":
            other = first.setdefault(field, text) != text
            notes.append(_definition_note(field, text, rows, other=other))
    return notes + [_unknown_note(fields, why, list(names)) for (why, names), fields in shared.items()]


def _unknown_note(fields: list[str], why: str, rows: list[str] | None = None) -> Reason:
    rows_text = "" if rows is None else f" of {', '.join(rows)}"
    text = f"not known: {', '.join(fields)}{rows_text}: {why}"
    return because("import_unknown", text, why=why, fields=fields, rows=rows)


def _definition_note(field: str, meaning: str, rows: list[str] | None = None, *, other: bool = False) -> Reason:
    rows_text = "" if rows is None else f" of {', '.join(rows)}"
    text = f"{f'{OTHERWISE} ' if other else ''}defined otherwise: {field}{rows_text}: {meaning}"
    return because("import_defined", text, field=field, meaning=meaning, rows=rows, other=other)
