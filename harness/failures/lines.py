"""A line of a log as its program wrote it: without what Docker, journald, Compose or Lemonade put before it."""

import contextlib
import json
import re
from typing import Literal, NamedTuple

from harness.failures.redact import printable

Level = Literal["chatter", "warning", "error"]  # chatter: INFO and below
MOST_CHARS = 20_000  # of a line; what is longer is no sentence

_PREFIXES = re.compile(
    r"\s*(?:"
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) [\w.-]+ [\w./-]+\[\d+\]: "  # journalctl
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)? "  # docker logs -t; Lemonade
    r"|[\w.-]+\s+\| "  # docker compose logs
    r"|\[(?P<lemonade>Trace|Debug|Info|Warn|Warning|Error|Fatal)\] (?:\((?P<part>[\w:. -]+)\) )?"  # Lemonade
    r"|\([A-Za-z_][\w-]* (?:[\w]+=\S+ )*pid=\d+\) "  # vLLM's processes
    r"|\((?:Process)\) "
    r"|(?P<vllm>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? "
    r"(?:\[[^\]]+\]|[\w.]+:\d+\]) "  # vLLM
    r"|(?:- )?(?:[\w.]+ - )?(?P<python>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)(?: - |:[\w.]+:|: *| )"  # Python
    r"|\d+\.\d\d\.\d{3}\.\d{3} (?P<llamacpp>[A-Z]) "  # llama.cpp
    r"|\[rank\d+\]: "  # PyTorch
    r")"
)
_LEVELS: dict[str, Level] = {
    "trace": "chatter", "debug": "chatter", "d": "chatter", "info": "chatter", "i": "chatter",
    "warn": "warning", "warning": "warning", "w": "warning",
    "error": "error", "critical": "error", "fatal": "error", "e": "error",
}  # fmt: skip
_LOGFMT = re.compile(r"(?:^|\s)level=(\w+)")  # Ollama
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
        with contextlib.suppress(ValueError, KeyError):
            text = str(json.loads(text)["log"])
    text = printable(text.rstrip("\r\n")).replace("\n", "")
    place = 0
    level: Level | None = None
    while match := _PREFIXES.match(text, place):
        place = match.end()
        if match.lastgroup is not None:
            name = match["lemonade"] or match["vllm"] or match["python"] or match["llamacpp"]
            level = None if match["part"] == "Process" else _LEVELS.get(name.lower())  # that is another program's line
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


def is_code(line: str, before: str) -> bool:
    """Whether a line of a traceback is the program's source, which names errors that did not happen."""
    shown = line[:4].isspace() and _FRAME.match(before)
    return bool(_FRAME.match(line) or _CARETS.match(line) or shown) or line.lstrip().startswith("raise ")
