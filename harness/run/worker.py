"""This machine as a worker: stock Locust, one life for each load of the master's run."""

import socket
import sys
import time

from harness import process
from harness.errors import HarnessError
from harness.workers import FROM_MASTER, parse_address

_PAUSE_S = 0.5
_GRACE_S = 6.0


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
    while True:
        child = process.start(command, stdout=sys.stdout.fileno(), stderr=sys.stderr.fileno())
        try:
            code = child.wait()
        finally:
            process.stop(child, grace_s=_GRACE_S)
        if once:
            if code:
                raise HarnessError(f"the load ended with exit code {code}", next_step="Its log is above.")
            return
        time.sleep(_PAUSE_S)


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
