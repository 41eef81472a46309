"""What people and agents decide, beside what they ask: how long they pause, when they leave, which document they open.

Every decision is a function of the seed and of the request's place in the sequence, so it is the same in every run,
whoever sends the request and however long answers take.
"""

import bisect
import itertools
import math
import random
from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal

from msgspec import Meta, Struct

from harness.scenario.lengths import NotNegative, Positive, Tokens

_Count = Annotated[int, Meta(ge=1, le=100_000)]
_Few = Annotated[int, Meta(ge=1, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]

_LONGEST = 10.0  # of a pause, in means, where nobody says more


class Pause(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A time drawn anew for each request."""

    mean_s: NotNegative
    distribution: Literal["fixed", "exponential", "lognormal"] = "lognormal"
    sigma: Annotated[float, Meta(gt=0, le=5)] = 1.0  # lognormal: standard deviation of its logarithm
    most_s: NotNegative | None = None  # what is longer is cut to it; None: ten means


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
        return pause.mean_s if pause.most_s is None else min(pause.mean_s, pause.most_s)
    return _LONGEST * pause.mean_s if pause.most_s is None else pause.most_s


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


def problems_of(think: Pause | None, think_s: list[float] | None, abandon: Abandon | None) -> list[str]:
    """What cannot be meant; each begins with its key."""
    problems = []
    if think_s is not None and (len(think_s) != 2 or think_s[0] > think_s[1]):
        problems.append(f"think_s: two numbers are expected, the least and the most, got {think_s}")
    if think is not None and think_s is not None:
        problems.append("think: give one of 'think' and 'think_s'")
    if abandon is not None and (abandon.after_s is None) == (abandon.after_tokens is None):
        problems.append("abandon: give exactly one of 'after_s' and 'after_tokens'")
    return problems
