"""What a locustfile that is started by hand can be told, on the command line or in Locust's web form."""

import os
import tempfile
import uuid
from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec
from locust.argument_parser import LocustArgumentParser

from harness.errors import HarnessError
from harness.job import Job, read_job
from harness.scenario import Load, Prompts, Warmup
from harness.workload import salt_words


def add_options(parser: LocustArgumentParser) -> None:
    """Add ours to Locust's options. Those that only make sense at the start are kept out of the web form.

    With a job, its values are the defaults, so that the form shows what will be done.
    """
    job = _job_on_command_line()
    load, prompts = (job.load, job.prompts) if job else (Load(user="by-hand"), Prompts())
    add = parser.add_argument
    add("--job", metavar="FILE", help="job file, written by the harness", include_in_web_ui=False)
    add("--records", metavar="FILE", help="append a record of each request to FILE", include_in_web_ui=False)
    add("--api-key-env", metavar="NAME", help="variable that holds the server's API key", include_in_web_ui=False)
    add("--model", default=job.model if job else "", help="model to ask for (default: the first that is offered)")
    add(
        "--prompts",
        default=(job.prompt_file if job else None) or prompts.kind,
        help="synthetic, classification, or the path of a JSONL file",
    )
    add("--prompt-tokens", type=int, default=prompts.tokens, help="synthetic prompts: length in tokens")
    add("--output-tokens", type=int, default=load.output_tokens, help="most tokens of an answer")
    add("--batch-size", type=int, default=load.batch_size or 1, help="batch agents: requests sent at once")
    add("--turns", type=int, default=load.turns or 4, help="chat users: turns of a conversation")
    add(
        "--think",
        default=" ".join(f"{number:g}" for number in load.think_s or []),
        help="pause in seconds, such as '1 5' (default: as the user class has it)",
    )


def job_file(options: Namespace) -> Job | None:
    """The job that the harness has written, if this process was started with one. Raises HarnessError."""
    if not options.job:
        return None
    try:
        return read_job(Path(options.job))
    except (OSError, msgspec.DecodeError) as error:
        raise HarnessError(f"{options.job}: the job cannot be read ({error})") from None


def job_by_hand(options: Namespace) -> Job:
    """The same for a locustfile started by hand: no end, and prompts that no earlier start has sent."""
    name = f"by-hand-{uuid.uuid4().hex[:8]}"
    job = Job(
        cell=name,
        load_name="",
        load=Load(user="by-hand", output="natural"),
        model="",
        prompts=Prompts(),
        seed=42,
        salt=salt_words(name, name),
        warmup=Warmup(requests=0),
        api_key_env=options.api_key_env,
        requests_path=options.records or os.devnull,
        processes_path=f"{options.records}.processes" if options.records else os.devnull,
        tickets_path=os.path.join(tempfile.gettempdir(), f"{name}.tickets"),
    )
    return with_options(job, options)


def with_options(job: Job, options: Namespace) -> Job:
    """The job as changed in the web form, without an end: there, a person ends it."""
    kind = options.prompts if options.prompts in ("synthetic", "classification") else "file"
    return msgspec.structs.replace(
        job,
        model=options.model,
        prompts=msgspec.structs.replace(job.prompts, kind=kind, tokens=options.prompt_tokens),
        prompt_file=options.prompts if kind == "file" else None,
        load=msgspec.structs.replace(
            job.load,
            requests=None,
            duration_s=None,
            output_tokens=options.output_tokens,
            batch_size=options.batch_size,
            turns=options.turns,
            think_s=_span(options.think),
        ),
    )


def _job_on_command_line() -> Job | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job")
    try:
        return job_file(parser.parse_known_args()[0])
    except HarnessError:
        return None  # said again, and aloud, when the run begins


def _span(text: str) -> list[float] | None:
    """'1 5' as [1, 5], '2' as [2, 2], nothing as None."""
    try:
        numbers = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        numbers = [-1.0]
    if not numbers:
        return None
    if len(numbers) > 2 or numbers[0] < 0 or numbers[-1] < numbers[0]:
        raise HarnessError(f"--think: {text!r} is not a pause", next_step="Give one such as '1 5', in seconds.")
    return [numbers[0], numbers[-1]]
