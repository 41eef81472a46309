"""The data of the charts: the latencies and dots of each row, and each cell over time."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from harness.analysis.charted import FINE_S, ChartCounts, Dot, bin_index, thin_dots
from harness.analysis.summarize import Summarized, has_only_summary, summarize_with_counts
from harness.columns import LIVE
from harness.judge.slo_rule import LatencySample, kaplan_meier
from harness.rundir.manifest import Run, read_run
from harness.rundir.samples import GpuSample, MetricsSample, TelemetrySample, busy_gpus
from harness.scenario.plan import plan

MAX_BINS = 240  # points of a timeline's line
MAX_POINTS = 200  # points of a distribution's line
MAX_GPUS = 8  # that are drawn: there are eight colours
GAUGES = ("running", "waiting", "kv_usage")  # of the server, in the order in which they are drawn
HEAT = ("heat", "prochot")

RowKey = tuple[str, str]  # server, load
Floats = NDArray[np.float64]
Values = list[float | None]


def _memory_bytes(gpu: GpuSample) -> float | None:
    """VRAM and GTT, which is where an APU has its model."""
    known = [size for size in (gpu.vram_used_bytes, gpu.gtt_used_bytes) if size is not None]
    return sum(known) if known else None


# By panel of the timeline what it draws of a GPU.
READINGS: dict[str, Callable[[GpuSample], float | None]] = {
    "busy": lambda gpu: gpu.busy_percent,
    "memory": _memory_bytes,
    "power": lambda gpu: gpu.power_w,
    "temperature": lambda gpu: max(gpu.temperatures_c.values(), default=None),
    "clock": lambda gpu: gpu.clock_mhz,
}


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
    return chart_data(read_run(folder), summarize_with_counts(folder, charted=True))


def chart_data(run: Run, summarized_run: Summarized) -> ChartData:
    """The chart data of a run, from the counts of which its summary was made."""
    rows: dict[RowKey, RowData] = {}
    timelines = []
    for cell in plan(run.scenario):
        counted = summarized_run.tallies.get(cell.id)
        if counted is None or counted.chart is None:
            continue
        chart, clock = counted.chart, counted.clock
        if chart.last_ended_s:
            zero_s = clock.wall_s(clock.start_s + chart.start_s) or 0.0
            server = server_samples(summarized_run.metrics.get(cell.id, []), zero_s)
            machine = machine_samples(summarized_run.telemetry.get(cell.id, []), zero_s)
            timelines.append(_timeline(cell.id, chart, server, machine))
        if cell.again is None:  # a cell that measures drift belongs to no row
            row = rows.setdefault((cell.server, cell.load), RowData())
            for column in LIVE:
                row.latencies.setdefault(column.field, []).append(counted.sample(column.field))
            dots = (dot._replace(sent_s=dot.sent_s - chart.first_measured_s) for dot in chart.dots)
            row.dots = thin_dots([*row.dots, *dots])
            row.count += chart.succeeded
            row.failures += chart.failures
    return ChartData(rows=rows, timelines=timelines)


def distribution_points(samples: Sequence[LatencySample]) -> tuple[list[float], list[float]]:
    """The distribution function (Kaplan-Meier): values in rising order and the share of the requests up to each.

    A large sample is thinned to MAX_POINTS points, the smallest and the largest included.
    """
    times, shares = kaplan_meier(samples)
    places = np.arange(len(times))
    if len(times) > MAX_POINTS:
        places = np.unique(np.linspace(0, len(times) - 1, MAX_POINTS).round().astype(np.int64))
    return [float(v) for v in times[places]], [round(float(s), 5) for s in shares[places]]


def _timeline(name: str, cell: ChartCounts, server: ServerSamples, machine: MachineSamples) -> Timeline:
    start, zero = cell.first_sent_s, cell.start_s
    low, high = bin_index(start), bin_index(cell.last_ended_s) + 1
    group = max(1, -(-(high - low) // MAX_BINS))  # fine bins of a step
    edges = np.arange(0, high - low, group)
    lengths = np.diff(np.append(edges, high - low)) * FINE_S
    in_flight = np.cumsum(cell.bin_counts("sent", low, high) - cell.bin_counts("ended", low, high))
    return Timeline(
        cell=name,
        step_s=group * FINE_S,
        at_s=[round(float(middle), 2) for middle in (low + edges) * FINE_S + lengths / 2 - zero],
        tok_s=[round(float(r), 1) for r in np.add.reduceat(cell.bin_counts("tokens", low, high), edges) / lengths],
        in_flight=[int(n) for n in np.maximum.reduceat(in_flight, edges)],
        server=server,
        machine=machine,
        failures={
            kind: ChartFailures(len(times), round(min(times) - zero, 2))
            for kind, times in sorted(cell.failed_s.items(), key=lambda item: min(item[1]))
        },
        warmup_until_s=None if zero == start else round(start - zero, 2),
        ends_s=round(cell.last_ended_s - zero, 2),
    )


def _sampling_step(samples: Sequence[object]) -> int:
    """The step between samples that are drawn, so that they are 2 * MAX_BINS at most."""
    return max(1, -(-len(samples) // (2 * MAX_BINS)))


def server_samples(scrapes: Sequence[MetricsSample], zero_s: float) -> ServerSamples:
    """The gauges of one cell in metrics.jsonl; times count from `zero_s`."""
    known = [scrape for scrape in scrapes if any(gauge in scrape.values for gauge in GAUGES)]
    drawn = known[:: _sampling_step(known)]
    return ServerSamples(
        at_s=[round(scrape.wall_s - zero_s, 2) for scrape in drawn],
        values={
            gauge: [scrape.values.get(gauge) for scrape in drawn]
            for gauge in GAUGES
            if any(gauge in scrape.values for scrape in known)
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
