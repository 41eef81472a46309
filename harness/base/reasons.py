"""Reasons as sentences. A reason has its own text, or its code has a template in reasons.yaml."""

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from harness.base.columns import METRIC_WORDS, NUMBER_WORDS
from harness.base.files import PACKAGE, read_bytes
from harness.base.summary import LimitedBy, Reason
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


COMPOSED: dict[str, Callable[..., str]] = {
    "tokens_differ": _tokens_differ,
}  # fmt: skip


# How templates format a value: `{seconds:duration}`.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "reason": _nested_sentence,
    "limited": _client_limited,
    "metric": METRIC_WORDS.__getitem__,
    "bound": lambda code: "least" if code == "below" else "most",
    "figures": figures,
    "share": percent,
    "part": lambda share: "half" if share == 0.5 else f"{share * 100:g} %",
    "duration": duration,
    "counts": lambda numbers: ", ".join(f"{name} {number:,}" for name, number in numbers.items()),
    "gib": gib,
    "gib_number": lambda size: f"{size / GIB:.1f}",
    "list": lambda values: ", ".join(map(str, values)),
    "last_time": lambda times: date_time(times[-1]),
    "ms": lambda seconds: f"{figures(1000 * seconds)} ms",
    "ms.0": lambda seconds: f"{1000 * seconds:.0f} ms",
    "ms.1": lambda seconds: f"{1000 * seconds:.1f} ms",
}
