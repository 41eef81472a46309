"""Compares the planned schedule of an open loop with the requests that were sent.

Only requests with a scheduled time count: the first one of a conversation or task, and each one of a burst or trace.
A user's own locustfile groups requests as it likes, so there each arrival counts once.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Literal

import msgspec

from harness.analysis.derive import max_known, min_known
from harness.rundir.records import Request
from harness.scenario import Arrivals, Load, requests_per_task
from harness.scenario.plan import Schedule, arrival_times
from harness.summary import ScheduleKept, median_of_known

_BUNDLED_USERS = ("batch", "chat", "agent", "rag")  # it is known how many of their requests start with an arrival

Kind = Literal["closed loop", "bursts", "open loop", "trace"]


def load_kind(load: Load) -> Kind:
    """What decides when the requests of this load are sent."""
    if load.trace is not None:
        return "trace"
    if load.arrivals is not None:
        return "open loop"
    return "bursts" if load.user == "batch" and load.in_flight is None else "closed loop"


class ScheduleTally(msgspec.Struct, kw_only=True):
    """Counts of one cell's scheduled requests. Times are on the cell's axis."""

    sent: int = 0
    arrived: int = 0  # of these, the first one of each burst
    first_due_s: float | None = None
    last_due_s: float | None = None
    first_sent_s: float | None = None
    last_sent_s: float | None = None

    def add(self, request: Request, sent_s: float) -> None:
        """Count a measured request of an open loop, also a failed one. Requests without a scheduled time, such as later
        turns, are not part of the schedule.
        """
        if request.scheduled_s is None:
            return
        due_s = sent_s + request.scheduled_s
        self.sent += 1
        self.arrived += request.batch is None or request.batch == request.index
        self.first_due_s, self.last_due_s = min_known(self.first_due_s, due_s), max_known(self.last_due_s, due_s)
        self.first_sent_s, self.last_sent_s = min_known(self.first_sent_s, sent_s), max_known(self.last_sent_s, sent_s)


def first_arrival_s(load: Load, seed: int) -> float | None:
    """Seconds from the start of an open loop's measured time to its first arrival; None for other loads."""
    return None if load.arrivals is None else Schedule(load.arrivals, seed).at(0)


def schedule_kept(
    tally: ScheduleTally, load: Load, seed: int, window_s: float | None, mix_window_s: tuple[float, float] | None = None
) -> ScheduleKept | None:
    """Planned and sent requests of one cell, and their rates; None for a closed loop.

    `window_s`: the measured time of a timed load. `mix_window_s`: the part of it that counts in a mix.
    """
    if load_kind(load) not in ("open loop", "trace"):
        return None
    planned = planned_count(load, seed, mix_window_s)
    sent = tally.arrived if counts_arrivals(load) else tally.sent
    if load.duration_s is not None:
        planned_s = load.duration_s if mix_window_s is None else mix_window_s[1] - mix_window_s[0]
        asked_per_s = None if planned is None else planned / planned_s
        achieved_per_s = sent / window_s if window_s else None
    else:
        asked_per_s = _rate(sent, tally.first_due_s, tally.last_due_s)
        achieved_per_s = _rate(sent, tally.first_sent_s, tally.last_sent_s)
    return ScheduleKept(
        planned=planned,
        sent=sent,
        never_sent=None if planned is None else max(0, planned - sent),
        asked_per_s=asked_per_s,
        achieved_per_s=achieved_per_s,
    )


def pool_schedules(cells: Sequence[ScheduleKept | None]) -> ScheduleKept | None:
    """The sums over several cells of one row, and the medians of their rates."""
    known = [cell for cell in cells if cell is not None]
    if not known:
        return None
    is_planned = all(cell.planned is not None for cell in known)
    return ScheduleKept(
        planned=sum(cell.planned or 0 for cell in known) if is_planned else None,
        sent=sum(cell.sent for cell in known),
        never_sent=sum(cell.never_sent or 0 for cell in known) if is_planned else None,
        asked_per_s=median_of_known(cell.asked_per_s for cell in known),
        achieved_per_s=median_of_known(cell.achieved_per_s for cell in known),
    )


def counts_arrivals(load: Load) -> bool:
    """Whether the schedule counts arrivals, because the number of requests of an arrival is unknown."""
    return load.trace is None and load.user not in _BUNDLED_USERS


def planned_count(load: Load, seed: int, mix_window_s: tuple[float, float] | None = None) -> int | None:
    """The planned number of scheduled requests, or of arrivals where these are counted. None: it is not planned."""
    if load.trace is not None:
        return load.requests
    if load.arrivals is None or (load.requests is not None and counts_arrivals(load)):
        return None
    in_bursts = load.user == "batch"  # each request of a burst has a scheduled time; of a conversation only the first
    if load.requests is not None:
        return load.requests if in_bursts else -(-load.requests // requests_per_task(load))
    if load.duration_s is None:
        return None  # the user stops a live load
    start_s, end_s = mix_window_s or (0.0, load.duration_s)
    arrivals = msgspec.json.encode(load.arrivals)
    count = _arrivals_before(arrivals, seed, min(end_s, load.duration_s)) - _arrivals_before(arrivals, seed, start_s)
    return count * requests_per_task(load) if in_bursts else count


@lru_cache(maxsize=16)
def _arrivals_before(arrivals: bytes, seed: int, end_s: float) -> int:
    """The number of planned arrivals before `end_s`. `arrivals` as JSON, so that it can be a key of the cache."""
    due_times_s = arrival_times(msgspec.json.decode(arrivals, type=Arrivals), seed)
    return sum(1 for _ in takewhile(lambda at_s: at_s < end_s, due_times_s))


def _rate(count: int, first_s: float | None, last_s: float | None) -> float | None:
    if first_s is None or last_s is None or last_s <= first_s:
        return None
    return (count - 1) / (last_s - first_s)
