"""Lengths in tokens by distribution: what a scenario says, and the length at a place in the seeded sequence."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

from msgspec import Meta, Struct

from harness.errors import BadLines, HarnessError
from harness.files import read_text

Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]
# The upper bounds keep a slip of the finger from running for years.
Positive = Annotated[float, Meta(gt=0, le=1e7)]
NotNegative = Annotated[float, Meta(ge=0, le=1e7)]

_MOST = 1_000_000
_TYPICAL = 128
_P95 = NormalDist().inv_cdf(0.95)
_LEAST_DRAW = 2.0**-60  # the normal law has no value at 0
_ADVICE = "Each line is one length, or two: `prompt output`, in tokens."


class Lognormal(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Many short ones and a long tail, as people's texts are. Exactly one of p95 and sigma."""

    median: Positive
    p95: Positive | None = None
    sigma: Annotated[float, Meta(ge=0, le=5)] | None = None  # of the logarithm
    most: Tokens  # what is longer becomes as long as this


class Lengths(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distribution of lengths in tokens. Exactly one of its keys."""

    fixed: Tokens | None = None
    uniform: tuple[Tokens, ...] | None = None  # [least, most], both included
    lognormal: Lognormal | None = None
    file: str | None = None  # lengths as they were seen: a line is `prompt output`, or one number for both


Pairs = Sequence[tuple[int, int]]
"""The lines of a file of lengths: prompt and output."""


def problems_of(lengths: int | Lengths, folder: Path) -> list[str]:
    """What is well-formed in a distribution and cannot be meant; each begins with ": " or with "." and a key."""
    if isinstance(lengths, int):
        return []
    if [lengths.fixed, lengths.uniform, lengths.lognormal, lengths.file].count(None) != 3:
        return [": give a number, or exactly one of 'fixed', 'uniform', 'lognormal' and 'file'"]
    span, law = lengths.uniform, lengths.lognormal
    if span is not None and (len(span) != 2 or span[0] > span[1]):
        return [f".uniform: two numbers are expected, the least and the most, got {list(span)}"]
    if law is not None and (law.p95 is None) == (law.sigma is None):
        return [".lognormal: give exactly one of 'p95' and 'sigma'"]
    if law is not None and law.p95 is not None and law.p95 < law.median:
        return [f".lognormal.p95: {law.p95:g} is below the median {law.median:g}"]
    if law is not None and law.median > law.most:
        return [f".lognormal.most: {law.most:g} is below the median {law.median:g}"]
    if lengths.file is not None and not (folder / lengths.file).is_file():
        return [f".file: there is no file {lengths.file} beside the scenario"]
    return []


def length_at(lengths: int | Lengths, what: str, seed: int, index: int, pairs: Pairs = ()) -> int:
    """The length at a place of the sequence: a function of the seed and the place alone, the same in every load.

    `what` is "prompt" or "output": the two are independent, but those of a file, which come from the same line. `pairs`
    are the lines of the file.
    """
    if isinstance(lengths, int):
        return lengths
    if lengths.fixed is not None:
        return lengths.fixed
    place = "pair" if lengths.file is not None else f"{what}-length"
    draw = random.Random(f"{seed}:{place}:{index}").random()
    if lengths.uniform is not None:
        least, most = lengths.uniform
        return least + int(draw * (most - least + 1))
    if lengths.lognormal is not None:
        return _lognormal(lengths.lognormal, draw)
    return pairs[int(draw * len(pairs))][what == "output"]


def most_of(lengths: int | Lengths, what: str = "output", pairs: Pairs = ()) -> int:
    """The longest that can come. Of a file that was not read, the longest that there may be at all."""
    if isinstance(lengths, int):
        return lengths
    if lengths.lognormal is not None:
        return lengths.lognormal.most
    return lengths.fixed or max(lengths.uniform or [pair[what == "output"] for pair in pairs], default=_MOST)


def unread(lengths: int | Lengths) -> bool:
    """Whether they stand in a file, which nobody has read yet."""
    return isinstance(lengths, Lengths) and lengths.file is not None


def typical_of(lengths: int | Lengths) -> int:
    """A length to reckon with. Of a file, which is not read for that, the default of a load."""
    if isinstance(lengths, int):
        return lengths
    if lengths.lognormal is not None:
        return round(lengths.lognormal.median)
    return lengths.fixed or (round(sum(lengths.uniform) / len(lengths.uniform)) if lengths.uniform else _TYPICAL)


def in_words(lengths: int | Lengths) -> str:
    """ "128 tokens", "16 to 64 tokens", "about 200 tokens (lognormal, at most 2,000)" """
    if isinstance(lengths, int) or lengths.fixed is not None:
        number = lengths if isinstance(lengths, int) else lengths.fixed or 0
        return f"{number:,} token{'' if number == 1 else 's'}"
    if lengths.uniform is not None:
        return f"{lengths.uniform[0]:,} to {lengths.uniform[1]:,} tokens"
    if lengths.lognormal is not None:
        return f"about {lengths.lognormal.median:,g} tokens (lognormal, at most {lengths.lognormal.most:,})"
    return f"as many tokens as in {lengths.file}"


def read_pairs(path: Path) -> list[tuple[int, int]]:
    """The lines of a file of lengths; of a line with one number, that is both. Raises HarnessError, file and line."""
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"{path}: the lengths cannot be read ({error})") from None
    found: list[tuple[int, int]] = []
    bad = BadLines(path, _ADVICE)
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) > 2 or not all(
            word.isascii() and word.isdigit() and len(word) < 20 and 1 <= int(word) <= _MOST for word in words
        ):
            shown = repr(line.strip()[:60])
            bad.add(number, f"{shown} is not one or two lengths of 1 to {_MOST:,} tokens")
            continue
        found.append((int(words[0]), int(words[-1])))
    bad.refuse()
    if not found:
        raise HarnessError(f"{path}: there are no lengths in it", next_step=_ADVICE)
    return found


def _lognormal(law: Lognormal, draw: float) -> int:
    sigma = law.sigma if law.p95 is None else math.log(law.p95 / law.median) / _P95
    value = law.median * math.exp((sigma or 0.0) * NormalDist().inv_cdf(max(draw, _LEAST_DRAW)))
    return max(1, min(law.most, round(min(value, _MOST))))
