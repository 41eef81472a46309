"""Seeded spaces of settings on the embedded engine in virtual time: 448 candidates, of which a quarter do not start.

`python -m tests.support.virtual_tune > tests/data/tune_spaces.json` measures their true results again: some minutes.
"""

import itertools
import json
import math
import random
from functools import cache
from typing import NamedTuple

from msgspec.structs import replace

from harness.base.files import ROOT
from harness.base.reason import Reason
from harness.questions.tune.decide import (
    Cause,
    Proposal,
    Setting,
    Trial,
    TuneAnswer,
    best_settings,
    decide,
    make_search,
    next_start,
    plan_proof,
    reference,
)
from harness.simulated.engine import EngineConfig, EngineMemory
from tests.support.virtual import VirtualWork, closed_loop

SPACES = 30
STORED = ROOT / "tests" / "data" / "tune_spaces.json"
REQUESTS_A_USER = 3
SEATS, BATCHED, CHUNKS, SHARES = (
    (1, 2, 4, 8, 16, 32, 64),
    (256, 512, 2048, 8192),
    (0, 64, 256, 1024),
    (0.6, 0.7, 0.8, 0.9),
)
SAFE = 0.8  # of SHARES


class Space(NamedTuple):
    """A machine and its work. A GiB of its memory is a token of KV cache."""

    seed: int
    settings: list[Setting]
    config: EngineConfig
    memory: EngineMemory
    work: VirtualWork
    users: int
    noise: float  # standard deviation of the logarithm of the result of one start
    drift: float  # of the logarithm of the machine's speed, from the first start to the 20th


def seeded_space(seed: int) -> Space:
    """The space of a seed. Of each three neighbouring seeds one has its best setting at the default or near it."""
    dice = random.Random(f"space {seed}")

    def log(low: float, high: float) -> float:
        return math.exp(dice.uniform(math.log(low), math.log(high)))

    prompt, output = int(log(40, 900)), int(log(20, 120))
    users = int(log(12, 48))
    base = log(0.005, 0.03)
    total = int((prompt + output) * users * log(0.4, 3.0) + 4096)
    seats, batched = dice.choice([(3, 1), (1, 1), (5, 2)] if seed % 3 else [(5, 2), (6, 2)])
    settings = [
        Setting(name="sequences", values=SEATS, default=SEATS[seats], gain=0.4, memory=1),
        Setting(name="batched_tokens", values=BATCHED, default=BATCHED[batched], gain=0.15, memory=1),
        Setting(name="chunk", values=CHUNKS, default=0, gain=0.1),
        Setting(name="memory", values=SHARES, default=0.7, gain=0.2, memory=1, cache=-1),
    ]
    config = EngineConfig(
        step_base_s=base,
        step_per_sequence_s=base / log(4, 100),
        prefill_per_token_s=log(2e-5, 2e-4),
        step_per_kv_token_s=log(1e-8, 1e-7),
        preemption_s=log(0.02, 0.5),
        jitter=0.01,
        max_model_len=2 * (prompt + output),
    )
    work = VirtualWork(
        prompt_tokens=(int(prompt * 0.5), int(prompt * 1.5)), output_tokens=(int(output * 0.5), int(output * 1.5))
    )
    memory = EngineMemory(
        total_gib=total, free_gib=SAFE * total, weights_gib=0, block_gib=config.block_size,
        batched_token_gib=total / 8192 * log(0.3, 0.9), sequence_gib=8,
    )  # fmt: skip
    return Space(seed, settings, config, memory, work, users, log(0.005, 0.02), dice.uniform(-0.05, 0.05))


def every(space: Space) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(setting.values)) for setting in space.settings)))


def start(space: Space, at: tuple[int, ...]) -> EngineConfig | Cause:
    """The engine of a candidate, or why it does not start."""
    seats, batched, chunk, share = (one.values[index] for one, index in zip(space.settings, at, strict=True))
    config = replace(
        space.config, max_num_seqs=seats, max_num_batched_tokens=batched, long_prefill_token_threshold=chunk
    )
    if space.memory.problem(share):
        return "memory"
    blocks = space.memory.blocks(share, config)
    config = replace(config, num_gpu_blocks=blocks)
    return "cache" if config.problem() else config


def measured(space: Space, at: tuple[int, ...]) -> float | None:
    """The true result in output tokens a second; None: the candidate does not start."""
    config = start(space, at)
    if not isinstance(config, EngineConfig):
        return None
    ended, tokens = 0.0, 0
    for request in closed_loop(
        config, space.users, space.work, requests=REQUESTS_A_USER * space.users, seed=space.seed
    ):
        ended, tokens = request.ended_s, tokens + request.output_tokens
    return tokens / ended


@cache
def truths() -> list[list[float | None]]:
    """The true results of the candidates of each space, in the order of `every`."""
    found: list[list[float | None]] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


class Tuned(NamedTuple):
    """A search with its proof."""

    space: Space
    trials: list[Trial]
    ended: Reason
    found: dict[str, object]  # the best settings of the search; {}: the default
    answer: TuneAnswer
    share: float  # the true result of `found` over the best of all
    possible: float  # the best of all over that of the reference
    recommended: float | None  # the true result of what the proof recommends over the reference's; None: "keep"


def tune(seed: int, draw: int = 0, *, known: bool = True) -> Tuned:
    """Search and prove in virtual time, without findings. `known`: whether the safe share of the memory is known."""
    space = seeded_space(seed)
    truth = dict(zip(every(space), truths()[seed], strict=True))
    dice = random.Random(f"tune {seed} {draw}")
    search = make_search(space.settings, lambda changed: not known or changed.get("memory", 0.7) <= SAFE)
    trials: list[Trial] = []

    def result(settings: dict[str, object]) -> float | None:
        value = truth[search.at(settings)]
        return None if value is None else value * math.exp(dice.gauss(0, space.noise) + space.drift * len(trials) / 20)

    while isinstance(proposal := next_start(search, trials), Proposal):
        cause = start(space, search.at(proposal.settings))
        failed = None if isinstance(cause, EngineConfig) else cause
        trials.append(Trial(settings=proposal.settings, value=result(proposal.settings), cause=failed, took_s=60))
    base = reference(trials) or {}
    plan = plan_proof(search, trials, math.inf)
    best = [] if plan is None else plan.sides
    sides = [base, *best]
    values: list[list[float]] = [[] for _ in sides]
    answer, blocks = TuneAnswer(verdict="inconclusive"), 0 if plan is None else plan.blocks
    for _ in range(2):  # an inconclusive proof goes on once
        for block in range(len(values[0]), blocks):
            for place in range(len(sides)) if block % 2 == 0 else reversed(range(len(sides))):
                values[place].append(result(sides[place]) or 0.0)
        answer = decide("output_tok_s", values[0], list(zip(best, values[1:], strict=True)))
        blocks = answer.needed or 0
    top = max(value for value in truth.values() if value is not None)
    found = next(iter(best_settings(search, trials)), base)
    recommended = (truth[search.at(answer.settings)] or 0) / (truth[search.at(base)] or 1)
    return Tuned(
        space, trials, proposal, found, answer, (truth[search.at(found)] or 0) / top,
        top / (truth[search.at(base)] or 1), recommended if answer.verdict == "set" else None,
    )  # fmt: skip


def main() -> None:
    stored = []
    for seed in range(SPACES):
        space = seeded_space(seed)
        stored.append([None if (value := measured(space, at)) is None else round(value, 4) for at in every(space)])
    print(json.dumps(stored, separators=(",", ":")))


if __name__ == "__main__":
    main()
