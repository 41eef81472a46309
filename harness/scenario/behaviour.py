"""Lengths in tokens by distribution: what a scenario says, and the length at a place in the seeded sequence."""

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

from msgspec import Meta, Struct

from harness.errors import BadLines, HarnessError, Problem
from harness.files import read_text

Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]
# The upper bounds keep a slip of the finger from running for years.
Positive = Annotated[float, Meta(gt=0, le=1e7)]
NotNegative = Annotated[float, Meta(ge=0, le=1e7)]

_MAX_LENGTH = 1_000_000
_TYPICAL = 128
_P95 = NormalDist().inv_cdf(0.95)
_MIN_DRAW = 2.0**-60  # the normal law has no value at 0
_ADVICE = "Each line is one length, or two: `prompt output`, in tokens."


class Lognormal(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Many short ones and a long tail, as people's texts are. Exactly one of p95 and sigma."""

    median: Positive
    p95: Positive | None = None
    sigma: Annotated[float, Meta(ge=0, le=5)] | None = None  # of the logarithm
    max: Tokens  # longer ones are cut to it


class Lengths(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distribution of lengths in tokens. Exactly one of its keys."""

    fixed: Tokens | None = None
    uniform: tuple[Tokens, ...] | None = None  # [min, max], both included
    lognormal: Lognormal | None = None
    file: str | None = None  # lengths as they were seen: a line is `prompt output`, or one number for both


Pairs = Sequence[tuple[int, int]]
"""The lines of a file of lengths: prompt and output."""


def length_problems(lengths: int | Lengths, folder: Path) -> Iterator[Problem]:
    """What is well-formed in a distribution and contradicts itself."""
    if isinstance(lengths, int):
        return
    span, law = lengths.uniform, lengths.lognormal
    if [lengths.fixed, span, law, lengths.file].count(None) != 3:
        yield Problem("", "give a number, or exactly one of 'fixed', 'uniform', 'lognormal' and 'file'")
    elif span is not None and (len(span) != 2 or span[0] > span[1]):
        yield Problem(".uniform", f"two numbers are expected, the minimum and the maximum, got {list(span)}")
    elif law is not None and (law.p95 is None) == (law.sigma is None):
        yield Problem(".lognormal", "give exactly one of 'p95' and 'sigma'")
    elif law is not None and law.p95 is not None and law.p95 < law.median:
        yield Problem(".lognormal.p95", f"{law.p95:g} is below the median {law.median:g}")
    elif law is not None and law.median > law.max:
        yield Problem(".lognormal.max", f"{law.max:g} is below the median {law.median:g}")
    elif lengths.file is not None and not (folder / lengths.file).is_file():
        yield Problem(".file", f"there is no file {lengths.file} next to the scenario")


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
        minimum, maximum = lengths.uniform
        return minimum + int(draw * (maximum - minimum + 1))
    if lengths.lognormal is not None:
        return _lognormal(lengths.lognormal, draw)
    return pairs[int(draw * len(pairs))][what == "output"]


def max_of(lengths: int | Lengths, what: str = "output", pairs: Pairs = ()) -> int:
    """The longest that can come. Of a file that was not read, the longest that there may be at all."""
    if isinstance(lengths, int):
        return lengths
    if lengths.lognormal is not None:
        return lengths.lognormal.max
    return lengths.fixed or max(lengths.uniform or [pair[what == "output"] for pair in pairs], default=_MAX_LENGTH)


def unread(lengths: int | Lengths) -> bool:
    """Whether they are in a file, which is not read yet."""
    return isinstance(lengths, Lengths) and lengths.file is not None


def typical_of(lengths: int | Lengths) -> int:
    """A length to reckon with. Of a file, which is not read for that, the default of a load."""
    if isinstance(lengths, int):
        return lengths
    if lengths.lognormal is not None:
        return round(lengths.lognormal.median)
    return lengths.fixed or (round(sum(lengths.uniform) / len(lengths.uniform)) if lengths.uniform else _TYPICAL)


def lengths_in_words(lengths: int | Lengths) -> str:
    """ "128 tokens", "16 to 64 tokens", "about 200 tokens (lognormal, at most 2,000)" """
    if isinstance(lengths, int) or lengths.fixed is not None:
        number = lengths if isinstance(lengths, int) else lengths.fixed or 0
        return f"{number:,} token{'' if number == 1 else 's'}"
    if lengths.uniform is not None:
        return f"{lengths.uniform[0]:,} to {lengths.uniform[1]:,} tokens"
    if lengths.lognormal is not None:
        return f"about {lengths.lognormal.median:,g} tokens (lognormal, at most {lengths.lognormal.max:,})"
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
            word.isascii() and word.isdigit() and len(word) < 20 and 1 <= int(word) <= _MAX_LENGTH for word in words
        ):
            shown = repr(line.strip()[:60])
            bad.add(number, f"{shown} is not one or two lengths of 1 to {_MAX_LENGTH:,} tokens")
            continue
        found.append((int(words[0]), int(words[-1])))
    bad.refuse()
    if not found:
        raise HarnessError(f"{path}: there are no lengths in it", next_step=_ADVICE)
    return found


def _lognormal(law: Lognormal, draw: float) -> int:
    sigma = law.sigma if law.p95 is None else math.log(law.p95 / law.median) / _P95
    value = law.median * math.exp((sigma or 0.0) * NormalDist().inv_cdf(max(draw, _MIN_DRAW)))
    return max(1, min(law.max, round(min(value, _MAX_LENGTH))))


_Count = Annotated[int, Meta(ge=1, le=100_000)]
_Few = Annotated[int, Meta(ge=1, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]

_LONGEST = 10.0  # of a pause, in means, by default


class Pause(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A time drawn anew for each request."""

    mean_s: NotNegative
    distribution: Literal["fixed", "exponential", "lognormal"] = "lognormal"
    sigma: Annotated[float, Meta(gt=0, le=5)] = 1.0  # lognormal: standard deviation of its logarithm
    max_s: NotNegative | None = None  # what is longer is cut to it; None: ten means


class Abandon(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Some requests are not waited for to their end. Exactly one of the last two."""

    share: Share
    after_s: Positive | None = None  # after the request was sent
    after_tokens: _Count | None = None  # as soon as so many chunks have come


class Agent(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an agent with tools works."""

    steps: _Few = 6  # model calls of a task, at most
    done: Share = 0.0  # of the steps that end the task before that
    tools: Annotated[int, Meta(ge=1, le=64)] = 4  # definitions sent with each request
    choice: Literal["auto", "required", "none"] = "auto"  # tool_choice
    result_tokens: Tokens = 200  # length of what a tool returns
    tool_time: Pause = Pause(mean_s=1.0)
    sub_agents: Annotated[int, Meta(ge=0, le=1000)] = 0  # started by each task's first step, all at once


class Rag(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which documents are asked about."""

    documents: _Count = 20
    document_tokens: Tokens = 2000
    skew: Annotated[float, Meta(ge=0, le=10)] = 1.0  # Zipf: the k-th is chosen 1 / k^skew as often as the first


def chance(seed: int, what: str, index: int) -> float:
    """A number of 0 to 1 that belongs to one decision about one request."""
    return random.Random(f"{seed}:{what}:{index}").random()


def pause_s(pause: Pause | list[float], seed: int, what: str, index: int) -> float:
    """How long to pause after request `index`; a list is the least and the most of a uniform time."""
    draw = random.Random(f"{seed}:{what}:{index}").random  # the one method whose results Python promises to keep
    if isinstance(pause, list):
        return pause[0] + (pause[1] - pause[0]) * draw()
    return min(_drawn_s(pause, draw), longest_s(pause))


def pause_mean_s(pause: Pause | list[float] | None) -> float:
    """How long a pause is on the mean, about: what cuts the longest is left out."""
    if pause is None:
        return 0.0
    return sum(pause) / len(pause) if isinstance(pause, list) else pause.mean_s


def longest_s(pause: Pause | list[float] | None) -> float:
    """The longest that a pause can be."""
    if pause is None:
        return 0.0
    if isinstance(pause, list):
        return pause[1]
    if pause.distribution == "fixed":
        return pause.mean_s if pause.max_s is None else min(pause.mean_s, pause.max_s)
    return _LONGEST * pause.mean_s if pause.max_s is None else pause.max_s


def _drawn_s(pause: Pause, draw: Callable[[], float]) -> float:
    if pause.distribution == "fixed" or pause.mean_s == 0:
        return pause.mean_s
    if pause.distribution == "exponential":
        return -pause.mean_s * math.log(1.0 - draw())
    normal = math.sqrt(-2 * math.log(1.0 - draw())) * math.cos(2 * math.pi * draw())
    return math.exp(math.log(pause.mean_s) - pause.sigma**2 / 2 + pause.sigma * normal)


def leaves(abandon: Abandon | None, seed: int, index: int) -> Abandon | None:
    """How the user leaves request `index`; None: stays to its end."""
    if abandon is None or chance(seed, "abandon", index) >= abandon.share:
        return None
    return abandon


def document_of(rag: Rag, seed: int, index: int) -> int:
    """The document, from 0, that request `index` is about."""
    cumulated = _cumulated(rag.documents, rag.skew)
    return bisect.bisect(cumulated, chance(seed, "document", index) * cumulated[-1], hi=rag.documents - 1)


@cache
def _cumulated(documents: int, skew: float) -> list[float]:
    return list(itertools.accumulate(1 / rank**skew for rank in range(1, documents + 1)))


def behaviour_problems(think: Pause | None, think_s: list[float] | None, abandon: Abandon | None) -> Iterator[Problem]:
    """What contradicts itself; paths are below the load."""
    if think_s is not None and (len(think_s) != 2 or think_s[0] > think_s[1]):
        yield Problem("think_s", f"two numbers are expected, the minimum and the maximum, got {think_s}")
    if think is not None and think_s is not None:
        yield Problem("think", "give one of 'think' and 'think_s'", keys=("think_s",))
    if abandon is not None and (abandon.after_s is None) == (abandon.after_tokens is None):
        yield Problem("abandon", "give exactly one of 'after_s' and 'after_tokens'")
