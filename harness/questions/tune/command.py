"""`harness tune`: the settings found, tested, and verified on new prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli

if TYPE_CHECKING:
    from harness.questions.tune.record import TuneReport

GoalOpt = Annotated[
    Literal["throughput", "latency", "goodput", "users", "energy"], cli.option(None, "What to improve.", "--for")
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
DEFAULT_BUDGET_S = 7200.0
ResumeOpt = Annotated[Path | None, cli.option("RUN", "Go on with a search or its proof, after any end.")]


@cli.command(short_help="Find better settings of a server, and verify them.")
def tune(
    scenario: cli.OptionalScenario = None,
    goal: GoalOpt = "throughput",
    load: Annotated[str | None, cli.option("NAME", "Tune for this load (default: all loads together).")] = None,
    server: cli.ServerOpt = None,
    checks: SlosOpt = None,
    same_answers: Annotated[
        bool,
        cli.flag(
            "--same-answers",
            "Recommend only what answers 1,000 questions as the default does; also try what may change answers.",
        ),
    ] = False,
    budget: Annotated[
        str | None, cli.option("TIME", "How long it may take in all, such as 40min (default: 2h; resumed: as before).")
    ] = None,
    url: cli.UrlOpt = None,
    ca: cli.CaOpt = None,
    model: cli.ModelOpt = None,
    resume: ResumeOpt = None,
    as_json: Annotated[bool, cli.flag("--json", "Print the answer as JSON; progress goes to stderr.")] = False,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Find settings of a server that are better than its own, start by start, and verify the best on new prompts.

    With --url those of a running Lemonade, by its API; its files stay as they are. Exit code 0: set these, or keep the
    default. 2: no settings start. 3: none gave a result (a server that starts may die under the load), or the proof is
    INVALID. 5: inconclusive.
    """
    from msgspec.structs import replace

    from harness.base.units import read_duration
    from harness.questions.tune import search as tuning
    from harness.questions.tune.page import tune_page
    from harness.questions.tune.record import flat_keys
    from harness.report import terminal
    from harness.run.running_server import prepare_for

    budget_s = None if budget is None else read_duration("--budget", budget)
    progress, target = cli.make_progress(stderr=as_json), cli.make_target(url, ca=ca)
    if resume is not None:
        folder = cli.find_run(resume, runs)
        report = tuning.resume_tune(folder, folder.resolve().parent, progress, target, budget_s)  # where its proof is
    elif scenario is None:
        raise HarnessError("no scenario", next_step="Give a scenario, or --resume RUN.")
    else:
        experiment = prepare_for(scenario, target, model, progress.line)
        experiment, question = tuning.define_tune(
            experiment, goal, load, server, checks or [], budget_s or DEFAULT_BUDGET_S
        )
        folder, report = tuning.tune(experiment, replace(question, same_answers=same_answers), runs, progress)
    if as_json:
        cli.print_json(flat_keys(report))
    else:
        terminal.print_page(tune_page(report), cli.console())
        cli.console().print(f"{folder / 'report.html'}")
    exit_after_tune(report)


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
