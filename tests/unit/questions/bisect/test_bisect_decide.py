"""The steps of `harness bisect`, one by one."""

from collections.abc import Sequence

import pytest

from harness.questions.bisect.decide import (
    LOOKS,
    MAX_REPEATS,
    MAX_VALUELESS,
    BisectStart,
    BisectStep,
    max_starts,
    next_step,
    skipped_entries,
    starts_left,
)

NOISE = (1.0, 1.004, 0.997, 1.002, 0.999, 1.001, 0.996, 1.003)  # of starts, in turn


def measured(*speeds: tuple[int, float]) -> list[BisectStart]:
    """Starts of entries with these speeds."""
    return [
        BisectStart(entry=entry, value=speed * NOISE[number % len(NOISE)])
        for number, (entry, speed) in enumerate(speeds)
    ]


def ends(size: int, good: float, bad: float, repeats: int = 3) -> list[tuple[int, float]]:
    turns = (0, 1, 1, 0)
    return [((0, size - 1)[turns[i % 4]], (good, bad)[turns[i % 4]]) for i in range(2 * repeats)]


def followed(size: int, levels: Sequence[float], failing: Sequence[int] = ()) -> tuple[BisectStep, list[BisectStart]]:
    """The end of a search in which each entry has its level."""
    starts: list[BisectStart] = []
    while (step := next_step(size, starts)).next_entry is not None:
        entry = step.next_entry
        value = None if entry in failing else levels[entry] * NOISE[len(starts) % len(NOISE)]
        starts.append(BisectStart(entry=entry, value=value, failed=entry in failing))
    return step, starts


def test_the_ends_are_started_in_turns_until_they_are_told_apart() -> None:
    seen, starts = [], list[BisectStart]()
    while (step := next_step(5, starts)).why in ("ends",):
        assert step.next_entry is not None
        seen.append(step.next_entry)
        value = (1.0, 0.8)[step.next_entry == 4] * NOISE[len(starts)]
        starts.append(BisectStart(entry=step.next_entry, value=value))
    assert seen == [0, 4, 4, 0, 0, 4]
    assert (step.next_entry, step.why, step.low, step.high, step.is_proven) == (2, "middle", 0, 4, True)
    assert step.verdict is not None and step.verdict.word == "slower"


def test_the_change_is_found_in_either_direction() -> None:
    for levels in ([1.0, 1.0, 0.8, 0.8, 0.8], [0.8, 0.8, 1.0, 1.0, 1.0]):
        step, _ = followed(5, levels)
        assert (step.low, step.high, step.ended) == (1, 2, "pair")
    assert followed(2, [1.0, 0.9])[0][1:3] == (0, 1)


def test_equal_ends_are_the_same_and_a_wide_scatter_shows_nothing() -> None:
    step, starts = followed(6, [1.0] * 6)
    assert (step.ended, step.next_entry) == ("same", None) and len(starts) in [2 * look for look in LOOKS]
    noisy = [
        BisectStart(entry=(0, 5)[number % 2], value=1.0 + 0.3 * ((number * 7) % 5)) for number in range(2 * LOOKS[-1])
    ]
    step = next_step(6, noisy)
    assert (step.ended, step.is_proven) == ("not_shown", False)


def test_an_entry_that_fails_is_skipped_and_the_answer_is_a_range_across_it() -> None:
    step, starts = followed(7, [1.0, 1.0, 1.0, 1.0, 0.8, 0.8, 0.8], failing=[3])
    assert (step.low, step.high, step.ended) == (2, 4, "pair")
    assert sum(start.entry == 3 for start in starts) == 1, "it is not tried again"
    assert skipped_entries(starts) == {3}


def test_a_disturbed_start_is_repeated_and_then_left_out() -> None:
    begun = measured(*ends(3, 1.0, 0.8))
    disturbed = [BisectStart(entry=1)] * (MAX_VALUELESS - 1)
    assert next_step(3, [*begun, *disturbed]).next_entry == 1
    last = next_step(3, [*begun, *disturbed, BisectStart(entry=1)])
    assert (last.low, last.high, last.ended) == (0, 2, "pair")


def test_an_end_that_fails_ends_the_search() -> None:
    step = next_step(4, [BisectStart(entry=0, failed=True)])
    assert (step.ended, step.verdict) == ("end_failed", None)
    fails_later = [*measured((0, 1.0), (3, 0.8)), *[BisectStart(entry=3)] * MAX_VALUELESS]
    assert next_step(4, fails_later).ended == "end_failed"
    assert next_step(4, [*measured((0, 1.0)), BisectStart(entry=3)]).next_entry == 3, "once is a disturbance"


def test_of_two_changes_the_larger_half_is_taken() -> None:
    step, _ = followed(9, [1.0, 1.0, 1.0, 0.94, 0.94, 0.94, 0.80, 0.80, 0.80])
    assert (step.low, step.high) == (5, 6)


def test_a_reference_is_started_again_before_a_late_comparison_counts() -> None:
    begun = measured(*ends(9, 1.0, 0.8))
    far = [*begun, *measured(*[(4, 1.0)] * 6)]  # the bad end was started long before the last of them
    step = next_step(9, far)
    assert step.low == 4, "one of its starts was near"
    assert step.next_entry == 6 and step.why == "middle"
    other = [*begun, *measured((2, 1.0), (2, 1.0), (2, 1.0), (2, 1.0), (2, 1.0), (4, 1.0))]
    step = next_step(9, other)
    assert (step.low, step.high, step.next_entry, step.why) == (0, 8, 8, "reference")


def test_a_change_in_many_small_steps_ends_with_the_range_that_is_proven() -> None:
    step, starts = followed(40, [0.9 ** (entry / 39) for entry in range(40)])
    assert (step.ended, step.is_proven, step.next_entry) == ("undecided", True, None) and step.high - step.low > 1
    assert len(starts) <= max_starts(40)
    assert max(sum(start.entry == entry for start in starts) for entry in range(40)) <= MAX_REPEATS


def test_equal_values_without_scatter_are_decided() -> None:
    starts: list[BisectStart] = []
    while (step := next_step(8, starts)).next_entry is not None:
        starts.append(BisectStart(entry=step.next_entry, value=1.0 if step.next_entry < 5 else 0.5))
    assert (step.low, step.high, step.ended) == (4, 5, "pair")


def test_the_starts_that_remain_are_estimated() -> None:
    assert starts_left(next_step(9, []), []) == 6
    begun = measured(*ends(9, 1.0, 0.8))
    assert starts_left(next_step(9, begun), begun) == 8, "three halvings of two starts, and the pair"


def test_a_list_of_one_is_no_list() -> None:
    with pytest.raises(ValueError, match="two entries"):
        next_step(1, [])
