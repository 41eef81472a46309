"""Attainment and goodput: which requests met every SLO, exactly, however the records are read."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.base.reason import evidence
from harness.numbers.cell_numbers import compute_numbers, slo_attainment
from harness.numbers.summarize import summarize
from harness.records.records import Request
from harness.records.run_data import cell_data
from harness.scenario import Load
from harness.scenario.check_syntax import parse_check
from tests.support.made_runs import MONOTONIC_S, met_by, one_cell, request
from tests.support.wording import Wording

SLOS = "ttft<=1s, tpot<=50ms"
CHECK = f"goodput({SLOS}) >= 0.5"


def slos(text: str) -> Any:
    return parse_check(f"attainment({text}) >= 0.5").slos


def streamed(first_s: float, step_s: float, **changes: Any) -> Request:
    chunks = [first_s + step_s * i for i in range(11)]
    return request(chunks_s=chunks, first_visible_s=first_s, ended_s=chunks[-1], **changes)


@pytest.mark.parametrize(
    ("record", "text", "met"),
    [
        (streamed(1.0, 0.05), "ttft<=1s, ttfo<=1s, tpot<=51ms, e2e<=1.6s", True),
        (streamed(1.0, 0.05), "ttft<1s", False),
        (streamed(1.0, 0.06), "ttft<=1s, tpot<=50ms", False),
        (request(chunks_s=[0.5], output_tokens=1), "tpot<=1ms", True),  # a single token has no TPOT to miss
        (request(chunks_s=[0.5], output_tokens=1), "ttft<=0.4s, tpot<=1ms", False),
        (request(chunks_s=[0.5], output_tokens=2), "ttft<=1s, tpot<=1ms", True),  # a label and the end of sequence
        (request(chunks_s=[], output_tokens=2), "tpot<=1ms", True),
        (request(chunks_s=[0.5], output_tokens=41, asked_tokens=41), "tpot<=12.5ms", True),  # 40 more tokens in 0.5 s
        (request(chunks_s=[0.5], output_tokens=41, asked_tokens=41), "tpot<=12ms", None),  # held back: not known
        (request(chunks_s=[], output_tokens=11), "ttft<=1s", None),  # not streamed
        (request(chunks_s=[], output_tokens=11, ended_s=3.0), "ttft<=1s, e2e<=2s", False),  # missed, whatever the rest
        (request(chunks_s=[], output_tokens=11, ended_s=3.0), "e2e<=3s", True),
        (streamed(0.5, 0.01, output_tokens=None), "tpot<=50ms", None),  # nobody counted the tokens
        (request(first_visible_s=None), "ttfo<=9s", None),  # it only reasoned
    ],
)
def test_a_request(record: Request, text: str, met: bool | None) -> None:
    assert met_by(record, slos(text)) is met


def test_slos_from_schedule_count_what_came_before_sending() -> None:
    late = streamed(0.5, 0.05, scheduled_s=-0.6)  # the first token after 0.5 s, the last after 1 s
    for text, met in (
        ("ttft<=1s, e2e<=1s", True),
        ("ttft_sched<=1s", False),
        ("ttft_sched<=1.1s, e2e_sched<=1.61s", True),
        ("e2e_sched<=1.5s", False),
    ):
        assert met_by(late, slos(text)) is met, text
    follows = streamed(0.5, 0.05)  # an answer, or is of a closed loop: due when it was sent
    assert met_by(follows, slos("ttft_sched<=0.5s")) is True
    assert met_by(request(chunks_s=[], scheduled_s=-0.6), slos("ttft_sched<=9s")) is None
    left = request(error="abandoned", chunks_s=[], ended_s=1.0, scheduled_s=-0.6)
    assert met_by(left, slos("ttft_sched<=1.5s")) is False
    assert met_by(left, slos("ttft<=1.5s, e2e_sched<=1.7s")) is None


def test_failed_and_unfinished_requests_stay_in_the_denominator(tmp_path: Path) -> None:
    records = [
        streamed(0.5, 0.04, index=0),
        streamed(0.5, 0.06, index=1),
        request(index=2, error="timeout", chunks_s=[0.1], output_tokens=None),
        request(index=3, error="unfinished", chunks_s=[0.1], output_tokens=None),
        streamed(0.1, 0.01, index=4, phase="warmup"),
    ]
    summary = one_cell(tmp_path / "run", records, checks=[CHECK], max_error_rate=1.0)
    wall_s = 1.5  # of the failed ones, which ended last
    found = summary.cells[0].numbers.slos
    assert found == summary.rows[0].pooled.slos and list(found) == [SLOS]
    of_set = found[SLOS]
    assert (of_set.met, of_set.unknown, of_set.attainment, of_set.goodput) == (1, 0, 0.25, 1 / wall_s)
    assert of_set.spread is not None and (of_set.effect, of_set.spread.n, of_set.spread.max) == (4.0, 3, None)
    assert (summary.checks[0].status, summary.checks[0].code) == ("inconclusive", "too_few_requests")


def test_rates_of_a_timed_load_count_the_same_answers(tmp_path: Path) -> None:
    """One at a time, 1 s each: two ended in the measured 2 s, the first of which the warm-up had sent."""
    load = Load(user="batch", duration_s=2.0, output_tokens=11)
    records = [
        streamed(0.6, 0.04, sent_s=MONOTONIC_S - 1.5, prompt_tokens=30, phase="warmup"),  # ended before
        streamed(0.6, 0.04, sent_s=MONOTONIC_S - 0.5, prompt_tokens=30, phase="warmup"),
        streamed(0.6, 0.04, index=0, sent_s=MONOTONIC_S, prompt_tokens=20),
        streamed(0.6, 0.04, index=1, sent_s=MONOTONIC_S + 1.5, prompt_tokens=20),
    ]
    numbers = one_cell(tmp_path / "run", records, load=load, checks=[CHECK]).cells[0].numbers
    known = numbers.slos[SLOS]
    assert (known.met, known.unknown, known.attainment, known.goodput, known.effect) == (2, 0, 1.0, 1.0, 1.0)
    assert known.spread is not None and known.spread.max == pytest.approx(0.8), "TPOT: 40 of 50 ms"
    assert (numbers.requests_per_s, numbers.input_tok_s) == (1.0, 25.0)
    slow = [streamed(2.0, 0.04, sent_s=MONOTONIC_S - 0.5, phase="warmup"), *records[2:]]
    numbers = one_cell(tmp_path / "slow", slow, load=load, checks=[CHECK]).cells[0].numbers
    assert (numbers.requests_per_s, numbers.slos[SLOS].goodput) == (1.0, 0.5)


def test_several_cells_are_pooled_and_their_goodput_is_the_median() -> None:
    parts = [
        cell_data([streamed(0.5, 0.04, index=i) for i in range(met)] + [streamed(2.0, 0.04)] * (4 - met))
        for met in (1, 2, 3)
    ]
    cells = [
        msgspec.structs.replace(
            compute_numbers([]), slos={SLOS: slo_attainment(SLOS, slos(SLOS), [part], window_s=2.0)}
        )
        for part in parts
    ]
    pooled = slo_attainment(SLOS, slos(SLOS), parts, None, cells)
    assert (pooled.met, pooled.unknown, pooled.attainment, pooled.goodput) == (6, 0, 0.5, 1.0)


def test_checks_of_the_command_line_are_counted_too(tmp_path: Path, wording: Wording) -> None:
    records = [streamed(0.5, 0.04, index=i, sent_s=MONOTONIC_S + i) for i in range(60)]  # one at a time
    one_cell(tmp_path / "run", records)
    summary = summarize(tmp_path / "run", [CHECK, "attainment(e2e<=2s) == 1"])
    assert list(summary.rows[0].pooled.slos) == [SLOS, "e2e<=2s"]
    assert [(one.status, one.row, one.value, one.high) for one in summary.checks] == [
        ("passed", "a / x", 1.0, 1.0), ("passed", "a / x", 1.0, None),
    ]  # fmt: skip
    assert summary.checks[0].low == pytest.approx(0.951, abs=0.0005)
    wording([evidence(one.evidence) for one in summary.checks])
    assert summarize(tmp_path / "run").rows[0].pooled.slos == {}


# Abandoned requests in the numbers: neither success nor failure, and no way to look fast.


def left(chunks_s: list[float], ended_s: float, **changes: Any) -> Request:
    """The user left after so long."""
    first = chunks_s[0] if chunks_s else None
    cut = {"error": "abandoned", "output_tokens": None, "first_visible_s": first, "asked_tokens": 10}
    return request(chunks_s=chunks_s, ended_s=ended_s, **cut, **changes)


def answered(chunks_s: list[float], **changes: Any) -> Request:
    return request(chunks_s=chunks_s, first_visible_s=chunks_s[0], ended_s=chunks_s[-1], output_tokens=4, **changes)


@pytest.mark.parametrize(
    ("record", "text", "met"),
    [
        (left([0.5, 0.6], 0.6), "ttft<=1s", True),  # its first token came in time
        (left([1.5, 1.6], 1.6), "ttft<=1s", False),
        (left([], 0.9), "ttft<=1s", None),  # left before it was late
        (left([], 1.0), "ttft<=1s", False),  # an age that equals the bound is a miss
        (left([], 1.1), "ttft<=1s", False),
        (left([], 0.5), "ttfo<=1s, tpot<=1ms", None),
        (left([0.5], 3.0), "ttft<=1s, e2e<=2s", False),
        (left([0.5], 1.5), "ttft<=1s, e2e<=2s", None),
        (left([0.5, 9.5], 9.5), "tpot<=0.9s", False),  # at most ten tokens in nine seconds
        (left([0.5, 9.5], 9.5), "tpot<=1.1s", None),
    ],
)
@pytest.mark.parametrize("error", ["abandoned", "unfinished"])
def test_what_is_known_of_a_request_that_was_cut(record: Request, text: str, met: bool | None, error: str) -> None:
    assert met_by(msgspec.structs.replace(record, error=error), slos(text)) is met
    assert met_by(msgspec.structs.replace(record, error="timeout"), slos(text)) is False, "a failed request"


def test_they_are_sent_and_neither_succeed_nor_fail() -> None:
    good = answered([0.5, 0.6, 0.7, 0.8])
    numbers = compute_numbers(
        [cell_data([good, good, left([0.2, 0.3], 0.3), left([], 2.0)])], slos={"ttft<=1s": slos("ttft<=1s")}
    )
    assert (numbers.sent, numbers.succeeded, numbers.failed, numbers.unfinished, numbers.abandoned) == (4, 2, 0, 0, 2)
    assert numbers.error_rate == 0
    assert (numbers.ttft.n, numbers.ttft.censored, numbers.ttft.above) == (3, 1, 2.0)
    assert (numbers.e2e.n, numbers.e2e.censored) == (2, 2)
    attained = numbers.slos["ttft<=1s"]
    assert (attained.met, attained.unknown, attained.attainment) == (3, 0, 3 / 4)


def test_reasoning_and_tool_calls_are_counted() -> None:
    told = answered([0.5, 0.6, 0.7, 0.8], reasoning_tokens=3, tool_calls=2, tool_calls_valid=1)
    seen = answered([0.5, 0.6, 0.7, 0.8], reasoning_chunks=2, tool_calls=0, tool_calls_valid=0)
    numbers = compute_numbers([cell_data([told, seen])])
    assert (numbers.reasoning_tokens, numbers.tool_calls, numbers.tool_calls_valid) == (5.0, 2, 1)
    plain = compute_numbers([cell_data([answered([0.5, 0.6, 0.7, 0.8])])])
    assert (plain.reasoning_tokens, plain.tool_calls, plain.tool_calls_valid) == (None, None, None)
