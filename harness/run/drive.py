"""Drive one cell: run Locust as a separate process with stock options, and watch it until it ends."""

import contextlib
import errno
import glob
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from harness.base import process
from harness.base.errors import RunError
from harness.base.files import UNDECODABLE, read_text
from harness.base.process import free_port, pause
from harness.base.reason import Reason, because
from harness.base.redact import registered_secrets
from harness.failures.diagnosis import FIRST_REQUESTS, find_scenario_mistake
from harness.load.live_metrics import Accumulator, Numbers, Observed
from harness.records.directory import disk_is_full, release_space
from harness.records.records import CUT, Request, Tail, read_marks
from harness.scenario import MAX_USERS, is_open_loop, max_concurrency, process_count
from harness.scenario.behaviour import max_body_s, max_length
from harness.serve.generator import ContainerChild
from harness.workload.job import (
    SECRETS_ENV,
    Job,
    cells_of,
    idle_file,
    in_flight_file,
    loads_of,
    read_status,
    status_file,
    user_count,
)

POLL_S = 0.2
PROCESS_CHECK_S = 1.0  # between two checks of the load processes
GRACE_S = 5.0  # for flushing records after the request to stop
SLOWEST_TPOT_S = 5.0  # a slower model counts as hanging
MAX_WORKER_WAIT_S = 300  # for workers of other machines, which a user starts
MAX_STUCK_S = 30.0  # without a record while the users' own code raises exceptions ...
STUCK_EXCEPTIONS = 3  # ... at least this many: the load is stuck
MAX_SILENCE_S = 60.0  # after all time limits of the load: Locust itself hangs
PROPOSED_RATE = 100.0  # users per second; Locust warns above it
_MIN_RATE_SPAN_S = 1.0  # shorter spans have too few answers for a rate
_MAX_EXCEPTION_CHARS = 300
_MIN_REQUESTS = 3  # for an estimate of the remaining time


class Driven(msgspec.Struct, frozen=True):
    """How the load processes ended. `problems`: reasons why the cell is invalid."""

    started_wall_s: float
    ended_wall_s: float
    problems: list[Reason]
    stopped_s: float | None = None  # monotonic time of a planned stop by the harness


class Watch(Protocol):
    """Follows a load by its records, and decides when enough is measured: a planned stop."""

    report_after_s: float | None  # age from which on it needs to know the requests in flight; None: it does not

    def add_records(self, requests: list[Request]) -> None: ...  # new records of the cell, warm-up included

    def note_in_flight(self, cell: str, requests: list[Request]) -> None: ...  # the old ones, before new records

    def is_done(self) -> bool: ...

    def measured_s(self, stopped_s: float) -> float: ...  # from the first measured request to that monotonic time


class LocalChild:
    """A load generator as a process of this machine."""

    def __init__(self, command: list[str], log_path: Path) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", SECRETS_ENV: json.dumps(registered_secrets())}
        with log_path.open("wb") as log:
            self._child = process.start(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._child.poll()

    def stop(self, grace_s: float) -> int:
        """Ask it to end, kill it after `grace_s`, and return the exit code."""
        return process.stop(self._child, grace_s=grace_s)


Child = LocalChild | ContainerChild


class Monitor:
    """Follow one cell by its growing files: records, server metrics and telemetry. Reads only what is new."""

    def __init__(self, job: Job, watch: Watch | None = None) -> None:
        self.job = job
        self.watch = watch
        self.recorded = 0  # of all stages, and all loads of a mix
        self.failed = 0  # of these
        self.missing_workers = ""  # in words, while the load waits for them
        self.started_s = time.monotonic()
        is_counted = job.load.requests is not None and job.warmup.requests is not None
        self.warmup = (job.warmup.requests or 0) if is_counted else 0
        self.total = (job.load.requests or 0) + self.warmup if is_counted else None  # None: unknown
        self._records = Tail(Path(job.requests_path))
        self._first: list[Request] | None = []  # the first records; None: they were checked
        self._decoder = msgspec.json.Decoder(Request)
        self.follow_stage(0)

    def follow_stage(self, stage: int) -> None:
        """Show the records of this stage only; without stages, of all loads of a mix."""
        self.duration_s = self.job.stages[stage].duration_s if self.job.stages else self.job.load.duration_s
        self._cells = {self.job.stages[stage].cell} if self.job.stages else {cell for cell, _ in cells_of(self.job)}
        self.measured = Accumulator()  # of the measured requests
        self.warmup_ended = 0
        self.observed = Observed(Path(self.job.requests_path).parent)
        self._began_s: float | None = None  # estimated time of the first measured request
        self._newest_s = 0.0  # when the newest records were read

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def update(self) -> None:
        """Read the old requests in flight, then the new records: one that ends in between is in both."""
        if self.watch is not None and self.job.report_after_s is not None:
            self.watch.note_in_flight(self.job.cell, read_in_flight(self.job.counter_path))
        lines = list(self._records.lines())
        self.recorded += len(lines)
        requests = []
        for line in lines:
            with contextlib.suppress(*UNDECODABLE):
                requests.append(self._decoder.decode(line))
        self.failed += sum(request.error is not None and request.error not in CUT for request in requests)
        if self._first is not None:
            self._first += requests
        if self.watch is not None:
            self.watch.add_records(requests)
        self._add_requests(requests, time.monotonic())

    def mistake(self) -> Reason | None:
        """Return why all further requests will fail too. Checks the first requests, once."""
        if self._first is None or len(self._first) < FIRST_REQUESTS:
            return None
        first, self._first = self._first[:FIRST_REQUESTS], None
        return scenario_mistake(first)

    def numbers(self) -> Numbers:
        """Read what is new, and return rates and latencies of the measured requests since the first one."""
        self.update()
        self.observed.update()
        # Long answers end in waves, so the time since the newest one does not count.
        span_s = 0.0 if self._began_s is None else self._newest_s - self._began_s
        rate_span_s = span_s if span_s >= _MIN_RATE_SPAN_S else None
        return self.measured.numbers(rate_span_s, with_slos=False, successful_only=True)

    def _add_requests(self, requests: list[Request], now_s: float) -> None:
        """Add records of the cell; those of its warm-up are only counted."""
        cell_requests = [request for request in requests if request.cell in self._cells]
        measured = [request for request in cell_requests if request.phase == "measured"]
        self.warmup_ended += len(cell_requests) - len(measured)
        if measured and self._began_s is None:  # the records may have another machine's clock
            ended_s = max(request.sent_s + request.ended_s for request in measured)
            self._began_s = now_s - (ended_s - min(request.sent_s for request in measured))
        if measured:
            self._newest_s = now_s
            self.measured.count(measured, [])

    def left_s(self) -> float | None:
        """Estimate the remaining seconds of the load. Requests in flight at the end of a timed load may take longer."""
        load, ended = self.job.load, self.measured.ended
        if self._began_s is None or self.watch is not None:  # the watch decides when it ends
            return None
        took_s = time.monotonic() - self._began_s
        if self.duration_s is not None:
            return max(0.0, self.duration_s - took_s)
        # In a closed loop users start together: a rate needs the answers of at least one full wave.
        needed = _MIN_REQUESTS if is_open_loop(load) else max(_MIN_REQUESTS, max_concurrency(load))
        if load.requests is None or ended < needed:
            return None
        return max(0.0, (load.requests - ended) * took_s / ended)


def read_in_flight(counter_path: str) -> list[Request]:
    """Return the old requests in flight that the load processes of a cell last reported."""
    requests = []
    every = in_flight_file(counter_path, "")
    for path in every.parent.glob(f"{glob.escape(every.name)}*[0-9]"):
        with contextlib.suppress(OSError, *UNDECODABLE):
            requests += msgspec.json.decode(path.read_bytes(), type=list[Request])
    return requests


def locust_arguments(
    job: Job, given: Path | str, locustfile: Path | str, url: str, ui: tuple[str, int] | None = None
) -> list[str]:
    """Return the stock Locust arguments of a load. `given`: the job, its file or its text. `ui`: host and port.

    `locustfile`: those of a mix have commas between them. Without `ui` Locust is headless.
    """
    users, processes = user_count(job), process_count([load_job.load for load_job in loads_of(job)])
    arguments = ["-f", str(locustfile), "--host", url, "--job", str(given)]
    arguments += ["--headless"] if ui is None else ["--web-host", ui[0], "--web-port", str(ui[1])]
    rate = min(users / max(job.load.ramp_s, 0.001), MAX_USERS)
    # The page proposes this rate, and all users start quickly anyway.
    arguments += ["--users", str(users), "--spawn-rate", f"{rate if ui is None else min(rate, PROPOSED_RATE):g}"]
    arguments += ["--only-summary", "--exit-code-on-error", "0"]  # failed requests are results, evaluated later
    if job.workers is not None:
        arguments += ["--master", "--master-bind-host", job.workers.bind, "--master-bind-port", str(job.workers.port)]
        arguments += ["--expect-workers", str(job.workers.total), "--expect-workers-max-wait", str(MAX_WORKER_WAIT_S)]
    elif processes > 1:
        # A free port, so that two harnesses on one machine do not conflict.
        port = str(free_port())
        arguments += ["--processes", str(processes), "--master-bind-host", "127.0.0.1"]
        arguments += ["--master-bind-port", port, "--master-port", port]
    return arguments


def drive(
    start: Callable[[], Child],
    monitor: Monitor,
    *,
    log_path: Path,
    alive: Callable[[], Reason | None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
) -> Driven:
    """Run the load of the monitor's job to its end, or until its watch is done.

    `alive` is called all the time; when it returns a reason, such as a dead server, the load is stopped. Raises
    RunError when Locust cannot run, such as for a locustfile that fails to import, and OSError when the disk is full.
    """
    job, started = monitor.job, time.time()
    status_file(job.counter_path).unlink(missing_ok=True)  # of an earlier attempt
    child = start()
    monitor.started_s = time.monotonic()
    stopped_s = None
    try:
        problems = _watch(child, job, log_path, alive, progress, monitor)
        if child.poll() is None and not problems:
            stopped_s = time.monotonic()
    finally:
        # A stopped load generator flushes its records; requests in flight are recorded as unfinished.
        code = child.stop(GRACE_S)
    monitor.update()
    has_begun = Path(job.counter_path).exists()
    if code != 0 and not problems and (has_begun or stopped_s is None):  # else it was stopped before it handled signals
        if not has_begun:
            raise _start_failure(job, code, log_path)
        exceptions = ExceptionLog(log_path)
        exceptions.update()
        text = f"the load generator ended with exit code {code}"
        if reported := start_errors(job).splitlines():
            text += f": {reported[0]}"
        elif exceptions.last:
            text += f"; its log has {exceptions.last}"
        problems = [because("generator_exit", text, exit_code=code, exception=exceptions.last)]
    return Driven(started, time.time(), problems, stopped_s)


def _start_failure(job: Job, code: int, log_path: Path) -> RunError:
    reported = start_errors(job) or missing_workers(job) or f"Locust ended with exit code {code}"
    first, *others = reported.splitlines()
    return RunError(
        f"cell {job.cell}: the load could not start: {first.removesuffix('.')}",
        next_step=f"Its log is {log_path}.",
        detail="\n".join(others) or tail(log_path),
    )


def _watch(
    child: Child,
    job: Job,
    log_path: Path,
    alive: Callable[[], Reason | None],
    progress: Callable[[], None],
    monitor: Monitor,
) -> list[Reason]:
    """Watch a load generator until it ends or its watch is done; return why the cell is invalid, and must end."""
    exceptions = ExceptionLog(log_path)
    exception_count = 0  # in the log when the last record came
    last_change = last_idle = last_process_check = time.monotonic()
    idle, idle_mtime_ns = idle_file(job.counter_path), 0
    folder = Path(job.requests_path).parent
    while child.poll() is None:
        if disk_is_full(folder):
            release_space(folder, half=True)  # for the records that the load processes still hold
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), job.requests_path)
        if (reason := alive()) is not None:
            return [reason]
        recorded = monitor.recorded
        monitor.update()
        exceptions.update()
        now = time.monotonic()
        if isinstance(child, LocalChild) and now - last_process_check > PROCESS_CHECK_S:
            last_process_check = now
            if job.workers is not None:
                monitor.missing_workers = "" if Path(job.counter_path).exists() else missing_workers(job)
            elif killed_processes(job) and child.poll() is None:  # else the exit code says more
                # Its slots are never settled, so the others would wait for it; the validity check reports it.
                return [because("process_killed", "the load was stopped because a load process was killed")]
        if monitor.missing_workers:
            last_change = now
        with contextlib.suppress(OSError):
            if (mtime_ns := idle.stat().st_mtime_ns) != idle_mtime_ns:
                idle_mtime_ns, last_idle = mtime_ns, now
        if monitor.recorded != recorded:
            last_change, exception_count = now, exceptions.count
        elif now - last_change > MAX_STUCK_S and exceptions.count - exception_count >= STUCK_EXCEPTIONS:
            text = f"no request was recorded for {MAX_STUCK_S:g} s while users raised {exceptions.last}"
            return [because("generator_stuck", text, seconds=MAX_STUCK_S, exception=exceptions.last)]
        progress()
        if (reason := monitor.mistake()) is not None:
            return [reason]
        silent_s = now - max(last_change, last_idle)
        if silent_s > max_silence_s(job):
            timeout_s = job.load.timeout_s
            text = f"no request ended for {silent_s:.0f} s although each may take {timeout_s:g} s"
            return [because("generator_silent", text, seconds=silent_s, timeout_s=timeout_s)]
        if monitor.watch is not None and monitor.watch.is_done():
            return []
        pause(POLL_S)
    monitor.update()
    monitor.missing_workers = ""
    progress()
    return []


def killed_processes(job: Job) -> list[int]:
    """Return the ids of load processes that are gone without an end record."""

    def without_end() -> list[int]:
        marks = [mark for mark in read_marks(Path(job.processes_path)) if mark.cell == job.cell]
        ended = {mark.process for mark in marks if mark.event == "end"}
        return [mark.process for mark in marks if mark.event == "start" and mark.process not in ended]

    gone = []
    for pid in without_end():
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                continue
        gone.append(pid)
    # An end record may have been written between the two checks.
    return [pid for pid in without_end() if pid in gone] if gone else []


def max_silence_s(job: Job) -> float:
    """Return the longest allowed seconds without an ended request, except idle times."""
    longest_s = []
    for load_job in loads_of(job):
        timeout_s = load_job.load.timeout_s
        tokens = max_length(load_job.load.output_tokens, pairs=load_job.output_lengths)
        # A stream that keeps sending may take longer than timeout_s, which limits silence.
        longest_s += [
            3 * timeout_s + SLOWEST_TPOT_S * tokens,
            0.0 if load_job.load.stream else max_body_s(timeout_s, tokens),
        ]
    return max(longest_s) + job.load.ramp_s + MAX_SILENCE_S


def scenario_mistake(first: list[Request]) -> Reason | None:
    """Return the common cause where the server rejected all of these requests because of the scenario."""
    mistake = find_scenario_mistake(
        [None if request.error is None else f"{request.error}: {request.message}" for request in first]
    )
    if mistake is None:
        return None
    text = f"the load was ended because the first {len(first)} requests all failed because of a scenario error: "
    text += f"{mistake.cause}; to solve it: {mistake.fix}"
    return because("scenario_mistake", text, requests=len(first), cause=mistake.cause, fix=mistake.fix)


def tail(path: Path, lines: int = 15) -> str:
    return "\n".join(_lines(path)[-lines:])


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, errors="replace").splitlines()
    except OSError:
        return []


class ExceptionLog:
    """The exceptions of a growing log, such as `ValueError: boom`. Reads only what is new."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self.last: str | None = None
        self._tail = Tail(path, from_start=True)
        self._in_traceback = False

    def update(self) -> None:
        for raw in self._tail.lines():
            line = raw[:_MAX_EXCEPTION_CHARS].decode(errors="replace").rstrip()
            if line.startswith("Traceback "):
                self._in_traceback = True
            elif self._in_traceback and line and not line.startswith(" "):
                self.count, self.last, self._in_traceback = self.count + 1, line, False


def start_errors(job: Job) -> str:
    """Return the errors that the load processes reported, a line each, without repetitions."""
    texts = [status.error for status in read_status(job) if status.error is not None]
    return "\n".join(dict.fromkeys(line for text in texts for line in text.splitlines()))


def missing_workers(job: Job) -> str:
    """Describe the missing workers by the master's last report; "" without one."""
    reports = [status.workers for status in read_status(job) if status.workers is not None]
    return job.workers.missing_text(reports[-1]) if job.workers is not None and reports else ""


def current_stage(job: Job) -> int:
    """Return the number of the stage that the load reported last."""
    return max((status.stage for status in read_status(job)), default=0)
