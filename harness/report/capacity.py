"""What a capacity search found, in words."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness.capacity.result import CapacityReport, Crossover, MeasuredProbe, ServerCapacity
from harness.capacity.search import Frontier
from harness.reasons import amounts_words, sentence
from harness.summary import Reason, because
from harness.units import NOTHING, duration, significant

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
        values = {
            "level": slo.level,
            "low": slo.low,
            "high": slo.high,
            "above": slo.above,
            "max": found.max_level,
            "one": 1,
        }
        named = {"load": found.varied[0].load} if found.members else {}
        amounts = {
            name: None if value is None else {"amount": found.amount(value), "unit": found.unit, **named}
            for name, value in (values | {"one": 1}).items()
        }
        broken = "an SLO" if slo.kind == "found" and slo.broken is None else slo.broken
        next_to = [{"amount": one.amount, "unit": one.unit, "load": one.load} for one in found.fixed]
        answers.append(because(f"capacity_{slo.kind}", **amounts, broken=broken, next_to=next_to))
    if server.frontier is not None:
        first, second = found.varied
        answers.append(
            because(
                "capacity_frontier",
                first={"unit": first.unit, "load": first.load},
                second={"unit": second.unit, "load": second.load},
                corners=[
                    [one * first.step, None if other is None else other * second.step]
                    for one, other in corners(server.frontier)
                ],
                complete=server.frontier.complete,
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


def corners(frontier: Frontier) -> list[tuple[int, int | None]]:
    """For each different amount of the second load that fits, the most of the first next to which it does."""
    last = {other: one for one, other in zip(frontier.firsts, frontier.largest, strict=True) if other is not None}
    found: list[tuple[int, int | None]] = [(one, other) for other, one in last.items()]
    full = [one for one, other in zip(frontier.firsts, frontier.largest, strict=True) if other is None]
    return [*found, *((one, None) for one in full[:1])]


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
    levels = [f"{one.load} {one.unit}" for one in found.varied] if found.members else [found.unit]
    return [*several, *levels, *found.slos, "answers", "measured", "answer takes", "tok/s", "result", "for"]


def probe_texts(found: CapacityReport, server: ServerCapacity, probe: MeasuredProbe) -> list[str]:
    """A row of that table."""
    shares = [*probe.met, *([None] * len(found.slos))][: len(found.slos)]
    return [
        *([server.server] if len(found.servers) > 1 else []),
        level_text(found, probe.level),
        *([] if probe.second is None else [level_text(found, probe.second, 1)]),
        *(NOTHING if share is None else f"{100 * share:.1f} %" for share in shares),
        f"{probe.answers:,}",
        duration(probe.seconds),
        NOTHING if probe.answer_s is None else f"{probe.answer_s:.3g} s",
        significant(probe.tok_s),
        STATES[probe.state],
        PURPOSES[probe.purpose],
    ]


def level_text(found: CapacityReport, level: int, which: int = 0) -> str:
    """A level of the load that is varied as a number of its unit; `which`: of those of a frontier."""
    unit, step = (found.varied[which].unit, found.varied[which].step) if found.members else (found.unit, found.step)
    return f"{level:,}" if unit == "users" else f"{level * step:.3g}"


def amounts_text(found: CapacityReport, levels: Sequence[int]) -> str:
    """All loads of a probe with their amounts: "20 chat users and 3 job users"."""
    return amounts_words(found.loads_at(levels))
