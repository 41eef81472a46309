"""Whether the load generator itself was the limit of a cell's numbers, and of which: the self-check of docs/method.md.

One list of findings out of marks and records; reports, verdicts, JUnit, OpenMetrics and JSON all show this one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from harness.analysis.tally import CellCounts
from harness.rundir.records import MAX_CPU, ProcessMark
from harness.scenario import Load, is_open
from harness.summary import ClientLimit, Numbers, Reason, because
from harness.workers import MACHINE, Workers

MAX_SEND_LAG_S = 0.010
MAX_SHARED = 0.01  # of the chunks, or of the first ones
MAX_LOOP_LAG_S = 0.005
MAX_LOST = 0.02  # of a request's time, between its answer and what follows: the noise floor that is assumed
MAX_CORE_WAIT = 0.05
STILL_S = 0.5  # a longer pause of a load process that used less than BUSY_CPU of a core was imposed on it
BUSY_CPU = 0.5

_CHUNKS = ["chunk_gap_s"]
_FIRST = ["ttft_s", "ttfo_s", "tpot_s", "ttft_sched_s"]
_RATES = ["wall_s", "output_tok_s", "input_tok_s", "requests_per_s"]
_TIMES = [*_FIRST, "e2e_s", "e2e_sched_s", *_CHUNKS]
_ALL = [*_RATES, *_TIMES]


class Limited(NamedTuple):
    """A limit of the load generator, and the reason or note that it is."""

    limit: ClientLimit
    reason: Reason


def client_limits(
    load: Load, tally: CellCounts, numbers: Numbers, marks: Sequence[ProcessMark], workers: Workers | None = None
) -> list[Limited]:
    """What of a cell the load generator limited; nothing where it was good enough, or left no marks."""
    found = [
        *_cpu(load, marks, workers),
        *_send_lag(load, tally, marks),
        *_shared(load, tally, numbers, marks),
        *_read_late(load, tally, marks),
        *_slow(load, numbers, marks),
    ]
    return [_only_known(limit, reason, numbers) for limit, reason in found]


def called(process: int, marks: Sequence[ProcessMark], workers: Workers | None) -> str:
    """A load process as people know it: of several machines with the name of its own."""
    if workers is None:
        return str(process)
    hosts = [mark.host for mark in marks if mark.process == process and mark.host]
    return f"{process % MACHINE} of {hosts[0].rpartition('-')[0] if hosts else 'an unknown machine'}"


def killed(marks: Sequence[ProcessMark]) -> list[int]:
    """Load processes that said hello and no goodbye."""
    starts, ends = ({mark.process for mark in marks if mark.event == event} for event in ("start", "end"))
    return sorted(starts - ends)


def limited(numbers: Sequence[str], limits: Sequence[ClientLimit]) -> list[str]:
    """Those of the numbers, fields of Numbers, that one of the findings is about."""
    return [name for name in numbers if any(name in limit.numbers for limit in limits)]


def _cpu(load: Load, marks: Sequence[ProcessMark], workers: Workers | None) -> list[Limited]:
    starts = {mark.process: mark.monotonic_s for mark in marks if mark.event == "start"}
    found = []
    for mark in marks:
        if mark.event != "end" or mark.cpu_s is None or mark.process not in starts:
            continue
        # Without the highest share over 5 s, the mean since the start has to do, which hides a short saturation.
        lived_s = mark.monotonic_s - starts[mark.process]
        share = mark.cpu_max if mark.cpu_max is not None else mark.cpu_s / lived_s if lived_s > 0 else 0.0
        if share > MAX_CPU:
            name, remedy = called(mark.process, marks, workers), _remedy(load, [mark])
            found.append(
                Limited(
                    ClientLimit(what="cpu", value=share, allowed=MAX_CPU, unit="ratio", numbers=_ALL, invalid=True),
                    because("client_cpu", process=name, share=share, max_share=MAX_CPU, remedy=remedy),
                )
            )
    return found


def _send_lag(load: Load, tally: CellCounts, marks: Sequence[ProcessMark]) -> list[Limited]:
    lag_s = tally.median_send_lag_s()
    if lag_s is None or lag_s <= MAX_SEND_LAG_S:
        return []
    more = None if killed(marks) else _nested("remedy_users", users=load.users, processes=load.processes)
    return [
        Limited(
            ClientLimit(what="send_lag", value=lag_s, allowed=MAX_SEND_LAG_S, unit="s", numbers=_ALL, invalid=True),
            because("client_send_lag", lag_s=lag_s, max_s=MAX_SEND_LAG_S, remedy=more),
        )
    ]


def _shared(load: Load, tally: CellCounts, numbers: Numbers, marks: Sequence[ProcessMark]) -> list[Limited]:
    """Chunks that the client put together, since it read late. Chunks that a server sends at once do not count.

    Of fast streams a late read often looks timely (its last bytes have just come): where the loop was late most of the
    time, all chunks that shared a read are taken for the client's.
    """
    often_late = (_worst(marks, "loop_lag_p50_s") or 0.0) > MAX_LOOP_LAG_S
    chunks, first = (
        (tally.coalesced, tally.first_shared) if often_late else (tally.coalesced_late, tally.first_shared_late)
    )
    share = chunks / tally.chunks if tally.chunks else 0.0
    first_share = first / numbers.succeeded if numbers.succeeded else 0.0
    spoilt = (_FIRST if first_share > MAX_SHARED else []) + (_CHUNKS if share > MAX_SHARED else [])
    if not spoilt:
        return []
    worst, remedy = max(share, first_share), _remedy(load, marks)
    return [
        Limited(
            ClientLimit(what="shared_reads", value=worst, allowed=MAX_SHARED, unit="ratio", numbers=spoilt),
            because("client_shared_reads", chunks=share, first_chunks=first_share, max_share=MAX_SHARED, remedy=remedy),
        )
    ]


def _read_late(load: Load, tally: CellCounts, marks: Sequence[ProcessMark]) -> list[Limited]:
    """Without the kernel's stamps a late loop is a late time."""
    share, lag_s = 0.01, _worst(marks, "loop_lag_p99_s")
    if lag_s is None:  # too short a time
        share, lag_s = 0.5, _worst(marks, "loop_lag_p50_s")
    if not tally.read_clock or lag_s is None or lag_s <= MAX_LOOP_LAG_S:
        return []
    remedy = _remedy(load, marks)
    return [
        Limited(
            ClientLimit(what="read_clock", value=lag_s, allowed=MAX_LOOP_LAG_S, unit="s", numbers=_TIMES),
            because("client_read_clock", share=share, lag_s=lag_s, max_s=MAX_LOOP_LAG_S, remedy=remedy),
        )
    ]


def _slow(load: Load, numbers: Numbers, marks: Sequence[ProcessMark]) -> list[Limited]:
    """Where requests follow answers, the time from an answer to what follows it is part of every rate."""
    lag_s, e2e_s = _worst(marks, "loop_lag_mean_s"), numbers.e2e_s.mean
    if is_open(load) or lag_s is None or not e2e_s:
        return []
    allowed_s = max(MAX_LOOP_LAG_S, MAX_LOST * e2e_s)
    if lag_s <= allowed_s:
        return []
    remedy = _remedy(load, marks)
    return [
        Limited(
            ClientLimit(what="loop_lag", value=lag_s, allowed=allowed_s, unit="s", numbers=_RATES),
            because("client_loop_lag", lag_s=lag_s, share=lag_s / e2e_s, max_s=allowed_s, remedy=remedy),
        )
    ]


def _only_known(limit: ClientLimit, reason: Reason, numbers: Numbers) -> Limited:
    """Without the numbers that the cell does not have."""
    values = {name: getattr(numbers, name) for name in limit.numbers}
    kept = [name for name, value in values.items() if value is not None and getattr(value, "n", 1) > 0]
    return Limited(
        msgspec.structs.replace(limit, numbers=kept), Reason(reason.code, {"numbers": kept, **reason.values})
    )


def _worst(marks: Sequence[ProcessMark], name: str) -> float | None:
    return max((value for mark in marks if (value := getattr(mark, name)) is not None), default=None)


def _remedy(load: Load, marks: Sequence[ProcessMark]) -> Any:
    """What to do about it."""
    if killed(marks):
        return _nested("remedy_run_again")
    starts = {mark.process: mark.monotonic_s for mark in marks if mark.event == "start"}
    if paused := next((mark for mark in marks if _stood_still(mark, starts.get(mark.process))), None):
        return _nested("remedy_paused", process=paused.process % MACHINE, seconds=paused.loop_lag_max_s)
    waited = _worst(marks, "core_wait") or 0.0
    if waited > MAX_CORE_WAIT:
        return _nested("remedy_free_core", share=waited)
    return _nested("remedy_processes", processes=load.processes)


def _nested(code: str, **values: Any) -> Any:
    """A reason as a value of another one."""
    return msgspec.to_builtins(because(code, **values))


def _stood_still(mark: ProcessMark, started_s: float | None) -> bool:
    """Return whether one pause made a process late that had little to do and was not waiting for a core in it."""
    pause_s, busy = mark.loop_lag_max_s, (mark.cpu_max or 0.0) >= BUSY_CPU
    if pause_s is None or pause_s < STILL_S or busy or started_s is None:
        return False
    if mark.core_wait is None:
        return mark.loop_lag_p50_s is not None and mark.loop_lag_p50_s <= MAX_LOOP_LAG_S
    # An upper bound of the time spent waiting: the share was counted from the first measured request on.
    return pause_s > mark.core_wait * (mark.monotonic_s - started_s)
