"""Seeded servers of the embedded engine for proofs in virtual time: with and without a knee, a cliff, a fall."""

import random
from typing import NamedTuple

from harness.simulated.engine import EngineConfig
from tests.virtual import VirtualWork

MAX_LEVEL = 256


class SeededServer(NamedTuple):
    """`kind`: `cliff` and `fall` run out of KV cache, `flat` has no knee up to 256 users, `seats` saturates at
    `max_num_seqs`, `slope` by the cost of each sequence."""

    seed: int
    kind: str
    config: EngineConfig
    work: VirtualWork


def seeded_server(seed: int) -> SeededServer:
    """The server of a seed. Of each 20 neighbouring seeds: 4 with a cliff, 4 that fall, 3 flat, 5 seats, 4 slope."""
    dice = random.Random(f"server {seed}")
    kinds = ["cliff"] * 4 + ["fall"] * 4 + ["flat"] * 3 + ["seats"] * 5 + ["slope"] * 4
    random.Random(seed // 20).shuffle(kinds)
    kind = kinds[seed % 20]
    prompt, output = _log(dice, 40, 600), _log(dice, 25, 120)
    base = _log(dice, 0.005, 0.03)
    think = dice.choice([0.0, 0.0, 0.0, output * base * _log(dice, 0.3, 2)])
    work = VirtualWork(
        prompt_tokens=(int(prompt * 0.5), int(prompt * 1.5)),
        output_tokens=(int(output * 0.5), int(output * 1.5)),
        think_s=think,
    )
    slope = base / _log(dice, 20, 200)
    seats, blocks, lump, chunk, prefill = 512, 65536, 0.0, 0, _log(dice, 5e-6, 2e-5)
    each = (prompt + output) / 16 + 1  # blocks of a mean request
    if kind == "flat":
        slope, prefill = base / _log(dice, 1500, 5000), 1e-7
    elif kind == "seats":
        seats = int(_log(dice, 3, 150))
    elif kind == "slope":
        slope = base / _log(dice, 2, 60)
    else:
        fit = _log(dice, 4, 100)  # so many mean requests fit into the cache
        blocks, chunk = int(max(fit * each, 2.5 * each)), 128
        prefill = _log(dice, 4e-5, 2e-4)
        slope = base / _log(dice, 20, 100)
        lump = _log(dice, 0.1, 0.5) if kind == "cliff" else base * _log(dice, 2, 8)
    config = EngineConfig(
        step_base_s=base,
        step_per_sequence_s=slope,
        prefill_per_token_s=prefill,
        step_per_kv_token_s=_log(dice, 1e-9, 1e-8) if kind == "flat" else _log(dice, 1e-8, 1e-7),
        preemption_s=lump,
        jitter=_log(dice, 0.005, 0.05),
        max_num_seqs=seats,
        long_prefill_token_threshold=chunk,
        max_model_len=int(1.5 * prompt) + int(1.5 * output),
        num_gpu_blocks=blocks,
        enable_prefix_caching=False,
    )
    return SeededServer(seed, kind, config, work)


def _log(dice: random.Random, low: float, high: float) -> float:
    """Log-uniform between low and high."""
    return float(low * (high / low) ** dice.random())
