"""The command `harness quick`."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from harness.base.command_line import command_line, option_words
from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli


@cli.command(short_help="Measure a running server in 15 seconds.")
def quick(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="The server (default: one of this machine, after a question).",
            callback=cli.validate_url,
        ),
    ] = None,
    model: cli.ModelOpt = None,
    api_key_env: cli.KeyOpt = None,
    ca: cli.CaOpt = None,
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
    """
    from harness.questions.quick import search as quickly
    from harness.questions.quick.page import quick_page
    from harness.records.manifest import QUICK
    from harness.report.terminal import print_page
    from harness.run import experiment as experiments
    from harness.run.orchestrator import run as run_experiment
    from harness.run.running_server import scenario_path

    progress = cli.make_progress(stderr=as_json)
    target = cli.make_target(address or found_server(model, api_key_env, progress.line, is_agreed=yes), ca=ca)
    assert target is not None
    make = partial(quickly.quick_scenario, model=model, key_name=api_key_env, say=progress.line)
    with scenario_path(None, target, QUICK, make) as path:
        folder = run_experiment(experiments.prepare(path, target), runs, progress)
    where = None if runs == cli.RUNS else runs
    options = {"--model": model, "--api-key-env": api_key_env, "--ca": ca, "--runs": where}
    report = quickly.quick_report(folder, target, options)
    if as_json:
        cli.print_json(report)
    else:
        print_page(quick_page(report), cli.console())
        cli.console().print(f"{folder / 'report.html'}")
    if not report.valid:
        raise typer.Exit(ExitCode.INVALID)


def found_server(model: str | None, key_name: str | None, say: "Callable[[str], None]", *, is_agreed: bool) -> str:
    """Return the address of the only server of this machine, once the user agrees. Raises HarnessError."""
    from harness.questions.quick import search as quickly

    found = {url: quickly.describe_server(url, model, key_name) for url in quickly.find_servers()}
    (url, about), *others = found.items()
    again = command_line("harness", "quick", url, *option_words({"--model": model, "--api-key-env": key_name}))
    if others:
        what, detail = f"{len(found)} servers run on this machine, and no address is given", "\n".join(found.values())
        raise HarnessError(what, detail=detail, next_step=f"Give the address of one, such as: {again}")
    if is_agreed:
        say(about)
        return url
    if not cli.has_terminal():
        what = f"no address is given, and there is no terminal to ask whether this server may get load: {about}"
        raise HarnessError(what, next_step=f"{again} (or --yes)")
    say(about)
    say("It gets 1, 4 and 8 concurrent requests for about 15 s. Measure it? [Y/n]")
    try:
        answer = input()
    except EOFError:
        raise KeyboardInterrupt from None
    if answer.strip().lower() not in ("", "y", "yes"):
        raise HarnessError("no load was sent", next_step="For another server: harness quick http://HOST:PORT")
    return url
