"""A run with a time budget: it ends in time, and adds repeats of the rows that have an open verdict."""

import contextlib
import time
from collections.abc import Iterator

from msgspec.structs import replace

from harness.analysis.summarize import summarize
from harness.errors import RunError
from harness.run.orchestrator import Steps, run_cells
from harness.run.running import OUT_OF_TIME, OutOfTime, Running
from harness.rundir.directory import set_aside
from harness.rundir.manifest import Budget, CellRun
from harness.scenario.plan import Cell, grouped, plan
from harness.summary import MAX_REPEATS, OPEN, Summary
from harness.units import count, duration

Row = tuple[str, str]  # server and load
TEARDOWN_S = 10.0  # for tearing down the last server, and for the report


def budget_steps(seconds: float, earlier: Budget | None = None) -> Steps:
    """Return the steps of a run that takes at most this time. `earlier`: the budget of a run that is resumed."""
    ends_s = time.monotonic() + seconds - TEARDOWN_S
    return lambda running, cells: _BudgetRun(running, seconds, ends_s, earlier).steps(cells)


class _BudgetRun:
    """Runs the planned cells first, then more repeats of the rows that have an open verdict.

    Whole repeats are added, in the order of the plan, so that rows stay interleaved. The verdicts are checked after
    the planned repeats, twice as many, four times as many, and so on; rows without an open verdict get no more. The
    levels of the tests allow for these checks, see `harness.judge.verdicts.level_parts`.
    """

    def __init__(self, running: Running, seconds: float, ends_s: float, earlier: Budget | None) -> None:
        self.running = replace(running, ends_s=ends_s)
        self.update = running.file.update
        self.ends_s = ends_s
        budget = earlier or Budget(seconds=seconds, repeats=running.scenario.repeats)
        self.budget = replace(budget, seconds=seconds, unmeasured=[])
        self.done = {cell.id: cell for cell in running.file.manifest.cells}
        self.took_s: dict[str, float] = {}  # of the last cell of each row, with the start of its server
        self.is_over = False

    def steps(self, cells: list[Cell]) -> Iterator[CellRun]:
        self.update(budget=self.budget)
        # In the first repeat one load generator after the other, later a whole repeat: all of it runs, or nothing.
        for chunk in grouped(cells, lambda cell: cell.group if cell.repeat == 1 else cell.repeat):
            yield from self._run(chunk)
        all_cells: list[Cell | CellRun] = [*self.done.values(), *cells]
        last = max((cell.repeat for cell in all_cells), default=MAX_REPEATS)
        rows = {(cell.server, cell.load) for cell in all_cells if cell.repeat == last}
        scenario = self.running.scenario
        while not self.is_over and last < MAX_REPEATS:
            scenario = replace(scenario, repeats=max(last + 1, scenario.repeats))
            repeat = [cell for cell in plan(scenario) if cell.repeat == last + 1]
            if not self._fits(_select_rows(repeat, rows)):
                break  # without a check, so that the final analysis has the whole level
            if is_check_due(last, self.budget.repeats) and last not in self.budget.looks:
                self.budget = replace(self.budget, looks=[*self.budget.looks, last])
                self.update(budget=self.budget)
                rows = open_rows(summarize(self.running.folder))
                self._print(f"after {count(last, 'repeat')}, {count(len(rows), 'row')} have an open verdict")
            if not rows:
                break
            last += 1
            chunk = _select_rows(repeat, rows)
            self.update(scenario=scenario, planned=[cell.id for cell in chunk])
            yield from self._run(chunk)
        if not self.done:
            raise RunError(
                f"--budget: {duration(self.budget.seconds)} were spent before the first cell had ended",
                next_step="Give more time: `harness check SCENARIO` estimates it.",
            )
        self._drop_unmeasured(cells)

    def _run(self, chunk: list[Cell]) -> Iterator[CellRun]:
        """Run cells if there is time for all of them. A cell that the budget cuts has no result."""
        if self.is_over or not self._fits(chunk):
            self.is_over = True
            return
        estimate_s = self._estimate_s(chunk)
        estimate = f", about {duration(estimate_s)}" if estimate_s else ""
        self._print(f"repeat {chunk[0].repeat} of {count(len({cell.group for cell in chunk}), 'row')}{estimate}")
        begun_s = time.monotonic()
        try:
            with contextlib.closing(run_cells(self.running, chunk)) as cell_runs:
                for cell_run in cell_runs:
                    if any(reason.code == OUT_OF_TIME for reason in cell_run.problems):
                        self.is_over = True
                        return
                    now_s = time.monotonic()
                    self.took_s[_row_name(cell_run)], begun_s = now_s - begun_s, now_s
                    self.done[cell_run.id] = cell_run
                    yield cell_run
        except OutOfTime:
            self.is_over = True

    def _estimate_s(self, chunk: list[Cell]) -> float:
        """Estimate the least time of cells: that of the last ones of their rows, else the duration of the load."""
        loads = self.running.scenario.loads
        one_of_mix = {cell.group: cell for cell in chunk if cell.mix is not None}  # the parts run concurrently
        cells = [*(cell for cell in chunk if cell.mix is None), *one_of_mix.values()]
        return sum(self.took_s.get(_row_name(cell), loads[cell.load].duration_s or 0.0) for cell in cells)

    def _fits(self, chunk: list[Cell]) -> bool:
        return time.monotonic() + self._estimate_s(chunk) < self.ends_s

    def _print(self, text: str) -> None:
        left_s = max(0.0, self.ends_s - time.monotonic())
        self.running.progress.line(f"Budget: {duration(left_s)} of {duration(self.budget.seconds)} left; {text}")

    def _drop_unmeasured(self, cells: list[Cell]) -> None:
        """Remove cells without a result from the run, and move their records aside."""
        measured = {(cell.server, cell.load) for cell in self.done.values()}
        rows = dict.fromkeys((cell.server, cell.load) for cell in cells)
        unmeasured = [" / ".join(row) for row in rows if row not in measured]
        self.update(budget=replace(self.budget, unmeasured=unmeasured), only=self.done)
        scenario = replace(self.running.scenario, repeats=MAX_REPEATS)
        set_aside(self.running.folder, self.done, [cell.id for cell in plan(scenario)])
        self._print("the run ends")


def is_check_due(repeats: int, planned: int) -> bool:
    """Return whether verdicts are checked after these repeats: the planned number times a power of two."""
    times, rest = divmod(repeats, planned)
    return rest == 0 and times.bit_count() == 1


def open_rows(summary: Summary) -> set[Row]:
    """Return the rows with a verdict that more repeats can decide or confirm: their spread is not too large."""
    keys = {row.name: row.key for row in summary.rows}
    verdicts = [] if summary.comparison is None else summary.comparison.verdicts
    undecided = [
        verdict
        for verdict in verdicts
        if verdict.basis == "one_run"
        or (verdict.reason in OPEN and (verdict.needed is not None or verdict.needed_for_same is not None))
    ]
    return {keys[name] for verdict in undecided for name in (verdict.side, verdict.baseline) if name in keys}


def _select_rows(cells: list[Cell], rows: set[Row]) -> list[Cell]:
    """Return the cells of these rows, and the cells that run together with them."""
    groups = {cell.group for cell in cells if (cell.server, cell.load) in rows}
    return [cell for cell in cells if cell.group in groups]


def _row_name(cell: Cell | CellRun) -> str:
    return f"{cell.server}/{cell.load}"
