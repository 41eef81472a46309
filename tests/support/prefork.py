"""Fork Python programs from processes that have imported them: imports take most of a short command's time.

Two servers fork: one has imported the command line and the embedded engine, the other Locust. A fork is a process of
its own as a started script is: own session, folder, environment, file limit, command line, output and exit code.
Where the requesting process dies, its forks get SIGTERM, and their groups SIGKILL later, which
`harness.base.process.start` asks of the kernel and of a shell that guards the program: a fork has no such shell.
`Popen` takes the place of `subprocess.Popen`: in the tests' own process, and in every fork.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import io
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
SCRIPT = str(Path(sys.executable).with_name("harness"))
MARK = "HARNESS_TEST_MARK"  # in the environment of a command: which test's it is (32 hexadecimal digits)
# What Python, a library or harness.serve reads once, at its start.
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "GEVENT", "HARNESS_IMAGE")
COMMAND_LINE_BYTES = 4_000  # of a fork, as others see it
# What most commands import when they are called. Importing it must start nothing and read no setting.
_COMMANDS = (
    "scipy.stats",
    "typer._adapters",
    "rich.live",
    "rich.table",
    "rich._emoji_codes",
    "harness.cli",
    "harness.run.orchestrator",
    "harness.questions.quick.search",
    "harness.run.budget",
    "harness.questions.compare.sides",
    "harness.questions.history.earlier_runs",
    "harness.questions.history.page",
    "harness.report.html",
    "harness.report.junit",
    "harness.report.terminal",
    "harness.serve.docker_engine",
    "harness.questions.check",
    "harness.simulated.__main__",
)
PRELOADED = {"harness": _COMMANDS, "locust": ("harness.numbers.formulas",)}
KINDS = tuple(PRELOADED)
ANSWER_BYTES = 20
ORPHAN_GRACE_S = 10  # as in harness.base.process
MAINS = {"harness": "harness.__main__", "harness.simulated": "harness.simulated.__main__", "locust": "locust.main"}


# Before gevent replaces them in the server of Locust.
_fork, _waitpid, _close, _poll, _select = os.fork, os.waitpid, os.close, select.poll, select.select
_SERVERS: dict[str, socket.socket] = {}
_ENVIRONMENT = dict(os.environ)  # with which the servers start; a fork of theirs inherits this variable


def _server(kind: str) -> socket.socket:
    """The process that forks programs of a kind, started when it is first wanted. It ends with the tests."""
    if kind not in _SERVERS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {key: value for key, value in _ENVIRONMENT.items() if key != MARK}
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, kind, " " * COMMAND_LINE_BYTES],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            # No thread may run where a process forks. The mark is overwritten in each fork.
            env={**environment, "OPENBLAS_NUM_THREADS": "1", MARK: "-" * 32},
            start_new_session=True,
        )
        theirs.close()

        def close() -> None:
            ours.close()
            process.wait(30)

        atexit.register(close)
        _SERVERS[kind] = ours
    return _SERVERS[kind]


def _program(command: object, env: Mapping[str, str], preexec_fn: object) -> tuple[str, list[str]] | None:
    """The module and the arguments of a command that can be forked."""
    if (
        not isinstance(command, list)
        or getattr(preexec_fn, "__module__", "harness.base.process") != "harness.base.process"
    ):
        return None
    if any(_ENVIRONMENT.get(key) != env.get(key) for key in {*_ENVIRONMENT, *env} if _read_at_start(key)):
        return None
    words = _unguarded(command)
    if words[0] == SCRIPT:
        return None if env.get("PYTHONPATH") != _ENVIRONMENT.get("PYTHONPATH") else ("harness", words)
    if words[0] == sys.executable and words[1] == "-m" and words[2] in MAINS:
        return words[2], words[2:]
    return None


def _unguarded(command: list[Any]) -> list[str]:
    """The words of a command without the shell that `harness.base.process.start` puts before it."""
    return [str(word) for word in (command[4:] if command[:2] == ["sh", "-c"] else command)]


def _read_at_start(key: str) -> bool:
    return key.startswith(READ_AT_START) and key not in ("PYTHONPATH", "PYTHONUNBUFFERED")


class Popen(subprocess.Popen[Any]):
    """A fork where that is possible, else what `subprocess.Popen` starts."""

    _answers = -1  # the end of a pipe where the fork's id and exit code come from

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _close_fds, _pass, cwd, env, _info, _flags, _shell, *pipes = rest[:13]  # CPython 3.11 to 3.13
        environment = dict(os.environ if env is None else env)
        program = _program(args, environment, preexec_fn)
        if program is None:
            return super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc, no-any-return]
        module, argv = program
        request = {
            "module": module,
            "argv": argv,
            "shown": _unguarded(args),
            "cwd": str(cwd or os.getcwd()),
            "env": environment,
            "parent": os.getpid(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        self._answers, write = os.pipe()
        out, err = (fd if fd != -1 else number for fd, number in ((pipes[3], 1), (pipes[5], 2)))
        servers = [_server(kind) for kind in KINDS]
        descriptors = [out, err, write, *(server.fileno() for server in servers)]
        socket.send_fds(
            servers[KINDS.index("locust" if module == "locust" else "harness")], [_packed(request)], descriptors
        )
        _close(write)
        self.pid = int(os.read(self._answers, ANSWER_BYTES))
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _ended(self, timeout: float | None) -> bool:
        if self.returncode is None and _select([self._answers], [], [], timeout)[0]:
            self.returncode = int(os.read(self._answers, ANSWER_BYTES) or -signal.SIGKILL)
            _close(self._answers)
        return self.returncode is not None

    def _internal_poll(self, *args: Any, **more: Any) -> int | None:
        if self._answers == -1:
            return super()._internal_poll(*args, **more)  # type: ignore[misc, no-any-return]
        self._ended(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._answers == -1:
            return super()._wait(timeout=timeout)  # type: ignore[misc, no-any-return]
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def _packed(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode()


def _attend(request: dict[str, Any], out: int, err: int, answers: int, *servers: int) -> None:
    """Fork the program; report its id and its exit code. Returns in the program only."""
    if not (pid := _fork()):
        _become(request, out, err, servers)
        return
    os.write(answers, f"{pid:{ANSWER_BYTES}}".encode())
    poll, ended = _poll(), os.pidfd_open(pid)
    poll.register(ended, select.POLLIN)
    with contextlib.suppress(ProcessLookupError):
        poll.register(parent := os.pidfd_open(request["parent"]), select.POLLIN)
    if ended not in [fd for fd, _ in poll.poll()]:
        os.kill(pid, signal.SIGTERM)  # the requesting process died
        poll.unregister(parent)
        poll.poll(ORPHAN_GRACE_S * 1000)
        _select([], [], [], 2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(_waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(answers, f"{code:{ANSWER_BYTES}}".encode())
    os._exit(0)


def _become(request: dict[str, Any], out: int, err: int, servers: tuple[int, ...]) -> None:
    """Make this fork what a started program finds."""
    os.setsid()
    env, module, argv = request["env"], request["module"], request["argv"]
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (out, 1), (err, 2)):
        os.dup2(fd, number)
    kept = servers if module == "harness" else ()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and fd not in kept and not os.readlink(f"/proc/self/fd/{fd}").startswith("anon_inode:"):
                _close(fd)
    if module == "locust":
        importlib.import_module("gevent").reinit()  # it made its event loop while it was imported
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files"]))
    _show(request["shown"], env.get(MARK, "-" * 32))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    if module != "harness":
        argv = [importlib.util.find_spec(f"{module}.__main__").origin, *argv[1:]]  # type: ignore[union-attr]
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent) if module == "harness" else request["cwd"]
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    importlib.invalidate_caches()
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _text(1, unbuffered, "strict")
    sys.stderr = _text(2, unbuffered, "backslashreplace", line_buffering=True)
    if module == "harness":
        _SERVERS.update((kind, socket.socket(fileno=fd)) for kind, fd in zip(KINDS, servers, strict=True))
        subprocess.Popen = Popen  # type: ignore[misc]


def _text(fd: int, unbuffered: bool, errors: str, line_buffering: bool = False) -> io.TextIOWrapper:
    binary: Any = open(fd, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(binary, errors=errors, write_through=unbuffered, line_buffering=line_buffering)


def _show(command: list[str], mark: str) -> None:
    """Let /proc/self/cmdline and the mark in /proc/self/environ be those of the program: written over in memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, environment = (int(fields[number - 3]) for number in (48, 49, 50))  # man 5 proc
    room = arguments_end - arguments
    words = b"\0".join(os.fsencode(word) for word in command)[: room - 1]
    ctypes.memmove(arguments, words.ljust(room, b"\0"), room)
    at = Path("/proc/self/environ").read_bytes().index(f"{MARK}=".encode()) + len(MARK) + 1
    ctypes.memmove(environment + at, mark.encode()[:32], 32)


def _end(main: Callable[[], object]) -> NoReturn:
    """Run the program and end without taking apart what was imported, which takes longer than most commands."""
    code: object = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _preload_locust() -> None:
    """Locust, and what its users import. Modules of harness.load, which add listeners when imported, are forgotten."""
    locust = importlib.import_module("locust.main")
    hooks = locust.locust.events
    before = {name: list(hook._handlers) for name, hook in vars(hooks).items()}
    importlib.import_module("harness.load.user")
    for name, hook in vars(hooks).items():
        hook._handlers[:] = before.get(name, [])
    for name in [name for name in sys.modules if name.startswith("harness.load.")]:
        del sys.modules[name]


def _serve(kind: str) -> NoReturn:
    requests = socket.socket(fileno=os.dup(0))
    if kind == "locust":
        _preload_locust()
    for name in PRELOADED[kind]:
        importlib.import_module(name)
    if kind == "harness":
        # Templates are compiled as long as they are used.
        page = importlib.import_module("harness.report.html").page_template("page.html.j2")
        for environment in (page.environment, importlib.import_module("harness.serve.template")._environment(COMPOSE)):
            for name in environment.list_templates(filter_func=lambda name: name.endswith(".j2")):
                environment.get_template(name)
    else:
        inspect.stack()  # Locust looks for its caller's file among those of all modules, which are remembered
    gc.freeze()
    attending: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 5)
        if not message:
            os._exit(0)
        if not (pid := _fork()):
            request = json.loads(message)
            _attend(request, *descriptors)
            _end(importlib.import_module(MAINS[request["module"]]).main)
        attending.append(pid)
        for descriptor in descriptors:
            _close(descriptor)
        attending[:] = [one for one in attending if not _waitpid(one, os.WNOHANG)[0]]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _serve(sys.argv[1])
