"""Hand out the next requests of the sequence to all load processes of a machine, which share one small counter file.

The file holds one JSON line, with times on the monotonic clock of the machine. It is only accessed under flock, which
the kernel releases when a process dies. A warm-up that runs until the server is steady stores two doubles for each of
its answers after the line, in the order in which the answers ended.

The loads of a mix have their counts in one file: their measurement starts at once, when all have had their warm-up. A
load with stages is measured in one window for each of them. A window starts when exactly the users of its stage run and
the scenario's warm-up is over; the requests between two windows are warm-up. The next stage does not wait for requests
in flight.
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

from harness.load.openai_api import Tools
from harness.scenario.behaviour import Abandon
from harness.scenario.plan import Schedule, Steadiness
from harness.workload import Message
from harness.workload.agent_traces.inline_iou import Actions
from harness.workload.job import JobStage
from harness.workload.traces import Replay

Phase = Literal["warmup", "measured"]
Due = Schedule | Replay  # when each burst or conversation starts
POLL_S = 0.05
_LOAD_BYTES = 400  # of the line, which is padded, so that a write never leaves a part of a longer one ...
_STAGE_BYTES = 40  # ... with as many for each load and each stage
_SAMPLE = struct.Struct("<qdd")  # number of the load, TTFT (NaN: unknown), and time per token, of an answer
_MAX_AHEAD_S = 0.5  # a slot of a scheduled warm-up is handed out at most so long before it is due

logger = logging.getLogger(__name__)


class Shard(NamedTuple):
    """The share of the sequence that one machine sends, which it knows without asking other machines.

    The sequence is cut into blocks: bursts or conversations. The machines take the blocks in turn, so each request is
    in exactly one shard. Places in a shard count from 0.
    """

    machine: int = 0
    machines: int = 1
    block_size: int = 1  # requests that are sent together

    def index_at(self, place: int) -> int:
        """Return the index in the whole sequence of the request at this place of the shard."""
        block, offset = divmod(place, self.block_size)
        return (block * self.machines + self.machine) * self.block_size + offset

    def count_of(self, total: int) -> int:
        """Return how many of the first `total` requests of the sequence are in this shard."""
        blocks, rest = divmod(total, self.block_size)
        rounds, more = divmod(blocks, self.machines)
        return (rounds + (self.machine < more)) * self.block_size + (rest if self.machine == more else 0)

    def global_number(self, number: int) -> int:
        """Return the number among all machines of this machine's arrival, or user, `number`."""
        return number * self.machines + self.machine


WHOLE = Shard()


class Work(msgspec.Struct, frozen=True):
    """One request of the sequence: its place, which is the right to send it, and what its user sends."""

    phase: Phase
    index: int  # measured: 0, 1, 2 ...; warm-up: -1, -2, -3 ..., so that its prompts are never measured
    due_s: float | None = None  # open loop: when to send it, on the monotonic clock
    stage: int = 0  # number of the stage in which it was taken
    load_number: int = 0  # of a mix
    messages: Sequence[Message] = ()
    changed: bool = False  # the messages differ from the plan
    asked_index: int | None = None  # the index of a repeated question; None: `index`
    user_class: str = ""
    user: int = 0
    conversation: int | None = None
    turn: int | None = None
    batch: int | None = None
    # Of a replayed trace, as in the record; `planned_prompt_tokens`: the tokens of the prompt, where it has no text.
    step: int | None = None
    agent: int | None = None
    planned_cached_tokens: int | None = None
    continues: int | None = None
    planned_prompt_tokens: int | None = None
    fills_cache: bool = False  # it fills the cache for others: never measured
    again: bool = False
    follows: bool = False  # it follows an earlier request of its group and has no due time of its own
    tools: Tools | None = None
    leave: Abandon | None = None  # when the user leaves
    max_tokens: int | None = None  # of the answer; None: as the load says
    exact_length: bool | None = None  # the answer has exactly `max_tokens`; None: as the load says
    actions: Actions | None = None  # of the recorded answer, with which the answer is compared; None: with none
    header: str = ""  # a line of the request's head

    @property
    def cell_number(self) -> int:
        """The number of the cell among those of the load generator: a mix has no stages."""
        return self.stage + self.load_number

    @property
    def question_index(self) -> int:
        """The index of the question, which determines the length of the answer and the right answer."""
        return self.index if self.asked_index is None else self.asked_index

    def moved_to(self, other: "Work") -> "Work":
        """Return this request in the place of another one: a question that is asked again."""
        return msgspec.structs.replace(
            other, messages=self.messages, changed=self.changed, asked_index=self.question_index
        )

    def with_messages(self, messages: Sequence[Message]) -> "Work":
        return msgspec.structs.replace(self, messages=messages, changed=True)

    def about(self, text: str) -> "Work":
        """Return the request with a text for the model: after the salt and the system prompt, before the question."""
        first, *others = self.messages
        if first["role"] != "system":
            return self.with_messages([{"role": "system", "content": text}, first, *others])
        return self.with_messages([{"role": "system", "content": f"{first['content']}\n\n{text}"}, *others])

    def without_system(self) -> "Work":
        """Return the request without the system prompt, which the history of a later turn already has."""
        messages = [message for message in self.messages if message["role"] != "system"]
        return msgspec.structs.replace(self, messages=messages)


class Quota(NamedTuple):
    """The amount of work of one load. None: no limit."""

    requests: int | None = None  # measured requests
    duration_s: float | None = None  # measured time; the same for all loads of a mix
    warmup_requests: int = 0  # the warm-up lasts for so many requests and so long ...
    warmup_s: float = 0.0
    steady: Steadiness | None = None  # ... or until the server is steady
    ramp_s: float = 0.0  # a warm-up also lasts until all users have started
    schedule: Due | None = None  # of an open loop
    warmup_schedule: Due | None = None  # the same for the warm-up
    shard: Shard = WHOLE  # this machine's share of all requests


class LoadCounts(msgspec.Struct, array_like=True):
    """The counts of one load."""

    users: int = 0
    warmup_taken: int = 0  # slots
    measured_taken: int = 0  # slots
    warmup_arrived: int = 0  # bursts or conversations handed out
    arrived: int = 0  # the same for the measurement
    warmup_due_s: float | None = None  # due time of the last slots of a scheduled warm-up
    settled: int = 0  # taken slots whose request has ended, in either phase
    early_warmup: int = 0  # warm-up slots, and
    early: int = 0  # slots of either phase, that were taken before all users of this stage ran
    sample_count: int = 0  # answers of the warm-up that were checked
    steady: bool = False  # whether these were steady
    fills: int = 0  # warm-up slots that fill the cache for others, in addition to the planned warm-up ...
    open_fills: int = 0  # ... and those of them that are not settled: the warm-up lasts until they are

    def is_settled(self) -> bool:
        return self.settled >= self.warmup_taken + self.measured_taken


class Counts(msgspec.Struct, array_like=True):
    """The contents of the counter file. Times are monotonic, and of the current stage."""

    loads: list[LoadCounts]
    stage: int = 0
    started_s: float | None = None  # when the first slot was taken
    users_complete_s: float | None = None  # of a load with stages
    measured_s: float | None = None  # start of the measurement
    steady_stages: list[bool] = []  # of the stages that are over
    samples: int = 0  # of all loads, in this stage


class Sequencer:
    """The counter file in one process. Create it after the fork: forked copies of an open file share its lock."""

    def __init__(self, path: str, *quotas: Quota, stages: Sequence[JobStage] = ()) -> None:
        """`quotas`: of the load, or of the loads of a mix. `stages`: of a load with stages, which replace its time."""
        self.early = [False] * len(quotas)  # by load: `take` returned no slot because it is too early
        self.has_stages = bool(stages)  # the number of users changes
        # On one of several machines: the last stage whose measurement may start (until then its warm-up continues),
        # and its start in an open loop, the same on all machines.
        self.released_stage: float = math.inf
        self.begin_s: float | None = None
        self._quotas = quotas
        self._stages = stages
        self._durations_s: list[float | None] = [stage.duration_s for stage in stages]
        self._durations_s = self._durations_s or [quotas[0].duration_s]
        self._requests = [None if quota.requests is None else quota.shard.count_of(quota.requests) for quota in quotas]
        self._warmup_requests = [quota.shard.count_of(quota.warmup_requests) for quota in quotas]
        self._is_scheduled = any(quota.schedule is not None for quota in quotas)
        self._line_bytes = _LOAD_BYTES * len(quotas) + _STAGE_BYTES * len(stages)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._decoder = msgspec.json.Decoder(Counts)

    def close(self) -> None:
        os.close(self._file)

    def hold_warmup(self) -> None:
        """Keep each stage in its warm-up until `released_stage` allows its measurement."""
        self.released_stage = -1

    def add_user(self, load: int = 0) -> int:
        """Return the number of a new user of a load, from 0."""
        with self._locked_counts() as counts:
            counts.loads[load].users += 1
            return self._quotas[load].shard.global_number(counts.loads[load].users - 1)

    def take(self, max_slots: int = 1, load: int = 0, *, fills_cache: bool = False) -> list[Work]:
        """Return the next `max_slots` slots, of one phase and in order: one burst, or one conversation.

        Return none if no slot is left, or if it is too early for the next (see `early`). Groups of the warm-up are
        never shortened, so that the server has the full concurrency. The last measured group is shortened to the quota.
        `fills_cache`: the request fills the cache for others. Its slot is one more of the warm-up, which lasts until
        it is settled.
        """
        now_s = time.monotonic()
        quota, self.early[load] = self._quotas[load], False
        with self._locked_counts() as counts:
            self._start_next_stage(counts, now_s)
            if counts.started_s is None:
                counts.started_s = now_s
            if fills_cache:
                return self._take_cache_fill(counts, now_s, load)
            if counts.measured_s is None:
                if self._is_warming_up(counts, now_s):
                    return self._take_warmup(counts, now_s, max_slots, load)
                if self._is_scheduled and quota.shard.machines > 1:
                    if counts.stage > self.released_stage:
                        self.early[load] = True
                        return []
                    if self._is_before_begin(counts, now_s, load):
                        return self._take_warmup(counts, now_s, max_slots, load)
                    counts.measured_s = self.begin_s
            if counts.measured_s is None:
                counts.measured_s = max([now_s, *(load_counts.warmup_due_s or now_s for load_counts in counts.loads)])
            return self._take_measured(counts, now_s, max_slots, load)

    def _take_measured(self, counts: Counts, now_s: float, max_slots: int, load: int) -> list[Work]:
        quota, own, duration_s = self._quotas[load], counts.loads[load], self._durations_s[counts.stage]
        assert counts.measured_s is not None
        if duration_s is not None and now_s >= counts.measured_s + duration_s:
            return []
        first, requests = own.measured_taken, self._requests[load]
        number = max_slots if requests is None else max(0, min(max_slots, requests - first))
        due_s = None
        if quota.schedule is not None and number:
            after_s = quota.schedule.at(quota.shard.global_number(own.arrived))
            if after_s is None or (duration_s is not None and after_s >= duration_s):
                self.early[load] = duration_s is not None
                return []
            due_s = counts.measured_s + after_s
            own.arrived += 1
        own.measured_taken += number
        return [Work("measured", quota.shard.index_at(first + i), due_s, counts.stage, load) for i in range(number)]

    def _take_cache_fill(self, counts: Counts, now_s: float, load: int) -> list[Work]:
        own, requests, remaining_s = counts.loads[load], self._requests[load], self._left_s(counts)
        if (requests is not None and own.measured_taken >= requests) or (remaining_s is not None and remaining_s <= 0):
            return []
        own.fills += 1
        own.open_fills += 1
        return [msgspec.structs.replace(work, fills_cache=True) for work in self._take_warmup(counts, now_s, 1, load)]

    def _take_warmup(self, counts: Counts, now_s: float, max_slots: int, load: int) -> list[Work]:
        quota, own, due_s = self._quotas[load], counts.loads[load], None
        if quota.warmup_schedule is not None and counts.started_s is not None:
            after_s = quota.warmup_schedule.at(quota.shard.global_number(own.warmup_arrived))
            due_s = now_s if after_s is None else counts.started_s + after_s
            if due_s > now_s + _MAX_AHEAD_S:
                self.early[load] = True
                return []
            own.warmup_arrived += 1
            own.warmup_due_s = due_s
        first = own.warmup_taken
        own.warmup_taken += max_slots
        return [
            Work("warmup", -1 - quota.shard.index_at(first + i), due_s, counts.stage, load) for i in range(max_slots)
        ]

    def _is_before_begin(self, counts: Counts, now_s: float, load: int) -> bool:
        """Whether the next warm-up slot is due before the measurement starts on all machines."""
        quota, own = self._quotas[load], counts.loads[load]
        if self.begin_s is None or counts.started_s is None or not own.warmup_taken:
            return False
        if quota.warmup_schedule is None:  # a closed loop next to an open one
            return now_s < self.begin_s
        after_s = quota.warmup_schedule.at(quota.shard.global_number(own.warmup_arrived))
        return after_s is not None and counts.started_s + after_s < self.begin_s

    def when_sent(self, work: Work) -> Work:
        """Return a request as it is sent now: one of the warm-up may have become a measured one.

        A closed loop of fixed time also measures the later turns of conversations that started in the warm-up:
        otherwise it would begin with first turns only. Such a turn may also start the measured time.
        """
        duration_s = self._durations_s[work.stage]
        is_open = self._quotas[work.load_number].schedule is not None
        if duration_s is None or is_open or work.phase == "measured" or work.fills_cache:
            return work
        now_s = time.monotonic()
        with self._locked_counts() as counts:
            if counts.stage == work.stage and counts.measured_s is None:
                own = counts.loads[work.load_number]
                is_unanswered = (
                    own.settled - own.early - (own.fills - own.open_fills) < self._warmup_requests[work.load_number]
                )
                must_wait = self._is_scheduled and self._quotas[work.load_number].shard.machines > 1  # for the others
                if is_unanswered or must_wait or self._is_warming_up(counts, now_s):
                    return work
                counts.measured_s = now_s
        return msgspec.structs.replace(work, phase="measured")

    def settle(
        self, count: int = 1, sample: tuple[float, float, float] | None = None, work: Work | None = None
    ) -> None:
        """Count `count` requests as settled, however they ended.

        `sample`: of an answer of the warm-up, when it was sent (monotonic), its TTFT (NaN: unknown), and its end-to-end
        latency / output tokens, in s. `work`: one of them; None: of the first load and stage.
        """
        load, stage = (0, 0) if work is None else (work.load_number, work.stage)
        with self._locked_counts() as counts:
            counts.loads[load].settled += count
            counts.loads[load].open_fills -= count if work is not None and work.fills_cache else 0
            if sample is not None and counts.stage == stage and counts.measured_s is None:
                self._note_sample(sample, counts, load)

    def _note_sample(self, sample: tuple[float, float, float], counts: Counts, load: int) -> None:
        own, rule, complete_s = counts.loads[load], self._quotas[load].steady, self._users_complete_s(counts, load)
        sent_s, *numbers = sample
        if rule is None or own.steady or complete_s is None or sent_s < complete_s:
            return  # sent before the full concurrency
        os.pwrite(self._file, _SAMPLE.pack(load, *numbers), self._line_bytes + counts.samples * _SAMPLE.size)
        counts.samples += 1
        own.sample_count += 1
        if rule.is_check_due(own.sample_count):
            raw = os.pread(self._file, counts.samples * _SAMPLE.size, self._line_bytes)
            own.steady = rule.is_steady(
                [(ttft_s, s) for number, ttft_s, s in _SAMPLE.iter_unpack(raw) if number == load]
            )

    def steady(self, stage: int = 0, load: int = 0) -> bool | None:
        """Whether the warm-up found the server steady before its limit; None: no such warm-up, or not known yet."""
        counts = self._read_locked()
        if self._quotas[load].steady is None or stage > counts.stage:
            return None
        if stage < counts.stage:
            return counts.steady_stages[stage]
        is_steady = counts.loads[load].steady
        return is_steady if is_steady or counts.measured_s is not None else None

    def left_s(self) -> float | None:
        """Return the seconds until the end of all measured time: negative after it, None while unknown."""
        counts = self._read_locked()
        return self._left_s(counts) if counts.stage == len(self._durations_s) - 1 else None

    def unmeasured_s(self) -> list[float | None]:
        """Return the part of the measured time of each stage that has not passed; None without a fixed time."""
        counts, remaining = self._read_locked(), list(self._durations_s)
        remaining[: counts.stage] = [0.0] * counts.stage
        if (stage_s := self._left_s(counts)) is not None:
            remaining[counts.stage] = max(0.0, stage_s)
        return remaining

    def current_stage(self) -> int:
        """Return the number of the current stage; after the end, of the last one."""
        counts = self._read_locked()
        if self._is_next_stage_due(counts, time.monotonic()):
            with self._locked_counts() as counts:
                self._start_next_stage(counts, time.monotonic())
        return counts.stage

    def is_over(self, stage: int) -> bool:
        """Whether the measured time of a stage has passed."""
        counts = self._read_locked()
        remaining_s = self._left_s(counts)
        return counts.stage > stage or (counts.stage == stage and remaining_s is not None and remaining_s <= 0)

    def is_used_up(self, load: int = 0) -> bool:
        """Whether no slot of a load is left."""
        counts = self._read_locked()
        own, quota, requests = counts.loads[load], self._quotas[load], self._requests[load]
        return self._is_exhausted(own, quota, requests, self._left_s(counts))

    def user_count(self) -> int:
        """Return the planned users of the current stage."""
        return self._stages[self.current_stage()].users

    def is_finished(self) -> bool:
        """Whether no slot is left and every request has ended."""
        counts = self._read_locked()
        if counts.stage < len(self._durations_s) - 1:
            return False
        remaining_s = self._left_s(counts)
        return all(
            own.is_settled() and self._is_exhausted(own, quota, requests, remaining_s)
            for own, quota, requests in zip(counts.loads, self._quotas, self._requests, strict=True)
        )

    def _is_exhausted(self, own: LoadCounts, quota: Quota, requests: int | None, remaining_s: float | None) -> bool:
        schedule = quota.schedule if quota.duration_s is None else None  # a fixed time always passes in full
        if schedule is not None and schedule.at(quota.shard.global_number(own.arrived)) is None:
            return True  # no more arrivals
        if requests is not None:
            return own.measured_taken >= requests
        return remaining_s is not None and remaining_s <= 0

    def wait_for_end(self, drain_s: float) -> None:
        """Wait for the last request; after a fixed time, at most `drain_s` for requests in flight."""
        wait_until(lambda: self.is_finished() or (self.left_s() or 0.0) < -drain_s)
        if not self.is_finished():
            logger.info("cutting what has not finished %g s after the end", drain_s)

    def is_warmed_up(self, stage: int = 0) -> bool:
        """Whether the planned warm-up of a stage has been handed out."""
        counts = self._read_locked()
        return counts.stage > stage or (
            counts.stage == stage and not self._is_warming_up(counts, time.monotonic(), held=False)
        )

    def set_users_complete(self) -> None:
        """Note that exactly the planned users of this stage run."""
        with self._locked_counts() as counts:
            if counts.users_complete_s is None:
                counts.users_complete_s = time.monotonic()
                for own in counts.loads:
                    own.early_warmup = own.warmup_taken - own.fills
                    own.early = own.warmup_taken + own.measured_taken

    def _is_next_stage_due(self, counts: Counts, now_s: float) -> bool:
        is_last = counts.stage == len(self._durations_s) - 1
        return not is_last and counts.measured_s is not None and now_s >= self._end_s(counts)

    def _start_next_stage(self, counts: Counts, now_s: float) -> None:
        if not self._is_next_stage_due(counts, now_s):
            return
        (own,) = counts.loads
        counts.steady_stages.append(own.steady)
        counts.stage += 1
        counts.started_s = counts.users_complete_s = counts.measured_s = None
        own.steady, own.sample_count, counts.samples = False, 0, 0

    def _end_s(self, counts: Counts) -> float:
        return (counts.measured_s or 0.0) + (self._durations_s[counts.stage] or 0.0)

    def _left_s(self, counts: Counts) -> float | None:
        if self._durations_s[counts.stage] is None or counts.measured_s is None:
            return None
        return self._end_s(counts) - time.monotonic()

    def _is_warming_up(self, counts: Counts, now_s: float, *, held: bool | None = None) -> bool:
        """Whether a load is in its warm-up. `held`: default whether the stage may not be measured yet."""
        if counts.measured_s is not None:
            return False
        held = counts.stage > self.released_stage if held is None else held
        return any(self._is_load_warming_up(counts, now_s, load, held) for load in range(len(self._quotas)))

    def _is_load_warming_up(self, counts: Counts, now_s: float, load: int, held: bool) -> bool:
        quota, own, users_complete_s = self._quotas[load], counts.loads[load], self._users_complete_s(counts, load)
        if own.open_fills:
            return True
        if not (quota.warmup_requests or quota.warmup_s or quota.steady):
            return self.has_stages and users_complete_s is None
        if users_complete_s is None:
            return True
        taken = own.warmup_taken - own.fills - own.early_warmup
        if quota.steady is not None:
            max_s, max_requests = quota.steady.max_s, quota.steady.max_requests
            at_max_requests = max_requests is not None and taken >= quota.shard.count_of(max_requests)
            return held or not (own.steady or now_s >= users_complete_s + max_s or at_max_requests)
        return held or now_s < users_complete_s + quota.warmup_s or taken < self._warmup_requests[load]

    def _users_complete_s(self, counts: Counts, load: int) -> float | None:
        """Return when all users ran; None if not known yet."""
        if self.has_stages or counts.started_s is None:
            return counts.users_complete_s
        return counts.started_s + self._quotas[load].ramp_s

    @contextmanager
    def _locked_counts(self) -> Iterator[Counts]:
        """Lock the file, yield the counts, and write them back if no exception is raised."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            counts = self._read()
            yield counts
            os.pwrite(self._file, msgspec.json.encode(counts).ljust(self._line_bytes - 1) + b"\n", 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read_locked(self) -> Counts:
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:
            return self._read()
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> Counts:
        raw = os.pread(self._file, self._line_bytes, 0)
        return self._decoder.decode(raw) if raw else Counts([LoadCounts() for _ in self._quotas])


def wait_until(condition: Callable[[], object], max_s: float = math.inf, poll_s: float = POLL_S) -> None:
    """Poll until `condition` returns a true value or the time is over."""
    end_s = time.monotonic() + max_s
    while not condition() and time.monotonic() < end_s:
        gevent.sleep(poll_s)
