"""What a client said, held against what the server sent."""

import os
import platform
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.instrument.client import Said, Usage
from benchmarks.instrument.server import Schedule, Times, Truth
from harness.records.records import Request


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One client under one load. None: it does not tell, or it failed (`note`)."""

    tool: str
    users: int
    ttft_p50_ms: float | None = None  # error
    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None  # p99 of the error's size, as are the next two
    itl_p99_ms: float | None = None
    chunk_p99_ms: float | None = None
    load: float | None = None  # share of what the schedule allows
    chunks_per_s: float | None = None
    cpu_us: float | None = None  # per chunk, of all its processes, from the first request to the last chunk
    cpu: float | None = None  # of a core, over the same time
    others: float | None = None  # of a core, meanwhile used by what is no part of the benchmark, or taken by the host
    chunks: int = 0  # sent by the server
    requests: int = 0
    server_late_p99_ms: float | None = None
    server_cpu_s: float | None = None
    note: str = ""


def reading_of(tool: str, said: Said, truth: Truth, users: int, schedule: Schedule, usage: Usage) -> Reading:
    truth = truth.without(said.tried)
    whole = said.whole(schedule.chunks)
    ttft_ms = _ttft_error_ms(said, whole, truth, schedule)
    began_s, ended_s = truth.span_s
    used_s = usage.between(began_s, ended_s)
    lost = len(truth.sent) - len(said.records)
    notes = [said.note] if said.note else []
    if said.records and lost:
        notes.append(f"{lost} requests are not in its file")
    return Reading(
        tool=tool,
        users=users,
        ttft_p50_ms=ttft_ms[0],
        ttft_p99_ms=ttft_ms[1],
        tpot_p99_ms=_tpot_error_ms(whole, schedule),
        itl_p99_ms=_itl_error_ms(whole, schedule),
        chunk_p99_ms=_chunk_error_ms(said.records, truth) if said.same_clock else None,
        load=truth.load(users, schedule),
        chunks_per_s=truth.chunks / (ended_s - began_s),
        cpu_us=used_s / truth.chunks * 1e6,
        cpu=used_s / (ended_s - began_s),
        chunks=truth.chunks,
        requests=len(truth.sent),
        server_late_p99_ms=truth.late_p99_ms,
        server_cpu_s=truth.cpu_s,
        note=", ".join(notes),
    )


def _ttft_error_ms(said: Said, whole: list[Request], truth: Truth, schedule: Schedule) -> tuple[float, float]:
    """p50 and p99 of the error of each request; where they cannot be told apart, the difference of the percentiles,
    which is no more than that.
    """
    if said.same_clock:
        return _marks(np.array([one.chunks_s[0] - truth.sent[one.id].ttft_s for one in whole]) * 1000)
    true_ms = _marks(np.array([one.ttft_s for one in truth.whole(schedule)]) * 1000)
    if said.ttft_s is not None:
        told_ms = (said.ttft_s[0] * 1000, said.ttft_s[1] * 1000)
    else:
        told_ms = _marks(np.array([one.chunks_s[0] for one in whole]) * 1000)
    return told_ms[0] - true_ms[0], told_ms[1] - true_ms[1]


def _tpot_error_ms(whole: list[Request], schedule: Schedule) -> float | None:
    spans = np.array([one.chunks_s[-1] - one.chunks_s[0] for one in whole if len(one.chunks_s) > 1])
    return _p99_ms(spans / (schedule.chunks - 1) - schedule.gap_ms / 1000) if len(spans) else None


def _itl_error_ms(whole: list[Request], schedule: Schedule) -> float | None:
    """Of the gaps between chunks, where the tool keeps them."""
    gaps = [np.diff(one.chunks_s) for one in whole if len(one.chunks_s) > 2]
    return _p99_ms(np.concatenate(gaps) - schedule.gap_ms / 1000) if gaps else None


def _chunk_error_ms(records: list[Request], truth: Truth) -> float:
    """Size of (the client's time of a chunk - the server's time of sending it)."""
    errors = [np.array(one.chunks_s) + one.sent_s - truth.sent[one.id].chunks_s for one in records]
    return _p99_ms(np.concatenate(errors))


def _p99_ms(errors_s: Times) -> float:
    return float(np.percentile(np.abs(errors_s), 99)) * 1000


def _marks(values: Times) -> tuple[float, float]:
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def show_head() -> None:
    print(
        f"{'tool':24} {'users':>6} {'TTFT err p50/p99, ms':>22} {'TPOT err':>9} {'ITL err':>9} {'chunk err':>9} "
        f"{'load':>7} {'us/chunk':>9} {'core':>5} {'others':>6}"
    )


def show(read: Reading) -> None:
    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    ttft = "-" if read.ttft_p50_ms is None else f"{read.ttft_p50_ms:+.2f} / {text(read.ttft_p99_ms, '+.2f')}"
    errors = [text(value, ".3f") for value in (read.tpot_p99_ms, read.itl_p99_ms, read.chunk_p99_ms)]
    cost = f"{text(read.load, '.1%'):>7} {text(read.cpu_us, '.1f'):>9}"
    cost += f" {text(read.cpu, '.0%'):>5} {text(read.others, '.0%'):>6}"
    print(
        f"{read.tool:24} {read.users:6} {ttft:>22} {' '.join(f'{e:>9}' for e in errors)} {cost}  {read.note}",
        flush=True,
    )


def machine() -> dict[str, str]:
    """What the readings of one run have in common."""
    return {
        "cores": str(os.cpu_count()),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write(path: Path, about: dict[str, str], readings: list[Reading]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"about": about, "readings": readings}), indent=1))
