"""A load generator as a child of ours: where it runs, what it says, and the CPU time of all its processes."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.instrument.server import Server
from harness.records.records import Request

START_S = 40.0  # to start, and to make something of the numbers afterwards
SLOWEST = 8  # times as long as the schedule
LOOK_S = 0.2


class Failed(Exception):
    """A client did not do its work; the text says how."""


class Usage:
    """CPU time of a client's processes, looked at now and then: starting one may take more than the whole load."""

    def __init__(self, *looks: tuple[float, float]) -> None:
        self._looks = list(looks)  # monotonic s, CPU s

    def look(self, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            self._looks.append((time.monotonic(), sum(map(_cpu_s, [root, *root.children(recursive=True)]))))

    def end(self, used_s: float) -> None:
        """All of it, when the processes have ended."""
        self._looks.append((time.monotonic(), used_s))

    def between(self, began_s: float, ended_s: float) -> float:
        """CPU seconds between two moments."""
        times, used = zip(*self._looks, strict=True)
        began, ended = np.interp([began_s, ended_s], times, np.maximum.accumulate(used))
        return float(ended - began)


def _cpu_s(process: psutil.Process) -> float:
    """Its own, and that of its children that have ended."""
    try:
        used = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(used.user + used.system + used.children_user + used.children_system)


class Others:
    """What the machine does beside the benchmark, from now on: with much of it a reading says little."""

    def __init__(self) -> None:
        self._began_s, self._other_s = time.monotonic(), self._now_s()

    def share(self) -> float:
        """Of a core; to be asked when all children have ended."""
        return max(0.0, self._now_s() - self._other_s) / (time.monotonic() - self._began_s)

    def _now_s(self) -> float:
        every = psutil.cpu_times()
        own = psutil.Process().cpu_times()
        return float(sum(every) - every.idle - every.iowait - own.user - own.system - _ended_children_s())


def _ended_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Work(NamedTuple):
    """What a client is to do, and where."""

    server: Server
    requests: int
    folder: Path  # its own, and empty
    start: list[str]  # before its command
    usage: Usage

    @property
    def users(self) -> int:
        return self.server.users

    @property
    def scheduled_s(self) -> float:
        """How long it takes with no time lost."""
        return self.requests / self.users * self.server.schedule.e2e_s

    def run(self, command: list[str], **environment: str) -> str:
        """Run a command to its end; what it wrote. Raises Failed. Nothing that it started outlives it."""
        longest_s = START_S + SLOWEST * self.scheduled_s
        log = self.folder / "log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                [*self.start, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        before_s = _ended_children_s()
        deadline = time.monotonic() + longest_s
        try:
            while child.poll() is None:
                self.usage.look(child.pid)
                if time.monotonic() > deadline:
                    raise Failed(f"had not ended after {longest_s:.0f} s: {_tail(log)}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(LOOK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            self.usage.end(_ended_children_s() - before_s)
        if child.returncode != 0:
            raise Failed(f"exit code {child.returncode}: {_tail(log)}")
        return log.read_text(errors="replace")


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-300:]


class Said(NamedTuple):
    """What a client says of its requests, as records. A tool that keeps only the ends of an answer has two chunks."""

    records: list[Request]
    same_clock: bool = False  # its times are monotonic ones of this machine, and its ids those that it sent
    note: str = ""
    ttft_s: tuple[float, float] | None = None  # p50, p99 of one that keeps no records
    tried: int = 0  # requests that it sent before the load, to try the server

    def whole(self, chunks: int) -> list[Request]:
        """The good answers of so many tokens: not those that were made short so that the ends are spread."""
        return [one for one in self.records if one.error is None and (one.output_tokens or len(one.chunks_s)) == chunks]


Client = Callable[[Work], Said]
