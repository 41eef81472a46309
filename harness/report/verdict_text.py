"""Verdicts as sentences."""

import math
from collections.abc import Callable

from harness.base.metrics import METRICS
from harness.base.summary import MARGIN, MAX_FACTOR, MAX_REPEATS, OPEN, POWER, Verdict, known_bounds, sentence
from harness.base.units import count, ratio_text, short_percent

WORDS = {"no_difference": "no difference seen"}  # others are shown as they are


def verdict_word(verdict: Verdict) -> str:
    """The word of a verdict, marked where it is provisional: "slower (provisional)"."""
    word = WORDS.get(verdict.word, verdict.word)
    return f"{word} (provisional)" if verdict.provisional else word


def verdict_sentence(verdict: Verdict, *, side: str | None = None) -> str:
    """A verdict as a sentence: its side, ratio with interval, word, and what would settle or confirm it.

    `side` replaces the side, where several verdicts become one sentence.
    """
    return f"{verdict.side if side is None else side}: {_describe_verdict(verdict)}."


def _describe_verdict(verdict: Verdict) -> str:
    """A verdict without its side."""
    if verdict.refused is not None:
        return f"inconclusive: {sentence(verdict.refused)}"
    parts = [describe_ratio(verdict)]
    if verdict.word == "same":
        parts.append(f"the same within ±{short_percent(MARGIN)}")
    elif verdict.word == "no_difference":
        parts.append(f"no difference seen{_percents(verdict)}")
    elif verdict.word == "inconclusive":
        parts.append(f"inconclusive: {_why_inconclusive(verdict)}")
    elif verdict.p is not None and not verdict.provisional:
        parts[0] = parts[0].removesuffix(")") + f", p {_format_p(verdict.p)})"
    return "; ".join([*parts, *_what_confirms(verdict)])


def describe_ratio(verdict: Verdict, baseline: str | None = None) -> str:
    """The ratio of a verdict with its interval: "1.25x slower than a / x by wall time (95 % interval ...)".

    `baseline` replaces the name of the baseline.
    """
    ratio, (low, high) = verdict.ratio or 0.0, shown_bounds(verdict)
    is_decided = verdict.word in ("faster", "slower")
    if is_decided:
        speed = f"{format_speedup(ratio)} than"
        if ratio < 1:
            low, high = (None if bound is None else _invert(bound) for bound in (high, low))
    else:
        speed = f"{format_speedup(ratio)} than" if ratio_text(ratio) != "1.0000" else "as fast as"
    notes = [_RUNS_OF_BASIS[verdict.basis]] if verdict.basis in _RUNS_OF_BASIS else []
    if notes and is_decided:
        times = max(ratio, _invert(ratio))
        shown = f"{times:.1f}" if times >= 1.2 else ratio_text(times)
        speed = f"about {shown}x {verdict.word} ({notes.pop()}) than"
    if verdict.reason == "interval_unknown":
        speed = f"about {speed}"
        interval = f"interval not known from {count(min(verdict.n), verdict.unit.removesuffix('s'))}"
    elif low is None and high is None:
        interval = "no interval"
    elif is_decided:
        interval = f"95 % interval {format_bounds(low, high, lambda bound: f'{ratio_text(bound)}x')}"
    else:
        interval = f"95 % interval {format_bounds(low, high, format_speedup)}"
    return (
        f"{speed} {baseline or verdict.baseline} by {METRICS[verdict.metric].title} ({', '.join([interval, *notes])})"
    )


def shown_bounds(verdict: Verdict) -> tuple[float | None, float | None]:
    """The bounds of the interval that say something: of a verdict that is far beyond the margin, often only one."""
    return (None, None) if verdict.ratio is None else known_bounds(verdict.ratio, verdict.low, verdict.high)


def format_bounds(low: float | None, high: float | None, show: Callable[[float], str], dash: str = " to ") -> str:
    """An interval, of which one bound may not be known: "1.20x to 1.90x", "at least 2.00x"; empty: none is known."""
    if low is None:
        return "" if high is None else f"at most {show(high)}"
    return f"at least {show(low)}" if high is None else f"{show(low)}{dash}{show(high)}"


_RUNS_OF_BASIS = {"one_run": "one run, not repeated", "apart": "not interleaved"}


def _percents(verdict: Verdict) -> str:
    """The interval of a verdict as changes of the speed: " (-22 % to +7 %)"."""
    if verdict.low is None or verdict.high is None:
        return ""
    low, high = (f"{'+' if end > 1 else '-'}{short_percent(abs(end - 1))}" for end in (verdict.low, verdict.high))
    return f" ({low} to {high})"


def _why_inconclusive(verdict: Verdict) -> str:
    alike, p = f"±{short_percent(MARGIN)}", _format_p(verdict.p or 0.0).removeprefix("= ")
    why = {
        "in_margin": f"the difference is within {alike}, its interval is not",
        "includes_one": "the interval includes 1",
        "not_beyond": f"the interval is not beyond {alike}",
        "corrected": f"with {verdict.comparisons} comparisons the corrected p-value is {p}",
        "interval_unknown": f"the interval is wider than a factor of {MAX_FACTOR:g} either way",
        "client": "the load generator was late, and the interval allows for that; without it there would be a verdict",
    }
    return why.get(verdict.reason or "", "too few repeats")


def _what_confirms(verdict: Verdict) -> list[str]:
    """What would settle an inconclusive verdict, or confirm a provisional one; and what a provisional one does."""
    texts = []
    if verdict.widened is not None and verdict.reason != "client":
        share = max(verdict.widened) - 1
        texts.append(f"the interval allows for {short_percent(share)} of delay in the load generator")
    if verdict.reason == "client":
        texts.append("free a core for the load generator, or use more processes")
    elif verdict.reason == "interval_unknown" and verdict.needed is not None:
        texts.append(f"{verdict.needed} {verdict.unit} a side would show how far they differ")
    elif verdict.basis in ("runs", "repeats") and (verdict.reason in OPEN or verdict.word == "no_difference"):
        texts.append(_describe_needed(verdict))
    if verdict.provisional:
        texts.append(f"provisional: {_confirmation(verdict)}")
    if verdict.fails == "with_provisional":
        texts.append("would fail with --provisional")
    return texts


_MEASURE = "harness run SCENARIO --times 5"


def _confirmation(verdict: Verdict) -> str:
    """What confirms a provisional verdict."""
    if verdict.basis == "one_run":
        return f"confirm it with --repeats {verdict.needed}"
    if verdict.basis == "apart":
        return f"confirm it in one run that is not interrupted, with --repeats {verdict.needed}"
    if verdict.word in ("faster", "slower", "same"):
        return f"confirm it with {verdict.needed} runs a side, or with `{_MEASURE}`"
    return f"the variation between runs is assumed; `{_MEASURE}` measures it"


def _describe_needed(verdict: Verdict) -> str:
    """How many repeats or runs would decide a verdict."""

    def format_needed(needed: int | None) -> str:
        return f"more than {MAX_REPEATS} {verdict.unit}" if needed is None else f"about {needed} {verdict.unit}"

    ratio, low, high = verdict.ratio or 1.0, verdict.low or 0.0, verdict.high or math.inf
    beyond_margin = abs(math.log(ratio)) > math.log1p(MARGIN)
    same = f"that the sides are the same within ±{short_percent(MARGIN)}"
    text = f"at this spread, {format_needed(verdict.needed)} a side show "
    text += "a difference of this size" if beyond_margin else same
    if beyond_margin and low <= 1 <= high:  # there may be no difference at all
        text += f", {format_needed(verdict.needed_for_same)} that there is none"
    return f"{text}, with a probability of {POWER * 100:.0f} %"


def format_speedup(ratio: float, more: str = "faster", less: str = "slower") -> str:
    """A ratio of speeds: "2.00x faster", "2.38x slower"."""
    return f"{ratio_text(_invert(ratio))}x {less}" if ratio < 1 else f"{ratio_text(ratio)}x {more}"


def _invert(ratio: float) -> float:
    return 1 / ratio if ratio > 0 else math.inf


def _format_p(value: float) -> str:
    return f"= {value:.2f}" if value >= 0.095 else f"= {value:.3f}" if value >= 0.001 else "< 0.001"
