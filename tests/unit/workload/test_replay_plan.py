"""The replay of conversations, in virtual time: order, delays, failures, starts inside the trace."""

import heapq
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from harness.workload.agent_traces.context_fit import fit_conversation
from harness.workload.agent_traces.conversation import Conversation
from harness.workload.agent_traces.replay_plan import ConversationReplay, DelayRule, delays_of_longest_chain_s, lap_at
from tests.support.agent_traces import (
    edge_rows,
    made_files,
    otel_session,
    read_all,
    read_weka,
    sub_agent,
    weka_request,
    write_document,
    write_rows,
)
from tests.support.wording import Wording


def replayed(
    replay: ConversationReplay, answer_s: Callable[[int], float], failing: Collection[int] = (), at_s: float = 0.0
) -> list[tuple[int, float]]:
    """Send each step when it is due; its answer takes `answer_s`. Return the steps as they are sent, with times."""
    sent, ends = list[tuple[int, float]](), list[tuple[float, int]]()
    due = [(one.at_s, one.number) for one in replay.start(at_s)]
    heapq.heapify(due)
    while due or ends:
        if due and (not ends or due[0][0] <= ends[0][0]):
            now, number = heapq.heappop(due)
            sent.append((number, now))
            heapq.heappush(ends, (now + answer_s(number), number))
        else:
            now, number = heapq.heappop(ends)
            for one in replay.end(number, now, number in failing):
                assert one.at_s >= now
                heapq.heappush(due, (one.at_s, one.number))
    assert replay.is_over
    return sent


@pytest.fixture
def with_sub_agents(tmp_path: Path) -> Conversation:
    return read_all(made_files(tmp_path)["weka"])[0]


def recorded(made: Conversation) -> Callable[[int], float]:
    return lambda number: made.steps[number].duration_s or 0.0


def test_sub_agents_run_in_parallel_and_are_joined(with_sub_agents: Conversation) -> None:
    """With the recorded answer times each step is sent as recorded, but for the whole seconds of the format."""
    replay = ConversationReplay(with_sub_agents)
    sent = replayed(replay, recorded(with_sub_agents), at_s=100.0)
    assert sent == [(0, 100.0), (3, 106.0), (5, 106.25), (4, 113.0), (1, 149.0), (2, 156.0)]
    counts = replay.counts()
    assert (counts.ended, counts.not_sent, counts.open, counts.removed_s, counts.delays_s) == (6, 0, 0, 0.0, 12.0)


def test_a_faster_server_sends_sooner_and_keeps_the_delays(with_sub_agents: Conversation) -> None:
    sent = replayed(ConversationReplay(with_sub_agents), lambda number: 1.0)
    assert sent == [(0, 0.0), (3, 1.5), (5, 1.75), (4, 6.5), (1, 11.25), (2, 15.25)]


@pytest.mark.parametrize(
    ("rule", "last_s", "removed_s"),
    [
        (DelayRule(), 15.25, 0.0),
        (DelayRule(scale=0), 4.0, 12.0),
        (DelayRule(scale=0.5), 9.625, 6.0),
        (DelayRule(max_s=3), 13.5, 1.0 + 0.75),
        (DelayRule(scale=2, max_s=7), 25.0, 0.5 + 1.0),
    ],
)
def test_delays_are_scaled_and_capped_and_what_that_removes_is_counted(
    with_sub_agents: Conversation, rule: DelayRule, last_s: float, removed_s: float
) -> None:
    replay = ConversationReplay(with_sub_agents, rule=rule)
    assert replayed(replay, lambda number: 1.0)[-1] == (2, last_s)
    assert replay.counts().removed_s == pytest.approx(removed_s)


def test_a_failed_step_aborts_what_depends_on_it(with_sub_agents: Conversation) -> None:
    replay = ConversationReplay(with_sub_agents)
    assert [number for number, _ in replayed(replay, lambda number: 1.0, failing={3})] == [0, 3, 5]
    counts = replay.counts()
    assert (counts.ended, counts.failed, counts.not_sent, counts.open, counts.too_long) == (2, 1, 3, 0, 0)


def test_a_failed_background_agent_does_not_stop_its_parent(tmp_path: Path) -> None:
    made = read_weka(
        tmp_path,
        weka_request(0, 4, [1], api_time=2.0),
        sub_agent(3.0, None, weka_request(0, 4, [9], api_time=30.0), weka_request(40, 4, [9])),
        weka_request(5, 8, [1, 2], api_time=1.0, think_time=3.0),
    )
    replay = ConversationReplay(made)
    assert [number for number, _ in replayed(replay, lambda number: 1.0, failing={2})] == [0, 2, 1]
    assert replay.counts()[2:6] == (2, 1, 0, 1)


def test_steps_that_do_not_fit_are_counted_apart(with_sub_agents: Conversation) -> None:
    fit = fit_conversation(with_sub_agents, 23)  # the second step of a sub-agent and all of the parent after it
    replay = ConversationReplay(with_sub_agents, fit.kept)
    assert [number for number, _ in replayed(replay, lambda number: 1.0)] == [0, 3, 5]
    counts = replay.counts()
    assert (counts.ended, counts.too_long, counts.not_sent) == (3, 3, 0)


def test_overlapping_calls_are_sent_together(tmp_path: Path) -> None:
    made = read_all(write_document(tmp_path / "o.json", otel_session()))[0]
    assert replayed(ConversationReplay(made), recorded(made)) == [(0, 0.0), (1, 2.5), (2, 3.0), (3, 6.0)]


def test_a_start_inside_the_trace_sends_what_was_recorded_after_it(with_sub_agents: Conversation) -> None:
    """At 0.2 of 57 s (11.4 s) the sub-agents are at work: one has its next step 1.6 s later, not after all its 4 s."""
    replay = ConversationReplay(with_sub_agents, offset=0.2)
    assert replay.steps_to_cache() == [0, 3]  # the other sub-agent, step 5, has no later one
    sent = replayed(replay, recorded(with_sub_agents))
    assert [number for number, _ in sent] == [4, 1, 2]
    assert [at_s for _, at_s in sent] == pytest.approx([1.6, 7.35, 14.35])
    assert (replay.counts().before_start, replay.counts().ended) == (3, 3)


def test_a_start_inside_a_trace_without_times_is_at_a_step(tmp_path: Path) -> None:
    made = read_all(write_rows(tmp_path / "e.jsonl", edge_rows()))[0]
    replay = ConversationReplay(made, offset=0.5)
    assert replayed(replay, lambda number: 1.0) == [(1, 0.0), (2, 4.0)]
    assert replay.counts().before_start == 1
    assert ConversationReplay(made, kept=[0, 1], offset=0.9).counts()[:2] == (1, 1)  # a step that fits is after it


def test_a_step_ends_once(with_sub_agents: Conversation, wording: Wording) -> None:
    replay = ConversationReplay(with_sub_agents)
    replay.start(0.0)
    replay.end(0, 1.0)
    for number in (0, 1):
        with pytest.raises(ValueError, match=str(number)) as caught:
            replay.end(number, 2.0)
        wording(caught.value)
    assert not replay.is_over and replay.counts()[2:6] == (1, 0, 5, 0)  # three steps wait for the two open ones


def test_the_delays_that_wait_for_each_other(with_sub_agents: Conversation) -> None:
    """0.5 and 4 s of the longer sub-agent, and 6.75 s of the parent; the other sub-agent waits at the same time."""
    every = range(6)
    assert delays_of_longest_chain_s(with_sub_agents, every, DelayRule()) == 0.5 + 4.0 + 3.75 + 3.0
    assert delays_of_longest_chain_s(with_sub_agents, every, DelayRule(max_s=1)) == 0.5 + 3.0
    assert delays_of_longest_chain_s(with_sub_agents, [0, 3, 5], DelayRule()) == 0.75
    assert delays_of_longest_chain_s(with_sub_agents, [], DelayRule()) == 0.0


def test_laps_go_through_the_trace_and_repeat_it_with_another_number() -> None:
    laps = [lap_at(index, 3, 7, (0.25, 0.75)) for index in range(7)]
    assert [(lap.place, lap.repetition) for lap in laps] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    assert all(0.25 <= lap.offset <= 0.75 for lap in laps) and len({lap.offset for lap in laps}) == 7
    assert (
        laps
        == [lap_at(index, 3, 7, (0.25, 0.75)) for index in range(7)]
        != [lap_at(i, 3, 8, (0.25, 0.75)) for i in range(7)]
    )
    assert lap_at(4, 3, 7).offset == 0.0
