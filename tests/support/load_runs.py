"""Loads under real Locust, as the harness starts it and by hand; what they leave."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from harness.base.process import free_port
from harness.questions.live import compose_file
from harness.records.records import ProcessMark, Request, read_marks, read_requests
from harness.run.experiment import Experiment
from harness.scenario import Load, Prompts, Scenario, Warmup
from harness.workload.job import Job, write_job
from tests.support import prefork
from tests.support.command import PATIENCE_S

ROOT = Path(__file__).parents[2]


def make_job(folder: Path, load: Load, warmup: Warmup | None = None, **more: object) -> Job:
    job = Job(
        cell="r1-a-b", load_name="b", load=load, model="m", prompts=Prompts(tokens=20), seed=1,
        salt="one two three four", warmup=warmup or Warmup(requests=0), requests_path=str(folder / "requests.jsonl"),
        processes_path=str(folder / "processes.jsonl"), counter_path=str(folder / "counter"),
    )  # fmt: skip
    return msgspec.structs.replace(job, **more)


def composed(scenario: Scenario, server: str = "s", load: str | None = None, **options: Any) -> str:
    """What `harness compose` prints for a scenario that is in no file."""
    return compose_file(Experiment(Path("scenario.yaml"), scenario), server, load, **options)


def start(folder: Path, url: str, locustfile: Path | str, *options: str) -> "subprocess.Popen[str]":
    """Stock Locust; its log goes to FOLDER/locust.log."""
    path = ROOT / "locustfiles" / f"{locustfile}.py" if isinstance(locustfile, str) else locustfile
    command = [sys.executable, "-m", "locust", "-f", str(path), "--host", url, "--only-summary", *options]
    if "--processes" in options:
        port = str(free_port())
        command += ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "locust.log").open("w") as log:
        return prefork.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, text=True)


def start_job(
    folder: Path, url: str, job: Job, *options: str, locustfile: Path | None = None
) -> "subprocess.Popen[str]":
    write_job(job, folder / "job.json")
    users = ["--headless", "--users", str(job.load.users), "--spawn-rate", "100"]
    return start(folder, url, locustfile or job.load.user, *users, "--job", str(folder / "job.json"), *options)


def driven(
    folder: Path,
    url: str,
    load: Load,
    warmup: Warmup | None = None,
    *options: str,
    locustfile: Path | None = None,
    **job: object,
) -> list[Request]:
    """The records of a load that ends well, in the order of the sequence."""
    folder.mkdir(exist_ok=True)
    processes = ["--processes", str(load.processes)] if load.processes > 1 else []
    made = make_job(folder, load, warmup, **job)
    assert end(start_job(folder, url, made, *processes, *options, locustfile=locustfile)) == 0, log_of(folder)
    ends_of(folder, load.processes)
    return sorted(records_of(folder), key=lambda record: record.index)


def by_hand(
    folder: Path, url: str, locustfile: Path | str, *options: str, run_time: str | None = "2s"
) -> list[Request]:
    """The records of a headless load with stock Locust that ends well."""
    common = ["--headless", "--users", "2", "--spawn-rate", "10", "--records", "r.jsonl"]
    common += [] if run_time is None else ["--run-time", run_time]
    assert end(start(folder, url, locustfile, *common, *options)) == 0, log_of(folder)
    return list(read_requests(folder / "r.jsonl"))


def end(process: "subprocess.Popen[str]") -> int:
    try:
        return process.wait(PATIENCE_S)
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
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "requests.jsonl").exists() or len(records_of(folder)) < number:
        assert time.monotonic() < deadline, log_of(folder)
        time.sleep(0.05)


def most_in_flight(records: list[Request]) -> int:
    events = [(r.sent_s, 1) for r in records] + [(r.sent_s + r.ended_s, -1) for r in records]
    level = maximum = 0
    for _, step in sorted(events):
        level += step
        maximum = max(maximum, level)
    return maximum
