"""tune.json: the record of a search of settings, written as it goes, and the command that goes on with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.files import pretty_json, read_json, replace_file
from harness.base.process import owner_is_gone
from harness.base.reason import Reason
from harness.numbers.comparison import SameAnswers, Verdict
from harness.questions.tune.decide import Trial
from harness.records.changed_server import ChangedServer, read_changed

TUNE_FILE = "tune.json"
TUNE_VERSION = 1
Goal = Literal["throughput", "latency", "goodput", "users", "energy"]


class TuneReport(Struct, frozen=True, kw_only=True):
    """tune.json. Settings are as the server's user writes them, but for those of starts."""

    format_version: int = TUNE_VERSION
    run: str = ""
    folder: str = ""  # of the run, where it was read: for the commands that a page shows
    proof: str | None = None  # the run of the proof
    scenario: str = ""
    server: str = ""  # of the scenario
    goal: Goal = "throughput"
    slos: list[str] = []
    levels: dict[str, float] = {}  # of "users": by load its users, or requests a second
    budget_s: float
    spent_s: float = 0.0
    simulated: bool = False
    safe_memory: float | None = None  # share of the GPU's memory, by the sizes that a refused start logged
    names: dict[str, str] = {}  # by name in the engine's file: as the server's user writes it
    trials: list[Trial] = []
    ended: Reason | None = None  # why the search ended
    verdict: Literal["set", "keep", "inconclusive"] | None = None  # None: it is not known yet
    settings: dict[str, Any] = {}  # of "set" and "inconclusive"
    ratio: float | None = None  # to the reference; None: nothing was proven
    low: float | None = None
    high: float | None = None
    needed: int | None = None  # repeats that would settle it
    more_s: float | None = None  # of "inconclusive": about what they take beyond the budget
    starts: int = 0  # of the search and of the proof
    blocks: int = 0  # of the proof
    reference: dict[str, Any] = {}  # settings of the reference, if the default did not start
    defaults: dict[str, Any] = {}  # by setting its value in the default, where it is known
    verdicts: list[Verdict] = []  # of the proof
    sides: list[dict[str, Any]] = []  # settings of each of them
    same_answers: bool = False  # whether only settings are recommended that answer the same
    answers: list[SameAnswers | None] = []  # of each side, with `same_answers`; None: its answers are not known
    reasons: list[Reason] = []  # what limits the answer
    paste: dict[str, str] = {}  # by place: the text
    changed: ChangedServer | None = None  # the running server that a killed search has left with settings of a try

    def spell(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as the server's user writes them."""
        return {self.names.get(name, name): value for name, value in settings.items()}


def read_tune(folder: Path) -> TuneReport | None:
    """Read tune.json; None if the run is no search of settings. Raises HarnessError for a damaged file, OSError."""
    path = folder / TUNE_FILE
    if not path.exists():
        return None
    changed = read_changed(folder)
    is_left = changed is not None and owner_is_gone(changed.owner)
    report = read_json(path, TuneReport, TUNE_VERSION, contradiction=_find_contradiction)
    return replace(report, folder=str(folder), changed=changed if is_left else None)


def _find_contradiction(report: TuneReport) -> tuple[str, str] | None:
    """Return an impossible number of a report and its path in tune.json."""
    positive: dict[str, float | None] = {"budget_s": report.budget_s, "safe_memory": report.safe_memory}
    positive |= {"ratio": report.ratio, "low": report.low, "high": report.high}
    positive |= {f"levels.{name}": value for name, value in report.levels.items()}
    counted: dict[str, float | None] = {"spent_s": report.spent_s, "more_s": report.more_s, "needed": report.needed}
    counted |= {"starts": report.starts, "blocks": report.blocks}
    for number, trial in enumerate(report.trials):
        positive |= {f"trials[{number}].value": trial.value, f"trials[{number}].ratio": trial.ratio}
        counted |= {f"trials[{number}].took_s": trial.took_s, f"trials[{number}].met": trial.met}
    for name, value in positive.items():
        if value is not None and not value > 0:
            return f"Expected a number above 0, got {value:g}", f"$.{name}"
    for name, value in counted.items():
        if value is not None and not value >= 0:
            return f"Expected a number of at least 0, got {value:g}", f"$.{name}"
    if report.ended is not None and report.ended.code == "tune_budget":
        needed_s = report.ended.values.get("needed_s")
        if type(needed_s) not in (int, float):
            return "Expected a number", "$.ended.values.needed_s"
    return None


def write_tune(folder: Path, report: TuneReport) -> None:
    replace_file(folder / TUNE_FILE, pretty_json(replace(report, folder=str(folder), changed=None)))


def resume_command(folder: Path) -> str:
    return command_line("harness", "tune", "--resume", folder)


def search_command(folder: Path) -> str | None:
    """The command that goes on with a search of settings; None for another run."""
    return resume_command(folder) if (folder / TUNE_FILE).exists() else None
