"""The parts of a mix begin to be measured at the same moment: when the last of them has had its warm-up.

Each part has load processes of its own, or a master of those on other machines, and knows nothing of the other parts
but one file of each, the sign that its warm-up is over. Until all signs are there its own goes on.
"""

import gevent

from harness.job import Job, warm_sign
from harness.load.course import Course
from harness.load.wait import until


def meet(job: Job, tickets: Course) -> None:
    """Hold the warm-up of a part of a mix until all parts are warm. To be called before the first request."""
    tickets.hold()
    gevent.spawn(_wait, job, tickets)


def all_are_warm(job: Job) -> bool:
    """Say that the warm-up of this load is over. Whether those of the other parts of its mix are, where it has any."""
    if job.beside:
        warm_sign(job.tickets_path).touch()
    return all(warm_sign(path).exists() for path in job.beside)


def _wait(job: Job, tickets: Course) -> None:
    until(tickets.stages[0].warmed_up)
    until(lambda: all_are_warm(job))
    tickets.stages[0].held = False
