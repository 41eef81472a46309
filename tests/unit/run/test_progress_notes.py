"""A note on a server is printed once, however many rows it concerns."""

import io

from msgspec.structs import replace
from rich.console import Console

from harness.numbers.warnings import queue_notes
from harness.run.progress import Progress
from harness.scenario import Load
from tests.support.made_runs import served_by


def test_the_slots_of_an_engine_are_printed_once_with_the_most_requests() -> None:
    slots, out = replace(served_by(), effective={"parallel": 2}), io.StringIO()
    loads = [Load(user="batch", users=users, requests=8) for users in (1, 4, 8)]
    progress = Progress(Console(file=out, width=300))
    for load in loads:  # as each row starts
        for note in queue_notes(slots, [*loads, load]):
            progress.note("a", note)
    assert out.getvalue().count("note: ") == 1
    (note,) = queue_notes(slots, loads)
    assert (note.code, note.values) == ("engine_slots", {"in_flight": 8, "slots": 2})
    assert list(queue_notes(slots, loads[:1])) == [], "one user waits for no other"
    progress.note("b", note)
    assert out.getvalue().count("note: ") == 2, "another server has slots of its own"
