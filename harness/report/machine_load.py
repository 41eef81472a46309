"""What the machine did under each load, as a table: one definition for the page, the terminal, CSV and OpenMetrics."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from harness import units
from harness.report.table import Meaning
from harness.summary import GpuLoad, MachineLoad, Summary


class MachineColumn(Meaning, frozen=True, kw_only=True):
    """One column of the table."""

    text: Callable[[MachineLoad], str | None]  # None: not known


class MachineTable(Struct, frozen=True):
    """The table: those columns of which some row knows a value."""

    columns: list[MachineColumn]
    rows: list[tuple[str, str, list[str]]]  # server, load, texts
    sampling: str = ""  # how well it was looked at


class GpuLine(Struct, frozen=True):
    """One GPU in one cell."""

    cell: str
    name: str
    texts: list[str]


def table_of(summary: Summary) -> MachineTable:
    """The rows of a summary of which anything was sampled, each the median over its runs."""
    rows = [(row.server, row.load, row.machine_load) for row in summary.rows if row.machine_load is not None]
    shown = [column for column in COLUMNS if any(column.text(load) is not None for _, _, load in rows)]
    texts = [(server, load, [column.text(did) or units.NOTHING for column in shown]) for server, load, did in rows]
    return MachineTable(
        shown, texts, _sampling([cell.machine_load for cell in summary.cells if cell.machine_load is not None])
    )


def _sampling(loads: list[MachineLoad]) -> str:
    if not loads:
        return ""
    took = max((load.took_most_s for load in loads if load.took_most_s is not None), default=None)
    return (
        f"{units.count(sum(load.samples for load in loads), 'sample')} in {units.count(len(loads), 'run')}, "
        f"at most {max(load.gap_most_s for load in loads):.1f} s apart"
        + ("" if took is None else f"; reading one took {1000 * took:.1f} ms at most")
    )


GPU_HEAD = (
    "Served", "Busy, mean", "Busy, most", "Memory busy, mean", "VRAM, most", "GTT, most", "Power, mean", "Power, most",
    "Energy", "Clock, mean", "Clock, least", "Hottest", "Held back by heat", "At a power limit",
)  # fmt: skip


def gpu_lines(summary: Summary) -> list[GpuLine]:
    """Every GPU in every cell."""
    return [
        GpuLine(cell.id, name, _of_gpu(gpu))
        for cell in summary.cells
        if cell.machine_load is not None
        for name, gpu in cell.machine_load.gpus.items()
    ]


def _of_gpu(gpu: GpuLoad) -> list[str]:
    hottest = max(((value, label) for label, value in gpu.temperatures_most_c.items()), default=None)
    found = [
        "yes" if gpu.used else "no",
        _percent(gpu.busy_mean_percent),
        _percent(gpu.busy_most_percent),
        _percent(gpu.memory_busy_mean_percent),
        _gib(gpu.vram_most_bytes),
        _gib(gpu.gtt_most_bytes),
        _unit(gpu.power_mean_w, "W"),
        _unit(gpu.power_most_w, "W"),
        _energy(gpu),
        _unit(gpu.clock_mean_mhz, "MHz", 0),
        _unit(gpu.clock_least_mhz, "MHz", 0),
        None if hottest is None else f"{hottest[0]:.0f} °C ({hottest[1]})",
        _unit(gpu.heat_s, "s"),
        _unit(gpu.limited_s, "s"),
    ]
    return [text or units.NOTHING for text in found]


def _energy(gpu: GpuLoad) -> str | None:
    """By the readings of power, and by the GPU's own counter where it has one."""
    known, counted = _unit(gpu.energy_j, "J", 0), _unit(gpu.counted_energy_j, "J", 0)
    return known if counted is None else f"{known or units.NOTHING} ({counted} by its counter)"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} %"


def _gib(value: float | None) -> str | None:
    return None if value is None else f"{value / units.GIB:,.1f} GiB"


def _unit(value: float | None, unit: str, digits: int = 1) -> str | None:
    return None if value is None else f"{value:,.{digits}f} {unit}"


def _joules(value: float | None) -> str | None:
    return None if value is None else f"{units.significant(value)} J" if value >= 0.1 else f"{1000 * value:.1f} mJ"


def _of(mean: str | None, most: str | None) -> str | None:
    return None if mean is None and most is None else f"{mean or units.NOTHING}, {most or units.NOTHING}"


def _power(did: MachineLoad) -> str | None:
    text = _of(_unit(did.power_mean_w, "W", 0), _unit(did.power_most_w, "W", 0))
    return f"{text} (package)" if text is not None and did.package else text


COLUMNS = (
    MachineColumn(
        key="energy_per_token",
        title="Energy per output token",
        explanation="What the GPUs that served drew for each output token. Of an APU it is the whole package, its CPU "
        "included; never what the wall socket gives. Unknown below 5 samples and where a GPU tells no power.",
        formula="∫ power dt over the window ÷ output tokens generated inside the window, by the trapezoid rule",
        text=lambda did: _joules(did.energy_per_token_j),
    ),
    MachineColumn(
        key="power",
        title="Power, mean and most",
        explanation="Of the GPUs that served together, as their driver tells it.",
        formula="hwmon power1_average, else power1_input",
        text=_power,
    ),
    MachineColumn(
        key="busy",
        title="GPU busy, mean and most",
        explanation="Part of the time in which the GPU did anything. 100 % says that there always was something to "
        "do, not that it was used well.",
        formula="gpu_busy_percent, mean over the GPUs that served",
        text=lambda did: _of(_percent(did.busy_mean_percent), _percent(did.busy_most_percent)),
    ),
    MachineColumn(
        key="memory",
        title="GPU memory, most",
        explanation="VRAM and GTT of the GPUs that served together, whoever used them.",
        formula="mem_info_vram_used + mem_info_gtt_used",
        text=lambda did: _gib(did.memory_most_bytes),
    ),
    MachineColumn(
        key="temperature",
        title="Hottest",
        explanation="The highest temperature of any sensor of the GPUs that served.",
        formula="hwmon temp1_input to temp3_input",
        text=lambda did: _unit(did.temperature_most_c, "°C", 0),
    ),
    MachineColumn(
        key="heat",
        title="Throttled by heat",
        explanation="How long heat, or a signal from outside such as the power supply’s, held back the clocks of the "
        "GPU that it held back most. More than 5 % of the measured time makes a run INVALID.",
        formula="gpu_metrics: thermal and PROCHOT bits, or what their counters grew by",
        text=lambda did: _unit(did.heat_s, "s"),
    ),
    MachineColumn(
        key="limited",
        title="At a power limit",
        explanation="How long a limit of power or current set the clocks, which is normal at full load.",
        formula="gpu_metrics: PPT, TDC and EDC bits, or what their counters grew by",
        text=lambda did: _unit(did.limited_s, "s"),
    ),
    MachineColumn(
        key="container",
        title="Container: CPU and memory",
        explanation="Cores that the server’s container kept busy on average, and the most memory it used, without "
        "page cache that can be dropped. An APU’s GPU memory is not in it.",
        formula="control group: CPU time ÷ time, memory",
        text=lambda did: _of(_unit(did.container_cpu_mean_cores, "cores", 2), _gib(did.container_memory_most_bytes)),
    ),
    MachineColumn(
        key="host",
        title="Host: CPU and free memory",
        explanation="How busy all cores of the machine were on average, the load generator included where it runs "
        "there, and the least memory that was available.",
        formula="/proc/stat, MemAvailable",
        text=lambda did: _of(
            _percent(None if did.host_cpu_mean is None else 100 * did.host_cpu_mean), _gib(did.host_memory_least_bytes)
        ),
    ),
)


def raw(found: Struct | None, field: str) -> Any:
    """A field for programs; None where there is nothing that has it."""
    return None if found is None else getattr(found, field)


# Raw values for programs: column of the CSV, field of MachineLoad; name in OpenMetrics, its unit, the factor to that.
VALUES = (
    ("energy_per_token_j", "energy_per_token_j", "output_token_energy", "joules", 1.0),
    ("energy_j", "energy_j", "energy", "joules", 1.0),
    ("power_mean_w", "power_mean_w", "gpu_power_mean", "watts", 1.0),
    ("power_most_w", "power_most_w", "gpu_power_most", "watts", 1.0),
    ("gpu_busy_mean_percent", "busy_mean_percent", "gpu_busy_mean", "ratio", 0.01),
    ("gpu_busy_most_percent", "busy_most_percent", "gpu_busy_most", "ratio", 0.01),
    ("gpu_memory_most_bytes", "memory_most_bytes", "gpu_memory_most", "bytes", 1.0),
    ("gpu_temperature_most_c", "temperature_most_c", "gpu_temperature_most", "celsius", 1.0),
    ("gpu_throttled_by_heat_s", "heat_s", "gpu_throttled_by_heat", "seconds", 1.0),
    ("gpu_at_power_limit_s", "limited_s", "gpu_at_power_limit", "seconds", 1.0),
    ("container_cpu_mean_cores", "container_cpu_mean_cores", "container_cpu_mean", "cores", 1.0),
    ("container_memory_most_bytes", "container_memory_most_bytes", "container_memory_most", "bytes", 1.0),
    ("host_cpu_mean", "host_cpu_mean", "host_cpu_mean", "ratio", 1.0),
    ("host_memory_available_least_bytes", "host_memory_least_bytes", "host_memory_available_least", "bytes", 1.0),
)
