"""Reasons as sentences."""

from collections.abc import Iterable

from harness.base.summary import LimitedBy, Reason

LIMIT_WORDS: dict[LimitedBy, str] = {
    "client": "load generator", "kv_cache": "KV cache", "queue": "queueing", "api": "API process", "prefill": "prefill",
    "decode": "decode",
}  # fmt: skip


def sentence(reason: Reason) -> str:
    """A reason as a sentence. The cell that it is about comes first."""
    return reason.text if reason.cell is None else f"{reason.cell}: {reason.text}"


def sentences(reasons: Iterable[Reason]) -> list[str]:
    return [sentence(reason) for reason in reasons]


def evidence(reasons: Iterable[Reason]) -> str:
    """The evidence of a check on one line."""
    return "; ".join(sentences(reasons))
