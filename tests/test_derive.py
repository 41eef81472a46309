"""Each formula on a record whose numbers are chosen."""

import pytest

from harness.analysis import derive
from harness.columns import DEFINITIONS, LATENCIES, VALUES
from harness.summary import Distribution, Numbers
from tests.made_runs import request


def test_a_streamed_request() -> None:
    made = request(chunks_s=[0.25, 0.5, 1.25], output_tokens=5, ended_s=1.5, first_visible_s=0.5, scheduled_s=-0.125)
    assert derive.ttft_s(made) == 0.25
    assert derive.ttfo_s(made) == 0.5
    assert derive.e2e_s(made) == 1.25
    assert derive.tpot_s(made) == 0.25  # (1.25 - 0.25) / (5 - 1)
    assert derive.send_lag_s(made) == 0.125


def test_what_is_undefined_is_none() -> None:
    assert derive.send_lag_s(request()) is None  # a closed loop
    assert derive.ttfo_s(request(first_visible_s=None)) is None
    assert derive.tpot_s(request(output_tokens=None)) is None
    assert derive.tpot_s(request(output_tokens=1, chunks_s=[0.5])) is None
    assert derive.tpot_s(request(output_tokens=8, chunks_s=[0.5])) is None  # all in one chunk: no time between
    assert derive.e2e_s(request(error="timeout", ended_s=300.0)) is None
    whole = request(chunks_s=[], first_visible_s=None, ended_s=1.5)  # it has an end and no first token
    assert (derive.ttft_s(whole), derive.e2e_s(whole)) == (None, 1.5)
    # Reasoning has no share of the end token.
    made = request(chunks_s=[0.1, 0.2, 0.3, 0.4], output_tokens=5, textless=1, reasoning_chunks=3, finish="stop")
    assert derive.reasoning_tokens(made) == 3.0


STOP = {"finish": "stop"}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"output_tokens": 12, "textless": 1} | STOP, 11),  # vLLM and llama.cpp: the usage counts the end token
        ({"output_tokens": 11, "textless": 1} | STOP, 11),  # a server that does not count it
        ({"output_tokens": 11, "textless": 0} | STOP, 11),  # the end token came with the last text
        ({"output_tokens": 12, "textless": 0} | STOP, 11),  # likewise, and the usage counts it
        ({"output_tokens": 14, "textless": 3} | STOP, 11),  # a stop string of two tokens, and the end token
        ({"output_tokens": 30, "textless": 1} | STOP, 29),  # several tokens a chunk
        ({"output_tokens": 30, "textless": 0} | STOP, 30),  # likewise, the end token with the last of them
        ({"output_tokens": 30, "textless": 0}, 30),
        ({"output_tokens": 8, "textless": 1} | STOP, 8),  # a token in several chunks
        ({"output_tokens": 12, "textless": 1, "finish": "tool_calls", "tool_chunks": 5}, 11),
        ({"output_tokens": 20, "textless": 1, "finish": "tool_calls", "tool_chunks": 5}, 19),
        ({"output_tokens": 12, "textless": 1, "finish": "tool_calls", "tool_chunks": 11}, 11),
        # The name of the tool is held back.
        ({"output_tokens": 20, "textless": 1, "finish": "tool_calls", "tool_chunks": 11}, None),
        ({"output_tokens": 12} | STOP, 11),  # of an older harness
        ({"output_tokens": 11} | STOP, 11),
        ({"output_tokens": 12, "finish": "tool_calls"}, 11),
        ({"output_tokens": 12}, 12),
        ({"output_tokens": 12, "finish": None}, 12),  # imported
    ],
)
def test_tokens_that_no_chunk_carries_are_not_in_tpot(changes: dict[str, object], tokens: int | None) -> None:
    made = request(**changes)  # eleven chunks in a second
    assert derive.tpot_s(made) == (None if tokens is None else pytest.approx(1 / (tokens - 1)))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, False),
        ({"output_tokens": 10}, True),
        ({"output_tokens": 12}, True),
        ({"output_tokens": 10, "fixed_length": False}, False),
        ({"output_tokens": 10, "error": "truncated"}, False),  # it failed: counted there
        ({"output_tokens": None, "finish": "length"}, False),
        ({"output_tokens": None, "finish": "stop"}, True),
        ({"asked_tokens": None}, False),
    ],
)
def test_fixed_length_that_was_not_got(changes: dict[str, object], wrong: bool) -> None:
    assert derive.has_wrong_length(request(**changes)) is wrong


def test_the_share_of_tokens_inside_a_window() -> None:
    streamed = request(chunks_s=[1.0, 2.0, 3.0, 4.0])
    assert derive.token_share_between(streamed, 0.0, 10.0) == 1.0
    assert derive.token_share_between(streamed, 2.0, 3.0) == 0.5
    assert derive.token_share_between(streamed, 5.0, 6.0) == 0.0
    whole = request(chunks_s=[], ended_s=4.0)
    assert derive.token_share_between(whole, -1.0, 1.0) == 0.25
    assert derive.token_share_between(whole, 1.0, 10.0) == 0.75
    assert derive.token_share_between(whole, 5.0, 6.0) == 0.0


def test_the_table_of_metrics_has_a_field_and_a_formula_for_each() -> None:
    empty = Numbers(sent=0, succeeded=0, failed=0, unfinished=0)
    assert all(isinstance(getattr(empty, column.field), Distribution) for column in LATENCIES)
    assert [column.value_of(empty) for column in VALUES] == [None] * len(VALUES)
    assert derive.FORMULAS.keys() | {"chunk_gap_s"} == {column.field for column in LATENCIES}  # a request has many gaps
    assert DEFINITIONS.keys() >= {column.field for column in LATENCIES}
