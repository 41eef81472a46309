"""The load generator in a container: the project's image, in the server's network, writing into the run directory."""

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docker.errors import NotFound
from docker.types import Mount

from harness.base.files import LOCUSTFILES
from harness.base.process import signals_ignored
from harness.serve.containers import LogFile, follow_log
from harness.serve.docker_engine import DOCKER_ERRORS, connect, ensure_image, make_docker_error, make_labels, make_name
from harness.workload.job import Job, loads_of

IMAGE = os.environ.get("HARNESS_IMAGE", "amd-llm-load:local")  # `make image`
IMAGE_LOCUSTFILES = Path("/opt/amd-llm-load/locustfiles")


def find_path_in_image(locustfile: Path) -> Path:
    """Return a locustfile's path in the container: in the image, or for an own one mounted at the same path."""
    return IMAGE_LOCUSTFILES / locustfile.name if locustfile.parent == LOCUSTFILES else locustfile


def list_needed_files(job: Job, *locustfiles: Path) -> list[str]:
    """Return the files and folders of this host that a load generator in a container needs, besides its job.

    An own locustfile needs its whole folder, from which it may import modules and read files.
    """
    own = [str(file.parent) for file in locustfiles if file.parent != LOCUSTFILES]
    loads = loads_of(job)
    files = [
        file for load_job in loads for file in (load_job.prompt_file, load_job.trace_file, load_job.trace_marks) if file
    ]
    return list(dict.fromkeys([*own, *files]))


class ContainerChild:
    """Locust in a container. It writes files of this host."""

    def __init__(
        self,
        run_id: str,
        job: Job,
        arguments: list[str],
        locustfiles: Sequence[Path],
        network: str | None,
        log_path: Path,
    ) -> None:
        """Raises ServerError."""
        self._client = connect()
        with contextlib.ExitStack() as undo:
            undo.callback(self._client.close)
            try:
                ensure_image(self._client, IMAGE, lambda _line: None)
                options = self._options(run_id, job, arguments, locustfiles, network)
                self._container = self._client.containers.create(IMAGE, **options)
                undo.callback(self._remove)
                self._container.start()
            except DOCKER_ERRORS as error:
                raise make_docker_error("the load generator's container cannot be started", error) from None
            undo.pop_all()
        self._log = LogFile(log_path)
        follow_log(self._container, self._log)
        self._code: int | None = None

    @staticmethod
    def _options(
        run_id: str, job: Job, arguments: list[str], locustfiles: Sequence[Path], network: str | None
    ) -> dict[str, Any]:
        folder = str(Path(job.requests_path).parent)
        mounts = [Mount(folder, folder, type="bind")]
        mounts += [Mount(file, file, type="bind", read_only=True) for file in list_needed_files(job, *locustfiles)]
        key = job.api_key_env
        return {
            "command": ["locust", *arguments],
            "name": f"{make_name(run_id, job.cell)}-locust",
            "labels": make_labels(run_id, job.cell),
            "network": network or "host",
            "mounts": mounts,
            # The records must belong to the user who started the harness, as the run directory does.
            "user": f"{os.getuid()}:{os.getgid()}",
            # `docker inspect` shows it, so it has the one secret that it needs.
            "environment": {
                "HOME": "/tmp",
                **({key: os.environ[key]} if key else {}),
            },
            # It may write only into the run directory.
            "read_only": True,
            "tmpfs": {"/tmp": ""},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "hostname": socket.gethostname() if network is None else None,
            "init": True,
            "detach": True,
        }

    def _remove(self) -> None:
        with signals_ignored(), contextlib.suppress(*DOCKER_ERRORS):
            self._container.remove(v=True, force=True)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self._code is None:
            try:
                self._container.reload()
                state = self._container.attrs["State"]
                if state["Status"] in ("exited", "dead"):
                    self._code = int(state["ExitCode"])
            except NotFound:
                self._code = -1
            except DOCKER_ERRORS as error:
                raise make_docker_error("the load generator's container cannot be watched", error) from None
        return self._code

    def stop(self, grace_s: float) -> int:
        """Stop it, kill it after `grace_s`, remove it, and return the exit code; -1 if it is unknown."""
        try:
            try:
                if self.poll() is None:
                    self._container.stop(timeout=int(grace_s))
                    self.poll()
                self._log.wait_for_end()
            finally:  # after a second Ctrl-C, too
                with signals_ignored(), contextlib.closing(self._client):
                    self._container.remove(v=True, force=True)
        except NotFound:
            pass
        except DOCKER_ERRORS as error:
            raise make_docker_error("the load generator's container cannot be removed", error) from None
        return -1 if self._code is None else self._code
