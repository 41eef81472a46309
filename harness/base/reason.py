"""Why something is as it is: a code for programs, a sentence for people, and the values in it."""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, to_builtins


class Reason(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reason, note or evidence: code and values for programs, the text for people."""

    code: str
    text: str
    values: dict[str, Any] = {}  # of JSON types; a reason within a reason is a mapping
    cell: str | None = None  # that it is about, unless it is stored with that cell


def because(code: str, text: str, /, **values: Any) -> Reason:
    """Make a reason. A value that is itself a reason or a verdict becomes a mapping."""
    plain = {key: to_builtins(value) if isinstance(value, Struct) else value for key, value in values.items()}
    return Reason(code, text, plain)


def sentence(reason: Reason) -> str:
    """A reason as a sentence. The cell that it is about comes first."""
    return reason.text if reason.cell is None else f"{reason.cell}: {reason.text}"


def sentences(reasons: Iterable[Reason]) -> list[str]:
    return [sentence(reason) for reason in reasons]


def evidence(reasons: Iterable[Reason]) -> str:
    """The evidence of a check on one line."""
    return "; ".join(sentences(reasons))
