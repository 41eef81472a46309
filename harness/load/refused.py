"""Load that is steered by hand and whose first requests are all refused for what they ask: it is ended.

Of a run the harness reads the records and ends it. Here nobody does, and a model that the server does not have would be
asked for again and again. Each load process looks at its own requests; the master of several is told.
"""

from collections.abc import Callable
from typing import Any

from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from harness.errors import HarnessError
from harness.failures.explain import FIRST, mistake_of

_REFUSED = "llm-refused"


class FirstRequests:
    """Those of each test. To be made once in each process, when it has its role."""

    def __init__(self, environment: Environment, give_up: Callable[[Environment, Exception], None]) -> None:
        self._environment = environment
        self._give_up = give_up
        self._said: list[str | None] = []  # of the first requests; None of one that did not fail
        self._ended = False
        events: Any = environment.events  # they have no types
        events.test_start.add_listener(self._begin)
        events.request.add_listener(self._look)
        if isinstance(environment.runner, MasterRunner):
            environment.runner.register_message(_REFUSED, self._on_refused)

    def _begin(self, **_: Any) -> None:
        self._said, self._ended = [], False

    def _look(self, exception: Exception | None = None, **_: Any) -> None:
        if len(self._said) == FIRST:
            return
        self._said.append(None if exception is None else str(exception))
        mistake = mistake_of(self._said) if len(self._said) == FIRST else None
        if mistake is None:
            return
        what = f"the load was ended because its first {FIRST} requests all failed, as the rest would: {mistake.cause}"
        next_step = f"To solve it: {mistake.fix}. By hand, keys of a scenario are options: --model, --api-key-env, ..."
        if isinstance(self._environment.runner, WorkerRunner):
            self._environment.runner.send_message(_REFUSED, {"what": what, "next_step": next_step})
        else:
            self._end(what, next_step)

    def _on_refused(self, msg: Any, **_: Any) -> None:
        self._end(**msg.data)

    def _end(self, what: str, next_step: str) -> None:
        if not self._ended:  # every load process may find the same
            self._ended = True
            self._give_up(self._environment, HarnessError(what, next_step=next_step))
