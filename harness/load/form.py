"""What the events of one stream have in common: they differ in their text, and little else."""

import re
from array import array
from functools import cache, lru_cache
from typing import Literal

import msgspec

# A JSON string without these means itself. `translate` leaves them out, and is quicker than an expression that looks.
_SPECIAL = bytes(range(0x20)) + b'"\\'
_FIELD = re.compile(rb'"(?:content|reasoning_content|reasoning)":\s*"([^%s]+)"' % re.escape(_SPECIAL))
_IN_VAIN = 8  # forms that fitted nothing: the events of this stream differ in more than their text
_END = b"\r\n"  # of a chunk of a body


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


class Form:
    """The bytes before and after the text of an event that was decoded: others with these need no decoding."""

    __slots__ = ("_after", "_before", "_in_vain", "_visible", "hidden", "more", "reads", "ready", "text")

    def __init__(self) -> None:
        self.ready = False  # between two events, and all before was taken in; others see to it
        self.text = bytearray()  # content of the events that were taken, until somebody fetches it
        self.reads = 0  # that were taken
        self.more = array("I")  # the number, among these, of a read for each event but its first
        self.hidden = 0  # of the events, those with reasoning in place of content
        self._visible = True
        self._before = b""
        self._after = b""
        self._in_vain = 0

    @property
    def events(self) -> int:
        """That were taken."""
        return self.reads + len(self.more)

    def learn(self, event: bytes) -> None:
        """Of a whole event as it was sent, "data: ...", if it is plain."""
        if self._in_vain == _IN_VAIN:
            self._before = b""
            return
        found = list(_FIELD.finditer(event))
        if len(found) != 1:
            return
        before, after = event[: found[0].start(1)], event[found[0].end(1) :] + _END
        if (before, after) == (self._before, self._after):
            return  # a late client gets several that are alike before it can offer any
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
        """Take `read`, of which `size` bytes count, if it is one whole chunk of a body with an event of this form, or
        several such; whether it is."""
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
        """The texts of a read that a late client got: chunks that came one by one. None, if there is anything else."""
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
    """The same object for equal values: what all streams compare with stays at hand for the processor."""
    return value


@cache
def _first_line(length: int) -> bytes:
    """That of a chunk which is so long with it: the size of its content, and line ends before and after that."""
    for digits in range(1, length):
        content = length - digits - 2 * len(_END)
        if len(f"{content:x}") == digits:
            return b"%x\r\n" % content
    return b"none"  # there is no such chunk
