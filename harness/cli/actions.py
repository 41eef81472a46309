"""Commands that start something and are no question of their own: runs, live loads, the check of a scenario."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.errors import ExitCode, HarnessError
from harness.base.units import read_duration
from harness.cli import common as cli
from harness.cli.report_options import ReportOptions

if TYPE_CHECKING:
    from harness.numbers.summary import Reference
    from harness.run.draft import Given
    from harness.run.experiment import Experiment, Target
    from harness.scenario import Scenario

UI_PORT = 8089  # Locust's own


ResumeOpt = Annotated[
    Path | None, cli.option("RUN", "Go on with this run: keep its complete and valid cells, measure the others again.")
]
DurationOpt = Annotated[
    str | None, cli.option("TIME", "How long loads with a `duration_s` are measured, such as 8h; replaces theirs.")
]
TraceOpt = Annotated[
    Path | None,
    cli.option("FILE", "The recorded agents (a file or folder), in place of the scenario's `agent_trace.file`."),
]
SliceOpt = Annotated[
    int | None,
    cli.option(
        "N", "Only the first N recorded conversations, each once.", "--slice", min=1, max=100_000, show_default=False
    ),
]
BudgetOpt = Annotated[str | None, cli.option("TIME", "As many repeats as this time allows, such as 2h; at least one.")]
TimesOpt = Annotated[
    int, cli.option("N", "So many runs, one after another; they show how far equal runs differ.", min=1, max=1000)
]
EveryOpt = Annotated[
    str | None, cli.option("TIME", "With --times: from the start of one run to that of the next, such as 1h.")
]
MetricsUrlOpt = Annotated[
    str | None,
    cli.option("URL", "With --url: where its metrics are (default: URL/metrics).", callback=cli.validate_url),
]
JunitOpt = Annotated[Path | None, cli.option("FILE", "Also write checks and verdicts as JUnit XML.")]
MarkdownOpt = Annotated[
    Path | None,
    cli.option("FILE", "Also append the report as Markdown, such as to a job's summary.", callback=cli.check_markdown),
]
WorkersOpt = Annotated[str | None, cli.option("NAMES", "With --url: machines that send the load, or how many.")]
BindOpt = Annotated[str | None, cli.option("ADDRESS", "With --workers: where they find this machine (port 5557).")]


@cli.command(short_help="Start the servers, load them, tear them down, report.")
def run(
    scenario: cli.OptionalScenario = None,
    resume: ResumeOpt = None,
    budget: BudgetOpt = None,
    duration: DurationOpt = None,
    times: TimesOpt = 1,
    every: EveryOpt = None,
    url: cli.UrlOpt = None,
    ca: cli.CaOpt = None,
    metrics_url: MetricsUrlOpt = None,
    telemetry: cli.TelemetryOpt = None,
    model: cli.ModelOpt = None,
    api_key_env: cli.KeyOpt = None,
    repeats: cli.RepeatsOpt = None,
    checks: cli.ChecksOpt = None,
    baseline: cli.BaselineOpt = None,
    about: cli.AboutOpt = None,
    provisional: cli.ProvisionalOpt = False,
    tolerance: cli.ToleranceOpt = None,
    junit: JunitOpt = None,
    markdown: MarkdownOpt = None,
    workers: WorkersOpt = None,
    bind: BindOpt = None,
    runs: cli.RunsDir = cli.RUNS,
    results: cli.ResultsDir = cli.RESULTS,
    explain: cli.ExplainOpt = False,
    trace: TraceOpt = None,
    slice_: SliceOpt = None,
) -> None:
    """Start the scenario's servers, load them, tear them down, and report.

    With --url and without a scenario it measures a running server as `harness quick` does, and prints the whole report.
    After Ctrl-C, kill -9, a power loss or a failed server, `harness run --resume RUN` measures what is missing.
    With --tolerance the exit code follows the verdicts on servers under the same load: 4 when one is slower than the
    baseline's by that, 5 when that is not known. With --times the exit code is the worst one of all runs.
    """
    from harness.questions.quick.search import quick_scenario
    from harness.records.manifest import QUICK
    from harness.run import experiment as experiments
    from harness.run import running_server

    budget_s = None if budget is None else read_duration("--budget", budget)
    every_s = 0.0 if every is None else read_duration("--every", every)
    target = cli.make_target(url, metrics_url, ca, telemetry)
    options = ReportOptions(tolerance, provisional, baseline, about, junit, markdown)
    if resume is not None:
        _resume(cli.find_run(resume, runs), target, budget_s, options, runs, results, explain=explain)
        return
    xml, against, share = options.junit_file(), _reference_maker(options, runs, results), options.share
    report = partial(_report_run, options, xml, explain=explain)
    say, duration_s = cli.make_progress().line, None if duration is None else read_duration("--duration", duration)
    make = partial(quick_scenario, model=model, key_name=api_key_env, say=say)
    with running_server.scenario_path(scenario, target, QUICK, make) as path:
        more = (repeats, checks or [], duration_s, experiments.Recording(trace, slice_))
        experiment = running_server.prepare_for(path, target, model, say, *more)
        experiment = experiment if workers is None else experiments.with_workers(experiment, workers, bind)
        experiment = replace(experiment, options=experiment.options | options.kept(runs, is_series=times > 1))
        _print_notes(experiment.scenario, say)
        _check_gate(experiment.scenario, share, times, is_given=scenario is not None, is_gate=bool(xml or against))
        _measure_times(partial(_measure, experiment, runs, budget_s, against, xml), report, times, every_s, runs)


def _reference_maker(options: ReportOptions, runs: Path, results: Path) -> "Callable[..., Reference] | None":
    """Return what makes the baseline of checks for a run. Raises HarnessError where there is no such run."""
    from harness.questions.compare.sides import make_reference

    if options.baseline is None:
        return None
    base = cli.find_baseline(options.baseline, runs)
    return partial(make_reference, base, about=options.about, runs=runs, results=results)


def _measure_times(
    measure: Callable[[], Path], report: Callable[[Path], None], times: int, every_s: float, runs: Path
) -> None:
    """Measure and report one run, or several equal ones with the command that compares them."""
    if times == 1:
        report(measure())
        return
    folders: list[Path] = []

    def measure_once() -> None:
        folders.append(measure())
        report(folders[-1])

    code = _repeat(measure_once, times, every_s)
    _print_next(folders, runs)
    raise typer.Exit(code)


def _measure(
    experiment: "Experiment",
    runs: Path,
    budget_s: float | None,
    against: "Callable[..., Reference] | None",
    junit: cli.JunitFile | None,
) -> Path:
    from harness.run.budget import budget_steps
    from harness.run.orchestrator import run

    with cli.junit_until_finished(junit, experiment.path.stem):
        steps = None if budget_s is None else budget_steps(budget_s)
        return run(experiment, runs, cli.make_progress(), steps, against)


def _resume(
    folder: Path,
    target: "Target | None",
    budget_s: float | None,
    given: ReportOptions,
    runs: Path,
    results: Path,
    *,
    explain: bool,
) -> None:
    """Measure what is missing of a run, and report it with the options of its first start and those `given`."""
    from harness.questions.bisect.record import bisect_command
    from harness.questions.tune.record import search_command
    from harness.records.manifest import read_run
    from harness.run.resume import resume

    options, changes = given.with_earlier(folder, cli.console().print), given.kept(runs)
    xml, against = options.junit_file(), _reference_maker(options, runs, results)
    search = search_command(folder) or bisect_command(folder)
    with cli.junit_until_finished(xml, read_run(folder).scenario_name):
        resume(folder, cli.make_progress(), target, budget_s, against, search_command=search, options=changes)
    _report_run(options, xml, folder, explain=explain)


def _check_gate(scenario: "Scenario", tolerance: float | None, times: int, *, is_given: bool, is_gate: bool) -> None:
    """Say what a later comparison needs, where an option or a check shows that the run guards something. Nothing
    without a scenario that is given. Raises HarnessError for a tolerance without two servers.
    """
    if not is_given:
        return
    cli.refuse_tolerance(scenario, tolerance)
    is_gate = is_gate or any("baseline" in check for check in scenario.checks)
    if is_gate and times == 1 and len(scenario.servers) == 1:
        text = "a comparison with another run needs two runs a side to exclude a slowdown of 10 %: `--times 2`"
        cli.console().print(f"note: {text}")


def _print_notes(scenario: "Scenario", say: "Callable[[str], None]") -> None:
    from harness.questions.check import check_notes
    from harness.serve.lint import removed_notes

    for note in [*check_notes(scenario), *removed_notes(scenario)]:
        say(f"note: {note}")


def _report_run(options: ReportOptions, junit: cli.JunitFile | None, folder: Path, *, explain: bool) -> None:
    """Print the report of a run, write the files that were asked for, and exit with its code."""
    from harness.numbers.summarize import read_summary
    from harness.questions.report import junit_cases
    from harness.questions.report.decide import decided
    from harness.questions.report.page import print_report, report_page
    from harness.records.manifest import read_run
    from harness.report.markdown import render

    manifest = read_run(folder)
    summary = decided(read_summary(folder), options.share, provisional=options.provisional)
    print_report(summary, manifest, folder, cli.console(), explain=explain)
    if junit is not None:
        junit.write(junit_cases.render(summary, manifest))
    if options.markdown is not None:
        cli.append_markdown(options.markdown, f"{render(report_page(summary, manifest, folder)).rstrip()}\n\n")
    cli.exit_after_run(summary)


def _print_next(folders: list[Path], runs: Path) -> None:
    """Print the command that compares equal runs with as many of their scenario that are measured later."""
    later = f"{folders[-1].name[len('20270115-080000-') : -len('-abcd')]}:{len(folders)}"
    where = [] if runs == cli.RUNS else ["--runs", runs]
    command = command_line("harness", "compare", *(folder.name for folder in folders), "--against", later, *where)
    text = f"To compare them with {len(folders)} later runs: {command}"
    cli.console().print(text, soft_wrap=True)


def _repeat(measure: Callable[[], None], times: int, every_s: float) -> int:
    """Measure so many runs, with their starts `every_s` apart, and return the worst exit code of all.

    A run that fails does not end the series. A run that takes longer than `every_s` is followed by the next at once.
    """
    from harness.base.process import pause

    codes: list[int] = []
    for number in range(1, times + 1):
        began_s = time.monotonic()
        cli.console().print(f"Run {number} of {times}")
        try:
            measure()
        except typer.Exit as end:
            codes.append(end.exit_code)
        except HarnessError as error:
            cli.print_error(error)
            codes.append(error.exit_code)
        while number < times and (remaining_s := began_s + every_s - time.monotonic()) > 0:
            pause(min(remaining_s, 1.0))
    return min(filter(None, codes), default=ExitCode.OK)  # the codes of runs are in order, the worst first


@cli.command(short_help="Serve Locust's web UI for a scenario's server.")
def live(
    scenario: cli.OptionalScenario = None,
    server: cli.ServerOpt = None,
    load: cli.LoadOpt = None,
    url: cli.UrlOpt = None,
    ca: cli.CaOpt = None,
    telemetry: cli.TelemetryOpt = None,
    model: cli.ModelOpt = None,
    api_key_env: cli.KeyOpt = None,
    user: cli.UserOpt = None,
    port: Annotated[int, cli.option("PORT", "Port of the web UI on 127.0.0.1.", min=1, max=65535)] = UI_PORT,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Bring a scenario's server up and serve Locust's web UI for it; Ctrl-C tears everything down.

    With --url and without a scenario: for a running server.
    """
    from harness.questions import live as living
    from harness.run import running_server

    target, name = cli.make_target(url, ca=ca, telemetry=telemetry), user or "chat"
    more: Any = {"model": model, "key_name": api_key_env, "say": cli.console().print}
    make = partial(running_server.user_scenario, name, **more)
    with running_server.scenario_path(scenario, target, f"live-{name}", make) as path:
        experiment = running_server.prepare_for(path, target, model, cli.console().print)
        living.live(experiment, server, load, port, runs, cli.make_progress())


@cli.command(short_help="Validate a scenario and show its plan.")
def check(
    scenario: cli.ScenarioArg,
    url: cli.UrlOpt = None,
    ca: cli.CaOpt = None,
    model: cli.ModelOpt = None,
    repeats: cli.RepeatsOpt = None,
    checks: cli.ChecksOpt = None,
    duration: DurationOpt = None,
    time_request: Annotated[
        bool, cli.flag("--time-request", "With --url: send one request, and estimate the time of a run from it.")
    ] = False,
    as_json: cli.JsonOpt = False,
    trace: TraceOpt = None,
    slice_: SliceOpt = None,
) -> None:
    """Validate a scenario and show its plan, without running anything.

    With --url the server is asked for its models and settings; it generates and loads nothing without --time-request.
    Exit code 2: the prompts of a load exceed the server's context; of a sweep, those of all rows.
    """
    from harness.questions.check import preview, preview_page
    from harness.questions.quick.search import probe_server
    from harness.report.terminal import print_page
    from harness.run.experiment import Recording
    from harness.run.machine_fit import check_all_gpus, machine_notes, predict_shares
    from harness.run.running_server import prepare_for
    from harness.serve.lint import refuse_too_long

    target, say = cli.make_target(url, ca=ca), cli.console(stderr=as_json).print
    if time_request and target is None:
        raise HarnessError("--time-request: no --url is given", next_step="Give the address of the server: --url URL.")
    duration_s = None if duration is None else read_duration("--duration", duration)
    recording = Recording(trace, slice_)
    experiment = prepare_for(scenario, target, model, say, repeats, checks or [], duration_s, recording)
    final_scenario = experiment.scenario
    speed, startup = (None, None) if target is None else probe_server(target, final_scenario, say, timed=time_request)
    shown = preview(experiment, speed, startup)
    fit_notes = [] if target is not None else [*machine_notes(experiment), *predict_shares(experiment)]
    if as_json:
        cli.print_json(replace(shown, notes=shown.notes + fit_notes))
    else:
        print_page(preview_page(experiment, shown, fit_notes), cli.console())
    if target is None:
        check_all_gpus(experiment)
    refuse_too_long(final_scenario, final_scenario.servers, final_scenario.loads, startup)


def ask_choice(question: str, option: str, answers: Mapping[str, str]) -> str:
    """One of the answers, by its number or name; Enter takes the first. Raises HarnessError without a terminal."""
    if not cli.has_terminal():
        raise HarnessError(
            f"{option} is missing, and there is no terminal to ask at", next_step=f"Choose: {', '.join(answers)}."
        )
    names = list(answers)
    print(question)
    for number, name in enumerate(names, 1):
        print(f"  {number}  {name}: {answers[name]}")
    while True:
        try:
            given = input(f"number or name [{names[0]}]: ").strip()
        except EOFError:
            raise KeyboardInterrupt from None
        if not given or given in answers:
            return given or names[0]
        if given.isdecimal() and 1 <= int(given) <= len(names):
            return names[int(given) - 1]
        print(f"'{given[:100]}' is not one of them.")


def _draft(
    question: str, given: list[str], url: str | None, models: list[str], machine: str, own: "Given"
) -> tuple[str, list[str], str | None]:
    """Return the text of a scenario, its servers, and the address of the one that runs. It asks for what is missing."""
    from harness.questions.quick import search as quickly
    from harness.run import draft as drafts
    from harness.run.experiment import RUNNING_SERVER

    if given and url is not None:
        raise HarnessError("--server and --url are both given", next_step="Give one of them.")
    servers, needed = list(given), drafts.server_count(question)
    draft_models = {name: draftable.model for name, draftable in drafts.draftable_servers().items()}
    running = None
    if url is None and not given and needed == 1 and cli.has_terminal():
        running = quickly.find_running()
    while not given and url is None and len(servers) < needed:
        rest = draft_models if running is None else {RUNNING_SERVER: f"{running[1]} at {running[0]}"} | draft_models
        servers.append(ask_choice("Which server? (with the model that is proposed)", "--server", rest))
        if servers == [RUNNING_SERVER] and running is not None:
            url, models = running[0], models or [running[1]]
    if url is not None:
        if len(models) > 1:
            raise HarnessError(f"--model: {len(models)} models for one server", next_step="Give one.")
        if models:
            quickly.refuse_unlisted_model(url, models[0], own.api_key_env)
        model = models[0] if models else quickly.model_of(url, own.api_key_env)
        return drafts.draft_running(question, model, machine, own), servers, url
    chosen = [drafts.choose("--server", name, draft_models) for name in servers]
    return drafts.draft(question, chosen, models, machine, own), servers, None


def _add_schema(file: Path, text: str) -> None:
    """Write the schema for editors, and its name into the scenario with this text; print what was written."""
    from harness.run import draft as drafts

    schema = drafts.write_schema(file)
    with contextlib.suppress(OSError):  # without it only the editor knows less
        file.write_text(drafts.with_schema(text, schema.reference), encoding="utf-8")
    if schema.written is not None:
        print(f"{schema.written}: written; editors complete and check the scenario with it.")
    if schema.problem is not None:
        print(f"Warning: {schema.problem}. Editors cannot complete {file}: it names no schema.", file=sys.stderr)


QuestionOpt = Annotated[
    str | None,
    cli.option(
        "KIND",
        "What you want to know: batching, compare, chat-users, agents or classifications; without it you are asked, "
        "or with --url or --prompts it is batching.",
    ),
]
ServersOpt = Annotated[
    list[str] | None,
    cli.option(
        "NAME",
        "The server; give it twice to compare two, or two images of one (ROCm and Vulkan); without it you are asked.",
    ),
]
DraftUrlOpt = Annotated[
    str | None,
    cli.option("URL", "Instead: a server that already runs; one of this machine is found.", callback=cli.validate_url),
]
DraftChecksOpt = Annotated[
    list[str] | None,
    cli.option(
        "CHECK",
        'What must hold, such as "ttft_p95 <= 2s"; may be repeated.',
        "--check",
        callback=cli.split_given,
    ),
]


@cli.command(short_help="Write a scenario of your own from a few answers, or from options.")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The scenario to write.")] = Path("my-scenario.yaml"),
    question: QuestionOpt = None,
    server: ServersOpt = None,
    url: DraftUrlOpt = None,
    model: Annotated[list[str] | None, cli.option("NAME", "The model of each server, as the server knows it.")] = None,
    machine: Annotated[str | None, cli.option("KIND", "strix-halo, radeon, instinct or none (default: found).")] = None,
    prompts: Annotated[
        Path | None, cli.option("FILE", "Your prompts: a JSON object in each line (docs/scenarios.md).")
    ] = None,
    checks: DraftChecksOpt = None,
    api_key_env: Annotated[
        str | None, cli.option("NAME", "The environment variable with the server's API key.", "--api-key-env")
    ] = None,
) -> None:
    """Ask for the question, the server and the machine, and write a scenario that `harness check` accepts.

    With --url, or with --server and --question, nothing is asked.
    """
    from harness.machine.gpus import read_machine
    from harness.run import draft as drafts
    from harness.run.experiment import prepare

    if file.exists():
        raise HarnessError(f"{file}: this file is there already", next_step="Name another file to write.")
    kind = drafts.choose("--machine", machine or drafts.machine_kind(read_machine().gpus), drafts.CONCURRENCY)
    wanted = drafts.choose(
        "--question",
        question
        or ("batching" if url or prompts else ask_choice("What do you want to know?", "--question", drafts.QUESTIONS)),
        drafts.QUESTIONS,
    )
    place = None if prompts is None else os.path.relpath(prompts, file.parent)
    own = drafts.Given(prompts=place, checks=checks or [], api_key_env=api_key_env)
    text, servers, url = _draft(wanted, list(server or []), url, model or [], kind, own)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HarnessError(f"{file}: cannot be written ({error.strerror})", next_step="Name another file.") from None
    try:
        prepare(file, cli.make_target(url))
    except HarnessError as error:
        file.unlink()  # the options are wrong, and may hold what belongs in no file
        next_step = "Correct the options: no file is written."
        raise HarnessError(error.what, detail=error.detail, next_step=next_step) from None
    about = (
        "no AMD GPU was found; --machine names one" if kind == "none" and not machine else f"for the machine '{kind}'"
    )
    given = [file, *([] if url is None else ["--url", url])]
    print(f"{file}: written ({about}).")
    _add_schema(file, text)
    print(f"Next:\n  {command_line('harness', 'check', *given)}")
    print("\n".join(f"  {line.format(file=command_line(*given))}" for line in drafts.COMMANDS[wanted]))
    if drafts.server_count(wanted) == 1:
        command = command_line("harness", "run", *given, "--times", 2)
        print(f"To see later whether an update made it slower, before and after it: {command}")
    if url is None and set(servers) != {"simulated"}:
        print("If the server already runs, add: --url http://127.0.0.1:PORT --model NAME")


@cli.command(short_help="Check this machine for problems.")
def doctor(
    as_json: cli.JsonOpt = False,
    root: Annotated[
        Path, cli.option("DIR", "Read the /proc, /sys, /dev, /etc and /var below DIR instead.", callback=cli.check_root)
    ] = Path("/"),
) -> None:
    """Look at GPU, memory, kernel, access, Docker and processes of this machine; exit code 4 with a blocker."""
    from harness.machine import findings
    from harness.machine.inspection import diagnose
    from harness.questions.doctor import doctor_page
    from harness.report.terminal import print_page
    from harness.serve.docker_engine import get_engine_facts

    # Of another machine's files, this machine's Docker Engine and shell know nothing.
    here = root.resolve() == Path("/")
    problems = diagnose(root, get_engine_facts() if here else None)
    if as_json:
        print(findings.format_json(problems, root))
    else:
        print_page(doctor_page(problems, root), cli.console())
    if findings.find_worst_level(problems) == "blocker":
        raise typer.Exit(ExitCode.FAILED)


@cli.command(short_help="Print the Compose file that would be run.")
def compose(
    scenario: cli.ScenarioArg,
    server: cli.ServerOpt = None,
    load: Annotated[str | None, cli.option("NAME", "Which of the scenario's loads; required with several.")] = None,
    ui_port: Annotated[int, cli.option("PORT", "Port of Locust's web UI on 127.0.0.1.", min=1, max=65535)] = UI_PORT,
    workers: Annotated[
        int, cli.option("N", "Containers that send the load (`--scale worker=N`).", min=0, max=1000)
    ] = 0,
    records: Annotated[Path | None, cli.option("DIR", "Write the request records to this folder.")] = None,
    headless: Annotated[
        bool, cli.flag("--headless", "No web UI: send the load once, as a run would, and exit.")
    ] = False,
    grafana: Annotated[
        bool, cli.flag("--with-grafana", "Add Prometheus, and Grafana with a dashboard of load and server.")
    ] = False,
) -> None:
    """Print the Compose file that the harness would run, for `docker compose up`."""
    from harness.questions.live import compose_file
    from harness.run import experiment as experiments
    from harness.run.machine_fit import resolve_auto

    experiment = experiments.prepare(scenario)
    experiment = resolve_auto(experiment, lambda line: print(line, file=sys.stderr))
    more: dict[str, Any] = {"workers": workers, "records": records, "headless": headless, "grafana": grafana}
    text = compose_file(experiment, server, load, ui_port=ui_port, **more)
    print(text, end="")


@cli.command(short_help="Remove the leftovers of a killed run.")
def clean(
    everything: Annotated[bool, cli.flag("--all", "Also what a harness that lives, or may live, has started.")] = False,
    caches: Annotated[
        bool, cli.flag("--caches", "Also the caches (models, kernels), unless a harness may use them.")
    ] = False,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Remove the leftovers of a killed run: containers, networks and volumes that carry our label, nothing else.

    A running server that a killed `harness tune --url` has changed gets the settings of its owner back. Exit code 2: it
    did not.
    """
    from harness.questions.tune.search import put_back
    from harness.serve.docker_engine import connect, remove_leftovers

    outcomes = list(put_back(runs))
    for outcome in outcomes:
        print(outcome.text)
    try:
        with contextlib.closing(connect()) as client:
            removed = remove_leftovers(client, everything=everything, caches=caches)
    except HarnessError as error:
        if not outcomes:
            raise
        print(f"containers were not looked for: {error.what}")  # tune --url needs none
        removed = []
    lines = [f"removed {item}" for item in removed] or ([] if outcomes else ["no leftovers"])
    print("\n".join(lines), end="\n" if lines else "")
    if not all(outcome.is_done for outcome in outcomes):
        raise typer.Exit(ExitCode.SERVER)
