"""Server-sent events, by the WHATWG standard (https://html.spec.whatwg.org/multipage/server-sent-events.html).

The `id` and `retry` fields only matter to a client that reconnects; this one never does.
"""

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"
_STRAY_BYTES = 4000


class Event(NamedTuple):
    """One event: its type ("message" unless the stream says otherwise) and its data lines joined by newlines."""

    type: str
    data: bytes


class Parser:
    """Incremental: the bytes may be split anywhere, also inside a line end or a character."""

    __slots__ = ("_at_start", "_data", "_rest", "_skip_lf", "_stray", "_type", "idle")

    def __init__(self) -> None:
        self._rest = b""  # a line whose end has not been seen
        self._at_start = True  # a byte order mark may still come
        self._skip_lf = False  # the last byte was a CR that ended a line: an LF right after it belongs to it
        self._type = b""
        self._data: list[bytes] = []
        self._stray = b""
        self.idle = True  # between two events

    def stray(self) -> bytes:
        """The beginning of what was sent outside of any field, such as an error in bare JSON; asked for at the end."""
        rest = b"" if self._is_field(self._rest) else self._rest
        return (self._stray + rest)[:_STRAY_BYTES].strip()

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete. An event without its closing blank line is never returned."""
        if self._skip_lf and data:
            self._skip_lf = False
            if data.startswith(b"\n"):
                data = data[1:]
        buffer = self._rest + data
        if self._at_start:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._rest, self.idle = buffer, not buffer
                return []
            self._at_start = False
            buffer = buffer.removeprefix(_BOM)
        if b"\r" in buffer:
            self._skip_lf = buffer.endswith(b"\r")
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = buffer.split(b"\n")
        events: list[Event] = []
        for line in lines:
            self._line(line, events)
        self.idle = not (self._rest or self._skip_lf or self._data or self._type)
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._type.decode("utf-8", "replace") or "message", b"\n".join(self._data)))
            self._data = []
            self._type = b""
            return
        name, _, value = line.partition(b":")  # a comment has an empty name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value
        elif not self._is_field(line) and len(self._stray) < _STRAY_BYTES:
            self._stray += line + b"\n"

    @staticmethod
    def _is_field(line: bytes) -> bool:
        return line.partition(b":")[0] in (b"", b"data", b"event", b"id", b"retry")
