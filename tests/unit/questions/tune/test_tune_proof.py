"""`harness tune` on seeded spaces of the embedded engine in virtual time, and the rates of its proof (docs/method.md).

Nightly: all 30 spaces, three draws of the noise of each, with and without a known safe share of the memory.
"""

import math
import random
import statistics
from collections import Counter
from functools import cache

import pytest

from harness.questions.tune.decide import blocks_needed, decide
from tests.support.nightly import NIGHTLY, draws, room
from tests.support.virtual_tune import SAFE, SPACES, Tuned, every, measured, seeded_space, truths, tune

SEEDS = range(SPACES) if NIGHTLY else (4, 9, 13, 19)


@cache
def searches(known: bool = True) -> list[Tuned]:
    return [tune(seed, draw, known=known) for seed in SEEDS for draw in range(3 if NIGHTLY else 1)]


@pytest.mark.parametrize("seed", range(SPACES) if NIGHTLY else [9])
def test_the_stored_truth_is_what_is_measured(seed: int) -> None:
    space = seeded_space(seed)
    places = random.Random(seed).sample(range(len(every(space))), 40 if NIGHTLY else 10)
    for place in places:
        found, stored = measured(space, every(space)[place]), truths()[seed][place]
        assert (found is None) == (stored is None)
        assert (found or 0) == pytest.approx(stored or 0, rel=1e-4), (
            "`python -m tests.support.virtual_tune` writes it anew"
        )


@pytest.mark.parametrize("known", [True, False] if NIGHTLY else [True])
def test_the_search_finds_the_best_in_few_starts(known: bool) -> None:
    found = searches(known)
    assert statistics.median(one.share for one in found) >= 0.97
    assert sum(one.share >= 0.97 for one in found) >= (0.9 if known else 0.8) * len(found)
    assert statistics.median(len(one.trials) for one in found) <= 15


def test_no_start_takes_more_memory_than_is_safe() -> None:
    assert max(trial.settings.get("memory", 0.7) for one in searches() for trial in one.trials) <= SAFE


@pytest.mark.parametrize("known", [True, False] if NIGHTLY else [True])
def test_the_answer_is_right(known: bool) -> None:
    equal = [one.answer.verdict for one in searches(known) if one.possible < 1.02]
    assert equal.count("keep") >= 0.95 * len(equal) > 0
    gains = [one.recommended for one in searches(known) if one.recommended is not None]
    assert sum(gain > 1 for gain in gains) >= 0.95 * len(gains) > 0


def proofs(gain: float, noise: float, count: int, seed: int, blocks: int | None = None) -> Counter[str]:
    """The verdicts of proofs of a setting with this true gain, and of one without; blocks are planned for `gain`."""
    dice = random.Random(seed)
    blocks = blocks or blocks_needed(math.log(gain), noise)

    def results(true: float) -> list[float]:
        return [true * math.exp(dice.gauss(0, noise)) for _ in range(blocks)]

    answers = [decide("output_tok_s", results(1.0), [({"a": 1}, results(gain)), ({"a": 2}, results(1.0))])
               for _ in range(count)]  # fmt: skip
    wrong = [answer.verdict == "set" and answer.settings == {"a": 2} for answer in answers]
    return Counter("false" if one else answer.verdict for one, answer in zip(wrong, answers, strict=True))


@pytest.mark.parametrize(
    ("noise", "blocks"), [(0.01, 3), (0.02, 3), (0.02, 10), (0.04, 10)] if NIGHTLY else [(0.02, 3)]
)
def test_the_proof_rarely_recommends_what_brings_nothing(noise: float, blocks: int) -> None:
    """Most of the time is spent on how many blocks would settle what is inconclusive."""
    count = draws(400)
    found = proofs(1.0, noise, count, seed=blocks, blocks=blocks)
    assert found["set"] + found["false"] <= (0.02 + room(0.02, count)) * count


@pytest.mark.parametrize(("gain", "noise"), [(1.05, 0.01), (1.10, 0.02), (1.20, 0.04)] if NIGHTLY else [(1.10, 0.01)])
def test_the_proof_finds_the_gain_that_its_blocks_are_planned_for(gain: float, noise: float) -> None:
    count = draws(400)
    found = proofs(gain, noise, count, seed=1)
    assert found["set"] >= (0.75 - room(0.75, count)) * count
    assert found["false"] <= 0.01 * count
