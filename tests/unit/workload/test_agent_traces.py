"""Recorded conversations of agents: what each format says, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import HarnessError
from harness.workload.agent_traces import conversation, trace_index
from harness.workload.agent_traces.conversation import (
    BlockPart,
    Conversation,
    FillerPart,
    MessagePart,
    RecordedCall,
    TraceStep,
    dependencies_by_time,
    prompt_parts,
)
from harness.workload.agent_traces.trace_index import find_conversations, read_conversation
from tests.support.agent_traces import (
    LIST_FILES,
    Json,
    call,
    copilot_session,
    edge_rows,
    made_files,
    otel_session,
    read_all,
    read_weka,
    says,
    span,
    sub_agent,
    tracelab_row,
    tracelab_rows,
    weka_file,
    weka_request,
    weka_with_sub_agents,
    write_document,
    write_rows,
)
from tests.support.wording import Wording


def problem(path: Path) -> str:
    """What is wrong with a trace, without the path of its folder."""
    with pytest.raises(HarnessError) as caught:
        read_all(path)
    assert "\n" not in caught.value.what and caught.value.next_step
    return caught.value.what.removeprefix(f"{path.parent}/")


def place_of(text: str) -> str:
    """Line, field and value of a problem: `3: turn (got 4)`."""
    match = re.fullmatch(r"[^:]+:(\d+): ([^:\s]+): .*?( \(got .*)?", text)
    assert match is not None, text
    return f"{match[1]}: {match[2]}{match[3] or ''}"


def messages(made: Conversation, step: int) -> list[Json]:
    return [part.message for part in prompt_parts(made, made.steps[step]) if isinstance(part, MessagePart)]


def blocks(step: TraceStep) -> list[int]:
    return [one for part in step.parts if isinstance(part, BlockPart) for one in part.ids]


def tails(step: TraceStep) -> list[int]:
    return [part.tokens for part in step.parts if isinstance(part, FillerPart)]


# --- The file


def test_the_keys_of_the_first_object_show_the_format(tmp_path: Path) -> None:
    for name, path in made_files(tmp_path).items():
        places = find_conversations(path)
        assert [place.format for place in places] == [name] * len(places)
        assert all(read_conversation(place).format == name for place in places)


def test_keys_within_values_and_a_long_first_value_do_not_mislead(tmp_path: Path) -> None:
    row = {"text": "x" * 100_000 + '", "spans": [', "more": {"trace_id": 1, "spans": [{"turns": 1}]}, **edge_rows()[0]}
    path = write_rows(tmp_path / "a.jsonl", [row])
    assert find_conversations(path)[0].format == "edge-agentic"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as editors of Windows start a file
    assert [len(one.steps) for one in read_all(path)] == [1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "it does not start with a JSON object"),
        ("[1]", "it does not start with a JSON object"),
        ('{"a": {"spans": 1}, "trace_id": ', "its first object has the keys 'a, trace_id'"),
    ],
)
def test_an_unknown_format_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    assert problem(path) == f"trace.json:1: the format of the trace is not known: {found}"


def test_a_folder_is_read_in_the_order_of_names_and_only_one_conversation_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    folder.mkdir()
    made_files(folder)
    write_rows(tmp_path / "a.jsonl", edge_rows())
    (tmp_path / "readme.md").write_text("no trace")
    places = find_conversations(tmp_path)
    assert [(place.path.name, len(place.places) // 3) for place in places] == [
        ("a.jsonl", 6), ("copilot.jsonl", 1), ("copilot.jsonl", 1), ("edge.jsonl", 6), ("edge.jsonl", 6),
        ("otel.json", 1), ("tracelab.jsonl", 3), ("weka.json", 1)]  # fmt: skip
    (tmp_path / "empty").mkdir()
    with pytest.raises(HarnessError, match=r"no file of the folder ends with \.json"):
        find_conversations(tmp_path / "empty")


def test_documents_may_be_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "w.jsonl", [weka_with_sub_agents(), {}, weka_file(weka_request(0, 4, [1]), id="last")])
    places = find_conversations(path)
    assert [read_conversation(places[at]).id for at in (0, 2)] == ["w", "last"]
    assert problem(path).startswith("w.jsonl:2: Object missing required field")


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(tmp_path / "none.json") == "none.json: the trace cannot be read (No such file or directory)"
    path = write_document(tmp_path / "w.json", weka_with_sub_agents())
    monkeypatch.setattr(trace_index, "MAX_PIECE_BYTES", 500)
    assert problem(path) == "w.json:1: the line has more than 500 bytes"
    write_document(path, weka_with_sub_agents(), indent=1)
    assert problem(path).startswith("w.json: the document has ")
    rows = write_rows(tmp_path / "t.jsonl", [{**row, "tools": []} for row in tracelab_rows()])
    assert problem(rows).startswith("t.jsonl:1: the conversation has ")
    monkeypatch.setattr(trace_index, "MAX_ROWS", 2)
    assert problem(rows) == "t.jsonl:3: a conversation has at most 2 rows"


# --- edge-agentic


def test_edge_prompts_are_the_recorded_rows(tmp_path: Path) -> None:
    made, other = read_all(write_rows(tmp_path / "e.jsonl", [*edge_rows(), *edge_rows("house")]))
    assert (made.id, other.id, made.agents[0].id, len(made.steps)) == ("boat", "house", "boat", 3)
    first = [says("system", "You paint."), says("user", "Paint the boat.")]
    answer = {"role": "assistant", "content": None, "reasoning_content": "Which colours?",
              "tool_calls": [call("a"), call("b", "look", "{}")]}  # fmt: skip
    results = [{"role": "tool", "tool_call_id": "a", "content": "red.txt"},
               {"role": "tool", "tool_call_id": "b", "content": "a boat"}]  # fmt: skip
    assert messages(made, 0) == first
    assert messages(made, 1) == [*first, answer, *results]
    assert messages(made, 2) == [*messages(made, 1), says("assistant", "It is red."), says("user", "Blue, please.")]
    assert [step.depends_on for step in made.steps] == [(), (0,), (1,)]
    assert [step.delay_s for step in made.steps] == [0.0, 0.25, 3.0]
    assert [step.tools for step in made.steps] == [[LIST_FILES]] * 3
    assert [step.max_output_tokens for step in made.steps] == [None, None, 9]
    assert made.steps[2].settings == {"temperature": 0.5}
    assert made.steps[0].output == answer and made.steps[2].calls == (
        RecordedCall(name="list_files", arguments='{"folder": "."}'),
    )
    assert {(step.prompt_tokens, step.output_tokens, step.cached_tokens) for step in made.steps} == {(None, None, None)}


@pytest.mark.parametrize(
    ("row", "change", "wrong"),
    [
        (2, {"turn": 4}, "3: turn (got 4)"),
        (0, {"turn": 0}, "1: turn (got 0)"),
        (0, {"role": "tool"}, "1: role (got 'tool')"),
        (3, {"role": "user"}, "4: role (got 'user')"),
        (4, {"role": "assistant"}, "5: role (got 'assistant')"),
        (4, {"content": None}, "5: content"),
        (3, {"content": None},
         "4: content"),
        (2, {"tool_results": []}, "3: tool_results"),
        (2, {"tool_results": [{"tool_call_id": "z", "content": ""}]},
         "3: tool_results[0].tool_call_id (got 'z')"),
        (2, {"delay_seconds": -0.5}, "3: delay_seconds (got -0.5)"),
        (1, {"tool_calls": [{"id": "a", "function": {"name": 7}}]},
         "2: tool_calls[0].function.name (got 7)"),
        (4, {"system": "Again"}, "5: system (got 'Again')"),
        (1, {"conversation_id": "other"},
         "3: conversation_id (got 'boat')"),
        (1, {"conversation_id": 7}, "2: conversation_id (got 7)"),
        (4, {"content": "api_key: sk-abcdefghijklmnop1234", "turn": "api_key: sk-abcdefghijklmnop1234"},
         "5: turn (got 'api_key: ***')"),
    ],
)  # fmt: skip
def test_a_wrong_edge_row_is_named(tmp_path: Path, row: int, change: Json, wrong: str, wording: Wording) -> None:
    rows = edge_rows()
    rows[row] |= change
    told = problem(write_rows(tmp_path / "e.jsonl", rows))
    assert place_of(told) == wrong
    wording(told)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "e.jsonl", edge_rows())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "", lines[1][:40], *lines[2:]]))
    assert problem(path).startswith("e.jsonl:3: JSON is malformed")
    path.write_text(lines[0] + "\n" + '{"conversation_id": "boat", "x": ' + "[" * 100_000)
    assert problem(path) == "e.jsonl:2: nested too deeply"
    path.write_bytes(lines[0].encode() + b'\n{"conversation_id": "b\xff"}\n')
    assert problem(path).startswith("e.jsonl:2: ")


# --- WEKA


def test_weka_blocks_are_full_and_the_tail_has_no_id(tmp_path: Path) -> None:
    made = read_weka(tmp_path, weka_request(0, 11, [7, 8]), weka_request(9, 12, [7, 8, 9]), weka_request(11, 3, []))
    assert [(blocks(step), tails(step)) for step in made.steps] == [([7, 8], [3]), ([7, 8, 9], []), ([], [3])]
    assert [(step.prompt_tokens, step.output_tokens) for step in made.steps] == [(11, 10), (12, 10), (3, 10)]
    assert (made.block_tokens, made.scope) == (4, "conversation")
    assert read_weka(tmp_path, weka_request(0, 4, [1]), hash_id_scope="global").scope == "global"
    rounded_up = write_document(tmp_path / "w.json", weka_file(weka_request(0, 11, [7, 8, 9])))
    wrong = "requests[0].hash_ids: there must be an id for each of the 2 full blocks of `in` (11 tokens) (got 3)"
    assert problem(rounded_up) == f"w.json:1: {wrong}"


def test_the_t_of_a_sub_agent_is_its_end(tmp_path: Path) -> None:
    made = read_all(write_document(tmp_path / "w.json", weka_with_sub_agents()))[0]
    assert [(agent.id, agent.kind, agent.parent, agent.is_joined) for agent in made.agents] == [
        ("w", "", None, True), ("s", "Find", 0, True), ("s", "Find", 0, True)]  # fmt: skip
    assert [(step.agent, step.index, step.start_s) for step in made.steps] == [
        (0, 0, 0.0), (0, 1, 50.0), (0, 2, 57.0), (1, 0, 6.0), (1, 1, 13.0), (2, 0, 6.25)]  # fmt: skip
    # Both start after the first answer; the parent waits for both, then for 50 - 46.25 s, not its think time of 44 s.
    assert [step.depends_on for step in made.steps] == [(), (4, 5), (1,), (0,), (3,), (0,)]
    assert [step.delay_s for step in made.steps] == [0.0, 3.75, 3.0, 0.5, 4.0, 0.75]
    assert made.notes == {}


def test_a_sub_agent_whose_t_is_its_start(tmp_path: Path) -> None:
    """The end would be before the parent's answer: t - duration is 20 s before it."""
    made = read_weka(
        tmp_path,
        weka_request(0, 4, [1], api_time=5.5),
        sub_agent(6.0, 20_000, weka_request(0, 4, [9], api_time=19.0)),
        weka_request(30, 8, [1, 2], api_time=1.0, think_time=24.0),
    )
    assert [(step.start_s, step.depends_on, step.delay_s) for step in made.steps] == [
        (0.0, (), 0.0), (30.0, (2,), 4.0), (6.0, (0,), 0.5)]  # fmt: skip
    assert made.notes == {"started_at_t": 1}


def test_a_sub_agent_that_contradicts_its_parent_is_counted(tmp_path: Path) -> None:
    first, last = weka_request(10, 4, [1], api_time=5.0), weka_request(30, 8, [1, 2])
    before = read_weka(tmp_path, first, sub_agent(3.0, 2_000, weka_request(0, 4, [9])), last)
    assert (before.notes["uncertain_sub_agent"], before.steps[2].delay_s, before.steps[2].depends_on) == (1, 0.0, (0,))
    resumed = read_weka(tmp_path, first, sub_agent(16.0, 900_000, weka_request(0, 4, [9])), last)
    assert (resumed.notes["uncertain_sub_agent"], resumed.notes["started_at_t"]) == (1, 1)
    assert (resumed.steps[2].delay_s, resumed.steps[1].delay_s) == (1.0, 0.0)


def test_the_parent_does_not_wait_for_a_background_agent(tmp_path: Path) -> None:
    made = read_weka(
        tmp_path,
        weka_request(0, 4, [1], api_time=2.0),
        sub_agent(3.0, None, weka_request(0, 4, [9], api_time=30.0), status="async_launched"),
        weka_request(5, 8, [1, 2], api_time=1.0, think_time=3.0),
    )
    assert [(step.start_s, step.depends_on, step.delay_s) for step in made.steps] == [
        (0.0, (), 0.0), (5.0, (0,), 3.0), (3.0, (0,), 1.0)]  # fmt: skip
    assert (made.agents[1].is_joined, made.notes) == (False, {"background_agent": 1})


def test_sub_agents_without_a_parent_before_or_after_them(tmp_path: Path) -> None:
    one = sub_agent(12.0, 10_000, weka_request(0, 4, [9], api_time=1.0), sub_agent(5.0, 2_000, weka_request(0, 4, [8])))
    made = read_weka(tmp_path, one, weka_request(20, 4, [1]), sub_agent(40.0, 10_000, weka_request(1, 4, [7])))
    assert [(step.agent, step.start_s, step.depends_on, step.delay_s) for step in made.steps] == [
        (0, 20.0, (2,), 8.0), (1, 2.0, (), 2.0), (2, 5.0, (1,), 2.0), (3, 31.0, (0,), 11.0)]  # fmt: skip
    assert [agent.parent for agent in made.agents] == [None, 0, 1, 0]


def test_a_think_time_is_never_more_than_the_gap(tmp_path: Path) -> None:
    """After a request without api_time, think_time counts from an earlier answer."""
    made = read_weka(
        tmp_path,
        weka_request(0, 4, [1], api_time=10.0, think_time=0.0),
        weka_request(15, 8, [1, 2], think_time=5.0),
        weka_request(35, 8, [1, 2], think_time=25.0),
        weka_request(50, 8, [1, 2], api_time=3.0, think_time=40.0),
        weka_request(60, 8, [1, 2]),
        weka_request(61, 8, [1, 2]),
    )
    assert [step.delay_s for step in made.steps] == [0.0, 5.0, 20.0, 15.0, 7.0, 1.0]
    assert [step.delay_is_uncertain for step in made.steps] == [False, False, True, True, False, True]
    assert made.notes == {"uncertain_delay": 3}


def test_overlapping_requests_are_not_forced_into_a_chain(tmp_path: Path) -> None:
    made = read_weka(
        tmp_path,
        weka_request(0, 4, [1], api_time=3.0),
        weka_request(5, 8, [1, 2], api_time=20.0, think_time=2.0),
        weka_request(10, 8, [1, 3], api_time=5.0, think_time=0.0),
        weka_request(30, 12, [1, 2, 4], api_time=1.0, think_time=15.0),
    )
    assert [step.depends_on for step in made.steps] == [(), (0,), (0,), (1, 2)]
    assert [step.delay_s for step in made.steps] == [0.0, 2.0, 7.0, 5.0]
    assert made.notes == {"overlap": 1}


def test_whole_seconds_are_no_overlap(tmp_path: Path) -> None:
    made = read_weka(tmp_path, weka_request(0, 4, [1], api_time=5.8), weka_request(5, 4, [1], think_time=0.0))
    assert (made.steps[1].depends_on, made.steps[1].delay_s, made.notes) == ((0,), 0.0, {})


def test_what_is_odd_in_a_weka_file_is_counted(tmp_path: Path) -> None:
    long, other = list(range(100, 120)), list(range(200, 203))
    made = read_weka(
        tmp_path,
        weka_request(0, 80, long, model="a"),
        weka_request(1, 12, other, model="b", out=0),
        weka_request(2, 84, [*long, 120], model="a"),
    )
    assert made.notes == {"better_prefix": 1, "empty_output": 1, "uncertain_delay": 2}
    assert [step.model for step in made.steps] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"in": -1}, "requests[1].in (got -1)"),
        ({"in": 10**30}, "requests[1].in"),
        ({"out": "ten"}, "requests[1].out (got 'ten')"),
        ({"hash_ids": [1, None]}, "requests[1].hash_ids[1]"),
        ({"t": -1}, "requests[1].t (got -1)"),
        ({"t": 1}, "requests[1].t (got 1.0)"),
        ({"type": "other"}, "requests[1].type (got 'other')"),
        ({"model": "x" * 600}, "requests[1].model (got 'xxx"),
    ],
)
def test_a_wrong_weka_request_is_named(tmp_path: Path, change: Json, wrong: str, wording: Wording) -> None:
    made = weka_file(weka_request(2, 4, [1]), {**weka_request(3, 8, [1, 2]), **change})
    told = problem(write_document(tmp_path / "w.json", made))
    assert place_of(told).startswith(f"1: {wrong}") and len(told) < 250
    wording(told)


def test_the_line_of_a_wrong_request_in_an_indented_document(tmp_path: Path) -> None:
    made = weka_file(weka_request(2, 4, [1]), {**weka_request(3, 8, [1, 2]), "out": "ten"})
    path = write_document(tmp_path / "w.json", made, indent=1)
    line = 1 + path.read_text().split('"t": 3.0')[0].rstrip(" \n").count("\n")  # of its bracket
    assert problem(path) == f"w.json:{line}: requests[1].out: Expected `int`, got `str` (got 'ten')"


def test_sub_agents_and_requests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = weka_request(0, 4, [1])
    for _ in range(9):
        entry = sub_agent(5.0, 1_000, entry)
    path = write_document(tmp_path / "w.json", weka_file(entry))
    assert "sub-agents are nested more than 8 deep" in problem(path)
    monkeypatch.setattr("harness.workload.agent_traces.weka.MAX_BLOCKS", 2)
    write_document(path, weka_file(weka_request(0, 4, [1]), weka_request(1, 8, [1, 2])))
    assert problem(path) == "w.json:1: requests[1].hash_ids: a conversation has at most 2 ids"
    assert problem(write_document(path, weka_file())) == "w.json:1: requests: must have at least one request"


# --- OTel


def test_otel_calls_depend_on_what_had_ended(tmp_path: Path) -> None:
    made = read_all(write_document(tmp_path / "o.json", otel_session(), indent=2))[0]
    assert [step.depends_on for step in made.steps] == [(), (0,), (0,), (1, 2)]
    assert [step.delay_s for step in made.steps] == [0.0, 0.5, 1.0, 1.0]
    assert [(step.start_s, step.duration_s) for step in made.steps] == [(0.0, 2.0), (2.5, 2.5), (3.0, 1.0), (6.0, 3.0)]
    assert messages(made, 1)[2:] == [says("assistant", "Beds and a pond."), says("user", "Beds?")]
    assert made.steps[2].output == says("assistant", "Frogs.")
    assert [(step.prompt_tokens, step.output_tokens) for step in made.steps][:2] == [(12, 5), (None, None)]
    assert made.notes == {"overlap": 1}


def test_otel_parts_tools_and_old_names(tmp_path: Path) -> None:
    parts = [
        {"role": "user", "parts": [{"type": "text", "content": "Water?"}, {"type": "text", "content": "Sun?"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "1", "name": "look", "arguments": {"at": "pond"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "response": {"deep": True}}]},
    ]
    answer = [
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "Hm."}, {"type": "text", "content": "Yes."}]}
    ]
    one = span("a", "00", "01", json.dumps(parts), output__messages=json.dumps(answer), usage__prompt_tokens=9,
               usage__completion_tokens=2, tool__definitions=json.dumps([LIST_FILES]), request__max_tokens=50,
               request__temperature=0.2)  # fmt: skip
    one["status"] = {"code": 2}
    made = read_all(write_document(tmp_path / "o.json", {"trace_id": "t", "spans": [one]}))[0]
    assert messages(made, 0) == [
        says("user", "Water?\nSun?"),
        {"role": "assistant", "content": None, "tool_calls": [call("1", "look", '{"at":"pond"}')]},
        {"role": "tool", "tool_call_id": "1", "content": '{"deep":true}'},
    ]
    step = made.steps[0]
    assert step.output == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert (step.prompt_tokens, step.output_tokens, step.max_output_tokens, step.outcome) == (9, 2, 50, "error")
    assert (step.tools, step.settings) == ([LIST_FILES], {"temperature": 0.2})


def test_a_model_call_without_its_messages_is_counted(tmp_path: Path) -> None:
    session = otel_session()
    session["spans"].append(span("lost", "10", "11", None, "Gone."))
    made = read_all(write_document(tmp_path / "o.json", session))[0]
    assert (len(made.steps), made.notes["call_without_messages"]) == (4, 1), "the tool's span is no model call"


def test_a_span_that_was_recorded_twice_is_sent_once(tmp_path: Path) -> None:
    session = otel_session()
    session["spans"].append(session["spans"][0])
    made = read_all(write_document(tmp_path / "o.json", session))[0]
    assert (len(made.steps), made.notes["duplicate"]) == (4, 1)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"start_time": "yesterday"},
         "spans[0].start_time (got 'yesterday')"),
        ({"end_time": "2026-05-04T09:00:00"},
         "spans[0].end_time (got '2026-05-04T09:00:00')"),
        ({"attributes": {"gen_ai.input.messages": "[{]"}},
         "spans[0].attributes.gen_ai.input.messages"),
        ({"attributes": {"gen_ai.input.messages": []}}, "spans[0].attributes.gen_ai.input.messages"),
        ({"attributes": {}}, "spans"),
    ],
)  # fmt: skip
def test_a_wrong_otel_span_is_named(tmp_path: Path, change: Json, wrong: str, wording: Wording) -> None:
    span_ = {**span("a", "00", "01", [says("user", "Hello")]), **change}
    told = problem(write_document(tmp_path / "o.json", {"trace_id": "t", "spans": [span_]}))
    assert place_of(told).startswith(f"1: {wrong}")
    wording(told)


# --- TraceLab


def test_tracelab_keeps_the_blocks_that_were_cached(tmp_path: Path) -> None:
    made = read_all(write_rows(tmp_path / "t.jsonl", tracelab_rows()[::-1]))[0]  # sorted by time
    assert [blocks(step) for step in made.steps] == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 5, 6, 7, 8, 9]]
    assert [tails(step) for step in made.steps] == [[8], [10], [16]]
    assert [step.cached_tokens for step in made.steps] == [130, 200, 64]
    assert [step.delay_s for step in made.steps] == [0.0, 1.5, 0.5]  # after the last output; usage_report is none
    assert [step.duration_s for step in made.steps] == [2.5, 1.0, 3.5]
    assert made.steps[0].calls == (RecordedCall(name="look", duration_s=1.5, failed=True),)


def test_tracelab_rows_of_one_index_are_not_always_the_same(tmp_path: Path) -> None:
    first, second, third = tracelab_rows()
    other = tracelab_row(1, 300, 0, "10:00:05.2Z", "10:00:05.4Z")
    silent = {**tracelab_row(3, 500, 400, "10:00:09Z", "10:00:10Z"), "timing_events": []}
    other_session = {**first, "session_id": "s2"}
    path = write_rows(tmp_path / "t.jsonl", [first, other_session, second, second, other, third])
    made, last = read_all(path)
    assert [step.prompt_tokens for step in made.steps] == [200, 330, 300, 400]
    assert (made.notes, last.id, len(last.steps)) == ({"duplicate": 1}, "s2", 1)
    made = read_all(write_rows(path, [*tracelab_rows(), silent]))[0]
    assert (made.steps[3].delay_s, made.steps[3].delay_is_uncertain, made.steps[3].start_s) == (0.0, True, None)
    assert made.notes == {"uncertain_delay": 1}


def test_a_wrong_tracelab_row_is_named(tmp_path: Path) -> None:
    rows = tracelab_rows()
    rows[1]["prefix_tokens"] = 1
    wrong = "2: input_tokens_total: must be prefix_tokens (1) + newly_append_tokens (130) (got 330)"
    assert problem(write_rows(tmp_path / "t.jsonl", rows)) == f"t.jsonl:{wrong}"
    rows = tracelab_rows()
    rows[2]["timing_events"][0]["timestamp"] = "soon"
    assert problem(write_rows(tmp_path / "t.jsonl", rows)).startswith("t.jsonl:3: timing_events[0].timestamp: ")
    huge = [tracelab_row(at, 10_000_000, 0, f"10:00:{at:02}Z", f"10:01:{at:02}Z") for at in range(60)] * 3
    huge = [{**row, "round_id": str(at)} for at, row in enumerate(huge)]
    assert "at most 1,280,000,000 prompt tokens" in problem(write_rows(tmp_path / "t.jsonl", huge))


# --- Copilot


def test_copilot_has_lengths_only(tmp_path: Path) -> None:
    made = read_all(write_rows(tmp_path / "c.jsonl", [copilot_session()]))[0]
    assert [
        [(part.seed, part.tokens) for part in step.parts if isinstance(part, FillerPart)] for step in made.steps
    ] == [
        [("System user", 60), ("UserMessage user", 40)],
        [("System user", 60), ("UserMessage user", 40), ("ToolResult user", 30), ("tail 1", 20)],
        [("System user", 60), ("UserMessage user", 30)],
    ]
    assert [(step.prompt_tokens, step.output_tokens, step.cached_tokens) for step in made.steps] == [
        (100, 20, 64), (150, 20, 64), (90, 20, 64)]  # fmt: skip
    assert [(step.depends_on, step.delay_s) for step in made.steps] == [((), 0.0), ((0,), 1.5), ((1,), 5.5)]
    assert [step.outcome for step in made.steps] == ["ok", "ok", "cancelled"]
    assert made.steps[0].calls == (
        RecordedCall(name="edit", duration_s=0.4, failed=False), RecordedCall(name="run", failed=True))  # fmt: skip
    assert made.notes == {"cut_segments": 1}
    assert problem(write_rows(tmp_path / "c.jsonl", [copilot_session(turns=[])])).startswith(
        "c.jsonl:1: turns: must have 1"
    )


# --- Dependencies


@pytest.mark.parametrize(
    ("spans", "needed"),
    [
        ([(0, 1), (2, 3), (4, 5)], [(), (0,), (1,)]),
        ([(0, 10), (1, 2), (3, 4), (11, 12)], [(), (), (1,), (0, 2)]),
        ([(0, 0), (0, 0), (0, 0)], [(), (0,), (1,)]),
        ([(0, 5), (0, 5), (5, 6), (5, 6), (6, 7)], [(), (), (0, 1), (0, 1), (2, 3)]),
    ],
)
def test_dependencies_by_time(spans: list[tuple[float, float]], needed: list[tuple[int, ...]]) -> None:
    assert dependencies_by_time(spans) == needed


def test_the_work_for_open_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_OPEN_STEPS", 3)
    spans: Any = [(float(at), 100.0) for at in range(4)]
    assert dependencies_by_time(spans) is None and dependencies_by_time(spans[:3]) == [(), (), ()]
