"""Recorded agents on the embedded engine: order, sub-agents, lengths, history, failures."""

import itertools
import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.records.records import ReplayedConversation, Request, read_marks
from harness.scenario import Load
from harness.scenario.behaviour import AgentTrace
from tests.support.agent_traces import (
    LIST_FILES,
    call,
    edge_rows,
    weka_file,
    weka_request,
    weka_with_sub_agents,
    write_document,
    write_rows,
)
from tests.support.command import PATIENCE_S
from tests.support.http_double import Handler, listening
from tests.support.load_runs import by_hand, driven
from tests.support.simulated import spawned


def replayed(folder: Path, url: str, path: Path, requests: int, users: int = 1, **trace: object) -> list[Request]:
    replay = AgentTrace(file=path.name, delay_scale=0.01, **trace)  # type: ignore[arg-type]
    load = Load(user="agent_trace", users=users, requests=requests, output_tokens=12, agent_trace=replay)
    return driven(folder, url, load, trace_file=str(path))


def replays_of(folder: Path) -> list[ReplayedConversation]:
    """What became of the conversations, in their order."""
    marks = [mark for mark in read_marks(folder / "processes.jsonl") if mark.event == "end"]
    return sorted((one for mark in marks for one in mark.replays or ()), key=lambda one: one.conversation)


def test_sub_agents_run_in_parallel_and_the_parent_waits_for_them(tmp_path: Path, engine: str) -> None:
    path = write_document(tmp_path / "w.json", weka_with_sub_agents())
    records = replayed(tmp_path, engine, path, 6)
    assert [record.error for record in records] == [None] * 6
    root, one, other = 0, 1, 2
    assert sorted((r.conversation, r.turn) for r in records) == [
        (root, 1), (root, 2), (root, 3), (one, 1), (one, 2), (other, 1)]  # fmt: skip
    ends = {(r.conversation, r.turn): r.sent_s + r.ended_s for r in records}
    sent = {(r.conversation, r.turn): r.sent_s for r in records}
    assert min(sent[one, 1], sent[other, 1]) >= ends[root, 1]
    assert sent[root, 2] >= max(ends[one, 2], ends[other, 1])
    assert {(r.asked_tokens, r.output_tokens, r.fixed_length) for r in records} == {(10, 10, True)}
    assert {(r.step, r.agent) for r in records} == {(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)}
    planned = {r.step: (r.asked_prompt_tokens, r.planned_cached_tokens) for r in records if r.agent != 2}
    assert planned[0] == (9, 0) and planned[1] == (17, 8) and planned[2] == (21, 16) and planned[4] == (14, 8)
    assert sum(r.planned_cached_tokens or 0 for r in records) == 40  # the sub-agents' first prompts share 8 of their 12
    (replay,) = replays_of(tmp_path)
    assert replay.is_whole and (replay.ended, replay.delays_s) == (6, 12.0)
    assert replay.removed_s == pytest.approx(11.88)
    lengths = {(r.conversation, r.turn): r.prompt_tokens for r in records}
    overhead = (lengths[root, 1] or 0) - 9
    assert [lengths[root, 2], lengths[root, 3], lengths[one, 2]] == [17 + overhead, 21 + overhead, 14 + overhead]


def test_recorded_texts_and_their_tools_are_sent_and_the_answers_stop_by_themselves(
    tmp_path: Path, engine: str
) -> None:
    path = write_rows(tmp_path / "e.jsonl", [*edge_rows(), *edge_rows("house")])
    records = replayed(tmp_path, engine, path, 6, users=2)
    assert [record.error for record in records] == [None] * 6
    by_conversation = {
        number: [(r.turn, r.asked_tokens, r.fixed_length) for r in records if r.conversation == number]
        for number in (0, 1000)
    }
    assert by_conversation == dict.fromkeys((0, 1000), [(1, 12, False), (2, 12, False), (3, 9, False)])
    assert {record.tool_calls for record in records} == {0}
    expected = {1: (0, None), 2: (None, 0), 3: (None, 1)}
    assert all((r.planned_cached_tokens, r.continues) == expected[r.turn or 0] for r in records)


def test_what_the_end_of_the_load_cuts_is_open_and_not_failed(tmp_path: Path, engine: str) -> None:
    path = write_rows(tmp_path / "e.jsonl", edge_rows())
    replay = AgentTrace(file=path.name, max_delay_s=PATIENCE_S, delay_scale=1000)
    load = Load(user="agent_trace", users=1, duration_s=1, drain_s=0, output_tokens=12, agent_trace=replay)
    (record,) = driven(tmp_path, engine, load, trace_file=str(path))
    (one,) = replays_of(tmp_path)
    assert record.error is None
    assert (one.ended, one.failed, one.open, one.not_sent) == (1, 0, 2, 0)


def test_a_repetition_has_a_salt_and_other_conversations_follow(tmp_path: Path, engine: str) -> None:
    one, other = (weka_file(weka_request(0, 2000, list(range(500))), id=id) for id in ("one", "other"))
    path = write_rows(tmp_path / "w.jsonl", [one, other])
    records = replayed(tmp_path, engine, path, 4)
    assert [(r.conversation, r.turn) for r in records] == [(0, 1), (1000, 1), (2000, 1), (3000, 1)]
    assert all((r.cached_tokens or 0) < 50 for r in records)


def test_after_a_failed_step_the_next_conversation_is_replayed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "e.jsonl", [*edge_rows(), *edge_rows("house")])
    with spawned("--preset", "instant", "--served-model-name", "m", "--fault", "503@2") as server:
        records = replayed(tmp_path, server.url, path, 4)
    states = [(one.place, one.ended, one.failed, one.not_sent, one.open) for one in replays_of(tmp_path)]
    assert states == [(0, 1, 1, 1, 0), (1, 1, 1, 1, 0)]
    assert [(r.conversation, r.turn, r.error) for r in records] == [
        (0, 1, None), (0, 2, "rejected"), (1000, 1, None), (1000, 2, "rejected")]  # fmt: skip


def test_steps_that_do_not_fit_are_not_sent(tmp_path: Path, engine: str) -> None:
    path = write_document(tmp_path / "w.json", weka_with_sub_agents())
    records = replayed(tmp_path, engine, path, 6, context_tokens=23)
    assert [(one.ended, one.too_long, one.is_whole) for one in replays_of(tmp_path)] == [(3, 3, False)] * 2
    assert [(r.conversation, r.turn) for r in records] == [(0, 1), (1, 1), (2, 1), (1000, 1), (1001, 1), (1002, 1)]


def test_after_the_end_no_conversation_is_noted_of_which_nothing_fits(tmp_path: Path, engine: str) -> None:
    (tmp_path / "traces").mkdir()
    write_document(tmp_path / "traces" / "a.json", weka_file(weka_request(0, 9, [1, 2]), id="a"))
    write_document(tmp_path / "traces" / "b.json", weka_file(weka_request(0, 90, list(range(22))), id="b"))
    records = replayed(tmp_path, engine, tmp_path / "traces", 2, context_tokens=40)
    assert len(records) == 2, "the first one twice"
    assert [(one.place, one.ended, one.too_long) for one in replays_of(tmp_path)] == [(0, 1, 0), (1, 0, 1), (0, 1, 0)]


def test_stock_locust_replays_a_trace(tmp_path: Path, engine: str) -> None:
    path = write_rows(tmp_path / "e.jsonl", edge_rows())
    records = by_hand(
        tmp_path, engine, "agent_trace", "--agent-trace", str(path), "--output-tokens", "5", run_time="6s"
    )
    assert len(records) >= 2 and {record.error for record in records} <= {None, "unfinished"}
    assert {record.turn for record in records} <= {1, 2, 3}


def test_a_start_inside_the_trace_sends_only_what_was_recorded_after_it(tmp_path: Path, engine: str) -> None:
    path = write_document(tmp_path / "w.json", weka_with_sub_agents())
    records = replayed(tmp_path, engine, path, 4, start=[0.2, 0.2])
    fills = [r for r in records if r.phase == "warmup"]  # the last before the start of each agent that has more
    assert sorted((r.conversation, r.turn, r.output_tokens) for r in fills) == [(0, 1, 1), (1, 1, 1)]
    measured = [r for r in records if r not in fills]
    assert [(r.conversation, r.turn) for r in measured] == [(1, 2), (0, 2), (0, 3), (1000, 1)]  # then from the start
    assert [r.planned_cached_tokens for r in measured] == [8, 8, 16, 0]
    assert min(r.sent_s for r in measured) > max(r.sent_s + r.ended_s for r in fills)
    assert [r.error for r in records] == [None] * 6
    first, second = replays_of(tmp_path)
    assert (first.before_start, first.ended, first.is_whole) == (3, 3, False)
    assert (second.conversation, second.repetition, second.ended, second.open) == (1000, 1, 1, 5)


def streamed(delta: Mapping[str, object]) -> str:
    """A streamed answer with one delta."""
    events = [{"choices": [{"delta": delta}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    return "".join([*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"])


def meeting_server() -> type[Handler]:
    """A server that keeps the first two requests until both are there."""
    both, number = threading.Barrier(2), itertools.count()

    class Meeting(Handler):
        def do_POST(self) -> None:
            self.body()
            if next(number) < 2:
                both.wait(PATIENCE_S)
            events = [
                {"choices": [{"delta": {"content": "no"}}]},
                {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            ]
            lines = [*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"]
            self.answer(200, "".join(lines), "text/event-stream")

    return Meeting


def test_two_load_processes_store_their_conversations(tmp_path: Path) -> None:
    """The first one may send all the rest before the second one gets its first answer."""
    path = write_rows(tmp_path / "e.jsonl", [row for name in "abcd" for row in edge_rows(name)])
    replay = AgentTrace(file=path.name, delay_scale=0)
    load = Load(user="agent_trace", users=2, processes=2, requests=12, output="natural", agent_trace=replay)
    with listening(meeting_server()) as url:
        driven(tmp_path, url, load, trace_file=str(path))
    replays = replays_of(tmp_path)
    assert sum(one.ended for one in replays) == 12
    assert [one.place for one in replays] == [one.conversation // 1000 % 4 for one in replays]
    assert {0, 1000} <= {one.conversation for one in replays}, "those of both processes"


def bash_rows(id: str, *commands: str) -> list[dict[str, object]]:
    """A conversation with one recorded command a step, and a result after each but the last."""
    rows: list[dict[str, object]] = [{"role": "user", "content": f"Do {id}.", "tools": [LIST_FILES]}]
    for at, command in enumerate(commands):
        rows.append({"role": "assistant", "tool_calls": [call(f"c{at}", "bash", json.dumps({"command": command}))]})
        if at + 1 < len(commands):
            rows.append({"role": "tool", "tool_results": [{"tool_call_id": f"c{at}", "content": "ok"}]})
    return [{"conversation_id": id, "turn": turn, **row} for turn, row in enumerate(rows, start=1)]


def shell_server(seen: list[tuple[str | None, dict[str, object]]], *commands: str) -> type[Handler]:
    """A server that calls `bash` with one command after the other; an empty one is an answer with text only."""
    left = list(commands)

    class Shell(Handler):
        def do_POST(self) -> None:
            seen.append((self.headers.get("X-Session-ID"), json.loads(self.body())))
            arguments = json.dumps({"command": left[0]}) if left[0] else ""
            function = {"name": "bash", "arguments": arguments}
            delta = (
                {"tool_calls": [{"index": 0, "id": "x", "function": function}]} if left.pop(0) else {"content": "no"}
            )
            self.answer(200, streamed(delta), "text/event-stream")

    return Shell


def test_each_conversation_is_sent_once_and_each_answer_is_scored(tmp_path: Path) -> None:
    rows = [*bash_rows("boat", "ls | wc -l", "cat a", "echo x"), *bash_rows("house", "grep x . | head -5"),
            *bash_rows("shed", "ls")]  # fmt: skip
    path = write_rows(tmp_path / "e.jsonl", rows)
    trace = AgentTrace(file=path.name, conversations=2, score="inline-iou", session_header="X-Session-ID")
    body = {"seed": 42, "chat_template_kwargs": {"enable_thinking": False}}
    load = Load(user="agent_trace", requests=4, output="natural", extra_body=body, agent_trace=trace)
    seen: list[tuple[str | None, dict[str, object]]] = []
    with listening(shell_server(seen, "ls; wc x", "", "ls", "rg x; ls")) as url:
        records = driven(tmp_path, url, load, trace_file=str(path))
    assert [(r.conversation, r.turn, r.action_iou) for r in records] == [
        (0, 1, 1.0), (0, 2, 0.0), (0, 3, None), (1000, 1, 1 / 3)]  # fmt: skip
    assert [session for session, _ in seen] == ["boat", "boat", "boat", "house"]
    assert all(sent["seed"] == 42 and sent["chat_template_kwargs"] == {"enable_thinking": False} for _, sent in seen)
    assert {sent["temperature"] for _, sent in seen} == {0}


def test_steps_after_a_failed_one_are_missing_and_no_other_conversation_replaces_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "e.jsonl", [*bash_rows("boat", "ls", "cat a", "wc a"), *bash_rows("house", "ls")])
    trace = AgentTrace(file=path.name, conversations=2, score="inline-iou")
    load = Load(user="agent_trace", requests=4, output="natural", output_tokens=8, agent_trace=trace)
    with spawned("--preset", "instant", "--served-model-name", "m", "--fault", "503@2") as server:
        records = driven(tmp_path, server.url, load, trace_file=str(path))
    assert [(r.conversation, r.turn, r.error, r.action_iou) for r in records] == [
        (0, 1, None, 0.0), (0, 2, "rejected", 0.0), (1000, 1, None, 0.0)]  # fmt: skip
