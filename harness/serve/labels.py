"""The labels that everything of ours carries in the Docker Engine, and whether its owner still lives."""

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

OURS = "amd-llm-load"
RUN = "amd-llm-load.run"
CELL = "amd-llm-load.cell"
CACHE = "amd-llm-load.cache"  # volumes that are kept between runs
HOST = "amd-llm-load.host"
MACHINE = "amd-llm-load.machine"  # hosts may share a name
BOOT = "amd-llm-load.boot"
PID = "amd-llm-load.pid"
PID_NAMESPACE = "amd-llm-load.pid-namespace"  # process ids mean nothing outside of it
PID_START = "amd-llm-load.pid-start"  # tells a process from a later one with the same id

MACHINE_ID = Path("/etc/machine-id")


def name_of(run_id: str, cell_id: str) -> str:
    """How the names of a cell's containers and of its network begin."""
    # A stage or probe is LOAD@USERS, and Docker's names have no @.
    return f"amd-llm-load-{run_id}-{cell_id.replace('@', '.')}"


def owned(run_id: str, cell_id: str) -> dict[str, str]:
    """The labels of what this process starts for a cell."""
    return {OURS: "1", RUN: run_id, CELL: cell_id, **owner()}


def owner() -> dict[str, str]:
    """What tells this process from every other of any host and boot."""
    pid = os.getpid()
    return {
        HOST: socket.gethostname(),
        MACHINE: _machine_id(),
        BOOT: _boot_id(),
        PID: str(pid),
        PID_NAMESPACE: _pid_namespace(),
        PID_START: _start_time(pid) or "",
    }


def owner_is_gone(labels: Mapping[str, str]) -> bool:
    """Whether the harness process that started it has ended.

    An owner that cannot be seen from here counts as alive: one on another machine (an engine shared through
    DOCKER_HOST), be it of the same name, or in another or unknown pid namespace (a CI runner in a container with the
    host's network and name).
    """
    if labels.get(HOST) != socket.gethostname():
        return False
    if labels.get(BOOT) != _boot_id():  # an earlier boot of this machine, or a namesake of it
        return _machine_id() != "" and labels.get(MACHINE) == _machine_id()
    if (labels.get(PID_NAMESPACE) or None) != _pid_namespace():  # an empty one is unknown
        return False
    pid = labels.get(PID, "")
    known = pid.isascii() and pid.isdigit() and len(pid) < 12
    return not known or _start_time(int(pid)) != (labels.get(PID_START) or None)


def _machine_id() -> str:
    """This machine's own id, as a hash of it: it is confidential (machine-id(5)). Empty where it has none."""
    try:
        own = MACHINE_ID.read_bytes().strip()
    except OSError:
        return ""
    return hashlib.sha256(b"amd-llm-load " + own).hexdigest()[:32] if own else ""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """The process's start in clock ticks since boot; None when it does not exist (a zombie does not either)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
