"""Which request of the sequence comes next: one small shared file for all load processes of a machine.

The file holds one JSON line and is only touched under flock. The kernel gives the lock back when a process dies.
The monotonic clock in it is the machine's, so its times mean the same to every process. Behind the line lie, of a
warm-up that goes on until the server is steady, two doubles for each of its answers, in the order in which they ended.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import msgspec

from harness.scenario.arrivals import Due
from harness.scenario.steady import Steadiness

Phase = Literal["warmup", "measured"]
_WIDTH = 400  # of the line, padded, so that a write never leaves half of an older one
_ANSWER = struct.Struct("<dd")
# Scheduled warm-up: so long before its time a ticket is handed out, for it is not known how many there are.
_LEAD_S = 0.5


class Part(NamedTuple):
    """The part of the sequence that one machine sends. No machine asks another.

    The sequence is cut into blocks of what belongs together, a burst or a conversation. Machine `number` of `of` takes
    the blocks whose number leaves that remainder: each request is in exactly one part, and all parts are the whole
    sequence. A place in a part is counted from 0, as if there were no other machine.
    """

    number: int = 0
    of: int = 1
    block: int = 1  # requests that are sent together

    def at(self, place: int) -> int:
        """The place in the whole sequence."""
        block, inside = divmod(place, self.block)
        return (block * self.of + self.number) * self.block + inside

    def share(self, whole: int) -> int:
        """How many of the first `whole` requests of the sequence are in this part."""
        blocks, rest = divmod(whole, self.block)
        rounds, more = divmod(blocks, self.of)
        return (rounds + (self.number < more)) * self.block + (rest if self.number == more else 0)

    def turn(self, number: int) -> int:
        """The place among all of what comes singly, such as an arrival or a user."""
        return number * self.of + self.number


WHOLE = Part()


class Ticket(msgspec.Struct, frozen=True):
    """The right to send one request."""

    phase: Phase
    index: int  # measured: 0, 1, 2 ...; warm-up: -1, -2, -3 ..., so that no prompt of it comes back
    due_s: float | None = None  # open loop: when to send it, on the monotonic clock
    stage: int = 0  # of a load that has several


class Seen(NamedTuple):
    """What a warm-up looks at of an answer."""

    sent_s: float  # monotonic clock
    ttft_s: float  # NaN: not known
    per_token_s: float  # end-to-end latency / output tokens; of an answer whose tokens nobody counted, that of all


class Plan(NamedTuple):
    """How much there is to do. None means without limit."""

    requests: int | None = None  # measured requests
    duration_s: float | None = None  # measured time
    warmup_requests: int = 0  # warm-up before that: requests, then time
    warmup_s: float = 0.0
    steady: Steadiness | None = None  # or until the server is steady
    ramp_s: float = 0.0  # until all users are there it is warm-up too, where there is any
    schedule: Due | None = None  # open loop: when each burst or conversation begins
    warmup_schedule: Due | None = None  # likewise, of the warm-up
    waits: bool = False  # the warm-up goes on until somebody says that exactly the users are there who should be
    part: Part = WHOLE  # of all the above that is this machine's to do


class Counts(msgspec.Struct, kw_only=True):
    """What the file holds."""

    started_s: float | None = None  # first ticket
    measured_s: float | None = None  # first measured ticket
    users: int = 0
    warmup_taken: int = 0
    measured_taken: int = 0
    warmup_arrived: int = 0
    arrived: int = 0  # bursts or conversations that were handed out
    warmup_due_s: float | None = None  # of the last warm-up tickets, where they are scheduled
    settled: int = 0  # taken tickets whose request has ended, in either phase
    there_s: float | None = None  # where that is waited for: when exactly the users were there who should be
    early: int = 0  # warm-up tickets taken before
    seen: int = 0  # answers that the warm-up looked at
    steady: bool = False  # as they say


class Tickets:
    """The counter, as one process sees it. Made after the fork: forked copies of an open file share its lock."""

    def __init__(self, path: str, plan: Plan) -> None:
        self.held = False  # with a warm-up: it goes on until this is False again; of a part of an open loop, all waits
        self.begin_s: float | None = None  # of such a part: when it is measured from, the same moment on all machines
        self.early = False  # `take` gave none, because it is too early for the next one or for the end
        self._plan = plan
        self._requests = None if plan.requests is None else plan.part.share(plan.requests)
        self._warmup_requests = plan.part.share(plan.warmup_requests)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._decoder = msgspec.json.Decoder(Counts)

    def close(self) -> None:
        os.close(self._file)

    def user(self) -> int:
        """The next user's number, from 0."""
        with self._counts() as counts:
            counts.users += 1
            return self._plan.part.turn(counts.users - 1)

    def take(self, most: int = 1) -> list[Ticket]:
        """The next `most` tickets, all of one phase and in order. None left: an empty list, now and ever after; in a
        scheduled warm-up, until the next one is near.

        They are one burst or one conversation. Warm-up is never cut short, but sends some more where it has to: the
        server is to meet the concurrency to come. Only the last measured ones are cut, to the number planned.
        """
        now_s = time.monotonic()
        plan, self.early = self._plan, False
        with self._counts() as counts:
            if counts.started_s is None:
                counts.started_s = now_s
            if self._warming_up(counts, now_s, held=self.held):
                return self._take_warmup(counts, now_s, most)
            if counts.measured_s is None and plan.schedule is not None and plan.part.of > 1:
                if self.held:
                    self.early = True
                    return []
                if self._is_before_begin(counts):
                    return self._take_warmup(counts, now_s, most)
                counts.measured_s = self.begin_s
            if counts.measured_s is None:
                counts.measured_s = max(now_s, counts.warmup_due_s or now_s)
            if plan.duration_s is not None and now_s >= counts.measured_s + plan.duration_s:
                return []
            first = counts.measured_taken
            number = most if self._requests is None else max(0, min(most, self._requests - first))
            due_s = None
            if plan.schedule is not None and number:
                after_s = plan.schedule.at(plan.part.turn(counts.arrived))
                if after_s is None or (plan.duration_s is not None and after_s >= plan.duration_s):
                    self.early = plan.duration_s is not None
                    return []
                due_s = counts.measured_s + after_s
                counts.arrived += 1
            counts.measured_taken += number
            return [Ticket("measured", plan.part.at(first + i), due_s) for i in range(number)]

    def _take_warmup(self, counts: Counts, now_s: float, most: int) -> list[Ticket]:
        plan, due_s = self._plan, None
        if plan.warmup_schedule is not None and counts.started_s is not None:
            after_s = plan.warmup_schedule.at(plan.part.turn(counts.warmup_arrived))
            due_s = now_s if after_s is None else counts.started_s + after_s
            if due_s > now_s + _LEAD_S:
                self.early = True
                return []
            counts.warmup_arrived += 1
            counts.warmup_due_s = due_s
        first = counts.warmup_taken
        counts.warmup_taken += most
        return [Ticket("warmup", -1 - plan.part.at(first + i), due_s) for i in range(most)]

    def _is_before_begin(self, counts: Counts) -> bool:
        """Whether the next of a warm-up is due before the measurement begins."""
        schedule, started_s = self._plan.warmup_schedule, counts.started_s
        if self.begin_s is None or schedule is None or started_s is None or not counts.warmup_taken:
            return False
        after_s = schedule.at(self._plan.part.turn(counts.warmup_arrived))
        return after_s is not None and started_s + after_s < self.begin_s

    def as_sent(self, ticket: Ticket) -> Ticket:
        """As it is when its request is sent now. Of fixed time in a closed loop what is sent in that time is measured,
        the later turns of a conversation that began in the warm-up as well: else the first turns alone would count.
        It is such a turn, too, that may begin the measured time: nobody waits for the end of a conversation.
        """
        timed = self._plan.duration_s is not None and self._plan.schedule is None
        if not timed or ticket.phase == "measured":
            return ticket
        now_s = time.monotonic()
        with self._counts() as counts:
            if counts.measured_s is None:
                answered = counts.settled - counts.early
                if answered < self._warmup_requests or self._warming_up(counts, now_s, held=self.held):
                    return ticket
                counts.measured_s = now_s
        return msgspec.structs.replace(ticket, phase="measured")

    def settle(self, number: int = 1, seen: Seen | None = None) -> None:
        """`number` taken tickets are done with, however their requests ended. `seen`: an answer of the warm-up."""
        with self._counts() as counts:
            counts.settled += number
            if seen is not None and self._plan.steady is not None and counts.measured_s is None:
                self._look_at(seen, counts, self._plan.steady)

    def _look_at(self, seen: Seen, counts: Counts, rule: Steadiness) -> None:
        there_s = self._there_s(counts)
        if counts.steady or there_s is None or seen.sent_s < there_s:
            return  # not the concurrency to come
        os.pwrite(self._file, _ANSWER.pack(seen.ttft_s, seen.per_token_s), _WIDTH + counts.seen * _ANSWER.size)
        counts.seen += 1
        if rule.looks(counts.seen):
            raw = os.pread(self._file, counts.seen * _ANSWER.size, _WIDTH)
            counts.steady = rule.is_steady(list(_ANSWER.iter_unpack(raw)))

    def steady(self) -> bool | None:
        """Whether the warm-up found the server steady before its bound; None where nobody asked, or not yet known."""
        counts = self._look()
        known = self._plan.steady is not None and (counts.steady or counts.measured_s is not None)
        return counts.steady if known else None

    def left_s(self) -> float | None:
        """Until the end of the measured time: negative after it, None while that is not known."""
        return self._left_s(self._look())

    def unmeasured_s(self) -> float | None:
        """Of the measured time, what has not passed: all of it before it has begun. None: no time is set."""
        left_s = self.left_s()
        return self._plan.duration_s if left_s is None else max(0.0, left_s)

    def finished(self) -> bool:
        """Whether no ticket is left and every request has ended."""
        counts = self._look()
        if counts.settled < counts.warmup_taken + counts.measured_taken:
            return False
        schedule = self._plan.schedule if self._plan.duration_s is None else None  # a time asked for is waited for
        if schedule is not None and schedule.at(self._plan.part.turn(counts.arrived)) is None:
            return True  # nobody comes any more
        if self._requests is not None:
            return counts.measured_taken >= self._requests
        left_s = self._left_s(counts)
        return left_s is not None and left_s <= 0

    def warmed_up(self) -> bool:
        """Whether the warm-up that was planned has been handed out."""
        return not self._warming_up(self._look(), time.monotonic(), held=False)

    def _left_s(self, counts: Counts) -> float | None:
        if self._plan.duration_s is None or counts.measured_s is None:
            return None
        return counts.measured_s + self._plan.duration_s - time.monotonic()

    def _warming_up(self, counts: Counts, now_s: float, *, held: bool) -> bool:
        plan, there_s = self._plan, self._there_s(counts)
        if counts.measured_s is not None:
            return False
        if not (plan.warmup_requests or plan.warmup_s or plan.steady):
            return plan.waits and there_s is None
        if there_s is None:
            return True
        if plan.steady is not None:
            return held or not (counts.steady or self._is_over(plan.steady, counts, there_s, now_s))
        taken = counts.warmup_taken - counts.early
        return held or now_s < there_s + plan.warmup_s or taken < self._warmup_requests

    def _there_s(self, counts: Counts) -> float | None:
        """When all users were there; None: not known yet."""
        if self._plan.waits or counts.started_s is None:
            return counts.there_s
        return counts.started_s + self._plan.ramp_s

    def users_are_there(self) -> None:
        """Exactly those who should be: what the plan waits for."""
        with self._counts() as counts:
            if counts.there_s is None:
                counts.there_s, counts.early = time.monotonic(), counts.warmup_taken

    def _is_over(self, rule: Steadiness, counts: Counts, there_s: float, now_s: float) -> bool:
        """The bound of a warm-up until the server is steady."""
        if now_s >= there_s + rule.most_s:
            return True
        taken = counts.warmup_taken - counts.early
        return rule.most_requests is not None and taken >= self._plan.part.share(rule.most_requests)

    @contextmanager
    def _counts(self) -> Iterator[Counts]:
        """The counts, for one process at a time, and written back unless something went wrong."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            counts = self._read()
            yield counts
            os.pwrite(self._file, msgspec.json.encode(counts).ljust(_WIDTH - 1) + b"\n", 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _look(self) -> Counts:
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:
            return self._read()
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> Counts:
        raw = os.pread(self._file, _WIDTH, 0)
        return self._decoder.decode(raw) if raw else Counts()
