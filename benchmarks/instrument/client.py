"""A load generator as a child of ours: where it runs, what it says, and the CPU time of all its processes."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.instrument.server import Server
from harness.records import Request

LONGEST_S = 170.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: what a tool leaves behind becomes ours, and so does its CPU time


class Failed(Exception):
    """A client did not do its work; the text says how."""


class Work(NamedTuple):
    """What a client is to do, and where."""

    server: Server
    requests: int
    folder: Path  # its own, and empty
    start: list[str]  # before its command

    @property
    def users(self) -> int:
        return self.server.users

    def run(self, command: list[str], longest_s: float = LONGEST_S, **environment: str) -> str:
        """Run a command to its end; what it wrote. Raises Failed. Nothing that it started outlives it."""
        _adopt()
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
        try:
            code = child.wait(longest_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"had not ended after {longest_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            _reap(child.pid)
        said = log.read_text(errors="replace")
        if code != 0:
            raise Failed(f"exit code {code}: {' '.join(said.split())[-300:]}")
        return said


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


def cpu_s() -> float:
    """CPU time of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _adopt() -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _reap(group: int) -> None:
    """Wait for what a child left behind in its process group."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)
