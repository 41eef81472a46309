"""The measurements: clients against each other, several processes against one, and how many streams are too many."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.instrument.client import Client, Failed, Others, Usage, Work
from benchmarks.instrument.ours import ours
from benchmarks.instrument.reading import Reading, reading_of, show, show_head
from benchmarks.instrument.server import Schedule, Server, on_core
from harness.base.errors import HarnessError

STEPS = (500, 1000, 1250, 1500, 1750, 2000, 2300, 2600, 3000, 3500, 4000)
MAX_ERROR_MS = 5.0  # p99 of a chunk's time


class Place(NamedTuple):
    """Where things run."""

    folder: Path
    server_core: int | None
    client_core: int | None  # None: any, as of the server
    realtime: bool


def compare(
    clients: dict[str, Client], users: Sequence[int], rounds: int, repeats: int, schedule: Schedule, place: Place
) -> list[Reading]:
    """All clients at each number of users, one after the other: what else the machine does falls on all of them."""
    print(schedule)
    show_head()
    readings = []
    for _ in range(repeats):
        for count in users:
            for tool, client in clients.items():
                readings.append(measure(tool, client, count, rounds, schedule, place))
                show(readings[-1])
    return readings


_number = iter(range(1_000_000))


def measure(tool: str, client: Client, users: int, rounds: int, schedule: Schedule, place: Place) -> Reading:
    """One client under one load."""
    folder = place.folder / f"{tool}-{users}-{next(_number)}"
    folder.mkdir()
    others = Others()
    server = Server(schedule, users, place.folder, place.server_core)
    start = on_core(place.client_core, 40 if place.realtime else None)
    usage = Usage()
    said, failed = None, "not one whole answer in its file"
    try:
        said = client(Work(server, users * rounds, folder, start, usage))
    except (Failed, HarnessError) as failure:
        failed = str(failure)
    finally:
        truth = server.stop()
    if said is None or not (said.whole(schedule.chunks) or said.ttft_s):
        return Reading(tool=tool, users=users, note=f"failed: {failed}")
    return msgspec.structs.replace(reading_of(tool, said, truth, users, schedule, usage), others=others.share())


def processes(count: int, users: Sequence[int], repeats: int, schedule: Schedule, place: Place) -> list[Reading]:
    """Several load processes against one, with the same number of users for each of them."""
    print(
        f"{schedule}. Each process has so many users; every core may be used, and the server takes part of one of them."
    )
    anywhere = place._replace(client_core=None)
    clients = {number: partial(ours, processes=number) for number in (1, count)}
    show_head()
    readings = []
    for _ in range(repeats):
        for each in users:
            pair = []
            for number, client in clients.items():
                tool = f"ours, {number} process{'es' if number > 1 else ''}"
                pair.append(measure(tool, client, each * number, 4, schedule, anywhere))
                show(pair[-1])
            readings += pair
            one, several = pair
            if one.chunks_per_s and several.chunks_per_s and one.cpu_us and several.cpu_us:
                more, dearer = several.chunks_per_s / one.chunks_per_s, several.cpu_us / one.cpu_us
                print(f"    {more:.2f} x the chunks a second, at {dearer:.2f} x the CPU time per chunk")
    return readings


def capacity(steps: Sequence[int], place: Place) -> list[Reading]:
    """More and more streams, until 1 % of the chunk times are off by more than MAX_ERROR_MS."""
    schedule = Schedule(chunks=300)
    print(f"{schedule}. One answer for each user; the limit is a chunk error p99 of {MAX_ERROR_MS:g} ms.")
    show_head()
    readings = []
    for streams in steps or STEPS:
        readings.append(measure("ours, whole user class", ours, streams, 1, schedule, place))
        show(readings[-1])
        late_ms = readings[-1].server_late_p99_ms or 0.0
        limit = ": it, not the client, is the limit" if late_ms >= MAX_ERROR_MS else ""
        print(f"    the server itself was {late_ms:.2f} ms late (p99){limit}")
        if (readings[-1].chunk_p99_ms or MAX_ERROR_MS) >= MAX_ERROR_MS:
            break
    return readings
