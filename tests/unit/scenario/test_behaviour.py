"""Random decisions of users follow from the seed and the request's index alone."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from harness.scenario import Load, Prompts
from harness.scenario.behaviour import (
    Abandon,
    Pause,
    abandon_of,
    chance,
    max_pause_s,
    pause_s,
)
from harness.scenario.contradictions import contradictions


@pytest.mark.parametrize(
    ("pause", "mean", "median"),
    [
        (Pause(mean_s=3.0, distribution="fixed"), 3.0, 3.0),
        (Pause(mean_s=3.0, distribution="exponential", max_s=1000.0), 3.0, 2.08),
        (Pause(mean_s=3.0, sigma=0.5, max_s=1000.0), 3.0, 2.65),
        ([1.0, 5.0], 3.0, 3.0),
    ],
)
def test_pauses_have_the_stated_distribution(pause: Pause | list[float], mean: float, median: float) -> None:
    drawn = [pause_s(pause, 7, "think", index) for index in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert statistics.median(drawn) == pytest.approx(median, rel=0.03)
    assert max(drawn) <= max_pause_s(pause)
    assert drawn[:10] == [pause_s(pause, 7, "think", index) for index in range(10)]
    assert pause_s(pause, 8, "think", 0) != drawn[0] or drawn[0] == 3.0


def test_a_long_pause_is_cut() -> None:
    assert max(pause_s(Pause(mean_s=1.0, sigma=2.0), 1, "x", index) for index in range(5000)) == 10.0
    assert max(pause_s(Pause(mean_s=1.0, max_s=1.5), 1, "x", index) for index in range(500)) == 1.5
    assert pause_s(Pause(mean_s=3.0, distribution="fixed", max_s=1.5), 1, "x", 0) == 1.5
    assert pause_s(Pause(mean_s=0), 1, "x", 0) == 0.0
    assert max_pause_s(Pause(mean_s=3.0, distribution="fixed", max_s=100.0)) == 3.0
    assert max_pause_s(None) == 0.0


def test_the_share_of_users_that_leave_and_the_numbers_of_all_versions() -> None:
    abandon = Abandon(share=0.05, after_s=2.0)
    left = [index for index in range(20_000) if abandon_of(abandon, 1, index)]
    assert len(left) / 20_000 == pytest.approx(0.05, rel=0.1)
    assert [round(chance(42, "abandon", index), 6) for index in range(3)] == [0.773521, 0.491069, 0.893318]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"think_s": [5.0, 1.0]}, ".think_s"),
        ({"think_s": [1.0, 5.0], "think": Pause(mean_s=1)}, ".think_s"),
        ({"abandon": Abandon(share=0.1)}, ".abandon"),
        ({"abandon": Abandon(share=0.1, after_s=1, after_tokens=1)}, ".abandon"),
    ],
)
def test_invalid_behaviour(given: dict[str, Any], key: str) -> None:
    (problem,) = contradictions(Load(user="chat", requests=1, **given), Path(), Prompts())
    assert problem.path == key
