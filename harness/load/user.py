"""The base class of all virtual users.

A locustfile of your own needs nothing else, under `locust -f` as well as in a scenario (`user: mine.py`):

    from locust import task
    from harness.load.user import LLMUser

    class Summarizer(LLMUser):
        @task
        def summarize(self) -> None:
            work, *more = self.take(2)                                  # of the sequence; the last may be fewer
            answer = self.ask(work)                                     # send it; leaves one record
            history = [] if answer.error else [*work.messages, {"role": "assistant", "content": answer.text}]
            for follow_up in more:
                self.ask(follow_up, history)
            self.think()
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import gevent
import msgspec
from gevent.event import Event
from gevent.pool import Group
from locust import User
from locust.env import Environment
from locust.exception import StopUser
from locust.user.task import LOCUST_STATE_STOPPING, LOCUST_STATE_WAITING

from harness.errors import HarnessError
from harness.load.client import Client
from harness.load.locust_plugin import give_up, load_process
from harness.load.openai_api import Answer, Tools
from harness.load.process import Work
from harness.load.sequencer import Slot
from harness.redact import printable
from harness.rundir.records import CUT
from harness.scenario import Load, behaviour
from harness.scenario.behaviour import Abandon
from harness.workload import Message, text

T = TypeVar("T")

_IDLE_S = 0.2
_NONE = [0.0, 0.0]
_NO_SLOTS: frozenset[Slot] = frozenset()  # one for all users
_AHEAD_S = 0.2  # open loop: a prompt is made so long before it is due, since that takes some ms
_AFTER_NO_ANSWER_S = 0.5  # a dead or refusing server must not make users spin


class RequestFailed(Exception):
    """What Locust shows for a failed request."""


class LLMUser(User):
    """Take requests from the shared sequence and send them, with one record and one Locust event each."""

    abstract = True
    endpoints: ClassVar[tuple[str, ...]] = ("chat", "completions", "embeddings")  # supported endpoints
    uses: ClassVar[tuple[str, ...] | None] = None  # options for some classes only that this one uses; None: all
    # Minimum and maximum, where neither scenario nor options set it.
    think_s: ClassVar[tuple[float, float]] = (0.0, 0.0)
    _asked_to_stop = False

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._process = load_process()
        self._clients: list[Client] = []  # idle connections
        self._held: list[Slot] = []  # taken, but neither sent nor given up
        self._begun = False  # a request of the last group was sent
        self._burst = _NO_SLOTS  # slots that share the due time of the first
        self._under_way: list[gevent.Greenlet[[], Any]] = []  # requests sent without waiting
        self._stage = 0  # the stage of the last slots
        self._pausing: Event | None = None  # made when needed, to save memory
        self._last = 0  # index of the last request
        self.number = self._process.sequencer.user()
        if self._process.recorder.users is not None:
            self._process.recorder.users += 1
        if type(self).wait_time is not User.wait_time:
            self.wait_time = partial(self._drawn_wait_time, self.wait_time)  # type: ignore[method-assign]

    def _drawn_wait_time(self, draw: Callable[[], float]) -> float:
        """Locust's `wait_time` of a locustfile: a pause between two tasks."""
        wait_s = draw()
        self._process.nothing_due_for(wait_s)
        return wait_s

    @cached_property
    def random(self) -> random.Random:
        """Random numbers for this user's decisions: the same in every run."""
        return random.Random(f"{self.seed}:{self.number}")

    @property
    def load(self) -> Load:
        """The load's parameters, of the scenario or the options."""
        return self._process.job.load

    @property
    def seed(self) -> int:
        """The scenario's seed. With the index of a request, decisions are the same in every run."""
        return self._process.job.seed

    def text(self, tokens: int, place: str) -> str:
        """A text of this length for a named place, such as a document: the same in every run."""
        return text(tokens, self.seed, place, self._process.job.words)

    def shared_text(self, tokens: int, place: str) -> str:
        """A text at the start of requests: after the cell's salt, so that no earlier cell has it in a cache."""
        return " ".join(filter(None, [self._process.job.salt, self.text(tokens, place)]))

    def take(self, max_slots: int = 1) -> list[Work]:
        """Return the next requests to send: one to `max_slots`. When none is left, wait for the end.

        They follow each other in the sequence, so what is taken together (a burst, a conversation) is the same in
        every run, however long answers take. What was taken before and never sent, as after an exception in the task,
        is given up.
        """
        self._give_up_held()
        self._know_model()
        max_slots = 1 if self.load.trace is not None else max_slots  # each row of a trace has a time of its own
        while self._state != LOCUST_STATE_STOPPING:
            slots = self._process.sequencer.take(max_slots)
            if slots:
                self._held.extend(slots)
                self._stage = slots[0].stage
                self._begun, self._burst = False, _NO_SLOTS
                self._wait_until(slots[0].due_s, _AHEAD_S)
                works = [self._process.work(slot) for slot in slots]
                self._wait_until(slots[0].due_s)
                if slots[0].due_s is not None and self._state == LOCUST_STATE_STOPPING:
                    break
                return works
            if self._process.sequencer.early():
                self._process.nothing_due_for(2 * _IDLE_S)
            gevent.sleep(_IDLE_S)
        gevent.joinall(self._under_way)
        raise StopUser

    def ask(
        self,
        work: Work,
        history: Sequence[Message] = (),
        *,
        conversation: int | None = None,
        turn: int | None = None,
        batch: int | None = None,
        again: bool = False,
        leave: Abandon | None = None,
        tools: Tools | None = None,
    ) -> Answer:
        """Send one request, after `history`, and wait for its answer. A failed one has `answer.error`.

        Where the user is to `leave` before the answer is complete, `answer.error` is `abandoned`. `again`: it asks what
        the one before it asked. `tools` are sent along, and calls of them are in `answer.calls`.
        Raises ValueError for one that was sent before: what the plan says is sent once, and nothing else.
        """
        messages = [*history, *work.messages] if history else work.messages
        claimed = self._claim(
            work, messages=messages, conversation=conversation, turn=turn, batch=batch, again=again, leave=leave,
            tools=tools,
        )  # fmt: skip
        return self._send(claimed)

    def begin(self, work: Work) -> None:
        """Send one request without waiting for its answer."""
        self._under_way.append(gevent.spawn(partial(self._send, self._claim(work))))

    def wait_until_below(self, number: int) -> None:
        """Wait until fewer than `number` started requests are in flight."""
        while len(self._under_way) >= number:
            gevent.wait(self._under_way, count=1)
            self._under_way = [one for one in self._under_way if not one.dead]

    def _give_up_held(self) -> None:
        if self._held:
            self._process.sequencer.stages[self._stage].settle(len(self._held))
            self._held.clear()

    def _claim(self, work: Work, **more: Any) -> Work:
        """Return a request as it is sent now, with these fields. Raises ValueError if it was sent before."""
        if work.slot not in self._held:
            raise ValueError(f"request {work.slot.index} was sent already; take() another one")
        self._held.remove(work.slot)
        self._last = work.slot.index
        follows = self._begun and work.slot not in self._burst
        self._begun = True
        slot = self._process.sequencer.stages[work.slot.stage].as_sent(work.slot)
        own = {"slot": slot, "user_class": type(self).__name__, "user": self.number, "follows": follows}
        return msgspec.structs.replace(work, **own, **more)

    def _send(self, work: Work) -> Answer:
        client = self._clients.pop() if self._clients else self._process.client()
        under_way = self._process.recorder.in_flight_of
        under_way[work.user_class] += 1
        try:
            answer = self._process.send(client, work, self._fire_request_event)
        finally:
            under_way[work.user_class] -= 1
        self._clients.append(client)
        unanswered = answer.error in ("connect", "rejected") or (answer.error == "disconnect" and answer.status is None)
        # In an open loop the next arrival is another user, which was not asked to wait: only the rest of a conversation
        # or burst waits.
        if unanswered and (work.slot.due_s is None or self._held):
            self.pause(max(_AFTER_NO_ANSWER_S, answer.retry_after_s or 0.0))
        return answer

    def ask_all(self, works: Sequence[Work]) -> list[Answer]:
        """Send all at once and wait for the last answer."""
        batch = works[0].slot.index
        if len(works) == 1:
            return [self.ask(works[0], batch=batch)]
        if not self._begun:
            self._burst = frozenset(work.slot for work in works)
        return self.at_once([partial(self.ask, work, batch=batch) for work in works])

    def at_once(self, doing: Sequence[Callable[[], T]]) -> list[T]:
        """Run several functions concurrently, and wait for the last."""
        if len(doing) == 1:
            return [doing[0]()]
        under_way = [gevent.spawn(do) for do in doing]
        try:
            gevent.joinall(under_way)
        finally:
            gevent.killall(under_way)  # cut by the end of the run: each request leaves its record
        return [one.get() for one in under_way]

    def over(self) -> bool:
        """Whether the measured time has passed: send nothing more; `take` gives up unsent requests.

        Of a load with stages, that of the stage in which it was taken; and whether this user is to stop, as one of
        too many, or because Locust's --run-time is over.
        """
        return self._process.sequencer.over(self._stage) or self._state == LOCUST_STATE_STOPPING

    def think(self) -> None:
        """Pause as the scenario says, or with stock Locust as this class does; not beyond the end of the load."""
        pause = self.load.think or self.load.think_s or (list(self.think_s) if self._process.is_stock else _NONE)
        if pause != _NONE:
            self.pause(behaviour.pause_s(pause, self.seed, "think", self._last))

    def pause(self, pause_s: float) -> None:
        """Pause, but not beyond the end of the load or of this user."""
        left_s = self._process.sequencer.left_s()
        self._sleep(pause_s if left_s is None else max(0.0, min(pause_s, left_s)))

    def _sleep(self, wait_s: float) -> None:
        """Sleep for a known time, but not beyond the end of this user."""
        self._process.nothing_due_for(wait_s)
        if self._pausing is None:
            self._pausing = Event()
            if self._state == LOCUST_STATE_STOPPING:
                self._pausing.set()
        self._pausing.wait(wait_s)

    def start(self, group: Group) -> Any:
        """As Locust's own. Counts users that end early: the load then has too few."""
        greenlet = super().start(group)
        greenlet.link(self._note_end)
        return greenlet

    def _note_end(self, _greenlet: object) -> None:
        self._process.recorder.users_gone += not self._asked_to_stop

    def on_stop(self) -> None:
        if self._held and self._process.sequencer.several:  # a surplus user: the stage does not wait for its slots
            self._give_up_held()
        try:
            if sys.exc_info()[0] is StopUser:  # it stops by itself and is not cut
                gevent.joinall(self._under_way)
        finally:
            gevent.killall(self._under_way)
            for client in self._clients:
                client.close()

    def stop(self, force: bool = False) -> bool:
        """As Locust's own, which kills a user that pauses between two tasks: it may wake before and send once more.

        A user that is killed is not woken from a pause, for the same reason.
        """
        self._asked_to_stop = True
        if self._pausing is not None and not force:
            self._pausing.set()
        if force or self._state != LOCUST_STATE_WAITING:
            return bool(super().stop(force))
        self._state = LOCUST_STATE_STOPPING  # checked after the pause
        return all(one.dead for one in self._under_way) and bool(super().stop(force=True))

    def _wait_until(self, due_s: float | None, ahead_s: float = 0.0) -> None:
        """Open loop: wait until the request is due. A late user sends at once, and the record shows it."""
        if due_s is not None:
            self._sleep(max(0.0, due_s - ahead_s - time.monotonic()))

    def _know_model(self) -> None:
        try:
            self._process.model()
        except HarnessError as error:
            give_up(self.environment, error)
            raise StopUser from None

    def _fire_request_event(self, answer: Answer) -> None:
        ended_s = answer.chunks_s[-1] if answer.chunks_s else answer.ended_s
        name = self._process.job.load_name or type(self).__name__
        failed = answer.error is not None and answer.error not in CUT
        self._process.listeners.fire(
            self.environment.events.request,
            timed=answer.error != "unfinished",
            request_type="POST",
            name=name if answer.error != "abandoned" else f"{name} (abandoned)",
            response_time=ended_s * 1000,
            response_length=answer.output_tokens or 0,
            # Locust writes it into its own CSV files and pages.
            exception=RequestFailed(printable(f"{answer.error}: {answer.message}")) if failed else None,
            context={},
            response=None,
        )
