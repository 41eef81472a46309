"""The tensors of a model's files: names, types and sizes from the headers of safetensors and GGUF, and their sums.

Headers come from outside: reading is bounded, and a damaged one is an error.
"""

import io
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness.base.errors import HarnessError, reason_of
from harness.base.files import UNDECODABLE, open_file
from harness.records.manifest import ModelSize

MAX_HEADER_BYTES = 32_000_000  # the longest known ones have 10 MB, which are mostly vocabularies
MAX_FILES = 1000  # of one model
MAX_TENSORS = 1_000_000
# Bytes of a parameter, scales included, by the usual name of the weights.
BYTES_PER_PARAM = {"FP16": 2.0, "FP8": 1.0, "AWQ": 0.55, "Q8_0": 1.06, "Q4_K_M": 0.60, "MXFP4": 0.53}
NUMBER_BITS: dict[str, Any] = {"FP8": 8, "Q8_0": 8, "Q4_K_M": 8, "MXFP4": 4}  # that are multiplied; of others 16


class Tensor(NamedTuple):
    """A tensor by its header."""

    name: str
    kind: str  # its type, such as BF16 or Q4_K
    numbers: float  # parameters: packed ones count each
    bytes: int


class _Parts(NamedTuple):
    """Bytes and parameters of the tensors of one kind."""

    bytes: float = 0
    params: float = 0


# Names of the tensors, in Transformers and in GGUF.
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|token_embd)\."
    r"|(?:^|\.)(?:embed|emb|(?:backbone|model|rwkv|transformer)\.embeddings?)\.(?:weight|weight_\w+|qweight|scales)$"
)
# Other tables of which a token reads one row: of positions, of types, of each layer, of n-grams.
_LOOKUP = re.compile(
    r"(?:^|\.)(?:per_layer_token_embd|embed_tokens_per_layer|position_embd|token_types|wpe|embed_positions|pos_emb"
    r"|position_embeddings?|token_type_embeddings)\."
    r"|(?:n_?gram|engram)[\w.]*\.tables?\."
    r"|(?:n_?gram|engram|hash_emb)[\w.]*emb(?!\w*(?:proj|norm|gate))\w*(?:\.\d+)?\.(?:weight|weight_\w+|qweight|scales)$",
    re.IGNORECASE,
)
_HEAD = re.compile(
    r"^(?:\w+\.)*(?:lm_head|embed_out|output|output_layer|head)\.(?:weight|qweight|scales|qzeros|weight_\w+)$"
)
_ROUTED = re.compile(
    r"\.experts\.|\.ffn_(?:gate|up|down|gate_up)_(?:ch)?exps\.|\.block_sparse_moe\.(?:input|output)_linear\."
    r"|\.moe\.(?:gate|up|down)_proj\."
)
# Not read for a token of text: encoders of images and sound, and layers for speculation.
_OTHER = re.compile(
    r"(?:^|\.)(?:visual|vision_\w+|image_\w+|multi_modal_projector|audio_\w+|embed_(?:vision|audio)|mtp|nextn)\."
    r"|^v\.|^mm\.|^a\."
)
_LAYER = re.compile(r"(?:layers|blk|h)\.(\d+)\.")
_SCALES = re.compile(r"scales?$|scale_inv$|qzeros$|g_idx$|zero_point$|weight_shape$")


def sum_tensors(
    name: str,
    tensors: Iterable[Tensor],
    *,
    layers: int | None = None,
    routed_share: float | None = None,
    weights_bytes: float | None = None,
    doubts: Iterable[str] = (),
) -> ModelSize:
    """Return what a token reads of these tensors.

    `layers`: later ones are for speculation. `routed_share`: of the experts, those that one token uses; None: unknown,
    then all count. `weights_bytes`: the size of the files, where it is known.
    """
    parts: dict[str, _Parts] = {}
    kinds: dict[int, float] = {}
    for tensor in tensors:
        layer = _LAYER.search(tensor.name)
        if _OTHER.search(tensor.name) or (layer is not None and layers is not None and int(layer[1]) >= layers):
            part = "other"
        elif _ROUTED.search(tensor.name):
            part = "routed"
        elif _LOOKUP.search(tensor.name):
            part = "lookup"
        elif _EMBEDDING.search(tensor.name):
            part = "embedding"
        else:
            part = "head" if _HEAD.search(tensor.name) else "body"
        before = parts.get(part, _Parts())
        parts[part] = _Parts(before.bytes + tensor.bytes, before.params + tensor.numbers)
        bits = _number_bits(tensor.kind)
        kinds[bits] = kinds.get(bits, 0) + (tensor.numbers if part in ("body", "routed") else 0)
    return sum_parts(
        name,
        {part: tuple(sizes) for part, sizes in parts.items()},
        routed_share=routed_share,
        weights_bytes=weights_bytes,
        number_bits=max(kinds, key=lambda bits: kinds[bits], default=16),
        doubts=doubts,
    )


def sum_parts(
    name: str,
    parts: Mapping[str, tuple[float, ...]],
    *,
    routed_share: float | None = None,
    weights_bytes: float | None = None,
    number_bits: Any = 16,
    doubts: Iterable[str] = (),
) -> ModelSize:
    """Return what a token reads of a model, from bytes and parameters of its parts.

    A token looks up one row of the input embedding, and of other tables. Without a head of its own, the embedding is
    the output head too, which is read whole.
    """
    names = ("body", "routed", "embedding", "head", "lookup", "other")
    totals = {part: _Parts(*parts.get(part, (0, 0))) for part in names}
    head = totals["head"] if totals["head"].bytes else totals["embedding"]
    share = 1.0 if routed_share is None else routed_share
    all_doubts = list(doubts)
    if totals["routed"].bytes and routed_share is None:
        all_doubts.append("how many experts a token uses is not known: all of them count")
    return ModelSize(
        name=name,
        weights_bytes=weights_bytes or sum(part.bytes for part in totals.values()),
        read_bytes=totals["body"].bytes + head.bytes + share * totals["routed"].bytes,
        params=totals["body"].params + head.params + share * totals["routed"].params,
        head_params=head.params,
        routed_bytes=totals["routed"].bytes,
        routed_params=totals["routed"].params,
        routed_share=share if totals["routed"].bytes else 1.0,
        number_bits=number_bits,
        doubts=all_doubts,
    )


def _number_bits(kind: str) -> int:
    """Return the width in which matrix units may multiply numbers of a type; 16 where they are converted first."""
    if kind.startswith(("F8", "I8")) or re.match(r"I?Q\d|TQ|NVFP4|type ", kind):
        return 8  # llama.cpp multiplies all its quantised types as 8 bit
    return 4 if kind == "MXFP4" else 16


# Safetensors: 8 bytes with the length of a JSON text, the text, the data.

_SAFETENSORS_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I64": 64, "I32": 32,
    "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def read_safetensors(files: Iterable[Path], packed_bits: int = 4) -> list[Tensor]:
    """Return the tensors of a model. `packed_bits`: of the numbers that integers hold. Raises HarnessError."""
    tensors: list[Tensor] = []
    for path in files:
        try:
            with open_file(path) as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= MAX_HEADER_BYTES:
                    raise ValueError(f"its header would have {length} bytes")
                header = msgspec.json.decode(file.read(length))
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
                _require_whole(file, 8 + length + max(ends, default=0))
            tensors += [_safetensor(name, entry, packed_bits) for name, entry in header.items() if name[:2] != "__"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, *UNDECODABLE) as error:
            raise _damaged(path, error) from None
    return tensors


def _safetensor(name: str, entry: Any, packed_bits: int) -> Tensor:
    kind, numbers = entry["dtype"], _multiply(entry["shape"])
    size = numbers * _SAFETENSORS_BITS[kind] // 8
    params: float = numbers
    if _SCALES.search(name):
        params = 0
    elif kind in ("I32", "U8", "I64"):
        params = size * 8 / packed_bits
        kind = "MXFP4" if name.endswith("_blocks") else kind
    # The engines convert 32 bit to 16.
    return Tensor(name, kind, params, size // 2 if kind == "F32" else size)


def _multiply(shape: list[Any]) -> int:
    numbers = 1
    for size in shape[:9]:
        if type(size) is not int or not 0 <= size <= 1 << 50:
            raise ValueError("a size is not a whole number")
        numbers *= size
    if len(shape) > 8 or numbers > 1 << 50:
        raise ValueError("a tensor is too large")
    return numbers


def _require_whole(file: io.BufferedReader, size: float) -> None:
    """Raise ValueError if the file is shorter than its header says, as after half a download."""
    has = os.fstat(file.fileno()).st_size
    if has < size:
        raise ValueError(f"it is not complete: it has {has:,} of {size:,} bytes")


def _damaged(path: Path, error: Exception) -> HarnessError:
    text = " ".join(reason_of(error).split())[:200]
    return HarnessError(f"{path}: cannot be used ({text})", next_step="Download the file again.")


# GGUF: a header of typed keys, then the tensors' names, shapes and types. Source: ggml/docs/gguf.md.

# Type number: name, numbers of a block, bytes of a block. Source: ggml/src/ggml-common.h.
_GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MAX_TYPE = 255  # a larger number of a type is damage; a new type takes what is between its data and the next
_SHOWN_VALUES = 4096  # of an array; the others are skipped


class _Reader:
    """Reads little-endian values up to a limit of bytes. Raises ValueError beyond it and at the end of the file."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.file = file
        self.remaining = MAX_HEADER_BYTES

    def take(self, length: int) -> bytes:
        if length > self.remaining:
            raise ValueError("its header is too long")
        self.remaining -= length
        data = self.file.read(length)
        if len(data) < length:
            raise ValueError("it ends within its header")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 2) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind in _VALUES:
            return self.number(_VALUES[kind])
        if kind != _ARRAY:
            raise ValueError(f"the type of a value is not known: {kind}")
        if not depth:
            raise ValueError("its lists are nested too deeply")
        inner, length = self.number("I"), self.number("Q")
        if inner in _VALUES:
            form = _VALUES[inner]
            data = self.take(struct.calcsize(form) * length)
            return list(
                struct.unpack(
                    f"<{min(length, _SHOWN_VALUES)}{form}", data[: struct.calcsize(form) * min(length, _SHOWN_VALUES)]
                )
            )
        for _ in range(length):  # each takes bytes of the limit
            self.value(inner, depth - 1)
        return None


def read_gguf(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the keys of a GGUF file, without texts of lists, and the tensors of all its parts. Raises HarnessError.

    Only the first part has the keys of the model.
    """
    keys, tensors = _read_gguf_file(path)
    parts = keys.get("split.count")
    name = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if isinstance(parts, int) and parts > 1 and name is not None and parts <= MAX_FILES:
        files = [path.with_name(f"{name[1]}-{number:05d}-of-{name[2]}.gguf") for number in range(1, parts + 1)]
        read = [_read_gguf_file(file) for file in files]
        keys, tensors = read[0][0], [tensor for _, file_tensors in read for tensor in file_tensors]
    return keys, tensors


def _read_gguf_file(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    try:
        with open_file(path) as file:
            reader = _Reader(file)
            if reader.take(4) != b"GGUF":
                raise ValueError("it is not a GGUF file")
            version = reader.number("I")
            if version not in (2, 3):
                raise ValueError(f"format version {version} is not known")
            tensors, keys = reader.number("Q"), reader.number("Q")
            if tensors > MAX_TENSORS:
                raise ValueError(f"it would have {tensors} tensors")
            values = {reader.text(): reader.value(reader.number("I")) for _ in range(keys)}
            entries = [_gguf_tensor(reader) for _ in range(tensors)]
            unit = values.get("general.alignment", 32)
            if type(unit) is not int or unit < 1:
                raise ValueError(f"its alignment is {str(unit)[:100]}")
            data_at = -(-file.tell() // unit) * unit
            entries = _size_new_types(entries, os.fstat(file.fileno()).st_size - data_at)
            _require_whole(file, data_at + max((at + tensor.bytes for tensor, at in entries), default=-data_at))
            return values, [tensor for tensor, _ in entries]
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise _damaged(path, error) from None


def _gguf_tensor(reader: _Reader) -> tuple[Tensor, int]:
    """Return a tensor, and the place of its data after the header; -1 bytes for a type that is not known here."""
    name, dimensions = reader.text(), reader.number("I")
    numbers = _multiply([reader.number("Q") for _ in range(min(dimensions, 9))])
    number = reader.number("I")
    if number > _MAX_TYPE:
        raise ValueError(f"the type of a tensor is not known: {number}")
    kind, block, size = _GGML_TYPES.get(number, (f"type {number}", 1, -1))
    return Tensor(name, kind, numbers, -1 if size < 0 else numbers // block * size), reader.number("Q")


def _size_new_types(entries: list[tuple[Tensor, int]], data_bytes: int) -> list[tuple[Tensor, int]]:
    """Return the tensors with the sizes of new types: from their place to the next one, or to the end of the data."""
    places = sorted({at for _, at in entries} | {data_bytes})
    sized = []
    for tensor, at in entries:
        if tensor.bytes < 0:
            end = places[min(bisect_right(places, at), len(places) - 1)]
            if not 0 < end - at <= 8 * tensor.numbers + _MAX_TYPE:
                raise ValueError(f"a tensor of {tensor.kind} has {max(0, end - at):,} bytes")
            tensor = tensor._replace(bytes=end - at)
        sized.append((tensor, at))
    return sized


def list_safetensors(folder: Path, index: Mapping[str, Any] | None) -> list[Path]:
    """Return the files of a model's weights; empty where one of them is not on this machine.

    If there is an index, only its files count: repositories may also have the same weights in other forms.
    """
    files = [folder / "model.safetensors"]
    if index is not None:
        weight_map = index.get("weight_map")
        names = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
        files = [folder / os.path.basename(name) for name in sorted(names)]
    return files if 0 < len(files) <= MAX_FILES and all(path.is_file() for path in files) else []
