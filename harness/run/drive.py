"""Drive one cell: Locust as a process of its own, with stock options, watched until it ends."""

import errno
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from harness import process
from harness.errors import RunError
from harness.failures.explain import FIRST, mistake_of
from harness.files import open_file, read_bytes, read_text
from harness.job import SECRETS_ENV, GaveUp, Job, WaitsForWorkers, quiet_sign, read_status, status_file
from harness.redact import known
from harness.rundir.manifest import disk_is_full, release_space
from harness.rundir.records import CUT, Request, read_marks
from harness.scenario.lengths import most_of
from harness.scenario.scenario import MAX_USERS
from harness.serve.ask import free_port

POLL_S = 0.2
LOOK_S = 1.0  # between looks at the load processes
GRACE_S = 5.0  # for flushing records after it was asked to end
SLOWEST_TPOT_S = 5.0  # a model slower than that is not worth waiting for
WORKERS_S = 300  # for workers of other machines to come, which people start
STUCK_S = 30.0  # without a record, while the users' own code raises ...
PROPOSED_RATE = 100.0  # users a second; above that Locust warns
STUCK_EXCEPTIONS = 3  # ... so often: then it will not get better
QUIET_S = 60.0  # beyond every time limit of the load: then Locust itself hangs


class Count(msgspec.Struct, frozen=True):
    """How far a cell is."""

    recorded: int
    total: int | None  # None: timed load
    elapsed_s: float
    failed: int = 0
    warmup: int = 0  # of the total, those that are not measured
    awaited: str = ""  # which workers are missing, while it waits for them


class Driven(msgspec.Struct, frozen=True):
    """How the load processes ended. `problems` says why the cell cannot be trusted."""

    started_wall_s: float
    ended_wall_s: float
    problems: list[str]


class Child(Protocol):
    """The load generator while it runs, as a process or in a container."""

    def poll(self) -> int | None: ...  # the exit code; None while it runs

    def stop(self, grace_s: float) -> int: ...  # ask it to end, kill it after `grace_s`; its exit code


class LocalChild:
    """Locust as a process of this host."""

    def __init__(self, command: list[str], log_path: Path) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", SECRETS_ENV: json.dumps(known())}
        with log_path.open("wb") as log:
            self._child = process.start(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def poll(self) -> int | None:
        return self._child.poll()

    def stop(self, grace_s: float) -> int:
        return process.stop(self._child, grace_s=grace_s)


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
    # What a form proposes is read: more would make Locust warn of it, and all users are there in the wink of an eye.
    arguments += ["--users", str(load.users), "--spawn-rate", f"{rate if ui is None else min(rate, PROPOSED_RATE):g}"]
    arguments += ["--only-summary", "--exit-code-on-error", "0"]  # failed requests are results; verdicts come later
    if job.workers is not None:
        arguments += ["--master", "--master-bind-host", job.workers.bind, "--master-bind-port", str(job.workers.port)]
        arguments += ["--expect-workers", str(job.workers.total), "--expect-workers-max-wait", str(WORKERS_S)]
    elif load.processes > 1:
        # A port of its own, so that two harnesses on one machine do not meet.
        port = str(free_port())
        arguments += ["--processes", str(load.processes), "--master-bind-host", "127.0.0.1"]
        arguments += ["--master-bind-port", port, "--master-port", port]
    return arguments


def drive(
    start: Callable[[], Child],
    job: Job,
    *,
    log_path: Path,
    alive: Callable[[], str | None],
    progress: Callable[[Count], None],
) -> Driven:
    """Run a cell's load to its end.

    `alive` is asked all the time whether the server lives; when it says why the load must end, it is ended.
    Raises RunError when Locust itself could not run, such as for a locustfile that fails to import, and OSError when
    the disk is full.
    """
    started = time.time()
    status_file(job.tickets_path).unlink(missing_ok=True)  # of an earlier try, which was resumed
    child = start()
    try:
        problems = _watch(child, job, log_path, alive, progress)
    finally:
        # Its records are flushed when it is asked politely; what is in flight is recorded as unfinished.
        code = child.stop(GRACE_S)
    if code != 0 and not problems:
        raised = last_exception(log_path)
        problems = [f"the load generator ended with exit code {code}" + (f"; its log has {raised}" if raised else "")]
        if not Path(job.tickets_path).exists():
            if said := gave_up(job):
                why, *more = said.splitlines()
                raise RunError(
                    f"cell {job.cell}: the load could not start: {why.removesuffix('.')}",
                    next_step=f"Its log is {log_path}.",
                    detail="\n".join(more),
                )
            awaited = awaited_workers(job)
            if job.workers is not None and awaited and time.time() - started > WORKERS_S:
                raise RunError(
                    f"cell {job.cell}: the load could not start: {WORKERS_S} s of {awaited}",
                    next_step=f"On each machine: {job.workers.command}. The log is {log_path}.",
                )
            raise RunError(
                f"cell {job.cell}: Locust could not start the load (exit code {code})",
                next_step=f"Its log is {log_path}. A locustfile can be tried alone: locust -f FILE --host URL",
                detail=tail(log_path),
            )
    return Driven(started, time.time(), problems)


def _watch(
    child: Child,
    job: Job,
    log_path: Path,
    alive: Callable[[], str | None],
    progress: Callable[[Count], None],
) -> list[str]:
    # The parts of a mix write into one file, and are not to be blamed for each other.
    counter = LineCounter(Path(job.requests_path), job.cell if job.beside else None)
    raised = 0  # exceptions in the log when the last record came
    awaited = ""
    begin = time.monotonic()
    endless = job.load.requests is None or job.warmup.requests is None  # nobody knows how many there will be
    warmup = 0 if endless else job.warmup.requests or 0
    total = None if endless else (job.load.requests or 0) + warmup
    last_change = last_quiet = last_look = begin
    quiet, sign_ns = quiet_sign(job.tickets_path), 0
    while child.poll() is None:
        if disk_is_full(folder := Path(job.requests_path).parent):
            release_space(folder, half=True)  # for the records that the load processes still hold
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), job.requests_path)
        dead = alive()
        if dead is not None:
            return [dead]
        before = counter.lines
        counter.update()
        now = time.monotonic()
        if isinstance(child, LocalChild) and now - last_look > LOOK_S:
            last_look = now
            if job.workers is not None:
                awaited = "" if Path(job.tickets_path).exists() else awaited_workers(job)
            elif killed_processes(job):
                # What it held is never done, so the others would wait for it; validity names it.
                return ["the load was ended because a load process had been killed"]
        if awaited:
            last_change = now
        if (touched_ns := _touched_ns(quiet)) != sign_ns:
            sign_ns, last_quiet = touched_ns, now
        if counter.lines != before:
            last_change, raised = now, exceptions_in(log_path)
        elif now - last_change > STUCK_S and exceptions_in(log_path) - raised >= STUCK_EXCEPTIONS:
            return [f"no request was recorded for {STUCK_S:g} s while users raised {last_exception(log_path)}"]
        progress(Count(counter.lines, total, now - begin, counter.failed, warmup, awaited))
        mistake = counter.mistake()
        if mistake is not None:
            return [mistake]
        silent_s = now - max(last_change, last_quiet)
        if silent_s > _patience_s(job):
            return [f"no request ended for {silent_s:.0f} s although each may take {job.load.timeout_s:g} s"]
        time.sleep(POLL_S)
    counter.update()
    progress(Count(counter.lines, total, time.monotonic() - begin, warmup=warmup))
    return []


def killed_processes(job: Job) -> list[int]:
    """Load processes of this host that said hello in the cell, have not said goodbye, and are gone."""
    gone = [process for process in _without_goodbye(job) if not _runs(process)]
    # A goodbye may have been written between the two looks.
    return [process for process in _without_goodbye(job) if process in gone] if gone else []


def _without_goodbye(job: Job) -> list[int]:
    marks = [mark for mark in read_marks(Path(job.processes_path)) if mark.cell == job.cell]
    ended = {mark.process for mark in marks if mark.event == "end"}
    return [mark.process for mark in marks if mark.event == "start" and mark.process not in ended]


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _touched_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _patience_s(job: Job) -> float:
    """How long no request may end while one is due. Pauses of users, and of the schedule, do not count."""
    # A stream that keeps sending may lawfully take longer than timeout_s, which is about silence.
    longest_s = 3 * job.load.timeout_s + SLOWEST_TPOT_S * most_of(job.load.output_tokens, pairs=job.output_lengths)
    return longest_s + job.load.ramp_s + QUIET_S


class LineCounter:
    """Counts the records of a growing file, all of them or those of one cell, by reading only what is new."""

    def __init__(self, path: Path, cell: str | None = None) -> None:
        self.path = path
        self._mark = None if cell is None else b'"cell":"%b"' % cell.encode()
        self._begun = b""  # a line that is not there in full yet
        self.offset = path.stat().st_size if path.exists() else 0
        self.lines = 0
        self.failed = 0
        self._first = b""  # the first records, until they were judged
        self._judged = False

    def update(self) -> None:
        if not self.path.exists():
            return
        with open_file(self.path) as file:
            file.seek(self.offset)
            new = file.read()
        self.offset += len(new)
        if self._mark is not None:
            *lines, self._begun = (self._begun + new).split(b"\n")
            new = b"".join(line + b"\n" for line in lines if self._mark in line)
        self.lines += new.count(b"\n")
        self.failed += new.count(b',"error":"') - sum(new.count(b',"error":"%b"' % kind.encode()) for kind in CUT)
        if not self._judged:
            self._first += new

    def mistake(self) -> str | None:
        """Why the rest will fail as well, asked once: when the first requests all failed for the scenario's mistake."""
        if self._judged or self.lines < FIRST:
            return None
        self._judged = True
        lines = self._first.splitlines()[:FIRST]
        self._first = b""
        return scenario_mistake([msgspec.json.decode(line, type=Request) for line in lines])


def scenario_mistake(first: list[Request]) -> str | None:
    """Why every other request will fail as these did, where all of them were refused for what the scenario asks."""
    mistake = mistake_of([None if one.error is None else f"{one.error}: {one.message}" for one in first])
    if mistake is None:
        return None
    return (
        f"the load was ended because its first {len(first)} requests all failed for a mistake of the scenario: "
        f"{mistake.cause}; to solve it: {mistake.fix}"
    )


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error's detail."""
    return "\n".join(_lines(path)[-lines:])


def gave_up(job: Job) -> str:
    """Why the load could not start, as its load processes report it, each reason once; empty where they do not."""
    texts = [status.text for status in read_status(job) if isinstance(status, GaveUp)]
    return "\n".join(dict.fromkeys(line for text in texts for line in text.splitlines()))


def awaited_workers(job: Job) -> str:
    """Which workers the master waits for, as it reports last; empty where it reports nothing of it."""
    reports = [status for status in read_status(job) if isinstance(status, WaitsForWorkers)]
    return job.workers.awaited(reports[-1].here) if job.workers is not None and reports else ""


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, errors="replace").splitlines()
    except OSError:
        return []


def exceptions_in(path: Path) -> int:
    """How many tracebacks a log has."""
    return read_bytes(path).count(b"\nTraceback ") if path.exists() else 0


def last_exception(path: Path) -> str | None:
    """The last exception in a log, as its traceback ends: `ValueError: boom`."""
    found, inside = None, False
    for line in _lines(path):
        if line.startswith("Traceback "):
            inside = True
        elif inside and line and not line.startswith(" "):
            found, inside = line.strip()[:300], False
    return found
