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

from harness.job import write_job
from harness.load.live_metrics import ALL
from harness.rundir.records import Request
from harness.scenario import Load, Trace, Warmup
from tests.command import until
from tests.faults import fault
from tests.load_runs import log_of, make_job, records_of, wait_for_records
from tests.web_ui import UI, ui


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_by_hand(engine: str, tmp_path: Path, processes: int) -> None:
    records = tmp_path / "records.jsonl"
    given = ["--output-tokens", "5", "--think", "0.05", "--slos", "ttft<=10s", "--records", str(records)]
    given += ["--processes", "2"] if processes > 1 else []
    with ui(tmp_path, engine, *given, locustfile="batch") as found:
        if processes > 1:
            until(lambda: found.state()["workers"] == 2)
        assert found.swarm(user_count=4, spawn_rate=4, batch_size=2)["success"]
        until(lambda: found.state()["whole"][ALL]["ended"] >= 20 and found.state()["now"][ALL]["req_s"])
        until(lambda: "BatchAgent" in found.state()["points"][-1]["classes"])
        running = found.state()
        assert (running["watched"], running["server"], running["gpus"], running["users"]) == (False, None, None, 4)
        assert running["slos"] == "ttft<=10s" and running["now"][ALL]["attainment"] == 1.0
        assert 0 <= running["in_flight"] <= 8
        assert until(lambda: found.state()["in_flight_of"].get("BatchAgent")) <= 8
        (shown,) = found.json("/stats/requests")["extended_stats"][0]["data"]
        assert 0 <= shown["inFlight"] == shown["in_flight"] <= 8
        assert list(running["whole"]) == [ALL, "BatchAgent"]
        assert len(running["points"]) >= 1
        found.stop()
        until(lambda: found.state()["state"] == "stopped" and found.state()["in_flight"] == 0)
        # Everything arrives, exactly: as many as Locust's own table has, and as there are records.
        counted, row = until(lambda: _agreed(found, records), 30)
        kept = [msgspec.json.decode(line, type=Request) for line in records.read_bytes().splitlines()]
        slowest = max(one.chunks_s[-1] for one in kept) * 1000
        assert (row["num_requests"], row["num_failures"], row["method"]) == (counted, 0, "POST")
        assert row["max_response_time"] == pytest.approx(slowest, abs=1)  # ms, from sending to the last token
        (ours,) = found.json("/stats/requests")["extended_stats"]
        assert (ours["key"], ours["data"][0]["ended"]) == ("llm", counted)
        lines = list(csv.DictReader(io.StringIO(found.ask("/llm/live.csv").text)))
        assert {line["user_class"] for line in lines} == {ALL, "BatchAgent"}
        assert len([line for line in lines if line["user_class"] == ALL]) == len(found.state()["points"])
        html = found.ask("/").text
        assert '<script src="./llm/tab.js" defer></script></body>' in html and '"extended_tabs"' in html
        for wrong in ("/llm/nothing.js", "/llm/..%2fpage.py", "/llm/%2e%2e/wire.py"):
            assert found.ask(wrong).status == 404
    assert "live numbers" not in log_of(tmp_path)


@pytest.mark.parametrize(
    ("harness_runs_it", "processes"), [pytest.param(False, 2, marks=pytest.mark.nightly), (True, 1)]
)
def test_stop_is_no_failure(engine: str, tmp_path: Path, harness_runs_it: bool, processes: int) -> None:
    """Locust's table and the tab count the same: what STOP cuts is a request, no failure, and has no response time."""
    records = tmp_path / "requests.jsonl"
    given = ["--output-tokens", "4000", "--output", "fixed", "--stop-timeout", "1"]
    given += ["--processes", "2"] if processes > 1 else []
    if harness_runs_it:
        write_job(make_job(tmp_path, Load(user="batch", users=4), Warmup(requests=2)), tmp_path / "job.json")
        given += ["--job", str(tmp_path / "job.json")]
    else:
        given += ["--records", str(records), "--warmup", "2"]
    with ui(tmp_path, engine, *given, locustfile="batch") as found:
        until(lambda: found.state()["workers"] == (2 if processes > 1 else None))
        assert found.swarm(user_count=4, spawn_rate=4)["success"]
        until(lambda: _counts_of_locust(found)[0] == 4)
        time.sleep(1)  # the first wave is over; the second one, of eight seconds, is under way
        until(lambda: found.state()["in_flight"] == 4)
        found.stop()
        until(lambda: found.state()["state"] == "stopped")
        until(lambda: len(records.read_bytes().splitlines()) == 8)
        until(lambda: _counts_of_the_tab(found) == _counts_of_locust(found) == (8, 0), 15)
        kept = [msgspec.json.decode(line, type=Request) for line in records.read_bytes().splitlines()]
        rows = found.json("/stats/requests")
        assert rows["errors"] == found.state()["failures"] == []
        slowest = max(one.chunks_s[-1] for one in kept if one.error is None) * 1000
        assert rows["stats"][0]["max_response_time"] == pytest.approx(slowest, abs=1)
    assert Counter(one.error for one in kept) == {None: 4, "unfinished": 4}
    # By hand each load process has a warm-up of its own.
    assert sum(one.phase == "warmup" for one in kept) == (2 if harness_runs_it else 2 * processes)


def _counts_of_locust(found: UI) -> tuple[int, int]:
    """Requests and failures in Locust's table, of all rows but the sum of them."""
    rows = [row for row in found.json("/stats/requests")["stats"] if row["name"] != "Aggregated"]
    return sum(row["num_requests"] for row in rows), sum(row["num_failures"] for row in rows)


def _counts_of_the_tab(found: UI) -> tuple[int, int]:
    (ours,) = found.json("/stats/requests")["extended_stats"]
    rows = [row for row in ours["data"] if row["name"] != ALL]
    return sum(row["ended"] for row in rows), sum(row["failed"] for row in rows)


def _agreed(found: UI, records: Path) -> tuple[int, dict[str, Any]] | None:
    """How many requests there were, once the page, Locust's table and the records say the same."""
    row: dict[str, Any] = found.json("/stats/requests")["stats"][0]
    counts = [found.state()["whole"][ALL]["ended"], row["num_requests"], len(records.read_bytes().splitlines())]
    return (counts[0], row) if len(set(counts)) == 1 else None


def given_up_with(found: UI, message: str) -> bool:
    return str(found.state()["given_up"]).startswith(message)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_values_that_no_scenario_may_have_start_nothing(engine: str, tmp_path: Path, processes: int) -> None:
    none = tmp_path / "none.jsonl"
    invalid = [
        ("slos", "fast", "--slos: SLOs such as 'ttft<=2s, tpot<=50ms' are expected, got 'fast'"),
        ("arrivals", "-3", "--arrivals: a number above 0 is expected, got -3"),
        ("output_tokens", "many", "--output-tokens: a whole number is expected, got 'many'"),
        ("output_tokens", "0", "--output-tokens: a whole number of at least 1 is expected, got 0"),
        ("endpoint", "zzz", "--endpoint: expected one of chat, completions, embeddings, got 'zzz'."),
        ("prompts", str(none), f"{none}: the prompts cannot be read (No such file or directory)."),
        ("host", "http://127.0.0.1:99999", "host: 'http://127.0.0.1:99999' has a port that is not a number."),
    ]
    with ui(tmp_path, engine, *(["--processes", "2"] if processes > 1 else []), locustfile="batch") as found:
        until(lambda: processes == 1 or found.state()["workers"] == 2)
        for field, value, message in invalid:
            answer = found.swarm(**{field: value})
            assert (answer["success"], answer["host"]) == (False, engine)
            assert answer["message"].startswith(message)
        assert (found.state()["whole"][ALL]["ended"], found.state()["state"]) == (0, "ready")
        # The values that were refused are forgotten.
        assert found.swarm()["success"] is True
        assert found.swarm(user_count=2)["success"] is True  # while it goes on
        until(lambda: found.state()["whole"][ALL]["ended"])
        for field, value, message in invalid[:3]:
            answer = found.swarm(**{"user_count": 3, field: value})
            assert answer["message"].startswith(message)
        until(lambda: (found.state()["state"], found.state()["users"]) == ("running", 2))
    assert "the test cannot start" not in log_of(tmp_path)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_server_without_a_model_starts_nothing_and_the_page_says_why(
    engine: str, tmp_path: Path, processes: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with ui(tmp_path, engine, *(["--processes", "2"] if processes > 1 else []), locustfile="batch") as found:
        until(lambda: processes == 1 or found.state()["workers"] == 2)
        for host, message in (
            (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}: no model could be read from /v1/models"),
            (f"{engine}/nowhere", f"{engine}/nowhere/v1/models answers HTTP 404"),
        ):
            assert found.swarm(host=host)["success"] is True
            until(partial(given_up_with, found, message))
            until(lambda: found.state()["state"] in ("stopped", "ready"))
        assert found.state()["whole"][ALL]["ended"] == 0
        assert found.swarm(host=engine)["success"] is True
        until(lambda: found.state()["whole"][ALL]["ended"])
        assert found.state()["given_up"] is None


def test_load_processes_are_back_when_their_last_request_has_ended(engine: str, tmp_path: Path) -> None:
    """And not only after the 30 s that it might have had, which each load has anew."""
    records = tmp_path / "r.jsonl"
    given = ["--output", "fixed", "--output-tokens", "1000", "--records", str(records), "--processes", "2"]
    with ui(tmp_path, engine, *given, locustfile="batch") as found:
        until(lambda: found.state()["workers"] == 2)
        for _ in range(2):
            assert found.swarm(user_count=2, spawn_rate=2)["success"] is True
            until(
                lambda: (found.state()["state"], found.state()["in_flight"]) == ("running", 2)
            )  # answers of two seconds
            found.stop()
            until(lambda: found.state()["workers"] == 2 and found.state()["state"] == "stopped", 25)
        until(lambda: _agreed_of(found, 2))
    kept = [msgspec.json.decode(line, type=Request) for line in records.read_bytes().splitlines()]
    assert len(kept) >= 4 and {one.error for one in kept} == {None}
    assert "Discarded report" not in log_of(tmp_path)


def _agreed_of(found: UI, minimum: int) -> bool:
    """Whether Locust's table and the page have the same number of requests, that many at least."""
    counts = {
        found.state()["whole"][ALL]["ended"],
        *(r["num_requests"] for r in found.json("/stats/requests")["stats"]),
    }
    return len(counts) == 1 and counts.pop() >= minimum


@fault("web", "a load process stands still (SIGSTOP)", seen="the page says which gives no sign of life")
def test_a_load_process_that_gives_no_sign_of_life_is_reported(engine: str, tmp_path: Path) -> None:
    with ui(
        tmp_path, engine, "--output-tokens", "5", "--think", "0.1", "--processes", "2", locustfile="batch"
    ) as found:
        until(lambda: found.state()["workers"] == 2)
        assert found.state()["missing"] == 0
        assert found.swarm(user_count=2, spawn_rate=2)["success"] is True
        until(lambda: found.state()["in_flight_of"] or found.state()["whole"][ALL]["ended"])
        of_locust = [p for p in psutil.process_iter(["cmdline"]) if str(found.port) in (p.info["cmdline"] or [])]
        one = next(filter(_is_worker, of_locust))
        one.suspend()
        until(lambda: (found.state()["missing"], found.state()["workers"]) == (1, 1))
        one.resume()
        until(lambda: (found.state()["missing"], found.state()["workers"]) == (0, 2))


def _is_worker(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and parent.cmdline() == process.cmdline()


def test_the_end_of_a_trace_is_reported_and_a_new_start_begins_it_anew(engine: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 300 * number, "input_length": 9, "output_length": 2} for number in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = Load(user="batch", users=4, trace=Trace(file="t.jsonl"))
    write_job(make_job(tmp_path, load, trace_file=str(trace)), tmp_path / "job.json")
    with ui(tmp_path, engine, "--job", str(tmp_path / "job.json"), locustfile="batch") as found:
        assert found.state()["trace_ended"] is False
        for times in (1, 2):
            assert found.swarm(user_count=4, spawn_rate=4)["success"] is True
            until(lambda: found.state()["trace_ended"])
            assert (found.state()["state"], found.state()["whole"][ALL]["ended"]) == ("running", 4)
            found.stop()
            until(lambda: found.state()["state"] == "stopped")
            wait_for_records(tmp_path, 4 * times)
            assert sorted(one.index for one in records_of(tmp_path)) == sorted(times * [0, 1, 2, 3])
