"""The scenario: what to start, how to load it, and what to find out. Format version 1, see docs/scenarios.md."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from harness.base.files import LOCUSTFILES
from harness.scenario.behaviour import (
    PAIR,
    Abandon,
    Agent,
    AgentTrace,
    Lengths,
    NotNegative,
    Pause,
    Positive,
    Rag,
    Share,
    Structured,
    Tokens,
    is_length_file,
    max_length,
    min_length,
)

MAX_NAME = 40
NEW_CACHES = "new"  # of a server: each start begins without compiled kernels
NAME = f"[a-z0-9][a-z0-9-]{{0,{MAX_NAME - 1}}}"
LOAD_NAME = rf"{NAME}(?:\.{NAME}|@\d+(?:-\d+)?)?"  # a part of a mix is MIX.LOAD, a stage LOAD@USERS
_NAME_RULE = f"lower-case letters, digits and '-', at most {MAX_NAME}"
Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z", description=_NAME_RULE)]
LoadName = Annotated[str, Meta(pattern=rf"\A{LOAD_NAME}\Z", description=_NAME_RULE)]
# A name or path that reports and terminals print.
Line = Annotated[
    str,
    Meta(
        pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]{0,1000}\Z",
        description="a text of one line, without control characters, of at most 1,000 characters is expected",
    ),
]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
MAX_USERS = 100_000  # of scenario, command line and web form; each takes 10 KiB and more
Users = Annotated[int, Meta(ge=1, le=MAX_USERS)]
VariableName = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,200}\Z",
        description="expected the NAME of an environment variable, never the key itself",
        extra_json_schema={"writeOnly": True},  # messages do not show the value
    ),
]

_POINT = Meta(min_length=2, max_length=2, description="a pair [second, rate] is expected")
_OPEN_LOOP_WARMUP = 8  # users of a wave in an open loop, whose concurrency is unknown
MADE_MIN_SHARE = 0.3  # of the tokens that are asked for, in the vocabulary with the longest pieces: whole words
MADE_KINDS = ("code", "chat", "structured")  # of `prompts.kind`: texts with a task, made by the harness
SERVER_TOKENIZER = "server"  # of `prompts.tokenizer`: the tokenizer that the server has
TURNS = 4  # of a conversation, by default
MAX_SERVERS = 200  # of a scenario: each is rendered, and its settings are checked
MAX_CELLS = 100_000  # of a plan
MAX_STAGES = 100  # of a load
USERS = tuple(sorted(path.stem for path in LOCUSTFILES.glob("*.py")))  # the user classes that ship


class Gateway(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A proxy between the users and a server, such as LiteLLM."""

    template: Line  # of a gateway: `litellm`
    variables: dict[str, Any] = {}  # values for the template's variables


# Access to the machine that a server's containers get only with the user's consent; harness.serve.security has reasons.
Consent = Literal["docker-socket", "host-files", "host-devices", "host-ipc", "open-port", "privileges"]


class Span(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A range of values of a varied setting. Each value is `step` above the previous one, or `factor` times it."""

    first: float = field(name="from")  # the first value
    to: float  # the last value is at most this
    step: float | None = None  # each value is this much above the previous one, or ...
    factor: float | None = None  # ... this many times the previous one


class Server(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server to start: a Compose template of compose/ and values for its variables."""

    template: Line  # a template of `compose/` ([servers](servers.md))
    variables: dict[str, Any] = {}  # values for the template's variables
    container: bool = True  # false: the embedded engine as a process (template `simulated` only)
    # seconds until the model must answer; a first start downloads, and compiles FP8 for 12 minutes on gfx1151
    startup_timeout_s: Positive = 1800.0
    allow: list[Consent] = []  # access of its containers to this machine ([consent](servers.md))
    gateway: Gateway | None = None  # takes the load and passes it on to the server; the metrics are the server's
    # [compiled kernels](startup.md) that a start finds: `new`, none at each start; NAME of a server with `new`, those
    # that its newest start left. Both are in volumes of the run. Default: the volumes that all runs share
    caches: Line | None = None
    # a [sweep](sweeps.md): values for a variable of the template, or for an argument of the engine (`--flag`)
    vary: dict[str, list[Any] | Span] = {}
    # conditions that a combination must meet, such as `max_num_batched_tokens >= max_num_seqs`
    where: Annotated[list[str], Meta(max_length=20)] = []


class Wave(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rate that follows a sine, such as over a day. It starts at its minimum."""

    min: NotNegative  # arrivals a second
    max: Positive  # arrivals a second
    period_s: Annotated[float, Meta(ge=0.001, le=1e7)]  # from one minimum to the next


class Arrivals(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Open loop: users arrive by a schedule, whether or not the server keeps up. Exactly one of the first three."""

    rate: Positive | None = None  # arrivals a second
    # `[[0, 1], [60, 4]]`: 1 a second from second 0, 4 a second from second 60; the last rate stays until the end
    points: Annotated[list[Annotated[list[NotNegative], _POINT]], Meta(min_length=1, max_length=10_000)] | None = None
    wave: Wave | None = None  # a rate that follows a sine, such as over a day
    between: Literal["steps", "ramps"] = "steps"  # how the rate goes from one point to the next
    spacing: Literal["poisson", "even", "gamma"] = "poisson"  # random, constant intervals, random with `burstiness`
    burstiness: Annotated[float, Meta(ge=0.001, le=100)] = 1.0  # gamma: its shape; 1 is poisson, below 1 is burstier


class Trace(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Open loop by a trace of real traffic: a row has a time, a prompt length and an answer length; docs/traces.md."""

    file: Line  # relative to the scenario
    # `requests` is our own requests.jsonl; default: detected by the first line
    format: Literal["burstgpt", "mooncake", "azure", "requests"] | None = None
    speed: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0  # 2: twice as many requests a second as the trace had
    from_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # start of the window, in seconds after the first row
    to_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # end of the window; default: the last row
    max_requests: Count | None = None  # at most this many rows of the window
    block_tokens: Tokens = 512  # format mooncake: tokens of one hash_id
    cell: Line | None = None  # format requests: the cell to replay, where the file has several


class Stage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A number of users for a time."""

    users: Users  # virtual users
    for_s: Positive  # seconds


class Prompts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the prompts come from. The sequence is a function of the scenario's seed."""

    # classification: a few hundred texts that ship; code, chat, structured: made texts with a task, to compare kinds
    kind: Literal["synthetic", "file", "classification", "code", "chat", "structured"] = "synthetic"
    # length of each prompt, in words of about one token; of code, chat and structured words and signs
    tokens: Tokens | Lengths = 256
    # synthetic: [exact lengths](scenarios.md#exact-prompt-lengths), by a local tokenizer.json or by `server`, its own
    tokenizer: Line | None = None
    file: Line | None = None  # file: [your prompts](scenarios.md#prompt-files), relative to the scenario
    system_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # length of a system prompt that all requests share
    salt: bool = True  # start each prompt with words of the cell, so that no prefix cache of an earlier cell helps


class Load(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who sends requests, how many, and how long the answers are."""

    # `agent`, `agent_trace`, `batch`, `chat`, `rag` ([what they do](users.md)), or the path of your own locustfile
    user: Line
    users: Users = 1  # virtual users or agents; in an open loop the maximum at once
    # `[{users: 5, for_s: 60}, {users: 20, for_s: 60}]`, in place of `users` and `duration_s`: each is a row LOAD@USERS
    stages: Annotated[list[Stage], Meta(max_length=MAX_STAGES)] = []
    processes: Annotated[int, Meta(ge=1, le=1024)] = 1  # Locust load processes, of each machine that sends
    requests: Count | None = None  # a fixed amount of work, or ...
    duration_s: Positive | None = None  # ... a fixed time; exactly one of the two
    arrivals: Arrivals | None = None  # open loop; default: closed loop
    trace: Trace | None = None  # open loop by a trace, in place of `requests`, `duration_s` and `arrivals`
    batch_size: Annotated[int, Meta(ge=1, le=100_000)] | None = None  # batch: requests sent at once; then wait for all
    # batch: requests that each user keeps in flight: the next one is sent as soon as one has ended
    in_flight: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    turns: Count | None = None  # chat: turns of a conversation before a new one starts; default: 4
    # chat, rag: [min, max] of the think time, uniform; batch: pause between bursts; agent: between tasks
    think_s: Annotated[list[NotNegative], PAIR] | None = None
    think: Pause | None = None  # the same by another distribution
    abandon: Abandon | None = None  # chat: users that leave before the answer is complete
    regenerate: Share = 0.0  # chat: share of the questions that are asked again, word for word
    agent: Agent | None = None  # agent: its steps and tools
    rag: Rag | None = None  # rag: the documents
    agent_trace: AgentTrace | None = None  # agent_trace: the recorded conversations
    prompts: Prompts | None = None  # of this load; default: those of the scenario
    # of its requests, in place of the scenario's; of a list they take them in turn: `[a, a, b, b]` changes every second
    model: str | list[str] | None = None
    # length of an answer (`max_tokens`); the length of a row of a batch file is used first
    output_tokens: Tokens | Lengths = 128
    # fixed: exactly this length (`ignore_eos`), to compare engines; natural: at most, stop at end-of-sequence
    output: Literal["fixed", "natural"] = "fixed"
    stream: bool = True  # streaming answers; without, there is no TTFT
    # fields that this server refuses; without `stream_options` tokens may be unknown, without `temperature` it is not 0
    omit: list[Literal["stream_options", "temperature", "tool_choice"]] = []
    # further fields of each request's body, such as `{seed: 42, chat_template_kwargs: {enable_thinking: false}}`
    extra_body: dict[str, Any] = {}
    # completions: the messages as one text; messages: Anthropic's, see [endpoints](scenarios.md#endpoints)
    endpoint: Literal["chat", "completions", "embeddings", "messages"] = "chat"
    answer: Structured | None = None  # the form that answers must have; the share of valid answers is reported
    # chat, agent: prompts ask to repeat a word of their user, which must be in no other user's answer; by default they
    # do with `output: natural` and synthetic prompts whose tokens are not counted
    isolation: bool | None = None
    # a load of hours: the report shows drift, growth of memory, events of the kernel and the first failure
    soak: bool = False
    ramp_s: NotNegative = 0.0  # all users are spawned within this time; the warm-up lasts at least as long
    drain_s: NotNegative = 30.0  # how long requests in flight at the end may take to finish
    # a request has failed when for this time no headers, no complete event but pings, and no taken data show progress
    timeout_s: Annotated[float, Meta(ge=0.001, le=1e7)] = 300.0
    vary: dict[str, list[Any] | Span] = {}  # a [sweep](sweeps.md): values by key, such as users or arrivals.rate
    where: Annotated[list[str], Meta(max_length=20)] = []  # conditions, as of a server


class Warmup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Work sent before the measurement, at its concurrency; recorded with a mark. Exactly one of the first three."""

    # rounded up, so that no burst or conversation is cut; 0: no warm-up
    requests: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    duration_s: NotNegative | None = None  # seconds
    until: Literal["steady"] | None = None  # until the server [is steady](method.md#until-the-server-is-steady)
    within: Annotated[float, Meta(gt=0, le=1)] = 0.05  # steady: how far windows may differ
    max_s: Positive = 600.0  # steady: the measurement starts after this time in any case ...
    max_requests: Count | None = None  # ... or after this many requests


class Baseline(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cell that all others are compared with."""

    server: str  # its name
    load: str  # its name


class Pair(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Two rows to compare in addition to the baseline's, each as SERVER/LOAD."""

    row: str  # SERVER/LOAD
    against: str  # SERVER/LOAD


class SweepRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    of: str  # its name in the file
    settings: dict[str, Any]  # by variable, argument or key


class Sweep(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rows of a sweep, by the names of servers and loads. A server or load that was not varied is not in it."""

    servers: dict[str, SweepRow] = {}
    loads: dict[str, SweepRow] = {}

    def settings(self, server: str, load: str) -> dict[str, Any]:
        """Return the varied settings of a row. A key that the server has too is `load.KEY` for the load."""
        server_settings = self.servers[server].settings if server in self.servers else {}
        load_settings = self.loads[load].settings if load in self.loads else {}
        return server_settings | {
            f"load.{key}" if key in server_settings else key: value for key, value in load_settings.items()
        }


class Scenario(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A question about LLM servers and the experiment that answers it."""

    version: Literal[1]  # format of this file
    # what the scenario finds out; the title of the report
    question: Annotated[str, Meta(max_length=10_000, description="a text of at most 10,000 characters is expected")]
    model: Line  # as the server knows it
    servers: dict[Name, Server]  # by name
    loads: dict[LoadName, Load]  # by name
    mixes: dict[Name, list[str]] = {}  # [concurrent](users.md#mixed) loads, `MIX: [LOAD, LOAD]`: each a row MIX.LOAD
    prompts: Prompts = Prompts()  # where the prompts come from
    # two are enough for a large difference, one is provisional; see [method](method.md#repeats-and-verdicts)
    repeats: Annotated[int, Meta(ge=1, le=1000)] = 5
    seed: Annotated[int, Meta(ge=0)] = 42  # prompts, lengths and think times follow from it
    # a fresh server for each cell (cold); false: one start per repeat and server (warm), the default of a sweep
    restart: bool = True
    # of a warm sweep: the first cell of each server start once more at its end; false: drift shows in the repeats only
    drift_cells: bool = True
    warmup: Warmup | None = None  # default: one wave, as many requests as will be in flight at once
    baseline: Baseline | None = None  # default: the first server with the first load
    # pairs of rows such as `vllm/ten-at-a-time`; without them each server is compared with the first under the same
    # load, and the loads of one server with the first load. A load against another one is compared only if named here
    compare: Annotated[list[Pair], Meta(max_length=200)] = []
    # such as `error_rate == 0` or `vllm/five-at-a-time: speedup >= 1.5` ([checks](scenarios.md#checks))
    checks: Annotated[list[str], Meta(max_length=1000)] = []
    max_error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0  # a run with more is INVALID
    metrics_interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0  # how often the server's metrics are read
    generator: Literal["process", "container"] = "process"  # of the load: on this host, or the project's Dockerfile
    api_key_env: VariableName | None = None  # NAME of the environment variable that holds the server's API key
    swept: Sweep | None = None  # made from `vary` when the file is read; None: nothing is varied


def asks_own_words(load: Load, prompts: Prompts) -> bool:
    """Return whether the prompts of a load have a word of their user, by `isolation` or by default.

    By default they do where this changes nothing that was asked for: chats and agents with made prompts and answers
    that may end by themselves. Recorded prompts, prompts of an exact length and answers of a fixed length stay.
    """
    return can_ask_own_words(load, prompts) and load.isolation is not False


def can_ask_own_words(load: Load, prompts: Prompts) -> bool:
    """Return whether the prompts and answers of a load have room for a word of their user."""
    is_free = load.output == "natural" and load.answer is None and load.endpoint != "embeddings"
    is_made = (load.prompts or prompts).kind == "synthetic" and prompts.tokenizer is None
    return load.user in ("chat", "agent") and load.trace is None and is_free and is_made


def prompts_of(scenario: Scenario, load: Load) -> Prompts:
    return load.prompts or scenario.prompts


def model_at(load: Load, index: int) -> str | None:
    """Return the model of a request by its index; None: that of the scenario."""
    models = [load.model] if isinstance(load.model, str) else load.model
    return models[index % len(models)] if models else None


def models_of_loads(scenario: Scenario) -> list[str]:
    """Return the models that loads name, each once."""
    models = [[load.model] if isinstance(load.model, str) else load.model or [] for load in scenario.loads.values()]
    return list(dict.fromkeys(itertools.chain(*models)))


def warmup_of(scenario: Scenario, load: Load) -> Warmup:
    """Return a load's warm-up; by default one wave."""
    return scenario.warmup or Warmup(requests=wave_size(load))


def wave_size(load: Load) -> int:
    """Return the requests of one wave: enough that the server has met the concurrency of the measurement."""
    if is_open_loop(load):
        return min(load.users, _OPEN_LOOP_WARMUP) * requests_per_task(load)
    # The turns of a conversation follow each other; `in_flight` can be more than the requests of a task.
    return max(max_concurrency(load), load.users * requests_per_task(load))


def is_open_loop(load: Load) -> bool:
    return load.arrivals is not None or load.trace is not None


def asks_known(load: Load) -> bool:
    """Whether the right answers are known, so that the load is about answers and not about speed."""
    return load.answer is not None and load.answer.known is not None


def requests_per_task(load: Load) -> int:
    """Return the requests of one user task: a conversation, an agent's task or a burst. Own locustfiles: 1."""
    if load.user == "chat":
        return load.turns or TURNS
    if load.user == "agent":
        agent = load.agent or Agent()
        return agent.steps * (1 + agent.sub_agents)
    return load.batch_size or 1


def size_problem(servers: int, loads: int, repeats: int = 1) -> str | None:
    """Return why a scenario of this size is refused; None: it is not."""
    if servers > MAX_SERVERS:
        return f"it has {servers:,} servers; at most {MAX_SERVERS:,} are read"
    if (cells := servers * loads * repeats) > MAX_CELLS:
        return f"a plan of {cells:,} cells (servers x loads x repeats); at most {MAX_CELLS:,} are read"
    return None


def max_concurrency(load: Load) -> int:
    """Return the most requests that a load has in flight. A user's own locustfile counts as one per user."""
    if load.user == "agent":
        return load.users * max(1, (load.agent or Agent()).sub_agents)
    return load.users * ((load.in_flight or load.batch_size or 1) if load.user == "batch" else 1)


def max_processes(load: Load) -> int:
    """Return how many load processes a load can have: one per user of its smallest stage."""
    return min((stage.users for stage in load.stages), default=load.users)


class RequestTokens(Struct, frozen=True):
    """The tokens of a load's first requests, without a chat template. Later turns of a conversation have more."""

    prompt_min: int
    prompt_max: int
    output_min: int
    output_max: int
    is_estimate: bool = False  # another tokenizer than usual ones may need fewer or more

    def fit(self, limit: int, *, output_counts: bool) -> Literal["all", "some", "none"]:
        """Return which requests fit into a context of `limit` tokens. `output_counts`: the server refuses a request
        whose prompt and asked output exceed it together; if not, it ends such an answer early.
        """
        if self.prompt_min + (self.output_min if output_counts else 0) > limit:
            return "none"
        return "all" if self.prompt_max + self.output_max <= limit else "some"


def request_tokens(load: Load, prompts: Prompts) -> RequestTokens | None:
    """Return the tokens of a load's first requests; None where files or an own locustfile decide them."""
    traced = load.trace is not None or load.agent_trace is not None
    if load.user not in USERS or traced or prompts.kind not in ("synthetic", *MADE_KINDS) or asks_known(load):
        return None
    if is_length_file(prompts.tokens) or is_length_file(load.output_tokens):
        return None
    output = (
        (0, 0) if load.endpoint == "embeddings" else (min_length(load.output_tokens), max_length(load.output_tokens))
    )
    before = prompts.system_tokens + ((load.rag or Rag()).document_tokens if load.user == "rag" else 0)
    longest = before + max_length(prompts.tokens, "prompt")
    shortest = before + min_length(prompts.tokens)
    if prompts.kind in MADE_KINDS:
        return RequestTokens(int(shortest * MADE_MIN_SHARE), longest, *output, is_estimate=True)
    return RequestTokens(shortest, longest, *output)


def connections_per_process(*loads: Load) -> int:
    """Return the most connections of a load process that sends these loads at once."""
    return -(-sum(map(max_concurrency, loads)) // process_count(loads))


def process_count(loads: Sequence[Load]) -> int:
    """Return the load processes of loads that run at once: as many as the one with the most asks for."""
    return max(load.processes for load in loads)


def locustfile_of(load: Load, folder: Path) -> Path:
    """Return the path of a load's locustfile: one that ships, or the user's own, relative to the scenario's folder."""
    return LOCUSTFILES / f"{load.user}.py" if load.user in USERS else (folder / load.user).resolve()
