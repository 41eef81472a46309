"""The engine's own record of when each chunk was sent: the truth against which a client's timing is checked.

JSON lines. The first is the clock: {"format", "clock", "anchor_monotonic_s", "anchor_realtime_s"}.
Then one line per completion request, written right after its last byte (so read the file when the server has ended,
or wait for the line):
{"request_id", "received_s", "scheduled_s", "role_s", "chunks_s", "finish_s", "ended_s", "prompt_tokens",
"output_tokens", "cached_tokens", "preemptions", "finish"}. `chunks_s` holds one time per event with generated text of
any channel; `role_s` is the role-only event, `finish_s` the last event of a choice when it carries no text.
All times are seconds of CLOCK_MONOTONIC, taken right before the socket write; missing ones are null.
"""

import time
from pathlib import Path
from typing import BinaryIO

import msgspec


class Sent(msgspec.Struct):
    """What the engine did with one request. `finish` is stop, length, abort, or the fault that ended it."""

    request_id: str
    received_s: float
    prompt_tokens: int
    scheduled_s: float | None = None
    role_s: float | None = None
    chunks_s: list[float] = []
    finish_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finish: str | None = None


class SendLog:
    """Appends lines to a file, or to nowhere when there is none. A line is on disk as soon as it is written."""

    def __init__(self, path: Path | None) -> None:
        self._file: BinaryIO | None = None if path is None else path.open("ab", buffering=0)
        if self._file:
            anchor = {"format": 1, "clock": "CLOCK_MONOTONIC", "anchor_monotonic_s": time.monotonic(),
                      "anchor_realtime_s": time.time()}  # fmt: skip
            self._file.write(msgspec.json.encode(anchor) + b"\n")

    def write(self, sent: Sent) -> None:
        if self._file:
            self._file.write(msgspec.json.encode(sent) + b"\n")

    def close(self) -> None:
        if self._file:
            self._file.close()
