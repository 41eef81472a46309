"""File a VALID run by machine and scenario: plain files, small enough for git."""

import filecmp
import gzip
import os
import shutil
from pathlib import Path

from harness.errors import HarnessError, RunError
from harness.files import open_file, pretty_json, read_bytes, replace_file
from harness.judge.noise_floors import folder_name, is_noise_run, noise_path
from harness.report import markdown
from harness.rundir.manifest import Run, read_run
from harness.summarize.summarize import summarize
from harness.summary import Summary

RECORDS = "requests.jsonl"


def publish(folder: Path, results: Path, *, records: bool = False) -> tuple[Path, list[str]]:
    """Write summary.json, run.json and report.md of a run below `results`, with `records` its requests packed, too.

    Returns the folder and the names of the files that were new or changed: none the second time. Raises RunError for
    a run that is not VALID, HarnessError for one that has no place there.
    """
    run = read_run(folder)
    summary = summarize(folder)
    _refuse(run, summary, folder)
    target = noise_path(results, run).parent / folder_name(run.id)
    files = {
        "run.json": pretty_json(run),
        "summary.json": pretty_json(summary),
        "report.md": markdown.render(summary, run).encode(),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        changed = [name for name, content in files.items() if _replace(target / name, content)]
        if records and (folder / RECORDS).exists() and _pack(folder / RECORDS, target / f"{RECORDS}.gz"):
            changed.append(f"{RECORDS}.gz")
    except OSError as error:
        raise HarnessError(
            f"{target}: the run cannot be filed there ({error.strerror or error})",
            next_step="--results DIR chooses another folder.",
        ) from None
    return target, changed


def _refuse(run: Run, summary: Summary, folder: Path) -> None:
    if is_noise_run(run):
        raise HarnessError(
            f"{run.id}: an A/A run is no result; what it found is stored as noise.json",
            next_step="Publish runs of `harness run`.",
        )
    if run.origin is not None:
        raise HarnessError(
            f"{run.id}: was measured by {run.origin.tool}, and what it says is not ranked with runs of this suite",
            next_step="Publish runs of `harness run`.",
        )
    if summary.valid and run.status == "valid":
        return
    reasons = summary.reasons or run.reasons or [f"it is {run.status}"]
    state = "INVALID" if run.status in ("valid", "invalid") else run.status
    raise RunError(
        f"{run.id}: only a VALID run is published, and this one is {state}: {reasons[0]}",
        next_step=f"harness report {folder} shows all reasons.",
        detail="\n".join(reasons) if len(reasons) > 1 else "",
    )


def _replace(path: Path, content: bytes) -> bool:
    """Write a file in one step unless it is so already; whether it had to be."""
    if path.exists() and read_bytes(path) == content:
        return False
    replace_file(path, content)
    return True


def _pack(source: Path, path: Path) -> bool:
    """gzip without a name or a time, so that the same records always give the same file."""
    temporary = path.with_name(f"{path.name}.new")
    with (
        open_file(source) as plain,
        temporary.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
    ):
        shutil.copyfileobj(plain, packed)
    if path.exists() and filecmp.cmp(path, temporary, shallow=False):
        temporary.unlink()
        return False
    os.replace(temporary, path)
    return True
