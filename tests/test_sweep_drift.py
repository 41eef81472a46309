"""Drift within the server starts of a sweep: found where it is, and not called where it is not."""

import math
import random
from collections import deque
from pathlib import Path

import msgspec
import pytest

from harness.analysis.summarize import summarize
from harness.judge.verdicts import drift, is_drift
from harness.reasons import sentence
from harness.rundir.manifest import read_run
from harness.simulated.engine import PRESETS, EngineConfig
from tests.command import harness, write
from tests.nightly import draws, room
from tests.virtual import VirtualWork, closed_loop


def found(pairs: list[tuple[float, float]]) -> bool:
    seen = drift(pairs)
    assert seen is not None
    return is_drift(seen)


@pytest.mark.parametrize("starts", [1, 2, 3, 5, 15])
@pytest.mark.parametrize("spread", [0.005, 0.015])
def test_ten_percent_are_found_and_nothing_is_not(starts: int, spread: float) -> None:
    dice, trials = random.Random(f"{starts} {spread}"), draws(4000)

    def share(factor: float) -> float:
        def speed() -> float:
            return math.exp(dice.gauss(0, spread))

        return sum(found([(speed(), factor * speed()) for _ in range(starts)]) for _ in range(trials)) / trials

    assert share(0.9) >= 0.95 - room(0.95, trials)
    assert share(1.1) >= 0.95 - room(0.95, trials)
    assert share(1.0) <= 0.05 + room(0.05, trials)


@pytest.mark.parametrize("starts", [1, 4])
def test_drift_of_the_embedded_engine(starts: int) -> None:
    """In virtual time: its steps have a jitter of 5 %, and the server is 10 % slower at the end of each start."""
    work = VirtualWork(prompt_tokens=(200, 200), output_tokens=(40, 40))  # as in a run: the same requests
    config = msgspec.structs.replace(PRESETS["strix-halo-qwen3.5-0.8b"], jitter=0.05)

    def speed(config: EngineConfig, seed: int) -> float:
        (last,) = deque(closed_loop(config, 4, work, requests=60, seed=seed), maxlen=1)
        return 1 / last.ended_s

    trials = draws(200)
    slower = msgspec.structs.replace(config, slowdown=1.1 * config.slowdown)
    flagged = {"same": 0, "slower": 0}
    for trial in range(trials):
        for name, later in (("same", config), ("slower", slower)):
            seeds = [2 * (trial * starts + start) for start in range(starts)]
            pairs = [(speed(config, seed), speed(later, seed + 1)) for seed in seeds]
            flagged[name] += found(pairs)
    assert flagged["slower"] >= 0.95 * trials - 2
    assert flagged["same"] <= 0.05 * trials + 2


def test_one_start_has_an_interval_and_none_has_nothing() -> None:
    assert drift([]) is None
    seen = drift([(1.0, 0.9)])
    assert seen is not None
    low, high = seen.interval()
    assert (round(low, 3), round(high, 3)) == (0.849, 0.955)


def test_a_run_reports_it(tmp_path: Path) -> None:
    load = {"user": "batch", "requests": 8, "output_tokens": 4, "vary": {"batch_size": [1, 2]}}
    path = write(tmp_path, loads={"l": load}, repeats=2)
    done = harness("run", path.name, "--runs", "runs", cwd=tmp_path)
    assert done.code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    run, summary = read_run(folder), summarize(folder)
    again = [cell for cell in run.cells if cell.again is not None]
    assert [cell.id for cell in again] == ["r1-one-l-batch-size-1_again", "r2-one-l-batch-size-2_again"]
    assert [row.cells for row in summary.rows] == [
        ["r1-one-l-batch-size-1", "r2-one-l-batch-size-1"],
        ["r1-one-l-batch-size-2", "r2-one-l-batch-size-2"],
    ], "repeated cells are in no row"
    (note,) = [note for note in summary.notes if note.code in ("drift", "no_drift")]  # a busy machine may drift
    assert note.values["starts"] == 2
    assert "when it was repeated at its end" in sentence(note)
