"""Read a scenario file strictly, and report all its problems at once.

msgspec stops at the first error. So `_Decoder` walks the records field by field, and msgspec checks single values.
"""

import itertools
import math
import re
import types
import typing
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import replace

from harness.errors import (
    SHOWN_PROBLEMS,
    HarnessError,
    Problem,
    ScenarioError,
    closest_name,
    did_you_mean,
    suggest_row,
)
from harness.files import read_text
from harness.scenario import (
    SERVER_TOKENIZER,
    USERS,
    Arrivals,
    Load,
    Prompts,
    Scenario,
    Server,
    Sweep,
    SweepRow,
    Trace,
    Warmup,
    size_problem,
)
from harness.scenario.behaviour import Structured, answer_problems, behaviour_problems, length_problems
from harness.scenario.check_syntax import check_problem
from harness.scenario.plan import expand_mixes, expand_stages, mix_names, mix_problems, stage_problems
from harness.scenario.sweep import expand

T = TypeVar("T")
MAX_BYTES = 2**18  # of a scenario: YAML is read at about 100 kB a second
MAX_VALUES = 50_000  # a few aliases of aliases make billions
MAX_TEXT = 2**20  # characters of all texts, likewise
MAX_DEPTH = 64  # of nested lists and mappings
MAX_KEY = 200  # characters
_MAX_ROWS = 1000  # with which a misspelled row is compared
_TOO_DEEP = "its lists and mappings are nested too deeply, or an alias (*name) refers to what contains it"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,29})")
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_QUOTE_ADVICE = "; YAML reads on, off, yes and no so: put the word in quotes"
# Words for msgspec's names of types, and of bounds.
_TYPE_NAMES = {
    "object": "a mapping (name: value)",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}
_BOUND_WORDS = {"": "", ">=": " of at least ", "<=": " of at most ", ">": " above ", "<": " below "}
# Values for missing keys of a faulty scenario, so that the rest can be checked.
_PLACEHOLDERS: dict[str, Any] = {"version": 1, "question": "", "model": "?", "servers": {}, "loads": {}}


class ScenarioFile(Struct, frozen=True):
    scenario: Scenario  # where there are problems: only the parts that decode
    problems: list[Problem]
    lines: dict[str, int]  # line of each path
    servers: Collection[str]  # names of all servers and loads, faulty ones included
    loads: Collection[str]


class _Names(list[str]):
    """Known names, among them those of faulty servers or loads. A name with one of the prefixes may be right, too."""

    def __init__(self, names: Iterable[str], faulty: Iterable[str], prefixes: Iterable[str]) -> None:
        self.faulty, self.prefixes = tuple(faulty), tuple(prefixes)
        super().__init__([*names, *self.faulty])

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name).startswith(self.prefixes)


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
    scenario, found = expand(decoded, lambda load, problems: decode(load, Load, {}, problems))
    if "restart" not in raw and scenario.swept is not None:
        scenario = replace(scenario, restart=False)  # a sweep of loads needs one server start
    _add_lines_of_rows(lines, scenario)
    swept = scenario.swept or Sweep()
    servers = _known_names(raw.get("servers"), scenario.servers, swept.servers)
    loads = _known_names(raw.get("loads"), scenario.loads, swept.loads)
    found += mix_problems(scenario, loads)
    found += [Problem(f"$.{part}", "at least one is needed") for part in ("servers", "loads") if raw.get(part) == {}]
    faulty = decoder.faulty | {f"$.loads.{name}": load for name, load in decoded.loads.items() if name in loads.faulty}
    wrong = _wrong_keys(problems + found)
    found += _contradictions(scenario, faulty, wrong, path.parent)
    parts, prefixes = mix_names(scenario), [f"{mix}." for mix in wrong["$.mixes"]]
    scenario = expand_stages(expand_mixes(scenario))
    loads = _Names([*scenario.loads, *parts], loads.faulty, [*loads.prefixes, *prefixes])
    if too_many := size_problem(len(scenario.servers), len(scenario.loads), scenario.repeats):
        found.append(Problem("$", too_many))
    else:
        found += _reference_problems(scenario, servers, loads)
    problems += drop_sweep_repeats([problem.located(lines) for problem in found], scenario)
    return ScenarioFile(scenario, problems, lines, servers, loads)


def _known_names(raw: object, decoded: Collection[str], rows: dict[str, SweepRow]) -> _Names:
    """Return the names of all servers or loads. `raw`: as the file has them; `decoded`: those with a value."""
    if not isinstance(raw, dict) or not raw:
        return _Names(decoded, [], [""])
    usable = {*decoded, *(row.of for row in rows.values())}
    faulty = [name for name in raw if name not in usable]
    return _Names(decoded, faulty, [f"{name}{sign}" for name in faulty for sign in "-@"])  # its rows and stages


def _read_mapping(path: Path) -> tuple[dict[str, Any], dict[str, int], list[Problem]]:
    """Return the plain values of a scenario file, the line of each path, and problems of the YAML."""
    try:
        text = read_text(path, max_bytes=MAX_BYTES)
    except OSError as error:
        raise HarnessError(
            f"{path}: the scenario cannot be read ({error.strerror})",
            next_step="`harness list scenarios` lists those that ship.",
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
    if raw.pop("swept", None) is not None:  # set by the harness only
        problems.append(Problem("$.swept", "unknown key; vary settings with 'vary' of a server or load").located(lines))
    return raw, lines, problems


def _add_lines_of_rows(lines: dict[str, int], scenario: Scenario) -> None:
    """Give each row of a sweep the line of its server or load, and its settings those of `vary`."""
    swept = scenario.swept
    for part, rows in () if swept is None else (("servers", swept.servers), ("loads", swept.loads)):
        for name, row in rows.items():
            source, place = f"$.{part}.{row.of}", f"$.{part}.{name}"
            lines[place] = lines.get(source, 1)
            for key in row.settings:
                setting = f"{place}.variables.{key}" if part == "servers" else f"{place}.{key}"
                lines[setting] = lines.get(f"{source}.vary.{key}", lines[place])


def drop_sweep_repeats(problems: list[Problem], scenario: Scenario) -> list[Problem]:
    """Drop the problems that an earlier row of the same sweep has too."""
    if scenario.swept is None:
        return problems
    first: dict[object, Problem] = {}
    for problem in problems:
        first.setdefault((problem.line, problem.path.rpartition(".")[2], problem.text), problem)
    return list(first.values())


# --- YAML


class _UnusableError(Exception):
    """Why a document cannot be used."""


def load_yaml(text: str, problems: list[Problem]) -> tuple[Any, dict[str, int]]:
    """Return the plain value of a YAML document and the line (from 1) of each path. Adds its mistakes to `problems`."""
    lines: dict[str, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return None, lines
        _refuse_large(node)
        return _plain_value(node, "$", lines, problems), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        wrong = f"not valid YAML{at}: {getattr(error, 'problem', None) or ' '.join(str(error).split())}"
    except RecursionError:
        wrong = _TOO_DEEP
    except _UnusableError as error:
        wrong = str(error)
    problems.append(Problem("", wrong))
    return None, {}


def _refuse_large(root: yaml.Node) -> None:
    """Raise _UnusableError for a document that is too large or too deep, counting what aliases repeat."""
    values = characters = 0
    nodes = [(root, 0)]
    while nodes:
        node, depth = nodes.pop()
        values += 1
        if depth > MAX_DEPTH:
            raise _UnusableError(_TOO_DEEP)
        if isinstance(node, yaml.ScalarNode):
            characters += len(node.value)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                nodes.append((value, depth + 1))
                if isinstance(key, yaml.ScalarNode):
                    _check_key(key)
        else:
            nodes += [(item, depth + 1) for item in node.value]
        if values > MAX_VALUES or len(nodes) > MAX_VALUES:
            raise _UnusableError(f"it has more than {MAX_VALUES:,} values, counting what aliases (*name) repeat")
        if characters > MAX_TEXT:
            raise _UnusableError(f"it has more than {MAX_TEXT:,} characters, counting what aliases (*name) repeat")


def _check_key(key: yaml.ScalarNode) -> None:
    line = key.start_mark.line + 1
    if len(key.value) > MAX_KEY:
        raise _UnusableError(f"line {line}: a key has at most {MAX_KEY} characters (got {len(key.value):,})")
    if _CONTROL.search(key.value) or "\n" in key.value or "\t" in key.value:
        raise _UnusableError(f"line {line}: a key has no line ends and no control characters (got {key.value!r})")


def _plain_value(node: yaml.Node, path: str, lines: dict[str, int], problems: list[Problem]) -> Any:
    lines[path] = line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, path, lines, problems)
    if isinstance(node, yaml.SequenceNode):
        return [_plain_value(item, f"{path}[{i}]", lines, problems) for i, item in enumerate(node.value)]
    _refuse_surrogates(node)
    if _CONTROL.search(node.value):
        problems.append(Problem(path, f"a text has no control characters (got {_short_repr(node.value)})", line))
        return ""
    if node.tag == "tag:yaml.org,2002:int" and not _PLAIN_INTEGER.fullmatch(node.value):  # YAML 1.1: 010 is 8
        text = f"'{node.value[:40]}' is not a plain whole number of at most 30 digits; write it in digits"
        problems.append(Problem(path, text, line))
        return 1  # a number, so that no second problem follows
    if node.tag == "tag:yaml.org,2002:str" and not getattr(node, "style", None) and _EXPONENT.fullmatch(node.value):
        return _finite(float(node.value), path, line, problems)  # YAML 1.1 reads 1e3 as a text
    constructor = yaml.SafeLoader("")
    try:
        value = constructor.construct_object(node)
        return _finite(value, path, line, problems) if isinstance(value, float) else value
    except (yaml.YAMLError, ValueError) as error:
        problems.append(Problem(path, str(error), line))
        return None
    finally:
        constructor.dispose()


def _finite(number: float, path: str, line: int, problems: list[Problem]) -> float:
    if math.isfinite(number):
        return number
    problems.append(Problem(path, f"a finite number is expected, got {number:g}", line))
    return 1.0  # a number, so that no second problem follows


def _refuse_surrogates(node: yaml.Node) -> None:
    if _SURROGATE.search(node.value):
        line = node.start_mark.line + 1
        raise _UnusableError(f"line {line}: \\ud800 to \\udfff are halves of a character; write the whole character")


def _plain_mapping(node: yaml.MappingNode, path: str, lines: dict[str, int], problems: list[Problem]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            problems.append(Problem(path, "a key is a name; neither a list or mapping, nor << to merge", line))
            continue
        _refuse_surrogates(key_node)
        key = str(key_node.value)
        if key in mapping:
            problems.append(Problem(f"{path}.{key}", "written twice; keep one", line))
        mapping[key] = _plain_value(value_node, f"{path}.{key}", lines, problems)
        lines[f"{path}.{key}"] = line
    return mapping


# --- Types


def decode(raw: Any, type_: type[T], lines: dict[str, int], problems: list[Problem]) -> T | None:
    """Return `raw` as a `type_`. Adds what is wrong to `problems`, and then returns None."""
    problem_count = len(problems)
    value: T | None = _Decoder(lines, problems).value(raw, type_, "$")
    return value if len(problems) == problem_count else None


class _Decoder:
    def __init__(self, lines: dict[str, int], problems: list[Problem]) -> None:
        self.lines = lines
        self.problems = problems
        self.faulty: dict[str, Load | Server] = {}  # by path: servers and loads, without what does not decode

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
        if origin is Annotated and typing.get_origin(args[0]) is list and isinstance(raw, list):
            most = max((meta.max_length for meta in _metas(type_) if meta.max_length is not None), default=len(raw))
            if len(raw) > most:
                return self.wrong(path, f"it has {len(raw):,} items; at most {most:,} are read")
            return self.value(raw, args[0], path)
        if origin is list and isinstance(raw, list):
            return [self.value(item, args[0], f"{path}[{i}]") for i, item in enumerate(raw)]
        if origin is typing.Literal and raw not in args:
            return self.wrong(path, f"expected one of {', '.join(map(str, args))}, got {_short_repr(raw)}")
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
            elif isinstance(value, Load | Server):
                self.faulty[f"{path}.{key}"] = value
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
        """Return the record; of a faulty scenario, server or load what decodes, of any other faulty record None."""
        hints = typing.get_type_hints(type_, include_extras=True)
        fields = {field.encode_name: field for field in msgspec.structs.fields(type_)}
        first_count = len(self.problems)
        values: dict[str, Any] = {}
        for key, raw_value in raw.items():
            problem_count = len(self.problems)
            if key in fields:
                name = fields[key].name
                value = self.value(raw_value, hints[name], f"{path}.{key}")
                if len(self.problems) == problem_count or isinstance(value, dict):
                    values[name] = value
            else:
                advice = did_you_mean(key, fields) if problem_count < SHOWN_PROBLEMS else ""
                self.wrong(f"{path}.{key}", f"unknown key; {advice}")
        for key in fields:
            if fields[key].required and key not in raw:
                self.wrong(path, f"'{key}' is missing")
        if type_ is Scenario:
            return Scenario(**(_PLACEHOLDERS | values))
        in_part = type_ in (Load, Server) and all(field.name in values for field in fields.values() if field.required)
        return type_(**values) if in_part or len(self.problems) == first_count else None


def _metas(type_: Any) -> list[msgspec.Meta]:
    return [arg for arg in typing.get_args(type_) if isinstance(arg, msgspec.Meta)]


def _meta_description(type_: Any) -> str | None:
    return next((meta.description for meta in _metas(type_) if meta.description), None)


def _expected_text(error: msgspec.ValidationError) -> str:
    """Return the expected type and bounds, in words for the author of a YAML file."""
    text = str(error).split(" - at ")[0].split(", got ")[0]
    if "matching regex" in text:
        return "a text of one line, without control characters, of at most 1,000 characters is expected"
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


def _reference_problems(scenario: Scenario, servers: Collection[str], loads: Collection[str]) -> Iterator[Problem]:
    """Check where servers and loads are named. `servers`, `loads`: all names."""
    if (base := scenario.baseline) is not None:
        if base.server not in servers:
            yield Problem("$.baseline.server", f"'{base.server}' is not a server; {did_you_mean(base.server, servers)}")
        if base.load not in loads:
            yield Problem("$.baseline.load", f"'{base.load}' is not a load; {suggest_row(base.load, loads)}")
    for number, pair in enumerate(scenario.compare):
        for key, row in (("row", pair.row), ("against", pair.against)):
            server, _, load = row.partition("/")
            if server not in servers or load not in loads:
                is_small = len(servers) * len(loads) <= _MAX_ROWS
                rows = [f"{server}/{load}" for server in servers for load in loads] if is_small else []
                yield Problem(f"$.compare[{number}].{key}", f"'{row}' is not SERVER/LOAD; {suggest_row(row, rows)}")
        if pair.row == pair.against:
            yield Problem(f"$.compare[{number}]", f"'{pair.row}' is compared with itself")
    for number, check in enumerate(scenario.checks):
        if (mistake := check_problem(check, servers, loads)) is not None:
            yield Problem(f"$.checks[{number}]", mistake)


def _wrong_keys(problems: list[Problem]) -> defaultdict[str, set[str]]:
    """Return the keys that have a problem by the path of their mapping, with those that a misspelled one may mean."""
    wrong = defaultdict[str, set[str]](set)
    for problem in problems[:SHOWN_PROBLEMS]:
        words = re.split(r"[.[]", problem.path)[:4]
        for number in range(1, len(words)):
            wrong[".".join(words[:number])].add(words[number])
    known = [*Load.__struct_fields__, *Server.__struct_fields__, "prompts"]
    for keys in wrong.values():
        keys |= {closest_name(key, known) or key for key in keys}
    return wrong


def _contradictions(
    scenario: Scenario, faulty: dict[str, Load | Server], wrong: defaultdict[str, set[str]], folder: Path
) -> Iterator[Problem]:
    """Check keys against each other, but for what depends on keys that have a problem (`wrong`)."""
    prompts = Prompts(kind="classification") if "prompts" in wrong["$"] else scenario.prompts  # goes with all answers
    parts: dict[str, Load | Server] = {f"$.loads.{name}": load for name, load in scenario.loads.items()}
    parts |= faulty | {f"$.servers.{name}": server for name, server in scenario.servers.items()}
    for place, part in parts.items():
        bad_keys = wrong[place] | ({"vary"} if part.vary else set())
        for problem in _load_problems(part, folder, prompts) if isinstance(part, Load) else _server_problems(part):
            if not bad_keys & {problem.path.partition(".")[0], *problem.keys}:
                yield problem.below(f"{place}.")
    if scenario.warmup is not None:
        yield from warmup_problems(scenario.warmup)
    yield from _prompt_problems(scenario.prompts, folder)


def _server_problems(server: Server) -> Iterator[Problem]:
    if not server.container and (server.template != "simulated" or server.gateway is not None):
        yield Problem("container", "only the template 'simulated', without a gateway, can run without a container")


def warmup_problems(warmup: Warmup) -> Iterator[Problem]:
    if [warmup.requests, warmup.duration_s, warmup.until].count(None) != 2:
        yield Problem("$.warmup", "give exactly one of 'requests', 'duration_s' and 'until'")
    if warmup.until is None:
        for key in ("within", "max_s", "max_requests"):
            if getattr(warmup, key) != getattr(Warmup(), key):
                yield Problem(f"$.warmup.{key}", "belongs to 'until: steady'")


def _prompt_problems(prompts: Prompts, folder: Path) -> Iterator[Problem]:
    yield from (problem.below("$.prompts.tokens") for problem in length_problems(prompts.tokens, folder))
    for key, kind, name in (("tokenizer", "synthetic", prompts.tokenizer), ("file", "file", prompts.file)):
        if name is not None and prompts.kind != kind:
            yield Problem(f"$.prompts.{key}", f"is read only with 'kind: {kind}'; remove it")
        elif name not in (None, SERVER_TOKENIZER) and not (folder / str(name)).is_file():
            yield Problem(f"$.prompts.{key}", f"there is no file {name} next to the scenario")
    if prompts.kind == "file" and prompts.file is None:
        yield Problem("$.prompts.file", "'kind: file' needs a file")


_KEYS_OF_USER = {
    "batch": ("batch_size", "in_flight"),
    "chat": ("turns", "abandon", "regenerate"),
    "agent": ("agent",),
    "rag": ("rag",),
}


def _load_problems(load: Load, folder: Path, prompts: Prompts) -> Iterator[Problem]:
    yield from _user_problems(load, folder)
    yield from load_problems(load, folder)
    yield from stage_problems(load)
    if load.trace is not None:
        yield from _trace_problems(load, load.trace, folder)
    elif not load.stages and (load.requests is None) == (load.duration_s is None):
        keys = ("duration_s", "trace", "stages", "vary")
        yield Problem("requests", "give exactly one of 'requests' and 'duration_s'", keys=keys)
    if load.answer is not None:
        yield from (problem.below("answer") for problem in _answer_problems(load.answer, load, prompts))


def _answer_problems(answer: Structured, load: Load, prompts: Prompts) -> Iterator[Problem]:
    yield from answer_problems(answer)
    if answer.choice == "auto" and prompts.kind != "classification":
        yield Problem(".choice", "'auto' are the labels of 'prompts.kind: classification'; list the choices")
    if load.output == "fixed":
        keys = ("output", "vary")
        yield Problem("", "an answer of a form ends where the form ends; add 'output: natural' to the load", keys=keys)


def load_problems(load: Load, folder: Path) -> Iterator[Problem]:
    """Check the keys of a load that do not depend on its user class and its amount of work."""
    yield from behaviour_problems(load.think, load.think_s, load.abandon)
    yield from (problem.below("output_tokens") for problem in length_problems(load.output_tokens, folder))
    if load.abandon is not None and load.abandon.after_tokens is not None and not load.stream:
        yield Problem("abandon.after_tokens", "without 'stream' an answer comes all at once; use 'after_s'")
    users = min((stage.users for stage in load.stages), default=load.users)
    if load.processes > users:
        yield Problem(
            "processes",
            f"{load.processes} load processes for {users} users; use at most one per user",
            keys=("users", "stages", "vary"),
        )
    if load.endpoint == "embeddings" and load.answer is not None:
        yield Problem("answer", "embeddings have no text to check; remove it")
    if load.endpoint == "embeddings" and load.omit:
        yield Problem("omit", "requests for embeddings have none of these fields; remove it")
    if load.in_flight is not None:
        yield from _excluded(load, "in_flight", ("batch_size", "think", "think_s", "arrivals", "trace"))
    if load.arrivals is not None:
        yield from (problem.below("arrivals") for problem in _arrival_problems(load.arrivals))


def _excluded(load: Load, key: str, others: Collection[str]) -> Iterator[Problem]:
    """Yield the other keys that a load with this key cannot have."""
    for other in others:
        if getattr(load, other):
            yield Problem(other, f"does not go with '{key}'; remove one of the two")


def _user_problems(load: Load, folder: Path) -> Iterator[Problem]:
    if load.user not in USERS and not load.user.endswith(".py"):
        advice = did_you_mean(load.user, USERS)
        yield Problem("user", f"'{load.user}' is neither a user class that ships nor a .py file; {advice}")
    elif load.user not in USERS and not (folder / load.user).is_file():
        yield Problem("user", f"there is no file {load.user} next to the scenario")
    for user, keys in _KEYS_OF_USER.items():
        for key in keys:
            if load.user in USERS and load.user != user and getattr(load, key):
                yield Problem(key, f"belongs to 'user: {user}', and this is {load.user}; remove it")
    needs_chat = ("agent", "rag", "chat") if load.endpoint == "embeddings" else ("agent", "rag")
    if load.endpoint != "chat" and load.user in needs_chat:
        yield Problem("endpoint", f"'user: {load.user}' needs the endpoint chat; remove it or use 'user: batch'")


def _trace_problems(load: Load, trace: Trace, folder: Path) -> Iterator[Problem]:
    yield from _excluded(load, "trace", ("requests", "duration_s", "arrivals"))
    if load.user in ("chat", "agent", "rag") or (load.batch_size or 1) > 1:
        yield Problem("trace", "each of its rows is one request; use 'user: batch' without 'batch_size'")
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
        or all(rate == 0 for _, rate in points)
    ):
        yield Problem(".points", f"[second, rate] from second 0 on, ascending, not all 0, are expected, got {points}")
    if arrivals.wave is not None and arrivals.wave.min > arrivals.wave.max:
        yield Problem(".wave", f"min {arrivals.wave.min:g} is above max {arrivals.wave.max:g}")
    if arrivals.between != "steps" and points is None:
        yield Problem(".between", "belongs to 'points'")
    if arrivals.burstiness != 1.0 and arrivals.spacing != "gamma":
        yield Problem(".burstiness", "belongs to 'spacing: gamma'")
