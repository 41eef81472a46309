"""Hand out the next requests of the sequence to all load processes of a machine, which share one small counter file.

The file holds one JSON line, with times on the monotonic clock of the machine. It is only accessed under flock, which
the kernel releases when a process dies. A warm-up that runs until the server is steady stores two doubles for each of
its answers after the line, in the order in which the answers ended.

A load with stages has one such file for each stage. The measurement of a stage starts when exactly its users run and
the scenario's warm-up is over; earlier requests are its warm-up. A stage does not wait for requests in flight at its
end.
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
_LINE_BYTES = 400  # the line is padded, so that a write never leaves a part of a longer one
_SAMPLE = struct.Struct("<dd")
_MAX_AHEAD_S = 0.5  # a slot of a scheduled warm-up is handed out at most so long before it is due


class Part(NamedTuple):
    """The part of the sequence that one machine sends, which it knows without asking other machines.

    The sequence is cut into blocks: bursts or conversations. The machines take the blocks in turn, so each request is
    in exactly one part. Places in a part count from 0.
    """

    machine: int = 0
    machines: int = 1
    block_size: int = 1  # requests that are sent together

    def index_at(self, place: int) -> int:
        """Return the index in the whole sequence of the request at this place of the part."""
        block, offset = divmod(place, self.block_size)
        return (block * self.machines + self.machine) * self.block_size + offset

    def count_of(self, total: int) -> int:
        """Return how many of the first `total` requests of the sequence are in this part."""
        blocks, rest = divmod(total, self.block_size)
        rounds, more = divmod(blocks, self.machines)
        return (rounds + (self.machine < more)) * self.block_size + (rest if self.machine == more else 0)

    def global_number(self, number: int) -> int:
        """Return the number among all machines of this machine's arrival, or user, `number`."""
        return number * self.machines + self.machine


WHOLE = Part()


class Slot(msgspec.Struct, frozen=True):
    """The place of one request in the sequence: the right to send it."""

    phase: Phase
    index: int  # measured: 0, 1, 2 ...; warm-up: -1, -2, -3 ..., so that its prompts are never measured
    due_s: float | None = None  # open loop: when to send it, on the monotonic clock
    stage: int = 0


class WarmupSample(NamedTuple):
    """The numbers of an answer that decide whether the server is steady."""

    sent_s: float  # monotonic clock
    ttft_s: float  # NaN: unknown
    per_token_s: float  # end-to-end latency / output tokens; the latency if the number of tokens is unknown


class Plan(NamedTuple):
    """The amount of work. None: no limit."""

    requests: int | None = None  # measured requests
    duration_s: float | None = None  # measured time
    warmup_requests: int = 0  # the warm-up lasts for so many requests and so long ...
    warmup_s: float = 0.0
    steady: Steadiness | None = None  # ... or until the server is steady
    ramp_s: float = 0.0  # a warm-up also lasts until all users have started
    schedule: Due | None = None  # open loop: when each burst or conversation starts
    warmup_schedule: Due | None = None  # the same for the warm-up
    waits_for_users: bool = False  # the warm-up lasts until `set_users_complete` is called
    part: Part = WHOLE  # this machine's part of all requests


class Counts(msgspec.Struct, kw_only=True):
    """The contents of the counter file. Times are monotonic."""

    started_s: float | None = None  # when the first slot was taken
    measured_s: float | None = None  # start of the measurement
    users: int = 0
    warmup_taken: int = 0  # slots
    measured_taken: int = 0  # slots
    warmup_arrived: int = 0  # bursts or conversations handed out
    arrived: int = 0  # the same for the measurement
    warmup_due_s: float | None = None  # due time of the last slots of a scheduled warm-up
    settled: int = 0  # taken slots whose request has ended, in either phase
    users_complete_s: float | None = None  # see Plan.waits_for_users
    early_warmup: int = 0  # warm-up slots taken before that
    sample_count: int = 0  # answers of the warm-up that were checked
    steady: bool = False  # whether these were steady


class Sequencer:
    """The counter file in one process. Create it after the fork: forked copies of an open file share its lock."""

    def __init__(self, path: str, plan: Plan) -> None:
        self.on_hold = False  # while True the warm-up continues; on one of several machines, an open loop waits
        self.begin_s: float | None = None  # start of the measurement in the latter case, the same on all machines
        self.early = False  # `take` returned no slot because it is too early
        self._plan = plan
        self._requests = None if plan.requests is None else plan.part.count_of(plan.requests)
        self._warmup_requests = plan.part.count_of(plan.warmup_requests)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._decoder = msgspec.json.Decoder(Counts)

    def close(self) -> None:
        os.close(self._file)

    def add_user(self) -> int:
        """Return the number of a new user, from 0."""
        with self._locked_counts() as counts:
            counts.users += 1
            return self._plan.part.global_number(counts.users - 1)

    def take(self, max_slots: int = 1) -> list[Slot]:
        """Return the next `max_slots` slots, of one phase and in order: one burst, or one conversation.

        Return none if no slot is left, or if it is too early for the next (see `early`). Groups of the warm-up are
        never shortened, so that the server has the full concurrency. The last measured group is shortened to the plan.
        """
        now_s = time.monotonic()
        plan, self.early = self._plan, False
        with self._locked_counts() as counts:
            if counts.started_s is None:
                counts.started_s = now_s
            if self._is_warming_up(counts, now_s, on_hold=self.on_hold):
                return self._take_warmup(counts, now_s, max_slots)
            if counts.measured_s is None and plan.schedule is not None and plan.part.machines > 1:
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
                after_s = plan.schedule.at(plan.part.global_number(counts.arrived))
                if after_s is None or (plan.duration_s is not None and after_s >= plan.duration_s):
                    self.early = plan.duration_s is not None
                    return []
                due_s = counts.measured_s + after_s
                counts.arrived += 1
            counts.measured_taken += number
            return [Slot("measured", plan.part.index_at(first + i), due_s) for i in range(number)]

    def _take_warmup(self, counts: Counts, now_s: float, max_slots: int) -> list[Slot]:
        plan, due_s = self._plan, None
        if plan.warmup_schedule is not None and counts.started_s is not None:
            after_s = plan.warmup_schedule.at(plan.part.global_number(counts.warmup_arrived))
            due_s = now_s if after_s is None else counts.started_s + after_s
            if due_s > now_s + _MAX_AHEAD_S:
                self.early = True
                return []
            counts.warmup_arrived += 1
            counts.warmup_due_s = due_s
        first = counts.warmup_taken
        counts.warmup_taken += max_slots
        return [Slot("warmup", -1 - plan.part.index_at(first + i), due_s) for i in range(max_slots)]

    def _is_before_begin(self, counts: Counts) -> bool:
        """Whether the next warm-up slot is due before the measurement starts."""
        schedule, started_s = self._plan.warmup_schedule, counts.started_s
        if self.begin_s is None or schedule is None or started_s is None or not counts.warmup_taken:
            return False
        after_s = schedule.at(self._plan.part.global_number(counts.warmup_arrived))
        return after_s is not None and started_s + after_s < self.begin_s

    def slot_when_sent(self, slot: Slot) -> Slot:
        """Return the slot of a request that is sent now: a warm-up slot may have become a measured one.

        A closed loop of fixed time also measures the later turns of conversations that started in the warm-up:
        otherwise it would begin with first turns only. Such a turn may also start the measured time.
        """
        is_timed = self._plan.duration_s is not None and self._plan.schedule is None
        if not is_timed or slot.phase == "measured":
            return slot
        now_s = time.monotonic()
        with self._locked_counts() as counts:
            if counts.measured_s is None:
                answered = counts.settled - counts.early_warmup
                if answered < self._warmup_requests or self._is_warming_up(counts, now_s, on_hold=self.on_hold):
                    return slot
                counts.measured_s = now_s
        return msgspec.structs.replace(slot, phase="measured")

    def settle(self, count: int = 1, sample: WarmupSample | None = None) -> None:
        """Count `count` slots as settled, however their requests ended. `sample` is of an answer of the warm-up."""
        with self._locked_counts() as counts:
            counts.settled += count
            if sample is not None and self._plan.steady is not None and counts.measured_s is None:
                self._note_sample(sample, counts, self._plan.steady)

    def _note_sample(self, sample: WarmupSample, counts: Counts, rule: Steadiness) -> None:
        users_complete_s = self._users_complete_s(counts)
        if counts.steady or users_complete_s is None or sample.sent_s < users_complete_s:
            return  # sent before the full concurrency
        numbers = _SAMPLE.pack(sample.ttft_s, sample.per_token_s)
        os.pwrite(self._file, numbers, _LINE_BYTES + counts.sample_count * _SAMPLE.size)
        counts.sample_count += 1
        if rule.is_check_due(counts.sample_count):
            raw = os.pread(self._file, counts.sample_count * _SAMPLE.size, _LINE_BYTES)
            counts.steady = rule.is_steady(list(_SAMPLE.iter_unpack(raw)))

    def steady(self) -> bool | None:
        """Whether the warm-up found the server steady before its limit; None: no such warm-up, or not known yet."""
        counts = self._read_locked()
        is_known = self._plan.steady is not None and (counts.steady or counts.measured_s is not None)
        return counts.steady if is_known else None

    def left_s(self) -> float | None:
        """Return the seconds until the end of the measured time: negative after it, None while unknown."""
        return self._left_s(self._read_locked())

    def unmeasured_s(self) -> float | None:
        """Return the part of the measured time that has not passed; None for a load without a fixed time."""
        left_s = self.left_s()
        return self._plan.duration_s if left_s is None else max(0.0, left_s)

    def is_finished(self) -> bool:
        """Whether no slot is left and every request has ended."""
        counts = self._read_locked()
        if counts.settled < counts.warmup_taken + counts.measured_taken:
            return False
        schedule = self._plan.schedule if self._plan.duration_s is None else None  # a fixed time always passes in full
        if schedule is not None and schedule.at(self._plan.part.global_number(counts.arrived)) is None:
            return True  # no more arrivals
        if self._requests is not None:
            return counts.measured_taken >= self._requests
        left_s = self._left_s(counts)
        return left_s is not None and left_s <= 0

    def is_warmed_up(self) -> bool:
        """Whether the planned warm-up has been handed out."""
        return not self._is_warming_up(self._read_locked(), time.monotonic(), on_hold=False)

    def _left_s(self, counts: Counts) -> float | None:
        if self._plan.duration_s is None or counts.measured_s is None:
            return None
        return counts.measured_s + self._plan.duration_s - time.monotonic()

    def _is_warming_up(self, counts: Counts, now_s: float, *, on_hold: bool) -> bool:
        plan, users_complete_s = self._plan, self._users_complete_s(counts)
        if counts.measured_s is not None:
            return False
        if not (plan.warmup_requests or plan.warmup_s or plan.steady):
            return plan.waits_for_users and users_complete_s is None
        if users_complete_s is None:
            return True
        taken = counts.warmup_taken - counts.early_warmup
        if plan.steady is not None:
            max_s, max_requests = plan.steady.max_s, plan.steady.max_requests
            at_max_requests = max_requests is not None and taken >= plan.part.count_of(max_requests)
            return on_hold or not (counts.steady or now_s >= users_complete_s + max_s or at_max_requests)
        return on_hold or now_s < users_complete_s + plan.warmup_s or taken < self._warmup_requests

    def _users_complete_s(self, counts: Counts) -> float | None:
        """Return when all users ran; None if not known yet."""
        if self._plan.waits_for_users or counts.started_s is None:
            return counts.users_complete_s
        return counts.started_s + self._plan.ramp_s

    def set_users_complete(self) -> None:
        """Note that exactly the planned users run."""
        with self._locked_counts() as counts:
            if counts.users_complete_s is None:
                counts.users_complete_s, counts.early_warmup = time.monotonic(), counts.warmup_taken

    @contextmanager
    def _locked_counts(self) -> Iterator[Counts]:
        """Lock the file, yield the counts, and write them back if no exception is raised."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            counts = self._read()
            yield counts
            os.pwrite(self._file, msgspec.json.encode(counts).ljust(_LINE_BYTES - 1) + b"\n", 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read_locked(self) -> Counts:
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:
            return self._read()
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> Counts:
        raw = os.pread(self._file, _LINE_BYTES, 0)
        return self._decoder.decode(raw) if raw else Counts()


logger = logging.getLogger(__name__)

POLL_S = 0.05


def wait_until(condition: Callable[[], object], max_s: float = math.inf, poll_s: float = POLL_S) -> None:
    """Poll until `condition` returns a true value or the time is over."""
    end_s = time.monotonic() + max_s
    while not condition() and time.monotonic() < end_s:
        gevent.sleep(poll_s)


class StageSequencer:
    """The counter files of all stages of a load in one process. Create it after the fork."""

    def __init__(self, stages: Sequence[tuple[str, Plan, int]]) -> None:
        """`stages` has the path of the counter file, the plan and the number of users of each stage."""
        self.has_stages = len(stages) > 1  # the number of users changes
        self.stages = [Sequencer(path, plan._replace(waits_for_users=self.has_stages)) for path, plan, _ in stages]
        self._user_counts = [users for *_, users in stages]
        self._stage = 0

    def hold_warmup(self) -> None:
        """Keep each stage in its warm-up until its `on_hold` is False."""
        for stage in self.stages:
            stage.on_hold = True

    def close(self) -> None:
        for stage in self.stages:
            stage.close()

    def add_user(self) -> int:
        return self.stages[0].add_user()

    def take(self, max_slots: int = 1) -> list[Slot]:
        """Return slots as `Sequencer.take` does, of the current stage."""
        stage = self.current_stage()
        slots = self.stages[stage].take(max_slots)
        if not slots and stage < self.current_stage():
            return self.take(max_slots)
        return [msgspec.structs.replace(slot, stage=stage) for slot in slots]

    def is_early(self) -> bool:
        return self.stages[self._stage].early

    def current_stage(self) -> int:
        """Return the number of the current stage; after the end, of the last one."""
        while self._stage < len(self.stages) - 1 and self.is_over(self._stage):
            self._stage += 1
        return self._stage

    def is_over(self, stage: int) -> bool:
        """Whether the measured time of a stage has passed."""
        left_s = self.stages[stage].left_s()
        return left_s is not None and left_s <= 0

    def left_s(self) -> float | None:
        """Return the seconds until the end of the last stage, as `Sequencer.left_s` does."""
        return self.stages[-1].left_s()

    def unmeasured_s(self) -> list[float | None]:
        return [stage.unmeasured_s() for stage in self.stages]

    def is_finished(self) -> bool:
        return all(stage.is_finished() for stage in reversed(self.stages))

    def wait_for_end(self, drain_s: float) -> None:
        """Wait for the last request; after a fixed time, at most `drain_s` for requests in flight."""
        wait_until(lambda: self.is_finished() or (self.left_s() or 0.0) < -drain_s)
        if not self.is_finished():
            logger.info("cutting what has not finished %g s after the end", drain_s)

    def user_count(self) -> int:
        return self._user_counts[self.current_stage()]

    def set_users_complete(self) -> None:
        self.stages[self.current_stage()].set_users_complete()


def start_barrier(job: Job, sequencer: StageSequencer) -> None:
    """Hold the warm-up of a load of a mix until all its loads are warm, so that their measurements start together.

    Call it before the first request.
    """

    def wait() -> None:
        wait_until(sequencer.stages[0].is_warmed_up)
        wait_until(lambda: report_warm(job))
        sequencer.stages[0].on_hold = False

    sequencer.hold_warmup()
    gevent.spawn(wait)


def report_warm(job: Job) -> bool:
    """Report, by a file, that the warm-up of this load is over. Return whether all loads of its mix have done so."""
    if job.concurrent_loads:
        warmup_done_file(job.counter_path).touch()
    return all(warmup_done_file(path).exists() for path in job.concurrent_loads)
