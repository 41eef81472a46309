"""What the charts need from a run's records, read once as a stream and reduced on the way.

The size of the result depends on the number of rows and cells, never on the number of requests.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from harness import derive
from harness.manifest import Run
from harness.metrics import read_samples
from harness.plan import plan
from harness.records import Request, read_marks, read_requests

Times = NDArray[np.float64]

FINE_S = 0.1  # width of the bins that records are counted in while reading
MOST_BINS = 240  # points of a timeline's line
MOST_POINTS = 200  # points of a distribution's line
EXAMPLES = 3  # messages kept for each kind of error
MOST_FINE = 4_000_000  # fine bins of a cell, over four days: what a record with an absurd time falls into
FLUSH = 200_000  # chunk times held before they are counted


class Sample(Struct):
    """Latencies of one row's successful measured requests, in seconds."""

    ttft_s: list[float] = []
    tpot_s: list[float] = []
    e2e_s: list[float] = []


class Fault(Struct):
    """A kind of error in one row."""

    count: int = 0
    messages: list[str] = []


class ServerSamples(Struct):
    """What the server's metrics said during a cell; None where it has no such metric."""

    at_s: list[float] = []
    running: list[float | None] = []
    waiting: list[float | None] = []


class Timeline(Struct, frozen=True, kw_only=True):
    """One cell over time. Zero is the first measured request; times in seconds."""

    cell: str
    step_s: float
    at_s: list[float]  # middle of each step
    tok_s: list[float]
    in_flight: list[int]  # requests sent and not ended, at the end of each step
    server: ServerSamples
    warmup_until_s: float | None  # None: no warm-up
    ends_s: float


class Observed(Struct, frozen=True, kw_only=True):
    """Everything that the charts draw."""

    samples: dict[tuple[str, str], Sample]  # by server and load
    faults: dict[tuple[str, str], dict[str, Fault]]
    timelines: list[Timeline]
    without_usage: int  # successful requests whose tokens the server did not report
    damaged_lines: int


class _Counts:
    """The bins of one cell while its records are read. Seconds count from the start of its first load process."""

    def __init__(self, zero_s: float) -> None:
        self.zero_s = zero_s
        self.tokens: Times = np.zeros(1024)
        self.change = np.zeros(1024, dtype=np.int64)
        self.first_measured_s: float | None = None
        self.first_sent_s: float | None = None
        self.last_ended_s = 0.0
        self._times: list[float] = []
        self._weights: list[float] = []

    def add(self, request: Request, offset_s: float) -> None:
        """Count a request; `offset_s` takes its process's clock to seconds of this cell."""
        sent = max(0.0, request.sent_s + offset_s)
        ended = sent + request.ended_s
        self._hold(_bin(ended))
        self.change[_bin(sent)] += 1
        self.change[_bin(ended)] -= 1
        self.first_sent_s = sent if self.first_sent_s is None else min(sent, self.first_sent_s)
        self.last_ended_s = max(self.last_ended_s, ended)
        if request.phase == "measured" and (self.first_measured_s is None or sent < self.first_measured_s):
            self.first_measured_s = sent
        # Without streaming all tokens come at the end; what a failed request had been given is known by its chunks.
        arrivals = request.chunks_s or ([request.ended_s] if request.error is None else [])
        if request.output_tokens and arrivals:
            self._hold(_bin(sent + arrivals[-1]))
            self._times += [sent + at for at in arrivals]
            self._weights += [request.output_tokens / len(arrivals)] * len(arrivals)
            if len(self._times) > FLUSH:
                self.flush()

    def flush(self) -> None:
        if self._times:
            places = np.minimum((np.asarray(self._times) / FINE_S).astype(np.int64), len(self.tokens) - 1)
            self.tokens += np.bincount(places, weights=self._weights, minlength=len(self.tokens))
            self._times.clear()
            self._weights.clear()

    def _hold(self, place: int) -> None:
        """Make room for a bin."""
        if place >= len(self.tokens):
            more = max(place + 1 - len(self.tokens), len(self.tokens))
            self.tokens = np.pad(self.tokens, (0, more))
            self.change = np.pad(self.change, (0, more))


def _bin(at_s: float) -> int:
    return min(int(at_s / FINE_S), MOST_FINE - 1)


def observe(folder: Path, run: Run) -> Observed:
    """Read requests.jsonl, processes.jsonl and metrics.jsonl of a run, whatever state they are in."""
    cells = {cell.id: (cell.server, cell.load) for cell in plan(run.scenario)}
    anchors: dict[tuple[str, int], float] = {}
    counts: dict[str, _Counts] = {}
    for mark in read_marks(folder / "processes.jsonl"):
        if mark.event == "start":
            anchors[mark.cell, mark.process] = mark.wall_s - mark.monotonic_s
            count = counts.setdefault(mark.cell, _Counts(mark.wall_s))
            count.zero_s = min(count.zero_s, mark.wall_s)
    samples: dict[tuple[str, str], Sample] = defaultdict(Sample)
    faults: dict[tuple[str, str], dict[str, Fault]] = defaultdict(dict)
    damaged: list[int] = []
    without_usage = 0
    for request in read_requests(folder / "requests.jsonl", damaged):
        row = cells.get(request.cell)
        if row is None:
            continue
        anchor = anchors.get((request.cell, request.process))
        if anchor is not None:
            counts[request.cell].add(request, anchor - counts[request.cell].zero_s)
        if request.phase != "measured":
            continue
        if request.error is not None:
            _note_fault(faults[row].setdefault(request.error, Fault()), request)
        else:
            without_usage += request.output_tokens is None
            _note_latencies(samples[row], request)
    scraped = _server_samples(folder / "metrics.jsonl")
    return Observed(
        samples=dict(samples),
        faults={row: faults[row] for row in dict.fromkeys(cells.values()) if row in faults},
        timelines=[
            _timeline(name, counts[name], scraped.get(name, ServerSamples()))
            for name in cells
            if name in counts and counts[name].first_sent_s is not None
        ],
        without_usage=without_usage,
        damaged_lines=len(damaged),
    )


def _note_fault(fault: Fault, request: Request) -> None:
    fault.count += 1
    if request.message and len(fault.messages) < EXAMPLES and request.message not in fault.messages:
        fault.messages.append(request.message)


def _note_latencies(sample: Sample, request: Request) -> None:
    for values, value in (
        (sample.ttft_s, derive.ttft_s(request)),
        (sample.tpot_s, derive.tpot_s(request)),
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


def _timeline(name: str, count: _Counts, server: ServerSamples) -> Timeline:
    count.flush()
    start = count.first_sent_s or 0.0
    zero = count.first_measured_s if count.first_measured_s is not None else start
    low = int(start / FINE_S)
    high = _bin(count.last_ended_s) + 1
    group = _bins_per_step(high - low)
    in_flight = np.cumsum(count.change)[low:high]
    tokens = count.tokens[low:high]
    edges = np.arange(0, len(tokens), group)
    lengths = np.diff(np.append(edges, len(tokens))) * FINE_S
    rates = np.add.reduceat(tokens, edges) / lengths if len(tokens) else tokens
    middles = (low + edges) * FINE_S + lengths / 2 - zero
    last_of_each = np.minimum(edges + group, len(in_flight)) - 1
    shift = count.zero_s + zero
    keep = _thin(len(server.at_s))
    return Timeline(
        cell=name,
        step_s=group * FINE_S,
        at_s=[round(float(t), 2) for t in middles],
        tok_s=[round(float(r), 1) for r in rates],
        in_flight=[int(n) for n in in_flight[last_of_each]] if len(in_flight) else [],
        server=ServerSamples(
            [round(server.at_s[i] - shift, 2) for i in keep],
            [server.running[i] for i in keep],
            [server.waiting[i] for i in keep],
        ),
        warmup_until_s=None if zero == start else round(start - zero, 2),
        ends_s=round(count.last_ended_s - zero, 2),
    )


def _bins_per_step(bins: int) -> int:
    """The least round number of fine bins that keeps a line within MOST_BINS points."""
    for group in (1, 2, 5, 10, 20, 50, 100, 300, 600, 1200, 3000, 6000, 18000, 36000):
        if bins <= group * MOST_BINS:
            return group
    return -(-bins // MOST_BINS)


def _thin(size: int) -> list[int]:
    step = max(1, -(-size // (2 * MOST_BINS)))
    return list(range(0, size, step))


def _server_samples(path: Path) -> dict[str, ServerSamples]:
    """Running and waiting requests out of metrics.jsonl, by cell."""
    result = {}
    for cell, scrapes in read_samples(path).items():
        known = [scrape for scrape in scrapes if "running" in scrape.values or "waiting" in scrape.values]
        result[cell] = ServerSamples(
            [scrape.wall_s for scrape in known],
            [scrape.values.get("running") for scrape in known],
            [scrape.values.get("waiting") for scrape in known],
        )
    return result
