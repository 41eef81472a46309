"""How files of results are written: JSON that a person can read, too, and each file replaced in one step."""

import os
from pathlib import Path
from typing import Any

import msgspec


def pretty_json(value: Any) -> bytes:
    """Indented, and with the end of its last line."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def replace_file(path: Path, content: bytes) -> None:
    """In one step, so that a reader never sees half of it."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    os.replace(temporary, path)
