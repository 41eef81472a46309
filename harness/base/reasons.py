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

from harness.base.columns import METRIC_WORDS, NUMBER_WORDS
from harness.base.files import PACKAGE, read_bytes
from harness.base.summary import MARGIN, MAX_REPEATS, OPEN, POWER, LimitedBy, Reason, Verdict
from harness.base.units import GIB, count, date_time, duration, figures, gib, percent

LIMIT_WORDS: dict[LimitedBy, str] = {
    "client": "load generator", "kv_cache": "KV cache", "queue": "queueing", "api": "API process", "prefill": "prefill",
    "decode": "decode",
}  # fmt: skip
_OPTIONAL_PART = re.compile(r"\[([^]|]*)(?:\|([^]]*))?\]")


@cache
def reason_templates() -> dict[str, str]:
    """The template of each code that has one."""
    return msgspec.yaml.decode(read_bytes(PACKAGE / "base" / "reasons.yaml"), type=dict[str, str])


def sentence(reason: Reason) -> str:
    """A reason as a sentence. The cell that it is about comes first."""
    if reason.text:
        text = reason.text
    elif reason.code in COMPOSED:
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
    return f"{figures(amount)} {unit}" + ("" if load is None else f" of {load}")


def format_amounts(loads: Iterable[Mapping[str, Any]]) -> str:
    """The amounts of several loads: "20 chat users and 3 job users"."""
    return " and ".join(format_amount(**load) for load in loads)


def _format_number(amount: float, unit: str, **_: Any) -> str:
    """An amount without its unit."""
    return f"{round(amount):,}" if unit == "users" else figures(amount)


# Sentences that no template can make. The docstring is the entry in docs/fields.md.


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


def _check_value(
    row: str,
    unit: str,
    value: float | None = None,
    limited: bool = False,
    against: Mapping[str, Any] | None = None,
    interval: Sequence[float | None] | None = None,
    above: float | None = None,
    requests: int = 0,
    censored: int = 0,
    unknown: int = 0,
    failed: int = 0,
    decision: Mapping[str, Any] | None = None,
    rows: int = 1,
) -> str:
    """The value of a row, with its 95 % interval, the baseline's value and what would decide."""
    parts, multiple = [], False
    shown = above if value is None else value
    if shown is not None:
        text = ("above " if value is None else "") + _format_check_value(shown, unit)
        text += " (client-limited)" if limited else ""
        if against is not None:
            base = against["value"]
            multiple = bool(base) and value is not None
            factor = f", {_format_ratio(shown / base)} times as much" if multiple else ""
            text += f" against {_format_check_value(base, unit)} of {against['name']}{factor}"
        parts.append(text)
    if interval is not None:
        low, high = (
            None
            if bound is None
            else f"{_format_ratio(bound / against['value'])}"
            if multiple and against is not None
            else _format_check_value(bound, unit)
            for bound in interval
        )
        bounds = f"up to {high}" if low is None else f"from {low}" if high is None else f"{low} to {high}"
        parts.append(f"95 % interval {bounds}{' times' if multiple else ''}")
    known = [f"{censored:,} cut before it ended"] if censored else []
    known += [f"{unknown:,} unknown"] if unknown else []
    known += [f"{failed:,} failed (within no bound)"] if failed else []
    if known:
        parts.append(f"{' and '.join(known)} of {count(requests, 'request')}")
    decided = "" if decision is None else f"; {_nested_sentence(decision)}"
    return f"{row}: {', '.join(parts)}{decided}" + (f" (worst of {rows} rows)" if rows > 1 else "")


def _format_check_value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{figures(value, 4)} s" if value >= 1 else f"{figures(value * 1000, 4)} ms"
    return f"{figures(value * 100)} %" if unit == "%" else f"{figures(value, 4)} {unit}".rstrip()


COMPOSED: dict[str, Callable[..., str]] = {
    "tokens_differ": _tokens_differ,
    "check_value": _check_value,
}  # fmt: skip


# Verdicts.


WORDS = {"no_difference": "no difference seen"}  # others are shown as they are


def verdict_word(verdict: Verdict) -> str:
    """The word of a verdict, marked where it is provisional: "slower (provisional)"."""
    word = WORDS.get(verdict.word, verdict.word)
    return f"{word} (provisional)" if verdict.provisional else word


def verdict_sentence(verdict: Verdict, *, side: str | None = None) -> str:
    """A verdict as a sentence: its side, ratio with interval, word, and what would settle or confirm it.

    `side` replaces the side, where several verdicts become one sentence.
    """
    return f"{verdict.side if side is None else side}: {_describe_verdict(verdict)}."


def _verdict_with_word(verdict: Mapping[str, Any]) -> str:
    """A verdict that is a value of a reason."""
    return _describe_verdict(msgspec.convert(verdict, Verdict))


def _describe_verdict(verdict: Verdict) -> str:
    """A verdict without its side."""
    if verdict.refused is not None:
        return f"inconclusive: {sentence(verdict.refused)}"
    if verdict.reason == "no_values":
        sides = zip((verdict.side, verdict.baseline), verdict.n, strict=True)
        empty = " and ".join(name for name, number in sides if not number)
        why = "no valid repeat has one" if verdict.metric == "wall_s" else "no valid repeat reports it"
        return f"inconclusive: there is no {METRIC_WORDS[verdict.metric]} of {empty}; {why}"
    if verdict.ratio is None:
        return f"inconclusive by {METRIC_WORDS[verdict.metric]}"
    parts = [describe_ratio(verdict)]
    if verdict.word == "same":
        parts.append(f"the same within ±{_format_percent(MARGIN)}")
    elif verdict.word == "no_difference":
        parts.append(f"no difference seen{_percents(verdict)}")
    elif verdict.word == "inconclusive":
        parts.append(f"inconclusive: {_why_inconclusive(verdict)}")
    elif verdict.p is not None and not verdict.provisional:
        parts[0] = parts[0].removesuffix(")") + f", p {_format_p(verdict.p)})"
    return "; ".join([*parts, *_what_confirms(verdict)])


def describe_ratio(verdict: Verdict, baseline: str | None = None) -> str:
    """The ratio of a verdict with its interval: "1.25x slower than a / x by wall time (95 % interval ...)".

    `baseline` replaces the name of the baseline.
    """
    ratio, low, high = verdict.ratio or 0.0, verdict.low, verdict.high
    is_decided = verdict.word in ("faster", "slower")
    if is_decided:
        speed = f"{format_speedup(ratio)} than"
        if low is not None and high is not None and ratio < 1:
            low, high = _invert(high), _invert(low)
    else:
        speed = f"{format_speedup(ratio)} than" if _format_ratio(ratio) != "1.0000" else "as fast as"
    notes = [_RUNS_OF_BASIS[verdict.basis]] if verdict.basis in _RUNS_OF_BASIS else []
    if notes and is_decided:
        times = max(ratio, _invert(ratio))
        shown = f"{times:.1f}" if times >= 1.2 else _format_ratio(times)
        speed = f"about {shown}x {verdict.word} ({notes.pop()}) than"
    known = low is not None and high is not None
    if not known:
        interval = "no interval"
    elif is_decided:
        interval = f"95 % interval {_format_ratio(low or 0.0)}x to {_format_ratio(high or 0.0)}x"
    else:
        interval = f"95 % interval {format_speedup(low or 0.0)} to {format_speedup(high or 0.0)}"
    return f"{speed} {baseline or verdict.baseline} by {METRIC_WORDS[verdict.metric]} ({', '.join([interval, *notes])})"


_RUNS_OF_BASIS = {"one_run": "one run, not repeated", "apart": "not interleaved"}


def _percents(verdict: Verdict) -> str:
    """The interval of a verdict as changes of the speed: " (-22 % to +7 %)"."""
    if verdict.low is None or verdict.high is None:
        return ""
    low, high = (f"{'+' if end > 1 else '-'}{_format_percent(abs(end - 1))}" for end in (verdict.low, verdict.high))
    return f" ({low} to {high})"


def _why_inconclusive(verdict: Verdict) -> str:
    alike, p = f"±{_format_percent(MARGIN)}", _format_p(verdict.p or 0.0).removeprefix("= ")
    why = {
        "in_margin": f"the difference is within {alike}, its interval is not",
        "includes_one": "the interval includes 1",
        "not_beyond": f"the interval is not beyond {alike}",
        "corrected": f"with {verdict.comparisons} comparisons the corrected p-value is {p}",
        "client": "the load generator was late, and the interval allows for that; without it there would be a verdict",
    }
    return why.get(verdict.reason or "", "too few repeats")


def _what_confirms(verdict: Verdict) -> list[str]:
    """What would settle an inconclusive verdict, or confirm a provisional one; and what a provisional one does."""
    texts = []
    if verdict.widened is not None and verdict.reason != "client":
        share = max(verdict.widened) - 1
        texts.append(f"the interval allows for {_format_percent(share)} of delay in the load generator")
    if verdict.reason == "client":
        texts.append("free a core for the load generator, or use more processes")
    elif verdict.basis in ("runs", "repeats") and (verdict.reason in OPEN or verdict.word == "no_difference"):
        texts.append(_describe_needed(verdict))
    if verdict.provisional:
        texts.append(f"provisional: {_confirmation(verdict)}")
    if verdict.fails == "with_provisional":
        texts.append("would fail with --provisional")
    return texts


_MEASURE = "harness run SCENARIO --times 5"


def _confirmation(verdict: Verdict) -> str:
    """What confirms a provisional verdict."""
    if verdict.basis == "one_run":
        return f"confirm it with --repeats {verdict.needed}"
    if verdict.basis == "apart":
        return f"confirm it in one run that is not interrupted, with --repeats {verdict.needed}"
    if verdict.word in ("faster", "slower", "same"):
        return f"confirm it with {verdict.needed} runs a side, or with `{_MEASURE}`"
    return f"the variation between runs is assumed; `{_MEASURE}` measures it"


def _describe_needed(verdict: Verdict) -> str:
    """How many repeats or runs would decide a verdict."""

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
    if value < 0.95:
        return figures(value) if value > 0 else "0"
    return f"{value:.4f}" if distance < 0.005 else f"{value:.3f}" if distance < 0.05 else f"{value:.2f}"


def _format_percent(share: float) -> str:
    return f"{figures(100 * share)} %"


def _format_p(value: float) -> str:
    return f"= {value:.2f}" if value >= 0.095 else f"= {value:.3f}" if value >= 0.001 else "< 0.001"


# How templates format a value: `{seconds:duration}`.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "reason": _nested_sentence,
    "limited": _client_limited,
    "metric": METRIC_WORDS.__getitem__,
    "verdict": _verdict_with_word,
    "bound": lambda code: "least" if code == "below" else "most",
    "figures": figures,
    "percent": _format_percent,
    "share": percent,
    "part": lambda share: "half" if share == 0.5 else f"{share * 100:g} %",
    "faster": lambda ratio: f"{_format_percent(abs(ratio - 1))} {'faster' if ratio >= 1 else 'slower'}",
    "factor": _format_ratio,
    "longer": lambda ratio: f"{_format_percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}",
    "up": lambda value: f"{math.ceil(value):,}",
    "users_up": lambda value: count(math.ceil(value), "user"),
    "duration": duration,
    "duration_up": lambda s: duration(math.ceil(s)) if s >= 10 else f"{math.ceil(100 * s) / 100:g} s",
    "counts": lambda numbers: ", ".join(f"{name} {number:,}" for name, number in numbers.items()),
    "gib": gib,
    "gib_number": lambda size: f"{size / GIB:.1f}",
    "amount": lambda load: format_amount(**load),
    "amounts": format_amounts,
    "known": lambda levels: "; ".join(
        f"{format_amounts(each['loads'])}: {each['met']:,} of {each['total']:,} met {each['slo']}" for each in levels
    ),
    "number": lambda load: _format_number(**load),
    "list": lambda values: ", ".join(map(str, values)),
    "last_time": lambda times: date_time(times[-1]),
    "ms": lambda seconds: f"{figures(1000 * seconds)} ms",
    "ms.0": lambda seconds: f"{1000 * seconds:.0f} ms",
    "ms.1": lambda seconds: f"{1000 * seconds:.1f} ms",
}
