"""A run with a budget of time: it ends in time, and adds repeats of the rows that have an open verdict."""

import contextlib
import time
from collections.abc import Iterator
from itertools import groupby

import msgspec

from harness.analysis.summarize import summarize
from harness.errors import RunError
from harness.run.orchestrator import Steps, run_cells
from harness.run.running import OUT_OF_TIME, OutOfTime, Running
from harness.rundir.directory import set_aside
from harness.rundir.manifest import Budget, CellRun
from harness.scenario.plan import Cell, plan
from harness.summary import MAX_REPEATS, OPEN, Summary
from harness.units import count, duration

Row = tuple[str, str]  # server and load
TEARDOWN_S = 10.0  # for taking the last server down, and for the report


def budget_steps(seconds: float, known: Budget | None = None) -> Steps:
    """Return the steps of a run that takes so many seconds at most. `known`: the budget of a run that is resumed."""
    ends_s = time.monotonic() + seconds - TEARDOWN_S
    return lambda running, cells: _BudgetRun(running, seconds, ends_s, known).steps(cells)


class _BudgetRun:
    """Runs the planned cells first, then more repeats of the rows that have an open verdict.

    Whole repeats are added, in the order of the plan, so that rows stay interleaved. After the planned repeats, twice
    as many, four times as many ... the verdicts are checked; rows of which none is open get no more. The levels of the
    tests allow for these looks, see `harness.judge.verdicts.level_parts`.
    """

    def __init__(self, running: Running, seconds: float, ends_s: float, known: Budget | None) -> None:
        self.running = msgspec.structs.replace(running, ends_s=ends_s)
        self.note = running.file.note
        self.ends_s = ends_s
        repeats = running.scenario.repeats if known is None else known.repeats
        self.budget = Budget(seconds=seconds, repeats=repeats, looks=[] if known is None else known.looks)
        self.done = {cell.id: cell for cell in running.file.manifest.cells}
        self.took: dict[str, float] = {}  # by "server/load": seconds of the last cell, with the start of its server
        self.over = False

    def steps(self, cells: list[Cell]) -> Iterator[CellRun]:
        self.note(budget=self.budget)
        for chunk in _group_cells(cells):
            yield from self._run(chunk)
        everything: list[Cell | CellRun] = [*self.done.values(), *cells]
        last = max((cell.repeat for cell in everything), default=MAX_REPEATS)
        going = {(cell.server, cell.load) for cell in everything if cell.repeat == last}
        scenario = self.running.scenario
        while not self.over and last < MAX_REPEATS:
            more = msgspec.structs.replace(scenario, repeats=max(last + 1, scenario.repeats))
            repeat = [cell for cell in plan(more) if cell.repeat == last + 1]
            if not self._fits(_select_rows(repeat, going)):
                break  # without a look: so the analysis at the end has the whole level
            if is_check_due(last, self.budget.repeats) and last not in self.budget.looks:
                self.budget = msgspec.structs.replace(self.budget, looks=[*self.budget.looks, last])
                self.note(budget=self.budget)
                going = open_rows(summarize(self.running.folder))
                self._say(f"after {count(last, 'repeat')}, {count(len(going), 'row')} have an open verdict")
            if not going:
                break
            last, scenario = last + 1, more
            chunk = _select_rows(repeat, going)
            self.note(scenario=scenario, planned=[cell.id for cell in chunk])
            yield from self._run(chunk)
        if not self.done:
            raise RunError(
                f"--budget: {duration(self.budget.seconds)} were spent before the first cell had ended",
                next_step="Give more time: `harness check SCENARIO` estimates it.",
            )
        self._end(cells)

    def _run(self, chunk: list[Cell]) -> Iterator[CellRun]:
        """Run cells, unless the time is too short for them; cells that are cut are left out."""
        if self.over or not self._fits(chunk):
            self.over = True
            return
        about_s = self._about_s(chunk)
        about = f", about {duration(about_s)}" if about_s else ""
        self._say(f"repeat {chunk[0].repeat} of {count(len({cell.group for cell in chunk}), 'row')}{about}")
        begun_s = time.monotonic()
        try:
            with contextlib.closing(run_cells(self.running, chunk)) as results:
                for cell_run in results:
                    if any(reason.code == OUT_OF_TIME for reason in cell_run.problems):
                        self.over = True
                        return
                    now = time.monotonic()
                    self.took[_row_name(cell_run)], begun_s = now - begun_s, now
                    self.done[cell_run.id] = cell_run
                    yield cell_run
        except OutOfTime:
            self.over = True

    def _about_s(self, chunk: list[Cell]) -> float:
        """How long the cells will take at least: as the last time, else the time that their load asks for."""
        loads = self.running.scenario.loads
        by_group = {cell.group: cell for cell in chunk if cell.mix is not None}  # its parts run at once
        alone = [cell for cell in chunk if cell.mix is None]
        return sum(
            self.took.get(_row_name(cell), loads[cell.load].duration_s or 0.0) for cell in [*alone, *by_group.values()]
        )

    def _fits(self, chunk: list[Cell]) -> bool:
        return time.monotonic() + self._about_s(chunk) < self.ends_s

    def _say(self, text: str) -> None:
        left_s = max(0.0, self.ends_s - time.monotonic())
        self.running.progress.line(f"Budget: {duration(left_s)} of {duration(self.budget.seconds)} left; {text}")

    def _end(self, cells: list[Cell]) -> None:
        """Leave out what was not measured; the records of cells that were cut are moved aside."""
        measured = {(cell.server, cell.load) for cell in self.done.values()}
        rows = dict.fromkeys((cell.server, cell.load) for cell in cells)
        unmeasured = [" / ".join(row) for row in rows if row not in measured]
        self.note(budget=msgspec.structs.replace(self.budget, unmeasured=unmeasured), only=self.done)
        scenario = msgspec.structs.replace(self.running.scenario, repeats=MAX_REPEATS)
        set_aside(self.running.folder, self.done, [cell.id for cell in plan(scenario)])
        self._say("the run ends")


def is_check_due(last: int, planned: int) -> bool:
    """Whether verdicts are checked after so many repeats: the planned ones, twice, four times ... as many."""
    times, rest = divmod(last, planned)
    return rest == 0 and times.bit_count() == 1


def open_rows(summary: Summary) -> set[Row]:
    """The rows with a verdict that more repeats may decide: those of which the spread is not hopeless."""
    keys = {row.name: row.key for row in summary.rows}
    verdicts = [] if summary.comparison is None else summary.comparison.verdicts
    undecided = [one for one in verdicts if one.reason in OPEN and (one.needed or one.needed_for_same)]
    return {keys[name] for one in undecided for name in (one.side, one.baseline) if name in keys}


def _group_cells(cells: list[Cell]) -> list[list[Cell]]:
    """What is run or not as a whole: in the first repeat what has one load generator, later a whole repeat."""
    return [
        list(chunk) for _, chunk in groupby(cells, key=lambda cell: cell.group if cell.repeat == 1 else cell.repeat)
    ]


def _select_rows(cells: list[Cell], rows: set[Row]) -> list[Cell]:
    """The cells of these rows, and those that run together with them."""
    groups = {cell.group for cell in cells if (cell.server, cell.load) in rows}
    return [cell for cell in cells if cell.group in groups]


def _row_name(cell: Cell | CellRun) -> str:
    return f"{cell.server}/{cell.load}"
