"""Loads and names in words, the same in every report."""

import re
import unicodedata
from typing import Any

import msgspec

from harness import units
from harness.analysis.schedule import load_kind
from harness.columns import RATES
from harness.scenario import USERS, Arrivals, Load, Trace, at_once
from harness.summary import NEEDED, Distribution, Reason
from harness.units import milliseconds

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
    """How a load sends requests, and what the scenario sets of it: "bursts: user batch, batch_size 5, requests 25"."""
    usual = msgspec.to_builtins(Load(user=load.user, output_tokens=-1))
    given = {key: value for key, value in msgspec.to_builtins(load).items() if value != usual[key]}
    return f"{load_kind(load)}: user {load.user}" + "".join(f", {key} {setting(value)}" for key, value in given.items())


def arrival_rate(arrivals: Arrivals) -> str:
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


def setting(value: Any) -> str:
    """A value of a setting, as the scenario writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + " ".join(map(setting, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {setting(one)}" for key, one in value.items() if one is not None) + "}"
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
