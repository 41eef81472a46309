"""A pure model of an engine with continuous batching. It has no clock and no sockets: times are numbers.

docs/simulated.md has the formula of a step's time and the source of each preset. Scheduling follows vLLM's V1 scheduler
(`vllm/v1/core/sched/scheduler.py`): running requests come first; when blocks run out, the youngest is preempted; if
none was, waiting requests are admitted in the order of their arrival.
"""

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import takewhile

import msgspec


def block_hashes(tokens: Seq[int], block_size: int, prefix_hashes: Seq[int] = ()) -> list[int]:
    """Return chained hashes of the full blocks of `tokens`. `prefix_hashes` are the first ones, already computed."""
    hashes = list(prefix_hashes)
    parent = hashes[-1] if hashes else 0
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, *tokens[start : start + block_size]))
        hashes.append(parent)
    return hashes


class BlockPool:
    """A KV cache of `blocks` blocks of `block_size` tokens, with shared prefixes. Evicts the least recently used block.

    A block is free if no request refers to it, even if it is cached. As in vLLM V1
    (https://docs.vllm.ai/en/latest/design/prefix_caching.html), a full block is identified by the hash of its tokens
    and of the block before it, a block that no request uses stays cached until its place is needed, and a request
    releases its last block first, so that the tail of a prompt is evicted before its head.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._references = [0] * blocks
        self._hash_of: list[int | None] = [None] * blocks
        self._cached: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use by requests, 0 to 1 (vLLM's kv_cache_usage_perc)."""
        return 1 - len(self._free) / self.blocks

    def match(self, hashes: Seq[int]) -> list[int]:
        """Return the cached blocks of the longest known prefix."""
        cached = takewhile(self._cached.__contains__, hashes)
        return [self._cached[value] for value in cached]

    def take(self, blocks: list[int], tokens: int, shared: Seq[int] = ()) -> bool:
        """Extend `blocks` to hold `tokens` tokens, first by the `shared` cached blocks. Return whether they fit."""
        needed = -(-tokens // self.block_size) - len(blocks) - len(shared)
        unused = sum(self._references[block] == 0 for block in shared)
        if needed > len(self._free) - unused:
            return False
        for block in shared:
            self._free.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        for _ in range(needed):
            block, _ = self._free.popitem(last=False)
            old_hash = self._hash_of[block]
            if old_hash is not None:
                del self._cached[old_hash]
                self._hash_of[block] = None
            self._references[block] = 1
            blocks.append(block)
        return True

    def remember(self, blocks: Seq[int], hashes: Seq[int]) -> None:
        """Make full blocks findable by their hashes."""
        for block, value in zip(blocks, hashes, strict=False):
            if self._hash_of[block] is None and value not in self._cached:
                self._hash_of[block] = value
                self._cached[value] = block

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
        blocks.clear()


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of the model. Names follow vLLM's flags where vLLM has one; times are seconds."""

    step_base_s: float
    step_per_sequence_s: float
    prefill_per_token_s: float
    step_per_kv_token_s: float = 0.0
    preemption_s: float = 0.0
    compile_s: float = 0.0  # extra time of each of the first steps of a shape ...
    compile_steps: int = 1  # ... and the number of these steps
    num_speculative_tokens: int = 0  # that are drafted for each request in each decode step ...
    acceptance_rate: float = 0.0  # ... each accepted with this probability, if those before it were ...
    draft_per_token_s: float = 0.0  # ... and the time of each, accepted or not
    jitter: float = 0.0
    slowdown: float = 1.0
    seed: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    max_model_len: int = 8192
    block_size: int = 16
    num_gpu_blocks: int = 4096
    enable_prefix_caching: bool = True

    def step_s(self, sequences: int, context: int, prefill: int, preempted: int, drafted: int = 0) -> float:
        """Seconds of a step, without jitter and compilation."""
        return (
            self.step_base_s
            + self.step_per_sequence_s * sequences
            + self.step_per_kv_token_s * context
            + self.prefill_per_token_s * prefill
            + self.preemption_s * preempted
            + self.draft_per_token_s * drafted
        ) * self.slowdown

    def problem(self) -> str | None:
        """Return what makes these parameters impossible; None if they are possible."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_gpu_blocks"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, got {getattr(self, name)}"
        for name in self.__struct_fields__:
            if name != "seed" and getattr(self, name) < 0:
                return f"{name} must not be negative, got {getattr(self, name)}"
        if self.acceptance_rate > 1:
            return f"acceptance_rate must be at most 1, got {self.acceptance_rate}"
        if self.slowdown <= 0 or self.step_base_s + self.step_per_sequence_s <= 0:
            return "a step must take time: step_base_s + step_per_sequence_s and slowdown must be above 0"
        tokens = self.num_gpu_blocks * self.block_size
        if self.max_model_len > tokens:
            return (
                f"The model's max seq len ({self.max_model_len}) is larger than the maximum number of tokens that "
                f"can be stored in KV cache ({tokens}). Lower --max-model-len or raise --num-gpu-blocks-override"
            )
        return None


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the GPU, in GiB, and what takes it besides the KV cache."""

    total_gib: float
    free_gib: float
    weights_gib: float
    block_gib: float  # of a block of the KV cache
    batched_token_gib: float  # activations, for each token of max_num_batched_tokens
    sequence_gib: float  # for each of max_num_seqs

    def problem(self, utilization: float) -> str | None:
        """Return why an engine does not start with this share of the memory, as vLLM says it; None: it starts."""
        if not 0 < utilization <= 1:
            return f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}"
        if (wanted := self.total_gib * utilization) <= self.free_gib:
            return None
        return (
            f"Free memory on device ({self.free_gib:.2f}/{self.total_gib:.2f} GiB) on startup is less than desired GPU "
            f"memory utilization ({utilization}, {wanted:.2f} GiB). Decrease GPU memory utilization or reduce GPU "
            "memory used by other processes."
        )

    def blocks(self, utilization: float, config: EngineConfig) -> int:
        """Return the number of blocks of the KV cache, which is 0 or less where nothing is left for it."""
        other = self.weights_gib + self.batched_token_gib * config.max_num_batched_tokens
        other += self.sequence_gib * config.max_num_seqs
        return int((self.total_gib * utilization - other) / self.block_gib)


class Sequence:
    """One request in the engine. `tokens` are the prompt and the answer so far; `computed` of them are in the cache."""

    __slots__ = ("acceptance_rate", "arrived_s", "blocks", "cached_tokens", "computed", "first_token_s", "hashes",
                 "key", "output_tokens", "preemptions", "prompt_tokens", "scheduled_s", "target", "tokens")  # fmt: skip

    def __init__(self, key: int, prompt: Seq[int], target: int, arrived_s: float,
                 acceptance_rate: float | None = None) -> None:  # fmt: skip
        self.key = key
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.output_tokens = 0
        self.target = target
        self.computed = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.blocks: list[int] = []
        self.hashes: list[int] = []
        self.arrived_s = arrived_s
        self.acceptance_rate = acceptance_rate  # None: that of the engine
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None


class Step(msgspec.Struct, frozen=True):
    """A planned step: its duration, and the number of tokens that it computes for each request."""

    duration_s: float
    work: list[tuple[Sequence, int]]


class SimulatedEngine:
    """Waiting queue, running batch and KV cache. `begin` plans a step, `complete` returns its tokens."""

    def __init__(self, config: EngineConfig) -> None:
        if problem := config.problem():
            raise ValueError(problem)
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks, config.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.drafts = 0  # steps of a request with drafted tokens
        self.drafted = 0
        self.accepted = 0
        self._chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._random = random.Random(config.seed)
        self._shapes: Counter[tuple[int, int]] = Counter()  # steps of each shape

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Its prompt and target must fit into `max_model_len`."""
        if sequence.prompt_tokens + sequence.target > self.config.max_model_len or sequence.prompt_tokens < 1:
            raise ValueError(f"{sequence.prompt_tokens} + {sequence.target} tokens do not fit the context")
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Remove a request. Do nothing if it is not in the engine."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pool.release(sequence.blocks)

    def begin(self, now: float) -> Step | None:
        """Plan the step that starts at `now`; return None if there is nothing to do."""
        work: list[tuple[Sequence, int]] = []
        budget, preempted = self._schedule_running(work)
        if not preempted:
            self._admit(work, budget, now)
        if not work and not preempted:
            return None
        return self._time_step(work, preempted)

    def complete(self, step: Step, end: float) -> Iterator[Sequence]:
        """Note that the step is computed. Yield a request at each of its output tokens, in the order of the batch."""
        for sequence, count in step.work:
            if not sequence.blocks:
                continue  # aborted while the step ran
            sequence.computed += count
            if sequence.computed < len(sequence.tokens):
                continue
            accepted = self._accept(self._drafts(sequence, count), sequence.acceptance_rate)
            for number in range(1 + accepted):
                sequence.output_tokens += 1
                sequence.computed += number > 0
                if sequence.first_token_s is None:
                    sequence.first_token_s = end
                if sequence.output_tokens >= sequence.target:
                    self.running.remove(sequence)
                    self.pool.release(sequence.blocks)
                else:
                    sequence.tokens.append(-sequence.output_tokens)  # the caller may put the real token here
                yield sequence
                if not sequence.blocks:
                    break  # complete, or aborted by the caller

    def _drafts(self, sequence: Sequence, count: int) -> int:
        """Return the number of tokens that a step drafts for a request of which it computes `count` tokens."""
        is_decode = count == 1 and sequence.output_tokens > 0
        return min(self.config.num_speculative_tokens, sequence.target - sequence.output_tokens - 1) * is_decode

    def _accept(self, drafted: int, own_rate: float | None) -> int:
        accepted, rate = 0, self.config.acceptance_rate if own_rate is None else own_rate
        while accepted < drafted and self._random.random() < rate:
            accepted += 1
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        return accepted

    def _schedule_running(self, work: list[tuple[Sequence, int]]) -> tuple[int, int]:
        """Add the running requests to `work`. Return the token budget that remains, and the number of preemptions."""
        budget, preempted, index = self.config.max_num_batched_tokens, 0, 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = min(len(sequence.tokens) - sequence.computed, budget, self._chunk)
            fits = self._grow(sequence, count)
            while not fits:
                victim = self.running.pop()
                self._preempt(victim)
                preempted += 1
                if victim is sequence:
                    break
                fits = self._grow(sequence, count)
            if not fits:
                break
            work.append((sequence, count))
            budget -= count
            index += 1
        return budget, preempted

    def _admit(self, work: list[tuple[Sequence, int]], budget: int, now: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            shared = self._cached_prefix(sequence)
            hit = len(shared) * self.config.block_size
            count = min(len(sequence.tokens) - hit, budget, self._chunk)
            if not self.pool.take(sequence.blocks, hit + count, shared):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.computed = hit
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
                sequence.cached_tokens = hit
                self.prefix_queries += len(sequence.tokens) if self.config.enable_prefix_caching else 0
                self.prefix_hits += hit
            self._remember(sequence, count)
            work.append((sequence, count))
            budget -= count

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        if not self.config.enable_prefix_caching:
            return []
        size = self.config.block_size
        sequence.hashes = block_hashes(sequence.tokens, size, sequence.hashes)
        # the last token is always computed: without it there is nothing to sample from
        return self.pool.match(sequence.hashes[: (len(sequence.tokens) - 1) // size])

    def _grow(self, sequence: Sequence, count: int) -> bool:
        if not self.pool.take(sequence.blocks, sequence.computed + count):
            return False
        self._remember(sequence, count)
        return True

    def _remember(self, sequence: Sequence, count: int) -> None:
        if not self.config.enable_prefix_caching:
            return
        full = (sequence.computed + count) // self.config.block_size
        if full > len(sequence.hashes):
            sequence.hashes = block_hashes(sequence.tokens, self.config.block_size, sequence.hashes)
        self.pool.remember(sequence.blocks, sequence.hashes[:full])

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _time_step(self, work: list[tuple[Sequence, int]], preempted: int) -> Step:
        config = self.config
        prefill = sum(count for sequence, count in work if not (count == 1 and sequence.output_tokens))
        context = sum(sequence.computed + count for sequence, count in work)
        drafted = sum(self._drafts(sequence, count) for sequence, count in work) if config.num_speculative_tokens else 0
        duration = config.step_s(len(work), context, prefill, preempted, drafted)
        if config.jitter:
            duration *= 1 + config.jitter * max(-3.0, min(3.0, self._random.gauss(0, 1)))
        duration += self._compile_s(len(work), prefill)
        return Step(duration, work)

    @property
    def shapes(self) -> Counter[tuple[int, int]]:
        """How many steps of each shape have run."""
        return self._shapes

    def _compile_s(self, sequences: int, prefill: int) -> float:
        """Return the extra time of a step, one of the first of its shape."""
        if not self.config.compile_s:
            return 0.0
        shape = (sequences - 1).bit_length(), max(0, prefill - 1).bit_length()
        self._shapes[shape] += 1
        return self.config.compile_s * (self._shapes[shape] <= self.config.compile_steps)


DEFAULT_PRESET = "strix-halo-qwen3.5-0.8b"

PRESETS: dict[str, EngineConfig] = {
    "strix-halo-qwen3.5-0.8b": EngineConfig(
        step_base_s=0.007408,
        step_per_sequence_s=0.003021,
        step_per_kv_token_s=6e-8,
        prefill_per_token_s=40e-6,
        preemption_s=0.25,
        jitter=0.01,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=128,
        max_model_len=2048,
        num_gpu_blocks=136,
        enable_prefix_caching=False,
    ),
    "instant": EngineConfig(
        step_base_s=0.002,
        step_per_sequence_s=0.0,
        prefill_per_token_s=0.0,
        max_num_batched_tokens=131072,
        max_model_len=131072,
        num_gpu_blocks=65536,
    ),
}

# With a gpu_memory_utilization of 0.75 and the preset's other settings, the caches have the sizes above.
MEMORY: dict[str, EngineMemory] = {
    "strix-halo-qwen3.5-0.8b": EngineMemory(
        total_gib=96, free_gib=76.45, weights_gib=1.7, block_gib=0.428, batched_token_gib=1 / 256, sequence_gib=1 / 64
    ),
    "instant": EngineMemory(
        total_gib=96, free_gib=76.45, weights_gib=1.7, block_gib=1 / 1024, batched_token_gib=0, sequence_gib=1 / 64
    ),
}
