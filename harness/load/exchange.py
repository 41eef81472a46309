"""One request and its response: bytes, the time of each read, and the Answer that follows from them."""

import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice, pairwise

import gevent
import httptools

from harness.load.openai_api import (
    Answer,
    coded,
    decode_lenient,
    described,
    error_words,
    note_event,
    note_unframed,
    note_whole,
    shown,
    usage_words,
)
from harness.load.reader import SLACK_NS, AnyInbox, ReadTimes
from harness.load.sse import MAX_EVENT_BYTES, Event, EventTemplate, EventTooLong, Parser
from harness.rundir.records import LATE_READ_S, ErrorKind

_HEAD_BYTES = 1 << 20  # of status line and headers, 1xx responses included
_BODY_BYTES = 16 << 20  # of a body that is no stream; embeddings of a long input have some
_STREAM = re.compile(rb"(?:data|event|id|retry)?:")  # how events begin; JSON and HTML never do
_STREAM_BYTES = 6  # that tell
_STREAM_PIECES = 64  # of the body that are searched for them
_MAX_TEXTS = 64  # kept as pieces before they are joined: each takes ten times the memory of its text
MAX_RETRY_AFTER_S = 60.0
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")  # of Retry-After: some servers send fractions, which RFC 9110 has not


class Failure(Exception):
    """Why a response is incomplete: the kind and the message for its record."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@lru_cache(256)
def _name(raw: bytes) -> str:
    """Return it in lower case, the same object for equal texts: all responses of a server have the same headers."""
    return raw.decode("latin-1").lower()


@lru_cache(256)
def _value(raw: bytes) -> str:
    return raw.decode("latin-1")


class Abandoned(gevent.Timeout):  # cuts a request like any other timeout
    """Raised in the greenlet of a user who leaves before the answer is complete."""


@dataclass(slots=True)
class Exchange:
    """One request and its response, read while it arrives: a cut keeps what has come, and the end has little to do.

    Times are in monotonic ns.
    """

    id: str
    embeddings: bool = False  # a request for vectors, not text
    leaves_after: int | None = None  # chunks after which the user leaves
    began_ns: int = field(default_factory=time.monotonic_ns)
    connect_ns: int | None = None  # time to open the connection; None: it was open
    connect_retries: int | None = None  # SYN retransmissions while it was opened
    sent_ns: int | None = None  # the first time, if it was sent twice
    resent: bool = False
    request_bytes: int = 0  # of the request's body
    arrivals: ReadTimes = field(default_factory=ReadTimes)  # of each read
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    headers_read: int | None = None  # the read that completed the headers
    body: list[tuple[int, bytes]] = field(default_factory=list)  # unprocessed (read, bytes)
    parsed: "array[int]" = field(default_factory=lambda: array("I"))  # of the processed reads, those by the parser
    template: EventTemplate = field(default_factory=EventTemplate)  # which processed the others
    known_stream: bool = False
    data_read: int | None = None  # the last read with data; comments of a stream do not count
    complete: bool = False
    failure: Failure | None = None
    ended_ns: int | None = None  # when it was complete or failed
    answer: Answer = field(default_factory=lambda: Answer(None, None))
    _events: Parser = field(default_factory=Parser)
    _count: int = 0  # of events, without those of the template
    _chunk_reads: "array[int]" = field(default_factory=lambda: array("I"))  # of chunks, likewise
    _textless: Counter[int] = field(default_factory=Counter)  # events without text, by the number of chunks before them
    _visible_read: int | None = None
    _done_read: int | None = None

    @property
    def start_ns(self) -> int:
        """When it was sent; if never, when it was created."""
        return self.began_ns if self.sent_ns is None else self.sent_ns

    @property
    def reads(self) -> int:
        """Number of reads that were parsed or taken by the template."""
        return len(self.parsed) + self.template.reads

    @property
    def chunks(self) -> int:
        return len(self._chunk_reads) + self.template.events

    @property
    def is_stream(self) -> bool:
        """Whether the body, so far, is a stream of events."""
        if self.known_stream or self.headers.get("content-type", "").lower().startswith("text/event-stream"):
            return True
        first = b""  # some servers send no content type, or the wrong one
        for _, data in islice(self.body, _STREAM_PIECES):
            first = (first + data).lstrip()
            if len(first) >= _STREAM_BYTES:
                break
        return _STREAM.match(first) is not None

    def unprocessed(self) -> bytes:
        return b"".join(data for _, data in self.body)

    def process(self) -> None:
        """Process the received part of a stream and free it."""
        if not self.body and self.template.ready:  # which took all that has come
            return
        if self.status is None or not 200 <= self.status < 300 or not self.is_stream:
            return
        self._fetch_text()
        answer, body, self.body = self.answer, self.body, []
        self.known_stream = True
        for read, data in body:
            whole = self._events.idle
            try:
                events = self._events.feed(data)
            except EventTooLong:
                raise Failure("malformed", f"an event has more than {MAX_EVENT_BYTES >> 20} MiB") from None
            if self._events.has_data:
                self.data_read = read
            for event in events:
                self._take(event, read)
            # Events after the finish reason have no text.
            if whole and len(events) == 1 and answer.finish is None and data == b"data: %s\n\n" % events[0].data:
                self.template.learn(data)
        self.template.ready = self._events.idle and not answer.done

    def _fetch_text(self) -> None:
        texts, taken = self.answer.texts, self.template.text
        if taken:
            texts.append(taken.decode("utf-8", "replace"))
            taken.clear()
        if len(texts) > _MAX_TEXTS:
            self.answer.texts = ["".join(texts)]

    def _take(self, event: Event, read: int) -> None:
        answer = self.answer
        data = event.data.strip()
        if not data:  # a ping of some gateways
            return
        self._count += 1
        if answer.done:
            return
        if data == b"[DONE]":
            answer.done = True
            self._done_read = read
            return
        carried = note_event(event, self._count + self.template.events, answer)
        if carried == "text":
            self._chunk_reads.append(read)
            if self._visible_read is None and answer.texts:
                self._visible_read = read
        elif carried == "no text":
            self._textless[self.chunks] += 1

    def finish(self) -> Answer:
        """Return the answer, when the exchange is complete or has failed; `time` adds its times."""
        answer = self.answer
        answer.status = self.status
        self._fetch_text()
        answer.reasoning_chunks += self.template.hidden
        if self.status is not None and not 200 <= self.status < 300:
            self._note_refusal(self.status)
        elif self.is_stream:
            self._finish_stream()
        elif self.complete:
            note_whole(self.unprocessed(), self.headers, answer, embeddings=self.embeddings)
        if self.failure is not None and not answer.done:
            answer.fail(self.failure.kind, self.failure.message)
        return answer

    def _finish_stream(self) -> None:
        self.process()
        answer = self.answer
        answer.textless = sum(self._textless[chunks] for chunks in {0, self.chunks})
        note_unframed(self._events.stray(), answer)
        if not self.complete and not answer.done:
            return  # the failure of the connection is more specific
        events = self._count + self.template.events
        if not events and (encoded := coded(self.headers)):
            answer.fail("not_api", f"status {self.status} with {encoded} in place of an API answer")
        if not answer.done and answer.finish is None:
            answer.fail("truncated", f"the stream ended after {events} events without [DONE] or a finish reason")
        if not answer.generated:
            answer.fail("empty", f"a complete stream without any generated text; {usage_words(answer)}")

    def _note_refusal(self, status: int) -> None:
        raw = self.unprocessed()
        try:
            body = decode_lenient(raw)
        except ValueError:
            body = None
        if status == 101:
            words = "the server changes the protocol, which no request asked for"
        elif 300 <= status < 400:
            words = f"redirect to {self.headers.get('location', 'nowhere')}, which a load test does not follow"
        elif isinstance(body, dict):
            words = error_words(body) or shown(body)
        else:
            words = described(self.headers, raw)
        rejected = status in (429, 503)
        if rejected:
            self.answer.retry_after_s = _retry_after_s(self.headers)
        self.answer.fail("rejected" if rejected else "http", f"status {status}: {words}")

    def time(self) -> None:
        """Add the times to the answer of `finish`. Call it once."""
        answer, start_ns = self.answer, self.start_ns
        glanced = sorted(set(range(self.reads)).difference(self.parsed))
        reads = sorted([*self._chunk_reads, *glanced, *(glanced[number] for number in self.template.more)])
        # The kernel's stamps if all are plausible, else the times of the reads.
        if self.sent_ns is not None and self.arrivals.plausible(self.sent_ns, SLACK_NS):
            answer.clock, times_ns = "kernel", self.arrivals.times_ns()
        else:
            answer.clock, times_ns = "read", [read for read, _ in self.arrivals]
        end_ns = start_ns if self.ended_ns is None else self.ended_ns
        if self._done_read is not None:
            end_ns = times_ns[self._done_read]
        elif self.complete and times_ns:
            end_ns = times_ns[-1]
        answer.ended_s = (end_ns - start_ns) / 1e9
        if self.headers_read is not None:
            answer.headers_s = (times_ns[self.headers_read] - start_ns) / 1e9
        answer.chunks_s = [(times_ns[read] - start_ns) / 1e9 for read in reads]
        if self._visible_read is not None:
            answer.first_visible_s = (times_ns[self._visible_read] - start_ns) / 1e9
        shared = [mine for mine, later in pairwise(reads) if mine == later]
        answer.coalesced = len(shared)
        if shared and answer.clock == "kernel":
            # Of a read in good time the kernel had all bytes at once: the server, a proxy or the network sent them
            # together. The stamp is that of its last bytes, so that a late read may look timely.
            lags_us = self.arrivals.lags_us()
            answer.coalesced_late = sum(lags_us[read] > LATE_READ_S * 1e6 for read in shared)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the wait of Retry-After, a number of seconds or a date; at most MAX_RETRY_AFTER_S.

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
    """Unix time of an HTTP-date (RFC 9110); None for other texts."""
    try:
        return datetime.strptime(value.strip(), "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


class Collector:
    """The callbacks of httptools: they fill an Exchange."""

    __slots__ = (
        "_between", "_informational", "_parser", "_size", "_template_reads", "exchange", "keep_alive"
    )  # fmt: skip

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.parsed = array("I")  # drop those of an earlier attempt
        exchange.data_read = None
        self._template_reads = 0  # reads of the template at the last check
        self._parser = httptools.HttpResponseParser(self)
        self.keep_alive = False
        self._size = 0  # processed bytes
        self._informational = False
        self._between = False  # the parser's last event: a chunk of the body is complete

    @property
    def template(self) -> EventTemplate | None:
        """The template for the next read; the parser skips a read that it takes."""
        template = self.exchange.template
        # The parser is between two chunks, and would be after whole chunks too.
        return template if self._between and template.ready else None

    def catch_up(self) -> None:
        if self.exchange.template.reads > self._template_reads:
            self._template_reads = self.exchange.template.reads
            self.exchange.data_read = self.exchange.reads - 1

    def take_in(self, inbox: AnyInbox) -> None:
        """Parse all that was read. Raises as `take` does, and Abandoned."""
        exchange = self.exchange
        self.catch_up()
        for data in inbox.rest():
            try:
                self.take(data)
            finally:  # also what came before the error
                exchange.process()
            if exchange.leaves_after is not None and exchange.chunks >= exchange.leaves_after and not exchange.complete:
                raise Abandoned

    def take_asleep(self, inbox: AnyInbox) -> None:
        """Do the same while the user's greenlet sleeps; the end wakes it."""
        self.take_in(inbox)
        inbox.template = self.template
        if self.exchange.complete or self.exchange.answer.done:
            inbox.wake()

    def take(self, data: bytes) -> None:
        """Parse the next read; empty is the end of the connection.

        Raises EOFError when that is not how this body ends, httptools.HttpParserError for what is no HTTP, Failure for
        more bytes than an answer has.
        """
        exchange = self.exchange
        if self.template is not None and self.template.takes(data, len(data)):
            self.catch_up()
            return
        exchange.template.ready = False
        exchange.parsed.append(exchange.reads)
        if exchange.complete:
            self.keep_alive = False  # bytes without a request
        elif data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:  # 101: complete; the rest is not HTTP
                self.keep_alive = False
            self._between = self._between and data.endswith(b"\n")
            self._size += len(data)
            if exchange.headers_read is None and self._size > _HEAD_BYTES:
                raise Failure("not_api", f"the response's headers have more than {_HEAD_BYTES >> 20} MiB")
            if not exchange.known_stream and self._size > _BODY_BYTES:
                raise Failure("not_api", f"the response has more than {_BODY_BYTES >> 20} MiB")
        elif self.is_open_ended and "chunked" not in exchange.headers.get("transfer-encoding", "").lower():
            exchange.complete = True
        else:
            raise EOFError

    def close(self) -> None:
        """Break the cycle with the parser, so that nothing is left to the garbage collector."""
        del self._parser

    @property
    def is_open_ended(self) -> bool:
        """Whether only the end of the body shows the length of the response."""
        return self.exchange.status is not None and "content-length" not in self.exchange.headers

    def on_message_begin(self) -> None:
        if self.exchange.complete:  # a second response, such as 408, in the same read; it ends the parsing
            raise ValueError("a response that no request asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.exchange.headers_read is None:  # else it is a trailer
            self.exchange.headers[_name(name)] = _value(value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        # Such as "100 Continue": the response itself follows. After 101 no HTTP follows.
        self._informational = 100 <= status < 200 and status != 101
        if not self._informational:
            self.exchange.status = status
            self.exchange.headers_read = self.exchange.reads - 1

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True  # also after a read without the start of the next chunk

    def on_body(self, data: bytes) -> None:
        exchange = self.exchange
        read = exchange.reads - 1
        exchange.body.append((read, data))
        if not exchange.known_stream and not exchange.is_stream:  # streams are checked where they are processed
            exchange.data_read = read

    def on_message_complete(self) -> None:
        self._between = False
        if self._informational:
            self.exchange.headers.clear()
        else:
            self.exchange.complete = True
            self.keep_alive = self._parser.should_keep_alive()  # known to llhttp only now
