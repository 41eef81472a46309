"""A log of any length against the table, in one pass and bounded memory: what failed, in order, with evidence."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, BinaryIO

from msgspec import Struct, structs

from harness.engines import Log, engines
from harness.failures.advice import SETTINGS, cause_and_fix, settings_in
from harness.failures.log_lines import (
    BLOCK_BYTES,
    RULE,
    LogLine,
    TracebackReader,
    blocks,
    exception_in,
    is_code,
    is_frame,
    is_quoting,
    is_shown,
    parsed,
    plain,
)
from harness.failures.table import RANKS, Pattern, Phase, Rule, Severity, patterns, rules
from harness.redact import masked

MOST_FINDINGS = 200  # different ones; a log that repeats itself has few
OFTEN = 100  # from then on lines that differ in numbers only are counted and not looked at
SHOWN_CHARS = 500
MOST_SHAPES = 20_000  # lines that differ in more than numbers, remembered as not telling: at most 10 MB
_DIGIT = b"0123456789"
_DIGITS = re.compile(r"\d+")
_WRAPPED = re.compile(rb"[ \t\r]*\n[ \t]*(?=[a-z]+ [a-z]|\(\d)")  # a line that goes on in the next one


def _marks(texts: Callable[[Log], list[str]]) -> tuple[bytes, ...]:
    return tuple(text.encode() for engine in engines() for text in texts(engine.log))


_READY = (b"Application startup complete", *_marks(lambda log: log.ready))  # uvicorn's, and those of the engines
_FETCHED = _marks(lambda log: log.fetched)
_STARTING = _marks(lambda log: log.starting)
_STOPPING = (b":     Shutting down", *_marks(lambda log: log.stopping))
_UNLOADING = _marks(lambda log: log.unloading)
_RAISED = (b"Traceback (most recent call last)", b"ERROR")
_SERVERS = tuple(  # words of their logs; those that run another engine have its words, too
    (word.encode(), engine.title)
    for engine in sorted(engines(), key=lambda engine: not engine.log.wraps)
    for word in engine.log.words
)


class Diagnosis(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    recovered: bool = False  # the server became ready afterwards, or loaded what it could not fetch at first
    hint: bool = False  # said as a warning: what is said as an error, or raised, tells more
    scenario: bool = False
    source: str


class Scanned(Struct, frozen=True, kw_only=True):
    """What a log says."""

    lines: int
    findings: list[Diagnosis]  # each once, in the order of the log
    last: str = ""  # the last line that says something
    ready: int | None = None  # the line that says that the server became ready, of the last start
    stopping: int | None = (
        None  # the line that says that the server began to stop in the regular way, of the last start
    )
    server: str | None = None  # whose log it seems to be

    def cause(self) -> Diagnosis | None:
        """The most telling one, or None; see `most_telling`."""
        return most_telling(self.findings)


def most_telling(findings: Sequence[Diagnosis]) -> Diagnosis | None:
    """The first of the highest rank, with the wrapper that it came through.

    No warning, and nothing that was said before the server became ready: it does not explain how it ended. What was
    said as a warning comes after what is an error or was raised, and before a wrapper.
    """
    known = [finding for finding in findings if finding.severity != "warning" and not finding.recovered]
    if not known:
        return None
    first = min(known, key=lambda finding: (_rank(finding), finding.number or math.inf))  # the log, then an API's words
    wrappers = [finding for finding in known if finding.severity == "wrapper"]
    if first.severity not in ("cause", "exception") or not wrappers:
        return first
    last = max(wrappers, key=lambda finding: finding.number or 0)
    return structs.replace(first, wrapper=last.line, wrapper_number=last.number)


def _rank(finding: Diagnosis) -> float:
    rank = RANKS.index(finding.severity)
    return max(rank, RANKS.index("wrapper") - 0.5) if finding.hint else rank


def scan(file: BinaryIO) -> Scanned:
    """Search a log. Source lines of tracebacks are left out: they name errors that did not happen.

    So is what users sent, and what is said at the level of INFO or below, but for rows that are told there. Where no
    row explains a short log, sentences are joined that whoever pasted them has on several lines.
    """
    search, short = _Search(), b""
    for block in blocks(file):
        short += block if len(short) <= BLOCK_BYTES else b""
        search.feed(block)
    scanned = search.result()
    if len(short) > BLOCK_BYTES or ((cause := scanned.cause()) is not None and cause.severity == "cause"):
        return scanned
    search = _Search()
    search.feed(_WRAPPED.sub(b" ", short))
    cause = search.result().cause()
    if cause is None or cause.severity != "cause" or cause.number is None:
        return scanned
    before = b"\n".join(_WRAPPED.sub(b"\0", short).split(b"\n")[: cause.number - 1])
    cause = structs.replace(cause, number=cause.number + before.count(b"\0"))
    return structs.replace(scanned, findings=[*(one for one in scanned.findings if one.severity == "warning"), cause])


class _Search:
    """A search that goes on from block to block."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Diagnosis] = {}  # by row and cause, whatever its numbers
        self._often: dict[bytes, tuple[str, str]] = {}  # lines without their digits that were seen again and again
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lines = 0
        self._ready: int | None = None
        self._stopping: int | None = None
        self._ending = False  # a process of it was told to stop
        self._server: str | None = None
        self._trace = TracebackReader()
        # Lines without their digits, a bounded number of each: without a word to look at, and of no meaning anywhere.
        self._dull: set[bytes] = set()
        self._mute: set[bytes] = set()
        self._settings: dict[str, Any] = {}
        self._before = b""  # the last line of the block before
        self._said = b""  # the last line that is not empty

    def feed(self, block: bytes) -> None:
        """Search whole lines."""
        self._server = self._server or next((name for mark, name in _SERVERS if mark in block), None)
        lines = block.split(b"\n")
        if not block.endswith(b"\n"):  # the end of the log, or of a piece of an endless line
            lines.append(b"")
        lines.pop()
        shapes = block.translate(None, _DIGIT).split(b"\n")
        words = [word for word in _with_digits() if word in block]
        telling: set[bytes] = set()
        if fresh := set(shapes) - self._dull:
            text = b"\n".join(fresh)
            found = [word for word in _without_digits() if word in text]
            telling = {shape for shape in fresh if any(word in shape for word in found)}
            self._dull = _bounded(self._dull, fresh - telling)
            words += found
        if words or self._trace.open:
            counted = [word for word in words if word in _with_digits()]
            maybe = [pattern for pattern in patterns() if pattern.needle.encode() in words]
            if self._full:  # a million different exceptions tell no more than so many
                maybe = [pattern for pattern in maybe if pattern.rule.id != RULE]
            noticed = not _noticed().isdisjoint(words)
            for place, (raw, shape) in enumerate(zip(lines, shapes, strict=False)):
                if shape in self._mute:
                    continue
                if self._trace.open or shape in telling or any(word in raw for word in counted):
                    before = lines[place - 1] if place else self._before
                    self._look(raw, shape, before, self._lines + place + 1, maybe, noticed)
        self._lines += len(lines)
        self._before = lines[-1] if lines else b""
        self._said = next((line for line in reversed(lines) if line.strip()), self._said)

    @property
    def _full(self) -> bool:
        return len(self._found) >= MOST_FINDINGS

    def result(self) -> Scanned:
        names = next((engine.log.names for engine in engines() if engine.title == self._server), {})
        found = [
            structs.replace(failure, count=self._counts[key], fix=_named(failure.fix, names))
            for key, failure in self._found.items()
        ]
        findings = sorted(found, key=lambda finding: finding.number or 0)
        last = masked(plain(self._said).strip())[:SHOWN_CHARS]
        return Scanned(
            lines=self._lines,
            findings=findings,
            last=last,
            ready=self._ready,
            stopping=self._stopping,
            server=self._server,
        )

    def _look(self, raw: bytes, shape: bytes, before: bytes, number: int, maybe: list[Pattern], noticed: bool) -> None:
        often = self._often.get(shape)
        if often is not None and not self._found[often].recovered:
            self._counts[often] += 1
            return
        line = parsed(raw)
        if is_quoting(line):
            self._mute = _bounded(self._mute, {shape})
            return
        if noticed:
            self._notice(raw, line.text, number)
        if is_code(line.text):
            if not noticed:
                self._mute = _bounded(self._mute, {shape})
            return
        if is_shown(line.text) and is_frame(plain(before)):
            return
        failure = _of(line, maybe, self._settings, number)
        if failure is None:
            # An exception of any name: what a traceback ends with, or what was logged as an error before a wrapper.
            if (raised := self._trace.feed(line, number)) is not None and not self._full:
                self._keep(_raised(raised, number, self._settings), b"")
            return
        self._trace.close()
        if failure.severity == "wrapper" and (held := self._trace.take()) is not None:
            self._keep(_raised(*held, self._settings), raw)
        self._keep(failure, raw)

    def _notice(self, raw: bytes, line: str, number: int) -> None:
        """What a line says of the server's way: its arguments, its model is there, it is ready, it stops."""
        if any(mark in raw for mark in _STARTING):
            self._stopping, self._ending = None, False
        elif any(mark in raw for mark in (*_STOPPING, *_UNLOADING)):
            own = b"(Process)" not in raw and not any(mark in raw for mark in _UNLOADING)
            self._stopping = number if own and self._stopping is None else self._stopping
            self._ending = True
        if any(mark in raw for mark in _READY):
            self._ready = number
            self._got_over(fetching=False)
        elif any(mark in raw for mark in _FETCHED):
            self._got_over(fetching=True)
        if any(mark in raw for mark in SETTINGS):
            self._settings |= settings_in(line)

    def _got_over(self, *, fetching: bool) -> None:
        for key, one in self._found.items():
            if not fetching or _rules()[one.id].fetching:
                self._found[key] = structs.replace(one, recovered=True)

    def _keep(self, failure: Diagnosis, raw: bytes) -> None:
        if self._ending and failure.severity not in ("cause", "request", "warning"):
            return  # a server that stops ends its processes, and says that they are dead
        key = (failure.id, _DIGITS.sub("#", failure.cause))
        seen = self._found.get(key)
        if seen is None and self._full:
            return
        # What a failed start ends with is what one sees of the log; what was said again counts anew.
        keeps_last = failure.severity == "wrapper" and failure.phase == "start"
        if seen is None or seen.recovered or keeps_last or (seen.hint and not failure.hint):
            self._found[key] = failure
        self._counts[key] += 1
        if raw and self._counts[key] >= OFTEN and not keeps_last and len(self._often) < MOST_FINDINGS:
            self._often[raw.translate(None, _DIGIT)] = key


def _named(fix: str, names: dict[str, str]) -> str:
    """A fix in the names of the server's own variables."""
    for name, own in names.items():
        fix = re.sub(rf"\b{name}\b", own, fix)
    return fix


@cache
def _words() -> tuple[bytes, ...]:
    """What a line has to hold to be looked at."""
    return tuple(
        dict.fromkeys(
            [pattern.needle.encode() for pattern in patterns()]
            + [*_READY, *_FETCHED, *_STARTING, *_STOPPING, *_UNLOADING, *_RAISED, *SETTINGS]
        )
    )


@cache
def _with_digits() -> tuple[bytes, ...]:
    return tuple(word for word in _words() if word.translate(None, _DIGIT) != word)


@cache
def _without_digits() -> tuple[bytes, ...]:
    """What a line has without its digits, too."""
    return tuple(word for word in _words() if word not in _with_digits())


@cache
def _noticed() -> frozenset[bytes]:
    return frozenset([*_READY, *_FETCHED, *_STARTING, *_STOPPING, *_UNLOADING, *SETTINGS])


def _bounded(known: set[bytes], more: set[bytes]) -> set[bytes]:
    """Add lines to those that are known; start anew when there are too many of them."""
    known = known if len(known) + len(more) <= MOST_SHAPES else set()
    known.update(line for line in more if len(line) <= SHOWN_CHARS)
    return known


@cache
def _rules() -> dict[str, Rule]:
    return {rule.id: rule for rule in rules()}


def explain_message(message: str) -> Diagnosis | None:
    """What an API's error means: `message` is `KIND: what it said`, as in a record."""
    line = plain(message.replace("\n", " ").encode())
    return _explain(line, patterns(), {}, None)


def _of(line: LogLine, maybe: Iterable[Pattern], settings: dict[str, Any], number: int | None) -> Diagnosis | None:
    """What a line of a log says, as far as its level allows it."""
    failure = _explain(line.text, maybe, settings, number)
    if failure is None:
        return None
    if line.level == "chatter" and failure.severity != "warning" and not _rules()[failure.id].chatter:
        return None
    return structs.replace(failure, hint=True) if line.level == "warning" else failure


def _raised(line: str, number: int, settings: dict[str, Any]) -> Diagnosis:
    """An exception that no row knows."""
    pattern = next(pattern for pattern in patterns() if pattern.rule.id == RULE)
    match = exception_in(line)
    assert match is not None
    return _failure(pattern, match, line, settings, number)


def _explain(line: str, maybe: Iterable[Pattern], settings: dict[str, Any], number: int | None) -> Diagnosis | None:
    for pattern in maybe:
        match = pattern.regex.search(line) if pattern.needle in line else None
        if match is not None:
            return _failure(pattern, match, line, settings, number)
    return None


def _failure(
    pattern: Pattern, match: re.Match[str], line: str, settings: dict[str, Any], number: int | None
) -> Diagnosis:
    rule = pattern.rule
    cause, fix = cause_and_fix(rule, match, settings)
    line = masked(line)
    shown = line.strip()
    if len(shown) > SHOWN_CHARS:  # the part around what was found
        found = pattern.regex.search(line)
        begin = max(0, min((found.start() if found else 0) - 60, len(line) - SHOWN_CHARS))
        shown = ("..." if begin else "") + line[begin : begin + SHOWN_CHARS].strip() + "..."
    return Diagnosis(
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
