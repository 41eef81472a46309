"""The scenario: what to start, how to load it, and what to find out. Format version 1, see docs/scenarios.md."""

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from harness import behaviour, lengths, mixes, structured
from harness.behaviour import Abandon, Agent, Pause, Rag, Share
from harness.check_syntax import misplaced
from harness.errors import HarnessError, ScenarioError, did_you_mean
from harness.lengths import Lengths, Positive, Tokens
from harness.strict import decode, load_yaml, where
from harness.structured import Structured

Name = Annotated[
    str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,39}$", description="lower-case letters, digits and '-', at most 40")
]
LoadName = Annotated[  # with a dot: a part of a mix, as harness.mixes makes them
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}(\.[a-z0-9][a-z0-9-]{0,39})?$",
        description="lower-case letters, digits and '-', at most 40",
    ),
]
# The upper bounds keep a slip of the finger from running for years.
NotNegative = Annotated[float, Meta(ge=0, le=1e7)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
VariableName = Annotated[
    str,
    Meta(
        pattern="^[A-Za-z_][A-Za-z0-9_]*$",
        description="expected the NAME of an environment variable, never the key itself",
        extra={"hidden": True},
    ),
]

_OPEN_WARMUP = 8
SERVER_TOKENIZER = "server"  # of `prompts.tokenizer`: the tokenizer that the server has
TURNS = 4  # of a conversation, where nobody says how many
USERS = ("agent", "batch", "chat", "rag")  # the user classes that ship, locustfiles/<name>.py


class Gateway(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What stands between the users and a server, such as LiteLLM."""

    template: str
    variables: dict[str, Any] = {}


class Server(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server to start: a Compose template of compose/ and values for its variables."""

    template: str
    variables: dict[str, Any] = {}
    container: bool = True  # false: the embedded engine as a process (template `simulated` only)
    startup_timeout_s: Positive = 900.0
    gateway: Gateway | None = None  # takes the load and passes it on to the server; the metrics are the server's


class Wave(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rate that swings as a sine, such as over a day; it begins at the least."""

    least: NotNegative
    most: Positive
    period_s: Positive


class Arrivals(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Open loop: people arrive by a schedule, whether the server keeps up or not. Exactly one of the first three."""

    rate: Positive | None = None  # arrivals a second
    points: list[list[NotNegative]] | None = None  # [second, rate], ascending; the last rate stays
    wave: Wave | None = None
    between: Literal["steps", "ramps"] = "steps"  # how the rate goes from one point to the next
    spacing: Literal["poisson", "even", "gamma"] = "poisson"
    burstiness: Annotated[float, Meta(gt=0, le=100)] = 1.0  # gamma: its shape; 1 is poisson, below 1 is burstier


class Trace(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Open loop by a trace of real traffic: its rows say when, and how long prompt and answer are; docs/traces.md."""

    file: str  # relative to the scenario
    format: Literal["burstgpt", "mooncake", "azure", "requests"] | None = None  # None: seen by its first line
    speed: Positive = 1.0  # 2: twice as many requests a second as the trace had
    from_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # window: seconds of the trace after its first row
    to_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # the row at this second is not in it; None: all
    most: Count | None = None  # of the window only so many rows
    block_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 512  # mooncake: what one of its hash_ids stands for
    cell: str | None = None  # requests: the cell whose requests are meant, where the file has several


class Load(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who sends requests, how many, and how long the answers are."""

    user: str  # one of USERS, or the path of a locustfile of your own, relative to the scenario
    users: Annotated[int, Meta(ge=1, le=100_000)] = 1
    processes: Annotated[int, Meta(ge=1, le=1024)] = 1  # Locust load processes
    requests: Count | None = None  # a fixed amount of work, in requests ...
    duration_s: Positive | None = None  # ... or a fixed time; exactly one of the two
    arrivals: Arrivals | None = None  # open loop, with at most `users` at once; None: closed loop
    trace: Trace | None = None  # open loop by a trace, which also says how many requests; likewise
    batch_size: Annotated[int, Meta(ge=1, le=100_000)] | None = None  # batch: so many at once, then wait for all
    turns: Count | None = None  # chat: turns of a conversation before a new one starts
    think_s: list[NotNegative] | None = None  # chat: [least, most], uniform; batch: pause between bursts
    think: Pause | None = None  # the same by another distribution
    abandon: Abandon | None = None  # chat: now and then a user leaves before the answer is there
    regenerate: Share = 0.0  # chat: of the questions that are asked again, word for word
    in_flight: Annotated[int, Meta(ge=1, le=100_000)] | None = None  # batch: so many always, instead of bursts
    agent: Agent | None = None  # agent: how it works
    rag: Rag | None = None  # rag: the documents
    output_tokens: Tokens | Lengths = 128
    output: Literal["fixed", "natural"] = "fixed"  # fixed: ignore_eos, to compare engines; natural: like people
    stream: bool = True
    endpoint: Literal["chat", "completions", "embeddings"] = "chat"
    answer: Structured | None = None  # the form that answers must have; they are judged, and the share is reported
    ramp_s: NotNegative = 0.0  # all users are spawned within this time
    drain_s: NotNegative = 30.0  # how long requests in flight at the end may take to finish
    timeout_s: Positive = 300.0  # a request on which nothing arrives for so long has failed


class Prompts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the prompts come from. The sequence is a function of the scenario's seed."""

    kind: Literal["synthetic", "file", "classification"] = "synthetic"
    tokens: Tokens | Lengths = 256  # synthetic: length of each prompt, in words of about one token
    # synthetic: whose tokens; a local tokenizer.json, or `server`: the server's own. None: a word is taken for a token
    tokenizer: str | None = None
    file: str | None = None  # file: JSONL, a line {"prompt": "..."} or {"messages": [...]}, relative to the scenario
    system_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # length of a system prompt that all requests share
    salt: bool = True  # begin each prompt with words of its own per cell, so no earlier cell's prefix cache helps


class Warmup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Work sent before the measurement, at the concurrency to come, recorded and marked. One of the two."""

    requests: Annotated[int, Meta(ge=0)] | None = None
    duration_s: NotNegative | None = None


class Baseline(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cell that all others are compared with."""

    server: str
    load: str


class Pair(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Two rows to compare besides those with the baseline, each as SERVER/LOAD."""

    row: str
    against: str


class Scenario(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A question about LLM servers and the experiment that answers it."""

    version: Literal[1]
    question: str
    model: str  # as the server knows it
    servers: dict[Name, Server]
    loads: dict[LoadName, Load]
    mixes: dict[Name, list[str]] = {}  # loads that run at once: MIX: [LOAD, LOAD]; each is a row MIX.LOAD
    prompts: Prompts = Prompts()
    repeats: Annotated[int, Meta(ge=1, le=1000)] = 5
    seed: Annotated[int, Meta(ge=0)] = 42
    restart: bool = True  # a fresh server for each cell (cold); false: one per repeat and server (warm)
    warmup: Warmup | None = None  # None: one request of each that will be in flight at once
    baseline: Baseline | None = None  # default: the first server with the first load
    compare: list[Pair] = []  # more comparisons; each makes all of them a little harder to decide
    checks: list[str] = []  # such as "error_rate == 0" or "ttft_p95 <= 2s"
    max_error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0  # a run with more is INVALID
    metrics_interval_s: Positive = 1.0
    generator: Literal["process", "container"] = "process"
    api_key_env: VariableName | None = None  # NAME of the environment variable that holds the server's API key


class Read(Struct, frozen=True):
    """A scenario file as read: all that is wrong with it, and what of it is right."""

    scenario: Scenario  # with problems: only its parts that decode
    problems: list[str]
    lines: dict[str, int]  # line of each path


def load_scenario(path: Path) -> Scenario:
    """The scenario in a file.

    Raises ScenarioError that lists every problem with its path, line, value and a suggestion.
    """
    read = read_scenario(path)
    if read.problems:
        raise ScenarioError(str(path), read.problems)
    return read.scenario


def read_scenario(path: Path) -> Read:
    """As `load_scenario`, for who adds problems of its own. Raises what leaves nothing to look at."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HarnessError(
            f"{path}: the scenario cannot be read ({error.strerror})",
            next_step="`harness scenarios` lists those that ship.",
        ) from None
    except UnicodeDecodeError:
        raise ScenarioError(str(path), ["not a text file in UTF-8"]) from None
    problems: list[str] = []
    raw, lines = load_yaml(text, problems)
    if not isinstance(raw, dict):
        problems = problems or ["$: a scenario is a mapping (version, question, servers, loads ...)"]
        raise ScenarioError(str(path), problems)
    version = raw.get("version")
    if isinstance(version, int) and version > 1:
        raise ScenarioError(
            str(path), [f"$.version: {version} was written for a newer harness; this one reads version 1"]
        )
    scenario = decode(raw, Scenario, lines, problems) or _what_decodes(raw)
    known = {part: list(raw[part]) for part in ("servers", "loads") if isinstance(raw.get(part), dict)}
    wrong = mixes.problems_of(scenario, known.get("loads", []))
    known["loads"] = [*known.get("loads", []), *mixes.names(scenario)]
    if not wrong:
        scenario = mixes.expanded(scenario)
    for problem in [*wrong, *_contradictions(scenario, path.parent, known)]:
        place, _, rest = problem.partition(":")
        problems.append(f"{where(place, lines)}:{rest}")
    return Read(scenario, problems, lines)


def _what_decodes(raw: dict[str, Any]) -> Scenario:
    """The parts of a faulty scenario that are right by themselves, so that they can be checked further."""
    right: dict[str, Any] = {"version": 1, "question": "", "model": "?"}  # empty ones would be problems of their own
    for key, value in raw.items():
        if key in ("servers", "loads") and isinstance(value, dict):
            type_ = Server if key == "servers" else Load
            right[key] = {name: part for name, item in value.items() if (part := decode(item, type_, {}, []))}
        elif (whole := decode(right | {"servers": {}, "loads": {}, key: value}, Scenario, {}, [])) is not None:
            right[key] = getattr(whole, key)
    return Scenario(**({"servers": {}, "loads": {}} | right))


def warmup_of(scenario: Scenario, load: Load) -> Warmup:
    """A load's warm-up. By default one full wave, so that the server has met the concurrency to come.

    In an open loop nobody knows that concurrency: a few requests have to do.
    """
    if is_open(load):
        return scenario.warmup or Warmup(requests=min(load.users, _OPEN_WARMUP) * taken_together(load))
    # A conversation takes its turns one after the other, a steady stream more than it takes together.
    return scenario.warmup or Warmup(requests=max(at_once(load), load.users * taken_together(load)))


def is_open(load: Load) -> bool:
    """Whether people come by a schedule, and not when an answer has come."""
    return load.arrivals is not None or load.trace is not None


def taken_together(load: Load) -> int:
    """How many requests a user takes at once, as far as it is known: an own locustfile does as it likes."""
    if load.user == "chat":
        return load.turns or TURNS
    if load.user == "agent":
        agent = load.agent or Agent()
        return agent.steps * (1 + agent.sub_agents)
    return load.batch_size or 1


def at_once(load: Load) -> int:
    """The most requests that a load has in flight, as far as it is known: an own locustfile does as it likes."""
    if load.user == "agent":
        return load.users * max(1, (load.agent or Agent()).sub_agents)
    return load.users * ((load.in_flight or load.batch_size or 1) if load.user == "batch" else 1)


def locustfile_of(load: Load, folder: Path, shipped: Path) -> Path:
    """The locustfile of a load: one that ships, or the user's own next to the scenario."""
    return shipped / f"{load.user}.py" if load.user in USERS else (folder / load.user).resolve()


def _contradictions(scenario: Scenario, folder: Path, known: dict[str, list[str]]) -> list[str]:
    """What is well-formed but cannot be meant. `known`: names of all servers and loads, faulty ones included."""
    problems = [f"$.{part}: at least one is needed" for part, names in known.items() if not names]
    for name, load in scenario.loads.items():
        problems += [f"$.loads.{name}.{problem}" for problem in _load_problems(load, folder)]
    for name, server in scenario.servers.items():
        if not server.container and server.template != "simulated":
            problems.append(
                f"$.servers.{name}.container: only the template 'simulated' can run without a container, "
                f"not '{server.template}'"
            )
        if not server.container and server.gateway is not None:
            problems.append(f"$.servers.{name}.gateway: needs a server in a container; remove 'container: false'")
    base = scenario.baseline
    servers, loads = known.get("servers", []), known.get("loads", [])
    if base is not None and base.server not in servers:
        problems.append(f"$.baseline.server: '{base.server}' is not a server; {did_you_mean(base.server, servers)}")
    if base is not None and base.load not in loads:
        problems.append(f"$.baseline.load: '{base.load}' is not a load; {did_you_mean(base.load, loads)}")
    warmup = scenario.warmup
    if warmup is not None and (warmup.requests is None) == (warmup.duration_s is None):
        problems.append("$.warmup: give exactly one of 'requests' and 'duration_s'")
    problems += _prompt_problems(scenario.prompts, folder) + _answer_problems(scenario)
    problems += _pair_problems(scenario, servers, loads)
    return problems + _check_problems(scenario.checks, servers, loads)


def _load_problems(load: Load, folder: Path) -> list[str]:
    problems = []
    if load.trace is None and (load.requests is None) == (load.duration_s is None):
        problems.append("requests: give exactly one of 'requests' and 'duration_s'")
    if load.user not in USERS:
        if not load.user.endswith(".py"):
            problems.append(
                f"user: '{load.user}' is neither a user class that ships nor a .py file; "
                f"{did_you_mean(load.user, USERS)}"
            )
        elif not (folder / load.user).is_file():
            problems.append(f"user: there is no file {load.user} beside the scenario")
    problems += _not_its_own(load)
    problems += behaviour.problems_of(load.think, load.think_s, load.abandon)
    if load.abandon is not None and load.abandon.after_tokens is not None and not load.stream:
        problems.append("abandon.after_tokens: without 'stream' an answer comes all at once; use 'after_s'")
    if load.processes > load.users:
        problems.append(f"processes: {load.processes} load processes for {load.users} users; use at most one per user")
    problems += [f"output_tokens{problem}" for problem in lengths.problems_of(load.output_tokens, folder)]
    if load.endpoint == "embeddings" and load.user in ("chat", "agent"):
        problems.append("endpoint: a conversation needs answers, and embeddings are none; use 'user: batch'")
    if load.endpoint == "completions" and load.user == "agent":
        problems.append("endpoint: tools are called in chats only; remove it or use 'user: batch'")
    if load.endpoint == "embeddings" and load.answer is not None:
        problems.append("answer: embeddings have no text to judge; remove it")
    problems += _trace_problems(load, load.trace, folder) if load.trace is not None else []
    return problems + (_arrival_problems(load.arrivals) if load.arrivals is not None else [])


def _trace_problems(load: Load, trace: Trace, folder: Path) -> list[str]:
    problems = []
    for key in ("requests", "duration_s", "arrivals"):
        if getattr(load, key) is not None:
            advice = "" if key == "arrivals" else "; its window (from_s, to_s) and 'most' say how much"
            problems.append(f"{key}: a trace says itself what is sent and when; remove it{advice}")
    if load.user in ("chat", "agent", "rag") or (load.batch_size or 1) > 1:
        problems.append("trace: each of its rows is one request; use 'user: batch' without 'batch_size'")
    if load.in_flight is not None:
        problems.append("in_flight: a trace says when requests are sent; remove it")
    if not (folder / trace.file).is_file():
        problems.append(f"trace.file: there is no file {trace.file} beside the scenario")
    if trace.to_s is not None and trace.to_s <= trace.from_s:
        problems.append(f"trace.to_s: the window from {trace.from_s:g} to {trace.to_s:g} s is empty")
    return problems


def _answer_problems(scenario: Scenario) -> list[str]:
    problems = []
    for name, load in scenario.loads.items():
        form = load.answer
        if form is None:
            continue
        path = f"$.loads.{name}.answer"
        problems += [f"{path}{problem}" for problem in structured.problems_of(form)]
        if form.choice == "auto" and scenario.prompts.kind != "classification":
            problems.append(f"{path}.choice: 'auto' are the labels of 'prompts.kind: classification'; list the choices")
        if load.output == "fixed":
            problems.append(f"{path}: an answer of a form ends where the form ends; add 'output: natural' to the load")
    return problems


_OF_USER = {
    "batch_size": "batch",
    "in_flight": "batch",
    "turns": "chat",
    "abandon": "chat",
    "regenerate": "chat",
    "agent": "agent",
    "rag": "rag",
}


def _not_its_own(load: Load) -> list[str]:
    """Keys that belong to another user class; an own locustfile may use them all."""
    problems = [
        f"{key}: belongs to 'user: {user}', and this is {load.user}; remove it"
        for key, user in _OF_USER.items()
        if load.user in USERS and load.user != user and getattr(load, key)
    ]
    if load.user == "agent" and load.endpoint != "chat":
        problems.append("endpoint: only chat knows tools; remove it or use 'user: batch'")
    if load.user == "rag" and load.endpoint != "chat":
        problems.append("endpoint: a document goes before the question as a message; remove it")
    if load.in_flight is not None and load.batch_size is not None:
        problems.append("in_flight: give one of 'batch_size' (bursts) and 'in_flight'")
    if load.in_flight is not None and (load.think_s or load.think):
        problems.append("in_flight: there is no pause when so many are always under way; remove 'think'")
    if load.in_flight is not None and load.arrivals is not None:
        problems.append("in_flight: arrivals say when requests are sent; give one of the two")
    return problems


def _arrival_problems(arrivals: Arrivals) -> list[str]:
    problems = []
    if [arrivals.rate, arrivals.points, arrivals.wave].count(None) != 2:
        problems.append("arrivals: give exactly one of 'rate', 'points' and 'wave'")
    points = arrivals.points
    if points is not None and (
        not points
        or any(len(point) != 2 for point in points)
        or points[0][0] != 0
        or any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(points))
    ):
        problems.append(f"arrivals.points: [second, rate] from second 0 on, ascending, are expected, got {points}")
    elif points is not None and all(rate == 0 for _, rate in points):
        problems.append("arrivals.points: nobody ever arrives")
    if arrivals.wave is not None and arrivals.wave.least > arrivals.wave.most:
        problems.append(f"arrivals.wave: least {arrivals.wave.least:g} is above most {arrivals.wave.most:g}")
    if arrivals.between != "steps" and points is None:
        problems.append("arrivals.between: belongs to 'points'")
    if arrivals.burstiness != 1.0 and arrivals.spacing != "gamma":
        problems.append("arrivals.burstiness: belongs to 'spacing: gamma'")
    return problems


def _prompt_problems(prompts: Prompts, folder: Path) -> list[str]:
    problems = [f"$.prompts.tokens{problem}" for problem in lengths.problems_of(prompts.tokens, folder)]
    if prompts.tokenizer is not None and prompts.kind != "synthetic":
        problems.append("$.prompts.tokenizer: only synthetic prompts are made to a length; remove it")
    elif prompts.tokenizer not in (None, SERVER_TOKENIZER) and not (folder / str(prompts.tokenizer)).is_file():
        problems.append(
            f"$.prompts.tokenizer: there is no file {prompts.tokenizer} beside the scenario; a local tokenizer.json or "
            f"'{SERVER_TOKENIZER}' is expected, nothing is fetched"
        )
    return problems + _file_problems(prompts, folder)


def _file_problems(prompts: Prompts, folder: Path) -> list[str]:
    if prompts.kind != "file":
        return [] if prompts.file is None else ["$.prompts.file: is read only with 'kind: file'"]
    if prompts.file is None:
        return ["$.prompts.file: 'kind: file' needs a file"]
    path = folder / prompts.file
    if not path.is_file():
        return [f"$.prompts.file: there is no file {prompts.file} beside the scenario"]
    if not path.read_text(encoding="utf-8", errors="replace").strip():
        return [f"$.prompts.file: {prompts.file} is empty; one JSON object a line is expected"]
    return []


def _pair_problems(scenario: Scenario, servers: list[str], loads: list[str]) -> list[str]:
    problems = []
    rows = {f"{server}/{load}" for server in servers for load in loads}
    for number, pair in enumerate(scenario.compare):
        for key, row in (("row", pair.row), ("against", pair.against)):
            if row not in rows:
                problems.append(f"$.compare[{number}].{key}: '{row}' is not SERVER/LOAD; {did_you_mean(row, rows)}")
        if pair.row == pair.against:
            problems.append(f"$.compare[{number}]: '{pair.row}' is compared with itself")
    return problems


def _check_problems(checks: list[str], servers: list[str], loads: list[str]) -> list[str]:
    found = enumerate(misplaced(text, servers, loads) for text in checks)
    return [f"$.checks[{number}]: {problem}" for number, problem in found if problem is not None]
