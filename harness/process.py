"""Child processes that end when they should: on request, and with us when we are killed."""

import contextlib
import ctypes
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from harness.errors import HarnessError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
OTHER_FILES = 64  # of a load process, in addition to its connections
STOPS = (signal.SIGTERM, signal.SIGHUP)  # as well as Ctrl-C; SIGHUP: the terminal is closed, or ssh lost its connection


def raise_file_limit() -> int:
    """Let this process, and those that it starts, have as many files open as the system allows; return that number."""
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
    """End a child and its group: SIGTERM first, SIGKILL after `grace_s`. Returns its exit code."""
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


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within it, `STOPS` raise KeyboardInterrupt, so that every way of stopping takes everything down.

    A handler that the program has set itself is left alone, and so is what is ignored, such as SIGHUP under nohup.
    """
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in STOPS if main and signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within it, Ctrl-C and `STOPS` are ignored: for a teardown, which has a time limit of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *STOPS)}
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
