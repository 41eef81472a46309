"""Whether two servers take the same time to start."""

from harness.numbers.stats import Effect

ALIKE = 1.25  # a ratio of times up to this, or down to its inverse, is alike


def starts_are_alike(effect: Effect) -> bool:
    """Whether no difference of two start times is shown, and the 95 % interval of their ratio has only alike ones."""
    low, high = effect.interval()
    return 1 / ALIKE <= low <= 1 <= high <= ALIKE
