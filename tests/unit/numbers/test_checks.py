"""Checks: grammar, and what they say about rows."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.base.files import SCENARIOS
from harness.base.measured import Distribution, LogSpread, Numbers, SloAttainment
from harness.base.reason import because, evidence
from harness.numbers import share_test
from harness.numbers.checks import evaluate, undecidable_checks
from harness.numbers.comparison import CheckResult, Comparison, Verdict
from harness.numbers.latencies import distribution
from harness.numbers.share_test import LatencySample, observed
from harness.numbers.summary import Reference, Row
from harness.records.records import AT_LEAST, AT_MOST, FAILED, OBSERVED, UNKNOWN
from harness.scenario import Load, Scenario, Server
from harness.scenario.check_syntax import (
    OPERATORS,
    SLO_METRICS,
    UNITS,
    Check,
    Slo,
    check_problem,
    move_check,
    parse_check,
    slo_sets,
)
from harness.scenario.file import load_scenario
from tests.support.made_summaries import row_of
from tests.support.wording import Wording

TTFT_1S = Slo(text="ttft<=1s", latency="ttft", operator="<=", bound_s=1.0)
TPOT_50MS = Slo(text="tpot<50ms", latency="tpot", operator="<", bound_s=0.05)
SLOS = "ttft<=1s, tpot<50ms"


def row(server: str = "a", load: str = "x", **changes: object) -> Row:
    values: dict[str, Any] = {
        "sent": 200, "succeeded": 200, "failed": 0, "unfinished": 0, "wall": 12.5, "output_tok_s": 150.0,
        "requests_per_s": 3.0, "gap": Distribution(n=5000, mean=0.05),
        "ttft": Distribution(n=200, mean=0.5, min=0.1, max=3.0, p50=0.4, p90=0.9, p95=1.5),
    }  # fmt: skip
    pooled = Numbers(**(values | changes))
    return row_of(pooled, server, load)


def against_a(side: str, ratio: float, low: float | None) -> Verdict:
    return Verdict(
        side=side, baseline="a / x", metric="wall", ratio=ratio, low=low, high=None if low is None else 1.7, p=0.01,
        n=(5, 5), word="faster",
    )  # fmt: skip


def comparison(*verdicts: Verdict) -> Comparison:
    return Comparison(metric="wall", comparisons=1, noise_floor=0.02, noise_source=[], verdicts=list(verdicts))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("error_rate == 0", {"metric": "error_rate", "operator": "==", "bound": 0.0}),
        ("error_rate<=2.5%", {"metric": "error_rate", "operator": "<=", "bound": 0.025}),
        ("  ttft_p95 <= 2s ", {"metric": "ttft_p95", "operator": "<=", "bound": 2.0}),
        ("tpot_mean < 50 ms", {"metric": "tpot_mean", "operator": "<", "bound": 0.05}),
        ("vllm/five-at-a-time: speedup >= 1.5",
         {"server": "vllm", "load": "five-at-a-time", "metric": "speedup", "operator": ">=", "bound": 1.5}),
        ("goodput(ttft<=1s,tpot < 50 ms) >= 0.95",
         {"metric": "attainment", "slos": (TTFT_1S, TPOT_50MS), "operator": ">=", "bound": 0.95}),
        ("attainment(ttft<=1s) >= 95%", {"metric": "attainment", "slos": (TTFT_1S,), "operator": ">=", "bound": 0.95}),
        ("goodput(ttft<=1s) > 2.5 req/s", {"metric": "goodput", "slos": (TTFT_1S,), "operator": ">", "bound": 2.5}),
        ("a/x: output_tok_s >= 0.97*baseline",
         {"server": "a", "load": "x", "metric": "output_tok_s", "operator": ">=", "bound": 0.97, "relative": True}),
        ("ttft_p95 <= baseline", {"metric": "ttft_p95", "operator": "<=", "bound": 1.0, "relative": True}),
        ("output_tok_s > 1e2", {"metric": "output_tok_s", "operator": ">", "bound": 100.0}),
    ],
)  # fmt: skip
def test_the_grammar(text: str, fields: dict[str, Any]) -> None:
    assert parse_check(text) == Check(text=text.strip(), **fields)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ttft_p96 <= 2s", "'ttft_p96'"),
        ("errorrate == 0", "'error_rate'"),
        ("error_rate = 0", "'='"),
        ("wall < ten s", "'ten s'"),
        ("wall < 10", "'ms'"),
        ("error_rate < 1 s", "'s'"),
        ("goodput >= 0.95", " attainment "),
        *((f"{rate}_p90 >= 5", "'tpot_p90 <= 50ms'") for rate in ("output_tok_s", "user_tok_s")),
        ("input_tok_s_p95 >= 5", "'ttft_p95 <= 2s'"),
        ("goodput(ttft_p95<=1s) >= 1",
         "'ttft_p95'"),
        ("goodput(ttft<=1s tpot<=1s) >= 1", "'s tpot<=1s'"),
        ("goodput(ttft<=1s) >= 2",
         "'req/s'"),
        ("wall < baseline * 2", "'baseline * 2'"),
        ("speedup >= 0.9 * baseline", "'speedup'"),
        ("ttft_p95 <= 3", "ttft_p95 "),
        ("A/b: wall < 1s", "'A/b'"),
        ("wall(ttft<=1s) < 3 s", " attainment "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_check(text: str, error: str, wording: Wording) -> None:
    with pytest.raises(ValueError) as raised:
        parse_check(text)
    told = str(raised.value)
    assert told.startswith(f"check '{text}': ") and error in told.removeprefix(f"check '{text}': ")
    wording(told)


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        check = parse_check(text)
    except ValueError:
        return
    assert check.metric in UNITS


@given(
    st.sampled_from(sorted(UNITS)), st.sampled_from(sorted(OPERATORS)), st.floats(0, 1),
    st.sampled_from(["", " ", "  "]), st.sampled_from([None, ("a", "x"), ("no-limit", "5")]),
)  # fmt: skip
def test_every_metric_is_read_back(
    metric: str, sign: str, number: float, blank: str, selection: tuple[str, str] | None
) -> None:
    slos = f"{blank}(ttft{blank}<=1{blank}s,{blank}tpot<50ms{blank}){blank}" if metric in SLO_METRICS else ""
    head = f"{selection[0]}/{selection[1]}:{blank}" if selection else ""
    for unit, per_one in UNITS[metric].items():
        check = parse_check(f"{head}{metric}{slos}{blank}{sign}{blank}{number!r}{blank}{unit}")
        share = metric == "goodput" and unit != "req/s"
        assert (check.metric, check.operator) == ("attainment" if share else metric, sign)
        assert (check.bound, check.relative) == (number / per_one, False)
        assert (check.server, check.load) == (selection or (None, None))
        assert check.slos == ((TTFT_1S, TPOT_50MS) if slos else ())
    if metric != "speedup":
        check = parse_check(f"{head}{metric}{slos}{sign}{blank}{number!r}{blank}*{blank}baseline{blank}")
        assert (check.metric, check.operator, check.bound, check.relative) == (metric, sign, number, True)


def result_of(text: str, *rows: Row, against: Comparison | None = None) -> CheckResult:
    return evaluate([text], rows or (row(),), against)[0]


def outcome(text: str, *rows: Row, against: Comparison | None = None) -> tuple[str, str | None, str]:
    """Status, code and evidence."""
    result = result_of(text, *rows, against=against)
    return result.status, result.code, evidence(result.evidence)


def test_a_check_holds_for_every_row_or_fails_with_those_that_break_it(wording: Wording) -> None:
    slow, slower = row("b", wall=20.0), row("c", wall=25.0)
    broken = result_of("wall <= 15s", row(), slow, slower)
    assert evidence(broken.evidence) == "b / x: 20 s; c / x: 25 s"
    assert (broken.status, broken.code, broken.row, broken.value, broken.bound) == (
        "failed", "broken", "c / x", 25.0, 15.0,
    )  # fmt: skip
    met = result_of("wall <= 30s", row(), slow)
    assert "20" in evidence(met.evidence)
    wording(evidence(met.evidence))
    assert (met.status, met.code, met.row, met.value, met.bound) == ("passed", "met", "b / x", 20.0, 30.0)
    assert outcome("a/x: wall <= 15s", row(), slow) == ("passed", "met", "a / x: 12.5 s")


# p95 of 200 requests with its interval; of as many the interval of a p99 has no upper end.
TTFT = Distribution(n=200, mean=0.5, p95=1.5, intervals={"p95": (1.2, 2.0), "p99": (1.9, None)})


def test_a_percentile_is_decided_by_its_whole_interval(wording: Wording) -> None:
    known = row(ttft=TTFT)
    passed = result_of("ttft_p95 <= 2s", known)
    assert passed == CheckResult(
        check="ttft_p95 <= 2s", status="passed", code="met", row="a / x", value=1.5, low=1.2, high=2.0, bound=2.0,
        evidence=passed.evidence,
    )  # fmt: skip
    wording(evidence(passed.evidence))
    undecided = result_of("ttft_p95 < 2s", known)
    assert (undecided.status, undecided.code, undecided.bound) == ("inconclusive", "too_close", 2.0)
    assert (undecided.value, undecided.low, undecided.high) == (1.5, 1.2, 2.0)
    assert undecided.more_requests == 60  # 2 s is the 196th of 200 values, so 98 % are within it
    assert "1.2" in evidence(undecided.evidence) and "60" in evidence(undecided.evidence)
    wording(evidence(undecided.evidence))
    assert outcome("ttft_p95 <= 1.19s", known)[:2] == ("failed", "broken")
    assert outcome("ttft_p95 > 1.19s", known)[:2] == ("passed", "met")
    assert outcome("ttft_p95 >= 2.01s", known)[:2] == ("failed", "broken")
    at_bound = result_of("ttft_p95 <= 1.5s", known)
    assert (at_bound.status, at_bound.more_requests) == ("inconclusive", None)
    assert "100,000" in evidence(at_bound.evidence)
    wording(evidence(at_bound.evidence))
    assert outcome("ttft_p95 == 1.5s", known) == ("passed", "met", "a / x: 1.5 s")


def test_a_percentile_that_is_not_printed_can_break_a_bound_and_meet_it(wording: Wording) -> None:
    few = row(ttft=TTFT)
    failed = result_of("ttft_p99 <= 1.8s", few)
    assert (failed.status, failed.value, failed.low, failed.high) == ("failed", None, 1.9, None)
    assert evidence(failed.evidence) == "a / x: above 1.9 s"
    undecided = result_of("ttft_p99 <= 60s", few)
    assert (undecided.status, undecided.code, undecided.more_requests) == ("inconclusive", "too_few_requests", 462)
    meets = row(ttft=Distribution(n=100, intervals={"p95": (1.0, 1.2)}))
    met = result_of("ttft_p95 <= 2s", meets)
    assert (met.status, met.code, met.value, met.low, met.high) == ("passed", "met", None, 1.0, 1.2)
    wording(evidence(met.evidence))
    assert result_of("ttft_p95 <= 1.1s", meets).more_requests == 30


def measured(*parts: tuple[int, float, int]) -> Row:
    """A row of requests in random order: so many, their latency in seconds and their state."""
    order = np.random.default_rng(1).permutation(sum(n for n, _, _ in parts))
    values = np.concatenate([np.full(n, value_s) for n, value_s, _ in parts])[order]
    states = np.concatenate([np.full(n, state, dtype=np.int8) for n, _, state in parts])[order]
    failed, cut = (sum(n for n, _, state in parts if state == wanted) for wanted in (FAILED, AT_LEAST))
    sample = LatencySample(np.arange(len(order), dtype=np.float64), values, states)
    sent = len(order)
    return row(sent=sent, succeeded=sent - failed - cut, failed=failed, unfinished=cut, ttft=distribution([sample]))


def test_failed_requests_are_misses_of_a_percentile() -> None:
    third = measured((160, 0.05, OBSERVED), (80, math.inf, FAILED))
    for text in ("ttft_p95 <= 1s", "ttft_p90 <= 60s"):
        found = result_of(text, third)
        assert (found.status, found.code, found.value) == ("failed", "broken", None)
        assert found.evidence[0].values["failed"] == 80 and found.evidence[0].values["requests"] == 240
    assert third.pooled.ttft.p50 == 0.05, "the displayed percentile is that of the successful requests"
    assert result_of("ttft_p50 <= 1s", third).status == "passed"
    some = measured((980, 0.05, OBSERVED), (20, math.inf, FAILED))
    assert (result_of("ttft_p95 <= 1s", some).status, result_of("ttft_p95 <= 1s", some).value) == ("passed", 0.05)
    edge = result_of("ttft_p95 <= 1s", measured((570, 0.05, OBSERVED), (30, math.inf, FAILED)))
    assert (edge.status, edge.code) == ("inconclusive", "too_close")
    assert result_of("ttft_p95 <= 1s", measured((240, math.inf, FAILED))).status == "failed"
    assert result_of("ttft_p95 <= 1s", measured((2, math.inf, FAILED))).status == "failed"
    few = result_of("ttft_p50 <= 1s", measured((3, math.inf, FAILED)))
    assert (few.status, few.more_requests) == ("inconclusive", 11)


def test_failed_requests_are_misses_relative_to_a_baseline() -> None:
    reference = Reference(run="base", rows=[measured((240, 0.05, OBSERVED))])
    for failed, status in ((80, "failed"), (2, "passed")):
        here = measured((480 - failed, 0.05, OBSERVED), (failed, math.inf, FAILED))
        (found,) = evaluate(["ttft_p95 <= 2 * baseline"], [here], None, reference)
        assert found.status == status


def test_requests_cut_above_the_bound_are_misses_and_not_unknown() -> None:
    cut = measured((66, 0.05, OBSERVED), (52, 13.7, AT_LEAST))
    found = result_of("ttft_p50 <= 1s", cut)
    assert (found.code, found.more_requests is not None) == ("too_close", True)
    half = measured((59, 0.05, OBSERVED), (59, 13.7, AT_LEAST))
    assert result_of("ttft_p50 <= 1s", half).code == "too_close"
    assert result_of("ttft_p50 <= 20s", half).code == "unknown_requests"
    assert result_of("ttft_p50 <= 20s", half).more_requests is None
    broken = result_of("ttft_p95 <= 1s", half).evidence[0].values
    assert broken["above"] == pytest.approx(13.7) and "interval" not in broken
    mean = result_of("ttft_mean <= 1s", half)
    assert mean.status == "failed" and "interval" not in mean.evidence[0].values


def test_no_number_of_requests_settles_what_is_unknown_by_nature() -> None:
    half = measured((120, 0.05, OBSERVED), (120, math.inf, UNKNOWN))
    for text in ("ttft_p50 <= 1s", "ttft_p95 <= 1s", "ttft_p50 <= 1ms"):
        found = result_of(text, half)
        assert (found.code, found.more_requests) == ("unknown_requests", None)
        assert found.evidence[0].values["unknown"] == 120
        assert found.evidence[0].values.get("interval") != [None, None]
    none = result_of("ttft_p95 <= 1s", measured((200, math.inf, UNKNOWN)))
    assert (none.code, none.evidence[0].values["why"]["values"]["of"]) == ("no_value", 200)
    assert outcome(f"attainment({SLOS}) >= 0.95", row_meeting(0, unknown=200))[1] == "unknown_requests"


def test_failed_weighs_more_than_inconclusive_and_that_more_than_passed(wording: Wording) -> None:
    good = row("good", ttft=Distribution(n=200, p95=0.5, intervals={"p95": (0.4, 0.6)}))
    bad = row("bad", ttft=Distribution(n=200, p95=5.0, intervals={"p95": (4.0, 6.0)}))
    unsure, few = row("unsure", ttft=TTFT), row("few", ttft=Distribution(n=20, intervals={"p95": (0.1, None)}))
    check = "ttft_p95 < 2s"
    assert (result_of(check, good, unsure, bad).status, result_of(check, good, unsure, bad).row) == (
        "failed",
        "bad / x",
    )
    wording(evidence(result_of(check, good, unsure, bad).evidence))
    several = result_of(check, good, few, unsure)
    assert (several.status, several.row, several.more_requests) == ("inconclusive", "few / x", 110)
    assert evidence(several.evidence).startswith("few / x: needs 130 ")
    assert "; unsure / x: 1.5 s" in evidence(several.evidence)
    assert "500" in outcome(check, good, good)[2] and "400" in outcome(check, good, good)[2]
    wording(outcome(check, good, good)[2])


@pytest.mark.parametrize(
    ("text", "code", "evidence"),
    [
        ("ttft_p95 <= 1500ms", "met", "a / x: 1.5 s"),
        ("ttft_p95 < 1.5s", "broken", "a / x: 1.5 s"),
        ("ttft_p50 > 0.3 s", "met", "a / x: 400 ms"),
        ("ttft_p50 >= 0.5 s", "broken", "a / x: 400 ms"),
        ("ttft_p99 < 10s", "too_few_requests", "a / x: needs 662 "),
        ("ttfo_mean < 10s", "no_value", "a / x: "),
        ("e2e_sched_p50 < 10s", "no_value", "a / x: "),
        ("gap_p99 < 1s", "too_few_requests", "a / x: needs 662 "),
        ("error_rate == 0", "met", "a / x: 0 %"),
        ("output_tok_s >= 151", "broken", "a / x: 150"),
        ("requests_per_s == 3", "met", "a / x: 3"),
        ("b/x: wall < 1s", "no_row", ""),
        ("nonsense", "unreadable", "check 'nonsense': "),
    ],
)  # fmt: skip
def test_values_and_evidence(text: str, code: str, evidence: str, wording: Wording) -> None:
    status = {"met": "passed", "broken": "failed", "no_row": "failed", "unreadable": "failed"}.get(code, "inconclusive")
    assert outcome(text)[:2] == (status, code) and outcome(text)[2].startswith(evidence)
    wording(outcome(text)[2])


def test_speedup_is_that_of_the_comparison(wording: Wording) -> None:
    rows = (row(), row("b"))
    known = comparison(against_a("b / x", 1.6, 1.5))
    met = result_of("speedup >= 1.5", *rows, against=known)
    assert (met.status, met.code, met.row, met.value, met.low) == ("passed", "met", "b / x", 1.6, 1.5)
    wording(evidence(met.evidence))
    assert outcome("speedup >= 1.8", *rows, against=known)[:2] == ("failed", "broken")
    close = result_of("speedup >= 1.55", *rows, against=known)
    assert (close.status, close.code, close.more_requests) == ("inconclusive", "too_close", None)
    wording(evidence(close.evidence))
    wording(evidence(result_of("a/x: speedup >= 1", *rows, against=known).evidence))
    wording(evidence(result_of("speedup >= 1", *rows).evidence))
    one_run = msgspec.structs.replace(against_a("b / x", 1.6, 1.5), provisional=True)
    for bound, expected in (
        (1.5, ("passed", "met")),
        (1.8, ("inconclusive", "provisional")),
        (2.2, ("failed", "broken")),
    ):
        assert outcome(f"speedup >= {bound}", *rows, against=comparison(one_run))[:2] == expected


def row_meeting(
    met: int, unknown: int = 0, goodput: float | None = 2.5, sent: int = 200, effect: float | None = 1.0
) -> Row:
    share = met / (sent - unknown) if sent > unknown else None
    one_set = SloAttainment(met=met, unknown=unknown, attainment=share, goodput=goodput)
    ttft, tpot = Distribution(n=sent, effect=effect), Distribution(n=sent, effect=effect and 1.0)
    return row(sent=sent, succeeded=sent, slos={SLOS: one_set}, ttft=ttft, tpot=tpot)


def test_attainment_and_goodput(wording: Wording) -> None:
    check = f"goodput({SLOS}) >= 0.95"
    met = result_of(check, row_meeting(198))
    assert (met.status, met.code, met.row, met.value) == ("passed", "met", "a / x", 0.99)
    assert (met.low, met.high) == pytest.approx((0.969, 0.998), abs=0.0005)
    wording(evidence(met.evidence))
    close = result_of(check, row_meeting(192))
    assert (close.status, close.code, close.more_requests) == ("inconclusive", "too_close", 2583)
    assert outcome(check, row_meeting(182))[:2] == ("failed", "broken")
    assert outcome(check, row_meeting(60, sent=60))[:2] == ("passed", "met")
    few = result_of(check, row_meeting(59, sent=59))
    assert (few.status, few.code, few.more_requests) == ("inconclusive", "too_few_requests", 1)
    assert "100" in evidence(few.evidence)
    wording(evidence(few.evidence))
    broken = result_of(check, row_meeting(10, sent=20))
    assert (broken.status, broken.code, broken.row, broken.value) == ("failed", "broken", "a / x", 0.5)
    assert (broken.low, broken.high) == pytest.approx((0.302, 0.698), abs=0.0005)
    wording(evidence(broken.evidence))
    assert outcome(check, row_meeting(150, unknown=2))[:2] == ("failed", "broken")
    assert outcome(check, row_meeting(199, unknown=1))[:2] == ("passed", "met")
    wording(outcome(check, row_meeting(150, unknown=50)))
    assert outcome(check, row_meeting(198, effect=3.0))[:2] == ("inconclusive", "too_close")
    assert outcome(f"attainment({SLOS}) == 1", row_meeting(199, unknown=1))[:2] == ("inconclusive", "no_value")
    assert outcome(f"attainment({SLOS}) >= 1", row_meeting(199, unknown=1))[:2] == ("inconclusive", "unknown_requests")
    wording(evidence(result_of(check, row()).evidence))
    rate = f"goodput({SLOS}) >= 2.4 req/s"
    assert outcome(rate, row_meeting(1)) == ("passed", "met", "a / x: 2.5 req/s")
    assert outcome(rate, row_meeting(1, goodput=None))[:2] == ("inconclusive", "no_value")


def test_all_and_none_are_statements_on_the_requests_of_the_run() -> None:
    for text, met, status in (
        ("== 1", 200, "passed"), (">= 100%", 200, "passed"), (">= 1", 199, "failed"), ("<= 0", 0, "passed"),
        ("== 0.5", 100, "passed"), ("== 0.5", 101, "failed"),
    ):  # fmt: skip
        result = result_of(f"attainment({SLOS}) {text}", row_meeting(met))
        assert (result.status, result.low, result.high) == (status, None, None), text


def test_relative_to_the_row_that_the_scenario_compares_with(wording: Wording) -> None:
    rows = (row(output_tok_s=150.0), row("b", output_tok_s=147.0))
    known = comparison(against_a("b / x", 1.0, 0.9))
    assert outcome("output_tok_s >= 0.8 * baseline", *rows, against=known)[:2] == ("passed", "met")
    close = result_of("output_tok_s >= 0.99 * baseline", *rows, against=known)
    assert (close.status, close.code, close.value) == ("inconclusive", "too_close", 147.0)
    half = 2.7764 * 0.04 * 2**0.5  # without repeats the spread is assumed
    assert (close.low, close.high) == pytest.approx((147 * math.exp(-half), 147 * math.exp(half)), rel=1e-4)
    wording(evidence(result_of("a/x: wall <= baseline", *rows, against=known).evidence))
    wording(evidence(result_of("wall <= baseline", *rows).evidence))


def test_relative_to_another_run(wording: Wording) -> None:
    before = Reference(run="r1", rows=[row(), row("b", wall=None, ttft=Distribution(n=100))])
    now = (row(wall=13.0, ttft=Distribution(n=200, p95=1.8)), row("b"), row("c"))

    def against(text: str, reference: Reference = before) -> CheckResult:
        return evaluate([text], now, None, reference)[0]

    close = against("a/x: wall <= 1.05 * baseline")
    assert (close.status, close.row, close.value, close.bound) == ("inconclusive", "a / x", 13.0, 13.125)
    assert (close.low, close.high) == pytest.approx((11.111, 15.210), rel=1e-3), "equal runs vary by 4 %"
    assert [against(f"a/x: wall <= {k} * baseline").code for k in (1.25, 0.7, 0.85)] == ["met", "broken", "provisional"]
    assert against("a/x: requests_per_s >= 0.8 * baseline").status == "passed"
    slower = against("a/x: ttft_p95 <= 1.1 * baseline")
    half = 2.776 * 0.04 * math.sqrt(2)
    assert (slower.status, slower.code) == ("inconclusive", "too_close")
    assert (slower.low, slower.high) == pytest.approx((1.8 * math.exp(-half), 1.8 * math.exp(half)), rel=1e-3)
    assert [against(f"a/x: ttft_p95 <= {k} * baseline").code for k in (1.5, 0.7, 1.0)] == [
        "met",
        "broken",
        "provisional",
    ]
    equal = against("a/x: error_rate <= baseline")
    assert (equal.status, equal.code, equal.row, equal.value, equal.bound) == ("passed", "met", "a / x", 0.0, 0.0)
    wording(evidence(equal.evidence))
    missing = against("b/x: ttft_p95 <= baseline")
    assert missing.code == "no_baseline" and "130" in evidence(missing.evidence)
    wording(evidence(missing.evidence))
    wording(evidence(against("c/x: wall <= baseline").evidence))
    unlike = Reference(run="r1", refused=because("run_error", "they differ"))
    wording(evidence(against("a/x: wall <= baseline", unlike).evidence))


def test_a_check_of_two_runs_uses_the_verdict_on_them() -> None:
    verdict = Verdict(
        side="a / x", baseline="r1", metric="wall", ratio=0.917, low=0.775, high=1.073, p=0.3, n=(1, 1),
        word="inconclusive", provisional=True, basis="runs", unit="runs",
    )  # fmt: skip
    before = Reference(run="r1", rows=[row(wall=10.0)])
    known = Comparison(metric="wall", comparisons=1, noise_floor=0.02, noise_source=[], verdicts=[verdict])
    texts = ["wall <= 1.05 * baseline", "speedup >= 0.9", "wall <= 1.3 * baseline", "speedup >= 0.7"]
    results = evaluate(texts, [row(wall=10.9)], known, before)
    assert [result.code for result in results] == ["too_close", "too_close", "met", "met"]
    assert (results[0].low, results[0].high) == pytest.approx((10 / 1.073, 10 / 0.775))
    assert (results[1].low, results[1].high) == (0.775, 1.073)


def test_a_percentile_relative_to_another_run_has_the_interval_of_the_verdict_on_it() -> None:
    verdict = Verdict(
        side="a / x", baseline="r1", metric="ttft_p95", ratio=0.8, low=0.5, high=0.9, p=0.3, n=(1, 1),
        word="slower", basis="runs", unit="runs",
    )  # fmt: skip
    before = Reference(run="r1", rows=[row(ttft=Distribution(n=200, p95=1.0))], ratios=[verdict])

    def against(text: str, now: Distribution) -> CheckResult:
        return evaluate([text], [row(ttft=now)], None, before)[0]

    text, known = "ttft_p95 <= 1.5 * baseline", Distribution(n=200, p95=1.25)
    close = against(text, known)
    assert (close.status, close.code, close.value, close.bound) == ("inconclusive", "too_close", 1.25, 1.5)
    assert (close.low, close.high) == pytest.approx((1 / 0.9, 2.0))
    assert against("ttft_p95 <= 1.1 * baseline", known).status == "failed"
    assert against("ttft_p95 <= 2 * baseline", known).status == "passed"
    # Unknown requests count as met and as missed.
    unknown = Distribution(n=200, p95=1.25, unknown=20, intervals={"p95": (1.05, None)})
    assert (against(text, unknown).low, against(text, unknown).high) == (1.05, None)
    assert against("ttft_p95 <= 1.01 * baseline", unknown).status == "failed"
    assert against("ttft_p95 <= 9 * baseline", unknown).status == "inconclusive"


def test_the_load_generators_delays_widen_the_interval_of_a_ratio() -> None:
    late = {"ttft_p95": (0.1, 0.25)}
    sample = Distribution(n=200, p95=1.0, intervals={"p95": (0.9, 1.2)})
    before = Reference(run="r1", rows=[row(ttft=sample)])
    plain, below, above = (
        evaluate(["ttft_p95 <= 1.1 * baseline"], [now], None, base)[0]
        for now, base in (
            (row(ttft=sample), before),
            (msgspec.structs.replace(row(ttft=sample), client_error=late), before),
            (
                row(ttft=sample),
                Reference(run="r1", rows=[msgspec.structs.replace(row(ttft=sample), client_error=late)]),
            ),
        )
    )
    assert plain.low is not None and plain.high is not None
    assert (below.low, below.high) == pytest.approx((plain.low * 0.9, plain.high * 1.25))
    assert (above.low, above.high) == pytest.approx((plain.low / 1.25, plain.high / 0.9))


def test_checks_that_the_planned_requests_cannot_decide() -> None:
    def planned(*checks: str, repeats: int = 5, **load: Any) -> list[tuple[str, int, int]]:
        loads = {"x": Load(user="batch", requests=20), "y": Load(user="batch", **(load or {"requests": 30}))}
        made = Scenario(version=1, question="?", servers={"a": Server(template="simulated")}, model="m", loads=loads,
                        checks=list(checks), repeats=repeats)  # fmt: skip
        return [(one.row, one.planned, one.near) for one in undecidable_checks(made)]

    assert planned("ttft_p95 <= 1s", "error_rate == 0", "ttft_mean < 1s", "wall < 9s", repeats=2) == [("a / x", 40, 60)]
    assert planned("ttft_p95 <= 1s", repeats=3) == []
    assert planned("ttft_p99 <= 1s", repeats=14) == [("a / x", 280, 299)]
    assert planned("a/y: ttft_p95 <= 1.1 * baseline", "a/y: gap_p99 < 1s") == [("a / y", 150, 662)]
    assert planned(f"goodput({SLOS}) >= 0.95", f"attainment({SLOS}) >= 1", repeats=2) == [("a / x", 40, 60)]
    # A stall hits all requests in flight, so half of them count as one.
    assert planned("a/y: ttft_p95 <= 1s", repeats=1, requests=730, in_flight=25) == [("a / y", 730, 731)]
    assert planned("a/y: ttft_p95 <= 1s", repeats=1, requests=731, in_flight=25) == []
    assert planned("a/y: ttft_p95 <= 1s", duration_s=10.0) == []  # how many it sends is not known
    for requests, certain in ((59, True), (60, False)):
        load = {"x": Load(user="batch", requests=requests, in_flight=20)}
        made = Scenario(version=1, question="?", servers={"a": Server(template="simulated")}, model="m", loads=load,
                        checks=["ttft_p95 <= 1s"], repeats=1)  # fmt: skip
        assert [(one.certain, one.needed, one.near) for one in undecidable_checks(made)] == [(certain, 80, 585)]


@pytest.mark.parametrize("n", [12, 58, 62])
@pytest.mark.parametrize("in_flight", [1, 4, 10])
def test_the_numbers_before_and_after_a_run_are_the_fewest_that_the_rule_accepts(n: int, in_flight: int) -> None:
    """Requests of 27 to 36 ms, checked far below the bound, below it and near it."""
    values = np.linspace(0.027, 0.036, n)[np.random.default_rng(n).permutation(n)]
    sample = observed(values)
    load = Load(user="batch", requests=n, in_flight=in_flight)
    made = Scenario(version=1, question="?", servers={"a": Server(template="simulated")}, model="m", loads={"x": load},
                    checks=["ttft_p95 <= 2s"], repeats=1)  # fmt: skip
    planned = next(undecidable_checks(made), None)
    for bound_s in (2.0, 0.1, 0.05):
        found = share_test.decide_share([sample], 0.95, bound=bound_s, in_flight=in_flight)
        spread = share_test.log_spread([sample])
        assert spread is not None

        def passes(size: int, effect: float = found.effect, to_s: float = bound_s, spread: Any = spread) -> bool:
            as_far = share_test.far_decision(msgspec.structs.replace(spread, n=size), 0.95, effect, to_s) == "pass"
            return as_far or share_test.decide(size, 0, size, 0.95, effect) == "pass"

        fewest = next(size for size in range(n, 2000) if passes(size))
        assert (found.decision == "pass") == (fewest == n) and found.needed == (None if fewest == n else fewest)
        if planned is not None and found.effect == max(1.0, in_flight / 2):
            assert planned.needed <= fewest <= planned.near


def test_what_the_command_line_makes_of_checks(wording: Wording) -> None:
    texts = [f"goodput({SLOS}) >= 0.95", "error_rate == 0", "nonsense", f"a/x: attainment( {SLOS} ) < 1"]
    assert slo_sets(texts) == {SLOS: (TTFT_1S, TPOT_50MS)}
    # The selection follows to another server.
    assert move_check("vllm/x: wall < 1 s", "running") == "running/x: wall < 1 s"
    assert move_check("goodput(ttft<=1s) > 1 req/s", "running") == "goodput(ttft<=1s) > 1 req/s"
    # A check must be one that the scenario could have.
    assert "'b'" in (check_problem("b/x: wall < 1 s", ["a"], ["x"]) or "")
    wording(check_problem("b/x: wall < 1 s", ["a"], ["x"]))
    assert check_problem("wall < 1", ["a"], ["x"]) is not None
    assert check_problem("a/x: wall < 1 s", ["a"], ["x"]) is None


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_checks_of_shipped_scenarios_can_be_decided(path: Path) -> None:
    assert list(undecidable_checks(load_scenario(path))) == []


# Far below the bound, and latencies of which only an upper bound is known.


def test_a_p95_of_92_ms_meets_a_bound_of_2_s_and_says_why(wording: Wording) -> None:
    dice = np.random.default_rng(3)
    ttft_s = 0.06 * np.exp(0.25 * dice.standard_normal(180))
    sample = LatencySample(np.arange(180.0), ttft_s, np.full(180, OBSERVED, dtype=np.int8))
    dependent = row(sent=180, succeeded=180, ttft=distribution([sample], 1.0, 16.0))
    assert dependent.pooled.ttft.effect == 8.0
    found = result_of("ttft_p95 <= 2s", dependent)
    assert (found.status, found.code, found.high) == ("passed", "met", None)
    why = found.evidence[0].values["decision"]
    assert why["code"] == "far_below"
    assert why["values"] == {"requests": 180, "end": pytest.approx(float(ttft_s.max()))}
    assert "180" in evidence(found.evidence)
    wording(evidence(found.evidence))
    assert "above" not in found.evidence[0].values
    few = row(sent=60, succeeded=60, ttft=distribution([observed(ttft_s[:60])], 1.0, 4.0))
    passed = result_of("ttft_p95 <= 2s", few)  # a p95 needs 130 requests: only its lower end is known
    assert (passed.status, passed.value, "above" in passed.evidence[0].values) == ("passed", None, False)
    assert result_of("ttft_p95 > 2s", dependent).status == "failed"
    assert result_of("ttft_p95 <= 200ms", dependent).code == "too_close"
    few = row(sent=50, succeeded=50, ttft=distribution([observed(ttft_s[:50])], 1.0, 4.0))
    near = result_of("ttft_p95 <= 2s", few)
    assert (near.status, near.code, near.more_requests) == ("inconclusive", "too_few_requests", 10)


def test_attainment_far_from_the_bounds_of_its_slos(wording: Wording) -> None:
    def meeting(spread: LogSpread) -> Row:
        one_set = SloAttainment(met=120, attainment=1.0, effect=8.0, spread=spread)
        return row(sent=120, succeeded=120, slos={SLOS: one_set})

    check = f"attainment({SLOS}) >= 95%"
    far = result_of(check, meeting(LogSpread(n=120, mean=-3.0, sd=0.2, min=0.03, max=0.09)))
    assert (far.status, far.evidence[0].values["decision"]["code"]) == ("passed", "far_below")
    assert "120" in evidence(far.evidence)
    wording(evidence(far.evidence))
    assert result_of(check, meeting(LogSpread(n=120, mean=-0.3, sd=0.2, min=0.4, max=0.9))).status == "inconclusive"


def test_a_tpot_of_which_an_upper_bound_is_known_decides_a_percentile(wording: Wording) -> None:
    """As of answers that a proxy sent in one piece: E2E / tokens is known, and TPOT is not."""
    values_s = 0.02 * np.exp(0.2 * np.random.default_rng(4).standard_normal(200))
    sample = LatencySample(np.arange(200.0), values_s, np.full(200, AT_MOST, dtype=np.int8))
    bundled = row(tpot=distribution([sample], 1.0, 1.0))
    assert (bundled.pooled.tpot.n, bundled.pooled.tpot.at_most, bundled.pooled.tpot.p95) == (0, 200, None)
    found = result_of("tpot_p95 <= 60ms", bundled)
    assert (found.status, found.code, found.value, found.low) == ("passed", "met", None, None)
    assert "200" in evidence(found.evidence)
    wording(evidence(found.evidence))
    open_one = result_of("tpot_p95 <= 20ms", bundled)
    assert (open_one.status, open_one.code, open_one.more_requests) == ("inconclusive", "unknown_requests", None)
    some = LatencySample(sample.sent_s, values_s, np.where(np.arange(200) % 2, OBSERVED, AT_MOST).astype(np.int8))
    assert result_of("tpot_p95 <= 60ms", row(tpot=distribution([some], 1.0, 1.0))).status == "passed"
    assert result_of("tpot_p95 <= 5ms", row(tpot=distribution([some], 1.0, 1.0))).status != "passed"
