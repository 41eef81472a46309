"""Children end when asked, when they ignore it, with their own children, and when we are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.base import process
from harness.base.errors import INTERRUPTED
from tests.support import prefork
from tests.support.command import PATIENCE_S
from tests.support.faults import fault

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


def start(code: str) -> "subprocess.Popen[bytes]":
    child = process.start([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    return child


def gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def close(child: "subprocess.Popen[bytes]") -> None:
    assert child.stdout is not None
    child.stdout.close()


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
    child = start(code)
    assert process.stop(child, grace_s=0.3) == -signal.SIGKILL
    close(child)


def test_grandchildren_end_with_the_child(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"c = subprocess.Popen({SLEEP!r}); open({str(tmp_path / 'pid')!r}, 'w').write(str(c.pid))\n"
        "print('up', flush=True); time.sleep(3600)"
    )
    child = start(code)
    process.stop(child)
    close(child)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, time; from harness.base import process\n"
            f"c = process.start({SLEEP!r}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
            "print(c.pid, flush=True); time.sleep(3600)",
        ],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


def test_a_group_that_handles_no_signal_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """As one that computes. It has a child of its own."""
    deaf = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN)\n"
        f"c = subprocess.Popen({SLEEP!r}); print(c.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time; from harness.base import process\n"
            f"c = process.start([sys.executable, '-c', {deaf!r}], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
            "print(c.pid, c.stdout.readline().decode(), flush=True); time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child, grandchild = map(int, parent.stdout.readline().split())
    assert psutil.pid_exists(child) and psutil.pid_exists(grandchild)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(child) and gone(grandchild)


def test_orphans_are_known_by_their_owner_and_no_other_process_is(tmp_path: Path) -> None:
    """Not by a word of their command line, which an editor or `tail` may have too."""
    job = str(tmp_path / "jobs" / "a.json")
    sleep = [*SLEEP, "--job", job]
    child = process.start(sleep, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen(sleep) as other:
        try:
            ours = process.owner_labels()
            assert child.pid in {one.pid for one in process.orphans_of(ours)}
            assert other.pid not in {one.pid for one in process.orphans_of(ours)}
            later = ours | {process.PID_START: "1"}  # another process with the same id
            assert process.orphans_of(later) == process.orphans_of(ours | {process.BOOT: "x"}) == []
            assert process.orphans_of({}) == []
        finally:
            other.kill()
            process.stop(child)
    assert child.pid not in {one.pid for one in process.orphans_of(ours)}


def test_what_cannot_be_started_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        process.start(["no-such-program"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_child_has_no_input_and_keeps_its_arguments() -> None:
    code = "import sys; print('up', flush=True); print(sys.stdin.read() == '', sys.argv[1:], flush=True)"
    child = process.start(
        [sys.executable, "-c", code, "a b", "$x", "'", ""], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    assert child.stdout.read().decode() == f"up\nTrue {['a b', '$x', chr(39), '']}\n"  # the guard has not its output
    assert process.stop(child) == 0
    close(child)


@pytest.mark.parametrize("number", process.STOP_SIGNALS)
def test_signals_interrupt_unless_they_are_ignored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), process.signals_interrupt():
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert signal.getsignal(number) is before
    signal.signal(number, signal.SIG_IGN)  # as under nohup
    try:
        with process.signals_interrupt():
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, *process.STOP_SIGNALS])
def test_a_signal_that_comes_in_a_finalizer_interrupts_at_the_next_pause(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python drops what a handler raises there, such as when urllib3 closes a connection."""

    class Closing:
        def __del__(self) -> None:
            signal.raise_signal(number)

    with process.signals_interrupt():
        Closing()
        with pytest.raises(KeyboardInterrupt):
            process.pause(0)
    with process.signals_interrupt():
        process.pause(0)  # it was of the former command
    assert capsys.readouterr().err == ""


def test_a_closed_terminal_does_not_interrupt_the_teardown(tmp_path: Path) -> None:
    """After a broken ssh connection, each write to the terminal fails."""
    program = (
        "import pathlib, sys, time\n"
        "from harness.base.process import signals_interrupt\n"
        "with signals_interrupt():\n"
        "    try:\n"
        "        print('begun', flush=True)\n"
        "        while True:\n"
        "            time.sleep(0.05)  # a signal just before a long sleep does not end it\n"
        "    except KeyboardInterrupt:\n"
        "        print('taking everything down', flush=True)\n"
        "        pathlib.Path(sys.argv[1]).touch()\n"
    )
    master, terminal = os.openpty()
    child = process.start([sys.executable, "-c", program, str(tmp_path / "down")], stdout=terminal, stderr=terminal)
    os.close(terminal)
    try:
        assert os.read(master, 100).startswith(b"begun")
        os.close(master)
        child.send_signal(signal.SIGHUP)
        assert child.wait(PATIENCE_S) == 0
    finally:
        process.stop(child)
    assert (tmp_path / "down").exists()


def test_what_the_harness_starts_is_forked_in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each Locust and each engine of a test takes a second of CPU to start."""
    monkeypatch.setattr(subprocess, "Popen", prefork.Popen)
    child = process.start(
        [sys.executable, "-m", "locust", "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert isinstance(child, prefork.Popen) and child._answers != -1
    assert child.wait(PATIENCE_S) == 0
    process.stop(child)


DEAF = """
import itertools, signal, sys, time
from harness.base.process import end_when_deaf, signals_interrupt

def work():
    while True:
        try:
            if sys.argv[1] == "deaf":
                all(itertools.repeat(True, 10_000_000_000))  # minutes without a handler, as a stuck import
            time.sleep(0.05)
        except KeyboardInterrupt:
            pass

def heard(handler):
    def call(number, frame):
        try:
            handler(number, frame)
        except KeyboardInterrupt:  # several at once would end it outside of any `try`
            pass
    return call

end_when_deaf()
with signals_interrupt():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, heard(signal.getsignal(number)))
    print("up", flush=True)
    work()
"""


@fault("harness", "Ctrl-C twice, SIGTERM or SIGHUP twice, while a library computes and handles no signal",
       seen="the harness reacted to no signal, so it was killed", kept="what was recorded",
       left="containers, until `harness clean`")  # fmt: skip
@pytest.mark.parametrize("number", [signal.SIGINT, *process.STOP_SIGNALS])
def test_a_process_that_hears_no_signal_ends_with_the_second(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, "deaf"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as deaf:
        assert deaf.stdout is not None and deaf.stderr is not None
        deaf.stdout.readline()
        time.sleep(0.5)  # a signal before its work would end it as usual
        while deaf.poll() is None:  # an impatient user
            os.killpg(deaf.pid, number)
            time.sleep(0.3)
        assert deaf.wait(PATIENCE_S) == -signal.SIGKILL
        assert b"harness clean" in deaf.stderr.read()


def test_a_process_that_hears_its_signals_is_not_killed() -> None:
    """A terminal that closes may send a signal twice at once."""
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, "hears"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as hears:
        assert hears.stdout is not None
        hears.stdout.readline()
        time.sleep(0.5)
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            os.killpg(hears.pid, number)
        time.sleep(process.UNHEARD_S + 1.0)
        assert hears.poll() is None
        hears.kill()


SAYS_IT = """
import os, signal, sys
from harness.base.process import say_interrupted, signals_interrupt
try:
    with signals_interrupt():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            say_interrupted()
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    say_interrupted()
sys.exit(130)
"""


def test_the_end_of_an_interrupt_is_said_once() -> None:
    """Also where Ctrl-C is pressed again after it."""
    done = subprocess.run([sys.executable, "-c", SAYS_IT], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (130, f"{INTERRUPTED}\n")
