"""Builds an entry before its first start: the command of `--build`, run without a shell."""

import shlex
import subprocess
import time
from collections import deque
from pathlib import Path

from harness.base.errors import HarnessError, reason_of
from harness.base.process import start, stop
from harness.base.reason import Reason, because
from harness.base.redact import masked, printable
from harness.base.units import duration
from harness.questions.bisect.entry_list import entry_text

PLACE = "{}"  # in the command: the entry
LAST_LINES = 5  # of the output of a build that failed
MAX_TAIL = 64 * 1024  # bytes of the output that are looked at for them
POLL_S = 0.2


def build_words(command: str, values: list[object]) -> list[str]:
    """Return the words of a build command. Raises HarnessError for one that cannot be run with these entries."""
    advice = "Write it as for a shell, with {} where the entry belongs: --build 'docker build -t {} .'"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise HarnessError(f"--build: the command cannot be split into words ({error})", next_step=advice) from None
    if not any(PLACE in word for word in words):
        raise HarnessError(f"--build: '{command}' has no {{}}", next_step=advice)
    if option := next((text for text in map(entry_text, values) if text.startswith("-")), None):
        raise HarnessError(f"--build: the command would take '{option}' for an option", next_step="Rename the entry.")
    return words


def build(words: list[str], value: object, log: Path, limit_s: float) -> Reason | None:
    """Run a build command for an entry; return why it failed, or None. Its output goes to `log`.

    It ends with this process, and after `limit_s`. Its words are given to the program as they are: no shell reads them.
    """
    command = [word.replace(PLACE, entry_text(value)) for word in words]
    began_s = time.monotonic()
    with log.open("wb") as output:
        try:
            child = start(command, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            why = f"the build command cannot be run: {command[0]}: {reason_of(error)}"
            return because("build_failed", why, code=None, output=[])
        try:
            while child.poll() is None and time.monotonic() - began_s < limit_s:
                time.sleep(POLL_S)
            is_late = child.poll() is None
        finally:
            code = stop(child)
    if is_late:
        why = f"the build did not end in {duration(limit_s)}, which were left of --budget"
    elif code:
        why = f"the build failed with exit code {code}"
    else:
        return None
    lines = last_lines(log)
    return because("build_failed", ": ".join(filter(None, [why, " / ".join(lines)])), code=code, output=lines)


def last_lines(log: Path) -> list[str]:
    """The last lines of a log, without secrets and control characters."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MAX_TAIL))
        text = file.read(MAX_TAIL).decode("utf-8", "replace")
    lines = deque((line.strip() for line in text.splitlines() if line.strip()), maxlen=LAST_LINES)
    return [printable(masked(line))[:300] for line in lines]
