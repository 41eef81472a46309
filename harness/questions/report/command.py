"""The command `harness report`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli import common as cli
from harness.questions.bisect.command import exit_after_bisect
from harness.questions.tune.command import exit_after_tune

if TYPE_CHECKING:
    from harness.numbers.summarize import Summarized
    from harness.numbers.summary import Summary
    from harness.questions.capacity.record import CapacityReport
    from harness.questions.tune.record import TuneReport
    from harness.records.manifest import Run


@cli.command(short_help="Show a run again, from its files.")
def report(
    run_folder: cli.RunArg,
    output: Annotated[
        Literal["terminal", "markdown", "json", "html", "junit", "csv"],
        cli.flag("--format", "What to write."),
    ] = "terminal",
    checks: cli.ChecksOpt = None,
    baseline: cli.BaselineOpt = None,
    about: cli.AboutOpt = None,
    provisional: cli.ProvisionalOpt = False,
    tolerance: cli.ToleranceOpt = None,
    runs: cli.RunsDir = cli.RUNS,
    results: cli.ResultsDir = cli.RESULTS,
    explain: cli.ExplainOpt = False,
) -> None:
    """Show a run again, from its files, by the formulas of this version. Its directory stays as it is.

    RUN may be the file of `locust --records`, or a folder with its requests.jsonl: a run directory is made of it.
    With --check or --baseline the run is checked by them once more, with --tolerance its servers are compared by it. Of
    a capacity search, --check answers for other SLOs from the stored requests.
    """
    from harness.numbers.summarize import has_only_summary, read_summary, with_checks
    from harness.questions.capacity import what_if
    from harness.questions.capacity.record import read_capacity
    from harness.questions.compare.sides import make_reference
    from harness.questions.findings.decide import with_findings
    from harness.questions.joint import analyse
    from harness.questions.report.decide import decided
    from harness.questions.tune.proof import read_answered
    from harness.records.manifest import read_run
    from harness.run.experiment import validate_checks

    base = None if baseline is None else cli.find_baseline(baseline, runs)
    folder = _find_or_import_run(run_folder, runs)
    manifest, share = read_run(folder), cli.read_tolerance(tolerance)
    cli.refuse_tolerance(manifest.scenario, share)
    capacity = read_capacity(folder)
    if capacity is None:
        validate_checks(checks or [], manifest.scenario.servers, manifest.scenario.loads)
    other_slos = [] if capacity is None else what_if.parse(checks or [], capacity)
    alone = has_only_summary(folder) and not checks and base is None  # a filed run
    cli.say_stored([folder] if alone else [], results)
    own = (checks or []) if capacity is None else []
    counts = None if alone else analyse(folder, own, charted=output == "html")
    if base is not None and counts is not None:
        reference = make_reference(base, manifest, counts.summary, about=about, checks=own, runs=runs, results=results)
        counts = with_checks(counts, manifest, reference, own)
    counts = None if counts is None else with_findings(counts)
    if counts is not None and capacity is not None:
        counts, capacity = what_if.with_answers(counts, capacity, other_slos)
    summary, tuned = read_summary(folder) if counts is None else counts.summary, read_answered(folder)
    summary = decided(summary, share, provisional=provisional)
    _print_run(output, summary, manifest, folder, counts, explain=explain)
    if not checks:
        _exit_after_bisection(summary, manifest, folder)
    _exit_after_report(summary, None if checks else tuned, capacity, folder)


def _print_run(
    output: str, summary: "Summary", manifest: "Run", folder: Path, counts: "Summarized | None", *, explain: bool
) -> None:
    from harness.questions.report.page import print_report, report_page, run_html
    from harness.report import markdown

    cli.print_as(
        output,
        summary,
        terminal=lambda: print_report(summary, manifest, folder, cli.console(), explain=explain),
        html=lambda: run_html(folder, manifest, summary, counts),
        markdown=lambda: markdown.render(report_page(summary, manifest, folder)),
        **_as_files(summary, manifest),
    )


def _as_files(summary: "Summary", manifest: "Run") -> dict[str, Callable[[], str]]:
    """The formats of a run for other programs."""
    from harness.questions.report import junit_cases
    from harness.report import export

    return {
        "junit": lambda: junit_cases.render(summary, manifest),
        "csv": lambda: export.csv_table(summary, manifest),
    }


def _exit_after_bisection(summary: "Summary", manifest: "Run", folder: Path) -> None:
    """Exit with the code of a bisection, by its answer so far."""
    from harness.questions.bisect.bisected import read_bisected

    bisection = read_bisected(folder, summary, manifest)
    if bisection is not None:
        exit_after_bisect(bisection)
        raise typer.Exit


def _exit_after_report(
    summary: "Summary",
    tuned: "TuneReport | None",
    capacity: "CapacityReport | None",
    folder: Path,
) -> None:
    """Exit with the code of a search of settings that has an answer, of a search for a capacity, or of the run."""
    if tuned is not None and tuned.verdict is not None:
        exit_after_tune(tuned)
        return
    if capacity is not None:
        cli.exit_after_capacity(folder, capacity)
    cli.exit_after_run(summary)


def _find_or_import_run(given: Path, runs: Path) -> Path:
    from harness.imports.write import import_file

    file = given / "requests.jsonl" if given.is_dir() and not (given / "run.json").exists() else given
    if file.is_file() and file.suffix == ".jsonl":
        return import_file(file, runs, "records", reuse=True)
    return cli.find_run(given, runs)
