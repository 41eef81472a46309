"""A line of a log as its program wrote it: without what Docker, journald, Compose or the server put before it."""

import contextlib
import json
import re
from typing import Literal, NamedTuple

from harness.engines import engines
from harness.redact import printable

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


class Line(NamedTuple):
    """A line without what others put before it."""

    text: str  # its indentation stays
    level: Level | None  # as the innermost program says; None: it does not


def parsed(raw: bytes) -> Line:
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
    return Line(text, level)


def plain(raw: bytes) -> str:
    """The text of a line alone."""
    return parsed(raw).text


def is_quoting(line: Line) -> bool:
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
