"""One load sent by several workers: real Locust masters and workers, the records of each delivered once."""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from harness import __version__
from harness.base.errors import RunError
from harness.base.files import ROOT
from harness.base.process import free_port, is_port_free
from harness.base.reason import sentences
from harness.numbers.summarize import summarize
from harness.records.manifest import read_run
from harness.records.records import ProcessMark, read_marks, read_requests
from harness.run import drive as driving
from harness.run.drive import LocalChild, Monitor, drive, locust_arguments
from harness.scenario import Load
from harness.scenario.workers import Workers
from harness.workload.job import write_job
from tests.support.command import (
    delivered,
    going,
    only_run,
    reasons_but_slowness,
    records,
    run_with_workers,
    until,
    write,
)
from tests.support.faults import fault
from tests.support.load_runs import make_job
from tests.support.made_runs import request, write_lines
from tests.support.simulated import Spawned
from tests.support.wording import Wording


def test_two_workers_send_each_request_once(tmp_path: Path, engine_process: Spawned) -> None:
    load = {"user": "chat", "users": 4, "requests": 42, "turns": 4, "output_tokens": 5, "think_s": [0, 0.02]}
    with run_with_workers(tmp_path, engine_process, load, warmup={"requests": 8}) as (run, workers):
        done = run.end()
        assert done.code == 0, done.out + done.err
        for worker in workers:
            assert worker.end().code == 0
    folder = only_run(tmp_path)
    sent = records(tmp_path)
    measured = [one for one in sent if one.phase == "measured"]
    assert sorted(one.index for one in measured) == list(range(42))
    assert len({one.id for one in sent}) == len(sent)
    for process in {one.process for one in sent}:
        parts = {one.index // 4 % 2 for one in measured if one.process == process}
        assert len(parts) == 1
    assert {one.user for one in sent} == {0, 1, 2, 3}
    starts = [mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "start"]
    assert {mark.process for mark in starts} == {one.process for one in sent}
    assert all(mark.wall_error_s is not None and 0 < mark.wall_error_s < 1 for mark in starts)
    assert read_run(folder).workers == Workers(machines=2, bind="127.0.0.1", port=read_run(folder).workers.port)  # type: ignore[union-attr]
    assert [path.name for path in (tmp_path / "spool").glob("amd-llm-load-*")] == []


@pytest.mark.nightly
def test_the_parts_of_a_mix_are_sent_by_workers_at_the_same_time(tmp_path: Path, engine_process: Spawned) -> None:
    loads = {name: {"user": name, "users": 2, "duration_s": 3, "output_tokens": 5} for name in ("chat", "batch")}
    mixes = {"both": ["chat", "batch"]}
    scenario = write(tmp_path, model="simulated", loads=loads, mixes=mixes, warmup={"requests": 4})
    port = free_port()
    run = ["run", str(scenario), "--url", engine_process.url, "--workers", "2", "--bind", f"127.0.0.1:{port}"]
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(going("worker", "--master", f"127.0.0.1:{port}", cwd=tmp_path))
        done = stack.enter_context(going(*run, "--runs", str(tmp_path / "runs"), cwd=tmp_path)).end()
    assert done.code == 0, done.out + done.err
    folder = only_run(tmp_path / "runs")
    assert summarize(folder).valid
    measured = [one for one in read_requests(folder / "requests.jsonl") if one.phase == "measured"]
    parts = {load: [one for one in measured if one.load == load] for load in ("both.chat", "both.batch")}
    for part in parts.values():
        assert len({one.id for one in part}) == len(part)
        assert len({one.process for one in part}) == 2
    first, other = (min(one.sent_s for one in part) for part in parts.values())
    assert abs(first - other) < 0.5  # one machine, one clock


@fault("worker", "kill -9 of a worker", seen="was killed or lost", code=3, kept="what it had delivered")
def test_a_killed_worker_makes_the_run_invalid(tmp_path: Path, engine_process: Spawned) -> None:
    load = {"user": "chat", "users": 4, "duration_s": 600, "output_tokens": 5, "think_s": [0.05, 0.05]}
    with run_with_workers(tmp_path, engine_process, load) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2)
        for process in workers[0].others("locust"):
            process.kill()
        done = run.end()  # long before the load would
        assert done.code == 3
        assert [worker.end().code for worker in workers] == [1, 0]
    manifest = read_run(only_run(tmp_path))
    (reason,) = [reason for reason in sentences(manifest.reasons) if "load process" in reason]
    assert "load process" in reason
    assert len({one.process for one in records(tmp_path)}) == 2


def test_a_worker_that_is_held_up_for_seconds_is_not_lost(tmp_path: Path, engine_process: Spawned) -> None:
    """As on a busy machine while it imports, when it has no time to say that it lives."""
    load = {"user": "chat", "users": 4, "duration_s": 12, "output_tokens": 5, "think_s": [0.05, 0.05]}
    with run_with_workers(tmp_path, engine_process, load) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2)
        held_up = workers[0].others("locust")
        for process in held_up:
            process.suspend()
        time.sleep(6)
        for process in held_up:
            process.resume()
        done = run.end()
        assert [worker.end().code for worker in workers] == [0, 0], done.out + done.err
    assert done.code in (0, 3) and reasons_but_slowness(only_run(tmp_path)) == [], done.out + done.err


@fault("worker", "the master is killed", seen="no message from the master for 10 s: this load ends",
       kept="what was not delivered is in a folder that the worker names")  # fmt: skip
def test_workers_end_when_the_master_is_gone(tmp_path: Path, engine_process: Spawned) -> None:
    load = {"user": "chat", "users": 4, "duration_s": 600, "output_tokens": 5, "think_s": [0.05, 0.05]}
    with run_with_workers(tmp_path, engine_process, load) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2)
        for process in run.others("locust"):
            process.kill()
        assert run.end().code == 3
        for worker in workers:  # long before the load would
            assert worker.end().code == 1
    # What nobody has taken is still there.
    assert len(list((tmp_path / "spool").glob("*/amd-llm-load-*/requests.jsonl"))) == 2


STEPPED = """
import os, time
now = time.time
time.time = lambda: now() + 3600 * os.path.exists(os.environ["CLOCK_IS_SET"])
"""


@fault("clock", "the wall clock of a worker is set while a load runs",
       seen="the load goes on; latencies do not use that clock")  # fmt: skip
def test_a_changed_wall_clock_does_not_end_a_load(tmp_path: Path, engine_process: Spawned) -> None:
    load = {"user": "chat", "users": 4, "duration_s": 2, "output_tokens": 5, "think_s": [0.05, 0.05]}
    (tmp_path / "sitecustomize.py").write_text(STEPPED)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "CLOCK_IS_SET": str(tmp_path / "set")}
    with run_with_workers(tmp_path, engine_process, load, of_workers=env) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2)
        (tmp_path / "set").touch()
        done = run.end()
        assert done.code == 0, done.out + done.err
        assert [worker.end().code for worker in workers] == [0, 0]


def test_workers_send_a_trace_of_two_machines_on_time(tmp_path: Path, engine_process: Spawned) -> None:
    """The file that joins the clocks of its senders is next to it, and is sent too."""
    traced = [
        request(index=number, process=process, sent_s=sent_s, cell="c", prompt_tokens=9, output_tokens=3)
        for number, (process, sent_s) in enumerate([(1, 50.0), (2, 9000.0), (1, 50.5), (2, 9000.5)])
    ]
    write_lines(tmp_path / "requests.jsonl", traced)
    marks = [
        ProcessMark(event="start", process=process, host=host, cell="c", wall_s=1000.0, monotonic_s=monotonic_s)
        for process, host, monotonic_s in [(1, "a-1", 40.0), (2, "b-2", 8989.75)]
    ]
    write_lines(tmp_path / "processes.jsonl", marks)
    load = {"user": "batch", "users": 4, "output_tokens": 3, "trace": {"file": "requests.jsonl"}}
    with run_with_workers(tmp_path, engine_process, load, warmup={"requests": 0}) as (run, workers):
        run.end()
        for worker in workers:
            worker.end()
    folder = only_run(tmp_path)
    assert reasons_but_slowness(folder) == []
    starts = {mark.process: mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "start"}
    due: dict[int, float] = {}
    for one in records(tmp_path):
        assert one.scheduled_s is not None
        due[one.index] = one.sent_s + one.scheduled_s + starts[one.process].wall_s - starts[one.process].monotonic_s
    assert [round(due[index] - due[0], 1) for index in (0, 2)] == [0.0, 0.5]
    assert [round(due[index] - due[1], 1) for index in (1, 3)] == [0.0, 0.5]


@fault("worker", "a worker does not come", seen="waiting for workers: 1 of 2 connected; missing: gen2",
       kept="nothing was sent")  # fmt: skip
def test_a_waiting_load_names_the_missing_workers(
    tmp_path: Path, engine_process: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it gives up, which sends home who was there."""
    monkeypatch.setattr(driving, "MAX_WORKER_WAIT_S", 5)
    here, port = socket.gethostname(), free_port()
    workers = Workers(names=["gen2", here], machines=2, bind="127.0.0.1", port=port)
    load = Load(user="chat", users=4, requests=8)
    job, log = make_job(tmp_path, load, workers=workers), tmp_path / "log"
    write_job(job, tmp_path / "job.json")
    arguments = locust_arguments(job, tmp_path / "job.json", ROOT / "locustfiles" / "chat.py", engine_process.url)
    monitor, seen = Monitor(job), list[str]()
    with going("worker", "--master", f"127.0.0.1:{port}", cwd=tmp_path), pytest.raises(RunError) as caught:
        drive(
            lambda: LocalChild([sys.executable, "-m", "locust", *arguments], log), monitor, log_path=log,
            progress=lambda: seen.append(monitor.missing_workers),
        )  # fmt: skip
    waiting = "waiting for workers: 1 of 2 connected; missing: gen2"
    assert seen[-2] == waiting
    assert waiting in caught.value.what


@fault("worker", "a worker of another version, and messages that make no sense",
       seen="they are left out and named in the log; the load goes on and is VALID")  # fmt: skip
def test_unexpected_workers_and_messages_are_rejected(tmp_path: Path, engine_process: Spawned) -> None:
    """The others go on. Each message on its own ended Locust's listener, and with it the load."""
    port = free_port()
    here = socket.gethostname()
    load = {"user": "chat", "users": 2, "requests": 20, "output_tokens": 5}
    scenario = str(write(tmp_path, model="simulated", loads={"l": load}))
    bound = ["--workers", here, "--bind", f"127.0.0.1:{port}"]
    run = ["run", scenario, "--url", engine_process.url, *bound, "--runs", str(tmp_path)]
    with going(*run, cwd=tmp_path) as command:
        until(lambda: not is_port_free(port))
        log = next(tmp_path.glob("*/logs/*locust*"))
        with strangers(port) as stranger:
            another = msgpack.dumps(["stats", None, "another"])
            for garbage in (b"", b"\xc1", b"\x93\x01\x02\x03", msgpack.dumps([1]), another):
                stranger.send(garbage)
            for data in (None, 7, {"__datetime__": True}):
                stranger.send(msgpack.dumps(["client_ready", data, "stranger"]))
            stranger.send(msgpack.dumps(["llm-hello", {"name": here, "version": "0.0.1"}, "stranger"]))
            until(lambda: "worker " in log.read_text())
            with going("worker", "--master", f"127.0.0.1:{port}", "--once", cwd=tmp_path) as worker:
                done = command.end()
                assert worker.end().code == 0
    assert done.code == 0, done.out + done.err
    rejection = f"worker {here} was rejected: it has version 0.0.1 of the harness, and the master {__version__}"
    assert rejection in log.read_text()
    assert log.read_text().count("ignored a message") == 3


@contextmanager
def strangers(port: int) -> Iterator[Any]:
    """A socket that speaks to a master as a worker called `stranger` does."""
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IDENTITY, b"stranger")
    made.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield made
    finally:
        made.close(linger=0)
        context.term()


@fault("worker", "a worker lacks the API key",
       seen="the environment variable SCALE_OUT_KEY, which should hold the API key, is not set", code=3,
       kept="a run marked failed")  # fmt: skip
def test_a_worker_without_the_key_is_named(
    tmp_path: Path, engine_process: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCALE_OUT_KEY", raising=False)
    load = {"user": "chat", "users": 4, "requests": 8, "output_tokens": 5}
    key = {"SCALE_OUT_KEY": "not-a-key"}
    with run_with_workers(tmp_path, engine_process, load, env=key, api_key_env="SCALE_OUT_KEY") as (run, workers):
        done = run.end()
        assert done.code == 3, done.out + done.err
        error = done.err.splitlines()[0]
        assert error.startswith("error: cell r1-running-l: ")
        assert "SCALE_OUT_KEY" in error
        assert sentences(read_run(only_run(tmp_path)).reasons) == [error.removeprefix("error: ")]
        for worker in workers:
            worker.process.send_signal(signal.SIGINT)
            worker.end()


@fault("worker", "Ctrl-C of the run on the master", seen="interrupted; everything that was started has been torn down",
       code=130, kept="all records of all machines")  # fmt: skip
def test_an_interrupted_run_has_all_records(tmp_path: Path, engine_process: Spawned, wording: Wording) -> None:
    load = {"user": "chat", "users": 4, "duration_s": 600, "output_tokens": 5, "think_s": [0.05, 0.05]}
    with run_with_workers(tmp_path, engine_process, load) as (run, workers):
        until(lambda: len({one.process for one in delivered(tmp_path)}) == 2)
        run.interrupt()
        assert run.end().code == 130
        for worker in workers:
            done = worker.end()
            assert done.code == 0
            begun, ended = [line.partition("harness.load.worker: ")[2] for line in done.out.splitlines()[1:]]
            assert "r1-running-l" in begun
            wording(re.sub(r"\d+", "COUNT", ended))
    assert read_run(only_run(tmp_path)).simulated  # as the server has said of itself
    ends = [mark for mark in read_marks(only_run(tmp_path) / "processes.jsonl") if mark.event == "end"]
    assert len(ends) == 2
    assert sum(mark.sent or 0 for mark in ends) == len(records(tmp_path))


STAGES = [{"users": 2, "for_s": 3}, {"users": 8, "for_s": 3}, {"users": 4, "for_s": 3}]
CELLS = ["r1-running-l@2", "r1-running-l@8", "r1-running-l@4"]


def test_the_users_of_all_workers_follow_the_stages(tmp_path: Path, engine_process: Spawned) -> None:
    load = {"user": "chat", "turns": 2, "think_s": [0, 0.1], "ramp_s": 0.3, "output_tokens": 20, "stages": STAGES}
    warmup = {"until": "steady", "max_s": 2}
    with run_with_workers(tmp_path, engine_process, load, warmup=warmup) as (run, workers):
        run.end()
        assert [worker.end().code for worker in workers] == [0, 0]
    folder = only_run(tmp_path)
    assert reasons_but_slowness(folder) == []
    sent = records(tmp_path)
    assert len({(one.cell, one.index) for one in sent}) == len({one.id for one in sent}) == len(sent)
    marks = read_marks(folder / "processes.jsonl")
    spans = []
    for cell, stage in zip(CELLS, STAGES, strict=True):
        of = [one for one in sent if one.cell == cell]
        measured = [one for one in of if one.phase == "measured"]
        # The users of the stage, each machine its half of them, and each machine its part of the stage's sequence.
        assert len({one.user for one in measured}) == stage["users"]
        for number, process in enumerate(sorted({one.process for one in sent})):
            own = [one for one in measured if one.process == process]
            assert len({one.user for one in own}) == stage["users"] / 2
            # Chats are broken off where the stage ends, and those of the warm-up go on into it.
            blocks = sorted({one.index // 2 for one in own if one.index >= 0})
            assert blocks == list(range(blocks[0], blocks[0] + 2 * len(blocks), 2)) and blocks[0] % 2 == number
        spans.append((min(one.sent_s for one in measured), max(one.sent_s for one in measured)))
        ends = [mark for mark in marks if mark.cell == cell and mark.event == "end"]
        assert len(ends) == 2
        assert sum(mark.sent or 0 for mark in ends) == sum(mark.recorded or 0 for mark in ends) == len(of)
    for (_, last), (first, _) in pairwise(spans):
        assert first > last  # of all machines
    assert all(last - first < 4.0 for first, last in spans)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert [row["pooled"]["unfinished"] for row in summary["rows"]] == [0, 0, 0]
    maximum = [cell["server_load"]["running_max"] for cell in summary["cells"]]
    assert all(seen <= stage["users"] for seen, stage in zip(maximum, STAGES, strict=True))
    assert {json.loads(line)["cell"] for line in (folder / "metrics.jsonl").read_bytes().splitlines()} == set(CELLS)
    assert [path.name for path in (tmp_path / "spool").glob("amd-llm-load-*")] == []
