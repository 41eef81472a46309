"""The files between the harness and the load processes of one cell.

The job, one JSON file, is all that they need to know. The status file, one JSON object a line, is what they report: why
the load cannot start, and which workers have come.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError, SeveralErrors, sentence
from harness.files import read_bytes
from harness.scenario import Load, Prompts, Warmup
from harness.workers import Workers
from harness.workload import Workload
from harness.workload.prompt_file import PromptRow
from harness.workload.traces import Replay

# Of a load process: the texts that must not get into a record, whatever a server says, as JSON of `know`. They come
# by the environment, as the API key does, because a job is a file.
SECRETS_ENV = "AMD_LLM_LOAD_SECRETS"


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cell's work. Paths are absolute, as the load process sees them; secrets are only named."""

    run: str = ""  # a few characters of the run's id, which make request ids differ between runs; none by hand
    cell: str
    load_name: str
    load: Load
    model: str
    prompts: Prompts
    prompt_file: str | None = None
    trace_file: str | None = None
    trace_marks: str | None = None  # processes.jsonl next to it: joins the clocks of the processes that sent it
    prompt_lengths: list[tuple[int, int]] = []  # where a file of lengths says them: its lines
    output_lengths: list[tuple[int, int]] = []
    words: list[str] = []  # those that are one token each, where tokens are counted; else all of them
    seed: int
    salt: str | None = None  # words put before each prompt; None: nothing
    warmup: Warmup
    api_key_env: str | None = None
    requests_path: str  # requests.jsonl of the run, appended to by every process
    processes_path: str  # processes.jsonl of the run
    counter_path: str  # the cell's shared counter: which request of the sequence comes next
    simulated: bool = False  # the server is the embedded engine, which every page shows
    slos: str = ""  # of a live load, for the goodput that is shown
    machine: int = 0  # whose part of the sequence this is, from 0 ...
    machines: int = 1  # ... of so many that send it; each of them has a counter of its own
    then: list["Job"] = []  # the further stages of a load whose number of users changes; each has a counter of its own
    concurrent_loads: list[str] = []  # of a load of a mix: the counter_path of each other one
    workers: Workers | None = None  # of the master: the machines that it waits for


def workload_of(job: Job, rows: Sequence[PromptRow], replay: Replay | None = None) -> Workload:
    """The requests of a job. `rows`: of its file of prompts; `replay`: of its trace."""
    return Workload(
        job.prompts, job.load, job.seed, job.salt, rows, job.prompt_lengths, job.output_lengths, job.words, replay
    )


def secrets_of(job: Job) -> dict[str, bool]:
    """The texts that this process knows and no record may hold: the API key, and what the server was started with."""
    key = os.environ.get(job.api_key_env, "").strip() if job.api_key_env else None
    served = msgspec.json.decode(os.environ.get(SECRETS_ENV, "{}"), type=dict[str, bool])
    return served | ({key: True} if key else {})


def warmup_done_file(counter_path: str) -> Path:
    """The file whose being there says that the warm-up of a part of a mix is over, or that it has ended."""
    return Path(f"{counter_path}.warm")


def idle_file(counter_path: str) -> Path:
    """The file that is touched each second while the load has nothing due: see LoadProcess.is_quiet."""
    return Path(f"{counter_path}.quiet")


class GaveUp(msgspec.Struct, frozen=True, tag_field="code", tag="gave_up"):
    """A load process reports a HarnessError for which the load cannot start or cannot go on."""

    what: str
    next_step: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        return sentence(HarnessError(self.what, next_step=self.next_step, detail=self.detail))


class WaitsForWorkers(msgspec.Struct, frozen=True, tag_field="code", tag="waits_for_workers"):
    """The master reports which workers have come, by the names of their machines."""

    here: list[str]


Status = GaveUp | WaitsForWorkers


def status_file(counter_path: str) -> Path:
    """The file to which the load processes of a cell append what they report."""
    return Path(f"{counter_path}.status")


def report_status(job: Job, status: Status) -> None:
    """Append to the status file. A full disk must not hide the error that is reported: it is in the log as well."""
    with contextlib.suppress(OSError), status_file(job.counter_path).open("ab") as file:
        file.write(msgspec.json.encode(status) + b"\n")


def report_error(job: Job, error: Exception) -> None:
    """Append to the status file why the load cannot start or go on."""
    for one in error.errors if isinstance(error, SeveralErrors) else [error]:
        known = one if isinstance(one, HarnessError) else HarnessError(str(one))
        report_status(job, GaveUp(known.what, known.next_step, known.detail))


def read_status(job: Job) -> list[Status]:
    """All that the load processes of a cell have reported so far. A line that is not complete yet is left out."""
    try:
        *lines, _ = read_bytes(status_file(job.counter_path)).split(b"\n")
    except OSError:
        return []
    found = list[Status]()
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=Status))
    return found


def encode_job(job: Job) -> str:
    """The job for a command line: what is empty is left out, which is its default."""
    return msgspec.json.encode(_drop_empty(msgspec.to_builtins(job))).decode()


def _drop_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_empty(inner) for key, inner in value.items() if inner not in (None, "", [])}
    return [_drop_empty(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_job(job: Job, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=1))


def read_job(path: Path) -> Job:
    return decode_job(read_bytes(path))


def decode_job(text: bytes | str) -> Job:
    return msgspec.json.decode(text, type=Job)
