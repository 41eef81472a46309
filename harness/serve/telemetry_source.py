"""Where a server's telemetry comes from: this machine's files, or its container."""

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from harness.machine.sampler import Source, local_source, root
from harness.machine.telemetry import cgroup_files
from harness.serve.docker.daemon import engine_host
from harness.serve.docker.inside import has_shell, inside
from harness.serve.endpoint import Endpoint


def source_of(endpoint: Endpoint) -> Source | None:
    """None for a server on another machine that nobody can look into."""
    container = endpoint.container
    if container is None:
        return local_source() if _is_here(endpoint.url) else None
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
    return local_source() if engine_host() is None else None


def _is_here(url: str) -> bool:
    """Whether a URL leads to this machine, by its name or a loopback address."""
    host = urlsplit(url).hostname or ""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
