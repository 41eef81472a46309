"""A histogram whose buckets are 2 % wide: a percentile is at most 1 % off, and those of many processes add up."""

import math

RESOLUTION = 0.01
_WIDTH = math.log(1.0 + 2 * RESOLUTION)
_LEAST_S = 1e-6

Histogram = dict[int, int]  # count by bucket; bucket b is from 1.02^b to 1.02^(b+1) seconds


def note(histogram: Histogram, value_s: float) -> None:
    bucket = math.floor(math.log(max(value_s, _LEAST_S)) / _WIDTH)
    histogram[bucket] = histogram.get(bucket, 0) + 1


def add(to: Histogram, other: Histogram) -> None:
    for bucket, count in other.items():
        to[bucket] = to.get(bucket, 0) + count


def percentiles(histogram: Histogram, shares: tuple[float, ...]) -> list[float | None]:
    """The middles of the buckets that hold the ceil(share * n)-th of n values, for ascending shares; None without any.

    In seconds.
    """
    total = sum(histogram.values())
    if not total:
        return [None] * len(shares)
    found: list[float | None] = []
    buckets = iter(sorted(histogram))
    bucket, seen = 0, 0
    for share in shares:
        rank = max(1, math.ceil(share * total - 1e-9))
        while seen < rank:
            bucket = next(buckets)
            seen += histogram[bucket]
        found.append(math.exp((bucket + 0.5) * _WIDTH))
    return found
