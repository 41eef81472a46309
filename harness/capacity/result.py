"""What a capacity search found: capacity.json of its run directory."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal

from msgspec import Struct

from harness.capacity.crossing import CrossingAnswer, crossing
from harness.capacity.knee import KneeAnswer
from harness.errors import HarnessError
from harness.files import pretty_json, read_json, replace_file
from harness.summary import Reason

CAPACITY_FILE = "capacity.json"
CAPACITY_VERSION = 1


class MeasuredProbe(Struct, frozen=True, kw_only=True):
    """One probe: a cell of the run."""

    cell: str
    level: int
    purpose: Literal["slo", "knee", "drift"]
    state: Literal["pass", "fail", "unresolved", "done", "died", "stopped"]  # stopped: by the budget
    blocks: int
    answers: int
    seconds: float  # measured, without the warm-up
    met: list[float | None]  # of each SLO, the share of requests that met it
    answer_s: float | None  # mean end-to-end latency
    tok_s: float | None


class SloCapacity(Struct, frozen=True, kw_only=True):
    """The highest level that meets the SLOs, with a 95 % interval; see docs/method.md.

    Unresolved, such as when the budget was spent: `low` is the highest level that passed and `high` the last one below
    the first that failed; None where there is no such level.
    """

    kind: Literal["found", "more_than", "none", "unresolved"]
    level: int | None
    low: int | None
    high: int | None
    above: int | None = None  # the smallest level above that failed ...
    broken: str | None = None  # ... and the SLO that it broke most clearly
    posterior: list[tuple[int, float]] = []  # level, and the probability that it is the answer


class CapacityDrift(Struct, frozen=True, kw_only=True):
    """An early level measured again at the end: output tok/s relative to the first time, with a 95 % interval."""

    level: int
    ratio: float
    low: float
    high: float
    drifted: bool


class ServerCapacity(Struct, frozen=True, kw_only=True):
    """What was found out about one server."""

    server: str
    slo: SloCapacity | None = None
    knee: KneeAnswer | None = None
    drift: CapacityDrift | None = None
    reasons: list[Reason] = []  # why there is no better answer: it did not start, it died, the budget is spent
    started: bool = True
    probes: list[MeasuredProbe] = []

    @property
    def unresolved(self) -> bool:
        """Whether a longer search can give a better answer."""
        knee_open = self.knee is not None and self.knee.kind == "unclear"
        return self.started and (knee_open or (self.slo is not None and self.slo.kind == "unresolved"))


class Crossover(Struct, frozen=True, kw_only=True):
    """From which number of users on the throughput of one server, `side`, is above that of another, `base`."""

    base: str
    side: str
    answer: CrossingAnswer


class CapacityReport(Struct, frozen=True, kw_only=True):
    """capacity.json."""

    format_version: int = CAPACITY_VERSION
    run: str
    load: str
    unit: Literal["users", "requests/s"]
    step: float  # a level is so many of the unit
    max_level: int
    slos: list[str]
    shares: list[float]
    budget_s: float
    took_s: float = 0.0
    simulated: bool = False
    servers: list[ServerCapacity] = []
    crossovers: list[Crossover] = []

    def amount(self, level: float) -> float:
        """A level in the unit."""
        return level * self.step


def crossovers_of(servers: Sequence[ServerCapacity]) -> list[Crossover]:
    """Compare the throughput of each pair of servers that were searched for a knee; a probe is a run."""
    runs: dict[str, dict[int, list[float]]] = {}
    for server in servers:
        for probe in server.probes:
            if probe.purpose == "knee" and probe.state == "done" and probe.tok_s:
                runs.setdefault(server.server, {}).setdefault(probe.level, []).append(probe.tok_s)
    return [
        Crossover(base=base, side=side, answer=crossing(runs[base], runs[side])) for base, side in combinations(runs, 2)
    ]


def write_capacity(folder: Path, found: CapacityReport) -> None:
    """Write it, whole or not at all."""
    replace_file(folder / CAPACITY_FILE, pretty_json(found))


def read_capacity(folder: Path) -> CapacityReport | None:
    """What a capacity search found; None: the run is not a search. Raises HarnessError for a damaged file."""
    path = folder / CAPACITY_FILE
    if not path.exists():
        return None
    try:
        return read_json(path, CapacityReport, CAPACITY_VERSION)
    except OSError as error:
        raise HarnessError(f"{path}: cannot be read ({error.strerror})") from None
