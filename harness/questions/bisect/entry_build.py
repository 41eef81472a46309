"""Builds an entry before its first start: the command of `--build`, whose words no shell reads."""

import errno
import os
import shlex
import shutil
import subprocess
import time
from collections import deque
from pathlib import Path

from harness.base.errors import HarnessError, reason_of
from harness.base.process import start, stop
from harness.base.reason import Reason, because
from harness.base.redact import masked, printable
from harness.questions.bisect.entry_list import entry_text

PLACE = "{}"  # in the command: the entry
LAST_LINES = 5  # of the output of a build that failed
MAX_TAIL = 64 * 1024  # bytes of the output that are looked at for them
POLL_S = 0.2


class BuildCut(Exception):
    """A build took longer than the time that it had: whether it succeeds is not known."""


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


def build(words: list[str], value: object, log: Path, limit_s: float, folder: str | None = None) -> Reason | None:
    """Run a build command for an entry in `folder`; return why it failed, or None. Its output goes to `log`.

    It ends with this process. Its words are given to the program as they are: no shell reads them. Raises HarnessError
    for a command that cannot be run, which is no result of the entry, and BuildCut for one that `limit_s` cuts off.
    """
    command = [word.replace(PLACE, entry_text(value)) for word in words]
    began_s = time.monotonic()
    with log.open("wb") as output:
        try:
            _refuse_missing(command[0], folder)
            child = start(_in_folder(command, folder), stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            why = f"{error.filename or command[0]}: {reason_of(error)}"
            if PLACE in words[0] and error.filename == command[0]:  # a program for each entry: this one has none
                return because("build_failed", f"the build command cannot be run: {why}", code=None, output=[])
            advice = f"Correct it; it runs in {folder or Path.cwd()}, where the search was started."
            raise HarnessError(f"--build: the command cannot be run: {why}", next_step=advice) from None
        try:
            while child.poll() is None and time.monotonic() - began_s < limit_s:
                time.sleep(POLL_S)
            is_late = child.poll() is None
        finally:
            code = stop(child)
    if is_late:
        raise BuildCut
    if not code:
        return None
    lines = last_lines(log)
    why = f"the build failed with exit code {code}"
    return because("build_failed", ": ".join(filter(None, [why, " / ".join(lines)])), code=code, output=lines)


def _refuse_missing(program: str, folder: str | None) -> None:
    """Raise OSError for a program that is not there or cannot be executed, and for a folder that is not there."""
    if folder is not None and not Path(folder).is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    path = os.path.join(folder or "", program) if "/" in program else program
    if shutil.which(path) is None:
        code = errno.EACCES if "/" in program and os.path.exists(path) else errno.ENOENT
        raise OSError(code, os.strerror(code), program)


def _in_folder(command: list[str], folder: str | None) -> list[str]:
    return command if folder is None else ["sh", "-c", 'cd -- "$0" && exec "$@"', folder, *command]


def last_lines(log: Path) -> list[str]:
    """The last lines of a log, without secrets and control characters."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MAX_TAIL))
        text = file.read(MAX_TAIL).decode("utf-8", "replace")
    lines = deque((line.strip() for line in text.splitlines() if line.strip()), maxlen=LAST_LINES)
    return [printable(masked(line))[:300] for line in lines]
