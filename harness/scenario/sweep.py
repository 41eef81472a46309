"""Sweeps: expand `vary` and `where` of a server or load into named rows when the scenario is read.

Then a scenario has ordinary servers and loads only; `Scenario.swept` has the varied settings of each row.
"""

import ast
import itertools
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import replace

from harness.base.errors import Problem, did_you_mean
from harness.scenario import MAX_NAME, Load, Scenario, Server, Span, Sweep, SweepRow
from harness.scenario.shape import decode

MAX_COMBINATIONS = 10_000  # of one server or load, before `where`
MAX_VALUES = 1000  # of one setting
MAX_CONDITION = 200  # characters
MAX_STEPS = 1_000_000  # of the conditions of all combinations
FLAG = "--"  # a setting with this prefix is an argument of the engine
_FIXED_KEYS = ("stages", "vary", "where")


def expand(scenario: Scenario) -> tuple[Scenario, list[Problem]]:
    """Replace each server and load that has `vary` by its rows. Returns problems too; what has one is left out."""
    problems: list[Problem] = []
    servers, swept_servers = _expand_parts(scenario.servers, "servers", problems)
    loads, swept_loads = _expand_parts(scenario.loads, "loads", problems)
    swept = Sweep(servers=swept_servers, loads=swept_loads) if swept_servers or swept_loads else None
    return replace(scenario, servers=servers, loads=loads, swept=swept), problems


def _expand_parts(
    parts: Mapping[str, Any], kind: str, problems: list[Problem]
) -> tuple[dict[str, Any], dict[str, SweepRow]]:
    """Return the servers or loads (`kind`) after the expansion, and the rows among them."""
    expanded: dict[str, Any] = {}
    swept: dict[str, SweepRow] = {}
    for name, part in parts.items():
        if not part.vary:
            if part.where:
                problems.append(Problem(f"$.{kind}.{name}.where", "belongs to 'vary'"))
            expanded[name] = part
            continue
        wrong = [problem.below(f"$.{kind}.{name}.") for problem in _grid_problems(part)]
        grid = [] if wrong else list(_grid_rows(name, part, kind, wrong))
        rows: dict[str, Any] = {}
        texts: dict[str, str] = {}  # each problem with the first row that has it
        for row, settings in [] if wrong else grid:
            found: list[Problem] = []
            if row in parts or row in swept or row in rows:
                found.append(Problem("", f"two {kind} would have this name; rename one, or change its values"))
            elif kind == "servers":
                rows[row] = _server_with(part, settings)
            else:
                rows[row] = _load_with(part, settings, found)
            for problem in found:
                texts.setdefault(str(problem), f"{problem} (of row '{row}')".removeprefix("$."))
        wrong += [Problem(f"$.{kind}.{name}.vary", text) for text in texts.values()]
        problems += wrong
        if not wrong:
            expanded |= rows
            swept |= {row: SweepRow(of=name, settings=settings) for row, settings in grid}
    return expanded, swept


def _grid_problems(part: Server | Load) -> Iterator[Problem]:
    """Check `vary` before its values are combined. Paths start below the server or load."""
    combinations = 1
    for key, values in part.vary.items():
        path = f"vary.{key}"
        if isinstance(part, Load) and (key in _FIXED_KEYS or key.startswith(FLAG)):
            yield Problem(path, "cannot be varied")
        elif isinstance(part, Server) and not key.startswith(FLAG) and not key.isidentifier():
            yield Problem(path, "a variable of the template is expected, or an argument of the engine such as --flag")
        elif isinstance(values, Span) and (text := _span_problem(values)) is not None:
            yield Problem(path, text)
        elif not values:
            yield Problem(path, "it is empty; list values, or write {from: 1, to: 64, factor: 2}")
        elif isinstance(values, list) and len(values) > MAX_VALUES:
            yield Problem(path, f"it has {len(values):,} values; at most {MAX_VALUES:,} are read")
        else:
            combinations *= len(_values(values))
    if isinstance(part, Load) and part.stages:
        yield Problem("vary", "does not go with 'stages'; vary 'users' instead")
    if combinations > MAX_COMBINATIONS:
        yield Problem("vary", f"it has {combinations:,} combinations; at most {MAX_COMBINATIONS:,} are read")
    elif (steps := combinations * _steps_of(part.where)) > MAX_STEPS:
        text = f"its conditions take {steps:,} steps for {combinations:,} combinations; at most {MAX_STEPS:,} are done"
        yield Problem("where", f"{text}. Vary fewer values, or write shorter conditions")


def _span_problem(span: Span) -> str | None:
    if (span.step is None) == (span.factor is None):
        return "give exactly one of 'step' and 'factor'"
    if span.first > span.to or (span.step or 1) <= 0 or (span.factor or 2) <= 1 or (span.factor and span.first <= 0):
        return "expected: 'from' at most 'to', 'step' above 0; with 'factor', which is above 1, 'from' above 0"
    if span.factor is not None:
        steps = (math.log(span.to) - math.log(span.first)) / math.log(span.factor)
    else:
        steps = (span.to - span.first) / (span.step or 1)
    return f"it has {steps + 1:,.0f} values; at most {MAX_VALUES:,} are read" if steps >= MAX_VALUES else None


def _values(values: list[Any] | Span) -> list[Any]:
    """Return the values of a setting. A range has its end where a step meets it; whole numbers stay whole."""
    if isinstance(values, list):
        return values
    first, step, factor = values.first, values.step, values.factor or 2.0
    whole = all(float(number).is_integer() for number in (first, step or factor))
    numbers: list[int | float] = []
    number = first
    while len(numbers) < MAX_VALUES and math.isfinite(number) and number <= values.to + 1e-9 * abs(values.to):
        numbers.append(int(round(number)) if whole else float(f"{number:.9g}"))
        number = number * factor if step is None else first + len(numbers) * step
    return numbers


def _grid_rows(name: str, part: Server | Load, kind: str, wrong: list[Problem]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and settings of each row that `where` keeps. Adds problems to `wrong`."""
    values = {key: _values(given) for key, given in part.vary.items()}
    short = _abbreviate_keys(list(values))
    path = f"$.{kind}.{name}"
    rows: list[tuple[str, dict[str, Any]]] = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        known = _condition_values(part, settings)
        for number, condition in enumerate(part.where):
            try:
                if not _meets(condition, known):
                    break
            except ValueError as error:
                wrong.append(Problem(f"{path}.where[{number}]", str(error)))
                return
        else:
            labels = [f"-{short[key]}{_label(value, values[key].index(value))}" for key, value in settings.items()]
            rows.append((name + "".join(labels), settings))
    if not rows:
        wrong.append(Problem(f"{path}.where", "it leaves out every combination"))
    longest = max((row for row, _ in rows), key=len, default="")
    if len(longest) > MAX_NAME:
        text = f"the name '{longest}' has {len(longest)} characters; at most {MAX_NAME} are possible"
        wrong.append(Problem(f"{path}.vary", f"{text}. Shorten the name '{name}', or vary fewer settings"))
    yield from rows


def _abbreviate_keys(keys: list[str]) -> dict[str, str]:
    """Return the text for each key in names of rows: a single key in full, else the fewest letters that differ."""
    if len(keys) == 1:
        words = re.findall(r"[a-z0-9]+", keys[0].rpartition(".")[2].lower())
        return {keys[0]: f"{'-'.join(words)}-"}
    for letters in range(1, 30):
        short = {key: "".join(word[:letters] for word in re.findall(r"[a-z0-9]+", key.lower())) for key in keys}
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
    """Return the server with these settings: variables of its template, and arguments of its engine."""
    variables = dict(server.variables)
    for key, value in settings.items():
        if not key.startswith(FLAG):
            variables[key] = value
        elif value is not False and value is not None:
            extra_args = variables.get("extra_args") or []
            if isinstance(extra_args, list):  # else the template refuses it
                variables["extra_args"] = [*extra_args, key, *([] if value is True else [str(value)])]
    return replace(server, variables=variables, vary={}, where=[])


def _load_with(load: Load, settings: Mapping[str, Any], wrong: list[Problem]) -> Load | None:
    raw = msgspec.to_builtins(replace(load, vary={}, where=[]))
    wrong += [problem for key, value in settings.items() if (problem := _set_key(raw, key, value)) is not None]
    return None if wrong else decode(raw, Load, {}, wrong)


def _set_key(raw: dict[str, Any], key: str, value: Any) -> Problem | None:
    """Set a value at a path such as arrivals.rate. Returns a problem where the path leads through a plain value."""
    *parents, last = key.split(".")
    mapping: Any = raw
    for parent in parents:
        mapping[parent] = {} if mapping.get(parent) is None else mapping[parent]
        mapping = mapping[parent]
        if not isinstance(mapping, dict):
            return Problem(f"$.{key}", f"'{parent}' has no keys of its own here")
    mapping[last] = value
    return None


# --- Conditions


_CONDITION_EXAMPLE = "such as max_num_batched_tokens >= max_num_seqs"
_COMPUTED: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CONSTANTS = {"true": True, "false": False, "none": None}
_PLAIN = (bool, int, float, str, type(None))


def _condition_values(part: Server | Load, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a condition may use: varied settings, and the variables of a server or keys of a load."""
    if isinstance(part, Server):
        return part.variables | {key.removeprefix(FLAG).replace("-", "_"): value for key, value in settings.items()}
    raw: dict[str, Any] = msgspec.to_builtins(part)
    for key, value in settings.items():
        _set_key(raw, key, value)
    return raw


@cache
def _parse_condition(condition: str) -> ast.expr:
    """Return the expression of a condition: names, numbers, texts, + - * /, comparisons, and, or, not.

    Raises ValueError.
    """
    if len(condition) > MAX_CONDITION:
        raise ValueError(f"a condition has at most {MAX_CONDITION} characters (got {len(condition):,})")
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(condition.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"'{condition}' is not a condition {_CONDITION_EXAMPLE}") from None
    for node in ast.walk(body):
        match node:
            case ast.Name() | ast.Attribute() | ast.expr_context() | ast.BoolOp() | ast.boolop():
                pass
            case ast.Constant(value=bool() | int() | float() | str() | None):
                pass
            case ast.UnaryOp(op=ast.Not() | ast.USub()) | ast.Not() | ast.USub():
                pass
            case ast.BinOp(op=op) if type(op) in _COMPUTED:
                pass
            case ast.Compare(ops=ops) if all(type(op) in _COMPARED for op in ops):
                pass
            case ast.operator() | ast.cmpop():
                pass
            case _:
                raise ValueError(f"'{condition}' is not a condition {_CONDITION_EXAMPLE}")
    return body


def _steps_of(conditions: Iterable[str]) -> int:
    """Return the number of steps to evaluate these conditions once. Faulty ones take none."""
    steps = 0
    for condition in conditions:
        with suppress(ValueError):
            steps += sum(1 for _ in ast.walk(_parse_condition(condition)))
    return steps


def _evaluate(node: ast.AST, known: Mapping[str, Any]) -> Any:
    """Return the value of a part of a condition. Raises ValueError, TypeError, ArithmeticError."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _plain(name, known[name] if name in known else _CONSTANTS[name])
        case ast.Attribute(attr=name):
            inner = _look_up(node, known)
            return _plain(name, inner)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, known)
        case ast.UnaryOp(operand=operand):
            return _compute("-", operator.sub, 0, _evaluate(operand, known))
        case ast.BinOp(left=left, op=op, right=right):
            sign, function = _COMPUTED[type(op)]
            return _compute(sign, function, _evaluate(left, known), _evaluate(right, known))
        case ast.BoolOp(op=op, values=values):
            results = (_evaluate(value, known) for value in values)
            return all(results) if isinstance(op, ast.And) else any(results)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            values = [_evaluate(value, known) for value in (left, *comparators)]
            pairs = zip(ops, itertools.pairwise(values), strict=True)
            return all(_COMPARED[type(op)](first, second) for op, (first, second) in pairs)
    raise ValueError("not a condition")


def _look_up(node: ast.AST, known: Mapping[str, Any]) -> Any:
    """Return the value of a name such as arrivals.rate, of any kind."""
    if isinstance(node, ast.Name):
        return known[node.id] if node.id in known else _CONSTANTS[node.id]
    inner = _look_up(node.value, known) if isinstance(node, ast.Attribute) else None
    if not isinstance(node, ast.Attribute) or not isinstance(inner, Mapping) or node.attr not in inner:
        raise ValueError(f"'{getattr(node, 'attr', '?')}' is not set here")
    return inner[node.attr]


def _plain(name: str, value: Any) -> Any:
    if not isinstance(value, _PLAIN) or (isinstance(value, str) and len(value) > MAX_CONDITION):
        raise ValueError(f"'{name}' is not a number or a short text")
    return value


def _compute(sign: str, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if not all(isinstance(value, int | float) and abs(value) < 1e15 for value in (left, right)):
        raise ValueError(f"{left!r} {sign} {right!r} is not computed here")
    return function(left, right)


@cache
def _names_in(condition: str) -> set[str]:
    return {node.id for node in ast.walk(_parse_condition(condition)) if isinstance(node, ast.Name)} - {*_CONSTANTS}


def _meets(condition: str, known: Mapping[str, Any]) -> bool:
    body = _parse_condition(condition)
    for name in sorted(_names_in(condition) - known.keys()):
        raise ValueError(f"'{name}' is neither varied nor set here; {did_you_mean(name, known)}")
    try:
        met = _evaluate(body, known)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"'{condition}': {error}") from None
    if not isinstance(met, bool):
        raise ValueError(f"'{condition}' compares nothing; write {_CONDITION_EXAMPLE}")
    return met
