"""The tickets of a load: those of its stages, one after the other.

Most loads have one stage and nothing to change. Of others each is measured from the moment on at which exactly its
users are there; what is sent before that, and the warm-up that the scenario asks for, is warm-up of the stage. Nothing
is drained between them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from harness.load.tickets import Plan, Seen, Ticket, Tickets


class Stage(NamedTuple):
    """A stage as the load processes see it."""

    path: str  # of its counter
    plan: Plan
    users: int


class Course:
    """The counters of all stages, as one process sees them. Made after the fork."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        several = len(stages) > 1
        self._all = [Tickets(stage.path, stage.plan._replace(waits=several)) for stage in stages]
        self._users = [stage.users for stage in stages]
        self._now = 0

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self._all)

    @property
    def several(self) -> bool:
        """Whether the number of users changes."""
        return self.stages > 1

    def hold(self) -> None:
        """The warm-up of each stage, where it has one, goes on until the stage is released."""
        for tickets in self._all:
            tickets.held = True

    def release(self, stage: int = 0, begin_s: float | None = None) -> None:
        """`begin_s`: of a part of an open loop, when it is measured from on all machines, on the clock of this one."""
        self._all[stage].begin_s = begin_s
        self._all[stage].held = False

    def close(self) -> None:
        for tickets in self._all:
            tickets.close()

    def user(self) -> int:
        """The next user's number, from 0."""
        return self._all[0].user()

    def take(self, most: int = 1) -> list[Ticket]:
        """As that of the stage that has not ended; see Tickets."""
        stage = self.stage()
        taken = self._all[stage].take(most)
        if not taken and stage < self.stage():
            return self.take(most)
        return [msgspec.structs.replace(ticket, stage=stage) for ticket in taken] if stage else taken

    def as_sent(self, ticket: Ticket) -> Ticket:
        """As it is when its request is sent now; see Tickets."""
        return self._all[ticket.stage].as_sent(ticket)

    def settle(self, number: int = 1, seen: Seen | None = None, stage: int = 0) -> None:
        """`number` tickets taken of a stage are done with; see Tickets."""
        self._all[stage].settle(number, seen)

    def stage(self) -> int:
        """The one that is going on, or the last."""
        while self._now < len(self._all) - 1 and self.over(self._now):
            self._now += 1
        return self._now

    def over(self, stage: int) -> bool:
        """Whether the measured time of a stage has passed."""
        left_s = self._all[stage].left_s()
        return left_s is not None and left_s <= 0

    def left_s(self) -> float | None:
        """Until the end of all; see Tickets."""
        return self._all[-1].left_s()

    def finished(self) -> bool:
        """Whether no ticket is left and every request has ended."""
        return all(tickets.finished() for tickets in reversed(self._all))

    def warmed_up(self, stage: int = 0) -> bool:
        """Whether the warm-up that was planned for a stage has been handed out."""
        return self._all[stage].warmed_up()

    def steady(self, stage: int) -> bool | None:
        """Whether the warm-up of a stage found the server steady; see Tickets."""
        return self._all[stage].steady()

    def users(self) -> int:
        """How many there should be now."""
        return self._users[self.stage()]

    def users_are_there(self) -> None:
        """As many as there should be, and no others."""
        self._all[self.stage()].users_are_there()
