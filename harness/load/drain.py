"""The end of a load of several load processes: each ends what it has in flight, as a single one does.

At the end of --run-time Locust's master tells its workers to quit, leaves them half a second, and ends: what they had
in flight was in none of its tables, listeners had not been called, and they went on behind the back of whoever had
started them.
"""

import time
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

_DRAIN, _DRAINED = "llm-drain", "llm-drained"
_LOOK_S = 0.1
_MORE_S = 2.0  # for the messages


class Drain:
    """To be made once in each process of a load without web UI, and in workers. An interruption waits for nobody."""

    def __init__(self, environment: Environment, *, by_hand: bool) -> None:
        """`by_hand`: --run-time is waited for; else whoever ends the load calls `wait`."""
        self._environment = environment
        self._drained: set[str] = set()
        runner = environment.runner
        if isinstance(runner, MasterRunner):
            runner.register_message(_DRAINED, lambda msg, **_: self._drained.add(msg.node_id))
            events: Any = environment.events  # they have no types
            if by_hand:
                events.test_stopping.add_listener(lambda **_: self.wait(environment.stop_timeout))
        elif isinstance(runner, WorkerRunner):
            runner.register_message(_DRAIN, self._end, concurrent=True)

    def wait(self, patience_s: float, *, cut: bool = False) -> None:
        """Until all load processes have stopped, in the master. `cut`: without waiting for what is in flight."""
        runner = self._environment.runner
        assert isinstance(runner, MasterRunner)
        if not patience_s:  # interrupted
            return
        runner.send_message(_DRAIN, {"cut": cut})
        until, clients = time.monotonic() + patience_s + _MORE_S, runner.clients
        while time.monotonic() < until and any(
            one.id not in self._drained for one in [*clients.running, *clients.spawning]
        ):
            gevent.sleep(_LOOK_S)

    def _end(self, msg: Any, **_: object) -> None:
        runner = self._environment.runner
        assert isinstance(runner, WorkerRunner)
        if msg.data["cut"]:
            self._environment.stop_timeout = 0
        runner.stop()
        runner.send_message(_DRAINED)
