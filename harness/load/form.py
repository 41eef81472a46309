"""What the events of one stream have in common: they differ in their text, and little else."""

import re
from collections.abc import Sequence
from functools import cache
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

    def __init__(self) -> None:
        self.visible = True  # the text is content, not reasoning
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
            self.visible = bool(delta.content)
            self._before, self._after = event[: found[0].start(1)], event[found[0].end(1) :] + _END

    def texts(self, reads: Sequence[bytes]) -> list[bytes]:
        """Of the reads, those at the front that are each one whole chunk of a body, and that an event of this form:
        their texts.
        """
        before, after, found = self._before, self._after, []
        if not before:
            return []
        for read in reads:
            size = _size(len(read))
            text = read[len(size) + len(before) : -len(after)]
            fits = read.startswith(size) and read.startswith(before, len(size)) and read.endswith(after)
            if not fits or _TEXT.fullmatch(text) is None:
                break
            found.append(text)
        if found:
            self._in_vain = 0
        return found


@cache
def _size(length: int) -> bytes:
    """The first line of a chunk that is so long with it: the size of its content, and line ends before and after."""
    for digits in range(1, length):
        content = length - digits - 2 * len(_END)
        if len(f"{content:x}") == digits:
            return b"%x\r\n" % content
    return b"none"  # there is no such chunk
