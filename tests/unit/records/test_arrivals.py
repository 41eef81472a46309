"""Which chunks came together, and what TPOT follows from it."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from harness.load.openai_api import count_words
from harness.numbers import formulas
from harness.numbers.cell_numbers import find_bundle
from harness.records.arrivals import split_arrivals
from harness.records.columns import rows_of
from tests.support.made_runs import request, value_of


def even(step_s: float, chunks: int = 32, first_s: float = 0.1) -> list[float]:
    return [first_s + step_s * i for i in range(chunks)]


def shaken(step_s: float, chunks: int = 64, first_s: float = 0.1, seed: int = 1) -> list[float]:
    """Steps of 60 to 140 % of `step_s`."""
    draw, times_s = random.Random(seed), [first_s]
    while len(times_s) < chunks:
        times_s.append(times_s[-1] + step_s * draw.uniform(0.6, 1.4))
    return times_s


def bundled(step_s: float, size: int, write_s: float, chunks: int = 64, first_s: float = 0.1) -> list[float]:
    """A proxy passes on `size` chunks at a time, in writes that are `write_s` apart."""
    return [first_s + step_s * (size * (i // size + 1) - 1) + write_s * (i % size) for i in range(chunks)]


@pytest.mark.parametrize("step_s", [0.0003, 0.001, 0.0012, 0.002, 0.01, 0.2])
def test_each_chunk_of_a_steady_server_is_an_arrival(step_s: float) -> None:
    for times_s in (even(step_s, first_s=0.02), *(shaken(step_s, first_s=0.02, seed=seed) for seed in range(20))):
        assert len(split_arrivals(times_s)) == len(times_s)


@pytest.mark.parametrize(("step_s", "size", "write_s"), [(0.01, 16, 0.00002), (0.01, 16, 0.0008), (0.002, 4, 0.0006)])
def test_chunks_that_a_proxy_passes_on_together_are_one_arrival(step_s: float, size: int, write_s: float) -> None:
    assert split_arrivals(bundled(step_s, size, write_s)) == list(range(0, 64, size))


@pytest.mark.parametrize(
    "times_s",
    [
        [0.37 + 0.00001 * i for i in range(32)],
        [0.37 + 0.0003 * i for i in range(32)],  # a slow proxy writes each chunk by itself
        [0.37 + 0.0003 * i + 0.0012 * (i // 8) for i in range(32)],  # likewise, with pauses
    ],
)
def test_an_answer_that_was_held_back_is_one_arrival(times_s: Sequence[float]) -> None:
    assert split_arrivals(times_s) == [0]


def test_stalls_join_nothing() -> None:
    times_s = [at_s + (5.0 if i >= 20 else 0.0) for i, at_s in enumerate(even(0.01))]
    assert len(split_arrivals(times_s)) == 32
    assert split_arrivals([]) == [] and split_arrivals([0.1]) == [0]


def streamed(times_s: Sequence[float], tokens: int, chars: Sequence[int], **more: Any) -> Any:
    starts = split_arrivals(times_s)
    first = starts[1] if len(starts) > 1 else len(times_s)
    given = {"chunks_s": list(times_s), "output_tokens": tokens, "asked_tokens": tokens, "ended_s": times_s[-1]}
    texts = {"text_chars": sum(chars), "first_arrival_chars": sum(chars[:first]), "first_words": 1}
    return request(**(given | texts | more))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("events", ["each token", "one event"])
def test_tpot_does_not_depend_on_what_a_proxy_bundles(size: int, events: str) -> None:
    """A true 10 ms a token, as chunks of one token or of several."""
    if events == "each token":
        made = streamed(bundled(0.01, size, 0.00002), 64, [4] * 64)
    else:
        times_s = [0.1 + 0.01 * (size * (i + 1) - 1) for i in range(64 // size)]
        made = streamed(times_s, 64, [4 * size] * len(times_s), first_words=size)
    assert value_of(formulas.tpot, made) == pytest.approx(0.01, rel=1e-6)
    assert formulas.first_arrival_tokens(rows_of([made])).tolist() == [size]


def test_tpot_is_from_the_last_chunk_of_the_first_arrival() -> None:
    """A proxy that writes 16 chunks over 12 ms: from the first one, 112 tokens would take 12 ms more."""
    made = streamed(bundled(0.01, 16, 0.0008, chunks=128), 128, [4] * 128)
    assert value_of(formulas.tpot, made) == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("first_chars", [1, 4, 9, 13])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_a_stream_interval_sends_one_token_first(size: int, first_chars: int) -> None:
    """vLLM's stream interval and speculation: the first token alone, then several an event."""
    events = 96 // size
    made = streamed([0.1 + 0.01 * size * i for i in range(events + 1)], 1 + size * events,
                    [first_chars, *[4 * size] * events])  # fmt: skip
    assert value_of(formulas.tpot, made) == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize(("first", "words"), [("Unfortunately", 1), ("two words", 2), ("你好", 3), ("\N{OWL}", 2)])
def test_words_of_a_first_piece(first: str, words: int) -> None:
    assert count_words(first) == words


def test_signs_of_several_tokens_come_whole() -> None:
    """Emoji of three tokens each: the first event has three, too."""
    made = streamed([0.12 + 0.03 * i for i in range(16)], 48, [1] * 16, first_words=count_words("\N{OWL}"))
    assert value_of(formulas.tpot, made) == pytest.approx(0.01, rel=1e-6)
    assert find_bundle([rows_of([made] * 4)]) is None


def test_a_bundle_is_of_most_answers() -> None:
    """One answer of sixteen that a busy machine bundled says nothing of a proxy."""
    held, steady = streamed(bundled(0.01, 8, 0.0), 64, [4] * 64), streamed(even(0.01, 64), 64, [4] * 64)
    quick = streamed(even(0.002, 16, 0.02), 16, [4] * 16)
    assert find_bundle([rows_of([held, *[quick] * 15])]) is None
    assert find_bundle([rows_of([held, held, held, steady])]) is not None


def test_what_came_in_few_pieces_has_no_tpot() -> None:
    two = streamed([0.356, 0.357], 32, [31 * 3, 3], first_words=31)  # 48,000 tok/s otherwise
    four = streamed([0.156, 0.22, 0.284, 0.348], 32, [24] * 4, first_words=8)
    for made in (two, four):
        assert value_of(formulas.tpot, made) is None
        slow, fast = (formulas.latency_states(rows_of([made]), "tpot") for _ in range(2))
        assert slow[0].tolist() == [pytest.approx(made.chunks_s[-1] / 31)]  # at most that
    assert [value_of(formulas.is_bundled, made) for made in (two, four)] == [True, False]


def test_records_without_lengths_have_a_tpot_only_where_it_is_certain() -> None:
    lengths = {"text_chars": None, "first_arrival_chars": None, "first_words": None}
    each = streamed(bundled(0.01, 16, 0.00002, chunks=96), 96, [4] * 96, **lengths)
    assert value_of(formulas.tpot, each) == pytest.approx(0.01, rel=0.01)  # one token a chunk
    for events, known in ((6, False), (100, True)):  # of eight tokens: the first may have one or eight
        times_s = [0.1 + 0.08 * i for i in range(events)]
        made = streamed(times_s, 8 * events, [32] * events, **lengths)
        assert (value_of(formulas.tpot, made) is not None) is known


def drawn_stream(draw: random.Random) -> list[float]:
    """A stream of any kind: its gaps lie around every limit, and some chunks came together or out of order."""
    mean_s = 10 ** draw.uniform(-4.5, 0)
    together, backward = draw.choice([0, 0, 0.1, 0.5, 0.9]), draw.choice([0, 0, 0, 0.02])
    times_s = [draw.choice([0.001, 0.1, 2.0])]
    for _ in range(draw.choice([0, 0, 1, 2, 3, 15, 60, 200])):
        gap_s = draw.choice([draw.expovariate(1 / mean_s), mean_s, mean_s * draw.uniform(0.6, 1.4)])
        gap_s = draw.choice([0.0, 0.00002, 0.0002, 0.0004, 0.0011]) if draw.random() < together else gap_s
        times_s.append(times_s[-1] + (-gap_s if draw.random() < backward else gap_s))
    return times_s


@pytest.mark.parametrize("seed", range(4))
def test_the_table_has_the_arrivals_of_each_stream(seed: int) -> None:
    """Short ways must give what the definition gives; with an answer that was not streamed, and a very long one."""
    draw = random.Random(seed)
    streams = [drawn_stream(draw) for _ in range(2_000)]
    back = [*even(0.05, chunks=21), *even(0.004, chunks=4, first_s=0.2)]
    streams[500:500] = [[], even(0.01, chunks=70_000), back, shaken(0.001, chunks=40_000)]
    rows = rows_of([request(chunks_s=times_s) for times_s in streams])
    starts = [split_arrivals(times_s) for times_s in streams]
    firsts = [start[1] if len(start) > 1 else len(times_s) for start, times_s in zip(starts, streams, strict=True)]
    assert rows.arrivals.tolist() == [len(start) for start in starts]
    assert rows.first_arrival_chunks.tolist() == firsts
    assert [None if math.isnan(at_s) else at_s for at_s in rows.first_arrival_s.tolist()] == [
        times_s[first - 1] if times_s else None for times_s, first in zip(streams, firsts, strict=True)
    ]
    assert sum(1 < len(start) < len(times_s) for start, times_s in zip(starts, streams, strict=True)) > 300
