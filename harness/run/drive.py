"""Drive one cell: Locust as a process of its own, with stock options, watched until it ends."""

import contextlib
import errno
import json
import os
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import psutil

from harness import process
from harness.analysis import derive
from harness.errors import RunError
from harness.failures.explain import FIRST_REQUESTS, find_scenario_mistake
from harness.files import UNDECODABLE, open_file, read_text
from harness.job import SECRETS_ENV, GaveUp, Job, WaitsForWorkers, quiet_sign, read_status, status_file
from harness.process import free_port, pause
from harness.redact import registered_secrets
from harness.rundir.directory import disk_is_full, release_space
from harness.rundir.records import CUT, Request, Samples, Tail, read_marks
from harness.rundir.samples import GpuSample
from harness.scenario import MAX_USERS, at_once
from harness.scenario.behaviour import max_of
from harness.summary import Reason, because
from harness.workers import MACHINE

POLL_S = 0.2
LOOK_S = 1.0  # between two checks of the load processes
GRACE_S = 5.0  # for flushing records after the request to stop
SLOWEST_TPOT_S = 5.0  # a slower model counts as hanging
WORKERS_S = 300  # for workers of other machines, which a user starts
STUCK_S = 30.0  # without a record, while the users' own code raises ...
RECENT_S = 10.0  # span of rates; longer if an answer that ended in it took longer
_SETTLED_S = 1.0  # shorter spans have too few answers for a rate
_SHOWN = 10_000  # newest requests whose latencies are shown, so that memory does not grow
_MIN_REQUESTS = 3  # before their rate gives the remaining time
PROPOSED_RATE = 100.0  # users a second; above that Locust warns
STUCK_EXCEPTIONS = 3  # ... with this many exceptions: the load is stuck
QUIET_S = 60.0  # after every time limit of the load: Locust itself hangs


class Driven(msgspec.Struct, frozen=True):
    """How the load processes ended. `problems`: reasons why the cell is invalid."""

    started_wall_s: float
    ended_wall_s: float
    problems: list[Reason]
    stopped_s: float | None = None  # monotonic: when the harness stopped it as planned; None: it did not


class Watch(Protocol):
    """Follows a load by its records, and decides when it has been measured for long enough: a planned stop."""

    def see(self, requests: list[Request]) -> None: ...  # the new records of the cell, warm-up included

    def enough(self) -> bool: ...

    def measured_s(self, stopped_s: float) -> float: ...  # from the first measured request to that monotonic time


class Child(Protocol):
    """The load generator while it runs, as a process or in a container."""

    def poll(self) -> int | None: ...  # the exit code; None while it runs

    def stop(self, grace_s: float) -> int: ...  # ask it to end, kill it after `grace_s`; its exit code


class LocalChild:
    def __init__(self, command: list[str], log_path: Path) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", SECRETS_ENV: json.dumps(registered_secrets())}
        with log_path.open("wb") as log:
            self._child = process.start(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def poll(self) -> int | None:
        return self._child.poll()

    def stop(self, grace_s: float) -> int:
        return process.stop(self._child, grace_s=grace_s)


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a cell. Exact latencies in seconds of its newest measured requests; rates of the last seconds."""

    done: int = 0  # measured requests that ended
    planned: int | None = None
    warmup: int = 0
    failed: dict[str, int] = {}
    ttft_s: tuple[float, float] | None = None  # p50 and p95
    tpot_s: tuple[float, float] | None = None
    tok_s: float | None = None
    req_s: float | None = None
    in_flight: int | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    gpus: dict[str, GpuSample] = {}
    left_s: float | None = None


class _Ended(NamedTuple):
    last_s: float  # when the last of them ended
    number: int
    tokens: int
    longest_s: float


class Monitor:
    """Follow one cell by its growing files: records, server metrics and telemetry. Read only what is new."""

    def __init__(self, job: Job, watch: Watch | None = None) -> None:
        self.watch = watch
        self.recorded = 0  # records of all stages of a load, or of one load of a mix
        self.failed = 0  # of these
        self.awaited = ""  # missing workers, while the load waits for them
        self.started_s = time.monotonic()
        counted = job.load.requests is not None and job.warmup.requests is not None
        self.warmup = (job.warmup.requests or 0) if counted else 0
        self.total = (job.load.requests or 0) + self.warmup if counted else None  # None: not known
        self._records = Tail(Path(job.requests_path))
        self._first: list[Request] | None = []  # the first records; None: they were checked
        # The loads of a mix write into one file.
        self._only = b'"cell":"%b"' % job.cell.encode() if job.concurrent_loads else b""
        self.follow(job)

    def follow(self, job: Job) -> None:
        folder = Path(job.requests_path).parent
        self.job = job
        self._metrics = Samples(folder / "metrics.jsonl", job.cell)
        self._telemetry = Samples(folder / "telemetry.jsonl", job.cell)
        self._ttft: deque[float] = deque(maxlen=_SHOWN)
        self._tpot: deque[float] = deque(maxlen=_SHOWN)
        self._errors: Counter[str] = Counter()
        self._done = self._warmup = 0
        self._recent: deque[_Ended] = deque()
        self._before_s: float | None = None  # end of the newest update that was dropped from it
        self._offset_s: dict[int, float] = {}  # estimated offset of each machine's clock to ours
        self._began: float | None = None  # estimated time of the first measured request
        self._decoder = msgspec.json.Decoder(Request)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def update(self) -> None:
        lines = [line for line in self._records.lines() if self._only in line]
        self.recorded += len(lines)
        requests = []
        for line in lines:
            with contextlib.suppress(*UNDECODABLE):
                requests.append(self._decoder.decode(line))
        self.failed += sum(one.error is not None and one.error not in CUT for one in requests)
        if self._first is not None:
            self._first += requests
        if self.watch is not None:
            self.watch.see(requests)
        self._take(requests, time.monotonic())

    def mistake(self) -> Reason | None:
        """Why all further requests will fail too. Checked once, on the first requests."""
        if self._first is None or len(self._first) < FIRST_REQUESTS:
            return None
        first, self._first = self._first[:FIRST_REQUESTS], None
        return scenario_mistake(first)

    def look(self) -> Glance:
        self.update()
        now = time.monotonic()
        self._metrics.read_new()
        self._telemetry.read_new()
        values = (self._metrics.newest or {}).get("values", {})
        ended, tokens, span_s = self._lately(now)
        return Glance(
            done=self._done,
            planned=self.job.load.requests,
            warmup=self._warmup,
            failed=dict(self._errors.most_common()),
            ttft_s=_percentiles(self._ttft),
            tpot_s=_percentiles(self._tpot),
            tok_s=tokens / span_s if span_s else None,
            req_s=ended / span_s if span_s else None,
            in_flight=self._in_flight(),
            running=values.get("running"),
            waiting=values.get("waiting"),
            kv_usage=values.get("kv_usage"),
            gpus=msgspec.convert((self._telemetry.newest or {}).get("gpus", {}), dict[str, GpuSample]),
            left_s=self._left_s(now),
        )

    def _take(self, requests: list[Request], now: float) -> None:
        """Add records of the cell; those of its warm-up are only counted."""
        ours = [one for one in requests if one.cell == self.job.cell]
        measured = [one for one in ours if one.phase == "measured"]
        self._warmup += len(ours) - len(measured)
        if not measured:
            return
        tokens = 0
        ends: dict[int, float] = {}  # by machine
        for request in measured:
            machine = request.process // MACHINE
            ends[machine] = max(ends.get(machine, -inf), request.sent_s + request.ended_s)
            if request.error is not None:
                if request.error not in CUT:
                    self._errors[request.error] += 1
                continue
            tokens += request.output_tokens or 0
            for values, value in ((self._ttft, derive.ttft_s(request)), (self._tpot, derive.tpot_s(request))):
                if value is not None:
                    values.append(value)
        if self._began is None:  # the records may have another machine's clock
            self._began = now - (max(ends.values()) - min(one.sent_s for one in measured))
        self._done += len(measured)
        for machine, end_s in ends.items():
            self._offset_s.setdefault(machine, now - end_s)
        last_here_s = max(end_s + self._offset_s[machine] for machine, end_s in ends.items())
        longest_s = max(one.ended_s for one in measured)
        self._recent.append(_Ended(last_here_s, len(measured), tokens, longest_s))

    def _lately(self, now: float) -> tuple[int, int, float | None]:
        """Return requests and tokens of the last seconds, and the number of these seconds.

        Answers that take long end in waves, and a window that begins or ends between two of them has one too many or
        too few. So it lasts from the end of an answer to that of the last one, unless the next one is overdue.
        """
        if self._began is None:
            return 0, 0, None
        longest_s = max((look.longest_s for look in self._recent), default=0.0)
        span_s = max(RECENT_S, longest_s)
        end_s = max((look.last_s for look in self._recent), default=now)
        end_s = now if now - end_s > longest_s else end_s
        while self._recent and self._recent[0].last_s <= end_s - span_s:
            self._before_s = self._recent.popleft().last_s
        span_s = end_s - (self._began if self._before_s is None else self._before_s)
        if span_s < _SETTLED_S:
            return 0, 0, None
        return sum(look.number for look in self._recent), sum(look.tokens for look in self._recent), span_s

    def _in_flight(self) -> int | None:
        """Requests in flight of batch agents, which send slots as they take them; unknown for other users."""
        load = self.job.load
        if load.user != "batch" or load.arrivals is not None:
            return None
        try:
            with open_file(self.job.counter_path) as file:
                counts = msgspec.json.decode(file.readline())
            out = counts["warmup_taken"] + counts["measured_taken"] - counts["settled"]
            return min(max(int(out), 0), at_once(load))
        except (OSError, *UNDECODABLE, KeyError, TypeError):
            return None

    def _left_s(self, now: float) -> float | None:
        """Estimate the remaining time of the load. Requests in flight at the end of a timed one may take longer."""
        load = self.job.load
        if self._began is None or self.watch is not None:  # the watch decides when it ends
            return None
        if load.duration_s is not None:
            return max(0.0, self._began + load.duration_s - now)
        open_loop = load.arrivals is not None or load.trace is not None
        # Users start together: a rate needs the answers of at least one full wave.
        if load.requests is None or self._done < (_MIN_REQUESTS if open_loop else max(_MIN_REQUESTS, at_once(load))):
            return None
        return max(0.0, (load.requests - self._done) * (now - self._began) / self._done)


def _percentiles(values: deque[float]) -> tuple[float, float] | None:
    if not values:
        return None
    p50, p95 = np.percentile(list(values), [50, 95])
    return float(p50), float(p95)


def locust_arguments(
    job: Job, given: Path | str, locustfile: Path, url: str, ui: tuple[str, int] | None = None
) -> list[str]:
    """Stock Locust arguments of a cell: headless, or with the web UI at an address and port.

    `given`: how Locust gets the job, by its file or as its text.
    """
    load = job.load
    arguments = ["-f", str(locustfile), "--host", url, "--job", str(given)]
    arguments += ["--headless"] if ui is None else ["--web-host", ui[0], "--web-port", str(ui[1])]
    rate = min(load.users / max(load.ramp_s, 0.001), MAX_USERS)
    # The form proposes this rate. Locust warns above it, and all users start quickly anyway.
    arguments += ["--users", str(load.users), "--spawn-rate", f"{rate if ui is None else min(rate, PROPOSED_RATE):g}"]
    arguments += ["--only-summary", "--exit-code-on-error", "0"]  # failed requests are results, evaluated later
    if job.workers is not None:
        arguments += ["--master", "--master-bind-host", job.workers.bind, "--master-bind-port", str(job.workers.port)]
        arguments += ["--expect-workers", str(job.workers.total), "--expect-workers-max-wait", str(WORKERS_S)]
    elif load.processes > 1:
        # A free port, so that two harnesses on one machine do not conflict.
        port = str(free_port())
        arguments += ["--processes", str(load.processes), "--master-bind-host", "127.0.0.1"]
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
    """Run the load of the monitor's job to its end, or until its watch has seen enough.

    `alive` is asked all the time whether the server lives; when it says why the load must end, it is ended.
    Raises RunError when Locust itself could not run, such as for a locustfile that fails to import, and OSError when
    the disk is full.
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
    begun = Path(job.counter_path).exists()
    if code != 0 and not problems and (begun or stopped_s is None):  # else it was stopped before it handled signals
        last = next(reversed(exceptions_in(log_path)), None)
        problems = [because("generator_exit", exit_code=code, exception=last)]
        if not begun:
            raise _not_started(job, code, log_path, time.time() - started)
    return Driven(started, time.time(), problems, stopped_s)


def _not_started(job: Job, code: int, log_path: Path, waited_s: float) -> RunError:
    if said := gave_up(job):
        why, *more = said.splitlines()
        return RunError(
            f"cell {job.cell}: the load could not start: {why.removesuffix('.')}",
            next_step=f"Its log is {log_path}.",
            detail="\n".join(more),
        )
    awaited = awaited_workers(job)
    if job.workers is not None and awaited and waited_s > WORKERS_S:
        return RunError(
            f"cell {job.cell}: the load could not start: {WORKERS_S} s of {awaited}",
            next_step=f"On each machine: {job.workers.command}. The log is {log_path}.",
        )
    return RunError(
        f"cell {job.cell}: Locust could not start the load (exit code {code})",
        next_step=f"Its log is {log_path}. A locustfile can be tried alone: locust -f FILE --host URL",
        detail=tail(log_path),
    )


def _watch(
    child: Child,
    job: Job,
    log_path: Path,
    alive: Callable[[], Reason | None],
    progress: Callable[[], None],
    monitor: Monitor,
) -> list[Reason]:
    raised = 0  # exceptions in the log when the last record came
    last_change = last_quiet = last_look = time.monotonic()
    quiet, sign_ns = quiet_sign(job.counter_path), 0
    while child.poll() is None:
        if disk_is_full(folder := Path(job.requests_path).parent):
            release_space(folder, half=True)  # for the records that the load processes still hold
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), job.requests_path)
        dead = alive()
        if dead is not None:
            return [dead]
        before = monitor.recorded
        monitor.update()
        now = time.monotonic()
        if isinstance(child, LocalChild) and now - last_look > LOOK_S:
            last_look = now
            if job.workers is not None:
                monitor.awaited = "" if Path(job.counter_path).exists() else awaited_workers(job)
            elif killed_processes(job) and child.poll() is None:  # else it was the only one: its exit code says more
                # Its slots are never settled, so the others would wait for it; the validity check reports it.
                return [because("process_killed")]
        if monitor.awaited:
            last_change = now
        with contextlib.suppress(OSError):
            if (touched_ns := quiet.stat().st_mtime_ns) != sign_ns:
                sign_ns, last_quiet = touched_ns, now
        if monitor.recorded != before:
            last_change, raised = now, len(exceptions_in(log_path))
        elif now - last_change > STUCK_S and len(found := exceptions_in(log_path)) - raised >= STUCK_EXCEPTIONS:
            return [because("generator_stuck", seconds=STUCK_S, exception=found[-1])]
        progress()
        mistake = monitor.mistake()
        if mistake is not None:
            return [mistake]
        silent_s = now - max(last_change, last_quiet)
        if silent_s > _patience_s(job):
            return [because("generator_silent", seconds=silent_s, timeout_s=job.load.timeout_s)]
        if monitor.watch is not None and monitor.watch.enough():
            return []
        pause(POLL_S)
    monitor.update()
    monitor.awaited = ""
    progress()
    return []


def killed_processes(job: Job) -> list[int]:

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


def _patience_s(job: Job) -> float:
    """Return the longest allowed time without an ended request. Pauses of users and of the schedule do not count."""
    # A stream that keeps sending may take longer than timeout_s, which limits silence.
    longest_s = 3 * job.load.timeout_s + SLOWEST_TPOT_S * max_of(job.load.output_tokens, pairs=job.output_lengths)
    return longest_s + job.load.ramp_s + QUIET_S


def scenario_mistake(first: list[Request]) -> Reason | None:
    """Return the common cause if the server rejected all of these requests because of the scenario."""
    mistake = find_scenario_mistake([None if one.error is None else f"{one.error}: {one.message}" for one in first])
    if mistake is None:
        return None
    return because("scenario_mistake", requests=len(first), cause=mistake.cause, fix=mistake.fix)


def tail(path: Path, lines: int = 15) -> str:
    return "\n".join(_lines(path)[-lines:])


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, errors="replace").splitlines()
    except OSError:
        return []


def exceptions_in(path: Path) -> list[str]:
    """Return the exceptions of a log, such as `ValueError: boom`."""
    found, inside = [], False
    for line in _lines(path):
        if line.startswith("Traceback "):
            inside = True
        elif inside and line and not line.startswith(" "):
            found.append(line.strip()[:300])
            inside = False
    return found


def gave_up(job: Job) -> str:
    """Return why the load could not start, as its load processes report it; each reason once."""
    texts = [status.text for status in read_status(job) if isinstance(status, GaveUp)]
    return "\n".join(dict.fromkeys(line for text in texts for line in text.splitlines()))


def awaited_workers(job: Job) -> str:
    reports = [status for status in read_status(job) if isinstance(status, WaitsForWorkers)]
    return job.workers.awaited(reports[-1].here) if job.workers is not None and reports else ""
