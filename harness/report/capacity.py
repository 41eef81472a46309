"""The result of a capacity search as sentences and a table."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.analysis.result import CapacityReport, Crossover, MeasuredProbe, ServerCapacity
from harness.base.reasons import format_amounts, sentence
from harness.base.summary import Reason, Summary, because
from harness.base.units import NOTHING, duration, figures, significant

PURPOSES = {"slo": "", "knee": "knee", "drift": "drift check"}
STATES = {
    "pass": "meets",
    "fail": "breaks",
    "unresolved": "unresolved",
    "done": "measured",
    "died": "server died",
    "stopped": "stopped",
}


def print_capacity(report: CapacityReport, summary: Summary, console: Console) -> None:
    """Print the answers about each server, the notes on them, and a table of all probes."""
    if report.slos:
        console.print(f"SLOs: {', '.join(report.slos)}")
    for line in capacity_lines(report):
        console.print(line, style="bold")
    for server in report.servers:
        for note in note_reasons(server):
            console.print(f"note: {server.server}: {sentence(note)}")
    if limited := ", ".join(row.name for row in summary.rows if row.client_limited):
        where = f"`harness report {report.run}` says of which numbers"
        console.print(f"note: the load generator, not the server, was the limit of {limited}; {where}")
    rows = [probe_cells(report, server, probe) for server in report.servers for probe in server.probes]
    if rows:
        table = Table(box=None, pad_edge=False)
        for heading in probe_headings(report):
            table.add_column(heading, justify="left" if heading in ("server", "result", "for") else "right")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)


def capacity_lines(report: CapacityReport) -> list[str]:
    """The answers as sentences: one for each server and question."""
    simulated = " (embedded engine, no real server)" if report.simulated else ""
    answers = [(server.server, answer) for server in report.servers for answer in answer_reasons(report, server)]
    lines = [f"{server}{simulated}: {sentence(answer)}" for server, answer in answers]
    return lines + [sentence(crossover_reason(crossover)) for crossover in report.crossovers]


def crossover_reason(crossover: Crossover) -> Reason:
    """The number of users from which on one server has more throughput than another."""
    answer = crossover.answer
    levels = {"first": min(answer.levels, default=None), "last": max(answer.levels, default=None)}
    bounds = {"level": answer.level, "low": answer.low, "high": answer.high}
    return because(f"crossing_{answer.kind}", base=crossover.base, side=crossover.side, **bounds, **levels)


def answer_reasons(report: CapacityReport, server: ServerCapacity) -> list[Reason]:
    """The answers about one server."""
    if not server.started:
        return server.reasons[:1]
    answers = []
    if (slo := server.slo) is not None:
        load = {"load": report.varied} if report.members else {}

        def amount(level: int | None) -> dict[str, Any] | None:
            return None if level is None else {"amount": report.amount(level), "unit": report.unit, **load}

        levels = {"level": slo.level, "low": slo.low, "high": slo.high, "above": slo.above}
        levels |= {"max": report.max_level, "one": 1}
        if slo.kind == "unresolved" and slo.low is not None and slo.low == slo.high:  # known, but not confirmed
            levels |= {"likely": slo.low, "low": None, "high": None}
        probes = [probe for probe in server.probes if probe.purpose == "slo"]
        known = known_levels(report, probes) if slo.kind == "unresolved" else []
        answers.append(
            because(
                f"capacity_{slo.kind}",
                known=known,
                missed=sum(probe.missed for probe in probes),
                queued=sum(probe.queued for probe in probes),
                **{name: amount(level) for name, level in levels.items()},
                broken="an SLO" if slo.kind == "found" and slo.broken is None else slo.broken,
                next_to=[{"amount": fixed.amount, "unit": fixed.unit, "load": fixed.load} for fixed in report.fixed],
                complete=slo.complete,
                unconfirmed=[amount(level) for level in slo.unconfirmed],
            )
        )
    if (knee := server.knee) is not None:
        names = ("level", "low", "high", "peak_level", "peak_tok_s", "hurts_from", "complete")
        values = {name: getattr(knee, name) for name in names}
        if knee.kind == "unclear":  # `peak_tok_s` is of the fitted curve
            values["peak_tok_s"] = next(point.tok_s for point in knee.points if point.level == knee.peak_level)
        answers.append(because(f"capacity_knee_{knee.kind}", max=report.max_level, **values))
    return answers


def known_levels(report: CapacityReport, probes: Sequence[MeasuredProbe]) -> list[dict[str, Any]]:
    """For each level that was measured and each SLO: the amount, and how many of how many requests met the SLO."""
    known = []
    for level in sorted({probe.level for probe in probes}):
        for slo, text in enumerate(report.slos):
            counts = [probe.counts[slo] for probe in probes if probe.level == level and slo < len(probe.counts)]
            met, total = sum(count[0] for count in counts), sum(count[1] for count in counts)
            if total:
                known.append({"loads": report.loads_at(level), "met": met, "total": total, "slo": text})
    return known


def note_reasons(server: ServerCapacity) -> list[Reason]:
    """What limits the answers about one server."""
    notes = server.reasons if server.started else server.reasons[1:]
    if server.drift is not None and server.drift.drifted:
        drift = server.drift
        notes = [*notes, because("capacity_drift", ratio=drift.ratio, low=drift.low, high=drift.high)]
    return notes


def probe_headings(report: CapacityReport) -> list[str]:
    """The head of the table of probes."""
    server = ["server"] if len(report.servers) > 1 else []
    level = f"{report.varied} {report.unit}" if report.members else report.unit
    return [*server, level, *report.slos, "answers", "measured", "answer takes", "tok/s", "result", "for"]


def probe_cells(report: CapacityReport, server: ServerCapacity, probe: MeasuredProbe) -> list[str]:
    """A row of the table of probes."""
    shares = [*probe.met, *([None] * len(report.slos))][: len(report.slos)]
    return [
        *([server.server] if len(report.servers) > 1 else []),
        format_level(report, probe.level),
        *(NOTHING if share is None else f"{100 * share:.1f} %" for share in shares),
        f"{probe.answers:,}",
        duration(probe.seconds),
        NOTHING if probe.answer_s is None else f"{figures(probe.answer_s)} s",
        significant(probe.tok_s),
        STATES[probe.state],
        PURPOSES[probe.purpose],
    ]


def format_level(report: CapacityReport, level: int) -> str:
    """A level as a number in the unit of the varied load."""
    return f"{level:,}" if report.unit == "users" else figures(report.amount(level))


def format_loads(report: CapacityReport, level: int) -> str:
    """All loads of a probe with their amounts: "20 chat users and 3 job users"."""
    return format_amounts(report.loads_at(level))
