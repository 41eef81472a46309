"""The latencies of measured requests, with what is known of those that did not end, and their statistics."""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field

from harness.analysis import derive, gaps
from harness.analysis.derive import FROM_SCHEDULE, float_array
from harness.analysis.gaps import Gaps
from harness.judge import slo_rule
from harness.judge.slo_rule import LatencySample
from harness.judge.stats import Array
from harness.rundir.records import AT_LEAST, OBSERVED, UNKNOWN, Request
from harness.summary import NEEDED, NO_SAMPLE, Distribution, median_of_known

_FROM_SENDING = ("ttft_s", "ttfo_s", "tpot_s", "e2e_s")  # a request has one of each
_ABSENT = -1  # state of a request without such a latency
_SILENT_S = 30.0  # shorter silences are not kept
_COUNTED = (OBSERVED, AT_LEAST, UNKNOWN)


class LatencyColumns(Struct):
    """The latencies of measured requests in seconds, one row a request in the order of the file."""

    sent_s: "array[float]" = field(default_factory=float_array)
    lag_s: "array[float]" = field(default_factory=float_array)  # send lag; infinite without a scheduled time
    values_s: "dict[str, array[float]]" = field(default_factory=lambda: {name: float_array() for name in _FROM_SENDING})
    states: "dict[str, array[int]]" = field(default_factory=lambda: {name: array("b") for name in _FROM_SENDING})
    connect_s: "array[float]" = field(default_factory=float_array)  # of the successful ones that opened a connection
    waits_s: list[tuple[float, float]] = []  # silences of requests with one above _SILENT_S: derive.silences_s

    def add(self, request: Request, sent_s: float) -> None:
        self.sent_s.append(sent_s)
        lag_s = derive.send_lag_s(request)
        self.lag_s.append(math.inf if lag_s is None else lag_s)
        for name in _FROM_SENDING:
            value_s, state = derive.latency_state(request, name) or (math.inf, _ABSENT)
            self.values_s[name].append(value_s)
            self.states[name].append(state)
        if request.error is None and request.connect_s is not None:
            self.connect_s.append(request.connect_s)
        is_whole = request.error is None and not request.chunks_s  # an answer in one piece: no wait for a token
        if request.ended_s > _SILENT_S and not is_whole and max(waits_s := derive.silences_s(request)) > _SILENT_S:
            self.waits_s.append(waits_s)

    def merge(self, later: "LatencyColumns") -> None:
        for own, others in zip(self._arrays(), later._arrays(), strict=True):
            own.extend(others)
        self.waits_s += later.waits_s

    def _arrays(self) -> "list[array[Any]]":
        return [self.sent_s, self.lag_s, self.connect_s, *self.values_s.values(), *self.states.values()]

    def of_successes(self, name: str) -> Array:
        """The known values of the successful requests, in the order of the file: these have an E2E latency."""
        is_known = np.array([np.array(self.states[at]) == OBSERVED for at in (name, "e2e_s")]).all(axis=0)
        values: Array = np.array(self.values_s[name])[is_known]
        return values

    def sample(self, name: str, *, open_loop: bool = False) -> LatencySample:
        """The sample of a latency. `open_loop`: requests without a scheduled time are due when they are sent."""
        sent_s, lag_s = np.array(self.sent_s), np.array(self.lag_s)
        if name in ("send_lag_s", "connect_s"):
            values = lag_s[np.isfinite(lag_s)] if name == "send_lag_s" else np.array(self.connect_s)
            return slo_rule.observed(values, sent_s[np.isfinite(lag_s)] if name == "send_lag_s" else None)
        source = name.replace("_sched", "")
        values, states = np.array(self.values_s[source]), np.array(self.states[source], dtype=np.int8)
        chosen = states != _ABSENT
        if name in FROM_SCHEDULE:
            values = values + np.where(np.isfinite(lag_s), lag_s, 0.0)
            chosen &= np.isfinite(lag_s) | open_loop
        return LatencySample(sent_s[chosen], values[chosen], states[chosen])


def distribution(samples: Sequence[LatencySample], answer_s: float | None = None) -> Distribution:
    """Statistics of a latency, one sample a repeat. `answer_s`: mean time of an answer, for the design effect."""
    parts = {state: np.concatenate([one.of_state(state) for one in samples] or [np.empty(0)]) for state in _COUNTED}
    values, ages, n, unknown = parts[OBSERVED], parts[AT_LEAST], len(parts[OBSERVED]), len(parts[UNKNOWN])
    if not n and (unknown or not len(ages)):  # no answer has this latency, as those that are not streamed
        return NO_SAMPLE
    design = slo_rule.design_effect(samples, answer_s)
    effect = design.inflation()
    found = slo_rule.percentiles(samples, list(gaps.PERMILLES.values()))
    known = dict(zip(gaps.PERMILLES, found, strict=True))
    intervals: dict[str, tuple[float | None, float | None]] = {
        name: slo_rule.percentile_interval(samples, permille, effect) for name, permille in gaps.PERMILLES.items()
    }
    if len(ages) or unknown:
        intervals["mean"] = float((values.sum() + ages.sum()) / (n + len(ages) + unknown)), None
    if len(ages):
        intervals["cut"] = float(ages.min()), float(ages.max())
    oldest = float(ages.max()) if len(ages) else None
    return Distribution(
        n=n,
        mean=float(values.mean()) if n else None,
        min=float(values.min()) if n else None,
        max=float(values.max()) if n else None,
        **_known_percentiles(n + len(ages), lambda name: known[name].value_s),
        intervals=intervals,
        censored=len(ages),
        unknown=unknown,
        above=oldest if oldest is not None and (not n or oldest >= values.max()) else None,
        effect=effect,
        blocks=design.blocks,
    )


def distribution_of(values_s: Sequence[float]) -> Distribution:
    """Statistics of latencies in the order of sending."""
    return distribution([slo_rule.observed(np.array(values_s))])


def gap_distribution(parts: Sequence[Gaps]) -> Distribution:
    """Statistics of the chunk gaps of several cells together.

    The gaps of a request are not independent: their percentiles need a number of requests and have no intervals.
    """
    for part in parts:
        part.flush()
    blocks = [block for part in parts for block in part.blocks]
    if not blocks:
        return NO_SAMPLE
    n = sum(map(len, blocks))
    return Distribution(
        n=n,
        mean=math.fsum(float(block.sum()) for block in blocks) / n,
        min=min(float(block[0]) for block in blocks),
        max=max(float(block[-1]) for block in blocks),
        **_known_percentiles(
            sum(part.requests for part in parts), lambda name: gaps.percentile_of(blocks, gaps.PERMILLES[name])
        ),
    )


def _known_percentiles(requests: int, percentile_at: Callable[[str], float | None]) -> dict[str, Any]:
    """Each percentile for which there are enough requests; None for the others."""
    return {name: percentile_at(name) if requests >= NEEDED[name] else None for name in gaps.PERMILLES}


def pool_distributions(samples: Sequence[Distribution]) -> Distribution:
    """Pool statistics without their values. A percentile is the median of those of the samples."""
    known = [sample for sample in samples if sample.n]
    if len(known) < 2:
        return known[0] if known else NO_SAMPLE
    n = sum(sample.n for sample in known)
    percentiles: dict[str, Any] = {name: median_of_known(getattr(sample, name) for sample in known) for name in NEEDED}
    return Distribution(
        n=n,
        mean=None if any(s.mean is None for s in known) else sum(s.n * (s.mean or 0.0) for s in known) / n,
        min=min((s.min for s in known if s.min is not None), default=None),
        max=max((s.max for s in known if s.max is not None), default=None),
        censored=sum(s.censored for s in samples),
        unknown=sum(s.unknown for s in samples),
        above=max((s.above for s in samples if s.above is not None), default=None),
        **percentiles,
    )
