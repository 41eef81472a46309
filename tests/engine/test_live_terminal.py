"""What the terminal shows of a cell while it runs."""

import io
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.base.units import duration
from harness.records.records import Request
from harness.run.drive import Monitor
from harness.run.progress import Progress, describe_numbers
from harness.scenario import Load, Warmup
from harness.scenario.plan import Cell
from harness.workload.job import Job
from tests.support.load_runs import make_job
from tests.support.wording import Wording

CELL = "r1-one-burst"
MISSING = "waiting for workers: 1 of 2 connected; missing: b"


def job(folder: Path, user: str = "batch", **load: Any) -> Job:
    return make_job(folder, Load(user=user, users=2, **load), Warmup(requests=1), cell=CELL, load_name="burst")


def record(index: int, cell: str = CELL, **more: Any) -> bytes:
    given = {
        "id": str(index), "cell": cell, "load": "burst", "user_class": "BatchAgent", "index": index, "user": 0,
        "process": 1, "phase": "measured", "sent_s": 1.0, "ended_s": 1.0,
        "chunks_s": [0.1 * (index + 1) + 0.02 * chunk for chunk in range(11)], "output_tokens": 11,
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


def test_the_numbers_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    requests = tmp_path / "requests.jsonl"
    append(requests, record(0), record(1))  # of before
    monitor = Monitor(job(tmp_path, batch_size=2, requests=20))
    assert describe_numbers(monitor) == {}
    append(requests, record(-1, phase="warmup"), *(record(index) for index in range(4)), record(4, "r1-other-cell"))
    append(requests, record(5, error="timeout", chunks_s=[]), record(6)[:30])
    head = {"wall_s": time.time(), "cell": CELL}
    values = {"running": 3.0, "waiting": 2.0, "kv_usage": 0.25}
    append(tmp_path / "metrics.jsonl", msgspec.json.encode(head | {"values": values}) + b"\n")
    gpu = {"busy_percent": 50.0, "vram_used_bytes": 2**30, "gtt_used_bytes": 2**30, "package": True, "power_w": 749.6}
    append(tmp_path / "telemetry.jsonl", msgspec.json.encode(head | {"gpus": {"renderD128": gpu}}) + b"\n")
    now[0] = 104.0
    numbers = describe_numbers(monitor)
    assert (monitor.measured.ended, monitor.warmup_ended, monitor.failed) == (5, 1, 1)
    ttft_ms = [float(numbers[f"TTFT {name}"].split()[0]) for name in ("p50", "p95")]
    assert ttft_ms == pytest.approx([200, 400], rel=0.02)
    # The first was sent a second before it was seen to have ended.
    assert list(numbers.items())[4:] == [
        ("tok/s", "44"), ("req/s", "4"), ("running", "3"), ("waiting", "2"), ("KV", "25 %"),
        ("renderD128", "50 % 2.0 GiB 750 W"), ("failed", "1 timeout"),
    ]  # fmt: skip
    assert monitor.left_s() == 3.0
    monkeypatch.setattr(time, "time", lambda: 1e12)
    now[0] = 130.0
    assert list(describe_numbers(monitor))[4:] == ["tok/s", "req/s", "failed"], "what is old is not shown"


def test_unfinished_and_abandoned_requests_have_not_failed(tmp_path: Path) -> None:
    monitor = Monitor(job(tmp_path, batch_size=1, requests=20))
    errors = ("abandoned", "timeout", "unfinished")
    append(tmp_path / "requests.jsonl", *(record(i, error=error, chunks_s=[]) for i, error in enumerate(errors)))
    assert describe_numbers(monitor)["failed"] == "1 timeout"
    assert (monitor.measured.ended, monitor.failed) == (3, 1)


def test_rates_count_from_the_first_request_and_need_a_second(tmp_path: Path, now: list[float]) -> None:
    monitor = Monitor(job(tmp_path, batch_size=1, requests=20))
    # One after the other, 0.1 s each; the shortest time that one took is not how long it has been going on.
    append(tmp_path / "requests.jsonl", *(record(i, sent_s=1.0 + 0.1 * i, ended_s=0.1) for i in range(5)))
    assert monitor.numbers()["requests_per_s"] is None
    append(tmp_path / "requests.jsonl", *(record(i, sent_s=1.0 + 0.1 * i, ended_s=0.1) for i in range(5, 15)))
    now[0] = 101.0
    numbers = monitor.numbers()
    assert (numbers["requests_per_s"], numbers["output_tok_s"]) == (10.0, 110.0)


def test_the_time_left(tmp_path: Path, now: list[float]) -> None:
    monitor = Monitor(job(tmp_path, "chat", duration_s=60.0))
    append(tmp_path / "requests.jsonl", record(0))
    monitor.update()
    assert monitor.left_s() == 59.0
    now[0] = 1000.0
    assert monitor.left_s() == 0.0
    monitor = Monitor(job(tmp_path, batch_size=5, requests=60))
    append(tmp_path / "requests.jsonl", *(record(0) for _ in range(4)))
    monitor.update()
    assert monitor.left_s() is None, "the two users have not yet had all of their ten answers"
    append(tmp_path / "requests.jsonl", *(record(0) for _ in range(6)))
    monitor.update()
    assert monitor.left_s() == 5.0


@pytest.mark.parametrize("width", [50, 120])
def test_a_terminal_shows_live_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("harness.run.progress.LOOK_EVERY_S", 0.0)
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=width, color_system=None))
    with progress.live():
        progress.start_cell(1, 2, Cell(id=CELL, server="[one]", load="burst", repeat=1), None)
        monitor = Monitor(job(tmp_path, requests=4))
        monitor.started_s -= 1.0
        progress.start_load(monitor)
        monitor.missing_workers = MISSING
        progress.update()
        time.sleep(0.5)
        append(tmp_path / "requests.jsonl", *(record(index) for index in range(3)))
        monitor.missing_workers = ""
        progress.update()
        time.sleep(0.5)
        monitor.failed, monitor.total, monitor.warmup = 1, 34, 30
        progress.update()
        progress.line("meanwhile")
    shown = " ".join(out.getvalue().split())
    assert "TTFT p50" in shown and "meanwhile" in shown
    if width == 120:
        cell = r"\[1/2\] \[one\] / burst, repeat 1: "  # [one] is no markup
        assert re.search(rf"{cell}1 s of {re.escape(MISSING)}", shown)
        assert re.search(rf"{cell}3 of 5 \S+ \(1 [^)]+\), 2 s", shown)
        assert re.search(rf"{cell}3 of 34 \S+ \(30 [^)]+\), 1 FAILED, 2 s", shown)


def test_the_progress_of_a_warm_up_of_unknown_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
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
    wording(before)
    wording(after)


def test_a_log_has_a_line_for_each_cell_and_one_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float], wording: Wording
) -> None:
    monkeypatch.setattr("harness.run.progress.LOOK_EVERY_S", 0.0)
    out = io.StringIO()
    progress = Progress(Console(file=out, width=300, color_system=None))
    one = Cell(id=CELL, server="one", load="burst", repeat=1)
    progress.start_cell(1, 2, one, 75.0)
    progress.start_cell(1, 2, one, 75.0)  # shown again, as before the load of an offline job
    progress.stage("starting the server")
    progress.start_load(monitor := Monitor(job(tmp_path, requests=400)))
    append(tmp_path / "requests.jsonl", *(record(index, sent_s=0.1 * index) for index in range(50)))
    for _ in range(90):  # seconds
        now[0] += 1.0
        progress.update()
    monitor.failed = 3
    progress.start_cell(2, 2, replace(one, load="l" * 120), None)
    progress.start_load(monitor)
    now[0] += 61.0
    progress.update()
    head, minute, other, *_, last = out.getvalue().splitlines()
    assert "75" in head
    wording(head)
    assert str(head) in minute and "50" in minute
    wording(minute)
    assert other == "[2/2] one /" and ", 3 FAILED, 151 s" in last and " ..." in last
    assert all(len(line) < 100 for line in [head, minute, last]), "the words of a scenario's author are whole"


def test_long_lines_of_a_log_continue_below_without_broken_words() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=300, color_system=None))
    path = f"runs/{'r' * 150}"
    progress.line(f"  doubt: {'word ' * 30}{path}\nnext")
    first, second, whole, after = out.getvalue().splitlines()
    assert first.startswith("  doubt: word") and second.startswith("    word") and len(first) < 100
    assert (whole.strip(), after) == (path, "next")
    progress.line(f"{'word ' * 30}{path}", whole=True)
    assert out.getvalue().splitlines()[4:] == [f"{'word ' * 30}{path}"]


def test_durations() -> None:
    texts = {0.04: "0.04 s", 0.4: "0.4 s", 89: "89 s", 90: "1 min 30 s", 200: "3 min 20 s", 7500: "2 h 5 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
