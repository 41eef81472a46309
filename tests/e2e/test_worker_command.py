"""`harness worker`: one load after another, lost load processes, and how it ends."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.base.files import ROOT
from harness.base.process import free_port
from harness.records.records import read_requests
from harness.run import drive as driving
from harness.run.drive import LocalChild, Monitor, drive, locust_arguments
from harness.scenario import Load
from harness.scenario.workers import Workers
from harness.workload.job import write_job
from tests.support import prefork
from tests.support.command import delivered, going, records, until, write
from tests.support.load_runs import make_job
from tests.support.simulated import Spawned
from tests.support.wording import Wording


def test_a_killed_load_process_is_there_again_for_the_next_run(tmp_path: Path, engine_process: Spawned) -> None:
    """And neither it nor a third machine, which was not asked for, has a part of the load that is under way."""
    load = {"user": "chat", "users": 4, "duration_s": 2, "output_tokens": 5, "think_s": [0.05, 0.05]}
    scenario = write(tmp_path, model="simulated", loads={"l": load})
    long = write(tmp_path, "long", model="simulated", loads={"l": load | {"duration_s": 600}})
    address = f"127.0.0.1:{free_port()}"
    run = ["--url", engine_process.url, "--workers", "2", "--bind", address]
    own = {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp" / "chat.py").mkdir(parents=True)  # of somebody else: Locust puts the locustfile there
    first, second = tmp_path / "first", tmp_path / "second"
    with ExitStack() as stack:
        lent = [stack.enter_context(going("worker", "--master", address, cwd=tmp_path, env=own)) for _ in range(2)]
        lost = stack.enter_context(going("run", str(long), *run, "--runs", str(first), cwd=tmp_path))
        until(lambda: len({one.process for one in delivered(first)}) == 2)
        for process in lent[0].others("locust"):
            process.kill()
        assert lost.end().code == 3
        whole = stack.enter_context(going("run", str(scenario), *run, "--runs", str(second), cwd=tmp_path))
        until(lambda: len({one.process for one in delivered(second)}) == 2)
        lent.append(stack.enter_context(going("worker", "--master", address, cwd=tmp_path, env=own)))
        done = whole.end()
        assert done.code == 0, done.out + done.err
        for worker in lent:
            worker.interrupt()
        killed, other, third = (worker.end().out.splitlines() for worker in lent)
    assert {one.user for one in records(second)} == {0, 1, 2, 3}
    waits, begins, ended = f"waiting for a load from {address}", "load r1-running-l of run", "the load has ended"
    cut = "the load has ended, cut short because"
    gone = "the load process was ended by SIGKILL, as the kernel does when memory runs out"
    for printed, expected in (
        (killed, [waits, begins, gone, waits, begins, ended, waits]),
        (other, [waits, begins, cut, waits, begins, ended, waits]),
        (third, [waits]),
    ):
        lines = [line.rpartition("harness.load.worker: ")[2] for line in printed]
        assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_a_killed_load_process_is_not_followed_by_another_where_one_load_was_lent(
    tmp_path: Path, wording: Wording
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with going("worker", "--master", address, "--once", cwd=tmp_path) as worker:
        until(lambda: bool(worker.others("locust")))
        for process in worker.others("locust"):
            process.kill()
        done = worker.end()
    first = done.out.splitlines()[0]
    assert done.code == 1 and address in first
    wording(first)
    assert "SIGKILL" in done.out.splitlines()[1]


@pytest.mark.nightly  # test_a_killed_load_process_is_there_again_for_the_next_run has two loads of one process each
def test_workers_serve_one_load_after_the_other(tmp_path: Path, engine_process: Spawned) -> None:
    """Two machines with two processes each, two repeats: each load has a master of its own, and the workers find it."""
    load = {"user": "batch", "users": 4, "processes": 2, "batch_size": 3, "requests": 50, "output_tokens": 5}
    scenario = write(tmp_path, model="simulated", loads={"l": load}, repeats=2)
    address = f"127.0.0.1:{free_port()}"
    run = ["run", str(scenario), "--url", engine_process.url, "--workers", "2", "--bind", address]
    with ExitStack() as stack:
        worker = ("worker", "--master", address, "--processes", "2")
        workers = [stack.enter_context(going(*worker, cwd=tmp_path)) for _ in range(2)]
        done = stack.enter_context(going(*run, "--runs", str(tmp_path), cwd=tmp_path)).end()
        assert done.code == 0, done.out + done.err
        assert f"harness worker --master {address} --processes 2" in done.out
        for one in workers:
            one.interrupt()
            assert one.end().code == 130
            one.nothing_left()
    measured = [one for one in records(tmp_path) if one.phase == "measured"]
    for cell in {one.cell for one in measured}:
        assert sorted(one.index for one in measured if one.cell == cell) == list(range(50))
        assert len({one.process for one in measured if one.cell == cell}) == 4
    assert len(measured) == 100


def test_workers_that_are_quiet_by_schedule_go_on(
    tmp_path: Path, engine_process: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master hears of it: what the workers wait for is on their machines only."""
    monkeypatch.setattr(subprocess, "Popen", prefork.Popen)  # on a busy machine a start takes longer than is waited
    monkeypatch.setattr(driving, "MAX_SILENCE_S", 9.0)
    monkeypatch.setattr(driving, "SLOWEST_TPOT_S", 0.0)
    load = Load(user="batch", users=2, requests=4, output_tokens=5, timeout_s=1.0, think_s=[15.0, 15.0])
    workers = Workers(machines=2, bind="127.0.0.1", port=free_port())
    job = make_job(tmp_path, load, workers=workers, model="simulated")
    write_job(job, tmp_path / "job.json")
    file, log = ROOT / "locustfiles" / "batch.py", tmp_path / "log"
    command = [sys.executable, "-m", "locust", *locust_arguments(job, tmp_path / "job.json", file, engine_process.url)]
    with ExitStack() as stack:
        worker = ("worker", "--master", f"127.0.0.1:{workers.port}", "--once")
        lent = [stack.enter_context(going(*worker, cwd=tmp_path)) for _ in range(2)]
        driven = drive(lambda: LocalChild(command, log), Monitor(job), log_path=log)
        assert [one.end().code for one in lent] == [0, 0]
    assert driven.problems == []
    assert [one.error for one in read_requests(tmp_path / "requests.jsonl")] == [None] * 4
