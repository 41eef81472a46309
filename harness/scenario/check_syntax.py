"""Checks as they are written: `[SERVER/LOAD:] METRIC OP BOUND`, such as `ttft_p95 <= 2s`.

METRIC is a name, or `attainment(SLO, ...)` or `goodput(SLO, ...)` with SLOs such as `ttft<=1s`. BOUND is a number with
its unit, or a multiple of what the baseline has: `0.97 * baseline`. What a check comes to, `harness.judge.checks` says.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator

from msgspec import Struct

from harness import columns
from harness.errors import did_you_mean, which_row
from harness.scenario import LOAD_NAME, NAME
from harness.summary import NEEDED

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
LATENCIES = {column.check: column for column in columns.LATENCIES}
STATISTICS = (*NEEDED, "mean")
# What an SLO may bound: latencies that a request has one of.
OF_A_REQUEST = tuple(column.check for column in columns.LATENCIES if column.slo)
# Which units a metric may be written in, and how many of them make one: 95 / 100 is 0.95, and 95 * 0.01 is not.
_TIME = {"s": 1.0, "ms": 1000.0}
_SHARE = {"": 1.0, "%": 100.0}
_PLAIN = {"": 1.0}
_RATE = "req/s"
UNITS: dict[str, dict[str, float]] = {
    **{f"{latency}_{statistic}": _TIME for latency in LATENCIES for statistic in STATISTICS},
    **{column.check: {"seconds": _TIME, "ratio": _SHARE, "": _PLAIN}[column.unit] for column in columns.VALUES},
    "speedup": _PLAIN,
    "attainment": _SHARE,
    "goodput": {**_SHARE, _RATE: 1.0},
}
JUDGED_BY_SLOS = ("attainment", "goodput")
OF_ANSWERS = ("valid_share", "right_share")
BASELINE = "baseline"
MAX_DIGITS = 30  # of a bound
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
# Both match every text: a part that is missing is empty.
_CHECK = re.compile(
    r" *(?:(?P<selection>[^:]*):)? *(?P<metric>[A-Za-z0-9_]*) *(?:\((?P<slos>[^)]*)\))? *(?P<sign>[<>=!~]*) *"
    rf"(?P<number>{_NUMBER})? *(?P<rest>.*)",
    re.DOTALL,
)
_SLO = re.compile(
    rf" *(?P<latency>[A-Za-z0-9_]*) *(?P<sign>[<>=!~]*) *(?P<number>{_NUMBER})? *(?P<unit>[^ ]*) *(?P<rest>.*)",
    re.DOTALL,
)


class Slo(Struct, frozen=True, kw_only=True):
    """A bound on a latency of one request, such as `ttft<=1s`."""

    text: str
    latency: str  # one of OF_A_REQUEST
    operator: str  # "<=" or "<"
    bound_s: float


class Check(Struct, frozen=True, kw_only=True):
    """A check as read. No server and load: it holds for every row."""

    text: str
    server: str | None = None
    load: str | None = None
    metric: str  # `goodput` of a share is read as what it is, `attainment`
    slos: tuple[Slo, ...] = ()
    operator: str
    bound: float  # in seconds or a plain number, or the factor of the baseline's value
    relative: bool = False


def slos_key(slos: Iterable[Slo]) -> str:
    """How a set of SLOs is named in a summary: "ttft<=1s, tpot<=50ms"."""
    return ", ".join(slo.text for slo in slos)


def slo_sets(texts: Iterable[str]) -> dict[str, tuple[Slo, ...]]:
    """The sets of SLOs that checks ask about, by name. A text that is no check asks about none."""
    found = {}
    for text in texts:
        try:
            check = parse_check(text)
        except ValueError:
            continue
        if check.slos:
            found[slos_key(check.slos)] = check.slos
    return found


def misplaced(text: str, servers: Collection[str] | None, loads: Collection[str] | None) -> str | None:
    """What is wrong with a check in a scenario that has these servers and loads (None: any); None: nothing."""
    try:
        check = parse_check(text)
    except ValueError as error:
        return str(error)
    for kind, name, known in (("server", check.server, servers), ("load", check.load, loads)):
        if name is not None and known is not None and name not in known:
            return f"'{name}' is not a {kind}; {which_row(name, known)}"
    return None


def on_server(text: str, server: str) -> str:
    """The check with its selection, if it has one, moved to another server."""
    return re.sub(rf"^\s*{NAME}/(?={LOAD_NAME}\s*:)", f"{server}/", text)


def parse_check(text: str) -> Check:
    """Read a check. Raises ValueError with the place of what is wrong, and what is known there."""
    match = _CHECK.fullmatch(text)
    assert match is not None, "every text matches"

    def wrong(at: int, what: str) -> ValueError:
        return ValueError(f"check '{text.strip()}', at character {at + 1}: {what}")

    selection = match["selection"]
    named = None if selection is None else re.fullmatch(f"({NAME})/({LOAD_NAME})", selection.strip())
    if selection is not None and named is None:
        raise wrong(match.start("selection"), f"'{selection.strip()}' is not SERVER/LOAD")
    metric, sign, number, rest = match["metric"], match["sign"], match["number"] or "", match["rest"]
    if metric not in UNITS:
        raise wrong(match.start("metric"), f"'{metric}' is not a metric; {_metric_advice(metric)}")
    slos: tuple[Slo, ...] = ()
    if metric in JUDGED_BY_SLOS:
        if match["slos"] is None:
            example = f"{metric}(ttft<=1s, tpot<=50ms)"
            raise wrong(match.start("sign"), f"'{metric}' needs SLOs in parentheses, such as {example}")
        slos = tuple(_slos(match["slos"], match.start("slos"), wrong))
    elif match["slos"] is not None:
        raise wrong(match.end("metric"), f"'{metric}' takes no SLOs")
    if sign not in OPERATORS:
        found = _quoted(sign or text[match.start("sign") :][:8].strip())
        raise wrong(match.start("sign"), f"{found} is not a comparison; use one of {' '.join(OPERATORS)}")
    at = match.start("rest")
    relative = _is_relative(number, rest, at, wrong)
    if relative and metric == "speedup":
        raise wrong(len(text), "'speedup' is relative to the baseline already; use a plain number")
    if not relative and not number:
        raise wrong(at, f"{_quoted(rest[:8].strip())} is not a number")
    bound = _number(number or "1", at, wrong)
    unit = rest.strip()
    if not relative:
        if unit not in UNITS[metric]:
            raise wrong(at, _unit_advice(unit, metric, UNITS[metric]))
        bound /= UNITS[metric][unit]
    if metric == "goodput" and not relative and unit != _RATE:
        metric = "attainment"
    if metric in OF_ANSWERS and not relative and bound > 1:
        raise wrong(len(text), "a share of all answers is at most 1")
    if metric == "attainment" and not relative and bound > 1:
        advice = f"for requests a second write goodput with '{_RATE}'"
        raise wrong(len(text), f"a share of all requests is at most 1; {advice}")
    return Check(
        text=text.strip(),
        server=named and named[1],
        load=named and named[2],
        metric=metric,
        slos=slos,
        operator=sign,
        bound=bound,
        relative=relative,
    )


def _slos(text: str, start: int, wrong: Callable[[int, str], ValueError]) -> Iterator[Slo]:
    """The SLOs between parentheses; `start` is their place in the check."""
    for part in re.finditer("[^,]+|(?<=,)$|^$", text):
        match = _SLO.fullmatch(part[0])
        assert match is not None, "every text matches"
        at = start + part.start()
        latency, sign, number, unit = match["latency"], match["sign"], match["number"], match["unit"]
        if latency not in OF_A_REQUEST:
            known = ", ".join(OF_A_REQUEST)
            raise wrong(at + match.start("latency"), f"'{latency}' is not a latency of a request; known: {known}")
        if sign not in ("<=", "<"):
            raise wrong(at + match.start("sign"), f"{_quoted(sign)} is not a comparison; use one of <= <")
        if not number:
            raise wrong(at + match.start("unit"), f"{_quoted(unit)} is not a number")
        value = _number(number, at + match.end("number"), wrong)
        if unit not in _TIME:
            raise wrong(at + match.start("unit"), _unit_advice(unit, latency, _TIME))
        if match["rest"]:
            raise wrong(at + match.start("rest"), f"{_quoted(match['rest'][:8].strip())}: ',' or ')' is expected")
        yield Slo(text=f"{latency}{sign}{number}{unit}", latency=latency, operator=sign, bound_s=value / _TIME[unit])


def _number(text: str, end: int, wrong: Callable[[int, str], ValueError]) -> float:
    if len(text) > MAX_DIGITS or not math.isfinite(float(text)):
        raise wrong(end, f"a bound has at most {MAX_DIGITS} characters, and is not infinite")
    return float(text)


def _is_relative(number: str, rest: str, at: int, wrong: Callable[[int, str], ValueError]) -> bool:
    """Whether the bound is a multiple of the baseline: `0.97 * baseline` or `baseline`."""
    match = re.match(r"(\* *)?([A-Za-z]*) *", rest)
    assert match is not None
    if bool(number) != bool(match[1]):
        return False
    if match[2] != BASELINE:
        if number:
            raise wrong(at + match.start(2), f"{_quoted(rest[match.start(2) :][:8].strip())} is not '{BASELINE}'")
        return False
    if after := rest[match.end() :].strip():
        text = f"'{after}' follows the end; a multiple is written '0.97 * {BASELINE}'"
        raise wrong(at + match.end(), text)
    return True


def _quoted(text: str) -> str:
    return f"'{text}'" if text else "nothing"


def _unit_advice(unit: str, metric: str, known: Iterable[str]) -> str:
    named = " or ".join(f"'{one}'" if one else "no unit" for one in known)
    return f"{_quoted(unit)} is not a unit of {metric}; use {named}"


def _metric_advice(metric: str) -> str:
    if not metric:
        return "such as ttft_p95, error_rate or speedup"
    family = next((name for name in sorted(LATENCIES, reverse=True) if metric.startswith(f"{name}_")), metric)
    if family in LATENCIES:
        return f"known: {', '.join(f'{family}_{statistic}' for statistic in STATISTICS)}"
    return did_you_mean(metric, UNITS)
