"""Commands that the product prints to be pasted: every one is made of a list of words, quoted for a shell."""

import shlex
from collections.abc import Iterator
from pathlib import Path


def command_line(*words: object) -> str:
    """Return a command for a POSIX shell. None is left out; a Path never reads as an option.

    Words with control characters or marks that change the direction of text are written with escapes: bash and zsh read
    them back, and a terminal shows what they are.
    """
    return " ".join(quote(_word(word)) for word in words if word is not None)


def positional(word: str) -> Iterator[str]:
    """Yield the words for an argument at the end of a command that an option could be mistaken for."""
    if word.startswith("-"):
        yield "--"
    yield word


def _word(word: object) -> str:
    text = str(word)
    return f"./{text}" if isinstance(word, Path) and text.startswith("-") else text


def quote(word: str) -> str:
    """Return a word for a shell that fills in nothing."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escape, word)) + "'"


def _escape(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    # A byte that is no UTF-8 (a surrogate, as Python reads it) is the byte again.
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
