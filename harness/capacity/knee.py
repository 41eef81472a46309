"""Where more concurrency stops paying, and where it hurts: the search for the knee of throughput over concurrency.

Pure: no clock, no I/O. The caller measures the level that `next_level` names, gives blocks of time to its `probe` until
that is done, and hands it to `take`; the rule is in docs/capacity.md.
"""

import math
from statistics import NormalDist
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.judge.stats import t_quantile
from harness.summary import ALPHA

KNEE_SHARE = 0.9  # the knee is the smallest level with this share of the peak; below it, beyond the peak, it hurts
GRID_STEP = 2**0.25  # levels closer than this are not told apart
MAX_WIDTH = 1.5  # of the interval of the knee, in steps of the grid: the search ends
MAX_GAIN = 0.05  # two doublings that gain less end the ladder
LADDER_PRECISION = 0.03  # half of the 95 % interval, relative, that ends a probe of the ladder
FINE_PRECISION = 0.015  # the same for a level between two rungs
MIN_PRECISION = 0.004  # no probe asks for a narrower one
MIN_BLOCKS, MAX_BLOCKS = 8, 60  # of a probe
CONFIRM_BLOCKS = 3 * MIN_BLOCKS  # of a peak at the edge of a fall
MAX_PROBES = 24
DRIFT_LIMIT = 0.02  # smaller drift of the machine is not reported
_MIN_ERROR = 0.001  # relative: what a step of the engine more or less makes of a block
_WORK_DRAWS, _DRAWS = 200, 1000
SLOPE_MAX = 1.0  # twice the users give at most twice the throughput

Array = NDArray[np.float64]


KneeKind = Literal["knee", "none", "unclear"]
KneeState = Literal["open", "done"]


class KneeBlock(msgspec.Struct, frozen=True):
    """A part of the time at one level, longer than several answers: its seconds and the output tokens of all users."""

    seconds: float
    output_tokens: float


class KneePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at one level. `low` and `high`: the 95 % interval of the throughput."""

    level: int
    seconds: float
    blocks: int
    tok_s: float
    low: float
    high: float
    steady: bool  # False: the throughput still changed when the probe reached its cap


class KneeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The knee with its 95 % interval.

    kind: "knee"; "none", throughput still rises up to the maximum; "unclear", the evidence leaves both open, or the
    search stopped early. `level`, `low` and `high` are None where there is no such level in range: "none" has none of
    them, "unclear" has only `low`. Throughputs are output tokens per second.
    `hurts_from`: the smallest measured level beyond the peak that is clearly below KNEE_SHARE of it, or at which the
    server failed; None: not seen.
    `drift`: the throughput of an early level measured again at the end, relative to the first time; None: not measured.
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
    drift: float | None
    drifted: bool
    complete: bool = True  # False: the search was stopped early
    points: list[KneePoint]


class Throughput(NamedTuple):
    """Output tokens per second, the relative standard error of it, and the degrees of freedom of that."""

    tok_s: float
    error: float
    freedom: int

    @property
    def half(self) -> float:
        """Half of the 95 % interval, relative."""
        return t_quantile(1 - ALPHA / 2, self.freedom) * self.error


def throughput_of(blocks: list[KneeBlock]) -> Throughput:
    """Return the throughput over all blocks with its batch-means error: 8 to 15 batches of neighbouring blocks, so that
    what one block hands to the next counts. Two blocks at least."""
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
    """The measurement at one level: open until its throughput is precise enough and steady, or at its cap."""

    def __init__(
        self, level: int, precision: float, max_blocks: int, earlier: list[KneeBlock], best: float = 0.0
    ) -> None:
        """`best`: the highest throughput so far; a level that is clearly below it needs no precision."""
        self.level = level
        self.best = best
        self.precision = precision
        self.max_blocks = max_blocks
        self.earlier = earlier  # of the same level: they count towards the precision
        self.blocks: list[KneeBlock] = []
        self.seconds = 0.0
        self.steady = True
        self.state: KneeState = "open"
        self._measured = 0

    def add(self, block: KneeBlock) -> KneeState:
        """Count one more block of time; returns the state."""
        self.blocks.append(block)
        self.seconds += block.seconds
        self._measured += 1
        enough = len(self.blocks) >= MIN_BLOCKS
        if enough:
            self.steady = not self._changes()
            if self.steady and self._precise():
                self.state = "done"
            elif not self.steady and self._measured < self.max_blocks:
                del self.blocks[: len(self.blocks) // 2]  # it still settled then
        if enough and self._measured >= self.max_blocks:
            self.state = "done"
        return self.state

    def _precise(self) -> bool:
        seen = throughput_of(self.earlier + self.blocks)
        return seen.half <= self.precision or seen.tok_s * (1 + 2 * seen.half) < KNEE_SHARE * self.best

    def _changes(self) -> bool:
        """Whether the throughput has a trend beyond chance that makes a noticeable difference."""
        rates = np.array([block.output_tokens / block.seconds for block in self.blocks])
        count, mean = len(rates), float(rates.mean())
        at = np.arange(count) - (count - 1) / 2
        slope = float(at @ rates / (at @ at))
        error = math.sqrt(float(np.sum((rates - mean - slope * at) ** 2)) / (count - 2) / float(at @ at))
        chance = t_quantile(0.999, count - 2) * error
        return abs(slope) > chance and abs(slope) * count > self.precision * mean


# A curve that rises and then falls, fitted to noisy points, and where it comes within a share of its peak. All values
# are logarithms: x of the level, y of the throughput there.


class Crossing(NamedTuple):
    """Where a curve reaches its share of the peak, and the peak."""

    x: float
    peak: float
    segment: int  # the crossing is between points `segment - 1` and `segment`; 0: at or before the first point
    peak_segment: int  # the peak may be higher between points `peak_segment - 1` and `peak_segment`; 0: nowhere
    room: float  # by so much


def unimodal(y: Array, weights: Array) -> Array:
    """Return the least-squares fit to `y` that rises, then falls: isotonic on either side of the best split."""
    from scipy.optimize import isotonic_regression

    best, cost = y, math.inf
    for split in range(1, len(y) + 1):
        up = isotonic_regression(y[:split], weights=weights[:split]).x
        fit = up
        if split < len(y):
            fit = np.concatenate([up, isotonic_regression(y[split:], weights=weights[split:], increasing=False).x])
        seen = float(weights @ (fit - y) ** 2)
        if seen < cost - 1e-12:
            best, cost = fit, seen
    return best


def crossing(x: Array, fit: Array, log_share: float, between: tuple[float, float]) -> Crossing:
    """Return where `fit` first reaches its peak plus `log_share`.

    Between two points the curve is somewhere from their chord (0) to the highest concave continuation of the segments
    next to it (1): `between` says where, for the crossing and for the peak.
    """
    top = int(np.argmax(fit))
    last = int(np.flatnonzero(fit == fit[top])[-1])
    rooms = [
        (_room(x, fit, segment, cliff=segment > last), segment) for segment in (top, last + 1) if 0 < segment < len(x)
    ]
    room, peak_segment = max(rooms, default=(0.0, 0))
    peak = float(fit[top]) + max(0.0, between[1] * room)
    goal = peak + log_share
    reached = np.flatnonzero(fit >= goal)
    if not len(reached):  # the peak between two points is so much higher than both
        slope = max(_slope(x, fit, peak_segment - 1), 1e-9)
        at = float(x[peak_segment - 1] + (goal - fit[peak_segment - 1]) / slope)
        return Crossing(min(at, float(x[peak_segment])), peak, peak_segment, peak_segment, room)
    segment = int(reached[0])
    if segment == 0:
        return Crossing(float(x[0]), peak, 0, peak_segment if room > 0 else 0, room)
    chord = x[segment - 1] + (goal - fit[segment - 1]) / _slope(x, fit, segment)
    early = x[segment - 1] + (goal - fit[segment - 1]) / max(_slope(x, fit, segment - 1), 1e-9)
    after = _slope(x, fit, segment + 1) if segment + 1 < len(x) else 0.0
    if after > 0:
        early = max(early, x[segment] - (fit[segment] - goal) / after)
    at = chord + between[0] * (min(early, chord) - chord)
    at = min(max(at, x[segment - 1]), x[segment])
    return Crossing(float(at), peak, segment, peak_segment if room > 0 else 0, room)


def _slope(x: Array, fit: Array, segment: int) -> float:
    """Slope of the segment that ends at point `segment`; before the first one the highest possible."""
    if segment <= 0:
        return SLOPE_MAX
    return min(float((fit[segment] - fit[segment - 1]) / (x[segment] - x[segment - 1])), SLOPE_MAX)


def _room(x: Array, fit: Array, segment: int, *, cliff: bool) -> float:
    """How far the curve between two points may rise above both: as it rose before, until it falls as it does after.

    `cliff`: it may also fall all at once, right before the second point.
    """
    left, right = float(x[segment - 1]), float(x[segment])
    up = _slope(x, fit, segment - 1)
    if up <= 0:
        return 0.0
    at = right
    if segment + 1 < len(x) and not cliff:
        down = _slope(x, fit, segment + 1)
        if up <= down:
            return 0.0
        at = (fit[segment] - fit[segment - 1] + up * left - down * right) / (up - down)
    top = fit[segment - 1] + up * (min(max(at, left), right) - left)
    return max(0.0, float(top - max(fit[segment - 1], fit[segment])))


class _Draws(NamedTuple):
    """The bootstrap: curves that the measurements leave possible, one a row."""

    levels: list[int]
    chance: Array  # draws x (one per level: its noise; then where the knee and the peak are between two points)
    knees: Array  # logarithm of the level
    peaks: Array  # logarithm of the throughput
    below: Array  # share of the draws in which a level beyond the peak has less than KNEE_SHARE of it
    middle: Crossing  # without noise, half way between the extremes


class KneeSearch:
    """A ladder of doublings up to two rungs beyond the knee, then what narrows the interval of the knee most."""

    def __init__(self, max_level: int, *, between_probes: float = 0.0, seed: int = 0) -> None:
        """`between_probes`: relative standard deviation of the throughput between probes of one level, which no blocks
        within a probe can show."""
        self.max_level = max_level
        self.between_probes = between_probes
        self.taken: list[KneeProbe] = []
        self.repeated: KneeProbe | None = None  # the early level, measured again at the end
        self._phase: Literal["ladder", "narrow", "repeat", "done"] = "ladder"
        self._next, self._precision = 1, LADDER_PRECISION
        self._seed = seed
        self._failed: int | None = None
        self._blocks: dict[int, list[KneeBlock]] = {}

    def next_level(self) -> int | None:
        """The level to measure now; None: there is nothing more to find out."""
        return None if self._phase == "done" else self._next

    def probe(self, level: int) -> KneeProbe:
        """An empty probe of the level, with the precision that the search needs there."""
        earlier = [] if self._phase == "repeat" else self._blocks.get(level, [])
        best = 0.0 if earlier else max((throughput_of(one).tok_s for one in self._blocks.values()), default=0.0)
        return KneeProbe(level, self._precision, MAX_BLOCKS, earlier, best)

    def take(self, level: int, probe: KneeProbe) -> None:
        """Count a probe, and choose the next level. One that was stopped before its second block counts for nothing."""
        if len(probe.blocks) < 2:
            return
        if self._phase == "repeat":
            self.repeated, self._phase = probe, "done"
            return
        self.taken.append(probe)
        self._blocks[level] = self._blocks.get(level, []) + probe.blocks
        self._plan()

    def fail(self, level: int) -> None:
        """The server failed at this level: nothing as high is measured any more."""
        self._failed = min(level, self._failed or level)
        if self._phase == "ladder" and self._blocks:
            self._plan()
        else:
            self._phase = "done"

    @property
    def measured(self) -> bool:
        """Whether any level had any throughput, so that there is an answer."""
        return any(block.output_tokens for blocks in self._blocks.values() for block in blocks)

    def answer(self) -> KneeAnswer:
        """What is known now. Raises ValueError where nothing was `measured`."""
        if not self.measured:
            raise ValueError("no knee without any throughput")
        rates = {level: throughput_of(blocks) for level, blocks in self._blocks.items()}
        drawn = self._draws(_DRAWS)
        low, middle, high = _corrected(drawn.knees, drawn.middle.x)
        peak_low, peak, peak_high = map(math.exp, _corrected(drawn.peaks, drawn.middle.peak))
        outside = float(np.mean(drawn.knees > self._limit()))
        kind: KneeKind = "unclear"
        if outside <= ALPHA / 2:
            kind = "knee"
        elif outside >= 0.5 and max(rates) >= self.max_level:
            kind = "none"
        hurts = [level for level, share in zip(drawn.levels, drawn.below, strict=True) if share > 1 - ALPHA / 2]
        drift = self._drift()
        return KneeAnswer(
            kind=kind,
            level=_level(middle) if kind == "knee" else None,
            low=None if kind == "none" else _level(low),
            high=_level(high) if kind == "knee" else None,
            peak_level=self._peak_level(),
            peak_tok_s=peak,
            peak_low=peak_low,
            peak_high=peak_high,
            hurts_from=min(hurts, default=self._failed),
            drift=None if drift is None else drift[0],
            drifted=drift is not None and drift[1],
            complete=self._phase in ("repeat", "done"),
            points=[self._point(level) for level in sorted(self._blocks)],
        )

    def _plan(self) -> None:
        """Choose the next level and the precision that it needs."""
        if self._phase == "ladder" and not self._beyond():
            self._next = min(max(self._blocks) * 2, self.max_level)
            return
        self._phase = "narrow"
        wanted = self._wanted() if len(self.taken) < MAX_PROBES else None
        if wanted is None:
            self._phase = "repeat"
            wanted = self.taken[len(self._blocks) // 3].level, LADDER_PRECISION
        self._next, self._precision = wanted

    def _limit(self) -> float:
        """The logarithm of the highest level that can be a knee: twice as much was measured."""
        return math.log(max(self._blocks) / 2) + 1e-9

    def _beyond(self) -> bool:
        """Whether the ladder is at its end: two rungs with no more than MAX_GAIN each, or the maximum."""
        levels = sorted(self._blocks)
        if self._failed is not None or levels[-1] >= self.max_level:
            return True
        rates = [throughput_of(self._blocks[level]) for level in levels[-3:]]
        if len(rates) < 3:
            return False
        return all(
            after.tok_s == 0
            or math.log(after.tok_s / before.tok_s) + 1.96 * math.hypot(before.error, after.error) < MAX_GAIN
            for before, after in zip(rates, rates[1:], strict=False)
        )

    def _draws(self, number: int) -> _Draws:
        levels = sorted(self._blocks)
        rates = [throughput_of(self._blocks[level]) for level in levels]
        floor = max(rate.tok_s for rate in rates) * 1e-3  # a server that answers nothing, on a scale of logarithms
        x, y = np.log(np.array(levels, float)), np.log([max(rate.tok_s, floor) for rate in rates])
        probes = [sum(one.level == level for one in self.taken) for level in levels]
        errors = np.array([rate.error if rate.tok_s else 1.0 for rate in rates])
        errors = np.hypot(errors, self.between_probes / np.sqrt(probes))
        dice = np.random.default_rng(self._seed)
        chance = np.concatenate(
            [dice.standard_t([rate.freedom for rate in rates], (number, len(rates))), dice.uniform(0, 1, (number, 2))],
            1,
        )
        chance[:, -1] **= 2  # the peak is seldom right before a fall
        share, weights = math.log(KNEE_SHARE), errors**-2
        knees, peaks, below = np.empty(number), np.empty(number), np.zeros(len(levels))
        for row, chances in enumerate(chance):
            fit = unimodal(y + errors * chances[:-2], weights)
            found = crossing(x, fit, share, (chances[-2], chances[-1]))
            knees[row], peaks[row] = found.x, found.peak
            below += (fit < found.peak + share) & (np.arange(len(fit)) > int(np.argmax(fit)))
        middle = crossing(x, unimodal(y, weights), share, (0.5, 0.5))
        return _Draws(levels, chance, knees, peaks, below / number, middle)

    def _wanted(self) -> tuple[int, float] | None:
        """The level, and the precision there, that narrows the interval most; None: it is narrow enough."""
        drawn = self._draws(_WORK_DRAWS)
        low, _, high = _corrected(drawn.knees, drawn.middle.x)
        if low > self._limit():
            return None
        inside = _between(drawn.levels, drawn.middle.peak_segment)
        if inside is not None and drawn.middle.room > MAX_GAIN:
            return inside, FINE_PRECISION
        if self._unconfirmed(drawn.levels):
            return self._peak_level(), FINE_PRECISION
        if high <= self._limit() and _narrow(low, high):
            return None
        spread = float(drawn.knees.std())
        if spread == 0:
            return None
        influence = [abs(float(np.corrcoef(column, drawn.knees)[0, 1])) for column in drawn.chance.T]
        for source in np.argsort(influence)[::-1]:
            if source < len(drawn.levels):
                level = drawn.levels[source]
                half = throughput_of(self._blocks[level]).half
                if half > MIN_PRECISION:
                    return level, max(half / 1.6, MIN_PRECISION)
                continue
            segment = drawn.middle.segment if source == len(drawn.levels) else drawn.middle.peak_segment
            between = _between(drawn.levels, segment)
            if between is not None:
                return between, FINE_PRECISION
        return None

    def _peak_level(self) -> int:
        return max(self._blocks, key=lambda level: throughput_of(self._blocks[level]).tok_s)

    def _unconfirmed(self, levels: list[int]) -> bool:
        """Whether the peak is at the edge of a fall and was measured briefly: there, what makes the throughput fall is
        rare, and a short probe easily misses it."""
        peak = self._peak_level()
        after = next((level for level in levels if level > peak), None)
        if after is None or len(self._blocks[peak]) >= CONFIRM_BLOCKS:
            return False
        return throughput_of(self._blocks[after]).tok_s < 0.95 * throughput_of(self._blocks[peak]).tok_s

    def _drift(self) -> tuple[float, bool] | None:
        if self.repeated is None:
            return None
        first = next(one for one in self.taken if one.level == self.repeated.level)
        before, after = throughput_of(first.blocks), throughput_of(self.repeated.blocks)
        if not before.tok_s or not after.tok_s:
            return None
        change = math.log(after.tok_s / before.tok_s)
        error = math.hypot(before.half, after.half)
        return after.tok_s / before.tok_s, abs(change) > max(DRIFT_LIMIT, error)

    def _point(self, level: int) -> KneePoint:
        seen = throughput_of(self._blocks[level])
        probes = [one for one in self.taken if one.level == level]
        return KneePoint(
            level=level,
            seconds=sum(one.seconds for one in probes),
            blocks=len(self._blocks[level]),
            tok_s=seen.tok_s,
            low=seen.tok_s * (1 - seen.half),
            high=seen.tok_s * (1 + seen.half),
            steady=all(one.steady for one in probes),
        )


def _corrected(values: Array, at: float) -> tuple[float, float, float]:
    """Low end, middle and high end of the 95 % interval of what is `at` without noise: the bias-corrected bootstrap
    (Efron 1981), because the highest of several noisy values is too high."""
    less = float(np.mean(values < at) + np.mean(values == at) / 2)
    normal = NormalDist()
    shift, width = 2 * normal.inv_cdf(min(max(less, 0.2), 0.8)), normal.inv_cdf(1 - ALPHA / 2)
    low, middle, high = np.quantile(values, [normal.cdf(z) for z in (shift - width, shift, shift + width)])
    return float(low), float(middle), float(high)


def _level(x: float) -> int:
    """The smallest level that is not below a logarithm."""
    return max(1, math.ceil(math.exp(x) - 1e-6))


def _narrow(low: float, high: float) -> bool:
    return high - low <= MAX_WIDTH * math.log(GRID_STEP) or _level(high) == _level(low)


def _between(levels: list[int], segment: int) -> int | None:
    """A level in the middle, on the scale of logarithms, of two measured ones; None: there is none."""
    if segment == 0 or levels[segment] - levels[segment - 1] < 2:
        return None
    low, high = levels[segment - 1], levels[segment]
    return min(max(round(math.sqrt(low * high)), low + 1), high - 1)
