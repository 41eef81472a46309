"""Run directories measured on the embedded engine in virtual time: no socket, no process, no waiting.

`write_engine_run` drives `SimulatedEngine` step by step with the requests of the scenario's loads, and writes records,
samples of the server's metrics and a manifest as `harness run` does. The same arguments give the same files.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from harness.records.manifest import Run, ServedBy, Startup
from harness.records.records import Request, read_marks
from harness.records.samples import MetricsSample, TelemetrySample
from harness.scenario import Gateway, Load, Prompts, Scenario, Server
from harness.scenario.behaviour import abandon_of
from harness.scenario.plan import Cell
from harness.simulated.engine import PRESETS, EngineConfig, SimulatedEngine
from harness.simulated.engine import Sequence as Running
from tests.support.made_runs import MONOTONIC_S, WALL_S, served_by, write_lines, write_made_run

SAMPLE_S = 0.25
STRIX = PRESETS["strix-halo-qwen3.5-0.8b"]
# A machine without a weak point: the cache and the sequences suffice for all loads of these tests.
HEALTHY = msgspec.structs.replace(STRIX, num_gpu_blocks=4096, max_model_len=4096, long_prefill_token_threshold=0)


class EngineSetup(Struct, frozen=True, kw_only=True):
    """A server of a run: the engine, what is around it, and what its manifest says."""

    engine: EngineConfig = HEALTHY
    api_s: float = 0.0  # what the API process or a gateway adds to each request
    deaf: bool = False  # a request whose user leaves is computed to its end
    served: dict[str, Any] = {}  # fields of ServedBy
    startup: dict[str, Any] = {}  # fields of Startup
    telemetry: Callable[[Cell, float], Sequence[TelemetrySample]] = lambda cell, wall_s: ()
    change: Callable[[EngineConfig, float], EngineConfig] | None = None  # of the engine with the time, in seconds
    marks: dict[str, float] = {}  # fields of the end mark of each load process
    gateway: bool = False
    log: str = ""  # of the server
    variables: dict[str, Any] = {}


class _Now(Struct):
    """A request in the engine."""

    sequence: Running
    user: int
    index: int
    turn: int
    conversation: int
    sent_s: float
    chunks_s: list[float] = []
    stays: int | None = None  # chunks after which the user leaves
    has_left: bool = False


def write_engine_run(
    folder: Path,
    servers: dict[str, EngineSetup],
    loads: dict[str, Load],
    *,
    prompt_tokens: int = 100,
    repeats: int = 2,
    seed: int = 42,
    measured: Callable[[Request], Request] = lambda one: one,
    checks: Sequence[str] = (),
    warmup: int = 0,
    template: str | None = "simulated",
    **manifest: Any,
) -> Run:
    """Measure each load on each server. `measured`: changes each record; `template`: None is a server that ran already.

    Loads: batch with `batch_size` or `in_flight`, chat with `users`, `turns`, `think_s` and `abandon.after_tokens`; all
    with `requests`.
    """
    samples: list[MetricsSample] = []
    telemetry: list[TelemetrySample] = []

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        setup, load = servers[cell.server], made.loads[cell.load]
        drive = _Drive(setup, load, prompt_tokens, random.Random(f"{seed} {cell.id}"))
        drive.run()
        wall_s = WALL_S + start_s - MONOTONIC_S
        samples.extend(MetricsSample(wall_s + at_s, cell.id, values) for at_s, values in drive.samples)
        telemetry.extend(setup.telemetry(cell, wall_s))
        made_of = [measured(_record(one, cell, load, setup, process, start_s)) for one in drive.done]
        return [msgspec.structs.replace(one, phase="warmup") if one.index < warmup else one for one in made_of]

    def served(cell: Cell) -> ServedBy:
        setup = servers[cell.server]
        startup: dict[str, Any] = {
            "engine": "simulated", "max_model_len": setup.engine.max_model_len,
            "kv_cache_tokens": setup.engine.num_gpu_blocks * setup.engine.block_size,
        }  # fmt: skip
        known: dict[str, Any] = {
            "template": template, "image": None, "image_digest": None, "arguments": [],
            "simulated": True, "startup": Startup(**(startup | setup.startup)),
            "effective": msgspec.to_builtins(setup.engine),
        }  # fmt: skip
        return served_by(**(known | setup.served))

    made = Scenario(
        version=1,
        question="Which is faster?",
        model="m",
        servers={
            name: Server(
                template=template or "simulated",
                variables=setup.variables,
                gateway=Gateway(template="litellm") if setup.gateway else None,
            )
            for name, setup in servers.items()
        },
        checks=list(checks),
        max_error_rate=1.0,
        loads=loads,
        repeats=repeats,
        prompts=Prompts(tokens=prompt_tokens),
        seed=seed,
    )
    run = write_made_run(folder, made_of=made, requests=requests, served=served, **manifest)
    (folder / "logs").mkdir()
    for of_run in run.cells:
        (folder / "logs" / f"{of_run.id}.server.log").write_text(servers[of_run.server].log)
    write_lines(folder / "metrics.jsonl", samples)
    if any(setup.marks for setup in servers.values()):
        of_cell = {cell.id: servers[cell.server].marks for cell in run.cells}
        found = [
            msgspec.structs.replace(one, **of_cell[one.cell]) if one.event == "end" else one
            for one in read_marks(folder / "processes.jsonl")
        ]
        write_lines(folder / "processes.jsonl", found)
    if telemetry:
        write_lines(folder / "telemetry.jsonl", telemetry)
    return run


def _record(one: _Now, cell: Cell, load: Load, setup: EngineSetup, process: int, start_s: float) -> Request:
    late_s = setup.api_s
    chunks_s = [at_s - one.sent_s + late_s for at_s in one.chunks_s]
    left: dict[str, Any] = {"error": "abandoned", "message": "left", "output_tokens": None, "finish": None}
    full: dict[str, Any] = {"output_tokens": one.sequence.output_tokens, "finish": "length"}
    return Request(
        id=f"{cell.id}-{one.index}", cell=cell.id, load=cell.load, user_class="BatchAgent", index=one.index,
        user=one.user, process=process, phase="measured", sent_s=start_s + one.sent_s, ended_s=chunks_s[-1],
        clock="kernel", conversation=one.conversation, turn=one.turn, headers_s=min(0.001, chunks_s[0]),
        chunks_s=chunks_s, first_visible_s=chunks_s[0], asked_tokens=one.sequence.target, fixed_length=True,
        prompt_tokens=one.sequence.prompt_tokens, cached_tokens=one.sequence.cached_tokens or None, status=200,
        **(left if one.has_left else full),
    )  # fmt: skip


class _Drive:
    """One load on one engine."""

    def __init__(self, setup: EngineSetup, load: Load, prompt_tokens: int, dice: random.Random) -> None:
        self.setup, self.load, self.prompt_tokens, self.dice = setup, load, prompt_tokens, dice
        self.engine = SimulatedEngine(msgspec.structs.replace(setup.engine, seed=dice.randrange(1 << 30)))
        self.done: list[_Now] = []
        self.samples: list[tuple[float, dict[str, float]]] = []
        self.totals = dict.fromkeys(
            ("prompt_tokens", "generated_tokens", "queue_s", "prefill_s", "decode_s", "timed_requests"), 0.0
        )
        self._open: dict[int, _Now] = {}  # by the key of the sequence
        self._due: list[tuple[float, int, int]] = []  # time, user, turn
        self._talk: dict[int, list[int]] = {}  # of each user's conversation so far
        self._sent = 0
        self._left = dict[int, int]()  # of each user's burst

    def run(self) -> None:
        users = 1 if self.load.user == "batch" else self.load.users
        each = (self.load.in_flight or self.load.batch_size or 1) if self.load.user == "batch" else 1
        for user in range(users):
            for _ in range(each):
                heapq.heappush(self._due, (self._think_s(), user, 1))
            self._left[user] = each
        now, next_sample = 0.0, 0.0
        self._sample(-1.0)
        while True:
            while self._due and self._due[0][0] <= now:
                self._send(*heapq.heappop(self._due))
            step = self.engine.begin(now)
            if step is None:
                if not self._due:
                    break
                now = self._due[0][0]
                continue
            if now >= next_sample:
                self._sample(now)
                next_sample = now + SAMPLE_S
            now += step.duration_s
            for sequence in self.engine.complete(step, now):
                self._deliver(sequence, now)
            if self.setup.change is not None:
                self.engine.config = self.setup.change(self.setup.engine, now)
        self._sample(now + 1.0)

    def _think_s(self) -> float:
        low, high = self.load.think_s or (0.0, 0.0)
        return self.dice.uniform(low, high)

    def _send(self, at_s: float, user: int, turn: int) -> None:
        if self._sent >= (self.load.requests or 1):
            return
        if turn == 1:
            self._talk[user] = []
        start = self._sent * 100_000 + 1
        prompt = self._talk[user] + list(range(start, start + self.prompt_tokens))
        target = self.load.output_tokens
        assert isinstance(target, int)
        one = _Now(Running(self._sent, prompt, target, at_s), user, self._sent, turn, self._sent - turn + 1, at_s)
        leave = abandon_of(self.load.abandon, 42, self._sent)
        one.stays = None if leave is None else leave.after_tokens
        self._open[self._sent] = one
        self._sent += 1
        self.engine.add(one.sequence)

    def _deliver(self, sequence: Running, now: float) -> None:
        one = self._open[sequence.key]
        self.totals["generated_tokens"] += 1
        if not one.has_left:
            one.chunks_s = [*one.chunks_s, now] if len(one.chunks_s) < 2 else _grown(one.chunks_s, now)
        if not one.has_left and one.stays == len(one.chunks_s):
            one.has_left = True
            self.done.append(one)
            self._next(one, now)
            if not self.setup.deaf:
                self.engine.abort(sequence)
                del self._open[sequence.key]
                return
        if sequence.output_tokens == 1:
            self.totals["prompt_tokens"] += sequence.prompt_tokens
        if sequence.output_tokens < sequence.target:
            return
        assert sequence.scheduled_s is not None and sequence.first_token_s is not None
        self.totals["queue_s"] += sequence.scheduled_s - sequence.arrived_s
        self.totals["prefill_s"] += sequence.first_token_s - sequence.scheduled_s
        self.totals["decode_s"] += now - sequence.first_token_s
        self.totals["timed_requests"] += 1
        self._open.pop(sequence.key)
        if one.has_left:
            return
        self.done.append(one)
        self._talk[one.user] = list(sequence.tokens)
        self._next(one, now + self.setup.api_s)

    def _next(self, one: _Now, now: float) -> None:
        if self.load.user == "batch" and self.load.batch_size and not self.load.in_flight:
            self._left[one.user] -= 1
            if not self._left[one.user]:
                self._left[one.user] = self.load.batch_size
                for _ in range(self.load.batch_size):
                    heapq.heappush(self._due, (now, one.user, 1))
            return
        last = one.turn >= (self.load.turns or 1)
        heapq.heappush(self._due, (now + self._think_s(), one.user, 1 if last else one.turn + 1))

    def _sample(self, at_s: float) -> None:
        engine = self.engine
        values = {
            "running": float(len(engine.running)), "waiting": float(len(engine.waiting)),
            "kv_usage": engine.pool.usage, "preemptions": float(engine.preemptions),
            "prefix_queries": float(engine.prefix_queries), "prefix_hits": float(engine.prefix_hits),
        }  # fmt: skip
        if engine.config.num_speculative_tokens:
            values |= {"drafted_tokens": float(engine.drafted), "accepted_tokens": float(engine.accepted)}
        self.samples.append((at_s, values | self.totals))


def _grown(times: list[float], now: float) -> list[float]:
    times.append(now)
    return times
