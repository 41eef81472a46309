"""What a user is told when something cannot be done, and the exit code that goes with it.

HarnessError
 +- ScenarioError      the scenario cannot be used            exit 1
 +- ServerError        the server did not become ready        exit 2
 +- RunError           the run cannot give valid numbers      exit 3
"""

import difflib
import enum
from collections.abc import Iterable, Sequence


class ExitCode(enum.IntEnum):
    """The exit codes of every command."""

    OK = 0
    USAGE = 1  # usage, scenario or input file
    SERVER = 2  # a server did not become ready
    INVALID = 3  # the run ended INVALID
    FAILED = 4  # a check or a comparison failed, or the doctor found a blocker
    INTERRUPTED = 130  # Ctrl-C or SIGTERM


class HarnessError(Exception):
    """One clear sentence (what, where, which value) and what to do next."""

    exit_code = ExitCode.USAGE

    def __init__(self, what: str, *, next_step: str = "", detail: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step
        self.detail = detail  # evidence worth showing below the sentence, such as the last lines of a log


class ScenarioError(HarnessError):
    """A scenario cannot be used; `problems` lists everything that is wrong with it."""

    def __init__(self, where: str, problems: list[str]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{where}: {count}", next_step="Correct the file and run `harness check` on it.")
        self.problems = problems
        self.detail = "\n".join(problems)


def together(where: str, problems: Sequence[HarnessError]) -> HarnessError:
    """All of them as one, which is the one itself where there is no other."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{problem.what}. {problem.next_step}".strip() for problem in problems]
    return HarnessError(f"{where}: {len(lines)} problems", detail="\n".join(lines))


class ServerError(HarnessError):
    """A server could not be started or did not become ready."""

    exit_code = ExitCode.SERVER


class RunError(HarnessError):
    """The load ran but its numbers cannot be trusted."""

    exit_code = ExitCode.INVALID


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion in words: the closest known name, or the list of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return "known: " + ", ".join(names) if names else "none are known"


def which_row(name: str, known: Iterable[str]) -> str:
    """As `did_you_mean`, for loads and rows: a mix is several, LOAD.PART, and so is a load with stages, LOAD@USERS."""
    names = list(known)
    parts = [one for one in names if one.startswith((f"{name}.", f"{name}@"))]
    return f"it is several: {', '.join(parts)}" if parts else did_you_mean(name, names)
