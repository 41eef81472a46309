"""The data of the charts: the latencies and dots of each row, and each cell over time."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from harness.base.metrics import LIVE
from harness.numbers import formulas
from harness.numbers.latencies import latency_sample
from harness.numbers.share_test import LatencySample, kaplan_meier
from harness.numbers.summarize import has_only_summary
from harness.records.columns import FINE_S, MAX_FINE, Rows
from harness.records.records import CUT
from harness.records.run_data import CellData, RunData, load
from harness.records.samples import GpuSample, MetricsSample, TelemetrySample, busy_gpus
from harness.scenario.plan import plan

MAX_BINS = 240  # points of a timeline's line
MAX_POINTS = 200  # points of a distribution's line
MAX_DOTS = 600  # requests drawn of a row; at most a quarter of them failed
SLOWEST = 20  # of the dots: the slowest requests, which are always drawn
MAX_GPUS = 8  # that are drawn: there are eight colours
GAUGES = ("running", "waiting", "kv_usage")  # of the server, in the order in which they are drawn
HEAT = ("heat", "prochot")

RowKey = tuple[str, str]  # server, load
Floats = NDArray[np.float64]
Values = list[float | None]


def _memory_bytes(gpu: GpuSample) -> float | None:
    """VRAM and GTT, which is where an APU has its model."""
    sizes = [size for size in (gpu.vram_used_bytes, gpu.gtt_used_bytes) if size is not None]
    return sum(sizes) if sizes else None


# By panel of the timeline what it draws of a GPU.
READINGS: dict[str, Callable[[GpuSample], float | None]] = {
    "busy": lambda gpu: gpu.busy_percent,
    "memory": _memory_bytes,
    "power": lambda gpu: gpu.power_w,
    "temperature": lambda gpu: max(gpu.temperatures_c.values(), default=None),
    "clock": lambda gpu: gpu.clock_mhz,
}


class Dot(NamedTuple):
    """A measured request."""

    cell: str
    sent_s: float  # since the first measured request of its cell
    took_s: float  # until the end of the answer or the failure
    error: str | None


class RowData(Struct):
    """Measured requests of one row."""

    latencies: dict[str, list[LatencySample]] = {}  # by field of Numbers, one sample a cell
    dots: list[Dot] = []
    count: int = 0  # successful ones with a known time of sending
    failures: int = 0  # failed ones likewise


class ChartFailures(Struct, frozen=True):
    """The failures of one kind in a cell."""

    count: int
    first_s: float  # the time of the first


class ServerSamples(Struct):
    """Samples of one cell's server; None where one of them lacks the value."""

    at_s: list[float] = []
    values: dict[str, Values] = {}  # by gauge; those without any value are left out


class MachineSamples(Struct):
    """Samples of one cell's machine; None where one of them lacks the value."""

    at_s: list[float] = []
    panels: dict[str, dict[str, Values]] = {}  # by panel and GPU; lines without values are left out
    heat: dict[str, tuple[float, float]] = {}  # by GPU that heat throttled: since when, and for how long in all


class Timeline(Struct, frozen=True, kw_only=True):
    """One cell over time. Zero is the first measured request; times in seconds."""

    cell: str
    step_s: float
    at_s: list[float]  # middle of each step
    tok_s: list[float]
    in_flight: list[int]  # the maximum in each step
    server: ServerSamples
    machine: MachineSamples = field(default_factory=MachineSamples)
    failures: dict[str, ChartFailures]  # of measured requests by kind, the earliest first
    warmup_until_s: float | None  # None: no warm-up
    ends_s: float


class ChartData(Struct, frozen=True, kw_only=True):
    """Everything that the charts draw."""

    rows: dict[RowKey, RowData]
    timelines: list[Timeline]


def read_chart_data(folder: Path) -> ChartData:
    """The chart data of a run, also of one that has not ended; none of a filed run, which has no records."""
    if has_only_summary(folder):
        return ChartData(rows={}, timelines=[])
    return chart_data(load(folder, charted=True))


def chart_data(data: RunData) -> ChartData:
    """The chart data of a run, which was read with `charted`."""
    rows: dict[RowKey, RowData] = {}
    timelines = []
    for cell in plan(data.run.scenario):
        if (cell_data := data.cells.get(cell.id)) is None:
            continue
        timed_rows = _with_known_times(cell_data, cell_data.rows)
        if len(timed_rows):
            zero_s = cell_data.clock.wall_s(_zero_s(timed_rows)) or 0.0
            server = server_samples(data.metrics.get(cell.id, []), zero_s)
            machine = machine_samples(data.telemetry.get(cell.id, []), zero_s)
            timelines.append(_timeline(cell.id, cell_data, timed_rows, server, machine))
        if cell.again is None:  # a cell that measures drift belongs to no row
            row = rows.setdefault((cell.server, cell.load), RowData())
            for latency in LIVE:
                row.latencies.setdefault(latency.name, []).append(latency_sample(cell_data, latency.name))
            counted = drawn_rows(cell_data)
            row.dots = thin_dots([*row.dots, *cell_dots(cell.id, counted)], MAX_DOTS)
            row.count += int(counted.good.sum())
            row.failures += int((~counted.good).sum())
    return ChartData(rows=rows, timelines=timelines)


def _with_known_times(cell: CellData, rows: Rows) -> Rows:
    """The rows of load processes whose clock is known."""
    processes = [process for process in np.unique(rows.process).tolist() if cell.clock.knows(process)]
    return rows.where(np.isin(rows.process, processes))


def drawn_rows(cell: CellData) -> Rows:
    """The counted requests that are drawn. Those that the end of the load or their user cut have not failed, and how
    long they would have taken is not known.
    """
    rows = _with_known_times(cell, cell.counted)
    return rows.where(~rows.error.is_in(*CUT))


def _zero_s(rows: Rows) -> float:
    """When the first measured request was sent, or the first request where none was measured."""
    return float((rows.sent_s[rows.measured] if rows.measured.any() else rows.sent_s).min())


def cell_dots(cell: str, rows: Rows) -> list[Dot]:
    """The measured requests of a cell, thinned."""
    took_s = np.where(rows.good, formulas.e2e(rows), rows.ended_s)
    good, failed = np.flatnonzero(rows.good), np.flatnonzero(~rows.good)
    slowest = good[np.argsort(took_s[good], kind="stable")[::-1][:SLOWEST]]
    drawn = np.concatenate([_spread(failed, MAX_DOTS // 4), slowest, _spread(good, MAX_DOTS)])
    start_s = float(rows.sent_s.min()) if len(rows) else 0.0
    texts = rows.error.texts
    return [
        Dot(cell, float(rows.sent_s[at]) - start_s, float(took_s[at]), texts[int(rows.error.codes[at])])
        for at in dict.fromkeys(drawn.tolist())
    ]


def _spread(places: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """At most so many of these places, chosen at random, but always the same."""
    return (
        places if len(places) <= number else np.sort(np.random.default_rng(len(places)).choice(places, number, False))
    )


def thin_dots(dots: Sequence[Dot], number: int) -> list[Dot]:
    """Select at most `number` dots: the slowest, some failed ones, others at random."""
    good = sorted((dot for dot in dots if dot.error is None), key=lambda dot: -dot.took_s)
    failed = [dot for dot in dots if dot.error is not None]
    failed = [failed[at] for at in _spread(np.arange(len(failed)), number // 4).tolist()]
    others = good[SLOWEST:]
    rest = max(0, number - len(failed) - len(good[:SLOWEST]))
    return [*failed, *good[:SLOWEST], *(others[at] for at in _spread(np.arange(len(others)), rest).tolist())]


def distribution_points(samples: Sequence[LatencySample]) -> tuple[list[float], list[float]]:
    """The distribution function (Kaplan-Meier): values in rising order and the share of the requests up to each.

    A large sample is thinned to MAX_POINTS points, the smallest and the largest included.
    """
    times, shares = kaplan_meier(samples)
    places = np.arange(len(times))
    if len(times) > MAX_POINTS:
        places = np.unique(np.linspace(0, len(times) - 1, MAX_POINTS).round().astype(np.int64))
    return [float(v) for v in times[places]], [round(float(s), 5) for s in shares[places]]


def _timeline(name: str, cell: CellData, rows: Rows, server: ServerSamples, machine: MachineSamples) -> Timeline:
    axis_s, zero = cell.clock.start_s, _zero_s(rows) - cell.clock.start_s
    sent_s = np.maximum(0.0, rows.sent_s - axis_s)
    ended_s = sent_s + rows.ended_s
    start, ends = float(sent_s.min()), float(ended_s.max())
    low, high = _bin_of(start), _bin_of(ends) + 1
    group = max(1, -(-(high - low) // MAX_BINS))  # fine bins of a step
    edges = np.arange(0, high - low, group)
    lengths = np.diff(np.append(edges, high - low)) * FINE_S
    in_flight = np.cumsum(_count_bins(sent_s, low, high) - _count_bins(ended_s, low, high))
    tokens = np.zeros(high - low)
    for part in cell.tokens:
        first, last = max(low, part.first), min(high, part.first + len(part.counts))
        tokens[first - low : max(first, last) - low] += part.counts[first - part.first : max(first, last) - part.first]
    failed = drawn_rows(cell)
    failed = failed.where(~failed.good)
    failed_s = failed.sent_s + failed.ended_s - axis_s - zero
    kinds = {kind: failed_s[failed.error.is_in(kind)] for kind in failed.error.counts()}
    return Timeline(
        cell=name,
        step_s=group * FINE_S,
        at_s=[round(float(middle), 2) for middle in (low + edges) * FINE_S + lengths / 2 - zero],
        tok_s=[round(float(r), 1) for r in np.add.reduceat(tokens, edges) / lengths],
        in_flight=[int(n) for n in np.maximum.reduceat(in_flight, edges)],
        server=server,
        machine=machine,
        failures={
            kind: ChartFailures(len(times), round(float(times.min()), 2))
            for kind, times in sorted(kinds.items(), key=lambda item: float(item[1].min()))
        },
        warmup_until_s=None if zero == start else round(start - zero, 2),
        ends_s=round(ends - zero, 2),
    )


def _bin_of(at_s: float) -> int:
    return max(0, min(int(at_s / FINE_S), MAX_FINE - 1))


def _count_bins(at_s: Floats, low: int, high: int) -> NDArray[np.int64]:
    """The number of times in each bin from `low` up to `high`, which is excluded."""
    bins = np.clip((at_s / FINE_S).astype(np.int64), 0, MAX_FINE - 1)
    return np.bincount(bins - low, minlength=high - low)


def _sampling_step(samples: Sequence[object]) -> int:
    """The step between samples that are drawn, so that they are 2 * MAX_BINS at most."""
    return max(1, -(-len(samples) // (2 * MAX_BINS)))


def server_samples(scrapes: Sequence[MetricsSample], zero_s: float) -> ServerSamples:
    """The gauges of one cell in metrics.jsonl; times count from `zero_s`."""
    measured = [scrape for scrape in scrapes if any(gauge in scrape.values for gauge in GAUGES)]
    drawn = measured[:: _sampling_step(measured)]
    return ServerSamples(
        at_s=[round(scrape.wall_s - zero_s, 2) for scrape in drawn],
        values={
            gauge: [scrape.values.get(gauge) for scrape in drawn]
            for gauge in GAUGES
            if any(gauge in scrape.values for scrape in measured)
        },
    )


def machine_samples(samples: Sequence[TelemetrySample], zero_s: float) -> MachineSamples:
    """The GPUs of one cell in telemetry.jsonl that worked for its server; times count from `zero_s`."""
    names = sorted({name for sample in samples for name in sample.gpus})
    used = [name for name in names if name in busy_gpus(samples)] or names
    drawn = samples[:: _sampling_step(samples)]
    panels: dict[str, dict[str, Values]] = {}
    for panel, reading in READINGS.items():
        for name in used[:MAX_GPUS]:
            line = [reading(sample.gpus[name]) if name in sample.gpus else None for sample in drawn]
            if any(value is not None for value in line):
                panels.setdefault(panel, {})[name] = line
    return MachineSamples(
        at_s=[round(sample.wall_s - zero_s, 2) for sample in drawn],
        panels=panels,
        heat={name: heat for name in used if (heat := _find_heat(samples, name, zero_s)) is not None},
    )


def _find_heat(samples: Sequence[TelemetrySample], name: str, zero_s: float) -> tuple[float, float] | None:
    """Since when, and for how long in all, heat throttled the GPU; None: never."""
    spans = []
    for before, sample in pairwise(samples):
        limits = sample.gpus[name].held_back if name in sample.gpus else None
        if limits and any(limits.get(kind) for kind in HEAT):
            spans.append((before.wall_s, sample.wall_s))
    if not spans:
        return None
    return round(spans[0][0] - zero_s, 2), round(sum(end - start for start, end in spans), 2)
