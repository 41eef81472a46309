"""Explain why a server did not start or stopped, and what failed requests reported."""

import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from harness.failures.scan import Diagnosis, Scanned, explain_message, most_telling, scan
from harness.files import open_file
from harness.redact import printable


class State(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a server ended, as its supervisor tells."""

    exit_code: int | None = None
    oom_killed: bool = False
    error: str = ""  # what the Docker Engine said when it could not start the container, or an API's error


def explain(log: str | Path, state: State = State()) -> Diagnosis | None:  # noqa: B008 - a frozen value
    """The most telling known cause, or None. `log`: its text, or its file.

    A kill for memory comes first, then a cause in `state.error`, then the log: its first known cause, whatever wrappers
    such as "Engine core initialization failed" say around it. An exit code is asked where the log says nothing better.
    """
    scanned = scan_text(log)
    ended = _ended(state, scanned.last)
    if state.oom_killed and ended is not None:
        return ended
    said = [replace(failure, number=None) for failure in scan_text(state.error).findings]
    if any(failure.severity == "cause" for failure in said):
        return most_telling(said)
    found = scanned.findings
    if state.exit_code is not None:  # a server does not end because it refused a request
        found = [failure for failure in found if failure.severity != "request"]
    return most_telling([*found, *said, *([ended] if ended is not None else [])])


def scan_text(log: str | Path) -> Scanned:
    """What a log says, given as its text or its file. Raises OSError."""
    if isinstance(log, Path):
        with open_file(log) as file:
            return scan(file)
    return scan(io.BytesIO(log.encode("utf-8", "replace")))


def _ended(state: State, last_line: str) -> Diagnosis | None:
    """What an exit code alone says, with the last line of the log."""
    code = state.exit_code
    if code is None and not state.oom_killed:
        return None
    code = 137 if code is None else 128 - code if code < 0 else code  # a process that a signal ended: a negative code
    failure = scan_text(f"ExitCode={code} OOMKilled={state.oom_killed}").cause()
    return None if failure is None else replace(failure, line=last_line, number=None)


FIRST = 5  # requests, warm-up included


def mistake_of(first: Sequence[str | None]) -> Diagnosis | None:
    """The mistake that failed the first requests and will fail the rest as well; None: others may succeed.

    `first`: the kind of error and the message of each, as `http: status 404: ...`; None of one that did not fail.
    """
    causes = [explain_message(said) for said in first if said is not None]
    known = [cause for cause in causes if cause is not None and cause.scenario]
    return known[0] if known and len(known) == len(first) else None


MAX_MESSAGES = 100  # different ones that are kept apart
_NUMBERS = re.compile(r"\d+")
_OTHERS = "other messages"


class ErrorMessages(Struct):
    """Messages of failed requests, those that differ in numbers only as one."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind of error, and message without numbers
    examples: dict[tuple[str, str], str] = {}

    def add(self, kind: str, message: str | None, count: int = 1) -> None:
        text = printable(message or "").replace("\n", " ")
        self._add((kind, _NUMBERS.sub("#", text)), text, count)

    def merge(self, other: "ErrorMessages") -> None:
        """Add what was said further on."""
        for key, count in other.counts.items():
            self._add(key, other.examples[key], count)

    def _add(self, key: tuple[str, str], example: str, count: int) -> None:
        if key not in self.counts and len(self.counts) >= MAX_MESSAGES:
            key, example = (key[0], _OTHERS), _OTHERS
        self.counts[key] += count
        self.examples.setdefault(key, example)


class FailureGroup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Failed requests that have the same cause."""

    kind: str
    count: int
    message: str  # of the first of them
    id: str | None = None  # of the row of the table; None: not in it
    cause: str | None = None
    fix: str | None = None


def grouped(said: ErrorMessages) -> list[FailureGroup]:
    """The groups, the most frequent first. What has the same cause is one, whatever numbers it said."""
    groups: dict[tuple[str, str], FailureGroup] = {}
    for (kind, text), count in said.counts.most_common():
        example = said.examples[kind, text]
        failure = explain_message(f"{kind}: {example}")
        key = (kind, text if failure is None else failure.id + _NUMBERS.sub("#", failure.cause))
        if key in groups:
            groups[key] = replace(groups[key], count=groups[key].count + count)
            continue
        words = {} if failure is None else {"id": failure.id, "cause": failure.cause, "fix": failure.fix}
        groups[key] = FailureGroup(kind=kind, count=count, message=example, **words)
    return sorted(groups.values(), key=lambda group: -group.count)
