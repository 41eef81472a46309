"""The options of a locustfile that runs with stock Locust, on the command line and in Locust's web form, as a Job.

An option is one line of a table, `OPTIONS`. The types of the scenario say which values are possible.
"""

import os
import tempfile
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner
from locust.util.timespan import parse_timespan

from harness.errors import HarnessError, Mistakes, Problem
from harness.files import UNDECODABLE
from harness.job import Job, decode_job, read_job
from harness.load.client import ApiAddress
from harness.load.process import api_key, first_model, inputs_of
from harness.scenario import MAX_USERS, TURNS, Load, Prompts, Users, Warmup
from harness.scenario.behaviour import Agent, Rag, length_problems
from harness.scenario.check_syntax import Slo, parse_check
from harness.scenario.file import decode, load_problems, load_yaml, warmup_problems
from harness.workers import FROM_MASTER
from harness.workload import pairs_of, salt_words

UNDER_WAY = (STATE_SPAWNING, STATE_RUNNING)
_MAX_RUN_TIME_S = 10_000_000  # as the longest load of a scenario
_AMOUNTS: dict[str, tuple[Any, str]] = {  # Locust's own options that say how much, and their bounds
    "users": (Users, f"a whole number of 1 to {MAX_USERS:,}"),
    "spawn_rate": (Annotated[float, msgspec.Meta(gt=0, le=MAX_USERS)], f"a number above 0, at most {MAX_USERS:,}"),
    "run_time": (
        Annotated[int, msgspec.Meta(ge=0, le=_MAX_RUN_TIME_S)],
        f"a time of at most {_MAX_RUN_TIME_S:,} s, such as 90, 20m or 1h30m",
    ),
}


def slos_of(text: str) -> tuple[Slo, ...]:
    """The SLOs in a text such as "ttft<=2s, tpot<=50ms"; none in an empty one. Raises ValueError."""
    return parse_check(f"attainment({text}) >= 0").slos if text.strip() else ()


class Option(NamedTuple):
    field: str  # of the Job
    help: str
    choices: list[str] | None = None
    short: tuple[str, ...] = ()  # of a mapping, the key for a number alone, and the key for a text alone
    is_text: bool = False


OPTIONS = {  # of the web form and the command line
    "--model": Option("model", "model to ask for (default: the first that the server offers)", is_text=True),
    "--prompts": Option("prompts", "synthetic, classification, or the path of a JSONL file", is_text=True),
    "--prompt-tokens": Option("prompts.tokens", "synthetic prompts: length in tokens"),
    "--system-tokens": Option("prompts.system_tokens", "tokens of a system prompt that all requests share"),
    "--output-tokens": Option("load.output_tokens", "maximum tokens of an answer"),
    "--output": Option(
        "load.output", "fixed: every answer has that length (ignore_eos); natural: stop at end-of-sequence",
        choices=["fixed", "natural"],
    ),
    "--endpoint": Option(
        "load.endpoint", "endpoint to load: chat, completions or embeddings",
        choices=["chat", "completions", "embeddings"],
    ),
    "--stream": Option("load.stream", "stream the answers", choices=["yes", "no"]),
    "--batch-size": Option("load.batch_size", "batch agents: requests sent at once"),
    "--in-flight": Option("load.in_flight", "batch agents: requests always in flight, instead of bursts"),
    "--steps": Option("load.agent.steps", "agents with tools: model calls of a task"),
    "--sub-agents": Option("load.agent.sub_agents", "agents with tools: sub-agents that each task starts"),
    "--documents": Option("load.rag.documents", "users of documents: number of documents"),
    "--document-tokens": Option("load.rag.document_tokens", "users of documents: length of each"),
    "--turns": Option("load.turns", "chat users: turns of a conversation"),
    "--abandon": Option("load.abandon", "chat users who leave: '{share: 0.05, after_s: 3}', or after_tokens: 40"),
    "--regenerate": Option("load.regenerate", "chat users: share of questions that are asked again"),
    "--think": Option("load.think", "pause in seconds, such as '1 5' (stock Locust, empty: that of the user class)"),
    "--arrivals": Option(
        "load.arrivals", "open loop: arrivals a second (empty: closed loop, users wait for answers)", short=("rate",)
    ),
    "--timeout": Option("load.timeout_s", "seconds of silence after which a request has failed"),
    "--warmup": Option(
        "warmup", "requests that are sent first and do not count; steady: until the server is steady",
        short=("requests", "until"),
    ),
    "--slos": Option("slos", "for goodput, such as 'ttft<=2s, tpot<=50ms'", is_text=True),
}  # fmt: skip


def _text(name: str, job: Job) -> str:
    """The value of an option, as a user would give it."""
    option, load = OPTIONS[name], job.load
    if name == "--prompts":
        return job.prompt_file or job.prompts.kind
    if name == "--think" and load.think is None:
        return " ".join(f"{number:g}" for number in load.think_s or [])
    value: Any = job
    for key in option.field.split("."):
        value = getattr(value, key)
    if isinstance(value, msgspec.Struct):
        defaults = {one.name: one.default for one in msgspec.structs.fields(value)}
        value = {key: given for key, given in msgspec.structs.asdict(value).items() if given != defaults[key]}
        if len(value) == 1 and (key := next(iter(value))) in option.short:
            value = value[key]
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _put(raw: dict[str, Any], name: str, text: str, problems: list[Problem]) -> None:
    """Put the value of an option into a job, as a scenario would have it: a number, a word, or a mapping in YAML."""
    option = OPTIONS[name]
    if name == "--prompts":
        kind = text if text in ("synthetic", "classification") else "file"
        raw["prompts"]["kind"], raw["prompt_file"] = kind, text if kind == "file" else None
        return
    *parents, key = option.field.split(".")
    for parent in parents:
        raw = raw[parent]
    if name == "--slos":
        try:
            slos_of(text)
        except ValueError:
            problems.append(Problem("", f"SLOs such as 'ttft<=2s, tpot<=50ms' are expected, got {text[:60]!r}"))
    value = text if option.is_text else load_yaml(text, problems)[0]
    if name == "--think":
        raw["think"] = raw["think_s"] = None
        if value is not None and not isinstance(value, dict):  # one number, or two
            words = [load_yaml(word, problems)[0] for word in text.replace(",", " ").split()]
            key, value = "think_s", words * 2 if len(words) == 1 else words
    elif option.short and value is not None and not isinstance(value, dict):
        value = {option.short[-1 if isinstance(value, str) else 0]: value}
    raw[key] = value


_OF_CLASSES = (  # options that a user class ignores unless its `uses` names them
    "--batch-size", "--in-flight", "--steps", "--sub-agents", "--documents", "--document-tokens", "--turns",
    "--abandon", "--regenerate",
)  # fmt: skip
_START_ONLY = {  # not in the web form
    "--job": ("FILE", "job file, written by the harness, or its text"),
    "--records": ("FILE", "append a record of each request to FILE"),
    "--api-key-env": ("NAME", "variable that holds the server's API key"),
    "--metrics-port": ("PORT", "serve /metrics for Prometheus on this port; the web UI has it on its own port"),
    "--metrics-host": ("ADDRESS", "address of --metrics-port (default: 127.0.0.1)"),
}


def field_name(option: str) -> str:
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
        if getattr(options, field_name(option)) != _text(option, defaults)
    ]


def add_options(parser: LocustArgumentParser) -> None:
    """Add ours to Locust's options. With a job, its values are the defaults, so that the form shows them."""
    parser.set_defaults(web_host="127.0.0.1")  # Locust's UI is open to all of the network otherwise
    for name, (metavar, help) in _START_ONLY.items():
        parser.add_argument(name, metavar=metavar, help=help, include_in_web_ui=False)
    job = _with_defaults(_job_on_command_line() or _stock_job())
    for name, option in OPTIONS.items():
        parser.add_argument(name, default=_text(name, job), choices=option.choices, help=option.help)


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
        return decode_job(options.job) if options.job.startswith("{") else read_job(Path(options.job))
    except (OSError, *UNDECODABLE) as error:
        raise HarnessError(f"--job {options.job:.100}: the job cannot be read ({error})") from None


def _job_on_command_line() -> Job | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job")
    try:
        return job_file(parser.parse_known_args()[0])
    except HarnessError:
        return None  # reported when the run starts


def with_options(job: Job, options: Namespace) -> Job:
    """The job as changed by options or the web form, without an end: the user stops the load.

    Raises HarnessError for values that no scenario may have, for all of them together.
    """
    planned = _with_defaults(job)
    raw, problems = msgspec.to_builtins(planned), list[Problem]()
    raw["load"] |= {"requests": None, "duration_s": None}
    for name in OPTIONS:
        text = getattr(options, field_name(name))
        if text != _text(name, planned):
            found: list[Problem] = []
            _put(raw, name, text, found)
            problems += [Problem(f"$.{OPTIONS[name].field}", problem.text) for problem in found]
    changed = decode(raw, Job, {}, problems)
    if changed is not None:
        known = list(_contradictions(planned))  # the scenario's lengths may be in a file that is not here
        problems += [problem for problem in _contradictions(changed) if problem not in known]
    wrong = Mistakes()
    for problem in problems:
        wrong.add(HarnessError(f"{_option_at(problem.path)}: {problem.text}"))
    wrong.raise_errors()
    assert changed is not None
    prompt, output = changed.prompts.tokens, changed.load.output_tokens
    return msgspec.structs.replace(
        changed,
        prompt_lengths=job.prompt_lengths if prompt == job.prompts.tokens else pairs_of(prompt, Path()),
        output_lengths=job.output_lengths if output == job.load.output_tokens else pairs_of(output, Path()),
    )


def _contradictions(job: Job) -> Iterator[Problem]:
    load = job.load
    if load.batch_size == 1:  # the default
        load = msgspec.structs.replace(load, batch_size=None)
    yield from (problem.below("$.load.") for problem in load_problems(load, Path()))
    yield from (problem.below("$.prompts.tokens") for problem in length_problems(job.prompts.tokens, Path()))
    yield from warmup_problems(job.warmup)


def _option_at(path: str) -> str:
    """The option of a field, such as `$.load.timeout_s`."""
    return max((name for name in OPTIONS if path.startswith(f"$.{OPTIONS[name].field}")), key=_depth)


def _depth(name: str) -> int:
    return len(OPTIONS[name].field)


def job_of_form(environment: Environment, planned: Job | None, options: Namespace | None = None) -> Job:
    """The job of the options, or of the web form; `planned`: the scenario's. Raises HarnessError."""
    options = options or options_of(environment)
    if planned is None:
        records = options.records or os.devnull
        planned = msgspec.structs.replace(
            _stock_job(),
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
        inputs_of(job, host_of(environment, options.host))


def check_options(environment: Environment) -> None:
    """Raise HarnessError when the options of a start with stock Locust cannot be used.

    The master of `--processes` would wait for its load processes, or send nothing and call that a success.
    """
    job = job_of_form(environment, None)
    if _remote_workers(environment):
        return
    check_writable(job)
    if options_of(environment).headless:
        inputs_of(job, host_of(environment, environment.host))


def check_writable(job: Job) -> None:
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
