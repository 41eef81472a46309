"""The options of a locustfile that runs with stock Locust, on the command line and in Locust's web form, as a Job.

An option is one line of a table, `OPTIONS`. The types of the scenario say which values are possible.
"""

import os
import re
import tempfile
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner
from locust.util.timespan import parse_timespan

from harness.errors import HarnessError, Mistakes, Problem
from harness.files import UNDECODABLE
from harness.job import Job, job_of_text, read_job
from harness.load.client import ApiAddress
from harness.load.process import JobInputs, api_key, first_model
from harness.scenario import MAX_USERS, TURNS, Arrivals, Load, Prompts, Users, Warmup
from harness.scenario.behaviour import Abandon, Agent, Rag
from harness.scenario.check_syntax import Slo, parse_check
from harness.scenario.file import decode
from harness.workers import FROM_MASTER, parse_part
from harness.workload import salt_words

UNDER_WAY = (STATE_SPAWNING, STATE_RUNNING)
_YES_NO = ["yes", "no"]
_AS_PLANNED = "as in the scenario"  # a value that is not one number: a distribution of lengths, a rate that changes
_MAX_RUN_TIME_S = 10_000_000  # as the longest load of a scenario
_AMOUNTS: dict[str, tuple[Any, str]] = {  # Locust's own options that say how much, and their bounds
    "users": (Users, f"a whole number of 1 to {MAX_USERS:,}"),
    "spawn_rate": (Annotated[float, msgspec.Meta(gt=0, le=MAX_USERS)], f"a number above 0, at most {MAX_USERS:,}"),
    "run_time": (
        Annotated[int, msgspec.Meta(ge=0, le=_MAX_RUN_TIME_S)],
        f"a time of at most {_MAX_RUN_TIME_S:,} s, such as 90, 20m or 1h30m",
    ),
}


def _write(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _read(text: str, planned: Any) -> Any:
    """A text or a number, by the planned value. Other text stays, and the type of the field rejects it."""
    if isinstance(planned, str):
        return text
    try:
        return (float if isinstance(planned, float) else int)(text) if text else None
    except ValueError:
        return text


def _write_tokens(tokens: object) -> str:
    return str(tokens) if isinstance(tokens, int) else _AS_PLANNED


def _read_prompts(text: str, job: Job) -> Job:
    kind = text if text in ("synthetic", "classification") else "file"
    prompts = msgspec.structs.replace(job.prompts, kind=kind)
    return msgspec.structs.replace(job, prompts=prompts, prompt_file=text if kind == "file" else None)


def _write_stream(stream: bool) -> str:
    return _YES_NO[not stream]


def _read_stream(text: str, _: Any) -> bool:
    return not _YES_NO.index(text)


def _write_think(load: Load) -> str:
    pause = load.think
    if pause is None:
        return " ".join(f"{number:g}" for number in load.think_s or [])
    drawn = f"lognormal, sigma {pause.sigma:g}" if pause.distribution == "lognormal" else pause.distribution
    bound = "" if pause.max_s is None else f", at most {pause.max_s:g}"
    return f"{pause.mean_s:g} on the mean ({drawn}{bound})"


def _read_think(text: str, load: Load) -> Load:
    """A uniform pause, '1 5' or '2'; an empty text: none."""
    numbers = [float(word) for word in text.replace(",", " ").split()]
    if numbers and (len(numbers) > 2 or not 0 <= numbers[0] <= numbers[-1]):
        raise ValueError
    return msgspec.structs.replace(load, think=None, think_s=[numbers[0], numbers[-1]] if numbers else None)


def _write_abandon(abandon: Abandon | None) -> str:
    if abandon is None:
        return ""
    when = f"{abandon.after_tokens} tokens" if abandon.after_s is None else f"{abandon.after_s:g}s"
    return f"{abandon.share:.6g} after {when}"


def _read_abandon(text: str, _: Any) -> Abandon | None:
    """'5% after 3s' or '0.05 after 40 tokens'; an empty text: no user leaves."""
    if not text.strip():
        return None
    found = re.fullmatch(r"\s*([\d.e-]+) ?(%?) after (?:([\d.e+-]+) ?s|(\d+) ?tokens)\s*", text)
    if found is None:
        raise ValueError
    share, percent, after_s, after_tokens = found.groups()
    given = {
        "share": float(share) / (100 if percent else 1),
        "after_s": float(after_s) if after_s else None,
        "after_tokens": int(after_tokens) if after_tokens else None,
    }
    return msgspec.convert(given, Abandon)


def _write_arrivals(arrivals: Arrivals | None) -> str:
    if arrivals is None:
        return ""
    return _AS_PLANNED if arrivals.rate is None else f"{arrivals.rate:g}"


def _read_arrivals(text: str, planned: Arrivals | None) -> Arrivals | None:
    """The scenario's spacing at another rate; an empty text: a closed loop."""
    if not text.strip():
        return None
    rate = float(text)
    if not 0 < rate <= 1e7:
        raise ValueError
    return msgspec.structs.replace(planned or Arrivals(), rate=rate, points=None, wave=None)


def _write_warmup(warmup: Warmup) -> str:
    return warmup.until or (_AS_PLANNED if warmup.requests is None else str(warmup.requests))


def _read_warmup(text: str, _: Any) -> Warmup:
    if text == "steady":
        return Warmup(until="steady")
    if not text.isascii() or not text.isdigit():
        raise ValueError
    return Warmup(requests=int(text))


def slos_of(text: str) -> tuple[Slo, ...]:
    """The SLOs in a text such as "ttft<=2s, tpot<=50ms"; none in an empty one. Raises ValueError."""
    return parse_check(f"attainment({text}) >= 0").slos if text.strip() else ()


def _read_slos(text: str, _: Any) -> str:
    slos_of(text)
    return text


class Option(NamedTuple):
    field: str  # of the Job, whose value is the default; empty: several
    help: str
    read: Callable[[str, Any], Any] = _read  # from the text and the planned value. Raises ValueError
    write: Callable[[Any], str] = _write
    choices: list[str] | None = None
    expected: str = ""  # what `read` takes

    def text(self, job: Job) -> str:
        return self.write(_value(job, self.field))


OPTIONS = {  # of the web form and the command line
    "--model": Option("model", "model to ask for (default: the first that the server offers)"),
    "--prompts": Option(
        "", "synthetic, classification, or the path of a JSONL file", _read_prompts,
        lambda job: job.prompt_file or job.prompts.kind,
    ),
    "--prompt-tokens": Option("prompts.tokens", "synthetic prompts: length in tokens", write=_write_tokens),
    "--system-tokens": Option("prompts.system_tokens", "tokens of a system prompt that all requests share"),
    "--output-tokens": Option("load.output_tokens", "maximum tokens of an answer", write=_write_tokens),
    "--output": Option(
        "load.output", "fixed: every answer has that length (ignore_eos); natural: stop at end-of-sequence",
        choices=["fixed", "natural"],
    ),
    "--endpoint": Option(
        "load.endpoint", "endpoint to load: chat, completions or embeddings",
        choices=["chat", "completions", "embeddings"],
    ),
    "--stream": Option("load.stream", "stream the answers", _read_stream, _write_stream, _YES_NO, "yes or no"),
    "--batch-size": Option("load.batch_size", "batch agents: requests sent at once"),
    "--in-flight": Option("load.in_flight", "batch agents: requests always in flight, instead of bursts"),
    "--steps": Option("load.agent.steps", "agents with tools: model calls of a task"),
    "--sub-agents": Option("load.agent.sub_agents", "agents with tools: sub-agents that each task starts"),
    "--documents": Option("load.rag.documents", "users of documents: number of documents"),
    "--document-tokens": Option("load.rag.document_tokens", "users of documents: length of each"),
    "--turns": Option("load.turns", "chat users: turns of a conversation"),
    "--abandon": Option(
        "load.abandon", "chat users who leave: '0.05 after 3s' or '0.05 after 40 tokens'", _read_abandon,
        _write_abandon, expected="a share of at most 100% and a time, such as '5% after 3s' or '0.05 after 40 tokens'",
    ),
    "--regenerate": Option("load.regenerate", "chat users: share of questions that are asked again"),
    "--think": Option(
        "load", "pause in seconds, such as '1 5' (empty with stock Locust: that of the user class)", _read_think,
        _write_think, expected="seconds, such as '1 5'",
    ),
    "--arrivals": Option(
        "load.arrivals", "open loop: arrivals a second (empty: closed loop, users wait for answers)", _read_arrivals,
        _write_arrivals, expected="a number above 0, in arrivals a second, or empty",
    ),
    "--timeout": Option("load.timeout_s", "seconds of silence after which a request has failed"),
    "--warmup": Option(
        "warmup", "requests that are sent first and do not count; steady: until the server is steady", _read_warmup,
        _write_warmup, expected="a number of requests, or 'steady'",
    ),
    "--slos": Option(
        "slos", "for goodput, such as 'ttft<=2s, tpot<=50ms'", _read_slos,
        expected="SLOs such as 'ttft<=2s, tpot<=50ms'",
    ),
}  # fmt: skip
_OF_CLASSES = (  # options that a user class ignores unless its `uses` names them
    "--batch-size", "--in-flight", "--steps", "--sub-agents", "--documents", "--document-tokens", "--turns",
    "--abandon", "--regenerate",
)  # fmt: skip
_START_ONLY = {  # not in the web form
    "--job": ("FILE", "job file, written by the harness, or its text"),
    "--records": ("FILE", "append a record of each request to FILE"),
    "--machine": ("K/M", "send part K, from 0, of M parts of the sequence; other machines send the others"),
    "--api-key-env": ("NAME", "variable that holds the server's API key"),
    "--metrics-port": ("PORT", "serve /metrics for Prometheus on this port; the web UI has it on its own port"),
    "--metrics-host": ("ADDRESS", "address of --metrics-port (default: 127.0.0.1)"),
}


def field_name(option: str) -> str:
    """The name of an option in Locust's namespace and web form."""
    return option.removeprefix("--").replace("-", "_")


def unused_options(classes: Iterable[type]) -> list[str]:
    """The options that none of these user classes uses. A class that does not say what it uses may use all."""
    used = [getattr(one, "uses", None) for one in classes]
    named = {name for uses in used for name in uses or ()}
    return [] if None in used else [name for name in _OF_CLASSES if name not in named]


def fields_of_others(environment: Environment) -> set[str]:
    """The fields of the web form that only other user classes have a use for."""
    to_choose: dict[str, Any] = environment.available_user_classes or {}  # of Locust's class picker
    return set(map(field_name, unused_options(list(to_choose.values()) or environment.user_classes)))


def ignored_options(environment: Environment) -> list[str]:
    """A sentence for each option that was given, and that the running user classes ignore."""
    options, defaults = options_of(environment), _with_defaults(_stock_job())
    names = " and ".join(sorted(one.__name__ for one in environment.user_classes))
    return [
        f"{option}: {names} ignores this option (got {getattr(options, field_name(option))!r})"
        for option in unused_options(environment.user_classes)
        if getattr(options, field_name(option)) != OPTIONS[option].text(defaults)
    ]


def add_options(parser: LocustArgumentParser) -> None:
    """Add ours to Locust's options. With a job, its values are the defaults, so that the form shows them."""
    parser.set_defaults(web_host="127.0.0.1")  # Locust's UI is open to all of the network otherwise
    for name, (metavar, help) in _START_ONLY.items():
        parser.add_argument(name, metavar=metavar, help=help, include_in_web_ui=False)
    job = _with_defaults(_job_on_command_line() or _stock_job())
    for name, option in OPTIONS.items():
        parser.add_argument(name, default=option.text(job), choices=option.choices, help=option.help)


def _value(struct: Any, field: str) -> Any:
    for name in filter(None, field.split(".")):
        struct = getattr(struct, name)
    return struct


def _replaced(struct: Any, field: str, value: Any) -> Any:
    name, _, rest = field.partition(".")
    return msgspec.structs.replace(struct, **{name: _replaced(getattr(struct, name), rest, value)}) if name else value


def _with_defaults(job: Job) -> Job:
    """The job with the defaults of user classes: the form shows them, whatever the class is."""
    load = msgspec.structs.replace(
        job.load,
        agent=job.load.agent or Agent(),
        rag=job.load.rag or Rag(),
        turns=job.load.turns or TURNS,
        batch_size=job.load.batch_size or 1,
    )
    return msgspec.structs.replace(job, load=load)


def _stock_job() -> Job:
    """The job of a locustfile with stock Locust: without an end, and with prompts that no earlier start has sent."""
    name = f"by-hand-{uuid.uuid4().hex[:8]}"
    return Job(
        cell=name,
        load_name="",
        load=Load(user="by-hand", output="natural"),
        model="",
        prompts=Prompts(),
        seed=42,
        salt=salt_words(name, name),
        warmup=Warmup(requests=0),
        requests_path=os.devnull,
        processes_path=os.devnull,
        counter_path=os.path.join(tempfile.gettempdir(), f"{name}.counter"),
    )


def check_amounts(**given: object) -> None:
    """Raise HarnessError when `users`, `spawn_rate` or `run_time` (s) are out of bounds.

    Values are numbers or the texts of a form; None: not given.
    """
    for name, value in given.items():
        type_, expected = _AMOUNTS[name]
        try:
            number = parse_timespan(value) if name == "run_time" and isinstance(value, str) else value
            if number is not None:
                msgspec.convert(number, type_, strict=False)
        except (ValueError, OverflowError):
            raise HarnessError(f"--{name.replace('_', '-')}: must be {expected} (got {repr(value)[:60]})") from None


def job_file(options: Namespace) -> Job | None:
    """The job that the harness has written, if this process was started with one. Raises HarnessError."""
    if not options.job or options.job == FROM_MASTER:
        return None
    try:
        job = job_of_text(options.job) if options.job.startswith("{") else read_job(Path(options.job))
    except (OSError, *UNDECODABLE) as error:
        raise HarnessError(f"--job {options.job:.100}: the job cannot be read ({error})") from None
    return _with_machine(job, options)


def _job_on_command_line() -> Job | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job")
    try:
        return job_file(parser.parse_known_args()[0])
    except HarnessError:
        return None  # reported when the run starts


def _with_machine(job: Job, options: Namespace) -> Job:
    if not getattr(options, "machine", None):
        return job
    machine, machines = parse_part(options.machine)
    return msgspec.structs.replace(job, machine=machine, machines=machines)


def with_options(job: Job, options: Namespace) -> Job:
    """The job as changed by options or the web form, without an end: the user stops the load.

    Raises HarnessError for values that no scenario may have, for all of them together.
    """
    wrong = Mistakes()
    planned = changed = _with_defaults(job)
    for name, option in OPTIONS.items():
        text = getattr(options, field_name(name))
        if text != option.text(planned):
            try:
                changed = _replaced(changed, option.field, option.read(text, _value(changed, option.field)))
            except ValueError:
                wrong.add(HarnessError(f"{name}: must be {option.expected} (got {repr(text)[:60]})"))
    load = changed.load
    if load.in_flight and load.batch_size not in (0, 1):
        wrong.add(HarnessError("--in-flight: give one of --batch-size (bursts) and --in-flight"))
    if load.abandon is not None and load.abandon.after_tokens is not None and load.stream is False:
        message = "--abandon: without --stream an answer comes all at once"
        wrong.add(HarnessError(message, next_step="Leave after seconds."))
    changed = msgspec.structs.replace(changed, load=msgspec.structs.replace(load, requests=None, duration_s=None))
    problems: list[Problem] = []
    decoded = decode(msgspec.to_builtins(changed), Job, {}, problems)
    for problem in problems:
        wrong.add(HarnessError(_with_option_name(problem)))
    wrong.refuse()
    assert decoded is not None
    return decoded


def _with_option_name(problem: Problem) -> str:
    """The problem of a field, such as `$.load.timeout_s`, as one of its option."""
    fields = {name: option.field for name, option in OPTIONS.items() if problem.path.startswith(f"$.{option.field}")}
    return f"{max(fields, key=lambda name: len(fields[name]))}: {problem.text}"


def job_of_form(environment: Environment, planned: Job | None, options: Namespace | None = None) -> Job:
    """The job of the options, or of the web form; `planned`: the scenario's. Raises HarnessError."""
    options = options or options_of(environment)
    if planned is None:
        records = options.records or os.devnull
        planned = msgspec.structs.replace(
            _with_machine(_stock_job(), options),
            api_key_env=options.api_key_env,
            requests_path=records,
            processes_path=f"{records}.processes" if options.records else os.devnull,
        )
    job = with_options(planned, options)
    for user in environment.user_classes:
        endpoints = getattr(user, "endpoints", (options.endpoint,))
        if options.endpoint not in endpoints:
            raise HarnessError(
                f"--endpoint: {user.__name__} supports only {' and '.join(endpoints)} (got {options.endpoint})"
            )
    return job


def check_form(environment: Environment, planned: Job | None, options: Namespace) -> None:
    """Raise HarnessError when these options of the web form cannot be used; none of them is in force yet."""
    now = options_of(environment)
    if options.host != now.host and now.host and (planned is not None or now.api_key_env):
        raise HarnessError(
            f"--host: cannot be changed after the start (got {options.host!r})",  # it would get the API key
            next_step="Stop Locust and start it for the other host.",
        )
    job, runner = job_of_form(environment, planned, options), environment.runner
    if not _remote_workers(environment) and (runner is None or runner.state not in UNDER_WAY):
        JobInputs.of(job, host_of(environment, options.host))


def check_options(environment: Environment) -> None:
    """Raise HarnessError when the options of a start with stock Locust cannot be used.

    The master of `--processes` would wait for its load processes, or send nothing and call that a success.
    """
    job = job_of_form(environment, None)
    if _remote_workers(environment):
        return
    check_writable(job)
    if options_of(environment).headless:
        JobInputs.of(job, host_of(environment, environment.host))


def check_writable(job: Job) -> None:
    """Raise HarnessError when the records cannot be written."""
    for path in (job.requests_path, job.processes_path):
        try:
            open(path, "ab").close()
        except OSError as error:
            raise HarnessError(
                f"--records: {error.filename} cannot be written ({error.strerror})",
                next_step="Name a file in a folder that exists.",
            ) from None


def check_server(environment: Environment, planned: Job | None) -> None:
    """What load processes do before their first request, for their master. Raises HarnessError."""
    job = job_of_form(environment, planned)
    if not _remote_workers(environment):
        api_key(job.api_key_env)
        if not job.model:
            first_model(job, ApiAddress.of(host_of(environment, environment.host)))


def host_of(environment: Environment, given: str | None) -> str:
    return given or next((user.host for user in environment.user_classes if user.host), "") or ""


def options_of(environment: Environment) -> Namespace:
    assert environment.parsed_options is not None, "only a program that embeds Locust has none"
    options: Namespace = environment.parsed_options
    return options


def _remote_workers(environment: Environment) -> bool:
    """Whether the load processes may be on other machines, with other files and another network."""
    return isinstance(environment.runner, MasterRunner) and not options_of(environment).processes
