"""Memory of our client per open stream, and per chunk that it has read: differences between few streams and many."""

import os
import signal
import subprocess
import time
from typing import NamedTuple

import psutil

from benchmarks.instrument.client import Failed, Usage, Work
from benchmarks.instrument.modes import Place
from benchmarks.instrument.ours import our_command
from benchmarks.instrument.reading import Reading
from benchmarks.instrument.server import Schedule, Server, on_core

SCHEDULE = Schedule(ttft_ms=8000, gap_ms=50, chunks=1000)
SETTLED_S = 1.0  # after the last connection, well before the first chunk
CHUNKS = (200, 600)  # read of each stream at the later two looks


class Memory(NamedTuple):
    """Resident bytes: all streams open and nothing come, then after so many chunks of each."""

    open: int
    later: tuple[int, int]


def memory(few: int, many: int, place: Place) -> list[Reading]:
    """Print what a stream costs, from two runs with so many streams."""
    print(f"{SCHEDULE}; resident memory of the load process, {many} streams minus {few}, for each of the {many - few}")
    less, more = _measure(few, place), _measure(many, place)
    streams = many - few
    opened = (more.open - less.open) / streams
    first, second = ((after - before) / streams for before, after in zip(less.later, more.later, strict=True))
    print(f"an open stream on which nothing has come yet   {opened / 1024:6.1f} KiB")
    print(f"the same after {CHUNKS[0]} chunks                      {first / 1024:6.1f} KiB")
    print(f"the same after {CHUNKS[1]} chunks                      {second / 1024:6.1f} KiB")
    print(f"a chunk, between these two                     {(second - first) / (CHUNKS[1] - CHUNKS[0]):6.1f} bytes")
    note = f"KiB per stream: {opened / 1024:.1f} open, {first / 1024:.1f} and {second / 1024:.1f} after {CHUNKS} chunks"
    return [Reading(tool="ours", users=many, note=note)]


def _measure(users: int, place: Place) -> Memory:
    folder = place.folder / f"memory-{users}"
    folder.mkdir()
    server = Server(SCHEDULE, users, place.folder, place.server_core)
    _, command = our_command(Work(server, users, folder, [], Usage()), 1)
    with (folder / "log").open("wb") as log:
        command = [*on_core(place.client_core, None), *command]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return _watch(psutil.Process(child.pid), server, users)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        server.stop()


def _watch(process: psutil.Process, server: Server, users: int) -> Memory:
    deadline = time.monotonic() + 60
    while _connections(process, server.port) < users:
        if time.monotonic() > deadline:
            raise Failed(f"{users} streams were not open after 60 s")
        time.sleep(0.1)
    time.sleep(SETTLED_S)
    began = time.monotonic()
    opened = process.memory_info().rss
    later = []
    for chunks in CHUNKS:
        due_s = (SCHEDULE.ttft_ms + chunks * SCHEDULE.gap_ms) / 1000 - SETTLED_S
        time.sleep(max(0.0, began + due_s - time.monotonic()))
        later.append(process.memory_info().rss)
    return Memory(opened, (later[0], later[1]))


def _connections(process: psutil.Process, port: int) -> int:
    return sum(bool(one.raddr) and one.raddr.port == port for one in process.net_connections(kind="tcp4"))
