"""The embedded engine as a plain process, for machines without Docker."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import process
from harness.errors import ServerError
from harness.failures.explain import State
from harness.serve.compose.compose import Service
from harness.serve.docker.containers import Look, look_at_end
from harness.serve.logfile import LogFile


def command_of(service: Service) -> list[str]:
    """The command of the service's container, for this host: our own interpreter, and 127.0.0.1 only."""
    command = list(service.command or [])
    command[0] = sys.executable
    command[command.index("--host") + 1] = "127.0.0.1"
    return command


def arguments_of(service: Service) -> list[str]:
    """The arguments that say what the engine is; where it listens differs from start to start."""
    arguments = list(service.command or [])
    for flag in ("--host", "--port"):
        at = arguments.index(flag)
        del arguments[at : at + 2]
    return arguments


@contextlib.contextmanager
def embedded(service: Service, log_path: Path) -> Iterator[tuple[Callable[[bool], Look], LogFile]]:
    """The engine while it runs: a function that looks at it, and its log. It ends with us, however we end."""
    log = LogFile(log_path)
    environment = {**os.environ, **service.environment}
    try:
        child = process.start(command_of(service), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    except OSError as error:
        raise ServerError(f"the embedded engine cannot be started: {error}") from None
    assert child.stdout is not None
    output = child.stdout.fileno()
    log.follow(lambda: iter(lambda: os.read(output, 65536), b""))
    try:
        yield lambda _now: _look(child, log), log
    finally:
        process.stop(child)
        log.settle()
        child.stdout.close()


def _look(child: "subprocess.Popen[bytes]", log: LogFile) -> Look:
    code = child.poll()
    if code is None:
        return Look()
    return look_at_end(code, State(exit_code=code), log)
