"""The speed of prompts: of requests that no other one delays, whose first token is that of their prompt."""

from typing import Any

import pytest

from harness.numbers import formulas
from harness.numbers.cell_numbers import compute_numbers
from harness.numbers.prefill import blank_starts, is_first_token_blank, prefill_tok_s
from harness.records.columns import rows_of
from harness.records.records import Request
from harness.records.run_data import CellData, cell_data
from tests.support.made_runs import request, value_of

GAP_S = 0.01


def answer(sent_s: float = 0.0, **changes: Any) -> Request:
    """100 prompt tokens, 20 of them cached, in half a second; the answer ends after 1.5 s."""
    return request(**{"sent_s": sent_s, "prompt_tokens": 100, "cached_tokens": 20} | changes)


def cell(*requests: Request, **known: Any) -> CellData:
    return cell_data(requests, **known)


def blank(sent_s: float = 0.0, pause_s: float = 0.6, blanks: int = 1, gap_s: float = GAP_S, **changes: Any) -> Request:
    """A blank after 1 ms, and text after the pause."""
    first = [0.001 + at * pause_s / blanks for at in range(blanks)]
    text = [0.001 + pause_s + at * gap_s for at in range(32)]
    return answer(sent_s, **{"chunks_s": [*first, *text], "first_text_s": text[0], "ended_s": 1.4} | changes)


def test_one_after_the_other() -> None:
    assert prefill_tok_s([cell(answer(), answer(1.5))]) == pytest.approx(160)
    assert prefill_tok_s([cell(answer(), answer(1.5)), cell(answer(cached_tokens=None))]) == pytest.approx(520 / 3)


@pytest.mark.parametrize(
    ("others", "tok_s"),
    [
        ([1.4, 2.8], None),  # each is sent before the last one ended
        ([1.5], 160),
        ([0.51, 3.0], 160),  # after the first token of one, while another computes: two of three are alone
        ([0.1, 0.2, 9.0], None),
        ([0.1, 9.0, 19.0], 160),
    ],
)
def test_requests_that_wait_for_others_have_no_prefill(others: list[float], tok_s: float | None) -> None:
    found = prefill_tok_s([cell(answer(), *map(answer, others))])
    assert found == (tok_s and pytest.approx(tok_s))


def test_other_loads_and_stages_count_as_others() -> None:
    alone, other = cell(answer()), cell(answer(0.1))
    assert prefill_tok_s([cell(answer(), neighbours=[other])]) is None
    assert prefill_tok_s([cell(answer(), in_mix=True)]) is None
    assert prefill_tok_s([alone]) == pytest.approx(160)
    warmup = answer(-0.5, phase="warmup")
    assert prefill_tok_s([cell(warmup, answer())]) is None, "the warm-up is still in flight"


def test_planned_tokens_stand_in_for_unknown_ones() -> None:
    unknown = cell(answer(prompt_tokens=None, cached_tokens=None, asked_prompt_tokens=50))
    assert (prefill_tok_s([unknown]), prefill_tok_s([unknown], planned=True)) == (None, 100)


def test_a_cached_prompt_and_a_failed_request_have_none() -> None:
    assert prefill_tok_s([cell(answer(cached_tokens=100))]) is None
    assert prefill_tok_s([cell(answer(error="http", chunks_s=[]))]) is None
    assert prefill_tok_s([cell()]) is None


# A first token that is none.


@pytest.mark.parametrize(
    ("one", "gaps"),
    [
        (blank(), 60),
        (blank(pause_s=0.1), 10),  # as long as allowed
        (blank(pause_s=GAP_S), 1),  # a model that begins with a newline
        (blank(pause_s=0.2, blanks=20), 1),  # twenty newlines at the speed of all tokens
        (blank(pause_s=0.6, blanks=12), 49),  # a blank each 50 ms keeps the connection alive
        (blank(pause_s=0.03, gap_s=0.0), 30),  # the rest came together: less than a millisecond is no gap
        (blank(chunks_s=[0.001, 0.6], first_text_s=0.6), float("inf")),  # nothing shows the usual gap
        (answer(), None),
    ],
)
def test_the_wait_after_a_blank_is_counted_in_usual_gaps(one: Request, gaps: float | None) -> None:
    found = value_of(lambda rows: rows.blank_gaps, one)
    assert found == (gaps and pytest.approx(gaps, abs=1e-6))
    assert formulas.starts_blank(rows_of([one]))[0] == (gaps is not None and 10.5 < gaps < float("inf"))
    is_known = gaps is None or gaps < 10.5
    assert (prefill_tok_s([cell(one)]) is not None) is is_known


def test_speculation_with_a_newline_first_is_healthy() -> None:
    """Each step sends four events at once."""
    steps = [0.5 + 0.03 * step for step in range(8) for _ in range(4)]
    one = answer(chunks_s=[0.47, *steps], first_text_s=0.5)
    assert not formulas.starts_blank(rows_of([one]))[0]
    assert prefill_tok_s([cell(one)]) == pytest.approx(80 / 0.47)


def test_a_blank_is_named_where_most_answers_have_it_and_none_waits_for_others() -> None:
    assert blank_starts(cell(blank(), blank(2.0))) == (2, 2)
    assert is_first_token_blank(cell(blank(), answer(2.0)))
    assert not is_first_token_blank(cell(blank(), answer(2.0), answer(4.0)))
    assert not is_first_token_blank(cell(blank(), blank(0.1))), "the text may wait for the other prompt"
    assert not is_first_token_blank(cell(blank(), *[blank(2.0 + 0.1 * at) for at in range(9)])), "one of ten is alone"
    assert not is_first_token_blank(cell(answer(), answer(2.0)))


def test_a_blank_leaves_out_only_its_own_prompt() -> None:
    assert prefill_tok_s([cell(blank(), answer(2.0))]) == pytest.approx(160)
    assert prefill_tok_s([cell(blank(), blank(2.0), answer(4.0))]) is None


# Reasoning that the server counts and does not send.

HIDDEN = {"output_tokens": 511, "reasoning_tokens": 500, "asked_tokens": 600, "fixed_length": False, "textless": 0}


def test_hidden_reasoning_is_in_no_chunk() -> None:
    one = answer(**HIDDEN)
    assert formulas.hides_reasoning(rows_of([one]))[0]
    assert value_of(formulas.carried_tokens, one) == 11
    assert value_of(formulas.tpot, one) == pytest.approx(0.1)
    assert prefill_tok_s([cell(one)]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"reasoning_chunks": 5, "output_tokens": 11, "reasoning_tokens": 5},  # sent in a channel of its own
        {"output_tokens": 11, "reasoning_tokens": 5},  # sent as content
        {"reasoning_tokens": 0},
        {"reasoning_tokens": None},
    ],
)
def test_reasoning_that_is_sent_is_not_hidden(changes: dict[str, Any]) -> None:
    assert not formulas.hides_reasoning(rows_of([answer(**(HIDDEN | changes))]))[0]


# Text in no known form.


def test_an_answer_with_text_in_no_known_form_has_no_time_of_a_token() -> None:
    unread = answer(unread=3, textless=1, reasoning_chunks=2, coalesced=1)
    numbers = compute_numbers([cell(unread)])
    assert (numbers.ttft.n, numbers.ttfo.n, numbers.tpot.n, numbers.gap.n) == (0, 0, 0, 0)
    assert numbers.e2e.max == 1.5, "the end of the answer, after its last chunk"
    assert numbers.ttft.unknown == 0 and numbers.output_tok_s == pytest.approx(11 / 1.5)
    assert prefill_tok_s([cell(unread)]) is None
    both = compute_numbers([cell(unread, answer(2.0))])
    assert (both.ttft.n, both.ttft.unknown, both.ttft.max, both.tpot.n) == (1, 1, 0.5, 1)
    assert not formulas.has_contradicting_times(rows_of([unread]))[0]
