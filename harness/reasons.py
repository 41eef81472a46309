"""Reasons, notes, evidence and verdicts as sentences: the only module that makes text of them.

data/reasons.yaml has the sentence of each code of a Reason. The functions below make those that no template can make.
"""

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from harness.columns import METRIC_WORDS, NUMBER_WORDS
from harness.files import PACKAGE, read_bytes
from harness.summary import ALPHA, MARGIN, MAX_REPEATS, POWER, LimitedBy, Reason, Verdict
from harness.units import GIB, count, date_time, duration, figures, gib

OTHERWISE = "†"  # next to a number of a row that means something else than in the first row; a note says what
LIMIT_WORDS: dict[LimitedBy, str] = {
    "client": "load generator", "kv_cache": "KV cache", "queue": "queueing", "api": "API process", "prefill": "prefill",
    "decode": "decode",
}  # fmt: skip
_MAX_LOG_CHARS = 300  # of a log line in a sentence
_OPTIONAL_PART = re.compile(r"\[([^]|]*)(?:\|([^]]*))?\]")


@cache
def reason_templates() -> dict[str, str]:
    """The template of each code that has one."""
    return msgspec.yaml.decode(read_bytes(PACKAGE / "data" / "reasons.yaml"), type=dict[str, str])


def sentence(reason: Reason) -> str:
    """A reason as a sentence. The cell that it is about comes first."""
    if reason.code in COMPOSED:
        text = COMPOSED[reason.code](**reason.values)
    elif reason.code in reason_templates():
        text = _fill_template(reason.code, reason.values)
    else:  # written by a newer harness
        text = f"{reason.code} {msgspec.json.encode(reason.values).decode()}"
    return text if reason.cell is None else f"{reason.cell}: {text}"


def sentences(reasons: Iterable[Reason]) -> list[str]:
    return [sentence(reason) for reason in reasons]


def evidence(reasons: Iterable[Reason]) -> str:
    """The evidence of a check on one line."""
    return "; ".join(sentences(reasons))


def number_names(fields: Sequence[str]) -> str:
    """Fields of Numbers as a list: "TTFT, TPOT and chunk gaps"."""
    names = [NUMBER_WORDS[field] for field in fields]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


class _ReasonFormatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec.startswith("#"):
            return count(value, *format_spec[1:].split("|"))
        if format_spec.startswith("?"):
            return format_spec[1:].split("|")[not value]
        if format_spec in _FORMATS:
            return _FORMATS[format_spec](value)
        return super().format_field(value, format_spec)


_FORMATTER = _ReasonFormatter()


def _fill_template(code: str, values: Mapping[str, Any]) -> str:
    def choose_part(match: re.Match[str]) -> str:
        names = [name for _, name, _, _ in _FORMATTER.parse(match[1]) if name]
        return match[1] if all(values.get(name) for name in names) else match[2] or ""

    return _FORMATTER.format(_OPTIONAL_PART.sub(choose_part, reason_templates()[code]), **values)


def _nested_sentence(reason: Mapping[str, Any]) -> str:
    """The sentence of a reason that is a value of another one."""
    return sentence(msgspec.convert(reason, Reason))


def _client_limited(fields: Sequence[str]) -> str:
    return f"client-limited ({number_names(fields)}): " if fields else "client-limited: "


def format_amount(amount: float, unit: str, load: str | None = None) -> str:
    """A number of users, requests/s, or times a trace; with the name of the load if it is one of a mix."""
    if unit == "users":
        return count(round(amount), "user" if load is None else f"{load} user")
    return f"{figures(amount, 3)} {unit}" + ("" if load is None else f" of {load}")


def format_amounts(loads: Iterable[Mapping[str, Any]]) -> str:
    """The amounts of several loads: "20 chat users and 3 job users"."""
    return " and ".join(format_amount(**load) for load in loads)


def _format_number(amount: float, unit: str, **_: Any) -> str:
    """An amount without its unit."""
    return f"{round(amount):,}" if unit == "users" else figures(amount, 3)


def _format_shares(shares: Sequence[Sequence[int]]) -> str:
    """ "297 of 300 (99.0%) and 200 of 300 (66.7%)" """
    return " and ".join(f"{number:,} of {total:,} ({number / total:.1%})" for number, total in shares)


# Sentences that no template can make. The docstring is the entry in docs/run-directory.md.


def _server_death(
    how: str, exit_code: int | None = None, detail: str = "", cause: str | None = None, of_gateway: bool = False
) -> str:
    """How a server ended: `how` of `death`, with the cause where the failure table knows it."""
    ends = {
        "ended": f"it ended with exit code {exit_code}",
        "restarted": "it was restarted",
        "removed": "its container was removed by another process",
        "paused": "its container was paused by another process",
        "closed": f"nothing listens at {detail} any more",
        "unreachable": detail,
    }
    return ("its gateway: " if of_gateway else "") + ends[how] + (f": {cause}" if cause else "")


def _server_died(**death: Any) -> str:
    """The server died during the load: how, and why."""
    return f"the server died during the load: {_server_death(**death)}"


def _server_unreachable(**death: Any) -> str:
    """The server could not be reached any more: what the way to it reported."""
    return f"the server could not be reached any more: {_server_death(**death)}"


def _server_log(line: str, failure: str | None = None, number: int | None = None, fix: str | None = None) -> str:
    """What the log of a server that died says: the line, and how to solve it."""
    if failure is None:
        return f"the last line of its log: {line}"
    where = "its log ends with" if number is None else f"line {number} of its log says"
    shown = line[:_MAX_LOG_CHARS] + ("..." if len(line) > _MAX_LOG_CHARS else "")
    return f"{where}: {shown or 'nothing'}; to solve it: {fix}"


def _tokens_differ(server: float, min_tokens: int, max_tokens: int | None, max_share: float) -> str:
    """The tokens that the server and the client counted; how far they may differ."""
    client = f"{min_tokens:,}"
    if max_tokens is None:
        client = f"at least {client}"
    elif max_tokens != min_tokens:
        client = f"{client} to {max_tokens:,}"
    return (
        f"the server counted {server:,.0f} generated tokens and the client {client}, warm-up included: they differ by "
        f"more than {max_share:.0%}"
    )


def _capacity_frontier(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    corners: Sequence[Sequence[float | None]],
    complete: bool,
    unresolved: Sequence[Sequence[float]] = (),
) -> str:
    """How much of one load of a mix fits next to how much of the other. `corners`, `unresolved`: amounts of both."""
    parts: list[str] = []
    if not complete:  # what is not known to fit may do so
        corners = [corner for corner in corners if corner[1] is not None]
    for first_amount, second_amount in corners:
        # Only the first pair has units and names.
        format_one: Callable[..., str] = _format_number if parts else format_amount
        fitting = f"no {second['load']}" if second_amount is None else format_one(second_amount, **second)
        parts.append(f"{fitting} next to {format_one(first_amount or 0.0, **first)}")
    text = f"holds {', '.join(parts)}"
    if unresolved:
        pairs = [
            f"{_format_number(second_amount, **second)} next to {_format_number(first_amount, **first)}"
            for first_amount, second_amount in unresolved
        ]
        text += f"; unresolved, so what is likelier counts: {', '.join(pairs)}"
    known = f"so far it {text}" if parts else "no pair is known to fit"
    return text if complete else f"unresolved: {known}; the search was stopped early"


def _check_value(
    row: str,
    unit: str,
    value: float | None = None,
    limited: bool = False,
    against: Mapping[str, Any] | None = None,
    interval: Sequence[float | None] | None = None,
    decision: Mapping[str, Any] | None = None,
    rows: int = 1,
    **_: Any,  # of older versions
) -> str:
    """The value of a row, with its 95 % interval, the baseline's value and what would decide."""
    parts = []
    if value is not None:
        text = _format_check_value(value, unit)
        text += " (client-limited)" if limited else ""
        if against is not None:
            base = against["value"]
            factor = f", {figures(value / base, 3)} times as much" if base else ""
            text += f" against {_format_check_value(base, unit)} of {against['name']}{factor}"
        parts.append(text)
    if interval is not None:
        low, high = (None if bound is None else _format_check_value(bound, unit) for bound in interval)
        bounds = f"up to {high}" if low is None else f"from {low}" if high is None else f"{low} to {high}"
        parts.append(f"95 % interval {bounds}")
    decided = "" if decision is None else f"; {_nested_sentence(decision)}"
    return f"{row}: {', '.join(parts)}{decided}" + (f" (worst of {rows} rows)" if rows > 1 else "")


def _format_check_value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{figures(value, 4)} s" if value >= 1 else f"{figures(value * 1000, 4)} ms"
    return f"{figures(value * 100, 3)} %" if unit == "%" else f"{figures(value, 4)} {unit}".rstrip()


COMPOSED: dict[str, Callable[..., str]] = {
    "server_death": _server_death, "server_died": _server_died, "server_unreachable": _server_unreachable,
    "server_log": _server_log, "tokens_differ": _tokens_differ, "capacity_frontier": _capacity_frontier,
    "check_value": _check_value,
}  # fmt: skip


# Verdicts.


def verdict_sentence(verdict: Verdict, *, side: str | None = None) -> str:
    """A verdict as a sentence: its side, word, reason, and how many more repeats would decide.

    `side` replaces the side, where several verdicts become one sentence.
    """
    word = "inconclusive: " if verdict.word == "inconclusive" else ""
    return f"{verdict.side if side is None else side}: {word}{_describe_verdict(verdict)}."


def _verdict_with_word(verdict: Mapping[str, Any]) -> str:
    """A verdict that is a value of a reason."""
    known = msgspec.convert(verdict, Verdict)
    return f"{known.word}: {_describe_verdict(known)}"


def _describe_verdict(verdict: Verdict) -> str:
    """A verdict without its side and word."""
    by = f"by {METRIC_WORDS[verdict.metric]}"
    if verdict.refused is not None:
        return sentence(verdict.refused)
    if verdict.reason == "no_values":
        sides = zip((verdict.side, verdict.baseline), verdict.n, strict=True)
        empty = " and ".join(name for name, number in sides if not number)
        why = "no valid repeat has one" if verdict.metric == "wall_s" else "no valid repeat reports it"
        return f"there is no {METRIC_WORDS[verdict.metric]} of {empty}; {why}"
    if verdict.ratio is None or verdict.low is None or verdict.high is None or verdict.p is None:
        return _describe_without_interval(verdict, by)
    bounds = f"95 % interval {_format_ratio(verdict.low)} to {_format_ratio(verdict.high)}"
    if verdict.word == "same":
        shown = f"{by} ({bounds}, p = {_format_p(verdict.p)})"
        return f"the same within ±{_format_percent(MARGIN)} as {verdict.baseline} {shown}"
    if verdict.word in ("faster", "slower"):
        low, high = sorted(_invert(bound) if verdict.ratio < 1 else bound for bound in (verdict.low, verdict.high))
        bounds = f"95 % interval {_format_ratio(low)}x to {_format_ratio(high)}x"
        return f"{format_speedup(verdict.ratio)} than {verdict.baseline} {by} ({bounds}, p = {_format_p(verdict.p)})"
    return f"{by}, {_why_inconclusive(verdict, bounds)}; {_describe_needed_repeats(verdict)}"


def _describe_without_interval(verdict: Verdict, by: str) -> str:
    if verdict.reason == "too_few":
        decide = f"at least {verdict.needed} repeats a side can decide" if verdict.needed else "compare fewer rows"
        return f"{by}, too few repeats for a confidence interval; {decide}"
    if verdict.reason == "apart":
        return (
            f"{by}, {format_speedup(verdict.ratio or 1.0)}; the repeats of the two rows are not interleaved: "
            "the run was resumed or paused between them, so the ratio contains what changed on the machine meanwhile; "
            "measure both in one run"
        )
    if verdict.reason != "run_variation_unknown":
        return by
    number, base = verdict.n
    return (
        f"{by}, how far equal runs differ on this machine is not known, and {number} against {count(base, 'run')} "
        f"{'does' if base == 1 else 'do'} not show it; `harness noise SCENARIO --runs 5 --every 60` measures it, or "
        f"compare at least {verdict.needed or MAX_REPEATS + 1} runs a side"
    )


def _why_inconclusive(verdict: Verdict, bounds: str) -> str:
    number, base = verdict.n
    if verdict.reason == "in_margin":
        return (
            f"the difference of {_format_percent(abs((verdict.ratio or 1) - 1))} is within the "
            f"±{_format_percent(MARGIN)} that are treated as noise, but its {bounds} is not"
        )
    if verdict.reason == "too_few":
        among = "" if verdict.comparisons == 1 else f" in {verdict.comparisons} comparisons"
        return f"{number} against {count(base, verdict.unit[:-1])} can never reach p < {ALPHA:g}{among}"
    if verdict.reason == "includes_one":
        return f"the {bounds} includes 1"
    return f"p = {_format_p(verdict.p or 0.0)} is not below {ALPHA:g}"


def _describe_needed_repeats(verdict: Verdict) -> str:
    """How many repeats or runs would decide an inconclusive verdict."""

    def format_needed(needed: int | None) -> str:
        return f"more than {MAX_REPEATS} {verdict.unit}" if needed is None else f"about {needed} {verdict.unit}"

    ratio, low, high = verdict.ratio or 1.0, verdict.low or 0.0, verdict.high or math.inf
    beyond_margin = abs(math.log(ratio)) > math.log1p(MARGIN)
    same = f"that the sides are the same within ±{_format_percent(MARGIN)}"
    text = f"at this spread, {format_needed(verdict.needed)} a side show "
    text += "a difference of this size" if beyond_margin else same
    if beyond_margin and low <= 1 <= high:  # there may be no difference at all
        text += f", {format_needed(verdict.needed_for_same)} that there is none"
    return f"{text}, with a probability of {POWER * 100:.0f} %"


def format_speedup(ratio: float, more: str = "faster", less: str = "slower") -> str:
    """A ratio of speeds: "2.00x faster", "2.38x slower"."""
    return f"{_format_ratio(_invert(ratio))}x {less}" if ratio < 1 else f"{_format_ratio(ratio)}x {more}"


def _invert(ratio: float) -> float:
    return 1 / ratio if ratio > 0 else math.inf


def _format_ratio(value: float) -> str:
    """A ratio with as many digits as its distance from 1 needs."""
    distance = abs(value - 1)
    return f"{value:.4f}" if distance < 0.005 else f"{value:.3f}" if distance < 0.05 else f"{value:.2f}"


def _format_percent(share: float) -> str:
    return f"{figures(100 * share)} %"


def _format_p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


# How templates format a value: `{seconds:duration}`.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "reason": _nested_sentence,
    "limited": _client_limited,
    "metric": METRIC_WORDS.__getitem__,
    "verdict": _verdict_with_word,
    "bound": lambda code: "least" if code == "below" else "most",
    "figures": figures,
    "figures3": lambda value: figures(value, 3),
    "percent": _format_percent,
    "part": lambda share: "half" if share == 0.5 else f"{share * 100:g} %",
    "changed": lambda change: f"{'rose' if change > 0 else 'fell'} by {_format_percent(abs(change))}",
    "faster": lambda ratio: f"{_format_percent(abs(ratio - 1))} {'faster' if ratio >= 1 else 'slower'}",
    "factor": _format_ratio,
    "longer": lambda ratio: f"{abs(100 * (ratio - 1)):.0f} % {'longer' if ratio > 1 else 'shorter'}",
    "up": lambda value: f"{math.ceil(value):,}",
    "users_up": lambda value: count(math.ceil(value), "user"),
    "duration": duration,
    "duration_up": lambda s: duration(math.ceil(s)) if s >= 10 else f"{math.ceil(100 * s) / 100:g} s",
    "sha256": lambda files: ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in files.items()),
    "mark": lambda _: OTHERWISE,
    "versions": lambda versions: ", ".join(f"{name} {version}" for name, version in versions.items()),
    "counts": lambda numbers: ", ".join(f"{name} {number:,}" for name, number in numbers.items()),
    "gib": gib,
    "gib2": lambda size: gib(size, 2),
    "gib_number": lambda size: f"{size / GIB:.1f}",
    "amount": lambda load: format_amount(**load),
    "amounts": format_amounts,
    "known": lambda levels: "; ".join(
        f"{format_amounts(each['loads'])}: {each['met']:,} of {each['total']:,} met {each['slo']}" for each in levels
    ),
    "number": lambda load: _format_number(**load),
    "list": lambda values: ", ".join(map(str, values)),
    "last_time": lambda times: date_time(times[-1]),
    "shares": lambda shares: " and ".join(
        f"{number:,} of {total:,} ({number / total:.1%})" for number, total in shares
    ),
    "ms": lambda seconds: f"{figures(1000 * seconds)} ms",
    "ms.0": lambda seconds: f"{1000 * seconds:.0f} ms",
    "ms.1": lambda seconds: f"{1000 * seconds:.1f} ms",
}
