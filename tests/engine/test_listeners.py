"""Listeners of Locust's `request` event that wait, raise or end the load, by hand and in a run."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.records.records import Request
from harness.scenario import Load, Warmup
from tests.support.http_double import Handler, listening
from tests.support.load_runs import by_hand, driven, end, log_of, records_of, start, wait_for_records

# Each notes the request's name, by a real HTTP request and in a file, and sleeps. At the end of the test it counts.
LISTENER = """
import json, os, urllib.request
import gevent
from locust import events
from harness.load.user import LLMUser
from locustfiles.{file} import {user}

seen = []

@events.request.add_listener
def send(request_type, name, response_time, response_length, exception, **kwargs):
    gevent.sleep({sleep_s})
    body = json.dumps([name, response_time, response_length]).encode()
    urllib.request.urlopen("{sink}", body).close()
    seen.append(response_time)

@events.test_stop.add_listener
def count(**kwargs):
    if seen:
        with open("counted", "a") as file:
            file.write(f"{{len(seen)}}\\n")
"""


@contextmanager
def sink() -> Iterator[tuple[str, list[bytes]]]:
    """An HTTP server that keeps what it is sent, in the order in which it comes."""
    got: list[bytes] = []

    class Sink(Handler):
        def do_POST(self) -> None:
            got.append(self.body())
            self.answer(204)

    with listening(Sink) as url:
        yield url, got


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def assert_each_event_once(got: list[bytes], records: list[Request]) -> None:
    """Each record was told once; those of one process in the order of their records."""
    times = [float(json.loads(one)[1]) for one in got]
    expected = [(r.chunks_s[-1] if r.chunks_s else r.ended_s) * 1000 for r in records]
    if len({r.process for r in records}) > 1:
        times, expected = sorted(times), sorted(expected)
    assert times == pytest.approx(expected, abs=0.001)  # ms; records have whole microseconds


def test_a_run_with_a_listener_that_waits(tmp_path: Path, engine: str) -> None:
    """The listener is three times as slow as the load: at the end it is waited for, also by the master."""
    with sink() as (url, got):
        file = written(tmp_path, LISTENER.format(sink=url, sleep_s=0.1, file="batch", user="BatchAgent"))
        load = Load(user="batch", users=2, requests=30, batch_size=2, output_tokens=20, processes=2)
        stats_file = ["--json-file", str(tmp_path / "stats")]
        driven(tmp_path, engine, load, Warmup(requests=4), *stats_file, locustfile=file)
    records = records_of(tmp_path)
    assert len(records) == 34
    assert_each_event_once(got, records)
    assert sum(map(int, (tmp_path / "counted").read_text().split())) == 34
    (stats,) = json.loads((tmp_path / "stats.json").read_text())
    assert (stats["num_requests"], stats["num_failures"]) == (34, 0)
    assert "Traceback" not in log_of(tmp_path)


RAISES = """
from locust import events
from locust.exception import StopUser
from locustfiles.batch import BatchAgent
import gevent

done = []

@events.request.add_listener
def fails(**kwargs):
    done.append(1)
    if len(done) % 3 == 0:
        raise ValueError("boom")
    if len(done) % 3 == 1:
        raise StopUser
    raise gevent.Timeout(1)

@events.request.add_listener
def works(name, **kwargs):
    with open("told", "a") as file:
        file.write(name + "\\n")
"""


def test_a_listener_that_raises_loses_nothing(tmp_path: Path, engine: str) -> None:
    load = Load(user="batch", users=3, requests=30, output_tokens=5)
    records = driven(tmp_path, engine, load, locustfile=written(tmp_path, RAISES))
    assert [r.error for r in records] == [None] * 30
    assert (tmp_path / "told").read_text() == "b\n" * 30  # the listeners after it are called
    assert log_of(tmp_path).count("ValueError: boom") == 10


QUITS = """
import gevent
from locust import events
from locustfiles.batch import BatchAgent

told = []

@events.init.add_listener
def listen(environment, **kwargs):
    @events.request.add_listener
    def quit(**kwargs):
        told.append(1)
        if len(told) == 5:
            environment.runner.quit()

@events.quit.add_listener
def count(**kwargs):
    with open("counted", "a") as file:
        file.write(f"{len(told)}\\n")
"""


def test_a_listener_may_end_the_load(tmp_path: Path, engine: str) -> None:
    """As one that has seen enough failures does. What it then cuts is told it as well."""
    options = ["--stop-timeout", "5", "--output-tokens", "20"]
    records = by_hand(tmp_path, engine, written(tmp_path, QUITS), *options, run_time=None)
    assert 5 <= len(records) <= 10
    assert (tmp_path / "counted").read_text() == f"{len(records)}\n"


STUCK = """
import gevent
from locust import events
from locustfiles.batch import BatchAgent

@events.request.add_listener
def never(**kwargs):
    gevent.sleep(3600)
"""


def test_an_interruption_does_not_wait_for_a_listener(tmp_path: Path, engine: str) -> None:
    options = ["--headless", "--users", "2", "--spawn-rate", "10", "--records", "requests.jsonl", "--think", "0.05"]
    child = start(tmp_path, engine, written(tmp_path, STUCK), *options, "--output-tokens", "20")
    wait_for_records(tmp_path, 10)
    child.send_signal(signal.SIGINT)
    assert end(child) == 0, log_of(tmp_path)
    lost = len(records_of(tmp_path)) - 1  # the listener has one
    assert f" {lost} events " in log_of(tmp_path)
