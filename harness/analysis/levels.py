"""Levels: the amounts of a load that a search may try, and the load of a level."""

import math
from typing import Literal

import msgspec

from harness.analysis.slo import LoadPace
from harness.scenario import MAX_USERS, Load, is_open_loop
from harness.scenario.behaviour import mean_pause_s

CapacityUnit = Literal["users", "requests/s", "times the trace"]
GRID_STEP = 0.1  # between two levels
RATE_STEPS = 10  # the rate of an open loop is varied in tenths of the scenario's rate
MIN_ARRIVALS = 3.0  # of an open loop in a block
QUEUE_S = 120.0  # an open loop has enough users for a queue of this length; with fewer, arrivals would be lost


def log_grid(max_level: int) -> list[int]:
    """Levels from 1 to max_level, each larger by GRID_STEP or by 1."""
    levels = [1]
    while levels[-1] < max_level:
        levels.append(min(max_level, max(levels[-1] + 1, math.floor(levels[-1] * (1 + GRID_STEP)))))
    return levels


def load_unit(load: Load) -> CapacityUnit:
    """The unit of the amount of a load."""
    return "times the trace" if load.trace is not None else "requests/s" if is_open_loop(load) else "users"


def level_step(load: Load) -> float:
    """The amount of one level: one user, or a tenth of an open loop's rate or of a trace's speed."""
    if load.trace is not None:
        return load.trace.speed / RATE_STEPS
    return 1.0 if load.arrivals is None else (load.arrivals.rate or 1.0) / RATE_STEPS


def load_pace(load: Load, amount: float) -> LoadPace:
    """The properties of a load that the length of its blocks depends on."""
    if is_open_loop(load):
        return LoadPace(min_s=MIN_ARRIVALS / amount if load.trace is None else 0.0, open_loop=True)
    return LoadPace(pause_s=mean_pause_s(load.think if load.think is not None else load.think_s))


def load_at(load: Load, amount: float, duration_s: float) -> Load:
    """The load with this amount of users, requests/s, or times the trace. A trace lasts until its end."""
    if load.trace is not None:
        users = math.ceil(load.users * max(1.0, amount / load.trace.speed))
        trace = msgspec.structs.replace(load.trace, speed=amount)
        return msgspec.structs.replace(load, users=min(MAX_USERS, users), trace=trace)
    load = msgspec.structs.replace(load, requests=None, duration_s=duration_s)
    if load.arrivals is None:
        users = round(amount)
        return msgspec.structs.replace(load, users=users, processes=min(load.processes, users))
    users = min(MAX_USERS, max(load.users, math.ceil(QUEUE_S * amount)))
    arrivals = msgspec.structs.replace(load.arrivals, rate=amount)
    return msgspec.structs.replace(load, users=users, arrivals=arrivals)
