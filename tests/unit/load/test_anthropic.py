"""Anthropic's Messages API: requests, streams as llama.cpp sends them, and whole messages."""

import json
from typing import Any

import msgspec
import pytest

from harness.load.anthropic_api import as_chat_completion, as_chat_event
from harness.load.exchange import Exchange
from harness.load.openai_api import Answer, Call, Tools, encode_request, tool_call_message, tool_result_message
from harness.load.sse import Event
from harness.scenario import Load

LOAD = Load(user="agent", endpoint="messages", requests=1, output="natural")
START = {"type": "message_start", "message": {"model": "tiny", "content": [], "usage": {
    "cache_read_input_tokens": 6, "input_tokens": 20, "output_tokens": 0}}}  # fmt: skip
END = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}}
STOP = {"type": "message_stop"}


def delta(index: int = 0, **part: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": part}


def started(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def received(*events: dict[str, Any]) -> Answer:
    exchange = Exchange("1", messages=True, status=200, sent_ns=0)
    exchange.headers["content-type"] = "text/event-stream"
    stream = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)
    exchange.arrivals.reads_ns.append(1)
    exchange.parsed.append(0)
    exchange.body = [(0, stream)]
    exchange.complete = True
    return exchange.finish_answer()


def test_a_request_has_system_text_blocks_tools_and_results() -> None:
    tools = Tools.first(2, "required")
    call = Call("call_1", "read_file", '{"path": "a"}')
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "fix it"},
        tool_call_message("", call),
        tool_result_message(call, "text"),
        {"role": "user", "content": "go on"},
    ]
    body = json.loads(encode_request(LOAD, "m", messages, 9, tools.fields()))  # type: ignore[arg-type]
    given = body.pop("tools")
    assert body == {
        "model": "m", "max_tokens": 9, "temperature": 0, "stream": True, "system": "Be brief.",
        "tool_choice": {"type": "any"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "fix it"}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "call_1", "name": "read_file", "input": {"path": "a"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "text"},
                {"type": "text", "text": "go on"}]},
        ],
    }  # fmt: skip
    assert [tool["name"] for tool in given] == ["read_file", "search"]
    assert given[0]["input_schema"]["required"] == ["path"]


def test_a_stream_has_text_reasoning_calls_and_all_prompt_tokens() -> None:
    answer = received(
        START, started(0, type="thinking", thinking=""), delta(type="thinking_delta", thinking="hm"),
        started(1, type="text", text=""), {"type": "ping"}, delta(1, type="text_delta", text="I "),
        delta(1, type="text_delta", text="read"), {"type": "content_block_stop", "index": 1},
        started(2, type="tool_use", id="t1", name="read_file", input={}),
        delta(2, type="input_json_delta", partial_json='{"path":'),
        delta(2, type="input_json_delta", partial_json='"a"}'),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}}, STOP,
    )  # fmt: skip
    assert (answer.error, answer.done, answer.text, answer.model) == (None, True, "I read", "tiny")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (26, 6, 7)
    assert (answer.finish, answer.reasoning_chunks, answer.tool_chunks) == ("tool_calls", 1, 3)
    assert [(call.id, call.name, call.arguments) for call in answer.calls] == [("t1", "read_file", '{"path":"a"}')]


def test_later_counts_and_an_end_token_count() -> None:
    late = END | {"usage": {"input_tokens": 30, "cache_read_input_tokens": 10, "output_tokens": 4}}
    answer = received(START, delta(type="text_delta", text="a"), late, STOP)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens, answer.textless) == (40, 10, 4, 1)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((START, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}), "stream_error"),
        ((START, delta(type="text_delta", text="a")), "truncated"),
        ((START, END, STOP), "empty"),
        ((START, {"type": "surprise"}, delta(type="text_delta", text="a"), STOP), "stream_error"),
    ],
)
def test_a_broken_stream_is_a_failed_request(events: tuple[dict[str, Any], ...], error: str) -> None:
    assert received(*events).error == error


def test_what_is_no_json_and_wrong_types_stay_to_be_judged() -> None:
    raw = Event("message_delta", b"{")
    assert as_chat_event(raw) == raw
    answer = received(
        START | {"message": 7}, delta(0, type="text_delta", text=7), END | {"usage": {"output_tokens": "4"}}, STOP
    )
    assert answer.error == "empty" and answer.output_tokens is None and "usage.completion_tokens" in answer.bad


def test_a_whole_message_becomes_a_completion() -> None:
    content = [{"type": "text", "text": "I "}, {"type": "text", "text": "do"},
               {"type": "tool_use", "id": "t", "name": "n", "input": {"a": 1}}]  # fmt: skip
    raw = json.dumps(
        {"content": content, "model": "m", "stop_reason": "max_tokens", "usage": {"input_tokens": 3}}
    ).encode()
    body = msgspec.json.decode(as_chat_completion(raw))
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"] == {"prompt_tokens": 3}
    assert body["choices"][0]["message"]["content"] == "I do"
    assert as_chat_completion(b'{"error": {"message": "no"}}') == b'{"error": {"message": "no"}}'
