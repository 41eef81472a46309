"""A stated, simple tokenizer: one token per whitespace-separated word.

A chat prompt adds what a real chat template adds: per message a start marker, the role and an end marker, and at
the end the two tokens that open the assistant's answer. So a single user message of W words has W + 5 tokens, and
the next turn of a conversation begins with exactly the tokens of the turn before: prefix caching sees what a real
server sees. `/tokenize` counts by the same rule.
"""

import zlib
from collections.abc import Sequence

START, END = "<|im_start|>", "<|im_end|>"
_TEXT = """
the of a to and in is that it was for on as with by at from are this be or an have not which one all
their there can more time about into some other than then its only new these two may first any my now
such like our over even most me after also did many before must through back years where much your way
well down should because each just those people how too little state good very make world still own see
work long get here between both life being under never day same another know while last might us great
"""
WORDS = tuple(_TEXT.split())


def token_id(word: str) -> int:
    """A stable id for a word (CRC-32: the same in every process, unlike `hash`)."""
    return zlib.crc32(word.encode())


def text_tokens(text: str) -> list[int]:
    return [token_id(word) for word in text.split()]


def chat_tokens(messages: Sequence[tuple[str, str]]) -> list[int]:
    """Token ids of a conversation of (role, text), the generation prompt included."""
    ids: list[int] = []
    for role, text in messages:
        ids += [token_id(START), token_id(role), *text_tokens(text), token_id(END)]
    return [*ids, token_id(START), token_id("assistant")]


def prompt_hash(prompt: Sequence[int], seed: int) -> int:
    """A number that depends on the prompt and the seed alone; it picks the words and the natural length."""
    return zlib.crc32(b"".join(i.to_bytes(8, "little") for i in prompt), seed & 0xFFFFFFFF)


def output_word(number: int, index: int) -> int:
    """Index into `WORDS` of output token `index` of the request whose `prompt_hash` is `number`."""
    return (number + index * (2 * (number >> 7) % len(WORDS) + 1)) % len(WORDS)


def natural_length(number: int, mean: int) -> int:
    """A seeded answer length of at least 1 token, spread evenly over half to one and a half times `mean`."""
    return max(1, mean // 2 + (number * 2654435761 >> 7) % (mean + 1))
