"""Servers that look fast because they do not answer: refusals, stubs, users that get nothing, nonsense."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.questions.capacity.record import CapacityAnswer, read_capacity
from harness.records.manifest import read_run
from harness.records.records import read_requests
from tests.support.command import harness, only_run, write
from tests.support.http_double import Handler, listening

STEP_S, TOKENS = 0.004, 20
Text = Callable[[int], tuple[list[dict[str, str]], str]]  # of the requests in flight: deltas, finish reason
LOAD = {"user": "batch", "requests": 6, "output_tokens": TOKENS, "output": "natural"}


def whole(tokens: int = TOKENS) -> list[dict[str, str]]:
    return [{"content": f" word{place}"} for place in range(tokens)]


@contextmanager
def answering(text: Text) -> Iterator[str]:
    """A server that streams these deltas."""
    lock, in_flight = threading.Lock(), [0]

    class Server(Handler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))

        def do_POST(self) -> None:
            asked = json.loads(self.body())
            if not asked.get("stream"):  # whether it is ready
                choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
                self.answer(200, json.dumps({"object": "chat.completion", "model": "m", "choices": [choice]}))
                return
            with lock:
                in_flight[0] += 1
                deltas, finish = text(in_flight[0])
            try:
                self.stream(deltas[: asked["max_tokens"]], finish, len(str(asked["messages"]).split()))
            finally:
                with lock:
                    in_flight[0] -= 1

        def stream(self, deltas: list[dict[str, str]], finish: str, prompt: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            usage = {"prompt_tokens": prompt, "completion_tokens": len(deltas)}
            for delta in deltas:
                time.sleep(STEP_S)
                self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "model": "m"})
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, body: dict[str, Any]) -> None:
            self.wfile.write(b"data: %b\n\n" % json.dumps({"object": "chat.completion.chunk"} | body).encode())

    with listening(Server) as url:
        yield url


def capacity(folder: Path, text: Text, users: int) -> tuple[int, CapacityAnswer, set[str]]:
    """The exit code, the answer and the codes of its reasons."""
    path = write(
        folder, model="m", servers={"one": {"template": "vllm-cpu"}}, loads={"people": LOAD}, warmup={"requests": 0}
    )
    check = ["--check", "ttft_p50<=20s", "--max-users", str(users), "--runs", "runs"]
    with answering(text) as url:
        done = harness("capacity", str(path), "--url", url, *check, cwd=folder)
    print(done.out, done.err)
    report = read_capacity(only_run(folder / "runs"))
    assert report is not None, done.out + done.err
    (server,) = report.servers
    assert server.slo is not None
    return done.code, server.slo, {reason.code for reason in server.reasons}


@pytest.mark.parametrize("refusal", ["channel", "filter"])
def test_refusals_hold_no_users_and_make_the_run_invalid(tmp_path: Path, refusal: str) -> None:
    said = (
        ([{"refusal": "I can"}, {"refusal": "not."}], "stop") if refusal == "channel" else (whole(4), "content_filter")
    )
    code, answer, reasons = capacity(tmp_path, lambda in_flight: said, users=1)
    assert (code, answer.kind, answer.unheld, answer.broken) == (3, "none", "refused", None)
    assert "capacity_refused" in reasons
    assert {reason.code for reason in read_run(only_run(tmp_path / "runs")).reasons} >= {"answers_refused"}


def test_stubs_above_one_request_in_flight_are_not_held(tmp_path: Path) -> None:
    def text(in_flight: int) -> tuple[list[dict[str, str]], str]:
        return (whole(), "length") if in_flight < 2 else (whole(1), "stop")

    _, answer, reasons = capacity(tmp_path, text, users=2)
    assert "capacity_short_answers" in reasons
    assert (answer.level, answer.unheld) in ((1, "short"), (None, "short"), (None, None)), "never two users"
    assert answer.kind != "more_than"


def test_nonsense_is_the_worst_finding_of_quick_and_in_no_record(tmp_path: Path) -> None:
    with answering(lambda in_flight: ([{"content": "<unused49>"}] * 64, "length")) as url:
        done = harness("quick", url, "--json", cwd=tmp_path)
    report = json.loads(done.out)
    assert (done.code, report["finding"]["code"]) == (0, "nonsense_answers"), report["reasons"]
    records = list(read_requests(only_run(tmp_path / "runs") / "requests.jsonl"))
    assert {one.odd_text for one in records if one.error is None} == {"reserved"}
    assert b"unused49" not in msgspec.json.encode(records)


def test_the_model_of_a_message_is_compared(tmp_path: Path) -> None:
    """Two models answer by turns, as Anthropic's API names them: in the start of a message alone."""
    numbers = iter(range(1000))

    class Messages(Handler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))

        def do_POST(self) -> None:
            asked = json.loads(self.body())
            if "messages" not in self.path:
                choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
                self.answer(200, json.dumps({"object": "chat.completion", "model": "m", "choices": [choice]}))
                return
            usage = {"input_tokens": 30, "output_tokens": 2}
            model, text = ("m", "other")[next(numbers) % 2], {"type": "text", "text": "two words"}
            message = {"type": "message", "model": model, "content": [text], "stop_reason": "end_turn", "usage": usage}
            if not asked.get("stream"):
                self.answer(200, json.dumps(message))
                return
            delta = {"type": "text_delta", "text": "two words"}
            events = [
                {"type": "message_start", "message": message | {"content": []}},
                {"type": "content_block_delta", "index": 0, "delta": delta},
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
                {"type": "message_stop"},
            ]
            self.answer(
                200, b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events), "text/event-stream"
            )

    load = {"user": "batch", "requests": 8, "output": "natural", "output_tokens": 4, "endpoint": "messages"}
    loads = {"streamed": load, "whole": load | {"stream": False}}
    path = write(
        tmp_path, model="m", servers={"one": {"template": "vllm-cpu"}}, loads=loads, warmup={"requests": 0}, repeats=1
    )
    with listening(Messages) as url:
        done = harness("run", str(path), "--url", url, "--runs", "runs", cwd=tmp_path)
    reasons = read_run(only_run(tmp_path / "runs")).reasons
    assert done.code == 3, done.out + done.err
    changed = [reason.values["models"] for reason in reasons if reason.code == "model_changed"]
    assert [sorted(models) for models in changed] == [["m", "other"]] * 2
