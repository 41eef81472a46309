"""When requests of an open loop arrive: one seeded schedule for a whole cell, whatever the server does.

A schedule is an even or random process of rate 1 seen through a clock that runs as fast as the rate asked for: the time
at which the expected number of arrivals reaches each of its points (inversion, see Çınlar, Introduction to Stochastic
Processes, 4.7). So every spacing works with every course of the rate.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Protocol

from harness.scenario.scenario import Arrivals


class Due(Protocol):
    """When each arrival of a load is due."""

    def at(self, number: int) -> float | None:
        """Seconds after the start; None when that many never come."""
        ...


class Schedule:
    """The arrivals of one cell, by their number from 0. The same for every process that asks."""

    def __init__(self, arrivals: Arrivals, seed: int) -> None:
        self._coming = times(arrivals, seed)
        self._known: list[float] = []

    def at(self, number: int) -> float | None:
        """Seconds after the start; None when that many never come."""
        missing = number + 1 - len(self._known)
        self._known += itertools.islice(self._coming, max(0, missing))
        return self._known[number] if number < len(self._known) else None


def steady(arrivals: Arrivals) -> Arrivals:
    """Arrivals without end at the first rate above 0."""
    rate = arrivals.rate
    if arrivals.points is not None:
        rate = next((rate for _, rate in arrivals.points if rate > 0), None)
    if arrivals.wave is not None:
        rate = arrivals.wave.min or arrivals.wave.max / 2
    return Arrivals(rate=rate, spacing=arrivals.spacing, burstiness=arrivals.burstiness)


def times(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Seconds after the start at which somebody arrives, ascending; without end unless the rate stays at 0."""
    when = _inverse(arrivals)
    for expected in _unit(arrivals, seed):
        at = when(expected)
        if math.isinf(at):
            return
        yield at


def _unit(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Arrivals of rate 1."""
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


def _inverse(arrivals: Arrivals) -> Callable[[float], float]:
    """The time at which the expected number of arrivals reaches a value; infinite when it never does."""
    if arrivals.wave is not None:
        minimum, maximum, period_s = arrivals.wave.min, arrivals.wave.max, arrivals.wave.period_s
        return lambda expected: _in_wave(expected, minimum, maximum, period_s)
    points = arrivals.points or [[0.0, arrivals.rate or 0.0]]
    return lambda expected: _in_course(expected, points, arrivals.between == "ramps")


def _in_course(expected: float, points: list[list[float]], ramps: bool) -> float:
    """In a course of [second, rate]; the last rate stays."""
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


def _in_wave(expected: float, minimum: float, maximum: float, period_s: float) -> float:
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
