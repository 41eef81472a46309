"""The cells of a scenario in their order, the rule for a steady server, and the arrival times of an open loop.

Each part of a mix (MIX.LOAD) and each stage of a load (LOAD@USERS) is a load, a cell and a row of its own. Only this
module reads these names.
"""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import replace

from harness.base.errors import Problem
from harness.scenario import Arrivals, Baseline, Load, Scenario, Stage, Warmup, wave_size


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement of a server under a load. Cells of one group share a load generator, or run concurrently."""

    id: str  # "r1-SERVER-LOAD"
    server: str
    load: str
    repeat: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    mix: str | None = None  # the mix, where the load is a part of one
    stage: str | None = None  # the load with stages, where this load is a stage of one
    group: str = ""  # "r1/SERVER/NAME"; NAME: a mix, a load with stages, or a load
    again: str | None = None  # the cell that this one repeats at the end of the same server start, to show drift


def cell_of(server: str, load: str, repeat: int, name: str | None = None) -> Cell:
    """Return the cell of a server and a load. `name`: its id; None: made of all three."""
    mix, stage = mix_of(load), load_of_stage(load)
    group = f"r{repeat}/{server}/{mix or stage or load}"
    return Cell(name or f"r{repeat}-{server}-{load}", server, load, repeat, mix, stage, group)


def plan(scenario: Scenario) -> list[Cell]:
    """Return all cells, interleaved: every repeat visits every server and load, so drift affects all equally.

    Odd repeats go forward and even ones backward (A B C, C B A, ...), which cancels a linear drift. Servers that use
    what an earlier one has compiled stay in their order.
    """
    cells = []
    is_ordered = any(server.caches is not None for server in scenario.servers.values())
    for repeat in range(1, scenario.repeats + 1):
        forward = [cell_of(server, load, repeat) for server in scenario.servers for load in scenario.loads]
        # The stages of a load stay in their order.
        groups = grouped(forward, lambda cell: cell.group if cell.stage else cell.id)
        cells += forward if repeat % 2 or is_ordered else [cell for group in reversed(groups) for cell in group]
    has_drift_cells = scenario.swept is not None and scenario.drift_cells and not scenario.restart
    return _repeat_first_cells(cells) if has_drift_cells else cells


def grouped(cells: Iterable[Cell], key: Callable[[Cell], object]) -> list[list[Cell]]:
    """Return lists of consecutive cells with the same key."""
    return [list(group) for _, group in itertools.groupby(cells, key=key)]


def _repeat_first_cells(cells: list[Cell]) -> list[Cell]:
    """Repeat the first cell of each server start with several cells at its end, to show drift.

    A part of a mix or a stage is not repeated alone.
    """
    repeated: list[Cell] = []
    for start in grouped(cells, server_start_of):
        first = next((cell for cell in start if cell.mix is None and cell.stage is None), None)
        repeated += start
        if first is not None and len(start) > 1:
            name, group_name = f"{first.id}_again", f"{first.group}_again"
            repeated.append(replace(first, id=name, group=group_name, again=first.id))
    return repeated


def server_start_of(cell: Cell) -> tuple[int, str]:
    return cell.repeat, cell.server


def count_server_starts(scenario: Scenario) -> int:
    cells = plan(scenario)
    return len({cell.group for cell in cells} if scenario.restart else {server_start_of(cell) for cell in cells})


def baseline_of(scenario: Scenario) -> Baseline:
    if scenario.baseline is not None:
        return scenario.baseline
    return Baseline(server=next(iter(scenario.servers)), load=next(iter(scenario.loads)))


def mix_of(load: str) -> str | None:
    """Return the mix of a part: `both` for `both.chat`; None for another load."""
    mix, dot, _ = load.partition(".")
    return mix if dot else None


def load_of_part(load: str) -> str | None:
    """Return the load of a part of a mix: `chat` for `both.chat`; None for another load."""
    return load.partition(".")[2] or None


def load_of_stage(load: str) -> str | None:
    """Return the load of a stage: `people` for `people@5`; None for another load."""
    name, at_sign, _ = load.partition("@")
    return name if at_sign else None


def load_in_file(load: str) -> str:
    """Return a load as a scenario file calls it: that of a part or of a stage, or itself."""
    return load_of_part(load) or load_of_stage(load) or load


def concurrent_parts(load: str, mixes: Mapping[str, list[str]]) -> list[str]:
    """Return the other parts of a part's mix."""
    mix = mix_of(load)
    parts = [f"{mix}.{part}" for part in mixes.get(mix or "", [])]
    return [part for part in parts if part != load]


def stage_names(name: str, stages: Sequence[Stage]) -> list[str]:
    """Return the names of a load's stages. A repeated number of users is numbered: people@5, people@20, people@5-2."""
    seen: Counter[int] = Counter()
    names = []
    for stage in stages:
        seen[stage.users] += 1
        suffix = f"-{seen[stage.users]}" if seen[stage.users] > 1 else ""
        names.append(f"{name}@{stage.users}{suffix}")
    return names


def expand_mixes(scenario: Scenario) -> Scenario:
    """Add each part of each mix to the loads, after the loads that run alone. Parts that do not decode are left out."""
    parts = {
        f"{mix}.{load}": scenario.loads[load]
        for mix, loads in scenario.mixes.items()
        for load in loads
        if load in scenario.loads
    }
    return replace(scenario, loads={**scenario.loads, **parts})


def expand_stages(scenario: Scenario) -> Scenario:
    """Replace each load that has stages by them, in their order."""
    loads: dict[str, Load] = {}
    for name, load in scenario.loads.items():
        if not load.stages:
            loads[name] = load
        for stage_name, stage in zip(stage_names(name, load.stages), load.stages, strict=True):
            loads[stage_name] = replace(load, users=stage.users, duration_s=stage.for_s)
    return replace(scenario, loads=loads)


def mix_problems(scenario: Scenario, names: Collection[str]) -> Iterator[Problem]:
    """Check the mixes before they are expanded, and the names of loads. `names`: all of them, faulty ones included."""
    for name in scenario.loads:
        if "." in name:
            yield Problem(f"$.loads.{name}", "a '.' is in the names of a mix's parts only")
        if "@" in name:
            yield Problem(f"$.loads.{name}", "an '@' is in the names of stages only")
    for mix, loads in scenario.mixes.items():
        if text := _mix_problem(mix, loads, scenario.loads, names):
            yield Problem(f"$.mixes.{mix}", text)


def _mix_problem(mix: str, loads: list[str], decoded: Mapping[str, Load], names: Collection[str]) -> str | None:
    if mix in set(names):
        return "there is a load of that name"
    if len(loads) < 2 or len(set(loads)) != len(loads):
        return f"two or more different loads are expected, got {loads}"
    if missing := [load for load in loads if load not in names]:
        return f"{missing[0]!r} is not a load; parts are loads that are in the scenario by themselves, too"
    parts = [decoded[load] for load in loads if load in decoded]
    if any(part.stages or part.duration_s is None for part in parts):
        return "each part needs a 'duration_s', and cannot have stages: all parts are measured at the same time"
    if len({(part.duration_s, part.ramp_s) for part in parts}) > 1:
        return "'duration_s' and 'ramp_s' must be the same for all parts, so that all are measured at the same time"
    return None


# When a server is steady: the rule of the warm-up `until: steady`, see docs/method.md. It uses two numbers of each
# answer: TTFT, and the end-to-end latency per output token. Windows are consecutive answers, in the order of their end.

WINDOWS = 3  # the last windows are compared
MIN_ANSWERS = 16  # of a window, which has whole waves
MAX_WINDOWS = 6  # into which all answers so far may be divided: a slow change shows only in long windows
MAX_STANDARD_ERRORS = 4.0  # by which windows may differ by chance


class Steadiness(NamedTuple):
    """The rule for a load, and its limits."""

    wave: int  # requests of one wave, see `wave_size`
    within: float  # how far means may differ, as a share of the smallest
    max_s: float  # the warm-up ends after this time, steady or not
    max_requests: int | None = None

    @property
    def step(self) -> int:
        """Answers of the smallest window, and from one check to the next."""
        return self.wave * math.ceil(MIN_ANSWERS / self.wave)

    @property
    def min_answers(self) -> int:
        return WINDOWS * self.step

    def window(self, answer_count: int) -> int:
        """Return the answers of each window after this many answers."""
        return self.step * max(1, answer_count // (MAX_WINDOWS * self.step))

    def is_check_due(self, answer_count: int) -> bool:
        return answer_count >= self.min_answers and answer_count % self.step == 0

    def is_steady(self, answers: Sequence[tuple[float, float]]) -> bool:
        """Return whether the last windows agree. `answers`: TTFT (NaN: unknown) and latency per token, oldest first."""
        size = self.window(len(answers))
        windows = [answers[len(answers) - size * back :][:size] for back in range(WINDOWS, 0, -1)]
        return all(
            means_agree([[pair[i] for pair in window if not math.isnan(pair[i])] for window in windows], self.within)
            for i in (0, 1)
        )


def steadiness(load: Load, warmup: Warmup) -> Steadiness:
    return Steadiness(wave_size(load), warmup.within, warmup.max_s, warmup.max_requests)


def means_agree(windows: Sequence[Sequence[float]], within: float) -> bool:
    """Return whether the means of windows differ by at most a share of the smallest, or by no more than chance.

    Chance is measured by the smallest standard error: an event in some windows only, such as the compilation of a
    kernel, is not chance. Windows without values agree.
    """
    usable = [window for window in windows if len(window) > 1]
    if len(usable) < len(windows):
        return not any(windows)
    means = [statistics.fmean(window) for window in usable]
    noise = min(statistics.stdev(window) / math.sqrt(len(window)) for window in usable)
    return max(means) - min(means) <= max(within * min(means), MAX_STANDARD_ERRORS * noise)


# When requests of an open loop arrive: one seeded schedule for a whole cell. An even or random process of rate 1 gives
# points; an arrival is the time at which the expected number of arrivals reaches the next point (inversion, see Çınlar,
# Introduction to Stochastic Processes, 4.7). So every spacing works with every schedule of rates.


class Schedule:
    """The arrivals of one cell, by their number from 0; the same in every process."""

    def __init__(self, arrivals: Arrivals, seed: int) -> None:
        self._times = arrival_times(arrivals, seed)
        self._drawn_s: list[float] = []

    def at(self, number: int) -> float | None:
        """Return the seconds from the start to an arrival; None: it never comes."""
        self._drawn_s += itertools.islice(self._times, max(0, number + 1 - len(self._drawn_s)))
        return self._drawn_s[number] if number < len(self._drawn_s) else None


def steady_arrivals(arrivals: Arrivals) -> Arrivals:
    """Return endless arrivals at the first rate above 0."""
    rate = arrivals.rate
    if arrivals.points is not None:
        rate = next((rate for _, rate in arrivals.points if rate > 0), None)
    if arrivals.wave is not None:
        rate = arrivals.wave.min or arrivals.wave.max / 2
    return Arrivals(rate=rate, spacing=arrivals.spacing, burstiness=arrivals.burstiness)


def arrival_times(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Yield the arrival times in seconds after the start, ascending; endless unless the rate stays at 0."""
    wave, points = arrivals.wave, arrivals.points or [[0.0, arrivals.rate or 0.0]]
    for expected in _unit_rate_arrivals(arrivals, seed):
        if wave is not None:
            at_s = _time_in_wave(expected, wave.min, wave.max, wave.period_s)
        else:
            at_s = _time_in_points(expected, points, arrivals.between == "ramps")
        if math.isinf(at_s):
            return
        yield at_s


def _unit_rate_arrivals(arrivals: Arrivals, seed: int) -> Iterator[float]:
    if arrivals.spacing == "even":
        yield from map(float, itertools.count())
    draw = random.Random(f"{seed}:arrivals").random  # the one method whose results Python promises to keep
    shape = 1.0 if arrivals.spacing == "poisson" else arrivals.burstiness
    total = 0.0
    while True:
        total += _gamma(draw, shape) / shape
        yield total


def _gamma(draw: Callable[[], float], shape: float) -> float:
    """Draw a gamma variate of this shape and scale 1 (Marsaglia and Tsang 2000); shape 1 is the exponential."""
    if shape == 1.0:
        return -math.log(1.0 - draw())
    if shape < 1.0:
        return float(_gamma(draw, shape + 1.0) * (1.0 - draw()) ** (1.0 / shape))
    d = shape - 1 / 3
    while True:
        x = math.sqrt(-2 * math.log(1.0 - draw())) * math.cos(2 * math.pi * draw())
        v = (1 + x / math.sqrt(9 * d)) ** 3
        if v > 0 and math.log(1.0 - draw()) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v


def _time_in_points(expected: float, points: list[list[float]], ramps: bool) -> float:
    """Return the seconds until `expected` arrivals are expected, by [second, rate] points; infinite: never."""
    for (start_s, rate), (end_s, next_rate) in itertools.pairwise(points):
        end_rate = next_rate if ramps else rate
        arrivals = (rate + end_rate) / 2 * (end_s - start_s)
        if expected < arrivals:
            slope = (end_rate - rate) / (end_s - start_s)
            if not expected:
                return start_s
            # rate * t + slope * t^2 / 2 = expected, in the form that also holds for a slope of 0
            return start_s + 2 * expected / (rate + math.sqrt(rate * rate + 2 * slope * expected))
        expected -= arrivals
    start_s, rate = points[-1]
    return start_s + expected / rate if rate > 0 else math.inf


def _time_in_wave(expected: float, min_rate: float, max_rate: float, period_s: float) -> float:
    """Return the seconds until `expected` arrivals are expected, at a rate that follows a sine from its minimum."""
    mean, amplitude = (min_rate + max_rate) / 2, (max_rate - min_rate) / 2
    periods, remaining = divmod(expected, mean * period_s)
    angular = 2 * math.pi / period_s
    low, high = 0.0, period_s
    for _ in range(60):  # bisection
        middle = (low + high) / 2
        if mean * middle - amplitude / angular * math.sin(angular * middle) < remaining:
            low = middle
        else:
            high = middle
    return periods * period_s + low
