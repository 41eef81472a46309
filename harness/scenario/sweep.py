"""Sweeps: `vary` and `where` of a server or load, expanded into named rows when the scenario is read.

After that a scenario has ordinary servers and loads only; `Scenario.swept` keeps what was varied in each of them.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from harness.errors import Problem, did_you_mean
from harness.scenario import MAX_NAME, Load, Scenario, Server, Span, Sweep, SweepRow

MAX_COMBINATIONS = 10_000  # of one server or load, before `where`
MAX_VALUES = 1000  # of one setting
MAX_CONDITION = 200  # characters
FLAG = "--"  # a setting that begins with it is an argument of the engine
_FIXED_KEYS = ("stages", "vary", "where")


DecodeLoad = Callable[[Any, list[Problem]], Load | None]  # of plain values; notes what is wrong with them


def expand(scenario: Scenario, decode_load: DecodeLoad) -> tuple[Scenario, list[Problem]]:
    """Replace each server and load that has `vary` by its rows; one that has a problem is left out."""
    problems: list[Problem] = []
    servers, swept_servers = _expand_parts(scenario.servers, "servers", decode_load, problems)
    loads, swept_loads = _expand_parts(scenario.loads, "loads", decode_load, problems)
    swept = Sweep(servers=swept_servers, loads=swept_loads) if swept_servers or swept_loads else None
    return msgspec.structs.replace(scenario, servers=servers, loads=loads, swept=swept), problems


def _expand_parts(
    parts: Mapping[str, Any], kind: str, decode_load: DecodeLoad, out: list[Problem]
) -> tuple[dict[str, Any], dict[str, SweepRow]]:
    found: dict[str, Any] = {}
    swept: dict[str, SweepRow] = {}
    for name, part in parts.items():
        if not part.vary:
            if part.where:
                out.append(Problem(f"$.{kind}.{name}.where", "belongs to 'vary'"))
            found[name] = part
            continue
        wrong = [problem.below(f"$.{kind}.{name}.") for problem in _grid_problems(part)]
        grid = [] if wrong else list(_grid_rows(name, part, kind, wrong))
        for row, _ in grid:
            if row in parts or row in swept:
                wrong.append(Problem(f"$.{kind}.{name}.vary", f"two {kind} would be called '{row}'; rename one"))
        rows: dict[str, Any] = {}
        for row, settings in [] if wrong else grid:
            mistakes: list[Problem] = []
            rows[row] = (
                _server_with(part, settings) if kind == "servers" else _load_with(part, settings, decode_load, mistakes)
            )
            for mistake in mistakes:
                key = next((key for key in settings if f"$.{key}".startswith(mistake.path.split("[")[0])), "")
                place = f"{name}.vary.{key}" if key else name
                text = mistake.text if key else f"{mistake.path.removeprefix('$.')}: {mistake.text}"
                wrong.append(Problem(f"$.{kind}.{place}", f"{text} (of row '{row}')"))
        out += wrong[:1] if len({problem.path for problem in wrong}) == 1 else wrong
        if not wrong:
            found |= rows
            swept |= {row: SweepRow(of=name, settings=settings) for row, settings in grid}
    return found, swept


def _grid_problems(part: Server | Load) -> Iterator[Problem]:
    """What is wrong with `vary` before its values are combined; paths are below the server or load."""
    for key, values in part.vary.items():
        path = f"vary.{key}"
        if isinstance(part, Load) and (key in _FIXED_KEYS or key.startswith(FLAG)):
            yield Problem(path, "cannot be varied")
        elif isinstance(part, Server) and not key.startswith(FLAG) and not key.isidentifier():
            yield Problem(path, "a variable of the template is expected, or an argument of the engine such as --flag")
        elif isinstance(values, Span):
            if (why := _span_problem(values)) is not None:
                yield Problem(path, why)
        elif not values:
            yield Problem(path, "it is empty; list values, or write {from: 1, to: 64, factor: 2}")
        elif len(values) > MAX_VALUES:
            yield Problem(path, f"it has {len(values):,} values; at most {MAX_VALUES:,} are read")
    if isinstance(part, Load) and part.stages:
        yield Problem("vary", "does not go with 'stages'; vary 'users' instead")
    spans = [
        _span_values(one) if isinstance(one, Span) and not _span_problem(one) else one for one in part.vary.values()
    ]
    number = math.prod(len(one) for one in spans if isinstance(one, list))
    if number > MAX_COMBINATIONS:
        yield Problem("vary", f"it has {number:,} combinations; at most {MAX_COMBINATIONS:,} are read")


def _span_problem(span: Span) -> str | None:
    if (span.step is None) == (span.factor is None):
        return "give exactly one of 'step' and 'factor'"
    if span.first > span.to:
        return f"'from' ({span.first:g}) is above 'to' ({span.to:g})"
    if span.step is not None and span.step <= 0:
        return f"'step' must be above 0 (got {span.step:g})"
    if span.factor is not None and (span.factor <= 1 or span.first <= 0):
        return f"'factor' must be above 1 and 'from' above 0 (got {span.factor:g} and {span.first:g})"
    steps = (
        (span.to - span.first) / span.step
        if span.step is not None
        else math.log(span.to / span.first) / math.log(span.factor or 2)
    )
    return f"it has {steps + 1:,.0f} values; at most {MAX_VALUES:,} are read" if steps >= MAX_VALUES else None


def _span_values(span: Span) -> list[int | float]:
    """The values of a range, both ends included where they are met. Whole numbers stay whole."""
    whole = all(float(one).is_integer() for one in (span.first, span.step or span.factor or 0))
    number = 0
    found: list[int | float] = []
    while True:
        value = (
            span.first + number * span.step if span.step is not None else span.first * (span.factor or 2.0) ** number
        )
        if value > span.to * (1 + 1e-9):
            return found
        found.append(int(round(value)) if whole else float(f"{value:.9g}"))
        number += 1


def _grid_rows(name: str, part: Server | Load, kind: str, wrong: list[Problem]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a server or load: name and settings. Those that `where` leaves out are not among them."""
    values = {key: _span_values(one) if isinstance(one, Span) else one for key, one in part.vary.items()}
    short = _abbreviate_keys(list(values))
    rows: list[tuple[str, dict[str, Any]]] = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        known = _condition_values(part, settings)
        for place, condition in enumerate(part.where):
            try:
                if not _meets(condition, known):
                    break
            except ValueError as error:
                wrong.append(Problem(f"$.{kind}.{name}.where[{place}]", str(error)))
                return
        else:
            labels = {key: _label(value, values[key].index(value)) for key, value in settings.items()}
            rows.append((name + "".join(f"-{short[key]}{label}" for key, label in labels.items()), settings))
    path = f"$.{kind}.{name}.vary"
    if not rows:
        wrong.append(Problem(f"$.{kind}.{name}.where", "it leaves out every combination"))
    longest = max((row for row, _ in rows), key=len, default="")
    if len(longest) > MAX_NAME:
        text = f"the name '{longest}' has {len(longest)} characters; at most {MAX_NAME} are possible"
        wrong.append(Problem(path, f"{text}. Shorten the name '{name}', or vary fewer settings"))
    same = [row for row, times in Counter(row for row, _ in rows).items() if times > 1]
    if same:
        wrong.append(Problem(path, f"two {kind} would be called '{same[0]}'; give values that differ in their letters"))
    yield from rows


def _abbreviate_keys(keys: list[str]) -> dict[str, str]:
    """How names of rows call settings: one setting in full, of several the fewest letters that tell them apart."""
    words = {key: re.findall(r"[a-z0-9]+", key.lower()) for key in keys}
    if len(keys) == 1:
        last = re.findall(r"[a-z0-9]+", keys[0].rpartition(".")[2].lower())
        return {keys[0]: f"{'-'.join(last)}-"}
    for letters in range(1, 30):
        short = {key: "".join(word[:letters] for word in words[key]) for key in keys}
        if len(set(short.values())) == len(keys):
            return short
    return {key: f"v{number}" for number, key in enumerate(keys, 1)}


def _label(value: Any, place: int) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, int | float):
        return f"{value:.9g}".replace("-", "m").replace("+", "").replace(".", "p").lower()
    if isinstance(value, str) and (plain := re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")):
        return plain[:MAX_NAME]
    return str(place + 1)


def _server_with(server: Server, settings: Mapping[str, Any]) -> Server:
    """A server with its settings: variables of its template, and arguments of its engine."""
    variables = dict(server.variables)
    for key, value in settings.items():
        if not key.startswith(FLAG):
            variables[key] = value
        elif value is not False and value is not None:
            given = variables.get("extra_args") or []
            more = [key] if value is True else [key, str(value)]
            variables["extra_args"] = [*given, *more] if isinstance(given, list) else given
    return msgspec.structs.replace(server, variables=variables, vary={}, where=[])


def _load_with(load: Load, settings: Mapping[str, Any], decode_load: DecodeLoad, wrong: list[Problem]) -> Load | None:
    raw = msgspec.to_builtins(msgspec.structs.replace(load, vary={}, where=[]))
    wrong += [problem for key, value in settings.items() if (problem := _set_key(raw, key, value)) is not None]
    return None if wrong else decode_load(raw, wrong)


def _set_key(raw: dict[str, Any], key: str, value: Any) -> Problem | None:
    """Set a value at a path such as arrivals.rate."""
    *above, last = key.split(".")
    place: Any = raw
    for step in above:
        place[step] = {} if place.get(step) is None else place[step]
        place = place[step]
        if not isinstance(place, dict):
            return Problem(f"$.{key}", f"'{step}' has no keys of its own here")
    place[last] = value
    return None


# --- Conditions


class _Conditions(ImmutableSandboxedEnvironment):
    """Expressions of names, numbers, texts, + - * / and comparisons. What could take long or much memory is refused."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined)
        self.globals, self.filters, self.tests = {}, {}, {}

    def is_safe_callable(self, obj: Any) -> bool:
        return False

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = all(isinstance(value, int | float) and abs(value) < 1e15 for value in (left, right))
        if operator not in ("+", "-", "*", "/") or not numbers:
            raise ValueError(f"{left!r} {operator} {right!r} is not computed here")
        return super().call_binop(context, operator, left, right)


_CONDITIONS = _Conditions()
_CONDITION_EXAMPLE = "such as max_num_batched_tokens >= max_num_seqs"


def _condition_values(part: Server | Load, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a condition may name: varied settings, and the variables of a server or the keys of a load."""
    if isinstance(part, Server):
        return part.variables | {key.removeprefix(FLAG).replace("-", "_"): value for key, value in settings.items()}
    raw: dict[str, Any] = msgspec.to_builtins(part)
    for key, value in settings.items():
        _set_key(raw, key, value)
    return raw


@cache
def _compile_condition(condition: str) -> tuple[set[str], Callable[[Mapping[str, Any]], object]]:
    """The names in a condition, and a function of their values. Raises ValueError."""
    if len(condition) > MAX_CONDITION:
        raise ValueError(f"a condition has at most {MAX_CONDITION} characters (got {len(condition):,})")
    try:
        names = meta.find_undeclared_variables(_CONDITIONS.parse(f"{{{{ ({condition}) }}}}"))
        return names, _CONDITIONS.compile_expression(condition, undefined_to_none=False)
    except (TemplateError, RecursionError):
        raise ValueError(f"'{condition}' is not a condition {_CONDITION_EXAMPLE}") from None


def _meets(condition: str, known: Mapping[str, Any]) -> bool:
    names, expression = _compile_condition(condition)
    for name in sorted(names - known.keys()):
        raise ValueError(f"'{name}' is neither varied nor set here; {did_you_mean(name, known)}")
    try:
        met = expression(known)
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"'{condition}': {error}") from None
    if not isinstance(met, bool):
        raise ValueError(f"'{condition}' compares nothing; write {_CONDITION_EXAMPLE}")
    return met
