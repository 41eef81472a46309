"""Server-sent events, by the WHATWG standard (https://html.spec.whatwg.org/multipage/server-sent-events.html).

The `id` and `retry` fields only matter to a client that reconnects; this one never does.
"""

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"
_STRAY_BYTES = 4000
MAX_EVENT_BYTES = 8 << 20  # a server that never ends an event must not fill the memory


class EventTooLong(Exception):
    """An event has more than MAX_EVENT_BYTES."""


class Event(NamedTuple):
    """One event: its type ("message" unless the stream says otherwise) and its data lines joined by newlines."""

    type: str
    data: bytes


class Parser:
    """Incremental: the bytes may be split anywhere, also inside a line end or a character."""

    __slots__ = ("_at_start", "_data", "_held", "_rest", "_skip_lf", "_stray", "_type", "idle", "said")

    def __init__(self) -> None:
        self._rest = bytearray()  # a line whose end has not been seen
        self._at_start = True  # a byte order mark may still come
        self._skip_lf = False  # the last byte was a CR that ended a line: an LF right after it belongs to it
        self._type = b""
        self._data: list[bytes] = []
        self._held = 0  # bytes of _data
        self._stray = b""
        self.idle = True  # between two events
        self.said = False  # the bytes that came last hold data, and not only comments

    def stray(self) -> bytes:
        """The beginning of what was sent outside of any field, such as an error in bare JSON; asked for at the end."""
        rest = b"" if self._is_field(self._rest) else bytes(self._rest[:_STRAY_BYTES])
        return (self._stray + rest)[:_STRAY_BYTES].strip()

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete. An event without its closing blank line is never returned.

        Raises EventTooLong; nothing can be fed after that.
        """
        self.said = False
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
        if b"\n" not in data:  # in the middle of a line, which is not copied for each of its pieces
            self._rest += data
        else:
            *lines, rest = data.split(b"\n")
            if self._rest:
                lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray(rest)
            for line in lines:
                self._line(line, events)
        if data and self._rest.startswith(b"data"):
            self.said = True
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
            self.said = True
        elif name == b"event":
            self._type = value
        elif not self._is_field(line) and len(self._stray) < _STRAY_BYTES:
            self._stray += line + b"\n"

    @staticmethod
    def _is_field(line: bytes | bytearray) -> bool:
        return line.partition(b":")[0] in (b"", b"data", b"event", b"id", b"retry")
