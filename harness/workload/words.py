"""Texts of common words, a function of the seed and the place."""

import random
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

SALT_WORDS = 4


def text(tokens: int, seed: int, place: int | str, words: Sequence[str] = ()) -> str:
    """`tokens` common words, each of which is one token in the usual vocabularies; `words`: out of these alone."""
    words = words or common()
    number = len(words)
    draw = random.Random(f"{seed}:{place}").random  # the one method whose results Python promises to keep
    return " ".join([words[int(draw() * number)] for _ in range(tokens)])


def salt_words(run_id: str, cell_id: str, words: Sequence[str] = ()) -> str:
    """Four words that belong to this cell of this run alone: one in about 10^11 others has the same."""
    return text(SALT_WORDS, 0, f"{run_id}/{cell_id}", words)


@cache
def common() -> tuple[str, ...]:
    """The words that texts are made of."""
    return tuple(files("harness.data").joinpath("words.txt").read_text(encoding="ascii").split())
