"""Finds what limited a cell: the load generator (the self-check of docs/method.md), or a stage of the server.

Where the load generator was late, `client_errors` bounds by how much it made the numbers wrong.

The server's counters give the time that requests waited, were prefilled and decoded; the client's clock gives the time
that they took. The difference was spent around the engine: in the API process, the network and the client.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.analysis.latencies import PERMILLES, latency_sample
from harness.analysis.numbers import carried_per_answer
from harness.analysis.stats import Array, percentile
from harness.base.summary import ClientLimit, LimitedBy, Numbers, Reason, ServerLoad, TimeSplit, because
from harness.records.records import MAX_CPU, SLACK_S, ProcessMark
from harness.records.run_data import CellData
from harness.records.table import Bools, Rows
from harness.scenario import Load, is_open_loop
from harness.scenario.workers import MACHINE, Workers

MAX_SEND_LAG_S = 0.010
MAX_SHARED = 0.01  # of the chunks, or of the first chunks
MAX_LOOP_LAG_S = 0.005
MAX_LOST = 0.02  # of a request's time, between its answer and the next request: the assumed noise floor
MAX_CORE_WAIT = 0.05  # of the time, waiting for a free core
MIN_COUNTED, MAX_COUNTED = 0.8, 1.5  # requests by the server's count / by the client's; outside, they are not the same
KV_FULL = 0.95  # of the KV cache, while requests wait or are preempted
MAX_OTHERS = 0.02  # of the requests: so many may be on one side only, the server's or the client's
SHARE = 0.20  # of a number or a request's time: from this share on, client, queueing or API process is the limit

_CHUNKS = ["chunk_gap_s"]
_FIRST_CHUNK = ["ttft_s", "ttfo_s", "tpot_s", "ttft_sched_s"]
_RATES = ["wall_s", "output_tok_s", "input_tok_s", "requests_per_s"]
_TIMES = [*_FIRST_CHUNK, "e2e_s", "e2e_sched_s", *_CHUNKS]
_FROM_SCHEDULE = ["ttft_sched_s", "e2e_sched_s"]


class Limited(NamedTuple):
    """A limit of the load generator, and the reason or note that reports it."""

    limit: ClientLimit
    reason: Reason


def client_limits(
    load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark], workers: Workers | None = None
) -> list[Limited]:
    """Return where the load generator limited a cell; empty where it did not, or left no marks."""
    limits = [
        *_cpu_limits(load, cell, numbers, marks, workers),
        _send_lag_limit(load, cell, numbers, marks),
        _shared_read_limit(load, cell, numbers, marks),
        _read_clock_limit(load, cell, numbers, marks),
        _loop_lag_limit(load, numbers, marks),
    ]
    return [limit for limit in limits if limit is not None]


def process_name(process: int, marks: Sequence[ProcessMark], workers: Workers | None) -> str:
    """A load process as reports name it: its number, with several machines also the name of its machine."""
    if workers is None:
        return str(process)
    hosts = [mark.host for mark in marks if mark.process == process and mark.host]
    return f"{process % MACHINE} of {hosts[0].rpartition('-')[0] if hosts else 'an unknown machine'}"


def killed_processes(marks: Sequence[ProcessMark]) -> list[int]:
    """Load processes with a start record and no end record."""
    starts, ends = ({mark.process for mark in marks if mark.event == event} for event in ("start", "end"))
    return sorted(starts - ends)


def limited_fields(fields: Sequence[str], limits: Sequence[ClientLimit]) -> list[str]:
    """The fields of Numbers that at least one of the limits affects."""
    return [name for name in fields if any(name in limit.numbers for limit in limits)]


def _limited(
    what: Any, value: float, allowed: float, numbers: Numbers, affected: list[str], code: str, **values: Any
) -> Limited:
    """A limit on the affected fields that the cell has values of, and its reason."""
    found = {name: getattr(numbers, name) for name in affected}
    fields = [name for name, number in found.items() if number is not None and getattr(number, "n", 1) > 0]
    unit: Any = "ratio" if what in ("cpu", "shared_reads") else "s"
    limit = ClientLimit(what=what, value=value, allowed=allowed, unit=unit, numbers=fields)
    return Limited(limit, because(code, numbers=fields, **values))


def _cpu_limits(
    load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark], workers: Workers | None
) -> Iterator[Limited]:
    """Busy load processes: evidence for delays, which `client_errors` bounds."""
    affected = ([] if is_open_loop(load) else _RATES) + (_TIMES if read_clock_answers(cell) else [])
    starts = {mark.process: mark.monotonic_s for mark in marks if mark.event == "start"}
    for mark in marks:
        if mark.event != "end" or mark.cpu_s is None or mark.process not in starts:
            continue
        # Without the highest share over 5 s, use the mean since the start, which can hide a short saturation.
        lived_s = mark.monotonic_s - starts[mark.process]
        share = mark.cpu_max if mark.cpu_max is not None else mark.cpu_s / lived_s if lived_s > 0 else 0.0
        if share > MAX_CPU:
            values = {"share": share, "max_share": MAX_CPU, "remedy": _remedy(load, [mark])}
            name = process_name(mark.process, marks, workers)
            yield _limited("cpu", share, MAX_CPU, numbers, affected, "client_cpu", process=name, **values)


def _send_lag_limit(load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark]) -> Limited | None:
    lags_s = latency_sample(cell, "send_lag_s").value_s
    lag_s = float(np.median(lags_s)) if len(lags_s) else 0.0  # of all, however few: it is about the load generator
    if lag_s <= MAX_SEND_LAG_S:
        return None
    values = {"lag_s": lag_s, "max_s": MAX_SEND_LAG_S, "remedy": users_remedy(load, marks)}
    return _limited("send_lag", lag_s, MAX_SEND_LAG_S, numbers, _FROM_SCHEDULE, "client_send_lag", **values)


def _shared_read_limit(load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark]) -> Limited | None:
    """Chunks that arrived separately but were read together, because the client read late.

    A late read of a fast stream often looks timely, since its last bytes have just arrived. So if the loop was late
    most of the time, all chunks that shared a read count.
    """
    often_late = (_max_known(marks, "loop_lag_p50_s") or 0.0) > MAX_LOOP_LAG_S
    good = cell.counted.where(cell.counted.good)
    late = np.nan_to_num(good.coalesced_late)
    chunks = float((good.coalesced if often_late else late).sum())
    first = int((shares_first_read(good) & (often_late | (late > 0))).sum())
    total = float(good.chunks.sum())
    share = chunks / total if total else 0.0
    first_share = first / numbers.succeeded if numbers.succeeded else 0.0
    affected = (_FIRST_CHUNK if first_share > MAX_SHARED else []) + (_CHUNKS if share > MAX_SHARED else [])
    if not affected:
        return None
    values = {"chunks": share, "first_chunks": first_share, "max_share": MAX_SHARED, "remedy": _remedy(load, marks)}
    worst = max(share, first_share)
    return _limited("shared_reads", worst, MAX_SHARED, numbers, affected, "client_shared_reads", **values)


def _read_clock_limit(load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark]) -> Limited | None:
    """Without the kernel's receive times, the lag of the client's loop is part of every time."""
    share, lag_s = 0.01, _max_known(marks, "loop_lag_p99_s")
    if lag_s is None:  # the run was too short for a p99
        share, lag_s = 0.5, _max_known(marks, "loop_lag_p50_s")
    if not read_clock_answers(cell) or lag_s is None or lag_s <= MAX_LOOP_LAG_S:
        return None
    values = {"share": share, "lag_s": lag_s, "max_s": MAX_LOOP_LAG_S, "remedy": _remedy(load, marks)}
    return _limited("read_clock", lag_s, MAX_LOOP_LAG_S, numbers, _TIMES, "client_read_clock", **values)


def _loop_lag_limit(load: Load, numbers: Numbers, marks: Sequence[ProcessMark]) -> Limited | None:
    """Where a request follows an answer, the client's delay between the two is part of every rate."""
    lag_s, e2e_s = _max_known(marks, "loop_lag_mean_s"), numbers.e2e_s.mean
    if is_open_loop(load) or lag_s is None or not e2e_s:
        return None
    allowed_s = max(MAX_LOOP_LAG_S, MAX_LOST * e2e_s)
    if lag_s <= allowed_s:
        return None
    values = {"lag_s": lag_s, "share": lag_s / e2e_s, "max_s": allowed_s, "remedy": _remedy(load, marks)}
    return _limited("loop_lag", lag_s, allowed_s, numbers, _RATES, "client_loop_lag", **values)


def client_errors(
    load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark], limits: Sequence[ClientLimit]
) -> dict[str, tuple[float, float]]:
    """Bound the error of each metric that a limit of the load generator affects, by its name in verdicts.

    The true value is at most the first share below the measured one, and at most the second share above it. Delays make
    times longer and rates lower. Times with the kernel's stamps do not change with a late load process.
    """
    found = {limit.what for limit in limits}
    errors: dict[str, tuple[float, float]] = {}
    if found & {"loop_lag", "cpu"} and not is_open_loop(load):
        errors |= _rate_errors(load, cell, numbers, marks)
    late = read_clock_answers(cell) > 0 and bool(found & {"read_clock", "cpu"})
    streams = cell.counted.where(cell.counted.good & (cell.counted.chunks > 0))
    rooms_s = _first_chunk_rooms_s(streams, marks) if "shared_reads" in found else np.empty(0)
    lags_s = np.sort(latency_sample(cell, "send_lag_s").value_s) if "send_lag" in found else np.empty(0)
    times_s = streams.first_chunk_s
    earlier_s = np.sort(times_s - rooms_s) if len(rooms_s) == len(times_s) else np.zeros(max(1, len(times_s)))
    times_s, rooms_s = np.sort(times_s), np.sort(rooms_s)
    steps = max(1.0, carried_per_answer(cell) - 1)  # token intervals of an answer
    for latency in ("ttft", "ttfo", "tpot", "e2e", "ttft_sched", "e2e_sched"):
        is_tpot = latency == "tpot"
        first_shared = len(rooms_s) > 0 and not latency.startswith("e2e")
        sent_late = len(lags_s) > 0 and latency.endswith("_sched")
        for name, permille in PERMILLES.items():
            value_s = getattr(getattr(numbers, f"{latency}_s"), name)
            if not value_s or not (late or first_shared or sent_late):
                continue
            lag_s = (_loop_lag_s(marks, name) if late else 0.0) / (steps if is_tpot else 1.0)
            below_s, above_s = lag_s, lag_s if is_tpot else 0.0
            if first_shared and is_tpot:
                above_s += percentile(rooms_s, permille) / steps
            elif first_shared:
                below_s += percentile(times_s, permille) - percentile(earlier_s, permille)
            if sent_late:
                below_s += max(0.0, percentile(lags_s, permille))
            errors[f"{latency}_{name}"] = (min(1.0, below_s / value_s), above_s / value_s)
    return errors


def _rate_errors(
    load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark]
) -> dict[str, tuple[float, float]]:
    """The errors of wall time and rates: the time that users waited for the load generator."""
    rows = cell.counted
    sent_s, ended_s = rows.sent_s, rows.sent_s + rows.ended_s
    pauses = load.think_s or load.think or load.agent or load.user not in ("batch", "chat") or numbers.retry_after
    # A planned pause is no delay; what is late after it is the event loop.
    longest_s = _max_known(marks, "loop_lag_mean_s") if pauses else None
    order = np.lexsort((rows.user, rows.process))
    edges = np.flatnonzero((np.diff(rows.user[order]) != 0) | (np.diff(rows.process[order]) != 0)) + 1
    delays = [
        send_delay_s(sent_s[of_user], ended_s[of_user], math.inf if longest_s is None else longest_s)
        for of_user in np.split(order, edges)
        if len(of_user)
    ]
    if not delays:
        return {}
    if numbers.wall_s:
        share = max(delay_s for delay_s, _ in delays) / numbers.wall_s
    else:
        share = sum(delay_s for delay_s, _ in delays) / max(1e-9, sum(span_s for _, span_s in delays))
    share = min(share, 0.999)
    rates = {name: (0.0, share / (1 - share)) for name in ("output_tok_s", "input_tok_s", "requests_per_s")}
    return {name: error for name, error in ({"wall_s": (share, 0.0)} | rates).items() if getattr(numbers, name)}


def send_delay_s(sent_s: Array, ended_s: Array, longest_s: float = math.inf) -> tuple[float, float]:
    """The delays of one user's requests on the path to the last answer, and the time that the path takes, in seconds.

    From the last answer backwards: a request could be sent when the latest answer before it had ended (by clocks that
    agree to SLACK_S). `longest_s` bounds each delay.
    """
    order = np.argsort(ended_s, kind="stable")
    sent_s, ended_s = sent_s[order], ended_s[order]
    at, delay_s, first_s = len(order) - 1, 0.0, float(sent_s.min())
    while True:
        before = min(int(np.searchsorted(ended_s, sent_s[at] + SLACK_S, side="right")) - 1, at - 1)
        released_s = float(ended_s[before]) if before >= 0 else first_s
        delay_s += min(longest_s, max(0.0, float(sent_s[at]) - released_s))
        if before < 0:
            return delay_s, float(ended_s[-1]) - first_s
        at = before


def read_clock_answers(cell: CellData) -> int:
    """The number of successful streams without the kernel's receive times."""
    rows = cell.counted
    return int((rows.good & (rows.chunks > 0) & rows.read_clock).sum())


def shares_first_read(rows: Rows) -> Bools:
    """Whether the first chunk shared its read with the second one."""
    shared: Bools = (rows.coalesced > 0) & rows.first_shared
    return shared


def _first_chunk_rooms_s(streams: Rows, marks: Sequence[ProcessMark]) -> Array:
    """How much earlier the first chunk of each answer may have arrived: since the read before, at most as late as the
    event loop was.
    """
    rooms_s = np.maximum(0.0, streams.first_chunk_s - np.nan_to_num(streams.headers_s))
    shared = shares_first_read(streams)
    if (_max_known(marks, "loop_lag_p50_s") or 0.0) <= MAX_LOOP_LAG_S:
        shared &= streams.coalesced_late > 0  # otherwise the server joined the chunks
    longest_s = _max_known(marks, "loop_lag_max_s")
    bounded: Array = np.minimum(np.where(shared, rooms_s, 0.0), math.inf if longest_s is None else longest_s)
    return bounded


def _loop_lag_s(marks: Sequence[ProcessMark], percentile_name: str) -> float:
    """The lag of the event loop at a percentile; above the median that of p99, below 5 s the longest one."""
    names = ("loop_lag_p50_s",) if percentile_name == "p50" else ("loop_lag_p99_s", "loop_lag_max_s")
    return next((lag_s for name in names if (lag_s := _max_known(marks, name)) is not None), 0.0)


def _max_known(marks: Sequence[ProcessMark], name: str) -> float | None:
    return max((value for mark in marks if (value := getattr(mark, name)) is not None), default=None)


def users_remedy(load: Load, marks: Sequence[ProcessMark]) -> Reason:
    """What the user should do if all users of an open loop were busy."""
    if killed_processes(marks):
        return because("remedy_run_again")
    return because("remedy_users", users=load.users, processes=load.processes)


def _remedy(load: Load, marks: Sequence[ProcessMark]) -> Reason:
    """What the user should do about a load generator that is too slow."""
    if killed_processes(marks):
        return because("remedy_run_again")
    if (waited := _max_known(marks, "core_wait") or 0.0) > MAX_CORE_WAIT:
        return because("remedy_free_core", share=waited)
    return because("remedy_processes", processes=load.processes)


def timed_others(numbers: Numbers, load: ServerLoad) -> Reason | None:
    """Return why the server's times and the client's are not of the same requests; None if they are, or are not known.

    The client's mean is over the requests that succeeded. A server also times requests whose users left, up to then.
    """
    others = numbers.sent - numbers.succeeded
    if all(total is None for total in (load.queue_s, load.prefill_s, load.decode_s)):
        return None
    # llama.cpp does not count the requests of its totals.
    counted = numbers.sent if load.timed_requests is None else load.timed_requests
    if not others or abs(counted - numbers.succeeded) <= MAX_OTHERS * numbers.succeeded:
        return None
    return because(
        "timed_others",
        counted=None if load.timed_requests is None else round(counted),
        succeeded=numbers.succeeded,
        abandoned=numbers.abandoned,
        others=others - numbers.abandoned,
    )


def time_split(numbers: Numbers, load: ServerLoad, *, mixed: bool = False) -> TimeSplit | None:
    """Return the mean seconds of a request by stage; None where the server reports none of them, or of other requests.

    `mixed`: other loads used the server at the same time, and its counters do not distinguish them.
    """
    e2e_s, counted = numbers.e2e_s.mean, numbers.sent if load.timed_requests is None else load.timed_requests
    totals = (load.queue_s, load.prefill_s, load.decode_s)
    same_requests = MIN_COUNTED * numbers.succeeded <= counted <= MAX_COUNTED * numbers.sent
    if mixed or not e2e_s or not counted or not same_requests or all(total is None for total in totals):
        return None
    if timed_others(numbers, load) is not None:
        return None
    queue_s, prefill_s, decode_s = (None if total is None else total / counted for total in totals)
    api_s = None
    if queue_s is not None and prefill_s is not None and decode_s is not None:
        rest_s = e2e_s - queue_s - prefill_s - decode_s
        api_s = rest_s if rest_s >= 0 else None  # negative: the server counted slightly different requests
    connect_s = numbers.connect_s
    return TimeSplit(
        connect_s=None if connect_s.mean is None else connect_s.mean * connect_s.n / numbers.sent,
        api_s=api_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        e2e_s=e2e_s,
    )


def limited_by(
    split: TimeSplit | None, load: ServerLoad, client_error: Mapping[str, tuple[float, float]]
) -> LimitedBy | None:
    """Return what limited a cell; None where the server does not report enough to tell."""
    if any(max(error) >= SHARE for error in client_error.values()):
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
    """Return the mean of each stage over the cells in which it is known."""
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
