"""The first sentence of a report answers the scenario's question, and at most seven verdicts are shown at once."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.analysis.checks import evaluate
from harness.base.summary import Comparison, Difference, Distribution, Row, Summary, Verdict
from harness.records.manifest import Startup
from harness.report import markdown, sentences, terminal
from harness.report.page import run_page
from harness.scenario import Load
from tests.unit.report.test_report_text import MANY, numbers, row, run, summary


def verdict(side: str, word: str, ratio: float | None, **values: Any) -> Verdict:
    bounds = {"low": None, "high": None} if ratio is None else {"low": 0.99 * ratio, "high": 1.01 * ratio}
    known = {"baseline": "vllm / one", "metric": "wall", "p": 0.01, "n": (5, 5), **bounds}
    return Verdict(side=side, word=word, ratio=ratio, **known | values)


def compared(*verdicts: Verdict) -> Summary:
    table = Comparison(
        metric="wall", comparisons=len(verdicts), noise_floor=0.02, noise_source=[], verdicts=list(verdicts)
    )
    return replace(summary(), comparison=table, checks=[])


def test_a_speedup_names_the_fastest_and_the_slowest_by_what_tells_them_apart() -> None:
    of = compared(verdict("vllm / ten", "slower", 0.42), verdict("vllm / five", "faster", 2.0))
    of = replace(of, rows=[*of.rows, row("five", numbers(6.5, MANY))])
    text = (
        "five is the fastest: 2.00x faster than one by wall time (95 % interval 1.98x to 2.02x); "
        "ten is 2.38x slower than one by wall time (95 % interval 2.36x to 2.41x)."
    )
    assert sentences.run_answer(of, run()) == text


@pytest.mark.parametrize(
    ("verdicts", "answer"),
    [
        (
            [verdict("vllm / ten", "slower", 0.5)],
            "ten is 2.00x slower than one by wall time (95 % interval 1.98x to 2.02x).",
        ),
        ([verdict("vllm / ten", "same", 1.0)], "No difference: ten and one are equally fast within ±2\u00a0%."),
        (
            [
                verdict("vllm / ten", "inconclusive", 1.1, needed=8, reason="includes_one"),
                verdict("sglang / ten", "inconclusive", 1.1, needed=54, reason="includes_one", baseline="vllm / ten"),
            ],
            "ten is 1.10x faster than one by wall time (95 % interval 1.09x faster to 1.11x faster): inconclusive. "
            "About 8 repeats a side would decide.",
        ),
    ],
)
def test_a_comparison_without_a_faster_row(verdicts: list[Verdict], answer: str) -> None:
    assert sentences.run_answer(compared(*verdicts), run()) == answer


def checked(of: Summary, *checks: str) -> Summary:
    return replace(of, checks=evaluate(checks, of.rows, of.comparison))


def users(*counts: int, ttft_s: Sequence[float]) -> tuple[Summary, Any]:
    """A run with so many chat users a load, of which each row has such a p95 of TTFT."""
    loads = {f"u{count}": Load(user="chat", users=count, duration_s=60, output_tokens=9) for count in counts}
    rows: list[Row] = []
    for name, seconds in zip(loads, ttft_s, strict=True):
        many = Distribution(n=500, mean=seconds, p50=seconds, p95=seconds, intervals={"p95": (seconds, seconds)})
        rows.append(row(name, numbers(60.0, many)))
    made = run()
    scenario = replace(made.scenario, loads=loads)
    return replace(summary(), rows=rows), replace(made, scenario=scenario)


@pytest.mark.parametrize(
    ("ttft_s", "answer"),
    [
        ((0.1, 0.5, 3.0), "vllm meets ttft_p95 <= 1s up to 8 chat users, and misses it at 16 chat users."),
        ((0.1, 0.5, 0.9), "vllm meets ttft_p95 <= 1s up to 16 chat users, the most that was measured."),
        ((1.1, 1.5, 3.0), "vllm meets ttft_p95 <= 1s at no measured load, and misses it at 4 chat users."),
    ],
)
def test_an_slo_over_several_loads_is_answered_with_a_capacity(ttft_s: tuple[float, ...], answer: str) -> None:
    of, made = users(4, 8, 16, ttft_s=ttft_s)
    assert sentences.run_answer(checked(of, "ttft_p95 <= 1s"), made) == answer


def test_checks_are_answered_with_yes_or_no_or_a_regression() -> None:
    of, made = users(4, ttft_s=[0.5])
    for checks, answer in (
        (["ttft_p95 <= 1s"], "Yes: ttft_p95 <= 1s is met. vllm / u4: 500 ms"),
        (["ttft_p95 <= 100ms", "e2e_p95 <= 2s"], "No: 1 of 2 SLO checks failed. ttft_p95 <= 100ms: vllm / u4: 500 ms"),
    ):
        assert sentences.run_answer(checked(of, *checks), made).startswith(answer)
    for check, answer in (
        ("wall <= 0.1 * baseline", "Regression against the baseline: 1 of 1 check failed: wall <= 0.1"),
        ("wall <= 2 * baseline", "No regression against the baseline: 1 check passed."),
    ):
        assert sentences.run_answer(checked(summary(), check, "error_rate == 0"), run()).startswith(answer)


def test_nothing_to_compare_is_described_and_an_invalid_run_has_no_answer() -> None:
    alone = replace(summary(), rows=summary().rows[:1], comparison=None, checks=[])
    expected = "vllm / one: 13.07 s wall time, 95.6 tok/s, median TTFT 52.3\u00a0ms."
    assert sentences.run_answer(alone, run()) == expected
    assert sentences.run_answer(replace(alone, valid=None), run()) == expected
    assert sentences.run_answer(replace(alone, valid=False), run()) == "No answer: the run is INVALID."
    stopped = replace(run(), status="interrupted")
    assert sentences.run_answer(alone, stopped) == "No answer: the run did not come to its end."


def test_a_comparison_of_runs_says_whether_a_side_is_slower() -> None:
    slow, fast = verdict("b", "slower", 0.8, fails="yes"), verdict("c", "faster", 1.5)
    maybe = verdict("b", "slower", 0.8, fails="with_provisional", provisional=True, basis="runs")
    unknown = verdict("d", "inconclusive", None)
    slower = "b is 1.25x slower than vllm / one by wall time (95 % interval 1.24x to 1.26x)"
    faster = "c is 1.50x faster than vllm / one by wall time (95 % interval 1.48x to 1.52x)"
    for verdicts, answer in (
        ([slow, fast, unknown], f"{slower}. Regression: 1 of 3 comparisons slower."),
        ([maybe], f"{slower}. Possible regression: 1 of 1 comparison slower, would fail with --provisional."),
        ([fast], f"{faster}. No regression: 1 faster of 1 comparison."),
        ([fast, unknown], f"{faster}. Inconclusive: 1 of 2 comparisons cannot be decided, and none is slower."),
    ):
        comparison = compared(*verdicts).comparison
        assert comparison is not None
        assert sentences.comparison_answer(comparison) == answer


def test_seven_verdicts_are_shown_the_largest_first_and_the_rest_is_folded() -> None:
    many = [verdict(f"vllm / f{i}", "faster", 1.5 + i / 10) for i in range(6)]
    of = compared(verdict("vllm / same", "same", 1.0), *many, verdict("vllm / slow", "slower", 0.5), many[0])
    assert of.comparison is not None
    found = [expected.partition(":")[0] for _, expected in sentences.verdict_sentences(of.comparison.verdicts)]
    assert found[:3] == ["vllm / slow", "vllm / f5", "vllm / f4"] and found[-1] == "vllm / same"
    out = io.StringIO()
    terminal.print_report(of, run(), Path("x"), Console(file=out, width=150))
    assert "- 1 more: 1 same (--explain shows them)" in out.getvalue()
    page = markdown.render(run_page(of, run()))
    assert "<details><summary>1 more: 1 same</summary>" in page


def test_servers_with_different_versions_of_one_engine_are_named_in_the_answer() -> None:
    of = compared(verdict("lemonade / one", "slower", 0.5))
    first = run().cells[0]

    def versions(*known: tuple[str, str, str | None]) -> str:
        cells = [
            replace(
                first,
                server=server,
                served_by=replace(first.served_by, startup=Startup(engine=engine, version=version)),
            )
            for server, engine, version in known
        ]
        return sentences.run_answer(of, replace(run(), cells=cells))

    named = versions(("vllm", "vllm", "0.31.0"), ("lemonade", "vllm", "0.20.1"))
    plain = sentences.run_answer(of, run())
    assert named.startswith(plain) and "different versions of vllm (vllm 0.31.0, lemonade 0.20.1)" in named
    assert versions(("vllm", "vllm", "0.31.0"), ("lemonade", "vllm", "0.31.0")) == plain
    assert versions(("vllm", "vllm", "0.31.0"), ("lemonade", "llama.cpp", "b9")) == plain
    assert versions(("vllm", "vllm", "0.31.0"), ("lemonade", "vllm", None)) == plain
    comparison = of.comparison
    assert comparison is not None
    differs = replace(comparison, differences=[Difference(key="servers.a.startup.version", values=["1", "2"])])
    assert sentences.comparison_answer(differs).endswith("The engine's versions differ: 1, 2.")
