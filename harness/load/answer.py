"""What the server answered: from the bytes of an exchange and their times to the observations of a Request.

Knows the OpenAI API's chat completions and completions, streamed or not, as vLLM, llama.cpp and Lemonade send them.
"""

import re
from typing import Any

import msgspec

from harness.load.client import Clock, Exchange
from harness.load.sse import Event, Parser
from harness.records import ErrorKind

_MESSAGE_CHARS = 300
_CHANNELS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "text")
_VISIBLE = ("content", "text", "refusal")


class Answer:
    """Observations of one response. Times are seconds after the request was sent, on `clock`."""

    def __init__(self) -> None:
        self.clock: Clock = "read"
        self.headers_s: float | None = None
        self.chunks_s: list[float] = []
        self.first_visible_s: float | None = None
        self.ended_s = 0.0
        self.coalesced = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.finish: str | None = None
        self.text = ""  # visible content: the next turn of a conversation needs it, no record holds it
        self.error: ErrorKind | None = None
        self.message: str | None = None
        self.done = False  # [DONE] was seen
        self.generated = False  # at least one token of any channel

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Note an error; the first one noted stays."""
        if self.error is None:
            self.error = kind
            self.message = message if len(message) <= _MESSAGE_CHARS else message[: _MESSAGE_CHARS - 3] + "..."


def read_answer(exchange: Exchange, secret: str | None = None) -> Answer:
    """The observations in a finished or failed exchange. `secret` is kept out of every message."""
    answer = Answer()
    clock, times_ns = exchange.times_ns()
    answer.clock = clock
    start_ns = exchange.start_ns
    seconds = [(time_ns - start_ns) / 1e9 for time_ns in times_ns]
    end_ns = exchange.ended_ns if exchange.ended_ns is not None else start_ns
    answer.ended_s = seconds[-1] if exchange.complete and seconds else (end_ns - start_ns) / 1e9
    if exchange.headers_read is not None:
        answer.headers_s = seconds[exchange.headers_read]
    if exchange.status is not None and not 200 <= exchange.status < 300:
        _refused(exchange, exchange.status, answer)
    elif _is_stream(exchange):
        _stream(exchange, seconds, answer)
    elif exchange.complete:
        _whole(exchange, answer)
    if exchange.failure is not None and not answer.done:
        answer.fail(exchange.failure.kind, exchange.failure.message)
    if secret and answer.message:
        answer.message = answer.message.replace(secret, "[secret]")
    return answer


def _is_stream(exchange: Exchange) -> bool:
    if exchange.headers.get("content-type", "").lower().startswith("text/event-stream"):
        return True
    first = exchange.body[0][1].lstrip() if exchange.body else b""
    return first.startswith((b"data:", b"event:", b": "))  # some servers name no type


def _stream(exchange: Exchange, seconds: list[float], answer: Answer) -> None:
    parser = Parser()
    chunk_reads: list[int] = []
    count = 0
    for read, data in exchange.body:
        for event in parser.feed(data):
            count += 1
            if answer.done:
                continue
            if event.data == b"[DONE]":
                answer.done = True
                answer.ended_s = seconds[read]
            elif _take_event(event, count, seconds[read], answer):
                chunk_reads.append(read)
    answer.chunks_s = [seconds[read] for read in chunk_reads]
    answer.coalesced = len(chunk_reads) - len(set(chunk_reads))
    if not exchange.complete and not answer.done:
        return  # the failure of the connection says more
    if not answer.done and answer.finish is None:
        answer.fail("truncated", f"the stream ended after {count} events without [DONE] or a finish reason")
    if not answer.generated:
        answer.fail("empty", f"a complete stream without one generated token; {_usage_words(answer)}")


def _take_event(event: Event, number: int, at_s: float, answer: Answer) -> bool:
    """Note what one event says. True when it carries generated tokens."""
    try:
        body = msgspec.json.decode(event.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        answer.fail("malformed", f"event {number} is not JSON: {error}")
        return False
    if not isinstance(body, dict):
        answer.fail("malformed", f"event {number} is not a JSON object")
        return False
    problem = _error_in(body)
    if problem is not None or event.type == "error":
        answer.fail("stream_error", problem or "an error event without a message")
        return False
    _usage(body, answer)
    choice = _first_choice(body)
    if choice is None:
        return False
    if choice.get("finish_reason"):
        answer.finish = str(choice["finish_reason"])
    delta = choice.get("delta")
    part = delta if isinstance(delta, dict) else choice  # completions have `text` beside the finish reason
    if not any(part.get(channel) for channel in _CHANNELS):
        return False
    answer.generated = True
    for channel in _VISIBLE:
        if part.get(channel):
            answer.text += str(part[channel])
            if answer.first_visible_s is None:
                answer.first_visible_s = at_s
    return True


def _whole(exchange: Exchange, answer: Answer) -> None:
    """A response in one piece: when its first token was made is not known."""
    raw = b"".join(data for _, data in exchange.body)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        answer.fail("not_api", f"status {exchange.status} with {_described(exchange, raw)} in place of an API answer")
        return
    problem = _error_in(body) if isinstance(body, dict) else None
    if problem is not None:
        answer.fail("stream_error", problem)
        return
    choice = _first_choice(body) if isinstance(body, dict) else None
    if choice is None:
        answer.fail("not_api", f"status {exchange.status} with JSON that has no choices")
        return
    _usage(body, answer)
    answer.done = True
    answer.finish = str(choice["finish_reason"]) if choice.get("finish_reason") else None
    message = choice.get("message")
    part = message if isinstance(message, dict) else choice
    answer.generated = any(part.get(channel) for channel in _CHANNELS)
    answer.text = "".join(str(part[channel]) for channel in _VISIBLE if part.get(channel))
    if not answer.generated:
        answer.fail("empty", f"a complete answer without one generated token; {_usage_words(answer)}")


def _refused(exchange: Exchange, status: int, answer: Answer) -> None:
    raw = b"".join(data for _, data in exchange.body)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    if 300 <= status < 400:
        words = f"redirect to {exchange.headers.get('location', 'nowhere')}, which a load test does not follow"
    elif isinstance(body, dict):
        words = _error_in(body) or str(body.get("detail") or body.get("message") or body)
    else:
        words = _described(exchange, raw)
    answer.fail("rejected" if status in (429, 503) else "http", f"status {status}: {words}")


def _error_in(body: dict[str, Any]) -> str | None:
    """The words of an error object: {"error": {...}} or {"error": "..."}, or vLLM's older {"object": "error", ...}."""
    error = body.get("error")
    if not error and body.get("object") == "error":
        error = body
    if not error:
        return None
    if not isinstance(error, dict):
        return str(error)
    kinds = [str(error[key]) for key in ("type", "code") if error.get(key)]
    return f"{' '.join(kinds) or 'error'}: {error.get('message') or 'no message'}"


def _first_choice(body: dict[str, Any]) -> dict[str, Any] | None:
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def _usage(body: dict[str, Any], answer: Answer) -> None:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return
    answer.prompt_tokens = _count(usage, "prompt_tokens")
    answer.output_tokens = _count(usage, "completion_tokens")
    answer.cached_tokens = _count(usage.get("prompt_tokens_details"), "cached_tokens")
    answer.reasoning_tokens = _count(usage.get("completion_tokens_details"), "reasoning_tokens")


def _count(counts: Any, key: str) -> int | None:
    value = counts.get(key) if isinstance(counts, dict) else None
    return value if isinstance(value, int) else None


def _usage_words(answer: Answer) -> str:
    return "no usage reported" if answer.output_tokens is None else f"usage reports {answer.output_tokens} tokens"


def _described(exchange: Exchange, raw: bytes) -> str:
    """What a body that is not JSON looks like, in words."""
    if not raw:
        return "an empty body"
    kind = exchange.headers.get("content-type", "no content type").split(";")[0]
    text = " ".join(re.sub(r"<[^>]*>", " ", raw[:4000].decode("utf-8", "replace")).split())
    return f"{kind} ({text[:120]!r})"
