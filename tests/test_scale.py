"""Long runs give the numbers that short ones give: whatever the blocks and the processes."""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.make_run import make_run
from harness.analysis import count, tally
from harness.analysis.gaps import Gaps, gap_distribution
from harness.analysis.summarize import summarize, write_summary
from harness.analysis.tally import CellCounts
from harness.errors import HarnessError
from harness.report.html import write_report
from harness.rundir import records as blocks
from harness.rundir.manifest import Run
from harness.rundir.records import Lines, blocks_of, in_file, requests_in
from harness.summary import NO_SAMPLE, Summary
from tests.made_runs import request, write_lines

NEVER = 2**60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scale") / "run"
    make_run(made, 10_000)
    return made


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A file of any length is read by one process, in one block, and all of it is kept."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", NEVER)
    monkeypatch.setattr(blocks, "PARALLEL_BYTES", NEVER)
    monkeypatch.setattr(count, "KEEP_BYTES", NEVER)
    return monkeypatch


def test_several_processes_give_the_summary_of_one(folder: Path, limits: pytest.MonkeyPatch) -> None:
    alone = summarize(folder)
    assert (alone.valid, alone.reasons) == (True, [])
    assert [row.pooled.sent for row in alone.rows] == [5_000, 5_000]
    limits.setattr(blocks, "BLOCK_BYTES", 3_000_000)
    limits.setattr(blocks, "PARALLEL_BYTES", 0)
    limits.setattr(blocks, "processes", lambda: 2)
    assert summarize(folder) == alone


def test_several_processes_give_the_page_of_one(folder: Path, limits: pytest.MonkeyPatch) -> None:
    write_summary(folder, summarize(folder))
    alone = write_report(folder).read_bytes()
    limits.setattr(blocks, "BLOCK_BYTES", 3_000_000)
    limits.setattr(blocks, "PARALLEL_BYTES", 0)
    limits.setattr(blocks, "processes", lambda: 2)
    assert write_report(folder).read_bytes() == alone


def test_a_long_file_counts_its_gaps_in_microseconds(folder: Path, limits: pytest.MonkeyPatch) -> None:
    alone = summarize(folder)
    limits.setattr(blocks, "BLOCK_BYTES", 3_000_000)
    limits.setattr(count, "KEEP_BYTES", 0)
    long = summarize(folder)
    for exact, counted in zip(gaps_of(alone), gaps_of(long), strict=True):
        assert exact["n"] == counted["n"]
        assert counted == pytest.approx(exact, abs=0.5e-6)
    assert without_gaps(long) == without_gaps(alone)


def gaps_of(summary: Summary) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in msgspec.to_builtins(numbers.chunk_gap_s).items() if key != "intervals"}
        for numbers in [row.pooled for row in summary.rows] + [cell.numbers for cell in summary.cells]
    ]


def without_gaps(summary: Summary) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(summary)
    for numbers in [row["pooled"] for row in built["rows"]] + [cell["numbers"] for cell in built["cells"]]:
        del numbers["chunk_gap_s"]
    return built


def test_blocks_hold_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for text in (b"", b"\n", b"a\n", b"a", b"\n\n\n", b"one\ntwo\n\nthree\n" + b"x" * 50 + b"\nend", b"abc\n" * 9):
        path.write_bytes(text)
        for size in (1, 2, 3, 4, 7, 20, 100):
            divided = blocks_of(path, size)
            assert b"".join(line for block in divided for line in block.lines()) == text
            assert [line for block in divided for line in block.lines()] == text.splitlines(keepends=True)
            assert all(block.end > block.start for block in divided)
    assert blocks_of(tmp_path / "none") == []


def test_damaged_lines_are_numbered_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    write_lines(path, [request(index=i) for i in range(9)])
    text = path.read_bytes().splitlines(keepends=True)
    text[2], text[7] = b'{"id": "torn\n', b"\n"
    path.write_bytes(b"".join(text) + b'{"id"')
    for size in (1, 500, 1000, NEVER):
        lines: list[Lines] = []
        indices: list[int] = []
        for block in blocks_of(path, size):
            lines.append(Lines())
            indices += [record.index for record in requests_in(block, lines[-1])]
        assert in_file(lines) == [3, 8, 10]
        assert indices == [0, 1, 3, 4, 5, 6, 8]


def test_counted_gaps_have_the_percentiles_of_their_values() -> None:
    parts = [Gaps(), Gaps()]
    for number in range(80):
        parts[number % 2].add([0.0, 0.0, 0.0, 0.5, 1.5, 3.5])  # gaps 0, 0, 0.5, 1, 2
    parts[1].add([7.0])
    exact = gap_distribution(parts)
    assert (exact.n, exact.mean, exact.min, exact.max) == (400, 0.7, 0.0, 2.0)
    assert (exact.p50, exact.p90, exact.p95, exact.intervals) == (0.5, 2.0, None, {})  # p95 needs 130 requests
    for part in parts:
        part.count()
    assert gap_distribution(parts) == exact
    assert gap_distribution([Gaps()]) == NO_SAMPLE


def test_the_run_that_measures_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    made: list[Run] = [make_run(tmp_path / name / "run", 100) for name in ("one", "two")]
    assert made[0] == made[1]
    one, two = ((tmp_path / name / "run" / "requests.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_reading_process_that_is_killed_is_an_error_with_words(tmp_path: Path, limits: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests.jsonl"
    write_lines(path, [request(index=i) for i in range(9)])
    limits.setattr(blocks, "PARALLEL_BYTES", 0)
    limits.setattr(blocks, "processes", lambda: 2)
    with pytest.raises(HarnessError) as error, blocks.reader(blocks_of(path, 500)) as run:
        list(run(die))
    assert error.value.what == f"{path}: a process that read it was killed"


def die(block: blocks.Block) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_every_count_of_a_tally_is_merged() -> None:
    records = [
        request(index=0, cached_tokens=3, coalesced=2, clock="read", scheduled_s=-0.1),
        request(index=1, error="timeout", output_tokens=None, asked_tokens=None),
        request(index=2, phase="warmup", process=8, sent_s=990.0),
        request(index=3, output_tokens=5, prompt_tokens=None, scheduled_s=0.2),
    ]
    for cut in range(len(records) + 1):
        whole, first, second = (CellCounts(clock=tally.Clock([]), window_s=(1000.0, 1001.0)) for _ in range(3))
        for i, record in enumerate(records):
            whole.add(record)
            (first if i < cut else second).add(record)
        first.merge(second)
        first.clock = whole.clock
        assert first == whole
