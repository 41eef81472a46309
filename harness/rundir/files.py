"""How files of results are written and read: JSON that a person can read, too, and each replaced in one step."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.errors import HarnessError

T = TypeVar("T")


def pretty_json(value: Any) -> bytes:
    """Indented, and with the end of its last line."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def read_json(path: Path, kind: type[T], newest: int | None = None, advice: str = "") -> T:
    """The one value in a file. Raises OSError; HarnessError for a damaged file, or a format later than the `newest`."""
    raw = path.read_bytes()
    try:
        head = None if newest is None else msgspec.json.decode(raw)
        version = head.get("format_version") if isinstance(head, dict) else None
        if newest is not None and isinstance(version, int) and version > newest:
            raise HarnessError(
                f"{path}: format {version} was written by a newer harness; this one reads up to {newest}",
                next_step="Update the harness.",
            )
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        newer = "unknown field" in str(error)  # fields are added without a new format, which older files lack
        step = "A newer harness wrote it: update this one." if newer else f"The file was changed or damaged{advice}."
        raise HarnessError(f"{path}: cannot be read ({error})", next_step=step) from None


def read_lines(path: Path, kind: type[T], damaged: list[int] | None = None) -> Iterator[T]:
    """The values in a file of one a line, however its writer ended; none where there is no such file.

    A line that cannot be decoded (torn by a kill) is skipped; its number goes to `damaged`.
    """
    decoder = msgspec.json.Decoder(kind)
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                if damaged is not None:
                    damaged.append(number)


def replace_file(path: Path, content: bytes) -> None:
    """In one step, so that a reader never sees half of it."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    os.replace(temporary, path)
