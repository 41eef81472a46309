"""Loads, settings and numbers as texts, the same in every report."""

import re
import unicodedata
from typing import Any

import msgspec

from harness.base import units
from harness.base.measured import NEEDED, Distribution
from harness.base.metrics import METRICS, Metric
from harness.base.reason import Reason
from harness.base.units import milliseconds
from harness.numbers.comparison import SameAnswers
from harness.numbers.schedule import load_kind
from harness.numbers.summary import Row
from harness.report.elements import missing
from harness.scenario import USERS, Arrivals, Load, Trace, max_concurrency

_FIRST = ("ttft", "ttfo")
CHECK_MARKS = {"passed": "passed", "failed": "FAILED", "inconclusive": "inconclusive"}
OVER_E2E = "over E2E"  # of a speed: of the whole answer, its start included
SIMULATED_WORD, SIMULATED_TEXT = "SIMULATED ENGINE", "these numbers come from a model, not from hardware"
SIMULATED = f"{SIMULATED_WORD}: {SIMULATED_TEXT}"


def format_percentile(row: Row, metric: Metric) -> str:
    """A percentile of times in milliseconds, or the number of requests that it needs.

    "> 25,300": so many requests were cut that only a lower bound is known. Only "n/a" where an imported file does not
    have it; a note has the reason.
    """
    sample, name = metric.sample(row.pooled), metric.statistic
    value: float | None = getattr(sample, name)
    if metric.latency in _FIRST and row.pooled.bundle is not None and row.pooled.bundle.pieces <= 1:
        return missing("whole")  # the first token comes with the last one
    if value is not None:
        return milliseconds(value)
    if sample.known_count >= NEEDED[name] and sample.above is not None:
        return f"> {milliseconds(sample.above)}"
    few = sample.known_count < NEEDED[name] and metric.latency not in row.missing
    few = few and (sample.known_count > 0 or row.pooled.succeeded < NEEDED[name])  # else no answer has it, however many
    return missing(f"needs {NEEDED[name]}") if few else missing()


def format_maximum(sample: Distribution) -> str:
    """The maximum in milliseconds; "> 25,300" where the oldest cut request is older."""
    return units.milliseconds(sample.max) if sample.above is None else f"> {units.milliseconds(sample.above)}"


def format_metric(value: float, metric: str) -> str:
    """A value of a verdict's metric with its unit."""
    if METRICS[metric].more_is_better:
        return f"{units.significant(value)} {METRICS[metric].unit}"
    return f"{units.milliseconds(value)} ms" if METRICS[metric].latency else units.seconds(value)


def one_line(text: str) -> str:
    """A text from outside on one line, without control characters, which a terminal would act on."""
    return neutral(re.sub(r"[ \t\r\n\f\v]+", " ", text)).strip()


def neutral(text: str) -> str:
    """A line from outside without control characters; its spaces stay."""
    controls = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in controls else c for c in text)


def max_in_flight(load: Load) -> int:
    """The maximum number of requests that a load keeps in flight."""
    return max_concurrency(load) if load.user in USERS else load.users * (load.batch_size or 1)


def describe_load(load: Load) -> str:
    """How a load sends requests, and its settings: "batch user, bursts: batch_size 5, requests 25"."""
    defaults = msgspec.to_builtins(Load(user=load.user, output_tokens=-1))
    given = {key: value for key, value in msgspec.to_builtins(load).items() if value != defaults[key]}
    settings = ", ".join(f"{key} {format_setting(value)}" for key, value in given.items())
    return f"{load.user} user, {load_kind(load)}" + (f": {settings}" if settings else "")


def describe_arrivals(arrivals: Arrivals) -> str:
    """The rate of an open loop: "Poisson, 4 a second"."""
    if arrivals.wave is not None:
        wave = arrivals.wave
        rate = f"{wave.min:g} to {wave.max:g} a second and back in {wave.period_s:g} s"
    elif arrivals.points is not None:
        rate = ", ".join(f"{rate:g} a second from {at:g} s" for at, rate in arrivals.points)
    else:
        rate = f"{arrivals.rate:g} a second"
    spread = {"even": "evenly", "poisson": "Poisson", "gamma": f"in bursts ({arrivals.burstiness:g})"}
    return f"{spread[arrivals.spacing]}, {rate}"


def describe_trace(trace: Trace) -> str:
    """The part of a trace that is replayed, and its speed: "day.csv from 600 s to 1200 s, at 2 times its speed"."""
    window = [f"from {trace.from_s:g} s"] if trace.from_s else []
    window += [f"to {trace.to_s:g} s"] if trace.to_s is not None else []
    at_most = "" if trace.max_requests is None else f", {trace.max_requests:,} rows at most"
    speed = "" if trace.speed == 1 else f", at {trace.speed:g} times its speed"
    return f"{' '.join([trace.file, *window])}{at_most}{speed}"


def describe_schedule(load: Load) -> str:
    """The trace or the arrivals that decide when requests are sent; empty for a closed loop."""
    if load.trace is not None:
        return f"trace {describe_trace(load.trace)}"
    return f"open loop, {describe_arrivals(load.arrivals)}" if load.arrivals is not None else ""


def format_setting(value: Any) -> str:
    """A value of a setting, as the scenario writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + " ".join(map(format_setting, value)) + "]"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{key}: {format_setting(item)}" for key, item in value.items() if item is not None) + "}"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


# By the first part of a failure's id.
_FAILURE_KINDS = {
    "mem": "memory", "shm": "shared memory", "cli": "settings", "hf": "model", "model": "model", "gpu": "GPU",
    "disk": "disk",
}  # fmt: skip


def failure_kind(reason: Reason) -> str:
    """Why a setting of a sweep failed, in a word or two for a table."""
    failure = str(reason.values.get("failure", ""))
    if failure.endswith((".memory", ".oom_kill")):
        return "memory"
    kinds = {"setting_not_started": "did not start", "setting_too_long": "too long"}
    return _FAILURE_KINDS.get(failure.partition(".")[0]) or kinds.get(reason.code, "died")


def answers_word(answers: SameAnswers) -> str:
    return "cannot tell" if answers.word == "inconclusive" else answers.word


def phase_name(name: str) -> str:
    """A phase of a server's start as it is shown: "ready" there would be read as the whole start."""
    return "until healthy" if name == "ready" else name


def phase_time(value_s: float) -> float:
    """The seconds of a phase as they are shown: less than a millisecond is below what a log's stamps tell."""
    return value_s if value_s >= 0.001 else 0.0
