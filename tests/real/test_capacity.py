"""Real vLLM and real llama.cpp: what `harness capacity` answers agrees with a full grid of the same hour."""

from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import pytest

from harness.questions.capacity.decide import log_grid
from harness.questions.capacity.record import CapacityReport
from tests.real.conftest import Say
from tests.real.parts import harness, llamacpp, run, vllm, write_scenario
from tests.support.engines.paths import QWEN3_100M

LEVELS = log_grid(16)
KNEE_SHARE = 0.9  # of the highest throughput
NOISE = 0.1  # of a level of the grid, where the engine and the load share two cores
USER = {"user": "batch", "in_flight": 1, "output_tokens": 8}
WORK: dict[str, Any] = {
    "model": "qwen3-100m",
    "prompts": {"tokens": {"uniform": [20, 60]}},
    "warmup": {"requests": 8},
}


@pytest.mark.nightly  # half an hour for vLLM, ten minutes for llama.cpp, on a machine that does nothing else
@pytest.mark.alone
@pytest.mark.parametrize(
    ("server", "duration_s"),
    [(vllm(QWEN3_100M, max_num_seqs=6), 10), (llamacpp(parallel=4), 4)],
    ids=["vllm", "llamacpp"],
)
def test_the_answers_agree_with_a_full_grid(tmp_path: Path, server: dict[str, Any], duration_s: int, say: Say) -> None:
    """Against all levels, measured twice, in both directions: the capacity within a user, the knee within the noise."""
    work = WORK | {"servers": {"s": server}}
    loads = {f"u{level}": USER | {"users": level, "duration_s": duration_s} for level in LEVELS}
    grid = run(write_scenario(tmp_path, "grid", loads=loads, repeats=2, **work))
    rows = {int(row.load[1:]): row for row in grid.summary.rows}
    tok_s = {level: mean(rows[level].output_tok_s) for level in LEVELS}
    # One level alone is noise where the curve is flat: the median with its neighbours.
    smooth = {level: median(tok_s[near] for near in LEVELS if abs(near - level) <= 1) for level in LEVELS}
    enough = KNEE_SHARE * max(smooth.values())
    knee = min(level for level in LEVELS if smooth[level] >= enough)
    p90_s = {level: rows[level].pooled.e2e.p90 for level in LEVELS}
    say(f"grid: tok/s {tok_s}, E2E p90 {p90_s}, knee {knee}")
    known_s = {level: value_s for level, value_s in p90_s.items() if value_s is not None}  # few users: few requests
    bound_s = 1.15 * known_s[LEVELS[LEVELS.index(knee) + 2]]
    holds = max(level for level, value_s in known_s.items() if value_s <= bound_s)
    search = write_scenario(tmp_path, "search", loads={"l": USER | {"users": 4, "duration_s": 60}}, **work)
    options = ["--check", f"e2e_p90 <= {1000 * bound_s:.0f}ms", "--knee", "--max-users", "16", "--budget", "20m"]
    done = harness("capacity", search, *options, "--runs", tmp_path / "runs", "--json")
    (found,) = msgspec.json.decode(done.stdout, type=CapacityReport).servers
    say(f"bound {bound_s:.3f} s, grid holds {holds}: {msgspec.json.encode(found).decode()[:6000]}")
    assert found.slo is not None and found.slo.low is not None and found.slo.high is not None
    assert found.slo.low - 1 <= holds <= found.slo.high + 1
    assert found.knee is not None and found.knee.level and found.knee.low
    assert smooth[int(found.knee.level)] >= enough * (1 - NOISE)
    assert found.knee.low == 1 or smooth[int(found.knee.low) - 1] <= enough * (1 + NOISE)
