"""The answer of a sweep over context depth, prompt length or users: from which value on another server is faster."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any, NamedTuple

from harness.base.measured import Numbers
from harness.base.reason import Reason, because
from harness.base.units import count, factor, figures, short_percent
from harness.engines import engines, find_engine
from harness.numbers.comparison import MARGIN, known_bounds
from harness.numbers.stats import geometric_ratio, welch_effect
from harness.numbers.summary import CellSummary, Row, Summary
from harness.numbers.verdicts import is_client_limited
from harness.questions.capacity.decide import find_crossing
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
    """A varied setting: its speeds, the words for a value, for all measured values, and for a value of 1."""

    speeds: tuple[Speed, ...]
    at: str
    everywhere: str
    at_one: str = ""


AXES = {
    DEPTH: Axis((DECODE, FIRST), "a depth of {} tokens", "at every depth measured"),
    LENGTH: Axis((FIRST,), "prompts of {} tokens", "at every prompt length measured"),
    "users": Axis((RATE,), "{} users", "with every number of users measured", "{} user"),
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


class Side(NamedTuple):
    """A side of a comparison of runs."""

    name: str
    runs: Sequence[Run]
    summaries: Sequence[Summary]


class Speeds(NamedTuple):
    """The speeds of a server at each level, one of each repeat or run, and whether it drafted tokens."""

    name: str
    at: dict[int, list[float]]
    drafts: bool


def varied_numbers(run: Run, rows: Sequence[Row], cells: Sequence[CellSummary]) -> list[SweepQuestion]:
    """Group the valid cells of a sweep of loads by what is compared. None where servers are varied, too."""
    swept = run.scenario.swept
    if swept is None or swept.servers:
        return []
    valid = {cell.id: cell for cell in cells if not cell.problems}
    by_key: dict[tuple[str, str, str], Cells] = {}
    limited: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for row in rows:
        settings = swept.loads[row.load].settings if row.load in swept.loads else {}
        axis = next((key for key in AXES if isinstance(settings.get(key), int)), None)
        if axis is not None:
            others = ", ".join(_setting_text(key, value) for key, value in settings.items() if key != axis)
            key = (swept.loads[row.load].of, axis, others)
            levels = by_key.setdefault(key, {}).setdefault(row.server, {})
            levels[settings[axis]] = [valid[name] for name in row.cells if name in valid]
            if any(is_client_limited(row, speed.metric) for speed in AXES[axis].speeds):
                limited.setdefault(key, []).append((row.server, settings[axis]))
    return [
        SweepQuestion(*key, cells=by_server, limited=limited.get(key, []))
        for key, by_server in by_key.items()
        if max(map(len, by_server.values())) > 1
    ]


def _setting_text(key: str, value: Any) -> str:
    return count(value, "user") if key == "users" else f"{key} {value}"


def setting_answers(run: Run, rows: Sequence[Row], cells: Sequence[CellSummary]) -> list[Reason]:
    """Return a sentence for each question of a sweep of loads.

    Over users only where servers are compared, or where the run asks about speculation.
    """
    questions = varied_numbers(run, rows, cells)
    answers = [answer for question in questions if (answer := _answer(run, question)) is not None]
    loads = {question.load for question in questions}
    named = {
        (question.load, question.others): ", ".join(
            filter(None, (question.load if len(loads) > 1 else "", question.others))
        )
        for question in questions
    }
    return [
        because("setting_answer", f"{name}: {answer.text}" if name else answer.text, **answer.values)
        for answer in answers
        for name in [named[answer.values["load"], answer.values["others"]]]
    ]


def speculation_answers(base: Side, sides: Sequence[Side]) -> list[Reason]:
    """Return up to how many users speculation pays, for each side of which one speculates and the other does not.

    The sample is the run.
    """
    reasons = []
    for side, (key, axis) in itertools.product(sides, _throughput_questions(base)):
        ours, theirs = _speeds_in_runs(base, key), _speeds_in_runs(side, key)
        if ours.drafts == theirs.drafts or (answer := _compare(axis, RATE, ours, theirs)) is None:
            continue
        name = f"{side.name}: " if len(sides) > 1 else ""
        reasons.append(because("crossing", f"{name}{answer.text}.", **answer.values))
    return reasons


def _throughput_questions(side: Side) -> list[tuple[tuple[str, str, str, str], Axis]]:
    """The load, the axis, the other settings and the server of each sweep that is about the throughput."""
    return [
        ((question.load, question.axis, question.others, server), AXES[question.axis])
        for question in varied_numbers(side.runs[0], side.summaries[0].rows, side.summaries[0].cells)
        for server in question.cells
        if AXES[question.axis].speeds == (RATE,)
    ]


def _speeds_in_runs(side: Side, key: tuple[str, str, str, str]) -> Speeds:
    """The speeds of a side, of each run the mean of its repeats."""
    at: dict[int, list[float]] = {}
    drafts = False
    for run, summary in zip(side.runs, side.summaries, strict=True):
        for question in varied_numbers(run, summary.rows, summary.cells):
            if (question.load, question.axis, question.others) == key[:3] and key[3] in question.cells:
                drafts |= bool(_counted(question, key[3], "drafted_tokens"))
                for level, values in _runs(question, RATE, key[3]).items():
                    at.setdefault(level, []).append(geometric_mean(values))
    return Speeds(side.name, at, drafts)


def _answer(run: Run, question: SweepQuestion) -> Reason | None:
    axis, base = AXES[question.axis], baseline_of(run.scenario).server
    base = base if base in question.cells else next(iter(question.cells))
    sides = [server for server in question.cells if server != base]
    comparisons = [
        _compare(axis, speed, *(_speeds(question, speed, server) for server in (base, side)), several=len(sides) > 1)
        for speed in axis.speeds
        for side in sides
    ]
    parts = [part for part in comparisons if part is not None] if sides else _ranges(question, base)
    parts += _uncached(question) if question.axis == DEPTH and parts else _speculation(question)
    if not sides and axis.speeds == (RATE,):
        parts = _alone(run, question, base, parts)
    if not parts:
        return None
    parts += _limited(question)
    text = "; ".join(part.text for part in parts)
    values = {"load": question.load, "others": question.others, "axis": question.axis}
    return because("setting_answer", f"{text}.", **values, parts=[part.values for part in parts])


def _runs(question: SweepQuestion, speed: Speed, server: str) -> dict[int, list[float]]:
    """The speed of each valid cell, by level."""
    return {
        level: speeds
        for level, cells in sorted(question.cells[server].items())
        if (speeds := [value for cell in cells if (value := speed.of(cell.numbers, level)) is not None])
    }


def _speeds(question: SweepQuestion, speed: Speed, server: str) -> Speeds:
    return Speeds(server, _runs(question, speed, server), bool(_counted(question, server, "drafted_tokens")))


def _compare(axis: Axis, speed: Speed, base: Speeds, side: Speeds, *, several: bool = False) -> Reason | None:
    """From which level on which of two sides is faster, with its interval. `several`: there are other sides."""
    if base.drafts and not side.drafts:
        base, side = side, base
    repeated = all(any(len(values) > 1 for values in speeds.at.values()) for speeds in (base, side))
    crossing = find_crossing(base.at, side.at, linear=True, assume_spread=not repeated)
    if not crossing.ratios:
        return None
    ratios, at, kind = crossing.ratios, partial(_level_text, axis), crossing.kind
    fast, slow = (base.name, side.name) if kind == "never" else (side.name, base.name)
    is_speculation = side.drafts and not base.drafts
    where, bounds = axis.everywhere, ""
    if crossing.level is not None and crossing.low is not None and crossing.high is not None:
        interval = "95 % interval" if repeated else "one run, not repeated; assumed interval"
        bounds = f" ({interval} {_number_text(axis, crossing.low)} to {_number_text(axis, crossing.high)})"
        where = f"from {at(crossing.level)} on{bounds}" if kind == "from" else f"up to {at(crossing.level)}{bounds}"
    elif not repeated and kind in ("always", "never"):
        bounds = " (one run, not repeated)"
    by = sorted(1 / ratio if kind == "never" else ratio for ratio in ratios)
    if all(abs(ratio - 1) <= MARGIN for ratio in ratios) and kind != "cannot_tell":
        text = f"{base.name} and {side.name} {speed.equal} {axis.everywhere}, within {short_percent(MARGIN)}"
    elif is_speculation:
        does = {"never": "Speculation does not pay", "cannot_tell": "Inconclusive whether speculation pays"}
        does_it = does.get(kind, "Speculation pays")
        ratios_text = ", ".join(
            f"{factor(ratio)}x at {level:,}" for level, ratio in zip(crossing.levels, ratios, strict=True)
        )
        text = f"{side.name}: " if several else ""
        text += f"{does_it} {where}{bounds * (crossing.level is None)}: {ratios_text}"
    elif kind in ("always", "never"):
        text = f"{fast} {speed.faster} than {slow} {where} ({factor(by[0])}x to {factor(by[-1])}x){bounds}"
    elif bounds:
        text = f"{fast} {speed.faster} than {slow} {where}" + ("" if kind == "from" else f", and {slow} beyond")
    else:
        text = f"inconclusive which {speed.faster}: {side.name} is {factor(by[0])}x to {factor(by[-1])}x as fast as "
        text += f"{base.name}; more repeats may decide"
    values = {"speed": speed.id, "base": base.name, "side": side.name, "kind": kind, "at": crossing.level}
    levels = {"levels": crossing.levels, "ratios": ratios}
    return because("crossing", text, **values, low=crossing.low, high=crossing.high, **levels, provisional=not repeated)


def _level_text(axis: Axis, level: float) -> str:
    form = axis.at_one if level == 1 and axis.at_one else axis.at
    return form.format(_number_text(axis, level))


def _number_text(axis: Axis, value: float) -> str:
    if axis.speeds == (RATE,):
        return f"{math.floor(value):,}"
    return figures(value) if value < 100 else f"{value:,.0f}"


def _ranges(question: SweepQuestion, server: str) -> list[Reason]:
    """How much slower a single server is at the last level than at the first, not in all of its throughput."""
    reasons: list[Reason] = []
    for speed in AXES[question.axis].speeds:
        runs = _runs(question, speed, server)
        if speed is RATE or len(runs) < 2:
            continue
        (first, at_first), (last, at_last) = list(runs.items())[0], list(runs.items())[-1]
        effect, ratio = welch_effect(at_first, at_last), geometric_ratio(at_first, at_last)
        shown = "one run, not repeated"
        if effect is not None:
            low, high = known_bounds(effect.ratio, *effect.interval())
            is_bounded = low is not None and high is not None
            shown = (
                f"95 % interval {factor(low or 0.0)}x to {factor(high or 0.0)}x" if is_bounded else "interval not known"
            )
        slower = {"decode": "decodes", "first": "gives the first token"}[speed.id]
        levels = f" with {_level_text(AXES[question.axis], last)} than with {_number_text(AXES[question.axis], first)}"
        text = f"{'it' if reasons else server} {slower} {factor(ratio)}x slower{'' if reasons else levels} ({shown})"
        reasons.append(because("setting_range", text, speed=speed.id, side=server, levels=list(runs), ratio=ratio))
    return reasons


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
        level = min(shares, key=lambda key: shares[key], default=0)
        if shares and shares[level] < FEW_CACHED:
            text = f"Warning: {server} had {short_percent(shares[level])} of a context of {level:,} tokens in its cache"
            text += ", so its times include computing the rest"
            notes.append(because("depth_not_cached", text, side=server, level=level, share=shares[level]))
    return notes


def _counted(question: SweepQuestion, server: str, key: str) -> float:
    """What the metrics of a server counted in all cells."""
    return sum(getattr(cell.server_load, key) or 0 for cells in question.cells[server].values() for cell in cells)


def _speculation(question: SweepQuestion) -> list[Reason]:
    """The accepted share of the drafted tokens of each server that speculates, and the tokens of a step."""
    notes = []
    for server in question.cells:
        keys = ("drafted_tokens", "accepted_tokens", "drafts")
        drafted, accepted, drafts = (_counted(question, server, key) for key in keys)
        if drafted:
            tokens = 1 + accepted / drafts if drafts else None
            text = f"{server} accepted {short_percent(accepted / drafted)} of its drafted tokens"
            text += "" if tokens is None else f", {factor(tokens)} tokens a step"
            notes.append(because("speculation", text, side=server, share=accepted / drafted, tokens_per_step=tokens))
    return notes


def _alone(run: Run, question: SweepQuestion, server: str, ranges: list[Reason]) -> list[Reason]:
    """What one server says about speculation: whether it speculates, what answers the question, and its numbers.

    `ranges`: its acceptance. None of a run that asks something else, of a server that does not speculate.
    """
    if not ranges and "speculat" not in run.scenario.question.lower():
        return []
    loads = [cell.server_load for cells in question.cells[server].values() for cell in cells]
    names = {cell.served_by.startup.engine for cell in run.cells if cell.server == server and cell.served_by.startup}
    template = find_engine(run.scenario.servers[server].template)
    its = [engine for engine in engines() if engine.name in names] or ([] if template is None else [template])
    advice = "measure the same again, and `harness compare` both runs"
    if ranges:
        text = f"to know up to how many users it pays, start the server without speculation, {advice}"
        parts = [because("speculation", f"{ranges[0].text}; {text}", **ranges[0].values)]
    else:
        reported = any(load.drafted_tokens is not None for load in loads)
        start = {engine.title: engine.speculation for engine in its or engines() if engine.speculation}
        how = ", ".join(f"{title} `{words}`" for title, words in start.items())
        text = f"{server} drafted no tokens" if reported else f"{server} reports no drafted tokens"
        text += f". If it does not speculate, start it with speculation{f' ({how})' if how else ''}, {advice}"
        parts = [because("no_speculation", text, side=server, reported=reported, start=start)]
    rates = {
        level: geometric_mean([value * max(level, 1) for value in values])
        for level, values in _runs(question, RATE, server).items()
    }
    at = partial(_level_text, AXES[question.axis])
    shown = ", ".join(f"{figures(rate)} tok/s with {at(level)}" for level, rate in rates.items())
    return [*parts, because("rates", shown, rates={str(level): rate for level, rate in rates.items()})]


def _cached_share(level: int, cells: Sequence[CellSummary]) -> float | None:
    """The cached share of the context of a row; None where the server does not report it."""
    counted = [cell.numbers for cell in cells if cell.numbers.cached_tokens is not None and cell.numbers.succeeded]
    if not level or not counted:
        return None
    cached = sum(numbers.cached_tokens or 0 for numbers in counted)
    return min(1.0, cached / (level * sum(numbers.succeeded for numbers in counted)))
