"""Parse server-sent events, by the WHATWG standard (https://html.spec.whatwg.org/multipage/server-sent-events.html).

The fields `id` and `retry` are ignored: this client never reconnects. Two things that the standard drops are events
here, because servers report errors with them: a field named `error`, and an event that has a type but no data. Most
events of one stream differ in their text only, so an event template recognizes them without decoding.
"""

import re
from array import array
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import msgspec

_BOM = b"\xef\xbb\xbf"
_MAX_STRAY_BYTES = 4000
_ERROR_FIELDS = (b"error", b"exception", b"fatal")  # llama.cpp sent `error: {...}`
MAX_EVENT_BYTES = 8 << 20  # an endless event must not fill the memory
CLASSIFIED_CHARS = 4000  # of a text by which it is known to be nonsense


class EventTooLong(Exception):
    """An event has more than MAX_EVENT_BYTES."""


class Event(NamedTuple):
    """One event: its type ("message" by default) and its data lines, joined by newlines."""

    type: str
    data: bytes


class Parser:
    """An incremental parser: bytes may be split anywhere, also inside a line end or a character."""

    __slots__ = ("_data", "_data_bytes", "_rest", "_skip_lf", "_stray", "_type", "idle")

    def __init__(self) -> None:
        self._rest = bytearray()  # an incomplete line
        self._skip_lf = False  # the last byte was a CR: an LF after it belongs to the same line end
        self._type = b""  # of the incomplete event
        self._data: list[bytes] = []  # its lines
        self._data_bytes = 0
        self._stray = bytearray()
        self.idle = True  # between two events

    def stray_text(self) -> bytes:
        """Return the end of the text outside of any field, such as an error in bare JSON. Call it at the end."""
        rest = b"" if self._is_field(self._rest) else self._rest[-_MAX_STRAY_BYTES:]
        return bytes(self._stray + rest)[-_MAX_STRAY_BYTES:].strip()

    def finish(self) -> list[Event]:
        """Return the last event, if no blank line closed it: it may be incomplete. Nothing can be fed afterwards."""
        return self.feed(b"\n\n")

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that these bytes complete. An event is complete with its closing blank line.

        Raises EventTooLong. After that, the parser cannot be used.
        """
        if self._skip_lf and data:
            self._skip_lf = False
            if data.startswith(b"\n"):
                data = data[1:]
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[Event] = []
        if b"\n" not in data:  # a part of a long line: do not copy the line for each part
            self._rest += data
        else:
            *lines, rest = data.split(b"\n")
            if self._rest:
                lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray(rest)
            for line in lines:
                self._parse_line(line, events)
        if self._data_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong
        self.idle = not (self._rest or self._skip_lf or self._data or self._type)
        return events

    def _parse_line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data or self._type:
                events.append(Event(self._type.decode("utf-8", "replace") or "message", b"\n".join(self._data)))
            self._data = []
            self._data_bytes = 0
            self._type = b""
            return
        name, _, value = line.removeprefix(_BOM).partition(b":")  # a comment has an empty name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(line) + 1
        elif name == b"event":
            self._type = value
        elif name.lower() in _ERROR_FIELDS:
            events.append(Event("error", value))
        elif not self._is_field(line):
            self._stray += line + b"\n"
            if len(self._stray) > 2 * _MAX_STRAY_BYTES:
                del self._stray[:-_MAX_STRAY_BYTES]

    @staticmethod
    def _is_field(line: bytes | bytearray) -> bool:
        return line.partition(b":")[0] in (b"", b"data", b"event", b"id", b"retry")


# A JSON string without these bytes needs no decoding. `translate` is faster than a regular expression.
_SPECIAL = bytes(range(0x20)) + b'"\\'
_TEXT_FIELD = re.compile(rb'"(?:content|reasoning_content|reasoning)":\s*"([^%s]+)"' % re.escape(_SPECIAL))
_CRLF = b"\r\n"  # ends a chunk of a body


class _Delta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta
    finish_reason: None = None


class _PlainEvent(msgspec.Struct, frozen=True):
    """An event that carries text of one channel and nothing else of interest."""

    choices: tuple[_Choice]
    object: Literal["chat.completion.chunk"]
    usage: None = None
    error: None = None


_decoder = msgspec.json.Decoder(_PlainEvent)


class EventTemplate:
    """The bytes before and after the text of a decoded event. Other events with the same bytes need no decoding."""

    __slots__ = (
        "_after", "_before", "_is_visible", "chars", "extra_event_reads", "reads", "ready", "reasoning",
        "reasoning_events", "text",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ready = False  # set by the exchange: all earlier data is processed, and no event is incomplete
        self.text = bytearray()  # content of the events taken, until the exchange collects it
        self.reads = 0  # number of reads taken
        self.extra_event_reads = array("I")  # for each event that is not the first of its read: the number of the read
        self.chars = array("I")  # characters of the text of each event
        self.reasoning = bytearray()  # likewise, only its start: it is only classified
        self.reasoning_events = 0  # events with reasoning instead of content
        self._is_visible = True
        self._before = b""
        self._after = b""

    @property
    def events(self) -> int:
        return self.reads + len(self.extra_event_reads)

    def learn(self, event: bytes) -> None:
        """Learn from a whole event as it was sent, "data: ...", if it has one text and nothing else of interest."""
        matches = list(_TEXT_FIELD.finditer(event))
        if len(matches) != 1:
            return
        before, after = event[: matches[0].start(1)], event[matches[0].end(1) :] + _CRLF
        if (before, after) == (self._before, self._after):
            return  # a busy process decodes several equal events before it uses the template
        try:
            delta = _decoder.decode(event[len(b"data: ") :]).choices[0].delta
            text = matches[0][1].decode()
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if list(filter(None, (delta.content, delta.reasoning_content, delta.reasoning))) == [text]:
            self._is_visible = bool(delta.content)
            self._before, self._after = before, _interned(after)

    def try_take(self, read: bytes | bytearray, size: int) -> bool:
        """Take the first `size` bytes of `read` if they are whole chunks of a body, each with one matching event.

        Return whether they were taken.
        """
        text, count = self._text_of_chunk(read, size), 1
        if text is not None:
            self.chars.append(len(text.decode("utf-8", "replace")))
        else:
            texts = self._texts_of_chunks(bytes(read[:size]))
            text, count = b"".join(texts), len(texts)
            if not count:
                return False
            self.chars.extend(len(chunk.decode("utf-8", "replace")) for chunk in texts)
            self.extra_event_reads.extend([self.reads] * (count - 1))
        if self._is_visible:
            self.text += text
        else:
            self.reasoning_events += count
            if len(self.reasoning) < CLASSIFIED_CHARS:
                self.reasoning += text
        self.reads += 1
        return True

    def _text_of_chunk(self, chunk: bytes | bytearray, size: int) -> bytes | bytearray | None:
        """Return the text of the event in a chunk; None if it is not a matching event."""
        head = _chunk_size_line(size)
        start, end = len(head) + len(self._before), size - len(self._after)
        is_match = chunk.startswith(head) and chunk.startswith(self._before, len(head))
        if not (self._before and is_match and chunk.endswith(self._after, 0, size)):
            return None
        text = chunk[start:end]
        return text if text and text.translate(None, _SPECIAL) == text else None

    def _texts_of_chunks(self, read: bytes) -> list[bytes | bytearray]:
        """Return the texts of a late read with several chunks; none if it has anything else than matching events."""
        if not self._before or not read.endswith(self._after):
            return []
        texts: list[bytes | bytearray] = []
        for piece in read.split(self._after)[:-1]:
            chunk = piece + self._after
            text = self._text_of_chunk(chunk, len(chunk))
            if text is None:
                return []
            texts.append(text)
        return texts


@lru_cache(256)
def _interned(value: bytes) -> bytes:
    """Return the same object for equal values: comparisons in all streams stay in the processor's cache."""
    return value


@cache
def _chunk_size_line(length: int) -> bytes:
    """Return the first line of a chunk with this total length: the size of its content, in hexadecimal."""
    for digits in range(1, length):
        content = length - digits - 2 * len(_CRLF)
        if len(f"{content:x}") == digits:
            return b"%x\r\n" % content
    return b"none"  # no such chunk exists
