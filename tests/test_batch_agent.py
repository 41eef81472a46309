"""Batch agents under real Locust, against the embedded engine."""

from pathlib import Path

from harness.scenario import Load, Warmup
from harness.simulated import spawned
from tests.load_runs import end, ends_of, log_of, make_job, most_in_flight, records_of, start_job


def test_one_at_a_time_is_a_batch_of_one(tmp_path: Path, engine: str) -> None:
    job = make_job(tmp_path, Load(user="batch", requests=6, output_tokens=3), Warmup(duration_s=1.0))
    assert end(start_job(tmp_path, engine, job)) == 0
    records = sorted((r for r in records_of(tmp_path) if r.index >= 0), key=lambda r: r.sent_s)
    assert [r.index for r in records] == list(range(6))
    assert most_in_flight(records) == 1
    assert {r.connect_s for r in records} == {None}  # one connection, kept since the warm-up


def test_so_many_are_always_in_flight(tmp_path: Path, engine: str) -> None:
    load = Load(user="batch", users=2, requests=60, in_flight=4, output_tokens=20)
    job = make_job(tmp_path, load, Warmup(requests=8))
    assert end(start_job(tmp_path, engine, job)) == 0, log_of(tmp_path)
    records = sorted(records_of(tmp_path), key=lambda r: r.sent_s)
    ends_of(tmp_path, 1)
    assert sorted(r.index for r in records) == list(range(-8, 60))
    assert [r.error for r in records] == [None] * 68
    assert most_in_flight(records) == 8
    # Nobody waits for a burst: each request but the first eight goes out when another has ended, and not in eights.
    assert len({round(r.sent_s, 3) for r in records[8:]}) > 10
    assert {r.batch for r in records} == {None}


def test_what_is_under_way_at_the_end_of_a_timed_load_finishes(tmp_path: Path) -> None:
    load = Load(user="batch", users=1, duration_s=1.0, in_flight=3, output_tokens=12)
    with spawned("--preset", "instant", "--served-model-name", "m", "--step-base-s", "0.05") as server:
        assert end(start_job(tmp_path, server.url, make_job(tmp_path, load))) == 0, log_of(tmp_path)
    records = records_of(tmp_path)
    ends_of(tmp_path, 1)
    assert [r.error for r in records] == [None] * len(records)
    begin = min(r.sent_s for r in records)
    # All end, also those that were sent in the last moments.
    assert max(r.sent_s + r.ended_s for r in records) - begin > 1.0
    assert most_in_flight(records) == 3


def test_what_is_under_way_is_recorded_when_the_run_is_cut(tmp_path: Path) -> None:
    load = Load(user="batch", users=1, duration_s=0.5, in_flight=3, output_tokens=400, drain_s=0.3)
    with spawned("--preset", "instant", "--served-model-name", "m", "--step-base-s", "0.05") as server:
        assert end(start_job(tmp_path, server.url, make_job(tmp_path, load))) == 0, log_of(tmp_path)
    ends_of(tmp_path, 1)
    assert [r.error for r in records_of(tmp_path)] == ["unfinished"] * 3
