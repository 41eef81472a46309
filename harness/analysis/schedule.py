"""How the schedule of an open loop was kept: counted request by request, and the numbers that follow.

Only requests with a time of their own count: the first of a conversation or task, each of a burst or of a trace. Of an
own locustfile, which groups requests as it likes, each arrival counts once.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Literal

import msgspec

from harness.analysis.derive import earliest, latest
from harness.rundir.records import Request
from harness.scenario import Arrivals, Load, requests_per_task
from harness.scenario.plan import Schedule, arrival_times
from harness.summary import ScheduleKept, median_of_known

_KNOWN = ("batch", "chat", "agent", "rag")  # of these it is known how many requests begin with an arrival

Kind = Literal["closed loop", "bursts", "open loop", "trace"]


def kind_of(load: Load) -> Kind:
    """What decides when a request of this load is sent."""
    if load.trace is not None:
        return "trace"
    if load.arrivals is not None:
        return "open loop"
    return "bursts" if load.user == "batch" and load.in_flight is None else "closed loop"


class ScheduleTally(msgspec.Struct, kw_only=True):
    """What was counted of one cell. Times on the cell's axis."""

    sent: int = 0
    arrived: int = 0  # of these, the first of each burst
    first_due_s: float | None = None
    last_due_s: float | None = None
    first_sent_s: float | None = None
    last_sent_s: float | None = None

    def add(self, request: Request, sent_s: float) -> None:
        """Count a measured request of an open loop, whatever became of it. One without a time of its own, such as a
        later turn, is no part of the schedule; it was due when it was sent.
        """
        if request.scheduled_s is None:
            return
        due_s = sent_s + request.scheduled_s
        self.sent += 1
        self.arrived += request.batch is None or request.batch == request.index
        self.first_due_s, self.last_due_s = earliest(self.first_due_s, due_s), latest(self.last_due_s, due_s)
        self.first_sent_s, self.last_sent_s = earliest(self.first_sent_s, sent_s), latest(self.last_sent_s, sent_s)


def first_due_of(load: Load, seed: int) -> float | None:
    """When the first is due after the start of an open loop's measured time; None of others."""
    return None if load.arrivals is None else Schedule(load.arrivals, seed).at(0)


def kept_of(
    counted: ScheduleTally, load: Load, seed: int, window_s: float | None, part_s: tuple[float, float] | None = None
) -> ScheduleKept | None:
    """How one cell kept its schedule; None of a closed loop. `window_s`: the measured time of a timed load; `part_s`:
    the part of it that counts, of one in a mix.
    """
    kind = kind_of(load)
    if kind not in ("open loop", "trace"):
        return None
    planned = planned_of(load, seed, part_s)
    sent = counted.arrived if counts_arrivals(load) else counted.sent
    if load.duration_s is not None:
        over_s = load.duration_s if part_s is None else part_s[1] - part_s[0]
        asked = None if planned is None else planned / over_s
        achieved = sent / window_s if window_s else None
    else:
        asked = _rate(sent, counted.first_due_s, counted.last_due_s)
        achieved = _rate(sent, counted.first_sent_s, counted.last_sent_s)
    return ScheduleKept(
        planned=planned,
        sent=sent,
        never_sent=None if planned is None else max(0, planned - sent),
        asked_per_s=asked,
        achieved_per_s=achieved,
    )


def pooled(cells: Sequence[ScheduleKept | None]) -> ScheduleKept | None:
    """Of several cells of one row: sums, and rates as medians."""
    known = [cell for cell in cells if cell is not None]
    if not known:
        return None
    planned = [cell.planned for cell in known if cell.planned is not None]
    never = [cell.never_sent for cell in known if cell.never_sent is not None]
    return ScheduleKept(
        planned=sum(planned) if len(planned) == len(known) else None,
        sent=sum(cell.sent for cell in known),
        never_sent=sum(never) if len(never) == len(known) else None,
        asked_per_s=median_of_known(cell.asked_per_s for cell in known),
        achieved_per_s=median_of_known(cell.achieved_per_s for cell in known),
    )


def counts_arrivals(load: Load) -> bool:
    """Whether it is only known when somebody comes, and not how many requests begin then."""
    return load.trace is None and load.user not in _KNOWN


def planned_of(load: Load, seed: int, part_s: tuple[float, float] | None = None) -> int | None:
    """How many requests have a time of their own by plan; of an own locustfile how many arrivals are due. None: how
    many arrivals a number of requests makes is up to it.
    """
    if load.trace is not None:
        return load.requests
    if load.arrivals is None or (load.requests is not None and counts_arrivals(load)):
        return None
    burst = load.user == "batch"  # of which each request has a time; of others only the first of what is taken
    together = requests_per_task(load) if burst else 1
    if load.requests is not None:
        return load.requests if burst else -(-load.requests // requests_per_task(load))
    if load.duration_s is None:
        return None  # steered by hand
    whole_s = load.duration_s
    low_s, high_s = (0.0, whole_s) if part_s is None else (part_s[0], min(part_s[1], whole_s))
    arrivals = msgspec.json.encode(load.arrivals)
    return (_arriving(arrivals, seed, high_s) - _arriving(arrivals, seed, low_s)) * together


@lru_cache(maxsize=16)
def _arriving(arrivals: bytes, seed: int, duration_s: float) -> int:
    due = arrival_times(msgspec.json.decode(arrivals, type=Arrivals), seed)
    return sum(1 for _ in takewhile(lambda at: at < duration_s, due))


def _rate(number: int, first_s: float | None, last_s: float | None) -> float | None:
    if first_s is None or last_s is None or last_s <= first_s:
        return None
    return (number - 1) / (last_s - first_s)
