"""The words of a server's command line: which flags they give, with which values, and the words with other flags.

As the parsers of the engines read them: `--flag=value` is `--flag value`, `_` means `-` in the name of a long flag, the
last of two equal flags counts, `--flag.key value` sets a part of a flag's value, and a negative number is a value. Only
words go in and come out; settings.py knows what the flags mean.
"""

import re
import shlex
from collections.abc import Collection, Sequence
from itertools import takewhile

_FLAG = re.compile("--?[A-Za-z]")
_WORD = re.compile(r"""(?:"[^"]*(?:"|$)|'[^']*(?:'|$)|[^\s"'])+""")
_QUOTED = re.compile(r""""([^"]*)(?:"|$)|'([^']*)(?:'|$)""")
_NEEDS_QUOTES = re.compile(r"[\s\"']")
SEPARATOR = "--"  # what follows are the words of another program


def words_of(arguments: object) -> list[str]:
    """Return arguments as words: those of a list, or of a text. Quotes keep a word of a text together; none is in it.

    Servers that start an engine split the text of its arguments so, without a way to escape.
    """
    if isinstance(arguments, str):
        words = (_QUOTED.sub(lambda match: match[1] or match[2] or "", word) for word in _WORD.findall(arguments))
        return [word for word in words if word]
    return [str(word) for word in arguments] if isinstance(arguments, list | tuple) else []


def text_of(words: Sequence[str]) -> str:
    """Return words as one text, which `words_of` splits into the same words."""
    return " ".join(shlex.quote(word) if _NEEDS_QUOTES.search(word) else word for word in words)


def flag_name(word: str) -> str | None:
    """Return the flag that a word gives, as the parser reads it: of `--max_num_seqs=4` `--max-num-seqs`.

    None for a value, of which a negative number is one.
    """
    if _FLAG.match(word) is None:
        return None
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def flag_names(words: Sequence[str]) -> list[str]:
    """Return the flags of words up to `--`; `--flag.key` is `--flag`."""
    return [name.partition(".")[0] for name in map(flag_name, _own(words)) if name is not None]


def _own(words: Sequence[str]) -> list[str]:
    """Return the words up to `--`."""
    return list(takewhile(lambda word: word != SEPARATOR, words))


def engine_words(command: Sequence[str]) -> list[str]:
    """Return the words of the engine in a container's command: of a program that starts it, those after `--`."""
    own = _own(command)
    return list(command[len(own) + 1 :]) if len(own) < len(command) else own


def flags_in_text(text: str) -> list[str]:
    """Return the flags that a line of a log names."""
    return list(dict.fromkeys(re.findall(r"--?[A-Za-z][\w-]*", text.replace("_", "-"))))


def group_words(words: Sequence[str]) -> list[list[str]]:
    """Return each flag together with its values; any other word is alone."""
    groups: list[list[str]] = []
    takes_values = False
    for word in words:
        name = flag_name(word)
        if name is None and takes_values and word != SEPARATOR:
            groups[-1].append(word)
        else:
            groups.append([word])
            takes_values = name is not None and "=" not in word
    return groups


def get_option(words: Sequence[str], *names: str) -> str | None:
    """Return the value of an option, whose names these are; "" for a flag without one, None if it is not given."""
    value = None
    for first, *values in group_words(_own(words)):
        if flag_name(first) in names:
            _, equals, text = first.partition("=")
            value = text if equals else values[0] if values else ""
    return value


def get_switch(words: Sequence[str], on: Collection[str], off: Collection[str]) -> bool | None:
    """Return whether the last of these flags is one of those that switch on; None if none of them is given."""
    given = [name in on for name in map(flag_name, _own(words)) if name in on or name in off]
    return given[-1] if given else None


def flag_words(flag: str, value: object) -> list[str]:
    """Return the words of a flag: with a value, alone for True, none for False and None."""
    return [] if value is False or value is None else [flag] if value is True else [flag, str(value)]


def replace_value(words: Sequence[str], name: str, value: object) -> list[str]:
    """Return the words with this value of an option wherever they give it; the same words where they do not."""
    own, changed = _own(words), list[str]()
    for first, *values in group_words(own):
        if flag_name(first) != name:
            changed += [first, *values]
        elif "=" in first:
            changed.append(f"{first.partition('=')[0]}={value}")
        else:
            changed += [first, str(value), *values[1:]]
    return [*changed, *words[len(own) :]]


def without_options(words: Sequence[str], *names: str) -> list[str]:
    """Return the words without these options, which have one value each."""
    own, kept = _own(words), list[str]()
    for first, *values in group_words(own):
        kept += values[1:] if flag_name(first) in names else [first, *values]
    return [*kept, *words[len(own) :]]


def merge_words(given: Sequence[str], words: Sequence[str], drop: Collection[str] = ()) -> list[str]:
    """Return the given words with these in place of the same flags, and without the flags `drop`."""
    replaced, own = {*map(flag_name, words), *drop} - {None}, _own(given)
    kept = [group for group in group_words(own) if not replaced & {flag_name(group[0]), *flag_names(group[:1])}]
    return [*(word for group in kept for word in group), *words, *given[len(own) :]]


def opposite(flag: str) -> str:
    """Return the flag that switches off what this one switches on, or the other way round."""
    return flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)


def without_negation(flag: str) -> str:
    """Return a flag without the `no-` that turns it off."""
    return opposite(flag) if flag.startswith("--no-") else flag


def plain_name(flag: str) -> str:
    """Return the name of a setting as servers report it and templates have it: of `--max-num-seqs` `max_num_seqs`."""
    return flag.removeprefix("--").replace("-", "_")
