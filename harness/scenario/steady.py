"""Whether a server answers as fast as it will: what the warm-up `until: steady` waits for, docs/method.md.

What is watched of each answer are two numbers: TTFT, and the end-to-end latency per output token. Windows are
consecutive answers, in the order in which they ended.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from harness.scenario.scenario import Load, Warmup, wave_of

WINDOWS = 3  # the last so many are compared
LEAST = 16  # answers in a window, of whole waves
PART = 6  # and no less than this part of all answers so far: what changes slowly needs long windows to be seen
NOISE = 4.0  # standard errors that windows may differ by for chance


class Steadiness(NamedTuple):
    """The rule, and its bound."""

    wave: int  # answers of one full wave: a burst, or a conversation, of all users
    within: float  # how far means may differ, as a part of the smallest
    most_s: float  # after that it is over, steady or not
    most_requests: int | None = None

    @property
    def step(self) -> int:
        """Answers of the smallest window. After so many it is looked at again."""
        return self.wave * math.ceil(LEAST / self.wave)

    @property
    def least(self) -> int:
        """Answers before which nothing can be said."""
        return WINDOWS * self.step

    def window(self, seen: int) -> int:
        """Answers in each window when there have been so many."""
        return self.step * max(1, seen // (PART * self.step))

    def looks(self, seen: int) -> bool:
        """Whether it is time to look."""
        return seen >= self.least and seen % self.step == 0

    def is_steady(self, answers: Sequence[tuple[float, float]]) -> bool:
        """Whether the last windows agree. `answers`: TTFT (NaN: not known) and latency per token, the oldest first."""
        size = self.window(len(answers))
        windows = [answers[len(answers) - size * back :][:size] for back in range(WINDOWS, 0, -1)]
        return all(
            agree([[answer[which] for answer in window if answer[which] == answer[which]] for window in windows],
                  self.within)
            for which in (0, 1)
        )  # fmt: skip


def steadiness(load: Load, warmup: Warmup) -> Steadiness:
    """The rule for a load."""
    return Steadiness(wave_of(load), warmup.within, warmup.most_s, warmup.most_requests)


def agree(windows: Sequence[Sequence[float]], within: float) -> bool:
    """Whether the means of some windows differ by no more than a part of the smallest, or than chance explains.

    Chance is the least standard error of any of them: what only some windows have, such as a kernel that is compiled,
    is no chance. Windows without values agree.
    """
    known = [window for window in windows if len(window) > 1]
    if len(known) < len(windows):
        return not any(windows)
    means = [statistics.fmean(window) for window in known]
    noise = min(statistics.stdev(window) / math.sqrt(len(window)) for window in known)
    return max(means) - min(means) <= max(within * min(means), NOISE * noise)
