"""This machine as a worker: a new Locust process for each load of the master's run."""

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
from typing import IO, NamedTuple

from harness import process
from harness.errors import HarnessError
from harness.workers import FROM_MASTER, parse_address

_PAUSE_S = 0.5
_GRACE_S = 6.0
# Lines that Locust logs while it is idle, and at each start and end.
_LOCUSTS_OWN = re.compile(rb"Waiting to connect to master|Got no locustfile response|\[[^]]*\] [^/ ]*/INFO/locust\.")


class _Life(NamedTuple):
    code: int
    quiet: bool  # no load and no problem
    left: Path | None  # folder of undelivered records


def lend(master: str, processes: int, *, once: bool = False) -> None:
    """Serve one load after the other, until KeyboardInterrupt.

    Raises HarnessError for a master whose name is not known, and after a single load that failed.
    """
    host, port = parse_address("--master", master)
    _refuse_unknown(host, port)
    command = [sys.executable, "-m", "locust", "-f", "-", "--worker", "--master-host", host, "--master-port", str(port)]
    command += ["--job", FROM_MASTER]
    if processes > 1:
        command += ["--processes", str(processes)]
    quiet = False
    while True:
        if not quiet:
            print(f"waiting for a load from {host}:{port}", flush=True)
        life = _live(command)
        quiet = life.quiet
        if (life.code and not quiet) or life.left:  # quiet: Locust gives up on a master after some minutes
            print(_how_it_ended(life, once), flush=True)
        if once and not quiet:
            if life.code:
                raise HarnessError(f"the load ended with exit code {life.code}", next_step="Its log is above.")
            return
        time.sleep(_PAUSE_S)


def _live(command: list[str]) -> _Life:
    """Locust until it ends, with a temporary folder of its own: it puts the locustfile there by its bare name, and
    another worker of this machine would read it half written.
    """
    folder = Path(tempfile.mkdtemp(prefix="amd-llm-load-worker-"))
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    child = process.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    assert child.stdout is not None
    try:
        spoke = _relay(child.stdout)
        code = child.wait()
    finally:
        try:
            process.stop(child, grace_s=_GRACE_S)
            _relay(child.stdout)  # after Ctrl-C: undelivered records
        finally:  # also after a second Ctrl-C
            left = any(folder.glob("amd-llm-load-*"))
            if not left:
                shutil.rmtree(folder, ignore_errors=True)
    return _Life(code, not spoke and code >= 0, folder if left else None)


def _relay(lines: IO[bytes]) -> bool:
    """Print lines that are not Locust's own. Return whether there were any."""
    spoke = False
    for line in lines:
        if not _LOCUSTS_OWN.match(line):
            spoke = True
            print(line.decode(errors="replace"), end="", flush=True)
    return spoke


def _how_it_ended(life: _Life, once: bool) -> str:
    kept = f"; what it had recorded is in {life.left}" if life.left else ""
    if life.code >= 0:  # 0: another process of the worker failed
        return (
            f"a load process ended with exit code {life.code}{kept}"
            if life.code
            else f"a load process ended before all had been delivered{kept}"
        )
    name = signal.Signals(-life.code).name
    memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    next_one = "" if once else "; the next one is served again"
    return f"the load process was ended by {name}{memory}: its load cannot be valid{next_one}{kept}"


def _refuse_unknown(host: str, port: int) -> None:
    """Raise HarnessError for an unknown host name. A master that is not up yet is no error."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: an invalid name
        if isinstance(error, socket.gaierror) and error.errno != socket.EAI_NONAME:
            return  # a temporary problem of the name server
        raise HarnessError(
            f"--master: no machine has the name '{host}'",
            next_step="Give the name or address at which this machine reaches it, such as 10.0.0.1:5557.",
        ) from None
