"""How far a load generator's readings are from the truth, on one core, against a server of known schedule.

    python -m benchmarks.instrument --users 200 500 1000
    python -m benchmarks.instrument --users 500 --spread --lockstep --tools ours vllm --json readings.json

The server (paced_server.c, compiled here) writes down when it sent each chunk. Each client keeps so many requests in
flight, with all its processes on one core; the server has another. Every tool's numbers come from its own files:

TTFT err      what the client calls TTFT, minus the server's (p50, p99)
TPOT, ITL err size of the error of a request's time per token, and of a gap between two chunks, p99
chunk err     size of (the client's time of a chunk - the server's time of sending it), p99
load          chunks sent, of those that the schedule allows
us/chunk      CPU time of all the client's processes per chunk, from the first request to the last chunk: start-up is
              not counted, nor what it makes of its numbers afterwards
core          the same, of the core that it has
others        what the machine did beside the benchmark, of one core: with much of it a reading says little

Other modes: --processes, --memory, --capacity (each says what it measures).
"""

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import harness
from benchmarks.instrument import memory, modes
from benchmarks.instrument.client import Client
from benchmarks.instrument.neighbours import NEIGHBOURS, client_of, small_tokenizer, version_of
from benchmarks.instrument.ours import in_c, ours
from benchmarks.instrument.reading import machine, write
from benchmarks.instrument.server import Schedule, compiled


def main() -> None:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # what was started is ended, too
    schedule = Schedule(tick_ms=20.0 if options.lockstep else 0.0, spread=options.spread)
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="instrument-")))
        folder.mkdir(parents=True, exist_ok=True)
        for program in ("paced_server", "paced_client"):
            compiled(program, folder)
        alone = options.capacity is not None or options.memory or options.processes > 1
        clients, versions = _clients(["ours"] if alone else options.tools, options, folder)
        about = machine() | versions
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        place = modes.Place(folder, options.server_core, options.client_core, options.realtime)
        if options.capacity is not None:
            readings = modes.capacity(options.capacity, place)
        elif options.memory:
            readings = memory.memory(min(options.users), max(options.users), place)
        elif options.processes > 1:
            readings = modes.processes(options.processes, options.users, options.repeats, schedule, place)
        else:
            readings = modes.compare(clients, options.users, options.rounds, options.repeats, schedule, place)
    if options.json:
        write(options.json, about, readings)


def _clients(tools: list[str], options: argparse.Namespace, folder: Path) -> tuple[dict[str, Client], dict[str, str]]:
    """Those of the tools that are there, by name, and their versions."""
    clients: dict[str, Client] = {"C": in_c, "ours": ours}
    versions = {"ours": harness.__version__}
    tokenizer = small_tokenizer(folder / "tokenizer")
    for name in NEIGHBOURS:
        program = getattr(options, name.replace("-", "_"))
        if name not in tools:
            continue
        if program is None or shutil.which(program) is None:
            print(f"{name}: skipped, there is no program {program or NEIGHBOURS[name].program} (--{name} PROGRAM)")
            continue
        clients[name] = client_of(name, program, tokenizer)
        versions[name] = version_of(name, program)
    return {name: client for name, client in clients.items() if name in tools}, versions


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instrument",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = ["C", "ours", *NEIGHBOURS]
    parser.add_argument("--users", type=int, nargs="+", default=[200, 500, 1000])
    parser.add_argument("--rounds", type=int, default=4, help="requests of each user")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tools", nargs="+", choices=every, default=every, metavar="TOOL", help=", ".join(every))
    parser.add_argument("--lockstep", action="store_true", help="all streams tick together, as an engine's batch does")
    parser.add_argument("--spread", action="store_true", help="ends of answers are spread evenly, not all at once")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="N load processes of ours against one")
    parser.add_argument("--memory", action="store_true", help="of ours, per open stream")
    parser.add_argument("--capacity", type=int, nargs="*", metavar="STREAMS", help="the most streams that ours reads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all readings")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep there what the clients wrote; else it is deleted"
    )
    parser.add_argument("--server-core", type=int, default=1)
    parser.add_argument("--client-core", type=int, default=0)
    parser.add_argument("--realtime", action="store_true", help="clients, too, run before all else (a busy machine)")
    for name, neighbour in NEIGHBOURS.items():
        parser.add_argument(f"--{name}", default=neighbour.program, metavar="PROGRAM", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
