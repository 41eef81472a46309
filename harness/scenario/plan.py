"""From a scenario to the cells of its experiment, in the order in which they run, and to what arrives in one.

Each part of a mix (MIX.LOAD) and each stage of a load (LOAD@USERS) is a load, a cell and a row of its own. Only this
module reads these names.
"""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import msgspec

from harness.errors import Problem
from harness.scenario import Arrivals, Baseline, Load, Scenario, Stage, Warmup, wave_size


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement: a server under a load, once. Cells of one group share a load generator, or run concurrently."""

    id: str  # "r1-SERVER-LOAD"
    server: str
    load: str
    repeat: int  # from 1
    mix: str | None = None  # the mix of which its load is a part
    stage: str | None = None  # the load of which its load is a stage
    group: str = ""  # "r1/SERVER/NAME": a mix, a load with stages, or a load
    again: str | None = None  # the cell that it repeats at the end of the same server start, to show drift


def cell_of(server: str, load: str, repeat: int, name: str | None = None) -> Cell:
    """The cell of a server and a load, by default named after them."""
    mix, stage = mix_of(load), load_of_stage(load)
    group = f"r{repeat}/{server}/{mix or stage or load}"
    return Cell(name or f"r{repeat}-{server}-{load}", server, load, repeat, mix, stage, group)


def plan(scenario: Scenario) -> list[Cell]:
    """All cells, interleaved: every repeat visits every server and load, so drift affects all equally.

    Odd repeats go forward and even ones backward (A B C, C B A, ...), which cancels a linear drift.
    """
    cells = []
    for repeat in range(1, scenario.repeats + 1):
        once = [cell_of(server, load, repeat) for server in scenario.servers for load in scenario.loads]
        # The stages of a load stay in their order.
        groups = [list(group) for _, group in groupby(once, key=lambda cell: cell.group if cell.stage else cell.id)]
        cells += once if repeat % 2 else [cell for group in reversed(groups) for cell in group]
    return cells if scenario.swept is None or scenario.restart else _repeat_first_cells(cells)


def _repeat_first_cells(cells: list[Cell]) -> list[Cell]:
    """With the first cell of each server start at its end once more: of one that serves two or more, so that drift is
    seen. A part of a mix and a stage are not repeated alone.
    """
    found: list[Cell] = []
    for _, block in groupby(cells, key=server_start_of):
        start = list(block)
        first = next((cell for cell in start if cell.mix is None and cell.stage is None), None)
        found += start
        if first is not None and len(start) > 1:
            name, group = f"{first.id}_again", f"{first.group}_again"
            found.append(msgspec.structs.replace(first, id=name, group=group, again=first.id))
    return found


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
    """The mix of which a load is a part: `both` of `both.chat`."""
    mix, dot, _ = load.partition(".")
    return mix if dot else None


def load_of_part(load: str) -> str | None:
    """The name that a part of a mix has outside of it: `chat` of `both.chat`."""
    return load.partition(".")[2] or None


def load_of_stage(load: str) -> str | None:
    """The load of which a load is a stage: `people` of `people@5`."""
    whole, at, _ = load.partition("@")
    return whole if at else None


def concurrent_parts(load: str, mixes: Mapping[str, list[str]]) -> list[str]:
    """The other parts of its mix, which ran concurrently."""
    mix = mix_of(load)
    parts = [f"{mix}.{part}" for part in mixes.get(mix or "", [])]
    return [part for part in parts if part != load]


def mix_names(scenario: Scenario) -> list[str]:
    return [f"{mix}.{load}" for mix, loads in scenario.mixes.items() for load in loads]


def stage_names(name: str, stages: Sequence[Stage]) -> list[str]:
    """The names of a load's stages. A number of users that comes again is numbered: people@5, people@20, people@5-2."""
    seen: Counter[int] = Counter()
    found = []
    for stage in stages:
        seen[stage.users] += 1
        again = f"-{seen[stage.users]}" if seen[stage.users] > 1 else ""
        found.append(f"{name}@{stage.users}{again}")
    return found


def expand_mixes(scenario: Scenario) -> Scenario:
    """With each part of each mix among the loads, after those that run alone; without parts that do not decode."""
    parts = {
        f"{mix}.{load}": scenario.loads[load]
        for mix, loads in scenario.mixes.items()
        for load in loads
        if load in scenario.loads
    }
    return msgspec.structs.replace(scenario, loads={**scenario.loads, **parts}) if parts else scenario


def expand_stages(scenario: Scenario) -> Scenario:
    """With each load that has stages replaced by them, in their order."""
    loads: dict[str, Load] = {}
    for name, load in scenario.loads.items():
        if not load.stages:
            loads[name] = load
            continue
        for each, stage in zip(stage_names(name, load.stages), load.stages, strict=True):
            loads[each] = msgspec.structs.replace(load, users=stage.users, duration_s=stage.for_s)
    return msgspec.structs.replace(scenario, loads=loads)


def mix_problems(scenario: Scenario, known: Collection[str]) -> Iterator[Problem]:
    """What is wrong with the mixes, before they are expanded. `known`: names of all loads, faulty ones included."""
    for name in scenario.loads:
        if "." in name:
            yield Problem(f"$.loads.{name}", "a '.' is in the names of a mix's parts only")
    for mix, loads in scenario.mixes.items():
        if text := _mix_problem(mix, loads, scenario.loads, known):
            yield Problem(f"$.mixes.{mix}", text)
    warmup = scenario.warmup
    if scenario.mixes and warmup is not None and 0 in (warmup.requests, warmup.duration_s):
        text = "the parts of a mix begin to be measured together, when all have had their warm-up"
        yield Problem("$.warmup", f"{text}; give it a number above 0, or remove it")


def _mix_problem(mix: str, loads: list[str], right: Mapping[str, Load], known: Collection[str]) -> str | None:
    if mix in known:
        return "there is a load of that name"
    if len(loads) < 2 or len(set(loads)) != len(loads):
        return f"two or more different loads are expected, got {loads}"
    if missing := [load for load in loads if load not in known]:
        return f"{missing[0]!r} is not a load; parts are loads that are in the scenario by themselves, too"
    parts = [right[load] for load in loads if load in right]
    if any(part.stages for part in parts):
        return None  # `stage_problems` has it
    if any(part.duration_s is None for part in parts):
        return "a part has no 'duration_s'; a part that ends sooner would leave the others alone"
    if len({(part.duration_s, part.ramp_s) for part in parts}) > 1:
        return "'duration_s' and 'ramp_s' must be the same for all parts, so that all are measured at the same time"
    return None


def stage_problems(scenario: Scenario, written: Container[str]) -> Iterator[Problem]:
    """What is wrong with stages, before they are expanded. `written`: the paths of all that the file says."""
    for name in scenario.loads:
        if "@" in name:
            yield Problem(f"$.loads.{name}", "an '@' is in the names of stages only")
    for name, load in scenario.loads.items():
        if load.stages:
            yield from (problem.below(f"$.loads.{name}.") for problem in stage_problems_of_load(load))
        elif f"$.loads.{name}.stages" in written:
            yield Problem(f"$.loads.{name}.stages", "it is empty; list two or more, or remove it")
    for mix, parts in scenario.mixes.items():
        for part in parts:
            if part in scenario.loads and scenario.loads[part].stages:
                text = (
                    f"'{part}' has stages, which no load of a mix can have: a stage starts when its users have started"
                )
                yield Problem(f"$.mixes.{mix}", f"{text}, not with the other loads")


def stage_problems_of_load(load: Load) -> Iterator[Problem]:
    """What contradicts the stages of a load; paths are below the load."""
    if len(load.stages) < 2:
        text = "two or more are expected; else give 'users' and 'duration_s'"
        yield Problem("stages", text, keys=("users", "duration_s"))
    for key in ("requests", "duration_s", "arrivals", "trace"):
        if getattr(load, key) is not None:
            yield Problem(key, "does not go with 'stages'; remove it", keys=("stages",))
    if load.users != 1:
        yield Problem("users", "each of the stages has its own; remove it")


# When a server is steady: the rule of the warm-up `until: steady`, see docs/method.md. Two numbers of each answer
# count: TTFT, and the end-to-end latency per output token. Windows are consecutive answers, in the order of their ends.

WINDOWS = 3  # the last so many are compared
MIN_ANSWERS = 16  # answers in a window, of whole waves
MIN_WINDOW_PART = (
    6  # and no less than this part of all answers so far: what changes slowly needs long windows to be seen
)
MAX_STANDARD_ERRORS = 4.0  # standard errors that windows may differ by for chance


class Steadiness(NamedTuple):
    """The rule, and its bound."""

    wave: int  # answers of one full wave: a burst, or a conversation, of all users
    within: float  # how far means may differ, as a part of the smallest
    max_s: float  # after that it is over, steady or not
    max_requests: int | None = None

    @property
    def step(self) -> int:
        """Answers of the smallest window. The check repeats after so many."""
        return self.wave * math.ceil(MIN_ANSWERS / self.wave)

    @property
    def min_answers(self) -> int:
        return WINDOWS * self.step

    def window(self, seen: int) -> int:
        """Answers in each window when there have been so many."""
        return self.step * max(1, seen // (MIN_WINDOW_PART * self.step))

    def looks(self, seen: int) -> bool:
        return seen >= self.min_answers and seen % self.step == 0

    def is_steady(self, answers: Sequence[tuple[float, float]]) -> bool:
        """Whether the last windows agree. `answers`: TTFT (NaN: not known) and latency per token, the oldest first."""
        size = self.window(len(answers))
        windows = [answers[len(answers) - size * back :][:size] for back in range(WINDOWS, 0, -1)]
        return all(
            means_agree([[answer[which] for answer in window if answer[which] == answer[which]] for window in windows],
                  self.within)
            for which in (0, 1)
        )  # fmt: skip


def steadiness(load: Load, warmup: Warmup) -> Steadiness:
    return Steadiness(wave_size(load), warmup.within, warmup.max_s, warmup.max_requests)


def means_agree(windows: Sequence[Sequence[float]], within: float) -> bool:
    """Whether the means of some windows differ by no more than a part of the smallest, or than chance explains.

    Chance is the least standard error of any of them: what only some windows have, such as a kernel that is compiled,
    is no chance. Windows without values agree.
    """
    known = [window for window in windows if len(window) > 1]
    if len(known) < len(windows):
        return not any(windows)
    means = [statistics.fmean(window) for window in known]
    noise = min(statistics.stdev(window) / math.sqrt(len(window)) for window in known)
    return max(means) - min(means) <= max(within * min(means), MAX_STANDARD_ERRORS * noise)


# When requests of an open loop arrive: one seeded schedule for a whole cell, whatever the server does. It is an even or
# random process of rate 1 seen through a clock that runs as fast as the rate: the time at which the expected number of
# arrivals reaches each of its points (inversion, see Çınlar, Introduction to Stochastic Processes, 4.7). So every
# spacing works with every schedule of rates.


class Due(Protocol):
    """When each arrival of a load is due."""

    def at(self, number: int) -> float | None:
        """Seconds after the start; None when that many never come."""
        ...


class Schedule:
    """The arrivals of one cell, by their number from 0. The same for every process that asks."""

    def __init__(self, arrivals: Arrivals, seed: int) -> None:
        self._coming = arrival_times(arrivals, seed)
        self._known: list[float] = []

    def at(self, number: int) -> float | None:
        """Seconds after the start; None when that many never come."""
        missing = number + 1 - len(self._known)
        self._known += itertools.islice(self._coming, max(0, missing))
        return self._known[number] if number < len(self._known) else None


def steady_arrivals(arrivals: Arrivals) -> Arrivals:
    """Arrivals without end at the first rate above 0."""
    rate = arrivals.rate
    if arrivals.points is not None:
        rate = next((rate for _, rate in arrivals.points if rate > 0), None)
    if arrivals.wave is not None:
        rate = arrivals.wave.min or arrivals.wave.max / 2
    return Arrivals(rate=rate, spacing=arrivals.spacing, burstiness=arrivals.burstiness)


def arrival_times(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Seconds after the start at which somebody arrives, ascending; without end unless the rate stays at 0."""
    wave, points = arrivals.wave, arrivals.points or [[0.0, arrivals.rate or 0.0]]
    for expected in _unit_rate_arrivals(arrivals, seed):
        if wave is not None:
            at = _time_in_wave(expected, wave.min, wave.max, wave.period_s)
        else:
            at = _time_in_points(expected, points, arrivals.between == "ramps")
        if math.isinf(at):
            return
        yield at


def _unit_rate_arrivals(arrivals: Arrivals, seed: int) -> Iterator[float]:
    if arrivals.spacing == "even":
        yield from (float(number) for number in itertools.count())
    draw = random.Random(f"{seed}:arrivals").random  # the one method whose results Python promises to keep
    shape = 1.0 if arrivals.spacing == "poisson" else arrivals.burstiness
    total = 0.0
    while True:
        total += _gamma(draw, shape) / shape
        yield total


def _gamma(draw: Callable[[], float], shape: float) -> float:
    """A gamma variate of this shape and scale 1 (Marsaglia and Tsang 2000); shape 1 is the exponential."""
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
    for (start, rate), (end, rate_then) in itertools.pairwise(points):
        last = rate_then if ramps else rate
        length = end - start
        inside = (rate + last) / 2 * length
        if expected < inside:
            slope = (last - rate) / length
            if not expected:
                return start
            # rate * t + slope * t^2 / 2 = expected, in the form that also holds for a slope of 0
            return start + 2 * expected / (rate + math.sqrt(rate * rate + 2 * slope * expected))
        expected -= inside
    start, rate = points[-1]
    return start + expected / rate if rate > 0 else math.inf


def _time_in_wave(expected: float, minimum: float, maximum: float, period_s: float) -> float:
    """In a rate that swings from `minimum` to `maximum` and back, as a sine, each period."""
    mean, swing = (minimum + maximum) / 2, (maximum - minimum) / 2
    turns, rest = divmod(expected, mean * period_s)
    pace = 2 * math.pi / period_s
    low, high = 0.0, period_s
    for _ in range(60):
        middle = (low + high) / 2
        if mean * middle - swing / pace * math.sin(pace * middle) < rest:
            low = middle
        else:
            high = middle
    return turns * period_s + low
