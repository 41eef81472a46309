"""This machine as a worker: stock Locust, one life for each load of the master's run."""

import sys
import time

from harness import process
from harness.errors import HarnessError
from harness.workers import FROM_MASTER, parse_address

_PAUSE_S = 0.5
_GRACE_S = 6.0


def lend(master: str, processes: int, *, once: bool = False) -> None:
    """Serve one load after the other, until KeyboardInterrupt. Raises HarnessError after a single one that failed."""
    host, port = parse_address("--master", master)
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
