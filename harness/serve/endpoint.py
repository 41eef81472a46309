"""A server that answers: what the load needs of it."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from docker.models.containers import Container

from harness.machine.telemetry import Source, cgroup_files, local_source, root
from harness.rundir.manifest import ServedBy, ServerDeath
from harness.serve.docker.containers import Look
from harness.serve.docker.inside import has_shell, inside
from harness.serve.docker.location import engine_location, is_this_machine


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answers."""

    url: str  # as this host reaches it, without a slash at the end
    started: ServedBy  # as it was when it became ready
    look: Callable[[bool], Look]  # with true: look now, else within the last half second
    metrics_url: str | None = None
    fetch_metrics: Callable[[], str] | None = None  # in its place, where one address does not have them all
    find_problems: Callable[[], list[str]] | None = None  # what it hides from its clients, since the last call
    ask_engine: Callable[[str, dict[str, Any]], str] | None = None  # POST to the engine behind it; empty: no answer
    network: str | None = None  # Docker network of the server's container
    network_url: str | None = None  # as a container in that network reaches it
    container: Container | None = None  # that works; None: a process, or a server that already ran

    @property
    def served_by(self) -> ServedBy:
        """What served until now: restarts, OOM kills and an early end included."""
        seen = self.look(True)
        return msgspec.structs.replace(
            self.started,
            restarts=seen.restarts,
            oom_killed=seen.oom_killed,
            exit_code=None if seen.death is None or seen.death.of_gateway else seen.death.exit_code,
            death=seen.death,
        )

    @property
    def metrics_source(self) -> str | Callable[[], str] | None:
        """Where its metrics come from: an address, or a function that gives the text."""
        return self.fetch_metrics or self.metrics_url

    def problems(self) -> list[str]:
        """Why what was measured since the last call cannot be trusted, as far as the server lives to tell."""
        return [] if self.find_problems is None or self.check_alive() is not None else self.find_problems()

    def death(self, now: bool = False) -> ServerDeath | None:
        return self.look(now).death

    def check_alive(self) -> str | None:
        """None while the server lives, else why the load must end. Cheap: made to be asked all the time."""
        death = self.death()
        return None if death is None else death.problem()


def source_of(endpoint: Endpoint) -> Source | None:
    """Where a server's telemetry comes from: the files of this machine, or its container.

    None for a server on another machine when its container cannot print them.
    """
    container = endpoint.container
    if container is None:
        return local_source() if is_this_machine(urlsplit(endpoint.url).hostname or "") else None
    pid = int(container.attrs["State"].get("Pid") or 0)
    files = cgroup_files(root(), pid, str(container.id))
    if files:
        if container.attrs["HostConfig"].get("NetworkMode") != "host":  # else it counts for all programs
            files.append(f"proc/{pid}/net/netstat")
        return local_source(files)
    # Its processes are not among this machine's: the engine is elsewhere, whatever its address is, or we are in a
    # container ourselves. What is seen from within is right in all cases.
    if has_shell(container):
        return inside(container)
    return local_source() if engine_location().is_here else None
