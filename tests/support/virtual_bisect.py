"""Searches of `harness bisect` in virtual time: lists with known changes, measured with noise, decided by the product.

`python -m tests.support.virtual_bisect 1000` prints the figures of docs/method.md.
"""

import math
import sys
from collections import Counter
from typing import Any, Literal, NamedTuple

import numpy as np

from harness.questions.bisect.decide import BisectStart, BisectStep, max_starts, next_step

Drift = Literal["none", "line", "jump", "wave"]


class Story(NamedTuple):
    """What is true of a list, and how it is measured."""

    size: int
    noise: float = 0.01  # standard deviation of the logarithm of a start's speed
    steps: tuple[float, ...] = (0.10,)  # how much slower each change makes it, at random places
    tail: Literal["normal", "t3"] = "normal"
    drift: Drift = "none"
    drifts: float = 0.03  # how far the machine's speed moves over a search
    failing: int = 0  # entries that do not start
    bad_noise: float | None = None  # of the entries after the last change, where it is another


class Told(NamedTuple):
    """What the product says at the end of a draw."""

    step: BisectStep
    starts: int
    changes: set[int]  # the entries that begin a change

    @property
    def has_change(self) -> bool:
        return any(self.step.low < change <= self.step.high for change in self.changes)

    @property
    def word(self) -> str:
        """ "right" or "wrong" pair, "range" with a change, "wrong range", or "none": no change is shown."""
        if not self.step.is_proven:
            return "none"
        is_pair = self.step.ended == "pair"
        if self.has_change:
            return "right" if is_pair else "range"
        return "wrong" if is_pair else "wrong range"


def search(story: Story, seed: int) -> Told:
    """Decide one draw of a story to its end."""
    dice = np.random.default_rng([seed, story.size, *map(ord, f"{story}")])
    logs = np.zeros(story.size)
    places = dice.choice(np.arange(1, story.size), size=min(len(story.steps), story.size - 1), replace=False)
    for place, change in zip(places, story.steps, strict=False):
        logs[place:] -= math.log1p(change)
    changes = {int(place) for place in places} if story.steps else set()
    inner = np.arange(1, story.size - 1)
    failing = set(map(int, dice.choice(inner, size=story.failing, replace=False))) if story.failing else set()
    usual = 4 * math.log2(story.size) + 6
    sign, jump, last = dice.choice([-1, 1]), dice.random() * usual, max(changes, default=story.size)

    def drift(number: int) -> float:
        moved = {
            "none": 0.0,
            "line": min(1.0, number / usual),
            "jump": float(number > jump),
            "wave": math.sin(2 * math.pi * number / usual) / 2,
        }
        return float(sign * story.drifts * moved[story.drift])

    starts: list[BisectStart] = []
    while (step := next_step(story.size, starts)).next_entry is not None:
        entry = step.next_entry
        if entry in failing:
            starts.append(BisectStart(entry=entry, failed=True))
            continue
        error = float(dice.standard_t(3)) / math.sqrt(3) if story.tail == "t3" else float(dice.normal())
        noise = story.bad_noise if story.bad_noise is not None and entry >= last else story.noise
        starts.append(BisectStart(entry=entry, value=math.exp(logs[entry] + noise * error + drift(len(starts)))))
    return Told(step, len(starts), changes)


class Figures(NamedTuple):
    """What a story's draws say together."""

    shares: dict[str, float]  # by word
    starts: list[int]
    width: float | None  # of the ranges that are no pair, as a share of the list; None: there was none

    def within(self, most: float) -> float:
        """The share of the draws that took at most so many starts."""
        return sum(number <= most for number in self.starts) / len(self.starts)


def figures_of(story: Story, draws: int) -> Figures:
    drawn = [search(story, seed) for seed in range(draws)]
    words = Counter(draw.word for draw in drawn)
    widths = [(draw.step.high - draw.step.low) / (story.size - 1) for draw in drawn if "range" in draw.word]
    shares = {word: words[word] / draws for word in ("right", "range", "wrong", "wrong range", "none")}
    return Figures(shares, [draw.starts for draw in drawn], sum(widths) / len(widths) if widths else None)


def stories() -> dict[str, list[Story]]:
    """The stories of docs/method.md, by what they are about."""
    sizes = (3, 8, 20, 64)
    variants: dict[str, dict[str, Any]] = {
        "1 % noise": {},
        "1 % noise, t3": {"tail": "t3"},
        "drift, a line": {"drift": "line"},
        "drift, a jump": {"drift": "jump"},
        "drift, a wave": {"drift": "wave"},
        "two steps": {"steps": (0.04, 0.06)},
        "two fail": {"failing": 2},
        "bad is three times as noisy": {"bad_noise": 0.03},
        "no change": {"steps": ()},
        "5 % noise": {"noise": 0.05},
        "5 % noise, t3": {"noise": 0.05, "tail": "t3"},
        "5 % noise, no change": {"noise": 0.05, "steps": ()},
        "5 % noise, drift": {"noise": 0.05, "drift": "line"},
    }
    return {
        name: [Story(size, **options) for size in sizes if size > 2 + options.get("failing", 0)]
        for name, options in variants.items()
    }


def main() -> None:
    for name, alike in stories().items():
        for story in alike:
            figures = figures_of(story, int(sys.argv[1]))
            shares = ", ".join(f"{word} {100 * share:.1f} %" for word, share in figures.shares.items() if share)
            usual, width = 4 * math.log2(story.size) + 6, figures.width
            counts = f"starts {np.mean(figures.starts):.1f}, at most {max(figures.starts)} of {max_starts(story.size)}"
            counts += f", {100 * figures.within(usual):.1f} % within {usual:.0f}"
            print(f"{name}, {story.size}: {shares}; {counts}" + (f"; range {width:.2f}" if width else ""), flush=True)


if __name__ == "__main__":
    main()
