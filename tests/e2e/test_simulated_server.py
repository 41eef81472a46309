"""The embedded engine over a real socket: shapes on the wire, counts, timing, start and stop.

test_client.py has how our client sees its faults, test_endpoints.py its vectors and structured answers.
"""

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.simulated.answer import InjectedFault, active_faults, parse_fault
from harness.workload.made_texts import made_prompt
from tests.support.command import PATIENCE_S, until
from tests.support.simulated import Spawned, spawned
from tests.support.wording import Wording

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated") / "send.jsonl"


@pytest.fixture(scope="module")
def server(log_path: Path) -> Iterator[Spawned]:
    flags = ("--preset", "instant", "--model", "tiny", "--max-model-len", "2048", "--send-log", str(log_path))
    with spawned(*flags) as engine:
        yield engine


def ask(server: Spawned, path: str, body: object = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    method, names = "GET" if data is None else "POST", {k.replace("_", "-"): v for k, v in headers.items()}
    try:
        connection.request(method, path, data, names)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def chat(text: str = "one two three", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


def streamed(tokens: int) -> dict[str, object]:
    return chat(max_tokens=tokens, ignore_eos=True, stream=True, stream_options={"include_usage": True})


def events(body: bytes) -> list[Any]:
    """Data events of a stream, decoded; `[DONE]` stays text."""
    data = [block.removeprefix("data: ") for block in body.decode().split("\n\n") if block]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


def counter(server: Spawned, name: str) -> float:
    lines = ask(server, "/metrics")[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def log_line(log_path: Path, request_id: str) -> dict[str, Any]:
    """The send log's line of a request; it is written a moment after the answer's last byte."""

    def line() -> Any:
        lines = map(json.loads, log_path.read_text().splitlines())
        return next((line for line in lines if line.get("request_id") == request_id), None)

    return dict(until(line))


def test_an_answer_in_one_piece(server: Spawned) -> None:
    status, headers, body = ask(server, CHAT, chat(max_tokens=4, ignore_eos=True), X_Request_Id="whole")
    answer = json.loads(body)
    assert (status, headers["x-request-id"], answer["id"]) == (200, "whole", "chatcmpl-whole")
    assert answer["object"] == "chat.completion"
    assert len(answer["choices"][0]["message"]["content"].split()) == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 12, "completion_tokens": 4,
                               "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    text = json.loads(ask(server, "/v1/completions", {"prompt": "a b c", "max_tokens": 3, "ignore_eos": True})[2])
    assert (text["object"], text["usage"]["prompt_tokens"]) == ("text_completion", 3)
    assert len(text["choices"][0]["text"].split()) == 3


def test_a_stream_has_the_order_of_vllm(server: Spawned, log_path: Path) -> None:
    status, headers, body = ask(server, CHAT, streamed(3), X_Request_Id="stream")
    role, *tokens, usage, done = events(body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [list(t["choices"][0]["delta"]) for t in tokens] == [["content"]] * 3
    assert [t["choices"][0]["finish_reason"] for t in tokens] == [None, None, "length"]
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 3, "[DONE]")
    head = json.loads(log_path.read_text().splitlines()[0])
    assert (head["format"], head["clock"]) == (1, "CLOCK_MONOTONIC")
    assert abs(head["anchor_realtime_s"] + time.monotonic() - head["anchor_monotonic_s"] - time.time()) < 5
    line = log_line(log_path, "stream")
    assert (len(line["chunks_s"]), line["output_tokens"], line["prompt_tokens"], line["finish"]) == (3, 3, 8, "length")
    assert line["received_s"] < line["chunks_s"][0] < line["chunks_s"][2] < line["ended_s"]
    text = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "stream": True}
    assert all(e["choices"][0]["text"] for e in events(ask(server, "/v1/completions", text)[2])[:3])


def test_a_natural_end_of_a_message_has_its_last_events(server: Spawned) -> None:
    asked = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 2000, "stream": True}
    body = ask(server, "/v1/messages", asked)[2]
    data = [json.loads(line.removeprefix(b"data: ")) for line in body.splitlines() if line.startswith(b"data: ")]
    assert [one["type"] for one in data[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[-2]["delta"] == {"stop_reason": "end_turn"}


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
        (chat(max_tokens=0), 400, "BadRequestError", "max_tokens must be an integer of at least 1, got 0."),
        (chat("w " * 3000), 400, "BadRequestError", "your prompt contains 3005 input tokens"),
        (chat("w " * 2000, max_tokens=100), 400, "BadRequestError", "you requested 100 output tokens and your prompt "
         "contains 2005 input tokens, for a total of 2105 tokens."),
        (b'{"model": "tiny" "x"}', 400, "Bad Request", "JSON decode error"),
        ({"messages": []}, 400, "BadRequestError", "messages must be a list of at least one message"),
    ],
)  # fmt: skip
def test_invalid_requests_get_the_errors_of_vllm(
    server: Spawned, body: object, status: int, kind: str, text: str
) -> None:
    got, _, answer = ask(server, CHAT, body)
    error = json.loads(answer)["error"]
    assert (got, error["type"], error["code"]) == (status, kind, status)
    assert text in error["message"]


def test_the_small_routes(server: Spawned) -> None:
    assert ask(server, "/health")[0::2] == (200, b"")
    assert json.loads(ask(server, "/version")[2]) == {"version": "0.32.0+simulated"}
    card = json.loads(ask(server, "/v1/models")[2])["data"][0]
    assert (card["id"], card["max_model_len"], card["owned_by"]) == ("tiny", 2048, "simulated")
    counted = json.loads(ask(server, "/tokenize", chat("one two three four"))[2])["count"]
    answered = json.loads(ask(server, CHAT, chat("one two three four", max_tokens=1))[2])
    assert counted == answered["usage"]["prompt_tokens"] == 9
    assert (ask(server, "/nowhere")[0], ask(server, "/v1/models", {})[0]) == (404, 405)


def test_metrics_agree_with_what_was_sent(server: Spawned) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total",
             "vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count")  # fmt: skip
    before = [counter(server, name) for name in names]
    for _ in range(3):
        ask(server, CHAT, streamed(7))
    assert [counter(server, name) - old for name, old in zip(names, before, strict=True)] == [21, 24, 3, 3, 3]
    assert counter(server, "simulated_engine_info") == 1


def test_speculation_is_counted() -> None:
    """Of four drafted tokens all are accepted: an answer of 11 tokens takes three steps."""
    flags = ("--preset", "instant", "--num-speculative-tokens", "4", "--acceptance-rate", "1")
    with spawned(*flags) as server:
        _, *tokens, usage, _ = events(ask(server, CHAT, streamed(11))[2])
        assert (len(tokens), usage["usage"]["completion_tokens"]) == (11, 11)
        names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
        assert [counter(server, name) for name in names] == [8, 8]


def test_drafts_are_accepted_by_the_kind_of_the_prompt() -> None:
    """All drafts of code, none of a structured answer, and of other prompts as `--acceptance-rate` says."""
    flags = ("--preset", "instant", "--num-speculative-tokens", "4", "--acceptance-rate", "1")
    names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    with spawned(*flags, "--acceptance-of", "code=1", "--acceptance-of", "structured=0") as server:
        counted = []
        for kind in ("code", "structured", "chat"):
            ask(server, CHAT, chat(made_prompt(kind, 100, 1, 0), max_tokens=11, ignore_eos=True))
            counted.append([counter(server, name) for name in names])
    assert counted[0] == [8, 8]
    assert counted[1] == [8 + 4 * 6 + 3 + 2 + 1, 8], "each step drafts no more than is missing"
    assert counted[2] == [counted[1][0] + 8, 16]


@pytest.mark.parametrize("text", ["code", "code=2", "poem=0.5", "chat=x"])
def test_an_acceptance_that_cannot_be_is_refused(text: str) -> None:
    command = [sys.executable, "-m", "harness.simulated", "--acceptance-of", text]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1 and repr(text) in done.stderr.decode()


@pytest.mark.parametrize(("fault", "tokens", "finish"), [("", 1500, "abort"), ("deaf", 50, "length")])
def test_a_client_that_disconnects_ends_its_request(
    server: Spawned, log_path: Path, fault: str, tokens: int, finish: str
) -> None:
    headers = {"X-Request-Id": f"leaver{fault}", "X-Simulate-Fault": fault}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", CHAT, json.dumps(streamed(tokens)), headers)
    response = connection.getresponse()
    response.read1(10)
    response.close()
    connection.close()
    assert log_line(log_path, f"leaver{fault}")["finish"] == finish
    assert counter(server, "vllm:num_requests_running") == 0


def test_steps_keep_their_absolute_schedule_at_fifty_streams(tmp_path: Path) -> None:
    log = tmp_path / "send.jsonl"
    flags = ("--preset", "instant", "--step-base-s", "0.02", "--send-log", str(log))
    with spawned(*flags) as server, ThreadPoolExecutor(50) as threads:
        list(threads.map(lambda _: ask(server, CHAT, streamed(40)), range(50)))
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert [len(line["chunks_s"]) for line in lines] == [40] * 50
    late_s = [[at - line["chunks_s"][0] - 0.02 * k for k, at in enumerate(line["chunks_s"])] for line in lines]
    # One that is late makes no later one late: all are on time, or on a busy machine a later one is less late.
    assert min(min(late[20:]) for late in late_s) < 0.005 or any(
        after < before - 0.005 for late in late_s for before, after in pairwise(late)
    )


def test_sigterm_ends_a_busy_server_at_once(tmp_path: Path) -> None:
    log = tmp_path / "send.jsonl"
    with spawned("--preset", "instant", "--send-log", str(log)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        connection.request("POST", CHAT, json.dumps(streamed(100_000)))
        connection.getresponse().read1(10)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0  # the answer would take 200 s
        connection.close()
    assert json.loads(log.read_text().splitlines()[1])["finish"] == "abort"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0"),
        (["--port", "70000"], "ERROR [simulated] --port: no port is 70000; 0 to 65535\n"),
        (["--port", "0", "--send-log", "/no/log"], "ERROR [simulated] /no/log: No such file or directory\n"),
        (["--port", "PORT"], "cannot listen on 127.0.0.1:PORT: "),
    ],
)
def test_starts_that_fail_end_in_one_sentence(server: Spawned, flags: list[str], text: str) -> None:
    taken = str(server.port)
    command = [sys.executable, "-m", "harness.simulated", *(flag.replace("PORT", taken) for flag in flags)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1
    assert text.replace("PORT", taken) in ended.stderr and "Traceback" not in ended.stderr


# Faults of answers in one piece, and those that tests/engine/test_client.py does not send.


def whole_message(server: Spawned, fault: str) -> dict[str, Any]:
    asked = chat(max_tokens=6, ignore_eos=True)
    return dict(json.loads(ask(server, CHAT, asked, X_Simulate_Fault=fault)[2])["choices"][0]["message"])


def test_faults_of_an_answer_in_one_piece(server: Spawned) -> None:
    with pytest.raises(http.client.IncompleteRead):
        whole_message(server, "cut")
    with pytest.raises(json.JSONDecodeError):
        whole_message(server, "malformed")
    status, _, body = ask(server, CHAT, chat(), X_Simulate_Fault="error-event")
    assert (status, json.loads(body)["error"]["code"]) == (500, 500)
    reasoned = whole_message(server, "reasoning:2")
    assert (len(reasoned["reasoning"].split()), len(reasoned["content"].split())) == (2, 4)
    called = whole_message(server, "tool-call")
    assert called["content"] is None and len(called["tool_calls"][0]["function"]["arguments"].split()) == 6


def test_a_tool_call_comes_in_pieces(server: Spawned) -> None:
    body = ask(server, CHAT, streamed(6), X_Simulate_Fault="tool-call")[2]
    deltas = [e["choices"][0]["delta"]["tool_calls"][0] for e in events(body)[1:7]]
    assert (deltas[0]["function"]["name"], deltas[0]["type"]) == ("classify", "function")
    assert len("".join(d["function"]["arguments"] for d in deltas).split()) == 6


def test_faults_of_the_command_line_strike_every_nth_request() -> None:
    with spawned("--preset", "instant", "--fault", "503:2@3") as server:
        answers = [ask(server, CHAT, streamed(1)) for _ in range(6)]
    assert [status for status, _, _ in answers] == [200, 200, 503, 200, 200, 503]
    assert answers[2][1]["retry-after"] == "2"


def test_faults_are_parsed_strictly(server: Spawned, wording: Wording) -> None:
    assert parse_fault("cut:5@3") == InjectedFault("cut", 5.0, 3)
    assert parse_fault("html") == InjectedFault("html", 0.0, 1)
    for text in ("cut:x", "html:1", "cut@0", "coalesce:0", "", "cut:-1"):
        with pytest.raises(ValueError, match="fault"):
            parse_fault(text)
    with pytest.raises(ValueError) as caught:
        active_faults([], 1, "exit:3")
    wording(caught.value)
    assert active_faults([InjectedFault("html", 0, 2)], 4, "cut:1, hang") == {"html": 0.0, "cut": 1.0, "hang": 3.0}
    status, _, body = ask(server, CHAT, chat(), X_Simulate_Fault="gremlins")
    assert status == 400
    assert json.loads(body)["error"]["message"].count("'gremlins'") == 1
