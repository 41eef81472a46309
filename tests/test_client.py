"""The streaming client on real sockets: what a server, a proxy or a network can do, and the record that it leaves."""

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
import pytest

from harness.errors import HarnessError
from harness.job import Job
from harness.load import client as client_module
from harness.load.answer import Answer, Reading, read_answer
from harness.load.client import Client, Target
from harness.load.clock import KernelClock
from harness.load.exchange import Exchange
from harness.load.later import Later
from harness.load.process import LoadProcess, Place
from harness.load.reader import Arrivals, Direct, Reader
from harness.load.recorder import Recorder
from harness.load.tickets import Ticket
from harness.records import Request, read_requests
from harness.scenario import Load, Prompts, Warmup
from harness.simulated.spawn import spawned

Handler = Callable[[socket.socket, int], None]  # gets each connection and its number, from 0

OK = b"HTTP/1.1 200 OK\r\n"
SSE = OK + b"Content-Type: text/event-stream\r\n"
CHUNKED = SSE + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = SSE + b"Connection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi "},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n"
    return head % (status, kind, len(body), more) + body


GOOD = CHUNKED + chunk(TOKEN) + chunk(TOKEN) + chunk(FINISH) + chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n"


def read_request(connection: socket.socket) -> bytes:
    """One request, head and body; what there was of it when the peer closes."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server in a thread; `handler` has a connection to itself, which is closed after it."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def run(connection: socket.socket, number: int) -> None:
        try:
            if tls is not None:
                connection = tls.wrap_socket(connection, server_side=True)
            with connection:
                handler(connection, number)
        except OSError:
            connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=run, args=(connection, len(threads)), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"{'https' if tls else 'http'}://localhost:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        for thread in threads:
            thread.join(5)


def answering(*pieces: bytes, pause_s: float = 0.0) -> Handler:
    """Answers every request on every connection with these pieces."""

    def handler(connection: socket.socket, number: int) -> None:
        while read_request(connection):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
            if b"Connection: close" in pieces[0]:
                return

    return handler


def once(*pieces: bytes, then: Callable[[socket.socket], None] = lambda connection: None) -> Handler:
    """Answers one request per connection, does `then`, and closes."""

    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        for piece in pieces:
            connection.sendall(piece)
        then(connection)

    return handler


@contextmanager
def load_process(folder: Path, url: str, api_key_env: str | None = None, **load: Any) -> Iterator[LoadProcess]:
    job = Job(
        run="4f1c",
        cell="r1-a-b",
        load_name="b",
        load=Load(user="batch", requests=100, **load),
        model="m",
        prompts=Prompts(),
        seed=1,
        warmup=Warmup(requests=0),
        api_key_env=api_key_env,
        requests_path=str(folder / "requests.jsonl"),
        processes_path=str(folder / "processes.jsonl"),
        tickets_path=str(folder / "tickets"),
    )
    recorder = Recorder(job.requests_path, job.processes_path, job.cell)
    try:
        process = LoadProcess(job, url, recorder)
        yield process
        process.close()
    finally:
        recorder.close()
        assert recorder.sent == recorder.recorded


def place(index: int = 0) -> Place:
    return Place(Ticket("measured", index), "Tester", user=0)


def one_record(folder: Path, handler: Handler, **load: Any) -> Request:
    """Sends one request and reads back its one record."""
    with serving(handler) as url, load_process(folder, url, **load) as process:
        client = process.client()
        process.send(client, [{"role": "user", "content": "hi"}], place())
        client.close()
    records = list(read_requests(folder / "requests.jsonl"))
    assert len(records) == 1
    return records[0]


def test_a_stream_gives_times_counts_and_finish(tmp_path: Path) -> None:
    pieces = [CHUNKED, chunk(TOKEN), chunk(TOKEN), chunk(FINISH), chunk(USAGE), chunk(DONE), b"0\r\n\r\n"]
    record = one_record(tmp_path, answering(*pieces, pause_s=0.03), output_tokens=2)
    assert (record.error, record.message, record.status, record.finish) == (None, None, 200, "length")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 2, None)
    assert (record.asked_tokens, record.fixed_length, record.coalesced) == (2, True, 0)
    assert record.id == "4f1c-r1-a-b-0"
    assert record.connect_s is not None
    assert record.headers_s is not None and record.headers_s < 0.03
    assert len(record.chunks_s) == 2
    assert record.first_visible_s == record.chunks_s[0]
    assert record.chunks_s[1] - record.chunks_s[0] == pytest.approx(0.03, abs=0.025)
    assert record.ended_s - record.chunks_s[1] == pytest.approx(0.09, abs=0.05)  # at [DONE], not at the last byte


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


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def silence(connection: socket.socket) -> None:
    connection.settimeout(5)
    connection.recv(1)  # until the client gives up


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


def finish(reason: bytes) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"%s"}]}\n\n' % reason


FAULTS: dict[str, tuple[Handler, str, str, int]] = {
    "closed before an answer": (once(), "disconnect", "the server closed the connection before it answered", 0),
    "cut in mid-stream": (
        once(CHUNKED, chunk(TOKEN)),
        "disconnect",
        "the server closed the connection before the response was complete",
        1,
    ),
    "cut inside a chunk": (
        once(CHUNKED, chunk(TOKEN), chunk(TOKEN)[:20]),
        "disconnect",
        "the server closed the connection before the response was complete",
        1,
    ),
    "reset": (once(CHUNKED, chunk(TOKEN), then=reset), "disconnect", "", 0),
    "silent at once": (once(then=silence), "timeout", "no data arrived for 0.3 s", 0),
    "silent in mid-stream": (once(CHUNKED, chunk(TOKEN), then=silence), "timeout", "no data arrived for 0.3 s", 1),
    "pings and nothing else": (once(UNTIL_CLOSED, then=pinging), "timeout", "no data arrived for 0.3 s", 0),
    "pings in mid-stream": (once(UNTIL_CLOSED, TOKEN, then=pinging), "timeout", "no data arrived for 0.3 s", 1),
    "given up": (
        once(UNTIL_CLOSED, TOKEN, finish(b"abort"), DONE),
        "stream_error",
        "the server ended the answer with finish reason 'abort'",
        1,
    ),
    "failed inside": (
        once(UNTIL_CLOSED, TOKEN, finish(b"error"), DONE),
        "stream_error",
        "the server ended the answer with finish reason 'error'",
        1,
    ),
    "given up in a whole answer": (
        once(whole(b'{"choices":[{"message":{"content":"a"},"finish_reason":"abort"}]}')),
        "stream_error",
        "the server ended the answer with finish reason 'abort'",
        0,
    ),
    "error without data": (
        once(UNTIL_CLOSED, TOO_LONG),
        "stream_error",
        "exceed_context_size_error 400: request (24017 tokens) exceeds the available context size (512 tokens), "
        "try increasing it (sent outside of an event)",
        0,
    ),
    "error without data in mid-stream": (
        once(CHUNKED, chunk(TOKEN), chunk(b'{\n"error": {"code": 500,\n"message": "gone"}\n}\n')),
        "stream_error",
        "500: gone (sent outside of an event)",
        1,
    ),
    "answers without data are not quoted": (
        once(UNTIL_CLOSED, b'{"message":{"role":"assistant","content":"what the model said"}}'),
        "truncated",
        "the stream ended after 0 events without [DONE] or a finish reason",
        0,
    ),
    "ends without done": (
        once(UNTIL_CLOSED, TOKEN),
        "truncated",
        "the stream ended after 1 events without [DONE] or a finish reason",
        1,
    ),
    "ends inside an event": (
        once(UNTIL_CLOSED, TOKEN, TOKEN[:-1]),
        "truncated",
        "the stream ended after 1 events without [DONE] or a finish reason",
        1,
    ),
    "nothing but headers": (
        once(UNTIL_CLOSED),
        "truncated",
        "the stream ended after 0 events without [DONE] or a finish reason",
        0,
    ),
    "no token": (
        once(UNTIL_CLOSED, ROLE, NULL, FINISH, USAGE, DONE),
        "empty",
        "a complete stream without any generated text; usage reports 2 tokens",
        0,
    ),
    "error event": (
        once(CHUNKED, chunk(TOKEN), chunk(ERROR), chunk(DONE), b"0\r\n\r\n"),
        "stream_error",
        "internal 500: the model is gone",
        1,
    ),
    "error event without done": (
        once(UNTIL_CLOSED, b"data: " + TOO_LONG + b"\n\n"),
        "stream_error",
        "exceed_context_size_error 400: request (24017 tokens) exceeds the available context size (512 tokens), "
        "try increasing it",
        0,
    ),
    "error by event type": (
        once(UNTIL_CLOSED, TOKEN, b'event: error\ndata: {"message":"out of memory"}\n\n', DONE),
        "stream_error",
        "an error event without a message",
        1,
    ),
    "older vllm error": (
        once(UNTIL_CLOSED, b'data: {"object":"error","message":"bad","type":"BadRequestError","code":400}\n\n', DONE),
        "stream_error",
        "BadRequestError 400: bad",
        0,
    ),
    "error as a word": (once(UNTIL_CLOSED, b'data: {"error":"overloaded"}\n\n'), "stream_error", "overloaded", 0),
    "error in a whole answer": (once(whole(TOO_LONG)), "stream_error", "exceed_context_size_error 400: request ", 0),
    "malformed event": (
        once(UNTIL_CLOSED, TOKEN, b'data: {"choices":[{"ind\n\n', TOKEN, FINISH, DONE),
        "malformed",
        "event 2 is not JSON: Input data was truncated",
        2,
    ),
    "event that is no object": (
        once(UNTIL_CLOSED, b"data: 3\n\n", DONE),
        "malformed",
        "event 1 is not a JSON object",
        0,
    ),
    "html": (
        once(whole(HTML, b"text/html")),
        "not_api",
        "status 200 with text/html ('Welcome to nginx! Hello') in place of an API answer",
        0,
    ),
    "empty body": (once(whole(b"")), "not_api", "status 200 with an empty body in place of an API answer", 0),
    "other json": (once(whole(b'{"hello":1}')), "not_api", "status 200 with JSON that has no choices", 0),
    "not http": (once(b"SSH-2.0-OpenSSH_9.2\r\n"), "not_api", "the answer is not HTTP/1.1: ", 0),
    "429": (
        once(whole(b'{"error":{"message":"busy","type":"rate_limit"}}', status=b"429 Too Many Requests")),
        "rejected",
        "status 429: rate_limit: busy",
        0,
    ),
    "503": (once(whole(b"", status=b"503 Unavailable")), "rejected", "status 503: an empty body", 0),
    "500 html": (
        once(whole(HTML, b"text/html", b"500 Oops")),
        "http",
        "status 500: text/html ('Welcome to nginx! Hello')",
        0,
    ),
    "404 without its length": (
        once(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n", b'{"detail":"Not Found"}'),
        "http",
        "status 404: Not Found",
        0,
    ),
    "redirect": (
        once(whole(b"", status=b"307 Moved", more=b"Location: https://elsewhere/v1\r\n")),
        "http",
        "status 307: redirect to https://elsewhere/v1, which a load test does not follow",
        0,
    ),
    "no content": (once(b"HTTP/1.1 204 No Content\r\n\r\n"), "not_api", "status 204 with an empty body in place of", 0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_leaves_one_record_of_its_kind(tmp_path: Path, name: str) -> None:
    handler, error, message, chunks = FAULTS[name]
    record = one_record(tmp_path, handler, timeout_s=0.3)
    assert record.error == error
    assert (record.message or "").startswith(message)
    assert len(record.chunks_s) >= chunks if name == "reset" else len(record.chunks_s) == chunks
    assert 0 <= record.ended_s < 2


STREAMS: dict[str, tuple[list[bytes], int, str]] = {
    "no done but a finish reason": ([UNTIL_CLOSED, TOKEN, FINISH], 1, "length"),
    "done but no finish reason": ([UNTIL_CLOSED, TOKEN, DONE], 1, ""),
    "role and null first": ([UNTIL_CLOSED, ROLE, NULL, TOKEN, FINISH, DONE], 1, "length"),
    "crlf": ([(TOKEN + FINISH + DONE).replace(b"\n", b"\r\n")], 1, "length"),
    "half a surrogate pair": (
        [UNTIL_CLOSED, TOKEN.replace(b"hi ", b"\\ud83d"), TOKEN.replace(b"hi ", b"\\ude00"), FINISH, DONE],
        2,
        "length",
    ),
    "not a number": (
        [UNTIL_CLOSED, TOKEN.replace(b'"index":0', b'"logprob":NaN,"index":0'), FINISH, DONE],
        1,
        "length",
    ),
    "broken utf-8": ([UNTIL_CLOSED, TOKEN.replace(b"hi ", b"\xe2\x82"), FINISH, DONE], 1, "length"),
    "pings": ([UNTIL_CLOSED, b": ping\n\n", TOKEN, b": ping\n\n", FINISH, DONE], 1, "length"),
    "several data lines": ([UNTIL_CLOSED, TOKEN.replace(b'"index"', b'\ndata: "index"'), FINISH, DONE], 1, "length"),
    "continue first": ([b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD], 2, "length"),
    "no content type": ([OK + b"Connection: close\r\n\r\n" + TOKEN, FINISH, DONE], 1, "length"),
    "completions": (
        [UNTIL_CLOSED, b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n', DONE],
        1,
        "stop",
    ),
    "broken off after done": ([CHUNKED, chunk(TOKEN), chunk(FINISH), chunk(DONE)], 1, "length"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_that_are_complete(tmp_path: Path, name: str) -> None:
    pieces, chunks, finish = STREAMS[name]
    if name == "crlf":
        pieces = [UNTIL_CLOSED, *pieces]
    record = one_record(tmp_path, once(*pieces))
    assert (record.error, record.message) == (None, None)
    assert (len(record.chunks_s), record.finish) == (chunks, finish or None)


def test_half_a_character_can_be_said_again(tmp_path: Path) -> None:
    """The next turn of a conversation sends what was said."""
    handler = once(UNTIL_CLOSED, TOKEN.replace(b"hi ", b"a\\ud83d"), FINISH, DONE)
    with serving(handler) as url, exchanging(url) as send:
        assert send()[1].text.encode() == b"a?"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\n: bye\n\n"])
def test_a_body_left_open_after_done_does_not_keep_us(end: bytes) -> None:
    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(CHUNKED + chunk(TOKEN) + chunk(FINISH) + chunk(b"data: [DONE]" + end))
        silence(connection)

    with serving(handler) as url, exchanging(url, timeout_s=30) as send:
        for _ in range(3):
            began = time.monotonic()
            exchange, answer = send()
            assert time.monotonic() - began < 0.5
            assert (answer.error, answer.ended_s < 0.1) == (None, True)
            assert exchange.connect_ns is not None  # never the one that is in the middle of a body


def test_an_end_of_the_body_soon_after_done_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_DONE_GRACE_S", 1.0)  # this machine may be busy
    pieces = [GOOD.removesuffix(b"0\r\n\r\n"), b"0\r\n\r\n"]
    assert connections_used(answering(*pieces, pause_s=0.003), 3) == [True, False, False]


def test_waiting_for_the_end_of_a_body_takes_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_DONE_GRACE_S", 0.5)
    with serving(once(CHUNKED, chunk(TOKEN), chunk(FINISH), chunk(DONE), then=silence)) as url, exchanging(url) as send:
        used_s = time.process_time()
        _, answer = send()
        assert (answer.error, time.process_time() - used_s < 0.25) == (None, True)


def test_a_mark_split_over_reads_is_seen() -> None:
    body = TOKEN + FINISH + DONE
    pieces = [UNTIL_CLOSED.replace(b"Connection: close\r\n", b""), *(body[i : i + 1] for i in range(len(body)))]
    with serving(once(*pieces, then=silence)) as url, exchanging(url, timeout_s=30) as send:
        began = time.monotonic()
        assert send()[1].error is None
        assert time.monotonic() - began < 1


def test_data_in_small_pieces_keeps_us_waiting() -> None:
    pieces = [UNTIL_CLOSED, *(TOKEN[i : i + 4] for i in range(0, 24, 4)), TOKEN[24:], FINISH, DONE]
    with serving(answering(*pieces, pause_s=0.05)) as url, exchanging(url, timeout_s=0.45) as send:
        assert send()[1].error is None  # half a second in all, but never that long without data


def test_a_slow_body_that_is_no_stream_keeps_us_waiting() -> None:
    body = b'{"choices":[{"message":{"content":"hello"},"finish_reason":"stop"}]}'
    pieces = [whole(body)[:-40], *(body[-40:][i : i + 10] for i in range(0, 40, 10))]
    with serving(once(*pieces)) as url, exchanging(url, timeout_s=0.2) as send:
        assert send()[1].error is None
    with serving(answering(*pieces, pause_s=0.12)) as url, exchanging(url, timeout_s=0.2) as send:
        assert send()[1].error is None


def test_reasoning_is_a_token_but_not_visible(tmp_path: Path) -> None:
    record = one_record(tmp_path, answering(UNTIL_CLOSED, REASON, REASON, TOKEN, FINISH, DONE, pause_s=0.02))
    assert len(record.chunks_s) == 3
    assert record.first_visible_s == record.chunks_s[2]


def test_a_tool_call_is_a_token_but_not_visible(tmp_path: Path) -> None:
    call = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}\n\n'
    record = one_record(tmp_path, once(UNTIL_CLOSED, call, FINISH, DONE))
    assert (record.error, len(record.chunks_s), record.first_visible_s) == (None, 1, None)


def test_details_of_usage(tmp_path: Path) -> None:
    usage = (
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":'
        b'{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":2}}}\n\n'
    )
    record = one_record(tmp_path, once(UNTIL_CLOSED, TOKEN, FINISH, usage, DONE))
    assert (record.prompt_tokens, record.output_tokens) == (9, 5)
    assert (record.cached_tokens, record.reasoning_tokens) == (4, 2)


def test_events_that_share_a_read_are_counted(tmp_path: Path) -> None:
    handler = answering(UNTIL_CLOSED, TOKEN * 3, TOKEN, TOKEN * 2, FINISH + DONE, pause_s=0.05)
    record = one_record(tmp_path, handler)
    assert (len(record.chunks_s), record.coalesced) == (6, 3)
    assert record.chunks_s[0] == record.chunks_s[1] == record.chunks_s[2] < record.chunks_s[3]


def test_a_whole_answer_has_no_chunk_times(tmp_path: Path) -> None:
    body = (
        b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":4,"completion_tokens":6}}'
    )
    record = one_record(tmp_path, answering(whole(body)), stream=False)
    assert (record.error, record.chunks_s, record.first_visible_s, record.coalesced) == (None, [], None, 0)
    assert (record.output_tokens, record.finish) == (6, "stop")
    assert record.ended_s > 0


def test_a_whole_answer_without_a_token_is_empty(tmp_path: Path) -> None:
    body = b'{"choices":[{"message":{"content":""},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
    record = one_record(tmp_path, answering(whole(body)), stream=False)
    assert (record.error, record.message) == (
        "empty",
        "a complete answer without any generated text; usage reports 1 tokens",
    )


def test_messages_are_short_and_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-verysecret")
    body = b'{"error":{"message":"Incorrect API key provided: sk-verysecret. %s","code":401}}' % (b"x" * 900)
    seen: list[bytes] = []

    def handler(connection: socket.socket, number: int) -> None:
        seen.append(read_request(connection))
        connection.sendall(whole(body, status=b"401 Unauthorized"))

    with serving(handler) as url, load_process(tmp_path, url, api_key_env="A_KEY") as process:
        client = process.client()
        answer = process.send(client, [{"role": "user", "content": "hi"}], place())
        client.close()
    assert b"Authorization: Bearer sk-verysecret\r\n" in seen[0]
    assert answer.message is not None and len(answer.message) <= 300
    assert answer.message.startswith("status 401: 401: Incorrect API key provided: [secret]. xxx")
    assert b"verysecret" not in (tmp_path / "requests.jsonl").read_bytes()


def test_what_the_server_got_from_the_environment_is_in_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_SECRETS", '["the-database-password"]')
    body = b'{"error":{"message":"%s the-database-password was refused","code":500}}' % (b"x" * 260)

    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(whole(body, status=b"500 Internal Server Error"))

    with serving(handler) as url, load_process(tmp_path, url) as process:
        client = process.client()
        answer = process.send(client, [{"role": "user", "content": "hi"}], place())
        client.close()
    assert answer.message is not None and "x [secret]" in answer.message
    assert b"the-database" not in (tmp_path / "requests.jsonl").read_bytes()


@pytest.mark.parametrize("value", [None, "", "a\r\nX-Other: b"])
def test_an_api_key_that_cannot_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("A_KEY", value)
    starting = load_process(tmp_path, "http://127.0.0.1:1", api_key_env="A_KEY")
    with pytest.raises(HarnessError, match="the environment variable A_KEY"), starting:
        pass


def test_a_request_that_is_cut_leaves_what_it_had(tmp_path: Path) -> None:
    handler = once(CHUNKED, chunk(TOKEN), chunk(TOKEN), then=silence)
    with serving(handler) as url, load_process(tmp_path, url) as process:
        client = process.client()
        sending = gevent.spawn(process.send, client, [{"role": "user", "content": "hi"}], place())
        gevent.sleep(0.2)
        sending.kill()
        assert process.tickets.take()[0].index == 0  # the place in this test took none
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert (record.error, record.message) == ("unfinished", "cut by the end of the run")
    assert (len(record.chunks_s), record.status) == (2, 200)
    assert record.chunks_s[-1] < record.ended_s < 1


def test_a_cut_is_a_cut_when_the_connection_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that is found while cutting must not take the cut's place: the user would go on, and Locust never end."""
    monkeypatch.setattr(
        Client, "_inbox", lambda self, sock, exchange: EndsWhenCut(sock, self._clock, exchange.arrivals)
    )
    went_on: list[Answer] = []
    with serving(once(CHUNKED, chunk(TOKEN), then=silence)) as url, load_process(tmp_path, url) as process:

        def user() -> None:
            went_on.append(process.send(process.client(), [{"role": "user", "content": "hi"}], place()))

        sending = gevent.spawn(user)
        gevent.sleep(0.2)
        sending.kill()
    assert went_on == []
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert (record.error, record.message) == ("unfinished", "cut by the end of the run")


class EndsWhenCut(Direct):
    def rest(self) -> list[bytes]:
        return super().rest() or [b""]


def test_a_timeout_of_the_locustfile_is_a_failed_request(tmp_path: Path) -> None:
    handler = once(CHUNKED, chunk(TOKEN), chunk(TOKEN), then=silence)
    told: list[str | None] = []
    with serving(handler) as url, load_process(tmp_path, url) as process:
        client = process.client()
        with pytest.raises(gevent.Timeout), gevent.Timeout(0.2):
            process.send(client, [{"role": "user", "content": "hi"}], place(), lambda answer: told.append(answer.error))
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert (record.error, record.message) == (
        "timeout",
        "cut by a gevent.Timeout of 0.2 seconds in the locustfile",
    )
    assert (len(record.chunks_s), record.status) == (2, 200)
    assert 0.15 < record.ended_s < 1
    assert told == ["timeout"]


def test_whatever_else_cuts_a_request_fails_it(tmp_path: Path) -> None:
    class Gone(BaseException):
        pass

    with serving(once(then=silence)) as url, load_process(tmp_path, url) as process:
        sending = gevent.spawn(process.send, process.client(), [{"role": "user", "content": "hi"}], place())
        gevent.sleep(0.1)
        sending.kill(Gone)
    (record,) = read_requests(tmp_path / "requests.jsonl")
    assert (record.error, record.message) == ("unfinished", "cut by Gone")


def test_an_answer_that_was_never_read_has_failed() -> None:
    assert (Answer().error, Answer().message) == ("client", "the answer was never read")


def test_messages_that_are_no_json_leave_a_record_too(tmp_path: Path) -> None:
    with serving(once(GOOD)) as url, load_process(tmp_path, url) as process:
        answer = process.send(process.client(), [{"role": "user", "content": object()}], place())  # type: ignore[typeddict-item]
    assert answer.error == "client"
    assert [record.error for record in read_requests(tmp_path / "requests.jsonl")] == ["client"]


def test_a_defect_of_ours_leaves_a_record_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(reading: Reading) -> Answer:
        raise ZeroDivisionError("we were careless")

    monkeypatch.setattr(Reading, "finish", broken)
    record = one_record(tmp_path, answering(GOOD))
    assert (record.error, record.message, record.status) == ("client", "ZeroDivisionError: we were careless", 200)


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for proxy, remark in ((None, ""), ("http://p", " (HTTP_PROXY is set, but a load test never goes through a proxy)")):
        if proxy:
            monkeypatch.setenv("HTTP_PROXY", proxy)
        with load_process(tmp_path, f"http://127.0.0.1:{port}") as process:
            answer = process.send(process.client(), [{"role": "user", "content": "hi"}], place())
        assert answer.error == "connect"
        assert answer.message == f"127.0.0.1:{port}: connection refused{remark}"
    assert [record.error for record in read_requests(tmp_path / "requests.jsonl")] == ["connect", "connect"]


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    with load_process(tmp_path, "http://no-such-host.invalid:8000") as process:
        answer = process.send(process.client(), [{"role": "user", "content": "hi"}], place())
    assert answer.error == "connect"
    assert (answer.message or "").startswith("no-such-host.invalid:8000: ")


@contextmanager
def exchanging(url: str, timeout_s: float = 5.0, **headers: str) -> Iterator[Callable[[], tuple[Exchange, Answer]]]:
    """A client, to send requests one after another on its connection."""
    clock = KernelClock()
    reader = Reader(clock, Later())
    client = Client(Target.of(url), clock, reader, timeout_s=timeout_s, headers=headers)

    def send() -> tuple[Exchange, Answer]:
        exchange = Exchange(id="x")
        client.post("/chat/completions", b'{"model":"m","stream":true,"max_tokens":4,"messages":[]}', exchange)
        return exchange, read_answer(exchange)

    try:
        yield send
    finally:
        client.close()
        reader.close()
        clock.close()


def connections_used(handler: Handler, requests: int, pause_s: float = 0.0) -> list[bool]:
    """For each of several requests whether a new connection was opened for it; all must succeed."""
    opened = []
    with serving(handler) as url, exchanging(url) as send:
        for _ in range(requests):
            exchange, answer = send()
            assert (answer.error, answer.message) == (None, None)
            opened.append(exchange.connect_ns is not None)
            time.sleep(pause_s)
    return opened


def test_the_connection_is_kept() -> None:
    assert connections_used(answering(GOOD), 4) == [True, False, False, False]


def test_connection_close_is_heeded() -> None:
    closing = GOOD.replace(b"Transfer-Encoding", b"Connection: close\r\nTransfer-Encoding", 1)
    assert connections_used(answering(closing), 3) == [True, True, True]


@pytest.mark.parametrize("counted_down", [True, False])
def test_a_limit_of_requests_per_connection_is_heeded(counted_down: bool) -> None:
    def handler(connection: socket.socket, number: int) -> None:
        for left in (2, 1, 0):
            if not read_request(connection):
                return
            limit = b"Keep-Alive: timeout=5, max=%d\r\n" % (left if counted_down else 2)
            connection.sendall(GOOD.replace(b"Transfer-Encoding", limit + b"Transfer-Encoding", 1))

    assert connections_used(handler, 4) == [True, False, True, False]


def test_an_idle_limit_is_heeded_before_the_server_enforces_it() -> None:
    limited = GOOD.replace(b"Transfer-Encoding", b"Keep-Alive: timeout=1\r\nTransfer-Encoding", 1)
    assert connections_used(answering(limited), 2, pause_s=0.9) == [True, True]
    assert connections_used(answering(limited), 2, pause_s=0.1) == [True, False]


def test_a_connection_closed_while_idle_costs_no_request() -> None:
    assert connections_used(once(GOOD), 3, pause_s=0.1) == [True, True, True]


def test_a_connection_that_closes_as_the_request_arrives_costs_no_request() -> None:
    def handler(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(GOOD)
        read_request(connection)  # the second request meets the closing of an idle connection

    with serving(handler) as url, exchanging(url) as send:
        assert not send()[0].resent
        asked_ns = time.monotonic_ns()
        exchange, answer = send()
    assert (answer.error, exchange.resent, exchange.connect_ns is not None) == (None, True, True)
    assert exchange.sent_ns is not None
    assert exchange.sent_ns - asked_ns < 2_000_000  # the first time: what came between is part of the latency
    assert answer.headers_s is not None and exchange.connect_ns is not None
    assert answer.headers_s > exchange.connect_ns / 1e9


@pytest.mark.parametrize("worked_s", [0.05, 0.3])
def test_a_server_that_dies_over_a_request_is_not_asked_again(worked_s: float) -> None:
    requests = []

    def handler(connection: socket.socket, number: int) -> None:
        requests.append(read_request(connection))
        connection.sendall(GOOD)
        requests.append(read_request(connection))
        time.sleep(worked_s)

    with serving(handler) as url, exchanging(url) as send:
        assert send()[1].error is None
        exchange, answer = send()
    assert (answer.error, exchange.resent) == ("disconnect", False)
    assert answer.ended_s > worked_s - 0.01
    assert len(requests) == 2


def test_a_failed_new_connection_is_not_tried_again() -> None:
    requests = []

    def handler(connection: socket.socket, number: int) -> None:
        requests.append(read_request(connection))

    with serving(handler) as url, exchanging(url) as send:
        assert send()[1].error == "disconnect"
    assert len(requests) == 1


def test_times_are_the_kernels_and_lie_before_the_read() -> None:
    with serving(answering(GOOD)) as url, exchanging(url) as send:
        send()
        exchange, answer = send()
    assert answer.clock == "kernel"
    assert exchange.sent_ns is not None
    for read_ns, stamp_ns in exchange.arrivals:
        assert stamp_ns is not None
        assert exchange.sent_ns - 50_000 < stamp_ns < read_ns + 50_000


def test_a_delay_of_ours_does_not_reach_the_times() -> None:
    """The server sends at once; this process is busy for a while before it reads."""

    def handler(connection: socket.socket, number: int) -> None:
        while read_request(connection):
            time.sleep(0.1)
            connection.sendall(GOOD)

    with serving(handler) as url, exchanging(url) as send:
        send()
        gevent.spawn_later(0.05, time.sleep, 0.3)  # blocks the hub, as a burst of work would
        exchange, answer = send()
    assert answer.chunks_s[0] == pytest.approx(0.1, abs=0.05)
    assert exchange.arrivals[0][0] - exchange.start_ns > 0.3e9


def test_stamps_that_cannot_be_are_not_believed() -> None:
    ms = 1_000_000

    def believable(*reads: tuple[int, int | None]) -> bool:
        arrivals = Arrivals()
        for read_ns, stamp_ns in reads:
            arrivals.append(read_ns, stamp_ns)
        assert list(arrivals) == list(reads)
        return arrivals.believable(5 * ms, ms)

    assert believable((10 * ms, 9 * ms), (20 * ms, 19 * ms))
    assert not believable((10 * ms, 9 * ms), (20 * ms, None))
    assert not believable((10 * ms, 12 * ms))  # in the future
    assert not believable((10 * ms, 3 * ms))  # before the request
    assert not believable((10 * ms, 9 * ms), (20 * ms, 7 * ms))  # before what came earlier
    assert not believable()


def test_a_clock_step_makes_the_record_fall_back_to_the_time_of_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    steps = iter([0, 0, 3_600_000_000_000])

    handler = answering(CHUNKED, chunk(TOKEN), chunk(FINISH) + chunk(DONE) + b"0\r\n\r\n", pause_s=0.05)
    with serving(handler) as url, exchanging(url) as send:
        monkeypatch.setattr(time, "time_ns", lambda: real() + next(steps, 3_600_000_000_000))
        exchange, answer = send()
    assert answer.error is None
    assert answer.clock == "read"
    assert answer.chunks_s[0] * 1e9 == pytest.approx(exchange.arrivals[1][0] - exchange.start_ns, abs=1)


def test_tls_is_verified_and_uses_the_time_of_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
        + ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(answering(GOOD), context) as url:
        with exchanging(url) as send:
            answer = send()[1]
            assert answer.error == "connect"
            assert "certificate" in (answer.message or "").lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with exchanging(url) as send:
            assert [send()[1].error for _ in range(2)] == [None, None]
            assert send()[1].clock == "read"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:8000", Target("a", 8000, False, "/v1")),
        ("http://a:8000/", Target("a", 8000, False, "/v1")),
        ("http://a:8000/v1/", Target("a", 8000, False, "/v1")),
        ("http://a/api", Target("a", 80, False, "/api/v1")),
        ("http://a/api/v1", Target("a", 80, False, "/api/v1")),
        ("https://a", Target("a", 443, True, "/v1")),
        ("a:81", Target("a", 81, False, "/v1")),
        ("http://[::1]:8000", Target("::1", 8000, False, "/v1")),
    ],
)
def test_base_urls(url: str, expected: Target) -> None:
    assert Target.of(url) == expected


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:port"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(HarnessError):
        Target.of(url)


@pytest.mark.parametrize(
    ("fault", "error", "chunks"),
    [
        ("ping", None, 8),
        ("delay:0.2", None, 8),
        ("429", "rejected", 0),
        ("503", "rejected", 0),
        ("500-html", "http", 0),
        ("html", "not_api", 0),
        ("cut", "disconnect", 3),
        ("hang", "timeout", 3),
        ("error-event", "stream_error", 3),
        ("lemonade-error", "stream_error", 0),
        ("malformed", "malformed", 7),
        ("split", None, 8),
        ("coalesce", None, 8),
        ("crlf", None, 8),
        ("multiline", None, 8),
        ("no-usage", None, 8),
        ("reasoning", None, 8),
        ("reasoning-content", None, 8),
        ("no-role", None, 8),
        ("empty", "empty", 0),
        ("split:1,crlf", None, 8),
        ("multiline,split:3,ping", None, 8),
    ],
)
def test_the_embedded_engines_faults(engine: str, fault: str, error: str | None, chunks: int) -> None:
    clock = KernelClock()
    reader = Reader(clock, Later())
    client = Client(Target.of(engine), clock, reader, timeout_s=1.0, headers={"X-Simulate-Fault": fault})
    exchange = Exchange(id=f"fault-{fault}")
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":8,"ignore_eos":true,'
        b'"stream":true,"stream_options":{"include_usage":true}}'
    )
    client.post("/chat/completions", body, exchange)
    client.close()
    reader.close()
    clock.close()
    answer = read_answer(exchange)
    assert (answer.error, len(answer.chunks_s)) == (error, chunks)
    if error is None:
        assert answer.output_tokens == (None if fault == "no-usage" else 8)
    if fault.startswith("reasoning"):
        assert answer.first_visible_s == answer.chunks_s[4]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with spawned("--preset", "instant", "--served-model-name", "m") as server:
        yield server.url
