"""Summaries of run directories whose every record is chosen."""

import math
import random
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest

from harness.base.errors import HarnessError
from harness.base.files import pretty_json
from harness.base.measured import NO_SAMPLE, Distribution, Numbers
from harness.base.reason import Reason, because, evidence, sentence, sentences
from harness.numbers.latencies import distribution
from harness.numbers.share_test import observed
from harness.numbers.summarize import summarize, write_summary
from harness.numbers.summary import Summary
from harness.records.manifest import Status, write_run
from harness.records.records import Request, read_requests
from harness.records.samples import HostSample, TelemetrySample
from harness.report.verdict_text import verdict_sentence
from harness.scenario import Load, Server
from harness.scenario.plan import Cell
from tests.support.made_runs import MONOTONIC_S, both_marks, one_cell, request, scenario, write_lines, write_made_run
from tests.support.wording import Wording


def wall_of(cell: Cell) -> float:
    return (10.0 if cell.server == "a" else 8.0) + 0.01 * cell.repeat


def sample_of(*values: float) -> Distribution:
    """A sample of one value a request, too small for any percentile."""
    return msgspec.structs.replace(distribution([observed(np.array(values))]), blocks=0)


def with_cut(
    sample: Distribution,
    low_s: float,
    censored: int,
    unknown: int,
    above: float | None,
    age_s: float | None,
    effect: float,
    lows: tuple[float | None, float | None, float | None],
) -> Distribution:
    """The same with a failed request, and with cut and unknown ones; at least `low_s` is the mean. `age_s`: of the one
    that was cut. `lows`: the lower ends of p90, p95 and p99."""
    cut = {} if age_s is None else {"cut": (age_s, age_s)}
    ends = {name: (low, None) for name, low in zip(("p90", "p95", "p99"), lows, strict=True)}
    intervals = sample.intervals | ends | {"mean": (low_s, None)} | cut
    assert sample.spread is not None and sample.spread.max is not None
    spread = msgspec.structs.replace(
        sample.spread, open=censored + unknown, min=None if unknown else min(sample.spread.min or 0.0, age_s or 0.0),
        max=None,
    )  # fmt: skip
    return msgspec.structs.replace(
        sample, intervals=intervals, censored=censored, unknown=unknown, above=above, spread=spread, effect=effect
    )


def gaps(*values: float) -> Distribution:
    return Distribution(n=len(values), mean=statistics.fmean(values), min=min(values), max=max(values))


def test_a_whole_run(tmp_path: Path) -> None:
    write_made_run(tmp_path / "run", wall_of)
    summary = summarize(tmp_path / "run")
    assert (summary.valid, summary.reasons, summary.notes, summary.simulated) == (True, [], [], False)
    assert (summary.run, summary.scenario, summary.question) == ("run", "which", "Which is faster?")
    assert [cell.id for cell in summary.cells[:4]] == ["r1-a-x", "r1-b-x", "r2-b-x", "r2-a-x"]
    a, b = summary.rows
    assert (a.key, b.key) == (("a", "x"), ("b", "x"))
    assert a.cells == ["r1-a-x", "r2-a-x", "r3-a-x", "r4-a-x", "r5-a-x"]
    assert a.wall == pytest.approx([10.01, 10.02, 10.03, 10.04, 10.05])
    assert b.output_tok_s == pytest.approx([44 / wall for wall in (8.01, 8.02, 8.03, 8.04, 8.05)])
    assert a.pooled.wall == pytest.approx(10.03)
    assert (a.pooled.sent, a.pooled.succeeded, a.pooled.output_tokens, a.pooled.ttft.n) == (20, 20, 220, 20)
    assert a.pooled.ttft.p50 == pytest.approx(10.03 / 4 * 0.5) and a.pooled.ttft.p90 is None
    load = summary.cells[0].server_load
    assert (summary.cells[0].ready_s, load.generated_tokens, load.running_max) == (3.5, 55.0, 2.0)
    assert summary.comparison is not None
    (verdict,) = summary.comparison.verdicts
    assert (verdict.side, verdict.word) == ("b / x", "faster")
    assert verdict.ratio == pytest.approx(10.03 / 8.03, rel=1e-4)


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    write_made_run(tmp_path / "run", wall_of, made_of=scenario(checks=["error_rate == 0", "speedup > 1.2"]))
    first = pretty_json(summarize(tmp_path / "run"))
    write_summary(tmp_path / "run", summarize(tmp_path / "run"))
    written = (tmp_path / "run" / "summary.json").read_bytes()
    assert written == first
    assert msgspec.json.decode(written, type=Summary) == summarize(tmp_path / "run")
    assert [check.status for check in summarize(tmp_path / "run").checks] == ["passed", "passed"]


def test_exact_numbers_of_a_fixed_amount_of_work(tmp_path: Path, wording: Wording) -> None:
    good = [
        request(phase="warmup", sent_s=995.0),
        request(index=0, sent_s=1000.0, chunks_s=[0.5, 1.0], output_tokens=2, asked_tokens=2, ended_s=1.25),
        request(index=1, sent_s=1001.0, chunks_s=[0.25, 1.25, 2.0], output_tokens=3, asked_tokens=3, ended_s=2.0,
                first_visible_s=None, cached_tokens=16),
    ]  # fmt: skip
    failed = [
        request(index=2, sent_s=1000.5, chunks_s=[9.0], output_tokens=None, error="stream_error", ended_s=9.5),
        request(index=3, sent_s=1000.5, chunks_s=[], output_tokens=None, error="unfinished", ended_s=1.0,
                first_visible_s=None),
    ]  # fmt: skip
    summary = one_cell(tmp_path / "run", good + failed, max_error_rate=0.5)
    wording(sentences(summary.reasons))
    # The wall time is from 1000 until the failed one ended; TPOT is 0.5 / 1 and 1.75 / 2.
    assert summary.cells[0].numbers == Numbers(
        sent=4, succeeded=2, failed=1, unfinished=1, errors={"stream_error": 1, "unfinished": 1}, prompt_tokens=40,
        output_tokens=5, cached_tokens=16, wall=10.0, window="wall", window_s=10.0, output_tok_s=0.5, input_tok_s=4.0,
        requests_per_s=0.2, ttft=with_cut(sample_of(0.5, 0.25), 1.75 / 3, 1, 0, 1.0, 1.0, 3.0, (0.25, 0.25, 0.5)),
        ttfo=with_cut(sample_of(0.5), 0.5, 1, 1, 1.0, 1.0, 3.0, (None, None, 0.5)),
        tpot=with_cut(sample_of(0.5, 0.875), 1.375 / 3, 0, 1, None, None, 3.0, (None, None, 0.5)),
        e2e=with_cut(sample_of(1.0, 2.0), 4 / 3, 1, 0, None, 1.0, 4.0, (None, None, math.nextafter(1.0, 2.0))),
        gap=gaps(0.5, 1.0, 0.75), tokens_per_chunk=1.0, answer_tok_s=1.75,
    )  # fmt: skip
    assert summary.cells[0].numbers.error_rate == 0.25
    assert summary.rows[0].pooled == summary.cells[0].numbers
    assert summary.comparison is None  # one row: nothing to compare it with


def test_tokens_that_were_not_reported_are_missing_and_not_zero(tmp_path: Path) -> None:
    records = [request(index=i, output_tokens=None if i == 2 else 11, prompt_tokens=None) for i in range(4)]
    summary = one_cell(tmp_path / "run", records)
    numbers = summary.cells[0].numbers
    assert (numbers.output_tokens, numbers.output_tok_s, numbers.prompt_tokens) == (None, None, None)
    assert numbers.wall == 1.5
    assert summary.rows[0].output_tok_s == []
    assert summary.notes[0].code == "tokens_unknown"


@pytest.mark.parametrize(("others", "invalid"), [("stop", True), (None, False)])
def test_answers_without_a_finish_reason_were_cut_where_their_server_sends_them(
    others: str | None, invalid: bool, tmp_path: Path
) -> None:
    """Only other answers of the same server, warm-up included, show that it does; those of server b never do."""

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        finish = others if (cell.server, cell.repeat) == ("a", 2) else None
        changes = {"cell": cell.id, "process": process, "textless": 0}
        return [
            request(phase="warmup", sent_s=start_s, finish=finish, **changes),
            *(request(index=index, sent_s=start_s + 2, finish=None, **changes) for index in range(4)),
        ]

    write_made_run(tmp_path / "run", made_of=scenario(repeats=2), requests=requests)
    summary = summarize(tmp_path / "run")
    assert summary.valid == (not invalid)
    found = [(reason.code, reason.cell, reason.values) for reason in summary.reasons]
    noted = [(note.code, note.cell, note.values) for note in summary.notes if note.code == "finish_missing"]
    values = {"answers": 4, "requests": 4}
    cut = [("finish_missing", f"r{repeat}-a-x", values | {"cut": True}) for repeat in (1, 2) if invalid]
    whole = [
        ("finish_missing", f"r{repeat}-{server}-x", values | {"cut": False})
        for repeat, servers in ((1, "ab"), (2, "ba")) for server in servers if not (invalid and server == "a")
    ]  # fmt: skip
    assert (found, noted) == (cut, whole)


def test_a_timed_load_counts_the_tokens_inside_its_window(tmp_path: Path) -> None:
    load = Load(user="batch", duration_s=10.0, output_tokens=11)
    records = [
        # A warm-up that is still being answered when the window opens at 1000: five of its ten chunks come later.
        request(phase="warmup", sent_s=995.0, chunks_s=[0.5 + i for i in range(10)], output_tokens=20, asked_tokens=20,
                ended_s=9.5),
        request(index=0, sent_s=1000.0),  # 11 tokens, all inside
        # Ends after the window closed at 1010: two of its four chunks count.
        request(index=1, sent_s=1008.0, chunks_s=[1.0, 1.5, 2.5, 3.0], output_tokens=8, asked_tokens=8, ended_s=3.0),
        # Cut at the end: three chunks inside, of 19 / 15 tokens each, as the other measured ones had.
        request(index=2, sent_s=1006.0, chunks_s=[1.0, 2.0, 3.0, 9.0], output_tokens=None, error="unfinished",
                ended_s=9.5),
        # Failed: its tokens are of no use.
        request(index=3, sent_s=1005.0, output_tokens=None, error="truncated"),
    ]  # fmt: skip
    summary = one_cell(tmp_path / "run", records, load, max_error_rate=0.9)
    assert summary.valid, summary.reasons
    numbers = summary.cells[0].numbers
    assert (numbers.wall, numbers.window, numbers.window_s) == (None, "timed", 10.0)
    assert numbers.output_tok_s == pytest.approx((10 + 11 + 4 + 3 * 19 / 15) / 10)
    assert numbers.requests_per_s == 0.2  # a measured one and the warm-up ended inside
    assert (numbers.sent, numbers.output_tokens) == (4, 19)
    assert summary.rows[0].wall == []


def test_processes_of_one_machine_share_the_clock_and_others_are_joined_by_their_anchors(tmp_path: Path) -> None:
    records = [
        request(process=1, index=0, sent_s=1000.0),
        request(process=2, index=1, sent_s=1002.0),
        request(process=3, index=2, sent_s=51_004.0),
        request(process=3, index=3, sent_s=51_005.0),
    ]
    summary = one_cell(tmp_path / "run", records)
    assert summary.cells[0].numbers.wall == pytest.approx(50_006.5)  # taken for the same clock
    marks = [m for p, n in ((1, 1), (2, 1), (3, 2)) for m in both_marks("r1-a-x", p, -5.0, 100.0, sent=n)]
    moved = [
        # Another machine, booted 50,000 s before; and a container on the same kernel, after a step of the wall clock.
        msgspec.structs.replace(m, monotonic_s=m.monotonic_s + 50_000, host="b-2")
        if m.process == 3
        else msgspec.structs.replace(m, wall_s=m.wall_s + 2.0, host="container-1")
        if m.process == 2
        else msgspec.structs.replace(m, host="a-1")
        for m in marks
    ]
    write_lines(tmp_path / "run" / "processes.jsonl", moved)
    assert summarize(tmp_path / "run").cells[0].numbers.wall == 6.5


def test_percentiles_only_where_the_sample_carries_them() -> None:
    assert distribution([]) == NO_SAMPLE
    ten, eleven = (observed(np.arange(number, dtype=np.float64)) for number in (10, 11))
    assert [distribution(parts).p50 for parts in ([ten], [eleven], [ten, eleven])] == [None, 5.0, 5.0]
    sample = distribution([observed(np.array(range(1, 131)))])
    assert (sample.p50, sample.p90, sample.p95, sample.p99) == (65.0, 117.0, 124.0, None)
    assert distribution([observed(np.array(range(1, 663)))]).p99 == 656.0


def test_a_run_that_was_killed_shows_what_it_has(tmp_path: Path) -> None:
    run = write_made_run(tmp_path / "run", wall_of)
    write_run(tmp_path / "run", msgspec.structs.replace(run, status="running", cells=run.cells[:2], ended_wall_s=None))
    lines = (tmp_path / "run" / "requests.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / "requests.jsonl").write_bytes(b"".join(lines[:12]) + lines[12][:40])
    marks = (tmp_path / "run" / "processes.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / "processes.jsonl").write_bytes(b"".join(marks[:5]))
    summary = summarize(tmp_path / "run")
    assert not summary.valid
    assert [cell.id for cell in summary.cells] == ["r1-a-x", "r1-b-x", "r2-b-x"]
    assert [cell.problems for cell in summary.cells[:2]] == [[], []]
    assert [(reason.code, reason.cell) for reason in summary.reasons] == [
        ("unreadable_lines", None), ("cells_missing", None), ("going_on", "r2-b-x"), ("processes_killed", "r2-b-x"),
        ("requests_missing", "r2-b-x"),
    ]  # fmt: skip
    assert summary.reasons[3].values == {"processes": ["102"], "going_on": True}
    assert summary.comparison is None
    assert [len(row.wall) for row in summary.rows] == [1, 1]
    # Of a run that somebody ended it is known that nobody is at work any more.
    write_run(tmp_path / "run", msgspec.structs.replace(run, status="interrupted", cells=run.cells[:2]))
    (killed,) = (one for one in summarize(tmp_path / "run").reasons if one.code == "processes_killed")
    assert (killed.values, killed.cell) == ({"processes": ["102"], "going_on": False}, "r2-b-x")


THREE = {name: Server(template="vllm-cpu") for name in ("a", "b", "c")}
SPEEDS = {"a": 10.0, "b": 5.0, "c": 5.0}
CHECKS = ["a/x: error_rate == 0", "b/x: wall <= 0.9 * baseline", "c/x: wall <= 0.9 * baseline", "c/x: speedup >= 1.5",
          "b/x: speedup >= 1.5"]  # fmt: skip


def with_a_failed_request(folder: Path, cell: str) -> Summary:
    """Of a run with five repeats of three servers, whose baseline is `a`. One request of one cell failed."""
    made_of = scenario(servers=THREE, checks=CHECKS)
    write_made_run(folder, lambda cell: SPEEDS[cell.server] + 0.01 * cell.repeat, made_of=made_of)
    records = list(read_requests(folder / "requests.jsonl"))
    failed = [msgspec.structs.replace(r, error="timeout") if r.id == f"{cell}-1" else r for r in records]
    write_lines(folder / "requests.jsonl", failed)
    return summarize(folder)


WHY = "r3-{}-x: 1 of 4 requests failed (timeout 1): an error rate of 25.00 %, and at most 0.00 % is allowed"


def test_a_failed_cell_takes_the_verdict_of_its_row_only(tmp_path: Path, wording: Wording) -> None:
    found = with_a_failed_request(tmp_path / "run", "r3-b-x")
    assert (found.valid, sentences(found.reasons)) == (False, [WHY.format("b")])
    assert [row.invalid and sentence(row.invalid) for row in found.rows] == [None, WHY.format("b"), None]
    assert found.comparison is not None and found.comparison.comparisons == 1
    failed, judged = found.comparison.verdicts
    assert [(v.side, v.n, v.ratio is None) for v in (failed, judged)] == [
        ("b / x", (4, 5), True), ("c / x", (5, 5), False),
    ]  # fmt: skip
    assert judged.word == "faster"
    wording(verdict_sentence(failed))
    assert [one.status for one in found.checks] == ["passed", "inconclusive", "passed", "passed", "inconclusive"]
    assert all(WHY.format("b") in evidence(found.checks[number].evidence) for number in (1, 4))


def test_a_row_with_a_cell_that_has_not_run_has_no_verdict(tmp_path: Path, wording: Wording) -> None:
    folder = tmp_path / "run"
    run = write_made_run(folder, lambda cell: SPEEDS[cell.server] + 0.01 * cell.repeat, made_of=scenario(servers=THREE))
    write_run(folder, msgspec.structs.replace(run, cells=[cell for cell in run.cells if cell.id != "r5-b-x"]))
    kept = [r for r in read_requests(folder / "requests.jsonl") if r.cell != "r5-b-x"]
    write_lines(folder / "requests.jsonl", kept)
    found = summarize(folder)
    assert "14" in sentences(found.reasons)[0] and "15" in sentences(found.reasons)[0]
    wording(sentences(found.reasons)[0])
    reasons = [row.invalid for row in found.rows]
    assert [reason and (reason.code, reason.cell) for reason in reasons] == [None, ("not_run", "r5-b-x"), None]
    wording(reasons[1])
    assert found.comparison is not None
    assert [v.ratio is None for v in found.comparison.verdicts] == [True, False]
    with (folder / "requests.jsonl").open("ab") as file:
        file.write(b"{}\n")
    assert summarize(folder).comparison is None  # what no cell has takes all verdicts


@pytest.mark.parametrize("name", ["metrics.jsonl", "telemetry.jsonl"])
def test_damaged_samples_are_named(tmp_path: Path, name: str, wording: Wording) -> None:
    run, path = write_made_run(tmp_path / "run"), tmp_path / "run" / name
    sample = msgspec.json.encode(TelemetrySample(wall_s=1.0, cell="r1-a-x", host=HostSample(cpu_busy=0.5))) + b"\n"
    whole = path.read_bytes() if path.exists() else sample * 8

    def notes(content: bytes, status: Status) -> list[Reason]:
        path.write_bytes(content)
        write_run(tmp_path / "run", msgspec.structs.replace(run, status=status))
        found = summarize(tmp_path / "run").notes
        is_damage = any(note.code == "unreadable_samples" for note in found)
        assert not is_damage or not any(note.code in ("no_token_counter", "telemetry_elsewhere") for note in found)
        return [note for note in found if note.code in ("unreadable_samples", "token_counter_damaged")]

    assert notes(whole, "valid") == []
    # The last line of a run that was killed, or that goes on, may have no end: a false alarm would name each of them.
    statuses: list[Status] = ["running", "interrupted", "failed", "live"]
    assert not [status for status in statuses if notes(whole[:-9], status)]
    cut, *_ = notes(whole[:-9], "valid")
    assert (cut.code, cut.values["file"], cut.values["total"]) == ("unreadable_samples", name, 1)
    middle, *_ = notes(b"\0\0\n" + whole[:-9], "interrupted")
    assert middle.values["lines"] == [1]
    damaged = notes(random.Random(7).randbytes(3000), "valid")
    for note in damaged:
        wording(note)


def test_a_run_without_a_record_is_a_summary_all_the_same(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        summarize(tmp_path)
    wording(caught.value)
    run = write_made_run(tmp_path / "run")
    for name in ("requests.jsonl", "processes.jsonl", "metrics.jsonl"):
        (tmp_path / "run" / name).unlink()
    why = because("run_error", "the server a did not become ready")
    write_run(tmp_path / "run", msgspec.structs.replace(run, status="failed", cells=[], reasons=[why]))
    summary = summarize(tmp_path / "run")
    assert (summary.rows, summary.cells, summary.comparison) == ([], [], None)
    assert [reason.code for reason in summary.reasons] == [why.code, "cells_missing"]
    assert summary.reasons[1].values == {"ran": 0, "planned": 10}


def test_a_cell_without_a_record_is_a_row_with_nothing_in_it(tmp_path: Path) -> None:
    summary = one_cell(tmp_path / "run", [])
    numbers = summary.cells[0].numbers
    assert (numbers.sent, numbers.error_rate, numbers.wall, numbers.output_tokens) == (0, None, None, None)
    codes = [reason.code for reason in summary.reasons]
    assert codes == ["processes_missing", "requests_missing", "none_succeeded"]


def test_live_load_is_shown_although_it_is_in_no_plan(tmp_path: Path) -> None:
    run = write_made_run(tmp_path / "run")
    changes = {
        "status": "interrupted",
        "order": ["live-a-x"],
        "cells": [],
        "reasons": [because("interrupted", "stopped")],
    }
    write_run(tmp_path / "run", msgspec.structs.replace(run, **changes))
    records = [request(cell="live-a-x", sent_s=MONOTONIC_S + i) for i in range(9)]
    write_lines(tmp_path / "run" / "requests.jsonl", records)
    summary = summarize(tmp_path / "run")
    assert (summary.valid, summary.rows[0].pooled.sent) == (False, 9)
    assert summary.reasons[0].code == "interrupted"
