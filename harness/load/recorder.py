"""Write records and marks, and measure how busy the load process is: whether it was the bottleneck."""

import hashlib
import itertools
import logging
import math
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gevent
import msgspec

from harness.files import UNDECODABLE, open_file
from harness.job import Job
from harness.load.reader import IdleQueue
from harness.load.sequencer import Phase
from harness.redact import masked
from harness.rundir.records import ProcessMark, Request
from harness.workers import MACHINE

TICK_S = 0.05
_WINDOW_S = 5.0
_MAX_VALUES = 10_000  # different lags; three digits of all up to a second are 3,600
_MIN_S = 1.0  # shorter times give no number
_SCHEDSTAT = Path("/proc/self/schedstat")  # of the main thread, which does all the work: ns run, ns waited, ...


class _Use(NamedTuple):
    at_s: float  # monotonic
    cpu_s: float
    waited_s: float  # for a core; 0 where that is not counted


class Health:
    """CPU use over short times, the delay of reads, and the delay of the event loop."""

    def __init__(self) -> None:
        self._used: deque[_Use] = deque()  # each second of the last window
        self._max: float | None = None  # over whole windows
        self._lags: Counter[int] = Counter()
        self._loop_lags: Counter[int] = Counter()
        self._began: tuple[float, float | None] | None = None  # monotonic time, and time waited for a core until then

    def begin(self) -> None:
        if not self._used:
            self._used.append(_use())
            self._began = (time.monotonic(), _waited_s())

    def sample(self) -> None:
        """Sample the CPU use. Call it each second."""
        if not self._used:
            return
        now = _use()
        self._used.append(now)
        while now.at_s - self._used[1].at_s >= _WINDOW_S:
            self._used.popleft()
        if now.at_s - self._used[0].at_s >= _WINDOW_S:
            self._max = max(self._max or 0.0, self._share())

    def busy_now(self) -> float | None:
        """Share of the last window in which it ran or waited for a core."""
        if not self._known():
            return None
        first, last = self._used[0], self._used[-1]
        return self._share() + (last.waited_s - first.waited_s) / (last.at_s - first.at_s)

    def note_reads(self, lags_us: list[int]) -> None:
        """Note how long the bytes of each read had waited, in microseconds."""
        self._lags.update(lags_us)
        self._lags = _bounded(self._lags)

    def note_loop(self, late_s: float) -> None:
        """Note how late the event loop ran a timer of TICK_S.

        Ticks due meanwhile were late as well and count too: else a long pause would be a single value.
        """
        if not self._used:
            return
        late_us = max(0, round(late_s * 1e6))
        self._loop_lags.update(range(late_us, -1, -round(TICK_S * 1e6)))
        self._loop_lags = _bounded(self._loop_lags)

    def fields(self) -> dict[str, float | None]:
        """Fields of an end mark. None: it was too short to say."""
        self.sample()
        late, ticks = self._loop_lags, self._loop_lags.total()
        mean_s = sum(lag_us * number for lag_us, number in late.items()) / ticks / 1e6 if ticks else None
        return {
            # The highest share of a core over a window, or over the whole time if shorter.
            "cpu_max": self._share() if self._max is None and self._known() else self._max,
            "read_lag_p99_s": _percentile_s(self._lags, 0.99),  # from the kernel's stamp to the read
            "loop_lag_mean_s": mean_s if ticks * TICK_S >= _MIN_S else None,
            "loop_lag_p50_s": _percentile_s(late, 0.5) if ticks >= 2 else None,
            "loop_lag_p99_s": _percentile_s(late, 0.99) if ticks >= 100 else None,
            "loop_lag_max_s": max(late) / 1e6 if late else None,
            "core_wait": self._core_wait(),
        }

    def _core_wait(self) -> float | None:
        """Share of the time since the first measured request in which it waited for a core."""
        waited_s = _waited_s()
        if self._began is None or waited_s is None or self._began[1] is None:
            return None
        past_s = time.monotonic() - self._began[0]
        return (waited_s - self._began[1]) / past_s if past_s >= _MIN_S else None

    def _known(self) -> bool:
        return bool(self._used) and self._used[-1].at_s - self._used[0].at_s >= _MIN_S

    def _share(self) -> float:
        first, last = self._used[0], self._used[-1]
        return (last.cpu_s - first.cpu_s) / (last.at_s - first.at_s)


def _percentile_s(values_us: Counter[int], share: float) -> float | None:
    left = math.ceil(share * values_us.total())
    for value_us in sorted(values_us):
        left -= values_us[value_us]
        if left <= 0:
            return max(value_us, 0) / 1e6
    return None


def _bounded(values_us: Counter[int]) -> Counter[int]:
    """Return the values; if too many differ, with three digits, so that memory does not grow."""
    if len(values_us) <= _MAX_VALUES:
        return values_us
    rounded: Counter[int] = Counter()
    for value_us, number in values_us.items():
        rounded[round(value_us, 3 - len(str(abs(value_us))))] += number
    return rounded


def _use() -> _Use:
    return _Use(time.monotonic(), time.process_time(), _waited_s() or 0.0)


def _waited_s() -> float | None:
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not Linux, or not counted by the kernel
        return None


_FLUSH_TICKS = 4
_FLUSH_BYTES = 65_536
_SAMPLE_S = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger(__name__)


class Anchor(NamedTuple):
    """The offset of a machine's wall clock, by which records of several machines are joined."""

    machine: int = 0
    correction_s: float = 0.0  # to be added to its wall clock
    error_s: float | None = None  # None: its own clock


HERE = Anchor()


class Recorder:
    """Append whole lines, each batch in one write, so that processes never tear each other's lines.

    Made after the fork. What a `kill -9` can take is at most the last 0.2 s, and of a process without an idle moment a
    thousand records.
    """

    def __init__(self, job: Job, anchor: Anchor = HERE) -> None:
        """Open both files and write a start mark for each stage. Raises OSError."""
        self.sent = 0  # requests whose sending started
        self.recorded = 0
        self.in_flight_of: Counter[str] = Counter()  # by user class
        self.watcher: Callable[[Request], None] | None = None  # called with each record of a live load
        self.steady: Callable[[int], bool | None] | None = None  # whether a stage's warm-up found the server steady
        self.unmeasured_s: list[float | None] | None = None  # of each stage, where the load was stopped early
        self.users: int | None = None  # of this process; None: their number changes with the stages
        self.users_gone = 0  # of them, those that ended before they were stopped
        self.health = Health()
        self.idle = IdleQueue()  # makes the records
        self._cells = [job.cell if job.load_name else "by-hand", *(stage.cell for stage in job.then)]
        self._stage = 0  # the last measured one
        self._sent_in = [0] * len(self._cells)
        self._added_in = [0] * len(self._cells)
        self._health_in: dict[int, dict[str, float | None]] = {}  # of stages that are over
        self._pid = os.getpid()
        self.process = anchor.machine * MACHINE + self._pid
        self._anchor = anchor
        self._lines = bytearray()
        self._pending = 0  # records in _lines
        self._encoder = msgspec.json.Encoder()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._requests = os.open(job.requests_path, flags, 0o644)
        self._processes = os.open(job.processes_path, flags, 0o644)
        self._cpu_s = time.process_time()
        self._closed = False
        self._write_marks("start")
        self._flusher = gevent.spawn(self._flush_regularly)

    @property
    def in_flight(self) -> int:
        """Requests in flight. The records of ended requests may still be waiting in the idle queue."""
        return self.in_flight_of.total()

    def sending(self, phase: Phase, stage: int = 0) -> None:
        self.sent += 1
        self._sent_in[stage] += 1
        if phase == "measured":
            if stage > self._stage:
                self._health_in[self._stage] = self.health.fields()
                self.health, self._stage = Health(), stage
            self.health.begin()

    def add(self, request: Request, stage: int = 0) -> None:
        self._added_in[stage] += 1
        self._lines += self._encoder.encode(request) + b"\n"
        self._pending += 1
        if self.watcher is not None:
            try:
                self.watcher(request)
            except Exception:  # an observer failed: the load goes on
                logger.exception("the live numbers end here")
                self.watcher = None
        if len(self._lines) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write all lines to the file. After an error (disk full) keep them for the next call."""
        try:
            while self._lines:
                written = os.write(self._requests, self._lines)
                del self._lines[:written]
        except OSError as error:
            logger.error("records cannot be written: %s", error.strerror)
            return
        self.recorded += self._pending
        self._pending = 0

    def close(self) -> None:
        """Write the remaining records and the end mark. A second call, or one in a forked child, does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.idle.finish()
        self._flusher.kill(block=False)
        self.flush()
        self._write_marks("end")
        os.close(self._requests)
        os.close(self._processes)

    def _flush_regularly(self) -> None:
        sampled = time.monotonic()
        for tick in itertools.count(1):
            due_s = time.monotonic() + TICK_S
            gevent.sleep(TICK_S)
            self.health.note_loop(time.monotonic() - due_s)
            if tick % _FLUSH_TICKS == 0:
                self.flush()
            if time.monotonic() - sampled >= _SAMPLE_S:
                sampled = time.monotonic()
                self.health.sample()

    def _write_marks(self, event: Literal["start", "end"]) -> None:
        for stage, cell in enumerate(self._cells):
            mark = ProcessMark(
                event=event,
                process=self.process,
                host=this_host(),
                cell=cell,
                wall_s=time.time() + self._anchor.correction_s,
                wall_error_s=self._anchor.error_s,
                monotonic_s=time.monotonic(),
                **(self._end_fields(stage) if event == "end" else {}),
            )
            try:
                os.write(self._processes, self._encoder.encode(mark) + b"\n")
            except OSError as error:
                if event == "start":
                    raise
                logger.error("the end mark cannot be written: %s", error.strerror)

    def _end_fields(self, stage: int) -> dict[str, Any]:
        """The fields of an end mark. Records that could not be written are missing in the last stage."""
        return {
            "steady": None if self.steady is None else self.steady(stage),
            "sent": self._sent_in[stage],
            "recorded": self._added_in[stage] - self._pending * (stage == len(self._cells) - 1),
            "left_s": None if self.unmeasured_s is None else self.unmeasured_s[stage],
            "users": self.users,
            "users_gone": None if self.users is None else self.users_gone,
            "cpu_s": time.process_time() - self._cpu_s,
            **(self.health.fields() if stage == self._stage else self._health_in.get(stage, {})),
        }


def this_host() -> str:
    """This machine since its boot: its name, and a digest that processes on the same monotonic clock share."""
    name = socket.gethostname()
    try:
        boot = _BOOT_ID.read_text()
    except OSError:  # not Linux: use the name only
        boot = name
    return f"{name}-{hashlib.sha256(boot.encode()).hexdigest()[:8]}"


PIECE = 262_144  # bytes at once, so that Locust's messages are not delayed

_FINISHES = (None, "stop", "length", "tool_calls")  # no texts of a server

FILES: dict[str, type[Any]] = {"requests": Request, "processes": ProcessMark}


class RecordSender:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.taken = 0  # bytes that have arrived

    def rest(self) -> int:
        """Bytes that have not arrived."""
        return self.size() - self.taken

    def size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def piece(self) -> bytes:
        """The next whole lines that have not arrived; empty if none."""
        with open_file(self._path) as file:
            file.seek(self.taken)
            data = file.read(PIECE)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == PIECE:  # a longer line is sent as a whole
                return data + file.readline()
        return data[:end]


class RecordReceiver:
    """Receive such a file and append it to a common one."""

    def __init__(self, path: Path, kind: type[Any]) -> None:
        """`kind`: what each of its lines is."""
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self.left_out = 0  # unreadable lines
        self.taken = 0  # bytes as sent

    def take(self, offset: int, data: bytes) -> int:
        """Append a piece, unless it came before. Return the bytes received. Raises OSError, with nothing appended."""
        if offset == self.taken:
            lines = [self._clean(line) for line in data.splitlines(keepends=True)]
            _append(self._path, b"".join(filter(None, lines)))
            self.left_out += lines.count(None)
            self.taken += len(data)
        return self.taken

    def _clean(self, line: bytes) -> bytes | None:
        """A line without secrets of this machine that a server may have quoted; None: it cannot be read."""
        try:
            record = self._decoder.decode(line)
        except UNDECODABLE:
            return None
        if not line.endswith(b"\n"):
            return None
        if not isinstance(record, Request) or (record.message is None and record.finish in _FINISHES):
            return line
        clean = msgspec.structs.replace(
            record, message=masked(record.message, "known"), finish=masked(record.finish, "sure")
        )
        return line if clean == record else msgspec.json.encode(clean) + b"\n"


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(file).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:  # disk full: remove the incomplete line
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)
