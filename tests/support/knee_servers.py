"""Seeded servers of the embedded engine with a known knee of throughput over concurrency, measured in virtual time.

`python -m tests.support.knee_servers > tests/data/knee_servers.jsonl` measures the truth again: about ten minutes.
"""

import math
import random
import sys
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np

from harness.base.files import ROOT
from harness.numbers.peak_curve import KNEE_SHARE, fit_unimodal
from harness.questions.capacity.blocks import ProbeBlock
from harness.questions.capacity.knee import (
    GRID_STEP,
    MIN_KNEE_BLOCKS,
    decide_throughput,
    estimate_throughput,
    knee_answer,
    make_knee_probe,
    next_knee_level,
)
from harness.questions.capacity.level import Probe
from harness.questions.capacity.record import CapacityAnswer
from harness.simulated.engine import EngineConfig
from tests.support.virtual import VirtualRequest, VirtualWork, closed_loop

SERVERS = 200
STORED = ROOT / "tests" / "data" / "knee_servers.jsonl"
MAX_LEVEL = 256
BLOCK_ANSWERS = 2.0  # a block is so many mean answers long


# Of each 20 servers, those up to this place.
KINDS = ((4, "cliff"), (8, "falling"), (11, "none"), (16, "corner"), (20, "smooth"))


class KneeServer(msgspec.Struct, frozen=True):
    kind: str
    config: EngineConfig
    work: VirtualWork


def knee_server(seed: int) -> KneeServer:
    dice = random.Random(f"server {seed}")
    place = seed % 20
    kind = next(kind for end, kind in KINDS if place < end)

    def log_uniform(low: float, high: float) -> float:
        return math.exp(dice.uniform(math.log(low), math.log(high)))

    prompt, output = dice.randint(20, 120), dice.randint(20, 60)
    work = VirtualWork(prompt_tokens=(prompt // 2, prompt * 3 // 2), output_tokens=(output // 2, output * 3 // 2))
    base = log_uniform(0.004, 0.04)
    bend = log_uniform(2, 30) if kind == "smooth" else log_uniform(20, 200)
    if kind == "none":
        bend = log_uniform(400, 2000)
    corner = log_uniform(4, 90)
    prefill = base / bend * log_uniform(0.005, 0.05)
    config = EngineConfig(
        step_base_s=base,
        step_per_sequence_s=base / bend,
        prefill_per_token_s=prefill if kind != "none" else prefill / 10,
        step_per_kv_token_s=base / bend / 2000,
        jitter=dice.uniform(0.01, 0.1),
        seed=seed,
        max_num_seqs=max(2, round(corner)) if kind == "corner" else 512,
        max_model_len=512,
        num_gpu_blocks=100_000,
        enable_prefix_caching=False,
    )
    if kind in ("cliff", "falling"):
        tokens = (prompt + output) * corner
        config = msgspec.structs.replace(
            config,
            num_gpu_blocks=max(math.ceil(tokens / 16), 40),
            long_prefill_token_threshold=16,
            preemption_s=base * (log_uniform(5, 30) if kind == "cliff" else log_uniform(0.5, 2)),
        )
    return KneeServer(kind, config, work)


def blocks_of_time(requests: Iterator[VirtualRequest], users: int, warm_up: int = 2) -> Iterator[ProbeBlock]:
    """Output tokens per block of time, without the first `warm_up` answers of each user.

    Tokens of a request leave evenly between its first and its last. A block is known when all requests that were under
    way at its end have ended: with users who do not think there is always one of each.
    """
    ended: list[VirtualRequest] = []
    for request in requests:
        ended.append(request)
        if len(ended) >= warm_up * users + 1:
            break
    start = ended[-1].ended_s
    length = BLOCK_ANSWERS * sum(r.e2e_s for r in ended) / len(ended)
    while True:
        end = start + length
        open_ = users - sum(1 for r in ended if r.sent_s <= end < r.ended_s)
        while open_ > 0:
            request = next(requests)
            ended.append(request)
            open_ -= request.sent_s <= end < request.ended_s
        yield ProbeBlock(seconds=length, output_tokens=sum(_tokens_within(r, start, end) for r in ended))
        ended = [r for r in ended if r.ended_s > end]
        start = end


def _tokens_within(request: VirtualRequest, start: float, end: float) -> float:
    first, last = request.first_token_s, request.ended_s
    one = 1.0 * (start <= first < end)
    if last <= first:
        return one
    return one + (request.output_tokens - 1) * max(0.0, min(end, last) - max(start, first)) / (last - first)


def measure(server: KneeServer, level: int, seed: int) -> Iterator[ProbeBlock]:
    return blocks_of_time(closed_loop(server.config, level, server.work, seed=seed), level)


def searched(server: KneeServer, seed: int) -> tuple[CapacityAnswer, float]:
    """The whole search: its answer and the measured seconds. A level that is visited again gets other requests."""
    probes: list[Probe] = []
    while (step := next_knee_level(probes, MAX_LEVEL, seed)) is not None:
        probe = make_knee_probe(*step, probes)
        blocks = measure(server, probe.level, seed * 1000 + len(probes) + 1)
        while probe.state == "open":
            probe.add(next(blocks))
        probes.append(probe)
    answer = knee_answer(probes, MAX_LEVEL, seed)
    assert answer is not None
    return answer, sum(probe.seconds for probe in probes)


class Truth(msgspec.Struct, frozen=True):
    """What long measurements say of a server; `level` is None without a knee in range."""

    level: int | None
    last_share: float  # throughput of MAX_LEVEL by the peak
    grid_s: float  # seconds that every level of the grid takes with the probe of the search


def grid() -> list[int]:
    """All levels of the grid: 1 to MAX_LEVEL, GRID_STEP apart."""
    steps = round(math.log(MAX_LEVEL) / math.log(GRID_STEP))
    return sorted({round(GRID_STEP**i) for i in range(steps + 1)})


def truth(server: KneeServer, precision: float = 0.005, max_blocks: int = 60) -> Truth:
    """The grid measured by the probe of the search, longer where it is near the peak, then the levels in between."""
    streams: dict[int, Iterator[ProbeBlock]] = {}
    blocks: dict[int, list[ProbeBlock]] = {}

    def rate(level: int) -> float:
        if level not in streams:
            streams[level] = measure(server, level, -1)
            blocks[level] = [next(streams[level]) for _ in range(MIN_KNEE_BLOCKS)]
        return estimate_throughput(blocks[level]).tok_s

    def long(level: int, finer: int = 1) -> float:
        rate(level)
        while (
            estimate_throughput(blocks[level]).half_width > precision / finer
            and len(blocks[level]) < max_blocks * finer
        ):
            blocks[level].append(next(streams[level]))
        return rate(level)

    levels, grid_s, best = grid(), 0.0, 0.0
    for level in levels:
        rate(level)
        probe = Probe(level, decide=partial(decide_throughput, best=best), purpose="knee")
        for block in blocks[level]:
            probe.add(block)
        while probe.state == "open":
            blocks[level].append(next(streams[level]))
            probe.add(blocks[level][-1])
        grid_s += probe.seconds
        best = max(best, rate(level))
    for level in levels:
        if rate(level) > 0.85 * best:
            long(level)
    fit = _fitted(blocks)
    top = max(fit, key=lambda level: fit[level])
    above = [level for level in levels if level > top and fit[level] < 0.97 * fit[top]][:1]
    if above:  # the peak may be higher between two levels
        below = max([level for level in levels if level < top], default=top)
        for level in range(below, above[0], max(1, top // 40)):
            if rate(level) > 0.97 * fit[top]:
                long(level)
    peak = max(_fitted(blocks).values())
    low, high = 0, next(level for level in levels if long(level, 2) >= KNEE_SHARE * peak)
    low = max([level for level in levels if level < high], default=0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if long(middle, 2) >= KNEE_SHARE * peak else (middle, high)
    return Truth(high if high <= MAX_LEVEL / 2 else None, rate(MAX_LEVEL) / peak, grid_s)


def _fitted(blocks: dict[int, list[ProbeBlock]]) -> dict[int, float]:
    levels = sorted(blocks)
    rates = [estimate_throughput(blocks[level]) for level in levels]
    fit = fit_unimodal(
        np.array([rate.tok_s for rate in rates]), np.array([(rate.error * rate.tok_s) ** -2 for rate in rates])
    )
    return dict(zip(levels, fit.tolist(), strict=True))


def truths() -> list[Truth]:
    """The stored truth of all servers."""
    return [msgspec.json.decode(line, type=Truth) for line in STORED.read_bytes().splitlines()]


if __name__ == "__main__":
    for number in range(SERVERS):
        sys.stdout.buffer.write(msgspec.json.encode(truth(knee_server(number))) + b"\n")
        sys.stdout.flush()
