"""The real command line as a subprocess, and what it must not leave behind."""

import io
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import yaml

from harness import cli
from harness.base.process import free_port
from harness.base.reason import Reason
from harness.records.manifest import read_run
from harness.records.records import Request, read_requests
from harness.run.experiment import Experiment, prepare
from tests.support import prefork
from tests.support.simulated import Spawned

HARNESS = prefork.SCRIPT
MARK = prefork.MARK
PATIENCE_S = 600.0  # for what must end or come: only against hanging. No test depends on the speed of the machine.

SMALL: dict[str, Any] = {
    "version": 1,
    "question": "Does the smallest run work?",
    "model": "tiny",
    "servers": {"one": {"template": "simulated", "container": False, "variables": {"preset": "instant"}}},
    "loads": {"burst": {"user": "batch", "batch_size": 2, "requests": 6, "output_tokens": 5}},
    "prompts": {"tokens": 8},
    "warmup": {"requests": 1},
    "repeats": 1,
}


class Done(NamedTuple):
    code: int
    out: str
    err: str


ENDED: list[Done] = []  # the commands of this test: see tests/support/faults.py


def descendants(mark: str, pid: int, word: str = "") -> list[psutil.Process]:
    """Return the living processes that the command `pid` started, with `word` in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != pid and process.environ().get(MARK) == mark:
                dead = process.status() == psutil.STATUS_ZOMBIE
                if not dead and word in " ".join(process.cmdline()):
                    found.append(process)
        except psutil.Error:
            continue
    return found


def no_descendants(mark: str, pid: int) -> None:
    """Assert that no process that the command started is left, and end those that are."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := descendants(mark, pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    words = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    assert words == []


class Going:
    """A command that runs, and every process that descends from it, orphans included."""

    def __init__(
        self,
        *args: str,
        cwd: Path,
        env: dict[str, str] | None = None,
        before: Callable[[], None] | None = None,
        forked: bool = True,
    ) -> None:
        self._mark = uuid.uuid4().hex
        popen = prefork.Popen if forked and before is None else subprocess.Popen
        self.process: subprocess.Popen[str] = popen(
            [HARNESS, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, MARK: self._mark, **(env or {})},
            preexec_fn=before,
            start_new_session=True,
        )

    def others(self, word: str = "") -> list[psutil.Process]:
        """The living processes that it started, with `word` in their command line."""
        return descendants(self._mark, self.process.pid, word)

    def end(self) -> Done:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        assert "Reason(code=" not in f"{out}{err}"  # no command prints a code where a sentence belongs
        ENDED.append(Done(self.process.returncode, out, err))
        return ENDED[-1]

    def nothing_left(self) -> None:
        no_descendants(self._mark, self.process.pid)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@contextmanager
def going(
    *args: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
    forked: bool = True,
) -> Iterator[Going]:
    """The command while it runs; killed with all that it started when the test fails.

    With `before`, which the new process calls first, or without `forked` it is started as a user does.
    """
    command = Going(*args, cwd=cwd, env=env, before=before, forked=forked)
    try:
        yield command
    finally:
        command.process.kill()
        with command.process:  # closes its pipes
            pass
        for process in command.others():
            process.kill()


def harness(
    *args: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Done:
    """Run a command to its end. No process of its own is left and no traceback is shown, whatever the command."""
    with going(*args, cwd=cwd, env=env, before=before) as command:
        done = command.end()
        command.nothing_left()
    assert "Traceback" not in done.out + done.err
    return done


def called(*args: str, cwd: Path, env: dict[str, str] | None = None) -> Done:
    """The end of a command that starts nothing, called in this process, which is quicker than `harness`."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with patch.dict(os.environ, env or {}), patch("sys.argv", ["harness", *args]), chdir(cwd):
        try:
            with redirect_stdout(out), redirect_stderr(err):
                cli.main()
        except SystemExit as end:
            code = end.code
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    assert isinstance(code, int) and not any(word in "".join(texts) for word in ("Reason(code=", "Traceback"))
    ENDED.append(Done(int(code), *texts))
    return ENDED[-1]


def write(folder: Path, name: str = "small", **changes: Any) -> Path:
    """A scenario file: SMALL with other values at its top."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    return path


def experiment_of(folder: Path, servers: dict[str, Any]) -> Experiment:
    """The experiment of a scenario with these servers."""
    return prepare(write(folder, servers=servers))


def server(*extra_args: str, **more: Any) -> dict[str, Any]:
    """A fast embedded engine as a process."""
    variables = {"preset": "instant", "extra_args": list(extra_args)}
    return {"template": "simulated", "container": False, "variables": variables, **more}


def slow_server(*extra_args: str) -> dict[str, Any]:
    """An embedded engine with 50 ms a token, so that a busy machine delays a request by a small part of its time."""
    return server("--step-base-s", "0.05", *extra_args)


def only_run(folder: Path) -> Path:
    """The one run directory below `folder`."""
    (run,) = (path.parent for path in folder.glob("*/run.json"))
    return run


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.05)
    return found


@contextmanager
def run_with_workers(
    folder: Path,
    engine: Spawned,
    load: dict[str, Any],
    env: dict[str, str] | None = None,
    of_workers: dict[str, str] | None = None,
    **more: Any,
) -> Iterator[tuple[Going, list[Going]]]:
    """`harness run --workers 2` and two `harness worker --once`."""
    scenario = write(folder, model="simulated", loads={"l": load}, **more)
    address = f"127.0.0.1:{free_port()}"
    run = ["run", str(scenario), "--url", engine.url, "--workers", "2", "--bind", address, "--runs", str(folder)]
    with ExitStack() as stack:
        own = {"TMPDIR": str(folder / "spool"), **(of_workers or {})}
        (folder / "spool").mkdir()
        worker = ("worker", "--master", address, "--once")
        workers = [stack.enter_context(going(*worker, cwd=folder, env=own)) for _ in range(2)]
        yield stack.enter_context(going(*run, cwd=folder, env=env)), workers


def records(folder: Path) -> list[Request]:
    return list(read_requests(only_run(folder) / "requests.jsonl"))


def reasons_but_slowness(folder: Path) -> list[Reason]:
    """Return why a run is INVALID, without the limits of the load generator that a busy machine causes."""
    return [reason for reason in read_run(folder).reasons if not reason.code.startswith("client_")]


def stamped_by_kernel(records: Sequence[Request]) -> bool:
    """Whether nearly all times are the kernel's.

    Where a busy machine stops a process between sending and noting the time, an answer seems to come before it: then
    the times of the reads are used.
    """
    return sum(record.clock == "kernel" for record in records) >= 0.9 * len(records) > 0


def delivered(folder: Path) -> list[Request]:
    return records(folder) if list(folder.glob("*/run.json")) else []
