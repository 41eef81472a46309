"""The command line. Each command is a few lines; the work is done by the module that it names."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from harness import __version__
from harness.errors import ExitCode, HarnessError, RunError, ScenarioError, did_you_mean

if TYPE_CHECKING:
    from harness.summary import Summary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Load testing of LLM servers on AMD hardware: from a scenario file to a verdict.",
    epilog="Exit codes: 0 fine; 1 usage or scenario error; 2 a server did not become ready; 3 the run is INVALID; "
    "4 a check failed or a comparison found a regression; 130 interrupted.",
)

ScenarioArg = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="A scenario file, or the name of one that ships.")
]
RunsDir = Annotated[Path, typer.Option("--runs", help="Where run directories are kept.", envvar="HARNESS_RUNS")]
ServerOpt = Annotated[
    str | None, typer.Option("--server", help="Which of the scenario's servers (default: the first).")
]
ChecksOpt = Annotated[
    list[str] | None,
    typer.Option("--check", metavar="CHECK", help="A check beside the scenario's; may be repeated."),
]
BaselineOpt = Annotated[
    Path | None,
    typer.Option("--baseline", metavar="RUN", help="The run that checks call the baseline (default: the row)."),
]
AboutOpt = Annotated[
    str | None, typer.Option("--about", metavar="KEY", help="The one manifest key in which the sides may differ.")
]
UrlOpt = Annotated[
    str | None, typer.Option("--url", help="Use a server that already runs, such as http://127.0.0.1:8000.")
]
ModelOpt = Annotated[str | None, typer.Option("--model", help="Use this model instead of the scenario's.")]
ResultsDir = Annotated[
    Path, typer.Option("--results", help="Where published runs and noise floors are kept.", envvar="HARNESS_RESULTS")
]
RUNS = Path("runs")
RESULTS = Path("results")


class Output(Console):
    """The standard output."""

    def on_broken_pipe(self) -> None:
        """A run goes on when its reader, such as `head`, has seen enough; rich would exit here."""
        mute()


def mute() -> None:
    """Nothing more may be written to the standard output, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    # Wide enough for the table when the output is a file or a pipe, which has no width of its own.
    return Output() if sys.stdout.isatty() else Output(width=160, no_color=True)


def scenario_path(given: Path) -> Path:
    """The path of a scenario given by path or by the name of one that ships. Raises HarnessError."""
    from harness.paths import SCENARIOS

    if given.exists():
        return given
    shipped = {path.stem: path for path in SCENARIOS.glob("*.yaml")}
    if str(given) in shipped:
        return shipped[str(given)]
    raise HarnessError(
        f"{given}: there is no such scenario; {did_you_mean(given.stem, shipped)}",
        next_step="Give a file, or the name of a scenario that ships: `harness scenarios` lists them.",
    )


@app.command(short_help="Start the servers, load them, take everything down, report.")
def run(
    scenario: ScenarioArg,
    url: UrlOpt = None,
    metrics_url: Annotated[
        str | None, typer.Option("--metrics-url", help="With --url: where its metrics are (default: URL/metrics).")
    ] = None,
    model: ModelOpt = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Override the scenario's repeats.")] = None,
    checks: ChecksOpt = None,
    baseline: BaselineOpt = None,
    about: AboutOpt = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write checks and verdicts as JUnit XML.")
    ] = None,
    runs: RunsDir = RUNS,
    results: ResultsDir = RESULTS,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve Locust's web UI instead of measuring; same as `harness live`.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the columns below the table.")] = False,
) -> None:
    """Start the scenario's servers, load them, take everything down, and report."""
    from harness import experiment as experiments
    from harness.floors import adopt_floor
    from harness.manifest import read_run
    from harness.process import sigterm_interrupts
    from harness.progress import Progress
    from harness.reference import reference_to, write_reference
    from harness.run import run as run_experiment

    if ui:
        live(scenario, url=url, model=model, runs=runs)
        return
    target = experiments.Target(url, metrics_url) if url is not None else None
    experiment = experiments.prepare(scenario_path(scenario), target, model, repeats, checks or [])
    base = None if baseline is None else find_baseline(baseline, runs)
    with junit_of_failure(junit, scenario.stem), sigterm_interrupts():
        folder = run_experiment(experiment, runs, Progress(console()))
    adopt_floor(folder, read_run(folder), results)
    if base is not None:
        write_reference(folder, reference_to(base, read_run(folder), about=about))
    show(folder, explain=explain, junit=junit)


@app.command(short_help="Serve Locust's web UI for a scenario's server.")
def live(
    scenario: ScenarioArg,
    server: ServerOpt = None,
    load: Annotated[
        str | None, typer.Option("--load", help="Which of the scenario's loads (default: the first).")
    ] = None,
    url: UrlOpt = None,
    model: ModelOpt = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the web UI on 127.0.0.1.")] = 8089,
    runs: RunsDir = RUNS,
) -> None:
    """Bring a scenario's server up and serve Locust's web UI for it; Ctrl-C takes everything down."""
    from harness import experiment as experiments
    from harness import live as living
    from harness.process import sigterm_interrupts
    from harness.progress import Progress

    target = experiments.Target(url, None) if url is not None else None
    experiment = experiments.prepare(scenario_path(scenario), target, model)
    with sigterm_interrupts():
        living.live(experiment, server, load, port, runs, Progress(console()))


@app.command(short_help="Validate a scenario and show its plan.")
def check(scenario: ScenarioArg) -> None:
    """Validate a scenario and show its plan, without running anything."""
    from harness import experiment as experiments
    from harness.preview import show_plan

    show_plan(experiments.prepare(scenario_path(scenario)), console())


@app.command(short_help="Print the Compose file that would be run.")
def compose(scenario: ScenarioArg, server: ServerOpt = None) -> None:
    """Print the Compose file that the harness would run, for `docker compose up`."""
    from harness import experiment as experiments
    from harness.serve import compose_document

    experiment = experiments.prepare(scenario_path(scenario))
    print(compose_document(experiment.scenario, experiments.server_name(experiment, server)), end="")


@app.command(short_help="Show a run again, from its files.")
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the id of a run.")],
    output: Annotated[
        Literal["terminal", "markdown", "json", "html", "junit", "csv", "openmetrics"],
        typer.Option("--format", help="What to write."),
    ] = "terminal",
    checks: ChecksOpt = None,
    baseline: BaselineOpt = None,
    about: AboutOpt = None,
    runs: RunsDir = RUNS,
    results: ResultsDir = RESULTS,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the columns below the table.")] = False,
) -> None:
    """Show a run again, from its files: summary and HTML page are written anew.

    With --check or --baseline the run is judged by them once more, and its directory stays as it is.
    """
    from harness.experiment import refuse_misplaced
    from harness.floors import adopt_floor
    from harness.history import find_run
    from harness.manifest import read_run
    from harness.reference import reference_to
    from harness.report import html, junit, markdown, openmetrics, rows_csv, terminal
    from harness.summarize import encode_summary, summarize, write_summary

    folder = find_run(run_folder, runs)
    manifest = read_run(folder)
    adopt_floor(folder, manifest, results)
    refuse_misplaced(checks or [], manifest.scenario)
    base = None if baseline is None else find_baseline(baseline, runs)
    reference = None if base is None else reference_to(base, manifest, about=about, checks=checks or [])
    summary = summarize(folder, checks or [], reference)
    if not checks and reference is None:
        write_summary(folder, summary)
    elif output == "html":
        raise HarnessError("--format html: the page shows a run by its own checks; leave out --check and --baseline")
    if output == "terminal":
        if not checks and reference is None:
            html.write_report(folder)
        terminal.print_report(summary, manifest, folder, console(), explain=explain)
    elif output == "html":
        print(html.write_report(folder))
    elif output == "json":
        print(encode_summary(summary))
    else:
        render = {"markdown": markdown, "junit": junit, "csv": rows_csv, "openmetrics": openmetrics}[output].render
        print(render(summary, manifest), end="" if output != "markdown" else "\n")
    end_as(summary)


@app.command(short_help="Compare runs of the same work.")
def compare(
    run_folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories or ids; the first is the baseline.")
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", help="A run of the other side; may be repeated. RUN... are then one group."),
    ] = None,
    about: AboutOpt = None,
    across: Annotated[
        Literal["machine"] | None,
        typer.Option("--across", help="Group the runs by machine; the machine is the one thing in which they differ."),
    ] = None,
    output: Annotated[
        Literal["terminal", "markdown", "json", "junit"], typer.Option("--format", help="What to print.")
    ] = "terminal",
    runs: RunsDir = RUNS,
    results: ResultsDir = RESULTS,
) -> None:
    """Compare runs of the same work: a ratio with its interval and a verdict for each row.

    Exit code 4 when a side is slower than the baseline.
    """
    import msgspec

    from harness.compare import by_machine, compare_runs
    from harness.history import find_run
    from harness.report import junit
    from harness.report.comparison import markdown, print_comparison

    first = [find_run(given, runs) for given in run_folders]
    second = [find_run(given, runs) for given in against or []]
    if across and (second or about):
        raise HarnessError("--across: the machines are the sides and what it is about; leave out --against and --about")
    groups = by_machine(first) if across else [first, second] if second else [[folder] for folder in first]
    comparison = compare_runs(groups, about=across or about, results=results)
    if output == "terminal":
        print_comparison(comparison, console())
    elif output == "junit":
        print(junit.of_comparison(comparison), end="")
    else:
        print(markdown(comparison) if output == "markdown" else msgspec.json.encode(comparison).decode())
    if any(verdict.word == "slower" for verdict in comparison.verdicts):
        raise typer.Exit(ExitCode.FAILED)


@app.command(short_help="Show in what two runs differ.")
def diff(
    one: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the id of a run.")],
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another.")],
    output: Annotated[
        Literal["terminal", "markdown", "json"], typer.Option("--format", help="What to print.")
    ] = "terminal",
    runs: RunsDir = RUNS,
) -> None:
    """Show in what the manifests of two runs differ; what is equal is not shown, and neither is what chance chose."""
    import msgspec

    from harness.differences import differences_of
    from harness.history import find_run
    from harness.manifest import read_run
    from harness.report.differing import markdown, print_differences

    both = [read_run(find_run(given, runs)) for given in (one, other)]
    found, sides = differences_of(both), [run.id for run in both]
    if output == "terminal":
        print_differences(found, sides, console())
    elif output == "markdown":
        print(markdown(found, sides))
    else:
        print(msgspec.json.encode({"sides": sides, "differences": found}).decode())


@app.command(short_help="Measure the noise floor of this machine.")
def noise(
    scenario: ScenarioArg,
    server: ServerOpt = None,
    repeats: Annotated[int | None, typer.Option(min=2, help="Override the scenario's repeats.")] = None,
    url: UrlOpt = None,
    model: ModelOpt = None,
    runs: RunsDir = RUNS,
    results: ResultsDir = RESULTS,
) -> None:
    """Run a scenario with one server under two names, and store how far they differ: the noise floor of this machine.

    It is used by every later run, report and comparison of the same machine and scenario.
    """
    from harness import experiment as experiments
    from harness import noise as noises
    from harness.floors import read_floor
    from harness.process import sigterm_interrupts
    from harness.progress import Progress

    target = experiments.Target(url, None) if url is not None else None
    experiment = experiments.prepare(scenario_path(scenario), target, model, repeats)
    with sigterm_interrupts():
        folder, stored = noises.noise(experiment, server, runs, results, Progress(console()))
    floor = read_floor(stored)
    assert floor is not None
    print("\n".join([f"Noise floor of {floor.machine}, run {folder}:", *noises.in_words(floor), f"Stored: {stored}"]))


@app.command(short_help="File a VALID run by machine and scenario.")
def publish(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the id of a run.")],
    records: Annotated[
        bool, typer.Option("--records", help="Also its records, one a request, as requests.jsonl.gz.")
    ] = False,
    runs: RunsDir = RUNS,
    results: ResultsDir = RESULTS,
) -> None:
    """File a VALID run by machine and scenario, as plain files that are small enough for git."""
    from harness.floors import adopt_floor
    from harness.history import find_run
    from harness.manifest import read_run
    from harness.publish import publish as publish_run

    folder = find_run(run_folder, runs)
    adopt_floor(folder, read_run(folder), results)
    where, changed = publish_run(folder, results, records=records)
    print(f"{where}: {', '.join(changed) if changed else 'published already, nothing has changed'}")


@app.command(short_help="Rank what is published, as one page.")
def leaderboard(
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="The HTML page (default: leaderboard.html in --results)."),
    ] = None,
    results: ResultsDir = RESULTS,
) -> None:
    """Rank what is published: machines by scenarios, as one HTML page and as Markdown beside it."""
    from harness.board import collect
    from harness.paths import RESULTS as SHIPPED
    from harness.report.board import write_board

    for path in write_board(collect(results, SHIPPED), output or results / "leaderboard.html"):
        print(path)


@app.command(short_help="Write a run's records as Parquet or CSV.")
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the id of a run.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Where to: a file that ends in .parquet or .csv.")],
    runs: RunsDir = RUNS,
) -> None:
    """Write a run's records for other tools: one row a request, with chunk times."""
    from harness.export import export as export_records
    from harness.history import find_run

    written = export_records(find_run(run_folder, runs), to)
    print(f"{to}: {written.records:,} records")
    if written.damaged:
        lines = "1 line" if written.damaged == 1 else f"{written.damaged:,} lines"
        print(f"{lines} of requests.jsonl left out: not readable", file=sys.stderr)


@app.command("import", short_help="Make runs of what other tools wrote.")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files that another tool wrote; each a run.")],
    form: Annotated[
        str | None,
        typer.Option("--format", help="vllm, guidellm, aiperf, genai-bench or lemonade (default: the file shows it)."),
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Name of the machine that was measured; files do not say it.")
    ] = None,
    runs: RunsDir = RUNS,
) -> None:
    """Make runs of what other tools wrote, marked with their origin, for report, runs and compare."""
    from harness.imports.write import import_file

    for file in files:
        print(import_file(file, runs, form, machine))


@app.command(short_help="List the runs.")
def runs(runs: RunsDir = RUNS) -> None:
    """List the runs with their scenario, verdict and when they ran."""
    from harness.history import show_runs

    show_runs(runs, console())


@app.command(short_help="List the scenarios that ship.")
def scenarios() -> None:
    """List the scenarios that ship, each with its question."""
    from harness.history import show_scenarios

    show_scenarios(console())


@app.command(short_help="Remove what a killed run left behind.")
def clean(
    everything: Annotated[
        bool, typer.Option("--all", help="Also what a harness that still lives has started.")
    ] = False,
    caches: Annotated[
        bool, typer.Option("--caches", help="Also the cache volumes (models, compiled kernels).")
    ] = False,
) -> None:
    """Remove what a killed run left behind: containers, networks and volumes that carry our label, nothing else."""
    from harness.serve import sweep_all

    removed = sweep_all(everything=everything, caches=caches)
    print("\n".join(f"removed {item}" for item in removed) if removed else "nothing of ours was left behind")


def find_baseline(given: Path, runs: Path) -> Path:
    """The directory of a run that may be a baseline, before anything is measured. Raises HarnessError."""
    from harness.history import find_run
    from harness.reference import usable_baseline

    folder = find_run(given, runs)
    usable_baseline(folder)
    return folder


@contextmanager
def junit_of_failure(path: Path | None, scenario: str) -> Iterator[None]:
    """What is in the JUnit file until the run has its summary: an error, also when nothing can be written any more."""
    from harness.report import junit

    if path is not None:
        junit.write(path, junit.of_error(scenario, RunError("the run did not end")))
    try:
        yield
    except HarnessError as error:
        if path is not None:
            junit.write(path, junit.of_error(scenario, error))
        raise


def show(folder: Path, *, explain: bool = False, junit: Path | None = None) -> None:
    """Print a run's table and verdicts, write its summary and page, and end with the run's exit code."""
    from harness.manifest import read_run
    from harness.report import html, terminal
    from harness.report import junit as junit_xml
    from harness.summarize import summarize, write_summary

    manifest, summary = read_run(folder), summarize(folder)
    full: OSError | None = None
    try:
        write_summary(folder, summary)
        html.write_report(folder)
    except OSError as error:  # such as a full disk, which must not cost the person the table
        full = error
    terminal.print_report(summary, manifest, folder, console(), explain=explain)
    if full is not None:
        raise HarnessError(
            f"{folder}: the page and the summary cannot be written ({full.strerror})",
            next_step=f"The records are there. Make room, then: harness report {folder}",
        )
    if junit is not None:
        junit_xml.write(junit, junit_xml.render(summary, manifest))
    end_as(summary)


def end_as(summary: "Summary") -> None:
    """End with the exit code of a run."""
    if not summary.valid:
        raise typer.Exit(ExitCode.INVALID)
    if not all(result.passed for result in summary.checks):
        raise typer.Exit(ExitCode.FAILED)


def version(value: bool) -> None:
    if value:
        print(f"amd-llm-load {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def tell(error: HarnessError) -> None:
    """An error as a person reads it: the sentence, the evidence, what to do next."""
    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    stderr.print(f"error: {error.what}", style="bold red", markup=False)
    if error.detail:
        indent = "" if isinstance(error, ScenarioError) else "  | "
        stderr.print("\n".join(indent + line for line in error.detail.splitlines()), markup=False)
    if error.next_step:
        stderr.print(f"next: {error.next_step}", markup=False)


def tell_usage(error: typer.TyperException) -> None:
    """A command line that cannot be understood."""
    context = getattr(error, "ctx", None)
    said = error.format_message()
    if said.startswith("Usage:"):  # no command at all: the message is the help
        print(said, file=sys.stderr)
        return
    path = context.command_path if context is not None else "harness"
    tell(HarnessError(said[:1].lower() + said[1:].rstrip("."), next_step=f"`{path} --help` shows what there is."))


def main() -> None:
    """Run a command; every way it can end has its exit code (see `ExitCode`)."""
    # Invoked without Typer's own `main`, which has other exit codes and other words for some of these ends.
    command = typer.main.get_command(app)
    code: int = ExitCode.OK
    try:
        with command.make_context("harness", sys.argv[1:]) as context:
            command.invoke(context)
            sys.stdout.flush()
    except typer.Exit as end:
        code = end.exit_code
    except HarnessError as error:
        tell(error)
        code = error.exit_code
    except typer.TyperException as error:
        tell_usage(error)
        code = ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted; everything that was started has been taken down", file=sys.stderr)
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        mute()
    except OSError as error:
        mute()  # what is left in its buffer would fail again
        tell(HarnessError(f"{error.filename or 'the output'}: {error.strerror or error}"))
        code = ExitCode.USAGE
    except Exception as error:
        if os.environ.get("HARNESS_DEBUG"):
            traceback.print_exc()
        print(
            f"error: a defect of the harness itself: {type(error).__name__}: {error}\n"
            "next: please report it, with what HARNESS_DEBUG=1 prints in addition.",
            file=sys.stderr,
        )
        code = ExitCode.USAGE
    sys.exit(code)
