"""Checks as they are written: `[SERVER/LOAD:] METRIC OP BOUND`, such as `ttft_p95 <= 2s`.

METRIC is a name, or `attainment(SLO, ...)` or `goodput(SLO, ...)` with SLOs such as `ttft<=1s`. BOUND is a number with
its unit, or a multiple of what the baseline has: `0.97 * baseline`. What a check comes to, `harness.judge.checks` says.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec import Struct

from harness.errors import did_you_mean, which_row
from harness.scenario.scenario import LOAD_NAME, NAME
from harness.summary import NEEDED

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
LATENCIES = {
    "ttft": "ttft_s", "ttfo": "ttfo_s", "tpot": "tpot_s", "e2e": "e2e_s", "gap": "chunk_gap_s",
    "ttft_sched": "ttft_sched_s", "e2e_sched": "e2e_sched_s", "send_lag": "send_lag_s",
    "connect": "connect_s",
}  # fmt: skip
STATISTICS = (*NEEDED, "mean")
# What an SLO may bound: latencies that a request has one of.
OF_A_REQUEST = ("ttft", "ttfo", "tpot", "e2e", "ttft_sched", "e2e_sched")
# Which units a metric may be written in, and how many of them make one: 95 / 100 is 0.95, and 95 * 0.01 is not.
_TIME = {"s": 1.0, "ms": 1000.0}
_SHARE = {"": 1.0, "%": 100.0}
_PLAIN = {"": 1.0}
_RATE = "req/s"
UNITS: dict[str, dict[str, float]] = {
    **{f"{latency}_{statistic}": _TIME for latency in LATENCIES for statistic in STATISTICS},
    "wall": _TIME,
    "error_rate": _SHARE,
    "output_tok_s": _PLAIN,
    "requests_per_s": _PLAIN,
    "speedup": _PLAIN,
    "attainment": _SHARE,
    "goodput": {**_SHARE, _RATE: 1.0},
    "input_tok_s": _PLAIN,
    "valid_share": _SHARE,
    "right_share": _SHARE,
}
JUDGED_BY_SLOS = ("attainment", "goodput")
OF_ANSWERS = ("valid_share", "right_share")
BASELINE = "baseline"
MOST_DIGITS = 30  # of a bound
_NUMBER = r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"


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
    """Read a check. Raises ValueError that says where it is wrong, and what is known there."""
    reader = _Reader(text)
    server, load = _selection(reader)
    metric, slos = _metric(reader)
    sign = _sign(reader, tuple(OPERATORS))
    number = reader.word(_NUMBER)
    relative = _is_baseline(reader, number)
    if relative and metric == "speedup":
        raise reader.wrong("'speedup' is relative to the baseline already; use a plain number")
    if not relative and not number:
        raise reader.wrong(f"{reader.next()} is not a number")
    if len(number) > MOST_DIGITS or not math.isfinite(float(number or 1)):
        raise reader.wrong(f"a bound has at most {MOST_DIGITS} characters, and is not infinite")
    bound = float(number or 1) if relative else float(number) / _unit(reader, metric, UNITS[metric])
    if metric == "goodput" and not relative and reader.unit != _RATE:
        metric = "attainment"
    if metric in OF_ANSWERS and not relative and bound > 1:
        raise reader.wrong("a share of all answers is at most 1")
    if metric == "attainment" and not relative and bound > 1:
        raise reader.wrong(f"a share of all requests is at most 1; for requests a second write goodput with '{_RATE}'")
    return Check(
        text=text.strip(),
        server=server,
        load=load,
        metric=metric,
        slos=slos,
        operator=sign,
        bound=bound,
        relative=relative,
    )


class _Reader:
    """A text and the place in it that is being read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0  # where the next word begins
        self.start = 0  # where the last one did
        self.unit = ""
        self._skip()

    def word(self, pattern: str) -> str:
        """The word here, "" if there is none of that kind."""
        match = re.compile(pattern).match(self.text, self.at)
        self.start = self.at
        if match is None:
            return ""
        self.at = match.end()
        self._skip()
        return match[0]

    def back(self) -> None:
        self.at = self.start

    def next(self, width: int = 8) -> str:
        return _quoted(self.text[self.at : self.at + width].strip())

    def rest(self) -> str:
        self.start, following = self.at, self.text[self.at :].strip()
        self.at = len(self.text)
        return following

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"check '{self.text.strip()}', at character {self.at + 1}: {what}")

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1


def _selection(reader: _Reader) -> tuple[str | None, str | None]:
    if ":" not in reader.text:
        return None, None
    selection = reader.text[: reader.text.index(":")].strip()
    match = re.fullmatch(f"({NAME})/({LOAD_NAME})", selection)
    if match is None:
        raise reader.wrong(f"'{selection}' is not SERVER/LOAD")
    reader.word(r"[^:]*:")
    return match[1], match[2]


def _metric(reader: _Reader) -> tuple[str, tuple[Slo, ...]]:
    metric = reader.word(r"[A-Za-z0-9_]+")
    if metric not in UNITS:
        reader.back()
        raise reader.wrong(f"'{metric}' is not a metric; {_metric_advice(metric)}")
    if metric not in JUDGED_BY_SLOS:
        return metric, ()
    if not reader.word(r"\("):
        raise reader.wrong(f"'{metric}' needs SLOs in parentheses, such as {metric}(ttft<=1s, tpot<=50ms)")
    slos = [_slo(reader)]
    while reader.word(","):
        slos.append(_slo(reader))
    if not reader.word(r"\)"):
        raise reader.wrong(f"{reader.next()} stands where ',' or ')' is expected")
    return metric, tuple(slos)


def _slo(reader: _Reader) -> Slo:
    latency = reader.word(r"[A-Za-z0-9_]+")
    if latency not in OF_A_REQUEST:
        reader.back()
        raise reader.wrong(f"'{latency}' is not a latency of a request; known: {', '.join(OF_A_REQUEST)}")
    sign = _sign(reader, ("<=", "<"))
    number = reader.word(_NUMBER)
    if not number:
        raise reader.wrong(f"{reader.next()} is not a number")
    if len(number) > MOST_DIGITS or not math.isfinite(float(number)):
        raise reader.wrong(f"a bound has at most {MOST_DIGITS} characters, and is not infinite")
    unit = reader.word(r"[^,) ]*")
    if unit not in _TIME:
        reader.back()
        raise reader.wrong(_unit_advice(unit, latency, _TIME))
    return Slo(
        text=f"{latency}{sign}{number}{unit}", latency=latency, operator=sign, bound_s=float(number) / _TIME[unit]
    )


def _sign(reader: _Reader, known: tuple[str, ...]) -> str:
    sign = reader.word(r"[<>=!~]+")
    if sign not in known:
        reader.back()
        raise reader.wrong(
            f"{_quoted(sign) if sign else reader.next()} is not a comparison; use one of {' '.join(known)}"
        )
    return sign


def _is_baseline(reader: _Reader, number: str) -> bool:
    """Whether the bound goes on as a multiple of the baseline; then all of it is read."""
    if number and not reader.word(r"\*"):
        return False
    word = reader.word(r"[A-Za-z]+")
    if word == BASELINE:
        if rest := reader.rest():
            reader.back()
            raise reader.wrong(f"'{rest}' stands after the end; a multiple is written '0.97 * {BASELINE}'")
        return True
    reader.back()
    if number:
        raise reader.wrong(f"{reader.next()} is not '{BASELINE}'")
    return False


def _unit(reader: _Reader, metric: str, known: Mapping[str, float]) -> float:
    unit = reader.unit = reader.rest()
    if unit not in known:
        reader.back()
        raise reader.wrong(_unit_advice(unit, metric, known))
    return known[unit]


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
