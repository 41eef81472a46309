"""How exactly this machine measures: how many streams its load generator handles, and how far equal runs differ.

For the first, the embedded engine writes down when it sent each chunk, on the same monotonic clock: what the load
generator's records say, minus that, is the error of the instrument. Engine and load generator share this machine, as
server and load generator do in most runs; with the server elsewhere, there is more room. For the second, a scenario
runs with one server under two names (A/A).
"""

import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from harness.analysis.summarize import summarize
from harness.columns import METRIC_WORDS
from harness.errors import HarnessError, RunError
from harness.files import LOCUSTFILES, pretty_json, read_bytes
from harness.job import Job, write_job
from harness.judge import stats
from harness.judge.noise_floors import (
    AGAIN,
    A,
    RowNoise,
    StoredNoise,
    join_noise,
    measure_noise,
    noise_path,
    read_noise,
    write_noise,
)
from harness.prepare.experiment import Experiment, server_name
from harness.process import pause
from harness.reasons import sentence
from harness.run.drive import locust_arguments
from harness.run.orchestrator import run
from harness.run.progress import Progress
from harness.rundir.manifest import read_run
from harness.rundir.records import MAX_CPU, Request, read_marks, read_requests
from harness.scenario import Baseline, Load, Prompts, Warmup
from harness.simulated import spawned
from harness.simulated.answer import Sent
from harness.summary import MARGIN, MAX_REPEATS
from harness.units import NOTHING, count, duration, figures

STREAMS = (10, 50, 100, 200, 350, 500, 750, 1000, 1500, 2000)
STEP_S = 0.02  # between two chunks of a stream
CHUNKS = 50
ROUNDS = 2  # requests of each stream
LONGEST_S = 120.0
ENOUGH_S = 240.0  # of measuring; after that no new number of streams starts
FACTOR = 1.5  # from one number of streams to the next, after those above

MAX_ERROR_S = 0.005  # p99
MAX_SHARED = 0.01  # of the chunks
BUSY = 0.1  # of a core, by other programs: with more, they may be the limit

_COLUMNS = (
    "streams", "chunks/s", "error p50, ms", "error p99, ms", "shared reads", "read lag p99, ms", "CPU of a core",
)  # fmt: skip


class CalibrationPoint(msgspec.Struct, frozen=True, kw_only=True):
    streams: int
    processes: int
    chunks_per_s: float
    error_p50_s: float
    error_p99_s: float  # of its size, over chunks that had a read to themselves
    shared: float  # part of the chunks that shared a read with a later one: their times are upper bounds
    read_lag_p99_s: float | None
    cpu_max: float | None  # of a core, of the busiest load process
    others: float | None = None  # cores that other programs used meanwhile

    @property
    def trusted(self) -> bool:
        return not self.doubts

    @property
    def doubts(self) -> list[str]:
        found = []
        if self.error_p99_s > MAX_ERROR_S:
            found.append(f"1 % of the chunk times are off by more than {MAX_ERROR_S * 1000:g} ms")
        if self.shared > MAX_SHARED:
            found.append(f"more than {MAX_SHARED:.0%} of the chunks shared a read")
        if self.cpu_max is not None and self.cpu_max > MAX_CPU:
            found.append(f"a load process used more than {MAX_CPU:.0%} of a core")
        return found


def calibrate(max_streams: int | None, processes: int = 1) -> Iterator[CalibrationPoint]:
    """Measure more and more streams until the load generator is too slow, `max_streams` is reached or ENOUGH_S is over.

    Raises RunError when the load generator does not work at all.
    """
    began_s = time.monotonic()
    further = (round(STREAMS[-1] * FACTOR**number) for number in itertools.count(1))
    for number in itertools.chain(STREAMS, further):
        streams = number if max_streams is None else min(number, max_streams)
        reading = _measure(streams, processes)
        if not reading.trusted:  # other work of the machine may have been the limit: try again
            again = _measure(streams, processes)
            reading = again if again.trusted else reading
        yield reading
        if not reading.trusted or streams == max_streams or time.monotonic() - began_s > ENOUGH_S:
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
        began_s, busy_s, ours_s = time.monotonic(), _busy_s(), sum(os.times()[:4])
        with spawned(*flags, f"{folder}/sent.jsonl", quiet=True) as engine:
            arguments = locust_arguments(job, folder / "job.json", LOCUSTFILES / "batch.py", engine.url)
            command = [sys.executable, "-m", "locust", *arguments]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
            except subprocess.TimeoutExpired:
                raise RunError(f"{streams} streams did not end within {LONGEST_S:g} s") from None
        if done.returncode != 0:
            raise RunError(f"the load generator ended with exit code {done.returncode}", detail=done.stderr[-2000:])
        others_s = _busy_s() - busy_s - (sum(os.times()[:4]) - ours_s)
        others = max(0.0, others_s / (time.monotonic() - began_s))
        return msgspec.structs.replace(reading_of(folder, folder / "sent.jsonl", streams, processes), others=others)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def reading_of(folder: Path, sent: Path, streams: int, processes: int = 1) -> CalibrationPoint:
    records = [one for one in read_requests(folder / "requests.jsonl") if one.phase == "measured"]
    failed = [one for one in records if one.error is not None]
    if failed or not records:
        raise RunError(
            f"{len(failed)} of {len(records)} requests to the embedded engine failed",
            detail=f"{failed[0].error}: {failed[0].message}" if failed else "",
        )
    errors_s = chunk_errors_s(records, sent)
    marks = [mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "end"]
    began, ended = min(one.sent_s for one in records), max(one.sent_s + one.ended_s for one in records)
    chunks = sum(len(one.chunks_s) for one in records)
    return CalibrationPoint(
        streams=streams,
        processes=processes,
        chunks_per_s=chunks / (ended - began),
        error_p50_s=float(np.percentile(np.abs(errors_s), 50)),
        error_p99_s=float(np.percentile(np.abs(errors_s), 99)),
        shared=sum(one.coalesced for one in records) / chunks,
        read_lag_p99_s=max((mark.read_lag_p99_s for mark in marks if mark.read_lag_p99_s is not None), default=None),
        cpu_max=max((mark.cpu_max for mark in marks if mark.cpu_max is not None), default=None),
    )


def chunk_errors_s(records: list[Request], sent: Path) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """For each chunk that had a read to itself: time in the record minus time of sending, in seconds."""
    decoder = msgspec.json.Decoder(Sent)
    truth = {one.request_id: one.chunks_s for one in map(decoder.decode, read_bytes(sent).splitlines()[1:])}
    errors: list[float] = []
    for record in records:
        times = record.chunks_s
        alone = [mine != later for mine, later in zip(times, [*times[1:], None], strict=True)]
        pairs = zip(times, truth[record.id], alone, strict=True)
        errors += [record.sent_s + mine - true for mine, true, own in pairs if own]
    return np.array(errors)


def show_readings(console: Console, max_streams: int | None, processes: int, *, as_json: bool) -> None:
    """Measure, print a line for each reading, and the number of streams to trust."""
    readings: list[CalibrationPoint] = []
    if not as_json:
        who = count(processes, "load process", "load processes")
        what = f"Streams of {CHUNKS} chunks, one each {STEP_S * 1000:g} ms, from the embedded engine; {who}."
        console.print(f"{what}\n{'  '.join(_COLUMNS)}", soft_wrap=True)
    for reading in calibrate(max_streams, processes):
        readings.append(reading)
        if not as_json:
            lag, cpu = reading.read_lag_p99_s, reading.cpu_max
            cells = (
                str(reading.streams), f"{reading.chunks_per_s:,.0f}", f"{reading.error_p50_s * 1000:.3f}",
                f"{reading.error_p99_s * 1000:.3f}", f"{reading.shared:.2%}",
                "-" if lag is None else f"{lag * 1000:.1f}", "-" if cpu is None else f"{cpu:.0%}",
            )  # fmt: skip
            line = "  ".join(cell.rjust(len(column)) for cell, column in zip(cells, _COLUMNS, strict=True))
            console.print(line, soft_wrap=True)
    if as_json:
        print(pretty_json(readings).decode(), end="")
    else:
        console.print(f"\n{in_words(readings)}")


def in_words(readings: list[CalibrationPoint]) -> str:
    good = [reading for reading in readings if reading.trusted]
    last = readings[-1]
    end = " No more were tried." if last.trusted else f" With {last.streams}, twice: {'; '.join(last.doubts)}."
    if not last.trusted and last.others is not None and last.others > BUSY:
        end += f" Other programs used {last.others:.1f} cores meanwhile: measure again when they are quiet."
    if not good:
        return f"This machine's load generator is not to be trusted even for few streams, or was too busy now.{end}"
    if not last.trusted:
        end += " More `processes` in the load, or the server on another machine, give more room."
    return (
        f"Trusted for {good[-1].streams} streams at once, {good[-1].chunks_per_s:,.0f} chunks a second: 99 % of the "
        f"chunk times are right within {good[-1].error_p99_s * 1000:.2g} ms.{end}"
    )


_SHORT_S = 3600.0  # runs that are closer share temperature and other programs


def noise(
    experiment: Experiment,
    server: str | None,
    runs: Path,
    results: Path,
    progress: Progress,
    *,
    times: int = 1,
    pause_s: float = 0.0,
    add: bool = False,
) -> tuple[Path, StoredNoise]:
    """Measure and store the difference of equal runs, `times` times with pauses; return the path and the result.

    Results are stored after each run, so that an interruption loses one run. With `add` the runs that were stored
    before stay. Raises RunError when a run is not VALID.
    """
    name = server_name(experiment, server)
    known: StoredNoise | None = None
    for number in range(times):
        if number:
            pause(pause_s)
        folder = run(a_against_a(experiment, name), runs, progress)
        manifest, summary = read_run(folder), summarize(folder)
        if not summary.valid:
            raise RunError(
                f"{manifest.id}: an INVALID run shows no noise: {sentence(summary.reasons[0])}",
                next_step=f"harness report {folder} shows all reasons. {number} of {times} runs are stored.",
            )
        path = noise_path(results, manifest)
        found = measure_noise(manifest, summary, name)
        if known is None and add:
            known = read_noise(path)
        known = found if known is None else join_noise(known, found)
        try:
            write_noise(path, known)
        except OSError as error:
            raise HarnessError(
                f"{path}: the noise cannot be stored ({error.strerror})", next_step="--results DIR chooses a folder."
            ) from None
    assert known is not None
    return path, known


def a_against_a(experiment: Experiment, name: str) -> Experiment:
    """The experiment with one of its servers under two names, without checks."""
    scenario = experiment.scenario
    server = scenario.servers[name]
    twice = msgspec.structs.replace(
        scenario,
        question=f"How far do two equal servers differ on this machine? (A/A of '{name}')",
        servers={A: server, AGAIN: server},
        swept=None,  # nothing differs between the two
        baseline=Baseline(server=A, load=next(iter(scenario.loads))),
        checks=[],
    )
    return msgspec.structs.replace(experiment, scenario=twice)


def show_noise(noise: StoredNoise, console: Console) -> None:
    span_s = noise.runs[-1].started_wall_s - noise.runs[0].started_wall_s
    over = f" over {duration(span_s)}" if span_s else ""
    repeats = count(noise.repeats, "repeat")
    console.print(f"{noise.machine}: {count(len(noise.runs), 'A/A run')} of '{noise.server}'{over}, {repeats} each")
    margin = f"±{100 * MARGIN:g} %"
    table = Table(box=None, pad_edge=False)
    for heading in (
        "load", "by", "sd of repeats", f"repeats for 'same' within {margin}", "sd of runs", "one run finds",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("load", "by") else "right")
    for row in noise.rows:
        table.add_row(row.load, METRIC_WORDS[row.metric], *_of_row(row, noise.repeats))
    console.print(table)
    if len(noise.runs) < 2:
        console.print("One run does not show how far runs differ: add runs of other hours and days with --add.")
    elif span_s < _SHORT_S:
        console.print(
            f"Warning: these runs are from {duration(span_s)}. Runs of other hours and days differ more, and a verdict "
            "that rests on this can be false. Spread runs with --every 60, or add some with --add."
        )


def _of_row(row: RowNoise, repeats: int) -> list[str]:
    """Spread of repeats, repeats a side for "same", spread of runs, and the difference that one run finds."""
    cells = [NOTHING] * 4
    between = row.repeat_variance()
    if between is not None:
        needed = stats.sample_size_to_settle(0.0, (between, between), 1, 1)
        cells[:2] = [_percent(math.sqrt(between)), f"over {MAX_REPEATS}" if needed is None else str(needed)]
    seen = row.variation()
    if seen is not None:
        variance = seen.run_variance(repeats)
        smallest = max(math.expm1(stats.detectable_log_ratio(variance, seen.freedom)), MARGIN)
        cells[2:] = [_percent(math.sqrt(variance)), f"{_percent(smallest)} or more"]
    return cells


def _percent(value: float) -> str:
    return f"{figures(100 * value, 2)} %"
