"""Commands that the product prints to be pasted: every one is made of a list of words, quoted for a shell."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

_CHANGED = re.compile("`|  ")  # by a page, which ends code at a backtick and joins spaces


class ShellWord(str):
    """A word that is quoted already, with variables that the shell fills in."""


def command_line(*words: object) -> str:
    """Return a command for a POSIX shell. None is left out; a Path never reads as an option.

    Words with control characters or marks that change the direction of text are written with escapes: bash and zsh read
    them back, and a terminal shows what they are. So are backticks and several spaces: a page has the command as code.
    """
    return " ".join(word if isinstance(word, ShellWord) else quote(_word(word)) for word in words if word is not None)


def positional(word: str) -> Iterator[str]:
    """Yield the words for an argument at the end of a command that an option could be mistaken for."""
    if word.startswith("-"):
        yield "--"
    yield word


def option_words(options: Mapping[str, object]) -> Iterator[object]:
    """Yield the words of options by name; None: it is not given."""
    for name, value in options.items():
        if value is not None:
            yield from (name, value)


def with_variable(text: str, name: str) -> ShellWord:
    """Return a word of a text and the value of an environment variable, which the shell fills in."""
    head = text.rstrip(" ")
    return ShellWord(f'{quote(head) if head else ""}"{text[len(head) :]}${{{name}}}"')


def _word(word: object) -> str:
    text = str(word)
    return f"./{text}" if isinstance(word, Path) and text.startswith("-") else text


def quote(word: str) -> str:
    """Return a word for a shell that fills in nothing."""
    if word.isprintable() and not _CHANGED.search(word):
        return shlex.quote(word)
    return "$'" + re.sub("(?<= ) ", r"\\x20", "".join(map(_escape, word))) + "'"


def _escape(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable() and character != "`":
        return character
    # A byte that is no UTF-8 (a surrogate, as Python reads it) is the byte again.
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
