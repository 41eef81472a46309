"""Samples of a server's own metrics (metrics.jsonl) and of its machine (telemetry.jsonl), and their summaries.

`harness.machine.telemetry` samples machines. A value that could not be read, or that cannot be, is None and left out
of the files.
"""

import itertools
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import requests
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from harness.base.files import read_lines
from harness.base.https import open_session
from harness.base.measured import median_of_known
from harness.engines import engines
from harness.records.records import Number, ProcessMark, Seconds, Whole
from harness.records.value_limits import drop_impossible


class ServerLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server's own metrics during a cell. None: it has no such metric, or it was not read in time."""

    running_max: float | None = None
    running_mean: float | None = None
    waiting_max: float | None = None
    kv_usage_max: float | None = None  # 0 to 1
    preemptions: float | None = None
    generated_tokens: float | None = None  # by the server's counter, warm-up included
    restarted: bool = False  # a counter started again near 0, or the process has a later start time
    decreased: bool = False  # a counter decreased, and nothing shows that the server restarted
    prefix_hit_ratio: float | None = None
    drafts: float | None = None  # steps of a request for which speculation proposed tokens; warm-up included
    drafted_tokens: float | None = None
    accepted_tokens: float | None = None
    # Total seconds of all requests that ended in the measured time, and the number of these requests.
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    timed_requests: float | None = None


class GpuLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The samples of one GPU in the measured window. None: it does not report the value."""

    used: bool  # whether it worked for the server; totals are over these GPUs
    busy_mean_percent: float | None = None
    busy_max_percent: float | None = None
    memory_busy_mean_percent: float | None = None
    vram_max_bytes: int | None = None
    gtt_max_bytes: int | None = None
    power_mean_w: float | None = None
    power_max_w: float | None = None
    package: bool = False  # power is that of an APU's package, its CPU included
    energy_j: float | None = None  # integral of the power over the window
    counted_energy_j: float | None = None  # the same by the GPU's own counter
    temperatures_max_c: dict[str, float] = {}
    clock_mean_mhz: float | None = None
    clock_min_mhz: float | None = None
    heat_s: float | None = None  # for how long heat or an external signal throttled it
    limited_s: float | None = None  # for how long a limit of power or current did, which is normal at full load


class MachineLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The samples of the server's machine in the measured window. Totals are over the GPUs that the server used."""

    samples: int
    gap_max_s: float  # the longest time without a sample
    took_max_s: float | None = None  # the longest time to read a sample
    gpus: dict[str, GpuLoad] = {}  # all of them, by render node
    busy_mean_percent: float | None = None  # over GPUs and time
    busy_max_percent: float | None = None  # of any GPU
    memory_max_bytes: int | None = None  # VRAM and GTT of all together
    power_mean_w: float | None = None  # of all together
    power_max_w: float | None = None  # likewise, at one moment
    package: bool = False
    energy_j: float | None = None
    energy_per_token_j: float | None = None  # energy / output tokens generated inside the window
    counted_energy_j: float | None = None
    temperature_max_c: float | None = None  # of any sensor
    heat_s: float | None = None  # of the GPU that was throttled longest
    limited_s: float | None = None  # likewise
    host_cpu_mean: float | None = None  # 0 to 1 of all cores
    host_memory_min_bytes: int | None = None  # available
    container_cpu_mean_cores: float | None = None
    container_memory_max_bytes: int | None = None
    listen_overflows: int | None = None  # connections refused by a full listen queue in the server's container


# The values of a metrics sample, under the same names for all servers:
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
# timed_requests      counter, the requests of these three
# drafts              counter, steps of a request for which speculation proposed tokens
# drafted_tokens      counter, tokens that it proposed
# accepted_tokens     counter, those of them that were kept
# started_s           when the server's process started, Unix time
KEYS = (
    "running", "waiting", "kv_usage", "preemptions", "prompt_tokens", "generated_tokens", "prefix_queries",
    "prefix_hits", "queue_s", "prefill_s", "decode_s", "timed_requests", "drafts", "drafted_tokens",
    "accepted_tokens", "started_s",
)  # fmt: skip
STAGES = ("queue_s", "prefill_s", "decode_s", "timed_requests")
COUNTERS = (
    "preemptions", "prompt_tokens", "generated_tokens", "prefix_queries", "prefix_hits", "drafts",
    "drafted_tokens", "accepted_tokens", *STAGES,
)  # fmt: skip
_NOT_SUMMED = ("kv_usage", "started_s")  # of several engines (data parallel) the maximum

MAX_IDLE_WAIT_S, IDLE_POLL_S = 10.0, 0.25  # for a server to be idle after a load
_MAX_VALUE = 2.0**53  # a larger float cannot count
_SAME_START_S = 0.5  # a restart takes longer
_NEAR_ZERO = 0.1  # of a counter before: what a server counts between its restart and the next sample


class MetricsSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    wall_s: Seconds  # of the request for them
    cell: str
    values: dict[str, Number]  # by those of KEYS that the server has


def parse_metrics(text: str) -> dict[str, float]:
    """The values of KEYS in a text of the Prometheus format; of several names the first that is there.

    Raises ValueError for any other format, such as HTML.
    """
    values_by_name: dict[str, list[float]] = defaultdict(list)
    names_of = _metric_names()
    metric_names = set(itertools.chain.from_iterable(names_of.values()))
    try:
        families = list(text_string_to_metric_families(text))
    except (ArithmeticError, LookupError, TypeError) as error:  # from its parser, for some other texts
        raise ValueError(f"no metrics ({type(error).__name__})") from None
    for family in families:
        for sample in family.samples:
            # The suffix of a counter depends on the version of the exporter.
            name = sample.name if sample.name in metric_names else f"{sample.name}_total"
            if name in metric_names and 0 <= sample.value <= _MAX_VALUE:  # NaN: not known yet
                values_by_name[name].append(float(sample.value))
    values = {}
    for key, names in names_of.items():
        numbers = next((values_by_name[name] for name in names if name in values_by_name), None)
        if numbers is not None:
            values[key] = max(numbers) if key in _NOT_SUMMED else sum(numbers)
    return values


@cache
def _metric_names() -> dict[str, list[str]]:
    """The names of each key: those of the engines, and one that all of them may have."""
    names = {key: [name for engine in engines() for name in engine.metrics.get(key, [])] for key in KEYS}
    return {**names, "started_s": ["process_start_time_seconds"]}


def fetch_metrics(
    source: str | Callable[[], str],
    api_key: str | None = None,
    *,
    session: requests.Session | None = None,
    timeout_s: float = 5.0,
) -> dict[str, float]:
    """Read a server's metrics once, from a URL or from a function that returns the text.

    Raises requests.RequestException, OSError or ValueError if that fails.
    """
    if not isinstance(source, str):
        return parse_metrics(source())
    response = (session or open_session(api_key)).get(source, timeout=timeout_s)
    if response.status_code != 200:
        raise OSError(f"HTTP {response.status_code}")
    return parse_metrics(response.content.decode("utf-8", "replace"))


class Scraper:
    """Writes a server's metrics to a file: at the start, in each interval, and at the end.

    `source`: a URL, or a function that returns the text; None: there is nothing to do. A failed scrape leaves a gap.
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
        self._in_flight = 0.0  # requests that the server ran or queued at the last sample; 0 also where it is unknown
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
        self._stop()
        if self.source is not None and kind is None:
            self.scrape_now()
        self._session.close()

    def finish(self, say: Callable[[int], None] = lambda remaining: None) -> None:
        """End the regular samples, and sample until the server is idle, at most MAX_IDLE_WAIT_S.

        Some servers count the tokens of an answer when it ends. `say` is called with the requests in flight.
        """
        self._stop()
        until_s = time.monotonic() + MAX_IDLE_WAIT_S
        while self.source is not None and self.scrape_now() and self._in_flight and time.monotonic() < until_s:
            say(round(self._in_flight))
            time.sleep(IDLE_POLL_S)

    def _stop(self) -> None:
        self._enough.set()
        if self.source is not None:
            self._thread.join()

    def scrape_now(self) -> bool:
        """Append one sample. Return whether that succeeded."""
        wall_s, source = time.time(), self.source
        assert source is not None
        try:
            timeout_s = min(5.0, max(1.0, self._interval_s))
            values = fetch_metrics(source, session=self._session, timeout_s=timeout_s)
            append_sample(self._path, MetricsSample(wall_s, self.cell, values))
            self._in_flight = values.get("running", 0.0) + values.get("waiting", 0.0)
        except (requests.RequestException, ValueError, OSError) as problem:
            self.last_failure = f"{type(problem).__name__}: {problem}"
            return False
        return True

    def _keep_scraping(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._enough.wait(max(0.0, due - time.monotonic())):
            self.scrape_now()
            due = max(due + self._interval_s, time.monotonic())  # no second request at once to a slow server


def read_metrics(path: Path, damaged: list[int] | None = None) -> dict[str, list[MetricsSample]]:
    return group_by_cell(read_lines(path, MetricsSample, damaged))


def server_load(
    samples: Sequence[MetricsSample],
    sent_wall_s: float | None = None,
    ended_wall_s: float | None = None,
    measured_wall_s: tuple[float, float] | None = None,
) -> ServerLoad:
    """Summarize a cell's samples.

    Counters are differences between the first and the last sample. They are known only if all requests were between
    these two (`sent_wall_s`, `ended_wall_s`: of the first and the last request, warm-up included). Those of STAGES are
    differences between the last sample before `measured_wall_s` and the first one after it. Means are over the samples
    in `measured_wall_s`, or over all of them if it is None.
    """
    restarted, decreased = _setbacks(samples)
    is_set_back = restarted or decreased
    covered = (
        len(samples) >= 2
        and bool(samples[0].values)
        and (sent_wall_s is None or samples[0].wall_s <= sent_wall_s)
        and (ended_wall_s is None or samples[-1].wall_s >= ended_wall_s)
    )
    deltas: dict[str, float] = {}
    if covered and not is_set_back:
        first, last = samples[0].values, samples[-1].values
        # A counter with labels appears with its first event, so a missing one counts as 0.
        deltas = {key: last[key] - first.get(key, 0.0) for key in COUNTERS if key in last}
    queries = deltas.get("prefix_queries")
    stages = {} if is_set_back else _stage_growth(samples, measured_wall_s)
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
        decreased=decreased,
        prefix_hit_ratio=deltas["prefix_hits"] / queries if queries and "prefix_hits" in deltas else None,
        drafts=deltas.get("drafts"),
        drafted_tokens=deltas.get("drafted_tokens"),
        accepted_tokens=deltas.get("accepted_tokens"),
        **stages,
    )


def _stage_growth(samples: Sequence[MetricsSample], measured_wall_s: tuple[float, float] | None) -> dict[str, float]:
    """The growth of the counters of STAGES in the measured time; empty without a sample before it and one after it."""
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


def _setbacks(samples: Sequence[MetricsSample]) -> tuple[bool, bool]:
    """Return whether the server restarted, and whether its counters went back without showing that.

    A restart has a later start time, or, without start times, counters that are near 0 again. An earlier start time is
    that of another server behind the same address.
    """
    is_restart = is_other = False
    for before, after in itertools.pairwise(samples):
        start, later_start = before.values.get("started_s"), after.values.get("started_s")
        if start is not None and later_start is not None and abs(later_start - start) > _SAME_START_S:
            is_restart, is_other = is_restart or later_start > start, is_other or later_start < start
            continue
        for key in COUNTERS:
            if key in before.values and key in after.values and after.values[key] < before.values[key]:
                is_near_zero = start is None and after.values[key] <= _NEAR_ZERO * before.values[key]
                is_restart, is_other = is_restart or is_near_zero, is_other or not is_near_zero
    return is_restart and not is_other, is_other


MIN_SAMPLES = 5  # in the window, for an integral
MAX_GAP_S = 5.0  # between two samples, for an integral
MIN_BUSY_PERCENT = 5.0  # on average: a GPU below this did not work for the server ...
MIN_BUSY_SHARE = 0.1  # ... nor did one below this share of the busiest GPU

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
    # By kind of limit the share of the time since the last sample in which it set the clocks; {}: no limit. Kinds:
    # "heat", "prochot" (an external signal, such as the power supply's), "power", "current".
    held_back: dict[str, Number] | None = None
    energy_j: Number | None = None  # a counter that started at an unknown time

    def __post_init__(self) -> None:
        drop_impossible(self)


class HostSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The machine that the server is on."""

    cpu_busy: Number | None = None  # 0 to 1 of all cores, since the last sample
    memory_available_bytes: Whole | None = None

    def __post_init__(self) -> None:
        drop_impossible(self)


class ContainerSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The server's container."""

    cpu_cores: Number | None = None  # that it kept busy since the last sample
    memory_bytes: Whole | None = None  # without page cache that can be dropped, as `docker stats` counts
    listen_overflows: Whole | None = None  # ListenOverflows of its network namespace: a counter since its start

    def __post_init__(self) -> None:
        drop_impossible(self)


class KernelLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A line of the kernel log about a GPU, memory or heat."""

    wall_s: Seconds
    text: str  # shortened
    of_server: bool | None = None  # whether its process is the server's; None: it names none, or that is not known


class TelemetrySample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    wall_s: Seconds  # start of the reading; through a container: its arrival
    cell: str
    took_s: Number | None = None  # duration of the reading
    gpus: dict[str, GpuSample] = {}  # by render node, such as renderD128
    host: HostSample | None = None
    container: ContainerSample | None = None
    kernel: list[KernelLine] | None = None  # that are new since the last sample; None: the log cannot be read
    kernel_lost_s: Number | None = None  # so long before this sample the log is not known: a connection was lost

    def __post_init__(self) -> None:
        drop_impossible(self)


OfCell = TypeVar("OfCell", MetricsSample, TelemetrySample, ProcessMark)


def append_sample(path: Path, sample: MetricsSample | TelemetrySample) -> None:
    """Append a line in one write, so that a reader sees only whole lines."""
    line = msgspec.json.encode(sample) + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def group_by_cell(samples: Iterable[OfCell]) -> dict[str, list[OfCell]]:
    cells: dict[str, list[OfCell]] = defaultdict(list)
    for sample in samples:
        cells[sample.cell].append(sample)
    return cells


def read_telemetry(path: Path, damaged: list[int] | None = None) -> dict[str, list[TelemetrySample]]:
    return group_by_cell(read_lines(path, TelemetrySample, damaged))


def machine_load(samples: Sequence[TelemetrySample], window: Span | None, tokens: float | None) -> MachineLoad | None:
    """Summarize a cell's samples in the measured `window` (Unix time), in which `tokens` were generated.

    None: there is no sample in it. Formulas: docs/method.md.
    """
    inside = [sample for sample in samples if window is not None and window[0] <= sample.wall_s <= window[1]]
    if not inside or window is None:
        return None
    names = list(dict.fromkeys(name for sample in samples for name in sample.gpus))
    used = busy_gpus(inside)
    gpus = {name: _gpu_load(samples, inside, window, name, name in used) for name in names}
    serving = [gpus[name] for name in names if name in used]
    energy = _sum_if_known([gpu.energy_j for gpu in serving])
    times = [window[0], *(sample.wall_s for sample in inside), window[1]]
    host, container = _known_values(inside, "host"), _known_values(inside, "container")
    memory_sizes, total_powers = [], []
    for sample in inside:
        sampled = [sample.gpus.get(name, GpuSample()) for name in sorted(used)]
        total_powers.append(_sum_if_known([gpu.power_w for gpu in sampled]))
        if sizes := _known_values(sampled, "vram_used_bytes") + _known_values(sampled, "gtt_used_bytes"):
            memory_sizes.append(sum(sizes))
    return MachineLoad(
        samples=len(inside),
        gap_max_s=max(after - before for before, after in itertools.pairwise(times)),
        took_max_s=max(_known_values(inside, "took_s"), default=None),
        gpus=gpus,
        busy_mean_percent=_mean_or_none(_known_values(serving, "busy_mean_percent")),
        busy_max_percent=max(_known_values(serving, "busy_max_percent"), default=None),
        memory_max_bytes=max(memory_sizes, default=None),
        power_mean_w=_sum_if_known([gpu.power_mean_w for gpu in serving]),
        power_max_w=max((power for power in total_powers if power is not None), default=None),
        package=any(gpu.package for gpu in serving),
        energy_j=energy,
        energy_per_token_j=energy / tokens if energy is not None and tokens else None,
        counted_energy_j=_sum_if_known([gpu.counted_energy_j for gpu in serving]),
        temperature_max_c=max((t for gpu in serving for t in gpu.temperatures_max_c.values()), default=None),
        heat_s=max(_known_values(serving, "heat_s"), default=None),
        limited_s=max(_known_values(serving, "limited_s"), default=None),
        host_cpu_mean=_mean_or_none(_known_values(host, "cpu_busy")),
        host_memory_min_bytes=min(_known_values(host, "memory_available_bytes"), default=None),
        container_cpu_mean_cores=_mean_or_none(_known_values(container, "cpu_cores")),
        container_memory_max_bytes=max(_known_values(container, "memory_bytes"), default=None),
        listen_overflows=_listen_overflows(samples, window),
    )


def median_load(loads: Sequence[MachineLoad | None]) -> MachineLoad | None:
    """The median of each value over several cells, without those that do not know it."""
    measured = [load for load in loads if load is not None]
    if not measured:
        return None
    names = [name for name in MachineLoad.__struct_fields__ if name not in ("gpus", "package")]
    medians = {name: median_of_known(getattr(load, name) for load in measured) for name in names}
    integers = {name: round(value) for name in _INTEGER_FIELDS if (value := medians[name]) is not None}
    return msgspec.convert({**medians, **integers, "package": any(load.package for load in measured)}, MachineLoad)


def busy_gpus(samples: Sequence[TelemetrySample]) -> set[str]:
    """The GPUs that worked for the server, by how busy they were; all if no GPU reports that."""
    names = {name for sample in samples for name in sample.gpus}
    busy = {
        name: statistics.fmean(percents)
        for name in names
        if (percents := _known_values([sample.gpus[name] for sample in samples if name in sample.gpus], "busy_percent"))
    }
    if not busy:
        return names
    return {name for name, mean in busy.items() if mean >= max(MIN_BUSY_PERCENT, MIN_BUSY_SHARE * max(busy.values()))}


def _gpu_load(
    samples: Sequence[TelemetrySample], inside: Sequence[TelemetrySample], window: Span, name: str, used: bool
) -> GpuLoad:
    gpu_samples = [sample.gpus[name] for sample in inside if name in sample.gpus]
    busy, power, clocks = (_known_values(gpu_samples, field) for field in ("busy_percent", "power_w", "clock_mhz"))
    labels = list(dict.fromkeys(label for gpu in gpu_samples for label in gpu.temperatures_c))
    return GpuLoad(
        used=used,
        busy_mean_percent=_mean_or_none(busy),
        busy_max_percent=max(busy, default=None),
        memory_busy_mean_percent=_mean_or_none(_known_values(gpu_samples, "memory_busy_percent")),
        vram_max_bytes=max(_known_values(gpu_samples, "vram_used_bytes"), default=None),
        gtt_max_bytes=max(_known_values(gpu_samples, "gtt_used_bytes"), default=None),
        power_mean_w=_mean_or_none(power),
        power_max_w=max(power, default=None),
        package=any(gpu.package for gpu in gpu_samples),
        energy_j=integral(_series(samples, name, "power_w"), window),
        counted_energy_j=_counter_growth(_series(samples, name, "energy_j"), window),
        temperatures_max_c={
            label: max(gpu.temperatures_c[label] for gpu in gpu_samples if label in gpu.temperatures_c)
            for label in labels
        },
        clock_mean_mhz=_mean_or_none(clocks),
        clock_min_mhz=min(clocks, default=None),
        heat_s=held_back_s(samples, window, name, ("heat", "prochot")),
        limited_s=held_back_s(samples, window, name, ("power", "current")),
    )


def integral(series: Series, window: Span) -> float | None:
    """The integral over the window by the trapezoid rule.

    At an edge of the window the value is interpolated to the next sample outside; without one it is that of the nearest
    sample. None: fewer than MIN_SAMPLES samples inside, or MAX_GAP_S or more without a sample.
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
    """The part of the window in which a limit of `kinds` throttled a GPU. None: it is not known for any part of it."""
    total, is_measured = 0.0, False
    for before, sample in itertools.pairwise(samples):
        limits = sample.gpus[name].held_back if name in sample.gpus else None
        overlap = min(sample.wall_s, window[1]) - max(before.wall_s, window[0])
        if limits is not None and overlap > 0:
            is_measured = True
            total += overlap * max(limits.get(kind, 0.0) for kind in kinds)
    return total if is_measured else None


def _counter_growth(series: Series, window: Span) -> float | None:
    """The growth of a counter in the window. None: it is not known before and after it, or it restarted."""
    if not series or series[0][0] > window[0] or series[-1][0] < window[1]:
        return None
    if any(late[1] < early[1] for early, late in itertools.pairwise(series)):
        return None
    return _interpolate(series, window[1]) - _interpolate(series, window[0])


def _listen_overflows(samples: Sequence[TelemetrySample], window: Span) -> int | None:
    """Return the growth of the counter from the last sample before the window to the first after it."""
    series = [(sample.wall_s, sample.container.listen_overflows) for sample in samples if sample.container]
    readings = [(at, count) for at, count in series if count is not None]
    first = max((point for point in readings if point[0] <= window[0]), default=min(readings, default=None))
    last = min((point for point in readings if point[0] >= window[1]), default=max(readings, default=None))
    if first is None or last is None or last[0] <= first[0] or last[1] < first[1]:
        return None
    return last[1] - first[1]


def _interpolate(series: Series, when: float) -> float:
    """The value at a time, interpolated between its neighbours; outside of all samples that of the nearest."""
    before = max((point for point in series if point[0] <= when), default=series[0])
    after = min((point for point in series if point[0] >= when), default=series[-1])
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (when - before[0]) / (after[0] - before[0])


def _known_values(records: Iterable[msgspec.Struct], field: str) -> list[Any]:
    return [value for record in records if (value := getattr(record, field)) is not None]


def _series(samples: Sequence[TelemetrySample], name: str, field: str) -> Series:
    gpus = [(sample.wall_s, sample.gpus[name]) for sample in samples if name in sample.gpus]
    return [(at, value) for at, gpu in gpus for value in _known_values([gpu], field)]


def _sum_if_known(values: Sequence[float | None]) -> float | None:
    """The sum. None: there are no values, or one of them is not known."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers and len(numbers) == len(values) else None


def _mean_or_none(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
