"""How long `harness explain` takes for a long log, and how much memory.

python -m benchmarks.explain          logs of 100 MB
python -m benchmarks.explain --mb 10  shorter ones

Four logs with the lines of real servers, whose numbers and request ids differ: vLLM under load, a vLLM that logs one
exception after another, llama.cpp and Lemonade. Each is explained by a process of its own, on one core.
"""

import argparse
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TARGET_S, TARGET_MB = 10.0, 100
_STAMP = "11-21 10:{0:02d}:{1:02d}"


def vllm(number: int) -> str:
    stamp = _STAMP.format(number // 600 % 60, number // 10 % 60)
    if number % 10 < 6:
        return f'(APIServer pid=1) INFO:     172.17.0.1:{number % 60000} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    if number % 10 < 8:
        return (
            f"(EngineCore pid=80) INFO {stamp} [loggers.py:248] Engine 000: Avg prompt throughput: {number % 999}.1 "
            f"tokens/s, Running: {number % 8} reqs, Waiting: 0 reqs, GPU KV cache usage: {number % 100}.2%"
        )
    if number % 10 == 8:
        return (
            f"(APIServer pid=1) INFO {stamp} [logger.py:40] Received request chatcmpl-{number * 7919:x}: prompt: "
            f"'out of memory {number}', params: SamplingParams(n=1)"
        )
    return f"(EngineCore pid=80) WARNING {stamp} [scheduler.py:100] Preempted request {number * 7919:x}"


def exceptions(number: int) -> str:
    stamp = _STAMP.format(number // 600 % 60, number // 10 % 60)
    said = (
        "Traceback (most recent call last):",
        *(f'  File "/usr/lib/python3/worker.py", line {number}, in run',) * 4,
        f"ValueError: request {number * 7919:x} has no block {number}",
        f"request {number * 7919:x} failed",
    )
    return f"(EngineCore pid=80) ERROR {stamp} [core.py:867] {said[number % 7]}"


def llamacpp(number: int) -> str:
    return (
        f"0.{number // 60 % 60:02d}.{number % 1000:03d}.{number % 1000:03d} I slot update_slots: id  {number % 8} | "
        f"task {number} | prompt processing progress, n_tokens = {number % 2048}, progress = 0.5"
    )


def lemonade(number: int) -> str:
    return (
        f"2026-11-21 10:00:00.{number % 1000:03d} [Info] (Router) llamacpp: request {number * 7919:x}, "
        f"load time {number} ms"
    )


LOGS: dict[str, Callable[[int], str]] = {
    "vLLM": vllm, "vLLM, exceptions": exceptions, "llama.cpp": llamacpp, "Lemonade": lemonade
}  # fmt: skip


def make_log(path: Path, line: Callable[[int], str], size: int) -> None:
    """Write a log of at least `size` bytes."""
    with path.open("wb") as file:
        for block in _blocks(line):
            file.write(block)
            if file.tell() >= size:
                return


def _blocks(line: Callable[[int], str]) -> Iterator[bytes]:
    for begin in itertools.count(0, 1000):
        yield "".join(f"{line(number)}\n" for number in range(begin, begin + 1000)).encode()


def measure(path: Path) -> tuple[float, float, int]:
    """Explain a log: wall time and CPU time in seconds, start of Python included, and the peak of memory in bytes."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "harness", "explain", str(path)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begin, cpu_s, after.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=TARGET_MB, help="size of each log, in MB")
    size = 10**6 * parser.parse_args().mb
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"| log, {size // 10**6} MB | wall | CPU | peak memory |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, line in LOGS.items():
            make_log(Path(folder) / "server.log", line, size)
            wall_s, cpu_s, peak = measure(Path(folder) / "server.log")
            print(f"| {name} | {wall_s:.1f} s | {cpu_s:.1f} s | {peak / 1e6:.0f} MB |", flush=True)
    print(f"target: {TARGET_MB} MB in less than {TARGET_S:g} s on one core")


if __name__ == "__main__":
    main()
