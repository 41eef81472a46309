"""What the charts need from a run's records, read once as a stream and reduced on the way.

The size of the page depends on the number of rows and cells, never on the number of requests. See
harness.rundir.blocks for how a long file is read.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from harness.report.charts.bins import FINE_S, BinCounts, Times, bin_of
from harness.report.charts.request_dots import Choice, FailureCount, RequestChoices
from harness.report.charts.telemetry import (
    MachineSamples,
    ServerSamples,
    machine_samples,
    server_samples,
    shifted_machine,
    shifted_server,
)
from harness.rundir.blocks import Block, Lines, blocks_of, in_file, reader, requests_in
from harness.rundir.manifest import Run
from harness.rundir.records import ProcessMark, Request, read_marks
from harness.rundir.samples import by_cell
from harness.scenario.plan import plan
from harness.summarize import derive
from harness.summarize.count import together
from harness.summarize.derive import add_up, doubles
from harness.summarize.summarize import places_of
from harness.summarize.tally import Clock, is_counted

MOST_BINS = 240  # points of a timeline's line
MOST_POINTS = 200  # points of a distribution's line
_LEAST_ARRIVALS = 10  # fine bins of a step of arrivals: a second
_COARSER = 3  # times as long as other steps
EXAMPLES = 3  # messages kept for each kind of error


class LatencySamples(Struct):
    """Latencies of one row's successful measured requests, in seconds."""

    ttft_s: "array[float]" = field(default_factory=doubles)
    tpot_s: "array[float]" = field(default_factory=doubles)
    e2e_s: "array[float]" = field(default_factory=doubles)


class ErrorExamples(Struct):
    """A kind of error in one row."""

    count: int = 0
    messages: list[str] = []

    def merge(self, other: "ErrorExamples") -> None:
        self.count += other.count
        self.messages += [message for message in other.messages if message not in self.messages]
        del self.messages[EXAMPLES:]


class Timeline(Struct, frozen=True, kw_only=True):
    """One cell over time. Zero is the first measured request; times in seconds."""

    cell: str
    step_s: float
    at_s: list[float]  # middle of each step
    tok_s: list[float]
    in_flight: list[int]  # requests sent and not ended, the most of each step
    arrivals_at_s: list[float] = []  # of an open loop: middle of each step of the following two
    asked_s: list[float] = []  # requests due a second, ...
    gone_s: list[float] = []  # ... and sent a second
    server: ServerSamples
    machine: MachineSamples = field(default_factory=MachineSamples)
    failures: dict[str, FailureCount]  # of measured requests by kind, the earliest first
    warmup_until_s: float | None  # None: no warm-up
    ends_s: float


class ChartData(Struct, frozen=True, kw_only=True):
    """Everything that the charts draw."""

    samples: dict[tuple[str, str], LatencySamples]  # by server and load
    faults: dict[tuple[str, str], dict[str, ErrorExamples]]
    timelines: list[Timeline]
    chosen: dict[tuple[str, str], Choice]  # requests to draw; seconds count from their cell's first measured one
    without_usage: int  # successful requests for text whose tokens the server did not report
    damaged_lines: int


class _Zero(Struct, frozen=True):
    """What joins the clocks of a run's processes, and the start of each cell's first one."""

    anchors: dict[tuple[str, int], float]
    starts_s: dict[str, float]  # Unix time


class _Joint(Struct, frozen=True):
    """When the parts of a mix were all measured, on the axis of one of them: what else it sent is in no chart."""

    clock: Clock
    window_s: tuple[float, float] | None


_ALL = _Joint(Clock([]), None)


class _Part(Struct):
    """What a part of the file holds."""

    samples: dict[tuple[str, str], LatencySamples]
    faults: dict[tuple[str, str], dict[str, ErrorExamples]]
    counts: dict[str, BinCounts]
    seen: RequestChoices
    without_usage: int = 0


def observe(folder: Path, run: Run) -> ChartData:
    """Read requests.jsonl, processes.jsonl, metrics.jsonl and telemetry.jsonl of a run, whatever state they are in."""
    cells = {cell.id: (cell.server, cell.load) for cell in plan(run.scenario)}
    marks = by_cell(read_marks(folder / "processes.jsonl"))
    places = places_of(run, marks)
    windows = together(folder / "requests.jsonl", places)
    zero = _zero(marks)
    joint = {cell: _Joint(places[cell].clock, window_s) for cell, window_s in windows.items()}
    counts = {cell: BinCounts(start_s) for cell, start_s in zero.starts_s.items()}
    whole = _Part(samples={}, faults={}, counts=counts, seen=RequestChoices())
    lines = []
    blocks = blocks_of(folder / "requests.jsonl")
    with reader(blocks) as parts_of:
        for part, read in parts_of(partial(_observe, cells=cells, zero=zero, joint=joint)):
            _merge(whole, part)
            lines.append(read)
    scraped = server_samples(folder / "metrics.jsonl")
    watched = machine_samples(folder / "telemetry.jsonl")
    return ChartData(
        samples=whole.samples,
        faults={row: whole.faults[row] for row in dict.fromkeys(cells.values()) if row in whole.faults},
        timelines=[
            _timeline(
                name,
                counts[name],
                scraped.get(name, ServerSamples()),
                watched.get(name, MachineSamples()),
                whole.seen.failures.get(name, {}),
            )
            for name in cells
            if name in counts and counts[name].first_sent_s is not None
        ],
        chosen=whole.seen.since({cell: count.first_measured_s or 0.0 for cell, count in counts.items()}),
        without_usage=whole.without_usage,
        damaged_lines=len(in_file(lines)),
    )


def _zero(marks: dict[str, list[ProcessMark]]) -> _Zero:
    zero = _Zero({}, {})
    for mark in chain.from_iterable(marks.values()):
        if mark.event == "start":
            zero.anchors[mark.cell, mark.process] = mark.wall_s - mark.monotonic_s
            zero.starts_s[mark.cell] = min(mark.wall_s, zero.starts_s.get(mark.cell, mark.wall_s))
    return zero


def _observe(
    block: Block, cells: dict[str, tuple[str, str]], zero: _Zero, joint: dict[str, _Joint]
) -> tuple[_Part, Lines]:
    part = _Part(samples=defaultdict(LatencySamples), faults=defaultdict(dict), counts={}, seen=RequestChoices())
    lines = Lines()
    for request in requests_in(block, lines):
        row = cells.get(request.cell)
        if row is None:
            continue
        anchor = zero.anchors.get((request.cell, request.process))
        if anchor is not None:
            start_s = zero.starts_s[request.cell]
            if request.cell not in part.counts:
                part.counts[request.cell] = BinCounts(start_s)
            part.counts[request.cell].add(request, anchor - start_s)
        one = joint.get(request.cell, _ALL)
        if not is_counted(request, request.sent_s + one.clock.offset_s(request.process), one.window_s):
            continue
        if request.error == "abandoned":
            continue
        if anchor is not None:
            part.seen.add(request, row, request.sent_s + anchor - start_s)
        if request.error is not None:
            said = [request.message] if request.message else []
            part.faults[row].setdefault(request.error, ErrorExamples()).merge(ErrorExamples(1, said))
        else:
            part.without_usage += request.output_tokens is None and request.vectors is None
            _note_latencies(part.samples[row], request)
    for count in part.counts.values():
        count.trim()
    part.seen.thin()
    return part, lines


def _merge(whole: _Part, part: _Part) -> None:
    for row, sample in part.samples.items():
        add_up(whole.samples.setdefault(row, LatencySamples()), sample)
    for row, faults in part.faults.items():
        for kind, fault in faults.items():
            whole.faults.setdefault(row, {}).setdefault(kind, ErrorExamples()).merge(fault)
    for cell, count in part.counts.items():
        whole.counts[cell].merge(count)
    whole.seen.merge(part.seen)
    whole.without_usage += part.without_usage


def _note_latencies(sample: LatencySamples, request: Request) -> None:
    for values, value in (
        (sample.ttft_s, derive.ttft_s(request)),
        (sample.tpot_s, derive.shown_tpot_s(request)),
        (sample.e2e_s, derive.e2e_s(request)),
    ):
        if value is not None:
            values.append(value)


def distribution(values: Iterable[float]) -> tuple[list[float], list[float]]:
    """The empirical distribution function: values in rising order and the share of the sample up to each.

    Every point of a small sample; of a large one MOST_POINTS of them, the least and the most included.
    """
    ordered = np.sort(np.asarray(list(values), dtype=np.float64))
    size = len(ordered)
    if size > MOST_POINTS:
        places = np.unique(np.linspace(0, size - 1, MOST_POINTS).round().astype(np.int64))
    else:
        places = np.arange(size)
    shares = (places + 1) / size if size else places
    return [float(v) for v in ordered[places]], [round(float(s), 5) for s in shares]


def _timeline(
    name: str, count: BinCounts, server: ServerSamples, machine: MachineSamples, failures: dict[str, FailureCount]
) -> Timeline:
    count.flush()
    start = count.first_sent_s or 0.0
    zero = count.first_measured_s if count.first_measured_s is not None else start
    low = int(start / FINE_S)
    high = bin_of(count.last_ended_s) + 1
    group = _bins_per_step(high - low)
    in_flight = np.cumsum(count.change)[low:high]
    tokens = count.tokens[low:high]
    edges, lengths, middles = _steps(low, low + len(tokens), group, zero)
    rates = np.add.reduceat(tokens, edges) / lengths if len(tokens) else tokens
    arrivals_at, asked, gone = _arrivals(count, low, high, zero)
    return Timeline(
        cell=name,
        step_s=group * FINE_S,
        at_s=middles,
        tok_s=[round(float(r), 1) for r in rates],
        in_flight=[int(n) for n in np.maximum.reduceat(in_flight, edges)] if len(in_flight) else [],
        arrivals_at_s=arrivals_at,
        asked_s=asked,
        gone_s=gone,
        server=shifted_server(server, count.zero_s + zero, 2 * MOST_BINS),
        machine=shifted_machine(machine, count.zero_s + zero, 2 * MOST_BINS),
        failures={
            kind: FailureCount(found.count, round(found.first_s - zero, 2))
            for kind, found in sorted(failures.items(), key=lambda item: item[1].first_s)
        },
        warmup_until_s=None if zero == start else round(start - zero, 2),
        ends_s=round(count.last_ended_s - zero, 2),
    )


def _arrivals(count: BinCounts, low: int, high: int, zero: float) -> tuple[list[float], list[float], list[float]]:
    """Middles of steps, requests due and sent a second in each; nothing in a closed loop. A step has some arrivals."""
    if not count.due.any():
        return [], [], []
    group = max(_LEAST_ARRIVALS, _bins_per_step(_COARSER * (high - low)))
    edges, lengths, middles = _steps(low, high, group, zero)
    due, gone = (
        [round(float(rate), 3) for rate in np.add.reduceat(bins[low:high], edges) / lengths]
        for bins in (count.due, count.gone)
    )
    return middles, due, gone


def _steps(low: int, high: int, group: int, zero: float) -> tuple[NDArray[np.int64], Times, list[float]]:
    """Steps of `group` fine bins: where each begins, counted from `low`, how long it is, and its middle."""
    edges = np.arange(0, high - low, group)
    lengths = np.diff(np.append(edges, high - low)) * FINE_S
    return edges, lengths, [round(float(t), 2) for t in (low + edges) * FINE_S + lengths / 2 - zero]


def _bins_per_step(bins: int) -> int:
    """The least round number of fine bins that keeps a line within MOST_BINS points."""
    for group in (1, 2, 5, 10, 20, 50, 100, 300, 600, 1200, 3000, 6000, 18000, 36000):
        if bins <= group * MOST_BINS:
            return group
    return -(-bins // MOST_BINS)
