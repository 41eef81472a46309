"""`harness tune`: the settings found, tested, and verified on new prompts."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli

if TYPE_CHECKING:
    from harness.questions.tune.record import Goal, TuneQuestion, TuneReport
    from harness.run.experiment import Experiment, Target

ScenarioOrRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="SCENARIO|RUN",
        help="A scenario, whose server's settings are searched; or a run or `last`: what its worst finding advises is "
        "tried against what was.",
        autocompletion=cli.complete_scenario,
    ),
]
GoalOpt = Annotated[
    Literal["throughput", "latency", "goodput", "users", "energy"] | None,
    cli.option(None, "What to improve (default: throughput).", "--for"),
]
SlosOpt = Annotated[
    list[str] | None,
    cli.option(
        "CHECK",
        'What users must get, such as "ttft_p95 <= 2s": for goodput and users, else a limit; may be repeated.',
        "--check",
        "--slo",
        callback=cli.split_given,
    ),
]
SameAnswersFlag = Annotated[
    bool,
    cli.flag(
        "--same-answers",
        "Recommend only what answers 1,000 questions as the default does; also try what may change answers.",
    ),
]
BudgetOpt = Annotated[
    str | None,
    cli.option("TIME", "How long it may take in all, such as 40min (default: 2h, of a run 30min; resumed: as before)."),
]
FindingOpt = Annotated[str | None, cli.option("CODE", "With RUN: another finding than the worst one.")]
KeepFlag = Annotated[bool, cli.flag("--keep", "Leave a running server with the settings that are proven to be better.")]
DEFAULT_BUDGET_S = 7200.0
LEAVE_OUT = "Leave it out."
TRIAL_BUDGET_S = 1800.0  # of what a finding advises
ResumeOpt = Annotated[Path | None, cli.option("RUN", "Go on with a search or its proof, after any end.")]


@cli.command(short_help="Find better settings of a server, and verify them.")
def tune(
    scenario: ScenarioOrRun = None,
    goal: GoalOpt = None,
    load: Annotated[str | None, cli.option("NAME", "Tune for this load (default: all loads together).")] = None,
    server: cli.ServerOpt = None,
    checks: SlosOpt = None,
    same_answers: SameAnswersFlag = False,
    budget: BudgetOpt = None,
    url: cli.UrlOpt = None,
    ca: cli.CaOpt = None,
    telemetry: cli.TelemetryOpt = None,
    model: cli.ModelOpt = None,
    finding: FindingOpt = None,
    keep: KeepFlag = False,
    resume: ResumeOpt = None,
    as_json: Annotated[bool, cli.flag("--json", "Print the answer as JSON; progress goes to stderr.")] = False,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Find settings of a server that are better than its own, start by start, and verify the best on new prompts.

    `harness tune last` does not search: it tries what the last run's worst finding advises, in minutes. A running
    Lemonade is set by its API, and has its own settings back at the end. Exit code 0: set these, or keep the default.
    2: no settings start. 3: none gave a result (a server that starts may die under the load), or the proof is INVALID.
    5: inconclusive.
    """
    from msgspec.structs import replace

    from harness.base.units import read_duration
    from harness.questions.tune import search as tuning
    from harness.questions.tune.page import tune_page
    from harness.questions.tune.record import flat_keys
    from harness.report import terminal

    budget_s = None if budget is None else read_duration("--budget", budget)
    progress, target = cli.make_progress(stderr=as_json), cli.make_target(url, ca=ca, telemetry=telemetry)
    if resume is not None:
        folder = _find_run(resume, runs, is_tune=True)
        report = tuning.resume_tune(folder, folder.resolve().parent, progress, target, budget_s)  # where its proof is
    elif scenario is None:
        raise HarnessError("no scenario", next_step="Give a scenario, a run, or --resume RUN.")
    else:
        if (of_run := _run_folder(scenario, runs)) is not None:
            _refuse({"--load": load, "--server": server, "--model": model}, f"{scenario} is a run, which has it")
            experiment, question = _try_advice(of_run, target, finding, goal, checks or [], budget_s or TRIAL_BUDGET_S)
        else:
            _refuse({"--finding": finding}, f"{scenario} is a scenario, and has no findings")
            asked = (goal, checks or [], budget_s or DEFAULT_BUDGET_S)
            experiment, question = _search(scenario, target, model, load, server, *asked, say=progress.line)
        if keep and experiment.target is None:
            raise HarnessError("--keep: the server is started for this, and removed at the end", next_step=LEAVE_OUT)
        question = replace(question, same_answers=same_answers, keep=keep)
        folder, report = tuning.tune(experiment, question, runs, progress)
    if as_json:
        cli.print_json(flat_keys(report))
    else:
        terminal.print_page(tune_page(report), cli.console())
        cli.console().print(f"{folder / 'report.html'}")
    exit_after_tune(report)


def _run_folder(given: Path, runs: Path) -> Path | None:
    """The run that is meant; None: a scenario is."""
    is_run = str(given) == cli.LAST or any((folder / "run.json").exists() for folder in (given, runs / given))
    return _find_run(given, runs, is_tune=False) if is_run else None


def _find_run(given: Path, runs: Path, *, is_tune: bool) -> Path:
    """The run that is meant. `last` is a search of settings, or a run that is neither that nor its proof."""
    from harness.questions.tune.record import TuneReport, read_tune
    from harness.records.directory import run_folders

    if str(given) != cli.LAST or not runs.is_dir():
        return cli.find_run(given, runs)
    tunes, folders = dict[Path, TuneReport](), run_folders(runs)
    for folder in folders:
        with contextlib.suppress(HarnessError):  # a damaged one is not taken without its name
            if (report := read_tune(folder)) is not None:
                tunes[folder] = report
    proofs = {report.proof.run for report in tunes.values()}
    others = [folder for folder in folders if folder not in tunes and folder.name not in proofs]
    meant = list(tunes) if is_tune else others
    return meant[-1] if meant else cli.find_run(given, runs)


def _refuse(options: dict[str, str | None], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise HarnessError(f"{option}: {why}", next_step=LEAVE_OUT)


def _try_advice(
    folder: Path, target: "Target | None", finding: str | None, goal: "Goal | None", slos: list[str], budget_s: float
) -> "tuple[Experiment, TuneQuestion]":
    from harness.questions.joint import analyse_with_findings
    from harness.questions.tune import search as tuning
    from harness.questions.tune.advised import read_advice
    from harness.records.manifest import read_run
    from harness.run.resume import experiment_again

    run = read_run(folder)
    advice = read_advice(folder, run, analyse_with_findings(folder), finding)
    return tuning.define_trial(experiment_again(folder, target), run, advice, goal, slos, budget_s)


def _search(
    scenario: Path, target: "Target | None", model: str | None, load: str | None, server: str | None,
    goal: "Goal | None", slos: list[str], budget_s: float, *, say: Callable[[str], None],
) -> "tuple[Experiment, TuneQuestion]":  # fmt: skip
    from harness.questions.tune import search as tuning
    from harness.run.running_server import prepare_for

    experiment = prepare_for(cli.find_scenario(scenario) or scenario, target, model, say)
    return tuning.define_tune(experiment, goal or "throughput", load, server, slos, budget_s)


def exit_after_tune(report: "TuneReport") -> None:
    codes = {reason.code for reason in report.proof.reasons}
    reasons = [trial.reason for trial in report.trials.starts]
    never = (reason is not None and reason.code == "setting_not_started" for reason in reasons)
    if "nothing_started" in codes and all(never):
        raise typer.Exit(ExitCode.SERVER)
    if codes & {"nothing_started", "proof_invalid"}:
        raise typer.Exit(ExitCode.INVALID)
    if report.verdict == "inconclusive":
        raise typer.Exit(ExitCode.INCONCLUSIVE)
