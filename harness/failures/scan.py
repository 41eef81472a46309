"""A log of any length against the table, in one pass and bounded memory: what failed, in order, with evidence."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, BinaryIO

from msgspec import Struct, structs

from harness.failures.lines import is_code, plain
from harness.failures.table import RANKS, Pattern, Phase, Severity, patterns
from harness.failures.words import in_words, settings_in

BLOCK_BYTES = 1 << 18
MOST_FINDINGS = 200  # different ones; a log that repeats itself has few
OFTEN = 100  # from then on lines that differ in numbers only are counted and not looked at
SHOWN_CHARS = 500
_DIGITS = re.compile(r"\d+")
_READY = (b"Application startup complete", b"server is listening on", b"-server is ready!", b"Listening on [::]")
_SETTINGS = (b"non-default args: ", b"--gpu-memory-utilization", b"--gpu_memory_utilization")


class Failure(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that a log says, explained."""

    id: str
    phase: Phase
    severity: Severity
    cause: str
    fix: str
    line: str  # the text that gave it away, shortened
    number: int | None = None  # of that line in the log, from 1
    wrapper: str | None = None  # the line that only says that something failed, where there is one
    wrapper_number: int | None = None
    count: int = 1  # how often it was said
    recovered: bool = False  # the server became ready afterwards
    scenario: bool = False
    source: str


class Scanned(Struct, frozen=True, kw_only=True):
    """What a log says."""

    lines: int
    findings: list[Failure]  # each once, in the order of the log
    last: str = ""  # the last line that says something

    def cause(self) -> Failure | None:
        """The most telling one, or None; see `most_telling`."""
        return most_telling(self.findings)


def most_telling(findings: Sequence[Failure]) -> Failure | None:
    """The first of the highest rank, with the wrapper that it came through.

    No warning, and nothing that was said before the server became ready: it does not explain how it ended.
    """
    known = [finding for finding in findings if finding.severity != "warning" and not finding.recovered]
    if not known:
        return None
    first = min(known, key=lambda finding: (RANKS.index(finding.severity), finding.number or 0))
    wrappers = [finding for finding in known if finding.severity == "wrapper"]
    if first.severity not in ("cause", "exception") or not wrappers:
        return first
    last = max(wrappers, key=lambda finding: finding.number or 0)
    return structs.replace(first, wrapper=last.line, wrapper_number=last.number)


def scan(file: BinaryIO) -> Scanned:
    """Search a log. Source lines of tracebacks are left out: they name errors that did not happen."""
    search = _Search()
    for block in _blocks(file):
        search.feed(block)
    found = [structs.replace(failure, count=search.counts[key]) for key, failure in search.found.items()]
    findings = sorted(found, key=lambda finding: finding.number or 0)
    return Scanned(lines=search.lines, findings=findings, last=search.last()[:SHOWN_CHARS])


class _Search:
    """A search that goes on from block to block."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Failure] = {}  # by row and cause, whatever its numbers
        self._often: dict[bytes, tuple[str, str]] = {}  # lines without their digits that were seen again and again
        self.counts: Counter[tuple[str, str]] = Counter()
        self.lines = 0
        self._settings: dict[str, Any] = {}
        self._before = b""  # the last line of the block before
        self._said = b""  # the last line that is not empty

    def feed(self, block: bytes) -> None:
        """Search whole lines."""
        words = [word for word in _words() if word in block]
        lines = block.split(b"\n")
        if not block.endswith(b"\n"):  # the end of the log, or of a piece of an endless line
            lines.append(b"")
        lines.pop()
        if words:
            maybe = [pattern for pattern in patterns() if pattern.needle.encode() in words]
            for place, raw in enumerate(lines):
                if any(word in raw for word in words):
                    self._look(raw, lines[place - 1] if place else self._before, self.lines + place + 1, maybe)
        self.lines += len(lines)
        self._before = lines[-1] if lines else b""
        self._said = next((line for line in reversed(lines) if line.strip()), self._said)

    def last(self) -> str:
        return plain(self._said).strip()

    def _look(self, raw: bytes, before: bytes, number: int, maybe: list[Pattern]) -> None:
        alike = raw.translate(None, b"0123456789")
        often = self._often.get(alike)
        if often is not None and not self.found[often].recovered:
            self.counts[often] += 1
            return
        line = plain(raw)
        if any(mark in raw for mark in _READY):
            self.found = {key: structs.replace(one, recovered=True) for key, one in self.found.items()}
        if any(mark in raw for mark in _SETTINGS):
            self._settings |= settings_in(line)
        failure = None if is_code(line, plain(before)) else _explain(line, maybe, self._settings, number)
        if failure is None:
            return
        key = (failure.id, _DIGITS.sub("#", failure.cause))
        seen = self.found.get(key)
        if seen is None and len(self.found) >= MOST_FINDINGS:
            return
        # What a failed start ends with is what one sees of the log; what was said again counts anew.
        keeps_last = failure.severity == "wrapper" and failure.phase == "start"
        if seen is None or seen.recovered or keeps_last:
            self.found[key] = failure
        self.counts[key] += 1
        if self.counts[key] >= OFTEN and not keeps_last and len(self._often) < MOST_FINDINGS:
            self._often[alike] = key


@cache
def _words() -> tuple[bytes, ...]:
    """What a line has to hold to be looked at."""
    return tuple(dict.fromkeys([*(pattern.needle.encode() for pattern in patterns()), *_READY, *_SETTINGS]))


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """The file in blocks of whole lines; junk without line ends comes in pieces, and needs no more memory."""
    rest = b""
    while block := file.read(BLOCK_BYTES):
        whole, end, after = (rest + block).rpartition(b"\n")
        if end:
            yield whole + end
        rest = after
        if len(rest) > BLOCK_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def explain_message(message: str) -> Failure | None:
    """What an API's error means: `message` is `KIND: what it said`, as in a record."""
    line = plain(message.replace("\n", " ").encode())
    return _explain(line, patterns(), {}, None)


def _explain(line: str, maybe: Iterable[Pattern], settings: dict[str, Any], number: int | None) -> Failure | None:
    for pattern in maybe:
        match = pattern.regex.search(line) if pattern.needle in line else None
        if match is not None:
            return _failure(pattern, match, line, settings, number)
    return None


def _failure(
    pattern: Pattern, match: re.Match[str], line: str, settings: dict[str, Any], number: int | None
) -> Failure:
    rule = pattern.rule
    cause, fix = in_words(rule, match, settings)
    shown = line.strip()
    if len(shown) > SHOWN_CHARS:  # the part around what was found
        begin = max(0, min(match.start() - 60, len(line) - SHOWN_CHARS))
        shown = ("..." if begin else "") + line[begin : begin + SHOWN_CHARS].strip() + "..."
    return Failure(
        id=rule.id,
        phase=rule.phase,
        severity=rule.severity,
        cause=cause,
        fix=fix,
        line=shown,
        number=number,
        scenario=rule.scenario,
        source=rule.source,
    )
