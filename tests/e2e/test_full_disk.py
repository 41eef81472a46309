"""A full disk ends a run with what was lost and what to do, and never hides how it ended."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from harness.records.directory import RESERVE
from harness.records.manifest import read_run
from tests.support.command import HARNESS, PATIENCE_S, write
from tests.support.faults import fault

LOAD = {"user": "batch", "batch_size": 100, "requests": 100_000, "output_tokens": 5, "stream": False}


def on_small_disk(tmp_path: Path, path: Path, size: str) -> tuple[int, str, Path]:
    """`harness run` with its runs on a tmpfs of that size, which no other process sees; what it left is copied."""
    if os.geteuid() != 0:
        pytest.fail("needs root to mount a tmpfs")
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    runs.mkdir()
    script = (
        f"mount -t tmpfs -o size={size} tmpfs {runs} || exit 99; {HARNESS} run {path} --runs {runs}; code=$?; "
        f"cp -r {runs} {kept}; exit $code"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stderr, kept


@fault("disk", "the disk fills up during a run",
       seen="the disk is full: how many cells have run and requests are recorded, and what to do (exit code 3)",
       kept="all records until then, and the manifest")  # fmt: skip
def test_a_disk_that_fills_up_during_a_run(tmp_path: Path) -> None:
    path = write(tmp_path, loads={"burst": LOAD}, repeats=2)
    code, err, kept = on_small_disk(tmp_path, path, "2m")
    (folder,) = kept.iterdir()
    run = read_run(folder)
    *lines, _ = (folder / "requests.jsonl").read_bytes().split(b"\n")  # the last one may be torn: it is not counted
    assert (code, run.status, run.ended_wall_s is not None) == (3, "failed", True)
    assert len(lines) > 100 and [json.loads(line)["cell"] for line in lines[-1:]] == ["r1-one-burst"]
    name = tmp_path / "runs" / folder.name
    said, advice = err.splitlines()[-2:]
    assert said.startswith(f"error: {name}: ") and "(No space left on device)" in said
    assert "0 of 2 cells" in said and f" {len(lines):,} " in said
    assert advice.endswith(f"harness run --resume {name}")
    assert not [one.name for one in folder.iterdir() if one.suffix == ".new" or one.name == RESERVE]


@fault("disk", "the disk is full before the run",
       seen="the run directory cannot be written (No space left on device) (exit code 1)", kept="no run is begun"
)  # fmt: skip
def test_a_disk_without_room_for_a_run(tmp_path: Path) -> None:
    code, err, kept = on_small_disk(tmp_path, write(tmp_path), "512k")
    assert (code, list(kept.iterdir())) == (1, [])
    assert err.startswith(f"error: {tmp_path / 'runs'}/")
    assert err.splitlines()[0].endswith("(No space left on device)")
