"""The command `harness quick`."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.base.command_line import command_line, option_words
from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli

if TYPE_CHECKING:
    from harness.questions.quick.combinations import Combinations
    from harness.run.experiment import Target
    from harness.scenario import Scenario


class QuickCommand(cli.CliCommand):
    """`harness quick`, which also reads the words of other tools."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse. Raises HarnessError, also for a word that means something else in another tool."""
        from harness.questions.quick.combinations import own_words, refuse_two_names

        words = own_words(args)
        refuse_two_names(words, {param.name: param.opts for param in self.get_params(ctx)})
        return super().parse_args(ctx, words)


def _option(metavar: str, help_text: str, *names: str) -> Any:
    return cli.option(metavar, help_text, *names, show_default=False)


PromptOpt = Annotated[
    list[str] | None,
    _option("N,...", "Tokens of a prompt: 512,2k.", "--prompt", "-p", "--pp", "--random-input-len", "--n-prompt"),
]
OutputOpt = Annotated[
    list[str] | None,
    _option("N", "Tokens of an answer, at most.", "--output", "-n", "--tg", "--random-output-len", "--n-gen"),
]
DepthOpt = Annotated[
    list[str] | None,
    _option(
        "N,...", "Tokens of context in the cache before the prompt: 0,8k.",
        "--depth", "-d", "--n-depth", "--random-prefix-len",
    ),
]  # fmt: skip
UsersOpt = Annotated[
    list[str] | None, _option("N,...", "Users at once: 1,4,16.", "--users", "--concurrency", "--max-concurrency")
]
RateOpt = Annotated[
    list[str] | None,
    _option("N,...", "Requests a second, whether or not the server keeps up: 1,2,4.", "--rate", "--request-rate"),
]
LineRepeatsOpt = Annotated[
    int | None,
    cli.option(
        "N", "How often all is measured; more make the intervals narrow.", "--repeats", "-r", "--repetitions",
        min=1, max=1000, show_default=False,
    ),
]  # fmt: skip
RequestsOpt = Annotated[
    str | None,
    _option(
        "N", "Requests of each combination and repeat (default: four for each user, fewer on a slow server).",
        "--requests", "--num-prompts", "--max-requests",
    ),
]  # fmt: skip
FixedOpt = Annotated[
    bool,
    typer.Option("--ignore-eos", "--exact-tg", help="Each answer has the length of --output, where the server can."),
]
BudgetOpt = Annotated[
    str | None, _option("TIME", "How long all combinations may take, such as 10min (default: 30min).", "--budget")
]
AddressOpt = Annotated[
    str | None,
    cli.option("URL", "The server, as the argument.", "--base-url", "--target", "--url", callback=cli.validate_url),
]


@cli.command(short_help="Measure a running server in 15 seconds.", cls=QuickCommand)
def quick(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="The server (default: one of this machine, after a question).",
            callback=cli.validate_url,
        ),
    ] = None,
    prompt: PromptOpt = None,
    output: OutputOpt = None,
    depth: DepthOpt = None,
    users: UsersOpt = None,
    rate: RateOpt = None,
    repeats: LineRepeatsOpt = None,
    requests: RequestsOpt = None,
    ignore_eos: FixedOpt = False,
    budget: BudgetOpt = None,
    markdown: Annotated[
        bool, cli.flag("--markdown", "Print a table to paste into a forum, with the machine; progress goes to stderr.")
    ] = False,
    base_url: AddressOpt = None,
    model: cli.ModelOpt = None,
    api_key_env: cli.KeyOpt = None,
    ca: cli.CaOpt = None,
    telemetry: cli.TelemetryOpt = None,
    yes: Annotated[
        bool, cli.flag("--yes", "Without URL: do not ask before the server that is found gets load.")
    ] = False,
    as_json: Annotated[bool, cli.flag("--json", "Print JSON; progress goes to stderr.")] = False,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Measure a running server with one, four and eight users: tok/s, prefill, TTFT, and how near the hardware it is.

    It takes 15 s, and up to a minute at 5 tok/s. It needs no scenario and no tokenizer. The model that is loaded is
    measured, else the first one. Without URL it asks before the server that it finds gets load. Exit code 1: several
    servers run here, or several models are loaded; it lists them.
    With --prompt, --output, --depth, --users, --rate, --repeats, --requests, --ignore-eos, --budget or --markdown it
    measures all combinations, and prints prompt speed (pp), answer speed (tg) and latencies with 95 % intervals. What
    is not given: a prompt of 512 tokens, an answer of 128, no context, one user, three repeats. The words of other
    tools are read too.
    """
    if address is not None and base_url is not None and address.rstrip("/") != base_url.rstrip("/"):
        raise HarnessError(f"--base-url: the address is given twice ({address}, {base_url})", next_step="Give one.")
    address = address or base_url
    lists = {"prompt": prompt, "output": output, "depth": depth, "users": users, "rate": rate}
    others = {"repeats": repeats, "requests": requests, "ignore_eos": ignore_eos, "budget": budget}
    wanted = read_wanted(lists | others | {"markdown": markdown})
    if wanted is not None:
        folder = None if runs == cli.RUNS else runs
        given = {"--model": model, "--api-key-env": api_key_env, "--ca": ca, "--telemetry": telemetry, "--runs": folder}
        _measure_combinations(address, wanted, given, as_json=as_json, markdown=markdown)
        return
    _measure_levels(address, model, api_key_env, ca, telemetry, runs, yes=yes, as_json=as_json)


def _measure_levels(
    address: str | None,
    model: str | None,
    api_key_env: str | None,
    ca: Path | None,
    telemetry: str | None,
    runs: Path,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Measure one, four and eight users, and print them."""
    from harness.questions.quick import search as quickly
    from harness.questions.quick.page import quick_page
    from harness.records.manifest import QUICK
    from harness.report.terminal import print_page
    from harness.run import experiment as experiments
    from harness.run.orchestrator import run as run_experiment
    from harness.run.running_server import scenario_path

    progress = cli.make_progress(stderr=as_json)
    url = address or found_server(model, api_key_env, progress.line, is_agreed=yes)
    target = cli.make_target(url, ca=ca, telemetry=telemetry)
    assert target is not None
    make = partial(quickly.quick_scenario, model=model, key_name=api_key_env, say=progress.line)
    with scenario_path(None, target, QUICK, make) as path:
        folder = run_experiment(experiments.prepare(path, target), runs, progress)
    where = None if runs == cli.RUNS else runs
    options = {"--model": model, "--api-key-env": api_key_env, "--ca": ca, "--telemetry": telemetry, "--runs": where}
    report = quickly.quick_report(folder, target, options)
    if as_json:
        cli.print_json(report)
    else:
        print_page(quick_page(report), cli.console())
        cli.console().print(f"{folder / 'report.html'}")
    if not report.valid:
        raise typer.Exit(ExitCode.INVALID)


def read_wanted(given: Mapping[str, Any]) -> "Combinations | None":
    """Return what the options ask for, by their parameters; None: none is given. Raises HarnessError."""
    from harness.base.units import read_duration
    from harness.questions.quick import combinations

    names = ("prompt", "output", "depth", "users", "rate")
    if not any(given[name] for name in (*names, "repeats", "requests", "ignore_eos", "budget", "markdown")):
        return None
    return combinations.read_combinations(
        *(given[name] or [] for name in names),
        repeats=given["repeats"],
        requests=given["requests"],
        fixed=given["ignore_eos"],
        budget_s=read_duration("--budget", given["budget"] or combinations.BUDGET),
    )


def _measure_combinations(
    address: str | None, wanted: "Combinations", given: dict[str, Any], *, as_json: bool, markdown: bool
) -> None:
    """Measure all combinations and print them. `given`: the options of the server and of the run, by name."""
    from harness.questions.quick import combinations_page
    from harness.questions.quick.search import combinations_report
    from harness.report.markdown import render
    from harness.report.terminal import print_page

    if address is None:
        what = "no address is given; prompts, contexts, users and rates are for a server that is named"
        raise HarnessError(what, next_step="Write harness quick http://127.0.0.1:8000 --prompt 512 --users 1,4.")
    target = cli.make_target(address, ca=given["--ca"], telemetry=given["--telemetry"])
    assert target is not None
    folder = _run_combinations(target, wanted, given, stderr=as_json or markdown)
    report = combinations_report(folder, target, given)
    if as_json:
        cli.print_json(report)
    elif markdown:
        print(render(combinations_page.forum_page(report)), end="")
    else:
        print_page(combinations_page.combinations_page(report), cli.console())
        cli.console().print(f"{folder / 'report.html'}")
    if not report.valid:
        raise typer.Exit(ExitCode.INVALID)


def _run_combinations(target: "Target", wanted: "Combinations", given: dict[str, Any], *, stderr: bool) -> Path:
    """Run all combinations, within their time, and return the run directory."""
    from msgspec.structs import replace

    from harness.questions import check
    from harness.questions.quick import combinations, search
    from harness.records.manifest import QUICK
    from harness.run import experiment as experiments
    from harness.run.budget import budget_steps
    from harness.run.orchestrator import run
    from harness.run.running_server import scenario_path

    progress, key_name = cli.make_progress(stderr=stderr), given["--api-key-env"]
    model, speed = search.first_answer(target, given["--model"], key_name, progress.line)
    words = search.count_text(target, model, key_name)
    template = search.template_tokens(target, model, words, key_name, with_system=any(wanted.depths))
    combinations.refuse_too_long(wanted, search.read_context(target, model, key_name), template)
    draft = combinations.combinations_scenario(wanted, model, key_name, exact=words is not None)
    with scenario_path(None, target, QUICK, lambda _: draft) as path:
        experiment = experiments.prepare(path, target)

        def estimate(scenario: "Scenario") -> float:
            return check.estimate_s(scenario, experiment.folder, speed, is_running=True)

        scenario, about_s = combinations.fit_answers(experiment.scenario, wanted, estimate)
        progress.line(combinations.plan_text(scenario, wanted, about_s))
        steps = budget_steps(wanted.budget_s, wanted.repeats)
        return run(replace(experiment, scenario=scenario), given["--runs"] or cli.RUNS, progress, steps)


def found_server(model: str | None, key_name: str | None, say: "Callable[[str], None]", *, is_agreed: bool) -> str:
    """Return the address of the only server of this machine, once the user agrees. Raises HarnessError."""
    from harness.questions.quick import search as quickly

    servers = {url: quickly.describe_server(url, model, key_name) for url in quickly.find_servers()}
    (url, about), *others = servers.items()
    command = command_line("harness", "quick", url, *option_words({"--model": model, "--api-key-env": key_name}))
    if others:
        what, detail = (
            f"{len(servers)} servers run on this machine, and no address is given",
            "\n".join(servers.values()),
        )
        raise HarnessError(what, detail=detail, next_step=f"Give the address of one, such as: {command}")
    if is_agreed:
        say(about)
        return url
    if not cli.has_terminal():
        what = f"no address is given, and there is no terminal to ask whether this server may get load: {about}"
        raise HarnessError(what, next_step=f"{command} (or --yes)")
    say(about)
    say("It gets 1, 4 and 8 concurrent requests for about 15 s. Measure it? [Y/n]")
    try:
        answer = input()
    except EOFError:
        raise KeyboardInterrupt from None
    if answer.strip().lower() not in ("", "y", "yes"):
        raise HarnessError("no load was sent", next_step="For another server: harness quick http://HOST:PORT")
    return url
