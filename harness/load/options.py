"""What a locustfile that is started by hand can be told, on the command line or in Locust's web form."""

import os
import re
import tempfile
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from locust.argument_parser import LocustArgumentParser
from locust.util.timespan import parse_timespan

from harness.errors import HarnessError, Mistakes
from harness.files import UNDECODABLE
from harness.job import Job, job_of_text, read_job
from harness.scenario.behaviour import Abandon, Agent, Pause, Rag
from harness.scenario.check_syntax import Slo, parse_check
from harness.scenario.scenario import MAX_USERS, TURNS, Arrivals, Load, Prompts, Users, Warmup
from harness.scenario.strict import decode
from harness.workers import FROM_MASTER, parse_part
from harness.workload import salt_words

AS_PLANNED = "as in the scenario"  # what is not one number: lengths by distribution, a rate that changes
ENDPOINTS = ["chat", "completions", "embeddings"]
_YES_NO = ["yes", "no"]
_MAX_RUN_TIME_S = 10_000_000  # as the longest load of a scenario
_AMOUNTS: dict[str, tuple[Any, str]] = {  # Locust's own options that say how much, and what each may be
    "users": (Users, f"a whole number of 1 to {MAX_USERS:,}"),
    "spawn_rate": (Annotated[float, msgspec.Meta(gt=0, le=MAX_USERS)], f"a number above 0, at most {MAX_USERS:,}"),
    "run_time": (
        Annotated[int, msgspec.Meta(ge=0, le=_MAX_RUN_TIME_S)],
        f"a time of at most {_MAX_RUN_TIME_S:,} s, such as 90, 20m or 1h30m",
    ),
}


class _Offered(list[str]):
    """Choices for the form. On a command line anything is taken, to be judged with all else that it says."""

    def __contains__(self, _: object) -> bool:
        return True


def _whole(text: str) -> int | str:
    """A number, or what was given instead: likewise."""
    try:
        return int(text)
    except ValueError:
        return text


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def add_options(parser: LocustArgumentParser) -> None:
    """Add ours to Locust's options. Those that only make sense at the start are kept out of the web form.

    With a job, its values are the defaults, so that the form shows what will be done.
    """
    parser.set_defaults(web_host="127.0.0.1")  # Locust's UI is open to all of the network otherwise
    job = _job_on_command_line()
    load, prompts = (job.load, job.prompts) if job else (Load(user="by-hand", output="natural"), Prompts())
    add = parser.add_argument
    add("--job", metavar="FILE", help="job file, written by the harness, or its text", include_in_web_ui=False)
    add("--records", metavar="FILE", help="append a record of each request to FILE", include_in_web_ui=False)
    add(
        "--machine",
        metavar="K/M",
        help="send part K of the sequence, from 0, of M parts; other machines send the others",
        include_in_web_ui=False,
    )
    add("--api-key-env", metavar="NAME", help="variable that holds the server's API key", include_in_web_ui=False)
    add("--model", default=job.model if job else "", help="model to ask for (default: the first that is offered)")
    add(
        "--prompts",
        default=(job.prompt_file if job else None) or prompts.kind,
        help="synthetic, classification, or the path of a JSONL file",
    )
    add("--prompt-tokens", default=_tokens_text(prompts.tokens), help="synthetic prompts: length in tokens")
    add("--system-tokens", type=_whole, default=prompts.system_tokens, help="tokens of a system prompt that all share")
    add("--output-tokens", default=_tokens_text(load.output_tokens), help="most tokens of an answer")
    add(
        "--output",
        choices=_Offered(["fixed", "natural"]),
        default=load.output,
        help="fixed: every answer has that length, whatever it says (ignore_eos); natural: it ends where it ends",
    )
    what = "what is asked: chat, completions or embeddings"
    add("--endpoint", choices=_Offered(ENDPOINTS), default=load.endpoint, help=what)
    add("--stream", choices=_Offered(_YES_NO), default="yes" if load.stream else "no", help="stream the answers")
    add("--batch-size", type=_whole, default=load.batch_size or 1, help="batch agents: requests sent at once")
    add("--in-flight", type=_whole, default=load.in_flight or 0, help="batch agents: always so many, instead of bursts")
    agent, rag = load.agent or Agent(), load.rag or Rag()
    add("--steps", type=_whole, default=agent.steps, help="agents with tools: model calls of a task")
    add("--sub-agents", type=_whole, default=agent.sub_agents, help="agents with tools: that each task starts")
    add("--documents", type=_whole, default=rag.documents, help="users of documents: how many there are")
    add("--document-tokens", type=_whole, default=rag.document_tokens, help="users of documents: length of each")
    add("--turns", type=_whole, default=load.turns or TURNS, help="chat users: turns of a conversation")
    add(
        "--abandon",
        default=_abandon_text(load.abandon),
        help="chat users who leave: '0.05 after 3s' or '0.05 after 40 tokens'",
    )
    again = "chat users: share of questions that are asked again"
    add("--regenerate", type=_number, default=load.regenerate, help=again)
    add(
        "--think",
        default=_think_text(load),
        help=f"pause in seconds, such as '1 5' (empty: {'none' if job else 'as the user class has it'})",
    )
    add(
        "--arrivals",
        default=_arrivals_text(load.arrivals),
        help="open loop: so many begin each second; empty: users wait for answers",
    )
    add("--timeout", type=_number, default=load.timeout_s, help="seconds of silence after which a request has failed")
    add(
        "--warmup",
        default=_warmup_text(job.warmup if job else None),
        help="so many requests first, which do not count; steady: until the server answers as fast as it will",
    )
    add("--slos", default=job.slos if job else "", help="for goodput, such as 'ttft<=2s, tpot<=50ms'")


def refuse_amounts(**given: object) -> None:
    """Raise HarnessError, for all together, when `users`, `spawn_rate` or `run_time` (s) are out of bounds.

    Values are numbers or the texts of a form; None: not given.
    """
    wrong = Mistakes()
    for name, value in given.items():
        type_, expected = _AMOUNTS[name]
        try:
            number = parse_timespan(value) if name == "run_time" and isinstance(value, str) else value
            if number is not None:
                msgspec.convert(number, type_, strict=False)
        except (ValueError, OverflowError):
            shown = repr(value)[:60]
            wrong.add(HarnessError(f"--{name.replace('_', '-')}: must be {expected} (got {shown})"))
    wrong.refuse()


def job_file(options: Namespace) -> Job | None:
    """The job that the harness has written, if this process was started with one. Raises HarnessError."""
    if not options.job or options.job == FROM_MASTER:
        return None
    try:
        is_text = options.job.startswith("{")
        return _with_machine(job_of_text(options.job) if is_text else read_job(Path(options.job)), options)
    except (OSError, *UNDECODABLE) as error:
        raise HarnessError(f"--job {options.job:.100}: the job cannot be read ({error})") from None


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
    wrong = Mistakes()
    with wrong.noted():
        job = _with_machine(job, options)
    with wrong.noted():
        job = with_options(job, options)
    wrong.refuse()
    return job


def _with_machine(job: Job, options: Namespace) -> Job:
    if not getattr(options, "machine", None):
        return job
    machine, machines = parse_part(options.machine)
    return msgspec.structs.replace(job, machine=machine, machines=machines)


def with_options(job: Job, options: Namespace) -> Job:
    """The job as changed in the web form, without an end: there, a person ends it.

    Raises HarnessError for values that no scenario may have, for all of them together.
    """
    wrong = Mistakes()

    def read(planned: Any, reader: Callable[..., Any], *given: Any) -> Any:
        """What a text says; what was planned for one that says nothing, which is noted."""
        with wrong.noted():
            return reader(*given)
        return planned

    if options.stream not in _YES_NO:
        wrong.add(HarnessError(f"--stream: expected one of yes, no, got {options.stream!r}"))
    if options.in_flight and options.batch_size not in (0, 1):
        wrong.add(HarnessError("--in-flight: give one of --batch-size (bursts) and --in-flight"))
    read(None, slos_of, options.slos)
    abandon = read(None, _abandon, options.abandon)
    if abandon is not None and abandon.after_tokens is not None and options.stream == "no":
        said = "--abandon: without --stream an answer comes all at once"
        wrong.add(HarnessError(said, next_step="Leave after seconds."))
    think_s, think = read((None, None), _think, options.think, job.load)
    kind = options.prompts if options.prompts in ("synthetic", "classification") else "file"
    changed = msgspec.structs.replace(
        job,
        model=options.model,
        slos=options.slos,
        warmup=read(job.warmup, _warmup, options.warmup, job.warmup),
        prompts=msgspec.structs.replace(
            job.prompts,
            kind=kind,
            tokens=read(job.prompts.tokens, _tokens, "--prompt-tokens", options.prompt_tokens, job.prompts.tokens),
            system_tokens=options.system_tokens,
        ),
        prompt_file=options.prompts if kind == "file" else None,
        load=msgspec.structs.replace(
            job.load,
            requests=None,
            duration_s=None,
            arrivals=read(None, _arrivals, options.arrivals, job.load.arrivals),
            output_tokens=read(
                job.load.output_tokens, _tokens, "--output-tokens", options.output_tokens, job.load.output_tokens
            ),
            output=options.output,
            endpoint=options.endpoint,
            stream=options.stream == "yes",
            batch_size=options.batch_size,
            in_flight=options.in_flight or None,
            agent=msgspec.structs.replace(
                job.load.agent or Agent(), steps=options.steps, sub_agents=options.sub_agents
            ),
            rag=msgspec.structs.replace(
                job.load.rag or Rag(), documents=options.documents, document_tokens=options.document_tokens
            ),
            turns=options.turns,
            abandon=abandon,
            regenerate=options.regenerate,
            think_s=think_s,
            think=think,
            timeout_s=options.timeout,
        ),
    )
    problems: list[str] = []
    decoded = decode(msgspec.to_builtins(changed), Job, {}, problems)
    for problem in problems:
        wrong.add(HarnessError(_of_option(options, problem)))
    wrong.refuse()
    assert decoded is not None
    return decoded


def _of_option(options: Namespace, problem: str) -> str:
    """What is said of a field, such as `$.load.timeout_s`, said of the option that it was given by."""
    path, _, said = problem.partition(": ")
    fields = reversed(re.findall(r"[a-z_]+", path))
    names = ("prompt_tokens" if field == "tokens" else field.removesuffix("_s") for field in fields)
    name = next((name for name in names if hasattr(options, name)), None)
    return problem if name is None else f"--{name.replace('_', '-')}: {said}"


def slos_of(text: str) -> tuple[Slo, ...]:
    """The SLOs in a text such as "ttft<=2s, tpot<=50ms"; none in an empty one. Raises HarnessError."""
    if not text.strip():
        return ()
    try:
        return parse_check(f"attainment({text}) >= 0").slos
    except ValueError:
        raise HarnessError(
            f"--slos: {text!r} are no SLOs", next_step="Give some such as 'ttft<=2s, tpot<=50ms'."
        ) from None


def _job_on_command_line() -> Job | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job")
    try:
        return job_file(parser.parse_known_args()[0])
    except HarnessError:
        return None  # said again, and aloud, when the run begins


def _think_text(load: Load) -> str:
    pause = load.think
    if pause is None:
        return " ".join(f"{number:g}" for number in load.think_s or [])
    drawn = f"lognormal, sigma {pause.sigma:g}" if pause.distribution == "lognormal" else pause.distribution
    most = "" if pause.most_s is None else f", at most {pause.most_s:g}"
    return f"{pause.mean_s:g} on the mean ({drawn}{most})"


def _think(text: str, planned: Load) -> tuple[list[float] | None, Pause | None]:
    """The scenario's pause as it was left, or a uniform one in its place, '1 5' or '2'; nothing: none of either."""
    if text == _think_text(planned):
        return planned.think_s, planned.think
    try:
        numbers = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        numbers = [-1.0]
    if not numbers:
        return None, None
    if len(numbers) > 2 or not 0 <= numbers[0] <= numbers[-1]:
        raise HarnessError(f"--think: {text!r} is not a pause", next_step="Give one such as '1 5', in seconds.")
    return [numbers[0], numbers[-1]], None


def _abandon_text(abandon: Abandon | None) -> str:
    if abandon is None:
        return ""
    when = f"{abandon.after_tokens} tokens" if abandon.after_s is None else f"{abandon.after_s:g}s"
    return f"{abandon.share:.6g} after {when}"


def _abandon(text: str) -> Abandon | None:
    """'5% after 3s' or '0.05 after 40 tokens'; nothing: everybody waits."""
    if not text.strip():
        return None
    found = re.fullmatch(r"\s*([\d.e-]+) ?(%?) after (?:([\d.e+-]+) ?s|(\d+) ?tokens)\s*", text)
    try:
        share, percent, after_s, after_tokens = found.groups() if found else ("?", None, None, None)
        given = {
            "share": float(share) / (100 if percent else 1),
            "after_s": float(after_s) if after_s else None,
            "after_tokens": int(after_tokens) if after_tokens else None,
        }
        return msgspec.convert(given, Abandon)
    except ValueError:
        raise HarnessError(
            f"--abandon: {text!r} does not say who leaves when",
            next_step="Give a share, 100% at most, and a time, such as '5% after 3s', or '0.05 after 40 tokens'.",
        ) from None


def _tokens_text(tokens: object) -> str:
    return str(tokens) if isinstance(tokens, int) else AS_PLANNED


def _tokens(option: str, text: str, planned: Any) -> Any:
    """The number in the form; for a distribution that was left as it is, that."""
    if text == AS_PLANNED and not isinstance(planned, int):
        return planned
    try:
        return int(text)
    except ValueError:
        raise HarnessError(f"{option}: {text!r} is not a number of tokens") from None


def _warmup_text(warmup: Warmup | None) -> str:
    if warmup is None:
        return "0"
    return warmup.until or (AS_PLANNED if warmup.requests is None else str(warmup.requests))


def _warmup(text: str, planned: Warmup) -> Warmup:
    if text == _warmup_text(planned):
        return planned
    if text == "steady":
        return Warmup(until="steady")
    if not text.isascii() or not text.isdigit():
        raise HarnessError(f"--warmup: {text!r} is neither a number of requests nor 'steady'")
    return Warmup(requests=int(text))


def _arrivals_text(arrivals: Arrivals | None) -> str:
    if arrivals is None:
        return ""
    return AS_PLANNED if arrivals.rate is None else f"{arrivals.rate:g}"


def _arrivals(text: str, planned: Arrivals | None) -> Arrivals | None:
    """The scenario's arrivals, or its spacing at another rate; nothing: a closed loop."""
    if not text.strip():
        return None
    if planned is not None and text == AS_PLANNED:
        return planned
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1e7:
        raise HarnessError(
            f"--arrivals: {text!r} is not a rate", next_step="Give a number above 0, in arrivals a second, or nothing."
        )
    return msgspec.structs.replace(planned or Arrivals(), rate=rate, points=None, wave=None)
