"""What speculation gains and costs: its effect on decode and on the first token, and the drafts that are accepted."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.base.reason import Reason, because
from harness.base.units import factor, short_percent
from harness.numbers.comparison import MARGIN, known_bounds
from harness.numbers.stats import geometric_ratio, welch_effect
from harness.numbers.summary import CellSummary

DIFFERENT = 0.05  # shares of accepted drafts that differ by more are shown for each level
TURN = "turn"  # the speed of a whole turn, see `decide`
_EFFECTS = {"decode": "decodes {}x as fast", "first": "takes {}x as long for the first token"}
_GOALS = {
    "prompts.tokens": "by the time of a whole turn",
    "prompts.system_tokens": "by the time of a later turn, with its context in the cache",
}  # else by throughput
_PLACES = {
    "prompts.tokens": "prompts of {} tokens", "prompts.system_tokens": "a depth of {} tokens", "users": "{} users",
}  # fmt: skip

Runs = Mapping[int, Sequence[float]]  # the speeds of a server at each level
Levels = Mapping[int, Sequence[CellSummary]]


def counted(cells: Sequence[CellSummary], key: str) -> float | None:
    """Return what the metrics of a server counted in some cells; None where no cell reports it."""
    values = [value for cell in cells if (value := getattr(cell.server_load, key)) is not None]
    return sum(values) if values else None


def accepted_share(cells: Sequence[CellSummary]) -> float | None:
    """Return the accepted share of the drafted tokens; None where the server drafted none or does not report them."""
    drafted, accepted = counted(cells, "drafted_tokens"), counted(cells, "accepted_tokens")
    return accepted / drafted if drafted and accepted is not None else None


def acceptance(server: str, levels: Levels, at: Mapping[int, str]) -> Reason | None:
    """Return the accepted share of a server, in all and by level. `at`: the words for each level."""
    cells = [cell for level in levels.values() for cell in level]
    share = accepted_share(cells)
    if share is None:
        return None
    accepted, drafts = counted(cells, "accepted_tokens"), counted(cells, "drafts")
    tokens = 1 + (accepted or 0.0) / drafts if drafts else None
    by_level = {str(level): accepted_share(own) for level, own in sorted(levels.items())}
    reported = [value for value in by_level.values() if value is not None]
    text = f"{server} accepted {short_percent(share)} of its drafted tokens"
    text += "" if tokens is None else f", {factor(tokens)} tokens a step"
    if max(reported) - min(reported) > DIFFERENT:
        parts = [
            f"{short_percent(value)} with {at[int(level)]}" for level, value in by_level.items() if value is not None
        ]
        text += f" ({', '.join(parts)})"
    counts = {"drafted": counted(cells, "drafted_tokens"), "accepted": accepted}
    values = {"side": server, "share": share, "tokens_per_step": tokens, "by_level": by_level}
    return because("speculation", text, **values, **counts)


def effect(speed: str, side: tuple[str, Runs], base: tuple[str, Runs], at: Mapping[int, str]) -> Reason | None:
    """Return what speculation does to decode or to the first token, at the last level, with its interval.

    The ratio of decode is that of the speeds; of the first token that of the times.
    """
    (name, ours), (other, theirs) = side, base
    if speed == "first":
        ours, theirs = theirs, ours
    levels = sorted(level for level in ours.keys() & theirs.keys() if ours[level] and theirs[level])
    if not levels:
        return None
    ratios = [geometric_ratio(ours[level], theirs[level]) for level in levels]
    last = levels[-1]
    measured, low, high = welch_effect(ours[last], theirs[last]), None, None
    shown = " (one run, not repeated)"
    if measured is not None:
        low, high = known_bounds(measured.ratio, *measured.interval())
        is_known = low is not None and high is not None
        shown = f" (95 % interval {factor(low or 0.0)}x to {factor(high or 0.0)}x)" if is_known else ""
    text = "and" if speed == "first" else f"with {at[last]} {name}"
    text += f" {_EFFECTS[speed].format(factor(ratios[-1]))}{shown}"
    values = {"speed": speed, "base": other, "side": name, "levels": levels, "ratios": ratios, "low": low, "high": high}
    return because("speculation_effect", text, **values)


def lead(answers: Sequence[Reason]) -> list[Reason]:
    """Return for each server that speculates one sentence about all its loads. None for a single one, which says it."""
    about: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}  # by server: the axis, the name, a crossing
    for answer in answers:
        name = answer.values["others"] or answer.values["load"]
        for part in answer.values["parts"]:
            if part.get("speculates") and part["speed"] in (TURN, "rate"):
                about.setdefault(part["side"], []).append((answer.values["axis"], name, part))
    return [_lead_of(side, crossings, answers) for side, crossings in about.items() if len(crossings) > 1]


def short_answers(answers: Sequence[Reason]) -> list[Reason]:
    """Return what a headline has of some answers: of several about speculation the sentence about all of them."""
    if not any(answer.code == "speculation_lead" for answer in answers):
        return list(answers)
    return [answer for answer in answers if not _is_detail(answer)]


def _is_detail(answer: Reason) -> bool:
    parts = answer.values["parts"] if answer.code == "setting_answer" else [answer.values]
    return answer.code in ("setting_answer", "crossing") and any(part.get("speculates") for part in parts)


def _lead_of(side: str, crossings: Sequence[tuple[str, str, dict[str, Any]]], answers: Sequence[Reason]) -> Reason:
    by_axis: dict[str, list[str]] = {}
    for axis, name, part in crossings:
        by_axis.setdefault(axis, []).append(f"for {name} {_where(axis, part)}")
    clauses = [f"{_GOALS.get(axis, 'by throughput')} {', '.join(texts)}" for axis, texts in by_axis.items()]
    shares = _shares(side, answers)
    accepted = ", ".join(f"{name} {short_percent(share)}" for name, share in shares.items())
    text = f"Speculation ({side}) pays {'; '.join(clauses)}" + (f"; drafts accepted: {accepted}" if accepted else "")
    text += "; one run, not repeated" if any(part["provisional"] for _, _, part in crossings) else ""
    keys = ("kind", "at", "low", "high")
    pays = [{"axis": axis, "of": name, **{key: part[key] for key in keys}} for axis, name, part in crossings]
    return because("speculation_lead", f"{text}.", side=side, pays=pays, accepted=shares)


def _shares(side: str, answers: Sequence[Reason]) -> dict[str, float]:
    """Return the accepted share of a server for each other setting, such as the kind of prompt, over all loads."""
    sums: dict[str, list[float]] = {}
    for answer in answers:
        for part in answer.values["parts"]:
            if part.get("side") == side and part.get("drafted"):
                total = sums.setdefault(answer.values["others"] or answer.values["load"], [0.0, 0.0])
                total[0] += part["accepted"]
                total[1] += part["drafted"]
    return {name: accepted / drafted for name, (accepted, drafted) in sums.items()}


def _where(axis: str, crossing: Mapping[str, Any]) -> str:
    if crossing["equal"]:
        return f"at no level (equal within {short_percent(MARGIN)})"
    words = {
        "always": "at every level measured",
        "never": "at no level measured",
        "cannot_tell": "perhaps (inconclusive)",
    }
    if crossing["at"] is None:
        return words[crossing["kind"]]
    place = _PLACES.get(axis, "{} at once").format(f"{int(crossing['at']):,}")
    ends = " to ".join(f"{int(crossing[end]):,}" for end in ("low", "high"))
    return f"{'from' if crossing['kind'] == 'from' else 'up to'} {place} (interval {ends})"
