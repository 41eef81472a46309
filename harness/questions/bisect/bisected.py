"""The answer of `harness bisect` by the records of its run: nothing of it is stored, and nothing runs here."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from harness.base.measured import NEEDED
from harness.base.metrics import METRICS
from harness.base.reason import Reason, because
from harness.numbers.comparable import server_differences
from harness.numbers.comparison import MARGIN, Difference
from harness.numbers.start_levels import StartLevels
from harness.numbers.stats import Effect, Estimate
from harness.numbers.summary import CellSummary, Summary
from harness.numbers.time_change import Part, TimeChange, main_part, time_changes
from harness.numbers.verdicts import from_speeds, to_speeds
from harness.questions.bisect.decide import (
    BisectStart,
    BisectStep,
    End,
    is_change,
    levels_of,
    next_step,
    skipped_entries,
)
from harness.questions.bisect.entry_list import entry_text, server_names, short_names
from harness.questions.bisect.record import BisectQuestion, BisectRecord, read_bisect
from harness.records.manifest import Run

NO_RECORDS = because("no_bisect_records", "its records are not in the run directory")


class DroppedStart(Struct, frozen=True, kw_only=True):
    """A start that does not count."""

    number: int  # among all starts, from 1
    entry: int
    reason: Reason


class EntryLevel(Struct, frozen=True, kw_only=True):
    """What is known of an entry."""

    entry: int
    name: str  # as it was given
    short: str  # without what all entries have in common
    server: str  # in run.json
    starts: int = 0
    # The metric in its unit, with its interval; None: not measured, or of several loads, whose mean has no unit.
    value: Estimate | None = None
    ratio: float | None = None  # of its speed to the good entry's; None: not measured
    low: float | None = None
    high: float | None = None
    side: str = ""  # "good", "bad": by the proven range; "skipped"; "": not known
    failed: Reason | None = None  # why it is skipped
    start_s: float | None = None  # until the server answered, the median of its starts
    findings: list[str] = []  # codes, the worst first


class Change(Struct, frozen=True, kw_only=True):
    """How two entries differ: the speed of the later one over that of the earlier one, with its 95 % interval."""

    low_entry: int
    high_entry: int
    ratio: float
    low: float
    high: float


class BisectReport(Struct, frozen=True, kw_only=True):
    """The answer: what the starts prove."""

    question: BisectQuestion
    word: str | None  # of the verdict on the ends: "slower", "faster", "same", "inconclusive"; None: too few starts
    ended: End | None  # None: the search did not come to its end
    stopped: Reason | None  # why it ended, by bisect.json
    ends: Change | None  # the good and the bad entry by the verdict; None: not known
    change: Change | None  # the narrowest range whose change is proven; None: none is
    part: float | None = None  # of the whole change that it explains, by logarithms
    rest: list[Change] = []  # further ranges with a proven change
    cause: Part | None = None  # of the change: which part of a request's time
    times: list[TimeChange] = []
    differences: list[Difference] = []  # of the servers at both sides of the range
    levels: list[EntryLevel] = []
    loads: int = 1  # of a start; the speed of a start is their geometric mean
    starts: int = 0
    dropped: list[DroppedStart] = []  # of them: those that do not count
    spent_s: float = 0.0
    simulated: bool = False
    late: float | None = None  # how far the load generator may have changed a result, as a share; None: not
    folder: str = ""

    @property
    def skipped(self) -> list[EntryLevel]:
        """The skipped entries inside the range."""
        if self.change is None:
            return []
        inside = self.levels[self.change.low_entry + 1 : self.change.high_entry]
        return [level for level in inside if level.side == "skipped"]

    @property
    def is_answered(self) -> bool:
        return self.ended in ("pair", "same")


def starts_of(record: BisectRecord, cells: Sequence[CellSummary]) -> list[BisectStart]:
    """Return the starts with their results, by the cells of the run."""
    by_id = {cell.id: cell for cell in cells}
    starts = []
    for trial in record.starts:
        own = [by_id[name] for name in trial.cells if name in by_id]
        result: float | Reason = trial.failed or NO_RECORDS
        if trial.failed is None and own and len(own) == len(trial.cells):
            result = start_speed(own, record.question.metric)
        value, reason = (None, result) if isinstance(result, Reason) else (result, None)
        starts.append(BisectStart(entry=trial.entry, value=value, failed=trial.failed is not None, reason=reason))
    return starts


def dropped_starts(starts: Sequence[BisectStart]) -> list[DroppedStart]:
    """Return the starts that do not count, though their entries did not fail: something disturbed them."""
    skipped = skipped_entries(starts)
    return [
        DroppedStart(number=number, entry=start.entry, reason=start.reason)
        for number, start in enumerate(starts, 1)
        if start.reason is not None and not (start.failed and start.entry in skipped)
    ]


def start_speed(cells: Sequence[CellSummary], metric: str) -> float | Reason:
    """Return the speed of one start, the geometric mean of its loads; a reason: it has none."""
    speeds = []
    for cell in cells:
        if why := next(iter([*([cell.failed] if cell.failed else []), *cell.problems]), None):
            return why
        value = METRICS[metric].of(cell.numbers)
        if not value:
            needed = NEEDED.get(METRICS[metric].statistic, 1)
            text = f"{cell.load}: the start has no {METRICS[metric].title}, which needs {needed} successful requests"
            return because("no_bisect_value", text, metric=metric, needed=needed)
        speeds += to_speeds(metric, [value])
    return math.exp(statistics.fmean(map(math.log, speeds)))


def metric_text(metric: str) -> str:
    return METRICS[metric].title


def read_bisected(folder: Path, summary: Summary, run: Run) -> BisectReport | None:
    """Return the answer of the bisection in a folder; None for another run. Raises HarnessError for a damaged file."""
    record = read_bisect(folder)
    return None if record is None else bisected(record, summary, run, str(folder))


def bisected(record: BisectRecord, summary: Summary, run: Run, folder: str = "") -> BisectReport:
    """Return what the starts of a record prove, by the summary of its run."""
    question, starts = record.question, starts_of(record, summary.cells)
    step = next_step(len(question.values), starts, question.metric)
    levels = levels_of(starts)
    verdict, last = step.verdict, len(question.values) - 1
    ends = None
    if verdict is not None and verdict.ratio and verdict.low and verdict.high:
        ends = Change(low_entry=0, high_entry=last, ratio=verdict.ratio, low=verdict.low, high=verdict.high)
    change = _change(levels, step.low, step.high, ends) if step.is_proven else None
    report = BisectReport(
        question=question,
        word=None if verdict is None else verdict.word,
        ended=step.ended,
        stopped=record.ended,
        ends=ends,
        change=change,
        levels=_entry_levels(record, summary, starts, step, levels, ends),
        loads=len({cell.load for cell in summary.cells}),
        starts=sum(trial.has_server for trial in record.starts),
        dropped=dropped_starts(starts),
        spent_s=record.spent_s,
        simulated=summary.simulated,
        late=_late(summary.cells, question.metric),
        folder=folder,
    )
    if change is None or levels is None:
        return report
    return _with_causes(report, summary, run, levels, _cells_of(record))


def _cells_of(record: BisectRecord) -> dict[int, list[str]]:
    cells: dict[int, list[str]] = {}
    for trial in record.starts:
        if trial.failed is None:
            cells.setdefault(trial.entry, []).extend(trial.cells)
    return cells


def _with_causes(
    report: BisectReport, summary: Summary, run: Run, levels: StartLevels, cells: Mapping[int, Sequence[str]]
) -> BisectReport:
    """Add why the range changes the speed, how much of the whole change it is, and where the rest is."""
    change, size = report.change, len(report.question.values)
    assert change is not None
    low, high = change.low_entry, change.high_entry
    whole = levels.difference(size - 1, 0)
    part = None
    if whole is not None and whole.log_ratio:
        part = math.log(change.ratio) / whole.log_ratio
    outside = [pair for pair in ((0, low), (high, size - 1)) if pair[0] != pair[1]]
    rest = [
        other
        for first, second in outside
        if is_change(levels.difference(second, first), size) and (other := _change(levels, first, second)) is not None
    ]
    by_id = {cell.id: cell for cell in summary.cells if not cell.problems and cell.failed is None}
    sides = [[by_id[name] for name in cells.get(entry, ()) if name in by_id] for entry in (high, low)]
    times = time_changes(*sides)
    names = [report.levels[entry].server for entry in (low, high)]
    is_slower = change.ratio < 1
    main = main_part(times) if times and (sum(time.seconds for time in times) > 0) == is_slower else None
    return replace(report, part=part, rest=rest, times=times, cause=main, differences=server_differences(run, names))


def _change(levels: StartLevels | None, low: int, high: int, ends: Change | None = None) -> Change | None:
    """How two entries differ by all starts; the ends of the list by their verdict."""
    if ends is not None and (low, high) == (ends.low_entry, ends.high_entry):
        return ends
    effect: Effect | None = None if levels is None else levels.difference(high, low)
    if effect is None:
        return None
    bounds = effect.interval()
    return Change(low_entry=low, high_entry=high, ratio=effect.ratio, low=bounds[0], high=bounds[1])


def _entry_levels(
    record: BisectRecord,
    summary: Summary,
    starts: Sequence[BisectStart],
    step: BisectStep,
    levels: StartLevels | None,
    ends: Change | None,
) -> list[EntryLevel]:
    """What is known of each entry, in the order of the list."""
    values, shorts = record.question.values, short_names(record.question.values)
    skipped = skipped_entries(starts)
    one_load = len({cell.load for cell in summary.cells}) == 1
    entries = []
    for entry, (value, server) in enumerate(zip(values, server_names(values), strict=True)):
        facts: dict[str, Any] = {"starts": sum(own.entry == entry and own.has_server for own in record.starts)}
        if levels is not None and entry in levels.entries:
            if one_load:
                facts["value"] = _in_unit(levels.level(entry), record.question.metric)
            change = _change(levels, 0, entry, ends) if 0 in levels.entries else None
            if change is not None:
                facts |= {"ratio": change.ratio, "low": change.low, "high": change.high}
        if entry in skipped:
            facts |= {"side": "skipped", "failed": _why_skipped(starts, entry)}
        elif step.is_proven and (entry <= step.low or entry >= step.high):
            facts["side"] = "good" if entry <= step.low else "bad"
        starts_s = [cell.ready_s for cell in summary.cells if cell.server == server and cell.ready_s is not None]
        facts["start_s"] = statistics.median(starts_s) if starts_s else None
        facts["findings"] = _findings_of(summary, server)
        entries.append(EntryLevel(entry=entry, name=entry_text(value), short=shorts[entry], server=server, **facts))
    return entries


def _in_unit(level: Estimate, metric: str) -> Estimate:
    """A level as the metric: a time has its bounds the other way round."""
    bounds = [None if bound is None else from_speeds(metric, [bound])[0] for bound in (level.low, level.high)]
    if not METRICS[metric].more_is_better:
        bounds.reverse()
    return Estimate(from_speeds(metric, [level.value])[0], *bounds)


def _why_skipped(starts: Sequence[BisectStart], entry: int) -> Reason | None:
    """Why an entry has no result: its failure, else the problem of its last start."""
    own = [start for start in starts if start.entry == entry]
    failed = next((start.reason for start in own if start.failed), None)
    return failed or next((start.reason for start in reversed(own) if start.reason is not None), None)


def _findings_of(summary: Summary, server: str) -> list[str]:
    """The codes of the findings about the rows of a server."""
    rows = {row.name for row in summary.rows if row.server == server}
    return [finding.code for finding in summary.findings or () if rows & set(finding.rows)]


def _late(cells: Sequence[CellSummary], metric: str) -> float | None:
    """By which share the load generator may have changed a result at most; None: by less than the margin."""
    worst = max((max(cell.client_error.get(metric, (0.0, 0.0))) for cell in cells), default=0.0)
    return worst if worst > MARGIN else None
