"""Child processes that end when they should: on request, and with us when we are killed."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
def sigterm_interrupts() -> Iterator[None]:
    """Within it, SIGTERM raises KeyboardInterrupt, so that both ways of stopping take everything down.

    A handler that the program has set itself is left alone.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
