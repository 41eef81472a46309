"""Samples of a server's own metrics (metrics.jsonl) and of its machine (telemetry.jsonl), and what they say of a cell.

Machines are sampled by `harness.machine.telemetry`. What was not read, or could not be, is None and left out.
"""

import itertools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import requests
from prometheus_client.parser import text_string_to_metric_families

from harness.engines import engines
from harness.files import read_lines
from harness.rundir.records import Number, Seconds, Whole, append_sample, group_by_cell
from harness.summary import GpuLoad, MachineLoad, ServerLoad, median_of_known
from harness.trust import open_session

# What a sample of metrics keeps, under names of our own, whatever the server calls them:
#
# running, waiting    requests in the running batch, requests in the queue
# kv_usage            part of the KV cache in use, 0 to 1
# preemptions         counter
# prompt_tokens       counter; with vLLM tokens found in the prefix cache count too
# generated_tokens    counter
# prefix_queries      counter, tokens looked up in the prefix cache
# prefix_hits         counter, tokens found there
# queue_s             counter, seconds that finished requests waited for their first turn
# prefill_s           counter, seconds from there to their first token
# decode_s            counter, seconds from there to their last token
# timed_requests      counter, the requests that these three are of
# started_s           when the server's process started, Unix time
KEYS = (
    "running", "waiting", "kv_usage", "preemptions", "prompt_tokens", "generated_tokens", "prefix_queries",
    "prefix_hits", "queue_s", "prefill_s", "decode_s", "timed_requests", "started_s",
)  # fmt: skip
STAGES = ("queue_s", "prefill_s", "decode_s", "timed_requests")
COUNTERS = ("preemptions", "prompt_tokens", "generated_tokens", "prefix_queries", "prefix_hits", *STAGES)
_NOT_SUMMED = ("kv_usage", "started_s")  # over engines (data parallel): the most of any

_MAX_VALUE = 2.0**53  # beyond this a float does not count
_SAME_START_S = 0.5  # a restarted server needs longer than that


class MetricsSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    wall_s: Seconds  # when the server was asked
    cell: str
    values: dict[str, Number]  # what the server has of KEYS


def parse_metrics(text: str) -> dict[str, float]:
    """The values of KEYS in a text of the Prometheus format; of several names the first one found.

    Raises ValueError for anything else than that format, such as HTML.
    """
    found: dict[str, list[float]] = defaultdict(list)
    names_of = _metric_names()
    known = set(itertools.chain.from_iterable(names_of.values()))
    try:
        families = list(text_string_to_metric_families(text))
    except (ArithmeticError, LookupError, TypeError) as error:  # what its parser makes of some other texts
        raise ValueError(f"no metrics ({type(error).__name__})") from None
    for family in families:
        for sample in family.samples:
            # A counter may come without its suffix, depending on the version of the exporter.
            name = sample.name if sample.name in known else f"{sample.name}_total"
            if name in known and 0 <= sample.value <= _MAX_VALUE:  # NaN: not known yet
                found[name].append(float(sample.value))
    values = {}
    for key, names in names_of.items():
        numbers = next((found[name] for name in names if name in found), None)
        if numbers is not None:
            values[key] = max(numbers) if key in _NOT_SUMMED else sum(numbers)
    return values


@cache
def _metric_names() -> dict[str, list[str]]:
    """By key what servers call it: the engines' names, and one that all of them may have."""
    found = {key: [name for engine in engines() for name in engine.metrics.get(key, [])] for key in KEYS}
    return {**found, "started_s": ["process_start_time_seconds"]}


def fetch_metrics(
    source: str | Callable[[], str],
    api_key: str | None = None,
    *,
    session: requests.Session | None = None,
    timeout_s: float = 5.0,
) -> dict[str, float]:
    """Read a server's metrics once, from an address or from a function that gives the text.

    Raises requests.RequestException, OSError, ValueError where nothing usable came.
    """
    if not isinstance(source, str):
        return parse_metrics(source())
    response = (session or open_session(api_key)).get(source, timeout=timeout_s)
    if response.status_code != 200:
        raise OSError(f"HTTP {response.status_code}")
    return parse_metrics(response.content.decode("utf-8", "replace"))


class Scraper:
    """Reads a server's metrics into a file: at the start, each interval, and at the end.

    `source` is a URL, or a function that gives the text. A scrape that fails leaves a gap. Without a source it does
    nothing.
    """

    def __init__(
        self,
        source: str | Callable[[], str] | None,
        cell: str,
        path: Path,
        interval_s: float = 1.0,
        *,
        api_key: str | None = None,
    ) -> None:
        self.source = source
        self.cell = cell
        self.last_failure: str | None = None
        self._path = path
        self._interval_s = interval_s
        self._session = open_session(api_key)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._keep_scraping, name=f"metrics of {cell}", daemon=True)

    def __enter__(self) -> "Scraper":
        if self.source is not None:
            self.scrape_now()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enough.set()
        if self.source is not None:
            self._thread.join()
            if kind is None:
                self.scrape_now()
        self._session.close()

    def scrape_now(self) -> bool:
        """Ask once and append what came. False when nothing usable came."""
        wall_s, source = time.time(), self.source
        assert source is not None
        try:
            timeout_s = min(5.0, max(1.0, self._interval_s))
            values = fetch_metrics(source, session=self._session, timeout_s=timeout_s)
            append_sample(self._path, MetricsSample(wall_s, self.cell, values))
        except (requests.RequestException, ValueError, OSError) as problem:
            self.last_failure = f"{type(problem).__name__}: {problem}"
            return False
        return True

    def _keep_scraping(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._enough.wait(max(0.0, due - time.monotonic())):
            self.scrape_now()
            due = max(due + self._interval_s, time.monotonic())  # a slow server is not asked twice at once


def read_metrics(path: Path) -> dict[str, list[MetricsSample]]:
    return group_by_cell(read_lines(path, MetricsSample))


def server_load(
    samples: Sequence[MetricsSample],
    sent_wall_s: float | None = None,
    ended_wall_s: float | None = None,
    measured_wall_s: tuple[float, float] | None = None,
) -> ServerLoad:
    """What a cell's samples say.

    Counters are differences of the last and the first sample, and given only when these lie before the first
    request was sent and after the last one ended (`sent_wall_s`, `ended_wall_s`: warm-up included); those of STAGES
    from the last sample before to the first one after `measured_wall_s`. Means are over the samples within
    `measured_wall_s`, or all of them when it is not given.
    """
    restarted = _has_restarted(samples)
    covered = (
        len(samples) >= 2
        and bool(samples[0].values)
        and (sent_wall_s is None or samples[0].wall_s <= sent_wall_s)
        and (ended_wall_s is None or samples[-1].wall_s >= ended_wall_s)
    )
    deltas: dict[str, float] = {}
    if covered and not restarted:
        first, last = samples[0].values, samples[-1].values
        # A counter with labels appears with its first event: absent at first means that nothing was counted.
        deltas = {key: last[key] - first.get(key, 0.0) for key in COUNTERS if key in last}
    queries = deltas.get("prefix_queries")
    stages = {} if restarted else _stage_growth(samples, measured_wall_s)
    inside = [s for s in samples if measured_wall_s is None or measured_wall_s[0] <= s.wall_s <= measured_wall_s[1]]
    running = _values(inside, "running")
    return ServerLoad(
        running_max=max(_values(samples, "running"), default=None),
        running_mean=sum(running) / len(running) if running else None,
        waiting_max=max(_values(samples, "waiting"), default=None),
        kv_usage_max=max(_values(samples, "kv_usage"), default=None),
        preemptions=deltas.get("preemptions"),
        generated_tokens=deltas.get("generated_tokens"),
        restarted=restarted,
        prefix_hit_ratio=deltas["prefix_hits"] / queries if queries and "prefix_hits" in deltas else None,
        **stages,
    )


def _stage_growth(samples: Sequence[MetricsSample], measured_wall_s: tuple[float, float] | None) -> dict[str, float]:
    """What the counters of STAGES gained in the measured time; nothing where no sample is before it, or none after."""
    if measured_wall_s is None:
        return {}
    begin_s, end_s = measured_wall_s
    before = next((sample for sample in reversed(samples) if sample.wall_s <= begin_s), None)
    after = next((sample for sample in samples if sample.wall_s >= end_s), None)
    if before is None or after is None or not before.values:
        return {}
    return {key: after.values[key] - before.values.get(key, 0.0) for key in STAGES if key in after.values}


def _values(samples: Iterable[MetricsSample], key: str) -> list[float]:
    return [sample.values[key] for sample in samples if key in sample.values]


def _has_restarted(samples: Sequence[MetricsSample]) -> bool:
    for before, after in itertools.pairwise(samples):
        for key in COUNTERS:
            if key in before.values and key in after.values and after.values[key] < before.values[key]:
                return True
        start, later_start = before.values.get("started_s"), after.values.get("started_s")
        if start is not None and later_start is not None and abs(later_start - start) > _SAME_START_S:
            return True
    return False


MIN_SAMPLES = 5  # samples inside the window that a mean or an integral needs
MAX_GAP_S = 5.0  # between two samples; beyond, what happened in between is not known
MIN_BUSY = 5.0  # percent on average: a GPU below did not serve ...
MIN_PART = 0.1  # ... nor one below that part of the busiest

_INTEGER_FIELDS = (
    "samples", "memory_max_bytes", "host_memory_min_bytes", "container_memory_max_bytes", "listen_overflows"
)  # fmt: skip

Span = tuple[float, float]
Series = list[tuple[float, float]]  # time, value


class GpuSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    busy_percent: Number | None = None
    memory_busy_percent: Number | None = None
    vram_used_bytes: Whole | None = None
    gtt_used_bytes: Whole | None = None
    power_w: Number | None = None
    package: bool = False  # the power is that of an APU's whole package, its CPU included
    temperatures_c: dict[str, Number] = {}  # by the driver's label: edge, junction, mem
    clock_mhz: Number | None = None
    memory_clock_mhz: Number | None = None
    # What limited its clocks since the last sample, and for which part of that time; {}: nothing. Kinds: "heat",
    # "prochot" (a signal from outside, such as the power supply), "power", "current".
    held_back: dict[str, Number] | None = None
    energy_j: Number | None = None  # a counter, since an unknown moment


class HostSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The machine that the server is on."""

    cpu_busy: Number | None = None  # 0 to 1 of all cores, since the last sample
    memory_available_bytes: Whole | None = None


class ContainerSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The server's container."""

    cpu_cores: Number | None = None  # how many cores it kept busy since the last sample
    memory_bytes: Whole | None = None  # without page cache that can be dropped, as `docker stats` counts
    listen_overflows: Whole | None = None  # ListenOverflows of its network namespace: a counter since its start


class TelemetrySample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    wall_s: Seconds  # when reading began; through a container: when the reading arrived
    cell: str
    took_s: Number | None = None  # how long reading took; None: through a container
    gpus: dict[str, GpuSample] = {}  # by render node, such as renderD128
    host: HostSample | None = None
    container: ContainerSample | None = None


def read_telemetry(path: Path) -> dict[str, list[TelemetrySample]]:
    return group_by_cell(read_lines(path, TelemetrySample))


def machine_load(samples: Sequence[TelemetrySample], window: Span | None, tokens: float | None) -> MachineLoad | None:
    """What a cell's samples say of the measured `window` (Unix time), in which `tokens` were generated.

    None when nothing was sampled in it. Formulas are in docs/method.md.
    """
    inside = [one for one in samples if window is not None and window[0] <= one.wall_s <= window[1]]
    if not inside or window is None:
        return None
    names = list(dict.fromkeys(name for one in samples for name in one.gpus))
    used = busy_gpus(inside)
    gpus = {name: _gpu_load(samples, inside, window, name, name in used) for name in names}
    mine = [gpus[name] for name in names if name in used]
    energy = _sum_if_known([gpu.energy_j for gpu in mine])
    times = [window[0], *(one.wall_s for one in inside), window[1]]
    host, container = _known_values(inside, "host"), _known_values(inside, "container")
    return MachineLoad(
        samples=len(inside),
        gap_max_s=max(after - before for before, after in itertools.pairwise(times)),
        took_max_s=max(_known_values(inside, "took_s"), default=None),
        gpus=gpus,
        busy_mean_percent=_mean_or_none(_known_values(mine, "busy_mean_percent")),
        busy_max_percent=max(_known_values(mine, "busy_max_percent"), default=None),
        memory_max_bytes=max((m for one in inside if (m := _used_memory(one, used)) is not None), default=None),
        power_mean_w=_sum_if_known([gpu.power_mean_w for gpu in mine]),
        power_max_w=max((power for one in inside if (power := _total_power(one, used)) is not None), default=None),
        package=any(gpu.package for gpu in mine),
        energy_j=energy,
        energy_per_token_j=energy / tokens if energy is not None and tokens else None,
        counted_energy_j=_sum_if_known([gpu.counted_energy_j for gpu in mine]),
        temperature_max_c=max((t for gpu in mine for t in gpu.temperatures_max_c.values()), default=None),
        heat_s=max(_known_values(mine, "heat_s"), default=None),
        limited_s=max(_known_values(mine, "limited_s"), default=None),
        host_cpu_mean=_mean_or_none(_known_values(host, "cpu_busy")),
        host_memory_min_bytes=min(_known_values(host, "memory_available_bytes"), default=None),
        container_cpu_mean_cores=_mean_or_none(_known_values(container, "cpu_cores")),
        container_memory_max_bytes=max(_known_values(container, "memory_bytes"), default=None),
        listen_overflows=_listen_overflows(samples, window),
    )


def median_load(loads: Sequence[MachineLoad | None]) -> MachineLoad | None:
    """Each value the median over several cells, of those that know it."""
    known = [load for load in loads if load is not None]
    if not known:
        return None

    names = [name for name in MachineLoad.__struct_fields__ if name not in ("gpus", "package")]
    numbers = {name: median_of_known(getattr(load, name) for load in known) for name in names}
    whole = {name: round(value) for name in _INTEGER_FIELDS if (value := numbers[name]) is not None}
    found: MachineLoad = msgspec.convert(
        {**numbers, **whole, "package": any(one.package for one in known)}, MachineLoad
    )
    return found


def busy_gpus(samples: Sequence[TelemetrySample]) -> set[str]:
    """The GPUs that worked for the server: busy for a good part of the time, or all where none says how busy it is."""
    names = {name for one in samples for name in one.gpus}
    busy = {
        name: statistics.fmean(known)
        for name in names
        if (known := _known_values([one.gpus[name] for one in samples if name in one.gpus], "busy_percent"))
    }
    if not busy:
        return names
    return {name for name, mean in busy.items() if mean >= max(MIN_BUSY, MIN_PART * max(busy.values()))}


def _gpu_load(
    samples: Sequence[TelemetrySample], inside: Sequence[TelemetrySample], window: Span, name: str, used: bool
) -> GpuLoad:
    seen = [one.gpus[name] for one in inside if name in one.gpus]
    busy, power, clocks = (_known_values(seen, field) for field in ("busy_percent", "power_w", "clock_mhz"))
    labels = list(dict.fromkeys(label for gpu in seen for label in gpu.temperatures_c))
    return GpuLoad(
        used=used,
        busy_mean_percent=_mean_or_none(busy),
        busy_max_percent=max(busy, default=None),
        memory_busy_mean_percent=_mean_or_none(_known_values(seen, "memory_busy_percent")),
        vram_max_bytes=max(_known_values(seen, "vram_used_bytes"), default=None),
        gtt_max_bytes=max(_known_values(seen, "gtt_used_bytes"), default=None),
        power_mean_w=_mean_or_none(power),
        power_max_w=max(power, default=None),
        package=any(gpu.package for gpu in seen),
        energy_j=integral(_series(samples, name, "power_w"), window),
        counted_energy_j=_counter_growth(_series(samples, name, "energy_j"), window),
        temperatures_max_c={
            label: max(gpu.temperatures_c[label] for gpu in seen if label in gpu.temperatures_c) for label in labels
        },
        clock_mean_mhz=_mean_or_none(clocks),
        clock_min_mhz=min(clocks, default=None),
        heat_s=held_back_s(samples, window, name, ("heat", "prochot")),
        limited_s=held_back_s(samples, window, name, ("power", "current")),
    )


def integral(series: Series, window: Span) -> float | None:
    """The integral over the window by the trapezoid rule, values between samples on straight lines.

    At the edges of the window the value is on the line to the next sample outside, and without one it is that of the
    nearest. None with fewer than MIN_SAMPLES samples inside, or where MAX_GAP_S and more are without a sample.
    """
    begin, end = window
    inside = [point for point in series if begin <= point[0] <= end]
    if len(inside) < MIN_SAMPLES:
        return None
    points = [(begin, _interpolate(series, begin)), *inside, (end, _interpolate(series, end))]
    before = max((at for at, _ in series if at < begin), default=begin)
    after = min((at for at, _ in series if at > end), default=end)
    times = [before, *(at for at, _ in inside), after]
    if any(late - early >= MAX_GAP_S for early, late in itertools.pairwise(times)):
        return None
    return sum((late[0] - early[0]) * (early[1] + late[1]) / 2 for early, late in itertools.pairwise(points))


def held_back_s(samples: Sequence[TelemetrySample], window: Span, name: str, kinds: Sequence[str]) -> float | None:
    """For how long of the window one of `kinds` held a GPU back. None when that is not known of any part of it."""
    total, known = 0.0, False
    for before, one in itertools.pairwise(samples):
        held = one.gpus[name].held_back if name in one.gpus else None
        overlap = min(one.wall_s, window[1]) - max(before.wall_s, window[0])
        if held is not None and overlap > 0:
            known = True
            total += overlap * max((held.get(kind, 0.0) for kind in kinds), default=0.0)
    return total if known else None


def _counter_growth(series: Series, window: Span) -> float | None:
    """By how much a counter grew in the window. None when it is not known before and after it, or began anew."""
    if not series or series[0][0] > window[0] or series[-1][0] < window[1]:
        return None
    if any(late[1] < early[1] for early, late in itertools.pairwise(series)):
        return None
    return _interpolate(series, window[1]) - _interpolate(series, window[0])


def _listen_overflows(samples: Sequence[TelemetrySample], window: Span) -> int | None:
    """Return the growth of the counter from the last sample before the window to the first after it."""
    series = [(one.wall_s, count) for one in samples if one.container for count in [one.container.listen_overflows]]
    known = [(at, count) for at, count in series if count is not None]
    first = max((point for point in known if point[0] <= window[0]), default=min(known, default=None))
    last = min((point for point in known if point[0] >= window[1]), default=max(known, default=None))
    if first is None or last is None or last[0] <= first[0] or last[1] < first[1]:
        return None
    return last[1] - first[1]


def _interpolate(series: Series, when: float) -> float:
    """The value at a time, on the straight line between its neighbours; outside of all samples that of the nearest."""
    before = max((point for point in series if point[0] <= when), default=series[0])
    after = min((point for point in series if point[0] >= when), default=series[-1])
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (when - before[0]) / (after[0] - before[0])


def _known_values(seen: Iterable[msgspec.Struct], field: str) -> list[Any]:
    return [value for one in seen if (value := getattr(one, field)) is not None]


def _series(samples: Sequence[TelemetrySample], name: str, field: str) -> Series:
    return [
        (one.wall_s, value) for one in samples if name in one.gpus for value in _known_values([one.gpus[name]], field)
    ]


def _used_memory(sample: TelemetrySample, names: set[str]) -> int | None:
    found = [
        used
        for name, gpu in sample.gpus.items()
        if name in names
        for used in (gpu.vram_used_bytes, gpu.gtt_used_bytes)
        if used is not None
    ]
    return sum(found) if found else None


def _total_power(sample: TelemetrySample, names: set[str]) -> float | None:
    return _sum_if_known([sample.gpus[name].power_w if name in sample.gpus else None for name in sorted(names)])


def _sum_if_known(values: Sequence[float | None]) -> float | None:
    """The sum; None when there is nothing to sum up, or one part of it is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean_or_none(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
