"""The numbers of a replay, from made records: each number is chosen."""

from typing import Any

import pytest

from harness.numbers.replays import replay_numbers
from harness.numbers.summary import ReplayNumbers
from harness.records.records import ProcessMark, ReplayedConversation, Request
from harness.records.run_data import cell_data
from tests.support.made_runs import MONOTONIC_S, WALL_S, request


def step(root: int, number: int, at_s: float, took_s: float, *, agent: int = 0, turn: int, **more: Any) -> Request:
    """A step that was sent at a second and took so long, with its first token after half of it."""
    values: dict[str, Any] = {
        "id": f"{root}-{number}", "index": 100 * root + number, "conversation": root + agent, "agent": agent,
        "step": number, "turn": turn, "sent_s": MONOTONIC_S + at_s, "ended_s": took_s,
        "chunks_s": [took_s / 2, took_s], "first_visible_s": took_s / 2, "output_tokens": 2, "asked_tokens": 2,
    }  # fmt: skip
    return request(**(values | more))


def mark(*replays: ReplayedConversation) -> ProcessMark:
    return ProcessMark(
        event="end", process=7, cell="r1-a-x", wall_s=WALL_S, monotonic_s=MONOTONIC_S, replays=[*replays]
    )


def numbers(records: list[Request], *replays: ReplayedConversation) -> ReplayNumbers:
    found = replay_numbers([cell_data(records)], [[mark(*replays)]])
    assert found is not None
    return found


def tokens(prompt: int, cached: int | None, planned: int | None, template: int = 5) -> dict[str, Any]:
    """The tokens of a prompt, of which the chat template adds some."""
    return {"prompt_tokens": prompt, "cached_tokens": cached, "planned_cached_tokens": planned,
            "asked_prompt_tokens": prompt - template}  # fmt: skip


def test_a_conversation_takes_its_whole_time_and_the_tools_what_no_request_fills() -> None:
    """Two sub-agents overlap (10 to 14 and 12 to 17 s); the tools worked from 2 to 10 s and from 17 to 20 s."""
    records = [
        step(0, 0, 0.0, 2.0, turn=1),
        step(0, 2, 10.0, 4.0, agent=1, turn=1),
        step(0, 3, 12.0, 5.0, agent=2, turn=1),
        step(0, 1, 20.0, 1.0, turn=2),
        step(1000, 0, 0.0, 3.0, turn=1),
    ]
    whole = ReplayedConversation(conversation=0, place=0, ended=4, delays_s=30.0, removed_s=19.0)
    cut = ReplayedConversation(conversation=1000, place=1, ended=1, open=3, delays_s=1.0)
    found = numbers(records, whole, cut)
    assert (found.duration.n, found.duration.mean, found.served.mean, found.tools.mean) == (1, 21.0, 10.0, 11.0)
    assert (found.duration.p50, found.conversations, found.whole) == (None, 2, 1)  # one is no sample for a median
    assert (found.ended, found.open, found.failed, found.not_sent) == (5, 3, 0, 0)
    assert (found.delays_s, found.removed_s) == (31.0, 19.0)


@pytest.mark.parametrize("state", ["before_start", "too_long", "failed", "not_sent", "open"])
def test_only_whole_conversations_have_a_time(state: str) -> None:
    one = ReplayedConversation(conversation=0, place=0, ended=1, **{state: 1})
    found = numbers([step(0, 0, 0.0, 2.0, turn=1)], one)
    assert (found.whole, found.duration.n, getattr(found, state)) == (0, 0, 1)


def test_a_conversation_that_began_in_the_warm_up_has_no_time() -> None:
    records = [step(0, 0, 0.0, 2.0, turn=1, phase="warmup"), step(0, 1, 3.0, 1.0, turn=2)]
    found = numbers(records, ReplayedConversation(conversation=0, place=0, ended=2))
    assert (found.whole, found.duration.n, found.ended) == (1, 0, 2)


def test_new_cached_and_recomputed_tokens_by_step_and_by_depth() -> None:
    records = [
        step(0, 0, 0.0, 2.0, turn=1, **tokens(1000, 0, 0)),
        step(0, 1, 3.0, 4.0, turn=2, **tokens(1500, 1000, 900)),  # the template was in the cache, too
        step(0, 2, 8.0, 6.0, turn=3, **tokens(3000, 100, 1400)),
    ]
    found = numbers(records, ReplayedConversation(conversation=0, place=0, ended=3))
    columns = ("first", "last", "requests", "prompt_tokens", "new_tokens", "cached_tokens", "recomputed_tokens")
    first, second = ([getattr(one, name) for name in columns] for one in found.by_step)
    assert first == [1, 1, 1, 1000, 1000, 0, 0]
    assert second == [2, 4, 2, 2250, (500 + 1600) / 2, 550, 1300 / 2]
    assert [one.ttft_p50 for one in found.by_step] == [1.0, 2.0] and found.by_step[1].ttft_p90 is None
    assert [(one.first, one.last, one.requests) for one in found.by_depth] == [(1, 1024, 1), (1025, 2048, 1),
                                                                              (2049, 4096, 1)]  # fmt: skip
    assert found.hits is not None
    hits = (found.hits.planned, found.hits.served, found.hits.beyond, found.hits.template_tokens, found.hits.is_scaled)
    assert hits == (2300, 1000, 100, 5, False)


def test_five_hundred_steps_have_at_most_ten_rows() -> None:
    records = [step(0, number, number, 0.5, turn=number + 1) for number in range(500)]
    ranges = numbers(records, ReplayedConversation(conversation=0, place=0, ended=500)).by_step
    assert [(one.first, one.last) for one in ranges] == [
        (1, 1), (2, 4), (5, 9), (10, 19), (20, 49), (50, 99), (100, 199), (200, 499), (500, 999)]  # fmt: skip
    assert [one.requests for one in ranges] == [1, 3, 5, 10, 30, 50, 100, 300, 1]
    assert ranges[-2].ttft_p90 == 0.25 and ranges[0].ttft_p90 is None


def test_a_recorded_text_could_have_the_whole_prompt_that_it_continues() -> None:
    texts = [(400, 0, None), (700, 390, 0), (900, 900 - 10, 1)]
    records = [
        step(0, number, 2.0 * number, 1.0, turn=number + 1, prompt_tokens=prompt, cached_tokens=cached,
             continues=continues, planned_cached_tokens=0 if continues is None else None)
        for number, (prompt, cached, continues) in enumerate(texts)
    ]  # fmt: skip
    found = numbers(records, ReplayedConversation(conversation=0, place=0, ended=3))
    assert found.hits is not None
    assert (found.hits.requests, found.hits.planned, found.hits.served, found.hits.beyond) == (3, 1100, 1090, 190)
    assert found.hits.template_tokens is None and not found.hits.is_scaled


def test_planned_tokens_are_scaled_where_the_server_counts_others() -> None:
    counts = [(1000, 500), (1800, 1200)]  # counted by the server, planned
    records = [
        step(0, number, number, 0.5, turn=number + 1, prompt_tokens=prompt, asked_prompt_tokens=asked,
             cached_tokens=600 * number, planned_cached_tokens=500 * number)
        for number, (prompt, asked) in enumerate(counts)
    ]  # fmt: skip
    hits = numbers(records, ReplayedConversation(conversation=0, place=0, ended=2)).hits
    assert hits is not None
    assert (hits.planned, hits.served, hits.is_scaled, hits.template_tokens) == (750, 600, True, None)


@pytest.mark.parametrize(("window_s", "rate"), [(None, 2900 / 16), (12.5, 2600 / 12.5)])
def test_uncached_prompt_tokens_a_second(window_s: float | None, rate: float) -> None:
    """The last request ends outside the window."""
    records = [
        step(0, 0, 0.0, 4.0, turn=1, prompt_tokens=2000, cached_tokens=None),  # a server leaves 0 out
        step(0, 1, 6.0, 4.0, turn=2, prompt_tokens=2500, cached_tokens=1900),
        step(0, 2, 12.0, 4.0, turn=3, prompt_tokens=2600, cached_tokens=2300),
    ]
    window = None if window_s is None else (MONOTONIC_S, MONOTONIC_S + window_s)
    one = ReplayedConversation(conversation=0, place=0, ended=3)
    found = replay_numbers([cell_data(records, window_s=window)], [[mark(one)]])
    assert found is not None and found.uncached_tok_s == pytest.approx(rate)


def test_what_the_server_does_not_report_is_unknown() -> None:
    records = [step(0, 0, 0.0, 2.0, turn=1, **tokens(1000, None, 0))]
    found = numbers(records, ReplayedConversation(conversation=0, place=0, ended=1))
    (one,) = found.by_step
    assert (one.cached_tokens, one.new_tokens, one.recomputed_tokens) == (None, None, None)
    assert (found.hits, found.uncached_tok_s) == (None, None)


def test_without_prompt_tokens_there_is_no_depth() -> None:
    records = [step(0, 0, 0.0, 2.0, turn=1, prompt_tokens=None)]
    found = numbers(records, ReplayedConversation(conversation=0, place=0, ended=1))
    assert (found.by_depth, found.by_step[0].prompt_tokens, found.by_step[0].requests) == ([], None, 1)


def test_other_loads_have_no_replay() -> None:
    assert replay_numbers([cell_data([request()])], [[mark()]]) is None
