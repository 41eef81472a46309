"""Exceptions of any name: not every class ends in Error, and some say nothing but their name."""

import re

from harness.failures.lines import Line

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


class Trace:
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

    def feed(self, line: Line, number: int) -> str | None:
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
