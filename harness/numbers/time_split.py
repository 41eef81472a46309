"""Where the time of requests went, and which stage of the server limited a cell.

The server's counters give the time that requests waited, were prefilled and decoded; the client's clock gives the time
that they took. The difference was spent around the engine: in the API process, the network and the client.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from harness.base.measured import Numbers
from harness.base.reason import Reason, because
from harness.base.units import count, verb
from harness.records.samples import ServerLoad

LimitedBy = Literal["client", "kv_cache", "queue", "api", "prefill", "decode"]


class TimeSplit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the time of a request went, in seconds on average. None: the server does not report it."""

    connect_s: float | None = None  # by the client; before `e2e_s` starts
    api_s: float | None = None  # e2e_s - queue_s - prefill_s - decode_s: the API process, the network, the client
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    e2e_s: float  # by the client


MIN_COUNTED, MAX_COUNTED = 0.8, 1.5  # requests by the server's count / by the client's; outside, they are not the same
MAX_SUM = 1.1  # of E2E: times of the server beyond it are of other requests, such as a warm-up's long prompts
KV_FULL = 0.95  # of the KV cache, while requests wait or are preempted
KV_SHARE = 0.05  # of the time, waited or computed again: from this share on, the KV cache is the limit
MAX_OTHERS = 0.02  # of the requests: so many may be on one side only, the server's or the client's
SHARE = 0.20  # of a number or a request's time: from this share on, client, queueing or API process is the limit


def timed_others(numbers: Numbers, load: ServerLoad) -> Reason | None:
    """Return why the server's times and the client's are not of the same requests; None if they are, or are not known.

    The client's mean is over the requests that succeeded. A server also times requests whose users left, up to then.
    """
    others = numbers.sent - numbers.succeeded
    if all(total is None for total in (load.queue_s, load.prefill_s, load.decode_s)):
        return None
    # llama.cpp does not count the requests of its totals.
    counted = numbers.sent if load.timed_requests is None else load.timed_requests
    if not others or abs(counted - numbers.succeeded) <= MAX_OTHERS * numbers.succeeded:
        return None
    how = "does not count the requests that it timed"
    if load.timed_requests is not None:
        how = f"timed {count(round(counted), 'request')}"
    text = f"where the time of requests went is not known: the server {how}, and the client's times are of the "
    text += f"{count(numbers.succeeded, 'request')} that succeeded; "
    text += f"{numbers.abandoned:,} {verb(numbers.abandoned, 'was', 'were')} abandoned, "
    text += f"{others - numbers.abandoned:,} failed or did not finish"
    return because(
        "timed_others",
        text,
        counted=None if load.timed_requests is None else round(counted),
        succeeded=numbers.succeeded,
        abandoned=numbers.abandoned,
        others=others - numbers.abandoned,
    )


def time_split(
    numbers: Numbers, load: ServerLoad, *, mixed: bool = False, warmup: int | None = None
) -> TimeSplit | None:
    """Return the mean seconds of a request by stage; None where the server reports none of them, or of other requests.

    `mixed`: other loads used the server at the same time, and its counters do not distinguish them. `warmup`: requests
    of the warm-up, where the load has a fixed number of requests, so that no others can be in the counters.
    """
    e2e_s, counted = numbers.e2e.mean, numbers.sent if load.timed_requests is None else load.timed_requests
    totals = (load.queue_s, load.prefill_s, load.decode_s)
    least, most = MIN_COUNTED * numbers.succeeded, MAX_COUNTED * numbers.sent
    if warmup is not None:
        slack = max(1.0, MAX_OTHERS * numbers.sent)
        least, most = max(least, numbers.succeeded - slack), min(most, numbers.sent + numbers.resent + warmup + slack)
    if mixed or not e2e_s or not counted or not least <= counted <= most or all(total is None for total in totals):
        return None
    if timed_others(numbers, load) is not None:
        return None
    if sum(total for total in totals if total is not None) > MAX_SUM * e2e_s * counted:
        return None
    queue_s, prefill_s, decode_s = (None if total is None else total / counted for total in totals)
    api_s = None
    if queue_s is not None and prefill_s is not None and decode_s is not None:
        rest_s = e2e_s - queue_s - prefill_s - decode_s
        api_s = rest_s if rest_s >= 0 else None  # negative: the server counted slightly different requests
    connect = numbers.connect
    return TimeSplit(
        connect_s=None if connect.mean is None else connect.mean * connect.n / numbers.sent,
        api_s=api_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        e2e_s=e2e_s,
    )


def limited_by(
    split: TimeSplit | None, load: ServerLoad, client_error: Mapping[str, tuple[float, float]], sent: int
) -> LimitedBy | None:
    """Return what limited a cell with so many requests; None where the server does not report enough to tell."""
    if any(max(error) >= SHARE for error in client_error.values()):
        return "client"
    # A preemption shows a full cache, also between two samples of its usage.
    is_full = load.preemptions or ((load.kv_usage_max or 0.0) >= KV_FULL and load.waiting_max)
    share = kv_cache_share(split, load.preemptions, sent)
    if is_full and (share is None or share >= KV_SHARE):
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


def kv_cache_share(split: TimeSplit | None, preemptions: float | None, requests: float) -> float | None:
    """Return the share of the time that requests waited, or were computed again after a preemption, at most.

    None: the server reports neither the wait nor a preemption.
    """
    waited = None if split is None or split.queue_s is None else split.queue_s / split.e2e_s
    if waited is None and not preemptions:
        return None
    preempted_share = (preemptions or 0.0) / max(1.0, (preemptions or 0.0) + requests)
    return (waited or 0.0) + (1 - (waited or 0.0)) * preempted_share


def mean_split(splits: Sequence[TimeSplit | None]) -> TimeSplit | None:
    """Return the mean of each stage over the cells in which it is known."""
    measured = [split for split in splits if split is not None]
    if not measured:
        return None

    def mean(name: str) -> float | None:
        values = [value for split in measured if (value := getattr(split, name)) is not None]
        return statistics.fmean(values) if values else None

    stages = {name: mean(name) for name in ("connect_s", "api_s", "queue_s", "prefill_s", "decode_s")}
    return TimeSplit(**stages, e2e_s=statistics.fmean(split.e2e_s for split in measured))


def common_limit(limits: Sequence[LimitedBy | None]) -> LimitedBy | None:
    """Return what limited more than half of the cells."""
    counted = Counter(limit for limit in limits if limit is not None).most_common(1)
    return counted[0][0] if counted and 2 * counted[0][1] > len(limits) else None
