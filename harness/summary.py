"""What a run says in numbers: a Summary derived from its records, cell by cell and row by row."""

import statistics
from collections.abc import Collection, Iterable
from typing import Any, Literal

from msgspec import Struct, to_builtins

# Requests that a percentile needs at 99 % confidence; the rule is stats.samples_needed, and a test holds them equal.
NEEDED = {"p50": 11, "p90": 64, "p95": 130, "p99": 662}

FORMAT_VERSION = 2  # of run.json and summary.json; in version 1 reasons were sentences
# The rules of verdicts, see docs/method.md.
ALPHA = 0.05  # of tests and intervals
POWER = 0.8  # with which a recommended number of repeats, runs or requests decides
MARGIN = 0.02  # differences under this are treated as noise: "faster" and "slower" are larger, "same" is within it
MAX_REPEATS = 100  # beyond which no number of repeats is suggested


class Reason(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why something is so, as data: `harness.reasons` has the sentence of each code."""

    code: str
    values: dict[str, Any] = {}  # what JSON can hold; a reason within a reason is a mapping
    cell: str | None = None  # None: it is not about a cell, or what has it is the cell's


def because(code: str, /, **values: Any) -> Reason:
    """A reason with its values; one that is itself a reason or a verdict becomes a mapping."""
    return Reason(code, {name: to_builtins(one) if isinstance(one, Struct) else one for name, one in values.items()})


def median_of_known(values: Iterable[float | None]) -> float | None:
    """The median of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


class Distribution(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exact statistics of a sample, in its own unit. A percentile that the sample cannot carry is None.

    Many chunk gaps come from one request and are not independent, so what counts there is the number of requests.
    """

    n: int  # values in the sample
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    # The 95 % interval of each percentile, from order statistics. A bound that is None: the sample is too small for it.
    # No entry: not known, as of chunk gaps, of numbers that another tool computed, and in files of older versions.
    intervals: dict[str, tuple[float | None, float | None]] = {}


NO_SAMPLE = Distribution(n=0)


class SloAttainment(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many of the requests sent met every SLO of a set. Failed and unfinished ones did not, nor did abandoned ones
    that had missed one when the user left; the others are unknown and do not count.
    """

    met: int
    left: int = 0  # abandoned before an SLO was missed
    unknown: int = 0  # successful, and a latency is not known that an SLO bounds; then neither is what follows
    attainment: float | None = None  # met / (sent - left)
    goodput_req_s: float | None = None  # requests that met every SLO and ended inside the window / window


class ScheduleKept(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the schedule of an open loop was kept, in requests that have a time of their own; of an own locustfile in
    arrivals. None: not known.
    """

    planned: int | None = None
    sent: int = 0
    never_sent: int | None = None  # all users were busy until the end
    asked_per_s: float | None = None
    achieved_per_s: float | None = None


class Answers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many of the successful answers that were to have a form have it, and are right where that is known."""

    checked: int
    valid: int
    valid_share: float | None = None  # valid / checked
    labelled: int = 0  # of which the right label is known
    right: int | None = None
    right_share: float | None = None  # right / labelled


class PromptLengths(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Planned prompt lengths against the server's count, over the successful requests that have both."""

    requests: int
    asked: int  # tokens in all
    got: int
    added: int  # got - asked of most requests: what the chat template adds, where lengths are exact
    otherwise: int  # requests of which it is another number


class Numbers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of a set of measured requests. Times in seconds; formulas in docs/method.md."""

    sent: int
    succeeded: int
    failed: int  # any error but `unfinished` and `abandoned`
    unfinished: int
    abandoned: int = 0  # the user left: neither a success nor a failure
    errors: dict[str, int] = {}  # by kind
    resent: int = 0  # requests that were sent twice: the server was closing the kept connection
    connect_retried: int = 0  # requests whose connection needed a second SYN, so waited 1 s or more
    retry_after: int = 0  # requests after which the server asked their users to wait (Retry-After of 429 and 503)
    retry_after_s: float | None = None  # for how long in total, at most 60 s each
    prompt_tokens: int | None = None  # of the successful requests; None when one of them was not counted
    output_tokens: int | None = None  # likewise
    cached_tokens: int | None = None  # where the server reports them
    reasoning_tokens: float | None = None  # of the output tokens, see harness.analysis.derive; None: none were
    tool_calls: int | None = None  # that answers held; None: no request had tools
    tool_calls_valid: int | None = None
    wall_s: float | None = None  # fixed amount of work: first sent to last ended; None for a timed load
    window: Literal["wall", "timed"] | None = None  # what the rates refer to: the wall time or the measured time
    window_s: float | None = None
    output_tok_s: float | None = None  # output tokens generated inside the window / window
    input_tok_s: float | None = None  # prompt tokens of the requests that ended inside the window / window
    requests_per_s: float | None = None  # successful requests that ended inside the window / window
    ttft_s: Distribution = NO_SAMPLE
    ttfo_s: Distribution = NO_SAMPLE
    tpot_s: Distribution = NO_SAMPLE
    e2e_s: Distribution = NO_SAMPLE
    chunk_gap_s: Distribution = NO_SAMPLE
    send_lag_s: Distribution = NO_SAMPLE
    connect_s: Distribution = NO_SAMPLE  # of the requests that opened a connection, before they were sent
    ttft_sched_s: Distribution = NO_SAMPLE  # from schedule; open loops only
    e2e_sched_s: Distribution = NO_SAMPLE
    schedule: ScheduleKept | None = None  # of an open loop
    tokens_per_chunk: float | None = None
    vectors: int | None = None  # of embeddings
    answers: Answers | None = None  # where answers were to have a form
    prompts: PromptLengths | None = None  # where their length was planned
    slos: dict[str, SloAttainment] = {}  # by the SLOs that a check asks about, such as "ttft<=1s, tpot<=50ms"

    @property
    def error_rate(self) -> float | None:
        """Failed / sent. What the end of the run cut is no failure of the server, but no success either."""
        return self.failed / self.sent if self.sent else None


class ServerLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the server's own metrics said during a cell. None: it has no such metric, or it was not read in time."""

    running_max: float | None = None
    running_mean: float | None = None
    waiting_max: float | None = None
    kv_usage_max: float | None = None  # 0 to 1
    preemptions: float | None = None
    generated_tokens: float | None = None  # by the server's counter, warm-up included
    restarted: bool = False  # a counter went backwards or the process has another start time
    prefix_hit_ratio: float | None = None
    # In the measured time: seconds of all requests that ended in it together, and how many these are.
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    timed_requests: float | None = None


LimitedBy = Literal["client", "kv_cache", "queue", "api", "prefill", "decode"]


class TimeSplit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the time of a request went, in seconds on average. None: the server does not say."""

    connect_s: float | None = None  # by the client; before `e2e_s`
    api_s: float | None = None  # e2e_s - queue_s - prefill_s - decode_s: the API process, the network, the client
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    e2e_s: float  # by the client


class GpuLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one GPU was seen to do in the measured window. None: it does not say."""

    used: bool  # whether it worked for the server; totals are over those that did
    busy_mean_percent: float | None = None
    busy_max_percent: float | None = None
    memory_busy_mean_percent: float | None = None
    vram_max_bytes: int | None = None
    gtt_max_bytes: int | None = None
    power_mean_w: float | None = None
    power_max_w: float | None = None
    package: bool = False  # power is that of an APU's package, its CPU included
    energy_j: float | None = None  # integral of the power over the window
    counted_energy_j: float | None = None  # the same by the GPU's own counter
    temperatures_max_c: dict[str, float] = {}
    clock_mean_mhz: float | None = None
    clock_min_mhz: float | None = None
    heat_s: float | None = None  # for how long heat or a signal from outside held it back
    limited_s: float | None = None  # for how long a limit of power or current did, which is normal at full load


class MachineLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the server's machine was seen to do in the measured window. Of GPUs, those that worked for the server."""

    samples: int
    gap_max_s: float  # the longest time without one
    took_max_s: float | None = None  # the longest that one took
    gpus: dict[str, GpuLoad] = {}  # all of them, by render node
    busy_mean_percent: float | None = None  # over GPUs and time
    busy_max_percent: float | None = None  # of any GPU
    memory_max_bytes: int | None = None  # VRAM and GTT of all together
    power_mean_w: float | None = None  # of all together
    power_max_w: float | None = None  # likewise, at one moment
    package: bool = False
    energy_j: float | None = None
    energy_per_token_j: float | None = None  # energy / output tokens generated inside the window
    counted_energy_j: float | None = None
    temperature_max_c: float | None = None  # of any sensor
    heat_s: float | None = None  # of the GPU that was held back longest
    limited_s: float | None = None  # likewise
    host_cpu_mean: float | None = None  # 0 to 1 of all cores
    host_memory_min_bytes: int | None = None  # available
    container_cpu_mean_cores: float | None = None
    container_memory_max_bytes: int | None = None
    listen_overflows: int | None = None  # connections that a full listen queue in the server's container turned away


class ClientLimit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the load generator was the limit of a cell: what was measured, what is allowed, what it spoils."""

    what: Literal["cpu", "send_lag", "shared_reads", "read_clock", "loop_lag"]
    value: float
    allowed: float  # at most
    unit: Literal["s", "ratio"]
    numbers: list[str]  # fields of Numbers
    invalid: bool = False  # whether the run is INVALID for it; else all other numbers are valid


class WarmupResult(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The warm-up of a cell."""

    requests: int
    seconds: float | None = None  # from its first request to when the measurement began
    steady: bool | None = None  # whether it found the server steady; None: it was not to find that out


class BadFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A field of the server's answers whose value was not possible in some requests of a cell, warm-up included."""

    field: str  # such as "usage.completion_tokens"
    code: Literal["type", "below", "above"]  # "type" of JSON; less or more than `limit`, for which the cell is INVALID
    requests: int
    got: str  # of the first of them: the JSON type, else the number
    limit: int | None = None  # likewise


class CellSummary(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cell: one server under one load, once."""

    id: str
    server: str
    load: str
    repeat: int
    mix: str | None = None  # see harness.scenario.plan.Cell, as of the following
    stage: str | None = None
    group: str = ""
    again: str | None = None
    session: int | None = (
        None  # from 0, where the run was resumed or paused for an hour between cells; None: it was not
    )
    numbers: Numbers
    server_load: ServerLoad
    machine_load: MachineLoad | None = None  # None: nothing was sampled
    ready_s: float | None = None  # the server's start until its first answer
    warmup: WarmupResult | None = None  # None: there was none
    bad_fields: list[BadFields] = []
    failed: Reason | None = None  # of a sweep: why the setting failed, which is its result; then it has no other
    problems: list[Reason] = []  # why it is not valid
    notes: list[Reason] = []  # what a reader should know and does not make it invalid
    limits: list[ClientLimit] = []  # each of them is a problem or a note as well
    time: TimeSplit | None = None  # None: the server does not say, as of `limited_by`
    limited_by: LimitedBy | None = None


class Row(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server under one load, all repeats. The run-level values are the sample of a verdict."""

    server: str
    load: str
    cells: list[str]  # ids of the cells in it
    wall_s: list[float]  # one per valid cell
    output_tok_s: list[float]
    input_tok_s: list[float] = []
    pooled: Numbers  # over the requests of all its cells; wall_s and rates are medians over the cells
    formulas: int = 1  # version of the formulas of `pooled`
    definitions: dict[str, str] = {}  # of an imported run: by field of Numbers, where it is not ours
    missing: dict[str, str] = {}  # of an imported run: by field of Numbers, why it is not known
    machine_load: MachineLoad | None = None  # each value the median over its cells; without single GPUs
    kind: str = ""  # what decides when a request is sent: closed loop, bursts, open loop, trace
    client_limited: list[str] = []  # fields of Numbers that the load generator limited in one of the cells
    invalid: Reason | None = None  # the first reason why one of its cells is not valid; then it has no verdict
    failed: Reason | None = None  # of a sweep: why its setting failed; it is not compared
    time: TimeSplit | None = None  # means over the cells of which it is known
    limited_by: LimitedBy | None = None  # that of more than half of its cells

    @property
    def key(self) -> tuple[str, str]:
        return self.server, self.load

    @property
    def name(self) -> str:
        """For people, and in verdicts."""
        return f"{self.server} / {self.load}"


class FailedRequests(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured requests of a row that failed for the same cause, explained where the table of failures knows it."""

    server: str
    load: str
    kind: str  # of the error
    count: int
    message: str  # what the first of them said
    id: str | None = None  # of the row of the table
    cause: str | None = None
    fix: str | None = None


Inconclusive = Literal[
    "refused",  # the two sides have no ratio, such as numbers of other definitions
    "no_values",
    "too_few",  # for an interval, or for p < 0.05
    "apart",  # the repeats of the two sides are of different sessions, so a drift of the machine is in the ratio
    "run_variation_unknown",  # runs are compared, and how far equal ones differ on this machine is not known
    "in_margin",  # the difference is smaller than what counts, but its interval is not
    "includes_one",
    "p_too_large",
]


OPEN = ("too_few", "in_margin", "includes_one", "p_too_large")  # what more repeats may decide


class Reference(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """baseline.json: the run that checks call the baseline, as far as they need it."""

    run: str
    rows: list[Row] = []
    refused: Reason | None = None  # why the two runs are not compared


class CheckResult(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of a check. Numbers are those of the worst row, in the unit of the check's bound."""

    check: str
    status: Literal["passed", "failed", "inconclusive"] = "inconclusive"
    code: (
        Literal[
            "met",  # passed
            "broken",  # failed
            "no_row",  # failed: it applies to no row of the run
            "unreadable",  # failed
            "too_close",  # inconclusive: the interval contains the bound
            "too_few_requests",  # inconclusive
            "no_value",  # inconclusive: the row has no such number
            "no_baseline",  # inconclusive: there is no baseline with such a number, or it is not comparable
        ]
        | None
    ) = None  # None: of an older version
    evidence: list[Reason] = []  # what was found, of each row that decides
    row: str | None = None
    value: float | None = None
    low: float | None = None  # the 95 % interval of the value; None: unbounded on that side
    high: float | None = None
    bound: float | None = None
    more_requests: int | None = None  # that would decide it; None: unknown, too many, or requests do not help


class Summary(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """summary.json."""

    format_version: int = FORMAT_VERSION
    run: str
    scenario: str
    question: str
    simulated: bool
    valid: bool | None  # None: an import, whose file cannot show the conditions that are otherwise checked
    reasons: list[Reason]  # why it is not valid
    notes: list[Reason] = []
    failures: list[FailedRequests] = []  # the most frequent causes of each row
    rows: list[Row]
    cells: list[CellSummary]
    comparison: "Comparison | None" = None  # each row against the scenario's baseline
    checks: list[CheckResult] = []


class Verdict(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One side against the baseline side, for one metric."""

    side: str  # "SERVER / LOAD", or the run's name
    baseline: str
    metric: str  # of work "wall_s", "output_tok_s" or "input_tok_s", else a latency, such as "ttft_p50"
    ratio: float | None  # of speed: above 1 the side is faster than the baseline
    low: float | None  # 95 % interval of the ratio
    high: float | None
    p: float | None  # two-sided, corrected for the number of comparisons
    n: tuple[int, int]  # values of side and baseline: repeats of one run, else runs
    word: str  # "faster", "slower", "same", "inconclusive"
    reason: Inconclusive | None = None
    refused: Reason | None = None  # why the two sides have no ratio
    unit: Literal["repeats", "runs"] = "repeats"  # what the values are of
    comparisons: int = 1  # that p is corrected for
    needed: int | None = None  # values a side that would settle an inconclusive verdict; None: not known, or too many
    needed_for_same: int | None = None  # of a difference beyond the margin: to show that there is no difference


class Difference(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key in which the manifests of the sides differ."""

    key: str
    values: list[str]  # one for each side


class Comparison(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of verdicts."""

    metric: str | None  # that of all verdicts; None: they have several, each its own
    comparisons: int  # how many were made, and corrected for
    noise_floor: float  # relative difference under which a difference is treated as noise
    noise_source: list[Reason]  # of a comparison of runs: how the variation between them is known
    verdicts: list[Verdict]
    simulated: bool = False  # of a comparison of runs: an engine's model was measured, not hardware
    sides: list[str] = []  # of a comparison of runs: the sides, baseline first, ...
    differences: list[Difference] = []  # ... and in what their manifests differ
    checks: list[CheckResult] = []  # of a comparison of runs: what was asked of the sides
    notes: list[Reason] = []  # what to know of the sides before the verdicts


def upgrade_summary(raw: dict[str, Any]) -> None:
    """Make a summary.json of version 1 one of this version, in place."""
    raw.pop("beside", None)  # its verdicts are in `comparison`
    cells = {cell.get("id") for cell in raw.get("cells", [])}
    upgrade_reasons(raw, "reasons", "notes", cells=cells)
    for cell in raw.get("cells", []):
        upgrade_reasons(cell, "problems", "notes", cells=cells)
        for limit in cell.get("limits", []):
            limit.pop("text", None)
    for row in raw.get("rows", []):
        upgrade_reasons(row, "invalid", cells=cells)
    for check in raw.get("checks", []):
        upgrade_reasons(check, "evidence")
        check["evidence"] = [check["evidence"]] if isinstance(check.get("evidence"), dict) else []
        if "passed" in check:
            check["status"] = "passed" if check.pop("passed") else "failed"
    comparison = raw.get("comparison")
    if comparison:
        comparison["noise_source"] = []  # within a run nothing is known of other runs
        for verdict in comparison.get("verdicts", []):
            text = verdict.pop("sentence", "")
            if verdict.get("word") == "inconclusive" and verdict.get("reason") in (None, "refused"):
                said = text.removeprefix(f"{verdict['side']}: ").removeprefix("inconclusive: ").removesuffix(".")
                verdict["refused"] = {"code": "text", "values": {"text": said}}
            verdict["comparisons"] = comparison.get("comparisons", 1)


def upgrade_reference(raw: dict[str, Any]) -> None:
    """Make a baseline.json of an earlier version one of this version, in place; a newer one is left as it is."""
    upgrade_reasons(raw, "refused")
    for row in raw.get("rows", []):
        upgrade_reasons(row, "invalid")


def upgrade_reasons(raw: dict[str, Any], *keys: str, cells: Collection[Any] = ()) -> None:
    """Make reasons of sentences, in place. One that begins with one of `cells` is about that cell."""

    def upgraded(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        cell, colon, rest = text.partition(": ")
        own = bool(colon) and cell in cells
        found = {"code": "text", "values": {"text": rest if own else text}}
        return found | {"cell": cell} if own else found

    for key in keys:
        if isinstance(raw.get(key), list):
            raw[key] = [upgraded(text) for text in raw[key]]
        elif key in raw:
            raw[key] = upgraded(raw[key])
