"""Arrivals: groups of chunks that came together, so that the time between them says nothing about the server.

A proxy holds chunks back and passes them on as many small writes; TLS and busy sockets join reads. Inside such a group
the time between two chunks is that of the copying, not of the model.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

JOINED_S = 0.001  # chunks closer than this came together, ...
JOINED_SHARE = 0.1  # ... or closer than this share of the usual gap between groups
# A fast server has gaps of a millisecond itself: chunks closer than this share of the usual gap are joined there.
FAST_SHARE = 1 / 3
SMALLEST_LIMIT_S = FAST_SHARE * JOINED_S  # of a stream with a mean gap of JOINED_S or more
# A stream with a mean gap below JOINED_S is that of a fast server only if its chunks are further apart than writes of a
# proxy, and its answer did not wait for most of its time: a proxy that holds an answer back does that.
MIN_STEP_S, MIN_STREAMED = 0.0001, 0.1
_ROUNDS = 8  # of computing the groups and the gaps between them; in practice two


def split_arrivals(times_s: Sequence[float]) -> list[int]:
    """Return the position of the first chunk of each arrival.

    `times_s`: of the chunks in order, in seconds after the request was sent.
    """
    if len(times_s) < 2:
        return list(range(len(times_s)))
    gaps_s = [after - before for before, after in pairwise(times_s)]
    limit_s = arrival_limit_s(sorted(gaps_s), times_s[0], times_s[-1])
    return [0, *(place for place, gap_s in enumerate(gaps_s, start=1) if gap_s >= limit_s)]


def arrival_limit_s(gaps_s: Sequence[float], first_s: float, last_s: float) -> float:
    """Return the gap from which on a chunk begins another arrival; infinite for a stream that is one arrival.

    `gaps_s`: of the chunks, sorted, at least one; `first_s`, `last_s`: when the first and the last chunk came.
    """
    number, span_s = len(gaps_s), last_s - first_s
    usual_s = mean_s = span_s / number
    if gaps_s[0] >= max(JOINED_S, 2 * JOINED_SHARE * mean_s):
        return float(gaps_s[0])  # a median is at most twice the mean, so no gap is below the limit
    if mean_s < JOINED_S and (mean_s < MIN_STEP_S or span_s < MIN_STREAMED * last_s):
        return math.inf
    limit_s = JOINED_S
    for _ in range(_ROUNDS):
        first = bisect_left(gaps_s, limit_s)
        if first < number:
            usual_s = float(gaps_s[(first + number - 1) // 2])  # the lower median of those between arrivals
        before_s, limit_s = limit_s, max(JOINED_SHARE * usual_s, min(JOINED_S, FAST_SHARE * usual_s))
        if limit_s == before_s:
            break
    return limit_s
