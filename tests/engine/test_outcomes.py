"""What a server, a proxy or a network can do to a request, on real sockets, and the one record that it leaves."""

import gzip
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import gevent
import pytest

from harness.load.exchange import Exchange
from harness.load.openai_api import Answer
from harness.load.reader import UnstampedInbox
from harness.records.records import Request, read_requests
from harness.run.drive import max_silence_s
from harness.scenario import Load
from harness.scenario.behaviour import max_body_s
from tests.support.fake_server import (
    CHUNKED,
    DONE,
    FINISH,
    GOOD,
    OK,
    SSE,
    TOKEN,
    UNTIL_CLOSED,
    USAGE,
    Handler,
    answering,
    chunk,
    exchanging,
    load_process,
    once,
    one_record,
    read_request,
    reset,
    serving,
    silence,
    whole,
    work,
)
from tests.support.faults import fault
from tests.support.load_runs import make_job
from tests.support.wording import Wording


def test_a_stream_gives_times_counts_and_finish(tmp_path: Path) -> None:
    pieces = [CHUNKED, chunk(TOKEN), chunk(TOKEN), chunk(FINISH), chunk(USAGE), chunk(DONE), b"0\r\n\r\n"]
    record = one_record(tmp_path, answering(*pieces, pause_s=0.1), output_tokens=2)
    assert (record.error, record.message, record.status, record.finish) == (None, None, 200, "length")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 2, None)
    assert (record.asked_tokens, record.fixed_length, record.coalesced) == (2, True, 0)
    assert record.id == "4f1c-r1-a-b-0"
    assert record.connect_s is not None
    assert record.headers_s is not None and record.headers_s <= record.chunks_s[0]
    assert len(record.chunks_s) == 2
    assert record.first_visible_s == record.chunks_s[0]
    assert record.chunks_s[1] - record.chunks_s[0] > 0.02  # each piece comes 0.1 s after the one before it
    assert record.ended_s - record.chunks_s[1] > 0.15  # at [DONE]


def test_the_request_that_goes_out(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def handler(connection: socket.socket, number: int) -> None:
        seen.append(read_request(connection))
        connection.sendall(GOOD)

    assert one_record(tmp_path, handler, output_tokens=7, output="natural").error is None
    head, _, body = seen[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/chat/completions HTTP/1.1"
    assert lines[1].startswith("Host: localhost:")
    assert lines[2:] == [
        "Accept: text/event-stream, application/json",
        "Accept-Encoding: identity",
        "X-Request-Id: 4f1c-r1-a-b-0",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    assert body == (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":7,"temperature":0,"stream":true,'
        b'"stream_options":{"include_usage":true}}'
    )


def test_a_field_that_the_server_refuses_can_be_left_out(tmp_path: Path) -> None:
    bodies: list[dict[str, object]] = []

    def handler(connection: socket.socket, number: int) -> None:
        bodies.append(json.loads(read_request(connection).partition(b"\r\n\r\n")[2]))
        refused = [name for name in ("stream_options", "temperature") if name in bodies[-1]]
        body = json.dumps({"detail": [{"loc": ["body", name], "msg": "not permitted"} for name in refused]}).encode()
        connection.sendall(
            whole(body, status=b"422 Unprocessable Entity") if refused else GOOD.replace(chunk(USAGE), b"")
        )

    for number, omit in enumerate([["temperature"], ["temperature", "stream_options"]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        record = one_record(folder, handler, omit=omit)
        assert bodies[-1].keys() == {"model", "messages", "max_tokens", "stream", "ignore_eos"} | (
            {"stream_options"} if number == 0 else set()
        )
        failed = ("http", "status 422: body.stream_options: not permitted")
        assert (record.error, record.message) == (failed if number == 0 else (None, None))
        assert record.output_tokens is None


HTML = b"<html><head><title>Welcome to nginx!</title></head><body><h1>Hello</h1></body></html>"
REASON = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm"},"finish_reason":null}]}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
NULL = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}]}\n\n'
ERROR = b'data: {"error":{"message":"the model is gone","type":"internal","code":500}}\n\n'
TOO_LONG = (
    b'{"error":{"code":400,"message":"request (24017 tokens) exceeds the available context size (512 tokens), try '
    b'increasing it","n_ctx":512,"status_code":400,"type":"exceed_context_size_error"}}'
)


def pinging(connection: socket.socket) -> None:
    for _ in range(100):
        connection.sendall(b": ping\n\n")
        time.sleep(0.05)


def dripping(connection: socket.socket, piece: bytes = b"d") -> None:
    for _ in range(400):
        connection.sendall(piece)
        time.sleep(0.05)


def blanks(connection: socket.socket) -> None:
    dripping(connection, b" ")


def endless(piece: bytes) -> Callable[[socket.socket], None]:
    """Sends a piece again and again, until the client closes the connection."""

    def send(connection: socket.socket) -> None:
        while True:
            connection.sendall(piece)

    return send


NO_TOKEN = "no token and no complete answer arrived for 0.3 s"


def finish(reason: bytes) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"%s"}]}\n\n' % reason


FAULTS: dict[str, tuple[Handler, str, str, int]] = {
    "closed before an answer": (once(), "disconnect", "the server closed the connection before it answered", 0),
    "cut in mid-stream": (once(CHUNKED, chunk(TOKEN)), "disconnect",
        "the server closed the connection before the response was", 1),
    "reset": (once(CHUNKED, chunk(TOKEN), then=reset), "disconnect", "", 0),
    "silent in mid-stream": (once(CHUNKED, chunk(TOKEN), then=silence), "timeout", "no data arrived for 0.3 s", 1),
    "pings and nothing else": (once(UNTIL_CLOSED, then=pinging), "timeout", NO_TOKEN, 0),
    "an event in drips": (once(UNTIL_CLOSED, b"data: ", then=dripping), "timeout", NO_TOKEN, 0),
    "an event in drips after a token": (once(UNTIL_CLOSED, TOKEN, then=dripping), "timeout", NO_TOKEN, 1),
    "headers in drips": (once(OK, then=dripping), "timeout", NO_TOKEN, 0),
    "a body in drips": (once(whole(b"{" * 999)[:-998], then=dripping), "timeout",
        "no complete answer arrived within 3 s", 0),
    "an endless body of blanks": (once(OK + b"Connection: close\r\n\r\n", then=blanks), "timeout",
        "no complete answer arrived within 3 s", 0),
    "tokens without end": (once(CHUNKED, then=endless(chunk(TOKEN))), "malformed", "", -1),
    "events without end": (once(UNTIL_CLOSED, then=endless(b'data: {"choices":[]}\n\n')), "malformed", "0 pieces", 0),
    "given up": (once(UNTIL_CLOSED, TOKEN, finish(b"abort"), DONE), "stream_error",
        "the server ended the answer with finish reason 'abort'", 1),
    "error without data": (once(UNTIL_CLOSED, TOO_LONG), "stream_error",
        "exceed_context_size_error 400: request (24017 tokens)", 0),
    "error without data in mid-stream": (
        once(CHUNKED, chunk(TOKEN), chunk(b'{\n"error": {"code": 500,\n"message": "gone"}\n}\n')), "stream_error",
        "500: gone (sent outside of an event)", 1),
    "ends without done": (once(UNTIL_CLOSED, TOKEN), "truncated",
        "the stream ended after 1 events without [DONE] or a finish", 1),
    "no token": (once(UNTIL_CLOSED, ROLE, NULL, FINISH, USAGE, DONE), "empty",
        "a complete stream without any generated text; usage reports", 0),
    "error event": (once(CHUNKED, chunk(TOKEN), chunk(ERROR), chunk(DONE), b"0\r\n\r\n"), "stream_error",
        "internal 500: the model is gone", 1),
    "error by event type": (once(UNTIL_CLOSED, TOKEN, b'event: error\ndata: {"message":"out of memory"}\n\n', DONE),
        "stream_error", "out of memory", 1),
    "error without words": (once(UNTIL_CLOSED, TOKEN, b"event: error\ndata: null\n\n", DONE), "stream_error",
        "an error event without a message", 1),
    "a compressed stream": (
        once(SSE + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n", gzip.compress(TOKEN + DONE)), "not_api",
        "status 200 with text/event-stream in gzip (which was not", 0),
    "error in a whole answer": (once(whole(TOO_LONG)), "stream_error", "exceed_context_size_error 400: request ", 0),
    "malformed event": (once(UNTIL_CLOSED, TOKEN, b'data: {"choices":[{"ind\n\n', TOKEN, FINISH, DONE), "malformed",
        "event 2 is not JSON: Input data was truncated", 2),
    "html": (once(whole(HTML, b"text/html")), "not_api", "status 200 with text/html ('Welcome to nginx! Hello') in",
        0),
    "other json": (once(whole(b'{"hello":1}')), "not_api", "status 200 with JSON that has no choices", 0),
    "not http": (once(b"SSH-2.0-OpenSSH_9.2\r\n"), "not_api", "the answer is not HTTP/1.1: ", 0),
    "429": (once(whole(b'{"error":{"message":"busy","type":"rate_limit"}}', status=b"429 Too Many Requests")),
        "rejected", "status 429: rate_limit: busy", 0),
    "500 html": (once(whole(HTML, b"text/html", b"500 Oops")), "http",
        "status 500: text/html ('Welcome to nginx! Hello')", 0),
    "404 without its length": (once(b"HTTP/1.1 404 No\r\nConnection: close\r\n\r\n", b'{"detail":"Not Found"}'),
        "http", "status 404: Not Found", 0),
    "switching protocols": (once(b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nhello"), "http",
        "status 101: ", 0),
    "redirect": (once(whole(b"", status=b"307 Moved", more=b"Location: https://elsewhere/v1\r\n")), "http",
        "status 307: redirect to https://elsewhere/v1, which a load", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@fault("network",
       "an answer breaks (24 cases): cut, reset, silent, pings only, error event, HTML, compressed, redirect, not HTTP",
       seen="one record of the right error kind and message each")  # fmt: skip
def test_every_fault_leaves_one_record_of_its_kind(tmp_path: Path, name: str) -> None:
    handler, error, message, chunks = FAULTS[name]
    limits = {"timeout_s": 0.3, "output_tokens": 1} if error == "timeout" else {"timeout_s": 30.0}
    record = one_record(tmp_path, handler, **limits)
    assert record.error == error
    assert (record.message or "").startswith(message)
    if name == "tokens without end":
        assert len(record.chunks_s) > 1000
        return
    assert len(record.chunks_s) >= chunks if name == "reset" else len(record.chunks_s) == chunks
    assert record.ended_s >= 0


STREAMS: dict[str, tuple[list[bytes], int, str]] = {
    "no done but a finish reason": ([UNTIL_CLOSED, TOKEN, FINISH], 1, "length"),
    "done but no finish reason": ([UNTIL_CLOSED, TOKEN, DONE], 1, ""),
    "crlf": ([(TOKEN + FINISH + DONE).replace(b"\n", b"\r\n")], 1, "length"),
    "half a surrogate pair": ([
        UNTIL_CLOSED, TOKEN.replace(b"hi ", b"\\ud83d"), TOKEN.replace(b"hi ", b"\\ude00"), FINISH, DONE], 2, "length"),
    "pings": ([UNTIL_CLOSED, b": ping\n\n", TOKEN, b": ping\n\n", FINISH, DONE], 1, "length"),
    "continue first": ([b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD], 2, "length"),
    "no content type": ([OK + b"Connection: close\r\n\r\n" + TOKEN, FINISH, DONE], 1, "length"),
    "pings of empty data": ([UNTIL_CLOSED, b"data:\n\n", TOKEN, b"event: ping\ndata: \n\n", FINISH, DONE], 1,
        "length"),
    "completions": ([UNTIL_CLOSED, b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n', DONE],
        1, "stop"),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_streams_that_are_complete(tmp_path: Path, name: str) -> None:
    pieces, chunks, finish = STREAMS[name]
    if name == "crlf":
        pieces = [UNTIL_CLOSED, *pieces]
    record = one_record(tmp_path, once(*pieces))
    assert (record.error, record.message) == (None, None)
    assert (len(record.chunks_s), record.finish) == (chunks, finish or None)
    assert record.textless is not None, "marks a streamed answer, whose finish reason is known"


SLOW_BODY = whole(b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}')


def test_a_whole_answer_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    """A server that sends its headers at once and its answer later. Its headers have 2 s: on a busy machine, too."""
    pieces = SLOW_BODY[:-30], SLOW_BODY[-30:-10], SLOW_BODY[-10:]
    record = one_record(tmp_path, answering(*pieces, pause_s=1.1), timeout_s=2.0, output_tokens=1, stream=False)
    assert (record.error, record.message) == (None, None)
    assert record.ended_s > 2.0


def test_the_total_time_of_a_whole_answer() -> None:
    assert max_body_s(300.0, 128) == 3000.0
    assert max_body_s(5.0, 400) == 800.0
    assert max_body_s(0.01, 1) == 2.0
    assert max_body_s(5.0, None) == 50.0  # vectors


def test_a_load_is_not_ended_before_its_slowest_answer(tmp_path: Path) -> None:
    whole_body = make_job(tmp_path, Load(user="batch", requests=1, stream=False, timeout_s=300.0, output_tokens=1))
    assert max_silence_s(whole_body) > max_body_s(300.0, 1)
    streamed = make_job(tmp_path, Load(user="batch", requests=1, timeout_s=300.0, output_tokens=1))
    assert max_silence_s(streamed) < max_body_s(300.0, 1)


def test_a_response_that_nobody_asked_for_is_not_the_answer() -> None:
    """Some servers say 408 before they close an idle connection, and it may be read together with the answer."""
    answer = whole(b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}')
    farewell = whole(b"{}", status=b"408 Request Timeout")
    with serving(answering(answer + farewell)) as url, exchanging(url) as send:
        for _ in range(2):
            exchange, said = send()
            assert (exchange.status, said.status, said.error, said.text) == (200, 200, None, "a")
            assert exchange.connect_ns is not None


@pytest.mark.parametrize("end", [b"\n\n", b"\r\r", b"\n\n: bye\n\n"])
def test_a_body_left_open_after_done_does_not_keep_us(end: bytes) -> None:
    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(CHUNKED + chunk(TOKEN) + chunk(FINISH) + chunk(b"data: [DONE]" + end))
        silence(connection)

    with serving(handler) as url, exchanging(url, timeout_s=30) as send:
        for _ in range(3):
            exchange, answer = send()  # an error after the timeout
            assert (answer.error, answer.ended_s < 30) == (None, True)
            assert exchange.connect_ns is not None  # never the one that is in the middle of a body


def test_reasoning_and_tool_calls_are_tokens_but_not_visible(tmp_path: Path) -> None:
    call = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}\n\n'
    record = one_record(tmp_path, answering(UNTIL_CLOSED, REASON, call, TOKEN, FINISH, DONE, pause_s=0.02))
    assert (record.error, len(record.chunks_s), record.first_visible_s) == (None, 3, record.chunks_s[2])


EMPTY = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"%s"}]}\n\n'
LAST = TOKEN.replace(b'"finish_reason":null', b'"finish_reason":"stop"')


@pytest.mark.parametrize(
    ("events", "textless"),
    [
        ([ROLE, TOKEN, TOKEN, END % b"stop", USAGE], 1),  # vLLM
        ([NULL, TOKEN, TOKEN, finish(b"stop"), USAGE], 1),  # llama.cpp
        ([NULL, TOKEN, TOKEN, finish(b"length"), USAGE], 0),  # whose last event is no token
        ([ROLE, TOKEN, LAST, USAGE], 0),  # several tokens at once, the end token among them
        (
            [ROLE, EMPTY, EMPTY, TOKEN, EMPTY, TOKEN, EMPTY, END % b"stop"],
            4,
        ),  # text that was held back, and a stop string
        ([ROLE, *([TOKEN] * 6), EMPTY, *([TOKEN] * 6), EMPTY, END % b"length"], 1),
        ([b": ping\n\n", TOKEN, USAGE, finish(b"stop")], 1),
    ],
)
def test_tokens_without_text_outside_of_the_chunks_are_counted(
    tmp_path: Path, events: list[bytes], textless: int
) -> None:
    record = one_record(tmp_path, answering(CHUNKED, *map(chunk, [*events, DONE]), b"0\r\n\r\n", pause_s=0.005))
    assert (record.error, len(record.chunks_s)) == (None, sum(b"hi " in event for event in events))
    assert record.textless == textless


def test_details_of_usage(tmp_path: Path) -> None:
    usage = (
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":'
        b'{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":2}}}\n\n'
    )
    record = one_record(tmp_path, once(UNTIL_CLOSED, TOKEN, FINISH, usage, DONE))
    assert (record.prompt_tokens, record.output_tokens) == (9, 5)
    assert (record.cached_tokens, record.reasoning_tokens) == (4, 2)


@pytest.mark.parametrize("last", [b'{"prompt_tokens":null,"completion_tokens":null}', b'{"completion_tokens":2}'])
def test_usage_may_be_spread_over_events(tmp_path: Path, last: bytes) -> None:
    more = USAGE.replace(b"}}", b',"prompt_tokens_details":{"cached_tokens":1}}}')
    record = one_record(tmp_path, once(UNTIL_CLOSED, TOKEN, more, FINISH[:-3] + b',"usage":%s}\n\n' % last, DONE))
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 2, 1)


def test_events_that_share_a_read_are_counted(tmp_path: Path) -> None:
    handler = answering(UNTIL_CLOSED, TOKEN * 3, TOKEN, TOKEN * 2, FINISH + DONE, pause_s=0.05)
    record = one_record(tmp_path, handler)
    assert (len(record.chunks_s), record.coalesced) == (6, 3)
    assert record.chunks_s[0] == record.chunks_s[1] == record.chunks_s[2] < record.chunks_s[3]


# Cut by the end of the load, by the locustfile, or by a defect of ours.


def record_of_cut(folder: Path, handler: Handler) -> Request:
    """The record of a request that was cut after a moment, and did not return to the user."""
    with serving(handler) as url, load_process(folder, url) as process:
        sending = gevent.spawn(process.send, process.create_client(), work())
        gevent.sleep(0.2)
        sending.kill()
        assert not isinstance(sending.value, Answer)
    (record,) = read_requests(folder / "requests.jsonl")
    return record


def test_a_request_that_is_cut_leaves_what_it_had(tmp_path: Path, wording: Wording) -> None:
    record = record_of_cut(tmp_path, once(CHUNKED, chunk(TOKEN), chunk(TOKEN), then=silence))
    assert record.error == "unfinished"
    wording(record.message)
    assert (len(record.chunks_s), record.status) == (2, 200)
    assert record.chunks_s[-1] < record.ended_s


def test_a_cut_is_a_cut_when_the_connection_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """An end that is found while cutting must not take the cut's place: the user would go on, and Locust never end."""

    class EndsWhenCut(UnstampedInbox):
        def take_pieces(self) -> list[bytes]:
            return super().take_pieces() or [b""]

    monkeypatch.setattr("harness.load.client.UnstampedInbox", EndsWhenCut)
    monkeypatch.setattr("harness.load.client.enable_stamps", lambda _: False)
    record = record_of_cut(tmp_path, once(CHUNKED, chunk(TOKEN), then=silence))
    assert record.error == "unfinished"
    wording(record.message)


def test_a_timeout_of_the_locustfile_is_a_failed_request(tmp_path: Path, wording: Wording) -> None:
    handler = once(CHUNKED, chunk(TOKEN), chunk(TOKEN), then=silence)
    told: list[str | None] = []
    with serving(handler) as url, load_process(tmp_path, url) as process:
        client = process.create_client()
        with pytest.raises(gevent.Timeout), gevent.Timeout(0.2):
            process.send(client, work(), lambda answer: told.append(answer.error))
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert record.error == "timeout" and "0.2 s" in (record.message or "")
    wording(record.message)
    assert (len(record.chunks_s), record.status) == (2, 200)
    assert record.ended_s > 0.15
    assert told == ["timeout"]


def test_messages_that_are_no_json_leave_a_record_too(tmp_path: Path) -> None:
    with serving(once(GOOD)) as url, load_process(tmp_path, url) as process:
        answer = process.send(process.create_client(), work().with_messages([{"role": "user", "content": object()}]))  # type: ignore[typeddict-item]
    assert [answer.error, *(one.error for one in read_requests(tmp_path / "requests.jsonl"))] == ["client"] * 2


def test_a_defect_of_ours_leaves_a_record_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(exchange: Exchange) -> Answer:
        raise ZeroDivisionError("we were careless")

    monkeypatch.setattr(Exchange, "finish_answer", broken)
    record = one_record(tmp_path, answering(GOOD))
    assert (record.error, record.message, record.status) == ("client", "ZeroDivisionError: we were careless", 200)
