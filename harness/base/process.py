"""Child processes that end with the harness, signals that interrupt it, labels of its process, and free ports."""

import contextlib
import ctypes
import errno
import hashlib
import ipaddress
import math
import os
import random
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from harness.base.errors import INTERRUPTED, HarnessError

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ORPHAN_GRACE_S = 10  # for a child to end by itself when this process has died
INTERRUPTED_GRACE_S = 2.0  # after a second Ctrl-C
OWNER_ENV = "AMD_LLM_LOAD_OWNER"  # process id and start of the process that started a child
# A process that computes handles no signal, so a guard in its group kills it. The guard waits for the end of its input.
_GUARD = f"""read -r _; n=0
while kill -0 $PPID && [ $n -lt {ORPHAN_GRACE_S} ]; do sleep 1; n=$((n+1)); done
sleep 2; kill -9 0"""
_GUARDED = f"exec 3<&0 </dev/null; sh -c '{_GUARD}' <&3 >/dev/null 2>&1 & exec \"$@\" 3<&-"
OTHER_FILES = 64  # open files of a load process in addition to its connections
MIN_MEMORY_BYTES = 512 << 20  # of addresses: a small run has 530 MiB, and its load processes have 360 MiB
AFTER_A_KILL = "`harness clean` removes the containers that it left."
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal is closed, or ssh lost its connection


def refuse_too_little_memory() -> None:
    """Raise HarnessError when this process may not have the memory of its libraries.

    In less, some of them wait for ever, or fail with errors that do not name the limit.
    """
    limit, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_MEMORY_BYTES:
        raise HarnessError(
            f"this shell lets a process have {limit >> 20:,} MiB of memory (`ulimit -v`), and the harness needs "
            f"{MIN_MEMORY_BYTES >> 20} MiB",
            next_step="Raise the limit: `ulimit -v unlimited`, or in a new shell where this one may not.",
        )


def refuse_too_few_files(connections: int, fewer: str = "fewer users") -> None:
    """Raise the limit of open files. Raises HarnessError when one process still cannot have this many connections."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses a limit above that of its kernel
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if connections + OTHER_FILES > limit:
        raise HarnessError(
            f"{connections:,} requests at once in one load process need {connections + OTHER_FILES:,} open files, "
            f"and the system allows it {limit:,} (RLIMIT_NOFILE)",
            next_step="Raise the hard limit (`ulimit -Hn` shows it; `--ulimit nofile=65535` in a container), or use "
            f"more 'processes' or {fewer}.",
        )


def start(
    command: Sequence[str], *, stdout: IO[bytes] | int, stderr: IO[bytes] | int, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a child in its own session, so that Ctrl-C does not reach it.

    When this process dies, the child gets SIGTERM, and its group SIGKILL ORPHAN_GRACE_S later. Its standard input is
    /dev/null. End it with `stop`. Raises OSError.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return subprocess.Popen(
        ["sh", "-c", _GUARDED, "sh", *command],
        stdin=subprocess.PIPE,  # its other end is closed when this process dies
        stdout=stdout,
        stderr=stderr,
        env={**(os.environ if env is None else env), OWNER_ENV: _owner()},
        start_new_session=True,
        preexec_fn=_follow_parent(),
    )


def _owner() -> str:
    return f"{os.getpid()} {_start_time(os.getpid()) or ''}"


def orphans_of(labels: Mapping[str, str]) -> "list[psutil.Process]":
    """Return the processes that the process with these labels started by `start`, and their children.

    They are known by its id and its start in their environment, which no other process has.
    """
    import psutil  # only here: each start of the command line would pay for it

    if labels.get(BOOT) != owner_labels()[BOOT] or not labels.get(PID):
        return []
    owner, orphans = f"{labels[PID]} {labels.get(PID_START, '')}", []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(OWNER_ENV) == owner and process.status() != psutil.STATUS_ZOMBIE:
                orphans.append(process)
    return orphans


def has_orphaned_us() -> bool:
    """Check whether the process that started this one by `start` has ended."""
    pid, _, started = os.environ.get(OWNER_ENV, "").partition(" ")
    return pid.isdigit() and _start_time(int(pid)) != (started or None)


def _follow_parent() -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    # Load before the fork: a dlopen between fork and exec may deadlock in a threaded parent.
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def follow() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return follow


def stop(child: subprocess.Popen[bytes], *, grace_s: float = 5.0) -> int:
    """Send SIGTERM to a child, and SIGKILL to its group after `grace_s`. Return its exit code."""
    try:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
    except KeyboardInterrupt:  # a second Ctrl-C only shortens the wait: the child writes its last records
        with signals_ignored(), contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(grace_s, INTERRUPTED_GRACE_S))
        raise
    finally:
        # The child's own children, such as Locust's load processes, are in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        if child.stdin is not None:
            child.stdin.close()
    return child.wait()


def open_closed_streams() -> None:
    """Open standard streams that were closed: no file of a run gets their number, and no error is lost.

    Errors go to the output that is open; what would be printed to a closed standard output is dropped.
    """
    is_open = {}
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
            is_open[descriptor] = True
        except OSError:
            is_open[descriptor] = False
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
            os.set_inheritable(descriptor, True)
    if not is_open[2] and is_open[1]:
        os.dup2(1, 2)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if not is_open[descriptor]:
            mode = "r" if descriptor == 0 else "w"
            setattr(sys, name, open(descriptor, mode, errors="backslashreplace", closefd=False))  # noqa: SIM115
    if is_open[2] and not is_open[1]:
        print("note: the standard output is closed: what would be printed is dropped", file=sys.stderr)


_interrupted = threading.Event()


UNHEARD_S = 5.0  # for a process to react to a second signal: a busy machine, or a long step in C, is not deaf
_HEARD = b"\0"
_watchers: list[int] = []  # of this process: the pipe to the process of `end_when_deaf`


def end_when_deaf() -> None:
    """Start a process that kills this one when two stop signals reach it and no handler of it runs.

    Code in C that never returns, such as a library that waits for memory, keeps the handlers of Python from running.
    Call it before any thread. It takes a millisecond.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    pid = os.getpid()
    if os.fork() == 0:
        try:
            _kill_when_deaf(pid, reading, writing)
        finally:
            os._exit(0)
    os.close(reading)
    _watchers.append(writing)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)


def _kill_when_deaf(pid: int, reading: int, writing: int) -> None:
    os.setsid()  # Ctrl-C is for the whole group
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in (0, 1, writing):
        os.close(descriptor)
    unheard, ends_s = 0, math.inf
    while True:
        timeout_s = None if ends_s == math.inf else max(0.0, ends_s - time.monotonic())
        if select.select([reading], [], [], timeout_s)[0]:
            if not (data := os.read(reading, 1)):
                return  # the process has ended
            unheard = 0 if data == _HEARD else unheard + (data[0] in (signal.SIGINT, *STOP_SIGNALS))
            ends_s = math.inf if unheard < 2 else min(ends_s, time.monotonic() + UNHEARD_S)
        if time.monotonic() >= ends_s:
            os.write(2, f"error: the harness reacted to no signal, so it was killed. {AFTER_A_KILL}\n".encode())
            os.kill(pid, signal.SIGKILL)
            return


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within it, Ctrl-C and `STOP_SIGNALS` raise KeyboardInterrupt, so that every way to stop tears down everything.

    Python drops an exception of a handler inside a finalizer, a callback of a fork or some functions in C; `pause`
    raises it again. Only default handlers are replaced: not those of the program, nor an ignored SIGHUP under nohup.
    """
    is_main = threading.current_thread() is threading.main_thread()
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *STOP_SIGNALS) if is_main}
    replaced = [number for number, handler in before.items() if handler in defaults]
    report = sys.unraisablehook

    def interrupt(number: int, _frame: object) -> None:
        _interrupted.set()
        if _watchers:
            with contextlib.suppress(OSError):
                os.write(_watchers[-1], _HEARD)
        if number == signal.SIGHUP:
            _leave_terminal()
        raise KeyboardInterrupt

    def without_interrupts(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            report(dropped)

    if replaced:
        _interrupted.clear()
        sys.unraisablehook = without_interrupts
    for number in replaced:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in replaced:
            if signal.getsignal(number) is interrupt:  # else the end is said already
                signal.signal(number, before[number])
        if replaced:
            sys.unraisablehook = report


def say_interrupted() -> None:
    """Say once that all is torn down: what is pressed from now on has nothing left to stop."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *STOP_SIGNALS):
            signal.signal(number, signal.SIG_IGN)
    print(INTERRUPTED, file=sys.stderr)


def pause(seconds: float) -> None:
    """Sleep in a waiting loop. Raises a KeyboardInterrupt that Python dropped earlier."""
    if _interrupted.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
    time.sleep(seconds)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Within it, Ctrl-C and `STOP_SIGNALS` are ignored: for a teardown, which has its own time limit."""
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
    """Send further output to /dev/null: an error of a closed terminal would interrupt the teardown."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # isatty is false for a closed terminal
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


# Labels that identify a process among all hosts and boots, in the Docker Engine and in run.json.
HOST = "amd-llm-load.host"
MACHINE = "amd-llm-load.machine"  # hosts may share a name
BOOT = "amd-llm-load.boot"
PID = "amd-llm-load.pid"
PID_NAMESPACE = "amd-llm-load.pid-namespace"  # a process id is valid only within it
PID_START = "amd-llm-load.pid-start"  # a later process may have the same id

MACHINE_ID = Path("/etc/machine-id")


def owner_labels() -> dict[str, str]:
    """Return the labels of this process. A value that is unknown here is empty."""
    pid = os.getpid()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    machine_id = os.fsencode(_read_text(MACHINE_ID))  # confidential (machine-id(5)), so only its hash is used
    return {
        HOST: socket.gethostname(),
        MACHINE: hashlib.sha256(b"amd-llm-load " + machine_id).hexdigest()[:32] if machine_id else "",
        BOOT: _read_text(Path("/proc/sys/kernel/random/boot_id")),
        PID: str(pid),
        PID_NAMESPACE: namespace,
        PID_START: _start_time(pid) or "",
    }


def owner_is_gone(labels: Mapping[str, str]) -> bool:
    """Return whether the process with these labels has ended.

    A process that is invisible from here counts as alive: one on another machine (of an engine that several
    machines share), even one of the same name, or in another or unknown pid namespace (a CI runner in a container with
    the host's network and name).
    """
    here = owner_labels()
    if labels.get(HOST) != here[HOST]:
        return False
    if labels.get(BOOT) != here[BOOT]:  # an earlier boot of this machine, or another machine of the same name
        return here[MACHINE] != "" and labels.get(MACHINE) == here[MACHINE]
    if not labels.get(PID_NAMESPACE) or labels[PID_NAMESPACE] != here[PID_NAMESPACE]:
        return False
    pid = labels.get(PID, "")
    is_pid = pid.isascii() and pid.isdigit() and len(pid) < 12
    return not is_pid or _start_time(int(pid)) != (labels.get(PID_START) or None)


def _start_time(pid: int) -> str | None:
    """Return the start of a process in clock ticks since boot; None: it does not exist, or is a zombie."""
    fields = _read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return None if not fields or fields[0] == "Z" else fields[19]


def _read_text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


# Below the range that Linux uses for outgoing connections, so no other process gets such a port.
FIRST_PORT, LAST_PORT = 18000, 29999


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now; random, so that concurrent harnesses rarely get the same."""
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        if is_port_free(port):
            return port


def is_port_free(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host name or an address is this machine's own loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
