"""What the terminal shows of a cell while it runs."""

import io
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from harness.job import Job
from harness.run.drive import Glance, Monitor
from harness.run.progress import Progress, describe_glance, glance_view
from harness.rundir.records import Request
from harness.rundir.samples import GpuSample
from harness.scenario import Load, Warmup
from harness.scenario.plan import Cell
from harness.units import duration
from tests.load_runs import make_job

CELL = "r1-one-burst"
FULL = Glance(
    done=40,
    failed={"timeout": 2, "http": 1},
    ttft_s=(12.3456, 123.4),
    tpot_s=(0.0375, 0.1),
    tok_s=12345.0,
    req_s=14.25,
    running=256.0,
    waiting=744.0,
    kv_usage=1.0,
    gpus={
        f"renderD{128 + number}": GpuSample(busy_percent=99.0, vram_used_bytes=185 * 2**30, power_w=749.6)
        for number in range(8)
    },
    left_s=125.0,
)


def job(folder: Path, user: str = "batch", **load: Any) -> Job:
    return make_job(folder, Load(user=user, users=2, **load), Warmup(requests=1), cell=CELL, load_name="burst")


def record(index: int, cell: str = CELL, **more: Any) -> bytes:
    given = {
        "id": str(index), "cell": cell, "load": "burst", "user_class": "BatchAgent", "index": index, "user": 0,
        "process": 1, "phase": "measured", "sent_s": 1.0, "ended_s": 1.0,
        "chunks_s": [0.1 * (index + 1), 0.1 * (index + 1) + 0.2], "output_tokens": 11,
    }  # fmt: skip
    return msgspec.json.encode(Request(**{**given, **more})) + b"\n"


def append(path: Path, *lines: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(lines))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time, which does not move."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_glance_has_the_state_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    requests = tmp_path / "requests.jsonl"
    append(requests, record(0), record(1))  # of before
    watch = Monitor(job(tmp_path, batch_size=2, requests=20))
    assert watch.glance() == Glance()
    append(requests, record(-1, phase="warmup"), *(record(index) for index in range(4)), record(4, "r1-other-cell"))
    append(requests, record(5, error="timeout", chunks_s=[]), record(6)[:30])
    values = {"running": 3.0, "waiting": 2.0, "kv_usage": 0.25}
    head = {"wall_s": time.time(), "cell": CELL}
    append(tmp_path / "metrics.jsonl", msgspec.json.encode(head | {"values": values}) + b"\n")
    gpu = {"busy_percent": 50.0, "vram_used_bytes": 1, "gtt_used_bytes": 2, "package": True}
    append(tmp_path / "telemetry.jsonl", msgspec.json.encode(head | {"gpus": {"renderD128": gpu}}) + b"\n")
    now[0] = 104.0
    found = watch.glance()
    assert (found.done, found.warmup, found.failed) == (5, 1, {"timeout": 1})
    assert found.ttft_s == pytest.approx((0.25, 0.385)) and found.tpot_s == pytest.approx((0.02, 0.02))
    assert (found.running, found.waiting, found.kv_usage) == (3.0, 2.0, 0.25)
    assert found.gpus == {"renderD128": msgspec.convert(gpu, GpuSample)}
    assert "renderD128 50 % 0.0 GiB" in describe_glance(found)
    # The first was sent a second before it was seen to have ended.
    assert (found.req_s, found.tok_s, found.left_s) == (5.0, 44.0, 3.0)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    now[0] = 130.0
    late = watch.glance()
    assert (late.running, late.gpus, late.req_s, late.done) == (None, {}, 5.0, 5)  # what is old is not shown


def test_latencies_are_those_of_the_newest_requests(tmp_path: Path) -> None:
    watch = Monitor(job(tmp_path, batch_size=1, requests=20_000))
    for chunks_s, number in (([5.0, 6.0], 4_000), ([0.1, 0.3], 10_000)):
        append(tmp_path / "requests.jsonl", record(0, chunks_s=chunks_s) * number)
        found = watch.glance()
    assert found.done == 14_000
    assert found.ttft_s == pytest.approx((0.1, 0.1)) and found.tpot_s == pytest.approx((0.02, 0.02))


def test_unfinished_and_abandoned_requests_have_not_failed(tmp_path: Path) -> None:
    watch = Monitor(job(tmp_path, batch_size=1, requests=20))
    errors = ("abandoned", "timeout", "unfinished")
    append(tmp_path / "requests.jsonl", *(record(i, error=error, chunks_s=[]) for i, error in enumerate(errors)))
    found = watch.glance()
    assert (found.done, found.failed, watch.failed) == (3, {"timeout": 1}, 1)


def test_rates_count_from_the_first_request_and_need_a_second(tmp_path: Path, now: list[float]) -> None:
    watch = Monitor(job(tmp_path, batch_size=1, requests=20))
    # One after the other, 0.1 s each; the shortest time that one took is not how long it has been going on.
    append(tmp_path / "requests.jsonl", *(record(i, sent_s=1.0 + 0.1 * i, ended_s=0.1) for i in range(5)))
    assert (found := watch.glance()).done == 5 and (found.req_s, found.tok_s) == (None, None)
    append(tmp_path / "requests.jsonl", *(record(i, sent_s=1.0 + 0.1 * i, ended_s=0.1) for i in range(5, 15)))
    now[0] = 101.0
    assert ((found := watch.glance()).req_s, found.tok_s) == pytest.approx((10.0, 110.0))


def test_a_timed_load_has_a_time_left(tmp_path: Path, now: list[float]) -> None:
    watch = Monitor(job(tmp_path, "chat", duration_s=60.0))
    append(tmp_path / "requests.jsonl", record(0))
    assert watch.glance().left_s == 59.0
    now[0] = 1000.0
    assert watch.glance().left_s == 0.0


@pytest.mark.parametrize("width", [40, 120])
def test_the_numbers_fit_the_terminal(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width - 2).print(glance_view(FULL))
    assert max(len(line) for line in out.getvalue().splitlines()) <= width - 2
    words = " ".join(out.getvalue().split())
    assert "…" not in words
    for word in ("TTFT p50 12.3 s", "TPOT p50 37.5 ms", "tok/s 12345", "KV 100%", "failed: 2 timeout, 1 http"):
        assert word in words
    assert out.getvalue().count(" 99 % 185.0 GiB 750 W") == 8  # none is broken


def test_the_time_left_is_known_after_an_answer_of_each_user(tmp_path: Path, now: list[float]) -> None:
    watch = Monitor(job(tmp_path, batch_size=5, requests=60))
    for ended, left_s in ((4, None), (6, 6.25)):  # after all ten in a bit more than a second, fifty are left
        append(tmp_path / "requests.jsonl", *(record(0) for _ in range(ended)))
        assert watch.glance().left_s == (None if left_s is None else pytest.approx(left_s, rel=0.5))
        now[0] += 0.25


def test_a_terminal_shows_a_live_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.run.progress.LOOK_EVERY_S", 0.0)
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=120, color_system=None))
    with progress.live():
        progress.start_cell(1, 2, Cell(id=CELL, server="[one]", load="burst", repeat=1), None)
        monitor = Monitor(job(tmp_path, requests=4))
        monitor.started_s -= 1.0
        progress.start_load(monitor)
        monitor.missing_workers = "waiting for workers: 1 of 2 connected; missing: b"
        progress.update()
        time.sleep(0.5)
        append(tmp_path / "requests.jsonl", *(record(index) for index in range(3)))
        monitor.missing_workers = ""
        progress.update()
        time.sleep(0.5)
        monitor.failed, monitor.total, monitor.warmup = 1, 34, 30
        progress.update()
        progress.line("said meanwhile")
    shown = out.getvalue()
    assert "[1/2] [one] / burst, repeat 1: 1 s of waiting for workers: 1 of 2 connected; missing: b" in shown
    assert "[1/2] [one] / burst, repeat 1: 3 of 5 requests, 1 of them warm-up, 2 s" in shown  # brackets are no markup
    assert "TTFT p50" in shown and "200 ms" in shown
    assert "burst, repeat 1: 3 of 34 requests, 30 of them warm-up, 1 FAILED, 2 s" in shown
    assert "said meanwhile\n" in shown


def test_the_progress_of_a_warm_up_of_unknown_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.run.progress.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("harness.run.progress.PLAIN_EVERY_S", 0.0)
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200, color_system=None))
    progress.start_cell(2, 2, Cell(id=CELL, server="one", load="people@5", repeat=1), None)
    progress.start_load(monitor := Monitor(job(tmp_path, user="chat", duration_s=9.0)))
    monitor.started_s -= 2.0
    append(tmp_path / "requests.jsonl", *(record(index, phase="warmup") for index in (0, 1)))
    progress.update()
    append(tmp_path / "requests.jsonl", record(0))
    progress.update()
    before, after = out.getvalue().splitlines()[-2:]
    assert before == "[2/2] one / people@5, repeat 1: 2 requests, 2 s, warm-up until now: 2 requests"
    assert after.startswith("[2/2] one / people@5, repeat 1: 3 requests, 2 s, 8 s left, TTFT p50 100 ms")


def test_durations() -> None:
    texts = {0.4: "0 s", 89: "89 s", 90: "1 min 30 s", 200: "3 min 20 s", 7500: "2 h 5 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
