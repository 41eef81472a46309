"""One request and its response: bytes, the time of each read, and the Answer that follows from them."""

import math
import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import gevent
import httptools

from harness.engines import engines
from harness.failures.unexpected_response import error_words, to_text
from harness.load import openai_api
from harness.load.anthropic_api import as_chat_completion, as_chat_event, started_message
from harness.load.live_metrics import RequestInFlight
from harness.load.odd_text import classify_text
from harness.load.openai_api import Answer
from harness.load.reader import AnyInbox, ReadTimes
from harness.load.sse import MAX_EVENT_BYTES, Event, EventTemplate, EventTooLong, Parser
from harness.records.records import LATE_READ_S, MAX_PIECES, ErrorKind
from harness.scenario.behaviour import max_body_s

_MAX_RESPONSE_BYTES = 16 << 20  # of a response that is not a stream; embeddings of a long input are large
_MAX_STREAM_BYTES = 256 << 20  # 100,000 tokens take 30 MiB
_MAX_PIECES_PER_TOKEN, _MORE_PIECES = 16, 1000  # of text, for each token of max_tokens and in addition
_MAX_BLANKS = 64  # before the first event
_EVENT_START = re.compile(rb"\s*(?:data|event|id|retry)?:")  # JSON and HTML never start like this
_MESSAGE_START = b'"message_start"'
MAX_RETRY_AFTER_S = 60.0
# Some servers send fractions, which RFC 9110 does not allow. Possessive: the time stays linear.
_RETRY_AFTER_SECONDS = re.compile(r"[0-9]++(?:\.[0-9]++)?")


class Failure(Exception):
    """The response is incomplete: the kind of error and the message for its record."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Abandoned(gevent.Timeout):  # cuts a request like any other timeout
    """Raised in the greenlet of a user who leaves before the answer is complete."""


@dataclass(slots=True)
class Exchange:
    """One request and its response, processed while it arrives: a cut request keeps what has come.

    Times are monotonic, in ns. Reads are numbered from 0; each is processed by the HTTP parser or by the template.
    """

    id: str
    embeddings: bool = False  # a request for vectors, not text
    messages: bool = False  # a request to Anthropic's Messages API
    abandon_after_chunks: int | None = None  # the user leaves after so many chunks
    header: str = ""  # a line of the request's head
    max_tokens: int | None = None  # of the request; None: it has none
    created_ns: int = field(default_factory=time.monotonic_ns)
    connect_ns: int | None = None  # duration of opening the connection; None: it was open
    connect_retries: int | None = None  # SYN retransmissions while it was opened
    sent_ns: int | None = None  # of the first attempt, if it was sent twice
    resent: bool = False
    request_bytes: int = 0  # size of the request's body
    arrivals: ReadTimes = field(default_factory=ReadTimes)  # one for each read
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    headers_read: int | None = None  # the read that completed the headers
    body: list[tuple[int, bytes]] = field(default_factory=list)  # unprocessed pieces: (read, bytes)
    parsed: "array[int]" = field(default_factory=lambda: array("I"))  # reads processed by the parser
    template: EventTemplate = field(default_factory=EventTemplate)
    known_stream: bool = False
    data_read: int | None = None  # the last read that completes an event with data; comments and pings have none
    complete: bool = False
    failure: Failure | None = None
    ended_ns: int | None = None  # when it was complete or failed
    answer: Answer = field(default_factory=lambda: Answer(None, None))
    # The following are of parsed reads only: the template counts its own events.
    _parser: Parser = field(default_factory=Parser)
    _event_count: int = 0
    _chunk_reads: "array[int]" = field(default_factory=lambda: array("I"))  # the read of each chunk
    _textless_events: Counter[int] = field(default_factory=Counter)  # by the number of chunks before them
    _first_visible_read: int | None = None
    _first_text_read: int | None = None  # of a token that is not blank
    _done_read: int | None = None

    @property
    def start_ns(self) -> int:
        """When the request was sent; if never, when it was created."""
        return self.created_ns if self.sent_ns is None else self.sent_ns

    @property
    def read_count(self) -> int:
        return len(self.parsed) + self.template.reads

    @property
    def chunk_count(self) -> int:
        return len(self._chunk_reads) + self.template.events

    @property
    def is_stream(self) -> bool:
        """Whether the body received so far is a stream of events."""
        if self.known_stream or self.headers.get("content-type", "").lower().startswith("text/event-stream"):
            return True
        # Some servers send no content type, or the wrong one.
        return bool(self.body) and _EVENT_START.match(self.body[0][1][:_MAX_BLANKS]) is not None

    def remaining_s(self, began_ns: int, timeout_s: float) -> float:
        """Return how long the response may still take: until its headers, its next event, or the end of its body.

        A body that is no stream has a total time, counted from `began_ns`: any slow bytes would extend a wait.
        """
        if self.headers_read is not None and not self.is_stream:
            timeout_s, since_ns = max_body_s(timeout_s, self.max_tokens), began_ns
        else:  # pings keep the connection open, but do not extend the wait
            since_ns = began_ns if self.data_read is None else self.arrivals.reads_ns[self.data_read]
        return timeout_s - (time.monotonic_ns() - since_ns) / 1e9

    def describe_timeout(self, timeout_s: float) -> str:
        """Return what did not arrive in time."""
        if self.headers_read is not None and not self.is_stream:
            return f"no complete answer arrived within {max_body_s(timeout_s, self.max_tokens):g} s"
        newest_read = len(self.arrivals.reads_ns) - 1
        is_silent = newest_read == (-1 if self.data_read is None else self.data_read)
        return f"{'no data' if is_silent else 'no token and no complete answer'} arrived for {timeout_s:g} s"

    def refuse_endless_stream(self) -> None:
        """Raise Failure if the server sends far more than `max_tokens` allow: it might never stop."""
        if self.max_tokens is None or self.complete:
            return
        max_pieces = _MAX_PIECES_PER_TOKEN * self.max_tokens + _MORE_PIECES
        events = self._event_count + self.template.events
        # Events without text report the progress of the prompt, whose tokens have at least one byte each.
        if self.chunk_count > max_pieces or events > max_pieces + self.request_bytes:
            what = f"{self.chunk_count} pieces of text in {events} events"
            raise Failure("malformed", f"{what} for {self.max_tokens} max_tokens: the stream does not end")

    def cut_now(self) -> Answer | None:
        """Return an answer as if the request were cut now: its age, and the times of the first chunk and visible text.

        None: it was not sent, or some reads are not parsed yet.
        """
        if self.sent_ns is None or self.ended_ns is not None or self.read_count < len(self.arrivals.reads_ns):
            return None
        answer, reads_ns = Answer("unfinished", "in flight", unread=self.answer.unread), self.arrivals.reads_ns
        answer.ended_s = (time.monotonic_ns() - self.sent_ns) / 1e9
        answer.chunks_s = [(reads_ns[read] - self.sent_ns) / 1e9 for read in self._chunk_reads[:1]]
        if self._first_visible_read is not None:
            answer.first_visible_s = (reads_ns[self._first_visible_read] - self.sent_ns) / 1e9
        return answer

    def state(self, user_class: str, streams: bool) -> RequestInFlight:
        """Return what is parsed so far. It takes a few microseconds, however long the answer is."""
        sent_ns = self.created_ns if self.sent_ns is None else self.sent_ns
        ttft_s, reads = None, self._chunk_reads
        if reads:
            read_ns, stamp_ns = self.arrivals.reads_ns[reads[0]], self.arrivals.stamps_ns[reads[0]]
            ttft_s = ((stamp_ns if sent_ns <= stamp_ns <= read_ns else read_ns) - sent_ns) / 1e9
        chunks = len(reads) + self.template.events
        return RequestInFlight(user_class, sent_ns / 1e9, ttft_s, chunks, streams, self.ended_ns is not None)

    def unprocessed_body(self) -> bytes:
        return b"".join(data for _, data in self.body)

    def process(self) -> None:
        """Process the received part of a stream and free it. Raises Failure for an event that is too long."""
        if not self.body and self.template.ready:  # the template has processed all
            return
        if self.status is None or not 200 <= self.status < 300 or not self.is_stream:
            return
        self._collect_template_text()
        answer, body, self.body = self.answer, self.body, []
        self.known_stream = True
        for read, data in body:
            starts_an_event = self._parser.idle
            try:
                events = self._parser.feed(data)
            except EventTooLong:
                raise Failure("malformed", f"an event has more than {MAX_EVENT_BYTES >> 20} MiB") from None
            if any(event.data and event.type != "ping" for event in events):
                self.data_read = read
            for event in events:
                self._note_event(event, read)
            # A whole event in one read; events after the finish reason have no text.
            is_whole = starts_an_event and len(events) == 1 and data == b"data: %s\n\n" % events[0].data
            # Blanks before the first text must be decoded: the template does not look at the text.
            if is_whole and answer.finish is None and self._first_text_read is not None:
                self.template.learn(data)
        self.template.ready = self._parser.idle and not answer.done

    def _collect_template_text(self) -> None:
        """Move the text that the template has taken into the answer."""
        if self.template.text:
            self.answer.texts.append(self.template.text.decode("utf-8", "replace"))
            self.template.text.clear()
        if self.template.reasoning:
            self.answer.reasoning_texts.append(self.template.reasoning.decode("utf-8", "replace"))
            self.template.reasoning.clear()

    def _note_event(self, event: Event, read: int) -> None:
        answer = self.answer
        if self.messages:
            if _MESSAGE_START in event.data:  # the only event that names the model; it has no text
                openai_api.note_model(started_message(event), answer)
            event = as_chat_event(event)
        data = event.data.strip()
        self._event_count += bool(data)  # some gateways send empty events as pings
        if data == b"[DONE]":
            self._note_done(read)
            return
        if answer.done:
            openai_api.note_error(event, answer)
            return
        token = openai_api.note_event(event, self._event_count + self.template.events, answer)
        if token in ("text", "blank"):
            self._chunk_reads.append(read)
            if token == "text" and self._first_text_read is None:
                self._first_text_read = read
            if self._first_visible_read is None and answer.texts:
                self._first_visible_read = read
        elif token == "no text":
            self._textless_events[self.chunk_count] += 1

    def _note_done(self, read: int) -> None:
        if not self.answer.done:
            self.answer.done = True
            self._done_read = read

    def finish_answer(self) -> Answer:
        """Return the answer, when the exchange is complete or has failed. `add_times` adds its times."""
        answer = self.answer
        answer.status = self.status
        self._collect_template_text()
        answer.reasoning_chunks += self.template.reasoning_events
        if self.status is not None and not 200 <= self.status < 300:
            self._note_error_status(self.status)
        elif self.is_stream:
            self._finish_stream()
        elif self.complete:
            body = self.unprocessed_body()
            body = as_chat_completion(body) if self.messages else body
            openai_api.note_whole_response(body, self.headers, answer, embeddings=self.embeddings)
        if self.failure is not None and not answer.done:
            answer.fail(self.failure.kind, self.failure.message)
        if answer.error is None and answer.generated and not (self.embeddings or answer.calls or answer.has_sound):
            answer.odd_text = classify_text(answer.texts, answer.reasoning_texts)
        return answer

    def _finish_stream(self) -> None:
        self.process()
        answer = self.answer
        answer.textless = sum(self._textless_events[chunks] for chunks in {0, self.chunk_count})
        self._note_last_event()
        openai_api.finish_unread(answer)
        openai_api.note_stray_text(self._parser.stray_text(), answer)
        if not self.complete and not answer.done:
            return  # the failure of the connection is more specific
        events = self._event_count + self.template.events
        if not events and (encoding := openai_api.describe_encoding(self.headers)):
            answer.fail("not_api", f"status {self.status} with {encoding} in place of an API answer")
        if answer.unknown_event is not None and answer.finish is None:
            answer.fail("stream_error", f"no finish reason, and an event of no known form: {answer.unknown_event}")
        if not answer.done and answer.finish is None:
            answer.fail("truncated", f"the stream ended after {events} events without [DONE] or a finish reason")
        if not answer.generated:
            answer.fail("empty", f"a complete stream without any generated text; {openai_api.unread_text(answer)}")

    def _note_last_event(self) -> None:
        """Note the end or the error in a last event that no blank line closed. Its token is not counted."""
        with suppress(EventTooLong):
            for event in self._parser.finish():
                if event.data.strip() == b"[DONE]":
                    self._note_done(self.read_count - 1)
                else:
                    openai_api.note_error(event, self.answer)

    def _note_error_status(self, status: int) -> None:
        raw = self.unprocessed_body()
        try:
            body = openai_api.decode_lenient(raw)
        except ValueError:
            body = None
        if 300 <= status < 400:
            message = f"redirect to {self.headers.get('location', 'nowhere')}, which a load test does not follow"
        elif isinstance(body, dict):
            message = error_words(body) or to_text(body)
        else:
            message = openai_api.describe_body(self.headers, raw)
        rejected = status in (429, 503)
        if rejected:
            self.answer.retry_after_s = _retry_after_s(self.headers)
        self.answer.fail("rejected" if rejected else "http", f"status {status}: {message}")

    def add_times(self) -> None:
        """Add the times to the answer of `finish_answer`. Call it once."""
        answer, start_ns = self.answer, self.start_ns
        template_reads = sorted(set(range(self.read_count)).difference(self.parsed))
        extra_reads = [template_reads[number] for number in self.template.extra_event_reads]
        lengths = [*answer.chunk_chars, *self.template.chars]
        sized_reads = sorted(zip([*self._chunk_reads, *sorted([*template_reads, *extra_reads])], lengths, strict=True))
        reads = [read for read, _ in sized_reads]  # the read of each chunk
        # Use the kernel's stamps if all are plausible, else the times of the reads.
        if self.sent_ns is not None and self.arrivals.has_plausible_stamps(self.sent_ns):
            answer.clock, times_ns = "kernel", self.arrivals.stamps_ns
        else:
            answer.clock, times_ns = "read", self.arrivals.reads_ns
        end_ns = start_ns if self.ended_ns is None else self.ended_ns
        if self._done_read is not None:
            end_ns = times_ns[self._done_read]
        elif self.complete and times_ns:
            end_ns = times_ns[-1]
        answer.ended_s = (end_ns - start_ns) / 1e9
        if self.headers_read is not None:
            answer.headers_s = (times_ns[self.headers_read] - start_ns) / 1e9
        answer.chunks_s = [(times_ns[read] - start_ns) / 1e9 for read in reads]
        if reads:
            self._note_first_arrival([chars for _, chars in sized_reads])
        if self._first_visible_read is not None:
            answer.first_visible_s = (times_ns[self._first_visible_read] - start_ns) / 1e9
        if self._first_text_read is not None and self._first_text_read != reads[0]:
            answer.first_text_s = (times_ns[self._first_text_read] - start_ns) / 1e9
        shared = [read for read, next_read in pairwise(reads) if read == next_read]
        answer.coalesced = len(shared)
        if shared and answer.clock == "kernel":
            # If the read was in time, the server, a proxy or the network sent the chunks together. The stamp is that of
            # the last bytes, so a late read may look timely.
            lags_us = self.arrivals.lags_us()
            answer.coalesced_late = sum(lags_us[read] > LATE_READ_S * 1e6 for read in shared)

    def _note_first_arrival(self, chars: Sequence[int]) -> None:
        """Note how much of the text came first, by the characters of each chunk, and what passed a bundle on."""
        answer = self.answer
        first, arrivals = answer.note_first_arrival(chars)
        if first > 1 or arrivals <= MAX_PIECES or (answer.output_tokens or 0) >= 2 * arrivals:
            gateways = [
                engine.title for engine in engines() if engine.gateway and engine.version_header in self.headers
            ]
            passed = filter(None, (*gateways, self.headers.get("server"), self.headers.get("via")))
            answer.via = openai_api.header_text(", via ".join(passed)) or None


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the wait of Retry-After, at most MAX_RETRY_AFTER_S; None without a number of seconds."""
    value = headers.get("retry-after", "").strip()
    return min(float(value), MAX_RETRY_AFTER_S) if _RETRY_AFTER_SECONDS.fullmatch(value) else None


class Collector:
    """Parses the HTTP of one response into an Exchange. Its `on_...` methods are the callbacks of httptools."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.parsed = array("I")  # drop the reads of an earlier attempt
        exchange.data_read = None
        self._template_reads = 0  # reads of the template at the last check
        self._parser = httptools.HttpResponseParser(self)
        self.keep_alive = False
        self._size = 0  # bytes given to the parser
        self._informational = False  # a response such as "100 Continue", which another response follows
        self._between_chunks = False  # the parser's last event was the end of a chunk of the body

    @property
    def template(self) -> EventTemplate | None:
        """The template that may process the next read, which the parser then skips; None if the parser must.

        The template takes whole chunks only, so the parser is between two chunks before and after it.
        """
        template = self.exchange.template
        return template if self._between_chunks and template.ready else None

    def note_template_reads(self) -> None:
        """Note reads that the template has processed since the last call: they have data."""
        if self.exchange.template.reads > self._template_reads:
            self._template_reads = self.exchange.template.reads
            self.exchange.data_read = self.exchange.read_count - 1

    def parse_inbox(self, inbox: AnyInbox) -> None:
        """Parse all that was read. Raises the errors of `parse`, Abandoned, and Failure for a stream without end."""
        exchange = self.exchange
        max_chunks = math.inf if exchange.abandon_after_chunks is None else exchange.abandon_after_chunks
        self.note_template_reads()
        for data in inbox.take_pieces():
            try:
                self.parse(data)
            finally:  # also what came before the error
                exchange.process()
            if exchange.chunk_count >= max_chunks and not exchange.complete:
                raise Abandoned
        exchange.refuse_endless_stream()

    def parse_asleep(self, inbox: AnyInbox) -> None:
        """Parse all that was read while the user's greenlet sleeps. The end of the response wakes it."""
        self.parse_inbox(inbox)
        inbox.template = self.template
        if self.exchange.complete or self.exchange.answer.done:
            inbox.wake()

    def parse(self, data: bytes) -> None:
        """Parse the next read; empty bytes are the end of the connection.

        Raises EOFError if the connection ends before the response, httptools.HttpParserError if it is not HTTP, Failure
        if it is too large.
        """
        exchange = self.exchange
        if self.template is not None and self.template.try_take(data, len(data)):
            self.note_template_reads()
            return
        exchange.template.ready = False
        exchange.parsed.append(exchange.read_count)
        if exchange.complete:
            self.keep_alive = False  # bytes without a request
        elif data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:  # 101: complete; the rest is not HTTP
                self.keep_alive = False
            self._between_chunks = self._between_chunks and data.endswith(b"\n")
            self._size += len(data)
            max_bytes = _MAX_STREAM_BYTES if exchange.known_stream else _MAX_RESPONSE_BYTES
            if self._size > max_bytes:
                kind: ErrorKind = "malformed" if exchange.known_stream else "not_api"
                raise Failure(kind, f"the response has more than {max_bytes >> 20} MiB")
        elif self.is_open_ended and "chunked" not in exchange.headers.get("transfer-encoding", "").lower():
            exchange.complete = True
        else:
            raise EOFError

    def close(self) -> None:
        """Break the reference cycle with the parser: the garbage collector has nothing to do."""
        del self._parser

    @property
    def is_open_ended(self) -> bool:
        """Whether the length of the response is known only at its end."""
        return self.exchange.status is not None and "content-length" not in self.exchange.headers

    def on_message_begin(self) -> None:
        if self.exchange.complete:  # a second response, such as 408, in the same read; it ends the parsing
            raise ValueError("a response that no request asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.exchange.headers_read is None:  # otherwise a trailer
            self.exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._informational = 100 <= status < 200 and status != 101  # after 101 no HTTP follows
        if not self._informational:
            self.exchange.status = status
            self.exchange.headers_read = self.exchange.read_count - 1

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_body(self, data: bytes) -> None:
        self.exchange.body.append((self.exchange.read_count - 1, data))

    def on_message_complete(self) -> None:
        self._between_chunks = False
        if self._informational:
            self.exchange.headers.clear()
        else:
            self.exchange.complete = True
            self.keep_alive = self._parser.should_keep_alive()  # llhttp knows it only now
