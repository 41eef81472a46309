"""Load processes on other machines: which ones a run waits for, where they find it, and this machine as one of them."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from harness import process
from harness.errors import HarnessError
from harness.scenario import Load
from harness.scenario.plan import mix_of

PORT = 5557  # Locust's own
FROM_MASTER = "-"  # of the option --job: the master sends it, as it sends the locustfile with `-f -`
MACHINE = 10_000_000  # beyond every pid. The number of a load process in a run's files: its machine * MACHINE + its pid


class Workers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The machines that send a run's load. `processes` are those of each machine, `total` those of all."""

    names: list[str] = []  # of the machines; none: whichever come
    machines: int
    processes: int = 1
    bind: str  # address of this machine at which they find the master
    port: int = PORT
    parts: int = 1  # of a mix: each has a master of its own, at this port and those after it

    @property
    def total(self) -> int:
        return self.machines * self.processes

    @property
    def command(self) -> str:
        more = f" --processes {self.processes}" if self.processes > 1 else ""
        address = "ADDRESS" if self.bind in ("0.0.0.0", "*") else self.bind  # every one that this machine has
        return " and ".join(f"harness worker --master {address}:{port}{more}" for port in self._ports)

    @property
    def _ports(self) -> range:
        return range(self.port, self.port + self.parts)

    def awaited(self, here: Sequence[str]) -> str:
        come, asked = Counter(here), Counter(self.names * self.processes)
        if not self.names:
            return f"waiting for workers: {len(here)} of {self.total} connected" + (
                f" ({_join_counts(come)})" if here else ""
            )
        some = {"missing": asked - come, "not asked for": come - asked}
        texts = [f"waiting for workers: {(come & asked).total()} of {self.total} connected"]
        return "; ".join(texts + [f"{word}: {_join_counts(those)}" for word, those in some.items() if those])

    def refuse_unusable(self) -> None:
        """Raise HarnessError when a port cannot be opened, before a server or worker is started."""
        for port in self._ports:
            try:
                with socket.socket() as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(("" if self.bind == "*" else self.bind, port))
            except (OSError, OverflowError) as error:
                why = error.strerror if isinstance(error, OSError) else "no port is above 65535"
                of = "" if self.parts == 1 else f"; the parts of a mix take {self.parts} ports, from {self.port} on"
                raise HarnessError(
                    f"--bind: {self.bind}:{port} cannot be listened at ({why}{of})",
                    next_step="Give an address of this machine, and a port that is free.",
                ) from None


def _join_counts(processes: Counter[str]) -> str:
    return ", ".join(name if times == 1 else f"{times} of {name}" for name, times in sorted(processes.items()))


def parse_workers(given: str, bind: str | None, loads: Mapping[str, Load]) -> Workers:
    """The machines of `--workers` (names, or how many) and `--bind`. Raises HarnessError."""
    names, machines = parse_names(given)
    if bind is None:
        raise HarnessError(
            "--workers needs --bind: the address of this machine at which the workers find it",
            next_step="Give one that only they reach, such as --bind 10.0.0.1: "
            "Locust's connection has neither a password nor encryption.",
        )
    host, port = parse_address("--bind", bind)
    processes, *others = {load.processes for load in loads.values()}
    if others:
        raise HarnessError(
            "--workers: the loads differ in 'processes', and a worker is started once for all of them",
            next_step="Give each load the same number: it is that of each machine.",
        )
    total = machines * processes
    for name, load in loads.items():
        if mix_of(name) is None and load.users % total:
            raise HarnessError(
                f"$.loads.{name}: {load.users} users cannot be parted among {total} load processes",
                next_step=f"Each takes the same part of the work, so use a multiple of {total}.",
            )
    parts = max(Counter(filter(None, map(mix_of, loads))).values(), default=1)
    return Workers(names=names, machines=machines, processes=processes, bind=host, port=port, parts=parts)


def parse_names(given: str) -> tuple[list[str], int]:
    """The names in `--workers`, none where it says how many, and how many they are. Raises HarnessError."""
    names = [name.strip() for name in given.split(",")]
    number = int(names[0]) if len(names) == 1 and names[0].isascii() and names[0].isdigit() else None
    if number == 0 or not all(names) or len(set(names)) < len(names) or (number or len(names)) > 1000:
        raise HarnessError(
            f"--workers: must be different host names, or a count (got {given!r})",
            next_step="Give their names, such as gen1,gen2, or how many there are. "
            "`loads.NAME.processes` says how many processes each of them has.",
        )
    return [] if number else names, number or len(names)


def parse_address(option: str, given: str) -> tuple[str, int]:
    """Host and port, Locust's own where none is given. Raises HarnessError."""
    match = re.fullmatch(r"([^\s:/]+)(?::(\d{1,5}))?", given)
    port = int(match[2]) if match and match[2] else PORT
    if match is None or not 0 < port < 65536:
        raise HarnessError(
            f"{option}: '{given}' is not an address", next_step="Give one such as 10.0.0.1 or 10.0.0.1:5557."
        )
    return match[1], port


# This machine as a worker: a new Locust process for each load of the master's run.

_PAUSE_S = 0.5
_GRACE_S = 6.0
# Lines that Locust logs while it is idle, and at each start and end.
_LOCUSTS_OWN = re.compile(rb"Waiting to connect to master|Got no locustfile response|\[[^]]*\] [^/ ]*/INFO/locust\.")


def run_worker(master: str, processes: int, *, once: bool = False) -> None:
    """Serve one load after the other, until KeyboardInterrupt.

    Raises HarnessError for a master whose name is not known, and after a single load that failed.
    """
    host, port = parse_address("--master", master)
    _check_host(host, port)
    command = [sys.executable, "-m", "locust", "-f", "-", "--worker", "--master-host", host, "--master-port", str(port)]
    command += ["--job", FROM_MASTER]
    if processes > 1:
        command += ["--processes", str(processes)]
    quiet = False  # no load and no problem: Locust gives up on a master after some minutes
    while True:
        if not quiet:
            print(f"waiting for a load from {host}:{port}", flush=True)
        code, spoke, left = _serve_load(command)
        quiet = not spoke and code >= 0
        if (code and not quiet) or left:
            print(_describe_end(code, left, once), flush=True)
        if once and not quiet:
            if code:
                raise HarnessError(f"the load ended with exit code {code}", next_step="Its log is above.")
            return
        time.sleep(_PAUSE_S)


def _serve_load(command: list[str]) -> tuple[int, bool, Path | None]:
    """Run Locust until it ends. Return its exit code, whether it said anything, and the folder of undelivered records.

    It has a temporary folder of its own: it puts the locustfile there by its bare name, and another worker of this
    machine would read it half written.
    """
    folder = Path(tempfile.mkdtemp(prefix="amd-llm-load-worker-"))
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    child = process.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    assert child.stdout is not None
    try:
        spoke = _relay(child.stdout)
        code = child.wait()
    finally:
        try:
            process.stop(child, grace_s=_GRACE_S)
            _relay(child.stdout)  # after Ctrl-C: undelivered records
        finally:  # also after a second Ctrl-C
            left = any(folder.glob("amd-llm-load-*"))
            if not left:
                shutil.rmtree(folder, ignore_errors=True)
    return code, spoke, folder if left else None


def _relay(lines: IO[bytes]) -> bool:
    spoke = False
    for line in lines:
        if not _LOCUSTS_OWN.match(line):
            spoke = True
            print(line.decode(errors="replace"), end="", flush=True)
    return spoke


def _describe_end(code: int, left: Path | None, once: bool) -> str:
    kept = f"; what it had recorded is in {left}" if left else ""
    if code >= 0:  # 0: another process of the worker failed
        how = f"ended with exit code {code}" if code else "ended before all had been delivered"
        return f"a load process {how}{kept}"
    name = signal.Signals(-code).name
    memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    next_one = "" if once else "; the next one is served again"
    return f"the load process was ended by {name}{memory}: its load cannot be valid{next_one}{kept}"


def _check_host(host: str, port: int) -> None:
    """Raise HarnessError for an unknown host name. A master that is not up yet is no error."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: an invalid name
        if isinstance(error, socket.gaierror) and error.errno != socket.EAI_NONAME:
            return  # a temporary problem of the name server
        raise HarnessError(
            f"--master: no machine has the name '{host}'",
            next_step="Give the name or address at which this machine reaches it, such as 10.0.0.1:5557.",
        ) from None
