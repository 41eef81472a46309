"""Stubs and users that get nothing, in records made by hand; queues in order and uneven answers are neither."""

import random
from typing import Any

import pytest

from harness.numbers.answered import (
    Answered,
    answered,
    are_shorter,
    are_stubs,
    has_free_lengths,
    median_length,
    poor_share,
    unserved,
)
from harness.records.columns import rows_of
from harness.records.records import Request
from harness.scenario import Load, Prompts, Trace
from harness.scenario.behaviour import Structured
from tests.support.made_runs import request


def of(*requests: Request) -> Answered:
    return answered(rows_of(requests))


def asked(user: int, sent_s: float, ttft_s: float | None, tokens: int = 20, step_s: float = 0.01) -> Request:
    """A request that starts `ttft_s` after it is sent; None: it waits for 60 s and is cut."""
    if ttft_s is None:
        cut: dict[str, Any] = {"error": "unfinished", "chunks_s": [], "output_tokens": None, "finish": None}
        return request(user=user, sent_s=sent_s, ended_s=60.0 - sent_s, **cut)
    chunks_s = [ttft_s + step_s * place for place in range(tokens)]
    return request(
        user=user, sent_s=sent_s, chunks_s=chunks_s, ended_s=chunks_s[-1], output_tokens=tokens, asked_tokens=tokens
    )


def queue(users: int, slots: int, *, order: str = "first", spread: float = 0.3, seed: int = 1) -> list[Request]:
    """A minute of users that ask again at once, of a server with so many slots. `last`: the newest request is next."""
    dice, done, now_s = random.Random(seed), list[Request](), 0.0
    waiting, free_s = [(0.0, user) for user in range(users)], [0.0] * slots
    while (now_s := min(free_s)) < 60.0 and waiting:
        ready = sorted(one for one in waiting if one[0] <= now_s)
        if not ready:
            free_s[free_s.index(now_s)] = min(waiting)[0]
            continue
        chosen = ready[0] if order == "first" else ready[-1]
        waiting.remove(chosen)
        sent_s, user = chosen
        tokens = max(2, int(60 * dice.lognormvariate(0.0, spread)))
        one = asked(user, sent_s, now_s - sent_s + 0.05, tokens)
        done.append(one)
        free_s[free_s.index(now_s)] = sent_s + one.ended_s
        waiting.append((sent_s + one.ended_s, user))
    return [*done, *(asked(user, sent_s, None) for sent_s, user in waiting if sent_s < 59.9)]


def test_half_of_the_users_get_nothing() -> None:
    served = [asked(user, 0.5 * turn, 0.05) for user in range(3) for turn in range(80)]
    stuck = [asked(user, 0.0, None) for user in range(3, 6)]
    assert unserved(of(*served, *stuck), 6) == 3
    assert unserved(of(*served), 6) == 0
    assert unserved(of(*served[:1], *served[80:81], *served[160:161], *stuck), 6) == 0, "too few were served meanwhile"
    late = [asked(user, 20.0 * turn, 19.0) for user in range(3, 6) for turn in range(2)]
    assert unserved(of(*served, *late), 6) == 3, "answers that come after 38 others"
    late = [asked(user, 20.0 * turn, 19.0 if turn else 0.05) for user in range(3, 6) for turn in range(2)]
    assert unserved(of(*served, *late), 6) == 0, "one of them came in time"


def test_users_that_left_or_failed_are_not_left_waiting() -> None:
    served = [asked(user, 0.5 * turn, 0.05) for user in range(3) for turn in range(40)]
    for error, number in (("abandoned", 0), ("rejected", 0), ("timeout", 3), ("unfinished", 3)):
        left: dict[str, Any] = {"error": error, "chunks_s": [], "output_tokens": None, "ended_s": 19.0}
        assert unserved(of(*served, *(request(user=user, sent_s=0.0, **left) for user in (3, 4, 5))), 6) == number
    reading = [
        request(user=user, sent_s=0.0, error="unfinished", chunks_s=[0.1, 15.0], ended_s=19.0) for user in (3, 4)
    ]
    assert unserved(of(*served, *reading), 6) == 0, "they get tokens"


@pytest.mark.parametrize("users", [1, 2, 4, 8, 32, 100])
def test_a_queue_in_order_of_arrival_lets_nobody_wait(users: int) -> None:
    for slots in (1, 2, 3, 7, 30, 128):
        for spread in (0.0, 0.3, 1.0):
            assert unserved(of(*queue(users, slots, spread=spread)), users) == 0, (slots, spread)


def test_the_newest_first_starves_the_others() -> None:
    assert unserved(of(*queue(8, 2, order="last")), 8) >= 4


def test_answers_in_one_piece_take_their_whole_time() -> None:
    """A user with long answers is not overtaken because others ask again meanwhile."""
    whole = [request(user=0, sent_s=0.0, ended_s=10.0, chunks_s=[], output_tokens=900)]
    whole += [request(user=1 + turn % 3, sent_s=turn / 3, ended_s=0.9, chunks_s=[]) for turn in range(30)]
    assert unserved(of(*whole), 4) < unserved(of(*(asked(one.user, one.sent_s, one.ended_s) for one in whole)), 4)
    assert unserved(of(*whole), 4) == 0


def lengths(*tokens: int, cut: int = 0) -> Answered:
    ended = [asked(0, float(place), 0.1, one) for place, one in enumerate(tokens)]
    return of(*ended, *(asked(0, 50.0, None) for _ in range(cut)))


def test_shorter_is_below_half_and_beyond_chance() -> None:
    before = lengths(*[64] * 5)
    assert are_shorter(lengths(*[1] * 8), before)
    assert are_shorter(lengths(*[64] * 4, *[1] * 40), before)
    assert not are_shorter(lengths(*[33] * 40), before), "more than half"
    assert not are_shorter(lengths(1, 1, 1), before), "three answers"
    assert not are_shorter(lengths(*[1] * 8), lengths(64)), "of a single one"
    assert not are_shorter(lengths(*[1] * 8, cut=20), before), "the end of the load cut the long ones"
    assert not are_shorter(lengths(*[1] * 8), lengths()) and not are_shorter(lengths(), before)
    assert are_shorter(lengths(*[1] * 20), lengths(*[64] * 5, cut=9))


def test_uneven_lengths_of_one_model_are_no_shorter_ones() -> None:
    """Lengths of people's questions, at most 256, of 4 to 60 answers a side: at most 1 % of the pairs."""
    dice = random.Random(7)

    def drawn(number: int) -> Answered:
        return lengths(*(min(256, max(1, int(dice.lognormvariate(4.0, 1.2)))) for _ in range(number)))

    pairs = [are_shorter(drawn(dice.randint(4, 60)), drawn(dice.randint(4, 60))) for _ in range(200)]
    assert sum(pairs) <= 2


def test_stubs() -> None:
    assert are_stubs(lengths(1, 1, 1, 2, 60), 64.0)
    assert not are_stubs(lengths(1, 1, 1, 2, 60), 8.0) and not are_stubs(lengths(1, 1, 1, 2, 60), None)
    assert not are_stubs(lengths(1, 1, 1, 1), 64.0) and not are_stubs(lengths(1, 2, 3, 9, 60), 64.0)
    assert (median_length(lengths(1, 3, 9)), median_length(lengths(1, cut=3)), median_length(lengths())) == (
        3,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("load", "prompts", "free"),
    [
        ({"user": "chat"}, {}, True),
        ({"user": "batch", "output": "natural"}, {"kind": "file", "file": "p.jsonl"}, True),
        ({"user": "batch"}, {"kind": "classification"}, False),
        ({"user": "batch", "answer": Structured(choice=["a", "b"])}, {}, False),
        ({"user": "batch", "endpoint": "embeddings"}, {}, False),
        ({"user": "agent"}, {}, False),
        ({"user": "batch", "trace": Trace(file="t.csv")}, {}, False),
    ],
)
def test_labels_vectors_and_calls_may_be_short(load: dict[str, str], prompts: dict[str, str], free: bool) -> None:
    assert has_free_lengths(Load(**load), Prompts(**prompts)) == free  # type: ignore[arg-type]


def test_answers_with_tools_and_of_the_warm_up_have_no_length() -> None:
    records = [asked(0, 0.0, 0.1), request(tool_calls=1, tool_calls_valid=1), request(phase="warmup")]
    assert of(*records).length.tolist()[0] == 20 and median_length(of(*records)) == 20


def test_the_share_of_refused_and_empty_answers() -> None:
    blank: dict[str, Any] = {"odd_text": "blank", "finish": "stop", "fixed_length": False}
    empty: dict[str, Any] = {"error": "empty", "chunks_s": [], "output_tokens": None}
    rejected: dict[str, Any] = {"error": "rejected", "chunks_s": [], "output_tokens": None}
    records = [request(**one) for one in ({}, {"refused": True}, {"finish": "content_filter"}, blank, empty, rejected)]
    assert poor_share(of(*records)) == 0.8
    assert poor_share(of(request(odd_text="blank"))) == 0, "it has the length that was asked for"
    assert poor_share(of()) == 0
