"""Telemetry of a server's machine over ssh (`--telemetry ssh://HOST`): what it sends is checked, and put on our clock.

It runs `harness telemetry --jsonl` there (`telemetry_stream.py`). Nothing that comes from there ends a run: after the
start, a lost connection is opened again, and its time is a gap without samples.
"""

import contextlib
import math
import re
import shlex
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from harness.base import process
from harness.base.errors import HarnessError
from harness.base.redact import masked, printable
from harness.base.units import count, verb
from harness.machine.remote_facts import MAX_GPUS, SampleCheck, check_machine
from harness.machine.ssh_address import SshAddress, connection_advice, parse_address
from harness.machine.telemetry import MAX_KERNEL_LINES
from harness.machine.telemetry_stream import (
    PING_EVERY_S,
    STREAM_VERSION,
    ClockReading,
    StartRecord,
    StreamRecord,
    StreamSample,
)
from harness.records.manifest import ConnectionLoss, RemoteMachine
from harness.records.samples import GpuSample, KernelLine, TelemetrySample, append_sample

START_S = 30.0  # for the connection and the start record
_PINGS = 5  # at the start; the fastest answer tells the clocks' difference
_PING_S = 5.0  # for each of them
_KEPT_READINGS = 6
_RETRY_S = (5.0, 15.0, 60.0)  # before a lost connection is opened again
_LAST_SAMPLE_S, _MAX_LATE_S = 2.0, 10.0  # after the end of a cell; at most, where samples come late

MAX_LINE_BYTES = 262_144
MAX_BAD_BYTES = 16 * 2**20  # since the last good line: more is no telemetry
_BLOCK_BYTES = 65_536
_MAX_BANNER_LINES = 50  # that a login shell prints before the start record
_MAX_RECORDS, _MAX_RECORDS_S = 200, 20.0  # at once, and a second
_MAX_SILENCE_S = 30.0  # without a line: the other machine or the connection hangs
_LASTING_S = 60.0  # a connection that ends earlier is opened again after a longer time
_MIN_INTERVAL_S = 0.2  # between samples that are kept
_MAX_AGE_S, _MAX_AHEAD_S = 120.0, 5.0  # of a sample's time on our clock
_MAX_EARLY = 10  # samples before the first reading of the clocks
_MAX_SENSORS = 32
_MAX_TEXT = 400  # characters of a line of the kernel log
_MAX_ERRORS = 4096  # bytes of what ssh prints
_NODE = re.compile(r"renderD\d{1,5}")
_MAX_LOSSES = 100  # that run.json has
_MAX_QUOTED = 120  # characters of a line that is no telemetry
_START_KIND = re.compile(rb'"kind"\s*:\s*"start"')


class ClockPair(NamedTuple):
    """A reading of the other machine's monotonic clock on our wall clock, half way between question and answer."""

    wall_s: float  # ours
    monotonic_s: float  # of the other machine
    offset_s: float  # by which its wall clock is ahead of ours
    error_s: float  # at most, either way: half of the time between question and answer


class _CellTime(NamedTuple):
    """The time of a cell on our clock, and the file of its samples."""

    path: Path
    cell: str
    begin_s: float
    end_s: float = math.inf


class _RejectedLines:
    """Lines that are no valid telemetry: their number, and the first of them as text that can be printed."""

    def __init__(self) -> None:
        self.number = 0
        self.first = ""

    def add(self, line: bytes) -> None:
        self.number += 1
        self.first = self.first or _quotable(line)

    def sentence(self) -> str:
        """How many lines came, and the first; empty: none came."""
        if not self.number:
            return ""
        came = f"{count(self.number, 'line')} came that {verb(self.number, 'is', 'are')} no valid telemetry"
        return f"{came}; the first: '{self.first}'"


class _OtherMachineError(HarnessError):
    """Another machine answers than at the start."""


class RemoteTelemetry:
    """The connection to a server's machine. `start` opens it; samples go to the file that `sample_to` names.

    A sample belongs to the cell in whose time it was taken, also when it comes later.
    `report` is called with a sentence when the connection is lost, and when it is open again.
    """

    def __init__(self, address: SshAddress) -> None:
        self.address = address
        self.last_failure: str | None = None
        self.report: Callable[[str], None] = lambda text: None
        self._losses: list[ConnectionLoss] = []
        self._rejected = _RejectedLines()
        self._started_s = time.monotonic()
        self._cells: list[_CellTime] = []
        self._check = SampleCheck()
        self._name = ""  # of the machine
        self._boot: str | None = None  # its id
        self._late_s = 0.0  # the age of the newest sample when it came
        self._log_until_s = time.time()  # until then the kernel log there was read
        self._sequence: int | None = None  # of its newest record that came; None: it cannot be read
        self._is_reopened = self._has_lost_log = False  # before the next sample; without the log from meanwhile
        self._skipped: list[KernelLine] = []  # of samples that came too soon after another
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._newest_s = -math.inf  # time of the newest sample that was kept, on our clock
        self._session: _SshRun | None = None
        self._thread = threading.Thread(target=self._keep_reading, name="remote telemetry", daemon=True)

    def start(self) -> RemoteMachine:
        """Connect, and return what the other machine is. Raises HarnessError when it does not send telemetry."""
        try:
            self._session = session = _SshRun(self.address, self._keep, self._reject)
        except OSError as error:
            what = f"--telemetry: ssh cannot be started ({error.strerror})"
            raise HarnessError(what, next_step="Install the package openssh-client.") from None
        try:
            start = session.wait_for_start()
            machine, dropped = check_machine(start.machine)
            self._name, self._check = machine.name, SampleCheck(machine)
            self._boot, self._sequence = start.boot, start.kernel_sequence
            clock = session.wait_for_clock()
        except BaseException:
            session.close()
            raise
        self._thread.start()
        return RemoteMachine(
            host=self.address.host,
            machine=machine,
            harness=masked(printable(start.harness[:100])),
            offset_s=clock.offset_s,
            error_s=clock.error_s,
            dropped=dropped,
        )

    def sample_to(self, path: Path | None, cell: str = "") -> None:
        """Append samples from now on to a file, as those of a cell; None: drop them."""
        now_s = time.time()
        with self._lock:
            if self._cells and self._cells[-1].end_s == math.inf:
                self._cells[-1] = self._cells[-1]._replace(end_s=now_s)
            if path is not None:
                self._cells.append(_CellTime(path, cell, now_s))

    def wait_for_sample(self, after_s: float, *, late: bool = False) -> None:
        """Wait until a sample from after a time of our clock has come, at most 2 s. `late`: longer, as samples are."""
        until_s = time.monotonic() + min(_LAST_SAMPLE_S + self._late_s * late, _MAX_LATE_S)
        while self._newest_s < after_s and time.monotonic() < until_s and not self._stop.is_set():
            time.sleep(0.05)

    def close(self) -> None:
        """End the connection. Samples that come later are dropped."""
        self._stop.set()
        with self._lock:
            session = self._session
        if session is not None:
            session.close()
        if self._thread.is_alive():
            self._thread.join(_LAST_SAMPLE_S)

    def _keep(self, sample: TelemetrySample) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            if sample.kernel is not None:
                sample = replace(sample, kernel=[*self._skipped, *sample.kernel][:MAX_KERNEL_LINES])
            if sample.wall_s - self._newest_s < _MIN_INTERVAL_S:
                self._skipped = sample.kernel or []
                return
            sample, cell = self._check.possible(sample), self._cell_at(sample.wall_s)
            if self._is_reopened and sample.kernel is not None:
                sample = self._with_log_of_loss(sample, sample.kernel, cell)
            self._skipped, self._is_reopened = [], False
            self._newest_s = self._log_until_s = sample.wall_s
            self._late_s = max(0.0, time.time() - sample.wall_s)
            _append(cell, sample)

    def _with_log_of_loss(
        self, sample: TelemetrySample, lines: Sequence[KernelLine], cell: _CellTime | None
    ) -> TelemetrySample:
        """Return the first sample after a lost connection with the kernel's lines of its cell.

        Cells that ended meanwhile get theirs in a sample of their own, without values. `kernel_lost_s`: lines are
        missing.
        """
        lost_s = max(0.0, sample.wall_s - self._log_until_s) if self._has_lost_log else None
        by_cell: dict[_CellTime | None, list[KernelLine]] = defaultdict(list)
        for line in lines:
            by_cell[self._cell_at(line.wall_s)].append(line)
        for ended in self._cells:
            if self._log_until_s <= ended.end_s < sample.wall_s:
                only_log = TelemetrySample(
                    wall_s=sample.wall_s, cell="", kernel=by_cell.get(ended, []), kernel_lost_s=lost_s
                )
                _append(ended, only_log)
        return replace(sample, kernel=by_cell.get(cell, []), kernel_lost_s=lost_s)

    def _cell_at(self, wall_s: float) -> _CellTime | None:
        return next((cell for cell in reversed(self._cells) if cell.begin_s <= wall_s < cell.end_s), None)

    def impossible(self) -> list[str]:
        """What samples had that the machine cannot have, by its path."""
        with self._lock:
            return [f"samples.{path}" for path in self._check.dropped]

    def rejected(self) -> tuple[int, str]:
        """How many lines came after the start that are no valid telemetry, and the first of them, shortened."""
        with self._lock:
            return self._rejected.number, self._rejected.first

    def _reject(self, line: bytes) -> None:
        with self._lock:
            self._rejected.add(line)
            is_first = self._rejected.number == 1
        if is_first:
            self._report_rejected()

    def _report_rejected(self) -> None:
        self.report(f"--telemetry: {self.address.host}: {self._rejected.sentence()}. What is not valid is left out")

    def report_to(self, report: Callable[[str], None]) -> None:
        """Call `report` from now on, and with what came since the start."""
        self.report = report
        if self.rejected()[0]:
            self._report_rejected()

    def losses(self) -> list[ConnectionLoss]:
        """The times without a connection until now."""
        with self._lock:
            return [*self._losses]

    def _keep_reading(self) -> None:
        """Wait for the end of the connection, and open it again, until `close`."""
        attempt = 0
        while not self._stop.is_set():
            session = self._session
            if session is not None:
                session.keep_pinging(self._stop)
                if not self._stop.is_set():
                    self._note_loss(session.failure())
                session.close()
                self._sequence = session.kernel_sequence if session.kernel_sequence is not None else self._sequence
                attempt = 0 if time.monotonic() - session.opened_s > _LASTING_S else attempt
            if self._stop.wait(_RETRY_S[min(attempt, len(_RETRY_S) - 1)]):
                return
            attempt += 1
            self._session = self._reopened()

    def _note_loss(self, reason: str) -> None:
        """Record that the connection is lost, and print it."""
        self.last_failure = reason
        after_s = time.monotonic() - self._started_s
        with self._lock:
            is_full = len(self._losses) >= _MAX_LOSSES
            if not is_full:
                self._losses.append(ConnectionLoss(host=self.address.host, after_s=after_s, reason=reason))
        if not is_full:
            text = f"the connection to {self.address.host} was lost after {after_s:.0f} s: {reason}"
            self.report(f"--telemetry: {text}. It is opened again; until then there are no samples")

    def _change_loss(self, **changes: Any) -> None:
        """Complete the loss that is going on."""
        with self._lock:
            if self._losses and self._losses[-1].lasted_s is None:
                self._losses[-1] = replace(self._losses[-1], **changes)

    def _reopened(self) -> "_SshRun | None":
        session = None
        try:
            options = () if self._sequence is None else ("--kernel-after", f"{self._sequence}")
            line_age_s = _MAX_AGE_S + max(0.0, time.time() - self._log_until_s)
            session = _SshRun(self.address, self._keep, self._reject, options, line_age_s)
            with self._lock:
                self._session = session  # `close` ends it, also while it connects
            if not self._stop.is_set():
                start = session.wait_for_start()
                self._require_same_machine(start)
                with self._lock:
                    has_log = start.kernel_complete and start.boot is not None and start.boot == self._boot
                    self._is_reopened, self._has_lost_log = True, not has_log
                session.wait_for_clock()
                losses = self.losses()
                lasted_s = time.monotonic() - self._started_s - losses[-1].after_s
                self._change_loss(lasted_s=lasted_s)
                self.report(f"--telemetry: the connection to {self.address.host} is open again")
                return session
        except _OtherMachineError as error:
            self.last_failure = error.what
            self._change_loss(reason=error.what)
            self.report(f"--telemetry: {error.what}. No more samples are taken")
            self._stop.set()
        except (OSError, HarnessError) as error:
            # The first reason is often only that the connection ended; the reason that it stays closed says more.
            printed = None if session is None else session.printed_reason()
            self.last_failure = printed or str(error).removeprefix("--telemetry: ")
            if not self._stop.is_set():
                self._change_loss(reason=self.last_failure)
        if session is not None:
            session.close()
        return None

    def _require_same_machine(self, start: StartRecord) -> None:
        """Raise _OtherMachineError when a machine of another name answers."""
        name = check_machine(start.machine)[0].name
        if name != self._name:
            raise _OtherMachineError(f"the machine there is now {name}, and was {self._name}")


def _append(cell: _CellTime | None, sample: TelemetrySample) -> None:
    """Write a sample to the file of its cell; one from between two cells is dropped."""
    if cell is not None:
        with contextlib.suppress(OSError):  # a full disk ends the run by other means
            append_sample(cell.path, replace(sample, cell=cell.cell))


class RemoteSampler:
    """The samples of one cell, like `Sampler`."""

    def __init__(self, remote: RemoteTelemetry, cell: str, path: Path) -> None:
        self._remote = remote
        self._cell = cell
        self._path = path

    @property
    def cell(self) -> str:
        return self._cell

    @cell.setter
    def cell(self, name: str) -> None:
        self._cell = name
        self._remote.sample_to(self._path, name)

    @property
    def last_failure(self) -> str | None:
        return self._remote.last_failure

    def __enter__(self) -> "RemoteSampler":
        began_s = time.time()
        self._remote.sample_to(self._path, self._cell)
        self._remote.wait_for_sample(began_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._remote.wait_for_sample(time.time(), late=True)
        self._remote.sample_to(None)


class _SshRun:
    """One run of ssh. Its output is read in a thread, in bounded memory."""

    def __init__(
        self,
        address: SshAddress,
        keep: Callable[[TelemetrySample], None],
        reject: Callable[[bytes], None],
        options: Sequence[str] = (),
        line_age_s: float = _MAX_AGE_S,
    ) -> None:
        self.kernel_sequence: int | None = None  # of the newest record of the kernel log that came
        self._address = address
        self._keep = keep
        self._reject = reject
        self._before_start = _RejectedLines()
        self._line_age_s = line_age_s
        self._early: list[StreamSample] = []
        self._start: StartRecord | None = None
        self._asked: dict[int, tuple[float, float]] = {}  # by number: our monotonic and wall clock when it was asked
        self._number = 0
        self._clocks: deque[ClockPair] = deque(maxlen=_KEPT_READINGS)
        self._changed = threading.Condition()
        self._is_over = self._is_closed = False
        self._records = 0
        self.opened_s = self._heard_s = time.monotonic()
        self._why = ""  # what it sent that is no telemetry
        self._errors = b""
        self.child = subprocess.Popen(
            address.words(*options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=target, name=f"remote telemetry: {name}", daemon=True)
            for name, target in (("output", self._read_output), ("errors", self._read_errors))
        ]
        for reader in self._readers:
            reader.start()

    def wait_for_start(self) -> StartRecord:
        """Return the start record. Raises HarnessError."""
        with self._changed:
            self._changed.wait_for(lambda: self._start is not None or self._is_over, START_S)
            start = self._start
        if start is None:
            raise self._start_error()
        if start.version != STREAM_VERSION:
            version = masked(printable(start.harness[:50]))
            what = f"--telemetry: the harness on {self._address.host} ({version}) sends another format"
            raise HarnessError(what, next_step="Install the same version on both machines.")
        return start

    def wait_for_clock(self) -> ClockPair:
        """Return the best reading of the clocks; before it no sample is kept. Raises HarnessError."""
        for _ in range(_PINGS):
            readings = len(self._clocks)
            self.ping()
            with self._changed:
                self._changed.wait_for(lambda before=readings: len(self._clocks) > before or self._is_over, _PING_S)  # type: ignore[misc]
        if (clock := self._clock()) is None:
            what = f"--telemetry: {self._address.host} does not answer questions about its clock"
            raise HarnessError(what, next_step=f"Try it there: {self._address.trial()}")
        return clock

    def ping(self) -> None:
        with self._changed:
            self._number += 1
            number = self._number
            self._asked = {number: (time.monotonic(), time.time())}
        try:
            assert self.child.stdin is not None
            self.child.stdin.write(b"ping %d\n" % number)
            self.child.stdin.flush()
        except (OSError, ValueError):
            self._end()

    def keep_pinging(self, stop: threading.Event) -> None:
        """Return when the connection has ended, or `stop` is set."""
        due_s = time.monotonic() + PING_EVERY_S
        while not stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, min(0.5, max(0.0, due_s - time.monotonic())))
                if self._is_over:
                    return
            if time.monotonic() - self._heard_s > _MAX_SILENCE_S:
                self._why = f"it sent nothing for {_MAX_SILENCE_S:g} s"
                return
            if time.monotonic() >= due_s:
                self.ping()
                due_s = time.monotonic() + PING_EVERY_S

    def close(self) -> None:
        """End ssh; the process there ends with its input. It takes a second at most. A second call does nothing."""
        if self._is_closed:  # the process group may be another program's by now
            return
        self._is_closed = True
        with contextlib.suppress(OSError, ValueError):
            assert self.child.stdin is not None
            self.child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(0.5)
        process.stop(self.child, grace_s=0.5)
        for reader, stream in zip(self._readers, (self.child.stdout, self.child.stderr), strict=True):
            reader.join(0.5)
            if stream is not None and not reader.is_alive():
                stream.close()

    def failure(self) -> str:
        """Why the connection ended."""
        return self.printed_reason() or "the connection ended"

    def printed_reason(self) -> str:
        """Why the connection ended, by what it sent or ssh printed; empty: neither shows it."""
        self._readers[1].join(1.0 if self._is_over else 0.0)  # of what ssh prints last
        return self._why or self._error_text().removeprefix("ssh: ")

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _clock(self) -> ClockPair | None:
        with self._changed:
            return min(self._clocks, key=lambda pair: pair.error_s, default=None)

    def _error_text(self, *, whole: bool = False) -> str:
        """The last line that ssh printed, or all that is kept of it."""
        text = printable(masked(self._errors.decode("utf-8", "replace"))).strip()
        return text if whole or not text else text.splitlines()[-1][:300]

    def _start_error(self) -> HarnessError:
        host = self._address.host
        try:
            code = self.child.wait(1.0) if self._is_over else None
            self._readers[1].join(1.0 if self._is_over else 0.0)  # of what ssh says last
        except subprocess.TimeoutExpired:
            code = None
        said = self._error_text()
        words = self._address.trial()
        if self._why:
            return HarnessError(f"--telemetry: {host} sends no telemetry: {self._why}", next_step=f"Try it: {words}")
        if code == 255:
            advice = connection_advice(self._address, self._error_text(whole=True))
            return HarnessError(
                f"--telemetry: no connection to {host}: {said or 'no reason was given'}", next_step=advice
            )
        came = self._before_start.sentence()
        if code is None and came:
            return HarnessError(
                f"--telemetry: no start of telemetry from {host} within {START_S:g} s: {came}",
                next_step=f"Try it: {words}",
            )
        if code is None:
            what = f"--telemetry: no answer from {host} within {START_S:g} s"
            return HarnessError(what, next_step=f"Try it: {words}")
        name = shlex.join(self._address.command)
        if code == 0:
            what = f"--telemetry: the command on {host} ended and sent no telemetry: {name}"
            return HarnessError(what, detail=came, next_step=f"Check that it starts the harness. Try it: {words}")
        what = f"--telemetry: {host} has no usable command (exit code {code}{f': {said}' if said else ''}): {name}"
        step = f"Install the harness there, or name it: {self._address.with_command('/path/to/harness')}"
        return HarnessError(what, next_step=step)

    def _read_errors(self) -> None:
        assert self.child.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while block := self.child.stderr.read1(_BLOCK_BYTES):  # type: ignore[attr-defined]
                self._errors = (self._errors + block)[-_MAX_ERRORS:]

    def _read_output(self) -> None:
        """Read lines until the end, or until too much of it is no telemetry."""
        assert self.child.stdout is not None
        bad_bytes = banner_lines = 0
        try:
            for line in bounded_lines(self.child.stdout):
                if line is not None and self._take(line):
                    bad_bytes = 0
                    self._records += 1
                    self._heard_s = time.monotonic()
                    if self._records > _MAX_RECORDS + _MAX_RECORDS_S * (self._heard_s - self.opened_s):
                        self._why = "it sends too much"
                        break
                    continue
                bad_bytes += MAX_LINE_BYTES if line is None else len(line) + 1
                banner_lines += self._start is None
                if line is not None and self._start is None and _START_KIND.search(line):
                    self._why = f"its start line is no valid telemetry: '{_quotable(line)}'"
                    break
                if bad_bytes > MAX_BAD_BYTES or banner_lines > _MAX_BANNER_LINES:
                    self._why = "its output is something else"
                    break
        except (OSError, ValueError):
            pass
        finally:
            self._end()
        if self._why:
            with contextlib.suppress(ProcessLookupError):
                self.child.kill()

    def _take(self, line: bytes) -> bool:
        """Use a line of the output. Return whether it is telemetry."""
        arrived_s = time.monotonic()
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, RecursionError):  # also wrong types, NaN, and numbers out of range
            self._note_rejected(line)
            return False
        if isinstance(record, StartRecord):
            with self._changed:
                self._start = self._start or record
                self._changed.notify_all()
            return True
        if self._start is None:
            return False
        if isinstance(record, ClockReading):
            return self._take_reading(record, arrived_s)
        clock = self._clock()
        if clock is None:
            self._early = [*self._early, record][:_MAX_EARLY]
            return True
        early, self._early = self._early, []
        is_kept = [self._keep_sample(sample, clock) for sample in (*early, record)][-1]
        if not (is_kept and all(map(_NODE.fullmatch, record.gpus))):
            self._note_rejected(line)
        return is_kept

    def _note_rejected(self, line: bytes) -> None:
        """Count a line that is no telemetry: after the start for the run, before it for the error of a start."""
        if self._start is None:
            self._before_start.add(line)
        else:
            self._reject(line)

    def _keep_sample(self, record: StreamSample, clock: ClockPair) -> bool:
        """Keep a sample. Return whether it can be from the last minutes."""
        sample = on_our_clock(record, clock, time.time(), self._line_age_s)
        if sample is None:
            return False
        self._keep(sample)
        self.kernel_sequence = record.kernel_sequence
        return True

    def _take_reading(self, reading: ClockReading, arrived_s: float) -> bool:
        with self._changed:
            asked = self._asked.pop(reading.number, None)
            if asked is None:
                return False
            half_s = (arrived_s - asked[0]) / 2
            wall_s = asked[1] + half_s
            self._clocks.append(ClockPair(wall_s, reading.monotonic_s, reading.wall_s - wall_s, half_s))
            self._changed.notify_all()
        return True


_DECODER = msgspec.json.Decoder(StreamRecord)


def _quotable(line: bytes) -> str:
    """Return the begin of a line with its secrets masked and its control characters escaped."""
    text = masked(line[: 10 * _MAX_QUOTED].decode("utf-8", "backslashreplace").strip())
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= _MAX_QUOTED else f"{shown[:_MAX_QUOTED]}..."


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of a stream without their ends; None for each MAX_LINE_BYTES of a longer one."""
    rest, is_cut = b"", False
    while block := stream.read1(_BLOCK_BYTES):  # type: ignore[attr-defined]
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if not is_cut:
                yield line
            is_cut = False
        if len(rest) > MAX_LINE_BYTES:
            yield None
            is_cut, rest = True, b""


def on_our_clock(
    record: StreamSample, clock: ClockPair, now_s: float, line_age_s: float = _MAX_AGE_S
) -> TelemetrySample | None:
    """Return a sample with the times of our clock; None where it cannot be from the last minutes.

    `line_age_s`: the age that a line of the kernel log can have.
    The other machine's monotonic clock decides, so that a step of its wall clock changes nothing.
    """
    wall_s = clock.wall_s + record.monotonic_s - clock.monotonic_s
    if not now_s - _MAX_AGE_S <= wall_s <= now_s + _MAX_AHEAD_S:
        return None
    names = [name for name in record.gpus if _NODE.fullmatch(name)][:MAX_GPUS]
    kernel = None
    if record.kernel is not None:
        kernel = [
            KernelLine(
                wall_s=wall_s - max(0.0, min(record.wall_s - line.wall_s, line_age_s)),
                text=masked(printable(line.text[:_MAX_TEXT]).replace("\n", " "), "all"),
            )
            for line in record.kernel[:MAX_KERNEL_LINES]
        ]
    return TelemetrySample(
        wall_s=wall_s,
        cell="",
        took_s=record.took_s,
        gpus={name: _bounded_gpu(record.gpus[name]) for name in names},
        host=record.host,
        kernel=kernel,
    )


def _bounded_gpu(gpu: GpuSample) -> GpuSample:
    """Return a sample of a GPU with at most so many sensors, whose names can be printed."""

    def bounded(values: dict[str, float]) -> dict[str, float]:
        return {
            masked(printable(name[:40]).replace("\n", " ")): value for name, value in [*values.items()][:_MAX_SENSORS]
        }

    held_back = None if gpu.held_back is None else bounded(gpu.held_back)
    return replace(gpu, temperatures_c=bounded(gpu.temperatures_c), held_back=held_back)


@contextlib.contextmanager
def opened(address: str | None) -> Iterator[tuple[RemoteTelemetry, RemoteMachine] | None]:
    """Yield the connection and what the other machine is; None without an address. Raises HarnessError."""
    if address is None:
        yield None
        return
    remote = RemoteTelemetry(parse_address(address))
    machine = remote.start()
    try:
        yield remote, machine
    finally:
        remote.close()
