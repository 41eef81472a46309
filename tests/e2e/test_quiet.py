"""Loads in which nothing happens for a while: those that are quiet by schedule go on, those that hang are ended."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.base.reason import sentences
from harness.load.sequencer import Quota, Sequencer, Shard
from harness.records.records import Request
from harness.run import drive as driving
from harness.run.drive import LocalChild, Monitor, drive, locust_arguments
from harness.scenario import Arrivals, Load, Trace, Warmup
from harness.scenario.behaviour import Agent, Pause
from harness.scenario.plan import Schedule
from harness.workload.job import Job, write_job
from tests.support import prefork
from tests.support.command import until
from tests.support.load_runs import ROOT, make_job, records_of, wait_for_records

SILENCE_S = 12.0  # of the watchdog; a fork of Locust has to start within it, on a busy machine as well
QUIET_S = 13.0
TIMEOUT_S = 3.0  # of a request, on a busy machine as well
SILENT = f"although each may take {TIMEOUT_S:.0f} s"

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
    """With `timeout_s` of TIMEOUT_S, of which the watchdog grants three."""
    monkeypatch.setattr(driving, "MAX_SILENCE_S", SILENCE_S - 3 * TIMEOUT_S)
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
    return Load(**{"user": "batch", "output_tokens": 5, "timeout_s": TIMEOUT_S, **more})


def even(*points: list[float]) -> Arrivals:
    return Arrivals(points=list(points), spacing="even")


PAUSE = Pause(mean_s=QUIET_S, distribution="fixed")


class Loaded(NamedTuple):
    """A load, and the number of requests that it sends where it is not ended."""

    of: Load
    sent: int
    warmup: int = 0
    locustfile: str | None = None
    job: dict[str, Any] = {}


def at_once(folder: Path, url: str, loads: dict[str, Loaded]) -> dict[str, tuple[list[str], list[Request]]]:
    """What is wrong with each of these loads, and its records. They mostly wait, so they run at the same time."""

    def run_load(name: str) -> tuple[list[str], list[Request]]:
        own, load = folder / name, loads[name]
        own.mkdir()
        file = None if load.locustfile is None else own / "mine.py"
        if file is not None:
            file.write_text(str(load.locustfile))
        job = make_job(own, load.of, Warmup(requests=load.warmup), **load.job)
        return driven(own, url, job, file), records_of(own)

    with ThreadPoolExecutor(len(loads)) as threads:
        return dict(zip(loads, threads.map(run_load, loads), strict=True))


def test_loads_that_are_quiet_by_schedule_go_on(tmp_path: Path, engine: str) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 1000 * at_s, "input_length": 9, "output_length": 2} for at_s in (0, 0.2, QUIET_S)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    slow_tool = Agent(steps=2, tool_time=PAUSE)
    loads = {
        "points": Loaded(load(users=2, arrivals=even([0, 1], [1, 0], [14, 0], [14.2, 5]), duration_s=15.2), 6),
        "warm-up": Loaded(load(users=2, arrivals=Arrivals(rate=0.07, spacing="even"), duration_s=1), 3, warmup=2),
        "thinking": Loaded(load(users=2, requests=4, think=PAUSE, processes=2), 4),
        "slow tool": Loaded(load(user="agent", requests=2, agent=slow_tool), 2),
        "trace": Loaded(load(users=4, requests=3, trace=Trace(file="t.jsonl")), 3, job={"trace_file": str(trace)}),
        "wait time": Loaded(load(requests=2), 2, locustfile=WAITS.format(wait_s=QUIET_S)),
    }
    for name, (problems, records) in at_once(tmp_path, engine, loads).items():
        assert (problems, [one.error for one in records]) == ([], [None] * loads[name].sent), name
        times = sorted(one.sent_s for one in records)
        assert max(after - before for before, after in pairwise(times)) > SILENCE_S or loads[name].of.requests is None


def test_loads_that_hang_are_ended(
    tmp_path: Path, engine: str, slow_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users that wait for what never comes; an answer that never ends, while other users wait for the schedule; and a
    load process that hangs in a quiet time."""
    monkeypatch.setattr(driving, "GRACE_S", 3.0)
    arrivals = even([0, 2], [0.4, 0], [100, 1])
    endless = Loaded(load(users=3, arrivals=arrivals, duration_s=600, output_tokens=1000), 1)
    stopped = Loaded(load(requests=2, think=Pause(mean_s=600, distribution="fixed")), 1)

    def stop() -> None:
        until((tmp_path / "stopped").exists)
        wait_for_records(tmp_path / "stopped", 1)
        os.kill(records_of(tmp_path / "stopped")[0].process, signal.SIGSTOP)

    with ThreadPoolExecutor() as threads:
        stopping = threads.submit(stop)
        ending = threads.submit(at_once, tmp_path, slow_engine, {"endless": endless})
        waiting = {"hangs": Loaded(load(requests=2), 1, locustfile=HANGS), "stopped": stopped}
        found = at_once(tmp_path, engine, waiting) | ending.result()  # and not at the end of its 600 s
        stopping.result()
    for name, (problems, records) in found.items():
        assert [SILENT in problem for problem in problems] == [True], name
        assert [one.error for one in records] == ["unfinished" if name == "endless" else None], name


def test_a_counter_says_when_it_is_too_early(tmp_path: Path) -> None:
    """A part of a mix of several machines waits, without a warm-up of its own, for that of the others."""
    schedule = Schedule(Arrivals(rate=1), 1)
    sequencer = Sequencer(str(tmp_path / "t"), Quota(duration_s=5, schedule=schedule, shard=Shard(0, 2, 1)))
    sequencer.hold_warmup()
    assert sequencer.take() == [] and sequencer.early[0]
    sequencer.released_stage, sequencer.begin_s = 0, time.monotonic()
    assert len(sequencer.take()) == 1 and not sequencer.early[0]
    done = Sequencer(str(tmp_path / "done"), Quota(requests=1))
    assert len(done.take()) == 1
    assert done.take() == [] and not done.early[0]  # that is the end
