"""Count the records of a run, cell by cell. Long files are read in blocks by several processes."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from harness.analysis.charted import ChartCounts
from harness.analysis.derive import max_known, min_known
from harness.analysis.tally import CellCounts, Clock, SloTally
from harness.files import UNDECODABLE
from harness.rundir.records import Block, Lines, Reading, damaged_in_file, read_block, reader, split_blocks
from harness.scenario.check_syntax import Slo


class CellContext(Struct, frozen=True):
    """What must be known of a cell before its records are read."""

    clock: Clock
    duration_s: float | None = None  # of a timed load
    first_due_s: float | None = None  # of a timed open loop: its first scheduled time, since the measured time began
    ended_wall_s: float | None = None  # None: the cell did not end
    interrupted: bool = False  # the cell did not end: its last record is its end
    mix: str | None = None  # the same for all cells that ran at the same time
    staged: str | None = None  # the same for all cells that are stages of one load
    slos: dict[str, tuple[Slo, ...]] = {}  # sets of SLOs to count


class _RecordHead(Struct):
    """The part of a record that the first pass needs. Decoding skips the rest of the line."""

    cell: str
    process: int
    phase: str
    sent_s: float
    ended_s: float
    scheduled_s: float | None = None


class _Preview(Struct):
    """The result of the first pass, by timed cell. Times are on the cell's axis."""

    starts: dict[str, float] = {}  # the first measured request, or the start of the schedule
    ends: dict[str, float] = {}  # of interrupted cells: the end of the last record


def count_cells(
    path: Path,
    contexts: dict[str, CellContext],
    damaged_lines: list[int],
    unknown_cells: Counter[str],
    *,
    charted: bool = False,
) -> dict[str, CellCounts]:
    """Return the counts of each cell that has records; `charted`: with the data of charts.

    Appends the numbers of unreadable lines to `damaged_lines` and adds records of unknown cells to `unknown_cells`.
    Raises HarnessError when a process that read a part of a long file was killed.
    """
    tallies: dict[str, CellCounts] = {}
    lines = []
    with reader(split_blocks(path)) as run:
        preview = _preview_file(run, contexts)
        windows = _measured_windows(preview, contexts)
        count = partial(_count_block, contexts=contexts, starts=preview.starts, windows=windows, charted=charted)
        for block_tallies, block_unknown, block_lines in run(count):
            lines.append(block_lines)
            unknown_cells += block_unknown
            for cell, counted in block_tallies.items():
                if cell in tallies:
                    tallies[cell].merge(counted)
                else:
                    tallies[cell] = counted
    damaged_lines += damaged_in_file(lines)
    return tallies


def _count_block(
    block: Block,
    contexts: dict[str, CellContext],
    starts: dict[str, float],
    windows: dict[str, tuple[float, float]],
    charted: bool,
) -> tuple[dict[str, CellCounts], Counter[str], Lines]:
    tallies: dict[str, CellCounts] = {}
    unknown_cells: Counter[str] = Counter()
    lines = Lines()
    staged_loads = _groups(contexts, lambda cell: contexts[cell].staged)
    other_stages = {cell: [other for other in cells if other != cell] for cells in staged_loads for cell in cells}

    def counts_of(cell: str) -> CellCounts:
        if cell not in tallies:
            context = contexts[cell]
            tallies[cell] = CellCounts(
                clock=context.clock,
                window_s=windows.get(cell),
                measured_start_s=starts.get(cell),
                open_loop=context.first_due_s is not None,
                in_mix=context.mix is not None,
                slos=SloTally(sets=context.slos),
                chart=ChartCounts() if charted else None,
            )
        return tallies[cell]

    for request in read_block(block, lines):
        cell = request.cell
        if cell not in contexts:
            unknown_cells[cell] += 1
            continue
        counts_of(cell).add(request)
        for other in other_stages.get(cell, ()):
            # The part of its answer inside the window of another stage is in the rates of that stage.
            counts_of(other).count_in_window(request, request.sent_s + contexts[other].clock.offset_s(request.process))
    for counted in tallies.values():
        counted.chunk_gap_s.flush()
        if counted.chart is not None:
            counted.chart.reduce()
    return tallies, unknown_cells, lines


def _preview_block(block: Block, contexts: dict[str, CellContext]) -> _Preview:
    preview = _Preview()
    decode_head = msgspec.json.Decoder(_RecordHead).decode
    for line in block.lines():
        try:
            head = decode_head(line)
        except UNDECODABLE:
            continue
        context = contexts.get(head.cell)
        if head.phase != "measured" or context is None or context.duration_s is None:
            continue
        start_s = head.sent_s + context.clock.offset_s(head.process)
        if context.interrupted:
            preview.ends[head.cell] = max_known(preview.ends.get(head.cell), start_s + head.ended_s)
        if head.scheduled_s is not None and context.first_due_s is not None:
            # The start of the schedule, if this request was the first one; later ones give a later time.
            start_s += head.scheduled_s - context.first_due_s
        preview.starts[head.cell] = min_known(preview.starts.get(head.cell), start_s)
    return preview


def _preview_file(run: Reading[_Preview], contexts: dict[str, CellContext]) -> _Preview:
    merged = _Preview()
    if all(context.duration_s is None for context in contexts.values()):
        return merged
    for part in run(partial(_preview_block, contexts=contexts)):
        for cell, start_s in part.starts.items():
            merged.starts[cell] = min_known(merged.starts.get(cell), start_s)
        for cell, end_s in part.ends.items():
            merged.ends[cell] = max_known(merged.ends.get(cell), end_s)
    return merged


def _groups(cells: Iterable[str], group_of: Callable[[str], str | None]) -> list[list[str]]:
    """Group cells by the name that `group_of` returns; cells without one are left out."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        if (group := group_of(cell)) is not None:
            groups.setdefault(group, []).append(cell)
    return list(groups.values())


def _measured_windows(preview: _Preview, contexts: dict[str, CellContext]) -> dict[str, tuple[float, float]]:
    """The measured window of each timed cell: it starts with the first measured request, or with the schedule of an
    open loop, and lasts as long as the load asks for, or until the cell ended.
    """
    windows = {}
    for cell, start_s in preview.starts.items():
        context = contexts[cell]
        end_s = start_s + (context.duration_s or 0.0)
        if context.ended_wall_s is not None and context.clock.anchor_s is not None:
            end_s = max(start_s, min(end_s, context.ended_wall_s - context.clock.anchor_s))
        end_s = min(end_s, max(start_s, preview.ends.get(cell, end_s)))
        windows[cell] = (start_s, end_s)
    # The loads of a mix share the time in which all of them were measured, if there is one.
    for cells in _groups(list(windows), lambda cell: contexts[cell].mix):
        start_s, end_s = max(windows[cell][0] for cell in cells), min(windows[cell][1] for cell in cells)
        if start_s < end_s:
            windows |= dict.fromkeys(cells, (start_s, end_s))
    return windows
