"""paced_server on a core of its own, and what it says that it did: the truth of every reading."""

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.base.process import free_port, is_port_free

SOURCES = Path(__file__).parents[1]

Times = NDArray[np.float64]


class Schedule(NamedTuple):
    """What the server does: TTFT and gap in ms; with a tick, chunks leave on it."""

    ttft_ms: float = 100.0
    gap_ms: float = 20.0
    chunks: int = 100
    tick_ms: float = 0.0
    spread: bool = False  # each user's first answer has another length, so that ends do not fall together

    @property
    def e2e_s(self) -> float:
        """From a request to its last chunk. With a tick, a user asks right after one and waits for the next."""
        return (self.ttft_ms + self.tick_ms + (self.chunks - 1) * self.gap_ms) / 1000

    def __str__(self) -> str:
        how = "spread: each user's first answer has a length of its own, and is not counted"
        return (
            f"TTFT {self.ttft_ms:g} ms, {self.chunks} chunks, one each {self.gap_ms:g} ms"
            + (f", all streams on one tick of {self.tick_ms:g} ms (lockstep)" if self.tick_ms else "")
            + (f"; {how}" if self.spread else "; all users start and end at once, the harder way for a client")
        )


class Sent(NamedTuple):
    """An answer as the server sent it. Monotonic seconds."""

    received_s: float  # the kernel's stamp of the request
    chunks_s: Times

    @property
    def ttft_s(self) -> float:
        return float(self.chunks_s[0] - self.received_s)


class Truth(NamedTuple):
    """All that the server sent, and how late it was itself."""

    sent: dict[str, Sent]  # by request id, in the order of the requests
    late_p99_ms: float
    cpu_s: float

    def without(self, first: int) -> "Truth":
        """The same without the first requests."""
        return self._replace(sent=dict(list(self.sent.items())[first:]))

    @property
    def chunks(self) -> int:
        return sum(len(one.chunks_s) for one in self.sent.values())

    @property
    def span_s(self) -> tuple[float, float]:
        """The first request and the last chunk."""
        sent = self.sent.values()
        return min(one.received_s for one in sent), max(float(one.chunks_s[-1]) for one in sent)

    def whole(self, schedule: Schedule) -> list[Sent]:
        """The answers of full length: those that count."""
        return [one for one in self.sent.values() if len(one.chunks_s) == schedule.chunks]

    def load(self, users: int, schedule: Schedule) -> float | None:
        """Chunks sent, of those that so many users would have got with no time lost between their requests.

        Counted from the first request to the last chunk; where ends are spread, from the time when all users had begun
        a second answer to the last request: the start and the end of a run are no part of its steady state.
        """
        if not self.sent:
            return None
        every = np.concatenate([one.chunks_s for one in self.sent.values()])
        began, ended = self.span_s
        if schedule.spread:
            began, ended = began + schedule.e2e_s, max(one.received_s for one in self.sent.values())
        if ended <= began:
            return None
        count = int(((every > began) & (every <= ended)).sum())
        return count / (users * schedule.chunks / schedule.e2e_s * (ended - began))


class Server:
    """paced_server while it runs."""

    def __init__(self, schedule: Schedule, users: int, folder: Path, core: int | None) -> None:
        program = compiled("paced_server", folder)
        self._log = folder / f"sent-{time.monotonic_ns()}.txt"
        self.schedule = schedule
        self.users = users
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = [str(number) for number in (schedule.ttft_ms, schedule.gap_ms, schedule.chunks, schedule.tick_ms)]
        arguments += [str(users if schedule.spread else 0), str(self._log)]
        command = [*on_core(core, 50), str(program), str(self.port), *arguments]
        self._child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while is_port_free(self.port):
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        return self._child.pid  # taskset and chrt become the program

    def stop(self) -> Truth:
        """End it; what it did."""
        self._child.send_signal(signal.SIGTERM)
        _, said = self._child.communicate(timeout=60)
        told = msgspec.json.decode(said)
        return Truth(read_log(self._log), told["late_us"].get("p99", 0) / 1000, told["cpu_s"])


def read_log(path: Path) -> dict[str, Sent]:
    """What paced_server wrote: ID RECEIVED FIRST then differences, in ns."""
    sent = {}
    for line in path.read_text().splitlines():
        name, received, *times = line.split()
        if times:  # else it was cut before its first chunk
            sent[name] = Sent(int(received) / 1e9, np.cumsum(np.array(times, dtype=np.int64)) / 1e9)
    return sent


def on_core(core: int | None, priority: int | None) -> list[str]:
    """The start of a command that runs on this core; with a priority, before everything else there, where allowed."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    if priority is None or shutil.which("chrt") is None:
        return pinned
    first = ["chrt", "-f", str(priority)]
    return [*first, *pinned] if subprocess.run([*first, "true"], capture_output=True).returncode == 0 else pinned


def compiled(name: str, folder: Path) -> Path:
    program = folder / name
    if not program.exists():
        subprocess.run(["cc", "-O2", "-o", program, SOURCES / f"{name}.c"], check=True)
    return program
