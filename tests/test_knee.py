"""Where more concurrency stops paying, by its rule."""

import pytest

from harness.report.charts.knee import in_words, knee_of


@pytest.mark.parametrize(
    ("points", "at", "falls_at", "said"),
    [
        ([(1, 70), (5, 141), (10, 30)], 5, 10, "knee at 5 at once, the best; falls from 10 at once on"),
        ([(10, 100), (1, 50), (5, 96)], 5, None, "knee at 5 at once, 96\u00a0% of the best; more does not help"),
        ([(1, 50), (5, 94), (10, 100)], 10, None, "no knee up to 10 at once: it still rises there"),
        ([(1, 99), (5, 100), (9, 94)], 1, 9, "knee at 1 at once, 99\u00a0% of the best; falls from 9 at once on"),
        ([(1, 50), (5, 100), (5, 20)], 5, None, "no knee up to 5 at once: it still rises there"),
    ],
)  # fmt: skip
def test_the_rule(points: list[tuple[int, float]], at: int, falls_at: int | None, said: str) -> None:
    knee = knee_of(points)
    assert knee is not None
    assert (knee.at, knee.falls_at, in_words(knee)) == (at, falls_at, said)


@pytest.mark.parametrize("points", [[], [(5, 100.0)], [(5, 100.0), (5, 90.0)], [(1, 0.0), (5, 0.0)]])
def test_no_curve_has_no_knee(points: list[tuple[int, float]]) -> None:
    assert knee_of(points) is None
