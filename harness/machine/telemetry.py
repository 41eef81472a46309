"""Telemetry of the host and its GPUs: files of /proc and /sys and the kernel log, read and converted once per second.

The files are searched once. A value that a driver refuses to give (EPERM, EBUSY, ENODATA) is missing from the sample,
and never 0.
"""

import math
import os
import re
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from harness.base.redact import masked
from harness.machine.gpus import AMD, read_number, read_sysfs
from harness.records.samples import (
    ContainerSample,
    GpuSample,
    HostSample,
    KernelLine,
    TelemetrySample,
    append_sample,
)
from harness.records.value_limits import MAX_BYTES, MAX_W

Files = Mapping[str, bytes]  # content by path below the root, without a slash in front

HOST_FILES = ("proc/stat", "proc/meminfo")
# Of each GPU, below /sys/class/drm/renderD*/device; the SENSORS below its hwmon/hwmon*.
GPU_FILES = (
    "gpu_busy_percent", "mem_busy_percent", "mem_info_vram_used", "mem_info_gtt_used", "board_info", "gpu_metrics",
)  # fmt: skip
SENSORS = (
    "power1_average", "power1_input", "freq1_input", "freq2_input", "energy1_input",
    *(f"temp{number}_{what}" for number in (1, 2, 3) for what in ("input", "label")),
)  # fmt: skip
# Of a control group, version 2 and 1. A host without systemd has version 1.
CGROUP_FILES = ("cpu.stat", "memory.current", "cpuacct.usage", "memory.usage_in_bytes", "memory.stat")

MIN_RATE_S = 0.2  # CPU time is counted in ticks of 10 ms: over less, a rate would be noise

_GPU = re.compile(r"^sys/class/drm/(renderD\d+)/device/(?:hwmon/hwmon\d+/)?([^/]+)$")


def find_files(root: Path, container_files: list[str] | None = None) -> list[str]:
    """Return the files to read each second below `root`. `container_files`: those of a container's control group."""
    files = [path for path in (*HOST_FILES, *(container_files or [])) if (root / path).exists()]
    for node in sorted((root / "sys/class/drm").glob("renderD*"), key=lambda path: path.name):
        device = node / "device"
        if read_number(device / "vendor", base=16) != AMD:
            continue
        paths = [device / name for name in GPU_FILES]
        paths += [sensor / name for sensor in sorted(device.glob("hwmon/hwmon*")) for name in SENSORS]
        files += [str(path.relative_to(root)) for path in paths if path.exists()]
    return files


def cgroup_files(root: Path, pid: int, container_id: str) -> list[str]:
    """Return the files of a container's control group, version 1 or 2. `pid`: one of the container's processes.

    Empty if the process is not the container's: the harness is in a container itself.
    """
    files: dict[str, str] = {}
    for line in (read_sysfs(root / f"proc/{pid}/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if container_id not in path:
            continue
        folders = ["", *(f"/{name}" for name in controllers.split(",") if name)]
        paths = [f"sys/fs/cgroup{folder}{path}/{name}" for folder in folders for name in CGROUP_FILES]
        files |= {Path(path).name: path for path in paths if (root / path).exists()}
    return list(files.values())


def read_files(root: Path, paths: list[str]) -> Files:
    """Return the content of the files that can be read."""
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
    return files


# The binary table `gpu_metrics` of the amdgpu driver: what throttles a GPU, and its energy counter. Its layouts are the
# structs gpu_metrics_v* in the kernel's drivers/gpu/drm/amd/include/kgd_pp_interface.h. Two kernels use one revision
# for two layouts, so the table's size must match too; revision 1.9 describes its own layout. Values that also have a
# file are read from that file.
# Kinds of limits, by bits of the ASIC independent status (SMU_THROTTLER_* in the kernel's amdgpu_smu.h).
_LIMIT_MASKS = {"power": 0xFFFF, "current": 0xFFFF << 16, "heat": 0x3FFF << 32, "prochot": 0x3 << 46}
_ENERGY_UNIT_J = 2.0**-16
_INSTINCT_KINDS = ("prochot", "power", "heat", "heat", "heat")  # socket, voltage regulator, memory
_APU_KINDS = ("prochot", "power", "power", "power", "heat", "heat", "heat")  # SPL, fast and slow PPT; core, gfx, soc


class _Layout(NamedTuple):
    """Offsets in a table; None: not in it."""

    status: int | None = None  # 64 bits
    energy: int | None = None  # a 64-bit counter
    cycles: int | None = None  # a counter of cycles, which is followed by counters of throttled cycles
    apu_times: int | None = None  # counters of throttled time in an unknown unit, without one of the whole time


_LAYOUTS = {  # by format, content, size of the table
    (1, 3, 120): _Layout(status=112),
    (1, 4, 288): _Layout(energy=24),
    (1, 5, 360): _Layout(energy=88),
    (1, 6, 384): _Layout(energy=88, cycles=104),
    (1, 6, 1664): _Layout(energy=16, cycles=32),
    (1, 7, 2208): _Layout(energy=24, cycles=40),
    (1, 8, 3360): _Layout(energy=24, cycles=40),
    (1, 8, 3872): _Layout(energy=24, cycles=40),
    (3, 0, 264): _Layout(apu_times=228),
}
# Revision 1.9 (struct gpu_metrics_v1_9): a count of attributes; of each an encoding and its values, without padding.
_ATTRIBUTES = (1, 9)
_WIDTHS = (1, 1, 2, 2, 4, 4, 8, 8)  # bytes, by enum amdgpu_metrics_attr_type: U8, S8, U16, ... S64
_UNSIGNED = (4, 6)  # U32, U64: a counter is one or the other
_ENERGY_ID = 7  # in enum amdgpu_metrics_attr_id, as the next
_RESIDENCY_IDS = range(9, 15)  # cycles, then the order of _INSTINCT_KINDS


class GpuMetrics(Struct, frozen=True, kw_only=True):
    """The content of a table `gpu_metrics`."""

    now: frozenset[str] | None = None  # kinds of limits that throttle the GPU at this moment
    counters: tuple[int, ...] | None = None  # of throttled time, one per limit
    kinds: tuple[str, ...] = ()  # of these limits
    cycles: int | None = None  # the whole time in the unit of `counters`; None: the unit is unknown
    energy_j: float | None = None  # since an unknown moment


def parse_gpu_metrics(raw: bytes) -> GpuMetrics | None:
    """Return the content of the table; None for an unknown revision or size. An empty field is None."""
    if len(raw) < 4:
        return None
    size, form, content = struct.unpack_from("<HBB", raw)
    if (form, content) == _ATTRIBUTES and len(raw) >= size:
        return _parse_attributes(raw[:size])
    layout = _LAYOUTS.get((form, content, size))
    if layout is None or len(raw) < size:
        return None
    status, energy = (_unpack(raw, "<Q", offset) for offset in (layout.status, layout.energy))
    residencies, apu_times = _unpack(raw, "<6I", layout.cycles), _unpack(raw, "<7I", layout.apu_times)
    counters = residencies[1:] if residencies else apu_times
    kinds = _INSTINCT_KINDS if residencies else _APU_KINDS
    return GpuMetrics(
        now=None if status is None else frozenset(kind for kind, mask in _LIMIT_MASKS.items() if status[0] & mask),
        counters=counters,
        kinds=() if counters is None else kinds,
        cycles=residencies[0] if residencies else None,
        energy_j=None if energy is None else energy[0] * _ENERGY_UNIT_J,
    )


def _unpack(raw: bytes, form: str, offset: int | None) -> tuple[int, ...] | None:
    """Return the numbers at an offset; None without one, or if one is all ones, with which the driver begins."""
    if offset is None:
        return None
    values = struct.unpack_from(form, raw, offset)
    return None if (2**64 if "Q" in form else 2**32) - 1 in values else values


def _parse_attributes(raw: bytes) -> GpuMetrics | None:
    """Return the content of a table that describes its own layout; None if that does not fit the size."""
    if len(raw) < 8:
        return None
    (count,) = struct.unpack_from("<i", raw, 4)
    offset = 8
    values: dict[int, int] = {}  # by attribute, without empty ones
    for _ in range(count):
        if offset + 8 > len(raw):
            return None
        (encoding,) = struct.unpack_from("<Q", raw, offset)
        unit, kind, attribute, length = encoding >> 24, encoding >> 20 & 0xF, encoding >> 10 & 0x3FF, encoding & 0x3FF
        if kind >= len(_WIDTHS) or not length:
            return None
        content = raw[offset + 8 : offset + 8 + _WIDTHS[kind] * length]
        offset += 8 + _WIDTHS[kind] * length
        if not unit and kind in _UNSIGNED and length == 1 and content.strip(b"\xff"):
            values[attribute] = int.from_bytes(content, "little")
    if count < 0 or offset != len(raw):
        return None
    energy_j = values[_ENERGY_ID] * _ENERGY_UNIT_J if _ENERGY_ID in values else None
    if any(attribute not in values for attribute in _RESIDENCY_IDS):
        return GpuMetrics(energy_j=energy_j)
    cycles, *residencies = (values[attribute] for attribute in _RESIDENCY_IDS)
    return GpuMetrics(counters=tuple(residencies), kinds=_INSTINCT_KINDS, cycles=cycles, energy_j=energy_j)


def compute_throttling(before: GpuMetrics | None, table: GpuMetrics) -> dict[str, float] | None:
    """Return the share of the time between two tables in which each kind of limit throttled the GPU; {}: none.

    A status counts for the whole time. So does a counter of unknown unit that has moved: then it is an upper bound.
    """
    if table.now is not None:
        return dict.fromkeys(sorted(table.now), 1.0)
    if table.counters is None or before is None or before.counters is None or before.kinds != table.kinds:
        return None
    changes = [(after - was) % 2**32 for was, after in zip(before.counters, table.counters, strict=True)]
    changed = [(kind, change) for kind, change in zip(table.kinds, changes, strict=True) if change]
    if table.cycles is None or before.cycles is None:
        return {kind: 1.0 for kind, _ in changed}
    cycles = (table.cycles - before.cycles) % 2**32
    if not cycles:
        return None
    shares: dict[str, float] = {}
    for kind, change in changed:
        shares[kind] = max(shares.get(kind, 0.0), min(1.0, change / cycles))
    return shares


class Meter:
    """Converts readings to samples. It keeps the last counters."""

    def __init__(self) -> None:
        self._clock_s: float | None = None
        self._tables: dict[str, GpuMetrics] = {}
        self._cpu_ticks: tuple[int, int] | None = None  # all, busy
        self._container_cpu_s: float | None = None

    def sample(
        self, files: Files, clock_s: float
    ) -> tuple[dict[str, GpuSample], HostSample | None, ContainerSample | None]:
        """Return the samples of the GPUs by render node, of the host, and of the container if there is one.

        `clock_s`: when the files were read, on the monotonic clock.
        """
        passed_s = None if self._clock_s is None else clock_s - self._clock_s
        has_rates = passed_s is None or passed_s >= MIN_RATE_S
        if has_rates:
            self._clock_s = clock_s
        by_gpu: dict[str, dict[str, bytes]] = defaultdict(dict)
        container: dict[str, bytes] = {}
        for path, content in files.items():
            if match := _GPU.match(path):
                by_gpu[match[1]][match[2]] = content
            elif "/cgroup/" in path:
                container[path.rpartition("/")[2]] = content
            elif path.endswith("/net/netstat"):
                container["netstat"] = content
        gpus = {name: self._sample_gpu(name, gpu_files) for name, gpu_files in sorted(by_gpu.items())}
        return gpus, self._sample_host(files, has_rates), self._sample_container(container, passed_s, has_rates)

    def _sample_gpu(self, name: str, files: Mapping[str, bytes]) -> GpuSample:
        table, before = parse_gpu_metrics(files.get("gpu_metrics", b"")), self._tables.pop(name, None)
        if table is not None:
            self._tables[name] = table
        energy_j = _parse_number(files.get("energy1_input"), 1e-6, math.inf)
        power_w = _parse_number(files.get("power1_average"), 1e-6, MAX_W)
        return GpuSample(
            busy_percent=_parse_number(files.get("gpu_busy_percent"), maximum=100),
            memory_busy_percent=_parse_number(files.get("mem_busy_percent"), maximum=100),
            vram_used_bytes=_parse_size(files.get("mem_info_vram_used")),
            gtt_used_bytes=_parse_size(files.get("mem_info_gtt_used")),
            power_w=_parse_number(files.get("power1_input"), 1e-6, MAX_W) if power_w is None else power_w,
            package="board_info" not in files,  # which only discrete cards have
            temperatures_c=_parse_temperatures(files),
            clock_mhz=_parse_number(files.get("freq1_input"), 1e-6),
            memory_clock_mhz=_parse_number(files.get("freq2_input"), 1e-6),
            held_back=None if table is None else compute_throttling(before, table),
            energy_j=table.energy_j if energy_j is None and table is not None else energy_j,
        )

    def _sample_host(self, files: Files, has_rates: bool) -> HostSample | None:
        busy = None
        line = files.get("proc/stat", b"").partition(b"\n")[0].split()
        if has_rates and line[:1] == [b"cpu"] and len(line) > 5:
            ticks = [int(word) for word in line[1:9]]  # guest time is included in the first two
            total, active = sum(ticks), sum(ticks) - ticks[3] - ticks[4]
            if self._cpu_ticks is not None and total > self._cpu_ticks[0]:
                busy = (active - self._cpu_ticks[1]) / (total - self._cpu_ticks[0])
                busy = min(1.0, max(0.0, busy))  # the kernel's time of waiting for a disk may decrease
            self._cpu_ticks = total, active
        available_kib = _find_field(files.get("proc/meminfo", b""), b"MemAvailable:")
        if busy is None and available_kib is None:
            return None
        available = None if available_kib is None else available_kib * 1024
        return HostSample(cpu_busy=busy, memory_available_bytes=available)

    def _sample_container(
        self, files: Mapping[str, bytes], passed_s: float | None, has_rates: bool
    ) -> ContainerSample | None:
        micro, nano = _find_field(files.get("cpu.stat", b""), b"usage_usec"), _parse_int(files.get("cpuacct.usage"))
        cpu_s = micro * 1e-6 if micro is not None else None if nano is None else nano * 1e-9
        cores = None
        if has_rates:
            if cpu_s is not None and self._container_cpu_s is not None and passed_s:
                cores = max(0.0, (cpu_s - self._container_cpu_s) / passed_s)
            self._container_cpu_s = cpu_s
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
    temperatures = {}
    for number in (1, 2, 3):
        value = _parse_number(files.get(f"temp{number}_input"), 1e-3)
        if value is not None:
            label = files.get(f"temp{number}_label", b"").decode(errors="replace").strip()
            temperatures[label or f"temp{number}"] = value
    return temperatures


def _parse_listen_overflows(netstat: bytes) -> int | None:
    """Return how many connections a network namespace has refused since its start because listen queues were full."""
    rows = [line.split() for line in netstat.splitlines() if line.startswith(b"TcpExt:")]
    return _parse_int(dict(zip(*rows, strict=False)).get(b"ListenOverflows")) if len(rows) == 2 else None


def _find_field(content: bytes, name: bytes) -> int | None:
    """Return the number after a name, in a file with one name per line."""
    for line in content.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return _parse_int(words[1])
    return None


def _parse_number(content: bytes | None, factor: float = 1.0, maximum: float | None = None) -> float | None:
    """Return the number of a file. With a maximum, None for a number that a driver cannot mean: negative or larger."""
    number = _parse_int(content)
    value = None if number is None else round(number * factor, 6)
    is_impossible = value is not None and maximum is not None and not 0 <= value <= maximum
    return None if is_impossible else value


def _parse_size(content: bytes | None) -> int | None:
    value = _parse_int(content)
    return value if value is not None and 0 <= value < MAX_BYTES else None


def _parse_int(content: bytes | None) -> int | None:
    try:
        return None if content is None else int(content)
    except ValueError:
        return None


MAX_KERNEL_LINES = 50  # that one reading keeps: a driver in trouble logs thousands
_MAX_LINE_CHARS = 400
_MAX_KERNEL_READS = 2000  # of one call
_MAX_RING_READS = 200_000  # records in the whole log: a reading of it is bounded
_KERNEL_TOPICS = re.compile(
    r"amdgpu|\[drm|\bkfd\b|AMD-Vi|[Oo]ut of memory|oom-kill|thermal|Machine check|segfault", re.IGNORECASE
)


class KernelLog:
    """The kernel log from now on. A record is `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT` (Linux, dev-kmsg).

    `numbered`: read what the log has until now for `sequence`, the number of the newest record that was read.
    `after`: the first lines are those of the records after this number; `is_complete`: the log still had all of them.
    """

    def __init__(self, root: Path, *, numbered: bool = False, after: int | None = None) -> None:
        self.sequence: int | None = None
        self.is_complete = False
        self._rest = b""
        self._earlier: list[KernelLine] = []
        try:
            self._file: int | None = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if numbered:
                self._read_earlier(after)
            else:
                os.lseek(self._file, 0, os.SEEK_END)
        except OSError:  # not allowed, or a container without it
            self._file = None

    def read(self) -> list[KernelLine] | None:
        """Return the new lines that matter; None if this process may not read the log."""
        if self._file is None:
            return None
        kernel_lines, self._earlier = self._earlier, []
        for raw in self._records(_MAX_KERNEL_READS):
            if len(kernel_lines) < MAX_KERNEL_LINES and (line := _parse_kernel_line(raw)) is not None:
                kernel_lines.append(line)
        return kernel_lines

    def _read_earlier(self, after: int | None) -> None:
        """Read what the log has until now, and keep the lines of the records after a number."""
        oldest = None
        for raw in self._records(_MAX_RING_READS):
            oldest = self.sequence if oldest is None else oldest
            is_wanted = after is not None and self.sequence is not None and self.sequence > after
            if is_wanted and len(self._earlier) < MAX_KERNEL_LINES and (line := _parse_kernel_line(raw)) is not None:
                self._earlier.append(line)
        if after is not None and oldest is not None and self.sequence is not None:
            self.is_complete = oldest - 1 <= after <= self.sequence

    def _records(self, max_reads: int) -> Iterator[bytes]:
        """Yield the lines of the records that were not read yet; `sequence` is that of the record."""
        assert self._file is not None
        for _ in range(max_reads):
            try:
                data = os.read(self._file, 8192)
            except BlockingIOError:
                return
            except OSError:  # EPIPE: records were overwritten before they were read
                continue
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for raw in lines:
                number = raw.partition(b";")[0].split(b",")[1:2]
                if number and number[0].isdigit() and len(number[0]) < 16:
                    self.sequence = int(number[0])
                yield raw

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _parse_kernel_line(raw: bytes) -> KernelLine | None:
    head, separator, text = raw.decode("utf-8", "replace").partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not fields[2].isdecimal() or not _KERNEL_TOPICS.search(text):
        return None
    age_s = time.clock_gettime(time.CLOCK_MONOTONIC) - int(fields[2][:15]) / 1e6
    return KernelLine(wall_s=time.time() - max(0.0, min(age_s, 1e9)), text=masked(text[:_MAX_LINE_CHARS]))


# The kernel writes the id of the thread that faulted: `llama-server[4242]: segfault`, `pid 4242`, `pid=4242`.
_KERNEL_PROCESS = re.compile(r"(?:\[|\b[Pp]id[ =]|\b[Pp]rocess )(\d{1,10})\b")
_MAX_TASKS = 100_000


def server_tasks(root: Path, pid: int) -> set[int]:
    """Return the ids of the threads of a process and of its descendants; empty if they cannot be listed."""
    task_ids, processes = set[int](), [pid]
    while processes and len(task_ids) < _MAX_TASKS:
        folder = root / f"proc/{processes.pop()}/task"
        try:
            tasks = os.listdir(folder)
        except OSError:  # it has ended
            continue
        for task in tasks:
            children = read_sysfs(folder / task / "children")
            if children is not None:
                task_ids.add(int(task))
                processes += [int(child) for child in children.split()]
    return task_ids


def with_process(line: KernelLine, tasks: Set[int]) -> KernelLine:
    """Return a line of the kernel log with whether its process is the server's, whose threads `tasks` are."""
    ids = {int(pid) for pid in _KERNEL_PROCESS.findall(line.text)}
    return replace(line, of_server=not ids.isdisjoint(tasks)) if ids and tasks else line


ROOT_VARIABLE = "AMD_LLM_LOAD_TELEMETRY_ROOT"  # instead of /, for tests on trees of files
INTERVAL_S = 1.0
MAX_STOP_S = 3.0  # a hanging driver must not delay the run


def telemetry_root() -> Path:
    """Return the folder that has /sys and /proc."""
    return Path(os.environ.get(ROOT_VARIABLE) or "/")


def reports_power() -> bool:
    """Whether a GPU of this machine reports its power or its energy."""
    root = telemetry_root()
    gpus, *_ = Meter().sample(read_files(root, find_files(root)), 0.0)
    return any(gpu.power_w is not None or gpu.energy_j is not None for gpu in gpus.values())


class Sampler:
    """Appends a sample to a file at enter, at each interval, and at exit. A failure leaves a gap.

    `container_files`: those of the server's control group, next to this machine's; None: there is nothing to sample.
    `server_pid`: its first process, for lines of the kernel log; None: not known.
    """

    def __init__(
        self,
        container_files: list[str] | None,
        cell: str,
        path: Path,
        *,
        interval_s: float = INTERVAL_S,
        server_pid: int | None = None,
    ) -> None:
        self.samples = 0
        self.last_failure: str | None = None
        self._container_files = container_files
        self._interval_s = interval_s
        self._server_pid = server_pid
        self._tasks = set[int]()  # of the server, also those that have ended
        self.cell = cell
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_sampling, name=f"telemetry of {cell}", daemon=True)

    def __enter__(self) -> "Sampler":
        if self._container_files is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(MAX_STOP_S)

    def _keep_sampling(self) -> None:
        meter = Meter()
        try:
            root = telemetry_root()
            files, kernel_log = find_files(root, self._container_files), KernelLog(root)
            due = time.monotonic()
            is_last = False
            while True:
                wall_s, clock_s = time.time(), time.monotonic()
                contents = read_files(root, files)
                took_s = round(time.monotonic() - clock_s, 6)
                due = max(due + self._interval_s, time.monotonic())  # do not catch up after a slow reading
                gpus, host, container = meter.sample(contents, clock_s)
                sample = TelemetrySample(
                    wall_s=wall_s,
                    cell=self.cell,
                    took_s=took_s,
                    gpus=gpus,
                    host=host,
                    container=container,
                    kernel=self._read_kernel(root, kernel_log),
                )
                append_sample(self._path, sample)
                self.samples += 1
                if is_last:
                    kernel_log.close()
                    return
                is_last = self._stop.wait(max(0.0, due - time.monotonic()))
        except Exception as failure:  # the measurement goes on without telemetry
            self.last_failure = f"{type(failure).__name__}: {failure}"

    def _read_kernel(self, root: Path, kernel_log: KernelLog) -> list[KernelLine] | None:
        lines = kernel_log.read()
        if lines is None or self._server_pid is None:
            return lines
        self._tasks |= server_tasks(root, self._server_pid)  # a process that crashed may not be listed any more
        return [with_process(line, self._tasks) for line in lines]
