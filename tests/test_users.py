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
from harness.scenario import Arrivals, Load, Warmup
from tests.fake_server import answering, serving, whole
from tests.load_runs import (
    ROOT,
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
    job = make_job(tmp_path, load, Warmup(requests=3))
    options = ["--processes", str(processes)] if processes > 1 else []
    child = start_job(tmp_path, engine, job, "--json-file", str(tmp_path / "stats"), *options)
    assert end(child) == 0, log_of(tmp_path)
    records = records_of(tmp_path)
    assert sorted((r.phase, r.index) for r in records) == sorted(
        [("measured", index) for index in range(23)] + [("warmup", -index) for index in (1, 2, 3, 4, 5)]
    )
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


def test_a_timed_load_stops_asking_in_time_and_lets_answers_finish(tmp_path: Path, slow_engine: str) -> None:
    load = Load(user="batch", users=3, duration_s=1.0, output_tokens=12, drain_s=10)
    job = make_job(tmp_path, load, Warmup(duration_s=0.5))
    assert end(start_job(tmp_path, slow_engine, job)) == 0
    records = records_of(tmp_path)
    ends_of(tmp_path, 1)
    measured = sorted((r for r in records if r.phase == "measured"), key=lambda r: r.sent_s)
    warmup = [r for r in records if r.phase == "warmup"]
    assert warmup and max(r.sent_s for r in warmup) <= measured[0].sent_s
    assert [r.error for r in records] == [None] * len(records)


def test_what_does_not_finish_while_draining_is_recorded_as_unfinished(tmp_path: Path, slow_engine: str) -> None:
    load = Load(user="batch", users=2, duration_s=0.5, output_tokens=400, drain_s=0.3)
    assert end(start_job(tmp_path, slow_engine, make_job(tmp_path, load))) == 0
    records = records_of(tmp_path)
    ends_of(tmp_path, 1)
    assert [(r.error, r.message) for r in records] == [("unfinished", "cut by the end of the run")] * 2
    assert all(len(r.chunks_s) > 5 for r in records)


@pytest.mark.parametrize(("processes", "signum"), [(1, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGINT)])
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
    (stats,) = json.loads((tmp_path / "stats.json").read_text())
    assert stats["num_failures"] == 0  # to be cut is no failure
    # Locust's own table lacks what several load processes sent in the last 3 s: at an interruption it does not wait.
    assert stats["num_requests"] == len(records) if processes == 1 else stats["num_requests"] <= len(records)
    assert stats["num_none_requests"] == len(unfinished)  # and no response time


def test_a_server_that_is_gone_fails_every_request_once(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    job = make_job(tmp_path, Load(user="batch", users=4, requests=12, batch_size=2))
    assert end(start_job(tmp_path, url, job)) == 0
    records = records_of(tmp_path)
    assert [r.error for r in records] == ["connect"] * 12
    assert max(r.sent_s for r in records) - min(r.sent_s for r in records) > 0.4  # users pause, they do not spin
    ends_of(tmp_path, 1)


def test_a_server_that_turns_requests_away_is_not_flooded(tmp_path: Path) -> None:
    busy = answering(
        whole(b'{"error":{"message":"busy"}}', status=b"429 Too Many Requests", more=b"Retry-After: 1\r\n")
    )
    job = make_job(tmp_path, Load(user="batch", users=4, requests=12))
    with serving(busy) as url:
        assert end(start_job(tmp_path, url, job)) == 0
    records = records_of(tmp_path)
    assert [(r.error, r.status) for r in records] == [("rejected", 429)] * 12
    assert max(r.sent_s for r in records) - min(r.sent_s for r in records) > 0.9  # three each, and two pauses between


def test_a_schedule_is_kept_whoever_is_turned_away(tmp_path: Path) -> None:
    load = Load(user="batch", users=1, requests=6, arrivals=Arrivals(rate=20.0, spacing="even"))
    job = make_job(tmp_path, load, Warmup(requests=0))
    with serving(answering(whole(b'{"error":{"message":"busy"}}', status=b"429 Too Many Requests"))) as url:
        assert end(start_job(tmp_path, url, job)) == 0
    records = sorted(records_of(tmp_path), key=lambda r: r.index)
    assert [r.error for r in records] == ["rejected"] * 6
    scheduled = [r.sent_s + (r.scheduled_s or 0.0) for r in records]
    assert scheduled[5] - scheduled[0] == pytest.approx(0.25)
    # And not five pauses of half a second.
    assert records[5].sent_s - records[0].sent_s < 2.5


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


def test_a_locustfile_of_ones_own_and_its_mistakes(tmp_path: Path, engine: str) -> None:
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
