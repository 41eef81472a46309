"""A running server whose settings a search changes: what its owner had, until it has them again.

The file is written before the first change. After a kill of the search it is what is left to put back.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct

from harness.base.files import pretty_json, read_json, replace_file

CHANGED_FILE = "changed-server.json"
CHANGED_VERSION = 1


class ChangedServer(Struct, frozen=True, kw_only=True):
    """changed-server.json."""

    format_version: int = CHANGED_VERSION
    url: str
    model: str
    options: dict[str, Any]  # of its owner
    api_key_env: str | None = None
    owner: dict[str, str]  # the process of the search


def read_changed(folder: Path) -> ChangedServer | None:
    """Return the server that a search may have left changed; None without one. Raises HarnessError, OSError."""
    path = folder / CHANGED_FILE
    return read_json(path, ChangedServer, CHANGED_VERSION) if path.exists() else None


def write_changed(folder: Path, changed: ChangedServer) -> None:
    """Raises OSError."""
    replace_file(folder / CHANGED_FILE, pretty_json(changed))


def forget_changed(folder: Path) -> None:
    (folder / CHANGED_FILE).unlink(missing_ok=True)
