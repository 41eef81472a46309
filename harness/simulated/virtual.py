"""The embedded engine in virtual time: its measurements without a socket and without waiting.

`closed_loop` and `poisson` yield one `VirtualRequest` after the other, in the order of their ends, for as long as the
caller wants: a probe takes blocks of them and stops when it likes. The same arguments give the same requests. Times
are seconds since the start of the load; nothing waits for them.

The engine is `leaps.LeapingEngine`: no prefix caching, because no two prompts share a prefix.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence

import msgspec

from harness.simulated.engine import EngineConfig
from harness.simulated.leaps import LeapingEngine, LeapingRequest


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
