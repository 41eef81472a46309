"""Levels of entries by starts that follow each other."""

import math

import numpy as np
import pytest

from harness.numbers.start_levels import fit_levels


def test_levels_are_means_of_logarithms_and_a_line_is_no_difference() -> None:
    plain = fit_levels([(0, 1.0), (1, 2.0), (1, 2.0), (0, 1.0)])
    effect = plain.difference(1, 0)
    assert effect is not None and effect.ratio == pytest.approx(2.0) and effect.error == 0
    drifting = [(0, 1.0), (1, 2.0), (1, 2.0), (0, 1.0), (0, 1.0), (1, 2.0), (2, 2.0), (2, 2.0)]
    moved = [(entry, speed * math.exp(0.01 * place)) for place, (entry, speed) in enumerate(drifting)]
    fitted = fit_levels(moved)
    for entry, base, ratio in ((1, 0, 2.0), (2, 1, 1.0), (2, 0, 2.0)):
        effect = fitted.difference(entry, base)
        assert effect is not None and effect.ratio == pytest.approx(ratio), (entry, base)


def test_an_entry_with_one_start_has_the_scatter_of_all() -> None:
    starts = [(0, 1.00), (1, 1.0), (1, 1.02), (0, 1.01), (0, 0.99), (1, 0.98), (2, 1.0)]
    fitted = fit_levels(starts)
    one, three = (fitted.difference(entry, 0) for entry in (2, 1))
    assert one is not None and three is not None and one.error > three.error > 0
    level = fitted.level(2)
    assert level.low is not None and level.high is not None and level.low < level.value < level.high


def test_without_repeats_there_is_no_interval() -> None:
    fitted = fit_levels([(0, 1.0), (1, 2.0)])
    assert fitted.difference(1, 0) is None and fitted.level(1)[1:] == (None, None)
    assert fitted.level(1).value == pytest.approx(2.0)
    with pytest.raises(ValueError, match="no start"):
        fit_levels([])


def test_the_interval_covers_what_it_says() -> None:
    dice, inside, count = np.random.default_rng(3), 0, 400
    for _ in range(count):
        order = [0, 1, 1, 0, 0, 1, 2, 1, 2, 0]
        logs = [0.1 * entry + 0.002 * place + 0.02 * dice.normal() for place, entry in enumerate(order)]
        starts = [(entry, math.exp(log)) for entry, log in zip(order, logs, strict=True)]
        effect = fit_levels(starts).difference(2, 0)
        assert effect is not None
        low, high = effect.interval()
        inside += low <= math.exp(0.2) <= high
    assert 0.95 - 0.04 <= inside / count <= 0.95 + 0.04
