"""The numbers of `harness quick`, from few requests, of which some were cut."""

from typing import Any

import pytest

from harness.numbers.cell_numbers import compute_numbers
from harness.questions.quick.decide import QuickLevel, counts_tokens, level_of, median_prompt
from harness.records.records import Request
from harness.records.run_data import CellData, cell_data
from tests.support.made_runs import request


def cell(*requests: Request, **known: Any) -> CellData:
    return cell_data(requests, window_s=(0.0, 10.0), **known)


def answer(sent_s: float = 0.0, **changes: Any) -> Request:
    """11 tokens at 10 a second after half a second."""
    return request(**{"sent_s": sent_s, "prompt_tokens": 100, "cached_tokens": 20} | changes)


def level(found: CellData, users: int = 1) -> QuickLevel:
    return level_of(users, found)


def test_one_answer_has_all_numbers() -> None:
    found = level(cell(answer()))
    assert (found.answers, found.cut, found.failed) == (1, 0, 0)
    assert found.user_tok_s == pytest.approx(10)
    assert found.tok_s == pytest.approx(1.1)  # 11 tokens in a window of 10 s
    assert found.prefill_tok_s == pytest.approx(160)  # 80 tokens that were not cached, in half a second
    assert found.ttft_ms == pytest.approx(500)
    assert found.visible_ms is None


@pytest.mark.parametrize("answers", [3, 12])
def test_the_time_to_the_first_token_is_a_median_of_however_few(answers: int) -> None:
    slow = answer(2.0 * answers, chunks_s=[2.0 + 0.3 * i for i in range(11)], ended_s=5.0, first_visible_s=2.0)
    found = cell(*[answer(2.0 * place) for place in range(answers - 1)], slow)
    mean = compute_numbers([found]).ttft.mean
    assert mean is not None and mean > 0.5 and level(found).ttft_ms == pytest.approx(500)
    assert level(found).prefill_tok_s == pytest.approx(80 / mean)


def test_what_comes_after_a_level_is_not_its_speed() -> None:
    """Other users join then. The speed of one user is never below what all, the one, get with the waiting."""
    last = [0.5 + 0.1 * i for i in range(6)] + [1.5, 2.0, 2.5, 3.0, 3.5]  # from its second 1 on there are four users
    alone = [answer(1.6 * place) for place in range(5)]
    found = level(cell(*alone, answer(9.0, chunks_s=last, ended_s=3.5)))
    assert found.user_tok_s == pytest.approx(10) and (found.tok_s or 0) < 10
    late = level(cell(*alone, answer(9.9, chunks_s=last, ended_s=3.5)))
    assert late.user_tok_s == pytest.approx(10), "an answer without a token inside the level"


def test_users_who_wait_for_each_other_have_no_prefill() -> None:
    found = level(cell(answer(), answer(0.1), answer(0.2), answer(0.3)), users=4)
    assert found.prefill_tok_s is None and found.ttft_ms == pytest.approx(500)


def test_without_token_counts_a_chunk_is_one() -> None:
    uncounted = cell(answer(output_tokens=None, prompt_tokens=None, cached_tokens=None, asked_prompt_tokens=50))
    found = level(uncounted)
    assert found.user_tok_s == pytest.approx(10) and found.tok_s == pytest.approx(1.1)
    assert found.prefill_tok_s == pytest.approx(100)
    assert not counts_tokens([uncounted]) and counts_tokens([cell(answer())])
    assert median_prompt([uncounted]) == 50


def test_only_cut_requests_have_their_speed() -> None:
    found = level(cell(answer(error="unfinished", output_tokens=None, finish=None)))
    assert (found.answers, found.cut) == (0, 1)
    assert found.user_tok_s == pytest.approx(10) and found.tok_s == pytest.approx(1.1)


def test_a_chunk_of_a_cut_request_has_as_many_tokens_as_the_others() -> None:
    cut = answer(2.0, error="unfinished", output_tokens=None, finish=None)
    assert level(cell(answer(output_tokens=22, asked_tokens=22), cut)).tok_s == pytest.approx(4.4)
    uncounted = answer(output_tokens=None)
    assert level(cell(uncounted, cut)).tok_s == level(cell(uncounted, answer(2.0))).tok_s == pytest.approx(2.2)


def test_a_request_that_was_cut_before_its_first_token_waited_longer() -> None:
    waiting = answer(error="unfinished", output_tokens=None, finish=None, chunks_s=[], first_visible_s=None)
    assert level(cell(answer(), waiting, waiting)).ttft_ms is None
    assert level(cell(answer(), answer(), waiting)).ttft_ms == pytest.approx(500)


def test_failed_requests_have_no_speed() -> None:
    failed = answer(error="http", status=500, output_tokens=None, finish=None, chunks_s=[], first_visible_s=None)
    found = level(cell(failed))
    assert (found.answers, found.failed) == (0, 1)
    assert (found.user_tok_s, found.tok_s, found.prefill_tok_s, found.ttft_ms) == (None, None, None, None)


def test_a_model_that_reasons_first_shows_when_its_text_comes() -> None:
    assert level(cell(answer(first_visible_s=1.2))).visible_ms == pytest.approx(1200)
