"""What a server's log tells of its start: facts, its effective settings, and when each phase was over.

The lines are `startup` of each engine. Of a line's time the Docker Engine's stamp is preferred, else what the server
wrote itself, which may be whole seconds. Times are only ever compared with others of the same log.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from harness.engines import Start, engines
from harness.files import open_file
from harness.rundir.manifest import Phase, Startup

# A log is read as far as starts go; what an engine says under load comes later and is never of interest here.
LIMIT = 4_000_000
_SLACK_S = 1.0  # clocks are set now and then; phases that claim more than this above what we saw are not believed
_DOCKER = (re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z "), "%Y-%m-%dT%H:%M:%S")  # the Docker Engine's stamp
# The stamps of engines that run others come first: theirs are before those of the engine.
_STAMPS = (
    _DOCKER,
    *(
        (re.compile(engine.log.stamp["regex"]), engine.log.stamp["form"])
        for engine in sorted(engines(), key=lambda engine: not engine.log.wraps)
        if engine.log.stamp
    ),
)
_SINCE_START = re.compile(r"^(\d{1,6})\.(\d\d)\.(\d{3})\.(\d{3}) [A-Z] ")  # llama.cpp: minutes, seconds, ms, us
_ARGUMENTS = re.compile(r"non-default args: \{(?P<all>.*)\}\s*$")
_PARAMETERS = re.compile(r"\[simulated\] parameters: (?P<all>\w+=.*)$")
_TYPES = get_type_hints(Startup)
_VARIABLE = ("port", "host", "model_tag")  # of the arguments: any free port; a second name of `model`


class Started(Struct, frozen=True):
    """What was found in a log."""

    facts: Startup
    effective: dict[str, Any]
    ends: dict[str, float]  # by phase: when it was over, on the log's own clock
    began_s: float | None  # of its first line, or of the process where the log counts from there


def started(path: Path) -> Started:
    """What the log at `path` tells of the server's start; nothing for one that tells nothing."""
    with open_file(path) as file:
        text = file.read(LIMIT).decode("utf-8", "replace")
    return of_lines(text.splitlines())


def of_lines(lines: Sequence[str]) -> Started:
    """The same for the lines of a log."""
    stamped = _stamped(lines)
    found: dict[str, Any] = {}
    effective: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    ends: dict[str, float] = {}
    for at_s, line in stamped:
        for engine, rule, pattern in _rules():
            if (match := pattern.search(line)) is None:
                continue
            _note(engine, rule, match, effective if rule.effective else found)
            if rule.ends is not None and at_s is not None:
                ends[rule.ends] = max(at_s, ends.get(rule.ends, at_s))
        if (match := _ARGUMENTS.search(line)) is not None:
            arguments = _pairs(match["all"], ":")
        elif (match := _PARAMETERS.search(line)) is not None:
            arguments = _pairs(match["all"], "=")
    effective |= {key: value for key, value in arguments.items() if key not in _VARIABLE}
    began_s = 0.0 if _counts_from_start(lines) else next((at_s for at_s, _ in stamped if at_s is not None), None)
    return Started(Startup(**found), effective, ends, began_s)


def can_be_kept(value: Any, depth: int = 8) -> bool:
    """Whether a manifest with this value can be written and read again, whatever server reported it."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and len(value) <= 1000 and all(can_be_kept(one, depth - 1) for one in inner)
    if isinstance(value, str):
        return len(value) <= 10_000
    return not isinstance(value, int | float) or abs(value) <= 2**63


def _note(engine: str, rule: Start, match: re.Match[str], into: dict[str, Any]) -> None:
    if rule.engine:
        into["engine"] = engine
    if rule.compile_cache is not None and into.get("compile_cache") != "cold":  # what is new in part is not warm
        into["compile_cache"] = rule.compile_cache
    for group, text in match.groupdict().items():
        if text is None:
            continue
        name = re.sub(r"_mib$", "_gib", re.sub(r"_\d$", "", group))
        try:
            value = _literal(text) if rule.effective else _number(text, _TYPES[name])
        except ValueError:  # a number of another form than we know
            continue
        if group.endswith("_mib"):
            value = round(value / 1024, 3)
        if value is not None and can_be_kept(value):
            into[name] = round(into.get(name, 0) + value, 3) if rule.add else value


def phases_of(measured: Sequence[Phase], log: Started, began_s: float | None = None) -> list[Phase]:
    """Phases as seen from outside, with the wait for the server told apart by its log.

    What the log has takes the place of "port open", "health" and "load": each phase from the end of the one before
    to its own, the first from `began_s`, when the server's process was started (on the log's clock; None: its first
    line). "ready" is the rest, so that the sum stays what was measured. Without such lines, `measured` as it is.
    A server that gets its engine or model first, as Lemonade does, starts the engine only after that.
    """
    got_by = ("install", "download", "model")
    got = max((at + 1 for at, phase in enumerate(measured) if phase.name in got_by), default=0)
    waits = [phase for phase in measured[got:] if phase.name in ("port open", "health", "load")]
    total_s = sum(phase.seconds for phase in waits)
    at_s = log.began_s if began_s is None else began_s
    inner: list[Phase] = []
    if at_s is None or not waits or "weights" not in log.ends:
        return list(measured)
    at_s += sum(phase.seconds for phase in measured[:got] if phase.name not in ("pull", "flags", "create"))
    for name in ("process", "weights", "compile", "graphs", "warm-up"):
        end_s = log.ends.get(name)
        if end_s is None or end_s < at_s:
            continue
        inner.append(Phase(name=name, seconds=end_s - at_s))
        at_s = end_s
    over_s = sum(phase.seconds for phase in inner) - total_s
    if not inner or over_s > _SLACK_S or over_s > inner[0].seconds:
        return list(measured)
    if over_s > 0:  # the process was on its way before the order to start it had come back
        inner[0] = Phase(name=inner[0].name, seconds=inner[0].seconds - over_s)
    first = measured.index(waits[0], got)
    rest = Phase(name="ready", seconds=max(0.0, -over_s))
    return [*measured[:first], *inner, rest, *measured[first + len(waits) :]]


def moment(text: str) -> float | None:
    """A time stamp of the Docker Engine, such as a container's StartedAt, on the clock of its logs."""
    return _time(f"{text} ", *_DOCKER)


def _stamped(lines: Sequence[str]) -> list[tuple[float | None, str]]:
    """Each line with its time, by the best kind of stamp that the log has, and without the Docker Engine's."""
    docker = _DOCKER[0]
    kind = next((kind for kind in _STAMPS if any(kind[0].search(line) for line in lines)), None)
    from_start = kind is None and _counts_from_start(lines)
    result = []
    for line in lines:
        at_s = _since_start(line) if from_start else _time(line, *kind) if kind is not None else None
        result.append((at_s, docker.sub("", line)))
    return result


def _time(line: str, pattern: re.Pattern[str], form: str) -> float | None:
    match = pattern.search(line)
    if match is None:
        return None
    # A stamp without a year is put into one that has every day.
    text, form = (match[1], form) if form.startswith("%Y") else (f"2000-{match[1]}", f"%Y-{form}")
    try:
        moment = datetime.strptime(text, form).replace(tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + float(match[2] or 0)


def _counts_from_start(lines: Sequence[str]) -> bool:
    return any(_SINCE_START.match(line) for line in lines)


def _since_start(line: str) -> float | None:
    match = _SINCE_START.match(line)
    return None if match is None else int(match[1]) * 60 + int(match[2]) + int(match[3]) / 1e3 + int(match[4]) / 1e6


def _number(text: str, kind: Any) -> Any:
    if kind == int | None:
        return int(text.replace(",", ""))
    return float(text.replace(",", "")) if kind == float | None else text


def _pairs(text: str, between: str) -> dict[str, Any]:
    """The entries of a printed dictionary or list of settings; a value that is no literal stays text."""
    pairs = (part.partition(between) for part in _parts(text))
    return {name.strip(" '\""): _literal(value.strip()) for name, found, value in pairs if found}


def _parts(text: str) -> Iterator[str]:
    """A text, split at the commas that stand in no bracket and no quotes."""
    depth, quote, begin = 0, "", 0
    for at, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote and text[at - 1] != "\\" else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{<":
            depth += 1
        elif sign in ")]}>":
            depth -= 1
        elif sign == "," and depth == 0:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
        msgspec.json.encode(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return list(value) if isinstance(value, set | tuple) else value


@cache
def _rules() -> list[tuple[str, Start, re.Pattern[str]]]:
    return [(engine.name, rule, re.compile(rule.regex)) for engine in engines() for rule in engine.startup]
