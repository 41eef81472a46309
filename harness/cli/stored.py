"""Commands that only read and write files: runs, reports, comparisons, filed results."""

import datetime
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from harness.base.command_line import command_line
from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli
from harness.questions.tune.command import exit_after_tune

if TYPE_CHECKING:
    from harness.base.summary import Comparison, Summary
    from harness.numbers.summarize import Summarized
    from harness.questions.capacity.decide import CapacityReport
    from harness.questions.tune.record import TuneReport
    from harness.records.manifest import Run

MAX_CHARS = 100  # of the reason why a run cannot be read


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
    from harness.numbers.gate import with_gates
    from harness.numbers.summarize import has_only_summary, read_summary, with_checks
    from harness.questions.capacity import what_if
    from harness.questions.capacity.decide import read_capacity
    from harness.questions.compare.decide import make_reference
    from harness.questions.findings.decide import with_findings
    from harness.questions.joint import analyse
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
    _say_stored([folder] if alone else [], results)
    own = (checks or []) if capacity is None else []
    counts = None if alone else analyse(folder, own, charted=output == "html")
    if base is not None and counts is not None:
        reference = make_reference(base, manifest, counts.summary, about=about, checks=own, runs=runs, results=results)
        counts = with_checks(counts, manifest, reference, own)
    counts = None if counts is None else with_findings(counts)
    if counts is not None and capacity is not None:
        counts, capacity = what_if.with_answers(counts, capacity, other_slos)
    summary, tuned = read_summary(folder) if counts is None else counts.summary, read_answered(folder)
    summary = with_gates(summary, share, provisional=provisional)
    _print_run(output, summary, manifest, folder, counts, explain=explain)
    _exit_after_report(summary, None if checks else tuned, capacity, folder, provisional)


def _print_run(
    output: str, summary: "Summary", manifest: "Run", folder: Path, counts: "Summarized | None", *, explain: bool
) -> None:
    from harness.questions.report import html_page
    from harness.questions.report.page import print_report, report_page
    from harness.report import markdown

    cli.print_as(
        output,
        summary,
        terminal=lambda: print_report(summary, manifest, folder, cli.console(), explain=explain),
        html=lambda: html_page.render_run(folder, manifest, summary, counts),
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


def _exit_after_report(
    summary: "Summary",
    tuned: "TuneReport | None",
    capacity: "CapacityReport | None",
    folder: Path,
    provisional: bool,
) -> None:
    """Exit with the code of a search of settings that has an answer, of a search for a capacity, or of the run."""
    if tuned is not None and tuned.verdict is not None:
        exit_after_tune(tuned)
        return
    if capacity is not None:
        cli.exit_after_capacity(folder, capacity)
    cli.exit_after_run(summary, provisional=provisional)


def _say_stored(folders: list[Path], results: Path) -> None:
    """Say of which runs the stored summary is used, but not of filed ones, which are meant to have nothing else."""
    if runs := [folder for folder in folders if not folder.resolve().is_relative_to(results.resolve())]:
        shown = ", ".join(map(str, runs[:3])) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
        print(f"{shown}: requests.jsonl is missing; the stored summary is used", file=sys.stderr)


def _find_or_import_run(given: Path, runs: Path) -> Path:
    from harness.imports.write import import_file

    file = given / "requests.jsonl" if given.is_dir() and not (given / "run.json").exists() else given
    if file.is_file() and file.suffix == ".jsonl":
        return import_file(file, runs, "records", again=True)
    return cli.find_run(given, runs)


AgainstOpt = Annotated[
    list[Path] | None, cli.option("RUN", "Runs of the other side; may be repeated. RUN... are then one side.")
]
AcrossOpt = Annotated[
    Literal["machine"] | None,
    cli.option(None, "Group the runs by machine; the machine is the one thing in which they differ."),
]
HistoryOpt = Annotated[
    bool, cli.flag("--history", "Compare the one RUN with all earlier runs of its scenario on its machine.")
]


@cli.command(short_help="Compare runs of the same work.")
def compare(
    run_folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run directories, ids, or NAME:N, the newest N of a scenario; the first is the baseline.",
        ),
    ],
    against: AgainstOpt = None,
    about: cli.AboutOpt = None,
    across: AcrossOpt = None,
    output: Annotated[
        Literal["terminal", "markdown", "json", "junit", "html"],
        cli.flag("--format", "What to print."),
    ] = "terminal",
    history: HistoryOpt = False,
    checks: cli.ChecksOpt = None,
    provisional: cli.ProvisionalOpt = False,
    tolerance: cli.ToleranceOpt = None,
    runs: cli.RunsDir = cli.RUNS,
    results: cli.ResultsDir = cli.RESULTS,
) -> None:
    """Compare runs of the same work: a ratio with its interval and a verdict for each row, and the differences of the
    manifests. Of runs that cannot be compared, it shows all differences. NAME:5 is a side of five runs, the newest of
    a scenario. Servers that can both start are compared in one run instead: `harness run SCENARIO --tolerance 10%`.

    Exit code 0 when a slowdown of --tolerance (10 %) or more is excluded in every row; 4 when a row is slower by that,
    the answers are worse, or a check failed; 5 when it cannot tell, as with one run a side: measure each side with
    `harness run --times 2`. A provisional "slower" fails with --provisional, or when its whole interval is beyond 25 %.
    """
    from harness.base.summary import TOLERANCE
    from harness.numbers.summarize import has_only_summary
    from harness.questions.compare.decide import compare_runs, group_by_machine
    from harness.records.manifest import read_run
    from harness.run.experiment import validate_checks

    validate_checks(checks or [])
    gate: Any = {"tolerance": cli.read_tolerance(tolerance) or TOLERANCE, "provisional": provisional}
    if history:
        _compare_with_history(run_folders, output, runs, results, gate["tolerance"])
        return
    first, second = ([cli.find_runs(run, runs) for run in side] for side in (run_folders, against or []))
    if against:
        _refuse_mixed_sides(run_folders, sys.argv[1:])
    sides = [list(itertools.chain(*side)) for side in (first, second)]
    groups = group_by_machine(sides[0]) if across else sides if second else first
    for scenario in (read_run(folder).scenario for group in groups[1:] for folder in group):
        validate_checks(checks or [], scenario.servers, scenario.loads)
    try:
        comparison = compare_runs(
            groups, about=across or about, runs=runs, results=results, checks=checks or [], **gate
        )
    except HarnessError as error:
        _suggest_about(error)
        _print_all_differences([group[0] for group in groups], output)
        raise
    _say_stored([folder for group in groups for folder in group if has_only_summary(folder)], results)
    _print_comparison(comparison, output)


def _refuse_mixed_sides(first: list[Path], words: list[str]) -> None:
    """Refuse `compare A B --against C D`, in which D would be a run of the first side."""
    after: list[str] = []  # arguments that follow the value of --against, of which there is one
    given: list[str] = []  # all that are meant for it
    for number, word in enumerate(words):
        if word == "--against" or word.startswith("--against="):
            start = number + (2 if word == "--against" else 1)
            more = list(itertools.takewhile(lambda each: not each.startswith("-"), words[start:]))
            given += [word.partition("=")[2] or words[start - 1], *more]
            after += more
    if after and len(after) < len(first):  # else the options come first: compare --against C A B
        raise HarnessError(
            f"--against takes one run, and {', '.join(after)} was taken as a run of the first side",
            next_step=f"Write {command_line(*(word for run in given for word in ('--against', run)))}.",
        )


def _suggest_about(error: HarnessError) -> None:
    """Add the command that compares runs which differ in one thing."""
    from harness.records.manifest import UnlikeError

    if isinstance(error, UnlikeError) and error.about is not None:
        command = command_line("harness", sys.argv[1], "--about", error.about, *sys.argv[2:])  # `--` may follow
        error.next_step = f"If the comparison is about just that: {command}"


def _print_comparison(comparison: "Comparison", output: str) -> None:
    """Print a comparison, and exit with its code."""
    from harness.questions.compare.page import comparison_page, comparison_xml

    page = comparison_page(comparison)
    cli.print_page_as(output, comparison, page, "Comparison", junit=lambda: comparison_xml(comparison))
    if any(answers.word == "worse" for answers in comparison.same_answers):
        raise typer.Exit(ExitCode.FAILED)
    cli.exit_after_verdicts(comparison, comparison.checks)
    cli.exit_after_checks(comparison.checks)
    cli.exit_after_answers(comparison.same_answers)


def _print_all_differences(folders: list[Path], output: str) -> None:
    """Print in what the manifests of runs that are not compared differ."""
    from harness.numbers.comparable import run_differences
    from harness.questions.compare.page import differences as difference_page
    from harness.records.manifest import read_run

    manifests = [read_run(folder) for folder in folders]
    differences, sides = run_differences(manifests), [run.id for run in manifests]
    if output == "junit" or not differences:
        return
    page = difference_page(differences, sides)
    cli.print_page_as(output, {"sides": sides, "differences": differences}, page, "Differences")


def _compare_with_history(run_folders: list[Path], output: str, runs: Path, results: Path, tolerance: float) -> None:
    from harness.numbers.gate import gate_code
    from harness.questions.history import page as pages
    from harness.questions.history.decide import read_history

    if len(run_folders) != 1:
        raise HarnessError(
            f"--history: needs exactly one run (got {len(run_folders)})", next_step="harness compare --history RUN"
        )
    history = read_history(cli.find_run(run_folders[0], runs), runs, results, tolerance)
    _say_stored([folder for name in history.without_records if (folder := runs / name).exists()], results)
    cli.print_page_as(
        output,
        history,
        pages.history_page(history),
        "History",
        junit=lambda: pages.history_xml(history),
        html=lambda: pages.history_html(history),
    )
    if code := gate_code(series.gate for series in history.series):
        raise typer.Exit(code)


@cli.command(short_help="Predict how long a number of items takes.")
def plan(
    run_folder: cli.RunArg,
    items: Annotated[str, cli.option("N", "How many items, such as 500000 or 500k; one request is one item.")],
    deadline: Annotated[str | None, cli.option("TIME", "Until when it must be done, such as 8h or 90min.")] = None,
    price: Annotated[str | None, cli.option("PRICE", "Price of energy, such as 0.30/kWh: adds the cost.")] = None,
    as_json: cli.JsonOpt = False,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Predict time, energy and cost of N items on the machine of a finished run, each with a 90 % interval.

    With --deadline exit code 0 when a row meets it, else 4 when the fastest row misses it, and 5 when the deadline is
    inside its interval or no interval is known, as with too few requests.
    """
    from harness.base.units import read_count, read_duration
    from harness.questions.plan.decide import forecast, read_price
    from harness.questions.plan.page import forecast_page
    from harness.report.terminal import print_page

    predicted = forecast(
        cli.find_run(run_folder, runs),
        read_count("--items", items),
        deadline_s=None if deadline is None else read_duration("--deadline", deadline),
        price_per_kwh=None if price is None else read_price(price),
    )
    if as_json:
        cli.print_json(predicted)
    else:
        print_page(forecast_page(predicted), cli.console())
    if predicted.rows[0].deadline == "missed":
        raise typer.Exit(ExitCode.FAILED)
    if predicted.rows[0].deadline == "inconclusive":
        raise typer.Exit(ExitCode.INCONCLUSIVE)


def _check_export_target(given: Path) -> Path:
    from harness.report.export import refuse_ending

    refuse_ending(given)
    return given


@cli.command(short_help="Write a run's records as Parquet or CSV.")
def export(
    run_folder: cli.RunArg,
    to: Annotated[
        Path,
        cli.option(
            "FILE",
            "A file that ends in .parquet or .csv.",
            callback=_check_export_target,
        ),
    ],
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Write a run's records for other tools: one row for each request."""
    from harness.base.units import count
    from harness.report.export import export as export_records

    folder = cli.find_run(run_folder, runs)
    written = export_records(folder, to)
    print(f"{to}: {written.records:,} records")
    if written.damaged:
        print(f"{count(written.damaged, 'line')} of requests.jsonl left out: not readable", file=sys.stderr)


@cli.command("import", short_help="Import results of other tools.")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files that another tool wrote; each a run.")],
    form: Annotated[
        str | None, cli.option("FORMAT", "The tool that wrote it (default: as the file shows).", "--format")
    ] = None,
    machine: Annotated[
        str | None, cli.option("NAME", "Name of the machine that was measured; files do not say it.")
    ] = None,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Import results of other tools as runs, marked with their origin, for report, runs and compare."""
    from harness.imports.write import import_file

    failed = False
    for file in files:
        try:
            print(import_file(file, runs, form, machine))
        except HarnessError as error:  # costs the other files nothing
            cli.print_error(error)
            failed = True
    if failed:
        raise typer.Exit(ExitCode.USAGE)


def _list_runs(runs: Path) -> list[dict[str, Any]]:
    """The runs in a folder for people and programs. `error`: why a run.json cannot be read; then there is no more.

    `status` is as in run.json, or `killed`: it says `running`, and its process is gone.
    """
    from harness.base.process import owner_is_gone
    from harness.numbers.summarize import read_summary
    from harness.records.directory import list_runs

    if runs.exists() and not runs.is_dir():
        raise HarnessError(f"--runs: {runs} is not a folder", next_step="Name the folder that holds the runs.")
    listed: list[dict[str, Any]] = []
    for folder, run in list_runs(runs):
        if isinstance(run, HarnessError):
            listed.append({"run": folder.name, "status": None, "error": run.what.removeprefix(f"{folder}/")})
            continue
        try:
            limited = any(row.client_limited for row in read_summary(folder).rows)
        except HarnessError:  # it has no summary yet
            limited = False
        killed = run.status == "running" and run.owner and owner_is_gone(run.owner)
        listed.append({
            "run": folder.name, "status": "killed" if killed else run.status, "started_wall_s": run.started_wall_s,
            "scenario": run.scenario_name, "cells": len(run.ran), "planned": len(run.order),
            "client_limited": limited, "simulated": run.simulated, "reasons": run.reasons,
        })  # fmt: skip
    return listed


def _runs_table(listed: list[dict[str, Any]]) -> Table:
    from harness.base.summary import sentence

    table = Table(box=None, pad_edge=False)
    for column in ("run", "started", "cells", "status"):  # the run's id has the scenario's name
        table.add_column(column, no_wrap=column in ("started", "cells"), overflow="fold")
    table.columns[0].min_width = min(26, max(len(run["run"]) for run in listed))
    for run in listed:
        if "error" in run:
            table.add_row(run["run"], "", "", f"unreadable: {run['error']}"[:MAX_CHARS])
            continue
        limited, simulated = ", load generator at its limit" * run["client_limited"], " (simulated)" * run["simulated"]
        reason = "".join(f": {sentence(reason)}" for reason in run["reasons"][:1])
        status = f"{run['status']}{limited}{simulated}{reason}"
        started = datetime.datetime.fromtimestamp(run["started_wall_s"]).strftime("%Y-%m-%d %H:%M")
        table.add_row(run["run"], started, f"{run['cells']}/{run['planned']}", status)
    return table


@cli.command("list", short_help="List the scenarios that ship and the runs.")
def list_(
    what: Annotated[
        Literal["scenarios", "runs"] | None, typer.Argument(metavar="WHAT", help="Only `scenarios`, or only `runs`.")
    ] = None,
    runs: cli.RunsDir = cli.RUNS,
    as_json: cli.JsonOpt = False,
) -> None:
    """List the scenarios that ship, each with its question, and the runs with their verdict, the newest last."""
    lists: dict[str, Any] = {}
    if what != "runs":
        lists["scenarios"] = _shipped_scenarios()
    if what != "scenarios":
        lists["runs"] = _list_runs(runs)
    if as_json:
        cli.print_json(lists if what is None else lists[what])
        return
    console = cli.console()
    for row in lists.get("scenarios", ()):
        console.print(f"{row['path']}\n  {row['question']}", soft_wrap=True)
    if what is None:
        console.print()
    if lists.get("runs"):
        console.print(_runs_table(lists["runs"]))
    elif "runs" in lists:
        console.print(f"no runs in {runs}; `harness run scenarios/first-look.yaml` makes one")


def _shipped_scenarios() -> list[dict[str, str]]:
    from harness.base.files import ROOT, SCENARIOS
    from harness.scenario.file import load_scenario

    shipped = [(path, " ".join(load_scenario(path).question.split())) for path in sorted(SCENARIOS.glob("*.yaml"))]
    return [{"name": path.stem, "path": str(path.relative_to(ROOT)), "question": text} for path, text in shipped]


@cli.command(short_help="Rank the results of machines, or file runs as results.")
def results(
    action: Annotated[
        Literal["add"] | None, typer.Argument(metavar="add", help="File the runs by machine and scenario.")
    ] = None,
    run_folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run directories or ids to file.", autocompletion=cli.complete_run),
    ] = None,
    records: Annotated[
        bool, cli.flag("--records", "With add: also the records of the runs, as requests.jsonl.gz.")
    ] = False,
    output: Annotated[
        Literal["terminal", "markdown", "json", "html"], cli.flag("--format", "What to print.")
    ] = "terminal",
    runs: cli.RunsDir = cli.RUNS,
    results: cli.ResultsDir = cli.RESULTS,
) -> None:
    """Rank the filed results, machines by scenarios. `harness results add RUN` files VALID runs.

    A filed run is plain files that are small enough for git.
    """
    from harness.base.files import RESULTS as SHIPPED
    from harness.questions import results as boards

    if action == "add":
        if not run_folders:
            raise HarnessError("add: no run is given", next_step="harness results add RUN")
        for folder in [cli.find_run(given, runs) for given in run_folders]:
            where, names = boards.add_result(folder, results, records=records)
            print(f"{where}: {', '.join(names)}")
        return
    if results != cli.RESULTS and not results.is_dir():
        raise HarnessError(
            f"--results: there is no folder {results}", next_step="`harness results add RUN` files a run, and makes it."
        )
    board = boards.collect_board(results, SHIPPED)
    cli.print_page_as(output, board, boards.board_page(board), "Leaderboard")
