"""Explain why a server did not start or stopped, and why requests failed.

A log of any length is searched in one pass and bounded memory for known failures, in order, with evidence. Ignored are
source lines of tracebacks, which name errors that did not happen, lines that quote the text of users, and lines of the
level INFO or below, except for rules that are logged there.
"""

import io
import itertools
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from msgspec import Struct, structs

from harness.base.files import open_file
from harness.base.redact import masked, printable
from harness.engines import engines
from harness.failures import table
from harness.failures.table import RANKS, Pattern, Phase, Severity, is_server_name


class FailedRequests(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured requests of a row that failed for the same cause, explained if the table of failures has it."""

    server: str
    load: str
    kind: str  # of the error
    count: int
    message: str  # of the first of them
    id: str | None = None  # of the entry in the table
    cause: str | None = None
    fix: str | None = None


BLOCK_BYTES = 1 << 18
MAX_LINE_CHARS = 20_000  # the rest of a longer line is ignored
MAX_FINDINGS = 200  # different ones
FREQUENT = 100  # after so many, lines that differ only in numbers are counted without examining them
MAX_SHAPES = 20_000  # of lines without a failure that are remembered: at most 10 MB
SHOWN_CHARS = 500
NEXT_LINES = 12  # that may complete a finding
LAST_LINES = 20  # that show how a log ends
FIRST_REQUESTS = 5  # warm-up included
MAX_MESSAGES = 100  # different ones of failed requests; the rest are counted as one
_OTHER_MESSAGES = "other messages"
_DIGITS = re.compile(r"\d+")
_ZERO_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)

Level = Literal["chatter", "warning", "error"]  # chatter: INFO and below
_PREFIXES = (
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) [\w.-]+ [\w./-]+\[\d+\]: ",  # journalctl
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)? ",  # docker logs -t
    r"[\w.-]+\s+\| ",  # docker compose logs
    *(prefix for engine in engines() for prefix in engine.log.prefixes),
    r"(?:- )?(?:[\w.]+ - )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)(?: - |:[\w.]+:|: *| )",  # Python
    r"\[rank\d+\]: ",  # PyTorch
)
_LINE_PREFIX = re.compile(
    rf"\s*(?:{'|'.join(text.replace('(?P<level>', f'(?P<level{place}>') for place, text in enumerate(_PREFIXES))})"
)
_LEVELS: dict[str, Level] = {
    "trace": "chatter", "debug": "chatter", "d": "chatter", "info": "chatter", "i": "chatter",
    "warn": "warning", "warning": "warning", "w": "warning",
    "error": "error", "critical": "error", "fatal": "error", "e": "error",
}  # fmt: skip
_LOGFMT = re.compile(r"(?:^|\s)level=(\w+)")
_FAILED_LOAD = 'msg="Load failed"'  # Ollama logs it at the level INFO
_USER_TEXT = re.compile(  # a request with its prompt, an access log
    r"""\bReceived request\b|\bprompts?['"]?[:=] ?[\['"]|["']content["']: ?[\['"]|"(?:GET|POST|PUT|DELETE|HEAD) /"""
)
_TRACEBACK_FRAME = re.compile(r'^\s+File ".*", line \d+')
_TRACEBACK_CARETS = re.compile(r"^\s+[\^~]+\s*$")

EXCEPTION_RULE = "engine.exception"  # the rule of exceptions that are not in the table
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION_WORDS = (_TRACEBACK.encode(), b"ERROR")
_MAX_TRACEBACK_LINES = 1000
_EXCEPTION = re.compile(r"(?P<what>(?:(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|[A-Z]\w*)(?:: .*|:)?)$")
_HARMLESS_EXCEPTIONS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "StopIteration")


# By the key of `log` in an engine's facts. uvicorn's words are those of several engines.
_UVICORN_WORDS = {"ready": b"Application startup complete", "stopping": b":     Shutting down"}
_LOG_WORDS = {
    key: tuple(
        filter(None, [_UVICORN_WORDS.get(key), *(text.encode() for e in engines() for text in getattr(e.log, key))])
    )
    for key in ("starting", "fetched", "loading", "ready", "stopping", "unloading", "gpu", "no_gpu")
}
_SERVER_WORDS = tuple(  # servers that run another engine come last, since their logs have its words, too
    (word.encode(), engine.title)
    for engine in sorted(engines(), key=lambda engine: not engine.log.wraps)
    for word in engine.log.words
)


@cache
def _trigger_words() -> dict[bytes, set[bytes]]:
    """Return the words of lines that must be examined, by their shape: with zeros in place of digits."""
    needles = [pattern.needle.encode() for pattern in table.patterns()]
    by_shape: dict[bytes, set[bytes]] = {}
    for word in (*needles, *itertools.chain(*_LOG_WORDS.values()), *_EXCEPTION_WORDS):
        by_shape.setdefault(word.translate(_ZERO_DIGITS), set()).add(word)
    return by_shape


class Diagnosis(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A failure that a log reports, explained."""

    id: str
    phase: Phase
    severity: Severity
    cause: str
    fix: str
    line: str  # the evidence, shortened
    number: int | None = None  # of that line in the log, from 1
    wrapper: str | None = None  # a line that says only that something failed
    wrapper_number: int | None = None
    count: int = 1
    # The server became ready afterwards, loaded what it could not fetch at first, or failed at a later load.
    recovered: bool = False
    hint: bool = False  # logged as a warning, so an error or exception counts more
    effect: bool = False  # it follows from an earlier finding
    scenario: bool = False
    source: str


class ScannedLog(Struct, frozen=True, kw_only=True):
    """What a log reports."""

    lines: int
    findings: list[Diagnosis]  # each once, in the order of the log
    last: str = ""  # the last line that is not empty
    ready: int | None = None  # the line that reports that the server became ready, of the last start
    stopping: int | None = None  # the line that reports that the server began to stop regularly, of the last start
    bad_end: int | None = None  # the first line among the last ones that reports an error or a crash
    bad_line: str = ""
    detailed: bool = False  # the server already logs at the level DEBUG
    server: str | None = None  # the server type that seems to have written the log
    gpu: bool | None = None  # whether it uses a GPU; None: the log does not tell

    def cause(self) -> Diagnosis | None:
        """Return the root cause; refused requests do not explain how a server that was ready ended."""
        is_ready = self.ready is not None
        return select_root_cause(
            [finding for finding in self.findings if not (is_ready and finding.severity == "request")]
        )


def select_root_cause(findings: Sequence[Diagnosis]) -> Diagnosis | None:
    """Return the first finding of the highest rank, with its wrapper; None without any.

    Warnings are left out, what the server recovered from, and effects: they do not explain how it ended. A cause that
    was logged as a warning ranks below errors and exceptions, but above a wrapper.
    """
    causes = [
        finding
        for finding in findings
        if finding.severity != "warning" and not finding.recovered and not finding.effect
    ]
    if not causes:
        return None
    first = min(causes, key=lambda finding: (_rank(finding), finding.number or math.inf))  # the log, then an API's text
    wrappers = [finding for finding in causes if finding.severity == "wrapper"]
    wrappers = [finding for finding in wrappers if finding.number is None or finding.number != first.number]
    if first.severity not in ("cause", "crash", "exception") or not wrappers:
        return first
    last = max(wrappers, key=lambda finding: finding.number or 0)
    return structs.replace(first, wrapper=last.line, wrapper_number=last.number)


def _rank(finding: Diagnosis) -> float:
    rank = RANKS.index(finding.severity)
    return max(rank, RANKS.index("wrapper") - 0.5) if finding.hint else rank


def _mark_effects(findings: list[Diagnosis]) -> list[Diagnosis]:
    """Return the findings in the order of the log, with those marked that follow from another one.

    The line of that one is before them, or within the next lines: the kernel's log is written next to the server's.
    """
    first: dict[str, int] = {}
    for finding in sorted(findings, key=lambda finding: finding.number or 0):
        if not finding.recovered and finding.severity != "warning":
            first.setdefault(finding.id, finding.number or 0)
    marked = []
    for finding in sorted(findings, key=lambda finding: finding.number or 0):
        last = (finding.number or 0) + NEXT_LINES
        is_effect = any(first.get(id, math.inf) <= last for id in table.rules_by_id()[finding.id].effect_of)
        marked.append(structs.replace(finding, effect=True) if is_effect else finding)
    return marked


def scan(file: BinaryIO) -> ScannedLog:
    """Search a log."""
    search = _LogSearch()
    for block in _read_blocks(file):
        search.feed(block)
    return search.result()


def explain_message(message: str) -> Diagnosis | None:
    """Explain the error of a request; `message` is `KIND: text`, as in a record."""
    hit = _find_pattern(strip_prefixes(message.replace("\n", " ").encode()), table.patterns())
    return None if hit is None else _make_diagnosis(*hit, None)


def _read_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines; an endless line is split, so that memory stays bounded."""
    rest = b""
    while block := file.read(BLOCK_BYTES):
        lines, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield lines + newline
        if len(rest) > BLOCK_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


class LogLine(NamedTuple):
    """A line without its prefixes."""

    text: str  # with its indentation
    level: Level | None  # of the innermost program; None: unknown


def parse_line(raw: bytes) -> LogLine:
    """Return the text and the level of a line, without control characters."""
    text = raw[:MAX_LINE_CHARS].decode("utf-8", "replace")
    text = printable(text.rstrip("\r\n")).replace("\n", "")
    end, level = 0, None
    while match := _LINE_PREFIX.match(text, end):
        end = match.end()
        if match.lastgroup is not None:
            groups = match.groupdict()
            name = next(value for group, value in groups.items() if value is not None and group.startswith("level"))
            # `part` is "Process" in a line of another program that the server passes on.
            level = None if groups["part"] == "Process" else _LEVELS.get(name.lower())
    text = text[end:].rstrip()
    if level is None and (logfmt := _LOGFMT.search(text)) is not None:
        level = "error" if _FAILED_LOAD in text else _LEVELS.get(logfmt[1].lower())
    return LogLine(text, level)


def strip_prefixes(raw: bytes) -> str:
    """Return the text of a line."""
    return parse_line(raw).text


def is_traceback_code(line: str, previous: bytes = b"") -> bool:
    """Check that a line is part of a traceback, but not its exception: a frame, carets, or source after a frame."""
    if line[:1].isspace() and (_TRACEBACK_FRAME.match(line) or _TRACEBACK_CARETS.match(line)):
        return True
    is_source = line[:4].isspace() and _TRACEBACK_FRAME.match(strip_prefixes(previous)) is not None
    return is_source or line.lstrip().startswith("raise ")


def _is_exception(line: str) -> bool:
    return _EXCEPTION.match(line) is not None and not line.partition(":")[0].endswith(_HARMLESS_EXCEPTIONS)


# Words of a process that crashes, or loses its GPU, in the lines that the table does not know.
_BAD_END = re.compile(
    r"(?i)\b(?:device|context|gpu|backend) (?:is |was )?(?:lost|hung|wedged)\b|Device_?Lost|"
    r"\bcore dumped\b|\bsegfault\b|\bsegmentation (?:fault|violation)|\bSIG(?:ABRT|SEGV|BUS|ILL|KILL)\b|"
    r"\babort(?:ed|ing)\b(?! request)|^Killed$|\bterminate called\b|\bfatal error\b|^panic: |"
    r"\bunhandled exception\b|\bassertion\b.{0,200}\bfailed\b"
)


def _is_bad_end(raw: bytes) -> bool:
    """Check whether one of the last lines of a log reports an error or a crash."""
    line = parse_line(raw)
    if _USER_TEXT.search(line.text) or line.level in ("chatter", "warning") or line.text.startswith(_TRACEBACK):
        return False
    return line.level == "error" or _BAD_END.search(line.text) is not None


class _LogSearch:
    """A search that continues from block to block."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str], Diagnosis] = {}  # by rule and cause, without its numbers
        self._counts: Counter[tuple[str, str]] = Counter()
        self._groups: dict[tuple[str, str], dict[str, str | None]] = {}  # of the line of each finding
        # A finding that one of the next lines may complete, and the number of the last such line.
        self._incomplete: tuple[tuple[str, str], int] | None = None
        self._is_detailed = False
        self._is_reloading = False  # a load failed, and a later one has begun
        self._has_gpu: bool | None = None  # None: the log does not tell
        # A shape is a line with zeros in place of its digits: those without a trigger word, and of frequent findings.
        self._plain_shapes: set[bytes] = set()
        self._frequent_shapes: dict[bytes, tuple[str, str]] = {}
        self._line_count = 0
        self._ready_line: int | None = None
        self._stop_line: int | None = None
        self._is_stopping = False  # a process of the server was asked to stop
        self._server_name: str | None = None
        self._traceback_line: int | None = None  # the first line of the open traceback
        self._previous_line = b""  # the last line of the previous block
        self._last_lines: deque[tuple[int, bytes]] = deque(maxlen=LAST_LINES)  # that are not empty, with their numbers

    def feed(self, block: bytes) -> None:
        """Search a block of whole lines."""
        self._server_name = self._server_name or next((name for word, name in _SERVER_WORDS if word in block), None)
        lines = block.split(b"\n")
        if block.endswith(b"\n"):
            lines.pop()
        shapes = block.translate(_ZERO_DIGITS).split(b"\n")
        triggering, words = self._find_triggers(set(shapes))
        self._is_detailed = self._is_detailed or b"DEBUG" in block
        if triggering or self._traceback_line is not None or self._incomplete is not None:
            candidates = [pattern for pattern in table.patterns() if pattern.needle.encode() in words]
            for place, (raw, shape) in enumerate(zip(lines, shapes, strict=False)):
                number = self._line_count + place + 1
                if self._incomplete is not None:
                    self._complete(raw, number)
                if self._traceback_line is not None or shape in triggering:
                    previous = lines[place - 1] if place else self._previous_line
                    self._examine(raw, shape, previous, number, candidates)
        from_the_end = (place for place in range(len(lines) - 1, -1, -1) if lines[place].strip())
        for place in reversed(list(itertools.islice(from_the_end, LAST_LINES))):
            self._last_lines.append((self._line_count + place + 1, lines[place][:MAX_LINE_CHARS]))
        self._line_count += len(lines)
        self._previous_line = lines[-1]

    def _find_triggers(self, shapes: set[bytes]) -> tuple[set[bytes], set[bytes]]:
        """Return the shapes that contain a trigger word, and those words."""
        new = shapes - self._plain_shapes
        text = b"\n".join(new)
        words = [word for word in _trigger_words() if word in text]
        if len(self._findings) >= MAX_FINDINGS:  # further exceptions would not be kept
            words = [word for word in words if word not in _EXCEPTION_WORDS]
        triggering = {shape for shape in new if any(word in shape for word in words)}
        self._remember_plain(new - triggering)
        return triggering, {word for shape in words for word in _trigger_words()[shape]}

    def _remember_plain(self, shapes: set[bytes]) -> None:
        if len(self._plain_shapes) + len(shapes) > MAX_SHAPES:
            self._plain_shapes.clear()
        self._plain_shapes.update(shape for shape in shapes if len(shape) <= SHOWN_CHARS)

    def result(self) -> ScannedLog:
        engine = next((engine for engine in engines() if engine.title == self._server_name), None)
        findings = []
        for key, finding in self._findings.items():
            rule = table.rules_by_id()[finding.id]
            if self._counts[key] < rule.min_count or (finding.recovered and rule.min_count > 1):
                continue
            is_own = finding.severity == rule.severity  # not another program's, and not of a later search
            if is_own and rule.gpu_access and self._works_without_gpu(finding):  # a later crash says more
                finding = structs.replace(finding, severity="cause", hint=True)
            cause, fix = table.format_cause_and_fix(rule, self._groups[key], None if engine is None else engine.name)
            for name, own_name in ({} if engine is None else engine.log.names).items():
                fix = re.sub(rf"\b{name}\b", own_name, fix)
            findings.append(structs.replace(finding, count=self._counts[key], cause=cause, fix=fix))
        ready = self._ready_line or 0
        bad = [(number, raw) for number, raw in self._last_lines if number > ready and _is_bad_end(raw)]
        return ScannedLog(
            lines=self._line_count,
            findings=_mark_effects(findings),
            last=masked(strip_prefixes(self._last_lines[-1][1]).strip())[:SHOWN_CHARS] if self._last_lines else "",
            ready=self._ready_line,
            stopping=self._stop_line,
            bad_end=bad[0][0] if bad else None,
            bad_line=masked(strip_prefixes(bad[0][1]).strip())[:SHOWN_CHARS] if bad else "",
            detailed=self._is_detailed,
            server=self._server_name,
            gpu=self._has_gpu,
        )

    def _works_without_gpu(self, finding: Diagnosis) -> bool:
        """Check that the server became ready although it had found no GPU."""
        is_before = self._ready_line is not None and (finding.number or 0) < self._ready_line
        return is_before and self._has_gpu is False and not finding.recovered

    def _complete(self, raw: bytes, number: int) -> None:
        """Add what a line says of the finding before it; a wrapper is shown by the line that has its reason."""
        assert self._incomplete is not None
        key, end = self._incomplete
        finding = self._findings[key]
        regex = table.next_line_regex(finding.id)
        assert regex is not None
        text = parse_line(raw).text
        match = regex.search(text)
        if match is not None:  # what the line of the finding itself says counts more
            own = {name: value for name, value in self._groups[key].items() if value}
            self._groups[key] = match.groupdict() | own
            if finding.severity == "wrapper":
                self._findings[key] = structs.replace(finding, line=shorten(masked(text)), number=number)
        if match is not None or number >= end:
            self._incomplete = None

    def _examine(self, raw: bytes, shape: bytes, previous: bytes, number: int, candidates: list[Pattern]) -> None:
        key = None if self._is_stopping else self._frequent_shapes.get(shape)
        if key is not None and not self._findings[key].recovered:
            self._counts[key] += 1
            self._traceback_line = None
            return
        line = parse_line(raw)
        if _USER_TEXT.search(line.text):
            self._remember_plain({shape})
            return
        self._track_state(raw, number)
        if is_traceback_code(line.text, previous):
            return
        hit = _find_pattern(line.text, candidates)
        if hit is not None and line.level == "chatter" and hit[0].rule.severity != "warning":
            hit = hit if hit[0].rule.chatter else None
        if hit is None:
            self._track_exception(line, number)
            return
        self._traceback_line = None
        finding = structs.replace(_make_diagnosis(*hit, number), hint=line.level == "warning")
        if self._has_gpu and hit[0].rule.gpu_access and hit[0].rule.chatter:  # a later search, for free memory
            finding = structs.replace(finding, severity="warning")
        key = self._add_finding(finding, hit[1].groupdict())
        if key is not None and self._counts[key] >= FREQUENT and finding.severity != "wrapper":
            self._frequent_shapes[shape] = key

    def _track_state(self, raw: bytes, number: int) -> None:
        """Note when the server's model is complete, when it is ready and when it stops."""
        reported = {key for key, words in _LOG_WORDS.items() if any(word in raw for word in words)}
        if "starting" in reported:
            self._stop_line, self._is_stopping = None, False
            self._has_gpu = None if self._has_gpu else self._has_gpu  # llama.cpp searches before it says that it starts
        elif reported & {"stopping", "unloading"}:
            if self._stop_line is None and "unloading" not in reported and b"(Process)" not in raw:
                self._stop_line = number
            self._is_stopping = True
        is_ready = "ready" in reported
        if "loading" in reported:
            failed = (finding for finding in self._findings.values() if not finding.recovered)
            self._is_reloading = any((finding.phase, finding.severity) == ("start", "wrapper") for finding in failed)
        if is_ready:
            self._ready_line, self._is_reloading = number, False
        if reported & {"gpu", "no_gpu"}:
            self._has_gpu = "gpu" in reported
        if reported & {"ready", "fetched", "gpu"}:
            for key, finding in self._findings.items():
                rule = table.rules_by_id()[finding.id]
                is_ready_for_it = is_ready and not (rule.gpu_access and self._has_gpu is False)
                is_complete = rule.fetching and "fetched" in reported
                if is_ready_for_it or is_complete or (rule.gpu_access and "gpu" in reported):
                    self._findings[key] = structs.replace(finding, recovered=True)

    def _track_exception(self, line: LogLine, number: int) -> None:
        """Note the start of a traceback, and its exception."""
        text = line.text
        if not text or text[0].isspace() or line.level in ("chatter", "warning"):
            return  # other processes write in between
        if text.startswith(_TRACEBACK):
            self._traceback_line = number
        elif self._traceback_line is not None:
            if number - self._traceback_line < _MAX_TRACEBACK_LINES and _is_exception(text):
                self._add_finding(*_unknown_exception(text, number))
            self._traceback_line = None

    def _add_finding(self, finding: Diagnosis, groups: dict[str, str | None]) -> tuple[str, str] | None:
        """Add or count a finding. Return its key, or None if it is left out."""
        if self._is_stopping and finding.severity not in ("cause", "request", "warning"):
            return None  # a server that stops ends its processes, and reports that they are dead
        if self._is_reloading and not finding.hint and finding.severity not in ("request", "warning"):
            # The newest load counts: users change a setting and try again.
            self._is_reloading = False
            self._findings = {key: structs.replace(old, recovered=True) for key, old in self._findings.items()}
        key = (finding.id, _DIGITS.sub("#", finding.cause))
        earlier = self._findings.get(key)
        if earlier is None and len(self._findings) >= MAX_FINDINGS:
            return None
        # The last wrapper of a start counts; after a recovery the same finding counts anew.
        is_start_wrapper = finding.severity == "wrapper" and finding.phase == "start"
        if earlier is None or earlier.recovered or is_start_wrapper or (earlier.hint and not finding.hint):
            self._findings[key], self._groups[key] = finding, groups
            if table.next_line_regex(finding.id) is not None:
                self._incomplete = key, (finding.number or 0) + NEXT_LINES
        self._counts[key] += 1
        return key


def _unknown_exception(line: str, number: int) -> tuple[Diagnosis, dict[str, str | None]]:
    pattern = next(pattern for pattern in table.patterns() if pattern.rule.id == EXCEPTION_RULE)
    match = _EXCEPTION.match(line)
    assert match is not None
    return _make_diagnosis(pattern, match, number), match.groupdict()


def _find_pattern(line: str, candidates: Sequence[Pattern]) -> tuple[Pattern, re.Match[str]] | None:
    for pattern in candidates:
        if pattern.needle in line and (match := pattern.regex.search(line)) is not None:
            return pattern, match
    return None


def _make_diagnosis(pattern: Pattern, match: re.Match[str], number: int | None) -> Diagnosis:
    rule = pattern.rule
    program = [match.groupdict().get(name) for name in ("name", "library")]
    is_other = rule.servers_only and program[0] and not any(is_server_name(name) for name in program if name)
    cause, fix = table.format_cause_and_fix(rule, match.groupdict())
    line = masked(match.string)
    masked_match = pattern.regex.search(line) if len(line) > SHOWN_CHARS else None
    return Diagnosis(
        id=rule.id,
        phase=rule.phase,
        severity="warning" if is_other else rule.severity,
        cause=cause,
        fix=fix,
        line=shorten(line, masked_match.start() if masked_match else 0),
        number=number,
        scenario=rule.scenario,
        source=rule.source,
    )


def shorten(line: str, start: int = 0) -> str:
    """Return a line, or the part of a long one around `start`."""
    shown = line.strip()
    if len(shown) <= SHOWN_CHARS:
        return shown
    start = max(0, min(start - 60, len(line) - SHOWN_CHARS))
    return ("..." if start else "") + line[start : start + SHOWN_CHARS].strip() + "..."


class ExitState(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a server ended, as its supervisor reports it."""

    exit_code: int | None = None
    oom_killed: bool = False
    error: str = ""  # of the Docker Engine that could not start the container, or of an API


def explain(log: str | Path, state: ExitState = ExitState()) -> Diagnosis | None:  # noqa: B008 - a frozen value
    """Return the most likely known cause, or None. `log`: its text, or its file.

    A kill for lack of memory comes first, then a cause in `state.error`, then the first known cause in the log,
    whatever wrappers such as "Engine core initialization failed" surround it. An exit code counts only if the log has
    nothing better.
    """
    scanned = scan_text(log)
    exit_failure = _explain_exit(state, scanned.last)
    if state.oom_killed and exit_failure is not None:
        return exit_failure
    api_findings = _find_in_message(state.error)
    if any(finding.severity == "cause" for finding in api_findings):
        return select_root_cause(api_findings)
    findings = scanned.findings
    if state.exit_code is not None:  # a server does not end because it refused a request, or works without a GPU
        findings = [
            finding for finding in findings if finding.severity != "request" and not _is_before_ready(finding, scanned)
        ]
    return select_root_cause([*findings, *api_findings, *([exit_failure] if exit_failure is not None else [])])


def _is_before_ready(finding: Diagnosis, scanned: ScannedLog) -> bool:
    """Check that the server became ready in spite of this failure, without a GPU."""
    is_before = scanned.ready is not None and (finding.number or 0) < scanned.ready
    return is_before and not finding.recovered and table.rules_by_id()[finding.id].gpu_access


def explain_api_error(message: str) -> Diagnosis | None:
    """Return the most likely known cause in an API's error message, such as the Docker Engine's; None without one."""
    return select_root_cause(_find_in_message(message))


def _find_in_message(message: str) -> list[Diagnosis]:
    """Return the known failures in a message, which has no lines to point at."""
    return [structs.replace(finding, number=None) for finding in scan_text(message).findings]


def scan_text(log: str | Path) -> ScannedLog:
    """Search a log, given as its text or its file. Raises OSError."""
    if isinstance(log, Path):
        with open_file(log) as file:
            return scan(file)
    return scan(io.BytesIO(log.encode("utf-8", "replace")))


def _explain_exit(state: ExitState, last_line: str) -> Diagnosis | None:
    """Return what an exit code alone means, with the last line of the log as evidence."""
    code = state.exit_code
    if code is None and not state.oom_killed:
        return None
    code = 137 if code is None else 128 - code if code < 0 else code  # negative: a signal ended the process
    failure = scan_text(f"ExitCode={code} OOMKilled={state.oom_killed}").cause()
    return None if failure is None else structs.replace(failure, line=last_line, number=None)


def find_scenario_mistake(errors: Sequence[str | None]) -> Diagnosis | None:
    """Return the mistake of the scenario that failed all of the first requests; None if later ones may succeed.

    `errors`: kind and message of each, as `http: status 404: ...`; None for a request that did not fail.
    """
    causes = [explain_message(error) for error in errors if error is not None]
    mistakes = [cause for cause in causes if cause is not None and cause.scenario]
    return mistakes[0] if mistakes and len(mistakes) == len(errors) else None


def example_messages(failures: Iterable[tuple[str | None, str | None]]) -> Iterator[str | None]:
    """Yield for each failure, a kind and its message, the first message that differs from its own only in numbers.

    Without a kind it yields None. More than MAX_MESSAGES different ones become a common text.
    """
    examples: dict[tuple[str, str], str] = {}
    for kind, message in failures:
        if kind is None:
            yield None
            continue
        text = printable(message or "").replace("\n", " ")
        key = (kind, _DIGITS.sub("#", text))
        if key not in examples and len(examples) >= MAX_MESSAGES:
            key, text = (kind, _OTHER_MESSAGES), _OTHER_MESSAGES
        yield examples.setdefault(key, text)


def group_failures(server: str, load: str, failures: Iterable[tuple[str, str, int]]) -> list[FailedRequests]:
    """Return a row's failed requests by cause, the most frequent first; an unknown message is its own group.

    `failures`: kind, message and number.
    """
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for kind, message, number in failures:
        counts[kind, _DIGITS.sub("#", message)] += number
        examples.setdefault((kind, _DIGITS.sub("#", message)), message)
    groups: dict[tuple[str, str], FailedRequests] = {}
    for (kind, text), count in counts.most_common():
        example = examples[kind, text]
        failure = explain_message(f"{kind}: {example}")
        key = (kind, text if failure is None else failure.id + _DIGITS.sub("#", failure.cause))
        if key in groups:
            groups[key] = structs.replace(groups[key], count=groups[key].count + count)
            continue
        explanation = {} if failure is None else {"id": failure.id, "cause": failure.cause, "fix": failure.fix}
        groups[key] = FailedRequests(server=server, load=load, kind=kind, count=count, message=example, **explanation)
    return sorted(groups.values(), key=lambda group: -group.count)
