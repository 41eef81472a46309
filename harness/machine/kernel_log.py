"""New lines of the kernel log about GPUs and memory, read from /dev/kmsg while a server is measured."""

import os
import re
import time
from pathlib import Path

from harness.base.redact import masked
from harness.records.samples import KernelLine

MAX_LINES = 50  # that one reading keeps: a driver in trouble logs thousands
_MAX_CHARS = 400
_MAX_READS = 2000  # of one call
_ABOUT = re.compile(
    r"amdgpu|\[drm|\bkfd\b|AMD-Vi|[Oo]ut of memory|oom-kill|thermal|Machine check|segfault", re.IGNORECASE
)


class KernelLog:
    """The kernel log from now on. A record is `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT` (Linux, dev-kmsg)."""

    def __init__(self, root: Path) -> None:
        self._rest = b""
        try:
            self._file: int | None = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:  # not allowed, or a container without it
            self._file = None

    def read(self) -> list[KernelLine] | None:
        """Return the new lines that matter; None if this process may not read the log."""
        if self._file is None:
            return None
        found: list[KernelLine] = []
        for _ in range(_MAX_READS):
            try:
                data = os.read(self._file, 8192)
            except BlockingIOError:
                break
            except OSError:  # EPIPE: records were overwritten before they were read
                continue
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += [line for raw in lines if (line := _parse(raw)) is not None][: MAX_LINES - len(found)]
        return found

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _parse(raw: bytes) -> KernelLine | None:
    head, separator, text = raw.decode("utf-8", "replace").partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not fields[2].isdecimal() or not _ABOUT.search(text):
        return None
    age_s = time.clock_gettime(time.CLOCK_MONOTONIC) - int(fields[2][:15]) / 1e6
    return KernelLine(wall_s=time.time() - max(0.0, min(age_s, 1e9)), text=masked(text[:_MAX_CHARS]))
