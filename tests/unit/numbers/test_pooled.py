"""The test that pools the requests of all runs, as load generators commonly do it, next to the one over runs.

Both see the same experiments: two equal servers, five runs a side, requests whose latencies scatter within a run, and
runs that scatter among each other, since a server started anew is never quite the same.
"""

import re
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.base.files import ROOT
from harness.numbers import stats, verdicts
from harness.numbers.comparison import ALPHA
from harness.numbers.verdicts import ComparedSides

METHOD = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
PAIRS, RUNS, REQUESTS = 2000, 5, 50
WITHIN = 0.10  # scatter of requests within a run, on logarithms


@pytest.fixture(autouse=True)
def only_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without how many repeats would settle a verdict, which takes most of its time."""
    monkeypatch.setattr(stats, "sample_size_to_settle", lambda *_: None)


class Rates(NamedTuple):
    """Which share of the pairs of each test found a difference."""

    welch_over_requests: float
    ranks_over_requests: float
    over_runs: float


def latencies(spread: float, effect: float = 1.0) -> NDArray[np.float64]:
    """Seconds, (pair, side, run, request); the second side is `effect` times as fast."""
    dice = np.random.default_rng(20260921)
    logs = dice.normal(0.0, WITHIN, (PAIRS, 2, RUNS, REQUESTS)) + dice.normal(0.0, spread, (PAIRS, 2, RUNS, 1))
    logs[:, 1] -= np.log(effect)
    values: NDArray[np.float64] = np.exp(logs)
    return values


def found_rates(spread: float, effect: float = 1.0) -> Rates:
    from scipy import stats as scipy_stats  # a second's import, in the one process that runs this

    seen = latencies(spread, effect)
    pooled = seen.reshape(PAIRS, 2, RUNS * REQUESTS)
    welch = scipy_stats.ttest_ind(pooled[:, 0], pooled[:, 1], axis=1, equal_var=False).pvalue
    ranks = scipy_stats.mannwhitneyu(pooled[:, 0], pooled[:, 1], axis=1, method="asymptotic").pvalue
    runs = seen.mean(axis=3)
    ours = 0
    for base, side in runs:
        pair = ComparedSides(
            side="b", baseline="a", metric="wall", side_speeds=[list(1 / side)], baseline_speeds=[list(1 / base)],
            within_run=True,
        )  # fmt: skip
        ours += verdicts.decide_verdicts([pair]).verdicts[0].word in ("faster", "slower")
    return Rates(float(np.mean(welch < ALPHA)), float(np.mean(ranks < ALPHA)), ours / PAIRS)


def test_false_alarms_are_those_of_the_page() -> None:
    """Only where runs do not scatter at all are pooled requests what they claim."""
    rows = re.findall(r"^\| (\d) % \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", METHOD, re.MULTILINE)
    shown = {int(row[0]) / 100: Rates(*(float(value) / 100 for value in row[1:])) for row in rows}
    assert list(shown) == [0.0, 0.01, 0.02, 0.05]
    for spread, expected in shown.items():
        rates = found_rates(spread)
        assert rates == pytest.approx(expected, abs=0.002)
        assert rates.over_runs <= ALPHA
        if spread:
            assert min(rates.welch_over_requests, rates.ranks_over_requests) > 1.9 * ALPHA


def test_power() -> None:
    """What ours gives up for that: nothing at a spread of 2 %."""
    assert found_rates(0.02, effect=1.10).over_runs > 0.98
