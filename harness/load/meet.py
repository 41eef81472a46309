"""The parts of a mix begin to be measured at the same moment: when the last of them has had its warm-up.

Each part has load processes of its own and knows nothing of the others but one file of each, the sign that its warm-up
is over. Until all signs are there its own goes on.
"""

import gevent

from harness.job import Job, warm_sign
from harness.load.course import Course
from harness.load.wait import until


def meet(job: Job, tickets: Course) -> None:
    """Hold the warm-up of a part of a mix until all parts are warm. To be called before the first request."""
    tickets.hold()
    gevent.spawn(_wait, job, tickets)


def _wait(job: Job, tickets: Course) -> None:
    until(tickets.stages[0].warmed_up)
    warm_sign(job.tickets_path).touch()
    others = [warm_sign(path) for path in job.beside]
    until(lambda: all(sign.exists() for sign in others))
    tickets.stages[0].held = False
