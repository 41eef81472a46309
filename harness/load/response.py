"""Make an Answer from the bytes of an exchange and their times."""

import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise

from harness.load.answer import (
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
from harness.load.exchange import Exchange, Failure
from harness.load.sse import MAX_EVENT_BYTES, Event, EventTooLong, Parser
from harness.rundir.records import LATE_READ_S

_MAX_TEXTS = 64  # kept as pieces before they are joined: each takes ten times the memory of its text
MAX_RETRY_AFTER_S = 60.0
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")  # of Retry-After: some servers send fractions, which RFC 9110 has not


class ResponseReader:
    """Read an exchange while it grows: reading all at its end would delay the next read."""

    __slots__ = (
        "_answer", "_chunk_reads", "_count", "_done_read", "_embeddings", "_events", "_exchange", "_template",
        "_textless", "_visible_read"
    )  # fmt: skip

    def __init__(self, exchange: Exchange, *, embeddings: bool = False) -> None:
        """`embeddings`: a request for vectors, not text."""
        self._exchange = exchange
        self._embeddings = embeddings
        self._answer = Answer(None, None)
        self._events = Parser()
        self._template = exchange.template
        self._count = 0  # of events, without those of the template
        self._chunk_reads = array("I")  # of chunks, likewise
        self._textless: Counter[int] = Counter()  # events without text, by the number of chunks before them
        self._visible_read: int | None = None
        self._done_read: int | None = None

    @property
    def chunks(self) -> int:
        """The processed chunks with generated tokens."""
        return len(self._chunk_reads) + self._template.events

    def look(self) -> None:
        """Process the received part of a stream and free it."""
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
            if self._events.has_data:
                exchange.data_read = read
            for event in events:
                self._take(event, read)
            # Events after the finish reason have no text.
            if whole and len(events) == 1 and answer.finish is None and data == b"data: %s\n\n" % events[0].data:
                self._template.learn(data)
        exchange.done = answer.done
        self._template.ready = self._events.idle and not answer.done

    def _fetch_text(self) -> None:
        texts, taken = self._answer.texts, self._template.text
        if taken:
            texts.append(taken.decode("utf-8", "replace"))
            taken.clear()
        if len(texts) > _MAX_TEXTS:
            self._answer.texts = ["".join(texts)]

    def _take(self, event: Event, read: int) -> None:
        """Process an event that this read completed."""
        answer = self._answer
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
        carried = note_event(event, self._count + self._template.events, answer)
        if carried == "text":
            self._chunk_reads.append(read)
            if self._visible_read is None and answer.texts:
                self._visible_read = read
        elif carried == "no text":
            self._textless[self.chunks] += 1

    def finish(self) -> Answer:
        """Return the answer of a finished or failed exchange; `time` adds its times."""
        exchange, answer = self._exchange, self._answer
        answer.status = exchange.status
        self._fetch_text()
        answer.reasoning_chunks += self._template.hidden
        if exchange.status is not None and not 200 <= exchange.status < 300:
            _refused(exchange, exchange.status, answer)
        elif exchange.is_stream:
            self._stream()
        elif exchange.complete:
            note_whole(exchange, answer, embeddings=self._embeddings)
        if exchange.failure is not None and not answer.done:
            answer.fail(exchange.failure.kind, exchange.failure.message)
        return answer

    def time(self) -> None:
        """Add the times of a finished or failed exchange to the answer of `finish`. Call it once."""
        exchange, answer = self._exchange, self._answer
        glanced = sorted(set(range(exchange.reads)).difference(exchange.parsed))
        reads = sorted([*self._chunk_reads, *glanced, *(glanced[number] for number in self._template.more)])
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
        note_unframed(self._events.stray(), answer)
        if not exchange.complete and not answer.done:
            return  # the failure of the connection is more specific
        events = self._count + self._template.events
        if not events and (encoded := coded(exchange)):
            answer.fail("not_api", f"status {exchange.status} with {encoded} in place of an API answer")
        if not answer.done and answer.finish is None:
            answer.fail("truncated", f"the stream ended after {events} events without [DONE] or a finish reason")
        if not answer.generated:
            answer.fail("empty", f"a complete stream without any generated text; {usage_words(answer)}")


def _refused(exchange: Exchange, status: int, answer: Answer) -> None:
    raw = b"".join(data for _, data in exchange.body)
    try:
        body = decode_lenient(raw)
    except ValueError:
        body = None
    if status == 101:
        words = "the server changes the protocol, which no request asked for"
    elif 300 <= status < 400:
        words = f"redirect to {exchange.headers.get('location', 'nowhere')}, which a load test does not follow"
    elif isinstance(body, dict):
        words = error_words(body) or shown(body)
    else:
        words = described(exchange, raw)
    if status in (429, 503):
        answer.retry_after_s = _retry_after_s(exchange.headers)
    answer.fail("rejected" if status in (429, 503) else "http", f"status {status}: {words}")


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


def coalesced_late(exchange: Exchange, answer: Answer) -> int | None:
    """Return how many chunks shared a late read. None: no shared read, or no stamps.

    Of a read in good time the kernel had all bytes at once: the server, a proxy or the network sent them together. The
    stamp is that of its last bytes, so that a late read may look timely, and more often so the faster the stream is.
    """
    if not answer.coalesced or answer.clock != "kernel":
        return None
    start_ns, arrivals = exchange.start_ns, exchange.arrivals
    lags_us = {(at - start_ns) / 1e9: lag for at, lag in zip(arrivals.times_ns(), arrivals.lags_us(), strict=True)}
    shared = [mine for mine, later in pairwise(answer.chunks_s) if mine == later]
    return sum(lags_us[at] > LATE_READ_S * 1e6 for at in shared)
