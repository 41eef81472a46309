"""This machine as a worker (`harness worker`): a new Locust process for each load of the master's run."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from harness.base import process
from harness.base.errors import HarnessError
from harness.scenario.workers import FROM_MASTER, parse_address

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
