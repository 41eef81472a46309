"""The knee of throughput over concurrency: the fit, the search on made-up curves."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from harness.capacity.knee import KneeBlock, KneeProbe, KneeSearch, estimate_throughput, fit_unimodal


def run(
    curve: Callable[[int], float], max_level: int = 256, noise: float = 0.02, until: int | None = None
) -> KneeSearch:
    """A search with one block a second of a throughput that is `curve` with seeded noise; `until`: probes."""
    search, dice = KneeSearch(max_level), random.Random(5)
    while (level := search.next_level()) is not None and (until is None or len(search.taken) < until):
        probe = search.probe(level)
        while probe.state == "open":
            probe.add(KneeBlock(1.0, curve(level) * (1 + dice.gauss(0, noise))))
        search.take(level, probe)
    return search


def corner(level: int) -> float:
    return 100.0 * min(level, 20)


def cliff(level: int) -> float:
    return 100.0 * level if level <= 20 else 600.0


def rising(level: int) -> float:
    return 100.0 * level / (1 + level / 1000)


def test_a_fit_that_rises_and_falls() -> None:
    y = np.array([1.0, 3.0, 2.0, 5.0, 4.0, 4.5, 1.0])
    assert fit_unimodal(y, np.ones(7)) == pytest.approx([1, 2.5, 2.5, 5, 4.25, 4.25, 1])


def test_batch_means_count_what_one_block_hands_to_the_next() -> None:
    dice = random.Random(1)
    high, low = 110.0, 90.0
    pairs = [value for _ in range(40) for value in [dice.choice([high, low])] * 5]
    dependent = estimate_throughput([KneeBlock(1, value) for value in pairs])
    dice.shuffle(pairs)
    assert dependent.error > 1.4 * estimate_throughput([KneeBlock(1, value) for value in pairs]).error


def test_a_probe_drops_what_it_measured_while_the_server_still_settled() -> None:
    probe = KneeProbe(4, 0.03, 60, [])
    dice = random.Random(2)
    for number in range(60):
        if probe.state == "open":
            probe.add(KneeBlock(1, (50 if number < 6 else 100) * (1 + dice.gauss(0, 0.01))))
    assert probe.state == "done" and probe.steady
    assert estimate_throughput(probe.blocks).tok_s == pytest.approx(100, rel=0.02)
    assert probe.seconds > len(probe.blocks)


def test_a_probe_ends_at_its_cap_and_says_when_it_was_not_steady() -> None:
    probe = KneeProbe(4, 0.001, 24, [])
    for number in range(24):
        probe.add(KneeBlock(1, 100 + 5 * number))
    assert probe.state == "done" and not probe.steady


def test_a_probe_clearly_below_the_peak_needs_no_precision() -> None:
    blocks = [KneeBlock(1, 100 + (20 if number % 2 else -20)) for number in range(8)]
    one, other = KneeProbe(4, 0.03, 60, [], best=100.0), KneeProbe(4, 0.03, 60, [], best=1000.0)
    for block in blocks:
        one.add(block)
        other.add(block)
    assert (one.state, other.state) == ("open", "done")


def test_a_corner() -> None:
    answer = run(corner).answer()
    assert answer.kind == "knee" and answer.level is not None and answer.low is not None and answer.high is not None
    assert 16 <= answer.low <= answer.level <= answer.high <= 21
    assert answer.low <= 18 <= answer.high
    assert answer.hurts_from is None
    assert not answer.drifted
    assert answer.peak_tok_s == pytest.approx(2000, rel=0.02)
    assert max(point.level for point in answer.points) < 256  # two rungs beyond were enough


def test_a_cliff_is_where_it_hurts() -> None:
    answer = run(cliff).answer()
    assert answer.kind == "knee" and answer.low is not None and answer.high is not None
    assert answer.low <= 18 <= answer.high
    assert answer.hurts_from is not None and 21 <= answer.hurts_from <= 25
    assert answer.peak_level <= 20


@pytest.mark.parametrize("max_level", [1, 2, 100, 256])
def test_no_knee_in_range(max_level: int) -> None:
    answer = run(rising, max_level).answer()
    assert (answer.kind, answer.level, answer.low, answer.high, answer.hurts_from) == ("none", None, None, None, None)
    assert answer.peak_level == max_level


def test_one_user_is_enough() -> None:
    answer = run(lambda level: 100.0).answer()
    assert (answer.kind, answer.level, answer.low) == ("knee", 1, 1)
    assert answer.high is not None and answer.high <= 2  # one step of the grid


def test_a_search_that_was_stopped_early_leaves_the_knee_open() -> None:
    answer = run(corner, until=4).answer()
    assert (answer.kind, answer.level, answer.high) == ("unclear", None, None)
    assert answer.low is not None and answer.low >= 5
    assert answer.drift is None


def test_a_level_at_which_the_server_failed_ends_the_ladder() -> None:
    search = run(rising, until=5)
    assert search.next_level() == 32
    search.fail(32)
    again = search.next_level()
    assert again in (1, 2, 4)
    search.take(again, run_probe(search, again))
    assert search.next_level() is None
    assert (search.answer().kind, search.answer().hurts_from) == ("unclear", 32)


def test_a_server_that_failed_at_once_has_no_answer() -> None:
    search = KneeSearch(8)
    search.fail(1)
    assert search.next_level() is None
    assert not search.measured


def test_a_probe_that_was_stopped_at_once_counts_for_nothing() -> None:
    search = KneeSearch(8)
    search.take(1, search.probe(1))
    assert (search.next_level(), search.taken) == (1, [])


def test_a_server_that_answers_nothing_at_high_levels_hurts_there() -> None:
    answer = run(lambda level: 100.0 * level if level <= 20 else 0.0).answer()
    assert answer.kind == "knee" and answer.low is not None and answer.high is not None
    assert answer.low <= 18 <= answer.high
    assert answer.hurts_from is not None and answer.hurts_from <= 32


def run_probe(search: KneeSearch, level: int, factor: float = 1.0) -> KneeProbe:
    probe, dice = search.probe(level), random.Random(level)
    while probe.state == "open":
        probe.add(KneeBlock(1.0, factor * rising(level) * (1 + dice.gauss(0, 0.02))))
    return probe


@pytest.mark.parametrize(("factor", "drifted"), [(1.0, False), (0.9, True), (1.1, True)])
def test_an_early_level_at_the_end_shows_drift_of_the_machine(factor: float, drifted: bool) -> None:
    search, seen = KneeSearch(64), set()
    while (level := search.next_level()) is not None:
        search.take(level, run_probe(search, level, factor if level in seen else 1.0))
        seen.add(level)
    answer = search.answer()
    assert answer.drift == pytest.approx(factor, rel=0.03)
    assert answer.drifted is drifted
