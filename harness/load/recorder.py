"""Records and marks to their files, which all load processes of a run share."""

import hashlib
import itertools
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gevent
import msgspec

from harness.job import Job
from harness.load.health import TICK_S, Health
from harness.load.later import Later
from harness.load.tickets import Phase
from harness.rundir.records import ProcessMark, Request
from harness.workers import process_number

_FLUSH_TICKS = 4
_FLUSH_BYTES = 65_536
_SAMPLE_S = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger(__name__)


class Anchor(NamedTuple):
    """How a machine's times are joined with those of others."""

    machine: int = 0
    correction_s: float = 0.0  # to be added to its wall clock
    error_s: float | None = None  # None: its own clock


HERE = Anchor()


class Recorder:
    """Appends whole lines, each batch of them in one write, so that the processes never tear each other's lines.

    Made after the fork. What a `kill -9` can take is at most the last 0.2 s, and of a process without an idle moment a
    thousand records.
    """

    def __init__(self, job: Job, anchor: Anchor = HERE) -> None:
        """Open both files and write the start mark, of each stage one. Raises OSError where that is not possible."""
        self.sent = 0  # requests whose first byte was about to be written
        self.recorded = 0
        self.in_flight_of: Counter[str] = Counter()  # by user class
        self.watcher: Callable[[Request], None] | None = None  # of a live load: is told of each record
        self.steady: Callable[[int], bool | None] | None = None  # whether a stage's warm-up found the server steady
        self.unmeasured_s: list[float | None] | None = None  # of each stage, where the load was told to end
        self.users: int | None = None  # that this process has had; None: their number changes with the stages
        self.users_gone = 0  # of them, those that ended before they were told to
        self.health = Health()
        self.later = Later()  # makes the records
        self._cells = [job.cell if job.load_name else "by-hand", *(stage.cell for stage in job.then)]
        self._stage = 0  # that is measured, or was last
        self._sent_in = [0] * len(self._cells)
        self._added_in = [0] * len(self._cells)
        self._health_in: dict[int, dict[str, float | None]] = {}  # of stages that are over
        self._pid = os.getpid()
        self.process = process_number(self._pid, anchor.machine)
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
        """Requests that were sent and have not ended. The record of one that has may still be waiting to be made."""
        return self.in_flight_of.total()

    def sending(self, phase: Phase, stage: int = 0) -> None:
        """A request's first byte is about to be written."""
        self.sent += 1
        self._sent_in[stage] += 1
        if phase == "measured":
            if stage > self._stage:
                self._health_in[self._stage] = _health_fields(self.health)
                self.health, self._stage = Health(), stage
            self.health.begin()

    def add(self, request: Request, stage: int = 0) -> None:
        self._added_in[stage] += 1
        self._lines += self._encoder.encode(request) + b"\n"
        self._pending += 1
        if self.watcher is not None:
            try:
                self.watcher(request)
            except Exception:  # of an observer: the load goes on
                logger.exception("the live numbers end here")
                self.watcher = None
        if len(self._lines) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the file. On an error (disk full) they are kept and tried again."""
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
        """Write what is left and the end mark. A second call, or one in a forked child, does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.later.finish()
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
                **(self._said_of(stage) if event == "end" else {}),
            )
            try:
                os.write(self._processes, self._encoder.encode(mark) + b"\n")
            except OSError as error:
                if event == "start":
                    raise
                logger.error("the end mark cannot be written: %s", error.strerror)

    def _said_of(self, stage: int) -> dict[str, Any]:
        """Of a mark: what there is to say at the end. What could not be written is said with the last stage."""
        return {
            "steady": None if self.steady is None else self.steady(stage),
            "sent": self._sent_in[stage],
            "recorded": self._added_in[stage] - self._pending * (stage == len(self._cells) - 1),
            "left_s": None if self.unmeasured_s is None else self.unmeasured_s[stage],
            "users": self.users,
            "users_gone": None if self.users is None else self.users_gone,
            "cpu_s": time.process_time() - self._cpu_s,
            **(_health_fields(self.health) if stage == self._stage else self._health_in.get(stage, {})),
        }


def _health_fields(health: Health) -> dict[str, float | None]:
    """Of a mark: how hard the process was at work until now."""
    return {
        "cpu_most": health.cpu_most(),
        "read_lag_p99_s": health.read_lag_p99_s(),
        "loop_lag_mean_s": health.loop_lag_mean_s(),
        "loop_lag_p50_s": health.loop_lag_s(0.5),
        "loop_lag_p99_s": health.loop_lag_s(0.99),
        "loop_lag_most_s": health.loop_lag_most_s(),
        "core_wait": health.core_wait(),
    }


def this_host() -> str:
    """This machine since its boot: its name, and a digest of what only processes on the same monotonic clock share."""
    name = socket.gethostname()
    try:
        boot = _BOOT_ID.read_text()
    except OSError:  # not Linux: the name has to do
        boot = name
    return f"{name}-{hashlib.sha256(boot.encode()).hexdigest()[:8]}"
