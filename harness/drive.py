"""Drive one cell: Locust as a process of its own, with stock options, watched until it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from harness import process
from harness.errors import HarnessError, RunError
from harness.job import Job

POLL_S = 0.2
QUIET_S = 60.0  # beyond every time limit of the load: then Locust itself hangs


class Count(msgspec.Struct, frozen=True):
    """How far a cell is."""

    recorded: int
    total: int | None  # None: timed load
    elapsed_s: float


class Driven(msgspec.Struct, frozen=True):
    """How the load processes ended. `problems` says why the cell cannot be trusted."""

    started_wall_s: float
    ended_wall_s: float
    problems: list[str]


def locust_command(job: Job, job_path: Path, locustfile: Path, url: str, ui_port: int | None = None) -> list[str]:
    """The stock Locust command line of a cell: headless, or with the web UI on 127.0.0.1 at `ui_port`."""
    load = job.load
    command = [sys.executable, "-m", "locust", "-f", str(locustfile), "--host", url, "--job", str(job_path)]
    command += ["--headless"] if ui_port is None else ["--web-host", "127.0.0.1", "--web-port", str(ui_port)]
    command += ["--users", str(load.users), "--spawn-rate", f"{load.users / max(load.ramp_s, 0.001):g}"]
    command += ["--only-summary", "--exit-code-on-error", "0"]  # failed requests are results; verdicts come later
    if load.processes > 1:
        command += ["--processes", str(load.processes)]
    return command


def drive(
    command: list[str],
    job: Job,
    *,
    log_path: Path,
    alive: Callable[[], str | None],
    progress: Callable[[Count], None],
    env: Mapping[str, str] | None = None,
) -> Driven:
    """Run a cell's load to its end.

    `alive` is asked all the time whether the server lives; when it says why not, the load is ended.
    Raises RunError when Locust itself could not run, such as for a syntax error in a locustfile.
    """
    started = time.time()
    problems: list[str] = []
    with log_path.open("wb") as log:
        child = process.start(
            command, stdout=log, stderr=subprocess.STDOUT, env={**(env or os.environ), "PYTHONUNBUFFERED": "1"}
        )
        try:
            problems += _watch(child, job, alive, progress)
        except BaseException:
            # Its records are flushed when it is asked politely; what is in flight is recorded as unfinished.
            process.stop(child, ask=signal.SIGTERM, grace_s=3.0)
            raise
        code = process.stop(child, grace_s=3.0)
    if code != 0 and not problems:
        problems.append(f"the load generator ended with exit code {code}")
        if not Path(job.tickets_path).exists():
            raise RunError(
                f"cell {job.cell}: Locust could not start the load (exit code {code})",
                next_step=f"Its log is {log_path}. A locustfile can be tried alone: locust -f FILE --host URL",
                detail=tail(log_path),
            )
    return Driven(started, time.time(), problems)


def _watch(
    child: "subprocess.Popen[bytes]", job: Job, alive: Callable[[], str | None], progress: Callable[[Count], None]
) -> list[str]:
    counter = LineCounter(Path(job.requests_path))
    begin = time.monotonic()
    total = None if job.load.requests is None else job.load.requests + (job.warmup.requests or 0)
    last_change = begin
    while child.poll() is None:
        dead = alive()
        if dead is not None:
            process.stop(child, ask=signal.SIGTERM, grace_s=3.0)
            return [f"the server died during the load: {dead}"]
        before = counter.lines
        counter.update()
        now = time.monotonic()
        if counter.lines != before:
            last_change = now
        progress(Count(counter.lines, total, now - begin))
        if now - last_change > _patience_s(job):
            process.stop(child, ask=signal.SIGTERM, grace_s=3.0)
            return [f"no request ended for {now - last_change:.0f} s although each may take {job.load.timeout_s:g} s"]
        time.sleep(POLL_S)
    counter.update()
    progress(Count(counter.lines, total, time.monotonic() - begin))
    return []


def _patience_s(job: Job) -> float:
    think = job.load.think_s[1] if job.load.think_s else 0.0
    # A stream that keeps sending may lawfully take longer than timeout_s, which is about silence.
    return 3 * job.load.timeout_s + think + job.load.ramp_s + QUIET_S


class LineCounter:
    """Counts the lines of a growing file by reading only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.lines = 0

    def update(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            new = file.read()
        self.offset += len(new)
        self.lines += new.count(b"\n")


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error's detail."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def check_locustfile(path: Path) -> None:
    """Find a syntax error before a server is started for ten minutes. Raises HarnessError."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as error:
        raise HarnessError(
            f"{path}, line {error.lineno}: syntax error in the locustfile: {error.msg}",
            next_step="Correct it; it can be tried alone with `locust -f FILE --host URL`.",
        ) from None
    except (OSError, ValueError) as error:
        raise HarnessError(f"{path}: the locustfile cannot be read ({error})") from None
