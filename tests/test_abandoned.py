"""Abandoned requests in the numbers: neither success nor failure, and no way to look fast."""

from typing import Any

import pytest

from harness.analysis.derive import missed_before_leaving
from harness.analysis.tally import CellCounts, Clock, SloTally, numbers_of
from harness.rundir.records import Request
from harness.scenario.check_syntax import parse_check
from tests.made_runs import request


def slos(text: str) -> Any:
    return parse_check(f"attainment({text}) >= 0.5").slos


def left(chunks_s: list[float], ended_s: float, **changes: Any) -> Request:
    """The user left after so long."""
    first = chunks_s[0] if chunks_s else None
    cut = {"error": "abandoned", "output_tokens": None, "first_visible_s": first, "asked_tokens": 10}
    return request(chunks_s=chunks_s, ended_s=ended_s, **cut, **changes)


def answered(chunks_s: list[float], **changes: Any) -> Request:
    return request(chunks_s=chunks_s, first_visible_s=chunks_s[0], ended_s=chunks_s[-1], output_tokens=4, **changes)


def tally_of(*requests: Request, text: str = "ttft<=1s", **more: Any) -> CellCounts:
    counted = CellCounts(clock=Clock([]), slos=SloTally(sets={text: slos(text)}), **more)
    for one in requests:
        counted.add(one)
    return counted


@pytest.mark.parametrize(
    ("one", "text", "missed"),
    [
        (left([0.5, 0.6], 0.6), "ttft<=1s", False),
        (left([1.5, 1.6], 1.6), "ttft<=1s", True),
        (left([], 0.9), "ttft<=1s", False),  # left before it was late
        (left([], 1.1), "ttft<=1s", True),  # nothing had come, and it was late
        (left([0.5], 3.0), "ttft<=1s, e2e<=2s", True),
        (left([0.5], 1.5), "ttft<=1s, e2e<=2s", False),
        (left([0.5, 9.5], 9.5), "tpot<=1ms", False),  # how many tokens came is not known
    ],
)
def test_what_was_missed_when_the_user_left(one: Request, text: str, missed: bool) -> None:
    assert missed_before_leaving(one, slos(text)) is missed


def test_they_are_sent_and_neither_succeed_nor_fail() -> None:
    good = answered([0.5, 0.6, 0.7, 0.8])
    numbers = numbers_of([tally_of(good, good, left([0.2, 0.3], 0.3), left([], 2.0))])
    assert (numbers.sent, numbers.succeeded, numbers.failed, numbers.unfinished, numbers.abandoned) == (4, 2, 0, 0, 2)
    assert numbers.error_rate == 0
    assert numbers.ttft_s.n == numbers.e2e_s.n == 2  # no latency has them, also not the fast one's
    attained = numbers.slos["ttft<=1s"]
    assert (attained.met, attained.attainment) == (2, 2 / 3)  # one left in time and does not count, one was not served


def test_what_came_until_they_left_is_work_that_was_done() -> None:
    good = answered([0.5, 0.6, 0.7, 0.8])
    numbers = numbers_of([tally_of(good, left([0.2, 0.4, 1.0], 1.0))])
    assert (numbers.window_s, numbers.output_tok_s) == (1.0, 4 + 3)  # one token a chunk, as in the other
    timed = numbers_of([tally_of(good, left([0.2, 0.4, 1.0], 1.0), window_s=(good.sent_s, good.sent_s + 0.65))])
    assert timed.output_tok_s == pytest.approx((2 + 2) / 0.65)


def test_parts_are_added_up() -> None:
    one, other = tally_of(left([0.2], 0.3)), tally_of(left([0.2], 0.3), left([], 2.0), answered([0.5, 0.6, 0.7, 0.8]))
    one.merge(other)
    numbers = numbers_of([one])
    assert (numbers.abandoned, numbers.slos["ttft<=1s"].attainment) == (3, 0.5)


def test_nobody_stayed() -> None:
    assert numbers_of([tally_of(left([0.2], 0.3))]).slos["ttft<=1s"].attainment is None


def test_reasoning_and_tool_calls_are_counted() -> None:
    told = answered([0.5, 0.6, 0.7, 0.8], reasoning_tokens=3, tool_calls=2, tool_calls_valid=1)
    seen = answered([0.5, 0.6, 0.7, 0.8], reasoning_chunks=2, tool_calls=0, tool_calls_valid=0)
    numbers = numbers_of([tally_of(told, seen)])
    assert (numbers.reasoning_tokens, numbers.tool_calls, numbers.tool_calls_valid) == (5.0, 2, 1)
    plain = numbers_of([tally_of(answered([0.5, 0.6, 0.7, 0.8]))])
    assert (plain.reasoning_tokens, plain.tool_calls, plain.tool_calls_valid) == (None, None, None)
