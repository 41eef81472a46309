"""What every user class has, under real Locust as the harness starts it, against the embedded engine."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from harness.process import free_port
from harness.scenario import Load, Warmup
from tests.load_runs import (
    ROOT,
    driven,
    end,
    ends_of,
    log_of,
    make_job,
    most_in_flight,
    records_of,
    start_job,
    wait_for_records,
)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_fixed_amount_of_work_is_done_exactly(tmp_path: Path, engine: str, processes: int) -> None:
    load = Load(user="batch", users=2, requests=23, batch_size=5, output_tokens=8, processes=processes)
    records = driven(tmp_path, engine, load, Warmup(requests=3), "--json-file", str(tmp_path / "stats"))
    assert [(r.phase, r.index) for r in records] == [("warmup", n) for n in range(-5, 0)] + [
        ("measured", n) for n in range(23)
    ]
    ends = ends_of(tmp_path, processes)
    assert sum(mark.sent or 0 for mark in ends) == 28
    assert {r.process for r in records} <= {mark.process for mark in ends}
    assert [r.error for r in records] == [None] * 28
    assert {(r.output_tokens, len(r.chunks_s), r.fixed_length, r.finish) for r in records} == {(8, 8, True, "length")}
    assert {(r.cell, r.load, r.user_class, r.clock) for r in records} == {("r1-a-b", "b", "BatchAgent", "kernel")}
    assert len({r.id for r in records}) == 28
    assert {r.user for r in records} <= {0, 1}
    assert most_in_flight(records) <= 10
    batches = Counter(r.batch for r in records)
    assert sorted(batches.values()) == [3, 5, 5, 5, 5, 5]
    (stats,) = json.loads((tmp_path / "stats.json").read_text())
    assert (stats["name"], stats["method"], stats["num_requests"], stats["num_failures"]) == ("b", "POST", 28, 0)
    slowest_s = max(r.chunks_s[-1] for r in records)
    assert stats["max_response_time"] == pytest.approx(slowest_s * 1000)
    assert stats["total_content_length"] == 28 * 8


@pytest.mark.parametrize(("processes", "signum"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_an_interrupted_run_loses_nothing(
    tmp_path: Path, slow_engine: str, processes: int, signum: signal.Signals
) -> None:
    load = Load(user="batch", users=4, requests=1000, batch_size=2, output_tokens=20, processes=processes)
    options = ["--processes", str(processes)] if processes > 1 else []
    options += ["--stop-timeout", "30", "--json-file", str(tmp_path / "stats")]
    child = start_job(tmp_path, slow_engine, make_job(tmp_path, load), *options)
    wait_for_records(tmp_path, 4)
    time.sleep(0.3)
    child.send_signal(signum)
    end(child)
    records = records_of(tmp_path)
    assert sum(mark.sent or 0 for mark in ends_of(tmp_path, processes)) == len(records)
    unfinished = [r for r in records if r.error == "unfinished"]
    assert 1 <= len(unfinished) <= 8
    assert [r.error for r in records if r.error != "unfinished"] == [None] * (len(records) - len(unfinished))
    assert len({r.index for r in records}) == len(records)
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert [row["num_failures"] for row in stats if row["num_failures"]] == []  # to be cut is no failure
    # Locust's own table lacks what several load processes sent in the last 3 s: at an interruption it does not wait.
    if processes == 1:
        assert [row["num_requests"] for row in stats] == [len(records)]
        assert [row["num_none_requests"] for row in stats] == [len(unfinished)]  # and no response time
    else:
        assert sum(row["num_requests"] for row in stats) <= len(records)


def test_so_many_are_always_in_flight(tmp_path: Path, engine: str) -> None:
    load = Load(user="batch", users=2, requests=60, in_flight=4, output_tokens=20)
    records = driven(tmp_path, engine, load, Warmup(requests=8))
    assert [(r.index, r.error, r.batch) for r in records] == [(index, None, None) for index in range(-8, 60)]
    assert most_in_flight(records) == 8
    # No user waits for a burst: each request but the first eight goes out when another has ended, and not in eights.
    assert len({round(r.sent_s, 3) for r in sorted(records, key=lambda r: r.sent_s)[8:]}) > 10


@pytest.mark.parametrize("in_flight", [None, 3])
def test_a_timed_load_stops_in_time_and_lets_answers_finish_or_cuts_them(
    tmp_path: Path, slow_engine: str, in_flight: int | None
) -> None:
    load = Load(user="batch", users=3, duration_s=1.0, output_tokens=12, drain_s=10, in_flight=in_flight)
    found = driven(tmp_path / "finish", slow_engine, load, Warmup(duration_s=0.5))
    records = sorted(found, key=lambda record: record.sent_s)
    assert [r.error for r in records] == [None] * len(records)
    phases = [r.phase for r in records]
    first = phases.index("measured")
    assert first and set(phases[first:]) == {"measured"}
    # All end, also those that were sent in the last moments.
    assert max(r.sent_s + r.ended_s for r in records) - records[first].sent_s > 1.0
    assert most_in_flight(records) == 3 * (in_flight or 1)
    load = Load(user="batch", users=2, duration_s=0.5, output_tokens=400, drain_s=0.3, in_flight=in_flight)
    cut = [(r.error, r.message, len(r.chunks_s) > 5) for r in driven(tmp_path / "cut", slow_engine, load)]
    assert cut == [("unfinished", "cut by the end of the run", True)] * 2 * (in_flight or 1)


def test_a_server_that_is_gone_fails_every_request_once(tmp_path: Path) -> None:
    load = Load(user="batch", users=4, requests=12, batch_size=2)
    records = driven(tmp_path, f"http://127.0.0.1:{free_port()}", load)
    assert [r.error for r in records] == ["connect"] * 12
    assert max(r.sent_s for r in records) - min(r.sent_s for r in records) > 0.4  # users pause, they do not spin


OWN = """
from locust import task
from harness.load.user import LLMUser

class Careless(LLMUser):
    @task
    def work(self) -> None:
        work = self.take()[0]
        if work.slot.index % 2:
            raise KeyError("a mistake in the locustfile")
        self.ask(work)
        if work.slot.index == 4:
            self.ask(work)
        self.think()
"""


def test_an_own_locustfile_with_mistakes(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    job = make_job(tmp_path, Load(user="own.py", users=1, requests=6, output_tokens=2))
    assert end(start_job(tmp_path, engine, job, "--exit-code-on-error", "0", locustfile=path)) == 1
    assert sorted(r.index for r in records_of(tmp_path)) == [0, 2, 4]
    assert {r.user_class for r in records_of(tmp_path)} == {"Careless"}
    assert "a mistake in the locustfile" in log_of(tmp_path)
    assert "ValueError: request 4 was sent already; take() another one" in log_of(tmp_path)


def test_importing_a_locustfile_is_quick() -> None:
    """What a load process costs before it does anything; most of it is Locust's own."""
    code = "import time; t = time.perf_counter(); import locust; l = time.perf_counter(); import harness.load.user; "
    code += "import sys; print(l - t, time.perf_counter() - l, 'docker' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    locust_s, ours_s, docker, numpy = done.stdout.split()
    print(f"locust {locust_s} s, ours {ours_s} s")
    assert float(ours_s) < float(locust_s)  # a ratio, since both take longer on a busy machine
    assert (docker, numpy) == ("False", "False")
