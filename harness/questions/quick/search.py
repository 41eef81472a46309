"""`harness quick`: find a server, measure how fast it is, and load it with one, four and eight users for seconds.

It is a run of a scenario that is made here: one load with stages, so that one load generator serves all levels.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import requests
from msgspec.structs import replace

from harness.base.command_line import command_line, option_words, positional
from harness.base.errors import HarnessError, ServerError
from harness.base.https import open_session
from harness.base.reason import sentence
from harness.hardware.gpu_table import identify_gpu
from harness.hardware.model import find_model, read_model
from harness.numbers import formulas
from harness.numbers.summarize import summarize_with_counts
from harness.questions.findings.decide import with_findings
from harness.questions.quick.combinations_page import combination_notes, facts_to_paste
from harness.questions.quick.decide import (
    CombinationsReport,
    QuickReport,
    combination_numbers,
    counts_tokens,
    median_prompt,
    quick_levels,
    quick_notes,
)
from harness.records.columns import rows_of
from harness.records.manifest import Run, Startup
from harness.records.records import Request
from harness.report.sentences import death_answer, group_reasons
from harness.run.experiment import Target
from harness.run.request_speed import PROMPT_WORDS, RequestSpeed
from harness.run.running_server import LIMITS, Say, key_by_option, running_scenario, when_ready
from harness.scenario import Scenario, models_of_loads
from harness.scenario.behaviour import max_length
from harness.serve import probe
from harness.serve.lifecycle import (
    attach_to_server,
    choose_model,
    inspect_server,
    is_this_machine,
    refuse_absent_models,
    reported,
)
from harness.workload import SALT_WORDS, text
from harness.workload.job import read_api_key

PORTS = (13305, 8000, 8080, 11434)  # where servers of this machine usually are
LEVELS = (1, 4, 8)  # users
MAX_PROMPT_TOKENS = 128  # with its template, as the server counts
TEMPLATE_TOKENS = 60  # about
FIRST_TOKENS = 12  # of the answer by which the speed is known
SLOW_FIRST_S = 3.0  # a slower first token may include the load of the model; an answer of less time is cheap to repeat
MAX_FIRST_S = 20.0  # for the tokens of that answer
FIND_S = 1.0
WORDS = "one two three"  # of a short prompt whose tokens are counted


class Effort(NamedTuple):
    """How much is measured of a server of some speed. Few sizes, so that runs of one server have the same work."""

    output_tokens: int  # of an answer, at most
    level_s: float  # seconds of each level
    drain_s: float  # for the answers in flight at the end


EFFORTS = (Effort(64, 2.5, 2.0), Effort(48, 5.0, 3.0), Effort(24, 9.0, 5.0), Effort(16, 13.0, 6.0))
_ANSWERS = 2.2  # of one user, that a level has time for


def find_servers(ports: Sequence[int] | None = None) -> list[str]:
    """Return the addresses of the servers on this machine. Raises ServerError without any, and says where it looked."""
    urls, seen = list[str](), dict[str, list[str]]()
    for port in PORTS if ports is None else ports:
        url = f"http://127.0.0.1:{port}"
        try:
            with open_session(None) as session:
                response = session.get(f"{url}/v1/models", timeout=FIND_S, allow_redirects=False)
        except requests.RequestException as error:
            seen.setdefault(probe.explain_connection_error(error), []).append(str(port))
            continue
        if response.status_code in (401, *probe.BUSY) or probe.has_models(response):
            urls.append(url)
        else:
            seen.setdefault(f"another program answers (HTTP {response.status_code})", []).append(str(port))
    if urls:
        return urls
    looked = "; ".join(f"port {', '.join(closed)}: {text}" for text, closed in seen.items())
    raise ServerError(
        f"no LLM server was found on 127.0.0.1 ({looked})",
        next_step="Start the server, or give its address: harness quick http://HOST:PORT",
    )


def describe_server(url: str, model: str | None = None, key_name: str | None = None) -> str:
    """Return address, version and model of a server, or why its model is not known. It sends only GET requests."""
    base, key, notes = probe.parse_base_url(url), read_api_key(key_name), list[str]()
    with open_session(key) as session:
        version = probe.find_version(base, session)
    about = url if version is None else f"{url} ({version})"
    try:
        chosen = choose_model(base, key, key_name, model, notes.append)
    except HarnessError as error:
        return f"{about}: {error.what}"
    return " ".join([f"{about}: '{chosen}'", *(f"({note})" for note in notes)])


def find_running() -> tuple[str, str] | None:
    """Return address and model of the first server here that lists a chat model without a key; None without any."""
    with suppress(HarnessError):
        for url in find_servers():
            with suppress(HarnessError):
                return url, model_of(url)
    return None


def model_of(url: str, key_name: str | None = None) -> str:
    """Return the model that a server has loaded, or its first chat model. Raises as `choose_model`."""
    return choose_model(probe.parse_base_url(url), _key_if_set(key_name), key_name)


def refuse_unlisted_model(url: str, model: str, key_name: str | None = None) -> None:
    """Raise ServerError, with the models of a server, where it does not list this one. A server that does not answer
    is not asked again: it may start later.
    """
    base, key = probe.parse_base_url(url), _key_if_set(key_name)
    with open_session(key) as session:
        try:
            probe.list_models(base, session, key_name)
        except ServerError:
            return
    try:
        refuse_absent_models(base, [model], key, key_name, lambda line: None)
    except ServerError as error:
        next_step = "Give --model with one that it has, or leave it out: then the one that is loaded is taken."
        raise ServerError(error.what, next_step=next_step) from None


def _key_if_set(key_name: str | None) -> str | None:
    with suppress(HarnessError):
        return read_api_key(key_name)
    return None


def quick_scenario(
    target: Target, model: str | None = None, key_name: str | None = None, say: Say = lambda line: None
) -> dict[str, Any]:
    """Return the scenario of `harness quick`, as a file has it. The work fits the speed of the server.

    `model`: None takes the one that is loaded, or the first. Raises ServerError when it does not answer, and
    HarnessError if several are loaded.
    """
    chosen, speed = first_answer(target, model, key_name, say)
    effort = choose_effort(speed)
    load = {
        "user": "batch",
        "stages": [{"users": users, "for_s": effort.level_s} for users in LEVELS],
        "output_tokens": effort.output_tokens,
        "output": "natural",
        "drain_s": effort.drain_s,
    }
    question = "How fast is this server with one user, and with several at once?"
    more: dict[str, Any] = {"prompts": {"tokens": choose_words(speed.prompt_tokens)}, "warmup": {"requests": 0}}
    more["metrics_interval_s"] = 0.5  # a level of 2.5 s needs a few samples, to show a queue
    return running_scenario(question, chosen, {"users": load}, key_name, **more)


def first_answer(
    target: Target, model: str | None = None, key_name: str | None = None, say: Say = lambda line: None
) -> tuple[str, RequestSpeed]:
    """Return the model that is measured, and the speed of a request. Raises as `quick_scenario`."""
    base, key = probe.parse_base_url(target.url), read_api_key(key_name)
    with reported(f"the first answer of {base}", say), key_by_option():
        chosen = when_ready(lambda: choose_model(base, key, key_name, model, say))
        return chosen, when_ready(lambda: measure_speed(base, chosen, key, key_name, with_usage=True))


def count_text(target: Target, model: str, key_name: str | None = None) -> int | None:
    """Return the tokens of `WORDS` as the server counts them, so that prompts can have an exact length; None where it
    counts no text.
    """
    with suppress(HarnessError):
        return probe.make_token_counter(target.url, model, read_api_key(key_name))(WORDS) or None
    return None


def read_context(target: Target, model: str, key_name: str | None = None) -> int | None:
    """Return the tokens that a running server takes of one request, as it reports them; None: not known."""
    with suppress(HarnessError):
        startup = inspect_server(target.url, model, read_api_key(key_name), key_name=key_name).startup
        return None if startup is None else startup.max_model_len
    return None


def template_tokens(
    target: Target, model: str, words: int | None, key_name: str | None = None, *, with_system: bool = False
) -> int:
    """Return the tokens that chat template and salt add to a prompt, by the count of a short one; 0 where the server
    does not count. `words`: the tokens of `WORDS`. `with_system`: of a prompt with a system message.
    """
    if words is None:
        return 0
    roles = ["system", "user"] if with_system else ["user"]
    body = {
        "model": model,
        "messages": [{"role": role, "content": WORDS} for role in roles],
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with suppress(HarnessError):
        key = read_api_key(key_name)
        request = probe.time_request(probe.parse_base_url(target.url), body, key, key_name, MAX_FIRST_S)
        if request.prompt_tokens is not None:
            return max(0, request.prompt_tokens - len(roles) * words) + SALT_WORDS  # each has one token then
    return 0


def choose_effort(speed: RequestSpeed) -> Effort:
    """Return the largest answers of which one user gets two or more in the time of a level."""

    fitting = (effort for effort in EFFORTS if _ANSWERS * speed.answer_s(effort.output_tokens) <= effort.level_s)
    return next(fitting, EFFORTS[-1])


def choose_words(prompt_tokens: int | None) -> int:
    """Return the words of a prompt of at most MAX_PROMPT_TOKENS, by the tokens of the longest one. None: unknown."""
    longest = PROMPT_WORDS[0]
    if prompt_tokens is None:
        return longest
    template = min(TEMPLATE_TOKENS, prompt_tokens)
    per_word = (prompt_tokens - template) / longest
    fitting = (words for words in PROMPT_WORDS if template + (words + SALT_WORDS) * per_word <= MAX_PROMPT_TOKENS)
    return next(fitting, PROMPT_WORDS[-1])


def measure_speed(
    base: str, model: str, key: str | None, key_name: str | None = None, *, with_usage: bool = False
) -> RequestSpeed:
    """Return the speed of a short streamed request. Raises ServerError when the model does not answer.

    A slow one is repeated where the model was perhaps loaded, or the machine busy, and where that costs little time.
    `with_usage` asks for the tokens of its prompt, which some servers refuse.
    """
    begin_s = time.monotonic()
    first = _ask(base, model, key, key_name, with_usage)
    is_cheap = time.monotonic() - begin_s < SLOW_FIRST_S
    if choose_effort(first) is EFFORTS[0] or not (first.ttft_s > SLOW_FIRST_S or is_cheap):
        return first
    return min(first, _ask(base, model, key, key_name, with_usage), key=lambda speed: speed.answer_s(FIRST_TOKENS))


def probe_server(
    target: Target, scenario: Scenario, say: Say, *, timed: bool = False
) -> tuple[RequestSpeed | None, Startup | None]:
    """Return what a server reports of itself, and with `timed` the speed of one request of the scenario's model.

    Without `timed` it sends no generation and loads no model. Raises ServerError when the server does not answer, or
    lacks a model.
    """
    key_name = scenario.api_key_env
    key, others = read_api_key(key_name), models_of_loads(scenario)

    def ask() -> tuple[RequestSpeed | None, Startup | None]:
        if not timed:
            served = inspect_server(target.url, scenario.model, key, key_name=key_name, on_wait=say, others=others)
            return None, served.startup
        served = attach_to_server(
            target.url, scenario.model, key, key_name=key_name, on_wait=say, others=others
        ).served_by
        return measure_speed(served.url, served.model or scenario.model, key, key_name), served.startup

    return when_ready(ask)


def _ask(base: str, model: str, key: str | None, key_name: str | None, with_usage: bool) -> RequestSpeed:
    prompt = text(PROMPT_WORDS[0], time.time_ns(), "speed")  # in no prefix cache
    message = {"role": "user", "content": prompt}
    body: dict[str, Any] = {"model": model, "messages": [message], "max_tokens": FIRST_TOKENS, "stream": True}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    return speed_of(probe.time_request(base, body, key, key_name, MAX_FIRST_S))


def speed_of(request: Request) -> RequestSpeed:
    """Return the TTFT and TPOT of a request. A chunk of an unknown number of tokens is one.

    Without TPOT, of an answer in too few pieces, half of its time is taken for that of the prompt.
    """
    tokens = request.output_tokens or len(request.chunks_s)
    rows = rows_of([replace(request, output_tokens=tokens)])
    (ttft_s,), (tpot_s,), (prompt,) = formulas.ttft(rows), formulas.tpot(rows), rows.prompt_tokens
    if not tpot_s > 0:
        half_s = request.ended_s / 2
        ttft_s, tpot_s = half_s, half_s / (tokens if tokens > 1 else FIRST_TOKENS)
    return RequestSpeed(float(ttft_s), float(tpot_s), None if np.isnan(prompt) else int(prompt))


def quick_report(folder: Path, target: Target, options: Mapping[str, object]) -> QuickReport:
    """Return what a finished run of a `quick_scenario` found. `options`: those of the command line for this server."""
    summarized = with_findings(summarize_with_counts(folder))
    data, summary = summarized.data, summarized.summary
    load, ran = next(iter(data.run.scenario.loads.values())), next(iter(data.run.cells))
    levels, cells = quick_levels(data, summary), list(data.cells.values())
    alone, share = levels[0], next(iter(summary.hardware_shares), None)
    death = death_answer(summary, data.run) or None
    return QuickReport(
        run=str(folder),
        url=target.url,
        model=data.run.scenario.model,
        server=ran.served_by.version,
        simulated=summary.simulated,
        valid=bool(summary.valid),
        reasons=group_reasons(summary.reasons),
        death=death,
        one_user_tok_s=alone.user_tok_s,
        prefill_tok_s=alone.prefill_tok_s,
        ttft_ms=alone.ttft_ms,
        users=levels,
        tokens_counted=counts_tokens(cells),
        prompt_tokens=median_prompt(cells),
        answer_tokens=max_length(load.output_tokens),
        level_s=load.duration_s,
        telemetry=None if data.run.remote is None else data.run.remote.machine.name,
        share=None if share is None else share.values["share"],
        share_sentence=None if share is None else sentence(share),
        finding=next(iter(summary.findings or []), None),
        notes=quick_notes(summary),
        next=next_commands(data.run, target.url, alone.user_tok_s, options, died=bool(death)),
    )


def combinations_report(folder: Path, target: Target, options: Mapping[str, object]) -> CombinationsReport:
    """Return what a finished run of combinations found. `options`: those of the command line for this server."""
    summarized = summarize_with_counts(folder)
    data, summary = summarized.data, summarized.summary
    combinations, ran = combination_numbers(data, summary), next(iter(data.run.cells))
    is_here = data.run.remote is not None or is_this_machine(urlsplit(ran.served_by.url or target.url).hostname or "")
    where = option_words({"--runs": options.get("--runs")})
    return CombinationsReport(
        run=str(folder),
        url=target.url,
        model=data.run.scenario.model,
        simulated=summary.simulated,
        valid=bool(summary.valid),
        reasons=group_reasons(summary.reasons),
        combinations=combinations,
        notes=combination_notes(combinations),
        facts=facts_to_paste(data.run, ran, is_here=is_here),
        next={
            command_line("harness", "report", data.run.id, *where): "all percentiles, findings and charts",
            command_line(
                "harness", "capacity", "--url", target.url, *option_words(options)
            ): f"how many chat users it holds within {LIMITS[0]} and {LIMITS[1]}",
        },
    )


def _gpu_words(run: Run, *, is_here: bool) -> list[str] | None:
    """The words by which `expect` knows the server's GPU: none on its own machine. None: the GPU is not known."""
    is_sampled = is_here or run.remote is not None
    specs = map(identify_gpu, run.server_machine.gpus) if is_sampled else ()
    name = next((spec.name for spec in specs if spec is not None), None)
    if name is None:
        return None
    return [] if is_here else ["--gpu", name]


def next_commands(
    run: Run, url: str, tok_s: float | None, options: Mapping[str, object], *, died: bool = False
) -> dict[str, str]:
    """Return commands to go on with, each with what it answers. They work on this machine as they are; where the model
    has no files here, one needs its size and GPU.
    """
    if died:
        return {command_line("harness", "explain", "LOG"): "why the server ended, by its own log"}
    given = list(option_words(options))
    measured = [] if tok_s is None else ["--measured", f"{tok_s:.3g}"]
    command = command_line("harness", "quick", url, *given)
    where = option_words({"--runs": options.get("--runs")})
    more = {
        command_line("harness", "live", "--url", url, *given): "its numbers under a load that you set in the browser"
    }
    is_here = run.remote is None and is_this_machine(urlsplit(url).hostname or "")
    gpu = _gpu_words(run, is_here=is_here)
    if measured:
        normal = command_line("harness", "expect", "SIZE", *(["--gpu", "NAME"] if gpu is None else gpu), *measured)
        by = "the model's size (14B)" + (" and its GPU (7900 XTX)" if gpu is None else "")
        more = {normal: f"whether that is normal, by {by}"} | more
    if is_here or gpu is not None:
        with suppress(HarnessError):
            read_model(find_model(run.scenario.model))  # the name that a server gives its model is often no model here
            allowed = command_line("harness", "expect", *(gpu or ()), *measured, *positional(run.scenario.model))
            more = {allowed: f"what {'this' if is_here else 'its'} machine allows"}
    capacity = command_line("harness", "capacity", "--url", url, *given)
    return {
        capacity: f"how many chat users it holds within {LIMITS[0]} and {LIMITS[1]}",
        **more,
        f"{command} && {command_line('harness', 'compare', run.id, 'last', *where)}": "whether a change made it faster",
    }
