"""Load processes on other machines: which ones a run waits for, and where they find it."""

import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from harness.errors import HarnessError, Mistakes
from harness.scenario import Load
from harness.scenario.plan import mix_of, users_path

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
        """What starts the workers on each machine."""
        more = f" --processes {self.processes}" if self.processes > 1 else ""
        address = "ADDRESS" if self.bind in ("0.0.0.0", "*") else self.bind  # every one that this machine has
        return " and ".join(f"harness worker --master {address}:{port}{more}" for port in self._ports)

    @property
    def _ports(self) -> range:
        return range(self.port, self.port + self.parts)

    def of_part(self, number: int) -> "Workers":
        """Those of a part of a mix."""
        return msgspec.structs.replace(self, port=self.port + number, parts=1)

    def awaited(self, here: Sequence[str]) -> str:
        """How many load processes have connected, and which are missing. `here`: the name of each one's machine."""
        come, asked = Counter(here), Counter(self.names * self.processes)
        if not self.names:
            return f"waiting for workers: {len(here)} of {self.total} connected" + (
                f" ({_listed(come)})" if here else ""
            )
        some = {"missing": asked - come, "not asked for": come - asked}
        texts = [f"waiting for workers: {(come & asked).total()} of {self.total} connected"]
        return "; ".join(texts + [f"{word}: {_listed(those)}" for word, those in some.items() if those])

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


def _listed(processes: Counter[str]) -> str:
    return ", ".join(name if times == 1 else f"{times} of {name}" for name, times in sorted(processes.items()))


def parse_workers(given: str, bind: str | None, loads: Mapping[str, Load]) -> Workers:
    """The machines of `--workers` (names, or how many) and `--bind`. Raises HarnessError, of all that is wrong."""
    wrong = Mistakes()
    names, machines, host, port = list[str](), 0, "", PORT  # 0: not known
    with wrong.noted():
        names, machines = parse_names(given)
    with wrong.noted():
        host, port = _parse_bind(bind)
    for problem in _unsendable(loads, machines):
        wrong.add(problem)
    wrong.refuse()
    processes = next(iter(loads.values())).processes
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


def _parse_bind(bind: str | None) -> tuple[str, int]:
    if bind is None:
        raise HarnessError(
            "--workers needs --bind: the address of this machine at which the workers find it",
            next_step="Give one that only they reach, such as --bind 10.0.0.1: "
            "Locust's connection has neither a password nor encryption.",
        )
    return parse_address("--bind", bind)


def _unsendable(loads: Mapping[str, Load], machines: int) -> Iterator[HarnessError]:
    """What so many machines, where that is known, cannot send."""
    processes = {load.processes for load in loads.values()}
    if len(processes) > 1:
        yield HarnessError(
            "--workers: the loads differ in 'processes', and a worker is started once for all of them",
            next_step="Give each load the same number: it is that of each machine.",
        )
        return
    for name, load in loads.items():
        total = machines * load.processes
        if total and mix_of(name) is None and load.users % total:
            yield HarnessError(
                f"$.loads.{users_path(name, loads)}: {load.users} users cannot be parted among {total} load processes",
                next_step=f"Each takes the same part of the work, so use a multiple of {total}.",
            )


def parse_address(option: str, given: str) -> tuple[str, int]:
    """Host and port, Locust's own where none is given. Raises HarnessError."""
    match = re.fullmatch(r"([^\s:/]+)(?::(\d{1,5}))?", given)
    port = int(match[2]) if match and match[2] else PORT
    if match is None or not 0 < port < 65536:
        raise HarnessError(
            f"{option}: '{given}' is not an address", next_step="Give one such as 10.0.0.1 or 10.0.0.1:5557."
        )
    return match[1], port
