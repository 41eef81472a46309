"""The text of a file, and the JSON documents in it.

A file that a shell wrote (`>`, `2>&1`, `tee`) has more than the tool's output: the log of an engine, the command of
`set -x`, the banner of a container. Such lines are left out and counted; a document that is cut or damaged is refused.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness.base.errors import HarnessError
from harness.base.files import DOCS, UNDECODABLE, describe_decode_error
from harness.base.redact import printable

_JSON_STARTS = tuple('[]{}",-0123456789')  # with which a line of a document of several lines begins
_JSON_WORDS = ("true", "false", "null", "NaN", "Infinity")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # marks that PowerShell writes


class Documents(NamedTuple):
    """The JSON documents of a text, and its lines that belong to none."""

    values: list[Any]
    noise: list[str]


def to_utf8(raw: bytes) -> bytes:
    """Return the bytes of a text file in UTF-8, without a mark of the encoding."""
    if raw.startswith(_UTF_16):
        return raw.decode("utf-16", "replace").encode()
    if raw[1:2] == b"\0":
        return raw.decode("utf-16-le", "replace").encode()
    return raw.removeprefix(b"\xef\xbb\xbf")


def decode(raw: bytes) -> Any:
    """Decode one document. NaN, Infinity and numbers that are too large are missing."""
    try:
        return msgspec.json.decode(raw)
    except UNDECODABLE as error:
        try:
            return _decoder.decode(raw.decode())
        except (ValueError, RecursionError):
            raise error from None


def read_documents(path: Path, text: str, as_json: Exception) -> Documents:
    """Return the documents of JSON Lines, or of a text with lines of other programs. `as_json`: why it is no document.

    A text of something else has none. Raises HarnessError that names the first damaged line.
    """
    lines = printable(text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
    kept = [number for number, line in enumerate(lines) if _may_be_json(line)]
    noise = [line for line in lines if line.strip() and not _may_be_json(line)]
    joined = "".join(f"{lines[number]}\n" for number in kept)
    values: list[Any] = []
    at = 0
    while at < len(joined):
        end = joined.index("\n", at)
        line = joined[at:end].strip()
        if not line.startswith(("{", "[")):
            noise += [line] if line else []
            at = end + 1
            continue
        try:
            value, at_end = _decoder.raw_decode(joined, joined.index(line[0], at))
        except (ValueError, RecursionError):
            if _is_torn(line):
                number = kept[joined.count("\n", 0, at)]
                raise _damaged(path, lines, number, values, as_json) from None
            value, at_end = None, end + 1
        items = value if isinstance(value, list) else [value]
        if items and all(isinstance(item, dict) for item in items):
            values, at = values + items, at_end
        else:
            noise, at = [*noise, line], max(at_end, end + 1)
    if not values and text.lstrip().startswith(("{", "[")):
        raise _damaged(path, lines, 0, values, as_json)
    return Documents(values, noise)


def _may_be_json(line: str) -> bool:
    """Whether a line can be part of a document."""
    text = line.strip()
    return text.startswith(_JSON_STARTS) or text.rstrip(",") in _JSON_WORDS


def _is_torn(line: str) -> bool:
    """Whether a line that is no document starts one; `[INFO] ...` does not."""
    return line.startswith("{") or line.removeprefix("[").strip()[:1] in ("", "{")


def _damaged(path: Path, lines: Sequence[str], number: int, values: Sequence[Any], as_json: Exception) -> HarnessError:
    """The error for a text with a damaged document at the line with that index, or without any document."""
    last = max((index for index, line in enumerate(lines) if line.strip()), default=0)
    mistake = f"neither JSON nor JSON Lines ({describe_decode_error(as_json)})"
    if values:
        try:
            msgspec.json.decode(lines[number])
            why = "JSON is malformed"
        except UNDECODABLE as error:
            why = describe_decode_error(error)
        mistake = f"line {number + 1} of {last + 1} is not JSON ({why})"
    return HarnessError(
        f"{path}: {mistake}",
        next_step=f"Nothing was written. {DOCS}/imports.md lists the formats; of llama-bench the output of `-o json`, "
        "`-o jsonl` or `-o md` is read, also between lines of other programs.",
    )


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


_decoder = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)
