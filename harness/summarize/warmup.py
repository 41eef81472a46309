"""What is known of a cell's warm-up: from its records, and from what its load processes said at the end."""

from collections.abc import Iterable

from harness.rundir.records import ProcessMark
from harness.summarize.tally import CellCounts
from harness.summary import Warmed
from harness.units import count


def warmed(counted: CellCounts, marks: Iterable[ProcessMark], first_due_s: float | None = None) -> Warmed | None:
    """None where there was none. `first_due_s`: of an open loop, when the first is due after the measurement began."""
    if not counted.warmup:
        return None
    begun, measured, due_s = counted.first_any_s, counted.begun_s, counted.schedule.first_due_s
    if measured is None:
        # At first nobody may come.
        measured = counted.first_sent_s if first_due_s is None or due_s is None else due_s - first_due_s
    said = [mark.steady for mark in marks if mark.steady is not None]
    return Warmed(
        requests=counted.warmup,
        seconds=None if begun is None or measured is None else measured - begun,
        steady=all(said) if said else None,  # of several machines each looks at what it sent
    )


def in_words(warm: Warmed | None) -> list[str]:
    """A note on a warm-up that was to last until the server is steady."""
    if warm is None or warm.steady is None:
        return []
    took = "its bound" if warm.seconds is None else f"{warm.seconds:.1f} s"
    number = count(warm.requests, "warm-up request")
    if warm.steady:
        return [f"the server was steady after {took} and {number}"]
    return [
        f"the server was NOT steady after {took} and {number}, the bound of the warm-up (most_s, most_requests): "
        "what was measured may still get faster or slower as it goes on"
    ]
