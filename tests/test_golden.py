"""Runs that earlier versions wrote stay readable; a file of a newer format is refused with what to do.

tests/golden/versions has one small run of the embedded engine for each generation of files: 0.1.0, 0.2.0 before checks
had three results (`passed`, `beside` in summary.json), and 0.2.0. tests/golden/noise has each format of noise.json.
"""

import json
import shutil
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.judge.noise_floors import FORMAT_VERSION as NOISE_VERSION
from harness.judge.noise_floors import read_noise
from harness.paths import ROOT
from harness.rundir.manifest import read_run
from harness.rundir.records import FORMAT_VERSION, read_marks, read_requests
from harness.summarize.summarize import read_summary
from tests.command import harness

GOLDEN = ROOT / "tests" / "golden"
RUNS = sorted(path.name for path in (GOLDEN / "versions").iterdir())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "versions", tmp_path / "runs"))


@pytest.mark.parametrize("name", RUNS)
def test_the_files_of_every_version_are_read(name: str) -> None:
    folder = GOLDEN / "versions" / name
    run, summary, damaged = read_run(folder), read_summary(folder), list[int]()
    requests = list(read_requests(folder / "requests.jsonl", damaged))
    marks = read_marks(folder / "processes.jsonl", damaged)
    assert (run.format_version, run.status, summary.valid, len(summary.rows)) == (1, "valid", True, 2)
    assert (len(requests), len(marks), damaged) == (12, 4, [])


def test_the_runs_of_every_version_are_listed_reported_and_compared(runs: Path) -> None:
    listed = harness("runs", "--runs", "runs", cwd=runs.parent)
    assert [line.split()[0] for line in listed.out.splitlines()[1:]] == RUNS
    assert (listed.code, "unreadable" in listed.out) == (0, False)
    for name in RUNS:
        done = harness("report", name, "--runs", "runs", cwd=runs.parent)
        assert (done.code, done.err, "Is a format still read?" in done.out) == (0, "", True)
        assert read_summary(runs / name).checks[0].status == "passed"
    done = harness("compare", *RUNS, "--runs", "runs", "--about", "versions", cwd=runs.parent)
    assert (done.err, done.code in (0, 4), done.out.count("two / burst") >= 2) == ("", True, True)


def test_every_format_of_noise_is_known() -> None:
    assert [path.name for path in sorted((GOLDEN / "noise").iterdir())] == [
        f"format-{version}.json" for version in range(1, NOISE_VERSION + 1)
    ]
    assert read_noise(GOLDEN / "noise" / "format-1.json") is None, "one run does not show how far runs differ"
    noise = read_noise(GOLDEN / "noise" / "format-2.json")
    assert noise is not None and len(noise.runs) == 1


def test_a_newer_format_is_refused(runs: Path) -> None:
    path = runs / "0.2.0" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": FORMAT_VERSION + 1, "new": 1}))
    done = harness("report", "runs/0.2.0", cwd=runs.parent)
    assert (done.code, done.out, done.err) == (
        1,
        "",
        "error: runs/0.2.0/run.json: format 2 was written by a newer harness; this one reads up to 1\n"
        "next: Update the harness.\n",
    )
    noise = runs / "noise.json"
    noise.write_text(json.dumps({"format_version": NOISE_VERSION + 1}))
    with pytest.raises(HarnessError, match="format 3 was written by a newer harness; this one reads up to 2"):
        read_noise(noise)
