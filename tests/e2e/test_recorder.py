"""Records and sequencer that several processes share: nothing lost, nothing twice, no line torn."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.load.recorder import Health, Recorder, _CpuSample, this_host
from harness.load.sequencer import Quota, Sequencer, Work
from harness.records.records import Request, read_marks, read_requests
from harness.scenario import Load
from tests.support.command import PATIENCE_S
from tests.support.faults import fault
from tests.support.load_runs import make_job


def request(number: int, process: int = 1, chunks: int = 3) -> Request:
    return Request(
        id=f"{process}-{number}", cell="c", load="l", user_class="U", index=number, user=0, process=process,
        phase="measured", sent_s=1.5, ended_s=2.25, chunks_s=[0.5] * chunks,
    )  # fmt: skip


def recorder(folder: Path) -> Recorder:
    return Recorder(make_job(folder, Load(user="batch"), cell="c"))


def test_records_come_back_as_they_went(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    for number in range(3):
        one.note_sending(Work("measured", 0))
        one.add(request(number))
    one.close()
    one.close()
    assert list(read_requests(tmp_path / "requests.jsonl")) == [request(number) for number in range(3)]
    start, end = read_marks(tmp_path / "processes.jsonl")
    assert (start.event, start.process, start.cell, start.sent) == ("start", os.getpid(), "c", None)
    assert (end.event, end.sent, end.recorded) == ("end", 3, 3)
    assert end.cpu_s is not None and end.cpu_s >= 0
    assert (end.cpu_max, end.read_lag_p99_s) == (None, None)  # too short, and no reads
    name, _, boot = (start.host or "").rpartition("-")
    assert (name, len(boot)) == (socket.gethostname(), 8)
    assert end.host == start.host == this_host()
    assert end.monotonic_s >= start.monotonic_s
    assert abs((end.wall_s - end.monotonic_s) - (start.wall_s - start.monotonic_s)) < 1


@fault("disk", "the disk is full for a while",
       seen="records cannot be written: No space left on device (in the log), and written later")  # fmt: skip
def test_what_a_full_disk_took_half_of_is_completed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, real, taken = recorder(tmp_path), os.write, list[int]()

    def nearly_full(file: int, data: bytes) -> int:
        if taken:
            raise OSError(28, "No space left on device")
        taken.append(real(file, data[:20]))
        return taken[0]

    for number in range(2):
        one.add(request(number))
    monkeypatch.setattr(os, "write", nearly_full)
    one.flush()
    assert one.recorded == 0
    monkeypatch.setattr(os, "write", real)
    one.close()
    assert list(read_requests(tmp_path / "requests.jsonl")) == [request(0), request(1)]


def test_the_end_mark_counts_what_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, real = recorder(tmp_path), os.write
    one.note_sending(Work("measured", 0))
    one.add(request(0))
    one.flush()

    def full_for_records(file: int, data: bytes) -> int:
        if b'"event"' not in data:
            raise OSError(28, "No space left on device")
        return real(file, data)

    one.note_sending(Work("measured", 0))
    one.add(request(1))
    monkeypatch.setattr(os, "write", full_for_records)
    one.close()
    assert list(read_requests(tmp_path / "requests.jsonl")) == [request(0)]
    end = read_marks(tmp_path / "processes.jsonl")[-1]
    assert (end.event, end.sent, end.recorded) == ("end", 2, 1)


WRITER = """
import sys
from pathlib import Path
from tests.e2e.test_recorder import Work, recorder, request
one = recorder(Path(sys.argv[1]))
for number in range(400):
    one.note_sending(Work("measured", 0))
    one.add(request(number, int(sys.argv[2]), chunks=300))
    if number % 7 == 0:
        one.flush()
one.close()
"""

TAKER = """
import sys
from harness.load.sequencer import Quota, Sequencer
sequencer = Sequencer(sys.argv[1], Quota(requests=900, warmup_requests=10))
while taken := sequencer.take(3):
    print(*[slot.index for slot in taken], flush=True)
    sequencer.settle(len(taken))
"""


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    root = Path(__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=root, stdout=subprocess.PIPE, text=True)


def test_processes_never_tear_each_others_lines(tmp_path: Path) -> None:
    writers = [start(WRITER, str(tmp_path), str(number)) for number in range(2)]
    for writer in writers:
        writer.communicate(timeout=PATIENCE_S)
    damaged: list[int] = []
    ids = [record.id for record in read_requests(tmp_path / "requests.jsonl", damaged)]
    assert damaged == []
    assert sorted(ids) == sorted(f"{process}-{number}" for process in range(2) for number in range(400))
    marks = read_marks(tmp_path / "processes.jsonl")
    assert [(mark.sent, mark.recorded) for mark in marks if mark.event == "end"] == [(400, 400)] * 2


def test_every_ticket_goes_to_exactly_one_process(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    takers = [start(TAKER, str(path)) for _ in range(2)]
    lines = [line for taker in takers for line in taker.communicate(timeout=PATIENCE_S)[0].splitlines()]
    batches = [[int(word) for word in line.split()] for line in lines]
    assert sorted(batches) == sorted(
        [[-1 - i, -2 - i, -3 - i] for i in range(0, 12, 3)] + [[i, i + 1, i + 2] for i in range(0, 900, 3)]
    )
    assert Sequencer(str(path), Quota(requests=900, warmup_requests=10)).is_finished()


def test_warmup_comes_first_is_never_mixed_and_never_cut(tmp_path: Path) -> None:
    sequencer = Sequencer(str(tmp_path / "t"), Quota(requests=7, warmup_requests=4))
    batches = [[(slot.phase, slot.index) for slot in sequencer.take(3)] for _ in range(6)]
    assert batches == [
        [("warmup", -1), ("warmup", -2), ("warmup", -3)],
        [("warmup", -4), ("warmup", -5), ("warmup", -6)],
        [("measured", 0), ("measured", 1), ("measured", 2)],
        [("measured", 3), ("measured", 4), ("measured", 5)],
        [("measured", 6)],
        [],
    ]
    assert [sequencer.add_user() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("quota", "warm_s"),
    [
        (Quota(requests=5, warmup_requests=1, ramp_s=0.2), 0.2),
        (Quota(requests=5, warmup_s=0.1, ramp_s=0.1), 0.2),
        (Quota(requests=5, ramp_s=0.2), 0.0),  # without warm-up the measurement begins with the first user
        (Quota(requests=5, warmup_requests=1), 0.0),
    ],
)
def test_what_is_sent_before_all_users_are_there_is_warmup(
    tmp_path: Path, clock: list[float], quota: Quota, warm_s: float
) -> None:
    sequencer = Sequencer(str(tmp_path / "t"), quota)
    warm = 0
    while sequencer.take()[0].phase == "warmup":
        warm += 1
        clock[0] += 1 / 64
    assert warm == (math.ceil(64 * warm_s) if warm_s else quota.warmup_requests)


def test_it_is_finished_when_every_request_has_ended(tmp_path: Path, clock: list[float]) -> None:
    fixed = Sequencer(str(tmp_path / "fixed"), Quota(requests=2, warmup_requests=1))
    assert not fixed.is_finished()
    for maximum in (1, 2):
        taken = fixed.take(maximum)
        assert not fixed.is_finished()
        fixed.settle(len(taken))
    assert (fixed.is_finished(), fixed.left_s()) == (True, None)
    timed = Sequencer(str(tmp_path / "timed"), Quota(duration_s=0.05))
    timed.take(2)
    clock[0] += 0.1
    for is_finished in (False, True):
        timed.settle()
        assert timed.is_finished() == is_finished


def test_time_limits(tmp_path: Path, clock: list[float]) -> None:
    sequencer = Sequencer(str(tmp_path / "t"), Quota(duration_s=0.3, warmup_s=0.2, ramp_s=0.1))
    assert sequencer.left_s() is None
    phases = []
    while taken := sequencer.take():
        phases.append((taken[0].phase, clock[0] - 1000))
        sequencer.settle()
        clock[0] += 1 / 64
    warm = [at_s for phase, at_s in phases if phase == "warmup"]
    measured = [at_s for phase, at_s in phases if phase == "measured"]
    assert max(warm) < 0.3 <= measured[0]
    assert measured[-1] - measured[0] < 0.3
    assert (len(warm), len(measured)) == (20, 20)
    left_s = sequencer.left_s()
    assert left_s is not None and left_s <= 0
    assert sequencer.is_finished()
    assert sequencer.take() == []


def test_the_highest_cpu_use_is_that_of_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0, 0.0, 0.0]  # monotonic, CPU, waited for a core
    monkeypatch.setattr(_CpuSample, "now", lambda: _CpuSample(*now))
    health = Health()

    def pass_seconds(number: int, share: float, waited: float = 0.0) -> None:
        for _ in range(number):
            now[0] += 1.0
            now[1] += share
            now[2] += waited
            health.sample()

    pass_seconds(10, 1.0)  # before the first measured request: importing, warming up
    assert health.end_mark_fields()["cpu_max"] is None
    health.begin()
    assert (health.end_mark_fields()["cpu_max"], health.busy_share()) == (None, None)
    pass_seconds(2, 0.5)
    assert health.end_mark_fields()["cpu_max"] == health.busy_share() == pytest.approx(0.5)  # of the time there was
    health.begin()
    pass_seconds(8, 0.25)
    pass_seconds(4, 1.0)
    pass_seconds(60, 0.0)
    assert health.end_mark_fields()["cpu_max"] == pytest.approx((4 + 0.25) / 5)
    assert health.busy_share() == 0.0
    pass_seconds(5, 0.25, waited=0.5)  # others have its core
    assert health.end_mark_fields()["cpu_max"] == pytest.approx((4 + 0.25) / 5)
    assert health.busy_share() == pytest.approx(0.75)


def test_the_lag_of_reading_is_known_to_a_microsecond() -> None:
    health = Health()
    assert health.end_mark_fields()["read_lag_p99_s"] is None
    health.note_read_lags([-3])
    assert health.end_mark_fields()["read_lag_p99_s"] == 0.0  # clocks that were read a moment apart
    health.note_read_lags([50] * 979 + [3000] * 19 + [70_000])
    assert health.end_mark_fields()["read_lag_p99_s"] == 0.003


def test_what_fell_due_while_the_loop_stood_still_was_late_as_well() -> None:
    health = Health()

    def lags() -> list[float | None]:
        fields = health.end_mark_fields()
        return [fields[f"loop_lag_{name}_s"] for name in ("mean", "p50", "p99")]

    health.note_loop_lag(0.3)  # before the first measured request
    assert lags() == [None, None, None]
    health.begin()
    health.note_loop_lag(-0.0001)
    health.note_loop_lag(0.12)  # also due: 50 and 100 ms later
    assert lags() == [None, 0.02, None]
    for _ in range(16):
        health.note_loop_lag(0.001)
    assert lags()[0] == pytest.approx((0.0 + 0.12 + 0.07 + 0.02 + 16 * 0.001) / 20)
    for _ in range(79):
        health.note_loop_lag(0.001)
    assert lags()[2] is None
    health.note_loop_lag(0.001)
    assert lags()[1:] == [0.001, 0.07]
