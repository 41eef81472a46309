"""The speed of each entry of a list by starts that follow each other, with the drift of the machine between them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.numbers.stats import Effect, Estimate

MIN_FREEDOM = 3  # degrees of freedom that remain for the noise where a slope is fitted, too


class StartLevels(NamedTuple):
    """The levels of entries as logarithms, fitted by least squares to all starts, with one slope over their order.

    All starts together say how far equal starts differ, so that an entry with one start has an interval, too.
    """

    entries: list[int]  # those with a start
    logs: NDArray[np.float64]  # their levels, and the slope where one is fitted; of the middle start
    covariance: NDArray[np.float64]  # of `logs`, without the variance
    variance: float  # of the logarithm of one start
    freedom: int  # degrees of freedom of the variance; 0: not known

    def difference(self, entry: int, base: int) -> Effect | None:
        """The speed of an entry over that of another one. None: the scatter of equal starts is not known."""
        if self.freedom < 1:
            return None
        at, other = self.entries.index(entry), self.entries.index(base)
        spread = self.covariance[at, at] + self.covariance[other, other] - 2 * self.covariance[at, other]
        error = math.sqrt(max(0.0, self.variance * float(spread)))
        return Effect(float(self.logs[at] - self.logs[other]), error, self.freedom)

    def level(self, entry: int) -> Estimate:
        """The speed of an entry at the middle of the search, with its 95 % interval."""
        at = self.entries.index(entry)
        value = math.exp(float(self.logs[at]))
        if self.freedom < 1:
            return Estimate(value, None, None)
        error = math.sqrt(max(0.0, self.variance * float(self.covariance[at, at])))
        return Estimate(value, *Effect(float(self.logs[at]), error, self.freedom).interval())


def fit_levels(starts: Sequence[tuple[int, float]]) -> StartLevels:
    """Fit the levels of entries to starts in their order, each an entry and its speed. Raises ValueError for none.

    The slope is left out where fewer than MIN_FREEDOM degrees of freedom would remain, or where the order says nothing.
    """
    if not starts:
        raise ValueError("no start has a result")
    entries = sorted({entry for entry, _ in starts})
    column = {entry: place for place, entry in enumerate(entries)}
    count = len(starts)
    logs: NDArray[np.float64] = np.log(np.array([speed for _, speed in starts], dtype=np.float64))
    design = np.zeros((count, len(entries)))
    design[np.arange(count), [column[entry] for entry, _ in starts]] = 1.0
    if count - len(entries) - 1 >= MIN_FREEDOM:
        order = (np.arange(count) - (count - 1) / 2) / count
        sloped = np.column_stack([design, order])
        if np.linalg.matrix_rank(sloped) == sloped.shape[1]:
            design = sloped
    covariance = np.asarray(np.linalg.inv(design.T @ design), dtype=np.float64)
    fitted: NDArray[np.float64] = covariance @ (design.T @ logs)
    residuals = logs - design @ fitted
    freedom = count - design.shape[1]
    # Equal values have no scatter: the last bits of a least-squares fit are rounding.
    squares = float(residuals @ residuals)
    variance = squares / freedom if freedom and squares > 1e-20 * count else 0.0
    return StartLevels(entries, fitted, covariance, variance, freedom)
