"""How many users there are at which time of a load whose stages say so."""

import time
from collections.abc import Callable

import gevent
from locust import LoadTestShape
from locust.runners import STATE_RUNNING, STATE_SPAWNING, Runner

from harness.errors import HarnessError
from harness.load.course import Course
from harness.load.master import Master

_LOOK_S = 0.1
_RATE_S = 0.001  # in which users come, where nobody says how long that takes


class Stages(LoadTestShape):
    """Locust's shape of a load with stages: as many users as the stage says that is going on.

    `follow` takes the place of Locust's own loop, in which the start of one stage's users blocks, so that later stages
    may be left out, and under which a headless process hears no SIGTERM.
    """

    def __init__(self, course: Course | Master, ramp_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._course = course
        self._ramp_s = ramp_s
        self._before = 0

    def tick(self) -> tuple[int, float]:
        """How many users there are to be, and how many of them come or go each second."""
        users = self._course.users()
        rate = max(1, abs(users - self._before)) / max(self._ramp_s, _RATE_S)
        return users, rate

    def follow(self, runner: Runner, patience_s: float, give_up: Callable[[HarnessError], None]) -> None:
        """Until the load ends. Each stage has `patience_s` until its users are there."""
        asked, since, there = self._course.users(), time.monotonic(), False
        stage = 0
        while True:
            gevent.sleep(_LOOK_S)
            if self._course.stage() != stage:
                stage, self._before, there, since = self._course.stage(), asked, False, time.monotonic()
                asked, rate = self.tick()
                if asked != self._before:
                    runner.start(asked, rate)
            if there or runner.state not in (STATE_RUNNING, STATE_SPAWNING):
                continue
            if runner.user_count == asked:
                there = True
                self._course.users_are_there()
            elif time.monotonic() - since > patience_s:
                give_up(HarnessError(f"there are {runner.user_count} users after {patience_s:.0f} s, and not {asked}"))
                return
