"""Writes a run directory of any number of requests with 200 chunk times each, to measure what reads it.

python -m benchmarks.make_run 1000000 /path/for/the/run

Two loads of the same server, five repeats each: a fixed amount of work, and a fixed time. The numbers come from a small
seeded model (waves of 256, prefill that queues, steady decoding with jitter, now and then a stall, chunks that share a
packet, a slow drift, one failure in two thousand), and have nanoseconds like those of the recorder. 2.9 GB a million.
"""

import argparse
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.base.errors import HarnessError
from harness.records.manifest import CellRun, Machine, Phase, Run, ServedBy, write_run
from harness.records.records import ProcessMark, Request
from harness.records.samples import MetricsSample
from harness.scenario import Load, Scenario, Server, Warmup
from harness.scenario.plan import Cell, plan

CHUNKS = 200
AT_ONCE = 256
REPEATS = 5
BYTES_EACH = 3_000  # of a record, more than it has
START_S = 1_790_000_000.0
FIRST_MONOTONIC_S = 5_000.0
_BEFORE_S, _AFTER_S = 2.0, 1.0  # of a cell, without requests
_ENCODER = msgspec.json.Encoder()

Times = NDArray[np.float64]


def make_run(folder: Path, requests: int, seed: int = 42) -> Run:
    """Write the run and return its manifest. `requests`: measured ones of all cells together, a multiple of 10.

    Raises HarnessError when the disk has no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(folder).free, 1.2 * BYTES_EACH * requests
    if free < needed:
        raise HarnessError(
            f"{folder}: {requests:,} requests need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free",
            next_step="Give another folder, or fewer requests.",
        )
    scenario = _scenario(requests // (2 * REPEATS))
    dice = np.random.default_rng(seed)
    cells: list[CellRun] = []
    shortest_s = float("inf")
    now_s = 0.0
    with contextlib.ExitStack() as stack:
        records, marks, metrics = (
            stack.enter_context((folder / f"{name}.jsonl").open("wb")) for name in ("requests", "processes", "metrics")
        )
        for number, cell in enumerate(plan(scenario)):
            started_s, pids = now_s, (1000 + 2 * number, 1001 + 2 * number)
            now_s += _BEFORE_S
            sent = dict.fromkeys(pids, 0)
            tokens = 0
            first_s = now_s
            for wave in _waves(cell, requests // (2 * REPEATS), pids, now_s, dice):
                records.write(b"\n".join(map(_ENCODER.encode, wave)) + b"\n")
                for request in wave:
                    sent[request.process] += 1
                    tokens += request.output_tokens or len(request.chunks_s)
                now_s = max(request.sent_s + request.ended_s for request in wave) - FIRST_MONOTONIC_S + 0.01
                if wave[0].phase == "warmup":
                    first_s = now_s
            shortest_s = min(shortest_s, now_s - first_s)
            for pid, count in sent.items():
                marks.writelines(_ENCODER.encode(mark) + b"\n" for mark in _marks(cell, pid, started_s, now_s, count))
            metrics.writelines(_ENCODER.encode(one) + b"\n" for one in _metrics(cell, started_s, now_s, tokens))
            now_s += _AFTER_S
            cells.append(_cell_run(cell, started_s, now_s))
    loads = scenario.loads | {"timed": msgspec.structs.replace(scenario.loads["timed"], duration_s=0.98 * shortest_s)}
    run = Run(
        id=folder.name,
        status="valid",
        started_wall_s=START_S,
        ended_wall_s=START_S + now_s,
        scenario_name="scale",
        scenario=msgspec.structs.replace(scenario, loads=loads),
        workload_sha256="5ca1e" + "0" * 59,
        order=[cell.id for cell in plan(scenario)],
        cells=cells,
        machine=Machine(name="made-up"),
    )
    write_run(folder, run)
    return run


def _scenario(requests: int) -> Scenario:
    load = Load(user="batch", batch_size=AT_ONCE, requests=requests, output_tokens=CHUNKS)
    return Scenario(
        version=1,
        question="How long does it take to read a long run?",
        model="made-up",
        servers={"made-up": Server(template="simulated", container=False)},
        loads={"fixed": load, "timed": msgspec.structs.replace(load, requests=None, duration_s=1.0)},
        repeats=REPEATS,
        warmup=Warmup(requests=AT_ONCE),
        max_error_rate=0.01,
        checks=["error_rate <= 0.01", "ttft_p95 <= 2s"],
    )


def _waves(
    cell: Cell, requests: int, pids: tuple[int, int], start_s: float, dice: np.random.Generator
) -> Iterator[list[Request]]:
    """A wave of warm-up, then waves until so many requests were sent; a wave begins when the last one is over."""
    now_s = FIRST_MONOTONIC_S + start_s
    for first in range(-AT_ONCE, requests, AT_ONCE):
        count = min(AT_ONCE, requests - first) if first >= 0 else AT_ONCE
        drift = 1 + 0.05 * max(0, first) / requests + 0.01 * cell.repeat
        sent = _nanoseconds(now_s + 0.0004 * np.arange(count, dtype=np.float64))
        chunks = _chunk_times(count, drift, dice)
        failed = dice.random(count) < 0.0005
        wave = [
            _request(cell, first + i, pids[i % 2], float(sent[i]), chunks[i].tolist(), bool(failed[i]))
            for i in range(count)
        ]
        yield wave
        now_s = max(request.sent_s + request.ended_s for request in wave) + 0.01


def _chunk_times(count: int, drift: float, dice: np.random.Generator) -> Times:
    """Of each request: the first token after its place in the prefill queue, then a token a step."""
    gaps = drift * (0.018 + 0.002 * dice.standard_gamma(2.0, (count, CHUNKS)))
    stalled = dice.random((count, CHUNKS)) < 0.002
    gaps += stalled * dice.exponential(0.15, (count, CHUNKS))
    gaps *= dice.random((count, CHUNKS)) >= 0.01  # these shared a packet with the one before
    gaps[:, 0] = 0.05 + 0.002 * np.arange(count) + dice.exponential(0.02, count)
    return _nanoseconds(np.cumsum(gaps, axis=1))


def _nanoseconds(values: Times) -> Times:
    return np.rint(values * 1e9) / 1e9


def _request(cell: Cell, index: int, process: int, sent_s: float, chunks_s: list[float], failed: bool) -> Request:
    if failed:
        chunks_s = chunks_s[: CHUNKS // 2]
    return Request(
        id=f"{cell.id}-{index}",
        cell=cell.id,
        load=cell.load,
        user_class="BatchAgent",
        index=index,
        user=index % AT_ONCE,
        process=process,
        phase="warmup" if index < 0 else "measured",
        sent_s=sent_s,
        ended_s=chunks_s[-1],
        clock="kernel",
        batch=index // AT_ONCE,
        headers_s=0.004,
        chunks_s=chunks_s,
        first_visible_s=chunks_s[0],
        asked_tokens=CHUNKS,
        fixed_length=True,
        prompt_tokens=256,
        output_tokens=None if failed else CHUNKS,
        cached_tokens=None if failed else 0,
        finish=None if failed else "length",
        status=200,
        error="disconnect" if failed else None,
        message="the connection was closed after 100 events" if failed else None,
    )


def _marks(cell: Cell, process: int, start_s: float, end_s: float, sent: int) -> list[ProcessMark]:
    def mark(at_s: float) -> ProcessMark:
        return ProcessMark(
            event="start", process=process, cell=cell.id, wall_s=START_S + at_s, monotonic_s=FIRST_MONOTONIC_S + at_s
        )

    end = msgspec.structs.replace(
        mark(end_s + 0.2), event="end", sent=sent, recorded=sent, cpu_s=0.4 * (end_s - start_s)
    )
    return [mark(start_s + 0.1), end]


def _metrics(cell: Cell, start_s: float, end_s: float, tokens: int) -> Iterator[MetricsSample]:
    """A scrape a second."""
    at_s, made = start_s, 0.0
    while at_s < end_s + 1.0:
        busy = start_s + _BEFORE_S < at_s < end_s
        made = tokens * min(1.0, max(0.0, (at_s - start_s) / (end_s - start_s)))
        yield MetricsSample(
            START_S + at_s,
            cell.id,
            {"running": 250.0 if busy else 0.0, "waiting": 6.0 if busy else 0.0, "generated_tokens": float(int(made))},
        )
        at_s += 1.0
    yield MetricsSample(
        START_S + end_s + 0.9, cell.id, {"running": 0.0, "waiting": 0.0, "generated_tokens": float(tokens)}
    )


def _cell_run(cell: Cell, start_s: float, end_s: float) -> CellRun:
    served = ServedBy(
        url="http://127.0.0.1:8000",
        template="simulated",
        simulated=True,
        model="made-up",
        phases=[Phase(name="spawn", seconds=0.3), Phase(name="first answer", seconds=0.5)],
    )
    return CellRun(
        id=cell.id,
        server=cell.server,
        load=cell.load,
        repeat=cell.repeat,
        started_wall_s=START_S + start_s,
        ended_wall_s=START_S + end_s,
        served_by=served,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int, help="a multiple of 10")
    parser.add_argument("folder", type=Path, nargs="?", help="default: a new one in the system's temporary folder")
    parser.add_argument("--seed", type=int, default=42)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="amd-llm-load-scale-"))
    start_s = time.perf_counter()
    try:
        make_run(folder, given.requests, given.seed)
    except HarnessError as error:
        raise SystemExit(str(error)) from None
    size = (folder / "requests.jsonl").stat().st_size
    print(f"{folder}: {size / 1e9:.2f} GB in {time.perf_counter() - start_s:.1f} s; it is yours to delete")


if __name__ == "__main__":
    main()
