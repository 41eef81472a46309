"""This machine as a worker: stock Locust, one life for each load of the master's run."""

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
# What Locust says of itself while nobody asks it for anything, and about each start and end of its process.
_LOCUSTS_OWN = re.compile(rb"Waiting to connect to master|Got no locustfile response|\[[^]]*\] [^/ ]*/INFO/locust\.")


class _Life(NamedTuple):
    """How one life of Locust ended."""

    code: int
    quiet: bool  # it had nothing to do: no load, and nothing went wrong
    left: Path | None  # where records are that were not delivered


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
            _relay(child.stdout)  # of Ctrl-C: what it had recorded and could not deliver
        finally:  # of a second Ctrl-C as well
            left = any(folder.glob("amd-llm-load-*"))
            if not left:
                shutil.rmtree(folder, ignore_errors=True)
    return _Life(code, not spoke and code >= 0, folder if left else None)


def _relay(lines: IO[bytes]) -> bool:
    """Print what is not Locust's own; whether there was any."""
    spoke = False
    for line in lines:
        if not _LOCUSTS_OWN.match(line):
            spoke = True
            print(line.decode(errors="replace"), end="", flush=True)
    return spoke


def _how_it_ended(life: _Life, once: bool) -> str:
    """One that was ended from outside could not say so itself."""
    kept = f"; what it had recorded is in {life.left}" if life.left else ""
    if life.code >= 0:  # with 0, that of another one: they are told of together
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
    """A master that is not there yet is waited for; a name that nobody knows would be waited for in vain."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a name that cannot be one
        if isinstance(error, socket.gaierror) and error.errno != socket.EAI_NONAME:
            return  # such as no answer of the name server, which may come
        raise HarnessError(
            f"--master: no machine has the name '{host}'",
            next_step="Give the name or address at which this machine reaches it, such as 10.0.0.1:5557.",
        ) from None
