"""Soak: does anything grow during a long load? A real `harness run` against the server in C, sampled all the time.

    python -m benchmarks.soak requests      # 1,000,000 short requests, 200 at once
    python -m benchmarks.soak streams       # 2,000 concurrent streams for five minutes
    python -m benchmarks.soak requests --requests 20000 --every 0.5    # a short one

Of the load process, the harness and the server: memory (RSS, and USS: what no other process shares), open files and
threads, every few seconds while the load runs. The first tenth is the warm-up. The medians of the second and the last
tenth must not differ by more than 5 % for the load process and the harness. The server keeps in memory what it sent,
and is shown only. The exit code is 1 when something grows, or when the run is not VALID.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from benchmarks.instrument.server import Schedule, Server
from harness.records.manifest import read_run
from harness.records.records import read_marks

MAX_CHANGE = 0.05
KINDS: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "requests": (Schedule(ttft_ms=10, gap_ms=10, chunks=4), {"users": 200, "requests": 1_000_000, "output_tokens": 4}),
    "streams": (
        Schedule(ttft_ms=100, gap_ms=100, chunks=200, spread=True),
        {"users": 2000, "duration_s": 300, "output_tokens": 200, "output": "natural"},
    ),
}


class Sample(NamedTuple):
    """One process at one moment."""

    at_s: float
    rss: int  # bytes
    uss: int  # bytes
    files: int
    threads: int


NUMBERS: dict[str, Callable[[Sample], float]] = {
    "RSS, MiB": lambda one: one.rss / 2**20,
    "USS, MiB": lambda one: one.uss / 2**20,
    "open files": lambda one: one.files,
    "threads": lambda one: one.threads,
}


def sample(process: psutil.Process) -> Sample:
    memory = process.memory_full_info()
    return Sample(time.monotonic(), memory.rss, memory.uss, process.num_fds(), process.num_threads())


def watch(harness: psutil.Process, server: psutil.Process, every_s: float) -> dict[str, list[Sample]]:
    """Samples of each process until the load processes have ended."""
    found: dict[str, list[Sample]] = {}
    loading = False
    while harness.is_running() and harness.status() != psutil.STATUS_ZOMBIE:
        try:
            load = [one for one in harness.children(recursive=True) if "locust" in one.cmdline()]
            if loading and not load:
                break
            loading = bool(load)
            named = {f"load {number}": one for number, one in enumerate(load, 1)}
            for name, process in (named | {"harness": harness, "server": server} if load else {}).items():
                found.setdefault(name, []).append(sample(process))
        except psutil.NoSuchProcess:
            continue
        time.sleep(every_s)
    return found


def tenth(samples: Sequence[Sample], which: int, number: Callable[[Sample], float]) -> float:
    """The median in the tenth of that number, from 0."""
    size = len(samples) / 10
    return statistics.median(number(one) for one in samples[int(which * size) : int((which + 1) * size)])


def show(found: dict[str, list[Sample]]) -> bool:
    """Print the numbers of each process; whether those of ours are flat."""
    flat = True
    print("| process | | 2nd tenth | last tenth | change | most | slope an hour |\n|---|---|---:|---:|---:|---:|---:|")
    for name, samples in found.items():
        if len(samples) < 20:
            print(f"{name}: {len(samples)} samples are too few")
            return False
        after = samples[len(samples) // 10 :]
        for what, number in NUMBERS.items():
            early, late = tenth(samples, 1, number), tenth(samples, 9, number)
            times, values = [one.at_s / 3600 for one in after], [number(one) for one in after]
            slope = statistics.linear_regression(times, values).slope
            change = late / early - 1
            grows = name != "server" and abs(change) > MAX_CHANGE
            flat = flat and not grows
            mark = " GROWS" if grows else ""
            numbers = f"{early:,.1f} | {late:,.1f} | {change:+.1%}{mark} | {max(values):,.1f} | {slope:+,.1f}"
            print(f"| {name} | {what} | {numbers} |")
    for name, samples in found.items():
        tenths = " ".join(f"{tenth(samples, which, NUMBERS['USS, MiB']):.1f}" for which in range(10))
        print(f"USS by tenths, MiB: {name}: {tenths}")
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--requests", type=int, help="another number of requests")
    parser.add_argument("--seconds", type=float, help="another duration")
    parser.add_argument("--users", type=int, help="another number of users")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between samples (3)")
    given = parser.parse_args()
    schedule, load = KINDS[given.kind]
    if (given.seconds if given.kind == "requests" else given.requests) is not None:
        parser.error("requests has --requests, streams has --seconds")
    changes = {"users": given.users, "requests": given.requests, "duration_s": given.seconds}
    load = {"user": "batch", **load, **{key: value for key, value in changes.items() if value is not None}}
    scenario = {
        "version": 1, "question": "Does anything grow?", "model": "paced", "loads": {"soak": load}, "repeats": 1,
        "servers": {"paced": {"template": "simulated", "container": False}}, "warmup": {"requests": 0},
        "prompts": {"kind": "synthetic", "tokens": 10},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "soak.yaml").write_bytes(msgspec.json.encode(scenario))
        server = Server(schedule, load["users"], folder, None)
        command = [sys.executable, "-m", "harness", "run", str(folder / "soak.yaml"), "--url", server.url]
        with (folder / "output").open("wb") as written:
            child = subprocess.Popen(
                [*command, "--runs", str(folder / "runs")], stdout=written, stderr=subprocess.STDOUT
            )
        try:
            found = watch(psutil.Process(child.pid), psutil.Process(server.pid), given.every)
            code = child.wait()
        finally:
            child.kill()
            child.wait()
            server.stop()
        print((folder / "output").read_text(errors="replace")[-3000:])
        (run,) = (folder / "runs").iterdir()
        marks = [mark for mark in read_marks(run / "processes.jsonl") if mark.event == "end"]
        print(
            f"{read_run(run).status}, {sum(mark.recorded or 0 for mark in marks):,} records, busiest 5 s of a load "
            f"process {max(mark.cpu_max or 0 for mark in marks):.0%} of a core, {len(found['harness'])} samples"
        )
        flat = show(found)
    sys.exit(0 if flat and code == 0 else 1)


if __name__ == "__main__":
    main()
