"""Statistics of the latencies of requests, with what is known of those that did not end."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from harness.base.measured import NEEDED, NO_SAMPLE, PERCENTILES, Distribution, median_of_known
from harness.numbers import formulas, share_test
from harness.numbers.share_test import LatencySample
from harness.records.columns import Floats, Gaps, Rows, join_gaps
from harness.records.records import AT_LEAST, AT_MOST, CUT, FAILED, OBSERVED, UNKNOWN, Request
from harness.records.run_data import CellData
from harness.scenario.check_syntax import Slo

PERMILLES = {name: percentile.permille for name, percentile in PERCENTILES.items()}
_COUNTED = (OBSERVED, AT_LEAST, UNKNOWN)


def latency_sample(cell: CellData, latency: str) -> LatencySample:
    """A latency of the counted requests of a cell; see harness.base.metrics for the names."""
    rows = cell.counted
    if latency in ("send_lag", "connect"):
        values_s = formulas.latency_s(rows, latency)
        if latency == "connect":
            return share_test.observed(values_s[~np.isnan(values_s) & rows.good])
        return share_test.observed(values_s[~np.isnan(values_s)], rows.sent_s[~np.isnan(values_s)])
    values_s, states = formulas.latency_states(rows, latency)
    chosen = states != formulas.ABSENT
    if latency in formulas.FROM_SCHEDULE and not cell.open_loop:  # in an open loop, others are due when they are sent
        chosen &= ~np.isnan(rows.scheduled_s)
    return LatencySample(rows.sent_s[chosen], values_s[chosen], states[chosen])


def margin_sample(rows: Rows, bounds: Sequence[Slo]) -> LatencySample:
    """The latencies of requests relative to their bounds: at most 1 meets all of them. Of several bounds the worst."""
    margins, met = formulas.slo_margins(rows, bounds), formulas.meets_slos(rows, bounds)
    values = np.where(met == formulas.MISSED, np.maximum(margins, math.nextafter(1.0, 2.0)), margins)
    values = np.where(met == formulas.MET, np.minimum(values, 1.0), values)
    is_cut = rows.error.is_in(*CUT)
    ages = np.minimum(formulas.slo_margins(rows, bounds, (OBSERVED, AT_LEAST)), math.nextafter(1.0, 0.0))
    values = np.where((met == formulas.OPEN) & is_cut, ages, values)
    states = np.where(met == formulas.OPEN, np.where(is_cut, AT_LEAST, UNKNOWN), OBSERVED)
    states = np.where(rows.error.is_set & ~is_cut, FAILED, states)
    return LatencySample(rows.sent_s, values, states.astype(np.int8))


def token_shares_between(
    rows: Rows, start_s: float, end_s: float, fetch: Callable[[Iterable[int]], Iterable[Request]]
) -> Floats:
    """The share (0 to 1) of each request's tokens that came within [start_s, end_s] on the axis of `sent_s`.

    It follows the chunk times. A response without streaming is spread evenly over the time that it took. `fetch`: the
    records of some places.
    """
    from_s, to_s = start_s - rows.sent_s, end_s - rows.sent_s
    took_s = np.where(rows.ended_s > 0, rows.ended_s, np.nan)
    whole = np.maximum(0.0, np.minimum(to_s, rows.ended_s) - np.maximum(from_s, 0.0)) / took_s
    shares = np.where(np.isnan(took_s), (from_s <= 0) & (to_s >= 0), whole)
    streamed = rows.chunks > 0
    inside = (from_s <= rows.first_chunk_s) & (rows.last_chunk_s <= to_s)
    outside = ((rows.last_chunk_s < from_s) | (rows.first_chunk_s > to_s)) & ~rows.disordered
    shares = np.where(streamed, np.where(inside, 1.0, 0.0), shares)
    places = np.flatnonzero(streamed & ~inside & ~outside)  # of few requests, whose chunk times are read again
    for at, request in zip(places.tolist(), fetch(rows.place[places].tolist()), strict=True):
        chunks_s = np.array(request.chunks_s)
        shares[at] = ((from_s[at] <= chunks_s) & (chunks_s <= to_s[at])).sum() / len(chunks_s)
    return shares


def distribution(
    samples: Sequence[LatencySample], answer_s: float | None = None, in_flight: float | None = None
) -> Distribution:
    """Statistics of a latency, one sample a repeat.

    `answer_s`: mean time of an answer, and `in_flight`: mean number of requests in flight, for the design effect.
    """
    parts = {
        state: np.concatenate([sample.of_state(state) for sample in samples] or [np.empty(0)]) for state in _COUNTED
    }
    values, ages, n, unknown = parts[OBSERVED], parts[AT_LEAST], len(parts[OBSERVED]), len(parts[UNKNOWN])
    limited = sum(int(np.isfinite(sample.of_state(AT_MOST)).sum()) for sample in samples)
    if not n and not limited and (unknown or not len(ages)):  # none has this latency, as those that are not streamed
        return NO_SAMPLE
    design = share_test.design_effect(samples, answer_s, in_flight)
    quantiles = share_test.percentiles(samples, list(PERMILLES.values())) if n or len(ages) else []
    values_s = {name: quantile.value_s for name, quantile in zip(PERMILLES, quantiles, strict=bool(quantiles))}
    known_intervals = share_test.percentile_intervals(samples, list(PERMILLES.values()), design.effect)
    intervals = dict(zip(PERMILLES, known_intervals, strict=True))
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
        **_known_percentiles(n + len(ages), values_s.get),
        intervals=intervals,
        censored=len(ages),
        unknown=unknown,
        at_most=limited,
        above=oldest if oldest is not None and (not n or oldest >= values.max()) else None,
        effect=design.effect,
        blocks=design.blocks,
        spread=share_test.log_spread(samples),
    )


def gap_distribution(parts: Sequence[Gaps]) -> Distribution:
    """Statistics of the chunk gaps of several cells together.

    The gaps of a request are not independent: their percentiles need a number of requests and have no intervals.
    """
    gaps = join_gaps(parts)
    if not gaps.n:
        return NO_SAMPLE
    return Distribution(
        n=gaps.n,
        mean=gaps.total_s / gaps.n,
        min=gaps.min_s,
        max=gaps.max_s,
        **_known_percentiles(gaps.requests, lambda name: gaps.percentile_s(PERMILLES[name])),
    )


def _known_percentiles(requests: int, percentile_at: Callable[[str], float | None]) -> dict[str, Any]:
    """Each percentile for which there are enough requests; None for the others."""
    return {name: percentile_at(name) if requests >= NEEDED[name] else None for name in PERMILLES}


def pool_distributions(samples: Sequence[Distribution]) -> Distribution:
    """Pool statistics without their values. A percentile is the median of those of the samples."""
    nonempty = [sample for sample in samples if sample.n]
    if len(nonempty) < 2:
        return nonempty[0] if nonempty else NO_SAMPLE
    n = sum(sample.n for sample in nonempty)
    percentiles: dict[str, Any] = {
        name: median_of_known(getattr(sample, name) for sample in nonempty) for name in NEEDED
    }
    return Distribution(
        n=n,
        mean=None if any(s.mean is None for s in nonempty) else sum(s.n * (s.mean or 0.0) for s in nonempty) / n,
        min=min((s.min for s in nonempty if s.min is not None), default=None),
        max=max((s.max for s in nonempty if s.max is not None), default=None),
        censored=sum(s.censored for s in samples),
        unknown=sum(s.unknown for s in samples),
        above=max((s.above for s in samples if s.above is not None), default=None),
        **percentiles,
    )
