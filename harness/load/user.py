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
from typing import Any, ClassVar, TypeVar, cast

import gevent
import msgspec
from gevent.event import Event
from gevent.pool import Group
from locust import User
from locust.env import Environment
from locust.exception import StopUser
from locust.user.task import LOCUST_STATE_STOPPING, LOCUST_STATE_WAITING

from harness.base.errors import HarnessError
from harness.base.redact import printable
from harness.load.client import Client
from harness.load.locust_plugin import generator_of
from harness.load.openai_api import Answer, Tools
from harness.load.sequencer import Work
from harness.records.records import CUT, ReplayedConversation
from harness.scenario import Load, behaviour
from harness.scenario.behaviour import Abandon
from harness.workload import Message, text

T = TypeVar("T")

_POLL_S = 0.2
_NO_PAUSE = [0.0, 0.0]
_PROMPT_AHEAD_S = 0.2  # open loop: a prompt, which takes some ms, is made so long before it is due
_NO_ANSWER_PAUSE_S = 0.5  # users of a dead or rejecting server must not spin


class RequestFailed(Exception):
    """The error that Locust shows for a failed request."""


class LLMUser(User):
    """Takes requests from the shared sequence and sends them. Each makes one record and one Locust event."""

    abstract = True
    endpoints: ClassVar[tuple[str, ...]] = ("chat", "completions", "embeddings", "messages")  # supported endpoints
    # Options that this class uses, of those which only some classes use; None: all of them.
    uses: ClassVar[tuple[str, ...] | None] = None
    # Minimum and maximum pause, if neither scenario nor options set it.
    think_s: ClassVar[tuple[float, float]] = (0.0, 0.0)
    load_number: ClassVar[int] = 0  # of a mix: the load of these users
    user_class: ClassVar[str] = ""  # in records; empty: the name of the class
    _asked_to_stop = False

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._process = generator_of(environment).sending_process()
        self._idle_clients: list[Client] = []
        self._unsent: dict[int, Work] = {}  # taken, but neither sent nor given up, by index
        self._group_started = False  # a request of the last taken group was sent
        self._burst: frozenset[int] = frozenset()  # indices of requests that share the due time of the first
        self._background: list[gevent.Greenlet[[], Any]] = []  # requests sent by `begin`
        self._stage = 0  # of the last taken requests
        self._wake = Event()  # ends a pause
        self._last_index = 0  # of the last request sent
        self.number = self._process.sequencer.add_user(self.load_number)
        if self._process.recorder.users is not None:
            self._process.recorder.users[self.load_number] += 1
        if type(self).wait_time is not User.wait_time:  # Locust's pause between two tasks
            self.wait_time = partial(self._note_wait_time, self.wait_time)  # type: ignore[method-assign]

    def _note_wait_time(self, wait_time: Callable[[], float]) -> float:
        wait_s = wait_time()
        self._process.note_wait(wait_s)
        return wait_s

    @cached_property
    def random(self) -> random.Random:
        """Random numbers for this user's decisions: the same in every run."""
        return random.Random(f"{self.seed}:{self.number}")

    @property
    def load(self) -> Load:
        """The load's parameters, of the scenario or the options."""
        return self._process.loads[self.load_number].load

    @property
    def seed(self) -> int:
        """The scenario's seed. Decisions that depend on it and the index of a request are the same in every run."""
        return self._process.job.seed

    @property
    def words(self) -> Sequence[str]:
        """The words of one token each, where tokens are counted; else none."""
        return self._process.job.words

    @property
    def salt(self) -> str:
        """The words of the cell, with which prompts start; empty if the load has none."""
        return self._process.loads[self.load_number].salt or ""

    @property
    def trace_file(self) -> str | None:
        """The path of the load's trace."""
        return self._process.loads[self.load_number].trace_file

    @property
    def user_count(self) -> int:
        """The number of users of this load."""
        if self._process.is_stock and self.environment.runner is not None:
            return max(1, int(self.environment.runner.target_user_count))
        return self.load.users

    def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function that reads a large file, while other users go on. Its HarnessError ends the load."""
        error: HarnessError | None = None

        def called() -> T | None:
            nonlocal error
            try:
                return function(*arguments)
            except HarnessError as raised:  # gevent would print it with its traceback
                error = raised
                return None

        result: Any = gevent.get_hub().threadpool.apply(called)
        if error is not None:
            generator_of(self.environment).give_up(error)
            raise StopUser
        return cast(T, result)

    def text(self, tokens: int, place: str) -> str:
        """Return a text of this length for a named place, such as a document: the same in every run."""
        return text(tokens, self.seed, place, self._process.job.words)

    def shared_text(self, tokens: int, place: str) -> str:
        """Return a text for the start of requests. It begins with the cell's salt: no cache has it of another cell."""
        return " ".join(filter(None, [self._process.loads[self.load_number].salt, self.text(tokens, place)]))

    def take(self, max_slots: int = 1, *, fills_cache: bool = False) -> list[Work]:
        """Return the next requests to send: one to `max_slots`. If none is left, wait for the end of the user.

        They follow each other in the sequence. So requests that are taken together (a burst, a conversation) are the
        same in every run, however long answers take. Requests that were taken before and never sent, for example
        after an exception in the task, are given up. `fills_cache`: the request fills the cache and is never measured.
        """
        self._give_up_unsent()
        try:
            self._process.model()
        except HarnessError as error:
            generator_of(self.environment).give_up(error)
            raise StopUser from None
        max_slots = 1 if self.load.trace is not None else max_slots  # each row of a trace has its own due time
        while self._state != LOCUST_STATE_STOPPING:
            taken = self._process.sequencer.take(max_slots, self.load_number, fills_cache=fills_cache)
            if taken:
                self._unsent = {work.index: work for work in taken}
                self._stage, due_s = taken[0].stage, taken[0].due_s
                self._group_started, self._burst = False, frozenset()
                self._wait_until(due_s, _PROMPT_AHEAD_S)
                works = [self._process.with_messages(work, self.number) for work in taken]
                self._wait_until(due_s)
                if due_s is not None and self._state == LOCUST_STATE_STOPPING:
                    break
                return works
            if self._process.sequencer.early[self.load_number]:
                self._process.note_wait(2 * _POLL_S)
            gevent.sleep(_POLL_S)
        gevent.joinall(self._background)
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
        on_answer: Callable[[Answer], None] | None = None,
    ) -> Answer:
        """Send one request, after the messages of `history`, and wait for its answer.

        `answer.error` is None if it succeeded, and `abandoned` if the user left (see `leave`). `again`: it repeats the
        question of the previous request. `tools` are offered to the model; its calls are in `answer.calls`.
        `on_answer` gets the answer before the pause that follows a rejection. Raises ValueError if the request was sent
        before.
        """
        messages = [*history, *work.messages] if history else work.messages
        prepared = self._prepare(
            work, messages=messages, conversation=conversation, turn=turn, batch=batch, again=again, leave=leave,
            tools=tools,
        )  # fmt: skip
        return self._send(prepared, on_answer)

    def begin(self, work: Work) -> None:
        """Send one request without waiting for its answer."""
        self._background.append(gevent.spawn(partial(self._send, self._prepare(work))))

    def wait_until_below(self, number: int) -> None:
        """Wait until fewer than `number` requests sent by `begin` are in flight."""
        while len(self._background) >= number:
            gevent.wait(self._background, count=1)
            self._background = [greenlet for greenlet in self._background if not greenlet.dead]

    def _give_up_unsent(self) -> None:
        if self._unsent:
            self._process.sequencer.settle(len(self._unsent), work=next(iter(self._unsent.values())))
            self._unsent.clear()

    def _prepare(self, work: Work, **fields: Any) -> Work:
        """Return the request as it is sent now, with these fields. Raises ValueError if it was sent before."""
        if self._unsent.pop(work.index, None) is None:
            raise ValueError(f"request {work.index} was sent already; take() another one")
        self._last_index = work.index
        follows = self._group_started and work.index not in self._burst
        self._group_started = True
        own = {"user_class": self.user_class or type(self).__name__, "user": self.number, "follows": follows}
        return msgspec.structs.replace(self._process.sequencer.when_sent(work), **own, **fields)

    def _send(self, work: Work, on_answer: Callable[[Answer], None] | None = None) -> Answer:
        client = self._idle_clients.pop() if self._idle_clients else self._process.create_client(self.load_number)
        in_flight_of = self._process.recorder.in_flight_of
        in_flight_of[work.user_class] += 1
        try:
            answer = self._process.send(client, work, self._fire_request_event)
        finally:
            in_flight_of[work.user_class] -= 1
        self._idle_clients.append(client)
        if on_answer is not None:
            on_answer(answer)
        unanswered = answer.error in ("connect", "rejected") or (answer.error == "disconnect" and answer.status is None)
        # In an open loop the next arrival is another user, which does not wait: only the rest of a conversation or
        # burst does.
        if unanswered and (work.due_s is None or self._unsent):
            self.pause(max(_NO_ANSWER_PAUSE_S, answer.retry_after_s or 0.0))
        return answer

    def note_replay(self, replayed: ReplayedConversation) -> None:
        """Store what became of a conversation of a trace."""
        self._process.recorder.note_replay(replayed, self.load_number)

    def ask_all(self, works: Sequence[Work]) -> list[Answer]:
        """Send all requests at once and wait for the last answer."""
        batch = works[0].index
        if not self._group_started:
            self._burst = frozenset(work.index for work in works)
        return self.at_once([partial(self.ask, work, batch=batch) for work in works])

    def at_once(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run several functions concurrently, wait for the last, and return their results."""
        if len(functions) == 1:
            return [functions[0]()]
        greenlets = [gevent.spawn(function) for function in functions]
        try:
            gevent.joinall(greenlets)
        finally:
            gevent.killall(greenlets)  # cut by the end of the run: each request makes its record
        return [greenlet.get() for greenlet in greenlets]

    def over(self) -> bool:
        """Whether to send nothing more: the measured time has passed, or this user must stop.

        In a load with stages, it is the time of the stage in which the last requests were taken. A user must stop if a
        stage has fewer users, or Locust's --run-time is over. `take` gives up unsent requests.
        """
        return self._process.sequencer.is_over(self._stage) or self._state == LOCUST_STATE_STOPPING

    def is_used_up(self) -> bool:
        """Whether the load has nothing left to send, or this user must stop."""
        return self.over() or self._process.sequencer.is_used_up(self.load_number)

    def think(self) -> None:
        """Pause as the scenario says; with stock Locust, as this class says. Stop at the end of the load."""
        pause = self.load.think or self.load.think_s or (list(self.think_s) if self._process.is_stock else _NO_PAUSE)
        if pause != _NO_PAUSE:
            self.pause(behaviour.pause_s(pause, self.seed, "think", self._last_index))

    def pause(self, pause_s: float) -> None:
        """Pause, but not beyond the end of the load or of this user."""
        remaining_s = self._process.sequencer.left_s()
        self._sleep(pause_s if remaining_s is None else max(0.0, min(pause_s, remaining_s)))

    def _sleep(self, wait_s: float) -> None:
        """Sleep for a known time, but not beyond the end of this user."""
        self._process.note_wait(wait_s)
        self._wake.wait(wait_s)

    def start(self, group: Group) -> Any:
        """Start as in Locust, and count the end if no process asked for it: the load then has too few users."""

        def note_end(_: object) -> None:
            self._process.recorder.users_gone[self.load_number] += not self._asked_to_stop

        greenlet = super().start(group)
        greenlet.link(note_end)
        return greenlet

    def on_stop(self) -> None:
        if self._unsent and self._process.sequencer.has_stages:  # a surplus user: its stage does not wait for them
            self._give_up_unsent()
        try:
            if sys.exc_info()[0] is StopUser:  # it stops by itself and is not cut
                gevent.joinall(self._background)
        finally:
            gevent.killall(self._background)
            for client in self._idle_clients:
                client.close()

    def stop(self, force: bool = False) -> bool:
        """Stop as in Locust, except for a user that pauses between two tasks.

        Locust would kill it, but it might wake before that and send another request: its state makes it stop instead.
        For the same reason a user that is killed (`force`) is not woken from a pause.
        """
        self._asked_to_stop = True
        if not force:
            self._wake.set()
        if force or self._state != LOCUST_STATE_WAITING:
            return bool(super().stop(force))
        self._state = LOCUST_STATE_STOPPING  # checked after the pause
        return all(greenlet.dead for greenlet in self._background) and bool(super().stop(force=True))

    def _wait_until(self, due_s: float | None, ahead_s: float = 0.0) -> None:
        """Open loop: wait until the request is due. A late user sends at once, and the record shows it."""
        if due_s is not None:
            self._sleep(max(0.0, due_s - ahead_s - time.monotonic()))

    def _fire_request_event(self, answer: Answer) -> None:
        ended_s = answer.chunks_s[-1] if answer.chunks_s else answer.ended_s
        name = self._process.loads[self.load_number].load_name or type(self).__name__
        is_failure = answer.error is not None and answer.error not in CUT
        self._process.listeners.fire(
            self.environment.events.request,
            timed=answer.error != "unfinished",
            request_type="POST",
            name=name if answer.error != "abandoned" else f"{name} (abandoned)",
            response_time=ended_s * 1000,
            response_length=answer.output_tokens or 0,
            # `printable`: Locust writes it into its own CSV files and pages.
            exception=RequestFailed(printable(f"{answer.error}: {answer.message}")) if is_failure else None,
            context={},
            response=None,
        )
