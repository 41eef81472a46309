"""Agents with tools: their steps under real Locust, and the calls that a server answers with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.load.openai_api import Call, Tools, add_tool_calls, tool_call_message, tool_result_message
from harness.scenario import Load
from harness.scenario.behaviour import Agent, Pause, chance
from harness.simulated import spawned
from tests.load_runs import driven

QUICK = Pause(mean_s=0.01)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Every second answer is a tool call."""
    with spawned("--preset", "instant", "--served-model-name", "m", "--fault", "tool-call@2") as server:
        yield server.url


@pytest.mark.parametrize("stream", [True, False])
def test_the_context_grows_alike_whether_the_model_calls_tools_or_not(
    tmp_path: Path, engine: str, stream: bool
) -> None:
    agent = Agent(steps=4, tools=3, result_tokens=50, tool_time=QUICK)
    load = Load(user="agent", requests=10, output_tokens=12, stream=stream, agent=agent)
    records = driven(tmp_path, engine, load)
    assert [(r.index, r.conversation, r.turn) for r in records] == [
        (index, index // 4 * 4, index % 4 + 1) for index in range(10)
    ]
    assert [r.error for r in records] == [None] * 10
    assert [r.tool_calls for r in records] == [0, 1] * 5
    assert [r.tool_calls_valid for r in records] == [0, 1] * 5
    assert [r.tool_chunks for r in records] == ([0, 12] * 5 if stream else [0] * 10)
    lengths = [r.prompt_tokens or 0 for r in records]
    assert all(50 < after - before < 100 for before, after in zip(lengths[:3], lengths[1:4], strict=True))
    cached = [r.cached_tokens or 0 for r in records]
    assert cached[1] > lengths[0] * 0.8 and cached[3] > lengths[2] * 0.8  # what was sent before comes again


def test_the_plan_says_when_a_task_is_done(tmp_path: Path, engine: str) -> None:
    agent = Agent(steps=5, done=0.4, tool_time=QUICK, choice="none")
    records = driven(tmp_path, engine, Load(user="agent", users=2, requests=20, output_tokens=4, agent=agent))
    begun = [index for index in range(20) if index % 5 == 0 or chance(1, "done", index - 1) < 0.4]
    assert begun[:4] == [0, 3, 5, 7]
    assert [r.conversation for r in records] == [max(b for b in begun if b <= index) for index in range(20)]
    assert {r.tool_calls for r in records} == {0}  # none may be called


def test_sub_agents_work_at_once_and_with_parts_of_their_own(tmp_path: Path, engine: str) -> None:
    agent = Agent(steps=2, sub_agents=3, tool_time=QUICK)
    records = driven(tmp_path, engine, Load(user="agent", requests=14, output_tokens=8, agent=agent))
    assert [(r.conversation, r.turn, r.batch) for r in records] == [
        (0, 1, None), (0, 2, None), (2, 1, 0), (2, 2, 0), (4, 1, 0), (4, 2, 0), (6, 1, 0), (6, 2, 0),
        (8, 1, None), (8, 2, None), (10, 1, 8), (10, 2, 8), (12, 1, 8), (12, 2, 8),
    ]  # fmt: skip
    first, second, *others = records[:8]
    begun = [r.sent_s for r in others[::2]]
    assert first.sent_s + first.ended_s <= min(begun)
    assert max(begun) < min(r.sent_s + r.ended_s for r in others[::2])  # at once
    assert second.sent_s >= max(r.sent_s + r.ended_s for r in others)  # it waits for their reports


def test_a_failed_step_is_tried_again(tmp_path: Path) -> None:
    agent = Agent(steps=3, tool_time=QUICK)
    with spawned("--preset", "instant", "--served-model-name", "m", "--fault", "503@2") as server:
        records = driven(tmp_path, server.url, Load(user="agent", requests=4, output_tokens=4, agent=agent))
    assert [r.error for r in records] == [None, "rejected", None, "rejected"]
    assert [r.turn for r in records] == [1, 2, 3, 1]


def test_calls_are_put_together_from_their_pieces() -> None:
    calls: list[Call] = []
    for delta in (
        {"index": 0, "id": "a", "function": {"name": "search", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"pattern"'}},
        {"index": 1, "id": "b", "function": {"name": "list_files", "arguments": "{"}},
        {"index": 0, "function": {"arguments": ': "x"}'}},
    ):
        add_tool_calls(calls, [delta])
    assert calls == [Call("a", "search", '{"pattern": "x"}'), Call("b", "list_files", "{", index=1)]
    tools = Tools.first(8, "auto")
    assert [tools.is_valid(call) for call in calls] == [True, False]
    assert tools.first_valid(calls) is calls[0]


@pytest.mark.parametrize("indexes", [(1, 2), (0, 0)], ids=["from one", "all alike"])
def test_calls_are_told_apart_however_a_server_numbers_them(indexes: tuple[int, int]) -> None:
    calls: list[Call] = []
    for index, id, name in zip(indexes, ("a", "b"), ("search", "list_files"), strict=True):
        add_tool_calls(calls, [{"index": index, "id": id, "function": {"name": name, "arguments": ""}}])
        for part in ('{"pattern": ', '"x"}'):
            # As vLLM 0.8 did: a new id in each delta.
            add_tool_calls(calls, [{"index": index, "id": f"new-{part}", "function": {"arguments": part}}])
    assert [(call.id, call.name, call.arguments) for call in calls] == [
        ("a", "search", '{"pattern": "x"}'),
        ("b", "list_files", '{"pattern": "x"}'),
    ]


def test_whatever_a_server_sends_is_counted_and_never_an_error() -> None:
    for delta in (5, None, {"index": 7}, {"index": True}, {"index": "0"}, {"function": 1}, {}):
        calls: list[Call] = []
        add_tool_calls(calls, [delta])
        assert all(not Tools.first(4, "auto").is_valid(call) for call in calls)
    for name, arguments in (("rm", "{}"), ("search", "{}"), ("search", "[]"), ("search", '{"pattern": "x"')):
        assert not Tools.first(4, "auto").is_valid(Call("a", name, arguments))
    calls = []
    add_tool_calls(calls, [{"id": "a", "function": {"name": "search", "arguments": {"pattern": "x"}}}])
    assert Tools.first(2, "auto").is_valid(calls[0])  # arguments as an object are taken


def test_the_planned_call_is_valid_and_its_messages_fit_together() -> None:
    tools = Tools.first(20, "auto")
    assert len({one["function"]["name"] for one in tools.definitions}) == 20
    for index in range(-20, 20):
        assert tools.is_valid(tools.planned_call(index))
    call = tools.planned_call(3)
    asked, answered = tool_call_message("", call), tool_result_message(call, "done")
    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] == "call_3"
