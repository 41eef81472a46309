"""Checks: `[SERVER/LOAD:] METRIC OP NUMBER[UNIT]`, such as `ttft_p95 <= 2s`, held against the rows of a summary."""

import operator
import re
from collections.abc import Callable, Sequence

from msgspec import Struct

from harness.errors import did_you_mean
from harness.summary import NEEDED, CheckResult, Comparison, Distribution, Row

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
LATENCIES = {"ttft": "ttft_s", "ttfo": "ttfo_s", "tpot": "tpot_s", "e2e": "e2e_s", "gap": "chunk_gap_s"}
STATISTICS = (*NEEDED, "mean")
# Which units a metric may be written in, and what they are worth.
_TIME = {"s": 1.0, "ms": 0.001}
_SHARE = {"": 1.0, "%": 0.01}
_PLAIN = {"": 1.0}
UNITS: dict[str, dict[str, float]] = {
    **{f"{latency}_{statistic}": _TIME for latency in LATENCIES for statistic in STATISTICS},
    "wall": _TIME,
    "error_rate": _SHARE,
    "output_tok_s": _PLAIN,
    "requests_per_s": _PLAIN,
    "speedup": _PLAIN,
}
_NAME = r"[a-z0-9][a-z0-9-]{0,39}"
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class Check(Struct, frozen=True, kw_only=True):
    """A check as read. `bound` is in seconds or a plain number; no server and load: it holds for every row."""

    text: str
    server: str | None = None
    load: str | None = None
    metric: str
    operator: str
    bound: float


def parse_check(text: str) -> Check:
    """Read a check. Raises ValueError that says where it is wrong, and what is known there."""
    server = load = None
    at = _blanks(text, 0)
    if ":" in text:
        selection = text[: text.index(":")].strip()
        match = re.fullmatch(f"({_NAME})/({_NAME})", selection)
        if match is None:
            raise _wrong(text, at, f"'{selection}' is not SERVER/LOAD")
        server, load = match.groups()
        at = _blanks(text, text.index(":") + 1)
    metric = _word(text, at, r"[A-Za-z0-9_]+")
    if metric not in UNITS:
        raise _wrong(text, at, f"'{metric}' is not a metric; {_metric_advice(metric)}")
    at = _blanks(text, at + len(metric))
    sign = _word(text, at, r"[<>=!~]+")
    if sign not in OPERATORS:
        raise _wrong(
            text, at, f"{_quoted(sign or text[at : at + 8])} is not a comparison; use one of {' '.join(OPERATORS)}"
        )
    at = _blanks(text, at + len(sign))
    number = _NUMBER.match(text, at)
    if number is None:
        raise _wrong(text, at, f"{_quoted(text[at : at + 8])} is not a number")
    at = _blanks(text, number.end())
    unit = text[at:].strip()
    units = UNITS[metric]
    if unit not in units:
        named = " or ".join(f"'{known}'" if known else "no unit" for known in units)
        raise _wrong(text, at, f"{_quoted(unit)} is not a unit of {metric}; use {named}")
    return Check(
        text=text.strip(), server=server, load=load, metric=metric, operator=sign, bound=float(number[0]) * units[unit]
    )


def evaluate(texts: Sequence[str], rows: Sequence[Row], comparison: Comparison | None) -> list[CheckResult]:
    """How each check came out. A check without enough data fails, and says what it needs."""
    results = []
    for text in texts:
        try:
            results.append(_evaluate(parse_check(text), rows, comparison))
        except ValueError as error:
            results.append(CheckResult(check=text, passed=False, evidence=str(error)))
    return results


def _evaluate(check: Check, rows: Sequence[Row], comparison: Comparison | None) -> CheckResult:
    chosen = [row for row in rows if check.server is None or (row.server, row.load) == (check.server, check.load)]
    if check.metric == "speedup" and comparison is not None and check.server is None:
        sides = {verdict.side for verdict in comparison.verdicts}  # the baseline is not compared with itself
        chosen = [row for row in chosen if _name(row) in sides]
    if not chosen:
        return CheckResult(check=check.text, passed=False, evidence="there is no row that it applies to")
    holds = OPERATORS[check.operator]
    failed, held = [], []
    for row in chosen:
        value, missing = _value(check.metric, row, comparison)
        if value is None:
            failed.append(f"{_name(row)}: {missing}")
        elif holds(value, check.bound):
            held.append((value, f"{_name(row)}: {_shown(check.metric, value)}"))
        else:
            failed.append(f"{_name(row)}: {_shown(check.metric, value)}")
    if failed:
        return CheckResult(check=check.text, passed=False, evidence="; ".join(failed))
    # Of those that hold the one closest to the bound says most.
    closest = min(held, key=lambda item: abs(item[0] - check.bound))[1]
    rest = f" (the closest of {len(held)} rows)" if len(held) > 1 else ""
    return CheckResult(check=check.text, passed=True, evidence=closest + rest)


def _value(metric: str, row: Row, comparison: Comparison | None) -> tuple[float | None, str]:
    """A row's value, or None and what it would need."""
    numbers = row.pooled
    latency, _, statistic = metric.partition("_")
    if latency in LATENCIES and statistic in STATISTICS:
        return _latency(getattr(numbers, LATENCIES[latency]), latency, statistic)
    if metric == "speedup":
        return _speedup(row, comparison)
    if metric == "error_rate":
        return numbers.error_rate, "no request was sent; 1 is needed"
    if metric == "wall":
        return numbers.wall_s, "a load without a fixed number of requests has no wall time"
    if metric == "output_tok_s":
        return numbers.output_tok_s, "not known: the server has to report the tokens of every answer"
    return numbers.requests_per_s, "not known: no request was measured"


def _latency(sample: Distribution, latency: str, statistic: str) -> tuple[float | None, str]:
    if statistic == "mean":
        return sample.mean, f"no successful request has a {latency}; 1 is needed"
    needed = NEEDED[statistic]
    what = f"{sample.n:,} values are there" if latency == "gap" else f"there are {sample.n:,}"
    return getattr(sample, statistic), f"needs {needed:,} successful requests that have a {latency}; {what}"


def _speedup(row: Row, comparison: Comparison | None) -> tuple[float | None, str]:
    if comparison is None:
        return None, "nothing was compared: the run is not VALID, or has one row only"
    verdict = next((v for v in comparison.verdicts if v.side == _name(row)), None)
    if verdict is None:
        return None, "it is the baseline itself"
    if verdict.low is None:
        return None, "needs at least 2 repeats of this row and of the baseline"
    return verdict.ratio, ""


def _shown(metric: str, value: float) -> str:
    if UNITS[metric] is _TIME:
        return f"{value:.4g} s" if value >= 1 else f"{value * 1000:.4g} ms"
    return f"{value:.4g}" if metric != "error_rate" else f"{value * 100:.3g} %"


def _name(row: Row) -> str:
    return f"{row.server} / {row.load}"


def _blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] == " ":
        at += 1
    return at


def _word(text: str, at: int, pattern: str) -> str:
    match = re.compile(pattern).match(text, at)
    return match[0] if match else ""


def _quoted(text: str) -> str:
    return f"'{text.strip()}'" if text.strip() else "nothing"


def _metric_advice(metric: str) -> str:
    if not metric:
        return "such as ttft_p95, error_rate or speedup"
    family = metric.partition("_")[0]
    if family in LATENCIES:
        return f"known: {', '.join(f'{family}_{statistic}' for statistic in STATISTICS)}"
    return did_you_mean(metric, UNITS)


def _wrong(text: str, at: int, what: str) -> ValueError:
    return ValueError(f"check '{text.strip()}', at character {at + 1}: {what}")
