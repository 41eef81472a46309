"""One request and its response: bytes, the time of each read, and a failure."""

import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Literal

import httptools

from harness.load.reader import SLACK_NS, AnyInbox, ReadTimes
from harness.load.sse import EventTemplate
from harness.rundir.records import ErrorKind

Clock = Literal["kernel", "read"]

_HEAD_BYTES = 1 << 20  # of status line and headers, 1xx responses included
_BODY_BYTES = 16 << 20  # of a body that is no stream; embeddings of a long input have some
_STREAM = re.compile(rb"(?:data|event|id|retry)?:")  # how events begin; JSON and HTML never do
_STREAM_BYTES = 6  # that tell
_STREAM_PIECES = 64  # of the body that are searched for them


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


def _numbers() -> "array[int]":
    return array("I")


@dataclass(slots=True)
class Exchange:
    """One request and its response, filled in as data arrives, so that a cut keeps it. Times in monotonic ns."""

    id: str
    began_ns: int = field(default_factory=time.monotonic_ns)
    connect_ns: int | None = None  # time to open the connection; None: it was open
    connect_retries: int | None = None  # SYN retransmissions while it was opened
    sent_ns: int | None = None  # the first time, if it was sent twice
    resent: bool = False
    arrivals: ReadTimes = field(default_factory=ReadTimes)  # of each read
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    headers_read: int | None = None  # the read that completed the headers
    body: list[tuple[int, bytes]] = field(default_factory=list)  # unprocessed (read, bytes)
    parsed: "array[int]" = field(default_factory=_numbers)  # of the processed reads, those by the parser
    template: EventTemplate = field(default_factory=EventTemplate)  # the event template, which processed the others
    look: Callable[[], None] | None = None  # processes the received part of the body
    watched: bool = False  # process each piece at once
    known_stream: bool = False
    data_read: int | None = None  # the last read with data; comments of a stream do not count
    done: bool = False  # [DONE] and the end of its event were processed
    request_bytes: int = 0  # of the request's body
    complete: bool = False
    failure: Failure | None = None
    ended_ns: int | None = None  # when it was complete or failed

    @property
    def start_ns(self) -> int:
        """When it was sent; if never, when it was created."""
        return self.began_ns if self.sent_ns is None else self.sent_ns

    @property
    def reads(self) -> int:
        """Number of reads that were parsed or taken by the template."""
        return len(self.parsed) + self.template.reads

    @property
    def is_stream(self) -> bool:
        """Whether the body, so far, is a stream of events."""
        if self.known_stream:
            return True
        if self.headers.get("content-type", "").lower().startswith("text/event-stream"):
            return True
        first = b""  # some servers send no content type, or the wrong one
        for _, data in islice(self.body, _STREAM_PIECES):
            first = (first + data).lstrip()
            if len(first) >= _STREAM_BYTES:
                break
        return _STREAM.match(first) is not None

    def times_ns(self) -> tuple[Clock, list[int]]:
        """Return the clock and the time of each read: the kernel's if all are plausible, else the process's."""
        if self.sent_ns is not None and self.arrivals.plausible(self.sent_ns, SLACK_NS):
            return "kernel", self.arrivals.times_ns()
        return "read", [read for read, _ in self.arrivals]


class Collector:
    """The callbacks of httptools: they fill an Exchange."""

    __slots__ = (
        "_between", "_template_reads", "_informational", "_parser", "_size", "exchange", "keep_alive"
    )  # fmt: skip

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.parsed = _numbers()  # drop those of an earlier attempt
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
        """Add the reads of the template."""
        if self.exchange.template.reads > self._template_reads:
            self._template_reads = self.exchange.template.reads
            self.exchange.data_read = self.exchange.reads - 1

    def take_in(self, inbox: AnyInbox) -> None:
        """Parse all that was read; raises as `take` does."""
        look = self.exchange.look
        self.catch_up()
        for data in inbox.rest():
            try:
                self.take(data)
            finally:  # also what came before the error
                if look is not None:
                    look()

    def take_asleep(self, inbox: AnyInbox) -> None:
        """Do the same while the user's greenlet sleeps; the end wakes it."""
        self.take_in(inbox)
        inbox.template = self.template
        if self.exchange.complete or self.exchange.done:
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
        elif self._ends_with_connection():
            exchange.complete = True
        else:
            raise EOFError

    def close(self) -> None:
        """Break the cycle with the parser, so that nothing is left to the garbage collector."""
        del self._parser

    @property
    def is_open_ended(self) -> bool:
        """Whether the response is a stream, of which only the end of the body matters now."""
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

    def _ends_with_connection(self) -> bool:
        """Whether the end of the connection ends this body."""
        headers = self.exchange.headers
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        return self.exchange.status is not None and not chunked and "content-length" not in headers
