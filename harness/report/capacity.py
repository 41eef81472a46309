"""What a capacity search found, in words."""

from rich.console import Console
from rich.table import Table

from harness.capacity.result import CapacityReport, Crossover, MeasuredProbe, ServerCapacity
from harness.reasons import sentence
from harness.summary import Reason, because
from harness.units import NOTHING, count, duration, significant

PURPOSES = {"slo": "", "knee": "knee", "drift": "drift check"}
STATES = {
    "pass": "meets",
    "fail": "breaks",
    "unresolved": "unresolved",
    "done": "measured",
    "died": "server died",
    "stopped": "stopped",
}


def print_capacity(found: CapacityReport, console: Console) -> None:
    """One sentence for each server and what it rests on, and a table of all probes."""
    if found.slos:
        console.print(f"SLOs: {', '.join(found.slos)}")
    for line in capacity_lines(found):
        console.print(line, style="bold")
    for server in found.servers:
        for note in notes_of(found, server):
            console.print(f"note: {server.server}: {sentence(note)}")
    rows = [(server, probe) for server in found.servers for probe in server.probes]
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    heads = probe_head(found)
    for head in heads:
        table.add_column(head, justify="left" if head in ("server", "result", "for") else "right")
    for server, probe in rows:
        table.add_row(*probe_texts(found, server, probe))
    console.print(table)


def capacity_lines(found: CapacityReport) -> list[str]:
    """The answers in words, one a server and question."""
    simulated = " (embedded engine, no real server)" if found.simulated else ""
    lines = [
        f"{server.server}{simulated}: {sentence(one)}" for server in found.servers for one in answers_of(found, server)
    ]
    return lines + [sentence(crossover_reason(one)) for one in found.crossovers]


def crossover_reason(found: Crossover) -> Reason:
    """From how many users on one server has more throughput than another."""
    answer = found.answer
    levels = {"first": min(answer.levels, default=None), "last": max(answer.levels, default=None)}
    known = {"level": answer.level, "low": answer.low, "high": answer.high, **levels}
    return because(f"crossing_{answer.kind}", base=found.base, side=found.side, **known)


def answers_of(found: CapacityReport, server: ServerCapacity) -> list[Reason]:
    """The answers about one server."""
    if not server.started:
        return server.reasons[:1]
    answers = []
    if (slo := server.slo) is not None:
        values = {"level": slo.level, "low": slo.low, "high": slo.high, "above": slo.above, "max": found.max_level}
        answers.append(
            because(
                f"capacity_{slo.kind}",
                **{name: None if value is None else found.amount(value) for name, value in values.items()},
                one=found.amount(1),
                unit=found.unit,
                broken=slo.broken,
            )
        )
    if (knee := server.knee) is not None:
        answers.append(
            because(
                f"capacity_knee_{knee.kind}",
                level=knee.level,
                low=knee.low,
                high=knee.high,
                max=found.max_level,
                peak_level=knee.peak_level,
                peak_tok_s=knee.peak_tok_s,
                hurts_from=knee.hurts_from,
            )
        )
    return answers


def notes_of(found: CapacityReport, server: ServerCapacity) -> list[Reason]:
    """What limits the answers about one server."""
    notes = server.reasons if server.started else server.reasons[1:]
    if server.drift is not None and server.drift.drifted:
        drift = server.drift
        notes = [*notes, because("capacity_drift", ratio=drift.ratio, low=drift.low, high=drift.high)]
    if server.knee is not None and server.knee.drifted and server.knee.drift is not None:
        notes = [*notes, because("capacity_knee_drift", ratio=server.knee.drift)]
    return notes


def probe_head(found: CapacityReport) -> list[str]:
    """The columns of the table of probes."""
    several = ["server"] if len(found.servers) > 1 else []
    return [*several, found.unit, *found.slos, "answers", "measured", "answer takes", "tok/s", "result", "for"]


def probe_texts(found: CapacityReport, server: ServerCapacity, probe: MeasuredProbe) -> list[str]:
    """A row of that table."""
    return [
        *([server.server] if len(found.servers) > 1 else []),
        level_text(found, probe.level),
        *(NOTHING if share is None else f"{100 * share:.1f} %" for share in padded(probe.met, len(found.slos))),
        f"{probe.answers:,}",
        duration(probe.seconds),
        NOTHING if probe.answer_s is None else f"{probe.answer_s:.3g} s",
        significant(probe.tok_s),
        STATES[probe.state],
        PURPOSES[probe.purpose],
    ]


def padded(shares: list[float | None], number: int) -> list[float | None]:
    return [*shares, *([None] * number)][:number]


def level_text(found: CapacityReport, level: int) -> str:
    """A level as a number of its unit."""
    return f"{level:,}" if found.unit == "users" else f"{found.amount(level):.3g}"


def amount_text(amount: float, unit: str) -> str:
    """An amount with its unit."""
    return count(round(amount), "user") if unit == "users" else f"{amount:.3g} {unit}"
