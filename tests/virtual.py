"""The embedded engine in virtual time: its measurements without a socket and without waiting.

`closed_loop`, `concurrent_loads` and `poisson` yield one `VirtualRequest` after the other, in the order of their ends,
for as long as the caller wants: a probe takes blocks of them and stops when it likes. The same arguments give the same
requests. Times are seconds since the start of the load; nothing waits for them.

`LeapingEngine` has the scheduling and the step times of `engine.SimulatedEngine`, without prefix caching: no two
prompts share a prefix (a test compares the two). Its cost is per event, not per token and sequence. All requests that
decode advance together, so they are kept as sums: how many, their context, how many need a block at which step, and a
heap of their ends. A *leap* is all decode steps up to the next event: a finish, an arrival that can be admitted, the
last free block. k steps of n sequences with context S cost

    k (base + per_sequence n) + per_kv_token (k (S + n) + n k (k - 1) / 2)

The jitter of a leap is one normal draw with the variance of its steps: equal in distribution, not in its bits. A step
in which blocks or the budget run out walks through the requests one by one, as the engine does.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from harness.simulated.engine import Compiler, EngineConfig


class VirtualWork(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens, each drawn uniformly from (min, max) inclusive; `think_s` is the mean of an exponential pause
    between a user's requests (0: none)."""

    prompt_tokens: tuple[int, int] = (100, 500)
    output_tokens: tuple[int, int] = (50, 150)
    think_s: float = 0.0


class VirtualRequest(msgspec.Struct, frozen=True):
    """One measured request; times in seconds of virtual time."""

    sent_s: float
    first_token_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    load: int = 0  # its place among the loads of `concurrent_loads`

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        return (self.ended_s - self.first_token_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def closed_loop(
    config: EngineConfig, users: int, work: VirtualWork, *, requests: int | None = None, seed: int = 0
) -> Iterator[VirtualRequest]:
    """Measure `users` users, each of whom sends its next request when it has its answer and has thought.

    `requests`: how many are sent in all; None: no end. Users start within the first think time, or at once.
    """
    return _drive(config, [(users, work)], None, requests, random.Random(f"{seed} {users}"))


def concurrent_loads(
    config: EngineConfig, loads: Sequence[tuple[int, VirtualWork]], *, seed: int = 0
) -> Iterator[VirtualRequest]:
    """Measure several loads at once, each of so many users in a closed loop; `load` says to which one belongs."""
    return _drive(config, loads, None, None, random.Random(f"{seed} {[users for users, _ in loads]}"))


def poisson(
    config: EngineConfig, rate: float, work: VirtualWork, *, requests: int | None = None, seed: int = 0
) -> Iterator[VirtualRequest]:
    """Measure Poisson arrivals of `rate` requests per second; `requests` as in `closed_loop`."""
    return _drive(config, [(1, work)], rate, requests, random.Random(f"{seed} {rate}"))


def _drive(
    config: EngineConfig,
    loads: Sequence[tuple[int, VirtualWork]],
    rate: float | None,
    requests: int | None,
    dice: random.Random,
) -> Iterator[VirtualRequest]:
    def pause(work: VirtualWork) -> float:
        if rate is not None:
            return dice.expovariate(rate)
        return dice.expovariate(1 / work.think_s) if work.think_s else 0.0

    due = sorted((pause(work), load) for load, (users, work) in enumerate(loads) for _ in range(users))
    engine = LeapingEngine(msgspec.structs.replace(config, seed=dice.randrange(1 << 30)))
    lengths = random.Random(dice.randrange(1 << 30))  # its own: arrivals within a leap are drawn after it
    now, sent = 0.0, 0
    while True:
        while due and due[0][0] <= now and (requests is None or sent < requests):
            at, load = heapq.heappop(due)
            work = loads[load][1]
            prompt, target = lengths.randint(*work.prompt_tokens), lengths.randint(*work.output_tokens)
            engine.add(LeapingRequest(prompt, target, at, load))
            sent += 1
            if rate is not None:
                heapq.heappush(due, (at + pause(work), load))
        until = due[0][0] if due and (requests is None or sent < requests) else math.inf
        if engine.idle:
            if until == math.inf:
                return
            now = until
            continue
        took, ended = engine.advance(now, until)
        now += took
        for one in ended:
            assert one.first_token_s is not None
            yield VirtualRequest(one.sent_s, one.first_token_s, now, one.prompt_tokens, one.target, one.load)
            if rate is None:
                heapq.heappush(due, (now + pause(loads[one.load][1]), one.load))


class LeapingRequest:
    """A request inside the engine. While it decodes, `computed` is that of the time when `steps` was its step count."""

    __slots__ = ("blocks", "computed", "decodes", "ends_at", "first_token_s", "load", "output_tokens", "place",
                 "prompt_tokens", "sent_s", "steps", "target")  # fmt: skip

    def __init__(self, prompt_tokens: int, target: int, sent_s: float, load: int = 0) -> None:
        self.load = load
        self.prompt_tokens = prompt_tokens
        self.target = target
        self.sent_s = sent_s
        self.output_tokens = 0  # while it decodes: that when `steps` was its step count
        self.computed = 0
        self.blocks = 0  # while it prefills
        self.place = 0  # in the order of admission
        self.decodes = False
        self.steps = 0
        self.ends_at = -1  # the step count at which it has all its tokens; -1: it does not decode
        self.first_token_s: float | None = None


class LeapingEngine:
    """`add` requests, then `advance` from event to event; the requests that it returns have ended."""

    def __init__(self, config: EngineConfig) -> None:
        if problem := config.problem():
            raise ValueError(problem)
        self.config = config
        self.waiting: deque[LeapingRequest] = deque()
        self.running: dict[LeapingRequest, None] = {}  # in the order of admission
        self.free = config.num_gpu_blocks
        self.preemptions = 0
        self._chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._random = random.Random(config.seed)
        self._compiler = Compiler(config)
        self._prefilling: list[LeapingRequest] = []  # in the order of admission
        self._steps = 0  # decode steps so far
        self._decoding = 0  # requests that decode,
        self._context = 0  # the tokens they have computed,
        self._fills = [0] * config.block_size  # and how many need a new block when -steps has this remainder
        self._ends: list[tuple[int, int, LeapingRequest]] = []
        self._admitted = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: LeapingRequest) -> None:
        """Queue a request. Its prompt and target must fit into `max_model_len`."""
        if request.prompt_tokens + request.target > self.config.max_model_len or request.prompt_tokens < 1:
            raise ValueError(f"{request.prompt_tokens} + {request.target} tokens do not fit the context")
        self.waiting.append(request)

    def advance(self, now: float, until: float) -> tuple[float, list[LeapingRequest]]:
        """Run to the next event, or past the first step that begins at `until` or later.

        Returns the seconds that it took and the requests that ended then, in the order of their admission.
        """
        if not self._prefilling and self._decoding and not self._can_admit():
            steps = self._steps_to_leap(until - now)
            if steps:
                return self._leap(steps, now)
        return self._step(now)

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return False
        budget = self.config.max_num_batched_tokens - self._decoding
        head = self.waiting[0]
        count = min(head.prompt_tokens + head.output_tokens, budget, self._chunk)
        return budget > 0 and self._blocks(count) <= self.free

    def _steps_to_leap(self, open_s: float) -> int:
        config, n, size = self.config, self._decoding, self.config.block_size
        if n > config.max_num_batched_tokens:
            return 0
        self._drop_stale()
        steps = 1 if config.compile_s else self._ends[0][0] - self._steps
        if not self.waiting and n < config.max_num_seqs and open_s < math.inf:
            # the last step of the leap is the one that runs when the next request arrives
            steps = min(steps, int(open_s / self._seconds(1, n)) + 1)
            while steps > 1 and self._seconds(steps - 1, n) >= open_s:
                steps -= 1
        free = self.free - steps // size * n
        free -= sum(self._fills[-(self._steps + i) % size] for i in range(steps % size))
        if free >= 0:
            return steps
        left, possible = self.free, 0
        while possible < steps and self._fills[-(self._steps + possible) % size] <= left:
            left -= self._fills[-(self._steps + possible) % size]
            possible += 1
        return possible

    def _seconds(self, steps: int, n: int) -> float:
        """What so many decode steps of the n requests that decode take, without jitter."""
        config = self.config
        context = steps * (self._context + n) + n * steps * (steps - 1) // 2
        each = config.step_base_s + config.step_per_sequence_s * n
        return (steps * each + config.step_per_kv_token_s * context) * config.slowdown

    def _leap(self, steps: int, now: float) -> tuple[float, list[LeapingRequest]]:
        n, size = self._decoding, self.config.block_size
        took = self._seconds(steps, n) * self._jitter(steps) + self._compiler.extra_s(n, 0)
        self.free -= steps // size * n + sum(self._fills[-(self._steps + i) % size] for i in range(steps % size))
        self._steps += steps
        self._context += n * steps
        return took, self._finished()

    def _jitter(self, steps: int) -> float:
        jitter = self.config.jitter
        if not jitter:
            return 1.0
        return 1 + jitter / math.sqrt(steps) * max(-3.0, min(3.0, self._random.gauss(0, 1)))

    def _step(self, now: float) -> tuple[float, list[LeapingRequest]]:
        config, size = self.config, self.config.block_size
        budget, preempted = config.max_num_batched_tokens, 0
        work: list[tuple[LeapingRequest, int]] = []  # prefill
        decoded, context = self._decoding, self._context + self._decoding
        wanted = [min(self._need(request) - request.computed, self._chunk) for request in self._prefilling]
        blocks = sum(
            self._blocks(request.computed + count) - request.blocks
            for request, count in zip(self._prefilling, wanted, strict=True)
        )
        fills = self._fills[-self._steps % size]
        if decoded + sum(wanted) <= budget and blocks + fills <= self.free:
            self.free -= blocks + fills
            work.extend(zip(self._prefilling, wanted, strict=True))
            for request, count in work:
                request.blocks = self._blocks(request.computed + count)
            budget -= decoded + sum(wanted)
        else:
            decoded, context, budget, preempted = self._one_by_one(work)
        if not preempted:
            while self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
                request = self.waiting[0]
                count = min(self._need(request), budget, self._chunk)
                if self._blocks(count) > self.free:
                    break
                self.waiting.popleft()
                self.running[request] = None
                self._admitted += 1
                request.place = self._admitted
                self._prefilling.append(request)
                request.computed, request.blocks = 0, self._blocks(count)
                self.free -= request.blocks
                work.append((request, count))
                budget -= count
        if not work and not decoded and not preempted:
            raise ValueError("a request needs more KV cache than the engine has")
        prefill = sum(count for request, count in work if not (count == 1 and request.output_tokens))
        context += sum(request.computed + count for request, count in work)
        sequences = decoded + len(work)
        took = config.step_s(sequences, context, prefill, preempted) * self._jitter(1)
        took += self._compiler.extra_s(sequences, prefill)
        self._steps += 1
        self._context += self._decoding
        ended = self._finished()
        for request, count in work:
            request.computed += count
            if request.computed == self._need(request) and self._emit_first(request, now + took):
                ended.append(request)
        return took, sorted(ended, key=lambda request: request.place)

    def _one_by_one(self, work: list[tuple[LeapingRequest, int]]) -> tuple[int, int, int, int]:
        """Plan a step in which blocks or the budget run out; returns how many decode, their context, the budget that
        is left and how many were preempted. Requests that should decode and cannot lose the step."""
        config = self.config
        budget, preempted, decoded, context = config.max_num_batched_tokens, 0, 0, 0
        order, index = list(self.running), 0
        while index < len(order) and budget > 0:
            request = order[index]
            computed = self._computed(request)
            count = 1 if request.decodes else min(self._need(request) - computed, budget, self._chunk)
            held = self._held(request)
            more = self._blocks(computed + count) - held
            while more > self.free:
                victim = order.pop()
                self._preempt(victim)
                preempted += 1
                if victim is request:
                    break
            if index >= len(order):
                break
            self.free -= more
            budget -= count
            index += 1
            if request.decodes:
                decoded += 1
                context += computed + 1
            else:
                request.blocks += more
                work.append((request, count))
        for request in order[index:]:
            if request.decodes:
                self._stall(request)
        return decoded, context, budget, preempted

    def _preempt(self, victim: LeapingRequest) -> None:
        self.free += self._held(victim)
        if victim.decodes:
            victim.output_tokens += self._steps - victim.steps
            self._leave(victim)
        else:
            self._prefilling.remove(victim)
        victim.computed = victim.blocks = 0
        self.preemptions += 1
        del self.running[victim]
        self.waiting.appendleft(victim)

    def _emit_first(self, request: LeapingRequest, at: float) -> bool:
        """The first token after a prefill; True when it is the last one of the answer."""
        self._prefilling.remove(request)
        request.output_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = at
        if request.output_tokens >= request.target:
            self.free += request.blocks
            del self.running[request]
            return True
        request.decodes, request.steps = True, self._steps
        self._decoding += 1
        self._context += request.computed
        self._schedule_end(request)
        return False

    def _schedule_end(self, request: LeapingRequest) -> None:
        request.ends_at = request.steps + request.target - request.output_tokens
        self._fills[(request.computed - request.steps) % self.config.block_size] += 1
        heapq.heappush(self._ends, (request.ends_at, request.place, request))

    def _stall(self, request: LeapingRequest) -> None:
        """Let a request that decodes miss this step: from now on as if it had begun a step later."""
        self._fills[(request.computed - request.steps) % self.config.block_size] -= 1
        self._context -= 1
        request.steps += 1
        self._schedule_end(request)

    def _leave(self, request: LeapingRequest) -> None:
        self._context -= request.computed + self._steps - request.steps
        self._decoding -= 1
        self._fills[(request.computed - request.steps) % self.config.block_size] -= 1
        request.decodes, request.ends_at = False, -1

    def _finished(self) -> list[LeapingRequest]:
        """Take out the requests that have all their tokens."""
        ended: list[LeapingRequest] = []
        while self._ends and self._ends[0][0] <= self._steps:
            at, _, request = heapq.heappop(self._ends)
            if request.decodes and request.ends_at == at:
                self.free += self._held(request)
                self._leave(request)
                del self.running[request]
                ended.append(request)
        return ended

    def _drop_stale(self) -> None:
        while self._ends[0][2].ends_at != self._ends[0][0]:
            heapq.heappop(self._ends)

    def _need(self, request: LeapingRequest) -> int:
        return request.prompt_tokens + request.output_tokens

    def _computed(self, request: LeapingRequest) -> int:
        return request.computed + (self._steps - request.steps if request.decodes else 0)

    def _held(self, request: LeapingRequest) -> int:
        return self._blocks(self._computed(request)) if request.decodes else request.blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
