"""`harness calibrate`: exact on made files, and once for real."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from harness.errors import RunError
from harness.run import calibrate as calibrate_module
from harness.run.calibrate import CalibrationPoint, calibration_point, describe_readings
from harness.rundir.records import ProcessMark, Request


def write(folder: Path, errors_s: list[float], *, coalesced: int = 0, error: str | None = None) -> Path:
    """One request whose chunks were sent at 100.1, 100.2 ... and are said to have come so much later."""
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


def test_the_error_is_the_recorded_minus_the_sending_time(tmp_path: Path) -> None:
    reading = calibration_point(tmp_path, write(tmp_path, [0.001] * 9 + [0.003]), 1)
    assert reading.error_p50_s == pytest.approx(0.001)
    assert reading.error_p99_s == pytest.approx(0.003, rel=0.1)
    assert reading.chunks_per_s == pytest.approx(10 / 1.0)
    assert (reading.shared, reading.cpu_max, reading.read_lag_p99_s) == (0.0, 0.5, 0.002)
    assert reading.trusted


def test_a_chunk_that_shared_a_read_counts_as_shared_and_not_as_an_error(tmp_path: Path) -> None:
    sent = write(tmp_path, [0.0, 0.1, 0.0, 0.0], coalesced=1)  # the second came with the third
    reading = calibration_point(tmp_path, sent, 1)
    assert reading.shared == 0.25
    assert reading.error_p99_s < 1e-9
    assert reading.doubts == ["more than 1% of the chunks shared a read"]


def test_failed_requests_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="1 of 1 requests to the embedded engine failed"):
        calibration_point(tmp_path, write(tmp_path, [0.0], error="timeout"), 1)


def reading(streams: int, **different: float) -> CalibrationPoint:
    usual = {"chunks_per_s": 50.0 * streams, "error_p50_s": 1e-5, "error_p99_s": 1e-4, "shared": 0.0}
    return CalibrationPoint(streams=streams, processes=1, read_lag_p99_s=None, cpu_max=None, **usual | different)


def test_the_verdict_in_words() -> None:
    assert describe_readings([reading(10), reading(50)]) == (
        "Trusted for 50 streams at once, 2,500 chunks a second: 99 % of the chunk times are right within 0.1 ms. "
        "No more were tried."
    )
    assert describe_readings([reading(10), reading(50, error_p99_s=0.02)]) == (
        "Trusted for 10 streams at once, 500 chunks a second: 99 % of the chunk times are right within 0.1 ms. "
        "With 50, twice: 1 % of the chunk times are off by more than 5 ms. "
        "More `processes` in the load, or the server on another machine, give more room."
    )
    assert describe_readings([reading(10, shared=0.5)]).startswith(
        "This machine's load generator is not to be trusted even"
    )


def test_other_programs_are_not_a_limit_of_the_load_generator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = iter(
        [reading(10, shared=0.02), reading(10), reading(50, shared=0.02, others=0.8), reading(50, shared=0.03)]
    )
    monkeypatch.setattr(calibrate_module, "_measure", lambda *_: next(taken))
    calibrate_module.show_readings(Console(width=200), None, 1, as_json=False)
    said = capsys.readouterr().out
    assert "Trusted for 10 streams at once" in said
    assert "With 50, twice: more than 1% of the chunks shared a read. Other programs used 0.8 cores meanwhile" in said


def test_it_measures_until_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "_measure", lambda streams, _: reading(streams))

    def numbers(maximum: int | None) -> list[int]:
        return [one.streams for one in itertools.islice(calibrate_module.calibrate(maximum), 13)]

    assert numbers(120) == [10, 50, 100, 120]
    assert numbers(100) == [10, 50, 100]
    assert numbers(None)[-4:] == [2000, 3000, 4500, 6750]


@pytest.mark.alone
@pytest.mark.timeout(120)
def test_the_command_measures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness", "calibrate", "--max-streams", "20", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["streams"] for one in found] == [10, 20][: len(found)]
    assert found[0]["chunks_per_s"] > 100
    assert 0 <= found[0]["others"] < 64
    assert list(tmp_path.iterdir()) == []
