"""tune.json: what `harness tune` asked, tried and proved, and the command that goes on with it.

Three records, each written by its part: the question by the start, the trials by the search, the proof by the proof.
The file has the keys of all three next to each other, as scripts read them, so that each record is decoded from the
whole file and takes its own keys.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from harness.base.command_line import command_line
from harness.base.files import decode_json, pretty_json, read_bytes, replace_file
from harness.base.process import owner_is_gone
from harness.base.reason import Reason
from harness.numbers.comparison import SameAnswers, Verdict
from harness.questions.tune.decide import Trial, TuneWord
from harness.records.changed_server import ChangedServer, read_changed

TUNE_FILE = "tune.json"
TUNE_VERSION = 1
Goal = Literal["throughput", "latency", "goodput", "users", "energy"]


class TuneQuestion(Struct, frozen=True, kw_only=True):
    """What was asked. Neither the search nor the proof changes it; the budget is asked again with `--resume`."""

    run: str = ""
    scenario: str = ""
    server: str = ""  # of the scenario
    goal: Goal = "throughput"
    slos: list[str] = []
    levels: dict[str, float] = {}  # of "users": by load its users, or requests a second
    budget_s: float  # of the search and the proof
    same_answers: bool = False  # whether only settings are recommended that answer the same
    names: dict[str, str] = {}  # by name in the engine's file: as the server's user writes it
    of_run: str = ""  # of `harness tune RUN`: the run whose finding advises settings
    finding: str = ""  # its code
    advised: dict[str, Any] = {}  # the only settings that are tried; {}: they are searched
    keep: bool = False  # whether a running server keeps settings that are proven to be better

    def spell(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as the server's user writes them."""
        return {self.names.get(name, name): value for name, value in settings.items()}


class TuneTrials(Struct, frozen=True, kw_only=True):
    """What the search tried. It writes this after each start. Settings have their names in the engine's file."""

    starts: list[Trial] = field(default_factory=list, name="trials")
    ended: Reason | None = None  # why the search ended
    spent_s: float = 0.0  # of the budget
    simulated: bool = False
    safe_memory: float | None = None  # share of the GPU's memory, by the sizes that a refused start logged


class TuneProof(Struct, frozen=True, kw_only=True):
    """The proof and its answer. Its start writes `run`, its end all. Settings are as the server's user writes them."""

    run: str | None = field(default=None, name="proof")
    verdict: TuneWord | None = None  # None: it is not known yet
    settings: dict[str, Any] = {}  # of "set" and "inconclusive"
    ratio: float | None = None  # to the reference; None: nothing was proven
    low: float | None = None
    high: float | None = None
    needed: int | None = None  # repeats that would settle it
    more_s: float | None = None  # of "inconclusive": about what they take beyond the budget
    start_count: int = field(default=0, name="starts")  # of the search and of the proof
    blocks: int = 0
    spent_s: float | None = None  # of the budget, with the search; None: no proof has ended
    reference: dict[str, Any] = {}  # settings of the reference, if the default did not start
    defaults: dict[str, Any] = {}  # by setting its value in the default, where it is known
    verdicts: list[Verdict] = []
    sides: list[dict[str, Any]] = []  # settings of each of them
    answers: list[SameAnswers | None] = []  # of each side, with `same_answers`; None: its answers are not known
    reasons: list[Reason] = []  # what limits the answer
    paste: dict[str, str] = {}  # by place: the text
    commands: dict[str, str] = {}  # by place: the command


class TuneReport(Struct, frozen=True, kw_only=True):
    """tune.json as it is read: the three records, and what is known of its run."""

    question: TuneQuestion
    trials: TuneTrials = TuneTrials()
    proof: TuneProof = TuneProof()
    folder: str = ""  # of the run, where it was read: for the commands that a page shows
    changed: ChangedServer | None = None  # the running server that a killed search has left with settings of a try

    @property
    def spent_s(self) -> float:
        return self.trials.spent_s if self.proof.spent_s is None else self.proof.spent_s

    @property
    def start_count(self) -> int:
        return self.proof.start_count or len(self.trials.starts)

    @property
    def verdict(self) -> TuneWord | None:
        return self.proof.verdict

    @property
    def levels(self) -> dict[str, float]:
        return self.question.levels


def read_tune(folder: Path) -> TuneReport | None:
    """Read tune.json; None if the run is no search of settings. Raises HarnessError for a damaged file, OSError."""
    path = folder / TUNE_FILE
    if not path.exists():
        return None
    changed = read_changed(folder)
    is_orphaned = changed is not None and owner_is_gone(changed.owner)
    raw = read_bytes(path)  # once: the search may replace it
    return TuneReport(
        question=decode_json(path, raw, TuneQuestion, TUNE_VERSION, contradiction=_impossible_question),
        trials=decode_json(path, raw, TuneTrials, TUNE_VERSION, contradiction=_impossible_trials),
        proof=decode_json(path, raw, TuneProof, TUNE_VERSION, contradiction=_impossible_proof),
        folder=str(folder),
        changed=changed if is_orphaned else None,
    )


def _impossible_question(question: TuneQuestion) -> tuple[str, str] | None:
    levels = {f"levels.{name}": value for name, value in question.levels.items()}
    return _impossible_number({"budget_s": question.budget_s} | levels, {})


def _impossible_trials(trials: TuneTrials) -> tuple[str, str] | None:
    positive: dict[str, float | None] = {"safe_memory": trials.safe_memory}
    counted: dict[str, float | None] = {"spent_s": trials.spent_s}
    for number, trial in enumerate(trials.starts):
        positive |= {f"trials[{number}].value": trial.value, f"trials[{number}].ratio": trial.ratio}
        counted |= {f"trials[{number}].took_s": trial.took_s, f"trials[{number}].met": trial.met}
    if trials.ended is not None and trials.ended.code == "tune_budget":
        needed_s = trials.ended.values.get("needed_s")
        if type(needed_s) not in (int, float):
            return "Expected a number", "$.ended.values.needed_s"
    return _impossible_number(positive, counted)


def _impossible_proof(proof: TuneProof) -> tuple[str, str] | None:
    counted = {"more_s": proof.more_s, "needed": proof.needed, "starts": proof.start_count, "blocks": proof.blocks}
    return _impossible_number({"ratio": proof.ratio, "low": proof.low, "high": proof.high}, counted)


def _impossible_number(
    positive: Mapping[str, float | None], counted: Mapping[str, float | None]
) -> tuple[str, str] | None:
    """Return what is wrong with a number, and its path in tune.json; None: all are possible."""
    for name, value in positive.items():
        if value is not None and not value > 0:
            return f"Expected a number above 0, got {value:g}", f"$.{name}"
    for name, value in counted.items():
        if value is not None and not value >= 0:
            return f"Expected a number of at least 0, got {value:g}", f"$.{name}"
    return None


def flat_keys(report: TuneReport) -> dict[str, Any]:
    """The three records as tune.json and `--json` have them."""
    keys: dict[str, Any] = {"format_version": TUNE_VERSION}
    for record in (report.question, report.trials, report.proof):
        keys |= msgspec.to_builtins(record)
    keys |= {"folder": report.folder, "changed": msgspec.to_builtins(report.changed)}
    return keys | {"spent_s": report.spent_s, "starts": report.start_count}  # of all parts so far


def write_tune(folder: Path, question: TuneQuestion, trials: TuneTrials, proof: TuneProof | None = None) -> None:
    report = TuneReport(question=question, trials=trials, proof=proof or TuneProof(), folder=str(folder))
    replace_file(folder / TUNE_FILE, pretty_json(flat_keys(report)))


def resume_command(folder: Path) -> str:
    return command_line("harness", "tune", "--resume", folder)


def search_command(folder: Path) -> str | None:
    """The command that goes on with a search of settings; None for another run."""
    return resume_command(folder) if (folder / TUNE_FILE).exists() else None
