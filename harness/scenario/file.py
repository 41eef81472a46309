"""A scenario file: read strictly, with everything that is wrong with it at once."""

import difflib
import itertools
import re
from pathlib import Path
from typing import Any

from msgspec import Struct

from harness.errors import HarnessError, ScenarioError, did_you_mean, which_row
from harness.files import read_text
from harness.scenario import behaviour, lengths, mixes, stages, structured
from harness.scenario.check_syntax import misplaced
from harness.scenario.scenario import (
    SERVER_TOKENIZER,
    USERS,
    Arrivals,
    Load,
    Prompts,
    Scenario,
    Server,
    Trace,
    Warmup,
    too_large,
)
from harness.scenario.strict import decode, load_yaml, where

MOST_BYTES = 2**18  # of a scenario: YAML is read at about 100 kB a second


class Read(Struct, frozen=True):
    """A scenario file as read: all that is wrong with it, and what of it is right."""

    scenario: Scenario  # with problems: only its parts that decode
    problems: list[str]
    lines: dict[str, int]  # line of each path
    known: dict[str, list[str]]  # names of all servers and loads, faulty ones included


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
        text = read_text(path, most=MOST_BYTES)
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
    rows = [len(raw[part]) if isinstance(raw.get(part), dict) else 1 for part in ("servers", "loads")]
    if too_many := too_large(*rows):
        raise ScenarioError(str(path), [f"$: {too_many}"])
    scenario = written = decode(raw, Scenario, lines, problems) or _what_decodes(raw)
    known = {part: list(raw[part]) if isinstance(raw.get(part), dict) else [] for part in ("servers", "loads")}
    wrong = mixes.problems_of(scenario, known["loads"]) + stages.problems_of(scenario, lines)
    known["loads"] = [*known["loads"], *mixes.names(scenario)]
    if not wrong:
        whole = mixes.expanded(scenario)
        scenario = stages.expanded(whole)
        known["loads"] = [name for name in known["loads"] if name not in whole.loads] + list(scenario.loads)
        if too_many := too_large(len(scenario.servers), len(scenario.loads), scenario.repeats):
            wrong.append(f"$: {too_many}")
    wrong += [f"$.{part}: at least one is needed" for part in ("servers", "loads") if raw.get(part) == {}]
    faulty = {name: item for name, item in _mappings(raw.get("loads")) if name not in written.loads}
    wrong += [f"$.loads.{name}.{said}" for name, item in faulty.items() for said in _of_the_rest(item, path.parent)]
    for problem in [*wrong, *_contradictions(written, path.parent, known)]:
        place, _, rest = problem.partition(":")
        problems.append(f"{where(place, lines)}:{rest}")
    return Read(scenario, problems, lines, known)


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


# What is said of a key depends on others.
_DEPENDS = {"requests": {"duration_s", "trace", "stages"}, "processes": {"users", "stages"}}


def _of_the_rest(raw: dict[str, Any], folder: Path) -> list[str]:
    """What of a load contradicts itself whatever the keys that do not decode are meant to say."""
    problems: list[str] = []
    decode(raw, Load, {}, problems)
    bad = {found[1] for problem in problems if (found := re.match(r"\$\.([^\s.:\[]+)", problem))}
    load = decode({key: value for key, value in raw.items() if key not in bad}, Load, {}, [])
    if load is None:
        return []
    meant = {one for key in bad for one in difflib.get_close_matches(key, Load.__struct_fields__, n=1)}
    unsure = bad | meant | {key for key, others in _DEPENDS.items() if others & (bad | meant)}
    said = _load_problems(load, folder) + (stages.of_load(load) if load.stages else [])
    return [problem for problem in said if not unsure & set(re.findall(r"(?:^|')([a-z_]+)", problem))]


def _mappings(raw: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(name, item) for name, item in raw.items() if isinstance(item, dict)] if isinstance(raw, dict) else []


def _contradictions(scenario: Scenario, folder: Path, known: dict[str, list[str]]) -> list[str]:
    """What is well-formed but cannot be meant. `known`: names of all servers and loads, faulty ones included."""
    problems = []
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
        problems.append(f"$.baseline.load: '{base.load}' is not a load; {which_row(base.load, loads)}")
    problems += _warmup_problems(scenario.warmup) if scenario.warmup is not None else []
    problems += _prompt_problems(scenario.prompts, folder) + _answer_problems(scenario)
    problems += _pair_problems(scenario, servers, loads)
    misplaced_checks = enumerate(misplaced(text, servers, loads) for text in scenario.checks)
    return problems + [f"$.checks[{number}]: {problem}" for number, problem in misplaced_checks if problem is not None]


def _warmup_problems(warmup: Warmup) -> list[str]:
    problems = []
    if [warmup.requests, warmup.duration_s, warmup.until].count(None) != 2:
        problems.append("$.warmup: give exactly one of 'requests', 'duration_s' and 'until'")
    if warmup.until is None:
        default = Warmup()
        problems += [
            f"$.warmup.{key}: belongs to 'until: steady'"
            for key in ("within", "most_s", "most_requests")
            if getattr(warmup, key) != getattr(default, key)
        ]
    return problems


def _load_problems(load: Load, folder: Path) -> list[str]:
    problems = []
    if load.trace is None and not load.stages and (load.requests is None) == (load.duration_s is None):
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
    users = min((stage.users for stage in load.stages), default=load.users)
    if load.processes > users:
        problems.append(f"processes: {load.processes} load processes for {users} users; use at most one per user")
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
    "batch": ("batch_size", "in_flight"),
    "chat": ("turns", "abandon", "regenerate"),
    "agent": ("agent",),
    "rag": ("rag",),
}


def _not_its_own(load: Load) -> list[str]:
    """Keys that belong to another user class; an own locustfile may use them all."""
    problems = [
        f"{key}: belongs to 'user: {user}', and this is {load.user}; remove it"
        for user, keys in _OF_USER.items()
        for key in keys
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
    if not read_text(path, errors="replace").strip():
        return [f"$.prompts.file: {prompts.file} is empty; one JSON object a line is expected"]
    return []


def _pair_problems(scenario: Scenario, servers: list[str], loads: list[str]) -> list[str]:
    problems = []
    rows = [f"{server}/{load}" for server in servers for load in loads]
    for number, pair in enumerate(scenario.compare):
        for key, row in (("row", pair.row), ("against", pair.against)):
            if row not in rows:
                problems.append(f"$.compare[{number}].{key}: '{row}' is not SERVER/LOAD; {which_row(row, rows)}")
        if pair.row == pair.against:
            problems.append(f"$.compare[{number}]: '{pair.row}' is compared with itself")
    return problems
