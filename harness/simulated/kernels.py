"""What the embedded engine has compiled: it may find it in a folder at its next start, if its build is the same."""

from collections import Counter
from pathlib import Path

import msgspec

Shape = tuple[int, int]


class KernelCache(msgspec.Struct, frozen=True):
    """A folder with what builds of the engine compiled; without a folder nothing is kept."""

    folder: Path | None
    build: str

    def has_graphs(self) -> bool:
        return self.folder is not None and self._graphs(self.folder).is_file()

    def store_graphs(self) -> None:
        if self.folder is not None:
            self._graphs(self.folder).write_bytes(b"\0" * 65536)

    def read_shapes(self) -> Counter[Shape]:
        """Return how many steps of each shape have run; none where the file is missing or damaged."""
        try:
            data = b"[]" if self.folder is None else self._shapes(self.folder).read_bytes()
            return Counter(dict(msgspec.json.decode(data, type=list[tuple[Shape, int]])))
        except (OSError, msgspec.DecodeError):
            return Counter()

    def store_shapes(self, shapes: Counter[Shape]) -> None:
        if self.folder is not None:
            self._shapes(self.folder).write_bytes(msgspec.json.encode(list(shapes.items())))

    def _graphs(self, folder: Path) -> Path:
        return folder / f"{self.build}.graphs"

    def _shapes(self, folder: Path) -> Path:
        return folder / f"{self.build}.shapes.json"
