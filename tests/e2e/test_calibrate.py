"""`python -m benchmarks.calibrate`: exact on made files, and once for real."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks import calibrate as calibrate_module
from benchmarks.calibrate import CalibrationPoint, calibration_point, describe_readings
from harness.base.errors import RunError
from harness.base.files import ROOT
from harness.records.records import ProcessMark, Request
from tests.support.wording import Wording


def write(folder: Path, errors_s: list[float], *, coalesced: int = 0, error: str | None = None) -> Path:
    """One request whose chunks were sent at 100.1, 100.2 ... and were recorded so much later."""
    due = [100.1 + 0.1 * number for number in range(len(errors_s))]
    request = Request(
        id="a", cell="c", load="l", user_class="B", index=0, user=0, process=1, phase="measured", sent_s=100.0,
        ended_s=due[-1] - 100.0, chunks_s=[round(at + late - 100.0, 6) for at, late in zip(due, errors_s, strict=True)],
        coalesced=coalesced, error=error,  # type: ignore[arg-type]
    )  # fmt: skip
    (folder / "requests.jsonl").write_bytes(msgspec.json.encode(request) + b"\n")
    mark = ProcessMark(
        event="end", process=1, cell="c", wall_s=0.0, monotonic_s=0.0, cpu_max=0.5, read_lag_p99_s=0.002
    )  # fmt: skip
    (folder / "processes.jsonl").write_bytes(msgspec.json.encode(mark) + b"\n")
    sent = folder / "sent.jsonl"
    line = {"request_id": "a", "received_s": 100.0, "prompt_tokens": 1, "chunks_s": due}
    sent.write_bytes(b"{}\n" + msgspec.json.encode(line) + b"\n")
    return sent


def test_the_error_is_the_recorded_minus_the_sending_time(tmp_path: Path, wording: Wording) -> None:
    point = calibration_point(tmp_path, write(tmp_path, [0.001] * 9 + [0.003]), 1)
    assert point.error_p50_s == pytest.approx(0.001)
    assert point.error_p99_s == pytest.approx(0.003, rel=0.1)
    assert point.chunks_per_s == pytest.approx(10 / 1.0)
    assert (point.shared, point.cpu_max, point.read_lag_p99_s, point.doubts) == (0.0, 0.5, 0.002, [])
    # A chunk that came with the next one has no error of its own.
    point = calibration_point(tmp_path, write(tmp_path, [0.0, 0.1, 0.0, 0.0], coalesced=1), 1)
    assert point.shared == 0.25 and point.error_p99_s < 1e-9
    wording(point.doubts)
    with pytest.raises(RunError, match="1 of 1") as caught:
        calibration_point(tmp_path, write(tmp_path, [0.0], error="timeout"), 1)
    wording(caught.value)


def make_point(streams: int, **different: float) -> CalibrationPoint:
    usual = {"chunks_per_s": 50.0 * streams, "error_p50_s": 1e-5, "error_p99_s": 1e-4, "shared": 0.0}
    return CalibrationPoint(streams=streams, processes=1, read_lag_p99_s=None, cpu_max=None, **usual | different)


def test_doubtful_points_are_measured_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    points = iter([make_point(10, shared=0.02), make_point(10), *[make_point(50, shared=0.02)] * 2])
    monkeypatch.setattr(calibrate_module, "_measure", lambda *_: next(points))
    calibrate_module.show_readings(Console(width=200), None, 1, as_json=False)
    *_, last = capsys.readouterr().out.splitlines()
    assert " 10 " in last and " 500 " in last and " 0.1 ms" in last and " 50," in last
    wording(last)


def test_a_machine_that_no_reading_trusts(wording: Wording) -> None:
    wording(describe_readings([make_point(10, error_p99_s=0.5)]))


def test_it_measures_until_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "_measure", lambda streams, _: make_point(streams))

    def numbers(maximum: int | None) -> list[int]:
        return [point.streams for point in itertools.islice(calibrate_module.calibrate(maximum), 13)]

    assert numbers(120) == [10, 50, 100, 120]
    assert numbers(None)[-4:] == [2000, 3000, 4500, 6750]


@pytest.mark.nightly  # of a benchmark; what it computes is tested above
def test_the_script_measures() -> None:
    command = [sys.executable, "-m", "benchmarks.calibrate", "--max-streams", "10", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    assert [point["streams"] for point in points] == [10]
    assert points[0]["chunks_per_s"] > 100
