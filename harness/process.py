"""Processes: children that end when they should (on request, and with us when we are killed), and who owns what."""

import contextlib
import ctypes
import hashlib
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from harness.errors import HarnessError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
OTHER_FILES = 64  # of a load process, in addition to its connections
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGHUP,
)  # as well as Ctrl-C; SIGHUP: the terminal is closed, or ssh lost its connection


def raise_file_limit() -> int:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses what its kernel does not have
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def refuse_too_few_files(connections: int) -> None:
    """Raise HarnessError when one process may not open a connection for each of `connections` requests."""
    limit = raise_file_limit()
    if connections + OTHER_FILES > limit:
        raise HarnessError(
            f"{connections:,} requests at once in one load process need {connections + OTHER_FILES:,} open files, "
            f"and the system allows it {limit:,} (RLIMIT_NOFILE)",
            next_step="Raise the hard limit (`ulimit -Hn` shows it; `--ulimit nofile=65535` in a container), or use "
            "more 'processes' or fewer users.",
        )


def start(
    command: Sequence[str],
    *,
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own (Ctrl-C is ours to handle) that gets SIGTERM when we die."""
    return subprocess.Popen(
        command, stdout=stdout, stderr=stderr, env=env, start_new_session=True, preexec_fn=_follow_parent()
    )


def _follow_parent() -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    # Loaded before the fork: a dlopen between fork and exec may deadlock in a threaded parent.
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def follow() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return follow


def stop(child: subprocess.Popen[bytes], *, grace_s: float = 5.0) -> int:
    try:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
    finally:  # a second Ctrl-C only ends the patience
        # Its own children, such as Locust's load processes, share its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


_interrupted = threading.Event()


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within it, Ctrl-C and `STOP_SIGNALS` raise KeyboardInterrupt, so that every way of stopping tears everything down.

    Python drops what a handler raises inside a finalizer, a callback of a fork or some functions in C; `pause` raises
    it again. A handler that the program has set itself is left alone, and so is an ignored signal, such as SIGHUP under
    nohup.
    """
    main = threading.current_thread() is threading.main_thread()
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *STOP_SIGNALS) if main}
    ours = [number for number, handler in before.items() if handler in defaults]
    report = sys.unraisablehook

    def interrupt(number: int, _frame: object) -> None:
        _interrupted.set()
        if number == signal.SIGHUP:
            _leave_terminal()
        raise KeyboardInterrupt

    def without_interrupts(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            report(dropped)

    if ours:
        _interrupted.clear()
        sys.unraisablehook = without_interrupts
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
        if ours:
            sys.unraisablehook = report


def pause(seconds: float) -> None:
    """Sleep, in a loop that waits for something. Raises the KeyboardInterrupt that Python has dropped before."""
    if _interrupted.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
    time.sleep(seconds)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Within it, Ctrl-C and `STOP_SIGNALS` are ignored: for a teardown, which has a time limit of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Write no more to a terminal that is gone: it would be an error in the midst of taking everything down."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):  # isatty denies a terminal that is gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


# Labels by which a process is told from every other of any host and boot, in the Docker Engine and in run.json.
HOST = "amd-llm-load.host"
MACHINE = "amd-llm-load.machine"  # hosts may share a name
BOOT = "amd-llm-load.boot"
PID = "amd-llm-load.pid"
PID_NAMESPACE = "amd-llm-load.pid-namespace"  # process ids mean nothing outside of it
PID_START = "amd-llm-load.pid-start"  # tells a process from a later one with the same id

MACHINE_ID = Path("/etc/machine-id")


def owner_labels() -> dict[str, str]:
    pid = os.getpid()
    return {
        HOST: socket.gethostname(),
        MACHINE: _machine_id(),
        BOOT: _read_text(Path("/proc/sys/kernel/random/boot_id")),
        PID: str(pid),
        PID_NAMESPACE: _pid_namespace(),
        PID_START: _start_time(pid) or "",
    }


def owner_is_gone(labels: Mapping[str, str]) -> bool:
    """Whether the process with these labels has ended.

    An owner that cannot be seen from here counts as alive: one on another machine (an engine shared through
    DOCKER_HOST), be it of the same name, or in another or unknown pid namespace (a CI runner in a container with the
    host's network and name).
    """
    if labels.get(HOST) != socket.gethostname():
        return False
    here = owner_labels()
    if labels.get(BOOT) != here[BOOT]:  # an earlier boot of this machine, or a namesake of it
        return here[MACHINE] != "" and labels.get(MACHINE) == here[MACHINE]
    if not labels.get(PID_NAMESPACE) or labels[PID_NAMESPACE] != here[PID_NAMESPACE]:
        return False
    pid = labels.get(PID, "")
    known = pid.isascii() and pid.isdigit() and len(pid) < 12
    return not known or _start_time(int(pid)) != (labels.get(PID_START) or None)


def _machine_id() -> str:
    """This machine's own id, as a hash of it: it is confidential (machine-id(5)). Empty where it has none."""
    own = _read_text(MACHINE_ID)
    return hashlib.sha256(b"amd-llm-load " + os.fsencode(own)).hexdigest()[:32] if own else ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """The process's start in clock ticks since boot; None when it does not exist (a zombie does not either)."""
    fields = _read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return None if not fields or fields[0] == "Z" else fields[19]


def _read_text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


# Below the range from which Linux takes the ports of outgoing connections, so no other process gets one.
FIRST_PORT, LAST_PORT = 18000, 29999


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing uses now. Random, so that two harnesses at once rarely meet."""
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        if is_port_free(port):
            return port


def is_port_free(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's rest is no user
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
