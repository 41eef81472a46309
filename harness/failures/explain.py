"""Explain why a server did not start or stopped, and what failed requests reported.

A log of any length is searched in one pass and bounded memory: what failed, in order, with evidence.
Source lines of tracebacks are left out, since they name errors that did not happen. So are lines that quote what users
sent, and lines of the level INFO or below, except for rules that are logged there.
"""

import contextlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from msgspec import Struct, field, structs

from harness.engines import Log, engines
from harness.failures.table import (
    RANKS,
    SETTING_WORDS,
    Pattern,
    Phase,
    Severity,
    format_cause_and_fix,
    parse_settings,
    patterns,
    rules_by_id,
)
from harness.files import open_file
from harness.redact import masked, printable

BLOCK_BYTES = 1 << 18
MAX_LINE_CHARS = 20_000  # a longer line is no sentence
MAX_FINDINGS = 200  # different ones
FREQUENT = 100  # from then on a line that differs in its numbers only is counted without examining it
MAX_SHAPES = 20_000  # remembered without a meaning: at most 10 MB
SHOWN_CHARS = 500
_DIGITS = re.compile(r"\d+")
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)

Level = Literal["chatter", "warning", "error"]  # chatter: INFO and below
_PREFIXES = (
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) [\w.-]+ [\w./-]+\[\d+\]: ",  # journalctl
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)? ",  # docker logs -t
    r"[\w.-]+\s+\| ",  # docker compose logs
    *(prefix for engine in engines() for prefix in engine.log.prefixes),
    r"(?:- )?(?:[\w.]+ - )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)(?: - |:[\w.]+:|: *| )",  # Python
    r"\[rank\d+\]: ",  # PyTorch
)
_PREFIX = re.compile(
    rf"\s*(?:{'|'.join(text.replace('(?P<level>', f'(?P<level{place}>') for place, text in enumerate(_PREFIXES))})"
)
_LEVELS: dict[str, Level] = {
    "trace": "chatter", "debug": "chatter", "d": "chatter", "info": "chatter", "i": "chatter",
    "warn": "warning", "warning": "warning", "w": "warning",
    "error": "error", "critical": "error", "fatal": "error", "e": "error",
}  # fmt: skip
_LOGFMT = re.compile(r"(?:^|\s)level=(\w+)")
_QUOTED = re.compile(  # a request with its prompt, an access log
    r"""\bReceived request\b|\bprompts?['"]?[:=] ?[\['"]|["']content["']: ?[\['"]|"(?:GET|POST|PUT|DELETE|HEAD) /"""
)
_FRAME = re.compile(r'^\s+File ".*", line \d+')
_CARETS = re.compile(r"^\s+[\^~]+\s*$")

EXCEPTION_RULE = "engine.exception"  # the rule of exceptions that are not in the table
_TRACEBACK = "Traceback (most recent call last)"
_RAISING = (_TRACEBACK.encode(), b"ERROR")
_MAX_TRACEBACK_LINES = 1000
_RAISED = re.compile(r"(?P<what>(?:(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|[A-Z]\w*)(?:: .*|:)?)$")
_LOGGED = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)+[A-Z]\w*[a-z]\w*: .|(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:$|: ))"
)
_NO_FAILURES = ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "StopIteration")


def _words(of: Callable[[Log], list[str]], *more: bytes) -> tuple[bytes, ...]:
    return (*more, *(text.encode() for engine in engines() for text in of(engine.log)))


_READY = _words(lambda log: log.ready, b"Application startup complete")  # uvicorn's, and those of the engines
_FETCHED = _words(lambda log: log.fetched)
_STARTING = _words(lambda log: log.starting)
_STOPPING = _words(lambda log: log.stopping, b":     Shutting down")
_UNLOADING = _words(lambda log: log.unloading)
_SERVERS = tuple(  # words of their logs; those that run another engine have its words, too
    (word.encode(), engine.title)
    for engine in sorted(engines(), key=lambda engine: not engine.log.wraps)
    for word in engine.log.words
)


@cache
def _trigger_words() -> dict[bytes, set[bytes]]:
    """What a line must contain to be examined, by how a shape has it: with zeros in place of digits."""
    words = [pattern.needle.encode() for pattern in patterns()]
    words += [*_READY, *_FETCHED, *_STARTING, *_STOPPING, *_UNLOADING, *SETTING_WORDS, *_RAISING]
    found: dict[bytes, set[bytes]] = {}
    for word in words:
        found.setdefault(word.translate(_ZEROS), set()).add(word)
    return found


class Diagnosis(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A failure that a log reports, explained."""

    id: str
    phase: Phase
    severity: Severity
    cause: str
    fix: str
    line: str  # the text that shows it, shortened
    number: int | None = None  # of that line in the log, from 1
    wrapper: str | None = None  # the line that only says that something failed, where there is one
    wrapper_number: int | None = None
    count: int = 1
    recovered: bool = False  # the server became ready afterwards, or loaded what it could not fetch at first
    hint: bool = False  # logged as a warning: what is logged as an error, or raised, counts more
    scenario: bool = False
    source: str


class Scanned(Struct, frozen=True, kw_only=True):
    """What a log reports."""

    lines: int
    findings: list[Diagnosis]  # each once, in the order of the log
    last: str = ""  # the last line that is not empty
    ready: int | None = None  # the line that reports that the server became ready, of the last start
    stopping: int | None = None  # the line that reports that the server began to stop regularly, of the last start
    server: str | None = None  # the server type that seems to have written the log

    def cause(self) -> Diagnosis | None:
        return select_root_cause(self.findings)


def select_root_cause(findings: Sequence[Diagnosis]) -> Diagnosis | None:
    """Return the first finding of the highest rank, with its wrapper; None without any.

    No warning, and nothing that the server recovered from: it does not explain how the server ended. What was logged
    as a warning comes after what is an error or was raised, and before a wrapper.
    """
    known = [finding for finding in findings if finding.severity != "warning" and not finding.recovered]
    if not known:
        return None
    first = min(known, key=lambda finding: (_rank(finding), finding.number or math.inf))  # the log, then an API's text
    wrappers = [finding for finding in known if finding.severity == "wrapper"]
    if first.severity not in ("cause", "exception") or not wrappers:
        return first
    last = max(wrappers, key=lambda finding: finding.number or 0)
    return structs.replace(first, wrapper=last.line, wrapper_number=last.number)


def _rank(finding: Diagnosis) -> float:
    rank = RANKS.index(finding.severity)
    return max(rank, RANKS.index("wrapper") - 0.5) if finding.hint else rank


def scan(file: BinaryIO) -> Scanned:
    """Search a log."""
    search = _Search()
    for block in _read_blocks(file):
        search.feed(block)
    return search.result()


def explain_message(message: str) -> Diagnosis | None:
    """Explain an API's error: `message` is `KIND: what it said`, as in a record."""
    return _match_line(strip_prefixes(message.replace("\n", " ").encode()), patterns(), {}, None)


def _read_blocks(file: BinaryIO) -> Iterator[bytes]:
    """The file in blocks of whole lines; an endless line comes in pieces, and needs no more memory."""
    rest = b""
    while block := file.read(BLOCK_BYTES):
        whole, end, rest = (rest + block).rpartition(b"\n")
        if end:
            yield whole + end
        if len(rest) > BLOCK_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


class LogLine(NamedTuple):
    """A line without its prefixes."""

    text: str  # its indentation stays
    level: Level | None  # of the innermost program; None: not known


def parse_line(raw: bytes) -> LogLine:
    """The text and the level of a line, without control characters."""
    text = raw[:MAX_LINE_CHARS].decode("utf-8", "replace")
    if text.startswith('{"log":"'):  # a file of Docker's json-file driver
        with contextlib.suppress(ValueError, KeyError, RecursionError):
            text = str(json.loads(text)["log"])
    text = printable(text.rstrip("\r\n")).replace("\n", "")
    place, level = 0, None
    while match := _PREFIX.match(text, place):
        place = match.end()
        if match.lastgroup is not None:
            named = match.groupdict()
            name = next(value for group, value in named.items() if value is not None and group.startswith("level"))
            level = None if named["part"] == "Process" else _LEVELS.get(name.lower())  # Process: another program's line
    text = text[place:].rstrip()
    if level is None and (logged := _LOGFMT.search(text)) is not None:
        level = _LEVELS.get(logged[1].lower())
    return LogLine(text, level)


def strip_prefixes(raw: bytes) -> str:
    """The text of a line alone."""
    return parse_line(raw).text


def is_traceback_code(line: str, before: bytes = b"") -> bool:
    """Whether a line is part of a traceback other than its exception: a frame, carets, or source after a frame."""
    if line[:1].isspace() and (_FRAME.match(line) or _CARETS.match(line)) or line.lstrip().startswith("raise "):
        return True
    return line[:4].isspace() and _FRAME.match(strip_prefixes(before)) is not None


def _is_exception(line: str) -> bool:
    return _RAISED.match(line) is not None and not line.partition(":")[0].endswith(_NO_FAILURES)


class _Search:
    """A search that continues from block to block."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Diagnosis] = {}  # by rule and cause, whatever its numbers
        self._counts: Counter[tuple[str, str]] = Counter()
        # By shape (a line with zeros in place of its digits): without a word to examine; with a frequent finding.
        self._dull: set[bytes] = set()
        self._known: dict[bytes, tuple[str, str]] = {}
        self._lines = 0
        self._ready: int | None = None
        self._stopping: int | None = None
        self._ending = False  # one of its processes was asked to stop
        self._server: str | None = None
        self._traceback: int | None = None  # the first line of the traceback that is open
        self._logged: tuple[str, int] | None = None  # the last exception logged as an error without a traceback
        self._settings: dict[str, Any] = {}
        self._before = b""  # the last line of the block before
        self._last = b""  # the last line that is not empty

    def feed(self, block: bytes) -> None:
        """Search whole lines."""
        self._server = self._server or next((name for word, name in _SERVERS if word in block), None)
        lines = block.split(b"\n")
        if block.endswith(b"\n"):
            lines.pop()
        shapes = block.translate(_ZEROS).split(b"\n")
        telling, words = self._telling(set(shapes))
        if telling or self._traceback is not None:
            maybe = [pattern for pattern in patterns() if pattern.needle.encode() in words]
            for place, (raw, shape) in enumerate(zip(lines, shapes, strict=False)):
                if self._traceback is not None or shape in telling:
                    before = lines[place - 1] if place else self._before
                    self._examine(raw, shape, before, self._lines + place + 1, maybe)
        self._lines += len(lines)
        self._before = lines[-1]
        self._last = next((line for line in reversed(lines) if line.strip()), self._last)

    def _telling(self, shapes: set[bytes]) -> tuple[set[bytes], set[bytes]]:
        """The shapes that contain a word to examine, and those words."""
        fresh = shapes - self._dull
        text = b"\n".join(fresh)
        found = [word for word in _trigger_words() if word in text]
        if len(self._found) >= MAX_FINDINGS:  # a million different exceptions tell no more than so many
            found = [word for word in found if word not in _RAISING]
        telling = {shape for shape in fresh if any(word in shape for word in found)}
        self._ignore(fresh - telling)
        return telling, {word for shape in found for word in _trigger_words()[shape]}

    def _ignore(self, shapes: set[bytes]) -> None:
        if len(self._dull) + len(shapes) > MAX_SHAPES:
            self._dull.clear()
        self._dull.update(shape for shape in shapes if len(shape) <= SHOWN_CHARS)

    def result(self) -> Scanned:
        names = next((engine.log.names for engine in engines() if engine.title == self._server), {})
        found = [
            structs.replace(finding, count=self._counts[key], fix=_rename_variables(finding.fix, names))
            for key, finding in self._found.items()
        ]
        return Scanned(
            lines=self._lines,
            findings=sorted(found, key=lambda finding: finding.number or 0),
            last=masked(strip_prefixes(self._last).strip())[:SHOWN_CHARS],
            ready=self._ready,
            stopping=self._stopping,
            server=self._server,
        )

    def _examine(self, raw: bytes, shape: bytes, before: bytes, number: int, maybe: list[Pattern]) -> None:
        key = None if self._ending else self._known.get(shape)
        if key is not None and not self._found[key].recovered:
            self._counts[key] += 1
            self._traceback = None
            return
        line = parse_line(raw)
        if _QUOTED.search(line.text):
            self._ignore({shape})
            return
        self._follow(raw, line.text, number)
        if is_traceback_code(line.text, before):
            return
        finding = _match_line(line.text, maybe, self._settings, number)
        if finding is not None and line.level == "chatter" and finding.severity != "warning":
            finding = finding if rules_by_id()[finding.id].chatter else None
        if finding is None:
            self._follow_traceback(line, number)
            return
        self._traceback = None
        if finding.severity == "wrapper" and self._logged is not None:
            self._keep(_unknown_exception(*self._logged, self._settings))
            self._logged = None
        key = self._keep(structs.replace(finding, hint=line.level == "warning"))
        if key is not None and self._counts[key] >= FREQUENT and finding.severity != "wrapper":
            self._known[shape] = key

    def _follow(self, raw: bytes, line: str, number: int) -> None:
        """Note the server's arguments, and when its model is complete, when it is ready and when it stops."""
        if any(word in raw for word in _STARTING):
            self._stopping, self._ending = None, False
        elif (unloading := any(word in raw for word in _UNLOADING)) or any(word in raw for word in _STOPPING):
            if self._stopping is None and not unloading and b"(Process)" not in raw:
                self._stopping = number
            self._ending = True
        if any(word in raw for word in _READY):
            self._ready = number
            self._recover(self._found)
        elif any(word in raw for word in _FETCHED):
            self._recover({key: one for key, one in self._found.items() if rules_by_id()[one.id].fetching})
        if any(word in raw for word in SETTING_WORDS):
            self._settings |= parse_settings(line)

    def _recover(self, findings: dict[tuple[str, str], Diagnosis]) -> None:
        self._found |= {key: structs.replace(one, recovered=True) for key, one in findings.items()}

    def _follow_traceback(self, line: LogLine, number: int) -> None:
        """A line that no rule knows may start a traceback, or be the exception of one."""
        text = line.text
        if not text or text[0].isspace() or line.level in ("chatter", "warning"):
            return  # other processes write in between
        if text.startswith(_TRACEBACK):
            self._traceback = number
        elif self._traceback is not None:
            if number - self._traceback < _MAX_TRACEBACK_LINES and _is_exception(text):
                self._keep(_unknown_exception(text, number, self._settings))
            self._traceback = None
        elif line.level == "error" and _LOGGED.match(text) and _is_exception(text):
            self._logged = text, number

    def _keep(self, finding: Diagnosis) -> tuple[str, str] | None:
        """Add or count a finding. Returns its key, or None where it was left out."""
        if self._ending and finding.severity not in ("cause", "request", "warning"):
            return None  # a server that stops ends its processes, and reports that they are dead
        key = (finding.id, _DIGITS.sub("#", finding.cause))
        seen = self._found.get(key)
        if seen is None and len(self._found) >= MAX_FINDINGS:
            return None
        # A failed start ends with its last wrapper; after a recovery the same finding counts anew.
        last = finding.severity == "wrapper" and finding.phase == "start"
        if seen is None or seen.recovered or last or (seen.hint and not finding.hint):
            self._found[key] = finding
        self._counts[key] += 1
        return key


def _rename_variables(fix: str, names: dict[str, str]) -> str:
    """A fix in the names of the server's own variables."""
    for name, own in names.items():
        fix = re.sub(rf"\b{name}\b", own, fix)
    return fix


def _unknown_exception(line: str, number: int, settings: dict[str, Any]) -> Diagnosis:
    pattern = next(pattern for pattern in patterns() if pattern.rule.id == EXCEPTION_RULE)
    match = _RAISED.match(line)
    assert match is not None
    return _make_diagnosis(pattern, match, settings, number)


def _match_line(line: str, maybe: Sequence[Pattern], settings: dict[str, Any], number: int | None) -> Diagnosis | None:
    for pattern in maybe:
        if pattern.needle in line and (match := pattern.regex.search(line)) is not None:
            return _make_diagnosis(pattern, match, settings, number)
    return None


def _make_diagnosis(pattern: Pattern, match: re.Match[str], settings: dict[str, Any], number: int | None) -> Diagnosis:
    rule = pattern.rule
    cause, fix = format_cause_and_fix(rule, match, settings)
    line = masked(match.string)
    shown = line.strip()
    if len(shown) > SHOWN_CHARS:  # the part around the match
        found = pattern.regex.search(line)
        start = max(0, min((found.start() if found else 0) - 60, len(line) - SHOWN_CHARS))
        shown = ("..." if start else "") + line[start : start + SHOWN_CHARS].strip() + "..."
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


class ExitState(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a server ended, as its supervisor tells."""

    exit_code: int | None = None
    oom_killed: bool = False
    error: str = ""  # what the Docker Engine said when it could not start the container, or an API's error


def explain(log: str | Path, state: ExitState = ExitState()) -> Diagnosis | None:  # noqa: B008 - a frozen value
    """The most telling known cause, or None. `log`: its text, or its file.

    A kill for memory comes first, then a cause in `state.error`, then the log: its first known cause, whatever wrappers
    such as "Engine core initialization failed" say around it. An exit code is asked where the log says nothing better.
    """
    scanned = scan_text(log)
    ended = _explain_exit(state, scanned.last)
    if state.oom_killed and ended is not None:
        return ended
    said = [structs.replace(failure, number=None) for failure in scan_text(state.error).findings]
    if any(failure.severity == "cause" for failure in said):
        return select_root_cause(said)
    found = scanned.findings
    if state.exit_code is not None:  # a server does not end because it refused a request
        found = [failure for failure in found if failure.severity != "request"]
    return select_root_cause([*found, *said, *([ended] if ended is not None else [])])


def scan_text(log: str | Path) -> Scanned:
    """What a log says, given as its text or its file. Raises OSError."""
    if isinstance(log, Path):
        with open_file(log) as file:
            return scan(file)
    return scan(io.BytesIO(log.encode("utf-8", "replace")))


def _explain_exit(state: ExitState, last_line: str) -> Diagnosis | None:
    """What an exit code alone says, with the last line of the log."""
    code = state.exit_code
    if code is None and not state.oom_killed:
        return None
    code = 137 if code is None else 128 - code if code < 0 else code  # a process that a signal ended: a negative code
    failure = scan_text(f"ExitCode={code} OOMKilled={state.oom_killed}").cause()
    return None if failure is None else structs.replace(failure, line=last_line, number=None)


FIRST_REQUESTS = 5  # requests, warm-up included


def find_scenario_mistake(first: Sequence[str | None]) -> Diagnosis | None:
    """The mistake that failed the first requests and will fail the rest as well; None: others may succeed.

    `first`: the kind of error and the message of each, as `http: status 404: ...`; None of one that did not fail.
    """
    causes = [explain_message(said) for said in first if said is not None]
    known = [cause for cause in causes if cause is not None and cause.scenario]
    return known[0] if known and len(known) == len(first) else None


MAX_MESSAGES = 100  # different ones that are kept apart
_OTHER_MESSAGES = "other messages"


class ErrorMessages(Struct):
    """Messages of failed requests, those that differ in numbers only as one."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind of error, and message without numbers
    examples: dict[tuple[str, str], str] = {}

    def add(self, kind: str, message: str | None, count: int = 1) -> None:
        text = printable(message or "").replace("\n", " ")
        self._add((kind, _DIGITS.sub("#", text)), text, count)

    def merge(self, other: "ErrorMessages") -> None:
        """Add what was said further on."""
        for key, count in other.counts.items():
            self._add(key, other.examples[key], count)

    def _add(self, key: tuple[str, str], example: str, count: int) -> None:
        if key not in self.counts and len(self.counts) >= MAX_MESSAGES:
            key, example = (key[0], _OTHER_MESSAGES), _OTHER_MESSAGES
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


def group_failures(said: ErrorMessages) -> list[FailureGroup]:
    """The groups, the most frequent first. What has the same cause is one, whatever numbers it said."""
    groups: dict[tuple[str, str], FailureGroup] = {}
    for (kind, text), count in said.counts.most_common():
        example = said.examples[kind, text]
        failure = explain_message(f"{kind}: {example}")
        key = (kind, text if failure is None else failure.id + _DIGITS.sub("#", failure.cause))
        if key in groups:
            groups[key] = structs.replace(groups[key], count=groups[key].count + count)
            continue
        words = {} if failure is None else {"id": failure.id, "cause": failure.cause, "fix": failure.fix}
        groups[key] = FailureGroup(kind=kind, count=count, message=example, **words)
    return sorted(groups.values(), key=lambda group: -group.count)
