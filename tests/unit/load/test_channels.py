"""Generated text in every form in which servers send it, and text in no known form."""

import json
from typing import Any

import pytest

from harness.load.anthropic_api import as_chat_completion
from harness.load.channels import is_blank, read_output
from harness.load.exchange import Collector, Exchange
from harness.load.openai_api import Answer, note_whole_response
from harness.records.records import BadField

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(body: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps(body).encode()


def delta(finish: str | None = None, **part: Any) -> bytes:
    return event({"object": "chat.completion.chunk", "choices": [{"delta": part, "finish_reason": finish}]})


ROLE, WORD, STOP, DONE = delta(role="assistant", content=""), delta(content="one"), delta("stop"), b"data: [DONE]\n\n"


def exchange_of(*events: bytes, messages: bool = False) -> Exchange:
    """The exchange of an answer whose events came in a read each, the first one with the headers, after i + 1 s."""
    exchange = Exchange(id="x", messages=messages, sent_ns=0)
    collector = Collector(exchange)
    for number, data in enumerate([HEAD, *events, b""]):
        exchange.arrivals.append(number * 10**9, None)
        collector.parse(data)
        exchange.process()
    exchange.finish_answer()
    exchange.add_times()
    return exchange


def answer_of(*events: bytes, messages: bool = False) -> Answer:
    return exchange_of(*events, messages=messages).answer


def thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": [{"type": "text", "text": text}]}


# A delta or a message, and its visible text and reasoning.
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "content": ({"content": "a"}, "a", ""),
    "refusal": ({"content": None, "refusal": "no"}, "no", ""),
    "completions": ({"text": "a", "logprobs": None, "finish_reason": None}, "a", ""),
    **{
        name: ({"content": "", name: "hm"}, "", "hm")
        for name in ("reasoning_content", "reasoning", "reasoning_text", "reasoning_summary", "thinking", "thought")
    },
    "two fields with the same reasoning": ({"reasoning": "hm", "reasoning_content": "hm"}, "", "hm"),
    "reasoning and content": ({"reasoning": "hm", "content": "a"}, "a", "hm"),
    "reasoning in an object": ({"reasoning_content": {"text": "hm"}}, "", "hm"),
    "reasoning in an object of an object": ({"reasoning_content": {"reasoningText": {"text": "hm"}}}, "", "hm"),
    "parts": ({"content": [{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}]}, "ab", ""),
    "a part": ({"content": {"type": "text", "text": "a"}}, "a", ""),
    "texts": ({"content": ["a", "b"]}, "ab", ""),
    "a part with a value": ({"content": [{"type": "text", "text": {"value": "a", "annotations": []}}]}, "a", ""),
    "a thinking part": ({"content": [thinking("hm"), {"type": "text", "text": "a"}]}, "a", "hm"),
    "a thinking part with a text": ({"content": [{"type": "thinking", "thinking": "hm"}]}, "", "hm"),
    "a summary": ({"content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}]}, "", "hm"),
    "details": ({"content": "", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}, "", "hm"),
    "details next to it": ({"reasoning": "hm", "reasoning_details": [{"type": "r.text", "text": "hm"}]}, "", "hm"),
    "blocks": ({"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}]}, "", "hm"),
    "the analysis of gpt-oss": ({"channel": "analysis", "content": "hm"}, "", "hm"),
    "its answer": ({"channel": "final", "content": "a"}, "a", ""),
    "what was said": ({"audio": {"id": "x", "transcript": "a"}}, "a", ""),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_text_counts_in_every_form(form: str) -> None:
    part, visible, reasoning = FORMS[form]
    output = read_output(part)
    assert (output.visible, output.reasoning, output.unread, output.unknown) == (visible, reasoning, {}, {})
    is_completion = "text" in part
    choice = {**part, "finish_reason": None} if is_completion else {"delta": part, "finish_reason": None}
    answer = answer_of(ROLE, event({"choices": [choice]}), WORD, STOP, DONE)
    assert (answer.error, answer.chunks_s, answer.bad, answer.unread) == (None, [2.0, 3.0], {}, None)
    assert (answer.text, answer.reasoning_chunks) == (visible + "one", int(not visible))
    assert answer.first_visible_s == (2.0 if visible else 3.0)

    whole = Answer(None, None)
    message = part if is_completion else {"message": {"role": "assistant", **part}}
    note_whole_response(json.dumps({"choices": [message]}).encode(), {}, whole, embeddings=False)
    assert (whole.error, whole.text, whole.bad) == (None, visible, {})


@pytest.mark.parametrize("choice", [{"message": {"content": "a"}}, {"delta": {}, "text": "a"}, {"text": "a"}])
def test_a_stream_of_messages_or_of_texts_has_tokens(choice: dict[str, Any]) -> None:
    answer = answer_of(event({"choices": [choice]}), STOP, DONE)
    assert (answer.error, answer.text, answer.chunks_s) == (None, "a", [1.0])


def test_sound_and_calls_are_tokens_without_text() -> None:
    sound: dict[str, Any] = {"audio": {"id": "x", "data": "UklG"}}
    call: dict[str, Any] = {"function_call": {"name": "f", "arguments": ""}}
    one_call: dict[str, Any] = {"tool_calls": {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}}
    answer = answer_of(delta(**sound), delta(**call), delta(**one_call), STOP, DONE)
    assert (answer.chunks_s, answer.tool_chunks) == ([1.0, 2.0, 3.0], 2)
    assert [(call.id, call.name, call.arguments) for call in answer.calls] == [("1", "f", "{}")]
    assert (answer.unread, answer.first_text_s, answer.first_visible_s) == (None, None, 1.0)


HIDDEN = [{"type": "reasoning.encrypted", "data": "x"}]


def test_hidden_reasoning_is_a_token_without_text() -> None:
    empty = delta(content=[thinking("")])
    answer = answer_of(ROLE, empty, delta(reasoning_details=HIDDEN), WORD, STOP, DONE)
    assert (answer.chunks_s, answer.textless, answer.unread, answer.bad) == ([4.0], 3, None, {})


@pytest.mark.parametrize(
    ("part", "field", "kind"),
    [
        ({"content": 7}, "content", "number"),
        ({"content": True}, "content", "boolean"),
        ({"content": [{"type": "poem", "verse": "a"}]}, "content", "array"),
        ({"reasoning": {"steps": ["a"]}}, "reasoning", "object"),
        ({"tool_calls": "f()"}, "tool_calls", "string"),
    ],
)
def test_a_channel_of_no_known_form_makes_the_times_unknown(part: dict[str, Any], field: str, kind: str) -> None:
    answer = answer_of(ROLE, delta(**part), WORD, STOP, DONE)
    assert (answer.error, answer.chunks_s, answer.unread) == (None, [3.0], 1)
    assert answer.bad == {field: BadField(field, "type", kind)}


@pytest.mark.parametrize(
    "choices", [[{"delta": "hm"}], [{"delta": ["hm"]}], ["hm"], {"0": {"delta": {"content": "hm"}}}]
)  # fmt: skip
def test_a_choice_of_no_known_form_makes_the_times_unknown(choices: Any) -> None:
    answer = answer_of(event({"choices": choices}), WORD, STOP, DONE)
    assert (answer.error, answer.chunks_s, answer.unread, len(answer.bad)) == (None, [2.0], 1, 1)


UNKNOWN = [delta(inner_voice=word) for word in ("so", " what", " now")]
STRAY = [event({"reasoning": word, "choices": []}) for word in ("so", " what", " now")]


@pytest.mark.parametrize(("events", "name"), [(UNKNOWN, "inner_voice"), (STRAY, "reasoning")])
def test_text_in_an_unknown_field_makes_the_times_unknown(events: list[bytes], name: str) -> None:
    answer = answer_of(ROLE, *events, WORD, STOP, DONE)
    assert (answer.error, answer.chunks_s, answer.unread) == (None, [5.0], 3)
    assert answer.bad == {name: BadField(name, "unknown", "text")}


def test_an_answer_in_an_unknown_field_alone_is_named() -> None:
    answer = answer_of(ROLE, *UNKNOWN, STOP, DONE)
    assert answer.error == "empty" and "inner_voice" in str(answer.message)
    answer = Answer(None, None)
    note_whole_response(b'{"choices": [{"message": {"inner_voice": "so"}}]}', {}, answer, embeddings=False)
    assert answer.error == "empty" and "inner_voice" in str(answer.message)


@pytest.mark.parametrize(
    "events",
    [
        [delta(status="thinking")] * 3,  # again and again the same
        [delta(status=f"{number} % of the prompt") for number in range(3)],
        [delta(response_id=f"id-{number}", content="") for number in range(3)],
        [delta(inner_voice="so")],  # once: a setting
        [delta(inner_voice=" ")] * 3,
        [delta(content="", logprobs={"content": [{"token": token}]}) for token in "abc"],
        [delta(inner_voice=word, content="one") for word in "abc"],  # next to text
        [event({"choices": [], "message": f"place {number} in the queue"}) for number in range(3)],
        [event({"type": "ping", "id": number}) for number in range(3)],
        [event({"choices": [{"delta": []}]})],  # an empty object of PHP
        [delta(annotations=[{"type": "url_citation", "url_citation": {"title": title}}]) for title in "abc"],
    ],
)
def test_what_is_no_text_changes_nothing(events: list[bytes]) -> None:
    answer = answer_of(ROLE, *events, WORD, STOP, DONE)
    assert (answer.error, answer.unread, answer.chunks_s[-1]) == (None, None, 2.0 + len(events))


def test_unknown_fields_are_bounded() -> None:
    events = [delta(**{f"field{number}": word}) for word in ("a", "b") for number in range(99)]
    answer = answer_of(*events, WORD, STOP, DONE)
    assert len(answer.bad) == 8 and answer.unread == 16
    assert [len(name) for name in answer_of(*[delta(**{"x" * 999: word}) for word in "ab"], STOP, DONE).bad] == [64]


def deep(levels: int) -> Any:
    return "a" if not levels else [deep(levels - 1)]


def test_parts_in_parts_are_read_to_a_depth() -> None:
    assert read_output({"content": deep(5)}).visible == "a"
    assert read_output({"content": deep(50)}).unread


# Anthropic's events.


def block(**part: Any) -> bytes:
    return event({"type": "content_block_delta", "index": 0, "delta": part})


END = [event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}), event({"type": "message_stop"})]


def test_messages_have_text_in_every_form() -> None:
    hidden = event({"type": "content_block_start", "content_block": {"type": "redacted_thinking", "data": "x"}})
    events = [hidden, block(type="signature_delta", signature="x"), block(type="thinking_delta", thinking="hm"),
              block(text="a"), block(type="text_delta", text=[{"type": "text", "text": "b"}])]  # fmt: skip
    answer = answer_of(*events, *END, messages=True)
    assert (answer.error, answer.text, answer.chunks_s) == (None, "ab", [3.0, 4.0, 5.0])
    assert (answer.reasoning_chunks, answer.textless, answer.unread) == (1, 2, None)


def test_a_part_of_a_message_of_no_known_type_makes_the_times_unknown() -> None:
    parts = [block(type="musing_delta", musing=word) for word in ("so", " what")]
    answer = answer_of(*parts, block(type="text_delta", text="a"), *END, messages=True)
    assert (answer.error, answer.chunks_s, answer.unread) == (None, [3.0], 2)
    assert answer.bad == {"musing_delta": BadField("musing_delta", "unknown", "text")}


def test_a_whole_message_has_calls_that_the_server_runs() -> None:
    content = [{"type": "server_tool_use", "id": "1", "name": "search", "input": {}}]
    assert b'"name":"search"' in as_chat_completion(json.dumps({"content": content}).encode())


# Blanks.


@pytest.mark.parametrize(("text", "blank"), [("", True), (" \n", True), ("\u200b\n\ufeff", True), (" a", False)])
def test_a_blank_has_nothing_to_see(text: str, blank: bool) -> None:
    assert is_blank(text) is blank


@pytest.mark.parametrize(
    ("first", "text_s"),
    [
        ([delta(content="\n")], 3.0),
        ([delta(reasoning=" ")], 3.0),
        ([delta(content=[{"type": "text", "text": "\u200b"}])], 3.0),
        ([delta(content=" ")] * 5, 7.0),  # equal events are decoded until there is text
        ([delta(tool_calls=[{"index": 0, "function": {"name": "f"}}])], None),
        ([delta(reasoning="hm")], None),
    ],
)
def test_the_first_text_is_noted_where_it_is_not_the_first_chunk(first: list[bytes], text_s: float | None) -> None:
    answer = answer_of(ROLE, *first, WORD, WORD, delta(content="\n"), STOP, DONE)
    assert (answer.chunks_s[0], answer.first_text_s) == (2.0, text_s)
    assert answer_of(ROLE, *first, STOP, DONE).first_text_s is None
