"""The search for the knee of throughput over concurrency: where more users stop paying, and where they hurt.

Functions of the probes so far. docs/capacity.md has the rule.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from harness.numbers.block_statistics import MIN_BATCHES, batched_rate, fit_trend
from harness.numbers.comparison import ALPHA
from harness.numbers.peak_curve import (
    KNEE_SHARE,
    MIN_KNEE_LEVELS,
    Crossing,
    bias_corrected_interval,
    find_share_crossing,
    fit_unimodal,
)
from harness.numbers.stats import t_quantile
from harness.questions.capacity.blocks import ProbeBlock
from harness.questions.capacity.level import Probe, ProbeState
from harness.questions.capacity.record import AnswerKind, CapacityAnswer, KneePoint

GRID_STEP = 2**0.25  # closer levels are not distinguished
MAX_WIDTH = 1.5  # of the knee's interval at the end of the search, in steps of the grid
MAX_GAIN = 0.05  # two doublings with smaller gains end the ladder
LADDER_PRECISION = 0.03  # half the relative width of the 95 % interval that ends a probe of the ladder
FINE_PRECISION = 0.015  # the same for a level between two rungs
MIN_PRECISION = 0.004  # the narrowest one of any probe
MIN_KNEE_BLOCKS = MIN_BATCHES  # of a probe: its error is from so many batches
MAX_KNEE_BLOCKS = 60  # of a probe: a server that is not steady after so many is measured as it is
CONFIRM_BLOCKS = 3 * MIN_KNEE_BLOCKS  # of a peak right before a fall: what makes the throughput fall is rare there
UNSTEADY_ALPHA = 0.002  # of the test for a trend, which comes again with each block
MAX_PROBES = 24
_MIN_ERROR = 0.001  # relative: the effect of one engine step on a block
_SEARCH_DRAWS, _DRAWS = 200, 1000

Array = NDArray[np.float64]
Blocks = dict[int, list[ProbeBlock]]  # by level


def estimate_throughput(blocks: Sequence[ProbeBlock], level: int = 0, *, steady: bool = True) -> KneePoint:
    """Return the throughput over all blocks, at least two, with its error by batch means."""
    estimate = batched_rate([block.output_tokens for block in blocks], [block.seconds for block in blocks])
    rate, error = estimate.rate, max(estimate.error, _MIN_ERROR) if estimate.rate else 0.0
    half_width = t_quantile(1 - ALPHA / 2, estimate.freedom) * error
    return KneePoint(
        level=level,
        seconds=sum(block.seconds for block in blocks),
        blocks=len(blocks),
        tok_s=rate,
        low=rate * (1 - half_width),
        high=rate * (1 + half_width),
        steady=steady,
        error=error,
        freedom=estimate.freedom,
    )


def decide_throughput(
    probe: Probe, *, precision: float = LADDER_PRECISION, earlier: Sequence[ProbeBlock] = (), best: float = 0.0
) -> ProbeState:
    """Whether the throughput of a probe is precise and steady, or it is at its limit of blocks.

    `earlier`: blocks of earlier probes of the level; they count towards the precision. `best`: the highest throughput
    so far; a level that is clearly below it needs no precision.
    """
    blocks, measured = probe.steady_blocks, len(probe.blocks)
    if len(blocks) < MIN_KNEE_BLOCKS:
        return "open"
    probe.steady = not _has_trend(blocks, precision)
    if probe.steady:
        throughput = estimate_throughput([*earlier, *blocks])
        is_clearly_low = throughput.tok_s * (1 + 2 * throughput.half_width) < KNEE_SHARE * best
        if throughput.half_width <= precision or is_clearly_low:
            return "done"
    elif measured < MAX_KNEE_BLOCKS:
        probe.settled += len(blocks) // 2  # the throughput was not yet steady
    return "done" if measured >= MAX_KNEE_BLOCKS else "open"


def _has_trend(blocks: Sequence[ProbeBlock], precision: float) -> bool:
    """Whether the throughput has a trend that is significant and larger than the precision."""
    rates = np.array([block.output_tokens / block.seconds for block in blocks])
    fit = fit_trend(np.arange(len(rates), dtype=np.float64), rates)
    return fit.is_significant(UNSTEADY_ALPHA) and abs(fit.value) * len(rates) > precision * float(rates.mean())


# The search: a ladder of doublings to two rungs beyond the knee, then the probes that narrow the knee's interval most.


def next_knee_level(probes: Sequence[Probe], max_level: int, seed: int = 0) -> tuple[int, float] | None:
    """The level to measure next, and half the relative width that its interval needs; None at the end of the search.

    `probes`: all so far. No level as high as one at which the server died is measured again.
    """
    measured = _measured(probes)
    deaths = [number for number, probe in enumerate(probes) if probe.purpose == "knee" and probe.state == "died"]
    ladder = _measured(probes[: deaths[0]]) if deaths else measured
    has_climbed = any(_is_ladder_done(ladder[:number], max_level) for number in range(1, len(ladder) + 1))
    if not deaths and not has_climbed:
        return min(max(probe.level for probe in measured) * 2, max_level) if measured else 1, LADDER_PRECISION
    if not measured or len(deaths) > (not has_climbed) or len(measured) >= MAX_PROBES:
        return None
    return _next_narrowing(measured, seed)


def make_knee_probe(level: int, precision: float, probes: Sequence[Probe], **more: Any) -> Probe:
    """An empty probe of the level. `probes`: all so far. `more`: other arguments of Probe."""
    blocks = _blocks_by_level(_measured(probes))
    earlier, best = blocks.get(level, []), 0.0
    if not earlier:
        best = max((estimate_throughput(level_blocks).tok_s for level_blocks in blocks.values()), default=0.0)
    decide = partial(decide_throughput, precision=precision, earlier=earlier, best=best)
    return Probe(level, decide=decide, purpose="knee", **more)


def knee_answer(probes: Sequence[Probe], max_level: int, seed: int = 0) -> CapacityAnswer | None:
    """The knee after the probes so far; None if no level had a throughput."""
    measured = _measured(probes)
    points = _points(measured)
    if not any(point.tok_s for point in points):
        return None
    _, knees, peaks, hurting, middle = _draw_curves(points, _DRAWS, seed)
    low, knee, high = bias_corrected_interval(knees, middle.x)
    peak_low, peak, peak_high = map(math.exp, bias_corrected_interval(peaks, middle.peak))
    outside = float(np.mean(knees > _max_knee(points)))
    kind: AnswerKind = "unclear"
    if len(points) < MIN_KNEE_LEVELS:
        pass
    elif outside <= ALPHA / 2:
        kind = "knee"
    elif outside >= 0.5 and points[-1].level >= max_level:
        kind = "none"
    hurts = [point.level for point, share in zip(points, hurting, strict=True) if share > 1 - ALPHA / 2]
    return CapacityAnswer(
        kind=kind,
        level=_level_from_log(knee) if kind == "knee" else None,
        low=None if kind == "none" else _level_from_log(low),
        high=_level_from_log(high) if kind == "knee" else None,
        complete=next_knee_level(probes, max_level, seed) is None,
        peak_level=_peak(points).level,
        peak_tok_s=peak,
        peak_low=peak_low,
        peak_high=peak_high,
        hurts_from=min(hurts, default=_died_at(probes)),
        points=points,
    )


def _measured(probes: Sequence[Probe]) -> list[Probe]:
    """The probes with a throughput; it needs two blocks."""
    return [
        probe
        for probe in probes
        if probe.purpose == "knee"
        and probe.state not in ("died", "stopped", "invalid")
        and len(probe.steady_blocks) >= 2
    ]


def _died_at(probes: Sequence[Probe]) -> int | None:
    return min((probe.level for probe in probes if probe.purpose == "knee" and probe.state == "died"), default=None)


def _blocks_by_level(measured: Sequence[Probe]) -> Blocks:
    blocks: Blocks = {}
    for probe in measured:
        blocks[probe.level] = [*blocks.get(probe.level, []), *probe.steady_blocks]
    return blocks


def _points(measured: Sequence[Probe]) -> list[KneePoint]:
    """The throughput of each level, in rising order."""
    points = []
    for level, blocks in sorted(_blocks_by_level(measured).items()):
        ofs = [probe for probe in measured if probe.level == level]
        point = estimate_throughput(blocks, level, steady=all(probe.steady for probe in ofs))
        points.append(replace(point, seconds=sum(probe.seconds for probe in ofs)))
    return points


def _peak(points: Sequence[KneePoint]) -> KneePoint:
    return max(points, key=lambda point: point.tok_s)


def _max_knee(points: Sequence[KneePoint]) -> float:
    """The logarithm of the highest level that can be a knee: half the highest measured level."""
    return math.log(points[-1].level / 2) + 1e-9


def _is_ladder_done(measured: Sequence[Probe], max_level: int) -> bool:
    """Whether two rungs gained at most MAX_GAIN each, or the ladder is at the maximum level."""
    points = _points(measured)
    if points[-1].level >= max_level:
        return True
    return len(points) >= 3 and all(
        after.tok_s == 0
        or math.log(after.tok_s / before.tok_s) + 1.96 * math.hypot(before.error, after.error) < MAX_GAIN
        for before, after in pairwise(points[-3:])
    )


def _draw_curves(points: Sequence[KneePoint], count: int, seed: int) -> tuple[Array, Array, Array, Array, Crossing]:
    """The bootstrap of the curve: its random numbers, and the knees and peaks that follow (logarithms); for each level
    the share of draws in which it is beyond the peak with less than KNEE_SHARE of it; and the middle.

    There is a row of random numbers for each draw: the noise of each level, then the positions of the knee and the peak
    between two points. The middle is without noise, half way between the extremes.
    """
    floor = _peak(points).tok_s * 1e-3  # for a level without throughput, which has no logarithm
    x = np.log(np.array([point.level for point in points], float))
    y = np.log([max(point.tok_s, floor) for point in points])
    errors = np.array([point.error if point.tok_s else 1.0 for point in points])
    generator = np.random.default_rng(seed)
    noise = generator.standard_t([point.freedom for point in points], (count, len(points)))
    random = np.concatenate([noise, generator.uniform(0, 1, (count, 2))], 1)
    random[:, -1] **= 2  # the peak is seldom right before a fall
    share, weights = math.log(KNEE_SHARE), errors**-2
    knees, peaks, hurting = np.empty(count), np.empty(count), np.zeros(len(points))
    for row, values in enumerate(random):
        fit = fit_unimodal(y + errors * values[:-2], weights)
        crossing = find_share_crossing(x, fit, share, (values[-2], values[-1]))
        knees[row], peaks[row] = crossing.x, crossing.peak
        hurting += (fit < crossing.peak + share) & (np.arange(len(fit)) > int(np.argmax(fit)))
    middle = find_share_crossing(x, fit_unimodal(y, weights), share, (0.5, 0.5))
    return random, knees, peaks, hurting / count, middle


def _next_narrowing(measured: Sequence[Probe], seed: int) -> tuple[int, float] | None:
    """The level and precision of the probe that narrows the knee's interval most; None: it is narrow enough."""
    points = _points(measured)
    random, knees, _, _, middle = _draw_curves(points, _SEARCH_DRAWS, seed)
    low, _, high = bias_corrected_interval(knees, middle.x)
    if low > _max_knee(points):
        return None
    near_peak = _level_between(points, middle.peak_segment)
    if near_peak is not None and middle.rise > MAX_GAIN:
        return near_peak, FINE_PRECISION
    if _is_peak_unconfirmed(points):
        return _peak(points).level, FINE_PRECISION
    if (high <= _max_knee(points) and _is_narrow(low, high)) or float(knees.std()) == 0:
        return None
    # Reduce the source of uncertainty that the drawn knees depend on most: the noise of a level, or a position.
    influence = [abs(float(np.corrcoef(column, knees)[0, 1])) for column in random.T]
    for source in np.argsort(influence)[::-1]:
        if source < len(points):
            half_width = points[source].half_width
            if half_width > MIN_PRECISION:
                return points[source].level, max(half_width / 1.6, MIN_PRECISION)
            continue
        between = _level_between(points, middle.segment if source == len(points) else middle.peak_segment)
        if between is not None:
            return between, FINE_PRECISION
    return None


def _is_peak_unconfirmed(points: Sequence[KneePoint]) -> bool:
    """Whether the peak is right before a fall and was measured briefly.

    What makes the throughput fall is rare there, so a short probe may miss it.
    """
    peak = _peak(points)
    after = next((point for point in points if point.level > peak.level), None)
    return after is not None and peak.blocks < CONFIRM_BLOCKS and after.tok_s < 0.95 * peak.tok_s


def _level_from_log(x: float) -> int:
    """The smallest level whose logarithm is at least `x`."""
    return max(1, math.ceil(math.exp(x) - 1e-6))


def _is_narrow(low: float, high: float) -> bool:
    return high - low <= MAX_WIDTH * math.log(GRID_STEP) or _level_from_log(high) == _level_from_log(low)


def _level_between(points: Sequence[KneePoint], segment: int) -> int | None:
    """The level in the middle of a segment, on a logarithmic scale; None if it has no level inside."""
    low, high = points[segment - 1].level, points[segment].level
    if segment == 0 or high - low < 2:
        return None
    return min(max(round(math.sqrt(low * high)), low + 1), high - 1)
