"""How long the summary and the report of a run take, and how that grows with the number of requests.

python -m benchmarks.scale                        10,000, 100,000 and 1,000,000 requests
python -m benchmarks.scale 1000 10000 --runs DIR  others, made in another folder

Each size is made, measured and deleted. Every measurement is a process of its own; memory is the most that it and the
processes that it starts had at the same time, from samples each 50 ms, and never less than the kernel's peak of any.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.make_run import make_run
from harness.base.errors import HarnessError
from harness.numbers.summarize import read_summary, summarize, write_summary
from harness.questions.report.page import run_html
from harness.records.manifest import read_run

SIZES = (10_000, 100_000, 1_000_000)
TARGET_REQUESTS, TARGET_SUMMARY_S, TARGET_BYTES, TARGET_REPORT_S = 1_000_000, 10.0, 0.5e9, 10.0


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float  # of all its processes
    peak_bytes: int


class Line(NamedTuple):
    requests: int
    records_bytes: int
    summary: Cost
    report: Cost


def measure(requests: int, folder: Path) -> Line:
    """Make a run, measure its summary and its report, and delete it."""
    try:
        make_run(folder, requests)
        records_bytes = (folder / "requests.jsonl").stat().st_size
        return Line(requests, records_bytes, _apart(_summary, folder), _apart(_report, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _summary(folder: Path) -> None:
    write_summary(folder, summarize(folder))


def _report(folder: Path) -> None:
    (folder / "report.html").write_text(run_html(folder, read_run(folder), read_summary(folder)))


def _apart(work: Callable[[Path], None], folder: Path) -> Cost:
    """The cost of a piece of work, done in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(work, folder, other))
    process.start()
    other.close()
    try:
        return Cost(*mine.recv())
    except EOFError:
        raise SystemExit(f"the process that made {work.__name__[1:]} of {folder} died") from None
    finally:
        process.join()


def _measured(work: Callable[[Path], None], folder: Path, out: Connection) -> None:
    done = threading.Event()
    most = [0]
    sampler = threading.Thread(target=_sample, args=(done, most))
    sampler.start()
    start_s = time.perf_counter()
    try:
        work(folder)
        wall_s = time.perf_counter() - start_s
    finally:
        done.set()
        sampler.join()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    unit = 1 if sys.platform == "darwin" else 1024
    peak = max(most[0], *(int(usage.ru_maxrss) * unit for usage in used))
    out.send((wall_s, sum(usage.ru_utime + usage.ru_stime for usage in used), peak))


def _sample(done: threading.Event, most: list[int]) -> None:
    me = psutil.Process(os.getpid())
    while not done.wait(0.05):
        now = 0
        for process in [me, *me.children(recursive=True)]:
            try:
                now += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        most[0] = max(most[0], now)


def show(lines: list[Line]) -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; growth is against the line above\n")
    print("   requests  records            summary     growth    memory             report     growth    memory")
    for before, line in zip([None, *lines], lines, strict=False):
        cells = []
        for name in ("summary", "report"):
            cost: Cost = getattr(line, name)
            growth = f"x {cost.wall_s / getattr(before, name).wall_s:.1f}" if before else ""
            cells.append(f"{cost.wall_s:6.1f} s ({cost.cpu_s:5.1f} CPU) {growth:>7} {cost.peak_bytes / 1e6:6,.0f} MB")
        more = f"x {line.requests / before.requests:.0f}" if before else ""
        print(f"{line.requests:11,} {line.records_bytes / 1e9:5.2f} GB {more:>5} {cells[0]}   {cells[1]}", flush=True)


def missed(line: Line) -> list[str]:
    """Which of the targets this line does not meet; they are for a million requests."""
    if line.requests != TARGET_REQUESTS:
        return []
    seen = (
        ("summary", line.summary.wall_s, TARGET_SUMMARY_S, "s"),
        ("summary", line.summary.peak_bytes, TARGET_BYTES, "bytes"),
        ("report", line.report.wall_s, TARGET_REPORT_S, "s"),
    )
    return [f"{what}: {value:,.1f} {unit}, target {most:,.0f}" for what, value, most, unit in seen if value > most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="*", default=SIZES, help="numbers of requests, multiples of 10")
    parser.add_argument("--runs", type=Path, help="where the runs are made; default: the system's temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="amd-llm-load-scale-", dir=given.runs) as above:
        try:
            lines = [measure(size, Path(above) / str(size)) for size in given.sizes]
        except HarnessError as error:
            raise SystemExit(str(error)) from None
    show(lines)
    problems = [problem for line in lines for problem in missed(line)]
    if problems:
        raise SystemExit("\n".join(["", "Missed:", *problems]))


if __name__ == "__main__":
    main()
