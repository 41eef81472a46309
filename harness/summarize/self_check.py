"""Whether the load generator itself was the limit of a cell's numbers, and of which: the self-check of docs/method.md.

One list of findings out of marks and records; reports, verdicts, JUnit, OpenMetrics and JSON all show this one.
"""

from collections.abc import Sequence

import msgspec

from harness.rundir.records import MOST_CPU, ProcessMark
from harness.scenario.scenario import Load, is_open
from harness.summarize.tally import CellCounts
from harness.summary import ClientLimit, Numbers
from harness.workers import MACHINE, Workers

MOST_SEND_LAG_S = 0.010
MOST_SHARED = 0.01  # of the chunks, or of the first ones
MOST_LOOP_LAG_S = 0.005
MOST_LOST = 0.02  # of a request's time, between its answer and what follows: the noise floor that is assumed
MOST_CORE_WAIT = 0.05
STILL_S = 0.5  # a longer pause of a load process that used less than BUSY_CPU of a core was imposed on it
BUSY_CPU = 0.5

_CHUNKS = ["chunk_gap_s"]
_FIRST = ["ttft_s", "ttfo_s", "tpot_s", "ttft_sched_s"]
_RATES = ["wall_s", "output_tok_s", "input_tok_s", "requests_per_s"]
_TIMES = [*_FIRST, "e2e_s", "e2e_sched_s", *_CHUNKS]
_ALL = [*_RATES, *_TIMES]
WORDS = {
    "wall_s": "wall time", "output_tok_s": "tok/s", "input_tok_s": "prompt tok/s", "requests_per_s": "requests/s",
    "ttft_s": "TTFT", "ttfo_s": "TTFO", "tpot_s": "TPOT", "e2e_s": "E2E latency", "chunk_gap_s": "chunk gaps",
    "ttft_sched_s": "TTFT from schedule", "e2e_sched_s": "E2E latency from schedule",
}  # fmt: skip


def client_limits(
    load: Load, tally: CellCounts, numbers: Numbers, marks: Sequence[ProcessMark], workers: Workers | None = None
) -> list[ClientLimit]:
    """What of a cell the load generator limited; nothing where it was good enough, or left no marks."""
    found = [
        *_cpu(load, marks, workers),
        *_send_lag(load, tally, marks),
        *_shared(load, tally, numbers, marks),
        *_read_late(load, tally, marks),
        *_slow(load, numbers, marks),
    ]
    return [_only_known(one, numbers) for one in found]


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


def more_users(load: Load) -> str:
    """What to do when a schedule was not kept."""
    return f"raise 'users' ({load.users:,}), who are all that can be in flight, or 'processes' ({load.processes})"


def limited(numbers: Sequence[str], limits: Sequence[ClientLimit]) -> list[str]:
    """Those of the numbers, fields of Numbers, that one of the findings is about."""
    return [name for name in numbers if any(name in limit.numbers for limit in limits)]


def in_words(numbers: Sequence[str]) -> str:
    """Fields of Numbers as a list: "TTFT, TPOT and chunk gaps"."""
    known = [WORDS[name] for name in numbers]
    return " and ".join(part for part in (", ".join(known[:-1]), *known[-1:]) if part)


def _cpu(load: Load, marks: Sequence[ProcessMark], workers: Workers | None) -> list[ClientLimit]:
    starts = {mark.process: mark.monotonic_s for mark in marks if mark.event == "start"}
    found = []
    for mark in marks:
        if mark.event != "end" or mark.cpu_s is None or mark.process not in starts:
            continue
        # Without the highest share over 5 s, the mean since the start has to do, which hides a short saturation.
        lived_s = mark.monotonic_s - starts[mark.process]
        share = mark.cpu_most if mark.cpu_most is not None else mark.cpu_s / lived_s if lived_s > 0 else 0.0
        if share > MOST_CPU:
            text = f"load process {called(mark.process, marks, workers)} used {share:.0%} of a core, more than "
            text += f"{MOST_CPU:.0%}; {_more(load, [mark])}"
            found.append(
                ClientLimit(
                    what="cpu", value=share, allowed=MOST_CPU, unit="ratio", numbers=_ALL, invalid=True, text=text
                )
            )
    return found


def _send_lag(load: Load, tally: CellCounts, marks: Sequence[ProcessMark]) -> list[ClientLimit]:
    lag_s = tally.median_send_lag_s()
    if lag_s is None or lag_s <= MOST_SEND_LAG_S:
        return []
    text = (
        f"half of the requests were sent {lag_s * 1000:.1f} ms or more behind schedule; at most "
        f"{MOST_SEND_LAG_S * 1000:.0f} ms is allowed"
    )
    text += "" if killed(marks) else f"; {more_users(load)}"
    return [
        ClientLimit(
            what="send_lag", value=lag_s, allowed=MOST_SEND_LAG_S, unit="s", numbers=_ALL, invalid=True, text=text
        )
    ]


def _shared(load: Load, tally: CellCounts, numbers: Numbers, marks: Sequence[ProcessMark]) -> list[ClientLimit]:
    """Chunks that the client put together, since it read late. What a server sends at once is none of its doing.

    Of fast streams a late read often looks timely (its last bytes have just come): where the loop was late most of the
    time, all chunks that shared a read are taken for the client's.
    """
    often_late = (_worst(marks, "loop_lag_p50_s") or 0.0) > MOST_LOOP_LAG_S
    chunks, first = (
        (tally.coalesced, tally.first_shared) if often_late else (tally.coalesced_late, tally.first_shared_late)
    )
    share = chunks / tally.chunks if tally.chunks else 0.0
    first_share = first / numbers.succeeded if numbers.succeeded else 0.0
    spoilt = (_FIRST if first_share > MOST_SHARED else []) + (_CHUNKS if share > MOST_SHARED else [])
    if not spoilt:
        return []
    shares = [(share, "the chunks"), (first_share, "the first chunks")]
    which = " and ".join(f"{one:.1%} of {name}" for one, name in shares if one > MOST_SHARED)
    text = (
        f"{which} were fetched late, together with a later one: their times are upper bounds; at most "
        f"{MOST_SHARED:.0%} is allowed; {_more(load, marks)}"
    )
    most = max(share, first_share)
    return [ClientLimit(what="shared_reads", value=most, allowed=MOST_SHARED, unit="ratio", numbers=spoilt, text=text)]


def _read_late(load: Load, tally: CellCounts, marks: Sequence[ProcessMark]) -> list[ClientLimit]:
    """Without the kernel's stamps a late loop is a late time."""
    share, lag_s = "1 %", _worst(marks, "loop_lag_p99_s")
    if lag_s is None:  # too short a time
        share, lag_s = "half", _worst(marks, "loop_lag_p50_s")
    if not tally.read_clock or lag_s is None or lag_s <= MOST_LOOP_LAG_S:
        return []
    text = (
        f"chunk times are those of the read, and {share} of what was due in a load process ran "
        f"{lag_s * 1000:.1f} ms or more late; at most {MOST_LOOP_LAG_S * 1000:.0f} ms is allowed; {_more(load, marks)}"
    )
    return [ClientLimit(what="read_clock", value=lag_s, allowed=MOST_LOOP_LAG_S, unit="s", numbers=_TIMES, text=text)]


def _slow(load: Load, numbers: Numbers, marks: Sequence[ProcessMark]) -> list[ClientLimit]:
    """Where requests follow answers, the time from an answer to what follows it is part of every rate."""
    lag_s, e2e_s = _worst(marks, "loop_lag_mean_s"), numbers.e2e_s.mean
    if is_open(load) or lag_s is None or not e2e_s:
        return []
    allowed_s = max(MOST_LOOP_LAG_S, MOST_LOST * e2e_s)
    if lag_s <= allowed_s:
        return []
    text = (
        f"what was due in a load process ran {lag_s * 1000:.1f} ms late on average, {lag_s / e2e_s:.1%} of the time "
        f"that a request took; at most {1000 * allowed_s:.1f} ms is allowed; {_more(load, marks)}"
    )
    return [ClientLimit(what="loop_lag", value=lag_s, allowed=allowed_s, unit="s", numbers=_RATES, text=text)]


def _only_known(limit: ClientLimit, numbers: Numbers) -> ClientLimit:
    """Without the numbers that the cell does not have."""
    values = {name: getattr(numbers, name) for name in limit.numbers}
    kept = [name for name, value in values.items() if value is not None and getattr(value, "n", 1) > 0]
    which = f" ({in_words(kept)})" if kept and not limit.invalid else ""
    return msgspec.structs.replace(limit, numbers=kept, text=f"client-limited{which}: {limit.text}")


def _worst(marks: Sequence[ProcessMark], name: str) -> float | None:
    return max((value for mark in marks if (value := getattr(mark, name)) is not None), default=None)


def _more(load: Load, marks: Sequence[ProcessMark]) -> str:
    """What to do about it."""
    if killed(marks):
        return "a load process was killed: run again"
    waited = _worst(marks, "core_wait") or 0.0
    if waited > MOST_CORE_WAIT:
        return f"others had its core during {waited:.0%} of the time: keep them from it, or send from another machine"
    if stood := next(filter(_stood_still, marks), None):
        how = f"stood still for {stood.loop_lag_most_s:.1f} s (stopped, or its machine slept or swapped)"
        return f"load process {stood.process % MACHINE} {how}: run again"
    return f"use more 'processes' ({load.processes}) or machines (--workers), or fewer streams at once"


def _stood_still(mark: ProcessMark) -> bool:
    """Whether it is one pause that made a process late, which was on time before and after and had little to do."""
    if mark.loop_lag_most_s is None or mark.loop_lag_p50_s is None:
        return False
    on_time = mark.loop_lag_p50_s <= MOST_LOOP_LAG_S and (mark.cpu_most or 0.0) < BUSY_CPU
    return on_time and mark.loop_lag_most_s >= STILL_S
