"""What happened in a cell, and when: the marks of its timeline."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from harness import units
from harness.report.charts.observed import Timeline
from harness.report.charts.server_metrics import ServerSamples
from harness.report.charts.telemetry import MachineSamples
from harness.rundir.manifest import CellRun, ServerDeath
from harness.summary import CellSummary

MOST_ALIKE = 12  # about so many of one kind in a cell: what lies closer together is one
Span = tuple[float, float, float]  # start, end, the most within it

_BROKEN = ("connect", "disconnect", "truncated")  # what a client sees first of a server that is gone


class Event(Struct, frozen=True, order=True):
    """A mark: seconds since the first measured request, and what it was."""

    at_s: float
    text: str
    bad: bool = False
    label: str = ""  # what is written beside the mark, where there is room


def events_of(line: Timeline, cell: CellSummary | None, ran: CellRun | None) -> list[Event]:
    """The events of one cell in the order of time."""
    found = [Event(0.0, "measurement starts", label="start")]
    if cell is not None and cell.numbers.window == "timed" and cell.numbers.window_s is not None:
        found.append(Event(round(cell.numbers.window_s, 2), "measured time is over", label="end"))
    died = _death(line, ran)
    found += [died] if died else []
    for kind, failures in line.failures.items():
        many = "a request fails" if failures.count == 1 else f"the first of {failures.count:,} requests fails"
        found.append(Event(failures.first_s, f"{many}: {kind}", True))
    near_s = (line.ends_s - (line.warmup_until_s or 0.0)) / MOST_ALIKE
    for start, end, most in _joined(_waiting(line.server), near_s):
        lasted = units.figures(end - start)
        found.append(Event(start, f"requests wait in the server during {lasted} s, {most:,.0f} at most"))
    found += [Event(start, text, True, "heat") for start, text in _heat(line.machine, near_s)]
    found += [Event(at, units.count(int(many), "preemption")) for at, many in _summed(line.server.preempted, near_s)]
    return sorted(found)


def _death(line: Timeline, ran: CellRun | None) -> Event | None:
    if ran is None or (ran.served_by.exit_code is None and not _dead(ran.served_by.death)):
        return None
    broken = [line.failures[kind].first_s for kind in _BROKEN if kind in line.failures]
    code = ran.served_by.exit_code
    why = ", out of memory" if ran.served_by.oom_killed else "" if code is None else f", exit code {code}"
    return Event(min(broken) if broken else line.ends_s, f"the server died{why}", True, "died")


def _dead(death: ServerDeath | None) -> bool:
    return death is not None and death.how != "unreachable"


def _waiting(server: ServerSamples) -> Iterator[Span]:
    """When the server's queue was seen not empty, and the most that waited."""
    start: float | None = None
    most = 0.0
    for at, value in zip(server.at_s, server.values.get("waiting", []), strict=False):
        if value:
            start, most = (at, value) if start is None else (start, max(most, value))
        elif start is not None:
            yield start, at, most
            start = None
    if start is not None:
        yield start, server.at_s[-1], most


def _heat(machine: MachineSamples, near_s: float) -> Iterator[tuple[float, str]]:
    """When heat held a GPU back, as the spans between two samples say."""
    for name in dict.fromkeys(name for _, _, name in machine.heat):
        spans = [(start, end, 0.0) for start, end, gpu in machine.heat if gpu == name]
        for start, end, _ in _joined(spans, near_s):
            yield start, f"heat throttles the GPU {name}, last seen at {end:.1f} s"


def _joined(spans: Iterable[Span], near_s: float) -> list[Span]:
    """Spans of which each begins at least so long after the one before it; those between belong to that one."""
    joined: list[Span] = []
    for start, end, most in spans:
        if joined and start - joined[-1][0] < near_s:
            first, _, before = joined[-1]
            joined[-1] = first, end, max(before, most)
        else:
            joined.append((start, end, most))
    return joined


def _summed(counts: Iterable[tuple[float, float]], near_s: float) -> list[tuple[float, float]]:
    """Counts that lie closer together than that as one."""
    summed: list[tuple[float, float]] = []
    for at, many in counts:
        if summed and at - summed[-1][0] < near_s:
            summed[-1] = summed[-1][0], summed[-1][1] + many
        else:
            summed.append((at, many))
    return summed
