"""Small files of /proc and /sys, which a driver may refuse to answer at any time, and the PCI devices in them."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

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


AMD, NVIDIA = 0x1002, 0x10DE
_DISPLAY, _ACCELERATOR = 0x03, 0x12  # base classes of the PCI specification; Instinct cards are accelerators


class PciCard(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A graphics or compute card, by its PCI address and ids."""

    slot: str
    vendor: int
    device: int


def pci_cards(root: Path = Path("/")) -> Iterator[PciCard]:
    """The graphics and compute cards of the machine whose /sys is under `root`, in the order of their slots."""
    folder = root / "sys/bus/pci/devices"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind, vendor, device = (_hex(path / name) for name in ("class", "vendor", "device"))
        if kind is not None and kind >> 16 in (_DISPLAY, _ACCELERATOR) and vendor is not None and device is not None:
            yield PciCard(slot=path.name, vendor=vendor, device=device)


def _hex(path: Path) -> int | None:
    try:
        return int(text(path) or "", 16)
    except ValueError:
        return None
