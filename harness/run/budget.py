"""A run with a time budget: whole repeats of all rows, as many as the time allows, at least one."""

import time
from collections.abc import Iterator

from msgspec.structs import replace

from harness.base.units import duration
from harness.numbers.comparison import MAX_REPEATS
from harness.records.manifest import CellRun
from harness.run.orchestrator import Steps, run_cells
from harness.run.running import Running
from harness.scenario.plan import Cell, plan


def budget_steps(seconds: float, max_repeats: int = MAX_REPEATS, min_repeats: int = 1) -> Steps:
    """Return the steps of a run that starts no repeat which would probably end after this time, after `min_repeats`."""
    ends_s = time.monotonic() + seconds

    def steps(running: Running, cells: list[Cell]) -> Iterator[CellRun]:
        file, scenario, took_s = running.file, running.scenario, 0.0
        file.update(only=[cell.id for cell in file.manifest.cells])  # a repeat is in the plan once it starts
        for index, repeat in enumerate(_repeats(running, cells, max_repeats)):
            begun_s = time.monotonic()
            if index >= min_repeats and begun_s + took_s > ends_s:
                break
            remaining = f"{duration(max(0.0, ends_s - begun_s))} of {duration(seconds)} left"
            running.progress.line(f"Budget: {remaining}; repeat {repeat[0].repeat}")
            ids = [cell.id for cell in repeat]
            repeats = max(scenario.repeats, repeat[0].repeat)
            decides = seconds if repeat[0].repeat < max_repeats else None  # else the number that was asked for does
            file.update(planned=ids, scenario=replace(scenario, repeats=repeats), budget_s=decides)
            yield from run_cells(running, repeat)
            took_s = time.monotonic() - begun_s

    return steps


def _repeats(running: Running, cells: list[Cell], max_repeats: int) -> Iterator[list[Cell]]:
    """Yield the cells of each planned repeat, then those of further repeats."""
    planned = {cell.repeat for cell in running.file.manifest.cells} | {cell.repeat for cell in cells}
    for number in range(1, min(max_repeats, MAX_REPEATS) + 1):
        scenario = replace(running.scenario, repeats=max(number, running.scenario.repeats))
        if repeat := [cell for cell in (cells if number in planned else plan(scenario)) if cell.repeat == number]:
            yield repeat
