"""Check the keys of a scenario against each other and against its files. The shape of each value is checked before."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from harness.base.errors import Problem, did_you_mean
from harness.base.units import count
from harness.scenario import (
    SERVER_TOKENIZER,
    USERS,
    Arrivals,
    Load,
    Prompts,
    Server,
    Trace,
    Warmup,
    can_ask_own_words,
    max_processes,
)
from harness.scenario.behaviour import Abandon, AnswerSchema, Lengths, Lognormal, Structured, is_length_file
from harness.scenario.shape import decode

_ONE_OF: dict[type, tuple[str, ...]] = {  # exactly one of these keys must be given
    Abandon: ("after_s", "after_tokens"),
    Arrivals: ("rate", "points", "wave"),
    Lengths: ("fixed", "uniform", "lognormal", "file"),
    Lognormal: ("p95", "sigma"),
    Structured: ("choice", "json_schema", "known"),
    Warmup: ("requests", "duration_s", "until"),
}
_FILES: dict[type, tuple[str, ...]] = {  # relative to the scenario
    Lengths: ("file",),
    Prompts: ("file", "tokenizer"),
    Trace: ("file",),
}
_EXCLUDED = {  # keys that a load with this key cannot have
    "agent_trace": ("arrivals", "trace", "answer", "think", "think_s"),
    "in_flight": ("batch_size", "think", "think_s", "arrivals", "trace"),
    "stages": ("requests", "duration_s", "arrivals", "trace"),
    "think": ("think_s",),
    "trace": ("requests", "duration_s", "arrivals"),
}
_OWN_FIELDS = (  # of a request's body
    "model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "stream", "stream_options",
    "ignore_eos", "n", "tools", "tool_choice", "response_format", "structured_outputs", "grammar",
)  # fmt: skip
_KEYS_OF_USER = {
    "batch": ("batch_size", "in_flight"),
    "chat": ("turns", "abandon", "regenerate"),
    "agent": ("agent",),
    "rag": ("rag",),
    "agent_trace": ("agent_trace",),
}
_NO_PATTERN = "the harness does not check it, because a pattern may backtrack without end; use 'enum', or leave it out"
Rule = tuple[object, str, str]  # whether it is broken, the path, the text


def contradictions(part: Struct, folder: Path, prompts: Prompts, path: str = "") -> Iterator[Problem]:
    """Yield the contradictions in a part of a scenario and in what is in it. `prompts`: of the scenario.

    Paths start with `path`. Files are relative to `folder`.
    """
    keys = _ONE_OF.get(type(part), ())
    if keys and sum(getattr(part, key) is not None for key in keys) != 1:
        yield Problem(path, f"give exactly one of {', '.join(map(repr, keys[:-1]))} and {keys[-1]!r}")
    for key in _FILES.get(type(part), ()):
        name = getattr(part, key)
        if name not in (None, SERVER_TOKENIZER) and not (folder / name).is_file():
            yield Problem(f"{path}.{key}", f"there is no file {name} next to the scenario")
    rules = _rules_of_load(part, folder, prompts) if isinstance(part, Load) else _rules(part)
    yield from (Problem(f"{path}{key}", text) for broken, key, text in rules if broken)
    if isinstance(part, Structured) and part.json_schema is not None:
        problems: list[Problem] = []
        decode(part.json_schema, AnswerSchema, {}, problems)
        for problem in problems:
            is_pattern = problem.path.endswith(".pattern") and problem.text.startswith("unknown key")
            text = _NO_PATTERN if is_pattern else problem.text
            yield problem._replace(path=f"{path}.json_schema{problem.path[1:]}", text=text)
    for key in part.__struct_fields__:
        if isinstance(value := getattr(part, key), Struct):
            yield from contradictions(value, folder, prompts, f"{path}.{key}")


def _rules(part: Struct) -> Iterator[Rule]:
    match part:
        case Server():
            simulated = part.template == "simulated" and part.gateway is None
            text = "only the template 'simulated', without a gateway, can run without a container"
            yield not part.container and not simulated, ".container", text
        case Prompts():
            for key, kind in (("tokenizer", "synthetic"), ("file", "file")):
                text = f"is read only with 'kind: {kind}'; remove it"
                yield getattr(part, key) is not None and part.kind != kind, f".{key}", text
            yield part.kind == "file" and part.file is None, ".file", "'kind: file' needs a file"
        case Warmup(until=None):
            for key in ("within", "max_s", "max_requests"):
                yield getattr(part, key) != getattr(Warmup(), key), f".{key}", "belongs to 'until: steady'"
        case Trace():
            text = f"the window from {part.from_s:g} to {part.to_s or 0:g} s is empty"
            yield part.to_s is not None and part.to_s <= part.from_s, ".to_s", text
        case Lengths(uniform=[low, high]):
            yield low > high, ".uniform", _order_text([low, high])
        case Lognormal():
            text = f"must be at most 'p95' and 'max' (got {part.median:g})"
            yield part.median > min(part.max, part.p95 or part.max), ".median", text
        case Arrivals():
            yield from _rules_of_arrivals(part)
        case Structured(choice=list() as choice):
            usable = {text for text in choice if text and text == text.strip()}
            yield (
                len(usable) < max(2, len(choice)),
                ".choice",
                f"two or more different texts are expected, got {choice}",
            )
        case Structured(json_schema=dict(), send="grammar"):
            yield True, ".send", "'grammar' is for a choice; use 'response_format' or 'structured_outputs'"


def _rules_of_arrivals(arrivals: Arrivals) -> Iterator[Rule]:
    points, wave = arrivals.points, arrivals.wave
    ascending = points is None or (
        points[0][0] == 0
        and all(earlier[0] < later[0] for earlier, later in itertools.pairwise(points))
        and any(rate > 0 for _, rate in points)
    )
    yield not ascending, ".points", f"[second, rate] from second 0 on, ascending, not all 0, are expected, got {points}"
    if wave is not None:
        yield wave.min > wave.max, ".wave", f"min {wave.min:g} is above max {wave.max:g}"
    yield arrivals.between != "steps" and points is None, ".between", "belongs to 'points'"
    no_gamma = arrivals.burstiness != 1.0 and arrivals.spacing != "gamma"
    yield no_gamma, ".burstiness", "belongs to 'spacing: gamma'"


def _rules_of_load(load: Load, folder: Path, prompts: Prompts) -> Iterator[Rule]:
    user, ships, embeds = load.user, load.user in USERS, load.endpoint == "embeddings"
    if not ships:
        text = f"'{user}' is neither a user class that ships nor a .py file; {did_you_mean(user, USERS)}"
        yield not user.endswith(".py"), ".user", text
        is_lost = user.endswith(".py") and not (folder / user).is_file()
        yield is_lost, ".user", f"there is no file {user} next to the scenario"
    for other, keys in _KEYS_OF_USER.items():
        for key in keys if ships and user != other else ():
            yield getattr(load, key), f".{key}", f"belongs to 'user: {other}', and this is {user}; remove it"
    yield from (*_rules_of_agent_trace(load, folder), *_rules_of_extra_body(load))
    text = "needs a chat or an agent with 'output: natural', synthetic prompts without 'tokenizer', and no 'answer'"
    yield load.isolation and not can_ask_own_words(load, prompts), ".isolation", text
    needs_chat = user in ("agent", "rag") or (user == "chat" and embeds)
    text = f"'user: {user}' needs the endpoint chat; remove it or use 'user: batch'"
    yield load.endpoint not in ("chat", "messages") and needs_chat, ".endpoint", text
    text = "Anthropic's API has no fixed length of an answer; add 'output: natural' to the load"
    yield load.endpoint == "messages" and load.output == "fixed", ".endpoint", text
    is_file = load.agent is not None and is_length_file(load.agent.result_tokens)
    yield is_file, ".agent.result_tokens", "lengths of results cannot be in a file; use another law"
    text = "Anthropic's API has no such field; remove 'answer', or use the endpoint chat"
    yield load.endpoint == "messages" and load.answer is not None, ".answer", text
    yield embeds and load.answer is not None, ".answer", "embeddings have no text to check; remove it"
    yield embeds and load.omit, ".omit", "requests for embeddings have none of these fields; remove it"
    for key, others in _EXCLUDED.items():
        for other in others if getattr(load, key) else ():
            yield getattr(load, other) is not None, f".{other}", f"does not go with '{key}'; remove one of the two"
    yield load.soak and load.duration_s is None, ".soak", "needs 'duration_s'; `harness run --duration 8h` changes it"
    if load.think_s is not None:
        yield load.think_s[0] > load.think_s[1], ".think_s", _order_text(load.think_s)
    users = max_processes(load)
    text = f"{load.processes} load processes for {count(users, 'user')}; use at most one per user"
    yield load.processes > users, ".processes", text
    yield len(load.stages) == 1, ".stages", "two or more are expected; else give 'users' and 'duration_s'"
    yield load.stages and load.users != 1, ".users", "each of the stages has its own; remove it"
    several = user in ("chat", "agent", "rag") or (load.batch_size or 1) > 1
    text = "each of its rows is one request; use 'user: batch' without 'batch_size'"
    yield load.trace is not None and several, ".trace", text
    tokenizer = None if load.prompts is None else load.prompts.tokenizer
    text = "one tokenizer serves all loads: set it in the scenario's 'prompts'"
    yield tokenizer not in (None, prompts.tokenizer), ".prompts.tokenizer", text
    models = [load.model] if isinstance(load.model, str) else load.model
    yield models is not None and (not models or "" in models), ".model", "the name of a model, or several, are expected"
    amounts = [load.requests, load.duration_s].count(None)
    no_amount = load.trace is None and not load.stages and amounts != 1
    yield no_amount, ".requests", "give exactly one of 'requests' and 'duration_s'"
    if load.abandon is not None and load.abandon.after_tokens is not None:
        text = "without 'stream' an answer comes all at once; use 'after_s'"
        yield not load.stream, ".abandon.after_tokens", text
    if load.answer is not None:
        text = "'auto' are the labels of 'prompts.kind: classification'; list the choices"
        kind = (load.prompts or prompts).kind
        yield load.answer.choice == "auto" and kind != "classification", ".answer.choice", text
        text = "'file' are the answers of 'prompts.kind: file'; for the questions that ship write 'computed'"
        yield load.answer.known == "file" and kind != "file", ".answer.known", text
        single = user == "batch" and load.trace is None and load.endpoint == "chat"
        text = "each question is one chat request without a history; use 'user: batch'"
        yield load.answer.known is not None and not single, ".answer.known", text
        text = "an answer of a form ends where the form ends; add 'output: natural' to the load"
        yield load.output == "fixed", ".answer", text


def _rules_of_extra_body(load: Load) -> Iterator[Rule]:
    text = "only requests to chat and completions have further fields; remove it"
    yield load.extra_body and load.endpoint not in ("chat", "completions"), ".extra_body", text
    for name in load.extra_body:
        yield name in _OWN_FIELDS, f".extra_body.{name}", "is a field that the load sends by its other keys; remove it"


def _rules_of_agent_trace(load: Load, folder: Path) -> Iterator[Rule]:
    trace = load.agent_trace
    missing = load.user == "agent_trace" and trace is None
    yield missing, ".agent_trace", "the file of the conversations is missing; write `agent_trace: {file: ...}`"
    if trace is None:
        return
    text = "the conversations of a trace need the endpoint chat; remove it"
    yield load.endpoint != "chat", ".endpoint", text
    text = "stages change the number of users, and with it which conversations each replays; use 'users'"
    yield load.stages, ".stages", text
    text = f"there is no file or folder {trace.file} next to the scenario"
    yield not (folder / trace.file).exists(), ".agent_trace.file", text
    text = "each conversation once, in the order of the trace, is for one user: write 'users: 1'"
    yield trace.conversations is not None and load.users != 1, ".agent_trace.conversations", text
    text = "does not go with 'conversations', which are sent whole; remove one of the two"
    yield trace.conversations is not None and trace.start is not None, ".agent_trace.start", text
    if trace.start is not None:
        yield trace.start[0] > trace.start[1], ".agent_trace.start", _order_text(trace.start)


def _order_text(values: object) -> str:
    return f"two numbers are expected, the minimum and the maximum, got {values}"
