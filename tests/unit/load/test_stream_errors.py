"""Errors in any form inside an answer with status 200, events that carry nothing, and events of no known form."""

import json
import time
from typing import Any

import pytest

from harness.load.exchange import Collector, Exchange
from harness.load.openai_api import Answer
from harness.records.records import BadField
from tests.support.wording import Wording

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(data: Any, kind: str | None = None) -> bytes:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return (b"" if kind is None else b"event: %s\n" % kind.encode()) + b"data: %s\n\n" % raw


def delta(finish: Any = None, **part: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": part, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


ROLE, WORD = event(delta(role="assistant", content="")), event(delta(content="one"))
CALL = event(delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "search", "arguments": "{}"}}]))
TEXT = event({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "one", "finish_reason": None}]})
STOP = event(delta(finish="stop"))
USAGE = event({"object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"


def answer_to(*reads: bytes, ended: bool = True, embeddings: bool = False) -> Answer:
    """The answer of a response that came in these reads and whose connection ended."""
    exchange = Exchange(id="x", embeddings=embeddings)
    collector = Collector(exchange)
    for data in (*reads, *((b"",) if ended else ())):
        exchange.arrivals.append(time.monotonic_ns(), None)
        collector.parse(data)
        exchange.process()
    return exchange.finish_answer()


def outcome(answer: Answer) -> tuple[str | None, str | None]:
    return answer.error, answer.message


# What a server sends after some tokens, and the words of the failed request.
ERRORS: dict[str, tuple[bytes, str]] = {
    "openai": (event({"error": {"message": "gone", "type": "internal", "code": 500}}), "internal 500: gone"),
    "openai, with choices": (
        event(delta(content="") | {"error": {"message": "gone", "code": 502}}), "502: gone"),
    "in the choice": (
        event({"choices": [{"index": 0, "delta": {}, "error": {"code": 502, "message": "gone"}}]}), "502: gone"),
    "in the delta": (event(delta(error={"message": "gone", "type": "server_error"})), "server_error: gone"),
    "a text": (event({"error": "CUDA out of memory"}), "CUDA out of memory"),
    "a text with its type": (event({"error": "no memory", "error_type": "generation"}), "no memory"),
    "true": (event({"error": True, "message": "gone", "code": 500}), "500: gone"),
    "a list": (event({"errors": [{"message": "gone"}, {"message": "lost"}]}), "gone; lost"),
    "in a list": (event([{"error": {"code": 503, "message": "gone", "status": "UNAVAILABLE"}}]), "503: gone"),
    "nested": (event({"error": {"code": 500, "error": {"message": "gone"}}}), "500: gone"),
    "without words": (event({"error": {"code": 500}}), "500: no message"),
    "vLLM, older": (
        event({"object": "error", "message": "gone", "type": "BadRequestError", "code": 400}),
        "BadRequestError 400: gone"),
    "Anthropic": (
        event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "error"),
        "overloaded_error: Overloaded"),
    "Anthropic, without its event type": (
        event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
        "overloaded_error: Overloaded"),
    "FastAPI": (event({"detail": "CUDA out of memory"}), "CUDA out of memory"),
    "FastAPI, in front of vLLM": (event({"detail": {"error": {"message": "gone", "code": 500}}}), "gone"),
    "pydantic": (
        event({"detail": [{"type": "missing", "loc": ["body", "messages"], "msg": "Field required"}]}),
        "body.messages: Field required"),
    "message and code": (event({"message": "engine died", "code": 500}), "500: engine died"),
    "message, type and code": (
        event({"message": "engine died", "code": 500, "type": "internal_error"}), "internal_error 500: engine died"),
    "code as a text": (event({"message": "too much", "code": "overloaded"}), "overloaded: too much"),
    "code of another kind": (event({"msg": "bad luck", "code": 1001}), "1001: bad luck"),
    "status": (event({"status": 503, "message": "come back later"}), "503: come back later"),
    "problem+json": (event({"title": "Busy", "status": 503, "detail": "come back later"}), "503: come back later"),
    "status error": (event({"status": "error", "message": "bad luck"}), "error: bad luck"),
    "FastChat": (event({"text": "**NETWORK ERROR**", "error_code": 50001}), "50001: **NETWORK ERROR**"),
    "message only": (event({"message": "the engine is dead"}), "the engine is dead"),
    "not successful": (event({"success": False, "message": "bad luck"}), "bad luck"),
    "camel case": (event({"errorCode": "E1", "errorMessage": "bad luck"}), "E1: bad luck"),
    "Bedrock": (event({"internalServerException": {"message": "bad luck"}}), "bad luck"),
    "Responses API": (
        event({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "bad luck"}}}),
        "response.failed: bad luck"),
    "SGLang's finish": (
        event(delta(finish={"type": "abort", "message": "out of memory", "status_code": 500})), "abort: out of memory"),
    "a JSON text": (event("Internal Server Error"), "Internal Server Error"),
    "plain text": (event(b"Internal Server Error"), "Internal Server Error"),
    "plain text with a mark": (event(b"[ERROR] bad luck"), "[ERROR] bad luck"),
    "printed by Python": (event(b"{'error': 'bad luck'}"), "{'error': 'bad luck'}"),
    "event type error": (event({"message": "bad luck"}, "error"), "bad luck"),
    "event type exception": (event({"message": "bad luck", "code": 500}, "exception"), "500: bad luck"),
    "event type exception, other fields": (
        event({"exc": "RuntimeError", "trace": "HIP error", "content": "one"}, "exception"),
        "exc: RuntimeError; trace: HIP error"),
    "event type of its own": (event({"msg": "bad luck"}, "modelStreamErrorException"), "bad luck"),
    "event type, and plain text": (event(b"bad luck", "error"), "bad luck"),
    "event type, and null": (event(None, "error"), "an error event without a message"),
    "event type, and no data": (b"event: error\n\n", "an error event without a message"),
    "field": (
        b'error: {"code":500,"message":"context size has been exceeded","type":"server_error"}\n\n',
        "server_error 500: context size has been exceeded"),
    "field with a text": (b"error: bad luck\n\n", "bad luck"),
    "outside of events": (b'{"error":{"message":"gone","code":500}}\n\n', "500: gone (sent outside of an event)"),
    "outside of events, in other words": (b'{"detail":"gone"}\n', "gone (sent outside of an event)"),
    "outside of events, after others": (
        b'junk\n{"error":"gone"}\nmore junk\n', "gone (sent outside of an event)"),
    "a traceback": (
        b'Traceback (most recent call last):\n  File "x.py", line 5, in f\nRuntimeError: bad luck\n',
        'Traceback (most recent call last):\n  File "x.py", line 5, in f\nRuntimeError: bad luck (sent outside of an '
        "event)"),
    "a proxy's page": (
        b"<html>\n<head><title>502 Bad Gateway</title></head>\n</html>\n",
        "<html>\n<head><title>502 Bad Gateway</title></head>\n</html> (sent outside of an event)"),
}  # fmt: skip
AROUND = {
    "then done": ([ROLE, WORD], [DONE]),
    "then the end": ([ROLE, WORD], []),
    "at once": ([], [DONE]),
    "then a finish reason": ([ROLE, WORD], [STOP, USAGE, DONE]),
    "after the finish reason": ([ROLE, WORD, STOP, USAGE], [DONE]),
    "after done": ([ROLE, WORD, STOP, USAGE, DONE], []),
    "in an answer with tools": ([ROLE, CALL], [DONE]),
    "in completions": ([TEXT], [DONE]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_inside_a_stream_is_a_failed_request(name: str) -> None:
    broken, words = ERRORS[name]
    for around, (before, after) in AROUND.items():
        for reads in ([STREAM, *before, broken, *after], [STREAM + b"".join([*before, broken, *after])]):
            assert outcome(answer_to(*reads)) == ("stream_error", words), around


@pytest.mark.parametrize("name", [name for name in ERRORS if ERRORS[name][0].endswith(b"\n\n")])
def test_an_error_without_the_blank_line_that_ends_its_event_is_one(name: str) -> None:
    broken, words = ERRORS[name]
    assert outcome(answer_to(STREAM, ROLE, WORD, broken.rstrip(b"\n"))) == ("stream_error", words)
    assert outcome(answer_to(STREAM, ROLE, WORD, STOP, broken.removesuffix(b"\n"))) == ("stream_error", words)


def test_a_last_event_that_is_cut_is_no_error() -> None:
    assert outcome(answer_to(STREAM, ROLE, WORD, STOP, event(delta(content="an error"))[:-9])) == (None, None)
    done = answer_to(STREAM, ROLE, WORD, DONE[:-1])  # llama.cpp ends so
    assert (outcome(done), done.done) == ((None, None), True)


# Events that carry nothing, in an answer with and without a finish reason.
HARMLESS = {
    "null": event(None),
    "nothing": b"data:\n\n",
    "a blank": b"data:  \n\n",
    "an empty object": event({}),
    "an empty text": event(""),
    "nulls": event({"error": None, "choices": None, "object": None}),
    "no error": event({"error": None, "errors": [], "error_code": 0, "success": True}),
    "a comment": b": OPENROUTER PROCESSING\n\n",
    "an empty comment": b":\n\n",
    "ping": event({"type": "ping"}, "ping"),
    "ping, without its event type": event({"type": "ping"}),
    "ping without data": b"event: ping\n\n",
    "ping with text": event(b"2026-11-26 10:00:00", "ping"),
    "heartbeat": event({"time": 5}, "heartbeat"),
    "plain keep-alive": event(b"keep-alive"),
    "id and retry": b"id: 5\nretry: 3000\n\n",
    "metadata": event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}),
    "Azure": event(
        {"choices": [], "id": "", "model": "", "object": "", "prompt_filter_results": [{"prompt_index": 0}]}
    ),
    "usage alone": event({"usage": {"prompt_tokens": 9, "completion_tokens": 2}}),
    "llama.cpp": event({"choices": [], "timings": {"prompt_ms": 5.0}}),
    "llama.cpp, progress": event(delta(role="assistant", content=None) | {"prompt_progress": {"total": 9}}),
    "Groq": event(delta(role="assistant", content="") | {"x_groq": {"id": "r", "error": None}}),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("end", [[STOP, USAGE, DONE], [STOP], [DONE]], ids=["stop, done", "stop", "done"])
def test_an_event_that_carries_nothing_is_ignored(name: str, end: list[bytes]) -> None:
    nothing = HARMLESS[name]
    answer = answer_to(STREAM, nothing, ROLE, nothing, WORD, nothing, WORD, nothing, *end, nothing)
    assert (outcome(answer), answer.text) == ((None, None), "oneone")


UNKNOWN = {
    "another API's": (event({"type": "content_block_delta", "delta": {"text": "one"}}), "it has delta, type"),
    "another API's, with its event type": (
        event({"type": "content_block_delta", "index": 1}, "content_block_delta"),
        "'content_block_delta', it has index, type"),
    "a notice": (event({"message": "the worker goes home"}), "the worker goes home (it has message)"),
    "a number": (event(5), "a JSON number"),
    "a list": (event([5]), "a JSON array"),
    "a text": (event("one"), "a string"),
    "an event that is not JSON": (event(b"half", "progress"), "'progress', its data is not JSON"),
    "text outside of events": (b"junk\n\n", "text outside of events"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_event_of_no_known_form_fails_an_answer_without_a_finish_reason(name: str) -> None:
    unknown, words = UNKNOWN[name]
    message = f"no finish reason, and an event of no known form: {words}"
    for end in ([DONE], []):
        assert outcome(answer_to(STREAM, ROLE, WORD, unknown, *end)) == ("stream_error", message)
    assert outcome(answer_to(STREAM, ROLE, unknown, WORD, STOP, USAGE, DONE)) == (None, None)


def test_an_event_that_is_not_json_still_fails_the_request(wording: Wording) -> None:
    answer = answer_to(STREAM, ROLE, WORD, event(b'{"choices":[{"delta":{"content":"an error'), WORD, STOP, DONE)
    wording(outcome(answer))


@pytest.mark.parametrize("finish", ["error", "abort", "network_error", "cancelled", "insufficient_system_resource"])
def test_a_finish_reason_that_says_that_the_server_gave_up_is_a_failed_request(finish: str, wording: Wording) -> None:
    answer = answer_to(STREAM, ROLE, WORD, event(delta(finish=finish)), DONE)
    wording(outcome(answer))


@pytest.mark.parametrize("finish", ["eos_token", "end_turn", "model_length", {"type": "stop", "matched": 5}])
def test_other_finish_reasons_end_an_answer(finish: Any) -> None:
    answer = answer_to(STREAM, ROLE, WORD, event(delta(finish=finish)), DONE)
    assert (outcome(answer), answer.finish) == ((None, None), "stop" if isinstance(finish, dict) else finish)


# Answers in one piece.
WHOLE: dict[str, tuple[Any, tuple[str, str]]] = {
    "openai": ({"error": {"message": "gone", "code": 500}}, ("stream_error", "500: gone")),
    "FastAPI": ({"detail": "CUDA out of memory"}, ("stream_error", "CUDA out of memory")),
    "message and code": ({"message": "engine died", "code": 500}, ("stream_error", "500: engine died")),
    "a text": ({"error": "gone"}, ("stream_error", "gone")),
    "vLLM, older": ({"object": "error", "message": "gone", "code": 400}, ("stream_error", "400: gone")),
    "Google": ([{"error": {"code": 503, "message": "gone"}}], ("stream_error", "503: gone")),
    "a JSON text": ("Internal Server Error", ("stream_error", "Internal Server Error")),
    "next to the text": (
        {"choices": [{"message": {"content": "one"}, "finish_reason": "stop"}], "error": {"message": "gone"}},
        ("stream_error", "error: gone")),
    "in the choice": (
        {"choices": [{"message": {"content": "one"}, "error": {"message": "gone"}}]}, ("stream_error", "error: gone")),
    "finish reason": (
        {"choices": [{"message": {"content": "one"}, "finish_reason": "error"}]},
        ("stream_error", "the server ended the answer with finish reason 'error'")),
    "another object": ({"hello": 1}, ("not_api", "status 200 with JSON that has no choices")),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_an_error_in_an_answer_in_one_piece_is_a_failed_request(name: str) -> None:
    body, expected = WHOLE[name]
    raw = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw)
    assert outcome(answer_to(head + raw, ended=False)) == expected
    if expected[0] == "stream_error" and "choices" not in body:
        assert outcome(answer_to(head + raw, ended=False, embeddings=True)) == expected


def text_of(model: str, text: str = "one") -> bytes:
    return event(delta(content=text) | {"model": model})


@pytest.mark.parametrize(
    ("events", "model"),
    [
        ([text_of("m"), text_of("m"), STOP], "m"),
        ([ROLE, text_of("other"), STOP], "other"),  # a router
        ([text_of("m"), *[text_of("other")] * 5, text_of("m"), STOP], "m then other"),
        ([text_of(""), STOP], None),
        ([event({"choices": [{"index": 0, "delta": {"content": "one"}}]}), STOP], None),
    ],
)
def test_the_model_of_an_answer_is_that_of_its_text(events: list[bytes], model: str | None) -> None:
    assert answer_to(STREAM, *events, DONE).model == model


def test_an_answer_in_one_piece_names_its_model() -> None:
    raw = json.dumps({"model": "m", "choices": [{"message": {"content": "one"}, "finish_reason": "stop"}]}).encode()
    assert answer_to(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw, ended=False).model == "m"


def test_a_prompt_of_no_tokens_is_missing() -> None:
    answer = answer_to(
        STREAM, WORD, STOP, event({"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}})
    )
    answer.drop_impossible_counts(4, 100)
    assert (answer.prompt_tokens, answer.output_tokens) == (None, None)
    assert list(answer.bad.values()) == [
        BadField("usage.prompt_tokens", "zero", "0"), BadField("usage.completion_tokens", "zero", "0"),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [{}, [], ""])
def test_an_empty_error_without_a_finish_reason_is_a_failed_request(error: Any) -> None:
    broken = event(delta(content="one") | {"error": error})
    words = "no finish reason, and an event of no known form: its error is empty"
    assert outcome(answer_to(STREAM, ROLE, broken, DONE)) == ("stream_error", words)
    assert outcome(answer_to(STREAM, ROLE, broken, STOP, DONE)) == (None, None)
    assert answer_to(STREAM, ROLE, event({"error": error}), WORD, DONE).error == "stream_error"


def test_content_may_be_a_list_of_parts() -> None:
    parts = [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]
    answer = answer_to(STREAM, ROLE, event(delta(content=parts)), event(delta(content=[])), STOP, DONE)
    assert (outcome(answer), answer.text, answer.bad) == ((None, None), "one", {})
    whole = json.dumps({"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]}).encode()
    answer = answer_to(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole, ended=False)
    assert (outcome(answer), answer.text, answer.bad) == ((None, None), "one", {})
    assert answer_to(STREAM, ROLE, event(delta(content=[{"image": 1}])), STOP, DONE).error == "empty"
