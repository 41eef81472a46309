"""From which level on one server is better: the answers, and how often the interval covers."""

import math
import random

import pytest

from harness.capacity.result import find_crossing
from tests.nightly import NIGHTLY

LEVELS = (1, 2, 4, 8, 16, 32, 64)


def runs(slope: float, factor: float, spread: float, seed: int, repeats: int = 5) -> dict[int, list[float]]:
    """Throughput factor * level ** slope at each level, with a log-normal spread of the runs."""
    dice = random.Random(seed)
    return {
        level: [factor * level**slope * math.exp(dice.gauss(0, spread)) for _ in range(repeats)] for level in LEVELS
    }


def test_the_crossing_is_where_the_lines_cross() -> None:
    flat, steep = runs(0.5, 30, 0.001, 1), runs(0.9, 10, 0.001, 2)
    answer, turned = find_crossing(flat, steep), find_crossing(steep, flat)
    assert (answer.kind, turned.kind) == ("from", "until")
    assert answer.level == pytest.approx(3 ** (1 / 0.4), rel=0.02) == turned.level
    assert answer.low is not None and answer.high is not None and answer.level is not None
    assert answer.low < answer.level < answer.high


def test_always_never_and_cannot_tell_are_answers() -> None:
    low, high = runs(0.5, 10, 0.02, 1), runs(0.5, 20, 0.02, 2)
    assert (find_crossing(low, high).kind, find_crossing(high, low).kind) == ("always", "never")
    assert find_crossing(low, runs(0.5, 10, 0.02, 3)).kind == "cannot_tell"
    assert find_crossing({1: [1.0, 2.0]}, {1: [3.0, 4.0]}).kind == "cannot_tell"
    assert find_crossing({1: [1.0], 2: [1.0]}, {1: [2.0], 2: [2.0]}).kind == "cannot_tell"
    assert find_crossing({}, {}).kind == "cannot_tell"


def test_only_levels_of_both_count() -> None:
    base, side = runs(0.5, 10, 0.02, 1), runs(0.5, 20, 0.02, 2)
    assert find_crossing(base, {**side, 100: [1.0]}).levels == list(LEVELS)


def test_the_interval_covers_the_crossing() -> None:
    draws = 400 if NIGHTLY else 80
    answers = [find_crossing(runs(0.5, 30, 0.05, 2 * i), runs(0.9, 10, 0.05, 2 * i + 1)) for i in range(draws)]
    known = [a for a in answers if a.kind == "from" and a.low is not None and a.high is not None]
    truth = 3 ** (1 / 0.4)
    assert len(known) >= 0.95 * draws
    covered = sum(a.low <= truth <= a.high for a in known if a.low is not None and a.high is not None) / len(known)
    assert 0.92 - 0.04 * (not NIGHTLY) <= covered <= 0.99 + 0.01 * (not NIGHTLY)


def test_equal_servers_are_seldom_called_different() -> None:
    draws = 400 if NIGHTLY else 80
    kinds = [find_crossing(runs(0.5, 10, 0.05, 2 * i), runs(0.5, 10, 0.05, 2 * i + 1)).kind for i in range(draws)]
    assert sum(kind != "cannot_tell" for kind in kinds) <= (0.05 + 0.04 * (not NIGHTLY)) * draws
