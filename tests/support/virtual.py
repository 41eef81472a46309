"""The embedded engine in virtual time: its measurements without a socket and without waiting.

`closed_loop`, `concurrent_loads` and `poisson` yield one `VirtualRequest` after the other, in the order of their ends,
for as long as the caller wants: a probe takes blocks of them and stops when it likes. The same arguments give the same
requests. Times are seconds since the start of the load; nothing waits for them.

`LeapingEngine` is `engine.SimulatedEngine` without prefix caching: no two prompts share a prefix. In it the decode
steps between two events are one *leap*: up to a finish, an arrival that can be admitted, or the last free block.
k steps of n sequences with context S cost

    k (base + per_sequence n) + per_kv_token (k (S + n) + n k (k - 1) / 2)

The jitter of a leap is one normal draw with the variance of its steps: equal in distribution, not in its bits.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from harness.simulated import engine
from harness.simulated.engine import EngineConfig, SimulatedEngine


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
    server = LeapingEngine(config, seed=dice.randrange(1 << 30))
    lengths = random.Random(dice.randrange(1 << 30))  # its own: arrivals within a leap are drawn after it
    now, sent = 0.0, 0
    while True:
        while due and due[0][0] <= now and (requests is None or sent < requests):
            at, load = heapq.heappop(due)
            work = loads[load][1]
            prompt, target = lengths.randint(*work.prompt_tokens), lengths.randint(*work.output_tokens)
            server.add(engine.Sequence(load, [0] * prompt, target, at))
            sent += 1
            if rate is not None:
                heapq.heappush(due, (at + pause(work), load))
        until = due[0][0] if due and (requests is None or sent < requests) else math.inf
        if server.idle:
            if until == math.inf:
                return
            now = until
            continue
        now, ended = server.advance(now, until)
        for done in ended:
            assert done.first_token_s is not None
            yield VirtualRequest(done.arrived_s, done.first_token_s, now, done.prompt_tokens, done.target, done.key)
            if rate is None:
                heapq.heappush(due, (now + pause(loads[done.key][1]), done.key))


class CountedBlocks(engine.BlockPool):
    """A KV cache whose blocks are only counted."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks, self.block_size, self._count = blocks, block_size, blocks

    @property
    def free(self) -> int:
        return self._count

    def take(self, blocks: list[int], tokens: int, shared: Sequence[int] = ()) -> bool:
        needed = -(-tokens // self.block_size) - len(blocks)
        if needed > self._count:
            return False
        if needed > 0:
            self._count -= needed
            blocks.extend([0] * needed)
        return True

    def release(self, blocks: list[int]) -> None:
        self._count += len(blocks)
        blocks.clear()


class LeapingEngine(SimulatedEngine):
    """`add` requests (`key` is their load), then `advance` from event to event; the returned requests have ended."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        super().__init__(msgspec.structs.replace(config, seed=seed, enable_prefix_caching=False))
        self.pool = CountedBlocks(config.num_gpu_blocks, config.block_size)

    def advance(self, now: float, until: float) -> tuple[float, list[engine.Sequence]]:
        """Run to the next event, or past the first step that begins at `until` or later. Return the time then."""
        steps = self._steps_to_leap(until - now)
        if steps:
            return self._leap(steps, now)
        step = self.begin(now)
        if step is None:
            raise ValueError("a request needs more KV cache than the engine has")
        end_s = now + step.duration_s
        return end_s, [done for done in self.complete(step, end_s) if done.output_tokens >= done.target]

    def _steps_to_leap(self, open_s: float) -> int:
        """Return the decode steps up to the next event; 0 if the next step is not only decoding."""
        config, n = self.config, len(self.running)
        if not n or n > config.max_num_batched_tokens or self._can_admit() or config.num_speculative_tokens:
            return 0
        # The youngest are most likely to prefill.
        if any(len(one.tokens) - one.computed != 1 or not one.output_tokens for one in reversed(self.running)):
            return 0
        steps = 1 if config.compile_s else min(request.target - request.output_tokens for request in self.running)
        if not self.waiting and n < config.max_num_seqs and open_s < math.inf:
            # the last step of the leap is the one that runs when the next request arrives
            context = sum(request.computed for request in self.running)
            steps = min(steps, int(open_s / self._leap_s(1, context)) + 1)
            while steps > 1 and self._leap_s(steps - 1, context) >= open_s:
                steps -= 1
        size, free = config.block_size, self.pool.free
        fills = Counter(-request.computed % size for request in self.running)  # requests by the step that needs a block
        for step in range(steps):
            free -= fills[step % size]
            if free < 0:
                return step
        return steps

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return False
        budget = self.config.max_num_batched_tokens - len(self.running)
        count = min(len(self.waiting[0].tokens), budget, self._chunk)
        return budget > 0 and -(-count // self.config.block_size) <= self.pool.free

    def _leap_s(self, steps: int, context: int) -> float:
        """Return the seconds of decode steps of all running requests, without jitter."""
        config, n = self.config, len(self.running)
        context = steps * (context + n) + n * steps * (steps - 1) // 2
        each = config.step_base_s + config.step_per_sequence_s * n
        return (steps * each + config.step_per_kv_token_s * context) * config.slowdown

    def _leap(self, steps: int, now: float) -> tuple[float, list[engine.Sequence]]:
        took = self._leap_s(steps, sum(request.computed for request in self.running))
        if self.config.jitter:
            took *= 1 + self.config.jitter / math.sqrt(steps) * max(-3.0, min(3.0, self._random.gauss(0, 1)))
        took += self._compile_s(len(self.running), 0)
        for request in self.running:
            request.computed += steps
            request.output_tokens += steps
            request.tokens.extend([0] * steps)
            self.pool.take(request.blocks, request.computed)
        ended = [request for request in self.running if request.output_tokens >= request.target]
        if ended:
            self.running = [request for request in self.running if request.output_tokens < request.target]
        for request in ended:
            self.pool.release(request.blocks)
        return now + took, ended
