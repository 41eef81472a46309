"""The read bandwidth of this machine: measured, and kept for later answers.

Decode reads, so a reduction that only reads is measured: a copy understates what decode can read.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from harness.base.files import UNDECODABLE, pretty_json, read_bytes, replace_file
from harness.machine.gpus import list_gpus, read_machine, read_meminfo, select_serving_gpus

BYTES_PER_CORE = 256 << 20  # more than any share of a cache
ROUNDS, MAX_S = 12, 10.0


class MeasuredBandwidth(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measurement, in the harness's cache folder."""

    machine: str  # GPUs, else the CPU
    gb_s: float  # 1e9 bytes a second
    measured_wall_s: float


def measure_cpu() -> float:
    """Return GB/s that all cores together read from memory: the best of several rounds."""
    cores = len(os.sched_getaffinity(0))
    available = read_meminfo(Path("/proc/meminfo")).get("MemAvailable", 8 * BYTES_PER_CORE)
    size = min(BYTES_PER_CORE, available // (4 * cores))
    blocks = [np.ones(size // 4, dtype=np.float32) for _ in range(cores)]
    best, began_s = 0.0, time.monotonic()
    with ThreadPoolExecutor(cores) as pool:  # numpy's reductions release the interpreter's lock
        for number in range(ROUNDS):
            reduce = (np.max, lambda block: np.dot(block, block))[number % 2]
            start_s = time.perf_counter()
            list(pool.map(reduce, blocks))
            best = max(best, cores * size / (time.perf_counter() - start_s) / 1e9)
            if time.monotonic() - began_s > MAX_S:
                break
    return best


def describe_machine(root: Path = Path("/")) -> str:
    """Return what a measurement belongs to: the GPUs that serve models, else the CPU."""
    cards = [str(card["target"]) for card in select_serving_gpus(list(list_gpus(root)))]
    return f"{len(cards)} x {cards[0]}" if cards else f"CPU {read_machine(root).cpu}"


def cache_file() -> Path:
    """Return the file of this machine's measurements: XDG_CACHE_HOME, else ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "amd-llm-load" / "bandwidth.json"


def store_measured(gb_s: float, root: Path = Path("/")) -> None:
    """Keep a measurement of this machine. Raises OSError."""
    measured = MeasuredBandwidth(machine=describe_machine(root), gb_s=gb_s, measured_wall_s=time.time())
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, pretty_json(msgspec.to_builtins(measured)))


def read_measured(root: Path = Path("/")) -> float | None:
    """Return GB/s as measured earlier on this machine; None without a measurement, or of other hardware."""
    if root != Path("/"):
        return None
    try:
        stored = msgspec.json.decode(read_bytes(cache_file()), type=MeasuredBandwidth)
    except (OSError, *UNDECODABLE):
        return None
    return stored.gb_s if stored.machine == describe_machine(root) and stored.gb_s > 0 else None
