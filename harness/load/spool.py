"""What a load process has written on its own machine, on its way to the run directory on another.

Nothing is sent twice and nothing is skipped: each piece says where in the file it begins, the receiver takes only the
one that begins where the last one ended, and the sender goes on when it hears how far the receiver is.
"""

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from harness.files import UNDECODABLE, open_file
from harness.redact import known, without
from harness.rundir.records import ProcessMark, Request

PIECE = 262_144  # bytes at once, so that no message holds up Locust's own

# What a server has said in a record: a message, a finish reason of its own.
_SAID = re.compile(rb'"message":"|"finish":"(?!stop"|length"|tool_calls")')

FILES: dict[str, type[Any]] = {"requests": Request, "processes": ProcessMark}


class Spool:
    """One file that grows, as its sender sees it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.taken = 0  # bytes that have arrived

    def rest(self) -> int:
        """Bytes that have not arrived."""
        return self.size() - self.taken

    def size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def piece(self) -> bytes:
        """The next whole lines that have not arrived, one at least; empty when there are none."""
        with open_file(self._path) as file:
            file.seek(self.taken)
            data = file.read(PIECE)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == PIECE:  # a line that is longer than that goes as a whole
                return data + file.readline()
        return data[:end]


class Intake:
    """The same file where it arrives: appended to one that takes in several."""

    def __init__(self, path: Path, kind: type[Any]) -> None:
        """`kind`: what each of its lines is."""
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self.left_out = 0  # lines that cannot be read
        self.taken = 0  # as it was sent

    def take(self, offset: int, data: bytes) -> int:
        """Take a piece, unless it came before; how far the file is now. Raises OSError, having taken nothing."""
        if offset == self.taken:
            lines = data.splitlines(keepends=True)
            readable = [line for line in lines if self._is_readable(line)]
            _append(self._path, _clean(b"".join(readable)))
            self.left_out += len(lines) - len(readable)
            self.taken += len(data)
        return self.taken

    def _is_readable(self, line: bytes) -> bool:
        try:
            self._decoder.decode(line)
        except UNDECODABLE:
            return False
        return line.endswith(b"\n")


def _clean(lines: bytes) -> bytes:
    """Whole lines of JSON, what a server has said in them without the secrets that are known here and not there."""
    if not known() or _SAID.search(lines) is None:
        return lines
    return b"".join(_clean_line(line) if _SAID.search(line) else line for line in lines.splitlines(keepends=True))


def _clean_line(line: bytes) -> bytes:
    try:
        record = msgspec.json.decode(line)
        said = {name: record[name] for name in ("message", "finish") if record.get(name)}
    except (*UNDECODABLE, AttributeError):  # damaged where it was written, as its reader will say
        return line
    clean = {name: without(text, words=name == "message") for name, text in said.items()}
    return line if clean == said else msgspec.json.encode(record | clean) + b"\n"


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(file).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:  # disk full: half a line must not stay
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)
