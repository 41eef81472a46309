"""What failed requests said, counted by what it means: one cause for ten thousand messages that differ in a number."""

import re
from collections import Counter

from msgspec import Struct, field
from msgspec.structs import replace

from harness.failures.scan import explain_message
from harness.redact import printable

MOST_MESSAGES = 100  # different ones that are kept apart
_NUMBERS = re.compile(r"\d+")
_OTHERS = "other messages"


class Said(Struct):
    """Messages of failed requests, those that differ in numbers only as one."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind of error, and message without numbers
    examples: dict[tuple[str, str], str] = {}

    def add(self, kind: str, message: str | None, count: int = 1) -> None:
        text = printable(message or "").replace("\n", " ")
        self._add((kind, _NUMBERS.sub("#", text)), text, count)

    def merge(self, other: "Said") -> None:
        """Add what was said further on."""
        for key, count in other.counts.items():
            self._add(key, other.examples[key], count)

    def _add(self, key: tuple[str, str], example: str, count: int) -> None:
        if key not in self.counts and len(self.counts) >= MOST_MESSAGES:
            key, example = (key[0], _OTHERS), _OTHERS
        self.counts[key] += count
        self.examples.setdefault(key, example)


class Group(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Failed requests that have the same cause."""

    kind: str
    count: int
    message: str  # of the first of them
    id: str | None = None  # of the row of the table; None: not in it
    cause: str | None = None
    fix: str | None = None


def grouped(said: Said) -> list[Group]:
    """The groups, the most frequent first. What has the same cause is one, whatever numbers it said."""
    groups: dict[tuple[str, str], Group] = {}
    for (kind, text), count in said.counts.most_common():
        example = said.examples[kind, text]
        failure = explain_message(f"{kind}: {example}")
        key = (kind, text if failure is None else failure.id + _NUMBERS.sub("#", failure.cause))
        if key in groups:
            groups[key] = replace(groups[key], count=groups[key].count + count)
            continue
        words = {} if failure is None else {"id": failure.id, "cause": failure.cause, "fix": failure.fix}
        groups[key] = Group(kind=kind, count=count, message=example, **words)
    return sorted(groups.values(), key=lambda group: -group.count)
