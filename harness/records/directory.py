"""A run directory during its run: its lock, the space reserved for its end, and attempts that are set aside."""

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.base.errors import HarnessError
from harness.base.files import UNDECODABLE, open_file
from harness.records.records import ProcessMark, Request
from harness.records.samples import MetricsSample, TelemetrySample

ATTEMPTS = "attempts"
RESERVED = ("reference",)  # folders of the results that do not belong to a machine
PACKED = "requests.jsonl.gz"  # as `harness results add --records` files them
RESERVE = "reserve"  # a file in the run directory during the run
RESERVED_BYTES = 2**19  # for the last records, and as much for the last manifest
FULL_BYTES = 2**16
# Files whose lines each belong to a cell.
LINES: dict[str, type[Any]] = {
    "requests.jsonl": Request,
    "processes.jsonl": ProcessMark,
    "metrics.jsonl": MetricsSample,
    "telemetry.jsonl": TelemetrySample,
}


def prepare_folder(folder: Path, cells: int) -> None:
    """Create the missing parts of a run directory, and reserve space for its end. Raises OSError."""
    with (folder / RESERVE).open("wb") as file:  # so that a full disk cannot hide how a run ended
        os.posix_fallocate(file.fileno(), 0, 2 * RESERVED_BYTES + 2**16 * min(cells, 500))
    for part in ("jobs", "logs", "compose"):
        (folder / part).mkdir(exist_ok=True)
    for output in LINES:  # opened before the first request, to detect a read-only disk
        (folder / output).touch()


def release_space(folder: Path, *, half: bool = False) -> None:
    """Release the reserved space. `half`: only that of the last records; the rest is for the manifest."""
    path = folder / RESERVE
    with contextlib.suppress(OSError):
        os.truncate(path, path.stat().st_size // 2) if half else path.unlink()


def disk_is_full(folder: Path) -> bool:
    """Whether the file system of a run directory has no space left. One that does not report its size is not full."""
    status = os.statvfs(folder)
    free = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return status.f_blocks > 0 and free * status.f_frsize < FULL_BYTES


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run directory for the one process that writes to it. The kernel releases the lock of a dead process.

    Raises HarnessError while another process has the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HarnessError(
                    f"{folder}: another harness process is running this run",
                    next_step="Wait for it, or stop it with Ctrl-C.",
                ) from None
        yield
    finally:
        os.close(descriptor)


def set_aside(folder: Path, keep: Collection[str], cells: Collection[str]) -> str | None:
    """Move all cells but `keep` out of the files of a run. Return the new folder; None if there was nothing to move.

    `cells`: all planned cells. Damaged lines, such as one torn by a power loss, are moved as well. Each line is on the
    disk in its new place before it leaves the old one, so an interrupted call can be repeated. Raises OSError, for
    example on a full disk.
    """
    number = 1 + max((int(path.name) for path in (folder / ATTEMPTS).glob("*") if path.name.isdigit()), default=0)
    aside = folder / ATTEMPTS / str(number)
    aside.mkdir(parents=True)
    moved = [_move_lines(folder / name, aside / name, kind, keep) for name, kind in LINES.items()]
    for part in ("logs", "jobs"):
        for path in sorted((folder / part).glob("*")):
            # The name of a cell can be the start of another's: r1-a-b and r1-a-b.c.
            cell = max((cell for cell in cells if path.name.startswith(f"{cell}.")), key=len, default=None)
            if cell is not None and cell not in keep:
                (aside / part).mkdir(exist_ok=True)
                os.replace(path, aside / part / path.name)
                moved.append(True)
    if any(moved):
        return f"{ATTEMPTS}/{number}"
    aside.rmdir()
    with contextlib.suppress(OSError):  # not empty: earlier attempts
        aside.parent.rmdir()
    return None


def _move_lines(path: Path, aside: Path, kind: type[Any], keep: Collection[str]) -> bool:
    """Move the lines of other cells, and unreadable ones, to `aside`. Return whether there were any."""
    decode = msgspec.json.Decoder(kind).decode
    moved, remaining = False, path.with_name(f"{path.name}.new")
    with open_file(path) as lines, remaining.open("wb") as kept_file, aside.open("wb") as aside_file:
        for line in lines:
            whole = line.endswith(b"\n")
            try:
                kept = whole and decode(line).cell in keep
            except UNDECODABLE:
                kept = False
            (kept_file if kept else aside_file).write(line if whole else line + b"\n")
            moved = moved or not kept
        for file in (aside_file, kept_file):
            file.flush()
            os.fsync(file.fileno())
    if moved:
        os.replace(remaining, path)
    else:
        remaining.unlink()
        aside.unlink()
    return moved


def no_records_error(folder: Path) -> HarnessError:
    """The error for a run directory without requests.jsonl, and where the records are."""
    step = "Give the run's own directory or a copy; `harness results add` files records only with --records."
    if (folder / PACKED).exists():
        step = f"gunzip --keep {folder / PACKED}"
    return HarnessError(f"{folder}: requests.jsonl is missing", next_step=step)


def filed_runs(results: Path) -> list[Path]:
    """The run.json of each run that is filed by machine and scenario."""
    return [path for path in results.glob("*/*/*/run.json") if path.relative_to(results).parts[0] not in RESERVED]


def folder_name(text: str) -> str:
    """`text` as a folder name. A changed name gets a checksum of the original."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:60].rstrip("-._")
    if name == text and name not in RESERVED:
        return name
    return f"{name or 'unnamed'}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"
