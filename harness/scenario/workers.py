"""Load processes on other machines: the workers of a run."""

import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from harness.base.command_line import command_line
from harness.base.errors import HarnessError
from harness.scenario import Load
from harness.scenario.plan import mix_of

PORT = 5557  # Locust's own
FROM_MASTER = "-"  # a value of --job: the master sends the job, as it sends the locustfile with `-f -`
MACHINE = 10_000_000  # above every pid. A run's files number a load process as its machine * MACHINE + its pid


class Workers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The machines that send a run's load."""

    names: list[str] = []  # of the machines; empty: any machines
    machines: int
    processes: int = 1  # of each machine
    bind: str  # address of this machine at which the workers connect to the master
    port: int = PORT

    @property
    def total(self) -> int:
        """Load processes of all machines."""
        return self.machines * self.processes

    @property
    def command(self) -> str:
        """The command that starts the workers on a machine."""
        more = ["--processes", self.processes] if self.processes > 1 else []
        address = "ADDRESS" if self.bind in ("0.0.0.0", "*") else self.bind  # the first two: all addresses
        return command_line("harness", "worker", "--master", f"{address}:{self.port}", *more)

    def missing_text(self, names: Sequence[str]) -> str:
        """Describe the missing workers. `names`: the machine of each connected load process."""
        text = f"waiting for workers: {len(names)} of {self.total} connected"
        missing = Counter(self.names * self.processes) - Counter(names)
        return f"{text}; missing: {', '.join(sorted(missing))}" if missing else text

    def check_port(self) -> None:
        """Raise HarnessError when the port cannot be opened, before a server or worker starts."""
        try:
            with socket.socket() as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(("" if self.bind == "*" else self.bind, self.port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no port is above 65535"
            raise HarnessError(
                f"--bind: {self.bind}:{self.port} cannot be listened at ({reason})",
                next_step="Give an address of this machine, and a port that is free.",
            ) from None


def parse_workers(given: str, bind: str | None, loads: Mapping[str, Load]) -> Workers:
    """Parse `--workers` (names, or how many) and `--bind`. Raises HarnessError."""
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
                f"$.loads.{name}: {load.users} users cannot be divided among {total} load processes",
                next_step=f"Each takes the same share of the work, so use a multiple of {total}.",
            )
    return Workers(names=names, machines=machines, processes=processes, bind=host, port=port)


def parse_names(given: str) -> tuple[list[str], int]:
    """Return the names in `--workers`, empty where it is a number, and their number. Raises HarnessError."""
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
    """Return host and port; the default is Locust's port. Raises HarnessError."""
    match = re.fullmatch(r"([^\s:/]+)(?::(\d{1,5}))?", given)
    port = int(match[2]) if match and match[2] else PORT
    if match is None or not 0 < port < 65536:
        raise HarnessError(
            f"{option}: '{given}' is not an address", next_step="Give one such as 10.0.0.1 or 10.0.0.1:5557."
        )
    return match[1], port
