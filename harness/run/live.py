"""Live load: a scenario's server with Locust's web UI in front of it, until Ctrl-C."""

import time
from pathlib import Path

import msgspec

from harness.errors import HarnessError, Mistakes, RunError, ServerError
from harness.prepare.experiment import Experiment, load_name, server_name
from harness.prepare.preflight import preflight
from harness.report.words import SIMULATED
from harness.run.drive import GRACE_S, tail
from harness.run.progress import Progress
from harness.run.run import endpoint_of, generator, make_job, watched
from harness.run.running import begin, finish
from harness.scenario.check_syntax import parse_check, slos_key
from harness.scenario.plan import plan
from harness.serve.ports import is_free

UI_HOST = "127.0.0.1"
INTERVAL_S = 1.0


def live(
    experiment: Experiment, server: str | None, load: str | None, port: int, runs: Path, progress: Progress
) -> None:
    """Serve the UI until it is ended from outside. Everything that was started is taken down then.

    Users and rate are the scenario's at first, and the person's from then on. What is sent is recorded, but a load
    steered by hand is never valid for a comparison. Raises HarnessError.
    """
    wrong = Mistakes()
    with wrong.noted():
        cell_server = server_name(experiment, server)
    with wrong.noted():
        cell_load = load_name(experiment, load)
    with wrong.noted():
        if not is_free(port):
            raise HarnessError(f"--port: {port} is in use already", next_step="Give another, such as --port 8090.")
    wrong.refuse()
    slos = slos_for(experiment.scenario.checks, cell_server, cell_load)
    # The UI belongs to this host, whatever the scenario says about its measured runs.
    # The person decides what is sent and when it ends, so nothing is planned and nothing is checked.
    free = msgspec.structs.replace(experiment.scenario.loads[cell_load], requests=None, duration_s=None)
    scenario = msgspec.structs.replace(
        experiment.scenario,
        servers={cell_server: experiment.scenario.servers[cell_server]},
        loads={cell_load: free},
        baseline=None,
        compare=[],
        checks=[],
        repeats=1,
        generator="process",
    )
    experiment = msgspec.structs.replace(experiment, scenario=scenario)
    experiment = preflight(experiment, progress.line)
    cell = plan(experiment.scenario)[0]
    running, manifest = begin(experiment, [cell], runs, progress)
    try:
        with progress.live(), endpoint_of(running, cell) as endpoint:
            job = msgspec.structs.replace(make_job(running, cell, endpoint), slos=slos)
            start = generator(running, job, endpoint, (UI_HOST, port))
            # Written here, and read by the page: the load processes only measure what they have sent themselves.
            with watched(running, job, endpoint, INTERVAL_S):
                child = start()
                try:
                    progress.line(f"server: {endpoint.url}" + (f" ({SIMULATED})" if job.simulated else ""))
                    progress.line(f"Locust: http://{UI_HOST}:{port}")
                    progress.line(f"LLM numbers, live: the tab LLM there, and http://{UI_HOST}:{port}/llm")
                    progress.stage("serving; Ctrl-C takes everything down")
                    while child.poll() is None:
                        dead = endpoint.check_alive()
                        if dead is not None:
                            raise ServerError(f"the server died: {dead}")
                        time.sleep(0.5)
                finally:
                    code = child.stop(GRACE_S)
            raise RunError(f"Locust's web UI ended (exit code {code})", detail=tail(running.log_path(cell.id)))
    finally:
        finish(running.folder, manifest, "live", ["a live load, steered by hand, is not judged"])
        if (running.folder / "requests.jsonl").stat().st_size:
            progress.line(f"What was sent is recorded: harness report {running.folder}")


def slos_for(checks: list[str], server: str, load: str) -> str:
    """The SLOs of the first check that has some for this row; "" without any."""
    for check in map(parse_check, checks):
        if check.slos and (check.server, check.load) in ((None, None), (server, load)):
            return slos_key(check.slos)
    return ""
