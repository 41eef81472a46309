"""The user classes as stock Locust runs them, without a scenario: on the command line and in its web form."""

import datetime
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from harness.records.records import read_marks, read_requests
from harness.scenario import Load
from harness.scenario.behaviour import Abandon, Pause
from harness.workload.job import write_job
from tests.support.command import PATIENCE_S, until
from tests.support.fake_server import answering, serving, whole
from tests.support.load_runs import (
    ROOT,
    by_hand,
    end,
    ends_of,
    log_of,
    make_job,
    records_of,
    start,
    start_job,
    wait_for_records,
)
from tests.support.web_ui import ui

CLASSES = {"agent": "ToolAgent", "chat": "ChatUser"}


@pytest.mark.parametrize("locustfile", ["agent", "chat"])
def test_by_hand(tmp_path: Path, engine: str, locustfile: str) -> None:
    options = ["--steps", "2", "--sub-agents", "1", "--documents", "2", "--document-tokens", "50", "--batch-size", "2"]
    options += ["--think", "0.1 0.2", "--turns", "2", "--prompts", "classification", "--output-tokens", "20"]
    records = by_hand(tmp_path, engine, locustfile, *options, "--users", "3", "--stop-timeout", "5")
    assert len(records) > 6
    assert [r.error for r in records] == [None] * len(records)
    assert {(r.load, r.asked_tokens, r.fixed_length) for r in records} == {("", 20, False)}
    assert {r.turn for r in records} == ({1, 2} if locustfile in ("agent", "chat") else {None})
    assert {r.tool_calls for r in records} == ({0} if locustfile == "agent" else {None})
    marks = read_marks(tmp_path / "r.jsonl.processes")
    assert [(mark.event, mark.sent) for mark in marks] == [("start", None), ("end", len(records))]
    assert marks[-1].recorded == len(records)
    assert CLASSES[locustfile] in log_of(tmp_path)


def test_nothing_new_is_sent_after_the_run_time_and_the_start_does_not_shorten_it(tmp_path: Path, engine: str) -> None:
    options = ["--turns", "1000", "--think", "0.1 600", "--output-tokens", "20", "--stop-timeout", "20"]
    assert len(by_hand(tmp_path, engine, "chat", *options, run_time="1s")) >= 2
    assert "Not all users finished" not in log_of(tmp_path)

    def logged_at(words: str) -> datetime.datetime:
        (line,) = [line for line in log_of(tmp_path).splitlines() if words in line]
        return datetime.datetime.strptime(line[1:24], "%Y-%m-%d %H:%M:%S,%f")

    assert (logged_at("--run-time limit reached") - logged_at("Run time limit set")).total_seconds() > 0.98


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Reported once, by the master.
        (["--host", "http://127.0.0.1:9", "--processes", "2"],
         "no model could be read from /v1/models (127.0.0.1:9: connection refused"),
        (["--api-key-env", "NOT_SET_AT_ALL"], "the environment variable NOT_SET_AT_ALL, which should hold the API"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_by_hand_ends_with_a_sentence(
    tmp_path: Path, engine: str, options: list[str], expected: str
) -> None:
    child = start(tmp_path, engine, "chat", "--headless", "--users", "2", *options)
    assert end(child) == 1
    assert log_of(tmp_path).count(expected) == 1
    assert "Traceback" not in log_of(tmp_path)
    until(lambda: child.args not in [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])])


BUSY = """
import time

from locust import events
from locust.runners import STATE_STOPPED

from locustfiles.batch import BatchAgent


@events.init.add_listener
def begin(environment, **_):
    # A busy machine: its last report takes longer than the half second for which Locust's master waits.
    def delay(**_):
        if environment.runner.state == STATE_STOPPED:
            time.sleep(1)

    environment.events.report_to_master.add_listener(delay)
"""


def test_what_is_under_way_at_the_end_of_the_run_time_ends_and_is_counted(tmp_path: Path, engine: str) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    options = ["--output", "fixed", "--output-tokens", "5000", "--processes", "2"]  # of ten seconds
    records = by_hand(tmp_path, engine, tmp_path / "busy.py", *options, run_time="8s")
    assert {(one.error, one.output_tokens) for one in records} == {(None, 5000)}  # the second user may come too late
    shown = re.findall(r"POST +BatchAgent +(\d+) +(\d+)\(", log_of(tmp_path))
    assert shown == [(str(len(records)), "0")]


SHAPE = """
from locust import LoadTestShape

from locustfiles.batch import BatchAgent


class Steps(LoadTestShape):
    def tick(self):
        passed_s = self.get_run_time()
        return None if passed_s > 4 else (2, 10) if passed_s < 2 else (4, 10)
"""


def test_a_shape_from_elsewhere_does_not_steer_the_users_of_a_scenario(tmp_path: Path, engine: str) -> None:
    (tmp_path / "shaped.py").write_text(SHAPE)
    job = make_job(tmp_path, Load(user="batch", requests=2))
    assert end(start_job(tmp_path, engine, job, locustfile=tmp_path / "shaped.py")) == 1
    assert "LoadTestShape" in log_of(tmp_path)
    assert not (tmp_path / "requests.jsonl").exists()


def test_an_interruption_does_not_wait_for_what_is_under_way(tmp_path: Path, engine: str) -> None:
    options = ["--headless", "--users", "2", "--spawn-rate", "10", "--run-time", "3s", "--records", "r.jsonl"]
    options += ["--output", "fixed", "--output-tokens", "90000", "--processes", "2"]  # of three minutes
    child = start(tmp_path, engine, "batch", *options)
    until(lambda: "limit reached" in log_of(tmp_path))
    child.send_signal(signal.SIGINT)
    assert end(child) == 0, log_of(tmp_path)  # to be cut is no failure
    assert {one.error for one in read_requests(tmp_path / "r.jsonl")} == {"unfinished"}


def test_what_is_cut_after_the_run_time_is_no_failure(tmp_path: Path, engine: str) -> None:
    """In Locust's table it is a request without a response time."""
    options = ["--output", "fixed", "--output-tokens", "9000", "--stop-timeout", "1", "--json-file", "stats"]
    cut = [one.error for one in by_hand(tmp_path, engine, "batch", *options, run_time="1s")]
    assert set(cut) == {"unfinished"}
    (row,) = json.loads((tmp_path / "stats.json").read_text())
    assert (row["num_requests"], row["num_failures"], row["num_none_requests"]) == (len(cut), 0, len(cut))


def test_a_server_that_refuses_the_key_is_reported_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BADK", "sk-wrong")
    with serving(answering(whole(b"no sk-wrong", status=b"500 Oops"))) as url:
        options = ["--headless", "--users", "3", "--spawn-rate", "3", "--api-key-env", "BADK"]
        assert end(start(tmp_path, url, "chat", *options)) == 1
    log, sentence = log_of(tmp_path), f"{url}/v1/models answers HTTP 500: no ***. Check"
    assert log.count("ERROR") == log.count(sentence) == 1, log
    assert "Traceback" not in log and "sk-wrong" not in log


# In a process of its own, since Locust changes Python's sockets as it is imported.
FORM = """
import sys
from pathlib import Path
import msgspec
from locust.argument_parser import get_parser
from locust.env import Environment
from harness.base.errors import HarnessError
from harness.load.options import apply_options, check_start
from harness.workload.job import read_job
from locustfiles.chat import ChatUser

def parse(*given):
    return get_parser(default_config_files=[]).parse_args([*given])

job = read_job(Path(sys.argv[1]))
for filled_in in ("1 5", ""):
    load = apply_options(job, parse("--think", filled_in)).load
    print(load.think_s, load.think)
for wrong in msgspec.json.decode(sys.argv[2]):
    environment = Environment(user_classes=[ChatUser], parsed_options=parse("--headless", *wrong), host="http://x")
    try:
        check_start(environment, None)
    except HarnessError as error:
        print(error.what)
# What the scenario has and the form has no other value for stays.
sys.argv[2:] = ["--job", sys.argv[1]]
load = apply_options(job, parse()).load
print(load.endpoint, load.abandon, load.regenerate)
print(parse().think, load.think_s, load.think == job.load.think)
"""
WRONG = {
    "--check: 'error_rate == 0' is no upper bound on a percentile of a latency of requests": [  # the first of them
        "--steps", "0", "--turns", "few", "--timeout", "-1", "--think", "soon", "--check", "error_rate == 0",
        "--output-tokens", "many", "--abandon", "{share: 5, after_s: 3}",
    ],
    "--endpoint: ChatUser supports only chat, completions, messages (got embeddings)": ["--endpoint", "embeddings"],
    "--batch-size: does not go with 'in_flight'; remove one of the two": ["--in-flight", "4", "--batch-size", "2"],
    "none.jsonl: the prompts cannot be read (No such file or directory)": ["--prompts", "none.jsonl"],
    "--records: no/place cannot be written (No such file or directory)": ["--records", "no/place"],
}  # fmt: skip


def test_options_take_the_place_of_the_scenarios_and_wrong_ones_are_reported(tmp_path: Path) -> None:
    leaves = Abandon(share=0.05, after_s=2.5)
    load = Load(user="chat", think=Pause(mean_s=2.0), abandon=leaves, regenerate=0.03, endpoint="completions")
    write_job(make_job(tmp_path, load), tmp_path / "job.json")
    command = [sys.executable, "-c", FORM, str(tmp_path / "job.json"), json.dumps(list(WRONG.values()))]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "[1.0, 5.0] None",
        "None None",
        *WRONG,
        f"completions {leaves} 0.03",
        '{"mean_s":2.0} None True',
    ]


def test_the_web_form_shows_the_job_and_changes_it(tmp_path: Path, engine: str) -> None:
    write_job(make_job(tmp_path, Load(user="batch", requests=2, batch_size=3, output_tokens=4)), tmp_path / "job.json")
    with ui(tmp_path, engine, "--job", str(tmp_path / "job.json"), "--think", "0", locustfile="batch") as found:
        page = found.ask("/").text
        for option in ("model", "prompts", "prompt_tokens", "output_tokens", "batch_size", "in_flight", "think"):
            assert f'"{option}"' in page
        for option in ("job", "turns", "abandon", "steps", "documents"):  # of the harness, and of other user classes
            assert f'"{option}"' not in page
        held = 0
        for number in (9, 12, 15, 18):  # the job's limit of two is not the web user's
            assert found.swarm(output_tokens=5)["success"]
            wait_for_records(tmp_path, number)
            found.stop()
            held = held or found.open_files()
        # Three restarts let go of what each had; a connection of the page itself may come and go.
        # Connections are closed a moment after their last answer, see `Client._keep`.
        until(lambda: found.open_files() < held + 3)
    records = records_of(tmp_path)
    assert {r.asked_tokens for r in records} == {5}
    assert 3 in Counter(r.batch for r in records).values()
    assert sum(mark.sent or 0 for mark in ends_of(tmp_path, 1)) == len(records)
