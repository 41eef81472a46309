"""The answer of a sweep over context depth, prompt length or users: from which value on another server is faster."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from harness.analysis.capacity import find_crossing
from harness.analysis.stats import geometric_ratio, welch_effect
from harness.analysis.verdicts import is_client_limited
from harness.base.summary import MARGIN, CellSummary, Numbers, Reason, Row, because
from harness.base.units import count, factor, figures, short_percent
from harness.records.manifest import Run
from harness.scenario.plan import baseline_of

DEPTH, LENGTH = "prompts.system_tokens", "prompts.tokens"
FEW_CACHED = 0.9  # share of the context; with less of it in the cache the depth is not what was measured


class Speed(NamedTuple):
    """A speed of a cell: what a faster server does, and its unit."""

    id: str
    metric: str
    faster: str
    equal: str
    unit: str

    def of(self, numbers: Numbers, level: float) -> float | None:
        """The speed; of all users together it is that of one, so that its inverse is a straight line over users."""
        if self.id == "rate":
            return None if not numbers.output_tok_s else numbers.output_tok_s / max(level, 1)
        seconds = numbers.tpot.mean if self.id == "decode" else numbers.ttft.mean
        return 1 / seconds if seconds else None


DECODE = Speed("decode", "tpot_p50", "decodes faster", "decode equally fast", "tok/s of each user")
FIRST = Speed(
    "first", "ttft_p50", "gives the first token sooner", "give the first token equally soon", "first tokens/s"
)
RATE = Speed("rate", "output_tok_s", "has more throughput", "have equal throughput", "tok/s")


class Axis(NamedTuple):
    """A varied setting: its speeds, the words for a value, and for all measured values."""

    speeds: tuple[Speed, ...]
    at: str
    everywhere: str


AXES = {
    DEPTH: Axis((DECODE, FIRST), "a depth of {} tokens", "at every depth measured"),
    LENGTH: Axis((FIRST,), "prompts of {} tokens", "at every prompt length measured"),
    "users": Axis((RATE,), "{} users", "with every number of users measured"),
    "batch_size": Axis((RATE,), "{} at once", "at every level measured"),
    "in_flight": Axis((RATE,), "{} in flight", "at every level measured"),
}
Cells = dict[str, dict[int, list[CellSummary]]]  # by server and level


class SweepQuestion(NamedTuple):
    """The rows that differ in one number only, apart from their server."""

    load: str  # its name in the file
    axis: str
    others: str  # the other varied settings, in words
    cells: Cells
    limited: list[tuple[str, int]]  # servers and levels at which the load generator limited a speed


def varied_numbers(run: Run, rows: Sequence[Row], cells: Sequence[CellSummary]) -> list[SweepQuestion]:
    """Group the valid cells of a sweep of loads by what is compared. None where servers are varied, too."""
    swept = run.scenario.swept
    if swept is None or swept.servers:
        return []
    valid = {cell.id: cell for cell in cells if not cell.problems}
    found: dict[tuple[str, str, str], Cells] = {}
    limited: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for row in rows:
        settings = swept.loads[row.load].settings if row.load in swept.loads else {}
        axis = next((key for key in AXES if isinstance(settings.get(key), int)), None)
        if axis is not None:
            others = ", ".join(_setting_text(key, value) for key, value in settings.items() if key != axis)
            key = (swept.loads[row.load].of, axis, others)
            levels = found.setdefault(key, {}).setdefault(row.server, {})
            levels[settings[axis]] = [valid[name] for name in row.cells if name in valid]
            if any(is_client_limited(row, speed.metric) for speed in AXES[axis].speeds):
                limited.setdefault(key, []).append((row.server, settings[axis]))
    return [
        SweepQuestion(*key, cells=of, limited=limited.get(key, []))
        for key, of in found.items()
        if max(map(len, of.values())) > 1
    ]


def _setting_text(key: str, value: Any) -> str:
    return count(value, "user") if key == "users" else f"{key} {value}"


def setting_answers(run: Run, rows: Sequence[Row], cells: Sequence[CellSummary]) -> list[Reason]:
    """Return a sentence for each question of a sweep of loads; over users only where servers are compared."""
    questions = varied_numbers(run, rows, cells)
    answers = [answer for one in questions if (answer := _answer(run, one)) is not None]
    loads = {one.load for one in questions}
    named = {
        (one.load, one.others): ", ".join(filter(None, (one.load if len(loads) > 1 else "", one.others)))
        for one in questions
    }
    return [
        because("setting_answer", f"{name}: {each.text}" if name else each.text, **each.values)
        for each in answers
        for name in [named[each.values["load"], each.values["others"]]]
    ]


def _answer(run: Run, question: SweepQuestion) -> Reason | None:
    axis, base = AXES[question.axis], baseline_of(run.scenario).server
    base = base if base in question.cells else next(iter(question.cells))
    sides = [server for server in question.cells if server != base]
    found = [_compare(question, speed, base, side) for speed in axis.speeds for side in sides]
    parts = [part for part in found if part is not None] if sides else _ranges(question, base)
    parts += _uncached(question) if question.axis == DEPTH and parts else _speculation(question, alone=not sides)
    if not parts:
        return None
    parts += _limited(question)
    text = "; ".join(part.text for part in parts)
    values = {"load": question.load, "others": question.others, "axis": question.axis}
    return because("setting_answer", f"{text}.", **values, parts=[part.values for part in parts])


def _runs(question: SweepQuestion, speed: Speed, server: str) -> dict[int, list[float]]:
    """The speed of each valid cell, by level."""
    return {
        level: known
        for level, cells in sorted(question.cells[server].items())
        if (known := [value for cell in cells if (value := speed.of(cell.numbers, level)) is not None])
    }


def _compare(question: SweepQuestion, speed: Speed, base: str, side: str) -> Reason | None:
    """From which level on which of two servers is faster, with its interval."""
    runs = _runs(question, speed, base), _runs(question, speed, side)
    repeated = all(any(len(values) > 1 for values in of.values()) for of in runs)
    found = find_crossing(*runs, linear=True, assume_spread=not repeated)
    if not found.ratios:
        return None
    axis, ratios = AXES[question.axis], found.ratios
    interval = "95 % interval" if repeated else "one run, not repeated; assumed interval"
    at = partial(_level_text, axis)
    fast, slow = (base, side) if found.kind == "never" else (side, base)
    if all(abs(ratio - 1) <= MARGIN for ratio in ratios) and found.kind != "cannot_tell":
        text = f"{base} and {side} {speed.equal} {axis.everywhere}, within {short_percent(MARGIN)}"
    elif found.kind in ("always", "never"):
        by = sorted(ratios if found.kind == "always" else [1 / ratio for ratio in ratios])
        text = f"{fast} {speed.faster} than {slow} {axis.everywhere} ({factor(by[0])}x to {factor(by[-1])}x)"
        text += "" if repeated else " (one run, not repeated)"
    elif found.level is not None and found.low is not None and found.high is not None:
        bounds = f"({interval} {_number_text(found.low)} to {_number_text(found.high)})"
        where = f"from {at(found.level)} on {bounds}" if found.kind == "from" else f"up to {at(found.level)} {bounds}"
        text = f"{fast} {speed.faster} than {slow} {where}"
        text += "" if found.kind == "from" else f", and {slow} beyond"
    else:
        by = sorted(ratios)
        text = f"inconclusive which {speed.faster}: {side} is {factor(by[0])}x to {factor(by[-1])}x as fast as {base}"
        text += "; more repeats may decide"
    values = {"speed": speed.id, "base": base, "side": side, "kind": found.kind, "at": found.level, "low": found.low}
    levels = {"levels": found.levels, "ratios": ratios}
    return because("crossing", text, **values, high=found.high, **levels, provisional=not repeated)


def _level_text(axis: Axis, level: float) -> str:
    return axis.at.format(_number_text(level))


def _number_text(value: float) -> str:
    return figures(value) if value < 100 else f"{value:,.0f}"


def _ranges(question: SweepQuestion, server: str) -> list[Reason]:
    """How much slower a single server is at the last level than at the first, not in all of its throughput."""
    found: list[Reason] = []
    for speed in AXES[question.axis].speeds:
        runs = _runs(question, speed, server)
        if speed is RATE or len(runs) < 2:
            continue
        (first, at_first), (last, at_last) = list(runs.items())[0], list(runs.items())[-1]
        effect, ratio = welch_effect(at_first, at_last), geometric_ratio(at_first, at_last)
        shown = "one run, not repeated"
        if effect is not None:
            shown = "95 % interval {}x to {}x".format(*map(factor, effect.interval()))
        slower = {"decode": "decodes", "first": "gives the first token"}[speed.id]
        levels = f" with {_level_text(AXES[question.axis], last)} than with {_number_text(first)}"
        text = f"{'it' if found else server} {slower} {factor(ratio)}x slower{'' if found else levels} ({shown})"
        found.append(because("setting_range", text, speed=speed.id, side=server, levels=list(runs), ratio=ratio))
    return found


def _limited(question: SweepQuestion) -> list[Reason]:
    """Where the load generator, and not the server, may have made the times."""
    at = partial(_level_text, AXES[question.axis])
    return [
        because(
            "client_limited",
            f"Warning: the load generator was the limit with {server} at {at(level)}: these times are partly its own",
            side=server,
            level=level,
        )
        for server, level in question.limited[-1:]
    ]


def _uncached(question: SweepQuestion) -> list[Reason]:
    """The servers that computed the context again, by their count of cached tokens; unknown counts say nothing."""
    notes = []
    for server, levels in question.cells.items():
        shares = {level: share for level, cells in levels.items() if (share := _cached_share(level, cells)) is not None}
        level = min(shares, key=lambda each: shares[each], default=0)
        if shares and shares[level] < FEW_CACHED:
            text = f"Warning: {server} had {short_percent(shares[level])} of a context of {level:,} tokens in its cache"
            text += ", so its times include computing the rest"
            notes.append(because("depth_not_cached", text, side=server, level=level, share=shares[level]))
    return notes


def _speculation(question: SweepQuestion, *, alone: bool) -> list[Reason]:
    """The accepted share of the drafted tokens of each server that speculates, and the tokens of a step.

    `alone`: no server is compared with it.
    """
    notes = []
    for server, levels in question.cells.items():
        loads = [cell.server_load for cells in levels.values() for cell in cells]
        drafted, accepted, drafts = (
            sum(getattr(load, key) or 0 for load in loads) for key in ("drafted_tokens", "accepted_tokens", "drafts")
        )
        if drafted:
            tokens = 1 + accepted / drafts if drafts else None
            text = f"{server} accepted {short_percent(accepted / drafted)} of its drafted tokens"
            text += "" if tokens is None else f", {factor(tokens)} tokens a step"
            more = "; to know up to how many users it pays, run the same on the server without speculation, and "
            text += f"{more}`harness compare` both runs" if alone else ""
            notes.append(because("speculation", text, side=server, share=accepted / drafted, tokens_per_step=tokens))
    return notes


def _cached_share(level: int, cells: Sequence[CellSummary]) -> float | None:
    """The cached share of the context of a row; None where the server does not report it."""
    known = [cell.numbers for cell in cells if cell.numbers.cached_tokens is not None and cell.numbers.succeeded]
    if not level or not known:
        return None
    cached = sum(numbers.cached_tokens or 0 for numbers in known)
    return min(1.0, cached / (level * sum(numbers.succeeded for numbers in known)))
