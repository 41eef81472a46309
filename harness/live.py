"""Live load: a scenario's server with Locust's web UI in front of it, until Ctrl-C."""

import subprocess
import time
from pathlib import Path

import msgspec

from harness import paths, process
from harness.drive import locust_command, tail
from harness.errors import HarnessError, RunError, ServerError
from harness.job import write_job
from harness.plan import Cell
from harness.progress import Progress
from harness.run import Experiment, begin, endpoint_of, finish, load_name, make_job, server_name
from harness.scenario import locustfile_of
from harness.workload import salt_words


def live(
    experiment: Experiment, server: str | None, load: str | None, port: int, runs: Path, progress: Progress
) -> None:
    """Serve the UI until it is ended from outside. Everything that was started is taken down then.

    Users and rate are the scenario's at first, and the person's from then on; the run is recorded but, steered
    by hand, it is never valid for a comparison.
    """
    cell_server, cell_load = server_name(experiment, server), load_name(experiment, load)
    cell = Cell(f"live-{cell_server}-{cell_load}", cell_server, cell_load, 1)
    folder, manifest = begin(experiment, [cell], runs)
    with progress.live(), endpoint_of(experiment, manifest.id, cell, folder, progress) as endpoint:
        job = make_job(experiment, cell, folder.resolve(), endpoint.served_by.model, salt_words(manifest.id, cell.id))
        # Without end: the person decides when it stops.
        job = msgspec.structs.replace(job, load=msgspec.structs.replace(job.load, requests=None, duration_s=None))
        job_path = folder.resolve() / "jobs" / f"{cell.id}.json"
        write_job(job, job_path)
        locustfile = locustfile_of(job.load, experiment.folder, paths.LOCUSTFILES)
        command = locust_command(job, job_path, locustfile, endpoint.url, ui_port=port)
        log_path = folder / "logs" / f"{cell.id}.locust.log"
        with log_path.open("wb") as log:
            child = process.start(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                progress.line(f"Server: {endpoint.url}\nLocust: http://127.0.0.1:{port}\nCtrl-C takes everything down.")
                progress.stage("serving; Ctrl-C takes everything down")
                while child.poll() is None:
                    dead = endpoint.check_alive()
                    if dead is not None:
                        raise ServerError(f"the server died: {dead}")
                    time.sleep(0.5)
            except KeyboardInterrupt:
                progress.line("taking everything down")
            finally:
                code = process.stop(child, grace_s=5.0)
                finish(folder, manifest, "interrupted", ["live load, steered by hand"])
    if code not in (0, -15) and not log_path.read_bytes().count(b"Starting web interface"):
        raise RunError(f"Locust's web UI did not start (exit code {code})", detail=tail(log_path))


__all__ = ["HarnessError", "live"]
