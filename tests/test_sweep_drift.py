"""Drift within the server starts of a sweep: found where it is, and not called where it is not."""

import math
import random
from pathlib import Path

import pytest

from harness.analysis.summarize import summarize
from harness.judge.verdicts import estimate_drift, is_drift
from harness.reasons import sentence
from harness.rundir.manifest import read_run
from tests.command import harness, write
from tests.nightly import draws, room


def found(pairs: list[tuple[float, float]]) -> bool:
    seen = estimate_drift(pairs)
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


def test_one_start_has_an_interval_and_none_has_nothing() -> None:
    assert estimate_drift([]) is None
    seen = estimate_drift([(1.0, 0.9)])
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
