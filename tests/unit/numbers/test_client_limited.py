"""A late load generator is reported wherever its numbers are shown, and its delays widen the intervals of verdicts."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.base.measured import Distribution, Numbers
from harness.base.reason import evidence
from harness.numbers.cell_numbers import compute_numbers
from harness.numbers.checks import is_changed_by
from harness.numbers.load_generator import client_errors, client_limits, send_delay_s
from harness.numbers.summarize import summarize, write_summary
from harness.numbers.summary import CellSummary
from harness.questions.compare.sides import compare_runs
from harness.questions.report import junit_cases
from harness.questions.report.page import print_report, run_page
from harness.questions.results import add_result, collect_board, result_card
from harness.records.manifest import RunKind, read_run, write_run
from harness.records.records import Request, read_marks
from harness.records.run_data import cell_data
from harness.records.samples import ServerLoad
from harness.report import export, markdown
from harness.scenario import Arrivals, Load
from harness.scenario.plan import Cell
from tests.support.command import harness
from tests.support.made_runs import both_marks, scenario, work, write_lines, write_made_run
from tests.support.made_runs import request as made_request
from tests.support.wording import Wording

RATES = "wall time, tok/s, prompt tok/s and requests/s of b / x"
LIMITED = ["wall", "output_tok_s", "input_tok_s", "requests_per_s"]
SAID = f"the load generator (‡) was late, which affects {RATES} (by {{}}\u00a0% at most); intervals are wider by that"


def limited_run(
    folder: Path, delay: float = 0.01, ratio: float = 1.5, server: str = "b", repeats: str = "2", **lags: float
) -> Path:
    """Five repeats of two servers, of which `a` takes `ratio` times as long. In some repeats of `server` the load
    process had lags, and each request was sent later by this share of its time.
    """
    late = [f"r{repeat}-{server}-x" for repeat in repeats]

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        wall_s = (10.0 * ratio if cell.server == "a" else 10.0) + 0.01 * cell.repeat
        made = work(cell, wall_s, 4, process, start_s)
        if cell.id not in late:
            return made
        return [
            replace(one, ended_s=one.ended_s * (1 - delay), chunks_s=[at * (1 - delay) for at in one.chunks_s])
            if one.phase == "measured"
            else one
            for one in made
        ]

    write_made_run(folder, made_of=scenario(checks=["b/x: wall <= 20 s"]), requests=requests)
    path = folder / "processes.jsonl"
    marks = [replace(mark, **lags) if mark.event == "end" and mark.cell in late else mark for mark in read_marks(path)]
    write_lines(path, marks)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return limited_run(tmp_path / "made", loop_lag_mean_s=0.5)


def test_the_error_is_bounded_and_the_verdict_allows_for_it(run: Path) -> None:
    summary = summarize(run)
    assert summary.valid
    assert [row.client_limited for row in summary.rows] == [[], LIMITED]
    (cell,) = [cell for cell in summary.cells if cell.limits]
    assert (cell.id, cell.limits[0].what, cell.limits[0].value) == ("r2-b-x", "loop_lag", 0.5)
    # Three delays of 1 % of a quarter each; the last request has none after it.
    below = 3 * 0.01 / (4 - 0.01)
    assert cell.client_error["wall"] == pytest.approx((below, 0.0), rel=1e-6)
    assert cell.client_error["output_tok_s"] == pytest.approx((0.0, below / (1 - below)), rel=1e-6)
    assert summary.rows[1].client_error == cell.client_error
    assert [(note.code, note.cell) for note in summary.notes if note.code.startswith("client_")] == [
        ("client_loop_lag", "r2-b-x")
    ]
    assert summary.comparison is not None
    (verdict,) = summary.comparison.verdicts
    assert (verdict.word, verdict.reason, verdict.refused) == ("faster", None, None)
    assert verdict.widened == pytest.approx((1.0, (1 - below) ** (-1 / 5)), rel=1e-6), "one of five repeats"


def test_timers_five_ms_late_in_one_repeat_cost_no_verdict(tmp_path: Path) -> None:
    """Five repeats a side, 10 % apart: the timers of one repeat were late by 2.0 % of a request."""
    summary = summarize(limited_run(tmp_path / "run", 0.02, 1.1, loop_lag_mean_s=0.0505))
    assert summary.rows[1].client_limited == LIMITED
    assert summary.comparison is not None
    assert [verdict.word for verdict in summary.comparison.verdicts] == ["faster"]


def test_a_difference_that_the_delays_may_explain_is_inconclusive(tmp_path: Path) -> None:
    """A third of the time may be the load generator's in one repeat of the side that looks slower."""
    summary = summarize(limited_run(tmp_path / "run", 0.2, 1.025, server="a", loop_lag_mean_s=0.5))
    assert summary.comparison is not None
    (verdict,) = summary.comparison.verdicts
    assert (verdict.word, verdict.widened is not None) == ("inconclusive", True)


@pytest.mark.parametrize(("repeats", "cells"), [("2", []), ("12345", [f"r{repeat}-b-x" for repeat in range(1, 6)])])
def test_delays_of_more_than_a_quarter_make_the_run_invalid(tmp_path: Path, repeats: str, cells: list[str]) -> None:
    """Of the value of the row: of one repeat of five they only widen the interval."""
    summary = summarize(limited_run(tmp_path / "run", 0.5, repeats=repeats, loop_lag_mean_s=0.5))
    found = [(reason.code, reason.cell, reason.values["metric"]) for reason in summary.reasons]
    assert sorted(found) == [("client_error", cell, "wall") for cell in cells]
    assert [cell.id for cell in summary.cells if any(limit.invalid for limit in cell.limits)] == sorted(
        cells, key=[cell.id for cell in summary.cells].index
    )


@pytest.mark.parametrize(("bound", "changed"), [("1 s", False), ("400 ms", True)])
def test_a_check_that_delays_cannot_change_is_decided(bound: str, changed: bool) -> None:
    numbers = Numbers(sent=20, succeeded=20, failed=0, unfinished=0, ttft=Distribution(n=20, p50=0.5))
    cell = CellSummary(id="c", server="a", load="x", repeat=1, numbers=numbers, server_load=ServerLoad())
    assert is_changed_by(cell, "ttft_p50", (0.3, 0.0), [f"ttft_p50 <= {bound}"]) == changed
    assert not is_changed_by(cell, "ttft_p50", (0.3, 0.0), [f"e2e_p50 <= {bound}", f"b/x: ttft_p50 <= {bound}"])
    assert is_changed_by(cell, "ttft_p50", (0.3, 0.0), ["ttft_p50 <= 2 * baseline"])
    assert is_changed_by(cell, "ttft_p50", (0.3, 0.0), [f"attainment(e2e <= 9 s, ttft <= {bound}) >= 0.9"]) == changed
    assert is_changed_by(cell, "ttft_p50", (0.3, 0.0), [f"goodput(ttft <= {bound}) >= 0.5 req/s"]) == changed


def test_of_a_search_only_what_its_slos_say_counts(tmp_path: Path) -> None:
    """Users who think, on two servers: a verdict would judge every latency, a search has no verdict."""

    def late(cell: Cell, process: int, start_s: float) -> list[Request]:
        return [made_request(cell=cell.id, process=process, index=index, clock="read") for index in range(20)]

    load = Load(user="chat", users=2, requests=20, think_s=[1.0, 2.0], output_tokens=11)
    for folder, seed, found in (("run", None, True), ("search", 7, False)):
        path = tmp_path / folder
        write_made_run(path, made_of=scenario(loads={"x": load}, checks=["ttft_p95 <= 60 s"], repeats=1), requests=late)
        run = read_run(path)
        kind: RunKind = "search" if seed else "plan"
        write_run(path, replace(run, kind=kind, cells=[replace(one, seed=seed) for one in run.cells]))
        marks = [replace(mark, loop_lag_p50_s=0.4, loop_lag_p99_s=0.4) for mark in read_marks(path / "processes.jsonl")]
        write_lines(path / "processes.jsonl", marks)
        assert ("client_error" in {reason.code for reason in summarize(path).reasons}) == found


def test_an_unknown_error_has_no_verdict(tmp_path: Path) -> None:
    groups = [[limited_run(tmp_path / "well")], [limited_run(tmp_path / "made", loop_lag_mean_s=0.5)]]
    for (folder,) in groups:
        summary = summarize(folder)
        rows = [replace(row, client_error={}) for row in summary.rows]
        write_summary(folder, replace(summary, rows=rows))
        (folder / "requests.jsonl").unlink()
    compared = {verdict.side: verdict for verdict in compare_runs(groups).verdicts}
    assert compared["a / x"].word == "inconclusive"
    refused = compared["b / x"].refused
    assert compared["b / x"].reason == "refused" and refused is not None and refused.code == "client_limited"


@pytest.mark.parametrize("seconds", [0.001, 0.1])
def test_times_of_the_kernel_do_not_change_with_late_timers(seconds: float) -> None:
    """Chat users who think: their latencies are judged."""
    load = Load(user="chat", users=2, duration_s=60.0, think_s=[1.0, 2.0], output_tokens=11)
    for clock in ("kernel", "read"):
        cell = cell_data([made_request(index=index, clock=clock) for index in range(20)])
        numbers = compute_numbers([cell])
        started, ended = both_marks("c", 7, 0.0, 70.0, sent=20)
        marks = [started, replace(ended, loop_lag_p50_s=seconds, loop_lag_p99_s=0.2, loop_lag_mean_s=seconds)]
        limits = [limit for limit, _ in client_limits(load, cell, numbers, marks)]
        errors = client_errors(load, cell, numbers, marks, limits)
        if clock == "kernel":
            assert not any(name.startswith(("ttft", "tpot", "e2e")) for name in errors)
        else:
            assert errors["ttft_p50"] == pytest.approx((seconds / 0.5, 0.0))


def test_late_chunks_are_bounded_by_the_read_before() -> None:
    load = Load(user="batch", users=1, requests=20, output_tokens=11)
    late = [0.6, 0.6, 0.7, 0.8, *[0.9 + 0.1 * i for i in range(7)]]
    joined = made_request(headers_s=0.5, chunks_s=late, coalesced=1, coalesced_late=1)
    cell = cell_data([replace(joined, index=index) for index in range(20)])
    numbers = compute_numbers([cell])
    started, ended = both_marks("c", 7, 0.0, 70.0, sent=20)
    for longest_s, room_s in ((None, 0.1), (0.03, 0.03)):
        marks = [started, replace(ended, loop_lag_max_s=longest_s)]
        limits = [limit for limit, _ in client_limits(load, cell, numbers, marks)]
        errors = client_errors(load, cell, numbers, marks, limits)
        assert errors["ttft_p50"] == pytest.approx((room_s / 0.6, 0.0))
        assert not {"tpot_p50", "e2e_p50", "wall"} & set(errors)  # TPOT is between arrivals, whatever came before


def test_a_schedule_that_was_kept_late() -> None:
    load = Load(user="batch", users=9, duration_s=60.0, arrivals=Arrivals(rate=1.0), output_tokens=11)
    cell = cell_data([made_request(index=index, scheduled_s=-0.05) for index in range(20)], open_loop=True)
    numbers = compute_numbers([cell])
    marks = both_marks("c", 7, 0.0, 70.0, sent=20)
    limits = [limit for limit, _ in client_limits(load, cell, numbers, marks)]
    assert [limit.what for limit in limits] == ["send_lag"]
    errors = client_errors(load, cell, numbers, marks, limits)
    assert list(errors) == ["ttft_sched_p50", "e2e_sched_p50"]
    assert errors["ttft_sched_p50"] == pytest.approx((0.05 / 0.55, 0.0))
    assert errors["e2e_sched_p50"] == pytest.approx((0.05 / 1.55, 0.0))


@pytest.mark.parametrize(
    ("sent", "ended", "delay_s", "span_s"),
    [
        ([0, 1.1, 2.3], [1, 2.1, 3.3], 0.3, 3.3),  # one after another
        ([0, 0.1, 2.1, 2.2], [2, 1.9, 4.0, 4.4], 0.2, 4.4),  # bursts of two: the later one of the second was last
        ([0, 0.9995], [1.0, 2.0], 0.0, 2.0),  # clocks agree to a millisecond
        ([5.0], [6.0], 0.0, 1.0),
    ],
)
def test_the_delays_on_the_path_to_the_last_answer(
    sent: list[float], ended: list[float], delay_s: float, span_s: float
) -> None:
    found = send_delay_s(np.array(sent, dtype=np.float64), np.array(ended, dtype=np.float64))
    assert found == pytest.approx((delay_s, span_s))


def test_the_list_of_runs_marks_it(run: Path, tmp_path: Path, wording: Wording) -> None:
    for folder in (run, limited_run(tmp_path / "well"), limited_run(tmp_path / "without")):
        if folder.name != "without":
            write_summary(folder, summarize(folder))
    done = harness("list", "runs", "--runs", ".", cwd=tmp_path)
    status = {line.split()[0]: line.strip().split("  ")[-1] for line in done.out.splitlines()[1:]}
    assert status.pop("made").startswith("valid, ")
    assert status == {"well": "valid", "without": "valid"}
    wording(done.out.splitlines()[1:])


def test_every_report_says_it(run: Path, wording: Wording) -> None:
    summary, manifest = summarize(run), read_run(run)
    said = SAID.format("0.758")
    text = markdown.render(run_page(summary, manifest))
    folded = text.index("numbers with ‡ may be wrong by up to 0.76\u00a0%")
    assert "**PASSED" in text[:folded] and said in text[folded : text.index("| b | x |")]
    wording(text[:folded])
    assert "| b | x | 10.03 s‡ | 44 | 4.39‡ |" in text and "0.399‡ | 7.98 | 15.98 | 1,254 | " in text
    assert "| a | x | 15.03 s | 44 | 2.93 |" in text
    (check,) = summary.checks
    assert "10.03" in evidence(check.evidence)
    wording(evidence(check.evidence))
    console = Console(record=True, width=300)
    print_report(summary, manifest, run, console, explain=True)
    assert said.replace("\u00a0", " ") in console.export_text()
    assert f"measurement held\n{said.replace(' (‡)', '')}\n" in junit_cases.render(summary, manifest), (
        "it shows no sign"
    )
    meaning = "the load generator was late: numbers with ‡ may be wrong by up to 0.76\u00a0%"
    assert f"\n- {meaning}\n" in result_card(run, [])
    add_result(run, run.parent / "results")
    board = collect_board(run.parent / "results", run.parent / "results")
    assert board.limited_note == f"{meaning[0].upper()}{meaning[1:]}."
    rows = list(csv.DictReader(io.StringIO(export.csv_table(summary, manifest))))
    assert [row["client_limited"] for row in rows] == ["", " ".join(LIMITED)]
