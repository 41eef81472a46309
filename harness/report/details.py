"""Smaller tables of every report: how open loops kept their schedule, and the host metrics under each load."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from harness import units
from harness.reasons import LIMIT_WORDS
from harness.report import words
from harness.report.table import Meaning
from harness.rundir.manifest import Run
from harness.summary import GpuLoad, MachineLoad, Row, Summary


class DetailColumn(Meaning, frozen=True, kw_only=True):
    """One column; its text is None where the number is not known."""

    text: Callable[[Any], str | None]


class DetailLine(Struct, frozen=True):
    """One row: of which server and load, or of which cell and GPU."""

    server: str
    load: str
    texts: list[str]
    schedule: str = ""  # of an open loop

    @property
    def name(self) -> str:
        return f"{self.server} / {self.load}"


class DetailTable(Struct, frozen=True):
    """A smaller table: those columns of which some row knows a value."""

    columns: list[DetailColumn] = []
    rows: list[DetailLine] = []
    sampling: str = ""  # of host metrics: how many samples, how far apart


def raw(found: Struct | None, field: str) -> Any:
    """A field for programs; None where there is nothing that has it."""
    return None if found is None else getattr(found, field)


def schedule_lines(summary: Summary, run: Run) -> list[DetailLine]:
    """The rows of open loops, in the order of the summary; none in a run that has only closed ones."""
    return [
        DetailLine(
            row.server,
            row.load,
            [column.text(row) or units.NOTHING for column in SCHEDULE],
            words.loop(run.scenario.loads[row.load]),
        )
        for row in summary.rows
        if row.pooled.schedule is not None and row.load in run.scenario.loads
    ]


def schedule_sentence(line: DetailLine) -> str:
    parts = [f"{column.title} {text}" for column, text in zip(SCHEDULE, line.texts, strict=True)]
    return f"{line.server} / {line.load}: {line.schedule}. {'; '.join(parts)}"


def schedule_values(row: Row) -> dict[str, str | int | float | None]:
    """The same for programs: raw numbers, seconds. Empty where the load is a closed one."""
    lag, names = row.pooled.send_lag_s, ("planned", "never_sent", "asked_per_s", "achieved_per_s")
    lags = {"send_lag_p50_s": lag.p50, "send_lag_p99_s": lag.p99, "send_lag_max_s": lag.max}
    return {"kind": row.kind} | {name: raw(row.pooled.schedule, name) for name in names} | lags


def machine_table(summary: Summary) -> DetailTable:
    """The rows of a summary that have samples, each the median over its runs."""
    rows = [row for row in summary.rows if row.machine_load is not None]
    loads = [cell.machine_load for cell in summary.cells if cell.machine_load is not None]
    if not loads:
        return DetailTable()
    shown = [column for column in MACHINE if any(column.text(row.machine_load) is not None for row in rows)]
    lines = [
        DetailLine(row.server, row.load, [column.text(row.machine_load) or units.NOTHING for column in shown])
        for row in rows
    ]
    took = max((load.took_max_s for load in loads if load.took_max_s is not None), default=None)
    sampling = (
        f"{units.count(sum(load.samples for load in loads), 'sample')} in {units.count(len(loads), 'run')}, "
        f"at most {max(load.gap_max_s for load in loads):.1f} s apart"
    )
    return DetailTable(
        shown, lines, sampling + ("" if took is None else f"; reading one took {1000 * took:.1f} ms at most")
    )


def time_table(summary: Summary) -> DetailTable:
    """Where the time of each row's requests went; no row where none has anything of it."""
    shown = [column for column in TIME if any(column.text(row) is not None for row in summary.rows)]
    lines = [DetailLine(row.server, row.load, [column.text(row) or units.NOTHING for column in shown])
             for row in summary.rows if shown]  # fmt: skip
    return DetailTable(shown, lines)


def gpu_lines(summary: Summary) -> list[DetailLine]:
    """Every GPU in every cell."""
    return [
        DetailLine(cell.id, name, [text(gpu) or units.NOTHING for text in GPU.values()])
        for cell in summary.cells
        if cell.machine_load is not None
        for name, gpu in cell.machine_load.gpus.items()
    ]


def _unit(value: float | None, unit: str, digits: int = 1) -> str | None:
    return None if value is None else f"{value:,.{digits}f} {unit}"


def _percent(value: float | None) -> str | None:
    return _unit(value, "%", 0)


def _gib(value: float | None) -> str | None:
    return None if value is None else _unit(value / units.GIB, "GiB")


def _joules(value: float | None) -> str | None:
    return None if value is None else f"{units.significant(value)} J" if value >= 0.1 else f"{1000 * value:.1f} mJ"


def _both(one: str | None, other: str | None) -> str | None:
    return None if one is None and other is None else f"{one or units.NOTHING}, {other or units.NOTHING}"


def _power(load: MachineLoad) -> str | None:
    text = _both(_unit(load.power_mean_w, "W", 0), _unit(load.power_max_w, "W", 0))
    return f"{text} (package)" if text is not None and load.package else text


def _host(load: MachineLoad) -> str | None:
    busy = None if load.host_cpu_mean is None else 100 * load.host_cpu_mean
    return _both(_percent(busy), _gib(load.host_memory_min_bytes))


def _hottest(gpu: GpuLoad) -> str | None:
    hottest = max(((value, label) for label, value in gpu.temperatures_max_c.items()), default=None)
    return None if hottest is None else f"{hottest[0]:.0f} °C ({hottest[1]})"


def _energy(gpu: GpuLoad) -> str | None:
    """By the readings of power, and by the GPU's own counter where it has one."""
    known, counted = _unit(gpu.energy_j, "J", 0), _unit(gpu.counted_energy_j, "J", 0)
    return known if counted is None else f"{known or units.NOTHING} ({counted} by its counter)"


def _rate(value: float | None) -> str | None:
    return None if value is None else f"{units.significant(value)}/s"


def _never_sent(row: Row) -> str | None:
    never, planned = raw(row.pooled.schedule, "never_sent"), raw(row.pooled.schedule, "planned")
    return f"{never:,} of {planned:,}" if never else None if never is None else "0"


def _ms(*values_s: float | None) -> list[str]:
    """Times in milliseconds, "n/a" for what the sample does not carry."""
    return ["n/a" if value is None else units.milliseconds(value) for value in values_s]


def _lag(row: Row) -> str:
    lag = row.pooled.send_lag_s
    return f"{', '.join(_ms(lag.p50, lag.p99, lag.max))} ms"


def _from_schedule(latency: str, percentile: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        names = (f"{latency}_s", f"{latency}_sched_s")
        both = _ms(*(getattr(getattr(row.pooled, name), percentile) for name in names))
        return "n/a" if set(both) == {"n/a"} else f"{' → '.join(both)} ms"

    return text


def _stage(name: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        value = raw(row.time, name)
        return None if value is None else units.milliseconds(value)

    return text


TIME = (
    DetailColumn(
        key="connect",
        title="Connect, ms",
        explanation="To open a connection, by the client's clock, spread over all requests. It is in no latency.",
        formula="Σ connect ÷ requests sent",
        text=_stage("connect_s"),
    ),
    DetailColumn(
        key="api",
        title="API, ms",
        explanation="Around the engine: the server's API process (HTTP, tokenizer, detokenizer), the network and the "
        "load generator. Unknown where the server does not report the three stages that follow.",
        formula="E2E − queue − prefill − decode",
        text=_stage("api_s"),
    ),
    DetailColumn(
        key="queue",
        title="Queue, ms",
        explanation="From the engine's receipt of a request to its first turn, by the server's own counters.",
        formula="Σ queue time ÷ requests, of those that ended in the measured time",
        text=_stage("queue_s"),
    ),
    DetailColumn(
        key="prefill",
        title="Prefill, ms",
        explanation="From its first turn to its first token, by the server's own counters.",
        formula="Σ prefill time ÷ requests, of those that ended in the measured time",
        text=_stage("prefill_s"),
    ),
    DetailColumn(
        key="decode",
        title="Decode, ms",
        explanation="From its first to its last token, by the server's own counters; preemptions are in it.",
        formula="Σ decode time ÷ requests, of those that ended in the measured time",
        text=_stage("decode_s"),
    ),
    DetailColumn(
        key="whole",
        title="E2E, ms",
        explanation="The mean E2E latency by the client's clock, of which the four columns before are parts.",
        formula="Σ E2E ÷ successful requests",
        text=_stage("e2e_s"),
    ),
    DetailColumn(
        key="limit",
        title="Limited by",
        explanation="In more than half of the runs, the first of these that holds: the load generator (self-check); "
        "the KV cache (95 % full while requests wait or are preempted); queueing or the API (20 % of E2E); else the "
        "longer one of prefill and decode. Unknown where the server does not report enough.",
        formula="“Where the time goes” in docs/method.md",
        text=lambda row: None if row.limited_by is None else LIMIT_WORDS[row.limited_by],
    ),
)
GPU: dict[str, Callable[[GpuLoad], str | None]] = {
    "Served": lambda gpu: "yes" if gpu.used else "no",
    "Busy, mean": lambda gpu: _percent(gpu.busy_mean_percent),
    "Busy, most": lambda gpu: _percent(gpu.busy_max_percent),
    "Memory busy, mean": lambda gpu: _percent(gpu.memory_busy_mean_percent),
    "VRAM, most": lambda gpu: _gib(gpu.vram_max_bytes),
    "GTT, most": lambda gpu: _gib(gpu.gtt_max_bytes),
    "Power, mean": lambda gpu: _unit(gpu.power_mean_w, "W"),
    "Power, most": lambda gpu: _unit(gpu.power_max_w, "W"),
    "Energy": _energy,
    "Clock, mean": lambda gpu: _unit(gpu.clock_mean_mhz, "MHz", 0),
    "Clock, least": lambda gpu: _unit(gpu.clock_min_mhz, "MHz", 0),
    "Hottest": _hottest,
    "Throttled by heat": lambda gpu: _unit(gpu.heat_s, "s"),
    "At a power limit": lambda gpu: _unit(gpu.limited_s, "s"),
}
MACHINE = (
    DetailColumn(
        key="energy_per_token",
        title="Energy per output token",
        explanation="What the GPUs that served drew for each output token. Of an APU it is the whole package, its CPU "
        "included; never what the wall socket gives. Unknown below 5 samples and where a GPU reports no power.",
        formula="∫ power dt over the window ÷ output tokens generated inside the window, by the trapezoid rule",
        text=lambda load: _joules(load.energy_per_token_j),
    ),
    DetailColumn(
        key="power",
        title="Power, mean and most",
        explanation="Of the GPUs that served together, as their driver reports it.",
        formula="hwmon power1_average, else power1_input",
        text=_power,
    ),
    DetailColumn(
        key="busy",
        title="GPU busy, mean and most",
        explanation="Share of the time in which the GPU did anything. 100 % means that it always had something to "
        "do, not that it was used well.",
        formula="gpu_busy_percent, mean over the GPUs that served",
        text=lambda load: _both(_percent(load.busy_mean_percent), _percent(load.busy_max_percent)),
    ),
    DetailColumn(
        key="memory",
        title="GPU memory, most",
        explanation="VRAM and GTT of the GPUs that served together, used by any process.",
        formula="mem_info_vram_used + mem_info_gtt_used",
        text=lambda load: _gib(load.memory_max_bytes),
    ),
    DetailColumn(
        key="temperature",
        title="Hottest",
        explanation="The highest temperature of any sensor of the GPUs that served.",
        formula="hwmon temp1_input to temp3_input",
        text=lambda load: _unit(load.temperature_max_c, "°C", 0),
    ),
    DetailColumn(
        key="heat",
        title="Throttled by heat",
        explanation="How long heat, or a signal from outside such as the power supply’s, held back the clocks of the "
        "GPU that it held back most. More than 5 % of the measured time makes a run INVALID.",
        formula="gpu_metrics: thermal and PROCHOT bits, or what their counters grew by",
        text=lambda load: _unit(load.heat_s, "s"),
    ),
    DetailColumn(
        key="limited",
        title="At a power limit",
        explanation="How long a limit of power or current set the clocks, which is normal at full load.",
        formula="gpu_metrics: PPT, TDC and EDC bits, or what their counters grew by",
        text=lambda load: _unit(load.limited_s, "s"),
    ),
    DetailColumn(
        key="container",
        title="Container: CPU and memory",
        explanation="Cores that the server’s container kept busy on average, and the most memory it used, without "
        "page cache that can be dropped. An APU’s GPU memory is not in it.",
        formula="control group: CPU time ÷ time, memory",
        text=lambda load: _both(
            _unit(load.container_cpu_mean_cores, "cores", 2), _gib(load.container_memory_max_bytes)
        ),
    ),
    DetailColumn(
        key="host",
        title="Host: CPU and free memory",
        explanation="How busy all cores of the machine were on average, the load generator included where it runs "
        "there, and the least memory that was available.",
        formula="/proc/stat, MemAvailable",
        text=_host,
    ),
)
SCHEDULE = (
    DetailColumn(
        key="asked",
        title="asked",
        explanation="Requests a second that the schedule asked for.",
        formula="of a fixed time: due ÷ time; of a fixed number or a trace: (requests − 1) ÷ (last due − first due)",
        text=lambda row: _rate(raw(row.pooled.schedule, "asked_per_s")),
    ),
    DetailColumn(
        key="achieved",
        title="achieved",
        explanation="Requests a second that were sent, whatever became of them.",
        formula="of a fixed time: sent ÷ time; else (requests − 1) ÷ (last sent − first sent)",
        text=lambda row: _rate(raw(row.pooled.schedule, "achieved_per_s")),
    ),
    DetailColumn(
        key="never",
        title="never sent",
        explanation="Requests that were due while all users were busy until the end. Any makes the run INVALID.",
        formula="due − sent",
        text=_never_sent,
    ),
    DetailColumn(
        key="lag",
        title="send lag p50, p99, most",
        explanation="How late requests went out. A median above 10 ms makes the run INVALID: the load generator was "
        "the limit, which needs more users or processes.",
        formula="send lag = sent − scheduled; p50 needs 11 requests, p99 662",
        text=_lag,
    ),
    *(
        DetailColumn(
            key=f"{key}_{name}",
            title=f"{title} {name}",
            explanation=f"{title} from send → from schedule. The second counts from the moment at which the schedule "
            "wanted it sent: it includes client queueing and avoids coordinated omission.",
            formula=f"{title} from schedule = {what} − scheduled",
            text=_from_schedule(key, name),
        )
        for key, title, what in (("ttft", "TTFT", "first chunk"), ("e2e", "E2E", "last chunk"))
        for name in ("p50", "p95")
    ),
)
# Raw values for programs: column of the CSV, field of MachineLoad; name in OpenMetrics, its unit, the factor to that.
MACHINE_VALUES = (
    ("energy_per_token_j", "energy_per_token_j", "output_token_energy", "joules", 1.0),
    ("energy_j", "energy_j", "energy", "joules", 1.0),
    ("power_mean_w", "power_mean_w", "gpu_power_mean", "watts", 1.0),
    ("power_max_w", "power_max_w", "gpu_power_max", "watts", 1.0),
    ("gpu_busy_mean_percent", "busy_mean_percent", "gpu_busy_mean", "ratio", 0.01),
    ("gpu_busy_max_percent", "busy_max_percent", "gpu_busy_max", "ratio", 0.01),
    ("gpu_memory_max_bytes", "memory_max_bytes", "gpu_memory_max", "bytes", 1.0),
    ("gpu_temperature_max_c", "temperature_max_c", "gpu_temperature_max", "celsius", 1.0),
    ("gpu_throttled_by_heat_s", "heat_s", "gpu_throttled_by_heat", "seconds", 1.0),
    ("gpu_at_power_limit_s", "limited_s", "gpu_at_power_limit", "seconds", 1.0),
    ("container_cpu_mean_cores", "container_cpu_mean_cores", "container_cpu_mean", "cores", 1.0),
    ("container_memory_max_bytes", "container_memory_max_bytes", "container_memory_max", "bytes", 1.0),
    ("host_cpu_mean", "host_cpu_mean", "host_cpu_mean", "ratio", 1.0),
    ("host_memory_available_min_bytes", "host_memory_min_bytes", "host_memory_available_min", "bytes", 1.0),
)
