"""Our own client: Locust with a user class that ships, every cost included; and the least that there is, in C."""

import sys

import msgspec

from benchmarks.instrument.client import Failed, Said, Work
from benchmarks.instrument.server import compiled
from harness.base.files import LOCUSTFILES
from harness.records.records import read_marks, read_requests
from harness.run.drive import locust_arguments
from harness.scenario import Load, Prompts, Warmup
from harness.workload.job import Job, write_job


def ours(work: Work, processes: int = 1) -> Said:
    """The batch user class that ships, as `harness run` starts it."""
    job, command = our_command(work, processes)
    work.run(command)
    records = list(read_requests(work.folder / "requests.jsonl"))
    failed = [record for record in records if record.error is not None]
    if failed or len(records) != work.requests:
        why = f", {failed[0].error}: {failed[0].message}" if failed else ""
        raise Failed(f"{len(records)} of {work.requests} requests, {len(failed)} of them failed{why}")
    marks = [mark for mark in read_marks(work.folder / "processes.jsonl") if mark.event == "end"]
    chunks = sum(len(record.chunks_s) for record in records)
    shared = sum(record.coalesced for record in records) / chunks
    unstamped = sum(record.clock == "read" for record in records)
    most = max(mark.cpu_max or 0 for mark in marks)
    note = f"{shared:.2%} shared a read, busiest 5 s {most:.0%}" + (f", {unstamped} unstamped" if unstamped else "")
    return Said(records, same_clock=True, note=note)


def our_command(work: Work, processes: int) -> tuple[Job, list[str]]:
    """The job, written to the folder, and Locust's command for it."""
    folder = work.folder
    load = Load(
        user="batch",
        users=work.users,
        processes=processes,
        requests=work.requests,
        output_tokens=work.server.schedule.chunks,
    )
    job = Job(
        cell="c", load_name="batch", load=load, model="paced", prompts=Prompts(tokens=50), seed=1, salt=None,
        warmup=Warmup(requests=0), requests_path=str(folder / "requests.jsonl"),
        processes_path=str(folder / "processes.jsonl"), counter_path=str(folder / "counter"),
    )  # fmt: skip
    write_job(job, folder / "job.json")
    arguments = locust_arguments(job, folder / "job.json", LOCUSTFILES / "batch.py", work.server.url)
    return job, [sys.executable, "-m", "locust", *arguments]


def in_c(work: Work) -> Said:
    """paced_client: the least that reading these streams costs."""
    program = compiled("paced_client", work.folder.parent)
    rounds = max(1, work.requests // work.users)
    told = msgspec.json.decode(work.run([str(program), str(work.server.port), str(work.users), str(rounds)]))
    return Said([], ttft_s=(told["ttft_p50_ms"] / 1000, told["ttft_p99_ms"] / 1000), note="parses nothing")
