"""Read a log: whole lines without prefixes, their level, and the tracebacks in them."""

import codecs
import contextlib
import json
import re
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

from harness.engines import engines
from harness.redact import printable

BLOCK_BYTES = 1 << 18
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_LOOKED_AT = 512
_UTF16_SHARE = 0.4  # of the bytes at one side that are zero: Latin text has nearly all, a binary file few


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """The file as UTF-8 in blocks of whole lines; junk without line ends comes in pieces, and needs no more memory."""
    rest = b""
    for block in _pieces(file):
        whole, end, after = (rest + block).rpartition(b"\n")
        if end:
            yield whole + end
        rest = after
        if len(rest) > BLOCK_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """What PowerShell's `>` writes is UTF-16."""
    block = file.read(BLOCK_BYTES)
    encoding = _encoding(block)
    if encoding is None:
        block = block.removeprefix(codecs.BOM_UTF8)
        while block:
            yield block
            block = file.read(BLOCK_BYTES)
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    while block:
        yield decoder.decode(block).removeprefix("\ufeff").encode("utf-8", "replace")
        block = file.read(BLOCK_BYTES)
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def _encoding(block: bytes) -> str | None:
    for mark, encoding in _MARKS.items():
        if block.startswith(mark):
            return encoding
    head = block[:_LOOKED_AT]
    even, odd = head[0::2], head[1::2]
    if odd and odd.count(0) > _UTF16_SHARE * len(odd) and not even.count(0):
        return "utf-16-le"
    return "utf-16-be" if even and even.count(0) > _UTF16_SHARE * len(even) and not odd.count(0) else None


Level = Literal["chatter", "warning", "error"]  # chatter: INFO and below
MOST_CHARS = 20_000  # of a line; what is longer is no sentence

_BEFORE = (
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) [\w.-]+ [\w./-]+\[\d+\]: ",  # journalctl
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)? ",  # docker logs -t
    r"[\w.-]+\s+\| ",  # docker compose logs
    *(prefix for engine in engines() for prefix in engine.log.prefixes),
    r"(?:- )?(?:[\w.]+ - )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)(?: - |:[\w.]+:|: *| )",  # Python
    r"\[rank\d+\]: ",  # PyTorch
)
_PREFIXES = re.compile(
    rf"\s*(?:{'|'.join(text.replace('(?P<level>', f'(?P<level{place}>') for place, text in enumerate(_BEFORE))})"
)
_LEVELS: dict[str, Level] = {
    "trace": "chatter", "debug": "chatter", "d": "chatter", "info": "chatter", "i": "chatter",
    "warn": "warning", "warning": "warning", "w": "warning",
    "error": "error", "critical": "error", "fatal": "error", "e": "error",
}  # fmt: skip
_LOGFMT = re.compile(r"(?:^|\s)level=(\w+)")
_QUOTING = re.compile(
    r"""\bReceived request\b|\bprompts?['"]?[:=] ?[\['"]|["']content["']: ?[\['"]|"(?:GET|POST|PUT|DELETE|HEAD) /"""
)
_FRAME = re.compile(r'^\s+File ".*", line \d+')
_CARETS = re.compile(r"^\s+[\^~]+\s*$")


class LogLine(NamedTuple):
    """A line without what others put before it."""

    text: str  # its indentation stays
    level: Level | None  # as the innermost program says; None: it does not


def parsed(raw: bytes) -> LogLine:
    """The text and the level of a line. Binary junk and colours go."""
    text = raw[:MOST_CHARS].decode("utf-8", "replace")
    if text.startswith('{"log":"'):  # a file of Docker's json-file driver
        with contextlib.suppress(ValueError, KeyError, RecursionError):
            text = str(json.loads(text)["log"])
    text = printable(text.rstrip("\r\n")).replace("\n", "")
    place = 0
    level: Level | None = None
    while match := _PREFIXES.match(text, place):
        place = match.end()
        if match.lastgroup is not None:
            named = match.groupdict()
            name = next(text for group, text in named.items() if text is not None and group.startswith("level"))
            level = None if named["part"] == "Process" else _LEVELS.get(name.lower())  # that is another program's line
    text = text[place:].rstrip()
    if level is None and (said := _LOGFMT.search(text)) is not None:
        level = _LEVELS.get(said[1].lower())
    return LogLine(text, level)


def plain(raw: bytes) -> str:
    """The text of a line alone."""
    return parsed(raw).text


def is_quoting(line: LogLine) -> bool:
    """Whether a line shows what users sent: a request with its prompt, an access log."""
    return _QUOTING.search(line.text) is not None


def is_frame(line: str) -> bool:
    """Whether a line of a traceback names a file; the program's source may follow."""
    return _FRAME.match(line) is not None


def is_shown(line: str) -> bool:
    """Whether a line of a traceback may be the program's source, which names errors that did not happen."""
    return line[:4].isspace()


def is_code(line: str) -> bool:
    """Whether a line is part of a traceback, whatever is before it."""
    return line[:1].isspace() and (is_frame(line) or _CARETS.match(line) is not None) or line.lstrip()[:6] == "raise "


RULE = "engine.exception"  # the row that tells of them
_MOST_LINES = 1000  # of a traceback
_NAME = r"(?:(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|[A-Z]\w*)"
_RAISED = re.compile(rf"(?P<what>{_NAME}(?:: .*|:)?)$")
_CLASS = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)+[A-Z]\w*[a-z]\w*: .|(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:$|: ))"
)
_ENDS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "StopIteration")  # no failures


def exception_in(line: str) -> re.Match[str] | None:
    """`CLASS: what it says`, or the class alone, as group `what`."""
    found = _RAISED.match(line)
    return None if found is None or line.partition(":")[0].endswith(_ENDS) else found


class TracebackReader:
    """Follows tracebacks, and holds the last exception that was logged as an error without one."""

    def __init__(self) -> None:
        self._began: int | None = None  # the line of the traceback that is open
        self._held: tuple[str, int] | None = None

    @property
    def open(self) -> bool:
        return self._began is not None

    def close(self) -> None:
        self._began = None

    def take(self) -> tuple[str, int] | None:
        """The exception held, once: a wrapper follows it."""
        held, self._held = self._held, None
        return held

    def feed(self, line: LogLine, number: int) -> str | None:
        """A line that no row knows: the exception, where a traceback ends with it."""
        text = line.text
        if not text or text[0].isspace() or line.level in ("chatter", "warning"):
            return None  # other processes write in between
        if text.startswith("Traceback (most recent call last)"):
            self._began = number
            return None
        if self._began is not None:
            inside, self._began = number - self._began < _MOST_LINES, None
            return text if inside and exception_in(text) is not None else None
        if line.level == "error" and _CLASS.match(text) and exception_in(text) is not None:
            self._held = text, number
        return None
