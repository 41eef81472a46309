"""Evaluates checks against the rows of a summary. Their grammar: `harness.scenario.check_syntax`.

A percentile and a share of requests that met SLOs (attainment) have a 95 % interval. Such a check passes when the
whole interval meets the bound, fails when the whole interval breaks it, and is inconclusive otherwise. All other values
are compared as they are; docs/method.md says which and why.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.judge.stats import (
    MAX_REQUESTS,
    Estimate,
    growth_to_decide,
    order_statistics,
    ratio_of,
    requests_to_decide,
    samples_needed,
    share_interval,
)
from harness.judge.verdicts import WORK, not_valid
from harness.rundir.origin import unlike_rows
from harness.scenario.check_syntax import (
    JUDGED_BY_SLOS,
    LATENCIES,
    OF_ANSWERS,
    OPERATORS,
    STATISTICS,
    UNITS,
    Check,
    parse_check,
    slos_key,
)
from harness.scenario.scenario import Scenario
from harness.summary import NEEDED, CheckResult, Comparison, Distribution, Reference, Row, Verdict
from harness.units import count, figures

# Which requests have a latency that others never have, however many there are.
_HAVE = {
    **dict.fromkeys(("ttft", "ttfo", "tpot", "gap"), "streamed answers"),
    **dict.fromkeys(("e2e_sched", "send_lag"), "requests of an open loop"),
    "ttft_sched": "streamed answers of an open loop",
}
_MAX_PERMILLE = 999  # a share closer to 1 needs as many requests as p99.9


class _Value(Struct, frozen=True, kw_only=True):
    """The value of one row. Without a value `missing` says why."""

    value: float | None = None
    missing: str = ""
    interval: tuple[float | None, float | None] | None = None  # None: the value is compared as it is
    n: int = 0  # the requests that it comes from,
    needed: int = 0  # and how many of them a check needs to pass

    def estimate(self) -> Estimate:
        """A value without an interval counts as exact."""
        assert self.value is not None
        return Estimate(self.value, *(self.interval or (self.value, self.value)))


class Undecidable(NamedTuple):
    """A check that cannot pass with the planned requests."""

    check: str
    row: str  # the one with the fewest requests
    planned: int  # its requests, of all repeats
    needed: int


def evaluate(
    texts: Sequence[str],
    rows: Sequence[Row],
    comparison: Comparison | None,
    reference: Reference | None = None,
) -> list[CheckResult]:
    """The result of each check. A check without enough data is inconclusive, and its result says what it needs.

    `baseline` in a check is the same row of `reference`, if that is given, else the row that `comparison` compares
    with.
    """
    results = []
    for text in texts:
        try:
            results.append(_evaluate(parse_check(text), rows, comparison, reference))
        except ValueError as error:
            results.append(CheckResult(check=text, status="failed", code="unreadable", evidence=str(error)))
    return results


def undecidable(scenario: Scenario) -> Iterator[Undecidable]:
    """Checks that cannot pass with the planned requests, even if every request meets the bound.

    Timed loads are left out: how many requests they send is known after the run.
    """
    for text in scenario.checks:
        check = parse_check(text)
        statistic = check.metric.rpartition("_")[2]
        needed = requests_needed(check) if check.metric == "attainment" else NEEDED.get(statistic, 1)
        planned = [
            (load.requests * scenario.repeats, f"{server} / {name}")
            for server in scenario.servers
            for name, load in scenario.loads.items()
            if load.requests is not None and (check.server is None or (server, name) == (check.server, check.load))
        ]
        fewest, row = min(planned, default=(needed, ""))
        if fewest < needed:
            yield Undecidable(check.text, row, fewest, needed)


def _evaluate(
    check: Check, rows: Sequence[Row], comparison: Comparison | None, reference: Reference | None
) -> CheckResult:
    chosen = [row for row in rows if check.server is None or row.key == (check.server, check.load)]
    within = check.metric == "speedup" or (check.relative and reference is None)
    if within and comparison is not None and check.server is None:
        base = comparison.verdicts[0].baseline if comparison.verdicts else None
        sides = {side for side, verdict in _own(comparison).items() if verdict.baseline == base}
        chosen = [row for row in chosen if row.name in sides]
    if check.server is None:  # rows without streamed answers, say, have no TTFT and are not meant
        chosen = [row for row in chosen if _has(check, row)] or chosen
    if not chosen:
        return CheckResult(
            check=check.text, status="failed", code="no_row", evidence="there is no row that it applies to"
        )
    found = [_evaluate_row(check, row, rows, comparison, reference) for row in chosen]
    if failed := [one for one in found if one.status == "failed"]:
        return replace(max(failed, key=_distance), evidence="; ".join(one.evidence for one in failed))
    if open_ := [one for one in found if one.status == "inconclusive"]:
        worst = max(open_, key=lambda one: math.inf if one.more_requests is None else one.more_requests)
        return replace(worst, evidence="; ".join(one.evidence for one in open_))
    worst = min(found, key=_distance)
    rest = f" (worst of {len(found)} rows)" if len(found) > 1 else ""
    return replace(worst, evidence=worst.evidence + rest)


def _has(check: Check, row: Row) -> bool:
    """Whether a row may have the latency of a check: none of its successful requests has one otherwise."""
    field = LATENCIES.get(check.metric.rpartition("_")[0])
    return field is None or not row.pooled.succeeded or getattr(row.pooled, field).n > 0


def _distance(result: CheckResult) -> float:
    """From the bound, relative to it."""
    value, bound = result.value, result.bound
    if value is None:  # too few requests for the value, but not for one end of its interval
        value = result.low if result.low is not None else result.high
    return 0.0 if value is None or bound is None else abs(value - bound) / (abs(bound) or 1.0)


def _evaluate_row(
    check: Check, row: Row, rows: Sequence[Row], comparison: Comparison | None, reference: Reference | None
) -> CheckResult:
    found, bound, against = _value(check, row, comparison), check.bound, ""
    result = CheckResult(check=check.text, row=row.name, evidence="")
    if check.relative and found.value is not None:
        base, whose = _baseline_value(check, row, rows, comparison, reference)
        if base.value is None:
            return replace(result, code="no_baseline", evidence=f"{row.name}: {whose}")
        bound = check.bound * base.value
        factor = f", {figures(found.value / base.value, 3)} times as much" if base.value else ""
        against = f" against {_shown(check, base.value)} of {whose}{factor}"
        found = replace(found, interval=_relative_interval(found, base))
    if check.operator == "==" or (check.relative and found.value is None):
        found = replace(found, interval=None)
    if found.value is None and found.interval is None:
        return _without_value(result, row, found)
    low, high = found.interval or (found.value, found.value)
    holds = OPERATORS[check.operator]
    met = holds(-math.inf if low is None else low, bound), holds(math.inf if high is None else high, bound)
    if found.value is None and any(met):
        return _without_value(result, row, found)
    limited = " (client-limited)" if set(_fields(check)) & set(row.client_limited) else ""
    shown = [] if found.value is None else [_shown(check, found.value) + _counted(check, row) + limited + against]
    result = replace(result, value=found.value, bound=bound)
    if found.interval is not None:
        shown.append(_interval_words(check, low, high))
        result = replace(result, low=low, high=high)
    evidence = f"{row.name}: {', '.join(shown)}"
    if all(met):
        return replace(result, status="passed", code="met", evidence=evidence)
    if not any(met):
        return replace(result, status="failed", code="broken", evidence=evidence)
    more, advice = _what_decides(check, found, bound)
    return replace(result, code="too_close", more_requests=more, evidence=f"{evidence}; {advice}")


def _without_value(result: CheckResult, row: Row, found: _Value) -> CheckResult:
    """Inconclusive: too few requests for the value, or more requests do not give it one either."""
    few = found.n < found.needed and (found.n > 0 or not row.pooled.succeeded)
    return replace(
        result,
        code="too_few_requests" if few else "no_value",
        more_requests=found.needed - found.n if few else None,
        evidence=f"{row.name}: {found.missing}",
    )


def _relative_interval(found: _Value, base: _Value) -> tuple[float | None, float | None] | None:
    """The interval of the ratio of two values, times the baseline's value. None: both are compared as they are."""
    if (found.interval is None and base.interval is None) or not found.value or not base.value:
        return None
    ratio = ratio_of(found.estimate(), base.estimate())
    return (
        None if ratio.low is None else ratio.low * base.value,
        None if ratio.high is None else ratio.high * base.value,
    )


def _what_decides(check: Check, found: _Value, bound: float) -> tuple[int | None, str]:
    """How many more requests decide a check whose interval contains the bound, if all stays as seen; and as words."""
    assert found.value is not None and found.interval is not None
    if check.metric == "speedup":
        return None, "more repeats make the interval narrower"
    if check.relative:
        times = growth_to_decide(found.estimate(), bound)
        more = None if times is None or times * found.n > MAX_REQUESTS else math.ceil((times - 1) * found.n)
    else:
        share, seen = check.bound, found.value
        if check.metric != "attainment":  # then the question is how many requests meet the bound
            share = float(check.metric.rpartition("_")[2].removeprefix("p")) / 100
            ranks = order_statistics(found.n, share)
            low, high = (found.value if end is None else end for end in found.interval)
            seen = float(np.interp(bound, (low, found.value, high), (ranks[0] / found.n, share, ranks[1] / found.n)))
        needed = requests_to_decide(share, seen)
        more = None if needed is None else max(1, needed - found.n)
    if more is None:
        return None, f"too close to the bound: more than {MAX_REQUESTS:,} requests would be needed to decide"
    both = f"; of the baseline {figures(1 + more / found.n, 2)} times as many as now" if check.relative else ""
    return more, f"needs about {count(more, 'more request')} to decide{both}"


def _interval_words(check: Check, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        known = f"from {_shown(check, low)}" if low is not None else f"up to {_shown(check, high or 0.0)}"
        return f"95 % interval {known}"
    return f"95 % interval {_shown(check, low)} to {_shown(check, high)}"


def _baseline_value(
    check: Check, row: Row, rows: Sequence[Row], comparison: Comparison | None, reference: Reference | None
) -> tuple[_Value, str]:
    """The baseline's value and the name of its run or row; without a value, why there is none."""
    if reference is not None:
        if reference.refused is not None:
            return _Value(), f"not compared with {reference.run}: {reference.refused}"
        whose = reference.run
        base = next((one for one in reference.rows if one.name == row.name), None)
        if base is None:
            return _Value(), f"the baseline {whose} has no such row"
    else:
        if comparison is None:
            return (
                _Value(),
                "there is no baseline: the run is not VALID, or has one row only; give one with --baseline RUN",
            )
        verdict = _own(comparison).get(row.name)
        if verdict is None:
            return _Value(), _uncompared(row, comparison)
        whose = verdict.baseline
        base = next(one for one in rows if one.name == whose)
    unlike = not_valid(row, base) or unlike_rows(row, base, _fields(check))
    if unlike is not None:
        return _Value(), f"not compared with {whose}: {unlike}"
    found = _value(check, base, None)
    return found, whose if found.value is not None else f"of the baseline {whose}: {found.missing}"


def _fields(check: Check) -> list[str]:
    """The fields of Numbers that a check's value is made of, as far as they have a definition."""
    latency, _, statistic = check.metric.rpartition("_")
    if latency in LATENCIES:
        return [LATENCIES[latency], *(["percentiles"] if statistic in NEEDED else [])]
    if check.metric in JUDGED_BY_SLOS:
        return list(dict.fromkeys(LATENCIES[slo.latency] for slo in check.slos))
    if check.metric == "wall":
        return ["wall_s"]
    return [check.metric] if check.metric in ("output_tok_s", "input_tok_s", "requests_per_s") else []


def _value(check: Check, row: Row, comparison: Comparison | None) -> _Value:
    """A row's value, or what it would need."""
    metric, numbers = check.metric, row.pooled
    latency, _, statistic = metric.rpartition("_")
    if latency in LATENCIES and statistic in STATISTICS:
        return _latency(row, latency, statistic)
    if metric in JUDGED_BY_SLOS:
        return _attained(check, row)
    if metric in OF_ANSWERS:
        return _of_answers(metric, row)
    if metric == "speedup":
        return _speedup(row, comparison)
    if metric == "output_tok_s":
        why = row.missing.get("output_tok_s", "the server has to report the tokens of every answer")
        return _Value(value=numbers.output_tok_s, missing=f"not known: {why}")
    value, missing = {
        "input_tok_s": (numbers.input_tok_s, "not known: the server has to report the prompt tokens of every answer"),
        "error_rate": (numbers.error_rate, "no request was sent; 1 is needed"),
        "wall": (numbers.wall_s, "a load without a fixed number of requests has no wall time"),
        "requests_per_s": (numbers.requests_per_s, "not known: no request was measured"),
    }[metric]
    return _Value(value=value, missing=missing)


def _of_answers(metric: str, row: Row) -> _Value:
    answers = row.pooled.answers
    if answers is None:
        return _Value(missing="no answer was checked; the load needs an 'answer', and requests that succeed")
    return _Value(
        value=getattr(answers, metric),
        missing="the right answers are not known; 'prompts.kind: classification' has labels",
    )


def _latency(row: Row, latency: str, statistic: str) -> _Value:
    sample: Distribution = getattr(row.pooled, LATENCIES[latency])
    one = f"an {latency}" if latency.startswith("e") else f"a {latency}"
    whose = f": only {_HAVE[latency]} have one" if not sample.n and latency in _HAVE else ""
    if statistic == "mean":
        return _Value(value=sample.mean, missing=f"no successful request has {one}; 1 is needed{whose}")
    needed = NEEDED[statistic]
    there = f"{sample.n:,} values are there" if latency == "gap" else f"there are {sample.n:,}"
    return _Value(
        value=getattr(sample, statistic),
        missing=f"needs {needed:,} successful requests that have {one}; {there}{whose}",
        interval=sample.intervals.get(statistic),
        n=min(sample.n, row.pooled.succeeded) if latency == "gap" else sample.n,
        needed=needed,
    )


def _attained(check: Check, row: Row) -> _Value:
    attained, sent = row.pooled.slos.get(slos_key(check.slos)), row.pooled.sent
    if attained is None:
        return _Value(
            missing=f"its summary does not say how many requests met {slos_key(check.slos)}; its records are needed"
        )
    if attained.unknown:
        return _Value(
            missing=f"of {attained.unknown:,} of {row.pooled.succeeded:,} successful requests it is not known whether "
            f"they met {slos_key(check.slos)}: the answers must be streamed, and their tokens reported"
        )
    if check.metric == "goodput":
        return _Value(value=attained.goodput_req_s, missing="not known: no request was measured")
    needed, n = requests_needed(check), sent - attained.left
    sampled = n > 0 and (check.relative or 0 < check.bound < 1)  # all or none: a statement on these requests alone
    return _Value(
        value=attained.attainment if sent >= needed else None,
        missing=f"needs {needed:,} requests; {sent:,} were sent, of which {attained.met:,} met every SLO"
        if sent
        else "no request was sent; 1 is needed",
        interval=share_interval(attained.met, n) if sampled else None,
        n=sent,
        needed=needed,
    )


def requests_needed(check: Check) -> int:
    """How many requests a share needs. At least 95 % within a bound is a p95 within it, and needs as many."""
    if check.relative or check.operator not in (">", ">=") or not 0 < check.bound < 1:
        return 1
    return samples_needed(min(int(round(check.bound * 1000, 6)), _MAX_PERMILLE))


def _speedup(row: Row, comparison: Comparison | None) -> _Value:
    if comparison is None:
        return _Value(missing="nothing was compared: the run is not VALID, or has one row only")
    verdict = _own(comparison).get(row.name)
    if verdict is None:
        return _Value(missing=_uncompared(row, comparison))
    if verdict.metric not in WORK:
        return _Value(
            missing="users who think or follow a schedule are compared by latency; check one, relative to the baseline"
        )
    if verdict.ratio is None:
        return _Value(missing=verdict.sentence.removeprefix(f"{verdict.side}: ").removesuffix("."))
    if verdict.low is None:
        return _Value(missing="needs at least 2 repeats of this row and of the baseline")
    return _Value(value=verdict.ratio, interval=(verdict.low, verdict.high))


def _uncompared(row: Row, comparison: Comparison) -> str:
    if comparison.verdicts and comparison.verdicts[0].baseline != row.name:
        return "its work is not the baseline's, and it is compared with nothing"
    return "it is the baseline itself"


def _own(comparison: Comparison) -> dict[str, Verdict]:
    """The verdict of each row but the baseline, by its name: against the baseline, or of a part of a mix against the
    same load alone. What else the scenario compares comes after these.
    """
    own = {verdict.side: verdict for verdict in reversed(comparison.verdicts)}
    if comparison.verdicts:
        own.pop(comparison.verdicts[0].baseline, None)
    return own


def _shown(check: Check, value: float) -> str:
    units = UNITS[check.metric]
    if check.metric == "goodput":
        return f"{figures(value, 4)} req/s"
    if "s" in units:
        return f"{figures(value, 4)} s" if value >= 1 else f"{figures(value * 1000, 4)} ms"
    return f"{figures(value * 100, 3)} %" if "%" in units else figures(value, 4)


def _counted(check: Check, row: Row) -> str:
    """What a share was counted from."""
    answers = row.pooled.answers
    if check.metric in OF_ANSWERS and answers is not None:
        valid = check.metric == "valid_share"
        right = f", {answers.right or 0:,} of {answers.labelled:,}"
        return f", {answers.valid:,} of {answers.checked:,}" if valid else right
    if check.metric != "attainment":
        return ""
    attained, sent = row.pooled.slos[slos_key(check.slos)], row.pooled.sent
    left = f" ({attained.left:,} more were abandoned before one was missed)" if attained.left else ""
    return f", {attained.met:,} of {sent - attained.left:,} sent met every SLO{left}"
