"""Verdicts as sentences."""

import math
from collections.abc import Callable

from harness.base.command_line import command_line
from harness.base.metrics import METRICS
from harness.base.reason import sentence
from harness.base.units import count, figures, ratio_text, short_percent
from harness.numbers.comparison import MARGIN, MAX_REPEATS, OPEN, POWER, Gate, Verdict, known_bounds


def verdict_word(verdict: Verdict) -> str:
    """The word of a verdict, marked where it is provisional: "slower (provisional)".

    Where one side is better within the margin, it says so: "same (1.2 % faster)".
    """
    word = verdict.word
    if word == "same" and is_better_within_margin(verdict):
        word = f"same ({format_change(verdict.ratio or 1.0)})"
    return f"{word} (provisional)" if verdict.provisional else word


def is_better_within_margin(verdict: Verdict) -> bool:
    """Whether a side is surely the better one, by so much that a reader sees it, although the verdict is `same`."""
    low, high, ratio = verdict.low or 0.0, verdict.high or math.inf, verdict.ratio or 1.0
    return not low <= 1 <= high and abs(ratio - 1) >= SEEN


def verdict_sentence(verdict: Verdict, *, side: str | None = None) -> str:
    """A verdict as sentences: its side, ratio with interval, and what would settle or confirm it.

    `side` replaces the side, where several verdicts become one sentence.
    """
    return " ".join(f"{text}." for text in _verdict_texts(verdict, verdict.side if side is None else side))


def _verdict_texts(verdict: Verdict, side: str) -> list[str]:
    if verdict.refused is not None:
        return [f"{side}: inconclusive: {sentence(verdict.refused)}"]
    if verdict.gate is not None:
        settles = [] if verdict.gate in DECIDED else [_settles_gate(verdict, "R")]
        return [f"{side}: {_gate_result(verdict)}", *settles]
    if verdict.word == "same":
        text = f"the same as {verdict.baseline} by {METRICS[verdict.metric].title}"
        return [f"{side}: {text} ({_same_text(verdict)})", *_what_confirms(verdict)]
    if verdict.word == "inconclusive":
        word = "not decided" if is_one_sided(verdict) else "cannot tell"
        return [f"{side}: {word}: {undecided_text(verdict)}", *why_undecided(verdict), *_what_confirms(verdict)]
    is_sure = verdict.p is not None and not verdict.provisional
    return [f"{side}: {describe_ratio(verdict, with_p=is_sure)}", *_what_confirms(verdict)]


def undecided_text(verdict: Verdict, baseline: str | None = None) -> str:
    """What is known of an open verdict: "between 29 % slower and 6 % faster than a by wall time".

    `baseline` replaces the name of the baseline.
    """
    bounds = shown_bounds(verdict)
    seen = format_range(*bounds)
    if None in bounds:
        seen = f"about {format_change(verdict.ratio or 1.0)}"
    than = "than"
    if None in bounds and ratio_text(verdict.ratio or 1.0) == ratio_text(1.0):
        seen, than = "about as fast", "as"
    text = f"{seen} {than} {baseline or verdict.baseline} by {METRICS[verdict.metric].title}"
    notes = [_RUNS_OF_BASIS[verdict.basis]] if verdict.basis in _RUNS_OF_BASIS else []
    if None in bounds:
        notes.insert(0, f"interval not known from {count(min(verdict.n), *_UNIT_NAMES[verdict.unit])}")
    return f"{text} ({', '.join(notes)})" if notes else text


def _gate_result(verdict: Verdict) -> str:
    """What a verdict with a gate shows: "18 % slower than a by wall time (7.6 to 29 %); whether 10 % or more ..."."""
    assert verdict.gate is not None
    low, high = shown_bounds(verdict)
    if verdict.gate in ("no_slowdown", "cannot_tell") or low is None or high is None:
        text = gate_text(verdict.gate, low, high, verdict.tolerance or 0.0)
        return f"{describe_change(verdict, interval=False)}; {text}"
    more = {
        "provisional": "; provisional, would fail with --provisional",
        "size_unknown": f"; whether {limit_text(verdict.tolerance or 0.0)} or more is not known",
    }
    return describe_change(verdict) + more.get(verdict.gate, "")


_UNIT_NAMES = {"repeats": ("repeat", "repeats"), "runs": ("run", "runs")}


def _same_text(verdict: Verdict) -> str:
    """How near two equal sides are: "within 0.76 %", or "0.54 to 1.5 % faster" where one is surely the better one."""
    low, high = shown_bounds(verdict)
    notes = [_RUNS_OF_BASIS[verdict.basis]] if verdict.basis in _RUNS_OF_BASIS else []
    if low is None or high is None:
        return ", ".join([f"within ±{short_percent(MARGIN)}", *notes])
    if is_better_within_margin(verdict):
        return ", ".join([format_range(low, high), *notes])
    largest = max(_invert(low), high, 1.0) - 1
    return ", ".join([f"within {_short_share(largest)} %" if largest >= 5e-5 else "no difference seen", *notes])


def is_one_sided(verdict: Verdict) -> bool:
    """Whether the interval of a verdict excludes that both sides are equally fast."""
    low, high = shown_bounds(verdict)
    return (low is not None and low > 1) or (high is not None and high < 1)


def why_undecided(verdict: Verdict) -> list[str]:
    """Why the interval of an open verdict does not decide it, where the interval itself does not show that."""
    if verdict.reason in ("in_margin", "not_beyond") and is_one_sided(verdict):
        return [f"A difference of less than {short_percent(MARGIN)} counts as the same"]
    if verdict.reason == "corrected":
        p = _format_p(verdict.p or 0.0)
        return [f"With {verdict.comparisons} comparisons the corrected p-value is {p}"]
    if verdict.reason == "client":
        return ["The load generator was late, and the interval allows for that; without it there would be a verdict"]
    return []


SEEN = 0.005  # a difference within the margin that is worth a word
DECIDED = ("no_slowdown", "slower")  # gates that nothing needs to settle


def format_change(ratio: float, *bounds: float | None) -> str:
    """A ratio of speeds as a change: "29 % slower", "6 % faster", from a factor of 2 on "2.40x slower".

    `bounds`: those of its interval, which is printed next to it, in the same unit.
    """
    if max(max(size, _invert(size)) for size in (ratio, *bounds) if size is not None) >= 2:
        return format_speedup(ratio)
    share, word = (_invert(ratio) - 1, "slower") if ratio < 1 else (ratio - 1, "faster")
    return f"{_short_share(share)} % {word}"


def describe_change(verdict: Verdict, *, interval: bool = True) -> str:
    """The change of a verdict, in the scale of the gate: "29 % slower than a by wall time (19 to 40 %)"."""
    low, high = shown_bounds(verdict)
    one_sided = low is not None and high is not None and not low < 1 <= high
    size = interval_sizes(low or 0.0, high or 0.0) if one_sided else format_range(low, high)
    notes = [size] if interval else []
    notes += [_RUNS_OF_BASIS[verdict.basis]] if verdict.basis in _RUNS_OF_BASIS else []
    about = "about " if None in (low, high) else ""
    change = format_change(verdict.ratio or 1.0, *((low, high) if interval else ()))
    text = f"{about}{change} than {verdict.baseline} by {METRICS[verdict.metric].title}"
    return f"{text} ({', '.join(notes)})" if notes else text


def limit_text(tolerance: float) -> str:
    """A tolerance as it was given: "10 %", "99.99 %"."""
    return f"{round(100 * tolerance, 3):g} %"


def _short_share(share: float) -> str:
    return figures(100 * share, 2) if share >= 5e-5 else "0"


def format_range(low: float | None, high: float | None) -> str:
    """The interval of a ratio of speeds: "between 29 % slower and 6 % faster", "5 to 15 % slower"."""
    if low is None or high is None:
        if high is not None and high < 1:
            return f"at least {format_change(high)}"
        return f"at least {format_change(low)}" if low is not None and low > 1 else "interval not known"
    if low < 1 <= high:
        return f"between {format_change(low, high)} and {format_change(high, low)}"
    return f"{interval_sizes(low, high)} {'slower' if high < 1 else 'faster'}"


def interval_sizes(low: float, high: float) -> str:
    """The sizes of an interval on one side of 1: "5 to 15 %", "2.1x to 2.4x"."""
    near, far = (_invert(high), _invert(low)) if high < 1 else (low, high)
    if far >= 2:
        return f"{ratio_text(near)}x to {ratio_text(far)}x"
    return f"{_short_share(near - 1)} to {_short_share(far - 1)} %"


def gate_text(gate: Gate, low: float | None, high: float | None, tolerance: float) -> str:
    """What the interval of a ratio shows of a slowdown by the tolerance."""
    seen, limit = format_range(low, high), f"{limit_text(tolerance)} or more"
    if gate not in ("no_slowdown", "cannot_tell") and low is not None and high is not None:
        seen = interval_sizes(low, high)  # the word is there
    return {
        "no_slowdown": f"no slowdown of {limit} ({seen})",
        "slower": f"slower ({seen})",
        "provisional": f"slower ({seen}), provisional; would fail with --provisional",
        "size_unknown": f"slower ({seen}); whether {limit} is not known",
        "cannot_tell": f"cannot tell: {seen}",
    }[gate]


def gate_answer(verdict: Verdict) -> str:
    """What a verdict shows of a slowdown by the tolerance, as a sentence, with what would settle it."""
    if verdict.refused is not None:
        return f"Cannot tell: {verdict.side}: {sentence(verdict.refused)}."
    seen, limit = format_range(*shown_bounds(verdict)), f"{limit_text(verdict.tolerance or 0.0)} or more"
    change = format_change(verdict.ratio or 1.0, *shown_bounds(verdict))
    than = f" than {verdict.baseline} by {METRICS[verdict.metric].title}"
    if verdict.gate == "no_slowdown":
        return f"No slowdown of {limit}: {verdict.side} is {seen}{than}."
    if verdict.gate == "cannot_tell":
        size = f"about {change} ({seen})" if None in shown_bounds(verdict) else seen
        return f"Cannot tell: {verdict.side} is {size}{than}. {_settles_gate(verdict, 'R')}."
    low, high = shown_bounds(verdict)
    sizes = seen if low is None or high is None else interval_sizes(low, high)
    text = f"{verdict.side} is {change}{than} ({sizes})"
    if verdict.gate == "slower":
        return f"Slower: {text}."
    if verdict.gate == "provisional":
        return f"Probably slower: {text}, provisional; would fail with --provisional. {_settles_gate(verdict, 'R')}."
    answer = f"{_slower(verdict)}: {text}; whether {limit} is not known."
    correction = why_undecided(verdict) if verdict.reason == "corrected" else []
    return " ".join([answer, *(f"{why}." for why in correction), f"{_settles_gate(verdict, 'R')}."])


def _slower(verdict: Verdict) -> str:
    """How sure it is that a side is slower whose whole interval is: few runs, or many comparisons, do not prove it."""
    return "Slower" if verdict.word == "slower" and not verdict.provisional else "Probably slower"


def _settles_gate(verdict: Verdict, first: str = "r") -> str:
    """What would decide the gate of a verdict."""
    if verdict.reason == "client":
        return "free a core for the load generator, or use more processes"
    if verdict.gate_needed is None:
        more = "--repeats N" if verdict.unit == "repeats" else "--times N"
        measure = "Measure" if first == "R" else "measure"
        return f"{measure} more (`{more}`), or choose another --tolerance: the difference is about as large"
    if verdict.unit == "repeats":
        return f"{first}epeat it: `--repeats {verdict.gate_needed}`"
    command = command_line("harness", "run", "SCENARIO", "--times", verdict.gate_needed)
    return f"{first}epeat both: {verdict.gate_needed} runs each (`{command}`)"


def gate_word(verdict: Verdict) -> str:
    """The word of a verdict in a table: of its gate, if it has one."""
    limit = limit_text(verdict.tolerance or 0.0)
    if verdict.gate == "no_slowdown" and verdict.word not in ("faster", "same"):
        return f"slower by under {limit}" if verdict.word == "slower" else f"no slowdown of {limit}"
    words = {"provisional": "slower (provisional)", "size_unknown": f"{_slower(verdict).lower()} (size not known)",
             "cannot_tell": "cannot tell"}  # fmt: skip
    return words.get(verdict.gate or "", verdict_word(verdict))


def verdict_style(verdict: Verdict) -> str:
    """The colour of a verdict: only what is decided is green or red."""
    if verdict.gate is None:
        return verdict.word
    if verdict.gate in ("no_slowdown", "cannot_tell", "slower"):
        return verdict.word if (verdict.gate, verdict.word) == ("no_slowdown", "faster") else verdict.gate
    return "probably_slower" if verdict.gate == "provisional" else verdict.gate


def describe_ratio(verdict: Verdict, baseline: str | None = None, *, with_p: bool = False) -> str:
    """The ratio of a verdict with its interval: "1.25x slower than a / x by wall time (95 % interval ...)".

    `baseline` replaces the name of the baseline. `with_p`: with the p-value.
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
    notes = [interval, *notes]
    if with_p and verdict.p is not None:
        notes.append(f"p {_format_p(verdict.p, equals='= ')}")
    return f"{speed} {baseline or verdict.baseline} by {METRICS[verdict.metric].title} ({', '.join(notes)})"


def shown_bounds(verdict: Verdict) -> tuple[float | None, float | None]:
    """The bounds of the interval that say something: of a verdict that is far beyond the margin, often only one."""
    return (None, None) if verdict.ratio is None else known_bounds(verdict.ratio, verdict.low, verdict.high)


def format_bounds(low: float | None, high: float | None, show: Callable[[float], str], dash: str = " to ") -> str:
    """An interval, of which one bound may not be known: "1.20x to 1.90x", "at least 2.00x"; empty: none is known."""
    if low is None:
        return "" if high is None else f"at most {show(high)}"
    return f"at least {show(low)}" if high is None else f"{show(low)}{dash}{show(high)}"


_RUNS_OF_BASIS = {"one_run": "one run, not repeated", "apart": "not interleaved"}


def _what_confirms(verdict: Verdict) -> list[str]:
    """What would settle an inconclusive verdict, or confirm a provisional one; and what a provisional one does."""
    texts = []
    if verdict.widened is not None and verdict.reason != "client":
        share = max(verdict.widened) - 1
        texts.append(f"The interval allows for {short_percent(share)} of delay in the load generator")
    if verdict.reason == "client":
        texts.append("Free a core for the load generator, or use more processes")
    elif verdict.reason == "interval_unknown" and verdict.needed is not None:
        texts.append(f"{verdict.needed} {verdict.unit} a side would show how far they differ")
    elif verdict.basis in ("runs", "repeats") and verdict.reason in OPEN:
        texts.append(_describe_needed(verdict))
    if verdict.provisional:
        texts.append(_confirmation(verdict))
    return texts


_MEASURE = "harness run SCENARIO --times 5"


def _confirmation(verdict: Verdict) -> str:
    """What confirms a provisional verdict, or settles an open one."""
    verb = "should settle it" if verdict.word == "inconclusive" else "confirms it"
    if verdict.basis == "one_run":
        return f"Provisional: `--repeats {verdict.needed}` {verb}"
    if verdict.basis == "apart":
        return f"Provisional: `--repeats {verdict.needed}` in one run that is not interrupted {verb}"
    if verdict.word in ("faster", "slower", "same"):
        return f"Provisional: {verdict.needed} runs a side confirm it, or `{_MEASURE}`"
    return f"Provisional: the variation between runs is assumed; `{_MEASURE}` measures it"


def _describe_needed(verdict: Verdict) -> str:
    """How many repeats or runs would decide a verdict."""

    def format_needed(needed: int | None) -> str:
        return f"more than {MAX_REPEATS} {verdict.unit}" if needed is None else f"about {needed} {verdict.unit}"

    ratio, low, high = verdict.ratio or 1.0, verdict.low or 0.0, verdict.high or math.inf
    beyond_margin = abs(math.log(ratio)) > math.log1p(MARGIN)
    same = f"that the sides are the same within ±{short_percent(MARGIN)}"
    text = f"At this spread, {format_needed(verdict.needed)} a side show "
    text += "a difference of this size" if beyond_margin else same
    if beyond_margin and low <= 1 <= high:  # there may be no difference at all
        text += f", {format_needed(verdict.needed_for_same)} that there is none"
    return f"{text}, with a probability of {POWER * 100:.0f} %"


def format_speedup(ratio: float, more: str = "faster", less: str = "slower") -> str:
    """A ratio of speeds: "2.00x faster", "2.38x slower"."""
    return f"{ratio_text(_invert(ratio))}x {less}" if ratio < 1 else f"{ratio_text(ratio)}x {more}"


def _invert(ratio: float) -> float:
    return 1 / ratio if ratio > 0 else math.inf


def _format_p(value: float, equals: str = "") -> str:
    return f"{equals}{value:.2f}" if value >= 0.095 else f"{equals}{value:.3f}" if value >= 0.001 else "< 0.001"
