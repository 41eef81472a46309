"""The base class of every simulated person or agent.

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
from harness.load.answer import Answer
from harness.load.client import Client
from harness.load.process import Place
from harness.load.tickets import Ticket
from harness.load.tools import Tools
from harness.load.wiring import give_up, load_process
from harness.redact import printable
from harness.rundir.records import CUT
from harness.scenario import behaviour
from harness.scenario.behaviour import Abandon
from harness.scenario.scenario import Load
from harness.workload import Message, text

T = TypeVar("T")

_IDLE_S = 0.2
_NONE = [0.0, 0.0]
_NOBODY: frozenset[Ticket] = frozenset()  # one for all: each would take room of its own
_AHEAD_S = 0.2  # open loop: so long before it is time a prompt is made, which may take some ms
_AFTER_NO_ANSWER_S = 0.5  # a server that is gone, or turns requests away, must not make users spin


class Work(msgspec.Struct, frozen=True):
    """A request that this user is to send: its place in the sequence, and its messages."""

    ticket: Ticket
    messages: list[Message]
    changed: bool = False  # by the user: not those of the plan alone
    asked_index: int | None = None  # whose question it asks, where that is not its own place's

    @property
    def index(self) -> int:
        """Its place in the sequence: 0, 1, 2 ..., and -1, -2 ... in the warm-up."""
        return self.ticket.index

    def at(self, place: "Work") -> "Work":
        """The same messages at another place of the sequence: a question that is asked again."""
        asked_index = self.index if self.asked_index is None else self.asked_index
        return msgspec.structs.replace(self, ticket=place.ticket, asked_index=asked_index)

    def saying(self, messages: Sequence[Message]) -> "Work":
        """Other messages at this place of the sequence."""
        return msgspec.structs.replace(self, messages=list(messages), changed=True)

    def about(self, text: str) -> "Work":
        """With a text that the model is to know: behind the salt and the system prompt, before the question."""
        first, *others = self.messages
        if first["role"] != "system":
            return self.saying([{"role": "system", "content": text}, first, *others])
        return self.saying([{"role": "system", "content": f"{first['content']}\n\n{text}"}, *others])

    def without_system(self) -> "Work":
        """For the later turns of a conversation, whose history begins with the system prompt."""
        return msgspec.structs.replace(
            self, messages=[message for message in self.messages if message["role"] != "system"]
        )


class RequestFailed(Exception):
    """What Locust shows for a failed request."""


class LLMUser(User):
    """Takes requests from the shared sequence and sends them, one record and one Locust event each."""

    abstract = True
    endpoints: ClassVar[tuple[str, ...]] = ("chat", "completions", "embeddings")  # that it can be used with
    think_s: ClassVar[tuple[float, float]] = (0.0, 0.0)  # least and most, where neither scenario nor user says so
    _told_to_stop = False

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._process = load_process()
        self._clients: list[Client] = []  # idle connections
        self._held: list[Ticket] = []  # taken, and neither sent nor given up
        self._begun = False  # something of what was taken last was sent
        self._burst = _NOBODY  # of these all were to be sent at the time of the first
        self._under_way: list[gevent.Greenlet[[], Any]] = []  # requests that were begun and that nobody waits for
        self._stage = 0  # of the load, in which that was taken
        self._pausing: Event | None = None  # made when it is needed: each takes room
        self._last = 0  # index of the request that was sent last
        self.number = self._process.tickets.user()
        if self._process.recorder.users is not None:
            self._process.recorder.users += 1
        if type(self).wait_time is not User.wait_time:
            self.wait_time = partial(self._drawn_wait_time, self.wait_time)  # type: ignore[method-assign]

    def _drawn_wait_time(self, draw: Callable[[], float]) -> float:
        """Of a locustfile with a `wait_time`, as Locust has it: a pause between two tasks."""
        wait_s = draw()
        self._process.nothing_due_for(wait_s)
        return wait_s

    @cached_property
    def random(self) -> random.Random:
        """For what this user decides: the same in every run."""
        return random.Random(f"{self.seed}:{self.number}")

    @property
    def load(self) -> Load:
        """The load's parameters, as in the scenario or given by hand."""
        return self._process.job.load

    @property
    def seed(self) -> int:
        """Of the scenario. With the index of a request it makes a decision the same in every run."""
        return self._process.job.seed

    def text(self, tokens: int, place: str) -> str:
        """So many words that belong to a place of one's own naming, such as a document: the same in every run."""
        return text(tokens, self.seed, place, self._process.job.words)

    def shared_text(self, tokens: int, place: str) -> str:
        """Such a text that requests begin with: behind the cell's salt, so that no earlier cell has it in a cache."""
        return " ".join(filter(None, [self._process.job.salt, self.text(tokens, place)]))

    def take(self, most: int = 1) -> list[Work]:
        """The next requests to send: at least one, at most `most`. Once there is no more, waits for the end.

        They follow each other in the sequence, so what is taken together (a burst, a conversation) is the same in
        every run, however long answers take. What was taken before and never sent, as after an exception in the task,
        is given up.
        """
        self._give_up_held()
        self._know_model()
        most = 1 if self.load.trace is not None else most  # each row of a trace has a time of its own
        while self._state != LOCUST_STATE_STOPPING:
            tickets = self._process.tickets.take(most)
            if tickets:
                self._held.extend(tickets)
                self._stage = tickets[0].stage
                self._begun, self._burst = False, _NOBODY
                self._wait_until(tickets[0].due_s, _AHEAD_S)
                works = [Work(ticket, self._process.messages(ticket)) for ticket in tickets]
                self._wait_until(tickets[0].due_s)
                if tickets[0].due_s is not None and self._state == LOCUST_STATE_STOPPING:
                    break
                return works
            if self._process.tickets.early():
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

        Where the user is to `leave` before the answer is there, `answer.error` is `abandoned`. `again`: it asks what
        the one before it asked. `tools` are sent along, and calls of them are in `answer.calls`.
        Raises ValueError for one that was sent before: what the plan says is sent once, and nothing else.
        """
        place = self._claim(work)._replace(conversation=conversation, turn=turn, batch=batch, again=again)
        messages = [*history, *work.messages] if history else work.messages
        return self._send(messages, place, leave, tools)

    def begin(self, work: Work) -> None:
        """Send one request, and go on without its answer."""
        self._under_way.append(gevent.spawn(partial(self._send, work.messages, self._claim(work))))

    def wait_until_below(self, number: int) -> None:
        """Wait until fewer than `number` of the requests that were begun are under way."""
        while len(self._under_way) >= number:
            gevent.wait(self._under_way, count=1)
            self._under_way = [one for one in self._under_way if not one.dead]

    def _give_up_held(self) -> None:
        if self._held:
            self._process.tickets.stages[self._stage].settle(len(self._held))
            self._held.clear()

    def _claim(self, work: Work) -> Place:
        """Where it belongs, as it is sent now. Raises ValueError for one that was sent before."""
        if work.ticket not in self._held:
            raise ValueError(f"request {work.ticket.index} was sent already; take() another one")
        self._held.remove(work.ticket)
        self._last = work.ticket.index
        follows = self._begun and work.ticket not in self._burst
        self._begun = True
        return Place(
            self._process.tickets.stages[work.ticket.stage].as_sent(work.ticket),
            type(self).__name__,
            self.number,
            changed=work.changed,
            follows=follows,
            asked_index=work.asked_index,
        )

    def _send(
        self,
        messages: Sequence[Message],
        place: Place,
        leave: Abandon | None = None,
        tools: Tools | None = None,
    ) -> Answer:
        client = self._clients.pop() if self._clients else self._process.client()
        under_way = self._process.recorder.in_flight_of
        under_way[place.user_class] += 1
        try:
            answer = self._process.send(client, messages, place, self._tell_locust, leave, tools)
        finally:
            under_way[place.user_class] -= 1
        self._clients.append(client)
        if answer.error in ("connect", "rejected") or (answer.error == "disconnect" and answer.status is None):
            self._back_off(place, answer)
        return answer

    def _back_off(self, place: Place, answer: Answer) -> None:
        """Wait as long as the server asked for, and at least half a second, before this user sends again.

        In an open loop the next arrival is somebody else, who was not asked to wait. Only one whose conversation (or
        whatever else was taken with this request) goes on waits.
        """
        if place.ticket.due_s is None or self._held:
            self.pause(max(_AFTER_NO_ANSWER_S, answer.retry_after_s or 0.0))

    def ask_all(self, works: Sequence[Work]) -> list[Answer]:
        """Send all at once and wait for the last answer."""
        batch = works[0].ticket.index
        if len(works) == 1:
            return [self.ask(works[0], batch=batch)]
        if not self._begun:
            self._burst = frozenset(work.ticket for work in works)
        return self.at_once([partial(self.ask, work, batch=batch) for work in works])

    def at_once(self, doing: Sequence[Callable[[], T]]) -> list[T]:
        """Do several things at the same time, and wait for the last."""
        if len(doing) == 1:
            return [doing[0]()]
        under_way = [gevent.spawn(do) for do in doing]
        try:
            gevent.joinall(under_way)
        finally:
            gevent.killall(under_way)  # cut by the end of the run: each request leaves its record
        return [one.get() for one in under_way]

    def over(self) -> bool:
        """Whether the measured time has passed: nothing more is to be sent, and `take` gives up what was not.

        Of a load with stages, that of the stage in which it was taken; and whether this user is to stop, as one of
        too many, or because Locust's --run-time is over.
        """
        return self._process.tickets.over(self._stage) or self._state == LOCUST_STATE_STOPPING

    def think(self) -> None:
        """Pause as the scenario says, or as this class does when it is used by hand; no longer than the load lasts."""
        pause = self.load.think or self.load.think_s or (list(self.think_s) if self._process.by_hand else _NONE)
        if pause != _NONE:
            self.pause(behaviour.pause_s(pause, self.seed, "think", self._last))

    def pause(self, pause_s: float) -> None:
        """For so long, but no longer than the load lasts, or than this user is to go on."""
        left_s = self._process.tickets.left_s()
        self._sleep(pause_s if left_s is None else max(0.0, min(pause_s, left_s)))

    def _sleep(self, wait_s: float) -> None:
        """For a time that is known, but no longer than this user is to go on."""
        self._process.nothing_due_for(wait_s)
        if self._pausing is None:
            self._pausing = Event()
            if self._state == LOCUST_STATE_STOPPING:
                self._pausing.set()
        self._pausing.wait(wait_s)

    def start(self, group: Group) -> Any:
        """As Locust's own. Counts a user that ends before it is told to: the load then has too few."""
        greenlet = super().start(group)
        greenlet.link(self._note_end)
        return greenlet

    def _note_end(self, _greenlet: object) -> None:
        self._process.recorder.users_gone += not self._told_to_stop

    def on_stop(self) -> None:
        if self._held and self._process.tickets.several:  # one user too many: the stage does not wait for what he held
            self._give_up_held()
        try:
            if sys.exc_info()[0] is StopUser:  # he goes by himself, and is not cut
                gevent.joinall(self._under_way)
        finally:
            gevent.killall(self._under_way)
            for client in self._clients:
                client.close()

    def stop(self, force: bool = False) -> bool:
        """As Locust's own, which kills who pauses between two tasks: he may wake before that and send once more.

        Who is killed is not woken from a pause either, for the same reason.
        """
        self._told_to_stop = True
        if self._pausing is not None and not force:
            self._pausing.set()
        if force or self._state != LOCUST_STATE_WAITING:
            return bool(super().stop(force))
        self._state = LOCUST_STATE_STOPPING  # which is looked at after the pause
        return all(one.dead for one in self._under_way) and bool(super().stop(force=True))

    def _wait_until(self, due_s: float | None, ahead_s: float = 0.0) -> None:
        """Open loop: until it is time. A user that comes too late sends at once, which its record tells."""
        if due_s is not None:
            self._sleep(max(0.0, due_s - ahead_s - time.monotonic()))

    def _know_model(self) -> None:
        try:
            self._process.model()
        except HarnessError as error:
            give_up(self.environment, error)
            raise StopUser from None

    def _tell_locust(self, answer: Answer) -> None:
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
