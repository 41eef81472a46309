"""The syntax of checks: `[[SERVER/]LOAD:] METRIC OP BOUND`, such as `ttft_p95 <= 2s`.

METRIC is a name, or `attainment(SLO, ...)` or `goodput(SLO, ...)` with SLOs such as `ttft<=1s`. BOUND is a number with
its unit, or a multiple of the baseline's value: `0.97 * baseline`. `harness.numbers.checks` evaluates checks.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from msgspec import Struct

from harness.base.errors import did_you_mean, suggest_row
from harness.base.measured import PERCENTILES
from harness.base.metrics import LATENCIES, METRICS, STATISTICS
from harness.scenario import LOAD_NAME, NAME

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
# The latencies that an SLO may bound: a request has one value of each.
SLO_LATENCIES = tuple(latency.name for latency in LATENCIES if latency.slo)
# The units of each metric, each with its divisor: 95 / 100 is 0.95, but 95 * 0.01 is not.
_TIME = {"s": 1.0, "ms": 1000.0}
_SHARE = {"": 1.0, "%": 100.0}
_PLAIN = {"": 1.0}
_UNITS = {"s": _TIME, "%": _SHARE, "tok/s": _PLAIN, "req/s": _PLAIN, "": _PLAIN}
_RATE = "req/s"
UNITS: dict[str, dict[str, float]] = {
    **{metric.name: _UNITS[metric.unit] for metric in METRICS.values() if metric.statistic or not metric.latency},
    "goodput": {**_SHARE, _RATE: 1.0},
}
SLO_METRICS = ("attainment", "goodput")
ANSWER_SHARES = ("valid_share", "right_share")
BASELINE = "baseline"
MAX_CHECK = 1000  # characters
MAX_DIGITS = 30  # of a bound
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
# Both match every text; a missing part is empty.
_CHECK = re.compile(
    r" *(?:(?P<selection>[^:]*):)? *(?P<metric>[A-Za-z0-9_]*) *(?:\((?P<slos>[^)]*)\))? *"
    r"(?P<sign>[<>=!~]*)(?P<rest>.*)",
    re.DOTALL,
)
_SLO = re.compile(r" *(?P<latency>[A-Za-z0-9_]*) *(?P<sign>[<>=!~]*)(?P<rest>.*)", re.DOTALL)


class CheckError(ValueError):
    """A check has a mistake, which the message describes."""


class Slo(Struct, frozen=True, kw_only=True):
    """A bound on a latency of one request, such as `ttft<=1s`."""

    text: str
    latency: str  # one of OF_A_REQUEST
    operator: str  # "<=" or "<"
    bound_s: float


class Check(Struct, frozen=True, kw_only=True):
    """A parsed check. Without a server it holds for each of them; without a load, for every row.

    An SLO is a check that a `share` of the requests meets all its `bounds`: `ttft_p95<=2s` is a share of 0.95 and one
    bound.
    """

    text: str
    server: str | None = None
    load: str | None = None
    metric: str  # `goodput` with a share as its bound becomes `attainment`
    slos: tuple[Slo, ...] = ()
    operator: str
    bound: float  # in seconds or a plain number, or the factor of the baseline's value
    relative: bool = False

    @property
    def bounds(self) -> tuple[Slo, ...]:
        """The bounds on single requests: those of an attainment or goodput, or that of a percentile; else none."""
        metric = METRICS.get(self.metric)
        is_upper = self.operator in ("<=", "<") and not self.relative
        if self.slos or metric is None or not is_upper:
            return self.slos
        if metric.latency not in SLO_LATENCIES or metric.statistic not in PERCENTILES:
            return ()
        return (_parse_slo(f"{metric.latency}{self.operator}{self.text.rpartition(self.operator)[2]}"),)

    @property
    def is_slo(self) -> bool:
        """Whether a share of the requests must meet all bounds."""
        if self.relative or not self.bounds or self.metric == "goodput":
            return False
        return not self.slos or (self.operator in (">=", ">") and 0 < self.bound < 1)

    @property
    def share(self) -> float:
        """The share of the requests (0 to 1) that must meet all bounds; only of an SLO."""
        return self.bound if self.slos else PERCENTILES[METRICS[self.metric].statistic].share

    def concerns(self, server: str, load: str) -> bool:
        """Whether it holds for this row."""
        return self.server in (None, server) and self.load in (None, load)


def split_checks(texts: Iterable[str]) -> list[str]:
    """Return single checks of texts that may have several, with commas outside of parentheses between them."""
    return [part.strip() for text in texts for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def request_slos(texts: Iterable[str]) -> tuple[Slo, ...]:
    """Return the bounds on single requests in checks: those of the first attainment or goodput, else of percentiles.

    Raises CheckError.
    """
    checks = [parse_check(text) for text in split_checks(texts)]
    slos = next((check.slos for check in checks if check.slos), None)
    return slos or tuple(slo for check in checks for slo in check.bounds)


def slos_key(slos: Iterable[Slo]) -> str:
    return ", ".join(slo.text for slo in slos)


def slo_sets(texts: Iterable[str]) -> dict[str, tuple[Slo, ...]]:
    """Return the sets of SLOs in checks, by their key. Texts that are not checks are ignored."""
    sets = {}
    for text in texts:
        with suppress(CheckError):
            if slos := parse_check(text).slos:
                sets[slos_key(slos)] = slos
    return sets


def check_problem(text: str, servers: Collection[str] | None, loads: Collection[str] | None) -> str | None:
    """Return the mistake of a check in a scenario with these servers and loads (None: any names); None: no mistake."""
    try:
        check = parse_check(text)
    except CheckError as error:
        return str(error)
    for kind, name, names in (("server", check.server, servers), ("load", check.load, loads)):
        if name is not None and names is not None and name not in names:
            return f"check '{check.text}': '{name}' is not a {kind}; {suggest_row(name, names)}"
    return None


def move_check(text: str, server: str) -> str:
    """Return the check for another server; one without a selection is returned unchanged."""
    return re.sub(rf"^\s*{NAME}/(?={LOAD_NAME}\s*:)", f"{server}/", text)


def parse_check(text: str) -> Check:
    """Parse a check. Raises CheckError with the mistake and the known names."""
    try:
        return _parse(text)
    except CheckError as error:
        raise CheckError(f"check '{text.strip()}': {error}") from None


def _parse(text: str) -> Check:
    if len(text) > MAX_CHECK:
        raise CheckError(f"a check has at most {MAX_CHECK:,} characters")
    match = _CHECK.fullmatch(text)
    assert match is not None, "every text matches"
    selection, metric, rest = match["selection"], match["metric"], match["rest"].strip()
    row = None if selection is None else re.fullmatch(f"(?:({NAME})/)?({LOAD_NAME})", selection.strip())
    if selection is not None and row is None:
        raise CheckError(f"'{selection.strip()}' is neither SERVER/LOAD nor LOAD")
    if metric not in UNITS:
        raise CheckError(f"'{metric}' is not a metric; {_metric_advice(metric)}")
    if (metric in SLO_METRICS) != (match["slos"] is not None):
        raise CheckError("SLOs in parentheses belong to attainment and goodput: goodput(ttft<=1s, tpot<=50ms) >= 0.95")
    slos = tuple(map(_parse_slo, [] if match["slos"] is None else match["slos"].split(",")))
    if match["sign"] not in OPERATORS:
        raise CheckError(f"{_quoted(match['sign'] or rest)} is not a comparison; use one of {' '.join(OPERATORS)}")
    multiple = re.fullmatch(rf"(?:({_NUMBER}) *\* *)?{BASELINE}", rest)
    if multiple is not None:
        bound = _parse_bound(multiple[1] or "1")
        if metric == "speedup":
            raise CheckError("'speedup' is relative to the baseline already; use a plain number")
    else:
        _, unit, bound = _parse_amount(rest, metric, UNITS[metric])
        if metric == "goodput" and unit != _RATE:
            metric = "attainment"
        if metric in (*ANSWER_SHARES, "attainment") and bound > 1:
            raise CheckError(f"a share is at most 1; for requests a second write goodput with '{_RATE}'")
    return Check(
        text=text.strip(),
        server=row and row[1],
        load=row and row[2],
        metric=metric,
        slos=slos,
        operator=match["sign"],
        bound=bound,
        relative=multiple is not None,
    )


def _parse_slo(text: str) -> Slo:
    match = _SLO.fullmatch(text)
    assert match is not None, "every text matches"
    latency, sign = match["latency"], match["sign"]
    if latency not in SLO_LATENCIES:
        raise CheckError(f"'{latency}' is not a latency of a request; known: {', '.join(SLO_LATENCIES)}")
    if sign not in ("<=", "<"):
        raise CheckError(f"{_quoted(sign)} is not a comparison; use one of <= <")
    number, unit, bound_s = _parse_amount(match["rest"].strip(), latency, _TIME)
    return Slo(text=f"{latency}{sign}{number}{unit}", latency=latency, operator=sign, bound_s=bound_s)


def _parse_amount(text: str, metric: str, units: Mapping[str, float]) -> tuple[str, str, float]:
    """Return number and unit as written, and the value."""
    match = re.fullmatch(rf"({_NUMBER}) *(.*)", text, re.DOTALL)
    if match is None:
        raise CheckError(f"{_quoted(text)} is neither a number nor a multiple such as '0.97 * {BASELINE}'")
    number, unit = match.groups()
    if unit not in units:
        choices = " or ".join(f"'{name}'" if name else "no unit" for name in units)
        if not unit:
            raise CheckError(f"the unit of {metric} is missing after {number}; use {choices}")
        raise CheckError(f"{_quoted(unit)} is not a unit of {metric}; use {choices}")
    return number, unit, _parse_bound(number) / units[unit]


def _parse_bound(text: str) -> float:
    if len(text) > MAX_DIGITS or not math.isfinite(float(text)):
        raise CheckError(f"a bound has at most {MAX_DIGITS} characters, and is not infinite")
    return float(text)


def _quoted(text: str) -> str:
    return f"'{text}'" if text else "nothing"


def _metric_advice(metric: str) -> str:
    families = [latency.name for latency in LATENCIES if f"{metric}_".startswith(f"{latency.name}_")]
    if families:
        family = max(families, key=len)
        return f"known: {', '.join(f'{family}_{statistic}' for statistic in STATISTICS)}"
    rate, _, statistic = metric.rpartition("_")
    if statistic in PERCENTILES and rate.endswith("tok_s"):  # the p90 of a rate is the fastest tenth
        if rate == "input_tok_s":
            return f"use ttft_{statistic}, whose tail are the slow prompts: 'ttft_{statistic} <= 2s'"
        return f"use tpot_{statistic}, whose tail are the slow answers: 'tpot_{statistic} <= 50ms' is 20 tok/s or more"
    return did_you_mean(metric, UNITS)
