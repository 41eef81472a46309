"""What happened in a cell, and when: the marks of its timeline."""

from collections.abc import Iterator

from msgspec import Struct

from harness.manifest import CellRun
from harness.report import words
from harness.report.observed import Timeline
from harness.report.scraped import ServerSamples
from harness.summary import CellSummary

MOST_ALIKE = 12  # of one kind in a cell; the rest is told as a number
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
    found += _capped(list(_waiting(line.server)), "more times when requests waited")
    found += _capped(
        [Event(at, words.count(int(many), "preemption")) for at, many in line.server.preempted], "more preemptions seen"
    )
    return sorted(found)


def _death(line: Timeline, ran: CellRun | None) -> Event | None:
    if ran is None or (ran.served_by.exit_code is None and not any("the server died" in one for one in ran.problems)):
        return None
    broken = [line.failures[kind].first_s for kind in _BROKEN if kind in line.failures]
    code = ran.served_by.exit_code
    why = ", out of memory" if ran.served_by.oom_killed else "" if code is None else f", exit code {code}"
    return Event(min(broken) if broken else line.ends_s, f"the server died{why}", True, "died")


def _waiting(server: ServerSamples) -> Iterator[Event]:
    """A mark where the server's queue was first seen not empty, each time anew."""
    queue = 0.0
    start: float | None = None
    for at, value in zip(server.at_s, server.values.get("waiting", []), strict=False):
        if value:
            start, queue = (at, value) if start is None else (start, max(queue, value))
        elif start is not None:
            yield Event(start, _queue(start, at, queue))
            start = None
    if start is not None:
        yield Event(start, _queue(start, server.at_s[-1], queue))


def _queue(start_s: float, end_s: float, most: float) -> str:
    return f"requests wait in the server for about {end_s - start_s:.2g} s, {most:,.0f} at most"


def _capped(events: list[Event], rest: str) -> list[Event]:
    if len(events) <= MOST_ALIKE:
        return events
    left = events[MOST_ALIKE:]
    return [*events[:MOST_ALIKE], Event(left[0].at_s, f"from here on {len(left):,} {rest}")]
