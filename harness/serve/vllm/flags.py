"""Flags of `vllm serve`, checked before the start: those that vLLM removed, and values that exclude each other.

Names are read as vLLM's parser reads them: `_` means `-` in a name, `--flag=value`, `--config.key value`.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from harness.failures.removed_flags import removed_flags as removed_flags

_NEGATIVE = re.compile(r"-[\d.]")
_DASHES = re.compile(r"-*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*")  # hyphens as web pages print them
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def removed_in(words: Sequence[str], image: str) -> list[str]:
    """What of a command line the vLLM in an image cannot know, as far as the image's tag tells its version."""
    version = version_of(image)
    gone = [row for flag in flags_in(words) if (row := removed_flags().get(flag)) is not None]
    return [
        f"{row.flag}: {row.advice}"
        for row in gone
        if version is not None and row.gone_in is not None and version >= tuple(map(int, row.gone_in.split(".")))
    ]


def flags_in(words: Sequence[str]) -> list[str]:
    """The names of the options in a command line, as the parser reads them: `--max_num_seqs=4` is `--max-num-seqs`."""
    names = []
    for word in takewhile(lambda word: word != "--", words):
        if word.startswith("--"):
            name = word.partition("=")[0].partition(".")[0]
            names.append("--" + name[2:].replace("_", "-"))
        elif word.startswith("-") and len(word) > 1 and not _NEGATIVE.match(word):
            names.append(word.partition("=")[0].partition(".")[0])
    return names


def printed_dashes(words: Iterable[str]) -> list[str]:
    """Flags that were copied from where two hyphens are shown as one dash, which no parser takes for hyphens."""
    found = [(word, dash) for word in words if (dash := _DASHES.match(word)) is not None]
    return [
        f"'{word}' begins with a dash of printed text, which looks like hyphens and is none: write "
        f"--{word[dash.end() :].partition(' ')[0]}"
        for word, dash in found
    ]


def value_of(words: Sequence[str], *names: str) -> str | None:
    """The value of an option in a command line, as `--name value` or `--name=value`; the last one counts."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else following
    return found


def ranks_of(words: Sequence[str]) -> int:
    """How many GPUs a command line of vLLM asks for."""
    value = value_of(words, "--tensor-parallel-size", "-tp")
    return int(value) if value and value.isdigit() else 1


def vllm_refuses(words: list[str]) -> list[str]:
    """What vLLM would say no to, each with advice; `words` are its command line."""
    seqs = value_of(words, "--max-num-seqs") or ""
    tokens = value_of(words, "--max-num-batched-tokens") or ""
    if seqs.isdigit() and tokens.isdigit() and int(tokens) < int(seqs):
        return [
            f"max_num_batched_tokens is {tokens}, and max_num_seqs {seqs}: vLLM refuses fewer tokens in a step than "
            "requests; raise the one or lower the other"
        ]
    return []


def version_of(image: str) -> tuple[int, int, int] | None:
    """The version of vLLM that an image's tag names, such as v0.25.0 or ..._vllm_0.23.0; None where it names none."""
    name, _, tag = image.partition("@")[0].rpartition(":")
    _, marked, after = tag.rpartition("vllm_")
    if not marked and "vllm" not in name:
        return None
    match = _VERSION.match(after if marked else tag)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None
