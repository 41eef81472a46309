"""Where a server's telemetry comes from: this machine's files, or its container."""

from urllib.parse import urlsplit

from harness.machine.telemetry import Source, cgroup_files, local_source, root
from harness.serve.docker.inside import has_shell, inside
from harness.serve.docker.location import engine_location, is_this_machine
from harness.serve.endpoint import Endpoint


def source_of(endpoint: Endpoint) -> Source | None:
    """None for a server on another machine that nobody can look into."""
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
