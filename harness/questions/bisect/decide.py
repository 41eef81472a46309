"""Which entry `harness bisect` starts next, and what its starts prove: functions of the starts. They run nothing.

Entry 0 is the good one, the last entry the bad one. A range is two entries whose difference is proven, so that a change
is between them. Nothing is kept from step to step: each decision is made of all starts, so that a resumed search goes
on with the same one, and so that a later start may correct an earlier decision.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec import Struct

from harness.base.reason import Reason
from harness.numbers.comparison import ALPHA, Verdict
from harness.numbers.start_levels import StartLevels, fit_levels
from harness.numbers.stats import Effect
from harness.numbers.verdicts import ComparedSides, decide_verdicts

LOOKS = (3, 5, 8, 12)  # starts of each end after which their difference is looked at; few, as each look may be wrong
TURNS = (0, 1, 1, 0)  # good, bad, bad, good, ...: a drift falls on both
NEAR = 4  # starts: two entries are compared only where a start of one is so near to a start of the other
MIN_PAIR = 2  # starts of both sides of the answer
MAX_REPEATS = 24  # of an entry that stays on neither side
MAX_VALUELESS = 3  # starts of an entry without a result, because of something else than the entry

Why = Literal["ends", "middle", "again", "reference", "pair"]
End = Literal[
    "pair",  # the narrowest range that the list allows is proven
    "undecided",  # a narrower range is not, after as many starts as it may take
    "same",  # the ends do not differ
    "not_shown",  # whether the ends differ is not known
    "end_failed",  # an end, or a measured entry, gives no result any more
]


class BisectStart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A start of an entry, as far as the decision needs it."""

    entry: int
    value: float | None = None  # its speed; None: it has no result
    failed: bool = False  # the entry did not build, start or answer: it is skipped. Else something disturbed the start
    reason: Reason | None = None  # why it has no result


class BisectStep(NamedTuple):
    """What the starts prove, and what comes next."""

    verdict: Verdict | None  # on the ends; None: too few starts
    low: int  # the range, if the verdict is "slower" or "faster": a change is between these two entries
    high: int
    next_entry: int | None  # to be started; None: the search ends
    why: Why | None = None
    ended: End | None = None

    @property
    def is_proven(self) -> bool:
        return self.verdict is not None and self.verdict.word in ("slower", "faster")


def max_starts(size: int) -> int:
    """The most starts that a list of so many entries may take."""
    return math.floor(12 * math.log2(size) + 12)


def step_level(size: int) -> float:
    """The level of each comparison after the ends: ALPHA, corrected for the halvings of the list."""
    return ALPHA / max(1, math.ceil(math.log2(max(2, size - 1))))


def skipped_entries(starts: Sequence[BisectStart]) -> set[int]:
    """The entries that cannot be measured: they failed before any result, or were disturbed each time."""
    measured = {start.entry for start in starts if start.value is not None}
    failed = {start.entry for start in starts if start.failed}
    return (failed | {entry for entry in _entries(starts) if _valueless(starts, entry) >= MAX_VALUELESS}) - measured


def next_step(size: int, starts: Sequence[BisectStart], metric: str = "wall") -> BisectStep:
    """Return what the starts of a list of `size` entries prove, and the entry to start next. `metric`: for the verdict.

    Raises ValueError for fewer than two entries.
    """
    if size < 2:
        raise ValueError("a list of at least two entries is needed")
    ends = _ends_step(size, starts, metric)
    if not ends.is_proven:
        return ends
    return _Halving(size, starts, ends).step()


def _ends_step(size: int, starts: Sequence[BisectStart], metric: str) -> BisectStep:
    """The step while the difference of the ends is not proven."""
    last = size - 1
    good, bad = ([start.value for start in starts if start.entry == end and start.value] for end in (0, last))
    verdict = None
    for look in LOOKS:
        if min(len(good), len(bad)) >= look:
            verdict = _ends_verdict(tuple(good[:look]), tuple(bad[:look]), metric)
            if verdict.word != "inconclusive":
                break
    if verdict is not None and verdict.word != "inconclusive":
        ended: End | None = "same" if verdict.word == "same" else None
        return BisectStep(verdict, 0, last, None, None, ended)
    if skipped_entries(starts) & {0, last} or _is_stuck(starts, (0, last)):
        return BisectStep(verdict, 0, last, None, None, "end_failed")
    if min(len(good), len(bad)) >= LOOKS[-1] or len(starts) >= max_starts(size):
        return BisectStep(verdict, 0, last, None, None, "not_shown")
    behind = last if len(bad) < len(good) else 0 if len(good) < len(bad) else None
    turn = (0, last)[TURNS[(len(good) + len(bad)) % len(TURNS)]]
    # After a start without a result the side that is behind follows.
    is_odd = behind is not None and abs(len(good) - len(bad)) > 1
    return BisectStep(verdict, 0, last, behind if is_odd and behind is not None else turn, "ends")


@lru_cache(maxsize=256)
def _ends_verdict(good: tuple[float, ...], bad: tuple[float, ...], metric: str) -> Verdict:
    """The verdict on the bad end against the good one, by the rule of repeats of one run."""
    pair = ComparedSides(
        side="bad", baseline="good", metric=metric, side_speeds=[bad], baseline_speeds=[good], within_run=True
    )
    return decide_verdicts([pair]).verdicts[0]


class _Contrast(NamedTuple):
    """How two entries differ, in the direction of the proven change."""

    size: float  # of the logarithm; below 0: in the other direction
    is_proven: bool


class _Halving:
    """The search after the ends: narrows the range as far as the starts prove."""

    def __init__(self, size: int, starts: Sequence[BisectStart], ends: BisectStep) -> None:
        self.size, self.starts, self.ends = size, starts, ends
        self.measured = [start for start in starts if start.value is not None]
        self.levels = levels_of(starts)
        self.skipped = skipped_entries(starts)
        self.sign = -1 if ends.verdict is not None and ends.verdict.word == "slower" else 1

    def step(self) -> BisectStep:
        """Halve the range while the middle belongs to a side; then say what is missing."""
        low, high = self.ends.low, self.ends.high
        while inner := [entry for entry in range(low + 1, high) if entry not in self.skipped]:
            middle = min(inner, key=lambda entry: abs(2 * entry - low - high))
            if not self._places(middle):
                return self._start(low, high, middle, "middle")
            sides = [
                (contrast.size, reference)
                for reference, contrast in (
                    (low, self._contrast(low, middle)),  # a change is between `low` and the middle
                    (high, self._contrast(middle, high)),
                )
                if contrast.is_proven
            ]
            if not sides:
                return self._tell_apart(low, middle, high)
            _, reference = max(sides)  # where both halves have a change: the larger one
            if not self._is_near(middle, reference):
                return self._start(low, high, reference, "reference")
            low, high = (low, middle) if reference == low else (middle, high)
        return self._confirm(low, high)

    def _confirm(self, low: int, high: int) -> BisectStep:
        """Nothing is left between the two: their difference must stay proven with MIN_PAIR starts of each."""
        counts = {entry: len(self._places(entry)) for entry in (low, high)}
        is_proven = self._contrast(low, high).is_proven and self._is_near(low, high)
        if is_proven and min(counts.values()) >= MIN_PAIR:
            return self._end(low, high, "pair")
        if min(counts.values()) >= MAX_REPEATS:
            return self._end(low, high, "undecided")
        entry = min((low, high), key=lambda entry: (counts[entry], self._places(entry)[-1]))
        return self._start(low, high, entry, "pair")

    def _tell_apart(self, low: int, middle: int, high: int) -> BisectStep:
        """The middle belongs to no side yet: repeat it, and the references between its starts."""
        repeats = len(self._places(middle))
        if repeats >= MAX_REPEATS:
            return self._end(low, high, "undecided")
        last_two = [start.entry for start in self.measured[-2:]]
        fewest = min((low, high), key=lambda entry: len(self._places(entry)))
        if last_two == [middle, middle]:
            oldest = min((low, high), key=lambda entry: self._places(entry)[-1])
            return self._start(low, high, oldest, "reference")
        if last_two[-1] == middle and len(self._places(fewest)) < repeats:
            return self._start(low, high, fewest, "reference")
        return self._start(low, high, middle, "again")

    def _contrast(self, first: int, second: int) -> _Contrast:
        effect = None if self.levels is None else self.levels.difference(second, first)
        if effect is None:
            return _Contrast(0.0, is_proven=False)
        size = effect.log_ratio * self.sign
        return _Contrast(size, size > 0 and effect.p_beyond_margin() < step_level(self.size))

    def _places(self, entry: int) -> list[int]:
        """The places of an entry's starts among those with a result."""
        return [place for place, start in enumerate(self.measured) if start.entry == entry]

    def _is_near(self, first: int, second: int) -> bool:
        return any(abs(a - b) <= NEAR for a in self._places(first) for b in self._places(second))

    def _start(self, low: int, high: int, entry: int, why: Why) -> BisectStep:
        if len(self.starts) >= max_starts(self.size):
            return self._end(low, high, "undecided")
        if _is_stuck(self.starts, (entry,)):
            return self._end(low, high, "end_failed")
        return BisectStep(self.ends.verdict, low, high, entry, why)

    def _end(self, low: int, high: int, ended: End) -> BisectStep:
        return BisectStep(self.ends.verdict, low, high, None, None, ended)


def levels_of(starts: Sequence[BisectStart]) -> StartLevels | None:
    """The levels of all entries with a result; None without one."""
    values = [(start.entry, start.value) for start in starts if start.value is not None]
    return fit_levels(values) if values else None


def is_change(effect: Effect | None, size: int) -> bool:
    """Whether two entries differ beyond the margin, at the level of a comparison in a list of so many entries."""
    return effect is not None and effect.p_beyond_margin() < step_level(size)


def starts_left(step: BisectStep, starts: Sequence[BisectStart]) -> int:
    """About how many more starts end the search: so many for each halving as those until now took, at least two."""
    if not step.is_proven:
        return max(2, 2 * LOOKS[0] - len(starts))
    ends = 2 * LOOKS[0]
    first = step.verdict.n[0] + step.verdict.n[1] if step.verdict is not None else ends
    size = max((start.entry for start in starts), default=1)
    done = math.log2(max(1.0, size / max(1, step.high - step.low)))
    per_halving = max(2.0, (len(starts) - first) / done if done >= 1 else 2.0)
    return math.ceil(per_halving * math.log2(max(1, step.high - step.low))) + MIN_PAIR


def _is_stuck(starts: Sequence[BisectStart], entries: Sequence[int]) -> bool:
    return any(_valueless(starts, entry) >= MAX_VALUELESS for entry in entries)


def _valueless(starts: Sequence[BisectStart], entry: int) -> int:
    """How many of the newest starts of an entry have no result."""
    own = [start for start in starts if start.entry == entry]
    count = 0
    while count < len(own) and own[-1 - count].value is None:
        count += 1
    return count


def _entries(starts: Sequence[BisectStart]) -> set[int]:
    return {start.entry for start in starts}
