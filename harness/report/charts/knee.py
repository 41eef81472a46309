"""Where more concurrency stops paying."""

from collections.abc import Sequence

from msgspec import Struct

ENOUGH = 0.95  # of the best throughput

FORMULA = (
    "best = highest median throughput of the server; knee = least concurrency whose median is ≥ 95 % of best; "
    "falls = least concurrency beyond the best one whose median is < 95 % of best"
)


class Knee(Struct, frozen=True, kw_only=True):
    """The knee of one server's throughput over concurrency."""

    at: int  # the least concurrency that gives ENOUGH of the best throughput
    rate: float  # throughput there
    share: float  # of the best
    highest: int  # the highest concurrency measured
    falls_at: int | None  # where it is below ENOUGH of the best again; None: nowhere

    @property
    def open(self) -> bool:
        """Whether the highest concurrency measured is the knee, so that the true one may lie beyond."""
        return self.at == self.highest


def knee_of(points: Sequence[tuple[int, float]]) -> Knee | None:
    """The knee of (concurrency, throughput) points in any order; None for fewer than two concurrencies.

    Of several points of one concurrency the best counts.
    """
    rates: dict[int, float] = {}
    for at, rate in points:
        rates[at] = max(rate, rates.get(at, 0.0))
    if len(rates) < 2:
        return None
    best_at = max(rates, key=lambda at: (rates[at], -at))
    best = rates[best_at]
    if best <= 0:
        return None
    enough = [at for at in sorted(rates) if rates[at] >= ENOUGH * best]
    falls = [at for at in sorted(rates) if at > best_at and rates[at] < ENOUGH * best]
    return Knee(
        at=enough[0],
        rate=rates[enough[0]],
        share=rates[enough[0]] / best,
        highest=max(rates),
        falls_at=falls[0] if falls else None,
    )


def in_words(knee: Knee) -> str:
    """Such as "knee at 5 at once (141 tok/s); falls from 10 on"."""
    if knee.open:
        return f"no knee up to {knee.highest} at once: it still rises there"
    share = "the best" if knee.share == 1 else f"{100 * knee.share:.0f}\u00a0% of the best"
    text = f"knee at {knee.at} at once, {share}"
    if knee.falls_at is not None:
        return f"{text}; falls from {knee.falls_at} at once on"
    return f"{text}; more does not help"
