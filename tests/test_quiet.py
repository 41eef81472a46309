"""Loads in which nothing happens for a while: those that are quiet by schedule go on, those that hang are ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness.job import Job, write_job
from harness.load.sequencer import Part, Plan, Sequencer
from harness.reasons import sentences
from harness.run import drive as driving
from harness.run.drive import LocalChild, Monitor, drive, locust_arguments
from harness.scenario import Arrivals, Load, Trace, Warmup
from harness.scenario.behaviour import Agent, Pause
from harness.scenario.plan import Schedule
from tests import prefork
from tests.load_runs import ROOT, make_job, records_of, wait_for_records

PATIENCE_S = 6.0  # of the watchdog; a fork of Locust has to start within it, on a busy machine as well
QUIET_S = 7.0
SILENT = "although each may take 0.5 s"

WAITS = """
from locust import constant, task
from harness.load.user import LLMUser


class Waits(LLMUser):
    wait_time = constant({wait_s})

    @task
    def ask_one(self):
        self.ask(*self.take())
"""
HANGS = """
from gevent.event import Event
from locust import task
from harness.load.user import LLMUser


class Hangs(LLMUser):
    @task
    def ask_one(self):
        self.ask(*self.take())
        Event().wait()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `timeout_s` of 0.5 s."""
    monkeypatch.setattr(driving, "QUIET_S", PATIENCE_S - 1.5)
    monkeypatch.setattr(driving, "SLOWEST_TPOT_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", prefork.Popen)


def driven(folder: Path, url: str, job: Job, locustfile: Path | None = None) -> list[str]:
    """What is wrong with a load, as the harness finds it."""
    write_job(job, folder / "job.json")
    file = locustfile or ROOT / "locustfiles" / f"{job.load.user}.py"
    command = [sys.executable, "-m", "locust", *locust_arguments(job, folder / "job.json", file, url)]
    log = folder / "locust.log"
    found = drive(lambda: LocalChild(command, log), Monitor(job), log_path=log)
    return sentences(found.problems)


def load(**more: Any) -> Load:
    return Load(**{"user": "batch", "output_tokens": 5, "timeout_s": 0.5, **more})


def even(*points: list[float]) -> Arrivals:
    return Arrivals(points=list(points), spacing="even")


PAUSE = Pause(mean_s=QUIET_S, distribution="fixed")


@pytest.mark.parametrize(
    ("of", "warmup", "sent"),
    [
        (load(users=2, arrivals=even([0, 1], [1, 0], [8, 0], [8.2, 5]), duration_s=9.2), 0, 6),
        pytest.param(  # nothing more is due, only the end
            load(users=2, arrivals=even([0, 5], [1, 0]), duration_s=9), 0, 5, marks=pytest.mark.nightly
        ),
        pytest.param(
            load(users=2, arrivals=Arrivals(rate=0.14, spacing="even"), duration_s=1), 2, 3, marks=pytest.mark.nightly
        ),
        (load(users=2, requests=4, think=PAUSE, processes=2), 0, 4),
        (load(user="agent", requests=2, agent=Agent(steps=2, tool_time=PAUSE)), 0, 2),
    ],
    ids=["points", "nothing more", "warm-up by schedule", "two processes that think", "slow tool"],
)
def test_a_load_that_is_quiet_by_schedule_goes_on(
    tmp_path: Path, engine: str, of: Load, warmup: int, sent: int
) -> None:
    assert driven(tmp_path, engine, make_job(tmp_path, of, Warmup(requests=warmup))) == []
    records = records_of(tmp_path)
    assert [one.error for one in records] == [None] * sent
    times = sorted(one.sent_s for one in records)
    pauses = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert max(pauses) > PATIENCE_S or of.requests is None


@pytest.mark.nightly
def test_a_trace_with_a_pause_goes_on(tmp_path: Path, engine: str) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 1000 * at_s, "input_length": 9, "output_length": 2} for at_s in (0, 0.2, QUIET_S)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = make_job(tmp_path, load(users=4, requests=3, trace=Trace(file="t.jsonl")), trace_file=str(trace))
    assert driven(tmp_path, engine, job) == []
    assert [one.index for one in records_of(tmp_path)] == [0, 1, 2]


def test_a_wait_time_of_locust_goes_on(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(WAITS.format(wait_s=QUIET_S))
    assert driven(tmp_path, engine, make_job(tmp_path, load(requests=2)), file) == []
    assert len(records_of(tmp_path)) == 2


def test_users_that_wait_for_what_never_comes_are_ended(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HANGS)
    (problem,) = driven(tmp_path, engine, make_job(tmp_path, load(requests=2)), file)
    assert SILENT in problem
    assert len(records_of(tmp_path)) == 1


def test_an_answer_that_never_ends_is_cut(tmp_path: Path, slow_engine: str) -> None:
    """Other users wait for the schedule meanwhile: a request in flight is due."""
    arrivals = even([0, 2], [0.4, 0], [100, 1])
    job = make_job(tmp_path, load(users=3, arrivals=arrivals, duration_s=600, output_tokens=1000))
    (problem,) = driven(tmp_path, slow_engine, job)  # and not at the end of its 600 s
    assert SILENT in problem
    assert [one.error for one in records_of(tmp_path)] == ["unfinished"]


def test_a_load_process_that_hangs_in_a_quiet_time_is_ended(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "GRACE_S", 0.5)
    pause = Pause(mean_s=600, distribution="fixed")

    def stop() -> None:
        wait_for_records(tmp_path, 1)
        os.kill(records_of(tmp_path)[0].process, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    (problem,) = driven(tmp_path, engine, make_job(tmp_path, load(requests=2, think=pause)))
    thread.join()
    assert SILENT in problem


def test_a_counter_says_when_it_is_too_early(tmp_path: Path) -> None:
    """A part of a mix of several machines waits, without a warm-up of its own, for that of the others."""
    schedule = Schedule(Arrivals(rate=1), 1)
    sequencer = Sequencer(str(tmp_path / "t"), Plan(duration_s=5, schedule=schedule, part=Part(0, 2, 1)))
    sequencer.on_hold = True
    assert sequencer.take() == [] and sequencer.early
    sequencer.on_hold, sequencer.begin_s = False, time.monotonic()
    assert len(sequencer.take()) == 1 and not sequencer.early
    done = Sequencer(str(tmp_path / "done"), Plan(requests=1))
    assert len(done.take()) == 1
    assert done.take() == [] and not done.early  # that is the end
