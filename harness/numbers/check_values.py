"""The value of a row that a check bounds, or why it has none; and its evidence as a sentence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from harness.base.measured import NEEDED, PERCENTILES, Distribution, LogSpread, Numbers
from harness.base.metrics import METRICS, WORK, Metric
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, figures, percent, ratio_text
from harness.numbers import share_test
from harness.numbers.comparison import Comparison, Verdict, known_bounds
from harness.numbers.stats import Estimate
from harness.numbers.summary import Row
from harness.scenario.check_syntax import ANSWER_SHARES, SLO_METRICS, Check, slos_key

REQUESTS_UNKNOWN = because("requests_unknown", "whether enough requests are within the bound is not known")


class CheckValue(Struct, frozen=True, kw_only=True):
    """The value of one row. Without a value `missing` says why."""

    value: float | None = None
    missing: Reason | None = None
    above: float | None = None  # the value is not known, but larger than this
    interval: tuple[float | None, float | None] | None = None  # None: the value is compared as it is
    n: int = 0  # requests that the value comes from
    needed: int = 0  # requests that the value needs
    provisional: bool = False  # of a verdict that is provisional
    censored: int = 0  # requests that were cut before the latency ended
    unknown: int = 0  # requests of which it is not known whether they meet the bound
    at_most: int = 0  # other requests of which an upper bound is known
    met: int | None = None  # requests that met every SLO
    failed: int = 0  # requests without a latency: they miss every bound
    youngest: float | None = None  # age of the youngest cut request: a bound up to it is missed by all of them
    all_miss: bool = False  # so many requests failed that no bound is met
    effect: float = 1.0  # so many dependent requests count as one
    spread: LogSpread | None = None  # of the latencies; of SLOs relative to their bounds
    unit: Literal["repeats", "runs"] | None = None  # what the interval is from; None: requests

    @property
    def known_value(self) -> float | None:
        return self.above if self.value is None else self.value

    @property
    def requests(self) -> int:
        return self.n + self.at_most + self.unknown + self.failed

    def estimate(self) -> Estimate:
        """A value without an interval counts as exact. With failed requests the value is at least the lower end."""
        assert self.known_value is not None
        low, high = self.interval or (self.known_value, self.known_value)
        return Estimate(max(self.known_value, low or 0.0), low, high)


def missing_value(code: str, text: str, /, **values: Any) -> CheckValue:
    return CheckValue(missing=because(code, text, **values))


def not_compared(name: str, why: Reason) -> CheckValue:
    return missing_value("not_compared_with", f"not compared with {name}: {sentence(why)}", name=name, why=why)


def check_fields(check: Check) -> list[str]:
    """The fields of Numbers with a definition that a check's value is computed from."""
    if check.metric in SLO_METRICS:
        return list(dict.fromkeys(slo.latency for slo in check.slos))
    return METRICS[check.metric].defined_fields


def row_value(check: Check, row: Row, comparison: Comparison | None) -> CheckValue:
    """A row's value, or why it has none."""
    if check.metric in SLO_METRICS:
        return _slo_value(check, row)
    if check.metric == "speedup":
        return _speedup_value(row, comparison)
    metric = METRICS[check.metric]
    if metric.latency:
        return _latency_value(row, metric)
    if check.metric in ANSWER_SHARES and row.pooled.answers is None:
        text = "no answer was checked; the load needs an 'answer', and requests that succeed"
        return missing_value("no_answer_checked", text)
    return CheckValue(value=metric.of(row.pooled), missing=_tool_unknown(row, metric.name) or metric.missing)


def _tool_unknown(row: Row, *names: str) -> Reason | None:
    """Why an imported file has no such number; None if the file is not the reason."""
    why = next((row.missing[name] for name in names if name in row.missing), None)
    return None if why is None else because("tool_unknown", f"not known: {why}", why=why)


def _latency_value(row: Row, metric: Metric) -> CheckValue:
    sample, statistic = metric.sample(row.pooled), metric.statistic
    unknown = _tool_unknown(row, metric.name, metric.latency)
    counts: dict[str, Any] = {
        "n": min(sample.n, row.pooled.succeeded) if metric.latency == "gap" else sample.known_count,
        "interval": sample.intervals.get(statistic),
        "censored": sample.censored,
        "unknown": sample.unknown,
        "at_most": sample.at_most,
        "youngest": sample.intervals.get("cut", (None, None))[0],
    }
    if statistic == "mean":
        few = _latency_missing(row, metric, 1, 0)
        if "mean" not in sample.intervals:  # all are known
            return CheckValue(value=sample.mean, missing=unknown or few)
        return CheckValue(above=sample.intervals["mean"][0], missing=unknown or few, **counts)
    needed, value = NEEDED[statistic], getattr(sample, statistic)
    above = sample.above if value is None and sample.known_count >= needed else None
    failed, effect = _failed_requests(row.pooled, sample), sample.effect or 1.0
    all_miss = False
    if failed and not sample.n:
        counts["interval"] = counts["interval"] or (None, None)
    if failed:
        requests = sample.known_count + sample.at_most + sample.unknown + failed
        low = (counts["interval"] or (None, None))[0]
        all_miss = share_test.failures_decide(failed, requests, PERCENTILES[statistic].share, effect)
        high = (counts["interval"] or (None, None))[1]
        if all_miss or (high is None and low is not None and value is not None and value < low):
            value, above = None, low  # the percentile of the successful requests says nothing about all
    return CheckValue(
        value=value,
        above=above,
        missing=unknown or _latency_missing(row, metric, needed, counts["n"]),
        needed=needed,
        effect=effect,
        spread=sample.spread,
        failed=failed,
        all_miss=all_miss,
        **counts,
    )


def _latency_missing(row: Row, metric: Metric, needed: int, there: int) -> Reason:
    latency, answers = metric.latency, row.pooled.succeeded
    if there:
        text = f"needs {needed:,} successful requests that have {latency}; there are {there:,}"
    else:
        text = f"no successful request has {latency}; {needed:,} needed"
    if not metric.sample(row.pooled).n:
        text += (f": only {metric.only} have one" if metric.only else "") + (
            f" ({answers:,} have none)" if answers else ""
        )
    return because("latency_missing", text, latency=latency, needed=needed, there=there, of=answers)


def _failed_requests(numbers: Numbers, sample: Distribution) -> int:
    """Requests that failed without this latency. 0 where another tool computed it or the latency is no request's own.

    Where no request has the latency, only a run in which all of them failed says so.
    """
    if not sample.known_count and not sample.at_most:
        return numbers.sent if 0 < numbers.sent == numbers.failed else 0
    if not sample.intervals:
        return 0
    return max(0, min(numbers.failed, numbers.sent - sample.known_count - sample.at_most - sample.unknown))


def _slo_value(check: Check, row: Row) -> CheckValue:
    slos, sent = slos_key(check.slos), row.pooled.sent
    attained = row.pooled.slos.get(slos)
    if attained is None:
        text = f"its summary does not say how many requests met {slos}; its records are needed"
        return missing_value("slos_uncounted", text)
    if check.metric == "goodput":
        text = f"it is unknown whether {attained.unknown:,} of {sent:,} requests met {slos}: answers must end, be "
        text += "streamed, and have their tokens reported"
        missing = because("slos_unknown", text) if attained.unknown else METRICS["requests_per_s"].missing
        return CheckValue(value=attained.goodput, missing=missing)
    effect = _slos_effect(check, row) if attained.effect is None else attained.effect
    interval = None
    if sent and (check.relative or 0 < check.bound < 1):
        interval = (
            share_test.share_interval(attained.met, sent, effect)[0],
            share_test.share_interval(attained.met + attained.unknown, sent, effect)[1],
        )
    elif attained.unknown:  # bounds of 0 and 1 are about these requests only
        interval = attained.met / sent, (attained.met + attained.unknown) / sent
    is_open = check.operator == "==" and attained.unknown > 0 and attained.attainment == check.bound
    return CheckValue(
        value=None if is_open else attained.attainment,
        missing=REQUESTS_UNKNOWN if sent else METRICS["error_rate"].missing,
        interval=interval,
        n=sent - attained.unknown,
        unknown=attained.unknown,
        met=attained.met,
        effect=effect,
        spread=attained.spread,
    )


def _slos_effect(check: Check, row: Row) -> float:
    """The largest design effect of the latencies that the SLOs bound, for summaries of earlier versions."""
    samples = [METRICS[slo.latency].sample(row.pooled) for slo in check.slos]
    return max((sample.effect for sample in samples if sample.effect is not None), default=1.0)


def _speedup_value(row: Row, comparison: Comparison | None) -> CheckValue:
    if comparison is None:
        text = (
            "nothing was compared within the run: it is not VALID, or has one row only (the speedup between runs is in "
        )
        return missing_value("nothing_compared", f"{text}the verdicts of `harness compare`)")
    verdict = verdict_by_row(comparison).get(row.name)
    if verdict is None:
        return CheckValue(missing=uncompared_reason(row, comparison))
    if verdict.metric not in WORK:
        text = "users who think or follow a schedule are compared by latency; check one, relative to the baseline"
        return missing_value("paced_users", text)
    if verdict.refused is not None:
        return missing_value("no_verdict", f"inconclusive: {sentence(verdict.refused)}", why=verdict.refused)
    interval = known_bounds(verdict.ratio or 0.0, verdict.low, verdict.high)
    return CheckValue(value=verdict.ratio, interval=interval, provisional=verdict.provisional, unit=verdict.unit)


def uncompared_reason(row: Row, comparison: Comparison) -> Reason:
    if any(verdict.baseline == row.name for verdict in comparison.verdicts):
        return because("is_baseline", "it is the baseline itself")
    text = "it is compared with no row; `compare` in the scenario names a pair"
    return because("no_comparison", text)


def verdict_by_row(comparison: Comparison) -> dict[str, Verdict]:
    """The first verdict of each compared row, by its name: that of a pair which the scenario names, if there is one."""
    return {verdict.side: verdict for verdict in reversed(comparison.verdicts)}


def value_text(
    row: str,
    unit: str,
    value: float | None = None,
    limited: bool = False,
    against: Mapping[str, Any] | None = None,
    interval: Sequence[float | None] | None = None,
    above: float | None = None,
    requests: int = 0,
    censored: int = 0,
    unknown: int = 0,
    at_most: int = 0,
    failed: int = 0,
    decision: Reason | None = None,
    confidence: float = 0.95,
) -> str:
    """The value of a row, with its interval, the baseline's value and what would decide, or what decided."""
    parts, multiple = [], False
    shown = above if value is None else value
    if shown is not None:
        text = ("above " if value is None else "") + format_check_value(shown, unit)
        text += " (the load generator was too slow)" if limited else ""
        if against is not None:
            base = against["value"]
            multiple = bool(base) and value is not None
            factor = f", {ratio_text(shown / base)} times the" if multiple else " against"
            text += f"{factor} {format_check_value(base, unit)} of {against['name']}"
        parts.append(text)
    if interval is not None and multiple and against is not None and shown is not None:
        base = against["value"]
        ratios = known_bounds(shown / base, *(None if bound is None else bound / base for bound in interval))
        parts.append(_format_interval(ratios, ratio_text, confidence) + (" times" if ratios != (None, None) else ""))
    elif interval is not None:
        parts.append(_format_interval(interval, lambda bound: format_check_value(bound, unit), confidence))
    limits = {
        "cut before it ended": censored, "with an upper bound only": at_most, "not known": unknown,
        "failed, which misses every bound": failed,
    }  # fmt: skip
    counts = [(number, text) for text, number in limits.items() if number]
    if counts:
        (number, what), *others = counts
        more = "".join(f" and {other:,} {whatever}" for other, whatever in others)
        parts.append(f"{number:,} of {count(requests, 'request')} {what}{more}")
    parts = [text for text in (", ".join(parts), "" if decision is None else sentence(decision)) if text]
    return f"{row}: {'; '.join(parts)}"


def _format_interval(interval: Sequence[float | None], show: Callable[[float], str], confidence: float) -> str:
    low, high = (None if bound is None else show(bound) for bound in interval)
    if low is None and high is None:
        return "interval not known"
    ends = f"up to {high}" if low is None else f"from {low}" if high is None else f"{low} to {high}"
    return f"{percent(confidence, 0)} interval {ends}"


def format_check_value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{figures(value, 4)} s" if value >= 1 else f"{figures(value * 1000, 4)} ms"
    return f"{figures(value * 100)} %" if unit == "%" else f"{figures(value, 4)} {unit}".rstrip()
