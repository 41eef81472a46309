"""Everything that a run directory has: `load` is the only way to read the requests of a run.

All numbers, charts and checks are functions of a `RunData`. Nothing here writes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.base.files import open_file
from harness.records.clock import Clock
from harness.records.columns import (
    CellRecords,
    FileRecords,
    Gaps,
    Rows,
    Tokens,
    join_records,
    read_cells,
    records_at,
    records_of,
)
from harness.records.directory import no_records_error
from harness.records.manifest import Run, read_run
from harness.records.records import BadField, ProcessMark, Request, read_marks
from harness.records.samples import MetricsSample, TelemetrySample, group_by_cell, read_metrics, read_telemetry
from harness.scenario import Load
from harness.scenario.plan import Cell, Schedule, cell_of, plan

T = TypeVar("T")
Window = tuple[float, float]


class CellContext(Struct, frozen=True):
    """What must be known of a cell before its records are read."""

    clock: Clock
    duration_s: float | None = None  # of a timed load
    first_due_s: float | None = None  # of a timed open loop: its first scheduled time, since the measured time began
    ended_wall_s: float | None = None  # None: the cell did not end
    interrupted: bool = False  # the cell did not end: its last record is its end
    mix: str | None = None  # the same for all cells that ran at the same time
    staged: str | None = None  # the same for all cells that are stages of one load


class CellData(Struct, kw_only=True, dict=True):
    """The requests of one cell. Times are on the cell's axis, see Clock."""

    clock: Clock
    rows: Rows  # all requests, those of the warm-up first
    gaps: Gaps  # of the measured requests that succeeded
    bad: dict[tuple[str, str], tuple[int, BadField]] = {}  # by field and code: requests, and the first of them
    tokens: list[Tokens] = []  # over time, where the data of charts was read
    fetch: Callable[[Iterable[int]], Iterator[Request]]  # the records of some places
    window_s: Window | None = None  # the measured time of a timed load; in a mix, the common part of it
    measured_start_s: float | None = None  # of a timed load: the start of its own measured time
    open_loop: bool = False  # then answers to warm-up requests do not count in the rates of the window
    in_mix: bool = False  # then only requests that were due inside the window are counted
    neighbours: Sequence["CellData"] = ()  # other stages of the same load

    @cached_property
    def counted(self) -> Rows:
        """The requests that the cell's numbers include: the measured ones. In a mix they must be due inside the common
        window, or be sent inside it without a scheduled time, so that the planned number of requests is known.
        """
        measured = self.rows.where(slice(int((~self.rows.measured).sum()), None))
        if not self.in_mix or self.window_s is None:
            return measured
        due_s = measured.sent_s + np.nan_to_num(measured.scheduled_s)
        return measured.where((self.window_s[0] <= due_s) & (due_s <= self.window_s[1]))

    @cached_property
    def counted_gaps(self) -> Gaps:
        """The gaps of the requests of `counted` that succeeded."""
        if len(self.counted) == int(self.rows.measured.sum()):
            return self.gaps
        return records_of(list(self.fetch(self.counted.place.tolist())), self.clock).gaps

    def mix_window_s(self) -> Window | None:
        """The common window of a mix, in seconds since the start of this load's own measured time."""
        if not self.in_mix or self.window_s is None or self.measured_start_s is None:
            return None
        return self.window_s[0] - self.measured_start_s, self.window_s[1] - self.measured_start_s


def cell_data(
    requests: Sequence[Request], clock: Clock | None = None, *, charted: bool = False, **fields: Any
) -> CellData:
    """The data of a cell with these requests. `fields`: other fields of CellData."""
    clock = clock or Clock([])
    records = join_records([records_of(requests, clock, charted=charted)])
    return _cell_data(records, clock, lambda places: (requests[place] for place in places), **fields)


def _cell_data(records: CellRecords, clock: Clock, fetch: Callable[..., Iterator[Request]], **fields: Any) -> CellData:
    return CellData(
        clock=clock, rows=records.rows, gaps=records.gaps, bad=records.bad, tokens=records.tokens, fetch=fetch, **fields
    )


class RunData(Struct, frozen=True, kw_only=True):
    """A run directory."""

    folder: Path
    run: Run
    planned: dict[str, Cell]  # every cell that it may have records of: first those of the plan, in their order
    cells: dict[str, CellData]  # those that ran or have records
    marks: dict[str, list[ProcessMark]]  # by cell, as of the following
    metrics: dict[str, list[MetricsSample]]
    telemetry: dict[str, list[TelemetrySample]]
    damaged: dict[str, list[int]]  # numbers of unreadable lines, by file; without those of samples
    unknown_cells: dict[str, int]  # records by cells that the run does not have
    damaged_samples: dict[str, list[int]] = {}  # as `damaged`, of metrics.jsonl and telemetry.jsonl


def load(folder: Path, *, charted: bool = False) -> RunData:
    """Read a run directory, also of a failed run. `charted`: with the data of charts.

    Raises HarnessError where there is no readable manifest, or there are no records.
    """
    run = read_run(folder)
    damaged: dict[str, list[int]] = {"requests.jsonl": [], "processes.jsonl": []}
    marks = group_by_cell(read_marks(folder / "processes.jsonl", damaged["processes.jsonl"]))
    path = folder / "requests.jsonl"
    if run.ran and run.origin is None and not path.exists():
        raise no_records_error(folder)
    contexts = cell_contexts(run, marks)
    records = read_cells(path, {name: context.clock for name, context in contexts.items()}, charted=charted)
    damaged["requests.jsonl"] = records.damaged
    planned = recorded_cells(run)
    cells = cells_of(records, contexts, path)
    damaged_samples: dict[str, list[int]] = {"metrics.jsonl": [], "telemetry.jsonl": []}
    metrics = read_metrics(folder / "metrics.jsonl", damaged_samples["metrics.jsonl"])
    telemetry = read_telemetry(folder / "telemetry.jsonl", damaged_samples["telemetry.jsonl"])
    return RunData(
        folder=folder,
        run=run,
        planned=planned,
        cells={
            name: cells.get(name) or cell_data([], contexts[name].clock)
            for name in planned
            if name in run.ran or name in cells
        },
        marks=marks,
        metrics=_with_mixes(planned, metrics),
        telemetry=_with_mixes(planned, telemetry),
        damaged=damaged,
        unknown_cells=records.unknown,
        damaged_samples={name: _without_torn(run, folder / name, lines) for name, lines in damaged_samples.items()},
    )


def _without_torn(run: Run, path: Path, damaged: list[int]) -> list[int]:
    """Return the numbers of unreadable lines without a last one that has no end: a kill, or a sample on its way.

    Of a run that ended by itself it is damage as well.
    """
    if not damaged or run.status in ("valid", "invalid"):
        return damaged
    with open_file(path) as file:
        lines = [line.endswith(b"\n") for line in file]
    return [number for number in damaged if lines[number - 1]]


def _with_mixes(cells: Mapping[str, Cell], samples: dict[str, list[T]]) -> dict[str, list[T]]:
    """The samples of each cell. The loads of a mix share those that have the name of its first cell."""
    first: dict[str, str] = {}
    for name, cell in cells.items():
        watched = first.setdefault(cell.group, name)
        if cell.mix is not None and name not in samples and watched in samples:
            samples[name] = samples[watched]
    return samples


def recorded_cells(run: Run) -> dict[str, Cell]:
    """Every cell that the run may have records of: first the planned ones in their order, then all others that ran."""
    planned = {cell.id: cell for cell in plan(run.scenario)}
    for server in run.scenario.servers:
        for name in run.scenario.loads:
            planned[f"live-{server}-{name}"] = cell_of(server, name, 1, f"live-{server}-{name}")
    cells = {name: planned[name] for name in run.order if name in planned}
    for cell in run.cells:
        cells.setdefault(cell.id, cell_of(cell.server, cell.load, cell.repeat, cell.id))
    return cells


def cell_contexts(run: Run, marks: Mapping[str, Sequence[ProcessMark]]) -> dict[str, CellContext]:
    """The context of each cell that the run may have records of."""
    contexts = {}
    for name, cell in recorded_cells(run).items():
        cell_load, seed = effective_load(run, cell)
        ended_wall_s = run.ran[name].ended_wall_s if name in run.ran else None
        contexts[name] = CellContext(
            Clock(marks.get(name, [])),
            duration_s=cell_load.duration_s,
            first_due_s=None if run.origin else first_arrival_s(cell_load, seed),
            ended_wall_s=ended_wall_s,
            interrupted=ended_wall_s is None,
            mix=cell.group if cell.mix is not None else None,
            staged=cell.group if cell.stage is not None else None,
        )
    return contexts


def effective_load(run: Run, cell: Cell) -> tuple[Load, int]:
    """The load of a cell and the seed of its requests. A load that was stopped as planned has the time that it ran."""
    cell_load, ran = run.scenario.loads[cell.load], run.ran.get(cell.id)
    if ran is None:
        return cell_load, run.scenario.seed
    if ran.stopped_after_s is not None:
        cell_load = replace(cell_load, duration_s=ran.stopped_after_s, requests=None)
    return cell_load, run.scenario.seed if ran.seed is None else ran.seed


def first_arrival_s(cell_load: Load, seed: int) -> float | None:
    """Seconds from the start of an open loop's measured time to its first arrival; None for other loads."""
    return None if cell_load.arrivals is None else Schedule(cell_load.arrivals, seed).at(0)


def cells_of(file_records: FileRecords, contexts: Mapping[str, CellContext], path: Path) -> dict[str, CellData]:
    """The data of each cell that has records, with its measured window."""
    starts, windows = _measured_windows(file_records.cells, contexts)
    records = dict(file_records.cells)
    staged = _groups(contexts, lambda name: contexts[name].staged)
    stages = [names for names in staged if not records.keys().isdisjoint(names)]
    for name in (name for names in stages for name in names if name not in records):
        records[name] = join_records([records_of([], contexts[name].clock)])  # a stage that was not reached
    cells = {
        name: _cell_data(
            cell_records,
            contexts[name].clock,
            lambda places: records_at(path, places),
            window_s=windows.get(name),
            measured_start_s=starts.get(name),
            open_loop=contexts[name].first_due_s is not None,
            in_mix=contexts[name].mix is not None,
        )
        for name, cell_records in records.items()
    }
    for names in stages:
        for name in names:
            cells[name].neighbours = [cells[other] for other in names if other != name]
    return cells


def _groups(cells: Iterable[str], group_of: Callable[[str], str | None]) -> list[list[str]]:
    """Group cells by the name that `group_of` returns; cells without one are left out."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        if (group := group_of(cell)) is not None:
            groups.setdefault(group, []).append(cell)
    return list(groups.values())


def _measured_windows(
    cells: Mapping[str, CellRecords], contexts: Mapping[str, CellContext]
) -> tuple[dict[str, float], dict[str, Window]]:
    """The start of the measured time of each timed cell, and its window: it starts with the first measured request, or
    with the schedule of an open loop, and lasts as long as the load asks for, or until the cell ended.
    """
    starts, windows = {}, {}
    for name, records in cells.items():
        context, rows = contexts[name], records.rows
        if context.duration_s is None or not rows.measured.any():
            continue
        # The start of the schedule, if a request was the first one; later ones give a later time.
        shift_s = 0.0 if context.first_due_s is None else np.nan_to_num(rows.scheduled_s - context.first_due_s)
        start_s = float((rows.sent_s + shift_s)[rows.measured].min())
        end_s = start_s + context.duration_s
        if context.ended_wall_s is not None and context.clock.anchor_s is not None:
            end_s = max(start_s, min(end_s, context.ended_wall_s - context.clock.anchor_s))
        if context.interrupted:
            end_s = min(end_s, max(start_s, float((rows.sent_s + rows.ended_s)[rows.measured].max())))
        starts[name], windows[name] = start_s, (start_s, end_s)
    # The loads of a mix share the time in which all of them were measured, if there is one.
    for mixed in _groups(list(windows), lambda name: contexts[name].mix):
        start_s, end_s = max(windows[name][0] for name in mixed), min(windows[name][1] for name in mixed)
        if start_s < end_s:
            windows |= dict.fromkeys(mixed, (start_s, end_s))
    return starts, windows
