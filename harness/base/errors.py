"""The errors that a user sees, and their exit codes.

HarnessError
 +- ScenarioError      the scenario cannot be used            exit 1
 +- UnlikeError        runs that are not compared             exit 1 (harness.records.manifest)
 +- ServerError        not ready, or without the model       exit 2
 |   +- StartError     because of its settings, not of its host
 |   +- ImageError     its image is not here and cannot be pulled
 +- RunError           the run cannot give valid numbers      exit 3
"""

import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from harness.base.redact import masked

INTERRUPTED = "interrupted; everything that was started has been torn down"
SHOWN_PROBLEMS = 50  # of a scenario
MAX_CHARACTERS = 1000  # of one problem
_MAX_NAMES = 1000  # with which a misspelled word is compared
_SHOWN_NAMES = 100  # of all that are known
MAX_BAD_LINES = 5  # of one file; then reading stops


class ExitCode(enum.IntEnum):
    OK = 0
    USAGE = 1  # usage, scenario or input file
    SERVER = 2  # a server did not become ready, or lacks the model
    INVALID = 3  # the run ended INVALID
    FAILED = 4  # a check or a comparison failed, or the doctor found a blocker
    INCONCLUSIVE = 5  # no check failed, and at least one is inconclusive
    INTERRUPTED = 130  # Ctrl-C, SIGTERM or SIGHUP


class HarnessError(Exception):
    """An error that a user sees: one sentence (what, where, which value), and what to do next."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, what: str, *, next_step: str = "", detail: str = "") -> None:
        # A server's words are in many errors, so secrets are masked here.
        what, next_step, detail = masked([what, next_step, detail], "sure")
        super().__init__(what)
        if next_step:
            self.add_note(next_step)  # notebooks show it
        self.what = what
        self.next_step = next_step
        self.detail = detail  # evidence to show below the sentence, such as the last lines of a log


def reason_of(error: Exception) -> str:
    """What an error says, of the system's errors without number and file name."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


class Problem(NamedTuple):
    path: str  # such as $.loads.chat.users; relative to another path: .users; "": the whole file
    text: str
    line: int | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f" (line {self.line})"
        return f"{self.path}{line}: {self.text}" if self.path else self.text

    def below(self, path: str) -> "Problem":
        """Return the problem with a prefix before its path."""
        return self._replace(path=f"{path}{self.path}")

    def located(self, lines: Mapping[str, int]) -> "Problem":
        """Return the problem with the line of its path, or of the nearest parent in `lines`."""
        path = self.path
        while path not in lines and "." in path:
            path = path.rpartition(".")[0]
        return self._replace(line=lines.get(path))


class ScenarioError(HarnessError):
    """A scenario cannot be used; `problems` lists all its mistakes."""

    def __init__(self, where: str, problems: Iterable[Problem | str]) -> None:
        texts = list(map(str, problems))
        count = "1 problem" if len(texts) == 1 else f"{len(texts):,} problems"
        super().__init__(f"{where}: {count}", next_step="Correct the file and run `harness check` on it.")
        # Masked first: the mask would not find a value that is cut.
        self.problems = [shorten(text) for text in masked(texts, "sure")]
        more = len(texts) - SHOWN_PROBLEMS
        self.detail = "\n".join(self.problems[:SHOWN_PROBLEMS] + ([f"and {more:,} more"] if more > 0 else []))


def shorten(problem: str) -> str:
    """Cut the middle of a long problem, which has a long value there."""
    if len(problem) <= MAX_CHARACTERS:
        return problem
    return f"{problem[: MAX_CHARACTERS // 2]} … {problem[-MAX_CHARACTERS // 2 :]}"


class ServerError(HarnessError):
    exit_code = ExitCode.SERVER


class StartError(ServerError):
    """A server ended, refused its model, or did not become ready. In a sweep that is a result.

    `facts`: `failure` (id), `cause` and `fix` of the failure table, for a known failure.
    """

    def __init__(self, what: str, *, next_step: str = "", detail: str = "", **facts: str | None) -> None:
        super().__init__(what, next_step=next_step, detail=detail)
        self.facts: dict[str, str] = masked({key: value for key, value in facts.items() if value}, "sure")


class ImageError(ServerError):
    """An image is not on this machine, and cannot be pulled: offline, unknown, not allowed, or not built yet."""


class RunError(HarnessError):
    """The load ran but its numbers cannot be trusted."""

    exit_code = ExitCode.INVALID


def sentence(error: Exception) -> str:
    """Return an error as a line for a log or a page."""
    if isinstance(error, HarnessError):
        text = "; ".join([error.what, *error.detail.splitlines()])
        return f"{text.removesuffix('.')}. {error.next_step}".strip()
    return str(error)


class BadLines:
    """Collect the first unusable lines of a file."""

    def __init__(self, path: object, next_step: str) -> None:
        self._path = path
        self._next_step = next_step
        self._problems: list[str] = []

    def add(self, line: int, problem: str) -> None:
        self._problems.append(f"{self._path}:{line}: {problem}")
        if len(self._problems) == MAX_BAD_LINES:
            self.raise_errors()

    def raise_errors(self) -> None:
        if self._problems:
            first, *others = self._problems
            raise HarnessError(first, detail="\n".join(others), next_step=self._next_step)


def closest_name(word: str, choices: Iterable[str]) -> str | None:
    """Return the known name that is most like the word; None: none is like it, or there are too many to compare."""
    names = {name.casefold(): name for name in sorted(choices)}
    if len(names) > _MAX_NAMES or len(word) > MAX_CHARACTERS:
        return None
    return next((names[name] for name in difflib.get_close_matches(word.casefold(), names, n=1, cutoff=0.6)), None)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a suggestion in words: the closest known name, or all of them."""
    names = sorted(choices)
    if (close := closest_name(word, names)) is not None:
        return f"did you mean '{close}'?"
    more = [f"... {len(names) - _SHOWN_NAMES:,} more"] if len(names) > _SHOWN_NAMES else []
    return "known: " + ", ".join([*names[:_SHOWN_NAMES], *more]) if names else "none are known"


def suggest_row(name: str, choices: Iterable[str]) -> str:
    """Return a suggestion for a load or row. A mix has parts, LOAD.PART; a load with stages has LOAD@USERS."""
    names = list(choices)
    parts = [row for row in names if row.startswith((f"{name}.", f"{name}@"))]
    return f"it is several: {', '.join(parts)}" if parts else did_you_mean(name, names)
