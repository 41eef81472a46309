"""A cell without a server: its requests, all at once, through vLLM's offline engine, as ordinary records.

The bound that serving can come near: the same prompts, lengths and seed as the same load sends to a server, without
HTTP, and with nobody waiting for a burst to end. See docs/vllm.md.
"""

from pathlib import Path

import msgspec

from harness import workload
from harness.errors import RunError
from harness.job import Job
from harness.run.running import Running
from harness.rundir.manifest import CellRun
from harness.rundir.records import ProcessMark, Request
from harness.scenario.plan import Cell
from harness.serve.vllm.offline import Outcome, run_offline

PROCESS = 1  # the job's number in its container


def offline_cell(running: Running, cell: Cell, job: Job) -> CellRun:
    """Run one cell and append its records to the run's files. Raises ServerError, RunError."""
    outcome = run_offline(
        running.scenario,
        cell.server,
        requests_of(job),
        run_id=running.id,
        cell_id=cell.id,
        run_folder=running.folder,
        say=running.progress.stage,
    )
    encoder = msgspec.json.Encoder()
    records = records_of(job, outcome)
    with Path(job.requests_path).open("ab") as file:
        file.writelines(encoder.encode(record) + b"\n" for record in records)
    with Path(job.processes_path).open("ab") as file:
        file.writelines(encoder.encode(mark) + b"\n" for mark in _marks(job, outcome, len(records)))
    head = outcome.head
    return CellRun(
        **msgspec.structs.asdict(cell),
        started_wall_s=head.wall_s,
        ended_wall_s=head.wall_s + head.ended_s - head.monotonic_s,
        served_by=outcome.served_by,
    )


def requests_of(job: Job) -> bytes:
    """What the cell would send to a server, warm-up first, a JSON object a line."""
    rows = workload.read_rows(job.prompt_file) if job.prompt_file else []
    warmup = [-1 - number for number in range(job.warmup.requests or 0)]
    lines = [
        {
            "index": index,
            "phase": "warmup" if index < 0 else "measured",
            "messages": workload.messages(job.prompts, job.seed, index, job.salt, rows, job.prompt_lengths, job.words),
            "max_tokens": workload.output_tokens(job.load, job.seed, index, rows, job.output_lengths),
            "ignore_eos": job.load.output == "fixed",
        }
        for index in [*warmup, *range(job.load.requests or 0)]
    ]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def records_of(job: Job, outcome: Outcome) -> list[Request]:
    """A record for each answer. No chunk has a time: nobody was listening."""
    planned = (job.warmup.requests or 0) + (job.load.requests or 0)
    if len(outcome.lines) != planned:
        raise RunError(f"cell {job.cell}: {planned} requests were planned and {len(outcome.lines)} were answered")
    rows = workload.read_rows(job.prompt_file) if job.prompt_file else []
    return [
        Request(
            id="-".join(part for part in (job.run, job.cell, str(line.index).replace("-", "w")) if part),
            cell=job.cell,
            load=job.load_name,
            user_class="Offline",
            index=line.index,
            user=0,
            process=PROCESS,
            phase="warmup" if line.index < 0 else "measured",
            sent_s=line.began_s,
            ended_s=line.ended_s - line.began_s,
            asked_tokens=workload.output_tokens(job.load, job.seed, line.index, rows, job.output_lengths),
            fixed_length=job.load.output == "fixed",
            prompt_tokens=line.prompt_tokens,
            output_tokens=line.output_tokens,
            cached_tokens=line.cached_tokens,
            finish=line.finish,
        )
        for line in outcome.lines
    ]


def _marks(job: Job, outcome: Outcome, number: int) -> list[ProcessMark]:
    head = outcome.head
    ended_wall_s = head.wall_s + head.ended_s - head.monotonic_s
    return [
        ProcessMark(event="start", process=PROCESS, cell=job.cell, wall_s=head.wall_s, monotonic_s=head.monotonic_s),
        ProcessMark(
            event="end",
            process=PROCESS,
            cell=job.cell,
            wall_s=ended_wall_s,
            monotonic_s=head.ended_s,
            sent=number,
            recorded=number,
        ),
    ]
