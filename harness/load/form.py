"""What the events of one stream have in common: they differ in their text, and little else."""

import re
from functools import cache, lru_cache
from typing import Literal

import msgspec

_TEXT = re.compile(rb'[^"\\\x00-\x1f]+')  # of a JSON string that means itself
_FIELD = re.compile(rb'"(?:content|reasoning_content|reasoning)":\s*"(%s)"' % _TEXT.pattern)
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

    __slots__ = ("_after", "_before", "_in_vain", "_visible", "events", "hidden", "ready", "text")

    def __init__(self) -> None:
        self.ready = False  # between two events, and all before was taken in; others see to it
        self.text = bytearray()  # content of the events that were taken, until somebody fetches it
        self.events = 0  # that were taken
        self.hidden = 0  # of them, with reasoning in place of content
        self._visible = True
        self._before = b""
        self._after = b""
        self._in_vain = 0

    def learn(self, event: bytes) -> None:
        """Of a whole event as it was sent, "data: ...", if it is plain."""
        if self._in_vain == _IN_VAIN:
            self._before = b""
            return
        found = list(_FIELD.finditer(event))
        if len(found) != 1:
            return
        self._in_vain += 1
        try:
            delta = _decoder.decode(event[len(b"data: ") :]).choices[0].delta
            text = found[0][1].decode()
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if [one for one in (delta.content, delta.reasoning_content, delta.reasoning) if one] == [text]:
            self._visible = bool(delta.content)
            self._before, self._after = event[: found[0].start(1)], _one(event[found[0].end(1) :] + _END)

    def takes(self, read: bytes) -> bool:
        """Take a read if it is one whole chunk of a body, and that an event of this form; whether it is."""
        before, after = self._before, self._after
        size = _size(len(read))
        if not (before and read.startswith(size) and read.startswith(before, len(size)) and read.endswith(after)):
            return False
        text = read[len(size) + len(before) : -len(after)]
        if _TEXT.fullmatch(text) is None:
            return False
        if self._visible:
            self.text += text
        else:
            self.hidden += 1
        self.events += 1
        self._in_vain = 0
        return True


@lru_cache(256)
def _one(value: bytes) -> bytes:
    """The same object for equal values: what all streams compare with stays at hand for the processor."""
    return value


@cache
def _size(length: int) -> bytes:
    """The first line of a chunk that is so long with it: the size of its content, and line ends before and after."""
    for digits in range(1, length):
        content = length - digits - 2 * len(_END)
        if len(f"{content:x}") == digits:
            return b"%x\r\n" % content
    return b"none"  # there is no such chunk
