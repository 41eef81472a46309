"""What the machine was seen to do while a cell ran: telemetry.jsonl, one line a sample, and what the samples say.

Samples are taken by `harness.machine.telemetry`. What was not read, or could not be, is None and left out of the file.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.files import read_lines
from harness.rundir.lines import by_cell
from harness.rundir.records import Number, Seconds, Whole
from harness.summary import GpuLoad, MachineLoad, median_of_known

MIN_SAMPLES = 5  # samples inside the window that a mean or an integral needs
MAX_GAP_S = 5.0  # between two samples; beyond, what happened in between is not known
MIN_BUSY = 5.0  # percent on average: a GPU below did not serve ...
MIN_PART = 0.1  # ... nor one below that part of the busiest

_WHOLE = (
    "samples", "memory_max_bytes", "host_memory_min_bytes", "container_memory_max_bytes", "listen_overflows"
)  # fmt: skip

Span = tuple[float, float]
Series = list[tuple[float, float]]  # time, value


class GpuSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One GPU at one moment."""

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
    """One line of telemetry.jsonl."""

    wall_s: Seconds  # when reading began; through a container: when the reading arrived
    cell: str
    took_s: Number | None = None  # how long reading took; None: through a container
    gpus: dict[str, GpuSample] = {}  # by render node, such as renderD128
    host: HostSample | None = None
    container: ContainerSample | None = None


def read_telemetry(path: Path) -> dict[str, list[TelemetrySample]]:
    """The samples of a telemetry.jsonl by cell, in the order of the file; a torn line is skipped."""
    return by_cell(read_lines(path, TelemetrySample))


def machine_load(samples: Sequence[TelemetrySample], window: Span | None, tokens: float | None) -> MachineLoad | None:
    """What a cell's samples say of the measured `window` (Unix time), in which `tokens` were generated.

    None when nothing was sampled in it. Formulas are in docs/method.md.
    """
    inside = [one for one in samples if window is not None and window[0] <= one.wall_s <= window[1]]
    if not inside or window is None:
        return None
    names = list(dict.fromkeys(name for one in samples for name in one.gpus))
    used = serving(inside)
    gpus = {name: _gpu(samples, inside, window, name, name in used) for name in names}
    mine = [gpus[name] for name in names if name in used]
    energy = _total([gpu.energy_j for gpu in mine])
    times = [window[0], *(one.wall_s for one in inside), window[1]]
    host, container = _known(inside, "host"), _known(inside, "container")
    return MachineLoad(
        samples=len(inside),
        gap_max_s=max(after - before for before, after in itertools.pairwise(times)),
        took_max_s=max(_known(inside, "took_s"), default=None),
        gpus=gpus,
        busy_mean_percent=_mean(_known(mine, "busy_mean_percent")),
        busy_max_percent=max(_known(mine, "busy_max_percent"), default=None),
        memory_max_bytes=max((m for one in inside if (m := _memory(one, used)) is not None), default=None),
        power_mean_w=_total([gpu.power_mean_w for gpu in mine]),
        power_max_w=max((power for one in inside if (power := _power(one, used)) is not None), default=None),
        package=any(gpu.package for gpu in mine),
        energy_j=energy,
        energy_per_token_j=energy / tokens if energy is not None and tokens else None,
        counted_energy_j=_total([gpu.counted_energy_j for gpu in mine]),
        temperature_max_c=max((t for gpu in mine for t in gpu.temperatures_max_c.values()), default=None),
        heat_s=max(_known(mine, "heat_s"), default=None),
        limited_s=max(_known(mine, "limited_s"), default=None),
        host_cpu_mean=_mean(_known(host, "cpu_busy")),
        host_memory_min_bytes=min(_known(host, "memory_available_bytes"), default=None),
        container_cpu_mean_cores=_mean(_known(container, "cpu_cores")),
        container_memory_max_bytes=max(_known(container, "memory_bytes"), default=None),
        listen_overflows=_listen_overflows(samples, window),
    )


def median_load(loads: Sequence[MachineLoad | None]) -> MachineLoad | None:
    """Each value the median over several cells, of those that know it."""
    known = [load for load in loads if load is not None]
    if not known:
        return None

    names = [name for name in MachineLoad.__struct_fields__ if name not in ("gpus", "package")]
    numbers = {name: median_of_known(getattr(load, name) for load in known) for name in names}
    whole = {name: round(value) for name in _WHOLE if (value := numbers[name]) is not None}
    found: MachineLoad = msgspec.convert(
        {**numbers, **whole, "package": any(one.package for one in known)}, MachineLoad
    )
    return found


def serving(samples: Sequence[TelemetrySample]) -> set[str]:
    """The GPUs that worked for the server: busy for a good part of the time, or all where none says how busy it is."""
    names = {name for one in samples for name in one.gpus}
    busy = {
        name: statistics.fmean(known)
        for name in names
        if (known := _known([one.gpus[name] for one in samples if name in one.gpus], "busy_percent"))
    }
    if not busy:
        return names
    return {name for name, mean in busy.items() if mean >= max(MIN_BUSY, MIN_PART * max(busy.values()))}


def _gpu(
    samples: Sequence[TelemetrySample], inside: Sequence[TelemetrySample], window: Span, name: str, used: bool
) -> GpuLoad:
    seen = [one.gpus[name] for one in inside if name in one.gpus]
    busy, power, clocks = (_known(seen, field) for field in ("busy_percent", "power_w", "clock_mhz"))
    labels = list(dict.fromkeys(label for gpu in seen for label in gpu.temperatures_c))
    return GpuLoad(
        used=used,
        busy_mean_percent=_mean(busy),
        busy_max_percent=max(busy, default=None),
        memory_busy_mean_percent=_mean(_known(seen, "memory_busy_percent")),
        vram_max_bytes=max(_known(seen, "vram_used_bytes"), default=None),
        gtt_max_bytes=max(_known(seen, "gtt_used_bytes"), default=None),
        power_mean_w=_mean(power),
        power_max_w=max(power, default=None),
        package=any(gpu.package for gpu in seen),
        energy_j=integral(_series(samples, name, "power_w"), window),
        counted_energy_j=_counted(_series(samples, name, "energy_j"), window),
        temperatures_max_c={
            label: max(gpu.temperatures_c[label] for gpu in seen if label in gpu.temperatures_c) for label in labels
        },
        clock_mean_mhz=_mean(clocks),
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
    points = [(begin, _at(series, begin)), *inside, (end, _at(series, end))]
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


def _counted(series: Series, window: Span) -> float | None:
    """By how much a counter grew in the window. None when it is not known before and after it, or began anew."""
    if not series or series[0][0] > window[0] or series[-1][0] < window[1]:
        return None
    if any(late[1] < early[1] for early, late in itertools.pairwise(series)):
        return None
    return _at(series, window[1]) - _at(series, window[0])


def _listen_overflows(samples: Sequence[TelemetrySample], window: Span) -> int | None:
    """Return the growth of the counter from the last sample before the window to the first after it."""
    series = [(one.wall_s, count) for one in samples if one.container for count in [one.container.listen_overflows]]
    known = [(at, count) for at, count in series if count is not None]
    first = max((point for point in known if point[0] <= window[0]), default=min(known, default=None))
    last = min((point for point in known if point[0] >= window[1]), default=max(known, default=None))
    if first is None or last is None or last[0] <= first[0] or last[1] < first[1]:
        return None
    return last[1] - first[1]


def _at(series: Series, when: float) -> float:
    """The value at a time, on the straight line between its neighbours; outside of all samples that of the nearest."""
    before = max((point for point in series if point[0] <= when), default=series[0])
    after = min((point for point in series if point[0] >= when), default=series[-1])
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (when - before[0]) / (after[0] - before[0])


def _known(seen: Iterable[msgspec.Struct], field: str) -> list[Any]:
    """What is known of a field of several."""
    return [value for one in seen if (value := getattr(one, field)) is not None]


def _series(samples: Sequence[TelemetrySample], name: str, field: str) -> Series:
    return [(one.wall_s, value) for one in samples if name in one.gpus for value in _known([one.gpus[name]], field)]


def _memory(sample: TelemetrySample, names: set[str]) -> int | None:
    """VRAM and GTT of these GPUs together at one moment."""
    found = [
        used
        for name, gpu in sample.gpus.items()
        if name in names
        for used in (gpu.vram_used_bytes, gpu.gtt_used_bytes)
        if used is not None
    ]
    return sum(found) if found else None


def _power(sample: TelemetrySample, names: set[str]) -> float | None:
    return _total([sample.gpus[name].power_w if name in sample.gpus else None for name in sorted(names)])


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None when there is nothing to sum up, or one part of it is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
