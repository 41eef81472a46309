"""Rows compared: what is faster under which load, whether anything is too slow, and the table of verdicts."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from harness.base import units
from harness.base.metrics import METRICS
from harness.base.reason import sentence
from harness.base.units import count
from harness.numbers.comparison import Comparison, Gate, Verdict
from harness.numbers.summary import Row
from harness.numbers.verdicts import without_concurrency
from harness.records.manifest import Run
from harness.report import sentences, words
from harness.report.elements import (
    Bullet,
    Bullets,
    Element,
    Fold,
    Grid,
    Paragraph,
    plain_grid,
)
from harness.report.verdict_text import (
    describe_ratio,
    format_bounds,
    format_range,
    format_speedup,
    gate_answer,
    gate_word,
    is_better_within_margin,
    is_one_sided,
    shown_bounds,
    undecided_text,
    verdict_style,
    why_undecided,
)
from harness.scenario.plan import mix_of

_CLAUSES = 4  # of an answer; the verdicts have all
_GATES: tuple[Gate, ...] = ("no_slowdown", "cannot_tell", "size_unknown", "provisional", "slower")  # the worst last
_Keys = Mapping[str, tuple[str, str]]  # server and load of each row, by its name
_Shared = Literal["load", "server", ""]  # what both sides of a pair have in common


def speedup_answer(comparison: Comparison, rows: Sequence[Row], run: Run) -> str:
    """What is faster: against one row the fastest and the slowest, else for each load, in the order of the verdicts."""
    keys = {row.name: row.key for row in rows}
    groups: dict[tuple[str, _Shared], list[Verdict]] = defaultdict(list)
    for verdict in comparison.verdicts:
        if verdict.side in keys and verdict.baseline in keys:  # a page may leave rows out
            groups[verdict.baseline, _shared(keys[verdict.side], keys[verdict.baseline])].append(verdict)
    if len({base for base, _ in groups}) < 2:
        slower = largest_effect(comparison.verdicts, "slower")
        asked = run.scenario.compare or any(mix_of(row.load) is not None for row in rows)
        if slower is not None and {shared for _, shared in groups} == {"server"} and not asked:
            return _values_answer(comparison, rows, run)
        return _answer_against_one(comparison, rows)
    loads = _load_texts(rows, run)
    same = [key for key, group in groups.items() if key[1] == "load" and all(map(_is_same, group))]
    same = same if len(same) > 1 else []  # one is a sentence of its own
    answers = [
        f"{_group_clause(keys[base], shared, group, keys, loads)}."
        for (base, shared), group in groups.items() if (base, shared) not in same
    ]  # fmt: skip
    if same:
        answers.append(f"The same within ±2 %: {', '.join(loads[keys[base][1]] for base, _ in same)}.")
    more = [f"{count(len(answers) - _CLAUSES, 'more')} below."] if len(answers) > _CLAUSES else []
    metrics = {verdict.metric for verdict in comparison.verdicts}
    by = f"By {METRICS[metrics.pop()].title}, with 95 % intervals." if len(metrics) == 1 else "With 95 % intervals."
    return " ".join([*answers[:_CLAUSES], *more, by, *_what_next(comparison.verdicts)])


def _is_same(verdict: Verdict) -> bool:
    return verdict.word == "same" and not is_better_within_margin(verdict)


def _shared(side: tuple[str, str], base: tuple[str, str]) -> _Shared:
    if side[1] == base[1]:
        return "load"
    return "server" if side[0] == base[0] else ""


def _what_next(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """What decides or confirms verdicts of a run."""
    still_open = [verdict for verdict in verdicts if verdict.word == "inconclusive"]
    if any(verdict.basis == "one_run" for verdict in verdicts):
        needed = max((verdict.needed or 0 for verdict in verdicts), default=0)
        yield f"One run, not repeated: `--repeats {needed}` confirms it."
    elif still_open and (remedy := _remedy(still_open)):
        yield remedy


def _load_texts(rows: Sequence[Row], run: Run) -> dict[str, str]:
    """By load its number of users or requests in words, where the loads differ in that alone; else its name."""
    names = {row.load: row.load for row in rows}
    levels = levels_by_server(rows, run)
    return names | {row.load: text for server_levels in levels.values() for _, text, row in server_levels}


def _group_clause(
    base: tuple[str, str], shared: _Shared, verdicts: Sequence[Verdict], keys: _Keys, loads: Mapping[str, str]
) -> str:
    """The comparisons with one row, headed by what both sides share: "16 users: vllm 1.45x faster (1.40x to 1.50x)"."""

    def name(key: tuple[str, str]) -> str:
        return {"load": key[0], "server": loads[key[1]], "": f"{key[0]} / {loads[key[1]]}"}[shared]

    head = {"load": f"{loads[base[1]]}: ", "server": f"{base[0]}: ", "": ""}[shared]
    sides = dict.fromkeys(name(keys[verdict.side]) for verdict in verdicts)
    largest = [largest_effect(verdicts)]
    if len(sides) > 1 and any(verdict.word in ("faster", "slower") for verdict in verdicts):
        largest = [largest_effect(verdicts, word) for word in ("faster", "slower")]
    clauses = [
        _clause(verdict, name(keys[verdict.side]), name(base), side_count=len(sides), shared=shared)
        for verdict in largest
        if verdict
    ]
    return head + (", ".join(clauses) or f"{', '.join(sides)} and {name(base)} cannot be compared")


def _clause(verdict: Verdict, side: str, base: str, *, side_count: int, shared: _Shared) -> str:
    """One side against its baseline. Of two servers under one load, the faster one is named."""
    ratio, (low, high) = verdict.ratio or 1.0, shown_bounds(verdict)
    than = f" than {base}" if side_count > 1 or shared != "load" else ""
    if verdict.word == "inconclusive":
        return f"not decided, {side} is {format_range(low, high)} than {base}"
    if _is_same(verdict):
        return f"{side} and {base} are the same within ±2 %"
    if ratio < 1 and not than:
        side, ratio, low, high = base, 1 / ratio, high and 1 / high, low and 1 / low
    fastest = " is the fastest," if side_count > 1 and verdict.word == "faster" else ""
    near, far = (low, high) if ratio >= 1 else (high and 1 / high, low and 1 / low)
    interval = format_bounds(near, far, lambda bound: f"{units.ratio_text(bound)}x")
    within = ", within the ±2 % that count as the same" if verdict.word == "same" else ""
    return f"{side}{fastest} {format_speedup(ratio)}{than} ({interval or 'interval not known'}){within}"


def _values_answer(comparison: Comparison, rows: Sequence[Row], run: Run) -> str:
    """What each load of one server gives: that another load is slower is nothing that anybody asked."""
    loads, by_name = _load_texts(rows, run), {row.name: row for row in rows}
    values: dict[str, dict[str, str]] = defaultdict(dict)  # by metric, then load
    for verdict in comparison.verdicts:
        for name, side_values in zip((verdict.baseline, verdict.side), reversed(verdict.values), strict=True):
            pooled = METRICS[verdict.metric].of(by_name[name].pooled)
            value = math.exp(statistics.fmean(map(math.log, side_values))) if side_values else pooled
            if value is not None:
                values[verdict.metric][name] = words.format_metric(value, verdict.metric)
    order = sorted(by_name.values(), key=lambda row: _level_of(row, run))
    parts = [
        f"{METRICS[metric].title}: " + ", ".join(
            f"{loads[row.load]} {texts[row.name]}" for row in order if row.name in texts
        )
        for metric, texts in values.items()
    ]  # fmt: skip
    shown = "; ".join(parts[:_CLAUSES])
    return f"{shown[:1].upper()}{shown[1:]}."


def _level_of(row: Row, run: Run) -> float:
    """The users or requests of a row's load, to sort by; 0 where these are not known."""
    load = run.scenario.loads.get(row.load)
    if load is None:
        return 0.0
    return load.arrivals.rate or 0.0 if load.arrivals is not None else float(words.max_in_flight(load))


def _answer_against_one(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The fastest and the slowest row against the one baseline."""
    verdicts = comparison.verdicts
    base = verdicts[0].baseline
    best, worst = largest_effect(verdicts, "faster"), largest_effect(verdicts, "slower")
    short = short_row_names(rows)
    against = short.get(base, base)
    several = len({verdict.side for verdict in verdicts}) > 1
    if best is not None:
        fastest = "the fastest: " if several else ""
        slowest = "" if worst is None else f"; {short.get(worst.side, worst.side)} is {describe_ratio(worst, against)}"
        return f"{short.get(best.side, best.side)} is {fastest}{describe_ratio(best, against)}{slowest}."
    if worst is not None:
        nothing = f"Nothing is faster than {against}: " if several else ""
        return f"{nothing}{short.get(worst.side, worst.side)} is {describe_ratio(worst, against)}."
    largest, still_open = largest_effect(verdicts), [verdict for verdict in verdicts if verdict.word == "inconclusive"]
    if largest is not None and largest.word == "inconclusive":
        name = short.get(largest.side, largest.side)
        likewise = (
            f" {len(still_open)} of {count(len(verdicts), 'comparison')} are open." if len(still_open) > 1 else ""
        )
        shown = undecided_text(largest, against)
        lead = "Not decided" if is_one_sided(largest) else "Cannot tell which is faster"
        why = "".join(f" {text}." for text in why_undecided(largest))
        return f"{lead}: {name} is {shown}.{why}{likewise}{_remedy(still_open)}"
    if undecided := [verdict for verdict in verdicts if verdict.ratio is None]:
        first = undecided[0]
        why = "they have no ratio" if first.refused is None else sentence(first.refused)
        return f"{short.get(first.side, first.side)} is not compared with {against}: {why}."
    if largest is not None and is_better_within_margin(largest):
        name, floor = short.get(largest.side, largest.side), units.short_percent(comparison.noise_floor)
        return f"{name} is {describe_ratio(largest, against)}: within the ±{floor} that count as the same."
    same = ", ".join(dict.fromkeys(short.get(verdict.side, verdict.side) for verdict in verdicts))
    floor = f"±{units.figures(100 * comparison.noise_floor)}\u00a0%"
    return f"No difference: {same} and {against} are equally fast within {floor}."


def _remedy(verdicts: Sequence[Verdict]) -> str:
    """What would decide open verdicts of a run."""
    needed = [verdict.needed for verdict in verdicts if verdict.needed is not None]
    if len(needed) < len(verdicts):
        return ""
    if any(verdict.basis == "one_run" for verdict in verdicts):
        return f" `--repeats {max(needed)}` should settle it."
    return f" About {max(needed)} {verdicts[0].unit} a side should settle it."


def largest_effect(verdicts: Sequence[Verdict], word: str | None = None) -> Verdict | None:
    """The verdict, with that word, whose ratio is the farthest from 1; slower and faster ones first."""
    matching = [verdict for verdict in verdicts if word in (None, verdict.word) and verdict.ratio is not None]
    order = ("same", "inconclusive", "faster", "slower")

    def rank(verdict: Verdict) -> tuple[int, float]:
        ratio = verdict.ratio or 1.0
        return order.index(verdict.word), max(ratio, 1 / ratio)

    return max(matching, key=rank, default=None)


def short_row_names(rows: Sequence[Row]) -> dict[str, str]:
    """By row name the load if all rows have one server, the server if all have one load; else empty."""
    servers, loads = {row.server for row in rows}, {row.load for row in rows}
    if len(servers) > 1 and len(loads) > 1:
        return {}
    return {row.name: row.load if len(servers) == 1 else row.server for row in rows}


def levels_by_server(rows: Sequence[Row], run: Run) -> dict[str, list[tuple[float, str, Row]]]:
    """By server its rows as (level, level in words, row). Empty unless they differ in concurrency or rate alone."""
    curves: dict[str, list[tuple[float, str, Row]]] = {}
    kinds: dict[str, set[bytes]] = {}  # by server: its loads without their level
    for row in rows:
        load = run.scenario.loads.get(row.load)
        if load is None or run.origin is not None or mix_of(row.load) is not None or load.trace is not None:
            return {}
        if load.arrivals is not None:
            if load.arrivals.rate is None:
                return {}
            level = load.arrivals.rate
            text = f"{level:g} {'request' if level == 1 else 'requests'}/s"
            kind = b"open"
        else:
            level = words.max_in_flight(load)
            text = count(level, *(("chat user",) if load.user == "chat" else ("request at once", "requests at once")))
            kind = without_concurrency(load)
        curves.setdefault(row.server, []).append((level, text, row))
        kinds.setdefault(row.server, set()).add(kind)
    one_kind = all(len(kind) == 1 for kind in kinds.values())
    distinct = all(len({level for level, _, _ in levels}) >= max(2, len(levels)) for levels in curves.values())
    return curves if one_kind and distinct else {}


def gates_answer(verdicts: Sequence[Verdict]) -> str:
    """The sentence of the worst gate, and how many gates there are of each kind."""
    gated = [verdict for verdict in verdicts if verdict.gate is not None]
    worst = max(gated, key=lambda verdict: (_GATES.index(verdict.gate), -(verdict.low or 0.0)))
    if len(gated) == 1:
        return gate_answer(worst)
    counts = Counter(gate_word(verdict) for verdict in sorted(gated, key=lambda verdict: -_GATES.index(verdict.gate)))
    parts = ", ".join(f"{number} {word}" for word, number in counts.items())
    return f"{gate_answer(worst)} Of {count(len(gated), 'comparison')}: {parts}."


def verdicts(comparison: Comparison, hint: str) -> list[Element]:
    """The verdicts as sentences, some of many folded, and how they were reached."""
    items = [Bullet(text, word) for word, text in sentences.verdict_sentences(comparison.verdicts)]
    shown, hidden = items[: sentences.SHOWN], items[sentences.SHOWN :]
    elements: list[Element] = [Bullets(shown, "verdicts")] if shown else []
    if hidden:
        title = sentences.hidden_verdicts_text(item.style for item in hidden)
        elements.append(Fold(title, [Bullets(hidden, "verdicts")], hint))
    return [*elements, Paragraph(sentences.method_sentence(comparison), "fine")]


def verdict_grid(items: Sequence[Verdict]) -> Grid:
    """The intervals, p-values and words of verdicts."""
    head = ("Side", "Baseline", "Samples", "By", "Speed", "95 % interval", "p", "Verdict")
    return plain_grid(head, list(map(_verdict_cells, items)), [verdict_style(verdict) for verdict in items])


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    interval = format_bounds(*shown_bounds(verdict), lambda bound: units.factor(bound, 3))
    return (
        verdict.side,
        verdict.baseline,
        f"{verdict.n[0]} : {verdict.n[1]}",
        METRICS[verdict.metric].title,
        "n/a" if verdict.ratio is None else f"{units.factor(verdict.ratio, 3)}×",
        interval or ("not known" if verdict.reason == "interval_unknown" else "n/a"),
        "n/a" if verdict.p is None else "< 0.001" if verdict.p < 0.001 else f"{verdict.p:.3f}",
        gate_word(verdict),
    )
