"""Mooncake: JSON Lines with times in milliseconds and the blocks of each prompt, 512 tokens each.

{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}: requests with the same ids at
the start have the same prefix (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from harness.errors import BadLines
from harness.files import open_file
from harness.scenario.scenario import Trace
from harness.traces.row import TraceRow


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of the file. Other keys are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def matches(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and b'"input_length"' in first and b'"timestamp"' in first


def rows(file: BinaryIO, trace: Trace, bad: BadLines) -> Iterator[TraceRow]:
    """The rows in the order of the file. Lines that cannot be used go to `bad`, also where their ids fit no block."""
    decode = msgspec.json.Decoder(MooncakeLine).decode
    begins = file.tell()
    for number, raw in enumerate(file, start=1):
        if raw.strip():
            try:
                line = decode(raw)
                ids, needed = len(line.hash_ids), -(-line.input_length // trace.block_tokens)
                if ids and abs(ids - needed) > 1:
                    raise ValueError(
                        f"{line.input_length:,} tokens in blocks of {trace.block_tokens} need {needed} hash_ids, and "
                        f"there are {ids}; say with trace.block_tokens how large the blocks are",
                    )
            except (ValueError, RecursionError) as error:  # msgspec's are such
                bad.add(number, str(error))
            else:
                more = begins if ids else -1
                yield TraceRow(number, line.timestamp / 1000, line.input_length, line.output_length, more)
        begins += len(raw)


def hash_ids(path: Path, begins: int) -> list[int]:
    """The blocks of the prompt whose line begins there: they stay in the file, however long that is."""
    with open_file(path) as file:
        file.seek(begins)
        return msgspec.json.decode(file.readline(), type=MooncakeLine).hash_ids
