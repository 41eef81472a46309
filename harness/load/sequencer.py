"""Hand out the next requests of the sequence: one small shared file for all load processes of a machine.

The file holds one JSON line and is only accessed under flock. The kernel releases the lock when a process dies.
Its times are on the machine's monotonic clock, which all processes share. After the line, a warm-up that runs until
the server is steady keeps two doubles for each of its responses, in the order of their ends.

A load with stages has one such file for each stage. A stage is measured from the moment at which exactly its users
run; requests before that, and the warm-up of the scenario, are its warm-up. A stage does not wait for the requests in
flight at its end.
"""

import fcntl
import logging
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import gevent
import msgspec

from harness.job import Job, warmup_done_file
from harness.scenario.plan import Due, Steadiness

Phase = Literal["warmup", "measured"]
_WIDTH = 400  # of the line, padded, so that a write never leaves half of an older one
_ANSWER = struct.Struct("<dd")
# A slot of a scheduled warm-up is handed out so long before its time: the number of slots is not known.
_LEAD_S = 0.5


class Part(NamedTuple):
    """The part of the sequence that one machine sends. It needs no other machine to know it.

    The sequence is cut into blocks: a burst, or a conversation. Machine `number` of `of` takes each block whose number
    modulo `of` is `number`, so each request is in exactly one part. Places in a part count from 0.
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
        """Return the place, in the whole sequence, of what comes one by one: an arrival, or a user."""
        return number * self.of + self.number


WHOLE = Part()


class Slot(msgspec.Struct, frozen=True):
    """The place of one request in the sequence: the right to send it."""

    phase: Phase
    index: int  # measured: 0, 1, 2 ...; warm-up: -1, -2, -3 ..., so that its prompts are never measured
    due_s: float | None = None  # open loop: when to send it, on the monotonic clock
    stage: int = 0  # of a load that has several


class WarmupSample(NamedTuple):
    """The numbers of an answer that decide whether the server is steady."""

    sent_s: float  # monotonic clock
    ttft_s: float  # NaN: not known
    per_token_s: float  # end-to-end latency / output tokens; without a token count the whole latency


class Plan(NamedTuple):
    """The amount of work. None: no limit."""

    requests: int | None = None  # measured requests
    duration_s: float | None = None  # measured time
    warmup_requests: int = 0  # warm-up before that: requests, then time
    warmup_s: float = 0.0
    steady: Steadiness | None = None  # or until the server is steady
    ramp_s: float = 0.0  # until all users have started, if there is a warm-up, it goes on
    schedule: Due | None = None  # open loop: the start of each burst or conversation
    warmup_schedule: Due | None = None  # likewise, of the warm-up
    waits: bool = False  # the warm-up goes on until exactly the planned users run
    part: Part = WHOLE  # this machine's part of all the above


class Counts(msgspec.Struct, kw_only=True):
    started_s: float | None = None  # first slot
    measured_s: float | None = None  # first measured slot
    users: int = 0
    warmup_taken: int = 0
    measured_taken: int = 0
    warmup_arrived: int = 0
    arrived: int = 0  # bursts or conversations handed out
    warmup_due_s: float | None = None  # of the last warm-up slots, where they are scheduled
    settled: int = 0  # taken slots whose request has ended, in either phase
    there_s: float | None = None  # if a stage waits for it: when exactly the planned users ran
    early: int = 0  # warm-up slots taken before
    seen: int = 0  # answers that the warm-up has checked
    steady: bool = False  # the result of these checks


class Sequencer:
    """The counter, as one process sees it. Made after the fork: forked copies of an open file share its lock."""

    def __init__(self, path: str, plan: Plan) -> None:
        self.on_hold = False  # the warm-up goes on until this is False; a part of an open loop waits
        self.begin_s: float | None = None  # start of the measurement of such a part, the same on all machines
        self.early = False  # `take` returned no slot because it is too early
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

    def take(self, max_slots: int = 1) -> list[Slot]:
        """Return the next `max_slots` slots, of one phase and in order: one burst, or one conversation.

        An empty list means that none is left, or in a scheduled warm-up that the next one is not near yet. A warm-up
        group is never cut, so that the server meets the full concurrency. The last measured group is cut to the plan.
        """
        now_s = time.monotonic()
        plan, self.early = self._plan, False
        with self._counts() as counts:
            if counts.started_s is None:
                counts.started_s = now_s
            if self._warming_up(counts, now_s, on_hold=self.on_hold):
                return self._take_warmup(counts, now_s, max_slots)
            if counts.measured_s is None and plan.schedule is not None and plan.part.of > 1:
                if self.on_hold:
                    self.early = True
                    return []
                if self._is_before_begin(counts):
                    return self._take_warmup(counts, now_s, max_slots)
                counts.measured_s = self.begin_s
            if counts.measured_s is None:
                counts.measured_s = max(now_s, counts.warmup_due_s or now_s)
            if plan.duration_s is not None and now_s >= counts.measured_s + plan.duration_s:
                return []
            first = counts.measured_taken
            number = max_slots if self._requests is None else max(0, min(max_slots, self._requests - first))
            due_s = None
            if plan.schedule is not None and number:
                after_s = plan.schedule.at(plan.part.turn(counts.arrived))
                if after_s is None or (plan.duration_s is not None and after_s >= plan.duration_s):
                    self.early = plan.duration_s is not None
                    return []
                due_s = counts.measured_s + after_s
                counts.arrived += 1
            counts.measured_taken += number
            return [Slot("measured", plan.part.at(first + i), due_s) for i in range(number)]

    def _take_warmup(self, counts: Counts, now_s: float, max_slots: int) -> list[Slot]:
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
        counts.warmup_taken += max_slots
        return [Slot("warmup", -1 - plan.part.at(first + i), due_s) for i in range(max_slots)]

    def _is_before_begin(self, counts: Counts) -> bool:
        """Whether the next warm-up slot is due before the measurement starts."""
        schedule, started_s = self._plan.warmup_schedule, counts.started_s
        if self.begin_s is None or schedule is None or started_s is None or not counts.warmup_taken:
            return False
        after_s = schedule.at(self._plan.part.turn(counts.warmup_arrived))
        return after_s is not None and started_s + after_s < self.begin_s

    def as_sent(self, slot: Slot) -> Slot:
        """Return the slot of a request that is sent now.

        A closed loop of fixed time measures all its requests, also the later turns of a conversation that started in
        the warm-up: else only first turns would count. Such a turn may also start the measured time.
        """
        timed = self._plan.duration_s is not None and self._plan.schedule is None
        if not timed or slot.phase == "measured":
            return slot
        now_s = time.monotonic()
        with self._counts() as counts:
            if counts.measured_s is None:
                answered = counts.settled - counts.early
                if answered < self._warmup_requests or self._warming_up(counts, now_s, on_hold=self.on_hold):
                    return slot
                counts.measured_s = now_s
        return msgspec.structs.replace(slot, phase="measured")

    def settle(self, number: int = 1, seen: WarmupSample | None = None) -> None:
        """Count `number` slots as settled, however their requests ended. `seen`: an answer of the warm-up."""
        with self._counts() as counts:
            counts.settled += number
            if seen is not None and self._plan.steady is not None and counts.measured_s is None:
                self._note_sample(seen, counts, self._plan.steady)

    def _note_sample(self, seen: WarmupSample, counts: Counts, rule: Steadiness) -> None:
        there_s = self._users_complete_s(counts)
        if counts.steady or there_s is None or seen.sent_s < there_s:
            return  # not the full concurrency yet
        os.pwrite(self._file, _ANSWER.pack(seen.ttft_s, seen.per_token_s), _WIDTH + counts.seen * _ANSWER.size)
        counts.seen += 1
        if rule.is_check_due(counts.seen):
            raw = os.pread(self._file, counts.seen * _ANSWER.size, _WIDTH)
            counts.steady = rule.is_steady(list(_ANSWER.iter_unpack(raw)))

    def steady(self) -> bool | None:
        """Whether the warm-up found the server steady before its limit; None: no such warm-up, or not known."""
        counts = self._read_locked()
        known = self._plan.steady is not None and (counts.steady or counts.measured_s is not None)
        return counts.steady if known else None

    def left_s(self) -> float | None:
        """Return the seconds until the end of the measured time: negative after it, None while unknown."""
        return self._left_s(self._read_locked())

    def unmeasured_s(self) -> float | None:
        """Return the part of the measured time that has not passed. None: no time is set."""
        left_s = self.left_s()
        return self._plan.duration_s if left_s is None else max(0.0, left_s)

    def finished(self) -> bool:
        """Whether no slot is left and every request has ended."""
        counts = self._read_locked()
        if counts.settled < counts.warmup_taken + counts.measured_taken:
            return False
        schedule = self._plan.schedule if self._plan.duration_s is None else None  # a fixed time is always waited for
        if schedule is not None and schedule.at(self._plan.part.turn(counts.arrived)) is None:
            return True  # no more arrivals
        if self._requests is not None:
            return counts.measured_taken >= self._requests
        left_s = self._left_s(counts)
        return left_s is not None and left_s <= 0

    def warmed_up(self) -> bool:
        """Whether the planned warm-up has been handed out."""
        return not self._warming_up(self._read_locked(), time.monotonic(), on_hold=False)

    def _left_s(self, counts: Counts) -> float | None:
        if self._plan.duration_s is None or counts.measured_s is None:
            return None
        return counts.measured_s + self._plan.duration_s - time.monotonic()

    def _warming_up(self, counts: Counts, now_s: float, *, on_hold: bool) -> bool:
        plan, there_s = self._plan, self._users_complete_s(counts)
        if counts.measured_s is not None:
            return False
        if not (plan.warmup_requests or plan.warmup_s or plan.steady):
            return plan.waits and there_s is None
        if there_s is None:
            return True
        if plan.steady is not None:
            return on_hold or not (counts.steady or self._is_over(plan.steady, counts, there_s, now_s))
        taken = counts.warmup_taken - counts.early
        return on_hold or now_s < there_s + plan.warmup_s or taken < self._warmup_requests

    def _users_complete_s(self, counts: Counts) -> float | None:
        """When all users ran; None: not known yet."""
        if self._plan.waits or counts.started_s is None:
            return counts.there_s
        return counts.started_s + self._plan.ramp_s

    def set_users_complete(self) -> None:
        """Note that exactly the planned users run."""
        with self._counts() as counts:
            if counts.there_s is None:
                counts.there_s, counts.early = time.monotonic(), counts.warmup_taken

    def _is_over(self, rule: Steadiness, counts: Counts, there_s: float, now_s: float) -> bool:
        """Whether a warm-up that waits for a steady server has reached its limit."""
        if now_s >= there_s + rule.max_s:
            return True
        taken = counts.warmup_taken - counts.early
        return rule.max_requests is not None and taken >= self._plan.part.share(rule.max_requests)

    @contextmanager
    def _counts(self) -> Iterator[Counts]:
        """Lock the counts for this process; write them back unless an exception comes."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            counts = self._read()
            yield counts
            os.pwrite(self._file, msgspec.json.encode(counts).ljust(_WIDTH - 1) + b"\n", 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read_locked(self) -> Counts:
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:
            return self._read()
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> Counts:
        raw = os.pread(self._file, _WIDTH, 0)
        return self._decoder.decode(raw) if raw else Counts()


logger = logging.getLogger(__name__)

POLL_S = 0.05


def until(so: Callable[[], object], max_s: float = math.inf, poll_s: float = POLL_S) -> None:
    """Poll until `so` is true or the time is over."""
    end_s = time.monotonic() + max_s
    while not so() and time.monotonic() < end_s:
        gevent.sleep(poll_s)


class StageSequencer:
    """The counters of all stages, as one process sees them. Made after the fork."""

    def __init__(self, stages: Sequence[tuple[str, Plan, int]]) -> None:
        """`stages`: of each the path of its counter, its plan, and its users."""
        self.several = len(stages) > 1  # whether the number of users changes
        self.stages = [Sequencer(path, plan._replace(waits=self.several)) for path, plan, _ in stages]
        self._users = [users for *_, users in stages]
        self._now = 0

    def hold(self) -> None:
        """Keep each stage in its warm-up until its `on_hold` is False."""
        for stage in self.stages:
            stage.on_hold = True

    def close(self) -> None:
        for stage in self.stages:
            stage.close()

    def user(self) -> int:
        return self.stages[0].user()

    def take(self, max_slots: int = 1) -> list[Slot]:
        stage = self.stage()
        taken = self.stages[stage].take(max_slots)
        if not taken and stage < self.stage():
            return self.take(max_slots)
        return [msgspec.structs.replace(slot, stage=stage) for slot in taken] if stage else taken

    def early(self) -> bool:
        return self.stages[self._now].early

    def stage(self) -> int:
        """The number of the current stage, or of the last."""
        while self._now < len(self.stages) - 1 and self.over(self._now):
            self._now += 1
        return self._now

    def over(self, stage: int) -> bool:
        """Whether the measured time of a stage has passed."""
        left_s = self.stages[stage].left_s()
        return left_s is not None and left_s <= 0

    def left_s(self) -> float | None:
        return self.stages[-1].left_s()

    def unmeasured_s(self) -> list[float | None]:
        return [stage.unmeasured_s() for stage in self.stages]

    def finished(self) -> bool:
        return all(stage.finished() for stage in reversed(self.stages))

    def wait_for_end(self, drain_s: float) -> None:
        """Fixed work: for its last request. Fixed time: for what is in flight at its end, but no longer than that."""

        def too_late() -> bool:
            left_s = self.left_s()
            return left_s is not None and left_s < -drain_s

        until(lambda: self.finished() or too_late())
        if not self.finished():
            logger.info("cutting what has not finished %g s after the end", drain_s)

    def users(self) -> int:
        return self._users[self.stage()]

    def set_users_complete(self) -> None:
        self.stages[self.stage()].set_users_complete()


def start_barrier(job: Job, sequencer: StageSequencer) -> None:
    """Hold the warm-up of a load of a mix until all loads are warm, so that all are measured from the same moment.

    Each load has its own load processes or its own master. A file of each other load shows that its warm-up is over. To
    be called before the first request.
    """
    sequencer.hold()
    gevent.spawn(_wait, job, sequencer)


def all_warm(job: Job) -> bool:
    """Note that the warm-up of this load is over. Return whether those of the other loads of its mix are."""
    if job.concurrent_loads:
        warmup_done_file(job.counter_path).touch()
    return all(warmup_done_file(path).exists() for path in job.concurrent_loads)


def _wait(job: Job, sequencer: StageSequencer) -> None:
    until(sequencer.stages[0].warmed_up)
    until(lambda: all_warm(job))
    sequencer.stages[0].on_hold = False
