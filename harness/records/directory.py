"""A run directory during its run: its lock, the space reserved for its end, and what a resumed run puts aside."""

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.base.command_line import command_line
from harness.base.errors import HarnessError
from harness.base.files import UNDECODABLE, open_file, read_json
from harness.records.manifest import Run, read_run
from harness.records.records import ProcessMark, Request
from harness.records.samples import MetricsSample, TelemetrySample

DROPPED = "dropped"  # a folder of the run directory, which no number is computed from
RESERVED = ("reference",)  # folders of the results that do not belong to a machine
PACKED = "requests.jsonl.gz"  # as `harness results add --records` files them
RESERVE = "reserve"  # a file in the run directory during the run
INPUTS = "inputs.json"  # the files that a run was made of: only here, so that what is shared has no paths
WORK_OPTIONS = ("--duration", "--trace", "--slice")  # they change the work, so the same run again needs them
# They change the exit code, or name files of the report: a resumed run has them, too.
REPORT_OPTIONS = ("--tolerance", "--provisional", "--baseline", "--about", "--junit", "--markdown")
RESERVED_BYTES = 2**19  # for the last records, and as much for the last manifest
FULL_BYTES = 2**16
SERVER_OPTIONS = {"--metrics-url": "metrics_url", "--ca": "ca", "--telemetry": "telemetry"}  # by option the key
# Files whose lines each belong to a cell.
LINES: dict[str, type[Any]] = {
    "requests.jsonl": Request,
    "processes.jsonl": ProcessMark,
    "metrics.jsonl": MetricsSample,
    "telemetry.jsonl": TelemetrySample,
}


def read_inputs(folder: Path) -> dict[str, Any]:
    """Return inputs.json; empty for a run that is imported or filed, or where it cannot be read."""
    try:
        return read_json(folder / INPUTS, dict[str, Any])
    except (OSError, HarnessError):
        return {}


def work_options(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return the WORK_OPTIONS of a run as they were given, by name."""
    return _options(inputs, WORK_OPTIONS)


def report_options(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return the REPORT_OPTIONS of a run as they were given last, by name."""
    return _options(inputs, REPORT_OPTIONS)


def _options(inputs: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    kept = inputs.get("options")
    return {name: str(text) for name, text in kept.items() if name in names} if isinstance(kept, dict) else {}


def server_options(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return the SERVER_OPTIONS by which a run reached a server that ran already, by name."""
    return {name: str(inputs[key]) for name, key in SERVER_OPTIONS.items() if inputs.get(key) is not None}


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


def drop_cells(folder: Path, keep: Collection[str], cells: Collection[str]) -> None:
    """Move all cells but `keep` from the files of a run to `dropped/`, with damaged lines, such as one torn by a crash.

    `cells`: all planned cells. A line is on the disk there before it leaves its file. Raises OSError, for example on a
    full disk.
    """
    aside = folder / DROPPED
    for part in ("logs", "jobs"):
        (aside / part).mkdir(parents=True, exist_ok=True)
    for name, kind in LINES.items():
        path, decode = folder / name, msgspec.json.Decoder(kind).decode
        remaining = path.with_name(f"{name}.new")
        with open_file(path) as lines, remaining.open("wb") as kept_file, (aside / name).open("ab") as dropped_file:
            for line in lines:
                is_kept, is_whole = False, line.endswith(b"\n")
                with contextlib.suppress(*UNDECODABLE):
                    is_kept = is_whole and decode(line).cell in keep
                (kept_file if is_kept else dropped_file).write(line if is_whole else line + b"\n")
            for file in (dropped_file, kept_file):
                file.flush()
                os.fsync(file.fileno())
        os.replace(remaining, path)
    for path in [path for part in ("logs", "jobs") for path in (folder / part).glob("*")]:
        # The name of a cell can be the start of another's: r1-a-b and r1-a-b.c.
        cell = max((cell for cell in cells if path.name.startswith(f"{cell}.")), key=len, default=None)
        if cell is not None and cell not in keep:
            os.replace(path, aside / path.parent.name / path.name)


def no_records_error(folder: Path) -> HarnessError:
    """The error for a run directory without requests.jsonl, and where the records are."""
    step = "Give the run's own directory or a copy; `harness results add` files records only with --records."
    if (folder / PACKED).exists():
        step = command_line("gunzip", "--keep", folder / PACKED)
    return HarnessError(f"{folder}: requests.jsonl is missing", next_step=step)


def list_runs(runs: Path | None = None, results: Path | None = None) -> list[tuple[Path, Run | HarnessError]]:
    """Each run below `runs`, and each one filed below `results`: its folder and run.json, or why that cannot be read.

    The folders are in their order.
    """
    listed: list[tuple[Path, Run | HarnessError]] = []
    for folder in run_folders(runs, results):
        try:
            listed.append((folder, read_run(folder)))
        except HarnessError as error:
            listed.append((folder, error))
    return listed


def run_folders(runs: Path | None = None, results: Path | None = None) -> list[Path]:
    """The folders of `list_runs`."""
    filed = [] if results is None else results.glob("*/*/*/run.json")
    paths = [path for path in filed if results and path.relative_to(results).parts[0] not in RESERVED]
    return [path.parent for path in sorted([*paths, *([] if runs is None else runs.glob("*/run.json"))])]


def slug(text: str, empty: str = "run") -> str:
    """Return `text` as the part of a run's id: at most 40 lower-case letters, digits and '-'. `empty`: without any.

    The id names folders, containers and networks: all of them allow these characters.
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-") or empty


def runs_of(name: str, runs: Path) -> list[Path]:
    """Return the runs of a scenario, the newest last. A name that ids shorten is that of the manifests, too."""
    part = slug(name)
    run_id = re.compile(rf"\d{{8}}-\d{{6}}-{part}-[0-9a-f]{{4}}")
    folders = [folder for folder in run_folders(runs) if run_id.fullmatch(folder.name)]
    return folders if part == name else [folder for folder in folders if _is_of(folder, name)]


def _is_of(folder: Path, scenario_name: str) -> bool:
    """Whether a run is of a scenario; so may be one whose manifest cannot be read, which its reader explains."""
    try:
        return read_run(folder).scenario_name == scenario_name
    except HarnessError:
        return True


def folder_name(text: str) -> str:
    """`text` as a folder name. A changed name gets a checksum of the original."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:60].rstrip("-._")
    if name == text and name not in RESERVED:
        return name
    return f"{name or 'unnamed'}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"
