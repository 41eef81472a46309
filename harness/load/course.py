"""The tickets of a load: those of its stages, one after the other.

Most loads have one stage and nothing to change. Of others each is measured from the moment on at which exactly its
users are there; what is sent before that, and the warm-up that the scenario asks for, is warm-up of the stage. Nothing
is drained between them.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import gevent
import msgspec

from harness.job import Job, warm_sign
from harness.load.tickets import Plan, Ticket, Tickets

logger = logging.getLogger(__name__)

LOOK_S = 0.05


def until(so: Callable[[], object], at_most_s: float = math.inf, look_s: float = LOOK_S) -> None:
    """Look again and again, until it is so or the time is over."""
    end_s = time.monotonic() + at_most_s
    while not so() and time.monotonic() < end_s:
        gevent.sleep(look_s)


class Stage(NamedTuple):
    """A stage as the load processes see it."""

    path: str  # of its counter
    plan: Plan
    users: int


class Course:
    """The counters of all stages, as one process sees them. Made after the fork."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        several = len(stages) > 1
        self.several = several  # whether the number of users changes
        self.stages = [Tickets(stage.path, stage.plan._replace(waits=several)) for stage in stages]
        self._users = [stage.users for stage in stages]
        self._now = 0

    def hold(self) -> None:
        """The warm-up of each stage, where it has one, goes on until the stage is not `held` any more."""
        for tickets in self.stages:
            tickets.held = True

    def close(self) -> None:
        for tickets in self.stages:
            tickets.close()

    def user(self) -> int:
        """The next user's number, from 0."""
        return self.stages[0].user()

    def take(self, most: int = 1) -> list[Ticket]:
        """As that of the stage that has not ended; see Tickets."""
        stage = self.stage()
        taken = self.stages[stage].take(most)
        if not taken and stage < self.stage():
            return self.take(most)
        return [msgspec.structs.replace(ticket, stage=stage) for ticket in taken] if stage else taken

    def early(self) -> bool:
        """Whether `take` gave none because it is too early; see Tickets."""
        return self.stages[self._now].early

    def stage(self) -> int:
        """The one that is going on, or the last."""
        while self._now < len(self.stages) - 1 and self.over(self._now):
            self._now += 1
        return self._now

    def over(self, stage: int) -> bool:
        """Whether the measured time of a stage has passed."""
        left_s = self.stages[stage].left_s()
        return left_s is not None and left_s <= 0

    def left_s(self) -> float | None:
        """Until the end of all; see Tickets."""
        return self.stages[-1].left_s()

    def unmeasured_s(self) -> list[float | None]:
        """Of each stage, the measured time that has not passed. None: it has no time."""
        return [stage.unmeasured_s() for stage in self.stages]

    def finished(self) -> bool:
        """Whether no ticket is left and every request has ended."""
        return all(tickets.finished() for tickets in reversed(self.stages))

    def wait_for_end(self, drain_s: float) -> None:
        """Fixed work: for its last request. Fixed time: for what is in flight at its end, but no longer than that."""

        def too_late() -> bool:
            left_s = self.left_s()
            return left_s is not None and left_s < -drain_s

        until(lambda: self.finished() or too_late())
        if not self.finished():
            logger.info("cutting what has not finished %g s after the end", drain_s)

    def users(self) -> int:
        """How many there should be now."""
        return self._users[self.stage()]

    def users_are_there(self) -> None:
        """As many as there should be, and no others."""
        self.stages[self.stage()].users_are_there()


def meet(job: Job, tickets: Course) -> None:
    """Hold the warm-up of a part of a mix until all parts are warm, so that all are measured from the same moment.

    Each part has its own load processes or its own master. It knows of the other parts one file each, the sign that
    their warm-up is over. To be called before the first request.
    """
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
