"""How many streams the load generator of this machine handles.

python -m benchmarks.calibrate --max-streams 200

The embedded engine logs when it sends each chunk, by the same monotonic clock as the records of the load generator.
Their difference is the error. Both share this machine, as in most runs; with the server on another machine the load
generator handles more.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from harness.base.errors import RunError
from harness.base.files import LOCUSTFILES, pretty_json, read_bytes
from harness.base.units import count
from harness.records.records import MAX_CPU, Request, read_marks, read_requests
from harness.run.drive import locust_arguments
from harness.scenario import Load, Prompts, Warmup
from harness.simulated.answer import Sent
from harness.workload.job import Job, write_job
from tests.support.simulated import spawned

STREAMS = (10, 50, 100, 200, 350, 500, 750, 1000, 1500, 2000)
STEP_S = 0.02  # between two chunks of a stream
CHUNKS = 50
ROUNDS = 2  # requests of each stream
MAX_STEP_S = 120.0
MAX_MEASURE_S = 240.0  # after this time no new number of streams starts
FACTOR = 1.5  # from one number of streams to the next, above STREAMS

MAX_ERROR_S = 0.005  # p99
MAX_SHARED = 0.01  # of the chunks


class CalibrationPoint(msgspec.Struct, frozen=True, kw_only=True):
    streams: int
    processes: int
    chunks_per_s: float
    error_p50_s: float
    error_p99_s: float  # absolute, of chunks with a read of their own
    shared: float  # share of the chunks that shared a read with a later one: their times are upper bounds
    read_lag_p99_s: float | None
    cpu_max: float | None  # of a core, of the busiest load process

    @property
    def doubts(self) -> list[str]:
        limits = (
            (self.error_p99_s, MAX_ERROR_S, f"1 % of the chunk times are off by more than {MAX_ERROR_S * 1000:g} ms"),
            (self.shared, MAX_SHARED, f"more than {MAX_SHARED:.0%} of the chunks shared a read"),
            (self.cpu_max or 0.0, MAX_CPU, f"a load process used more than {MAX_CPU:.0%} of a core"),
        )
        return [doubt for value, limit, doubt in limits if value > limit]


def calibrate(max_streams: int | None, processes: int = 1) -> Iterator[CalibrationPoint]:
    """Measure more and more streams until the load generator is too slow, `max_streams` is reached or time is over.

    Raises RunError when the load generator does not work at all.
    """
    began_s = time.monotonic()
    further = (round(STREAMS[-1] * FACTOR**number) for number in itertools.count(1))
    for number in itertools.chain(STREAMS, further):
        streams = number if max_streams is None else min(number, max_streams)
        point = _measure(streams, processes)
        if point.doubts:  # other programs may have been the limit: try again
            again = _measure(streams, processes)
            point = point if again.doubts else again
        yield point
        if point.doubts or streams == max_streams or time.monotonic() - began_s > MAX_MEASURE_S:
            return


def _measure(streams: int, processes: int) -> CalibrationPoint:
    flags = ["--preset", "instant", "--served-model-name", "m", "--step-base-s", str(STEP_S)]
    flags += ["--max-num-seqs", str(streams), "--send-log"]
    load = Load(user="batch", users=streams, processes=processes, requests=ROUNDS * streams, output_tokens=CHUNKS)
    with tempfile.TemporaryDirectory(prefix="amd-llm-load-calibrate-") as name:
        folder = Path(name)
        job = Job(
            cell="calibrate", load_name="calibrate", load=load, model="m", prompts=Prompts(tokens=20), seed=1,
            warmup=Warmup(requests=streams), requests_path=f"{folder}/requests.jsonl",
            processes_path=f"{folder}/processes.jsonl", counter_path=f"{folder}/counter",
        )  # fmt: skip
        write_job(job, folder / "job.json")
        with spawned(*flags, f"{folder}/sent.jsonl", quiet=True) as engine:
            arguments = locust_arguments(job, folder / "job.json", LOCUSTFILES / "batch.py", engine.url)
            command = [sys.executable, "-m", "locust", *arguments]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_STEP_S)
            except subprocess.TimeoutExpired:
                raise RunError(f"{streams} streams did not end within {MAX_STEP_S:g} s") from None
        if done.returncode != 0:
            raise RunError(f"the load generator ended with exit code {done.returncode}", detail=done.stderr[-2000:])
        return calibration_point(folder, folder / "sent.jsonl", streams, processes)


def calibration_point(folder: Path, sent: Path, streams: int, processes: int = 1) -> CalibrationPoint:
    """Return the result of a run. `sent`: the engine's log of its chunks. Raises RunError for a failed request."""
    records = [record for record in read_requests(folder / "requests.jsonl") if record.phase == "measured"]
    failed = [record for record in records if record.error is not None]
    if failed or not records:
        raise RunError(
            f"{len(failed)} of {len(records)} requests to the embedded engine failed",
            detail=f"{failed[0].error}: {failed[0].message}" if failed else "",
        )
    error_p50_s, error_p99_s = np.percentile(np.abs(chunk_errors_s(records, sent)), [50, 99])
    marks = [mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "end"]
    began_s = min(record.sent_s for record in records)
    ended_s = max(record.sent_s + record.ended_s for record in records)
    chunks = sum(len(record.chunks_s) for record in records)
    return CalibrationPoint(
        streams=streams,
        processes=processes,
        chunks_per_s=chunks / (ended_s - began_s),
        error_p50_s=float(error_p50_s),
        error_p99_s=float(error_p99_s),
        shared=sum(record.coalesced for record in records) / chunks,
        read_lag_p99_s=max((mark.read_lag_p99_s for mark in marks if mark.read_lag_p99_s is not None), default=None),
        cpu_max=max((mark.cpu_max for mark in marks if mark.cpu_max is not None), default=None),
    )


def chunk_errors_s(records: list[Request], sent: Path) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return, for each chunk with a read of its own, its recorded time minus its sending time, in seconds."""
    decoder = msgspec.json.Decoder(Sent)
    logged = {entry.request_id: entry.chunks_s for entry in map(decoder.decode, read_bytes(sent).splitlines()[1:])}
    errors_s: list[float] = []
    for record in records:
        times = record.chunks_s
        for chunk_s, next_s, sent_s in zip(times, [*times[1:], None], logged[record.id], strict=True):
            if chunk_s != next_s:
                errors_s.append(record.sent_s + chunk_s - sent_s)
    return np.array(errors_s)


def show_readings(console: Console, max_streams: int | None, processes: int, *, as_json: bool) -> None:
    """Measure, and print a line for each number of streams and a conclusion."""
    points: list[CalibrationPoint] = []
    if not as_json:
        load_processes = count(processes, "load process", "load processes")
        console.print(f"Streams of {CHUNKS} chunks, one each {STEP_S * 1000:g} ms; {load_processes}.")
    for point in calibrate(max_streams, processes):
        points.append(point)
        if not as_json:
            console.print(_format_point(point), soft_wrap=True)
    if as_json:
        print(pretty_json(points).decode(), end="")
    else:
        console.print(f"\n{describe_readings(points)}")


def _format_point(point: CalibrationPoint) -> str:
    text = f"{point.streams} streams, {point.chunks_per_s:,.0f} chunks/s: error p50 {point.error_p50_s * 1000:.3f} ms, "
    text += f"p99 {point.error_p99_s * 1000:.3f} ms; shared reads {point.shared:.2%}"
    if point.read_lag_p99_s is not None:
        text += f"; read lag p99 {point.read_lag_p99_s * 1000:.1f} ms"
    return text if point.cpu_max is None else f"{text}; CPU {point.cpu_max:.0%} of a core"


def describe_readings(points: list[CalibrationPoint]) -> str:
    """Return the number of streams to trust, in words."""
    last = points[-1]
    end = f" With {last.streams}, twice: {'; '.join(last.doubts)}." if last.doubts else " No more were tried."
    trusted = [point for point in points if not point.doubts]
    if not trusted:
        return f"This machine's load generator is not to be trusted even for few streams, or was too busy now.{end}"
    best = trusted[-1]
    return (
        f"Trusted for {best.streams} streams at once, {best.chunks_per_s:,.0f} chunks a second: 99 % of the "
        f"chunk times are right within {best.error_p99_s * 1000:.2g} ms.{end}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-streams", type=int, help="try no more streams than this")
    parser.add_argument("--processes", type=int, default=1, help="load processes")
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args()
    show_readings(Console(), given.max_streams, given.processes, as_json=given.json)


if __name__ == "__main__":
    main()
