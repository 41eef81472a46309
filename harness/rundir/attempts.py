"""What a run needs to be resumed: the lock of its directory, where its files are, and its earlier attempts.

An attempt is what was recorded of cells that were not complete and valid. Resuming moves it to `attempts/N/`, so that
the files of the run have each cell once, and no measurement is lost.
"""

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from harness.errors import HarnessError
from harness.files import UNDECODABLE, open_file, pretty_json, read_json, replace_file
from harness.rundir.metrics import MetricsSample
from harness.rundir.records import ProcessMark, Request
from harness.rundir.telemetry import TelemetrySample

ATTEMPTS = "attempts"
INPUTS = "inputs.json"
INPUTS_VERSION = 1
# Files of lines, each with its cell.
LINES: dict[str, type[Any]] = {
    "requests.jsonl": Request,
    "processes.jsonl": ProcessMark,
    "metrics.jsonl": MetricsSample,
    "telemetry.jsonl": TelemetrySample,
}


class Inputs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """inputs.json: what was given to a run besides its scenario. It stays on this machine."""

    format_version: int = INPUTS_VERSION
    scenario: str  # path of the scenario file; prompt files, traces and locustfiles are relative to its folder
    files: dict[str, str] = {}  # files that the scenario names: digest by path, as in the scenario
    url: str | None = None  # of a server that already ran
    metrics_url: str | None = None


def write_inputs(folder: Path, inputs: Inputs) -> None:
    replace_file(folder / INPUTS, pretty_json(inputs))


def read_inputs(folder: Path) -> Inputs:
    """Read inputs.json. Raises HarnessError for a run without one."""
    try:
        return read_json(folder / INPUTS, Inputs, INPUTS_VERSION)
    except OSError as error:
        raise HarnessError(
            f"{folder / INPUTS}: cannot be read ({error.strerror}), so the run cannot be resumed",
            next_step="Run the scenario again. Only a run of this version or a later one, in its own directory, can be "
            "resumed.",
        ) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run directory, as the one process that writes to it. The kernel gives the lock back when it dies.

    Raises HarnessError while another process has it.
    """
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise HarnessError(
            f"{folder}: another harness process is running this run", next_step="Wait for it, or stop it with Ctrl-C."
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(place)


def set_aside(folder: Path, keep: Collection[str], cells: Collection[str]) -> str | None:
    """Move all but the cells `keep` out of the files of a run; return the new folder below it, None if there is none.

    `cells`: all that are planned. Damaged lines, such as one that was torn by a power loss, go as well. Each line is
    on the disk in its new place before it leaves the old one: if this is interrupted it can be done again. Raises
    OSError, such as for a full disk.
    """
    number = 1 + max((int(path.name) for path in (folder / ATTEMPTS).glob("*") if path.name.isdigit()), default=0)
    aside = folder / ATTEMPTS / str(number)
    aside.mkdir(parents=True)
    moved = [_move_lines(folder / name, aside / name, kind, keep) for name, kind in LINES.items()]
    for part in ("logs", "jobs"):
        for path in sorted((folder / part).glob("*")):
            cell = cell_of_file(path.name, cells)
            if cell is not None and cell not in keep:
                (aside / part).mkdir(exist_ok=True)
                os.replace(path, aside / part / path.name)
                moved.append(True)
    if any(moved):
        return f"{ATTEMPTS}/{number}"
    aside.rmdir()
    with contextlib.suppress(OSError):  # earlier attempts are in it
        aside.parent.rmdir()
    return None


def cell_of_file(name: str, cells: Collection[str]) -> str | None:
    """The cell to which a file in `logs` or `jobs` belongs."""
    return max((cell for cell in cells if name.startswith(f"{cell}.")), key=len, default=None)


def _move_lines(path: Path, aside: Path, kind: type[Any], keep: Collection[str]) -> bool:
    """Move the lines of other cells, and those that cannot be read. Return whether there were any."""
    decode = msgspec.json.Decoder(kind).decode
    kept, moved, started = 0, 0, path.with_name(f"{path.name}.new")
    with open_file(path) as lines, started.open("wb") as stays, aside.open("wb") as goes:
        for line in lines:
            whole = line.endswith(b"\n")
            try:
                mine = whole and decode(line).cell in keep
            except UNDECODABLE:
                mine = False
            (stays if mine else goes).write(line if whole else line + b"\n")
            kept, moved = kept + mine, moved + (not mine)
        for file in (goes, stays):
            _to_disk(file)
    if not moved:
        started.unlink()
        aside.unlink()
        return False
    os.replace(started, path)
    return True


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
