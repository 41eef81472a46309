"""Texts of common words, a function of the seed and the place; exact token counts where a tokenizer is known.

A text of such words has as many tokens as words, whatever its length: nothing has to be counted while load is sent,
and every later request is exact as well, however many there will be. That is tried on whole texts before it is used.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from harness.errors import HarnessError
from harness.files import read_text

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


ENOUGH = 100  # with fewer words, texts repeat themselves so much that a prefix cache or a draft model has an easy time
EXTRA = "tokenizer"  # the optional dependencies of pyproject.toml that hold `tokenizers`
_GROUP = 64  # words that are counted together; only where the sum is not theirs, smaller groups are
_TRIED = (1, 2, 17, 64, 256)  # lengths of the texts that are counted to see whether it holds

Count = Callable[[str], int]
"""The number of tokens of a text, without any that mark its beginning or end."""


def words_of(count: Count, whose: str) -> tuple[str, ...]:
    """The common words of which each adds exactly one token to a text. Raises HarnessError where that cannot be had."""
    found = _single(common(), count)
    if len(found) < ENOUGH:
        raise HarnessError(
            f"{whose}: only {len(found)} of {len(common())} common words are one token each, too few for varied texts",
            next_step="Remove prompts.tokenizer: a word is then taken for a token, and the server's count is recorded.",
        )
    for tokens in _TRIED:
        for place in range(3):
            got = count(text(tokens, 0, f"counted-{place}", found))
            if got != tokens:
                raise HarnessError(
                    f"{whose}: a text of {tokens} words that are one token each has {got} tokens: "
                    "exact lengths cannot be had by choosing words",
                    next_step="Remove prompts.tokenizer: a word is then taken for a token.",
                )
    return found


@cache
def one_token_words(path: Path) -> tuple[str, ...]:
    """The same by a tokenizer.json on this machine. Raises HarnessError. Nothing is fetched."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise HarnessError(
            "prompts.tokenizer: a local tokenizer needs the package tokenizers, which is not installed",
            next_step=f"pip install 'amd-llm-load[{EXTRA}]', or write `tokenizer: server`.",
        ) from None
    try:
        tokenizer = Tokenizer.from_str(read_text(path))
    except Exception as error:  # the package raises nothing narrower
        raise HarnessError(
            f"{path}: not a tokenizer ({str(error)[:200]})", next_step="Give the tokenizer.json of the model."
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return words_of(lambda words: len(tokenizer.encode(words, add_special_tokens=False).ids), str(path))


def _single(words: Sequence[str], count: Count, group: int = _GROUP) -> tuple[str, ...]:
    """Those of `words` that are one token, at the beginning of a text as well as within it.

    Each word is at least one token, so a group that has as many tokens as words holds no other.
    """
    found: list[str] = []
    for first in range(0, len(words), group):
        part = words[first : first + group]
        if _exact(part, count):
            found += part
        elif len(part) > 1:
            found += _single(part, count, max(1, len(part) // 4))
    return tuple(word for word in found if group != _GROUP or count(word) == 1)


def _exact(words: Sequence[str], count: Count) -> bool:
    return count(" ".join(f"{word} {word}" for word in words)) == 2 * len(words)
