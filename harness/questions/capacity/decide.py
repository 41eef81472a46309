"""The answers of a capacity search: the largest load that meets the SLOs, and crossings of servers.

The searches are functions of the probes so far and do no I/O. They assume that a lower load is never worse.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.base.reason import Reason, because
from harness.base.units import short_percent
from harness.numbers.comparison import known_bounds
from harness.numbers.stats import ASSUMED_FREEDOM, ASSUMED_SD, welch_effect
from harness.questions.capacity.blocks import ProbeBlock
from harness.questions.capacity.level import MeasuredProbe, Probe, is_valid
from harness.questions.capacity.record import AnswerKind, CapacityAnswer, CapacityUnit, ServerCapacity
from harness.scenario import MAX_USERS, Load, is_open_loop
from harness.scenario.check_syntax import Check

Floats = NDArray[np.float64]

GRID_STEP = 0.1  # between two levels
RATE_STEPS = 10  # the rate of an open loop is varied in tenths of the scenario's rate
QUEUE_S = 120.0  # an open loop has enough users for a queue of this length; with fewer, arrivals would be lost
MASS = 0.95  # probability of an interval
_DRAWS = 2000
DRIFT_LIMIT = 0.05  # smaller drift is not reported


# Levels: the amounts of a load that a search may try.


def log_grid(max_level: int) -> list[int]:
    """Levels from 1 to max_level, each larger by GRID_STEP or by 1."""
    levels = [1]
    while levels[-1] < max_level:
        levels.append(min(max_level, max(levels[-1] + 1, math.floor(levels[-1] * (1 + GRID_STEP)))))
    return levels


def search_levels(max_level: int, at_least: int | None) -> list[int]:
    """The levels that a search may try: the grid, doublings from 1, and the one that is asked for."""
    doublings = {2**power for power in range(max_level.bit_length()) if 2**power <= max_level}
    return sorted({*log_grid(max_level), *doublings, *([] if at_least is None else [at_least])})


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


# The largest load that meets the SLOs.
#
# First a *ramp*: doubling levels, a few answers each, until one clearly breaks an SLO. It gives an estimate. Then
# proofs: of the highest level that seemed to meet the SLOs, below the estimate, above it, and what remains between.


MAX_PROOFS = 14
MAX_TRIES = 3  # probes of one level: two agree, or a third one decides
# Answer times of a probe with its warm-up, and probes of a search (test_capacity_proof.py).
PROOF_ROUNDS, RAMP_ROUNDS, TYPICAL_PROOFS = 40, 4, 5
FIT_ROUNDS, MISS_ROUNDS = 30, 12  # of a proof without a miss, and of one that finds a clear miss; with the warm-up
MARGIN_LIMITS = (1e-3, 10.0)  # of the latency / bound of a level, for the estimate
_BELOW = 1.05  # the first proof is so far below the estimate
_AROUND = 1.2  # levels so close to one that could not be decided are as hard


class LevelPoint(NamedTuple):
    """What was seen of one level. `excess` is positive where it meets the SLOs, and negative where it breaks one."""

    level: float
    excess: float
    weight: float = 1.0


class SloStep(NamedTuple):
    """The next probe of a search."""

    purpose: Literal["ramp", "slo"]
    level: int


def crossing_level(points: Sequence[LevelPoint]) -> float | None:
    """Estimate the level above which the SLOs are broken, on a straight line over the logarithm of the level.

    0: even the lowest level breaks one. The highest level: none does. None without points. A higher level is never
    better, so points that contradict this are averaged.
    """
    from scipy.optimize import isotonic_regression

    if not points:
        return None
    points = sorted(points)
    fit = isotonic_regression(
        [point.excess for point in points], weights=[point.weight for point in points], increasing=False
    ).x.tolist()
    broken = next((place for place, excess in enumerate(fit) if excess < 0), None)
    if broken is None:
        return points[-1].level
    if broken == 0:
        return 0.0
    (low, met), (high, missed) = ((points[place].level, fit[place]) for place in (broken - 1, broken))
    return float(low * (high / low) ** (met / (met - missed)))


def next_slo_step(probes: Sequence[Probe], max_level: int, at_least: int | None = None) -> SloStep | None:
    """The probe that the SLOs need next; None at the end of the search. `probes`: all so far.

    `at_least`: only whether this level meets the SLOs is asked.
    """
    if (level := _next_ramp_level(probes, max_level, at_least)) is not None:
        return SloStep("ramp", level)
    counted = _counted(probes)
    levels = search_levels(max_level, at_least)
    nets = _net_passes(probes, levels)
    low, high = _bracket(nets)
    tried = {probe.level for probe in counted if probe.state == "unresolved"}
    candidates = [level for level in levels if (low or 0) < level < (high or math.inf) and level not in tried]
    proofs = [probe for probe in counted if probe.purpose == "slo"]
    is_settled = at_least is not None and ((low or 0) >= at_least or (high or math.inf) <= at_least)
    if is_settled or len(proofs) >= MAX_PROOFS:
        return None
    if at_least is not None and at_least not in tried:
        return SloStep("slo", at_least)
    # Confirm what one probe decided: a pass at once where a level showed to be unsteady, a failure at the end.
    to_confirm = [low if tried or not candidates else None, None if candidates else high]
    for level in to_confirm:
        tries = [probe for probe in counted if probe.level == level]
        if level is not None and abs(nets[level]) == 1 and len(tries) < MAX_TRIES and not _is_hopeless(tries):
            return SloStep("slo", level)
    if not candidates:
        return None
    # First a level that is likely to be proven soon, within a factor of two of the limit.
    if low is None and not proofs and (met := _seen(probes)[0]) in candidates:
        return SloStep("slo", met)
    bracket = (low, high or _seen(probes)[1])
    return SloStep("slo", _next_proof_level(candidates, bracket, sorted(tried), proofs, estimate_level(probes)))


def _is_hopeless(probes: Sequence[Probe]) -> bool:
    """Whether the server died, or most requests missed an SLO, so that no second probe is needed."""
    return any(probe.state == "died" or any(2 * met < decided for met, decided in probe.counts) for probe in probes)


def _next_ramp_level(probes: Sequence[Probe], max_level: int, at_least: int | None) -> int | None:
    """Twice the last level of the ramp, or what is asked for; None if it clearly broke an SLO, or was the highest."""
    top = min(max_level, at_least or max_level)
    ramp = [probe for probe in _valid(probes) if probe.purpose == "ramp"]
    if not ramp:
        return 1
    if any(probe.purpose == "slo" for probe in probes) or ramp[-1].clearly_missed or ramp[-1].level >= top:
        return None
    return at_least or min(2 * ramp[-1].level, top)


def _next_proof_level(
    candidates: Sequence[int],
    bracket: tuple[int | None, int | None],
    tried: Sequence[int],
    proofs: Sequence[Probe],
    estimate: float | None,
) -> int:
    """The level that is proven next: below the estimate, then above it, then between. `tried`: not decidable ones.

    bracket: a proven level, and the lowest above it that was proven to break, else one that seemed to.
    """
    low, high = bracket
    if len(proofs) >= 2 and len({probe.state for probe in proofs[-2:]}) == 1 and proofs[-1].state != "unresolved":
        top = high or 2 * candidates[-1]  # the estimate is far off
        return min(candidates, key=lambda level: abs(math.log(level**2 / (max(low or 1, 1) * top))))
    likely = max(estimate or 1.0, 1.0)
    floor, ceiling = likely, likely if likely >= candidates[-1] and high is None else likely / _BELOW
    if tried:
        floor, ceiling = max(floor, tried[-1]), min(ceiling, tried[0] / _AROUND)
    below = [level for level in candidates if level <= ceiling]
    above = [level for level in candidates if level > floor]
    if below:
        return below[-1]
    if above:
        return above[0]
    return candidates[len(candidates) // 2]


def estimate_level(probes: Sequence[Probe]) -> float | None:
    """Estimate the largest level that meets the SLOs, by the latencies at all levels; None before the first answer."""
    points: dict[int, list[tuple[float, int]]] = {}
    for probe in _valid(probes):
        if (margin := probe.margin) is not None:
            answers = max(1, sum(block.answers for block in probe.blocks))
            points.setdefault(probe.level, []).append(
                (-math.log(min(max(margin, MARGIN_LIMITS[0]), MARGIN_LIMITS[1])), answers)
            )
    return crossing_level(
        [
            LevelPoint(level, sum(x * n for x, n in pairs) / sum(n for _, n in pairs), sum(n for _, n in pairs))
            for level, pairs in points.items()
        ]
    )


def settle_seconds(probes: Sequence[Probe], max_level: int, at_least: int | None, pause_s: float) -> float | None:
    """About the seconds of the proofs that are left, by the times that the server showed; None: the answer is known.

    `pause_s`: the mean pause after an answer.
    """
    timed = [probe for probe in probes if probe.answer_s is not None]
    step = next_slo_step(probes, max_level, at_least)
    if step is None or not timed:
        return None
    level = step.level if step.purpose == "slo" else max(probe.level for probe in timed)
    round_s = _round_seconds(timed, level, pause_s)
    done = sum(probe.purpose == "slo" and probe.state != "stopped" for probe in _valid(probes))
    met, missed = _seen(probes)
    # The maximum, or one user: no level in between is left to try, only the confirmation.
    is_edge = met is None or (met == max_level and missed is None)
    remaining = 1 if at_least is not None else max(1, (2 if is_edge else TYPICAL_PROOFS) - done)
    ramp = RAMP_ROUNDS * math.log2(max(1.0, max_level / level)) if step.purpose == "ramp" else 0.0
    return round_s * (remaining * PROOF_ROUNDS + ramp)


def _round_seconds(timed: Sequence[Probe], level: int, pause_s: float) -> float:
    """About the seconds from one request of a user to the next, by the nearest of the timed levels."""
    nearest = min(timed, key=lambda probe: abs(math.log(probe.level / level)))
    return (nearest.answer_s or 0.0) * max(1.0, level / nearest.level) + pause_s


def fitting_step(probes: Sequence[Probe], step: SloStep, remaining_s: float, pause_s: float) -> SloStep:
    """The step; where its proof takes longer than what is left, that of the highest good level which fits.

    Something proven is worth more than half a proof. Where nothing fits the step stays.
    """
    timed = [probe for probe in probes if probe.answer_s is not None]

    def fits(level: int) -> bool:
        return FIT_ROUNDS * _round_seconds(timed, level, pause_s) <= remaining_s

    if step.purpose != "slo" or not timed or fits(step.level):
        return step
    asked = _valid(timed)
    proven = max((probe.level for probe in asked if probe.state == "pass"), default=0)
    good = {probe.level for probe in asked if probe.margin is not None and probe.margin <= 1}
    lower = [level for level in good if proven < level < step.level and fits(level)]
    return SloStep("slo", max(lower)) if lower else step


def can_decide(probes: Sequence[Probe], step: SloStep, remaining_s: float, pause_s: float) -> bool:
    """Whether the time that is left is enough for a proof to find at least a clear miss."""
    timed = [probe for probe in probes if probe.answer_s is not None]
    return step.purpose != "slo" or not timed or MISS_ROUNDS * _round_seconds(timed, step.level, pause_s) <= remaining_s


def slo_answer(
    probes: Sequence[Probe], max_level: int, at_least: int | None = None, *, complete: bool | None = None
) -> CapacityAnswer:
    """The largest load that meets the SLOs, after the probes so far; without an answer `unproven`, without a level.

    `complete`: None if a search decides it.
    """
    complete = next_slo_step(probes, max_level, at_least) is None if complete is None else complete
    nets = _net_passes(probes, search_levels(max_level, at_least))
    met, missed = _seen(probes)
    answer = levels_answer(nets, estimate_level(probes))
    if answer is None:
        return CapacityAnswer(kind="unproven", level=None, low=None, high=None, complete=False)
    return msgspec.structs.replace(answer, complete=complete, met=met, missed=missed)


def levels_answer(nets: Mapping[int, int], estimate: float | None) -> CapacityAnswer | None:
    """The largest level that meets the SLOs; None where nothing is known.

    `nets`: the levels that can be tried, rising, each with how often it was proven to meet the SLOs, less how often it
    was proven to break one. `estimate`: of the largest level, proven or not.
    """
    levels = list(nets)
    low, high = _bracket(nets)
    if estimate is None and low is None and high is None:
        return None
    likely = max([level for level in levels if level <= (estimate or 0)], default=0)
    likely = max(likely, low or 0) if high is None else min(max(likely, low or 0), high - 1)
    answer = partial(CapacityAnswer, complete=True, above=high)
    if low == levels[-1]:
        return answer(kind="more_than", level=low, low=low, high=None)
    if high == levels[0]:
        return answer(kind="none", level=0, low=0, high=0)
    top = None if high is None else high - 1
    if low is None:
        return answer(kind="unproven", level=likely, low=None, high=top)
    if high is not None and levels.index(high) == levels.index(low) + 1:
        return answer(kind="found", level=low, low=low, high=top)
    return answer(kind="between", level=likely, low=low, high=top)


def _seen(probes: Sequence[Probe]) -> tuple[int | None, int | None]:
    """The highest level that seems to meet the SLOs, and the lowest one above it that seems to break one."""
    margins = {probe.level: margin for probe in _valid(probes) if (margin := probe.margin) is not None}
    met = max((level for level, margin in margins.items() if margin <= 1), default=None)
    missed = min((level for level, margin in margins.items() if margin > 1 and level > (met or 0)), default=None)
    return met, missed


def with_broken(answer: CapacityAnswer, all_probes: Sequence[MeasuredProbe], slos: Sequence[Check]) -> CapacityAnswer:
    """Add the SLO that the level above the answer missed most, or why it does not count."""
    level_probes = [probe for probe in all_probes if is_valid(probe) and probe.level == (answer.above or answer.missed)]
    failed = next(
        (probe for probe in level_probes if probe.state in ("fail", "died")), level_probes[0] if level_probes else None
    )
    if failed is not None and failed.unheld is not None:
        return msgspec.structs.replace(answer, unheld=failed.unheld)
    missed = [
        ((1 - share) / (1 - slo.share), slo.text)
        for slo, share in zip(slos, failed.met if failed else (), strict=False)
        if share is not None
    ]
    return msgspec.structs.replace(answer, broken=max(missed)[1]) if missed else answer


def _valid(probes: Sequence[Probe]) -> list[Probe]:
    return [probe for probe in probes if is_valid(probe)]


def _counted(probes: Sequence[Probe]) -> list[Probe]:
    """The probes that have a result for the SLOs."""
    return [probe for probe in _valid(probes) if probe.state in ("pass", "fail", "died", "unresolved")]


def _net_passes(probes: Sequence[Probe], levels: Sequence[int]) -> dict[int, int]:
    """For each level the number of passed probes less the number of failed ones.

    A probe that could not decide takes the result of a single other one back. It also shows that the server is
    unsteady: then one failed probe is not enough, but where most requests missed. A level of which the requests at it
    and below miss an SLO has no pass: what made them miss is not the load.
    """
    signs = {"pass": 1, "fail": -1, "died": -1}
    counted = _counted(probes)
    nets = {level: sum(signs.get(probe.state, 0) for probe in counted if probe.level == level) for level in levels}
    undecided = {probe.level for probe in counted if probe.state == "unresolved"}
    for level in levels:
        tries = [probe for probe in counted if probe.level == level]
        is_doubtful = bool(undecided) and nets[level] == -1 and not _is_hopeless(tries)
        is_taken_back = level in undecided and abs(nets[level]) < 2
        if is_doubtful or is_taken_back or (nets[level] > 0 and _misses_below(probes, level)):
            nets[level] = 0
    return nets


def _misses_below(probes: Sequence[Probe], level: int) -> bool:
    """Whether all requests at a level and below it, together, miss an SLO."""
    chosen = [probe for probe in _valid(probes) if probe.level <= level]
    for slo, share in enumerate(chosen[0].shares if chosen else ()):
        met, decided = (sum(probe.counts[slo][place] for probe in chosen) for place in (0, 1))
        if met < share * decided:
            return True
    return False


def _bracket(nets: Mapping[int, int]) -> tuple[int | None, int | None]:
    """The highest passed level below all failed ones, and the lowest failed level above it, each by its net passes.

    Where results contradict each other, the boundary between the two is where most probes agree with it.
    """
    levels, values = list(nets), list(nets.values())
    boundary = max(range(len(values) + 1), key=lambda index: sum(values[:index]) - sum(values[index:]))
    passed = [level for level in levels[:boundary] if nets[level] > 0]
    failed = [level for level in levels[boundary:] if nets[level] < 0]
    return (passed[-1] if passed else None), (failed[0] if failed else None)


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
    text += ". The machine changed its speed: do not trust this answer" if drifted else ""
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

    def difference(side_values: Floats, base_values: Floats) -> Floats:
        return np.exp(-base_values) - np.exp(-side_values) if linear else side_values - base_values

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
    estimates = np.array([_last_sign_changes(axis, differences)[0], *quantiles])
    level, low, high = estimates if linear else np.exp(estimates)
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
