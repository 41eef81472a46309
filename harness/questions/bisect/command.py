"""`harness bisect`: the build, image or value that made a server slower."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli

if TYPE_CHECKING:
    from harness.questions.bisect.bisected import BisectReport
    from harness.questions.bisect.entry_list import EntryList

DEFAULT_BUDGET_S = 7200.0
ImagesOpt = Annotated[Path | None, cli.option("FILE", "The images, one a line, the oldest first; # begins a comment.")]
ValuesOpt = Annotated[
    str | None,
    cli.option("VARIABLE=A,B,C", "Instead of images: values of a variable of the server's template, or of a --flag."),
]
GoodOpt = Annotated[str | None, cli.option("ENTRY", "One that is fast (default: the first of the list).")]
BadOpt = Annotated[str | None, cli.option("ENTRY", "One that is slow (default: the last of the list).")]
BuildOpt = Annotated[
    str | None,
    cli.option(
        "COMMAND", "Run this before an entry's first start; a pair of braces in it is the entry. No shell reads it."
    ),
]
ForOpt = Annotated[
    str | None,
    cli.option(
        "METRIC", "Compare by this one, such as ttft_p50 (default: wall time, throughput, or E2E of users).", "--for"
    ),
]
BudgetOpt = Annotated[
    str | None, cli.option("TIME", "How long it may take in all, such as 40min (default: 2h; resumed: as before).")
]
ResumeOpt = Annotated[Path | None, cli.option("RUN", "Go on with a search, after any end.")]


@cli.command(short_help="Find which build, image or value made a server slower.")
def bisect(
    scenario: cli.OptionalScenario = None,
    images: ImagesOpt = None,
    values: ValuesOpt = None,
    good: GoodOpt = None,
    bad: BadOpt = None,
    build: BuildOpt = None,
    metric: ForOpt = None,
    load: Annotated[str | None, cli.option("NAME", "Compare by this load (default: all loads together).")] = None,
    server: cli.ServerOpt = None,
    budget: BudgetOpt = None,
    model: cli.ModelOpt = None,
    resume: ResumeOpt = None,
    as_json: Annotated[bool, cli.flag("--json", "Print the answer as JSON; progress goes to stderr.")] = False,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Find which of a list of images, builds or values made a server slower (or faster).

    The good and the bad entry are started in turns until their difference is proven; then the list is halved. An entry
    that does not start is skipped. Exit code 0: the pair is found, or there is no change. 2: an end does not start. 3:
    an end gives no result. 5: not known: no change is shown, or the narrowest proven range has more entries.
    """
    from harness.base.files import is_stream
    from harness.base.units import read_duration
    from harness.questions.bisect import search as searching
    from harness.questions.check import estimate_s
    from harness.run.running_server import prepare_for

    budget_s = None if budget is None else read_duration("--budget", budget)
    progress = cli.make_progress(stderr=as_json)
    if resume is not None:
        folder = _find_bisection(resume, runs)
        with _answer_when_interrupted(lambda: folder, as_json=as_json):
            searching.resume_bisect(folder, progress, budget_s)
    elif scenario is None:
        raise HarnessError("no scenario", next_step="Give a scenario, or --resume RUN.")
    else:
        entries = _read_list(images, values, good, bad)
        experiment, question = searching.define_bisect(
            prepare_for(scenario, None, model, progress.line), _as_given(scenario), entries,
            load=load, server=server, metric=metric, budget_s=budget_s or DEFAULT_BUDGET_S,
            images=None if images is None or is_stream(images) else str(images), build=build, model=model,
        )  # fmt: skip
        started: list[Path] = []
        with _answer_when_interrupted(lambda: started[-1] if started else None, as_json=as_json):
            start_s = estimate_s(experiment.scenario, experiment.folder)
            folder = searching.bisect(experiment, question, runs, progress, started.append, start_s)
    report = _show(folder, as_json=as_json)
    exit_after_bisect(report)


def _as_given(scenario: Path) -> str:
    """The scenario for a command: its name where it ships."""
    from harness.base.files import SCENARIOS

    return scenario.stem if scenario.resolve().parent == SCENARIOS else str(scenario)


def _read_list(images: Path | None, values: str | None, good: str | None, bad: str | None) -> "EntryList":
    from harness.questions.bisect.entry_list import IMAGE, order_entries, read_images, read_values

    if (images is None) == (values is None):
        what = "no list" if images is None else "--images and --values"
        raise HarnessError(f"{what}: one list of entries is needed", next_step="Give --images FILE, or --values.")
    variable, listed = (IMAGE, read_images(images)) if images is not None else read_values(values or "")
    return order_entries(variable, listed, good, bad)


def _find_bisection(given: Path, runs: Path) -> Path:
    """The run that is meant; `last` is the newest bisection."""
    from harness.questions.bisect.record import BISECT_FILE
    from harness.records.directory import run_folders

    folders = [folder for folder in run_folders(runs) if (folder / BISECT_FILE).exists()] if runs.is_dir() else []
    return folders[-1] if str(given) == cli.LAST and folders else cli.find_run(given, runs)


def _show(folder: Path, *, as_json: bool) -> "BisectReport":
    """Print the answer of the run in a folder, by its records."""
    from harness.questions.bisect.bisected import read_bisected
    from harness.questions.bisect.page import bisect_page
    from harness.questions.joint import analyse_with_findings
    from harness.records.manifest import read_run
    from harness.report import terminal

    report = read_bisected(folder, analyse_with_findings(folder), read_run(folder))
    assert report is not None
    if as_json:
        cli.print_json(report)
    else:
        terminal.print_page(bisect_page(report), cli.console())
        cli.console().print(f"{folder / 'report.html'}")
    return report


@contextlib.contextmanager
def _answer_when_interrupted(folder_of: Callable[[], Path | None], *, as_json: bool) -> Iterator[None]:
    """Print the answer so far when the search is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        folder = folder_of()
        if folder is not None and (folder / "bisect.json").exists():
            with contextlib.suppress(HarnessError, OSError):
                _show(folder, as_json=as_json)
        raise


def exit_after_bisect(report: "BisectReport") -> None:
    """Exit with the code of a bisection."""
    if report.ended == "end_failed" and report.change is None:
        ends = [report.levels[0], report.levels[-1]]
        failed = [level.failed for level in ends if level.failed is not None]
        never = failed and all(reason.code in ("setting_not_started", "build_failed") for reason in failed)
        raise typer.Exit(ExitCode.SERVER if never else ExitCode.INVALID)
    if not report.is_answered:
        raise typer.Exit(ExitCode.INCONCLUSIVE)
