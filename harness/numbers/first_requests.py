"""How many requests after a server's start are slower than later ones."""

import numpy as np

from harness.numbers.summary import FirstRequests
from harness.records.columns import Floats, Rows

MIN_REQUESTS = 16  # of which the later half shows what is usual
_FENCES = 3.0  # interquartile ranges above the upper quartile: Tukey's far fence
_MIN_RATIO = 1.5  # of a slow request to the usual one, where requests hardly differ


def first_requests(rows: Rows) -> FirstRequests | None:
    """Return the slow requests at the start of a cell, warm-up included. None: fewer than MIN_REQUESTS succeeded."""
    rows = rows.where(rows.good & (rows.chunks > 0))
    order = np.argsort(rows.sent_s, kind="stable")
    e2e_s, sent_s = rows.last_chunk_s[order], rows.sent_s[order]
    number = count_slow(e2e_s)
    if number is None:
        return None
    usual_s = float(np.median(e2e_s[len(e2e_s) // 2 :]))
    ended_s = float((sent_s + e2e_s)[:number].max() - sent_s[0]) if number else 0.0
    extra_s = float((e2e_s[:number] - usual_s).sum())
    return FirstRequests(requests=number, extra_s=extra_s, until_s=ended_s, usual_s=usual_s)


def count_slow(e2e_s: Floats) -> int | None:
    """Return the length of the longest beginning that ends with a slow request, and of which at least half are slow.

    `e2e_s`: E2E latencies in the order of sending. Slow: beyond the far fence of the later half, and 1.5 times its
    median. None: too few requests.
    """
    if len(e2e_s) < MIN_REQUESTS:
        return None
    half = len(e2e_s) // 2
    low_s, middle_s, high_s = np.percentile(e2e_s[half:], [25, 50, 75]).tolist()
    slow = e2e_s[:half] > max(high_s + _FENCES * (high_s - low_s), _MIN_RATIO * middle_s)
    lengths = np.arange(1, half + 1)
    ends = lengths[slow & (2 * np.cumsum(slow) >= lengths)]
    return int(ends[-1]) if len(ends) else 0
