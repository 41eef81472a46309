"""When each step of a conversation is sent: a closed loop by dependency. Nothing here waits, sends or reads a clock.

The caller notes the start of the conversation and the end of each answer, and gets the steps to send with their times.
"""

import heapq
import random
from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from harness.records.records import ReplayedConversation
from harness.workload.agent_traces.context_fit import dependents, with_dependents
from harness.workload.agent_traces.conversation import Conversation, TraceStep


class DelayRule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What becomes of recorded delays."""

    scale: Annotated[float, Meta(ge=0, le=1000)] = 1.0  # 0: no delays
    max_s: Annotated[float, Meta(ge=0)] | None = None  # after scaling

    def applied(self, delay_s: float) -> float:
        scaled = delay_s * self.scale
        return scaled if self.max_s is None else min(scaled, self.max_s)

    def removed_s(self, delay_s: float) -> float:
        """Return the seconds that the rule removes from a delay, or from the longer one that the scale makes of it."""
        return max(delay_s, delay_s * self.scale) - self.applied(delay_s)


class DueStep(NamedTuple):
    """A step to send, and when, on the caller's clock."""

    number: int
    at_s: float


class ReplayCounts(NamedTuple):
    """What became of the steps of a conversation. Each is in exactly one of the first six counts."""

    before_start: int  # recorded before the start inside the trace: not sent
    too_long: int  # left out for the context, with those that depend on them
    ended: int
    failed: int
    open: int  # due or sent without an end, or they depend on such a step
    not_sent: int  # they depend on a step that failed
    removed_s: float  # of the delays of steps that were due
    delays_s: float  # as recorded, of steps that were due


class ConversationReplay:
    """The replay of one conversation."""

    def __init__(
        self,
        conversation: Conversation,
        kept: Collection[int] | None = None,
        rule: DelayRule | None = None,
        offset: float = 0.0,
    ) -> None:
        """kept: the steps that fit into the context; default: all.

        offset: where in the trace to start, as a share of its recorded time (of its steps, where it has no times).
        """
        steps = conversation.steps
        self._steps = steps
        self._rule = rule or DelayRule()
        self._following = dependents(conversation)
        self._conversation = conversation
        kept_steps = frozenset(range(len(steps)) if kept is None else kept)
        self._begin_s, earlier = _start_inside(conversation, kept_steps, offset)
        self._before_start = earlier
        self._left_out = frozenset(range(len(steps))) - kept_steps - earlier
        self._waiting = set(range(len(steps))) - earlier - self._left_out
        self._open: set[int] = set()  # due or sent
        self._ended: set[int] = set()
        self._failed: set[int] = set()
        self._aborted: set[int] = set()
        self._removed_s = self._delays_s = 0.0

    def start(self, at_s: float) -> list[DueStep]:
        """Return the steps that wait for none."""
        ready = sorted(number for number in self._waiting if self._is_ready(number))
        return [self._release(number, at_s, self._first_delay(number)) for number in ready]

    def end(self, number: int, at_s: float, failed: bool = False) -> list[DueStep]:
        """Note the end of a step's answer. Return the steps that waited for it last.

        After a failed step, those that depend on it are never sent. Raises ValueError for a step that is not open.
        """
        if number not in self._open:
            raise ValueError(f"step {number} was not sent, or has ended")
        self._open.remove(number)
        if failed:
            self._failed.add(number)
            new = with_dependents(self._conversation, {number}) & self._waiting
            self._aborted |= new
            self._waiting -= new
            return []
        self._ended.add(number)
        ready = [other for other in self._following.get(number, ()) if other in self._waiting and self._is_ready(other)]
        return [self._release(other, at_s, self._steps[other].delay_s) for other in ready]

    def outcome(self, conversation: int, lap: "Lap") -> ReplayedConversation:
        """Return what became of the steps, as it is stored. `conversation`: its number in the records of requests."""
        counts = self.counts()._asdict()
        return ReplayedConversation(conversation=conversation, place=lap.place, repetition=lap.repetition, **counts)

    def steps_to_cache(self) -> list[int]:
        """Return the last step before the start of each agent that has later ones.

        Their prompts hold what a server's cache had at that moment of the recording.
        """
        later = {self._steps[number].agent for number in self._waiting}
        last = {self._steps[number].agent: number for number in sorted(self._before_start)}
        return [number for agent, number in sorted(last.items()) if agent in later]

    @property
    def is_over(self) -> bool:
        """Whether no step is open. Then none will be: a step is released when the last that it waits for has ended."""
        return not self._open

    def counts(self) -> ReplayCounts:
        return ReplayCounts(
            before_start=len(self._before_start),
            too_long=len(self._left_out),
            ended=len(self._ended),
            failed=len(self._failed),
            open=len(self._open) + len(self._waiting),
            not_sent=len(self._aborted),
            removed_s=self._removed_s,
            delays_s=self._delays_s,
        )

    def _is_ready(self, number: int) -> bool:
        return all(other in self._ended or other in self._before_start for other in self._steps[number].depends_on)

    def _first_delay(self, number: int) -> float:
        """Return the delay of a step that waits for none: of one inside the trace, what is left of it."""
        step = self._steps[number]
        if not self._before_start:
            return step.delay_s
        return 0.0 if step.start_s is None else min(step.delay_s, max(0.0, step.start_s - self._begin_s))

    def _release(self, number: int, at_s: float, delay_s: float) -> DueStep:
        self._waiting.remove(number)
        self._open.add(number)
        self._delays_s += delay_s
        self._removed_s += self._rule.removed_s(delay_s)
        return DueStep(number, at_s + self._rule.applied(delay_s))


def delays_of_longest_chain_s(conversation: Conversation, kept: Collection[int], rule: DelayRule) -> float:
    """Return the time that a conversation takes if each answer takes none: the delays that wait for each other."""
    replay, last_s = ConversationReplay(conversation, kept, rule), 0.0
    waiting = [(due.at_s, due.number) for due in replay.start(0.0)]
    heapq.heapify(waiting)
    while waiting:
        last_s, number = heapq.heappop(waiting)
        for due in replay.end(number, last_s):
            heapq.heappush(waiting, (due.at_s, due.number))
    return last_s


class Lap(NamedTuple):
    """A conversation to replay."""

    place: int  # in the trace
    repetition: int  # 0: it is replayed for the first time; each has a salt of its own
    offset: float  # where to start inside it


def lap_at(index: int, conversations: int, seed: int, starts: Sequence[float] | None = None) -> Lap:
    """Return the conversation that the replay starts as number `index`, from 0, in the order of the trace.

    starts: bounds of the offset; default: the conversation starts at its beginning.
    """
    repetition, place = divmod(index, conversations)
    if starts is None:
        return Lap(place, repetition, 0.0)
    draw = random.Random(f"{seed}:offset:{index}").random()
    return Lap(place, repetition, starts[0] + draw * (starts[1] - starts[0]))


def _start_inside(conversation: Conversation, kept: frozenset[int], offset: float) -> tuple[float, frozenset[int]]:
    """Return the recorded time of a start inside a conversation, and the steps before it.

    At least one step that fits is after it.
    """
    steps = conversation.steps
    order = sorted(steps, key=_start_of) if all(step.start_s is not None for step in steps) else list(steps)
    fitting = [step for step in order if step.number in kept]
    if offset <= 0 or len(fitting) < 2:
        return 0.0, frozenset()
    timed = fitting[-1].start_s is not None and order[0].start_s is not None
    first, last = _start_of(order[0]), _start_of(fitting[-1])
    if timed and last > first:
        begin_s = first + offset * (last - first)
        earlier = {step.number for step in order if _start_of(step) < begin_s}
    else:
        begin_s = 0.0
        earlier = {step.number for step in order[: int(offset * len(fitting))]}
    todo = list(earlier)
    while todo:  # what they depend on has been sent, too
        new = [other for other in steps[todo.pop()].depends_on if other not in earlier]
        earlier.update(new)
        todo += new
    return begin_s, frozenset(earlier & kept)


def _start_of(step: TraceStep) -> float:
    return step.start_s or 0.0
