"""The answers of a capacity search: the largest load that meets the SLOs, crossings of servers, and capacity.json.

The searches are functions of the probes so far and do no I/O. They assume that a lower load is never worse.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from harness.analysis.probe import MeasuredProbe, Probe, Unheld
from harness.analysis.slo import CapacitySlo, ProbeBlock
from harness.analysis.stats import ASSUMED_FREEDOM, ASSUMED_SD, welch_effect
from harness.base.files import pretty_json, read_json, replace_file
from harness.base.summary import Reason, because, known_bounds
from harness.base.units import short_percent
from harness.scenario import MAX_USERS, Load, is_open_loop

CAPACITY_FILE = "capacity.json"
CAPACITY_VERSION = 1
CapacityUnit = Literal["users", "requests/s", "times the trace"]
AnswerKind = Literal[
    "found", "more_than", "none", "unresolved",
    "knee", "unclear",
    "from", "until", "always", "never", "cannot_tell",
]  # fmt: skip
Floats = NDArray[np.float64]

GRID_STEP = 0.1  # between two levels
RATE_STEPS = 10  # the rate of an open loop is varied in tenths of the scenario's rate
QUEUE_S = 120.0  # an open loop has enough users for a queue of this length; with fewer, arrivals would be lost
MASS = 0.95  # probability of an interval
_MAX_CONFIDENCE = 0.97  # of a single probe: larger probabilities count as this one
_MAX_CONFIDENCE_UNRESOLVED = 0.7
_DRAWS = 2000
DRIFT_LIMIT = 0.05  # smaller drift is not reported


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
    """An answer in levels of the load, with its 95 % interval low..high (inclusive); see docs/method.md.

    The highest level that meets the SLOs. found: `level`. more_than: even the highest level meets them; `high` is None.
    none: even the lowest level does not; `level` is 0. unresolved: no level has clear evidence on both sides, or the
    search was stopped early: `low` is the highest level that passed and `high` the last one below the first that
    failed; None where there is no such level.

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
    unconfirmed: list[int] = []  # levels next to the answer that only one probe decided, because no further was left
    posterior: list[tuple[int, float]] = []  # level, and the probability that it is the answer
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
    slo: CapacityAnswer | None = None
    knee: CapacityAnswer | None = None
    drift: Reason | None = None  # how much longer the answers of an early level take at the end
    reasons: list[Reason] = []  # why there is no better answer, such as a server that died or a spent budget
    started: bool = True
    probes: list[MeasuredProbe] = []

    @property
    def unresolved(self) -> bool:
        """Whether a longer search can give a better answer."""
        kinds = [answer.kind for answer in (self.slo, self.knee) if answer is not None]
        return self.started and not {"unclear", "unresolved"}.isdisjoint(kinds)


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
    slos: list[str]  # where servers have different SLOs: those of the first
    shares: list[float]
    knee: bool = False  # the knee was asked for, too
    budget_s: float
    took_s: float = 0.0
    simulated: bool = False
    members: list[MixMember] = []  # of a mix
    servers: list[ServerCapacity] = []
    crossovers: list[CapacityAnswer] = []

    def amount(self, level: float) -> float:
        """The amount of a level, in the unit."""
        return level * self.step

    def amounts(self, level: int) -> dict[str, float]:
        """The users, rate or speed of each load at a level."""
        members = {one.load: self.amount(level) if one.amount is None else one.amount for one in self.members}
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


# Levels: the amounts of a load that a search may try.


def log_grid(max_level: int) -> list[int]:
    """Levels from 1 to max_level, each larger by GRID_STEP or by 1."""
    levels = [1]
    while levels[-1] < max_level:
        levels.append(min(max_level, max(levels[-1] + 1, math.floor(levels[-1] * (1 + GRID_STEP)))))
    return levels


def load_unit(load: Load) -> CapacityUnit:
    """The unit of the amount of a load."""
    return "times the trace" if load.trace is not None else "requests/s" if is_open_loop(load) else "users"


def level_step(load: Load) -> float:
    """The amount of one level: one user, or a tenth of an open loop's rate or of a trace's speed."""
    if load.trace is not None:
        return load.trace.speed / RATE_STEPS
    return 1.0 if load.arrivals is None else (load.arrivals.rate or 1.0) / RATE_STEPS


def load_at(load: Load, amount: float, duration_s: float) -> Load:
    """The load with this amount of users, requests/s, or times the trace. A trace lasts until its end."""
    if load.trace is not None:
        users = math.ceil(load.users * max(1.0, amount / load.trace.speed))
        trace = msgspec.structs.replace(load.trace, speed=amount)
        return msgspec.structs.replace(load, users=min(MAX_USERS, users), trace=trace)
    load = msgspec.structs.replace(load, requests=None, duration_s=duration_s)
    if load.arrivals is None:
        users = round(amount)
        return msgspec.structs.replace(load, users=users, processes=min(load.processes, users))
    users = min(MAX_USERS, max(load.users, math.ceil(QUEUE_S * amount)))
    arrivals = msgspec.structs.replace(load.arrivals, rate=amount)
    return msgspec.structs.replace(load, users=users, arrivals=arrivals)


# The largest load that meets the SLOs: probabilistic bisection on a grid of levels, followed by confirming probes.
#
# The *capacity* is the largest level that meets all SLOs. Each state, "the capacity is between this level of the grid
# and the next", has a probability: at first the width of its step on a logarithmic scale. A probe shifts probability to
# one side by its evidence (generalised probabilistic bisection, arXiv 1711.00843); an unresolved probe shifts little.
# The next probe is at the median. When the capacity is within one step, fresh probes of the answer and of the level
# above must agree with it, else the search continues.


def probe_limit(max_level: int) -> int:
    """The largest number of probes: those of a bisection, two to confirm, one more for a probe without result."""
    return math.ceil(math.log2(len(log_grid(max_level)) + 1)) + 3


def next_slo_level(probes: Sequence[Probe], max_level: int) -> int | None:
    """The level to probe next for the SLOs; None at the end of the search. `probes`: all so far.

    After a first probe that was stopped the search climbs: it starts at the lowest level, and doubles it until a probe
    fails. That is for slow servers.
    """
    climbs = any(probe.purpose == "slo" and probe.state == "stopped" for probe in probes)
    levels, counted = log_grid(max_level), _counted(probes)
    remaining, tries = probe_limit(max_level) - len(counted), Counter(probe.level for probe in counted)
    if remaining <= 0:
        return None
    nets = _net_passes(counted, levels)
    low, high = _bracket(nets)
    to_confirm = [level for level in (low, high) if level is not None and nets[level] in (-1, 1)]
    candidates = _candidate_levels([level for level in levels if (low or 0) < level < (high or math.inf)], tries)
    if climbs and candidates and high is None and remaining > len(to_confirm):
        return next((level for level in candidates if level >= 2 * (low or 0)), candidates[-1])
    if candidates and remaining > len(to_confirm):
        # Around a level are the two states that a probe of it separates.
        states = [chance for _, chance in _posterior(counted, levels)]
        around = {level: sum(two) for level, two in zip(levels, pairwise(states), strict=True)}
        chances = list(accumulate(around[level] for level in candidates))
        return candidates[bisect_left(chances, chances[-1] / 2)]
    return min(to_confirm, key=lambda level: tries[level]) if to_confirm else None


def slo_answer(probes: Sequence[Probe], max_level: int, *, complete: bool | None = None) -> CapacityAnswer:
    """The largest load that meets the SLOs, after the probes so far. `complete`: None if a search decides it."""
    levels, counted = log_grid(max_level), _counted(probes)
    nets, states = _net_passes(counted, levels), _posterior(counted, levels)
    low, high = _bracket(nets)
    first, last = _interval(states)
    complete = next_slo_level(probes, max_level) is None if complete is None else complete
    answer = partial(
        CapacityAnswer,
        complete=complete,
        posterior=[(level, chance) for level, chance in states if chance > 1e-4],
        unconfirmed=[level for level in (low, high) if level is not None and abs(nets[level]) < 2],
    )
    if low == levels[-1]:
        return answer(kind="more_than", level=low, low=first, high=None)
    if high == levels[0]:
        return answer(kind="none", level=0, low=0, high=0, above=high)
    if low is None or high is None or not complete:
        return answer(kind="unresolved", level=None, low=low, high=None if high is None else high - 1, above=high)
    last = max(last or 0, high - 1)
    above = min((level for level in levels if level > last and nets[level] < 0), default=None)
    return answer(kind="found", level=low, low=min(first, low), high=last, above=above)


def with_broken(
    answer: CapacityAnswer, all_probes: Sequence[MeasuredProbe], slos: Sequence[CapacitySlo]
) -> CapacityAnswer:
    """Add the SLO that the level above the answer missed most, or why it does not count."""
    of_level = [one for one in all_probes if one.purpose == "slo" and one.level == answer.above]
    failed = next((one for one in of_level if one.state in ("fail", "died")), None)
    if failed is not None and failed.unheld is not None:
        return msgspec.structs.replace(answer, unheld=failed.unheld)
    missed = [
        ((1 - share) / (1 - slo.share), slo.text)
        for slo, share in zip(slos, failed.met if failed else (), strict=False)
        if share is not None
    ]
    return msgspec.structs.replace(answer, broken=max(missed)[1]) if missed else answer


def _counted(probes: Sequence[Probe]) -> list[Probe]:
    """The probes that have a result for the SLOs."""
    return [probe for probe in probes if probe.purpose == "slo" and probe.state not in ("open", "stopped")]


def _posterior(probes: Sequence[Probe], levels: Sequence[int]) -> list[tuple[int, float]]:
    """Each level with the probability that the capacity is between it and the next one. 0: below all levels."""
    # State i: the capacity is at least levels[i - 1] and below levels[i]; the last one: at least the highest.
    logs = np.log([math.log(2), *(math.log(b / a) for a, b in pairwise(levels)), math.log(2)])
    for probe in probes:
        confidence = _MAX_CONFIDENCE_UNRESOLVED if probe.state == "unresolved" else _MAX_CONFIDENCE
        chance = min(confidence, max(1 - confidence, probe.chance))
        index = levels.index(probe.level)
        logs[: index + 1] += math.log(1 - chance)
        logs[index + 1 :] += math.log(chance)
    weights = np.exp(logs - logs.max())
    return list(zip([0, *levels], (weights / weights.sum()).tolist(), strict=True))


def _net_passes(probes: Sequence[Probe], levels: Sequence[int]) -> dict[int, int]:
    """For each level the number of passed probes less the number of failed ones."""
    signs = {"pass": 1, "fail": -1, "died": -1}
    return {level: sum(signs.get(one.state, 0) for one in probes if one.level == level) for level in levels}


def _bracket(nets: Mapping[int, int]) -> tuple[int | None, int | None]:
    """The highest passed level below all failed ones, and the lowest failed level above it, each by its net passes.

    Where results contradict each other, the boundary between the two is where most probes agree with it.
    """
    levels, values = list(nets), list(nets.values())
    boundary = max(range(len(values) + 1), key=lambda index: sum(values[:index]) - sum(values[index:]))
    passed = [level for level in levels[:boundary] if nets[level] > 0]
    failed = [level for level in levels[boundary:] if nets[level] < 0]
    return (passed[-1] if passed else None), (failed[0] if failed else None)


def _candidate_levels(between: Sequence[int], tries: Mapping[int, int]) -> Sequence[int]:
    """The levels of the bracket that may be probed next.

    Levels with unresolved probes are near the capacity, and so are the levels between them. So the search continues
    below or above all of these, where more levels are left.
    """
    unresolved = [level for level in between if tries[level]]
    if not unresolved:
        return between
    below = [level for level in between if level < unresolved[0]]
    above = [level for level in between if level > unresolved[-1]]
    return below if len(below) >= len(above) else above


def _interval(states: Sequence[tuple[int, float]]) -> tuple[int, int | None]:
    """The lowest and highest capacity, without tails of (1 - MASS) / 2 on either side. None: no upper bound."""
    levels, chances = zip(*states, strict=True)
    below, above = ([0.0, *accumulate(tail)] for tail in (chances[:-1], chances[:0:-1]))
    first, last = (bisect_right(tail, (1 - MASS) / 2) - 1 for tail in (below, above))  # states from either end
    highest: list[int | None] = [*(level - 1 for level in levels[1:]), None]  # capacity of each state
    return levels[first], highest[-1 - last]


# Drift, and the level from which on one server has more throughput than another.


def find_drift(level: int, before: Sequence[ProbeBlock], after: Sequence[ProbeBlock]) -> Reason | None:
    """How much longer answers take than in an earlier probe of the level; None with fewer than two blocks.

    Its value `drifted` is whether that is beyond chance and DRIFT_LIMIT.
    """
    change = welch_effect(*([block.e2e_s for block in blocks if block.e2e_s] for blocks in (after, before)))
    if change is None:
        return None
    low, high = known_bounds(change.ratio, *change.interval())
    drifted = abs(change.log_ratio) > max(change.half_width(), DRIFT_LIMIT)
    took = f"{short_percent(abs(change.ratio - 1))} {'longer' if change.ratio > 1 else 'shorter'}"
    interval = "interval not known"
    if low is not None and high is not None:
        interval = f"95 % interval of the ratio {low:.2f} to {high:.2f}"
    text = f"answers of the first level took {took} at the end than at the start ({interval})"
    text += ": the machine drifted, so the answer mixes both states" if drifted else ""
    return because("capacity_drift", text, level=level, ratio=change.ratio, low=low, high=high, drifted=drifted)


def find_crossovers(servers: Sequence[ServerCapacity]) -> list[CapacityAnswer]:
    """Compare the throughput of each pair of servers that were searched for a knee. The sample is the probe."""
    runs: dict[str, dict[int, list[float]]] = {}
    for server in servers:
        for probe in server.probes:
            if probe.purpose in ("knee", "drift") and probe.state == "done" and probe.tok_s:
                runs.setdefault(server.server, {}).setdefault(probe.level, []).append(probe.tok_s)
    crossings = [(base, side, find_crossing(runs[base], runs[side])) for base, side in combinations(runs, 2)]
    return [msgspec.structs.replace(answer, base=base, side=side) for base, side, answer in crossings]


def find_crossing(
    base: Mapping[int, Sequence[float]],
    side: Mapping[int, Sequence[float]],
    *,
    linear: bool = False,
    assume_spread: bool = False,
) -> CapacityAnswer:
    """Compare two servers by their runs at each level, {level: one positive value of each run}. More is better.

    At each level that both have, the difference of the mean logarithms of their runs decides which one is better.
    Between two levels it is a straight line over the logarithm of the level. The crossing is where it changes its sign.
    Its interval is that of means drawn with the spread of each server's runs, which is pooled over the levels.
    `linear`: the values are speeds, and between two levels the times are straight lines over the level itself, as is
    the time of a token over its context. `assume_spread`: pool an assumed spread of runs, for servers without repeats.

    With fewer than two common levels, or a server without two runs at any level, the answer is `cannot_tell`.
    """
    levels = sorted(level for level in base.keys() & side.keys() if base[level] and side[level])
    logs = [[np.log(np.asarray(runs[level], dtype=np.float64)) for level in levels] for runs in (side, base)]
    means = np.array([[runs.mean() for runs in server] for server in logs])
    ratios = [math.exp(value) for value in means[0] - means[1]] if levels else []
    answer = partial(CapacityAnswer, complete=True, levels=levels, ratios=ratios)
    inconclusive = answer(kind="cannot_tell", level=None, low=None, high=None)
    freedom = [sum(len(runs) - 1 for runs in server) for server in logs]
    if len(levels) < 2 or (min(freedom) < 1 and not assume_spread):
        return inconclusive

    def difference(of_side: Floats, of_base: Floats) -> Floats:
        return np.exp(-of_base) - np.exp(-of_side) if linear else of_side - of_base

    axis = np.array(levels, dtype=np.float64) if linear else np.log(np.array(levels, dtype=np.float64))
    generator = np.random.default_rng(20261124)
    errors = [_drawn_errors(runs, generator, assumed=assume_spread) for runs in logs]
    differences, drawn = difference(*means)[None], difference(means[0] + errors[0], means[1] + errors[1])
    kinds = _classify(drawn)
    kind: AnswerKind = _classify(differences)[0].item()
    agree = np.isin(kinds, [kind, "always"] if kind in ("from", "until") else [kind])
    if kind == "cannot_tell" or agree.mean() < (1 + MASS) / 2:
        return inconclusive
    if kind in ("always", "never"):
        return answer(kind=kind, level=None, low=None, high=None)
    # A draw in which the side is always better crosses at or beyond the end of the levels.
    end = axis[0] if kind == "from" else axis[-1]
    crossings = np.where(kinds[agree] == "always", end, _last_sign_changes(axis, drawn[agree]))
    quantiles = np.quantile(crossings, [(1 - MASS) / 2, (1 + MASS) / 2])
    found = np.array([_last_sign_changes(axis, differences)[0], *quantiles])
    level, low, high = found if linear else np.exp(found)
    return answer(kind=kind, level=float(level), low=float(low), high=float(high))


def _drawn_errors(logs: Sequence[Floats], generator: np.random.Generator, *, assumed: bool = False) -> Floats:
    """Draws of the errors of the means, as an array of draws x levels: Student's t, as the spread is estimated.

    `assumed`: pooled with the assumed spread of equal runs.
    """
    freedom = ASSUMED_FREEDOM * assumed + sum(len(runs) - 1 for runs in logs)
    squares = ASSUMED_FREEDOM * ASSUMED_SD**2 * assumed
    squares += sum(float(((runs - runs.mean()) ** 2).sum()) for runs in logs)
    spread = np.sqrt(squares / generator.chisquare(freedom, (_DRAWS, 1)))
    return spread * generator.normal(size=(_DRAWS, len(logs))) / np.sqrt([len(runs) for runs in logs])


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
