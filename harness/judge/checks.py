"""What checks come to, held against the rows of a summary. How they are written: `harness.scenario.check_syntax`."""

from collections.abc import Sequence

from msgspec import Struct

from harness.judge.stats import samples_needed
from harness.judge.verdicts import not_valid
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
from harness.summary import NEEDED, CheckResult, Comparison, Distribution, Reference, Row, Verdict
from harness.units import figures

# Which requests have a latency that others never have, however many there are.
_HAVE = {
    **dict.fromkeys(("ttft", "ttfo", "tpot", "gap"), "streamed answers"),
    **dict.fromkeys(("e2e_sched", "send_lag"), "requests of an open loop"),
    "ttft_sched": "streamed answers of an open loop",
}
_MOST_PERMILLE = 999  # a share closer to 1 is asked of as many requests as p99.9


class _Judged(Struct, frozen=True, kw_only=True):
    """A row under a check."""

    evidence: str
    holds: bool = False
    distance: float = 0.0  # from the bound, relative to it


def evaluate(
    texts: Sequence[str],
    rows: Sequence[Row],
    comparison: Comparison | None,
    reference: Reference | None = None,
) -> list[CheckResult]:
    """How each check came out. A check without enough data fails, and says what it needs.

    What a check calls the baseline is the same row of `reference`, if that is given, else the row that `comparison`
    compares with.
    """
    results = []
    for text in texts:
        try:
            results.append(_evaluate(parse_check(text), rows, comparison, reference))
        except ValueError as error:
            results.append(CheckResult(check=text, passed=False, evidence=str(error)))
    return results


def _evaluate(
    check: Check, rows: Sequence[Row], comparison: Comparison | None, reference: Reference | None
) -> CheckResult:
    chosen = [row for row in rows if check.server is None or row.key == (check.server, check.load)]
    within = check.metric == "speedup" or (check.relative and reference is None)
    if within and comparison is not None and check.server is None:
        base = comparison.verdicts[0].baseline if comparison.verdicts else None
        sides = {side for side, verdict in _own(comparison).items() if verdict.baseline == base}
        chosen = [row for row in chosen if row.name in sides]
    if not chosen:
        return CheckResult(check=check.text, passed=False, evidence="there is no row that it applies to")
    judged = [_judge(check, row, rows, comparison, reference) for row in chosen]
    failed = [one.evidence for one in judged if not one.holds]
    if failed:
        return CheckResult(check=check.text, passed=False, evidence="; ".join(failed))
    # Of those that hold the one closest to the bound says most.
    closest = min(judged, key=lambda one: one.distance).evidence
    rest = f" (the closest of {len(judged)} rows)" if len(judged) > 1 else ""
    return CheckResult(check=check.text, passed=True, evidence=closest + rest)


def _judge(
    check: Check, row: Row, rows: Sequence[Row], comparison: Comparison | None, reference: Reference | None
) -> _Judged:
    value, missing = _value(check, row, comparison)
    if value is None:
        return _Judged(evidence=f"{row.name}: {missing}")
    limited = " (client-limited)" if set(_fields(check)) & set(row.client_limited) else ""
    bound, evidence = check.bound, f"{row.name}: {_shown(check, value)}{_counted(check, row)}{limited}"
    if check.relative:
        base, whose = _baseline_value(check, row, rows, comparison, reference)
        if base is None:
            return _Judged(evidence=f"{row.name}: {whose}")
        bound = check.bound * base
        factor = f", {figures(value / base, 3)} times as much" if base else ""
        evidence += f" against {_shown(check, base)} of {whose}{factor}"
    return _Judged(
        evidence=evidence,
        holds=OPERATORS[check.operator](value, bound),
        distance=abs(value - bound) / (abs(bound) or 1.0),
    )


def _baseline_value(
    check: Check, row: Row, rows: Sequence[Row], comparison: Comparison | None, reference: Reference | None
) -> tuple[float | None, str]:
    """The baseline's value and whose it is, or None and why there is none."""
    if reference is not None:
        if reference.refused is not None:
            return None, f"not compared with {reference.run}: {reference.refused}"
        whose = reference.run
        base = next((one for one in reference.rows if one.name == row.name), None)
        if base is None:
            return None, f"the baseline {whose} has no such row"
    else:
        if comparison is None:
            return None, "there is no baseline: the run is not VALID, or has one row only; give one with --baseline RUN"
        verdict = _own(comparison).get(row.name)
        if verdict is None:
            return None, _uncompared(row, comparison)
        whose = verdict.baseline
        base = next(one for one in rows if one.name == whose)
    unlike = not_valid(row, base) or unlike_rows(row, base, _fields(check))
    if unlike is not None:
        return None, f"not compared with {whose}: {unlike}"
    value, missing = _value(check, base, None)
    return (None, f"of the baseline {whose}: {missing}") if value is None else (value, whose)


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


def _value(check: Check, row: Row, comparison: Comparison | None) -> tuple[float | None, str]:
    """A row's value, or None and what it would need."""
    metric, numbers = check.metric, row.pooled
    latency, _, statistic = metric.rpartition("_")
    if latency in LATENCIES and statistic in STATISTICS:
        return _latency(getattr(numbers, LATENCIES[latency]), latency, statistic)
    if metric in JUDGED_BY_SLOS:
        return _attained(check, row)
    if metric in OF_ANSWERS:
        return _of_answers(metric, row)
    if metric == "input_tok_s":
        return numbers.input_tok_s, "not known: the server has to report the prompt tokens of every answer"
    if metric == "speedup":
        return _speedup(row, comparison)
    if metric == "error_rate":
        return numbers.error_rate, "no request was sent; 1 is needed"
    if metric == "wall":
        return numbers.wall_s, "a load without a fixed number of requests has no wall time"
    if metric == "output_tok_s":
        why = row.missing.get("output_tok_s", "the server has to report the tokens of every answer")
        return numbers.output_tok_s, f"not known: {why}"
    return numbers.requests_per_s, "not known: no request was measured"


def _of_answers(metric: str, row: Row) -> tuple[float | None, str]:
    answers = row.pooled.answers
    if answers is None:
        return None, "no answer was judged; the load needs an 'answer', and requests that succeed"
    return getattr(answers, metric), "nobody knows which answers are right; 'prompts.kind: classification' has labels"


def _latency(sample: Distribution, latency: str, statistic: str) -> tuple[float | None, str]:
    one = f"an {latency}" if latency.startswith("e") else f"a {latency}"
    whose = f": only {_HAVE[latency]} have one" if not sample.n and latency in _HAVE else ""
    if statistic == "mean":
        return sample.mean, f"no successful request has {one}; 1 is needed{whose}"
    needed = NEEDED[statistic]
    what = f"{sample.n:,} values are there" if latency == "gap" else f"there are {sample.n:,}"
    return getattr(sample, statistic), f"needs {needed:,} successful requests that have {one}; {what}{whose}"


def _attained(check: Check, row: Row) -> tuple[float | None, str]:
    attained = row.pooled.slos.get(slos_key(check.slos))
    if attained is None:
        return None, f"its summary does not say how many requests met {slos_key(check.slos)}; its records are needed"
    if attained.unknown:
        return None, (
            f"of {attained.unknown:,} of {row.pooled.succeeded:,} successful requests it is not known whether they met "
            f"{slos_key(check.slos)}: the answers must be streamed, and their tokens reported"
        )
    if check.metric == "goodput":
        return attained.goodput_req_s, "not known: no request was measured"
    needed = requests_needed(check)
    if row.pooled.sent < needed:
        return None, (
            f"needs {needed:,} requests; {row.pooled.sent:,} were sent, of which {attained.met:,} met every SLO"
        )
    return attained.attainment, "no request was sent; 1 is needed"


def requests_needed(check: Check) -> int:
    """How many requests a share needs. At least 95 % within a bound is a p95 within it, and needs as many."""
    if check.relative or check.operator not in (">", ">=") or not 0 < check.bound < 1:
        return 1
    return samples_needed(min(int(round(check.bound * 1000, 6)), _MOST_PERMILLE))


def _speedup(row: Row, comparison: Comparison | None) -> tuple[float | None, str]:
    if comparison is None:
        return None, "nothing was compared: the run is not VALID, or has one row only"
    verdict = _own(comparison).get(row.name)
    if verdict is None:
        return None, _uncompared(row, comparison)
    if verdict.ratio is None:
        return None, verdict.sentence.removeprefix(f"{verdict.side}: ").removesuffix(".")
    if verdict.low is None:
        return None, "needs at least 2 repeats of this row and of the baseline"
    return verdict.ratio, ""


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
