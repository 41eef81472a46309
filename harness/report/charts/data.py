"""The data of the charts, reduced from a run's files in one pass over its records.

The size of the page depends on the number of rows and cells, never on the number of requests. See
harness.rundir.records for how a long file is read.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from harness.analysis import derive
from harness.analysis.count import together
from harness.analysis.derive import Latencies, add_up, doubles
from harness.analysis.summarize import places_of
from harness.analysis.tally import Clock, is_counted
from harness.columns import LIVE
from harness.rundir.manifest import Run
from harness.rundir.records import Block, Lines, Request, blocks_of, by_cell, read_marks, reader, requests_in
from harness.rundir.samples import GpuSample, MetricsSample, TelemetrySample, read_metrics, read_telemetry, serving
from harness.scenario.plan import plan

FINE_S = 0.1  # width of a bin
MAX_FINE = 4_000_000  # bins of a cell, over four days: a record with an absurd time falls into the last
MAX_BINS = 240  # points of a timeline's line
MAX_POINTS = 200  # points of a distribution's line
MIN_ARRIVALS = 10  # fine bins of a step of arrivals: a second
COARSER = 3  # times as long as other steps
MAX_DOTS = 600  # requests of a row that are drawn at most, a quarter of them failed ones,
SLOWEST = 20  # and of them the slowest
MAX_GPUS = 8  # that are drawn; a ninth would have no colour of its own
GAUGES = ("running", "waiting", "kv_usage")  # of the server, in the order in which they are drawn
HEAT = ("heat", "prochot")

RowKey = tuple[str, str]  # server, load
Span = tuple[float, float]
Floats = NDArray[np.float64]
Values = list[float | None]


class Dot(NamedTuple):
    """A measured request."""

    draw: int  # what chooses it: as good as random, and always the same
    cell: str
    sent_s: float  # within its cell
    took_s: float  # until the answer was whole, or until it failed
    ttft_s: float | None
    error: str | None


def thinned(dots: Iterable[Dot], number: int = MAX_DOTS) -> list[Dot]:
    """So many dots at most: the slowest, some failed ones, others at random.

    What is chosen from what was chosen of several parts is what would be chosen from all of them.
    """
    different = set(dots)
    good = {dot for dot in different if dot.error is None}
    failed = heapq.nsmallest(number // 4, different - good, key=lambda dot: dot[:4])
    slowest = heapq.nlargest(SLOWEST, good, key=lambda dot: (dot.took_s, *dot[:4]))
    others = good.difference(slowest)
    return [*failed, *slowest, *heapq.nsmallest(number - len(failed) - len(slowest), others, key=lambda dot: dot[:4])]


class RowData(Struct):
    """Measured requests of one row."""

    latencies: Latencies = field(default_factory=Latencies)  # of the successful ones
    dots: list[Dot] = []  # of all, or those that were chosen
    count: int = 0  # successful ones with a known time of sending
    failures: int = 0  # failed ones likewise

    def add_dot(self, request: Request, sent_s: float) -> None:
        draw = crc32(request.id.encode()) * 2654435761 & 0xFFFFFFFF
        took_s = request.ended_s if request.error is not None else derive.e2e_s(request) or 0.0
        self.dots.append(Dot(draw, request.cell, sent_s, took_s, derive.ttft_s(request), request.error))
        self.count += request.error is None
        self.failures += request.error is not None


class ChartFailures(NamedTuple):
    """How often one kind of failure came in a cell, and when first."""

    count: int
    first_s: float


class CellData(Struct):
    """Requests of one cell over time. Seconds count from the start of the cell's first load process."""

    # How much fell into each bin of FINE_S: requests "sent" and "ended", "tokens"; of measured requests of an open
    # loop, when each was "due" and "gone".
    bins: Counter[tuple[str, int]] = field(default_factory=Counter)
    failed_s: Latencies = field(default_factory=Latencies)  # when measured requests failed, by kind
    first_measured_s: float = float("inf")
    first_sent_s: float = float("inf")
    last_ended_s: float = 0.0
    arrivals_s: "array[float]" = field(default_factory=doubles)  # of tokens, after the request was sent
    streams: list[tuple[float, int, float]] = []  # of each request: sent, number of arrivals, tokens of each

    @property
    def zero_s(self) -> float:
        """The first measured request, or the first of all where none was measured."""
        return self.first_measured_s if self.first_measured_s < float("inf") else self.first_sent_s

    def add(self, request: Request, sent: float) -> None:
        """Count a request that was sent in that second of the cell."""
        sent = max(0.0, sent)
        ended = sent + request.ended_s
        self.bins["sent", _bin(sent)] += 1
        self.bins["ended", _bin(ended)] += 1
        self.first_sent_s = min(sent, self.first_sent_s)
        self.last_ended_s = max(ended, self.last_ended_s)
        if request.phase == "measured":
            self.first_measured_s = min(sent, self.first_measured_s)
            if request.scheduled_s is not None:
                self.bins["due", _bin(sent + request.scheduled_s)] += 1
                self.bins["gone", _bin(sent)] += 1
        # Without streaming all tokens come at the end; the tokens of a failed request are known by its chunks.
        arrivals = request.chunks_s or ([request.ended_s] if request.error is None else [])
        if request.output_tokens and arrivals:
            self.arrivals_s.fromlist(arrivals)
            self.streams.append((sent, len(arrivals), request.output_tokens / len(arrivals)))

    def bin_tokens(self) -> None:
        """Put the tokens of the requests so far into bins."""
        if not self.streams:
            return
        sent, sizes, each = (np.array(column) for column in zip(*self.streams, strict=True))
        at = np.array(self.arrivals_s) + np.repeat(sent, sizes)
        places = np.clip((at / FINE_S).astype(np.int64), 0, MAX_FINE - 1)
        first = int(places.min())
        tokens = np.bincount(places - first, weights=np.repeat(each, sizes))
        for place in np.flatnonzero(tokens):
            self.bins["tokens", first + int(place)] += float(tokens[place])  # type: ignore[assignment]
        self.arrivals_s, self.streams = doubles(), []

    def between(self, what: str, low: int, high: int) -> Floats:
        found = np.zeros(high - low)
        for (name, place), number in self.bins.items():
            if name == what and low <= place < high:
                found[place - low] = number
        return found


class ServerSamples(Struct):
    """Samples of one cell's server; None where one of them lacks the value."""

    at_s: list[float] = []
    values: dict[str, Values] = {}  # by gauge; those without any value are left out
    preempted: list[tuple[float, float]] = []  # when it was noticed, and how many since the sample before


class MachineSamples(Struct):
    """Samples of one cell's machine; None where one of them lacks the value."""

    at_s: list[float] = []
    panels: dict[str, dict[str, Values]] = {}  # panel -> name of a line -> its values; those without any are left out
    heat: list[tuple[float, float, str]] = []  # from when until when heat held a GPU back, and which
    drawn: int = 0  # GPUs
    left_out: int = 0  # GPUs that did not work for the server, or beyond MAX_GPUS


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
    failures: dict[str, ChartFailures]  # of measured requests by kind, the earliest first
    warmup_until_s: float | None  # None: no warm-up
    ends_s: float


class ChartData(Struct, frozen=True, kw_only=True):
    """Everything that the charts draw."""

    rows: dict[RowKey, RowData]
    timelines: list[Timeline]


def observe(folder: Path, run: Run) -> ChartData:
    """Read requests.jsonl, processes.jsonl, metrics.jsonl and telemetry.jsonl of a run, whatever state they are in."""
    # A cell that shows drift belongs to no row.
    keys = {cell.id: (cell.server, cell.load if cell.again is None else cell.id) for cell in plan(run.scenario)}
    marks = by_cell(read_marks(folder / "processes.jsonl"))
    windows = together(folder / "requests.jsonl", places_of(run, marks))
    clocks = {cell: Clock(marks.get(cell, [])) for cell in keys}
    rows: dict[RowKey, RowData] = {key: RowData() for key in keys.values()}
    cells: dict[str, CellData] = {}
    with reader(blocks_of(folder / "requests.jsonl")) as parts_of:
        for part_rows, part_cells in parts_of(partial(_observe, keys=keys, clocks=clocks, windows=windows)):
            for key, row in part_rows.items():
                add_up(rows[key], row)
                rows[key].dots = thinned(rows[key].dots)
            for name, cell in part_cells.items():
                add_up(cells.setdefault(name, CellData()), cell)
    for row in rows.values():
        row.dots = [dot._replace(sent_s=dot.sent_s - cells[dot.cell].first_measured_s) for dot in row.dots]
    scraped, watched = read_metrics(folder / "metrics.jsonl"), read_telemetry(folder / "telemetry.jsonl")
    timelines = []
    for name in keys:
        if name in cells:
            zero_s = clocks[name].wall_s(clocks[name].start_s + cells[name].zero_s) or 0.0
            server = server_samples(scraped.get(name, []), zero_s)
            timelines.append(_timeline(name, cells[name], server, machine_samples(watched.get(name, []), zero_s)))
    return ChartData(rows=rows, timelines=timelines)


def _observe(
    block: Block, keys: dict[str, RowKey], clocks: dict[str, Clock], windows: dict[str, Span]
) -> tuple[dict[RowKey, RowData], dict[str, CellData]]:
    rows: dict[RowKey, RowData] = {}
    cells: dict[str, CellData] = {}
    for request in requests_in(block, Lines()):
        name, key = request.cell, keys.get(request.cell)
        if key is None:
            continue
        axis_s = request.sent_s + clocks[name].offset_s(request.process)
        joined, sent_s = clocks[name].knows(request.process), axis_s - clocks[name].start_s
        if joined:
            cells.setdefault(name, CellData()).add(request, sent_s)
        if not is_counted(request, axis_s, windows.get(name)) or request.error == "abandoned":
            continue
        row = rows.setdefault(key, RowData())
        if joined:
            row.add_dot(request, sent_s)
            if request.error is not None and request.error != "unfinished":
                cells[name].failed_s[request.error].append(sent_s + request.ended_s)
        if request.error is None:
            row.latencies.add(request, [column.field for column in LIVE])
    for row in rows.values():
        row.dots = thinned(row.dots)
    for cell in cells.values():
        cell.bin_tokens()
    return rows, cells


def distribution(values: Iterable[float]) -> tuple[list[float], list[float]]:
    """The empirical distribution function: values in rising order and the share of the sample up to each.

    Every point of a small sample; of a large one MAX_POINTS of them, the least and the most included.
    """
    ordered = np.sort(np.asarray(list(values), dtype=np.float64))
    size = len(ordered)
    places = np.arange(size)
    if size > MAX_POINTS:
        places = np.unique(np.linspace(0, size - 1, MAX_POINTS).round().astype(np.int64))
    shares = (places + 1) / size if size else places
    return [float(v) for v in ordered[places]], [round(float(s), 5) for s in shares]


def _timeline(name: str, cell: CellData, server: ServerSamples, machine: MachineSamples) -> Timeline:
    start, zero = cell.first_sent_s, cell.zero_s
    low, high = _bin(start), _bin(cell.last_ended_s) + 1
    group = _bins_per_step(high - low)
    edges, lengths, middles = _steps(low, high, group, zero)
    in_flight = np.cumsum(cell.between("sent", low, high) - cell.between("ended", low, high))
    arrivals_at, asked, gone = _arrivals(cell, low, high, zero)
    return Timeline(
        cell=name,
        step_s=group * FINE_S,
        at_s=middles,
        tok_s=[round(float(r), 1) for r in np.add.reduceat(cell.between("tokens", low, high), edges) / lengths],
        in_flight=[int(n) for n in np.maximum.reduceat(in_flight, edges)],
        arrivals_at_s=arrivals_at,
        asked_s=asked,
        gone_s=gone,
        server=server,
        machine=machine,
        failures={
            kind: ChartFailures(len(times), round(min(times) - zero, 2))
            for kind, times in sorted(cell.failed_s.items(), key=lambda item: min(item[1]))
        },
        warmup_until_s=None if zero == start else round(start - zero, 2),
        ends_s=round(cell.last_ended_s - zero, 2),
    )


def _arrivals(cell: CellData, low: int, high: int, zero: float) -> tuple[list[float], list[float], list[float]]:
    """Middles of steps, requests due and sent a second in each; nothing in a closed loop. A step has some arrivals."""
    if not any(what == "due" for what, _ in cell.bins):
        return [], [], []
    group = max(MIN_ARRIVALS, _bins_per_step(COARSER * (high - low)))
    edges, lengths, middles = _steps(low, high, group, zero)
    due, gone = (
        [round(float(rate), 3) for rate in np.add.reduceat(cell.between(name, low, high), edges) / lengths]
        for name in ("due", "gone")
    )
    return middles, due, gone


def _bin(at_s: float) -> int:
    return max(0, min(int(at_s / FINE_S), MAX_FINE - 1))


def _steps(low: int, high: int, group: int, zero: float) -> tuple[NDArray[np.int64], Floats, list[float]]:
    """Steps of `group` fine bins: where each begins, counted from `low`, how long it is, and its middle."""
    edges = np.arange(0, high - low, group)
    lengths = np.diff(np.append(edges, high - low)) * FINE_S
    return edges, lengths, [round(float(t), 2) for t in (low + edges) * FINE_S + lengths / 2 - zero]


def _bins_per_step(bins: int) -> int:
    """The least round number of fine bins that keeps a line within MAX_BINS points."""
    for group in (1, 2, 5, 10, 20, 50, 100, 300, 600, 1200, 3000, 6000, 18000, 36000):
        if bins <= group * MAX_BINS:
            return group
    return -(-bins // MAX_BINS)


def _every(samples: Sequence[object]) -> int:
    """Every how many samples one is drawn, for about 2 * MAX_BINS at most."""
    return max(1, -(-len(samples) // (2 * MAX_BINS)))


def server_samples(scrapes: Sequence[MetricsSample], zero_s: float) -> ServerSamples:
    """The gauges of one cell in metrics.jsonl; times count from `zero_s`."""
    known = [scrape for scrape in scrapes if any(gauge in scrape.values for gauge in GAUGES)]
    counted = [(one.wall_s, one.values["preemptions"]) for one in scrapes if "preemptions" in one.values]
    drawn = known[:: _every(known)]
    return ServerSamples(
        at_s=[round(scrape.wall_s - zero_s, 2) for scrape in drawn],
        values={
            gauge: [scrape.values.get(gauge) for scrape in drawn]
            for gauge in GAUGES
            if any(gauge in scrape.values for scrape in known)
        },
        preempted=[
            (round(at - zero_s, 2), count - before) for (_, before), (at, count) in pairwise(counted) if count > before
        ],
    )


def machine_samples(samples: Sequence[TelemetrySample], zero_s: float) -> MachineSamples:
    """The lines of one cell in telemetry.jsonl; times count from `zero_s`."""
    names = sorted({name for one in samples for name in one.gpus})
    used = [name for name in names if name in serving(samples)] or names
    drawn, every = used[:MAX_GPUS], _every(samples)
    panels: dict[str, dict[str, Values]] = {}
    for name in drawn:
        for panel, lines in _lines(samples, name, len(drawn)).items():
            for what, line in lines.items():
                if any(value is not None for value in line):
                    label = what if len(drawn) == 1 else name if len(lines) == 1 else f"{name} {what}"
                    panels.setdefault(panel, {})[label] = line[::every]
    return MachineSamples(
        at_s=[round(one.wall_s - zero_s, 2) for one in samples[::every]],
        panels=panels,
        heat=[span for name in used for span in _heat(samples, name, zero_s)],
        drawn=len(drawn),
        left_out=len(names) - len(drawn),
    )


def _lines(samples: Sequence[TelemetrySample], name: str, gpus: int) -> dict[str, dict[str, Values]]:
    seen = [one.gpus.get(name) for one in samples]

    def line(value: Callable[[GpuSample], float | None]) -> Values:
        return [None if gpu is None else value(gpu) for gpu in seen]

    # On a card of its own, GTT is only a window to the machine's memory: a line near zero says nothing.
    gtt = line(lambda gpu: gpu.gtt_used_bytes)
    big = max((value or 0.0 for value in gtt), default=0.0) > 2**30
    labels = dict.fromkeys(label for gpu in seen if gpu is not None for label in gpu.temperatures_c)
    sensors = {label: line(lambda gpu, label=label: gpu.temperatures_c.get(label)) for label in labels}  # type: ignore[misc]
    if gpus > 1:  # three lines for each would be no picture
        sensors = {"hottest": line(lambda gpu: max(gpu.temperatures_c.values(), default=None))}
    return {
        "busy": {"busy": line(lambda gpu: gpu.busy_percent)},
        "memory": {"VRAM": line(lambda gpu: gpu.vram_used_bytes), **({"GTT": gtt} if big else {})},
        "power": {"power": line(lambda gpu: gpu.power_w)},
        "temperature": sensors,
        "clock": {"GPU": line(lambda gpu: gpu.clock_mhz)},
    }


def _heat(samples: Sequence[TelemetrySample], name: str, zero_s: float) -> list[tuple[float, float, str]]:
    """Spans of adjacent samples in which heat held the GPU back."""
    spans: list[tuple[float, float]] = []
    for before, one in pairwise(samples):
        held = one.gpus[name].held_back if name in one.gpus else None
        if held and any(held.get(kind) for kind in HEAT):
            adjacent = bool(spans) and spans[-1][1] == before.wall_s
            start = spans.pop()[0] if adjacent else before.wall_s
            spans.append((start, one.wall_s))
    return [(round(start - zero_s, 2), round(end - zero_s, 2), name) for start, end in spans]
