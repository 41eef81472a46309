"""Sweeps: expand `vary` and `where` of a server or load into named rows when the scenario is read.

Then a scenario has ordinary servers and loads only; `Scenario.swept` has the varied settings of each row.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from harness.base.errors import Problem, did_you_mean
from harness.engines.flags import flag_words, merge_words, opposite, plain_name, words_of
from harness.engines.settings import EXTRA_ARGUMENTS
from harness.scenario import MAX_NAME, Load, Scenario, Server, Span, Sweep, SweepRow, prompts_of
from harness.scenario.shape import decode

MAX_COMBINATIONS = 10_000  # of one server or load, before `where`
MAX_VALUES = 1000  # of one setting
FLAG = "--"  # a setting with this prefix is an argument of the engine
_FIXED_KEYS = ("stages", "vary", "where")


def expand(scenario: Scenario) -> tuple[Scenario, list[Problem]]:
    """Replace each server and load that has `vary` by its rows. Returns problems too; what has one is left out."""
    problems: list[Problem] = []
    servers, swept_servers = _expand_parts(scenario.servers, "servers", problems)
    loads, swept_loads = _expand_parts(_with_prompts(scenario), "loads", problems)
    swept = Sweep(servers=swept_servers, loads=swept_loads) if swept_servers or swept_loads else None
    return replace(scenario, servers=servers, loads=loads, swept=swept), problems


def _with_prompts(scenario: Scenario) -> dict[str, Load]:
    """Return the loads; one that varies a key of its prompts has those of the scenario, so that the others are kept."""
    return {
        name: replace(load, prompts=prompts_of(scenario, load))
        if any(key.startswith("prompts.") for key in load.vary)
        else load
        for name, load in scenario.loads.items()
    }


def _expand_parts(
    parts: Mapping[str, Any], kind: str, problems: list[Problem]
) -> tuple[dict[str, Any], dict[str, SweepRow]]:
    """Return the servers or loads (`kind`) after the expansion, and the rows among them."""
    expanded: dict[str, Any] = {}
    swept: dict[str, SweepRow] = {}
    for name, part in parts.items():
        place = f"$.{kind}.{name}"
        if not part.vary:
            problems += [Problem(f"{place}.where", "belongs to 'vary'")] if part.where else []
            expanded[name] = part
            continue
        wrong = [problem.below(f"{place}.") for problem in _grid_problems(part)]
        grid = [] if wrong else _grid(name, part, place, wrong)
        rows: dict[str, Any] = {}
        texts: dict[str, str] = {}  # each problem with the first row that has it
        for row, settings in [] if wrong else grid:
            new_problems: list[Problem] = []
            if row in parts or row in swept or row in rows:
                new_problems.append(Problem("", f"two {kind} would have this name; rename one, or change its values"))
            else:
                rows[row] = (
                    server_with(part, settings) if kind == "servers" else _load_with(part, settings, new_problems)
                )
            for problem in new_problems:
                texts.setdefault(str(problem), f"{problem} (of row '{row}')".removeprefix("$."))
        wrong += [Problem(f"{place}.vary", text) for text in texts.values()]
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


def _grid(name: str, part: Server | Load, place: str, wrong: list[Problem]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and settings of each row that `where` keeps. Adds problems to `wrong`."""
    values = {key: _values(given) for key, given in part.vary.items()}
    short = _abbreviate_keys(list(values))
    fixed = part.variables if isinstance(part, Server) else msgspec.to_builtins(part)
    rows: list[tuple[str, dict[str, Any]]] = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        all_settings = fixed | {plain_name(key): value for key, value in settings.items()}
        try:
            if not all(_meets(condition, all_settings) for condition in part.where):
                continue
        except ValueError as error:
            wrong.append(Problem(f"{place}.where", str(error)))
            return []
        labels = [f"-{short[key]}{_label(value, values[key].index(value))}" for key, value in settings.items()]
        rows.append((name + "".join(labels), settings))
    if not rows:
        wrong.append(Problem(f"{place}.where", "it leaves out every combination"))
    longest = max((row for row, _ in rows), key=len, default="")
    if len(longest) > MAX_NAME:
        text = f"the name '{longest}' has {len(longest)} characters; at most {MAX_NAME} are possible"
        wrong.append(Problem(f"{place}.vary", f"{text}. Shorten the name '{name}', or vary fewer settings"))
    return rows


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


def server_with(server: Server, settings: Mapping[str, Any]) -> Server:
    """Return the server with these settings: variables of its template, and arguments of its engine."""
    variables = dict(server.variables)
    for key, value in settings.items():
        if not key.startswith(FLAG):
            variables[key] = value
        elif isinstance(given := variables.get(EXTRA_ARGUMENTS) or [], list):  # else the template refuses it
            words = merge_words(words_of(given), flag_words(key, value), drop=[key, opposite(key)])
            if words or EXTRA_ARGUMENTS in variables:
                variables[EXTRA_ARGUMENTS] = words
    return replace(server, variables=variables, vary={}, where=[])


def _load_with(load: Load, settings: Mapping[str, Any], wrong: list[Problem]) -> Load | None:
    """Return the load with these settings; a key such as arrivals.rate is a path."""
    raw = msgspec.to_builtins(replace(load, vary={}, where=[]))
    for key, value in settings.items():
        *parents, last = key.split(".")
        mapping: Any = raw
        for parent in parents:
            mapping[parent] = {} if mapping.get(parent) is None else mapping[parent]
            mapping = mapping[parent]
            if not isinstance(mapping, dict):
                wrong.append(Problem(f"$.{key}", f"'{parent}' has no keys of its own here"))
                return None
        mapping[last] = value
    return decode(raw, Load, {}, wrong)


_CONDITION = re.compile(r"\s*([\w.-]+)\s*(<=|>=|==|!=|<|>)\s*([\w.-]+)\s*")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def _meets(condition: str, settings: Mapping[str, Any]) -> bool:
    """Return whether the values of a combination meet a condition: a name or number, compared with another."""
    if (match := _CONDITION.fullmatch(condition)) is None:
        text = condition if len(condition) <= MAX_NAME else f"{condition[:MAX_NAME]}..."
        raise ValueError(f"'{text}' is not a condition such as max_num_batched_tokens >= max_num_seqs")
    return _COMPARISONS[match[2]](_number(match[1], settings), _number(match[3], settings))


def _number(word: str, settings: Mapping[str, Any]) -> float:
    """Return the value of a name or number. Raises ValueError."""
    with suppress(ValueError):
        return float(word)
    if word not in settings:
        raise ValueError(f"'{word}' is neither varied nor set here; {did_you_mean(word, settings)}")
    value = settings[word]
    if not isinstance(value, int | float):
        raise ValueError(f"'{word}' is not a number here")
    return value
