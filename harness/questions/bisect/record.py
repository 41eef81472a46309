"""bisect.json: what `harness bisect` asked, each start, and the command that goes on with it.

The results of the starts are not in it: they are read from the records of the run.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from harness.base.command_line import command_line, option_words
from harness.base.files import decode_json, pretty_json, read_bytes, replace_file
from harness.base.reason import Reason
from harness.questions.bisect.entry_list import entry_text

BISECT_FILE = "bisect.json"
BISECT_VERSION = 1
PULL = "pull"  # the step of a start that failed: the image is not there
DEFAULT_RUNS = Path("runs")  # where a command puts its run without --runs


class BisectQuestion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked. Nothing changes it but the budget, which is asked again with `--resume`."""

    run: str = ""
    scenario: str  # as it was given
    server: str  # of the scenario
    load: str | None = None  # None: all of them
    variable: str  # that has the entry
    values: list[Any]  # the entries, the good one first, the bad one last
    images: str | None = None  # the file that they were read from, as it was given; None: values, or from a pipe
    build: str | None = None  # the command that makes an entry
    folder: str | None = None  # where the search was started: its relative paths and its builds are of this folder
    metric: str  # by which starts are compared
    is_metric_given: bool = False
    model: str | None = None  # as it was given
    budget_s: float

    def command(self, low: int, high: int, runs: Path = DEFAULT_RUNS) -> str:
        """The command that bisects the entries from one place of the list to another one. `runs`: for its run."""
        part = list(map(entry_text, self.values[low : high + 1]))
        if self.images is None:
            return self._command({"--values": f"{self.variable}={','.join(part)}"}, runs)
        return self._command({"--images": self.images, "--good": part[0], "--bad": part[-1]}, runs)

    def pair_command(self, low: int, high: int, runs: Path = DEFAULT_RUNS) -> str:
        """The command that compares two entries of the list, without those between them. `runs`: for its run."""
        if high - low == 1:
            return self.command(low, high, runs)
        pair = ",".join(entry_text(self.values[entry]) for entry in (low, high))
        return self._command({"--values": f"{self.variable}={pair}"}, runs)

    def _command(self, given: dict[str, object], runs: Path) -> str:
        """The command with this list. Elsewhere than where the search was started, it goes there first."""
        is_here = self.folder is None or self.folder == os.getcwd()
        if not is_here:
            runs = runs.absolute()
        given |= {"--build": self.build, "--server": self.server, "--load": self.load, "--model": self.model}
        given |= {"--for": self.metric if self.is_metric_given else None}
        given |= {"--runs": None if runs == DEFAULT_RUNS else runs}
        command = command_line("harness", "bisect", self.scenario, *option_words(given))
        return command if is_here else f"{command_line('cd', '--', self.folder)} && {command}"


class BisectTrial(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One start of an entry, or its build that failed."""

    entry: int  # place among the entries
    cells: list[str] = []
    failed: Reason | None = None  # why the entry did not build, start or answer
    has_server: bool = True  # whether a server was started: not where the build or the pull of its image failed
    took_s: float = 0.0
    build_s: float | None = None  # of it, for the build


class BisectRecord(Struct, frozen=True, kw_only=True):
    """bisect.json."""

    format_version: int = BISECT_VERSION
    question: BisectQuestion
    starts: list[BisectTrial] = []
    ended: Reason | None = None  # why the search ended; None: it did not yet
    spent_s: float = 0.0  # of the budget


def read_bisect(folder: Path) -> BisectRecord | None:
    """Read bisect.json; None if the run is no bisection. Raises HarnessError for a damaged file, OSError."""
    path = folder / BISECT_FILE
    if not path.exists():
        return None
    return decode_json(path, read_bytes(path), BisectRecord, BISECT_VERSION, contradiction=_contradiction)


def _contradiction(record: BisectRecord) -> tuple[str, str] | None:
    """What is impossible in a record, and its path."""
    question = record.question
    if len(question.values) < 2 or not all(isinstance(value, str | int | float | bool) for value in question.values):
        return "Expected at least two entries", "$.question.values"
    if not question.budget_s > 0:
        return f"Expected a number above 0, got {question.budget_s:g}", "$.question.budget_s"
    if not record.spent_s >= 0:
        return f"Expected a number of at least 0, got {record.spent_s:g}", "$.spent_s"
    for number, start in enumerate(record.starts):
        if not 0 <= start.entry < len(question.values):
            return f"Expected an entry of the list, got {start.entry}", f"$.starts[{number}].entry"
        if not start.took_s >= 0:
            return f"Expected a number of at least 0, got {start.took_s:g}", f"$.starts[{number}].took_s"
    return None


def write_bisect(folder: Path, record: BisectRecord) -> None:
    replace_file(folder / BISECT_FILE, pretty_json(msgspec.to_builtins(record)))


def resume_command(folder: Path, budget_min: int | None = None) -> str:
    more = {} if budget_min is None else {"--budget": f"{budget_min}min"}
    return command_line("harness", "bisect", "--resume", folder, *option_words(more))


def bisect_command(folder: Path) -> str | None:
    """The command that goes on with a bisection; None for another run."""
    return resume_command(folder) if (folder / BISECT_FILE).exists() else None
