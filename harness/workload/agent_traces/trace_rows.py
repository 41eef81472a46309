"""Decode parts of a trace, which is untrusted, and name the place of what is wrong: file, line, field, value."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from harness.base.errors import HarnessError
from harness.base.files import DOCS, UNDECODABLE, describe_decode_error
from harness.base.redact import masked
from harness.workload.agent_traces.conversation import MAX_SECONDS, MAX_TOKENS

T = TypeVar("T")
Id = Annotated[str, Meta(min_length=1, max_length=500)]
Label = Annotated[str, Meta(max_length=500)]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Milliseconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS * 1000)]

_MAX_VALUE_CHARS = 60  # of a value in a message
_MAX_SHOWN_BYTES = 4_000_000  # of a part that is decoded again to show a value in it
_KEY = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_BYTE = re.compile(r"\(byte (\d+)\)")


class TracePiece(NamedTuple):
    """A line of a file, or a whole file that is one JSON document."""

    path: Path
    line: int  # from 1
    data: bytes


def refuse(
    piece: TracePiece, field: str, problem: str, value: object = None, part: bytes | msgspec.Raw = b""
) -> NoReturn:
    """Raise the error for a wrong value. `part`: the bytes of the piece that the field is in, for the line."""
    line = piece.line + piece.data.count(b"\n", 0, max(piece.data.find(bytes(part)), 0))
    got = "" if value is None else f" (got {shown_value(value)})"
    raise _error(piece.path, line, field, f"{problem}{got}")


def shown_value(value: object) -> str:
    """Return a value for a message: masked, on one line, at most 60 characters."""
    text = masked(value[:2000] if isinstance(value, str) else repr(value)[:2000])
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def decode_part(
    piece: TracePiece, decoder: "msgspec.json.Decoder[T]", part: "msgspec.Raw | None" = None, place: str = ""
) -> T:
    """Return the decoded piece, or `part` of it, which is at the path `place` such as `requests[3]`.

    Raises HarnessError that names file, line, field and value.
    """
    data = piece.data if part is None else part
    try:
        return decoder.decode(data)
    except UNDECODABLE as error:
        text = describe_decode_error(error)
        problem, _, path = text.partition(" - at `$")
        path = path.rstrip("`")
        offset = 0 if part is None else max(piece.data.find(bytes(part)), 0)
        if (at := _BYTE.search(text)) is not None:
            offset += int(at[1])
        value = _value_at(bytes(data), path) if path and isinstance(error, msgspec.ValidationError) else None
        got = "" if value is None else f" (got {shown_value(value)})"
        field = f"{place}{path}".removeprefix(".")
        raise _error(piece.path, piece.line + piece.data.count(b"\n", 0, offset), field, f"{problem}{got}") from None


def _error(path: Path, line: int, field: str, problem: str) -> HarnessError:
    where = f"{field}: " if field else ""
    return HarnessError(
        f"{path}:{line}: {where}{problem}",
        next_step=f"Correct or remove this part of the trace. {DOCS}/agent-traces.md lists the formats.",
    )


def _value_at(data: bytes, path: str) -> Any:
    """Return the value at a path of msgspec such as `.tokens[3]`; None where it cannot be found, or is null."""
    if len(data) > _MAX_SHOWN_BYTES:
        return None
    try:
        value = msgspec.json.decode(data)
        for key, index in _KEY.findall(path):
            value = value[int(index)] if index else value[key]
    except (*UNDECODABLE, LookupError, TypeError, ValueError):
        return None
    return value


def parse_time(piece: TracePiece, field: str, text: str) -> float:
    """Return a time such as 2026-03-21T10:06:14.210Z in seconds. Without a zone it is UTC."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        refuse(piece, field, "must be a time such as 2026-03-21T10:06:14.210Z", text)
