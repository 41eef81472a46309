"""What limited a cell: the load generator (the self-check of docs/method.md), or a stage of the server.

The server's own counters say how long requests waited, were prefilled and decoded; the client's clock says how long
they took. The difference is around the engine: the API process, the network, the client.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from harness.analysis.tally import CellCounts
from harness.rundir.records import MAX_CPU, ProcessMark
from harness.scenario import Load, is_open_loop
from harness.summary import ClientLimit, LimitedBy, Numbers, Reason, ServerLoad, TimeSplit, because
from harness.workers import MACHINE, Workers

MAX_SEND_LAG_S = 0.010
MAX_SHARED = 0.01  # of the chunks, or of the first ones
MAX_LOOP_LAG_S = 0.005
MAX_LOST = 0.02  # of a request's time, between its answer and what follows: the noise floor that is assumed
MAX_CORE_WAIT = 0.05
MIN_COUNTED, MAX_COUNTED = 0.8, 1.5  # requests by the server's count / by the client's; else they are not the same ones
KV_FULL = 0.95  # of the KV cache, while requests wait or are preempted
SHARE = 0.20  # of a request's time that makes queueing, or the API process, the limit

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
    return [
        *_cpu(load, numbers, marks, workers),
        *_send_lag(load, tally, numbers, marks),
        *_shared(load, tally, numbers, marks),
        *_read_late(load, tally, numbers, marks),
        *_slow(load, numbers, marks),
    ]


def called(process: int, marks: Sequence[ProcessMark], workers: Workers | None) -> str:
    """A load process as users know it: of several machines with the name of its own."""
    if workers is None:
        return str(process)
    hosts = [mark.host for mark in marks if mark.process == process and mark.host]
    return f"{process % MACHINE} of {hosts[0].rpartition('-')[0] if hosts else 'an unknown machine'}"


def killed(marks: Sequence[ProcessMark]) -> list[int]:
    """Load processes with a start record and no end record."""
    starts, ends = ({mark.process for mark in marks if mark.event == event} for event in ("start", "end"))
    return sorted(starts - ends)


def limited(numbers: Sequence[str], limits: Sequence[ClientLimit]) -> list[str]:
    """Those of the numbers, fields of Numbers, that one of the findings is about."""
    return [name for name in numbers if any(name in limit.numbers for limit in limits)]


def _limit(
    what: Any, value: float, allowed: float, numbers: Numbers, spoilt: list[str], why: Reason, *, invalid: bool = False
) -> Limited:
    """A limit of those numbers that the cell has."""
    values = {name: getattr(numbers, name) for name in spoilt}
    known = [name for name, found in values.items() if found is not None and getattr(found, "n", 1) > 0]
    unit: Any = "ratio" if what in ("cpu", "shared_reads") else "s"
    limit = ClientLimit(what=what, value=value, allowed=allowed, unit=unit, numbers=known, invalid=invalid)
    return Limited(limit, Reason(why.code, {"numbers": known, **why.values}))


def _cpu(load: Load, numbers: Numbers, marks: Sequence[ProcessMark], workers: Workers | None) -> Iterator[Limited]:
    starts = {mark.process: mark.monotonic_s for mark in marks if mark.event == "start"}
    for mark in marks:
        if mark.event != "end" or mark.cpu_s is None or mark.process not in starts:
            continue
        # Without the highest share over 5 s, the mean since the start has to do, which hides a short saturation.
        lived_s = mark.monotonic_s - starts[mark.process]
        share = mark.cpu_max if mark.cpu_max is not None else mark.cpu_s / lived_s if lived_s > 0 else 0.0
        if share > MAX_CPU:
            name, remedy = called(mark.process, marks, workers), _remedy(load, [mark])
            why = because("client_cpu", process=name, share=share, max_share=MAX_CPU, remedy=remedy)
            yield _limit("cpu", share, MAX_CPU, numbers, _ALL, why, invalid=True)


def _send_lag(load: Load, tally: CellCounts, numbers: Numbers, marks: Sequence[ProcessMark]) -> Iterator[Limited]:
    lag_s = tally.median_send_lag_s()
    if lag_s is not None and lag_s > MAX_SEND_LAG_S:
        more = None if killed(marks) else because("remedy_users", users=load.users, processes=load.processes)
        why = because("client_send_lag", lag_s=lag_s, max_s=MAX_SEND_LAG_S, remedy=more)
        yield _limit("send_lag", lag_s, MAX_SEND_LAG_S, numbers, _ALL, why, invalid=True)


def _shared(load: Load, tally: CellCounts, numbers: Numbers, marks: Sequence[ProcessMark]) -> Iterator[Limited]:
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
    if spoilt:
        remedy = _remedy(load, marks)
        shares = {"chunks": share, "first_chunks": first_share, "max_share": MAX_SHARED}
        why = because("client_shared_reads", **shares, remedy=remedy)
        yield _limit("shared_reads", max(share, first_share), MAX_SHARED, numbers, spoilt, why)


def _read_late(load: Load, tally: CellCounts, numbers: Numbers, marks: Sequence[ProcessMark]) -> Iterator[Limited]:
    """Without the kernel's stamps a late loop is a late time."""
    share, lag_s = 0.01, _worst(marks, "loop_lag_p99_s")
    if lag_s is None:  # too short a time
        share, lag_s = 0.5, _worst(marks, "loop_lag_p50_s")
    if tally.read_clock and lag_s is not None and lag_s > MAX_LOOP_LAG_S:
        remedy = _remedy(load, marks)
        why = because("client_read_clock", share=share, lag_s=lag_s, max_s=MAX_LOOP_LAG_S, remedy=remedy)
        yield _limit("read_clock", lag_s, MAX_LOOP_LAG_S, numbers, _TIMES, why)


def _slow(load: Load, numbers: Numbers, marks: Sequence[ProcessMark]) -> Iterator[Limited]:
    """Where requests follow answers, the time from an answer to what follows it is part of every rate."""
    lag_s, e2e_s = _worst(marks, "loop_lag_mean_s"), numbers.e2e_s.mean
    if is_open_loop(load) or lag_s is None or not e2e_s:
        return
    allowed_s = max(MAX_LOOP_LAG_S, MAX_LOST * e2e_s)
    if lag_s > allowed_s:
        remedy = _remedy(load, marks)
        why = because("client_loop_lag", lag_s=lag_s, share=lag_s / e2e_s, max_s=allowed_s, remedy=remedy)
        yield _limit("loop_lag", lag_s, allowed_s, numbers, _RATES, why)


def _worst(marks: Sequence[ProcessMark], name: str) -> float | None:
    return max((value for mark in marks if (value := getattr(mark, name)) is not None), default=None)


def _remedy(load: Load, marks: Sequence[ProcessMark]) -> Reason:
    if killed(marks):
        return because("remedy_run_again")
    if (waited := _worst(marks, "core_wait") or 0.0) > MAX_CORE_WAIT:
        return because("remedy_free_core", share=waited)
    return because("remedy_processes", processes=load.processes)


def time_split(numbers: Numbers, load: ServerLoad, *, mixed: bool = False) -> TimeSplit | None:
    """Return the mean seconds of a request by stage; None where the server reports none of them.

    `mixed`: other loads used the server at the same time, and its counters do not tell them apart.
    """
    e2e_s, counted = numbers.e2e_s.mean, numbers.sent if load.timed_requests is None else load.timed_requests
    totals = (load.queue_s, load.prefill_s, load.decode_s)
    same = MIN_COUNTED * numbers.succeeded <= counted <= MAX_COUNTED * numbers.sent
    if mixed or not e2e_s or not counted or not same or all(total is None for total in totals):
        return None
    queue_s, prefill_s, decode_s = (None if total is None else total / counted for total in totals)
    api_s = None
    if queue_s is not None and prefill_s is not None and decode_s is not None:
        rest_s = e2e_s - queue_s - prefill_s - decode_s
        api_s = rest_s if rest_s >= 0 else None  # the requests that the server counted were not quite the same
    opened = numbers.connect_s
    return TimeSplit(
        connect_s=None if opened.mean is None else opened.mean * opened.n / numbers.sent,
        api_s=api_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        e2e_s=e2e_s,
    )


def limited_by(split: TimeSplit | None, load: ServerLoad, limits: Sequence[ClientLimit]) -> LimitedBy | None:
    """Return what limited a cell; None where the server does not report enough to tell."""
    if limits:
        return "client"
    if (load.kv_usage_max or 0.0) >= KV_FULL and (load.preemptions or load.waiting_max):
        return "kv_cache"
    if split is None:
        return None
    if split.queue_s is not None and split.queue_s >= SHARE * split.e2e_s:
        return "queue"
    if split.api_s is not None and split.api_s >= SHARE * split.e2e_s:
        return "api"
    if split.queue_s is None or split.prefill_s is None or split.decode_s is None:
        return None
    return "prefill" if split.prefill_s > split.decode_s else "decode"


def mean_split(splits: Sequence[TimeSplit | None]) -> TimeSplit | None:
    """Return the mean over cells, of each stage over those that know it."""
    known = [split for split in splits if split is not None]
    if not known:
        return None

    def mean(name: str) -> float | None:
        values = [value for split in known if (value := getattr(split, name)) is not None]
        return statistics.fmean(values) if values else None

    stages = {name: mean(name) for name in ("connect_s", "api_s", "queue_s", "prefill_s", "decode_s")}
    return TimeSplit(**stages, e2e_s=statistics.fmean(split.e2e_s for split in known))


def common_limit(limits: Sequence[LimitedBy | None]) -> LimitedBy | None:
    """Return what limited more than half of the cells."""
    counted = Counter(limit for limit in limits if limit is not None).most_common(1)
    return counted[0][0] if counted and 2 * counted[0][1] > len(limits) else None
