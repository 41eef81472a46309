"""A curve that rises and then falls: the fit, where it first reaches a share of its peak, and the interval of that.

All values are logarithms: x of levels, y of throughputs. Segment i is between points i - 1 and i.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.numbers.comparison import ALPHA

MIN_KNEE_LEVELS = 3  # that show a knee: of two it is only known which one is better
KNEE_SHARE = 0.9  # the knee is the smallest level with this share of the peak; less than it beyond the peak hurts
SLOPE_MAX = 1.0  # twice the users give at most twice the throughput

Array = NDArray[np.float64]


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


def bias_corrected_interval(values: Array, estimate: float) -> tuple[float, float, float]:
    """Low end, middle and high end of the 95 % interval of a value that is `estimate` without noise.

    The bootstrap is bias-corrected (Efron 1981), because the highest of several noisy values is too high.
    """
    less = float(np.mean(values < estimate) + np.mean(values == estimate) / 2)
    normal = NormalDist()
    shift, width = 2 * normal.inv_cdf(min(max(less, 0.2), 0.8)), normal.inv_cdf(1 - ALPHA / 2)
    low, middle, high = np.quantile(values, [normal.cdf(z) for z in (shift - width, shift, shift + width)])
    return float(low), float(middle), float(high)
