"""The files between the harness and the load processes of one cell.

The job, a JSON file, has all that the load processes need. In the status file, JSON Lines, they report why the load
cannot start, and which workers are connected.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.base.errors import HarnessError, sentence
from harness.base.files import read_bytes
from harness.base.redact import register_secrets
from harness.scenario import Load, Prompts, VariableName, Warmup
from harness.scenario.workers import Workers
from harness.workload import Workload
from harness.workload.prompt_file import PromptRow
from harness.workload.traces import Replay

# The environment variable of a load process with the texts that no record may contain, as JSON, see `redact`. They
# are not in the job, because it is a file.
SECRETS_ENV = "AMD_LLM_LOAD_SECRETS"


class JobStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage of a load: a window in which its requests are measured."""

    cell: str  # of the records of this window
    load_name: str
    users: int
    duration_s: float


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The work of one load generator: a load, or the loads of a mix.

    Paths are absolute for the load process; a secret is only a variable's name.
    """

    run: str = ""  # the random part of the run's id, for unique request ids; empty with stock Locust
    cell: str
    load_name: str
    load: Load
    model: str
    prompts: Prompts
    prompt_file: str | None = None
    trace_file: str | None = None
    trace_marks: str | None = None  # processes.jsonl next to the trace: aligns the clocks of its load processes
    prompt_lengths: list[tuple[int, int]] = []  # the lines of a length file
    output_lengths: list[tuple[int, int]] = []
    words: list[str] = []  # the words of one token each, where tokens are counted; else all words
    seed: int
    salt: str | None = None  # words before each prompt
    warmup: Warmup
    api_key_env: str | None = None
    requests_path: str  # requests.jsonl of the run, appended to by every process
    processes_path: str  # processes.jsonl of the run
    counter_path: str  # the cell's shared counter: which request of the sequence comes next
    simulated: bool = False  # the server is the embedded engine, which every page shows
    checks: str = ""  # of a live load, for its goodput
    machine: int = 0  # number, from 0, of the machine that sends this part of the sequence ...
    machines: int = 1  # ... and the number of machines; each has its own counter
    stages: list[JobStage] = []  # of a load with stages; `cell`, `load_name` and `load` are those of the first
    others: list["Job"] = []  # the other loads of a mix; counter, model, warm-up and the like are those of this job
    locustfile: str = ""  # the file name, by which the user classes of the loads of a mix differ
    workers: Workers | None = None  # of the master: the machines that it waits for
    # Write the requests in flight that are at least so old into in_flight_file; None: do not. Of a capacity probe.
    report_after_s: float | None = None


def loads_of(job: Job) -> list[Job]:
    """Return the jobs of all loads that one load generator sends: one, or those of a mix."""
    return [job, *job.others]


def cells_of(job: Job) -> list[tuple[str, str]]:
    """Return the cells of a job's records, each with the name of its load: of a stage, or of a load of a mix."""
    if job.stages:
        return [(stage.cell, stage.load_name) for stage in job.stages]
    return [(load_job.cell, load_job.load_name) for load_job in loads_of(job)]


def user_count(job: Job) -> int:
    """Return the users at the start of the load: of all loads of a mix."""
    return sum(load_job.load.users for load_job in loads_of(job))


def max_users(job: Job) -> int:
    """Return how many users a load has at most."""
    return max((stage.users for stage in job.stages), default=job.load.users)


def workload_of(job: Job, rows: Sequence[PromptRow], replay: Replay | None = None) -> Workload:
    """Return the requests of a job. `rows`: of its prompt file; `replay`: of its trace."""
    return Workload(
        job.prompts, job.load, job.seed, job.salt, rows, job.prompt_lengths, job.output_lengths, job.words, replay
    )


def secrets_of_server() -> dict[str, bool]:
    """Return the secrets that the server was started with, for a load process."""
    return msgspec.json.decode(os.environ.get(SECRETS_ENV, "{}"), type=dict[str, bool])


def read_api_key(name: str | None) -> str | None:
    """Return the API key in this environment variable, and mask it from now on; None without a name.

    Raises HarnessError for another text than a name, if there is no key, or if a header of HTTP cannot carry it.
    """
    if name is None:
        return None
    try:
        msgspec.convert(name, VariableName)
    except (msgspec.ValidationError, UnicodeError):  # the text is not shown: it may be the key
        raise HarnessError(
            "the API key: what is given is not the name of an environment variable (letters, digits and _)",
            next_step="Give the NAME of the variable that holds the key, never the key itself.",
        ) from None
    key = os.environ.get(name, "").strip()
    if not key:
        raise HarnessError(
            f"the environment variable {name}, which should hold the API key, is not set",
            next_step=f"export {name}=... before the run; the key is never written anywhere.",
        )
    register_secrets({key: True})
    unusable = [number for number, char in enumerate(key, start=1) if ord(char) > 255 or not char.isprintable()]
    if unusable:
        raise HarnessError(
            f"the environment variable {name}: character {unusable[0]} of the API key cannot be sent in a header of "
            "HTTP (it is a line end, a control character, or outside of latin-1)",
            next_step=f"export {name} with the key alone, on one line.",
        )
    return key


def in_flight_file(counter_path: str, process: int | str) -> Path:
    """The file of a load process with its old requests in flight, as records that the end of the load cuts now."""
    return Path(f"{counter_path}.in-flight.{process}")


def idle_file(counter_path: str) -> Path:
    """The file that is touched each second while no request is due; see LoadProcess.is_quiet."""
    return Path(f"{counter_path}.quiet")


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report of a load process: one of these."""

    error: str | None = None  # for which the load cannot start or cannot go on
    workers: list[str] | None = None  # machines whose workers are connected; of the master, which waits for the others
    stage: int = 0  # that has started; of the process that leads the load


def status_file(counter_path: str) -> Path:
    """The file to which the load processes of a cell append their reports."""
    return Path(f"{counter_path}.status")


def report_status(job: Job, status: Status) -> None:
    """Append to the status file. A failure is ignored: the log has the report too."""
    with contextlib.suppress(OSError), status_file(job.counter_path).open("ab") as file:
        file.write(msgspec.json.encode(status) + b"\n")


def report_error(job: Job, error: Exception) -> None:
    """Append to the status file why the load cannot start or go on."""
    report_status(job, Status(error=sentence(error if isinstance(error, HarnessError) else HarnessError(str(error)))))


def read_status(job: Job) -> list[Status]:
    """Return all reports of a cell's load processes so far, without an incomplete last line."""
    try:
        *lines, _ = read_bytes(status_file(job.counter_path)).split(b"\n")
    except OSError:
        return []
    reports = list[Status]()
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            reports.append(msgspec.json.decode(line, type=Status))
    return reports


def encode_job(job: Job) -> str:
    """Return the job as text for a command line, without empty fields, which are the defaults."""
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
