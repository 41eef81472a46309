"""How many requests after a start are slower than later ones, and how often the rule says so of a healthy server."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from harness.numbers.first_requests import MIN_REQUESTS, count_slow, first_requests
from harness.records.columns import rows_of
from tests.support.made_runs import MONOTONIC_S, request
from tests.support.nightly import NIGHTLY

DRAWS = 20_000 if NIGHTLY else 2_000


def counted(*e2e_s: float) -> int | None:
    return count_slow(np.array(e2e_s))


def test_the_slow_ones_at_the_start_are_counted() -> None:
    later = [1.0] * 20
    assert counted(*later) == 0
    assert counted(9.0, 5.0, 2.0, *later) == 3
    assert counted(9.0, 1.0, 5.0, *later) == 3, "half of them are slow: another shape was compiled"
    assert counted(9.0, 1.0, 1.0, 5.0, *later) == 4
    assert counted(9.0, 1.0, 1.0, 1.0, 5.0, *later) == 1, "a slow request far behind is another matter"
    assert counted(1.4, 1.4, *later) == 0, "not 1.5 times the usual time"
    assert counted(*[1.0] * (MIN_REQUESTS - 1)) is None
    assert counted() is None


def test_the_extra_time_is_above_the_median_of_later_ones() -> None:
    made = []
    for number in range(20):
        e2e_s = (5.0 if number == 0 else 3.0 if number == 1 else 1.0) + 0.001 * (number % 3)
        times = {"sent_s": MONOTONIC_S + 10 * number, "ended_s": e2e_s, "chunks_s": [0.5, e2e_s]}
        made.append(request(id=str(number), phase="warmup" if number < 4 else "measured", index=number, **times))
    first = first_requests(rows_of(made))
    assert first is not None and first.requests == 2
    assert first.usual_s == pytest.approx(1.001)
    assert first.extra_s == pytest.approx(5.0 + 3.001 - 2 * 1.001)
    assert first.until_s == pytest.approx(13.001)
    assert first_requests(rows_of(made[:10])) is None
    failed = [request(id=f"f{number}", error="http", status=500, finish=None) for number in range(20)]
    assert first_requests(rows_of(failed)) is None


@pytest.mark.parametrize(
    ("name", "draw", "most"),
    [
        ("spread of 5 %", lambda dice: math.exp(dice.gauss(0, 0.05)), 0.001),
        ("spread of 30 %", lambda dice: math.exp(dice.gauss(0, 0.3)), 0.06),
        ("exponential", lambda dice: dice.expovariate(1), 0.12),
        ("each 20th is 3 times as slow", lambda dice: 3.0 if dice.random() < 0.05 else 1 + dice.gauss(0, 0.02), 0.16),
    ],
)
@pytest.mark.parametrize("requests", [20, 32, 100])
def test_a_healthy_server_is_seldom_called_slow_at_first(
    name: str, draw: Callable[[random.Random], float], most: float, requests: int
) -> None:
    dice = random.Random(f"{name}{requests}")
    alarms = sum(bool(counted(*(draw(dice) for _ in range(requests)))) for _ in range(DRAWS))
    print(f"{name}, {requests} requests: {alarms / DRAWS:.2%}")
    assert alarms / DRAWS <= most


def test_a_compiling_start_is_found() -> None:
    """Six requests of 32 that take 3 times as long, with a spread of 20 %."""
    dice, found = random.Random(1), 0
    for _ in range(DRAWS):
        e2e_s = [(3.0 if number < 6 else 1.0) * math.exp(dice.gauss(0, 0.2)) for number in range(32)]
        found += counted(*e2e_s) in (4, 5, 6, 7)
    assert found / DRAWS > 0.97
