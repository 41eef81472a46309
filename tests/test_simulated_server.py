"""The embedded engine over a real socket: shapes on the wire, counts, timing, start and stop."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.simulated import Spawned, spawned
from harness.simulated.answer import InjectedFault, active_faults, parse_fault

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated") / "send.jsonl"


@pytest.fixture(scope="module")
def server(log_path: Path) -> Iterator[Spawned]:
    with spawned(
        "--preset", "instant", "--model", "tiny", "--max-model-len", "2048", "--send-log", str(log_path)
    ) as it:
        yield it


def ask(server: Spawned, path: str, body: object = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    connection.request(
        "GET" if data is None else "POST", path, data, {k.replace("_", "-"): v for k, v in headers.items()}
    )
    response = connection.getresponse()
    answer = response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    connection.close()
    return answer


def chat(text: str = "one two three", **more: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def events(body: bytes) -> list[Any]:
    """Data events of a stream, decoded; `[DONE]` stays text."""
    data = [block.removeprefix("data: ") for block in body.decode().split("\n\n") if block]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


def counter(server: Spawned, name: str) -> float:
    lines = ask(server, "/metrics")[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def sent(log_path: Path, identity: str) -> dict[str, Any]:
    """The send log's line of a request; it is written a moment after the answer's last byte."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for text in log_path.read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            if line.get("request_id") == identity:
                return line
        time.sleep(0.01)
    raise AssertionError(f"no line of {identity} in {log_path}")


def test_a_chat_answer_in_one_piece(server: Spawned) -> None:
    status, headers, body = ask(server, CHAT, chat(max_tokens=4, ignore_eos=True), X_Request_Id="whole")
    answer = json.loads(body)
    assert (status, headers["x-request-id"], answer["id"]) == (200, "whole", "chatcmpl-whole")
    assert answer["object"] == "chat.completion"
    assert len(answer["choices"][0]["message"]["content"].split()) == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 12, "completion_tokens": 4,
                               "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip


def test_a_chat_stream_has_the_order_of_vllm(server: Spawned, log_path: Path) -> None:
    asked = chat(max_tokens=3, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    status, headers, body = ask(server, CHAT, asked, X_Request_Id="stream")
    role, *tokens, usage, done = events(body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [list(t["choices"][0]["delta"]) for t in tokens] == [["content"]] * 3
    assert [t["choices"][0]["finish_reason"] for t in tokens] == [None, None, "length"]
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 3, "[DONE]")
    head = json.loads(log_path.read_text().splitlines()[0])
    assert (head["format"], head["clock"]) == (1, "CLOCK_MONOTONIC")
    assert abs(head["anchor_realtime_s"] + time.monotonic() - head["anchor_monotonic_s"] - time.time()) < 5
    line = sent(log_path, "stream")
    assert (len(line["chunks_s"]), line["output_tokens"], line["prompt_tokens"], line["finish"]) == (3, 3, 8, "length")
    assert line["received_s"] < line["role_s"] < line["chunks_s"][0] < line["chunks_s"][2] < line["ended_s"]


def test_a_text_completion_both_ways(server: Spawned) -> None:
    whole = json.loads(ask(server, "/v1/completions", {"prompt": "a b c", "max_tokens": 3, "ignore_eos": True})[2])
    assert (whole["object"], whole["usage"]["prompt_tokens"], len(whole["choices"][0]["text"].split())) == (
        "text_completion", 3, 3)  # fmt: skip
    body = ask(server, "/v1/completions", {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "stream": True})[2]
    assert len(events(body)) == 4
    assert all(e["choices"][0]["text"] for e in events(body)[:3])


def test_a_natural_end_is_seeded_and_closes_with_an_empty_event(server: Spawned) -> None:
    first, second = (events(ask(server, CHAT, chat("tell me", stream=True))[2]) for _ in range(2))
    assert [e["choices"] for e in first[:-1]] == [e["choices"] for e in second[:-1]]
    last = first[-2]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({"content": ""}, "stop")
    assert 60 <= len(first) - 2 <= 181
    assert not any("usage" in e for e in first[:-1])  # which was not asked for
    for given, tokens, finish in (({"min_tokens": 300}, 300, "stop"), ({"max_completion_tokens": 5}, 5, "length")):
        answer = json.loads(ask(server, CHAT, chat("tell me", **given))[2])
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (tokens, finish)


def test_the_next_turn_of_a_conversation_finds_its_blocks(server: Spawned) -> None:
    turn = [{"role": "user", "content": "word " * 60}]
    first = json.loads(ask(server, CHAT, {"messages": turn, "max_tokens": 20, "ignore_eos": True})[2])
    turn += [first["choices"][0]["message"], {"role": "user", "content": "and now"}]
    second = json.loads(ask(server, CHAT, {"messages": turn, "max_tokens": 2})[2])
    assert first["usage"]["prompt_tokens"] == 65
    # 65 prompt tokens and 19 of the 20 answer tokens are in the cache: 5 full blocks of 16
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 80}


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        (chat(model="nope"), 404, "NotFoundError", "The model `nope` does not exist. Valid aliases: tiny"),
        (chat(max_tokens=5000), 400, "BadRequestError", "max_tokens=5000 cannot be greater than max_model_len=2048. "),
        (chat("w " * 3000), 400, "BadRequestError", "This model's maximum context length is 2048 tokens. However, "
         "your prompt contains at least 3005 input tokens, which exceeds this limit even without any output tokens."),
        (chat("w " * 2000, max_tokens=100), 400, "BadRequestError", "you requested 100 output tokens and your prompt "
         "contains 2005 input tokens, for a total of 2105 tokens."),
        (chat(temperature=-1.0), 400, "BadRequestError", "temperature must be non-negative, got -1.0."),
        (b'{"model": "tiny" "x"}', 400, "Bad Request", "JSON decode error"),
        ({"messages": []}, 400, "BadRequestError", "messages must be a list of at least one message"),
    ],
)  # fmt: skip
def test_refusals_have_the_texts_of_vllm(server: Spawned, body: object, status: int, kind: str, text: str) -> None:
    got, _, answer = ask(server, CHAT, body)
    error = json.loads(answer)["error"]
    assert (got, error["type"], error["code"]) == (status, kind, status)
    assert text in error["message"]


def test_the_small_routes(server: Spawned) -> None:
    assert ask(server, "/health")[0::2] == (200, b"")
    assert json.loads(ask(server, "/version")[2]) == {"version": "0.32.0+simulated"}
    card = json.loads(ask(server, "/v1/models")[2])["data"][0]
    assert (card["id"], card["max_model_len"], card["owned_by"]) == ("tiny", 2048, "simulated")
    assert json.loads(ask(server, "/tokenize", {"prompt": "one two"})[2])["count"] == 2
    counted = json.loads(ask(server, "/tokenize", chat("one two three four"))[2])["count"]
    answered = json.loads(ask(server, CHAT, chat("one two three four", max_tokens=1))[2])
    assert counted == answered["usage"]["prompt_tokens"] == 9
    assert ask(server, "/nowhere")[0] == 404
    assert ask(server, "/v1/models", {})[0] == 405


def test_metrics_agree_with_what_was_sent(server: Spawned) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total",
             "vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count")  # fmt: skip
    before = [counter(server, name) for name in names]
    for _ in range(3):
        ask(server, CHAT, chat(max_tokens=7, ignore_eos=True, stream=True))
    assert [counter(server, name) - old for name, old in zip(names, before, strict=True)] == [21, 24, 3, 3, 3]
    assert counter(server, "simulated_engine_info") == 1


def test_a_client_that_leaves_ends_its_request(server: Spawned, log_path: Path) -> None:
    aborted = counter(server, "vllm:request_success_total")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    body = json.dumps(chat(max_tokens=1500, ignore_eos=True, stream=True))
    connection.request("POST", CHAT, body, {"X-Request-Id": "leaver"})
    response = connection.getresponse()
    response.read1(10)
    response.close()
    connection.close()
    deadline = time.monotonic() + 5
    while counter(server, "vllm:request_success_total") == aborted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert counter(server, "vllm:num_requests_running") == 0
    assert sent(log_path, "leaver")["finish"] == "abort"


def test_steps_keep_their_absolute_schedule_at_fifty_streams(tmp_path: Path) -> None:
    log = tmp_path / "send.jsonl"
    flags = ("--preset", "instant", "--step-base-s", "0.02", "--send-log", str(log))
    asked = {**chat(max_tokens=40, ignore_eos=True, stream=True), "model": "simulated"}
    with spawned(*flags) as server, ThreadPoolExecutor(50) as threads:
        list(threads.map(lambda _: ask(server, CHAT, asked), range(50)))
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert [len(line["chunks_s"]) for line in lines] == [40] * 50
    late_s = [[at - line["chunks_s"][0] - 0.02 * k for k, at in enumerate(line["chunks_s"])] for line in lines]
    assert min(min(late[20:]) for late in late_s) < 0.005  # one that is late makes no later one late


def test_sigterm_ends_a_busy_server_at_once(tmp_path: Path) -> None:
    log = tmp_path / "send.jsonl"
    with spawned("--preset", "instant", "--send-log", str(log)) as server:
        request = urllib.request.Request(
            server.url + CHAT,
            json.dumps({**chat(max_tokens=100000, ignore_eos=True, stream=True), "model": "simulated"}).encode(),
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            response.read1(10)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0  # the answer would take 200 s
    assert json.loads(log.read_text().splitlines()[1])["finish"] == "abort"


def started(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "harness.simulated", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0"),
        (["--port", "70000"], "ERROR [simulated] --port: no port is 70000; 0 to 65535\n"),
        (["--port", "0", "--send-log", "/no/log"], "ERROR [simulated] /no/log: No such file or directory\n"),
        (["--port", "PORT"], "cannot listen on 127.0.0.1:PORT: "),
        (["--fail-start", "ValueError: Free memory", "--exit-code", "1", "--startup-s", "0.1"],
         "ValueError: Free memory"),
    ],
)  # fmt: skip
def test_starts_that_fail_end_in_one_sentence(server: Spawned, flags: list[str], text: str) -> None:
    taken = str(server.port)
    ended = started(*(flag.replace("PORT", taken) for flag in flags))
    assert ended.returncode == 1
    assert text.replace("PORT", taken) in ended.stderr and "Traceback" not in ended.stderr


# Faults, as they appear on the wire. The client is a bare socket: nothing repairs what comes in.


def raw(server: Spawned, fault: str, timeout: float = 5, **more: object) -> tuple[bytes, bytes]:
    """Head and body of an answer, the body as it came: chunk sizes and all."""
    fields: dict[str, object] = {
        "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 6, "ignore_eos": True, **more,
    }  # fmt: skip
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


def test_without_a_fault_every_event_is_one_write(server: Spawned) -> None:
    pieces = chunks(raw(server, "")[1])
    assert len(pieces) == 1 + 6 + 2 + 1  # role, tokens, usage and [DONE], end of body
    assert all(p.startswith(b"data: ") and p.endswith(b"\n\n") for p in pieces[:-1])


def test_cut_closes_without_an_end(server: Spawned) -> None:
    pieces = chunks(raw(server, "cut:2")[1])
    assert len(pieces) == 1 + 2
    assert b"[DONE]" not in pieces[-1] and pieces[-1] != b""
    head, body = raw(server, "cut", stream=False)  # half a body
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
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += link.recv(65536)
        whole_s = time.monotonic()
        link.sendall(request)  # it is never read
        assert link.recv(65536) == b""
    assert time.monotonic() - whole_s > 0.1
    assert b"[DONE]" in data and b"connection: close" not in data.lower()


def test_hang_stays_silent(server: Spawned) -> None:
    with pytest.raises(TimeoutError):
        raw(server, "hang:1", timeout=0.3)


def test_an_error_event_as_vllm_and_as_lemonade_send_it(server: Spawned) -> None:
    *_, error, done = events(stream(server, "error-event:2"))
    assert (error["error"]["type"], error["error"]["code"], done) == ("InternalServerError", 500, "[DONE]")
    head, body = raw(server, "error-event", stream=False)
    assert (head.split(b"\r\n")[0], json.loads(body)["error"]["code"]) == (b"HTTP/1.1 500 Internal Server Error", 500)
    head, body = raw(server, "lemonade-error")
    assert head.startswith(b"HTTP/1.1 200")
    pieces = chunks(body)
    assert [e["error"]["status_code"] for e in events(pieces[0])] == [500]
    assert pieces[1:] == [b""]  # the body ends properly, but there was no [DONE]


def test_statuses_and_html_instead_of_an_answer(server: Spawned) -> None:
    for fault, status, more in (
        ("429:3", b"429 Too Many Requests", b"retry-after: 3"), ("503", b"503 Service Unavailable", b"retry-after: 1"),
        ("html", b"200 OK", b"content-type: text/html"), ("500-html", b"500 Internal", b"content-type: text/html"),
        ("delay:0.1,429", b"429", b"retry-after"),
    ):  # fmt: skip
        start = time.monotonic()
        head, body = raw(server, fault)
        assert head.startswith(b"HTTP/1.1 " + status) and more in head
        assert body.startswith(b"<html>") if "html" in fault else json.loads(body)["error"]["code"] == int(status[:3])
        assert time.monotonic() - start >= 0.1 or "delay" not in fault


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


def test_pings_until_the_first_token() -> None:
    with spawned("--preset", "instant", "--prefill-per-token-s", "0.02") as slow:
        body = stream(slow, "ping:0.02")
    pings, rest = body.count(b": ping\n\n"), body.replace(b": ping\n\n", b"")
    assert 4 <= pings <= 8  # 6 prompt tokens take 0.12 s
    assert body.startswith(b": ping\n\n") and len(events(rest)) == 9


def test_reasoning_comes_before_content(server: Spawned) -> None:
    for fault, field in (("reasoning:2", "reasoning"), ("reasoning-content:2", "reasoning_content")):
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


def test_an_empty_completion_and_no_usage_though_asked_for(server: Spawned) -> None:
    role, end, usage, done = events(stream(server, "empty"))
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({"content": ""}, "stop")
    assert usage["usage"]["completion_tokens"] == 1
    assert len(events(stream(server, "no-usage"))) == 8
    assert json.loads(raw(server, "no-usage", stream=False)[1])["usage"] is None


def test_an_unknown_fault_is_refused(server: Spawned) -> None:
    head, body = raw(server, "gremlins")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["message"].startswith("unknown fault 'gremlins'; known: delay, 429")


def test_faults_of_the_command_line_strike_every_nth_and_exit_ends_the_process() -> None:
    with spawned("--preset", "instant", "--fault", "503@3", "--fault", "exit:6") as server:
        statuses = [raw(server, "")[0].split()[1] for _ in range(6)]
        assert statuses == [b"200", b"200", b"503", b"200", b"200", b"503"]
        with contextlib.suppress(ConnectionResetError):
            assert raw(server, "") == (b"", b"")
        assert server.process.wait(5) == 1


def test_never_ready_says_so_on_health() -> None:
    with spawned("--fault", "never-ready") as server, socket.create_connection(("127.0.0.1", server.port), 5) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert link.recv(1000).startswith(b"HTTP/1.1 503")


def test_faults_are_read_strictly() -> None:
    assert parse_fault("cut:5@3") == InjectedFault("cut", 5.0, 3)
    assert parse_fault("html") == InjectedFault("html", 0.0, 1)
    for text in ("cut:x", "html:1", "cut@0", "split:0", "", "cut:-1"):
        with pytest.raises(ValueError, match="fault"):
            parse_fault(text)
    with pytest.raises(ValueError, match="only be set on the command line"):
        active_faults([], 1, "exit:3")
    assert active_faults([InjectedFault("html", 0, 2)], 4, "cut:1, ping") == {"html": 0.0, "cut": 1.0, "ping": 0.02}
