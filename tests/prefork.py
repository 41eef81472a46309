"""Run the command line as a fork of a process that has imported it: imports take most of a short command's time.

The fork is a process of its own as the installed script is: own session, folder, environment, output and exit code.
"""

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
# What most commands import when they are called. Importing it must start nothing and read no setting.
IMPORTED = (
    "scipy.stats",
    "rich.live",
    "rich.table",
    "harness.run.run",
    "harness.run.noise",
    "harness.compare.compare",
    "harness.compare.history",
    "harness.report.html",
    "harness.report.terminal",
    "harness.serve.docker.sweep",
    "harness.prepare.preview",
)


@functools.cache
def _server() -> socket.socket:
    """Start the process that forks. It ends when this end of its socket is closed, so also when tests are killed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no thread may run where a process forks
        start_new_session=True,
    )
    theirs.close()

    def close() -> None:
        ours.close()
        process.wait(30)

    atexit.register(close)
    return ours


class Ended(NamedTuple):
    pid: int
    code: int  # negative: the signal that ended it
    out: str
    err: str


def run(command: list[str], cwd: Path, env: dict[str, str], timeout_s: float) -> Ended:
    """Run a command to its end. Raises subprocess.TimeoutExpired and kills the command when it takes longer."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(read, "rb", buffering=0) as answers:
        request = json.dumps({"argv": command, "cwd": str(cwd), "env": env}).encode()
        socket.send_fds(_server(), [request], [out.fileno(), err.fileno(), write])
        os.close(write)
        pid = int(answers.readline())
        if not select.select([answers], [], [], timeout_s)[0]:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(command, timeout_s)
        code = int(answers.readline())
        out.seek(0)
        err.seek(0)
        return Ended(pid, code, out.read().decode(), err.read().decode())


def _become(argv: list[str], cwd: str, env: dict[str, str], out: int, err: int) -> None:
    """Make this fork what a started script finds."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (out, 1), (err, 2)):
        os.dup2(fd, number)
    os.closerange(3, 256)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _attend(request: dict[str, Any], out: int, err: int, answers: int) -> None:
    """Fork the command and report its id and its end. Returns in the command only."""
    if pid := os.fork():
        os.write(answers, f"{pid}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(answers, f"{code}\n".encode())
        os._exit(0)
    _become(request["argv"], request["cwd"], request["env"], out, err)


def _end(main: Callable[[], None]) -> NoReturn:
    """Run the command and end without taking apart what was imported, which takes longer than most commands."""
    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(str(code or 0)))


def _serve() -> NoReturn:
    import importlib

    from harness.cli import main

    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    requests = socket.socket(fileno=os.dup(0))
    attending: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            sys.exit()
        if not (pid := os.fork()):
            _attend(json.loads(message), *descriptors)
            _end(main)
        attending.append(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        attending[:] = [one for one in attending if not os.waitpid(one, os.WNOHANG)[0]]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _serve()
