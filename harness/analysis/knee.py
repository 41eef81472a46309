"""The search for the knee of throughput over concurrency: where more users stop paying, and where they hurt.

It has no clock and no I/O. The caller measures the level that `next_level` returns, adds blocks to its `probe` until it
is done, and passes it to `take`. docs/capacity.md has the rule.
"""

import math
from itertools import pairwise
from statistics import NormalDist
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.analysis.stats import t_quantile
from harness.base.summary import ALPHA

KNEE_SHARE = 0.9  # the knee is the smallest level with this share of the peak; less than it beyond the peak hurts
GRID_STEP = 2**0.25  # closer levels are not distinguished
MAX_WIDTH = 1.5  # of the knee's interval at the end of the search, in steps of the grid
MAX_GAIN = 0.05  # two doublings with smaller gains end the ladder
LADDER_PRECISION = 0.03  # half the relative width of the 95 % interval that ends a probe of the ladder
FINE_PRECISION = 0.015  # the same for a level between two rungs
MIN_PRECISION = 0.004  # the narrowest one of any probe
MIN_BLOCKS, MAX_BLOCKS = 8, 60  # of a probe
CONFIRM_BLOCKS = 3 * MIN_BLOCKS  # of a peak right before a fall
MAX_PROBES = 24
_MIN_ERROR = 0.001  # relative: the effect of one engine step on a block
_SEARCH_DRAWS, _DRAWS = 200, 1000
SLOPE_MAX = 1.0  # twice the users give at most twice the throughput

Array = NDArray[np.float64]
KneeKind = Literal["knee", "none", "unclear"]
KneeState = Literal["open", "done"]


class KneeBlock(msgspec.Struct, frozen=True):
    """A period at one level, longer than several answers, with the output tokens of all users in it."""

    seconds: float
    output_tokens: float


class KneePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of one level. `low` and `high`: the 95 % interval of the throughput."""

    level: int
    seconds: float
    blocks: int
    tok_s: float
    low: float
    high: float
    steady: bool  # False: the throughput still changed when the probe reached its limit of blocks


class KneeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The knee with its 95 % interval.

    kind: "knee"; "none": throughput rises up to the maximum level; "unclear": both are possible, or the search was
    stopped early. `level`, `low` and `high` are None where there is no such level in range: "none" has none of them,
    "unclear" has only `low`. Throughputs are output tokens per second.
    `hurts_from`: the smallest measured level beyond the peak that is clearly below KNEE_SHARE of it, or at which the
    server failed; None: no such level.
    """

    kind: KneeKind
    level: int | None
    low: int | None
    high: int | None
    peak_level: int
    peak_tok_s: float
    peak_low: float
    peak_high: float
    hurts_from: int | None
    complete: bool = True  # False: the search was stopped early
    points: list[KneePoint]


class Throughput(NamedTuple):
    """Output tokens per second, with the relative standard error and its degrees of freedom."""

    tok_s: float
    error: float
    freedom: int

    @property
    def half_width(self) -> float:
        """Half the relative width of the 95 % interval."""
        return t_quantile(1 - ALPHA / 2, self.freedom) * self.error


def estimate_throughput(blocks: list[KneeBlock]) -> Throughput:
    """Return the throughput over all blocks, at least two, with its batch-means error: 8 to 15 batches of neighbouring
    blocks, because neighbouring blocks depend on each other.
    """
    batches = len(blocks) // max(1, len(blocks) // MIN_BLOCKS)
    starts = [len(blocks) * i // batches for i in range(batches)]
    seconds = np.add.reduceat([block.seconds for block in blocks], starts)
    tokens = np.add.reduceat([block.output_tokens for block in blocks], starts)
    rate = float(tokens.sum() / seconds.sum())
    if rate == 0:
        return Throughput(0.0, 0.0, batches - 1)
    spread = float(np.sum((tokens - rate * seconds) ** 2)) * batches / (batches - 1)
    return Throughput(rate, max(math.sqrt(spread) / float(tokens.sum()), _MIN_ERROR), batches - 1)


class KneeProbe:
    """The measurement at one level: open until its throughput is precise and steady, or at its limit of blocks."""

    def __init__(
        self, level: int, precision: float, max_blocks: int, earlier: list[KneeBlock], best: float = 0.0
    ) -> None:
        """`best`: the highest throughput so far; a level that is clearly below it needs no precision."""
        self.level = level
        self.best = best
        self.precision = precision
        self.max_blocks = max_blocks
        self.earlier = earlier  # blocks of earlier probes of the level; they count towards the precision
        self.blocks: list[KneeBlock] = []
        self.seconds = 0.0
        self.steady = True
        self.state: KneeState = "open"
        self._measured = 0

    def add(self, block: KneeBlock) -> KneeState:
        """Add a block. Return the state."""
        self.blocks.append(block)
        self.seconds += block.seconds
        self._measured += 1
        enough = len(self.blocks) >= MIN_BLOCKS
        if enough:
            self.steady = not self._has_trend()
            if self.steady and self._is_precise():
                self.state = "done"
            elif not self.steady and self._measured < self.max_blocks:
                del self.blocks[: len(self.blocks) // 2]  # the throughput was not yet steady
        if enough and self._measured >= self.max_blocks:
            self.state = "done"
        return self.state

    def _is_precise(self) -> bool:
        throughput = estimate_throughput(self.earlier + self.blocks)
        is_clearly_low = throughput.tok_s * (1 + 2 * throughput.half_width) < KNEE_SHARE * self.best
        return throughput.half_width <= self.precision or is_clearly_low

    def _has_trend(self) -> bool:
        """Whether the throughput has a trend that is significant and larger than the precision."""
        rates = np.array([block.output_tokens / block.seconds for block in self.blocks])
        count, mean = len(rates), float(rates.mean())
        times = np.arange(count) - (count - 1) / 2
        slope = float(times @ rates / (times @ times))
        error = math.sqrt(float(np.sum((rates - mean - slope * times) ** 2)) / (count - 2) / float(times @ times))
        is_significant = abs(slope) > t_quantile(0.999, count - 2) * error
        return is_significant and abs(slope) * count > self.precision * mean


# A curve that rises and then falls is fitted to the measured points. All values are logarithms: x of levels, y of
# throughputs. Segment i is between points i - 1 and i.


class Crossing(NamedTuple):
    """The point where a curve first reaches the share of its peak, and the peak."""

    x: float
    peak: float
    segment: int  # of the crossing; 0: at or before the first point
    peak_segment: int  # in which the curve may be higher than at all points; 0: nowhere
    rise: float  # how much higher it may be there


def fit_unimodal(y: Array, weights: Array) -> Array:
    """Return the least-squares fit to `y` that rises, then falls: isotonic on either side of the best split."""
    from scipy.optimize import isotonic_regression

    best, best_cost = y, math.inf
    for split in range(1, len(y) + 1):
        fit = isotonic_regression(y[:split], weights=weights[:split]).x
        if split < len(y):
            fit = np.concatenate([fit, isotonic_regression(y[split:], weights=weights[split:], increasing=False).x])
        cost = float(weights @ (fit - y) ** 2)
        if cost < best_cost - 1e-12:
            best, best_cost = fit, cost
    return best


def find_share_crossing(x: Array, fit: Array, log_share: float, positions: tuple[float, float]) -> Crossing:
    """Return where `fit` first reaches its peak plus `log_share`.

    Between two points the curve is unknown. It is between their chord (0) and the highest concave continuation of the
    segments next to it (1). `positions` are such values for the crossing and for the peak.
    """
    top = int(np.argmax(fit))
    last_top = int(np.flatnonzero(fit == fit[top])[-1])
    rises = [
        (_possible_rise(x, fit, segment, cliff=segment > last_top), segment)
        for segment in (top, last_top + 1)
        if 0 < segment < len(x)
    ]
    rise, peak_segment = max(rises, default=(0.0, 0))
    peak = float(fit[top]) + max(0.0, positions[1] * rise)
    goal = peak + log_share
    reached = np.flatnonzero(fit >= goal)
    if not len(reached):  # the peak between two points is much higher than both of them
        slope = max(_slope(x, fit, peak_segment - 1), 1e-9)
        at = float(x[peak_segment - 1] + (goal - fit[peak_segment - 1]) / slope)
        return Crossing(min(at, float(x[peak_segment])), peak, peak_segment, peak_segment, rise)
    if rise <= 0:
        peak_segment = 0
    segment = int(reached[0])
    if segment == 0:
        return Crossing(float(x[0]), peak, 0, peak_segment, rise)
    on_chord = x[segment - 1] + (goal - fit[segment - 1]) / _slope(x, fit, segment)
    earliest = x[segment - 1] + (goal - fit[segment - 1]) / max(_slope(x, fit, segment - 1), 1e-9)
    slope_after = _slope(x, fit, segment + 1) if segment + 1 < len(x) else 0.0
    if slope_after > 0:
        earliest = max(earliest, x[segment] - (fit[segment] - goal) / slope_after)
    at = on_chord + positions[0] * (min(earliest, on_chord) - on_chord)
    at = min(max(at, x[segment - 1]), x[segment])
    return Crossing(float(at), peak, segment, peak_segment, rise)


def _slope(x: Array, fit: Array, segment: int) -> float:
    """The slope of a segment; before the first point the highest possible slope."""
    if segment <= 0:
        return SLOPE_MAX
    return min(float((fit[segment] - fit[segment - 1]) / (x[segment] - x[segment - 1])), SLOPE_MAX)


def _possible_rise(x: Array, fit: Array, segment: int, *, cliff: bool) -> float:
    """How far the curve may rise above both ends of a segment: with the slope before it, until it falls with the slope
    after it. `cliff`: it may also fall at once, right before the second end.
    """
    left, right = float(x[segment - 1]), float(x[segment])
    slope_before = _slope(x, fit, segment - 1)
    if slope_before <= 0:
        return 0.0
    at = right
    if segment + 1 < len(x) and not cliff:
        slope_after = _slope(x, fit, segment + 1)
        if slope_before <= slope_after:
            return 0.0
        at = (fit[segment] - fit[segment - 1] + slope_before * left - slope_after * right) / (
            slope_before - slope_after
        )
    top = fit[segment - 1] + slope_before * (min(max(at, left), right) - left)
    return max(0.0, float(top - max(fit[segment - 1], fit[segment])))


class _Draws(NamedTuple):
    """The bootstrap: one row for each draw of a curve."""

    levels: list[int]
    random: Array  # draws x (the noise of each level; then the positions of the knee and the peak between two points)
    knees: Array  # logarithm of the level
    peaks: Array  # logarithm of the throughput
    hurting: Array  # for each level the share of draws in which it is beyond the peak with less than KNEE_SHARE of it
    middle: Crossing  # without noise, half way between the extremes


class KneeSearch:
    """A ladder of doublings to two rungs beyond the knee, then the probes that narrow the knee's interval most."""

    def __init__(self, max_level: int, *, seed: int = 0) -> None:
        self.max_level = max_level
        self.taken: list[KneeProbe] = []
        self._phase: Literal["ladder", "narrow", "done"] = "ladder"
        self._next, self._precision = 1, LADDER_PRECISION
        self._seed = seed
        self._failed: int | None = None
        self._blocks: dict[int, list[KneeBlock]] = {}

    def next_level(self) -> int | None:
        """The level to measure next; None at the end of the search."""
        return None if self._phase == "done" else self._next

    def probe(self, level: int) -> KneeProbe:
        """An empty probe of the level, with the precision that the search needs there."""
        earlier = self._blocks.get(level, [])
        best = 0.0
        if not earlier:
            best = max((estimate_throughput(blocks).tok_s for blocks in self._blocks.values()), default=0.0)
        return KneeProbe(level, self._precision, MAX_BLOCKS, earlier, best)

    def take(self, level: int, probe: KneeProbe) -> None:
        """Use a probe, and choose the next level. A probe with fewer than two blocks does not count."""
        if len(probe.blocks) < 2:
            return
        self.taken.append(probe)
        self._blocks[level] = self._blocks.get(level, []) + probe.blocks
        self._plan()

    def fail(self, level: int) -> None:
        """The server failed at this level: no level as high is measured again."""
        self._failed = min(level, self._failed or level)
        if self._phase == "ladder" and self._blocks:
            self._plan()
        else:
            self._phase = "done"

    @property
    def measured(self) -> bool:
        """Whether any level had a throughput, so that there is an answer."""
        return any(block.output_tokens for blocks in self._blocks.values() for block in blocks)

    def answer(self) -> KneeAnswer:
        """The answer after the probes so far. Requires that something was `measured`."""
        draws = self._draw_curves(_DRAWS)
        low, middle, high = _bias_corrected_interval(draws.knees, draws.middle.x)
        peak_low, peak, peak_high = map(math.exp, _bias_corrected_interval(draws.peaks, draws.middle.peak))
        outside = float(np.mean(draws.knees > self._max_knee()))
        kind: KneeKind = "unclear"
        if outside <= ALPHA / 2:
            kind = "knee"
        elif outside >= 0.5 and max(self._blocks) >= self.max_level:
            kind = "none"
        hurts = [level for level, share in zip(draws.levels, draws.hurting, strict=True) if share > 1 - ALPHA / 2]
        return KneeAnswer(
            kind=kind,
            level=_level_from_log(middle) if kind == "knee" else None,
            low=None if kind == "none" else _level_from_log(low),
            high=_level_from_log(high) if kind == "knee" else None,
            peak_level=self._peak_level(),
            peak_tok_s=peak,
            peak_low=peak_low,
            peak_high=peak_high,
            hurts_from=min(hurts, default=self._failed),
            complete=self._phase == "done",
            points=[self._make_point(level) for level in sorted(self._blocks)],
        )

    def _plan(self) -> None:
        """Choose the next level and the precision that it needs."""
        if self._phase == "ladder" and not self._is_ladder_done():
            self._next = min(max(self._blocks) * 2, self.max_level)
            return
        self._phase = "narrow"
        measurement = self._next_measurement() if len(self.taken) < MAX_PROBES else None
        if measurement is None:
            self._phase = "done"
        else:
            self._next, self._precision = measurement

    def _max_knee(self) -> float:
        """The logarithm of the highest level that can be a knee: half the highest measured level."""
        return math.log(max(self._blocks) / 2) + 1e-9

    def _is_ladder_done(self) -> bool:
        """Whether two rungs gained at most MAX_GAIN each, or the ladder is at the maximum level."""
        levels = sorted(self._blocks)
        if self._failed is not None or levels[-1] >= self.max_level:
            return True
        rates = [estimate_throughput(self._blocks[level]) for level in levels[-3:]]
        if len(rates) < 3:
            return False
        return all(
            after.tok_s == 0
            or math.log(after.tok_s / before.tok_s) + 1.96 * math.hypot(before.error, after.error) < MAX_GAIN
            for before, after in pairwise(rates)
        )

    def _draw_curves(self, count: int) -> _Draws:
        levels = sorted(self._blocks)
        rates = [estimate_throughput(self._blocks[level]) for level in levels]
        floor = max(rate.tok_s for rate in rates) * 1e-3  # for a level without throughput, which has no logarithm
        x, y = np.log(np.array(levels, float)), np.log([max(rate.tok_s, floor) for rate in rates])
        errors = np.array([rate.error if rate.tok_s else 1.0 for rate in rates])
        generator = np.random.default_rng(self._seed)
        noise = generator.standard_t([rate.freedom for rate in rates], (count, len(rates)))
        random = np.concatenate([noise, generator.uniform(0, 1, (count, 2))], 1)
        random[:, -1] **= 2  # the peak is seldom right before a fall
        share, weights = math.log(KNEE_SHARE), errors**-2
        knees, peaks, hurting = np.empty(count), np.empty(count), np.zeros(len(levels))
        for row, values in enumerate(random):
            fit = fit_unimodal(y + errors * values[:-2], weights)
            crossing = find_share_crossing(x, fit, share, (values[-2], values[-1]))
            knees[row], peaks[row] = crossing.x, crossing.peak
            hurting += (fit < crossing.peak + share) & (np.arange(len(fit)) > int(np.argmax(fit)))
        middle = find_share_crossing(x, fit_unimodal(y, weights), share, (0.5, 0.5))
        return _Draws(levels, random, knees, peaks, hurting / count, middle)

    def _next_measurement(self) -> tuple[int, float] | None:
        """The level and precision of the probe that narrows the knee's interval most; None: it is narrow enough."""
        draws = self._draw_curves(_SEARCH_DRAWS)
        levels, middle = draws.levels, draws.middle
        low, _, high = _bias_corrected_interval(draws.knees, middle.x)
        if low > self._max_knee():
            return None
        near_peak = _level_between(levels, middle.peak_segment)
        if near_peak is not None and middle.rise > MAX_GAIN:
            return near_peak, FINE_PRECISION
        if self._is_peak_unconfirmed(levels):
            return self._peak_level(), FINE_PRECISION
        if high <= self._max_knee() and _is_narrow(low, high):
            return None
        if float(draws.knees.std()) == 0:
            return None
        # Reduce the source of uncertainty that the drawn knees depend on most: the noise of a level, or a position.
        influence = [abs(float(np.corrcoef(column, draws.knees)[0, 1])) for column in draws.random.T]
        for source in np.argsort(influence)[::-1]:
            if source < len(levels):
                half_width = estimate_throughput(self._blocks[levels[source]]).half_width
                if half_width > MIN_PRECISION:
                    return levels[source], max(half_width / 1.6, MIN_PRECISION)
                continue
            between = _level_between(levels, middle.segment if source == len(levels) else middle.peak_segment)
            if between is not None:
                return between, FINE_PRECISION
        return None

    def _peak_level(self) -> int:
        return max(self._blocks, key=lambda level: estimate_throughput(self._blocks[level]).tok_s)

    def _is_peak_unconfirmed(self, levels: list[int]) -> bool:
        """Whether the peak is right before a fall and was measured briefly.

        What makes the throughput fall is rare there, so a short probe may miss it.
        """
        peak = self._peak_level()
        after = next((level for level in levels if level > peak), None)
        if after is None or len(self._blocks[peak]) >= CONFIRM_BLOCKS:
            return False
        return estimate_throughput(self._blocks[after]).tok_s < 0.95 * estimate_throughput(self._blocks[peak]).tok_s

    def _make_point(self, level: int) -> KneePoint:
        throughput = estimate_throughput(self._blocks[level])
        probes = [probe for probe in self.taken if probe.level == level]
        return KneePoint(
            level=level,
            seconds=sum(probe.seconds for probe in probes),
            blocks=len(self._blocks[level]),
            tok_s=throughput.tok_s,
            low=throughput.tok_s * (1 - throughput.half_width),
            high=throughput.tok_s * (1 + throughput.half_width),
            steady=all(probe.steady for probe in probes),
        )


def _bias_corrected_interval(values: Array, estimate: float) -> tuple[float, float, float]:
    """Low end, middle and high end of the 95 % interval of a value that is `estimate` without noise.

    The bootstrap is bias-corrected (Efron 1981), because the highest of several noisy values is too high.
    """
    less = float(np.mean(values < estimate) + np.mean(values == estimate) / 2)
    normal = NormalDist()
    shift, width = 2 * normal.inv_cdf(min(max(less, 0.2), 0.8)), normal.inv_cdf(1 - ALPHA / 2)
    low, middle, high = np.quantile(values, [normal.cdf(z) for z in (shift - width, shift, shift + width)])
    return float(low), float(middle), float(high)


def _level_from_log(x: float) -> int:
    """The smallest level whose logarithm is at least `x`."""
    return max(1, math.ceil(math.exp(x) - 1e-6))


def _is_narrow(low: float, high: float) -> bool:
    return high - low <= MAX_WIDTH * math.log(GRID_STEP) or _level_from_log(high) == _level_from_log(low)


def _level_between(levels: list[int], segment: int) -> int | None:
    """The level in the middle of a segment, on a logarithmic scale; None if it has no level inside."""
    if segment == 0 or levels[segment] - levels[segment - 1] < 2:
        return None
    low, high = levels[segment - 1], levels[segment]
    return min(max(round(math.sqrt(low * high)), low + 1), high - 1)
