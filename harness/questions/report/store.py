"""Writes the results of a run into its directory: summary.json with all answers and findings, and report.html."""

from pathlib import Path

from harness.base.files import replace_file
from harness.numbers.summarize import Summarized, write_summary
from harness.questions.findings.decide import with_findings
from harness.questions.joint import analyse, with_answers
from harness.questions.report.page import run_html
from harness.records.manifest import Run


def write_results(folder: Path, run: Run, results: Summarized | None) -> None:
    """Write summary and report of a run; `results`: its numbers where they are known."""
    results = with_findings(analyse(folder, charted=True) if results is None else with_answers(results))
    write_summary(folder, results.summary)
    replace_file(folder / "report.html", run_html(folder, run, results.summary, results).encode())
