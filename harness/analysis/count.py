"""The tally of every cell of a run, from its file of records, however long that is."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from harness.analysis import gaps
from harness.analysis.charted import ChartCounts
from harness.analysis.derive import add_up
from harness.analysis.gaps import Gaps, GapSample, Interval
from harness.analysis.tally import CellCounts, Clock, SloTally
from harness.files import UNDECODABLE
from harness.rundir.records import Block, Lines, Reading, Request, damaged_in_file, read_block, reader, split_blocks
from harness.scenario.check_syntax import Slo

KEEP_BYTES = 256 * 2**20  # of records; of a longer file only those chunk gaps are kept that percentiles need
_SAMPLED = 16  # one of so many lines of a long file,
_SAMPLED_GAPS = 5  # and of these one of so many gaps, tell where the percentiles lie
_WIDENED = (1.0, 4.0, math.inf)  # how wide to look for them; the last holds every value


class CellContext(Struct, frozen=True):
    """What the tally must know of a cell before it reads its records."""

    clock: Clock
    duration_s: float | None = None  # of a timed load
    first_due_s: float | None = None  # of an open loop of fixed time: when the first is due after that began
    ended_wall_s: float | None = None  # when the cell was over, if it came to its end
    interrupted: bool = False  # it did not: it was over with the last of its records
    row: str | None = None  # the cells that are pooled with it have the same
    mix: str | None = None  # the cells that ran at the same time have the same
    staged: str | None = None  # the cells that are stages of one load have the same
    slos: dict[str, tuple[Slo, ...]] = {}  # sets of SLOs to count


class _RecordHead(Struct):
    """The part of a record that a first pass needs; the rest of the line is skipped."""

    cell: str
    process: int
    phase: str
    sent_s: float
    ended_s: float
    scheduled_s: float | None = None


class _Preview(Struct):
    """What a first pass over a block finds."""

    starts: dict[str, float] = {}  # of timed cells: the first measured request, or the start of the schedule
    ends: dict[str, float] = {}  # of interrupted timed cells: of their last record
    samples: dict[str, GapSample] = {}


def tally(
    path: Path,
    places: dict[str, CellContext],
    damaged: list[int],
    unknown_cells: Counter[str],
    *,
    charted: bool = False,
) -> dict[str, CellCounts]:
    """The tally of each cell that has records. Torn lines go to `damaged`, records of unknown cells to `unknown_cells`.
    `charted`: with what charts draw.

    Raises HarnessError when a process that read a part of a long file was killed.
    """
    blocks = split_blocks(path)
    long = bool(blocks) and blocks[-1].end > KEEP_BYTES
    tallies: dict[str, CellCounts] = {}
    with reader(blocks) as run:
        preview = _Preview()
        if long or any(place.duration_s is not None for place in places.values()):
            preview = _previewed(run, places, sampling=long)
        windows = _windows(preview, places)
        for widened in _WIDENED if long else (math.inf,):
            intervals = _intervals(preview.samples, places, widened)
            lines, unknown = [], Counter[str]()
            tallies = {}
            for part, others, read in run(
                partial(
                    _tally,
                    places=places,
                    starts=preview.starts,
                    windows=windows,
                    intervals=intervals,
                    charted=charted,
                )
            ):
                lines.append(read)
                unknown += others
                for cell, counted in part.items():
                    if cell in tallies:
                        tallies[cell].merge(counted)
                    else:
                        tallies[cell] = counted
            if _all_found(tallies, places):
                break
    damaged += damaged_in_file(lines)
    unknown_cells += unknown
    return tallies


def _tally(
    block: Block,
    places: dict[str, CellContext],
    starts: dict[str, float],
    windows: dict[str, tuple[float, float]],
    intervals: dict[str, list[Interval]],
    charted: bool,
) -> tuple[dict[str, CellCounts], Counter[str], Lines]:
    tallies: dict[str, CellCounts] = {}
    unknown_cells: Counter[str] = Counter()
    lines = Lines()
    loads = _groups(places, lambda cell: places[cell].staged)
    other_stages = {cell: [other for other in cells if other != cell] for cells in loads for cell in cells}

    def of(cell: str) -> CellCounts:
        if cell not in tallies:
            kept = Gaps(intervals[cell]) if cell in intervals else Gaps()
            place = places[cell]
            tallies[cell] = CellCounts(
                clock=place.clock,
                window_s=windows.get(cell),
                begun_s=starts.get(cell),
                scheduled=place.first_due_s is not None,
                mixed=place.mix is not None,
                chunk_gap_s=kept,
                slos=SloTally(sets=place.slos),
                chart=ChartCounts() if charted else None,
            )
        return tallies[cell]

    for request in read_block(block, lines):
        cell = request.cell
        if cell not in places:
            unknown_cells[cell] += 1
            continue
        of(cell).add(request)
        for other in other_stages.get(cell, ()):
            of(other).add_of_other_stage(request)
    for counted in tallies.values():
        counted.chunk_gap_s.flush()
        if counted.chart is not None:
            counted.chart.reduce()
    return tallies, unknown_cells, lines


def _preview(block: Block, places: dict[str, CellContext], sampling: bool) -> _Preview:
    preview = _Preview()
    timed = {cell: place for cell, place in places.items() if place.duration_s is not None}
    decode_head, decode = msgspec.json.Decoder(_RecordHead).decode, msgspec.json.Decoder(Request).decode
    for number, line in enumerate(block.lines()):
        try:
            if sampling and number % _SAMPLED == 0:
                _sample(preview, decode(line), number // _SAMPLED)
            if timed:
                head = decode_head(line)
                place = timed.get(head.cell)
                if head.phase == "measured" and place is not None:
                    start_s = head.sent_s + place.clock.offset_s(head.process)
                    if place.interrupted:
                        end_s = start_s + head.ended_s
                        preview.ends[head.cell] = max(end_s, preview.ends.get(head.cell, end_s))
                    first_due_s = place.first_due_s
                    if head.scheduled_s is not None and first_due_s is not None:
                        start_s += head.scheduled_s - first_due_s  # of the first that was due; it is the least of all
                    preview.starts[head.cell] = min(start_s, preview.starts.get(head.cell, start_s))
        except UNDECODABLE:
            continue
    return preview


def _previewed(run: Reading[_Preview], places: dict[str, CellContext], *, sampling: bool) -> _Preview:
    whole = _Preview()
    for found in run(partial(_preview, places=places, sampling=sampling)):
        for cell, start in found.starts.items():
            whole.starts[cell] = min(start, whole.starts.get(cell, start))
        for cell, end in found.ends.items():
            whole.ends[cell] = max(end, whole.ends.get(cell, end))
        for cell, sample in found.samples.items():
            add_up(whole.samples.setdefault(cell, GapSample()), sample)
    return whole


def _sample(preview: _Preview, request: Request, turn: int) -> None:
    if request.phase == "measured" and request.error is None:
        sample = preview.samples.setdefault(request.cell, GapSample())
        # Not always the same gaps of an answer: an engine may have a rhythm.
        sample.add(request.chunks_s, turn % _SAMPLED_GAPS, _SAMPLED_GAPS)


def _groups(cells: Iterable[str], name: Callable[[str], str | None]) -> list[list[str]]:
    """Cells with the same name of what they belong to; those that belong to nothing are left out."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        if (group := name(cell)) is not None:
            groups.setdefault(group, []).append(cell)
    return list(groups.values())


def _by_row(cells: Iterable[str], places: dict[str, CellContext]) -> list[list[str]]:
    return _groups((cell for cell in cells if cell in places), lambda cell: places[cell].row or cell)


def _intervals(
    samples: dict[str, GapSample], places: dict[str, CellContext], widened: float
) -> dict[str, list[Interval]]:
    """Which chunk gaps are to be kept of each cell; cells not named keep all, such as those with few records."""
    if widened == math.inf:
        return {}
    known = {cell: sample for cell, sample in samples.items() if sample.requests >= gaps.MIN_SAMPLE}
    return {
        cell: found
        for cells in _by_row(known, places)
        for found in [gaps.intervals_around([known[cell] for cell in cells], widened)]
        for cell in cells
    }


def _all_found(tallies: dict[str, CellCounts], places: dict[str, CellContext]) -> bool:
    """Whether each percentile of each cell and row is within the kept values."""
    for cells in [[cell] for cell in tallies] + _by_row(tallies, places):
        parts = [tallies[cell].chunk_gap_s for cell in cells if tallies[cell].chunk_gap_s.n]
        if not all(part.whole for part in parts) and not gaps.all_known(parts):
            return False
    return True


def _windows(preview: _Preview, places: dict[str, CellContext]) -> dict[str, tuple[float, float]]:
    """The measured time of each timed cell: from its first measured request on, as long as the load asks for.

    That of an open loop begins with its schedule, in which the first may be due later. It is shorter where the cell was
    over before.
    """
    windows = {}
    for cell, start in preview.starts.items():
        place = places[cell]
        end = start + (place.duration_s or 0.0)
        if place.ended_wall_s is not None and place.clock.anchor_s is not None:
            end = max(start, min(end, place.ended_wall_s - place.clock.anchor_s))
        end = min(end, max(start, preview.ends.get(cell, end)))
        windows[cell] = (start, end)
    # Of the parts of a mix the time in which all of them were measured, if there is one.
    for cells in _groups(list(windows), lambda cell: places[cell].mix):
        start, end = max(windows[cell][0] for cell in cells), min(windows[cell][1] for cell in cells)
        if start < end:
            windows |= dict.fromkeys(cells, (start, end))
    return windows
