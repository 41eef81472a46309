"""capacity.json: what a capacity search asked, and its answers so far. The search writes it, all else reads it."""

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from harness.base.files import pretty_json, read_json, replace_file
from harness.base.reason import Reason
from harness.questions.capacity.level import MeasuredProbe, Unheld

CAPACITY_FILE = "capacity.json"
CAPACITY_VERSION = 1
CapacityUnit = Literal["users", "requests/s", "times the trace"]
AnswerKind = Literal[
    "found", "between", "more_than", "none", "unproven",
    "knee", "unclear",
    "from", "until", "always", "never", "cannot_tell",
]  # fmt: skip


class KneePoint(Struct, frozen=True, kw_only=True):
    """The throughput of one level, in output tokens per second. `low` and `high`: its 95 % interval."""

    level: int
    seconds: float
    blocks: int
    tok_s: float
    low: float
    high: float
    steady: bool  # False: the throughput still changed when the probe reached its limit of blocks
    error: float  # relative standard error, with ...
    freedom: int  # ... these degrees of freedom

    @property
    def half_width(self) -> float:
        """Half the relative width of the interval."""
        return self.high / self.tok_s - 1 if self.tok_s else 0.0


class CapacityAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer in levels of the load, with its interval low..high (inclusive); see docs/method.md.

    The highest level that meets the SLOs. `low` is the highest level that is proven to meet them, `high` the last one
    below the lowest that is proven to break one; None: no such level. found: `level`, and the next level that can be
    tried breaks an SLO. between: more than `low`, up to `high`; `level` is likely. more_than: even the highest level
    meets them. none: even the lowest level does not; `level` is 0. unproven: no level is proven; `level` is likely.

    The knee of throughput. knee: `level`. none: throughput rises up to the maximum level; all three are None. unclear:
    both are possible, or the search was stopped early; only `low` is known.

    The levels at which `side` has more throughput than `base`. from: at `level` and above. until: below `level`. It may
    be between two measured levels. always, never: at all measured levels. cannot_tell: inconclusive.
    """

    kind: AnswerKind
    level: int | float | None
    low: int | float | None
    high: int | float | None
    complete: bool  # False: the search was stopped early
    # Of the SLOs.
    above: int | None = None  # the smallest level above that failed ...
    broken: str | None = None  # ... and the SLO that it broke most clearly, ...
    unheld: Unheld | None = None  # ... or what its answers lack
    met: int | None = None  # the highest level that seems to meet the SLOs ...
    missed: int | None = None  # ... and the lowest one above it that seems to break one, proven or not
    # Of the knee; throughputs are output tokens per second.
    peak_level: int | None = None
    peak_tok_s: float | None = None
    peak_low: float | None = None
    peak_high: float | None = None
    # The smallest measured level beyond the peak that is clearly below the share of the knee, or at which the server
    # failed; None: no such level.
    hurts_from: int | None = None
    points: list[KneePoint] = []
    # Of a crossing.
    base: str = ""
    side: str = ""
    levels: list[int] = []  # measured ones ...
    ratios: list[float] = []  # ... and at each the throughput of side / that of base


class ServerCapacity(Struct, frozen=True, kw_only=True):
    """The results of one server."""

    server: str
    slos: list[str] = []  # of this server; []: none, or of a file from before they were stored for each server
    shares: list[float] = []  # of requests that must meet each of them
    slo: CapacityAnswer | None = None
    knee: CapacityAnswer | None = None
    settle_s: float | None = None  # a budget that should settle the answer for the SLOs; None: it is settled
    drift: Reason | None = None  # how much longer the answers of an early level take at the end
    reasons: list[Reason] = []  # why there is no better answer, such as a server that died or a spent budget
    started: bool = True
    probes: list[MeasuredProbe] = []

    @property
    def unresolved(self) -> bool:
        """Whether a question has no answer: no level is proven, or the knee is unclear."""
        kinds = [answer.kind for answer in (self.slo, self.knee) if answer is not None]
        return self.started and (not kinds or not {"unclear", "unproven"}.isdisjoint(kinds))


class MixMember(Struct, frozen=True, kw_only=True):
    """A load of a searched mix. `amount`: of a fixed load; None: the search varies it."""

    load: str
    unit: CapacityUnit
    step: float
    amount: float | None = None


class CapacityReport(Struct, frozen=True, kw_only=True):
    """capacity.json: what was asked, and the answers so far."""

    format_version: int = CAPACITY_VERSION
    run: str = ""
    load: str  # or a mix
    unit: CapacityUnit  # of the varied load
    step: float  # amount of one level, in the unit
    max_level: int
    slos: list[str]  # those of all servers; []: none, or each server has its own
    shares: list[float]  # of requests that must meet each of them
    knee: bool = False  # the knee was asked for, too
    budget_s: float
    took_s: float = 0.0
    at_least: float | None = None  # only whether this amount meets the SLOs was asked ...
    at_least_level: int | None = None  # ... which is this level
    simulated: bool = False
    members: list[MixMember] = []  # of a mix
    servers: list[ServerCapacity] = []
    crossovers: list[CapacityAnswer] = []

    def holds(self, server: ServerCapacity) -> bool | None:
        """Whether a server holds what was asked for, else any level; None: not known."""
        level, slo = self.at_least_level or 1, server.slo
        if slo is None:
            return None if self.slos_of(server) else True
        if slo.low is not None and slo.low >= level:
            return True
        return False if slo.above is not None and slo.above <= level else None

    def slos_of(self, server: ServerCapacity) -> list[str]:
        """The SLOs of a server. A file from before they were stored for each has only those of the first server."""
        return server.slos or self.slos

    @property
    def all_slos(self) -> list[str]:
        """The SLOs of any server, each once."""
        return list(dict.fromkeys([*self.slos, *(slo for server in self.servers for slo in server.slos)]))

    @property
    def options(self) -> list[str]:
        """The options of `harness capacity` that ask the same of the same scenario and servers.

        SLOs that not all servers have are those of the scenario, which no option can name.
        """
        minutes = self.budget_s / 60
        budget = f"{minutes:.0f}min" if minutes.is_integer() else f"{self.budget_s:.9g}s"
        return [
            *("--load", self.load),
            *(word for member in self.fixed for word in ("--fix", f"{member.load}={member.amount:.9g}")),
            *(word for slo in self.slos for word in ("--check", slo)),
            *(["--at-least", f"{self.at_least:.9g}"] if self.at_least is not None else []),
            *(["--knee"] if self.knee else []),
            *("--max-users", str(self.max_level)),
            *("--budget", budget),
        ]

    def amount(self, level: float) -> float:
        """The amount of a level, in the unit."""
        return level * self.step

    def amounts(self, level: int) -> dict[str, float]:
        """The users, rate or speed of each load at a level."""
        members = {
            member.load: self.amount(level) if member.amount is None else member.amount for member in self.members
        }
        return members or {self.load: self.amount(level)}

    def loads_at(self, level: int, *, fixed: bool = False) -> list[dict[str, Any]]:
        """The amount and unit of each load in a probe of this level; in a mix also its name. `fixed`: only these."""
        if not self.members and not fixed:
            return [{"amount": self.amount(level), "unit": self.unit}]
        members, amounts = self.fixed if fixed else self.members, self.amounts(level)
        return [{"amount": amounts[member.load], "unit": member.unit, "load": member.load} for member in members]

    @property
    def varied(self) -> str:
        """The load that the search varies."""
        return next((member.load for member in self.members if member.amount is None), self.load)

    @property
    def fixed(self) -> list[MixMember]:
        return [member for member in self.members if member.amount is not None]


def write_capacity(folder: Path, report: CapacityReport) -> None:
    replace_file(folder / CAPACITY_FILE, pretty_json(report))


def read_capacity(folder: Path) -> CapacityReport | None:
    """Read capacity.json; None if the run is not a capacity search. Raises HarnessError for a damaged file, OSError."""
    path = folder / CAPACITY_FILE
    return read_json(path, CapacityReport, CAPACITY_VERSION) if path.exists() else None
