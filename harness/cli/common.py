"""Shared parts of the commands: the app, common options, the console, mistakes in the command line."""

import difflib
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from typer.core import TyperCommand, TyperGroup

from harness.base.command_line import command_line
from harness.base.errors import ExitCode, HarnessError, RunError, ScenarioError, closest_name, did_you_mean, reason_of
from harness.base.files import RUNS_FOLDER, pretty_json
from harness.base.redact import printable
from harness.base.units import count

COMMANDS = {  # in the order of use
    "Measure": ("quick", "run", "capacity", "tune", "bisect", "live", "check", "init"),
    "Answer": ("expect", "compare", "plan", "explain", "doctor"),
    "Look": ("report", "results", "list"),
    "Keep": ("export", "import"),
    "Help": ("compose", "worker", "telemetry", "clean"),
}
# By parameter: the option that it needs, and those that it excludes. A command may have only some of them.
NEEDS = {
    "metrics_url": "url", "telemetry": "url", "ca": "url", "api_key_env": "url", "bind": "workers", "about": "baseline",
    "every": "times",
    "free": "total", "total": "free", "image": "measure",
}  # fmt: skip
EXCLUDES = {
    "resume": ("scenario", "model", "repeats", "checks", "workers", "bind", "times", "goal", "load", "server",
        "finding", "keep", "images", "values", "good", "bad", "build", "metric"),
    "images": ("values",),
    "api_key_env": ("scenario",),
    "user": ("scenario",),
    "across": ("against", "about"),
    "history": ("against", "about", "across", "checks"),
    "measure": ("gpu", "bandwidth", "root"),
}  # fmt: skip
ADDRESSES = ("url", "address", "base_url")  # the parameters with the address of a server
_JUNIT_CASES = {  # group and name of the case in the JUnit output of a command that failed
    "report": ("validity", "the run is VALID"),
    "compare": ("comparison", "the runs can be compared"),
}


class CommandsByUse(TyperGroup):
    """The commands, whose help lists them by what they are used for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in COMMANDS.items():
            with formatter.section(heading):
                commands = {name: self.get_command(ctx, name) for name in names}
                formatter.write_dl([(name, entry.get_short_help_str(90)) for name, entry in commands.items() if entry])


class CliCommand(TyperCommand):
    """A command that reports mistakes as HarnessErrors, and errors also in its JUnit output."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, then check combinations of options. Raises HarnessError for the first mistake."""
        try:
            remaining = super().parse_args(ctx, args)
        except typer.TyperException as error:
            raise usage_error(error, ctx) from None
        self._check_combinations(ctx)
        return remaining

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except Exception as error:
            if ctx.params.get("output") == "junit":
                failure = error if isinstance(error, HarnessError) else HarnessError(f"{type(error).__name__}: {error}")
                _print_junit(ctx, failure, *_JUNIT_CASES.get(ctx.info_name, ("", "")))
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments as manual pages have them; Typer writes {SCENARIO} and {RUN}..."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and options; Typer writes the Python type after an argument's name."""
        records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                records[param.param_type_name].append(record)
        if records["argument"]:
            with formatter.section("Arguments"):
                formatter.write_dl([(name.partition(" <")[0], text) for name, text in records["argument"]])
        with formatter.section("Options"):
            formatter.write_dl(records["option"])

    def _check_combinations(self, ctx: Any) -> None:
        options = {param.name: param.opts[0] for param in self.get_params(ctx)}
        given = [name for name in options if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]
        for name in given:
            other = NEEDS.get(name)
            if other in options and other not in given:
                raise HarnessError(f"{options[name]} needs {options[other]}", next_step="Give both, or neither.")
            if clash := [options[other] for other in EXCLUDES.get(name, ()) if other in given]:
                raise HarnessError(f"{options[name]} does not go with {', '.join(clash)}", next_step="Leave one out.")
        addresses = [ctx.params[name] for name in ADDRESSES if ctx.params.get(name)]
        if "ca" in given and not all(address.lower().startswith("https://") for address in addresses or [""]):
            raise HarnessError(
                "--ca: is for a server that already runs behind TLS", next_step="Give its address: https://..."
            )


def _print_junit(ctx: Any, error: HarnessError, group: str, name: str) -> None:
    """Print an error as JUnit XML, so that a pipeline that keeps the output has the reason."""
    from harness.report import junit

    with suppress(BrokenPipeError):
        print(junit.error_xml(ctx.info_name, error, group=group, name=name), end="")


def refuse_undecodable(words: Sequence[str]) -> None:
    """Raise HarnessError where a word of the command line, or the current folder, is not text in UTF-8."""
    folders = []
    with suppress(OSError):  # the folder was removed
        folders = [os.getcwd()]
    for word in (*words, *folders):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise undecodable_name(error) from None


def undecodable_name(error: UnicodeEncodeError) -> HarnessError:
    """Return an error about a name with bytes that are not UTF-8, which no record can have."""
    near = error.object[max(0, error.start - 60) : error.end + 60]  # of a name, or of a text that contains it
    shown = near.encode(errors="backslashreplace").decode().replace("\\udc", "\\x")
    return HarnessError(
        f"'{shown}': the name is not in UTF-8",
        next_step="Rename the file or the folder, or make a link to it with another name.",
    )


def usage_error(error: typer.TyperException, ctx: Any) -> HarnessError:
    """Convert a mistake in the command line. The messages of Pydantic, which Typer uses, lack option and value."""
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    param = getattr(error, "param", None)
    text = error.format_message()
    if details and param is not None:
        reason = _expected_range(param) or details[0].get("ctx", {}).get("error", details[0]["msg"])
        text = f"{param.opts[0]}: {reason} (got '{details[0]['input']}')"
    text = text[:1].lower() + text[1:].rstrip(".")
    path = "harness" if ctx is None else ctx.command_path
    listed = "commands" if text.startswith("no such command") else "options"
    return HarnessError(text, next_step=f"`{path} --help` lists the {listed}.")


def _expected_range(param: Any) -> str | None:
    """Return which numbers an option takes; None for one without limits."""
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    if low is None:
        return None
    kind = "a number" if param.type_descriptor.annotation is float else "a whole number"
    more = f"of {low:,.10g} or more" if high is None else f"from {low:,.10g} to {high:,.10g}"
    return f"{kind} {more} is expected"


if TYPE_CHECKING:
    from harness.numbers.comparison import CheckResult, Comparison, SameAnswers
    from harness.numbers.summary import Summary
    from harness.questions.capacity.record import CapacityReport
    from harness.report.elements import Element
    from harness.run.experiment import Target
    from harness.run.progress import Progress
    from harness.scenario import Scenario

app = typer.Typer(
    cls=CommandsByUse,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Load testing of LLM servers on AMD hardware: from a scenario file to a verdict.",
    epilog="Exit codes: 0 fine; 1 usage or scenario error; 2 a server did not become ready, or lacks the model; "
    "3 the run is INVALID; 4 a check failed or a comparison found a slowdown; 5 a comparison cannot tell, a check is "
    "inconclusive, no number of users is proven, or a search did not end; 130 interrupted.",
)
command = partial(app.command, cls=CliCommand)


def option(metavar: str | None, help_text: str, *names: str, **more: Any) -> Any:
    """An option with a value, which `metavar` names; `names` replace the one that the parameter gives."""
    return typer.Option(*names, metavar=metavar, help=help_text, **more)


def flag(name: str, help_text: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=help_text)


def find_scenario(given: Path | None) -> Path | None:
    from harness.base.files import SCENARIOS

    if given is None or given.exists():
        return given
    shipped = {path.stem: path for path in SCENARIOS.glob("*.yaml")}
    names = (given.stem, f"{given.stem}.yaml", f"{SCENARIOS.name}/{given.stem}.yaml")  # as the listing has it
    if given.stem in shipped and str(given) in names:
        return shipped[given.stem]
    files = {path.stem: path for path in _yaml_files(given.parent)}
    here = {path.stem: path for path in _yaml_files(Path()) if path.stem == given.stem}
    near = did_you_mean(given.stem, shipped)
    for own in (files, here):
        if (name := closest_name(given.stem, own)) is not None:
            near = f"did you mean '{own[name]}'?"
            break
    raise HarnessError(
        f"{given}: there is no such scenario; {near}",
        next_step="Give a file, or the name of a scenario that ships: `harness list scenarios` lists them.",
    )


def _yaml_files(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.suffix in (".yaml", ".yml")]
    return []


def validate_url(param: typer.CallbackParam, given: str | None) -> str | None:
    from harness.run.experiment import check_url

    if given is not None:
        check_url(param.opts[0], given)
    return given


def validate_telemetry(given: str | None) -> str | None:
    from harness.machine.ssh_address import parse_address

    if given is not None:
        parse_address(given)
    return given


def validate_model_name(param: typer.CallbackParam, given: str | None) -> str | None:
    if given is not None and (not given.strip() or given.startswith("-")):
        raise HarnessError(
            f"{param.opts[0]}: '{given}' is no model's name", next_step="Write it as the server knows it."
        )
    return given


def split_given(checks: list[str] | None) -> list[str]:
    """Return each check; one option may have several, with commas between them."""
    from harness.scenario.check_syntax import split_checks

    if any(not split_checks([text]) for text in checks or []):
        raise typer.BadParameter("a check is expected, such as \"ttft_p95 <= 2s\", got ''")
    return split_checks(checks or [])


def check_finite(value: float | None) -> float | None:
    """Refuse nan and inf, which no bound of an option does."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"a finite number is expected, got {value:g}")
    return value


def check_root(given: Path) -> Path:
    from harness.machine.gpus import require_folder

    return require_folder(given)


def complete_scenario(incomplete: str) -> list[str]:
    """For the completion of a shell: names of bundled scenarios."""
    from harness.base.files import SCENARIOS

    return sorted(path.stem for path in SCENARIOS.glob("*.yaml") if path.stem.startswith(incomplete))


def complete_run(incomplete: str) -> list[str]:
    """For the completion of a shell: ids of runs in the default folder."""
    from harness.records.directory import run_folders

    folder = Path(os.environ.get("HARNESS_RUNS") or RUNS)
    return [path.name for path in run_folders(folder) if path.name.startswith(incomplete)]


_SCENARIO = typer.Argument(
    metavar="SCENARIO",
    help="A scenario file, or the name of one that ships.",
    callback=find_scenario,
    autocompletion=complete_scenario,
)
ScenarioArg = Annotated[Path, _SCENARIO]
RunArg = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run directory, its id, `last`, or a scenario: its newest run.",
        autocompletion=complete_run,
    ),
]
OptionalScenario = Annotated[Path | None, _SCENARIO]
RunsDir = Annotated[Path, option("DIR", "The folder that holds the run directories.", envvar="HARNESS_RUNS")]
ServerOpt = Annotated[str | None, option("NAME", "Which of the scenario's servers (default: the first).")]
ChecksOpt = Annotated[
    list[str] | None,
    option(
        "CHECK",
        'A check in addition to those of the scenario, such as "ttft_p95 <= 2s"; may be repeated.',
        "--check",
        "--slo",
        callback=split_given,
    ),
]
LoadOpt = Annotated[str | None, option("NAME", "Which of the scenario's loads (default: the first).")]
RepeatsOpt = Annotated[int | None, option("N", "Override the scenario's repeats.", min=1)]
JsonOpt = Annotated[bool, flag("--json", "Print JSON.")]
BaselineOpt = Annotated[Path | None, option("RUN", "The run that checks call the baseline (default: the row).")]
ProvisionalOpt = Annotated[bool, flag("--provisional", "A provisional result that is too slow fails (exit code 4).")]
ToleranceOpt = Annotated[
    str | None,
    option("PERCENT", "The slowdown that must not be (exit code 4), such as 5%; default of `harness compare`: 10%."),
]
ExplainOpt = Annotated[bool, flag("--explain", "Explain the columns below the table.")]
AboutOpt = Annotated[str | None, option("KEY", "The one manifest key in which the sides may differ.")]
UrlOpt = Annotated[
    str | None, option("URL", "Use a server that already runs, such as http://127.0.0.1:8000.", callback=validate_url)
]
TelemetryOpt = Annotated[
    str | None,
    option("ssh://HOST", "Of a server elsewhere: sample its GPUs there, over ssh.", callback=validate_telemetry),
]
CaOpt = Annotated[Path | None, option("FILE", "The authority that signed the certificate of an https server.")]
ModelOpt = Annotated[
    str | None,
    option(
        "NAME",
        "Use this model instead of the scenario's, or of the one that is loaded; A,B for those of loads.",
        callback=validate_model_name,
    ),
]
UserOpt = Annotated[
    Literal["chat", "batch", "agent", "rag"] | None,
    option(None, "Without a scenario: the kind of users (default: chat)."),
]
KeyOpt = Annotated[
    str | None,
    option("NAME", "Without a scenario: the environment variable with the server's API key.", "--api-key-env"),
]
ResultsDir = Annotated[
    Path, option("DIR", "The folder of filed results and of the variation between runs.", envvar="HARNESS_RESULTS")
]
PIPE_WIDTH = 160  # columns of what is no terminal
MIN_WIDTH = 40
RUNS = RUNS_FOLDER
LAST = "last"  # names the newest run
RESULTS = Path("results")


class Printable:
    """A stream to a terminal for `print`, without control characters in texts of servers, models and logs."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Output(Console):
    """The standard output or error, without control characters in texts; colours are rich's."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    is_lost = False  # of this process: something could not be printed

    def print(self, *objects: Any, **more: Any) -> None:
        """Print, and go on with a run when the disk with the output is full."""
        try:
            super().print(*objects, **more)
        except OSError as error:
            is_first, Output.is_lost = not Output.is_lost, True
            mute(sys.stderr if self.stderr else sys.stdout)
            if is_first:
                print(f"error: the output: {reason_of(error)}; what else would be printed is dropped", file=sys.stderr)

    def on_broken_pipe(self) -> None:
        """Go on with the run when its reader, such as `head`, closed the pipe; rich would exit here."""
        mute_stdout()


def mute_stdout() -> None:
    """Discard all that is written to the standard output from now on, also at exit."""
    mute(sys.stdout)


def mute(stream: TextIO) -> None:
    """Discard all that is written to a standard stream from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def protect_terminal() -> None:
    """Remove control characters from all that is printed to a terminal."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)).isatty():
            setattr(sys, name, Printable(stream))


def console(*, stderr: bool = False) -> Console:
    # A file or a pipe has no width but COLUMNS: the default is wide enough for the table.
    # Texts come from files as well, so they are not markup.
    stream = sys.stderr if stderr else sys.stdout
    file = stream.stream if isinstance(stream, Printable) else stream
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) >= MIN_WIDTH else PIPE_WIDTH
    more: dict[str, Any] = {} if file.isatty() or stderr else {"width": width, "no_color": True}
    return Output(file=file, markup=False, emoji=False, highlight=False, soft_wrap=stderr, **more)


def say_stored(folders: list[Path], results: Path) -> None:
    """Say of which runs the stored summary is used, but not of filed ones, which are meant to have nothing else."""
    if runs := [folder for folder in folders if not folder.resolve().is_relative_to(results.resolve())]:
        shown = ", ".join(map(str, runs[:3])) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
        print(f"{shown}: requests.jsonl is missing; the stored summary is used", file=sys.stderr)


def has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def make_progress(*, stderr: bool = False) -> "Progress":
    """What shows a run on this console, and writes its pages at its end."""
    from harness.questions.report.store import write_results
    from harness.run.progress import Progress

    return Progress(console(stderr=stderr), write_results)


def print_error(error: HarnessError) -> None:
    """Print an error: the sentence, the evidence, what to do next."""
    stderr = console(stderr=True)
    stderr.print(f"error: {error.what}", style="bold red")
    if error.detail:
        indent = "" if isinstance(error, ScenarioError) else "  | "
        stderr.print("\n".join(indent + line for line in error.detail.splitlines()))
    if error.next_step:
        stderr.print(f"next: {error.next_step}")


def print_json(data: Any) -> None:
    print(pretty_json(data).decode(), end="")


def print_as(output: str, value: Any, terminal: Callable[[], object], **texts: Callable[[], str]) -> None:
    """Print a value in a format: terminal, JSON, or one of the texts."""
    if output == "terminal":
        terminal()
    elif output == "json":
        print_json(value)
    elif output == "html":
        sys.stdout.flush()
        sys.stdout.buffer.write(texts[output]().encode())  # as it is: its scripts have checksums
    else:
        text = texts[output]()
        print(text, end="" if text.endswith("\n") else "\n")


def print_page_as(output: str, value: Any, page: "Sequence[Element]", title: str, **texts: Callable[[], str]) -> None:
    """Print a value in a format of `print_as`; its page in the terminal, as Markdown and as HTML."""
    from harness.report import html, markdown, terminal

    texts = {
        "markdown": lambda: markdown.render(page),
        "html": lambda: html.render_page(page, title, [title.lower()]),
    } | texts
    print_as(output, value, lambda: terminal.print_page(page, console()), **texts)


def make_target(
    url: str | None, metrics_url: str | None = None, ca: Path | None = None, telemetry: str | None = None
) -> "Target | None":
    from harness.base.https import trust_authority
    from harness.run.experiment import Target

    if ca is not None:
        trust_authority(ca)
    return Target(url, metrics_url, telemetry, ca) if url is not None else None


def find_run(given: Path, runs: Path) -> Path:
    from harness.records.directory import run_folders

    for folder in (given, runs / given, *_newest_run(str(given), runs)):
        # `read_run` explains a run.json that is no regular file, or that this user may not read.
        if os.path.lexists(folder / "run.json"):
            return folder
    # Only a close one is named: a list of all runs would be long, and `harness list` has it.
    close = difflib.get_close_matches(given.name, [folder.name for folder in run_folders(runs)], n=1)
    raise HarnessError(
        f"{given}: neither a run directory nor the id of a run in {runs}"
        + (f"; did you mean '{close[0]}'?" if close else ""),
        next_step=f"`{command_line('harness', 'list', 'runs', '--runs', runs)}` lists the runs.",
    )


def _newest_run(name: str, runs: Path) -> list[Path]:
    """Return the newest run: any (`last`), or of a scenario; none where there is no such run."""
    return _runs_of(name, runs)[-1:]


def _runs_of(name: str, runs: Path) -> list[Path]:
    """Return the runs of a scenario, or all (`last`), the newest last."""
    from harness.records.directory import run_folders, runs_of

    return run_folders(runs) if name == LAST else runs_of(name, runs)


def read_tolerance(given: str | None) -> float | None:
    """A percentage, such as 5 or 5%, as a share. Raises HarnessError below the margin of verdicts."""
    from harness.numbers.comparison import MARGIN

    if given is None:
        return None
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,3})?) ?%?", given.strip())
    if match is None or float(match[1]) < 100 * MARGIN:
        raise HarnessError(
            f"--tolerance: a percentage of at least {100 * MARGIN:g} is expected (got '{given}')",
            next_step="Write 10%; differences under 2 % are treated as noise.",
        )
    return float(match[1]) / 100


def refuse_tolerance(scenario: "Scenario", tolerance: float | None) -> None:
    """Raise HarnessError for a tolerance without two servers to compare."""
    if tolerance is not None and len(scenario.servers) == 1:
        raise HarnessError(
            "--tolerance: the scenario has one server, and servers of one run are compared",
            next_step="Add the other server to the scenario, or compare runs: harness compare OLD:2 NEW:2.",
        )


def find_runs(given: Path, runs: Path) -> list[Path]:
    """The run that `find_run` finds, or of NAME:N the newest N runs of a scenario (`last:N`: of any), oldest first."""
    name, _, number = str(given).rpartition(":")
    if not name or not number.isdecimal() or given.exists():
        return [find_run(given, runs)]
    folders = _runs_of(name, runs)
    if not 1 <= int(number) <= len(folders):
        raise HarnessError(
            f"{given}: {runs} has {count(len(folders), 'run')} of {name}",
            next_step=f"`{command_line('harness', 'list', 'runs', '--runs', runs)}` lists them.",
        )
    return folders[-int(number) :]


def find_baseline(given: Path, runs: Path) -> Path:
    from harness.questions.compare.sides import read_baseline

    folder = find_run(given, runs)
    read_baseline(folder)
    return folder


def append_markdown(path: Path, text: str) -> None:
    """Append to the file of --markdown. Raises HarnessError where that is not possible, as for a folder."""
    from harness.base.files import open_output

    try:
        with open_output(path, "a") as file:
            file.write(text)
    except OSError as error:
        raise HarnessError(f"--markdown: {path}: {reason_of(error)}", next_step="Name another file.") from None


def check_markdown(given: Path | None) -> Path | None:
    """Make the file, or leave it as it is: a run must not have ended to see that it cannot be written."""
    if given is not None:
        append_markdown(given, "")
    return given


class JunitFile:
    """The JUnit file of a command, with a suite for each of its runs."""

    def __init__(self, path: Path) -> None:
        """Raises HarnessError for a folder, and for a named pipe, which would wait for a reader for ever."""
        from harness.base.files import refuse_named_pipe

        try:
            refuse_named_pipe(path)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError as error:
            raise HarnessError(f"--junit: {path}: {reason_of(error)}", next_step="Name another file.") from None
        self._path = path
        self._ended: list[str] = []  # documents of earlier runs
        self._text = ""  # of this run

    def write(self, text: str, *, ends: bool = True) -> None:
        """Write the document of the current run. `ends`: nothing follows; a pipe, such as >(cat), gets only that."""
        from harness.report import junit

        self._text = text
        if ends or self._path.is_file() or not self._path.exists():
            junit.write(self._path, junit.join([*self._ended, text]))

    def start_run(self) -> None:
        if self._text:
            self._ended.append(self._text)


@contextmanager
def junit_until_finished(file: JunitFile | None, scenario: str) -> Iterator[None]:
    """Keep an error in the JUnit file until the run has its summary, in case nothing can be written any more."""
    from harness.report import junit

    if file is not None:
        file.start_run()
        file.write(junit.error_xml(scenario, RunError("the run did not end")), ends=False)
    try:
        yield
    except HarnessError as error:
        if file is not None:
            file.write(junit.error_xml(scenario, error))
        raise


def exit_after_capacity(folder: Path, report: "CapacityReport") -> None:
    """Exit with the code of a capacity search."""
    from harness.records.manifest import read_run

    if read_run(folder).reasons:
        raise typer.Exit(ExitCode.INVALID)
    if not all(server.started for server in report.servers):
        raise typer.Exit(ExitCode.SERVER)
    asked = report.at_least is not None
    if asked and any(report.holds(server) is False for server in report.servers):
        raise typer.Exit(ExitCode.FAILED)
    if any(server.unresolved or (asked and report.holds(server) is None) for server in report.servers):
        raise typer.Exit(ExitCode.INCONCLUSIVE)


def exit_after_run(summary: "Summary") -> None:
    """Exit with the code of a run. An import, whose validity cannot be checked, has the code of a VALID run."""
    if summary.valid is False:
        raise typer.Exit(ExitCode.INVALID)
    exit_after_verdicts(summary.comparison, summary.checks)
    exit_after_checks(summary.checks)
    exit_after_answers(summary.same_answers)


def exit_after_verdicts(comparison: "Comparison | None", checks: "Sequence[CheckResult]") -> None:
    """Exit with the code of gates; a failed check comes before a gate that is not decided."""
    from harness.numbers.gate import gate_code

    code = gate_code(verdict.gate for verdict in (comparison.verdicts if comparison is not None else []))
    if code and not (code == ExitCode.INCONCLUSIVE and any(result.status == "failed" for result in checks)):
        raise typer.Exit(code)


def exit_after_answers(comparisons: "Sequence[SameAnswers]") -> None:
    """Exit with the code for answers of which nothing is known; that one server answers worse is the run's result."""
    if any(answers.word == "inconclusive" for answers in comparisons):
        raise typer.Exit(ExitCode.INCONCLUSIVE)


def exit_after_checks(checks: "Sequence[CheckResult]") -> None:
    """Exit with the code of checks; a failed one comes before an inconclusive one."""
    statuses = {result.status for result in checks}
    if "failed" in statuses:
        raise typer.Exit(ExitCode.FAILED)
    if "inconclusive" in statuses:
        raise typer.Exit(ExitCode.INCONCLUSIVE)
