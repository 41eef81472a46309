"""The search of `harness bisect` in virtual time: what docs/method.md says of its errors and of its starts."""

import math

import pytest

from harness.questions.bisect.decide import max_starts
from tests.support.nightly import draws, room
from tests.support.virtual_bisect import Figures, Story, figures_of

SIZES = (3, 8, 20, 64)
COUNT = draws(400)


def wrong(figures: Figures) -> float:
    return figures.shares["wrong"] + figures.shares["wrong range"]


def usual_starts(size: int) -> float:
    return 4 * math.log2(size) + 6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("drift", ["none", "line", "jump", "wave"])
def test_a_change_of_10_percent_is_found_at_1_percent_noise(size: int, drift: str) -> None:
    figures = figures_of(Story(size, drift=drift), COUNT)  # type: ignore[arg-type]
    assert figures.shares["right"] >= 0.99 - room(0.99, COUNT)
    assert figures.within(usual_starts(size)) >= 0.95 - room(0.95, COUNT)


@pytest.mark.parametrize("size", SIZES)
def test_wide_tails_and_entries_that_do_not_start_cost_no_answer(size: int) -> None:
    tails = figures_of(Story(size, tail="t3"), COUNT)
    assert tails.shares["right"] >= 0.97 - room(0.97, COUNT)
    if size > 4:
        failing = figures_of(Story(size, failing=2), COUNT)
        assert failing.shares["right"] >= 0.99 - room(0.99, COUNT)
        assert failing.within(usual_starts(size)) >= 0.95 - room(0.95, COUNT)


@pytest.mark.parametrize("size", SIZES)
def test_one_of_two_changes_is_found(size: int) -> None:
    figures = figures_of(Story(size, steps=(0.04, 0.06)), COUNT)
    assert figures.shares["right"] >= 0.97 - room(0.97, COUNT)


@pytest.mark.parametrize("size", SIZES)
def test_at_5_percent_noise_few_answers_are_wrong_and_the_starts_are_bounded(size: int) -> None:
    for story in (Story(size, noise=0.05), Story(size, noise=0.05, tail="t3"), Story(size, noise=0.05, drift="line")):
        figures = figures_of(story, COUNT)
        assert wrong(figures) <= 0.05 + room(0.05, COUNT)
        assert max(figures.starts) <= max_starts(size) <= 12 * math.log2(size) + 12
        assert figures.shares["right"] + figures.shares["range"] >= 0.9 - room(0.9, COUNT)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_without_a_change_none_is_found(size: int, noise: float) -> None:
    figures = figures_of(Story(size, noise=noise, steps=()), COUNT)
    assert wrong(figures) <= (0.001 if noise == 0.01 else 0.05) + room(0.05, COUNT) * (noise > 0.01)


def test_a_noisier_side_does_not_mislead() -> None:
    figures = figures_of(Story(20, bad_noise=0.03), COUNT)
    assert figures.shares["right"] >= 0.97 - room(0.97, COUNT) and wrong(figures) <= 0.02 + room(0.02, COUNT)
