"""What the server answered: from the bytes of an exchange and their times to the observations of a Request.

Knows the OpenAI API's chat completions, completions and embeddings, streamed or not, as vLLM, llama.cpp and Lemonade
send them.
"""

import json
import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from harness.failures.unexpected_response import decoded
from harness.load.exchange import Clock, Exchange, Failure
from harness.load.sse import MAX_EVENT_BYTES, Event, EventTooLong, Parser
from harness.load.tools import Call, gather
from harness.redact import masked, without
from harness.rundir.records import TEMPLATE_TOKENS, BadField, ErrorKind, impossible

T = TypeVar("T")

_MESSAGE_CHARS = 300
_MASKED_CHARS = 4096  # of a message that are looked at for secrets, before it is shortened
_FINISHES = {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error"}  # no secrets
_MOST_TEXTS = 64  # that are kept apart: each of its own takes ten times the room of its letters
_MAX_FINISH = 64  # characters of a finish reason
_CHANNELS: dict[str, type] = {  # of generated tokens, with the JSON type of each
    "content": str, "reasoning_content": str, "reasoning": str, "refusal": str, "tool_calls": list,
    "function_call": dict, "text": str,
}  # fmt: skip
_REASONING = ("reasoning_content", "reasoning")
_VISIBLE = ("content", "text", "refusal")
MAX_RETRY_AFTER_S = 60.0
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")  # of Retry-After: some servers send fractions, which RFC 9110 has not
_COUNTS = (  # of usage: the name in a record, the object inside usage, the key
    ("prompt_tokens", None, "prompt_tokens"),
    ("output_tokens", None, "completion_tokens"),
    ("cached_tokens", "prompt_tokens_details", "cached_tokens"),
    ("reasoning_tokens", "completion_tokens_details", "reasoning_tokens"),
)
_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}  # others are numbers
_BROKEN_OFF = ("abort", "error")  # finish reasons of answers that the server gave up


@dataclass(slots=True, eq=False)
class Answer:
    """Observations of one response. Times are seconds after the request was sent, on `clock`, and known when its record
    is made.

    It has failed until it was read: what nobody looked at is no success.
    """

    error: ErrorKind | None = "client"
    message: str | None = "the answer was never read"
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
    replaced: dict[str, int] = field(default_factory=dict)  # counts that a later event corrected: the least possible
    bad: dict[str, BadField] = field(default_factory=dict)  # fields whose values are not possible, by their names
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

    @property
    def bad_fields(self) -> list[BadField]:
        return list(self.bad.values())

    def bound(self, asked_tokens: int | None, request_bytes: int) -> None:
        """Take counts that are not possible for missing, and note them.

        `asked_tokens` is the max_tokens of the request; `request_bytes` is the size of its body.
        """
        prompt_max, output_min = request_bytes + TEMPLATE_TOKENS, int(self.generated and self.vectors is None)
        found = impossible(self, asked_tokens, prompt_max=prompt_max, output_min=output_min)
        if self.replaced:  # of a stream that goes on, 0 tokens are possible
            earlier = Answer(**({name: getattr(self, name) for name, *_ in _COUNTS} | self.replaced))
            found |= impossible(earlier, asked_tokens, prompt_max=prompt_max)
        for name, details, key in _COUNTS:
            if name in found:
                self.bad[found[name].field] = found[name]
            if ".".join(filter(None, ("usage", details, key))) in self.bad:  # also where another event had a number
                setattr(self, name, None)

    def value(self, source: dict[str, Any], key: str, kind: type[T], name: str | None = None) -> T | None:
        """Return the value of a field. One of another JSON type is noted under `name` and counts as missing."""
        value = source.get(key)
        if value is None or type(value) is kind:  # a boolean is no number
            return value
        self.note(name or key, value)
        return None

    def note(self, name: str, value: Any) -> None:
        """Note a field whose value has another JSON type."""
        self.bad[name] = BadField(name, "type", _TYPES.get(type(value), "number"))

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Note an error; the first one noted stays."""
        if self.error is None:
            self.error = kind
            message = masked(message[:_MASKED_CHARS])  # before it is shortened, which could leave half of one
            self.message = message if len(message) <= _MESSAGE_CHARS else message[: _MESSAGE_CHARS - 3] + "..."


class Reading:
    """Works out what an exchange says, while it grows: the later its end is looked at, the longer is the next wait."""

    __slots__ = (
        "_answer", "_chunk_reads", "_count", "_done_read", "_embeddings", "_events", "_exchange", "_form", "_textless",
        "_visible_read"
    )  # fmt: skip

    def __init__(self, exchange: Exchange, *, embeddings: bool = False) -> None:
        """`embeddings`: vectors were asked for, not text."""
        self._exchange = exchange
        self._embeddings = embeddings
        self._answer = Answer(None, None)
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
        body, exchange.body = exchange.body, []
        exchange.known_stream = True
        for read, data in body:
            whole = self._events.idle
            try:
                events = self._events.feed(data)
            except EventTooLong:
                raise Failure("malformed", f"an event has more than {MAX_EVENT_BYTES >> 20} MiB") from None
            if self._events.said:
                exchange.said_read = read
            for event in events:
                self._take(event, read)
            # What comes behind the finish reason has no text.
            if whole and len(events) == 1 and answer.finish is None and data == b"data: %s\n\n" % events[0].data:
                self._form.learn(data)
        exchange.done = answer.done
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
    except ValueError:
        return
    words = _error_words(body) if isinstance(body, dict) and not _first_choice(body, answer) else None
    if words:
        answer.fail("stream_error", f"{words} (sent outside of an event)")


def _take_event(event: Event, number: int, answer: Answer) -> Literal["text", "no text"] | None:
    """Note what one event says. Return how it carries generated tokens, None where it carries none."""
    if event.type == "error":
        answer.fail("stream_error", _words_of(event.data) or "an error event without a message")
        return None
    try:
        body = _decode(event.data)
    except ValueError as error:
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
    choice = _first_choice(body, answer)
    if choice is None:
        return None
    finish = _finish(choice, answer)
    delta = answer.value(choice, "delta", dict)
    part = choice if delta is None else delta  # completions have `text` beside the finish reason
    channels = _channels(part, answer)
    if not channels:
        return "no text" if _is_token(finish, part) else None
    if not _take_part(part, channels, answer):
        if any(channel in channels for channel in _REASONING):
            answer.reasoning_chunks += 1
        else:
            answer.tool_chunks += 1
    return "text"


def _channels(part: dict[str, Any], answer: Answer) -> list[str]:
    """The channels that have something in a delta, or in a whole message."""
    channels = []
    for key, value in part.items():
        kind = _CHANNELS.get(key) if value else None
        if kind is not None and answer.value(part, key, kind) is not None:
            channels.append(key)
    return channels


def _take_part(part: dict[str, Any], channels: list[str], answer: Answer) -> bool:
    """Keep the text and the tool calls. Return whether there is visible text."""
    answer.generated = True
    visible = [channel for channel in _VISIBLE if channel in channels]
    answer.texts += [part[channel] for channel in visible]
    if "tool_calls" in channels and not gather(answer.calls, part["tool_calls"]):
        answer.note("tool_calls", part["tool_calls"])
    return bool(visible)


def _is_token(finish: str | None, part: dict[str, Any]) -> bool:
    """Whether an event without text announces a token: one whose text is held back or hidden, or the end token."""
    if finish:
        return finish != "length"
    return "role" not in part and any(part.get(channel) == "" for channel in _CHANNELS)


def _whole(exchange: Exchange, answer: Answer, *, embeddings: bool) -> None:
    """A response in one piece: when its first token was made is not known."""
    raw = b"".join(data for _, data in exchange.body)
    try:
        body = _decode(raw)
    except ValueError:
        answer.fail("not_api", f"status {exchange.status} with {_described(exchange, raw)} in place of an API answer")
        return
    problem = _error_in(body) if isinstance(body, dict) else None
    if problem is not None:
        answer.fail("stream_error", problem)
        return
    if embeddings:
        _vectors(exchange, body, answer)
        return
    choice = _first_choice(body, answer) if isinstance(body, dict) else None
    if choice is None:
        answer.fail("not_api", f"status {exchange.status} with JSON that has no choices")
        return
    _usage(body, answer)
    answer.done = True
    _finish(choice, answer)
    message = answer.value(choice, "message", dict)
    part = choice if message is None else message
    if channels := _channels(part, answer):
        _take_part(part, channels, answer)
    else:
        answer.fail("empty", f"a complete answer without any generated text; {_usage_words(answer)}")


def _vectors(exchange: Exchange, body: Any, answer: Answer) -> None:
    """The vectors of an answer to embeddings. It has no generated tokens, whatever its usage says of them."""
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        answer.fail("not_api", f"status {exchange.status} with JSON that has no data")
        return
    _usage(body, answer)
    answer.done, answer.output_tokens, answer.reasoning_tokens = True, None, None
    vectors = [one.get("embedding") if isinstance(one, dict) else None for one in data]
    answer.vectors = len(vectors)
    empty = sum(not (isinstance(vector, list | str) and vector) for vector in vectors)  # a string: base64
    answer.generated = bool(vectors) and not empty
    if not answer.generated:
        what = f"{empty} of {len(vectors)} vectors are empty" if vectors else "no vector"
        answer.fail("empty", f"a complete answer with nothing in it: {what}")


def _refused(exchange: Exchange, status: int, answer: Answer) -> None:
    raw = b"".join(data for _, data in exchange.body)
    try:
        body = _decode(raw)
    except ValueError:
        body = None
    if status == 101:
        words = "the server changes the protocol, which no request asked for"
    elif 300 <= status < 400:
        words = f"redirect to {exchange.headers.get('location', 'nowhere')}, which a load test does not follow"
    elif isinstance(body, dict):
        words = _error_words(body) or _shown(body)
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
    """The JSON in `raw`. Raises ValueError.

    What some servers send although it is no JSON is taken as Python takes it: NaN, half a surrogate pair, broken UTF-8.
    """
    try:
        return decoded(raw)
    except ValueError:
        try:
            loaded = json.loads(raw.decode("utf-8", "replace"))
            # Once more, for strings that can be encoded again.
            again = json.loads(json.dumps(loaded, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            again = None
        if again is None:
            raise
        return again


def _finish(choice: dict[str, Any], answer: Answer) -> str | None:
    finish = answer.value(choice, "finish_reason", str)
    if not finish:
        return None
    answer.finish = finish if finish in _FINISHES else without(finish, words=False)[:_MAX_FINISH]
    if finish in _BROKEN_OFF:
        answer.fail("stream_error", f"the server ended the answer with finish reason {finish!r}")
    return finish


def _error_words(body: dict[str, Any]) -> str | None:
    """What a body that is not an answer says, wherever servers put it. Never a mapping, which may hold model output."""
    words = _error_in(body) or body.get("detail") or body.get("message")
    return _shown(words) if words and not isinstance(words, dict) else None


def _error_in(body: dict[str, Any]) -> str | None:
    """The words of an error object: {"error": {...}} or {"error": "..."}, or vLLM's older {"object": "error", ...}."""
    error = body.get("error")
    if not error and body.get("object") == "error":
        error = body
    if not error:
        return None
    if not isinstance(error, dict):
        return _shown(error)
    kinds = [_shown(error[key]) for key in ("type", "code") if error.get(key)]
    return f"{' '.join(kinds) or 'error'}: {_shown(error.get('message') or 'no message')}"


def _shown(value: Any) -> str:
    """A JSON value for a message."""
    try:
        return str(value)
    except (RecursionError, ValueError):  # nested too deeply; a number of more than 4,300 digits
        return _TYPES.get(type(value), "number")


def _words_of(raw: bytes) -> str | None:
    """What an error says that need not be JSON."""
    try:
        body = _decode(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")
    return _error_words(body) if isinstance(body, dict) else _shown(body or "")


def _first_choice(body: dict[str, Any], answer: Answer) -> dict[str, Any] | None:
    choices = answer.value(body, "choices", list)
    if not choices or isinstance(choices[0], dict):
        return choices[0] if choices else None
    answer.note("choices[0]", choices[0])
    return None


def _usage(body: dict[str, Any], answer: Answer) -> None:
    """Note the counts. An earlier one stays where an event has none: some servers spread them over several events."""
    usage = answer.value(body, "usage", dict)
    if not usage:
        return
    for name, details, key in _COUNTS:
        counts, path = usage, "usage"
        if details is not None:
            path = f"usage.{details}"
            counts = answer.value(usage, details, dict, path) or {}
        value = answer.value(counts, key, int, f"{path}.{key}")
        if value is not None:
            earlier, worst = getattr(answer, name), answer.replaced.get(name, 0)
            if earlier is not None and not 0 <= earlier <= value and worst >= 0 and not 0 <= earlier <= worst:
                answer.replaced[name] = earlier  # counts grow as the answer does
            setattr(answer, name, value)


def _usage_words(answer: Answer) -> str:
    return "no usage reported" if answer.output_tokens is None else f"usage reports {answer.output_tokens} tokens"


def _described(exchange: Exchange, raw: bytes) -> str:
    """What a body that is not JSON looks like, in words."""
    if not raw:
        return "an empty body"
    if coded := _coded(exchange):
        return coded
    kind = exchange.headers.get("content-type", "no content type").split(";")[0]
    page = masked(raw[:_MASKED_CHARS].decode("utf-8", "replace"))
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    return f"{kind} ({text[:120]!r})"


def _coded(exchange: Exchange) -> str | None:
    """The words for a body that nobody can read, as it was compressed."""
    coding = exchange.headers.get("content-encoding", "identity").lower()
    kind = exchange.headers.get("content-type", "a body").split(";")[0]
    return None if coding == "identity" else f"{kind} in {coding} (which was not asked for)"
