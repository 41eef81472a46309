"""Each fault, as it appears on the wire. The client here is a bare socket: nothing repairs what comes in."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness.simulated import Spawned, spawned
from harness.simulated.answer import InjectedFault, active_faults, parse_fault


@pytest.fixture(scope="module")
def server() -> Iterator[Spawned]:
    with spawned("--preset", "instant") as it:
        yield it


def raw(server: Spawned, fault: str, timeout: float = 5, **more: object) -> tuple[bytes, bytes]:
    """Head and body of an answer, the body as it came: chunk sizes and all."""
    fields: dict[str, object] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 6,
        "ignore_eos": True,
        **more,
    }
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout) as link:
        link.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-simulate-fault: %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (fault.encode(), len(body), body)
        )
        data = b""
        while piece := link.recv(65536):
            data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def chunks(body: bytes) -> list[bytes]:
    """The pieces of a chunked body, each one write of the server; the end mark is an empty piece."""
    found = []
    while body:
        size, _, body = body.partition(b"\r\n")
        found.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return found


def stream(server: Spawned, fault: str) -> bytes:
    return b"".join(chunks(raw(server, fault)[1]))


def events(body: bytes) -> list[Any]:
    data = [block.removeprefix("data: ") for block in body.decode().split("\n\n") if block]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


def test_without_a_fault_every_event_is_one_write(server: Spawned) -> None:
    pieces = chunks(raw(server, "")[1])
    assert len(pieces) == 1 + 6 + 2 + 1  # role, tokens, usage and [DONE], end of body
    assert all(p.startswith(b"data: ") and p.endswith(b"\n\n") for p in pieces[:-1])


def test_cut_closes_without_an_end(server: Spawned) -> None:
    pieces = chunks(raw(server, "cut:2")[1])
    assert len(pieces) == 1 + 2
    assert b"[DONE]" not in pieces[-1] and pieces[-1] != b""


def test_cut_without_streaming_sends_half_a_body(server: Spawned) -> None:
    head, body = raw(server, "cut", stream=False)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert (head.startswith(b"HTTP/1.1 200"), len(body)) == (True, length // 2)


def test_close_ends_the_connection_after_a_whole_stream_that_says_keep_alive(server: Spawned) -> None:
    body = b'{"messages":[{"role":"user","content":"hello"}],"stream":true,"max_tokens":2,"ignore_eos":true}'
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-simulate-fault: close:0.2\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    with socket.create_connection(("127.0.0.1", server.port), 5) as link:
        link.sendall(request)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += link.recv(65536)
        whole_s = time.monotonic()
        link.sendall(request)  # it is never read
        assert link.recv(65536) == b""
    assert time.monotonic() - whole_s > 0.1
    assert b"[DONE]" in data and b"connection: close" not in data.lower()


def test_hang_stays_silent(server: Spawned) -> None:
    with pytest.raises(TimeoutError):
        raw(server, "hang:1", timeout=0.3)


def test_an_error_event_as_vllm_sends_it(server: Spawned) -> None:
    *_, error, done = events(stream(server, "error-event:2"))
    assert (error["error"]["type"], error["error"]["code"], done) == ("InternalServerError", 500, "[DONE]")


def test_an_error_event_as_lemonade_sends_it(server: Spawned) -> None:
    head, body = raw(server, "lemonade-error")
    assert head.startswith(b"HTTP/1.1 200")
    pieces = chunks(body)
    assert [e["error"]["status_code"] for e in events(pieces[0])] == [500]
    assert pieces[1:] == [b""]  # the body ends properly, but there was no [DONE]


def test_an_error_without_streaming_is_a_status(server: Spawned) -> None:
    head, body = raw(server, "error-event", stream=False)
    assert (head.split(b"\r\n")[0], json.loads(body)["error"]["code"]) == (b"HTTP/1.1 500 Internal Server Error", 500)


@pytest.mark.parametrize(
    ("fault", "status"), [("429:3", b"429 Too Many Requests"), ("503", b"503 Service Unavailable")]
)
def test_statuses_carry_retry_after(server: Spawned, fault: str, status: bytes) -> None:
    head, body = raw(server, fault)
    assert head.startswith(b"HTTP/1.1 " + status)
    assert (b"retry-after: 3" if fault == "429:3" else b"retry-after: 1") in head
    assert json.loads(body)["error"]["code"] == int(fault[:3])


@pytest.mark.parametrize(("fault", "status"), [("html", b"200 OK"), ("500-html", b"500 Internal Server Error")])
def test_html_instead_of_an_answer(server: Spawned, fault: str, status: bytes) -> None:
    head, body = raw(server, fault)
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"content-type: text/html" in head and body.startswith(b"<html>")


def test_a_malformed_event_in_an_otherwise_whole_stream(server: Spawned) -> None:
    blocks = [b.removeprefix("data: ") for b in stream(server, "malformed:2").decode().split("\n\n") if b]
    assert len(blocks) == 9 and blocks[-1] == "[DONE]"
    with pytest.raises(json.JSONDecodeError):
        json.loads(blocks[2])


def test_split_and_coalesced_writes_carry_the_same_stream(server: Spawned) -> None:
    split, coalesced = chunks(raw(server, "split:5")[1]), chunks(raw(server, "coalesce:4")[1])
    assert max(map(len, split)) == 5 and len(split) > 100
    assert [p.count(b"data: ") for p in coalesced] == [4, 4, 1, 0]
    texts = [[e["choices"][0]["delta"] for e in events(b"".join(p))[:-2]] for p in (split, coalesced)]
    assert texts[0] == texts[1] and len(texts[0]) == 7


def test_crlf_ends_every_line(server: Spawned) -> None:
    body = stream(server, "crlf")
    assert body.count(b"\n") == body.count(b"\r\n") == 18
    assert len(events(body.replace(b"\r\n", b"\n"))) == 9


def test_multiline_data_joins_to_the_same_json(server: Spawned) -> None:
    first = stream(server, "multiline").split(b"\n\n")[0]
    lines = [line.removeprefix(b"data: ") for line in first.split(b"\n")]
    assert len(lines) == 3
    assert json.loads(b"\n".join(lines))["object"] == "chat.completion.chunk"


def test_pings_until_the_first_token() -> None:
    with spawned("--preset", "instant", "--prefill-per-token-s", "0.02") as slow:
        body = stream(slow, "ping:0.02")
    pings, rest = body.count(b": ping\n\n"), body.replace(b": ping\n\n", b"")
    assert 4 <= pings <= 8  # 6 prompt tokens take 0.12 s
    assert body.startswith(b": ping\n\n") and len(events(rest)) == 9


def test_no_usage_though_asked_for(server: Spawned) -> None:
    assert len(events(stream(server, "no-usage"))) == 8
    assert json.loads(raw(server, "no-usage", stream=False)[1])["usage"] is None


@pytest.mark.parametrize(
    ("fault", "field"), [("reasoning:2", "reasoning"), ("reasoning-content:2", "reasoning_content")]
)
def test_reasoning_comes_before_content(server: Spawned, fault: str, field: str) -> None:
    deltas = [e["choices"][0]["delta"] for e in events(stream(server, fault))[1:7]]
    assert [list(d) for d in deltas] == [[field]] * 2 + [["content"]] * 4
    message = json.loads(raw(server, fault, stream=False)[1])["choices"][0]["message"]
    assert (len(message[field].split()), len(message["content"].split())) == (2, 4)


def test_a_tool_call_comes_in_pieces(server: Spawned) -> None:
    deltas = [e["choices"][0]["delta"]["tool_calls"][0] for e in events(stream(server, "tool-call"))[1:7]]
    assert (deltas[0]["function"]["name"], deltas[0]["type"]) == ("classify", "function")
    assert len("".join(d["function"]["arguments"] for d in deltas).split()) == 6
    message = json.loads(raw(server, "tool-call", stream=False)[1])["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"][0]["function"]["arguments"].split()) == 6


def test_no_role_and_an_empty_completion(server: Spawned) -> None:
    assert "role" not in events(stream(server, "no-role"))[0]["choices"][0]["delta"]
    role, end, usage, done = events(stream(server, "empty"))
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({"content": ""}, "stop")
    assert usage["usage"]["completion_tokens"] == 1


def test_delay_holds_everything_back(server: Spawned) -> None:
    start = time.monotonic()
    assert raw(server, "delay:0.3,429")[0].startswith(b"HTTP/1.1 429")
    assert time.monotonic() - start >= 0.3


def test_an_unknown_fault_is_refused(server: Spawned) -> None:
    head, body = raw(server, "gremlins")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["message"].startswith("unknown fault 'gremlins'; known: delay, 429")


def test_a_fault_on_the_command_line_strikes_every_nth() -> None:
    with spawned("--preset", "instant", "--fault", "503@3") as server:
        statuses = [raw(server, "")[0].split()[1] for _ in range(6)]
    assert statuses == [b"200", b"200", b"503", b"200", b"200", b"503"]


def test_exit_ends_the_process_when_one_more_request_arrives() -> None:
    with spawned("--preset", "instant", "--fault", "exit:2") as server:
        assert [raw(server, "")[0].split()[1] for _ in range(2)] == [b"200", b"200"]
        with contextlib.suppress(ConnectionResetError):
            assert raw(server, "") == (b"", b"")
        assert server.process.wait(5) == 1


def test_never_ready_says_so_on_health() -> None:
    with spawned("--fault", "never-ready") as server, socket.create_connection(("127.0.0.1", server.port), 5) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert link.recv(1000).startswith(b"HTTP/1.1 503")


def test_faults_are_read_strictly() -> None:
    assert parse_fault("cut:5@3") == InjectedFault("cut", 5.0, 3)
    assert parse_fault("crlf") == InjectedFault("crlf", 0.0, 1)
    for text in ("cut:x", "crlf:1", "cut@0", "split:0", "", "cut:-1"):
        with pytest.raises(ValueError, match="fault"):
            parse_fault(text)
    with pytest.raises(ValueError, match="only be set on the command line"):
        active_faults([], 1, "exit:3")
    assert active_faults([InjectedFault("crlf", 0, 2)], 4, "cut:1, ping") == {"crlf": 0.0, "cut": 1.0, "ping": 0.02}
