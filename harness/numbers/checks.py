"""Evaluates checks against the rows of a summary. Their grammar: `harness.scenario.check_syntax`.

A percentile and a share of requests that met SLOs (attainment) have a 95 % interval by `harness.numbers.share_test`.
Such a check passes when the whole interval meets the bound, fails when the whole interval breaks it, and is
inconclusive otherwise. All other values are compared as they are; docs/method.md says which and why.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.measured import NEEDED, PERCENTILES, LogSpread
from harness.base.metrics import METRICS, WORK
from harness.base.reason import Reason, because, sentence
from harness.base.units import count, figures
from harness.numbers import share_test, stats
from harness.numbers.check_values import (
    REQUESTS_UNKNOWN,
    CheckValue,
    check_fields,
    format_check_value,
    missing_value,
    not_compared,
    row_value,
    uncompared_reason,
    value_text,
    verdict_by_row,
)
from harness.numbers.comparable import definition_conflict
from harness.numbers.comparison import LARGE, CheckResult, Comparison, Verdict, known_bounds
from harness.numbers.share_test import Draws, LatencySample
from harness.numbers.summary import CellSummary, Reference, Row
from harness.numbers.verdicts import invalid_row_reason, is_paced, row_error_margins, work_metric
from harness.scenario import Load, Scenario, is_open_loop, max_concurrency
from harness.scenario.check_syntax import (
    OPERATORS,
    Check,
    parse_check,
)

Samples = Callable[[Row, str], Sequence[LatencySample]]  # of a row and a latency: one a repeat
Interval = tuple[float | None, float | None]

_RATES_AND_TIMES = ("wall", "output_tok_s", "input_tok_s", "requests_per_s", "goodput")  # of a row
_SHOWN_EFFECT = 1.5  # smaller design effects are not shown
_NO_ROW = because("check_no_row", "there is no row that it applies to")
_MORE_REPEATS = because("more_repeats", "more repeats make the interval narrower")
_MORE_RUNS = because(
    "more_runs",
    "the interval allows for the variation between runs; `harness run SCENARIO --times 5` measures it",
)


class Undecidable(NamedTuple):
    """A check that cannot pass with the planned requests, or may not if these are not far below the bound."""

    check: str
    row: str  # with the fewest requests
    planned: int  # requests of this row, in all repeats
    needed: int  # at least
    near: int  # near the bound, or more
    certain: bool  # it cannot pass


def evaluate(
    texts: Sequence[str],
    rows: Sequence[Row],
    comparison: Comparison | None,
    reference: Reference | None = None,
    samples: Samples | None = None,
) -> list[CheckResult]:
    """The result of each check. A check without enough data is inconclusive, and its result has the number it needs.

    `baseline` in a check is the same row of `reference` if that is given, else the row's baseline in `comparison`.
    `comparison` is of the rows of one run, or of its rows with those of `reference`. `samples`: the latencies of the
    run's own rows; without them the interval of a ratio of two percentiles is the widest that theirs allow.
    """
    results = []
    for text in texts:
        try:
            results.append(_evaluate_check(parse_check(text), rows, comparison, reference, samples))
        except ValueError as error:
            why = because("check_unreadable", str(error))
            results.append(CheckResult(check=text, status="failed", code="unreadable", evidence=[why]))
    return results


def judged_metrics(load: Load) -> set[str]:
    """The metrics that the verdicts on a load use."""
    if not is_paced(load):
        return {work_metric([load])}
    latencies = ["ttft_sched", "e2e_sched", "tpot"] if is_open_loop(load) else ["ttft", "e2e", "tpot"]
    return {f"{latency}_{name}" for latency in latencies for name in NEEDED}


def is_changed_by(cell: CellSummary, metric: str, error: tuple[float, float], texts: Sequence[str]) -> bool:
    """Whether a check of a cell's metric may have another result, if the value is wrong by so much. See `client_error`.

    A check against a baseline may: the baseline is another value. A share of requests within a bound may where a
    percentile of the latency may be on the other side of it.
    """
    value = METRICS[metric].of(cell.numbers)
    for text in texts:
        try:
            check = parse_check(text)
        except (ValueError, HarnessError):
            continue
        if value is None or not check.concerns(cell.server, cell.load):
            continue
        if metric == check.metric and check.relative:
            return True
        bounds = [(check.operator, check.bound)] if metric == check.metric else []
        bounds += [(slo.operator, slo.bound_s) for slo in check.slos if slo.latency == METRICS[metric].latency]
        ends = (value * (1 - error[0]), value * (1 + error[1]))
        if any(OPERATORS[sign](ends[0], bound) != OPERATORS[sign](ends[1], bound) for sign, bound in bounds):
            return True
    return False


def undecidable_checks(scenario: Scenario) -> Iterator[Undecidable]:
    """Checks that cannot or may not pass with the planned requests, even if every request meets the bound.

    Timed loads are left out, because their number of requests is unknown before the run.
    """
    for text in scenario.checks:
        check = parse_check(text)
        planned = [
            Undecidable(
                check.text,
                f"{server} / {name}",
                load.requests * scenario.repeats,
                needed,
                near,
                load.requests * scenario.repeats < fewest,
            )
            for server in scenario.servers
            for name, load in scenario.loads.items()
            if load.requests is not None and check.concerns(server, name)
            for fewest, needed, near in [_planned_requests_needed(check, load)]
            if load.requests * scenario.repeats < near
        ]
        if planned:
            yield min(planned, key=lambda undecidable: (undecidable.planned, undecidable.row))


def _planned_requests_needed(check: Check, load: Load) -> tuple[int, int, int]:
    """How many requests of all repeats a check needs to pass: at least; and with the design effect of the requests in
    flight far below the bound, and near it.
    """
    statistic, is_share = METRICS[check.metric].statistic, check.metric == "attainment"
    share = check.bound if is_share else METRICS[check.metric].share or 0.0
    is_upper = check.operator in ((">", ">=") if is_share else ("<", "<="))
    if check.relative or METRICS[check.metric].latency == "gap":
        return (NEEDED.get(statistic, 1),) * 3
    if not 0 < share < 1 or not is_upper:
        return 1, 1, 1
    sizes = range(1, share_test.MAX_REQUESTS)
    passing = bisect_left(sizes, True, key=lambda n: share_test.interval_counts(n, share, 1.0)[1] <= n) + 1
    effect = max(1.0, max_concurrency(load) / 2)
    near = share_test.requests_to_decide(share, 1.0, effect) or share_test.MAX_REQUESTS
    return passing, min(near, share_test.fewest_to_be_far(share, effect)), near


def _evaluate_check(
    check: Check,
    rows: Sequence[Row],
    comparison: Comparison | None,
    reference: Reference | None,
    samples: Samples | None,
) -> CheckResult:
    """The result of the worst row, with the evidence of all rows that share its status."""
    chosen = [row for row in rows if check.concerns(*row.key)]
    if check.load is None:
        if comparison is not None and (check.metric == "speedup" or (check.relative and reference is None)):
            sides = set(verdict_by_row(comparison))
            chosen = [row for row in chosen if row.name in sides]
        # Rows without streamed answers, for example, have no TTFT.
        metric = METRICS[check.metric]
        if metric.latency:
            samples_of = {row.name: metric.sample(row.pooled) for row in chosen}
            has_latency = [
                row for row in chosen
                if not row.pooled.succeeded or samples_of[row.name].known_count or samples_of[row.name].at_most
            ]  # fmt: skip
            chosen = has_latency or chosen
    if not chosen:
        return CheckResult(check=check.text, status="failed", code="no_row", evidence=[_NO_ROW])
    results = [_evaluate_row(check, row, rows, comparison, reference, samples) for row in chosen]
    if failed := [result for result in results if result.status == "failed"]:
        worst = max(failed, key=_relative_distance)
        return replace(worst, evidence=[reason for result in failed for reason in result.evidence])
    if inconclusive := [result for result in results if result.status == "inconclusive"]:
        worst = max(inconclusive, key=lambda result: math.inf if result.more_requests is None else result.more_requests)
        return replace(worst, evidence=[reason for result in inconclusive for reason in result.evidence])
    worst = min(results, key=_relative_distance)
    (evidence,) = worst.evidence
    if len(results) > 1:
        evidence = replace(evidence, text=f"{evidence.text} (worst of {len(results)} rows)")
    return replace(worst, evidence=[evidence])


def _relative_distance(result: CheckResult) -> float:
    """The distance of the value from the bound, relative to the bound."""
    value, bound = result.value, result.bound
    if value is None:  # with too few requests for the value, there may be enough for one end of its interval
        value = result.low if result.low is not None else result.high
    return 0.0 if value is None or bound is None else abs(value - bound) / (abs(bound) or 1.0)


def _evaluate_row(
    check: Check,
    row: Row,
    rows: Sequence[Row],
    comparison: Comparison | None,
    reference: Reference | None,
    samples: Samples | None,
) -> CheckResult:
    value, bound, baseline = row_value(check, row, comparison), check.bound, None
    result = CheckResult(check=check.text, row=row.name)
    if check.relative and (value.known_value is not None or value.all_miss):
        base, name = _baseline_value(check, row, rows, comparison, reference)
        if base.value is None:
            return replace(result, code="no_baseline", evidence=_missing_evidence(row, base))
        bound, baseline = check.bound * base.value, {"value": base.value, "name": name}
        base_rows, base_name = (rows, name) if reference is None else (reference.rows, row.name)
        base_row = next(candidate for candidate in base_rows if candidate.name == base_name)
        value = _with_ratio_interval(check, (row, value), (base_row, base), comparison, reference, samples)
    if check.operator == "==" or (check.relative and value.known_value is None and not value.all_miss):
        value = replace(value, interval=None)
    if value.value is None and value.interval is None:
        return _without_value(result, row, value)
    met, more, decision = _decide(check, value, bound)
    is_unknown = decision is not None and decision.code == "requests_unknown"
    if (
        value.known_value is None
        and met is None
        and not is_unknown
        and (more is None or not _are_all_within(value, bound))
    ):
        return _without_value(result, row, value)
    low, high = value.interval or (value.value, value.value)
    shown = _shown_value(check, row, value, baseline) | {"decision": decision}
    if met and decision is not None and decision.code == "far_below":
        shown.pop("above", None)  # it is the lower end of a range whose upper end is far below the bound
    result = replace(result, value=value.value, bound=bound)
    if value.interval is not None:
        result = replace(result, low=low, high=high)
    if met:
        result = replace(result, status="passed", code="met")
    elif met is None:
        few = _required_share(check, value) is not None and value.requests < share_test.MIN_REQUESTS
        code = "unknown_requests" if is_unknown else "too_few_requests" if few else "too_close"
        result = replace(result, code=code, more_requests=more)
    elif value.provisional and not _is_far(low, high, bound):
        shown["decision"] = because("provisional", "one run, not repeated; would fail with --provisional")
        result = replace(result, code="provisional")
    else:
        result = replace(result, status="failed", code="broken")
    shown = {key: value for key, value in shown.items() if value is not None}
    return replace(result, evidence=[because("check_value", value_text(**shown), **shown)])


def _decide(check: Check, value: CheckValue, bound: float) -> tuple[bool | None, int | None, Reason | None]:
    """Whether a value meets the bound (None: not decided), how many more requests decide, and what that rests on."""
    share, holds = _required_share(check, value), OPERATORS[check.operator]
    low, high = value.interval or (value.value, value.value)
    lowest = math.inf if value.all_miss else -math.inf if low is None else low
    ends = {holds(lowest, bound), holds(math.inf if high is None else high, bound)}
    within = check.operator in ((">", ">=") if check.metric == "attainment" else ("<", "<="))  # is met if enough are
    if share is not None and ends == {within} and value.requests < share_test.MIN_REQUESTS:
        ends = {True, False}
    if len(ends) == 1:
        return ends.pop(), None, None
    if share is not None and value.spread is not None:
        at = 1.0 if check.metric == "attainment" else bound
        far = share_test.far_decision(value.spread, share, value.effect, at)
        if far is not None:
            return (far == "pass") == within, None, _far_evidence(check, value.spread, far)
    return None, *_requests_to_decide(check, value, bound)


def _required_share(check: Check, value: CheckValue) -> float | None:
    """The share of the requests that must be within a bound; None where no such share decides the check."""
    if check.relative or check.operator == "==" or value.interval is None or value.unit is not None:
        return None
    if check.metric == "attainment":
        return check.bound if 0 < check.bound < 1 else None
    return METRICS[check.metric].share


def _far_evidence(check: Check, spread: LogSpread, far: share_test.Decision) -> Reason:
    """In words that all requests are far below a bound, or far above it."""
    code, most, end = ("far_below", "most", spread.max) if far == "pass" else ("far_above", "least", spread.min)
    assert end is not None
    if check.metric == "attainment":
        shown = f"{figures(100 * end)} % of the bound"
    else:
        shown = f"{format_check_value(end, 's')} of {format_check_value(check.bound, 's')}"
    text = f"{code.replace('_', ' ')} the bound: {count(spread.n, 'request')} took at {most} {shown}"
    return because(code, text, requests=spread.n, end=end)


def _are_all_within(value: CheckValue, bound: float) -> bool:
    """Whether every request that has the latency is within the bound."""
    return value.spread is not None and value.spread.max is not None and value.spread.max <= bound


def _shown_value(check: Check, row: Row, value: CheckValue, baseline: dict[str, Any] | None) -> dict[str, Any]:
    """The values of the evidence, see `value_text`."""
    low, high = value.interval or (value.value, value.value)
    shown: dict[str, Any] = {"row": row.name, "unit": METRICS[check.metric].unit}
    if value.value is not None:
        limited = bool(set(check_fields(check)) & set(row.client_limited)) or None
        shown |= {"value": value.value, "against": baseline, "limited": limited}
    elif value.above is not None or (high is None and low is not None and not check.relative):
        shown |= {"above": low if value.above is None else value.above, "against": baseline}
    if value.censored or value.unknown or value.at_most or value.failed:
        shown |= {"requests": value.requests, "censored": value.censored, "unknown": value.unknown}
        shown |= {"at_most": value.at_most} if value.at_most else {}
        shown |= {"failed": value.failed} if value.failed else {}
    # The second is a bound, already shown.
    is_interval = value.interval is not None and (low, high) not in ((None, None), (shown.get("above"), None))
    if is_interval or (check.relative and value.interval is not None):
        shown["interval"] = [low, high]
        shown["confidence"] = None if _required_share(check, value) is None else 1 - share_test.SLO_ALPHA
    return shown


def _is_far(low: float | None, high: float | None, bound: float) -> bool:
    """Whether a whole interval of ratios is so far from a bound that a provisional verdict breaks it."""
    return (high is not None and high * (1 + LARGE) < bound) or (low is not None and low > bound * (1 + LARGE))


def _missing_evidence(row: Row, value: CheckValue) -> list[Reason]:
    assert value.missing is not None
    return [because("check_missing", f"{row.name}: {sentence(value.missing)}", row=row.name, why=value.missing)]


def _without_value(result: CheckResult, row: Row, value: CheckValue) -> CheckResult:
    """An inconclusive result: too few requests for the value, or requests that do not give it."""
    too_few = value.n < value.needed and (value.n > 0 or not row.pooled.succeeded)
    return replace(
        result,
        code="too_few_requests" if too_few else "no_value",
        more_requests=value.needed - value.n if too_few else None,
        evidence=_missing_evidence(row, value),
    )


def compared_metrics(texts: Sequence[str]) -> list[str]:
    """The metrics that checks compare with a baseline, of those that verdicts can have."""
    metrics = []
    for text in texts:
        try:
            check = parse_check(text)
        except (ValueError, HarnessError):  # its result says so
            continue
        has_verdict = check.metric in WORK or METRICS[check.metric].latency
        metrics += [check.metric] if check.relative and has_verdict else []
    return list(dict.fromkeys(metrics))


def _with_ratio_interval(
    check: Check,
    side: tuple[Row, CheckValue],
    base: tuple[Row, CheckValue],
    comparison: Comparison | None,
    reference: Reference | None,
    samples: Samples | None,
) -> CheckValue:
    """A value with the interval of its ratio to the baseline's, times the baseline's value.

    Runs are compared by the variation between equal ones, repeats of work by Welch's interval, and percentiles of one
    run by resampling (`share_test.ratio_interval`). Where the row has a verdict by this metric, it is the verdict's.
    """
    (row, value), (base_row, base_value) = side, base
    assert base_value.value is not None
    metric = check.metric
    is_measured = metric in _RATES_AND_TIMES or METRICS[metric].latency
    if value.all_miss or not value.known_value or not base_value.value:
        return value
    verdict = _verdict_of(comparison, reference, row, metric)
    unit: Literal["repeats", "runs"] | None = None
    provisional = False
    interval: Interval
    if is_measured and verdict is not None and verdict.ratio is not None:
        low, high = verdict.low, verdict.high
        if not METRICS[metric].more_is_better:
            low, high = None if high is None else 1 / high, None if low is None else 1 / low
        interval = low, high
        unit, provisional = verdict.unit, verdict.provisional
    elif is_measured and (reference is not None or metric in WORK):
        repeats = [[number for number in getattr(side_row, metric, []) if number] for side_row in (row, base_row)]
        repeats_effect = None if reference is not None else stats.welch_effect(*repeats)
        effect = repeats_effect or stats.pooled_effect([value.known_value], [base_value.value])
        interval = known_bounds(effect.ratio, *_widen(effect.interval(), row, base_row, metric))
        unit = "repeats" if reference is None else "runs"
        provisional = stats.is_mostly_assumed(effect) if reference is not None else repeats_effect is None
    else:
        draws = [_draws(check, *pair, None if reference is not None else samples) for pair in (side, base)]
        if draws[0] is not None and draws[1] is not None:
            interval = share_test.ratio_interval(draws[0], draws[1])
        elif value.interval is None and base_value.interval is None:
            return value
        else:
            interval = _widest_ratio(value, base_value)
        interval = _widen(interval, row, base_row, metric)
    if unit == "runs" and any(
        check_value.censored or check_value.unknown or check_value.failed for check_value in (value, base_value)
    ):
        open_low, open_high = _widest_ratio(value, base_value)  # unknown requests as met, and as missed
        interval = (
            None if open_low is None or interval[0] is None else min(open_low, interval[0]),
            None if open_high is None or interval[1] is None else max(open_high, interval[1]),
        )
    low, high = (None if end is None else end * base_value.value for end in interval)
    return replace(value, interval=(low, high), provisional=provisional, unit=unit)


def _verdict_of(comparison: Comparison | None, reference: Reference | None, row: Row, metric: str) -> Verdict | None:
    """The verdict on a row by a metric: that of the runs if there is a reference."""
    if reference is not None:
        verdicts = [*reference.ratios, *(comparison.verdicts if comparison is not None else [])]
        verdicts = [verdict for verdict in verdicts if verdict.unit == "runs" and verdict.side == row.name]
    else:
        first = None if comparison is None else verdict_by_row(comparison).get(row.name)
        verdicts = [] if first is None or metric not in WORK else [first]
    return next((verdict for verdict in verdicts if verdict.metric == metric), None)


def _draws(check: Check, row: Row, value: CheckValue, samples: Samples | None) -> Draws | None:
    """The resampled values of a row; None for values of rows instead of requests, or without samples."""
    if check.metric == "attainment":
        return share_test.share_draws(value.met or 0, value.unknown, value.requests, value.effect)
    metric = METRICS[check.metric]
    if metric.statistic not in PERCENTILES or samples is None:
        return None
    effect = metric.sample(row.pooled).effect
    if effect is None or not (parts := [sample for sample in samples(row, metric.latency) if len(sample.state)]):
        return None
    return share_test.percentile_draws(parts, PERCENTILES[metric.statistic].permille, effect)


def _widest_ratio(value: CheckValue, base: CheckValue) -> Interval:
    """The ratios that the intervals of two values allow together."""
    (_, low, high), (_, base_low, base_high) = value.estimate(), base.estimate()
    return low / base_high if low and base_high else None, high / base_low if high is not None and base_low else None


def _widen(interval: Interval, row: Row, base_row: Row, metric: str) -> Interval:
    """The interval of a ratio with what the load generator's delays may have changed on both sides."""
    lower, higher = row_error_margins(row, base_row, metric)
    low, high = interval
    return None if low is None else low * math.exp(-lower), None if high is None else high * math.exp(higher)


def _requests_to_decide(check: Check, value: CheckValue, bound: float) -> tuple[int | None, Reason]:
    """How many more requests decide a check whose interval contains the bound, if value and spread stay the same."""
    if value.unit is not None:
        return None, _MORE_REPEATS if value.unit == "repeats" else _MORE_RUNS
    share = bound if check.metric == "attainment" else METRICS[check.metric].share
    if share is None or value.interval is None:
        return None, REQUESTS_UNKNOWN
    requests = value.requests
    kind = "requests" if value.effect < _SHOWN_EFFECT else "independent requests"
    if check.relative:
        if value.known_value is None or value.unknown >= (1 - share) * requests > 0:
            return None, REQUESTS_UNKNOWN
        times = stats.growth_to_decide(value.estimate(), bound)
        more = (
            None if times is None or times * requests > share_test.MAX_REQUESTS else math.ceil((times - 1) * requests)
        )
    else:
        met, unknown = _shares_at(check, value, bound, share)
        if unknown > 0 and met - 1e-9 <= share <= met + unknown + 1e-9:
            return None, REQUESTS_UNKNOWN
        at = 1.0 if check.metric == "attainment" else bound
        counts = met * requests, unknown * requests, requests
        needed = share_test.requests_to_settle(*counts, share, value.effect, value.spread, at)
        more = None if needed is None else max(1, needed - requests)
    if more is None:
        text = f"too close to the bound: more than {share_test.MAX_REQUESTS:,} requests would be needed to decide"
        return None, because("too_close", text, effect=value.effect)
    text = f"too few {kind}: send about {more:,} more"
    if check.relative:
        text += f", and of the baseline {figures(1 + more / requests)} times as many as now"
    return more, because("more_requests", text, more=more, effect=value.effect)


def _shares_at(check: Check, value: CheckValue, bound: float, share: float) -> tuple[float, float]:
    """The shares of all requests that met the bound, and of which it is unknown whether they did.

    That of a percentile lies between four points: the percentile, the ends of its interval, and the largest latency.
    """
    requests = value.requests
    if check.metric == "attainment":
        return (value.met or 0) / requests, value.unknown / requests
    assert value.interval is not None
    open_cut = 0 if value.youngest is None or bound <= value.youngest else value.censored
    open_at_most = 0 if _are_all_within(value, bound) else value.at_most
    most = requests - value.unknown - value.failed - value.censored - open_at_most
    fails, passes = share_test.interval_counts(requests, share, value.effect)
    least = max(fails - value.unknown, 0)
    counts = least, share * (requests - value.unknown - value.failed), min(passes, most)
    largest = None if value.spread is None or value.censored else value.spread.max
    ends = value.interval[0], value.value, value.interval[1], largest
    points = sorted((x, min(count, most)) for x, count in zip(ends, (*counts, most), strict=True) if x is not None)
    met: float = most
    if points:
        places, heights = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        met = float(np.interp(bound, places, heights))
        if value.interval[0] is None and bound < places[0]:
            met = least
        if value.interval[1] is None and bound > places[-1]:
            met = counts[2]
    return met / requests, (value.unknown + open_cut + open_at_most) / requests


def _baseline_value(
    check: Check, row: Row, rows: Sequence[Row], comparison: Comparison | None, reference: Reference | None
) -> tuple[CheckValue, str]:
    """The baseline's value and the name of its run or row."""
    if reference is not None:
        name = reference.run
        if reference.refused is not None:
            return not_compared(name, reference.refused), name
        base = next((base_row for base_row in reference.rows if base_row.name == row.name), None)
        if base is None:
            return missing_value("baseline_without_row", f"the baseline {name} has no such row"), name
    elif comparison is None:
        text = "there is no baseline: the run is not VALID, or has one row only; give one with --baseline RUN"
        return missing_value("no_baseline", text), ""
    else:
        verdict = verdict_by_row(comparison).get(row.name)
        if verdict is None:
            return CheckValue(missing=uncompared_reason(row, comparison)), ""
        name = verdict.baseline
        base = next(base_row for base_row in rows if base_row.name == name)
    refusal = invalid_row_reason(row, base) or definition_conflict(row, base, check_fields(check))
    if refusal is not None:
        return not_compared(name, refusal), name
    value = row_value(check, base, None)
    if value.value is None:
        assert value.missing is not None
        failed = f"{value.failed:,} of {count(value.requests, 'request')} failed"
        why = failed if value.failed else sentence(value.missing)
        return missing_value("baseline_without_value", f"of the baseline {name}: {why}", name=name), name
    return value, name
