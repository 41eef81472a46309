"""Long runs give the numbers that short ones give: whatever the blocks, the processes, and the gaps that are kept."""

import itertools
import math
import os
import signal
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.make_run import make_run
from harness.analysis import count, gaps, tally
from harness.analysis.gaps import ALL, Gaps, GapSample, Interval, intervals_around
from harness.analysis.summarize import summarize, write_summary
from harness.analysis.tally import CellCounts, gap_distribution
from harness.errors import HarnessError
from harness.judge.stats import percentile
from harness.report.html import write_report
from harness.rundir import records as blocks
from harness.rundir.records import Lines, damaged_in_file, read_block, split_blocks
from harness.summary import Numbers, Summary
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


def test_several_processes_give_the_summary_and_the_page_of_one(folder: Path, limits: pytest.MonkeyPatch) -> None:
    alone = summarize(folder)
    assert (alone.valid, alone.reasons) == (True, [])
    assert [row.pooled.sent for row in alone.rows] == [5_000, 5_000]
    write_summary(folder, alone)
    page = write_report(folder).read_bytes()
    limits.setattr(blocks, "BLOCK_BYTES", 3_000_000)
    limits.setattr(blocks, "PARALLEL_BYTES", 0)
    limits.setattr(blocks, "max_processes", lambda: 2)
    assert summarize(folder) == alone
    assert write_report(folder).read_bytes() == page


def test_a_long_file_keeps_few_gaps_and_the_same_percentiles(folder: Path, limits: pytest.MonkeyPatch) -> None:
    alone = summarize(folder)
    limits.setattr(blocks, "BLOCK_BYTES", 3_000_000)
    limits.setattr(count, "KEEP_BYTES", 0)
    limits.setattr(gaps, "_HALF_WIDTH_ERRORS", 0.5)  # of so few requests the intervals would hold most
    seen: list[float] = []
    limits.setattr(count, "_has_all_percentiles", spy(seen))
    few = summarize(folder)
    assert seen[-1] < 0.5  # the share of gaps that were kept
    assert without_means(few) == without_means(alone)
    assert gap_means(few) == pytest.approx(gap_means(alone), rel=1e-12)  # the order of a sum shows in its last digit


def spy(seen: list[float]) -> object:
    """`count._has_all_percentiles` that also notes which share of all gaps was kept."""
    asked = count._has_all_percentiles

    def found(tallies: dict[str, CellCounts], places: dict[str, count.CellContext]) -> bool:
        kept = sum(len(kept.values) for t in tallies.values() for kept in t.chunk_gap_s.kept)
        seen.append(kept / sum(t.chunk_gap_s.n for t in tallies.values()))
        return asked(tallies, places)

    return found


def gap_means(summary: Summary) -> list[float | None]:
    return [numbers.chunk_gap_s.mean for numbers in numbers_in(summary)]


def without_means(summary: Summary) -> dict[str, Any]:
    """The summary as JSON has it, without the means of chunk gaps."""
    built: dict[str, Any] = msgspec.to_builtins(summary)
    for numbers in [row["pooled"] for row in built["rows"]] + [cell["numbers"] for cell in built["cells"]]:
        assert numbers["chunk_gap_s"].pop("mean") > 0
    return built


def numbers_in(summary: Summary) -> list[Numbers]:
    return [row.pooled for row in summary.rows] + [cell.numbers for cell in summary.cells]


def test_a_sample_that_misleads_is_noticed(folder: Path, limits: pytest.MonkeyPatch) -> None:
    alone = summarize(folder)
    asked: list[float] = []

    def misled(samples: list[GapSample], widened: float) -> list[Interval]:
        asked.append(widened)
        return [Interval(0.0, 0.001)] if widened == 1 else intervals_around(samples, widened)

    limits.setattr(count, "KEEP_BYTES", 0)
    limits.setattr(gaps, "intervals_around", misled)
    assert without_means(summarize(folder)) == without_means(alone)
    assert set(asked) == {1.0, 4.0}


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
            indices += [record.index for record in read_block(block, lines[-1])]
        assert damaged_in_file(lines) == [3, 8, 10]
        assert indices == [0, 1, 3, 4, 5, 6, 8]


TIMES = st.lists(st.sampled_from([0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0, -0.25]), max_size=30)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(TIMES, min_size=2, max_size=6),
    st.lists(st.sampled_from([-math.inf, -0.25, 0.0, 0.2, 0.5, 0.6, 1.0, 3.0, math.inf]), min_size=2, max_size=6),
    st.integers(0, 6),
)
def test_a_value_found_in_an_interval_is_the_exact_percentile(
    requests: list[list[float]], edges: list[float], whole: int
) -> None:
    """Gaps with many ties, in parts of which some keep every value."""
    bounds = sorted(set(edges))
    intervals = [Interval(low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=False)]
    parts = []
    values: list[float] = []
    for i, steps in enumerate(requests):
        part = Gaps(intervals=[ALL] if i < whole or not intervals else list(intervals))
        chunks = list(itertools.accumulate(steps))
        values += [b - a for a, b in itertools.pairwise(chunks)]
        part.add(chunks)
        part.flush()
        parts.append(part)
    if not values:
        return
    for permille in gaps.PERMILLES.values():
        exact = percentile(np.sort(values), permille)
        held = any(low <= exact <= high for part in parts for low, high in part.intervals if not part.keeps_all)
        expected = exact if held or all(part.keeps_all for part in parts) else None
        assert gaps.percentile_of(parts, permille) == expected


def test_an_interval_counts_its_ends_and_keeps_what_is_inside() -> None:
    part = Gaps(intervals=[Interval(0.0, 1.0)])
    for _ in range(40):
        part.add([0.0, 0.0, 0.0, 0.5, 1.5, 3.5])  # gaps 0, 0, 0.5, 1, 2
    part.flush()
    assert (part.n, part.requests, part.minimum, part.maximum) == (200, 40, 0.0, 2.0)
    kept = part.kept[0]
    assert (kept.below, kept.to_low, kept.below_high, kept.to_high) == (0, 80, 120, 160)
    assert kept.values == array("d", [0.5] * 40)
    found = gap_distribution([part])
    assert (found.n, found.mean, found.p50, found.p90) == (200, 0.7, 0.5, None)  # p90 needs 64 requests
    assert gaps.percentile_of([part], 400) == 0.0
    assert gaps.percentile_of([part], 800) == 1.0
    assert gaps.percentile_of([part], 900) is None


def test_a_reading_process_that_is_killed_is_an_error_with_words(tmp_path: Path, limits: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests.jsonl"
    write_lines(path, [request(index=i) for i in range(9)])
    limits.setattr(blocks, "PARALLEL_BYTES", 0)
    limits.setattr(blocks, "max_processes", lambda: 2)
    with pytest.raises(HarnessError) as error, blocks.reader(split_blocks(path, 500)) as run:
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
        whole.chunk_gap_s.flush()
        first.clock = whole.clock
        assert first == whole
