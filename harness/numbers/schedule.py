"""Compares the planned schedule of an open loop with the requests that were sent.

Only requests with a scheduled time count: the first one of a conversation or task, and each one of a burst or trace.
A user's own locustfile groups requests as it likes, so there each arrival counts once.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from harness.base.measured import ScheduleKept, median_of_known
from harness.records.columns import Floats, Rows
from harness.records.records import ProcessMark
from harness.records.run_data import CellData
from harness.scenario import Arrivals, Load, requests_per_task
from harness.scenario.plan import arrival_times


class WarmupResult(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The warm-up of a cell."""

    requests: int
    seconds: float | None = None  # from its first request to the start of the measurement
    steady: bool | None = None  # whether it found the server steady; None: it did not check that


_BUNDLED_USERS = ("batch", "chat", "agent", "rag")  # it is known how many of their requests start with an arrival

Kind = Literal["closed loop", "bursts", "open loop", "trace"]


def load_kind(load: Load) -> Kind:
    """What decides when the requests of this load are sent."""
    if load.trace is not None:
        return "trace"
    if load.arrivals is not None:
        return "open loop"
    return "bursts" if load.user == "batch" and load.in_flight is None else "closed loop"


def due_times_s(rows: Rows) -> Floats:
    """When the scheduled requests were due, on the cell's axis. Requests without a scheduled time, such as later turns,
    are not part of the schedule.
    """
    due_s: Floats = (rows.sent_s + rows.scheduled_s)[~np.isnan(rows.scheduled_s)]
    return due_s


def schedule_kept(cell: CellData, load: Load, seed: int, window_s: float | None) -> ScheduleKept | None:
    """Planned and sent requests of one cell, also failed ones, and their rates; None for a closed loop.

    `window_s`: the measured time of a timed load.
    """
    if load_kind(load) not in ("open loop", "trace"):
        return None
    mix_window_s = cell.mix_window_s()
    planned = planned_count(load, seed, mix_window_s)
    rows = cell.counted.where(~np.isnan(cell.counted.scheduled_s))
    starts_burst = np.isnan(rows.batch) | (rows.batch == rows.index)
    sent = int(starts_burst.sum()) if counts_arrivals(load) else len(rows)
    if load.duration_s is not None:
        planned_s = load.duration_s if mix_window_s is None else mix_window_s[1] - mix_window_s[0]
        asked_per_s = None if planned is None else planned / planned_s
        achieved_per_s = sent / window_s if window_s else None
    else:
        asked_per_s, achieved_per_s = _rate(sent, due_times_s(rows)), _rate(sent, rows.sent_s)
    return ScheduleKept(
        planned=planned,
        sent=sent,
        never_sent=None if planned is None else max(0, planned - sent),
        asked_per_s=asked_per_s,
        achieved_per_s=achieved_per_s,
    )


def pool_schedules(cells: Sequence[ScheduleKept | None]) -> ScheduleKept | None:
    """The sums over several cells of one row, and the medians of their rates."""
    schedules = [cell for cell in cells if cell is not None]
    if not schedules:
        return None
    is_planned = all(cell.planned is not None for cell in schedules)
    return ScheduleKept(
        planned=sum(cell.planned or 0 for cell in schedules) if is_planned else None,
        sent=sum(cell.sent for cell in schedules),
        never_sent=sum(cell.never_sent or 0 for cell in schedules) if is_planned else None,
        asked_per_s=median_of_known(cell.asked_per_s for cell in schedules),
        achieved_per_s=median_of_known(cell.achieved_per_s for cell in schedules),
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


def _rate(count: int, at_s: Floats) -> float | None:
    span_s = float(at_s.max() - at_s.min()) if len(at_s) else 0.0
    return (count - 1) / span_s if span_s > 0 else None


def summarize_warmup(
    cell: CellData, marks: Iterable[ProcessMark], first_due_s: float | None = None
) -> WarmupResult | None:
    """The warm-up of a cell; None where there was none.

    `first_due_s`: of an open loop, seconds from the start of the measured time to its first arrival.
    """
    warmup, counted = int((~cell.rows.measured).sum()), cell.counted
    if not warmup:
        return None
    measured_s, due_s = cell.measured_start_s, due_times_s(counted)
    if measured_s is None and len(counted):
        by_schedule = first_due_s is not None and len(due_s) > 0
        measured_s = float(due_s.min()) - (first_due_s or 0.0) if by_schedule else float(counted.sent_s.min())
    steady = [mark.steady for mark in marks if mark.steady is not None]  # each machine checks its own requests
    return WarmupResult(
        requests=warmup,
        seconds=None if measured_s is None else measured_s - float(cell.rows.sent_s.min()),
        steady=all(steady) if steady else None,
    )
