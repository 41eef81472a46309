"""Small files of /proc and /sys, which a driver may refuse to answer at any time."""

import os
import re
from pathlib import Path

from harness.errors import HarnessError
from harness.files import read_bytes


def folder(root: Path) -> Path:
    """Another machine's files. Raises HarnessError where there is no such folder."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "is not there"
        raise HarnessError(
            f"--root: {root} {what}", next_step="Give a folder that has another machine's /proc and /sys below it."
        )
    return root


def text(path: Path) -> str | None:
    """A small file's text; None when it is missing or the driver refuses to answer now."""
    try:
        return os.fsdecode(read_bytes(path)).strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """A file that holds one number and nothing else."""
    found = text(path)
    return int(found) if found and found.isdigit() else None


def meminfo(path: Path) -> dict[str, int]:
    """Bytes by name, such as MemTotal, of a meminfo file of the host or of one node; empty when there is none."""
    lines = re.findall(r"^(?:Node \d+ )?(\S+):\s*(\d+) kB$", text(path) or "", re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}
