"""How answers to questions whose right answers are known agree, by docs/method.md.

The sample is the question. Each side is asked twice or more: what its own answers differ by is its noise.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from harness.base.reason import Reason, because
from harness.base.units import percent
from harness.numbers.comparison import ANSWER_MARGIN, POWER, SameAnswers
from harness.records.columns import Floats, Rows

_Z = 1.959964  # of 95 % intervals


MAX_CUT = 0.05  # of a side's answers that max_tokens may cut: what is cut is neither right nor wrong


MIN_RIGHT = 0.30  # of the better side: below it the questions say nothing about the model


MAX_FLIPS = 0.5  # of the answers: beyond it two servers do not answer the same, however many are right


_CHOSEN = 3  # questions for each different right answer, from which on it is a choice that can be guessed


_MAX_NEEDED = 1_000_000


class KnownAnswer(NamedTuple):
    digest: str
    right: bool | None  # None: the right answer is not known
    cut: bool = False  # by max_tokens


Answered = Mapping[int, Sequence[KnownAnswer]]
"""By question, all answers of a side in their order."""


def answers_by_question(good: Iterable[Rows]) -> dict[int, list[KnownAnswer]]:
    """The answers of successful requests whose question is known."""
    by_question: dict[int, list[KnownAnswer]] = {}
    for rows in good:
        cut = rows.finish.is_in("length")
        for place in np.flatnonzero(~np.isnan(rows.item) & rows.answer_digest.is_set).tolist():
            right = None if np.isnan(rows.answer_right[place]) else bool(rows.answer_right[place])
            digest = rows.answer_digest.texts[rows.answer_digest.codes[place]] or ""
            by_question.setdefault(int(rows.item[place]), []).append(KnownAnswer(digest, right, bool(cut[place])))
    return by_question


def changed_share(answers: Answered) -> float | None:
    """The noise of a side: the mean share of the pairs of answers to one question that differ; None: asked once."""
    shares = [_differ_within(repeats) for repeats in answers.values() if len(repeats) > 1]
    return sum(shares) / len(shares) if shares else None


def _differ_within(answers: Sequence[KnownAnswer]) -> float:
    n = len(answers)
    equal = sum(number * (number - 1) for number in Counter(answer.digest for answer in answers).values())
    return 1 - equal / (n * (n - 1))


def _differ_between(side: Sequence[KnownAnswer], base: Sequence[KnownAnswer]) -> float:
    counts = Counter(answer.digest for answer in base)
    return 1 - sum(counts[answer.digest] for answer in side) / (len(side) * len(base))


def compare_answers(side: Answered, base: Answered, names: tuple[str, str], load: str = "") -> SameAnswers | None:
    """The verdict on two sides; None where they answered no question in common, or no right answer is known.

    Flips above the noise are the energy distance with the discrete metric (Székely and Rizzo 2013): 0 where each
    question has the same distribution of answers on both sides, however much they change when asked again.
    """
    common = sorted(side.keys() & base.keys())
    rights = [(_right_share(side[question]), _right_share(base[question])) for question in common]
    right_pairs = [(own, other) for own, other in rights if own is not None and other is not None]
    if not right_pairs:
        return None
    differ = np.array([_differ_between(side[question], base[question]) for question in common])
    twice = [place for place, question in enumerate(common) if min(len(side[question]), len(base[question])) > 1]
    noises = np.array([[_differ_within(answers[common[place]]) for place in twice] for answers in (side, base)])
    cut = max(cut_share(side), cut_share(base))
    lost = sum(max(0.0, other - own) for own, other in right_pairs)
    gained = sum(max(0.0, own - other) for own, other in right_pairs)
    low, high = paired_interval(np.array([own - other for own, other in right_pairs]))
    difference = (gained - lost) / len(right_pairs)
    result = SameAnswers(
        side=names[0],
        baseline=names[1],
        load=load,
        questions=len(common),
        differ=float(differ.mean()),
        noise=(changed_share(side), changed_share(base)),
        right=(
            sum(own for own, _ in right_pairs) / len(right_pairs),
            sum(other for _, other in right_pairs) / len(right_pairs),
        ),
        lost=lost,
        gained=gained,
        difference=difference,
        low=low,
        high=high,
        cut=cut,
        word=interval_word(low, high),
        needed=_needed(right_pairs, difference),
    )
    if twice:
        result = replace(result, **_flips(differ[twice] - noises.mean(axis=0)))
    better = side if difference > 0 else base
    reason = _why_unknown(result, answers_doubt({question: better[question] for question in common}))
    return result if reason is None else replace(result, word="inconclusive", reason=reason)


def interval_word(low: float, high: float) -> Literal["same", "worse", "inconclusive"]:
    """The word by the 95 % interval of the difference in right answers alone."""
    return "same" if low > -ANSWER_MARGIN else "worse" if high < -ANSWER_MARGIN else "inconclusive"


def _why_unknown(result: SameAnswers, doubt: Reason | None) -> Reason | None:
    """Why the word of the interval is no answer; None: it is one. `doubt`: of the side with more right answers.

    A build that falls from 90 % to 2 % right is worse: `worse` needs a baseline that does not guess, and no more.
    """
    if result.cut > MAX_CUT:
        return _cut_reason(result.cut)
    if doubt is not None and (result.word != "worse" or doubt.code == "answers_guessed"):
        return doubt
    differ = result.differ if result.flips is None else result.flips
    if result.word == "same" and differ is not None and differ > MAX_FLIPS:
        how = "differ (ask each question twice: their noise is not known)" if result.flips is None else "flip"
        text = f"{percent(differ, 1)} of the answers {how}: another model, or another chat template?"
        return because("answers_flip", text, differ=differ)
    if result.word == "inconclusive":
        more = result.needed is not None and result.needed > result.questions
        text = f"about {result.needed:,} questions would decide" if more else "more questions would decide"
        return because("answers_few", text, needed=result.needed)
    return None


def answers_doubt(answers: Answered) -> Reason | None:
    """Why the answers of a server say nothing about its model; None: they do.

    Guessing has 1 / choices of the questions right. The choices are the different answers that were right, at least
    two: with free answers they are so many that guessing has next to none.
    """
    rights = [share for repeats in answers.values() if (share := _right_share(repeats)) is not None]
    if not rights:
        return None
    if (cut := cut_share(answers)) > MAX_CUT:
        return _cut_reason(cut)
    right, n = sum(rights) / len(rights), len(rights)
    choices = max(2, len({answer.digest for repeats in answers.values() for answer in repeats if answer.right}))
    guess = 1 / choices if n >= _CHOSEN * choices else 0.0
    is_guessing = right - guess <= _Z * math.sqrt(guess * (1 - guess) / n)
    if right >= MIN_RIGHT and not is_guessing:
        return None
    text = f"{percent(right, 1)} are right"
    if right >= MIN_RIGHT:
        text += f", and guessing one of {choices} answers has {percent(guess, 1)}"
    digests = Counter(answer.digest for repeats in answers.values() for answer in repeats)
    alike = digests.most_common(1)[0][1] / digests.total()
    if alike > MAX_FLIPS:
        text += f", and {percent(alike, 1)} of the answers are one and the same"
    text += ": wrong chat template, refusals, or a model too small?"
    if is_guessing:
        return because("answers_guessed", text, right=right, guess=guess, alike=alike)
    return because("answers_wrong", text, right=right, alike=alike)


def _cut_reason(cut: float) -> Reason:
    text = f"{percent(cut, 1)} of the answers of one server were cut, so they say little: raise output_tokens"
    return because("answers_cut", text, cut=cut)


def cut_share(answers: Answered) -> float:
    """The share of the answers that max_tokens cut."""
    cut = [answer.cut for repeats in answers.values() for answer in repeats]
    return sum(cut) / len(cut)


def _right_share(answers: Sequence[KnownAnswer]) -> float | None:
    rights = [answer.right for answer in answers if answer.right is not None]
    return sum(rights) / len(rights) if rights else None


def _flips(excess: Floats) -> dict[str, float]:
    """The mean excess with its interval. Where no question shows any, as much as 95 % of such samples would miss."""
    mean, n = float(excess.mean()), len(excess)
    error = float(excess.std(ddof=1)) / math.sqrt(n) if n > 1 else 1.0
    unseen = 1 - 0.05 ** (1 / n)
    return {
        "flips": mean,
        "flips_low": max(mean - _Z * error, -1.0),
        "flips_high": min(max(mean + _Z * error, unseen), 1.0),
    }


def _needed(right_pairs: Sequence[tuple[float, float]], difference: float) -> int | None:
    from scipy.special import ndtri

    spread = float(np.std([own - other for own, other in right_pairs]))
    distance = abs(difference + ANSWER_MARGIN)
    if not spread or not distance:
        return None
    needed = math.ceil(((_Z + float(ndtri(POWER))) * spread / distance) ** 2)
    return needed if needed <= _MAX_NEEDED else None


def paired_interval(differences: Floats) -> tuple[float, float]:
    """The 95 % interval of the mean difference of the questions, each that of the shares of right answers of two sides.

    With one answer a side it is Tango's. The mean of several varies less: Tango's of the counts divided by the design
    effect (Rao and Scott, Biometrics 48 (1992) 577-585), which is taken as at most a little too large.
    """
    gained, lost = float(differences[differences > 0].sum()), float(-differences[differences < 0].sum())
    more = (gained + lost) / float((differences**2).sum()) if gained + lost else 1.0
    return tango_interval(more * gained, more * lost, more * len(differences))


def tango_interval(gained: float, lost: float, n: float) -> tuple[float, float]:
    """The 95 % score interval of the difference (gained - lost) / n of two paired shares.

    Tango, Statistics in Medicine 17 (1998) 891-908. Its ends are found by bisection.
    """

    def score(delta: float) -> float:
        b = (2 * n - gained + lost) * delta - gained - lost
        c = -lost * delta * (1 - delta)
        q = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)  # lost / n, if the difference is delta
        variance = n * (2 * q + delta * (1 - delta))
        distance = gained - lost - n * delta
        return (
            distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance) if distance else 0.0
        )

    return _bisect(score, (gained - lost) / n, -1.0, _Z), _bisect(score, (gained - lost) / n, 1.0, -_Z)


def _bisect(score: Callable[[float], float], near: float, far: float, target: float) -> float:
    """The value between `near`, where the falling function `score` is 0, and `far`, where it is `target`."""
    for _ in range(60):
        middle = (near + far) / 2
        if abs(score(middle)) < abs(target):
            near = middle
        else:
            far = middle
    return near
