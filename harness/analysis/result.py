"""The results of a capacity search: capacity.json of its run directory."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from harness.analysis.knee import KneeAnswer
from harness.analysis.levels import CapacityUnit
from harness.analysis.search import MASS, SloCapacity
from harness.analysis.slo import LoadBlock
from harness.analysis.stats import welch_effect
from harness.base.files import pretty_json, read_json, replace_file
from harness.base.summary import Reason

CAPACITY_FILE = "capacity.json"
CAPACITY_VERSION = 1
Purpose = Literal["slo", "knee", "drift"]
CrossingKind = Literal["from", "until", "always", "never", "cannot_tell"]
Floats = NDArray[np.float64]
_DRAWS = 2000
DRIFT_LIMIT = 0.05  # smaller drift is not reported


class MeasuredProbe(Struct, frozen=True, kw_only=True):
    """One probe."""

    cells: list[str]  # of the run: one, or one for each load of a mix
    level: int
    purpose: Purpose
    state: Literal["pass", "fail", "unresolved", "done", "died", "stopped"]  # stopped: the budget was spent
    blocks: int
    answers: int
    seconds: float  # measured, without the warm-up
    counts: list[tuple[int, int]] = []  # for each SLO the requests that met it, and those that count
    missed: int = 0  # measured requests that missed an SLO ...
    queued: int = 0  # ... and of these, those whose connection waited in the server's listen queue
    answer_s: float | None  # mean end-to-end latency
    tok_s: float | None

    @property
    def met(self) -> list[float | None]:
        """For each SLO the share of requests that met it; None without a request."""
        return [met / total if total else None for met, total in self.counts]


class CapacityDrift(Struct, frozen=True, kw_only=True):
    """An early level measured again at the end: its latency relative to the first time, with a 95 % interval."""

    level: int
    ratio: float
    low: float
    high: float
    drifted: bool


class ServerCapacity(Struct, frozen=True, kw_only=True):
    """The results of one server."""

    server: str
    slo: SloCapacity | None = None
    knee: KneeAnswer | None = None
    drift: CapacityDrift | None = None
    reasons: list[Reason] = []  # why there is no better answer, such as a server that died or a spent budget
    started: bool = True
    probes: list[MeasuredProbe] = []

    @property
    def unresolved(self) -> bool:
        """Whether a longer search can give a better answer."""
        knee_open = self.knee is not None and self.knee.kind == "unclear"
        slo_open = self.slo is not None and self.slo.kind == "unresolved"
        return self.started and (knee_open or slo_open)


class CrossingAnswer(Struct, frozen=True):
    """The levels at which `side` is better than `base`.

    from: at `level` and above. until: below `level`. `level` may be between two measured levels; low..high is its
    interval. always, never: at all measured levels. cannot_tell: inconclusive. `levels` are the measured levels,
    `ratios` those of side to base at each.
    """

    kind: CrossingKind
    level: float | None
    low: float | None
    high: float | None
    levels: list[int]
    ratios: list[float]


class Crossover(Struct, frozen=True, kw_only=True):
    """The number of users from which on the throughput of `side` is above that of `base`."""

    base: str
    side: str
    answer: CrossingAnswer


class MixMember(Struct, frozen=True, kw_only=True):
    """A load of a searched mix. `amount`: of a fixed load; None: the search varies it."""

    load: str
    unit: CapacityUnit
    step: float
    amount: float | None = None


class CapacityReport(Struct, frozen=True, kw_only=True):
    """capacity.json."""

    format_version: int = CAPACITY_VERSION
    run: str
    load: str  # or a mix
    unit: CapacityUnit  # of the varied load
    step: float  # amount of one level, in the unit
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
        """The amount of a level, in the unit."""
        return level * self.step

    def loads_at(self, level: int, *, fixed: bool = False) -> list[dict[str, Any]]:
        """The amount and unit of each load in a probe of this level; in a mix also its name. `fixed`: only these."""
        if not self.members and not fixed:
            return [{"amount": self.amount(level), "unit": self.unit}]
        return [
            {
                "amount": self.amount(level) if member.amount is None else member.amount,
                "unit": member.unit,
                "load": member.load,
            }
            for member in (self.fixed if fixed else self.members)
        ]

    @property
    def varied(self) -> str:
        """The load that the search varies."""
        return next((member.load for member in self.members if member.amount is None), self.load)

    @property
    def fixed(self) -> list[MixMember]:
        return [member for member in self.members if member.amount is not None]


def drift_of(level: int, before: list[LoadBlock], after: list[LoadBlock]) -> CapacityDrift | None:
    """Return how much longer answers take than in an earlier probe of the level; None with fewer than two blocks."""
    change = welch_effect(*([block.e2e_s for block in blocks if block.e2e_s] for blocks in (after, before)))
    if change is None:
        return None
    low, high = change.interval()
    drifted = abs(change.log_ratio) > max(change.half_width(), DRIFT_LIMIT)
    return CapacityDrift(level=level, ratio=change.ratio, low=low, high=high, drifted=drifted)


def find_crossovers(servers: Sequence[ServerCapacity]) -> list[Crossover]:
    """Compare the throughput of each pair of servers that were searched for a knee. The sample is the probe."""
    runs: dict[str, dict[int, list[float]]] = {}
    for server in servers:
        for probe in server.probes:
            if probe.purpose in ("knee", "drift") and probe.state == "done" and probe.tok_s:
                runs.setdefault(server.server, {}).setdefault(probe.level, []).append(probe.tok_s)
    pairs = combinations(runs, 2)
    return [Crossover(base=base, side=side, answer=find_crossing(runs[base], runs[side])) for base, side in pairs]


def write_capacity(folder: Path, report: CapacityReport) -> None:
    replace_file(folder / CAPACITY_FILE, pretty_json(report))


def read_capacity(folder: Path) -> CapacityReport | None:
    """Read capacity.json; None if the run is not a capacity search. Raises HarnessError for a damaged file, OSError."""
    path = folder / CAPACITY_FILE
    return read_json(path, CapacityReport, CAPACITY_VERSION) if path.exists() else None


def find_crossing(base: Mapping[int, Sequence[float]], side: Mapping[int, Sequence[float]]) -> CrossingAnswer:
    """Compare two servers by their runs at each level, {level: one positive value of each run}. More is better.

    At each level that both have, the difference of the mean logarithms of their runs decides which one is better.
    Between two levels it is a straight line over the logarithm of the level. The crossing is where it changes its sign.
    Its interval is a bootstrap over runs: the deviations of a server's runs from their level's mean are pooled over the
    levels, scaled by the degrees of freedom that the means took, and drawn anew.

    With fewer than two common levels, or a server without two runs at any level, the answer is `cannot_tell`.
    """
    levels = sorted(level for level in base.keys() & side.keys() if base[level] and side[level])
    logs = [[np.log(np.asarray(runs[level], dtype=np.float64)) for level in levels] for runs in (side, base)]
    means = np.array([[runs.mean() for runs in server] for server in logs])
    differences = means[0] - means[1] if levels else np.empty(0)
    ratios = [math.exp(value) for value in differences]
    inconclusive = CrossingAnswer("cannot_tell", None, None, None, levels, ratios)
    freedom = [sum(len(runs) - 1 for runs in server) for server in logs]
    if len(levels) < 2 or min(freedom) < 1:
        return inconclusive
    axis = np.log(np.array(levels, dtype=np.float64))
    generator = np.random.default_rng(20261124)
    drawn = _drawn_means(logs[0], means[0], generator) - _drawn_means(logs[1], means[1], generator)
    kinds = _classify(drawn)
    kind: CrossingKind = _classify(differences[None])[0].item()
    agree = np.isin(kinds, [kind, "always"] if kind in ("from", "until") else [kind])
    if kind == "cannot_tell" or agree.mean() < (1 + MASS) / 2:
        return inconclusive
    if kind in ("always", "never"):
        return CrossingAnswer(kind, None, None, None, levels, ratios)
    # A draw in which the side is always better crosses at or beyond the end of the levels.
    end = axis[0] if kind == "from" else axis[-1]
    crossings = np.where(kinds[agree] == "always", end, _last_sign_changes(axis, drawn[agree]))
    low, high = np.exp(np.quantile(crossings, [(1 - MASS) / 2, (1 + MASS) / 2]))
    level = float(np.exp(_last_sign_changes(axis, differences[None])[0]))
    return CrossingAnswer(kind, level, float(low), float(high), levels, ratios)


def _drawn_means(logs: Sequence[Floats], means: Floats, generator: np.random.Generator) -> Floats:
    """Bootstrap draws of the mean at each level, as an array of draws x levels."""
    deviations = np.concatenate([runs - mean for runs, mean in zip(logs, means, strict=True)])
    freedom = sum(len(runs) - 1 for runs in logs)
    deviations = deviations * math.sqrt(len(deviations) / freedom)
    # The spread is estimated from few runs, so draws follow Student's t instead of a normal distribution.
    widening = np.sqrt(freedom / generator.chisquare(freedom, _DRAWS))[:, None]
    columns = [
        mean + generator.choice(deviations, (_DRAWS, len(runs))).mean(axis=1)
        for runs, mean in zip(logs, means, strict=True)
    ]
    return means + (np.stack(columns, axis=1) - means) * widening


def _classify(rows: Floats) -> NDArray[np.str_]:
    """The kind of crossing of each row of differences over levels. Of several crossings the last one counts."""
    better = rows > 0
    return np.select(
        [better.all(axis=1), ~better.any(axis=1), better[:, -1], better[:, 0]],
        ["always", "never", "from", "until"],
        "cannot_tell",
    )


def _last_sign_changes(axis: Floats, rows: Floats) -> Floats:
    """Where each row of differences last changes its sign. Rows that never do have an arbitrary value."""
    changes = (rows[:, 1:] > 0) != (rows[:, :-1] > 0)
    index = changes.shape[1] - 1 - np.argmax(changes[:, ::-1], axis=1)
    row = np.arange(len(rows))
    left, right = rows[row, index], rows[row, index + 1]
    share = left / np.where(left == right, 1.0, left - right)
    return np.asarray(axis[index] + share * (axis[index + 1] - axis[index]))
