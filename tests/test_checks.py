"""Checks: grammar, and what they say about rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks import LATENCIES, OPERATORS, STATISTICS, UNITS, Check, evaluate, parse_check
from harness.summary import CheckResult, Comparison, Distribution, Numbers, Row, Verdict

NONE = Distribution(n=0)


def row(server: str = "a", load: str = "x", **changes: object) -> Row:
    values: dict[str, object] = {
        "sent": 200,
        "succeeded": 200,
        "failed": 0,
        "unfinished": 0,
        "wall_s": 12.5,
        "output_tok_s": 150.0,
        "requests_per_s": 3.0,
        "ttft_s": Distribution(n=200, mean=0.5, least=0.1, most=3.0, p50=0.4, p90=0.9, p95=1.5),
        "ttfo_s": NONE,
        "tpot_s": NONE,
        "e2e_s": NONE,
        "chunk_gap_s": Distribution(n=5000, mean=0.05),
        "send_lag_s": NONE,
    }
    return Row(
        server=server,
        load=load,
        cells=[],
        wall_s=[],
        output_tok_s=[],
        pooled=Numbers(**(values | changes)),  # type: ignore[arg-type]
    )


def against_a(side: str, ratio: float, low: float | None) -> Verdict:
    return Verdict(
        side=side, baseline="a / x", metric="wall_s", ratio=ratio, low=low, high=ratio, p=0.01, n=(5, 5), word="faster",
        sentence="",
    )  # fmt: skip


def comparison(*verdicts: Verdict) -> Comparison:
    return Comparison(metric="wall_s", comparisons=1, noise_floor=0.02, noise_source="assumed", verdicts=list(verdicts))


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("error_rate == 0", Check(text="error_rate == 0", metric="error_rate", operator="==", bound=0.0)),
        ("error_rate<=2.5%", Check(text="error_rate<=2.5%", metric="error_rate", operator="<=", bound=0.025)),
        ("  ttft_p95 <= 2s ", Check(text="ttft_p95 <= 2s", metric="ttft_p95", operator="<=", bound=2.0)),
        ("tpot_mean < 50 ms", Check(text="tpot_mean < 50 ms", metric="tpot_mean", operator="<", bound=0.05)),
        (
            "vllm/five-at-a-time: speedup >= 1.5",
            Check(
                text="vllm/five-at-a-time: speedup >= 1.5",
                server="vllm",
                load="five-at-a-time",
                metric="speedup",
                operator=">=",
                bound=1.5,
            ),
        ),
        ("output_tok_s > 1e2", Check(text="output_tok_s > 1e2", metric="output_tok_s", operator=">", bound=100.0)),
    ],
)
def test_the_grammar(text: str, check: Check) -> None:
    assert parse_check(text) == check


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "check '', at character 1: '' is not a metric; such as ttft_p95, error_rate or speedup"),
        (
            "ttft_p96 <= 2s",
            "check 'ttft_p96 <= 2s', at character 1: 'ttft_p96' is not a metric; known: "
            "ttft_p50, ttft_p90, ttft_p95, ttft_p99, ttft_mean",
        ),
        ("errorrate == 0", "check 'errorrate == 0', at character 1: 'errorrate' is not a metric; "
         "did you mean 'error_rate'?"),
        (
            "error_rate = 0",
            "check 'error_rate = 0', at character 12: '=' is not a comparison; use one of <= >= == < >",
        ),
        ("wall", "check 'wall', at character 5: nothing is not a comparison; use one of <= >= == < >"),
        ("wall < ten s", "check 'wall < ten s', at character 8: 'ten s' is not a number"),
        ("wall < 10", "check 'wall < 10', at character 10: nothing is not a unit of wall; use 's' or 'ms'"),
        ("speedup > 2x", "check 'speedup > 2x', at character 12: 'x' is not a unit of speedup; use no unit"),
        (
            "error_rate < 1 s",
            "check 'error_rate < 1 s', at character 16: 's' is not a unit of error_rate; use no unit or '%'",
        ),
        ("a: wall < 1s", "check 'a: wall < 1s', at character 1: 'a' is not SERVER/LOAD"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(text: str, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_check(text)
    assert str(raised.value) == error


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        check = parse_check(text)
    except ValueError:
        return
    assert check.metric in UNITS


@given(
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(sorted(OPERATORS)),
    st.floats(0, 1e6),
    st.sampled_from(["", " ", "  "]),
    st.sampled_from([None, ("a", "x"), ("no-limit", "5")]),
)
def test_every_metric_is_read_back(
    metric: str, sign: str, number: float, blank: str, selection: tuple[str, str] | None
) -> None:
    for unit, worth in UNITS[metric].items():
        head = f"{selection[0]}/{selection[1]}:{blank}" if selection else ""
        check = parse_check(f"{head}{metric}{blank}{sign}{blank}{number!r}{blank}{unit}")
        assert (check.metric, check.operator, check.bound) == (metric, sign, number * worth)
        assert (check.server, check.load) == (selection or (None, None))


def one(text: str, *rows: Row, against: Comparison | None = None) -> CheckResult:
    return evaluate([text], rows or (row(),), against)[0]


def test_a_check_holds_for_every_row_or_fails_with_those_that_break_it() -> None:
    slow = row("b", wall_s=20.0)
    assert one("wall <= 15s", row(), slow) == CheckResult(check="wall <= 15s", passed=False, evidence="b / x: 20 s")
    assert one("wall <= 30s", row(), slow) == CheckResult(
        check="wall <= 30s", passed=True, evidence="b / x: 20 s (the closest of 2 rows)"
    )
    assert one("a/x: wall <= 15s", row(), slow) == CheckResult(
        check="a/x: wall <= 15s", passed=True, evidence="a / x: 12.5 s"
    )


@pytest.mark.parametrize(
    ("text", "passed", "evidence"),
    [
        ("ttft_p95 <= 1500ms", True, "a / x: 1.5 s"),
        ("ttft_p95 < 1.5s", False, "a / x: 1.5 s"),
        ("ttft_p50 > 0.3 s", True, "a / x: 400 ms"),
        ("ttft_p50 >= 0.5 s", False, "a / x: 400 ms"),
        ("ttft_p99 < 10s", False, "a / x: needs 662 successful requests that have a ttft; there are 200"),
        ("ttfo_p50 < 10s", False, "a / x: needs 11 successful requests that have a ttfo; there are 0"),
        ("ttfo_mean < 10s", False, "a / x: no successful request has a ttfo; 1 is needed"),
        ("gap_p99 < 1s", False, "a / x: needs 662 successful requests that have a gap; 5,000 values are there"),
        ("gap_mean < 1s", True, "a / x: 50 ms"),
        ("error_rate == 0", True, "a / x: 0 %"),
        ("output_tok_s >= 151", False, "a / x: 150"),
        ("requests_per_s == 3", True, "a / x: 3"),
        ("b/x: wall < 1s", False, "there is no row that it applies to"),
        ("nonsense", False, "check 'nonsense', at character 1: 'nonsense' is not a metric; known: "
         + ", ".join(sorted(UNITS))),
    ],
)  # fmt: skip
def test_values_and_evidence(text: str, passed: bool, evidence: str) -> None:
    assert one(text) == CheckResult(check=text, passed=passed, evidence=evidence)


def test_missing_values_fail() -> None:
    empty = row(sent=0, succeeded=0, wall_s=None, output_tok_s=None, requests_per_s=None)
    assert not one("error_rate <= 100%", empty).passed
    assert not one("wall < 100s", empty).passed
    assert not one("output_tok_s < 100", empty).passed
    assert not one("requests_per_s < 100", empty).passed


def test_requests_that_the_end_cut_are_sent_but_no_errors() -> None:
    bad = row(sent=200, succeeded=186, failed=10, unfinished=4)
    assert one("error_rate < 5%", bad).evidence == "a / x: 5 %"
    assert one("error_rate <= 5%", bad).passed


def test_speedup_is_that_of_the_comparison() -> None:
    rows = (row(), row("b"))
    known = comparison(against_a("b / x", 1.6, 1.5))
    assert one("speedup >= 1.5", *rows, against=known) == CheckResult(
        check="speedup >= 1.5", passed=True, evidence="b / x: 1.6"
    )
    assert not one("speedup >= 1.7", *rows, against=known).passed
    assert one("a/x: speedup >= 1", *rows, against=known).evidence == "a / x: it is the baseline itself"
    assert one("speedup >= 1", *rows).evidence.startswith("a / x: nothing was compared")
    single = comparison(against_a("b / x", 1.6, None))
    assert one("speedup >= 1.5", *rows, against=single) == CheckResult(
        check="speedup >= 1.5",
        passed=False,
        evidence="b / x: needs at least 2 repeats of this row and of the baseline",
    )


def test_every_latency_has_every_statistic() -> None:
    assert {f"{latency}_{name}" for latency in LATENCIES for name in STATISTICS} < UNITS.keys()
    assert len(UNITS) == 5 * 5 + 5
