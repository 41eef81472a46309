"""The numbers of a run: a Summary derived from its records, cell by cell and row by row."""

import statistics
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from msgspec import Struct, to_builtins


class Percentile(NamedTuple):
    """A percentile of a latency."""

    permille: int
    needed: int  # requests, for 99 % confidence; the rule is stats.samples_needed, and a test compares them

    @property
    def percent(self) -> int:
        return self.permille // 10

    @property
    def share(self) -> float:
        return self.permille / 1000


# The percentiles of a latency, the lowest first. Each list of statistics follows from this one.
PERCENTILES = {
    "p50": Percentile(500, 11), "p90": Percentile(900, 64), "p95": Percentile(950, 130), "p99": Percentile(990, 662),
}  # fmt: skip
NEEDED = {name: percentile.needed for name, percentile in PERCENTILES.items()}
TAIL_PERCENTILES = tuple(name for name in reversed(PERCENTILES) if name != "p50")  # the highest first

FORMAT_VERSION = 1  # of run.json, summary.json and baseline.json
DEFINITIONS = 2  # version of the formulas of docs/method.md
REDEFINED = {1: ("tpot",)}  # latencies that version 2 defines otherwise, and so on
# The rules of verdicts, see docs/method.md.
ALPHA = 0.05  # of tests and intervals
POWER = 0.8  # with which a recommended number of repeats, runs or requests decides
ANSWER_MARGIN = 0.03  # of right answers: a server that has at most so many less gives the same answers
MARGIN = 0.02  # smaller differences are treated as noise: "faster" and "slower" are larger, "same" is within it
MAX_FACTOR = 4.0  # by which a bound of an interval may be away from its ratio: a bound that is farther says nothing
TOLERANCE = 0.10  # of a gate: how much longer the work may take; `--tolerance` replaces it
LARGE = 0.25  # a difference that a provisional verdict, and an error of the load generator that a result, cannot carry
ENOUGH = 20  # requests of a row, from which on its times show a cause
MAX_REPEATS = 100  # beyond which no number of repeats is suggested


class Reason(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reason, note or evidence: code and values for programs, the text for people."""

    code: str
    text: str
    values: dict[str, Any] = {}  # of JSON types; a reason within a reason is a mapping
    cell: str | None = None  # that it is about, unless it is stored with that cell


def because(code: str, text: str, /, **values: Any) -> Reason:
    """Make a reason. A value that is itself a reason or a verdict becomes a mapping."""
    plain = {key: to_builtins(value) if isinstance(value, Struct) else value for key, value in values.items()}
    return Reason(code, text, plain)


def sentence(reason: Reason) -> str:
    """A reason as a sentence. The cell that it is about comes first."""
    return reason.text if reason.cell is None else f"{reason.cell}: {reason.text}"


def sentences(reasons: Iterable[Reason]) -> list[str]:
    return [sentence(reason) for reason in reasons]


def evidence(reasons: Iterable[Reason]) -> str:
    """The evidence of a check on one line."""
    return "; ".join(sentences(reasons))


def median_of_known(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None if all are unknown."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


class LogSpread(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The logarithms of latencies, or of latencies relative to a bound, and their ends: "far below the bound"."""

    n: int  # requests with a value
    mean: float  # of the logarithms
    sd: float
    min: float | None  # no request has less; None: not known
    max: float | None  # no request has more, or was older when it was cut; None: a request failed
    open: int = 0  # requests that were cut, or whose latency is not known


class Distribution(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exact statistics of a sample, in its own unit. A percentile that the sample cannot carry is None.

    The chunk gaps of one request are not independent, so the number of requests decides which of their percentiles the
    sample carries.
    """

    n: int  # values in the sample
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    # The 90 % interval of each percentile: bounds below it fail; with 60 requests, bounds above it pass. None: no bound
    # on that side. Failed requests are above every bound. Also that of the mean where requests are censored or unknown,
    # and the ages of the youngest and the oldest cut request (`cut`). Without an entry: chunk gaps, and numbers that
    # another tool computed.
    intervals: dict[str, tuple[float | None, float | None]] = {}
    censored: int = 0  # requests that were cut before this latency ended; percentiles count them (Kaplan-Meier)
    unknown: int = 0  # other requests without it, such as the TTFT of an answer that was not streamed
    at_most: int = 0  # other requests of which an upper bound is known, as for the TPOT of an answer in one piece
    above: float | None = None  # age of the oldest cut request, if no value is larger: the maximum, and percentiles
    # that are None although the sample carries them, are above it
    effect: float | None = None  # so many dependent requests count as one in the intervals (design effect)
    blocks: int | None = None  # of requests, whose means it is also estimated from if there are 8 or more
    spread: LogSpread | None = None  # None: no value, numbers of another tool, or a summary of an earlier version

    @property
    def known(self) -> int:
        """Requests that a percentile is of."""
        return self.n + self.censored


NO_SAMPLE = Distribution(n=0)


class SloAttainment(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The number of sent requests that met every SLO of a set.

    Failed requests did not, nor did unfinished and abandoned ones whose age reached a bound.
    """

    met: int
    unknown: int = 0  # cut before an SLO was met or missed, or without a latency that an SLO bounds
    attainment: float | None = None  # met / (sent - unknown)
    goodput: float | None = None  # requests that met every SLO and ended inside the window / window
    effect: float | None = None  # so many dependent requests count as one; None: a summary of an earlier version
    spread: LogSpread | None = None  # of the latencies relative to their bounds, of several bounds the worst


class ScheduleKept(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the schedule of an open loop was kept, in requests; for an own locustfile in arrivals. None: not known."""

    planned: int | None = None  # with a time in the schedule
    sent: int = 0
    never_sent: int | None = None  # because all users were busy until the end
    asked_per_s: float | None = None
    achieved_per_s: float | None = None


class Answers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The successful answers that were asked for in a form: how many have it, and how many are right."""

    checked: int
    valid: int
    valid_share: float | None = None  # valid / checked
    labelled: int = 0  # answers whose right label is known
    right: int | None = None
    right_share: float | None = None  # right / labelled
    # Where the right answers are known, of the questions that were asked again: in so large a share of the pairs of
    # answers to one question the two differ. None: none was asked again.
    changed_share: float | None = None
    cut_share: float | None = None  # of the answers to such questions, by max_tokens: neither right nor wrong
    doubt: Reason | None = None  # why the answers to such questions say nothing about the model


class SameAnswers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The answers of a row, or of a side, to the same questions as those of the baseline. Shares are of 0 to 1."""

    side: str
    baseline: str
    load: str
    questions: int  # that both answered
    differ: float  # share of the pairs of answers, one of each side, that differ
    noise: tuple[float | None, float | None]  # such a share within the side and within the baseline; None: asked once
    flips: float | None = None  # differ - the mean of the noise: what the other server changes; None: noise not known
    flips_low: float | None = None  # its 95 % interval, as of the following
    flips_high: float | None = None
    right: tuple[float, float]  # share of right answers of side and baseline
    lost: float  # questions that only the baseline answers right; one of two answers counts half, as of the following
    gained: float  # questions that only the side answers right
    difference: float  # right answers of the side - those of the baseline
    low: float
    high: float
    cut: float = 0.0  # share of the answers of the side with more of them that max_tokens cut; above 5 %: inconclusive
    word: Literal["same", "worse", "inconclusive"]  # same: at most ANSWER_MARGIN less right answers
    reason: Reason | None = None  # of "inconclusive": why
    needed: int | None = None  # about so many questions would decide it


class PromptLengths(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Planned prompt lengths and the server's count, over the successful requests that have both."""

    requests: int
    asked: int  # planned tokens in total
    got: int  # the server's count in total
    added: int  # got - asked of most requests: the tokens of the chat template, if lengths are exact
    otherwise: int  # requests with another difference


class Bundle(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How answers came that something between the model and this client bundled; medians over the answers."""

    pieces: float  # groups of chunks that came together
    first_tokens: float | None  # of the first piece; None: not known
    tokens: float  # of the answer
    answers: int
    via: str | None = None  # the headers `server` and `via` of most of them


class Numbers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The numbers of a set of measured requests. Times in seconds; formulas in docs/method.md."""

    sent: int
    succeeded: int
    failed: int  # any error but `unfinished` and `abandoned`
    unfinished: int
    abandoned: int = 0  # the user left: neither a success nor a failure
    errors: dict[str, int] = {}  # by kind
    resent: int = 0  # requests that were sent twice, because the server closed the kept connection
    connect_retried: int = 0  # requests whose connection needed a second SYN, so waited 1 s or more
    retry_after: int = 0  # requests after which the server asked for a wait (Retry-After of 429 and 503)
    retry_after_s: float | None = None  # the total of these waits, at most 60 s each
    prompt_tokens: int | None = None  # of the successful requests; None if one of them was not counted
    output_tokens: int | None = None  # likewise
    cached_tokens: int | None = None  # as the server reports them
    reasoning_tokens: float | None = None  # of the output tokens, see harness.numbers.formulas; None: there were none
    tool_calls: int | None = None  # in the answers; None: no request had tools
    tool_calls_valid: int | None = None
    wall: float | None = None  # seconds; fixed amount of work: first sent to last ended; None for a timed load
    window: Literal["wall", "timed"] | None = None  # of the rates: the wall time or the measured time
    window_s: float | None = None
    output_tok_s: float | None = None  # output tokens generated inside the window / window
    input_tok_s: float | None = None  # prompt tokens of the requests that ended inside the window / window
    requests_per_s: float | None = None  # successful requests that ended inside the window / window
    ttft: Distribution = NO_SAMPLE
    ttfo: Distribution = NO_SAMPLE
    tpot: Distribution = NO_SAMPLE
    e2e: Distribution = NO_SAMPLE
    gap: Distribution = NO_SAMPLE
    send_lag: Distribution = NO_SAMPLE
    connect: Distribution = NO_SAMPLE  # of the requests that opened a connection, before they were sent
    ttft_sched: Distribution = NO_SAMPLE  # from schedule; open loops only
    e2e_sched: Distribution = NO_SAMPLE
    schedule: ScheduleKept | None = None  # of an open loop
    tokens_per_chunk: float | None = None
    answer_tok_s: float | None = None  # output tokens of an answer / its E2E latency, the median
    bundle: Bundle | None = None  # if most answers came in bundles, see harness.numbers.formulas
    vectors: int | None = None  # of embeddings
    answers: Answers | None = None  # if a form was asked for
    prompts: PromptLengths | None = None  # if their length was planned
    slos: dict[str, SloAttainment] = {}  # by the SLOs of a check, such as "ttft<=1s, tpot<=50ms"

    @property
    def error_rate(self) -> float | None:
        """Failed / sent. A request that the end of the run cut is sent, but not failed."""
        return self.failed / self.sent if self.sent else None

    @property
    def valid_share(self) -> float | None:
        return None if self.answers is None else self.answers.valid_share

    @property
    def right_share(self) -> float | None:
        return None if self.answers is None else self.answers.right_share


class ServerLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server's own metrics during a cell. None: it has no such metric, or it was not read in time."""

    running_max: float | None = None
    running_mean: float | None = None
    waiting_max: float | None = None
    kv_usage_max: float | None = None  # 0 to 1
    preemptions: float | None = None
    generated_tokens: float | None = None  # by the server's counter, warm-up included
    restarted: bool = False  # a counter decreased, or the process has another start time
    prefix_hit_ratio: float | None = None
    drafts: float | None = None  # steps of a request for which speculation proposed tokens; warm-up included
    drafted_tokens: float | None = None
    accepted_tokens: float | None = None
    # Total seconds of all requests that ended in the measured time, and the number of these requests.
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    timed_requests: float | None = None


LimitedBy = Literal["client", "kv_cache", "queue", "api", "prefill", "decode"]


class TimeSplit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the time of a request went, in seconds on average. None: the server does not report it."""

    connect_s: float | None = None  # by the client; before `e2e_s` starts
    api_s: float | None = None  # e2e_s - queue_s - prefill_s - decode_s: the API process, the network, the client
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    e2e_s: float  # by the client


class GpuLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The samples of one GPU in the measured window. None: it does not report the value."""

    used: bool  # whether it worked for the server; totals are over these GPUs
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
    heat_s: float | None = None  # for how long heat or an external signal throttled it
    limited_s: float | None = None  # for how long a limit of power or current did, which is normal at full load


class MachineLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The samples of the server's machine in the measured window. Totals are over the GPUs that the server used."""

    samples: int
    gap_max_s: float  # the longest time without a sample
    took_max_s: float | None = None  # the longest time to read a sample
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
    heat_s: float | None = None  # of the GPU that was throttled longest
    limited_s: float | None = None  # likewise
    host_cpu_mean: float | None = None  # 0 to 1 of all cores
    host_memory_min_bytes: int | None = None  # available
    container_cpu_mean_cores: float | None = None
    container_memory_max_bytes: int | None = None
    listen_overflows: int | None = None  # connections refused by a full listen queue in the server's container


class ClientLimit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A limit of the load generator that a cell exceeded."""

    what: Literal["cpu", "send_lag", "shared_reads", "read_clock", "loop_lag"]
    value: float
    allowed: float  # maximum
    unit: Literal["s", "ratio"]
    numbers: list[str]  # fields of Numbers that it affects; `client_error` of the cell has by how much at most
    invalid: bool = False  # whether that makes the run INVALID


class WarmupResult(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The warm-up of a cell."""

    requests: int
    seconds: float | None = None  # from its first request to the start of the measurement
    steady: bool | None = None  # whether it found the server steady; None: it did not check that


class BadFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A field of the server's answers that had an impossible value in a cell, warm-up included."""

    field: str  # such as "usage.completion_tokens"
    # another JSON type; 0 where something was counted; less or more than `limit`: then the cell is INVALID; text in a
    # field that is no known channel
    code: Literal["type", "zero", "below", "above", "unknown"]
    requests: int  # that had such a value
    got: str  # in the first of them: the JSON type, else the number
    limit: int | None = None  # in the first of them


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
    session: int | None = None  # from 0, if the run was resumed or paused for an hour between cells; else None
    numbers: Numbers
    server_load: ServerLoad
    machine_load: MachineLoad | None = None  # None: nothing was sampled
    ready_s: float | None = None  # the server's start until its first answer
    warmup: WarmupResult | None = None  # None: there was none
    bad_fields: list[BadFields] = []
    failed: Reason | None = None  # in a sweep: why the setting failed, which is its only result
    problems: list[Reason] = []  # why it is not valid
    notes: list[Reason] = []  # that do not make it invalid
    limits: list[ClientLimit] = []  # each of them is a problem or a note as well
    time: TimeSplit | None = None  # None: the server does not report it; also `limited_by`
    limited_by: LimitedBy | None = None
    # Of wall time and rates within this cell: the standard error of the logarithm, and the number of its blocks.
    rate_error: float | None = None
    rate_blocks: int | None = None
    # By metric of verdicts, if the load generator was late: by which shares the true value is lower and higher at most.
    client_error: dict[str, tuple[float, float]] = {}


class Trend(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A straight line through blocks of a soak, with the 95 % interval of its slope."""

    name: str  # "tok/s", or a kind of memory
    level: float  # mean: tokens a second, bytes, or a share of the KV cache
    per_hour: float  # of the speed a share, else in the unit of the level
    low: float
    high: float
    grows: bool  # memory: the interval is above 0, and the growth is more than 1 % of the level (5 % of the KV cache)
    values: list[float] = []  # of the speed: tokens a second in each block


class KernelEvent(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of the kernel log that the table of failures knows."""

    at_s: float  # since the start of the measured time
    id: str  # of the entry in the table
    cause: str
    text: str
    serious: bool  # not a warning only
    in_flight: int  # requests at that moment ...
    failed: int  # ... and those of them that failed


class Soak(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What hours of load showed in a cell."""

    cell: str
    row: str
    measured_s: float
    speed: Trend | None = None  # up to the first failure, as the memory
    memory: list[Trend] = []
    failed: int  # requests
    refused: int = 0  # requests that did not fit into the server's context, which are no failures here
    first_failure_s: float | None = None  # of a request, or the first serious event of the kernel
    cause: str = ""
    events: list[KernelEvent] = []
    cpu_busy: float | None = None  # mean share of the CPU of the machine, by all programs
    kernel_log: bool | None = None  # whether it could be read; None: the machine was not sampled
    word: Literal["stable", "drifts", "failed", "unknown"]


class TurnNumbers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One turn of an agent's tasks: means over the successful requests. None: the server does not report it."""

    turn: int
    requests: int
    prompt_tokens: float | None = None
    cached_tokens: float | None = None  # that the server had in its cache
    new_tokens: float | None = None  # that the context grew by since the turn before
    recomputed_tokens: float | None = None  # prompt - cached - new: they were in the context before
    ttft_p50: float | None = None  # seconds


class Row(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server under one load, all repeats. The run-level values are the sample of a verdict."""

    server: str
    load: str
    cells: list[str]  # ids of the cells in it
    wall: list[float]  # one per valid cell
    output_tok_s: list[float]
    input_tok_s: list[float] = []
    pooled: Numbers  # over the requests of all its cells; wall time and rates are medians over the cells
    definitions: dict[str, str] = {}  # in an imported run: by metric, if it is defined otherwise
    missing: dict[str, str] = {}  # by metric (ttft, ttft_p95), why it is not known
    machine_load: MachineLoad | None = None  # each value the median over its cells; without single GPUs
    kind: str = ""  # closed loop, bursts, open loop or trace
    client_limited: list[str] = []  # fields of Numbers that the load generator limited in one of the cells
    client_error: dict[str, tuple[float, float]] = {}  # the largest of its cells
    invalid: Reason | None = None  # the first reason why one of its cells is not valid; then it has no verdict
    failed: Reason | None = None  # in a sweep: why its setting failed; then it is not compared
    time: TimeSplit | None = None  # means over the cells with a known time
    limited_by: LimitedBy | None = None  # the limit of more than half of its cells
    turns: list[TurnNumbers] = []  # of agents
    # Uncached prompt tokens / TTFT, both means, of the requests that had no other in flight until their first token;
    # None: most had, the tokens are not known, or it is more than the hardware allows.
    prefill_tok_s: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.server, self.load

    @property
    def name(self) -> str:
        """For people, and in verdicts."""
        return f"{self.server} / {self.load}"


class FailedRequests(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured requests of a row that failed for the same cause, explained if the table of failures has it."""

    server: str
    load: str
    kind: str  # of the error
    count: int
    message: str  # of the first of them
    id: str | None = None  # of the entry in the table
    cause: str | None = None
    fix: str | None = None


Inconclusive = Literal[
    "refused",  # the two sides have no ratio; `refused` says why
    "in_margin",  # the difference is within the margin, but its interval is not
    "includes_one",  # the interval includes 1
    "not_beyond",  # the interval excludes 1, but not the margin
    "corrected",  # the interval is beyond the margin, but does not count among so many comparisons
    "client",  # the interval decides without what the load generator's delays add to it
    "interval_unknown",  # the interval includes 1 and is wider than MAX_FACTOR either way: the values say nothing
]  # fmt: skip


OPEN = ("in_margin", "includes_one", "not_beyond", "corrected")  # more repeats may decide these


class Reference(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """baseline.json: the parts of the baseline run that checks need."""

    definitions: int = 1  # version of the formulas of its numbers
    run: str
    rows: list[Row] = []
    ratios: list["Verdict"] = []  # of the run and the baseline, by each metric that a check compares
    refused: Reason | None = None  # why the two runs are not compared


class CheckResult(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of a check. Its numbers are those of the worst row, in the unit of the check's bound."""

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
            "provisional",  # inconclusive: a provisional verdict breaks it; failed with --provisional
            "unknown_requests",  # inconclusive: the others decide, but so many requests were cut or lack the latency
            "no_value",  # inconclusive: the row has no such number
            "no_baseline",  # inconclusive: there is no baseline with such a number, or it is not comparable
        ]
        | None
    ) = None
    evidence: list[Reason] = []  # of each row that decides
    row: str | None = None
    value: float | None = None
    low: float | None = None  # the interval of the value, see docs/method.md; None: unbounded on that side
    high: float | None = None
    bound: float | None = None
    more_requests: int | None = None  # that would decide it; None: unknown, too many, or they do not help


class Action(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A change that a finding advises."""

    do: str
    settings: dict[str, str] = {}  # by place, such as "servers.vllm.variables" of the scenario: the text to paste
    changes: dict[str, Any] = {}  # the same for programs: setting, by its name in the engine's file, and value
    # What to expect: which `metric` becomes how many times (`factor`) its value. None: no number of this run shows it.
    gain: Reason | None = None
    risk: str = ""
    verify: str  # the command that shows whether it helped


class RunFinding(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that makes a run slower than it could be, and what to change."""

    code: str
    rows: list[str]  # names of the rows that have it; the first one has the numbers
    measured: str  # with the numbers of this run, which `values` has for programs
    means: str
    why: str
    actions: list[Action]  # the best first
    # the share of the row's time that would be gone without the cause, 0 to 1; null: no number of this run shows it
    cost: float | None
    same_cost_as: str = ""  # code of an earlier finding whose cost is the same time: either may be the cause
    values: dict[str, Any] = {}


class Summary(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """summary.json."""

    format_version: int = FORMAT_VERSION
    definitions: int = 1  # version of the formulas of its numbers
    run: str
    scenario: str
    question: str
    simulated: bool
    valid: bool | None  # None: an import, whose file does not show the conditions of validity
    reasons: list[Reason]  # why it is not valid
    notes: list[Reason] = []
    failures: list[FailedRequests] = []  # the most frequent causes of each row
    rows: list[Row]
    cells: list[CellSummary]
    comparison: "Comparison | None" = None  # each row against the scenario's baseline
    soaks: list[Soak] = []  # of loads of hours
    same_answers: list[SameAnswers] = []  # of loads whose right answers are known: each server against the baseline's
    checks: list[CheckResult] = []
    # Of a sweep over context depth, prompt length or users, and of loads with several models: what the run found out.
    answers: list[Reason] = []
    # How near each server came to what its GPUs allow, with the fewest users; none if model or GPU is not known.
    hardware_shares: list[Reason] = []
    what_if: list[Reason] = []  # `report --check` of a search: the capacity for other SLOs; not stored
    findings: list[RunFinding] | None = None  # the worst first; [] none was found; None: not searched


def known_bounds(ratio: float, low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """The bounds of an interval of a ratio that say something: those within MAX_FACTOR of it, and those between it and
    1, which show the smallest difference. None for another bound.
    """
    return (
        low if low is not None and (low > 1 or low * MAX_FACTOR >= ratio) else None,
        high if high is not None and (high < 1 or high <= ratio * MAX_FACTOR) else None,
    )


Basis = Literal[
    "repeats",  # Welch's interval over the repeats of one run
    "one_run",  # one repeat: blocks of its requests
    "apart",  # repeats that are not interleaved; compared like runs
    "runs",  # runs; the variation between equal ones is assumed until it is known
]


Gate = Literal[
    "no_slowdown",  # the interval excludes a slowdown of the tolerance; exit code 0, of all others 5 but for "slower"
    "slower",  # the whole interval is a slowdown of the tolerance or more; exit code 4
    "provisional",  # likewise, of a provisional verdict; exit code 4 with --provisional
    "size_unknown",  # it is slower, and whether by the tolerance is not known
    "cannot_tell",  # the interval contains 1 and the tolerance, or there is none
]  # fmt: skip


class Verdict(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One side against the baseline side, for one metric."""

    side: str  # "SERVER / LOAD", or the run's name
    baseline: str
    metric: str  # such as "wall", "output_tok_s" or "ttft_p50"
    values: tuple[list[float], list[float]] = ([], [])  # of side and baseline, as `n` counts them, in the metric's unit
    ratio: float | None  # of speed: above 1 if the side is faster than the baseline
    low: float | None  # 95 % interval of the ratio; None: not known
    high: float | None
    p: float | None  # two-sided, of a difference beyond the margin, corrected for the number of comparisons
    n: tuple[int, int]  # number of values of side and baseline: repeats of one run, or runs
    word: str  # "faster", "slower", "same", "inconclusive"
    provisional: bool = False  # one repeat, or a variation between runs that is mostly assumed
    basis: Basis = "repeats"
    reason: Inconclusive | None = None
    refused: Reason | None = None  # why the two sides have no ratio
    unit: Literal["repeats", "runs"] = "repeats"  # what the values are of
    comparisons: int = 1  # for which p is corrected
    needed: int | None = None  # values of each side that would decide the verdict; None: not known, or too many
    needed_for_same: int | None = None  # those that would show that there is no difference beyond the margin
    widened: tuple[float, float] | None = None  # by which factors `low` and `high` are farther, see `client_error`
    gate: Gate | None = None  # of a comparison of runs, and of servers with `--tolerance`: what the exit code follows
    tolerance: float | None = None  # of the gate: 0.1 is a slowdown of 10 %
    # Values of each side that would decide the gate, if the ratio stays; None: decided, not known, or too many.
    gate_needed: int | None = None


class Difference(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key in which the manifests of the sides differ."""

    key: str
    values: list[str]  # one for each side


class Comparison(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of verdicts."""

    metric: str | None  # of all verdicts; None: they have different ones
    comparisons: int  # for which p-values are corrected
    noise_floor: float  # smaller relative differences are treated as noise
    noise_source: list[Reason]  # in a comparison of runs: the source of the variation between them
    verdicts: list[Verdict]
    # In a comparison of runs:
    simulated: bool = False  # an engine's model was measured, not hardware
    sides: list[str] = []  # baseline first
    answers: list[Reason] = []  # up to how many users speculation pays, where one side speculates
    differences: list[Difference] = []  # of the manifests of the sides
    same_answers: list[SameAnswers] = []  # of loads whose right answers are known
    checks: list[CheckResult] = []
    notes: list[Reason] = []  # on the sides
