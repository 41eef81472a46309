"""A server that batches continuously, in virtual time: what a load gets from it, and how long a long job takes."""

import heapq
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from harness.records.clock import Clock
from harness.records.columns import Gaps, Rows, Words
from harness.records.run_data import CellData
from harness.scenario import Load

Lengths = Callable[[random.Random], tuple[int, int]]  # draws prompt and output tokens

NETWORK_S = 0.003  # mean time between client and server
DECODE_S, DECODE_EACH_S, PREFILL_TOKEN_S = 0.02, 0.001, 1e-5  # of a step, for each request in it, of a prompt token


class BatchingServer(NamedTuple):
    """At most `max_num_seqs` requests run, and the others wait. All that run get a token in each step."""

    max_num_seqs: int
    lengths: Lengths
    wander: float = 0.0  # standard deviation of its speed, which returns to the mean within some 50 steps
    failed: float = 0.0  # share of the requests that end with an error


def fixed(output: int) -> Lengths:
    return lambda dice: (60, output)


def uniform(low: int, high: int) -> Lengths:
    return lambda dice: (dice.randint(20, 200), dice.randint(low, high))


def exponential(mean: float, most: int = 400) -> Lengths:
    return lambda dice: (dice.randint(100, 1000), min(most, 1 + int(dice.expovariate(1 / mean))))


def short_or_long(short: int, long: int, share_long: float) -> Lengths:
    return lambda dice: (60, long if dice.random() < share_long else short)


class _Clients:
    """Who sends what when: each user sends its next requests when all of the ones before have ended."""

    def __init__(self, load: Load, total: int, dice: random.Random) -> None:
        self.load, self.total, self.dice = load, total, dice
        self.in_flight_each = load.in_flight or load.batch_size or 1
        self.on_the_way: list[tuple[float, int, int]] = []  # when it arrives, its number, its user
        self.sent_s: list[float] = []
        self.left: dict[int, int] = {}
        for user in range(load.users):
            self._send(user, self.in_flight_each, self._thinks() if load.think_s else 0.0)

    def ended(self, user: int, now_s: float) -> None:
        self.left[user] -= 1
        if self.load.in_flight:
            self._send(user, 1, now_s + 0.0005)
        elif not self.left[user]:
            self._send(user, self.in_flight_each, now_s + self._thinks() + 0.0005)

    def _thinks(self) -> float:
        return self.dice.uniform(*self.load.think_s) if self.load.think_s else 0.0

    def _send(self, user: int, requests: int, now_s: float) -> None:
        if self.load.duration_s is not None and now_s > self.load.duration_s:
            return
        for _ in range(min(requests, self.total - len(self.sent_s))):
            arrives_s = now_s + self.dice.expovariate(1 / NETWORK_S)
            heapq.heappush(self.on_the_way, (arrives_s, len(self.sent_s), user))
            self.sent_s.append(now_s)
            self.left[user] = self.left.get(user, 0) + 1


def served(
    server: BatchingServer, load: Load, dice: random.Random, *, requests: int, warmup: int = 0, speed: float = 1.0
) -> CellData:
    """The records of a cell with so many requests, of which `warmup` do not count; fewer where the time ends before."""
    clients = _Clients(load, requests, dice)
    lengths, ends_s = [server.lengths(dice) for _ in range(requests)], dict[int, float]()
    waiting: list[tuple[float, int, int]] = []
    running: list[tuple[int, int, int]] = []  # at which step it ends, its number, its user
    now_s, step, state = 0.0, 0, dice.gauss(0, server.wander)
    while clients.on_the_way or waiting or running:
        while clients.on_the_way and clients.on_the_way[0][0] <= now_s:
            waiting.append(heapq.heappop(clients.on_the_way))
        factor = speed * math.exp(state)
        while waiting and len(running) < server.max_num_seqs:
            _, number, user = waiting.pop(0)
            prompt, output = lengths[number]
            heapq.heappush(running, (step + output, number, user))
            now_s += PREFILL_TOKEN_S * prompt / factor
        if not running:
            now_s = clients.on_the_way[0][0]
            continue
        step_s, steps = (DECODE_S + DECODE_EACH_S * len(running)) / factor, running[0][0] - step
        if len(running) < server.max_num_seqs and clients.on_the_way:
            steps = min(steps, max(1, math.ceil((clients.on_the_way[0][0] - now_s) / step_s)))
        now_s, step = now_s + steps * step_s, step + steps
        kept = 0.98**steps
        state = kept * state + dice.gauss(0, server.wander * math.sqrt(1 - kept**2))
        while running and running[0][0] <= step:
            _, number, user = heapq.heappop(running)
            ends_s[number] = now_s + dice.expovariate(1 / NETWORK_S)
            clients.ended(user, ends_s[number])
    sent_s = np.array(clients.sent_s)
    return cell_of(
        sent_s,
        np.array([ends_s[number] for number in range(len(sent_s))]),
        np.array(lengths[: len(sent_s)]),
        warmup=warmup,
        failed=[dice.random() < server.failed for _ in sent_s],
    )


def cell_of(sent_s: Any, ended_s: Any, lengths: Any, *, warmup: int = 0, failed: Any = None) -> CellData:
    """The data of a cell, from times on one axis; the first requests are its warm-up."""
    size = len(sent_s)
    rows = Rows(
        place=np.arange(size),
        index=np.arange(size),
        measured=np.arange(size) >= warmup,
        sent_s=sent_s,
        ended_s=ended_s - sent_s,
        prompt_tokens=lengths[:, 0].astype(np.float64),
        output_tokens=lengths[:, 1].astype(np.float64),
        error=Words.of(["http" if bad else None for bad in (failed or [False] * size)]),
    )
    return CellData(clock=Clock([]), rows=rows, gaps=Gaps(), fetch=lambda places: iter(()))
