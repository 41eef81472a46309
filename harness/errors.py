"""The errors that a user sees, and their exit codes.

HarnessError
 +- ScenarioError      the scenario cannot be used            exit 1
 +- UnlikeError        runs that are not compared             exit 1 (harness.rundir.manifest)
 +- SeveralErrors      more than one of these                 the least of theirs
 +- ServerError        the server did not become ready        exit 2
 |   +- StartError     for a reason of its own, not its host's
 +- RunError           the run cannot give valid numbers      exit 3
"""

import difflib
import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from harness.redact import masked

INTERRUPTED = "interrupted; everything that was started has been torn down"
SHOWN_PROBLEMS = 50  # of a scenario
MAX_CHARACTERS = 1000  # of one of them
_SHOWN_LINES = 5  # of one file
_MAX_LINES = 1000  # after so many nothing more is read


class ExitCode(enum.IntEnum):
    OK = 0
    USAGE = 1  # usage, scenario or input file
    SERVER = 2  # a server did not become ready
    INVALID = 3  # the run ended INVALID
    FAILED = 4  # a check or a comparison failed, or the doctor found a blocker
    INCONCLUSIVE = 5  # no check failed, and at least one is inconclusive
    INTERRUPTED = 130  # Ctrl-C, SIGTERM or SIGHUP


class HarnessError(Exception):
    """One clear sentence (what, where, which value) and what to do next."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, what: str, *, next_step: str = "", detail: str = "") -> None:
        # A server's words are in many of these: whatever shows or keeps the error has it without secrets.
        what, next_step, detail = masked([what, next_step, detail], "sure")
        super().__init__(what)
        self.what = what
        self.next_step = next_step
        self.detail = detail  # evidence worth showing below the sentence, such as the last lines of a log

    @property
    def advised(self) -> str:
        """The sentence and what to do next, in one line."""
        return f"{self.what}{'' if self.what.endswith('?') else '.'} {self.next_step}" if self.next_step else self.what


class Problem(NamedTuple):
    path: str  # such as $.loads.chat.users, or below another one: .users; "": the whole file
    text: str
    line: int | None = None
    keys: tuple[str, ...] = ()  # other keys next to this one on which it depends

    def __str__(self) -> str:
        line = "" if self.line is None else f" (line {self.line})"
        return f"{self.path}{line}: {self.text}" if self.path else self.text

    def below(self, path: str) -> "Problem":
        return self._replace(path=f"{path}{self.path}")

    def located(self, lines: Mapping[str, int]) -> "Problem":
        """With the line in which its path, or the nearest one around it, starts."""
        known = self.path
        while known not in lines and "." in known:
            known = known.rpartition(".")[0]
        return self._replace(line=lines.get(known))


class ScenarioError(HarnessError):
    """A scenario cannot be used; `problems` lists everything that is wrong with it."""

    def __init__(self, where: str, found: Iterable[Problem | str]) -> None:
        problems = list(map(str, found))
        count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        super().__init__(f"{where}: {count}", next_step="Correct the file and run `harness check` on it.")
        # Masked first: a value that is cut could hide from the mask.
        self.problems = problems = [shorten(problem) for problem in masked(problems, "sure")]
        more = len(problems) - SHOWN_PROBLEMS
        self.detail = "\n".join(problems[:SHOWN_PROBLEMS] + ([f"and {more:,} more"] if more > 0 else []))


def shorten(problem: str) -> str:
    """A problem with at most so much of a long value that the rest of the sentence is still read."""
    if len(problem) <= MAX_CHARACTERS:
        return problem
    return f"{problem[: MAX_CHARACTERS // 2]} … {problem[-MAX_CHARACTERS // 2 :]}"


class ServerError(HarnessError):
    exit_code = ExitCode.SERVER


class StartError(ServerError):
    """A server that its host could start ended, refused its model, or did not become ready: in a sweep a result.

    `known`: the `failure` (id), `cause` and `fix` of the failure table, where it knows the failure.
    """

    def __init__(
        self,
        what: str,
        *,
        next_step: str = "",
        detail: str = "",
        failure: str | None = None,
        cause: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what, next_step=next_step, detail=detail)
        found = {"failure": failure, "cause": cause, "fix": fix}
        self.known: dict[str, str] = masked({key: value for key, value in found.items() if value}, "sure")


class RunError(HarnessError):
    """The load ran but its numbers cannot be trusted."""

    exit_code = ExitCode.INVALID


class SeveralErrors(HarnessError):
    """Errors that do not follow from each other: each in a line, what belongs to it below.

    Advice that several share is given once, at the end; other advice in the line that it is for.
    """

    def __init__(self, errors: list[HarnessError]) -> None:
        ((shared, times),) = Counter(error.next_step for error in errors).most_common(1)
        shared = shared if times > 1 else ""
        lines = []
        for error in errors:
            lines.append(error.what if error.next_step == shared else error.advised)
            lines += [f"  {line}" for line in error.detail.splitlines()]
        super().__init__(f"{len(errors)} problems", detail="\n".join(lines), next_step=shared)
        self.errors = errors
        self.exit_code = min(error.exit_code for error in errors)  # usage before what follows from it


def sentence(error: Exception) -> str:
    """An error for a log or a page: in a line, what there are several of in one each."""
    if isinstance(error, SeveralErrors):
        return "\n".join(filter(None, [f"{error.what}:", error.detail, error.next_step]))
    if isinstance(error, HarnessError):
        text = "; ".join([error.what, *error.detail.splitlines()])
        return f"{text.removesuffix('.')}. {error.next_step}".strip()
    return str(error)


class Mistakes:
    """The errors of steps that do not need each other: each is noted, and all are raised together."""

    def __init__(self) -> None:
        self.found: list[HarnessError] = []

    def add(self, error: HarnessError) -> None:
        errors = error.errors if isinstance(error, SeveralErrors) else [error]
        self.found += [one for one in errors if one.what not in [known.what for known in self.found]]

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except HarnessError as error:
            self.add(error)

    def refuse(self) -> None:
        if self.found:
            raise self.found[0] if len(self.found) == 1 else SeveralErrors(self.found)


class BadLines:
    """Lines of a file that cannot be used: the first few are shown, and how many more there are."""

    def __init__(self, path: object, next_step: str) -> None:
        self._path = path
        self._next_step = next_step
        self._told: list[str] = []
        self._count = 0

    def add(self, line: int, problem: str) -> None:
        self._count += 1
        if self._count <= _SHOWN_LINES:
            self._told.append(f"{self._path}:{line}: {problem}")
        if self._count == _MAX_LINES:
            self.refuse()

    def refuse(self) -> None:
        if self._count == 1:
            raise HarnessError(self._told[0], next_step=self._next_step)
        if self._count:
            more = [f"and {self._count - _SHOWN_LINES:,} more"] if self._count > _SHOWN_LINES else []
            some = " or more" if self._count == _MAX_LINES else ""
            raise HarnessError(
                f"{self._path}: {self._count:,}{some} lines cannot be used",
                detail="\n".join(self._told + more),
                next_step=self._next_step,
            )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion in words: the closest known name, or the list of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return "known: " + ", ".join(names) if names else "none are known"


def suggest_row(name: str, known: Iterable[str]) -> str:
    """As `did_you_mean`, for loads and rows: a mix is several, LOAD.PART, and so is a load with stages, LOAD@USERS."""
    names = list(known)
    parts = [one for one in names if one.startswith((f"{name}.", f"{name}@"))]
    return f"it is several: {', '.join(parts)}" if parts else did_you_mean(name, names)
