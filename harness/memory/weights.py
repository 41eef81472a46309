"""How much memory a model's weights take, from the headers of its safetensors files."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from harness.files import open_file, read_text

HEADER_LIMIT = 100 << 20  # of the format itself
_FLOATS = ("F16", "BF16", "F32", "F64")  # all become 16 bit, where nothing is quantised


def weight_bytes(folder: Path, *, quantized: bool) -> tuple[int | None, str]:
    """Bytes in GPU memory and where they come from; None, with the reason, where the files do not tell.

    The files of a folder are those of its index, if it has one: repositories keep the same weights in other forms, too.
    """
    index = folder / "model.safetensors.index.json"
    files, total = sorted(folder.glob("*.safetensors")), None
    if index.is_file():
        names, total = _index(index)
        files = [folder / name for name in names]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    if files and all(path.is_file() for path in files):
        try:
            return sum(_of_file(path, quantized) for path in files), f"the headers of {len(files)} safetensors"
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            return None, f"a safetensors file is damaged ({error})"
    if total is not None:
        return total, "the index of the safetensors"
    return None, "there are no safetensors of it on this machine"


def _index(path: Path) -> tuple[list[str], int | None]:
    try:
        found = json.loads(read_text(path))
        total = found.get("metadata", {}).get("total_size")
        return sorted(set(found["weight_map"].values())), int(total) if total else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], None


def _of_file(path: Path, quantized: bool) -> int:
    with open_file(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > HEADER_LIMIT:
            raise ValueError(f"{path.name}: no header")
        header: dict[str, Any] = json.loads(file.read(length))
    tensors = (tensor for name, tensor in header.items() if name != "__metadata__")
    return sum(_of_tensor(tensor, quantized) for tensor in tensors)


def _of_tensor(tensor: dict[str, Any], quantized: bool) -> int:
    if not quantized and tensor["dtype"] in _FLOATS:
        return 2 * math.prod(int(size) for size in tensor["shape"])
    begin, end = tensor["data_offsets"]
    return int(end) - int(begin)
