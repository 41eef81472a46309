"""The user classes under real Locust, as the harness starts it and by hand, against the embedded engine."""

import http.server
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness.job import Job, write_job
from harness.records import ProcessMark, Request, read_marks, read_requests
from harness.scenario import Load, Prompts, Warmup
from harness.simulated.spawn import spawned

ROOT = Path(__file__).parents[1]
RUN_S = 60.0


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """2 ms per token, whatever the load."""
    with spawned("--preset", "instant", "--served-model-name", "m") as server:
        yield server.url


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[str]:
    """A token each 50 ms."""
    with spawned("--preset", "instant", "--served-model-name", "m", "--step-base-s", "0.05") as server:
        yield server.url


def make_job(folder: Path, load: Load, warmup: Warmup | None = None, **more: object) -> Job:
    job = Job(
        cell="r1-a-b",
        load_name="b",
        load=load,
        model="m",
        prompts=Prompts(tokens=20),
        seed=1,
        salt="one two three four",
        warmup=warmup or Warmup(requests=0),
        requests_path=str(folder / "requests.jsonl"),
        processes_path=str(folder / "processes.jsonl"),
        tickets_path=str(folder / "tickets"),
    )
    return msgspec.structs.replace(job, **more)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def start(folder: Path, url: str, locustfile: Path | str, *options: str) -> "subprocess.Popen[str]":
    """Stock Locust; its log goes to FOLDER/locust.log."""
    path = ROOT / "locustfiles" / f"{locustfile}.py" if isinstance(locustfile, str) else locustfile
    command = [sys.executable, "-m", "locust", "-f", str(path), "--host", url, "--only-summary", *options]
    if "--processes" in options:
        port = str(free_port())
        command += ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "locust.log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, text=True)


def start_job(
    folder: Path, url: str, job: Job, *options: str, locustfile: Path | None = None
) -> "subprocess.Popen[str]":
    write_job(job, folder / "job.json")
    users = ["--headless", "--users", str(job.load.users), "--spawn-rate", "100"]
    return start(folder, url, locustfile or job.load.user, *users, "--job", str(folder / "job.json"), *options)


def end(process: "subprocess.Popen[str]") -> int:
    try:
        return process.wait(RUN_S)
    finally:
        process.kill()
        process.wait()


def log_of(folder: Path) -> str:
    return (folder / "locust.log").read_text()


def records_of(folder: Path) -> list[Request]:
    damaged: list[int] = []
    records = list(read_requests(folder / "requests.jsonl", damaged))
    assert damaged == []
    return records


def ends_of(folder: Path, processes: int) -> list[ProcessMark]:
    """The end marks; each process must have said hello and goodbye, and recorded all that it sent."""
    marks = read_marks(folder / "processes.jsonl")
    starts, ends = ([mark for mark in marks if mark.event == event] for event in ("start", "end"))
    assert len(starts) == len(ends) == processes
    assert {mark.process for mark in starts} == {mark.process for mark in ends}
    assert [mark.sent for mark in ends] == [mark.recorded for mark in ends]
    return ends


def wait_for_records(folder: Path, number: int) -> None:
    deadline = time.monotonic() + RUN_S
    while not (folder / "requests.jsonl").exists() or len(records_of(folder)) < number:
        assert time.monotonic() < deadline, log_of(folder)
        time.sleep(0.05)


def most_in_flight(records: list[Request]) -> int:
    events = [(r.sent_s, 1) for r in records] + [(r.sent_s + r.ended_s, -1) for r in records]
    level = most = 0
    for _, step in sorted(events):
        level += step
        most = max(most, level)
    return most


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


def test_one_at_a_time_is_a_batch_of_one(tmp_path: Path, engine: str) -> None:
    job = make_job(tmp_path, Load(user="batch", requests=6, output_tokens=3))
    assert end(start_job(tmp_path, engine, job)) == 0
    records = sorted(records_of(tmp_path), key=lambda r: r.sent_s)
    assert [r.index for r in records] == list(range(6))
    assert most_in_flight(records) == 1
    assert [r.connect_s is None for r in records] == [False] + [True] * 5  # one connection, kept


def test_a_conversation_grows_by_what_was_said(tmp_path: Path, engine: str) -> None:
    load = Load(user="chat", users=2, requests=12, turns=3, output_tokens=6, think_s=[0.0, 0.02])
    job = make_job(tmp_path, load, prompts=Prompts(tokens=20, system_tokens=10))
    assert end(start_job(tmp_path, engine, job)) == 0
    records = records_of(tmp_path)
    assert sorted(r.index for r in records) == list(range(12))
    talks: dict[int | None, list[Request]] = {}
    for record in sorted(records, key=lambda r: r.sent_s):
        talks.setdefault(record.conversation, []).append(record)
    assert sorted(talks) == [0, 3, 6, 9]  # type: ignore[type-var]
    for number, talk in talks.items():
        assert talk[0].index == number
        assert [r.turn for r in talk] == list(range(1, len(talk) + 1))
        assert len({r.user for r in talk}) == 1
        lengths = [r.prompt_tokens or 0 for r in talk]
        assert [b - a >= 24 for a, b in zip(lengths, lengths[1:], strict=False)] == [True] * (len(talk) - 1)


Talks = dict[int | None, list[tuple[int, int | None]]]


def talks_of(records: list[Request]) -> Talks:
    """Of each conversation the index and the turn of its requests, in the order of sending."""
    talks: Talks = {}
    for record in sorted(records, key=lambda r: r.sent_s):
        talks.setdefault(record.conversation, []).append((record.index, record.turn))
    return talks


def planned_talks(requests: int, turns: int) -> Talks:
    spans = [range(first, min(first + turns, requests)) for first in range(0, requests, turns)]
    return {span[0]: [(index, turn) for turn, index in enumerate(span, start=1)] for span in spans}


@pytest.mark.parametrize("think_s", [[0.0, 0.0], [0.0, 0.15]])
def test_conversations_do_not_depend_on_who_is_faster(tmp_path: Path, engine: str, think_s: list[float]) -> None:
    load = Load(user="chat", users=5, requests=25, turns=3, output_tokens=4, think_s=think_s, processes=2)
    job = make_job(tmp_path, load, Warmup(requests=4))
    assert end(start_job(tmp_path, engine, job, "--processes", "2")) == 0, log_of(tmp_path)
    records = records_of(tmp_path)
    ends_of(tmp_path, 2)
    assert len({r.process for r in records}) == 2
    talks = talks_of(records)
    assert talks == {-1: [(-1, 1), (-2, 2), (-3, 3)], -4: [(-4, 1), (-5, 2), (-6, 3)], **planned_talks(25, 3)}
    assert [r.error for r in records] == [None] * 31


@pytest.fixture(scope="module")
def failing_engine() -> Iterator[str]:
    """Every third request is refused."""
    seen = itertools.count()

    class Answer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            talk = [message["role"][0] + str(len(message["content"].split())) for message in asked["messages"]]
            choice = {"message": {"content": "said"}, "finish_reason": "stop"}
            body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": len(talk)}}).encode()
            self.send_response(500 if next(seen) % 3 == 1 else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_failed_turn_leaves_no_trace_and_the_conversation_goes_on(tmp_path: Path, failing_engine: str) -> None:
    load = Load(user="chat", requests=6, turns=3, output_tokens=6, stream=False, think_s=[0.0, 0.0])
    job = make_job(tmp_path, load, prompts=Prompts(tokens=20, system_tokens=10))
    assert end(start_job(tmp_path, failing_engine, job)) == 0, log_of(tmp_path)
    records = sorted(records_of(tmp_path), key=lambda r: r.sent_s)
    assert talks_of(records) == planned_talks(6, 3)
    assert [r.error for r in records] == [None, "http", None, None, "http", None]
    # system, question | refused | system, question, answer, third question: the refused one is not in it
    assert [r.prompt_tokens for r in records] == [2, None, 4, 2, None, 4]


def test_a_timed_conversation_ends_with_the_time(tmp_path: Path, engine: str) -> None:
    load = Load(user="chat", users=3, duration_s=1.0, turns=50, output_tokens=4, think_s=[0.1, 0.3], drain_s=30)
    began = time.monotonic()
    assert end(start_job(tmp_path, engine, make_job(tmp_path, load))) == 0, log_of(tmp_path)
    assert time.monotonic() - began < 10  # no one waits for the turns that were not sent
    records = sorted(records_of(tmp_path), key=lambda r: r.sent_s)
    assert max(r.sent_s for r in records) - min(r.sent_s for r in records) < 1.0
    talks = talks_of(records)
    assert sorted(talks) == [0, 50, 100]  # type: ignore[type-var]
    for number, talk in talks.items():
        assert talk == planned_talks(150, 50)[number][: len(talk)]


def test_a_long_pause_does_not_outlast_a_timed_load(tmp_path: Path, engine: str) -> None:
    load = Load(user="chat", users=2, duration_s=0.5, output_tokens=2, think_s=[60.0, 60.0], drain_s=60)
    began = time.monotonic()
    assert end(start_job(tmp_path, engine, make_job(tmp_path, load))) == 0, log_of(tmp_path)
    assert time.monotonic() - began < 10
    assert len(records_of(tmp_path)) == 2


def test_a_timed_load_stops_asking_in_time_and_lets_answers_finish(tmp_path: Path, slow_engine: str) -> None:
    load = Load(user="batch", users=3, duration_s=1.0, output_tokens=12, drain_s=10)
    job = make_job(tmp_path, load, Warmup(duration_s=0.5))
    began = time.monotonic()
    assert end(start_job(tmp_path, slow_engine, job)) == 0
    took_s = time.monotonic() - began
    records = records_of(tmp_path)
    ends_of(tmp_path, 1)
    measured = sorted((r for r in records if r.phase == "measured"), key=lambda r: r.sent_s)
    warmup = [r for r in records if r.phase == "warmup"]
    first_s = min(r.sent_s for r in records)
    assert max(r.sent_s for r in warmup) < first_s + 0.5
    assert measured[0].sent_s >= first_s + 0.5
    assert measured[-1].sent_s - measured[0].sent_s < 1.0
    assert [r.error for r in records] == [None] * len(records)
    assert max(r.sent_s + r.ended_s for r in measured) > measured[0].sent_s + 1.0  # some ended after it
    assert took_s < 8


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
    asked = time.monotonic()
    child.send_signal(signum)
    end(child)
    assert time.monotonic() - asked < 8
    records = records_of(tmp_path)
    assert sum(mark.sent or 0 for mark in ends_of(tmp_path, processes)) == len(records)
    unfinished = [r for r in records if r.error == "unfinished"]
    assert 1 <= len(unfinished) <= 8
    assert [r.error for r in records if r.error != "unfinished"] == [None] * (len(records) - len(unfinished))
    assert len({r.index for r in records}) == len(records)
    (stats,) = json.loads((tmp_path / "stats.json").read_text())
    assert (stats["num_requests"], stats["num_failures"]) == (len(records), len(unfinished))


def test_a_server_that_is_gone_fails_every_request_once(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    job = make_job(tmp_path, Load(user="batch", users=4, requests=12, batch_size=2))
    assert end(start_job(tmp_path, url, job)) == 0
    records = records_of(tmp_path)
    assert [r.error for r in records] == ["connect"] * 12
    assert max(r.sent_s for r in records) - min(r.sent_s for r in records) > 0.4  # users pause, they do not spin
    ends_of(tmp_path, 1)


OWN = """
from locust import task
from harness.load.user import LLMUser

class Careless(LLMUser):
    @task
    def work(self) -> None:
        work = self.take()[0]
        if work.ticket.index % 2:
            raise KeyError("a mistake in the locustfile")
        self.ask(work)
        if work.ticket.index == 4:
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


@pytest.mark.parametrize("locustfile", ["chat", "batch"])
def test_by_hand(tmp_path: Path, engine: str, locustfile: str) -> None:
    options = ["--headless", "--users", "3", "--spawn-rate", "10", "--run-time", "2s", "--records", "r.jsonl"]
    options += ["--think", "0.1 0.2", "--batch-size", "2", "--turns", "2", "--prompts", "classification"]
    child = start(tmp_path, engine, locustfile, *options, "--output-tokens", "20", "--stop-timeout", "5")
    assert end(child) == 0, log_of(tmp_path)
    records = list(read_requests(tmp_path / "r.jsonl"))
    assert len(records) > 6
    assert [r.error for r in records] == [None] * len(records)
    assert {(r.load, r.asked_tokens, r.fixed_length) for r in records} == {("", 20, False)}
    assert {r.turn for r in records} == ({1, 2} if locustfile == "chat" else {None})
    marks = read_marks(tmp_path / "r.jsonl.processes")
    assert [(mark.event, mark.sent, mark.recorded) for mark in marks] == [
        ("start", None, None),
        ("end", len(records), len(records)),
    ]
    assert ("ChatUser" if locustfile == "chat" else "BatchAgent") in log_of(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "http://127.0.0.1:9"], "no model could be read from /v1/models (127.0.0.1:9: connection refused"),
        (["--think", "soon"], "--think: 'soon' is not a pause. Give one such as '1 5', in seconds."),
        (["--prompts", "none.jsonl"], "none.jsonl: the prompts cannot be read (No such file or directory)"),
        (["--records", "no/such/place"], "No such file or directory: 'no/such/place'"),
        (["--job", "none.json"], "none.json: the job cannot be read"),
        (["--api-key-env", "NOT_SET_AT_ALL"], "the environment variable NOT_SET_AT_ALL, which should hold the API key"),
    ],
)
def test_what_cannot_be_done_by_hand_ends_with_a_sentence(
    tmp_path: Path, engine: str, options: list[str], sentence: str
) -> None:
    assert end(start(tmp_path, engine, "chat", "--headless", "--users", "2", *options)) == 1
    assert sentence in log_of(tmp_path)
    assert "Traceback" not in log_of(tmp_path)


def ask(url: str, **form: str) -> str:
    data = urllib.parse.urlencode(form).encode() if form else None
    with urllib.request.urlopen(url, data, timeout=10) as response:
        text: str = response.read().decode()
        return text


def test_the_web_form_shows_the_job_and_changes_it(tmp_path: Path, engine: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    write_job(make_job(tmp_path, Load(user="batch", requests=2, batch_size=3, output_tokens=4)), tmp_path / "job.json")
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--job", str(tmp_path / "job.json")]
    child = start(tmp_path, engine, "batch", *options)
    try:
        deadline = time.monotonic() + RUN_S
        while "Starting web interface" not in log_of(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.3)
        page = ask(url)
        for option in ("model", "prompts", "prompt_tokens", "output_tokens", "batch_size", "turns", "think"):
            assert f'"{option}"' in page
        assert '"job"' not in page
        assert json.loads(ask(f"{url}/swarm", user_count="1", spawn_rate="1", output_tokens="5"))["success"]
        wait_for_records(tmp_path, 9)  # the job's limit of two is not the web user's
        ask(f"{url}/stop", now="yes")
        held = len(os.listdir(f"/proc/{child.pid}/fd"))
        for number in range(3):
            assert json.loads(ask(f"{url}/swarm", user_count="1", spawn_rate="1", output_tokens="5"))["success"]
            wait_for_records(tmp_path, 12 + 3 * number)
            ask(f"{url}/stop", now="yes")
        # Three restarts let go of what each had; a connection of the page itself may come and go.
        assert len(os.listdir(f"/proc/{child.pid}/fd")) < held + 3
        child.send_signal(signal.SIGTERM)
        end(child)
    finally:
        child.kill()
        child.wait()
    records = records_of(tmp_path)
    assert {r.asked_tokens for r in records} == {5}
    assert 3 in Counter(r.batch for r in records).values()
    assert sum(mark.sent or 0 for mark in ends_of(tmp_path, 1)) == len(records)


def test_importing_a_locustfile_is_quick() -> None:
    """What a load process costs before it does anything; most of it is Locust's own."""
    code = "import time; t = time.perf_counter(); import locust; l = time.perf_counter(); import harness.load.user; "
    code += "import sys; print(l - t, time.perf_counter() - l, 'docker' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    locust_s, ours_s, docker, numpy = done.stdout.split()
    print(f"locust {locust_s} s, ours {ours_s} s")
    assert float(ours_s) < 0.5
    assert (docker, numpy) == ("False", "False")
