"""How often start times are called alike or different, of equal servers and of one a quarter faster or slower."""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from harness.numbers.start_times import ALIKE, starts_are_alike
from harness.numbers.stats import Effect, welch_effect
from tests.support.nightly import NIGHTLY

DRAWS = 20_000 if NIGHTLY else 2_000


def share(rule: Callable[[Effect], bool], starts: int, spread: float, ratio: float) -> float:
    """The share of pairs of servers, of which one takes `ratio` times as long, that a rule holds for."""
    dice = random.Random(f"{starts} {spread} {ratio}")
    held = 0
    for _ in range(DRAWS):
        side, base = ([factor * math.exp(dice.gauss(0, spread)) for _ in range(starts)] for factor in (ratio, 1.0))
        effect = welch_effect(side, base)
        assert effect is not None
        held += rule(effect)
    return held / DRAWS


def are_different(effect: Effect) -> bool:
    low, high = effect.interval()
    return not low <= 1 <= high


share_alike, share_different = partial(share, starts_are_alike), partial(share, are_different)


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("starts", [2, 3, 5])
def test_what_takes_a_quarter_longer_is_seldom_called_alike(starts: int, spread: float) -> None:
    assert share_alike(starts, spread, ALIKE) <= 0.035


def test_equal_servers_are_called_alike_where_starts_vary_little() -> None:
    assert share_alike(3, 0.05, 1.0) > 0.8
    assert share_alike(5, 0.1, 1.0) > 0.6


def test_five_starts_show_a_quarter_less_time_and_seldom_a_difference_of_equal_servers() -> None:
    """The number of starts that the answer advises."""
    assert share_different(5, 0.1, 0.75) > 0.95
    assert max(share_different(starts, 0.1, 1.0) for starts in (2, 3, 5)) < 0.06


if __name__ == "__main__":
    for starts in (2, 3, 5):
        print(
            starts,
            [[f"{share_alike(starts, spread, r):.3f}" for r in (1.0, 1.1, ALIKE)] for spread in (0.01, 0.05, 0.1)],
        )
        print(
            "different",
            [[f"{share_different(starts, spread, r):.3f}" for r in (1.0, 0.75)] for spread in (0.01, 0.05, 0.1)],
        )
