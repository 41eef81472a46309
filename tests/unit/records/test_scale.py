"""Long runs give the numbers that short ones give, whatever the blocks and the processes."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.make_run import make_run
from harness.base.errors import HarnessError
from harness.numbers.share_test import observed, percentiles
from harness.numbers.summarize import summarize, write_summary
from harness.records import records as blocks
from harness.records.clock import Clock
from harness.records.columns import COLUMNS, Words, join_gaps, read_block, records_of
from harness.records.records import Lines, damaged_in_file, split_blocks
from harness.records.run_data import load
from tests.support.made_runs import request, write_lines
from tests.support.report_runs import write_report
from tests.support.wording import Wording

NEVER = 2**60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scale") / "run"
    make_run(made, 2_000)
    return made


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A file of any length is read by one process, in one block."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", NEVER)
    monkeypatch.setattr(blocks, "PARALLEL_BYTES", NEVER)
    return monkeypatch


def test_several_processes_give_the_summary_and_the_page_of_one(folder: Path, limits: pytest.MonkeyPatch) -> None:
    limits.setattr(blocks, "BLOCK_BYTES", 600_000)
    alone = summarize(folder)
    assert (alone.valid, alone.reasons) == (True, [])
    assert [row.pooled.sent for row in alone.rows] == [1_000, 1_000]
    write_summary(folder, alone)
    page = write_report(folder).read_bytes()
    limits.setattr(blocks, "PARALLEL_BYTES", 0)
    limits.setattr(blocks, "max_processes", lambda: 2)
    assert summarize(folder) == alone
    assert write_report(folder).read_bytes() == page


@pytest.mark.parametrize("block_bytes", [3_000, 40_000, 400_000])
def test_the_table_does_not_depend_on_the_blocks(folder: Path, limits: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Parts are joined in between: the same rows in the same order, the warm-up first."""
    whole = load(folder)
    limits.setattr(blocks, "BLOCK_BYTES", block_bytes)
    divided = load(folder)
    assert list(divided.cells) == list(whole.cells)
    for name, cell in whole.cells.items():
        rows, other = cell.rows, divided.cells[name].rows
        assert len(rows) > 200 and not rows.measured[0] and rows.measured[-1]
        for column in COLUMNS:
            one, two = getattr(rows, column), getattr(other, column)
            if isinstance(one, Words):
                assert [one.texts[code] for code in one.codes] == [two.texts[code] for code in two.codes], column
            else:
                assert np.array_equal(one, two, equal_nan=one.dtype.kind == "f"), column
        assert cell.gaps.n == divided.cells[name].gaps.n and np.array_equal(
            cell.gaps.counts, divided.cells[name].gaps.counts
        )


def test_blocks_hold_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for text in (b"", b"\n", b"a\n", b"a", b"\n\n\n", b"one\ntwo\n\nthree\n" + b"x" * 50 + b"\nend", b"abc\n" * 9):
        path.write_bytes(text)
        for size in (1, 2, 3, 4, 7, 20, 100):
            divided = split_blocks(path, size)
            assert b"".join(line for block in divided for line in block.lines()) == text
            assert [line for block in divided for line in block.lines()] == text.splitlines(keepends=True)
            assert all(block.end > block.start for block in divided)
    assert split_blocks(tmp_path / "none") == []


def test_damaged_lines_are_numbered_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    write_lines(path, [request(index=i) for i in range(9)])
    text = path.read_bytes().splitlines(keepends=True)
    text[2], text[7] = b'{"id": "torn\n', b"\n"
    path.write_bytes(b"".join(text) + b'{"id"')
    for size in (1, 500, 1000, NEVER):
        lines: list[Lines] = []
        indices: list[int] = []
        for block in split_blocks(path, size):
            lines.append(Lines())
            indices += [record.index for _, record in read_block(block, lines[-1])]
        assert damaged_in_file(lines) == [3, 8, 10]
        assert indices == [0, 1, 3, 4, 5, 6, 8]


GAPS = st.lists(
    st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 1e-9, 3e10]) | st.floats(0, 1e4), min_size=1, max_size=9
)


@settings(max_examples=300, deadline=None)
@given(st.lists(GAPS, min_size=1, max_size=6), st.sampled_from([1, 500, 900, 950, 990]))
def test_a_percentile_of_gaps_is_within_a_thousandth(gaps_of_requests: list[list[float]], permille: int) -> None:
    chunks = [np.cumsum([0.0, *gaps]) for gaps in gaps_of_requests]
    parts = [records_of([request(chunks_s=one.tolist(), ended_s=1e11)], Clock([])).gaps for one in chunks]
    exact = percentiles([observed(np.concatenate([np.diff(one) for one in chunks]))], [permille])[0].value_s
    assert join_gaps(parts).percentile_s(permille) == pytest.approx(exact, rel=1e-3, abs=1e-9)


def test_a_reading_process_that_is_killed_is_an_error_with_words(
    tmp_path: Path, limits: pytest.MonkeyPatch, wording: Wording
) -> None:
    path = tmp_path / "requests.jsonl"
    write_lines(path, [request(index=i) for i in range(9)])
    limits.setattr(blocks, "PARALLEL_BYTES", 0)
    limits.setattr(blocks, "max_processes", lambda: 2)
    with pytest.raises(HarnessError) as error, blocks.reader(split_blocks(path, 500)) as run:
        list(run(die))
    assert str(path) in error.value.what
    wording(error.value)


def die(block: blocks.Block) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
