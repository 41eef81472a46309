"""The self-check of docs/method.md: where the load generator limited a cell, and how wrong its numbers may be."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from msgspec.structs import replace

from harness.base.measured import Numbers
from harness.base.metrics import LATENCIES, METRICS, number_names
from harness.base.reason import Reason, because
from harness.base.units import percent
from harness.numbers.cell_numbers import carried_per_answer
from harness.numbers.comparison import LARGE
from harness.numbers.formulas import FROM_SCHEDULE
from harness.numbers.latencies import PERMILLES, latency_sample
from harness.numbers.stats import Array, percentile
from harness.numbers.summary import CellSummary, ClientLimit
from harness.records.columns import Bools, Rows
from harness.records.records import MAX_CPU, SLACK_S, ProcessMark
from harness.records.run_data import CellData
from harness.scenario import Load, is_open_loop, max_processes
from harness.scenario.workers import MACHINE, Workers

MAX_SEND_LAG_S = 0.010
MAX_SHARED = 0.01  # of the chunks, or of the first chunks
MAX_LOOP_LAG_S = 0.005
MAX_LOST = 0.02  # of a request's time, between its answer and the next request: the assumed noise floor
MAX_CORE_WAIT = 0.05  # of the time, waiting for a free core

_CHUNKS = ["gap"]
_REQUEST_TIMES = [latency.name for latency in LATENCIES if latency.words and latency.slo]
_FIRST_CHUNK = [latency.name for latency in LATENCIES if latency.chunk == "first"]
_LAST_CHUNK = [latency.name for latency in LATENCIES if latency.chunk == "last"]
_RATES = ["wall", "output_tok_s", "input_tok_s", "requests_per_s"]
_TIMES = [*_REQUEST_TIMES, *_CHUNKS]
_FROM_SCHEDULE = list(FROM_SCHEDULE)
_RUN_AGAIN = "a load process was killed: run again"


Limited = tuple[ClientLimit, Reason]  # a limit of the load generator, and the note that reports it


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
    return [limited for limited in limits if limited is not None]


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


def _limit(
    what: Literal["cpu", "send_lag", "shared_reads", "read_clock", "loop_lag"],
    value: float,
    allowed: float,
    numbers: Numbers,
    affected: list[str],
) -> ClientLimit:
    """A limit on the affected fields that the cell has values of."""
    affected_numbers = {name: getattr(numbers, name) for name in affected}
    fields = [name for name, number in affected_numbers.items() if number is not None and getattr(number, "n", 1) > 0]
    unit: Literal["s", "ratio"] = "ratio" if what in ("cpu", "shared_reads") else "s"
    return ClientLimit(what=what, value=value, allowed=allowed, unit=unit, numbers=fields)


def _too_slow(limit: ClientLimit) -> str:
    return "the load generator was too slow" + (f" for {number_names(limit.numbers)}" if limit.numbers else "")


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
            limit, remedy = _limit("cpu", share, MAX_CPU, numbers, affected), _remedy(load, [mark])
            name = process_name(mark.process, marks, workers)
            text = f"{_too_slow(limit)}: load process {name} used {percent(share, 0)} of a core, "
            text += f"more than {percent(MAX_CPU, 0)}; {remedy.text}"
            values = {"numbers": limit.numbers, "process": name, "share": share, "max_share": MAX_CPU, "remedy": remedy}
            yield limit, because("client_cpu", text, **values)


def _send_lag_limit(load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark]) -> Limited | None:
    lags_s = latency_sample(cell, "send_lag").value_s
    lag_s = float(np.median(lags_s)) if len(lags_s) else 0.0  # of all, however few: it is about the load generator
    if lag_s <= MAX_SEND_LAG_S:
        return None
    limit, remedy = _limit("send_lag", lag_s, MAX_SEND_LAG_S, numbers, _FROM_SCHEDULE), users_remedy(load, marks)
    text = f"{_too_slow(limit)}: half of the requests were sent {_ms(lag_s)} or more behind schedule; "
    text += f"at most {MAX_SEND_LAG_S * 1000:.0f} ms is allowed; {remedy.text}"
    values = {"numbers": limit.numbers, "lag_s": lag_s, "max_s": MAX_SEND_LAG_S, "remedy": remedy}
    return limit, because("client_send_lag", text, **values)


def _shared_read_limit(load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark]) -> Limited | None:
    """Chunks that arrived separately but were read together, because the client read late.

    A late read of a fast stream often looks timely, since its last bytes have just arrived. So if the loop was late
    most of the time, all chunks that shared a read count.
    """
    often_late = (_max_known(marks, "loop_lag_p50_s") or 0.0) > MAX_LOOP_LAG_S
    good = cell.counted.where(cell.counted.good)
    late = good.coalesced if often_late else np.nan_to_num(good.coalesced_late)
    late = np.where(may_be_joined_late(good, marks), late, 0.0)
    chunks = float(late.sum())
    first = int((shares_first_read(good) & (late > 0)).sum())
    total = float(good.chunks.sum())
    share = chunks / total if total else 0.0
    first_share = first / numbers.succeeded if numbers.succeeded else 0.0
    affected = (_FIRST_CHUNK if first_share > MAX_SHARED else []) + (_CHUNKS if share > MAX_SHARED else [])
    if not affected:
        return None
    limit = _limit("shared_reads", max(share, first_share), MAX_SHARED, numbers, affected)
    remedy = _remedy(load, marks)
    text = f"{_too_slow(limit)}: {percent(share, 1)} of the chunks and {percent(first_share, 1)} of "
    text += "the first chunks were fetched late, together with a later one: their times are upper bounds; at most "
    text += f"{percent(MAX_SHARED, 0)} is "
    text += "allowed; "
    text += remedy.text
    shares = {"chunks": share, "first_chunks": first_share, "max_share": MAX_SHARED}
    return limit, because("client_shared_reads", text, numbers=limit.numbers, **shares, remedy=remedy)


def _read_clock_limit(load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark]) -> Limited | None:
    """Without the kernel's receive times, the lag of the client's loop is part of every time."""
    share, lag_s = 0.01, _max_known(marks, "loop_lag_p99_s")
    if lag_s is None:  # the run was too short for a p99
        share, lag_s = 0.5, _max_known(marks, "loop_lag_p50_s")
    if not read_clock_answers(cell) or lag_s is None or lag_s <= MAX_LOOP_LAG_S:
        return None
    limit, remedy = _limit("read_clock", lag_s, MAX_LOOP_LAG_S, numbers, _TIMES), _remedy(load, marks)
    text = f"{_too_slow(limit)}: chunk times are those of the read, and "
    text += f"{'half' if share == 0.5 else percent(share, 0)} of the timers of a load process fired {_ms(lag_s)} or "
    text += f"more late; at most {MAX_LOOP_LAG_S * 1000:.0f} ms is allowed; {remedy.text}"
    values = {"numbers": limit.numbers, "share": share, "lag_s": lag_s, "max_s": MAX_LOOP_LAG_S, "remedy": remedy}
    return limit, because("client_read_clock", text, **values)


def _loop_lag_limit(load: Load, numbers: Numbers, marks: Sequence[ProcessMark]) -> Limited | None:
    """Where a request follows an answer, the client's delay between the two is part of every rate."""
    lag_s, e2e_s = _max_known(marks, "loop_lag_mean_s"), numbers.e2e.mean
    if is_open_loop(load) or lag_s is None or not e2e_s:
        return None
    allowed_s = max(MAX_LOOP_LAG_S, MAX_LOST * e2e_s)
    if lag_s <= allowed_s:
        return None
    limit, remedy = _limit("loop_lag", lag_s, allowed_s, numbers, _RATES), _remedy(load, marks)
    text = f"{_too_slow(limit)}: timers of a load process fired {_ms(lag_s)} late on average, "
    text += f"{percent(lag_s / e2e_s, 1)} of the time of a request; at most {_ms(allowed_s)} is allowed; {remedy.text}"
    times = {"lag_s": lag_s, "share": lag_s / e2e_s, "max_s": allowed_s}
    return limit, because("client_loop_lag", text, numbers=limit.numbers, **times, remedy=remedy)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def client_errors(
    load: Load, cell: CellData, numbers: Numbers, marks: Sequence[ProcessMark], limits: Sequence[ClientLimit]
) -> dict[str, tuple[float, float]]:
    """Bound the error of each metric that a limit of the load generator affects, by its name in verdicts.

    The true value is at most the first share below the measured one, and at most the second share above it. Delays make
    times longer and rates lower. Times with the kernel's stamps do not change with a late load process.
    """
    kinds = {limit.what for limit in limits}
    errors: dict[str, tuple[float, float]] = {}
    if kinds & {"loop_lag", "cpu"} and not is_open_loop(load):
        errors |= _rate_errors(load, cell, numbers, marks)
    late = read_clock_answers(cell) > 0 and bool(kinds & {"read_clock", "cpu"})
    streams = cell.counted.where(cell.counted.good & (cell.counted.chunks > 0))
    margins_s = _first_chunk_margins_s(streams, marks) if "shared_reads" in kinds else np.empty(0)
    lags_s = np.sort(latency_sample(cell, "send_lag").value_s) if "send_lag" in kinds else np.empty(0)
    times_s = streams.first_chunk_s
    earlier_s = np.sort(times_s - margins_s) if len(margins_s) == len(times_s) else np.zeros(max(1, len(times_s)))
    times_s, margins_s = np.sort(times_s), np.sort(margins_s)
    steps = max(1.0, carried_per_answer(cell) - 1)  # token intervals of an answer
    for latency in _REQUEST_TIMES:
        is_tpot = latency == "tpot"
        first_shared = len(margins_s) > 0 and latency in _FIRST_CHUNK
        sent_late = len(lags_s) > 0 and latency in _FROM_SCHEDULE
        for name, permille in PERMILLES.items():
            metric = METRICS[f"{latency}_{name}"]
            value_s = metric.of(numbers)
            if not value_s or not (late or first_shared or sent_late):
                continue
            lag_s = (_loop_lag_s(marks, name) if late else 0.0) / (steps if is_tpot else 1.0)
            below_s, above_s = lag_s, lag_s if is_tpot else 0.0
            if first_shared:
                below_s += percentile(times_s, permille) - percentile(earlier_s, permille)
            if sent_late:
                below_s += max(0.0, percentile(lags_s, permille))
            errors[metric.name] = (min(1.0, below_s / value_s), above_s / value_s)
    return errors


def with_client_errors(
    cells: Sequence[CellSummary], is_judged: Callable[[str, CellSummary], bool]
) -> list[CellSummary]:
    """The cells of a row, with a problem where the load generator's delays are too large a part of what decides.

    The value is that of the row, so the mean error of its cells counts. `is_judged`: whether a verdict or a check needs
    the metric of a cell more exactly.
    """
    metrics = dict.fromkeys(metric for cell in cells for metric in cell.client_error)
    shares = {
        metric: statistics.fmean(max(cell.client_error.get(metric, (0.0,))) for cell in cells) for metric in metrics
    }
    results = []
    for cell in cells:
        too_large = [
            metric
            for metric, error in cell.client_error.items()
            if min(shares[metric], max(error)) > LARGE and is_judged(metric, cell)
        ]
        if too_large:
            worst = max(too_large, key=lambda metric: max(cell.client_error[metric]))
            share = max(cell.client_error[worst])
            text = f"delays of the load generator may be {percent(share, 0)} of the {METRICS[worst].title}; at most "
            text += f"{percent(LARGE, 0)} is allowed"
            reason = because("client_error", text, metric=worst, share=share, max_share=LARGE)
            fields = {METRICS[metric].field for metric in too_large}
            cell = replace(
                cell,
                problems=[*cell.problems, replace(reason, cell=cell.id)],
                limits=[replace(limit, invalid=not fields.isdisjoint(limit.numbers)) for limit in cell.limits],
            )
        results.append(cell)
    return results


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
        send_delay_s(sent_s[places], ended_s[places], math.inf if longest_s is None else longest_s)
        for places in np.split(order, edges)
        if len(places)
    ]
    if not delays:
        return {}
    if numbers.wall:
        share = max(delay_s for delay_s, _ in delays) / numbers.wall
    else:
        share = sum(delay_s for delay_s, _ in delays) / max(1e-9, sum(span_s for _, span_s in delays))
    share = min(share, 0.999)
    rates = {name: (0.0, share / (1 - share)) for name in ("output_tok_s", "input_tok_s", "requests_per_s")}
    return {name: error for name, error in ({"wall": (share, 0.0)} | rates).items() if getattr(numbers, name)}


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


def may_be_joined_late(rows: Rows, marks: Sequence[ProcessMark]) -> Bools:
    """Whether the load process was ever so late that it, and not a proxy, may have joined the chunks of an answer.

    A late process joins what comes while it is late. Bundles of two chunks and more that are further apart than that
    came as bundles.
    """
    lag_s = _max_known(marks, "loop_lag_p99_s") or _max_known(marks, "loop_lag_max_s")
    if lag_s is None:
        return np.ones(len(rows), dtype=np.bool_)
    steps = np.maximum(rows.arrivals - 1, 1)
    apart_s = np.where(rows.arrivals > 1, (rows.last_chunk_s - rows.first_arrival_s) / steps, rows.last_chunk_s)
    mask: Bools = ~((rows.chunks >= 2 * rows.arrivals) & (apart_s > 2 * lag_s))
    return mask


def shares_first_read(rows: Rows) -> Bools:
    """Whether the first chunk shared its read with the second one."""
    shared: Bools = (rows.coalesced > 0) & rows.first_shared
    return shared


def _first_chunk_margins_s(streams: Rows, marks: Sequence[ProcessMark]) -> Array:
    """How much earlier the first chunk of each answer may have arrived: since the read before, at most as late as the
    event loop was.
    """
    margins_s = np.maximum(0.0, streams.first_chunk_s - np.nan_to_num(streams.headers_s))
    shared = shares_first_read(streams)
    if (_max_known(marks, "loop_lag_p50_s") or 0.0) <= MAX_LOOP_LAG_S:
        shared &= streams.coalesced_late > 0  # otherwise the server joined the chunks
    longest_s = _max_known(marks, "loop_lag_max_s")
    bounded: Array = np.minimum(np.where(shared, margins_s, 0.0), math.inf if longest_s is None else longest_s)
    return bounded


def _loop_lag_s(marks: Sequence[ProcessMark], percentile_name: str) -> float:
    """The lag of the event loop at a percentile; above the median that of p99, below 5 s the longest one."""
    names = ("loop_lag_p50_s",) if percentile_name == "p50" else ("loop_lag_p99_s", "loop_lag_max_s")
    return next((lag_s for name in names if (lag_s := _max_known(marks, name)) is not None), 0.0)


def core_wait(marks: Sequence[ProcessMark]) -> float:
    """The share of the time that a load process waited while others had the cores, of the one that waited most."""
    return _max_known(marks, "core_wait") or 0.0


def _max_known(marks: Sequence[ProcessMark], name: str) -> float | None:
    return max((value for mark in marks if (value := getattr(mark, name)) is not None), default=None)


def users_remedy(load: Load, marks: Sequence[ProcessMark]) -> Reason:
    """What the user should do if all users of an open loop were busy."""
    if killed_processes(marks):
        return because("remedy_run_again", _RUN_AGAIN)
    text = f"raise 'users' ({load.users:,}), the maximum number in flight, or 'processes' ({load.processes})"
    return because("remedy_users", text, users=load.users, processes=load.processes)


def _remedy(load: Load, marks: Sequence[ProcessMark]) -> Reason:
    """What the user should do about a load generator that is too slow."""
    if killed_processes(marks):
        return because("remedy_run_again", _RUN_AGAIN)
    if (waited := core_wait(marks)) > MAX_CORE_WAIT:
        text = f"other processes used its core during {percent(waited, 0)} of the time: stop them, or send from "
        text += "another machine"
        return because("remedy_free_core", text, share=waited)
    if load.processes >= max_processes(load):
        text = "it has no user for a further process: stop other programs, send from another machine, or use fewer "
        text += "streams at once"
        return because("remedy_fewer_streams", text, processes=load.processes)
    text = f"use more 'processes' ({load.processes}) or machines (--workers), or fewer streams at once"
    return because("remedy_processes", text, processes=load.processes)
