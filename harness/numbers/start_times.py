"""Whether two servers take the same time to start."""

from harness.numbers.stats import Effect

ALIKE = 1.25  # a ratio of times up to this, or down to its inverse, is alike


def starts_are_alike(effect: Effect) -> bool:
    """Whether the 95 % interval of the ratio of two start times has no ratio that is not alike."""
    low, high = effect.interval()
    return low >= 1 / ALIKE and high <= ALIKE
