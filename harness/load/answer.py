"""What the server answered: from the bytes of an exchange and their times to the observations of a Request.

Knows the OpenAI API's chat completions, completions and embeddings, streamed or not, as vLLM, llama.cpp and Lemonade
send them.
"""

import json
import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from harness.failures.redact import hidden, without
from harness.load.exchange import Clock, Exchange
from harness.load.sse import Event, Parser
from harness.load.tools import Call, gather
from harness.rundir.records import ErrorKind

_MESSAGE_CHARS = 300
_MOST_TEXTS = 64  # that are kept apart: each of its own takes ten times the room of its letters
_CHANNELS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "text")
_REASONING = ("reasoning_content", "reasoning")
_VISIBLE = ("content", "text", "refusal")
MAX_RETRY_AFTER_S = 60.0
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")  # of Retry-After: some servers send fractions, which RFC 9110 has not
_BROKEN_OFF = ("abort", "error")  # finish reasons of answers that the server gave up


@dataclass(slots=True, eq=False)
class Answer:
    """Observations of one response. Times are seconds after the request was sent, on `clock`, and known when its record
    is made.

    It has failed until it was read: what nobody looked at is no success.
    """

    error: ErrorKind | None = "client"
    message: str | None = "the answer was never read"
    secrets: Sequence[str] = field(default=(), repr=False)  # are kept out of the message
    status: int | None = None  # None: the server has not begun to answer
    retry_after_s: float | None = None  # the wait that it asked for, see `_retry_after_s`
    clock: Clock = "read"
    headers_s: float | None = None
    chunks_s: list[float] = field(default_factory=list)
    textless: int | None = None  # events that announce a token without text, before the first chunk or after the last
    first_visible_s: float | None = None
    ended_s: float = 0.0
    coalesced: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    vectors: int | None = None  # of embeddings
    reasoning_chunks: int = 0  # of the chunks, those with nothing but reasoning
    tool_chunks: int = 0  # and those with nothing but a tool call
    calls: list[Call] = field(default_factory=list)  # of tools
    finish: str | None = None
    texts: list[str] = field(default_factory=list)  # visible content: no record holds it, but the next turn needs it
    done: bool = False  # [DONE] was seen
    generated: bool = False  # at least one token of any channel

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Note an error; the first one noted stays."""
        if self.error is None:
            self.error = kind
            message = hidden(without(message, self.secrets))  # before it is shortened, which could leave half of one
            self.message = message if len(message) <= _MESSAGE_CHARS else message[: _MESSAGE_CHARS - 3] + "..."


class Reading:
    """Works out what an exchange says, while it grows: the later its end is looked at, the longer is the next wait."""

    __slots__ = (
        "_answer", "_chunk_reads", "_count", "_done_read", "_embeddings", "_events", "_exchange", "_form", "_textless",
        "_visible_read"
    )  # fmt: skip

    def __init__(self, exchange: Exchange, secrets: Sequence[str] = (), *, embeddings: bool = False) -> None:
        """`secrets` are kept out of every message; `embeddings`: vectors were asked for, not text."""
        self._exchange = exchange
        self._embeddings = embeddings
        self._answer = Answer(None, None, secrets)
        self._events = Parser()
        self._form = exchange.form
        self._count = 0  # of events; those that the form took come to it
        self._chunk_reads = array("I")  # of chunks; likewise
        self._textless: Counter[int] = Counter()  # events without text, by the number of chunks before them
        self._visible_read: int | None = None
        self._done_read: int | None = None

    @property
    def chunks(self) -> int:
        """With generated tokens, that were taken in."""
        return len(self._chunk_reads) + self._form.events

    def look(self) -> None:
        """Take in what has come of a stream; what was taken in is let go."""
        exchange, answer = self._exchange, self._answer
        if exchange.status is None or not 200 <= exchange.status < 300 or not exchange.is_stream:
            return
        self._fetch_text()
        for read, data in exchange.body:
            whole = self._events.idle
            events = self._events.feed(data)
            for event in events:
                self._take(event, read)
            # What comes behind the finish reason has no text.
            if whole and len(events) == 1 and answer.finish is None and data == b"data: %s\n\n" % events[0].data:
                self._form.learn(data)
        exchange.body.clear()
        exchange.known_stream = True
        self._form.ready = self._events.idle and not answer.done

    def _fetch_text(self) -> None:
        texts, taken = self._answer.texts, self._form.text
        if taken:
            texts.append(taken.decode("utf-8", "replace"))
            taken.clear()
        if len(texts) > _MOST_TEXTS:
            self._answer.texts = ["".join(texts)]

    def _take(self, event: Event, read: int) -> None:
        """Take in an event that this read completed."""
        answer = self._answer
        said = event.data.strip()
        if not said:  # some gateways ping so
            return
        self._count += 1
        if answer.done:
            return
        if said == b"[DONE]":
            answer.done = True
            self._done_read = read
            return
        carried = _take_event(event, self._count + self._form.events, answer)
        if carried == "text":
            self._chunk_reads.append(read)
            if self._visible_read is None and answer.texts:
                self._visible_read = read
        elif carried == "no text":
            self._textless[self.chunks] += 1

    def finish(self) -> Answer:
        """What a finished or failed exchange says; `time` says when."""
        exchange, answer = self._exchange, self._answer
        answer.status = exchange.status
        self._fetch_text()
        answer.reasoning_chunks += self._form.hidden
        if exchange.status is not None and not 200 <= exchange.status < 300:
            _refused(exchange, exchange.status, answer)
        elif exchange.is_stream:
            self._stream()
        elif exchange.complete:
            _whole(exchange, answer, embeddings=self._embeddings)
        if exchange.failure is not None and not answer.done:
            answer.fail(exchange.failure.kind, exchange.failure.message)
        return answer

    def time(self) -> None:
        """The times of a finished or failed exchange, for the answer that `finish` returned. To be called once."""
        exchange, answer = self._exchange, self._answer
        glanced = sorted(set(range(exchange.reads)).difference(exchange.parsed))
        reads = sorted([*self._chunk_reads, *glanced, *(glanced[number] for number in self._form.more)])
        answer.clock, times_ns = exchange.times_ns()
        start_ns = exchange.start_ns
        end_ns = exchange.ended_ns if exchange.ended_ns is not None else start_ns
        if self._done_read is not None:
            end_ns = times_ns[self._done_read]
        elif exchange.complete and times_ns:
            end_ns = times_ns[-1]
        answer.ended_s = (end_ns - start_ns) / 1e9
        if exchange.headers_read is not None:
            answer.headers_s = (times_ns[exchange.headers_read] - start_ns) / 1e9
        answer.chunks_s = [(times_ns[read] - start_ns) / 1e9 for read in reads]
        if self._visible_read is not None:
            answer.first_visible_s = (times_ns[self._visible_read] - start_ns) / 1e9
        answer.coalesced = len(reads) - len(set(reads))

    def _stream(self) -> None:
        self.look()
        exchange, answer = self._exchange, self._answer
        answer.textless = sum(self._textless[chunks] for chunks in {0, self.chunks})
        _unframed(self._events.stray(), answer)
        if not exchange.complete and not answer.done:
            return  # the failure of the connection says more
        events = self._count + self._form.events
        if not events and (coded := _coded(exchange)):
            answer.fail("not_api", f"status {exchange.status} with {coded} in place of an API answer")
        if not answer.done and answer.finish is None:
            answer.fail("truncated", f"the stream ended after {events} events without [DONE] or a finish reason")
        if not answer.generated:
            answer.fail("empty", f"a complete stream without any generated text; {_usage_words(answer)}")


def _unframed(raw: bytes, answer: Answer) -> None:
    """Note an error object between the events: Lemonade before 11.6 sends its errors without `data:`."""
    if not raw.startswith(b"{"):
        return
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    words = _error_words(body) if isinstance(body, dict) and not _first_choice(body) else None
    if words:
        answer.fail("stream_error", f"{words} (sent outside of an event)")


def _take_event(event: Event, number: int, answer: Answer) -> Literal["text", "no text"] | None:
    """Note what one event says. Return how it carries generated tokens, None where it carries none."""
    if event.type == "error":
        answer.fail("stream_error", _words_of(event.data) or "an error event without a message")
        return None
    try:
        body = _decode(event.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        answer.fail("malformed", f"event {number} is not JSON: {error}")
        return None
    if not isinstance(body, dict):
        answer.fail("malformed", f"event {number} is not a JSON object")
        return None
    problem = _error_in(body)
    if problem is not None:
        answer.fail("stream_error", problem)
        return None
    _usage(body, answer)
    choice = _first_choice(body)
    if choice is None:
        return None
    _finish(choice, answer)
    delta = choice.get("delta")
    part = delta if isinstance(delta, dict) else choice  # completions have `text` beside the finish reason
    if not any(part.get(channel) for channel in _CHANNELS):
        return "no text" if _is_token(choice, part) else None
    answer.generated = True
    for channel in _VISIBLE:
        if part.get(channel):
            answer.texts.append(str(part[channel]))
    if not any(part.get(channel) for channel in _VISIBLE):
        _unseen(part, answer)
    elif part.get("tool_calls"):
        gather(answer.calls, part["tool_calls"])
    return "text"


def _is_token(choice: dict[str, Any], part: dict[str, Any]) -> bool:
    """Whether an event without text announces a token: one whose text is held back or hidden, or the end token."""
    if choice.get("finish_reason"):
        return bool(choice["finish_reason"] != "length")
    return "role" not in part and any(part.get(channel) == "" for channel in _CHANNELS)


def _unseen(part: dict[str, Any], answer: Answer) -> None:
    """Count a chunk without visible text."""
    if any(part.get(channel) for channel in _REASONING):
        answer.reasoning_chunks += 1
    else:
        answer.tool_chunks += 1
    gather(answer.calls, part.get("tool_calls"))


def _whole(exchange: Exchange, answer: Answer, *, embeddings: bool) -> None:
    """A response in one piece: when its first token was made is not known."""
    raw = b"".join(data for _, data in exchange.body)
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        answer.fail("not_api", f"status {exchange.status} with {_described(exchange, raw)} in place of an API answer")
        return
    problem = _error_in(body) if isinstance(body, dict) else None
    if problem is not None:
        answer.fail("stream_error", problem)
        return
    if embeddings:
        _vectors(exchange, body, answer)
        return
    choice = _first_choice(body) if isinstance(body, dict) else None
    if choice is None:
        answer.fail("not_api", f"status {exchange.status} with JSON that has no choices")
        return
    _usage(body, answer)
    answer.done = True
    _finish(choice, answer)
    message = choice.get("message")
    part = message if isinstance(message, dict) else choice
    answer.generated = any(part.get(channel) for channel in _CHANNELS)
    answer.texts = [str(part[channel]) for channel in _VISIBLE if part.get(channel)]
    gather(answer.calls, part.get("tool_calls"))
    if not answer.generated:
        answer.fail("empty", f"a complete answer without any generated text; {_usage_words(answer)}")


def _vectors(exchange: Exchange, body: Any, answer: Answer) -> None:
    """The vectors of an answer to embeddings. It has no generated tokens, whatever its usage says of them."""
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        answer.fail("not_api", f"status {exchange.status} with JSON that has no data")
        return
    _usage(body, answer)
    answer.done, answer.output_tokens = True, None
    vectors = [one.get("embedding") if isinstance(one, dict) else None for one in data]
    answer.vectors = len(vectors)
    answer.generated = bool(vectors) and all(vectors)
    if not answer.generated:
        empty = sum(not vector for vector in vectors)
        what = f"{empty} of {len(vectors)} vectors are empty" if vectors else "no vector"
        answer.fail("empty", f"a complete answer with nothing in it: {what}")


def _refused(exchange: Exchange, status: int, answer: Answer) -> None:
    raw = b"".join(data for _, data in exchange.body)
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    if 300 <= status < 400:
        words = f"redirect to {exchange.headers.get('location', 'nowhere')}, which a load test does not follow"
    elif isinstance(body, dict):
        words = _error_words(body) or str(body)
    else:
        words = _described(exchange, raw)
    if status in (429, 503):
        answer.retry_after_s = _retry_after_s(exchange.headers)
    answer.fail("rejected" if status in (429, 503) else "http", f"status {status}: {words}")


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The wait that Retry-After asks for, in seconds or until a date; at most MAX_RETRY_AFTER_S.

    A date is compared with the server's own clock where the response has it. None: no such header, or not a valid one.
    """
    value = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(value):
        return min(float(value), MAX_RETRY_AFTER_S)
    until_s, now_s = _http_date_s(value), _http_date_s(headers.get("date", ""))
    if until_s is None:
        return None
    return min(max(0.0, until_s - (time.time() if now_s is None else now_s)), MAX_RETRY_AFTER_S)


def _http_date_s(value: str) -> float | None:
    """Unix time of an HTTP-date (RFC 9110). None: it is not one."""
    try:
        return datetime.strptime(value.strip(), "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _decode(raw: bytes) -> Any:
    """The JSON in `raw`. Raises as msgspec does.

    What some servers send although it is no JSON is taken as Python takes it: NaN, half a surrogate pair, broken UTF-8.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            loaded = json.loads(raw.decode("utf-8", "replace"))
        except ValueError:
            loaded = None
        if loaded is None:
            raise
    # Once more, for strings that can be encoded again.
    return json.loads(json.dumps(loaded, ensure_ascii=False).encode("utf-8", "replace"))


def _finish(choice: dict[str, Any], answer: Answer) -> None:
    if not choice.get("finish_reason"):
        return
    answer.finish = str(choice["finish_reason"])
    if answer.finish in _BROKEN_OFF:
        answer.fail("stream_error", f"the server ended the answer with finish reason {answer.finish!r}")


def _error_words(body: dict[str, Any]) -> str | None:
    """What a body that is not an answer says, wherever servers put it. Never a mapping, which may hold model output."""
    words = _error_in(body) or body.get("detail") or body.get("message")
    return str(words) if words and not isinstance(words, dict) else None


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


def _words_of(raw: bytes) -> str | None:
    """What an error says that need not be JSON."""
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw.decode("utf-8", "replace")
    return _error_words(body) if isinstance(body, dict) else str(body or "")


def _first_choice(body: dict[str, Any]) -> dict[str, Any] | None:
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def _usage(body: dict[str, Any], answer: Answer) -> None:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return
    answer.prompt_tokens = _count(usage, "prompt_tokens", answer.prompt_tokens)
    answer.output_tokens = _count(usage, "completion_tokens", answer.output_tokens)
    answer.cached_tokens = _count(usage.get("prompt_tokens_details"), "cached_tokens", answer.cached_tokens)
    answer.reasoning_tokens = _count(
        usage.get("completion_tokens_details"), "reasoning_tokens", answer.reasoning_tokens
    )


def _count(counts: Any, key: str, before: int | None) -> int | None:
    """What `counts` says; what was said before, where it says nothing: some spread it over several events."""
    value = counts.get(key) if isinstance(counts, dict) else None
    return value if isinstance(value, int) else before


def _usage_words(answer: Answer) -> str:
    return "no usage reported" if answer.output_tokens is None else f"usage reports {answer.output_tokens} tokens"


def _described(exchange: Exchange, raw: bytes) -> str:
    """What a body that is not JSON looks like, in words."""
    if not raw:
        return "an empty body"
    if coded := _coded(exchange):
        return coded
    kind = exchange.headers.get("content-type", "no content type").split(";")[0]
    text = " ".join(re.sub(r"<[^>]*>", " ", raw[:4000].decode("utf-8", "replace")).split())
    return f"{kind} ({text[:120]!r})"


def _coded(exchange: Exchange) -> str | None:
    """The words for a body that nobody can read, as it was compressed."""
    coding = exchange.headers.get("content-encoding", "identity").lower()
    kind = exchange.headers.get("content-type", "a body").split(";")[0]
    return None if coding == "identity" else f"{kind} in {coding} (which was not asked for)"
