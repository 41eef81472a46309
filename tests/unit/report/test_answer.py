"""The first sentence of a report answers the scenario's question, and at most seven verdicts are shown at once."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.base.measured import Distribution
from harness.base.reason import because
from harness.numbers.checks import evaluate
from harness.numbers.comparison import Comparison, Difference, Verdict
from harness.numbers.gate import with_gate
from harness.numbers.summary import Row, Summary
from harness.questions.compare.page import comparison_answer
from harness.questions.report.headline import run_answer
from harness.questions.report.page import print_report, run_page
from harness.records.manifest import Startup
from harness.report import markdown, sentences
from harness.report.verdict_text import verdict_word
from harness.scenario import Load, Pair
from tests.support.made_summaries import MANY, numbers, row, run, summary
from tests.support.wording import Wording


def verdict(side: str, word: str, ratio: float | None, **values: Any) -> Verdict:
    bounds = {"low": None, "high": None} if ratio is None else {"low": 0.99 * ratio, "high": 1.01 * ratio}
    known = {"baseline": "vllm / one", "metric": "wall", "p": 0.01, "n": (5, 5), **bounds}
    return Verdict(side=side, word=word, ratio=ratio, **known | values)


def compared(*verdicts: Verdict) -> Summary:
    table = Comparison(
        metric="wall", comparisons=len(verdicts), noise_floor=0.02, noise_source=[], verdicts=list(verdicts)
    )
    return replace(summary(), comparison=table, checks=[])


def test_servers_are_compared_under_the_same_load(wording: Wording) -> None:
    """Of two servers the faster one is named for each load; a pair that the scenario names comes first."""
    rows = [
        replace(row(load, numbers(6.5, MANY)), server=server)
        for server in ("llamacpp", "vllm")
        for load in ("one", "ten")
    ]
    loads = {"one": Load(user="chat", users=1, duration_s=60), "ten": Load(user="chat", users=16, duration_s=60)}
    made = replace(run(), scenario=replace(run().scenario, loads=loads))
    verdicts = [
        verdict("vllm / one", "slower", 1 / 1.04, baseline="llamacpp / one"),
        verdict("vllm / ten", "faster", 1.45, baseline="llamacpp / ten"),
    ]
    answer = run_answer(replace(compared(*verdicts), rows=rows), made)
    wording(answer)
    named = verdict("vllm / ten", "faster", 3.0, baseline="vllm / one")
    answer = run_answer(replace(compared(named, *verdicts), rows=rows), made)
    wording(answer)
    equal = [verdict(f"vllm / {load}", "same", 1.0, baseline=f"llamacpp / {load}") for load in ("one", "ten")]
    answer = run_answer(replace(compared(named, *equal), rows=rows), made)
    wording(answer)


def test_what_is_better_within_the_margin_is_named(wording: Wording) -> None:
    of = compared(verdict("vllm / ten", "same", 1.012, low=1.008, high=1.016))
    wording(run_answer(of, run()))
    assert of.comparison is not None
    word = verdict_word(of.comparison.verdicts[0])
    assert word.startswith("same ") and "1.2 %" in word
    wording(word)


def asking() -> Any:
    """A run whose scenario names a pair of loads to compare."""
    made = run()
    return replace(made, scenario=replace(made.scenario, compare=[Pair(row="vllm/ten", against="vllm/one")]))


def test_a_speedup_names_the_fastest_and_the_slowest_by_what_tells_them_apart() -> None:
    of = compared(verdict("vllm / ten", "slower", 0.42), verdict("vllm / five", "faster", 2.0))
    of = replace(of, rows=[*of.rows, row("five", numbers(6.5, MANY))])
    text = (
        "five is the fastest: 2.00x faster than one by wall time (95 % interval 1.98x to 2.02x); "
        "ten is 2.38x slower than one by wall time (95 % interval 2.36x to 2.41x)."
    )
    assert run_answer(of, asking()) == text
    assert "slower" not in run_answer(of, run()), "the question is not about loads"


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
            ],
            "Not decided: ten is 8.9 to 11 % faster than one by wall time. About 8 repeats a side should settle it.",
        ),
    ],
)
def test_a_comparison_without_a_faster_row(verdicts: list[Verdict], answer: str) -> None:
    assert run_answer(compared(*verdicts), asking()) == answer


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
    assert run_answer(checked(of, "ttft_p95 <= 1s"), made) == answer


def test_checks_are_answered_with_yes_or_no_or_a_regression() -> None:
    of, made = users(4, ttft_s=[0.5])
    for checks, answer in (
        (["ttft_p95 <= 1s"], "Yes: `ttft_p95 <= 1s` is met. vllm / u4 has 500 ms."),
        (["ttft_p95 <= 100ms", "e2e_p95 <= 2s"], "No: `ttft_p95 <= 100ms` is missed. vllm / u4 has 500 ms."),
    ):
        assert run_answer(checked(of, *checks), made).startswith(answer)
    for check, answer in (
        (
            "wall <= 0.1 * baseline",
            "Worse than the baseline allows: `wall <= 0.1 * baseline` is not met. vllm / ten has ",
        ),
        ("wall <= 2 * baseline", "Not worse than the baseline allows: 1 check passed."),
    ):
        assert run_answer(checked(summary(), check, "error_rate == 0"), run()).startswith(answer)


def test_nothing_to_compare_is_described_and_an_invalid_run_has_no_answer(wording: Wording) -> None:
    alone = replace(summary(), rows=summary().rows[:1], comparison=None, checks=[])
    expected = "vllm / one: 13.07 s wall time, 95.6 tok/s, median TTFT 52.3\u00a0ms."
    assert run_answer(alone, run()) == expected
    assert run_answer(replace(alone, valid=None), run()) == expected
    wording(run_answer(replace(alone, valid=False), run()))
    stopped = replace(run(), status="interrupted")
    wording(run_answer(alone, stopped))


def test_a_comparison_of_runs_says_whether_a_side_is_slower() -> None:
    slow, fast = verdict("b", "slower", 0.8), verdict("c", "faster", 1.5)
    maybe = verdict("b", "slower", 0.8, provisional=True, basis="runs", unit="runs", n=(1, 1))
    few = verdict("b", "inconclusive", 0.907, low=0.775, high=1.061, basis="runs", unit="runs", n=(1, 1))
    some = verdict("b", "slower", 0.913, low=0.87, high=0.952, unit="runs", n=(3, 3))
    unknown = verdict("d", "inconclusive", None, refused=because("no_values", "there is no wall time"))
    slower = "Slower: b is 25 % slower than vllm / one by wall time (24 to 26 %)"
    faster = "c is 50 % faster than vllm / one by wall time (48 to 52 %). "
    repeat = "Repeat both: 5 runs each (`harness run SCENARIO --times 5`)."
    none = "No slowdown of 10 % or more: c is 48 to 52 % faster than vllm / one by wall time."
    for verdicts, answer in (
        ([slow, fast, unknown], f"{faster}{slower}. Of 3 comparisons: 1 slower, 1 cannot tell, 1 faster."),
        ([maybe], f"Probably slower{slower[6:]}, provisional; would fail with --provisional. {repeat}"),
        ([fast], faster + none),
        ([few], f"Cannot tell: b is between 29 % slower and 6.1 % faster than vllm / one by wall time. {repeat}"),
        ([some], "Slower: b is 9.5 % slower than vllm / one by wall time (5 to 15 %); whether 10 % or more is not "
                 "known. Measure more (`--times N`), or choose another --tolerance: the difference is about as large."),
        ([fast, unknown], f"{faster}Cannot tell: d: there is no wall time. Of 2 comparisons: 1 cannot tell, 1 faster."),
    ):  # fmt: skip
        comparison = compared(*(with_gate(each, 0.1, provisional=False) for each in verdicts)).comparison
        assert comparison is not None
        assert comparison_answer(comparison) == answer


def test_seven_verdicts_are_shown_the_largest_first_and_the_rest_is_folded(wording: Wording) -> None:
    many = [verdict(f"vllm / f{i}", "faster", 1.5 + i / 10) for i in range(6)]
    of = compared(verdict("vllm / same", "same", 1.0), *many, verdict("vllm / slow", "slower", 0.5), many[0])
    assert of.comparison is not None
    found = [expected.partition(":")[0] for _, expected in sentences.verdict_sentences(of.comparison.verdicts)]
    assert found[:3] == ["vllm / slow", "vllm / f5", "vllm / f4"] and found[-1] == "vllm / same"
    out = io.StringIO()
    print_report(of, run(), Path("x"), Console(file=out, width=150))
    assert "1 more" in out.getvalue() and "--explain" in out.getvalue()
    wording([line for line in out.getvalue().splitlines() if "1 more" in line])
    page = markdown.render(run_page(of, run()))
    assert page.count("<details><summary>1 more: ") == 1


def test_servers_with_different_versions_of_one_engine_are_named_in_the_answer(wording: Wording) -> None:
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
        return run_answer(of, replace(run(), cells=cells))

    named = versions(("vllm", "vllm", "0.31.0"), ("lemonade", "vllm", "0.20.1"))
    plain = run_answer(of, run())
    assert named.startswith(plain) and "0.31.0" in named and "0.20.1" in named
    wording(named)
    assert versions(("vllm", "vllm", "0.31.0"), ("lemonade", "vllm", "0.31.0")) == plain
    assert versions(("vllm", "vllm", "0.31.0"), ("lemonade", "llama.cpp", "b9")) == plain
    assert versions(("vllm", "vllm", "0.31.0"), ("lemonade", "vllm", None)) == plain
    comparison = of.comparison
    assert comparison is not None
    comparison = replace(comparison, verdicts=[with_gate(comparison.verdicts[0], 0.1, provisional=False)])
    differs = replace(comparison, differences=[Difference(key="servers.a.startup.version", values=["1", "2"])])
    wording(comparison_answer(differs))
