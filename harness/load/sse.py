"""Server-sent events, by the WHATWG standard (https://html.spec.whatwg.org/multipage/server-sent-events.html).

The `id` and `retry` fields only matter to a client that reconnects; this one never does. Events of one stream differ
in their text and little else: an event template recognizes them without decoding.
"""

import re
from array import array
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import msgspec

_BOM = b"\xef\xbb\xbf"
_STRAY_BYTES = 4000
MAX_EVENT_BYTES = 8 << 20  # an endless event must not fill the memory


class EventTooLong(Exception):
    """An event has more than MAX_EVENT_BYTES."""


class Event(NamedTuple):
    """One event: its type ("message" unless the stream says otherwise) and its data lines joined by newlines."""

    type: str
    data: bytes


class Parser:
    """An incremental parser: bytes may be split anywhere, also inside a line end or a character."""

    __slots__ = ("_at_start", "_data", "_held", "_rest", "_skip_lf", "_stray", "_type", "idle", "has_data")

    def __init__(self) -> None:
        self._rest = bytearray()  # an incomplete line
        self._at_start = True  # a byte order mark may still come
        self._skip_lf = False  # the last byte was a CR: an LF after it belongs to the same line end
        self._type = b""
        self._data: list[bytes] = []
        self._held = 0  # bytes of _data
        self._stray = b""
        self.idle = True  # between two events
        self.has_data = False  # of the last bytes, which may be comments only

    def stray(self) -> bytes:
        """The start of text outside of any field, such as an error in bare JSON. Call it at the end."""
        rest = b"" if self._is_field(self._rest) else bytes(self._rest[:_STRAY_BYTES])
        return (self._stray + rest)[:_STRAY_BYTES].strip()

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete. An event without its closing blank line is never returned.

        Raises EventTooLong; nothing can be fed after that.
        """
        self.has_data = False
        if self._skip_lf and data:
            self._skip_lf = False
            if data.startswith(b"\n"):
                data = data[1:]
        if self._at_start:
            data = bytes(self._rest) + data
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._rest, self.idle = bytearray(data), not data
                return []
            self._at_start, self._rest = False, bytearray()
            data = data.removeprefix(_BOM)
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[Event] = []
        if b"\n" not in data:  # inside a line: do not copy the line for each piece
            self._rest += data
        else:
            *lines, rest = data.split(b"\n")
            if self._rest:
                lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray(rest)
            for line in lines:
                self._line(line, events)
        if data and self._rest.startswith(b"data"):
            self.has_data = True
        if self._held + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong
        self.idle = not (self._rest or self._skip_lf or self._data or self._type)
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._type.decode("utf-8", "replace") or "message", b"\n".join(self._data)))
            self._data = []
            self._held = 0
            self._type = b""
            return
        name, _, value = line.partition(b":")  # a comment has an empty name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._held += len(line) + 1
            self.has_data = True
        elif name == b"event":
            self._type = value
        elif not self._is_field(line) and len(self._stray) < _STRAY_BYTES:
            self._stray += line + b"\n"

    @staticmethod
    def _is_field(line: bytes | bytearray) -> bool:
        return line.partition(b":")[0] in (b"", b"data", b"event", b"id", b"retry")


# A JSON string without these needs no decoding. `translate` is faster than a regular expression.
_SPECIAL = bytes(range(0x20)) + b'"\\'
_FIELD = re.compile(rb'"(?:content|reasoning_content|reasoning)":\s*"([^%s]+)"' % re.escape(_SPECIAL))
_IN_VAIN = 8  # failed templates; then the events of this stream differ in more than their text
_CRLF = b"\r\n"  # of a chunk of a body


class _Delta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta
    finish_reason: None = None


class _Plain(msgspec.Struct, frozen=True):
    """An event that carries text of one channel and nothing else of interest."""

    choices: tuple[_Choice]
    object: Literal["chat.completion.chunk"]
    usage: None = None
    error: None = None


_decoder = msgspec.json.Decoder(_Plain)


class EventTemplate:
    """The bytes before and after the text of a decoded event: other events with these need no decoding."""

    __slots__ = ("_after", "_before", "_in_vain", "_visible", "hidden", "more", "reads", "ready", "text")

    def __init__(self) -> None:
        self.ready = False  # between two events, and all before is processed; set by the exchange
        self.text = bytearray()  # content of the taken events, until it is fetched
        self.reads = 0  # number of taken reads
        self.more = array("I")  # the number, among these, of a read for each event but its first
        self.hidden = 0  # events with reasoning instead of content
        self._visible = True
        self._before = b""
        self._after = b""
        self._in_vain = 0

    @property
    def events(self) -> int:
        return self.reads + len(self.more)

    def learn(self, event: bytes) -> None:
        """Learn from a whole event as it was sent, "data: ...", if it is plain."""
        if self._in_vain == _IN_VAIN:
            self._before = b""
            return
        found = list(_FIELD.finditer(event))
        if len(found) != 1:
            return
        before, after = event[: found[0].start(1)], event[found[0].end(1) :] + _CRLF
        if (before, after) == (self._before, self._after):
            return  # a late client gets several equal ones before it offers one
        self._in_vain += 1
        try:
            delta = _decoder.decode(event[len(b"data: ") :]).choices[0].delta
            text = found[0][1].decode()
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if [one for one in (delta.content, delta.reasoning_content, delta.reasoning) if one] == [text]:
            self._visible = bool(delta.content)
            self._before, self._after = before, _one(after)

    def takes(self, read: bytes | bytearray, size: int) -> bool:
        """Take the first `size` bytes of `read` if they are whole chunks of a body, each with an event of this form.

        Return whether they are.
        """
        text, number = self._text(read, size), 1
        if text is None:
            texts = self._several(bytes(read[:size]))
            text, number = b"".join(texts), len(texts)
            if not number:
                return False
            self.more.extend([self.reads] * (number - 1))
        if self._visible:
            self.text += text
        else:
            self.hidden += number
        self.reads += 1
        self._in_vain = 0
        return True

    def _text(self, chunk: bytes | bytearray, size: int) -> bytes | bytearray | None:
        before, after, first = self._before, self._after, _first_line(size)
        if not (
            before
            and chunk.startswith(first)
            and chunk.startswith(before, len(first))
            and chunk.endswith(after, 0, size)
        ):
            return None
        text = chunk[len(first) + len(before) : size - len(after)]
        return text if text and text.translate(None, _SPECIAL) == text else None

    def _several(self, read: bytes) -> list[bytes | bytearray]:
        """Return the texts of a late read of several chunks; None if it has anything else."""
        texts: list[bytes | bytearray] = []
        if not self._before:
            return texts
        for piece in read.split(self._after)[:-1]:
            chunk = piece + self._after
            text = self._text(chunk, len(chunk))
            if text is None:
                return []
            texts.append(text)
        return texts if read.endswith(self._after) else []


@lru_cache(256)
def _one(value: bytes) -> bytes:
    """The same object for equal values: comparisons of all streams stay in the processor's cache."""
    return value


@cache
def _first_line(length: int) -> bytes:
    """The size of the content of a chunk with this total length, and the line ends around it."""
    for digits in range(1, length):
        content = length - digits - 2 * len(_CRLF)
        if len(f"{content:x}") == digits:
            return b"%x\r\n" % content
    return b"none"  # no such chunk exists
