"""The command `harness capacity`."""

from functools import partial
from typing import Annotated, Any

from harness.cli import common as cli

FixOpt = Annotated[
    list[str] | None,
    cli.option(
        "LOAD=N",
        "Of a mix: so many users of this load, or requests/s, in all probes; may be repeated. One load "
        "remains to be varied.",
    ),
]
MaxUsersOpt = Annotated[
    int,
    cli.option("N", "Try no more users; of an open loop, tenths of the scenario's rate or trace.", min=1, max=100000),
]
SloOpt = Annotated[
    list[str] | None,
    cli.option(
        "CHECK",
        'What users must get, such as "ttft_p95 <= 2s" (default: the scenario\'s checks); may be repeated.',
        "--check",
        "--slo",
        callback=cli.split_given,
    ),
]
AtLeastOpt = Annotated[
    float | None,
    cli.option("N", "Only find whether it holds so many users, or requests/s: exit code 4 if it does not."),
]


@cli.command(short_help="Find how many users a server holds.")
def capacity(
    scenario: cli.OptionalScenario = None,
    checks: SloOpt = None,
    load: Annotated[
        str | None, cli.option("NAME", "Which of the scenario's loads, or of its mixes (default: the first load).")
    ] = None,
    fix: FixOpt = None,
    max_users: MaxUsersOpt = 256,
    budget: Annotated[str, cli.option("TIME", "How long it may take in all, such as 30min or 2h.")] = "30min",
    at_least: AtLeastOpt = None,
    knee: Annotated[bool, cli.flag("--knee", "Also find where more concurrency stops raising the throughput.")] = False,
    url: cli.UrlOpt = None,
    user: cli.UserOpt = None,
    ca: cli.CaOpt = None,
    telemetry: cli.TelemetryOpt = None,
    model: cli.ModelOpt = None,
    api_key_env: cli.KeyOpt = None,
    as_json: Annotated[bool, cli.flag("--json", "Print the answer as JSON; progress goes to stderr.")] = False,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Find for each server how many users, or requests per second, meet the SLOs: an estimate first, then its proof.

    Exit code 0: a number of users is proven for each server (with --at-least: that many), or not even one is served.
    2: a server did not start; the others have their answers. 3: the run is INVALID. 4: a server does not hold what
    --at-least asks for. 5: not even one number of users is proven, or not what --at-least asks for.
    """

    from harness.base.units import read_duration
    from harness.numbers.summarize import read_summary
    from harness.questions.capacity import search as searching
    from harness.questions.capacity.page import capacity_page
    from harness.report.terminal import print_page
    from harness.run import running_server

    budget_s = read_duration("--budget", budget)
    target, console = cli.make_target(url, ca=ca, telemetry=telemetry), cli.console(stderr=as_json)
    more: Any = {"model": model, "key_name": api_key_env, "say": console.print}
    make = partial(running_server.user_scenario, user or "chat", **more)
    name = f"capacity-{user or 'chat'}"
    with running_server.scenario_path(scenario, target, name, make) as path:
        experiment = running_server.prepare_for(path, target, model, console.print)
        limits: dict[str, Any] = {"max_level": max_users, "budget_s": budget_s, "at_least": at_least}
        experiment, question, parsed = searching.define_search(
            experiment, load, checks or [], knee=knee, fix=fix or [], **limits
        )
        folder, report = searching.capacity(experiment, question, parsed, runs, cli.make_progress(stderr=as_json))
    if as_json:
        cli.print_json(report)
    else:
        print_page(capacity_page(report, read_summary(folder)), cli.console())
        cli.console().print(f"{folder / 'report.html'}")
    cli.exit_after_capacity(folder, report)
