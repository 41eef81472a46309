"""One request and what came back: bytes, the time of each read, and the failure if there was one."""

import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Literal

import httptools

from harness.load.clock import SLACK_NS
from harness.load.form import Form
from harness.load.reader import Arrivals, Inbox
from harness.rundir.records import ErrorKind

Clock = Literal["kernel", "read"]

_HEAD_BYTES = 1 << 20  # of status line and headers, 1xx responses included
_BODY_BYTES = 16 << 20  # of a body that is no stream; embeddings of a long input have some
_STREAM = re.compile(rb"(?:data|event|id|retry)?:")  # how events begin; JSON and HTML never do
_STREAM_BYTES = 6  # that tell
_STREAM_PIECES = 64  # of the body that are searched for them


class Failure(Exception):
    """Why a response did not arrive in full: the kind and the words of a record."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@lru_cache(256)
def _name(raw: bytes) -> str:
    """In lower case. Here and below the same object for equal ones, as all answers of a server have the same."""
    return raw.decode("latin-1").lower()


@lru_cache(256)
def _value(raw: bytes) -> str:
    return raw.decode("latin-1")


def _numbers() -> "array[int]":
    return array("I")


@dataclass(slots=True)
class Exchange:
    """One request and what came back, filled in as it happens, so a cut leaves what there was. Monotonic ns."""

    id: str
    began_ns: int = field(default_factory=time.monotonic_ns)
    connect_ns: int | None = None  # duration of opening the connection; None when it was open
    connect_retries: int | None = None  # SYNs that were sent again until the connection was open
    sent_ns: int | None = None  # the first time, where it had to be sent again
    resent: bool = False
    arrivals: Arrivals = field(default_factory=Arrivals)  # of each read
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    headers_read: int | None = None  # the read that completed the headers
    body: list[tuple[int, bytes]] = field(default_factory=list)  # (read, bytes) that nobody has taken in yet
    parsed: "array[int]" = field(default_factory=_numbers)  # of the reads that were looked into, those by the parser
    form: Form = field(default_factory=Form)  # that of the stream's events, which took in all the others
    look: Callable[[], None] | None = None  # takes in what has come of the body
    watched: bool = False  # look at each piece as it comes
    known_stream: bool = False
    said_read: int | None = None  # the last that says something: in a stream, data and not only comments
    done: bool = False  # [DONE] and the end of its event have been taken in
    request_bytes: int = 0  # of the request's body
    complete: bool = False
    failure: Failure | None = None
    ended_ns: int | None = None  # when it was complete, or had failed

    @property
    def start_ns(self) -> int:
        """When it was sent; for one that never was, when it was begun."""
        return self.began_ns if self.sent_ns is None else self.sent_ns

    @property
    def reads(self) -> int:
        """How many were looked into."""
        return len(self.parsed) + self.form.reads

    @property
    def is_stream(self) -> bool:
        """Whether what has come of the body is a stream of events."""
        if self.known_stream:
            return True
        if self.headers.get("content-type", "").lower().startswith("text/event-stream"):
            return True
        first = b""  # some servers name no type, or that of a whole answer
        for _, data in islice(self.body, _STREAM_PIECES):
            first = (first + data).lstrip()
            if len(first) >= _STREAM_BYTES:
                break
        return _STREAM.match(first) is not None

    def times_ns(self) -> tuple[Clock, list[int]]:
        """The clock and the time of each read: the kernel's where all are believable, else that of the read."""
        if self.sent_ns is not None and self.arrivals.believable(self.sent_ns, SLACK_NS):
            return "kernel", self.arrivals.times_ns()
        return "read", [read for read, _ in self.arrivals]


class Collector:
    """What httptools calls back: sorts the pieces of one response into an Exchange."""

    __slots__ = (
        "_between", "_glanced", "_informational", "_parser", "_size", "exchange", "keep_alive"
    )  # fmt: skip

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.parsed = _numbers()  # not those of an earlier try
        exchange.said_read = None
        self._glanced = 0  # reads that the form had taken when somebody looked last
        self._parser = httptools.HttpResponseParser(self)
        self.keep_alive = False
        self._size = 0  # bytes that were looked into
        self._informational = False
        self._between = False  # the last that the parser told is that a chunk of the body is complete

    @property
    def form(self) -> Form | None:
        """Whoever gets the next read may offer it to this form, and need not hand over what it takes."""
        form = self.exchange.form
        # The parser, which is between two chunks, would be where it is now after whole ones.
        return form if self._between and form.ready else None

    def catch_up(self) -> None:
        """Somebody may have offered reads to the form."""
        if self.exchange.form.reads > self._glanced:
            self._glanced = self.exchange.form.reads
            self.exchange.said_read = self.exchange.reads - 1

    def take_in(self, inbox: Inbox) -> None:
        """Look into all that was read; raises as `take` does."""
        look = self.exchange.look
        self.catch_up()
        for data in inbox.rest():
            try:
                self.take(data)
            finally:  # what came before the error was said
                if look is not None:
                    look()

    def pass_by(self, inbox: Inbox) -> None:
        """The same while who asked sleeps, who is woken at the end."""
        self.take_in(inbox)
        inbox.form = self.form
        if self.exchange.complete or self.exchange.done:
            inbox.wake()

    def take(self, data: bytes) -> None:
        """Look into the next read; empty is the end of the connection.

        Raises EOFError when that is not how this body ends, httptools.HttpParserError for what is no HTTP, Failure for
        more bytes than an answer has.
        """
        exchange = self.exchange
        if self.form is not None and self.form.takes(data, len(data)):
            self.catch_up()
            return
        exchange.form.ready = False
        exchange.parsed.append(exchange.reads)
        if exchange.complete:
            self.keep_alive = False  # nobody asked for what comes now
        elif data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:  # 101: complete, and what follows is not HTTP
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
        """Nothing more will be taken: without its parser, which knows it, it is not left to the garbage collector."""
        del self._parser

    @property
    def waits_for_end(self) -> bool:
        """Whether nothing is of interest any more but how the body ends: of a stream, whatever comes in between."""
        return self.exchange.status is not None and "content-length" not in self.exchange.headers

    def on_message_begin(self) -> None:
        if self.exchange.complete:  # a farewell, such as 408, in the same read; it ends the parsing
            raise ValueError("nobody asked for this one")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.exchange.headers_read is None:  # else it is a trailer, which changes nothing
            self.exchange.headers[_name(name)] = _value(value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        # Such as "100 Continue": the response itself is still to come. After 101 nothing comes that is HTTP.
        self._informational = 100 <= status < 200 and status != 101
        if not self._informational:
            self.exchange.status = status
            self.exchange.headers_read = self.exchange.reads - 1

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True  # and still so after a read that has not begun the next one

    def on_body(self, data: bytes) -> None:
        exchange = self.exchange
        read = exchange.reads - 1
        exchange.body.append((read, data))
        if not exchange.known_stream and not exchange.is_stream:  # of a stream, who looks into it says so
            exchange.said_read = read

    def on_message_complete(self) -> None:
        self._between = False
        if self._informational:
            self.exchange.headers.clear()
        else:
            self.exchange.complete = True
            self.keep_alive = self._parser.should_keep_alive()  # llhttp only knows it now

    def _ends_with_connection(self) -> bool:
        """Whether the end of the connection is how this body ends."""
        headers = self.exchange.headers
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        return self.exchange.status is not None and not chunked and "content-length" not in headers
