"""Runs that earlier versions wrote stay readable; a file of a newer format is refused with what to do.

tests/golden/versions has one small run of the embedded engine for each generation of files: 0.1.0, 0.2.0 before checks
had three results (`passed`, `beside` in summary.json), and 0.2.0. tests/golden/noise has each format of noise.json.
"""

import json
import shutil
from pathlib import Path

import pytest

from harness.analysis.summarize import read_summary
from harness.errors import HarnessError
from harness.files import ROOT, rename_old_fields
from harness.judge.noise_floors import FORMAT_VERSION as NOISE_VERSION
from harness.judge.noise_floors import read_noise
from harness.rundir.manifest import read_run
from harness.rundir.records import read_marks, read_requests
from harness.summary import FORMAT_VERSION
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
    assert (run.format_version, run.status, summary.valid, len(summary.rows)) == (FORMAT_VERSION, "valid", True, 2)
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


LIKE_OLD_FIELDS = """
version: 1
question: Does a name stay?
model: m
servers:
  most: {template: simulated, variables: {preset: instant}, container: false}
loads:
  least: {user: batch, duration_s: 1, output_tokens: 3}
  most: {user: batch, duration_s: 1, output_tokens: 3}
mixes: {max: [least, most]}
repeats: 1
"""


def test_what_users_name_like_an_old_field_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(LIKE_OLD_FIELDS)
    done = harness("run", "s.yaml", "--runs", "runs", cwd=tmp_path)
    assert (done.code in (0, 3), done.err) == (True, ""), done.out
    (folder,) = (tmp_path / "runs").iterdir()
    scenario, summary = read_run(folder).scenario, read_summary(folder)
    assert (list(scenario.servers), list(scenario.loads)[:2]) == (["most"], ["least", "most"])
    assert {row.load for row in summary.rows} == {"least", "most", "max.least", "max.most"}


def test_an_old_file_gets_new_names_for_its_fields_only() -> None:
    trace = {"most": 5, "block_tokens": 512}
    old = {
        "servers": {"most": {"variables": {"least": 1}}},
        "loads": {"least": {"think_s": {"most": 2}, "trace": trace}},
    }
    assert rename_old_fields(old) == {
        "servers": {"most": {"variables": {"least": 1}}},
        "loads": {"least": {"think_s": {"max": 2}, "trace": {"max_requests": 5, "block_tokens": 512}}},
    }


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
    said = "error: runs/0.2.0/run.json: format 3 was written by a newer harness; this one reads up to 2\n"
    assert (done.code, done.out, done.err) == (1, "", f"{said}next: Update the harness.\n")
    path.write_text(path.read_text().replace('"format_version": 3', '"format_version": "1"'))
    done = harness("report", "runs/0.2.0", cwd=runs.parent)
    assert (done.code, "cannot be read (Expected `int` - at `$.format_version`)" in done.err) == (1, True)
    noise = runs / "noise.json"
    noise.write_text(json.dumps({"format_version": NOISE_VERSION + 1}))
    with pytest.raises(HarnessError, match="format 3 was written by a newer harness; this one reads up to 2"):
        read_noise(noise)
