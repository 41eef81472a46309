"""A word for each virtual user, which its prompts ask the model to repeat. In the answer to another user it is a leak.

A word is three common words with hyphens between them, such as "maple-otter-lantern". No prompt, no text that ships and
no answer by itself has one: of 800 million words a load uses one for each user.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from typing import NamedTuple

from harness.workload import common_words

PARTS = 3  # common words in a word
MAX_CHARS = 1_000_000  # of an answer that are looked at
_MIN_LETTERS = 3  # of a part: "in-to-the" is a text's own

_CHAIN = re.compile(r"[a-z-]+")  # with more in it, its time would not be linear


class WordOwner(NamedTuple):
    load: int  # number of the load, in a mix
    user: int


def ask_for(word: str, content: str) -> str:
    """Return the text of a message that also asks to repeat a word."""
    return f"Begin each answer with the word {word}.\n\n{content}"


class OwnWords:
    """The words of all users of a load generator."""

    def __init__(self, seed: int, users: Sequence[int]) -> None:
        """users: by load, how many it has at most; 0 for a load without words."""
        self._seed = seed
        self._words: list[list[str]] = [[] for _ in users]
        self._owners: dict[str, WordOwner] = {}
        for load, number in enumerate(users):
            if number:
                self.word(load, number - 1)

    def word(self, load: int, user: int) -> str:
        """Return the word of a user of a load; the same in every run with this seed."""
        words = self._words[load]
        while len(words) <= user:
            new = next(word for word in self._draws(load, len(words)) if word not in self._owners)
            self._owners[new] = WordOwner(load, len(words))
            words.append(new)
        return words[user]

    def owners(self, text: str) -> set[WordOwner]:
        """Return the users whose words a text has. The time is linear in its length."""
        owners: set[WordOwner] = set()
        for chain in _CHAIN.finditer(text[:MAX_CHARS].lower()):
            parts = chain[0].split("-")
            for first in range(len(parts) - PARTS + 1):
                owner = self._owners.get("-".join(parts[first : first + PARTS]))
                if owner is not None:
                    owners.add(owner)
        return owners

    def _draws(self, load: int, user: int) -> Iterator[str]:
        words = _parts()
        for attempt in count():
            digest = hashlib.blake2b(f"{self._seed}:own:{load}:{user}:{attempt}".encode(), digest_size=4 * PARTS)
            numbers = [int.from_bytes(digest.digest()[4 * place : 4 * place + 4]) for place in range(PARTS)]
            yield "-".join(words[number % len(words)] for number in numbers)


@cache
def _parts() -> tuple[str, ...]:
    return tuple(word for word in common_words() if len(word) >= _MIN_LETTERS)
