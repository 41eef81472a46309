"""A run whose limit was the load generator says so wherever its numbers are shown, and gives no verdict on them."""

import csv
import io
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.analysis.summarize import summarize, write_summary
from harness.comparison.compare import compare_runs
from harness.reasons import evidence
from harness.report import export, junit, markdown, terminal
from harness.rundir.manifest import read_run
from harness.rundir.records import read_marks
from tests.command import harness
from tests.made_runs import scenario, write_lines, write_made_run

SAID = "the load generator (‡), not the server, was the limit of {}; all other numbers are valid"
RATES = "wall time, tok/s, prompt tok/s and requests/s of b / x"


def limited_run(folder: Path, server: str = "b", **lags: float) -> Path:
    """Five repeats of two servers. The load process of one cell of `server` had lags."""
    write_made_run(folder, lambda cell: 10.0 + 0.01 * cell.repeat, made_of=scenario(checks=["b/x: wall <= 20 s"]))
    path = folder / "processes.jsonl"
    marks = [
        replace(mark, **lags) if mark.event == "end" and mark.cell == f"r2-{server}-x" else mark
        for mark in read_marks(path)
    ]
    write_lines(path, marks)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return limited_run(tmp_path / "made", loop_lag_mean_s=0.5)


LIMITED = ["wall_s", "output_tok_s", "input_tok_s", "requests_per_s"]


def test_the_summary_names_cell_row_and_numbers_and_has_no_verdict_on_them(run: Path, tmp_path: Path) -> None:
    summary = summarize(run)
    assert summary.valid
    assert [row.client_limited for row in summary.rows] == [[], LIMITED]
    (cell,) = [cell for cell in summary.cells if cell.limits]
    assert (cell.id, cell.limits[0].what, cell.limits[0].value) == ("r2-b-x", "loop_lag", 0.5)
    assert [(note.code, note.cell) for note in summary.notes if note.code.startswith("client_")] == [
        ("client_loop_lag", "r2-b-x")
    ]
    assert summary.comparison is not None
    (verdict,) = summary.comparison.verdicts
    assert (verdict.word, verdict.ratio, verdict.reason) == ("inconclusive", None, "refused")
    assert verdict.refused is not None
    assert (verdict.refused.code, verdict.refused.values["names"]) == ("client_limited", ["b / x"])
    well = limited_run(tmp_path / "well")
    compared = {verdict.side: verdict for verdict in compare_runs([[well], [run]]).verdicts}
    assert compared["a / x"].reason == "run_variation_unknown"
    refused = compared["b / x"].refused
    assert compared["b / x"].reason == "refused" and refused is not None and refused.code == "client_limited"


def test_the_list_of_runs_marks_it(run: Path, tmp_path: Path) -> None:
    for folder in (run, limited_run(tmp_path / "well"), limited_run(tmp_path / "without")):
        if folder.name != "without":
            write_summary(folder, summarize(folder))
    done = harness("runs", "--runs", ".", cwd=tmp_path)
    status = {line.split()[0]: line.strip().split("  ")[-1] for line in done.out.splitlines()[1:]}
    assert status == {"made": "valid, CLIENT-LIMITED", "well": "valid", "without": "valid"}


def test_every_report_says_it(run: Path) -> None:
    summary, manifest = summarize(run), read_run(run)
    said = f"VALID, CLIENT-LIMITED: {SAID.format(RATES)}"
    text = markdown.render(summary, manifest)
    assert f"**{said}**" in text
    assert "| b | x | 10.03 s‡ | 44 | 4.39‡ |" in text and "‡ | 1,254 | " in text
    assert "| a | x | 10.03 s | 44 | 4.39 |" in text
    (check,) = summary.checks
    assert evidence(check.evidence) == "b / x: 10.03 s (client-limited)"
    console = Console(record=True, width=300)
    terminal.print_report(summary, manifest, run, console)
    assert said in console.export_text()
    assert f"<system-out>{said}\n" in junit.render(summary, manifest)
    rows = list(csv.DictReader(io.StringIO(export.csv_table(summary, manifest))))
    assert [row["client_limited"] for row in rows] == ["", " ".join(LIMITED)]
