"""Write the records and marks of a load process, transfer them, and measure whether the process is a bottleneck."""

import contextlib
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
from gevent.monkey import get_original

from harness.base.files import UNDECODABLE, open_file
from harness.base.process import has_orphaned_us
from harness.base.redact import masked
from harness.load.live_metrics import RequestInFlight
from harness.load.reader import IdleQueue
from harness.load.sequencer import Work
from harness.records.records import KNOWN_FINISHES, ProcessMark, ReplayedConversation, Request
from harness.scenario.workers import MACHINE
from harness.workload.job import Job, cells_of, in_flight_file, loads_of

TICK_S = 0.05
_WINDOW_S = 5.0
_MIN_S = 1.0  # no number for shorter times
_SCHEDSTAT = Path("/proc/self/schedstat")  # of the main thread, which does all the work: ns run, ns waited, ...


class _CpuSample(NamedTuple):
    """CPU time of this process and its time of waiting for a core. None: the system does not count it."""

    at_s: float  # monotonic
    cpu_s: float
    waited_s: float | None

    @classmethod
    def now(cls) -> "_CpuSample":
        try:
            waited_s = int(_SCHEDSTAT.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # not Linux, or not counted by the kernel
            waited_s = None
        return cls(time.monotonic(), time.process_time(), waited_s)

    def cpu_share(self, since: "_CpuSample") -> float:
        return (self.cpu_s - since.cpu_s) / (self.at_s - since.at_s)

    def wait_share(self, since: "_CpuSample") -> float | None:
        if self.waited_s is None or since.waited_s is None:
            return None
        return (self.waited_s - since.waited_s) / (self.at_s - since.at_s)


class Health:
    """Shows whether the load process is a bottleneck: its CPU use, and the delays of its reads and event loop."""

    def __init__(self) -> None:
        self._first: _CpuSample | None = None  # at the first measured request
        self._window: deque[_CpuSample] = deque()  # one for each second
        self._cpu_max: float | None = None  # over whole windows
        self._read_lags_us: Counter[int] = Counter()
        self._loop_lags_us: Counter[int] = Counter()

    def begin(self) -> None:
        """Start at the first measured request. Further calls do nothing."""
        if self._first is None:
            self._first = _CpuSample.now()
            self._window.append(self._first)

    def sample(self) -> None:
        """Sample the CPU use. Call it each second."""
        if self._first is None:
            return
        now = _CpuSample.now()
        self._window.append(now)
        while now.at_s - self._window[1].at_s >= _WINDOW_S:
            self._window.popleft()
        if now.at_s - self._window[0].at_s >= _WINDOW_S:
            self._cpu_max = max(self._cpu_max or 0.0, now.cpu_share(self._window[0]))

    def busy_share(self) -> float | None:
        """Return the share of the last window in which the process ran or waited for a core; None if it is short."""
        if not self._is_window_long_enough():
            return None
        first, last = self._window[0], self._window[-1]
        return last.cpu_share(first) + (last.wait_share(first) or 0.0)

    def note_read_lags(self, lags_us: list[int]) -> None:
        """Note how long the bytes of each read had waited, in microseconds."""
        self._read_lags_us.update(lags_us)

    def note_loop_lag(self, late_s: float) -> None:
        """Note how late the event loop ran a timer of TICK_S.

        Ticks that were due in the meantime were late as well and count too: otherwise a long pause would be one value.
        """
        if self._first is None:
            return
        late_us = max(0, round(late_s * 1e6))
        self._loop_lags_us.update(range(late_us, -1, -round(TICK_S * 1e6)))

    def end_mark_fields(self) -> dict[str, float | None]:
        """Return the fields of an end mark. None: the time was too short for the number."""
        self.sample()
        lags_us, ticks = self._loop_lags_us, self._loop_lags_us.total()
        mean_s = sum(lag_us * count for lag_us, count in lags_us.items()) / ticks / 1e6 if ticks else None
        cpu_max, core_wait = self._cpu_max, None
        if cpu_max is None and self._is_window_long_enough():
            cpu_max = self._window[-1].cpu_share(self._window[0])
        if self._first is not None and self._window[-1].at_s - self._first.at_s >= _MIN_S:
            core_wait = self._window[-1].wait_share(self._first)
        return {
            "cpu_max": cpu_max,  # highest share of a core over a window, or over the whole time if that is shorter
            "read_lag_p99_s": _percentile_s(self._read_lags_us, 0.99),  # from the kernel's stamp to the read
            "loop_lag_mean_s": mean_s if ticks * TICK_S >= _MIN_S else None,
            "loop_lag_p50_s": _percentile_s(lags_us, 0.5) if ticks >= 2 else None,
            "loop_lag_p99_s": _percentile_s(lags_us, 0.99) if ticks >= 100 else None,
            "loop_lag_max_s": max(lags_us) / 1e6 if lags_us else None,
            "core_wait": core_wait,  # share of the time since the first measured request in which it waited for a core
        }

    def _is_window_long_enough(self) -> bool:
        return bool(self._window) and self._window[-1].at_s - self._window[0].at_s >= _MIN_S


def _percentile_s(values_us: Counter[int], share: float) -> float | None:
    """Return the smallest value that at least this share of all values do not exceed; negative values count as 0."""
    rank = math.ceil(share * values_us.total())
    for value_us in sorted(values_us):
        rank -= values_us[value_us]
        if rank <= 0:
            return max(value_us, 0) / 1e6
    return None


_FLUSH_TICKS = 4
_FLUSH_BYTES = 65_536
_ORPHAN_CHECK_S = 0.5
_ORPHAN_END_S = 3.0  # less than process.ORPHAN_GRACE_S
_SAMPLE_S = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger(__name__)


class Anchor(NamedTuple):
    """The offset of a machine's wall clock, which joins the records of several machines."""

    machine: int = 0
    correction_s: float = 0.0  # to be added to the machine's wall clock
    error_s: float | None = None  # None: the clock of the master itself


_LOCAL = Anchor()


class Recorder:
    """Appends records and marks. Writes whole lines at once, so that processes never tear each other's lines.

    Create it after the fork. A `kill -9` loses at most the records of the last 0.2 s, or 1000 records of a process that
    is never idle.
    """

    def __init__(self, job: Job, anchor: Anchor = _LOCAL) -> None:
        """Open both files and write a start mark for each cell. Raises OSError."""
        self.sent = 0  # requests whose sending started
        self.recorded = 0
        self.in_flight_of: Counter[str] = Counter()  # by user class
        self.asked_in_flight = 0  # tokens that requests without a record asked for at most
        self.watcher: Callable[[Request], None] | None = None  # called with each record of a live load
        # The requests of this process without a record, for the live numbers.
        self.requests_in_flight: Callable[[], list[RequestInFlight]] = list
        # By stage and load: whether the warm-up found the server steady.
        self.steady: Callable[[int, int], bool | None] | None = None
        self.unmeasured_s: list[float | None] | None = None  # of each stage, if the load was stopped early
        self.old_in_flight: Callable[[], list[Request]] | None = None  # for a capacity probe
        self._loads = len(loads_of(job))
        # Users of this process by load; None: their number changes with the stages.
        self.users: list[int] | None = None
        self.users_gone = [0] * self._loads  # users that ended before they were stopped
        self.health = Health()
        self.idle = IdleQueue()  # makes the records
        self._cells = [cell for cell, _ in cells_of(job)] if job.load_name else ["by-hand"]  # of stages, or of a mix
        self._stage = 0  # the last measured one
        self._sent_of = [0] * len(self._cells)
        self._replays_of: dict[int, list[ReplayedConversation]] = {}  # by load
        self._recorded_of = [0] * len(self._cells)
        self._health_by_stage: dict[int, dict[str, float | None]] = {}  # of stages that are over
        self._pid = os.getpid()
        self.process = anchor.machine * MACHINE + self._pid
        self._anchor = anchor
        self._lines = bytearray()  # not written yet
        self._pending = 0  # records in _lines
        self._encoder = msgspec.json.Encoder()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._in_flight_path = in_flight_file(job.counter_path, self._pid)
        self._requests = os.open(job.requests_path, flags, 0o644)
        self._processes = os.open(job.processes_path, flags, 0o644)
        self._cpu_s = time.process_time()
        self._closed = False
        self._write_marks("start")
        self._flusher = gevent.spawn(self._flush_regularly)
        get_original("_thread", "start_new_thread")(self._save_when_orphaned, ())

    @property
    def in_flight(self) -> int:
        """The number of requests in flight. The records of ended requests may still wait in the idle queue."""
        return self.in_flight_of.total()

    def note_sending(self, work: Work) -> None:
        self.sent += 1
        self._sent_of[work.cell_number] += 1
        if work.phase == "measured":
            if work.stage > self._stage:
                self._health_by_stage[self._stage] = self.health.end_mark_fields()
                self.health, self._stage = Health(), work.stage
            self.health.begin()

    def note_replay(self, replayed: ReplayedConversation, load: int = 0) -> None:
        self._replays_of.setdefault(load, []).append(replayed)

    def add(self, request: Request, cell_number: int = 0) -> None:
        self._recorded_of[cell_number] += 1
        self._lines += self._encoder.encode(request) + b"\n"
        self._pending += 1
        if self.watcher is not None:
            try:
                self.watcher(request)
            except Exception:  # an observer failed: the load continues
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

    def _save_when_orphaned(self) -> None:
        """Write all records when the harness is gone and this process computes, so that it handles no signal.

        It runs in a thread of the system, because no greenlet runs then.
        """
        sleep = get_original("time", "sleep")
        while not has_orphaned_us():
            sleep(_ORPHAN_CHECK_S)
            if self._closed:
                return
        sleep(_ORPHAN_END_S)  # to end in order
        if not self._closed:
            self.idle.run_all()
            self.flush()

    def _flush_regularly(self) -> None:
        sampled_s = time.monotonic()
        for tick in itertools.count(1):
            due_s = time.monotonic() + TICK_S
            gevent.sleep(TICK_S)
            self.health.note_loop_lag(time.monotonic() - due_s)
            if tick % _FLUSH_TICKS == 0:
                self.flush()
            if time.monotonic() - sampled_s >= _SAMPLE_S:
                sampled_s = time.monotonic()
                self.health.sample()
                self._report_in_flight()

    def _report_in_flight(self) -> None:
        if self.old_in_flight is not None:
            with contextlib.suppress(OSError):  # the next report may succeed
                new = Path(f"{self._in_flight_path}-new")
                new.write_bytes(self._encoder.encode(self.old_in_flight()))
                new.replace(self._in_flight_path)  # whole

    def _write_marks(self, event: Literal["start", "end"]) -> None:
        for number, cell in enumerate(self._cells):
            mark = ProcessMark(
                event=event,
                process=self.process,
                host=this_host(),
                cell=cell,
                wall_s=time.time() + self._anchor.correction_s,
                wall_error_s=self._anchor.error_s,
                monotonic_s=time.monotonic(),
                **(self._end_fields(number) if event == "end" else {}),
            )
            try:
                os.write(self._processes, self._encoder.encode(mark) + b"\n")
            except OSError as error:
                if event == "start":
                    raise
                logger.error("the end mark cannot be written: %s", error.strerror)

    def _end_fields(self, number: int) -> dict[str, Any]:
        """Return the fields of an end mark. Records that could not be written are subtracted from the last cell."""
        stage, load = (number, 0) if self._loads == 1 else (0, number)
        return {
            "steady": None if self.steady is None else self.steady(stage, load),
            "sent": self._sent_of[number],
            "recorded": self._recorded_of[number] - self._pending * (number == len(self._cells) - 1),
            "left_s": None if self.unmeasured_s is None else self.unmeasured_s[stage],
            "users": None if self.users is None else self.users[load],
            "users_gone": None if self.users is None else self.users_gone[load],
            "replays": self._replays_of.get(load),
            "cpu_s": time.process_time() - self._cpu_s,
            **(self.health.end_mark_fields() if stage == self._stage else self._health_by_stage.get(stage, {})),
        }


def this_host() -> str:
    """Return the id of this machine since its boot. Processes with the same id share the monotonic clock."""
    name = socket.gethostname()
    try:
        boot = _BOOT_ID.read_text()
    except OSError:  # not Linux: use the name only
        boot = name
    return f"{name}-{hashlib.sha256(boot.encode()).hexdigest()[:8]}"


_PIECE_BYTES = 262_144  # sent at once; more would delay Locust's messages

FILES: dict[str, type[Any]] = {"requests": Request, "processes": ProcessMark}  # name and line type of transferred files


class RecordSender:
    """Reads a growing file of lines, piece by piece, to send it to a RecordReceiver."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.received = 0  # bytes that the receiver has confirmed

    def unconfirmed(self) -> int:
        """Return the number of bytes that the receiver has not confirmed."""
        return self.size() - self.received

    def size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def next_piece(self) -> bytes:
        """Return the next whole lines that are not confirmed; empty without any."""
        with open_file(self._path) as file:
            file.seek(self.received)
            data = file.read(_PIECE_BYTES)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == _PIECE_BYTES:  # a longer line is sent as a whole
                return data + file.readline()
        return data[:end]


class RecordReceiver:
    """Receives the file of a RecordSender and appends it to a common file."""

    def __init__(self, path: Path, line_type: type[Any]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(line_type)
        self.unreadable = 0  # lines that were left out
        self.received = 0  # bytes as sent

    def append(self, offset: int, data: bytes) -> int:
        """Append a piece, unless it was received before. Return the number of bytes received so far.

        Raises OSError, with nothing appended.
        """
        if offset == self.received:
            lines = [self._without_secrets(line) for line in data.splitlines(keepends=True)]
            _append(self._path, b"".join(filter(None, lines)))
            self.unreadable += lines.count(None)
            self.received += len(data)
        return self.received

    def _without_secrets(self, line: bytes) -> bytes | None:
        """Mask secrets of this machine, which a server may have quoted, in a line; None for an unreadable line."""
        try:
            record = self._decoder.decode(line)
        except UNDECODABLE:
            return None
        if not line.endswith(b"\n"):
            return None
        if not isinstance(record, Request):
            return line
        masked_record = msgspec.structs.replace(
            record,
            message=masked(record.message, "known"),
            finish=record.finish if record.finish in KNOWN_FINISHES else masked(record.finish, "known"),
            model=masked(record.model, "known"),
        )
        return line if masked_record == record else msgspec.json.encode(masked_record) + b"\n"


def _append(path: Path, data: bytes) -> None:
    """Append all of `data`, or nothing: raises OSError if the disk is full."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            file.truncate(size)
            raise
