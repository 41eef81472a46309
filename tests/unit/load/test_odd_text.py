"""What is odd about the text of an answer; refusals, models and fingerprints in streams. No record has the text."""

import json
from typing import Any

import pytest

from harness.load.exchange import Exchange
from harness.load.odd_text import classify_text
from harness.load.openai_api import Answer
from harness.simulated.wire import WORDS


def stream(*parts: dict[str, Any], finish: str = "stop") -> Answer:
    """The answer of a stream whose events differ in these fields; `delta` is that of the only choice."""
    events: list[dict[str, Any]] = []
    for part in parts:
        choice = {"index": 0, "delta": part.get("delta", {}), "finish_reason": None}
        events.append({"choices": [choice], "model": "m"} | {key: part[key] for key in part if key != "delta"})
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return received(*events)


def received(*events: dict[str, Any], messages: bool = False) -> Answer:
    exchange = Exchange("1", messages=messages, status=200, sent_ns=0)
    exchange.headers["content-type"] = "text/event-stream"
    exchange.arrivals.reads_ns.append(1)
    exchange.parsed.append(0)
    exchange.body = [(0, b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events) + b"data: [DONE]\n\n")]
    exchange.complete = True
    return exchange.finish_answer()


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("", "blank"), (" \n\t\n", "blank"), ("\u00a0\u2003", "blank"),
        ("<unused49>" * 32, "reserved"), ("<unused7> <unused12>\n", "reserved"), ("<pad>", "reserved"),
        ("<|reserved_special_token_5|>" * 3, "reserved"), ("[UNUSED_TOKEN]", "reserved"),
        ("[UNUSED_TOKEN_145]", "reserved"), ("<|endoftext|>" * 4, "reserved"),
        ("<\uff5c\u2581pad\u2581\uff5c>", "reserved"),
        ("<SPECIAL_20>[control_8]", "reserved"),
        ("G" * 24, "repeated"), ("!" * 16, "repeated"), ("@@@@" * 9, "repeated"), ("\ufffd" * 20, "repeated"),
        ("the " * 16, "repeated"), (" no" * 16, "repeated"), ("The" + "!" * 40, "repeated"), ("ha" * 20, "repeated"),
        # Labels, numbers, short repetitions, phrases, and texts that have such tokens in them.
        ("positive", None), ("7", None), ("10000000000", None), ("no no no no", None), ("ha" * 6, None),
        ("I am a student. " * 20, None), ("one two " * 30, None), ("<s> is a tag", None), ("[s] and <pad> here", None),
        ("<think>yes</think>", None), ("[1, 2, 3]", None),
        ('{"label": "a"}' + "\n" * 50, None), ("Yes." + "\n" * 99, None),
        (" ".join(WORDS[:40]), None), ("\u00e4\u00f6\u00fc " + " ".join(WORDS[:3]), None),
    ],
)  # fmt: skip
def test_a_text(text: str, odd: str | None) -> None:
    assert classify_text([text]) == classify_text(list(text)) == odd


def test_reasoning_is_classified_where_nothing_else_is_visible() -> None:
    assert classify_text([], ["G" * 30]) == classify_text(["\n"], ["G" * 30]) == "repeated"
    assert classify_text(["four"], ["G" * 30]) is classify_text(["\n"], ["two and two"]) is None


def test_only_the_start_of_a_long_text_counts() -> None:
    assert classify_text([" ".join(WORDS[:20]) * 40 + "!" * 100_000]) is None
    assert classify_text(["!" * 1_000_000]) == "repeated"


def test_a_stream_is_classified_when_it_is_complete() -> None:
    sign = {"delta": {"content": "!"}}
    assert stream(*[sign] * 20, finish="length").odd_text == "repeated"
    assert stream(*[{"delta": {"reasoning_content": "!"}}] * 20, finish="length").odd_text == "repeated"
    assert stream({"delta": {"content": " \n"}}).odd_text == "blank"
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    assert stream({"delta": {"tool_calls": [call], "content": "\n"}}).odd_text is None
    empty = stream({"delta": {"content": ""}})
    assert (empty.error, empty.odd_text) == ("empty", None)
    cut = Exchange("1", status=200, sent_ns=0)
    cut.headers["content-type"] = "text/event-stream"
    assert cut.finish_answer().odd_text is None


def test_a_refusal_is_noted_in_its_channel_and_as_a_reason_of_anthropic() -> None:
    refused = stream({"delta": {"refusal": "I can"}}, {"delta": {"refusal": "not"}})
    assert (refused.error, refused.refused, refused.finish) == (None, True, "stop")
    assert not stream({"delta": {"content": "I cannot", "refusal": None}}).refused
    start = {"type": "message_start", "message": {"model": "a", "usage": {"input_tokens": 3}}}
    text = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "No."}}
    end = {"type": "message_delta", "delta": {"stop_reason": "refusal"}, "usage": {"output_tokens": 2}}
    answer = received(start, text, end, {"type": "message_stop"}, messages=True)
    assert (answer.error, answer.finish, answer.model) == (None, "content_filter", "a")


def test_a_fingerprint_is_that_of_the_text() -> None:
    first, other = ({"delta": {"content": "a"}, "system_fingerprint": name} for name in ("fp_1", "fp_2"))
    assert stream(first, first).fingerprint == "fp_1"
    assert stream(first, other, first).fingerprint == "fp_1 then fp_2"
    assert stream(first, {"delta": {"content": "b"}, "system_fingerprint": None}).fingerprint == "fp_1"
    assert stream({"delta": {"role": "assistant"}, "system_fingerprint": "fp_9"}, first).fingerprint == "fp_1"
    assert stream({"delta": {"content": "a"}, "system_fingerprint": 7}).fingerprint is None
