"""How far a load generator's readings are from the truth, on one core, against a server of known schedule.

    python benchmarks/instrument.py --users 200 500 1000
    python benchmarks/instrument.py --users 500 --lockstep

The server (paced_server.c, compiled here) writes down when it sent each chunk. The client is what a user runs: Locust
with a user class that ships, closed loop, every cost included. Server and client have a core each. Printed are:

TTFT err      what the client calls TTFT, minus the schedule's (p50, p99)
chunk err     size of (the client's time of a chunk - the server's time of sending it), p99
load          requests finished in the time, of those that the schedule allows
us/chunk      CPU time of the client per chunk received
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from harness.drive import locust_arguments
from harness.job import Job, write_job
from harness.paths import LOCUSTFILES
from harness.records import Request, read_marks, read_requests
from harness.scenario import Load, Prompts, Warmup
from harness.serve.ports import free_port, is_free

HERE = Path(__file__).parent
ROUNDS = 4  # requests of each user


class Schedule(NamedTuple):
    """What the server does: TTFT and gap in ms; with a tick, chunks leave on it."""

    ttft_ms: float = 100.0
    gap_ms: float = 20.0
    chunks: int = 100
    tick_ms: float = 0.0

    @property
    def e2e_s(self) -> float:
        return (self.ttft_ms + (self.chunks - 1) * self.gap_ms) / 1000


class Reading(NamedTuple):
    """What a client said about one load, against the truth."""

    tool: str
    users: int
    ttft_ms: tuple[float, float] | None  # p50, p99 of the error
    chunk_ms: float | None  # p99 of the error's size; None: the tool keeps no times
    load: float | None  # share of what the schedule allows
    cpu_us: float | None  # per chunk
    note: str = ""


Client = Callable[["Server", int, Path, list[str], Schedule], Reading]


class Server:
    """paced_server on a core of its own."""

    def __init__(self, schedule: Schedule, folder: Path, core: int) -> None:
        program = _compiled("paced_server", folder)
        self.log = folder / f"sent-{time.monotonic_ns()}.txt"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = [str(number) for number in (schedule.ttft_ms, schedule.gap_ms, schedule.chunks, schedule.tick_ms)]
        command = [*_alone(core, 50), str(program), str(self.port), *arguments, str(self.log)]
        self._child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while is_free(self.port):
            time.sleep(0.02)

    def stop(self) -> dict[str, Any]:
        """End it; what it says about its own lateness."""
        self._child.send_signal(signal.SIGTERM)
        _, said = self._child.communicate(timeout=60)
        told: dict[str, Any] = msgspec.json.decode(said)
        return told

    def sent_s(self) -> dict[str, np.ndarray[Any, Any]]:
        """Send times of each request's chunks by its id, monotonic seconds."""
        sent = {}
        for line in self.log.read_text().splitlines():
            name, _, *times = line.split()
            sent[name] = np.cumsum(np.array(times, dtype=np.int64)) / 1e9
        return sent


def _alone(core: int, priority: int | None) -> list[str]:
    """The start of a command that runs on this core; with a priority, before everything else there, where allowed."""
    pinned = ["taskset", "-c", str(core)]
    if priority is None or shutil.which("chrt") is None:
        return pinned
    first = ["chrt", "-f", str(priority)]
    return [*first, *pinned] if subprocess.run([*first, "true"], capture_output=True).returncode == 0 else pinned


def ours(server: Server, users: int, folder: Path, start: list[str], schedule: Schedule, processes: int = 1) -> Reading:
    """The batch user class that ships, as `harness run` starts it."""
    folder.mkdir()
    load = Load(user="batch", users=users, processes=processes, requests=users * ROUNDS, output_tokens=schedule.chunks)
    job = Job(
        cell="c", load_name="batch", load=load, model="paced", prompts=Prompts(tokens=50), seed=1, salt=None,
        warmup=Warmup(requests=0), requests_path=str(folder / "requests.jsonl"),
        processes_path=str(folder / "processes.jsonl"), tickets_path=str(folder / "tickets"),
    )  # fmt: skip
    write_job(job, folder / "job.json")
    arguments = locust_arguments(job, folder / "job.json", LOCUSTFILES / "batch.py", server.url)
    with (folder / "log").open("wb") as log:
        command = [*start, sys.executable, "-m", "locust", *arguments]
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise SystemExit((folder / "log").read_text()[-2000:])
    server.stop()
    return _reading(folder, server, users, schedule)


def _reading(folder: Path, server: Server, users: int, schedule: Schedule) -> Reading:
    every = list(read_requests(folder / "requests.jsonl"))
    records = [record for record in every if record.phase == "measured" and record.error is None]
    assert len(records) == users * ROUNDS, [record.message for record in every if record.error][:3]
    sent = server.sent_s()
    ttft_ms = np.array([record.chunks_s[0] for record in records]) * 1000 - schedule.ttft_ms
    errors = np.concatenate([np.array(record.chunks_s) + record.sent_s - sent[record.id] for record in records])
    began, ended = _span(records)
    marks = [mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "end"]
    coalesced = sum(record.coalesced for record in records)
    cpu_s = sum(mark.cpu_s or 0.0 for mark in marks)
    unstamped = sum(record.clock == "read" for record in records)
    return Reading(
        "amd-llm-load",
        users,
        _marks(ttft_ms),
        float(np.percentile(np.abs(errors), 99)) * 1000,
        len(records) / (users / schedule.e2e_s * (ended - began)),
        cpu_s / (len(every) * schedule.chunks) * 1e6,
        f"{coalesced / len(errors):.2%} of chunks shared a read, {unstamped} requests without the kernel's stamps, "
        f"CPU at most {max(m.cpu_most or 0 for m in marks):.0%}",
    )


def in_c(server: Server, users: int, folder: Path, start: list[str], schedule: Schedule) -> Reading:
    """paced_client: the least that reading these streams costs."""
    program = _compiled("paced_client", folder.parent)
    command = [*start, str(program), str(server.port), str(users), str(ROUNDS)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    server.stop()
    told = msgspec.json.decode(said.stdout)
    load = ROUNDS * schedule.e2e_s / told["took_s"]
    ttft_ms = (told["ttft_p50_ms"] - schedule.ttft_ms, told["ttft_p99_ms"] - schedule.ttft_ms)
    return Reading("C, nothing parsed", users, ttft_ms, None, load, told["cpu_us"])


def vllm_bench(server: Server, users: int, folder: Path, start: list[str], schedule: Schedule, program: str) -> Reading:
    """`vllm bench serve`, which keeps at most `users` requests in flight."""
    folder.mkdir()
    vocabulary = folder / "tokenizer"
    _small_tokenizer(vocabulary)
    command = [
        *start, program, "bench", "serve", "--backend", "openai-chat", "--base-url", server.url,
        "--endpoint", "/v1/chat/completions", "--model", "paced", "--tokenizer", str(vocabulary),
        "--dataset-name", "random", "--random-input-len", "50", "--random-output-len", str(schedule.chunks),
        "--num-prompts", str(users * ROUNDS), "--max-concurrency", str(users), "--ignore-eos",
        "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json",
        "--disable-tqdm", "--ready-check-timeout-sec", "0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    server.stop()
    if done.returncode != 0:
        return Reading("vllm bench serve", users, None, None, None, None, f"failed: {done.stderr.strip()[-200:]}")
    told = msgspec.json.decode((folder / "result.json").read_bytes())
    ttft_ms = np.array(told["ttfts"]) * 1000 - schedule.ttft_ms
    load = told["completed"] / (users / schedule.e2e_s * told["duration"])
    return Reading("vllm bench serve", users, _marks(ttft_ms), None, load, None)


def _small_tokenizer(folder: Path) -> None:
    """Something that counts words, so that nothing has to be fetched."""
    folder.mkdir()
    words = [f"w{number}" for number in range(1000)]
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 100000}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))


def _marks(errors_ms: np.ndarray[Any, Any]) -> tuple[float, float]:
    return float(np.percentile(errors_ms, 50)), float(np.percentile(errors_ms, 99))


def _compiled(name: str, folder: Path) -> Path:
    program = folder / name
    if not program.exists():
        subprocess.run(["cc", "-O2", "-o", program, HERE / f"{name}.c"], check=True)
    return program


def _span(records: list[Request]) -> tuple[float, float]:
    return min(r.sent_s for r in records), max(r.sent_s + r.ended_s for r in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, nargs="+", default=[200, 500, 1000])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--lockstep", action="store_true", help="all streams tick together, as an engine's batch does")
    parser.add_argument("--server-core", type=int, default=1)
    parser.add_argument("--client-core", type=int, default=0)
    parser.add_argument("--realtime", action="store_true", help="clients, too, run before all else (a busy machine)")
    parser.add_argument("--vllm", default=shutil.which("vllm"), metavar="PROGRAM", help="for `vllm bench serve`")
    options = parser.parse_args()
    start = _alone(options.client_core, 40 if options.realtime else None)
    schedule = Schedule(tick_ms=20.0 if options.lockstep else 0.0)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {schedule}")
    print(f"{'tool':28} {'users':>6} {'TTFT err p50/p99, ms':>22} {'chunk err p99':>14} {'load':>7} {'us/chunk':>9}")
    clients: dict[str, Client] = {"C": in_c, "ours": ours}
    if options.vllm:
        clients["vllm"] = partial(vllm_bench, program=options.vllm)
    else:
        print("vllm bench serve: skipped, there is no program vllm (--vllm PROGRAM)")
    with tempfile.TemporaryDirectory() as name:
        for repeat in range(options.repeats):
            for users in options.users:
                for tool, client in clients.items():  # interleaved: what else the machine does falls on all
                    server = Server(schedule, Path(name), options.server_core)
                    show(client(server, users, Path(name) / f"{tool}-{users}-{repeat}", start, schedule))


def show(read: Reading) -> None:
    ttft = "-" if read.ttft_ms is None else f"{read.ttft_ms[0]:+.2f} / {read.ttft_ms[1]:+.2f}"
    load = "-" if read.load is None else f"{read.load:.1%}"
    chunk = "-" if read.chunk_ms is None else f"{read.chunk_ms:.3f}"
    cpu = "-" if read.cpu_us is None else f"{read.cpu_us:.1f}"
    print(f"{read.tool:28} {read.users:6} {ttft:>22} {chunk:>14} {load:>7} {cpu:>9}  {read.note}", flush=True)


if __name__ == "__main__":
    main()
