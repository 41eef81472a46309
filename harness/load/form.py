"""What the events of one stream have in common: they differ in their text, and little else."""

import re
from typing import Literal

import msgspec

_CONTENT = re.compile(rb'"content":\s*"([^"\\\x00-\x1f]+)"')
_IN_VAIN = 8  # forms that fitted nothing: the events of this stream differ in more than their text
_TEXT = re.compile(rb'[^"\\\x00-\x1f]+')  # of a JSON string that means itself


class _Delta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    content: str
    role: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta
    finish_reason: None = None


class _Plain(msgspec.Struct, frozen=True):
    """An event that carries visible text and nothing else of interest."""

    choices: tuple[_Choice]
    object: Literal["chat.completion.chunk"]
    usage: None = None
    error: None = None


_decoder = msgspec.json.Decoder(_Plain)


class Form:
    """The bytes before and after the text of an event that was decoded: another one with these needs no decoding."""

    def __init__(self) -> None:
        self._before = b""
        self._after = b""
        self._in_vain = 0

    def learn(self, event: bytes) -> None:
        """Of a whole event as it was sent, "data: ...", if it is plain."""
        found = list(_CONTENT.finditer(event))
        if len(found) != 1 or self._in_vain == _IN_VAIN:
            return
        self._in_vain += 1
        try:
            text = _decoder.decode(event[len(b"data: ") :]).choices[0].delta.content
            if text == found[0][1].decode():
                self._before, self._after = event[: found[0].start(1)], event[found[0].end(1) :]
        except (msgspec.DecodeError, UnicodeDecodeError):
            return

    def text(self, event: bytes) -> str | None:
        """The text of an event of this form. None: it has to be decoded."""
        before, after = self._before, self._after
        if not before or not event.startswith(before) or not event.endswith(after):
            return None
        inner = event[len(before) : len(event) - len(after)]
        if _TEXT.fullmatch(inner) is None:
            return None
        try:
            text = inner.decode()
        except UnicodeDecodeError:
            return None
        self._in_vain = 0
        return text
