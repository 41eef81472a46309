"""Load processes on other machines: the workers of a run, and this machine as a worker (`harness worker`)."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from harness.base import process
from harness.base.errors import HarnessError
from harness.scenario import Load
from harness.scenario.plan import mix_of

PORT = 5557  # Locust's own
FROM_MASTER = "-"  # a value of --job: the master sends the job, as it sends the locustfile with `-f -`
MACHINE = 10_000_000  # above every pid. A run's files number a load process as its machine * MACHINE + its pid


class Workers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The machines that send a run's load."""

    names: list[str] = []  # of the machines; empty: any machines
    machines: int
    processes: int = 1  # of each machine
    bind: str  # address of this machine at which the workers connect to the master
    port: int = PORT

    @property
    def total(self) -> int:
        """Load processes of all machines."""
        return self.machines * self.processes

    @property
    def command(self) -> str:
        """The command that starts the workers on a machine."""
        more = f" --processes {self.processes}" if self.processes > 1 else ""
        address = "ADDRESS" if self.bind in ("0.0.0.0", "*") else self.bind  # the first two: all addresses
        return f"harness worker --master {address}:{self.port}{more}"

    def missing_text(self, names: Sequence[str]) -> str:
        """Describe the missing workers. `names`: the machine of each connected load process."""
        text = f"waiting for workers: {len(names)} of {self.total} connected"
        missing = Counter(self.names * self.processes) - Counter(names)
        return f"{text}; missing: {', '.join(sorted(missing))}" if missing else text

    def check_port(self) -> None:
        """Raise HarnessError when the port cannot be opened, before a server or worker starts."""
        try:
            with socket.socket() as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(("" if self.bind == "*" else self.bind, self.port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no port is above 65535"
            raise HarnessError(
                f"--bind: {self.bind}:{self.port} cannot be listened at ({reason})",
                next_step="Give an address of this machine, and a port that is free.",
            ) from None


def parse_workers(given: str, bind: str | None, loads: Mapping[str, Load]) -> Workers:
    """Parse `--workers` (names, or how many) and `--bind`. Raises HarnessError."""
    names, machines = parse_names(given)
    if bind is None:
        raise HarnessError(
            "--workers needs --bind: the address of this machine at which the workers find it",
            next_step="Give one that only they reach, such as --bind 10.0.0.1: "
            "Locust's connection has neither a password nor encryption.",
        )
    host, port = parse_address("--bind", bind)
    processes, *others = {load.processes for load in loads.values()}
    if others:
        raise HarnessError(
            "--workers: the loads differ in 'processes', and a worker is started once for all of them",
            next_step="Give each load the same number: it is that of each machine.",
        )
    total = machines * processes
    for name, load in loads.items():
        if mix_of(name) is None and load.users % total:
            raise HarnessError(
                f"$.loads.{name}: {load.users} users cannot be divided among {total} load processes",
                next_step=f"Each takes the same share of the work, so use a multiple of {total}.",
            )
    return Workers(names=names, machines=machines, processes=processes, bind=host, port=port)


def parse_names(given: str) -> tuple[list[str], int]:
    """Return the names in `--workers`, empty where it is a number, and their number. Raises HarnessError."""
    names = [name.strip() for name in given.split(",")]
    number = int(names[0]) if len(names) == 1 and names[0].isascii() and names[0].isdigit() else None
    if number == 0 or not all(names) or len(set(names)) < len(names) or (number or len(names)) > 1000:
        raise HarnessError(
            f"--workers: must be different host names, or a count (got {given!r})",
            next_step="Give their names, such as gen1,gen2, or how many there are. "
            "`loads.NAME.processes` says how many processes each of them has.",
        )
    return [] if number else names, number or len(names)


def parse_address(option: str, given: str) -> tuple[str, int]:
    """Return host and port; the default is Locust's port. Raises HarnessError."""
    match = re.fullmatch(r"([^\s:/]+)(?::(\d{1,5}))?", given)
    port = int(match[2]) if match and match[2] else PORT
    if match is None or not 0 < port < 65536:
        raise HarnessError(
            f"{option}: '{given}' is not an address", next_step="Give one such as 10.0.0.1 or 10.0.0.1:5557."
        )
    return match[1], port


# This machine as a worker: a new Locust process for each load of the master's run.

_PAUSE_S = 0.5
_GRACE_S = 6.0
# Lines that Locust logs while it is idle, and at each start and end.
_IDLE_LINE = re.compile(rb"Waiting to connect to master|Got no locustfile response|\[[^]]*\] [^/ ]*/INFO/locust\.")


def run_worker(master: str, processes: int, *, once: bool = False) -> None:
    """Send one load after the other, until KeyboardInterrupt; with `once` only one.

    Raises HarnessError for a master whose name is unknown, and with `once` for a load that failed.
    """
    host, port = parse_address("--master", master)
    _check_host(host, port)
    command = [sys.executable, "-m", "locust", "-f", "-", "--worker", "--master-host", host, "--master-port", str(port)]
    command += ["--job", FROM_MASTER]
    if processes > 1:
        command += ["--processes", str(processes)]
    was_idle = False  # Locust gives up on a master after some minutes, and ends at once while it sends another load
    while True:
        if not was_idle:
            print(f"waiting for a load from {host}:{port}", flush=True)
        code, has_output, undelivered = _run_load(command)
        was_idle = not has_output and code >= 0
        if not was_idle:
            if code or undelivered:
                kept = f"; what it had recorded is in {undelivered}" if undelivered else ""
                print(f"{_describe_end(code)}{kept}", flush=True)
            if once and code:
                raise HarnessError(f"the load ended with exit code {code}", next_step="Its log is above.")
            if once:
                return
        time.sleep(_PAUSE_S)


def _run_load(command: list[str]) -> tuple[int, bool, Path | None]:
    """Run Locust until it ends. Return its exit code, whether it logged a load, and the folder of undelivered records.

    Each run has its own temporary folder. Locust writes the locustfile there under a fixed name, and another worker of
    this machine could read it half written.
    """
    folder = Path(tempfile.mkdtemp(prefix="amd-llm-load-worker-"))
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    child = process.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    assert child.stdout is not None
    try:
        has_output = _relay(child.stdout)
        code = child.wait()
    finally:
        try:
            process.stop(child, grace_s=_GRACE_S)
            _relay(child.stdout)  # after Ctrl-C: undelivered records
        finally:  # also after a second Ctrl-C
            has_records = any(folder.glob("amd-llm-load-*"))
            if not has_records:
                shutil.rmtree(folder, ignore_errors=True)
    return code, has_output, folder if has_records else None


def _relay(lines: IO[bytes]) -> bool:
    """Print all lines except idle ones; return whether there were any."""
    has_output = False
    for line in lines:
        if not _IDLE_LINE.match(line):
            has_output = True
            print(line.decode(errors="replace"), end="", flush=True)
    return has_output


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"a load process ended with exit code {code}"
    name = signal.Signals(-code).name
    memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"the load process was ended by {name}{memory}: its load cannot be valid"


def _check_host(host: str, port: int) -> None:
    """Raise HarnessError for an unknown host name. The master need not be up yet."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # UnicodeError: an invalid name
        raise HarnessError(
            f"--master: no machine has the name '{host}'",
            next_step="Give the name or address at which this machine reaches it, such as 10.0.0.1:5557.",
        ) from None
