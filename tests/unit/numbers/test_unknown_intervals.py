"""An interval that is wider than a factor of 4 either way is not known; a bound that shows the least difference is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from harness.numbers.comparison import Verdict, known_bounds
from harness.numbers.stats import Effect, welch_effect
from harness.numbers.summarize import summarize
from harness.numbers.summary import Summary
from harness.questions.report.page import run_page
from harness.questions.tune.decide import decide
from harness.report.markdown import render
from harness.report.verdict_text import format_bounds, verdict_sentence
from tests.support.made_runs import scenario, write_made_run
from tests.support.wording import Wording

REGRESSION = "wall <= 1.1 * baseline"


def compared(folder: Path, base_s: Sequence[float], side_s: Sequence[float]) -> tuple[Summary, Verdict, str]:
    """A run of servers a and b whose repeats take these times, the verdict on b, and the report."""
    times = {"a": iter(base_s), "b": iter(side_s)}
    run = write_made_run(
        folder / "run",
        lambda cell: next(times[cell.server]),
        made_of=scenario(repeats=len(base_s), checks=[REGRESSION]),
    )
    summary = summarize(folder / "run")
    assert summary.comparison is not None
    (verdict,) = summary.comparison.verdicts
    return summary, verdict, render(run_page(summary, run))


def test_two_repeats_that_say_nothing_have_a_ratio_and_no_interval(tmp_path: Path, wording: Wording) -> None:
    summary, verdict, page = compared(tmp_path, [5.0, 20.0], [20.0, 5.1])
    assert (verdict.word, verdict.reason, verdict.low, verdict.high) == ("inconclusive", "interval_unknown", None, None)
    assert verdict.ratio == pytest.approx((5.0 * 20.0 / (20.0 * 5.1)) ** 0.5)
    assert (verdict.n, verdict.needed) == ((2, 2), 5)
    (check,) = summary.checks
    assert (check.status, check.low, check.high) == ("inconclusive", None, None)
    sentence = verdict_sentence(verdict)
    wording(sentence)
    assert "5" in sentence and "95 %" not in sentence
    assert "0.99×" in page
    wording(check.evidence[0].text)


def test_more_repeats_that_differ_as_much_are_not_asked_for_again(tmp_path: Path) -> None:
    _, verdict, _ = compared(tmp_path, [1.0, 90.0, 3.0, 50.0, 2.0, 40.0], [80.0, 1.1, 60.0, 2.0, 70.0, 3.0])
    assert (verdict.reason, verdict.needed) == ("interval_unknown", None)


def test_a_difference_far_beyond_the_margin_keeps_its_verdict_and_its_near_bound(
    tmp_path: Path, wording: Wording
) -> None:
    summary, verdict, _ = compared(tmp_path, [10.0, 10.1], [1000.0, 1400.0])
    assert (verdict.word, verdict.reason, summary.checks[0].status) == ("slower", None, "failed")
    sentence = verdict_sentence(verdict)
    assert "990" not in sentence
    wording(sentence)
    assert "990" not in summary.checks[0].evidence[0].text


@pytest.mark.parametrize(
    ("ratio", "low", "high", "known"),
    [
        (1.0, 0.26, 3.9, (0.26, 3.9)),
        (1.0, 0.2, 3.9, (None, 3.9)),
        (1.0, 1e-5, 1e5, (None, None)),
        (10.0, 2.0, 50.0, (2.0, None)),
        (0.1, 0.001, 0.9, (None, 0.9)),
        (2.0, None, 3.0, (None, 3.0)),
        (2.0, 1.9, None, (1.9, None)),
    ],
)
def test_bounds_that_say_something(
    ratio: float, low: float | None, high: float | None, known: tuple[float | None, float | None]
) -> None:
    assert known_bounds(ratio, low, high) == known


def test_an_interval_with_one_bound_is_shown_with_it() -> None:
    ends = [(1.0, 2.0), (1.0, None), (None, 2.0), (None, None)]
    assert [format_bounds(*each, lambda bound: f"{bound:g}x") for each in ends] == [
        "1x to 2x", "at least 1x", "at most 2x", "",
    ]  # fmt: skip


@pytest.mark.parametrize(("repeats", "spread"), [(2, 0.01), (2, 0.02), (2, 0.04), (3, 0.08), (5, 0.15)])
def test_repeats_of_healthy_machines_have_an_interval(repeats: int, spread: float) -> None:
    dice = np.random.default_rng(3)

    def effect() -> Effect:
        sides = np.exp(dice.normal(0, spread, (2, repeats))).tolist()
        found = welch_effect(*sides)
        assert found is not None
        return found

    assert all(None not in known_bounds(one.ratio, *one.interval()) for one in (effect() for _ in range(500)))


def test_a_proof_whose_interval_is_not_known_keeps_nothing() -> None:
    noisy = decide("output_tok_s", [5.0, 20.0], [({"a": 1}, [20.0, 4.9])])
    assert (noisy.verdict, noisy.verdicts[0].reason, noisy.needed) == ("inconclusive", "interval_unknown", 5)
    assert decide("output_tok_s", [10.0, 10.1], [({"a": 1}, [10.0, 10.05])]).verdict == "keep"
