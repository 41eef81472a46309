"""Commands that start something: servers, loads, or the check of a scenario before that."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import (
    RESULTS,
    RUNS,
    AboutOpt,
    BaselineOpt,
    CaOpt,
    ChecksOpt,
    ModelOpt,
    ResultsDir,
    RunsDir,
    ScenarioArg,
    ServerOpt,
    UrlOpt,
    address,
    command,
    console,
    find_baseline,
    junit_of_failure,
    listening_address,
    root_folder,
    show,
    target_of,
    worker_names,
)
from harness.errors import ExitCode, Mistakes

UI_PORT = 8089  # Locust's own


@command(short_help="Start the servers, load them, take everything down, report.")
def run(
    scenario: ScenarioArg,
    url: UrlOpt = None,
    ca: CaOpt = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(help="With --url: where its metrics are (default: URL/metrics).", callback=address),
    ] = None,
    model: ModelOpt = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Override the scenario's repeats.")] = None,
    checks: ChecksOpt = None,
    baseline: BaselineOpt = None,
    about: AboutOpt = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write checks and verdicts as JUnit XML.")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="With --url: machines that send the load, or how many.", callback=worker_names
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="With --workers: where they find this machine (port 5557).",
            callback=listening_address,
        ),
    ] = None,
    runs: RunsDir = RUNS,
    results: ResultsDir = RESULTS,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve Locust's web UI instead of measuring; same as `harness live`.")
    ] = False,
    ui_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="With --ui: port of the web UI on 127.0.0.1 (default: 8089)."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the columns below the table.")] = False,
) -> None:
    """Start the scenario's servers, load them, take everything down, and report."""
    from harness.compare.reference import reference_to, write_reference
    from harness.prepare import experiment as experiments
    from harness.prepare.preview import check_notes
    from harness.process import signals_interrupt
    from harness.run import trusted_streams
    from harness.run.progress import Progress
    from harness.run.run import run as run_experiment
    from harness.rundir.manifest import read_run

    if ui:
        live(scenario, url=url, ca=ca, model=model, port=ui_port or UI_PORT, runs=runs)
        return
    wrong = Mistakes()
    with wrong.noted():
        base = None if baseline is None else find_baseline(baseline, runs)
    with wrong.noted():
        experiment = experiments.prepare(scenario, target_of(url, metrics_url, ca), model, repeats, checks or [])
        if workers is not None:
            experiment = experiments.with_workers(experiment, workers, bind)
    wrong.refuse()
    for note in check_notes(experiment.scenario):
        console().print(f"note: {note}")
    for note in [] if workers else trusted_streams.notes(experiment.scenario):
        console().print(note)
    with junit_of_failure(junit, scenario.stem), signals_interrupt():
        folder = run_experiment(experiment, runs, Progress(console()))
    if base is not None:
        write_reference(folder, reference_to(base, read_run(folder), about=about))
    show(folder, explain=explain, junit=junit)


@command(short_help="Serve Locust's web UI for a scenario's server.")
def live(
    scenario: ScenarioArg,
    server: ServerOpt = None,
    load: Annotated[str | None, typer.Option(help="Which of the scenario's loads (default: the first).")] = None,
    url: UrlOpt = None,
    ca: CaOpt = None,
    model: ModelOpt = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the web UI on 127.0.0.1.")] = UI_PORT,
    runs: RunsDir = RUNS,
) -> None:
    """Bring a scenario's server up and serve Locust's web UI for it; Ctrl-C takes everything down."""
    from harness.prepare import experiment as experiments
    from harness.process import signals_interrupt
    from harness.run import live as living
    from harness.run.progress import Progress

    experiment = experiments.prepare(scenario, target_of(url, ca=ca), model)
    with signals_interrupt():
        living.live(experiment, server, load, port, runs, Progress(console()))


@command(short_help="Validate a scenario and show its plan.")
def check(
    scenario: ScenarioArg,
    model: ModelOpt = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Override the scenario's repeats.")] = None,
    checks: ChecksOpt = None,
) -> None:
    """Validate a scenario and show its plan, without running anything."""
    from harness.prepare import experiment as experiments
    from harness.prepare.auto import foretell
    from harness.prepare.machine_fit import refuse_impossible
    from harness.prepare.preflight import notes
    from harness.prepare.preview import show_plan
    from harness.run import trusted_streams

    experiment = experiments.prepare(scenario, None, model, repeats, checks or [])
    show_plan(experiment, console())
    for note in [*notes(experiment), *foretell(experiment), *trusted_streams.notes(experiment.scenario)]:
        console().print(note)
    refuse_impossible(experiment)


@command(short_help="Look for what stands in the way on this machine.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    root: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Read the /proc, /sys, /dev, /etc and /var below DIR instead.", callback=root_folder
        ),
    ] = Path("/"),
) -> None:
    """Look at GPU, memory, kernel, access, Docker and processes of this machine; exit code 4 with a blocker."""
    from harness.machine import doctor as doctors
    from harness.machine.doctor import show
    from harness.serve.docker.engine import engine_facts

    # Of another machine's files, this machine's Docker Engine and shell know nothing.
    here = root.resolve() == Path("/")
    found = doctors.diagnose(root, engine_facts() if here else None, os.environ if here else None)
    if as_json:
        print(show.as_json(found, root))
    else:
        show.show(found, console(), root)
    if doctors.worst(found) == "blocker":
        raise typer.Exit(ExitCode.FAILED)


@command(short_help="How many streams this machine's load generator can be trusted for.")
def calibrate(
    most: Annotated[int | None, typer.Option(min=1, max=20_000, help="Try no more streams than this.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Load processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the readings as JSON.")] = False,
) -> None:
    """Hold the load generator's chunk times against the embedded engine's own, with more and more streams at once."""
    from harness.process import signals_interrupt
    from harness.run.calibrate import show_readings

    with signals_interrupt():
        show_readings(console(), most, processes, as_json=as_json)


@command(short_help="Print the Compose file that would be run.")
def compose(
    scenario: ScenarioArg,
    server: ServerOpt = None,
    load: Annotated[str | None, typer.Option(help="Which of the scenario's loads; required with several.")] = None,
    ui_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Locust's web UI on 127.0.0.1.")] = UI_PORT,
    workers: Annotated[
        int, typer.Option(min=0, max=1000, help="Containers that send the load (`--scale worker=N`).")
    ] = 0,
    records: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the request records to this folder.")
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="No web UI: send the load once, as a run would, and exit.")
    ] = False,
) -> None:
    """Print the Compose file that the harness would run, for `docker compose up`."""
    from harness.prepare import experiment as experiments
    from harness.prepare.auto import fill_in
    from harness.run.live import compose_file

    experiment = experiments.prepare(scenario)
    experiment = fill_in(experiment, lambda line: print(line, file=sys.stderr))
    text = compose_file(experiment, server, load, ui_port=ui_port, workers=workers, records=records, headless=headless)
    print(text, end="")


@command(short_help="Measure how far equal runs differ on this machine.")
def noise(
    scenario: ScenarioArg,
    server: ServerOpt = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Override the scenario's repeats.")] = None,
    count: Annotated[int, typer.Option("--runs", min=1, max=1000, help="How many A/A runs.")] = 1,
    every: Annotated[
        float, typer.Option(metavar="MINUTES", min=0, help="Pause between them: spread them over hours.")
    ] = 0.0,
    add: Annotated[bool, typer.Option("--add", help="Keep the runs that were stored before.")] = False,
    url: UrlOpt = None,
    ca: CaOpt = None,
    model: ModelOpt = None,
    folder: Annotated[
        Path, typer.Option("--runs-dir", help="Where the A/A runs are kept.", envvar="HARNESS_RUNS")
    ] = RUNS,
    results: ResultsDir = RESULTS,
) -> None:
    """Run a scenario with one server under two names, and store how far equal repeats and equal runs differ.

    Comparisons of runs of the same machine and scenario use it. Several runs, spread over time, show what one does not.
    """
    from harness.prepare import experiment as experiments
    from harness.process import signals_interrupt
    from harness.run import noise as noises
    from harness.run.progress import Progress

    experiment = experiments.prepare(scenario, target_of(url, ca=ca), model, repeats)
    with signals_interrupt():
        stored, found = noises.noise(
            experiment, server, folder, results, Progress(console()), count=count, pause_s=60 * every, add=add
        )
    noises.show(found, console())
    print(f"stored: {stored}")


@command(short_help="List the scenarios that ship.")
def scenarios() -> None:
    """List the scenarios that ship, each with its question."""
    from harness.cli.listing import show_scenarios

    show_scenarios(console())


@command(short_help="Remove what a killed run left behind.")
def clean(
    everything: Annotated[
        bool, typer.Option("--all", help="Also what a harness that lives, or may live, has started.")
    ] = False,
    caches: Annotated[
        bool,
        typer.Option("--caches", help="Also the caches (models, kernels), unless a harness may use them."),
    ] = False,
) -> None:
    """Remove what a killed run left behind: containers, networks and volumes that carry our label, nothing else."""
    from harness.serve import connect, sweep

    with contextlib.closing(connect()) as client:
        removed = sweep(client, everything=everything, caches=caches)
    print("\n".join(f"removed {item}" for item in removed) if removed else "nothing of ours was left behind")
