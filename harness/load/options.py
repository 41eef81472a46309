"""Make a Job of the options of a locustfile with stock Locust, from the command line and Locust's web form.

Each option is one entry of the table `OPTIONS`. The types of the scenario define the possible values.
"""

import os
import tempfile
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner
from locust.util.timespan import parse_timespan

from harness.base.errors import HarnessError, Problem, reason_of, sentence
from harness.base.files import UNDECODABLE, open_output, refuse_named_pipe
from harness.load.client import ApiAddress
from harness.load.load_process import first_model, load_inputs
from harness.scenario import MADE_KINDS, MAX_USERS, TURNS, Load, Prompts, Users, Warmup
from harness.scenario.behaviour import Agent, Rag
from harness.scenario.check_syntax import Slo, request_slos
from harness.scenario.contradictions import contradictions
from harness.scenario.shape import decode, load_yaml
from harness.scenario.workers import FROM_MASTER
from harness.workload import pairs_of, salt_words
from harness.workload.job import Job, decode_job, read_job

RUNNING_STATES = (STATE_SPAWNING, STATE_RUNNING)
_MAX_RUN_TIME_S = 10_000_000  # as the longest load of a scenario
_AMOUNTS: dict[str, tuple[Any, str]] = {  # amounts among Locust's own options, and their bounds
    "users": (Users, f"a whole number of 1 to {MAX_USERS:,}"),
    "spawn_rate": (Annotated[float, msgspec.Meta(gt=0, le=MAX_USERS)], f"a number above 0, at most {MAX_USERS:,}"),
    "run_time": (
        Annotated[int, msgspec.Meta(ge=0, le=_MAX_RUN_TIME_S)],
        f"a time of at most {_MAX_RUN_TIME_S:,} s, such as 90, 20m or 1h30m",
    ),
}


def slos_of(text: str) -> tuple[Slo, ...]:
    """Return the bounds on single requests in checks; none for an empty text. Raises ValueError."""
    slos = request_slos([text])
    if text.strip() and not slos:
        raise ValueError(f"'{text[:60]}' is no upper bound on a percentile of a latency of requests")
    return slos


class Option(NamedTuple):
    field: str  # path in the Job
    help: str
    choices: list[str] | None = None
    short_keys: tuple[str, ...] = ()  # in a mapping: the key for a bare number, and the key for a bare text
    is_text: bool = False  # not YAML


OPTIONS = {  # of the web form and the command line
    "--model": Option("model", "model to ask for (default: the first that the server offers)", is_text=True),
    "--prompts": Option("prompts", "synthetic, classification, code, chat, structured, or a JSONL file", is_text=True),
    "--prompt-tokens": Option("prompts.tokens", "synthetic prompts: length in tokens"),
    "--system-tokens": Option("prompts.system_tokens", "tokens of a system prompt that all requests share"),
    "--output-tokens": Option("load.output_tokens", "maximum tokens of an answer"),
    "--output": Option(
        "load.output", "fixed: every answer has that length (ignore_eos); natural: stop at end-of-sequence",
        choices=["fixed", "natural"],
    ),
    "--endpoint": Option(
        "load.endpoint", "endpoint to load: chat, completions or embeddings",
        choices=["chat", "completions", "embeddings", "messages"],
    ),
    "--stream": Option("load.stream", "stream the answers", choices=["yes", "no"]),
    "--batch-size": Option("load.batch_size", "batch agents: requests sent at once"),
    "--in-flight": Option("load.in_flight", "batch agents: requests always in flight, instead of bursts"),
    "--agent-trace": Option("load.agent_trace.file", "recorded agents: a file or folder of traces", is_text=True),
    "--steps": Option("load.agent.steps", "agents with tools: model calls of a task"),
    "--sub-agents": Option("load.agent.sub_agents", "agents with tools: sub-agents that each task starts"),
    "--documents": Option("load.rag.documents", "users of documents: number of documents"),
    "--document-tokens": Option("load.rag.document_tokens", "users of documents: length of each"),
    "--turns": Option("load.turns", "chat users: turns of a conversation"),
    "--abandon": Option("load.abandon", "chat users who leave: '{share: 0.05, after_s: 3}', or after_tokens: 40"),
    "--regenerate": Option("load.regenerate", "chat users: share of questions that are asked again"),
    "--think": Option("load.think", "pause in seconds, such as '1 5' (stock Locust, empty: that of the user class)"),
    "--arrivals": Option(
        "load.arrivals", "open loop: arrivals a second (empty: closed loop, users wait for answers)",
        short_keys=("rate",),
    ),
    "--timeout": Option("load.timeout_s", "seconds of silence after which a request has failed"),
    "--warmup": Option(
        "warmup", "requests that are sent first and do not count; steady: until the server is steady",
        short_keys=("requests", "until"),
    ),
    "--check": Option("checks", "for goodput, such as 'ttft_p95 <= 2s, tpot_p95 <= 50ms'", is_text=True),
}  # fmt: skip


def _option_text(name: str, job: Job) -> str:
    """Return the value that an option has in a job, as a user would write it."""
    option, load = OPTIONS[name], job.load
    if name == "--prompts":
        return job.prompt_file or job.prompts.kind
    if name == "--think" and load.think is None:
        return " ".join(f"{number:g}" for number in load.think_s or [])
    if name == "--agent-trace":
        return "" if load.agent_trace is None else load.agent_trace.file
    value: Any = job
    for key in option.field.split("."):
        value = getattr(value, key)
    if isinstance(value, msgspec.Struct):
        defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
        value = {key: item for key, item in msgspec.structs.asdict(value).items() if item != defaults[key]}
        if len(value) == 1 and (key := next(iter(value))) in option.short_keys:
            value = value[key]
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _set_option(raw: dict[str, Any], name: str, text: str, problems: list[Problem]) -> None:
    """Set the value of an option in a raw job. Like in a scenario, it is a number, a word, or a mapping in YAML."""
    option = OPTIONS[name]
    if name == "--prompts":
        kind = text if text in ("synthetic", "classification", *MADE_KINDS) else "file"
        raw["prompts"]["kind"], raw["prompt_file"] = kind, text if kind == "file" else None
        return
    if name == "--agent-trace":
        raw["load"]["agent_trace"] = {"file": text} if text else None
        raw["trace_file"] = text or None
        return
    *parents, key = option.field.split(".")
    for parent in parents:
        raw = raw[parent]
    if name == "--check":
        try:
            slos_of(text)
        except ValueError as error:
            problems.append(Problem("", str(error).removeprefix("check ")))  # the option's name comes before it
    value = text if option.is_text else load_yaml(text, problems)[0]
    if name == "--think":
        raw["think"] = raw["think_s"] = None
        if value is not None and not isinstance(value, dict):  # one number, or two
            numbers = [load_yaml(word, problems)[0] for word in text.replace(",", " ").split()]
            key, value = "think_s", numbers * 2 if len(numbers) == 1 else numbers
    elif option.short_keys and value is not None and not isinstance(value, dict):
        value = {option.short_keys[-1 if isinstance(value, str) else 0]: value}
    raw[key] = value


_CLASS_OPTIONS = (  # options that a user class ignores unless its `uses` names them
    "--batch-size", "--in-flight", "--steps", "--sub-agents", "--documents", "--document-tokens", "--turns",
    "--abandon", "--regenerate", "--agent-trace",
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
    """Return the options that none of these user classes uses. A class without `uses` may use all."""
    used = [getattr(user, "uses", None) for user in classes]
    names = {name for uses in used for name in uses or ()}
    return [] if None in used else [name for name in _CLASS_OPTIONS if name not in names]


def unused_fields(environment: Environment) -> set[str]:
    """Return the fields of the web form that none of its user classes uses."""
    selectable: dict[str, Any] = environment.available_user_classes or {}  # in Locust's class picker
    return set(map(field_name, unused_options(list(selectable.values()) or environment.user_classes)))


def ignored_option_warnings(environment: Environment) -> list[str]:
    """Return a sentence for each given option that the running user classes ignore."""
    options, defaults = options_of(environment), _with_class_defaults(_create_stock_job())
    names = " and ".join(sorted(user.__name__ for user in environment.user_classes))
    return [
        f"{option}: {names} ignores this option (got {getattr(options, field_name(option))!r})"
        for option in unused_options(environment.user_classes)
        if getattr(options, field_name(option)) != _option_text(option, defaults)
    ]


def add_options(parser: LocustArgumentParser) -> None:
    """Add the options of this module to Locust's. The defaults, which the form shows, are the values of the job."""
    parser.set_defaults(web_host="127.0.0.1")  # otherwise the whole network can use Locust's UI
    for name, (metavar, help) in _START_ONLY.items():
        parser.add_argument(name, metavar=metavar, help=help, include_in_web_ui=False)
    try:
        refuse_pipes()
    except HarnessError as error:
        parser.error(sentence(error))  # type: ignore[no-untyped-call]
    job_parser = ArgumentParser(add_help=False, allow_abbrev=False)
    job_parser.add_argument("--job")
    job = None
    with suppress(HarnessError):  # reported when the run starts
        job = read_job_option(job_parser.parse_known_args()[0])
    job = _with_class_defaults(job or _create_stock_job())
    for name, option in OPTIONS.items():
        parser.add_argument(name, default=_option_text(name, job), choices=option.choices, help=option.help)


def _with_class_defaults(job: Job) -> Job:
    """Return the job with the defaults of all user classes, which the form shows for any class."""
    load = job.load
    defaults = {"agent": Agent(), "rag": Rag(), "turns": TURNS, "batch_size": 1}
    load = msgspec.structs.replace(load, **{key: getattr(load, key) or value for key, value in defaults.items()})
    return msgspec.structs.replace(job, load=load)


def _create_stock_job() -> Job:
    """Return the default job of stock Locust: without an end, and with a new salt, so that no cache has its prompts."""
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


def check_amounts(**amounts: object) -> None:
    """Raise HarnessError if `users`, `spawn_rate` or `run_time` (s) is out of bounds.

    Values are numbers, texts of a form, or None.
    """
    for name, value in amounts.items():
        type_, expected = _AMOUNTS[name]
        try:
            number = parse_timespan(value) if name == "run_time" and isinstance(value, str) else value
            if number is not None:
                msgspec.convert(number, type_, strict=False)
        except (ValueError, OverflowError):
            raise HarnessError(f"--{name.replace('_', '-')}: must be {expected} (got {repr(value)[:60]})") from None


def read_job_option(options: Namespace) -> Job | None:
    """Return the job that the harness has written; None if it did not start this process. Raises HarnessError."""
    if not options.job or options.job == FROM_MASTER:
        return None
    try:
        return decode_job(options.job) if options.job.startswith("{") else read_job(Path(options.job))
    except (OSError, *UNDECODABLE) as error:
        raise HarnessError(f"--job {options.job:.100}: the job cannot be read ({reason_of(error)})") from None


def apply_options(job: Job, options: Namespace) -> Job:
    """Return the job as changed by options or the web form, without an end: the user stops the load.

    Raises one HarnessError for all values that a scenario may not have.
    """
    planned = _with_class_defaults(job)
    raw, problems = msgspec.to_builtins(planned), list[Problem]()
    raw["load"] |= {"requests": None, "duration_s": None}
    for name in OPTIONS:
        text = getattr(options, field_name(name))
        if text != _option_text(name, planned):
            option_problems: list[Problem] = []
            _set_option(raw, name, text, option_problems)
            problems += [Problem(f"$.{OPTIONS[name].field}", problem.text) for problem in option_problems]
    changed = decode(raw, Job, {}, problems)
    if changed is not None:
        ignored = list(_find_contradictions(planned))  # the scenario's lengths may be in a file that is not here
        problems += [problem for problem in _find_contradictions(changed) if problem not in ignored]
    if problems:
        raise HarnessError(f"{_option_of_path(problems[0].path)}: {problems[0].text}")
    assert changed is not None
    prompt, output = changed.prompts.tokens, changed.load.output_tokens
    return msgspec.structs.replace(
        changed,
        prompt_lengths=job.prompt_lengths if prompt == job.prompts.tokens else pairs_of(prompt, Path()),
        output_lengths=job.output_lengths if output == job.load.output_tokens else pairs_of(output, Path()),
    )


def _find_contradictions(job: Job) -> Iterator[Problem]:
    # One burst is the default, and the user stops the load.
    batch_size = None if job.load.batch_size == 1 else job.load.batch_size
    load = msgspec.structs.replace(job.load, batch_size=batch_size, requests=1, duration_s=None)
    parts = {"$.load": load, "$.prompts.tokens": job.prompts.tokens, "$.warmup": job.warmup}
    for path, part in parts.items():
        if isinstance(part, msgspec.Struct):
            yield from contradictions(part, Path(), job.prompts, path)


def _option_of_path(path: str) -> str:
    """Return the option with the longest field that contains this path, such as `$.load.timeout_s`."""
    names = [name for name, option in OPTIONS.items() if path.startswith(f"$.{option.field}")]
    return max(names, key=lambda name: len(OPTIONS[name].field))


def job_of_options(environment: Environment, planned: Job | None, options: Namespace | None = None) -> Job:
    """Return the job of the options (default: those in force). `planned`: the scenario's job. Raises HarnessError."""
    options = options or options_of(environment)
    if planned is None:
        records = options.records or os.devnull
        planned = msgspec.structs.replace(
            _create_stock_job(),
            api_key_env=options.api_key_env,
            requests_path=records,
            processes_path=f"{records}.processes" if options.records else os.devnull,
        )
    job = apply_options(planned, options)
    for user in environment.user_classes:
        endpoints = getattr(user, "endpoints", (options.endpoint,))
        if options.endpoint not in endpoints:
            raise HarnessError(
                f"--endpoint: {user.__name__} supports only {', '.join(endpoints)} (got {options.endpoint})"
            )
    return job


def check_start(
    environment: Environment, planned: Job | None, options: Namespace | None = None, *, ask_server: bool = False
) -> None:
    """Raise HarnessError if a load cannot start: its options, files, API key or, with `ask_server`, its server.

    `options`: of the web form, which are not in force yet. Without this check, the master of `--processes` would wait
    for its load processes, or report success without a load. A model that is not named is asked for with `ask_server`.
    """
    current, runner = options_of(environment), environment.runner
    given = options or current
    if given.host != current.host and current.host and (planned is not None or current.api_key_env):
        raise HarnessError(
            f"--host: cannot be changed after the start (got {given.host!r})",  # it would get the API key
            next_step="Stop Locust and start it for the other host.",
        )
    if options is None and planned is None:  # the names of these fields of the form are Locust's own
        check_amounts(users=given.num_users, spawn_rate=given.spawn_rate, run_time=given.run_time)
    job = job_of_options(environment, planned, given)
    if isinstance(runner, MasterRunner) and not current.processes:
        return  # the load processes may be on other machines, with other files and another network
    if planned is None:
        check_writable(job)
    host = host_of(environment, environment.host if options is None else given.host)
    is_running = runner is not None and runner.state in RUNNING_STATES
    if (current.headless or ask_server or options is not None) and not is_running:
        load_inputs(job, host)
    if ask_server and not job.model:
        first_model(job, ApiAddress.parse(host))


def check_writable(job: Job) -> None:
    for path in (job.requests_path, job.processes_path):
        try:
            open_output(path, "ab").close()
        except OSError as error:
            raise HarnessError(
                f"--records: {error.filename} cannot be written ({error.strerror})",
                next_step="Name a file in a folder that exists.",
            ) from None


def refuse_pipes() -> None:
    """Raise HarnessError where a file that Locust writes is a named pipe: it would wait for a reader, for ever.

    Locust opens some of them before any plugin has its options.
    """
    given = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--csv", "--json-file", "--html"):
        given.add_argument(option)
    options = given.parse_known_args()[0]
    kinds = ("stats", "stats_history", "failures", "exceptions", "llm", "llm_history") if options.csv else ()
    written = {f"{options.csv}_{kind}.csv": "--csv" for kind in kinds}
    written |= {f"{options.json_file}.json": "--json-file"} if options.json_file else {}
    written |= {options.html: "--html"} if options.html else {}
    for path, option in written.items():
        try:
            refuse_named_pipe(path)
        except OSError as error:
            raise HarnessError(f"{option}: {path}: {reason_of(error)}", next_step="Name another file.") from None


def host_of(environment: Environment, given: str | None) -> str:
    return given or next((user.host for user in environment.user_classes if user.host), "") or ""


def options_of(environment: Environment) -> Namespace:
    assert environment.parsed_options is not None, "only a program that embeds Locust has none"
    options: Namespace = environment.parsed_options
    return options
