"""Shared parts of the commands: the app, common options, the console, errors of the command line."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from typer.core import TyperCommand

from harness.errors import ExitCode, HarnessError, Mistakes, RunError, did_you_mean
from harness.redact import printable

# Options that mean nothing without another, and those that it does not go with, by parameter. What the other command
# does not have does not matter to it.
NEEDS = {
    "metrics_url": "url",
    "ca": "url",
    "bind": "workers",
    "about": "baseline",
    "ui_port": "ui",
    "max_model_len": "model",
    "max_num_seqs": "model",
    "free": "total",
    "total": "free",
}
EXCLUDES = {
    "ui": (
        "metrics_url", "repeats", "checks", "baseline", "about", "junit", "workers", "bind", "results", "explain",
    ),
    "across": ("against", "about"),
    "history": ("against", "about", "across", "checks"),
    "image": ("free", "total"),
}  # fmt: skip
_KINDS = {"int": "a whole number", "float": "a number", "finite": "a number"}
_BOUNDS = {"ge": "a number of at least", "le": "a number of at most"}

_JUDGES = {  # what a command with JUnit output tells of at least: group and name of the case
    "report": ("validity", "the run is VALID"),
    "compare": ("comparison", "the runs can be compared"),
}


class CliCommand(TyperCommand):
    """What every command of ours is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's, and what options say together. Raises HarnessError, of several mistakes SeveralErrors."""
        wrong, left = Mistakes(), []
        try:
            left = super().parse_args(ctx, list(args))
        except (typer.TyperException, HarnessError):
            self._note_mistakes(ctx, args, wrong)
        self._note_combinations(ctx, wrong)
        if wrong.found:
            with wrong.noted():
                _look_further(ctx)
        try:
            wrong.refuse()
        except HarnessError as error:
            _tell_in_junit(ctx, error, "usage", "the command line is understood")
            raise
        return left

    def invoke(self, ctx: Any) -> Any:
        """As Typer's."""
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except Exception as error:
            told = error if isinstance(error, HarnessError) else HarnessError(f"{type(error).__name__}: {error}")
            _tell_in_junit(ctx, told, *_JUDGES.get(ctx.info_name, ("", "")))
            raise

    def _note_mistakes(self, ctx: Any, args: list[str], wrong: Mistakes) -> None:
        """Each parameter's, one by one, and before them the options that there are not."""
        unsure = False  # whether what stands behind an unknown option is its value
        while True:
            try:
                given, left, _ = self.make_parser(ctx).parse_args(list(args))
                break
            except typer.TyperException as error:
                wrong.add(as_told(error, ctx))
                name = getattr(error, "option_name", "")
                at = [place for place, arg in enumerate(args) if arg.split("=")[0] == name or arg[:2] == name]
                if not at:
                    return
                args = [*args[: at[-1]], *args[at[-1] + 1 :]]
                unsure = unsure or not all(arg.startswith("-") for arg in args[at[-1] : at[-1] + 1])
        for param in self.get_params(ctx):
            if param.is_eager or (unsure and param.param_type_name == "argument"):
                continue
            with wrong.noted():
                try:
                    param.handle_parse_result(ctx, given, list(left))
                except typer.TyperException as error:
                    raise as_told(error, ctx) from None
        if left and not unsure:
            wrong.add(_usage(f"got unexpected extra argument(s) ({' '.join(left)})", ctx))

    def _note_combinations(self, ctx: Any, wrong: Mistakes) -> None:
        options = {param.name: param.opts[0] for param in self.get_params(ctx)}
        given = [name for name in options if _is_given(ctx, name)]
        for name in given:
            other = NEEDS.get(name)
            if other in options and other not in given:
                said = f"{options[name]} needs {options[other]}"
                wrong.add(HarnessError(said, next_step="Give both, or neither."))
            if clash := [options[other] for other in EXCLUDES.get(name, ()) if other in given]:
                said = f"{options[name]} does not go with {', '.join(clash)}"
                wrong.add(HarnessError(said, next_step="Leave one out."))
        if "ca" in given and not (ctx.params.get("url") or "https://").startswith("https://"):
            said = "--ca: is for a server that already runs behind TLS"
            wrong.add(HarnessError(said, next_step="Give --url https://..."))


def _tell_in_junit(ctx: Any, error: HarnessError, group: str, name: str) -> None:
    """What refuses a command is on its output as well: a pipeline that keeps the output has a file that says so."""
    if ctx.params.get("output") == "junit":
        from harness.report import junit

        with suppress(BrokenPipeError):  # what it says is told all the same
            print(junit.of_error(ctx.info_name, error, group=group, name=name), end="")


def _look_further(ctx: Any) -> None:
    """Raise HarnessError for what the command would find in its scenario and checks, which does not begin."""
    from harness.prepare.experiment import Target, prepare, refuse_misplaced

    scenario, checks = ctx.params.get("scenario"), ctx.params.get("checks") or []
    if isinstance(scenario, Path):
        prepare(scenario, Target("") if _is_given(ctx, "url") else None, checks=checks)
    else:
        refuse_misplaced(checks)


def _is_given(ctx: Any, name: str) -> bool:
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def as_told(error: typer.TyperException, ctx: Any) -> HarnessError:
    """A mistake in our words: pydantic, which Typer asks, does not say which value it got."""
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    param = getattr(error, "param", None)
    if not found or param is None:
        said = error.format_message()
        return _usage(said[:1].lower() + said[1:].rstrip("."), ctx)
    first = found[0]
    about = first.get("ctx", {})
    bound = next((f"{words} {about[key]:g}" for key, words in _BOUNDS.items() if key in about), None)
    wanted = bound or _KINDS.get(first["type"].partition("_")[0])
    if wanted is not None:
        return _usage(f"{param.opts[0]}: {wanted} is expected, got '{first['input']}'", ctx)
    return _usage(f"{param.opts[0]}: {str(about.get('error', first['msg'])).rstrip('.')}", ctx)


def _usage(what: str, ctx: Any) -> HarnessError:
    return HarnessError(what, next_step=f"`{ctx.command_path} --help` shows what there is.")


if TYPE_CHECKING:
    from harness.prepare.experiment import Target
    from harness.summary import CheckResult, Summary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Load testing of LLM servers on AMD hardware: from a scenario file to a verdict.",
    epilog="Exit codes: 0 fine; 1 usage or scenario error; 2 a server did not become ready; 3 the run is INVALID; "
    "4 a check failed or a comparison found a regression; 5 a check is inconclusive; 130 interrupted.",
)
command = partial(app.command, cls=CliCommand)


def scenario_path(given: Path) -> Path:
    """The path of a scenario given by path or by the name of one that ships. Raises HarnessError."""
    from harness.paths import SCENARIOS

    if given.exists():
        return given
    shipped = {path.stem: path for path in SCENARIOS.glob("*.yaml")}
    names = (given.stem, f"{given.stem}.yaml", f"{SCENARIOS.name}/{given.stem}.yaml")  # as the listing has it
    if given.stem in shipped and str(given) in names:
        return shipped[given.stem]
    raise HarnessError(
        f"{given}: there is no such scenario; {did_you_mean(given.stem, shipped)}",
        next_step="Give a file, or the name of a scenario that ships: `harness scenarios` lists them.",
    )


def address(param: typer.CallbackParam, given: str | None) -> str | None:
    """A server's address. Raises HarnessError."""
    from harness.prepare.experiment import check_url

    if given is not None:
        check_url(param.opts[0], given)
    return given


def authority(given: Path | None) -> Path | None:
    """The file of --ca. Raises HarnessError."""
    from harness.trust import refuse_no_authority

    if given is not None:
        refuse_no_authority(given)
    return given


def model_name(param: typer.CallbackParam, given: str | None) -> str | None:
    """A model's name, and not the empty one of a variable that is not set. Raises HarnessError."""
    if given is not None and (not given.strip() or given.startswith("-")):
        raise HarnessError(
            f"{param.opts[0]}: '{given}' is no model's name", next_step="Write it as the server knows it."
        )
    return given


def worker_names(given: str | None) -> str | None:
    """What --workers says. Raises HarnessError."""
    from harness.workers import parse_names

    if given is not None:
        parse_names(given)
    return given


def listening_address(param: typer.CallbackParam, given: str | None) -> str | None:
    """Host and port in a command line. Raises HarnessError."""
    from harness.workers import parse_address

    if given is not None:
        parse_address(param.opts[0], given)
    return given


def root_folder(given: Path) -> Path:
    """The folder of --root. Raises HarnessError."""
    from harness.machine.sysfs import folder

    return folder(given)


# What can be said of one value alone is said by its callback, so that it is told with all else that is wrong.
ScenarioArg = Annotated[
    Path,
    typer.Argument(metavar="SCENARIO", help="A scenario file, or the name of one that ships.", callback=scenario_path),
]
RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the id of a run.")]
RunsDir = Annotated[Path, typer.Option(help="Where run directories are kept.", envvar="HARNESS_RUNS")]
ServerOpt = Annotated[str | None, typer.Option(help="Which of the scenario's servers (default: the first).")]
ChecksOpt = Annotated[
    list[str] | None,
    typer.Option("--check", metavar="CHECK", help="A check beside the scenario's; may be repeated."),
]
BaselineOpt = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="The run that checks call the baseline (default: the row)."),
]
AboutOpt = Annotated[
    str | None, typer.Option(metavar="KEY", help="The one manifest key in which the sides may differ.")
]
UrlOpt = Annotated[
    str | None,
    typer.Option(help="Use a server that already runs, such as http://127.0.0.1:8000.", callback=address),
]
CaOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="With --url https://...: the authority that signed its certificate.", callback=authority
    ),
]
ModelOpt = Annotated[str | None, typer.Option(help="Use this model instead of the scenario's.", callback=model_name)]
ResultsDir = Annotated[
    Path, typer.Option(help="Where published runs and the variation between runs are kept.", envvar="HARNESS_RESULTS")
]
RUNS = Path("runs")
RESULTS = Path("results")


class Printable:
    """A stream to a terminal for plain `print`: text of servers, models and logs cannot control the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Output(Console):
    """The standard output or error. Colours come from rich alone: control characters in the text are left out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """A run goes on when its reader, such as `head`, has seen enough; rich would exit here."""
        mute()


def mute() -> None:
    """Nothing more may be written to the standard output, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def protect_terminal() -> None:
    """Have control characters left out of all that is printed to a terminal."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)).isatty():
            setattr(sys, name, Printable(stream))


def console(*, stderr: bool = False) -> Console:
    # Wide enough for the table when the output is a file or a pipe, which has no width of its own.
    # What is printed comes from files as well: nothing in it is markup.
    stream = sys.stderr if stderr else sys.stdout
    file = stream.stream if isinstance(stream, Printable) else stream
    more: dict[str, Any] = {} if file.isatty() or stderr else {"width": 160, "no_color": True}
    return Output(file=file, markup=False, emoji=False, highlight=False, soft_wrap=stderr, **more)


def target_of(url: str | None, metrics_url: str | None = None, ca: Path | None = None) -> "Target | None":
    """The server that already runs, given on the command line; None without --url. Raises HarnessError."""
    from harness.prepare.experiment import Target
    from harness.trust import trust

    if ca is not None:
        trust(ca)
    return Target(url, metrics_url) if url is not None else None


def find_baseline(given: Path, runs: Path) -> Path:
    """The directory of a run that may be a baseline, before anything is measured. Raises HarnessError."""
    from harness.cli.listing import find_run
    from harness.compare.reference import usable_baseline

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
    from harness.report import html, terminal
    from harness.report import junit as junit_xml
    from harness.rundir.manifest import read_run
    from harness.summarize.summarize import summarize, write_summary

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
    end_as_checks(summary.checks)


def end_as_checks(checks: "Sequence[CheckResult]") -> None:
    """End with the exit code of checks; a failed one weighs more than an inconclusive one."""
    found = {result.status for result in checks}
    if "failed" in found:
        raise typer.Exit(ExitCode.FAILED)
    if "inconclusive" in found:
        raise typer.Exit(ExitCode.INCONCLUSIVE)
