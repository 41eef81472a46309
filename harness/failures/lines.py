"""A line of a log as its program wrote it: without what Docker, journald, Compose or Lemonade put before it."""

import contextlib
import json
import re

MOST_CHARS = 20_000  # of a line; what is longer is no sentence

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f]")
_PREFIXES = re.compile(
    r"\s*(?:"
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) [\w.-]+ [\w./-]+\[\d+\]: "  # journalctl
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)? "  # docker logs -t; Lemonade
    r"|[\w.-]+\s+\| "  # docker compose logs
    r"|\[(?:Trace|Debug|Info|Warn|Warning|Error|Fatal)\] (?:\([\w:. -]+\) )?"  # Lemonade
    r"|\([A-Za-z_][\w-]* (?:[\w]+=\S+ )*pid=\d+\) "  # vLLM's processes
    r"|\((?:Process)\) "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]+\] "  # vLLM
    r"|\d+\.\d\d\.\d{3}\.\d{3} [A-Z] "  # llama.cpp
    r"|\[rank\d+\]: "  # PyTorch
    r")"
)
_FRAME = re.compile(r'^\s+File ".*", line \d+')
_CARETS = re.compile(r"^\s+[\^~]+\s*$")


def plain(raw: bytes) -> str:
    """The text of a line; its indentation stays. Binary junk and colours go."""
    text = raw[:MOST_CHARS].decode("utf-8", "replace")
    if text.startswith('{"log":"'):  # a file of Docker's json-file driver
        with contextlib.suppress(ValueError, KeyError):
            text = str(json.loads(text)["log"])
    text = _ANSI.sub("", text.rstrip("\r\n"))
    place = 0
    while match := _PREFIXES.match(text, place):
        place = match.end()
    return text[place:].rstrip()


def is_code(line: str, before: str) -> bool:
    """Whether a line of a traceback is the program's source, which names errors that did not happen."""
    shown = line[:4].isspace() and _FRAME.match(before)
    return bool(_FRAME.match(line) or _CARETS.match(line) or shown) or line.lstrip().startswith("raise ")
