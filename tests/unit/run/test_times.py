"""`harness run --times`: equal runs one after another, which show how far equal runs differ."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from harness.base.errors import INTERRUPTED, ExitCode, HarnessError, ServerError
from harness.cli.actions import _repeat
from harness.questions.compare.sides import compare_runs
from harness.records.manifest import Run, read_run
from tests.support.command import called, going, harness, until, write
from tests.support.wording import Wording


def runs_of(folder: Path) -> list[Run]:
    found = [read_run(path.parent) for path in folder.glob("*/run.json")]
    return sorted(found, key=lambda run: run.started_wall_s)


def test_equal_runs_follow_each_other_and_a_comparison_uses_them(tmp_path: Path) -> None:
    path, began_s = write(tmp_path), time.time()
    done = harness("run", path.name, "--times", "3", "--every", "1s", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    first, second, third = runs_of(tmp_path / "runs")
    assert {run.status for run in (first, second, third)} == {"valid"}
    assert first.workload_sha256 == second.workload_sha256
    assert second.started_wall_s - began_s >= 0.99 and (first.ended_wall_s or 0) <= second.started_wall_s
    runs = tmp_path / "runs"
    found = compare_runs([[runs / second.id], [runs / third.id]], runs=runs)
    named = done.out.splitlines()[-1].split()
    assert named[-5:] == [first.id, second.id, third.id, "--against", "small:3"]
    assert [reason.code for reason in found.noise_source] == ["variation_assumed"]
    assert found.noise_source[0].values == {"sd": 0.04, "runs": 1}


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([0, 0], ExitCode.OK),
        ([5, 0, 3, 4], ExitCode.INVALID),
        ([0, ServerError("no"), 4], ExitCode.SERVER),
        ([HarnessError("no"), 0], ExitCode.USAGE),
    ],
)
def test_the_exit_code_is_the_worst_one(ends: list[int | HarnessError], code: ExitCode) -> None:
    left: Iterator[int | HarnessError] = iter(ends)

    def measure() -> None:
        end = next(left)
        raise end if isinstance(end, HarnessError) else typer.Exit(end)

    assert _repeat(measure, len(ends), 0.0) == code
    assert next(left, None) is None


def test_runs_start_so_far_apart_whatever_they_take() -> None:
    starts: list[float] = []

    def measure() -> None:
        starts.append(time.monotonic())
        time.sleep(0.3 if len(starts) == 1 else 1.2)

    began_s = time.monotonic()
    assert _repeat(measure, 3, 0.9) == ExitCode.OK
    assert starts[1] - began_s >= 0.9
    assert starts[2] - starts[1] >= 1.2


def test_ctrl_c_between_two_runs(tmp_path: Path) -> None:
    path = write(tmp_path)
    with going("run", path.name, "--times", "2", "--every", "10h", cwd=tmp_path) as command:
        until(lambda: any(run.status == "valid" for run in runs_of(tmp_path / "runs")))
        time.sleep(1)
        command.interrupt()
        done = command.end()
        command.nothing_left()
    assert (done.code, done.err) == (130, f"{INTERRUPTED}\n")
    assert len(runs_of(tmp_path / "runs")) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--times", "2", "--resume", "x"], "--resume"),
        (["--every", "1h"], "--every needs --times"),
        (["--times", "2", "--every", "60"], "--every: "),
        (["--check", ""], "invalid value for '--check'"),
        (["--times", "0"], "--times: "),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, given: list[str], reason: str, wording: Wording) -> None:
    done = called("run", write(tmp_path).name, *given, cwd=tmp_path)
    assert done.code == 1 and done.err.startswith(f"error: {reason}")
    wording(done.err)
