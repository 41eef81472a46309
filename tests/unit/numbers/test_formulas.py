"""Each formula on a record whose numbers are chosen."""

import math
from pathlib import Path

import numpy as np
import pytest

from harness.base.measured import Distribution, Numbers
from harness.base.metrics import DEFINITIONS, LATENCIES, VALUES
from harness.numbers import formulas
from harness.numbers.latencies import token_shares_between
from harness.records.clock import Clock
from harness.records.columns import join_records, read_block, records_at, records_of, rows_of
from harness.records.records import Lines, Request, split_blocks
from tests.support.made_runs import request, value_of, write_lines


def test_a_streamed_request() -> None:
    times_s = [0.25, 0.5, 0.75, 1.0, 1.25]
    made = request(chunks_s=times_s, output_tokens=5, ended_s=1.5, first_visible_s=0.5, scheduled_s=-0.125)
    assert value_of(formulas.ttft, made) == 0.25
    assert value_of(formulas.ttfo, made) == 0.5
    assert value_of(formulas.e2e, made) == 1.25
    assert value_of(formulas.tpot, made) == 0.25  # (1.25 - 0.25) / (5 - 1)
    assert value_of(formulas.send_lag, made) == 0.125


def test_what_is_undefined_is_none() -> None:
    assert value_of(formulas.send_lag, request()) is None  # a closed loop
    assert value_of(formulas.ttfo, request(first_visible_s=None)) is None
    assert value_of(formulas.tpot, request(output_tokens=None)) is None
    assert value_of(formulas.tpot, request(output_tokens=1, chunks_s=[0.5])) is None
    assert (
        value_of(formulas.tpot, request(output_tokens=8, chunks_s=[0.5])) is None
    )  # all in one chunk: no time between
    assert value_of(formulas.e2e, request(error="timeout", ended_s=300.0)) is None
    whole = request(chunks_s=[], first_visible_s=None, ended_s=1.5)  # it has an end and no first token
    assert (value_of(formulas.ttft, whole), value_of(formulas.e2e, whole)) == (None, 1.5)
    # Reasoning has no share of the end token.
    made = request(chunks_s=[0.1, 0.2, 0.3, 0.4], output_tokens=5, textless=1, reasoning_chunks=3, finish="stop")
    assert value_of(formulas.reasoning_tokens, made) == 3.0


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
    made = request(asked_tokens=100, text_chars=400, first_arrival_chars=10, **changes)  # eleven chunks in a second
    assert value_of(formulas.tpot, made) == (None if tokens is None else pytest.approx(1 / (tokens - 1)))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, False),
        ({"output_tokens": 10}, True),
        ({"output_tokens": 10, "fixed_length": False}, False),
        ({"output_tokens": 10, "error": "truncated"}, False),  # it failed: counted there
        ({"output_tokens": None, "finish": "length"}, False),
        ({"output_tokens": None, "finish": "stop"}, True),
        ({"asked_tokens": None}, False),
    ],
)
def test_fixed_length_that_was_not_got(changes: dict[str, object], wrong: bool) -> None:
    assert value_of(formulas.has_wrong_length, request(**changes)) is wrong


def test_the_share_of_tokens_inside_a_window() -> None:
    def share(one: Request, from_s: float, to_s: float) -> float:
        rows = rows_of([one])
        start_s = one.sent_s
        found = token_shares_between(rows, start_s + from_s, start_s + to_s, lambda places: [one for _ in places])
        return float(found[0])

    streamed = request(chunks_s=[1.0, 2.0, 3.0, 4.0])
    assert share(streamed, 0.0, 10.0) == 1.0
    assert share(streamed, 2.0, 3.0) == 0.5
    assert share(streamed, 5.0, 6.0) == 0.0
    whole = request(chunks_s=[], ended_s=4.0)
    assert share(whole, -1.0, 1.0) == 0.25
    assert share(whole, 1.0, 10.0) == 0.75
    assert share(whole, 5.0, 6.0) == 0.0


def test_columns_have_the_values_of_the_records(tmp_path: Path) -> None:
    """However the file is divided; a missing number is NaN, and what cannot be is missing."""
    records = [
        request(index=0, cached_tokens=3, coalesced=2, clock="read", scheduled_s=-0.1),
        request(index=1, error="timeout", output_tokens=None, asked_tokens=None, message="a 1"),
        request(index=-1, phase="warmup", process=8, sent_s=990.0),
        request(index=3, output_tokens=5, prompt_tokens=None, scheduled_s=0.2, finish="stop", model="m"),
        request(index=4, output_tokens=-5, prompt_tokens=10**400),
        request(index=5, chunks_s=[0.4, 0.4, 0.3], error="timeout", message="a 2", connect_retries=1),
    ]
    path = tmp_path / "requests.jsonl"
    write_lines(path, records)
    for size in (1, 1_500, 2**60):
        parts = []
        for block in split_blocks(path, size):
            found = list(read_block(block, Lines()))
            places, of_block = [place for place, _ in found], [one for _, one in found]
            parts.append(records_of(of_block, Clock([]), places=places))
        joined = join_records(parts)
        rows = joined.rows
        kept = list(records_at(path, rows.place.tolist()))
        assert kept == [records[2], *records[:2], *records[3:]], "the warm-up comes first"
        for name in ("index", "process", "sent_s", "ended_s", "scheduled_s", "headers_s", "textless", "cached_tokens"):
            wanted = [math.nan if (value := getattr(one, name)) is None else value for one in kept]
            np.testing.assert_array_equal(getattr(rows, name), wanted)
        np.testing.assert_array_equal(rows.output_tokens, [11, 11, math.nan, 5, math.nan, 11])
        np.testing.assert_array_equal(rows.prompt_tokens, [20, 20, 20, math.nan, math.nan, 20])
        np.testing.assert_array_equal(rows.chunks, [11, 11, 11, 11, 11, 3])
        np.testing.assert_array_equal(rows.last_chunk_s, [1.5, 1.5, 1.5, 1.5, 1.5, 0.3])
        np.testing.assert_array_equal(rows.longest_gap_s[5], 0.0)
        assert rows.disordered.tolist() == [False] * 5 + [True]
        assert rows.first_shared.tolist() == [False] * 5 + [True]
        assert rows.error.counts() == {"timeout": 2} and rows.finish.counts() == {"length": 5, "stop": 1}
        assert {key: count for key, (count, _) in joined.bad.items()} == {
            ("usage.completion_tokens", "below"): 1, ("usage.prompt_tokens", "above"): 1
        }  # fmt: skip
        assert (joined.gaps.requests, joined.gaps.n) == (3, 30)


def test_the_table_of_metrics_has_a_field_and_a_formula_for_each() -> None:
    empty = Numbers(sent=0, succeeded=0, failed=0, unfinished=0)
    assert all(isinstance(latency.of(empty), Distribution) for latency in LATENCIES)
    assert [metric.of(empty) for metric in VALUES] == [None] * len(VALUES)
    assert set(formulas.SAMPLES) | {"gap"} == {latency.name for latency in LATENCIES}  # a request has many gaps
    assert DEFINITIONS.keys() >= {latency.name for latency in LATENCIES}
