"""What a load process has written on its own machine, on its way to the run directory on another.

Nothing is sent twice and nothing is skipped: each piece says where in the file it begins, the receiver takes only the
one that begins where the last one ended, and the sender goes on when it hears how far the receiver is.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.failures.redact import HIDDEN, SHORTEST, without

PIECE = 262_144  # bytes at once, so that no message holds up Locust's own

_MESSAGE = b'"message":"'  # of a record of a failed request
_CUT = "..."  # how a message ends that was shortened

FILES = ("requests", "processes")


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
        with self._path.open("rb") as file:
            file.seek(self.taken)
            data = file.read(PIECE)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == PIECE:  # a line that is longer than that goes as a whole
                return data + file.readline()
        return data[:end]


class Intake:
    """The same file where it arrives: appended to one that takes in several."""

    def __init__(self, path: Path, secrets: Sequence[str] = ()) -> None:
        """`secrets` are known here and not there, and kept out of the file."""
        self._path = path
        self._secrets = [secret for secret in secrets if secret]
        self.taken = 0  # as it was sent

    def take(self, offset: int, data: bytes) -> int:
        """Take a piece, unless it came before; how far the file is now. Raises OSError, having taken nothing."""
        if offset == self.taken:
            _append(self._path, _without(data, self._secrets))
            self.taken += len(data)
        return self.taken


def _without(lines: bytes, secrets: Sequence[str]) -> bytes:
    """Whole lines of JSON, their messages without the secrets: nothing else in them is what a server has said."""
    if not secrets or _MESSAGE not in lines:
        return lines
    return b"".join(_clean(line, secrets) if _MESSAGE in line else line for line in lines.splitlines(keepends=True))


def _clean(line: bytes, secrets: Sequence[str]) -> bytes:
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:  # damaged where it was written, as its reader will say
        return line
    message = str(record["message"])
    clean = _redacted(message, secrets)
    return line if clean == message else msgspec.json.encode(record | {"message": clean}) + b"\n"


def _redacted(message: str, secrets: Sequence[str]) -> str:
    """Without the secrets, and without the beginning of one that the end of the message cut off."""
    message = without(message, secrets)
    for secret in secrets:
        for length in range(len(secret) - 1, SHORTEST - 1, -1):
            if message.endswith(beginning := secret[:length] + _CUT):
                message = message.removesuffix(beginning) + HIDDEN + _CUT
    return message


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
