"""A live load on real Locust, its web UI driven by its own routes, with one process and with several."""

import csv
import io
import json
import socket
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from harness.load.live_metrics import ALL
from harness.records.records import Request
from harness.scenario import Load, Trace, Warmup
from harness.workload.job import write_job
from tests.support.command import until
from tests.support.faults import fault
from tests.support.load_runs import log_of, make_job, records_of, wait_for_records
from tests.support.web_ui import UI, ui


def test_page_table_and_records_of_two_load_processes_agree(engine: str, tmp_path: Path) -> None:
    """And they are back when their last request has ended, not after the 30 s that it might have had."""
    path = tmp_path / "records.jsonl"
    options = ["--output-tokens", "5", "--think", "0.05", "--check", "ttft_p95 <= 10 s", "--records", str(path)]
    with ui(tmp_path, engine, *options, "--processes", "2", locustfile="batch") as live:
        until(lambda: live.state()["workers"] == 2)
        earlier = 0
        for _ in range(2):
            assert live.swarm(user_count=4, spawn_rate=4, batch_size=2)["success"]
            until(lambda: live.state()["whole"][ALL]["ended"] >= 20)
            until(lambda: (live.state()["users"], live.state()["now"][ALL]["attainment"]) == (4, 1.0))
            until(lambda: any("BatchAgent" in point["classes"] for point in live.state()["points"]))
            running = live.state()
            assert (running["watched"], running["server"], running["gpus"]) == (False, None, None)
            assert running["slos"] == "ttft<=10s"
            assert until(lambda: live.state()["in_flight_of"].get("BatchAgent")) <= 8
            assert list(running["whole"]) == [ALL, "BatchAgent"]
            live.stop()
            until(lambda: (live.state()["state"], live.state()["in_flight"]) == ("stopped", 0))
            until(lambda: live.state()["workers"] == 2)
            # Each start begins with zero.
            counted, row = until(lambda: agreed(live, len(path.read_bytes().splitlines()) - earlier))  # noqa: B023
            earlier += counted
        records = [msgspec.json.decode(line, type=Request) for line in path.read_bytes().splitlines()]
        slowest = max(record.chunks_s[-1] for record in records) * 1000
        assert (row["num_failures"], row["method"]) == (0, "POST")
        assert row["max_response_time"] <= slowest + 1  # ms, from sending to the last token
        (tab,) = live.json("/stats/requests")["extended_stats"]
        assert (tab["key"], tab["data"][0]["ended"], tab["data"][0]["inflight"]) == ("llm", counted, 0)
        lines = list(csv.DictReader(io.StringIO(live.ask("/llm/live.csv").text)))
        assert {line["user_class"] for line in lines} == {ALL, "BatchAgent"}
        assert len([line for line in lines if line["user_class"] == ALL]) == len(live.state()["points"])
        assert f'amd_llm_load_live_requests_total{{outcome="succeeded",user_class="BatchAgent"}} {counted}.0' in (
            live.ask("/metrics").text
        )
        assert live.ask("/stats/report").text.count('<section id="llm-metrics">') == 1
        html = live.ask("/").text
        assert '<script src="./llm/tab.js" defer></script></body>' in html and '"extended_tabs"' in html
        for wrong in ("/llm/nothing.js", "/llm/..%2fpage.py", "/llm/%2e%2e/wire.py"):
            assert live.ask(wrong).status == 404
    log = log_of(tmp_path)
    assert "live numbers" not in log and "Discarded report" not in log


def agreed(live: UI, records: int) -> tuple[int, dict[str, Any]] | None:
    """The number of requests and Locust's row, once the page, Locust's table and the records have the same."""
    row: dict[str, Any] = live.json("/stats/requests")["stats"][0]
    return (records, row) if live.state()["whole"][ALL]["ended"] == row["num_requests"] == records else None


def test_stop_is_no_failure(engine: str, tmp_path: Path) -> None:
    """Locust's table and the tab count the same: what STOP cuts is a request, no failure, and has no response time."""
    write_job(make_job(tmp_path, Load(user="batch", users=4), Warmup(requests=2)), tmp_path / "job.json")
    options = ["--output-tokens", "4000", "--output", "fixed", "--stop-timeout", "1"]
    with ui(tmp_path, engine, *options, "--job", str(tmp_path / "job.json"), locustfile="batch") as live:
        assert live.swarm(user_count=4, spawn_rate=4)["success"]
        until(lambda: counts_of_locust(live)[0] == 4)
        time.sleep(1)  # the first wave is over; the second one, of eight seconds, is under way
        until(lambda: live.state()["in_flight"] == 4)
        live.stop()
        until(lambda: live.state()["state"] == "stopped")
        wait_for_records(tmp_path, 8)
        until(lambda: counts_of_the_tab(live) == counts_of_locust(live) == (8, 0))
        records = records_of(tmp_path)
        rows = live.json("/stats/requests")
        assert rows["errors"] == live.state()["failures"] == []
        slowest = max(record.chunks_s[-1] for record in records if record.error is None) * 1000
        assert rows["stats"][0]["max_response_time"] == pytest.approx(slowest, abs=1)
    assert Counter(record.error for record in records) == {None: 4, "unfinished": 4}
    assert sum(record.phase == "warmup" for record in records) == 2


def counts_of_locust(live: UI) -> tuple[int, int]:
    """Requests and failures in Locust's table, of all rows but the sum of them."""
    rows = [row for row in live.json("/stats/requests")["stats"] if row["name"] != "Aggregated"]
    return sum(row["num_requests"] for row in rows), sum(row["num_failures"] for row in rows)


def counts_of_the_tab(live: UI) -> tuple[int, int]:
    (tab,) = live.json("/stats/requests")["extended_stats"]
    rows = [row for row in tab["data"] if row["name"] != ALL]
    return sum(row["ended"] for row in rows), sum(row["failed"] for row in rows)


def test_invalid_values_and_a_server_without_a_model_start_nothing(engine: str, tmp_path: Path) -> None:
    none = tmp_path / "none.jsonl"
    invalid = [
        ("check", "fast", "--check: 'fast': 'fast' is not a metric; "),
        ("arrivals", "-3", "--arrivals: a number above 0 is expected, got -3"),
        ("prompts", str(none), f"{none}: the prompts cannot be read (No such file or directory)."),
        ("host", "http://127.0.0.1:99999", "host: 'http://127.0.0.1:99999' has a port that is not a number."),
    ]
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with ui(tmp_path, engine, "--processes", "2", locustfile="batch") as live:
        until(lambda: live.state()["workers"] == 2)
        for field, value, message in invalid:
            answer = live.swarm(**{field: value})
            assert (answer["success"], answer["host"]) == (False, engine)
            assert answer["message"].startswith(message)
        for host, message in (
            (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}: no model could be read from /v1/models"),
            (f"{engine}/nowhere", f"{engine}/nowhere/v1/models answers HTTP 404"),
        ):
            assert live.swarm(host=host)["success"] is True
            until(partial(is_given_up, live, message))
            until(lambda: live.state()["state"] in ("stopped", "ready"))
        assert live.state()["whole"][ALL]["ended"] == 0
        # The values that were refused are forgotten, also by a load that runs.
        assert live.swarm(user_count=2, host=engine)["success"] is True
        until(lambda: live.state()["whole"][ALL]["ended"])
        assert live.state()["given_up"] is None
        for field, value, message in invalid[:2]:
            assert live.swarm(**{"user_count": 3, field: value})["message"].startswith(message)
        until(lambda: (live.state()["state"], live.state()["users"]) == ("running", 2))


def is_given_up(live: UI, message: str) -> bool:
    return str(live.state()["given_up"]).startswith(message)


@fault("web", "a load process is stopped (SIGSTOP)", seen="the page says which gives no sign of life")
def test_a_load_process_that_gives_no_sign_of_life_is_reported(engine: str, tmp_path: Path) -> None:
    options = ["--output-tokens", "5", "--think", "0.1", "--processes", "2"]
    with ui(tmp_path, engine, *options, locustfile="batch") as live:
        until(lambda: live.state()["workers"] == 2)
        assert live.swarm(user_count=2, spawn_rate=2)["success"] is True
        until(lambda: live.state()["in_flight_of"] or live.state()["whole"][ALL]["ended"])
        of_locust = [p for p in psutil.process_iter(["cmdline"]) if str(live.port) in (p.info["cmdline"] or [])]
        worker = next(filter(is_load_process, of_locust))
        worker.suspend()
        until(lambda: (live.state()["missing"], live.state()["workers"]) == (1, 1))
        worker.resume()
        until(lambda: (live.state()["missing"], live.state()["workers"]) == (0, 2))


def is_load_process(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and parent.cmdline() == process.cmdline()


def test_a_new_start_begins_a_trace_anew(engine: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 300 * number, "input_length": 9, "output_length": 2} for number in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = Load(user="batch", users=4, trace=Trace(file="t.jsonl"))
    write_job(make_job(tmp_path, load, trace_file=str(trace)), tmp_path / "job.json")
    with ui(tmp_path, engine, "--job", str(tmp_path / "job.json"), locustfile="batch") as live:
        for times in (1, 2):
            assert live.swarm(user_count=4, spawn_rate=4)["success"] is True
            until(lambda: live.state()["whole"][ALL]["ended"] == 4)
            live.stop()
            until(lambda: live.state()["state"] == "stopped")
            wait_for_records(tmp_path, 4 * times)
            assert sorted(record.index for record in records_of(tmp_path)) == sorted(times * [0, 1, 2, 3])
