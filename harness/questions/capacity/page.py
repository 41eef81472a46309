"""The page of a capacity search: its answers, and a table of its probes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.base.command_line import command_line
from harness.base.reason import Reason, because, sentence
from harness.base.units import NOTHING, count, duration, figures, significant
from harness.numbers.peak_curve import MIN_KNEE_LEVELS
from harness.numbers.summary import Summary
from harness.questions.capacity.level import UNHELD, MeasuredProbe, is_valid
from harness.questions.capacity.record import CapacityAnswer, CapacityReport, ServerCapacity
from harness.report.elements import Bullet, Bullets, Element, Grid, Paragraph, TableColumn
from harness.report.sentences import group_reasons

PURPOSES = {"ramp": "estimate", "slo": "proof", "knee": "knee", "drift": "drift check"}
BUDGETS_MIN = (5, 10, 15, 20, 30, 45, 60, 90, 120)  # that are suggested; longer ones in whole hours
STATES = {
    "pass": "meets",
    "fail": "breaks",
    "unresolved": "too close to decide",
    "done": "measured",
    "died": "server died",
    "stopped": "time ran out",
    "invalid": "does not count",
}


def capacity_page(report: CapacityReport, summary: Summary) -> list[Element]:
    """Whether the search counts, the answers about each server, a table of all probes, and the notes."""
    invalid: list[Element] = []
    if summary.valid is False:
        invalid = [
            Paragraph("do not trust this answer", "bad", "INVALID"),
            Bullets([Bullet(reason, "bad") for reason in group_reasons(summary.reasons)]),
        ]
    rows = [probe_cells(report, server, probe) for server in report.servers for probe in server.probes]
    notes = [f"{server.server}: {sentence(note)}" for server in report.servers for note in note_reasons(server)]
    if limited := sum(bool(row.client_limited) for row in summary.rows):
        where = f"`{command_line('harness', 'report', report.run, '--explain')}` says of which numbers"
        notes.append(f"the load generator was late in {count(limited, 'probe')}; {where}")
    return [
        *invalid,
        *map(Paragraph, _slo_lines(report)),
        *(Paragraph(line, "lead") for line in capacity_lines(report)),
        *([probe_grid(report, rows)] if rows else []),
        *([Bullets([Bullet(note) for note in notes])] if notes else []),
    ]


def _slo_lines(report: CapacityReport) -> list[str]:
    """The SLOs: of all servers, else of each server that has some."""
    if report.slos:
        return [f"SLOs: {', '.join(report.slos)}"]
    return [f"SLOs of {server.server}: {', '.join(server.slos)}" for server in report.servers if server.slos]


def capacity_lines(report: CapacityReport) -> list[str]:
    """The answers as sentences: one for each server and question."""
    simulated = " (embedded engine, no real server)" if report.simulated else ""
    answers = [(server.server, answer) for server in report.servers for answer in answer_reasons(report, server)]
    lines = [f"{server}{simulated}: {sentence(answer)}" for server, answer in answers]
    return lines + [sentence(crossover_reason(crossover)) for crossover in report.crossovers]


def crossover_reason(answer: CapacityAnswer) -> Reason:
    """The number of users from which on one server has more throughput than another."""
    base, side = answer.base, answer.side
    levels = {"first": min(answer.levels, default=None), "last": max(answer.levels, default=None)}
    values = {"base": base, "side": side, "level": answer.level, "low": answer.low, "high": answer.high, **levels}
    if answer.kind in ("from", "until") and answer.level and answer.low and answer.high:
        at = count(math.ceil(answer.level), "user")
        interval = f"95 % interval {math.ceil(answer.low):,} to {math.ceil(answer.high):,}"
        if answer.kind == "from":
            text = f"{side} gives more tok/s than {base} from {at}, {interval}; with fewer, {base} does"
            return because("crossing_from", text, **values)
        text = f"{side} gives more tok/s than {base} below {at}, {interval}; from there on {base} does"
        return because("crossing_until", text, **values)
    measured = f"at all levels measured, {levels['first']} to {levels['last']} users"
    if answer.kind == "always":
        return because("crossing_always", f"{side} gives more tok/s than {base} {measured}", **values)
    if answer.kind == "never":
        return because("crossing_never", f"{base} gives more tok/s than {side} {measured}", **values)
    text = f"whether {side} or {base} gives more tok/s is inconclusive at the levels measured"
    return because("crossing_cannot_tell", text, **values)


def answer_reasons(report: CapacityReport, server: ServerCapacity) -> list[Reason]:
    """The answers about one server."""
    if not server.started:
        return server.reasons[:1]
    answers = []
    if server.slo is not None:
        slos = report.slos_of(server)
        answers.append(slo_reason(report, slos, server.slo, server.probes, settle_s=server.settle_s))
    if server.knee is not None:
        answers.append(knee_reason(server.knee, report.max_level, server.probes))
    return answers


def slo_reason(
    report: CapacityReport,
    slos: Sequence[str],
    slo: CapacityAnswer,
    all_probes: Sequence[MeasuredProbe],
    *,
    what_if: bool = False,
    settle_s: float | None = None,
) -> Reason:
    """The largest load that meets the SLOs. `slos`: in words. `what_if`: by the probes of a search for others.
    `settle_s`: a budget that should settle it.
    """
    probes = [probe for probe in all_probes if is_valid(probe)]
    unit, load = report.unit, report.varied if report.members else None

    def amount(level: float | None) -> str:
        return format_amount(report.amount(level or 0), unit, load)

    def number(level: float | None) -> str:
        return format_level(report, level or 0)

    next_to = f" next to {format_amounts(report.loads_at(1, fixed=True))}" if report.fixed else ""
    missed, queued = sum(probe.missed for probe in probes), sum(probe.queued for probe in probes)
    waited = f". {queued:,} of {missed:,} misses waited in the server's listen queue" if queued else ""
    broken = UNHELD[slo.unheld] if slo.unheld else f"{slo.broken or 'an SLO'} is broken"
    levels = {"level": slo.level, "low": slo.low, "high": slo.high, "above": slo.above, "max": report.max_level}
    levels |= {"met_at": slo.met, "missed_at": slo.missed}
    values: dict[str, Any] = {
        "unit": unit, "load": load, "missed": missed, "queued": queued, "complete": slo.complete,
        "known": known_levels(report, slos, probes), "next_to": report.loads_at(1, fixed=True), "broken": slo.broken,
        "unheld": slo.unheld, "settle_s": settle_s, "at_least": report.at_least,
    }  # fmt: skip
    values |= {name: None if level is None else report.amount(level) for name, level in levels.items()}
    above = f"; at {number(slo.above)} {broken}" if slo.above else ""
    if report.at_least_level:
        answer = _asked_answer(report, slo, f"{amount(report.at_least_level)}{next_to}", broken, settle_s)
        return because("capacity_asked", answer + waited, **values)
    if slo.kind == "more_than":
        text = f"holds at least {amount(slo.low)}{next_to}, proven: the maximum that was tried (--max-users raises it)"
        return because("capacity_more_than", text, **values)
    if slo.kind == "none":
        why = broken if slo.broken or slo.unheld else "the server died, or no answer came"
        return because("capacity_none", f"does not hold even {amount(1)}{next_to}: {why}{waited}", **values)
    if slo.kind == "found":
        between = "" if slo.low == slo.high else f", and no more than {number(slo.high)}"
        text = f"holds {amount(slo.low)}{next_to}{between}, proven{above}"
        return because("capacity_found", text + waited, **values)
    settle = _settle(slo, settle_s, what_if=what_if)
    if slo.kind == "between":
        likely = "" if slo.level == slo.low else f"; {number(slo.level)} is likely"
        text = f"holds at least {amount(slo.low)}{next_to}, proven{likely}{above}{settle}"
        return because("capacity_between", text + waited, **values)
    if slo.level is None:
        text = f"not known: no answer ended in time{settle or '. Use a longer --budget'}"
    elif slo.level:
        text = f"about {amount(slo.level)}{_range(report, slo, next_to)}; not proven yet{above}{settle}"
    else:
        seems = broken if slo.unheld else f"{slo.broken or 'an SLO'} seems broken"
        text = f"likely not even {amount(1)}{next_to}: {seems}; not proven yet{settle}"
    return because("capacity_unproven", text + waited, **values)


def _range(report: CapacityReport, slo: CapacityAnswer, next_to: str) -> str:
    """What follows an estimate: the levels between which it is."""
    met = min(slo.met, slo.level or 0) if slo.met else None  # the newest probe of a level may seem better than all
    if not met or not slo.missed:
        return ("" if slo.missed else " or more") + next_to
    return f"{next_to} (at {format_level(report, met)} the SLOs were met, at {format_level(report, slo.missed)} not)"


def _asked_answer(report: CapacityReport, slo: CapacityAnswer, asked: str, broken: str, settle_s: float | None) -> str:
    """Whether a server holds what --at-least asks for."""
    level = report.at_least_level or 1
    if slo.low is not None and slo.low >= level:
        return f"holds {asked}, proven"
    if slo.above is not None and slo.above <= level:
        at = "" if slo.above == level else f"at {format_level(report, slo.above)} "
        return f"does not hold {asked}: {at}{broken}"
    likely = f"about {format_level(report, slo.level)}" if slo.level else "not even 1 user"
    estimate = "no answer ended in time" if slo.level is None else f"{likely} by an estimate"
    if slo.low:
        estimate = f"at least {format_level(report, slo.low)} are proven, {estimate}"
    settle = _settle(slo, settle_s, what_if=False) or ". Use a longer --budget"
    return f"not known whether it holds {asked}: {estimate}{settle}"


def _settle(slo: CapacityAnswer, settle_s: float | None, *, what_if: bool) -> str:
    """What would settle an answer."""
    if what_if:
        return ". The stored requests decide no more"
    if slo.complete:
        return ". The levels in between are too close to the SLOs to decide"
    return "" if settle_s is None else f". `--budget {round_budget(settle_s)}` should settle it"


def round_budget(seconds: float) -> str:
    """A budget of at least so many seconds, as the command line takes it."""
    minutes = math.ceil(seconds / 60)
    rounded = next((step for step in BUDGETS_MIN if step >= minutes), math.ceil(minutes / 60) * 60)
    return f"{rounded}min" if rounded < 120 else f"{math.ceil(rounded / 60)}h"


def knee_reason(knee: CapacityAnswer, max_level: int, probes: Sequence[MeasuredProbe] = ()) -> Reason:
    """The number of users from which on more of them stop paying."""
    if (measured := len(knee.points)) < MIN_KNEE_LEVELS:
        were = "was" if measured == 1 else "were"
        text = f"knee: not known: {count(measured, 'level')} {were} measured, {MIN_KNEE_LEVELS} are needed "
        text += "(--max-users)" if knee.complete else "(--budget)"
        return because("capacity_knee_levels", text, levels=measured, needed=MIN_KNEE_LEVELS, complete=knee.complete)
    names = ("level", "low", "high", "peak_level", "hurts_from", "complete")
    # The throughput is that of the table of probes, not that of the fitted curve, which may be higher between levels.
    peak = next((point for point in knee.points if point.level == knee.peak_level), None)
    values = {name: getattr(knee, name) for name in names} | {"max": max_level}
    values["peak_tok_s"] = knee.peak_tok_s if peak is None else peak.tok_s
    best = f"the best measured level is {users(knee.peak_level)} with {significant(values['peak_tok_s'])} tok/s"
    at_best = sum(probe.purpose == "knee" and probe.level == knee.peak_level and bool(probe.tok_s) for probe in probes)
    best += f" over its {at_best} probes" if at_best > 1 else ""
    if knee.kind == "knee":
        text = f"more concurrency stops paying at {users(knee.level)}, 95 % interval {knee.low:,} to {knee.high:,} "
        text += f"(90 % of the best; {best})"
        text += f"; from {users(knee.hurts_from)} on more users make it slower" if knee.hurts_from else ""
        return because("capacity_knee_knee", text, **values)
    if knee.kind == "none":
        text = f"no knee in range: throughput still rises at {users(max_level)}, the maximum asked for"
        return because("capacity_knee_none", text, **values)
    text = "where more concurrency stops paying is not known yet: "
    text += f"not below {users(knee.low)}, and " if knee.low else ""
    text += f"{best}; "
    text += "all probes were made" if knee.complete else "the search was stopped early"
    return because("capacity_knee_unclear", text, **values)


def users(level: float | None) -> str:
    return count(round(level or 0), "user")


def known_levels(report: CapacityReport, slos: Sequence[str], probes: Sequence[MeasuredProbe]) -> list[dict[str, Any]]:
    """For each level that was measured and each SLO: the amount, and how many of how many requests met the SLO."""
    levels = []
    for level in sorted({probe.level for probe in probes}):
        for slo, text in enumerate(slos):
            counts = [probe.counts[slo] for probe in probes if probe.level == level and slo < len(probe.counts)]
            met, total = sum(count[0] for count in counts), sum(count[1] for count in counts)
            if total:
                levels.append({"loads": report.loads_at(level), "met": met, "total": total, "slo": text})
    return levels


def note_reasons(server: ServerCapacity) -> list[Reason]:
    """What limits the answers about one server."""
    notes = server.reasons if server.started else server.reasons[1:]
    if server.drift is not None and server.drift.values["drifted"]:
        notes = [*notes, server.drift]
    return notes


def probe_headings(report: CapacityReport) -> list[str]:
    """The head of the table of probes."""
    server = ["server"] if len(report.servers) > 1 else []
    level = f"{report.varied} {report.unit}" if report.members else report.unit
    return [*server, level, *report.all_slos, "answers", "measured", "answer takes", "tok/s", "result", "for"]


def probe_grid(report: CapacityReport, rows: Sequence[Sequence[str]]) -> Grid:
    words = ("server", "result", "for")
    columns = [TableColumn(title, title, group="text" if title in words else "") for title in probe_headings(report)]
    return Grid(columns=columns, rows=rows)


def probe_cells(report: CapacityReport, server: ServerCapacity, probe: MeasuredProbe) -> list[str]:
    """A row of the table of probes."""
    counts = dict(zip(report.slos_of(server), probe.counts, strict=False))
    shares = [counts.get(slo, (0, 0)) for slo in report.all_slos]
    return [
        *([server.server] if len(report.servers) > 1 else []),
        format_level(report, probe.level),
        *(f"{100 * met / decided:.1f} % of {decided:,}" if decided else NOTHING for met, decided in shares),
        f"{probe.answers:,}",
        duration(probe.seconds),
        NOTHING if probe.answer_s is None else f"{figures(probe.answer_s)} s",
        significant(probe.tok_s),
        "not held" if probe.unheld else STATES[probe.state],
        PURPOSES[probe.purpose],
    ]


def format_level(report: CapacityReport, level: float) -> str:
    """A level as a number in the unit of the varied load."""
    return f"{level:,}" if report.unit == "users" else figures(report.amount(level))


def format_loads(report: CapacityReport, level: int) -> str:
    """All loads of a probe with their amounts: "20 chat users and 3 job users"."""
    return format_amounts(report.loads_at(level))


def format_amount(amount: float, unit: str, load: str | None = None) -> str:
    """A number of users, requests/s, or times a trace; with the name of the load if it is one of a mix."""
    if unit == "users":
        return count(round(amount), "user" if load is None else f"{load} user")
    return f"{figures(amount)} {unit}" + ("" if load is None else f" of {load}")


def format_amounts(loads: Iterable[Mapping[str, Any]]) -> str:
    """The amounts of several loads: "20 chat users and 3 job users"."""
    return " and ".join(format_amount(**load) for load in loads)
