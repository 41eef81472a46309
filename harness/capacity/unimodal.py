"""A curve that rises and then falls, fitted to noisy points, and where it comes within a share of its peak.

All values are logarithms: x of the level (concurrency), y of the throughput there.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SLOPE_MAX = 1.0  # twice the users give at most twice the throughput


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
