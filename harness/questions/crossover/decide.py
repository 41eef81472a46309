"""The answer of a sweep over context depth, prompt length or users: from which value on another server is faster."""

import itertools
import math
from collections.abc import Collection, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any, NamedTuple

from msgspec.structs import replace

from harness.base.measured import Numbers
from harness.base.reason import Reason, because
from harness.base.units import count, factor, figures, short_percent
from harness.engines import engines, find_engine
from harness.numbers.comparison import MARGIN, known_bounds
from harness.numbers.stats import geometric_ratio, welch_effect
from harness.numbers.summary import CellSummary, Row, Summary
from harness.numbers.verdicts import is_client_limited
from harness.questions.capacity.decide import find_crossing
from harness.questions.crossover.speculation import acceptance, counted, effect, lead
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
        latency = {"decode": numbers.tpot, "first": numbers.ttft, "turn": numbers.e2e}[self.id]
        seconds = latency.mean
        return 1 / seconds if seconds else None


DECODE = Speed("decode", "tpot_p50", "decodes faster", "decode equally fast", "tok/s of each user")
FIRST = Speed(
    "first", "ttft_p50", "gives the first token sooner", "give the first token equally soon", "first tokens/s"
)
RATE = Speed("rate", "output_tok_s", "has more throughput", "have equal throughput", "tok/s")
# Of a request from its sending to its last token: speculation speeds up decode and costs prefill.
TURN = Speed("turn", "e2e_p50", "completes a turn sooner", "complete a turn equally soon", "turns/s of each user")


class Axis(NamedTuple):
    """A varied setting: its speeds, the words for a value, for all measured values, and for a value of 1."""

    speeds: tuple[Speed, ...]
    at: str
    everywhere: str
    at_one: str = ""
    speculating: tuple[Speed, ...] = ()  # the speeds where one of two servers speculates; none: `speeds`

    @property
    def all_speeds(self) -> tuple[Speed, ...]:
        return tuple(dict.fromkeys((*self.speeds, *self.speculating)))


AXES = {
    DEPTH: Axis((DECODE, FIRST), "a depth of {} tokens", "at every depth measured", speculating=(TURN, DECODE, FIRST)),
    LENGTH: Axis(
        (FIRST,), "prompts of {} tokens", "at every prompt length measured", speculating=(TURN, DECODE, FIRST)
    ),
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
    limited: dict[str, dict[str, list[int]]]  # by speed and server: levels at which the load generator limited it


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
    lengths: dict[int, list[float]] = {}  # mean output tokens of an answer, of each repeat or run; of whole turns
    limited: Collection[int] = ()  # levels at which the load generator limited the speed


def varied_numbers(run: Run, rows: Sequence[Row], cells: Sequence[CellSummary]) -> list[SweepQuestion]:
    """Group the valid cells of a sweep of loads by what is compared. None where servers are varied, too."""
    swept = run.scenario.swept
    if swept is None or swept.servers:
        return []
    valid = {cell.id: cell for cell in cells if not cell.problems}
    by_key: dict[tuple[str, str, str], Cells] = {}
    limited: dict[tuple[str, str, str], dict[str, dict[str, list[int]]]] = {}
    for row in rows:
        settings = swept.loads[row.load].settings if row.load in swept.loads else {}
        axis = next((key for key in AXES if isinstance(settings.get(key), int)), None)
        if axis is not None:
            others = ", ".join(_setting_text(key, value) for key, value in settings.items() if key != axis)
            key = (swept.loads[row.load].of, axis, others)
            levels = by_key.setdefault(key, {}).setdefault(row.server, {})
            levels[settings[axis]] = [valid[name] for name in row.cells if name in valid]
            for speed in AXES[axis].all_speeds:
                if is_client_limited(row, speed.metric):
                    by_server = limited.setdefault(key, {}).setdefault(speed.id, {})
                    by_server.setdefault(row.server, []).append(settings[axis])
    return [
        SweepQuestion(*key, cells=servers, limited=limited.get(key, {}))
        for key, servers in by_key.items()
        if max(map(len, servers.values())) > 1
    ]


def _setting_text(key: str, value: Any) -> str:
    if key == "prompts.kind":
        return str(value)
    return count(value, "user") if key == "users" else f"{key} {value}"


def setting_answers(run: Run, rows: Sequence[Row], cells: Sequence[CellSummary]) -> list[Reason]:
    """Return a sentence for each question of a sweep of loads.

    Over users only where servers are compared, or where the run asks about speculation. Before several answers about
    speculation, one sentence about all of them.
    """
    questions = varied_numbers(run, rows, cells)
    answered = [answer for question in questions if (answer := _answer(run, question)) is not None]
    answers = [answer for answer, _ in answered]
    loads = {question.load for question in questions}
    named = {
        (question.load, question.others): ", ".join(
            filter(None, (question.load if len(loads) > 1 else "", question.others))
        )
        for question in questions
    }
    leads = lead(answers)
    warnings = {warning.text: replace(warning, text=f"{warning.text}.") for _, own in answered for warning in own}
    return [
        *leads,
        *(warnings.values() if leads else ()),
        *(
            because("setting_answer", f"{name}: {answer.text}" if name else answer.text, **answer.values)
            for answer in answers
            for name in [named[answer.values["load"], answer.values["others"]]]
        ),
    ]


def speculation_answers(base: Side, sides: Sequence[Side]) -> list[Reason]:
    """Return where speculation pays, for each side of which one speculates and the other does not.

    The sample is the run.
    """
    reasons: list[Reason] = []
    answers: list[Reason] = []
    questions = _questions_of(base)
    for side, (key, axis) in itertools.product(sides, questions):
        speed = TURN if axis.speculating else RATE
        ours, theirs = (_speeds_in_runs(compared, speed, key) for compared in (base, side))
        if ours.drafts == theirs.drafts or (answer := _compare(axis, speed, ours, theirs)) is None:
            continue
        load = ", ".join(filter(None, (key[0], key[2]))) if len(questions) > 1 else ""
        name = "".join(f"{part}: " for part in (side.name if len(sides) > 1 else "", load) if part)
        warnings = [_limited_at(axis, speeds.name, speeds.limited) for speeds in (ours, theirs) if speeds.limited]
        reasons.append(because("crossing", f"{name}{answer.text}.", **answer.values))
        reasons += [replace(warning, text=f"{name}{warning.text}.") for warning in warnings]
        about = {"load": key[0], "others": key[2], "axis": key[1]}
        answers.append(because("setting_answer", answer.text, **about, parts=[answer.values]))
    return [*lead(answers), *reasons]


def _questions_of(side: Side) -> list[tuple[tuple[str, str, str, str], Axis]]:
    """The load, the axis, the other settings and the server of each sweep."""
    return [
        ((question.load, question.axis, question.others, server), AXES[question.axis])
        for question in varied_numbers(side.runs[0], side.summaries[0].rows, side.summaries[0].cells)
        for server in question.cells
    ]


def _speeds_in_runs(side: Side, speed: Speed, key: tuple[str, str, str, str]) -> Speeds:
    """The speeds of a side, of each run the mean of its repeats."""
    at: dict[int, list[float]] = {}
    lengths: dict[int, list[float]] = {}
    limited: set[int] = set()
    drafts = False
    for run, summary in zip(side.runs, side.summaries, strict=True):
        for question in varied_numbers(run, summary.rows, summary.cells):
            if (question.load, question.axis, question.others) == key[:3] and key[3] in question.cells:
                of_run = _speeds(question, speed, key[3])
                drafts |= of_run.drafts
                limited.update(of_run.limited)
                for level, values in of_run.at.items():
                    at.setdefault(level, []).append(geometric_mean(values))
                    lengths.setdefault(level, []).extend(of_run.lengths.get(level, []))
    return Speeds(side.name, at, drafts, lengths, limited)


def _answer(run: Run, question: SweepQuestion) -> tuple[Reason, list[Reason]] | None:
    """The answer, and the warnings in it."""
    base = baseline_of(run.scenario).server
    base = base if base in question.cells else next(iter(question.cells))
    sides = [server for server in question.cells if server != base]
    parts = _between(question, base, sides) if sides else _ranges(question, base)
    if _asks_speculation(run, question):
        accepted = _speculation(question)
        parts += accepted if sides else _alone(run, question, base, accepted)
    if not parts:
        return None
    warnings = [*(_uncached(question) if question.axis == DEPTH else []), *_limited(question)]
    parts += warnings
    text = "; ".join(part.text for part in parts)
    values = {"load": question.load, "others": question.others, "axis": question.axis}
    return because("setting_answer", f"{text}.", **values, parts=[part.values for part in parts]), warnings


def _between(question: SweepQuestion, base: str, sides: Sequence[str]) -> list[Reason]:
    """The comparisons of each server with the baseline, and what speculation does where one of the two speculates."""
    axis = AXES[question.axis]
    at = {level: _level_text(axis, level) for levels in question.cells.values() for level in levels}
    pairs = {side: drafts(question, side) != drafts(question, base) and bool(axis.speculating) for side in sides}
    parts: list[Reason | None] = []
    for speed in (TURN, DECODE, FIRST, RATE):
        for side, speculates in pairs.items():
            speeds = [_speeds(question, speed, server) for server in (base, side)]
            if speculates and speed is DECODE:
                without, drafting = sorted((base, side), key=lambda server: drafts(question, server))
                for its in (DECODE, FIRST):
                    ours, theirs = ((name, _runs(question, its, name)) for name in (drafting, without))
                    parts.append(effect(its.id, ours, theirs, at))
            elif speculates and speed is TURN:
                parts += [_compare(axis, speed, *speeds, several=len(sides) > 1) or _unequal(*speeds)]
            elif not speculates and speed in axis.speeds:
                parts.append(_compare(axis, speed, *speeds, several=len(sides) > 1))
    return [part for part in parts if part is not None]


def _unequal(base: Speeds, side: Speeds) -> Reason | None:
    """Why the whole turns of two servers are not compared: their answers differ in length, or lengths are unknown."""
    if not base.at or not side.at:
        return None
    text = f"the answers of {base.name} and {side.name} are not known to be equally long, so their turns are not "
    text += "compared; use `output: fixed`"
    return because("turns_unequal", text, base=base.name, side=side.name)


def _asks_speculation(run: Run, question: SweepQuestion) -> bool:
    """Whether an answer has the accepted drafts: of throughput, where servers differ in it, or where the run asks."""
    speculates = {drafts(question, server) for server in question.cells}
    is_asked = "speculat" in run.scenario.question.lower()
    return AXES[question.axis].speeds == (RATE,) or len(speculates) > 1 or is_asked


def drafts(question: SweepQuestion, server: str) -> bool:
    """Return whether a server drafted tokens, by its metrics."""
    return any(counted(cells, "drafted_tokens") for cells in question.cells[server].values())


def _runs(question: SweepQuestion, speed: Speed, server: str) -> dict[int, list[float]]:
    """The speed of each valid cell, by level."""
    return {
        level: speeds
        for level, cells in sorted(question.cells[server].items())
        if (speeds := [value for cell in cells if (value := speed.of(cell.numbers, level)) is not None])
    }


def _speeds(question: SweepQuestion, speed: Speed, server: str) -> Speeds:
    lengths = {
        level: [numbers.output_tokens / numbers.succeeded for numbers in map(_numbers, cells) if numbers.output_tokens]
        for level, cells in question.cells[server].items()
    }
    limited = question.limited.get(speed.id, {}).get(server, [])
    return Speeds(server, _runs(question, speed, server), drafts(question, server), lengths, limited)


def _numbers(cell: CellSummary) -> Numbers:
    return cell.numbers


def _of_equal_lengths(base: Speeds, side: Speeds) -> tuple[Speeds, Speeds]:
    """The levels at which the answers of both are equally long: else a whole turn says nothing about the server."""
    levels = [
        level
        for level, ours in base.lengths.items()
        if ours and (theirs := side.lengths.get(level)) and abs(geometric_ratio(ours, theirs) - 1) <= MARGIN
    ]
    kept = [{level: speeds.at[level] for level in levels if level in speeds.at} for speeds in (base, side)]
    return base._replace(at=kept[0]), side._replace(at=kept[1])


def _compare(axis: Axis, speed: Speed, base: Speeds, side: Speeds, *, several: bool = False) -> Reason | None:
    """From which level on which of two sides is faster, with its interval. `several`: there are other sides."""
    if base.drafts and not side.drafts:
        base, side = side, base
    if speed is TURN:
        base, side = _of_equal_lengths(base, side)
    repeated = all(any(len(values) > 1 for values in speeds.at.values()) for speeds in (base, side))
    crossing = find_crossing(base.at, side.at, linear=True, assume_spread=not repeated)
    if not crossing.ratios:
        return None
    ratios, at, kind = crossing.ratios, partial(_level_text, axis), crossing.kind
    fast, slow = (base.name, side.name) if kind == "never" else (side.name, base.name)
    is_speculation = side.drafts and not base.drafts
    is_equal = kind != "cannot_tell" and all(abs(ratio - 1) <= MARGIN for ratio in ratios)
    where, bounds = axis.everywhere, ""
    if crossing.level is not None and crossing.low is not None and crossing.high is not None:
        interval = "95 % interval" if repeated else "one run, not repeated; assumed interval"
        bounds = f" ({interval} {_number_text(axis, crossing.low)} to {_number_text(axis, crossing.high)})"
        where = f"from {at(crossing.level)} on{bounds}" if kind == "from" else f"up to {at(crossing.level)}{bounds}"
    elif not repeated and kind in ("always", "never"):
        bounds = " (one run, not repeated)"
    by = sorted(1 / ratio if kind == "never" else ratio for ratio in ratios)
    if is_equal:
        text = f"{base.name} and {side.name} {speed.equal} {axis.everywhere}, within {short_percent(MARGIN)}"
    elif is_speculation:
        does = {"never": "Speculation does not pay", "cannot_tell": "Inconclusive whether speculation pays"}
        does_it = does.get(kind, "Speculation pays")
        ratios_text = ", ".join(
            f"{factor(ratio)}x at {level:,}" for level, ratio in zip(crossing.levels, ratios, strict=True)
        )
        text = f"{side.name}: " if several else ""
        does_it += " by the whole turn" if speed is TURN else ""
        text += f"{does_it} {where}{bounds * (crossing.level is None)}: {ratios_text}"
    elif kind in ("always", "never"):
        text = f"{fast} {speed.faster} than {slow} {where} ({factor(by[0])}x to {factor(by[-1])}x){bounds}"
    elif bounds:
        text = f"{fast} {speed.faster} than {slow} {where}" + ("" if kind == "from" else f", and {slow} beyond")
    else:
        text = f"inconclusive which {speed.faster}: {side.name} is {factor(by[0])}x to {factor(by[-1])}x as fast as "
        text += f"{base.name}; more repeats may decide"
    values = {"speed": speed.id, "base": base.name, "side": side.name, "kind": kind, "at": crossing.level}
    levels = {"levels": crossing.levels, "ratios": ratios, "speculates": is_speculation, "equal": is_equal}
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
    """Where the load generator, and not the server, may have made the times that are compared."""
    axis = AXES[question.axis]
    is_mixed = len({drafts(question, server) for server in question.cells}) > 1
    levels: dict[str, set[int]] = {}
    for speed in axis.all_speeds if is_mixed else axis.speeds:
        for server, at in question.limited.get(speed.id, {}).items():
            levels.setdefault(server, set()).update(at)
    return [_limited_at(axis, server, levels[server]) for server in question.cells if server in levels]


def _limited_at(axis: Axis, side: str, levels: Collection[int]) -> Reason:
    """The warning about one side, at all levels that the load generator limited."""
    *others, last = sorted(levels)
    numbers = f"{', '.join(_number_text(axis, level) for level in others)} and {_number_text(axis, last)}"
    at = axis.at.format(numbers) if others else _level_text(axis, last)
    text = f"Warning: the load generator was the limit with {side} at {at}: these times are partly its own"
    return because("client_limited", text, side=side, levels=sorted(levels))


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


def _speculation(question: SweepQuestion) -> list[Reason]:
    """The accepted drafts of each server that speculates."""
    axis = AXES[question.axis]
    at = {level: _level_text(axis, level) for levels in question.cells.values() for level in levels}
    notes = [acceptance(server, levels, at) for server, levels in question.cells.items()]
    return [note for note in notes if note is not None]


def _alone(run: Run, question: SweepQuestion, server: str, ranges: list[Reason]) -> list[Reason]:
    """What one server says about speculation: whether it speculates, what answers the question, and its numbers.

    `ranges`: its acceptance. None of a run that asks something else, of a server that does not speculate.
    """
    if not ranges and "speculat" not in run.scenario.question.lower():
        return []
    by_users = AXES[question.axis].speeds == (RATE,)
    loads = [cell.server_load for cells in question.cells[server].values() for cell in cells]
    names = {cell.served_by.startup.engine for cell in run.cells if cell.server == server and cell.served_by.startup}
    template = find_engine(run.scenario.servers[server].template)
    its = [engine for engine in engines() if engine.name in names] or ([] if template is None else [template])
    advice = "measure the same again, and `harness compare` both runs"
    if ranges:
        text = f"to know {'up to how many users' if by_users else 'where'} it pays, start the server without "
        text += f"speculation, {advice}"
        parts = [because("speculation", f"{ranges[0].text}; {text}", **ranges[0].values)]
    else:
        reported = any(load.drafted_tokens is not None for load in loads)
        start = {engine.title: engine.speculation for engine in its or engines() if engine.speculation}
        how = ", ".join(f"{title} `{words}`" for title, words in start.items())
        text = f"{server} drafted no tokens" if reported else f"{server} reports no drafted tokens"
        text += f". If it does not speculate, start it with speculation{f' ({how})' if how else ''}, {advice}"
        parts = [because("no_speculation", text, side=server, reported=reported, start=start)]
    if not by_users:
        return parts
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
