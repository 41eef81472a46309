"""summary.json: the numbers of a run by cell and row, and the answers of the questions, which are stored there."""

from typing import Any, Literal

from msgspec import Struct

from harness.base.measured import NO_SAMPLE, Distribution, Numbers
from harness.base.reason import Reason
from harness.base.versions import FORMAT_VERSION
from harness.failures.diagnosis import FailedRequests
from harness.numbers.comparison import CheckResult, Comparison, SameAnswers, Verdict
from harness.numbers.schedule import WarmupResult
from harness.numbers.time_split import LimitedBy, TimeSplit
from harness.numbers.user_words import Isolation
from harness.records.samples import MachineLoad, ServerLoad

ENOUGH = 20  # requests of a row, from which on its times show a cause


class ClientLimit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A limit of the load generator that a cell exceeded."""

    what: Literal["cpu", "send_lag", "shared_reads", "read_clock", "loop_lag"]
    value: float
    allowed: float  # maximum
    unit: Literal["s", "ratio"]
    numbers: list[str]  # fields of Numbers that it affects; `client_error` of the cell has by how much at most
    invalid: bool = False  # whether that makes the run INVALID


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
    first_failure_s: float | None = (
        None  # of a request, or the first serious event of the kernel; negative: in the warm-up
    )
    cause: str = ""
    events: list[KernelEvent] = []
    cpu_busy: float | None = None  # mean share of the CPU of the machine, by all programs
    kernel_log: bool | None = None  # whether it could be read; None: the machine was not sampled
    kernel_lost_s: float = 0.0  # for so long it is not known, because the connection to the machine was lost
    word: Literal["stable", "drifts", "failed", "unknown"]


class FirstRequests(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first requests of a server's start that took clearly longer than later ones; 0: none did."""

    requests: int
    extra_s: float  # of all of them together, above the median of later ones
    until_s: float  # from the first request until the last of them had ended
    usual_s: float  # the median of later ones


class StartTime(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One start of a server of a scenario with `caches`. None: not known."""

    cell: str  # the first one of the start
    server: str
    repeat: int
    caches: str | None = None  # as the scenario has it
    ready_s: float | None = None  # until the first answer; None: the server ran already
    phases: dict[str, float] = {}  # seconds; without the engine's own phases where its log does not show them
    compiled: Literal["cold", "warm"] | None = None  # by the engine's log
    found_bytes: int | None = None  # compiled by earlier starts
    ready_bytes: int | None = None  # the same when the server was ready
    first: FirstRequests | None = None  # None: too few requests


class TurnNumbers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One turn of an agent's tasks: means over the successful requests. None: the server does not report it."""

    turn: int
    requests: int
    prompt_tokens: float | None = None
    cached_tokens: float | None = None  # that the server had in its cache
    new_tokens: float | None = None  # that the context grew by since the turn before
    recomputed_tokens: float | None = None  # prompt - cached - new: they were in the context before
    ttft_p50: float | None = None  # seconds


class StepRange(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Some steps of a replayed trace: means over the successful requests. None: not known."""

    first: int  # of the steps of an agent, from 1; or of the tokens of a prompt
    last: int
    requests: int
    prompt_tokens: float | None = None  # as the server counts them: new + cached + recomputed
    new_tokens: float | None = None  # no cache could have them
    cached_tokens: float | None = None  # that the server had in its cache
    recomputed_tokens: float | None = None  # a cache without bounds had them, and the server computed them
    ttft_p50: float | None = None  # seconds
    ttft_p90: float | None = None  # None: fewer than 64 requests


class CacheHits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prompt tokens that a prefix cache could have, and those that the server's had, of the requests that have both."""

    requests: int
    prompt_tokens: int  # as the server counts them
    planned: int  # tokens that a cache without bounds could have
    served: int  # those of them that the server took from its cache, of each request at most the planned ones
    beyond: int  # further tokens that it took from its cache: of the chat template, or of other conversations
    # Tokens that the chat template adds to a prompt, the same for all; None: they differ, so `planned` is scaled by the
    # ratio of the counted tokens to the planned ones, or the trace has text instead of tokens.
    template_tokens: int | None = None
    is_scaled: bool = False


class ReplayNumbers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a replay of a trace showed: its steps, conversations and cache hits. Steps of the warm-up count as steps."""

    conversations: int  # that were replayed, in whole or in part
    whole: int  # those of which every step was sent and answered
    ended: int  # steps; each step of these conversations is in one of the six counts
    failed: int
    not_sent: int  # they depend on a failed step
    too_long: int  # left out for the context, with those that depend on them
    before_start: int  # recorded before the start inside the conversation
    open: int  # not ended, or not sent, because the load ended
    delays_s: float  # as recorded, of steps that were due
    removed_s: float  # of these delays, by the load's limits
    # Of the conversations that were replayed whole, without a step in the warm-up: the time from the first request to
    # the last answer, the time of it in which a request was in flight, and the rest: the tools' time.
    duration: Distribution = NO_SAMPLE
    served: Distribution = NO_SAMPLE
    tools: Distribution = NO_SAMPLE
    by_step: list[StepRange] = []
    by_depth: list[StepRange] = []  # by tokens of the prompt
    uncached_tok_s: float | None = None  # prompt tokens without cached ones, as `input_tok_s`; median over the cells
    hits: CacheHits | None = None  # None: no request has both numbers


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
    isolation: Isolation | None = None  # of users who have a word of their own
    replay: ReplayNumbers | None = None  # of a load that replays a trace of agents
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


class Reference(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """baseline.json: the parts of the baseline run that checks need."""

    definitions: int = 1  # version of the formulas of its numbers
    run: str
    rows: list[Row] = []
    ratios: list["Verdict"] = []  # of the run and the baseline, by each metric that a check compares
    refused: Reason | None = None  # why the two runs are not compared


class Action(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A change that a finding advises."""

    do: str
    settings: dict[str, str] = {}  # by place, such as "servers.vllm.variables" of the scenario: the text to paste
    commands: dict[str, str] = {}  # by place, such as a shell: the command to paste
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
    starts: list[StartTime] = []  # of a scenario whose servers have `caches`
    same_answers: list[SameAnswers] = []  # of loads whose right answers are known: each server against the baseline's
    checks: list[CheckResult] = []
    # Of a sweep over context depth, prompt length or users, and of loads with several models: what the run found out.
    answers: list[Reason] = []
    # How near each server came to what its GPUs allow, with the fewest users; none if model or GPU is not known.
    hardware_shares: list[Reason] = []
    what_if: list[Reason] = []  # `report --check` of a search: the capacity for other SLOs; not stored
    findings: list[RunFinding] | None = None  # the worst first; [] none was found; None: not searched
