"""Telemetry of the host and its GPUs: files of /proc and /sys, read and converted once per second.

Which files there are is found once. What a driver refuses to answer (EPERM, EBUSY, ENODATA) is missing from the
sample, and never 0. The same files may also come from within a container, see `harness.serve.container_commands`.
"""

import math
import os
import re
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Event
from types import TracebackType

from msgspec import Struct

from harness.machine.gpus import read_sysfs
from harness.rundir.records import append_sample
from harness.rundir.samples import ContainerSample, GpuSample, HostSample, TelemetrySample

Files = Mapping[str, bytes]  # content by path below the root, without a slash in front

AMD = "0x1002"
HOST_FILES = ("proc/stat", "proc/meminfo")
# Of each GPU, below /sys/class/drm/renderD*/device; those in hwmon/hwmon* without these two parts.
GPU_FILES = (
    "gpu_busy_percent", "mem_busy_percent", "mem_info_vram_used", "mem_info_gtt_used", "board_info", "gpu_metrics",
    "pp_dpm_sclk", "pp_dpm_mclk",
)  # fmt: skip
SENSORS = (
    "power1_average", "power1_input", "freq1_input", "freq2_input", "energy1_input",
    *(f"temp{number}_{what}" for number in (1, 2, 3) for what in ("input", "label")),
)  # fmt: skip
CGROUP_FILES = ("cpu.stat", "memory.current", "cpuacct.usage", "memory.usage_in_bytes", "memory.stat")

MAX_W = 10_000.0  # of one GPU or package; the largest Instinct takes 1,400
MAX_BYTES = 1 << 50  # of one memory
MIN_RATE_S = 0.2  # CPU time is counted in ticks of 10 ms: over less, a rate would be noise

_GPU = re.compile(r"^sys/class/drm/(renderD\d+)/device/(?:hwmon/hwmon\d+/)?([^/]+)$")
_CURRENT_CLOCK = re.compile(rb"(\d+)\s*[Mm][Hh]z\s*\*")


class HostReading(Struct, frozen=True):
    """Files read at one moment."""

    wall_s: float
    clock_s: float  # a monotonic clock of the machine of these files
    took_s: float | None
    files: Files


def find_files(root: Path, container: list[str] | None = None) -> list[str]:
    """The files to read each second below `root`; `container`: those of a container's control group."""
    found = [path for path in (*HOST_FILES, *(container or [])) if (root / path).exists()]
    drm = root / "sys/class/drm"
    for node in sorted(drm.glob("renderD*"), key=lambda path: path.name):
        device = node / "device"
        if read_sysfs(device / "vendor") != AMD:
            continue
        paths = [device / name for name in GPU_FILES]
        paths += [sensor / name for sensor in sorted(device.glob("hwmon/hwmon*")) for name in SENSORS]
        here = {path.name for path in paths if path.exists()}
        # The list of levels only without the frequency itself: it costs the driver more.
        left_out = {
            f"pp_dpm_{clock}" for clock, file in (("sclk", "freq1_input"), ("mclk", "freq2_input")) if file in here
        }
        found += [str(path.relative_to(root)) for path in paths if path.name in here - left_out and path.exists()]
    return found


def cgroup_files(root: Path, pid: int, container: str) -> list[str]:
    """The files of a container's control group, of version 1 or 2, by one of its processes.

    Empty when that process is not the container's: then its engine is on another machine, or this is a container too.
    """
    found = []
    for line in (read_sysfs(root / f"proc/{pid}/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if container not in path:
            continue
        for folder in [
            f"sys/fs/cgroup{path}",
            *(f"sys/fs/cgroup/{name}{path}" for name in controllers.split(",") if name),
        ]:
            found += [f"{folder}/{name}" for name in CGROUP_FILES if (root / folder / name).exists()]
    unique = {Path(path).name: path for path in found}
    return list(unique.values())


def read_periodically(
    read: Callable[[], HostReading | None], interval_s: float, enough: Event
) -> Iterator[HostReading]:
    """Read now, at each interval, and once more when there is `enough`."""
    due = time.monotonic()
    last = False
    while not last:
        last = enough.wait(max(0.0, due - time.monotonic()))
        if (found := read()) is not None:
            yield found
        due = max(due + interval_s, time.monotonic())  # after a slow reading do not catch up


def read_files(root: Path, paths: list[str]) -> HostReading:
    """The content of the readable files."""
    wall_s, clock_s = time.time(), time.monotonic()
    files = {}
    for path in paths:
        try:
            file = os.open(f"{root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                files[path] = os.read(file, 65536)
            finally:
                os.close(file)
        except OSError:
            continue
    return HostReading(wall_s, clock_s, time.monotonic() - clock_s, files)


# The binary table `gpu_metrics` of the amdgpu driver: what throttles a GPU, and its energy counter. Its layouts are the
# structs gpu_metrics_v* in the kernel's drivers/gpu/drm/amd/include/kgd_pp_interface.h. Two kernels have used one
# revision for two layouts, so the table's size must be right as well; revision 1.9 describes its own layout. Nothing
# else is decoded: what is also a file of its own is read there.
# What of a GPU can be limited, by bit of the ASIC independent status (SMU_THROTTLER_* in the kernel's amdgpu_smu.h).
_LIMIT_BITS = {"power": range(0, 16), "current": range(16, 32), "heat": range(32, 46), "prochot": range(46, 48)}
_ENERGY_UNIT_J = 2.0**-16

# (format, content, size of the table) -> offset of the 64-bit status.
_STATUS_OFFSETS = {(1, 3, 120): 112, (2, 2, 128): 120, (2, 3, 152): 120, (2, 4, 168): 120}
# -> offset of the 64-bit energy counter. In earlier revisions its unit is unknown.
_ENERGY_OFFSETS = {(1, 4, 288): 24, (1, 5, 360): 88, (1, 6, 384): 88, (1, 6, 1664): 16, (1, 7, 2208): 24} | {
    (1, 8, size): 24 for size in (3360, 3872)
}
# -> offset of a counter of cycles and, right after it, of those in which the GPU was throttled (_INSTINCT).
_RESIDENCY_OFFSETS = {(1, 6, 384): 104, (1, 6, 1664): 32, (1, 7, 2208): 40} | {
    (1, 8, size): 40 for size in (3360, 3872)
}
_INSTINCT_KINDS = ("prochot", "power", "heat", "heat", "heat")  # socket, voltage regulator, memory
# APUs count the throttled time, in an unknown unit and without a counter of all time.
_APU_OFFSETS = {(3, 0, 264): 228}
_APU_KINDS = ("prochot", "power", "power", "power", "heat", "heat", "heat")  # SPL, fast and slow PPT; core, gfx, soc
# Revision 1.9 (struct gpu_metrics_v1_9): a count of attributes; of each an encoding and its values, without padding.
_ATTRIBUTES = (1, 9)
_WIDTHS = (1, 1, 2, 2, 4, 4, 8, 8)  # bytes, by enum amdgpu_metrics_attr_type: U8, S8, U16, ... S64
_UNSIGNED = (4, 6)  # U32, U64: a counter is one or the other
_ENERGY_ID = 7  # in enum amdgpu_metrics_attr_id, as the next
_RESIDENCY_IDS = range(9, 15)  # cycles, then the order of _INSTINCT


class GpuMetrics(Struct, frozen=True, kw_only=True):
    """The content of a table `gpu_metrics`. `now` is a state; `counters` only grow."""

    now: frozenset[str] | None = None  # kinds of limits that throttle the GPU
    counters: tuple[int, ...] | None = None  # one per limit, see `kinds`
    kinds: tuple[str, ...] = ()
    cycles: int | None = None  # of which `counters` are parts; None: their unit is not known
    energy_j: float | None = None  # since an unknown moment


def parse_gpu_metrics(raw: bytes) -> GpuMetrics | None:
    """Read the table; None for an unknown revision or size. An empty field is None."""
    if len(raw) < 4:
        return None
    size, form, content = struct.unpack_from("<HBB", raw)
    if (form, content) == _ATTRIBUTES and len(raw) >= size:
        return _from_attributes(raw[:size])
    key = (form, content, size)
    if len(raw) < size or not (key in _STATUS_OFFSETS or key in _ENERGY_OFFSETS or key in _APU_OFFSETS):
        return None
    now = counters = cycles = energy = None
    kinds: tuple[str, ...] = ()
    if key in _STATUS_OFFSETS:
        now = _parse_status(struct.unpack_from("<Q", raw, _STATUS_OFFSETS[key])[0])
    if key in _RESIDENCY_OFFSETS:
        kinds = _INSTINCT_KINDS
        cycles, *found = struct.unpack_from("<6I", raw, _RESIDENCY_OFFSETS[key])
        counters = tuple(found)
    if key in _APU_OFFSETS:
        kinds = _APU_KINDS
        counters = struct.unpack_from("<7I", raw, _APU_OFFSETS[key])
    if key in _ENERGY_OFFSETS:
        energy = struct.unpack_from("<Q", raw, _ENERGY_OFFSETS[key])[0]
    empty = counters is None or 0xFFFFFFFF in (*counters, cycles)  # the driver first fills a table with ones
    return GpuMetrics(
        now=now,
        counters=None if empty else counters,
        kinds=() if empty else kinds,
        cycles=None if empty else cycles,
        energy_j=None if energy in (None, 2**64 - 1) else energy * _ENERGY_UNIT_J,
    )


def _from_attributes(raw: bytes) -> GpuMetrics | None:
    """The table of a revision that describes its own layout, or None when the description does not fit the size."""
    if len(raw) < 8:
        return None
    (count,) = struct.unpack_from("<i", raw, 4)
    offset = 8
    counters: dict[int, int] = {}  # those filled in, by attribute
    for _ in range(count):
        if offset + 8 > len(raw):
            return None
        (encoding,) = struct.unpack_from("<Q", raw, offset)
        unit, kind, number, values = encoding >> 24, encoding >> 20 & 0xF, encoding >> 10 & 0x3FF, encoding & 0x3FF
        if kind >= len(_WIDTHS) or not values:
            return None
        content = raw[offset + 8 : offset + 8 + _WIDTHS[kind] * values]
        offset += 8 + _WIDTHS[kind] * values
        if not unit and kind in _UNSIGNED and values == 1 and content.strip(b"\xff"):
            counters[number] = int.from_bytes(content, "little")
    if count < 0 or offset != len(raw):
        return None
    cycles, *residencies = (counters.get(number) for number in _RESIDENCY_IDS)
    found = tuple(value for value in residencies if value is not None)
    full = cycles is not None and len(found) == len(_INSTINCT_KINDS)
    energy = counters.get(_ENERGY_ID)
    return GpuMetrics(
        counters=found if full else None,
        kinds=_INSTINCT_KINDS if full else (),
        cycles=cycles if full else None,
        energy_j=None if energy is None else energy * _ENERGY_UNIT_J,
    )


def compute_throttling(before: GpuMetrics | None, table: GpuMetrics) -> dict[str, float] | None:
    """The share of the time between two tables in which each kind of limit throttled the GPU; {}: none.

    A status counts for the whole time. So does a counter of unknown unit that has moved: then it is an upper bound.
    """
    if table.now is not None:
        return dict.fromkeys(sorted(table.now), 1.0)
    if table.counters is None or before is None or before.counters is None or before.kinds != table.kinds:
        return None
    moved = [(after - was) % 2**32 for was, after in zip(before.counters, table.counters, strict=True)]
    share: dict[str, float] = {}
    if table.cycles is None or before.cycles is None:
        return {kind: 1.0 for kind, by in zip(table.kinds, moved, strict=True) if by}
    cycles = (table.cycles - before.cycles) % 2**32
    if not cycles:
        return None
    for kind, by in zip(table.kinds, moved, strict=True):
        if by:
            share[kind] = max(share.get(kind, 0.0), min(1.0, by / cycles))
    return share


def _parse_status(status: int) -> frozenset[str] | None:
    if status == 2**64 - 1:
        return None
    return frozenset(kind for kind, bits in _LIMIT_BITS.items() if any(status >> bit & 1 for bit in bits))


class Meter:
    """Make samples of readings. It keeps the last one: some files are counters."""

    def __init__(self) -> None:
        self._clock_s: float | None = None
        self._tables: dict[str, GpuMetrics] = {}
        self._cpu: tuple[int, int] | None = None
        self._used_s: float | None = None

    def sample(self, reading: HostReading) -> tuple[dict[str, GpuSample], HostSample | None, ContainerSample | None]:
        """GPUs by render node, the host, and the container where there is one."""
        files = reading.files
        passed_s = None if self._clock_s is None else reading.clock_s - self._clock_s
        rated = passed_s is None or passed_s >= MIN_RATE_S
        if rated:
            self._clock_s = reading.clock_s
        by_gpu: dict[str, dict[str, bytes]] = defaultdict(dict)
        own: dict[str, bytes] = {}
        for path, content in files.items():
            if match := _GPU.match(path):
                by_gpu[match[1]][match[2]] = content
            elif "/cgroup/" in path:
                own[path.rpartition("/")[2]] = content
            elif path.endswith("/net/netstat"):
                own["netstat"] = content
        gpus = {name: self._gpu(name, found) for name, found in sorted(by_gpu.items())}
        return gpus, self._host(files, rated), self._container(own, passed_s, rated)

    def _gpu(self, name: str, files: Mapping[str, bytes]) -> GpuSample:
        table = parse_gpu_metrics(files.get("gpu_metrics", b""))
        held = None if table is None else compute_throttling(self._tables.get(name), table)
        self._tables.pop(name, None)
        if table is not None:
            self._tables[name] = table
        counter = _reject_above(_parse_scaled(files.get("energy1_input"), 1e-6), math.inf)
        power = _reject_above(_parse_scaled(files.get("power1_average"), 1e-6), MAX_W)
        return GpuSample(
            busy_percent=_reject_above(_parse_scaled(files.get("gpu_busy_percent")), 100),
            memory_busy_percent=_reject_above(_parse_scaled(files.get("mem_busy_percent")), 100),
            vram_used_bytes=_parse_size(files.get("mem_info_vram_used")),
            gtt_used_bytes=_parse_size(files.get("mem_info_gtt_used")),
            power_w=_reject_above(_parse_scaled(files.get("power1_input"), 1e-6), MAX_W) if power is None else power,
            package="board_info" not in files,  # which only discrete cards have
            temperatures_c=_parse_temperatures(files),
            clock_mhz=_parse_clock(files, "freq1_input", "pp_dpm_sclk"),
            memory_clock_mhz=_parse_clock(files, "freq2_input", "pp_dpm_mclk"),
            held_back=held,
            energy_j=table.energy_j if counter is None and table is not None else counter,
        )

    def _host(self, files: Files, rated: bool) -> HostSample | None:
        busy = None
        line = files.get("proc/stat", b"").partition(b"\n")[0].split()
        if rated and line[:1] == [b"cpu"] and len(line) > 5:
            ticks = [int(word) for word in line[1:9]]  # guest time is included in the first two
            now = sum(ticks), sum(ticks) - ticks[3] - ticks[4]
            if self._cpu is not None and now[0] > self._cpu[0]:
                busy = max(0.0, (now[1] - self._cpu[1]) / (now[0] - self._cpu[0]))
            self._cpu = now
        available = _find_field(files.get("proc/meminfo", b""), b"MemAvailable:")
        if busy is None and available is None:
            return None
        return HostSample(cpu_busy=busy, memory_available_bytes=None if available is None else available * 1024)

    def _container(self, files: Mapping[str, bytes], passed_s: float | None, rated: bool) -> ContainerSample | None:
        micro, nano = _find_field(files.get("cpu.stat", b""), b"usage_usec"), _parse_int(files.get("cpuacct.usage"))
        used_s = micro * 1e-6 if micro is not None else None if nano is None else nano * 1e-9
        cores = None
        if rated:
            if used_s is not None and self._used_s is not None and passed_s:
                cores = max(0.0, (used_s - self._used_s) / passed_s)
            self._used_s = used_s
        memory = _parse_size(files.get("memory.current", files.get("memory.usage_in_bytes")))
        if memory is not None:
            statistics = files.get("memory.stat", b"")
            cache = _find_field(statistics, b"total_inactive_file")
            cache = _find_field(statistics, b"inactive_file") if cache is None else cache
            memory = max(0, memory - (cache or 0))
        overflows = _parse_listen_overflows(files.get("netstat", b""))
        if cores is None and memory is None and overflows is None:
            return None
        return ContainerSample(cpu_cores=cores, memory_bytes=memory, listen_overflows=overflows)


def _parse_temperatures(files: Mapping[str, bytes]) -> dict[str, float]:
    found = {}
    for number in (1, 2, 3):
        value = _parse_scaled(files.get(f"temp{number}_input"), 1e-3)
        if value is not None:
            label = files.get(f"temp{number}_label", b"").decode(errors="replace").strip()
            found[label or f"temp{number}"] = value
    return found


def _parse_clock(files: Mapping[str, bytes], frequency: str, levels: str) -> float | None:
    hertz = _parse_scaled(files.get(frequency), 1e-6)
    if hertz is not None:
        return hertz
    match = _CURRENT_CLOCK.search(files.get(levels, b""))
    return float(match[1]) if match else None


def _parse_listen_overflows(netstat: bytes) -> int | None:
    """Return how many connections a network namespace has refused since its start because listen queues were full."""
    rows = [line.split() for line in netstat.splitlines() if line.startswith(b"TcpExt:")]
    return _parse_int(dict(zip(*rows, strict=False)).get(b"ListenOverflows")) if len(rows) == 2 else None


def _find_field(content: bytes, name: bytes) -> int | None:
    """The number after its name, in a file of such lines."""
    for line in content.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return _parse_int(words[1])
    return None


def _parse_scaled(content: bytes | None, factor: float = 1.0) -> float | None:
    value = _parse_int(content)
    return None if value is None else round(value * factor, 6)


def _reject_above(value: float | None, maximum: float) -> float | None:
    """Return None for an impossible value of a driver, such as a counter read as signed."""
    return value if value is not None and 0 <= value <= maximum else None


def _parse_size(content: bytes | None) -> int | None:
    value = _parse_int(content)
    return value if value is not None and 0 <= value < MAX_BYTES else None


def _parse_int(content: bytes | None) -> int | None:
    try:
        return None if content is None else int(content)
    except ValueError:
        return None


ROOT_VARIABLE = "AMD_LLM_LOAD_TELEMETRY_ROOT"  # instead of /, for tests on trees of files
INTERVAL_S = 1.0
MAX_STOP_S = 3.0  # a hanging driver must not delay the run

Source = Callable[[threading.Event], Iterator[HostReading]]  # readings until there is enough


def telemetry_root() -> Path:
    """The folder of /sys and /proc."""
    return Path(os.environ.get(ROOT_VARIABLE) or "/")


def local_source(container: list[str] | None = None, interval_s: float = INTERVAL_S) -> Source:
    """This machine's files; `container`: those of the control group of the server's container."""
    here = telemetry_root()
    return partial(read_periodically, partial(read_files, here, find_files(here, container)), interval_s)


class Sampler:
    """Sample between enter and exit. Nothing without a source; a failure leaves a gap."""

    def __init__(self, source: Source | None, cell: str, path: Path) -> None:
        self.samples = 0
        self.last_failure: str | None = None
        self._source = source
        self.cell = cell
        self._path = path
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._keep_sampling, name=f"telemetry of {cell}", daemon=True)

    def __enter__(self) -> "Sampler":
        if self._source is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enough.set()
        if self._thread.is_alive():
            self._thread.join(MAX_STOP_S)

    def _keep_sampling(self) -> None:
        assert self._source is not None
        meter = Meter()
        try:
            for reading in self._source(self._enough):
                gpus, host, container = meter.sample(reading)
                took_s = None if reading.took_s is None else round(reading.took_s, 6)
                sample = TelemetrySample(
                    wall_s=reading.wall_s, cell=self.cell, took_s=took_s, gpus=gpus, host=host, container=container
                )
                append_sample(self._path, sample)
                self.samples += 1
        except Exception as failure:  # the measurement goes on without telemetry
            self.last_failure = f"{type(failure).__name__}: {failure}"
