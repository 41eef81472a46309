"""The bytes of a log in blocks of whole lines, whatever wrote them."""

import codecs
from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 18
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_LOOKED_AT = 512
_UTF16_SHARE = 0.4  # of the bytes at one side that are zero: Latin text has nearly all, a binary file few


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """The file as UTF-8 in blocks of whole lines; junk without line ends comes in pieces, and needs no more memory."""
    rest = b""
    for block in _pieces(file):
        whole, end, after = (rest + block).rpartition(b"\n")
        if end:
            yield whole + end
        rest = after
        if len(rest) > BLOCK_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """What PowerShell's `>` writes is UTF-16."""
    block = file.read(BLOCK_BYTES)
    encoding = _encoding(block)
    if encoding is None:
        block = block.removeprefix(codecs.BOM_UTF8)
        while block:
            yield block
            block = file.read(BLOCK_BYTES)
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    while block:
        yield decoder.decode(block).removeprefix("\ufeff").encode("utf-8", "replace")
        block = file.read(BLOCK_BYTES)
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def _encoding(block: bytes) -> str | None:
    for mark, encoding in _MARKS.items():
        if block.startswith(mark):
            return encoding
    head = block[:_LOOKED_AT]
    even, odd = head[0::2], head[1::2]
    if odd and odd.count(0) > _UTF16_SHARE * len(odd) and not even.count(0):
        return "utf-16-le"
    return "utf-16-be" if even and even.count(0) > _UTF16_SHARE * len(even) and not odd.count(0) else None
