"""Graphics and compute cards on the PCI bus, whether or not a driver knows them."""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from harness.machine.files import text

AMD, NVIDIA = 0x1002, 0x10DE
_DISPLAY, _ACCELERATOR = 0x03, 0x12  # base classes of the PCI specification; Instinct cards are accelerators


class Card(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A graphics or compute card, by its PCI address and ids."""

    slot: str
    vendor: int
    device: int


def cards(root: Path = Path("/")) -> Iterator[Card]:
    """The graphics and compute cards of the machine whose /sys is under `root`, in the order of their slots."""
    folder = root / "sys/bus/pci/devices"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind, vendor, device = (_hex(path / name) for name in ("class", "vendor", "device"))
        if kind is not None and kind >> 16 in (_DISPLAY, _ACCELERATOR) and vendor is not None and device is not None:
            yield Card(slot=path.name, vendor=vendor, device=device)


def _hex(path: Path) -> int | None:
    try:
        return int(text(path) or "", 16)
    except ValueError:
        return None
