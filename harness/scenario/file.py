"""Read a scenario file strictly, and report all its problems at once.

msgspec stops at the first error. So `_Decoder` walks the records field by field, and msgspec checks single values.
"""

import difflib
import itertools
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import replace

from harness.errors import SHOWN_PROBLEMS, HarnessError, Problem, ScenarioError, did_you_mean, suggest_row
from harness.files import read_text
from harness.scenario import (
    SERVER_TOKENIZER,
    USERS,
    Arrivals,
    Load,
    Prompts,
    Scenario,
    Sweep,
    SweepRow,
    Trace,
    Warmup,
    size_problem,
)
from harness.scenario.behaviour import Structured, answer_problems, behaviour_problems, length_problems
from harness.scenario.check_syntax import check_problem
from harness.scenario.plan import (
    expand_mixes,
    expand_stages,
    mix_names,
    mix_problems,
    stage_problems,
    stage_problems_of_load,
)
from harness.scenario.sweep import expand

T = TypeVar("T")
MAX_BYTES = 2**18  # of a scenario: YAML is read at about 100 kB a second
MAX_VALUES = 50_000  # a few aliases of aliases make billions
MAX_DIGITS = 30  # of a whole number
_PLAIN_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_PROBLEM = (
    "\\ud800 to \\udfff are halves of a character; write the whole character, or its \\U escape with eight digits"
)
_QUOTE_ADVICE = "; YAML reads on, off, yes and no so: put the word in quotes"
# Keys until 0.2.0, each with its new names; which one depends on the record.
_RENAMED = {
    "most": ("max", "max_requests"),
    "least": ("min",),
    "most_s": ("max_s",),
    "most_requests": ("max_requests",),
}
# Words for msgspec's names of types.
_TYPE_NAMES = {
    "object": "a mapping (name: value)",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}
# Values for missing keys of a faulty scenario, so that the rest can be checked.
_PLACEHOLDERS: dict[str, Any] = {"version": 1, "question": "", "model": "?", "servers": {}, "loads": {}}
_BOUND_WORDS = {"": "", ">=": " of at least ", "<=": " of at most ", ">": " above ", "<": " below "}


class ScenarioFile(Struct, frozen=True):
    scenario: Scenario  # where there are problems: only the parts that decode
    problems: list[Problem]
    lines: dict[str, int]  # line of each path
    known: dict[str, list[str]]  # names of all servers and loads, faulty ones included


def load_scenario(path: Path) -> Scenario:
    """Return the scenario in a file. Raises ScenarioError with all its problems, HarnessError when it is unreadable."""
    file = read_scenario(path)
    if file.problems:
        raise ScenarioError(str(path), file.problems)
    return file.scenario


def read_scenario(path: Path) -> ScenarioFile:
    """Return the scenario in a file with its problems. Raises HarnessError where nothing is left to check."""
    raw, lines, problems = _read_mapping(path)
    decoder = _Decoder(lines, problems)
    decoded: Scenario = decoder.value(raw, Scenario, "$")
    # Sweeps become rows ...
    scenario, found = expand(decoded, lambda load, problems: decode(load, Load, {}, problems))
    if "restart" not in raw and scenario.swept is not None:
        scenario = replace(scenario, restart=False)  # a sweep of loads needs one server start
    written, swept = scenario, scenario.swept or Sweep()
    known: dict[str, list[str]] = {}
    for part, rows in (("servers", swept.servers), ("loads", swept.loads)):
        known[part] = []
        for name in raw[part] if isinstance(raw.get(part), dict) else ():
            known[part] += [row for row in rows if rows[row].of == name] or [name]
        _add_lines(lines, part, rows)
    # ... then mixes and stages become loads.
    found += [*mix_problems(scenario, known["loads"]), *stage_problems(scenario, lines)]
    known["loads"] = [*known["loads"], *mix_names(scenario)]
    if not found:
        with_mixes = expand_mixes(scenario)
        scenario = expand_stages(with_mixes)
        known["loads"] = [name for name in known["loads"] if name not in with_mixes.loads] + list(scenario.loads)
        if too_many := size_problem(len(scenario.servers), len(scenario.loads), scenario.repeats):
            found.append(Problem("$", too_many))
    found += [Problem(f"$.{part}", "at least one is needed") for part in ("servers", "loads") if raw.get(part) == {}]
    for place, (load, bad_keys) in decoder.faulty.items():
        of_load = [*_load_problems(load, path.parent), *(stage_problems_of_load(load) if load.stages else [])]
        sure = [problem for problem in of_load if not bad_keys & {problem.path.partition(".")[0], *problem.keys}]
        found += [problem.below(f"{place}.") for problem in sure]
    found += _contradictions(written, path.parent, known)
    problems += drop_sweep_repeats([problem.located(lines) for problem in found], scenario)
    return ScenarioFile(scenario, problems, lines, known)


def _read_mapping(path: Path) -> tuple[dict[str, Any], dict[str, int], list[Problem]]:
    """Return the plain values of a scenario file, the line of each path, and problems of the YAML."""
    try:
        text = read_text(path, max_bytes=MAX_BYTES)
    except OSError as error:
        raise HarnessError(
            f"{path}: the scenario cannot be read ({error.strerror})",
            next_step="`harness scenarios` lists those that ship.",
        ) from None
    except UnicodeDecodeError:
        raise ScenarioError(str(path), ["not a text file in UTF-8"]) from None
    problems: list[Problem] = []
    raw, lines = load_yaml(text, problems)
    if not isinstance(raw, dict):
        no_mapping = Problem("$", "a scenario is a mapping (version, question, servers, loads ...)")
        raise ScenarioError(str(path), problems or [no_mapping])
    version = raw.get("version")
    if isinstance(version, int) and version > 1:
        newer = Problem("$.version", f"{version} was written for a newer harness; this one reads version 1")
        raise ScenarioError(str(path), [newer])
    counts = [len(raw[part]) if isinstance(raw.get(part), dict) else 1 for part in ("servers", "loads")]
    if too_many := size_problem(*counts):
        raise ScenarioError(str(path), [Problem("$", too_many)])
    if "swept" in raw:  # set by the harness only
        problems.append(Problem("$.swept", "unknown key; vary settings with 'vary' of a server or load").located(lines))
        del raw["swept"]
    return raw, lines, problems


def _add_lines(lines: dict[str, int], part: str, rows: dict[str, SweepRow]) -> None:
    """Give each row of a sweep the lines of its server or load."""
    for name, row in rows.items():
        source, place = f"$.{part}.{row.of}", f"$.{part}.{name}"
        lines |= {
            place + path.removeprefix(source): line
            for path, line in lines.items()
            if path == source or path.startswith((f"{source}.", f"{source}["))
        }
        for key in row.settings:
            setting = f"{place}.variables.{key}" if part == "servers" else f"{place}.{key}"
            lines[setting] = lines.get(f"{source}.vary.{key}", lines.get(source, 1))


def drop_sweep_repeats(problems: list[Problem], scenario: Scenario) -> list[Problem]:
    """Drop the problems that an earlier row of the same sweep has too."""
    if scenario.swept is None:
        return problems
    names = {f"$.servers.{name}": row.of for name, row in scenario.swept.servers.items()}
    names |= {f"$.loads.{name}": row.of for name, row in scenario.swept.loads.items()}
    first: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        start = ".".join(problem.path.split(".")[:3])
        path = problem.path.replace(start, names[start], 1) if start in names else problem.path
        first.setdefault((path, problem.text), problem)
    return list(first.values())


# --- YAML


class _TooManyValues(Exception):
    """More values than a scenario can have."""


def load_yaml(text: str, problems: list[Problem]) -> tuple[Any, dict[str, int]]:
    """Return the plain value of a YAML document and the line (from 1) of each path. Adds its mistakes to `problems`."""
    lines: dict[str, int] = {}

    def wrong(text: str) -> tuple[None, dict[str, int]]:
        problems.append(Problem("", text))
        return None, {}

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        return wrong(f"not valid YAML{at}: {getattr(error, 'problem', None) or ' '.join(str(error).split())}")
    except RecursionError:
        return wrong("not a scenario: its lists and mappings are nested too deeply")
    try:
        return (_plain_value(node, "$", lines, problems) if node is not None else None), lines
    except RecursionError:
        return wrong("an alias (*name) refers to what contains it")
    except _TooManyValues:
        return wrong(f"it has more than {MAX_VALUES:,} values, counting what aliases (*name) repeat")


def _plain_value(node: yaml.Node, path: str, lines: dict[str, int], problems: list[Problem]) -> Any:
    line = node.start_mark.line + 1

    def wrong(text: str) -> None:
        problems.append(Problem(path, text, line))

    if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
        wrong(f"{_SURROGATE_PROBLEM} (got {node.value!r})")
        return _SURROGATE.sub("?", node.value)
    lines[path] = line
    if len(lines) > MAX_VALUES:
        raise _TooManyValues
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, path, lines, problems)
    if isinstance(node, yaml.SequenceNode):
        return [_plain_value(item, f"{path}[{i}]", lines, problems) for i, item in enumerate(node.value)]
    if node.tag == "tag:yaml.org,2002:int":
        if len(node.value) > MAX_DIGITS:
            wrong(f"a whole number of {len(node.value):,} digits; at most {MAX_DIGITS} are read")
            return 1  # a number, so that no second problem follows
        if not _PLAIN_INTEGER.fullmatch(node.value):  # YAML 1.1: 010 is 8, 1:30 is 90
            wrong(f"'{node.value}' is not a plain whole number; write it in digits")
            return 1
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if plain and node.tag == "tag:yaml.org,2002:str" and _EXPONENT.fullmatch(node.value):
        return float(node.value)  # YAML 1.1 reads 1e3 as a text
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        wrong(str(error))
        return None
    finally:
        constructor.dispose()


def _plain_mapping(node: yaml.MappingNode, path: str, lines: dict[str, int], problems: list[Problem]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if (problem := _key_problem(key_node)) is not None:
            problems.append(Problem(path, problem, line))
            continue
        key = str(key_node.value)
        if key in mapping:
            problems.append(Problem(f"{path}.{key}", "written twice; keep one", line))
        mapping[key] = _plain_value(value_node, f"{path}.{key}", lines, problems)
        lines[f"{path}.{key}"] = line
    return mapping


def _key_problem(node: yaml.Node) -> str | None:
    """Return why the node in front of a colon cannot be a key; None: it can."""
    if not isinstance(node, yaml.ScalarNode):
        return "a key is a name, not a list or mapping"
    if _SURROGATE.search(node.value):
        return f"{_SURROGATE_PROBLEM} (got {node.value!r})"
    if node.tag == "tag:yaml.org,2002:merge":
        return "merging with << is not done; write the keys out, or repeat a whole value with an alias: name: *other"
    return None


# --- Types


def decode(raw: Any, type_: type[T], lines: dict[str, int], problems: list[Problem]) -> T | None:
    """Return `raw` as a `type_`. Adds what is wrong to `problems`, and then returns None."""
    value: T | None = _Decoder(lines, problems).value(raw, type_, "$")
    return value


class _Decoder:
    def __init__(self, lines: dict[str, int], problems: list[Problem]) -> None:
        self.lines = lines
        self.problems = problems
        # By path: faulty loads without the keys that do not decode, and these keys.
        self.faulty: dict[str, tuple[Load, set[str]]] = {}

    def wrong(self, path: str, text: str) -> None:
        self.problems.append(Problem(path, text).located(self.lines))

    def value(self, raw: Any, type_: Any, path: str) -> Any:
        origin, args = typing.get_origin(type_), typing.get_args(type_)
        if origin in (types.UnionType, typing.Union) and len(args) == 2:
            if type(None) in args:
                return None if raw is None else self.value(raw, args[0] if args[1] is type(None) else args[1], path)
            if isinstance(args[1], type):  # a plain value, or a mapping with details
                is_struct = issubclass(args[1], Struct) and isinstance(raw, dict)
                return self.value(raw, args[1] if is_struct else args[0], path)
        if isinstance(type_, type) and issubclass(type_, Struct) and isinstance(raw, dict):
            return self.struct(raw, type_, path)
        if origin is dict and isinstance(raw, dict) and args[1] is not Any:
            return self.mapping(raw, args[0], args[1], path)
        if origin is list and isinstance(raw, list):
            return [self.value(item, args[0], f"{path}[{i}]") for i, item in enumerate(raw)]
        if origin is typing.Literal and raw not in args:
            known = list(map(str, args))
            close = difflib.get_close_matches(str(raw), known, n=1)
            advice = f"; did you mean '{close[0]}'?" if close else ""
            advice = "; write it without quotes" if raw in close else advice
            return self.wrong(path, f"expected one of {', '.join(known)}, got {_short_repr(raw)}{advice}")
        return self.leaf(raw, type_, path)

    def mapping(self, raw: dict[Any, Any], key_type: Any, value_type: Any, path: str) -> dict[Any, Any]:
        """Return the entries that decode."""
        decoded = {}
        for key, raw_value in raw.items():
            problem_count = len(self.problems)
            try:
                msgspec.convert(key, key_type)
            except msgspec.ValidationError as error:
                self.wrong(f"{path}.{key}", f"'{key}' is not a name: {_meta_description(key_type) or error}")
            value = self.value(raw_value, value_type, f"{path}.{key}")
            if len(self.problems) == problem_count:
                decoded[key] = value
        return decoded

    def leaf(self, raw: Any, type_: Any, path: str) -> Any:
        try:
            return msgspec.convert(raw, type_)
        except msgspec.ValidationError as error:
            expected = _meta_description(type_) or _expected_text(error)
            # A value in place of the name of a secret may be the secret.
            hidden = any((meta.extra or {}).get("hidden") for meta in _metas(type_))
            words = raw if isinstance(raw, list) else [raw]
            advice = _QUOTE_ADVICE if "text" in expected and any(isinstance(word, bool) for word in words) else ""
            self.wrong(path, f"{expected}{'' if hidden else f', got {_short_repr(raw)}'}{advice}")

    def struct(self, raw: dict[str, Any], type_: type[Struct], path: str) -> Any:
        hints = typing.get_type_hints(type_, include_extras=True)
        fields = {field.encode_name: field for field in msgspec.structs.fields(type_)}
        values: dict[str, Any] = {}
        bad_keys: set[str] = set()
        for key, value in raw.items():
            problem_count = len(self.problems)
            if key in fields:
                name = fields[key].name
                values[name] = self.value(value, hints[name], f"{path}.{key}")
            elif new := [name for name in _RENAMED.get(key, ()) if name in fields]:
                bad_keys.add(new[0])
                self.wrong(f"{path}.{key}", f"this key is now '{new[0]}'")
            else:
                advice = did_you_mean(key, fields) if problem_count < SHOWN_PROBLEMS else ""
                self.wrong(f"{path}.{key}", f"unknown key; {advice}")
            if len(self.problems) > problem_count:
                bad_keys.add(key)
                if key not in ("servers", "loads") or not isinstance(value, dict):  # these keep the entries that decode
                    values.pop(key, None)
        for key, field in fields.items():
            if field.required and key not in raw and key not in bad_keys:
                hint = hints[field.name]
                allowed = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
                advice = f"; write {key}: {allowed[0]}" if len(allowed) == 1 else ""
                self.wrong(path, f"'{key}' is missing{advice}")
                bad_keys.add(key)
        if type_ is Scenario:
            return Scenario(**(_PLACEHOLDERS | values))
        if type_ is Load and bad_keys and "user" in values:
            misspelled = {name for key in bad_keys for name in difflib.get_close_matches(key, fields, n=1)}
            self.faulty[path] = Load(**values), bad_keys | misspelled
        return None if bad_keys else type_(**values)


def _metas(type_: Any) -> list[msgspec.Meta]:
    return [arg for arg in typing.get_args(type_) if isinstance(arg, msgspec.Meta)]


def _meta_description(type_: Any) -> str | None:
    return next((meta.description for meta in _metas(type_) if meta.description), None)


def _expected_text(error: msgspec.ValidationError) -> str:
    """Return the expected type and bounds, in words for the author of a YAML file."""
    text = str(error).split(" - at ")[0].split(", got ")[0]
    match = re.fullmatch(r"Expected `([\w| ]+)`(?: ([<>]=?) ([\d.]+))?", text)
    kinds = [kind for kind in match[1].split(" | ") if kind != "null"] if match else []
    if match is None or not set(kinds) <= set(_TYPE_NAMES):
        return text
    bound = f"{_BOUND_WORDS[match[2] or '']}{match[3].removesuffix('.0') if match[3] else ''}"
    return f"{' or '.join(_TYPE_NAMES[kind] for kind in kinds)}{bound} is expected"


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- Contradictions


def _contradictions(scenario: Scenario, folder: Path, known: dict[str, list[str]]) -> Iterator[Problem]:
    """Check keys against each other. `known`: names of all servers and loads, faulty ones included."""
    for name, load in scenario.loads.items():
        yield from (problem.below(f"$.loads.{name}.") for problem in _load_problems(load, folder))
    for name, server in ((name, server) for name, server in scenario.servers.items() if not server.container):
        if server.template != "simulated":
            text = f"only the template 'simulated' can run without a container, not '{server.template}'"
            yield Problem(f"$.servers.{name}.container", text)
        if server.gateway is not None:
            yield Problem(f"$.servers.{name}.gateway", "needs a server in a container; remove 'container: false'")
    servers, loads = known["servers"], known["loads"]
    if (base := scenario.baseline) is not None:
        if base.server not in servers:
            yield Problem("$.baseline.server", f"'{base.server}' is not a server; {did_you_mean(base.server, servers)}")
        if base.load not in loads:
            yield Problem("$.baseline.load", f"'{base.load}' is not a load; {suggest_row(base.load, loads)}")
    if scenario.warmup is not None:
        yield from warmup_problems(scenario.warmup)
    yield from _prompt_problems(scenario.prompts, folder)
    for name, load in scenario.loads.items():
        for problem in [] if load.answer is None else _answer_problems(load.answer, load, scenario.prompts):
            yield problem.below(f"$.loads.{name}.answer")
    rows = [f"{server}/{load}" for server in servers for load in loads]
    for number, pair in enumerate(scenario.compare):
        for key, row in (("row", pair.row), ("against", pair.against)):
            if row not in rows:
                yield Problem(f"$.compare[{number}].{key}", f"'{row}' is not SERVER/LOAD; {suggest_row(row, rows)}")
        if pair.row == pair.against:
            yield Problem(f"$.compare[{number}]", f"'{pair.row}' is compared with itself")
    for number, check in enumerate(scenario.checks):
        if (mistake := check_problem(check, servers, loads)) is not None:
            yield Problem(f"$.checks[{number}]", mistake)


def warmup_problems(warmup: Warmup) -> Iterator[Problem]:
    if [warmup.requests, warmup.duration_s, warmup.until].count(None) != 2:
        yield Problem("$.warmup", "give exactly one of 'requests', 'duration_s' and 'until'")
    if warmup.until is None:
        for key in ("within", "max_s", "max_requests"):
            if getattr(warmup, key) != getattr(Warmup(), key):
                yield Problem(f"$.warmup.{key}", "belongs to 'until: steady'")


def _prompt_problems(prompts: Prompts, folder: Path) -> Iterator[Problem]:
    yield from (problem.below("$.prompts.tokens") for problem in length_problems(prompts.tokens, folder))
    if prompts.tokenizer is not None and prompts.kind != "synthetic":
        yield Problem("$.prompts.tokenizer", "only synthetic prompts are made to a length; remove it")
    elif prompts.tokenizer not in (None, SERVER_TOKENIZER) and not (folder / str(prompts.tokenizer)).is_file():
        yield Problem(
            "$.prompts.tokenizer",
            f"there is no file {prompts.tokenizer} next to the scenario; a local tokenizer.json or "
            f"'{SERVER_TOKENIZER}' is expected, nothing is fetched",
        )
    if prompts.file is None:
        if prompts.kind == "file":
            yield Problem("$.prompts.file", "'kind: file' needs a file")
    elif prompts.kind != "file":
        yield Problem("$.prompts.file", "is read only with 'kind: file'")
    elif not (folder / prompts.file).is_file():
        yield Problem("$.prompts.file", f"there is no file {prompts.file} next to the scenario")
    elif not read_text(folder / prompts.file, errors="replace").strip():
        yield Problem("$.prompts.file", f"{prompts.file} is empty; one JSON object a line is expected")


def _answer_problems(answer: Structured, load: Load, prompts: Prompts) -> Iterator[Problem]:
    yield from answer_problems(answer)
    if answer.choice == "auto" and prompts.kind != "classification":
        yield Problem(".choice", "'auto' are the labels of 'prompts.kind: classification'; list the choices")
    if load.output == "fixed":
        yield Problem("", "an answer of a form ends where the form ends; add 'output: natural' to the load")


_KEYS_OF_USER = {
    "batch": ("batch_size", "in_flight"),
    "chat": ("turns", "abandon", "regenerate"),
    "agent": ("agent",),
    "rag": ("rag",),
}


def _load_problems(load: Load, folder: Path) -> Iterator[Problem]:
    yield from _user_problems(load, folder)
    yield from load_problems(load, folder)
    if load.trace is None and not load.stages and (load.requests is None) == (load.duration_s is None):
        keys = ("duration_s", "trace", "stages")
        yield Problem("requests", "give exactly one of 'requests' and 'duration_s'", keys=keys)
    if load.trace is not None:
        yield from _trace_problems(load, load.trace, folder)


def load_problems(load: Load, folder: Path) -> Iterator[Problem]:
    """Check the keys of a load that do not depend on its user class and its amount of work."""
    yield from behaviour_problems(load.think, load.think_s, load.abandon)
    yield from (problem.below("output_tokens") for problem in length_problems(load.output_tokens, folder))
    if load.abandon is not None and load.abandon.after_tokens is not None and not load.stream:
        text = "without 'stream' an answer comes all at once; use 'after_s'"
        yield Problem("abandon.after_tokens", text, keys=("stream",))
    users = min((stage.users for stage in load.stages), default=load.users)
    if load.processes > users:
        text = f"{load.processes} load processes for {users} users; use at most one per user"
        yield Problem("processes", text, keys=("users", "stages"))
    if load.endpoint == "embeddings" and load.answer is not None:
        yield Problem("answer", "embeddings have no text to check; remove it")
    if load.in_flight is not None and load.batch_size is not None:
        yield Problem("in_flight", "give one of 'batch_size' (bursts) and 'in_flight'", keys=("batch_size",))
    if load.in_flight is not None and (load.think_s or load.think):
        text = "there is no pause when so many are always under way; remove 'think'"
        yield Problem("in_flight", text, keys=("think",))
    if load.in_flight is not None and load.arrivals is not None:
        yield Problem("in_flight", "arrivals say when requests are sent; give one of the two")
    if load.arrivals is not None:
        yield from (problem.below("arrivals") for problem in _arrival_problems(load.arrivals))


def _user_problems(load: Load, folder: Path) -> Iterator[Problem]:
    if load.user not in USERS and not load.user.endswith(".py"):
        file = f"{load.user}.py"
        advice = f"write '{file}'" if (folder / file).is_file() else did_you_mean(load.user, USERS)
        yield Problem("user", f"'{load.user}' is neither a user class that ships nor a .py file; {advice}")
    elif load.user not in USERS and not (folder / load.user).is_file():
        yield Problem("user", f"there is no file {load.user} next to the scenario")
    for user, keys in _KEYS_OF_USER.items():
        for key in keys:
            if load.user in USERS and load.user != user and getattr(load, key):
                yield Problem(key, f"belongs to 'user: {user}', and this is {load.user}; remove it")
    chat_only = {
        "agent": "only chat knows tools; remove it or use 'user: batch'",
        "rag": "a document goes before the question as a message; remove it",
    }
    if load.endpoint == "embeddings":
        chat_only["chat"] = "a conversation needs answers; use 'user: batch'"
    if load.endpoint != "chat" and load.user in chat_only:
        yield Problem("endpoint", chat_only[load.user], keys=("user",))


def _trace_problems(load: Load, trace: Trace, folder: Path) -> Iterator[Problem]:
    for key in ("requests", "duration_s", "arrivals"):
        if getattr(load, key) is not None:
            advice = "" if key == "arrivals" else "; its window (from_s, to_s) and 'max_requests' say how much"
            yield Problem(key, f"a trace says itself what is sent and when; remove it{advice}", keys=("trace",))
    if load.user in ("chat", "agent", "rag") or (load.batch_size or 1) > 1:
        text = "each of its rows is one request; use 'user: batch' without 'batch_size'"
        yield Problem("trace", text, keys=("user", "batch_size"))
    if load.in_flight is not None:
        yield Problem("in_flight", "a trace says when requests are sent; remove it")
    if not (folder / trace.file).is_file():
        yield Problem("trace.file", f"there is no file {trace.file} next to the scenario")
    if trace.to_s is not None and trace.to_s <= trace.from_s:
        yield Problem("trace.to_s", f"the window from {trace.from_s:g} to {trace.to_s:g} s is empty")


def _arrival_problems(arrivals: Arrivals) -> Iterator[Problem]:
    if [arrivals.rate, arrivals.points, arrivals.wave].count(None) != 2:
        yield Problem("", "give exactly one of 'rate', 'points' and 'wave'")
    points = arrivals.points
    if points is not None and (
        not points
        or any(len(point) != 2 for point in points)
        or points[0][0] != 0
        or any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(points))
    ):
        yield Problem(".points", f"[second, rate] from second 0 on, ascending, are expected, got {points}")
    elif points is not None and all(rate == 0 for _, rate in points):
        yield Problem(".points", "all rates are 0")
    if arrivals.wave is not None and arrivals.wave.min > arrivals.wave.max:
        yield Problem(".wave", f"min {arrivals.wave.min:g} is above max {arrivals.wave.max:g}")
    if arrivals.between != "steps" and points is None:
        yield Problem(".between", "belongs to 'points'")
    if arrivals.burstiness != 1.0 and arrivals.spacing != "gamma":
        yield Problem(".burstiness", "belongs to 'spacing: gamma'")
