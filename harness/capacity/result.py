"""What a capacity search found: capacity.json of its run directory."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from harness.capacity.knee import KneeAnswer
from harness.capacity.levels import CapacityUnit
from harness.capacity.search import MASS, Frontier, SloCapacity
from harness.errors import HarnessError
from harness.files import pretty_json, read_json, replace_file
from harness.summary import Reason

CAPACITY_FILE = "capacity.json"
CAPACITY_VERSION = 1
Purpose = Literal["slo", "knee", "drift"]
CrossingKind = Literal["from", "until", "always", "never", "cannot_tell"]
Floats = NDArray[np.float64]
_DRAWS = 2000


class MeasuredProbe(Struct, frozen=True, kw_only=True):
    """One probe."""

    cells: list[str]  # of the run: one, or one for each load of a mix
    level: int
    second: int | None = None  # of a frontier: the level of the second load
    purpose: Purpose
    state: Literal["pass", "fail", "unresolved", "done", "died", "stopped"]  # stopped: by the budget
    blocks: int
    answers: int
    seconds: float  # measured, without the warm-up
    met: list[float | None]  # of each SLO, the share of requests that met it
    answer_s: float | None  # mean end-to-end latency
    tok_s: float | None


class CapacityDrift(Struct, frozen=True, kw_only=True):
    """An early level measured again at the end: its latency relative to the first time, with a 95 % interval."""

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
    frontier: Frontier | None = None
    drift: CapacityDrift | None = None
    reasons: list[Reason] = []  # why there is no better answer: it did not start, it died, the budget is spent
    started: bool = True
    probes: list[MeasuredProbe] = []

    @property
    def unresolved(self) -> bool:
        """Whether a longer search can give a better answer."""
        knee = self.knee is not None and self.knee.kind == "unclear"
        slo = self.slo is not None and self.slo.kind == "unresolved"
        return self.started and (knee or slo or (self.frontier is not None and not self.frontier.complete))


class CrossingAnswer(Struct, frozen=True):
    """Where `side` is better than `base`.

    from: at `level` and above, until: below `level`, which is between two measured levels, with its interval
    low..high. always, never: at all levels measured. cannot_tell: the runs do not show which of these it is.
    `levels` are the levels measured, `ratios` side over base at each.
    """

    kind: CrossingKind
    level: float | None
    low: float | None
    high: float | None
    levels: list[int]
    ratios: list[float]


class Crossover(Struct, frozen=True, kw_only=True):
    """From which number of users on the throughput of one server, `side`, is above that of another, `base`."""

    base: str
    side: str
    answer: CrossingAnswer


class MixMember(Struct, frozen=True, kw_only=True):
    """A load of the mix that was searched. `amount`: of one that does not change; None: it is varied."""

    load: str
    unit: CapacityUnit
    step: float
    amount: float | None = None


class CapacityReport(Struct, frozen=True, kw_only=True):
    """capacity.json."""

    format_version: int = CAPACITY_VERSION
    run: str
    load: str  # or a mix
    unit: CapacityUnit  # of a mix: that of the load which is varied, the first of a frontier
    step: float  # a level is so many of the unit
    max_level: int
    slos: list[str]
    shares: list[float]
    budget_s: float
    took_s: float = 0.0
    simulated: bool = False
    members: list[MixMember] = []  # of a mix
    servers: list[ServerCapacity] = []
    crossovers: list[Crossover] = []

    def amount(self, level: float) -> float:
        """A level in the unit."""
        return level * self.step

    def loads_at(self, levels: Sequence[int]) -> list[dict[str, Any]]:
        """The amount, unit and name of each load in a probe at these levels; of a load alone without its name."""
        if not self.members:
            return [{"amount": self.amount(levels[0]), "unit": self.unit}]
        left = iter(levels)
        return [
            {
                "amount": next(left) * member.step if member.amount is None else member.amount,
                "unit": member.unit,
                "load": member.load,
            }
            for member in self.members
        ]

    @property
    def varied(self) -> list[MixMember]:
        """The loads of a mix that were varied."""
        return [member for member in self.members if member.amount is None]

    @property
    def fixed(self) -> list[MixMember]:
        """The loads of a mix that did not change."""
        return [member for member in self.members if member.amount is not None]


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


def crossing(
    base: Mapping[int, Sequence[float]], side: Mapping[int, Sequence[float]], *, higher_is_better: bool = True
) -> CrossingAnswer:
    """Compare two servers by their runs at each level, {level: one value of each run}; all values positive.

    At each level that both have, the difference of the mean logarithms of their runs says who is better; between two
    levels it is a straight line over the logarithm of the level. The crossing is where it changes its sign. Its
    interval is a bootstrap over runs: of each server the deviations of the runs from their level's mean are pooled over
    the levels, made larger by the degrees of freedom that the means took, and drawn anew.

    Levels that only one has do not count. With fewer than two levels, or a server without two runs at any level,
    nothing can be told. ValueError: a value that is not positive.
    """
    levels = sorted(level for level in base.keys() & side.keys() if base[level] and side[level])
    samples = [[np.asarray(runs[level], dtype=np.float64) for level in levels] for runs in (side, base)]
    if any((runs <= 0).any() for server in samples for runs in server):
        raise ValueError("a crossing needs positive values")
    logs = [[np.log(runs) for runs in server] for server in samples]
    means = np.array([[runs.mean() for runs in server] for server in logs])
    plain = means[0] - means[1] if levels else np.empty(0)
    ratios = [math.exp(value) for value in plain]
    spare = [sum(len(runs) - 1 for runs in server) for server in logs]
    if len(levels) < 2 or min(spare) < 1:
        return CrossingAnswer("cannot_tell", None, None, None, levels, ratios)
    axis, sign = np.log(np.array(levels, dtype=np.float64)), 1.0 if higher_is_better else -1.0
    dice = np.random.default_rng(20261124)
    drawn = sign * (_drawn_means(logs[0], means[0], dice) - _drawn_means(logs[1], means[1], dice))
    kinds = _kinds(drawn)
    kind: CrossingKind = _kinds(sign * plain[None])[0].item()
    agree = np.isin(kinds, [kind, "always"] if kind in ("from", "until") else [kind])
    if kind == "cannot_tell" or agree.mean() < (1 + MASS) / 2:
        return CrossingAnswer("cannot_tell", None, None, None, levels, ratios)
    if kind in ("always", "never"):
        return CrossingAnswer(kind, None, None, None, levels, ratios)
    # A server that is always better crosses at or beyond the end of the levels.
    end = axis[0] if kind == "from" else axis[-1]
    at = np.where(kinds[agree] == "always", end, _zeros(axis, drawn[agree]))
    low, high = np.exp(np.quantile(at, [(1 - MASS) / 2, (1 + MASS) / 2]))
    level = float(np.exp(_zeros(axis, sign * plain[None])[0]))
    return CrossingAnswer(kind, level, float(low), float(high), levels, ratios)


def _drawn_means(logs: Sequence[Floats], means: Floats, dice: np.random.Generator) -> Floats:
    """Draws x levels: means of runs as they might have been."""
    deviations = np.concatenate([runs - mean for runs, mean in zip(logs, means, strict=True)])
    spare = sum(len(runs) - 1 for runs in logs)
    deviations = deviations * math.sqrt(len(deviations) / spare)
    # The spread itself is an estimate from few runs: Student's t in place of a normal distribution.
    wide = np.sqrt(spare / dice.chisquare(spare, _DRAWS))[:, None]
    columns = [
        mean + dice.choice(deviations, (_DRAWS, len(runs))).mean(axis=1) for runs, mean in zip(logs, means, strict=True)
    ]
    return means + (np.stack(columns, axis=1) - means) * wide


def _kinds(rows: Floats) -> NDArray[np.str_]:
    """What lines of differences (lines x levels) say, larger being better; where one crosses zero more often, its
    last crossing counts."""
    better = rows > 0
    return np.select(
        [better.all(axis=1), ~better.any(axis=1), better[:, -1], better[:, 0]],
        ["always", "never", "from", "until"],
        "cannot_tell",
    )


def _zeros(axis: Floats, rows: Floats) -> Floats:
    """Where each line last changes its sign; of one that does not, some place."""
    changes = (rows[:, 1:] > 0) != (rows[:, :-1] > 0)
    place = changes.shape[1] - 1 - np.argmax(changes[:, ::-1], axis=1)
    line = np.arange(len(rows))
    left, right = rows[line, place], rows[line, place + 1]
    share = left / np.where(left == right, 1.0, left - right)
    return np.asarray(axis[place] + share * (axis[place + 1] - axis[place]))
