"""The command `harness compare`, with `--history` and `--across machine`."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.base.command_line import command_line
from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli

if TYPE_CHECKING:
    from harness.numbers.comparison import Comparison

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
    from harness.numbers.comparison import TOLERANCE
    from harness.numbers.summarize import has_only_summary
    from harness.questions.compare.sides import compare_runs, group_by_machine
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
    cli.say_stored([folder for group in groups for folder in group if has_only_summary(folder)], results)
    _print_comparison(comparison, output)


def _refuse_mixed_sides(first: list[Path], words: list[str]) -> None:
    """Refuse `compare A B --against C D`, in which D would be a run of the first side."""
    after: list[str] = []  # arguments that follow the value of --against, of which there is one
    given: list[str] = []  # all that are meant for it
    for number, word in enumerate(words):
        if word == "--against" or word.startswith("--against="):
            start = number + (2 if word == "--against" else 1)
            more = list(itertools.takewhile(lambda argument: not argument.startswith("-"), words[start:]))
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
        given = _without_about(sys.argv[2:])
        command = command_line("harness", sys.argv[1], "--about", error.about, *given)  # `--` may follow
        error.next_step = f"If the comparison is about just that: {command}"


def _without_about(words: Sequence[str]) -> list[str]:
    """The words of a command line without an `--about` that was not enough."""
    end = words.index("--") if "--" in words else len(words)
    kept: list[str] = []
    for place, word in enumerate(words):
        is_value = 0 < place <= end and words[place - 1] == "--about"
        if place >= end or not (is_value or word == "--about" or word.startswith("--about=")):
            kept.append(word)
    return kept


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
    from harness.questions.history.earlier_runs import read_history

    if len(run_folders) != 1:
        raise HarnessError(
            f"--history: needs exactly one run (got {len(run_folders)})", next_step="harness compare --history RUN"
        )
    history = read_history(cli.find_run(run_folders[0], runs), runs, results, tolerance)
    cli.say_stored([folder for name in history.without_records if (folder := runs / name).exists()], results)
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
