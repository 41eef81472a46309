"""A live load on real Locust, its web UI driven by its own routes, with one process and with several."""

import csv
import io
import json
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from harness.job import write_job
from harness.load.live_metrics import ALL
from harness.paths import ROOT
from harness.process import free_port
from harness.rundir.records import Request
from harness.scenario import Load, Trace, Warmup
from tests import prefork
from tests.command import harness, write
from tests.faults import fault
from tests.load_runs import make_job


def until(found: Callable[[], Any], within_s: float = 90) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def get(url: str, data: bytes | None = None) -> bytes:
    with urllib.request.urlopen(url, data, timeout=20) as answer:
        return bytes(answer.read())


def page(url: str) -> dict[str, Any]:
    try:
        return dict(json.loads(get(f"{url}/llm/live.json")))
    except OSError:
        return {}


@contextmanager
def locust(engine: str, *arguments: str, log: Path) -> Iterator[str]:
    """Stock Locust with a locustfile that ships, by hand; the address of its web UI."""
    port = free_port()
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "locustfiles/batch.py"), "--host", engine]
    command += ["--web-host", "127.0.0.1", "--web-port", str(port), *arguments]
    if "--processes" in arguments:
        masters = str(free_port())
        command += ["--master-bind-host", "127.0.0.1", "--master-bind-port", masters, "--master-port", masters]
    with log.open("wb") as out:
        child = prefork.Popen(command, stdout=out, stderr=out)
    try:
        until(lambda: page(f"http://127.0.0.1:{port}"))
        yield f"http://127.0.0.1:{port}"
    finally:
        workers = psutil.Process(child.pid).children()
        child.terminate()
        child.wait(30)
        for worker in psutil.wait_procs(workers, 5)[1]:
            worker.kill()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_by_hand(engine: str, tmp_path: Path, processes: int) -> None:
    log = tmp_path / "log"
    records = tmp_path / "records.jsonl"
    given = ["--output-tokens", "5", "--think", "0.05", "--slos", "ttft<=10s", "--records", str(records)]
    given += ["--processes", "2"] if processes > 1 else []
    with locust(engine, *given, log=log) as url:
        if processes > 1:
            until(lambda: page(url)["workers"] == 2)
        form = urllib.parse.urlencode({"user_count": 4, "spawn_rate": 4, "batch_size": 2}).encode()
        urllib.request.urlopen(f"{url}/swarm", data=form, timeout=10).close()
        until(lambda: page(url)["whole"][ALL]["ended"] >= 20 and page(url)["now"][ALL]["req_s"])
        until(lambda: "BatchAgent" in page(url)["points"][-1]["classes"])
        running = page(url)
        assert (running["watched"], running["server"], running["gpus"], running["users"]) == (False, None, None, 4)
        assert running["slos"] == "ttft<=10s" and running["now"][ALL]["attainment"] == 1.0
        assert 0 <= running["in_flight"] <= 8
        assert until(lambda: page(url)["in_flight_of"].get("BatchAgent")) <= 8
        (shown,) = json.loads(get(f"{url}/stats/requests"))["extended_stats"][0]["data"]
        assert 0 <= shown["inFlight"] == shown["in_flight"] <= 8
        assert list(running["whole"]) == [ALL, "BatchAgent"]
        assert len(running["points"]) >= 1
        urllib.request.urlopen(f"{url}/stop", data=b"", timeout=30).close()
        until(lambda: page(url)["state"] == "stopped" and page(url)["in_flight"] == 0)
        # Everything arrives, exactly: as many as Locust's own table has, and as there are records.
        counted, row = until(lambda: _agreed(url, records), 30)
        kept = [msgspec.json.decode(line, type=Request) for line in records.read_bytes().splitlines()]
        slowest = max(one.chunks_s[-1] for one in kept) * 1000
        assert (row["num_requests"], row["num_failures"], row["method"]) == (counted, 0, "POST")
        assert row["max_response_time"] == pytest.approx(slowest, abs=1)  # ms, from sending to the last token
        (ours,) = json.loads(get(f"{url}/stats/requests"))["extended_stats"]
        assert (ours["key"], ours["data"][0]["ended"]) == ("llm", counted)
        lines = list(csv.DictReader(io.StringIO(get(f"{url}/llm/live.csv").decode())))
        assert {line["user_class"] for line in lines} == {ALL, "BatchAgent"}
        assert len([line for line in lines if line["user_class"] == ALL]) == len(page(url)["points"])
        html = get(f"{url}/").decode()
        assert '<script src="./llm/tab.js" defer></script></body>' in html and '"extended_tabs"' in html
        for wrong in ("/llm/nothing.js", "/llm/..%2fpage.py", "/llm/%2e%2e/wire.py"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(f"{url}{wrong}")
            assert caught.value.code == 404
            caught.value.close()
    said = log.read_text()
    assert "Traceback" not in said and "live numbers" not in said


@pytest.mark.parametrize(
    ("harness_runs_it", "processes"), [pytest.param(False, 2, marks=pytest.mark.nightly), (True, 1)]
)
def test_stop_is_no_failure(engine: str, tmp_path: Path, harness_runs_it: bool, processes: int) -> None:
    """Locust's table and the tab count the same: what STOP cuts is a request, no failure, and has no response time."""
    records = tmp_path / "requests.jsonl"
    tokens = "2000" if processes == 1 else "4000"  # of four and eight seconds: workers report each three
    given = ["--output-tokens", tokens, "--output", "fixed", "--stop-timeout", "1"]
    given += ["--processes", "2"] if processes > 1 else []
    if harness_runs_it:
        write_job(make_job(tmp_path, Load(user="batch", users=4), Warmup(requests=2)), tmp_path / "job.json")
        given += ["--job", str(tmp_path / "job.json")]
    else:
        given += ["--records", str(records), "--warmup", "2"]
    with locust(engine, *given, log=tmp_path / "log") as url:
        until(lambda: page(url)["workers"] == (2 if processes > 1 else None))
        assert swarm(url, user_count=4, spawn_rate=4)["success"]
        until(lambda: _counts_of_locust(url)[0] >= 4 and page(url)["in_flight"] == 4)
        get(f"{url}/stop", b"")
        until(lambda: page(url)["state"] == "stopped")
        until(lambda: len(records.read_bytes().splitlines()) == 8)
        until(lambda: _counts_of_the_tab(url) == _counts_of_locust(url) == (8, 0), 15)
        kept = [msgspec.json.decode(line, type=Request) for line in records.read_bytes().splitlines()]
        rows = json.loads(get(f"{url}/stats/requests"))
        assert rows["errors"] == page(url)["failures"] == []
        slowest = max(one.chunks_s[-1] for one in kept if one.error is None) * 1000
        assert rows["stats"][0]["max_response_time"] == pytest.approx(slowest, abs=1)
    assert Counter(one.error for one in kept) == {None: 4, "unfinished": 4}
    # By hand each load process has a warm-up of its own.
    assert sum(one.phase == "warmup" for one in kept) == (2 if harness_runs_it else 2 * processes)
    assert "Traceback" not in (tmp_path / "log").read_text()


def _counts_of_locust(url: str) -> tuple[int, int]:
    """Requests and failures in Locust's table, of all rows but the sum of them."""
    rows = [row for row in json.loads(get(f"{url}/stats/requests"))["stats"] if row["name"] != "Aggregated"]
    return sum(row["num_requests"] for row in rows), sum(row["num_failures"] for row in rows)


def _counts_of_the_tab(url: str) -> tuple[int, int]:
    (ours,) = json.loads(get(f"{url}/stats/requests"))["extended_stats"]
    rows = [row for row in ours["data"] if row["name"] != ALL]
    return sum(row["ended"] for row in rows), sum(row["failed"] for row in rows)


def _agreed(url: str, records: Path) -> tuple[int, dict[str, Any]] | None:
    """How many requests there were, once the page, Locust's table and the records say the same."""
    row: dict[str, Any] = json.loads(get(f"{url}/stats/requests"))["stats"][0]
    counts = [page(url)["whole"][ALL]["ended"], row["num_requests"], len(records.read_bytes().splitlines())]
    return (counts[0], row) if len(set(counts)) == 1 else None


def given_up_with(url: str, message: str) -> bool:
    return str(page(url)["given_up"]).startswith(message)


def swarm(url: str, **form: object) -> dict[str, Any]:
    data = urllib.parse.urlencode({"user_count": 1, "spawn_rate": 1, **form}).encode()
    try:
        with urllib.request.urlopen(f"{url}/swarm", data=data, timeout=30) as answer:
            found = dict(json.loads(answer.read()))
            assert found["success"] is True
            return found
    except urllib.error.HTTPError as error:  # what is refused is a 4xx
        with error:
            assert error.code == 400
            return dict(json.loads(error.read()))


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_values_that_no_scenario_may_have_start_nothing(engine: str, tmp_path: Path, processes: int) -> None:
    log, none = tmp_path / "log", tmp_path / "none.jsonl"
    invalid = [
        ("slos", "fast", "--slos: cannot parse SLOs: 'fast'. "),
        ("arrivals", "-3", "--arrivals: '-3' is not a rate. "),
        ("output_tokens", "many", "--output-tokens: a whole number is expected, got 'many'"),
        ("output_tokens", "0", "--output-tokens: a whole number of at least 1 is expected, got 0"),
        ("turns", "0", "--turns: a whole number of at least 1 is expected, got 0."),
        ("timeout", "0", "--timeout: a number above 0 is expected, got 0.0."),
        ("endpoint", "zzz", "--endpoint: expected one of chat, completions, embeddings, got 'zzz'."),
        ("steps", "a few", "--steps: a whole number is expected, got 'a few'."),
        ("timeout", "long", "--timeout: a number is expected, got 'long'."),
        ("prompts", str(none), f"{none}: the prompts cannot be read (No such file or directory)."),
        ("host", "http://127.0.0.1:99999", "host: 'http://127.0.0.1:99999' has a port that is not a number."),
    ]
    with locust(engine, *(["--processes", "2"] if processes > 1 else []), log=log) as url:
        until(lambda: processes == 1 or page(url)["workers"] == 2)
        for field, value, message in invalid:
            answer = swarm(url, **{field: value})
            assert (answer["success"], answer["host"]) == (False, engine)
            assert answer["message"].startswith(message)
        assert (page(url)["whole"][ALL]["ended"], page(url)["state"]) == (0, "ready")
        # The values that were refused are forgotten.
        assert swarm(url)["success"] is True
        assert swarm(url, user_count=2)["success"] is True  # while it goes on
        until(lambda: page(url)["whole"][ALL]["ended"])
        for field, value, message in invalid[:3]:
            answer = swarm(url, **{"user_count": 3, field: value})
            assert answer["message"].startswith(message)
        until(lambda: (page(url)["state"], page(url)["users"]) == ("running", 2))
    assert "Traceback" not in log.read_text() and "the test cannot start" not in log.read_text()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_server_without_a_model_starts_nothing_and_the_page_says_why(
    engine: str, tmp_path: Path, processes: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with locust(engine, *(["--processes", "2"] if processes > 1 else []), log=tmp_path / "log") as url:
        until(lambda: processes == 1 or page(url)["workers"] == 2)
        for host, message in (
            (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}: no model could be read from /v1/models"),
            (f"{engine}/nowhere", f"{engine}/nowhere/v1/models answers HTTP 404"),
        ):
            assert swarm(url, host=host)["success"] is True
            until(partial(given_up_with, url, message))
            until(lambda: page(url)["state"] in ("stopped", "ready"))
        assert page(url)["whole"][ALL]["ended"] == 0
        assert swarm(url, host=engine)["success"] is True
        until(lambda: page(url)["whole"][ALL]["ended"])
        assert page(url)["given_up"] is None
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_load_processes_are_back_when_their_last_request_has_ended(engine: str, tmp_path: Path) -> None:
    """And not only after the 30 s that it might have had, which each load has anew."""
    records, log = tmp_path / "r.jsonl", tmp_path / "log"
    given = ["--output", "fixed", "--output-tokens", "1000", "--records", str(records), "--processes", "2"]
    with locust(engine, *given, log=log) as url:
        until(lambda: page(url)["workers"] == 2)
        for _ in range(2):
            assert swarm(url, user_count=2, spawn_rate=2)["success"] is True
            until(lambda: (page(url)["state"], page(url)["in_flight"]) == ("running", 2))  # answers of two seconds
            get(f"{url}/stop", b"")
            until(lambda: page(url)["workers"] == 2 and page(url)["state"] == "stopped", 25)
        until(lambda: _agreed_of(url, 2))
    kept = [msgspec.json.decode(line, type=Request) for line in records.read_bytes().splitlines()]
    assert len(kept) >= 4 and {one.error for one in kept} == {None}
    assert "Discarded report" not in log.read_text()


def _agreed_of(url: str, minimum: int) -> bool:
    """Whether Locust's table and the page have the same number of requests, that many at least."""
    counts = {
        page(url)["whole"][ALL]["ended"],
        *(r["num_requests"] for r in json.loads(get(f"{url}/stats/requests"))["stats"]),
    }
    return len(counts) == 1 and counts.pop() >= minimum


@fault("web", "a load process stands still (SIGSTOP)", seen="the page says which gives no sign of life")
def test_a_load_process_that_gives_no_sign_of_life_is_reported(engine: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with locust(engine, "--output-tokens", "5", "--think", "0.1", "--processes", "2", log=log) as url:
        until(lambda: page(url)["workers"] == 2)
        assert page(url)["missing"] == 0
        assert swarm(url, user_count=2, spawn_rate=2)["success"] is True
        until(lambda: page(url)["in_flight_of"] or page(url)["whole"][ALL]["ended"])
        (one, *_) = [
            p
            for p in psutil.process_iter(["cmdline"])
            if url.rpartition(":")[2] in (p.info["cmdline"] or []) and _is_worker(p)
        ]
        one.suspend()
        until(lambda: (page(url)["missing"], page(url)["workers"]) == (1, 1))
        one.resume()
        until(lambda: (page(url)["missing"], page(url)["workers"]) == (0, 2))


def _is_worker(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and parent.cmdline() == process.cmdline()


def test_the_end_of_a_trace_is_reported_and_a_new_start_begins_it_anew(engine: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 300 * number, "input_length": 9, "output_length": 2} for number in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = Load(user="batch", users=4, trace=Trace(file="t.jsonl"))
    write_job(make_job(tmp_path, load, trace_file=str(trace)), tmp_path / "job.json")
    with locust(engine, "--job", str(tmp_path / "job.json"), log=tmp_path / "log") as url:
        assert page(url)["trace_ended"] is False
        for times in (1, 2):
            assert swarm(url, user_count=4, spawn_rate=4)["success"] is True
            until(lambda: page(url)["trace_ended"])
            assert (page(url)["state"], page(url)["whole"][ALL]["ended"]) == ("running", 4)
            urllib.request.urlopen(f"{url}/stop", data=b"", timeout=30).close()
            until(lambda: page(url)["state"] == "stopped")
            lines = (tmp_path / "requests.jsonl").read_text().splitlines()
            assert sorted(json.loads(line)["index"] for line in lines) == sorted(times * [0, 1, 2, 3])
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_line_now_and_then_where_there_is_no_terminal(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        loads={"slow": {"user": "batch", "batch_size": 2, "requests": 10, "output_tokens": 40, "think_s": [1.0, 1.0]}},
        servers={"one": {"template": "simulated", "container": False}},
    )
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path, env={"COLUMNS": "80"})
    told = [line for line in done.out.splitlines() if " requests, " in line and "TTFT" in line]
    assert told, done.out
    assert all(line.startswith("[1/1] one / slow, repeat 1 (SIMULATED): ") for line in told), told
    for word in ("TPOT ", " tok/s", "running ", "waiting ", "KV "):
        assert word in told[-1]
