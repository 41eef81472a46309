"""Where the time of requests went, and what limited a cell: the rules of docs/method.md, "Where the time goes".

The server's own counters say how long requests waited, were prefilled and decoded; the client's clock says how long
they took. The difference is around the engine: the API process, the network, the client.
"""

import statistics
from collections import Counter
from collections.abc import Sequence

from harness.summary import ClientLimit, LimitedBy, Numbers, ServerLoad, TimeSplit

MIN_COUNTED, MAX_COUNTED = 0.8, 1.5  # requests by the server's count / by the client's; else they are not the same ones
KV_FULL = 0.95  # of the KV cache, while requests wait or are preempted
SHARE = 0.20  # of a request's time that makes queueing, or the API process, the limit


def time_split(numbers: Numbers, load: ServerLoad, *, mixed: bool = False) -> TimeSplit | None:
    """Return the mean seconds of a request by stage; None where the server reports none of them.

    `mixed`: other loads used the server at the same time, and its counters do not tell them apart.
    """
    e2e_s, counted = numbers.e2e_s.mean, numbers.sent if load.timed_requests is None else load.timed_requests
    totals = (load.queue_s, load.prefill_s, load.decode_s)
    same = MIN_COUNTED * numbers.succeeded <= counted <= MAX_COUNTED * numbers.sent
    if mixed or not e2e_s or not counted or not same or all(total is None for total in totals):
        return None
    queue_s, prefill_s, decode_s = (None if total is None else total / counted for total in totals)
    api_s = None
    if queue_s is not None and prefill_s is not None and decode_s is not None:
        rest_s = e2e_s - queue_s - prefill_s - decode_s
        api_s = rest_s if rest_s >= 0 else None  # the requests that the server counted were not quite the same
    opened = numbers.connect_s
    return TimeSplit(
        connect_s=None if opened.mean is None else opened.mean * opened.n / numbers.sent,
        api_s=api_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        e2e_s=e2e_s,
    )


def limited_by(split: TimeSplit | None, load: ServerLoad, limits: Sequence[ClientLimit]) -> LimitedBy | None:
    """Return what limited a cell; None where the server does not report enough to tell."""
    if limits:
        return "client"
    if (load.kv_usage_max or 0.0) >= KV_FULL and (load.preemptions or load.waiting_max):
        return "kv_cache"
    if split is None:
        return None
    if split.queue_s is not None and split.queue_s >= SHARE * split.e2e_s:
        return "queue"
    if split.api_s is not None and split.api_s >= SHARE * split.e2e_s:
        return "api"
    if split.queue_s is None or split.prefill_s is None or split.decode_s is None:
        return None
    return "prefill" if split.prefill_s > split.decode_s else "decode"


def mean_split(splits: Sequence[TimeSplit | None]) -> TimeSplit | None:
    """Return the mean over cells, of each stage over those that know it."""
    known = [split for split in splits if split is not None]
    if not known:
        return None

    def mean(name: str) -> float | None:
        values = [value for split in known if (value := getattr(split, name)) is not None]
        return statistics.fmean(values) if values else None

    stages = {name: mean(name) for name in ("connect_s", "api_s", "queue_s", "prefill_s", "decode_s")}
    return TimeSplit(**stages, e2e_s=statistics.fmean(split.e2e_s for split in known))


def common_limit(limits: Sequence[LimitedBy | None]) -> LimitedBy | None:
    """Return what limited more than half of the cells."""
    counted = Counter(limit for limit in limits if limit is not None).most_common(1)
    return counted[0][0] if counted and 2 * counted[0][1] > len(limits) else None
