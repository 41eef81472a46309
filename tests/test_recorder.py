"""Records and tickets that several processes share: nothing lost, nothing twice, no line torn."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gevent
import pytest

from harness.load.recorder import Recorder
from harness.load.tickets import Plan, Ticket, Tickets
from harness.records import Request, read_marks, read_requests


def request(number: int, process: int = 1, chunks: int = 3) -> Request:
    return Request(
        id=f"{process}-{number}",
        cell="c",
        load="l",
        user_class="U",
        index=number,
        user=0,
        process=process,
        phase="measured",
        sent_s=1.5,
        ended_s=2.25,
        chunks_s=[0.5] * chunks,
    )


def recorder(folder: Path) -> Recorder:
    return Recorder(str(folder / "requests.jsonl"), str(folder / "processes.jsonl"), "c")


def test_records_come_back_as_they_went(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    for number in range(3):
        one.sent += 1
        one.add(request(number))
    one.close()
    one.close()
    assert list(read_requests(tmp_path / "requests.jsonl")) == [request(number) for number in range(3)]
    start, end = read_marks(tmp_path / "processes.jsonl")
    assert (start.event, start.process, start.cell, start.sent) == ("start", os.getpid(), "c", None)
    assert (end.event, end.sent, end.recorded) == ("end", 3, 3)
    assert end.cpu_s is not None and end.cpu_s >= 0
    assert end.monotonic_s >= start.monotonic_s
    assert abs((end.wall_s - end.monotonic_s) - (start.wall_s - start.monotonic_s)) < 0.05


def test_records_reach_the_file_within_a_moment(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    one.add(request(0))
    gevent.sleep(0.4)
    assert len(list(read_requests(tmp_path / "requests.jsonl"))) == 1
    one.close()


def test_a_full_disk_is_not_a_loss_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recorder(tmp_path)
    real = os.write

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    one.add(request(0))
    monkeypatch.setattr(os, "write", full)
    one.flush()
    assert one.recorded == 0
    monkeypatch.setattr(os, "write", real)
    one.close()
    assert one.recorded == 1
    assert list(read_requests(tmp_path / "requests.jsonl")) == [request(0)]


WRITER = """
import sys
from pathlib import Path
from tests.test_recorder import recorder, request
one = recorder(Path(sys.argv[1]))
for number in range(400):
    one.sent += 1
    one.add(request(number, int(sys.argv[2]), chunks=300))
    if number % 7 == 0:
        one.flush()
one.close()
"""

TAKER = """
import sys
from tests.test_recorder import Plan, Tickets
tickets = Tickets(sys.argv[1], Plan(requests=900, warmup_requests=10))
while taken := tickets.take(3):
    print(*[ticket.index for ticket in taken], flush=True)
    tickets.settle(len(taken))
"""


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    root = Path(__file__).parents[1]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=root, stdout=subprocess.PIPE, text=True)


def test_processes_never_tear_each_others_lines(tmp_path: Path) -> None:
    writers = [start(WRITER, str(tmp_path), str(number)) for number in range(3)]
    for writer in writers:
        writer.communicate(timeout=60)
    damaged: list[int] = []
    ids = [record.id for record in read_requests(tmp_path / "requests.jsonl", damaged)]
    assert damaged == []
    assert sorted(ids) == sorted(f"{process}-{number}" for process in range(3) for number in range(400))
    marks = read_marks(tmp_path / "processes.jsonl")
    assert (
        sorted((mark.event, mark.sent, mark.recorded) for mark in marks if mark.event == "end")
        == [("end", 400, 400)] * 3
    )


def test_every_ticket_goes_to_exactly_one_process(tmp_path: Path) -> None:
    path = tmp_path / "tickets"
    takers = [start(TAKER, str(path)) for _ in range(3)]
    lines = [line for taker in takers for line in taker.communicate(timeout=60)[0].splitlines()]
    batches = [[int(word) for word in line.split()] for line in lines]
    assert sorted(index for batch in batches for index in batch) == list(range(-10, 900))
    assert all(max(batch) < 0 or min(batch) >= 0 for batch in batches)
    assert Tickets(str(path), Plan(requests=900, warmup_requests=10)).finished()


def test_a_process_that_dies_with_the_lock_does_not_stop_the_others(tmp_path: Path) -> None:
    path = tmp_path / "tickets"
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True)"
    holder = start(f"{code}; time.sleep(60)", str(path))
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert Tickets(str(path), Plan(requests=1)).take() == [Ticket("measured", 0)]


def test_warmup_comes_first_and_is_never_mixed(tmp_path: Path) -> None:
    tickets = Tickets(str(tmp_path / "t"), Plan(requests=7, warmup_requests=4))
    batches = [[(ticket.phase, ticket.index) for ticket in tickets.take(3)] for _ in range(6)]
    assert batches == [
        [("warmup", -1), ("warmup", -2), ("warmup", -3)],
        [("warmup", -4)],
        [("measured", 0), ("measured", 1), ("measured", 2)],
        [("measured", 3), ("measured", 4), ("measured", 5)],
        [("measured", 6)],
        [],
    ]
    assert [tickets.user() for _ in range(3)] == [0, 1, 2]


def test_it_is_finished_when_every_request_has_ended(tmp_path: Path) -> None:
    tickets = Tickets(str(tmp_path / "t"), Plan(requests=2, warmup_requests=1))
    assert not tickets.finished()
    for most in (1, 2):
        taken = tickets.take(most)
        assert not tickets.finished()
        tickets.settle(len(taken))
    assert tickets.finished()
    assert tickets.left_s() is None


def test_time_limits(tmp_path: Path) -> None:
    tickets = Tickets(str(tmp_path / "t"), Plan(duration_s=0.3, warmup_s=0.2, ramp_s=0.1))
    assert tickets.left_s() is None
    phases = []
    began = time.monotonic()
    while taken := tickets.take():
        phases.append((taken[0].phase, time.monotonic() - began))
        tickets.settle()
        time.sleep(0.02)
    warm = [at_s for phase, at_s in phases if phase == "warmup"]
    measured = [at_s for phase, at_s in phases if phase == "measured"]
    assert warm[-1] < 0.3 + 0.02 < measured[0] + 0.04
    assert measured[-1] - measured[0] < 0.3
    left_s = tickets.left_s()
    assert left_s is not None and left_s <= 0
    assert tickets.finished()
    assert tickets.take() == []


def test_a_timed_load_is_not_finished_while_requests_are_in_flight(tmp_path: Path) -> None:
    tickets = Tickets(str(tmp_path / "t"), Plan(duration_s=0.05))
    tickets.take(2)
    time.sleep(0.1)
    tickets.settle()
    assert not tickets.finished()
    tickets.settle()
    assert tickets.finished()


def test_without_limits_there_is_always_one_more(tmp_path: Path) -> None:
    tickets = Tickets(str(tmp_path / "t"), Plan())
    assert [tickets.take(2)[-1].index for _ in range(3)] == [1, 3, 5]
    tickets.settle(6)
    assert not tickets.finished()
