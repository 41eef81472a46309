"""The embedded engine over a real socket: shapes on the wire, counts, timing, start and stop."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.simulated import Spawned, spawned

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
    line = sent(log_path, "stream")
    assert (len(line["chunks_s"]), line["output_tokens"], line["prompt_tokens"], line["finish"]) == (3, 3, 8, "length")
    assert line["received_s"] < line["role_s"] < line["chunks_s"][0] < line["chunks_s"][2] < line["ended_s"]


def test_no_usage_unless_asked_for(server: Spawned) -> None:
    body = ask(server, CHAT, chat(max_tokens=2, stream=True))[2]
    assert [e for e in events(body) if e != "[DONE]" and "usage" in e] == []


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
    assert first[-2]["choices"][0]["delta"] == {"content": ""}
    assert first[-2]["choices"][0]["finish_reason"] == "stop"
    assert 60 <= len(first) - 2 <= 181


def test_min_tokens_lengthens_and_max_tokens_cuts(server: Spawned) -> None:
    long = json.loads(ask(server, CHAT, chat("tell me", min_tokens=300))[2])
    short = json.loads(ask(server, CHAT, chat("tell me", max_completion_tokens=5))[2])
    assert (long["usage"]["completion_tokens"], long["choices"][0]["finish_reason"]) == (300, "stop")
    assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (5, "length")


def test_tokenize_counts_as_the_completion_does(server: Spawned) -> None:
    counted = json.loads(ask(server, "/tokenize", chat("one two three four"))[2])["count"]
    answered = json.loads(ask(server, CHAT, chat("one two three four", max_tokens=1))[2])
    assert counted == answered["usage"]["prompt_tokens"] == 9
    assert json.loads(ask(server, "/tokenize", {"prompt": "one two"})[2])["count"] == 2


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
        (chat(max_tokens=5000), 400, "BadRequestError", "max_tokens=5000 cannot be greater than max_model_len=2048. "
         "Please request fewer output tokens. (parameter=max_tokens, value=5000)"),
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


def test_one_connection_carries_many_requests(server: Spawned) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for stream in (True, False, True):
        connection.request("POST", CHAT, json.dumps(chat(max_tokens=2, stream=stream)))
        response = connection.getresponse()
        assert (response.status, len(response.read()) > 100) == (200, True)
    connection.close()


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


def test_the_send_log_starts_with_its_clock(server: Spawned, log_path: Path) -> None:
    head = json.loads(log_path.read_text().splitlines()[0])
    assert (head["format"], head["clock"]) == (1, "CLOCK_MONOTONIC")
    now = head["anchor_realtime_s"] + time.monotonic() - head["anchor_monotonic_s"]
    assert abs(now - time.time()) < 5


def test_steps_keep_their_absolute_schedule_at_fifty_streams(tmp_path: Path) -> None:
    log = tmp_path / "send.jsonl"
    flags = ("--preset", "instant", "--step-base-s", "0.02", "--send-log", str(log))
    with spawned(*flags) as server:
        many = [
            threading.Thread(
                target=ask,
                args=(server, CHAT, {**chat(max_tokens=40, ignore_eos=True, stream=True), "model": "simulated"}),
            )  # fmt: skip
            for _ in range(50)
        ]
        for one in many:
            one.start()
        for one in many:
            one.join()
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert [len(line["chunks_s"]) for line in lines] == [40] * 50
    late_s = [[at - line["chunks_s"][0] - 0.02 * k for k, at in enumerate(line["chunks_s"])] for line in lines]
    assert min(min(late[20:]) for late in late_s) < 0.005  # one that is late makes no later one late


def test_slowdown_is_seen_on_the_wire() -> None:
    with spawned("--preset", "instant", "--step-base-s", "0.005", "--slowdown", "2") as server:
        start = time.monotonic()
        ask(server, CHAT, {**chat(max_tokens=50, ignore_eos=True), "model": "simulated"})
        assert time.monotonic() - start >= 0.5


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


def test_a_failing_start_says_its_text_and_exits_with_its_code() -> None:
    flags = [
        "--fail-start",
        "ValueError: Free memory on device",
        "--exit-code",
        "7",
        "--startup-s",
        "0.1",
        "--port",
        "0",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "harness.simulated", *flags], capture_output=True, text=True, timeout=20
    )
    assert (ended.returncode, ended.stdout) == (7, "")
    assert ended.stderr.splitlines()[-1] == "ValueError: Free memory on device"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--fault", "nonsense"), "unknown fault 'nonsense'"),
        (("--max-num-seqs", "0"), "max_num_seqs must be at least 1, got 0"),
        (("--max-model-len", "999999"), "larger than the maximum number of tokens that can be stored in KV cache"),
    ],
)
def test_bad_flags_end_in_one_sentence(flags: tuple[str, str], text: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "harness.simulated", *flags], capture_output=True, text=True, timeout=20
    )
    assert ended.returncode == 1
    assert text in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_taken_port_is_named(server: Spawned) -> None:
    flags = ["--preset", "instant", "--port", str(server.port)]
    ended = subprocess.run(
        [sys.executable, "-m", "harness.simulated", *flags], capture_output=True, text=True, timeout=20
    )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{server.port}: " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "ERROR [simulated] --port: no port is 70000; 0 to 65535\n"),
        (["--port", "0", "--send-log", "/no/log"], "ERROR [simulated] /no/log: No such file or directory\n"),
    ],
)
def test_what_cannot_be_used_is_named(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "harness.simulated", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith(said) and "Traceback" not in ended.stderr
