"""Loads and names in words, the same in every report."""

import re
import unicodedata
from typing import Any

from harness import units
from harness.columns import RATES
from harness.scenario import USERS, Arrivals, Load, Trace, at_once, is_open
from harness.scenario.behaviour import Agent, Rag, lengths_in_words
from harness.summary import NEEDED, Distribution, Reason
from harness.units import count, milliseconds

CHECK_MARKS = {"passed": "passed", "failed": "FAILED", "inconclusive": "inconclusive"}
SIMULATED = "SIMULATED ENGINE: these numbers come from a model, not from hardware"


def percentile(sample: Distribution, name: str) -> str:
    """A percentile of times in milliseconds, or how many requests it would need."""
    value: float | None = getattr(sample, name)
    return f"n/a (needs {NEEDED[name]})" if value is None else milliseconds(value)


def in_unit(value: float, metric: str) -> str:
    if metric in RATES:
        return f"{units.significant(value)} tok/s"
    return units.seconds(value) if metric == "wall_s" else f"{units.milliseconds(value)} ms"


def one_line(text: str) -> str:
    """A text from outside on one line and without control characters, which a terminal would act on."""
    shown = "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c
        for c in re.sub(r"[ \t\r\n\f\v]+", " ", text)
    )
    return shown.strip()


def concurrency(load: Load) -> int:
    """How many requests a load keeps in flight at most."""
    return at_once(load) if load.user in USERS else load.users * (load.batch_size or 1)


def load_in_words(load: Load) -> str:
    """Who sends what: "1 agent, 5 requests at once, 25 requests of 128 tokens"."""
    at_most = "" if load.output == "fixed" else "at most "
    work = "requests" if load.requests is None else count(load.requests, "request")
    time = "" if load.duration_s is None else f" for {load.duration_s:g} s"
    if load.endpoint == "embeddings":
        return f"{_people(load)}, {work} for embeddings{time}"
    length = "the trace's lengths" if load.trace is not None else f"{at_most}{lengths_in_words(load.output_tokens)}"
    return f"{_people(load)}, {work} of {length}{time}"


def arrival_rate(arrivals: Arrivals) -> str:
    """The rate of an open loop: "by chance, 4 a second"."""
    if arrivals.wave is not None:
        wave = arrivals.wave
        rate = f"{wave.min:g} to {wave.max:g} a second and back in {wave.period_s:g} s"
    elif arrivals.points is not None:
        rate = ", ".join(f"{rate:g} a second from {at:g} s" for at, rate in arrivals.points)
    else:
        rate = f"{arrivals.rate:g} a second"
    spread = {"even": "evenly", "poisson": "by chance", "gamma": f"in bursts ({arrivals.burstiness:g})"}
    return f"{spread[arrivals.spacing]}, {rate}"


def replayed(trace: Trace) -> str:
    """Which part of a trace, and how fast: "day.csv from 600 s to 1200 s, at 2 times its speed"."""
    window = [f"from {trace.from_s:g} s"] if trace.from_s else []
    window += [f"to {trace.to_s:g} s"] if trace.to_s is not None else []
    at_most = "" if trace.max_requests is None else f", {trace.max_requests:,} rows at most"
    speed = "" if trace.speed == 1 else f", at {trace.speed:g} times its speed"
    return f"{' '.join([trace.file, *window])}{at_most}{speed}"


def loop(load: Load) -> str:
    """What decides when a request is sent; nothing for those who wait for their answers."""
    if load.trace is not None:
        return f"trace {replayed(load.trace)}"
    return f"open loop, {arrival_rate(load.arrivals)}" if load.arrivals is not None else ""


def _people(load: Load) -> str:
    if is_open(load):
        who = {"chat": "conversations", "batch": "requests" if (load.batch_size or 1) == 1 else "bursts"}
        more = f" of {load.batch_size} requests" if (load.batch_size or 1) > 1 else ""
        begun = f"{who.get(load.user, f'{load.user} users')}{more} begin by a schedule ({loop(load)})"
        return f"{begun}, at most {count(load.users, 'user')} at once"
    if load.user == "chat":
        think = f", {load.think_s[0]:g} to {load.think_s[1]:g} s of thinking" if load.think_s else ""
        if load.think is not None:
            think = f", {load.think.mean_s:g} s of thinking on average"
        return count(load.users, "chat user") + think
    if load.user == "batch":
        size = load.batch_size or 1
        how = "one request at a time" if size == 1 else f"{size} requests at once"
        if load.in_flight is not None:
            how = f"always {count(load.in_flight, 'request')} in flight"
            how += f" each, {at_once(load):,} in all" if load.users > 1 else ""
        return f"{count(load.users, 'agent')}, {how}"
    if load.user == "agent":
        agent = load.agent or Agent()
        helped = f", with {count(agent.sub_agents, 'sub-agent')} each" if agent.sub_agents else ""
        return f"{count(load.users, 'agent')} with tools{helped}, tasks of {count(agent.steps, 'step')}"
    if load.user == "rag":
        rag = load.rag or Rag()
        documents = f"{count(rag.documents, 'document')} of {rag.document_tokens:,} tokens"
        return f"{count(load.users, 'user')} who ask about {documents}"
    return count(load.users, "user") + f" of {load.user}"


def setting(value: Any) -> str:
    """A value of a varied setting, as the scenario writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + " ".join(map(setting, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


# How a table says why a setting failed, by the first part of the failure's id.
_FAILED = {
    "mem": "memory", "shm": "shared memory", "cli": "settings", "hf": "model", "model": "model", "gpu": "GPU",
    "disk": "disk",
}  # fmt: skip


def failed(reason: Reason) -> str:
    """Why a setting of a sweep failed, in a word or two."""
    failure = str(reason.values.get("failure", ""))
    if failure.endswith((".memory", ".oom_kill")):
        return "memory"
    return _FAILED.get(failure.partition(".")[0]) or ("died" if reason.code == "setting_died" else "did not start")
